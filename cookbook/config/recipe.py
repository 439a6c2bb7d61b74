"""A recipe: what to train. `sections` has its keys with their defaults, `checks` what no section sees alone.

A file becomes a recipe in `STEPS`, each of which takes a draft and returns it, with its mistakes. `start.run_plan`
continues the list, to a recipe with its strategy and to a run.

`cookbook schema` writes `recipes/schema.json` from these models, so that an editor completes and checks a
recipe while it is typed.
"""

import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, Field, SerializeAsAny

from cookbook.config import base_recipe, foreign, plugins
from cookbook.config.base_recipe import over_base
from cookbook.config.checks import KINDS, check_across_keys
from cookbook.config.objectives import Objective
from cookbook.config.objectives.token_loss import SFT
from cookbook.config.optim import Optimizer
from cookbook.config.schedule import Cosine, Schedule
from cookbook.config.sections import (
    BUILTIN_SOURCE,
    AdapterSection,
    BatchSection,
    DataSection,
    LossScaleSection,
    ModelSection,
    OneOf,
    RoundsSection,
    RunSection,
)
from cookbook.config.strategy import STRATEGIES, strategy_path
from cookbook.system.files import (
    Document,
    KeyPath,
    PathText,
    RecipeError,
    apply_overrides,
    closest,
    dump_yaml,
    gather_mistakes,
    path_problem,
    read_document,
    refuse,
)
from cookbook.system.imports import show_torchao
from cookbook.system.registry import NamedSection, Section
from cookbook.system.shipped import HOME, is_short, path_from_here
from cookbook.system.validation import parts, validate

RECIPES = Path("recipes")


class Recipe(Section):
    """A reproducible fine-tuning run."""

    strategy: Annotated[PathText, AfterValidator(lambda name: str(strategy_path(name)))] = Field(examples=["fsdp2"])
    """A name in accelerate_configs/ such as zero3, or the path of an accelerate YAML. `accelerate launch --config_file`
    overrides it, and the run logs that."""
    mixed_precision: Literal["no", "bf16", "fp16", "fp8"] = "bf16"
    """'no' is float32; fp16 uses loss scaling and needs a GPU; fp8 is bf16 with the layers' products in 8 bits, and
    needs torchao and a GPU of Ada, Hopper or later."""
    loss_scale: LossScaleSection | None = None
    """Loss scaling, for mixed_precision: fp16 only."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of data order, new weights and dropout."""
    plugins: list[PathText] = []
    """Python files that add objectives, optimizers, schedules, kinds of rows, reward functions, metrics or callbacks.
    They run with your rights."""
    model: ModelSection = Field(examples=[{"name_or_path": "my-model"}])
    """The model that is trained, and how its layers run."""
    data: DataSection = Field(examples=[{"train": "rows.jsonl"}])
    """Rows to train on and held-out rows, and how a row becomes tokens."""
    objective: SerializeAsAny[Objective] = SFT()
    """The loss, by its name."""
    adapter: AdapterSection | None = None
    """Default: none; all weights are trained."""
    batch: BatchSection = Field(examples=[{"global_batch_size": 64, "micro_batch_size": 4}])
    """Samples or tokens of an optimizer step, and of a forward on one process."""
    optim: SerializeAsAny[Optimizer] = Field(examples=[{"learning_rate": 0.0001}])
    """The optimizer, by its name, and its learning rate."""
    schedule: SerializeAsAny[Schedule] = Cosine()
    """The learning rate over the steps of the run, by the name of its shape."""
    run: RunSection = Field(examples=[{"num_epochs": 1}])
    """Length of the run, its folder, evaluation, checkpoints and metrics."""
    rounds: RoundsSection | None = None
    """Rounds of sampling and training on what was sampled, for `cookbook rounds`. Default: one run on stored rows."""

    @property
    def compute_precision(self) -> Literal["no", "bf16", "fp16"]:
        """The precision of everything but fp8's products."""
        return "bf16" if self.mixed_precision == "fp8" else self.mixed_precision

    @property
    def loss_scaling(self) -> LossScaleSection | None:
        """The loss scale of fp16; None without it."""
        return (self.loss_scale or LossScaleSection()) if self.mixed_precision == "fp16" else None

    def in_schedule(self, step: int, max_steps: int) -> tuple[int, int]:
        """A step of a run and its number of steps as the schedule has them: of rounds, over all of them."""
        if self.rounds is None:
            return step, max_steps
        return step + ((self.rounds.round or 1) - 1) * max_steps, self.rounds.num_rounds * max_steps


def default_output_dir(path: Path, strategy: str) -> str:
    """`outputs/llama31_8b-sft-zero3` for recipes/llama31_8b/sft.yaml under `zero3` or its file."""
    file = Path(os.path.realpath(path))
    known = (RECIPES.resolve(), (HOME / RECIPES).resolve(), Path.cwd())
    folders = (folder for folder in known if file.is_relative_to(folder))
    parts = file.relative_to(next(folders, file.parent)).with_suffix("").parts
    return f"outputs/{'-'.join([*parts, Path(strategy).stem])}"


AnyDraft = TypeVar("AnyDraft", bound="Draft")


@dataclass
class Draft(Document):
    """A recipe's document on its way to a recipe, with what the steps have made of it.

    Without `values` it is read from the file `name`.
    """

    values: Any = None
    assignments: Sequence[str] = ()
    """`section.key=value`, each of which takes the place of the file's own."""
    choose_strategy: Callable[[Path | None], Path | None] = lambda named: named
    """Function from the strategy's file that the recipe names, None if that does not exist, to that of the run."""
    strategy_file: Path | None = None
    default_folder: str = ""
    """Output folder of a run whose recipe names none."""
    strategy_mistakes: list[str] = field(default_factory=list)
    """Mistakes of the choice and of the strategy's files, reported after the recipe's own."""
    valid: dict[str, Any] = field(default_factory=dict)
    """Sections and the precision that are valid by themselves, by name; None for one with mistakes."""
    recipe: Recipe | None = None
    """As if every misspelt key had its nearest name; None if there are other mistakes."""

    @property
    def path(self) -> Path:
        """The place of the file, from which its relative paths start."""
        return self.file or Path(self.name)

    def file_of(self, *path: str | int) -> Path:
        """The file in which a value is written, where its relative path starts."""
        known = (path[:length] for length in range(len(path), 0, -1) if path[:length] in self.lines)
        inherited = self.inherited.get(next(known, ()))
        return self.path if inherited is None else Path(inherited)


Step = Callable[[Any], Any]
"""From a draft to the same draft, one step further; mistakes are added to it, so that all are reported together."""


def read_recipe(path: Path, assignments: Iterable[str] = ()) -> Document:
    """The values in a recipe's file, and in that of its base if it has one, with `section.key=value` over them.

    Raises:
        RecipeError: a file that cannot be read, or a base that the recipe cannot have.
    """
    document = read_document(path, assignments)
    return over_base(path, assignments) if base_recipe.KEY in document.values else document


def load_recipe(path: Path, assignments: list[str] | None = None) -> Recipe:
    """The validated recipe in a file, with `section.key=value` assignments applied.

    Raises:
        RecipeError: all mistakes together, each with its place.
    """
    return parse_recipe(Draft(str(path), assignments=assignments or ()))


def read_located(path: Path) -> Draft:
    """The values of a recipe's file and its base as they are written, with its relative paths as they are reached from
    the current folder.

    Raises:
        RecipeError: a file that cannot be read.
    """
    draft = Draft(str(path))
    for step in (_read, _choose_alternatives, _locate_paths):
        draft = step(draft)
    refuse(draft.mistakes)
    return draft


def parse_recipe(draft: Draft) -> Recipe:
    """The validated recipe of a draft; raises as `load_recipe`."""
    draft_recipe(draft)
    refuse(draft.mistakes)
    assert draft.recipe is not None
    return draft.recipe


def draft_recipe(draft: AnyDraft) -> AnyDraft:
    """The draft after all of STEPS: a recipe, or mistakes."""
    for step in STEPS:
        draft = step(draft)
    return draft


def _read(draft: Draft) -> Draft:
    """Read the file, and write the assignments into it."""
    if draft.values is not None:
        apply_overrides(draft, draft.assignments)
        return draft
    draft.values, draft.is_whole = {}, False
    try:
        document = read_recipe(Path(draft.name), draft.assignments)
    except RecipeError as error:
        draft.mistakes = error.mistakes
        return draft
    in_file = {path[0] for path in document.lines if path}
    if {"distributed_type", "zero_optimization"} & in_file and "model" not in in_file:
        way = (
            f"name a recipe, and this behind it, as in cookbook launch recipes/quickstart.yaml --strategy {draft.name}"
        )
        draft.mistakes = [f"{draft.name}: is of a strategy, not a recipe; {way}"]
        return draft
    draft.is_whole = True
    draft.values, draft.lines, draft.overrides = document.values, document.lines, document.overrides
    draft.mistakes, draft.inherited, draft.digests = document.mistakes, document.inherited, document.digests
    draft.empty = document.empty
    draft.notes += document.notes
    return draft


def _take_out_nulls(draft: Draft) -> Draft:
    """Take out what an assignment gives null, as if it had never been written; a name that no recipe has is a mistake
    all the same.
    """
    known = {*leaves(Recipe)} if draft.overrides else set()
    for path in draft.overrides:
        if path in draft.lines or ".".join(map(str, path)) in known:
            _take_out_null(draft.values, path, (), draft.lines.keys())
    return draft


def _read_bare_no(draft: Draft) -> Draft:
    """Undo YAML's reading of a bare no in --set mixed_precision=no, of which a shell takes the quotes away."""
    if ("mixed_precision",) in draft.overrides and draft.values.get("mixed_precision") is False:
        draft.values["mixed_precision"] = "no"
    return draft


def _take_out_null(values: Any, path: KeyPath, above: KeyPath, written: Container[KeyPath]) -> None:
    name, *rest = path
    if not isinstance(values, dict) or name not in values:
        return
    here = (*above, name)
    if rest:
        _take_out_null(values[name], tuple(rest), here, written)
    if values[name] is None or (values[name] == {} and rest and here not in written):  # a section of --set
        del values[name]


def _choose_alternatives(draft: Draft) -> Draft:
    """A key that --set gives takes the place of its alternative in the files, `run.max_steps=50` that of num_epochs; so
    does one of the recipe that of its base.
    """
    kinds: dict[str, type[OneOf]] = {"run": RunSection, "batch": BatchSection, "model": ModelSection}
    pairs = [(name, kind.alternatives) for name, kind in kinds.items()]
    for name, pair in (*pairs, *(("run", pair) for pair in RunSection.cadences.items())):
        section = draft.values.get(name)
        if not isinstance(section, dict):
            continue
        ranks = [_rank(draft, name, key) for key in pair if section.get(key) is not None]
        if len(ranks) == len(pair):
            for key in [key for key in pair if _rank(draft, name, key) < max(ranks)]:
                del section[key]
    return draft


def _rank(draft: Draft, *path: str) -> int:
    """The order in which sources of a key's value go before others: the base, the recipe, the command line."""
    if path in draft.overrides:
        return 2
    return 0 if path in draft.inherited and path[:1] not in draft.overrides else 1


def _use_plugins(draft: Draft) -> Draft:
    """Import the plugins of a recipe and replace their paths by absolute ones. Without one of them, the names that it
    has would be mistakes too.
    """
    values = draft.values.get("plugins", [])
    if not isinstance(values, list) or any(not isinstance(value, str) or path_problem(value) for value in values):
        plugins.use([])
        return draft  # `_validate` reports these
    folder, mistakes = draft.file_of("plugins").parent, []
    files = [str((folder / value).resolve()) for value in values]
    for i, (value, file) in enumerate(zip(values, files, strict=True)):
        place = draft.place("plugins", i)
        if not Path(file).is_file():
            mistakes.append(f"{place} is {value!r}: no such file (looked in {folder.resolve()})")
        elif files.index(file) != i:
            mistakes.append(f"{place} is {value!r}, given twice; keep one of them")
    if values and not mistakes:
        show_torchao()
        draft.values["plugins"] = files
    try:
        plugins.use([] if mistakes else files)
    except RecipeError as error:
        mistakes = [f"{draft.place('plugins')}: {mistake}" for mistake in error.mistakes]
    draft.mistakes += mistakes
    draft.is_whole = draft.is_whole and not mistakes
    return draft


LOCAL = (
    ("model", "name_or_path"),
    ("data", "chat_template"),
    ("data", "train"),
    ("data", "eval"),
    ("adapter", "path"),
    ("objective", "teacher"),
)
"""Keys whose relative paths are the recipe's own. What a run writes goes into the current folder."""


def _locate_paths(draft: Draft) -> Draft:
    """Relative paths of the recipe as they are reached from the current folder; --set names what is there already."""
    given = draft.overrides

    def reach(value: Any, where: KeyPath) -> Any:
        if where in given or (where == ("data", "chat_template") and isinstance(value, str) and is_short(value)):
            return value
        if isinstance(value, str) and value != BUILTIN_SOURCE and path_problem(value) is None:
            return path_from_here(value, draft.file_of(*where))
        inner = {"path": value["path"]} if isinstance(value, dict) and "path" in value else value
        if isinstance(inner, dict):
            return value | {key: reach(part, (*where, key)) for key, part in inner.items()}
        if isinstance(value, list):
            return [reach(part, (*where, i)) for i, part in enumerate(value)]
        return value

    for section, key in LOCAL:
        values = draft.values.get(section)
        if isinstance(values, dict) and key in values:
            values[key] = reach(values[key], (section, key))
    named = draft.values.get("strategy")
    if isinstance(named, str) and path_problem(named) is None and ("strategy",) not in given:
        path = path_from_here(
            str(STRATEGIES / f"{named}.yaml") if is_short(named) else named, draft.file_of("strategy")
        )
        draft.values["strategy"] = path if Path(path).is_file() else named
    return draft


def _find_strategy(draft: Draft) -> Draft:
    """Choose the strategy's file, by which the folder of a run is called."""
    name = draft.values.get("strategy")
    is_path = isinstance(name, str) and path_problem(name) is None
    named = strategy_path(name) if is_path and strategy_path(name).is_file() else None
    with gather_mistakes(draft.strategy_mistakes):
        draft.strategy_file = draft.choose_strategy(named)
    if draft.strategy_file is not None:
        draft.values.setdefault("strategy", str(draft.strategy_file))
    if draft.is_whole:
        draft.default_folder = default_output_dir(draft.path, str(draft.strategy_file or (name if is_path else "")))
    run = draft.values.get("run")
    if isinstance(run, dict) and run.get("output_dir") is None:
        run["output_dir"] = draft.default_folder
    return draft


def _validate(draft: Draft) -> Draft:
    if not draft.is_whole:
        return draft
    draft.recipe, mistakes = validate(draft, Recipe, answer_to, foreign.meaning_of)
    if mistakes or draft.recipe is None:
        precision = draft.values.get("mixed_precision", "bf16")
        is_known = precision in get_args(Recipe.model_fields["mixed_precision"].annotation)
        draft.valid = {**parts(draft, KINDS), "mixed_precision": precision if is_known else None}
    else:
        draft.valid = {name: getattr(draft.recipe, name) for name in (*Recipe.model_fields, "loss_scaling")}
    draft.mistakes += mistakes
    return draft


def _check_across_keys(draft: Draft) -> Draft:
    if draft.is_whole:
        draft.mistakes += check_across_keys(draft, draft.valid, lambda: {*leaves(Recipe)})
    return draft


STEPS: tuple[Step, ...] = (
    _read,
    _take_out_nulls,
    _read_bare_no,
    _choose_alternatives,
    _use_plugins,
    _locate_paths,
    _find_strategy,
    _validate,
    _check_across_keys,
)
"""The way of a file to a recipe."""


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a model and its sections, of each kind where a name selects them."""
    for name, info in model.model_fields.items():
        sections = [kind for kind in (info.annotation, *get_args(info.annotation)) if isinstance(kind, type)]
        inner = next((kind for kind in sections if issubclass(kind, BaseModel)), None)
        yield prefix + name
        if inner is not None:
            for kind in inner.kinds() if issubclass(inner, NamedSection) else [inner]:
                yield from leaves(kind, f"{prefix}{name}.")


OWN_NAMES = {path.rpartition(".")[2] for path in leaves(Recipe)}


def answer_to(key: str) -> str | None:
    """Advice for a key that is no recipe's, but another file's or project's; None: nobody has it."""
    known = foreign.answers()
    if key in OWN_NAMES or (key in known and foreign.is_vague(key) and closest(key, OWN_NAMES) is not None):
        return None
    return known.get(key, known.get(key.lower()))


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe with all defaults, as YAML that `load_recipe` reads back to an equal value."""
    values = recipe.model_dump(mode="json", exclude_none=True)
    if not recipe.data.streaming:
        del values["data"]["shuffle_rows"]  # load_recipe refuses a key that means nothing
    if not recipe.plugins:
        del values["plugins"]
    if list(recipe.data.eval) == [""]:
        values["data"]["eval"] = values["data"]["eval"][""]
    return dump_yaml(values)


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe. Keys that have no default are required of one without a base."""
    schema = Recipe.model_json_schema()
    needed = _required_keys(schema, schema["$defs"])
    _take_out_required(schema)
    schema["properties"] = {base_recipe.KEY: base_recipe.SCHEMA, **schema["properties"]}
    schema |= {"if": {"required": [base_recipe.KEY]}, "else": needed}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema


def _required_keys(node: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """The keys that a part of a schema requires, at any depth, as a schema of its own."""
    if "$ref" in node:
        node = sections[node["$ref"].rpartition("/")[2]]
    needed: dict[str, Any] = {"required": node["required"]} if "required" in node else {}
    properties = {key: _required_keys(inner, sections) for key, inner in node.get("properties", {}).items()}
    if properties := {key: inner for key, inner in properties.items() if inner}:
        needed["properties"] = properties
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict) and (inner := _required_keys(node[key], sections)):
            needed[key] = inner
    ways = [(way, _required_keys(way, sections)) for way in node.get("anyOf", ())]
    if any(inner for _, inner in ways):
        needed["anyOf"] = [_sign(way, sections) | inner for way, inner in ways]
    return needed


def _sign(way: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """The type of an alternative in a schema, and the name of its kind: they tell it from the others."""
    way = sections[way["$ref"].rpartition("/")[2]] if "$ref" in way else way
    name = way.get("properties", {}).get("name", {})
    kind = {"properties": {"name": {"const": name["const"]}}} if "const" in name else {}
    return {key: way[key] for key in ("type",) if key in way} | kind


def _take_out_required(node: Any) -> None:
    if isinstance(node, dict):
        node.pop("required", None)
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _take_out_required(inner)
