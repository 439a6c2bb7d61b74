"""Which checkpoint a run takes up, whether it may, and how what it holds comes back."""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cookbook.checkpoint import folder
from cookbook.checkpoint.folder import BrokenCheckpoint, Checkpoint
from cookbook.files import RecipeError
from cookbook.recipe import Recipe
from cookbook.registry import Named

if TYPE_CHECKING:
    from cookbook.checkpoint.tensors import Piece

# Keys, or beginnings of keys, by what a change of them means for a run that goes on. The rest may not change.
FREE = (
    "strategy",
    "run.",
    "batch.micro_batch_",
    "data.eval.",
    "data.packing",
    "model.gradient_checkpointing",
    "model.compile",
    "model.liger_kernels",
)
"""They change speed, memory, or what is written down."""
WITH_CONSENT = ("optim.", "schedule.", "mixed_precision", "run.max_steps", "run.num_epochs")
"""They change the curve from here on, which somebody may want; `run.allow_changes` says so."""
BY_CONTENT = {"data.": "data", "model.": "model", "plugins": "plugins"}
"""Words may change where the content is the same: a file that was moved, say."""
NEVER = ("optim.name", "data.streaming", "data.shuffle_rows")
"""Although what they begin with may."""


def choose(
    recipe: Recipe,
    root: Path,
    made_from: Mapping[str, str],
    *,
    is_restarted: bool,
    rank: int,
    num_ranks: int,
    agree: Callable[[bool], bool],
    tell_all: Callable[[str], str],
    say: Callable[[str], None],
) -> Checkpoint | None:
    """The checkpoint that this run goes on from; None if it begins at its beginning. Collective.

    Args:
        root: `checkpoints/` of this run.
        made_from: digests of "data", "model" and "plugins", see `stages.take_digests`.
        is_restarted: by the launcher, after a failure: then it goes on, whatever `run.resume` says.
        agree: whether all processes say yes.
        tell_all: the main process's text, on every process.
        say: tells people what was passed over, and which changes were asked for.

    Raises:
        RecipeError: there are checkpoints and none is whole; the recipe has changed in what it may not.
    """
    goes_on = is_restarted or recipe.run.resume == "auto"
    names = [path.name for path in folder.list_folders(root)] if goes_on else []
    own = [root / name for name in json.loads(tell_all(json.dumps(names)))]  # a process may see another folder
    if goes_on and rank == 0:
        for path in folder.foreign_folders(root):
            say(f"{path} has a name that no save gives, so it is left alone; run.resume: {path} would take it")
    named = [] if recipe.run.resume in ("never", "auto") else [Path(recipe.run.resume)]
    reasons = []
    for path in (*own, *named):
        reason = _why_broken(path, rank, num_ranks)
        if agree(reason is None):
            checkpoint = folder.open_checkpoint(path)
            mistakes, notes = changes(checkpoint.state(), recipe, made_from)
            if mistakes:
                raise RecipeError([f"run.resume: {path} cannot be taken up:", *mistakes])
            for note in notes:
                say(note)
            return checkpoint
        reasons.append(f"{path} is not whole: {reason or 'another process says so'}")
        say(f"{reasons[-1]}; it is passed over")
    if reasons:
        raise RecipeError([*reasons, "No checkpoint is left to go on from; take run.resume: never to start anew"])
    return None


def _why_broken(path: Path, rank: int, num_ranks: int) -> str | None:
    """None if it is whole as far as this process's share of the files tells."""
    try:
        folder.verify(folder.open_checkpoint(path), rank=rank, num_ranks=num_ranks)
    except (folder.BrokenCheckpoint, OSError) as reason:
        return str(reason)
    return None


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe's values by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}." if key else prefix)  # the set without a name
        else:
            flat[prefix + key] = value
    return flat


def changes(state: Mapping[str, Any], recipe: Recipe, made_from: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """What the run is made from otherwise than the checkpoint was.

    Args:
        state: of the checkpoint, with `recipe` and `made_from`.
        made_from: see `choose`.

    Returns:
        Mistakes, and notes on changes that were asked for.
    """
    was = {"plugins": []} | flatten(state["recipe"])  # which older checkpoints do not name
    now = flatten(recipe.model_dump(mode="json", exclude_none=True))
    same = {what: digest == state["made_from"].get(what) for what, digest in made_from.items()}
    verbs = {"plugins": "are"}
    mistakes = [
        f"the {what} {verbs.get(what, 'is')} not what the checkpoint was made with" for what in same if not same[what]
    ]
    notes = []
    for key in sorted(was.keys() | now.keys()):
        before, after = was.get(key), now.get(key)
        if before == after or _is_free(key, same) or _is_idle(key, recipe):
            continue
        change = f"{key} was {before!r} when the checkpoint was made, and is {after!r}"
        if not _is_any(key, WITH_CONSENT) or _is_any(key, NEVER):
            mistakes.append(f"{change}; change it back, or take run.resume: never to start anew")
        elif any(key == allowed or key.startswith(allowed + ".") for allowed in recipe.run.allow_changes):
            notes.append(f"{change}, as run.allow_changes allows")
        else:
            mistakes.append(f"{change}; change it back, or consent: run.allow_changes: [{key}]")
    return mistakes, notes


def _is_free(key: str, same: Mapping[str, bool]) -> bool:
    if _is_any(key, WITH_CONSENT) or _is_any(key, NEVER):
        return False
    return _is_any(key, FREE) or any(
        key.startswith(prefix) and same.get(what, False) for prefix, what in BY_CONTENT.items()
    )


def _is_idle(key: str, recipe: Recipe) -> bool:
    """Whether the section's kind has no such key. Older checkpoints have the keys of all kinds."""
    section, _, rest = key.partition(".")
    chosen = getattr(recipe, section, None)
    return isinstance(chosen, Named) and rest not in type(chosen).model_fields


def _is_any(key: str, beginnings: Collection[str]) -> bool:
    return any(key == one or (key.startswith(one) and one[-1] in "._") for one in beginnings)


def load(checkpoint: Checkpoint, trained: Mapping[str, list[int]], restore: Callable[..., None]) -> dict[str, Any]:
    """Brings weights and optimizer state back; each process reads what it holds. Collective.

    Args:
        trained: shapes of the parameters of this run, by name.
        restore: the engine's.

    Returns:
        The checkpoint's `state.json`.

    Raises:
        RecipeError: the checkpoint is of another model.
        BrokenCheckpoint: elements are missing.
    """
    state = checkpoint.state()
    shapes = state["parameters"]
    if shapes != trained:
        differ = sorted(name for name in shapes.keys() | trained.keys() if shapes.get(name) != trained.get(name))
        there, here = (found.get(differ[0], "absent") for found in (shapes, trained))
        mistake = f"{differ[0]} is {there} there and {here} here ({len(differ)} parameters differ)"
        raise RecipeError([f"run.resume: {checkpoint.path} is of another model: {mistake}"])
    from cookbook.checkpoint.tensors import Reader  # torch: `python -m cookbook checkpoint` does without

    reader = Reader(checkpoint.pieces)
    for name, shape in shapes.items():
        for kind in reader.kinds(name) or ["weight"]:
            if reader.num_elements(name, kind) != math.prod(shape):
                raise BrokenCheckpoint(f"{checkpoint.path}: {name} lacks elements of {kind}")

    def fill(pieces: "Iterable[Piece]") -> None:
        for piece in pieces:
            reader.read_into(piece)

    def kinds(name: str) -> list[str]:
        return [kind for kind in reader.kinds(name) if kind != "weight"]

    restore(fill, kinds, state["counts"])
    return state
