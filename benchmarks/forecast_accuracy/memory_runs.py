"""A published run under our forecast: `trace` for what forward and backward hold, `states` and `peak` for the rest,
and what its program's model does otherwise than ours."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from benchmarks.forecast_accuracy.memory_rows import PROGRAMS, Loss, Program, Setup, program_of
from benchmarks.forecast_accuracy.models import config_of
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import find_strategy, load_strategy
from cookbook.forecast.activations import ActivationTrace
from cookbook.forecast.costs.inputs import Skeleton, Weight, cost_inputs
from cookbook.forecast.costs.states import ResidentBytes, States, Unit, states
from cookbook.forecast.memory import Memory, peak
from cookbook.forecast.skeleton import skeleton
from cookbook.forecast.trace import trace


def _loss(
    kind: Loss, linear: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihoods, (L,), as the program computes them, and the logits that it returns beside them."""
    if kind == "in eight parts":
        # All logits exist, in 16 bits; no more than one part's in float32 (torchtune's CEWithChunkedOutputLoss, after
        # which torchtitan's of its PR 996 was made).
        parts = [linear(part) for part in hidden.chunk(8)]
        losses = [F.cross_entropy(a.float(), b, reduction="none") for a, b in zip(parts, targets.chunk(8), strict=True)]
        return torch.cat(losses), hidden
    logits = linear(hidden)
    if kind == "whole, bf16":
        return F.cross_entropy(logits, targets, reduction="none"), logits
    if kind == "whole, float32":
        return F.cross_entropy(logits.float(), targets, reduction="none"), logits
    assert kind == "shifted copy"  # transformers until 4.45: float32, then a copy without the last position
    logits = logits.float()
    return F.cross_entropy(logits[:-1].clone(), targets[:-1], reduction="none"), logits


class _FourBits(torch.autograd.Function):
    """A product with a weight that is made 16-bit for the moment."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, program: Program) -> torch.Tensor:
        ctx.weight, ctx.program = weight, program
        if program.keeps_inputs_of_4_bits:
            ctx.save_for_backward(hidden)
        return F.linear(hidden, _made_16_bit(weight, program), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:
        return gradients[0] @ _made_16_bit(ctx.weight, ctx.program), None, None, None


def _made_16_bit(weight: torch.Tensor, program: Program) -> torch.Tensor:
    if program.fp16_of_4_bits:
        return torch.empty_like(weight, dtype=torch.float16).to(weight.dtype)
    return torch.empty_like(weight)


def _every_second(operations: list[str]) -> list[bool]:
    """torchtitan's selective checkpointing keeps attention, and the first, third, ... product of a layer (its
    activation_checkpoint.py)."""
    is_product = [name in ("mm", "addmm", "linear") for name in operations]
    return [
        sum(is_product[: i + 1]) % 2 == 1 if is_product[i] else "attention" in name for i, name in enumerate(operations)
    ]


def _keep_every_second(
    passed: tuple[list[str], list[str]], context: Any, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    names = passed[context.is_recompute]
    names.append(operation.__name__.partition(".")[0])
    return CheckpointPolicy.MUST_SAVE if _every_second(names)[-1] else CheckpointPolicy.PREFER_RECOMPUTE


def _change(setup: Setup, model: PreTrainedModel) -> None:
    if setup.checkpointing == "every second product":
        options = {
            "use_reentrant": False,
            "context_fn": lambda: create_selective_checkpoint_contexts(partial(_keep_every_second, ([], []))),
        }
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(options)
    program = program_of(setup)
    head: Any = model.get_output_embeddings()
    if program.one_product_for_qkv:
        _join_qkv(model)

    def linear(hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, head.weight, head.bias)

    product = _in_4_bits(head, program) if setup.four_bits and program.head_in_4_bits else linear

    def with_loss(hidden: torch.Tensor, targets: torch.Tensor, *transform: object, function: None) -> torch.Tensor:
        losses, logits = _loss(setup.loss, product, hidden, targets)
        if program.keeps_logits:
            head.kept = logits.detach()
        return losses

    head.forward = with_loss
    if setup.four_bits:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not head and not module.weight.requires_grad:
                module.forward = _in_4_bits(module, program)  # type: ignore[assignment, method-assign]


def _join_qkv(model: PreTrainedModel) -> None:
    """Lets each layer's values lie in a tensor that has room for queries and keys; keys and values of grouped heads
    are copied for each head, so that there they do not."""
    config = model.config
    if getattr(config, "num_key_value_heads", config.num_attention_heads) != config.num_attention_heads:
        return

    def widen(module: torch.nn.Module, inputs: Any, values: torch.Tensor) -> torch.Tensor:
        return F.pad(values, (0, 2 * values.shape[-1]))[..., : values.shape[-1]]

    for name, module in model.named_modules():
        if name.endswith(".v_proj"):
            module.register_forward_hook(widen)


def _in_4_bits(layer: Any, program: Program) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda hidden: _FourBits.apply(hidden, layer.weight, layer.bias, program)


def recipe_of(setup: Setup) -> Recipe:
    """Part of a setup that a recipe can say."""
    adapter = None
    if setup.adapter is not None:
        rank, targets = setup.adapter
        adapter = {
            "name": "qlora" if setup.four_bits else "lora",
            "rank": rank,
            "targets": list(targets),
            "dropout": PROGRAMS[setup.program].dropout,
        }
    return recipe(
        "fsdp2",
        {
            "name_or_path": setup.model,
            "gradient_checkpointing": {"none": False, "full": True, "every second product": "selective"}[
                setup.checkpointing
            ],
            "compile": setup.is_compiled,
        },
        adapter,
        length=setup.length,
        rows=setup.rows,
        rows_a_step=setup.rows * setup.processes,
    )


def recipe(
    strategy: str,
    model: dict[str, Any],
    adapter: dict[str, Any] | None,
    *,
    length: int,
    rows: int,
    rows_a_step: int,
) -> Recipe:
    """A recipe of one step, on micro-batches of so many rows."""
    return Recipe.model_validate(
        {
            "strategy": f"accelerate_configs/{strategy}.yaml",
            "model": model,
            "data": {"train": "python-stdlib", "max_length": length, "packing": False},
            "adapter": adapter,
            "batch": {"global_batch_size": rows_a_step, "micro_batch_size": rows},
            "optim": {"learning_rate": 1e-5},
            "run": {"max_steps": 1, "output_dir": "outputs/published"},
        }
    )


@cache
def work_of(setup: Setup) -> ActivationTrace:
    """Memory that its forward and backward hold."""
    rows = -(-setup.rows // setup.split_of_rows)
    return trace(
        config_of(setup.model),
        recipe_of(setup),
        rows=rows,
        length=setup.length,
        num_targets=rows * setup.length,
        autocast=False,
        tp_size=1,
        change=partial(_change, setup),
        kept=_every_second if setup.checkpointing == "every second product" else None,
    )


def forecast(setup: Setup) -> Memory:
    """The peak of a run."""
    model = skeleton(config_of(setup.model), recipe_of(setup))
    held = states_of(setup, model)
    is_sharded = setup.processes > 1 and setup.shards != ""
    if setup.first_step:
        held = replace(held, gpu=replace(held.gpu, moments=0))
    work = work_of(replace(setup, kind="allocated", processes=1, shards="", gpu_gib=0.0, first_step=False))
    return peak(model, held, work, accumulates=setup.accumulates, is_sharded=is_sharded)


def states_of(setup: Setup, model: Skeleton) -> States:
    """States that a process of the program holds."""
    if PROGRAMS[setup.program].weights == "bf16":
        return _in_16_bits(setup, model)
    name = setup.shards if setup.reshards else "fsdp2_grad_op"
    strategy = load_strategy(find_strategy(name))
    held = states(model, cost_inputs(recipe_of(setup), strategy, setup.processes))
    return _with_one_root(held) if setup.root_has_ends else held


def _with_one_root(held: States) -> States:
    """FSDP2 whose root unit has embedding, last norm and head."""
    ends = [unit for unit in held.units if unit.layer is None]
    root = Unit(
        layer=None,
        parts=("embedding", "norm", "head"),
        weights=sum(unit.weights for unit in ends),
        gradients=sum(unit.gradients for unit in ends),
        gradients_made=sum(unit.gradients_made for unit in ends),
        gradients_left=sum(unit.gradients_left for unit in ends),
        sent=sum(unit.sent for unit in ends),
        stays=True,
    )
    return replace(held, units=(root, *(unit for unit in held.units if unit.layer is not None)))


def _in_16_bits(setup: Setup, model: Skeleton) -> States:
    """Weights, gradients and both moments of 2 bytes, shared out by FSDP1 if it has several processes."""
    program = program_of(setup)
    shards = setup.processes if setup.shards and not setup.shards_nothing else 1

    def size(weight: Weight) -> float:
        """Bytes of the part that is shared out."""
        if weight.is_trained:
            return weight.num_elements * 2.0
        if _is_in_4_bits(setup, weight):
            return weight.num_elements * (0.5 if setup.shards else setup.four_bits)
        return weight.num_elements * 2.0

    in_4_bits = sum(weight.num_elements for weight in model.weights if _is_in_4_bits(setup, weight))
    weights = sum(size(weight) for weight in model.weights)
    trained = sum(size(weight) for weight in model.weights if weight.is_trained)
    held = ResidentBytes(
        weights=round(weights / shards), gradients=round(trained / shards), moments=round(2 * trained / shards)
    )
    layers = {
        number: [weight for weight in model.weights if weight.layer == number] for number in range(model.num_layers)
    }
    of_layer = [round(sum(map(size, inside))) for inside in layers.values()]
    between = held.gradients
    if shards > 1 and program.whole_gradients:
        between = sum(of_layer) if setup.adapter else round(weights)
        held = replace(held, gradients=round(between / shards))
    # The scales of 4-bit weights are no parameters, and stay whole.
    scales = round(in_4_bits * (setup.four_bits - 0.5)) if setup.shards else 0
    root = round(weights) - sum(of_layer)
    return States(
        gpu=ResidentBytes(buffers=scales) if setup.on_cpu else replace(held, buffers=scales),
        gradients_at_first=0,
        gradients_between=0 if setup.on_cpu else between,
        gathered_weights=root + sum(sorted(of_layer)[-2:]) if shards > 1 else 0,
    )


def _is_in_4_bits(setup: Setup, weight: Weight) -> bool:
    is_head = weight.part == "head" and len(weight.shape) == 2 and PROGRAMS[setup.program].head_in_4_bits
    return setup.four_bits > 0 and (weight.is_quantized or is_head)
