"""Mistakes of a recipe with `rounds`. No torch."""

import os
from collections.abc import Iterator
from urllib.parse import urlsplit

from cookbook.config.environments import environments
from cookbook.config.objectives import Objective
from cookbook.config.outside_words import TRANSFORMERS, addresses, has_adapters, is_address
from cookbook.config.recipe import Recipe
from cookbook.config.reward_functions import is_model, reward_functions
from cookbook.config.sections import BUILTIN_SOURCE
from cookbook.config.strategy import Strategy
from cookbook.rows.row_kinds import RowKind, kinds
from cookbook.system.masking import LOCAL_HOSTS, may_have_secret

KEY = "VLLM_API_KEY"
"""The variable of the key that a server of vLLM asks for."""


def misfits(recipe: Recipe, strategy: Strategy) -> list[str]:
    """List what does not go with rounds, each beginning with its key; nothing of the run of one round."""
    if recipe.rounds is None or recipe.rounds.round is not None:
        return []
    parts = (
        _of_sampler(recipe),
        _of_rewards(recipe),
        _of_weights(recipe, strategy),
        _of_rows(recipe),
        _mistakes_of_run(recipe),
    )
    return [mistake for part in parts for mistake in part]


def kind_of_samples(objective: Objective) -> RowKind | None:
    """The rows of token ids that an objective trains on, if it does."""
    return next((kind for name in objective.rows if (kind := kinds()[name]).tokens is not None), None)


def needs_reference(objective: Objective) -> bool:
    """Return whether the samples of a round need the log-probabilities of the model before the first round."""
    return objective.needs_reference and objective.compares({"old_logps"})


def sampler_hosts(recipe: Recipe) -> list[str]:
    """The other machines that prompts are sent to, and with them a key."""
    hosts = [urlsplit(address).hostname or "" for address in addresses(recipe.rounds.sampler if recipe.rounds else "")]
    return list(dict.fromkeys(host for host in hosts if host not in LOCAL_HOSTS))


def _of_sampler(recipe: Recipe) -> Iterator[str]:
    assert recipe.rounds is not None
    for address in addresses(recipe.rounds.sampler):
        if KEY in os.environ and not may_have_secret(url := urlsplit(address)):
            yield (
                f"rounds.sampler is {address}: {KEY} would travel to {url.hostname} for all to read; write https://,"
                f" or unset {KEY}"
            )
    if recipe.rounds.keep_server and (is_address(recipe.rounds.sampler) or recipe.rounds.sampler == TRANSFORMERS):
        yield (
            f"rounds.keep_server is true, and rounds.sampler is {recipe.rounds.sampler}, so no server is started; write"
            " rounds.sampler: vllm, or take keep_server out"
        )
    if has_adapters(recipe.rounds.sampler) and (recipe.adapter is None or recipe.adapter.name != "lora"):
        there = "the recipe has no adapter" if recipe.adapter is None else f"adapter.name is {recipe.adapter.name}"
        yield (
            f"rounds.sampler has --enable-lora, by which one server gets each round's adapter, and {there}; take it"
            " out, and a server is started for each round"
        )


def _of_rewards(recipe: Recipe) -> Iterator[str]:
    assert recipe.rounds is not None
    objective, rounds = recipe.objective, recipe.rounds
    kind = kind_of_samples(objective)
    if kind is None:
        what = "which does not train on sampled tokens; in rounds write grpo or distill"
        yield f"objective.name is {objective.name}, {what}"
    elif kind.values is not None and not rounds.reward_funcs and rounds.environment is None:
        yield f"rounds.reward_funcs is empty, and {objective.name} trains on rewards; name a function or a reward model"
    if rounds.max_staleness and kind is not None and kind.values is None:
        what = f"{objective.name} has no ratio to the probability of who sampled, which older weights need"
        yield f"rounds.max_staleness is {rounds.max_staleness}, and {what}; write 0"
    yield from _mistakes_of_environment(recipe, kind)
    if objective.asks is not None and (ratio := getattr(objective, "kd_ratio", 1.0)) != 1:
        yield (
            f"objective.kd_ratio is {ratio:g}: the rest is the likelihood of the labels, which in rounds are the"
            " model's own answers; write 1"
        )
    constant = getattr(objective, "max_completion_length", None)
    if constant not in (None, rounds.max_completion_length):
        yield f"objective.max_completion_length is {constant}, but that of rounds {rounds.max_completion_length}"
    known = reward_functions()
    for name in rounds.reward_funcs:
        if name not in known and not is_model(name):
            there = f"they have {', '.join(known)}" if known else "none registers a reward function"
            yield (
                f"rounds.reward_funcs has {name!r}, which no file in plugins registers; {there}; the name of a reward"
                " model's folder has a /"
            )


def _mistakes_of_environment(recipe: Recipe, kind: RowKind | None) -> Iterator[str]:
    rounds = recipe.rounds
    assert rounds is not None
    if (name := rounds.environment) is None:
        return
    if name not in (known := environments()):
        yield f"rounds.environment is {name!r}, which no file in plugins registers; there are {', '.join(known)}"
    if kind is not None and kind.values is None:
        what = f"{recipe.objective.name} trains on all tokens of an answer"
        yield f"rounds.environment is {name}, and {what}; write objective.name: grpo"
    for key in ("reward_funcs", "user_message"):
        if value := getattr(rounds, key):
            yield f"rounds.{key} is {value!r}, but the environment asks, and gives the reward; take one of them out"


def _of_weights(recipe: Recipe, strategy: Strategy) -> Iterator[str]:
    model = recipe.model
    if model.from_scratch is not None:
        yield "model.from_scratch: a new model's answers say nothing; train it first, and name its export"
    if model.new_tokens is not None:
        yield "model.new_tokens: a round would add them again; add them in a run before, and name its export"
    if recipe.adapter is not None and recipe.adapter.is_quantized:
        yield (
            f"adapter.name is {recipe.adapter.name}: answers would be sampled by the model in 16 or 32 bits, and the"
            " one in 4 be trained on them; write lora"
        )
    if recipe.adapter is not None and recipe.adapter.modules_to_save:
        yield "adapter.modules_to_save: a round begins with the adapter's matrices alone; take it out"
    if strategy.num_machines > 1:
        yield f"strategy: {strategy.path} is for {strategy.num_machines} machines, and one samples; take one for one"


def _of_rows(recipe: Recipe) -> Iterator[str]:
    data = recipe.data
    if data.eval or data.holdout:
        yield "data.eval or data.holdout: held-out prompts are not evaluated in rounds; take it out"
    if data.streaming:
        yield "data.streaming: prompts are read at once; take it out"
    for i, source in enumerate(data.train):
        if source.path == BUILTIN_SOURCE or source.weight is not None:
            what = BUILTIN_SOURCE if source.weight is None else f"weight {source.weight:g}"
            yield f"data.train: source {i + 1} has {what}, which prompts do not; name files of prompts"
        if others := sorted({*(source.columns or {})} - {"prompt"}):
            yield f"data.columns has {others[0]}; in rounds only prompt can be renamed, as in {{prompt: question}}"
    for key in ("too_long", "special_tokens", "template_date"):
        if (value := getattr(data, key)) is not None:
            yield f"data.{key} is {value}, which prompts do not heed; take it out"
    if data.accept or data.on_bad_row == "drop":
        yield "data.accept or data.on_bad_row: drop, which prompts do not heed; take it out"


def _mistakes_of_run(recipe: Recipe) -> Iterator[str]:
    run, rounds = recipe.run, recipe.rounds
    assert rounds is not None
    if run.resume not in ("never", "auto"):
        yield f"run.resume is {run.resume!r}; rounds know never and auto"
    if run.stop_after_steps is not None:
        yield "run.stop_after_steps: would end each round; take it out"
    if run.price_per_gpu_hour is not None:
        yield "run.price_per_gpu_hour: would leave out what sampling costs, which is in no run; take it out"
    size = rounds.prompts_per_round * rounds.num_generations
    if run.num_epochs is not None and size < recipe.batch.global_batch_size:
        yield (
            f"batch.global_batch_size is {recipe.batch.global_batch_size}, but a round has {size} answers"
            " (prompts_per_round x num_generations); write at most that"
        )
