"""The pass of a teacher over the data, before there is a student: its answers for each target, kept in the cache."""

import gc
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cookbook.config.objectives import Question
from cookbook.config.objectives.forward import INPUTS, Logits
from cookbook.config.recipe import Recipe
from cookbook.config.sections import ModelSection
from cookbook.system.files import RecipeError
from cookbook.training.data import batches
from cookbook.training.data.answers import AnswersFile, load_answers
from cookbook.training.data.sets import TokenSets
from cookbook.training.data.stream import Stream
from cookbook.training.data.tokens import TokenSet
from cookbook.training.engine import Engine
from cookbook.training.engine.collectives import to_device
from cookbook.training.models import language_model
from cookbook.training.models.vocabulary import common_rows

FORMAT = 1
KEY = "objective.teacher"


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A teacher that fits the student, before its weights are read."""

    folder: str
    asked: Question
    num_tokens: int
    """Number of tokens that it and the student both score."""


@dataclass(frozen=True)
class LikeliestTokens:
    """A function of a teacher's logits: (L, 1 + k) float32, the log-probability of all tokens together that are not
    among the most probable ones, -inf where there are none, and of these, the highest first; and (L, k) int32, these
    tokens.
    """

    asked: Question
    num_tokens: int
    """Tokens from this number on do not count: the student has none of them."""
    reported = ("tokens",)

    def __call__(self, logits: Logits, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        tempered = logits.whole()[:, : self.num_tokens] / self.asked.temperature
        values, tokens = tempered.topk(self.asked.top_k, 1)
        rest = tempered.scatter_(1, tokens, -torch.inf).logsumexp(1, keepdim=True)
        apart = torch.cat([rest, values], 1)
        return apart - apart.logsumexp(1, keepdim=True), tokens.int()


def find_teacher(asked: Question, folder: str, tokenizer: Any, num_rows: int | None, max_length: int) -> Teacher:
    """Compare the teacher's files with the student's, before weights are read; raises as `common_rows`.

    Args:
        folder: of the teacher.
        tokenizer, num_rows: of the student, and of its embedding.
    """
    config = language_model.load_config(folder, max_length, key=KEY)
    rows = common_rows(Path(folder), config, asked, tokenizer, num_rows)
    return Teacher(folder=folder, asked=asked, num_tokens=rows)


def with_answers(
    data: TokenSets,
    teacher: Teacher,
    digest: str,
    recipe: Recipe,
    pad_id: int,
    engine: Engine,
    *,
    cache: Path,
    notes: list[str],
) -> TokenSets:
    """Token sets with `teacher_tokens` and `teacher_logps`, cached or asked for. Every rank must call, before there is
    a student, whose memory the teacher has until this returns.

    Each rank asks about a part of the samples, whatever the strategy, so that answers depend on none. Each machine
    keeps a file of its own.

    Args:
        digest: of the teacher's weights.
        notes: receives a note for the user.

    Raises:
        RecipeError: on every rank: a disk without room, or a teacher whose answers are not finite.
    """
    asked = teacher.asked
    key = [FORMAT, digest, asked.top_k, asked.temperature, teacher.num_tokens, str(engine.low_dtype)]
    layout = batches.Layout(
        num_ranks=engine.world.num_processes,
        rank=engine.world.rank,
        pad_id=pad_id,
        micro_batch_size=recipe.batch.micro_batch_size,
        micro_batch_tokens=recipe.batch.micro_batch_tokens,
    )
    opened: list[Any] = []

    def ask_teacher(tokens: TokenSet | Stream) -> TokenSet:
        assert isinstance(tokens, TokenSet), "a teacher cannot be asked about a stream"
        name = hashlib.sha256(json.dumps([tokens.fingerprint, *key]).encode()).hexdigest()[:16]
        path, size = cache / f"teacher-{name}.safetensors", int(tokens.num_targets.sum())
        answers = load_answers(path, size, asked.top_k)
        if not engine.collectives.all_true(answers is not None) or answers is None:
            if not opened:
                opened.append(_open(teacher.folder, engine))
            began = time.monotonic()
            _ask(opened[0], tokens, layout, teacher, engine, path)
            took = f"{size:,} tokens in {time.monotonic() - began:.1f} s"
            notes.append(f"the teacher answered for {took}: {path}, {path.stat().st_size / 1e6:,.1f} MB")
            answers = load_answers(path, size, asked.top_k)
            assert answers is not None, f"{path} is not what was written"
        return replace(tokens, teacher_tokens=answers[0], teacher_logps=answers[1])

    evals = {name: ask_teacher(tokens) for name, tokens in data.eval.items()}
    answered_data = replace(data, train=ask_teacher(data.train), eval=evals)
    if opened:
        opened.clear()
        gc.collect()
        if engine.device.type == "cuda":
            torch.cuda.empty_cache()
    return answered_data


def _open(folder: str, engine: Engine) -> Any:
    """The whole teacher on this process's device, in the dtype of forwards."""
    with engine.apart():
        model = language_model.load_model(
            folder,
            ModelSection(name_or_path=folder),
            packing=False,
            dtype=engine.low_dtype or torch.float32,
            device_map={"": engine.device},
        )
    return model.requires_grad_(False).eval()


@torch.no_grad()
def _ask(model: Any, tokens: TokenSet, layout: batches.Layout, teacher: Teacher, engine: Engine, path: Path) -> None:
    """Write the answers for all targets; collective."""
    asked, problem = teacher.asked, ""
    file = None
    try:
        if engine.world.local_rank == 0:
            file = AnswersFile(path, int(tokens.num_targets.sum()), asked.top_k)
    except OSError as error:
        problem = f"{path} could not be written: {error}"
    _agree(problem, engine)
    likeliest = LikeliestTokens(asked, teacher.num_tokens)
    is_finite = True
    for number, (batch, targets) in enumerate(batches.batches_of_targets(tokens, layout)):
        engine.beat(f"teacher batch {number + 1}", 0)
        inputs = {name: batch[name] for name in INPUTS if name in batch and name != "targets"}
        logps, best = model(**engine.on_device(inputs), function=likeliest)
        is_finite &= not bool(logps.isnan().any())
        for part in _of_all_ranks(to_device(targets, engine.device), best, logps, engine):
            if file is not None:
                file.put(*part)
    bad = f"{KEY} is {asked.teacher!r}: its log-probabilities are not finite in {engine.mixed_precision}"
    if not is_finite and file is not None:
        file.discard()
    _agree("" if is_finite else f"{bad}; write mixed_precision: bf16, or no", engine)
    if file is not None:
        file.finish()
    _agree("", engine)  # the file is there


def _agree(problem: str, engine: Engine) -> None:
    """
    Raises:
        RecipeError: on every rank, after the process group has ended, if one has a problem.
    """
    problems = sorted({*filter(None, engine.collectives.gather_texts(problem))})
    if problems:
        engine.close()
        raise RecipeError(problems)


def _of_all_ranks(
    targets: torch.Tensor, tokens: torch.Tensor, logps: torch.Tensor, engine: Engine
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Numbers of targets, tokens and log-probabilities of each rank's batch."""
    if not dist.is_initialized():
        yield targets.cpu().numpy(), tokens.cpu().numpy(), logps.cpu().numpy()
        return
    counts = engine.collectives.all_gather(len(targets))[:, 0].astype(int)
    gathered = []
    for tensor in (targets[:, None], tokens, logps):
        padded = tensor.new_zeros(max(counts), tensor.shape[1])
        padded[: len(tensor)] = tensor
        buffer = padded.new_empty(len(counts) * len(padded), tensor.shape[1])
        dist.all_gather_into_tensor(buffer, padded)
        gathered.append(buffer.cpu().numpy().reshape(len(counts), len(padded), -1))
    for rank, count in enumerate(counts):
        numbers, best, values = (array[rank, :count] for array in gathered)
        yield numbers[:, 0], best, values
