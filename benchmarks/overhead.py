"""Cost of a run besides training: its start by phase, and how cost grows as ranks, samples, length and model double.

    python benchmarks/overhead.py [--quick] [--sections start ranks rows samples length step_length model step_model]

Writes benchmarks/results/overhead.json and the tables of docs/overhead.md; with --quick, which measures the smallest
sizes once, nothing. Ranks are simulated: what one rank does between steps depends on their number, and needs none of
them. Seconds are CPU time of one process with one thread, so other work on the machine counts little.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.records import differences, processor  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "overhead.json"
PAGE = ROOT / "docs" / "overhead.md"
BEGIN, END = "<!-- overhead:begin -->", "<!-- overhead:end -->"
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers")
STRATEGIES = ("single", "ddp", "fsdp2", "zero2", "zero3")
RANKS = (1, 8, 64, 512)
SAMPLES = (10_000, 100_000, 1_000_000)
ROWS = (10_000, 50_000, 250_000)
LENGTHS = (256, 1024, 4096)
WIDTHS = (512, 768, 1024)
"""Hidden sizes of models with 8 layers: their parameters double twice."""
STEP_WIDTHS, STEP_LENGTHS = (256, 384, 512), (512, 1024, 2048)
"""The same, small enough to train; and lengths that a new model has positions for."""
STEP_END = "end of a step"
Rows = list[dict[str, Any]]


# Start.


def work(arguments: list[str]) -> None:
    """Runs train.py in this process, and notes CPU time and clock at the end of each phase, and of each step with the
    peak of memory.
    """
    import resource

    import psutil

    import train
    from cookbook.system.watchdog import Watch

    began = psutil.Process().create_time()
    marks: Rows = []
    enter, train_step = Watch.enter, train.train_step

    def mark(phase: str) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        clock = time.time() - began
        marks.append({"phase": phase, "cpu": time.process_time(), "clock": clock, "peak_mb": peak})

    def mark_and_enter(watching: Watch, phase: str, **options: Any) -> None:
        mark(phase)
        enter(watching, phase, **options)

    def step_and_mark(*given: Any) -> Any:
        result = train_step(*given)
        mark(STEP_END)
        return result

    Watch.enter, train.train_step = mark_and_enter, step_and_mark  # type: ignore[method-assign, assignment]
    sys.argv = ["train.py", *arguments]
    code = train.main()
    if os.environ.get("RANK", "0") == "0":
        Path(os.environ["OVERHEAD_BENCHMARK"]).write_text(json.dumps(marks), encoding="utf-8")
    sys.exit(code)


def start(quick: bool, base: Path) -> Rows:
    """CPU seconds of each phase on rank 0, medians of three runs after one that fills the caches."""
    rows = base / "rows.jsonl"
    chat = [{"role": "user", "content": "Count to ten."}, {"role": "assistant", "content": "one two three " * 10}]
    rows.write_text((json.dumps({"messages": chat}) + "\n") * 640)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    figures = []
    for strategy in STRATEGIES[:1] if quick else STRATEGIES:
        recipe = {
            "strategy": strategy,
            "model": {"from_scratch": sizes | heads},
            "data": {"train": str(rows), "max_length": 256, "packing": True},
            "batch": {"global_batch_size": 8, "micro_batch_size": 4},
            "optim": {"learning_rate": 1e-4},
            "run": {"max_steps": 1, "output_dir": str(base / strategy), "check_export": False},
        }
        (base / "recipe.yaml").write_text(json.dumps(recipe))
        runs = [launch(strategy, base) for _ in range(1 if quick else 4)][-3:]
        spent: dict[str, float] = {}
        for i, (mark, after) in enumerate(zip(runs[0], runs[0][1:], strict=False)):
            spent[mark["phase"]] = statistics.median(run[i + 1]["cpu"] - run[i]["cpu"] for run in runs)
            if after["phase"] == STEP_END:
                break
        ends = [next(mark for mark in run if mark["phase"] == STEP_END) for run in runs]
        figures.append(
            {
                "strategy": strategy,
                "files": statistics.median(run[0]["cpu"] for run in runs),
                "phases": spent,
                "cpu": statistics.median(end["cpu"] for end in ends),
                "clock": min(end["clock"] for end in ends),
            }
        )
    return figures


def launch(strategy: str, base: Path) -> Rows:
    command = [sys.executable]
    if strategy != "single":
        path = f"accelerate_configs/{strategy}.yaml"
        command += ["-m", "accelerate.commands.launch", "--config_file", path, "--num_processes", "2"]
        command += ["--main_process_port", "0"]
    command += [__file__, "--work", str(base / "recipe.yaml")]
    environment = {**os.environ, "OVERHEAD_BENCHMARK": str(base / "marks.json"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{strategy}: {(done.stdout + done.stderr)[-4000:]}")
    return json.loads((base / "marks.json").read_text())


def one_step(width: int, length: int, base: Path) -> dict[str, float]:
    """A training step on one sample of `length` tokens: the median of those after the first."""
    rows = base / "long.jsonl"
    rows.write_text((json.dumps({"prompt": "Count.", "completion": "one two three " * 4 * length}) + "\n") * 16)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    recipe = {
        "strategy": "single",
        "model": {"from_scratch": sizes | heads},
        "data": {"train": str(rows), "max_length": length},
        "batch": {"global_batch_size": 1, "micro_batch_size": 1},
        "optim": {"learning_rate": 1e-4},
        "run": {"max_steps": 6, "output_dir": str(base / f"step-{width}-{length}"), "check_export": False},
    }
    (base / "recipe.yaml").write_text(json.dumps(recipe))
    marks = launch("single", base)
    ends = [mark for mark in marks if mark["phase"] == STEP_END]
    spent = [after["cpu"] - before["cpu"] for before, after in pairwise(ends)]
    begun = next(mark for mark in marks if mark["phase"] == "loading the model")
    return {"step_cpu": statistics.median(spent), "memory_mb": ends[-1]["peak_mb"] - begun["peak_mb"]}


# Slopes. Each size is measured in a process of its own, for its memory.


def in_process(measure: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, given)


def cpu_seconds(do: Callable[[], Any], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        began = time.process_time()
        do()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def own_memory() -> float:
    """MB of this process that are no pages of files."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1e3
    return 0.0


def token_set(num_samples: int, length: int) -> Any:
    """Samples of `length` tokens in the mean, with a long tail."""
    import numpy as np

    from cookbook.training.data.tokens import TokenSet

    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(length) - 0.3, 0.8, num_samples), 2, 8 * length).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return TokenSet(ids=np.ones(offsets[-1], np.int32), is_label=np.ones(offsets[-1], bool), offsets=offsets)


def next_steps(tokens: Any, num_ranks: int, per_rank: int = 8) -> Any:
    from cookbook.training.data.batches import Layout, train_steps

    layout = Layout(num_ranks=num_ranks, rank=0, pad_id=0, micro_batch_size=per_rank, packing=True)
    return train_steps(tokens, layout, seed=0, global_batch_size=num_ranks * per_rank)


def one_count_of_ranks(num_ranks: int) -> dict[str, Any]:
    tokens = token_set(20_000, 128)
    return {"size": num_ranks, **batches_of(tokens, num_ranks)}


def batches_of(tokens: Any, num_ranks: int) -> dict[str, float]:
    """Cost of one rank's batches from the second on, and bytes that making them leaves in memory."""
    from cookbook.training.data import batches  # noqa: F401 - torch is not what is measured

    before = own_memory()
    steps = next_steps(tokens, num_ranks)
    next(steps)
    return {"step_ms": 1e3 * cpu_seconds(lambda: next(steps), 9), "memory_mb": own_memory() - before}


def one_count_of_samples(num_samples: int, base: str) -> dict[str, Any]:
    """A warm start of data: rows known, tokens mapped and verified, first and later batches."""
    from cookbook.training.data import batches  # noqa: F401 - torch is not what is measured
    from cookbook.training.data import tokens as module

    folder, key = Path(base) / f"tokens-{num_samples}", {"of": num_samples}
    if not folder.exists():
        module.save_entry(folder, token_set(num_samples, 128), {"made_from": key, "num_dropped": {}})
        return {}
    before = own_memory()
    loaded: list[Any] = []
    load = cpu_seconds(lambda: loaded.append(module.load_entry(folder, key)), 1)
    steps = next_steps(loaded[0][0], 8)
    first = cpu_seconds(lambda: next(steps), 1)
    later = cpu_seconds(lambda: next(steps), 9)
    files = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    mine = {"load_ms": 1e3 * load, "first_ms": 1e3 * first, "step_ms": 1e3 * later}
    return {"size": num_samples, "file_mb": files, **mine, "memory_mb": own_memory() - before}


def one_count_of_rows(num_rows: int, base: str) -> dict[str, Any]:
    from cookbook.config.objectives import Objective
    from cookbook.config.sections import DataSection
    from cookbook.training.data.known import known_rows

    path = Path(base) / f"rows-{num_rows}.jsonl"
    if not path.exists():
        line = json.dumps(
            {"prompt": "a question of some words? " * 4, "completion": "an answer, longer than that. " * 15}
        )
        path.write_text((line + "\n") * num_rows)
    before, held = own_memory(), []
    data, objective = DataSection.model_validate({"train": str(path)}), Objective.of(name="sft")
    seconds = cpu_seconds(lambda: held.append(known_rows(data, objective, cache=Path(base) / "cache")), 1)
    return {"size": num_rows, "file_mb": path.stat().st_size / 1e6, "cpu": seconds, "memory_mb": own_memory() - before}


def one_length(length: int) -> dict[str, Any]:
    return {"size": length, **batches_of(token_set(4_000, length), 8)}


def one_model(width: int, base: str) -> dict[str, Any]:
    """Blocking save and export of a model without optimizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from cookbook.training.checkpoint import folder, write_model
    from cookbook.training.checkpoint.saver import Saver
    from cookbook.training.checkpoint.tensors import StagedPiece

    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=8, num_attention_heads=8, vocab_size=8192
    )
    named = dict(LlamaForCausalLM(config).named_parameters())
    pieces = [StagedPiece(name, "weight", 0, 0, tensor.detach().reshape(1, -1)) for name, tensor in named.items()]
    state = {"parameters": {name: list(tensor.shape) for name, tensor in named.items()}}
    root, target = Path(base) / f"saved-{width}", Path(base) / f"export-{width}"
    target.mkdir()
    saver = Saver(
        root, rank=0, num_ranks=1, attempt="a", keep_last=2, keep_best=0, in_background=False, say=lambda _: None
    )
    save = cpu_seconds(lambda: saver.save(1, pieces, state), 1)
    before = own_memory()
    weights = write_model.weights_of(folder.open_checkpoint(root / folder.folder_name(1)))
    write = cpu_seconds(lambda: write_model.write_model(weights, target, config=config, dtype=torch.float32), 1)
    written = sum(path.stat().st_size for path in target.iterdir()) / 1e6
    size = sum(tensor.numel() for tensor in named.values()) * 4 / 1e6
    grown = {"export_memory_mb": own_memory() - before, "written_mb": written}
    return {"size": width, "model_mb": size, "save_cpu": save, "export_cpu": write, **grown}


def slopes(section: str, quick: bool, base: Path) -> Rows:
    if section == "ranks":
        return [in_process(one_count_of_ranks, size) for size in (RANKS[:2] if quick else RANKS)]
    if section == "length":
        return [in_process(one_length, size) for size in (LENGTHS[:2] if quick else LENGTHS)]
    if section == "step_length":
        lengths = STEP_LENGTHS[:1] if quick else STEP_LENGTHS
        return [{"size": size} | one_step(STEP_WIDTHS[0], size, base) for size in lengths]
    if section == "step_model":
        widths = STEP_WIDTHS[:1] if quick else STEP_WIDTHS
        return [{"size": size} | one_step(size, STEP_LENGTHS[0], base) for size in widths]
    if section == "model":
        return [in_process(one_model, size, str(base)) for size in (WIDTHS[:1] if quick else WIDTHS)]
    measure, sizes = {"samples": (one_count_of_samples, SAMPLES), "rows": (one_count_of_rows, ROWS)}[section]
    rows = []
    for size in sizes[:1] if quick else sizes:
        first = in_process(measure, size, str(base))  # which fills the cache
        rows.append(in_process(measure, size, str(base)))
        if first:
            rows[-1]["read_cpu"], rows[-1]["read_memory_mb"] = first["cpu"], first["memory_mb"]
    return rows


SECTIONS = ("start", "ranks", "rows", "samples", "length", "step_length", "model", "step_model")


# The page.


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


MS, S, MB = "{:,.1f}", "{:.2f}", "{:,.0f}"
STEP = {"CPU ms a step": ("step_ms", MS), "memory, MB": ("memory_mb", MS)}
TRAINING = {"CPU s a step": ("step_cpu", S), "memory, MB": ("memory_mb", MB)}
SLOPES: dict[str, tuple[str, str, dict[str, tuple[str, str]]]] = {
    "ranks": ("Ranks: what one of them does between two steps, 8 samples each", "ranks", STEP),
    "rows": (
        "Rows: a start with a file that was read before, and the first one",
        "rows",
        {
            "file, MB": ("file_mb", MB),
            "CPU s": ("cpu", "{:.3f}"),
            "memory, MB": ("memory_mb", MB),
            "first, CPU s": ("read_cpu", S),
            "first, memory, MB": ("read_memory_mb", MB),
        },
    ),
    "samples": (
        "Samples: tokens of 128 in the mean, in the cache; 8 ranks",
        "samples",
        {
            "files, MB": ("file_mb", MB),
            "map and verify, CPU ms": ("load_ms", MS),
            "first batch, CPU ms": ("first_ms", MS),
            "later, CPU ms": ("step_ms", MS),
            "memory of its own, MB": ("memory_mb", MB),
        },
    ),
    "length": ("Length: tokens of a sample in the mean, 8 samples a rank", "tokens", STEP),
    "step_length": (
        f"Length: a training step on one sample; hidden size {STEP_WIDTHS[0]}, 8 layers",
        "tokens",
        TRAINING,
    ),
    "model": (
        "Model: a blocking save of its weights, and their export",
        "hidden size",
        {
            "weights, MB": ("model_mb", MB),
            "save, CPU s": ("save_cpu", S),
            "export, CPU s": ("export_cpu", S),
            "written, MB": ("written_mb", MB),
            "memory, MB": ("export_memory_mb", MB),
        },
    ),
    "step_model": (
        f"Model: a training step on one sample of {STEP_LENGTHS[0]} tokens; 8 layers",
        "hidden size",
        TRAINING,
    ),
}
"""By section: what it shows, what grows, and columns with their key and form."""


def growth(rows: Rows, key: str) -> str:
    """The factor by which a figure grew from the first size to the last."""
    first, last = rows[0][key], rows[-1][key]
    return f"x {last / first:.1f}" if first > 1e-3 else "-"


def slope(section: str, rows: Rows) -> list[str]:
    title, what, columns = SLOPES[section]
    body = [[f"{row['size']:,}", *(form.format(row[key]) for key, form in columns.values())] for row in rows]
    last = [f"x {rows[-1]['size'] / rows[0]['size']:.0f}", *(growth(rows, key) for key, _ in columns.values())]
    return [f"\n### {title}\n", *table([what, *columns], [*body, last])]


def start_table(rows: Rows) -> list[str]:
    phases = list(rows[0]["phases"])
    body = []
    for row in rows:
        spent = [row["files"], *(row["phases"][name] for name in phases), row["cpu"]]
        body.append([f"`{row['strategy']}`", *(f"{seconds:.2f}" for seconds in spent), f"{row['clock']:.1f}"])
    head = ["strategy", "Python and files", *phases, "sum", "by the clock, best"]
    return ["\n### From the start of Python to the end of step 1: CPU seconds of rank 0\n", *table(head, body)]


def render(results: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    commands = " and ".join(f"`{command}`" for command in dict.fromkeys(results["commands"].values()))
    lines = [f"{results['hardware']}; {packages}; {results['date']}; {commands}, the slopes beside other work."]
    sections = results["found"]
    lines += start_table(sections["start"]) if "start" in sections else ["\nThe start by phase: not measured yet."]
    for name, (title, *_) in SLOPES.items():
        lines += slope(name, sections[name]) if name in sections else [f"\n### {title}\n", "Not measured yet."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a run costs besides training.")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, once; writes nothing")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--work", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments.work)
    earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"found": {}, "commands": {}}
    sections, command = earlier["found"], " ".join(["python benchmarks/overhead.py", *sys.argv[1:]])
    now = {
        "versions": {name: version(name) for name in PACKAGES},
        "hardware": f"{os.cpu_count()} cores of {processor()}, no GPU",
    }
    another = differences(earlier, now, now) if sections.keys() - set(arguments.sections) else []
    if another and not arguments.quick:
        print(f"Some sections cannot join the record, and are printed only: {'; '.join(another)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="overhead-") as base:
        for section in arguments.sections:
            given = arguments.quick, Path(base)
            sections[section] = start(*given) if section == "start" else slopes(section, *given)
            print(section, json.dumps(sections[section]), flush=True)
    if arguments.quick or another:
        return
    results = {
        "commands": earlier["commands"] | dict.fromkeys(arguments.sections, command),
        "date": date.today().isoformat(),
        **now,
        "found": sections,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    text = PAGE.read_text()
    PAGE.write_text(f"{text.split(BEGIN)[0]}{BEGIN}\n{render(results)}\n{END}{text.split(END)[1]}")


if __name__ == "__main__":
    main()
