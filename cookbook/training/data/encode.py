"""Encodes rows as token ids with a label flag each, through the tokenizer's chat template or as plain text.

A row becomes one sequence, or two for a preference: chosen before rejected.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import numpy as np

from cookbook.config.messages import TEMPLATE_KEYS
from cookbook.config.objectives import TrainOn
from cookbook.config.row_kinds import BadRow, Chat, Row, RowKind, kinds
from cookbook.system.files import RecipeError
from cookbook.training.data.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHIPPED_TEMPLATE = "recipes/chat_templates/chatml.jinja"
WRITES_ALL = "recipes/chat_templates/chatml_tools.jinja"
ROWS_PER_BATCH = 512

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

LabelledIds = tuple[list[int], list[int]]
"""Token ids; 1 for a label, 0 for none."""
Turn = tuple[int, int]
"""First token of an assistant turn, and the one after its last."""


def encode(rows: Rows, tokenizer: "PreTrainedTokenizerBase", train_on: TrainOn) -> Iterator[list[LabelledIds] | BadRow]:
    """The sequences of each row, not truncated.

    Chats go through the chat template; with train_on "assistant" the labels are the assistant's turns with their
    end-of-turn tokens, less those with `train: false`; with "last", the last of them alone. For a prompt with
    completion, the labels are the completion and an end-of-sequence token, or every token with train_on "all". A text
    has only labels, whatever train_on is, and ends with an end-of-sequence token. In a preference, tokens that both
    answers share are not labels.

    Raises:
        RecipeError: a tokenizer or template that cannot be trained with, and the row that shows it.
    """
    if not tokenizer.is_fast:
        raise RecipeError(f"{rows.place}: {type(tokenizer).__name__} has no tokenizer.json; a fast tokenizer is needed")
    kind = kinds()[rows.kind]
    train_on = train_on if kind.prompt_may_train else "assistant"
    if kind.chats is not None:
        return _encode_chats(rows, kind.chats, tokenizer, train_on)
    return _encode_plain_rows(rows, kind, tokenizer, train_on)


def _encode_plain_rows(
    rows: Rows, kind: RowKind, tokenizer: "PreTrainedTokenizerBase", train_on: TrainOn
) -> Iterator[list[LabelledIds]]:
    assert kind.texts is not None
    start, end = _start_and_end(tokenizer, rows.place)
    prompt_label = int(train_on == "all")
    for batch in _batches(map(kind.texts, rows.rows)):
        # Prompt and answer separately, as at inference: together, a token could span the border.
        prompts = None if batch[0][0] is None else _encoded([prompt for prompt, _ in batch], tokenizer)["input_ids"]
        columns = zip(*(texts for _, texts in batch), strict=True)
        answers = [_encoded(list(column), tokenizer)["input_ids"] for column in columns]
        for i in range(len(batch)):
            prompt = [] if prompts is None else _start_with(prompts[i], start)
            sequences = []
            for column in answers:
                answer = column[i] if column[i][-1:] == [end] else [*column[i], end]
                answer = answer if prompts is not None else _start_with(answer, start)
                sequences.append((prompt + answer, [prompt_label] * len(prompt) + [1] * len(answer)))
            yield sequences


def _start_and_end(tokenizer: "PreTrainedTokenizerBase", place: str) -> tuple[int | None, int]:
    """The begin-of-sequence id, if this tokenizer adds one, and the end-of-sequence id."""
    if tokenizer.eos_token_id is None:
        raise RecipeError(f"{place}: the tokenizer has no end-of-sequence token; the model would never learn to stop")
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return bos if adds_bos else None, tokenizer.eos_token_id


def _start_with(ids: list[int], start: int | None) -> list[int]:
    return ids if start is None or ids[:1] == [start] else [start, *ids]


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


def _encode_chats(
    rows: Rows,
    chats_of: Callable[[Row], list[tuple[Chat, int]]],
    tokenizer: "PreTrainedTokenizerBase",
    train_on: TrainOn,
) -> Iterator[list[LabelledIds] | BadRow]:
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        hint = f"give one in data.chat_template, for example {SHIPPED_TEMPLATE}"
        raise RecipeError(f"{rows.place}: has chats, but the tokenizer has no chat template; {hint}") from None
    special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special_ids.update(tokenizer.all_special_ids)
    has_markers = _GENERATION.search(template) is not None
    encoder = _ChatEncoder(tokenizer, train_on, has_markers, special_ids)
    num_chats = len(chats_of(rows.rows[0]))
    chats = (
        _Asked(chat, row.get("tools"), _trained_turns(chat, num_shared, train_on), rows.where(i))
        for i, row in enumerate(rows.rows)
        for chat, num_shared in chats_of(row)
    )
    encoded = (sequence for batch in _batches(chats) for sequence in encoder.encode(batch))
    while found := list(islice(encoded, num_chats)):
        bad = [one for one in found if isinstance(one, BadRow)]
        yield bad[0] if bad else [one for one in found if not isinstance(one, BadRow)]


class _Asked(NamedTuple):
    chat: Chat
    tools: list[dict[str, Any]] | None
    trained: list[int]
    """The messages with loss."""
    where: str


def _trained_turns(chat: Chat, num_shared: int, train_on: TrainOn) -> list[int]:
    turns = [k for k, message in enumerate(chat) if message["role"] == "assistant"][num_shared:]
    return [k for k in (turns[-1:] if train_on == "last" else turns) if chat[k].get("train") is not False]


TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, OverflowError)
"""What a template may raise; the last two for an `include` and a `range` that the sandbox refuses."""


@dataclass(frozen=True)
class _ChatEncoder:
    """Encodes chats through the tokenizer's template."""

    tokenizer: "PreTrainedTokenizerBase"
    train_on: TrainOn
    has_markers: bool
    """Whether the template marks the assistant's tokens."""
    special_ids: set[int]

    def encode(self, chats: list[_Asked]) -> Iterator[LabelledIds | BadRow]:
        """Each chat, or its problem."""
        bad = [self._left_out(one) for one in chats]
        good = [one for one, problem in zip(chats, bad, strict=True) if problem is None]
        encoded = self._encode_good(good) if good else iter(())
        for problem in bad:
            yield next(encoded) if problem is None else problem

    def _left_out(self, asked: _Asked) -> BadRow | None:
        """The problem of a chat that has more than its labels or its rendered text would show."""
        if self.train_on == "all" and any("train" in message for message in asked.chat):
            return BadRow("train: false under objective.train_on: all", "under which every token carries loss")
        present = [key for key in TEMPLATE_KEYS if any(key in message for message in asked.chat)]
        without: list[tuple[str, Chat, Any]] = [
            (key, [{name: value for name, value in one.items() if name != key} for one in asked.chat], asked.tools)
            for key in present
        ]
        for key, chat, tools in [*without, *([("tools", asked.chat, None)] if asked.tools else [])]:
            try:
                if self._rendered(chat, tools) == self._rendered(asked.chat, asked.tools):
                    problem = f"the chat template leaves out `{key}`"
                    return BadRow(problem, f"name one that writes it in data.chat_template, such as {WRITES_ALL}")
            except TEMPLATE_ERRORS:
                continue  # it does not go without; or it refuses the chat, which is found below
        return None

    def _rendered(self, chat: Chat, tools: list[dict[str, Any]] | None, **options: bool) -> str:
        return self.tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, **options)

    def _encode_good(self, chats: list[_Asked]) -> Iterator[LabelledIds | BadRow]:
        if self.train_on == "all":
            for plain in self._apply_template(chats, with_mask=False):
                yield plain if isinstance(plain, BadRow) else (plain[0], [1] * len(plain[0]))
            return
        found: list[tuple[list[int], list[Turn]] | BadRow]
        if self.has_markers:
            marked = self._apply_template(chats, with_mask=True)
            found = [one if isinstance(one, BadRow) else (one[0], _turns_in(one[1])) for one in marked]
        else:
            found = self._turns_by_prefix(chats)
        for asked, one in zip(chats, found, strict=True):
            if isinstance(one, BadRow):
                yield one
                continue
            ids, turns = one
            turns_of = asked.trained
            if self.has_markers:
                turns_of = [k for k, message in enumerate(asked.chat) if message["role"] == "assistant"]
            self._check_turns(ids, turns, len(turns_of), asked.where)
            labels = [0] * len(ids)
            for k, (first, end) in zip(turns_of, turns, strict=True):
                labels[first:end] = [int(k in asked.trained)] * (end - first)
            yield ids, labels

    def _apply_template(self, chats: list[_Asked], *, with_mask: bool) -> list[LabelledIds | BadRow]:
        if len(chats) > 1 and any(one.tools for one in chats):  # a call takes one list of tools
            return [sequence for one in chats for sequence in self._apply_template([one], with_mask=with_mask)]
        try:
            encoded = self.tokenizer.apply_chat_template(
                [one.chat for one in chats],
                tools=chats[0].tools,
                return_dict=True,
                return_assistant_tokens_mask=with_mask,
                tokenizer_kwargs={"verbose": False},
            )
        except TEMPLATE_ERRORS as error:  # a template may refuse a chat, for a system message, say; find out which
            if len(chats) == 1:
                return [BadRow("refused by the chat template", str(error))]
            return [sequence for one in chats for sequence in self._apply_template([one], with_mask=with_mask)]
        all_ids = encoded["input_ids"]
        masks = encoded["assistant_masks"] if with_mask else [[] for _ in all_ids]
        return list(zip(all_ids, masks, strict=True))

    def _turns_by_prefix(self, chats: list[_Asked]) -> list[tuple[list[int], list[Turn]] | BadRow]:
        """Ids and turns for a template without generation markers: a turn is what its message adds to the rendered text
        after the generation prompt. The whole text is tokenized once, and turns are mapped to its tokens."""
        rendered: list[tuple[str, list[Turn]] | BadRow] = []
        for asked in chats:
            try:
                rendered.append(self._render_turns(asked))
            except TEMPLATE_ERRORS as error:
                rendered.append(BadRow("refused by the chat template", str(error)))
        texts = [one[0] for one in rendered if not isinstance(one, BadRow)]
        encoded = _encoded(texts, self.tokenizer, return_offsets_mapping=True) if texts else {}
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
                # Count the tokens before it, since some tokenizers give a token of spaces no width.
                first, after = int(np.count_nonzero(ends <= start)), int(np.count_nonzero(starts < end))
                # White space after the end-of-turn token belongs to the template: generation has stopped before it.
                turns.append((first, first + len(self._without_space(ids[first:after]))))
            found.append((ids, turns))
        return found

    def _render_turns(self, asked: _Asked) -> tuple[str, list[Turn]]:
        """The text of the chat, and the character range of each turn with loss."""
        chat, tools = asked.chat, asked.tools
        whole, turns = self._rendered(chat, tools), []
        for k in asked.trained:
            before = self._rendered(chat[:k], tools, add_generation_prompt=True)
            after = whole if k + 1 == len(chat) else self._rendered(chat[: k + 1], tools)
            if not (after.startswith(before) and whole.startswith(after) and len(before) < len(after)):
                raise RecipeError(
                    f"{asked.where}: the chat template has no generation markers, and does not write message {k + 1} as"
                    " it would be prompted for and continued, so the assistant's tokens cannot be found. Give one with"
                    f" markers in data.chat_template, for example {SHIPPED_TEMPLATE}, or train on all tokens with"
                    " objective.train_on: all, or on the last turn with last"
                )
            turns.append((len(before), len(after)))
        return whole, turns

    def _check_turns(self, ids: list[int], turns: list[Turn], num_turns: int, where: str) -> None:
        """Raise RecipeError unless each turn's labels end with a special token, with only white space after it.

        apply_chat_template labels everything to the end if it finds no token for the last character of a turn: then
        turns merge, which the count detects.
        """
        if len(turns) != num_turns:
            raise RecipeError(
                f"{where}: the chat template marks {len(turns)} stretches of assistant tokens for {num_turns} assistant"
                f" turns; enclose each turn of its own, as {SHIPPED_TEMPLATE} does, and give it in data.chat_template"
            )
        for first, end in turns:
            turn = self._without_space(ids[first:end])
            if not turn or turn[-1] not in self.special_ids:
                place = "before {% endgeneration %}" if self.has_markers else "after each turn"
                raise RecipeError(
                    f"{where}: the trained part of an assistant turn ends with {self.tokenizer.decode(turn[-3:])!r} and"
                    " no special token, so the model would never learn to stop. In data.chat_template put the"
                    f" end-of-turn token {place}, as {SHIPPED_TEMPLATE} does; the tokenizer must know it as a special"
                    " token"
                )

    def _without_space(self, ids: list[int]) -> list[int]:
        """The tokens up to the last one that is special or more than white space."""
        end = len(ids)
        while end and ids[end - 1] not in self.special_ids and not self.tokenizer.decode([ids[end - 1]]).strip():
            end -= 1
        return ids[:end]


def _turns_in(mask: list[int]) -> list[Turn]:
    turns, position = [], 0
    for is_label, run in groupby(mask):
        end = position + sum(1 for _ in run)
        if is_label:
            turns.append((position, end))
        position = end
    return turns
