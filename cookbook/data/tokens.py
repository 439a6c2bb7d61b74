"""Turns rows into token ids with a label flag each, in flat arrays, once per machine."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cookbook import lock, plugins, registry
from cookbook.data.encode import encode
from cookbook.data.rows import BadRows, OnBadRow, Rows
from cookbook.files import RecipeError
from cookbook.machine import num_cores
from cookbook.objectives import Objective
from cookbook.row_kinds import BadRow, kinds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 2  # of the cache files and of what `tokenize` makes of a row; a change makes old entries unused
ROWS_PER_TASK = 2048
MIN_ROWS_FOR_POOL = 20_000
"""A chat of 100 tokens takes 0.3 ms of one core, and processes take 3 s to start (measured on 2 cores)."""
MAX_PROCESSES = 16
"""Each imports transformers, some 300 MB."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSet:
    """N samples of `group_size` sequences each, S = N * group_size in all, one after the other.

    Sequence i is `ids[offsets[i]:offsets[i + 1]]` and is never empty. Of pair i (group_size 2), sequence 2i is chosen
    and 2i + 1 rejected. `len` is the number of samples.
    """

    ids: np.ndarray
    """int32"""
    is_label: np.ndarray
    """bool, aligned with `ids`: the token that the position before it learns to predict."""
    offsets: np.ndarray
    """int64 [S + 1]"""
    group_size: int = 1
    part_sizes: tuple[int, ...] = ()
    """Samples of each source, in order."""
    weights: tuple[float, ...] = ()
    """How often an epoch shows each sample of each source; none: once."""
    num_cut: int = 0
    """Rows longer than max_length: cut there, or for cpt split."""
    values: np.ndarray | None = None
    """float64 [N]: a number of each sample, where its kind of row has one."""
    reference_logps: np.ndarray | None = None
    """float64 [S]: log-probability of the labels of each sequence under the reference model."""

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // self.group_size

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, int64 [S]."""
        return np.diff(self.offsets)

    @cached_property
    def num_targets(self) -> np.ndarray:
        """Positions of each sequence that carry loss, int64 [S]: labels, less a first token that nothing predicts."""
        starts = self.offsets[:-1]
        return np.add.reduceat(self.is_label, starts, dtype=np.int64) - self.is_label[starts]

    @property
    def epoch_sizes(self) -> list[int]:
        """Samples of each source that an epoch shows: its weight times its size, rounded, and at least one."""
        sizes = self.part_sizes or (len(self),)
        weights = self.weights or (1.0,) * len(sizes)
        return [size and max(1, int(size * weight + 0.5)) for size, weight in zip(sizes, weights, strict=True)]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens, and of how they belong together."""
        digest = hashlib.sha256(f"{self.group_size} {self.part_sizes} {self.num_cut} ".encode())
        for array in (self.ids, self.is_label, self.offsets):
            digest.update(f"{array.dtype} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).data)
        if self.values is not None:
            digest.update(np.ascontiguousarray(self.values).data)
        return digest.hexdigest()


Piece = tuple[np.ndarray, np.ndarray]
"""Ids (int32) and labels (bool) of a sequence that fits into max_length."""


def join(pieces: Iterable[Piece], **fields: Any) -> TokenSet:
    """The sequences as a token set, with the other fields given."""
    ids, labels = zip(*pieces, strict=True)
    offsets = np.concatenate([[0], np.cumsum([len(sequence) for sequence in ids])]).astype(np.int64)
    return TokenSet(ids=np.concatenate(ids), is_label=np.concatenate(labels), offsets=offsets, **fields)


def take(samples: Sequence[tuple[TokenSet, int]]) -> TokenSet:
    """Samples of token sets, given by their numbers there, as a set of their own; all with values, or none."""
    group_size, pieces = samples[0][0].group_size, []
    for tokens, i in samples:
        for sequence in range(i * group_size, (i + 1) * group_size):
            start, end = tokens.offsets[sequence], tokens.offsets[sequence + 1]
            pieces.append((tokens.ids[start:end], tokens.is_label[start:end]))
    values = [tokens.values[i] for tokens, i in samples if tokens.values is not None]
    return join(pieces, group_size=group_size, values=np.array(values) if values else None)


def tokenize(
    parts: Sequence[Rows],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    objective: Objective,
    bad_rows: BadRows,
    num_processes: int | None = None,
) -> TokenSet | None:
    """The token set of all parts, in their order, or None if no row is left; rows without a target go to `bad_rows`.

    `encode` tells the labels. Sequences are cut at the end to `max_length` tokens, each answer of a preference for
    itself. An objective that splits rows gets pieces that overlap by one token: it is the last target of one piece
    and the unlabelled first token of the next, so that each token but the first of all is a target once.

    Args:
        num_processes: to encode with; default: the cores of the machine for many chats, whose templates are slow.

    Raises:
        RecipeError: a tokenizer or template that cannot be trained with.
    """
    pieces: list[Piece] = []
    values: list[float] = []
    group_size = len(objective.sequences)
    part_sizes, num_cut = [], 0
    for rows in parts:
        num_before = len(pieces)
        value_of = kinds()[rows.kind].value
        for position, cut in enumerate(_cut_rows(rows, tokenizer, max_length, objective, num_processes)):
            if isinstance(cut, BadRow):
                bad_rows.add(rows.where(position), cut)
                continue
            pieces += cut[0]
            num_cut += cut[1]
            if value_of is not None:
                values += [value_of(rows.rows[position])] * (len(cut[0]) // group_size)
        part_sizes.append(len(pieces) - num_before)
    if not pieces:
        return None
    sizes = tuple(size // group_size for size in part_sizes)
    # Of sources of which only some have values, none has.
    numbers = np.array(values) if len(values) == sum(sizes) else None
    return join(pieces, group_size=group_size, part_sizes=sizes, num_cut=num_cut, values=numbers)


Cut = tuple[list[Piece], bool]
"""What a row becomes, and whether it was too long."""


def _cut_rows(
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    objective: Objective,
    num_processes: int | None,
) -> Iterator[Cut | BadRow]:
    if num_processes is None:
        is_worth_it = kinds()[rows.kind].chats is not None and len(rows.rows) >= MIN_ROWS_FOR_POOL
        num_processes = min(num_cores(), MAX_PROCESSES) if is_worth_it else 1
    if num_processes == 1:
        for encoded in encode(rows, tokenizer, objective.labels):
            yield encoded if isinstance(encoded, BadRow) else _cut(encoded, max_length, objective)
        return
    described = objective.model_dump(), registry.plugin_files()
    for task in _spread(_slices(rows), num_processes, (tokenizer, max_length, *described)):
        if isinstance(task, RecipeMistakes):
            raise RecipeError(task.mistakes)
        yield from task


def _slices(rows: Rows) -> Iterator[Rows]:
    for start in range(0, len(rows.rows), ROWS_PER_TASK):
        taken = rows.rows[start : start + ROWS_PER_TASK]
        numbers = rows.numbers or range(1, len(rows.rows) + 1)
        yield Rows(kind=rows.kind, rows=taken, place=rows.place, numbers=numbers[start : start + ROWS_PER_TASK])


@dataclass(frozen=True)
class RecipeMistakes:
    """A RecipeError on its way between processes."""

    mistakes: list[str]


Settings = tuple["PreTrainedTokenizerBase", int, dict[str, Any], list[str]]
"""With the objective's keys, and the plugins that it may come from: a worker could not unpickle what they define."""
Task = list[Cut | BadRow] | RecipeMistakes


def _spread(slices: Iterator[Rows], num_processes: int, settings: Settings) -> Iterator[Task]:
    """What the processes make of each slice, in order.

    Each has a pipe of its own and shares no lock. With multiprocessing.Pool the parent waits without end once a worker
    is killed, for its task or for the lock that it held: after a SIGTERM to the whole group every other time.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of the tokenizer's threads
    workers: list[tuple[Any, Connection]] = []
    busy: deque[tuple[Any, Connection]] = deque()
    try:
        resource_tracker.ensure_running()  # at the first start otherwise, and it unblocks SIGINT
        # Masked signals stay so in a new process: what a terminal or a scheduler sends to a whole group is for this one
        # to answer. SIGTERM ends a worker.
        earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})
        try:
            for _ in range(num_processes):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
                process.start()
                theirs.close()
                workers.append((process, ours))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
        for (process, connection), rows in zip(workers, slices, strict=False):
            connection.send(rows)
            busy.append((process, connection))
        while busy:
            process, connection = busy.popleft()
            task = connection.recv()
            if (following := next(slices, None)) is not None:
                connection.send(following)
                busy.append((process, connection))
            yield task
    except (EOFError, BrokenPipeError, ConnectionResetError):
        process.join()
        raise RuntimeError(
            f"a tokenizing process ended with {process.exitcode}; -9 may be for want of memory"
        ) from None
    finally:
        for process, connection in workers:
            process.terminate()
            connection.close()
        for process, _ in workers:
            process.join()


def _serve(connection: Connection, settings: Settings) -> None:
    """The life of a worker: slices in, what becomes of them out, until its parent is gone."""
    _start_worker()
    tokenizer, max_length, keys, files = settings
    plugins.use(files)
    objective = Objective.model_validate(keys)
    try:
        while True:
            connection.send(_work(connection.recv(), tokenizer, max_length, objective))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are taken by the other workers
    # The parent ends its workers by this signal, which the program that they import anew may handle in its own way.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _work(rows: Rows, tokenizer: "PreTrainedTokenizerBase", max_length: int, objective: Objective) -> Task:
    try:
        return list(_cut_rows(rows, tokenizer, max_length, objective, num_processes=1))
    except RecipeError as error:
        return RecipeMistakes(error.mistakes)


def _cut(sequences: list[tuple[list[int], list[int]]], max_length: int, objective: Objective) -> Cut | BadRow:
    is_long = any(len(ids) > max_length for ids, _ in sequences)
    if objective.splits_rows:
        ((ids, labels),) = sequences
        starts = range(0, max(1, len(ids) - 1), max_length - 1)
        pieces = [_piece(ids[start : start + max_length], labels[start : start + max_length]) for start in starts]
        for _, is_label in pieces[1:]:
            is_label[0] = False
    else:
        pieces = [_piece(ids[:max_length], labels[:max_length]) for ids, labels in sequences]
    if not all(is_label[1:].any() for _, is_label in pieces):
        return BadRow("no trained token after truncation", f"cut to data.max_length {max_length}")
    if len(sequences) > 1 and all(np.array_equal(pieces[0][0], ids) for ids, _ in pieces[1:]):
        names = " and ".join(objective.sequences)
        return BadRow(f"{names} are the same after truncation", f"cut to data.max_length {max_length}")
    return pieces, is_long


def _piece(ids: list[int], labels: list[int]) -> Piece:
    return np.array(ids, dtype=np.int32), np.array(labels, dtype=bool)


def cached_tokens(
    parts: Sequence[Rows],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    cache: Path,
    max_length: int,
    objective: Objective,
    on_bad_row: OnBadRow,
    place: str,
) -> tuple[TokenSet, dict[str, int]]:
    """The token set, and how many rows were dropped, by reason; kept under `cache` and read from there as memory maps.

    Any number of processes may call at once, before there is a process group: one of them works, the others wait for
    a file lock. An entry whose content does not match its own hash is made anew.

    Raises:
        RecipeError: as `tokenize`; with on_bad_row "error", all rows that have nothing to train on; no row left.
    """
    made_from = {
        "format": FORMAT_VERSION,
        "rows": [rows.fingerprint for rows in parts],
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "max_length": max_length,
        "objective": objective.name,
        "train_on": objective.labels,
        "on_bad_row": on_bad_row,
    }
    if files := registry.plugin_files():
        made_from["plugins"] = plugins.digest(files)
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    folder = cache / f"tokens-{key[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    with lock.making(folder.with_suffix(".lock")):
        found = _load(folder, made_from)
        if found is not None:
            return found
        bad_rows = BadRows()
        tokens = tokenize(parts, tokenizer, max_length=max_length, objective=objective, bad_rows=bad_rows)
        bad_rows.stop_if(on_bad_row)
        if tokens is None:
            raise RecipeError([f"{place}: no row left to train on", *bad_rows.mistakes()])
        num_dropped = dict(bad_rows.num_by_reason)
        try:
            _save(folder, tokens, {"made_from": made_from, "num_dropped": num_dropped})
        except OSError as error:
            shutil.rmtree(folder.with_suffix(".unfinished"), ignore_errors=True)
            print(f"{folder} could not be written: {error}; these tokens stay in memory", file=sys.stderr)
        return _load(folder, made_from) or (tokens, num_dropped)


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """SHA-256 of what decides which tokens a text becomes, chat template included."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("truncation", "padding"):  # left behind by the last call; every call sets them anew
        backend.pop(state, None)
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, sorted(tokenizer.all_special_ids)]
    text = json.dumps([backend, tokenizer.chat_template, special], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


ARRAYS = ("ids", "is_label", "offsets")
META_FIELDS = ("group_size", "part_sizes", "num_cut")


def _save(folder: Path, tokens: TokenSet, meta: dict[str, Any]) -> None:
    """Writes beside the folder and renames: the entry is whole or absent. The caller holds the lock."""
    unfinished = folder.with_suffix(".unfinished")
    for leftover in (unfinished, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir()
    for name in ARRAYS if tokens.values is None else (*ARRAYS, "values"):
        np.save(unfinished / f"{name}.npy", getattr(tokens, name))
    meta |= {name: getattr(tokens, name) for name in (*META_FIELDS, "fingerprint")}
    (unfinished / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    unfinished.rename(folder)


def _load(folder: Path, made_from: dict[str, Any]) -> tuple[TokenSet, dict[str, int]] | None:
    """The entry, or None if it is absent, torn, or not what its hash says."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        fields = {name: meta[name] for name in META_FIELDS} | {"part_sizes": tuple(meta["part_sizes"])}
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        if (folder / "values.npy").exists():
            arrays["values"] = np.load(folder / "values.npy", mmap_mode="r")
        tokens = TokenSet(**arrays, **fields)
        is_good = meta["made_from"] == made_from and meta["fingerprint"] == tokens.fingerprint
        return (tokens, meta["num_dropped"]) if is_good else None
    except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError):
        return None
