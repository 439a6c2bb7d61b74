"""Callbacks of plugins in a run: each line of its records goes to them, and none may change what is trained."""

import copy
import os
import queue
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cookbook.config.callbacks import Callback
from cookbook.system.files import RecipeError, make_folder
from cookbook.system.signals import SignalExit
from cookbook.training.engine import Engine
from cookbook.training.engine.agreement import digests
from cookbook.training.engine.norm import local


class Observer:
    """A callback on the main process, called between steps.

    Each call is compared with what may not change: torch's generators, learning rates, the current folder, and the
    versions of the weights and of the optimizer's tensors, which torch counts up when one is written to; at the first
    call of a method also the weights' own bits, which a write by way of `data` changes uncounted, and the generators of
    numpy and Python.
    """

    def __init__(
        self, callback: Callback, folder: Path, engine: Engine, *, say: Callable[[str], None], is_alone: bool
    ) -> None:
        """
        Args:
            folder: for files of the callback.
            is_alone: whether no other thread of this process draws from Python's generator, as trackers do.

        Raises:
            RecipeError: it cannot be made, or changes what it may not.
        """
        make_folder(folder)
        self._name, self._engine, self._say, self._is_alone = callback.name, engine, say, is_alone
        self._is_off = False
        self._known: set[str] = set()
        self._thread = threading.get_ident()
        self._waiting: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        made: list[Any] = []
        try:
            self._compare("__init__", lambda: made.append(callback.kind(folder)))
        except (RecipeError, SignalExit):
            raise
        except (Exception, SystemExit) as error:
            raise RecipeError(f"run.callbacks: {self._name} cannot be made: {type(error).__name__}: {error}") from error
        self._callback = made[0]

    def log(self, line: dict[str, Any]) -> None:
        self._send("on_metrics", line)

    def event(self, line: dict[str, Any]) -> None:
        self._send("on_event", line)

    def close(self) -> None:
        self._deliver()

    def _send(self, method: str, line: dict[str, Any]) -> None:
        self._waiting.put((method, copy.deepcopy(line)))
        if threading.get_ident() == self._thread:  # and not that of a save, beside which a step may write weights
            self._deliver()

    def _deliver(self) -> None:
        while not self._waiting.empty():
            method, line = self._waiting.get()
            function = getattr(self._callback, method, None)
            if function is None or self._is_off:
                continue
            try:
                self._compare(method, partial(function, line))
            except (RecipeError, SignalExit):
                raise
            except (Exception, SystemExit) as error:  # sys.exit would end the run as if it had come to its end
                self._is_off = True
                why = f"{type(error).__name__}: {error}"
                self._say(f"run.callbacks: {self._name} failed and is off: {why}; the run continues without it")

    def _compare(self, method: str, call: Callable[[], Any]) -> None:
        """Call, and compare what is seen before and after.

        Raises:
            RecipeError: something differs.
        """
        is_first = method not in self._known
        self._known.add(method)
        before = self._state(is_first)
        try:
            call()
        finally:
            after = self._state(is_first)
            os.chdir(before["the current folder"])  # where the run's own paths lead from
            if changed := [what for what in before if before[what] != after[what]]:
                raise RecipeError(
                    f"run.callbacks: {method} of {self._name} has changed {' and '.join(changed)}; a callback looks on,"
                    " and the curve would be another one with it: take that out"
                )

    def _state(self, is_first: bool) -> dict[str, Any]:
        """The state that a callback may not change, by name."""
        generators = [state.cpu().numpy().tobytes() for state in self._engine.generators()]
        state: dict[str, Any] = {"torch's random numbers": generators, "the current folder": os.getcwd()}
        weights: Any = [tensor._version for _, tensor in self._weights()]
        if is_first:
            _, words, *rest = np.random.get_state(legacy=True)
            state["numpy's random numbers"] = [np.asarray(words).tobytes(), *rest]
            if self._is_alone:
                state["Python's random numbers"] = random.getstate()
            weights = [weights, digests((name, local(tensor)) for name, tensor in self._weights())]
        optimizer = self._engine.base_optimizer
        moments = [tensor for of_weight in optimizer.state.values() for tensor in of_weight.values()]
        versions = [tensor._version for tensor in moments if isinstance(tensor, torch.Tensor)]
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        return state | {"weights": weights, "the optimizer": (versions, rates)}

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights by name; of ZeRO-3, whose parameters are empty, this process's shard."""
        for name, parameter in self._engine.model.named_parameters():
            yield name, getattr(parameter, "ds_tensor", parameter).detach()
