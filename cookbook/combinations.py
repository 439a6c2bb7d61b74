"""Combinations that cannot work: one table, checked before anything starts, and printed as docs/combinations.md."""

from collections.abc import Callable
from dataclasses import dataclass

from cookbook.recipe import Recipe
from cookbook.registry import Refusal, known
from cookbook.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Combination:
    """Settings that are right by themselves and wrong together."""

    what: str
    """Both sides, in words."""
    clashes: Callable[[Recipe, Strategy, int], bool]
    """Of a recipe, a strategy and the number of GPUs (0: the run uses the CPU)."""
    why: str
    seen: str
    """The versions on which it was seen, or "by design"."""
    way_out: str


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
        clashes=lambda recipe, strategy, num_gpus: recipe.mixed_precision == "fp16" and strategy.kind == "tp",
        why="torch's GradScaler unscales all gradients in one call, and tensor parallel has whole and cut ones",
        seen="torch 2.13",
        way_out="mixed_precision: bf16",
    ),
    Combination(
        what="adapter.name: dora or qlora with tensor parallel",
        clashes=lambda recipe, strategy, num_gpus: (
            recipe.adapter is not None and recipe.adapter.name != "lora" and strategy.kind == "tp"
        ),
        why="dora adds cut and whole tensors, and bitsandbytes cannot cut its 4-bit weights",
        seen="peft 0.21.2, bitsandbytes 0.50.2, transformers 5.23",
        way_out="adapter.name: lora, or accelerate_configs/fsdp2.yaml, which shards the frozen weights as well",
    ),
    Combination(
        what="adapter.name: qlora with FSDP1",
        clashes=lambda recipe, strategy, num_gpus: (
            recipe.adapter is not None and recipe.adapter.name == "qlora" and strategy.kind == "fsdp1"
        ),
        why="FSDP1 flattens weights of one floating dtype, and 4-bit weights are bytes",
        seen="torch 2.13, bitsandbytes 0.50.2",
        way_out="accelerate_configs/fsdp2.yaml or ddp.yaml",
    ),
    Combination(
        what="adapter.name: qlora with weights on NVMe",
        clashes=lambda recipe, strategy, num_gpus: (
            recipe.adapter is not None and recipe.adapter.name == "qlora" and strategy.offload_param == "nvme"
        ),
        why="DeepSpeed left the weights in host memory, where the file says NVMe",
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
        what="model.compile with tensor parallel",
        clashes=lambda recipe, strategy, num_gpus: recipe.model.compile and strategy.kind == "tp",
        why="tracing the cut weights does not end (RecursionError)",
        seen="torch 2.13, transformers 5.23",
        way_out="model.compile: false",
    ),
)


def combinations() -> list[Combination]:
    """The whole table: of keys, and what each optimizer refuses."""
    return [
        *OF_KEYS,
        *(_of_optimizer(name, refusal) for name, optim in known("optim").items() for refusal in optim.refusals),
    ]


def _of_optimizer(name: str, refusal: Refusal) -> Combination:
    return Combination(
        what=f"optim.name: {name} with {refusal.what}",
        clashes=lambda recipe, strategy, num_gpus: recipe.optim.name == name and refusal.clashes(strategy),
        why=refusal.why,
        seen=refusal.seen,
        way_out=refusal.way_out,
    )


def refusals(recipe: Recipe, strategy: Strategy, num_gpus: int, recipe_name: str) -> list[str]:
    """A mistake for each row of the table that this pair falls under."""
    return [
        f"{recipe_name} under {strategy.path}: {row.what}: {row.why}; use {row.way_out}"
        for row in combinations()
        if row.clashes(recipe, strategy, num_gpus)
    ]


def page() -> str:
    """docs/combinations.md, written from the table."""
    lines = [
        "# Combinations that are refused",
        "",
        "Written by `python -m cookbook combinations` from `cookbook/combinations.py`. Each row is refused by",
        "`make check` and before any run starts, with exit code 2; each has a test that it is. A recipe whose label",
        "names GPUs is checked as if it had them.",
        "",
        "| what | why | seen with | use instead |",
        "|---|---|---|---|",
        *(f"| {row.what} | {row.why} | {row.seen} | {row.way_out} |" for row in combinations()),
    ]
    return "\n".join(lines) + "\n"
