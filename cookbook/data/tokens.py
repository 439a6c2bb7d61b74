"""Turns rows into token ids with a label flag each, in flat arrays, once per machine."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cookbook.data.rows import BadRow, BadRows, Rows
from cookbook.files import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHIPPED_TEMPLATE = "recipes/chat_templates/chatml.jinja"
FORMAT_VERSION = 1  # of the cache files and of what `tokenize` makes of a row; a change makes old entries unused
ROWS_PER_BATCH = 512

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

TrainOn = Literal["assistant", "all"]
OnBadRow = Literal["error", "drop"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSet:
    """N samples, one after the other; sample i is `ids[offsets[i]:offsets[i + 1]]` and is never empty."""

    ids: np.ndarray
    """int32"""
    is_label: np.ndarray
    """bool, aligned with `ids`: the token that the position before it learns to predict."""
    offsets: np.ndarray
    """int64 [N + 1]"""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64 [N]."""
        return np.diff(self.offsets)

    @cached_property
    def num_targets(self) -> np.ndarray:
        """Positions of each sample that carry loss, int64 [N]: labels, less a first token that nothing predicts."""
        starts = self.offsets[:-1]
        return np.add.reduceat(self.is_label, starts, dtype=np.int64) - self.is_label[starts]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the arrays."""
        digest = hashlib.sha256()
        for array in (self.ids, self.is_label, self.offsets):
            digest.update(f"{array.dtype} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def tokenize(
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    train_on: TrainOn,
    on_bad_row: OnBadRow,
    place: str,
) -> tuple[TokenSet, dict[str, int]]:
    """The token set, and how many rows were dropped, by reason.

    Chats go through the tokenizer's chat template; with train_on "assistant" the labels are what its generation markers
    enclose. Of a prompt with completion, the completion and an end-of-sequence token are labels, or every token with
    train_on "all". A text, whatever train_on says, has only labels, and ends with an end-of-sequence token.
    Samples are cut at the end to `max_length` tokens.

    Args:
        place: how mistakes name the rows ("data.train"); the number after it counts the rows kept by `read_rows`.

    Raises:
        RecipeError: a tokenizer or template that cannot be trained with; with on_bad_row "error", all rows that have
            nothing to train on.
    """
    if not tokenizer.is_fast:
        raise RecipeError([f"{place}: {type(tokenizer).__name__} has no tokenizer.json; a fast tokenizer is needed"])
    encode = {"messages": _encode_chats, "completion": _encode_completions, "text": _encode_texts}[rows.kind]
    ids: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    bad_rows = BadRows()
    for number, sample in enumerate(encode(rows.rows, tokenizer, train_on, place), start=1):
        if not isinstance(sample, BadRow):
            sample = sample[0][:max_length], sample[1][:max_length]
            if not any(sample[1][1:]):
                sample = BadRow("no trained token after truncation", f"cut to data.max_length {max_length}")
        if isinstance(sample, BadRow):
            bad_rows.add(f"{place}: row {number}", sample)
            continue
        ids.append(np.array(sample[0], dtype=np.int32))
        labels.append(np.array(sample[1], dtype=bool))
    bad_rows.stop_if(on_bad_row)
    if not ids:
        raise RecipeError([f"{place}: no row left to train on", *bad_rows.mistakes()])
    offsets = np.concatenate([[0], np.cumsum([len(sample) for sample in ids])]).astype(np.int64)
    tokens = TokenSet(ids=np.concatenate(ids), is_label=np.concatenate(labels), offsets=offsets)
    return tokens, dict(bad_rows.num_by_reason)


Sample = tuple[list[int], list[int]]  # ids; 1 for a label, 0 for none


def _encode_chats(
    rows: list[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase", train_on: TrainOn, place: str
) -> Iterator[Sample | BadRow]:
    needs_markers = train_on == "assistant"
    _check_template(tokenizer, needs_markers, place)
    special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special_ids.update(tokenizer.all_special_ids)
    number = 0
    for chats in _batches([row["messages"] for row in rows]):
        for chat, sample in zip(chats, _apply_template(chats, tokenizer, needs_markers), strict=True):
            number += 1
            if needs_markers and not isinstance(sample, BadRow):
                num_turns = sum(message["role"] == "assistant" for message in chat)
                _check_turns(*sample, num_turns, tokenizer, special_ids, f"{place}: row {number}")
            yield sample


def _check_template(tokenizer: "PreTrainedTokenizerBase", needs_markers: bool, place: str) -> None:
    hint = f"give one in data.chat_template, for example {SHIPPED_TEMPLATE}"
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        raise RecipeError([f"{place}: has chats, but the tokenizer has no chat template; {hint}"]) from None
    if needs_markers and not _GENERATION.search(template):
        mistake = (
            f"{place}: the tokenizer's chat template does not mark the assistant's tokens"
            f" ({{% generation %}} ... {{% endgeneration %}}), which objective.train_on: assistant needs; {hint},"
            " or train on all tokens with objective.train_on: all"
        )
        raise RecipeError([mistake])


def _apply_template(
    chats: list[list[dict[str, str]]], tokenizer: "PreTrainedTokenizerBase", needs_markers: bool
) -> list[Sample | BadRow]:
    from jinja2 import TemplateError

    try:
        encoded = tokenizer.apply_chat_template(
            chats, return_dict=True, return_assistant_tokens_mask=needs_markers, tokenizer_kwargs={"verbose": False}
        )
    except TemplateError as error:  # a template may refuse a chat, for a system message say; find out which
        if len(chats) == 1:
            return [BadRow("refused by the chat template", str(error))]
        return [sample for chat in chats for sample in _apply_template([chat], tokenizer, needs_markers)]
    all_ids = encoded["input_ids"]
    masks = encoded["assistant_masks"] if needs_markers else [[1] * len(ids) for ids in all_ids]
    return list(zip(all_ids, masks, strict=True))


def _check_turns(
    ids: list[int],
    mask: list[int],
    num_turns: int,
    tokenizer: "PreTrainedTokenizerBase",
    special_ids: set[int],
    where: str,
) -> None:
    """Raises RecipeError unless each turn's labels end with a special token (white space after it is fine).

    apply_chat_template labels everything to the end when it finds no token for the last character of a turn: then
    turns run together, and the count tells.
    """
    position, turns = 0, []
    for is_label, run in groupby(mask):
        end = position + sum(1 for _ in run)
        if is_label:
            turns.append(ids[position:end])
        position = end
    if len(turns) != num_turns:
        mistake = (
            f"{where}: the chat template marks {len(turns)} stretches of assistant tokens for {num_turns} assistant"
            f" turns; enclose each turn of its own, as {SHIPPED_TEMPLATE} does, and give it in data.chat_template"
        )
        raise RecipeError([mistake])
    for turn in turns:
        while turn and turn[-1] not in special_ids and not tokenizer.decode(turn[-1:]).strip():
            turn.pop()
        if not turn or turn[-1] not in special_ids:
            mistake = (
                f"{where}: the trained part of an assistant turn ends with {tokenizer.decode(turn[-3:])!r} and no"
                " special token, so the model would never learn to stop. In data.chat_template put the end-of-turn"
                f" token before {{% endgeneration %}}, as {SHIPPED_TEMPLATE} does; the tokenizer must know it as a"
                " special token"
            )
            raise RecipeError([mistake])


def _encode_completions(
    rows: list[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase", train_on: TrainOn, place: str
) -> Iterator[Sample]:
    start, end = _start_and_end(tokenizer, place)
    prompt_label = int(train_on == "all")
    for batch in _batches(rows):
        # Apart, as they will be at inference: together, a token could span the border.
        prompts = _encode_plain([row["prompt"] for row in batch], tokenizer)
        completions = _encode_plain([row["completion"] for row in batch], tokenizer)
        for prompt, completion in zip(prompts, completions, strict=True):
            prompt, completion = _start_with(prompt, start), _end_with(completion, end)
            yield prompt + completion, [prompt_label] * len(prompt) + [1] * len(completion)


def _encode_texts(
    rows: list[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase", train_on: TrainOn, place: str
) -> Iterator[Sample]:
    start, end = _start_and_end(tokenizer, place)
    for batch in _batches(rows):
        for ids in _encode_plain([row["text"] for row in batch], tokenizer):
            ids = _end_with(_start_with(ids, start), end)
            yield ids, [1] * len(ids)


def _start_and_end(tokenizer: "PreTrainedTokenizerBase", place: str) -> tuple[int | None, int]:
    """The begin-of-sequence id, if this tokenizer writes one, and the end-of-sequence id."""
    if tokenizer.eos_token_id is None:
        raise RecipeError([f"{place}: the tokenizer has no end-of-sequence token; the model would never learn to stop"])
    bos = tokenizer.bos_token_id
    writes_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return bos if writes_bos else None, tokenizer.eos_token_id


def _start_with(ids: list[int], start: int | None) -> list[int]:
    return ids if start is None or ids[:1] == [start] else [start, *ids]


def _end_with(ids: list[int], end: int) -> list[int]:
    return ids if ids[-1:] == [end] else [*ids, end]


def _encode_plain(texts: list[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    encoded = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    return encoded["input_ids"]


def _batches(rows: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(rows), ROWS_PER_BATCH):
        yield rows[start : start + ROWS_PER_BATCH]


def cached_tokens(
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    cache: Path,
    max_length: int,
    train_on: TrainOn,
    on_bad_row: OnBadRow,
    place: str,
) -> tuple[TokenSet, dict[str, int]]:
    """What `tokenize` returns, kept under `cache` and read from there as memory maps.

    Any number of processes may call at once, before there is a process group: one of them works, the others wait for
    a file lock. An entry whose content does not match its own hash is made anew.
    """
    from filelock import FileLock

    made_from = {
        "format": FORMAT_VERSION,
        "rows": rows.fingerprint,
        "tokenizer": _tokenizer_fingerprint(tokenizer),
        "max_length": max_length,
        "train_on": train_on,
        "on_bad_row": on_bad_row,
    }
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    folder = cache / f"tokens-{key[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        found = _load(folder, made_from)
        if found is not None:
            return found
        tokens, num_dropped = tokenize(
            rows, tokenizer, max_length=max_length, train_on=train_on, on_bad_row=on_bad_row, place=place
        )
        _save(folder, tokens, {"made_from": made_from, "num_dropped": num_dropped, "fingerprint": tokens.fingerprint})
        return _load(folder, made_from) or (tokens, num_dropped)


def _tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("truncation", "padding"):  # left behind by the last call; every call sets them anew
        backend.pop(state, None)
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, sorted(tokenizer.all_special_ids)]
    text = json.dumps([backend, tokenizer.chat_template, special], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _save(folder: Path, tokens: TokenSet, meta: dict[str, Any]) -> None:
    """Writes beside the folder and renames: the entry is whole or absent. The caller holds the lock."""
    unfinished = folder.with_suffix(".unfinished")
    for leftover in (unfinished, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir()
    np.save(unfinished / "ids.npy", tokens.ids)
    np.save(unfinished / "is_label.npy", tokens.is_label)
    np.save(unfinished / "offsets.npy", tokens.offsets)
    (unfinished / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    unfinished.rename(folder)


def _load(folder: Path, made_from: dict[str, Any]) -> tuple[TokenSet, dict[str, int]] | None:
    """The entry, or None if it is absent, torn, or not what its hash says."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        names = ("ids", "is_label", "offsets")
        tokens = TokenSet(**{name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names})
        is_good = meta["made_from"] == made_from and meta["fingerprint"] == tokens.fingerprint
        return (tokens, meta["num_dropped"]) if is_good else None
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
