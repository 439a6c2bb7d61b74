"""Protects who runs commands under a scheduler: SIGTERM ends each with 75, and what it had begun is put away.

python -m pytest -q tests/test_command_signals.py
"""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from cookbook.commands import evaluate, tune
from cookbook.commands.cli import GROUPS, main
from cookbook.commands.rehearse import rehearsal
from cookbook.commands.rounds import loop
from cookbook.start.run_plan import load_pair
from cookbook.system import child, signals, status
from tests.test_outside_words import ROUNDS


@pytest.fixture(autouse=True)
def as_before():
    """This process goes on, which a command that a signal ends does not."""
    earlier = {number: signal.getsignal(number) for number in signals.OF_SCHEDULERS}
    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook
    for number, handler in earlier.items():
        signal.signal(number, handler)
    signals._received, signals._is_ending = None, False


def be_ended(*_: object, number: int = signal.SIGTERM, **__: object) -> None:
    """A part of a command in which a signal comes."""
    os.kill(os.getpid(), number)
    time.sleep(30)
    raise AssertionError("the signal ended nothing")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("module", "part", "words"),
    [
        (evaluate, "find_model", ["evaluate", "run", "rows.jsonl"]),
        (tune, "load_single", ["tune", "r.yaml"]),
        (rehearsal, "load_pair", ["rehearse", "r.yaml"]),
        (loop, "check", ["rounds", "r.yaml"]),
    ],
)
def test_a_schedulers_signal_ends_a_command_with_75(module, part, words, number, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text("strategy: single\n")
    Path("run").mkdir()
    monkeypatch.setattr(module, part, lambda *_, **__: be_ended(number=number))
    assert main(words) == signals.EXIT_CODE
    assert f"{signal.Signals(number).name}: ended" in capsys.readouterr().err


def test_a_command_that_ends_by_itself_leaves_the_handlers_as_they_were(capsys):
    assert main(["--version"]) == 0
    assert all(signal.getsignal(number) is signal.SIG_DFL for number in signals.OF_SCHEDULERS)
    assert len([function for functions in GROUPS.values() for function in functions]) > 15


@pytest.mark.parametrize("end", [be_ended, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)])
def test_rounds_that_are_ended_while_they_sample_have_stopped(end, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a"}\n')
    Path("r.yaml").write_text(yaml.safe_dump(ROUNDS))
    recipe, _ = load_pair(Path("r.yaml"), [])
    monkeypatch.setattr(loop, "check", lambda *_: (recipe, [SimpleNamespace(asked="a")]))
    monkeypatch.setattr(loop, "_first_model", lambda *_: ("model", []))
    monkeypatch.setattr(loop, "_begin", lambda folder, *_, **__: folder.mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(loop, "_digests", lambda *_: {})
    monkeypatch.setattr(loop.prompt_rows, "digest", lambda *_: "")
    monkeypatch.setattr(loop, "Sampling", lambda **_: SimpleNamespace(recipe=recipe))
    monkeypatch.setattr(loop, "write_samples", end)
    if end is be_ended:
        assert main(["rounds", "r.yaml"]) == 75
    else:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            loop.rounds(Path("r.yaml"), assignments=[])
    record = status.read(Path(recipe.run.output_dir))
    assert record is not None and (record["state"], record["exit_code"]) == ("stopped", 75)
    assert record["reason"] == "while round 1 was sampled"


@pytest.mark.parametrize(
    ("reason", "sent", "is_ended"),
    [
        ("run.stop_after_steps", None, False),
        ("run.stop_after_steps", "SIGTERM", True),
        ("SIGTERM", None, True),
        (None, None, True),
    ],
)
def test_tune_tries_nothing_more_after_a_signal(reason, sent, is_ended, monkeypatch, tmp_path):
    """A run that stops after its steps ends with 75, too."""
    monkeypatch.setattr("cookbook.system.child._signal", sent)

    def stop(command: list[str], environment: dict[str, str], folder: Path) -> int:
        folder.mkdir()
        if reason is not None:
            status.Status(folder, is_main=True).end("stopped", exit_code=75, reason=reason)
        return 75

    monkeypatch.setattr(tune, "run_command", stop)
    monkeypatch.setattr(tune, "load_pair", lambda *_: None)
    recipe = SimpleNamespace(run=SimpleNamespace(output_dir=str(tmp_path / "out")))
    strategy = SimpleNamespace(path="single", name="single", num_processes=None)
    settings = SimpleNamespace(strategy=strategy, keys={})
    monkeypatch.setattr(tune, "default_num_processes", lambda *_: 1)
    monkeypatch.setattr(tune, "launch_command", lambda *_, **__: [])
    if is_ended:
        with pytest.raises(signals.SignalExit):
            tune.measure(Path("r.yaml"), settings, recipe, [], 2)
    else:
        assert tune.measure(Path("r.yaml"), settings, recipe, [], 2) is None
    assert not list(tmp_path.glob("tune-*"))


KILLED = """
import sys
from pathlib import Path
from cookbook.system import status
run = status.Status(Path(sys.argv[1]), is_main=True)
if sys.argv[2] == "failed":
    run.end("failed", exit_code=1, reason="gloo: Connection reset by peer")
status.note_killed({0: 1, 1: -9, 2: -15, 3: -11})
sys.exit(1)
"""


@pytest.mark.parametrize("state", ["running", "failed"])
def test_a_killed_rank_is_named_in_the_status(state, tmp_path, monkeypatch):
    (tmp_path / "x.py").write_text(KILLED)
    out = tmp_path / "out"
    out.mkdir()
    root = str(Path(__file__).parents[1])
    command = [sys.executable, str(tmp_path / "x.py"), str(out), state]
    assert child.run_child(command, dict(os.environ) | {"PYTHONPATH": root}, out) == 1
    record = status.read(out)
    assert record is not None and record["state"] == "failed"
    assert record["reason"].startswith("rank 1 was ended by SIGKILL, rank 3 was ended by SIGSEGV")
    assert ("gloo" in record["reason"]) == (state == "failed") and "rank 2" not in record["reason"]
