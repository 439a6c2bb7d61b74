"""The sections of a recipe, typed, strict and frozen, with every default in this file."""

import difflib
import math
import re
from collections.abc import Callable
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from cookbook.config import tracker_options
from cookbook.config.chat_templates import template_path
from cookbook.config.objectives import TooLong
from cookbook.config.outside_words import TRANSFORMERS, NameInDataset, Revision, Sampler, Split, has_adapters
from cookbook.config.tracker_options import TrackerName
from cookbook.rows import row_columns, row_kinds
from cookbook.system.files import PathText
from cookbook.system.registry import Section

BUILTIN_SOURCE = "python-stdlib"
TEXT_FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".md")
BINARY_FORMATS = (".parquet", ".arrow")
COMPRESSIONS = (".gz", ".zst", ".bz2")
"""Suffixes of compressed files, which are of text formats."""
ALL_LINEAR = "all-linear"


class ScratchModel(Section):
    """A new model: weights from `seed`, and a tokenizer trained on `data.train`."""

    model_type: Literal["llama", "qwen3"] = "llama"
    """The architecture, by its name in transformers."""
    vocab_size: int = Field(ge=300, le=10**7)
    """Maximum; on a small data set the tokenizer may find fewer merges."""
    hidden_size: int = Field(gt=0, le=10**6)
    """Width of the hidden states, a multiple of num_attention_heads."""
    intermediate_size: int = Field(gt=0, le=10**6)
    """Width inside the MLP of a layer."""
    num_hidden_layers: int = Field(gt=0, le=10_000)
    """Number of decoder layers."""
    num_attention_heads: int = Field(gt=0, le=10_000)
    """Number of query heads of a layer."""
    num_key_value_heads: int = Field(gt=0, le=10_000)
    """Number of key and value heads, each of which several query heads share if it is smaller than theirs."""
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


def _new_tokens(tokens: list[str] | None) -> list[str] | None:
    if tokens is None:
        return None
    if not tokens:
        raise ValueError("is empty; name a token, or take the key out")
    wrong = next((token for token in tokens if not token or token != token.strip() or tokens.count(token) > 1), None)
    if wrong is not None:
        what = "an empty token" if not wrong else f"{wrong!r} twice" if wrong == wrong.strip() else None
        raise ValueError(f"has {what}" if what else f"has {wrong!r}; write it without white space around it")
    return tokens


def _packages(names: list[str] | None) -> list[str] | None:
    if wrong := [name for name in names or () if not name.isidentifier() or (names or []).count(name) > 1]:
        raise ValueError(f"has {wrong[0]!r}; write each package once, as Python imports it: [fla, causal_conv1d]")
    return names


class Auto(int):
    """The value that takes least memory, 1 or true, until a start has found what is best for this machine."""

    def __repr__(self) -> str:
        return "auto"


def _auto(value: Any, check: Callable[[Any], Any]) -> Any:
    return Auto(1) if value == "auto" else check(value)


Checkpointing = Literal[False, True, "selective", "offload", "auto"]


class ModelSection(OneOf):
    alternatives, hint = ("name_or_path", "from_scratch"), ""
    name_or_path: PathText | None = None
    """Hub name or local folder of a causal language model."""
    revision: Revision | None = None
    """Commit, tag or branch on the Hub."""
    from_scratch: ScratchModel | None = None
    """Sizes of a new model, instead of name_or_path."""
    new_tokens: Annotated[list[str] | None, AfterValidator(_new_tokens)] = None
    """Special tokens that the tokenizer gets: ["<|tool|>", "<|think|>"]. Embedding and head grow if they have no row
    left for them, and the rows start at the mean of the others."""
    gradient_checkpointing: Annotated[
        Checkpointing,
        _no_number("selective", "offload", "auto"),
        WrapValidator(_auto, json_schema_input_type=Checkpointing),
        PlainSerializer(lambda kind: True if isinstance(kind, Auto) else kind, return_type=Checkpointing),
    ] = False
    """true recomputes each layer in the backward pass: less memory, about a third more compute. `selective` keeps the
    outputs of matrix products and attention, and recomputes only the cheap operations between them. `offload` is true,
    with the inputs of the layers in host memory until then; on a CPU they are there anyway. auto: false, selective
    or true, as the forecast ranks those that this machine holds; true without a GPU."""
    neftune_alpha: float = Field(default=0.0, ge=0, le=10**6)
    """NEFTune: in training, noise on the embeddings, uniform within alpha / sqrt(tokens x features) of each sample
    (Jain et al. 2023, arXiv 2310.05914); 5 to 15 are usual. Drawn for each token of a sample."""
    compile: bool = False
    """torch.compile for each layer. Changes speed and the last bits, and takes seconds to minutes at the start."""
    liger_kernels: bool = False
    """Liger's fused Triton kernels for norms, rotary embedding and MLP. Refused on GPUs, where the only run with them
    failed (docs/on_gpu.md); skipped, with a note, without one."""

    kernels: Annotated[list[str] | None, AfterValidator(_packages)] = None
    """Packages whose functions transformers may take in the place of its own, as they are imported: [fla,
    causal_conv1d]. It does not find others, installed or not. Their versions and digests are recorded, and a run
    resumes with others only by consent (run.allow_changes: [model.kernels])."""

    @property
    def recompute(self) -> Literal[False, True, "selective"]:
        """The part of a forward that the backward pass computes again: true is whole layers."""
        kind = self.gradient_checkpointing
        return True if isinstance(kind, Auto) or kind == "offload" or kind == "auto" else kind

    @model_validator(mode="after")
    def _revision_of_a_name(self):
        if self.revision is not None and self.name_or_path is None:
            raise ValueError(f"revision {self.revision!r} would be ignored: it goes with name_or_path")
        return self


def _keys_of_rows(columns: dict[str, str]) -> dict[str, str]:
    known = [*row_kinds.own_keys(), *row_columns.MESSAGE_KEYS]
    for key, column in columns.items():
        if key not in known:
            turned = f"; did you mean {column}: {key}?" if column in known else ""
            raise ValueError(f"has {key!r}; write KEY: COLUMN with a key of {', '.join(known)}{turned}")
    return columns


Columns = Annotated[dict[str, str], AfterValidator(_keys_of_rows)]


def _names(names: list[str]) -> list[str]:
    twice = sorted({name for name in names if names.count(name) > 1})
    if "" in names or twice:
        raise ValueError(f"has {twice[0]!r} twice" if twice else "has an empty name")
    return names


Names = Annotated[list[str], AfterValidator(_names)]


def data_format(name: str) -> str | None:
    """The ending that decides how a file is read: `.jsonl` for rows.jsonl.gz; None if it is no data file."""
    path = Path(name)
    if path.suffix in COMPRESSIONS:
        return inner if (inner := Path(path.stem).suffix) in TEXT_FORMATS else None
    return path.suffix if path.suffix in (*TEXT_FORMATS, *BINARY_FORMATS) else None


def is_pattern(name: str) -> bool:
    """Return whether a source is a pattern of file names, as `*.jsonl`, and no file or folder."""
    return any(letter in name for letter in "*?[") and not Path(name).exists()


TextPart = Literal["system", "content", "reasoning", "tool_calls", "tool_results", "tools", "name", "generation_prompt"]
"""A part of a chat that a template may write otherwise than the row has it."""


class Source(Section):
    path: PathText
    """`python-stdlib`, a data file (.jsonl, .json, .csv, .tsv, .txt, .md, each also .gz, .zst or .bz2; .parquet,
    .arrow), a pattern of them (`data/*.jsonl`), a folder of them or of `save_to_disk`, or a Hub dataset name."""
    split: Split = "train"
    """Split on the Hub; sub-folder or part of file names in a folder; `train` or `test` of python-stdlib."""
    name: NameInDataset | None = None
    """Configuration (subset) of a Hub dataset, or of a folder."""
    revision: Revision | None = None
    """Commit, tag or branch on the Hub."""
    max_rows: int | None = Field(default=None, gt=0)
    """Use only the first N rows."""
    columns: Columns | None = None
    """In the place of data.columns for this source; {} for none."""
    ignore: Names | None = None
    """In the place of data.ignore for this source; [] for none."""
    weight: float | None = Field(default=None, gt=0, le=1000, allow_inf_nan=False)
    """data.train only: how often an epoch uses each row. 2 uses it twice; 0.25 uses a quarter of the rows, and another
    quarter in the next epoch. Default: 1."""
    rows_per_epoch: int | None = Field(default=None, gt=0, le=10**12)
    """data.train only, instead of weight: how many rows an epoch uses; the next epoch goes on after them, and begins
    again at the end. With streaming, of all sources or none: then they are read in turn, in these proportions."""

    @model_validator(mode="after")
    def _ignores_what_it_does_not_read(self):
        _refuse_both(self.columns, self.ignore)
        if self.weight is not None and self.rows_per_epoch is not None:
            both = f"weight {self.weight:g} and rows_per_epoch {self.rows_per_epoch}"
            raise ValueError(f"{both} are both given; keep one")
        return self


def _refuse_both(columns: dict[str, str] | None, ignore: list[str] | None) -> None:
    if both := {*(ignore or ())} & {*(columns or {}).values()}:
        raise ValueError(f"ignore has {sorted(both)[0]!r}, which columns reads; take it out of one of them")


def _source_from_text(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


SourceField = Annotated[Source, BeforeValidator(_source_from_text, json_schema_input_type=str | Source)]


def _sources_from_one(value: Any) -> Any:
    if value == []:
        raise ValueError("is empty; name at least one source")
    return value if isinstance(value, list) else [value]


def _name_single_source(value: Any) -> Any:
    if isinstance(value, list):
        raise ValueError("is a list; give each set a name, as in {one: path/to/one.jsonl, two: path/to/two.jsonl}")
    keys = sorted(Source.model_fields.keys() & value) if isinstance(value, dict) else []
    if keys and not difflib.get_close_matches("path", value):
        are_keys = "is a key" if len(keys) == 1 else "are keys"
        raise ValueError(f"path is missing; {', '.join(keys)} {are_keys} of a source, so no set can be called that")
    return {"": value} if keys or isinstance(value, str) else {} if value is None else value


def eval_key(name: str) -> str:
    """The key of a held-out set."""
    return f"data.eval.{name}" if name else "data.eval"


def _date_of(value: Any) -> Any:
    try:
        return date.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError(f"is {value!r}; write a date as in 2026-01-31") from None


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
        BeforeValidator(_name_single_source, json_schema_input_type=str | Source | dict[str, str | Source]),
    ] = {}
    """Held-out rows: a source, or several named ones, evaluated separately. Evaluated before the first step, every
    run.eval_every_steps, and at the end."""
    columns: Columns | None = None
    """Which column holds what, for rows that are not understood by themselves or in two ways: {user: question,
    assistant: answer}. Other columns are not read. `role` and `content` rename keys of messages."""
    ignore: Names | None = None
    """Columns that are passed over, as if no row had them; `messages.KEY` is a key of messages."""
    holdout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of data.train that is held out and evaluated as `holdout`. Rows are selected by a hash of their content,
    so duplicates stay together in any order."""
    max_length: int = Field(default=2048, ge=8, le=10**8)
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
    chat_template: Annotated[PathText, AfterValidator(template_path)] | None = Field(default=None, examples=["qwen3"])
    """A name in recipes/chat_templates/ such as qwen3, or the path of a Jinja file (./NAME for one without suffix).
    Default: the tokenizer's own template."""
    template_date: Annotated[date | None, BeforeValidator(_date_of, json_schema_input_type=str | None)] = None
    """The date for a template that prints today's, as in 2026-01-31; without it such a template is refused."""
    accept: list[TextPart] = []
    """Parts of a row that the chat template may leave out or change: [reasoning]. Without it, such a row is bad."""
    special_tokens: Literal["text", "tokens"] | None = None
    """The meaning of a special token's text, such as `<|im_end|>`, in the texts of a row. Default: text in a chat,
    where the template writes the tokens, and the token in rows without a template."""
    on_bad_row: Literal["error", "drop"] = "error"
    """Treatment of rows that cannot be trained on: stop and list the first 20, or drop and count them."""

    @property
    def is_packed(self) -> bool:
        """`packing`, once `cookbook.facts.packing` has decided it."""
        assert self.packing != "auto", "data.packing is asked for before it is decided"
        return self.packing

    @property
    def sources(self) -> list[tuple[str, Source]]:
        """All sources, each with its key."""
        held_out = ((eval_key(name), source) for name, source in self.eval.items())
        return [*(("data.train", source) for source in self.train), *held_out]

    @model_validator(mode="after")
    def _columns_of_sources(self):
        for key in ("columns", "ignore"):
            if getattr(self, key) and all(source.path == BUILTIN_SOURCE for _, source in self.sources):
                raise ValueError(f"{key} would be ignored: {BUILTIN_SOURCE} has its own columns; take it out")
        self.train[:] = [self._with_columns(source) for source in self.train]
        self.eval.update({name: self._with_columns(source) for name, source in self.eval.items()})
        return self

    def _with_columns(self, source: Source) -> Source:
        given = {key: value for key in ("columns", "ignore") if (value := getattr(self, key)) is not None}
        given = {key: value for key, value in given.items() if getattr(source, key) is None}
        if not given or source.path == BUILTIN_SOURCE:
            return source
        shared = source.model_copy(update=given)
        _refuse_both(shared.columns, shared.ignore)
        if len(self.sources) > 1:  # a name need not be in each of several sources: see `rows`
            shared.model_fields_set.difference_update(given)
        return shared

    @property
    def is_streamed_mixture(self) -> bool:
        """True if a pass of a stream is a number of rows of each source, and not all rows."""
        return self.streaming and self.train[0].rows_per_epoch is not None

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
            raise ValueError(
                f"weight of {weighted[0]!r} does not go with streaming, which does not know how many rows there are;"
                " write rows_per_epoch for each source"
            )
        uncounted = [source.path for source in self.train if source.rows_per_epoch is None]
        if self.streaming and 0 < len(uncounted) < len(self.train):
            raise ValueError(
                f"rows_per_epoch of {uncounted[0]!r} is missing; with streaming, all sources have it or none"
            )
        for key in ("weight", "rows_per_epoch"):
            weighted = [source.path for source in self.eval.values() if getattr(source, key) is not None]
            if weighted:
                raise ValueError(f"{key} of {weighted[0]!r} would be ignored in data.eval; take it out")
        if self.holdout and "holdout" in self.eval:
            raise ValueError("eval has a set named 'holdout', the name of the rows that data.holdout takes; rename it")
        return self


def _list_of_targets(value: Any) -> Any:
    if isinstance(value, str) and value != ALL_LINEAR:
        raise ValueError(f"is {value!r}; write {ALL_LINEAR}, or a list: [{value}]")
    if value == []:
        raise ValueError(f"is empty; write {ALL_LINEAR}, or name layers")
    return [value] if isinstance(value, str) else value


class AdapterSection(Section):
    """Trains a few new weights and freezes the model's own (peft)."""

    name: Literal["lora", "dora", "qlora"]
    """`qlora` stores the frozen weights in 4 bits (NF4, double quantization; bitsandbytes)."""
    path: PathText | None = None
    """Folder of a trained adapter to begin with, of the same model, rank, alpha and targets. Default: a new one."""
    rank: int = Field(default=16, gt=0, le=10**6)
    """Inner dimension of the two matrices of an adapter."""
    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """The update is scaled by alpha / rank, or alpha / sqrt(rank) with rslora."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input, drawn for each token of a sample: the same under every strategy."""
    targets: Annotated[
        list[str], BeforeValidator(_list_of_targets, json_schema_input_type=Literal["all-linear"] | list[str])
    ] = [ALL_LINEAR]
    """Layers with an adapter: all linear layers but the head, or those whose names end so ([q_proj, v_proj]); and by
    name the experts of a mixture that are one tensor ([all-linear, gate_up_proj, down_proj]). A name that matches
    nothing is an error."""
    modules_to_save: list[str] = []
    """Which of embedding and head to train fully and save with the adapter: [embed_tokens, lm_head]."""
    rslora: bool = False
    """Rank-stabilized scaling, Kalajdzievski 2023 (arXiv 2312.03732)."""

    @model_validator(mode="after")
    def _begins_with_matrices(self):
        if self.path is not None and self.modules_to_save:
            raise ValueError(f"path {self.path} has no whole modules to begin with; take modules_to_save out, or merge")
        return self

    @property
    def is_quantized(self) -> bool:
        """True if the frozen weights of all linear layers but the head are stored in 4 bits."""
        return self.name == "qlora"


MicroBatch = Annotated[
    int | None,
    Field(gt=0),
    WrapValidator(_auto, json_schema_input_type=Annotated[int, Field(gt=0)] | Literal["auto"] | None),
    PlainSerializer(lambda size: size if size is None else int(size), return_type=int | None),
]


class BatchSection(OneOf):
    alternatives = ("micro_batch_size", "micro_batch_tokens")
    global_batch_size: int = Field(gt=0)
    """Sequences (preferences: pairs) per optimizer step, over all processes."""
    micro_batch_size: MicroBatch = None
    """Sequences (pairs) per forward and process. Changes speed and memory, never the result. auto: the most
    that the forecast holds for this machine; 1 without a GPU or under a pipeline."""
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
    """Ranks that are recorded; with all of them, the slowest is known."""
    record_shapes: bool = False
    """Add the shapes of an operation's inputs to the trace."""
    with_stack: bool = False
    """Add the lines of Python that called an operation to the trace; slower."""
    memory: bool = False
    """Write each tensor's place in memory over these steps too, as a page of torch's memory viewer; slower."""

    @model_validator(mode="after")
    def _in_order(self):
        if self.steps[0] > self.steps[1]:
            raise ValueError(f"steps is {self.steps}; write the first step before the last")
        return self


def _times_an_epoch(value: Any) -> Fraction:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return Fraction(value)
    if match := re.fullmatch(r"1/([1-9]\d{0,8})", str(value)):
        return Fraction(1, int(match[1]))
    raise ValueError(f"is {value!r}; write how many times an epoch, as 2, or 1/5 for every fifth epoch")


TimesAnEpoch = Annotated[
    Fraction,
    BeforeValidator(_times_an_epoch),
    PlainSerializer(lambda times: times.numerator if times.denominator == 1 else str(times)),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "string", "pattern": r"^1/[1-9]\d*$"}]}
    ),
]
"""A number of times an epoch: a whole number, or 1/N for every N-th epoch."""


def is_due(step: int, every: int | None, per_epoch: Fraction | None = None, steps_per_epoch: int | None = None) -> bool:
    """Return whether something that happens every `every` steps, or `per_epoch` times an epoch, happens after this one.

    Of an epoch's steps those that complete 1/N, 2/N, ... of it, the last one among them; of 1/N times, the last step of
    every N-th epoch.
    """
    if step == 0:
        return False
    if per_epoch is not None and steps_per_epoch is not None:
        return step * per_epoch // steps_per_epoch > (step - 1) * per_epoch // steps_per_epoch
    return every is not None and step % every == 0


class RunSection(OneOf):
    alternatives = ("num_epochs", "max_steps")
    cadences: ClassVar = {"eval_every_steps": "evals_per_epoch", "save_every_steps": "saves_per_epoch"}
    """Keys of which at most one is given, by the other."""
    num_epochs: int | None = Field(default=None, gt=0)
    """Passes over data.train."""
    max_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps, instead of num_epochs."""
    eval_every_steps: int | None = Field(default=None, gt=0)
    """Evaluate data.eval every N steps. Default: before the first step and at the end only."""
    evals_per_epoch: TimesAnEpoch | None = None
    """Evaluate data.eval N times an epoch, evenly, the last time at its end, or 1/N: at the end of every N-th epoch;
    instead of eval_every_steps."""
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
    saves_per_epoch: TimesAnEpoch | None = None
    """Save N checkpoints an epoch, evenly, the last one at its end, or 1/N: at the end of every N-th epoch; instead of
    save_every_steps."""
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
    early_stopping_patience: int | None = Field(default=None, gt=0)
    """End the run after N evaluations in a row whose loss, of the first set, is not below the lowest before. The
    schedule is not shortened. Default: never."""
    early_stopping_threshold: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Margin by more than which the loss must be lower. Default: 0."""
    callbacks: Names = []
    """Callbacks that get the lines of events.jsonl and metrics.jsonl, by the names under which the recipe's plugins
    register them."""
    metrics: Names = []
    """Metrics that each evaluation computes beside the loss, by the names under which the recipe's plugins register
    them."""
    metric_for_best_model: str | None = None
    """The one of them by which keep_best, early stopping and export compare, in the place of the loss."""
    export: Literal["last", "best"] = "last"
    """The step that a run exports at its end: the last, or that with the lowest evaluation loss of the checkpoints that
    keep_best has kept."""
    resume: str = Field(default="never", min_length=1)
    """never: start from scratch and rename an earlier run | auto: resume from the newest complete checkpoint | a path:
    resume from that checkpoint."""
    allow_changes: list[str] = []
    """Keys that may differ from the recipe of the checkpoint, such as optim.learning_rate."""
    stop_after_steps: int | None = Field(default=None, gt=0)
    """Stop after N steps of this start, with a checkpoint and exit code 75; the schedule is not shortened."""
    strict_versions: bool = False
    """Refuse versions of torch, accelerate, deepspeed, transformers, datasets and peft that the project's tests have
    not run with. By default a line and run.json say so."""
    skip_nonfinite_steps: int = Field(default=0, ge=0)
    """Maximum number of steps to skip because a loss or gradient is not finite; one more ends the run."""
    hang_timeout_minutes: float = Field(default=30.0, gt=0, le=10_080)
    """End a run that makes no progress for this long and name the process at fault. Must exceed the longest forward."""
    on_out_of_memory: Literal["stop", "smaller_micro_batch", "next_strategy"] = "stop"
    """The answer of `cookbook launch` to a lack of GPU memory: end the run | start it again from its newest
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
    price_per_gpu_hour: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    """The cost of one GPU for an hour, in any currency: `price` in metrics.jsonl is then what the run has cost so far.
    Without GPUs, of one process. Default: not known."""
    check_ranks_every_steps: int | None = Field(default=None, gt=0)
    """Every N steps, compare what several processes hold (weights, optimizer state, position in the data) to the bit;
    a difference ends the run. Default: never."""
    profile: ProfileSection | None = Field(default=None, examples=[{"steps": [10, 14]}])
    """Steps to profile, as {steps: [10, 14], ranks: [0]}: a trace and where the time went, in profile/. These steps are
    slower. Default: none."""
    trackers: Annotated[
        dict[TrackerName, dict[str, Any]],
        BeforeValidator(
            tracker_options.by_name,
            json_schema_input_type=TrackerName | list[TrackerName] | dict[TrackerName, dict[str, Any] | None],
        ),
    ] = Field(default={}, examples=[["tensorboard"], {"wandb": {"project": "sums", "tags": ["try"]}}])
    """Experiment trackers that get the numbers of metrics.jsonl and these settings: their names, or of each the
    arguments that its own function takes. `cookbook check` names the packages that one needs."""

    @model_validator(mode="after")
    def _tokens_of_samples(self):
        if self.sample_tokens is not None and self.sample_every_steps is None:
            raise ValueError(f"sample_tokens {self.sample_tokens} would be ignored without sample_every_steps")
        return self

    @model_validator(mode="after")
    def _keys_of_the_best(self):
        if self.early_stopping_threshold is not None and self.early_stopping_patience is None:
            given = f"early_stopping_threshold {self.early_stopping_threshold:g}"
            raise ValueError(f"{given} would be ignored without early_stopping_patience")
        if (name := self.metric_for_best_model) is not None and name not in self.metrics:
            raise ValueError(f"metric_for_best_model is {name!r}, which metrics does not name; add it there")
        if name is not None and self.early_stopping_patience is None and not self.keep_best:
            raise ValueError(
                f"metric_for_best_model {name} would be ignored without early_stopping_patience and keep_best"
            )
        if self.export == "best" and not self.keep_best:
            raise ValueError("export best needs the best checkpoint: write keep_best: 1")
        return self

    @model_validator(mode="after")
    def _one_cadence(self):
        for steps, epochs in self.cadences.items():
            every, per_epoch = getattr(self, steps), getattr(self, epochs)
            if every is not None and per_epoch is not None:
                raise ValueError(f"{steps} {every} and {epochs} {per_epoch} are both given; keep one{self.hint}")
        return self

    def evaluates_after(self, step: int, steps_per_epoch: int | None) -> bool:
        """Return whether the held-out sets are evaluated after this step, the first and the last one apart."""
        return is_due(step, self.eval_every_steps, self.evals_per_epoch, steps_per_epoch)

    def saves_after(self, step: int, steps_per_epoch: int | None) -> bool:
        """Return whether a checkpoint is due after this step by the number of steps, the last one apart."""
        return is_due(step, self.save_every_steps, self.saves_per_epoch, steps_per_epoch)

    def misfits(self, steps_per_epoch: int | None) -> list[str]:
        """List what is asked for more often than an epoch has steps."""
        counts = {key: value for key in self.cadences.values() if (value := getattr(self, key)) is not None}
        return [
            f"run.{key} is {count}, but an epoch has {steps_per_epoch} steps; write at most {steps_per_epoch}"
            for key, count in counts.items()
            if steps_per_epoch is not None and count > steps_per_epoch
        ]

    @property
    def best_is_evaluated(self) -> bool:
        """True if each checkpoint, those by minutes apart, is of a step that is evaluated."""
        if self.saves_per_epoch is not None:
            return self.evals_per_epoch is not None and self.evals_per_epoch % self.saves_per_epoch == 0
        if self.save_every_steps is None or self.eval_every_steps is None:
            return False
        return self.save_every_steps % self.eval_every_steps == 0

    def total_steps(self, steps_per_epoch: int | None) -> int:
        """Optimizer steps of the whole run; `steps_per_epoch` is None for a stream, which needs max_steps."""
        return self.max_steps or (self.num_epochs or 0) * (steps_per_epoch or 0)


def _list_of_functions(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class RoundsSection(Section):
    """`cookbook rounds` samples answers with the current weights, scores them, trains on them, and begins again.
    Keys and defaults are those of TRL's GRPOConfig where it has them."""

    num_rounds: int = Field(gt=0, le=10**6)
    """Rounds in all: each samples answers and trains on them."""
    prompts_per_round: int = Field(gt=0, le=10**9)
    """Prompts of data.train that a round samples answers to. They are taken in a random order, each once an epoch."""
    user_message: str | None = None
    """A user's message with `{prompt}` in it, which asks a prompt that is a text. Default: a text is continued, without
    the chat template."""
    reward_funcs: Annotated[
        list[str],
        AfterValidator(_names),
        BeforeValidator(_list_of_functions, json_schema_input_type=str | list[str]),
    ] = []
    """Reward functions, which the recipe's plugins register, and folders of reward models, which have a / in their
    names: [is_right, outputs/reward/export]. The reward of an answer is their sum. An objective that trains on no
    rewards, as distill, needs none, and has them as a measure."""
    reward_weights: list[Annotated[float, Field(allow_inf_nan=False)]] | None = None
    """A factor for each of them. Default: 1."""
    num_generations: int = Field(default=8, ge=2)
    """Answers to each prompt."""
    max_completion_length: int = Field(default=256, gt=0)
    """Tokens after which an answer is cut off."""
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Temperature of sampling. The policy that is trained is that of temperature 1 in any case: with another one, or
    with truncation, grpo weights each token by the ratio of both probabilities."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most probable tokens that together have this probability."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many of the most probable tokens; 0: from all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from the tokens that are at least this fraction as probable as the most probable one."""
    max_staleness: int = Field(default=0, ge=0, le=100)
    """Rounds by which the weights that sample may be behind those that are trained. With 0 rounds take turns; with 1
    round k + 1 is sampled while round k trains, by the weights that round k begins with."""
    max_kl_sampler_trainer: float = Field(default=0.05, gt=0, allow_inf_nan=False)
    """The divergence of the weights that are trained from who sampled, above which rounds stop: a mean over all tokens
    of a round. Rounding in bf16 makes some thousandths of it."""
    environment: str | None = None
    """An environment, which the recipe's plugins register, or Program: it begins a conversation for each row, answers
    each turn of the policy, as a tool does, and gives the reward."""
    max_turns: int = Field(default=4, gt=0)
    """Turns of the policy after which a conversation is over; its reward is then 0, if it has none."""
    environment_seconds: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Time in which an environment must answer; else rounds end."""
    generation_batch_size: int = Field(default=64, gt=0)
    """Answers that are sampled at a time. It changes speed and memory, and which random numbers an answer gets."""
    sampler: Sampler = TRANSFORMERS
    """The program that samples: transformers, in this process; vllm, with options of `vllm serve` after it that load no
    code, started for each round, or with --enable-lora once; or the address of such a server, as http://localhost:8000
    or unix:/run/vllm, or a list of addresses, which share the prompts."""
    keep_server: bool = False
    """Start vllm once, and let it load the weights of each round; it has its memory while a round trains."""
    round: int | None = Field(default=None, gt=0)
    """The round that a run trains, from 1; `cookbook rounds` gives it to each run."""

    @property
    def starts_one_server(self) -> bool:
        """Return whether a server is started that stays up over the rounds."""
        return self.keep_server or has_adapters(self.sampler)

    @model_validator(mode="before")
    @classmethod
    def _has_no_penalty(cls, values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if str(key).endswith("_penalty"):
                raise ValueError(
                    f"{key}: a penalty makes a token's probability depend on which tokens were sampled before, and the"
                    " policy that is trained has none; take it out"
                )
        return values

    @model_validator(mode="after")
    def _fits_itself(self):
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            counts = f"{len(self.reward_weights)} numbers for {len(self.reward_funcs)} reward_funcs"
            raise ValueError(f"reward_weights has {counts}; write one for each")
        if self.user_message is not None and "{prompt}" not in self.user_message:
            raise ValueError(f"user_message {self.user_message!r} has no {{prompt}}; write where a row's text comes")
        if self.round is not None and self.round > self.num_rounds:
            raise ValueError(f"round is {self.round}, but num_rounds is {self.num_rounds}")
        return self

    @property
    def weights(self) -> list[float]:
        return self.reward_weights or [1.0] * len(self.reward_funcs)

    SAMPLING: ClassVar[tuple[str, ...]] = ("temperature", "top_p", "top_k", "min_p")

    @property
    def sampling(self) -> dict[str, float]:
        """The settings by which a token is drawn from the model's probabilities."""
        return {name: getattr(self, name) for name in self.SAMPLING}

    @property
    def changes_distribution(self) -> bool:
        """True if tokens are drawn from another distribution than the model's."""
        return any(value != type(self).model_fields[name].default for name, value in self.sampling.items())
