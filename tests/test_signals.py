"""A signal ends a run at once while there is nothing to lose, and at a step's end afterwards; no process is left over.

python -m pytest -q tests/test_signals.py
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, clean_environment

from cookbook.system import signals
from cookbook.system.files import RecipeError

RUN = """
import sys, time
from pathlib import Path
from cookbook.system import signals

phase, folder = sys.argv[1], Path(sys.argv[2])
if phase != "without handlers":
    signals.install()
if phase == "swallowed":
    try:
        print("ready", flush=True)
        time.sleep(60)
    except BaseException:
        print("swallowed", flush=True)
    signals.defer()
    print("trains on")
elif phase in ("preparing", "without handlers"):
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("ending", flush=True)
        time.sleep(0.5)
        (folder / "released").touch()
else:
    signals.defer()
    if phase == "training, plain streams":
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    print("ready", flush=True)
    asks = signals.requested_stop if phase.startswith("training") else lambda: signals._received
    for step in range(1000):
        time.sleep(0.02)
        (folder / "steps").write_text(str(step))
        if reason := asks():
            print(f"stops for {reason}", flush=True)
            time.sleep(0.5)
            print("saved", flush=True)
            (folder / "saved").touch()
            sys.exit(signals.EXIT_CODE)
"""

# As train.py makes its tokens: workers under a program that has handlers. A slice takes a while, as tokenizing does.
TOKENIZE = """
import atexit, concurrent.futures, multiprocessing.connection, os, signal, sys, threading, time
from multiprocessing import queues, resource_tracker
from cookbook.system import signals
if __name__ == "__main__":
    signals.install()
from cookbook.training.data import tokens

class Work:
    def __getitem__(self, number):
        time.sleep(0.05)
        if number == 5 and sys.argv[2:] == ["killed"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 5 and sys.argv[2:] == ["killed in a result"]:
            multiprocessing.connection.Connection._send = send_half
        return number, "x" * 10_000  # a pipe holds six of these

def send_half(connection, data, *_):
    os.write(connection.fileno(), data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)

def feed(*arguments):
    feed_thread(*arguments)
    time.sleep(0.005)  # it frees the queue's semaphores after the main thread let go of them

def unregister(*arguments):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(1)  # past the end of the process
    unregister_semaphore(*arguments)

if sys.argv[2:] == ["slow threads"]:
    feed_thread, queues.Queue._feed = queues.Queue._feed, staticmethod(feed)
    unregister_semaphore, resource_tracker.unregister = resource_tracker.unregister, unregister
    atexit.register(time.sleep, 0.3)

if __name__ == "__main__":
    if sys.argv[1] == "an executor":
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
            for task in pool.map(Work().__getitem__, range(60)):
                print(task[0], flush=True)
    else:
        for task in tokens._in_processes(Work(), iter(range(60)), 2):
            print(task[0], flush=True)
"""


def start(tmp_path: Path, program: str, *arguments: str, **options) -> subprocess.Popen[str]:
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(tmp_path / "program.py"), *arguments]
    environment = clean_environment(PYTHONPATH=str(ROOT), WORLD_SIZE="1")  # as a launcher does
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes, **options)


def started(tmp_path: Path, phase: str) -> subprocess.Popen[str]:
    run = start(tmp_path, RUN, phase, str(tmp_path))
    assert run.stdout.readline() == "ready\n"
    return run


SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_before_training_a_signal_ends_the_run_at_once_and_a_second_one_does_not_disturb_that(tmp_path, number):
    run = started(tmp_path, "preparing")
    run.send_signal(number)
    assert run.stdout.readline() == "ending\n"
    for again in SIGNALS:
        run.send_signal(again)
    _, errors = run.communicate(timeout=10)
    assert (run.returncode, errors) == (75, "")
    assert (tmp_path / "released").exists()


def test_without_handlers_nothing_would_be_released(tmp_path):
    run = started(tmp_path, "without handlers")
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=10)
    assert run.returncode == -signal.SIGTERM
    assert not (tmp_path / "released").exists()


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_in_training_a_signal_waits_for_the_step_and_more_of_them_for_the_save(tmp_path, number):
    run = started(tmp_path, "training")
    run.send_signal(number)
    assert run.stdout.readline() == f"stops for {number.name}\n"
    for again in SIGNALS * 3:
        run.send_signal(again)
    printed, errors = run.communicate(timeout=10)
    assert (run.returncode, printed, errors) == (75, "saved\n", "")


def stop_without_reader(tmp_path: Path, phase: str) -> int:
    run = started(tmp_path, phase)
    run.stdout.close()
    run.send_signal(signal.SIGTERM)
    run.stderr.close()
    return run.wait(timeout=10)


def test_a_run_saves_also_when_the_reader_of_its_output_is_gone(tmp_path):
    stop_without_reader(tmp_path, "training")
    assert (tmp_path / "saved").exists()


def test_a_print_to_nobody_would_end_it(tmp_path):
    stop_without_reader(tmp_path, "training, plain streams")
    assert not (tmp_path / "saved").exists()


def test_a_signal_whose_exit_was_swallowed_ends_the_run_when_training_would_begin(tmp_path):
    run = started(tmp_path, "swallowed")
    run.send_signal(signal.SIGTERM)
    printed, _ = run.communicate(timeout=10)
    assert (run.returncode, printed) == (75, "swallowed\n")


DROPPED = """
import atexit, os, signal, sys, time, weakref
from cookbook.system import signals

def receive(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.001)

class Thing:
    pass

signals.install()
if sys.argv[2:]:
    sys.unraisablehook = sys.__unraisablehook__
if sys.argv[1] == "as it is deleted":
    Thing.__del__ = receive
thing = Thing()
if sys.argv[1] == "in a callback":
    watched = weakref.ref(thing, receive)
if sys.argv[1] == "at the end":
    atexit.register(receive)
    sys.exit(2)
try:
    del thing
    time.sleep(0.5)
    print("goes on")
finally:
    print("released")
"""


@pytest.mark.parametrize("when", ["in a callback", "as it is deleted", "at the end"])
def test_a_signal_ends_the_run_without_a_traceback_where_python_would_go_on(tmp_path, when):
    """As in the import of a library, which has callbacks: an exception in one is printed, and dropped."""
    run = start(tmp_path, DROPPED, when)
    assert run.communicate(timeout=10) == ("" if when == "at the end" else "released\n", "")
    assert run.returncode == (2 if when == "at the end" else 75)
    run = start(tmp_path, DROPPED, when, "as python does")
    printed, errors = run.communicate(timeout=10)
    assert "Traceback" in errors and run.returncode != 75 and ("goes on" in printed) == (when != "at the end")


def orphan(tmp_path: Path, phase: str) -> psutil.Process:
    """A run in training whose launcher was killed."""
    (tmp_path / "run.py").write_text(RUN)
    launcher = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    parent = start(tmp_path, launcher, str(tmp_path / "run.py"), phase, str(tmp_path))
    assert parent.stdout.readline() == "ready\n"
    (run,) = psutil.Process(parent.pid).children()
    while not (tmp_path / "steps").exists():
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    parent.stderr.close()
    return run


def test_a_run_whose_launcher_was_killed_stops(tmp_path):
    run = orphan(tmp_path, "training")
    gone, _ = psutil.wait_procs([run], timeout=5)
    assert gone


def test_a_run_that_does_not_look_for_its_launcher_lives_on(tmp_path):
    run = orphan(tmp_path, "asking for signals only")
    gone, _ = psutil.wait_procs([run], timeout=5)
    run.kill()
    assert not gone


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_to_the_whole_group_ends_a_run_that_tokenizes_without_noise(tmp_path, number):
    run = start(tmp_path, TOKENIZE, "ours", "slow threads")
    assert run.stdout.readline() == "0\n"
    workers = psutil.Process(run.pid).children()
    os.killpg(run.pid, number)
    _, errors = run.communicate(timeout=10)
    assert (run.returncode, errors) == (75, "")
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive


@pytest.mark.parametrize("when", ["killed", "killed in a result"])
def test_a_run_that_loses_a_tokenizing_process_says_so(tmp_path, when):
    run = start(tmp_path, TOKENIZE, "ours", when)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "a tokenizing process was killed" in errors


def test_an_executor_of_the_standard_library_would_wait_for_the_rest_of_its_result_without_end(tmp_path):
    run = start(tmp_path, TOKENIZE, "an executor", "killed in a result")
    assert run.stdout.readline() == "0\n"
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(timeout=5)  # sixty tasks take two seconds
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()


def test_workers_go_with_a_run_that_is_killed(tmp_path):
    run = start(tmp_path, TOKENIZE, "ours")
    assert run.stdout.readline() == "0\n"
    workers = psutil.Process(run.pid).children()
    run.kill()
    run.communicate(timeout=10)
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive


@pytest.mark.parametrize("code", [0, None, 1, "no rows"])
def test_an_exit_in_the_code_of_others_is_a_mistake_with_its_line(code: object):
    with pytest.raises(RecipeError, match=rf"test_signals\.py:\d+: calls sys\.exit\({code!r}\)"), signals.no_exit():
        sys.exit(code)  # type: ignore[arg-type]


@pytest.mark.parametrize("end", [signals.SignalExit(75), SystemExit(75)])
def test_a_signal_still_ends_the_process(end: SystemExit):
    with pytest.raises(SystemExit) as raised, signals.no_exit():
        raise end
    assert raised.value is end
