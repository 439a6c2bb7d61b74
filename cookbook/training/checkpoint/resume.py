"""Chooses the checkpoint that a run resumes from, checks that it may, and restores its state."""

import itertools
import json
import math
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cookbook.config.effects import effect_of
from cookbook.config.recipe import Recipe
from cookbook.start.own_folder import reads_own_folder
from cookbook.system import files
from cookbook.system.files import RecipeError, refuse
from cookbook.training.checkpoint import folder
from cookbook.training.checkpoint.content import read_content
from cookbook.training.checkpoint.folder import BrokenCheckpoint, Checkpoint

if TYPE_CHECKING:
    from cookbook.training.checkpoint.tensors import StatePiece

# Keys, or prefixes of keys, by what a change means for a resumed run. Of all others those may change that leave the
# curve as it is (see `effect_of`).
LENGTH = ("run.max_steps", "run.num_epochs", "run.early_stopping_", "rounds.num_rounds")
KERNELS, HELD_OUT = "model.kernels", "data.eval"
WITH_CONSENT = ("optim.", "schedule.", "mixed_precision", "loss_scale.", KERNELS, *LENGTH)
"""They change the curve from here on, so `run.allow_changes` must list them."""
BY_CONTENT = {
    "data.": "data",
    **dict.fromkeys(("model.name_or_path", "model.revision", "model.from_scratch"), "model"),
    "objective.teacher": "teacher",
    "adapter.path": "adapter",
    "plugins": "plugins",
}
"""They may change if the fingerprint of what they lead to is the same: a file that was moved, for example."""
NEVER = ("model.new_tokens", "optim.name", "data.streaming", "data.shuffle_rows")
"""They may not change, although other keys with their prefix may."""
FREE = ("run.skip_nonfinite_steps", "rounds.sampler", "rounds.keep_server")
"""They change the curve, and a run may need them to get past the step, or rounds past the sampling, where it ended."""


def choose(
    recipe: Recipe, made_from: Mapping[str, str], collectives: Any, *, is_restarted: bool, say: Callable[[str], None]
) -> Checkpoint | None:
    """The checkpoint to resume from; None to start from step 0. Every rank must call.

    Args:
        made_from: fingerprints of "data", "model", "teacher", "adapter", "plugins", "kernels" and "eval", see
            `stages.take_fingerprints`.
        collectives: a `cookbook.training.engine.collectives.Collectives`.
        is_restarted: the launcher restarted the run after a failure; it then resumes, whatever `run.resume` is. Rank 0
            knows.
        say: logs what was skipped, and which changes were allowed.

    Raises:
        RecipeError: all checkpoints are broken, the recipe has changed where it may not, or it reads from the folder
            that this start sets aside.
    """
    root = Path(recipe.run.output_dir) / "checkpoints"
    rank, num_ranks = collectives.world.rank, collectives.world.num_processes
    if rank == 0:
        refuse(reads_own_folder(recipe))
    resumes = recipe.run.resume == "auto" or collectives.broadcast_text(str(is_restarted)) == "True"
    names = [path.name for path in folder.list_folders(root)] if resumes else []
    # Rank 0's list: a rank on another machine may see another folder.
    own = [root / name for name in json.loads(collectives.broadcast_text(json.dumps(names)))]
    if resumes and rank == 0:
        for path in folder.foreign_folders(root):
            say(f"{path} is ignored, since no save gives it that name; to use it, write run.resume: {path}")
    named = [] if recipe.run.resume in ("never", "auto") else [_resolve_path(Path(recipe.run.resume), root)]
    reasons = []
    for path in (*own, *named):
        # Before anything is loaded, although files are then read twice: damage that a load finds would leave a model
        # half overwritten, and no earlier checkpoint to take.
        reason = _why_broken(path, rank, num_ranks)
        if collectives.all_true(reason is None):
            checkpoint = folder.open_checkpoint(path)
            mistakes, notes = changes(checkpoint.state(), recipe, made_from)
            if mistakes:
                raise RecipeError([f"run.resume: cannot resume from {path}:", *mistakes])
            for note in notes:
                say(note)
            return checkpoint
        reasons.append(f"{path} is broken: {reason or 'another process found it so'}")
        say(f"{reasons[-1]}; it is skipped")
    if reasons:
        raise RecipeError([*reasons, "No checkpoint is left to resume from; write run.resume: never to start over"])
    return None


def _resolve_path(path: Path, root: Path) -> Path:
    """The path that `run.resume` names; of this run's own checkpoint, however it is reached, that in `root`.

    Raises:
        RecipeError: it is elsewhere in the run's folder, which a run that starts over sets aside.
    """
    real = path.resolve()
    own = [there for there in root.iterdir() if there.resolve() == real] if root.is_dir() else []
    if own or not real.is_relative_to(root.parent.resolve()):
        return own[0] if own else path
    raise RecipeError(
        f"run.resume is {path}, in the folder of this run, which is set aside at its start; move the checkpoint to"
        f" {root}, or name another run.output_dir"
    )


def _why_broken(path: Path, rank: int, num_ranks: int) -> str | None:
    """The first defect in this rank's share of the files, or None."""
    try:
        checkpoint = folder.open_checkpoint(path)
        folder.verify(checkpoint, rank=rank, num_ranks=num_ranks)
        if rank == 0:
            read_content(checkpoint)
    except (folder.BrokenCheckpoint, OSError) as reason:
        return str(reason)
    return None


def newest(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint from which a start with `run.resume: auto` would go on, and why it would skip newer ones. Digests
    are not compared, which takes as long as to read all files.
    """
    reasons = []
    for path in folder.list_folders(root):
        try:
            checkpoint = folder.open_checkpoint(path)
            read_content(checkpoint)
        except (BrokenCheckpoint, OSError) as reason:
            reasons.append(f"{path} is broken: {reason}")
        else:
            return checkpoint, reasons
    return None, reasons


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's values by their dotted keys, in which the evaluation set without a name leaves no trace."""
    return {key.replace("..", "."): value for key, value in files.flatten(values).items() if value != {}}


def rule_of(key: str) -> str:
    """The rule for a recipe's key when a run resumes: "fixed", "with_consent", "by_content" or "free"."""

    def is_any(prefixes: Collection[str]) -> bool:
        return any(key == prefix or (key.startswith(prefix) and prefix[-1] in "._") for prefix in prefixes)

    rules = {"fixed": NEVER, "with_consent": WITH_CONSENT, "free": FREE}
    by_content = "by_content" if key.startswith(tuple(BY_CONTENT)) else "fixed"
    otherwise = by_content if effect_of(key) == "curve" else "free"
    return next((rule for rule, prefixes in rules.items() if is_any(prefixes)), otherwise)


def changed_settings(recipe: Recipe) -> list[str]:
    """The mistakes with which `choose` would refuse a recipe for its settings alone, from JSON files in one process,
    before others are started. What data, model and plugins hold is compared by `choose`.
    """
    if mistakes := reads_own_folder(recipe):
        return mistakes
    own = folder.list_folders(Path(recipe.run.output_dir) / "checkpoints") if recipe.run.resume == "auto" else []
    for path in own if recipe.run.resume in ("never", "auto") else [Path(recipe.run.resume)]:
        try:
            state = folder.open_checkpoint(path).state()
        except (BrokenCheckpoint, OSError):
            continue
        mistakes, _ = changes(state, recipe, None)
        return [f"run.resume: cannot resume from {path}:", *mistakes] if mistakes else []
    return []


def changes(
    state: Mapping[str, Any], recipe: Recipe, made_from: Mapping[str, str] | None
) -> tuple[list[str], list[str]]:
    """Compare a recipe and its fingerprints with those of a checkpoint.

    Args:
        state: `state.json` of the checkpoint, with `recipe` and `made_from`.
        made_from: see `choose`; None: not known yet, so that nothing is compared by content.

    Returns:
        Mistakes, after them what the user may intend, and notes on changes that `run.allow_changes` lists.
    """
    was = flatten(state["recipe"])
    now = flatten(recipe.model_dump(mode="json", exclude_none=True))
    same = {what: digest == state["made_from"].get(what) for what, digest in (made_from or {}).items()}
    verbs = {"plugins": "are"}
    mistakes = [
        f"the {what} {verbs.get(what, 'is')} not what the checkpoint was made with"
        for what in same
        if not same[what] and what not in ("kernels", "eval")
    ]
    to_consent: list[str] = []
    notes: list[str] = []

    def ask_consent(key: str, change: str) -> None:
        if any(key == allowed or key.startswith(allowed + ".") for allowed in recipe.run.allow_changes):
            notes.append(f"{change}, as run.allow_changes allows")
        else:
            mistakes.append(change)
            to_consent.append(key)

    if "kernels" in state["made_from"] and not same.get("kernels", True):
        ask_consent(KERNELS, f"{KERNELS} has packages of other versions or contents than when the checkpoint was made")
    if "eval" in state["made_from"] and not same.get("eval", True):
        change = "the held-out rows are not those of the checkpoint, so that losses before it and after do not compare"
        run = recipe.run
        if run.keep_best or run.early_stopping_patience is not None:  # which compare them
            ask_consent(HELD_OUT, change)
        else:
            notes.append(change)
    for key in sorted(was.keys() | now.keys()):
        before, after = was.get(key), now.get(key)
        rule = rule_of(key)
        is_same_content = any(key.startswith(prefix) and same.get(what, False) for prefix, what in BY_CONTENT.items())
        may_differ = rule == "free" or (rule == "by_content" and (made_from is None or is_same_content))
        if before == after or may_differ:
            continue
        change = f"{key} was {_describe(before)} when the checkpoint was made, and is {_describe(after)}"
        if rule != "with_consent":
            mistakes.append(change)
        else:
            ask_consent(key, change)
    if mistakes:
        mistakes += _intentions(recipe, to_consent if len(to_consent) == len(mistakes) else [])
    return mistakes, notes


def _describe(value: Any) -> str:
    """A value as a user writes it."""
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _intentions(recipe: Recipe, to_consent: list[str]) -> list[str]:
    """Ways on for a user whose recipe differs from the checkpoint's, with what to add to the command.

    Args:
        to_consent: the changed keys, if consent is enough to go on.
    """
    run, lines = recipe.run, ["Put back what was, or type the same command with"]
    if run.resume == "auto":
        numbered = (f"{run.output_dir}-{number}" for number in itertools.count(2))
        free = next(name for name in numbered if not Path(name).exists())
        lines.append(f"  --set {shlex.quote(f'run.output_dir={free}')} for a new run beside this one")
    if to_consent:
        keys = ",".join([*run.allow_changes, *to_consent])
        lines.append(f"  --set {shlex.quote(f'run.allow_changes=[{keys}]')} to go on from there with the new values")
    lines.append("  --set run.resume=never to start over; an earlier run in the folder is set aside")
    return lines


def load(checkpoint: Checkpoint, trained: Mapping[str, list[int]], restore: Callable[..., None]) -> dict[str, Any]:
    """Restore weights and optimizer state; each rank reads what it holds. Every rank must call.

    Args:
        trained: shapes of this run's trained parameters, by name.
        restore: `Engine.restore`.

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
        there, here = (entries.get(differ[0], "absent") for entries in (shapes, trained))
        mistake = f"{differ[0]} is {there} there and {here} here ({len(differ)} parameters differ)"
        raise RecipeError(f"run.resume: {checkpoint.path} is of another model: {mistake}")
    from cookbook.training.checkpoint.tensors import Reader  # torch: `cookbook checkpoint` does without

    reader = Reader(checkpoint.pieces)
    for name, shape in shapes.items():
        for kind in reader.kinds(name) or ["weight"]:
            if reader.num_elements(name, kind) != math.prod(shape):
                raise BrokenCheckpoint(f"{checkpoint.path}: {name} lacks elements of {kind}")

    def fill(pieces: "Iterable[StatePiece]") -> None:
        for piece in pieces:
            reader.read_into(piece)

    def kinds(name: str) -> list[str]:
        return [kind for kind in reader.kinds(name) if kind != "weight"]

    restore(fill, kinds, state["counts"])
    return state
