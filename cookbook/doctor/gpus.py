"""GPUs by what nvidia-smi prints: memory, who else uses them, links and peer access; and whether torch can use them."""

import csv
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cookbook.doctor.finding import Finding, failure, in_bytes, ok, warning
from cookbook.gpus import QUERY, InstalledGpu, parse_gpus, unnamed_gpus
from cookbook.hardware import PCIE_X16, find_gpu
from cookbook.library import Needs

COMMANDS = {
    "gpus": QUERY,
    "processes": ["--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits"],
    "topology": ["topo", "-m"],
    "peers": ["topo", "-p2p", "r"],
    "nvlink": ["nvlink", "-s"],
}
BUSY_SHARE = 0.05
"""Of a GPU's memory in use before a run starts: more is worth a word."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The slowest way between two GPUs, over all pairs."""

    kind: str
    """`NVLink`, or PCIe with its way through the machine."""
    gb: float | None
    """GB/s in one direction, by its specification; None if not known."""


def read_gpus() -> Iterator[dict[str, str]]:
    """What nvidia-smi says, unread, a piece at a time; a first piece `absent` or `broken` where it says nothing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield {"absent": str(len(unnamed_gpus()))}
        return
    for name, arguments in COMMANDS.items():
        done = subprocess.run([program, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            yield {name: done.stdout}
        elif name == "gpus":
            said = (done.stdout + done.stderr).strip() or f"exit code {done.returncode}"
            yield {"absent": "0"} if "No devices were found" in said else {"broken": said.splitlines()[0]}
            return


def parse_processes(text: str) -> dict[str, list[str]]:
    """GPU uuid -> `name (pid)` of each process that computes on it."""
    found: dict[str, list[str]] = {}
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == 4:
            found.setdefault(row[0].strip(), []).append(f"{Path(row[2].strip()).name} ({row[1].strip()})")
    return found


def parse_matrix(text: str) -> dict[tuple[int, int], str]:
    """A matrix of `nvidia-smi topo`: (from, to) -> its word, for pairs of GPUs. Columns of network cards are left."""
    columns: list[str] = []
    found: dict[tuple[int, int], str] = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():  # the headings are underlined on some drivers
        words = line.split()
        if not columns and words[:1] == ["GPU0"]:
            is_row = len(words) > 1 and not words[1].startswith("GPU")
            columns = ["GPU0"] if is_row else [word for word in words if re.fullmatch(r"GPU\d+|NIC\d+|mlx\S+", word)]
            if not is_row:
                continue
        if columns and words and re.fullmatch(r"GPU\d+", words[0]):
            for name, word in zip(columns, words[1:], strict=False):
                if name.startswith("GPU") and name != words[0]:
                    found[int(words[0][3:]), int(name[3:])] = word
        elif found and not words:
            break  # the legend follows
    return found


def parse_nvlink(text: str) -> dict[int, float]:
    """GPU -> GB/s in one direction over all its NVLinks together."""
    found: dict[int, float] = {}
    gpu = None
    for line in text.splitlines():
        if heading := re.match(r"GPU (\d+):", line):
            gpu = int(heading.group(1))
        elif gpu is not None and (rate := re.search(r"Link \d+: ([\d.]+) GB/s", line)):
            found[gpu] = found.get(gpu, 0.0) + float(rate.group(1))
    return found


def pcie_gb(gpu: InstalledGpu) -> float | None:
    """GB/s in one direction, as the slot is wired."""
    if gpu.pcie_generation not in PCIE_X16 or gpu.pcie_width is None:
        return None
    return PCIE_X16[gpu.pcie_generation] / 1e9 * gpu.pcie_width / 16


def find_link(gpus: list[InstalledGpu], topology: dict[tuple[int, int], str], nvlink: dict[int, float]) -> Link | None:
    """The slowest link between the GPUs; None for a single one."""
    if len(gpus) < 2:
        return None
    indexes = {gpu.index for gpu in gpus}
    words = {word for pair, word in topology.items() if indexes.issuperset(pair)}
    if words and all(re.fullmatch(r"NV\d+", word) for word in words):
        fewest = min(int(word[2:]) for word in words)
        known = [find_gpu(gpu.name) for gpu in gpus]  # by data sheet, where the driver does not say
        rates = [nvlink[gpu.index] for gpu in gpus if gpu.index in nvlink]
        rates = rates or [one.nvlink / 1e9 for one in known if one is not None and one.nvlink]
        most = max(int(word[2:]) for word in words)
        return Link(kind=f"NVLink ({fewest} links)", gb=min(rates) * fewest / most if rates else None)
    ways = {
        "PIX": "one switch",
        "PXB": "several switches",
        "PHB": "the CPU",
        "NODE": "the CPU",
        "SYS": "two CPUs",
    }
    way = next((ways[word] for word in reversed(ways) if word in words), None)
    speeds = [pcie_gb(gpu) for gpu in gpus]
    slowest = min((speed for speed in speeds if speed is not None), default=None)
    return Link(kind=f"PCIe through {way}" if way else "PCIe", gb=None if None in speeds else slowest)


def check_gpus(said: dict[str, str]) -> Iterator[Finding]:
    """GPUs, their memory and company, from what `read_gpus` yields."""
    if "broken" in said:
        yield failure("GPUs", f"nvidia-smi: {said['broken']}", "reboot, or install the driver anew")
        return
    if "absent" in said:
        count = int(said["absent"])
        if count:
            says = f"{count} in /dev, but nvidia-smi is not installed: links and other processes are not known"
            yield warning("GPUs", says, "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility")
        else:
            yield ok("GPUs", "no GPU: runs use the CPU")
        return
    gpus, processes = parse_gpus(said.get("gpus", "")), parse_processes(said.get("processes", ""))
    kinds = {(gpu.name, gpu.total_bytes) for gpu in gpus}
    for name, total in sorted(kinds):
        count = sum((gpu.name, gpu.total_bytes) == (name, total) for gpu in gpus)
        yield ok("GPUs", f"{count} x {name}, {in_bytes(total)}, driver {gpus[0].driver}")
    if len(kinds) > 1:
        says = "unlike GPUs: the smallest memory and the slowest GPU hold for all"
        yield warning("GPUs", says, "export CUDA_VISIBLE_DEVICES=... with those of one kind")
    for gpu in gpus:
        company = processes.get(gpu.uuid, [])
        if company or gpu.used_bytes > BUSY_SHARE * gpu.total_bytes:
            who = f" by {', '.join(company)}" if company else ", by no process that nvidia-smi shows"
            free = in_bytes(gpu.total_bytes - gpu.used_bytes)
            says = f"GPU {gpu.index}: {in_bytes(gpu.used_bytes)} in use{who}; {free} free"
            others = ",".join(str(other.index) for other in gpus if other.index != gpu.index)
            yield warning("GPUs", says, f"end it, or export CUDA_VISIBLE_DEVICES={others}")


def check_needs(needs: Needs, gpus: list[InstalledGpu], used: int, recipe: str) -> Iterator[Finding]:
    """What the label of a recipe asks for, against the GPUs that a run would see.

    Args:
        gpus: those of them that nvidia-smi describes.
    """
    if not needs.num_gpus:
        return
    asked = f"{recipe} needs {needs.num_gpus} GPU{'s' if needs.num_gpus > 1 else ''} of {needs.gpu_gb} GB"
    least = min((gpu.total_bytes for gpu in gpus), default=None)
    if used < needs.num_gpus:
        yield failure("GPUs", f"{asked}; a run would see {used or 'none'}", f"make rehearse RECIPE={recipe}")
    elif least is not None and needs.gpu_gb and least < needs.gpu_gb * 1e9:
        says = f"{asked}; the smallest here has {in_bytes(least)}"
        yield warning("GPUs", says, f"python -m cookbook plan {recipe} tells which strategy fits")


def check_links(said: dict[str, str]) -> Iterator[Finding]:
    """Links between GPUs, peer access, and PCIe lanes."""
    gpus = parse_gpus(said.get("gpus", ""))
    link = find_link(gpus, parse_matrix(said.get("topology", "")), parse_nvlink(said.get("nvlink", "")))
    if link is not None:
        rate = f", {link.gb:.0f} GB/s in one direction" if link.gb is not None else ""
        yield ok("links", f"{link.kind}{rate}")
    peers = parse_matrix(said.get("peers", ""))
    refused = sorted(pair for pair, word in peers.items() if word != "OK" and pair[0] < pair[1])
    if refused:
        first = f"GPU {refused[0][0]} and {refused[0][1]}"
        more = f" and {len(refused) - 1} more pairs" if len(refused) > 1 else ""
        reason = peers[refused[0]]
        if link is not None and link.kind.startswith("NVLink"):
            says = f"no peer access between {first}{more} ({reason}), in spite of NVLink"
            yield warning("links", says, "nvidia-smi -q | grep -i fabric, and systemctl status nvidia-fabricmanager")
        else:
            yield ok("links", f"no peer access between {first}{more} ({reason}): NCCL goes through host memory")
    elif peers:
        yield ok("links", "every GPU can reach every other one's memory")
    for gpu in gpus:
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            says = f"GPU {gpu.index} has {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes"
            yield warning("links", says, "seat the card anew, or use another slot")


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
            says = f"GPU {index} ({torch.cuda.get_device_name(index)}) has no bf16"
            yield failure("torch", says, "mixed_precision: fp16 in the recipe")
    yield ok("torch", f"computes on {torch.cuda.device_count()} GPUs")
