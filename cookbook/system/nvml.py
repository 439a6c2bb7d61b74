"""Prints as JSON what NVML, the library of NVIDIA's driver, reports about the GPUs of this machine.

Above all a program: `gpus.read_driver` runs it in a child process, because a call that hangs in the driver
cannot be interrupted. NVML's names and codes: nvml.h, and pynvml from nvidia-ml-py.
"""

import json
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pynvml as nvml

P2P_READ = 0  # NVML_P2P_CAPS_INDEX_READ, which pynvml 13.615 defines as a tuple


def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None where driver or GPU do not support the question."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _gpu(index: int, handle: Any) -> dict[str, Any]:
    memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)  # whose `used` leaves out the driver's part
    users = [user.pid for user in ask(nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle) or []]
    names = [(ask(nvml.nvmlSystemGetProcessName, pid) or "a process").rpartition("/")[2] for pid in users]
    return {
        "index": index,
        "uuid": ask(nvml.nvmlDeviceGetUUID, handle) or "",
        "name": ask(nvml.nvmlDeviceGetName, handle) or "",
        "driver": ask(nvml.nvmlSystemGetDriverVersion) or "",
        "capability": ask(nvml.nvmlDeviceGetCudaComputeCapability, handle),
        "total_bytes": memory.total if memory else 0,
        "used_bytes": memory.used if memory else 0,
        "pcie_generation": ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        "pcie_width": ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        "pcie_width_max": ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        "nvlink_gb": _nvlink_gb(handle),
        "processes": [f"{name} ({pid})" for name, pid in zip(names, users, strict=True)],
    }


def _nvlink_gb(handle: Any) -> float | None:
    (field,) = ask(nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]) or [None]
    return field.value.uiVal / 1000 if field and not field.nvmlReturn and field.value.uiVal else None


def _nvlink_ends(handle: Any) -> list[str]:
    """The remote end of each active NVLink: the PCI address of a GPU, or `switch`, which leads to all GPUs."""
    active = [i for i in range(nvml.NVML_NVLINK_MAX_LINKS) if ask(nvml.nvmlDeviceGetNvLinkState, handle, i)]
    ends = []
    for link in active:
        is_switch = ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        remote = None if is_switch else ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        ends.append(remote.busId if remote else "switch")
    return ends


def _pairs(handles: list[Any]) -> list[dict[str, Any]]:
    ends = [_nvlink_ends(handle) for handle in handles]
    pairs = []
    for (i, handle), (j, other) in combinations(enumerate(handles), 2):
        address = ask(nvml.nvmlDeviceGetPciInfo, other)
        direct = ends[i].count(address.busId) if address else 0
        pairs.append(
            {
                "gpus": [i, j],
                "nvlinks": direct + min(ends[i].count("switch"), ends[j].count("switch")),
                "ancestor": ask(nvml.nvmlDeviceGetTopologyCommonAncestor, handle, other),
                "peer_status": ask(nvml.nvmlDeviceGetP2PStatus, handle, other, P2P_READ),
            }
        )
    return pairs


def open_handles() -> list[Any]:
    """NVML's handles of all GPUs.

    Raises:
        nvml.NVMLError: there is no driver, or it does not work.
    """
    nvml.nvmlInit()
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def read() -> dict[str, Any]:
    """`gpus` and `pairs` as in `gpus.Driver`; or `error` and its `code` where the driver does not work."""
    try:
        handles = open_handles()
    except nvml.NVMLError as error:
        return {"error": str(error).rstrip("."), "code": error.value}
    return {"gpus": [_gpu(index, handle) for index, handle in enumerate(handles)], "pairs": _pairs(handles)}


if __name__ == "__main__":
    print(json.dumps(read()))
