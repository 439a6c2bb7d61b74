"""The library of recipes: their labels, offline facts about their models and data, and its page."""

import json
import re
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from cookbook.config.optim import number
from cookbook.config.recipe import RECIPES, Recipe, load_recipe
from cookbook.system.files import RecipeError
from cookbook.system.hardware import parse_machines
from cookbook.system.shipped import in_repository, located, starts, typed

PAGE = RECIPES / "README.md"
FACTS = RECIPES / "offline_facts.json"
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
        """As in a label's `Fits`, and for `plan --gpus`."""
        return f"{f'{self.num_machines}x' * (self.num_machines > 1)}{self.gpus_each}x{self.gpu_gb}GB"

    def num_local(self, num_processes: int) -> int | None:
        """Processes of a machine where there is one for each GPU; None: another number, of which nothing is known."""
        return self.gpus_each if num_processes == self.num_gpus else None


def recipe_files() -> list[Path]:
    """Every recipe, here and shipped, as `located` reaches it."""
    found = {path.relative_to(start) for start in starts() for path in (start / RECIPES).rglob("*.yaml")}
    return [Path(located(str(name))) for name in sorted(found)]


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
        found = re.match(r"([A-Z][a-z]+):(?:\s+|$)", text)
        if found and found.group(1) in LABEL:
            word, text = found.group(1), text[found.end() :]
        parts.setdefault(word, []).append(text)
    return {word: " ".join(filter(None, texts)) for word, texts in parts.items()}


def read_needs(label: dict[str, str]) -> Needs:
    """`Needs: 4 machines, each 8 GPUs of 80 GB, 512 GB of host memory, 2,000 GB of NVMe disk. ...` as numbers."""
    found = re.match(
        r"(?:(\d+) machines, each )?(\d+) GPUs? of (\d+) GB"
        r"(?:, ([\d,]+) GB of host memory)?(?:, ([\d,]+) GB of NVMe)?",
        label.get("Needs", ""),
    )
    if found is None:
        return Needs(gpus_each=None, gpu_gb=None)
    count, gpus, gpu, host, nvme = (int(digits.replace(",", "")) if digits else None for digits in found.groups())
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


def known_model(name: str) -> dict[str, Any] | None:
    """The entry of a model in offline_facts.json: `config`, `bos_token`, `eos_token`, `special_tokens`."""
    return _facts()["models"].get(name)


def known_kind(name: str) -> str | None:
    """The row kind of a Hub data set (`cookbook.config.row_kinds`) by offline_facts.json, or None."""
    return _facts()["data"].get(name)


@cache
def hub_answers() -> bool:
    """Whether the Hub accepts a connection within 3 seconds."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    address = urlparse(constants.ENDPOINT)
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=3).close()
    except OSError:
        return False
    return True


def _facts() -> dict[str, Any]:
    try:
        return json.loads(Path(located(str(FACTS))).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{FACTS}: cannot be read ({error})") from None


def what_it_takes(path: Path) -> str:
    """What a recipe needs and the alternatives, for a machine that cannot train it."""
    label = read_label(path)
    lines = [f"{path} needs {label.get('Needs', 'hardware that its label does not name')}", "Instead, here:"]
    lines.append(f"  {_command('rehearse', path)}    the same strategy and kind of model, tiny, on simulated GPUs")
    lines.append(f"  {_command('train', RECIPES / 'quickstart.yaml')}    a small model")
    fits = [f"  {name:9} {text}" for name, text in read_fits(label).items()]
    if fits:
        chosen_by = "STRATEGY=..." if in_repository() else "--strategy ..."
        lines.append(f"What fits ({chosen_by}), in {label['Fits'].split('. ')[0]}:")
    smaller = [f"  {_command('train', other)}    {what}" for other, what in _smaller(path, read_needs(label))]
    return "\n".join([*lines, *fits, *(["On less hardware:"] if smaller else []), *smaller])


def _command(target: str, recipe: Path) -> str:
    return typed(f"{target} RECIPE={recipe}", f"{'launch' if target == 'train' else target} {recipe}")


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


def library_page() -> str:
    """recipes/README.md, generated from the recipes."""
    rows = [_row(path, load_recipe(path)) for path in recipe_files()]
    lines = [
        "# The library",
        "",
        "Generated from the recipes by `python -m cookbook library`; change those, not this page. Replace `make train`",
        "by `make rehearse` to try a row first without a GPU, with a tiny model of its kind.",
        "",
        "A recipe is a model and a task. Its strategy is a default; any other gives the same curve (`STRATEGY=zero3`).",
        "The label at the top of each recipe lists which strategies fit which machines, as forecast by `plan`, until a",
        "row has a measurement, and the published source of every learning rate, batch size and schedule.",
        "",
        "| Recipe | Model | Objective | Adapter | Default strategy | Global batch | Learning rate | Needs | Measured |"
        " Run |",
        "|" + " --- |" * 10,
        *("| " + " | ".join(cells) + " |" for cells in rows),
        "",
        f"{len(rows)} recipes. `recipes/offline_facts.json` has what a rehearsal without network needs to know about"
        " their models and data.",
    ]
    return "\n".join(lines) + "\n"


def _row(path: Path, recipe: Recipe) -> tuple[str, ...]:
    label = read_label(path)
    name = path.relative_to(RECIPES)
    return (
        f"[{name}]({name})",
        recipe.model.name_or_path or f"new {recipe.model.from_scratch.model_type}",  # type: ignore[union-attr]
        recipe.objective.name,
        f"{recipe.adapter.name}, rank {recipe.adapter.rank}" if recipe.adapter else "none: all weights",
        Path(recipe.strategy).stem,
        f"{recipe.batch.global_batch_size} {recipe.objective.sample}s",
        number(recipe.optim.learning_rate),
        label.get("Needs", "").split(". ")[0].rstrip("."),
        "not yet" if label.get("Measured", "not yet").startswith("not yet") else "yes, in its label",
        f"`make train RECIPE={path}`",
    )
