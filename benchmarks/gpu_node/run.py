"""The first ten minutes on rented GPUs: what fails, hangs or is slow, cheapest first, on one page and in one JSON.

    make test-gpu-node
    make test-gpu-node ARGS="--parts bandwidth widths"
    make test-gpu-node ARGS="--machines 2 --machine 0 --first 10.0.0.1 --shared /shared/node"    (1 on the other)

Writes node.md and node.json into outputs/gpu_node, to be sent back as they are. Every job runs as `cookbook launch` in
processes and on GPUs of its own; nothing is downloaded. What this machine cannot do is skipped, by name. `--simulate 4`
runs the same on simulated GPUs.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cookbook import simulated_gpus  # noqa: E402
from cookbook.config.strategy import known_strategies, load_strategy, strategy_path  # noqa: E402
from cookbook.planning.run_plan import default_num_processes  # noqa: E402
from cookbook.system.files import dump_yaml  # noqa: E402
from cookbook.system.machine import num_gpus  # noqa: E402
from tests.curves import WORDS, Curve  # noqa: E402
from tests.experts import needs_experts  # noqa: E402

HERE = Path(__file__).parent
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft", "triton", "liger_kernel")
KERNELS = ("rope", "rms_norm", "swiglu")
"""Those of Liger, by the names of its own arguments."""
ATTENTION = {"FA3": ("flash_attn_interface",), "FA4": ("flash_attn", "flash_attn.cute")}
"""Kernels that torch 2.13 calls where a program activates them, and modules of the packages that have them."""
AS_FAR = 2.0
"""Times as far from float32 as torch's own kernel is, in 16 bits: the band of another kernel. Chosen."""
OUTPUT = ROOT / "outputs" / "gpu_node"
BAND = 5e-3
"""Between the losses of a strategy and of one GPU, as tests/test_gpu_matrix.py has it for bf16."""
TWICE = 1e-3
"""Between two runs of the same job, whose atomics add in another order: chosen, not measured. More is a race."""
GRACE_SECONDS = 60.0
"""After a hang's limit, or after a killed process, until its run must have ended."""
NUM_WARMUP = 2
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
TINY |= {"vocab_size": 8192, "num_hidden_layers": 2}  # of a size that zero3_nvme takes
EIGHT_B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
EIGHT_B |= {"vocab_size": 128256, "num_hidden_layers": 2}


@dataclass(frozen=True)
class Result:
    part: str
    name: str
    state: str
    """passed, failed or skipped."""
    said: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A run that has ended."""

    code: int
    said: str
    folder: Path
    seconds: float

    @property
    def curve(self) -> Curve:
        return Curve(self.folder)

    @property
    def last_words(self) -> str:
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|error: )", line) and "ChildFailed" not in line]
        return f"exit code {self.code}: {(errors or lines or [''])[-1][-300:]}"


class Cards:
    """The GPUs of this machine, of which each job has its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = set(range(count))
        self._change, self._turn = threading.Condition(), threading.Lock()

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[list[int]]:
        with self._turn, self._change:  # in the order of asking: a job that needs all would wait for ever
            self._change.wait_for(lambda: len(self._free) >= count)
            mine = sorted(self._free)[:count]
            self._free -= set(mine)
        try:
            yield mine
        finally:
            with self._change:
                self._free |= set(mine)
                self._change.notify_all()


class Node:
    """This machine, and how jobs are run on it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.simulated = arguments.simulate
        self.cards = Cards(self.simulated or num_gpus())
        self.machines = arguments.machines
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        found = {**os.environ, "HF_HUB_OFFLINE": "1"}
        return found | (simulated_gpus.environment(self.simulated) if self.simulated else {})

    def least(self, strategy: str) -> int:
        """GPUs that a strategy needs."""
        loaded = load_strategy(strategy_path(strategy))
        return loaded.num_processes or default_num_processes(loaded, 0)

    def recipe(self, name: str, sizes: dict[str, Any] | Path, *, length: int, batch: int, rate: float) -> Path:
        """A recipe of full sequences, with its rows beside it.

        Args:
            sizes: of a new model, or the folder of one.
        """
        rows, path = self.folder / f"{name}.jsonl", self.folder / f"{name}.yaml"
        chance = random.Random(0)
        texts = (" ".join(chance.choices(WORDS, k=length)) for _ in range(4 * batch))
        talks = ([{"role": "user", "content": "go on"}, {"role": "assistant", "content": text}] for text in texts)
        _write(rows, "".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
        values = {
            "strategy": "single",
            "mixed_precision": "bf16",
            "model": {"name_or_path": str(sizes)} if isinstance(sizes, Path) else {"from_scratch": sizes},
            "data": {"train": str(rows), "max_length": length, "packing": True},
            "batch": {"global_batch_size": batch, "micro_batch_size": 1},
            "optim": {"learning_rate": rate},
            "schedule": {"name": "constant"},
            "run": {"max_steps": 3, "output_dir": str(self.folder / "run"), "check_export": False, "monitor": False},
        }
        _write(path, dump_yaml(values))
        return path

    def start(
        self,
        name: str,
        recipe: Path,
        strategy: str,
        count: int,
        settings: dict[str, Any] | None = None,
        trouble: Callable[[subprocess.Popen[bytes], Path], None] | None = None,
        *,
        alone: bool = False,
    ) -> Job:
        """A run on GPUs of its own, to its end, or `--limit` seconds.

        Args:
            count: processes, of all machines.
            trouble: what happens to it meanwhile, given its launcher and its folder.
            alone: on this machine, though there are several.
        """
        output = self.folder / name
        shutil.rmtree(output, ignore_errors=True)
        words = ["launch", str(recipe), "--strategy", strategy, "--processes", str(count)]
        for key, value in {"run.output_dir": output, **(settings or {})}.items():
            words += ["--set", f"{key}={value}"]
        here, chosen = count, self.arguments
        if self.machines > 1 and not alone:
            here = count // self.machines
            words += ["--machines", str(self.machines), "--machine", str(chosen.machine), "--first", chosen.first]
        words += ["--simulate-gpus", str(here)] if self.simulated else []
        with self.cards.take(here) as mine:
            return self._run(words, output, {} if self.simulated else _visible(mine), trouble)

    def _run(self, words: list[str], output: Path, variables: dict[str, str], trouble: Any) -> Job:
        started, log = time.monotonic(), self.folder / f"{output.name}.{self.arguments.machine}.log"
        with log.open("wb") as stream:
            run = subprocess.Popen(
                [sys.executable, "-m", "cookbook", *words],
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
            try:
                if trouble is not None:
                    trouble(run, output)
                run.wait(self.arguments.limit)
            except subprocess.TimeoutExpired:
                pass
            finally:
                end_all(run)
        return Job(run.returncode, log.read_text(errors="replace"), output, round(time.monotonic() - started, 1))


def _visible(cards: list[int]) -> dict[str, str]:
    given = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    return {"CUDA_VISIBLE_DEVICES": ",".join(given[card] if given else str(card) for card in cards)}


def _write(path: Path, text: str) -> None:
    """At once: another machine may write the same."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def processes_of(run: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(run.pid).children(recursive=True)
    return []


def end_all(run: subprocess.Popen[bytes]) -> None:
    """A launcher with all that it started: a process that is left would keep its GPU."""
    for process in processes_of(run):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def rank_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(psutil.Error, KeyError):
        return int(process.environ()["RANK"]) if "train.py" in " ".join(process.cmdline()) else None
    return None


# The parts, cheapest first: each yields what it found.


def doctor(node: Node) -> Iterator[Result]:
    words = [sys.executable, "-m", "cookbook", "doctor", "--json", "--deadline", "120"]
    done = subprocess.run(words, cwd=ROOT, env=node.environment, capture_output=True, text=True)
    try:
        findings = json.loads(done.stdout)["findings"]
    except ValueError:
        yield Result("doctor", "doctor", "failed", done.stderr[-300:])
        return
    for one in findings:
        state = "failed" if one["status"] == "failure" else "passed"
        text = one["text"] if one["status"] == "ok" else f"{one['status']}: {one['text']}; {one['remedy']}"
        yield Result("doctor", one["check"], state, text)


def bandwidth(node: Node) -> Iterator[Result]:
    chosen, count = node.arguments, node.cards.count
    if count * node.machines < 2:
        yield Result("bandwidth", "five collectives", "skipped", "one GPU exchanges nothing")
        return
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(count), "--nnodes", str(node.machines)]
    if node.machines > 1:
        words += ["--node-rank", str(chosen.machine), "--master-addr", chosen.first, "--master-port", "29500"]
    else:
        words += ["--standalone"]
    words += [str(HERE / "collectives.py"), str(node.folder), *map(str, chosen.mebibytes)]
    run = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=node.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = run.communicate(timeout=chosen.limit)
    except subprocess.TimeoutExpired:
        said = f"not within {chosen.limit:.0f} s: a collective hangs"
    finally:
        end_all(run)  # type: ignore[arg-type]
    if chosen.machine:
        return
    if run.returncode:
        yield Result("bandwidth", "five collectives", "failed", said[-600:])
        return
    rows = json.loads((node.folder / "bandwidth.json").read_text())
    for size in chosen.mebibytes:
        of_size = [row for row in rows if row["mebibytes"] == size]
        everyone = [row for row in of_size if len(row["ranks"]) == count * node.machines]
        text = ", ".join(f"{row['what']} {row['bus_gb']:.3g}" for row in everyone)
        slowest = min((row for row in of_size if row not in everyone), key=lambda row: row["bus_gb"], default=None)
        pair = f"; slowest pair {slowest['ranks']}: {slowest['what']} {slowest['bus_gb']:.3g}" if slowest else ""
        text = f"GB/s of the bus: {text}{pair}" if not node.simulated else "simulated: no speed"
        yield Result("bandwidth", f"{size} MiB", "passed", text, {"rows": of_size})


def compared(part: str, name: str, job: Job, reference: Job, band: float = BAND, start: int = 0) -> Result:
    """Whether a run has the losses of another, which began so many steps before."""
    if job.code == 2:
        return Result(part, name, "skipped", job.last_words)  # refused before it began, in the product's words
    if job.code or reference.code:
        failed = job if job.code else reference
        return Result(part, name, "failed", failed.last_words, {"log": failed.said[-2000:]})
    losses, wanted = job.curve.losses, reference.curve.losses[start:]
    distance = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    said = f"losses {losses[0]:.4f} to {losses[-1]:.4f}, {distance:.1e} from {reference.folder.name}"
    figures = {"losses": losses, "distance": distance, "seconds": job.seconds} | speed_of(job)
    return Result(part, name, "passed" if distance <= band else "failed", said, figures)


def speed_of(job: Job) -> dict[str, Any]:
    """Its step, memory and forecast; no speed of simulated GPUs."""
    steps, record = job.curve.steps[NUM_WARMUP:], job.curve.record
    found: dict[str, Any] = {key: record.get(key) for key in ("peak_memory_gib", "forecast", "step_forecast")}
    for key in ("step_seconds", "mfu", "num_tokens"):
        if values := [line[key] for line in steps if key in line]:
            found[key] = statistics.median(values)
    return found


def strategies(node: Node) -> Iterator[Result]:
    """Each strategy on as few GPUs as it needs, side by side."""
    recipe = node.recipe("tiny", TINY, length=64, batch=8, rate=1e-3)
    single = node.start("tiny-single", recipe, "single", 1)
    yield compared("strategies", "single", single, single)
    chosen = [name for name in node.arguments.strategies or known_strategies() if name != "single"]

    def one(name: str) -> Result:
        count = node.least(name)
        if count > node.cards.count:
            return Result("strategies", name, "skipped", f"needs {count} GPUs, here are {node.cards.count}")
        if not needs_experts(name):
            return compared("strategies", name, node.start(f"tiny-{name}", recipe, name, count), single)
        mixture = {"model": f"{{name_or_path: {write_experts(node, single)}}}"}
        reference = node.start("tiny-experts-fsdp2", recipe, "fsdp2", 2, mixture)
        return compared("strategies", name, node.start(f"tiny-{name}", recipe, name, count, mixture), reference)

    yield from side_by_side(one, chosen)


def side_by_side(one: Callable[[str], Result], names: Iterable[str]) -> Iterator[Result]:
    with ThreadPoolExecutor(8) as pool:
        yield from pool.map(one, names)


def write_experts(node: Node, single: Job) -> Path:
    """A tiny mixture, each token of which goes to all its experts, so that rounding sends none elsewhere."""
    from transformers import AutoTokenizer

    from benchmarks import tiny_models

    folder = node.folder / "experts"
    config = tiny_models.tiny_config("qwen3_moe")
    config.num_experts = config.num_experts_per_tok = 6
    config.tie_word_embeddings = True
    AutoTokenizer.from_pretrained(single.folder / "export", trust_remote_code=False).save_pretrained(folder)
    tiny_models.tiny_model(config).save_pretrained(folder)
    return folder


def write_wide(node: Node) -> Path:
    """The wide model, in bf16 as published ones are: under ZeRO the weights that are trained start rounded, and small
    updates of others have another curve (docs/equivalence.md). Each machine writes the same.
    """
    import torch

    from cookbook.config.sections import ScratchModel
    from cookbook.training.models import new_model, train_tokenizer

    sizes = ScratchModel(**node.arguments.model)
    folder = node.folder / "-".join(["model", *map(str, node.arguments.model.values())])
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.{node.arguments.machine}")
        tokenizer = train_tokenizer([" ".join(WORDS)], sizes.vocab_size)
        tokenizer.save_pretrained(part)
        new_model(sizes, tokenizer, seed=0).to(torch.bfloat16).save_pretrained(part)
        with contextlib.suppress(OSError):  # another machine was first
            part.rename(folder)
        shutil.rmtree(part, ignore_errors=True)
    return folder


def widths(node: Node) -> Iterator[Result]:
    """Two layers of an 8B: the loss of one GPU, twice; the share of the peak; and what compiling broke."""
    chosen = node.arguments
    many = 2 * node.cards.count * node.machines
    recipe = node.recipe("wide", write_wide(node), length=chosen.length, batch=many, rate=1e-5)
    settings = {"run.max_steps": chosen.steps}
    if not chosen.machine:
        single = node.start("wide-single", recipe, "single", 1, settings, alone=True)
        yield compared("widths", "single", single, single)

    def one(name: str) -> list[Result]:
        least = max(node.least(name), node.machines)
        count = node.cards.count * node.machines
        if node.machines == 1:  # two jobs at a time
            count = max(least, count // 2 // least * least)
        if count > node.cards.count * node.machines:
            return [Result("widths", name, "skipped", f"needs {count} GPUs, here are {node.cards.count}")]
        jobs = [node.start(f"wide-{name}-{turn}", recipe, name, count, settings) for turn in (1, 2)]
        if chosen.machine:
            return []
        again = compared("widths", f"{name}, run twice", jobs[1], jobs[0], TWICE)
        return [compared("widths", name, jobs[0], single), again]

    if node.machines > 1:  # in one order on both
        found = [one(name) for name in chosen.wide]
    else:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(one, chosen.wide))
    for results in found:
        yield from results


def compiled(node: Node) -> Iterator[Result]:
    if node.simulated:
        yield Result("compiled", "graph breaks", "skipped", "simulated GPUs have no Triton")
        return
    name, count = ("fsdp2", 2) if node.cards.count > 1 else ("single", 1)
    recipe = node.recipe("wide", write_wide(node), length=node.arguments.length, batch=4, rate=1e-5)
    settings = {"run.max_steps": node.arguments.steps}
    eager = node.start("eager", recipe, name, count, settings)
    job = node.start("compiled", recipe, name, count, settings | {"model.compile": True})
    found = compared("compiled", name, job, eager)
    yield found
    if found.state != "failed":
        counts = next(event for event in job.curve.events if event.get("event") == "compiled")
        state = "failed" if counts["graph_breaks"] or counts["given_up"] else "passed"
        yield Result("compiled", "graph breaks", state, f"{counts['graph_breaks']} graph breaks", counts)


def hangs(node: Node) -> Iterator[Result]:
    """A process that is stopped is named in time, and one that is killed ends the others."""
    if node.cards.count < 2:
        yield Result("hangs", "SIGSTOP and SIGKILL of a rank", "skipped", "needs 2 GPUs")
        return
    recipe = node.recipe("long", TINY, length=64, batch=8, rate=1e-5)
    kinds = [(sent, mode) for sent in (signal.SIGSTOP, signal.SIGKILL) for mode in (False, True)]
    for sent, mode in kinds:
        name = f"{sent.name}, {'compiled' if mode else 'eager'}"
        if mode and node.simulated:
            yield Result("hangs", name, "skipped", "simulated GPUs have no Triton")
        else:
            yield hang(node, recipe, name, sent, {"model.compile": mode})


def hang(node: Node, recipe: Path, name: str, sent: signal.Signals, settings: dict[str, Any]) -> Result:
    seconds = node.arguments.hang_seconds
    times: dict[str, float] = {}
    victims: list[int] = []

    def strike(run: subprocess.Popen[bytes], output: Path) -> None:
        limit = time.monotonic() + node.arguments.limit
        while time.monotonic() < limit and run.poll() is None:
            metrics = output / "metrics.jsonl"
            if metrics.exists() and metrics.read_text().count('"loss"') > NUM_WARMUP:
                break
            time.sleep(0.2)
        ranks = {rank_of(process): process for process in processes_of(run)}
        if 1 not in ranks:
            return
        victims.append(ranks[1].pid)
        begun = time.monotonic()
        os.kill(ranks[1].pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait((seconds if sent == signal.SIGSTOP else 0) + GRACE_SECONDS)
            times["ended_after"] = round(time.monotonic() - begun, 1)
            left = [process.pid for process in processes_of(run)] + [pid for pid in victims if psutil.pid_exists(pid)]
            times["left"] = len(left)

    settings |= {"run.max_steps": 10**6, "run.hang_timeout_minutes": seconds / 60}
    folder = name.replace(", ", "-")
    job = node.start(folder, recipe, "fsdp2", 2, settings, strike)
    if not victims:
        return Result("hangs", name, "failed", f"never came to a step; {job.last_words}")
    if "ended_after" not in times:
        return Result("hangs", name, "failed", f"has not ended {GRACE_SECONDS:.0f} s after its limit")
    report = job.folder / "hang" / "report.txt"
    accused = report.read_text().splitlines()[1] if report.exists() else ""
    is_named = accused.startswith(f"rank 1 (process {victims[0]} ")
    if sent == signal.SIGKILL:  # the launcher's words
        is_named = f"exitcode  : -9 (pid: {victims[0]})" in job.said
    said = f"ended after {times['ended_after']} s, {'naming' if is_named else 'without a word of'} the process"
    said += f": {accused}" if accused else ""
    said += f", {times['left']:.0f} processes left" if times["left"] else ""
    good = is_named and job.code not in (0, 2, 75) and not times["left"]
    return Result("hangs", name, "passed" if good else "failed", said, times | {"log": job.said[-2000:]})


def saving(node: Node) -> Iterator[Result]:
    """A checkpoint that was written in the background is resumed under another strategy."""
    if node.cards.count < 2:
        yield Result("saving", "resume under another strategy", "skipped", "needs 2 GPUs")
        return
    recipe = node.recipe("tiny", TINY, length=64, batch=8, rate=1e-3)
    background = {"run.max_steps": 4, "run.save_every_steps": 2, "run.save_in_background": True}
    saved = node.start("saved", recipe, "fsdp2", 2, background)
    at = saved.folder / "checkpoints" / "step-00000002"
    resumed = node.start("resumed", recipe, "zero3", 2, {"run.max_steps": 4, "run.resume": at})
    yield compared("saving", "fsdp2 in the background, then zero3", resumed, saved, start=2)


def liger(node: Node) -> Iterator[Result]:
    """Which of Liger's kernels, one at a time, ends in the illegal access of docs/on_gpu.md."""
    if node.simulated or find_spec("liger_kernel") is None:
        why = "simulated GPUs have no Triton" if node.simulated else "not installed: pip install liger-kernel"
        yield Result("liger", "bisection", "skipped", why)
        return
    sanitizer = shutil.which("compute-sanitizer")
    for name in ("none", *KERNELS):
        words = [sys.executable, str(HERE / "liger.py"), name]
        with node.cards.take(1) as mine:
            variables = {**node.environment, **_visible(mine)}
            done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True)
            told = done.stdout.strip() or done.stderr[-2000:]
            if done.returncode and sanitizer:
                more = subprocess.run([sanitizer, *words], cwd=ROOT, env=variables, capture_output=True, text=True)
                told += more.stdout[:4000]
        said = told.splitlines()[-1] if told else f"exit code {done.returncode}"
        yield Result("liger", name, "failed" if done.returncode else "passed", said, {"log": told})


def attention(node: Node) -> Iterator[Result]:
    """Other attention kernels beside torch's own: no further from float32, and how much faster."""
    for name, modules in ATTENTION.items():
        if any(find_spec(module) is None for module in modules):  # in this order: a parent is imported for its part
            yield Result("attention", name, "skipped", f"not installed: {modules[-1]}")
            continue
        length = node.arguments.length
        words = [sys.executable, str(HERE / "attention.py"), name, *map(str, (min(length, 2048), length, 8 * length))]
        with node.cards.take(1) as mine:
            variables = {**node.environment, **({} if node.simulated else _visible(mine))}
            done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True)
        if done.returncode:
            said = (done.stdout if done.returncode == 2 else done.stderr).strip() or f"exit code {done.returncode}"
            state = "skipped" if done.returncode == 2 else "failed"
            yield Result("attention", name, state, said.splitlines()[-1], {"log": said[-2000:]})
            continue
        yield kernel_beside(name, json.loads(done.stdout.splitlines()[-1]), simulated=bool(node.simulated))


def kernel_beside(name: str, figures: dict[str, Any], *, simulated: bool) -> Result:
    """An attention kernel beside torch's own, by what attention.py measured."""
    own, other = figures["default"], figures[name]
    pairs = [zip(own["distances"][layout], far, strict=True) for layout, far in other["distances"].items()]
    ratios = [theirs / ours for layout in pairs for ours, theirs in layout]
    said = f"{max(ratios):.2g} times as far from float32 as torch's own kernel"
    faster = ", ".join(f"{own['seconds'][one] / taken:.2f} at {one}" for one, taken in other["seconds"].items())
    said += "; simulated: no speed" if simulated else f"; times as fast: {faster}"
    state = "passed" if all(ratio <= AS_FAR for ratio in ratios) else "failed"  # NaN is no such ratio
    return Result("attention", name, state, said, figures)


_PARTS = (doctor, bandwidth, strategies, widths, compiled, hangs, saving, attention, liger)
PARTS = {one.__name__: one for one in _PARTS}
OVER_MACHINES = ("doctor", "bandwidth", "widths")


def page(about: dict[str, Any], results: list[Result]) -> str:
    counts = [f"{sum(one.state == state for one in results)} {state}" for state in ("passed", "failed", "skipped")]
    lines = [f"# {about['machines']} x {about['cards']} x {about['gpu']}: {', '.join(counts)}", ""]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines += [f"{about['date']}, {about['seconds']:.0f} s; {versions}"]
    lines += ["", "| part | what | | |", "|---|---|---|---|"]
    for one in results:
        said = one.said.replace("|", "/").replace("\n", " ")
        if "mfu" in one.figures:
            said += f"; {one.figures['mfu']:.1%} of the peak, {one.figures['step_seconds']:.3f} s a step"
        lines.append(f"| {one.part} | {one.name} | {one.state} | {said} |")
    return "\n".join(lines) + "\n"


def run_parts(node: Node) -> Iterator[Result]:
    for name in node.arguments.parts:
        if node.machines > 1 and name not in OVER_MACHINES:
            yield Result(name, name, "skipped", "of one machine: make test-gpu-node without --machines")
            continue
        try:
            yield from PARTS[name](node)
        except Exception as error:  # the other parts are worth their time all the same
            yield Result(name, name, "failed", f"{type(error).__name__}: {error}", {"log": traceback.format_exc()})
    if node.machines == 1:
        yield Result("machines", "two machines", "skipped", "--machines 2 --machine 0 --first ADDRESS --shared FOLDER")


def arguments_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--simulate", type=int, default=0, metavar="GPUS", help="on a machine that has none")
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--machine", type=int, default=0)
    parser.add_argument("--first", default="127.0.0.1", help="address of machine 0")
    parser.add_argument("--shared", type=Path, help="a folder that all machines see, for their runs")
    parser.add_argument("--strategies", nargs="*", help="default: all that are shipped")
    parser.add_argument("--wide", nargs="*", default=["fsdp2", "zero3", "hsdp", "fsdp2_tp", "pp", "ddp"])
    parser.add_argument("--model", type=json.loads, default=EIGHT_B, help="sizes of the wide model")
    parser.add_argument("--length", type=int, default=4096, help="of its sequences")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--hang-seconds", type=float, default=60.0)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a job")
    arguments = parser.parse_args(words)
    if arguments.machines > 1 and arguments.shared is None:
        parser.error("--machines needs --shared, a folder that all of them see")
    return arguments


def main() -> None:
    arguments = arguments_of()
    node = Node(arguments, (arguments.shared or arguments.output).resolve())
    if not node.cards.count:
        sys.exit("no GPU here; --simulate 4 runs the same on simulated ones")
    started, results = time.monotonic(), []
    about: dict[str, Any] = {"command": "make test-gpu-node", "date": date.today().isoformat()}
    about |= {"machines": node.machines, "cards": node.cards.count, "gpu": gpu_name(node)}
    about["versions"] = {one: version(one) for one in PACKAGES if find_spec(one) is not None}
    arguments.output.mkdir(parents=True, exist_ok=True)
    for result in run_parts(node):
        results.append(result)
        print(f"{result.state:8}{result.part:12}{result.name}: {result.said}", flush=True)
        about["seconds"] = round(time.monotonic() - started, 1)  # written as parts end: what hangs loses nothing
        told = json.dumps(about | {"results": [asdict(one) for one in results]}, indent=1)
        (arguments.output / "node.json").write_text(told + "\n")
        (arguments.output / "node.md").write_text(page(about, results))
    print(f"send back {arguments.output}/node.md and node.json")
    sys.exit(any(one.state == "failed" for one in results))


def gpu_name(node: Node) -> str:
    if node.simulated:
        return "Simulated GPU"
    import torch

    return torch.cuda.get_device_name(0)


if __name__ == "__main__":
    main()
