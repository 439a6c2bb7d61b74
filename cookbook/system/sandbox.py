"""Runs a program that nobody has read, and its tests, in a process with limits and without a network. Linux only.

The child is this file, run by itself for each program: it imports nothing but Python's library, and of that only what
it needs, since imports are most of its time. What it keeps a program from, and what not, is in docs/recipes.md.
"""

import contextlib
import ctypes
import importlib
import json
import os
import re
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 3.0
"""Processor time of a program with its tests."""
WAIT_SECONDS = 6.0
"""Time after which it is ended, whatever it does."""
MEMORY = 512 << 20
FILE_BYTES = 16 << 20
NUM_PROCESSES = 16
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG = 1
NO_NAMESPACE = 97
ALL_NAMES = 'globals().update(vars(__import__("program")))'
"""The first line of the tests, which sees what a program calls by an underscore too."""


class Outcome(NamedTuple):
    passed: bool
    words: str
    """The way it failed; of the program's own words it has at most the name of an exception, of letters."""


def passes(program: str, tests: str) -> Outcome:
    """Run tests, which fail by raising an exception, after a program.

    Raises:
        OSError: this system gives no process a network of its own, without which nothing is run.
    """
    import secrets
    import subprocess
    import tempfile

    nonce = secrets.token_hex()
    given = json.dumps({"program": program, "tests": tests, "nonce": nonce})
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PATH": os.defpath, "HOME": folder, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-I", __file__]
        with subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(given.encode(), timeout=WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                return Outcome(False, f"it took longer than {WAIT_SECONDS:g} seconds")
            finally:  # by the limit of who asks too; with the first process of its namespace all others end
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == NO_NAMESPACE:
        raise OSError("no process gets a network of its own here (unshare), and without that no program is run")
    if nonce.encode() in said:
        return Outcome(True, "")
    if process.returncode == -signal.SIGXCPU:
        return Outcome(False, f"it took longer than {SECONDS:g} seconds")
    # Not the text of an exception, which is the program's: a special token in it would be read as one.
    names = re.fullmatch(rb"([A-Za-z_]{1,40}) (\d{1,6})", said)
    if names is None:
        return Outcome(False, "it ended before its tests did")
    line = f" in line {int(names[2])}" if int(names[2]) else ""
    return Outcome(False, f"{names[1].decode()}{line}")


def _run(given: dict[str, Any], report: int) -> None:
    """Run the program and its tests in this process, and report how they ended."""
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NPROC, NUM_PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS), int(SECONDS) + 1))
    own = Path.cwd() / "program.py"
    sys.path.insert(0, str(own.parent))
    sys.dont_write_bytecode = True
    try:
        own.write_text(given["program"], encoding="utf-8")
        importlib.import_module("program")
        # A file of its own, and not there before: a program that leaves a text open would take its tests into it.
        Path("check.py").write_text(f"{ALL_NAMES}\n{given['tests']}\n", encoding="utf-8")
        importlib.import_module("check")
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno or 0 for frame in frames if frame.filename == str(own)]
        if isinstance(error, SyntaxError) and error.filename == str(own):
            lines = [error.lineno or 0]
        line = lines[-1] if lines else 0
        os.write(report, f"{type(error).__name__} {line}".encode())
        return
    # A program that ends this process before its tests have run does not get here.
    os.write(report, given["nonce"].encode())


def _main() -> int:
    given = json.loads(Path("/dev/stdin").read_text(encoding="utf-8"))
    libc = ctypes.CDLL(None, use_errno=True)
    apart = CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC
    unshare = getattr(libc, "unshare", None)
    if unshare is None or (unshare(CLONE_NEWUSER | apart) and unshare(apart)):
        return NO_NAMESPACE
    report = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    child = os.fork()
    if not child:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _run(given, report)
        os._exit(0)
    os.close(report)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        is_time = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGXCPU if is_time else signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
