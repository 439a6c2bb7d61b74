"""`cookbook sweep`: trains a recipe once for each value of a key, one run after another or as an array of jobs, and
names the best.
"""

import hashlib
import itertools
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import yaml
from typer import Argument, Option

from cookbook.commands.launch import prepare
from cookbook.commands.report import pages
from cookbook.commands.report.summary import best_run, measure, why_no_best
from cookbook.commands.shared.answer_forms import RunSummary
from cookbook.commands.shared.arguments import RECIPE, Assignments, StrategyFile, process_count
from cookbook.commands.shared.history import History, read_history, state_of
from cookbook.commands.shared.named_file import write_named_file
from cookbook.commands.submit import slurm_array
from cookbook.config.recipe import Recipe, load_recipe
from cookbook.start import hosts
from cookbook.start.own_folder import paths_changed_since
from cookbook.start.run_plan import load_pair, read_pair
from cookbook.system import lock, signals
from cookbook.system.child import was_signalled
from cookbook.system.console import page, say, several
from cookbook.system.files import RecipeError, gather_mistakes, refuse
from cookbook.system.masking import mask_secrets
from cookbook.training.checkpoint.resume import changed_settings, changes

VALUES = "section.key=VALUE,VALUE"
OF_A_SWEEP = ("run.output_dir", "run.resume")
"""Keys that a sweep gives each of its runs."""
SUFFIX = "-sweep"
LONGEST = 60
"""Letters of a value in a folder's name."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a sweep."""

    folder: Path
    values: list[str]
    """Assignments of the swept keys."""
    settings: list[str]
    """All assignments of the run."""
    path: Path
    strategy: Path | None

    @cached_property
    def recipe(self) -> Recipe:
        return load_pair(self.path, self.settings, self.strategy)[0]

    @property
    def record(self) -> Path:
        """The file with its settings, which it writes when it starts."""
        return self.folder / "recipe.yaml"

    @property
    def is_over(self) -> bool:
        """True if it has finished with the settings that it has now."""
        is_finished = state_of(self.folder).name == "finished" and self.record.is_file()
        if self.recipe.run.resume != "auto" or not is_finished:
            return False
        finished = load_recipe(self.record).model_dump(mode="json", exclude_none=True)
        return changes({"recipe": finished, "made_from": {}}, self.recipe, None) == ([], [])


def sweep(
    path: Annotated[Path, RECIPE],
    values: Annotated[str, Argument(metavar=VALUES, help="a list as a value is in brackets: [a,b],[a,c]")],
    *,
    others: Annotated[
        list[str] | None,
        Option("--and", metavar=VALUES, help="another key, each value with each; may be repeated"),
    ] = None,
    strategy: StrategyFile = None,
    processes: Annotated[int | None, process_count("one per GPU, or two without a GPU")] = None,
    assignments: Assignments,
    dry_run: Annotated[bool, Option("--dry-run", help="as launch --dry-run, of each run")] = False,
    to: Annotated[
        Literal["slurm"] | None, Option(metavar="slurm", help="print a file with a job for each run that is left")
    ] = None,
    gpus: Annotated[str | None, Option(metavar="2x8xH100", help="machines x GPUs x GPU of each job, with --to")] = None,
) -> int:
    """Train a recipe once for each value of a key; name the best."""
    flags = {"--processes": processes is not None, "--dry-run": dry_run} if to else {"--gpus": gpus is not None}
    without = "with --to slurm" if to else "without --to slurm"
    mistakes = [f"{flag}: would be ignored {without}; leave it out" for flag, is_given in flags.items() if is_given]
    mistakes += ["--gpus is missing: --to slurm needs it"] if to and gpus is None else []
    refuse(mistakes)
    swept = _swept([values, *(others or [])], assignments, strategy)
    runs = _runs(path, swept, assignments, strategy, is_local=to is None)
    refuse(_twice(runs))
    if gpus is not None:
        return _print_array(path, runs, gpus, strategy)
    starts = _check(runs, processes, dry_run)
    if not dry_run:
        lock.hold(runs[0].folder.parent)  # two commands would each train the same values
    codes = []
    for number, run in enumerate(runs, start=1):
        if run.folder not in starts:
            say(f"RUN {number} of {len(runs)}: {run.folder} is finished", flush=True)
            for text in paths_changed_since(run.recipe, run.record):
                again = "--set run.resume=never trains all runs again"
                say(f"note: {text} was written since then; this run is of what it was ({again})", flush=True)
            continue
        say(f"RUN {number} of {len(runs)}: {', '.join(run.values)}", flush=True)
        codes.append(starts[run.folder]())
        if codes[-1] == signals.EXIT_CODE or was_signalled():
            say(f"stopped in run {number} of {len(runs)}; the same command goes on from there")
            return signals.EXIT_CODE
    if not dry_run:
        _compare(path, runs)
    return next(filter(None, codes), 0)


def _print_array(path: Path, runs: Sequence[Run], gpus: str, strategy: Path | None) -> int:
    """Print the jobs of the runs that have not finished."""
    mistakes: list[str] = []
    left: list[Run] = []
    for run in runs:
        with gather_mistakes(mistakes):
            left += [] if run.is_over else [run]
    refuse([*dict.fromkeys(mistakes), *_changed_settings([run for run in left if changed_settings(run.recipe)])])
    if left:
        print(slurm_array(path, [run.settings for run in left], gpus, strategy, left[0].folder.parent.name), end="")
    else:
        say("all runs are finished; the same command without --to and --gpus names the best", file=sys.stderr)
    return 0


def _swept(words: Sequence[str], assignments: Sequence[str], strategy: Path | None) -> dict[str, list[str]]:
    """The values of each key, as they are written.

    Raises:
        RecipeError: all mistakes.
    """
    mistakes: list[str] = []
    swept: dict[str, list[str]] = {}
    given = {assignment.partition("=")[0].strip() for assignment in assignments}
    for word in words:
        key, equals, text = (part.strip() for part in word.partition("="))
        if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
            mistakes.append(f"{word}: write it as {VALUES}")
            continue
        within = [name for name in swept if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.")]
        if within:
            mistakes.append(f"{word}: {within[0]} has values already; write all values of a key at one place")
        if key in OF_A_SWEEP:
            mistakes.append(f"{word}: a sweep gives each run its own {key}; write another key")
        if strategy is not None and key == "strategy":
            mistakes.append(f"{word}: would be ignored with --strategy; take one of them out")
        mistakes += [
            f"--set {name}: would be ignored, as {key} is swept; take it out"
            for name in sorted(given)
            if f"{name}.".startswith(f"{key}.")
        ]
        with gather_mistakes(mistakes):
            swept[key] = _split(key, text)
    refuse(mistakes)
    return swept


def _split(key: str, text: str) -> list[str]:
    """The values in a text, which commas outside brackets and quotes separate, as in a list of YAML."""
    listed = f"[{text}]"
    try:
        node = yaml.compose(listed)
        values = yaml.safe_load(listed)
    except (yaml.YAMLError, ValueError) as error:
        problem = getattr(error, "problem", None) or error
        raise RecipeError(f"{key}={text}: not valid YAML: {problem}; write {VALUES}, a list in brackets") from None
    if not isinstance(node, yaml.SequenceNode) or node.end_mark.index != len(listed):
        raise RecipeError(f"{key}={text}: its brackets do not match; write {VALUES}, a list in brackets")
    parts = [listed[child.start_mark.index : child.end_mark.index].strip() for child in node.value]
    if len(parts) != len(set(map(repr, values))):
        raise RecipeError(f"{key}={text}: a value is given twice; keep one of them")
    if len(parts) < 2:
        how = f"write {key}=VALUE,VALUE (a list in brackets is one value), or give the one with --set"
        raise RecipeError(f"{key}={text}: has {several(len(parts), 'value')}; {how}")
    return parts


def _runs(
    path: Path, swept: dict[str, list[str]], assignments: list[str], strategy: Path | None, *, is_local: bool
) -> list[Run]:
    """A run for each value, or each of one key with each of the others.

    Args:
        is_local: whether this machine trains them.
    """
    combinations = [
        [f"{key}={text}" for key, text in zip(swept, texts, strict=True)]
        for texts in itertools.product(*swept.values())
    ]
    pair = read_pair(path, [*assignments, *combinations[0]], strategy)
    section = pair.valid.get("run")
    mistakes: list[str] = []
    if is_local:
        run_hosts, mistakes = hosts.read_hosts(None, None, None, None)
        machines = max(run_hosts.count, pair.strategy.num_machines if pair.strategy is not None else 1)
        if machines > 1:
            what = f"{path}: a sweep runs on one machine, and this is one of {machines}"
            mistakes.append(f"{what}; write --to slurm --gpus MACHINESxGPUSxGPU, or cookbook launch")
    if section is not None and section.resume not in ("never", "auto"):
        what = f"{path}: run.resume is {section.resume!r}, from which one run can go on"
        mistakes.append(f"{what}; write --set run.resume=auto")
    refuse(mistakes)
    # Beside the folder of the recipe's own run, which a new start of that renames.
    parent = Path(f"{section.output_dir if section else pair.default_folder}{SUFFIX}")
    runs = []
    for values in combinations:
        folder = parent / ",".join(map(_in_name, values))
        others = [word for word in assignments if word.partition("=")[0].strip() != "run.output_dir"]
        settings = ["run.resume=auto", *others, *values, f"run.output_dir={folder}"]
        runs.append(Run(folder=folder, values=values, settings=settings, path=path, strategy=strategy))
    return runs


def _in_name(assignment: str) -> str:
    """An assignment as a part of a folder's name; one with other letters gets a digest, so that no two are the same."""
    key, _, text = assignment.partition("=")
    plain = re.sub(r"[^\w.+-]+", "_", text, flags=re.ASCII).strip("_")[:LONGEST]
    digest = "" if plain == text else f"-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return f"{key}={plain}{digest}"


def _twice(runs: Sequence[Run]) -> list[str]:
    """Mistakes of values that are written in two ways, as 1e-3 and 0.001, or are a key's default and left out."""
    first: dict[str, Run] = {}
    mistakes: list[str] = []
    for run in runs:
        with suppress(RecipeError):  # reported with the other mistakes
            settings = run.recipe.model_dump_json(exclude={"run": {"output_dir"}})
            same = first.setdefault(settings, run)
            if same is not run:
                pair = (", ".join(values) for values in (same.values, run.values))
                mistakes.append(f"{' and '.join(pair)} are the same settings; keep one of them")
    return mistakes


def _check(runs: Sequence[Run], processes: int | None, dry_run: bool) -> dict[Path, Callable[[], int]]:
    """Check all runs. Returns what starts each that is not over, by its folder.

    Raises:
        RecipeError: all mistakes of all runs.
    """
    mistakes: list[str] = []
    changed: list[Run] = []
    starts: dict[Path, Callable[[], int]] = {}
    for run in runs:
        with gather_mistakes(mistakes):
            if run.is_over and not dry_run:
                continue
            settings = run.settings
            if changed_settings(run.recipe):
                changed.append(run)
                settings = [*settings, "run.resume=never"]  # for the mistakes beside these
            starts[run.folder] = prepare(
                run.path, strategy=run.strategy, processes=processes, assignments=settings, dry_run=dry_run
            )
    mistakes += _changed_settings(changed)
    for key in {assignment.partition("=")[0]: None for run in runs for assignment in run.values}:
        mistakes = [re.sub(rf"^--set {re.escape(key)}\b", key, mistake) for mistake in mistakes]
        if any(mistake.startswith(f"{key} ") and mistake.endswith("must be a list") for mistake in mistakes):
            mistakes.append(f"{key}: commas are between values; write each list in brackets: {key}=[a,b],[a,c]")
    refuse(list(dict.fromkeys(mistakes)))
    return starts


def _changed_settings(runs: Sequence[Run]) -> list[str]:
    """The mistake of settings with which runs that have begun cannot go on, by the first of them."""
    if not runs:
        return []
    base = str(runs[0].folder.parent).removesuffix(SUFFIX)
    free = next(f"{base}-{number}" for number in itertools.count(2) if not Path(f"{base}-{number}{SUFFIX}").exists())
    beside = f"  --set {shlex.quote(f'run.output_dir={free}')} for a new sweep beside this one"
    lines = [beside if "run.output_dir=" in line else line for line in changed_settings(runs[0].recipe)]
    more = f"{several(len(runs) - 1, 'more run')} of this sweep cannot go on either"
    return lines + [more] * (len(runs) > 1)


def _compare(path: Path, runs: Sequence[Run]) -> None:
    """Show the loss of each run and the best, and lay their curves over one another in a page."""
    histories: list[History] = []
    summaries: list[RunSummary] = []
    rows = []
    for run in runs:
        state, values = state_of(run.folder), ", ".join(run.values)
        try:
            history = read_history(run.folder)
        except RecipeError:
            rows.append((values, state.words, "no step"))
            continue
        summary = measure(history)
        histories.append(history)
        if state.name == "finished":
            summaries.append(summary)
        held = [f"{of_set.last_loss:.4f} held out{of_set.set and f' of {of_set.set}'}" for of_set in summary.held_out]
        by = summary.best_by
        if held and by is not None and (value := summary.held_out[0].metrics.get(by.metric)) is not None:
            held[0] += f", {by.metric} {value:.4f}"  # of a metric that counted nothing there is no number
        rows.append((values, state.words, held[0] if held else f"{summary.last_loss:.4f} in training"))
    parent = runs[0].folder.parent
    say(page(f"SWEEP of {path}, in {parent}", ("values", "state", "loss"), *rows))
    best = best_run(summaries) if summaries else None
    if best is not None:
        say(best.words())
    elif summaries and (why := why_no_best(summaries)) is not None:
        say(why)
    elif summaries:
        least = min(summaries, key=lambda summary: summary.last_loss)
        say(f"least training loss, as no held-out set is shared: {least.last_loss:.4f}, at the end of {least.run}")
    else:
        say("no run has finished; none is the best")
    if len(histories) > 1:
        compared = parent / "compare.html"
        write_named_file(compared, mask_secrets(pages.compare_page(histories, None)), pages.BEGINNING)
        say(compared)
