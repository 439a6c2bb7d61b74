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
ALL_LINKS = 2**32 - 1
"""The scope of a field of NVLink that is wanted as a sum over the links."""
COUNTERS = {
    "nvlink_mb_s": (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 1024 / 1e6),
    "nvlink_recoveries": (nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, None),
    "pcie_replays": (nvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER, None),
}
"""Fields that count since the driver started, by the name of their growth here: as a rate, of so many MB each, or as
the number of times since the monitor began.
"""
MOST_XIDS = 100
"""Read at once; a driver that repeats one for ever must not keep the monitor."""
SETS, MOST = ("throttled", "xids"), ("uncorrected_errors", "corrected_errors", "nvlink_recoveries", "pcie_replays")
"""Numbers of which a line has all values, and the maximum; of others it has the mean."""

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
        with contextlib.suppress(OSError):  # a run continues without it
            self._child = subprocess.Popen(
                [sys.executable, "-m", __name__, *words],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the run's
            )

    def words(self) -> str:
        """Describe the last seconds of this machine's GPUs, or of its CPU where there are none; "" if unknown."""
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            changed = self.path.stat().st_mtime
            if changed != self._seen[0]:
                line = json.loads(self.path.read_bytes().splitlines()[-1])
                name, of = ("GPU", line["gpus"]) if line["gpus"] else ("CPU", [line["cpu"]])
                words = f"{name} {mean(sample['busy_percent'] for sample in of):.0f} %"
                heat = [sample["celsius"] for sample in of if "celsius" in sample]
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
    gpus = [InstalledGpu(index=i, uuid=ask(nvml.nvmlDeviceGetUUID, handle) or "") for i, handle in enumerate(handles)]
    return [handles[gpu.index] for gpu in visible_gpus(gpus)][:num_ranks]


def gpu_sample(handle: Any) -> Sample:
    """Sample a GPU's present state; what its driver does not report is left out."""
    use, memory = ask(nvml.nvmlDeviceGetUtilizationRates, handle), ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    watts, most_watts = ask(nvml.nvmlDeviceGetPowerUsage, handle), ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    clock = (handle, nvml.NVML_CLOCK_SM)
    sent = ask(nvml.nvmlDeviceGetPcieThroughput, handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
    received = ask(nvml.nvmlDeviceGetPcieThroughput, handle, nvml.NVML_PCIE_UTIL_RX_BYTES)

    def errors(kind: int) -> int | None:
        """Number of ECC memory errors since the driver started."""
        return ask(nvml.nvmlDeviceGetTotalEccErrors, handle, kind, nvml.NVML_VOLATILE_ECC)

    counts = {
        "busy_percent": use.gpu if use else None,
        "memory_gib": memory.used / 2**30 if memory else None,
        "memory_total_gib": memory.total / 2**30 if memory else None,
        "watts": watts / 1000 if watts is not None else None,
        "watts_limit": most_watts / 1000 if most_watts is not None else None,
        "celsius": ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "clock_mhz": ask(nvml.nvmlDeviceGetClockInfo, *clock),
        "clock_limit_mhz": ask(nvml.nvmlDeviceGetMaxClockInfo, *clock),
        "pcie_sent_mb_s": sent / 1000 if sent is not None else None,
        "pcie_received_mb_s": received / 1000 if received is not None else None,
        "uncorrected_errors": errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        "corrected_errors": errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        "throttled": [name for bit, name in THROTTLES.items() if reasons & bit] or None,
    }
    if rows := ask(nvml.nvmlDeviceGetRemappedRows, handle):
        counts |= {"remapping": "failed" if rows[3] else "pending" if rows[2] else None}
    return {name: value for name, value in counts.items() if value is not None}


def gpu_samples(handle: Any) -> Iterator[Sample]:
    """Sample a GPU, each time with the Xid errors and the rates since the sample before; the first is empty."""
    xids, then, first = _xid_events(handle), time.monotonic(), _counts(handle)
    before = first
    yield {}
    while True:
        now, counts = time.monotonic(), _counts(handle)
        sample = gpu_sample(handle)
        for name in counts.keys() & before.keys():
            size = COUNTERS[name][1]
            if size is None:
                sample[name] = counts[name] - first[name]
            else:
                sample[name] = (counts[name] - before[name]) * size / max(1e-3, now - then)
        if seen := [event.eventData for event in _waiting(xids)]:
            sample["xids"] = seen
        then, before = now, before | counts
        yield sample


def _counts(handle: Any) -> dict[str, int]:
    fields = [(field, ALL_LINKS if "nvlink" in name else 0) for name, (field, _) in COUNTERS.items()]
    values = ask(nvml.nvmlDeviceGetFieldValues, handle, fields) or []
    return {name: value.value.ullVal for name, value in zip(COUNTERS, values, strict=False) if value.nvmlReturn == 0}


def _xid_events(handle: Any) -> Any:
    """The driver's queue of this GPU's Xid errors; None where it has none, as under Windows and for some users."""
    events = ask(nvml.nvmlEventSetCreate)
    try:
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except (nvml.NVMLError, TypeError):
        return None
    return events


def _waiting(events: Any) -> Iterator[Any]:
    """The events since the last call, without waiting for one."""
    for _ in range(MOST_XIDS if events is not None else 0):
        event = ask(nvml.nvmlEventSetWait_v2, events, 0)
        if event is None:
            return
        yield event


def cpu_samples() -> Iterator[Sample]:
    """Sample CPU, memory, disks and network of this machine, each since the sample before."""
    psutil.cpu_percent()
    then, disk, net = time.monotonic(), psutil.disk_io_counters(), psutil.net_io_counters()
    while True:
        memory, now = psutil.virtual_memory(), time.monotonic()
        new_disk, new_net, seconds = psutil.disk_io_counters(), psutil.net_io_counters(), max(1e-3, now - then)
        sample = {
            "busy_percent": psutil.cpu_percent(),
            "memory_gib": (memory.total - memory.available) / 2**30,
            "memory_total_gib": memory.total / 2**30,
        }
        if disk and new_disk:  # none in some containers
            sample["disk_read_mb_s"] = (new_disk.read_bytes - disk.read_bytes) / seconds / 1e6
            sample["disk_write_mb_s"] = (new_disk.write_bytes - disk.write_bytes) / seconds / 1e6
        if net and new_net:
            sample["network_mb_s"] = (new_net.bytes_sent - net.bytes_sent) / seconds / 1e6
        then, disk, net = now, new_disk, new_net
        yield sample


def summarise(samples: list[Sample]) -> Sample:
    """Means of numbers, the most of those that count, the last word, and all reasons and errors that were seen."""
    line: Sample = {}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        values = [sample[name] for sample in samples if name in sample]
        if name in SETS:
            line[name] = sorted({item for of_sample in values for item in of_sample})
        elif name in MOST:
            line[name] = max(values)
        elif isinstance(values[-1], str):
            line[name] = values[-1]
        else:
            line[name] = round(mean(values), 2)
    return line


def line_of(samples: list[tuple[list[Sample], Sample]], first_rank: int) -> Sample:
    """A line of the file, of the GPUs' samples and the CPU's."""
    of_gpus = zip(*(gpus for gpus, _ in samples), strict=True)
    gpus = [{"rank": first_rank + i, **summarise(list(of_gpu))} for i, of_gpu in enumerate(of_gpus)]
    return {"time": round(time.time(), 1), "gpus": gpus, "cpu": summarise([cpu for _, cpu in samples])}


def _follow(path: Path, first_rank: int, num_ranks: int) -> None:
    """Measure until standard input ends."""
    gpus, cpu = [gpu_samples(handle) for handle in gpu_handles(num_ranks)], cpu_samples()
    for stream in (*gpus, cpu):
        next(stream)  # the first sample has no time behind it
    samples: list[tuple[list[Sample], Sample]] = []
    is_open, began = True, time.monotonic()
    while is_open:
        is_open = not select.select([sys.stdin], [], [], SAMPLE_SECONDS)[0]
        samples.append(([next(gpu) for gpu in gpus], next(cpu)))
        if not is_open or time.monotonic() - began >= LINE_SECONDS:
            with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line_of(samples, first_rank)) + "\n")
            samples, began = [], time.monotonic()


if __name__ == "__main__":
    _follow(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
