"""`cookbook init`: a recipe for a model, rows and GPUs, with the reason of each choice above its key.

Optimizer, schedule, batch and adapter are those of the shipped recipe nearest in task and size, whose label has their
source; the forecast behind `plan` chooses method, strategy and micro-batch.
"""

import os
import re
import shlex
import textwrap
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

import yaml
from typer import Argument, Option

from cookbook.commands.check.recipe_checks import check
from cookbook.commands.shared.arguments import locate
from cookbook.commands.shared.labels import read_label
from cookbook.commands.shared.named_file import problem_of_name, write_named_file
from cookbook.commands.shared.whole_recipe import whole_text
from cookbook.config.chat_templates import template_path
from cookbook.config.objectives import Objective
from cookbook.config.recipe import RECIPES, Draft, Recipe, default_output_dir, parse_recipe, read_recipe
from cookbook.config.sections import Source
from cookbook.config.strategy import Strategy, load_known
from cookbook.rows.row_checks import Row
from cookbook.rows.row_columns import drop_columns, kinds_of, rename
from cookbook.rows.row_kinds import kinds
from cookbook.rows.suggestions import suggestions
from cookbook.start.run_plan import load_pair
from cookbook.system import registry
from cookbook.system.console import say, several
from cookbook.system.files import (
    RecipeError,
    dump_yaml,
    first_line,
    gather_mistakes,
    in_flow,
    make_folder,
    refuse,
)
from cookbook.system.hardware import GIB, Machines, in_gib, parse_machines, this_machine
from cookbook.system.imports import quiet_deepspeed
from cookbook.system.machine import CPU_PROCESSES
from cookbook.system.shipped import own_folder, path_from_here, short
from cookbook.training.data.rows import BadRows, Rows, read_rows
from cookbook.training.data.sources import raw_rows, unread_note

if TYPE_CHECKING:
    import numpy as np

    from cookbook.forecast.verdict import Forecast
    from cookbook.training.data.tokens import TokenSet

Task = Literal["sft", "cpt", "dpo", "orpo", "kto_zero"]
Values = dict[str, Any]
Notes = dict[str, str]
"""Reasons, by the key above which each is written."""


class Example(NamedTuple):
    """A shipped recipe whose settings serve models of up to `billions` parameters."""

    billions: float
    recipe: str
    warmup: float
    """Share of the run."""

    @property
    def path(self) -> Path:
        return Path(path_from_here(str(RECIPES / f"{self.recipe}.yaml")))


ANY = float("inf")
SFT_ADAPTERS = (
    Example(2, "qwen3_0_6b/sft_lora", 0),
    Example(20, "llama31_8b/sft_qlora", 0.03),
    Example(ANY, "qwen25_32b/sft_lora", 0.03),
)
EXAMPLES: dict[tuple[Task, bool], tuple[Example, ...]] = {
    ("sft", False): (
        Example(0.3, "smollm2_135m/sft", 0.1),
        Example(2, "qwen3_0_6b/sft", 0),
        Example(20, "llama31_8b/sft", 0.03),
        Example(ANY, "llama31_70b/sft", 0.03),
    ),
    ("sft", True): SFT_ADAPTERS,
    ("cpt", False): (Example(ANY, "mistral_7b/cpt", 0.1),),
    ("cpt", True): SFT_ADAPTERS,
    ("dpo", True): (Example(ANY, "llama31_8b/dpo_lora", 0.1),),
    ("orpo", True): (Example(ANY, "qwen3_4b/orpo_lora", 0.1),),
    ("kto_zero", True): (Example(ANY, "llama31_8b/kto_zero_lora", 0.1),),
}
"""Examples by task, and whether there is an adapter. Preferences have no example that trains all weights."""
TASKS: tuple[Task, ...] = ("kto_zero", "dpo", "sft", "cpt")
"""The first that trains on the rows is taken."""
METHODS: tuple[str | None, ...] = (None, "lora", "qlora")
"""The adapter, most memory first."""
TEMPLATES = ("chatml", "llama3", "tulu", "chatml_tools")
"""Tried in this order if neither the tokenizer's own template nor the shipped one that renders alike can be trained
with."""
UNCUT = 2**31
SPLIT_LENGTH = 4096
"""Tokens of a sample of text, as in mistral_7b/cpt: longer texts become several samples."""
ROWS_SEEN = 100
"""To find out the kind of rows."""
MIN_ROWS_TO_HOLD_OUT, HOLDOUT, MAX_HELD_OUT = 200, 0.05, 1000
MIN_STEPS, MIN_BATCH = 10, 8
"""An epoch of fewer steps has a smaller batch, if it stays above the minimum."""
ROWS_ON_A_CPU = 8
"""At a time, if memory allows: with one, Python's time between operations is a large part of a small model's step."""
WHICH_MODEL, WHICH_ROWS = "a folder, or a name on the Hub", "a file or folder of rows, or a name on the Hub"
PER_RUN, APART = 10, 4
"""At most so many evaluations, and checkpoints; at least so many steps apart, unless the run has fewer."""


def init(
    model: Annotated[str | None, Argument(metavar="MODEL", show_default=False, help=WHICH_MODEL)] = None,
    data: Annotated[str | None, Argument(metavar="DATA", show_default=False, help=WHICH_ROWS)] = None,
    *,
    gpus: Annotated[str | None, Option(metavar="8xH100", help="or 1x24GB, 2x8x80GB, cpu; default: here")] = None,
    task: Annotated[Task | None, Option(help="default: what the rows are for")] = None,
    columns: Annotated[str | None, Option(metavar="'{user: question, ...}'", help="as data.columns")] = None,
    ignore: Annotated[str | None, Option(metavar="'[COLUMN, ...]'", help="as data.ignore")] = None,
    out: Annotated[Path, Option(metavar="RECIPE", help="a new file")] = RECIPES / "mine.yaml",
    copy: Annotated[
        Path | None, Option(metavar="RECIPE", parser=locate, help="instead: one with a base, as a single file")
    ] = None,
) -> int:
    """Write a recipe for your model, rows and GPUs."""
    if copy is not None:
        given = {"MODEL": model, "DATA": data, "--gpus": gpus, "--task": task, "--columns": columns, "--ignore": ignore}
        refuse([f"{name}: would be ignored with --copy; take it out" for name, value in given.items() if value])
        return _copy(copy, out)
    for name, value, what in (("MODEL", model, WHICH_MODEL), ("DATA", data, WHICH_ROWS)):
        if value is None:
            raise RecipeError(f"{name} is missing; write cookbook init MODEL DATA ({what})")
    assert model is not None and data is not None
    machines, named = _check_arguments(model, data, gpus, out, {"columns": columns, "ignore": ignore})
    quiet_deepspeed()
    from cookbook.commands.preview.sample_page import TOKENIZER_FILES
    from cookbook.training.models.language_model import load_config
    from cookbook.training.models.model_source import fetch_model, revision_of

    mistakes: list[str] = []
    with gather_mistakes(mistakes):
        folder = fetch_model(model, None, TOKENIZER_FILES)
        config = load_config(folder, 1)
    with gather_mistakes(mistakes):
        chosen, source, rows = _read(named, task)
    refuse(mistakes)
    request = Request(
        model=model,
        revision=revision_of(folder),
        config=config,
        task=chosen,
        source=source,
        rows=rows,
        machines=machines,
        out=out,
    )
    data_keys = choose_data(request, folder)
    choice = choose(request, data_keys)
    text = recipe_text(request, choice, data_keys.notes | choice.notes)
    make_folder(out.parent)
    write_named_file(out, text)
    say(text)
    check([out], assignments=[])
    recipe = shlex.quote(str(out))
    say(f"cookbook preview {recipe}")
    say(f"cookbook launch {recipe}")
    return 0


def _copy(path: Path, out: Path) -> int:
    """Write a recipe and its base into one file."""
    refuse(_lacks_of_name(out))
    load_pair(path)  # with the lines of both files in its mistakes
    text = whole_text(path, out)
    make_folder(out.parent)
    write_named_file(out, text)
    say(text)
    check([out], assignments=[])
    return 0


def _lacks_of_name(out: Path) -> list[str]:
    """The mistake of a file's name for a new recipe, if it has one."""
    if in_the_way := problem_of_name(out):
        return in_the_way
    return [] if out.suffix == ".yaml" else [f"--out is {out}; a recipe ends in .yaml"]


def _check_arguments(
    model: str, data: str, gpus: str | None, out: Path, names: dict[str, str | None]
) -> tuple[Machines, Source]:
    """The machines, and the source with the columns that the options name."""
    mistakes = _lacks_of_name(out)
    machines = Machines(text="cpu")
    with gather_mistakes(mistakes):
        machines = this_machine() if gpus is None else parse_machines(gpus)
        if gpus is not None and not machines.num_gpus:
            machines = replace(machines, host_gib=this_machine().host_gib)
    values = {"strategy": "single", "model": {"name_or_path": model}, "data": {"train": data}}
    values |= {"batch": {"global_batch_size": 1, "micro_batch_size": 1}, "optim": {"learning_rate": 1.0}}
    source = Source(path=data)
    with gather_mistakes(mistakes):
        given = {key: _yaml_of(key, text) for key, text in names.items() if text is not None}
        _recipe(values | {"run": {"num_epochs": 1}, "data": {"train": data} | given})
        source = Source(path=data, **given)
    refuse(mistakes)
    return machines, source


def _yaml_of(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"--{key} is {text!r}: not YAML: {first_line(error)}") from None


def _recipe(values: Values) -> Recipe:
    return parse_recipe(Draft("init", deepcopy(values), file=RECIPES / "mine.yaml"))


def _read(source: Source, task: Task | None) -> tuple[Task, Source, Rows]:
    """The task, the source with columns that it needs and whose names leave no doubt, and its good rows.

    Raises:
        RecipeError: no row that can be understood, rows that the task does not train on, or columns of which only the
            user knows the meaning.
    """
    first_rows = [raw for _, raw in islice(raw_rows(source), ROWS_SEEN) if isinstance(raw, dict)]
    if source.ignore:
        first_rows = [drop_columns(raw, source.ignore) for raw in first_rows]
    known = next((row for raw in first_rows if kinds_of(row := rename(raw, source.columns or {}))), None)
    if known is None and first_rows and not source.columns:
        trained = Objective.of(name=task or "sft").rows
        # An answer of one word in the first row looks like a name.
        ways = next(filter(None, (suggestions(raw, trained) for raw in first_rows)), [])
        if ways and ways[0].is_named:
            source = source.model_copy(update={"columns": ways[0].columns})
            known = rename(first_rows[0], ways[0].columns)
        elif ways:
            choices = (f"  --columns {shlex.quote(in_flow(way.columns))}" for way in ways)
            which = "which columns are to be trained on? Their names do not say it. Call init again with"
            which += " this, if it is what you mean" if len(ways) == 1 else " one of these"
            others = ", ".join(map(ascii, first_rows[0]))[:200]
            raise RecipeError("\n".join([f"{source.path}: {which}, or with others of {others}:", *choices]))
    names = kinds_of(known) if known else set()
    fitting = [name for name in TASKS if names.intersection(Objective.of(name=name).rows)]
    usual: Task = "cpt" if names == {"text"} else fitting[0] if fitting else "sft"
    chosen = task or usual
    objective = Objective.of(name=chosen)
    if names and not names.intersection(objective.rows):
        has, wants = (
            " or ".join(dict.fromkeys(kinds()[name].words for name in some)) for some in (sorted(names), objective.rows)
        )
        others = _other_objectives(known or {})
        by_hand = f"write a recipe with objective.name {others}, see docs/recipes.md" if others else "use other rows"
        advice = f"use --task {' or '.join(fitting)}" if fitting else by_hand
        raise RecipeError(f"--task is {chosen}, which trains on {wants}, but {source.path} has {has}; {advice}")
    try:
        rows = read_rows(source, "drop", objective)
        if sum(rows.num_dropped.values()) > len(rows.rows):
            read_rows(source, "error", objective)  # raises: these are not a few rows to be left out
    except RecipeError as error:
        mistakes = error.mistakes
        if any(re.search(r"columns:|data\.(columns|ignore)", mistake) for mistake in mistakes):
            mistakes = [*mistakes, "Here, data.columns and data.ignore are --columns and --ignore"]
        raise RecipeError(mistakes) from None
    return chosen, source, rows


def _other_objectives(raw: Row, keys: Sequence[str] = ()) -> str:
    """The objectives, none of them a task, that train on more of a row than these keys; empty if there is none."""
    of_tasks = {kind for name in get_args(Task) for kind in Objective.of(name=name).rows}
    wider = {name for name, kind in kinds().items() if name not in of_tasks and {*kind.keys} > {*keys}}
    others = {name: wider.intersection(objective.rows) for name, objective in registry.members("objective").items()}
    return " or ".join(name for name, rows in others.items() if rows & kinds_of(raw, sorted(rows)))


@dataclass(frozen=True, kw_only=True)
class Request:
    """Model, rows and machines that a recipe is to be written for."""

    model: str
    revision: str | None
    """The commit of a model of the Hub."""
    config: Any
    task: Task
    source: Source
    rows: Rows
    machines: Machines
    out: Path

    @property
    def objective(self) -> Objective:
        return Objective.of(name=self.task)


@dataclass(frozen=True, kw_only=True)
class DataKeys:
    """The section `data`, and what else follows from the tokens of the rows."""

    values: Values
    notes: Notes
    objective: Objective
    num_samples: int
    """To be trained on in an epoch."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A recipe whose forecast fits."""

    values: Values
    notes: Notes
    example: Example
    billions: float
    """Parameters of the model."""
    memory: str
    host_gb: int
    """GB of host memory that the strategy needs; 0 where it offloads nothing."""


class TokenizedRows(NamedTuple):
    """The rows as tokens, under a chat template that can be trained with."""

    tokens: "TokenSet"
    objective: Objective
    num_bad: dict[str, int]
    """Rows that are left out, by reason."""
    template: str | None
    """The value of data.chat_template; None for the tokenizer's own."""
    notes: Notes


def choose_data(request: Request, folder: str) -> DataKeys:
    """Choose the keys of `data` by the rows and their lengths in tokens.

    Args:
        folder: that of the model.

    Raises:
        RecipeError: no chat template can be trained with.
    """
    import numpy as np

    values: Values = {"train": request.source.path}
    notes: Notes = {}
    columns = request.source.columns
    kind, first = kinds()[request.rows.kind], next(raw for _, raw in raw_rows(request.source) if isinstance(raw, dict))
    others = _other_objectives(rename(first, columns or {}), kind.keys)
    more = f"; objective.name {others} would train on more of them, see docs/recipes.md" if others else ""
    notes["objective"] = f"trains on the rows' {kind.keys_in_words}{more}"
    if about := "; ".join(filter(None, [request.rows.renamed, unread_note(request.source)])):
        notes["data.train"] = about
    if request.source.ignore:
        values["ignore"] = request.source.ignore
    if columns:
        values["columns"] = columns
        left = [ascii(column) for column in first if column not in columns.values()]
        unread = f"; not read: {', '.join(left[:8])}{' and more' * (len(left) > 8)}" if left else ""
        notes["data.columns"] = f"what each column is{unread}"
    tokenized = _tokenize(request, folder)
    if tokenized.template is not None:
        values["chat_template"] = tokenized.template
    notes |= tokenized.notes
    if tokenized.objective != request.objective:
        notes["objective"] += ", their last turn, since the template leaves out a part of earlier ones"
    assert tokenized.tokens.row_lengths is not None
    lengths = np.asarray(tokenized.tokens.row_lengths)
    splits = tokenized.objective.splits_rows
    length, notes["data.max_length"] = _choose_length(lengths, request.config, splits=splits)
    num_samples = int(np.ceil(lengths / length).sum()) if splits else len(lengths)
    if not splits and (num_lost := _num_lost(tokenized.tokens, length)):
        values["too_long"] = "drop"
        notes["data.too_long"] = f"cut, {several(num_lost, 'row')} would have nothing to train on"
        num_samples -= int(np.sum(lengths > length))
    share, note = _choose_holdout(request.rows, len(lengths))
    if share:
        values["holdout"], notes["data.holdout"] = share, note
    elif note:
        notes["data"] = "; ".join(filter(None, [notes.get("data"), note]))
    values["max_length"] = length
    if tokenized.num_bad:
        values["on_bad_row"] = "drop"
        reasons = (f"{count:,} row{'s' if count > 1 else ''}: {reason}" for reason, count in tokenized.num_bad.items())
        notes["data.on_bad_row"] = ", ".join(reasons)
    return DataKeys(
        values=values, notes=notes, objective=tokenized.objective, num_samples=int(num_samples * (1 - share))
    )


def _choose_length(lengths: "np.ndarray", config: Any, *, splits: bool) -> tuple[int, str]:
    """The value of data.max_length that keeps nearly all rows whole, and a note on it.

    Args:
        lengths: of the rows, in tokens.
        splits: whether a longer row becomes several samples.
    """
    import numpy as np

    from cookbook.training.data.sets import SHARE_TO_KEEP

    enough = int(np.quantile(lengths, SHARE_TO_KEEP, method="higher"))
    limits = [-(-enough // 64) * 64, getattr(config, "max_position_embeddings", None) or UNCUT]
    limits += [SPLIT_LENGTH] if splits else []
    length = min(limits)
    if splits and lengths.max() > length:
        note = f"{np.mean(lengths > length):.1%} of the rows are longer, and are split"
    else:
        share = np.mean(lengths <= length)
        note = "no row is longer" if share == 1 else f"{share:.1%} of the rows are not longer"
    note += f"; the longest has {lengths.max():,} tokens"
    if length < limits[0]:
        limit = "the model's positions" if length == limits[1] else f"{SPLIT_LENGTH:,}"
        note += f"; limited to {limit}"
    return length, note


def _choose_holdout(rows: Rows, num_rows: int) -> tuple[float, str]:
    """The share of the rows to be held out, or 0 where they are few or equal ones leave too few or too many; and a
    note.
    """
    from cookbook.training.data.sets import hold_out

    if num_rows < MIN_ROWS_TO_HOLD_OUT:
        return 0.0, ""
    share = float(f"{min(HOLDOUT, MAX_HELD_OUT / num_rows):.1g}")
    held_out: list[Rows] = []
    with gather_mistakes([]):
        _, held_out = hold_out([rows], share)
    problem_of_name = sum(len(part.rows) for part in held_out) / len(rows.rows)
    if not 0 < problem_of_name < 2 * share:
        return 0.0, f"no held-out rows: equal rows stay together, so {share:.0%} of these cannot be taken"
    return share, f"some {num_rows * share:.0f} rows, for evaluation"


def _tokenize(request: Request, folder: str) -> TokenizedRows:
    """Tokenize the rows under the first chat template that can be trained with.

    Raises:
        RecipeError: there is none; the reason is that of the first.
    """
    from cookbook.training.data.tokens import tokenize
    from cookbook.training.data.twin import twin_of
    from cookbook.training.models.tokenizer_files import load_tokenizer

    is_chat, problems = kinds()[request.rows.kind].chats is not None, list[str]()
    twin = twin_of(load_tokenizer(folder, None)) if is_chat else None
    tries: list[tuple[str | None, Objective]] = [(None, request.objective)]
    if twin is not None:
        tries.append((twin, request.objective))
        if request.task == "sft":  # a model that reasons may have the reasoning of its last turn alone
            tries.append((twin, Objective.of(name="sft", train_on="last")))
    tries += [(name, request.objective) for name in TEMPLATES if is_chat and name != twin]
    for template, objective in tries:
        bad_rows, notes = BadRows(), {}
        try:
            tokens = tokenize(
                [request.rows],
                load_tokenizer(folder, template and template_path(template)),
                max_length=UNCUT,
                objective=objective,
                bad_rows=bad_rows,
            )
        except RecipeError as error:
            problems = problems or error.mistakes[:1]
            continue
        if tokens is None or bad_rows.num_by_reason.total() > bad_rows.num_good:
            problems = problems or bad_rows.mistakes()
            continue
        if template is not None:
            what = "renders as the tokenizer's own" if template == twin else "of those here the first that serves"
            notes["data.chat_template"] = "; ".join([what, *problems])
        elif is_chat:
            notes["data"] = "chats go through the tokenizer's own template"
        elif request.task != "cpt" and load_tokenizer(folder, None).chat_template:
            what = "prompt and answer are joined as they are written, without the tokenizer's chat template"
            notes["data"] = f"{what}, which is for messages"
        num_bad = request.rows.num_dropped | dict(bad_rows.num_by_reason)
        return TokenizedRows(tokens, objective, num_bad, template, notes)
    raise RecipeError(problems)


def choose(request: Request, data: DataKeys) -> Choice:
    """Choose method, strategy and micro-batch by the forecast.

    Raises:
        RecipeError: nothing fits.
    """
    from cookbook.forecast.verdict import TraceCache

    machines = request.machines
    untouched = _recipe(
        _values(request, data, example_for(request.task, "lora", 0.0), "lora", recompute=True, strategy="single")
    )
    # The number of parameters decides which example applies, so the first recipe serves only for counting.
    untouched = untouched.model_copy(update={"adapter": None})
    billions = TraceCache(request.config, untouched).sizes.num_parameters / 1e9
    shipped = load_known()
    usual = [known for known in shipped if not known.offloads and (known.name == "single") == (machines.num_gpus < 2)]
    methods = [name for name in METHODS if (request.task, name is not None) in EXAMPLES]
    ways = [(usual, *way) for way in product(methods if machines.num_gpus else methods[-2:], (False, True))]
    if machines.num_gpus:
        # Offloading is slow, and needs host memory: last, and the smallest first.
        ways += [([known for known in shipped if known.offloads], name, True) for name in reversed(methods)]
    for strategies, method, recompute in ways:
        example = example_for(request.task, method, billions)
        values = _values(request, data, example, method, recompute=recompute, strategy="single")
        best = _forecast(request, values, strategies)
        if best.verdict == "no forecast":
            raise RecipeError(f"there is no forecast, by which init chooses: {best.why[0]}")
        if _fits(best, machines):
            values = _values(request, data, example, method, recompute=recompute, strategy=best.strategy.name)
            return _settle(request, data, best, values, example, billions)
    have = machines.text if machines.num_gpus else f"{machines.host_gib or 0:.0f} GiB of memory"
    raise RecipeError(
        f"nothing fits {have}: {request.model} has {billions:.2f} B parameters, and data.max_length for these"
        f" rows is {data.values['max_length']}. The last that was tried, {method or 'all weights'} under"
        f" {best.strategy.name}: {'; '.join(best.why) or 'too large'}. Use a smaller model, shorter rows, or"
        " larger or more GPUs (--gpus)"
    )


def _forecast(request: Request, values: Values, strategies: list[Strategy], *, limits: bool = False) -> "Forecast":
    from cookbook.forecast.ranking import forecast_all

    return forecast_all(_recipe(values), strategies, request.machines, str(request.out), limits=limits).forecasts[0]


def _fits(forecast: "Forecast", machines: Machines) -> bool:
    from cookbook.forecast.verdict import UNKNOWN

    if forecast.verdict == "not judged":
        assert forecast.memory is not None
        return forecast.memory.needed[1] <= (machines.host_gib or 0) * GIB
    return forecast.verdict in ("fits", *UNKNOWN)


def example_for(task: Task, method: str | None, billions: float) -> Example:
    """The shipped recipe whose settings serve a model of this size.

    Args:
        method: name of the adapter; None: all weights are trained.
    """
    return next(example for example in EXAMPLES[task, method is not None] if billions <= example.billions)


def _precision(machines: Machines) -> str:
    if machines.num_gpus == 0:
        return "no"
    return "fp16" if machines.gpu is not None and not machines.gpu.has_bf16 else "bf16"


def _values(
    request: Request, data: DataKeys, example: Example, method: str | None, *, recompute: bool, strategy: str
) -> Values:
    """The recipe of an example for this model and these rows, at micro-batch 1."""
    like = read_recipe(example.path).values
    batch, each = like["batch"]["global_batch_size"], max(1, request.machines.num_gpus)
    while batch > MIN_BATCH and data.num_samples < MIN_STEPS * batch:
        batch //= 2
    batch = -(-batch // each) * each
    epochs = like["run"].get("num_epochs", 1)
    num_steps = epochs * -(-data.num_samples // batch)
    often = -(-num_steps // min(PER_RUN, max(1, num_steps // APART)))
    evaluation = {"eval_every_steps": often, "keep_best": 1} if "holdout" in data.values else {}
    objective = like.get("objective", {})
    objective = objective if objective.get("name") == request.task else {"name": request.task}
    objective = objective | ({"train_on": "last"} if data.objective.labels == "last" else {})
    revision = {"revision": request.revision} if request.revision else {}
    return {
        "strategy": strategy,
        "mixed_precision": _precision(request.machines),
        "model": {"name_or_path": request.model, **revision} | ({"gradient_checkpointing": True} if recompute else {}),
        "data": data.values,
        "objective": objective,
        **({"adapter": like.get("adapter", {}) | {"name": method}} if method else {}),
        "batch": {"global_batch_size": batch, "micro_batch_size": 1},
        "optim": like["optim"],
        "schedule": like["schedule"] | {"warmup_steps": example.warmup},
        # Without the strategy's name, as a default has it: another strategy resumes the run where it is.
        "run": {"num_epochs": epochs, "output_dir": default_output_dir(request.out, "").removesuffix("-")}
        | evaluation
        | {"save_every_steps": often, "resume": "auto"},
    }


def _settle(
    request: Request, data: DataKeys, best: "Forecast", values: Values, example: Example, billions: float
) -> Choice:
    """The values with the largest micro-batch that fits, and notes on them."""
    assert best.plan is not None
    strategy, on_gpus = best.strategy, request.machines.num_gpus > 0
    batch, num_ranks, size = values["batch"], best.plan.data_parallel_size, 1
    most = _forecast(request, values, [strategy], limits=True).largest_micro_batch if on_gpus else ROWS_ON_A_CPU
    if not on_gpus:
        num_ranks = max(num_ranks, CPU_PROCESSES)  # which the same recipe then serves
    while 2 * size <= (most or 1) and batch["global_batch_size"] % (2 * size * num_ranks) == 0:
        size *= 2
    batch["micro_batch_size"] = size
    while not _fits(best := _forecast(request, values, [strategy]), request.machines) and batch["micro_batch_size"] > 1:
        batch["micro_batch_size"] //= 2
    assert best.memory is not None
    peak = best.memory.needed if on_gpus else (best.memory.allocated,)  # a CPU has no context of CUDA
    whose = "of each GPU" if on_gpus else "of this machine's memory, the libraries' own not counted,"
    return Choice(
        values=values,
        notes=_notes(request, data, best, values, example, most),
        example=example,
        billions=billions,
        memory=f"{in_gib(*peak)} GiB {whose} at the peak, as forecast by plan, not measured.",
        host_gb=-(-best.host // 10**9) if strategy.offloads else 0,
    )


def _notes(
    request: Request, data: DataKeys, best: "Forecast", values: Values, example: Example, most: int | None
) -> Notes:
    """The reasons of what the forecast chose and what the example has, by key.

    Args:
        most: the largest micro-batch that fits, if it is known.
    """
    like, on_gpus = read_recipe(example.path).values, request.machines.num_gpus > 0
    notes = {
        "strategy": "; ".join(["the first by plan's forecast" if on_gpus else "no GPU", *best.why]),
        "optim": f"{short(str(example.path))} is the example for this, schedule"
        f"{', adapter' if 'adapter' in values else ''} and batch",
        "run.num_epochs": "as in the example" if "num_epochs" in like["run"] else "few; the example counts steps",
        "run.output_dir": "the same under every strategy, so that each resumes what another saved",
        "run.save_every_steps": f"at most {PER_RUN} times a run, at least {APART} steps apart",
        "run.keep_best": "the last checkpoint need not be the best",
    }
    if not on_gpus:
        notes["mixed_precision"] = "float32, as many CPUs have no fast bf16"
    if "gradient_checkpointing" in values["model"]:
        notes["model.gradient_checkpointing"] = "does not fit without"
    if (request.task, False) not in EXAMPLES:
        notes["adapter"] = f"no shipped recipe is an example of {request.task} with all weights"
    elif "adapter" in values:
        without = "all weights do not fit on these GPUs without offloading"
        notes["adapter"] = without if on_gpus else "trains few weights, as there is no GPU"
    if values["batch"]["global_batch_size"] != (example_batch := like["batch"]["global_batch_size"]):
        gpus = f" and {request.machines.num_gpus} GPUs" if request.machines.num_gpus > 1 else ""
        notes["batch.global_batch_size"] = f"for {data.num_samples:,} samples{gpus}; {example_batch} in the example"
    if most and on_gpus:
        notes["batch.micro_batch_size"] = f"up to {most:,} fit"
    return notes


def recipe_text(request: Request, choice: Choice, notes: Notes) -> str:
    """The recipe's file: its label, and the values with a note above each key that has one."""
    method = choice.values.get("adapter", {}).get("name", "all weights")
    size = f"{choice.billions * 1000:,.1f} M parameters"
    settings, example = read_label(choice.example.path)["Settings"], short(str(choice.example.path))
    label = {
        "What": f"{request.task}, {method}, of {request.model} ({size}); written by init.",
        "Run": f"cookbook launch {shlex.quote(str(request.out))}",
        "Needs": f"{_needs(request.machines, choice.host_gb)} {choice.memory}",
        "Measured": "not yet",
        "Settings": f"those of {example}, fitted to this model and these rows. Its label: {settings}",
    }
    schema = os.path.relpath(path_from_here(str(RECIPES / "schema.json")), request.out.parent)
    lines = [f"# yaml-language-server: $schema={schema}"]
    for word, text in label.items():
        lines += [f"# {f'{word}:' if i == 0 else '':11}{line}" for i, line in enumerate(_wrap(text, 107))]
    values, folder, section = deepcopy(choice.values), own_folder(request.out), ""
    for name, key in (("model", "name_or_path"), ("data", "train")):  # local paths, as a recipe there reaches them
        path = Path(values[name][key])
        if path.exists() and not path.is_absolute() and folder != Path.cwd():
            values[name][key] = os.path.relpath(path, folder)
    for line in dump_yaml(values).splitlines():
        if match := re.match(r"(  )?(\w+):", line):
            indent, key = match[1] or "", match[2]
            section = section if indent else key
            if note := notes.get(f"{section}.{key}" if indent else section):
                lines += [f"{indent}# {part}" for part in _wrap(note, 116)]
        lines.append(line)
    return "\n".join(lines) + "\n"


def _needs(machines: Machines, host_gb: int) -> str:
    """Text of a label's `Needs`, in the form that `read_needs` reads."""
    count, gpu = machines.num_gpus, machines.gpu
    if not count:
        return "no GPU."
    size = re.search(r"(\d+)[.\d]*G", machines.text.upper()) if gpu is None else None
    each = gpu.sold_gb if gpu is not None else int(size[1]) if size else 0
    host = f", {host_gb:,} GB of host memory" if host_gb else ""
    return f"{several(count, 'GPU')} of {each} GB{host}."


def _num_lost(tokens: "TokenSet", length: int) -> int:
    """Rows that, cut to `length` tokens, have a sequence without a label, or sequences that are alike."""
    num_lost, size = 0, tokens.group_size
    for sample in range(len(tokens)):
        starts = tokens.offsets[sample * size : (sample + 1) * size]
        if tokens.lengths[sample * size : (sample + 1) * size].max() <= length:
            continue
        ends = [
            min(start + length, end) for start, end in zip(starts, tokens.offsets[sample * size + 1 :], strict=False)
        ]
        cut = {tokens.ids[start:end].tobytes() for start, end in zip(starts, ends, strict=True)}
        is_trained = all(tokens.is_label[start + 1 : end].any() for start, end in zip(starts, ends, strict=True))
        num_lost += not is_trained or len(cut) < min(size, 2)
    return num_lost


def _wrap(text: str, width: int) -> list[str]:
    # YAML ends a comment at more than \n: a chat template's own message, quoted in a note, must not become keys.
    return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)
