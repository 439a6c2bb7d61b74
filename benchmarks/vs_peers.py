"""Our training beside programs of TRL, transformers' Trainer and accelerate, step by step in turn.

    pip install --group peers
    python benchmarks/vs_peers.py [--cells WORD ...] [--pairs 10] [--quick]

A cell is two live programs with the same weights and samples: train.py, and one of benchmarks/peers. Each stops after
every update (benchmarks/race/gate.py) and goes on when the other has stopped, A B, B A, ... Writes
benchmarks/results/vs_peers.json and the tables of docs/speed.md, of this machine's GPUs or, without one, of its CPU.
Rows of another machine, or of other versions, than those of the committed results stay out of both: they are printed
beside the committed ones, and written to outputs/vs_peers.json.
"""

import argparse
import json
import os
import platform
import re
import sys
import tempfile
from copy import deepcopy
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.race.cells import (  # noqa: E402
    LEARNING_RATE,
    MAX_LENGTH,
    MICRO_BATCH_SIZES,
    MODELS,
    PEERS,
    RANK,
    ROW_LENGTH,
    SEED,
    Cell,
    all_cells,
    cell_of,
)
from benchmarks.race.page import render, speed_table  # noqa: E402
from benchmarks.race.runner import Failed, Runner  # noqa: E402
from benchmarks.records import differences  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "vs_peers.json"
APART = ROOT / "outputs" / "vs_peers.json"
"""Rows that cannot stand among the committed ones."""
SAME = ("hardware", "versions", "data")
"""Facts that rows of one table share."""
PAGE = ROOT / "docs" / "speed.md"
BEGIN, END = "<!-- vs_peers:begin -->", "<!-- vs_peers:end -->"
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "trl", "peft", "datasets")

NUM_WARMUP_STEPS = 2
CHARACTERS = (80, 400)
"""Fewest and most of an answer. Padding wastes no more than with GSM8K's chats (there, 65 % are tokens)."""


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


# Data, models and settings.


def make_workplace(folder: Path) -> dict[str, Any]:
    """Make what all programs read. Returns facts about the data for the page."""
    import numpy as np

    from cookbook.config.sections import ScratchModel
    from cookbook.training.data.stdlib import load_stdlib
    from cookbook.training.models import model_source, tokenizer_files

    for name in ("cookbook", "simulated_gpus", "train.py", "accelerate_configs", "ds_configs", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    least, most = CHARACTERS
    chats = [row for row in load_stdlib("train") if least <= len(row["messages"][-1]["content"]) <= most]
    tokenizer = tokenizer_files.train_tokenizer(
        (message["content"] for row in chats for message in row["messages"]), 4096
    )
    cells = all_cells(device())
    for name in {cell.model for cell in cells}:
        sizes = MODELS[name]
        scratch = ScratchModel.model_validate(sizes | {"num_key_value_heads": sizes["num_attention_heads"] // 2})
        model = model_source.new_model(scratch, tokenizer, SEED)
        for objective in {cell.objective for cell in cells}:
            model.save_pretrained(folder / folder_of(name, objective))
            templated(tokenizer, objective).save_pretrained(folder / folder_of(name, objective))
    write_rows(folder / "sft", chats, tokenizer, folder / "cache")
    others = [*chats[1:], chats[0]]
    pairs = [
        {"prompt": a["messages"][:1], "chosen": a["messages"][1:], "rejected": b["messages"][1:]}
        for a, b in zip(chats, others, strict=True)
    ]
    write_rows(folder / "dpo", pairs, tokenizer, folder / "cache")
    tokens, order = order_of(folder / "sft.jsonl", "sft", tokenizer, folder / "cache")
    rows = MICRO_BATCH_SIZES[device()]
    lengths = tokens.lengths[order[: len(order) // rows * rows]].reshape(-1, rows)
    return {
        "source": f"python-stdlib, answers of {least} to {most} characters",
        "chats": len(chats),
        "mean_tokens": round(float(tokens.lengths.mean()), 1),
        "median_tokens": float(np.median(tokens.lengths)),
        "max_tokens": int(tokens.lengths.max()),
        "label_share": round(float(tokens.num_targets.sum() / tokens.lengths.sum()), 3),
        "padding_efficiency": round(float(lengths.sum() / (lengths.max(1) * rows).sum()), 3),
    }


def write_rows(path: Path, rows: list[dict[str, Any]], tokenizer: Any, cache: Path) -> None:
    """path.jsonl for train.py; and path_in_order.jsonl, in the order in which it takes them, for those that do not
    shuffle.
    """
    save_lines(path.with_suffix(".jsonl"), rows)
    _, order = order_of(path.with_suffix(".jsonl"), path.name, tokenizer, cache)
    save_lines(path.with_name(f"{path.name}_in_order.jsonl"), [rows[i] for i in order])


def order_of(path: Path, objective_name: str, tokenizer: Any, cache: Path) -> tuple[Any, Any]:
    """The tokens of a file, and the numbers of its samples in the order of train.py's first epoch."""
    from cookbook.config.objectives import Objective
    from cookbook.config.sections import DataSection
    from cookbook.training.data.batches import epoch_order
    from cookbook.training.data.sets import read_data, tokenize_data

    data = DataSection.model_validate({"train": str(path), "max_length": MAX_LENGTH})
    objective = Objective.of(name=objective_name)
    tokens: Any = tokenize_data(read_data(data, objective), tokenizer, data, objective, cache=cache).train
    return tokens, epoch_order(tokens, SEED, 0)


def save_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def folder_of(model: str, objective: str) -> str:
    return f"{model.replace(' ', '')}-{objective}"


def templated(tokenizer: Any, objective: str) -> Any:
    """A copy, whose template ends with the answer for preferences: TRL scores what comes after it, ours does not."""
    marking = deepcopy(tokenizer)
    if objective == "dpo":
        line_break = '{{- "\\n" -}}\n{%- endfor -%}'
        assert line_break in marking.chat_template
        unless_answer = '{%- if not loop.last or message["role"] != "assistant" -%}'
        marking.chat_template = marking.chat_template.replace(
            line_break, line_break.replace("{{", unless_answer + "{{").replace("}}", "}}{%- endif -%}")
        )
    return marking


def our_recipe(cell: Cell, num_steps: int) -> dict[str, Any]:
    rows = MICRO_BATCH_SIZES[device()]
    recipe: dict[str, Any] = {
        "strategy": f"accelerate_configs/{cell.strategy}.yaml",
        "mixed_precision": cell.precision,
        "seed": SEED,
        "model": {"name_or_path": folder_of(cell.model, cell.objective), "gradient_checkpointing": cell.checkpointing},
        "data": {"train": f"{cell.objective}.jsonl", "max_length": MAX_LENGTH, "packing": cell.packing},
        "objective": {"name": cell.objective},
        "batch": {"global_batch_size": rows * cell.processes, "micro_batch_size": rows},
        "optim": {"learning_rate": LEARNING_RATE},
        "schedule": {"name": "constant"},
        "run": {"max_steps": num_steps, "output_dir": "outputs", "check_export": False},
    }
    return recipe | ({"adapter": {"name": "lora", "rank": RANK}} if cell.lora else {})


def their_settings(cell: Cell, num_steps: int) -> dict[str, Any]:
    """Settings that the programs in benchmarks/peers read; `arguments` are TrainingArguments."""
    is_zero, on_cpu = cell.strategy.startswith("zero"), device() == "cpu"
    return {
        "model": folder_of(cell.model, cell.objective),
        "data": f"{cell.objective}_in_order.jsonl",
        "objective": cell.objective,
        "precision": cell.precision,
        "rank": RANK if cell.lora else 0,
        "packed_rows": cell.packed_rows,
        "max_length": ROW_LENGTH.get(cell.packed_rows, MAX_LENGTH),
        "cpu": on_cpu and not is_zero,  # accelerate leaves DeepSpeed out where `cpu` is true
        "arguments": {
            "output_dir": "outputs",
            "per_device_train_batch_size": cell.packed_rows or MICRO_BATCH_SIZES[device()],
            "max_steps": num_steps,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            # Packing sorts by length: in its order the first rows would hold the longest chats.
            "train_sampling_strategy": "random" if cell.packed_rows else "sequential",
            "gradient_checkpointing": cell.checkpointing,
            "bf16": cell.precision == "bf16",
            "use_cpu": on_cpu,
            "ddp_backend": "gloo" if on_cpu and cell.processes > 1 and not is_zero else None,
            "dataloader_pin_memory": not on_cpu,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        },
    }


# The race.


def race(names: list[str], shared: Path, cell: Cell, num_pairs: int) -> dict[str, dict[str, Any]]:
    """Programs with the same settings, step by step in turn; every other time in the opposite order.

    Returns:
        `Runner.found` by name.
    """
    is_profiled = cell.processes == 1
    num_steps = NUM_WARMUP_STEPS + num_pairs + is_profiled
    runners: dict[str, Runner] = {}
    try:
        for name in names:
            program, settings = program_of(name, cell, num_steps)
            runners[name] = Runner(
                shared, program, settings, strategy=cell.strategy, processes=cell.processes, on_cpu=device() == "cpu"
            )
            runners[name].begin()
        for i in range(NUM_WARMUP_STEPS - 1 + num_pairs):
            for name in names if i % 2 else reversed(names):
                runners[name].step()
        for runner in runners.values():
            if is_profiled:
                runner.profile(MODELS[cell.model]["vocab_size"])
            runner.finish()
        return {name: runner.found(NUM_WARMUP_STEPS) for name, runner in runners.items()}
    finally:
        for runner in runners.values():
            runner.close()


def program_of(name: str, cell: Cell, num_steps: int) -> tuple[str, dict[str, Any]]:
    """A side's program, and what it reads."""
    if name == "ours":
        return "train", our_recipe(cell, num_steps)
    return f"benchmarks.peers.with_{name}", their_settings(cell, num_steps)


def measure(cell: Cell, shared: Path, num_pairs: int) -> dict[str, Any]:
    """A row of the results."""
    row: dict[str, Any] = {**asdict(cell), "date": date.today().isoformat(), "load": round(os.getloadavg()[0], 1)}
    if cell.strategy == "fsdp2" and cell.peer != "accelerate" and device() == "cpu":
        return row | {"failed": "without a GPU it trains DDP under this file, and does not say so"}
    try:
        programs = race(["ours", cell.peer], shared, cell, num_pairs)
    except Failed as error:
        return row | {"failed": str(error)}
    return row | {"ours": programs["ours"], "theirs": programs[cell.peer]}


def environment() -> dict[str, Any]:
    import torch

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "hardware": {"cpu": names[0], "cores": os.cpu_count(), "machine": platform.machine(), "gpu": gpu},
        "versions": {name: version(name) for name in PACKAGES},
    }


def write_page(results: dict[str, Any]) -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{render(results)}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def write_results(path: Path, results: dict[str, Any]) -> None:
    """One line for each row, so that a new run reads as a difference."""
    parts = []
    for name, part in results.items():
        rows = ",\n   ".join(map(json.dumps, part["rows"]))
        rest = "".join(f'  "{key}": {json.dumps(value)},\n' for key, value in part.items() if key != "rows")
        parts.append(f' "{name}": {{\n{rest}  "rows": [\n   {rows}\n  ]\n }}')
    path.parent.mkdir(exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def read_results(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def merged(results: dict[str, Any], name: str, new: dict[str, Any]) -> dict[str, Any]:
    """With new rows in the place of those of the same cells. All must be of one machine, versions and data."""
    old = results.get(name, new | {"commands": [], "rows": []})
    changes = differences(old, new, SAME)
    assert not changes, changes
    rows = {cell_of(row): row for row in [*old["rows"], *new["rows"]]}
    commands = list(dict.fromkeys([*old["commands"], *new["commands"]]))
    ordered = [rows[cell] for cell in all_cells(name) if cell in rows]
    return {**results, name: new | {"commands": commands, "rows": ordered}}


def beside_committed(row: dict[str, Any], committed: list[dict[str, Any]]) -> list[str]:
    """Lines of a table: the committed row of the same cell, if it was measured, and this one."""
    same = [old for old in committed if cell_of(old) == cell_of(row)]
    pairs = [*(("committed", old) for old in same), ("here", row)]
    return [f"| {place} {line}" for place, entry in pairs for line in speed_table([entry], device())[2:]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Our training beside programs of others, step by step in turn.")
    parser.add_argument("--cells", nargs="+", default=[], help="those that have all these words; the others are kept")
    parser.add_argument("--pairs", type=int, default=10, help="of steps, in each cell")
    parser.add_argument("--quick", action="store_true", help="one race of all peers, one measured step; prints it")
    parser.add_argument("--page", action="store_true", help="write the tables again from the results")
    arguments = parser.parse_args()
    results = read_results(RESULTS)
    if arguments.page:
        write_page(results)
        return
    words = set(arguments.cells)
    cells = [cell for cell in all_cells(device()) if words <= set(re.findall(r"[^\s|,]+", cell.words()))]
    if not cells:
        names = "".join(f"\n  {cell.words()}" for cell in all_cells(device()))
        parser.error(f"--cells {' '.join(arguments.cells)}: no cell has all these words; write some of one of{names}")
    with tempfile.TemporaryDirectory(prefix="race-") as base:
        shared = Path(base) / "shared"
        shared.mkdir()
        new = {**environment(), "data": make_workplace(shared)}
        new["commands"] = [" ".join(["python benchmarks/vs_peers.py", *sys.argv[1:]])]
        if arguments.quick:
            print(json.dumps(race(["ours", *PEERS], shared, all_cells(device())[0], 1), indent=1))
            return
        committed = results.get(device(), {})
        path, another = RESULTS, differences(committed, new, SAME)
        if another:
            path, results = APART, read_results(APART)
            if differences(results.get(device(), {}), new, SAME):
                results.pop(device())
            heading, line = speed_table([], device())
            print("These rows are not of the machine and versions of the committed ones, and are kept apart:")
            print(*(f"  {row}" for row in another), "", f"| where {heading}", f"|---{line}", sep="\n", flush=True)
        for cell in cells:
            row = measure(cell, shared, arguments.pairs)
            lines = beside_committed(row, committed["rows"]) if another else speed_table([row], device())[2:]
            print(*lines, sep="\n", flush=True)
            results = merged(results, device(), new | {"rows": [row]})
            write_results(path, results)
    if another:
        print(f"\nWritten to {APART}; {RESULTS} and {PAGE} stay as they are.")
    else:
        write_page(results)


if __name__ == "__main__":
    main()
