"""Scores answers with a reward model: a folder whose head gives a text one number. Imports torch."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cookbook.commands.rounds.prompt_rows import Prompt
from cookbook.commands.rounds.scoring import as_asked
from cookbook.config.sections import RoundsSection
from cookbook.facts.language_part import open_config
from cookbook.facts.score_head import is_scored
from cookbook.system.files import RecipeError, first_line
from cookbook.training.models import language_model, model_source, tokenizer_files
from cookbook.training.models.folder_facts import check_folder

KEY = "rounds.reward_funcs"


def check(name: str, prompt: Prompt) -> str:
    """The folder of a reward model, before anything is sampled.

    Raises:
        RecipeError: it is none, or has no chat template for prompts of messages.
    """
    folder = model_source.fetch_model(name, None, key=KEY)
    language_model.load_config(folder, 0, key=KEY)
    config, tokenizer = open_config(folder), tokenizer_files.load_tokenizer(folder, None)
    if not is_scored(config) or config.num_labels != 1:
        what = f"{config.num_labels} numbers" if is_scored(config) else "words"
        raise RecipeError(
            f"{KEY} has {name!r}, whose head gives {what}, not a reward; train one with objective: reward"
        )
    if not isinstance(prompt.asked, str) and tokenizer.chat_template is None:
        raise RecipeError(f"{KEY} has {name!r}, which has no chat template, and {prompt.place} has messages")
    check_folder(Path(folder), config, tokenizer)
    return folder


class RewardModel:
    """A reward model on its device; `close` gives its memory back."""

    def __init__(self, folder: str, rounds: RoundsSection, *, is_bf16: bool) -> None:
        """
        Args:
            is_bf16: whether it answers in bf16 on a GPU.
        """
        on_gpu = torch.cuda.is_available()
        self.folder, self.size = folder, rounds.generation_batch_size
        self.tokenizer = tokenizer_files.load_tokenizer(folder, None)
        dtype = torch.bfloat16 if is_bf16 and on_gpu else torch.float32
        self.model = language_model.open_language_model(folder, dtype=dtype).to("cuda" if on_gpu else "cpu").eval()
        language_model.check_finite(self.model, folder)
        if self.model.config.pad_token_id is None:
            self.size = 1  # transformers finds the end of a text by its padding, and refuses several without one

    def score(self, prompt: Prompt, answers: Sequence[str]) -> list[float]:
        """The number of each answer, at the end of prompt and answer as the reward model's own template writes them.

        Raises:
            RecipeError: a text that is longer than it has positions for, or that its template refuses.
        """
        rows = [self._ids(prompt, answer) for answer in as_asked(prompt, list(answers))]
        most = getattr(self.model.config, "max_position_embeddings", None)
        if most is not None and (longest := max(map(len, rows))) > most:
            raise RecipeError(f"{self.folder} has {most} positions, and {prompt.place} with an answer {longest} tokens")
        return [
            score for start in range(0, len(rows), self.size) for score in self._score(rows[start : start + self.size])
        ]

    def _ids(self, prompt: Prompt, answer: Any) -> list[int]:
        if isinstance(prompt.asked, str):
            ids = self.tokenizer(prompt.asked + answer)["input_ids"]
            end = self.tokenizer.eos_token_id
            return ids if end is None or ids[-1:] == [end] else [*ids, end]
        try:
            text = self.tokenizer.apply_chat_template([*prompt.asked, *answer], tokenize=False)
        except Exception as error:  # of the template, which is a program
            raise RecipeError(f"{prompt.place}: {self.folder}: {first_line(error)}") from None
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _score(self, rows: list[list[int]]) -> list[float]:
        width, pad, device = max(map(len, rows)), self.model.config.pad_token_id or 0, self.model.device
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
        with torch.inference_mode():
            return self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()

    def close(self) -> None:
        del self.model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
