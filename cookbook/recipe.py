"""A recipe: what to train. Typed, strict, frozen; every default is stated here, once.

`recipes/schema.json` is written from these models (`python -m cookbook schema`), so that an editor completes and
checks a recipe while it is typed.
"""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, SerializeAsAny, model_validator

from cookbook import plugins
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
from cookbook.objectives import Objective
from cookbook.objectives.token_loss import SFT
from cookbook.optim import Optimizer
from cookbook.registry import Named, Section
from cookbook.schedule import Cosine, Schedule
from cookbook.strategy import missing_strategy, strategy_path

BUILTIN_SOURCE = "python-stdlib"
ALL_LINEAR = "all-linear"

OWNED_ELSEWHERE = {
    "gradient_accumulation_steps": "it is derived: global_batch_size / (micro_batch_size x data-parallel processes)",
    "num_processes": "the accelerate YAML or the launch command owns it (make train PROCESSES=...)",
    "gradient_clipping": "write optim.max_grad_norm",
    "deepspeed": "name an accelerate YAML in `strategy`; it names its DeepSpeed JSON",
    "fsdp": "name an accelerate YAML in `strategy`",
}

RECIPES = Path("recipes")
RENAMED = {
    "llama31_8b/dpo_lora_ddp": ("llama31_8b/dpo_lora", "ddp"),
    "llama31_8b/sft_fsdp2": ("llama31_8b/sft", "fsdp2"),
    "llama31_8b/sft_lora_zero2": ("llama31_8b/sft_lora", "zero2"),
    "llama31_8b/sft_qlora_single": ("llama31_8b/sft_qlora", "single"),
    "llama31_8b/sft_zero3": ("llama31_8b/sft", "zero3"),
    "llama32_3b/sft_fsdp2": ("llama32_3b/sft", "fsdp2"),
    "llama33_70b/sft_qlora_zero2": ("llama31_70b/sft_qlora", "zero2"),
    "llama33_70b/sft_zero3_nvme": ("llama31_70b/sft", "zero3_nvme"),
    "llama33_70b/sft_zero3_offload": ("llama31_70b/sft", "zero3_offload"),
    "mistral_7b/cpt_fsdp2": ("mistral_7b/cpt", "fsdp2"),
    "qwen25_7b/sft_zero2_offload": ("qwen25_7b/sft", "zero2_offload"),
    "qwen25_7b/sft_zero3": ("qwen25_7b/sft", "zero3"),
    "qwen25_7b/sft_zero3_offload": ("qwen25_7b/sft", "zero3_offload"),
    "qwen3_0_6b/sft_ddp": ("qwen3_0_6b/sft", "ddp"),
    "qwen3_0_6b/sft_lora_ddp": ("qwen3_0_6b/sft_lora", "ddp"),
    "qwen3_32b/sft_lora_fsdp2": ("qwen25_32b/sft_lora", "fsdp2"),
    "qwen3_4b/sft_fsdp2": ("qwen3_4b/sft", "fsdp2"),
    "qwen3_4b/sft_lora_ddp": ("qwen3_4b/sft_lora", "ddp"),
    "smollm2_135m/sft_single": ("smollm2_135m/sft", "single"),
}
"""Recipes that had a strategy in their names: what to run instead. In another folder, it is of another model."""


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


def _no_number(value: Any) -> Any:
    # Literal compares by ==, and would take 1 for true.
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f"is {value}; use false, true or 'selective'")
    return value


class ModelSection(Section):
    name_or_path: PathText | None = None
    """Hub name or local folder of a causal language model."""
    revision: str | None = None
    """Commit, tag or branch on the Hub."""
    from_scratch: ScratchModel | None = None
    """Sizes of a new model, instead of name_or_path."""
    gradient_checkpointing: Annotated[Literal[False, True, "selective"], BeforeValidator(_no_number)] = False
    """true recomputes each layer in the backward pass: less memory, about a third more compute. `selective` keeps the
    outputs of matrix products and attention, and recomputes only what is cheap between them."""
    compile: bool = False
    """torch.compile for each layer. Changes speed and the last bits, and costs seconds to minutes at the start."""
    liger_kernels: bool = False
    """Liger's fused Triton kernels for norms, rotary embedding and MLP; needs `pip install liger-kernel`. Left out,
    with a note, on a machine without a GPU."""

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
    weight: float | None = Field(default=None, gt=0, le=1000, allow_inf_nan=False)
    """data.train only: how often an epoch shows each row. 2 shows it twice; 0.25 shows a quarter of the rows, another
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
        raise ValueError("is a list; give every set a name, as in {one: path/to/one.jsonl, two: path/to/two.jsonl}")
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
    `chosen` and `rejected`."""
    eval: Annotated[
        dict[str, SourceField],
        BeforeValidator(_named_from_one, json_schema_input_type=str | Source | dict[str, str | Source]),
    ] = {}
    """Held-out rows: a source, or several by name, each with a result of its own. Evaluated before the first step,
    every run.eval_every_steps, and at the end."""
    holdout: float = Field(default=0.0, ge=0, lt=1)
    """Share of data.train that is held out and evaluated as `holdout`. A hash of the row decides, so equal rows fall on
    one side, whatever the order."""
    max_length: int = Field(default=2048, ge=8)
    """Tokens per sample. Longer samples are cut at the end; for cpt a longer text becomes several samples."""
    packing: bool = False
    """A micro-batch is one row without padding, in which each sample attends to itself only. Changes speed and memory,
    never the curve."""
    streaming: bool = False
    """Read data.train while training, for sets larger than memory or disk; needs run.max_steps. Rows are shuffled
    within blocks of shuffle_rows."""
    shuffle_rows: int = Field(default=10_000, gt=0, le=10**9)
    """streaming only."""
    chat_template: PathText | None = None
    """A Jinja file; without it, the tokenizer's own template."""
    on_bad_row: Literal["error", "drop"] = "error"
    """What to do with a row that cannot be trained on: stop and name them (20 at most), or drop and count them."""

    @model_validator(mode="after")
    def _keys_of_streaming(self):
        if "shuffle_rows" in self.model_fields_set and not self.streaming:
            raise ValueError(f"shuffle_rows {self.shuffle_rows} would be ignored without streaming: true; take it out")
        if self.streaming and self.holdout:
            raise ValueError(f"holdout {self.holdout} does not go with streaming; give held-out rows in data.eval")
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
    """Trains a few new weights beside frozen ones (peft)."""

    name: Literal["lora", "dora", "qlora"]
    """`qlora` holds the frozen weights in 4 bits (NF4, double quantisation; bitsandbytes)."""
    rank: int = Field(default=16, gt=0)
    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """The update is scaled by alpha / rank, or alpha / sqrt(rank) with rslora."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """On the adapter's input. Above 0 the curve depends on the number of processes."""
    targets: Annotated[
        list[str], BeforeValidator(_list_of_targets, json_schema_input_type=Literal["all-linear"] | list[str])
    ] = [ALL_LINEAR]
    """Linear layers that get an adapter: all of them but the head, or the last parts of their names ([q_proj, v_proj]).
    A name that matches nothing is an error."""
    modules_to_save: list[str] = []
    """Of embedding and head, what is trained whole and saved with the adapter: [embed_tokens, lm_head]."""
    rslora: bool = False
    """Rank-stabilised scaling, Kalajdzievski 2023 (arXiv 2312.03732)."""

    @property
    def is_quantized(self) -> bool:
        """Whether the frozen weights of linear layers, but the head, are held in 4 bits."""
        return self.name == "qlora"


class BatchSection(Section):
    global_batch_size: int = Field(gt=0)
    """Sequences per optimizer step, all processes together; of preferences, pairs."""
    micro_batch_size: int | None = Field(default=None, gt=0)
    """Sequences (pairs) per forward, per process. Changes speed and memory, never the result."""
    micro_batch_tokens: int | None = Field(default=None, gt=0)
    """Tokens per forward at most, padding included, instead of micro_batch_size."""

    @model_validator(mode="after")
    def _one_limit(self):
        if self.micro_batch_size is None and self.micro_batch_tokens is None:
            raise ValueError("neither micro_batch_size nor micro_batch_tokens is given; write one of them")
        if self.micro_batch_size is not None and self.micro_batch_tokens is not None:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} and micro_batch_tokens {self.micro_batch_tokens} are both"
                " given; keep one (null unsets a key)"
            )
        return self


class RunSection(Section):
    num_epochs: int | None = Field(default=None, gt=0)
    max_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps, instead of num_epochs."""
    eval_every_steps: int | None = Field(default=None, gt=0)
    """Without it, data.eval is evaluated before the first step and at the end only."""
    output_dir: PathText = Field(default_factory=str)  # load_recipe fills it in
    """Everything that a run writes lies under this folder; beside it, `.NAME.lock` keeps a second run out. Default:
    outputs/ with the names of the recipe and of the strategy, as in outputs/llama31_8b-sft-zero3."""
    save_every_steps: int | None = Field(default=None, gt=0)
    """A checkpoint each so many steps. Without any such key there is one, at the end."""
    save_every_minutes: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    save_first_step: bool = False
    """A checkpoint after step 1, to learn early that saving works."""
    save_in_background: bool = False
    """Steps wait for a copy of the state to host memory only, not for the disk. Costs that memory."""
    keep_last: int = Field(default=2, ge=2)
    """Checkpoints that stay; the newest may be the one that a crash damages."""
    keep_best: int = Field(default=0, ge=0)
    """Beside the last, so many with the smallest evaluation loss: of the first set, if there are several."""
    resume: str = Field(default="never", min_length=1)
    """never: begin anew, and set an earlier run aside | auto: go on from the newest whole checkpoint | a path."""
    allow_changes: list[str] = []
    """Keys whose values may differ from those that the checkpoint was made with, such as optim.learning_rate."""
    stop_after_steps: int | None = Field(default=None, gt=0)
    """Stop after so many steps of this start, with a checkpoint and exit code 75; the schedule is not shortened."""
    skip_nonfinite_steps: int = Field(default=0, ge=0)
    """Steps that may be left out because a loss or gradient is not finite; one more ends the run."""
    hang_timeout_minutes: float = Field(default=30.0, gt=0, le=10_080)
    """A run without progress for so long ends, and names the process at fault. More than the longest forward takes."""
    check_export: bool = True
    """At the end, open the export in a fresh process, and compare it with the checkpoint: the time of a start, and of
    reading both."""
    deterministic: bool = False
    """Only kernels that give the same bits each time on the same GPUs, and an error for what has none. Slower; a CPU
    has them anyway."""

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

    def total_steps(self, steps_per_epoch: int | None) -> int:
        """Optimizer steps of the whole run. The length of an epoch is None for a stream, which has max_steps."""
        return self.max_steps or (self.num_epochs or 0) * (steps_per_epoch or 0)


class Recipe(Section):
    """A fine-tuning run that somebody can repeat."""

    strategy: Annotated[PathText, AfterValidator(lambda name: str(strategy_path(name)))]
    """A name in accelerate_configs/, as zero3, or the path of an accelerate YAML. `accelerate launch --config_file`
    wins over it, and the run says so."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "bf16"
    """'no' is fp32; fp16 scales the loss and needs a GPU."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Data order, new weights and dropout."""
    plugins: list[PathText] = []
    """Python files that add objectives, optimizers, schedules or kinds of rows. They run as the user who trains."""
    model: ModelSection
    data: DataSection
    objective: SerializeAsAny[Objective] = SFT()
    adapter: AdapterSection | None = None
    """Absent: all weights are trained."""
    batch: BatchSection
    optim: SerializeAsAny[Optimizer]
    schedule: SerializeAsAny[Schedule] = Cosine()
    run: RunSection


def read_recipe(path: Path) -> Document:
    """The recipe in a file, as it is written.

    Raises:
        RecipeError: as `read_document`; for a name that is no more, with the recipe to take instead.
    """
    folder, asked = RECIPES.resolve(), path.resolve()
    old = str(asked.relative_to(folder)).removesuffix(".yaml") if asked.is_relative_to(folder) else ""
    if old not in RENAMED or path.exists():
        return read_document(path)
    new, strategy = RENAMED[old]
    what = "is" if Path(new).parent == Path(old).parent else "is gone; the nearest is"
    raise RecipeError(
        [f"{path} {what} {RECIPES / new}.yaml with strategy: {strategy} (STRATEGY={strategy}, --strategy {strategy})"]
    )


def default_output_dir(path: Path, strategy: str) -> str:
    """`outputs/llama31_8b-sft-zero3` for recipes/llama31_8b/sft.yaml under `zero3` or its file."""
    file = path.resolve()
    folders = (folder for folder in (RECIPES.resolve(), Path.cwd()) if file.is_relative_to(folder))
    parts = file.relative_to(next(folders, file.parent)).with_suffix("").parts
    return f"outputs/{'-'.join([*parts, Path(strategy).stem])}"


def load_recipe(path: Path, assignments: list[str] | None = None, strategy: Path | None = None) -> Recipe:
    """The recipe in a file, with `section.key=value` assignments applied.

    Args:
        strategy: the one in force, if it is not the recipe's own; the default of `run.output_dir` has its name.

    Raises:
        RecipeError: all mistakes together, each with its place.
    """
    return parse_recipe(read_recipe(path), path, assignments, strategy)


def parse_recipe(document: Document, path: Path, assignments: list[str] | None, strategy: Path | None) -> Recipe:
    """As `load_recipe`, of a file that has been read; the assignments are written into the document."""
    mistakes = apply_overrides(document, assignments or [])
    if missing := _use_plugins(document, path.parent):
        raise RecipeError(mistakes + missing)  # without them, their names would be further mistakes
    run, named = document.values.get("run"), document.values.get("strategy")
    if isinstance(run, dict) and run.get("output_dir") is None:
        is_path = isinstance(named, str) and path_problem(named) is None
        run["output_dir"] = default_output_dir(path, str(strategy or (named if is_path else "")))
    recipe, found = validate(document, Recipe, OWNED_ELSEWHERE)
    mistakes += found + _check_across_keys(document)
    if mistakes or recipe is None:
        raise RecipeError(list(dict.fromkeys(mistakes)))
    return recipe


def _use_plugins(document: Document, folder: Path) -> list[str]:
    """Imports the plugins of a recipe, whose names its sections may use; from here on they have their whole paths."""
    values = document.values.get("plugins", [])
    if not isinstance(values, list) or any(not isinstance(value, str) or path_problem(value) for value in values):
        plugins.use([])
        return []  # the section's own mistakes
    mistakes, files = [], [str((folder / value).resolve()) for value in values]
    for i, (value, file) in enumerate(zip(values, files, strict=True)):
        place = document.place(("plugins", i))
        if not Path(file).is_file():
            mistakes.append(f"{place} is {value!r}: no such file (looked in {folder.resolve()})")
        elif files.index(file) != i:
            mistakes.append(f"{place} is {value!r}, given twice; keep one of them")
    if mistakes:
        plugins.use([])
        return mistakes
    if values:
        document.values["plugins"] = files
    try:
        plugins.use(files)
    except RecipeError as error:
        return [f"{document.place(('plugins',))}: {mistake}" for mistake in error.mistakes]
    return []


def _check_across_keys(document: Document) -> list[str]:
    """Mistakes that need more than one key, or a look at the disk; in every section that is right by itself."""
    mistakes = []
    strategy = document.values.get("strategy")
    if isinstance(strategy, str) and path_problem(strategy) is None:
        mistakes += missing_strategy(strategy, lambda: document.place(("strategy",)))
    model = part(document, "model", ModelSection)
    name = model.name_or_path if model is not None else None
    if name is not None and name.startswith((".", "/")) and not Path(name).is_dir():
        place = document.place(("model", "name_or_path"))
        mistakes.append(f"{place} is {name!r}: no such folder (looked in {Path.cwd()})")
    data = part(document, "data", DataSection)
    run = part(document, "run", RunSection)
    schedule = part(document, "schedule", Schedule)
    if data is not None:
        if data.chat_template is not None:
            mistakes += find_file(data.chat_template, lambda: document.place(("data", "chat_template")))
        is_list = isinstance(document.values["data"].get("train"), list)
        for i, source in enumerate(data.train):
            mistakes += _check_source(source, document, ("data", "train", i) if is_list else ("data", "train"))
        for name, source in data.eval.items():
            mistakes += _check_source(source, document, ("data", "eval", name) if name else ("data", "eval"))
        mistakes += _check_data(data, document)
    if run is not None:
        mistakes += _check_output_dir(run.output_dir, document)
        if schedule is not None and run.max_steps is not None:
            for mistake in schedule.misfits(run.max_steps):
                key, _, said = mistake.partition(" ")
                mistakes.append(f"{document.place(('schedule', key))} {said}")
        mistakes += _check_saving(run, data, document)
        if run.eval_every_steps is not None and data is not None and not data.eval and not data.holdout:
            mistakes.append(
                f"{document.place(('run', 'eval_every_steps'))} is {run.eval_every_steps}, but there is no data.eval;"
                " add it, or take this key out"
            )
    return mistakes


def _check_data(data: DataSection, document: Document) -> list[str]:
    mistakes = []
    objective = part(document, "objective", Objective)
    batch = part(document, "batch", BatchSection)
    run = part(document, "run", RunSection)
    if data.streaming and run is not None and run.num_epochs is not None:
        mistakes.append(
            f"{document.place(('run', 'num_epochs'))} is {run.num_epochs}, but the length of a stream is not known"
            " before its end; write run.max_steps instead"
        )
    if data.streaming and objective is not None and objective.needs_reference:
        mistakes.append(
            f"{document.place(('data', 'streaming'))} is true, but {objective.name} computes the reference of all"
            f" {objective.sample}s before the first step; take it out"
        )
    if batch is not None and batch.micro_batch_tokens is not None:
        num_sequences = len(objective.sequences) if objective is not None else 1
        longest = data.max_length * num_sequences
        if batch.micro_batch_tokens < longest:
            what = f"a sample of {num_sequences} sequences of" if num_sequences > 1 else "one sample of"
            mistakes.append(
                f"{document.place(('batch', 'micro_batch_tokens'))} is {batch.micro_batch_tokens}, too few for {what}"
                f" data.max_length {data.max_length}; write at least {longest}"
            )
    return mistakes


def _check_output_dir(name: str, document: Document) -> list[str]:
    here, folder = Path.cwd(), Path(name).resolve()
    if folder == here or folder in here.parents:
        what = "the folder that you are in" if folder == here else "a folder above the one that you are in"
        return [f"{document.place(('run', 'output_dir'))} is {name!r}, {what}; name one of its own, as outputs/mine"]
    for path in (Path(name), *Path(name).parents):
        if path.is_symlink() and not path.exists():
            return [f"{document.place(('run', 'output_dir'))} is {name!r}, but {path} is a link to nothing"]
        if path.exists():
            if path.is_dir():
                return []
            return [f"{document.place(('run', 'output_dir'))} is {name!r}, but {path} is a file; name a folder"]
    return []


def _check_saving(run: RunSection, data: DataSection | None, document: Document) -> list[str]:
    mistakes = []
    if run.keep_best:
        place = document.place(("run", "keep_best"))
        if data is not None and not data.eval and not data.holdout:
            mistakes.append(f"{place} is {run.keep_best}, but there is no data.eval to tell the best by")
        elif not run.save_every_steps or not run.eval_every_steps or run.save_every_steps % run.eval_every_steps:
            mistakes.append(
                f"{place} is {run.keep_best}, but save_every_steps is {run.save_every_steps} and eval_every_steps"
                f" {run.eval_every_steps}: only what is evaluated when it is saved can be the best; make"
                " save_every_steps a multiple of eval_every_steps"
            )
    known = {*_leaves(Recipe)}
    for key in run.allow_changes:
        if not any(leaf == key or leaf.startswith(key + ".") for leaf in known):
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            mistakes.append(f"{document.place(('run', 'allow_changes'))} names {key!r}, which no recipe has{hint}")
    return mistakes


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        sections = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        inner = next((kind for kind in sections if issubclass(kind, BaseModel)), None)
        yield prefix + name
        if inner is not None:
            for kind in inner.kinds() if issubclass(inner, Named) else [inner]:
                yield from _leaves(kind, f"{prefix}{name}.")


def _check_source(source: Source, document: Document, where: tuple[str | int, ...]) -> list[str]:
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
