"""The loss inside the model: only labelled positions pass through the head, in chunks if their logits are many."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from cookbook.config.objectives.forward import FunctionOfLogits
from cookbook.facts.score_head import backbone_of, head_of, is_scored
from cookbook.system.files import RecipeError
from cookbook.training.models.attention import PACKED, Lengths, Segments, shared_row
from cookbook.training.models.chunks import LOGITS_BUDGET, OF_BACKWARD, OF_FROZEN
from cookbook.training.models.logits import (
    PLAIN,
    WHOLE,
    HeadLogits,
    Kernels,
    Reading,
    VocabularyPart,
    gradient_of_losses,
    in_turn,
    losses_of,
    transform_logits,
)
from cookbook.training.models.mixers import packed_row
from cookbook.training.models.sample_draws import drawn_row
from cookbook.training.models.structure import LogitTransform, logit_transform


class LossHead(torch.nn.Linear):
    """An output head that returns the loss if it gets targets.

    Engines gather the head's weight around the call of this module only, so loss and chunks must be inside it.
    """

    kernels: Kernels | None = None
    """Functions in the place of `PLAIN`."""
    in_chunks = staticmethod(in_turn)
    """A forecast has its own, see `Reading`."""

    def forward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor | None = None,
        transform: LogitTransform | None = None,
        rows: tuple[int, torch.Tensor] | None = None,
        function: FunctionOfLogits | None = None,
    ) -> Any:
        """(L, hidden size) -> negative log-likelihoods, (L,) float32; with a function, its results; with neither
        function nor targets, the logits before `transform`.

        Args:
            transform: what the model does to the logits, which the losses have.
            rows: others in the place of those of the weight, from this number on; an adapter trains them.
        """
        weight = self.weight
        if rows is not None:
            first, own = rows
            weight = torch.cat([weight[:first], own.to(weight.dtype), weight[first + len(own) :]])
        if targets is None and function is None:
            return F.linear(hidden, weight, self.bias)
        return self._loss(hidden, weight, self.bias, targets, function, transform)

    def _loss(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor | None,
        function: FunctionOfLogits | None,
        transform: LogitTransform | None,
        part: VocabularyPart = WHOLE,
    ) -> Any:
        # A head that an adapter trains is float32, and without autocast the hidden states may not be.
        device = hidden.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        reading = Reading(transform, self.kernels or PLAIN, part, self.in_chunks)
        hidden = hidden.to(autocast or weight.dtype)
        with torch.autocast(device, enabled=False):  # CUDA's would make probabilities float32
            results = _LossOfHead.apply(
                hidden, weight, bias, function or _Likelihood(targets), reading, torch.is_grad_enabled()
            )
        return results[0] if function is None else results


class _Likelihood:
    """The function of a loss that is the negative log-likelihood of the targets."""

    def __init__(self, targets: torch.Tensor | None) -> None:
        self.targets = targets

    def __call__(self, logits: HeadLogits, rows: slice) -> tuple[torch.Tensor, ...]:
        assert self.targets is not None
        return (logits.nll(self.targets[rows]),)


class ScoreHead(torch.nn.Linear):
    """A head whose scores are float32, of products as every engine makes them: of weights in the dtype of the hidden
    states, which FSDP2 gathers so."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(L, hidden size) -> (L, k) float32."""
        device = hidden.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        with torch.autocast(device, enabled=False):
            # In 16 bits a score would have three digits, and its difference from another one or two.
            return F.linear(hidden.to(low).float(), self.weight.to(low).float())


class ShardedLossHead(LossHead):
    """A `LossHead` of which tensor parallel gives each rank some rows."""

    whole_logits: Callable[[torch.Tensor], torch.Tensor]
    """transformers' forward, which gathers the logits of the vocabulary."""

    def forward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor | None = None,
        transform: LogitTransform | None = None,
        rows: tuple[int, torch.Tensor] | None = None,
        function: FunctionOfLogits | None = None,
    ) -> Any:
        """As of `LossHead`; collective over the tensor-parallel group, whose ranks pass the same."""
        if targets is None and function is None:
            return _with_columns(self.whole_logits(hidden), hidden, rows)
        assert isinstance(self.weight, DTensor)
        part, weight = _part_of(self.weight), self.weight.to_local(grad_placements=[Shard(0)])
        if rows is not None:
            weight = _with_rows(weight, *rows, part)
        bias = self.bias.to_local(grad_placements=[Shard(0)]) if isinstance(self.bias, DTensor) else None
        return self._loss(hidden, weight, bias, targets, function, transform, part)


def _part_of(weight: DTensor) -> VocabularyPart:
    mesh = weight.device_mesh
    assert mesh.ndim == 1 and weight.placements == (Shard(0),), f"a head over {mesh}, {weight.placements}"
    width = -(-len(weight) // mesh.size())  # of all ranks but the last ones, as torch.chunk divides
    start = min(mesh.get_local_rank() * width, len(weight))
    return VocabularyPart(start, width, len(weight), mesh.get_group())


def _with_rows(weight: torch.Tensor, first: int, rows: torch.Tensor, part: VocabularyPart) -> torch.Tensor:
    """The rows of a part of a head, with others in the place of those from token `first` on; every rank has all the
    others."""
    low, high = (min(max(token - part.start, 0), len(weight)) for token in (first, first + len(rows)))
    own = _SharedRows.apply(rows, part.group)[part.start + low - first : part.start + high - first]
    return torch.cat([weight[:low], own.to(weight.dtype), weight[high:]])


class _SharedRows(torch.autograd.Function):
    """Rows that all ranks of a group have, and of which each uses some: the gradient is a sum over all. Collective."""

    @staticmethod
    def forward(ctx: Any, shared: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return shared.view_as(shared)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


def _with_columns(logits: torch.Tensor, hidden: torch.Tensor, rows: tuple[int, torch.Tensor] | None) -> torch.Tensor:
    """(L, V) logits with those of other rows of the head, from token `rows[0]` on."""
    if rows is None:
        return logits
    first, own = rows
    of_own = F.linear(hidden, own.to(hidden.dtype))
    return torch.cat([logits[..., :first], of_own, logits[..., first + len(own) :]], -1)


class _LossOfHead(torch.autograd.Function):
    """The product with the head's weight and a function of the logits in one step, as in Liger's fused linear
    cross-entropy (Hsu et al., 2024, arXiv:2410.10989), whose gradient of the logits never exists in float32 either.

    The function's first result is the loss of each position, which depends on the logits there alone; autograd has its
    gradient. The others are reported, without a gradient.

    Above the budget, logits exist for one chunk of rows at a time, and the backward computes them again. Each position
    may have a gradient of its own: it scales what is small, the hidden states before the product for the weight's
    gradient and those after the other product, and not the logits. A head that is not trained has the other product
    alone, so the forward makes it at once, as Liger does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        function: FunctionOfLogits,
        reading: Reading,
        has_backward: bool,
    ) -> tuple[torch.Tensor, ...]:
        cast, width = weight.to(hidden.dtype), reading.part.width or len(weight)
        # A gradient in float16 is not rounded before the loss scale.
        is_frozen = not any(ctx.needs_input_grad[1:3]) and hidden.dtype != torch.float16
        chunks = _chunks(len(hidden), width, LOGITS_BUDGET // OF_FROZEN if is_frozen else LOGITS_BUDGET)
        # The gradient of the logits is kept of one chunk, and of none where the hidden states' follows at once.
        with_gradient = has_backward and (is_frozen or len(chunks) == 1)
        finishes = with_gradient and is_frozen

        def evaluate_rows(rows: slice) -> _Evaluation:
            part = _evaluate(function, _logits(hidden[rows], cast, bias), rows, reading, with_gradient=with_gradient)
            if finishes:
                assert part.gradient is not None
                return part._replace(known=[], gradient=part.gradient @ cast)
            return part

        parts: list[_Evaluation] = reading.in_chunks(evaluate_rows, chunks)
        results = tuple(map(torch.cat, zip(*(part.results for part in parts), strict=True)))
        ctx.function, ctx.reading = function, reading
        ctx.mark_non_differentiable(*results[1:])
        if finishes:
            ctx.save_for_backward(torch.cat([part.gradient for part in parts if part.gradient is not None]))
            return results
        known = parts[0].known
        if len(parts) > 1:
            known = [torch.cat(values, 1) for values in zip(*(part.known for part in parts), strict=True)]
        ctx.save_for_backward(hidden, weight, bias, parts[0].gradient, *known)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if len(ctx.saved_tensors) == 1:
            (unweighed,) = ctx.saved_tensors
            weighed = (unweighed * gradients[0].unsqueeze(1)).to(unweighed.dtype)
            return _of_all_parts([weighed], ctx.reading.part), *[None] * 5
        hidden, weight, bias, kept, *known = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        cast, reading = weight.to(hidden.dtype), ctx.reading
        # The likelihood in bf16 makes nothing of float32 here but what `transformed` does, so that the bytes of the
        # forward hold twice as many rows.
        is_small = hidden.dtype == torch.bfloat16 and reading.transform is None and type(ctx.function) is _Likelihood
        of_weight, of_bias = None, None

        def of_hidden(rows: slice) -> torch.Tensor | None:
            nonlocal of_weight, of_bias
            part, scale, gradient = hidden[rows], gradients[0][rows].unsqueeze(1), kept
            if gradient is None:
                gradient = _evaluate(
                    ctx.function,
                    _logits(part, cast, bias),
                    rows,
                    reading,
                    [values[:, rows] for values in known],
                    with_gradient=True,
                ).gradient
            if gradient.dtype != part.dtype:
                gradient, scale = (gradient * scale).to(part.dtype), torch.ones_like(scale)
            own = ((gradient @ cast) * scale).to(part.dtype) if needs_hidden else None
            if needs_weight:
                of_weight = _add_product(of_weight, gradient.t(), (part * scale).to(part.dtype), weight.dtype)
            if needs_bias:
                of_bias = _add_product(of_bias, gradient.t(), scale.to(part.dtype), weight.dtype)
            return own

        budget = LOGITS_BUDGET * OF_BACKWARD if is_small else LOGITS_BUDGET
        chunks = _chunks(len(hidden), reading.part.width or len(weight), budget)
        of_chunks = [own for own in reading.in_chunks(of_hidden, chunks) if own is not None]
        return (
            _of_all_parts(of_chunks, reading.part),
            of_weight,
            None if of_bias is None else of_bias.squeeze(1),
            *[None] * 3,
        )


def _chunks(count: int, width: int, budget: int) -> list[slice]:
    """Rows whose logits exist at a time, one chunk at least.

    Args:
        width: of the logits; of parts of the vocabulary that of the largest, as all ranks need the same chunks.
    """
    rows = max(1, budget // width)
    return [slice(start, min(start + rows, count)) for start in range(0, max(count, 1), rows)]


class _Evaluation(NamedTuple):
    """A function of some rows of the logits."""

    results: tuple[torch.Tensor, ...]
    known: list[torch.Tensor]
    gradient: torch.Tensor | None
    """Gradient by the logits; of a head that is not trained, by the hidden states."""


def _evaluate(
    function: FunctionOfLogits,
    products: torch.Tensor,
    rows: slice,
    reading: Reading,
    known: Sequence[torch.Tensor] = (),
    *,
    with_gradient: bool,
) -> _Evaluation:
    """A function's results, and the gradient of the sum of the first by the products of the head.

    Args:
        products: not used afterwards.
    """
    if products.dtype == torch.float16:
        products = products.float()  # a gradient may be below 6e-8, its smallest number: the loss scale comes later
    if type(function) is _Likelihood:
        # Without autograd, which would multiply the gradient of each position by 1: a pass over all logits.
        assert function.targets is not None
        targets = function.targets[rows]
        losses = known[0] if known else losses_of(products, targets, reading)
        gradient = gradient_of_losses(products, targets, losses, reading) if with_gradient else None
        return _Evaluation((losses[0],), [losses], gradient)
    with torch.set_grad_enabled(with_gradient):
        logits = HeadLogits(products.requires_grad_(with_gradient), reading, known)
        results = function(logits, rows)
        gradient = torch.autograd.grad(results[0].sum(), products)[0] if with_gradient else None
    return _Evaluation(tuple(values.detach() for values in results), logits.known, gradient)


def _of_all_parts(parts: list[torch.Tensor], part: VocabularyPart) -> torch.Tensor | None:
    """The gradient of hidden states from that of its chunks and this rank's part of the vocabulary; None of no chunk.
    Collective.
    """
    whole = torch.cat(parts) if parts else None
    if part.group is not None and whole is not None:
        dist.all_reduce(whole, group=part.group)
    return whole


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return hidden @ weight.t() if bias is None else torch.addmm(bias.to(hidden.dtype), hidden, weight.t())


def _add_product(
    total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """total + left @ right, in place; the first total in `dtype`."""
    if total is None:
        return (left @ right).to(dtype)
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)


def add_loss(model: PreTrainedModel, sequence_mesh: DeviceMesh | None = None) -> None:
    """Make `model(...)` return the negative log-likelihoods of the targets, (L,) float32, in their order; without
    `targets`, the most probable token at each of `target_positions`, (L,) int64. With a `function` of the logits there
    it returns its results. A model that scores sequences returns its scores there, (L, k) float32.

    It takes `input_ids`, `targets` and `target_positions` of `collate` in data/batches.py, with `draw_words` and
    `token_lengths` where something is drawn, and for a packed row `position_ids`, `lengths` and `offsets`; then samples
    attend only to themselves, and the model must have been loaded for packing. There is no attention mask: causal
    attention never sees padding on the right. A micro-batch without targets calls the head on zero rows, since the
    collectives of a sharded head must happen on every rank.

    A stage of a pipeline runs the `chunk` of its layers that it is called with. Each but the first of all takes
    `hidden`, (B, T, hidden size), of the one before instead of embeddings; all but the last return that.

    Args:
        sequence_mesh: the ranks that share the tokens of each row; each passes its `sequence_part`.
    """
    # transformers/distributed/pipeline_parallel.py, apply_pipeline_parallelism
    stage = getattr(model, "_pp_stage", None)
    model.has_head = stage is None or stage.pp_is_last_stage
    head: Any = head_of(model)
    if model.has_head and (not isinstance(head, torch.nn.Linear) or backbone_of(model) is model):
        raise RecipeError(f"model {type(model).__name__}: not a backbone with a linear head, which is not served yet")
    model.scores = is_scored(model.config)
    model.per_target = (model.config.num_labels,) if model.scores else ()
    loss_head: type[torch.nn.Linear] = ScoreHead if model.scores else LossHead
    if model.has_head and isinstance(head.weight, DTensor) and "forward" in vars(head):
        loss_head = ShardedLossHead
        head.whole_logits = vars(head).pop("forward")
    # A quantized head has a forward of its own that must run.
    if type(head) is torch.nn.Linear:
        head.__class__ = loss_head
    elif model.has_head and issubclass(type(head), FSDPModule):
        head.__class__ = type("FSDPLossHead", (loss_head, type(head)), {})
    model.sequence_mesh = sequence_mesh
    model.logit_transform = None if model.scores else logit_transform(model.config)
    # Inside the forward, on which the engines' hooks are: around it DDP would not synchronize, in silence.
    model.forward = MethodType(_forward, model)
    model.zeros_of_result = MethodType(_zeros_of_result, model)


def _forward(
    self: PreTrainedModel,
    *,
    input_ids: torch.Tensor,
    target_positions: torch.Tensor,
    targets: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    chunk: int = 0,
    position_ids: torch.Tensor | None = None,
    lengths: tuple[int, ...] | None = None,
    offsets: torch.Tensor | None = None,
    draw_words: torch.Tensor | None = None,
    token_lengths: torch.Tensor | None = None,
    function: FunctionOfLogits | None = None,
    **unset: None,
) -> Any:
    # peft passes every argument that a transformers model could have.
    assert all(value is None for value in unset.values()), f"not known to our loss: {sorted(unset)}"
    options: dict[str, Any] = {}
    mesh = self.sequence_mesh
    if mesh is not None:
        options["sequence_mesh"] = mesh
    if lengths is not None:
        assert offsets is not None
        assert self.config._attn_implementation == PACKED, "a packed row, and a model that was not loaded for packing"
        whole = input_ids.shape[1] * (1 if mesh is None else mesh.size())
        assert (len(input_ids), whole) == (1, sum(lengths)), f"{tuple(input_ids.shape)} is not one row of {lengths}"
        options["segments"] = Segments(offsets, max(lengths), Lengths(lengths))
    backbone = backbone_of(self)
    inputs = {"input_ids": input_ids} if hidden is None else {"inputs_embeds": hidden}
    stage = getattr(self, "_pp_stage", None)
    is_last = stage is None or (self.has_head and chunk == len(stage.chunks) - 1)
    layers = contextlib.nullcontext() if stage is None else _only(backbone, stage.chunks[chunk], is_last=is_last)
    with layers, packed_row(lengths or (), offsets), shared_row(mesh), drawn_row(draw_words, token_lengths):
        hidden = backbone(**inputs, position_ids=position_ids, use_cache=False, **options).last_hidden_state
    if not is_last:
        return hidden
    # By index: with a mask the host would wait for the number of rows, here and in the backward pass.
    hidden = hidden.flatten(0, 1).index_select(0, target_positions)
    if targets is None and function is None:
        head = self.get_output_embeddings()
        return transform_logits(head(hidden.to(head.weight.dtype)), self.logit_transform).argmax(-1)
    return loss_of_targets(self, hidden, targets, function)


def _zeros_of_result(
    self: PreTrainedModel,
    *,
    target_positions: torch.Tensor,
    function: FunctionOfLogits | None = None,
    **others: Any,
) -> Any:
    """Zeros in the place of what `_forward` returns for these inputs on the last stage of a pipeline. So the objective
    runs on every stage, and all know the names of its metrics."""
    zeros, count = partial(torch.zeros, device=target_positions.device), len(target_positions)
    if function is None:
        return zeros(count, *self.per_target)
    return tuple(zeros(count) for _ in range(1 + len(function.reported)))


def compile_loss(head: torch.nn.Module | None) -> None:
    """Compile the negative log-likelihood of `add_loss` and its gradient by a head's logits, but neither its matrix
    products nor what else an objective computes of the logits."""
    if isinstance(head, LossHead):  # scores of sequences are a few numbers, and a stage may have no head
        head.kernels = Kernels(*(torch.compile(kernel) for kernel in PLAIN))


@contextlib.contextmanager
def _only(backbone: torch.nn.Module, layers: range, *, is_last: bool) -> Iterator[None]:
    """Have the forward of a backbone run these of its layers alone, and its norm only after the last of all."""
    from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

    whole, idle = dict(backbone._modules), PipelineIdentityLayer()
    every: Any = whole["layers"]
    # While it runs, not for good: names, shards and checkpoints stay those of one model, and the hooks of idle layers,
    # such as FSDP2's gathers, do not fire.
    chosen = torch.nn.ModuleList(layer if i in layers else idle for i, layer in enumerate(every))
    backbone._modules |= {"layers": chosen} if is_last else {"layers": chosen, "norm": idle}
    try:
        yield
    finally:
        backbone._modules.update(whole)


def loss_of_targets(
    model: PreTrainedModel,
    hidden: torch.Tensor,
    targets: torch.Tensor | None,
    function: FunctionOfLogits | None = None,
) -> Any:
    """Negative log-likelihoods, (L,) float32, of targets, (L,), given hidden states, (L, hidden size), or the results
    of a function of the logits; of a model that scores sequences its scores, (L, k)."""
    head = head_of(model)
    if model.scores:
        return head(hidden)
    # peft's ModulesToSaveWrapper passes targets on; its LoRA layer would add logits to the loss.
    if isinstance(getattr(head, "original_module", head), LossHead):
        return head(hidden, targets, model.logit_transform, function=function)
    logits = HeadLogits(head(hidden), Reading(model.logit_transform, PLAIN))
    results = (function or _Likelihood(targets))(logits, slice(None))
    return results[0] if function is None else results
