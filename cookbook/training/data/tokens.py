"""Tokenizes rows into flat arrays of token ids with a label flag each, once per machine."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, zip_longest
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from cookbook.config import plugins
from cookbook.config.objectives import Objective, TooLong
from cookbook.config.sections import DataSection
from cookbook.facts import tokenizer_rules
from cookbook.facts.model_files import end_tokens, generation_settings
from cookbook.rows.row_checks import ENDED, LOGPROBS, Row
from cookbook.rows.row_kinds import BadRow, RowKind, kinds
from cookbook.system import lock, registry, signals
from cookbook.system.console import say
from cookbook.system.files import RecipeError
from cookbook.system.machine import num_cores
from cookbook.system.record_files import seal_of
from cookbook.training.data.encode import DEFAULT_KEYS, NUM_COMPARED, Encoder, LabelledIds, TextKeys
from cookbook.training.data.rows import BadRows, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 10  # of the cache files and of what `tokenize` makes of a row; a change makes old entries unused
ROWS_PER_TASK = 2048
MIN_ROWS_FOR_POOL = 20_000
"""A chat of 100 tokens takes 0.3 ms of one core, and processes take 3 s to start (measured on 2 cores)."""
LONGEST_COMPARED = 10_000
MAX_PROCESSES = 16
"""Each imports transformers, some 300 MB."""


class Remark(NamedTuple):
    """A remark on some rows, for the user."""

    words: str
    num_rows: int
    first: str
    """The first of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSet:
    """N samples of `group_size` sequences each, S = N * group_size in all, concatenated.

    Sequence i is `ids[offsets[i]:offsets[i + 1]]` and never empty. In pair i (group_size 2), sequence 2i is chosen and
    2i + 1 rejected. `len` is the number of samples.
    """

    ids: np.ndarray
    """int32"""
    is_label: np.ndarray
    """bool, aligned with `ids`: whether the position before learns to predict this token."""
    offsets: np.ndarray
    """int64 [S + 1]"""
    group_size: int = 1
    part_sizes: tuple[int, ...] = ()
    """Samples of each source, in order."""
    weights: tuple[float, ...] = ()
    """Number of times that an epoch shows each sample of each source; empty: once."""
    num_cut: int = 0
    """Rows longer than max_length that were truncated or split."""
    remarks: tuple[Remark, ...] = ()
    """Remarks on some rows, for the user."""
    row_lengths: np.ndarray | None = None
    """int64: tokens of each row in its longest sequence before truncation, of rows dropped for their length too."""
    values: np.ndarray | None = None
    """float64 [N]: a number for each sample, if its kind of row has one."""
    reference_logps: np.ndarray | None = None
    """float64 [S]: log-probability of the labels of each sequence under the reference model."""
    old_logps: np.ndarray | None = None
    """float64, a log-probability for each target of all sequences: when it was sampled."""
    sampled_logps: np.ndarray | None = None
    """The log-probabilities of targets in the distribution that they were drawn from, where that is not the model's."""
    token_reference_logps: np.ndarray | None = None
    """The log-probabilities of targets under the reference model. Rows may have both."""
    teacher_tokens: np.ndarray | None = None
    """int32 [targets, k]: a teacher's most probable tokens for each target."""
    teacher_logps: np.ndarray | None = None
    """float32 [targets, 1 + k]: its log-probabilities of all others together, and of these."""
    are_scored: bool = False
    """True if a label is where a sequence is scored, and not what the position before predicts."""
    target_counts: np.ndarray | None = None
    """`num_targets`, if it is known: counting takes 5 s for a million samples."""

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // self.group_size

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, int64 [S]."""
        return np.diff(self.offsets)

    @cached_property
    def num_targets(self) -> np.ndarray:
        """Positions of each sequence that carry loss, int64 [S]: labels, less a first token that nothing predicts."""
        if self.target_counts is not None:
            return self.target_counts
        starts = self.offsets[:-1]
        labels = np.add.reduceat(self.is_label, starts, dtype=np.int64)
        return labels if self.are_scored else labels - self.is_label[starts]

    @cached_property
    def target_ends(self) -> np.ndarray:
        """The end of each sequence's targets among all, int64 [S]."""
        return np.cumsum(self.num_targets)

    @property
    def given_logps(self) -> set[str]:
        """Names of the log-probabilities of each target that are there, of those in `LOGPROBS`."""
        return {name for name in LOGPROBS.values() if getattr(self, name) is not None}

    @property
    def epoch_sizes(self) -> list[int]:
        """Samples of each source that an epoch shows: its weight times its size, rounded, and at least one."""
        sizes = self.part_sizes or (len(self),)
        weights = self.weights or (1.0,) * len(sizes)
        return [size and max(1, int(size * weight + 0.5)) for size, weight in zip(sizes, weights, strict=True)]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of tokens, labels and boundaries."""
        digest = hashlib.sha256(f"{self.group_size} {self.part_sizes} {self.num_cut} ".encode())
        for array in (self.ids, self.is_label, self.offsets):
            digest.update(f"{array.dtype} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).data)
        for numbers in (self.values, *(getattr(self, name) for name in LOGPROBS.values())):
            if numbers is not None:
                digest.update(np.ascontiguousarray(numbers).data)
        return digest.hexdigest()


TokenArrays = tuple[np.ndarray, np.ndarray]
"""Ids (int32) and labels (bool) of a sequence that fits into max_length."""


def join(pieces: Iterable[TokenArrays], **fields: Any) -> TokenSet:
    """A token set of the sequences, with the other fields given."""
    ids, labels = zip(*pieces, strict=True)
    offsets = np.concatenate([[0], np.cumsum([len(sequence) for sequence in ids])]).astype(np.int64)
    return TokenSet(ids=np.concatenate(ids), is_label=np.concatenate(labels), offsets=offsets, **fields)


def ids_beyond(
    tokens: TokenSet, num_embeddings: int | None, tokenizer: "PreTrainedTokenizerBase", place: str
) -> list[str]:
    """The mistake of a set with a token that the model's embedding has no row for; of an unknown model none."""
    if num_embeddings is None or tokens.ids.max() < num_embeddings:
        return []
    first = int(np.argmax(tokens.ids >= num_embeddings))
    sample = (int(np.searchsorted(tokens.offsets, first, side="right")) - 1) // tokens.group_size
    token = int(tokens.ids[first])
    return [
        f"{place}: sample {sample} has token {token} ({tokenizer.convert_ids_to_tokens(token)}), but the model's"
        f" embedding has {num_embeddings:,} rows; take the tokenizer of this model, or leave those rows out"
    ]


def take(samples: Sequence[tuple[TokenSet, int]]) -> TokenSet:
    """A token set of the given samples, each as a token set and an index in it; all have values, or none."""
    group_size, pieces = samples[0][0].group_size, []
    for tokens, i in samples:
        for sequence in range(i * group_size, (i + 1) * group_size):
            start, end = tokens.offsets[sequence], tokens.offsets[sequence + 1]
            pieces.append((tokens.ids[start:end], tokens.is_label[start:end]))
    values = [tokens.values[i] for tokens, i in samples if tokens.values is not None]
    kinds_of = {"group_size": group_size, "are_scored": samples[0][0].are_scored}
    return join(pieces, values=np.array(values) if values else None, **kinds_of)


def tokenize(
    parts: Sequence[Rows],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    objective: Objective,
    bad_rows: BadRows,
    too_long: TooLong | None = None,
    keys: TextKeys = DEFAULT_KEYS,
    num_processes: int | None = None,
) -> TokenSet | None:
    """The token set of all parts, in order, or None if no row is left; rows without a target go to `bad_rows`.

    For the labels see `Encoder`. Sequences are truncated at the end to `max_length` tokens, the answers of a preference
    separately. Rows that are split become chunks that overlap by one token, the last target of one and the unlabelled
    first token of the next, so that each label but the first is a target once; a chunk without a target is left out.

    Args:
        too_long: `data.too_long`.
        keys: how texts become tokens.
        num_processes: workers for encoding; default: the machine's cores for many chats, whose templates are slow.

    Raises:
        RecipeError: a tokenizer or template that cannot be trained with.
    """
    pieces: list[TokenArrays] = []
    groups: list[Sequence[float]] = []
    logps: dict[str, list[Sequence[float]]] = {name: [] for name in LOGPROBS.values()}
    row_lengths: list[int] = []
    group_size, limit = len(objective.sequences), Limit(max_length, objective.long_rows(too_long))
    part_sizes, num_cut = [], 0
    remarks: dict[str, Remark] = {}
    encoder = Encoder(tokenizer, objective.labels, keys)
    tokenizer_rules.check_rows(tokenizer, (text for rows in parts for text in _first_texts(rows)))
    for rows in parts:
        num_before = len(pieces)
        kind = kinds()[rows.kind]
        for position, cut in enumerate(_cut_rows(rows, encoder, limit, objective, num_processes)):
            if isinstance(cut, BadRow):
                bad_rows.add(rows.where(position), cut)
                continue
            bad_rows.num_good += 1
            row_lengths.append(cut.length)
            if not cut.pieces:
                continue
            numbers = _numbers_of(kind, rows.rows[position], len(cut.pieces) // group_size)
            groups += [numbers] if numbers else []
            for name, numbers_of in cut.logps:
                logps[name] += numbers_of
            for words in (*cut.remarks, *objective.remarks(numbers)):
                before = remarks.get(words, Remark(words, 0, rows.where(position)))
                remarks[words] = before._replace(num_rows=before.num_rows + 1)
            pieces += cut.pieces
            num_cut += cut.length > max_length
        part_sizes.append(len(pieces) - num_before)
    if not pieces:
        return None
    sizes = tuple(size // group_size for size in part_sizes)
    # Values only if all sources have them.
    values = np.array(objective.values_of(groups)) if sum(map(len, groups)) == sum(sizes) else None
    fields: dict[str, Any] = {
        "values": values,
        "row_lengths": np.array(row_lengths),
        "remarks": tuple(remarks.values()),
    }
    fields |= {name: np.concatenate(values) for name, values in logps.items() if values}
    if objective.num_scores is not None:
        fields["are_scored"] = True
        pieces = [(ids, _at_the_end(ids, tokenizer.pad_token_id)) for ids, _ in pieces]
    return join(pieces, group_size=group_size, part_sizes=sizes, num_cut=num_cut, **fields)


def _first_texts(rows: Rows) -> Iterator[str]:
    """Texts of the rows at the beginning, of long ones the first characters."""
    values: list[Any] = [*islice(rows.rows, NUM_COMPARED)]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value[:LONGEST_COMPARED]
        elif isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value


def _at_the_end(ids: np.ndarray, pad_id: int | None) -> np.ndarray:
    """One label, where transformers reads the score: at the last token that is not padding (5.23, modeling_layers.py,
    GenericForSequenceClassification), though a tokenizer whose padding is its end token ends texts with that."""
    others = np.flatnonzero(ids != pad_id)
    return np.arange(len(ids)) == (others[-1] if len(others) else 0)


def _numbers_of(kind: RowKind, row: Row, num_samples: int) -> Sequence[float]:
    """A number for each sample of a row, or none."""
    if kind.values is not None:
        return kind.values(row)
    return [] if kind.value is None else [kind.value(row)] * num_samples


class Limit(NamedTuple):
    """The tokens of a sample, and what happens to longer rows."""

    max_length: int
    too_long: TooLong


class Cut(NamedTuple):
    """The token sequences that a row becomes."""

    pieces: list[TokenArrays]
    """Empty if it is dropped for its length."""
    length: int
    """Tokens of its longest sequence before."""
    remarks: tuple[str, ...] = ()
    logps: tuple[tuple[str, list[list[float]]], ...] = ()
    """The fields in `LOGPROBS` that the row has, for the targets of each piece."""


def _cut_rows(
    rows: Rows,
    encoder: Encoder,
    limit: Limit,
    objective: Objective,
    num_processes: int | None,
) -> Iterator[Cut | BadRow]:
    if num_processes is None:
        is_worth_it = kinds()[rows.kind].chats is not None and len(rows.rows) >= MIN_ROWS_FOR_POOL
        num_processes = min(num_cores(), MAX_PROCESSES) if is_worth_it else 1
    if num_processes == 1:
        kind = kinds()[rows.kind]
        ends = _end_tokens(encoder.tokenizer) if objective.masks_truncated else ()
        for row, encoded in zip(rows.rows, encoder.encode(rows), strict=True):
            if isinstance(encoded, BadRow):
                yield encoded
                continue
            count = len(encoded.sequences)
            masked = _truncation_flags(kind, row, ends) if objective.masks_truncated else [False] * count
            sequences = [
                (ids, [0] * len(labels) if is_masked else labels)
                for (ids, labels), is_masked in zip(encoded.sequences, masked, strict=True)
            ]
            cut = _cut(sequences, limit, objective, masked)
            for key in kind.logps:
                if not isinstance(cut, BadRow):
                    cut = _with_logps(cut, sequences, masked, row, key, has_them=key in rows.rows[0])
            remarks = (*encoded.remarks, *([CUT_OFF] if any(masked) else []))
            yield cut if isinstance(cut, BadRow) else cut._replace(remarks=remarks)
        return
    work = _Work(encoder.tokenizer, encoder.keys, limit, objective.model_dump(), registry.plugin_files())
    for task in _in_processes(work, _slices(rows), num_processes):
        if isinstance(task, RecipeError):
            raise task
        yield from task


CUT_OFF = "with answers that were cut off while sampling, which carry no loss"


def _end_tokens(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """The tokens that may be the last one of an answer that was not cut off; as TRL (1.16, trainer/grpo_trainer.py)
    padding too."""
    ends = end_tokens(generation_settings(Path(tokenizer.name_or_path)), tokenizer)
    return {*ends, *([] if tokenizer.pad_token_id is None else [tokenizer.pad_token_id])}


def _truncation_flags(kind: RowKind, row: Row, ends: Container[int]) -> list[bool]:
    """Return for each answer whether it was cut off: as the row says, else by its last token. A conversation whose last
    words are not the policy's had no room for its next turn."""
    answers = kind.tokens(row)[1] if kind.tokens is not None else []
    truncated = [not has_ended for has_ended in row.get(ENDED) or (ids[-1] in ends for ids in answers)]
    masks = kind.masks(row) or [[1]] * len(truncated)
    return [is_cut or not mask[-1] for is_cut, mask in zip(truncated, masks, strict=True)]


def _with_logps(
    cut: Cut, sequences: list[LabelledIds], masked: Sequence[bool], row: Row, key: str, *, has_them: bool
) -> Cut | BadRow:
    """The cut with log-probabilities, of which each trained token has one, and a masked answer has none.

    Args:
        has_them: whether the first row does.
    """
    if (key in row) != has_them:
        return BadRow(f"{key} in some rows only", f"the first row has {'some' if has_them else 'none'}, this not")
    of_answers = [[] if is_masked else given for given, is_masked in zip(row.get(key, ()), masked, strict=False)]
    for number, ((_, labels), given) in enumerate(zip(sequences, of_answers, strict=False), start=1):
        if (count := sum(labels[1:])) != len(given):
            seen = f"`{key}` {number} has {len(given)} for {count} trained tokens, the end of the turn included"
            return BadRow(f"{key} of another length", seen)
    kept = zip(cut.pieces, of_answers, strict=False)
    values = [given[: int(is_label[1:].sum())] for (_, is_label), given in kept]
    return cut._replace(logps=(*cut.logps, (LOGPROBS[key], values)))


def _slices(rows: Rows) -> Iterator[Rows]:
    for start in range(0, len(rows.rows), ROWS_PER_TASK):
        taken = rows.rows[start : start + ROWS_PER_TASK]
        numbers = rows.numbers or range(1, len(rows.rows) + 1)
        part = numbers[start : start + ROWS_PER_TASK]
        yield Rows(kind=rows.kind, rows=taken, place=rows.place, numbers=part, unread_keys=rows.unread_keys)


Task = list[Cut | BadRow] | RecipeError


@dataclass(frozen=True)
class _Work:
    """The work of a worker process on a slice of rows. To torch's loader it is a data set, indexed by slices."""

    tokenizer: "PreTrainedTokenizerBase"
    keys: TextKeys
    limit: Limit
    objective_keys: dict[str, Any]
    plugin_files: list[str]
    """A worker could not unpickle an objective that they define."""

    @cached_property
    def objective(self) -> Objective:
        plugins.use(self.plugin_files)
        return Objective.model_validate(self.objective_keys)

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.tokenizer, self.objective.labels, self.keys)

    def __getitem__(self, rows: Rows) -> Task:
        try:
            return list(_cut_rows(rows, self.encoder, self.limit, self.objective, num_processes=1))
        except RecipeError as error:  # raised, the loader would call its class with a text
            return error


def _in_processes(work: _Work, slices: Iterator[Rows], num_processes: int) -> Iterator[Task]:
    """The task of each slice, in order, with two slices under way in each process.

    torch's loader notices a killed worker by SIGCHLD, even one in the middle of a result. `ProcessPoolExecutor` would
    wait without end for the rest of that result (Python 3.11), and multiprocessing.Pool for the task.
    """
    from torch import Generator
    from torch.utils.data import DataLoader

    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of the tokenizer's threads
    reader, writer = context.Pipe(duplex=False)
    loader: DataLoader[Task] = DataLoader(
        work,  # type: ignore[arg-type]
        sampler=slices,  # type: ignore[arg-type]
        batch_size=None,
        num_workers=num_processes,
        collate_fn=_pass_on,
        worker_init_fn=partial(_start_worker, reader),
        multiprocessing_context=context,
        generator=Generator(),  # not the global one, which it would advance
    )
    # Masked signals stay so in a new process: what a terminal or a scheduler sends to a whole group is for this one to
    # answer. The tracker's start unblocks SIGINT.
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, signals.HANDLED)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, signals.HANDLED)
        tasks = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
        reader.close()
    try:
        yield from tasks
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise RuntimeError("a tokenizing process was killed, perhaps as memory ran out") from error
    finally:
        writer.close()
        tasks._shutdown_workers()  # type: ignore[attr-defined]
        for thread in threading.enumerate():  # one cut off amid freeing a semaphore makes the tracker report a leak
            if thread.name == "QueueFeederThread":
                thread.join()


def _pass_on(task: Task) -> Task:
    return task


def _start_worker(parent: Connection, _: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are taken by the other workers
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: Connection) -> None:
    """Ends this process when the parent ends or closes its end of the pipe, even amid a slice or a result."""
    parent.poll(None)
    os._exit(0)  # to the loader, any other code is a failure


def _cut(sequences: list[LabelledIds], limit: Limit, objective: Objective, masked: Sequence[bool]) -> Cut | BadRow:
    """The pieces of a row's sequences, of which those that are masked need no label."""
    max_length, too_long = limit
    length = max(len(ids) for ids, _ in sequences)
    is_long = length > max_length
    if is_long and too_long == "drop":
        return Cut([], length)
    if is_long and too_long == "error":
        remedy = "raise it, or write data.too_long: cut, drop or split"
        return BadRow("row longer than data.max_length", f"{length:,} tokens, where that is {max_length}; {remedy}")
    if too_long == "split":
        ((ids, labels),) = sequences
        starts = range(0, max(1, len(ids) - 1), max_length - 1)
        pieces = [_piece(ids[start : start + max_length], labels[start : start + max_length]) for start in starts]
        for _, is_label in pieces[1:]:
            is_label[0] = False
        pieces = [piece for piece in pieces if piece[1][1:].any()]
    else:
        pieces = [_piece(ids[:max_length], labels[:max_length]) for ids, labels in sequences]
    cut = f"{length:,} tokens cut to data.max_length {max_length}; raise it, or write data.too_long: drop"
    # An error by default, not a row less: to raise max_length, or to leave the row out, is the user's decision.
    first = 1 if objective.num_scores is None else 0  # no position predicts a first token, but one may be scored
    have_target = [is_label[first:].any() for _, is_label in pieces]
    if not pieces or not all(any(pair) for pair in zip_longest(have_target, masked)):
        return BadRow("no trained token after truncation", cut) if is_long else BadRow("no trained token")
    if len(objective.sequences) > 1 and all(np.array_equal(pieces[0][0], ids) for ids, _ in pieces[1:]):
        names = " and ".join(objective.sequences)
        return BadRow(f"{names} are the same after truncation", cut)
    return Cut(pieces, length)


def _piece(ids: list[int], labels: list[int]) -> TokenArrays:
    return np.array(ids, dtype=np.int32), np.array(labels, dtype=bool)


def cached_tokens(
    parts: Sequence[Rows],
    tokenizer: "PreTrainedTokenizerBase",
    data: DataSection,
    objective: Objective,
    *,
    cache: Path,
    place: str,
) -> tuple[TokenSet, dict[str, int]]:
    """The token set, and the number of rows dropped by reason; cached, and read from there as memory maps.

    Any number of processes may call at once, before there is a process group: one of them works, the others wait for
    a file lock. A damaged entry is replaced.

    Raises:
        RecipeError: as `tokenize`; with on_bad_row "error", all rows that have nothing to train on; no row left.
    """
    keys = TextKeys.of(data)
    made_from = {
        "format": FORMAT_VERSION,
        "rows": [rows.fingerprint for rows in parts],
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "max_length": data.max_length,
        "objective": objective.name,
        "train_on": objective.labels,
        "on_bad_row": data.on_bad_row,
        "too_long": objective.long_rows(data.too_long),
        "keys": json.loads(json.dumps(keys, default=str)),
    }
    if any(rows.unread_keys for rows in parts):  # which a template may refuse
        made_from["unread_keys"] = [[*rows.unread_keys] for rows in parts]
    if objective.settings_of_values:
        made_from["values"] = [getattr(objective, key) for key in objective.settings_of_values]
    if objective.masks_truncated:
        made_from["ends"] = sorted(_end_tokens(tokenizer))
    if objective.num_scores is not None:
        made_from["padding"] = tokenizer.pad_token_id
    if files := registry.plugin_files():
        made_from["plugins"] = plugins.digest(files)
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    folder = cache / f"tokens-{key[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    with lock.making(folder.with_suffix(".lock")):
        entry = load_entry(folder, made_from)
        if entry is not None:
            return entry
        bad_rows = BadRows()
        tokens = tokenize(
            parts,
            tokenizer,
            max_length=data.max_length,
            too_long=data.too_long,
            keys=keys,
            objective=objective,
            bad_rows=bad_rows,
        )
        bad_rows.stop_if(data.on_bad_row)
        if tokens is None:
            why = bad_rows.mistakes() or [f"All rows are longer than data.max_length {data.max_length}; raise it"]
            raise RecipeError([f"{place}: no row left to train on", *why])
        num_dropped = dict(bad_rows.num_by_reason)
        try:
            save_entry(folder, tokens, {"made_from": made_from, "num_dropped": num_dropped})
        except OSError as error:
            shutil.rmtree(folder.with_suffix(".unfinished"), ignore_errors=True)
            say(f"{folder} could not be written: {error}; these tokens stay in memory", file=sys.stderr)
        return load_entry(folder, made_from) or (tokens, num_dropped)


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """SHA-256 of everything that determines the tokens of a text, chat template included."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("truncation", "padding"):  # left behind by the last call; every call sets them
        backend.pop(state, None)
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, sorted(tokenizer.all_special_ids)]
    text = json.dumps([backend, tokenizer.chat_template, special], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


ARRAYS = ("ids", "is_label", "offsets")
OPTIONAL_ARRAYS = ("values", "row_lengths", "target_counts", *LOGPROBS.values())
META_FIELDS = ("group_size", "part_sizes", "num_cut", "remarks", "are_scored")


def save_entry(folder: Path, tokens: TokenSet, meta: dict[str, Any]) -> None:
    """Write an entry of the cache atomically. The caller holds the lock."""
    unfinished = folder.with_suffix(".unfinished")
    for leftover in (unfinished, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir()
    tokens, digests = replace(tokens, target_counts=tokens.num_targets), {}
    for name in (*ARRAYS, *OPTIONAL_ARRAYS):
        if (array := getattr(tokens, name)) is not None:
            np.save(unfinished / f"{name}.npy", array)
            digests[name] = digest_of(array)
    meta |= {name: getattr(tokens, name) for name in (*META_FIELDS, "fingerprint")} | {"digests": digests}
    meta["seal"] = seal_of(meta)
    (unfinished / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    unfinished.rename(folder)


def digest_of(array: np.ndarray) -> str:
    """XXH3 of its elements, 128 bits."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data)


def load_entry(folder: Path, made_from: dict[str, Any]) -> tuple[TokenSet, dict[str, int]] | None:
    """An entry of the cache, or None if it is missing or damaged."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        fields = {name: meta[name] for name in META_FIELDS} | {"part_sizes": tuple(meta["part_sizes"])}
        fields["remarks"] = tuple(Remark(*remark) for remark in meta["remarks"])
        if meta["made_from"] != made_from or meta["seal"] != seal_of(meta):
            return None
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in meta["digests"]}
        if any(digest_of(array) != meta["digests"][name] for name, array in arrays.items()):
            return None
        tokens = TokenSet(**arrays, **fields)
        vars(tokens)["fingerprint"] = meta["fingerprint"]  # what the cached property would compute, in 15 times as long
        return tokens, meta["num_dropped"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError):
        return None
