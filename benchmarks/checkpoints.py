"""Our checkpoints beside accelerate's `save_state`: the same strategy, the same processes, one after the other.

    python benchmarks/checkpoints.py [--strategies ddp fsdp2 zero2 ...] [--processes 2] [--quick]

Writes benchmarks/results/checkpoints.json and the table of docs/checkpoints.md. Trains a Llama of 76 M parameters (306
MB in float32, 917 MB with AdamW's moments) for one step on CPU, then saves and loads it in turn, five times each.
Before each, the disk has what was written before, and the order changes from round to round. Seconds are from a
barrier to the end of the last process. Ours flushes every file to the disk (fsync) and takes a digest of it; accelerate
does neither, so "with fsync" flushes its files as well. Memory is what the resident sets of all processes grow by.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.records import processor  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "checkpoints.json"
PAGE = ROOT / "docs" / "checkpoints.md"
BEGIN, END = "<!-- checkpoints:begin -->", "<!-- checkpoints:end -->"
STRATEGIES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3", "zero2_offload")
"""Not fsdp1, under which accelerate's own save ends in a segmentation fault on CPU."""
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "safetensors")
ROUNDS = 5
MODEL = dict(
    vocab_size=16384,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=9,
    num_attention_heads=12,
    num_key_value_heads=12,
    tie_word_embeddings=True,
)
SMALL_MODEL = MODEL | dict(vocab_size=512, hidden_size=96, intermediate_size=192, num_hidden_layers=2)


# In each process of a launch.


def work(arguments: list[str]) -> None:
    """Runs train.py, and measures in the place where it would leave."""
    import train
    from cookbook.training.engine import Engine

    result = Path(os.environ["CHECKPOINT_BENCHMARK"])
    leave = Engine.close

    def measure_and_leave(self: Engine) -> None:
        rounds = measure(self, result.parent)
        if self.is_main:
            result.write_text(json.dumps(rounds), encoding="utf-8")
        leave(self)

    Engine.close = measure_and_leave  # type: ignore[method-assign]
    sys.argv = ["train.py", *arguments]
    sys.exit(train.main())


def measure(engine: Any, folder: Path) -> dict[str, Any]:
    """Seconds, bytes and memory of each way, by round. Collective."""
    from cookbook.training.checkpoint import folder as folders
    from cookbook.training.checkpoint import resume
    from cookbook.training.checkpoint.saver import Saver

    shapes = engine.parameter_shapes()
    state = {"parameters": shapes, "counts": engine.counts()}
    options: dict[str, Any] = dict(
        rank=engine.world.rank, num_ranks=engine.world.num_processes, keep_last=2, keep_best=0
    )
    costs: dict[str, list[Any]] = {}

    def note(what: str, do: Callable[[], None], target: Path | None = None) -> None:
        seconds, memory = timed(engine, do)
        costs.setdefault(what, []).append({"seconds": seconds, "memory": memory, "bytes": target and size_of(target)})

    def save(saver: Saver, step: int) -> None:
        saver.save(step, engine.pieces(), state)

    background = folder / "background"
    later = Saver(background, attempt="b", in_background=True, say=print, **options)  # one, as in a run
    ranks = {"rank": engine.world.rank, "num_ranks": engine.world.num_processes}
    for i in range(ROUNDS):
        ours, theirs = (folder / f"{name}-{i}" for name in ("ours", "theirs"))
        saver = Saver(ours, attempt="a", in_background=False, say=print, **options)

        def save_ours(i: int = i, ours: Path = ours, saver: Saver = saver) -> None:
            note("ours", partial(save, saver, 1), ours)
            note("ours, in the background", partial(save, later, i + 1))
            later.wait()

        def save_theirs(theirs: Path = theirs) -> None:
            note("accelerate", partial(engine.accelerator.save_state, str(theirs)), theirs)
            flushed = timed(engine, partial(flush, theirs, engine), settled=False)[0]
            seconds = costs["accelerate"][-1]["seconds"] + flushed
            costs.setdefault("accelerate, with fsync", []).append({"seconds": seconds})

        def load_ours(ours: Path = ours) -> None:
            def load() -> None:
                checkpoint = folders.open_checkpoint(ours / folders.folder_name(1))
                folders.verify(checkpoint, **ranks)
                engine.collectives.all_reduce_max(0)
                resume.load(checkpoint, shapes, engine.restore)

            note("ours, load", load)

        def load_theirs(theirs: Path = theirs) -> None:
            try:
                note("accelerate, load", partial(engine.accelerator.load_state, str(theirs)))
            except Exception as error:
                costs["accelerate, load"] = [{"failed": str(error)[:200]}]

        for pair in ((save_ours, save_theirs), (load_ours, load_theirs)):
            for measured in pair[:: 1 if i % 2 else -1]:
                measured()
        engine.collectives.all_reduce_max(0)
        if engine.is_main:
            for path in (ours, theirs):
                shutil.rmtree(path)
    if engine.is_main:
        shutil.rmtree(background)
    return costs


def timed(engine: Any, do: Callable[[], None], *, settled: bool = True) -> tuple[float, float]:
    """Seconds until the last process is done, and the sum of what their resident sets grew by at most.

    Args:
        settled: first wait until the disk has everything that was written before.
    """
    process = psutil.Process()
    if settled and engine.is_main:
        os.sync()
    engine.collectives.all_reduce_max(0)
    before = peak = process.memory_info().rss
    done = threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, process.memory_info().rss)

    looker = threading.Thread(target=look)
    looker.start()
    started = time.perf_counter()
    do()
    seconds = engine.collectives.all_reduce_max(time.perf_counter() - started)[0]
    done.set()
    looker.join()
    import torch

    grown = torch.tensor(float(peak - before), dtype=torch.float64)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(grown)
    return seconds, float(grown)


def flush(folder: Path, engine: Any) -> None:
    """Every file to the disk; the main process does it for all."""
    if engine.is_main:
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# In the program that launches them.


def run(strategy: str, processes: int, model: dict[str, int], base: Path) -> dict[str, Any]:
    folder = base / strategy
    folder.mkdir()
    recipe: dict[str, Any] = {
        "strategy": f"accelerate_configs/{strategy}.yaml",
        "mixed_precision": "no",
        "model": {"from_scratch": model},
        "data": {"train": "python-stdlib", "max_length": 256},
        "batch": {"global_batch_size": 2, "micro_batch_size": 1},
        "optim": {"learning_rate": 1e-4},
        "run": {"max_steps": 1, "output_dir": str(folder / "run")},
    }
    (folder / "bench.yaml").write_text(json.dumps(recipe))
    count = 1 if strategy == "single" else processes
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", recipe["strategy"]]
    command += ["--main_process_port", "0", *(["--num_processes", str(count)] if count > 1 else [])]
    command += [__file__, "--work", str(folder / "bench.yaml")]
    environment = {**os.environ, "CHECKPOINT_BENCHMARK": str(folder / "result.json")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{strategy}: {(done.stdout + done.stderr)[-6000:]}")
    rounds = json.loads((folder / "result.json").read_text())
    shutil.rmtree(folder)
    return {"processes": count, "rounds": rounds}


def median(rounds: list[dict[str, Any]], key: str) -> float | None:
    values = [entry[key] for entry in rounds if entry.get(key) is not None]
    return statistics.median(values) if values else None


def render(results: dict[str, Any]) -> str:
    machine = results["hardware"]
    packages = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        f"{machine['cores']} cores of {machine['processor']}, no GPU; {packages}; {results['date']}.",
        "",
        "| strategy | processes | save, s | steps wait, in the background | accelerate | with fsync |"
        " save / accelerate | / with fsync | load, s | accelerate | load / accelerate |"
        " size, MB | accelerate | memory of a load, MB |"
        " accelerate |",
        "|---" * 15 + "|",
    ]
    for name, row in results["strategies"].items():
        rounds = row["rounds"]

        def cell(what: str, key: str, form: str, rounds: Any = rounds) -> str:
            value = median(rounds[what], key)
            return "fails" if value is None else form.format(value / (1e6 if key != "seconds" else 1))

        def ratio(ours: str, theirs: str, rounds: Any = rounds) -> str:
            """The median of the rounds' own ratios: the disk's speed changes from round to round."""
            pairs = zip(rounds[ours], rounds[theirs], strict=False)
            ratios = [own["seconds"] / other["seconds"] for own, other in pairs if "seconds" in other]
            return f"{statistics.median(ratios):.2f}" if ratios else ""

        cells = [
            cell("ours", "seconds", "{:.2f}"),
            cell("ours, in the background", "seconds", "{:.2f}"),
            cell("accelerate", "seconds", "{:.2f}"),
            cell("accelerate, with fsync", "seconds", "{:.2f}"),
            ratio("ours", "accelerate"),
            ratio("ours", "accelerate, with fsync"),
            cell("ours, load", "seconds", "{:.2f}"),
            cell("accelerate, load", "seconds", "{:.2f}"),
            ratio("ours, load", "accelerate, load"),
            cell("ours", "bytes", "{:.0f}"),
            cell("accelerate", "bytes", "{:.0f}"),
            cell("ours, load", "memory", "{:.0f}"),
            cell("accelerate, load", "memory", "{:.0f}"),
        ]
        lines.append(f"| `{name}` | {row['processes']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"`{results['command']}`; medians of {ROUNDS}."])


def main() -> None:
    parser = argparse.ArgumentParser(description="Our checkpoints beside accelerate's.")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a small model; prints the table, and writes nothing")
    parser.add_argument("--work", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments.work)
    results: dict[str, Any] = {
        "command": " ".join(["python benchmarks/checkpoints.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in PACKAGES},
        "hardware": {"cores": os.cpu_count(), "processor": processor()},
        "strategies": {},
    }
    model = SMALL_MODEL if arguments.quick else MODEL
    (ROOT / "outputs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=ROOT / "outputs") as base:
        for strategy in arguments.strategies:
            results["strategies"][strategy] = run(strategy, arguments.processes, model, Path(base))
            print(strategy, json.dumps(results["strategies"][strategy]), flush=True)
    if arguments.quick:
        print(render(results))
        return
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    text = PAGE.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n{render(results)}\n{END}{tail}")


if __name__ == "__main__":
    main()
