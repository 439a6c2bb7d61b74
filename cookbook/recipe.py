"""A recipe: what to train. Typed, strict, frozen; every default is stated here, once.

`recipes/schema.json` is written from these models (`python -m cookbook schema`), so that an editor completes and
checks a recipe while it is typed.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cookbook.files import (
    Document,
    PathText,
    RecipeError,
    apply_overrides,
    dump_yaml,
    find_file,
    part,
    path_problem,
    read_document,
    validate,
)

BUILTIN_SOURCE = "python-stdlib"

OWNED_ELSEWHERE = {
    "gradient_accumulation_steps": "it is derived: global_batch_size / (micro_batch_size x data-parallel processes)",
    "num_processes": "the accelerate YAML or the launch command owns it (make train PROCESSES=...)",
    "gradient_clipping": "write optim.max_grad_norm",
    "deepspeed": "name an accelerate YAML in `strategy`; it names its DeepSpeed JSON",
    "fsdp": "name an accelerate YAML in `strategy`",
}


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class ScratchModel(Section):
    """A new model: weights from `seed`, and a tokenizer trained on `data.train`."""

    model_type: Literal["llama", "qwen3"] = "llama"
    vocab_size: int = Field(ge=300)
    """Upper limit; the tokenizer may find fewer merges in a small data set."""
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    tie_word_embeddings: bool = True
    """One matrix for the embedding and the output head."""

    @model_validator(mode="after")
    def _heads_fit(self):
        if self.hidden_size % self.num_attention_heads or (self.hidden_size // self.num_attention_heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} / num_attention_heads {self.num_attention_heads} must be an even"
                " integer"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of"
                f" num_key_value_heads {self.num_key_value_heads}"
            )
        return self


class ModelSection(Section):
    name_or_path: PathText | None = None
    """Hub name or local folder of a causal language model."""
    revision: str | None = None
    """Commit, tag or branch on the Hub."""
    from_scratch: ScratchModel | None = None
    """Sizes of a new model, instead of name_or_path."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory, about a third more compute."""

    @model_validator(mode="after")
    def _one_model(self):
        if self.name_or_path is None and self.from_scratch is None:
            raise ValueError("neither name_or_path nor from_scratch is given; write one of them")
        if self.name_or_path is not None and self.from_scratch is not None:
            raise ValueError(f"name_or_path {self.name_or_path!r} and from_scratch are both given; keep one")
        if self.revision is not None and self.name_or_path is None:
            raise ValueError(f"revision {self.revision!r} would be ignored: it goes with name_or_path")
        return self


class Source(Section):
    path: PathText
    """`python-stdlib`, a `.jsonl` or `.parquet` file, a local folder of such files, or a Hub dataset name."""
    split: str = "train"
    """Split on the Hub, sub-folder or file prefix of a folder; `train` or `test` of python-stdlib."""
    name: str | None = None
    """Configuration (subset) of a Hub dataset."""
    revision: str | None = None
    """Commit, tag or branch on the Hub."""
    max_rows: int | None = Field(default=None, gt=0)
    """Take the first rows only."""


def _source_from_text(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


SourceField = Annotated[Source, BeforeValidator(_source_from_text, json_schema_input_type=str | Source)]


class DataSection(Section):
    train: SourceField
    """Rows of `messages` (chat), `prompt` and `completion`, or `text`."""
    eval: SourceField | None = None
    """Held-out rows; evaluated before the first step, every run.eval_every_steps, and at the end."""
    max_length: int = Field(default=2048, ge=8)
    """Tokens per sample; longer samples are cut at the end."""
    chat_template: PathText | None = None
    """A Jinja file; without it, the tokenizer's own template."""
    on_bad_row: Literal["error", "drop"] = "error"
    """What to do with a row that cannot be trained on: stop and name them (20 at most), or drop and count them."""


class ObjectiveSection(Section):
    name: Literal["sft"] = "sft"
    train_on: Literal["assistant", "all"] = "assistant"
    """Tokens that carry loss: the assistant's turns (completions) with their end-of-turn token, or every token."""


class BatchSection(Section):
    global_batch_size: int = Field(gt=0)
    """Sequences per optimizer step, all processes together."""
    micro_batch_size: int = Field(gt=0)
    """Sequences per forward, per process. Changes speed and memory, never the result."""


class OptimSection(Section):
    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(gt=0, allow_inf_nan=False)
    """Peak learning rate, reached after the warm-up."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Decoupled for adamw; never applied to biases and norms."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """adamw only. Default: torch's."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """adamw only. Default: torch's."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """sgd only."""
    max_grad_norm: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Gradients are scaled down to this global norm; 0 turns clipping off."""

    @model_validator(mode="before")
    @classmethod
    def _pair(cls, values: Any) -> Any:
        # YAML has lists only; strict mode would refuse one for a tuple.
        if isinstance(values, dict) and isinstance(values.get("betas"), list):
            values = {**values, "betas": tuple(values["betas"])}
        return values

    @model_validator(mode="after")
    def _keys_of_the_optimizer(self):
        foreign = {"adamw": {"momentum"}, "sgd": {"betas", "eps"}}[self.name] & self.model_fields_set
        if foreign:
            raise ValueError(f"{', '.join(sorted(foreign))} would be ignored by {self.name}; take it out")
        return self


class ScheduleSection(Section):
    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up; cosine and linear end at 0."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps to the peak learning rate, in equal rises: the first step takes 1/warmup_steps of it."""


class RunSection(Section):
    num_epochs: int | None = Field(default=None, gt=0)
    max_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps, instead of num_epochs."""
    eval_every_steps: int | None = Field(default=None, gt=0)
    """Without it, data.eval is evaluated before the first step and at the end only."""
    output_dir: PathText
    """Everything that a run writes lies under this folder."""

    @model_validator(mode="after")
    def _one_length(self):
        if self.num_epochs is None and self.max_steps is None:
            raise ValueError("neither num_epochs nor max_steps is given; write one of them")
        if self.num_epochs is not None and self.max_steps is not None:
            raise ValueError(
                f"num_epochs {self.num_epochs} and max_steps {self.max_steps} are both given; keep one"
                " (null unsets a key)"
            )
        return self

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run."""
        return self.max_steps or (self.num_epochs or 0) * steps_per_epoch


class Recipe(Section):
    """A fine-tuning run that somebody can repeat."""

    strategy: PathText
    """An accelerate YAML. `accelerate launch --config_file` wins over it, and the run says so."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "bf16"
    """'no' is fp32; fp16 scales the loss and needs a GPU."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Data order, new weights and dropout."""
    model: ModelSection
    data: DataSection
    objective: ObjectiveSection = ObjectiveSection()
    batch: BatchSection
    optim: OptimSection
    schedule: ScheduleSection = ScheduleSection()
    run: RunSection


def load_recipe(path: Path, assignments: list[str] | None = None) -> Recipe:
    """The recipe in a file, with `section.key=value` assignments applied.

    Raises:
        RecipeError: all mistakes together, each with its place.
    """
    document = read_document(path)
    mistakes = apply_overrides(document, assignments or [])
    recipe, found = validate(document, Recipe, OWNED_ELSEWHERE)
    mistakes += found + _check_across_keys(document)
    if mistakes or recipe is None:
        raise RecipeError(list(dict.fromkeys(mistakes)))
    return recipe


def _check_across_keys(document: Document) -> list[str]:
    """Mistakes that need more than one key, or a look at the disk; in every section that is right by itself."""
    mistakes = []
    strategy = document.values.get("strategy")
    if isinstance(strategy, str) and path_problem(strategy) is None:
        mistakes += find_file(strategy, lambda: document.place(("strategy",)), Path("accelerate_configs"))
    model = part(document, "model", ModelSection)
    name = model.name_or_path if model is not None else None
    if name is not None and name.startswith((".", "/")) and not Path(name).is_dir():
        place = document.place(("model", "name_or_path"))
        mistakes.append(f"{place} is {name!r}: no such folder (looked in {Path.cwd()})")
    data = part(document, "data", DataSection)
    run = part(document, "run", RunSection)
    schedule = part(document, "schedule", ScheduleSection)
    if data is not None:
        if data.chat_template is not None:
            mistakes += find_file(data.chat_template, lambda: document.place(("data", "chat_template")))
        for name in ("train", "eval"):
            source: Source | None = getattr(data, name)
            if source is not None:
                mistakes += _check_source(source, document, ("data", name))
    if run is not None:
        mistakes += _check_output_dir(run.output_dir, document)
        if schedule is not None and run.max_steps is not None and schedule.warmup_steps >= run.max_steps:
            mistakes.append(
                f"{document.place(('schedule', 'warmup_steps'))} is {schedule.warmup_steps}, but run.max_steps is"
                f" {run.max_steps}: the peak learning rate would never be reached; write less than {run.max_steps}"
            )
        if run.eval_every_steps is not None and data is not None and data.eval is None:
            mistakes.append(
                f"{document.place(('run', 'eval_every_steps'))} is {run.eval_every_steps}, but there is no data.eval;"
                " add it, or take this key out"
            )
    return mistakes


def _check_output_dir(name: str, document: Document) -> list[str]:
    for path in (Path(name), *Path(name).parents):
        if path.exists():
            if path.is_dir():
                return []
            return [f"{document.place(('run', 'output_dir'))} is {name!r}, but {path} is a file; name a folder"]
    return []


def _check_source(source: Source, document: Document, where: tuple[str, str]) -> list[str]:
    place, path = document.place(where), Path(source.path)
    if source.path == BUILTIN_SOURCE:
        if source.split not in ("train", "test"):
            return [f"{document.place((*where, 'split'))} is {source.split!r}; {BUILTIN_SOURCE} has train and test"]
    elif path.suffix in (".jsonl", ".parquet"):
        mistakes = find_file(source.path, lambda: place)
        if mistakes:
            return mistakes
    elif path.is_file():
        return [f"{place} is {source.path!r}: a data file must end in .jsonl or .parquet"]
    elif source.path.startswith((".", "/")) and not path.is_dir():
        return [f"{place} is {source.path!r}: no such folder (looked in {Path.cwd()})"]
    local = source.path == BUILTIN_SOURCE or path.exists()
    foreign = {"name", "revision"} & source.model_fields_set
    if local and foreign:
        return [f"{place}: {', '.join(sorted(foreign))} would be ignored: {source.path} is not on the Hub; take it out"]
    return []


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe, every default written out, as YAML that `load_recipe` reads back to an equal value."""
    values = recipe.model_dump(mode="json", exclude_none=True)
    foreign = {"adamw": ("momentum",), "sgd": ("betas", "eps")}[recipe.optim.name]
    for key in foreign:
        del values["optim"][key]
    return dump_yaml(values)


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema
