"""Combinations of settings that cannot work: a table, checked before a run starts and shown in docs/combinations.md."""

from collections.abc import Callable
from dataclasses import dataclass

from cookbook.config.optim.optimizer import Refusal
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy
from cookbook.system.registry import members


@dataclass(frozen=True, kw_only=True)
class Combination:
    """Settings that are valid alone and do not work together; see `Refusal`."""

    what: str
    clashes: Callable[[Recipe, Strategy, int], bool]
    """True if a recipe, a strategy and a number of GPUs (0: the run uses the CPU) combine them."""
    why: str
    seen: str
    way_out: str


def _with_adapter(*names: str) -> Callable[[Recipe], bool]:
    return lambda recipe: recipe.adapter is not None and recipe.adapter.name in names


OF_KEYS: tuple[Combination, ...] = (
    Combination(
        what="mixed_precision: fp16 without a GPU",
        clashes=lambda recipe, strategy, num_gpus: recipe.mixed_precision == "fp16" and not num_gpus,
        why="the loss scaling of fp16 needs a GPU",
        seen="torch 2.13",
        way_out="mixed_precision: bf16, or 'no'",
    ),
    Combination(
        what="mixed_precision: fp16 with tensor parallel",
        clashes=lambda recipe, strategy, num_gpus: recipe.mixed_precision == "fp16" and strategy.tp_size > 1,
        why="torch's GradScaler unscales all gradients in one call, and tensor parallel has sharded and whole ones",
        seen="torch 2.13",
        way_out="mixed_precision: bf16",
    ),
    Combination(
        what="mixed_precision: fp16 with pipeline parallel",
        clashes=lambda recipe, strategy, num_gpus: recipe.mixed_precision == "fp16" and strategy.pp_size > 1,
        why="torch's GradScaler would skip a step on the stages whose own gradients are not finite, not on the others",
        seen="torch 2.13",
        way_out="mixed_precision: bf16",
    ),
    Combination(
        what="mixed_precision: fp16 with expert parallel",
        clashes=lambda recipe, strategy, num_gpus: recipe.mixed_precision == "fp16" and strategy.ep_size > 1,
        why="transformers, which applies FSDP2 here, has mixed precision in bf16 only",
        seen="transformers 5.23",
        way_out="mixed_precision: bf16, or accelerate_configs/fsdp2.yaml",
    ),
    Combination(
        what="mixed_precision: fp8 without a GPU",
        clashes=lambda recipe, strategy, num_gpus: recipe.mixed_precision == "fp8" and not num_gpus,
        why="products of 8 bits need a GPU of Ada, Hopper or later, or simulated GPUs",
        seen="torch 2.13, torchao 0.18",
        way_out="mixed_precision: bf16",
    ),
    Combination(
        what="mixed_precision: fp8 with an adapter",
        clashes=lambda recipe, strategy, num_gpus: recipe.mixed_precision == "fp8" and recipe.adapter is not None,
        why="torchao computes the gradients of frozen weights too, which nothing uses",
        seen="torchao 0.18's source",
        way_out="mixed_precision: bf16",
    ),
    Combination(
        what="mixed_precision: fp8 with ZeRO-3",
        clashes=lambda recipe, strategy, num_gpus: recipe.mixed_precision == "fp8" and strategy.zero_stage == 3,
        why="what torchao keeps for a backward is the gathered weight, which ZeRO-3 then does not free",
        seen="the sources of deepspeed 0.19.8 and torchao 0.18",
        way_out="accelerate_configs/fsdp2.yaml",
    ),
    Combination(
        what="mixed_precision: fp8 with tensor parallel",
        clashes=lambda recipe, strategy, num_gpus: recipe.mixed_precision == "fp8" and strategy.tp_size > 1,
        why="a scale would span the part of a row that a process has, so the strategy would change the curve",
        seen="torchao 0.18's source",
        way_out="accelerate_configs/fsdp2.yaml",
    ),
    Combination(
        what="mixed_precision: fp8 with FSDP2 over pipeline or expert parallel",
        clashes=lambda recipe, strategy, num_gpus: recipe.mixed_precision == "fp8" and strategy.is_sharded_while_read,
        why="transformers applies FSDP2 while it reads the model, and so to the layers that are then replaced",
        seen="transformers 5.23, torchao 0.18",
        way_out="accelerate_configs/pp.yaml or fsdp2.yaml",
    ),
    Combination(
        what="optim.gradient_dtype with communication_data_type in the JSON",
        clashes=lambda recipe, strategy, num_gpus: (
            recipe.optim.gradient_dtype is not None and "communication_data_type" in (strategy.deepspeed or {})
        ),
        why="both set the dtype in which ZeRO exchanges gradients",
        seen="by design",
        way_out="one of them: the recipe's key for any strategy, the JSON's for fp32",
    ),
    Combination(
        what="adapter.name: dora or qlora with tensor parallel",
        clashes=lambda recipe, strategy, num_gpus: _with_adapter("dora", "qlora")(recipe) and strategy.tp_size > 1,
        why="dora adds sharded and whole tensors, and bitsandbytes cannot shard its 4-bit weights",
        seen="peft 0.21.2, bitsandbytes 0.50.2, transformers 5.23",
        way_out="adapter.name: lora, or accelerate_configs/fsdp2.yaml, which shards the frozen weights as well",
    ),
    Combination(
        what="adapter.name: dora or qlora with FSDP2 over pipeline or expert parallel",
        clashes=lambda recipe, strategy, num_gpus: (
            _with_adapter("dora", "qlora")(recipe) and strategy.is_sharded_while_read and strategy.tp_size == 1
        ),
        why="dora adds sharded and whole tensors, and peft does not find bitsandbytes' 4 bits in sharded weights",
        seen="transformers 5.23, peft 0.21.2, bitsandbytes 0.50.2",
        way_out="adapter.name: lora, or accelerate_configs/fsdp2.yaml or pp.yaml",
    ),
    Combination(
        what="adapter.modules_to_save with tensor parallel, or FSDP2 over pipeline or expert parallel",
        clashes=lambda recipe, strategy, num_gpus: (
            recipe.adapter is not None
            and bool(recipe.adapter.modules_to_save)
            and (strategy.tp_size > 1 or strategy.is_sharded_while_read)
        ),
        why="peft copies the module, and neither what tensor parallel nor what FSDP2 made of it can be copied",
        seen="peft 0.21.2, torch 2.13",
        way_out="adapter.modules_to_save: [], or accelerate_configs/fsdp2.yaml",
    ),
    Combination(
        what=(
            "objective.name: reward, classify or regress and an adapter, with tensor parallel, or FSDP2 over pipeline"
            " or expert parallel"
        ),
        clashes=lambda recipe, strategy, num_gpus: (
            recipe.adapter is not None
            and recipe.objective.num_scores is not None
            and (strategy.tp_size > 1 or strategy.is_sharded_while_read)
        ),
        why="peft trains a copy of the head, which FSDP2's has none of; tensor parallel has not been tried",
        seen="peft 0.21.2, torch 2.13",
        way_out="accelerate_configs/fsdp2.yaml, or train all weights",
    ),
    Combination(
        what="adapter.name: qlora with FSDP1",
        clashes=lambda recipe, strategy, num_gpus: _with_adapter("qlora")(recipe) and strategy.kind == "fsdp1",
        why="FSDP1 flattens weights of one floating dtype, and 4-bit weights are bytes",
        seen="torch 2.13, bitsandbytes 0.50.2",
        way_out="accelerate_configs/fsdp2.yaml or ddp.yaml",
    ),
    Combination(
        what="adapter.name: qlora with weights on NVMe",
        clashes=lambda recipe, strategy, num_gpus: _with_adapter("qlora")(recipe) and strategy.offload_param == "nvme",
        why="DeepSpeed left the weights in host memory, although the file asks for NVMe",
        seen="deepspeed 0.19.8, bitsandbytes 0.50.2",
        way_out="accelerate_configs/zero3_offload.yaml",
    ),
    Combination(
        what="model.gradient_checkpointing: selective with ZeRO-3",
        clashes=lambda recipe, strategy, num_gpus: (
            recipe.model.gradient_checkpointing == "selective" and strategy.zero_stage == 3
        ),
        why="ZeRO-3 gathers weights inside the layers, so the recomputation runs other operations than the forward",
        seen="torch 2.13, deepspeed 0.19.8",
        way_out="model.gradient_checkpointing: true, or accelerate_configs/fsdp2.yaml",
    ),
    Combination(
        what="model.gradient_checkpointing: offload with model.compile",
        clashes=lambda recipe, strategy, num_gpus: (
            recipe.model.gradient_checkpointing == "offload" and recipe.model.compile
        ),
        why="the checkpoint is a part of the compiled layer, and moving its input inside of one has not been tried",
        seen="torch 2.13, transformers 5.23",
        way_out="model.compile: false, or model.gradient_checkpointing: true",
    ),
    Combination(
        what="model.compile with ZeRO-3",
        clashes=lambda recipe, strategy, num_gpus: recipe.model.compile and strategy.zero_stage == 3,
        why="its hooks break the graph of each layer, until torch gives up and runs the layers uncompiled",
        seen="torch 2.13, deepspeed 0.19.8",
        way_out="model.compile: false, or accelerate_configs/fsdp2.yaml",
    ),
    Combination(
        what="model.compile with sequence parallel",
        clashes=lambda recipe, strategy, num_gpus: recipe.model.compile and strategy.sp_size > 1,
        why="the exchange between tokens and heads lies inside each layer, and compiling it has not been tried",
        seen="torch 2.13",
        way_out="model.compile: false",
    ),
    Combination(
        what="model.liger_kernels on GPUs",
        clashes=lambda recipe, strategy, num_gpus: recipe.model.liger_kernels and num_gpus > 0,
        why="the only run with them ended in an illegal memory access, whose cause is not known (docs/on_gpu.md)",
        seen="liger-kernel 0.8.5, triton 3.6.0",
        way_out="model.liger_kernels: false, or model.compile: true",
    ),
    Combination(
        what="model.compile with FSDP2 over pipeline parallel",
        clashes=lambda recipe, strategy, num_gpus: (
            recipe.model.compile and strategy.pp_size > 1 and strategy.fsdp is not None
        ),
        why="layers would be compiled after FSDP2 was applied to them, which has not been tried",
        seen="torch 2.13, transformers 5.23",
        way_out="model.compile: false",
    ),
    Combination(
        what="model.compile with expert parallel",
        clashes=lambda recipe, strategy, num_gpus: recipe.model.compile and strategy.ep_size > 1,
        why="the sizes of the exchanges depend on the router, and compiling them has not been tried",
        seen="torch 2.13, transformers 5.23",
        way_out="model.compile: false",
    ),
    Combination(
        what="model.compile with tensor parallel",
        clashes=lambda recipe, strategy, num_gpus: recipe.model.compile and strategy.tp_size > 1,
        why="tracing the sharded weights does not end (RecursionError)",
        seen="torch 2.13, transformers 5.23",
        way_out="model.compile: false",
    ),
)


def combinations() -> list[Combination]:
    """The whole table, including what each optimizer refuses."""
    return [
        *OF_KEYS,
        *(_of_optimizer(name, refusal) for name, optim in members("optim").items() for refusal in optim.refusals),
    ]


def _of_optimizer(name: str, refusal: Refusal) -> Combination:
    def clashes(recipe: Recipe, strategy: Strategy, num_gpus: int) -> bool:
        return recipe.optim.name == name and refusal.clashes(strategy)

    return Combination(**vars(refusal) | {"what": f"optim.name: {name} with {refusal.what}", "clashes": clashes})


def refusals(recipe: Recipe, strategy: Strategy, num_gpus: int) -> list[str]:
    """One mistake for each row of the table that applies to this pair."""
    return [
        f"{row.what}: {row.why}; use {row.way_out}" for row in combinations() if row.clashes(recipe, strategy, num_gpus)
    ]


def page() -> str:
    """docs/combinations.md, generated from the table."""
    lines = [
        "# Combinations that are refused",
        "",
        "Generated by `cookbook combinations` from `cookbook/start/refusals.py`. `cookbook check` and",
        "every start of a run refuse each row with exit code 2, which a test verifies. A recipe whose label names GPUs",
        "is checked as if the machine had them.",
        "",
        "| what | why | seen with | use instead |",
        "|---|---|---|---|",
        *(f"| {row.what} | {row.why} | {row.seen} | {row.way_out} |" for row in combinations()),
    ]
    return "\n".join(lines) + "\n"
