"""`rounds`: samples answers with the current weights, scores them, trains on them, and begins again."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cookbook.commands.launch import launch
from cookbook.commands.rounds import prompt_rows, rounds_folder, scoring
from cookbook.commands.rounds.prompt_rows import Prompt
from cookbook.commands.rounds.rounds_folder import Round
from cookbook.commands.shared.arguments import RECIPE, Assignments, StrategyFile, process_count
from cookbook.commands.shared.find_model import CACHE, quiet_without_gpus
from cookbook.commands.shared.mistakes import placed
from cookbook.config import plugins
from cookbook.config.recipe import Recipe
from cookbook.config.reward_functions import is_model
from cookbook.config.sections import RoundsSection
from cookbook.start import run_plan
from cookbook.start.in_rounds import TRANSFORMERS, kind_of_samples, needs_reference
from cookbook.system import lock
from cookbook.system.console import say
from cookbook.system.files import RecipeError, gathered, refuse
from cookbook.system.machine import num_gpus
from cookbook.system.record_files import ROUNDS, read_json, replace_file
from cookbook.system.signals import EXIT_CODE
from cookbook.system.status import Status

if TYPE_CHECKING:
    from cookbook.commands.rounds.sampling import Sampler
    from cookbook.commands.rounds.served import Served


def rounds(
    path: Annotated[Path, RECIPE],
    *,
    strategy: StrategyFile = None,
    processes: Annotated[int | None, process_count("one per GPU, or two without a GPU")] = None,
    assignments: Assignments,
) -> int:
    """Sample answers, score them, train on them; for N rounds."""
    recipe, asked = check(path, strategy, processes, assignments)
    assert recipe.rounds is not None
    output_dir = Path(recipe.run.output_dir)
    lock.hold(output_dir)
    quiet_without_gpus()
    if recipe.rounds.sampler != TRANSFORMERS:
        from cookbook.commands.rounds import served

        served.check(recipe)
    base, ids = _first_model(recipe, asked)
    first_model = base if recipe.adapter is None or recipe.adapter.path is None else recipe.adapter.path
    judges = _reward_models(recipe.rounds, asked[0])
    how = _Sampling(recipe=recipe, asked=asked, ids=ids, first_model=first_model, judges=judges)
    _begin(output_dir, recipe, {"data": prompt_rows.digest(asked), **_digests(base, judges, recipe)})
    status, done = Status(output_dir, is_main=True), list[Round]()
    for number in range(1, recipe.rounds.num_rounds + 1):
        one = Round(output_dir, number)
        model = done[-1].export if done else Path(first_model)
        if not one.is_over:
            if not one.samples.is_file():
                say(f"ROUND {number} of {recipe.rounds.num_rounds}: samples answers with {model}", flush=True)
                try:
                    _sample(one, model, how)
                except RecipeError as error:
                    status.end("failed", exit_code=2, reason=str(error))
                    raise
            say(_in_words(one), flush=True)
            status.running(rounds_folder.show_as_one_run(output_dir, recipe, [*done, one]))
            code = launch(
                path,
                strategy=strategy,
                processes=processes,
                assignments=[*assignments, *_of_round(one, model, done, recipe)],
            )
            if code or not one.is_over:
                status.end(
                    "stopped" if code == EXIT_CODE else "failed", exit_code=code or 1, reason=f"in round {number}"
                )
                return code or 1
        done.append(one)
        if one.export.is_dir():  # of an earlier start's rounds only the newest are kept
            rounds_folder.link_export(output_dir, one)
        rounds_folder.tidy(done, recipe.run.keep_last)
    steps = rounds_folder.show_as_one_run(output_dir, recipe, done)
    status.end("finished", exit_code=0, step=steps)
    say(f"{len(done)} rounds, {steps} steps: {output_dir}/export")
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
    with gathered(mistakes):
        run_plan.make_plan(recipe, loaded, num_processes=count, num_gpus=num_gpus(), recipe_name=str(path))
    mistakes = placed(mistakes, path, assignments)
    asked: list[Prompt] = []
    with gathered(mistakes):
        asked = prompt_rows.read_prompts(recipe.data, recipe.rounds)
    refuse(mistakes)
    scoring.try_functions(recipe.rounds, asked[0])
    return recipe, asked


def _first_model(recipe: Recipe, asked: list[Prompt]) -> tuple[str, list[list[int]]]:
    """The folder of the model, without an adapter, and the tokens of all prompts."""
    from cookbook.commands.rounds.sampling import encode
    from cookbook.training.models import model_source

    first = model_source.resolve_model(recipe.model, seed=recipe.seed, texts=(), fingerprint="", cache=CACHE)
    return first, encode(asked, first, recipe)


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
    found = {"model": of_model, "plugins": plugins.digest(recipe.plugins), "reward_models": of_judges}
    return {**found, **of_teacher, **_of_adapter(model, of_model, recipe)}


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


def _begin(output_dir: Path, recipe: Recipe, made_from: dict[str, str]) -> None:
    """Go on with the rounds in the folder, if they are those of this recipe; else set aside what is in it.

    Raises:
        RecipeError: the recipe has changed where it may not.
    """
    from cookbook.training.checkpoint import resume
    from cookbook.training.metrics import set_aside

    path = output_dir / ROUNDS
    record = read_json(path)
    if recipe.run.resume == "auto" and path.is_file() and not _is_whole(record):
        raise RecipeError(f"{path}: is damaged; put it back, or begin again with --set run.resume=never")
    if record and recipe.run.resume == "auto":
        # A reward function that failed may be fixed: the runs of rounds compare the plugins' content themselves.
        found = {key: value for key, value in made_from.items() if key != "plugins"}
        mistakes, notes = resume.changes(record, recipe, found | {"plugins": record["made_from"]["plugins"]})
        if mistakes:
            raise RecipeError([f"run.resume: cannot go on in {output_dir}:", *mistakes])
        for key in ("plugins", "reward_models"):
            if made_from[key] != record["made_from"].get(key, ""):
                notes.append(f"the {key.replace('_', ' ')} have changed: rounds scored before keep their rewards")
        for note in notes:
            say(note)
    elif earlier := set_aside(output_dir):
        say(f"{output_dir} held an earlier run, which was moved to {earlier}")
    output_dir.mkdir(parents=True, exist_ok=True)
    values = {"recipe": recipe.model_dump(mode="json", exclude_none=True), "made_from": made_from}
    replace_file(output_dir / ROUNDS, json.dumps(values, indent=2) + "\n", flush=True)


def _is_whole(record: dict[str, Any] | None) -> bool:
    """Whether rounds.json has what `_begin` wrote."""
    made_from = (record or {}).get("made_from")
    return isinstance(made_from, dict) and "plugins" in made_from and isinstance((record or {}).get("recipe"), dict)


@dataclass(frozen=True, kw_only=True)
class _Sampling:
    """What the rounds sample with, besides the weights of each."""

    recipe: Recipe
    asked: list[Prompt]
    ids: list[list[int]]
    """The tokens of each prompt."""
    first_model: str
    """The folder of the model, or of the adapter, before the first round."""
    judges: dict[str, str]
    """The folder of each reward model."""


def _sample(one: Round, model: Path, how: _Sampling) -> None:
    """Write the samples of a round: the answers first, so that a reward function that fails does not cost them."""
    recipe = how.recipe
    rounds = recipe.rounds
    assert rounds is not None
    if one.number > 1 and not model.is_dir():
        again = f"remove {model.parents[1]}, and round {one.number - 1} is done again"
        raise RecipeError(f"{model}: is gone, and round {one.number} begins with it; {again}")
    if not one.unscored.is_file():
        rounds_folder.write_lines(one.unscored, _sampled(one, model, how))
    lines = []
    with _opened(how.judges, recipe) as models:
        for line in rounds_folder.read_answers(one.unscored):
            prompt, texts = how.asked[line["row"]], line["completions"]
            line |= {"prompt": prompt.asked, "completions": scoring.as_asked(prompt, texts)}
            if rounds.reward_funcs:
                scores = scoring.score(rounds, prompt, texts, line["completion_ids"], models)
                line |= {"rewards": scoring.total(rounds, scores), "scores": scores}
            lines.append(line)
    if needs_reference(recipe.objective):
        from cookbook.commands.rounds.sampling import Reference

        reference = Reference(Path(how.first_model), is_bf16=recipe.compute_precision == "bf16")
        for line in lines:
            line["reference_logprobs"] = reference.logps(line["prompt_ids"], line["completion_ids"])
        reference.close()
    rounds_folder.write_lines(one.samples, lines)
    one.unscored.unlink()
    one.remove_given()


@contextmanager
def _opened(judges: dict[str, str], recipe: Recipe) -> Iterator[dict[str, Any]]:
    """The reward models, which are in memory only after a round has sampled."""
    if not judges:
        yield {}
        return
    from cookbook.commands.rounds.reward_models import RewardModel

    assert recipe.rounds is not None
    is_bf16 = recipe.compute_precision == "bf16"
    opened = {name: RewardModel(folder, recipe.rounds, is_bf16=is_bf16) for name, folder in judges.items()}
    yield opened
    for one in opened.values():
        one.close()


def _sampled(one: Round, model: Path, how: _Sampling) -> list[dict[str, Any]]:
    """A line for each prompt of a round."""
    recipe = how.recipe
    assert recipe.rounds is not None
    chosen = prompt_rows.of_round(one.number, recipe.rounds.prompts_per_round, len(how.asked), recipe.seed)
    seed = int(hashlib.sha256(f"{recipe.seed} {one.number}".encode()).hexdigest()[:12], 16)
    with _sampler(one, model, recipe) as sampler:
        groups = sampler.answers([how.ids[row] for row in chosen], seed)
    lines = []
    for row, group in zip(chosen, groups, strict=True):
        line: dict[str, Any] = {
            "round": one.number,
            "row": row,
            "completions": [answer.text for answer in group],
            "ended": [answer.has_ended for answer in group],
            "num_tokens": [len(answer.ids) for answer in group],
            "prompt_ids": how.ids[row],
            "completion_ids": [answer.ids for answer in group],
        }
        if all(answer.logps is not None for answers in groups for answer in answers):
            line["logprobs"] = [answer.logps for answer in group]
        lines.append(line)
    return lines


def _sampler(one: Round, model: Path, recipe: Recipe) -> "AbstractContextManager[Sampler | Served]":
    assert recipe.rounds is not None
    if recipe.rounds.sampler != TRANSFORMERS:
        from cookbook.commands.rounds import served

        return served.opened(one, model, recipe)
    from cookbook.commands.rounds.sampling import Sampler

    return closing(Sampler(model, recipe.rounds, is_bf16=recipe.compute_precision == "bf16"))


def _of_round(one: Round, model: Path, done: list[Round], recipe: Recipe) -> list[str]:
    """What the run of a round has otherwise than the recipe."""
    kind = kind_of_samples(recipe.objective)
    assert kind is not None
    columns = {key: key for key in (*kind.keys, *kind.logps) if key in one.lines[0]}
    values: dict[str, Any] = {
        "rounds.round": one.number,
        "data.train": {"path": str(one.samples), "columns": columns},
        "data.columns": None,
        "data.ignore": None,
        "run.output_dir": str(one.run),
        "run.resume": "auto",
    }
    if done and recipe.adapter is not None:
        values["adapter.path"] = str(model)
    elif done:
        values |= {"model.name_or_path": str(model), "model.revision": None}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _in_words(one: Round) -> str:
    found = rounds_folder.summary_of(one.number, one.lines)
    reward = f"mean reward {found['reward']:.3f} of " if "reward" in found else ""
    return (
        f"ROUND {one.number}: {reward}{found['num_answers']:,} answers,"
        f" {found['ended']:.0%} ended within {found['completion_tokens']:.0f} tokens on average; trains on them"
    )
