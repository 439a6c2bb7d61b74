"""Samples of a round: answers to its prompts, with their rewards and what a reference model gives them."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cookbook.commands.rounds import conversations, prompt_rows, rounds_folder, scoring
from cookbook.commands.rounds.prompt_rows import Prompt
from cookbook.commands.rounds.rounds_folder import Round
from cookbook.commands.rounds.sampled_ahead import policy_of
from cookbook.config.outside_words import TRANSFORMERS, addresses, is_address
from cookbook.config.recipe import Recipe
from cookbook.config.sections import RoundsSection
from cookbook.rows.row_checks import MASK
from cookbook.start.in_rounds import needs_reference
from cookbook.system.console import say
from cookbook.system.files import RecipeError

PROBABILITIES = {"logprobs": "logps", "sampled_logprobs": "drawn_logps"}
"""Key of a round's lines -> attribute of an answer."""

if TYPE_CHECKING:
    from cookbook.commands.rounds.sampling import Answer, Sampler
    from cookbook.commands.rounds.served import ServedModel, Servers


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Inputs of sampling that are the same in all rounds."""

    recipe: Recipe
    asked: list[Prompt]
    ids: list[list[int]]
    """The tokens of each prompt."""
    first_model: str
    """The folder of the model, or of the adapter, before the first round."""
    judges: dict[str, str]
    """The folder of each reward model."""


def write_samples(current: Round, how: Sampling) -> None:
    """Write the samples of a round: the answers first, so that a reward function that fails does not cost them."""
    recipe = how.recipe
    rounds = recipe.rounds
    assert rounds is not None
    policy = policy_of(current.number, rounds)
    model = Round(current.output_dir, policy).export if policy else Path(how.first_model)
    if policy and not model.is_dir():
        again = f"remove {model.parents[1]}, and round {policy} is done again"
        raise RecipeError(f"{model}: is gone, and round {current.number} begins with it; {again}")
    say(f"ROUND {current.number} of {rounds.num_rounds}: samples answers with {model}", flush=True)
    if not current.unscored.is_file():
        rounds_folder.write_lines(current.unscored, _sample(current, model, how))
    lines = []
    with _open_judges(how.judges, recipe) as models:
        for line in rounds_folder.read_answers(current.unscored):
            prompt, texts = how.asked[line["row"]], line["completions"]
            if rounds.environment is not None:
                lines.append(line | {"prompt": prompt.asked})
                continue
            line |= {"prompt": prompt.asked, "completions": scoring.as_asked(prompt, texts)}
            if rounds.reward_funcs:
                scores = scoring.score(rounds, prompt, texts, line["completion_ids"], models)
                line |= {"rewards": scoring.total(rounds, scores), "scores": scores}
            lines.append(line)
    if needs_reference(recipe.objective):
        from cookbook.commands.rounds.sampling import Reference

        reference = Reference(Path(how.first_model), is_bf16=recipe.compute_precision == "bf16")
        for line in lines:
            line["reference_logprobs"] = reference.logps(line["prompt_ids"], line["completion_ids"], line.get(MASK))
        reference.close()
    rounds_folder.write_lines(current.samples, lines)
    current.unscored.unlink()
    current.remove_folder_for_server()


@contextmanager
def _open_judges(judges: dict[str, str], recipe: Recipe) -> Iterator[dict[str, Any]]:
    """The reward models, which are in memory only after a round has sampled."""
    if not judges:
        yield {}
        return
    from cookbook.commands.rounds.reward_models import RewardModel

    assert recipe.rounds is not None
    is_bf16 = recipe.compute_precision == "bf16"
    opened = {name: RewardModel(folder, recipe.rounds, is_bf16=is_bf16) for name, folder in judges.items()}
    yield opened
    for model in opened.values():
        model.close()


def _sample(current: Round, model: Path, how: Sampling) -> list[dict[str, Any]]:
    """A line for each prompt of a round.

    Raises:
        RecipeError: it was not sampled with the weights that it trains.
    """
    from cookbook.commands.rounds import proof
    from cookbook.commands.rounds.sampling import OpenFile

    recipe = how.recipe
    assert recipe.rounds is not None
    chosen = prompt_rows.of_round(current.number, recipe.rounds.prompts_per_round, len(how.asked), recipe.seed)
    # A hash: with seed + number, round 2 of one seed would draw as round 1 of the next.
    seed = int(hashlib.sha256(f"{recipe.seed} {current.number}".encode()).hexdigest()[:12], 16)
    is_bf16 = recipe.compute_precision == "bf16"
    others: list[Path] = []
    if recipe.rounds.sampler != TRANSFORMERS:
        others = [other for other in rounds_folder.earlier_models(current, how.first_model) if other != model]
    with ExitStack() as opened:
        sampler: Any = opened.enter_context(_sampler(current, model, recipe))
        trainer: Any = sampler
        if is_address(recipe.rounds.sampler):
            trainer = opened.enter_context(closing(OpenFile(model, is_bf16=is_bf16)))
            for server in sampler.servers:
                _probe(current, chosen, server, trainer, others, how)
        if recipe.rounds.environment is None:
            lines = _lines(current, chosen, sampler.answers([how.ids[row] for row in chosen], seed), how)
        else:
            lines = _talks(current, chosen, sampler, seed, how)
        if recipe.rounds.sampler != TRANSFORMERS and trainer is sampler:
            opened.close()  # the memory of a server that was started for the round is free before the model is opened
            trainer = opened.enter_context(closing(OpenFile(model, is_bf16=is_bf16)))
        for address, of_address in _by_server(lines, sampler, recipe.rounds).items():
            proof.prove(of_address, trainer, recipe, others, current.number, address)
    weights = rounds_folder.weights_digest(model)
    policy = policy_of(current.number, recipe.rounds)
    return [{"round": line.pop("round"), "policy": policy, "weights": weights, **line} for line in lines]


def _probe(
    current: Round, chosen: Sequence[int], server: "ServedModel", trainer: Any, others: Sequence[Path], how: Sampling
) -> None:
    """Prove, before a server at an address is asked for a round's answers, by a few short ones what it samples with.

    Raises:
        RecipeError: as `proof.prove`.
    """
    from cookbook.commands.rounds import proof
    from cookbook.commands.rounds.served import NUM_PROBED, Servers

    rows = chosen[:NUM_PROBED]
    say(f"  asks {server.client.address} for a few answers first, which prove its weights", flush=True)
    answers = Servers([server.shorten()]).answers([how.ids[row] for row in rows], current.number, 1)
    lines = _lines(current, rows, answers, how)
    proof.prove(lines, trainer, how.recipe, others, current.number, server.client.address)


def _by_server(lines: list[dict[str, Any]], sampler: Any, rounds: RoundsSection) -> dict[str, list[dict[str, Any]]]:
    """The lines of each server by its address."""
    if len(addresses(rounds.sampler)) < 2:
        return {rounds.sampler: lines}
    parted: dict[str, list[dict[str, Any]]] = {}
    for place, line in enumerate(lines):
        parted.setdefault(sampler.of(place).client.address, []).append(line)
    return parted


def _lines(
    current: Round, chosen: Sequence[int], groups: Sequence[Sequence["Answer"]], how: Sampling
) -> list[dict[str, Any]]:
    assert how.recipe.rounds is not None
    lines, known = [], _probabilities_of([answer for group in groups for answer in group], how)
    for row, group in zip(chosen, groups, strict=True):
        line: dict[str, Any] = {
            "round": current.number,
            "row": row,
            "completions": [answer.text for answer in group],
            "ended": [answer.has_ended for answer in group],
            "num_tokens": [len(answer.ids) for answer in group],
            "prompt_ids": how.ids[row],
            "completion_ids": [answer.ids for answer in group],
            "seeds": [answer.seed for answer in group],
            "sampling": how.recipe.rounds.sampling,
        }
        line |= {key: [getattr(answer, of) for answer in group] for key, of in known.items()}
        lines.append(line)
    return lines


def _talks(current: Round, chosen: Sequence[int], sampler: Any, seed: int, how: Sampling) -> list[dict[str, Any]]:
    """A line for each prompt, whose completions are conversations with the recipe's environment."""
    asked, ids = [how.asked[row] for row in chosen], [how.ids[row] for row in chosen]
    groups = conversations.converse(sampler, asked, ids, how.recipe, seed)
    known = _probabilities_of([turn for group in groups for talk in group for turn in talk.turns], how)
    lines = _lines(current, chosen, [[talk.turns[-1] for talk in group] for group in groups], how)
    for line, group in zip(lines, groups, strict=True):
        rewards = [talk.reward for talk in group]
        line |= {
            "completions": [talk.messages[len(talk.prompt.asked) :] for talk in group],
            "num_tokens": [sum(talk.mask) for talk in group],
            "completion_ids": [talk.tokens for talk in group],
            MASK: [talk.mask for talk in group],
            "num_turns": [len(talk.turns) for talk in group],
            "seeds": [[turn.seed for turn in talk.turns] for talk in group],
            "rewards": rewards,
            "scores": {how.recipe.rounds.environment if how.recipe.rounds else "": rewards},
        }
        for key, of in known.items():
            line[key] = [[logp for turn in talk.turns for logp in getattr(turn, of)] for talk in group]
    return lines


def _probabilities_of(answers: Sequence["Answer"], how: Sampling) -> dict[str, str]:
    """The items of `PROBABILITIES` that the answers have.

    Raises:
        RecipeError: only some have them, and nothing would prove the others, or could weigh them.
    """
    known = {}
    for key, of in PROBABILITIES.items():
        num_known = sum(getattr(answer, of) is not None for answer in answers)
        if 0 < num_known < len(answers):
            assert how.recipe.rounds is not None
            raise RecipeError(
                f"rounds.sampler is {how.recipe.rounds.sampler}, and {num_known:,} of {len(answers):,} answers came"
                " with log-probabilities; start servers that return those of all"
            )
        if num_known:
            known[key] = of
    return known


def _sampler(current: Round, model: Path, recipe: Recipe) -> "AbstractContextManager[Sampler | Servers]":
    assert recipe.rounds is not None
    if recipe.rounds.sampler != TRANSFORMERS:
        from cookbook.commands.rounds import served

        return served.open_servers(current, model, recipe)
    from cookbook.commands.rounds.sampling import Sampler

    is_bf16 = recipe.compute_precision == "bf16"
    return closing(Sampler(model, recipe.rounds, is_bf16=is_bf16, chat_template=recipe.data.chat_template))
