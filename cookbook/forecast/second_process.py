"""A second process that traces beside the first, for models that need two traces where others need one."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from transformers import PreTrainedConfig

from cookbook.config.recipe import Recipe
from cookbook.forecast.activations import ActivationTrace

_FORK = multiprocessing.get_context("fork")  # another start would take the seconds of importing torch


class _Second:
    """That process, which `begin` starts at its first trace."""

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._process = _FORK.Process(daemon=True)

    def begin(self, *task: Any) -> bool:
        if self._connection is None:
            self._connection, others_end = _FORK.Pipe()
            self._process = _FORK.Process(target=_answer, args=(self._connection, others_end), daemon=True)
            self._process.start()
            others_end.close()
        try:
            self._connection.send(task)
        except Exception:  # an objective of the user's that cannot be sent, or the process has ended
            return False
        return True

    def take(self) -> ActivationTrace | None:
        assert self._connection is not None
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()


_CURRENT: list[_Second] = []


@contextlib.contextmanager
def second_process() -> Iterator[None]:
    """Trace in two processes inside of this context, where there are two cores. The traces are the same."""
    begun = [_Second()] if len(os.sched_getaffinity(0)) > 1 else []
    _CURRENT.extend(begun)
    try:
        yield
    finally:
        for process in begun:
            _CURRENT.remove(process)
            process.close()


def begin(config: PreTrainedConfig, recipe: Recipe, options: dict[str, Any]) -> bool:
    """Have the second process trace, whose result `take` waits for. False: there is none."""
    return bool(_CURRENT) and _CURRENT[-1].begin(config, recipe, options)


def take() -> ActivationTrace | None:
    """The trace that was begun; None where it was not made there, for whatever reason."""
    return _CURRENT[-1].take()


def _answer(parents: Connection, own: Connection) -> None:
    from cookbook.forecast.trace import trace

    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    with contextlib.suppress(EOFError, OSError):
        while True:
            config, recipe, options = own.recv()
            try:
                traced = trace(config, recipe, **options)
            except Exception:  # it will be raised where the first process traces the same
                traced = None
            own.send(traced)
