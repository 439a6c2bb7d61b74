"""Mistakes of a recipe on this machine, and the place of each in its file."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cookbook.config.recipe import Recipe, read_recipe
from cookbook.config.sections import ALL_LINEAR, ModelSection
from cookbook.config.strategy_keys import Claim
from cookbook.facts.model_files import CONFIG
from cookbook.facts.model_types import look_up
from cookbook.facts.offline import known_model
from cookbook.facts.packing import decide, known_config
from cookbook.facts.score_head import head_wanted
from cookbook.system.files import RecipeError, refuse
from cookbook.system.imports import quiet_deepspeed
from cookbook.system.machine import fp8_problems, num_gpus
from cookbook.system.tensor_files import has_weights, weight_files
from cookbook.system.versions import installed_version


def lacks_checkpoint(recipe: Recipe) -> list[str]:
    """List what is wrong with a checkpoint that the recipe names."""
    if recipe.run.resume in ("never", "auto"):
        return []
    from cookbook.training.checkpoint.folder import BrokenCheckpoint, open_checkpoint

    try:
        open_checkpoint(Path(recipe.run.resume))
    except (BrokenCheckpoint, OSError) as error:
        advice = "write never, auto, or the folder of a checkpoint, as outputs/mine/checkpoints/step-00000100"
        return [f"run.resume is {recipe.run.resume!r}: {error}; {advice}"]
    return []


def check_model(recipe: Recipe) -> list[str]:
    """Compare what the folder of a model says of itself, and the adapter's names with its layers, as the start of a run
    does. Imports torch if there are weights, here or in the Hub's cache.

    Returns:
        notes for the user.

    Raises:
        RecipeError: what does not agree.
    """
    here, name = _weights_here(recipe.model), recipe.model.name_or_path
    if here is None:
        why = weight_files(Path(name))[1] if name and Path(name).is_dir() else None
        lacks = (
            [f"model.name_or_path is {name!r}: {why}; until then it can be planned with, and not run"] if why else []
        )
        return lacks + _notes_on_structure(recipe)
    if not num_gpus():
        quiet_deepspeed()
    from cookbook.training.adapters import adapter_files, base_model
    from cookbook.training.models import language_model, model_source, tokenizer_files
    from cookbook.training.models.folder_facts import check_folder

    model = recipe.model.model_copy(update={"name_or_path": str(here)})
    folder = model_source.resolve_model(model, seed=recipe.seed, texts=(), fingerprint="", cache=Path())
    config = language_model.load_config(folder, recipe.data.max_length)
    _check_packing(recipe, config)
    template = recipe.data.chat_template
    template = template if template and Path(template).is_file() else None  # a missing file has been reported
    tokenizer = tokenizer_files.load_tokenizer(folder, template, model.new_tokens)
    place = f"model.name_or_path is {name!r}"
    facts = check_folder(here, config, tokenizer, place=place, new_tokens=model.new_tokens or ())
    head_wanted(recipe.objective, config, tokenizer.pad_token_id)
    _check_teacher(recipe, tokenizer, facts.num_embeddings)
    notes = [*facts.notes]
    if recipe.adapter is not None:
        notes += adapter_files.check_names(config, recipe.adapter)
        notes += base_model.base_notes(recipe.adapter, recipe.model)
    return notes


USUAL_LAYERS = {ALL_LINEAR, "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def _notes_on_structure(recipe: Recipe) -> list[str]:
    """Check what takes a model's code without the weights, where files here tell the structure: the names of an adapter
    on unusual layers or of a saved one, and packed samples under a transformers that the facts were not measured with.
    """
    scratch, facts = recipe.model.from_scratch, known_model(recipe.model.name_or_path or "")
    if not (scratch or facts):
        return []
    adapter = recipe.adapter
    has_names = adapter is not None and (
        bool(adapter.modules_to_save or adapter.path) or not {*adapter.targets} <= USUAL_LAYERS
    )
    known = known_config(recipe.model)
    is_measured = known is None or look_up(known.model_type).transformers in (None, installed_version("transformers"))
    if is_measured and not has_names:
        return []
    from cookbook.training.adapters import adapter_files
    from cookbook.training.models.structure import known_config_of, scratch_config

    config = scratch_config(scratch) if scratch else known_config_of(facts or {})
    _check_packing(recipe, config)
    return adapter_files.check_names(config, recipe.adapter) if recipe.adapter is not None and has_names else []


def check_layer_classes(recipe: Recipe, claims: Iterable[Claim]) -> None:
    """Compare the class of the layers in a strategy's file with the model's, if its configuration is here.

    Raises:
        RecipeError: they are not the same.
    """
    named = [claim for claim in claims if claim.key == "~layer"]
    scratch, here, facts = recipe.model.from_scratch, Path(recipe.model.name_or_path or ""), None
    if not named or not (scratch or (here / CONFIG).is_file() or (facts := known_model(str(here)))):
        return
    from cookbook.training.models import language_model
    from cookbook.training.models.structure import known_config_of, layer_mistakes, scratch_config

    if scratch:
        config = scratch_config(scratch)
    else:
        config = known_config_of(facts) if facts else language_model.load_config(str(here), recipe.data.max_length)
    refuse(layer_mistakes(config, named))


def _check_packing(recipe: Recipe, config: Any) -> None:
    """Raise RecipeError if the samples of packed rows would not be kept apart."""
    from cookbook.training.models.stateful_layers import stateful_layers

    if decide(recipe, config).is_on:
        stateful_layers(config)


def _check_teacher(recipe: Recipe, tokenizer: Any, num_rows: int | None) -> None:
    """Compare a teacher that is here with the model; raises as `find_teacher`."""
    asked = recipe.objective.asks
    there = None if asked is None else _weights_here(ModelSection(name_or_path=asked.teacher))
    if asked is None or there is None:
        return
    from cookbook.run.teacher import find_teacher

    find_teacher(asked, str(there), tokenizer, num_rows, recipe.data.max_length)


def _weights_here(model: ModelSection) -> Path | None:
    """A model's folder, or that of the Hub's cache; None of a configuration alone, or if the cache lacks weights."""
    name = model.name_or_path
    if name is None:
        return None
    if Path(name).is_dir():
        return Path(name) if has_weights(Path(name)) or not (Path(name) / CONFIG).exists() else None
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=model.revision, local_files_only=True))
        if (folder / "model.safetensors").is_file():
            return folder
        shards = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError):
        return None
    return folder if all((folder / shard).is_file() for shard in set(shards.values())) else None


def lacks_for_fp8(path: Path, recipe: Recipe, num_gpus: int) -> list[str]:
    if not num_gpus or recipe.mixed_precision != "fp8":
        return []
    return [f"{path}: {what}; {remedy}" for what, remedy in fp8_problems()]


def place_mistakes(mistakes: list[str], path: Path, assignments: list[str]) -> list[str]:
    """`file: section.key ...` with the place of the values in it: each --set that gave one, or the key's line."""
    try:
        document = read_recipe(path)
    except RecipeError:  # the file cannot be read, and the mistakes say so already
        return mistakes
    located = []
    for mistake in mistakes:
        named = re.match(rf"{re.escape(str(path))}(?: under \S+)?: (\w+(?:\.\w+)*)(.*)", mistake, re.DOTALL)
        if named is None:
            located.append(mistake)
            continue
        key, words = named[1], set(re.findall(r"\w+(?:\.\w+)*", named[2]))
        causes = [
            f"--set {assignment}"
            for assignment in assignments
            if _is_named(assignment.partition("=")[0].strip(), key, words)
        ]
        place = " ".join(causes) or document.at(*key.split(".")) or str(path)
        located.append(f"{place}{mistake[len(str(path)) :]}")
    return located


def _is_named(assigned: str, key: str, words: set[str]) -> bool:
    """Return whether a mistake in `key` names the assigned key; its last part suffices where that is no common word."""
    last = assigned.rpartition(".")[2]
    return (
        f"{key}.".startswith(f"{assigned}.")
        or ("." in assigned and assigned in words)
        or ("_" in last and last in words)
    )
