"""GPUs as their driver reports them: memory, other processes, links and peer access; and whether torch can use them."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from cookbook.commands.doctor.finding import Finding, failure, ok, warning
from cookbook.commands.shared.labels import Needs
from cookbook.system.console import in_bytes, several
from cookbook.system.gpus import Driver, GpuPair, InstalledGpu
from cookbook.system.hardware import PCIE_X16, find_gpu
from cookbook.system.machine import ALLOCATOR_VARIABLES, allocator_settings, expand_segments

BUSY_SHARE = 0.05
"""Share of a GPU's memory in use before a run starts: more is worth a warning."""
TRIED_BYTES = 64 << 20
"""Size of an allocation that takes several pages of the driver, of 2 MiB each."""
PCIE_WAYS = {10: "one switch", 20: "several switches", 30: "the CPU", 40: "the CPU", 50: "two CPUs"}
"""Ways by nvmlGpuTopologyLevel_t."""
PEER_PROBLEMS = {
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the PCIe topology does not support it",
    4: "disabled by a registry key",
    5: "not supported",
}
"""Reasons by nvmlGpuP2PStatus_t."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The slowest link between two GPUs, over all pairs."""

    kind: str
    """`NVLink`, or PCIe with its way through the machine."""
    gb: float | None
    """GB/s in one direction, by its specification; None if not known."""


def pcie_gb(gpu: InstalledGpu) -> float | None:
    """GB/s in one direction, as the slot is wired."""
    if gpu.pcie_generation not in PCIE_X16 or gpu.pcie_width is None:
        return None
    return PCIE_X16[gpu.pcie_generation] / 1e9 * gpu.pcie_width / 16


def find_link(gpus: list[InstalledGpu], pairs: list[GpuPair]) -> Link | None:
    """The slowest link between the GPUs; None for a single one."""
    if len(gpus) < 2:
        return None
    indices = {gpu.index for gpu in gpus}
    pairs = [pair for pair in pairs if indices.issuperset(pair.gpus)]
    if pairs and all(pair.nvlinks for pair in pairs):
        fewest, most = (of(pair.nvlinks for pair in pairs) for of in (min, max))
        rates = [gpu.nvlink_gb * fewest for gpu in gpus if gpu.nvlink_gb]
        sheets = [find_gpu(gpu.name) for gpu in gpus]  # data sheets, where the driver does not know
        rates = rates or [sheet.nvlink / 1e9 * fewest / most for sheet in sheets if sheet and sheet.nvlink]
        return Link(kind=f"NVLink ({fewest} links)", gb=min(rates, default=None))
    way = PCIE_WAYS.get(max((pair.ancestor or 0 for pair in pairs if not pair.nvlinks), default=0))
    speeds = [pcie_gb(gpu) for gpu in gpus]
    known = [speed for speed in speeds if speed is not None]
    return Link(kind=f"PCIe through {way}" if way else "PCIe", gb=min(known) if len(known) == len(gpus) else None)


def check_gpus(driver: Driver) -> Iterator[Finding]:
    """GPUs, their memory, and who else uses them."""
    gpus = driver.gpus
    if not driver.is_loaded:
        yield failure("GPUs", "the NVIDIA driver is installed but not loaded", "reboot, or reinstall the driver")
    elif not gpus:
        yield ok("GPUs", "no GPU: runs use the CPU")
    elif not gpus[0].uuid:
        text = f"{len(gpus)} in /dev, without the driver's library: links and other processes are not known"
        yield warning("GPUs", text, "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility")
        return
    kinds = {(gpu.name, gpu.total_bytes) for gpu in gpus}
    for name, total in sorted(kinds):
        count = sum((gpu.name, gpu.total_bytes) == (name, total) for gpu in gpus)
        yield ok("GPUs", f"{count} x {name}, {in_bytes(total)}, driver {gpus[0].driver}")
    if len(kinds) > 1:
        text = "GPUs of several kinds: the smallest memory and the slowest GPU limit all"
        yield warning("GPUs", text, "export CUDA_VISIBLE_DEVICES=... with those of one kind")
    for gpu in gpus:
        if gpu.processes or gpu.used_bytes > BUSY_SHARE * gpu.total_bytes:
            who = f" by {', '.join(gpu.processes)}" if gpu.processes else ", by no process that the driver shows"
            free = in_bytes(gpu.total_bytes - gpu.used_bytes)
            text = f"GPU {gpu.index}: {in_bytes(gpu.used_bytes)} in use{who}; {free} free"
            others = ",".join(str(other.index) for other in gpus if other.index != gpu.index)
            yield warning("GPUs", text, f"end it, or export CUDA_VISIBLE_DEVICES={others}")


def check_needs(needs: Needs, gpus: list[InstalledGpu], used: int, recipe: str) -> Iterator[Finding]:
    """Compare the needs on a recipe's label with the GPUs that a run would see.

    Args:
        gpus: those that the driver describes.
    """
    if not needs.gpus_each:
        return
    many = f"{needs.num_machines} machines, each " if needs.num_machines > 1 else ""
    asked = f"{recipe} needs {many}{several(needs.gpus_each, 'GPU')} of {needs.gpu_gb} GB"
    least = min((gpu.total_bytes for gpu in gpus), default=None)
    if used < needs.gpus_each:
        yield failure("GPUs", f"{asked}; a run would see {used or 'none'}", f"cookbook rehearse {recipe}")
    elif least is not None and needs.gpu_gb and least < needs.gpu_gb * 1e9:
        text = f"{asked}; the smallest here has {in_bytes(least)}"
        yield warning("GPUs", text, f"cookbook plan {recipe} shows which strategy fits")


def check_links(driver: Driver) -> Iterator[Finding]:
    """Links between GPUs, peer access, and PCIe lanes."""
    link = find_link(driver.gpus, driver.pairs)
    if link is not None:
        rate = f", {link.gb:.0f} GB/s in one direction" if link.gb is not None else ""
        # A measurement is left to nccl-tests, whose bus bandwidth is comparable with this rate.
        yield ok(
            "links", f"{link.kind}{rate}; nccl-tests measure it: all_reduce_perf -b 1G -e 1G -g {len(driver.gpus)}"
        )
    refused = [pair for pair in driver.pairs if pair.peer_status]
    if refused:
        first, second = refused[0].gpus
        more = f" and {len(refused) - 1} more pairs" if len(refused) > 1 else ""
        reason = PEER_PROBLEMS.get(refused[0].peer_status or 0, "reason not known")
        text = f"no peer access between GPU {first} and {second}{more} ({reason})"
        if link is not None and link.kind.startswith("NVLink"):
            remedy = "nvidia-smi -q | grep -i fabric, and systemctl status nvidia-fabricmanager"
            yield warning("links", f"{text}, in spite of NVLink", remedy)
        else:
            yield ok("links", f"{text}: NCCL goes through host memory")
    elif any(pair.peer_status == 0 for pair in driver.pairs):
        yield ok("links", "every GPU can reach every other one's memory")
    for gpu in driver.gpus:
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            text = f"GPU {gpu.index} has {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes"
            yield warning("links", text, "reseat the card, or use another slot")


def try_torch(mixed_precision: str) -> Iterator[Finding]:
    """One product on each GPU that torch sees, against the CPU's."""
    import torch

    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
            reason = "no reason given"
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
        yield failure("torch", f"cannot use the GPUs: {reason}", "nvidia-smi; then a torch build for that driver")
        return
    left = torch.arange(64.0).reshape(8, 8)
    for index in range(torch.cuda.device_count()):
        here = left.to(f"cuda:{index}")
        if not torch.equal((here @ here).cpu(), left @ left):
            yield failure("torch", f"GPU {index} computes a wrong product", "dmesg | grep -i xid; have it replaced")
        if mixed_precision == "bf16" and torch.cuda.get_device_capability(index) < (8, 0):
            text = f"GPU {index} ({torch.cuda.get_device_name(index)}) has no bf16"
            yield failure("torch", text, "mixed_precision: fp16 in the recipe")
    yield ok("torch", f"computes on {torch.cuda.device_count()} GPUs")


def try_allocator() -> Iterator[Finding]:
    """An allocation on each GPU as a run allocates: with expandable segments, unless a variable of the user says
    otherwise. In a process that has not imported torch.
    """
    expand_segments()
    import torch

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for index in range(torch.cuda.device_count()):
            try:
                torch.zeros(TRIED_BYTES, dtype=torch.uint8, device=f"cuda:{index}")
                torch.cuda.synchronize(index)
            except RuntimeError as error:
                text = f"GPU {index} does not allocate with {allocator_settings()}: {str(error).splitlines()[0]}"
                yield warning("allocator", text, f"export {ALLOCATOR_VARIABLES[-1]}=expandable_segments:False")
                return
    messages = [str(caught.message).splitlines()[0] for caught in told if "expandable" in str(caught.message)]
    if messages:
        yield ok("allocator", f"without expandable segments, which are not supported here: {messages[0]}")
    else:
        yield ok("allocator", f"allocates with {allocator_settings()}")
