"""The comment at the top of a recipe: what it is, how to run it, and the hardware that it needs."""

import re
from dataclasses import dataclass
from pathlib import Path

from cookbook.config.recipe import RECIPES, load_recipe
from cookbook.system.hardware import parse_machines
from cookbook.system.shipped import path_from_here, starts

LABEL = ("What", "Run", "Needs", "Fits", "Measured", "Settings")


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The hardware that a label asks for, of each machine; None where it names none."""

    gpus_each: int | None
    gpu_gb: int | None
    host_gb: int | None = None
    nvme_gb: int | None = None
    num_machines: int = 1

    @property
    def num_gpus(self) -> int | None:
        """GPUs of all machines together."""
        return self.gpus_each and self.num_machines * self.gpus_each

    @property
    def machine(self) -> str:
        """Text of the machine in the form of a label's `Fits` and of `plan --gpus`."""
        return f"{f'{self.num_machines}x' * (self.num_machines > 1)}{self.gpus_each}x{self.gpu_gb}GB"

    def num_local(self, num_processes: int) -> int | None:
        """Processes of a machine where there is one for each GPU; None: another number, of which nothing is known."""
        return self.gpus_each if num_processes == self.num_gpus else None


def recipe_files() -> list[Path]:
    """Every recipe, here and shipped, as `path_from_here` reaches it."""
    names = {path.relative_to(start) for start in starts() for path in (start / RECIPES).rglob("*.yaml")}
    return [Path(path_from_here(str(name))) for name in sorted(names)]


def read_label(path: Path) -> dict[str, str]:
    """The comment at the top of a recipe, by part (`Needs`, `Run`, ...); text before the first part is `What`."""
    parts: dict[str, list[str]] = {"What": []}
    word = "What"
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "yaml-language-server" in line:
            continue
        text = line.removeprefix("#").strip()
        match = re.match(r"([A-Z][a-z]+):(?:\s+|$)", text)
        if match and match.group(1) in LABEL:
            word, text = match.group(1), text[match.end() :]
        parts.setdefault(word, []).append(text)
    return {word: " ".join(filter(None, texts)) for word, texts in parts.items()}


def read_needs(label: dict[str, str]) -> Needs:
    """`Needs: 4 machines, each 8 GPUs of 80 GB, 512 GB of host memory, 2,000 GB of NVMe disk. ...` as numbers."""
    match = re.match(
        r"(?:(\d+) machines, each )?(\d+) GPUs? of (\d+) GB"
        r"(?:, ([\d,]+) GB of host memory)?(?:, ([\d,]+) GB of NVMe)?",
        label.get("Needs", ""),
    )
    if match is None:
        return Needs(gpus_each=None, gpu_gb=None)
    count, gpus, gpu, host, nvme = (int(digits.replace(",", "")) if digits else None for digits in match.groups())
    return Needs(gpus_each=gpus, gpu_gb=gpu, host_gb=host, nvme_gb=nvme, num_machines=count or 1)


def read_fits(label: dict[str, str]) -> dict[str, str]:
    """`Fits: ... 4x80GB zero3 52, fsdp2 47` as {"4x80GB": "zero3 52, fsdp2 47"}."""
    return dict(re.findall(r"(\S+GB) +(.*?)(?= +\S+GB |$)", label.get("Fits", "")))


def gpus_needed(label: dict[str, str], strategy: str) -> int:
    """The smallest number of GPUs on which a recipe fits under a strategy, by its label's `Needs` and `Fits`; 0 if it
    needs none.
    """
    fitting = [name for name, text in read_fits(label).items() if re.search(rf"\b{re.escape(strategy)} \d", text)]
    return min([read_needs(label).num_gpus or 0, *(parse_machines(name).num_gpus for name in fitting)])


def what_it_takes(path: Path) -> str:
    """Say what a recipe needs, and list the alternatives, for a machine that cannot train it."""
    label = read_label(path)
    lines = [f"{path} needs {label.get('Needs', 'hardware that its label does not name')}", "Instead, here:"]
    lines.append(f"  cookbook rehearse {path}    the same strategy and kind of model, tiny, on simulated GPUs")
    lines.append(f"  cookbook launch {RECIPES / 'quickstart.yaml'}    a small model")
    fits = [f"  {name:9} {text}" for name, text in read_fits(label).items()]
    if fits:
        lines.append(f"What fits (--strategy ...), in {label['Fits'].split('. ')[0]}:")
    smaller = [f"  cookbook launch {other}    {what}" for other, what in _smaller(path, read_needs(label))]
    return "\n".join([*lines, *fits, *(["On less hardware:"] if smaller else []), *smaller])


def _smaller(path: Path, needs: Needs) -> list[tuple[Path, str]]:
    """Up to three recipes with the same objective for less hardware, same folder first."""
    objective, fitting = load_recipe(path).objective.name, []
    for other in recipe_files():
        other_needs = read_needs(read_label(other))
        if None in (other_needs.num_gpus, other_needs.gpu_gb, needs.num_gpus, needs.gpu_gb):
            continue
        if _total_gb(other_needs) < _total_gb(needs) and load_recipe(other).objective.name == objective:
            fitting.append((other.parent != path.parent, -_total_gb(other_needs), other))
    chosen = [other for *_, other in sorted(fitting)[:3]]
    return [(other, read_label(other)["Needs"].split(". ")[0].rstrip(".")) for other in chosen]


def _total_gb(needs: Needs) -> int:
    return (needs.num_gpus or 0) * (needs.gpu_gb or 0)
