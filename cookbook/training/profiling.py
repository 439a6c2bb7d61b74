"""torch's profiler over some steps of a run: a trace for Perfetto and TensorBoard, and where the time went."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.cuda._memory_viz import profile_plot
from torch.profiler import ProfilerActivity, profile, record_function

from cookbook.config.sections import ProfileSection
from cookbook.system.step_phases import LAYER, PHASE, STEP, Event, divide, in_words

FOLDER = "profile"
_LAYER_NAME = re.compile(r"(?:layers|h|blocks)\.\d+$")


def phase(name: str) -> record_function:
    """Annotates a phase of a step, for a profile."""
    return record_function(PHASE + name)


class Profile:
    """Profiles `settings.steps` on the ranks that are named; does nothing elsewhere. Not collective."""

    def __init__(
        self,
        settings: ProfileSection | None,
        folder: Path,
        rank: int,
        model: torch.nn.Module,
        say: Callable[[str], None],
    ) -> None:
        """
        Args:
            folder: of the run.
            model: the transformers model, whose layers are timed one by one.
            say: shows the table.
        """
        self._settings = settings if settings is not None and rank in settings.ranks else None
        self._folder, self._rank, self._model, self._say = folder / FOLDER, rank, model, say
        self._profiler: profile | None = None
        self._step: record_function | None = None
        self._hooks: list[Any] = []
        self._first = self._last = self._reached = 0

    def begin_step(self, step: int) -> None:
        """Before the batch of a step is taken."""
        if self._settings is None:
            return
        self._reached = step
        first, last = self._settings.steps
        if not self._first and first <= step <= last:  # later than the first in a run that was resumed among them
            self._start()
        if self._profiler is not None:
            self._first = self._first or step
            self._last = step
            self._step = record_function(PHASE + STEP)
            self._step.__enter__()

    def end_step(self, step: int) -> None:
        """After a step and the evaluation and save that followed it."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if self._settings is not None and step == self._settings.steps[1]:
            self.close()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if ProfilerActivity.CUDA in torch.profiler.supported_activities():
            activities.append(ProfilerActivity.CUDA)
        for name, module in self._model.named_modules():
            if _LAYER_NAME.search(name):
                self._hooks += _annotate(module, name)
        assert self._settings is not None
        # The page of memory is made of all three (torch/profiler/profiler.py, `_memory_profile`).
        memory = self._settings.memory
        self._profiler = profile(
            activities=activities,
            profile_memory=memory,
            record_shapes=memory or self._settings.record_shapes,
            with_stack=memory or self._settings.with_stack,
        )
        self._profiler.start()

    def close(self) -> None:
        """Write trace and table, if steps are being profiled. A disk that is full loses them, and not the run."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            if self._settings is not None and self._reached < self._settings.steps[0]:
                self._say(f"run.profile: nothing was profiled, as no step of {self._settings.steps} was reached")
            return
        profiler.stop()
        for hook in self._hooks:
            hook.remove()
        record = {"rank": self._rank, "first_step": self._first, "last_step": self._last}
        record |= divide(_events(profiler), self._last - self._first + 1)
        trace = self._folder / f"rank_{self._rank}.pt.trace.json.gz"
        assert self._settings is not None
        memory = self._folder / f"rank_{self._rank}.memory.html" if self._settings.memory else None
        try:
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            (self._folder / f"rank_{self._rank}.json").write_text(json.dumps(record, indent=1) + "\n")
            if memory is not None:
                memory.write_text(profile_plot(profiler), encoding="utf-8")
        except (OSError, RuntimeError) as error:
            self._say(f"run.profile: {trace} could not be written: {error}; the run continues")
        self._say(in_words(record, f"PROFILE of steps {self._first} to {self._last}, rank {self._rank}"))
        self._say(f"  trace for Perfetto (ui.perfetto.dev) and TensorBoard: {trace}")
        if memory is not None:
            self._say(f"  memory, in a browser that is online: {memory}")


def _annotate(module: torch.nn.Module, name: str) -> list[Any]:
    """Hooks that annotate the forwards of a layer."""
    open_notes: list[record_function] = []

    def before(*_: Any) -> None:
        open_notes.append(record_function(LAYER + name))
        open_notes[-1].__enter__()

    def after(*_: Any) -> None:
        open_notes.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]


def _events(profiler: profile) -> list[Event]:
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None

    def is_on_device(event: Any) -> bool:
        return event.device_type() != torch.autograd.DeviceType.CPU

    def link_of(event: Any) -> int:
        """The host's calls of CUDA are linked to an operation as well, and number themselves otherwise."""
        linked = event.linked_correlation_id()
        return linked if is_on_device(event) else 0 if linked else event.correlation_id()

    return [
        Event(
            name=event.name(),
            start=event.start_ns(),
            end=event.start_ns() + event.duration_ns(),
            thread=event.start_thread_id(),
            is_note=event.is_user_annotation() and not event.is_async(),
            is_async=event.is_async(),
            on_device=is_on_device(event),
            sequence=event.sequence_nr(),
            link=link_of(event),
        )
        for event in profiler.profiler.kineto_results.events()
    ]
