"""Turns rows into token ids with a label flag each, by the tokenizer's chat template or as plain text.

A row becomes the sequences that its kind has: one, or of a preference two, chosen before rejected.
"""

import re
from collections.abc import Callable, Iterator
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from cookbook.data.rows import Rows
from cookbook.files import RecipeError
from cookbook.objectives import TrainOn
from cookbook.row_kinds import BadRow, Chat, Row, RowKind, kinds, num_turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHIPPED_TEMPLATE = "recipes/chat_templates/chatml.jinja"
ROWS_PER_BATCH = 512

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Sequence = tuple[list[int], list[int]]
"""Token ids; 1 for a label, 0 for none."""
Turn = tuple[int, int]
"""First token of an assistant turn, and the one after its last."""


def encode(rows: Rows, tokenizer: "PreTrainedTokenizerBase", train_on: TrainOn) -> Iterator[list[Sequence] | BadRow]:
    """The sequences of each row, uncut.

    Chats go through the chat template, and with train_on "assistant" the labels are the assistant's turns with their
    end-of-turn tokens. Of a prompt with completion, the completion and an end-of-sequence token are labels, or every
    token with train_on "all". A text, whatever train_on says, has only labels, and ends with an end-of-sequence token.
    Of a preference, what both answers share carries no label.

    Raises:
        RecipeError: a tokenizer or template that cannot be trained with; it names the row that shows it.
    """
    if not tokenizer.is_fast:
        raise RecipeError(
            [f"{rows.place}: {type(tokenizer).__name__} has no tokenizer.json; a fast tokenizer is needed"]
        )
    kind = kinds()[rows.kind]
    train_on = train_on if kind.prompt_may_train else "assistant"
    if kind.chats is not None:
        return _encode_chats(rows, kind.chats, tokenizer, train_on)
    return _encode_plain_rows(rows, kind, tokenizer, train_on)


# Plain text.


def _encode_plain_rows(
    rows: Rows, kind: RowKind, tokenizer: "PreTrainedTokenizerBase", train_on: TrainOn
) -> Iterator[list[Sequence]]:
    assert kind.texts is not None
    start, end = _start_and_end(tokenizer, rows.place)
    prompt_label = int(train_on == "all")
    for batch in _batches(map(kind.texts, rows.rows)):
        # Apart, as they will be at inference: together, a token could span the border.
        prompts = None if batch[0][0] is None else _ids([prompt for prompt, _ in batch], tokenizer)
        answers = [_ids(list(column), tokenizer) for column in zip(*(texts for _, texts in batch), strict=True)]
        for i in range(len(batch)):
            prompt = [] if prompts is None else _start_with(prompts[i], start)
            sequences = []
            for column in answers:
                answer = _end_with(column[i], end)
                answer = answer if prompts is not None else _start_with(answer, start)
                sequences.append((prompt + answer, [prompt_label] * len(prompt) + [1] * len(answer)))
            yield sequences


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


def _ids(texts: list[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    return _encoded(texts, tokenizer)["input_ids"]


def _encoded(texts: list[str], tokenizer: "PreTrainedTokenizerBase", **options: Any) -> Any:
    return tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
        **options,
    )


def _batches(items: Iterator[Any]) -> Iterator[list[Any]]:
    while batch := list(islice(items, ROWS_PER_BATCH)):
        yield batch


# Chats.


def _encode_chats(
    rows: Rows,
    chats_of: Callable[[Row], list[tuple[Chat, int]]],
    tokenizer: "PreTrainedTokenizerBase",
    train_on: TrainOn,
) -> Iterator[list[Sequence] | BadRow]:
    template = _template(tokenizer, rows.place)
    special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special_ids.update(tokenizer.all_special_ids)
    # The chats of a row one after the other, each with its row and the turns that carry no label.
    of_rows = map(chats_of, rows.rows)
    num_chats = len(chats_of(rows.rows[0]))
    chats = ((chat, i, num_shared) for i, found in enumerate(of_rows) for chat, num_shared in found)
    encoded: Iterator[Sequence | BadRow] = (
        sequence
        for batch in _batches(chats)
        for sequence in _encode_batch(batch, rows, tokenizer, template, train_on, special_ids)
    )
    while found := list(islice(encoded, num_chats)):
        bad = [one for one in found if isinstance(one, BadRow)]
        yield bad[0] if bad else [one for one in found if not isinstance(one, BadRow)]


def _template(tokenizer: "PreTrainedTokenizerBase", place: str) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        hint = f"give one in data.chat_template, for example {SHIPPED_TEMPLATE}"
        raise RecipeError([f"{place}: has chats, but the tokenizer has no chat template; {hint}"]) from None


def _encode_batch(
    chats: list[tuple[Chat, int, int]],
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
    template: str,
    train_on: TrainOn,
    special_ids: set[int],
) -> Iterator[Sequence | BadRow]:
    found: list[tuple[list[int], list[Turn]] | BadRow]
    if train_on == "all":
        for plain in _apply_template([chat for chat, _, _ in chats], tokenizer, with_mask=False):
            yield plain if isinstance(plain, BadRow) else (plain[0], [1] * len(plain[0]))
        return
    has_markers = _GENERATION.search(template) is not None
    if has_markers:
        marked = _apply_template([chat for chat, _, _ in chats], tokenizer, with_mask=True)
        found = [one if isinstance(one, BadRow) else (one[0], _turns_in(one[1])) for one in marked]
    else:
        found = _turns_by_prefix(chats, rows, tokenizer, special_ids)
    for (chat, i, num_shared), one in zip(chats, found, strict=True):
        if isinstance(one, BadRow):
            yield one
            continue
        ids, turns = one
        _check_turns(ids, turns, num_turns(chat), tokenizer, special_ids, rows.where(i), has_markers)
        labels = [0] * len(ids)
        for first, end in turns[num_shared:]:
            labels[first:end] = [1] * (end - first)
        yield ids, labels


TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, OverflowError)
"""What a template may raise: the last two for an `include` and a `range` that the sandbox does not let through."""


def _apply_template(
    chats: list[Chat], tokenizer: "PreTrainedTokenizerBase", *, with_mask: bool
) -> list[Sequence | BadRow]:
    try:
        encoded = tokenizer.apply_chat_template(
            chats, return_dict=True, return_assistant_tokens_mask=with_mask, tokenizer_kwargs={"verbose": False}
        )
    except TEMPLATE_ERRORS as error:  # a template may refuse a chat, for a system message say; find out which
        if len(chats) == 1:
            return [BadRow("refused by the chat template", str(error))]
        return [sequence for chat in chats for sequence in _apply_template([chat], tokenizer, with_mask=with_mask)]
    all_ids = encoded["input_ids"]
    masks = encoded["assistant_masks"] if with_mask else [[] for _ in all_ids]
    return list(zip(all_ids, masks, strict=True))


def _turns_in(mask: list[int]) -> list[Turn]:
    turns, position = [], 0
    for is_label, run in groupby(mask):
        end = position + sum(1 for _ in run)
        if is_label:
            turns.append((position, end))
        position = end
    return turns


def _turns_by_prefix(
    chats: list[tuple[Chat, int, int]], rows: Rows, tokenizer: "PreTrainedTokenizerBase", special_ids: set[int]
) -> list[tuple[list[int], list[Turn]] | BadRow]:
    """Ids and turns under a template that does not mark them: a turn is what its message adds to the rendered text,
    after what the model would be prompted with. Its tokens are those of the whole text, tokenised once."""
    rendered: list[tuple[str, list[Turn]] | BadRow] = []
    for chat, i, _ in chats:
        try:
            rendered.append(_render_turns(chat, tokenizer, rows.where(i)))
        except TEMPLATE_ERRORS as error:
            rendered.append(BadRow("refused by the chat template", str(error)))
    texts = [one[0] for one in rendered if not isinstance(one, BadRow)]
    encoded = _encoded(texts, tokenizer, return_offsets_mapping=True) if texts else {}
    tokens = zip(encoded.get("input_ids", ()), encoded.get("offset_mapping", ()), strict=True)
    found: list[tuple[list[int], list[Turn]] | BadRow] = []
    for one in rendered:
        if isinstance(one, BadRow):
            found.append(one)
            continue
        ids, offsets = next(tokens)
        starts, ends = np.array(offsets).T
        turns = []
        for start, end in one[1]:
            # By what lies before it, since some tokenizers give a token of spaces no width.
            first, after = int(np.count_nonzero(ends <= start)), int(np.count_nonzero(starts < end))
            # What follows the end-of-turn token belongs to the frame: generation has stopped before it.
            while (
                after > first and ids[after - 1] not in special_ids and not tokenizer.decode([ids[after - 1]]).strip()
            ):
                after -= 1
            turns.append((first, after))
        found.append((ids, turns))
    return found


def _render_turns(chat: Chat, tokenizer: "PreTrainedTokenizerBase", where: str) -> tuple[str, list[Turn]]:
    """The text of the chat, and the characters of each assistant turn in it."""

    def render(messages: Chat, **options: bool) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    whole, turns = render(chat), []
    for k, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before = render(chat[:k], add_generation_prompt=True)
        after = whole if k + 1 == len(chat) else render(chat[: k + 1])
        if not (after.startswith(before) and whole.startswith(after) and len(before) < len(after)):
            mistake = (
                f"{where}: the chat template has no generation markers, and does not write message {k + 1} as it would"
                " be prompted for and continued, so the assistant's tokens cannot be told. Give a template with markers"
                f" in data.chat_template, for example {SHIPPED_TEMPLATE}, or train on all tokens with"
                " objective.train_on: all"
            )
            raise RecipeError([mistake])
        turns.append((len(before), len(after)))
    return whole, turns


def _check_turns(
    ids: list[int],
    turns: list[Turn],
    num_turns: int,
    tokenizer: "PreTrainedTokenizerBase",
    special_ids: set[int],
    where: str,
    has_markers: bool,
) -> None:
    """Raises RecipeError unless each turn's labels end with a special token (white space after it is fine).

    apply_chat_template labels everything to the end when it finds no token for the last character of a turn: then
    turns run together, and the count tells.
    """
    if len(turns) != num_turns:
        mistake = (
            f"{where}: the chat template marks {len(turns)} stretches of assistant tokens for {num_turns} assistant"
            f" turns; enclose each turn of its own, as {SHIPPED_TEMPLATE} does, and give it in data.chat_template"
        )
        raise RecipeError([mistake])
    for first, end in turns:
        turn = ids[first:end]
        while turn and turn[-1] not in special_ids and not tokenizer.decode(turn[-1:]).strip():
            turn.pop()
        if not turn or turn[-1] not in special_ids:
            cure = "put the end-of-turn token " + ("before {% endgeneration %}" if has_markers else "after each turn")
            mistake = (
                f"{where}: the trained part of an assistant turn ends with {tokenizer.decode(turn[-3:])!r} and no"
                f" special token, so the model would never learn to stop. In data.chat_template {cure}, as"
                f" {SHIPPED_TEMPLATE} does; the tokenizer must know it as a special token"
            )
            raise RecipeError([mistake])
