"""The model card of an export: README.md, whose front matter the Hub reads."""

import json
from pathlib import Path
from typing import Any

from cookbook.data.sources import BUILTIN_SOURCE
from cookbook.files import dump_yaml
from cookbook.recipe import Recipe, Source, dump_recipe


def model_card(
    run: Path,
    state: dict[str, Any],
    recipe: Recipe,
    base: dict[str, Any],
    *,
    is_new: bool,
    merged: bool,
    checked: dict[str, str],
) -> str:
    """Recipe, strategy, data, metrics and versions of a checkpoint.

    Args:
        run: with metrics.jsonl, if it is still there.
        state: of the checkpoint.
        base: `name_or_path`, `revision` and `sha256` of the model that was trained.
        is_new: that model was made for the run.
        checked: what was compared when the export was reopened.
    """
    front = dump_yaml(_front_matter(recipe, base, is_new=is_new, merged=merged))
    kind = f"{recipe.adapter.name} adapter of rank {recipe.adapter.rank}" if recipe.adapter else "all weights"
    strategy, versions = state["run"]["strategy"], state["run"]["versions"]
    processes = strategy["processes"]
    origin = "a new model" if is_new else f"`{_public(base['name_or_path'])}`" + _at(base["revision"])
    rows = {
        "trained": kind + (", merged into the base model" if merged else ""),
        "from": origin,
        "objective": recipe.objective.name,
        "steps": f"{state['step']}, {state['num_samples']:,} samples",
        "strategy": f"`{Path(strategy['file']).stem}`, {processes} process{'es' if processes > 1 else ''}",
        "precision": {"no": "float32"}.get(recipe.mixed_precision, recipe.mixed_precision),
        **_metrics(run / "metrics.jsonl", state["step"]),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items() if number),
        "checked": f"{checked['tensors']}; {checked['logits']}" if checked else "not yet: make export does",
    }
    table = "\n".join(f"| {what} | {said} |" for what, said in rows.items())
    data = "\n".join(_data_lines(recipe))
    return (
        f"---\n{front}---\n\n# {Path(recipe.run.output_dir).name}, step {state['step']}\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        f"## Data\n\n{data}\n\nDigest of the tokens: `{state['made_from']['data']}`\n\n"
        f"## Recipe\n\n```yaml\n{_without_folders(dump_recipe(recipe), recipe)}```\n"
    )


def _front_matter(recipe: Recipe, base: dict[str, Any], *, is_new: bool, merged: bool) -> dict[str, Any]:
    """Only what the Hub can resolve: no local paths."""
    is_adapter = recipe.adapter is not None and not merged
    front: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    if not is_new and _is_hub_name(base["name_or_path"]):
        front["base_model"] = base["name_or_path"]
        front["base_model_relation"] = "adapter" if is_adapter else "finetune"
    front["pipeline_tag"] = "text-generation"
    front["tags"] = [recipe.objective.name, *([recipe.adapter.name] if recipe.adapter else [])]
    names = dict.fromkeys(source.path for source in recipe.data.train if _is_hub_name(source.path))
    if names:
        front["datasets"] = list(names)
    return front


def _is_hub_name(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(part and part[0] not in "./~" for part in parts) and not Path(name).exists()


def _public(path: str) -> str:
    """A name of the Hub as it is; of a path, which means nothing elsewhere and may tell of its owner, the last part."""
    return path if _is_hub_name(path) or path == BUILTIN_SOURCE else Path(path).name


def _without_folders(text: str, recipe: Recipe) -> str:
    sources = (*recipe.data.train, *recipe.data.eval.values())
    paths = [source.path for source in sources] + [recipe.run.output_dir, recipe.run.resume]
    paths += [path for path in (recipe.model.name_or_path, recipe.data.chat_template) if path]
    paths += recipe.plugins
    paths += [recipe.strategy] if Path(recipe.strategy).is_absolute() else []
    for path in sorted(set(paths), key=len, reverse=True):
        text = text.replace(path, _public(path))
    return text


def _data_lines(recipe: Recipe) -> list[str]:
    sources = [("trained on", source) for source in recipe.data.train]
    sources += [(f"evaluated on{name and f' ({name})'}", source) for name, source in recipe.data.eval.items()]
    lines = [f"- {what} {_describe(source)}" for what, source in sources]
    if recipe.data.holdout:
        lines.append(f"- evaluated on a share of {recipe.data.holdout:g} of the training rows, held out")
    return lines


def _describe(source: Source) -> str:
    words = [f"`{_public(source.path)}`"]
    if source.path == BUILTIN_SOURCE or _is_hub_name(source.path):
        words += [f"({source.name})"] if source.name else []
        words += [f"split {source.split}"]
    if _is_hub_name(source.path):
        words.append(f"revision {source.revision}" if source.revision else "no revision pinned")
    words += [f"the first {source.max_rows:,} rows"] if source.max_rows else []
    words += [f"weight {source.weight:g}"] if source.weight else []
    return ", ".join(words)


def _at(revision: str | None) -> str:
    return f" at {revision}" if revision else ""


def _metrics(path: Path, step: int) -> dict[str, str]:
    """The last losses up to a step."""
    losses, evaluations = {}, {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
            at = line["step"]
        except (ValueError, KeyError, TypeError):  # cut off by a crash
            continue
        if at > step:
            continue
        if line.get("loss") is not None:
            losses[at] = line["loss"]
        if line.get("eval_loss") is not None:
            evaluations[line.get("eval_set", "")] = (at, line["eval_loss"])
    rows = {}
    if losses:
        last = max(losses)
        rows["training loss"] = f"{losses[last]:.4f} at step {last}"
    for name, (at, loss) in evaluations.items():
        rows[f"evaluation loss{name and f' of {name}'}"] = f"{loss:.4f} at step {at}"
    return rows
