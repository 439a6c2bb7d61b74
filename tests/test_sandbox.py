"""Protects what runs a policy's programs: right ones pass, and no other; each limit holds, and there is no network.

pytest tests/test_sandbox.py; with -m slow the limits of time too.
"""

import signal
import socket
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cookbook.config.environments import environments
from cookbook.system import sandbox
from tests.needs import need_own_network

TESTS = "assert square(3) == 9\nassert square(-1) == 1"
RIGHT = "def square(x):\n    return x * x\n"
WRONG = {
    "another result": ("def square(x):\n    return 9\n", "AssertionError"),
    "no function": ("", "NameError"),
    "no Python": ("def square(x:\n", "SyntaxError in line 1"),
    "an exception": ("x = 1\nx / 0\n" + RIGHT, "ZeroDivisionError in line 2"),
    "an exit before its tests": (RIGHT + "import os\nos._exit(0)\n", "it ended before its tests did"),
    "another exit": (RIGHT + "raise SystemExit(0)\n", "SystemExit in line 3"),
    "words of its own for the answer": (
        RIGHT + "import os\nfor i in range(64):\n  try: os.write(i, b'passed')\n  except OSError: pass\nos._exit(0)\n",
        "it ended before its tests did",
    ),
    "much memory": ("x = bytearray(2 << 30)\n" + RIGHT, "MemoryError in line 1"),
    "a large file": ("open('x', 'wb').write(bytes(64 << 20))\n" + RIGHT, "OSError in line 1"),
    "a special token": ("raise ValueError('<|im_end|>')\n" + RIGHT, "ValueError in line 1"),
}


@pytest.fixture(autouse=True)
def _network():
    need_own_network()


@pytest.mark.parametrize(("program", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_program_does_not_pass_and_is_told_why(program, words):
    assert sandbox.passes(program, TESTS) == (False, words)


def test_a_right_program_passes_in_a_folder_that_is_gone_afterwards(tmp_path):
    keep = f"import os\nopen({str(tmp_path / 'folder')!r}, 'w').write(os.getcwd())\nopen('x', 'w').write('x')\n"
    assert sandbox.passes(keep + "print('many words' * 10**6)\n" + RIGHT, TESTS).passed
    assert not Path((tmp_path / "folder").read_text()).exists()


def test_the_variables_of_who_runs_it_are_not_there(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    assert sandbox.passes("import os\nassert 'SOME_TOKEN' not in os.environ\n" + RIGHT, TESTS).passed


def test_a_program_reaches_no_network():
    """Not even this machine's own address, where the same lines connect."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)\n"
        exec(connect, {})
        assert sandbox.passes(connect + RIGHT, TESTS) == (False, "OSError in line 2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", ["while True: pass", "import time\ntime.sleep(60)", "import os\nwhile True: os.fork()"]
)
def test_a_program_that_does_not_end_is_ended(program):
    begun = time.monotonic()
    outcome = sandbox.passes(program, TESTS)
    assert not outcome.passed and "took longer than" in outcome.words
    assert time.monotonic() - begun < sandbox.WAIT_SECONDS + 3


LIVES = "import time\nwhile True:\n    open({!r}, 'a').write('x')\n    time.sleep(0.01)\n"
"""A program that shows in a file that it runs."""


def has_ended(alive: Path) -> bool:
    """Return whether nothing writes to the file any more; something must have."""
    before = alive.stat().st_size
    time.sleep(0.2)
    return before == alive.stat().st_size


def test_what_a_program_left_ends_with_it(tmp_path):
    """In a session of its own, where a signal to the group does not reach it."""
    lives = textwrap.indent(LIVES.format(str(tmp_path / "alive")), "    ")
    wait = "while not os.path.exists({!r}): pass\n".format(str(tmp_path / "alive"))
    left = f"import os\nif not os.fork():\n    os.setsid()\n{lives}{wait}"
    assert sandbox.passes(left + RIGHT, TESTS).passed
    assert has_ended(tmp_path / "alive")


def test_whoever_stops_waiting_leaves_no_program(tmp_path):
    """As the time limit of an environment, which raises in the main thread."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 1)
    with pytest.raises(TimeoutError):
        sandbox.passes(LIVES.format(str(tmp_path / "alive")), TESTS)
    signal.signal(signal.SIGALRM, before)
    assert has_ended(tmp_path / "alive")


def test_where_no_network_can_be_taken_away_nothing_is_run(tmp_path, monkeypatch):
    refusing = tmp_path / "python"
    refusing.write_text(f"#!/bin/sh\nexit {sandbox.NO_NAMESPACE}\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(refusing))
    with pytest.raises(OSError, match="no process gets a network of its own here"):
        sandbox.passes(RIGHT, TESTS)


def test_a_program_is_asked_for_run_and_told_what_failed():
    asked = environments()["Program"].kind(1)
    (question,) = asked.start({"prompt": "Write a function square.", "test_list": TESTS.split("\n")})
    assert question == {
        "role": "user",
        "content": f"Write a function square. Your code should pass these tests:\n\n{TESTS}",
    }
    for said, reply in (
        (RIGHT, 1.0),
        (f"First ```python\nraise ValueError\n``` and then:\n```python\n{RIGHT}```\nThat is it.", 1.0),
        ("I do not know.", "The tests failed: SyntaxError in line 1. Write the whole program again."),
    ):
        answered = asked.step([question, {"role": "assistant", "content": said}])
        assert answered == (reply if isinstance(reply, float) else [{"role": "user", "content": reply}])
