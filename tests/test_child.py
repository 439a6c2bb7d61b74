"""`launch` passes signals on to the training processes and shows by its exit code how the run ended.

python -m pytest -q tests/test_child.py
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, clean_environment

from cookbook.system import status
from cookbook.system.child import ACCELERATE_CLI

# What `accelerate launch` does with one process: it waits, forwards nothing, and ends with 1 for whatever came.
LAUNCHER = """
import subprocess, sys, time
if sys.argv[-1] == "looks for GPUs":
    looks = subprocess.Popen(["sleep", "10"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print("launcher", flush=True)
    looks.wait()
code = subprocess.run([sys.executable, *sys.argv[1:]]).returncode
if sys.argv[-1] == "finishes":
    print("launcher", flush=True)
    time.sleep(0.5)
sys.exit(1 if code else 0)
"""

# A run as train.py goes through it.
WORKER = """
import os, signal, sys, time
from pathlib import Path
from cookbook.system import signals, status
folder, how = Path(sys.argv[1]), sys.argv[2]
if how == "starts":
    print("worker", os.getpid(), flush=True)
    time.sleep(60)
signals.install()
if how == "mistake":
    sys.exit(status.note_exit(2))
if how == "prepares":
    print("worker", os.getpid(), flush=True)
    time.sleep(60)
run = status.Status(folder, is_main=True)
if how == "crashes":
    run.end("failed", exit_code=1)
    sys.exit(1)
if how == "finishes":
    run.end("finished", exit_code=0)
    sys.exit(0)
if how == "leaves":  # as ranks do that are not the main one
    run.end("finished", exit_code=0)
    print("worker", os.getpid(), flush=True)
    for number in signals.HANDLED:
        signal.signal(number, signal.SIG_DFL)
    time.sleep(60)
if how == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
signals.defer()
print("worker", os.getpid(), flush=True)
while not signals.requested_stop() or how == "hangs":
    time.sleep(0.02)
time.sleep(1)  # saves
run.end("stopped", exit_code=75, reason=signals.requested_stop())
sys.exit(status.note_exit(75))
"""

PARENT = """
import os, sys
from pathlib import Path
from cookbook.system.child import run_child, was_signalled
code = run_child([sys.executable, *sys.argv[1:]], dict(os.environ), Path(sys.argv[3]))
print("signalled", was_signalled())
sys.exit(code)
"""


@pytest.fixture
def launch(tmp_path, request):
    """Starts parent, launcher and worker; the worker goes through the given life."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "out").mkdir()

    def start(how: str) -> subprocess.Popen[str]:
        words = [str(tmp_path / "launcher.py"), str(tmp_path / "worker.py"), str(tmp_path / "out"), how]
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *words],
            env=clean_environment(PYTHONPATH=str(ROOT), WORLD_SIZE="1"),  # as a launcher gives it to its workers
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        request.addfinalizer(lambda: (parent.kill(), parent.communicate()))
        return parent

    return start


def worker_of(parent: subprocess.Popen[str]) -> psutil.Process:
    return psutil.Process(int(parent.stdout.readline().split()[1]))


def state(tmp_path: Path) -> str:
    return json.loads((tmp_path / "out" / "status.json").read_text())["state"]


@pytest.mark.parametrize(
    ("how", "code"), [("finishes", 0), ("mistake", 2), ("crashes", 1), ("is killed", 1)], ids=lambda value: str(value)
)
def test_the_exit_code_tells_how_the_run_ended(launch, how, code):
    parent = launch(how)
    printed, _ = parent.communicate(timeout=20)
    assert parent.returncode == code and printed.endswith("signalled False\n")


@pytest.mark.parametrize("how", ["leaves", "finishes"], ids=["a process", "the launcher"])
def test_a_signal_while_a_finished_run_leaves_is_told_and_does_not_make_it_a_failure(launch, tmp_path, how):
    parent = launch(how)
    parent.stdout.readline()
    parent.terminate()
    printed, _ = parent.communicate(timeout=20)
    assert (parent.returncode, state(tmp_path), printed) == (0, "finished", "signalled True\n")


@pytest.mark.parametrize("has_explained", [True, False], ids=["after a message of its own", "after a crash"])
def test_accelerate_prints_its_traceback_only_where_the_run_has_not_said_why_it_ended(tmp_path, has_explained):
    package = tmp_path / "accelerate" / "commands"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "accelerate_cli.py").write_text("def main():\n    raise ValueError('exit status 2')\n")
    note = tmp_path / "note"
    if has_explained:
        note.write_text("2")
    answer = subprocess.run(
        [sys.executable, "-P", str(ACCELERATE_CLI)],
        env=clean_environment(PYTHONPATH=str(tmp_path), **{status.EXIT_FILE: str(note)}),
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 1 and ("Traceback" in answer.stderr) is not has_explained


def test_a_signal_to_every_process_as_slurm_sends_it_leaves_the_launcher_alive(launch, tmp_path):
    """torchrun holds the store through which its workers meet."""
    parent = launch("trains")
    worker = worker_of(parent)
    launcher = worker.parent()
    for process in (launcher, worker, parent):
        process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)  # the worker saves for a second
    assert launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE
    parent.communicate(timeout=20)
    assert (parent.returncode, state(tmp_path)) == (75, "stopped")


def test_a_worker_that_has_no_handlers_yet_ends_at_sigusr1(launch):
    parent = launch("starts")
    worker_of(parent)
    parent.send_signal(signal.SIGUSR1)
    parent.communicate(timeout=20)
    assert parent.returncode == 75


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_reaches_the_run_which_saves_and_ends_with_75(launch, tmp_path, number):
    parent = launch("trains")
    worker_of(parent)
    parent.send_signal(number)
    time.sleep(0.3)
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=20)
    assert (parent.returncode, state(tmp_path)) == (75, "stopped")
    notice = f"{number.name}: the run will save and stop after this step, or the next; Ctrl-\\ ends it now"
    assert errors.splitlines() == [notice]


def test_a_signal_while_accelerate_runs_another_program_ends_the_launcher(launch):
    parent = launch("looks for GPUs")
    assert parent.stdout.readline() == "launcher\n"
    parent.send_signal(signal.SIGTERM)
    parent.communicate(timeout=8)
    assert parent.returncode == 75


def test_ctrl_c_to_the_whole_group_is_handled_once_and_without_a_traceback(launch, tmp_path):
    parent = launch("trains")
    worker_of(parent)
    os.killpg(parent.pid, signal.SIGINT)
    _, errors = parent.communicate(timeout=20)
    assert (parent.returncode, state(tmp_path)) == (75, "stopped")
    assert len(errors.splitlines()) == 1


def test_without_the_parent_the_launcher_would_leave_its_run_behind(tmp_path):
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "worker.py").write_text("import os, time; print('worker', os.getpid(), flush=True); time.sleep(60)")
    launcher = subprocess.Popen(
        [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path / "worker.py")], stdout=subprocess.PIPE, text=True
    )
    worker = worker_of(launcher)
    launcher.terminate()
    launcher.wait(timeout=10)
    assert worker.is_running()
    worker.kill()
    launcher.stdout.close()


def test_a_signal_before_training_means_start_again(launch, tmp_path):
    parent = launch("prepares")
    worker_of(parent)
    parent.terminate()
    parent.communicate(timeout=20)
    assert parent.returncode == 75
    assert not (tmp_path / "out" / "status.json").exists()


def test_a_stop_of_an_earlier_start_is_not_taken_for_this_one(launch, tmp_path):
    (tmp_path / "out" / "status.json").write_text('{"state": "stopped"}')
    parent = launch("mistake")
    parent.communicate(timeout=20)
    assert parent.returncode == 2


def test_the_parent_waits_for_a_run_whose_launcher_was_killed(launch, tmp_path):
    parent = launch("trains")
    worker = worker_of(parent)
    time.sleep(6)  # until it has looked who the workers are
    worker.parent().kill()
    parent.communicate(timeout=20)
    assert (parent.returncode, state(tmp_path)) == (75, "stopped")
    assert not worker.is_running()


def test_the_run_saves_and_stops_when_the_parent_is_killed(launch, tmp_path):
    parent = launch("trains")
    worker = worker_of(parent)
    parent.kill()
    gone, _ = psutil.wait_procs([worker], timeout=10)
    assert gone
    assert state(tmp_path) == "stopped"


def test_sigquit_ends_a_run_that_hangs(launch):
    parent = launch("hangs")
    worker = worker_of(parent)
    parent.terminate()
    time.sleep(0.3)
    assert parent.poll() is None
    parent.send_signal(signal.SIGQUIT)
    parent.communicate(timeout=20)
    gone, _ = psutil.wait_procs([worker], timeout=5)
    assert gone
