"""Peak allocated memory on simulated GPUs beside the forecast, for every strategy, adapter and way to checkpoint.

Rows are packed and of full length; the recipe is `memory` of tests/gpu_runs.py. Where a strategy divides experts, the
model is a mixture of which each token goes to all experts: how many a tiny router sends to a process is chance, and the
forecast has as many for each.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import simulated_gpus
from benchmarks.records import differences, dump
from cookbook.config.recipe import load_recipe
from cookbook.config.strategy import find_strategy, load_strategy
from cookbook.forecast.verdict import of_run
from cookbook.start.run_plan import make_plan
from cookbook.training.models.structure import find_config
from tests.curves import Lab, file_of, processes_of
from tests.experts import experts, experts_config, needs_experts
from tests.gpu_runs import RECIPE, RECIPES, GpuLab

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results" / "simulated.json"
PAGE = ROOT / "docs" / "simulated_gpus.md"
BEGIN, END = "<!-- benchmarks/forecast_accuracy -->\n", "<!-- end -->\n"
COMMAND = "python benchmarks/forecast_accuracy/run.py simulated"
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes")
SHIPPED = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
MIXTURE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "hidden_size": 512,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""A Qwen3-MoE of the width of the recipe's model, whose experts are most of it."""
ADAPTERS = ("full", "lora", "qlora")
CHECKPOINTING = ("false", "true", "selective", "offload")
REFUSED = 2
"""The exit code of a combination that no run takes."""


def settings_of(strategy: str, adapter: str, checkpointing: str, accumulates: bool) -> dict[str, str]:
    """As for `--set`: a step of 8 samples, in one micro-batch or in as many as there are in half of it."""
    sharers = load_strategy(find_strategy(strategy)).data_parallel_size(processes_of(strategy))
    micro = max(1, 4 // sharers) if accumulates else 8 // sharers
    chosen = {
        "data.packing": "true",
        "model.gradient_checkpointing": checkpointing,
        "batch": f"{{global_batch_size: 8, micro_batch_size: {micro}}}",
    }
    return chosen if adapter == "full" else chosen | {"adapter": f"{{name: {adapter}, rank: 8}}"}


def measure(
    lab: GpuLab, on_cpu: Lab, strategies: Sequence[str], adapters: Sequence[str], ways: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row for each combination: the peak of the GPU that had most, and the forecast; or that it was refused."""
    for strategy, adapter, checkpointing, accumulates in product(strategies, adapters, ways, (True, False)):
        settings = experts(on_cpu, **MIXTURE) if needs_experts(strategy) else {}
        settings |= settings_of(strategy, adapter, checkpointing, accumulates)
        run = lab.run(strategy, settings, recipe="memory", ends=None)
        row = {"strategy": strategy, "adapter": adapter, "checkpointing": checkpointing, "accumulates": accumulates}
        if set(run.codes) == {0}:
            row["peak_bytes"] = max(max(run.report(rank)["peak_bytes"]) for rank in range(len(run.codes)))
            row["forecast_bytes"] = run.record["forecast"]["allocated"]
        elif REFUSED not in run.codes:
            sys.exit(f"{row} ended with {run.codes}\n{run.log()[-2000:]}")
        yield row


def forecast_again(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A row with its forecast as of now; as it was where the run was refused."""
    if "peak_bytes" not in row:
        return row
    settings = {}
    if needs_experts(row["strategy"]):
        experts_config(**MIXTURE).save_pretrained(folder / "mixture")
        settings["model"] = f"{{name_or_path: {folder / 'mixture'}}}"
    settings |= settings_of(row["strategy"], row["adapter"], row["checkpointing"], row["accumulates"])
    forecast = forecast_of(row["strategy"], settings, folder, processes=processes_of(row["strategy"]))
    return row | {"forecast_bytes": forecast}


def forecast_of(name: str, settings: dict[str, str], folder: Path, *, processes: int, recipe: str = "memory") -> int:
    """The forecast of the peak under a strategy as the runs have it, in bytes.

    Args:
        folder: for the recipe, which is of this name in tests/gpu_runs.py.
    """
    path = folder / f"{recipe}.yaml"
    path.write_text(RECIPE.format(**RECIPES[recipe]), encoding="utf-8")
    loaded = load_recipe(path, [f"{key}={value}" for key, value in settings.items()])
    strategy = load_strategy(Path(file_of(name, folder))).for_processes(processes, processes)
    plan = make_plan(loaded, strategy, num_processes=processes, num_gpus=processes, recipe_name=str(path))
    config, _ = find_config(loaded.model)
    with patch.dict(os.environ, {simulated_gpus.COUNT: str(processes)}):  # they have no cuBLAS and its workspaces
        return of_run(config, loaded, strategy, plan, None).allocated


def error_of(row: dict[str, Any]) -> float | None:
    """Error of the forecast of the peak, relative to the forecast; None where the run was refused."""
    return row["peak_bytes"] / row["forecast_bytes"] - 1 if "peak_bytes" in row else None


def table(rows: list[dict[str, Any]]) -> str:
    """By strategy and adapter, the error that is farthest from 0."""
    lines = [f"| strategy | {' | '.join(ADAPTERS)} |", "|---" * (1 + len(ADAPTERS)) + "|"]
    for strategy in sorted({row["strategy"] for row in rows}):
        cells = []
        for adapter in ADAPTERS:
            errors = [error_of(row) for row in rows if (row["strategy"], row["adapter"]) == (strategy, adapter)]
            ran = [error for error in errors if error is not None]
            cells.append(f"{max(ran, key=abs):+.1%}" if ran else "refused")
        lines.append(f"| `{strategy}` | {' | '.join(cells)} |")
    if later := sorted(set(SHIPPED) - {row["strategy"] for row in rows}):
        lines += ["", f"Not measured: {', '.join(f'`{name}`' for name in later)}."]
    return "\n".join(lines) + "\n"


def of_now() -> dict[str, Any]:
    """The machine and the versions of a run that is measured now."""
    return {"machine": f"{platform.machine()}, CPU only", "versions": {name: version(name) for name in PACKAGES}}


def write_results(rows: list[dict[str, Any]], of_runs: dict[str, Any]) -> None:
    record = {"command": COMMAND, **of_runs, "rows": sorted(rows, key=lambda row: row["strategy"])}
    RESULTS.write_text(dump(record) + "\n", encoding="utf-8")


def write_page(rows: list[dict[str, Any]]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{table(rows)}{END}{after}", encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--forecast", action="store_true", help="compute the forecasts again; peaks are kept")
    parser.add_argument("--folder", type=Path, help="where the runs go, and are found again")
    parser.add_argument("--strategies", nargs="+", choices=SHIPPED, default=SHIPPED, help="the others stay")
    parser.add_argument("--adapters", nargs="+", choices=ADAPTERS, default=ADAPTERS, help="likewise")
    parser.add_argument("--checkpointing", nargs="+", choices=CHECKPOINTING, default=CHECKPOINTING, help="likewise")


def main(arguments: argparse.Namespace) -> None:
    """Measures, or computes the forecasts again, unless only the page is asked for; writes the page's table."""
    recorded = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": []}
    if arguments.forecast:
        with tempfile.TemporaryDirectory() as made:
            rows = [
                forecast_again(row, Path(made)) if row["strategy"] in arguments.strategies else row
                for row in recorded["rows"]
            ]
        write_results(rows, {key: recorded[key] for key in ("machine", "versions")})
    elif not arguments.page:
        with tempfile.TemporaryDirectory() as made:
            measure_into(recorded, arguments, arguments.folder or Path(made))
    write_page(json.loads(RESULTS.read_text(encoding="utf-8"))["rows"])


def measure_into(recorded: dict[str, Any], arguments: argparse.Namespace, folder: Path) -> None:
    """Measures what is asked for, and writes it as it goes. Of another machine or other versions than the record, all
    rows replace it at the end, and some are printed only.
    """
    now, kinds = of_now(), (arguments.strategies, arguments.adapters, arguments.checkpointing)
    another = differences(recorded, now, now)
    is_all = [set(chosen) for chosen in kinds] == [set(SHIPPED), set(ADAPTERS), set(CHECKPOINTING)]
    if another and not is_all:
        print(f"Some rows cannot join the record, and are printed only: {'; '.join(another)}", flush=True)
    rows = [] if another else recorded["rows"]
    on_cpu = Lab(folder / "cpu")
    lab = GpuLab(folder, on_cpu.parent)
    for row in measure(lab, on_cpu, *kinds):
        key = list(row.items())[:4]
        rows = [kept for kept in rows if list(kept.items())[:4] != key] + [row]
        if not another:
            write_results(rows, now)
        error = error_of(row)
        print(*(value for _, value in key), "refused" if error is None else f"{error:+.2%}", flush=True)
    lab.close()
    if another and is_all:
        write_results(rows, now)
