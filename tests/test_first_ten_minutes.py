"""Protects `make test-gpu-node`, whose first run on rented GPUs must not be its first run.

python -m pytest -q tests/test_first_ten_minutes.py -m "slow or not slow"

Simulated GPUs run all of it but Liger's kernels; tests/test_gpu_matrix.py has the strategies that it starts.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM

from benchmarks.gpu_node import collectives, fit
from benchmarks.gpu_node import run as gpu_node
from benchmarks.gpu_node.jobs import Cards, Ended, Job, Node, end_all, last_json, mark_of, marked
from cookbook.config.recipe import load_recipe
from cookbook.config.sections import ScratchModel
from cookbook.forecast import step_time
from cookbook.system.gpus import InstalledGpu
from cookbook.system.hardware import GIB
from cookbook.training.models.structure import scratch_config
from tests.curves import environment
from tests.needs import need_simulated_gpus
from tests.simulated_driver import variables
from tests.two_machines import ADDRESSES, two_machines

SMALL = json.dumps(gpu_node.TINY | {"vocab_size": 512})
QUICK = ["--model", SMALL, "--length", "64", "--steps", "5", "--mebibytes", "1"]


def node_of(tmp_path: Path, *words: str) -> Node:
    return Node(gpu_node.arguments_of([*words, "--output", str(tmp_path)]), tmp_path)


def test_what_one_gpu_cannot_do_is_skipped_by_name(tmp_path: Path):
    parts = ("bandwidth", "hangs", "saving", "attention", "liger")
    results = list(gpu_node.run_parts(node_of(tmp_path, "--simulate", "1", "--parts", *parts), {}))
    assert [result.state for result in results] == 7 * ["skipped"]
    assert results[0].said == "one GPU exchanges nothing" and results[-1].name == "two machines"
    assert {result.part for result in results} == {*parts, "machines"}


@pytest.mark.slow
@pytest.mark.parametrize(("off", "state"), [("0", "passed"), ("0.1", "failed")])
def test_another_attention_kernel_is_measured_beside_torchs_own(tmp_path: Path, monkeypatch, off: str, state: str):
    """A stand-in for FlashAttention 3, which torch calls in packed rows and in padded ones."""
    need_simulated_gpus()
    stand_in = str(ROOT / "tests" / "stand_in_flash")
    monkeypatch.syspath_prepend(stand_in)
    monkeypatch.setenv("PYTHONPATH", stand_in)
    monkeypatch.setenv("STAND_IN_OFF", off)
    node = node_of(tmp_path, "--simulate", "1", "--parts", "attention", "--length", "64")
    result = next(gpu_node.run_parts(node, {}))
    assert (result.name, result.state) == ("FA3", state) and "FA3" in result.figures, result
    distances = result.figures["FA3"]["distances"]
    assert all((distances[layout][0] > 0.1) is (state == "failed") for layout in ("packed", "padded")), distances


def test_a_part_or_a_job_that_ends_in_an_error_leaves_the_others_their_time(tmp_path: Path, monkeypatch):
    def breaks(node: Node) -> Iterator[gpu_node.Result]:
        yield gpu_node.Result("strategies", "one", "passed", "")
        raise KeyError("no such key")

    monkeypatch.setitem(gpu_node.PARTS, "strategies", breaks)
    results = list(gpu_node.run_parts(node_of(tmp_path, "--simulate", "1", "--parts", "strategies", "saving"), {}))
    assert [result.state for result in results] == ["passed", "failed", "skipped", "skipped"]
    assert results[1].said == "KeyError: 'no such key'"

    def result_of(name: str) -> list[gpu_node.Result]:
        return [gpu_node.Result("widths", name, "passed", str(10 // int(name)))]

    states = {result.name: result.state for result in gpu_node.side_by_side("widths", result_of, ["1", "0", "5"])}
    assert states == {"1": "passed", "0": "failed", "5": "passed"}


def test_jobs_on_a_node_have_gpus_of_their_own():
    cards, seen = Cards(4), []

    def job(count: int) -> None:
        with cards.take(count) as mine:
            seen.append(("begin", tuple(mine)))
            time.sleep(0.01)
            seen.append(("end", tuple(mine)))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(job, (2, 2, 4, 1, 3, 2)))
    held: list[int] = []
    for what, mine in seen:
        if what == "begin":
            assert not set(mine) & set(held)
            held += mine
        else:
            held = [card for card in held if card not in mine]
    assert len(seen) == 12


@pytest.mark.parametrize(
    ("given", "seen"), [(None, "1,3"), ("4, 5,6,7", "5,7"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-b,GPU-d")]
)
def test_a_job_sees_its_gpus_in_the_words_of_who_chose_some(tmp_path: Path, monkeypatch, given: str | None, seen: str):
    node = node_of(tmp_path, "--simulate", "4")
    node.simulated = 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    words = ["-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    assert node.execute(words, "seen", cards=[1, 3]).said == f"{seen}\n"


LEAVES_A_CHILD = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
if sys.argv[1] == "waits":
    child.wait()
"""


@pytest.mark.parametrize("how", ["waits", "leaves"])
def test_nothing_that_a_program_starts_is_left(tmp_path: Path, how: str):
    """Also where its parent has ended, so that nobody's list of children has it."""
    seconds = 1.0 if how == "waits" else 60.0
    job = node_of(tmp_path, "--simulate", "1").execute(["-c", LEAVES_A_CHILD, how], "leaves", seconds=seconds)
    assert job.is_late is (how == "waits")
    if how == "waits":
        assert 1 <= job.seconds < 60 and job.last_words.startswith(f"not within {round(job.seconds)} s: ")
    left = Path("/proc", job.said.strip())
    assert not left.exists() or (left / "stat").read_text().split()[2] == "Z"


def test_a_run_that_did_enough_is_ended_and_has_passed(tmp_path: Path):
    words, started = ["-c", "import time; time.sleep(600)"], time.monotonic()
    job = node_of(tmp_path, "--simulate", "1").execute(words, "enough", is_enough=lambda: True)
    assert job.code == 0 and not job.is_late and time.monotonic() - started < 60


def test_after_a_signal_nothing_is_started(tmp_path: Path):
    node = node_of(tmp_path, "--simulate", "1")
    codes: list[Any] = []

    def runs() -> None:
        try:
            node.execute(["-c", "import time; time.sleep(600)"], "first")
        except Ended:
            codes.append("ended")

    thread = threading.Thread(target=runs)
    thread.start()
    while not list(tmp_path.glob("first*.log")):
        time.sleep(0.01)
    node.end()
    thread.join(60)
    assert codes == ["ended"]
    with pytest.raises(Ended):
        node.execute(["-c", "pass"], "second")


def job_of(folder: Path, losses: list[float], code: int = 0, **options: Any) -> Job:
    folder.mkdir(parents=True)
    lines = ({"step": i + 1, "loss": loss, "peak_memory_gib": 1.0} for i, loss in enumerate(losses))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps({"strategy": {"file": "x", "processes": 2}}))
    return Job(code, options.pop("said", ""), folder=folder, **options)


def test_a_run_is_compared_with_another_and_a_refusal_is_no_failure(tmp_path: Path):
    short = job_of(tmp_path / "one", [4.0, 3.0])
    states = {
        "the same": (job_of(tmp_path / "a", [4.0, 3.004]), "passed"),
        "another": (job_of(tmp_path / "b", [4.0, 3.006]), "failed"),
        "not a number": (job_of(tmp_path / "c", [4.0, float("nan")]), "failed"),
        "too short": (job_of(tmp_path / "d", [4.0]), "failed"),
        "as long as it was to be": (job_of(tmp_path / "e", [4.0, 3.0, 2.0], num_steps=2), "passed"),
        "refused": (job_of(tmp_path / "f", [], 2, said="error: no\n"), "skipped"),
    }
    for name, (job, state) in states.items():
        assert gpu_node.compared("widths", name, job, short).state == state, name
    said = "[rank1]: torch.OutOfMemoryError: CUDA out of memory\nE1127 more\n"
    died = job_of(tmp_path / "g", [], 1, said=said)
    assert "OutOfMemoryError" in gpu_node.compared("widths", "died", died, short).said
    assert gpu_node.compared("widths", "x", short, died).said.startswith("g, its reference: exit code 1")
    said = "data.max_length is too large\nE1127 1 torch/distributed/elastic/api.py:1002] failed (exitcode: 2)\n"
    refused = job_of(tmp_path / "h", [], 2, said=said)
    assert gpu_node.compared("widths", "x", refused, short).said == "exit code 2: data.max_length is too large"
    for job in (refused, short):  # what refuses the reference is a fault of these programs
        assert gpu_node.compared("widths", "single", job, refused).state == "failed"


def test_the_wide_model_has_positions_for_its_sequences(tmp_path: Path):
    node = node_of(tmp_path, "--model", SMALL, "--length", "5000")
    assert json.loads((gpu_node.write_wide(node) / "config.json").read_text())["max_position_embeddings"] == 5000


def test_a_compiled_run_passes_if_no_graph_breaks_and_none_is_given_up(tmp_path: Path):
    eager, state = job_of(tmp_path / "eager", [4.0, 3.0]), {}
    for name, (breaks, given_up) in {"whole": (0, 0), "broken": (3, 0), "eager in the end": (0, 1)}.items():
        job = job_of(tmp_path / name, [4.0, 3.0])
        counts = {"event": "compiled", "step": 2, "graph_breaks": breaks, "recompilations": 1, "given_up": given_up}
        (job.folder / "events.jsonl").write_text(json.dumps(counts) + "\n")
        state[name] = gpu_node.judge_compiled("fsdp2", job, eager).state
    assert state == {"whole": "passed", "broken": "failed", "eager in the end": "failed"}
    refused = job_of(tmp_path / "refused", [], 2)
    assert gpu_node.judge_compiled("zero3", refused, eager).state == "skipped"


@pytest.mark.parametrize(
    ("gib", "vocabulary"), [(15.0, 8016), (24.0, 32064), (39.5, 64128), (45.0, 128256), (79.6, 128256)]
)
def test_the_wide_model_leaves_half_of_a_gpu_free(tmp_path: Path, gib: float, vocabulary: int):
    """By hand: two layers of 218,112,000 weights, 2 x 4,096 a word, 4,096 of the last norm; 16 bytes a weight."""
    node = node_of(tmp_path, "--simulate", "1")
    node.simulated, node.gpus = 0, [InstalledGpu(index=0, total_bytes=int(gib * GIB))]
    sizes = gpu_node.wide_sizes(node)
    assert sizes["vocab_size"] == vocabulary
    count = 2 * 218_112_000 + 2 * 4096 * vocabulary + 4096
    assert gpu_node.num_parameters(sizes) == count and count * 16 <= gib * GIB / 2


@pytest.mark.parametrize(("capability", "precision"), [((7, 5), "fp16"), ((8, 0), "bf16"), ((12, 0), "bf16")])
def test_gpus_without_bf16_train_in_fp16(tmp_path: Path, capability: tuple[int, int], precision: str):
    node = node_of(tmp_path, "--simulate", "1")
    node.gpus = [InstalledGpu(index=0, capability=capability)]
    path = gpu_node.write_recipe(node, "tiny", gpu_node.TINY, length=64, batch=8, rate=1e-3)
    assert load_recipe(path).mixed_precision == precision


def test_the_batch_is_divided_by_what_any_number_of_gpus_runs(tmp_path: Path):
    for machines, cards in ((1, 1), (1, 3), (1, 8), (1, 11), (1, 16), (2, 2), (2, 8), (4, 5)):
        words = ["--simulate", str(cards), "--machines", str(machines), "--shared", str(tmp_path)]
        node = node_of(tmp_path, *words)
        for name in gpu_node.WIDE:
            if not gpu_node.too_few(node, "widths", name):
                counts = [gpu_node.processes_for(node, name, turn) for turn in ("1", gpu_node.ALL)]
                assert all(count <= cards * machines for count in counts), (cards, name)
                assert all(gpu_node.batch_of(node) % count == 0 for count in counts), (cards, name)


def test_pairs_of_one_machine_are_all_and_of_two_lie_across_the_network():
    assert collectives.pairs(2, 2) == [] and len(collectives.pairs(8, 8)) == 28
    assert collectives.pairs(4, 2) == [[0, 2], [1, 3]]


def test_the_network_that_nccl_takes_is_read_from_its_log():
    said = "h:1:2 [0] NCCL INFO NET/IB : No device found.\nh:1:2 [0] NCCL INFO NET/Socket : Using [0]ens3:10.0.0.1<0>\n"
    assert gpu_node.network_of(said, simulated=False).figures["names"] == ["Socket"]
    newer = f"{said}h:1:2 [0] NCCL INFO Using network IB\n"
    assert gpu_node.network_of(newer, simulated=False).said == "NCCL takes IB"
    assert gpu_node.network_of("", simulated=False).state == "failed"


def test_the_last_object_of_an_output_is_read():
    assert last_json('a warning\n{"a": 1}\n{"a": 2}\nmore\n') == {"a": 2}


def test_it_needs_nothing_that_the_tests_need():
    """`make test-gpu-node` installs requirements.txt alone: minutes of a rented node."""
    code = "import sys; sys.modules.update(pytest=None, trl=None); import benchmarks.gpu_node.run"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def row(what: str, ranks: int, mebibytes: int, seconds: float, bus_gb: float = 0.0) -> dict[str, Any]:
    return {"ranks": list(range(ranks)), "what": what, "mebibytes": mebibytes, "seconds": seconds, "bus_gb": bus_gb}


def node_json(**changes: Any) -> dict[str, Any]:
    """As eight H100 could send it; each number is chosen so that the constants below are computed in the head."""
    rows = [row(what, 8, 512, 1.0, bus) for what, bus in (("all_reduce", 360.0), ("reduce_scatter", 387.0))]
    # 1 microsecond a MiB over all and 2 over a pair, beside 20 and 8 microseconds.
    rows += [row("all_gather", 8, 512, 532e-6, 315.0), row("all_gather", 8, 1, 21e-6, 50.0)]
    rows += [row("all_gather", 2, 512, 1032e-6), row("all_gather", 2, 1, 10e-6)]
    parts = [{"name": "compute", "low": 0.2, "high": 0.4}, {"name": "GPU memory", "low": 0.06, "high": 0.08}]
    parts += [{"name": "update", "low": 0.04, "high": 0.12}]
    single = {"processes": 1, "mfu": 0.32, "step_seconds": 0.5, "peak_memory_gib": 30.0, "losses": [1.0]}
    single |= {"step_forecast": {"low": 0.3, "high": 0.6, "parts": parts}, "forecast": {"allocated": 30 * GIB}}
    sharded = single | {"processes": 4, "step_seconds": 0.7, "peak_memory_gib": 20.0}

    def result(part: str, name: str, state: str = "passed", **figures: Any) -> dict[str, Any]:
        return {"part": part, "name": name, "state": state, "said": "", "figures": figures}

    results = [
        result("bandwidth", "512 MiB", rows=rows),
        result("widths", "single", **single),
        result("widths", "fsdp2", **sharded),
        result("compiled", "fsdp2", times_as_fast=1.25),
        result("compiled", "pp", "failed"),
        result("compiled", "zero3", "skipped"),
    ]
    about = {"machines": 1, "cards": 8, "gpu": "NVIDIA H100 80GB HBM3", "is_simulated": False}
    return about | {"date": "2026-11-27", "commit": "abc", "results": results} | changes


def test_the_constants_of_a_node_are_those_by_hand():
    """NVLink: 315 and 387 of 450 GB/s. A hop: (20 - 8) microseconds over six more steps of the ring. Products: 0.16 s
    at the peak, of 0.5 less 0.10 to 0.20 s of other kernels.
    """
    node, gpu = node_json(), fit.find_gpu("H100")
    assert gpu is not None
    constants = {constant.constant: constant for constant in (*fit.links(node, gpu), *fit.products(node, gpu))}
    ends = {name: (constant.low, constant.high) for name, constant in constants.items()}
    assert ends["NVLINK_SHARE"] == pytest.approx((0.7, 0.86))
    assert ends["HOP_LATENCY['NVLink']"] == pytest.approx((2e-6, 2e-6))
    assert ends["EFFICIENCY['hopper']"] == pytest.approx((0.4, 0.16 / 0.3))
    assert len(constants) == 3
    for name, constant in constants.items():  # what is named is there
        assert eval(name, vars(step_time)) == constant.now
    assert not constants["NVLINK_SHARE"].is_inside and constants["HOP_LATENCY['NVLink']"].is_inside


def test_two_machines_say_what_each_gpu_has_of_the_network():
    rows = [row(what, 16, 512, 1.0, 320.0) for what in fit.RINGS]
    node = node_json(machines=2)
    node["results"][0]["figures"]["rows"] = rows
    gpu = fit.find_gpu("H100")
    assert gpu is not None
    (constant,) = fit.links(node, gpu)
    assert (constant.low, constant.high, constant.is_inside) == (320.0, 320.0, True)  # 320 GB/s x 8 bits / 8 GPUs


def test_the_report_names_what_moves_what_was_missed_and_where_compiling_passed(tmp_path: Path):
    path = tmp_path / "node.json"
    path.write_text(json.dumps(node_json()))
    words = [sys.executable, "benchmarks/gpu_node/fit.py", str(path)]
    lines = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "OUTSIDE NVLINK_SHARE: 0.5 to 0.82; here 0.7 to 0.86" in "\n".join(lines)
    assert "failed: compiled: pp" in lines
    missed = [line for line in lines if line.startswith("MISSED")]
    assert missed == [
        "MISSED  fsdp2: a step took 0.700 s, the forecast has 0.300 to 0.600",
        "MISSED  fsdp2: allocated 20.00 GiB, the forecast has 30.00 (+50.0%)",
    ]
    assert lines[-4:-1] == [
        "model.compile passed: fsdp2 (1.25 times as fast)",
        "model.compile failed: pp",
        "model.compile skipped: zero3",
    ]
    assert "docs/on_gpu.md" in lines[-1] and "### When a node.json arrives" in (ROOT / "docs/on_gpu.md").read_text()


@pytest.mark.parametrize(
    ("changes", "why"), [({"is_simulated": True}, "measure nothing"), ({"gpu": "NVIDIA X1"}, "no row for NVIDIA X1")]
)
def test_what_measures_nothing_fits_nothing(changes: dict[str, Any], why: str):
    with pytest.raises(ValueError, match=why):
        list(fit.report(node_json(**changes)))


def run_of(tmp_path: Path, *words: str) -> list[str]:
    return [sys.executable, "benchmarks/gpu_node/run.py", *QUICK, "--output", str(tmp_path), *words]


@pytest.mark.thorough
def test_the_first_ten_minutes_on_a_node_run_whole_on_simulated_gpus(tmp_path: Path):
    need_simulated_gpus()
    words = run_of(tmp_path, "--simulate", "2", "--strategies", "ddp", "--wide", "single", "zero3")
    words += ["--hang-seconds", "30"]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=2400)
    told = json.loads((tmp_path / "node.json").read_text())
    results = told["results"]
    states = {(result["part"], result["name"]): result["state"] for result in results if result["part"] != "doctor"}
    assert "failed" not in states.values(), done.stdout[-3000:]
    assert {name for name, state in states.items() if state == "passed"} == {
        ("bandwidth", "1 MiB"),
        ("strategies", "single"),
        ("strategies", "ddp"),
        ("widths", "single"),
        ("widths", "single, run twice"),
        ("widths", "zero3"),
        ("widths", "zero3, run twice"),
        ("compiled", "single"),
        *(("hangs", f"{sent}, {mode}") for sent in ("SIGSTOP", "SIGKILL") for mode in ("eager", "compiled")),
        ("saving", "fsdp2 in the background, then zero3"),
    }
    assert {result["part"] for result in results} == {*gpu_node.PARTS, "machines"} and told["parts"].keys() == {
        *gpu_node.PARTS
    }
    assert (tmp_path / "node.md").read_text().count("\n|") == len(results) + 2


@pytest.mark.thorough
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_and_a_whole_file_and_it_starts_again(tmp_path: Path, sent: signal.Signals):
    need_simulated_gpus()
    words = run_of(tmp_path, "--simulate", "2", "--parts", "strategies", "--strategies", "ddp", "fsdp2")
    running = subprocess.Popen(words, cwd=ROOT, env=environment())
    try:
        until = time.monotonic() + 600
        while not any(tmp_path.glob("tiny-[df]*.log")) and running.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        marks = {mark_of(running.pid, number) for number in range(20)}
        assert marked(marks)
        running.send_signal(sent)
        assert running.wait(60) == 128 + sent
        assert not marked(marks)
    finally:
        running.kill()
    told = json.loads((tmp_path / "node.json").read_text())
    assert told["ended"] == sent.name and [result["name"] for result in told["results"]] == ["single"]
    assert f"Ended by {sent.name}" in (tmp_path / "node.md").read_text()
    again = run_of(tmp_path, "--simulate", "2", "--parts", "strategies", "--strategies", "single")
    subprocess.run(again, cwd=ROOT, env=environment(), check=True, timeout=900)


def test_what_a_run_left_that_was_killed_is_ended_by_the_next(tmp_path: Path):
    """A process of an earlier run.py, which is there no more; not one of a container, whose numbers are others."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mark, foreign = mark_of(gone.pid, 0), f"{gone.pid}-0-1"
    elsewhere = {**os.environ, "COOKBOOK_GPU_NODE": foreign}
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=elsewhere)
    variables = {**os.environ, "COOKBOOK_GPU_NODE": mark}
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=variables)
    try:
        while not marked([mark]) or not marked([foreign]):
            time.sleep(0.01)
        assert mark in gpu_node.left_behind() and foreign not in gpu_node.left_behind()
        end_all([mark])
        assert left.wait(10) == -signal.SIGKILL and other.poll() is None
    finally:
        left.kill()
        other.kill()


@pytest.mark.thorough
def test_two_machines_measure_what_they_share_and_skip_the_rest_by_name(tmp_path: Path):
    need_simulated_gpus()
    shared = ["--simulate", "2", "--machines", "2", "--first", ADDRESSES[0], "--shared", str(tmp_path / "shared")]
    shared += ["--wide", "fsdp2"]
    with two_machines() as names:
        running = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *run_of(tmp_path / str(i), *shared, "--machine", str(i))],
                cwd=ROOT,
                env=environment(),
            )
            for i, name in enumerate(names)
        ]
        try:
            assert [run.wait(1200) for run in running] == [0, 0]
        finally:
            for run in running:
                run.kill()
    told = [json.loads((tmp_path / str(i) / "node.json").read_text())["results"] for i in (0, 1)]
    first, other = ({(result["part"], result["name"]): result["state"] for result in results} for results in told)
    alone = {(part, part): "skipped" for part in gpu_node.PARTS if part not in gpu_node.OVER_MACHINES}
    passed = {("bandwidth", "1 MiB"), ("widths", "single"), ("widths", "fsdp2"), ("widths", "fsdp2, run twice")}
    expected = alone | dict.fromkeys(passed, "passed") | {("bandwidth", "network"): "skipped"}
    assert {key: state for key, state in first.items() if key[0] != "doctor"} == expected
    assert {key: state for key, state in other.items() if key[0] != "doctor"} == alone


def test_what_the_driver_says_of_the_gpus_is_in_the_file_and_no_name_of_the_machine(tmp_path: Path, monkeypatch):
    described = "count 2\ngpu.*.name NVIDIA H100 80GB HBM3\ngpu.*.memory.total 85520809984\ngpu.*.capability 9 0\n"
    for name, value in variables(tmp_path, described).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    node = node_of(tmp_path)
    told = gpu_node.facts(node)
    assert (node.cards.count, told["cards"], told["gpu"]) == (2, 2, "NVIDIA H100 80GB HBM3")
    assert told["gpus"][1] == {"driver": "580.65.06", "capability": (9, 0), "total_bytes": 85520809984}
    assert os.uname().nodename not in json.dumps(told) or len(os.uname().nodename) < 4
    assert fit.find_gpu(told["gpu"]) is not None and gpu_node.wide_sizes(node) == gpu_node.EIGHT_B


LIGER = """
import sys
print("loading")
if sys.argv[1] == "rope":
    sys.exit("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
print("loss 9.1")
"""


def test_the_kernel_of_liger_that_fails_is_named_with_what_the_sanitizer_says(tmp_path: Path, monkeypatch):
    """Without Triton: stand-ins for the package, the program and the sanitizer."""
    programs = tmp_path / "programs"
    (programs / "liger_kernel").mkdir(parents=True)
    (programs / "liger_kernel" / "__init__.py").touch()
    (programs / "liger.py").write_text(LIGER)
    (programs / "compute-sanitizer").write_text("#!/bin/sh\necho Invalid __global__ read by $3\n")
    (programs / "compute-sanitizer").chmod(0o755)
    monkeypatch.syspath_prepend(str(programs))
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(gpu_node, "HERE", programs)
    node = node_of(tmp_path, "--simulate", "2")
    node.simulated = 0
    results = {result.name: result for result in gpu_node.liger(node)}
    states = {name: result.state for name, result in results.items()}
    assert states == {"none": "passed", "rope": "failed", "rms_norm": "passed", "swiglu": "passed"}
    assert results["none"].said == "loss 9.1" and "illegal memory access" in results["rope"].said
    assert "Invalid __global__ read by rope" in results["rope"].figures["log"]


def test_the_wide_model_has_as_many_weights_as_its_memory_is_reckoned_from():
    sizes = ScratchModel(**gpu_node.EIGHT_B)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(scratch_config(sizes))
    assert gpu_node.num_parameters(gpu_node.EIGHT_B) == sum(parameter.numel() for parameter in model.parameters())


def test_bus_bandwidth_is_that_of_nccl_tests():
    # 1 GB over 8 processes in 10 ms: each link carries 2 x 7/8 GB for all-reduce, 7/8 GB for all-gather.
    assert collectives.bus_bandwidth("all_reduce", 10**9, 0.01, 8) == pytest.approx(175.0)
    assert collectives.bus_bandwidth("all_gather", 10**9, 0.01, 8) == pytest.approx(87.5)
