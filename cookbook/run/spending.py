"""The cost of a run so far, by run.price_per_gpu_hour."""

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

import simulated_gpus
from cookbook.system import status
from cookbook.system.record_files import METRICS, read_lines


@dataclass(frozen=True, kw_only=True)
class Meter:
    """Counts from the start of this process, whose GPUs are paid for while it loads, evaluates and saves too."""

    per_hour: float | None
    """Price of all GPUs of the run for an hour; None: not known."""
    before: float
    """The cost of the run's earlier starts."""
    began: float
    """Start of this process, on the clock of `time.monotonic`."""

    def price(self) -> dict[str, float]:
        """`{"price": cost so far}`, or empty if it is not known."""
        if self.per_hour is None:
            return {}
        return {"price": self.before + (time.monotonic() - self.began) / 3600 * self.per_hour}


def meter(per_gpu_hour: float | None, num_processes: int, earlier: Path | None) -> Meter:
    """The meter of a start. Call it before status and log are opened, which replace what earlier starts wrote.

    Args:
        num_processes: of which each has a GPU.
        earlier: the run's folder, if it resumes there.
    """
    if per_gpu_hour is None or simulated_gpus.is_active():
        return Meter(per_hour=None, before=0.0, began=0.0)
    before = None if earlier is None else status.price_so_far(earlier, read_lines(earlier / METRICS))
    age = time.time() - psutil.Process().create_time()
    return Meter(per_hour=per_gpu_hour * num_processes, before=before or 0.0, began=time.monotonic() - age)
