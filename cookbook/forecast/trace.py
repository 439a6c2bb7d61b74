"""Activation memory of a forward and backward, traced by running the real model on torch's fake tensors.

Fake tensors have shapes and dtypes but no data, so the model's own code, the recipe's adapter and checkpointing, and
the loss determine what is kept and for how long. Runs on any CPU in seconds and reads no weights.
"""

import copy
import gc
import logging
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cookbook.config.objectives import Objective
from cookbook.config.recipe import Recipe
from cookbook.facts.model_types import look_up
from cookbook.facts.packing import stops_compiling
from cookbook.facts.score_head import backbone_of, empty_model, head_of
from cookbook.facts.served_code import served_code
from cookbook.forecast.activations import ActivationTrace, TooLong, Untraceable
from cookbook.forecast.autocast import autocast_of_cuda
from cookbook.forecast.four_bits import multiply_in_4_bits
from cookbook.forecast.layer_kinds import decoder_layers, few_layers, first_reached, grows_backward, lengthen, whole
from cookbook.forecast.ledger import Ledger, MarkedLayer, Unit, experts_of
from cookbook.forecast.repeated import CPU, light
from cookbook.forecast.skeleton import new_rows
from cookbook.system.files import first_line
from cookbook.training.adapters.insertion import inject
from cookbook.training.models.attention import Kind, Lengths, Segments, causal, computed_in, one_by_one
from cookbook.training.models.efficiency import save_activations
from cookbook.training.models.experts import autocast_products
from cookbook.training.models.loss import LossHead, add_loss, loss_of_targets

if TYPE_CHECKING:
    from cookbook.forecast.compiled import Kept

TRACED, JOINED, EXCHANGED = "cookbook_traced", "cookbook_traced_joined", "cookbook_traced_exchange"
"""Names for `attn_implementation`."""
COMPUTE_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def trace(
    config: PreTrainedConfig,
    recipe: Recipe,
    *,
    rows: int,
    length: int,
    num_targets: int,
    autocast: bool,
    tp_size: int,
    ep_size: int = 1,
    fsdp: Literal[0, 1, 2] = 0,
    is_sharded_while_read: bool = False,
    is_zero3: bool = False,
    sp_size: int = 1,
    change: Callable[[PreTrainedModel], None] | None = None,
    kept: "Kept | None" = None,
) -> ActivationTrace:
    """Traces one micro-batch.

    Args:
        rows: sequences of `length` tokens each; under packing one row of all tokens, samples of `data.max_length`.
        num_targets: labelled positions in all rows.
        autocast: whether weights are float32 and operations cast them, as under single and DDP; else the weights have
            the recipe's precision, as under ZeRO and FSDP.
        fsdp: FSDP's version, or 0. accelerate's autocast then surrounds low-precision weights, and FSDP2 casts the
            inputs and outputs of its units.
        is_sharded_while_read: whether transformers applied FSDP2, which then casts inputs only, without autocast.
        is_zero3: whether to use DeepSpeed's linear layers, which always save their input, and float32 adapters.
        sp_size: size of the sequence-parallel group, whose members have `length` tokens each of a row and exchange
            them for heads in the attention.
        tp_size: size of the tensor-parallel group, which shares heads and inner features.
        ep_size: size of the expert-parallel group, which shares the experts of a layer; each gets as many tokens.
        change: modifies the model into that of another program (benchmarks/forecast_accuracy).
        kept: likewise for what its checkpointing keeps of a compiled layer.

    Raises:
        Untraceable: there is no forecast of it.
    """
    low = COMPUTE_DTYPES[recipe.compute_precision]
    is_low = low != torch.float32
    # See `_zero3` in costs/states.py.
    trained = torch.float32 if autocast or (is_zero3 and recipe.adapter is not None) else low
    cast = low if (autocast or (fsdp and not is_sharded_while_read)) and is_low else None
    unit = Unit(low, None if is_sharded_while_read else torch.float32) if fsdp == 2 and is_low else None
    alone = TRACED if is_low or not recipe.data.is_packed else JOINED
    samples = _samples(length * sp_size, recipe.data.max_length)
    for name, function in ATTENTION.items():
        AttentionInterface.register(name, partial(function, samples))

    offloads = recipe.model.gradient_checkpointing == "offload"
    parts = recipe.model_dump_json(include={"model", "data", "objective", "adapter"})

    def run(config: PreTrainedConfig, attention: str, compiling: Callable[..., None] | None) -> Ledger:
        def make() -> _TracedModel:
            # The model alone: DeepSpeed and DDP do not run on fake tensors; costs/states.py has the rules of theirs.
            model = _fake_model(config, recipe, trained, low, attention)
            if ep_size > 1:
                _share_experts(model, ep_size)
            if change is not None:
                change(model)
            return _TracedModel(model, unit, is_flat=fsdp == 1, compiling=compiling, offloads=offloads)

        made_of = type(config), config.to_json_string(), parts, trained, low, attention, ep_size, unit, fsdp == 1
        is_alone = change is not None or compiling is not None
        linear = _LinearOfZero3.apply if is_zero3 else F.linear
        with (
            _kept_model(None if is_alone else made_of, make) as traced,
            _set_function("linear", linear),
            _set_function("dropout", _dropout),
            autocast_of_cuda(),
        ):
            return _trace_phases(traced, recipe.objective, rows, length, num_targets, cast, compiling)

    def run_first_that_works(config: PreTrainedConfig) -> Ledger:
        ways = _ways(recipe, config, EXCHANGED if sp_size > 1 else alone, kept)
        for attention, compiling in ways:
            try:
                if compiling is not None and look_up(config.model_type).has_state:
                    run(config, attention, None)  # TooLong, before the compiler unrolls a loop over all tokens
                return run(config, attention, compiling)
            except Exception as error:  # a model's code may fail in any way without data
                if attention == ways[-1][0] or isinstance(error, TooLong):
                    why = str(error) if isinstance(error, TooLong) else f"{type(error).__name__}: {first_line(error)}"
                    raise Untraceable(f"{config.model_type} cannot be traced: {why}") from error
        raise AssertionError("no way")

    few = few_layers(config)
    ledger = run_first_that_works(_share_of(few.config, tp_size))
    if start := first_reached(ledger.phases, few):
        few = few_layers(config, start)
        ledger = run_first_that_works(_share_of(few.config, tp_size))
    if ledger.copies and grows_backward(ledger.phases, few):
        few = whole(config, len(few.sources))
        ledger = run_first_that_works(_share_of(few.config, tp_size))
    phases = tuple(lengthen(ledger.phases, few, has_copies=ledger.copies > 0))
    return ActivationTrace(phases=phases, keeps_inputs=ledger.keeps_inputs)


def _ways(
    recipe: Recipe, config: PreTrainedConfig, ours: str, kept: "Kept | None"
) -> list[tuple[str, Callable[..., None] | None]]:
    """Attention, and what traces compiled layers if they are: the first that works is taken. Some models do not accept
    a custom attention, and some layers cannot be compiled.
    """
    if served_code(config).holds_scores and ours == TRACED and not recipe.data.is_packed:
        ours = "eager"  # as transformers itself chooses
    ways: list[tuple[str, Callable[..., None] | None]] = [(ours, None), ("sdpa", None), ("eager", None)]
    # Packed float32 attention breaks a layer's graph, which checkpointing does not support (models/efficiency.py).
    if not recipe.model.compile or (recipe.data.is_packed and stops_compiling(recipe, config)):
        return ways
    from cookbook.forecast.compiled import (  # inductor, which other runs need not import
        kept_by,
        trace_compiled,
    )

    kept = kept or kept_by(recipe.model.gradient_checkpointing)
    return [(ours, partial(trace_compiled, kept=kept)), *ways]


def _share_of(config: PreTrainedConfig, tp_size: int) -> PreTrainedConfig:
    """The configuration of one tensor-parallel rank: its share of heads, inner features and vocabulary, whole hidden
    states.
    """
    config = copy.deepcopy(config)
    if tp_size == 1:
        return config
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, key, None):
            setattr(config, key, max(1, getattr(config, key) // tp_size))
    config.vocab_size = math.ceil(config.vocab_size / tp_size)
    return config


def with_attention(config: PreTrainedConfig, attention: str) -> PreTrainedConfig:
    """The configuration of a model with another attention, by its name in transformers."""
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    return config


def _fake_model(
    config: PreTrainedConfig, recipe: Recipe, trained: torch.dtype, frozen: torch.dtype, attention: str
) -> PreTrainedModel:
    """The model as built by `train.py`, on the meta device."""
    adapter, config = recipe.adapter, with_attention(config, attention)
    dtype = trained if adapter is None else frozen
    with torch.device("meta"):
        with _set_to(torch.set_default_dtype, dtype, before=torch.get_default_dtype()):
            # from_config would be collective in a run under ZeRO-3.
            model = empty_model(config)
        for module in model.modules():
            _keep_frequencies(module)
        add_loss(model)
        if adapter is not None:
            inject(model, adapter, new_rows(config, recipe))
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(trained)
            if adapter.is_quantized:
                multiply_in_4_bits(model)
    model.config.use_cache = False
    autocast_products()
    if recipe.model.gradient_checkpointing:
        save_activations(model, selective=recipe.model.recompute == "selective")
    return model.train()


def _keep_frequencies(module: Any) -> None:
    """Leave out the comparison by which a dynamic rotary embedding asks the values of positions, which a trace lacks:
    up to the length for which it was made, and a longer one is refused, its frequencies stay.
    """
    of_layers = getattr(module, "rope_type", None)
    if isinstance(of_layers, dict):
        module.rope_type = {layer: "default" if "dynamic" in kind else kind for layer, kind in of_layers.items()}
    elif isinstance(of_layers, str) and "dynamic" in of_layers:
        module.rope_type = "default"


def _flash_makes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates as a flash attention kernel does: the output and the log-sum-exp."""
    batch, heads, length, _ = query.shape
    out = query.new_empty(batch, length, heads, value.shape[-1])
    return out, query.new_empty(batch, heads, length, dtype=torch.float32)


def _flash_makes_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
) -> list[torch.Tensor]:
    """Gradients of the three inputs, then temporaries: that of the queries is accumulated in float32, those of grouped
    keys and values per query head (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd)."""
    made = [torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)]
    made += [torch.empty_like(query, dtype=torch.float32), torch.empty_like(sums)]
    if key.shape[1] != query.shape[1]:
        made += [torch.empty_like(query), value.new_empty(*query.shape[:3], value.shape[-1])]
    return made


# A custom operation, whose results selective checkpointing keeps by its name.
_flash = torch.library.custom_op("cookbook::traced_flash_attention", _flash_makes, mutates_args=())
_flash.register_fake(_flash_makes)
_flash_gradients = torch.library.custom_op(
    "cookbook::traced_flash_attention_backward", _flash_makes_backward, mutates_args=()
)
_flash_gradients.register_fake(_flash_makes_backward)


def _save_for_backward(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)  # the log-sum-exp has no gradient


_flash.register_autograd(
    lambda ctx, gradient, _: tuple(_flash_gradients(gradient, *ctx.saved_tensors)[:3]),
    setup_context=_save_for_backward,
)


def _samples(length: int, longest: int) -> Segments:
    """A row of so many tokens in samples of the largest size; the attention of some models takes its square."""
    count, rest = divmod(length, longest)
    lengths = (longest,) * count + (rest,) * bool(rest)
    return Segments(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths), Lengths(lengths))


def _traced_attention(
    samples: Segments,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Like `cookbook.training.models.attention.attend`, without computing; what has no kernel runs its code."""
    kind = Kind(scaling, sliding_window, softcap, s_aux)
    if not kind.has_kernel:
        if len(samples.lengths.values) == 1:
            return causal(query, key, value, kind).transpose(1, 2), None
        return one_by_one(query, key, value, samples, kind), None
    dtype = computed_in(query)
    if (groups := query.shape[1] // key.shape[1]) > 1 and dtype == torch.float32:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    return _flash(query.to(dtype), key.to(dtype), value.to(dtype))[0], None


def _traced_joined(*inputs: Any, **kind: Any) -> tuple[torch.Tensor, None]:
    """Return the same for packed rows in float32, whose samples are computed one by one and then joined by a copy."""
    return _traced_attention(*inputs, **kind)[0].clone(), None


def _traced_exchange(
    samples: Segments,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kind: Any,
) -> tuple[torch.Tensor, None]:
    """Attention under sequence parallel, whose all-to-alls copy what goes in and what comes out: of the tokens of one
    process all heads, of all tokens its share of the heads.
    """
    size = sum(samples.lengths.values) // query.shape[2]
    if (repeats := size // key.shape[1]) > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    all_tokens = [_exchange(tensor.to(computed_in(query)), size) for tensor in (query, key, value)]
    out, _ = _traced_attention(samples, module, all_tokens[0], all_tokens[1], all_tokens[2], attention_mask, **kind)
    return out.reshape(query.shape[0], query.shape[2], query.shape[1], -1).clone(), None


def _exchange(local: torch.Tensor, size: int) -> torch.Tensor:
    rows, heads, length, width = local.shape
    return local.clone().reshape(rows, heads // size, length * size, width)


ATTENTION = {TRACED: _traced_attention, JOINED: _traced_joined, EXCHANGED: _traced_exchange}


def _dropout(hidden: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """As on a GPU, where the mask takes a byte for each number (aten/src/ATen/native/Dropout.cpp)."""
    return torch.native_dropout(hidden, p, training)[0] if training and p else hidden


class _LinearOfZero3(torch.autograd.Function):
    """DeepSpeed 0.19.8, runtime/zero/linear.py, LinearFunctionForZeroStage3."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        result = hidden.matmul(weight.t())
        return result if bias is None else result.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        hidden, weight, _ = ctx.saved_tensors
        needs_hidden, needs_weight, *needs_bias = ctx.needs_input_grad
        of_hidden = gradient.matmul(weight) if needs_hidden else None
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_weight = rows.t().matmul(hidden.reshape(-1, hidden.shape[-1])) if needs_weight else None
        of_bias = rows.sum(0) if any(needs_bias) else None
        return (of_hidden, of_weight, of_bias)[: len(ctx.needs_input_grad)]


@contextmanager
def _set_to(setter: Callable[[Any], Any], value: Any, *, before: Any) -> Iterator[None]:
    """Sets a global setting for a block, and restores `before` after it."""
    setter(value)
    try:
        yield
    finally:
        setter(before)


def _set_function(name: str, value: Any) -> AbstractContextManager[None]:
    """Sets a function of torch.nn.functional for a block."""
    return _set_to(partial(setattr, F, name), value, before=getattr(F, name))


class _Exchange(torch.autograd.Function):
    """An all-to-all of as many rows as are sent."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(rows.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(gradients[0].contiguous())


def _share_experts(model: PreTrainedModel, size: int) -> None:
    """Leaves each layer the experts of one process of a group, between the two exchanges of tokens (transformers 5.23,
    distributed/expert_parallel.py, AllToAllEP).
    """
    all_experts = experts_of(model)
    if not all_experts:
        raise Untraceable(f"{type(model).__name__} has no experts that can be divided")
    for experts in all_experts:
        for name, weight in list(experts._parameters.items()):
            own = weight[: len(weight) // size].detach()
            experts._parameters[name] = torch.nn.Parameter(own, requires_grad=weight.requires_grad)
        experts.num_experts //= size
        experts._is_expert_parallel = True
        experts.forward = partial(_dispatch, experts.forward)


def _dispatch(
    compute: Callable[..., torch.Tensor], hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The experts' output for each token.

    Args:
        compute: the forward of the experts of this process.
        hidden: (tokens, hidden).
        chosen, weights: (tokens, experts of a token).
    """
    order = torch.argsort(chosen.reshape(-1))
    received = _Exchange.apply(hidden[order // chosen.shape[-1]])
    own = torch.zeros_like(order).unsqueeze(-1)
    computed = compute(received, own, torch.ones_like(own, dtype=received.dtype))  # which lives as long as what follows
    returned = _Exchange.apply(computed)
    outputs = torch.empty_like(returned)
    outputs[order] = returned
    return (outputs.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


def _cast_at_ends(model: PreTrainedModel, unit: Unit) -> None:
    """Adds FSDP2's casts to the units outside the layers: embedding, final norm and head."""
    ends = [model.get_input_embeddings(), head_of(model)]
    ends += [module for module in backbone_of(model).children() if "Norm" in type(module).__name__][-1:]
    for module in ends:
        module.register_forward_pre_hook(lambda _, args, options: unit.take((args, options)), with_kwargs=True)
        module.register_forward_hook(lambda _, args, result: unit.give_back(result))


def _train_whole_units(model: PreTrainedModel) -> None:
    """Under FSDP1 the weights of a unit are views of one parameter, so if one is trained all have gradients
    (torch/distributed/fsdp/_flat_param.py, _use_unsharded_views)."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    for weights in (*(list(layer.parameters()) for layer in layers), outside):
        is_trained = any(weight.requires_grad for weight in weights)
        for weight in weights:
            weight.requires_grad_(is_trained)


def _targets(objective: Objective, count: int) -> dict[str, torch.Tensor]:
    """The entries that a batch has for each target and `Objective.function` reads."""
    entries = {"targets": torch.zeros(count, dtype=torch.long)}
    if objective.asks is not None:
        top_k = objective.asks.top_k
        entries["teacher_tokens"] = torch.zeros(count, top_k, dtype=torch.int)
        entries["teacher_logps"] = torch.zeros(count, 1 + top_k)
    return entries


class _TracedModel:
    """A model on fake tensors between marks, whose traces of other sizes need no other model."""

    def __init__(
        self,
        model: PreTrainedModel,
        unit: Unit | None,
        *,
        is_flat: bool,
        compiling: Callable[..., None] | None,
        offloads: bool,
    ) -> None:
        self.model, self.mode = model, FakeTensorMode()
        is_light = compiling is None
        fake_in_place(model, self.mode, is_light=is_light)
        ledger = self.ledger = Ledger((*model.parameters(), *model.buffers()), is_light=is_light)
        if compiling is not None:
            compiling(model, uncounted=ledger.pause)
        if isinstance(head := head_of(model), LossHead):
            head.in_chunks = ledger.in_chunks  # type: ignore[method-assign]
        if offloads:
            _offload_checkpoints(model, ledger)
        _mark_layers(model, ledger, unit)
        if unit is not None:
            _cast_at_ends(model, unit)
        if is_flat:
            _train_whole_units(model)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(ledger.drop_gradient)
        self._before = self._values()

    def is_as_before(self) -> bool:
        """Return whether a trace has left nothing in the model: no module has other values, and no memory is held."""
        values = self._values()
        is_same = len(values) == len(self._before) and all(map(operator.is_, values, self._before))
        return is_same and not self.ledger.holds_any

    def _values(self) -> list[Any]:
        values: list[Any] = []
        for module in self.model.modules():
            values += vars(module).values()
            for owned in (module._parameters, module._buffers, module._modules):
                values += owned.values()
        return values


TRACED_MODELS: dict[Any, _TracedModel] = {}
"""Models of earlier traces, by what they were made of."""
MAX_TRACED_MODELS = 8


@contextmanager
def _kept_model(made_of: Any, make: Callable[[], _TracedModel]) -> Iterator[_TracedModel]:
    """The model of an earlier trace, or a new one; kept for the next if this trace leaves nothing in it.

    Args:
        made_of: all that it depends on; None: no other trace may have it.
    """
    traced = TRACED_MODELS.pop(made_of, None) or make()
    yield traced
    if made_of is not None and traced.is_as_before():
        TRACED_MODELS[made_of] = traced
        if len(TRACED_MODELS) > MAX_TRACED_MODELS:
            del TRACED_MODELS[next(iter(TRACED_MODELS))]


def _trace_phases(
    traced: _TracedModel,
    objective: Objective,
    rows: int,
    length: int,
    num_targets: int,
    autocast: torch.dtype | None,
    compiling: Callable[..., None] | None,
) -> Ledger:
    model, fake, ledger, is_light = traced.model, traced.mode, traced.ledger, compiling is None
    ledger.restart()
    backbone, autocasting = backbone_of(model), torch.autocast("cpu", dtype=autocast, enabled=autocast is not None)

    def inputs() -> dict[str, Any]:
        ids, positions = (torch.zeros(rows, length, dtype=torch.long) for _ in range(2))
        return {"input_ids": ids, "position_ids": positions, "use_cache": False}

    def micro_batch() -> None:
        given = inputs()
        batch, target_positions = _targets(objective, num_targets), torch.zeros(num_targets, dtype=torch.long)
        with ledger:
            ledger.begin("embed")
            with autocasting:
                hidden = backbone(**given).last_hidden_state
                hidden = hidden.flatten(0, 1).index_select(0, target_positions)  # frees the former, as a run does
                results = loss_of_targets(model, hidden, batch["targets"], objective.function(batch))
                loss = (results[0] if isinstance(results, tuple) else results).sum()
                del results
                with_copies = ledger.live
            ledger.copies = with_copies - ledger.live
            del hidden
            ledger.keeps_inputs = all(reference() is not None for reference in ledger.inputs[1:])
            ledger.begin("head backward")
            loss.backward()
            del loss
            ledger.begin("done")

    log = logging.getLogger(FakeTensor.__module__)
    # CUDA's autocast flag, which peft queries (0.21.2, lora/bnb.py, Linear4bit), also for recomputation in the
    # backward.
    set_flag, flag = partial(torch.set_autocast_enabled, "cuda"), torch.is_autocast_enabled("cuda")
    with (
        fake,
        disable_fake_tensor_cache(fake) if is_light else nullcontext(),  # what is alike is found before (repeated.py)
        _set_to(lambda on: gc.enable() if on else gc.disable(), False, before=gc.isenabled()),  # a tenth of the time
        _set_to(log.setLevel, logging.CRITICAL, before=log.level),  # tracebacks of what fake tensors do not support
        _set_to(set_flag, autocast is not None, before=flag),
    ):
        if compiling is not None:
            with autocasting:
                backbone(**inputs())  # makes the graphs of its layers, those of the backward too
            ledger.forget()
        micro_batch()
    embedding = model.get_input_embeddings().weight
    if embedding.requires_grad and embedding is head_of(model).weight:
        ledger.add_in_place(embedding.nbytes)
    return ledger


def fake_in_place(model: torch.nn.Module, mode: FakeTensorMode, *, is_light: bool) -> None:
    """Replaces meta tensors by fake CPU tensors and keeps ties, which `.to()` cannot do (it swaps the tensors)."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for owner in (module._parameters, module._buffers):
            for name, tensor in owner.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    new: Any = light(mode, tensor) if is_light else FakeTensor(mode, tensor.detach(), CPU)
                    new._is_param = isinstance(tensor, torch.nn.Parameter)
                    made[id(tensor)] = tensor, new.requires_grad_(tensor.requires_grad)  # the old one keeps its id
                owner[name] = made[id(tensor)][1]


def _offload_checkpoints(model: PreTrainedModel, ledger: Ledger) -> None:
    """Takes the inputs of checkpoints off the GPU until they are unpacked, as `save_on_cpu` does in a run."""

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        with ledger.pause():
            return tensor.clone()

    def offload(checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(to_host, torch.Tensor.clone):
            return checkpoint(*args, **kwargs)

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer._gradient_checkpointing_func = partial(offload, layer._gradient_checkpointing_func)


def _mark_layers(model: PreTrainedModel, ledger: Ledger, unit: Unit | None) -> None:
    layers = decoder_layers(model)
    if not layers:
        raise Untraceable(f"{type(model).__name__} has no layers that support checkpointing")
    for i, (owner, name, layer) in enumerate(layers):
        owner._modules[name] = MarkedLayer(layer, i, ledger, is_last=i == len(layers) - 1, unit=unit)
