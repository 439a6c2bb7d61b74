"""A recipe: what to train. `sections` has its keys with their defaults, `checks` what no section sees alone.

A file becomes a recipe in `STEPS`, each from document to document with the mistakes on the way in it (`open_recipe`),
and is then validated (`parse_recipe`).

`cookbook schema` writes `recipes/schema.json` from these models, so that an editor completes and checks a
recipe while it is typed.
"""

import os
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, Field, SerializeAsAny

from cookbook.config import foreign, plugins
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
    dump_yaml,
    path_problem,
    read_document,
)
from cookbook.system.imports import show_torchao
from cookbook.system.registry import Named, Section
from cookbook.system.shipped import HOME, is_short, located
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
    """Python files that add objectives, optimizers, schedules or kinds of rows. They run with your rights."""
    model: ModelSection = Field(examples=[{"name_or_path": "my-model"}])
    data: DataSection = Field(examples=[{"train": "rows.jsonl"}])
    objective: SerializeAsAny[Objective] = SFT()
    adapter: AdapterSection | None = None
    """Default: none; all weights are trained."""
    batch: BatchSection = Field(examples=[{"global_batch_size": 64, "micro_batch_size": 4}])
    optim: SerializeAsAny[Optimizer] = Field(examples=[{"learning_rate": 0.0001}])
    schedule: SerializeAsAny[Schedule] = Cosine()
    run: RunSection = Field(examples=[{"num_epochs": 1}])
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


def load_recipe(path: Path, assignments: list[str] | None = None) -> Recipe:
    """The validated recipe in a file, with `section.key=value` assignments applied.

    Raises:
        RecipeError: all mistakes together, each with its place.
    """
    return parse_recipe(open_recipe(path, assignments))


def open_recipe(path: Path, assignments: list[str] | None = None) -> Document:
    """A recipe's file before validation: with assignments, located paths, and its plugins imported."""
    try:
        document = read_document(path)
    except RecipeError as error:
        return Document(str(path), {}, mistakes=error.mistakes, is_whole=False)
    keys = {*document.values} if isinstance(document.values, dict) else set()
    if {"distributed_type", "zero_optimization"} & keys and "model" not in keys:
        way = f"name a recipe, and this behind it, as in cookbook launch recipes/quickstart.yaml --strategy {path}"
        return Document(str(path), {}, mistakes=[f"{path}: is of a strategy, not a recipe; {way}"], is_whole=False)
    return prepare(document, assignments)


def prepare(document: Document, assignments: list[str] | None = None) -> Document:
    """As `open_recipe`, for a document that has been read."""
    document = apply_overrides(document, assignments or [])
    for step in STEPS:
        document = step(document)
    return document


def _take_out_nulls(document: Document) -> Document:
    """Take out what --set gives null, as if it had never been written; a name that no recipe has is a mistake all the
    same."""
    known = {*leaves(Recipe)}
    for path in document.overrides:
        if path in document.lines or ".".join(map(str, path)) in known:
            _take_out_null(document.values, path, (), document.lines.keys())
    return document


def _read_bare_no(document: Document) -> Document:
    """Undo YAML's reading of a bare no in --set mixed_precision=no, of which a shell takes the quotes away."""
    if ("mixed_precision",) in document.overrides and document.values.get("mixed_precision") is False:
        document.values["mixed_precision"] = "no"
    return document


def _take_out_null(values: Any, path: KeyPath, above: KeyPath, written: Container[KeyPath]) -> None:
    name, *rest = path
    if not isinstance(values, dict) or name not in values:
        return
    here = (*above, name)
    if rest:
        _take_out_null(values[name], tuple(rest), here, written)
    if values[name] is None or (values[name] == {} and rest and here not in written):  # a section of --set
        del values[name]


def parse_recipe(document: Document, strategy: Path | None = None) -> Recipe:
    """The validated recipe of a prepared document.

    Args:
        strategy: the run's, if it is not the recipe's own; it names the default of `run.output_dir`.

    Raises:
        RecipeError: as `load_recipe`.
    """
    if not document.is_whole:
        raise RecipeError(document.mistakes)
    document = _name_output(document, strategy)
    recipe, found = validate(document, Recipe, answer_to, foreign.meaning_of)
    sections = parts(document, KINDS) if found else {name: getattr(recipe, name) for name in KINDS}
    mistakes = [*document.mistakes, *found, *check_across_keys(document, sections, {*leaves(Recipe)})]
    if mistakes or recipe is None:
        raise RecipeError(mistakes)
    return recipe


def sound_keys(document: Document) -> dict[str, Any]:
    """The values of a document with mistakes that each are valid by themselves, by their keys; None for the others."""
    if not document.is_whole:
        return {}
    precision = document.values.get("mixed_precision", "bf16")
    is_known = precision in get_args(Recipe.model_fields["mixed_precision"].annotation)
    return {**parts(document, KINDS), "mixed_precision": precision if is_known else None}


def named_strategy(document: Document) -> Path | None:
    """The file of the strategy that a document names, even if it has mistakes elsewhere; None if there is none."""
    name = document.values.get("strategy")
    if not isinstance(name, str) or path_problem(name) is not None or not strategy_path(name).is_file():
        return None
    return strategy_path(name)


def _file_of(document: Document) -> Path:
    return document.file or Path(document.name)


def _name_output(document: Document, strategy: Path | None) -> Document:
    run, named = document.values.get("run"), document.values.get("strategy")
    if isinstance(run, dict) and run.get("output_dir") is None:
        is_path = isinstance(named, str) and path_problem(named) is None
        run["output_dir"] = default_output_dir(_file_of(document), str(strategy or (named if is_path else "")))
    return document


def _choose_alternatives(document: Document) -> Document:
    """A key that --set gives takes the place of its alternative in the file: `run.max_steps=50` that of num_epochs."""
    kinds: dict[str, type[OneOf]] = {"run": RunSection, "batch": BatchSection, "model": ModelSection}
    pairs = [(name, kind.alternatives) for name, kind in kinds.items()]
    for name, pair in (*pairs, *(("run", pair) for pair in RunSection.cadences.items())):
        section = document.values.get(name)
        given = [key for key in pair if (name, key) in document.overrides]
        if isinstance(section, dict) and len(given) == 1 and section.get(given[0]) is not None:
            section.pop(next(key for key in pair if key != given[0]), None)
    return document


LOCAL = (("model", "name_or_path"), ("data", "chat_template"), ("data", "train"), ("data", "eval"))
"""Keys whose relative paths are the recipe's own. What a run writes goes into the current folder."""


def _locate_paths(document: Document) -> Document:
    """Relative paths of the recipe as they are reached from the current folder; --set names what is there already."""
    file, given = _file_of(document), document.overrides

    def reach(value: Any, where: KeyPath) -> Any:
        if where in given or (where == ("data", "chat_template") and isinstance(value, str) and is_short(value)):
            return value
        if isinstance(value, str) and value != BUILTIN_SOURCE and path_problem(value) is None:
            return located(value, file)
        inner = {"path": value["path"]} if isinstance(value, dict) and "path" in value else value
        if isinstance(inner, dict):
            return value | {key: reach(one, (*where, key)) for key, one in inner.items()}
        if isinstance(value, list):
            return [reach(one, (*where, i)) for i, one in enumerate(value)]
        return value

    for section, key in LOCAL:
        values = document.values.get(section)
        if isinstance(values, dict) and key in values:
            values[key] = reach(values[key], (section, key))
    named = document.values.get("strategy")
    if isinstance(named, str) and path_problem(named) is None and ("strategy",) not in given:
        path = located(str(STRATEGIES / f"{named}.yaml") if is_short(named) else named, file)
        document.values["strategy"] = path if Path(path).is_file() else named
    return document


def _use_plugins(document: Document) -> Document:
    """Imports the plugins of a recipe and replaces their paths by absolute ones. Without one of them, the names that it
    has would be mistakes too.
    """
    values = document.values.get("plugins", [])
    if not isinstance(values, list) or any(not isinstance(value, str) or path_problem(value) for value in values):
        plugins.use([])
        return document  # `validate` reports these
    folder = _file_of(document).parent
    mistakes, files = [], [str((folder / value).resolve()) for value in values]
    for i, (value, file) in enumerate(zip(values, files, strict=True)):
        place = document.place("plugins", i)
        if not Path(file).is_file():
            mistakes.append(f"{place} is {value!r}: no such file (looked in {folder.resolve()})")
        elif files.index(file) != i:
            mistakes.append(f"{place} is {value!r}, given twice; keep one of them")
    if values and not mistakes:
        show_torchao()
        document.values["plugins"] = files
    try:
        plugins.use([] if mistakes else files)
    except RecipeError as error:
        mistakes = [f"{document.place('plugins')}: {mistake}" for mistake in error.mistakes]
    document.mistakes += mistakes
    document.is_whole = not mistakes
    return document


STEPS: tuple[Callable[[Document], Document], ...] = (
    _take_out_nulls,
    _read_bare_no,
    _choose_alternatives,
    _use_plugins,
    _locate_paths,
)
"""What happens to a recipe's document between its file with --set and validation, in this order."""


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a model and its sections, of each kind where a name selects them."""
    for name, field in model.model_fields.items():
        sections = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        inner = next((kind for kind in sections if issubclass(kind, BaseModel)), None)
        yield prefix + name
        if inner is not None:
            for kind in inner.kinds() if issubclass(inner, Named) else [inner]:
                yield from leaves(kind, f"{prefix}{name}.")


OWN_NAMES = {path.rpartition(".")[2] for path in leaves(Recipe)}


def answer_to(key: str) -> str | None:
    """What to write instead of a key that is no recipe's, but another file's or project's; None: nobody has it."""
    return None if key in OWN_NAMES else foreign.answers().get(key)


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
    """The JSON schema of a recipe."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema
