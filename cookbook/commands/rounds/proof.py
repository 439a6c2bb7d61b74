"""Proves that a round was sampled with the weights that it trains, or says what else was sampled. Imports torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cookbook.commands.rounds import rounds_folder, sampler_divergence
from cookbook.commands.rounds.drawing import logps, truncate
from cookbook.commands.rounds.sampling import OpenFile
from cookbook.config.recipe import Recipe
from cookbook.config.sections import RoundsSection
from cookbook.system.console import say
from cookbook.system.files import RecipeError

NUM_SUSPECTS = 16
"""Answers with the largest divergence, with which a cause is looked for."""
FITS = 10.0
"""Factor by which a cause lowers the divergence that it explains."""
ROUNDING = 1e-6
"""The most that rounding in float32 makes of an answer's divergence: of tiny models up to 1e-12."""
MOST_LEFT_OUT = 0.01
"""Share of tokens that truncation by the trainer's own logits may leave out, as the two were rounded otherwise."""

Masks = list[list[int]] | None
Probabilities = Callable[[list[int], list[list[int]], Masks], list[list[float]]]


class Group(NamedTuple):
    """A prompt and some of its answers."""

    prompt: list[int]
    answers: list[list[int]]
    logps: list[list[float]]
    """Log-probabilities by who sampled."""
    ended: list[bool]
    masks: Masks = None
    """Which of their tokens were sampled; None: all."""


class Cause(NamedTuple):
    divergence: float
    """The suspects' divergence, if this is what happened."""
    words: str

    def explains(self, worst: float) -> bool:
        return self.divergence < worst / FITS


def prove(
    lines: list[dict[str, Any]],
    trainer: OpenFile,
    recipe: Recipe,
    others: Sequence[Path],
    number: int,
    sampler: str | None = None,
) -> None:
    """Compare what was sampled with the weights that are trained, and add to the lines of a round what `measure` does.

    Args:
        trainer: those weights; in another precision afterwards, if this raises.
        others: folders of models that may be served in their place.
        sampler: who sampled these lines, where the recipe names several.

    Raises:
        RecipeError: the divergence is above the recipe's bound, answers of a server are those of other weights, or
            tokens are none that the recipe's truncation leaves, or that the model has.
    """
    rounds = recipe.rounds
    assert rounds is not None
    sampler = sampler or rounds.sampler
    num_embeddings = trainer.model.get_input_embeddings().weight.shape[0]
    largest = max(token for line in lines for ids in line["completion_ids"] for token in ids)
    if largest >= num_embeddings:  # a GPU would end this process
        raise RecipeError(
            f"rounds.sampler is {sampler}, and it returned the token {largest}, but the model has {num_embeddings:,},"
            " from 0 on; it samples with another model"
        )
    num_left_out = measure(lines, trainer, rounds)
    check(lines, trainer, recipe, others, number, sampler)
    num_tokens = sum(len(logprobs) for line in lines for logprobs in line["trainer_logprobs"])
    if num_left_out > MOST_LEFT_OUT * num_tokens:
        settings = ", ".join(f"{name} {value:g}" for name, value in rounds.sampling.items())
        raise RecipeError(
            f"rounds.sampler is {sampler}: {num_left_out:,} of {num_tokens:,} tokens are none that {settings}"
            " leaves to sample from; it samples with other settings than it was asked for"
        )


def measure(lines: list[dict[str, Any]], trainer: OpenFile, rounds: RoundsSection) -> int:
    """Add `trainer_logprobs` to the lines of a round, and `sampled_logprobs` where a server did not say with which
    probabilities it drew. Returns the number of tokens that truncation would have left out."""
    num_left_out = 0
    for line in lines:
        by_trainer, drawn = [], []
        for i, (logits, tokens) in enumerate(
            trainer.logits(line["prompt_ids"], line["completion_ids"], line.get("completion_mask"))
        ):
            own = logps(logits, tokens)
            by_trainer.append(own.tolist())
            if not rounds.changes_distribution or "sampled_logprobs" in line:
                continue
            is_kept = truncate(logits, rounds).gather(-1, tokens[:, None]) > -torch.inf
            num_left_out += int((~is_kept).sum())
            kept = logps(truncate(logits, rounds, tokens), tokens)
            if "logprobs" in line:  # the sampler's own, so that only what truncation changes is taken from here
                kept = kept - own + torch.tensor(line["logprobs"][i], device=own.device)
            drawn.append(kept.clamp(max=0.0).tolist())
        line["trainer_logprobs"] = by_trainer
        if drawn:
            line["sampled_logprobs"] = drawn
    return num_left_out


def check(
    lines: list[dict[str, Any]], trainer: OpenFile, recipe: Recipe, others: Sequence[Path], number: int, sampler: str
) -> None:
    """Compare log-probabilities; see `prove`."""
    rounds = recipe.rounds
    assert rounds is not None
    divergences = sampler_divergence.of_answers(lines)
    if not divergences:
        say("  the sampler gives no log-probabilities, so kl_sampler_trainer is not measured", flush=True)
        return
    by_answer = [sampler_divergence.mean([answer]) for answer in divergences]
    limit, total = rounds.max_kl_sampler_trainer, sampler_divergence.mean(divergences)
    # In 16 bits rounding alone makes a worst answer differ by more than two rounds do.
    least = ROUNDING if recipe.compute_precision == "no" else limit
    suspects = _suspects(lines, by_answer)
    worst = sampler_divergence.mean([tokens for group in suspects for tokens in _divergences(group, trainer.logps)])
    if total <= limit and worst <= least:
        return
    causes = [*_of_weights(suspects, trainer, recipe, others)]
    if total > limit:
        causes += [*_of_settings(suspects, trainer, rounds), *_of_ends(suspects, trainer)]
        causes += _of_prompts(suspects, trainer)
    cause = min((cause for cause in causes if cause.explains(worst)), default=None)
    if total <= limit and cause is None:
        return
    words = (
        _of_precision(suspects, trainer, worst)
        if cause is None
        else (f"{cause.words}: with that, {worst:.2g} of its worst answers becomes {cause.divergence:.2g}")
    )
    num = sum(divergence > least for divergence in by_answer)
    depths = [f"{value:.2g} {name}" for name, value in _by_depth(lines)]
    mistake = [
        f"rounds.sampler is {sampler}: in round {number} kl_sampler_trainer is {total:.2g}"
        + (f", above rounds.max_kl_sampler_trainer {limit:g}" if total > limit else "")
        + (f"; by depth: {', '.join(depths)}" if depths else "")
    ]
    mistake += [f"  {words}", f"  asked for was {rounds_folder.weights_digest(trainer.folder)}, {trainer.folder}"]
    if num < len(by_answer):
        mistake.append(f"  {num:,} of {len(by_answer):,} answers are concerned: are there several servers that differ?")
    raise RecipeError(mistake)


def _by_depth(lines: list[dict[str, Any]]) -> list[tuple[str, float]]:
    key = f"{sampler_divergence.KL}_"
    metrics = sampler_divergence.metrics(lines)
    return [(name.removeprefix(key).replace("_", " "), value) for name, value in metrics.items() if key in name]


def _suspects(lines: list[dict[str, Any]], by_answer: Sequence[float]) -> list[Group]:
    places = [(k, i) for k, line in enumerate(lines) for i in range(len(line["completion_ids"]))]
    ranked = sorted(zip(by_answer, places, strict=True), reverse=True)[:NUM_SUSPECTS]
    ranked = [item for item in ranked if item[0] >= ranked[0][0] / FITS]
    keys = ("completion_ids", "logprobs", "ended", "completion_mask")
    return [
        Group(lines[k]["prompt_ids"], *([lines[k][key][i]] for key in keys if key in lines[k]))
        for _, (k, i) in sorted(ranked, key=repr)
    ]


def _divergences(group: Group, probabilities: Probabilities) -> list[list[float]]:
    by_other = probabilities(group.prompt, group.answers, group.masks)
    return [sampler_divergence.of_tokens(own, other) for own, other in zip(group.logps, by_other, strict=True)]


def _explain(suspects: list[Group], probabilities: Probabilities) -> float:
    return sampler_divergence.mean([tokens for group in suspects for tokens in _divergences(group, probabilities)])


def _of_weights(suspects: list[Group], trainer: OpenFile, recipe: Recipe, others: Sequence[Path]) -> Iterator[Cause]:
    for folder in others:
        with closing(OpenFile(folder, is_bf16=recipe.compute_precision == "bf16")) as other:
            yield Cause(_explain(suspects, other.logps), f"other weights were sampled with, those of {folder}")
            with _head_of(other, trainer):
                divergence = _explain(suspects, trainer.logps)
            yield Cause(divergence, f"these weights were sampled with, but for the head, which is that of {folder}")


@contextmanager
def _head_of(other: OpenFile, trainer: OpenFile) -> Iterator[None]:
    """The trainer with another's head, which a server may keep where it is tied to the embeddings."""
    own, others = (opened.model.get_output_embeddings() for opened in (trainer, other))
    if own is None or others is None or own.weight.shape != others.weight.shape:
        yield
        return
    weight = own.weight
    own.weight = others.weight
    try:
        yield
    finally:
        own.weight = weight


def _of_settings(suspects: list[Group], trainer: OpenFile, rounds: RoundsSection) -> Iterator[Cause]:
    if not rounds.changes_distribution:
        return

    def draw_logps(prompt: list[int], answers: list[list[int]], masks: Masks) -> list[list[float]]:
        pairs = trainer.logits(prompt, answers, masks)
        return [logps(truncate(logits, rounds, tokens), tokens).tolist() for logits, tokens in pairs]

    words = "its log-probabilities are those after temperature and truncation: let it return the model's own"
    yield Cause(_explain(suspects, draw_logps), f"{words} (vLLM: --logprobs-mode raw_logprobs)")


def _of_ends(suspects: list[Group], trainer: OpenFile) -> Iterator[Cause]:
    tokens = [
        answer[:-1] if ended else answer
        for group in suspects
        for answer, ended in zip(_divergences(group, trainer.logps), group.ended, strict=True)
    ]
    if any(tokens) and any(ended for group in suspects for ended in group.ended):
        yield Cause(sampler_divergence.mean(tokens), "it ends answers by another rule: without their end tokens")


def _of_prompts(suspects: list[Group], trainer: OpenFile) -> Iterator[Cause]:
    tokenizer = trainer.tokenizer
    begin, special = tokenizer.bos_token_id, {*tokenizer.all_special_ids}
    forms: dict[str, Callable[[list[int]], list[int]]] = {
        "without special tokens": lambda ids: [token for token in ids if token not in special],
        "without its first token": lambda ids: ids[1:],
    }
    if begin is not None:
        forms["with another begin token"] = lambda ids: [begin, *ids]
    for words, form in forms.items():
        if all(form(group.prompt) for group in suspects):
            changed = [group._replace(prompt=form(group.prompt)) for group in suspects]
            yield Cause(_explain(changed, trainer.logps), f"another template wrote the prompts, {words}")


def _of_precision(suspects: list[Group], trainer: OpenFile, worst: float) -> str:
    """The last words: that rounding in another precision is as large, or that nothing explains it."""
    own, before = trainer.model.dtype, [trainer.logps(group.prompt, group.answers, group.masks) for group in suspects]
    exact = [group._replace(logps=of_group) for group, of_group in zip(suspects, before, strict=True)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if dtype == own:
            continue
        for parameter in trainer.model.parameters():
            parameter.data = parameter.data.to(dtype)
        if (apart := _explain(exact, trainer.logps)) > worst / FITS:
            short = [str(name).removeprefix("torch.") for name in (dtype, own)]
            return f"it may compute in {short[0]}, and the trainer in {short[1]}: that alone makes {apart:.2g} of it"
    return (
        "neither other weights, settings, end tokens, prompts nor precision explain it; look at logprobs and"
        " trainer_logprobs"
    )
