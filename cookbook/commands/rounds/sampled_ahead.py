"""Samples later rounds while one trains: in a process of its own, whose policy a round and a setting decide. No torch.

Which weights sample a round does not depend on who is faster: round r is sampled by those that round
r - 1 - max_staleness left, so that rounds which were killed end with the weights of rounds which were not.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from cookbook.commands.rounds.rounds_folder import Round
from cookbook.config.sections import RoundsSection
from cookbook.system.files import make_folder
from cookbook.system.record_files import replace_file
from cookbook.system.signals import die_with_parent

LOG = "sampling.log"
END_SECONDS = 60.0


def policy_of(number: int, rounds: RoundsSection) -> int:
    """The round whose weights sample round `number`; 0: those before the first."""
    return max(0, number - 1 - rounds.max_staleness)


def last_sampled_beside(number: int, rounds: RoundsSection) -> int:
    """The last round that is sampled while round `number` trains; that round itself if none is."""
    return min(number + rounds.max_staleness, rounds.num_rounds)


class Ahead:
    """A process that samples."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._end = 0.0
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        self._process.wait()
        self._end = time.monotonic()

    def wait(self) -> tuple[int, dict[str, float]]:
        """Wait for the samples. Returns the exit code, and the seconds that the trainer waited for them and that the
        sampler had waited for the trainer, who ends as this is called."""
        trained = time.monotonic()
        self._watcher.join()
        waits = {"trainer_wait": max(0.0, self._end - trained), "sampler_wait": max(0.0, trained - self._end)}
        return self._process.returncode, waits


@contextmanager
def sampling(command: Sequence[str], log: Path) -> Iterator[Ahead]:
    """Run a command that samples, until the block ends, or this process; its mistakes go where those of this one do."""
    make_folder(log.parent)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "cookbook", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            start_new_session=True,  # Ctrl-C ends the trainer first, which saves
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
        )
    try:
        yield Ahead(process)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        process.kill()
        process.wait()


def write_waits(current: Round, waits: dict[str, float]) -> None:
    """Record who waited while a round trained."""
    replace_file(current.waits, json.dumps(waits) + "\n")
