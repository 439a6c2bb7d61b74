"""What differs between two runs, or two strategies, in words: keys, memory, traffic, precision, and the curve."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.commands.explain.explanation import Explanation, explain, shorten, source
from cookbook.config.effects import EFFECTS, effect_of
from cookbook.config.optim import number
from cookbook.config.recipe import Recipe
from cookbook.config.sections import Source
from cookbook.config.strategy import Strategy, find_strategy, load_strategy
from cookbook.forecast.costs import per_parameter as costs
from cookbook.forecast.costs.inputs import CostInputs
from cookbook.start.run_plan import load_pair
from cookbook.system.console import Row, page, several
from cookbook.system.files import RecipeError, apply_overrides, gathered, read_document, refuse, show
from cookbook.system.shipped import is_short, located, short

DEFAULT_PROCESSES = 8
"""For two strategies without a recipe."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key that has two values."""

    key: str
    values: tuple[Any, Any]
    """None where it is not there."""
    sources: tuple[str, str]
    effect: str
    """A key of EFFECTS."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs, or two strategies, side by side."""

    names: tuple[str, str]
    short: tuple[dict[str, str], dict[str, str]]
    """For each side, the short names of files, by path."""
    settings: tuple[CostInputs, CostInputs]
    differences: list[Difference]
    caveats: list[str]
    """Why the curve may differ though no key shows it."""

    @property
    def same_curve(self) -> bool:
        """Whether nothing that differs changes the curve."""
        return not self.caveats and all(one.effect != "curve" for one in self.differences)


def is_strategy(name: str) -> bool:
    """Whether an argument names a strategy, by its name or its file, and not a recipe."""
    if is_short(name):
        return True
    values = read_document(Path(located(name))).values
    return "distributed_type" in values or "compute_environment" in values


def compare_strategies(first: Path, second: Path, processes: int | None) -> Comparison:
    """Two strategies without a recipe: all weights under bf16 and adamw, one micro-batch a step.

    Raises:
        RecipeError: the mistakes of both.
    """
    strategies: list[Strategy] = []
    mistakes: list[str] = []
    for path in (first, second):
        with gathered(mistakes):
            strategies.append(load_strategy(path))
    refuse(mistakes)
    one, other = strategies
    fixed = [s.num_processes for s in strategies if (s.num_processes or 1) > 1]
    count = processes or next(iter(fixed), None) or DEFAULT_PROCESSES
    counts = [one.num_processes or count for one in strategies]
    settings = [
        CostInputs(strategy=s.fitted(count), num_processes=count) for s, count in zip(strategies, counts, strict=True)
    ]
    return Comparison(
        names=(one.path, other.path),
        short=(_short(one, "A "), _short(other, "B ")),
        settings=(settings[0], settings[1]),
        differences=_strategy_differences(one, other),
        caveats=[],
    )


def compare_runs(one: Explanation, other: Explanation, assignments: list[str] | None = None) -> Comparison:
    """Two runs.

    Args:
        assignments: those that both were made with.
    """
    documents = [read_document(Path(run.recipe_name)) for run in (one, other)]
    for document in documents:
        apply_overrides(document, assignments or [])
    differences = []
    for key, first, second in _changes(_readable(one.recipe), _readable(other.recipe)):
        if key != "strategy":
            sources = (source(documents[0], key), source(documents[1], key))
            differences.append(Difference(key=key, values=(first, second), sources=sources, effect=effect_of(key)))
    differences += _strategy_differences(one.strategy, other.strategy)
    return Comparison(
        names=(f"{one.recipe_name} under {one.strategy.path}", f"{other.recipe_name} under {other.strategy.path}"),
        short=(
            {one.recipe_name: "A recipe", **_short(one.strategy, "A ")},
            {other.recipe_name: "B recipe", **_short(other.strategy, "B ")},
        ),
        settings=(one.setting, other.setting),
        differences=differences,
        caveats=_caveats(one, other) if differences or one.setting != other.setting else [],
    )


def _changes(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(`section.key`, value, other value) where they differ; a section that only one has, as a whole."""
    for key in dict.fromkeys((*one, *other)):
        first, second = one.get(key), other.get(key)
        if isinstance(first, dict) and isinstance(second, dict):
            yield from _changes(first, second, f"{prefix}{key}.")
        elif first != second:
            yield f"{prefix}{key}", first, second


def _readable(recipe: Recipe) -> dict[str, Any]:
    """The values of a recipe, its sources in a line each."""
    values = recipe.model_dump(mode="json")
    values["data"]["train"] = "; ".join(map(_source, recipe.data.train))
    held_out = [f"{name}: {_source(one)}" if name else _source(one) for name, one in recipe.data.eval.items()]
    values["data"]["eval"] = "; ".join(held_out) or None
    return values


def _source(one: Source) -> str:
    rest = one.model_dump(exclude_defaults=True, exclude={"path"})
    return ", ".join([one.path, *(f"{key} {value}" for key, value in rest.items())])


def _short(strategy: Strategy, side: str) -> dict[str, str]:
    files = {strategy.path: f"{side}yaml"}
    return files | ({strategy.deepspeed_file: f"{side}json"} if strategy.deepspeed_file else {})


def _strategy_differences(one: Strategy, other: Strategy) -> list[Difference]:
    """Keys of the YAML and of the JSON. Of a JSON that only one has, the name; of two, what is in them."""
    if one.path == other.path:
        return []
    pairs = [(read_document(Path(one.path)), read_document(Path(other.path)))]
    if one.deepspeed_file is not None and other.deepspeed_file is not None:
        pairs.append((read_document(Path(one.deepspeed_file)), read_document(Path(other.deepspeed_file))))
    found = []
    for pair in pairs:
        for key, first, second in _changes(pair[0].values, pair[1].values):
            if key != "deepspeed_config.deepspeed_config_file":
                sources = (source(pair[0], key), source(pair[1], key))
                found.append(Difference(key=key, values=(first, second), sources=sources, effect="strategy"))
    return found


def _caveats(one: Explanation, other: Explanation) -> list[str]:
    found = []
    if any(run.recipe.adapter is not None and run.recipe.adapter.dropout for run in (one, other)):
        found.append("adapter.dropout is above 0: what is dropped depends on processes and micro-batches")
    is_zero = [run.strategy.kind == "zero" for run in (one, other)]
    if one.recipe.mixed_precision == "fp16" and is_zero[0] != is_zero[1]:
        found.append("fp16: each engine skips other steps until its loss scale has settled")
    return found


def in_words(found: Comparison) -> str:
    """The page for a terminal."""
    names = page(*((side, short(name)) for side, name in zip("AB", found.names, strict=True)))
    if not found.differences and found.settings[0] == found.settings[1]:
        return f"{names}\n\nNothing differs."
    keys: list[Row] = []
    for effect, title in EFFECTS.items():
        if these := [one for one in found.differences if one.effect == effect]:
            keys += ["", f"KEYS {title}", *(_row(one, found.short) for one in these)]
    parts = [names, page(*keys)] if keys else [names]
    for title, what in (("MEMORY", _memory), ("TRAFFIC", costs.traffic_in_words)):
        parts += ["", f"{title}, {BASIS[title]}", _sides(found, what)]
    one, other = (costs.precision(setting) for setting in found.settings)
    if precisions := [
        (name, f"{first or 'none'} -> {second or 'none'}") for name, first, second in _changes(one, other)
    ]:
        parts += ["", "PRECISION", page(*precisions)]
    return "\n".join([*parts, "", "CURVE", page(*((line,) for line in _curve(found)))])


BASIS = {
    "MEMORY": "bytes of a trained parameter on each process; activations and buffers come on top",
    "TRAFFIC": "bytes of a trained parameter that each process sends in a step",
}


def _row(one: Difference, short: tuple[dict[str, str], dict[str, str]]) -> tuple[str, ...]:
    places = [shorten(place, names) for place, names in zip(one.sources, short, strict=True)]
    if one.effect == "strategy":  # what is not in a strategy file is nowhere; in a recipe it is the default
        places = [place for place, value in zip(places, one.values, strict=True) if value is not None]
    return one.key, " -> ".join(map(_shown, one.values)), " -> ".join(dict.fromkeys(places))


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(one)}" for key, one in value.items())
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else show(value)


def _memory(setting: CostInputs) -> str:
    words = [(where, costs.states_in_words(setting, where)) for where in costs.PLACES]
    return " | ".join(f"{where}: {text}" for where, text in words if text)


def _sides(found: Comparison, what: Callable[[CostInputs], str]) -> str:
    texts = [what(setting) for setting in found.settings]
    if texts[0] == texts[1]:
        return page((f"the same: {texts[0]}",))
    counts = [setting.num_processes for setting in found.settings]
    if counts[0] != counts[1]:
        texts = [
            text if text == costs.NO_TRAFFIC else f"{text} ({several(count, 'process')})"
            for text, count in zip(texts, counts, strict=True)
        ]
    return page(*zip("AB", texts, strict=True))


def _curve(found: Comparison) -> list[str]:
    changing = [one.key for one in found.differences if one.effect == "curve"]
    if found.same_curve:
        lines = ["the same, but for rounding: nothing that differs affects the mathematics (docs/equivalence.md)"]
        if costs.precision(found.settings[0])["compute"] != costs.precision(found.settings[1])["compute"]:
            lines.append("in bf16 these two round at different places, so it is a band that they share")
    else:
        named = ", ".join(changing) if len(changing) < 5 else f"the first {len(changing)} keys above"
        lines = [f"may differ, by {named}"] if changing else []
        lines += [f"may differ: {caveat}" for caveat in found.caveats]
    optimizers = {setting.optim.name: setting.optim for setting in found.settings}
    return lines + [f"{name}: {optim.caveat}" for name, optim in optimizers.items() if optim.caveat]


def as_dict(found: Comparison) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "names": list(found.names),
        "differences": [vars(one) for one in found.differences],
        "bytes_a_parameter": [costs.as_dict(setting) for setting in found.settings],
        "precision": [costs.precision(setting) for setting in found.settings],
        "same_curve": found.same_curve,
    }


def compare(
    first: str, second: str, *, override: Path | None, assignments: list[str], processes: int | None
) -> Comparison:
    """Two recipes, a recipe under its own and another strategy, or two strategies; each by name or path.

    Raises:
        RecipeError: all mistakes of all files, or a strategy before its recipe.
    """
    if is_strategy(first):
        if not is_strategy(second):
            raise RecipeError(f"explain {first} {second}: write the recipe first")
        if assignments or override:
            raise RecipeError("--set and --strategy go with a recipe; two strategies have none")
        return compare_strategies(find_strategy(first), find_strategy(second), processes)
    recipes, strategies = [Path(first)], [override, override]
    if is_strategy(second):
        recipes.append(Path(first))
        strategies[1] = find_strategy(second)
    else:
        recipes.append(Path(second))
    runs: list[Explanation] = []
    mistakes: list[str] = []
    for path, strategy in zip(recipes, strategies, strict=True):
        with gathered(mistakes):
            _, loaded = load_pair(path, assignments, strategy)
            asked = processes if loaded.num_processes is None else None  # some strategies have a number of their own
            runs.append(explain(path, strategy_path=strategy, assignments=assignments, processes=asked))
    refuse(mistakes)
    return compare_runs(runs[0], runs[1], assignments)
