"""Measures what the GPUs and the CPU of a machine do during a run, in a process of its own beside each machine's ranks.

It is a child and no thread, because a call that hangs in the driver would keep its process from ending, and so that it
takes no time from the loop. It ends when its standard input does, thus with the run, however that ends.
NVML's names and codes: nvml.h, and pynvml from nvidia-ml-py.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import pynvml as nvml

from cookbook.system.gpus import InstalledGpu, visible_gpus
from cookbook.system.nvml import ask, open_handles

FILE = "monitor.jsonl"
SAMPLE_SECONDS = 1.0
LINE_SECONDS = 10.0
"""A line has the means of so many seconds: one a second would be 100 MB a day for eight GPUs."""
CLOSE_SECONDS = 2.0
THROTTLES = {
    nvml.nvmlClocksEventReasonSwPowerCap: "power cap",
    nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
    nvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    nvml.nvmlClocksEventReasonSwThermalSlowdown: "heat",
    nvml.nvmlClocksEventReasonHwThermalSlowdown: "heat, hardware slowdown",
}
"""Reasons for lower clocks that a user can do something about."""

Sample = dict[str, Any]


class Monitor:
    """Writes `FILE` in a run's folder from a child process."""

    def __init__(self, folder: Path, *, first_rank: int, num_ranks: int, machine: int) -> None:
        """
        Args:
            first_rank: of this machine, whose ranks have its visible GPUs in order.
            machine: its number; those after the first write files of their own.
        """
        self.path = folder / (FILE if machine == 0 else f"monitor-{machine}.jsonl")
        words = [str(self.path.resolve()), str(first_rank), str(num_ranks)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        self._seen: tuple[float, str] = (0.0, "")
        self._child: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # a run goes on without it
            self._child = subprocess.Popen(
                [sys.executable, "-m", __name__, *words],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the run's
            )

    def words(self) -> str:
        """What the GPUs of this machine did in the last seconds, or its CPU where there are none; "" if unknown."""
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            changed = self.path.stat().st_mtime
            if changed != self._seen[0]:
                line = json.loads(self.path.read_bytes().splitlines()[-1])
                name, of = ("GPU", line["gpus"]) if line["gpus"] else ("CPU", [line["cpu"]])
                words = f"{name} {mean(one['busy_percent'] for one in of):.0f} %"
                heat = [one["celsius"] for one in of if "celsius" in one]
                self._seen = changed, f"{words} {max(heat):.0f} °C" if heat else words
        return self._seen[1]

    def close(self) -> None:
        """Let it write its last line; a child that hangs in the driver is left behind."""
        if self._child is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._child.communicate(timeout=CLOSE_SECONDS)
            self._child = None


def gpu_handles(num_ranks: int) -> list[Any]:
    """NVML's handles of the GPUs of this machine's ranks; none without a driver."""
    try:
        handles = open_handles()
    except nvml.NVMLError:
        return []
    gpus = [InstalledGpu(index=i, uuid=ask(nvml.nvmlDeviceGetUUID, one) or "") for i, one in enumerate(handles)]
    return [handles[gpu.index] for gpu in visible_gpus(gpus)][:num_ranks]


def gpu_sample(handle: Any) -> Sample:
    """What a GPU does now; what its driver does not tell is left out."""
    use, memory = ask(nvml.nvmlDeviceGetUtilizationRates, handle), ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    watts, most_watts = ask(nvml.nvmlDeviceGetPowerUsage, handle), ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    clock = (handle, nvml.NVML_CLOCK_SM)
    found = {
        "busy_percent": use.gpu if use else None,
        "memory_gib": memory.used / 2**30 if memory else None,
        "memory_total_gib": memory.total / 2**30 if memory else None,
        "watts": watts / 1000 if watts is not None else None,
        "watts_limit": most_watts / 1000 if most_watts is not None else None,
        "celsius": ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "clock_mhz": ask(nvml.nvmlDeviceGetClockInfo, *clock),
        "clock_limit_mhz": ask(nvml.nvmlDeviceGetMaxClockInfo, *clock),
        "uncorrected_errors": ask(
            nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "throttled": [name for bit, name in THROTTLES.items() if reasons & bit] or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def cpu_samples() -> Iterator[Sample]:
    """What CPU, memory, disks and network of this machine do, each since the sample before."""
    psutil.cpu_percent()
    then, disk, net = time.monotonic(), psutil.disk_io_counters(), psutil.net_io_counters()
    while True:
        memory, now = psutil.virtual_memory(), time.monotonic()
        new_disk, new_net, seconds = psutil.disk_io_counters(), psutil.net_io_counters(), max(1e-3, now - then)
        found = {
            "busy_percent": psutil.cpu_percent(),
            "memory_gib": (memory.total - memory.available) / 2**30,
            "memory_total_gib": memory.total / 2**30,
        }
        if disk and new_disk:  # none in some containers
            found["disk_read_mb_s"] = (new_disk.read_bytes - disk.read_bytes) / seconds / 1e6
            found["disk_write_mb_s"] = (new_disk.write_bytes - disk.write_bytes) / seconds / 1e6
        if net and new_net:
            found["network_mb_s"] = (new_net.bytes_sent - net.bytes_sent) / seconds / 1e6
        then, disk, net = now, new_disk, new_net
        yield found


def summarised(samples: list[Sample]) -> Sample:
    """Means of numbers, what does not change as it is, and all reasons for lower clocks that were seen."""
    found: Sample = {}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        values = [sample[name] for sample in samples if name in sample]
        if name == "throttled":
            found[name] = sorted({reason for reasons in values for reason in reasons})
        elif name == "uncorrected_errors":
            found[name] = max(values)
        else:
            found[name] = round(mean(values), 2)
    return found


def line_of(samples: list[tuple[list[Sample], Sample]], first_rank: int) -> Sample:
    """A line of the file, of the GPUs' samples and the CPU's."""
    of_gpus = zip(*(gpus for gpus, _ in samples), strict=True)
    gpus = [{"rank": first_rank + i, **summarised(list(of_gpu))} for i, of_gpu in enumerate(of_gpus)]
    return {"time": round(time.time(), 1), "gpus": gpus, "cpu": summarised([cpu for _, cpu in samples])}


def _follow(path: Path, first_rank: int, num_ranks: int) -> None:
    """Measure until standard input ends."""
    handles, cpu = gpu_handles(num_ranks), cpu_samples()
    next(cpu)  # the first sample has no time behind it
    samples: list[tuple[list[Sample], Sample]] = []
    is_open, began = True, time.monotonic()
    while is_open:
        is_open = not select.select([sys.stdin], [], [], SAMPLE_SECONDS)[0]
        samples.append(([gpu_sample(handle) for handle in handles], next(cpu)))
        if not is_open or time.monotonic() - began >= LINE_SECONDS:
            with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line_of(samples, first_rank)) + "\n")
            samples, began = [], time.monotonic()


if __name__ == "__main__":
    _follow(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
