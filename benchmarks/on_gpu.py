"""Recipes of the library on this machine's GPU: speed and peak memory beside the forecast.

    python benchmarks/on_gpu.py [--cells NAME ...] [--folder FOLDER] [--memory-only]
    python benchmarks/on_gpu.py --page

Each cell runs a recipe for a few steps on one GPU, with a model of the recipe's sizes and random weights, and rows that
fill every sequence: neither changes speed or memory, and neither has to be fetched. Writes
benchmarks/results/on_gpu.json as cells end. `--page` needs no GPU: it writes the tables of docs/on_gpu.md from the
results and today's forecasts.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cookbook.config.recipe import load_recipe, read_recipe  # noqa: E402
from cookbook.config.strategy import load_strategy  # noqa: E402
from cookbook.facts.offline import known_model  # noqa: E402
from cookbook.forecast.ranking import forecast_all  # noqa: E402
from cookbook.forecast.verdict import Forecast, tokens_of_step  # noqa: E402
from cookbook.system.files import dump_yaml  # noqa: E402
from cookbook.system.hardware import GIB, Machines, find_gpu, parse_machines  # noqa: E402
from cookbook.training.models.tokenizer_files import stand_in_tokenizer  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "on_gpu.json"
PAGE = ROOT / "docs" / "on_gpu.md"
BEGIN, END = "<!-- benchmarks/on_gpu.py -->\n", "<!-- end -->\n"
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes", "triton")
NUM_STEPS, NUM_WARMUP = 6, 2
"""Steps of a cell; the first are not timed: kernels are chosen, compiled and loaded."""
LIMIT_SECONDS = 240
NUM_ROWS, NUM_WORDS = 256, 2600
"""Rows of data, and words of an answer: more than any sequence holds, so that all have the forecast's full length."""


@dataclass(frozen=True)
class Cell:
    recipe: str
    settings: dict[str, Any] = field(default_factory=dict)
    """By dotted key, in place of the recipe's."""

    @property
    def name(self) -> str:
        changed = (f"{key.rpartition('.')[2]}={value}" for key, value in self.settings.items())
        return " ".join([self.recipe, *changed])


QWEN, QWEN_LORA = "qwen3_0_6b/sft", "qwen3_4b/sft_lora"
LARGER, SMALL_STEP = {"batch.micro_batch_size": 8}, {"batch.global_batch_size": 4}
"""A step of few samples has the speed of a step of many: it is their time that is measured."""
WHEN_MEASURED = {QWEN: {"batch.micro_batch_size": 1, "model.gradient_checkpointing": False}}
"""Values that a recipe had where it leaves the choice to `auto` today."""
CELLS = [
    Cell("llama31_8b/sft_qlora", SMALL_STEP),
    Cell("llama31_8b/sft_lora", {"strategy": "single"} | SMALL_STEP),
    Cell("llama31_8b/sft_dora", SMALL_STEP),
    Cell("qwen3_4b/orpo_lora", SMALL_STEP),
    Cell(QWEN),
    Cell("qwen3_0_6b/sft_lora"),
    Cell(QWEN, LARGER),
    Cell(QWEN, LARGER | {"model.compile": True}),
    Cell(QWEN, LARGER | {"model.gradient_checkpointing": True}),
    Cell(QWEN, LARGER | {"model.gradient_checkpointing": "selective"}),
    Cell(QWEN, LARGER | {"model.gradient_checkpointing": True, "model.compile": True}),
    Cell(QWEN_LORA, LARGER),
    Cell(QWEN_LORA, LARGER | {"model.compile": True}),
    Cell("smollm2_135m/sft"),
    Cell("tinystories_7m/cpt"),
    Cell(QWEN, {"strategy": "fsdp2"}),
    Cell(QWEN, {"strategy": "zero3"}),
    Cell(QWEN, {"strategy": "fsdp2_offload"}),
    Cell(QWEN, {"strategy": "zero2_offload"}),
]


def write_model(name: str, folder: Path) -> None:
    """A model of its sizes with random weights, made on the GPU, and a small tokenizer with its special tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = known_model(name)
    assert facts is not None
    config = AutoConfig.for_model(**facts["config"])
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    stand_in_tokenizer(facts, [text_of(random.Random(0), 4000)]).save_pretrained(folder)


def text_of(chance: random.Random, num_words: int) -> str:
    return " ".join("".join(chance.choices("abcdefghij", k=chance.randint(2, 5))) for _ in range(num_words))


def write_rows(kind: str, path: Path) -> None:
    chance = random.Random(0)

    def turn(role: str, num_words: int) -> dict[str, str]:
        return {"role": role, "content": text_of(chance, num_words)}

    def row() -> dict[str, Any]:
        if kind == "text":
            return {"text": text_of(chance, NUM_WORDS)}
        prompt = turn("user", 30)
        if kind == "messages":
            return {"messages": [prompt, turn("assistant", NUM_WORDS)]}
        return {"chosen": [prompt, turn("assistant", NUM_WORDS)], "rejected": [prompt, turn("assistant", NUM_WORDS)]}

    path.write_text("".join(json.dumps(row()) + "\n" for _ in range(NUM_ROWS)), encoding="utf-8")


def write_recipe(cell: Cell, folder: Path) -> Path:
    """The recipe of a cell with what it needs beside it, in `folder`."""
    source = ROOT / "recipes" / f"{cell.recipe}.yaml"
    recipe, values = load_recipe(source), read_recipe(source).values
    model = values["model"]
    if name := model.get("name_or_path"):
        model["name_or_path"] = str(folder / name)
        model.pop("revision", None)
        if not (folder / name).exists():
            write_model(name, folder / name)
    kind = recipe.objective.rows[0]
    if not (rows := folder / f"{kind}.jsonl").exists():
        write_rows(kind, rows)
    data = {key: values["data"][key] for key in ("max_length", "packing", "chat_template") if key in values["data"]}
    values["data"] = data | {"train": str(rows)}
    values["run"] = {"max_steps": NUM_STEPS, "output_dir": str(folder / "run"), "check_export": False}
    values["schedule"] = {"name": "constant"}
    for key, value in cell.settings.items():
        section, _, name = key.rpartition(".")
        (values[section] if section else values)[name] = value
    path = folder / "recipe.yaml"
    path.write_text(dump_yaml(values))
    return path


def measure(cell: Cell, folder: Path, *, has_speed: bool) -> dict[str, Any]:
    """Runs a cell. Returns its row; `error` where it failed."""
    path = write_recipe(cell, folder)
    shutil.rmtree(folder / "run", ignore_errors=True)
    started = time.monotonic()
    words = ["launch", str(path), "--processes", "1", "--set", f"run.output_dir={folder / 'run'}"]
    with (folder / "log").open("w+") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "cookbook", *words],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        try:
            code = run.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # its processes would keep the GPU
            code = run.wait()
        log.seek(0)
        said = log.read()
    row: dict[str, Any] = {"cell": cell.name, "recipe": cell.recipe, "settings": cell.settings}
    row |= {"steps": [NUM_STEPS, NUM_WARMUP], "whole_seconds": round(time.monotonic() - started, 1)}
    if code:
        errors = re.findall(r"(?m)^.*\w+Error: .*$", said) or [f"not within {LIMIT_SECONDS} s" if code < 0 else ""]
        return row | {"error": f"exit code {code}: {errors[-1][-200:]}"}
    recipe = load_recipe(path)
    record = json.loads((folder / "run" / "run.json").read_text())
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line][NUM_WARMUP:]
    seconds = statistics.median(line["step_seconds"] for line in steps)
    tokens = statistics.median(line["num_tokens"] for line in steps)
    row |= {
        "strategy": record["strategy"]["file"],
        "tokens_a_step": tokens,
        "most_tokens_a_step": tokens_of_step(recipe),
        "peak_allocated": round(record["peak_memory_gib"]["allocated"] * GIB),
        "peak_reserved": round(record["peak_memory_gib"]["reserved"] * GIB),
        "losses": [round(line["loss"], 4) for line in lines if "loss" in line],
    }
    if has_speed:
        row |= {
            "tokens_per_second": round(tokens / seconds),
            "mfu": round(statistics.median(line["mfu"] for line in steps), 4),
            "step_seconds": [round(line["step_seconds"], 4) for line in steps],
            "data_seconds": round(statistics.median(line["data_seconds"] for line in steps), 5),
        }
    return row


def forecast_of(row: dict[str, Any], machines: Machines) -> Forecast:
    """The forecast of a row of the results, with its recipe as it is today but for `WHEN_MEASURED`."""
    path = ROOT / "recipes" / f"{row['recipe']}.yaml"
    settings = WHEN_MEASURED.get(row["recipe"], {}) | row["settings"]
    recipe = load_recipe(path, [f"{key}={value}" for key, value in settings.items()])
    (outcome,) = forecast_all(
        recipe, [load_strategy(Path(recipe.strategy))], machines, str(path), limits=False
    ).forecasts
    return outcome


def is_full(row: dict[str, Any]) -> bool:
    """True if every sequence had data.max_length tokens, as the forecast has them."""
    return "error" not in row and row["tokens_a_step"] == row["most_tokens_a_step"]


def shown(row: dict[str, Any]) -> str:
    changed = ", ".join(f"`{key}: {value}`" for key, value in row["settings"].items())
    return f"`recipes/{row['recipe']}.yaml`" + (f", {changed}" if changed else "")


def tables(results: dict[str, Any]) -> str:
    """Memory and speed of the rows of full length, then what else was run, then what an earlier loss took."""
    machines = parse_machines(f"1x{results['forecast_as']}")
    lines = ["| recipe, and what was changed | GiB allocated | forecast | GiB reserved | reserved / allocated |"]
    lines.append("|---" * 5 + "|")
    speeds = ["| recipe, and what was changed | tokens/s | MFU | forecast |", "|---" * 4 + "|"]
    for row in filter(is_full, results["rows"]):
        outcome = forecast_of(row, machines)
        assert outcome.memory is not None and outcome.time is not None
        peak, reserved = row["peak_allocated"], row["peak_reserved"]
        difference = f"{outcome.memory.allocated / GIB:.2f} ({outcome.memory.allocated / peak - 1:+.1%})"
        sizes = f"{peak / GIB:.2f} | {difference} | {reserved / GIB:.2f} | {reserved / peak:.2f}"
        lines.append(f"| {shown(row)} | {sizes} |")
        if "tokens_per_second" in row:
            low, high = outcome.time.tokens_per_second(row["tokens_a_step"], 1)
            speed = f"{row['tokens_per_second']:,} | {row['mfu']:.1%} | {low:,.0f} to {high:,.0f}"
            speeds.append(f"| {shown(row)} | {speed} |")
    other = ["| recipe, and what was changed | tokens/s | GiB allocated | reserved / allocated |", "|---" * 4 + "|"]
    for row in [row for row in results["rows"] if not is_full(row)] + results.get("earlier", {"rows": []})["rows"]:
        if "error" in row:
            other.append(f"| {shown(row)} | {row['error']} | | |")
        else:
            ratio = row["peak_reserved"] / row["peak_allocated"]
            speed = f"{row['tokens_per_second']:,}" if "tokens_per_second" in row else ""
            sizes = f"{speed} | {row['peak_allocated'] / GIB:.2f} | {ratio:.2f}"
            other.append(f"| {shown(row)} | {sizes} |")
    return "\n\n".join("\n".join(part) for part in (lines, speeds, other)) + "\n"


def write_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(
        before + BEGIN + "\n" + tables(json.loads(RESULTS.read_text())) + "\n" + END + after, encoding="utf-8"
    )


def describe_gpu() -> tuple[str, str]:
    """Its name, and as `plan --gpus` takes it."""
    import torch

    name = torch.cuda.get_device_name(0)
    gpu = find_gpu(name)
    return name, gpu.name if gpu else f"{round(torch.cuda.get_device_properties(0).total_memory / 1e9)}GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=[], help="only those of these names or recipes")
    parser.add_argument("--memory-only", action="store_true", help="beside other work on the machine")
    parser.add_argument("--folder", type=Path, help="where models and rows are kept; a temporary folder unless given")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="write docs/on_gpu.md, and run nothing")
    arguments = parser.parse_args()
    if arguments.page:
        write_page()
        return
    name, short = describe_gpu()
    chosen = [cell for cell in CELLS if not arguments.cells or {cell.name, cell.recipe} & set(arguments.cells)]
    about = {
        "command": "python benchmarks/on_gpu.py",
        "gpu": name,
        "forecast_as": short,
        "machine": f"{os.cpu_count()} cores",
        "date": date.today().isoformat(),
        "versions": {package: version(package) for package in PACKAGES},
    }
    with tempfile.TemporaryDirectory() as made:
        folder = (arguments.folder or Path(made)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        for cell in chosen:
            row = measure(cell, folder, has_speed=not arguments.memory_only)
            rows.append(row)
            arguments.results.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
