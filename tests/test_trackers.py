"""Protects run.trackers: each tracker, offline, holds the numbers of metrics.jsonl once, and none can end a run.

python -m pytest -q tests/test_trackers.py
"""

import contextlib
import importlib
import inspect
import json
import re
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import PartialState
from conftest import RECIPE

from cookbook.commands.cli import main
from cookbook.config import tracker_options
from cookbook.run.services import _tell_of_hang
from cookbook.start import run_plan
from cookbook.training import trackers
from cookbook.training.metrics import RunLog
from tests.needs import need_trackers

Series = dict[str, list[tuple[int, float]]]
"""By name: step and value."""
CONFIG = {"optim.learning_rate": 3e-3, "data.train": [{"path": "python-stdlib"}], "strategy": "ddp.yaml"}


def line(step: int, **values: float) -> dict[str, Any]:
    return {"step": step, "loss": 4.0 / (step + 1), "tokens_per_second": 100.5 + step, **values}


def held_out(step: int, name: str) -> dict[str, Any]:
    return {"step": step, "eval_set": name, "eval_loss": 5.0 / (step + 1), "eval_num_tokens": 7}


def of_metrics(path: Path) -> Series:
    """Series that a tracker must have."""
    series: Series = {}
    for line in map(json.loads, path.read_text().splitlines()):
        prefix = f"{line.pop('eval_set')}/" if "eval_set" in line else ""
        step = line.pop("step")
        for key, value in line.items():
            if value is not None:
                series.setdefault(prefix + key, []).append((step, value))
    return series


def of_tensorboard(folder: Path) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    # Files of one second are read by the number of the writer in its process, 10 before 9.
    return {
        tag: sorted((scalar.step, scalar.value) for scalar in events.Scalars(tag)) for tag in events.Tags()["scalars"]
    }


def of_mlflow(folder: Path) -> Series:
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert run.data.params["optim.learning_rate"] == "0.003"
    histories = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    return {key: sorted((point.step, point.value) for point in history) for key, history in histories.items()}


def of_trackio(folder: Path) -> Series:
    from trackio.utils import TRACKIO_DIR  # which it reads once

    series: Series = {}
    with sqlite3.connect(TRACKIO_DIR / f"{trackers.PROJECT}.db") as database:
        rows = database.execute("select step, metrics, run_name from metrics order by step").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    assert len({name for _, _, name in rows}) == 1 and json.loads(config)["strategy"] == "ddp.yaml"
    for step, metrics, _ in rows:
        for key, value in json.loads(metrics).items():
            series.setdefault(key, []).append((step, value))
    return series


def of_wandb(folder: Path) -> Series:
    series: Series = {}
    for record in records_of_wandb(folder):
        items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        step = int(items.get("_step", record.history.step.num))
        for key in items.keys() - {"_step", "_runtime", "_timestamp"}:
            series.setdefault(key, []).append((step, json.loads(items[key])))
    return series


def records_of_wandb(folder: Path) -> Iterator[Any]:
    """Its files are of records in blocks of 32 KiB, as a log of LevelDB, after 7 bytes of its own."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its other process writes the last record when it ends
    for path in sorted((folder / "wandb").rglob("*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at < len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = struct.unpack_from("<xxxxHB", data, at)
            whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # whole, or the last part
                yield Record.FromString(whole)
                whole = b""


READERS: dict[str, Callable[[Path], Series]] = {
    "tensorboard": of_tensorboard,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
    "wandb": of_wandb,
}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    PartialState(cpu=True)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for secret in ("HF_TOKEN", "SOME_API_KEY"):
        monkeypatch.setenv(secret, "canary-4711")
    monkeypatch.setattr(sys, "exit", sys.exit)  # wandb puts its own in the place
    yield
    with contextlib.suppress(KeyError, AttributeError):  # not imported, or a stand-in
        sys.modules["wandb"].teardown()  # each test has a service of its own: an earlier one may be gone


def start(folder: Path, name: str, resumed: int | None = None, options: dict[str, Any] | None = None) -> RunLog:
    """The logs of a run with a tracker, as `services.start_services` opens them."""
    step = resumed or 0
    repeated = {} if resumed is None else trackers.steps_logged_after(folder / "metrics.jsonl", step)
    log = RunLog(folder, is_main=True, max_steps=9, resumed_step=resumed, is_evaluated=False)
    log.write_record("run.json", {})
    tracker = trackers.Tracker(name, folder, CONFIG, options or {}, step=step, repeated=repeated, say=log.say)
    log.followers.append(tracker)
    return log


def alerts_of_wandb(folder: Path) -> list[tuple[str, str, str]]:
    records = [record.alert for record in records_of_wandb(folder) if record.HasField("alert")]
    return [(alert.title, alert.text, alert.level.lower()) for alert in records]


def alerts_of_trackio(folder: Path) -> list[tuple[str, str, str]]:
    from trackio.utils import TRACKIO_DIR

    with sqlite3.connect(TRACKIO_DIR / "alerted.db") as database:
        return database.execute("select title, text, level from alerts order by timestamp").fetchall()


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", READERS)
def test_unusual_events_and_the_end_are_alerts_where_a_tracker_has_them(name: str, tmp_path: Path, capsys) -> None:
    need_trackers()
    readers = {"wandb": alerts_of_wandb, "trackio": alerts_of_trackio}
    assert set(readers) == set(trackers.ALERTS)
    folder = tmp_path / "outputs/run"
    log = start(folder, name, options={"project": "alerted"} if name in readers else None)
    log.event("start", 0, strategy="ddp")
    log.write(line(1))
    log.event("gradient", 1, norm=70.0, usual=0.5, layers={"layers.3": 0.9}, most_in="a")
    log.event("save", 1, path="checkpoints/step-00000001")
    log.event("skip", 2)
    log.event("finish", 2, reason="early stopping")
    log.close()
    assert "run.trackers" not in capsys.readouterr().err
    if name in readers:
        assert readers[name](folder / "trackers") == [
            ("step 1: unusual gradients", 'norm: 70.0; usual: 0.5; layers: {"layers.3": 0.9}; most_in: a', "warn"),
            ("step 2: a step was skipped", "see events.jsonl", "warn"),
            ("step 2: finished", "reason: early stopping", "info"),
        ]
    else:
        assert READERS[name](folder / "trackers")["loss"] == [(1, 2.0)]


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", trackers.ALERTS)
def test_a_hang_is_an_alert_and_no_end_in_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_trackers()
    monkeypatch.setattr("cookbook.training.trackers.HANG_SECONDS", 100.0)  # wandb begins slowly on a busy machine
    folder = tmp_path / "outputs/run"
    log = start(folder, name, options={"project": "alerted"})
    log.write(line(1))
    _tell_of_hang(log, "rank 1 waits", 2)
    events = [json.loads(text) for text in (folder / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["step"], event["reason"]) for event in events] == [("hang", 2, "rank 1 waits")]
    alerts = {"wandb": alerts_of_wandb, "trackio": alerts_of_trackio}[name](folder / "trackers")
    assert alerts == [("step 2: hangs, and is ended", "reason: rank 1 waits", "error")]
    if name == "wandb":
        ends = [record.exit for record in records_of_wandb(folder / "trackers") if record.HasField("exit")]
        assert [end.exit_code for end in ends] == [1]


def test_there_is_a_test_for_each_tracker() -> None:
    assert set(READERS) == set(trackers.STARTS)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", READERS)
def test_a_tracker_has_the_numbers_of_the_metrics_once(name: str, tmp_path: Path, capsys) -> None:
    """Four starts: the second repeats steps 3 and 4 and is killed in between, the third repeats both, and the last
    the evaluation after step 6, which was saved before it."""
    need_trackers()
    folder = tmp_path / "outputs/run"
    for resumed, last in ((None, 4), (2, 3), (2, 6), (6, 6)):
        log = start(folder, name, resumed)
        for step in range(resumed or 0, last + 1):
            if step > (resumed or 0):
                log.write(line(step, grad_norm=float("nan") if step == 6 else 1 / step))
            if step % 3 == 0:
                log.write(held_out(step, "chats"))
        log.close()
    assert "run.trackers" not in capsys.readouterr().err
    expected, series = of_metrics(folder / "metrics.jsonl"), READERS[name](folder / "trackers")
    assert expected["loss"] == [(step, 4.0 / (step + 1)) for step in range(1, 7)]
    assert len(expected["grad_norm"]) == 5 and len(expected["chats/eval_loss"]) == 3
    assert series.keys() == expected.keys()
    for key, points in expected.items():
        assert [step for step, _ in series[key]] == [step for step, _ in points], key
        assert [value for _, value in series[key]] == pytest.approx([value for _, value in points], rel=1e-6), key
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 2 and not [path for path in written if b"canary-4711" in path.read_bytes()]


def named_by_mlflow(folder: Path) -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'sums'")
    (run,) = client.search_runs([experiment.experiment_id])
    return [run.info.run_name, run.data.tags["of"], run.data.tags["mlflow.note.content"]]


def named_by_trackio(folder: Path) -> list[Any]:
    from trackio.utils import TRACKIO_DIR

    with sqlite3.connect(TRACKIO_DIR / "sums.db") as database:
        (names,) = zip(*database.execute("select distinct run_name from metrics").fetchall(), strict=True)
        ((config,),) = database.execute("select config from configs").fetchall()
    return [*(name.rpartition("-")[0] for name in names), json.loads(config)["_Group"]]


def named_by_wandb(folder: Path) -> list[Any]:
    runs = [record.run for record in records_of_wandb(folder) if record.WhichOneof("record_type") == "run"]
    return [[run.project, run.display_name, [*run.tags], run.run_group] for run in runs]


NAMED: dict[str, tuple[dict[str, Any], Callable[[Path], list[Any]], list[Any]]] = {
    "tensorboard": (
        {"filename_suffix": ".second"},
        lambda folder: [path.suffix for path in (folder / "tensorboard").glob("events.*")],
        [".second"] * 2,
    ),
    "mlflow": (
        {"experiment_name": "sums", "run_name": "second", "tags": {"of": "mine"}, "description": "a try"},
        named_by_mlflow,
        ["second", "mine", "a try"],
    ),
    "trackio": ({"project": "sums", "name": "second", "group": "tries"}, named_by_trackio, ["second", "tries"]),
    "wandb": (
        {"project": "sums", "name": "second", "tags": ["a", "b"], "group": "tries"},
        named_by_wandb,
        [["sums", "second", ["a", "b"], "tries"]] * 2,
    ),
}
"""Options of each tracker, who reads them back after two starts, and what it must read."""


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", trackers.STARTS)
def test_a_tracker_has_the_names_that_a_recipe_gives_it_after_a_resume_too(
    name: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    need_trackers()
    monkeypatch.setenv("WANDB_PROJECT", "of the environment")  # which is for recipes that name none
    options, read, expected = NAMED[name]
    assert not [*tracker_options.check(name, options, ".".join)]
    folder = tmp_path / "outputs/run"
    for resumed in (None, 2):
        log = start(folder, name, resumed, options)
        for step in range((resumed or 0) + 1, 4):
            log.write(line(step))
        log.close()
    assert "run.trackers" not in capsys.readouterr().err
    assert read(folder / "trackers") == expected


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", trackers.STARTS)
def test_each_argument_of_a_trackers_function_is_passed_on_or_refused(name: str, monkeypatch) -> None:
    """Arguments that a run itself gives would be given twice."""
    need_trackers()
    given: set[str] = set()

    class Recorded:
        tracker = SimpleNamespace(info=SimpleNamespace(run_id="1"))

        def __init__(self, *of_accelerate: Any, **options: Any) -> None:
            given.update(options)

        def start(self) -> None: ...
        def store_init_configuration(self, config: Any) -> None: ...

    for tracker in ("TensorBoardTracker", "WandBTracker", "MLflowTracker", "TrackioTracker"):
        monkeypatch.setattr(trackers, tracker, Recorded)
    trackers.STARTS[name](Path("outputs/run/trackers/x"), "run", None, {}, {})
    assert given - {"name", "run_name", "experiment_name"} <= tracker_options.REFUSED[name].keys()
    module, _, function = tracker_options.OWNERS[name].rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    assert tracker_options.REFUSED[name].keys() <= parameters.keys()
    for key in parameters:
        refused = [*tracker_options.check(name, {key: None}, ".".join)]
        assert bool(refused) == (key in tracker_options.REFUSED[name]), key
    assert "has no such argument" in next(tracker_options.check(name, {f"{key}s": None}, ".".join))


def test_a_variable_that_would_win_over_a_recipe_is_named(monkeypatch) -> None:
    need_trackers()
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    (mistake,) = tracker_options.check("mlflow", {"experiment_name": "sums"}, ".".join)
    assert "MLFLOW_EXPERIMENT_NAME is set, which would win; unset it" in mistake
    assert not [*tracker_options.check("mlflow", {"experiment_name": "theirs"}, ".".join)]


@pytest.mark.usefixtures("offline")
def test_steps_would_be_logged_twice_without_what_the_first_start_logged(tmp_path: Path, monkeypatch) -> None:
    need_trackers()
    monkeypatch.setattr(trackers, "steps_logged_after", lambda *_: {})
    for resumed in (None, 2):
        log = start(tmp_path / "run", "tensorboard", resumed)
        for step in range((resumed or 0) + 1, 5):
            log.write(line(step))
        log.close()
    assert [step for step, _ in of_tensorboard(tmp_path / "run/trackers")["loss"]] == [1, 2, 3, 3, 4, 4]


class Fails:
    """A tracker that raises at one moment."""

    def __init__(self, moment: str, error: BaseException) -> None:
        self.moment, self.error, self.logged = moment, error, 0

    def start(self, *_: Any) -> tuple["Fails", str]:
        self._at("start")
        return self, "id"

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged += 1
        self._at(f"log {step}")

    def finish(self) -> None:
        self._at("finish")

    def _at(self, moment: str) -> None:
        if moment == self.moment:
            raise self.error


@pytest.mark.parametrize("error", [OSError("no route to host"), SystemExit(1)], ids=["error", "exit"])
@pytest.mark.parametrize("moment", ["start", "log 2", "finish", "never"])
def test_a_tracker_that_fails_is_off_with_one_warning(moment: str, error, tmp_path: Path, monkeypatch, capsys) -> None:
    tracker = Fails(moment, error)
    monkeypatch.setitem(trackers.STARTS, "wandb", tracker.start)
    log = start(tmp_path / "run", "wandb")
    for step in range(1, 6):
        log.write(line(step))
    log.close()
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 5
    warnings = [text for text in capsys.readouterr().err.splitlines() if "run.trackers" in text]
    assert len(warnings) == (moment != "never")
    assert tracker.logged == {"start": 0, "log 2": 2}.get(moment, 5)


def test_a_tracker_that_hangs_holds_up_neither_a_step_nor_the_end(tmp_path: Path, monkeypatch, capsys) -> None:
    tracker = Fails("never", OSError())
    tracker.log = lambda *_, **__: time.sleep(60)
    monkeypatch.setitem(trackers.STARTS, "wandb", tracker.start)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    started = time.monotonic()
    log = start(tmp_path / "run", "wandb")
    for step in range(1, 6):
        log.write(line(step))
    log.close()
    assert time.monotonic() - started < 30
    assert "wandb did not end within" in capsys.readouterr().err


@pytest.mark.parametrize("name", trackers.STARTS)
def test_a_tracker_that_is_not_installed_is_answered_before_the_run(name: str, book, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    book.edit(RECIPE, ("run:\n", f"run:\n  trackers: [{name}]\n"))
    assert main(["check", RECIPE]) == 2
    answer = capsys.readouterr().err
    packages = re.search(rf"has {name}, which is not installed: pip install (.+)", answer)
    assert packages is not None and packages[1].startswith((f"{name}==", f"{name}-skinny=="))
    assert f"{RECIPE}:" in answer


def test_a_folder_with_the_name_of_a_tracker_is_no_package(book, monkeypatch) -> None:
    """wandb's own, in the folder where people work."""
    monkeypatch.setattr(sys, "path", [str(book.root)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (book.root / "wandb").mkdir()
    (mistake,) = run_plan.read_pair(Path(RECIPE), ["run.trackers=[wandb]"], None).mistakes
    assert "wandb, which is not installed" in mistake


def test_an_unknown_tracker_and_one_named_twice_are_mistakes(book, capsys) -> None:
    need_trackers()
    assert main(["check", RECIPE, "--set", "run.trackers=[tensorbord]"]) == 2
    assert "tensorbord" in capsys.readouterr().err
    assert main(["check", RECIPE, "--set", "run.trackers=[wandb, wandb]"]) == 2
    assert "has wandb more than once" in capsys.readouterr().err
    assert main(["check", RECIPE, "--set", "run.trackers=wandb"]) == 0


def test_one_of_two_processes_of_a_run_logs_what_the_metrics_have(lab) -> None:
    need_trackers()
    run = lab.run("ddp", {"run.trackers": "[tensorboard]"})
    expected, series = of_metrics(run.folder / "metrics.jsonl"), of_tensorboard(run.folder / "trackers")
    assert len(list((run.folder / "trackers/tensorboard").glob("events.*"))) == 1
    assert series.keys() == expected.keys() and len(series["loss"]) == 20 and len(series["eval_loss"]) == 2
    for key, points in expected.items():
        assert [step for step, _ in series[key]] == [step for step, _ in points], key
        assert [value for _, value in series[key]] == pytest.approx([value for _, value in points], rel=1e-6), key
