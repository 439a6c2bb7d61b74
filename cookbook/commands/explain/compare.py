"""Differences between two runs, or two strategies, in words: keys, memory, traffic, precision, and the curve."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.commands.explain.explanation import Explanation, explain, shorten, source
from cookbook.config.effects import EFFECTS, effect_of
from cookbook.config.optim import number
from cookbook.config.recipe import Recipe, read_recipe
from cookbook.config.sections import Source
from cookbook.config.strategy import Strategy, find_strategy, load_strategy
from cookbook.forecast.costs import per_parameter as costs
from cookbook.forecast.costs.inputs import CostInputs
from cookbook.start.run_plan import load_pair
from cookbook.system.console import Row, page, several
from cookbook.system.files import RecipeError, gather_mistakes, read_document, refuse, show
from cookbook.system.shipped import is_short, path_from_here, short

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
        """Return whether no difference changes the curve."""
        return not self.caveats and all(difference.effect != "curve" for difference in self.differences)


def is_strategy(name: str) -> bool:
    """Return whether an argument names a strategy, by its name or its file, and not a recipe."""
    if is_short(name):
        return True
    values = read_document(Path(path_from_here(name))).values
    return "distributed_type" in values or "compute_environment" in values


def compare_strategies(first: Path, second: Path, processes: int | None) -> Comparison:
    """Two strategies without a recipe: all weights under bf16 and adamw, one micro-batch a step.

    Raises:
        RecipeError: the mistakes of both.
    """
    strategies: list[Strategy] = []
    mistakes: list[str] = []
    for path in (first, second):
        with gather_mistakes(mistakes):
            strategies.append(load_strategy(path))
    refuse(mistakes)
    left, right = strategies
    fixed = [s.num_processes for s in strategies if (s.num_processes or 1) > 1]
    count = processes or next(iter(fixed), None) or DEFAULT_PROCESSES
    counts = [strategy.num_processes or count for strategy in strategies]
    settings = [
        CostInputs(strategy=s.for_processes(count), num_processes=count)
        for s, count in zip(strategies, counts, strict=True)
    ]
    return Comparison(
        names=(left.path, right.path),
        short=(_short(left, "A "), _short(right, "B ")),
        settings=(settings[0], settings[1]),
        differences=_strategy_differences(left, right),
        caveats=[],
    )


def compare_runs(left: Explanation, right: Explanation, assignments: list[str] | None = None) -> Comparison:
    """Two runs.

    Args:
        assignments: those that both were made with.
    """
    documents = [read_recipe(Path(run.recipe_name), assignments or ()) for run in (left, right)]
    differences = []
    for key, first, second in _changes(_readable(left.recipe), _readable(right.recipe)):
        if key != "strategy":
            sources = (source(documents[0], key), source(documents[1], key))
            differences.append(Difference(key=key, values=(first, second), sources=sources, effect=effect_of(key)))
    differences += _strategy_differences(left.strategy, right.strategy)
    return Comparison(
        names=(f"{left.recipe_name} under {left.strategy.path}", f"{right.recipe_name} under {right.strategy.path}"),
        short=(
            {**_of_recipe(left, "A "), **_short(left.strategy, "A ")},
            {**_of_recipe(right, "B "), **_short(right.strategy, "B ")},
        ),
        settings=(left.setting, right.setting),
        differences=differences,
        caveats=_caveats(left, right) if differences or left.setting != right.setting else [],
    )


def _changes(left: Mapping[str, Any], right: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(`section.key`, value, other value) where they differ; a section that only one has, as a whole."""
    for key in dict.fromkeys((*left, *right)):
        first, second = left.get(key), right.get(key)
        if isinstance(first, dict) and isinstance(second, dict):
            yield from _changes(first, second, f"{prefix}{key}.")
        elif first != second:
            yield f"{prefix}{key}", first, second


def _readable(recipe: Recipe) -> dict[str, Any]:
    """The values of a recipe, its sources in a line each."""
    values = recipe.model_dump(mode="json")
    values["data"]["train"] = "; ".join(map(_source, recipe.data.train))
    held_out = [f"{name}: {_source(rows)}" if name else _source(rows) for name, rows in recipe.data.eval.items()]
    values["data"]["eval"] = "; ".join(held_out) or None
    return values


def _source(data: Source) -> str:
    settings = data.model_dump(exclude_defaults=True, exclude={"path"})
    return ", ".join([data.path, *(f"{key} {value}" for key, value in settings.items())])


def _of_recipe(run: Explanation, side: str) -> dict[str, str]:
    return {run.files[name].value: f"{side}{name}" for name in ("recipe", "base") if name in run.files}


def _short(strategy: Strategy, side: str) -> dict[str, str]:
    files = {strategy.path: f"{side}yaml"}
    return files | ({strategy.deepspeed_file: f"{side}json"} if strategy.deepspeed_file else {})


def _strategy_differences(left: Strategy, right: Strategy) -> list[Difference]:
    """Keys of the YAML and of the JSON. Of a JSON that only one has, the name; of two, what is in them."""
    if left.path == right.path:
        return []
    pairs = [(read_document(Path(left.path)), read_document(Path(right.path)))]
    if left.deepspeed_file is not None and right.deepspeed_file is not None:
        pairs.append((read_document(Path(left.deepspeed_file)), read_document(Path(right.deepspeed_file))))
    differences = []
    for pair in pairs:
        for key, first, second in _changes(pair[0].values, pair[1].values):
            if key != "deepspeed_config.deepspeed_config_file":
                sources = (source(pair[0], key), source(pair[1], key))
                differences.append(Difference(key=key, values=(first, second), sources=sources, effect="strategy"))
    return differences


def _caveats(left: Explanation, right: Explanation) -> list[str]:
    caveats = []
    is_zero = [run.strategy.kind == "zero" for run in (left, right)]
    if left.recipe.mixed_precision == "fp16" and is_zero[0] != is_zero[1]:
        caveats.append("fp16: each engine skips other steps until its loss scale has settled")
    return caveats


def in_words(comparison: Comparison) -> str:
    """The page for a terminal."""
    names = page(*((side, short(name)) for side, name in zip("AB", comparison.names, strict=True)))
    if not comparison.differences and comparison.settings[0] == comparison.settings[1]:
        return f"{names}\n\nNothing differs."
    keys: list[Row] = []
    for effect, title in EFFECTS.items():
        if chosen := [difference for difference in comparison.differences if difference.effect == effect]:
            keys += ["", f"KEYS {title}", *(_row(difference, comparison.short) for difference in chosen)]
    parts = [names, page(*keys)] if keys else [names]
    for title, what in (("MEMORY", _memory), ("TRAFFIC", costs.traffic_in_words)):
        parts += ["", f"{title}, {BASIS[title]}", _sides(comparison, what)]
    left, right = (costs.precision(setting) for setting in comparison.settings)
    if precisions := [
        (name, f"{first or 'none'} -> {second or 'none'}") for name, first, second in _changes(left, right)
    ]:
        parts += ["", "PRECISION", page(*precisions)]
    return "\n".join([*parts, "", "CURVE", page(*((line,) for line in _curve(comparison)))])


BASIS = {
    "MEMORY": "bytes of a trained parameter on each process; activations and buffers come on top",
    "TRAFFIC": "bytes of a trained parameter that each process sends in a step",
}


def _row(difference: Difference, short: tuple[dict[str, str], dict[str, str]]) -> tuple[str, ...]:
    places = [shorten(place, names) for place, names in zip(difference.sources, short, strict=True)]
    if difference.effect == "strategy":  # what is not in a strategy file is nowhere; in a recipe it is the default
        places = [place for place, value in zip(places, difference.values, strict=True) if value is not None]
    return difference.key, " -> ".join(map(_describe, difference.values)), " -> ".join(dict.fromkeys(places))


def _describe(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_describe(item)}" for key, item in value.items())
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else show(value)


def _memory(setting: CostInputs) -> str:
    words = [(where, costs.states_in_words(setting, where)) for where in costs.PLACES]
    return " | ".join(f"{where}: {text}" for where, text in words if text)


def _sides(comparison: Comparison, what: Callable[[CostInputs], str]) -> str:
    texts = [what(setting) for setting in comparison.settings]
    if texts[0] == texts[1]:
        return page((f"the same: {texts[0]}",))
    counts = [setting.num_processes for setting in comparison.settings]
    if counts[0] != counts[1]:
        texts = [
            text if text == costs.NO_TRAFFIC else f"{text} ({several(count, 'process')})"
            for text, count in zip(texts, counts, strict=True)
        ]
    return page(*zip("AB", texts, strict=True))


def _curve(comparison: Comparison) -> list[str]:
    changing = [difference.key for difference in comparison.differences if difference.effect == "curve"]
    if comparison.same_curve:
        lines = ["the same, but for rounding: nothing that differs affects the mathematics (docs/equivalence.md)"]
        if costs.precision(comparison.settings[0])["compute"] != costs.precision(comparison.settings[1])["compute"]:
            lines.append("in bf16 these two round at different places, so it is a band that they share")
    else:
        named = ", ".join(changing) if len(changing) < 5 else f"the first {len(changing)} keys above"
        lines = [f"may differ, by {named}"] if changing else []
        lines += [f"may differ: {caveat}" for caveat in comparison.caveats]
    optimizers = {setting.optim.name: setting.optim for setting in comparison.settings}
    return lines + [f"{name}: {optim.caveat}" for name, optim in optimizers.items() if optim.caveat]


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "names": list(comparison.names),
        "differences": [vars(difference) for difference in comparison.differences],
        "bytes_a_parameter": [costs.as_dict(setting) for setting in comparison.settings],
        "precision": [costs.precision(setting) for setting in comparison.settings],
        "same_curve": comparison.same_curve,
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
        with gather_mistakes(mistakes):
            _, loaded = load_pair(path, assignments, strategy)
            asked = processes if loaded.num_processes is None else None  # some strategies have a number of their own
            runs.append(explain(path, strategy_path=strategy, assignments=assignments, processes=asked))
    refuse(mistakes)
    return compare_runs(runs[0], runs[1], assignments)
