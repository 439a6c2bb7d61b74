"""The first ten minutes on rented GPUs: what fails, hangs or is slow, cheapest first, on one page and in one JSON.

    make test-gpu-node
    make test-gpu-node ARGS="--parts bandwidth widths"
    make test-gpu-node ARGS="--machines 2 --machine 0 --first 10.0.0.1 --shared /shared/node"    (1 on the other)

Writes node.md and node.json into outputs/gpu_node, to be sent back as they are; fit.py reads node.json. Every job runs
as `cookbook launch` in processes and on GPUs of its own; nothing is downloaded. What this machine cannot do is skipped,
by name. `--simulate 4` runs the same on simulated GPUs.
"""

import argparse
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_node.jobs import Ended, Job, Node, end_all, last_json, left_behind, marked, num_steps, write  # noqa: E402
from cookbook.config.strategy import Strategy, known_strategies, load_strategy, strategy_path  # noqa: E402
from cookbook.start.hosts import set_interfaces  # noqa: E402
from cookbook.start.run_plan import default_num_processes  # noqa: E402
from cookbook.system.files import RecipeError, dump_yaml  # noqa: E402
from cookbook.system.hardware import GIB  # noqa: E402
from cookbook.system.machine import num_cores  # noqa: E402

HERE = Path(__file__).parent
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft", "triton", "liger_kernel")
KERNELS = ("rope", "rms_norm", "swiglu")
"""Kernels of Liger, by the names of its own arguments."""
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
BUILD_SECONDS = 1200.0
"""For DeepSpeed's asynchronous I/O: 220 s of one core, 11 files that read torch's headers."""
LEAVE_SECONDS = 10.0
"""For the processes of a run that has ended to be gone."""
NUM_WARMUP = 2
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "engineers", "count", "every", "token")
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
TINY |= {"vocab_size": 8192, "num_hidden_layers": 2}  # of a size that zero3_nvme takes
EIGHT_B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
EIGHT_B |= {"vocab_size": 128256, "num_hidden_layers": 2, "tie_word_embeddings": False}
LEAST_VOCABULARY = 8000
WIDE = ("single", "fsdp2", "zero3", "hsdp", "fsdp2_tp", "pp", "ddp")
OVER_NETWORK = ("fsdp2", "zero3", "zero3_hpz", "hsdp", "fsdp2_tp", "pp", "ddp")
ALL, ON_ALL = "all", "fsdp2"
"""The turn, and the strategy, of the wide model that has all GPUs."""
SENT = (signal.SIGKILL, signal.SIGSTOP)
"""To a rank; in this order, since what the first run compiles the second one, which has a limit, finds in a cache."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEAST_MIXED = (8, 0)
"""Compute capability from which GPUs have bf16."""


@dataclass(frozen=True)
class Result:
    part: str
    name: str
    state: str
    """passed, failed or skipped."""
    said: str
    figures: dict[str, Any] = field(default_factory=dict)


def least(strategy: str) -> int:
    """GPUs that a strategy needs."""
    loaded = load_strategy(strategy_path(strategy))
    return loaded.num_processes or default_num_processes(loaded, 0)


def write_recipe(node: Node, name: str, sizes: dict[str, Any] | Path, *, length: int, batch: int, rate: float) -> Path:
    """A recipe of full sequences, with its rows beside it.

    Args:
        sizes: of a new model, or the folder of one.
    """
    rows, path = node.folder / f"{name}.jsonl", node.folder / f"{name}.yaml"
    chance = random.Random(0)
    texts = (" ".join(chance.choices(WORDS, k=length)) for _ in range(4 * batch))
    talks = ([{"role": "user", "content": "go on"}, {"role": "assistant", "content": text}] for text in texts)
    write(rows, "".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    has_bf16 = all(gpu.capability is None or gpu.capability >= LEAST_MIXED for gpu in node.gpus)
    values = {
        "strategy": "single",
        "mixed_precision": "bf16" if has_bf16 else "fp16",
        "model": {"name_or_path": str(sizes)} if isinstance(sizes, Path) else {"from_scratch": sizes},
        "data": {"train": str(rows), "max_length": length, "packing": True},
        "batch": {"global_batch_size": batch, "micro_batch_size": 1},
        "optim": {"learning_rate": rate},
        "schedule": {"name": "constant"},
        "run": {"max_steps": 3, "output_dir": str(node.folder / "run"), "check_export": False, "monitor": False},
    }
    write(path, dump_yaml(values))
    return path


# The parts, cheapest first: each yields what it found.


def doctor(node: Node) -> Iterator[Result]:
    words = ["-m", "cookbook", "doctor", "--json", "--deadline", "120"]
    done = node.execute(words, "doctor", environment=node.environment, apart=True)
    try:
        findings = json.loads(done.said)["findings"]
    except ValueError:
        yield Result("doctor", "doctor", "failed", done.last_words, done.log)
        return
    for finding in findings:
        state = "failed" if finding["status"] == "failure" else "passed"
        text = (
            finding["text"]
            if finding["status"] == "ok"
            else f"{finding['status']}: {finding['text']}; {finding['remedy']}"
        )
        yield Result("doctor", finding["check"], state, text)


def bandwidth(node: Node) -> Iterator[Result]:
    chosen, count = node.arguments, node.cards.count
    if count * node.machines < 2:
        yield Result("bandwidth", "five collectives", "skipped", "one GPU exchanges nothing")
        return
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(count), "--nnodes", str(node.machines)]
    environment = node.environment
    if node.machines > 1:
        words += ["--node-rank", str(chosen.machine), "--master-addr", chosen.first, "--master-port", "29500"]
        environment |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
        if mistakes := set_interfaces(chosen.first, environment):
            yield Result("bandwidth", "network", "failed", "; ".join(mistakes))
            return
        node.meet("bandwidth")
    else:
        words += ["--standalone"]
    words += [str(HERE / "collectives.py"), str(node.folder), *map(str, chosen.mebibytes)]
    done = node.execute(words, "bandwidth", environment=environment)
    if done.code:
        yield Result("bandwidth", "five collectives", "failed", done.last_words, done.log)
        return
    if chosen.machine:
        return
    rows = json.loads((node.folder / "bandwidth.json").read_text())
    for size in chosen.mebibytes:
        of_size = [row for row in rows if row["mebibytes"] == size]
        everyone = [row for row in of_size if len(row["ranks"]) == count * node.machines]
        text = ", ".join(f"{row['what']} {row['bus_gb']:.3g}" for row in everyone)
        slowest = min((row for row in of_size if row not in everyone), key=lambda row: row["bus_gb"], default=None)
        pair = f"; slowest pair {slowest['ranks']}: {slowest['what']} {slowest['bus_gb']:.3g}" if slowest else ""
        text = f"GB/s of the bus: {text}{pair}" if not node.simulated else "simulated: no speed"
        wrong = [f"{row['what']} of GPUs {row['ranks']}" for row in of_size if not row["is_right"]]
        text = f"wrong values, train nothing here: {'; '.join(wrong)}" if wrong else text
        yield Result("bandwidth", f"{size} MiB", "failed" if wrong else "passed", text, {"rows": of_size})
    if node.machines > 1:
        yield network_of(done.said, simulated=bool(node.simulated))


def network_of(said: str, *, simulated: bool) -> Result:
    """The network that NCCL says it takes between machines."""
    names = set(re.findall(r"Using network (\S+)", said)) or set(re.findall(r"NET/(\S+) : Using", said))
    if simulated:
        return Result("bandwidth", "network", "skipped", "simulated GPUs have no NCCL")
    if not names:
        return Result("bandwidth", "network", "failed", "NCCL names none", {"log": said[-6000:]})
    return Result("bandwidth", "network", "passed", f"NCCL takes {', '.join(sorted(names))}", {"names": sorted(names)})


def compared(part: str, name: str, job: Job, reference: Job, band: float = BAND, start: int = 0) -> Result:
    """Compare the losses of a run with those of another, which began so many steps before."""
    if job.code == 2 and not reference.code:
        return Result(part, name, "skipped", job.last_words)  # refused before it began, in the product's words
    if job.code or reference.code:
        failed, whose = (job, "") if job.code else (reference, f"{reference.folder.name}, its reference: ")
        return Result(part, name, "failed", whose + failed.last_words, failed.log)
    losses, wanted = job.losses, reference.losses[start:]
    if len(losses) != len(wanted) or not losses:
        return Result(part, name, "failed", f"{len(losses)} steps, and {reference.folder.name} has {len(wanted)}")
    distances = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
    distance = max(distances, key=lambda value: (math.isnan(value), value))
    said = f"losses {losses[0]:.4f} to {losses[-1]:.4f}, {distance:.1e} from {reference.folder.name}"
    figures = {"losses": losses, "distance": distance, "seconds": job.seconds} | speed_of(job)
    return Result(part, name, "passed" if distance <= band else "failed", said, figures)  # NaN is no such distance


def speed_of(job: Job) -> dict[str, Any]:
    """Its step, memory and forecast; no speed of simulated GPUs."""
    steps, record = job.steps, job.record
    figures: dict[str, Any] = {key: record.get(key) for key in ("forecast", "step_forecast")}
    figures |= {"strategy": record.get("strategy", {}).get("file"), "processes": record["strategy"]["processes"]}
    figures["peak_memory_gib"] = max(line["peak_memory_gib"] for line in steps)
    for key in ("step_seconds", "mfu", "num_tokens"):
        if values := [line[key] for line in steps[NUM_WARMUP:] if key in line]:
            figures[key] = statistics.median(values)
    return figures


def side_by_side(
    part: str, results_of: Callable[[str], Iterable[Result]], names: Iterable[str], *, at_once: bool = True
) -> Iterator[Result]:
    """The results of each as they come; an error in one is its own."""

    def tried(name: str) -> Iterator[Result]:
        try:
            yield from results_of(name)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            yield Result(part, name, "failed", said, {"log": traceback.format_exc()})

    yield from as_they_come(list(map(tried, names)), at_once=at_once)


def as_they_come(sources: list[Iterator[Result]], *, at_once: bool) -> Iterator[Result]:
    """The results of all, each source on a thread of its own; if not at once, one source after another."""
    arrived: SimpleQueue[Result | None] = SimpleQueue()

    def drain(source: Iterator[Result]) -> None:
        try:
            for result in source:
                arrived.put(result)
        finally:
            arrived.put(None)

    with ThreadPoolExecutor(max(1, len(sources) if at_once else 1)) as pool:
        for source in sources:
            pool.submit(drain, source)
        num_left = len(sources)
        while num_left:
            result = arrived.get()
            if result is None:
                num_left -= 1
            else:
                yield result


def strategies(node: Node) -> Iterator[Result]:
    """Each strategy on as few GPUs as it needs, side by side."""
    recipe = write_recipe(node, "tiny", TINY, length=64, batch=8, rate=1e-3)
    single = node.start("tiny-single", recipe, "single", 1)
    yield compared("strategies", "single", single, single)
    chosen = [name for name in node.arguments.strategies or known_strategies() if name != "single"]

    def results_of(name: str) -> list[Result]:
        count, loaded = least(name), load_strategy(strategy_path(name))
        if count > node.cards.count:
            return [Result("strategies", name, "skipped", f"needs {count} GPUs, here are {node.cards.count}")]
        if loaded.offloads_to_nvme:
            build(node, loaded)
        if loaded.ep_size == 1:
            return [compared("strategies", name, node.start(f"tiny-{name}", recipe, name, count), single)]
        mixture = {"model": f"{{name_or_path: {write_experts(node, single, name)}}}"}
        reference = node.start(f"tiny-{name}-reference", recipe, "fsdp2", 2, mixture)
        return [compared("strategies", name, node.start(f"tiny-{name}", recipe, name, count, mixture), reference)]

    yield from side_by_side("strategies", results_of, chosen)


def build(node: Node, strategy: Strategy) -> None:
    """Compile DeepSpeed's parts before its first run, which takes no GPU: in the time of a job it would be late. Its
    failures are those of the job, which names them."""
    code = "import sys; from pathlib import Path; from cookbook.config.strategy import load_strategy"
    code += "; from cookbook.training.engine import build_ops"
    code += "; build_ops(load_strategy(Path(sys.argv[1])), Path('.cache'))"
    words = ["-c", code, str(strategy.path)]
    node.execute(words, "build", environment=node.environment, seconds=BUILD_SECONDS)


def write_experts(node: Node, single: Job, name: str) -> Path:
    """A tiny mixture, each token of which goes to all its experts, so that rounding sends none elsewhere."""
    from transformers import AutoTokenizer

    from benchmarks import tiny_models

    folder = node.folder / f"experts-{name}"
    config = tiny_models.tiny_config("qwen3_moe")
    config.num_experts = config.num_experts_per_tok = 6
    config.tie_word_embeddings = True
    AutoTokenizer.from_pretrained(single.folder / "export", trust_remote_code=False).save_pretrained(folder)
    tiny_models.tiny_model(config).save_pretrained(folder)
    return folder


def wide_sizes(node: Node) -> dict[str, Any]:
    """Two layers of an 8B, with the largest vocabulary, halved and halved again, of which one GPU holds weights,
    gradients and moments in half of its memory."""
    if node.arguments.model:
        return dict(node.arguments.model)
    sizes = dict(EIGHT_B)
    memory = min((gpu.total_bytes for gpu in node.gpus if gpu.total_bytes), default=16 * GIB)
    if node.simulated:
        memory = 80 * GIB
    while num_parameters(sizes) * 16 > memory / 2 and sizes["vocab_size"] // 2 >= LEAST_VOCABULARY:
        sizes["vocab_size"] //= 2
    return sizes


def num_parameters(sizes: dict[str, Any]) -> int:
    """Weights of a model of these sizes: embedding and head, and the matrices and norms of its layers."""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    keys = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    layer = 2 * hidden * (hidden + keys) + 3 * hidden * inner + 2 * hidden
    return 2 * sizes["vocab_size"] * hidden + sizes["num_hidden_layers"] * layer + hidden


def write_wide(node: Node) -> Path:
    """The wide model, in bf16 as published ones are: under ZeRO the weights that are trained start rounded, and small
    updates of others have another curve (docs/equivalence.md). Each machine writes the same.
    """
    import torch

    from cookbook.config.sections import ScratchModel
    from cookbook.training.models.model_source import new_model
    from cookbook.training.models.tokenizer_files import train_tokenizer

    chosen = wide_sizes(node)
    sizes = ScratchModel(**chosen)
    folder = node.folder / "-".join(["model", *map(str, chosen.values()), str(node.arguments.length)])
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.{node.arguments.machine}")
        tokenizer = train_tokenizer([" ".join(WORDS)], sizes.vocab_size)
        tokenizer.save_pretrained(part)
        model = new_model(sizes, tokenizer, seed=0).to(torch.bfloat16)
        model.config.max_position_embeddings = node.arguments.length
        model.save_pretrained(part)
        with contextlib.suppress(OSError):  # another machine was first
            part.rename(folder)
        shutil.rmtree(part, ignore_errors=True)
    return folder


def processes_for(node: Node, name: str, turn: str = "1") -> int:
    """As few as a strategy needs, so that jobs run side by side; over machines, and of the turn `all`, on all GPUs, or
    as many as are a power of two, which divides the batch.
    """
    total = node.cards.count * node.machines
    if name == "single" or (node.machines == 1 and turn != ALL):
        return least(name)
    return total if node.machines > 1 else 1 << (total.bit_length() - 1)


def batch_of(node: Node) -> int:
    """Sequences of a step, which `processes_for` divides: of one machine as many as it has GPUs at most."""
    return 16 if node.machines == 1 else 2 * node.cards.count * node.machines


def wide(node: Node, name: str, turn: str) -> Job:
    """A run of the wide model under a strategy.

    Args:
        turn: `1`, `2`, `all` or `compiled`.
    """
    chosen = node.arguments
    recipe = write_recipe(node, "wide", write_wide(node), length=chosen.length, batch=batch_of(node), rate=1e-5)
    settings = {"model.compile": True} if turn == "compiled" else {}
    count = processes_for(node, name, turn)
    alone = name == "single"
    return node.start(f"wide-{name}-{turn}", recipe, name, count, settings, steps=chosen.steps, alone=alone)


def too_few(node: Node, part: str, name: str) -> list[Result]:
    """That a strategy needs more GPUs than there are; else empty."""
    needed, count = max(least(name), node.machines), node.cards.count * node.machines
    return [Result(part, name, "skipped", f"needs {needed} GPUs, here are {count}")] if needed > count else []


def widths(node: Node) -> Iterator[Result]:
    """Two layers of an 8B: the loss of one GPU, twice; the share of the peak."""
    chosen, is_alone = node.arguments, node.machines == 1
    write_wide(node)
    with ThreadPoolExecutor(1) as pool:
        single = None if chosen.machine else pool.submit(wide, node, "single", "1")

        def results_of(name: str) -> Iterator[Result]:
            if few := too_few(node, "widths", name):
                yield from few
                return
            job = wide(node, name, "1")
            if single is not None:
                yield compared("widths", name, job, single.result())
            again = wide(node, name, "2")
            if single is not None:
                yield compared("widths", f"{name}, run twice", again, job, TWICE)
            count = processes_for(node, name, ALL)
            if single is not None and name == ON_ALL and count > processes_for(node, name):
                yield compared("widths", f"{name} on {count} GPUs", wide(node, name, ALL), single.result())

        names = chosen.wide or (WIDE if is_alone else OVER_NETWORK)
        if not is_alone:
            names = [name for name in names if name != "single"]
        if single and not is_alone:
            yield compared("widths", "single", single.result(), single.result())
        yield from side_by_side("widths", results_of, names, at_once=is_alone)  # over machines in one order on all


def compiled(node: Node) -> Iterator[Result]:
    """Runs of `widths`, compiled: the same curve, without a graph break, and how much faster."""
    write_wide(node)

    def results_of(name: str) -> list[Result]:
        if few := too_few(node, "compiled", name):
            return few
        return [judge_compiled(name, wide(node, name, "compiled"), wide(node, name, "1"))]

    yield from side_by_side("compiled", results_of, node.arguments.wide or WIDE)


def judge_compiled(name: str, job: Job, eager: Job) -> Result:
    """A compiled run beside the eager one."""
    result = compared("compiled", name, job, eager)
    if "distance" not in result.figures:
        return result
    counts = next((event for event in job.events if event.get("event") == "compiled"), None)
    if counts is None:
        return Result("compiled", name, "failed", "the run has not counted its graphs", job.log)
    figures = result.figures | {"counts": counts}
    said = f"{result.said}; {counts['graph_breaks']} graph breaks, {counts['recompilations']} recompilations"
    if {"step_seconds"} <= figures.keys() & speed_of(eager).keys():
        figures["times_as_fast"] = speed_of(eager)["step_seconds"] / figures["step_seconds"]
        said += f"; {figures['times_as_fast']:.2f} times as fast"
    good = result.state == "passed" and not counts["graph_breaks"] and not counts["given_up"]
    return Result("compiled", name, "passed" if good else "failed", said, figures)


def hangs(node: Node) -> Iterator[Result]:
    """A process that is stopped is named in time, and one that is killed ends the others."""
    if node.cards.count < 2:
        yield Result("hangs", "SIGSTOP and SIGKILL of a rank", "skipped", "needs 2 GPUs")
        return
    recipe = write_recipe(node, "long", TINY, length=64, batch=8, rate=1e-5)

    def results_of(mode: str) -> Iterator[Result]:
        for sent in SENT:
            yield hang(node, recipe, f"{sent.name}, {mode}", sent, {"model.compile": mode == "compiled"})

    yield from side_by_side("hangs", results_of, ("eager", "compiled"))


def rank_of(pid: int) -> int | None:
    """The rank of a training process; None for another one."""
    with contextlib.suppress(psutil.Error, KeyError):
        process = psutil.Process(pid)
        return int(process.environ()["RANK"]) if "train.py" in " ".join(process.cmdline()) else None
    return None


def hang(node: Node, recipe: Path, name: str, sent: signal.Signals, settings: dict[str, Any]) -> Result:
    seconds, folder = node.arguments.hang_seconds, name.replace(", ", "-")
    times: dict[str, float] = {}
    victims: list[int] = []

    def strike(run: subprocess.Popen[bytes], mark: str) -> None:
        limit = time.monotonic() + node.arguments.limit
        while time.monotonic() < limit and run.poll() is None and num_steps(node.folder / folder) <= NUM_WARMUP:
            time.sleep(0.2)
        ranks = {rank_of(pid): pid for pid in marked([mark])}
        if 1 not in ranks:
            return
        victims.append(ranks[1])
        begun = time.monotonic()
        os.kill(ranks[1], sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait((seconds if sent == signal.SIGSTOP else 0) + GRACE_SECONDS)
            times["ended_after"] = round(time.monotonic() - begun, 1)
            until = time.monotonic() + LEAVE_SECONDS
            while marked([mark]) and time.monotonic() < until:
                time.sleep(0.2)
            times["left"] = len(marked([mark]))

    settings = settings | {"run.max_steps": 10**6}
    if sent == signal.SIGSTOP:
        settings["run.hang_timeout_minutes"] = seconds / 60
    job = node.start(folder, recipe, "fsdp2", 2, settings, trouble=strike)
    if not victims:
        return Result("hangs", name, "failed", f"never came to a step; {job.last_words}", job.log)
    if "ended_after" not in times:
        return Result("hangs", name, "failed", f"has not ended {GRACE_SECONDS:.0f} s after its limit", job.log)
    report = job.folder / "hang" / "report.txt"
    accused = (report.read_text().splitlines()[1:] or [""])[0] if report.exists() else ""
    is_named = accused.startswith(f"rank 1 (process {victims[0]} ")
    if sent == signal.SIGKILL:  # the launcher's words
        is_named = f"exitcode  : -9 (pid: {victims[0]})" in job.said
    said = f"ended after {times['ended_after']} s, {'naming' if is_named else 'without a word of'} the process"
    said += f": {accused}" if accused else ""
    said += f", {times['left']:.0f} processes left" if times["left"] else ""
    good = is_named and job.code not in (0, 2, 75) and not times["left"]
    return Result("hangs", name, "passed" if good else "failed", said, times | job.log)


def saving(node: Node) -> Iterator[Result]:
    """A checkpoint that was written in the background is resumed under another strategy."""
    if node.cards.count < 2:
        yield Result("saving", "resume under another strategy", "skipped", "needs 2 GPUs")
        return
    recipe = write_recipe(node, "saved", TINY, length=64, batch=8, rate=1e-3)
    background = {"run.max_steps": 4, "run.save_every_steps": 2, "run.save_in_background": True}
    saved = node.start("saved", recipe, "fsdp2", 2, background)
    name = "fsdp2 in the background, then zero3"
    if saved.code:
        yield compared("saving", name, saved, saved)
        return
    at = saved.folder / "checkpoints" / "step-00000002"
    resumed = node.start("resumed", recipe, "zero3", 2, {"run.max_steps": 4, "run.resume": at})
    yield compared("saving", name, resumed, saved, start=2)


def liger(node: Node) -> Iterator[Result]:
    """Which of Liger's kernels, one at a time, ends in the illegal access of docs/on_gpu.md."""
    if node.simulated or find_spec("liger_kernel") is None:
        why = "simulated GPUs have no Triton" if node.simulated else "not installed: pip install liger-kernel"
        yield Result("liger", "bisection", "skipped", why)
        return
    sanitizer = shutil.which("compute-sanitizer")

    def results_of(name: str) -> list[Result]:
        words = [str(HERE / "liger.py"), name]
        with node.cards.take(1) as mine:
            done = node.execute(words, f"liger-{name}", cards=mine)
            told = done.said
            if done.code and sanitizer:
                program = ["-c", "import os, sys; os.execv(sys.argv[1], sys.argv[1:])", sanitizer, sys.executable]
                told += node.execute([*program, *words], f"liger-{name}-sanitizer", cards=mine).said[:4000]
        state = "failed" if done.code else "passed"
        said = done.last_words if done.code else told.strip().splitlines()[-1]
        return [Result("liger", name, state, said, {"log": told[-6000:]})]

    yield from side_by_side("liger", results_of, ("none", *KERNELS))


def attention(node: Node) -> Iterator[Result]:
    """Other attention kernels beside torch's own: no further from float32, and how much faster."""
    for name, modules in ATTENTION.items():
        if any(find_spec(module) is None for module in modules):  # in this order: a parent is imported for its part
            yield Result("attention", name, "skipped", f"not installed: {modules[-1]}")
            continue
        length = node.arguments.length
        words = [str(HERE / "attention.py"), name, *map(str, (min(length, 2048), length, 8 * length))]
        with node.cards.take(1) as mine:
            done = node.execute(words, f"attention-{name}", cards=mine, environment=node.environment, apart=True)
        if done.code:
            said = done.said.strip().splitlines()[-1] if done.code == 2 and done.said.strip() else done.last_words
            yield Result("attention", name, "skipped" if done.code == 2 else "failed", said, done.log)
            continue
        yield kernel_beside(name, last_json(done.said), simulated=bool(node.simulated))


def kernel_beside(name: str, figures: dict[str, Any], *, simulated: bool) -> Result:
    """An attention kernel beside torch's own, by what attention.py measured."""
    own, other = figures["default"], figures[name]
    pairs = [zip(own["distances"][layout], far, strict=True) for layout, far in other["distances"].items()]
    ratios = [theirs / ours for layout in pairs for ours, theirs in layout]
    said = f"{max(ratios):.2g} times as far from float32 as torch's own kernel"
    faster = ", ".join(
        f"{own['seconds'][length] / taken:.2f} at {length}" for length, taken in other["seconds"].items()
    )
    said += "; simulated: no speed" if simulated else f"; times as fast: {faster}"
    state = "passed" if all(ratio <= AS_FAR for ratio in ratios) else "failed"  # NaN is no such ratio
    return Result("attention", name, state, said, figures)


_PARTS = (doctor, bandwidth, strategies, widths, compiled, hangs, saving, attention, liger)
PARTS = {part.__name__: part for part in _PARTS}
OVER_MACHINES = ("doctor", "bandwidth", "widths")
AT_ONCE = ("compiled", "hangs", "saving", "attention", "liger")
"""Parts that share the GPUs: most of their time they wait, for a compiler or for a limit."""


def page(about: dict[str, Any], results: list[Result]) -> str:
    counts = [
        f"{sum(result.state == state for result in results)} {state}" for state in ("passed", "failed", "skipped")
    ]
    lines = [f"# {about['machines']} x {about['cards']} x {about['gpu']}: {', '.join(counts)}", ""]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines += [f"{about['date']}, {about['seconds']:.0f} s; {versions}"]
    taken = ", ".join(f"{part} {seconds:.0f}" for part, seconds in about["parts"].items())
    lines += [f"Seconds of the parts, of which the last share the GPUs: {taken}."]
    lines += [f"**Ended by {about['ended']}.**"] if about.get("ended") else []
    lines += ["", "| part | what | | |", "|---|---|---|---|"]
    for result in results:
        said = result.said.replace("|", "/").replace("\n", " ")
        if "mfu" in result.figures:
            said += f"; {result.figures['mfu']:.1%} of the peak, {result.figures['step_seconds']:.3f} s a step"
        lines.append(f"| {result.part} | {result.name} | {result.state} | {said} |")
    return "\n".join(lines) + "\n"


def run_parts(node: Node, seconds: dict[str, float]) -> Iterator[Result]:
    """
    Args:
        seconds: receives those of each part.
    """

    def results_of(name: str) -> Iterator[Result]:
        if node.machines > 1 and name not in OVER_MACHINES:
            yield Result(name, name, "skipped", "of one machine: make test-gpu-node without --machines")
            return
        started = time.monotonic()
        try:
            yield from PARTS[name](node)
        except Exception as error:  # the other parts are worth their time all the same
            yield Result(name, name, "failed", f"{type(error).__name__}: {error}", {"log": traceback.format_exc()})
        seconds[name] = round(time.monotonic() - started, 1)

    chosen = [name for name in PARTS if name in node.arguments.parts]
    for name in chosen:
        if name not in AT_ONCE:
            yield from results_of(name)
    yield from as_they_come([results_of(name) for name in chosen if name in AT_ONCE], at_once=True)
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
    parser.add_argument("--wide", nargs="*", help=f"default: {' '.join(WIDE)}; of machines {' '.join(OVER_NETWORK)}")
    parser.add_argument("--model", type=json.loads, help="sizes of the wide model; default: two layers of an 8B")
    parser.add_argument("--length", type=int, default=4096, help="of its sequences")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--hang-seconds", type=float, default=60.0)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a job")
    arguments = parser.parse_args(words)
    if arguments.machines > 1 and arguments.shared is None:
        parser.error("--machines needs --shared, a folder that all of them see")
    if unknown := {*(arguments.strategies or ()), *(arguments.wide or ())} - set(known_strategies()):
        parser.error(f"no strategy {', '.join(sorted(unknown))}; there are {', '.join(known_strategies())}")
    return arguments


def main() -> None:
    arguments = arguments_of()
    try:
        node = Node(arguments, (arguments.shared or arguments.output).resolve())
    except RecipeError as error:
        sys.exit(f"error: {error}")
    if not node.cards.count:
        sys.exit("error: no GPU here; --simulate 4 runs the same on simulated ones")
    end_all(left_behind())
    started = time.monotonic()
    results: list[Result] = []
    about, seconds = facts(node), dict[str, float]()
    arguments.output.mkdir(parents=True, exist_ok=True)

    def save() -> None:  # as parts end: what hangs loses nothing
        about["seconds"], about["parts"] = round(time.monotonic() - started, 1), seconds
        ordered = sorted(results, key=lambda result: [*PARTS, "machines"].index(result.part))
        told = json.dumps(about | {"results": [asdict(result) for result in ordered]}, indent=1)
        write(arguments.output / "node.json", told + "\n")
        write(arguments.output / "node.md", page(about, ordered))

    def end(number: int, frame: Any) -> None:
        for each in ENDING:  # make sends a second one
            signal.signal(each, signal.SIG_IGN)
        about["ended"] = signal.Signals(number).name
        node.end()
        try:
            print(f"{about['ended']}: what ran is ended", flush=True)
        except OSError:  # the terminal, or a `tee`, is gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Ended(128 + number)

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, end)
    try:
        for result in run_parts(node, seconds):
            results.append(result)
            print(f"{result.state:8}{result.part:12}{result.name}: {result.said}", flush=True)
            save()
    finally:
        node.end()
        save()
    print(f"send back {arguments.output}/node.md and node.json; docs/on_gpu.md says what becomes of them:")
    print(f"  python benchmarks/gpu_node/fit.py {arguments.output}/node.json")
    sys.exit(any(result.state == "failed" for result in results))


def facts(node: Node) -> dict[str, Any]:
    """Facts that the figures depend on; no name of the machine or of its owner."""
    about: dict[str, Any] = {"command": "make test-gpu-node", "date": date.today().isoformat()}
    about |= {"machines": node.machines, "cards": node.cards.count, "is_simulated": bool(node.simulated)}
    about["gpu"] = "Simulated GPU" if node.simulated else ", ".join(sorted({gpu.name for gpu in node.gpus}))
    about["gpus"] = [
        {"driver": gpu.driver, "capability": gpu.capability, "total_bytes": gpu.total_bytes} for gpu in node.gpus
    ]
    about |= {"cores": num_cores(), "host_gib": round(psutil.virtual_memory().total / GIB)}
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    about["commit"] = git.stdout.strip() or None
    about["versions"] = {package: version(package) for package in PACKAGES if find_spec(package) is not None}
    return about


if __name__ == "__main__":
    main()
