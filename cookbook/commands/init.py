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
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

from typer import Argument, Option

from cookbook.commands.check.recipe_checks import check
from cookbook.commands.shared.labels import read_label
from cookbook.config.chat_templates import template_path
from cookbook.config.objectives import Objective
from cookbook.config.recipe import RECIPES, Recipe, default_output_dir, parse_recipe, prepare
from cookbook.config.sections import Source
from cookbook.config.strategy import Strategy, load_known
from cookbook.rows.row_checks import Row
from cookbook.rows.row_columns import kinds_of, rename, suggested_columns
from cookbook.rows.row_kinds import kinds
from cookbook.system import registry
from cookbook.system.console import say, several
from cookbook.system.files import Document, RecipeError, cannot_write, dump_yaml, gathered, read_document, refuse
from cookbook.system.hardware import GIB, Machines, in_gib, parse_machines, this_machine
from cookbook.system.imports import quiet_deepspeed
from cookbook.system.machine import CPU_PROCESSES
from cookbook.system.record_files import new_file
from cookbook.system.shipped import located, own_folder, short
from cookbook.training.data.rows import BadRows, Rows, read_rows
from cookbook.training.data.sources import raw_rows, unread_note

if TYPE_CHECKING:
    from cookbook.forecast.verdict import Forecast
    from cookbook.training.data.tokens import TokenSet

Task = Literal["sft", "cpt", "dpo", "orpo", "kto_zero"]
Values = dict[str, Any]


class Example(NamedTuple):
    """A shipped recipe whose settings serve models of up to `billions` parameters."""

    billions: float
    recipe: str
    warmup: float
    """Share of the run."""

    @property
    def path(self) -> Path:
        return Path(located(str(RECIPES / f"{self.recipe}.yaml")))


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
"""By task, and whether there is an adapter. Preferences have no example that trains all weights."""
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
PER_RUN = 10
"""At most so many evaluations, and checkpoints."""


def init(
    model: Annotated[str, Argument(metavar="MODEL", help="a folder, or a name on the Hub")],
    data: Annotated[str, Argument(metavar="DATA", help="a file or folder of rows, or a name on the Hub")],
    *,
    gpus: Annotated[str | None, Option(metavar="8xH100", help="or 1x24GB, 2x8x80GB, cpu; default: here")] = None,
    task: Annotated[Task | None, Option(help="default: what the rows are for")] = None,
    out: Annotated[Path, Option(metavar="RECIPE", help="a new file")] = RECIPES / "mine.yaml",
) -> int:
    """Write a recipe for your model, rows and GPUs."""
    machines = _check_arguments(model, data, gpus, out)
    quiet_deepspeed()
    from cookbook.commands.preview.sample_page import TOKENIZER_FILES
    from cookbook.training.models.language_model import load_config
    from cookbook.training.models.model_source import fetch_model

    mistakes: list[str] = []
    with gathered(mistakes):
        folder = fetch_model(model, None, TOKENIZER_FILES)
        config = load_config(folder, 1)
    with gathered(mistakes):
        found = _read(data, task)
    refuse(mistakes)
    draft = _Draft(model, *found, config, machines, out)
    draft.read_lengths(folder)
    draft.choose()
    text = draft.text()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        new_file(out, text)
    except OSError as error:
        raise RecipeError(cannot_write(out, error, "name another file with --out")) from None
    say(text)
    check([out], assignments=[])
    recipe = shlex.quote(str(out))
    say(f"cookbook preview {recipe}")
    say(f"cookbook launch {recipe}")
    return 0


def _check_arguments(model: str, data: str, gpus: str | None, out: Path) -> Machines:
    mistakes: list[str] = []
    if out.exists():
        mistakes.append(f"--out is {out}, which exists and is not overwritten; name a new file")
    elif out.suffix != ".yaml":
        mistakes.append(f"--out is {out}; a recipe ends in .yaml")
    machines = Machines(text="cpu")
    with gathered(mistakes):
        machines = this_machine() if gpus is None else parse_machines(gpus)
        if gpus is not None and not machines.num_gpus:
            machines = replace(machines, host_gib=this_machine().host_gib)
    values = {"strategy": "single", "model": {"name_or_path": model}, "data": {"train": data}}
    values |= {"batch": {"global_batch_size": 1, "micro_batch_size": 1}, "optim": {"learning_rate": 1.0}}
    with gathered(mistakes):
        _recipe(values | {"run": {"num_epochs": 1}})
    refuse(mistakes)
    return machines


def _recipe(values: Values) -> Recipe:
    return parse_recipe(prepare(Document("init", deepcopy(values), file=RECIPES / "mine.yaml")))


def _read(data: str, task: Task | None) -> tuple[Task, Source, Rows]:
    """The task, the source with a guess at its columns where it needs one, and its good rows.

    Raises:
        RecipeError: no row that can be understood, or rows that the task does not train on.
    """
    source = Source(path=data)
    seen = [raw for _, raw in islice(raw_rows(source), ROWS_SEEN) if isinstance(raw, dict)]
    guess = suggested_columns(seen[0], Objective.of(name=task or "sft").rows) if seen else {}
    found = next(filter(None, map(kinds_of, seen)), set()) or (kinds_of(rename(seen[0], guess)) if seen else set())
    fitting = [name for name in TASKS if found.intersection(Objective.of(name=name).rows)]
    usual: Task = "cpt" if found == {"text"} else fitting[0] if fitting else "sft"
    chosen = task or usual
    objective = Objective.of(name=chosen)
    if found and not found.intersection(objective.rows):
        has, wants = (
            " or ".join(dict.fromkeys(kinds()[name].words for name in names))
            for names in (sorted(found), objective.rows)
        )
        others = _other_objectives(seen[0])
        by_hand = f"write a recipe with objective.name {others}, see docs/recipes.md" if others else "use other rows"
        advice = f"use --task {' or '.join(fitting)}" if fitting else by_hand
        raise RecipeError(f"--task is {chosen}, which trains on {wants}, but {data} has {has}; {advice}")
    try:
        rows = read_rows(source, "drop", objective)
    except RecipeError:
        if not guess:
            raise
        guessed: list[str] = []
        with gathered(guessed):  # the first error explains more
            source = source.model_copy(update={"columns": guess})
            rows = read_rows(source, "drop", objective)
        if guessed:
            raise
    if sum(rows.num_dropped.values()) > len(rows.rows):
        read_rows(source, "error", objective)  # raises: these are not a few rows to be left out
    return chosen, source, rows


def _other_objectives(raw: Row, keys: Sequence[str] = ()) -> str:
    """The objectives, none of them a task, that train on more of a row than these keys; empty if there is none."""
    of_tasks = {kind for name in get_args(Task) for kind in Objective.of(name=name).rows}
    wider = {name for name, kind in kinds().items() if name not in of_tasks and {*kind.keys} > {*keys}}
    others = {name: wider.intersection(one.rows) for name, one in registry.known("objective").items()}
    return " or ".join(name for name, rows in others.items() if rows & kinds_of(raw, sorted(rows)))


class _Draft:
    """The values of the recipe so far, and a note on each choice by its key."""

    def __init__(
        self, model: str, task: Task, source: Source, rows: Rows, config: Any, machines: Machines, out: Path
    ) -> None:
        self.model, self.task, self.rows, self.config, self.machines = model, task, rows, config, machines
        self.out, self.objective = out, Objective.of(name=task)
        self.data: Values = {"train": source.path}
        kind, first = kinds()[rows.kind], next(raw for _, raw in raw_rows(source) if isinstance(raw, dict))
        others = _other_objectives(rename(first, source.columns or {}), kind.keys)
        more = f"; objective.name {others} would train on more of them, see docs/recipes.md" if others else ""
        self.notes = {"objective": f"trains on the rows' {kind.keys_in_words}{more}"}
        self.model_keys: Values = {"name_or_path": model}
        self.billions = 0.0  # until `choose` has counted the parameters
        if about := "; ".join(filter(None, [rows.renamed, unread_note(source)])):
            self.notes["data.train"] = about
        if source.columns:
            self.data["columns"] = source.columns
            left = [ascii(column) for column in first if column not in source.columns.values()]
            unread = f"; not read: {', '.join(left[:8])}{' and more' * (len(left) > 8)}" if left else ""
            self.notes["data.columns"] = f"a guess by the first row's names and types: look at it{unread}"
        if machines.num_gpus == 0:
            self.precision = "no"
            self.notes["mixed_precision"] = "float32, as many CPUs have no fast bf16"
        else:
            self.precision = "fp16" if machines.gpu is not None and not machines.gpu.has_bf16 else "bf16"

    def read_lengths(self, folder: str) -> None:
        """Writes the keys of `data` that depend on the tokens of the rows, and the commit of a model of the Hub."""
        import numpy as np

        from cookbook.training.data.sets import SHARE_TO_KEEP
        from cookbook.training.models.model_source import revision_of

        if revision := revision_of(folder):
            self.model_keys["revision"] = revision
        tokens, num_bad = self._tokenize(folder)
        assert tokens.row_lengths is not None
        lengths = np.asarray(tokens.row_lengths)
        enough = int(np.quantile(lengths, SHARE_TO_KEEP, method="higher"))
        limits = [-(-enough // 64) * 64, getattr(self.config, "max_position_embeddings", None) or UNCUT]
        limits += [SPLIT_LENGTH] if self.objective.splits_rows else []
        length = min(limits)
        if self.objective.splits_rows and lengths.max() > length:
            note = f"{np.mean(lengths > length):.1%} of the rows are longer, and are split"
        else:
            share = np.mean(lengths <= length)
            note = "no row is longer" if share == 1 else f"{share:.1%} of the rows are not longer"
        note += f"; the longest has {lengths.max():,} tokens"
        if length < limits[0]:
            limit = "the model's positions" if length == limits[1] else f"{SPLIT_LENGTH:,}"
            note += f"; limited to {limit}"
        if not self.objective.splits_rows and (num_lost := _num_lost(tokens, length)):
            self.data["too_long"] = "drop"
            self.notes["data.too_long"] = f"cut, {several(num_lost, 'row')} would have nothing to train on"
        num_samples = int(np.ceil(lengths / length).sum()) if self.objective.splits_rows else len(lengths)
        num_samples -= int(np.sum(lengths > length)) if "too_long" in self.data else 0
        self.num_samples = int(num_samples * (1 - self._hold_out(len(lengths))))
        self.data["max_length"], self.notes["data.max_length"] = length, note
        if num_bad:
            self.data["on_bad_row"] = "drop"
            self.notes["data.on_bad_row"] = ", ".join(
                f"{count:,} row{'s' if count > 1 else ''}: {reason}" for reason, count in num_bad.items()
            )

    def _hold_out(self, num_rows: int) -> float:
        """Writes the share to be held out, unless rows that are equal leave too few or too many. Returns it, or 0."""
        from cookbook.training.data.sets import hold_out

        if num_rows < MIN_ROWS_TO_HOLD_OUT:
            return 0.0
        share = float(f"{min(HOLDOUT, MAX_HELD_OUT / num_rows):.1g}")
        held_out: list[Rows] = []
        with gathered([]):
            _, held_out = hold_out([self.rows], share)
        taken = sum(len(one.rows) for one in held_out) / len(self.rows.rows)
        if not 0 < taken < 2 * share:
            what = f"of these rows, of which equal ones stay together, {share:.0%} cannot be taken"
            self.notes["data"] = "; ".join(filter(None, [self.notes.get("data"), f"no held-out rows: {what}"]))
            return 0.0
        self.data["holdout"], self.notes["data.holdout"] = share, f"some {num_rows * share:.0f} rows, for evaluation"
        return share

    def _tokenize(self, folder: str) -> tuple["TokenSet", dict[str, int]]:
        """The tokens under the first chat template that can be trained with, and the number of bad rows by reason."""
        from cookbook.training.data.tokens import tokenize
        from cookbook.training.data.twin import twin_of
        from cookbook.training.models.tokenizer_files import load_tokenizer

        is_chat, problem = kinds()[self.rows.kind].chats is not None, ""
        twin = twin_of(load_tokenizer(folder, None)) if is_chat else None
        tries: list[tuple[str | None, Objective]] = [(None, self.objective)]
        if twin is not None:
            tries.append((twin, self.objective))
            if self.task == "sft":  # a model that reasons may have the reasoning of its last turn alone
                tries.append((twin, Objective.of(name="sft", train_on="last")))
        tries += [(name, self.objective) for name in TEMPLATES if is_chat and name != twin]
        for template, objective in tries:
            bad_rows = BadRows()
            try:
                tokens = tokenize(
                    [self.rows],
                    load_tokenizer(folder, template and template_path(template)),
                    max_length=UNCUT,
                    objective=objective,
                    bad_rows=bad_rows,
                )
            except RecipeError as error:
                problem = problem or error.mistakes[0]
                continue
            if tokens is None or bad_rows.num_by_reason.total() > bad_rows.num_good:
                problem = problem or "; ".join(bad_rows.mistakes())
                continue
            if template is not None:
                self.data["chat_template"] = template
                what = "renders as the tokenizer's own" if template == twin else "of those here the first that serves"
                self.notes["data.chat_template"] = f"{what}; {problem}"
                if objective != self.objective:
                    self.objective = objective
                    self.notes["objective"] += ", their last turn, since the template leaves out a part of earlier ones"
            elif is_chat:
                self.notes["data"] = "chats go through the tokenizer's own template"
            elif self.task != "cpt" and load_tokenizer(folder, None).chat_template:
                what = "prompt and answer are joined as they are written, without the tokenizer's chat template"
                self.notes["data"] = f"{what}, which is for messages"
            return tokens, self.rows.num_dropped | dict(bad_rows.num_by_reason)
        raise RecipeError(problem)

    def choose(self) -> None:
        """Chooses method, strategy and micro-batch by the forecast.

        Raises:
            RecipeError: nothing fits.
        """
        from cookbook.forecast.verdict import TraceCache

        machines = self.machines
        whole = _recipe(self._values("lora", True, "single")).model_copy(update={"adapter": None})
        self.billions = TraceCache(self.config, whole).sizes.num_parameters / 1e9
        shipped = load_known()
        usual = [one for one in shipped if not one.offloads and (one.name == "single") == (machines.num_gpus < 2)]
        methods = [name for name in METHODS if (self.task, name is not None) in EXAMPLES]
        ways = [(usual, one) for one in product(methods if machines.num_gpus else methods[-2:], (False, True))]
        if machines.num_gpus:
            # Offloading is slow, and needs host memory: last, and the smallest first.
            ways += [([one for one in shipped if one.offloads], (name, True)) for name in reversed(methods)]
        for strategies, (method, recompute) in ways:
            best = self._forecast(self._values(method, recompute, "single"), strategies)
            if best.verdict == "no forecast":
                raise RecipeError(f"there is no forecast, by which init chooses: {best.why[0]}")
            if self._fits(best):
                return self._settle(best, method, recompute)
        have = machines.text if machines.num_gpus else f"{machines.host_gib or 0:.0f} GiB of memory"
        raise RecipeError(
            f"nothing fits {have}: {self.model} has {self.billions:.2f} B parameters, and data.max_length for these"
            f" rows is {self.data['max_length']}. The last that was tried, {method or 'all weights'} under"
            f" {best.strategy.name}: {'; '.join(best.why) or 'too large'}. Use a smaller model, shorter rows, or"
            " larger or more GPUs (--gpus)"
        )

    def _forecast(self, values: Values, strategies: list[Strategy], *, limits: bool = False) -> "Forecast":
        from cookbook.forecast.ranking import forecast_all

        return forecast_all(_recipe(values), strategies, self.machines, str(self.out), limits=limits).forecasts[0]

    def _fits(self, found: "Forecast") -> bool:
        from cookbook.forecast.verdict import UNKNOWN

        if found.verdict == "not judged":
            assert found.memory is not None
            return found.memory.needed[1] <= (self.machines.host_gib or 0) * GIB
        return found.verdict in ("fits", *UNKNOWN)

    def _example(self, method: str | None) -> tuple[Example, Values]:
        """The example for a method, and the values in its file."""
        found = next(one for one in EXAMPLES[self.task, method is not None] if self.billions <= one.billions)
        return found, read_document(found.path).values

    def _values(self, method: str | None, recompute: bool, strategy: str) -> Values:
        """A recipe at micro-batch 1."""
        example, like = self._example(method)
        batch, each = like["batch"]["global_batch_size"], max(1, self.machines.num_gpus)
        while batch > MIN_BATCH and self.num_samples < MIN_STEPS * batch:
            batch //= 2
        batch = -(-batch // each) * each
        epochs = like["run"].get("num_epochs", 1)
        num_steps = epochs * -(-self.num_samples // batch)
        often = -(-num_steps // PER_RUN)
        evaluation = {"eval_every_steps": often, "keep_best": 1} if "holdout" in self.data else {}
        objective, adapter = like.get("objective", {}), {}
        objective = objective if objective.get("name") == self.task else {"name": self.task}
        objective = objective | ({"train_on": "last"} if self.objective.labels == "last" else {})
        if method:
            adapter = like.get("adapter", {}) | {"name": method}
        return {
            "strategy": strategy,
            "mixed_precision": self.precision,
            "model": self.model_keys | ({"gradient_checkpointing": True} if recompute else {}),
            "data": self.data,
            "objective": objective,
            **({"adapter": adapter} if adapter else {}),
            "batch": {"global_batch_size": batch, "micro_batch_size": 1},
            "optim": like["optim"],
            "schedule": like["schedule"] | {"warmup_steps": example.warmup},
            # Without the strategy's name, as a default has it: another strategy resumes the run where it is.
            "run": {"num_epochs": epochs, "output_dir": default_output_dir(self.out, "").removesuffix("-")}
            | evaluation
            | {"save_every_steps": often, "resume": "auto"},
        }

    def _settle(self, found: "Forecast", method: str | None, recompute: bool) -> None:
        """Writes the values of what was chosen, with the largest micro-batch that fits, and the notes on them."""
        assert found.plan is not None
        strategy, notes, on_gpus = found.strategy, self.notes, self.machines.num_gpus > 0
        self.example, like = self._example(method)
        self.values = self._values(method, recompute, strategy.name)
        batch, num_ranks, size = self.values["batch"], found.plan.data_parallel_size, 1
        most = self._forecast(self.values, [strategy], limits=True).largest_micro_batch if on_gpus else ROWS_ON_A_CPU
        if not on_gpus:
            num_ranks = max(num_ranks, CPU_PROCESSES)  # which the same recipe then serves
        while 2 * size <= (most or 1) and batch["global_batch_size"] % (2 * size * num_ranks) == 0:
            size *= 2
        batch["micro_batch_size"] = size
        while not self._fits(found := self._forecast(self.values, [strategy])) and batch["micro_batch_size"] > 1:
            batch["micro_batch_size"] //= 2
        assert found.memory is not None
        peak = found.memory.needed if on_gpus else (found.memory.allocated,)  # a CPU has no context of CUDA
        whose = "of each GPU" if on_gpus else "of this machine's memory, the libraries' own not counted,"
        self.memory = f"{in_gib(*peak)} GiB {whose} at the peak, as forecast by plan, not measured."
        self.host_gb = -(-found.host // 10**9) if strategy.offloads else 0
        notes["strategy"] = "; ".join(["the first by plan's forecast" if on_gpus else "no GPU", *found.why])
        if recompute:
            notes["model.gradient_checkpointing"] = "does not fit without"
        if (self.task, False) not in EXAMPLES:
            notes["adapter"] = f"no shipped recipe is an example of {self.task} with all weights"
        elif method is not None:
            without = "all weights do not fit on these GPUs without offloading"
            notes["adapter"] = without if on_gpus else "the smallest, as there is no GPU"
        if batch["global_batch_size"] != (theirs := like["batch"]["global_batch_size"]):
            gpus = f" and {self.machines.num_gpus} GPUs" if self.machines.num_gpus > 1 else ""
            notes["batch.global_batch_size"] = f"for {self.num_samples:,} samples{gpus}; {theirs} in the example"
        if most and on_gpus:
            notes["batch.micro_batch_size"] = f"up to {most:,} fit"
        example = short(str(self.example.path))
        notes["optim"] = f"{example} is the example for this, schedule{', adapter' if method else ''} and batch"
        notes["run.num_epochs"] = (
            "as in the example" if "num_epochs" in like["run"] else "few; the example counts steps"
        )
        notes["run.output_dir"] = "the same under every strategy, so that each resumes what another saved"
        notes["run.save_every_steps"] = f"at most {PER_RUN} times a run"
        notes["run.keep_best"] = "the last checkpoint need not be the best"

    def text(self) -> str:
        """The recipe's file."""
        method = self.values.get("adapter", {}).get("name", "all weights")
        what = f"{self.task}, {method}, of {self.model} ({self.billions * 1000:,.1f} M parameters); written by init."
        out = shlex.quote(str(self.out))
        settings, example = read_label(self.example.path)["Settings"], short(str(self.example.path))
        label = {
            "What": what,
            "Run": f"cookbook launch {out}",
            "Needs": f"{self._needs()} {self.memory}",
            "Measured": "not yet",
            "Settings": f"those of {example}, fitted to this model and these rows. Its label: {settings}",
        }
        schema = os.path.relpath(located(str(RECIPES / "schema.json")), self.out.parent)
        lines = [f"# yaml-language-server: $schema={schema}"]
        for word, said in label.items():
            lines += [f"# {f'{word}:' if i == 0 else '':11}{line}" for i, line in enumerate(_wrap(said, 107))]
        values, folder, section = deepcopy(self.values), own_folder(self.out), ""
        for name, key in (("model", "name_or_path"), ("data", "train")):  # local paths, as a recipe there reaches them
            path = Path(values[name][key])
            if path.exists() and not path.is_absolute() and folder != Path.cwd():
                values[name][key] = os.path.relpath(path, folder)
        for line in dump_yaml(values).splitlines():
            if found := re.match(r"(  )?(\w+):", line):
                section = section if found[1] else found[2]
                place = f"{section}.{found[2]}" if found[1] else section
                if note := self.notes.get(place):
                    lines += [f"{found[1] or ''}# {part}" for part in _wrap(note, 116)]
            lines.append(line)
        return "\n".join(lines) + "\n"

    def _needs(self) -> str:
        """In the form that `read_needs` reads."""
        count, gpu = self.machines.num_gpus, self.machines.gpu
        if not count:
            return "no GPU."
        size = re.search(r"(\d+)[.\d]*G", self.machines.text.upper()) if gpu is None else None
        each = gpu.sold_gb if gpu is not None else int(size[1]) if size else 0
        host = f", {self.host_gb:,} GB of host memory" if self.host_gb else ""
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
