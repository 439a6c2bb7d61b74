"""The model card of an export: README.md, whose front matter the Hub reads."""

from pathlib import Path
from typing import Any

from cookbook.config.recipe import Recipe, dump_recipe
from cookbook.config.sections import Source
from cookbook.system.console import several
from cookbook.system.files import dump_yaml
from cookbook.system.record_files import METRICS, read_lines
from cookbook.training.adapters.base_model import Base
from cookbook.training.data.sources import BUILTIN_SOURCE


def model_card(
    run: Path, state: dict[str, Any], recipe: Recipe, base: Base, *, merged: bool, checked: dict[str, str]
) -> str:
    """Recipe, strategy, data, metrics and versions of a checkpoint, as Markdown.

    Args:
        run: its output folder, for metrics.jsonl.
        state: `state.json` of the checkpoint.
        base: the model that was trained.
        checked: result of `reopen`; empty if the export was not reopened.
    """
    front = dump_yaml(_front_matter(recipe, base, merged=merged))
    kind = f"{recipe.adapter.name} adapter of rank {recipe.adapter.rank}" if recipe.adapter else "all weights"
    strategy, versions = state["run"]["strategy"], state["run"]["versions"]
    revision = f" at {base.revision}" if base.revision else ""
    origin = "a new model" if base.is_new else f"`{_public(base.name_or_path)}`{revision}"
    rows = {
        "trained": kind + (", merged into the base model" if merged else ""),
        "from": origin,
        "objective": recipe.objective.name,
        "steps": f"{state['step']}, {state['num_samples']:,} samples",
        "strategy": f"`{Path(strategy['file']).stem}`, {several(strategy['processes'], 'process')}",
        "precision": {"no": "float32"}.get(recipe.mixed_precision, recipe.mixed_precision),
        **_metrics(run / METRICS, state["step"]),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items() if number),
        "checked": f"{checked['tensors']}; {checked['logits']}" if checked else "not yet: cookbook export does",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    sources = [("trained on", source) for source in recipe.data.train]
    sources += [(f"evaluated on{name and f' ({name})'}", source) for name, source in recipe.data.eval.items()]
    data = "\n".join(f"- {what} {_describe_source(source)}" for what, source in sources)
    if recipe.data.holdout:
        data += f"\n- evaluated on a share of {recipe.data.holdout:g} of the training rows, held out"
    return (
        f"---\n{front}---\n\n# {Path(recipe.run.output_dir).name}, step {state['step']}\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        f"## Data\n\n{data}\n\nDigest of the tokens: `{state['made_from']['data']}`\n\n"
        f"## Recipe\n\n```yaml\n{_without_folders(dump_recipe(recipe), recipe)}```\n"
    )


def _front_matter(recipe: Recipe, base: Base, *, merged: bool) -> dict[str, Any]:
    """Only names that the Hub can resolve: no local paths."""
    is_adapter = recipe.adapter is not None and not merged
    front: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    if not base.is_new and _is_hub_name(base.name_or_path):
        front["base_model"] = base.name_or_path
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
    """The last part of a local path, which may reveal its owner; a name on the Hub as it is."""
    return path if _is_hub_name(path) or path == BUILTIN_SOURCE else Path(path).name


def _without_folders(text: str, recipe: Recipe) -> str:
    paths = [source.path for _, source in recipe.data.sources] + [recipe.run.output_dir, recipe.run.resume]
    paths += [path for path in (recipe.model.name_or_path, recipe.data.chat_template) if path]
    paths += recipe.plugins
    paths += [recipe.strategy] if Path(recipe.strategy).is_absolute() else []
    for path in sorted(set(paths), key=len, reverse=True):
        text = text.replace(path, _public(path))
    return text


def _describe_source(source: Source) -> str:
    words = [f"`{_public(source.path)}`"]
    if source.path == BUILTIN_SOURCE or _is_hub_name(source.path):
        words += [f"({source.name})"] if source.name else []
        words += [f"split {source.split}"]
    if _is_hub_name(source.path):
        words.append(f"revision {source.revision}" if source.revision else "no revision pinned")
    words += [f"the first {source.max_rows:,} rows"] if source.max_rows else []
    words += [f"weight {source.weight:g}"] if source.weight else []
    words += [f"{source.rows_per_epoch:,} rows an epoch"] if source.rows_per_epoch else []
    return ", ".join(words)


def _metrics(path: Path, step: int) -> dict[str, str]:
    """The last losses up to a step."""
    rows = {"training loss": ""}
    for line in read_lines(path):
        at, name = line["step"], line.get("eval_set", "")
        for key, row in (("loss", "training loss"), ("eval_loss", f"evaluation loss{name and f' of {name}'}")):
            if at <= step and line.get(key) is not None:
                rows[row] = f"{line[key]:.4f} at step {at}"
    return {row: words for row, words in rows.items() if words}
