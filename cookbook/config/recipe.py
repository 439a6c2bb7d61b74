"""A recipe: what to train. Typed, strict and frozen, with every default in this file.

`python -m cookbook schema` writes `recipes/schema.json` from these models, so that an editor completes and checks a
recipe while it is typed.
"""

import difflib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, SerializeAsAny, model_validator

from cookbook.config import foreign, plugins, row_kinds
from cookbook.config.objectives import Objective, TooLong
from cookbook.config.objectives.token_loss import SFT
from cookbook.config.optim import Optimizer
from cookbook.config.registry import Named, Section
from cookbook.config.schedule import Cosine, Schedule
from cookbook.config.strategy import STRATEGIES, is_short, known_strategies, missing_strategy, strategy_path
from cookbook.system.files import (
    Document,
    KeyPath,
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
from cookbook.system.imports import show_torchao
from cookbook.system.shipped import HOME, located, typed

BUILTIN_SOURCE = "python-stdlib"
TEXT_FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".md")
BINARY_FORMATS = (".parquet", ".arrow")
COMPRESSIONS = (".gz", ".zst")
"""Of text formats."""
ALL_LINEAR = "all-linear"

RECIPES = Path("recipes")
MOVED = {"llama33_70b": "llama31_70b", "qwen3_32b": "qwen25_32b"}
"""Of recipes that had a strategy in their name, folders that are gone, by that of the nearest model."""


class ScratchModel(Section):
    """A new model: weights from `seed`, and a tokenizer trained on `data.train`."""

    model_type: Literal["llama", "qwen3"] = "llama"
    vocab_size: int = Field(ge=300)
    """Maximum; on a small data set the tokenizer may find fewer merges."""
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    tie_word_embeddings: bool = True
    """Use one matrix for the embedding and the output head."""

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


class OneOf(Section):
    """A section in which one of `alternatives` must be given."""

    alternatives: ClassVar[tuple[str, str]]
    hint: ClassVar[str] = " (null unsets a key)"

    @model_validator(mode="after")
    def _has_one(self):
        given = {key: value for key in self.alternatives if (value := getattr(self, key)) is not None}
        if not given:
            raise ValueError(f"neither {' nor '.join(self.alternatives)} is given; write one of them")
        if len(given) > 1:
            both = (key if isinstance(value, BaseModel) else f"{key} {value!r}" for key, value in given.items())
            raise ValueError(f"{' and '.join(both)} are both given; keep one{self.hint}")
        return self


def _no_number(*words: str) -> BeforeValidator:
    """For a key that is false, true or one of `words`: Literal compares by ==, so it would accept 1 for true."""
    *options, last = ("false", "true", *map(repr, words))

    def check(value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(f"is {value}; use {', '.join(options)} or {last}")
        return value

    return BeforeValidator(check)


class ModelSection(OneOf):
    alternatives, hint = ("name_or_path", "from_scratch"), ""
    name_or_path: PathText | None = None
    """Hub name or local folder of a causal language model."""
    revision: str | None = None
    """Commit, tag or branch on the Hub."""
    from_scratch: ScratchModel | None = None
    """Sizes of a new model, instead of name_or_path."""
    gradient_checkpointing: Annotated[
        Literal[False, True, "selective", "offload"], _no_number("selective", "offload")
    ] = False
    """true recomputes each layer in the backward pass: less memory, about a third more compute. `selective` keeps the
    outputs of matrix products and attention, and recomputes only the cheap operations between them. `offload` is true,
    with the inputs of the layers in host memory until then; on a CPU they are there anyway."""
    compile: bool = False
    """torch.compile for each layer. Changes speed and the last bits, and takes seconds to minutes at the start."""
    liger_kernels: bool = False
    """Use Liger's fused Triton kernels for norms, rotary embedding and MLP; needs `pip install liger-kernel`. Skipped,
    with a note, on a machine without a GPU. On an H100 a run with them failed (docs/on_gpu.md)."""

    @property
    def recompute(self) -> Literal[False, True, "selective"]:
        """What the backward pass computes again: true is whole layers."""
        return True if self.gradient_checkpointing == "offload" else self.gradient_checkpointing

    @model_validator(mode="after")
    def _revision_of_a_name(self):
        if self.revision is not None and self.name_or_path is None:
            raise ValueError(f"revision {self.revision!r} would be ignored: it goes with name_or_path")
        return self


def _keys_of_rows(columns: dict[str, str]) -> dict[str, str]:
    known = [*row_kinds.own_keys(), *row_kinds.MESSAGE_KEYS]
    for key, column in columns.items():
        if key not in known:
            turned = f"; did you mean {column}: {key}?" if column in known else ""
            raise ValueError(f"has {key!r}; write KEY: COLUMN with a key of {', '.join(known)}{turned}")
    return columns


Columns = Annotated[dict[str, str], AfterValidator(_keys_of_rows)]


def data_format(name: str) -> str | None:
    """The ending that decides how a file is read: `.jsonl` for rows.jsonl.gz; None if it is no data file."""
    path = Path(name)
    if path.suffix in COMPRESSIONS:
        return inner if (inner := Path(path.stem).suffix) in TEXT_FORMATS else None
    return path.suffix if path.suffix in (*TEXT_FORMATS, *BINARY_FORMATS) else None


class Source(Section):
    path: PathText
    """`python-stdlib`, a data file (.jsonl, .json, .csv, .tsv, .txt, .md, each also .gz or .zst; .parquet, .arrow), a
    local folder of such files or of `save_to_disk`, or a Hub dataset name."""
    split: str = "train"
    """Split on the Hub; sub-folder or file prefix in a folder; `train` or `test` of python-stdlib."""
    name: str | None = None
    """Configuration (subset) of a Hub dataset."""
    revision: str | None = None
    """Commit, tag or branch on the Hub."""
    max_rows: int | None = Field(default=None, gt=0)
    """Use only the first N rows."""
    columns: Columns | None = None
    """In the place of data.columns for this source; {} for none."""
    weight: float | None = Field(default=None, gt=0, le=1000, allow_inf_nan=False)
    """data.train only: how often an epoch uses each row. 2 uses it twice; 0.25 uses a quarter of the rows, and another
    quarter in the next epoch. Default: 1."""


def _source_from_text(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


SourceField = Annotated[Source, BeforeValidator(_source_from_text, json_schema_input_type=str | Source)]


def _sources_from_one(value: Any) -> Any:
    if value == []:
        raise ValueError("is empty; name at least one source")
    return value if isinstance(value, list) else [value]


def _named_from_one(value: Any) -> Any:
    if isinstance(value, list):
        raise ValueError("is a list; give each set a name, as in {one: path/to/one.jsonl, two: path/to/two.jsonl}")
    keys = sorted(Source.model_fields.keys() & value) if isinstance(value, dict) else []
    if keys and not difflib.get_close_matches("path", value):
        are_keys = "is a key" if len(keys) == 1 else "are keys"
        raise ValueError(f"path is missing; {', '.join(keys)} {are_keys} of a source, so no set can be called that")
    return {"": value} if keys or isinstance(value, str) else {} if value is None else value


class DataSection(Section):
    train: Annotated[
        list[SourceField],
        Field(min_length=1),
        BeforeValidator(_sources_from_one, json_schema_input_type=str | Source | list[str | Source]),
    ]
    """A source or a list of them. Rows of `messages` (chat), `prompt` and `completion`, or `text`; for preferences with
    `chosen` and `rejected`; or in a common shape, such as ShareGPT or Alpaca."""
    eval: Annotated[
        dict[str, SourceField],
        BeforeValidator(_named_from_one, json_schema_input_type=str | Source | dict[str, str | Source]),
    ] = {}
    """Held-out rows: a source, or several named ones, evaluated separately. Evaluated before the first step, every
    run.eval_every_steps, and at the end."""
    columns: Columns | None = None
    """Which column holds what, for rows that are not understood by themselves or in two ways: {user: question,
    assistant: answer}. Other columns are not read. `role` and `content` rename keys of messages."""
    holdout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of data.train that is held out and evaluated as `holdout`. Rows are selected by a hash of their content,
    so duplicates stay together in any order."""
    max_length: int = Field(default=2048, ge=8)
    """Tokens per sample; for longer rows see too_long."""
    too_long: TooLong | None = None
    """Rows longer than max_length: `cut` truncates at the end, `drop` leaves them out, `split` makes several samples,
    `error` stops. They are counted in any case. Default: cut, and split for cpt."""
    packing: Annotated[Literal[False, True, "auto"], _no_number("auto")] = "auto"
    """Concatenate the samples of a micro-batch into one row without padding; each attends to itself only. Changes speed
    and memory, never the curve. `auto`: for architectures that were shown to keep samples apart."""
    streaming: bool = False
    """Read data.train during training, for sets larger than memory or disk; needs run.max_steps. Rows are shuffled
    within blocks of shuffle_rows."""
    shuffle_rows: int = Field(default=10_000, gt=0, le=10**9)
    """Rows per shuffled block (streaming only)."""
    chat_template: PathText | None = None
    """A Jinja file. Default: the tokenizer's own template."""
    on_bad_row: Literal["error", "drop"] = "error"
    """How to treat rows that cannot be trained on: stop and list the first 20, or drop and count them."""

    @property
    def is_packed(self) -> bool:
        """`packing`, once `cookbook.planning.packing` has decided it."""
        assert self.packing != "auto", "data.packing is asked for before it is decided"
        return self.packing

    @model_validator(mode="after")
    def _columns_of_sources(self):
        if self.columns is not None:
            self.train[:] = [self._with_columns(source) for source in self.train]
            self.eval.update({name: self._with_columns(source) for name, source in self.eval.items()})
        return self

    def _with_columns(self, source: Source) -> Source:
        has_own = source.columns is not None or source.path == BUILTIN_SOURCE
        return source if has_own else source.model_copy(update={"columns": self.columns})

    @model_validator(mode="after")
    def _keys_of_streaming(self):
        if "shuffle_rows" in self.model_fields_set and not self.streaming:
            raise ValueError(f"shuffle_rows {self.shuffle_rows} would be ignored without streaming: true; take it out")
        if self.streaming and self.holdout:
            raise ValueError(f"holdout {self.holdout} does not go with streaming; give held-out rows in data.eval")
        if self.too_long == "error" and self.on_bad_row == "drop":
            raise ValueError(
                "too_long error does not go with on_bad_row drop; write too_long: drop, or on_bad_row: error"
            )
        weighted = [source.path for source in self.train if source.weight is not None]
        if self.streaming and weighted:
            raise ValueError(f"weight of {weighted[0]!r} does not go with streaming, which reads source after source")
        weighted = [source.path for source in self.eval.values() if source.weight is not None]
        if weighted:
            raise ValueError(f"weight of {weighted[0]!r} would be ignored in data.eval; take it out")
        if self.holdout and "holdout" in self.eval:
            raise ValueError("eval has a set named 'holdout', the name of the rows that data.holdout takes; rename it")
        return self


def _list_of_targets(value: Any) -> Any:
    if isinstance(value, str) and value != ALL_LINEAR:
        raise ValueError(f"is {value!r}; write {ALL_LINEAR}, or a list: [{value}]")
    if value == []:
        raise ValueError(f"is empty; write {ALL_LINEAR}, or name layers")
    if isinstance(value, list) and len(value) > 1 and ALL_LINEAR in value:
        raise ValueError(f"has {ALL_LINEAR} beside names; write {ALL_LINEAR} alone, or names only")
    return [value] if isinstance(value, str) else value


class AdapterSection(Section):
    """Trains a few new weights and freezes the model's own (peft)."""

    name: Literal["lora", "dora", "qlora"]
    """`qlora` stores the frozen weights in 4 bits (NF4, double quantization; bitsandbytes)."""
    rank: int = Field(default=16, gt=0)
    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """The update is scaled by alpha / rank, or alpha / sqrt(rank) with rslora."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input. Above 0 the curve depends on the number of processes."""
    targets: Annotated[
        list[str], BeforeValidator(_list_of_targets, json_schema_input_type=Literal["all-linear"] | list[str])
    ] = [ALL_LINEAR]
    """Linear layers that get an adapter: all but the head, or those whose names end so ([q_proj, v_proj]). A name that
    matches no layer is an error."""
    modules_to_save: list[str] = []
    """Which of embedding and head to train fully and save with the adapter: [embed_tokens, lm_head]."""
    rslora: bool = False
    """Rank-stabilized scaling, Kalajdzievski 2023 (arXiv 2312.03732)."""

    @property
    def is_quantized(self) -> bool:
        """Whether the frozen weights of all linear layers but the head are stored in 4 bits."""
        return self.name == "qlora"


class BatchSection(OneOf):
    alternatives = ("micro_batch_size", "micro_batch_tokens")
    global_batch_size: int = Field(gt=0)
    """Sequences (preferences: pairs) per optimizer step, over all processes."""
    micro_batch_size: int | None = Field(default=None, gt=0)
    """Sequences (pairs) per forward and process. Changes speed and memory, never the result."""
    micro_batch_tokens: int | None = Field(default=None, gt=0)
    """Maximum number of tokens per forward, padding included; instead of micro_batch_size."""


def _power_of_two(value: float) -> float:
    if math.frexp(value)[0] != 0.5:
        raise ValueError(f"is {value:g}; write a power of two, as 65536, so that scaling does not round")
    return value


PowerOfTwo = Annotated[float, Field(gt=0, le=2.0**24), AfterValidator(_power_of_two)]


class LossScaleSection(Section):
    """Losses are multiplied by it, and gradients divided again, since small ones would be 0 in fp16."""

    initial: PowerOfTwo = 65536.0
    """The first scale. It halves where a gradient is not finite, and that step is skipped."""
    window: int = Field(default=2000, gt=0)
    """It doubles after so many steps in a row without that."""
    hysteresis: int = Field(default=1, gt=0)
    """It halves at the Nth such step since it last doubled, and at each one after it."""
    minimum: PowerOfTwo = 1.0
    """A gradient that is not finite at this scale ends the run."""

    @model_validator(mode="after")
    def _minimum_below(self):
        if self.minimum > self.initial:
            raise ValueError(f"minimum {self.minimum:g} is above initial {self.initial:g}")
        return self


class ProfileSection(Section):
    """Steps that torch's profiler records."""

    steps: list[Annotated[int, Field(gt=0)]] = Field(min_length=2, max_length=2)
    """The first and the last one. The first steps of a start are slower than the others."""
    ranks: list[Annotated[int, Field(ge=0)]] = Field(default=[0], min_length=1)
    """Of which processes; with all of them, the slowest is known."""

    @model_validator(mode="after")
    def _in_order(self):
        if self.steps[0] > self.steps[1]:
            raise ValueError(f"steps is {self.steps}; write the first step before the last")
        return self


class RunSection(OneOf):
    alternatives = ("num_epochs", "max_steps")
    num_epochs: int | None = Field(default=None, gt=0)
    max_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps, instead of num_epochs."""
    eval_every_steps: int | None = Field(default=None, gt=0)
    """Evaluate data.eval every N steps. Default: before the first step and at the end only."""
    sample_every_steps: int | None = Field(default=None, gt=0)
    """Before the first step, every N steps and at the end, continue the beginnings of the first four held-out samples,
    taking the most probable token each time, into samples.jsonl. Default: never."""
    sample_tokens: int | None = Field(default=None, gt=0)
    """Maximum number of tokens of such a continuation. Default: 64."""
    output_dir: PathText = Field(default_factory=str)  # load_recipe fills it in
    """Folder for everything that a run writes; `.NAME.lock` next to it keeps a second run out. Default: outputs/ plus
    the names of recipe and strategy, as in outputs/llama31_8b-sft-zero3."""
    save_every_steps: int | None = Field(default=None, gt=0)
    """Save a checkpoint every N steps. There is always one at the end."""
    save_every_minutes: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Save a checkpoint every N minutes."""
    save_first_step: bool = False
    """Save a checkpoint after step 1, to find out early that saving works."""
    save_in_background: bool = False
    """Write checkpoints in the background: a step waits only for a copy of the state in host memory, which costs that
    memory."""
    keep_last: int = Field(default=2, ge=2)
    """Keep the N newest checkpoints; at least 2, as a crash may damage the newest."""
    keep_best: int = Field(default=0, ge=0)
    """Also keep the N checkpoints with the lowest evaluation loss (of the first set, if there are several)."""
    resume: str = Field(default="never", min_length=1)
    """never: start from scratch and rename an earlier run | auto: resume from the newest complete checkpoint | a path:
    resume from that checkpoint."""
    allow_changes: list[str] = []
    """Keys that may differ from the recipe of the checkpoint, such as optim.learning_rate."""
    stop_after_steps: int | None = Field(default=None, gt=0)
    """Stop after N steps of this start, with a checkpoint and exit code 75; the schedule is not shortened."""
    skip_nonfinite_steps: int = Field(default=0, ge=0)
    """Maximum number of steps to skip because a loss or gradient is not finite; one more ends the run."""
    hang_timeout_minutes: float = Field(default=30.0, gt=0, le=10_080)
    """End a run that makes no progress for this long and name the process at fault. Must exceed the longest forward."""
    on_out_of_memory: Literal["stop", "smaller_micro_batch", "next_strategy"] = "stop"
    """What `python -m cookbook launch` does when GPU memory runs out: end the run | start it again from its newest
    checkpoint with at most half the micro-batch | and, where that is not enough, with the next strategy that fits by
    the forecast. The global batch stays, and so does the curve."""
    check_export: bool = True
    """At the end, open the export in a fresh process and compare it with the checkpoint. Takes one start plus reading
    both."""
    deterministic: bool = False
    """Use only kernels that give the same bits each time on the same GPUs; an operation without one is an error. Slower
    on GPUs; CPU kernels are deterministic anyway."""
    log_every_steps: int = Field(default=10, gt=0)
    """Print a line every N steps; metrics.jsonl has every step."""
    monitor: bool = True
    """Measure what GPUs and CPU do, each second, into monitor.jsonl; a small process for each machine."""
    check_ranks_every_steps: int | None = Field(default=None, gt=0)
    """Every N steps, compare what several processes hold (weights, optimizer state, position in the data) to the bit;
    a difference ends the run. Default: never."""
    profile: ProfileSection | None = None
    """Steps to profile, as {steps: [10, 14], ranks: [0]}: a trace and where the time went, in profile/. These steps are
    slower. Default: none."""
    memory_snapshot: bool = False
    """Record every allocation on the GPUs from the loading of the model on, and write at the end of training, or when
    memory runs out in it, what was there at the peak, into memory/. Slower."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    """Experiment trackers that get the numbers of metrics.jsonl and these settings; needs
    `pip install -r requirements-trackers.txt`."""

    @model_validator(mode="after")
    def _tokens_of_samples(self):
        if self.sample_tokens is not None and self.sample_every_steps is None:
            raise ValueError(f"sample_tokens {self.sample_tokens} would be ignored without sample_every_steps")
        return self

    def total_steps(self, steps_per_epoch: int | None) -> int:
        """Optimizer steps of the whole run; `steps_per_epoch` is None for a stream, which needs max_steps."""
        return self.max_steps or (self.num_epochs or 0) * (steps_per_epoch or 0)


class Recipe(Section):
    """A reproducible fine-tuning run."""

    strategy: Annotated[PathText, AfterValidator(lambda name: str(strategy_path(name)))]
    """A name in accelerate_configs/ such as zero3, or the path of an accelerate YAML. `accelerate launch --config_file`
    overrides it, and the run logs that."""
    mixed_precision: Literal["no", "bf16", "fp16", "fp8"] = "bf16"
    """'no' is float32; fp16 uses loss scaling and needs a GPU; fp8 is bf16 with the layers' products in 8 bits, and
    needs torchao and a GPU of Ada, Hopper or later."""
    loss_scale: LossScaleSection | None = None
    """Of fp16 only."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of data order, new weights and dropout."""
    plugins: list[PathText] = []
    """Python files that add objectives, optimizers, schedules or kinds of rows. They run with your rights."""
    model: ModelSection
    data: DataSection
    objective: SerializeAsAny[Objective] = SFT()
    adapter: AdapterSection | None = None
    """Default: none; all weights are trained."""
    batch: BatchSection
    optim: SerializeAsAny[Optimizer]
    schedule: SerializeAsAny[Schedule] = Cosine()
    run: RunSection

    @property
    def compute_precision(self) -> Literal["no", "bf16", "fp16"]:
        """The precision of everything but fp8's products."""
        return "bf16" if self.mixed_precision == "fp8" else self.mixed_precision

    @property
    def loss_scaling(self) -> LossScaleSection | None:
        """The loss scale of fp16; None without it."""
        return (self.loss_scale or LossScaleSection()) if self.mixed_precision == "fp16" else None


def read_recipe(path: Path) -> Document:
    """The recipe in a file, before validation.

    Raises:
        RecipeError: as `read_document`; for a renamed recipe, with the one to use instead.
    """
    folder, asked = RECIPES.resolve(), Path(os.path.realpath(path))  # `resolve` fails at a link to itself
    if asked.is_relative_to(folder) and not path.exists():
        for strategy in sorted(known_strategies(), key=len, reverse=True):
            new = asked.relative_to(folder).with_name(f"{asked.stem.removesuffix(f'_{strategy}')}.yaml")
            new = RECIPES / MOVED.get(new.parent.name, new.parent) / new.name
            if asked.stem.endswith(f"_{strategy}") and Path(located(str(new))).is_file():
                what = "is" if new.parent.name == asked.parent.name else "is gone; the nearest is"
                how = f"(STRATEGY={strategy}, --strategy {strategy})"
                raise RecipeError(f"{path} {what} {new} with strategy: {strategy} {how}")
    return read_document(path)


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
    return parse_recipe(read_recipe(path), path, assignments, None)


def parse_recipe(document: Document, path: Path, assignments: list[str] | None, strategy: Path | None) -> Recipe:
    """Like `load_recipe`, for a document that has been read; writes the assignments into it. `strategy` is the run's,
    if it is not the recipe's own; it names the default of `run.output_dir`.
    """
    mistakes = apply_overrides(document, assignments or [])
    _replace_alternatives(document)
    if missing := _use_plugins(document, path.parent):
        raise RecipeError(mistakes + missing)  # their names would be reported as unknown too
    _locate_paths(document, path)
    run, named = document.values.get("run"), document.values.get("strategy")
    if isinstance(run, dict) and run.get("output_dir") is None:
        is_path = isinstance(named, str) and path_problem(named) is None
        run["output_dir"] = default_output_dir(path, str(strategy or (named if is_path else "")))
    recipe, found = validate(document, Recipe, OWNED_ELSEWHERE)
    mistakes += [*found, *_check_across_keys(document)]
    if mistakes or recipe is None:
        raise RecipeError(list(dict.fromkeys(mistakes)))
    return recipe


def _replace_alternatives(document: Document) -> None:
    """A key that --set gives takes the place of its alternative in the file: `run.max_steps=50` that of num_epochs."""
    for name, kind in (("run", RunSection), ("batch", BatchSection), ("model", ModelSection)):
        section = document.values.get(name)
        given = [key for key in kind.alternatives if (name, key) in document.overrides]
        if isinstance(section, dict) and len(given) == 1 and section.get(given[0]) is not None:
            section.pop(next(key for key in kind.alternatives if key != given[0]), None)


LOCAL = (("model", "name_or_path"), ("data", "chat_template"), ("data", "train"), ("data", "eval"))
"""Keys whose relative paths are the recipe's own. What a run writes goes into the current folder."""


def _locate_paths(document: Document, file: Path) -> None:
    """Relative paths of the recipe as they are reached from the current folder; --set names what is there already."""
    for section, key in LOCAL:
        values = document.values.get(section)
        if isinstance(values, dict) and key in values:
            values[key] = _located(values[key], document, file, (section, key))
    named = document.values.get("strategy")
    if isinstance(named, str) and path_problem(named) is None and ("strategy",) not in document.overrides:
        path = located(str(STRATEGIES / f"{named}.yaml") if is_short(named) else named, file)
        document.values["strategy"] = path if Path(path).is_file() else named


def _located(value: Any, document: Document, file: Path, where: KeyPath) -> Any:
    if where in document.overrides:
        return value
    if isinstance(value, str) and value != BUILTIN_SOURCE and path_problem(value) is None:
        return located(value, file)
    inner = {"path": value["path"]} if isinstance(value, dict) and "path" in value else value
    if isinstance(inner, dict):
        return value | {key: _located(one, document, file, (*where, key)) for key, one in inner.items()}
    if isinstance(value, list):
        return [_located(one, document, file, (*where, i)) for i, one in enumerate(value)]
    return value


def _use_plugins(document: Document, folder: Path) -> list[str]:
    """Imports the plugins of a recipe and replaces their paths by absolute ones. Returns the mistakes."""
    values = document.values.get("plugins", [])
    if not isinstance(values, list) or any(not isinstance(value, str) or path_problem(value) for value in values):
        plugins.use([])
        return []  # `validate` reports these
    mistakes, files = [], [str((folder / value).resolve()) for value in values]
    for i, (value, file) in enumerate(zip(values, files, strict=True)):
        place = document.place("plugins", i)
        if not Path(file).is_file():
            mistakes.append(f"{place} is {value!r}: no such file (looked in {folder.resolve()})")
        elif files.index(file) != i:
            mistakes.append(f"{place} is {value!r}, given twice; keep one of them")
    if mistakes:
        plugins.use([])
        return mistakes
    if values:
        show_torchao()
        document.values["plugins"] = files
    try:
        plugins.use(files)
    except RecipeError as error:
        return [f"{document.place('plugins')}: {mistake}" for mistake in error.mistakes]
    return []


def _check_across_keys(document: Document) -> Iterator[str]:
    """Mistakes that involve several keys or the disk; a section with mistakes of its own is left out."""
    place = document.place
    strategy = document.values.get("strategy")
    if isinstance(strategy, str) and path_problem(strategy) is None:
        yield from missing_strategy(strategy, lambda: place("strategy"))
    precision = document.values.get("mixed_precision", "bf16")
    if document.values.get("loss_scale") is not None and precision != "fp16":
        yield f"{place('loss_scale')}: would be ignored with mixed_precision {precision}; take it out, or write fp16"
    optim = part(document, "optim", Optimizer)
    if optim is not None and optim.gradient_dtype == "fp16" and precision != "fp16":
        problem = "small gradients would be 0 without a loss scale; write bf16, or mixed_precision: fp16"
        yield f"{place('optim', 'gradient_dtype')} is fp16 with mixed_precision {precision}: {problem}"
    model = part(document, "model", ModelSection)
    name = model.name_or_path if model is not None else None
    if name is not None and name.startswith((".", "/")) and not Path(name).is_dir():
        yield f"{place('model', 'name_or_path')} is {name!r}: no such folder (looked in {Path.cwd()})"
    data = part(document, "data", DataSection)
    run = part(document, "run", RunSection)
    if data is not None:
        if data.chat_template is not None:
            yield from find_file(data.chat_template, lambda: place("data", "chat_template"))
        is_list = isinstance(document.values["data"].get("train"), list)
        for i, source in enumerate(data.train):
            yield from _check_source(source, place, ("data", "train", *([i] if is_list else [])))
        for name, source in data.eval.items():
            yield from _check_source(source, place, ("data", "eval", *([name] if name else [])))
        yield from _check_data(data, run, document)
    if run is not None:
        yield from _check_output_dir(run.output_dir, place("run", "output_dir"))
        schedule = part(document, "schedule", Schedule)
        if schedule is not None and run.max_steps is not None:
            for mistake in schedule.misfits(run.max_steps):
                key, _, problem = mistake.partition(" ")
                yield f"{place('schedule', key)} {problem}"
        yield from _check_saving(run, data, place)
        yield from _check_trackers(run, place("run", "trackers"))
        if run.profile is not None and run.max_steps is not None and run.profile.steps[1] > run.max_steps:
            given = f"{place('run', 'profile', 'steps')} is {run.profile.steps}"
            yield f"{given}, but the run has {run.max_steps} steps; name earlier ones"
        if data is not None and not data.eval and not data.holdout:
            for key in ("eval_every_steps", "sample_every_steps"):
                if (every := getattr(run, key)) is not None:
                    given = f"{place('run', key)} is {every}"
                    yield f"{given}, but there is no data.eval; add it, or take this key out"


def _check_data(data: DataSection, run: RunSection | None, document: Document) -> Iterator[str]:
    place = document.place
    objective = part(document, "objective", Objective)
    batch = part(document, "batch", BatchSection)
    if data.streaming and run is not None and run.num_epochs is not None:
        problem = "the length of a stream is not known before its end; write run.max_steps instead"
        yield f"{place('run', 'num_epochs')} is {run.num_epochs}, but {problem}"
    if data.streaming and objective is not None and objective.needs_reference:
        problem = f"computes the reference of all {objective.sample}s before the first step; take it out"
        yield f"{place('data', 'streaming')} is true, but {objective.name} {problem}"
    if data.too_long == "split" and objective is not None and objective.mean_over != "tokens":
        problem = f"{objective.name} compares whole answers; write cut, drop or error"
        yield f"{place('data', 'too_long')} is 'split', but {problem}"
    if batch is not None and batch.micro_batch_tokens is not None:
        num_sequences = len(objective.sequences) if objective is not None else 1
        longest = data.max_length * num_sequences
        if batch.micro_batch_tokens < longest:
            what = f"a sample of {num_sequences} sequences of" if num_sequences > 1 else "one sample of"
            given = f"{place('batch', 'micro_batch_tokens')} is {batch.micro_batch_tokens}"
            yield f"{given}, too few for {what} data.max_length {data.max_length}; write at least {longest}"


def _check_output_dir(name: str, place: str) -> Iterator[str]:
    here, folder = Path.cwd(), Path(name).resolve()
    existing = next((path for path in (Path(name), *Path(name).parents) if path.is_symlink() or path.exists()), here)
    if folder == here or folder in here.parents:
        what = "the current folder" if folder == here else "a parent of the current folder"
        yield f"{place} is {name!r}, {what}; name one of its own, as outputs/mine"
    elif not existing.exists():
        yield f"{place} is {name!r}, but {existing} is a broken link"
    elif not existing.is_dir():
        yield f"{place} is {name!r}, but {existing} is a file; name a folder"


def _check_saving(run: RunSection, data: DataSection | None, place: Callable[..., str]) -> Iterator[str]:
    if run.keep_best:
        best = f"{place('run', 'keep_best')} is {run.keep_best}"
        if data is not None and not data.eval and not data.holdout:
            yield f"{best}, but there is no data.eval to rank checkpoints by"
        elif not run.save_every_steps or not run.eval_every_steps or run.save_every_steps % run.eval_every_steps:
            yield (
                f"{best}, but save_every_steps is {run.save_every_steps} and eval_every_steps {run.eval_every_steps}:"
                " only a checkpoint that is evaluated when it is saved can be the best; make save_every_steps a"
                " multiple of eval_every_steps"
            )
    known = {*leaves(Recipe)}
    for key in run.allow_changes:
        if not any(leaf == key or leaf.startswith(key + ".") for leaf in known):
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{place('run', 'allow_changes')} names {key!r}, which no recipe has{hint}"


def _check_trackers(run: RunSection, place: str) -> Iterator[str]:
    for name in sorted(set(run.trackers)):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # wandb leaves a folder of its name, which passes for a package
            yield f"{place} has {name}, which is not installed: pip install -r requirements-trackers.txt"
        if run.trackers.count(name) > 1:
            yield f"{place} has {name} more than once; keep one of them"


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a model and its sections, of each kind where a name selects them."""
    for name, field in model.model_fields.items():
        sections = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        inner = next((kind for kind in sections if issubclass(kind, BaseModel)), None)
        yield prefix + name
        if inner is not None:
            for kind in inner.kinds() if issubclass(inner, Named) else [inner]:
                yield from leaves(kind, f"{prefix}{name}.")


def _check_source(source: Source, place: Callable[..., str], where: tuple[str | int, ...]) -> list[str]:
    path, given = Path(source.path), f"{place(*where)} is {source.path!r}"
    if source.path == BUILTIN_SOURCE:
        if source.split not in ("train", "test"):
            return [f"{place(*where, 'split')} is {source.split!r}; {BUILTIN_SOURCE} has train and test"]
    elif data_format(source.path):
        if mistakes := find_file(source.path, lambda: place(*where)):
            return mistakes
    elif path.is_file():
        formats = ", ".join(TEXT_FORMATS)
        return [f"{given}: a data file must end in {formats} (or these with .gz, .zst), .parquet or .arrow"]
    elif source.path.startswith((".", "/")) and not path.is_dir():
        return [f"{given}: no such folder (looked in {Path.cwd()})"]
    unused = ", ".join(sorted({"name", "revision"} & source.model_fields_set))
    if unused and (source.path == BUILTIN_SOURCE or path.exists()):
        return [f"{place(*where)}: {unused} would be ignored: {source.path} is not on the Hub; take it out"]
    return []


_OWN_NAMES = {path.rpartition(".")[2] for path in leaves(Recipe)}
OWNED_ELSEWHERE = {
    **{key: answer for key, answer in foreign.answers().items() if key not in _OWN_NAMES},
    "num_processes": "the accelerate YAML or the launch command owns it"
    f" ({typed('train PROCESSES=...', 'launch --processes ...')})",
    "gradient_clipping": "write optim.max_grad_norm",
    "deepspeed": "name an accelerate YAML in `strategy`; it names its DeepSpeed JSON",
    "fsdp": "name an accelerate YAML in `strategy`",
    **dict.fromkeys(("workers", "num_workers", "pin_memory", "prefetch_factor"), foreign.LOADER),
}
"""Keys that belong into other files, and those of other projects, with what to write instead."""


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
