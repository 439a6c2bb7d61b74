"""Rounds, one after the other: each samples, scores, and trains in a run of its own. Interrupted ones resume."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from cookbook.commands.launch import launch
from cookbook.commands.rounds import elsewhere, prompt_rows, rounds_folder, sampled_ahead, sampler_divergence, scoring
from cookbook.commands.rounds.prompt_rows import Prompt
from cookbook.commands.rounds.round_samples import Sampling, write_samples
from cookbook.commands.rounds.rounds_folder import Round
from cookbook.commands.shared.arguments import RECIPE, Assignments, StrategyFile, process_count
from cookbook.commands.shared.find_model import CACHE, quiet_without_gpus
from cookbook.commands.shared.mistakes import place_mistakes
from cookbook.config import plugins
from cookbook.config.outside_words import TRANSFORMERS
from cookbook.config.recipe import Recipe, dump_recipe
from cookbook.config.reward_functions import is_model
from cookbook.config.sections import RoundsSection
from cookbook.start import run_plan
from cookbook.start.in_rounds import kind_of_samples
from cookbook.start.own_folder import reads_own_folder
from cookbook.system import lock, versions
from cookbook.system.child import was_signalled
from cookbook.system.console import say
from cookbook.system.files import RecipeError, gather_mistakes, refuse
from cookbook.system.machine import num_gpus
from cookbook.system.record_files import ROUNDS, read_json, replace_file
from cookbook.system.signals import EXIT_CODE, SignalExit
from cookbook.system.status import Status

Only = Literal["sample", "train"]


def rounds(
    path: Annotated[Path, RECIPE],
    *,
    strategy: StrategyFile = None,
    processes: Annotated[int | None, process_count("one per GPU, or two without a GPU")] = None,
    assignments: Assignments,
    sample_until: Annotated[
        int | None, Option(metavar="ROUND", help="only sample, up to this round, beside a start that trains")
    ] = None,
    only: Annotated[
        Only | None, Option(help="what this command does; another one, maybe on another machine, does the rest")
    ] = None,
) -> int:
    """Sample answers, score them, train on them; for N rounds."""
    if sample_until is not None and only is not None:
        raise RecipeError(f"--sample-until {sample_until} and --only {only}: take one out")
    recipe, asked = check(path, strategy, processes, assignments)
    for note in versions.notes():
        say(note)
    assert recipe.rounds is not None
    output_dir = Path(recipe.run.output_dir)
    # Two commands in one folder would each sample and train the same rounds.
    if only == "sample":
        elsewhere.await_trainer(output_dir)
        lock.hold(output_dir / "rounds", elsewhere.END_SECONDS)
    elif sample_until is not None:  # the sampler of a start that was killed may still be ending
        lock.hold(output_dir / "rounds", sampled_ahead.END_SECONDS)
    else:
        lock.hold(output_dir)
        if only is None and output_dir.is_dir():
            lock.wait_for(output_dir / "rounds", sampled_ahead.END_SECONDS)
    quiet_without_gpus()
    if recipe.rounds.sampler != TRANSFORMERS and only != "train":
        from cookbook.commands.rounds import served

        served.check(recipe)
    base, ids = _first_model(recipe, asked)
    first_model = base if recipe.adapter is None or recipe.adapter.path is None else recipe.adapter.path
    judges = _reward_models(recipe.rounds, asked[0])
    how = Sampling(recipe=recipe, asked=asked, ids=ids, first_model=first_model, judges=judges)
    of_data = prompt_rows.digest(asked, ids, recipe.data.max_length, _template(base, recipe, asked))
    made_from = {"data": of_data, **_digests(base, judges, recipe)}
    if sample_until is not None:
        return _sample_until(sample_until, output_dir, made_from, how)
    if only == "sample":
        with ExitStack() as opened:
            return elsewhere.sample_all(
                output_dir,
                how,
                lambda record: _compare(record, recipe, made_from, output_dir),
                lambda how: _with_server(how, base, opened),
            )
    _begin(output_dir, recipe, made_from, is_elsewhere=only == "train")
    status = Status(output_dir, is_main=True)
    with ExitStack() as opened:
        command = _Command(path, strategy, processes, assignments)
        going = _Rounds(command, recipe, base, first_model, how, opened, status, is_elsewhere=only == "train")
        for number in range(1, recipe.rounds.num_rounds + 1):
            current = Round(output_dir, number)
            if not current.is_over and (code := going.do(current)):
                return code
            going.close(current)
    steps = rounds_folder.show_as_one_run(output_dir, recipe, going.done)
    status.end("finished", exit_code=0, step=steps)
    say(f"{len(going.done)} rounds, {steps} steps: {output_dir}/export")
    return 0


@dataclass
class _Command:
    """The command line of these rounds."""

    path: Path
    strategy: Path | None
    processes: int | None
    assignments: list[str]

    def words(self) -> list[str]:
        words = ["rounds", str(self.path)]
        words += [] if self.strategy is None else ["--strategy", str(self.strategy)]
        words += [] if self.processes is None else ["--processes", str(self.processes)]
        return words + [word for assignment in self.assignments for word in ("--set", assignment)]


@dataclass
class _Rounds:
    """The rounds of a command that trains."""

    command: _Command
    recipe: Recipe
    base: str
    """The folder of the model, without an adapter."""
    first_model: str
    """The folder of the model, or of the adapter, that the first round begins with."""
    how: Sampling
    opened: ExitStack
    """Resources that are closed when all rounds are over: a server that stays up."""
    status: Status
    is_elsewhere: bool = False
    """Another command samples."""
    done: list[Round] = field(default_factory=list)

    @property
    def output_dir(self) -> Path:
        return Path(self.recipe.run.output_dir)

    @property
    def section(self) -> RoundsSection:
        assert self.recipe.rounds is not None
        return self.recipe.rounds

    def do(self, current: Round) -> int:
        """Sample a round, if it has no samples, and train on it, while later ones are sampled; the exit code."""
        last = sampled_ahead.last_sampled_beside(current.number, self.section)
        if self.is_elsewhere:
            last = current.number
            self._await(current)
        elif self._lack_samples(current.number, last):
            self._sample(current)
        say(_in_words(current), flush=True)
        self.status.running(rounds_folder.show_as_one_run(self.output_dir, self.recipe, [*self.done, current]))
        with ExitStack() as beside:
            sampler = None
            if self._lack_samples(current.number + 1, last):
                sampler = beside.enter_context(self._sampling_until(last))
            code = self._train(current)
            if not code and sampler is not None:
                code = _wait(sampler, current, last, self.status)
            return code

    def close(self, current: Round) -> None:
        """Lead to the export of a round that is over, and remove what no later one reads."""
        self.done.append(current)
        if current.export.is_dir():  # of an earlier start's rounds only the newest are kept
            rounds_folder.link_export(self.output_dir, current)
        # After a kill the newest but one may have to sample yet.
        keep = self.recipe.run.keep_last + (self.section.max_staleness > 0)
        if self.is_elsewhere:
            keep = elsewhere.exports_to_keep(self.section, keep)
        rounds_folder.tidy(self.done, keep)

    def _lack_samples(self, first: int, last: int) -> bool:
        return any(not Round(self.output_dir, number).samples.is_file() for number in range(first, last + 1))

    @contextmanager
    def _end_of_status(self, where: str) -> Iterator[None]:
        """Have status.json say how this part of the loop ended, if it did: `where` it was stopped, or why it failed."""
        try:
            yield
        except RecipeError as error:
            self.status.end("failed", exit_code=2, reason=str(error))
            raise
        except (SignalExit, KeyboardInterrupt):
            self.status.end("stopped", exit_code=EXIT_CODE, reason=where)
            raise

    def _sample(self, current: Round) -> None:
        """Sample a round unless only later ones have no samples, for which the server is started that stays up."""
        with self._end_of_status(f"while round {current.number} was sampled"):
            self.how = _with_server(self.how, self.base, self.opened)
            if not current.samples.is_file():
                write_samples(current, self.how)

    def _await(self, current: Round) -> None:
        """Wait for the samples of another command, which who is faster decides, and check their weights."""
        with self._end_of_status(f"round {current.number} had no samples yet"):
            seconds = elsewhere.await_samples(current, str(self.command.path))
            elsewhere.check_samples(current, self.section, self.first_model)
        if self.done and not self.done[-1].waits.is_file():
            sampled_ahead.write_waits(self.done[-1], {"trainer_wait": seconds})

    def _sampling_until(self, last: int) -> AbstractContextManager[sampled_ahead.Ahead]:
        """A process that samples the rounds up to one."""
        words = [*self.command.words(), "--sample-until", str(last)]
        if self.how.recipe is not self.recipe:
            words += ["--set", f"rounds.sampler={_section_of(self.how).sampler}", "--set", "rounds.keep_server=false"]
        return sampled_ahead.sampling(words, Round(self.output_dir, last).folder / sampled_ahead.LOG)

    def _train(self, current: Round) -> int:
        """The exit code of the run of a round, which is over if that is 0."""
        model = self.done[-1].export if self.done else Path(self.first_model)
        code = launch(
            self.command.path,
            strategy=self.command.strategy,
            processes=self.command.processes,
            assignments=[*self.command.assignments, *_of_round(current, model, self.done, self.recipe)],
        )
        if not code and was_signalled():  # as its run ended
            code = EXIT_CODE
        if code or not current.is_over:
            state = "stopped" if code == EXIT_CODE else "failed"
            self.status.end(state, exit_code=code or 1, reason=f"in round {current.number}")
            return code or 1
        return 0


def _with_server(how: Sampling, model: str, opened: ExitStack) -> Sampling:
    """Sampling at the address of a server that stays up till the end of `opened`, if the recipe wants one and it is not
    up yet."""
    section = _section_of(how)
    if not section.starts_one_server:
        return how
    from cookbook.commands.rounds import served

    address = opened.enter_context(served.start_once(model, how.recipe, Path(how.recipe.run.output_dir)))
    section = section.model_copy(update={"sampler": address, "keep_server": False})
    return dataclasses.replace(how, recipe=how.recipe.model_copy(update={"rounds": section}))


def _section_of(how: Sampling) -> RoundsSection:
    assert how.recipe.rounds is not None
    return how.recipe.rounds


def _wait(sampler: sampled_ahead.Ahead, trained: Round, last: int, status: Status) -> int:
    """Wait for the samples of later rounds; the exit code of rounds that end without them, else 0."""
    try:
        code, waits = sampler.wait()
    except (SignalExit, KeyboardInterrupt):
        status.end("stopped", exit_code=EXIT_CODE, reason=f"while round {last} was sampled")
        raise
    if code:
        reason = f"while round {last} was sampled"
        status.end("stopped" if code == EXIT_CODE else "failed", exit_code=code, reason=reason)
        return code
    sampled_ahead.write_waits(trained, waits)
    return 0


def _sample_until(last: int, output_dir: Path, made_from: dict[str, str], how: Sampling) -> int:
    """Sample the rounds up to one that have no answers yet.

    Raises:
        RecipeError: the folder has no rounds of this recipe, or not the weights that sample.
    """
    rounds = how.recipe.rounds
    assert rounds is not None
    if not 1 <= last <= rounds.num_rounds:
        raise RecipeError(f"--sample-until is {last}; write a round from 1 to rounds.num_rounds, {rounds.num_rounds}")
    record = read_json(output_dir / ROUNDS)
    if not _is_whole(record):
        raise RecipeError(f"--sample-until: {output_dir} has no rounds; start cookbook rounds there")
    assert record is not None
    _compare(record, how.recipe, made_from, output_dir)
    for number in range(1, last + 1):
        current = Round(output_dir, number)
        if current.is_over or current.samples.is_file():
            continue
        policy = sampled_ahead.policy_of(number, rounds)
        if policy and not Round(output_dir, policy).is_over:
            raise RecipeError(
                f"--sample-until is {last}, but round {number} is sampled by the weights of round {policy}, which is"
                f" not over; write {number - 1}"
            )
        write_samples(current, how)
    return 0


def check(
    path: Path, strategy: Path | None, processes: int | None, assignments: list[str]
) -> tuple[Recipe, list[Prompt]]:
    """The recipe and its prompts, before anything is sampled.

    Raises:
        RecipeError: all mistakes of the recipe and its rows, or of its reward functions.
    """
    recipe, loaded = run_plan.load_pair(path, assignments, strategy)
    if recipe.rounds is None or recipe.rounds.round is not None:
        what = "has no rounds" if recipe.rounds is None else f"has rounds.round {recipe.rounds.round}, a run's own"
        raise RecipeError(f"{path}: {what}; see docs/recipes.md, Rounds")
    mistakes: list[str] = []
    count = processes or loaded.num_processes or run_plan.default_num_processes(loaded, num_gpus())
    with gather_mistakes(mistakes):
        run_plan.make_plan(recipe, loaded, num_processes=count, num_gpus=num_gpus(), recipe_name=str(path))
    mistakes = place_mistakes([*mistakes, *reads_own_folder(recipe)], path, assignments)
    asked: list[Prompt] = []
    with gather_mistakes(mistakes):
        asked = prompt_rows.read_prompts(recipe.data, recipe.rounds, recipe.seed)
    refuse(mistakes)
    scoring.try_functions(recipe.rounds, asked[0])
    return recipe, asked


def _first_model(recipe: Recipe, asked: list[Prompt]) -> tuple[str, list[list[int]]]:
    """The folder of the model, without an adapter, and the tokens of all prompts."""
    from cookbook.commands.rounds.sampling import encode
    from cookbook.training.models import model_source

    first = model_source.resolve_model(recipe.model, seed=recipe.seed, texts=(), fingerprint="", cache=CACHE)
    return first, encode(asked, first, recipe)


def _template(model: str, recipe: Recipe, asked: list[Prompt]) -> Any:
    """The chat template of prompts that are messages, which writes later turns too."""
    if all(isinstance(prompt.asked, str) for prompt in asked):
        return None
    from cookbook.training.models.tokenizer_files import load_tokenizer

    return load_tokenizer(model, recipe.data.chat_template).chat_template


def _reward_models(rounds: RoundsSection, prompt: Prompt) -> dict[str, str]:
    """The folder of each reward model, by its name in the recipe."""
    names = [name for name in rounds.reward_funcs if is_model(name)]
    if not names:
        return {}
    from cookbook.commands.rounds import reward_models

    return {name: reward_models.check(name, prompt) for name in names}


def _digests(model: str, judges: dict[str, str], recipe: Recipe) -> dict[str, str]:
    from cookbook.training.models.model_source import weights_digest

    of_teacher = _of_teacher(model, recipe)
    of_judges = " ".join(weights_digest(Path(folder), cache=CACHE) for folder in judges.values())
    of_model = weights_digest(Path(model), cache=CACHE)
    digests = {"model": of_model, "plugins": plugins.digest(recipe.plugins), "reward_models": of_judges}
    return {**digests, **of_teacher, **_of_adapter(model, of_model, recipe)}


def _of_adapter(model: str, digest: str, recipe: Recipe) -> dict[str, str]:
    """The digest of an adapter that the first round begins with, which must fit the model."""
    if recipe.adapter is None:
        return {}
    from cookbook.facts.language_part import open_config
    from cookbook.training.adapters import adapter_files, base_model

    adapter_files.check_names(open_config(model), recipe.adapter)
    base_model.check_base(recipe.adapter, digest)
    return {} if recipe.adapter.path is None else {"adapter": adapter_files.weights_digest(recipe.adapter, cache=CACHE)}


def _of_teacher(model: str, recipe: Recipe) -> dict[str, str]:
    """The digest of a teacher, which must fit the model; each round's run asks it."""
    if (asked := recipe.objective.asks) is None:
        return {}
    from cookbook.facts.language_part import open_config
    from cookbook.run.teacher import KEY, find_teacher
    from cookbook.training.models import model_source, tokenizer_files
    from cookbook.training.models.folder_facts import check_folder

    tokenizer = tokenizer_files.load_tokenizer(model, recipe.data.chat_template)
    rows = check_folder(Path(model), open_config(model), tokenizer).num_embeddings
    folder = model_source.fetch_model(asked.teacher, None, key=KEY)
    find_teacher(asked, folder, tokenizer, rows, recipe.data.max_length)
    return {"teacher": model_source.weights_digest(Path(folder), cache=CACHE)}


def _begin(output_dir: Path, recipe: Recipe, made_from: dict[str, str], *, is_elsewhere: bool = False) -> None:
    """Resume the rounds in the folder, if they are those of this recipe; else set aside what is in it.

    Args:
        is_elsewhere: another command samples.

    Raises:
        RecipeError: the recipe has changed where it may not.
    """
    from cookbook.training.metrics import set_aside

    path = output_dir / ROUNDS
    record = read_json(path)
    if recipe.run.resume == "auto" and path.is_file() and not _is_whole(record):
        raise RecipeError(f"{path}: is damaged; put it back, or begin again with --set run.resume=never")
    if record and recipe.run.resume == "auto":
        _compare(record, recipe, made_from, output_dir)
    elif earlier := set_aside(output_dir):
        say(f"{output_dir} held an earlier run, which was moved to {earlier}")
    output_dir.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {"recipe": recipe.model_dump(mode="json", exclude_none=True), "made_from": made_from}
    values[elsewhere.ELSEWHERE] = is_elsewhere
    replace_file(output_dir / "recipe.yaml", dump_recipe(recipe))  # which `next` names from the first moment on
    replace_file(output_dir / ROUNDS, json.dumps(values, indent=2) + "\n", flush=True)


def _compare(record: dict[str, Any], recipe: Recipe, made_from: dict[str, str], output_dir: Path) -> None:
    """Print what has changed since the rounds of a folder were begun.

    Raises:
        RecipeError: the recipe has changed where it may not.
    """
    from cookbook.training.checkpoint import resume

    # A reward function that failed may be fixed: the runs of rounds compare the plugins' content themselves.
    digests = {key: value for key, value in made_from.items() if key != "plugins"}
    mistakes, notes = resume.changes(record, recipe, digests | {"plugins": record["made_from"]["plugins"]})
    if mistakes:
        raise RecipeError([f"run.resume: cannot resume in {output_dir}:", *mistakes])
    for key in ("plugins", "reward_models"):
        if made_from[key] != record["made_from"].get(key, ""):
            notes.append(f"the {key.replace('_', ' ')} have changed: rounds scored before keep their rewards")
    for note in notes:
        say(note)


def _is_whole(record: dict[str, Any] | None) -> bool:
    """True if rounds.json has all that `_begin` wrote."""
    made_from = (record or {}).get("made_from")
    return isinstance(made_from, dict) and "plugins" in made_from and isinstance((record or {}).get("recipe"), dict)


def _of_round(current: Round, model: Path, done: list[Round], recipe: Recipe) -> list[str]:
    """Assignments of the run of a round, where it differs from the recipe."""
    kind = kind_of_samples(recipe.objective)
    assert kind is not None
    assert recipe.rounds is not None
    # What transformers' generate rounded otherwise than a training forward, the run computes before its first step.
    left_out = {"logprobs"} if recipe.rounds.sampler == TRANSFORMERS else set()
    columns = {key: key for key in (*kind.keys, *kind.other_keys) if key in current.lines[0] and key not in left_out}
    if "logprobs" not in columns and recipe.rounds.max_staleness:
        # The run begins with newer weights than sampled, so that it cannot compute them.
        columns["logprobs"] = "trainer_logprobs"
    values: dict[str, Any] = {
        "rounds.round": current.number,
        "data.train": {"path": str(current.samples), "columns": columns},
        "data.columns": None,
        "data.ignore": sorted(left_out & {*current.lines[0]}) or None,
        "run.output_dir": str(current.run),
        "run.resume": "auto",
    }
    if done and recipe.adapter is not None:
        values["adapter.path"] = str(model)
    elif done:
        # A revision is that of the first model on the Hub; a round's export has none.
        values |= {"model.name_or_path": str(model), "model.revision": None}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _in_words(current: Round) -> str:
    summary = rounds_folder.summary_of(current.number, current.lines)
    reward = f"mean reward {summary['reward']:.3f} of " if "reward" in summary else ""
    apart = f", kl_sampler_trainer {summary[sampler_divergence.KL]:.1g}" if sampler_divergence.KL in summary else ""
    return (
        f"ROUND {current.number}: {reward}{summary['num_answers']:,} answers, {summary['ended']:.0%} ended within"
        f" {summary['completion_tokens']:.0f} tokens on average{apart}; trains on them"
    )
