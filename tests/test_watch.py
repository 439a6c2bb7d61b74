"""A run that hangs ends in time, and its report names the process at fault.

python -m pytest -q tests/test_watch.py
"""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import ROOT, clean_environment

from cookbook.system import watchdog
from cookbook.system.hang_report import find_unequal
from cookbook.system.watchdog import PHASES, Watch, folder_of, hang_report, put_away_report, remove_other_starts

TIMEOUT_SECONDS = 3.0

DEADLINE_SECONDS = 3 * TIMEOUT_SECONDS

# A training loop over gloo, whose ranks share one import of torch: something happens to one of them in the third step.
RUN = """
import ctypes, json, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from cookbook.system.watchdog import Watch

folder, size, fault, timeout, deadline = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(float, sys.argv[4:])

def run(rank):
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    pair = dist.new_group([0, 1])
    watch = Watch(folder / "out", rank, size, timeout, attempt="a") if timeout else None
    if watch:
        watch.enter("training")
    for step in range(1, 6):
        if watch:
            watch.beat("a micro-batch", step)
        if (fault, rank, step) == ("late", 0, 3):
            for _ in range(20):  # accumulates, while rank 1 hangs
                watch.beat("a micro-batch", step)
                time.sleep(0.1)
        train(rank, step, pair)
        time.sleep(0.1)
    if watch and fault == "alone":
        watch.enter("exporting", is_alone=True)
        end = time.monotonic() + 2 * timeout
        while time.monotonic() < end and rank == 0:
            pass
    if watch:
        watch.close()
    dist.barrier()

def train(rank, step, pair):
    if (fault, rank, step) in (("load", 1, 3), ("group", 0, 3), ("late", 1, 3)):
        time.sleep(3600)
    if fault in ("stop", "lock") and (rank, step) == (1, 3):
        time.sleep(1.5)  # the beat file is written now and then
        os.kill(os.getpid(), signal.SIGSTOP) if fault == "stop" else ctypes.PyDLL(None).sleep(3600)
    if rank < 2:
        dist.all_reduce(torch.ones(1), group=pair)
    dist.all_reduce(torch.ones(1))

ranks = []
for rank in range(size):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        run(rank)
        os._exit(0)
codes, end = {}, time.monotonic() + deadline
while time.monotonic() < end and len(codes) < size:
    for pid in ranks:
        if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
            codes[pid] = os.waitstatus_to_exitcode(ended[1])
    time.sleep(0.05)
for pid in ranks:
    if pid not in codes:
        os.kill(pid, signal.SIGKILL)
(folder / "ended.json").write_text(json.dumps([ranks, [codes.get(pid) for pid in ranks]]))
"""


@pytest.fixture(autouse=True)
def no_guard_is_left() -> Iterator[None]:
    """Its limit is a second or so: it would kill this process in a later test, whose collection of garbage or call into
    C keeps the interpreter's lock for longer.
    """
    yield
    children = [child for child in psutil.Process().children() if "hang_guard" in " ".join(child.cmdline())]
    assert not children, "a watch was not closed"


@dataclass(frozen=True)
class Ended:
    pids: list[int]
    codes: list[int | None]
    """None: not in time."""
    said: str
    report: str


def run(folder: Path, fault: str, *, size: int = 2, timeout: float = TIMEOUT_SECONDS) -> Ended:
    program = folder / "run.py"
    program.write_text(RUN)
    command = [sys.executable, str(program), str(folder), str(size), fault, str(timeout), str(DEADLINE_SECONDS)]
    environment = clean_environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pids, codes = json.loads((folder / "ended.json").read_text())
    report = folder / "out" / "hang" / "report.txt"
    return Ended(pids, codes, done.stderr, report.read_text() if report.exists() else "")


def test_a_rank_that_does_not_come_is_named_with_its_line_and_the_collective(tmp_path):
    ended = run(tmp_path, "load", size=3)
    assert ended.codes == [1, 1, 1]
    assert ended.report in ended.said
    lines = ended.report.splitlines()
    assert lines[0] == "HANG: no progress for 3 s; aborting the run."
    # Two steps went well.
    assert lines[1].startswith(f"rank 1 (process {ended.pids[1]} on ")
    assert " never entered gloo:all_reduce number 3, in which rank 2 waits; " in lines[1]
    assert " nor gloo:all_reduce number 3 of group 1, in which rank 0 waits. " in lines[1]
    assert lines[1].endswith("Last heartbeat: a micro-batch of step 3.")
    assert "in train: time.sleep(3600)" in lines[2]  # where it is
    assert lines[-2].startswith("rank 0 waits at ") and lines[-2].endswith("dist.all_reduce(torch.ones(1), group=pair)")
    assert lines[-1].startswith("rank 2 waits at ") and lines[-1].endswith("dist.all_reduce(torch.ones(1))")
    assert json.loads((tmp_path / "out/hang/rank_1.json").read_text())["silent_seconds"] >= TIMEOUT_SECONDS


@pytest.mark.parametrize("fault", ["stop", "lock"])
def test_a_rank_that_cannot_write_is_named_by_the_others_with_its_last_step(tmp_path, fault):
    ended = run(tmp_path, fault)
    assert ended.codes == [1, -9]  # no launcher here would end a stopped process
    _, accused, why, other = ended.report.splitlines()
    assert accused.startswith(f"rank 1 (process {ended.pids[1]} on ")
    assert accused.endswith(
        "never entered gloo:all_reduce number 3 of group 1, in which rank 0 waits."
        " Last heartbeat: a micro-batch of step 3."
    )
    assert "It wrote nothing: it is stopped or dead, or in C code" in why
    assert other.startswith("rank 0 waits at")


def test_the_fault_is_not_laid_on_a_rank_that_waits_in_another_group(tmp_path):
    # Rank 0 sleeps; rank 1 waits for it in a pair, and so does not come to the collective of all, where rank 2 waits.
    ended = run(tmp_path, "group", size=3)
    assert ended.codes == [1, 1, 1]
    (accused,) = [line for line in ended.report.splitlines() if "never entered" in line]
    assert accused.startswith("rank 0 ")


def test_the_fault_is_not_laid_on_a_rank_that_came_late_to_wait(tmp_path):
    ended = run(tmp_path, "late")
    assert ended.codes == [1, 1]
    (accused,) = [line for line in ended.report.splitlines() if "never entered" in line]
    assert accused.startswith("rank 1 ") and "rank 0 waits" in accused


@pytest.mark.thorough
def test_without_a_watch_nobody_would_end(tmp_path):
    assert run(tmp_path, "stop", timeout=0).codes == [None, None]


def test_a_healthy_run_whose_main_process_works_alone_for_long_is_left_alone(tmp_path):
    ended = run(tmp_path, "alone", timeout=1.5)
    assert ended.codes == [0, 0], ended.said
    assert not ended.report and not folder_of(tmp_path / "out").exists()


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def test_a_run_of_short_steps_is_never_said_to_be_slow_however_long_it_takes(tmp_path, capfd):
    ends: list[int] = []
    watch = Watch(tmp_path / "out", 0, 1, 0.5, end=ends.append)
    watch.enter("training")
    for step in range(60):
        watch.beat("a step", step)
        time.sleep(0.02)
    watch.close()
    assert ends == [] and "took more than" not in capfd.readouterr().err


def test_of_silent_ranks_only_processes_of_this_machine_that_are_still_the_same_are_killed(tmp_path):
    """A process id is given again, and means something else on another machine."""
    watch = Watch(tmp_path / "out", 0, 4, 600.0)
    host, others = watch._identity["host"], [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    beats = {
        rank: {"host": host, "pid": process.pid, "process_started": psutil.Process(process.pid).create_time()}
        for rank, process in enumerate(others, 1)
    }
    beats[1]["host"] = "another"
    beats[2]["process_started"] -= 100.0
    watch._end_silent({}, beats)
    watch.close()
    assert others[2].wait(10) == -signal.SIGKILL
    assert [process.poll() for process in others[:2]] == [None, None]
    for process in others[:2]:
        process.kill()
        process.wait(10)


def test_a_main_thread_that_goes_on_in_the_last_moment_is_let_be(tmp_path, capfd):
    ends: list[int] = []
    watch = Watch(tmp_path / "out", 0, 2, 1.0, end=ends.append)
    watch.enter("training")
    watch._grace_seconds = 10.0
    watch.beat("a slow step", 1)
    file = tmp_path / ".out.hang/rank_0.json"
    wait_for(file.exists)  # past the timeout, it waits for the other rank's
    watch.beat("the next", 2)
    wait_for(lambda: not file.exists())
    watch.close()
    assert ends == []
    assert "rank 0: a slow step of step 1 took more than 1 s" in capfd.readouterr().err
    assert not (tmp_path / ".out.hang").exists()


def test_time_in_which_the_process_was_stopped_is_no_silence(tmp_path, monkeypatch):
    asleep = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + asleep[0], time_ns=time.time_ns, sleep=time.sleep)
    monkeypatch.setattr(watchdog, "time", clock)
    ends: list[int] = []
    watch = Watch(tmp_path / "out", 0, 1, 2.0, end=ends.append)
    watch.enter("training")
    for _ in range(3):
        time.sleep(0.3)  # one poll or more
        asleep[0] += 3600
    assert not ends and watch._thread.is_alive() and not (tmp_path / ".out.hang/rank_0.json").exists()
    watch.close()


def test_a_phase_is_on_disk_when_it_begins(tmp_path):
    watch = Watch(tmp_path / "out", 0, 2, 600.0, attempt="a")
    beat = tmp_path / ".out.hang/a/beat_0.json"
    assert json.loads(beat.read_text())["doing"] == PHASES[0]
    watch.enter("restoring")
    assert json.loads(beat.read_text())["doing"] == "restoring"
    watch.close()


def ended_watch(output_dir: Path, *, attempt: str = "now", **options) -> list[int]:
    """Exit codes of a watch whose main thread sleeps."""
    ends: list[int] = []
    watch = Watch(
        output_dir, 0, 2, 0.5, attempt=attempt, end=lambda code: (ends.append(code), watch._closed.set()), **options
    )
    watch.enter("training")
    watch.beat("a step", 4)
    wait_for(lambda: ends)
    watch.close()
    return ends


def test_files_of_other_starts_are_passed_over(tmp_path):
    before = folder_of(tmp_path / "out") / "before"
    before.mkdir(parents=True)
    (before / "rank_1.json").write_text(json.dumps({"rank": 1}))
    assert ended_watch(tmp_path / "out") == [1]
    report = (tmp_path / "out/hang/report.txt").read_text()
    assert "rank 1" in report and "It never sent a heartbeat." in report
    remove_other_starts(tmp_path / "out", "now")
    assert [path.name for path in folder_of(tmp_path / "out").iterdir()] == ["now"]


def test_a_watch_leaves_no_folder_that_it_made(tmp_path):
    watch = Watch(tmp_path / "outputs/deep/out", 0, 1, 60.0, attempt="now")
    assert (tmp_path / "outputs/deep/.out.hang/now/beat_0.json").exists()
    watch.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_an_earlier_run_gets_no_report(tmp_path):
    said: list[str] = []
    ended_watch(tmp_path / "out", claim=lambda what: said.append(what) or False)
    assert said == ["hang: rank 1 is silent. It never sent a heartbeat"]
    assert not (tmp_path / "out").exists()
    assert "rank 1 is silent" in (tmp_path / ".out.hang/now/report.txt").read_text()


def test_an_earlier_report_is_put_away(tmp_path):
    (tmp_path / "hang").mkdir()
    (tmp_path / "hang/report.txt").write_text("what happened before")
    put_away_report(tmp_path)
    assert (tmp_path / "hang/earlier_report.txt").read_text() == "what happened before"
    put_away_report(tmp_path)
    assert [path.name for path in (tmp_path / "hang").iterdir()] == ["earlier_report.txt"]


def test_a_folder_that_cannot_be_made_does_not_keep_the_watch_from_ending_the_run(tmp_path, capfd):
    (tmp_path / ".out.hang").write_text("no folder")
    (tmp_path / "out").write_text("no folder")
    assert ended_watch(tmp_path / "out") == [1]
    assert "HANG: no progress for 0.5 s" in capfd.readouterr().err


@pytest.mark.parametrize("works", [True, False])
def test_alone_a_process_that_computes_is_not_silent_and_one_that_waits_is(tmp_path, works):
    program = f"""
import sys, time
from pathlib import Path
from cookbook.system.watchdog import Watch
watch = Watch(Path(sys.argv[1]), 0, 1, 1.0)
watch.enter("importing the libraries", is_alone=True)
end = time.monotonic() + 4
while time.monotonic() < end:
    {"pass" if works else "time.sleep(0.01)"}
watch.close()
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], cwd=ROOT, capture_output=True)
    assert done.returncode == (0 if works else 1), done.stderr


LOCKED = """
import os, sys, time
from pathlib import Path
from cookbook.system import lock
from cookbook.system.watchdog import Watch
rank, folder, works = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "True"
watch = Watch(folder / "out", rank, 2, 1.5)
watch.enter("preparing model folder and tokens", is_alone=True)
if rank == 1:
    while not (folder / "has").exists():
        time.sleep(0.01)
with lock.making(folder / "tokens.lock"):
    (folder / "has").touch()
    end = time.monotonic() + 5
    while rank == 0 and time.monotonic() < end:
        time.sleep(0.0 if works else 0.01)
watch.close()
"""


@pytest.mark.parametrize("works", [True, False])
def test_who_waits_for_a_lock_waits_as_long_as_its_holder_gets_on(tmp_path, works):
    command = [sys.executable, "-c", LOCKED]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path), str(works)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == ([0, 0] if works else [1, 1]), said
    if not works:
        lines = (tmp_path / "out/hang/report.txt").read_text().splitlines()
        assert lines[1].startswith(f"rank 0 (process {ranks[0].pid} on ") and "makes no progress" in lines[1]
        assert "rank 1 waits at " in lines[-1] and f"tokens.lock, held by process {ranks[0].pid} on " in lines[-1]


def test_beats_cost_next_to_nothing_and_close_ends_the_thread(tmp_path):
    watch = Watch(tmp_path / "out", 0, 1, 60.0)
    begun = time.perf_counter()
    for step in range(100_000):
        watch.beat("a step", step)
    assert (time.perf_counter() - begun) / 100_000 < 20e-6
    watch.close()
    assert "cookbook-watch" not in [thread.name for thread in threading.enumerate()]


def rank_record(rank: int, number: int, at: str = "a.py:1") -> dict:
    world = {"number": number, "op": "nccl:all_reduce", "entered_ns": 10 + number, "ranks": [0, 1, 2, 3]}
    return {
        "rank": rank,
        "pid": 100 + rank,
        "host": "n1",
        "doing": "a step",
        "step": 5,
        "phase": PHASES.index("training"),
        "phase_began_ns": 0,
        "collectives": {"0 nccl": world},
        "waits_for": None,
        "waits_at": at,
        "stacks": {},
    }


def test_when_all_are_in_the_same_collective_nobody_is_accused():
    text = hang_report({rank: rank_record(rank, 7) for rank in range(4)}, {}, num_ranks=4, timeout_seconds=9)
    assert "No rank stands out" in text and "ranks 0, 1, 2, 3 wait at a.py:1" in text
    assert "never entered" not in text


def test_a_machine_of_which_no_process_gives_a_sign_is_named():
    on = {rank: rank_record(rank, 7) | {"host": f"n{1 + rank // 2}"} for rank in range(4)}
    dead = hang_report({0: on[0], 1: on[1]}, on, num_ranks=4, timeout_seconds=9).splitlines()
    assert dead[1] == "machine n2 is silent, with all its processes: ranks 2, 3."
    half = hang_report({rank: on[rank] for rank in range(3)}, on, num_ranks=4, timeout_seconds=9)
    assert "machine" not in half and "rank 3 (process 103 on n2) never entered" in half
    cut = hang_report(on, on, num_ranks=4, timeout_seconds=9)
    assert "machine" not in cut and "the network between n1 (ranks 0, 1) and n2 (ranks 2, 3) failed" in cut


def test_several_late_ranks_are_all_named_and_a_dead_one_too():
    stuck = {0: rank_record(0, 7), 1: rank_record(1, 6, "b.py:2"), 2: rank_record(2, 7)}
    text = hang_report(stuck, {}, num_ranks=4, timeout_seconds=9)
    accused = [line.split()[1] for line in text.splitlines() if "never entered" in line]
    assert accused == ["1", "3"]
    assert "rank 3 never entered nccl:all_reduce number 7, in which ranks 0, 2 wait. It never sent a heartbeat." in text


def test_a_rank_missing_from_gloo_is_named_though_it_has_entered_more_over_nccl():
    """fsdp2_offload: one group, two backends. Two GPUs have done 40 collectives over NCCL, and one of the processes
    never came to the third over gloo.
    """
    stuck = {rank: rank_record(rank, 40, f"{rank}.py:1") for rank in range(2)}
    for rank, number in ((0, 3), (1, 2)):
        host = {"number": number, "op": "gloo:all_reduce", "entered_ns": 100 + number, "ranks": [0, 1]}
        stuck[rank]["collectives"]["0 gloo"] = host
    text = hang_report(stuck, {}, num_ranks=2, timeout_seconds=9)
    assert "rank 1 (process 101 on n1) never entered gloo:all_reduce number 3, in which rank 0 waits." in text


def test_a_silent_rank_is_missing_from_what_others_wait_in_and_from_nothing_else():
    """Rank 0 has finished a collective of its pair, and waits with the others in one of all."""
    stuck = {rank: rank_record(rank, 7) for rank in range(3)}
    stuck[0]["collectives"]["1 nccl"] = {"number": 4, "op": "nccl:broadcast", "entered_ns": 5, "ranks": [0, 3]}
    unequal = find_unequal(stuck, 4)
    assert [(group.group, group.number, group.inside, group.missing) for group in unequal] == [("0", 7, [0, 1, 2], [3])]
    stuck[0]["collectives"]["1 nccl"]["entered_ns"] = 100  # now it waits there
    assert [(group.group, group.missing) for group in find_unequal(stuck, 4)] == [("0", [3]), ("1", [3])]


def test_without_a_collective_the_one_that_is_behind_is_named():
    stuck = {rank: rank_record(rank, 7, f"{rank}.py:1") for rank in range(4)}
    stuck[2]["phase"], stuck[2]["doing"] = PHASES.index("restoring"), "restoring"
    text = hang_report(stuck, {}, num_ranks=4, timeout_seconds=9)
    assert "rank 2 (process 102 on n1) makes no progress. Last heartbeat: restoring" in text
    stuck[2] |= {"phase": PHASES.index("training"), "doing": "training"}  # and the others at a step of it
    assert "rank 2 (process 102 on n1) makes no progress" in hang_report(stuck, {}, num_ranks=4, timeout_seconds=9)


def test_a_collective_of_an_earlier_phase_accuses_nobody():
    stuck = {0: rank_record(0, 7) | {"phase": PHASES.index("leaving"), "phase_began_ns": 100}}
    text = hang_report(stuck, {1: rank_record(1, 0)}, num_ranks=2, timeout_seconds=9)
    assert "rank 1 (process 101 on n1) is silent." in text and "never entered" not in text


TWO_BACKENDS = """
import json, sys, torch, torch.distributed as dist
from cookbook.system.watchdog import entered_collectives

dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
recorded = [("nccl:all_reduce", 40), ("gloo:all_reduce", 3), ("nccl:broadcast", 41)]
entries = [
    {"process_group": ["0", "default_pg"], "collective_seq_id": number, "profiling_name": op, "time_created_ns": i}
    for i, (op, number) in enumerate(recorded)
]
torch._C._distributed_c10d._dump_fr_trace_json = lambda: json.dumps({"entries": entries})
print(json.dumps(entered_collectives()))
"""


def test_each_backend_of_a_group_counts_for_itself():
    """In the form in which torch's flight recorder writes them; NCCL itself needs GPUs."""
    done = subprocess.run([sys.executable, "-c", TWO_BACKENDS], cwd=ROOT, capture_output=True, text=True, check=True)
    states = json.loads(done.stdout)
    assert {name: (state["number"], state["op"]) for name, state in states.items()} == {
        "0 nccl": (41, "nccl:broadcast"),
        "0 gloo": (3, "gloo:all_reduce"),
    }


IN_C = """
import ctypes, sys
from cookbook.system.hang_guard import HangGuard
how = sys.argv[1]
guard = HangGuard(1.0, "rank 3")
guard.enter(is_alone=how == "alone")
library = ctypes.CDLL(None) if how in ("released", "stopped") else ctypes.PyDLL(None)
print("in C", flush=True)
library.read(0, ctypes.create_string_buffer(1), 1)
guard.close()
print("back", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the guard reads /proc")
def test_a_process_whose_main_thread_keeps_the_interpreter_in_c_is_ended_with_its_stacks():
    pipe = subprocess.PIPE
    runs = {}
    for how in ("held", "alone", "released", "stopped"):
        runs[how] = subprocess.Popen(
            [sys.executable, "-c", IN_C, how], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        assert runs[how].stdout.readline() == "in C\n"
    held, stopped = runs.pop("held"), runs["stopped"]
    stopped.send_signal(signal.SIGSTOP)
    assert held.wait(30) == -signal.SIGKILL
    time.sleep(2)
    stopped.send_signal(signal.SIGCONT)
    said = held.stderr.read()
    assert f"HANG: rank 3 (process {held.pid}) has run no Python for 1 s" in said
    assert 'File "<string>", line 9 in <module>' in said, "where it is"
    for how, run in runs.items():
        assert run.communicate("now\n", timeout=60) == ("back\n", ""), how
        assert run.returncode == 0, how
