# SPDX-License-Identifier: Apache-2.0
"""Answers of torch.cuda, NCCL and bitsandbytes on simulated GPUs. `install` runs right after `import torch`."""

import atexit
import collections
import contextlib
import ctypes
import importlib.util
import json
import os
import sys
import sysconfig
import time
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

NAME = "Simulated GPU"
"""The name of no known GPU: nothing can look up its peak, or print an MFU."""
LIBRARIES = ("site-packages/", "dist-packages/", f"{sysconfig.get_path('stdlib')}/", "<", f"{Path(__file__).parent}/")
"""Parts of the paths of files that are not the user's. A wait is charged to the innermost line of the user's own."""

SECONDS_TO_FREE = 0.1

_kept_alive: list[Any] = []
_waits: collections.Counter = collections.Counter()
_races: collections.Counter = collections.Counter()


def load_library() -> ctypes.CDLL:
    """Load the simulated device's library. Before torch is imported: its symbols must come first."""
    library = ctypes.CDLL(str(_folder() / "libsimulated_gpus.so"), ctypes.RTLD_GLOBAL)
    for name in ("allocated", "peak", "capacity"):
        getattr(library, f"simulated_{name}").restype = ctypes.c_long
    library.simulated_ops.restype = ctypes.c_char_p
    library.simulated_waited.argtypes = [ctypes.c_char_p]
    return library


def install(torch: Any, library: ctypes.CDLL) -> None:
    """Make this torch believe in the library's device."""
    devices = Devices(torch, library)
    # Under CUDA's own name, with data: a device by another name leaves the libraries' CUDA branches untried, and fake
    # tensors have no loss and no norm, which each step reads.
    for name, value in {**devices.answers(), **_memory_answers(devices), **_stream_answers(devices)}.items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.memory, name):
            setattr(torch.cuda.memory, name, value)
    for name, value in devices.low_level_answers().items():
        setattr(torch._C, name, value)
    torch.cuda.streams.Stream, torch.cuda.streams.Event = torch.cuda.Stream, torch.cuda.Event
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = torch.cuda.nvtx.mark = lambda *unused, **options: 0
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = lambda: True
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    # inductor would write kernels for Triton; this cuts and decomposes the graphs as it does.
    torch.compile = partial(torch.compile, backend="aot_eager_decomp_partition")
    _serve_storages(torch)
    replace_nccl(torch)
    _count(_waits, library.simulated_on_wait)
    _count(_races, library.simulated_on_race)
    _name_lines(library.simulated_on_copy)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # gloo, which computes for NCCL here, frees the last tensors in a thread of its own, after the process was told
        # that they are there. In an interpreter that ends that aborts the process (torch 2.13, ProcessGroupGloo.cpp).
        atexit.register(time.sleep, SECONDS_TO_FREE)
    if folder := os.environ.get("SIMULATED_GPUS_REPORT"):
        atexit.register(lambda: _report_of_rank(torch, library, Path(folder)))


class Devices:
    """The simulated GPUs of this process, and the current one."""

    def __init__(self, torch: Any, library: ctypes.CDLL) -> None:
        self.torch, self.library = torch, library
        self.count = _visible(int(os.environ["SIMULATED_GPUS"]), os.environ.get("CUDA_VISIBLE_DEVICES"))
        os.environ["SIMULATED_GPUS"] = str(self.count)  # the library asks too, when it is first used
        self.properties = types.SimpleNamespace(
            name=NAME,
            major=9,
            minor=0,
            multi_processor_count=132,
            total_memory=library.simulated_capacity(),
            warp_size=32,
            is_integrated=False,
            gcnArchName="",
            uuid="simulated",
            pci_bus_id=0,
            L2_cache_size=50 << 20,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=2048,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=232448,
            shared_memory_per_multiprocessor=233472,
        )

    def index(self, device: Any = None) -> int:
        if device is None or (isinstance(device, int) and device < 0):
            return self.library.simulated_get_device()
        if isinstance(device, int):
            return device
        index = self.torch.device(device).index
        return self.library.simulated_get_device() if index is None else index

    def set_device(self, device: Any) -> None:
        index = self.index(device)
        if index >= self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal: {index} of {self.count} (simulated)")
        self.library.simulated_set_device(index)

    def exchange(self, index: int) -> int:
        """Make a device current, unless its index is negative, and return the device before."""
        before = self.library.simulated_get_device()
        if index >= 0:
            self.set_device(index)
        return before

    def synchronize(self, device: Any = None) -> None:
        self.library.simulated_waited(b"torch.cuda.synchronize")
        self.library.simulated_synchronize()

    def answers(self) -> dict[str, Any]:
        """Replacements of attributes of torch.cuda."""
        return {
            "_initialized": True,
            "_lazy_init": lambda: None,
            "_lazy_call": lambda call, **options: call(),
            "_is_compiled": lambda: True,
            "_is_in_bad_fork": lambda: False,
            "_check_cubins": lambda: None,
            "_device_count_nvml": lambda: self.count,
            "_get_device": lambda index: self.torch.device("cuda", self.index(index)),
            "_exchange_device": self.exchange,
            "_maybe_exchange_device": lambda index: self.exchange(index),
            "init": lambda: None,
            "is_available": lambda: self.count > 0,
            "is_initialized": lambda: True,
            "device_count": lambda: self.count,
            "current_device": lambda: self.index(),
            "set_device": self.set_device,
            "get_device_name": lambda device=None: NAME,
            "get_device_capability": lambda device=None: (self.properties.major, self.properties.minor),
            "get_device_properties": lambda device=None: self.properties,
            "get_arch_list": lambda: ["sm_80", "sm_90"],
            "is_bf16_supported": lambda including_emulation=True: True,
            "is_tf32_supported": lambda: True,
            "can_device_access_peer": lambda device, peer: True,
            "is_current_stream_capturing": lambda: False,
            "default_generators": (self.torch.default_generator,) * self.count,
            "synchronize": self.synchronize,
        }

    def low_level_answers(self) -> dict[str, Any]:
        """Replacements of attributes of torch._C; dynamo needs a separate function for each name."""
        return {
            "_cuda_getDeviceCount": lambda: self.count,
            "_cuda_isCurrentStreamCapturing": lambda: False,
            "_cuda_getDevice": lambda: self.index(),
            "_cuda_setDevice": lambda index: self.set_device(index),
            "_cuda_exchangeDevice": lambda index: self.exchange(index),
            "_cuda_maybeExchangeDevice": lambda index: self.exchange(index),
            "_cuda_isInBadFork": False,
            "_cuda_getCurrentRawStream": lambda index=0: 0,
        }


def _visible(count: int, text: str | None) -> int:
    """Count the devices that CUDA_VISIBLE_DEVICES names, as CUDA does: up to the first that does not exist; none if a
    device comes twice."""
    if text is None:
        return count
    seen: list[str] = []
    for word in map(str.strip, text.split(",")):
        if not word.isdecimal() or int(word) >= count:
            break
        if word in seen:
            return 0
        seen.append(word)
    return len(seen)


def _memory_answers(devices: Devices) -> dict[str, Any]:
    """Answers about memory. Allocated bytes are counted; reserved bytes, which depend on fragments, are not known, and
    allocated ones stand for them."""
    library = devices.library

    def allocated(device: Any = None) -> int:
        return library.simulated_allocated(devices.index(device))

    def peak(device: Any = None) -> int:
        return library.simulated_peak(devices.index(device))

    def reset(device: Any = None) -> None:
        library.simulated_reset_peak(devices.index(device))

    def stats(device: Any = None) -> dict[str, int]:
        counts: dict[str, int] = collections.defaultdict(int)
        for kind in ("allocated", "active", "reserved", "requested"):
            counts[f"{kind}_bytes.all.current"], counts[f"{kind}_bytes.all.peak"] = allocated(device), peak(device)
        return counts

    def free_and_total(device: Any = None) -> tuple[int, int]:
        return library.simulated_capacity() - allocated(device), library.simulated_capacity()

    return {
        "memory_stats": stats,
        "memory_allocated": allocated,
        "max_memory_allocated": peak,
        "memory_reserved": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "mem_get_info": free_and_total,
    }


def _stream_answers(devices: Devices) -> dict[str, Any]:
    torch, waited = devices.torch, devices.library.simulated_waited

    class Stream(torch.Stream):  # type: ignore[name-defined]
        def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> Any:
            if options:
                return super().__new__(cls, **options)
            return super().__new__(cls, device=torch.device("cuda", devices.index(device)), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        def synchronize(self) -> None:
            waited(b"Stream.synchronize")
            super().synchronize()

    class Event(torch.Event):  # type: ignore[name-defined]
        def __new__(cls, enable_timing: bool = False, **unused: Any) -> Any:
            event = super().__new__(cls, device=torch.device("cuda", devices.index()), enable_timing=True)
            event.has_timing = enable_timing
            return event

        def synchronize(self) -> None:
            waited(b"Event.synchronize")
            super().synchronize()

        def elapsed_time(self, other: Any) -> float:
            if not (self.has_timing and other.has_timing):
                raise RuntimeError("CUDA error: invalid resource handle: an event without timing (simulated)")
            return super().elapsed_time(other)

    class StreamContext:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self._context = _on_stream(torch, self.stream)
            self._context.__enter__()

        def __exit__(self, *error: Any) -> None:
            self._context.__exit__(*error)

    def current(device: Any = None) -> Any:
        stream = torch._C._accelerator_getStream(devices.index(device))
        return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

    def set_stream(stream: Any) -> None:
        if stream is not None:
            torch._C._accelerator_setStream(stream)

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "current_stream": current,
        "default_stream": lambda device=None: Stream(stream_id=0, device_index=devices.index(device), device_type=1),
        "set_stream": set_stream,
    }


@contextlib.contextmanager
def _on_stream(torch: Any, stream: Any) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = torch._C._accelerator_getStream(stream.device_index)
    torch._C._accelerator_setStream(stream)
    try:
        yield
    finally:
        torch._C._accelerator_setStream(before)


def _serve_storages(torch: Any) -> None:
    """Replace the methods of storages that allocate memory by themselves, on devices that they know by name."""
    resize, clone = torch.UntypedStorage.resize_, torch.UntypedStorage.clone

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        storage_bytes = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        torch.ops.simulated_gpus.resize_storage(storage_bytes, int(size))
        return self

    def cloned(self: Any) -> Any:
        if self.device.type != "cuda":
            return clone(self)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self).clone().untyped_storage()

    torch.UntypedStorage.resize_, torch.UntypedStorage.clone = resize_, cloned


def _folder() -> Path:
    return Path(os.environ["SIMULATED_GPUS_LIBRARY"])


def replace_nccl(torch: Any) -> None:
    """Put our process group in the place of NCCL's. On a real GPU, with SHARED_GPU set, several processes share it."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    spec = importlib.util.spec_from_file_location("simulated_nccl", next(_folder().glob("simulated_nccl*.so")))
    assert spec is not None and spec.loader is not None
    simulated_nccl: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(simulated_nccl)
    sys.modules["simulated_nccl"] = simulated_nccl

    class ProcessGroupNCCL(simulated_nccl.ProcessGroupNCCL):
        Options = simulated_nccl.ProcessGroupNCCL.Options

        def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
            self.options = options or self.Options()
            store = c10d.PrefixStore("simulated_nccl", store)
            self._gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=self.options._timeout)
            super().__init__(store, self._gloo, rank, size, self.options)
            _kept_alive.append(self)

        def perform_nocolor_split(self, device: Any) -> None:
            pass

    for module in (c10d, dist):
        setattr(module, "ProcessGroupNCCL", ProcessGroupNCCL)  # noqa: B010
    c10d._NCCL_AVAILABLE = True
    c10d.is_nccl_available = dist.is_nccl_available = lambda: True
    torch.cuda.nccl.version = lambda: (2, 28, 3)
    torch.cuda.nccl.is_available = lambda tensors: True


def _count(seen: collections.Counter, tell: Any) -> None:
    """Count the events that the library reports, by its words, our innermost line and the innermost of all."""

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    def on(why: bytes) -> None:
        ours, innermost = _lines()
        seen[why.decode(), ours, innermost] += 1

    _kept_alive.append(on)
    tell(on)


def _name_lines(tell: Any) -> None:
    """Answer the library when it asks for the line that runs."""

    @ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_char), ctypes.c_int)
    def on(text: Any, size: int) -> None:
        ours, innermost = _lines()
        line = (f"{innermost} (ours {ours})" if ours else innermost).encode()[: size - 1]
        ctypes.memmove(text, line, len(line))

    _kept_alive.append(on)
    tell(on)


def _lines() -> tuple[str | None, str]:
    """Our innermost line that runs in this thread, and the innermost of all."""
    frame: Any = sys._getframe()
    innermost = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__:
            innermost = innermost or f"{name.rpartition('site-packages/')[2]}:{frame.f_lineno}"
            if not any(part in name for part in LIBRARIES):
                return f"{os.path.relpath(name)}:{frame.f_lineno}", innermost
        frame = frame.f_back
    return None, innermost or "a thread of autograd"


def _report_of_rank(torch: Any, library: ctypes.CDLL, folder: Path) -> None:
    """Write the report of a process that has used its devices. A launcher, which sees the same devices, has not."""
    if library.simulated_ops():
        write_report(torch, library, folder)


def write_report(torch: Any, library: ctypes.CDLL, folder: Path) -> None:
    """Write rank_<n>.json: memory, collectives, waits, races and operations of this process's device so far."""
    collectives = sys.modules["simulated_nccl"].counts().items()
    ops = dict(line.rsplit("\t", 1) for line in library.simulated_ops().decode().splitlines())
    counted = {
        name: [{"why": why, "ours": ours, "at": at, "times": n} for (why, ours, at), n in seen.most_common()]
        for name, seen in (("waits", _waits), ("races", _races))
    }
    record = {
        "device": torch.cuda.current_device(),
        "peak_bytes": [library.simulated_peak(i) for i in range(torch.cuda.device_count())],
        "collectives": {name: {"calls": calls, "bytes": size} for name, (calls, size) in collectives},
        "attention": {name: int(times) for name, times in ops.items() if " attention " in name},
        **counted,
        "groups": sys.modules["simulated_nccl"].ranks_of(),
        "asked": sys.modules["simulated_nccl"].asked(),
        "operations": {name: int(times) for name, times in sorted(ops.items()) if " attention " not in name},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank_{os.environ.get('RANK', '0')}.json").write_text(json.dumps(record, indent=1) + "\n")
