"""Forecast for the goals of speed on H100: recipes of an 8B model, with one setting after another.

    python benchmarks/speed_goals.py --page

Writes its table in docs/speed.md. Three minutes of one core.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else deepspeed, which transformers may import, warns
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cookbook.config.recipe import Recipe, load_recipe  # noqa: E402
from cookbook.config.strategy import load_strategy, strategy_path  # noqa: E402
from cookbook.forecast.costs.flops import Step, sizes_of, work  # noqa: E402
from cookbook.forecast.fitting import fitting  # noqa: E402
from cookbook.forecast.skeleton import skeleton  # noqa: E402
from cookbook.forecast.verdict import tokens_of_step  # noqa: E402
from cookbook.start.run_plan import KINDS, even  # noqa: E402
from cookbook.system.hardware import parse_machines  # noqa: E402
from cookbook.training.models.structure import find_config  # noqa: E402

PAGE = ROOT / "docs" / "speed.md"
BEGIN, END = "<!-- speed_goals:begin -->\n", "<!-- speed_goals:end -->\n"


@dataclass(frozen=True)
class Case:
    """A recipe under a strategy."""

    recipe: str
    strategy: str
    machines: str
    before: tuple[int, bool]
    """Micro-batch and checkpointing that the recipe had before they were `auto`, for cards of 24 to 48 GB."""
    goal: float
    """Share of the card's dense peak in bf16."""
    published: str


CASES = [
    Case("llama31_8b/sft", "fsdp2", "8xH100", (2, True), 0.45, "5,605 eager, 6,514 compiled (torchtitan, 128 H100)"),
    Case("llama31_8b/sft_lora", "single", "1xH100", (2, True), 0.40, "12,473 (Automodel)"),
    Case("llama31_8b/sft_qlora", "single", "1xH100", (1, True), 0.25, "3,403 (here, micro-batch 1)"),
]


def rows(case: Case) -> Iterator[str]:
    """The lines of a case."""
    micro, is_recomputed = case.before
    before = [f"batch.micro_batch_size={micro}", f"model.gradient_checkpointing={str(is_recomputed).lower()}"]
    plain = load_recipe(ROOT / f"recipes/{case.recipe}.yaml", before)
    strategy, machines = load_strategy(strategy_path(case.strategy)), parse_machines(case.machines)
    sizes = even(plain.batch.global_batch_size // strategy.data_parallel_size(machines.num_gpus))
    batches = [plain.batch.model_copy(update={"micro_batch_size": size}) for size in sizes]
    compiled = plain.model_copy(update={"model": plain.model.model_copy(update={"compile": True})})
    assert machines.gpu is not None and machines.gpu.half_flops is not None
    for name, recipe, tried, kinds in (
        (f"micro-batch {micro}, all recomputed", plain, [plain.batch], [is_recomputed]),
        ("both by auto", plain, batches, KINDS),
        ("the same, compiled", compiled, batches, KINDS),
    ):
        best = fitting(recipe, strategy, machines, case.recipe, tried, kinds)[0]
        assert best.time is not None
        rates = best.time.tokens_per_second(tokens_of_step(recipe), machines.num_gpus)
        shares = [rate * flops_per_token(recipe) / machines.gpu.half_flops for rate in rates]
        settings = f"{best.batch.micro_batch_size}, {str(best.checkpointing).lower()}"
        last = (f"{case.goal:.0%}", case.published) if recipe is compiled else ("", "")
        yield (
            f"| {case.recipe}, {case.machines}, `{case.strategy}` | {name} ({settings}) |"
            f" {rates[0]:,.0f} to {rates[1]:,.0f} | {shares[0]:.0%} to {shares[1]:.0%} | {last[0]} | {last[1]} |"
        )


def flops_per_token(recipe: Recipe) -> float:
    """Useful ones: without what is computed again."""
    config, length = find_config(recipe.model)[0], recipe.data.max_length
    step = Step(num_tokens=length, num_labelled=length, length=length)
    return work(sizes_of(config, skeleton(config, recipe)), step).of_model / length


def main() -> int:
    if sys.argv[1:] != ["--page"]:
        print(__doc__)
        return 2
    head = "| recipe | settings (micro-batch, checkpointing) | tokens/s a GPU | of the card | goal | published |\n"
    table = head + "|---|---|---|---|---|---|\n" + "".join(f"{line}\n" for case in CASES for line in rows(case))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
