"""Experiment trackers get the lines of metrics.jsonl and the recipe's settings, through accelerate's tracker classes.

Each has a thread of its own on the main process: a slow server delays no step, and an error ends its tracker alone.
"""

import json
import os
import queue
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from accelerate.tracking import GeneralTracker, MLflowTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from cookbook.system.record_files import read_lines

PROJECT = "cookbook"
"""Group of runs in a tracker, unless a recipe or the tracker's own environment variable names one."""
Config: TypeAlias = dict[str, str | float]
Options: TypeAlias = Mapping[str, Any]
"""Arguments of a tracker's own function, which `tracker_options.check` has seen."""
Started: TypeAlias = tuple[GeneralTracker, str]
CLOSE_SECONDS = 30.0
"""Limit of the wait for a tracker at the end of a run."""
HANG_SECONDS = 10.0
"""Limit of that wait for a run that hangs: launchers kill it 30 seconds after its first process has ended."""


def _start_tensorboard(folder: Path, name: str, run_id: str | None, config: Config, options: Options) -> Started:
    tracker = TensorBoardTracker("", folder, **options)
    tracker.start()
    if run_id is None:
        tracker.store_init_configuration(config)
    return tracker, name


def _start_wandb(folder: Path, name: str, run_id: str | None, config: Config, options: Options) -> Started:
    import wandb

    run_id = run_id or uuid.uuid4().hex
    # Not the console, the code or the diff: they may hold what nobody meant to publish.
    settings = wandb.Settings(console="off", disable_git=True, disable_code=True, login_timeout=30)
    named = {"project": os.environ.get("WANDB_PROJECT", PROJECT), "name": name} | dict(options)
    project = named.pop("project")  # which accelerate calls the run's name
    tracker = WandBTracker(project, **named, id=run_id, resume="allow", dir=str(folder), settings=settings)
    tracker.start()
    tracker.store_init_configuration(config)
    return tracker, run_id


def _start_mlflow(folder: Path, name: str, run_id: str | None, config: Config, options: Options) -> Started:
    # One database beside the folders of runs; mlflow's own default depends on the version and the current folder.
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder.parents[2].resolve() / 'mlflow.db'}")
    tracker = MLflowTracker(**{"experiment_name": PROJECT, "run_name": name} | dict(options), run_id=run_id)
    tracker.start()
    if run_id is None:  # mlflow refuses another value of a parameter
        tracker.store_init_configuration(config)
    return tracker, tracker.tracker.info.run_id


def _start_trackio(folder: Path, name: str, run_id: str | None, config: Config, options: Options) -> Started:
    named = {"project": PROJECT, "name": name} | dict(options)
    run_id = run_id or f"{named['name']}-{uuid.uuid4().hex[:8]}"  # trackio knows a run by its name
    tracker = TrackioTracker(named.pop("project"), **named | {"name": run_id}, resume="allow")
    tracker.start()
    tracker.store_init_configuration(config)  # also of a resumed run, whose settings it would forget
    return tracker, run_id


# Not Accelerator.init_trackers, which opens all of them in one call and lets the first error end the run.
STARTS: dict[str, Callable[[Path, str, str | None, Config, Options], Started]] = {
    "tensorboard": _start_tensorboard,
    "wandb": _start_wandb,
    "mlflow": _start_mlflow,
    "trackio": _start_trackio,
}
"""From the tracker's folder, the run's name, the id under which an earlier start logged it, if there is one, the
settings and the tracker's options; returns the tracker and its id of the run."""


def _alert_wandb(tracker: GeneralTracker, title: str, text: str, level: str) -> None:
    tracker.tracker.alert(title=title, text=text, level=level)


def _alert_trackio(tracker: GeneralTracker, title: str, text: str, level: str) -> None:
    from trackio import AlertLevel

    tracker.tracker.alert(title=title, text=text, level=AlertLevel[level])


ALERTS: dict[str, Callable[[GeneralTracker, str, str, str], None]] = {"wandb": _alert_wandb, "trackio": _alert_trackio}
"""From a tracker that has alerts, and an alert's title, text and level."""
ALERTED = {
    "gradient": ("WARN", "unusual gradients"),
    "skip": ("WARN", "a step was skipped"),
    "out_of_memory": ("WARN", "started again after a shortage of memory"),
    "hang": ("ERROR", "hangs, and is ended"),
    "stop": ("INFO", "stopped"),
    "finish": ("INFO", "finished"),
}
"""Events that are alerts in such a tracker, with level and title."""


def _fail_wandb(tracker: GeneralTracker) -> None:
    tracker.tracker.finish(exit_code=1)


FAILS: dict[str, Callable[[GeneralTracker], None]] = {"wandb": _fail_wandb}
"""Ways in which trackers that know of it end a run that has failed."""


def steps_logged_after(metrics: Path, step: int) -> dict[str, int]:
    """The lines of a metrics.jsonl from `step` on, which a run that resumes from it may repeat: their steps by `_key`.

    Call it before the log is opened, which removes them. Lines that cannot be read are passed over.
    """
    steps = {_key(line): int(line["step"]) for line in read_lines(metrics)}
    return {key: number for key, number in steps.items() if number >= step}


def _key(line: Mapping[str, Any]) -> str:
    return f"{line['step']} {'training' if 'loss' in line else line.get('eval_set', '')}"


class Tracker(threading.Thread):
    """One tracker of a run; `log` and `close` never raise. Create it on rank 0, after the process group."""

    def __init__(
        self,
        name: str,
        folder: Path,
        config: Mapping[str, Any],
        options: Options,
        *,
        step: int,
        repeated: Mapping[str, int],
        say: Callable[[str], None],
    ) -> None:
        """
        Args:
            name: a key of `STARTS`.
            folder: the run's output folder; the tracker's own is trackers/NAME in it.
            config: settings by `section.key`.
            options: the recipe's for this tracker.
            step: the run resumes from here.
            repeated: the result of `steps_logged_after`.
            say: logs the one warning of a tracker that fails.
        """
        super().__init__(name=f"tracker {name}", daemon=True)  # one that hangs must not keep the process
        self._tracker_name, self._folder, self._run_name = name, folder / "trackers" / name, folder.resolve().name
        self._config, self._options = {key: _plain(value) for key, value in config.items()}, options
        self._step, self._repeated, self._say = step, repeated, say
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.start()

    def log(self, line: dict[str, Any]) -> None:
        """Log a line of metrics.jsonl soon."""
        if self.is_alive():
            self._lines.put(line)

    def event(self, line: dict[str, Any]) -> None:
        """Raise an alert for a line of events.jsonl soon, if it is one of `ALERTED` and the tracker has alerts."""
        if line["event"] in ALERTED and self._tracker_name in ALERTS and self.is_alive():
            self._lines.put(line)

    def close(self, seconds: float | None = None) -> None:
        """Wait until everything is logged, but not for ever."""
        seconds = CLOSE_SECONDS if seconds is None else seconds
        self._lines.put(None)
        self.join(seconds)
        if self.is_alive():
            self._warn(f"did not end within {seconds:.0f} s, and is left")

    def run(self) -> None:
        try:
            self._follow()
        except BaseException as error:  # some end the process where they cannot continue
            self._warn(f"failed and is off: {type(error).__name__}: {error}")

    def _warn(self, what: str) -> None:
        self._say(f"run.trackers: {self._tracker_name} {what}; the run and its metrics.jsonl continue without it")

    def _follow(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "state.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        done: dict[str, int] = {}
        if known is not None:
            done = {key: step for key, step in (known["logged"] | self._repeated).items() if step >= self._step}
        start, earlier = STARTS[self._tracker_name], known and known["id"]
        tracker, run_id = start(self._folder, self._run_name, earlier, self._config, self._options)
        path.write_text(json.dumps({"id": run_id, "logged": done}) + "\n", encoding="utf-8")
        end: Callable[[GeneralTracker], None] = type(tracker).finish
        while (line := self._lines.get()) is not None:
            if "event" in line:
                if line["event"] == "hang":
                    end = FAILS.get(self._tracker_name, end)
                level, words = ALERTED[line["event"]]
                ALERTS[self._tracker_name](tracker, f"step {line['step']}: {words}", _in_words(line), level)
            elif _key(line) not in done:
                tracker.log(_values(line), step=line["step"])
        end(tracker)


def _values(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by their names in metrics.jsonl; those of a named set as `set/name`."""
    prefix = re.sub(r"[^\w. -]", "_", line["eval_set"]) + "/" if "eval_set" in line else ""
    return {f"{prefix}{key}": value for key, value in line.items() if key != "step" and isinstance(value, int | float)}


def _in_words(event: Mapping[str, Any]) -> str:
    """The details of an event in a line."""
    details = {key: value for key, value in event.items() if key not in ("event", "step", "time")}
    return "; ".join(f"{key}: {_plain(value)}" for key, value in details.items()) or "see events.jsonl"


def _plain(value: Any) -> str | float:
    return value if isinstance(value, str | int | float) else json.dumps(value)
