"""The loss inside the model: only labelled positions pass through the head, in chunks if their logits are many."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from cookbook.facts.score_head import backbone_of, head_of, is_scored
from cookbook.system.files import RecipeError
from cookbook.training.models.attention import PACKED, Lengths, Segments
from cookbook.training.models.mixers import packed_row
from cookbook.training.models.structure import LogitTransform, logit_transform

LOGITS_BUDGET = 2**27
"""Largest number of logits in one matrix product of the forward. With the float32 copy and the log-probabilities they
take 1.25 GiB in bf16. Below it, a single product is fastest."""


class Candidates(NamedTuple):
    """Tokens of which a loss compares the log-probabilities with a teacher's."""

    tokens: torch.Tensor
    """(L, k) int64, different ones for each target."""
    temperature: float
    """Divides the logits of what they are compared in."""


class Most(NamedTuple):
    """What is asked of a teacher for each target."""

    top_k: int
    """How many of the most probable tokens."""
    temperature: float
    """Divides the logits."""
    num_tokens: int
    """Tokens from this number on do not count: another model has none of them."""


class OfLogits(NamedTuple):
    """What a loss computes of the logits of a head; compiled, without writing a copy of them in float32."""

    nll: Callable[[torch.Tensor, torch.Tensor, LogitTransform | None], torch.Tensor]
    gradient: Callable[..., torch.Tensor]


class LossHead(torch.nn.Linear):
    """An output head that returns the loss if it gets targets.

    Engines gather the head's weight around the call of this module only, so loss and chunks must be inside it.
    """

    of_logits: OfLogits | None = None
    """What computes the loss in the place of `PLAIN`."""

    def forward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor | None = None,
        transform: LogitTransform | None = None,
        rows: tuple[int, torch.Tensor] | None = None,
        candidates: Candidates | None = None,
        most: Most | None = None,
    ) -> Any:
        """(L, hidden size) -> negative log-likelihoods, (L,) float32; without targets, the logits before `transform`.

        Args:
            transform: what the model does to the logits, which the likelihoods have.
            rows: others in the place of those of the weight, from this number on; an adapter trains them.
            candidates: tokens whose log-probabilities are wanted too: the result is that of `with_candidates`.
            most: the result is that of `_most_probable`, without gradients.
        """
        weight = self.weight
        if rows is not None:
            first, own = rows
            weight = torch.cat([weight[:first], own.to(weight.dtype), weight[first + len(own) :]])
        if most is not None:
            return _most_probable(hidden.to(weight.dtype), weight, self.bias, transform, most)
        if targets is None:
            return F.linear(hidden, weight, self.bias)
        return self._loss(hidden, weight, self.bias, targets, transform, candidates=candidates)

    def _loss(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        transform: LogitTransform | None,
        shard: "_VocabularyShard | None" = None,
        candidates: Candidates | None = None,
    ) -> torch.Tensor:
        # A head that an adapter trains is float32, and without autocast the hidden states may not be.
        device = hidden.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        hidden = hidden.to(autocast or weight.dtype)
        if candidates is not None:
            return _CandidatesOfHead.apply(hidden, weight, bias, targets, *candidates, shard, transform)
        with torch.autocast(device, enabled=False):  # CUDA's would make probabilities float32
            return _LossOfHead.apply(
                hidden, weight, bias, targets, torch.is_grad_enabled(), shard, transform, self.of_logits or PLAIN
            )


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
        candidates: Candidates | None = None,
        most: Most | None = None,
    ) -> Any:
        """As of `LossHead`; collective over the tensor-parallel group, whose ranks pass the same."""
        assert most is None, "a teacher is whole"
        if targets is None:
            return _with_columns(self.whole_logits(hidden), hidden, rows)
        assert isinstance(self.weight, DTensor)
        shard, weight = _shard_of(self.weight), self.weight.to_local(grad_placements=[Shard(0)])
        if rows is not None:
            weight = shard.with_rows(weight, *rows)
        bias = self.bias.to_local(grad_placements=[Shard(0)]) if isinstance(self.bias, DTensor) else None
        return self._loss(hidden, weight, bias, targets, transform, shard, candidates)


@dataclass(frozen=True)
class _VocabularyShard:
    """Rows of a head's weight that a rank of a tensor-parallel group holds. Its loss needs two numbers a position from
    each rank, instead of logits of the whole vocabulary (Shoeybi et al., 2019, arXiv:1909.08053, section 3).
    """

    start: int
    """Token of its first row."""
    group: dist.ProcessGroup

    def terms(self, logits: torch.Tensor, targets: torch.Tensor, transform: LogitTransform | None) -> torch.Tensor:
        """(L, shard) logits of the head, (L,) targets -> (2, L) float32: the log-sum-exp of the model's logits here,
        and that of the target or, where another rank has it, 0."""
        columns, is_here = self._columns(logits, targets)
        wide = _transformed(logits, transform).float()
        return torch.stack([wide.logsumexp(-1), wide.gather(1, columns).squeeze(1) * is_here])

    def with_rows(self, weight: torch.Tensor, first: int, rows: torch.Tensor) -> torch.Tensor:
        """The rows here, with others in the place of those from token `first` on; every rank has all the others."""
        low, high = (min(max(token - self.start, 0), len(weight)) for token in (first, first + len(rows)))
        own = _SharedRows.apply(rows, self.group)[self.start + low - first : self.start + high - first]
        return torch.cat([weight[:low], own.to(weight.dtype), weight[high:]])

    def join(self, terms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All ranks' terms -> negative log-likelihoods, and the log-sum-exp over the vocabulary, (L,). Collective."""
        found = terms.new_empty(self.group.size() * len(terms), terms.shape[1])
        dist.all_gather_into_tensor(found, terms, self.group)
        sums = found[::2].logsumexp(0)
        return sums - found[1::2].sum(0), sums

    def gradient_of_logits(
        self, logits: torch.Tensor, targets: torch.Tensor, nll: torch.Tensor, sums: torch.Tensor
    ) -> torch.Tensor:
        """(L, shard): this rank's columns of `_gradient_of_logits`."""
        columns, is_here = self._columns(logits, targets)
        probabilities = (logits.float() - sums.unsqueeze(1)).exp_()
        rest = probabilities.gather(1, columns)
        probabilities.scatter_(1, columns, torch.where(is_here.unsqueeze(1), torch.expm1(-nll).unsqueeze(1), rest))
        return probabilities.to(torch.float32 if logits.dtype == torch.float16 else logits.dtype)

    def _columns(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The targets' columns here, (L, 1), 0 where another rank has it; and whether it is here, (L,)."""
        columns = targets - self.start
        is_here = (columns >= 0) & (columns < logits.shape[1])
        return (columns * is_here).unsqueeze(1), is_here


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
    found = F.linear(hidden, own.to(hidden.dtype))
    return torch.cat([logits[..., :first], found, logits[..., first + len(own) :]], -1)


def _shard_of(weight: DTensor) -> _VocabularyShard:
    mesh = weight.device_mesh
    assert mesh.ndim == 1 and weight.placements == (Shard(0),), f"a head over {mesh}, {weight.placements}"
    rows = -(-len(weight) // mesh.size())  # of all ranks but the last ones, as torch.chunk divides
    return _VocabularyShard(start=min(mesh.get_local_rank() * rows, len(weight)), group=mesh.get_group())


class _LossOfHead(torch.autograd.Function):
    """The product with the head's weight and the loss in one step, as in Liger's fused linear cross-entropy (Hsu et
    al., 2024, arXiv:2410.10989), whose gradient of the logits never exists in float32 either.

    Above the budget, logits exist for one chunk of rows at a time, and the backward computes them again. Each position
    may have a gradient of its own: it scales what is small, the hidden states before the product for the weight's
    gradient and those after the other product, and not the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        has_backward: bool,
        shard: _VocabularyShard | None,
        transform: LogitTransform | None,
        of_logits: OfLogits,
    ) -> torch.Tensor:
        rows = max(1, LOGITS_BUDGET // len(weight))
        cast, parts, gradient = weight.to(hidden.dtype), [], None
        terms = of_logits.nll if shard is None else shard.terms
        for part, answers in zip(hidden.split(rows), targets.split(rows), strict=True):
            logits = _logits(part, cast, bias)
            parts.append(terms(logits, answers, transform))
        found = torch.cat(parts, -1)
        # No view is returned, of which FSDP2 warns.
        nll, sums = (found, None) if shard is None else shard.join(found)
        # Not of several chunks: as Liger, it would have to multiply them with the weight before positions are weighed.
        if has_backward and len(parts) == 1:
            gradient = of_logits.gradient(logits, targets, nll, sums, shard, transform)
        ctx.save_for_backward(hidden, weight, bias, targets, nll, sums, gradient)
        ctx.shard, ctx.transform, ctx.of_logits = shard, transform, of_logits
        return nll

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, nll, sums, known = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        cast = weight.to(hidden.dtype)
        # In bf16 nothing here is float32 but what `_transformed` makes, so that the bytes of the forward hold twice as
        # many rows.
        is_small = hidden.dtype == torch.bfloat16 and ctx.transform is None
        rows = max(1, LOGITS_BUDGET // len(weight)) * (2 if is_small else 1)
        of_hidden: list[torch.Tensor] = []
        of_weight, of_bias = None, None
        split = [one.split(rows) for one in (hidden, targets, gradients[0].unsqueeze(1), nll)]
        split.append((None,) * len(split[0]) if sums is None else sums.split(rows))
        for part, answers, scale, losses, of_all in zip(*split, strict=True):
            gradient = known
            if gradient is None:
                logits = _logits(part, cast, bias)
                gradient = ctx.of_logits.gradient(logits, answers, losses, of_all, ctx.shard, ctx.transform)
                del logits
            if gradient.dtype != part.dtype:
                gradient, scale = (gradient * scale).to(part.dtype), torch.ones_like(scale)
            if needs_hidden:
                of_hidden.append(((gradient @ cast) * scale).to(part.dtype))
            if needs_weight:
                of_weight = _add_product(of_weight, gradient.t(), (part * scale).to(part.dtype), weight.dtype)
            if needs_bias:
                of_bias = _add_product(of_bias, gradient.t(), scale.to(part.dtype), weight.dtype)
            del gradient
        return (
            _of_all_shards(of_hidden, ctx.shard),
            of_weight,
            None if of_bias is None else of_bias.squeeze(1),
            *[None] * 5,
        )


def _of_all_shards(parts: list[torch.Tensor], shard: _VocabularyShard | None) -> torch.Tensor | None:
    """The gradient of hidden states from that of its chunks and this rank's part of the vocabulary; None of no chunk.
    Collective.
    """
    whole = torch.cat(parts) if parts else None
    if shard is not None and whole is not None:
        dist.all_reduce(whole, group=shard.group)
    return whole


class _CandidatesOfHead(torch.autograd.Function):
    """As `_LossOfHead`, for the log-probabilities of several tokens. Logits exist for one chunk of rows at a time, and
    the backward computes them again. Chunks are half as large, with more of float32 beside them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
        shard: _VocabularyShard | None,
        transform: LogitTransform | None,
    ) -> torch.Tensor:
        rows, cast, parts = max(1, LOGITS_BUDGET // 2 // len(weight)), weight.to(hidden.dtype), []
        start = 0 if shard is None else shard.start
        for part, answers, others in zip(hidden.split(rows), targets.split(rows), tokens.split(rows), strict=True):
            logits = _transformed(_logits(part, cast, bias), transform)
            parts.append(_terms(logits, answers - start, others - start, temperature))
        terms = torch.cat(parts)
        if shard is not None:
            terms = _joined(terms, shard.group)
        ctx.save_for_backward(hidden, weight, bias, targets, tokens, terms)
        ctx.temperature, ctx.shard, ctx.transform = temperature, shard, transform
        return _log_probabilities(terms)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, tokens, terms = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        cast, start = weight.to(hidden.dtype), 0 if ctx.shard is None else ctx.shard.start
        rows = max(1, LOGITS_BUDGET // 2 // len(weight))
        of_hidden: list[torch.Tensor] = []
        to_weight, to_bias = None, None
        split = [one.split(rows) for one in (hidden, targets - start, tokens - start, terms, gradients[0])]
        for part, answers, others, found, scale in zip(*split, strict=True):
            logits = _transformed(_logits(part, cast, bias), ctx.transform)
            slope = _slope(logits, ctx.transform)
            gradient = _gradient_of_candidates(logits, answers, others, ctx.temperature, found, scale)
            del logits
            gradient = (gradient if slope is None else gradient.mul_(slope)).to(part.dtype)
            if needs_hidden:
                of_hidden.append(gradient @ cast)
            if needs_weight:
                to_weight = _add_product(to_weight, gradient.t(), part, weight.dtype)
            if needs_bias:
                to_bias = _add_product(to_bias, gradient.t(), part.new_ones(len(part), 1), weight.dtype)
            del gradient
        return (
            _of_all_shards(of_hidden, ctx.shard),
            to_weight,
            None if to_bias is None else to_bias.squeeze(1),
            *[None] * 5,
        )


def _most_probable(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transform: LogitTransform | None, most: Most
) -> tuple[torch.Tensor, torch.Tensor]:
    """(L, 1 + k) float32 and (L, k) int32: the log-probability of all tokens together that are not among the
    most probable ones, -inf where there are none, and of these, the highest first; and these tokens.
    """
    found = []
    for part in hidden.split(max(1, LOGITS_BUDGET // 2 // len(weight))):
        logits = _transformed(_logits(part, weight, bias), transform)[:, : most.num_tokens].float() / most.temperature
        values, tokens = logits.topk(most.top_k, 1)
        apart = torch.cat([logits.scatter(1, tokens, -math.inf).logsumexp(1, keepdim=True), values], 1)
        found.append((apart - apart.logsumexp(1, keepdim=True), tokens.int()))
    logps, ids = zip(*found, strict=True)
    return torch.cat(logps), torch.cat(ids)


def with_candidates(logits: torch.Tensor, targets: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """(L, V) logits, (L,) targets and k candidates each -> (L, 2 + k) float32: the negative log-likelihood of the
    target; then, at the temperature, the log-probability of all tokens that are no candidates together, -inf where
    there are none, and those of the candidates.
    """
    return _log_probabilities(_terms(logits, targets, *candidates))


def _terms(logits: torch.Tensor, targets: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """(L, shard) logits -> (L, 3 + k) float32: their log-sum-exp, and the target's logit; at the temperature, the
    log-sum-exp of those that are no candidates, and the candidates' logits. 0 for a token that is not in the shard.

    Args:
        targets, tokens: counted from the first token of the shard.
    """
    # A column more, for tokens that other ranks have.
    wide, width = F.pad(logits.float(), (0, 1)), logits.shape[1]
    answers, others = _columns(targets.unsqueeze(1), width), _columns(tokens, width)
    scaled = wide / temperature
    rest = scaled.scatter(1, others, -math.inf)[:, :width].logsumexp(1, keepdim=True)
    whole = wide[:, :width].logsumexp(1, keepdim=True)
    return torch.cat([whole, wide.gather(1, answers), rest, scaled.gather(1, others)], 1)


def _columns(tokens: torch.Tensor, width: int) -> torch.Tensor:
    """The columns of tokens; the one behind the last for those that another rank has."""
    return tokens.where((tokens >= 0) & (tokens < width), width)


def _joined(terms: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The terms of the vocabulary from those of its shards. Collective."""
    found = terms.new_empty(group.size() * len(terms), terms.shape[1])
    dist.all_gather_into_tensor(found, terms.contiguous(), group)
    found = found.view(group.size(), *terms.shape)
    joined = found.sum(0)
    joined[:, [0, 2]] = found[..., [0, 2]].logsumexp(0)
    return joined


def _log_probabilities(terms: torch.Tensor) -> torch.Tensor:
    """The result of `with_candidates`."""
    whole, answer, apart = terms[:, :1], terms[:, 1:2], terms[:, 2:]
    # Not 1 less the sum of the candidates' probabilities, which has no digits left where that is nearly 1.
    return torch.cat([whole - answer, apart - apart.logsumexp(1, keepdim=True)], 1)


def _gradient_of_candidates(
    logits: torch.Tensor,
    targets: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float,
    terms: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """(L, shard) float32: gradient of the sum of all `_log_probabilities`, each times its `scale`.

    Args:
        terms: of the vocabulary.
    """
    width, found = logits.shape[1], _log_probabilities(terms)
    answers, others = _columns(targets.unsqueeze(1), width), _columns(tokens, width)
    total = scale[:, 1:].sum(1, keepdim=True)
    of_apart = (scale[:, 1:] - total * found[:, 1:].exp()) / temperature
    # Each token of the rest has its share of the rest's gradient; of no rest the largest exponent would be infinite.
    rest = terms[:, 2:3].masked_fill(terms[:, 2:3] == -math.inf, math.inf)
    gradient = F.pad(logits.float(), (0, 1))
    of_whole = (gradient - terms[:, :1]).exp_().mul_(scale[:, :1])
    of_whole.scatter_(1, answers, torch.expm1(-found[:, :1]) * scale[:, :1])  # see `_gradient_of_logits`
    gradient.div_(temperature).sub_(rest).exp_().mul_(of_apart[:, :1])
    gradient.scatter_(1, others, of_apart[:, 1:])
    return gradient.add_(of_whole)[:, :width]


def _slope(logits: torch.Tensor, transform: LogitTransform | None) -> torch.Tensor | float | None:
    """Derivative of `_transformed` where it gave these logits."""
    if transform is None or transform.cap is None:
        return None if transform is None else transform.scale
    return (1 - (logits / transform.cap).square()).mul_(transform.scale)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return hidden @ weight.t() if bias is None else torch.addmm(bias.to(hidden.dtype), hidden, weight.t())


def _transformed(logits: torch.Tensor, transform: LogitTransform | None) -> torch.Tensor:
    """The logits of a model, in float32 if it changes those of its head."""
    if transform is None:
        return logits
    scaled = logits.float() * transform.scale
    return scaled if transform.cap is None else torch.tanh(scaled / transform.cap) * transform.cap


def _nll(logits: torch.Tensor, targets: torch.Tensor, transform: LogitTransform | None) -> torch.Tensor:
    return F.cross_entropy(_transformed(logits, transform).float(), targets, reduction="none")


def _gradient_of_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    nll: torch.Tensor,
    sums: torch.Tensor | None,
    shard: _VocabularyShard | None,
    transform: LogitTransform | None = None,
) -> torch.Tensor:
    """Gradient of the sum of the losses: probabilities, (L, V), less 1 at the target; times the transform's slope.

    In the dtype of the logits, but float32 for fp16, whose smallest number is 6e-8: its loss scale must come first.

    Args:
        nll: (L,) losses.
        sums: with a shard, the other that its `join` returns.
    """
    if transform is not None:
        wide = _transformed(logits, transform)
        gradient = _gradient_of_logits(wide, targets, nll, sums, shard)
        if transform.cap is not None:
            gradient *= wide.div_(transform.cap).square_().neg_().add_(1)  # tanh' = 1 - tanh^2, in the place of tanh
        gradient *= transform.scale
        return gradient.to(torch.float32 if logits.dtype == torch.float16 else logits.dtype)
    if shard is not None:
        assert sums is not None
        return shard.gradient_of_logits(logits, targets, nll, sums)
    wide = logits.float() if logits.dtype == torch.float16 else logits
    probabilities = wide.softmax(-1)
    # By way of the loss: a probability near 1 that was rounded to bf16 has no digits left after subtracting 1.
    return probabilities.scatter_(1, targets.unsqueeze(1), torch.expm1(-nll).unsqueeze(1).to(probabilities.dtype))


PLAIN = OfLogits(_nll, _gradient_of_logits)


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
    `targets`, the most probable token at each of `target_positions`, (L,) int64. With `candidates`, (L, k) int64, and
    their `temperature` it returns what `with_candidates` says; with `most`, of a teacher, what `_most_probable` says. A
    model that scores sequences returns its scores there, (L, k) float32.

    It takes `input_ids`, `targets` and `target_positions` of `collate` in data/batches.py, and for a packed row
    `position_ids`, `lengths` and `offsets`; then samples attend only to themselves, and the model must have been loaded
    for packing. There is no attention mask: causal attention never sees padding on the right. A micro-batch without
    targets calls the head on zero rows, since the collectives of a sharded head must happen on every rank.

    A stage of a pipeline runs the `chunk` of its layers that it is called with. Each but the first of all takes
    `hidden`, (B, T, hidden size), of the one before instead of embeddings; all but the last return that.

    Args:
        sequence_mesh: the ranks that share the tokens of each row; each passes its `sequence_part`.
    """
    stage = getattr(model, "_pp_stage", None)  # of transformers/distributed/pipeline_parallel.py
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
    candidates: torch.Tensor | None = None,
    temperature: float = 1.0,
    most: Most | None = None,
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
    with layers, packed_row(lengths or ()):
        hidden = backbone(**inputs, position_ids=position_ids, use_cache=False, **options).last_hidden_state
    if not is_last:
        return hidden
    # By index: with a mask the host would wait for the number of rows, here and in the backward pass.
    hidden = hidden.flatten(0, 1).index_select(0, target_positions)
    if most is not None:
        return self.get_output_embeddings()(hidden, transform=self.logit_transform, most=most)
    if targets is None:
        head = self.get_output_embeddings()
        return _transformed(head(hidden.to(head.weight.dtype)), self.logit_transform).argmax(-1)
    if candidates is not None:
        return _of_candidates(self, hidden, targets, Candidates(candidates, temperature))
    return nll_of_targets(self, hidden, targets)


def compile_loss(head: torch.nn.Module | None) -> None:
    """Compile what the loss of `add_loss` computes of a head's logits, but neither its matrix products nor what it
    compares with a teacher's."""
    if isinstance(head, LossHead):  # scores of sequences are a few numbers, and a stage may have no head
        head.of_logits = OfLogits(*(torch.compile(one) for one in PLAIN))


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


def nll_of_targets(model: PreTrainedModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihoods, (L,) float32, of targets, (L,), given hidden states, (L, hidden size); of a model that
    scores sequences its scores, (L, k)."""
    head = head_of(model)
    if model.scores:
        return head(hidden)
    # peft's ModulesToSaveWrapper passes targets on; its LoRA layer would add logits to the loss.
    if isinstance(getattr(head, "original_module", head), LossHead):
        return head(hidden, targets, model.logit_transform)
    return _nll(head(hidden), targets, model.logit_transform)


def _of_candidates(
    model: PreTrainedModel, hidden: torch.Tensor, targets: torch.Tensor, candidates: Candidates
) -> torch.Tensor:
    head = model.get_output_embeddings()
    if isinstance(getattr(head, "original_module", head), LossHead):
        return head(hidden, targets, model.logit_transform, candidates=candidates)
    return with_candidates(_transformed(head(hidden), model.logit_transform), targets, candidates)
