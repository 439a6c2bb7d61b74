"""Samples answers with a model's folder, in this process. Imports torch."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from cookbook.commands.rounds.drawing import Drawing, logps
from cookbook.commands.rounds.prompt_rows import Prompt
from cookbook.commands.shared import generation
from cookbook.config.recipe import Recipe
from cookbook.config.sections import RoundsSection
from cookbook.facts.model_files import end_tokens
from cookbook.system.console import say
from cookbook.system.files import RecipeError, first_line
from cookbook.training.data.chat_template import ChatRequest, ChatTemplate, MissingDate, TemplateRefusal
from cookbook.training.models import language_model, tokenizer_files

PROBED_TOKENS = 8
TOKENS_AT_A_TIME = 8192
"""Tokens of prompts and answers in one forward that computes their log-probabilities."""
ALIKE = 0.2
"""Largest mean difference of logits, in their deviations, that counts as rounding: of tiny models in bf16 0.011
at most, and 0.37 or more where others changed what was computed. A deep mixture in bf16 may take another expert."""


class Answer(NamedTuple):
    ids: list[int]
    """With the end token, if it ended."""
    text: str
    """Without special tokens."""
    has_ended: bool
    logps: list[float] | None = None
    """Log-probability of each token at temperature 1 over the whole vocabulary, if who sampled it says so."""
    drawn_logps: list[float] | None = None
    """Log-probability of each token in the distribution that it was drawn from, if that is another."""
    seed: int = 0
    """The seed that it was drawn with, alone or beside others of its batch."""


def encode(prompts: Sequence[Prompt], folder: str, recipe: Recipe) -> list[list[int]]:
    """The token ids of each prompt: of messages as the chat template asks for an answer, of a text its own.

    Raises:
        RecipeError: prompts that leave too few tokens for an answer, or that the template refuses.
    """
    rounds = recipe.rounds
    assert rounds is not None
    tokenizer = tokenizer_files.load_tokenizer(folder, recipe.data.chat_template)
    language_model.load_config(folder, recipe.data.max_length)  # refuses more than the model has positions for
    most = recipe.data.max_length - rounds.max_completion_length
    encoded, mistakes = [], []
    template = ChatTemplate(tokenizer)
    for prompt in prompts:
        if isinstance(prompt.asked, list):
            _refuse_date(template, prompt)
        try:
            ids = _ids(prompt, tokenizer)
        except Exception as error:  # of the template, which is a program
            raise RecipeError(f"{prompt.place}: cannot be written as a prompt: {first_line(error)}") from None
        if len(ids) > most:
            mistakes.append(f"{prompt.place}: {len(ids)} tokens")
        encoded.append(ids)
    if mistakes:
        limits = f"data.max_length {recipe.data.max_length} less rounds.max_completion_length"
        what = f"{limits} {rounds.max_completion_length} leaves {most} tokens to a prompt"
        more = [f"... and {len(mistakes) - 5} more"] if len(mistakes) > 5 else []
        raise RecipeError([*mistakes[:5], *more, f"{what}; write other numbers, or leave these rows out"])
    return encoded


def _refuse_date(template: ChatTemplate, prompt: Prompt) -> None:
    """Refuse a template that prints today's date: rounds that go on another day would ask otherwise."""
    try:
        with contextlib.suppress(TemplateRefusal):  # which `encode` tells
            template.render(ChatRequest(prompt.asked, None, {}, (), prompt.place), prompt=True)  # type: ignore[arg-type]
    except MissingDate:
        raise RecipeError(
            f"{prompt.place}: the chat template prints today's date, so that rounds would depend on the day; name a"
            " copy of it with a date written out in data.chat_template"
        ) from None


def _ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    if isinstance(prompt.asked, list):
        return tokenizer.apply_chat_template(prompt.asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    ids = tokenizer(prompt.asked)["input_ids"]
    return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids


def answer_ends(settings: GenerationConfig, folder: Path, chat_template: str | None) -> list[int]:
    """The tokens that end an answer: by the model's folder, and the end of a turn of the chat template, which the
    folder of a base model does not name, while each export of a run does.
    """
    tokenizer = tokenizer_files.load_tokenizer(str(folder), chat_template)
    turn = tokenizer_files.end_of_turn(tokenizer)
    return sorted({*end_tokens(settings, tokenizer), *([] if turn is None else [turn])})


class OpenFile:
    """A model in this process; `close` gives its memory back."""

    def __init__(self, folder: Path, *, is_bf16: bool) -> None:
        """
        Args:
            is_bf16: whether it is trained in bf16, and so computes in it on a GPU.
        """
        opened = generation.open_model(folder)
        self.folder, self.model, self.tokenizer = folder, opened.model, opened.tokenizer
        if is_bf16 and self.model.device.type == "cuda":
            self.model.to(torch.bfloat16)

    def logits(
        self, prompt: list[int], answers: list[list[int]], masks: list[list[int]] | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each answer the logits at its tokens, (N, V), and the tokens, (N,); of a forward over the whole answers,
        as in training.

        Args:
            masks: of each answer 1 for a token that is asked about.
        """
        width, start, device = max(map(len, answers)), len(prompt) - 1, self.model.device
        size = max(1, TOKENS_AT_A_TIME // (len(prompt) + width))
        for first in range(0, len(answers), size):
            part = answers[first : first + size]
            ids = torch.tensor(
                [prompt + answer + answer[-1:] * (width - len(answer)) for answer in part], device=device
            )
            with torch.inference_mode():  # what is after an answer changes nothing in it
                logits = self.model(input_ids=ids).logits[:, start:-1]
            for i, (answer, row) in enumerate(zip(part, logits, strict=True), start=first):
                row, tokens = row[: len(answer)], torch.tensor(answer, device=device)
                is_asked = slice(None) if masks is None else torch.tensor(masks[i], device=device).bool()
                yield row[is_asked], tokens[is_asked]

    def logps(
        self, prompt: list[int], answers: list[list[int]], masks: list[list[int]] | None = None
    ) -> list[list[float]]:
        """Log-probabilities of the tokens of each answer, at temperature 1 over the whole vocabulary; for `masks` see
        `logits`."""
        return [logps(logits, tokens).tolist() for logits, tokens in self.logits(prompt, answers, masks)]

    def close(self) -> None:
        del self.model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Reference(OpenFile):
    """The model before the first round."""


class Sampler(OpenFile):
    """A model that samples."""

    def __init__(self, folder: Path, rounds: RoundsSection, *, is_bf16: bool, chat_template: str | None = None) -> None:
        """
        Args:
            chat_template: `data.chat_template`.
        """
        super().__init__(folder, is_bf16=is_bf16)
        self.rounds = rounds
        self.ends = answer_ends(self.model.generation_config, folder, chat_template)
        # Else what the folder proposes, a repetition penalty, say, would fill in what is not given here.
        self.model.generation_config = GenerationConfig()
        self.settings = GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=rounds.max_completion_length,
            eos_token_id=self.ends,
            pad_token_id=self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.ends[0],
        )

    def answers(
        self, prompts: list[list[int]], seed: int, count: int | None = None, places: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        """`count` answers to each prompt, by default `num_generations`, the same for the same seed, weights, machine
        and prompts.

        Args:
            places: as of `Servers.answers`; one model samples all.
        """
        self.count = self.settings.num_return_sequences = count or self.rounds.num_generations
        size = max(1, self.rounds.generation_batch_size // self.count)
        sampled: list[list[Answer]] = []
        group_of = self._grouping(prompts)
        for start in range(0, len(prompts), size):
            self.seed = seed + start
            torch.manual_seed(self.seed)
            part = prompts[start : start + size]
            groups: dict[int, list[int]] = {}
            for place, prompt in enumerate(part):
                groups.setdefault(group_of(place, prompt), []).append(place)
            answers: dict[int, list[Answer]] = {}
            for places in groups.values():
                answers |= zip(places, self.sample([part[place] for place in places]), strict=True)
            sampled += [answers[place] for place in range(len(part))]
            say(f"  {len(sampled):,} of {len(prompts):,} prompts", flush=True)
        return sampled

    def _grouping(self, prompts: list[list[int]]) -> Callable[[int, list[int]], int]:
        """The group of a prompt, given its place, such that beside its group it has the next tokens that it has alone.
        Some models' code takes padding into a state, as RecurrentGemma's, or mixes the states of a batch, as RWKV's.
        """
        short, long = min(prompts, key=len), max(prompts, key=len)
        alone = self._next_logits([short])
        if self._is_alike(alone, [short, long]):
            return lambda place, prompt: 0
        of_one_length = self._is_alike(alone, [short, short])
        what = "prompts of one length" if of_one_length else "one answer"
        say(f"  {what} at a time: others beside it change what the code of this model computes", flush=True)
        if of_one_length:
            return lambda place, prompt: len(prompt)
        # The copies of one prompt are a batch too, which this model's code would mix.
        self.settings.num_return_sequences = 1
        return lambda place, prompt: place

    def _next_logits(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        """Logits of the first prompt's next tokens, the most probable each time, each (vocabulary,) float32."""
        greedy = GenerationConfig(
            do_sample=False,
            max_new_tokens=PROBED_TOKENS,
            pad_token_id=self.settings.pad_token_id,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return [step[0].float() for step in self._generate(prompts, greedy).logits]

    def _is_alike(self, alone: list[torch.Tensor], prompts: list[list[int]]) -> bool:
        try:
            together = self._next_logits(prompts)
        except Exception:  # whatever a model's code raises, which the prompts together would raise as well
            return False
        for expected, other in zip(alone, together, strict=True):
            if not (expected - other).abs().mean() < ALIKE * expected.std():
                return False
            if expected.argmax() != other.argmax():  # two were nearly as probable, and what follows differs
                break
        return True

    def _generate(
        self, prompts: list[list[int]], settings: GenerationConfig, drawing: LogitsProcessor | None = None
    ) -> Any:
        width, pad = max(map(len, prompts)), self.settings.pad_token_id
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=self.model.device)
        mask = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=self.model.device
        )
        with torch.inference_mode():
            return self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=LogitsProcessorList([] if drawing is None else [drawing]),
            )

    def sample(self, prompts: list[list[int]]) -> list[list[Answer]]:
        width, each = max(map(len, prompts)), self.settings.num_return_sequences
        groups: list[list[Answer]] = [[] for _ in prompts]
        for _ in range(self.count // each):
            drawing = Drawing(self.rounds)
            sequences = self._generate(prompts, self.settings, drawing)
            rows = zip(sequences[:, width:].tolist(), drawing.of(sequences), strict=True)
            for i, (ids, of_tokens) in enumerate(rows):
                groups[i // each].append(self._answer(ids, of_tokens))
        return groups

    def _answer(self, ids: list[int], of_tokens: list[list[float]]) -> Answer:
        end = next((i for i, token in enumerate(ids) if token in self.ends), None)
        ids = ids if end is None else ids[: end + 1]
        by_model, drawn = map(list, zip(*of_tokens[: len(ids)], strict=True))
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        drawn_logps = drawn if self.rounds.changes_distribution else None
        return Answer(ids, text, end is not None, by_model, drawn_logps, self.seed)
