"""Abilities of GPUs, links and machines, from data sheets. Plain values, no torch."""

import difflib
import math
import os
import re
from dataclasses import dataclass, replace
from typing import Any

from cookbook.system.files import RecipeError
from cookbook.system.gpus import InstalledGpu, read_driver, visible_gpus

GIB = 2**30
MAX_GPUS = 16
"""Most GPUs of one machine: a DGX-2 has as many. The trays of a larger NVLink domain (GB200 NVL72) are machines."""
USUAL_GPUS = 8
"""Most GPUs of one machine, but for few: HGX and DGX boards since the A100, AMD's platforms, cloud machines."""
MAX_MACHINES = 8192

DRIVER_RESERVE_GIB = 0.75
"""Memory that nvidia-smi reports and torch never gets: 0.25 GiB on a T4 (15.00 and 14.75), 0.35 on an RTX
4090, 0.59 on an L40S, 0.75 on an A100 80GB, as torch's own out-of-memory messages state the capacity."""

HOST_AT_LEAST = 0.5
"""Host memory as a share of all GPU memory of a machine, where it is not given: rented ones with little of
it have two thirds (AWS G5, G6 and G6e: 16, 16 and 32 GiB beside a GPU of 24, 24 and 48 GB), and a system takes some."""

PCIE_X16 = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}
"""Bytes/s in each direction by generation: 8, 16, 32 GT/s x 16 lanes x 128/130 / 8 (PCI-SIG base specifications)."""

DISK_READ, DISK_WRITE = (2e9, 7e9), (1e9, 4e9)
"""Assumed of one NVMe drive per machine, bytes/s: from a cloud volume to the sheet of a PCIe 4 drive (Samsung PM9A3:
6.9 and 4.1 GB/s). The doctor measures; a machine with several drives in one volume is faster."""


def in_gib(num_bytes: float, most: float | None = None) -> str:
    """Bytes in GiB, to two digits below 10 and whole from 10 on (<0.1, 3.4, 26, 1,314): a forecast is no more exact.

    Args:
        most: the end of a range: 3.4 to 26; left out where it reads the same.
    """
    value = num_bytes / GIB
    least = f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.1 else "<0.1"
    return least if most is None or least == in_gib(most) else f"{least} to {in_gib(most)}"


def enough_gib(num_bytes: float) -> str:
    """Room that a machine must have, as `in_gib` but rounded up: whoever adds what this says has no less."""
    tenths = math.ceil(10 * num_bytes / GIB)
    return f"{math.ceil(tenths / 10):,}" if tenths >= 100 else f"{tenths / 10:.1f}"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One model of GPU. Rates per second, dense (the sheets' large figures are with sparsity), each way of a link."""

    name: str
    words: tuple[str, ...]
    """All of them in a name mean this GPU, unless an earlier row matched."""
    generation: str
    sold_gb: int
    """Memory in its name: the 80 of "H100 80GB"."""
    memory_mib: int
    """Memory as nvidia-smi reports it: less than sold where ECC takes a sixteenth of GDDR6."""
    half_flops: float | None
    """bf16 with float32 sums; fp16 for a GPU that has no bf16. None: nobody states it."""
    bandwidth: float
    """Bytes to or from its own memory."""
    nvlink: float | None
    """Bytes to all other GPUs of the machine together (of AMD's, over Infinity Fabric); None: PCIe. A bridge joins two
    cards at most, and is an option (A100 PCIe, A6000, RTX 3090, H100 PCIe, H100 NVL): those count as PCIe."""
    host_link: float
    """Bytes to host memory: 16 lanes of PCIe, or NVLink-C2C to a Grace CPU."""
    has_bf16: bool
    sheet: str
    """Source of peak, bandwidth and links."""

    @property
    def has_fp8(self) -> bool:
        """True if `mixed_precision: fp8` serves the GPU; see `machine.FP8_CAPABILITY`."""
        return self.generation in ("ada", "hopper", "blackwell")

    @property
    def is_amd(self) -> bool:
        """Runs ROCm in CUDA's place."""
        return self.generation.startswith("cdna")

    @property
    def has_grouped_products(self) -> bool:
        """True if torch multiplies with all experts in one kernel, in bf16, and not in a loop over them (2.13,
        aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda: compute capabilities 9 and 10, and CDNA 3)."""
        return self.generation in ("hopper", "cdna3") or self.name in ("B200", "GB200", "B300", "GB300")

    @property
    def memory_gib(self) -> float:
        """Memory as the driver reports it."""
        return self.memory_mib / 1024

    @property
    def usable_gib(self) -> float:
        """Memory that torch can have."""
        return self.memory_gib - DRIVER_RESERVE_GIB


# Rates in TFLOP/s and GB/s. Reported memory: thundergolfer.com/blog/nvidia-gpu-memory-capacity for T4, A10, A100, L4,
# L40S, H100 and H200, nvidia-smi tables in public issues and logs for the others, and torch's own "total capacity" for
# AMD's (191.98, 255.98 and 287.98 GiB) and the GB10 (119.70 GiB). NVIDIA published no sheet of the H20, H800 and A800:
# theirs are the figures of machines that are sold with them. RTX PRO 6000 is the Workstation Edition, whose peak others
# state; the Server Edition is slower. A peak that nobody states is left out (P100: no unit for fp16 products with
# float32 sums; GB10: FP4 with sparsity alone). A word with several spellings has them with slashes. Earlier rows win.
_TABLE = """
name           | words           | generation | sold | MiB    | half  | memory | NVLink | host  | sheet
P100-PCIe      | P100 PCIE       | pascal     | 16   | 16280  |       | 732    |        | PCIe3 | P100, 2016
P100           | P100            | pascal     | 16   | 16280  |       | 732    | 80     | PCIe3 | P100, 2016
V100-PCIe-32GB | V100 PCIE       | volta      | 32   | 32768  | 112   | 900    |        | PCIe3 | V100, January 2020
V100-32GB      | V100            | volta      | 32   | 32768  | 125   | 900    | 150    | PCIe3 | V100, January 2020
T4             | T4              | turing     | 16   | 15360  | 65    | 300    |        | PCIe3 | T4, March 2019
RTX2080Ti      | 2080 TI         | turing     | 11   | 11264  | 53.8  | 616    |        | PCIe3 | paper Turing, 2018
A10G           | A10G            | ampere     | 24   | 23028  | 70    | 600    |        | PCIe4 | A10G (AWS G5), 2021
A10            | A10             | ampere     | 24   | 23028  | 125   | 600    |        | PCIe4 | A10, 2021
A40            | A40             | ampere     | 48   | 46068  | 149.7 | 696    |        | PCIe4 | A40, 2021
A800-PCIe      | A800 PCIE       | ampere     | 80   | 81920  | 312   | 1935   |        | PCIe4 | sellers, 2023
A800           | A800            | ampere     | 80   | 81920  | 312   | 2039   | 200    | PCIe4 | sellers, 2023
A100-PCIe-40GB | A100 PCIE 40GB  | ampere     | 40   | 40960  | 312   | 1555   |        | PCIe4 | A100, June 2021
A100-PCIe-80GB | A100 PCIE       | ampere     | 80   | 81920  | 312   | 1935   |        | PCIe4 | A100, June 2021
A100-40GB      | A100 40GB       | ampere     | 40   | 40960  | 312   | 1555   | 300    | PCIe4 | A100, June 2021
A100-80GB      | A100            | ampere     | 80   | 81920  | 312   | 2039   | 300    | PCIe4 | A100, June 2021
A6000          | A6000           | ampere     | 48   | 49140  | 154.8 | 768    |        | PCIe4 | paper GA102, 2021
RTX3060        | 3060            | ampere     | 12   | 12288  | 25.5  | 360    |        | PCIe4 | from units x clock
RTX3080        | 3080            | ampere     | 10   | 10240  | 59.5  | 760    |        | PCIe4 | paper GA102, 2021
RTX3090        | 3090            | ampere     | 24   | 24576  | 71    | 936    |        | PCIe4 | paper GA102, 2021
L40S           | L40S            | ada        | 48   | 46068  | 362   | 864    |        | PCIe4 | L40S, 2023
L40            | L40             | ada        | 48   | 46068  | 181   | 864    |        | PCIe4 | L40, 2022
L4             | L4              | ada        | 24   | 23034  | 121   | 300    |        | PCIe4 | L4, 2023
RTX6000Ada     | 6000 ADA        | ada        | 48   | 49140  | 364.2 | 960    |        | PCIe4 | RTX 6000 Ada, 2022
RTX4070        | 4070            | ada        | 12   | 12282  | 58.3  | 504    |        | PCIe4 | from units x clock
RTX4080        | 4080            | ada        | 16   | 16376  | 97.5  | 717    |        | PCIe4 | paper Ada, 2023
RTX4090D       | 4090 D          | ada        | 24   | 24564  | 147.1 | 1008   |        | PCIe4 | from units x clock
RTX4090        | 4090            | ada        | 24   | 24564  | 165.2 | 1008   |        | PCIe4 | paper Ada, 2023
RTX5070Ti      | 5070 TI         | blackwell  | 16   | 16303  | 87.9  | 896    |        | PCIe5 | paper RTX 50, 2025
RTX5070        | 5070            | blackwell  | 12   | 12227  | 61.7  | 672    |        | PCIe5 | paper RTX 50, 2025
RTX5080        | 5080            | blackwell  | 16   | 16303  | 112.6 | 960    |        | PCIe5 | paper RTX 50, 2025
RTX5090        | 5090            | blackwell  | 32   | 32607  | 209.5 | 1792   |        | PCIe5 | paper RTX 50, 2025
RTX-PRO-4500   | PRO 4500        | blackwell  | 32   | 32623  | 219.7 | 896    |        | PCIe5 | from technical.city
RTX-PRO-5000   | PRO 5000        | blackwell  | 48   | 48935  | 258   | 1344   |        | PCIe5 | RTX PRO 5000, 2025
RTX-PRO-6000-Max-Q | PRO 6000 MAX Q | blackwell | 96 | 97887 | 438.9 | 1792 |      | PCIe5 | RTX PRO 6000, 2025
RTX-PRO-6000   | PRO 6000        | blackwell  | 96   | 97887  | 503.8 | 1792   |        | PCIe5 | from hmc-tech.com
GB10           | GB10/DGX_SPARK/DGXSPARK | blackwell | 128 | 122573 |  | 273    |        | 300   | DGX Spark, 2025
H800-PCIe      | H800 PCIE       | hopper     | 80   | 81559  | 756   | 2000   |        | PCIe5 | sellers, 2023
H800           | H800            | hopper     | 80   | 81559  | 989   | 3350   | 200    | PCIe5 | sellers, 2023
H100-NVL       | H100 NVL        | hopper     | 94   | 95830  | 835   | 3900   |        | PCIe5 | H100, 2023
H100-PCIe      | H100 PCIE       | hopper     | 80   | 81559  | 756   | 2000   |        | PCIe5 | H100, 2022
H100           | H100            | hopper     | 80   | 81559  | 989   | 3350   | 450    | PCIe5 | H100, 2023
H20            | H20             | hopper     | 96   | 97871  | 148   | 4000   | 450    | PCIe5 | sellers, 2024
H200-NVL       | H200 NVL        | hopper     | 141  | 143771 | 835   | 4800   |        | PCIe5 | H200, 2024
H200           | H200            | hopper     | 141  | 143771 | 989   | 4800   | 450    | PCIe5 | H200, 2024
GH200          | GH200           | hopper     | 96   | 97871  | 989   | 4000   |        | 450   | GH200 with HBM3, 2023
B200           | B200            | blackwell  | 180  | 183359 | 2250  | 8000   | 900    | PCIe5 | HGX and DGX B200, 2024
GB200          | GB200/GB200_NVL | blackwell  | 186  | 189471 | 2500  | 8000   | 900    | 225   | GB200 NVL72, 2024
B300           | B300            | blackwell  | 288  | 275040 | 2250  | 8000   | 900    | PCIe5 | HGX B300, 2025
GB300          | GB300/GB300_NVL | blackwell  | 279  | 284208 | 2500  | 8000   | 900    | 225   | GB300 NVL72, 2025
MI355X         | MI355/MI355X    | cdna4      | 288  | 294892 | 2516  | 8000   | 537    | PCIe5 | AMD MI355X, 2025
MI350X         | MI350/MI350X    | cdna4      | 288  | 294892 | 2307  | 8000   | 537    | PCIe5 | AMD MI350X, 2025
MI325X         | MI325/MI325X    | cdna3      | 256  | 262124 | 1307  | 6000   | 448    | PCIe5 | AMD MI325X, 2024
MI300X         | MI300 X         | cdna3      | 192  | 196588 | 1307  | 5300   | 448    | PCIe5 | AMD MI300X, 2023
"""


def _read(row: str) -> Gpu:
    cells = [cell.strip() for cell in row.split("|")]
    name, words, generation, sold_gb, memory_mib, half, memory, nvlink, host, sheet = cells
    return Gpu(
        name=name,
        words=tuple(words.split()),
        generation=generation,
        sold_gb=int(sold_gb),
        memory_mib=int(memory_mib),
        half_flops=float(half) * 1e12 if half else None,
        bandwidth=float(memory) * 1e9,
        nvlink=float(nvlink) * 1e9 if nvlink else None,
        host_link=PCIE_X16[int(host[-1])] if host.startswith("PCIe") else float(host) * 1e9,
        has_bf16=generation not in ("pascal", "volta", "turing"),
        sheet=_sheet(sheet),
    )


def _sheet(words: str) -> str:
    if words.startswith("paper"):
        return f"NVIDIA white {words}"
    if words.startswith(("sellers", "from")):
        return f"no NVIDIA data sheet; {words}"
    return f"AMD data sheet {words[4:]}" if words.startswith("AMD ") else f"NVIDIA data sheet {words}"


GPUS = tuple(_read(row) for row in _TABLE.strip().splitlines()[1:])

OTHER_GPUS = {"LAPTOP", "MOBILE", "MIG", "TI", "D", "X", "E", "G", "P", "Q", "MAX", "SERVER", "NVL", "PCIE", "SUPER"}
"""Words that make another GPU of a name, unless the row asks for them: an RTX 3090 Ti, a slice of a GPU, an H20-3e."""

ALSO_GB = {"GH200": "480", "B200": "192", "GB200": "192", "GB300": "288"}
"""Other sizes in names of a GPU: what its chips have in all, or, of a GH200, the memory of its CPU."""

NOT_SERVED = {
    r"(GOOGLE|CLOUD)*TPU.*|V\d[EP]|TRILLIUM|IRONWOOD": "a TPU of Google",
    r"(AWS|AMAZON)?(TRAINIUM|TRN|INFERENTIA|INF)\d*.*": "a chip of AWS",
    r"(INTEL)?GAUDI\d?|HPU|HL\d+": "a Gaudi of Intel",
    r"INTEL.*|ARC[A-Z]\d+|PVC": "a GPU of Intel",
    r"APPLE.*|M\d(PRO|MAX|ULTRA)?|MPS|MAC.*": "a chip of Apple",
    r"ASCEND.*|NPU|910[A-D]\d?": "an Ascend of Huawei",
}
"""Accelerators that are neither NVIDIA's nor AMD's, by what people call them, without signs."""


def _tokens(name: str) -> list[str]:
    """`A100-SXM4-80GB` -> A 100 SXM 4 80 GB: letters and digits apart, so that an A1000 is no A100."""
    return re.findall(r"[A-Z]+|\d+", name.upper().replace("RTXPRO", "RTX PRO").replace("MAXQ", "MAX Q"))


def _is_word(word: str, tokens: list[str]) -> bool:
    """Return whether one of the word's spellings is in a name."""
    parts = [_tokens(spelling) for spelling in word.split("/")]
    return any(tokens[i : i + len(part)] == part for part in parts for i in range(len(tokens)))


def _has_words(gpu: Gpu, tokens: list[str]) -> bool:
    return all(_is_word(word, tokens) for word in gpu.words)


def find_gpu(name: str) -> Gpu | None:
    """The row of a GPU by what a driver or a person calls it; None for one that is not in the table.

    A size in the name must be that of the row: an `A100-64GB` is none that we know.
    """
    tokens = _tokens(name)
    sizes = set(re.findall(r"(\d+)\s*GB", name.upper()))
    for gpu in GPUS:
        known = {str(gpu.sold_gb), ALSO_GB.get(gpu.name, "")}
        foreign = OTHER_GPUS.intersection(tokens).difference(*map(_tokens, gpu.words))
        foreign -= {"PCIE"} if gpu.nvlink is None else set()  # what has no other link is that one
        if _has_words(gpu, tokens) and sizes <= known and not foreign:
            return gpu
    return None


def peak_flops(name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name; None for one that is unknown or has no bf16."""
    gpu = find_gpu(name)
    return gpu.half_flops if gpu is not None and gpu.has_bf16 else None


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Machines and GPUs that a run has to itself."""

    text: str
    """The machines as a person writes them."""
    num_machines: int = 1
    gpus_each: int = 0
    """0: the run uses the CPU."""
    gpu: Gpu | None = None
    """None: its speed is not known."""
    usable_gib: float | None = None
    """Memory of each GPU that torch can have; None without a GPU."""
    fabric_gbits: tuple[float, float] = (100, 400)
    """Rate of each GPU's network card, Gb/s: as given, or the range of what clusters have. One card to a GPU, as in
    DGX and HGX machines; one 400 Gb/s card for 8 GPUs is 50."""
    host_gib: float | None = None
    """Memory of each machine; None: not known."""
    nvme_gib: float | None = None
    """Free on the disk for offloading, of each machine; None: not known."""
    note: str = ""
    """Explains how the text was read, where that is not obvious."""

    @property
    def notes(self) -> list[str]:
        """Warnings about them, for the head of a plan."""
        rocm = f"nothing of this project was tried on ROCm: of a {self.gpu.name} all is arithmetic" if self.gpu else ""
        is_given = self.fabric_gbits != Machines.fabric_gbits
        unused = (
            "--fabric is of messages between machines, and there is one" if is_given and self.num_machines == 1 else ""
        )
        notes = [self.note, rocm if self.gpu and self.gpu.is_amd else "", self._kind_note, unused]
        return [note for note in notes if note]

    @property
    def _kind_note(self) -> str:
        """Describe what the figures leave out of a kind of machine."""
        kind = self.gpu.name if self.gpu else ""
        if kind == "GB10":
            return "a GB10 has one memory for GPU and CPU: what is forecast of each must fit together"
        if kind in ("GB200", "GB300") and self.num_machines > 1 and self.fabric_gbits == Machines.fabric_gbits:
            return "machines are taken to be on a network; those of one NVL72 are on NVLink: --fabric 7200"
        return ""

    @property
    def num_gpus(self) -> int:
        return self.num_machines * self.gpus_each

    @property
    def no_speed(self) -> str | None:
        """Why the time of a step can't be forecast; None where it can."""
        if self.gpus_each == 0:
            return "no forecast of time for a CPU"
        if self.gpu is None:
            kinds = [gpu.name for gpu in GPUS if self.usable_gib == _usable_gib(gpu.sold_gb)]
            example = kinds[-1] if kinds else "H100"
            count = re.sub(r"[^x]+$", "", self.text)
            return f"{self.text} gives the memory and not the speed: name the GPU, as in {count}{example}"
        if self.gpu.half_flops is None:
            return f"nobody states the speed of a {self.gpu.name} in 16 bits with float32 sums: no forecast of time"
        return None


def _usable_gib(sold_gb: float) -> float:
    """GiB that torch has of a GPU sold with so many GB: the least of those in the table, else a sixteenth for ECC."""
    same = [gpu.usable_gib for gpu in GPUS if gpu.sold_gb == sold_gb]
    return min(same) if same else sold_gb * 15 / 16 - DRIVER_RESERVE_GIB


def with_room(
    machines: Machines,
    *,
    fabric_gbits: float | None = None,
    host_gib: float | None = None,
    nvme_gib: float | None = None,
) -> Machines:
    """The machines with what is known of their network, memory and disk.

    Raises:
        RecipeError: a number out of range.
    """
    given = {"--fabric": fabric_gbits, "--host-gib": host_gib, "--nvme-gib": nvme_gib}
    if wrong := [
        f"{option} is {value:g}" for option, value in given.items() if value is not None and not 0 < value < 1e6
    ]:
        raise RecipeError([f"{what}; write a number above 0 and below 1e6" for what in wrong])
    known: dict[str, Any] = {"host_gib": host_gib, "nvme_gib": nvme_gib}
    known["fabric_gbits"] = None if fabric_gbits is None else (fabric_gbits, fabric_gbits)
    return replace(machines, **{name: value for name, value in known.items() if value is not None})


def parse_machines(text: str, **room: float | None) -> Machines:
    """`8x80GB`, `H200`, `4xA100-40GB`, `2x8xH100` (machines x GPUs x GPU) or `cpu` -> what they are.

    Args:
        room: as of `with_room`.

    Raises:
        RecipeError: no such GPU, with the nearest name, or a count or size that no machine has.
    """
    plain = re.sub(r"\s*[*×]\s*|(?<=\d)\s*x\s*(?=\w)", "x", " ".join(text.split()))  # noqa: RUF001
    plain = re.sub(r"(?i)(?<=\d) (?=([kmgt]i?)?b\b|g\b)", "", plain)  # 80 GB
    plain = re.sub(r"^(\d{1,2}) ", r"\1x", plain).replace(" ", "-")  # 8 H100; NVIDIA H100 80GB
    shape = re.fullmatch(r"(?i)(?:(\d+)x)?(?:(\d+)x)?([a-z0-9][\w.\-]*)", plain)
    if shape is None:
        raise RecipeError(f"--gpus {text}: not understood; write 8x80GB, 8xH100, 2x8xH100 or cpu")
    first, second, kind = shape.groups()
    machines = with_room(Machines(text=plain), **room)
    if kind.lower() == "cpu" and second is None:
        return replace(machines, text="cpu", num_machines=_count(text, first or "1", "machines", MAX_MACHINES))
    gpu, usable_gib = _gpu_or_size(text, kind)
    note = ""
    if second is None and first and USUAL_GPUS < _size(first) < MAX_MACHINES * USUAL_GPUS + 1:
        first, second, note = _spread(text, int(first), kind)
        machines = replace(machines, text=f"{first}x{second}x{kind}")
    num_machines = 1 if second is None else _count(text, first, "machines", MAX_MACHINES)
    gpus_each = _count(text, second or first or "1", "GPUs to a machine", MAX_GPUS)
    return replace(machines, num_machines=num_machines, gpus_each=gpus_each, gpu=gpu, usable_gib=usable_gib, note=note)


def _spread(text: str, count: int, kind: str) -> tuple[str, str, str]:
    """More GPUs than most machines have, as (machines, GPUs of each, note)."""
    machines, left = divmod(count, USUAL_GPUS)
    as_one = f"one machine with {count} is 1x{count}x{kind}" if count <= MAX_GPUS else ""
    if left:
        each = 4 if count % 4 == 0 else max(size for size in range(1, USUAL_GPUS) if count % size == 0)
        ways = "; ".join(filter(None, (f"write machines x GPUs, as in {count // each}x{each}x{kind}", as_one)))
        raise RecipeError(f"--gpus {text}: how are {count} GPUs spread? Most machines have up to {USUAL_GPUS}; {ways}")
    note = f"{text} is taken for {machines} machines of {USUAL_GPUS}{as_one and '; '}{as_one}"
    return str(machines), str(USUAL_GPUS), note


def _size(digits: str) -> int:
    """A number of many digits is as good as any that is too large."""
    return int(digits[:9])


def _count(text: str, digits: str, what: str, most: int) -> int:
    count = _size(digits)
    if 1 <= count <= most:
        return count
    raise RecipeError(f"--gpus {text}: {digits} {what}; write 1 to {most}")


SIZES = ("GB", "GIB", "G")


def _check_served(text: str, kind: str) -> None:
    plain = "".join(_tokens(kind))
    for pattern, what in NOT_SERVED.items():
        if re.fullmatch(pattern, plain):
            needs = "training here needs GPUs of NVIDIA, or AMD's with ROCm"
            raise RecipeError(f"--gpus {text}: {kind} is {what}; {needs}")


def _gpu_or_size(text: str, kind: str) -> tuple[Gpu | None, float]:
    _check_served(text, kind)
    size = re.fullmatch(r"(?i)(\d+(?:\.\d+)?)((?:[kmgt]i?)?b|g|)", kind)
    if size and (size[2] or find_gpu(kind) is None):
        if size[2].upper() not in SIZES:
            raise RecipeError(f"--gpus {text}: {kind} is no memory of a GPU; write its GB, as in 8x80GB")
        sold_gb = float(size[1])
        if not 4 <= sold_gb <= 300:
            raise RecipeError(f"--gpus {text}: no GPU has {size[1]} GB; write what one has, as in 8x80GB")
        return None, _usable_gib(sold_gb)
    if counted := re.fullmatch(r"(?i)(\d{1,3})-?([a-z].*)|([a-z].*?)-?x-?(\d{1,3})", kind):
        number, name = counted[1] or counted[4], counted[2] or counted[3]
        if find_gpu(name) is not None and (counted[1] or find_gpu(kind) is None):
            raise RecipeError(f"--gpus {text}: not understood; write the number of GPUs first, as in {number}x{name}")
    gpu = find_gpu(kind)
    if gpu is None:
        names = {gpu.name.upper(): gpu.name for gpu in GPUS}
        close = _nearest(kind.upper(), list(names))
        hint = f"did you mean {names[close]}?" if close else f"known here: {', '.join(names.values())}."
        if akin := next((gpu for gpu in GPUS if _has_words(gpu, _tokens(kind))), None):  # an RTX 4080 SUPER
            hint = f"did you mean {akin.name}, of {akin.sold_gb} GB?"
        raise RecipeError(f"--gpus {text}: no GPU {kind} in the table; {hint} Or write its memory, as in 8x80GB")
    return gpu, gpu.usable_gib


def _nearest(kind: str, names: list[str]) -> str | None:
    """A name that may have been meant: one with a slip of the pen, that of the same letters and the nearest number (for
    B100 it is B200 and not P100), or one that looks alike.
    """

    def alike(cutoff: float) -> list[str]:
        close = difflib.get_close_matches(kind, names, n=3, cutoff=cutoff)
        return sorted(close, key=lambda name: (abs(len(name) - len(kind)), name[0] != kind[0]))

    family: list[tuple[float, int, str]] = []
    if written := re.fullmatch(r"([A-Z]+)([1-9]\d*)", kind):
        for name in names:
            if match := re.match(rf"{written[1]}(\d+)", name):
                less, more = sorted((int(written[2]), int(match[1])))
                family.append((more / less, len(name), name))
    return next(iter([*alike(0.85), *(name for _, _, name in sorted(family)), *alike(0.6)]), None)


def from_driver(gpus: list[InstalledGpu], host_gib: float | None = None) -> Machines:
    """One machine with these GPUs, of known memory. Of different ones the smallest counts, and no speed is known."""
    if not gpus:
        return Machines(text="cpu", host_gib=host_gib)
    names = {gpu.name for gpu in gpus}
    gpu = find_gpu(next(iter(names))) if len(names) == 1 else None
    smallest = min(gpu.total_bytes for gpu in gpus) / GIB
    kind = gpu.name if gpu else f"{smallest:.0f}GB"
    return Machines(
        text=f"{len(gpus)}x{kind}",
        gpus_each=len(gpus),
        gpu=gpu,
        usable_gib=smallest - DRIVER_RESERVE_GIB,
        host_gib=host_gib,
    )


def this_machine() -> Machines:
    """This machine, with the GPUs that CUDA_VISIBLE_DEVICES leaves visible.

    Raises:
        RecipeError: the driver does not answer, or does not know the memory of a GPU.
    """
    host_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    gpus = visible_gpus(read_driver().gpus)
    if not all(gpu.total_bytes for gpu in gpus):
        count = len(gpus)
        raise RecipeError(f"the driver does not report the memory of all {count} GPUs here; write --gpus 8xH100")
    return from_driver(gpus, host_gib)
