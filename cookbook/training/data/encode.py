"""Encodes rows as token ids with a label flag each, through the tokenizer's chat template or as plain text.

A row becomes one sequence, or two for a preference: chosen before rejected.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cookbook.config.chat_templates import CHATML, CHATML_TOOLS
from cookbook.config.objectives import TrainOn
from cookbook.config.sections import DataSection
from cookbook.rows.messages import IN_MESSAGES
from cookbook.rows.row_checks import Row
from cookbook.rows.row_kinds import BadRow, Chat, RowKind, kinds
from cookbook.system.files import RecipeError, in_flow
from cookbook.training.data.borders import Pieces, Range
from cookbook.training.data.chat_template import (
    THINKING,
    ChatRequest,
    ChatTemplate,
    MissingDate,
    Span,
    TemplateRefusal,
)
from cookbook.training.data.faithful import (
    MARKS_NEXT,
    NOT_MARKED,
    OTHER_BEGINNING,
    Look,
    Problem,
    Words,
    find_changed_text,
    find_left_out,
    look_at,
    problems_of_shape,
    problems_of_tools,
    shape_of,
)
from cookbook.training.data.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_PER_BATCH = 512
NUM_COMPARED, COMPARED_EVERY = 64, 512
"""Chats that are compared with their words one by one: the first ones, the first of each shape and of each look, and
one in so many."""
GUARDS = tuple(map(chr, range(0xE000, 0xF900)))
"""Characters for private use, of which no chat template knows."""

LabelledIds = tuple[list[int], list[int]]
"""Token ids; 1 for a label, 0 for none."""


class EncodedRow(NamedTuple):
    """The sequences of a row, not truncated, and what is to be said of them."""

    sequences: list[LabelledIds]
    remarks: tuple[str, ...] = ()


class TextKeys(NamedTuple):
    """The recipe's keys for how texts become tokens."""

    special_tokens: Literal["text", "tokens"] | None = None
    accept: tuple[str, ...] = ()
    template_date: date | None = None

    @classmethod
    def of(cls, data: DataSection) -> "TextKeys":
        return cls(data.special_tokens, tuple(data.accept), data.template_date)


DEFAULT_KEYS = TextKeys()


class Encoder:
    """Encodes rows of any kind; examines the first chat of each shape.

    With train_on "assistant" the labels of a chat are the assistant's turns with their end-of-turn tokens, less those
    with `train: false`; with "last", the last of them alone. For a prompt with completion, the labels are the
    completion and an end-of-sequence token, or every token with train_on "all". A text has only labels, whatever
    train_on is, and ends with an end-of-sequence token if its kind has one. The prompt of a preference or of a judged
    answer has no labels. Rows of token ids are taken as they are.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", train_on: TrainOn, keys: TextKeys = DEFAULT_KEYS) -> None:
        self.tokenizer, self.train_on, self.keys = tokenizer, train_on, keys
        self._chats: dict[TrainOn, _ChatEncoder] = {}

    def encode(self, rows: Rows) -> Iterator[EncodedRow | BadRow]:
        """Each row.

        Raises:
            RecipeError: a tokenizer or template that cannot be trained with, and the row that shows it.
        """
        if not self.tokenizer.is_fast:
            name = type(self.tokenizer).__name__
            raise RecipeError(f"{rows.place}: {name} has no tokenizer.json; a fast tokenizer is needed")
        kind = kinds()[rows.kind]
        if kind.tokens is not None:
            return (_join_sampled(*kind.tokens(row), kind.masks(row)) for row in rows.rows)
        train_on = self.train_on if kind.prompt_may_train or self.train_on == "all" else "assistant"
        if kind.chats is None:
            return _encode_plain_rows(rows, kind, Pieces(self.tokenizer), train_on, self.keys)
        try:
            self.tokenizer.get_chat_template()
        except ValueError:
            hint = f"give one, for example data.chat_template: {CHATML}"
            raise RecipeError(f"{rows.place}: has chats, but the tokenizer has no chat template; {hint}") from None
        if train_on not in self._chats:
            template = ChatTemplate(self.tokenizer, self.keys.template_date)
            if mistake := template.mistake():
                raise RecipeError(f"{rows.place}: the chat template is not valid Jinja: {mistake}")
            if template.is_random():
                hint = "copy it without `random` or `lipsum` and give it in data.chat_template"
                raise RecipeError(f"{rows.place}: the chat template writes something at random; {hint}")
            self._chats[train_on] = _ChatEncoder(template, Pieces(self.tokenizer), train_on, self.keys)
        _refuse_keys(rows, self._chats[train_on].template)
        return _encode_chats(rows, kind.chats, self._chats[train_on])


def _refuse_keys(rows: Rows, template: ChatTemplate) -> None:
    """Refuse keys of messages that nothing here reads, and that a template would."""
    if read := [f"{IN_MESSAGES}{key}" for key in rows.unread_keys if template.reads(key)]:
        raise RecipeError(
            f"{rows.place}: the chat template reads {', '.join(read)}, which it is not given; write what it should say"
            f" into the `content`, or pass it over with data.ignore: {in_flow(read)}"
        )


def _join_sampled(prompt: list[int], answers: list[list[int]], masks: list[list[int]] | None) -> EncodedRow:
    """Sequences of given tokens: an answer that was cut off learns no end, and one that ended has its end in it."""
    masks = [[1] * len(answer) for answer in answers] if masks is None else masks
    return EncodedRow(
        [(prompt + answer, [0] * len(prompt) + mask) for answer, mask in zip(answers, masks, strict=True)]
    )


def _encode_plain_rows(
    rows: Rows, kind: RowKind, pieces: Pieces, train_on: TrainOn, keys: TextKeys
) -> Iterator[EncodedRow]:
    assert kind.texts is not None
    tokenizer = pieces.tokenizer
    start, end = _start_and_end(tokenizer, rows.place)
    bare = _make_stripper(tokenizer, start)
    prompt_label, as_text = int(train_on == "all"), keys.special_tokens == "text"
    options = {"split_special_tokens": True} if as_text else {}
    is_ended = kind.has_end or tokenizer("a")["input_ids"][-1:] == [end]
    num_seen = 0
    for batch in _batches(map(kind.texts, rows.rows)):
        # Prompt and answer separately, as at inference: together, a token could span the border.
        asked_all = [asked for asked, _ in batch if asked is not None]
        prompts = pieces.ids(asked_all, **options) if asked_all else None
        after = pieces.ids if prompts is None else pieces.continue_ids
        answers = iter(after([text for _, texts in batch for text in texts], **options))
        for i, (asked, texts) in enumerate(batch):
            prompt = [] if prompts is None else _start_with(prompts[i], start)
            sequences, remarks = [], []
            for ids in islice(answers, len(texts)):
                answer = ids if ids[-1:] == [end] or not is_ended else [*ids, end]
                begun = answer if prompts is not None else _start_with(answer, start)
                # Of several tokens before a text all but the first would be targets.
                added = [1, *[0] * (len(start) - 1)] if begun is not answer else []
                sequences.append((prompt + begun, [prompt_label] * len(prompt) + added + [1] * len(answer)))
            # The end token of a text is the one that would be added.
            written = [asked or "", *(text.removesuffix(tokenizer.eos_token or "") for text in texts)]
            if any(map(pieces.special_texts.search, written)):
                remarks.append(SPECIAL_AS_TEXT if as_text else SPECIAL_AS_TOKENS)
            num_seen += 1
            if any(_has_unknown(sequence, pieces) for sequence in sequences):
                remarks.append(UNKNOWN)
            elif _is_compared(num_seen):
                seen = [pieces.decode(ids) for ids, _ in sequences]
                said = [(asked or "") + text for text in texts]
                if any(pieces.loses(bare(text), bare(decoded)) for text, decoded in zip(said, seen, strict=True)):
                    remarks.append(OTHER_TEXT)
            yield EncodedRow(sequences, tuple(remarks))


LONGEST_MARK = 40
"""Tokens, at most one a character."""
MARK_AT_END = re.compile(r"[<\[][^<>\[\]\s]{1,38}[>\]]$")
"""End of a turn that may be meant as a special token."""
SPECIAL_AS_TEXT = "with special tokens in a text, read as text (data.special_tokens: tokens would read tokens)"
SPECIAL_AS_TOKENS = "with special tokens in a text, read as tokens (data.special_tokens: text would read text)"
AS_TOKENS = "write it otherwise, or have such tokens read as tokens with data.special_tokens: tokens"
UNKNOWN = "with the unknown token among those that carry loss; the tokenizer does not know some characters"
TWICE_BEGUN = "with the begin-of-sequence token twice at the beginning"
TWICE_ENDED = "with the end token twice at the end of a turn"
OTHER_TEXT = "among those compared, whose tokens decode to another text: the tokenizer changes or leaves out characters"


def _is_compared(num_seen: int) -> bool:
    return num_seen <= NUM_COMPARED or num_seen % COMPARED_EVERY == 0


def _make_stripper(tokenizer: "PreTrainedTokenizerBase", start: list[int]) -> Callable[[str], str]:
    """Takes out of a text the tokens that may be added around it."""
    added = [*filter(None, (tokenizer.bos_token, tokenizer.eos_token)), *tokenizer.convert_ids_to_tokens(start)]
    pattern = re.compile("|".join(map(re.escape, added)))
    return lambda text: pattern.sub("", text)


def _has_unknown(sequence: LabelledIds, pieces: Pieces) -> bool:
    unknown, (ids, labels) = pieces.unknown, sequence
    if unknown is None or unknown not in ids:
        return False
    return any(i == unknown and label for i, label in zip(ids, labels, strict=True))


def _start_and_end(tokenizer: "PreTrainedTokenizerBase", place: str) -> tuple[list[int], int]:
    """The ids that this tokenizer puts before a text, and the end-of-sequence id.

    Most put the begin-of-sequence token or nothing there; GLM-4's has two tokens, and names none of them as its begin.
    """
    if tokenizer.eos_token_id is None:
        raise RecipeError(f"{place}: the tokenizer has no end-of-sequence token; the model would never learn to stop")
    whole, own = (tokenizer("a", add_special_tokens=is_whole)["input_ids"] for is_whole in (True, False))
    places = (i for i in range(len(whole)) if own and whole[i : i + len(own)] == own)
    # A vocabulary may have no letter a, as one of amino acids.
    place_of_own = next(places, int(whole[:1] == [tokenizer.bos_token_id]))
    return whole[:place_of_own], tokenizer.eos_token_id


def _start_with(ids: list[int], start: list[int]) -> list[int]:
    return ids if ids[: len(start)] == start else [*start, *ids]


def _batches(items: Iterator[Any]) -> Iterator[list[Any]]:
    while batch := list(islice(items, ROWS_PER_BATCH)):
        yield batch


def _encode_chats(
    rows: Rows,
    chats_of: Callable[[Row], list[tuple[Chat, int]]],
    encoder: "_ChatEncoder",
) -> Iterator[EncodedRow | BadRow]:
    chats = (
        ChatRequest(
            chat,
            row.get("tools"),
            row.get("chat_template_kwargs") or {},
            _trained_turns(chat, num_shared, encoder.train_on),
            rows.where(i),
        )
        for i, row in enumerate(rows.rows)
        for chat, num_shared in chats_of(row)
    )
    encoded = (sequence for batch in _batches(chats) for sequence in encoder.encode(batch))
    for row in rows.rows:
        results = list(islice(encoded, len(chats_of(row))))
        bad = [result for result in results if isinstance(result, BadRow)]
        if bad:
            yield bad[0]
            continue
        good = [result for result in results if not isinstance(result, BadRow)]
        remarks = dict.fromkeys(remark for result in good for remark in result.remarks)
        yield EncodedRow([sequence for result in good for sequence in result.sequences], tuple(remarks))


def _trained_turns(chat: Chat, num_shared: int, train_on: TrainOn) -> tuple[int, ...]:
    turns = [k for k, message in enumerate(chat) if message["role"] == "assistant"][num_shared:]
    return tuple(k for k in (turns[-1:] if train_on == "last" else turns) if chat[k].get("train") is not False)


class _Rendering(NamedTuple):
    """A chat as the template writes it."""

    asked: ChatRequest
    """The chat that was rendered."""
    text: str
    spans: list[Span]
    """The characters of each turn with loss."""
    guard: str = ""
    """Stands within special tokens that are text."""


class _Shape(NamedTuple):
    """Findings about chats of one shape."""

    problem: BadRow | None
    remarks: tuple[str, ...]
    looks: set[Look]
    """Looks of the chats that were compared."""


@dataclass
class _ChatEncoder:
    """Encodes chats through the tokenizer's template."""

    template: ChatTemplate
    pieces: Pieces
    train_on: TrainOn
    keys: TextKeys
    shapes: dict[tuple[Any, ...], _Shape] = field(default_factory=dict)
    tools: dict[int, tuple[BadRow | None, list[str]]] = field(default_factory=dict)
    """Verdicts of `_judge_tools`, by the hash of the tools' text."""
    num_seen: int = 0

    def encode(self, chats: list[ChatRequest]) -> Iterator[EncodedRow | BadRow]:
        """Each chat, or its problem."""
        written = [self._write(chat) for chat in chats]
        plain = [rendering.text for rendering in written if isinstance(rendering, _Rendering) and not rendering.guard]
        encoded = self.pieces.encode(plain) if plain else None
        encodings = zip(encoded.encodings, encoded["input_ids"], strict=True) if encoded else iter(())
        for asked, rendering in zip(chats, written, strict=True):
            if isinstance(rendering, BadRow):
                yield rendering
                continue
            sequence, remarks = self._label_tokens(asked, rendering, None if rendering.guard else next(encodings))
            yield self._check_chat(asked, rendering, sequence, remarks)

    def _write(self, asked: ChatRequest) -> _Rendering | BadRow:
        if self.train_on == "all" and any("train" in message for message in asked.chat):
            return BadRow("train: false under objective.train_on: all", "under which every token carries loss")
        is_meant = self.keys.special_tokens == "tokens"
        if not is_meant and self.pieces.normalizes_special and self.pieces.makes_special(asked.chat):
            return BadRow(
                "a text of which the tokenizer makes a special token",
                "by lower case or another form of its letters; write the text in another way",
            )
        if (
            not is_meant
            and self._plain_end
            and (named := self._find_tokens(asked, re.compile(re.escape(self._plain_end))))
        ):
            return BadRow("a text with the token that ends a turn", f"{named}; {AS_TOKENS}")
        guard = named = ""
        try:
            if not is_meant and self._has_special(asked):
                named = self._find_tokens(asked, self.pieces.special_texts)
                seen = self.template.render_marked(asked)
                said = json.dumps((asked.chat, asked.tools, asked.variables), ensure_ascii=False, default=str)
                guard = next(mark for mark in GUARDS if mark not in said)
                mapped = (self._guard_texts(part, guard) for part in (asked.chat, asked.tools, asked.variables))
                asked = asked._replace(**dict(zip(("chat", "tools", "variables"), mapped, strict=True)))
                if _without_guard(self.template.render_marked(asked), guard) != _without_guard(seen, ""):
                    return BadRow("a special token of a text is read by the chat template", f"{named}; {AS_TOKENS}")
            text, spans = self._render(asked)
        except TemplateRefusal as error:  # a template may refuse a chat, for a system message, say
            return BadRow("refused by the chat template", f"{named}: {error}" if named else str(error))
        except MissingDate:
            raise RecipeError(
                f"{asked.where}: the chat template prints today's date, so the samples would depend on the day. Give it"
                " a fixed one, as in data.template_date: 2026-01-31, or another template in data.chat_template"
            ) from None
        return _Rendering(asked, text, spans, guard)

    def _has_special(self, asked: ChatRequest) -> bool:
        search = self.pieces.special_texts.search
        for message in asked.chat:
            if search(message["content"]) or (len(message) > 2 and search(str(message))):
                return True
        return (asked.tools is not None or bool(asked.variables)) and bool(search(str((asked.tools, asked.variables))))

    @cached_property
    def _plain_end(self) -> str:
        """The token by which the template ends an answer, if it is an added one that is not special: it is a token in
        each text."""
        answer = "zqzqzq"
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
        rest = ""
        with contextlib.suppress(TemplateRefusal, MissingDate):
            rest = self.template.render(ChatRequest(chat, None, {}, (1,), "")).rpartition(answer)[2].lstrip()
        return max(filter(rest.startswith, self.pieces.plain_tokens), key=len, default="")

    def _find_tokens(self, asked: ChatRequest, tokens: re.Pattern[str]) -> str:
        """The first few of these tokens in the texts of a chat, with their places; empty if there is none."""
        texts = [(f"message {k}, `{key}`", value) for k, m in enumerate(asked.chat, 1) for key, value in m.items()]
        texts += [("`tools`", asked.tools), ("`chat_template_kwargs`", asked.variables)]
        places = (
            f"{token!a} in {place}"
            for place, value in texts
            for token in tokens.findall(value if isinstance(value, str) else str(value))
        )
        return ", ".join(islice(dict.fromkeys(places), 4))

    def _guard_texts(self, value: Any, guard: str) -> Any:
        """The value with a guard in each special token of its texts."""
        if isinstance(value, str):
            return self.pieces.guard(value, guard)
        if isinstance(value, list):
            return [self._guard_texts(item, guard) for item in value]
        if isinstance(value, dict):
            return {self._guard_texts(key, guard): self._guard_texts(item, guard) for key, item in value.items()}
        return value

    def _render(self, asked: ChatRequest) -> tuple[str, list[Span]]:
        """The text of a chat, and the characters of each turn with loss.

        Raises:
            TemplateRefusal: the template does not take the chat.
            RecipeError: the turns cannot be found.
        """
        if self.train_on == "all":
            return self.template.render(asked), []
        if not self.template.has_markers(asked.tools):
            return self._turns_by_prefix(asked)
        text, spans = self.template.render_marked(asked)
        turns = [k for k, message in enumerate(asked.chat) if message["role"] == "assistant"]
        if len(spans) != len(turns):
            raise RecipeError(
                f"{asked.where}: the chat template marks {len(spans)} stretches of assistant tokens for {len(turns)}"
                f" assistant turns; enclose each turn of its own, as the shipped {CHATML} does, and give it in"
                " data.chat_template"
            )
        return text, [span for k, span in zip(turns, spans, strict=True) if k in asked.trained]

    def _turns_by_prefix(self, asked: ChatRequest) -> tuple[str, list[Span]]:
        """Render a chat whose template has no generation markers: a turn is what its message adds to the rendered text
        after the generation prompt."""
        text, turns = self.template.render(asked), []
        for k in asked.trained:
            before = self.template.render(asked, k, prompt=True)
            after = text if k + 1 == len(asked.chat) else self.template.render(asked, k + 1)
            if not (after.startswith(before) and text.startswith(after) and len(before) < len(after)):
                from cookbook.training.data.twin import offer

                raise RecipeError(
                    f"{asked.where}: the chat template has no generation markers, and does not write message {k + 1} as"
                    " it would be prompted for and continued, so the assistant's tokens cannot be found:"
                    f" {offer(self.template.tokenizer)}, or train on all tokens with objective.train_on: all, or on the"
                    " last turn with last"
                )
            turns.append((len(before), len(after)))
        return text, turns

    def _label_tokens(
        self, asked: ChatRequest, written: _Rendering, encoding: tuple[Any, list[int]] | None
    ) -> tuple[LabelledIds, list[str]]:
        """The chat's tokens and labels, and its remarks."""
        remarks = [SPECIAL_AS_TEXT] if written.guard else []
        if self.train_on == "all":
            ids = encoding[1] if encoding else self.pieces.split(written.text, (), written.guard)[0]
            return (ids, [1] * len(ids)), remarks
        ranges: list[Range | None] = [None]
        if encoding:
            ids = encoding[1]
            ranges = [self.pieces.range_of(*encoding, written.text, start, end) for start, end in written.spans]
        if None in ranges:
            cuts = {place for span in written.spans for place in span}
            ids, num_before = self.pieces.split(written.text, cuts, written.guard)
            ranges = [(num_before[start], num_before[end]) for start, end in written.spans]
        labels = [0] * len(ids)
        for first, end in filter(None, ranges):
            if not self.template.has_markers(asked.tools):
                # White space after the end-of-turn token belongs to the template: generation has stopped before it.
                end = first + len(self.pieces.without_space(ids[first:end]))
            if self._ends_twice(ids[first:end], asked):
                remarks.append(TWICE_ENDED)
            labels[first:end] = [1] * (end - first)
        return (ids, labels), remarks

    def _ends_twice(self, turn: list[int], asked: ChatRequest) -> bool:
        """Return whether a turn's labels end with the same special token twice.

        Raises:
            RecipeError: they do not end with a special token, with only white space after it.
        """
        turn = self.pieces.without_space(turn)
        tokenizer = self.pieces.tokenizer
        if turn and (turn[-1] in self.pieces.special_ids or tokenizer.decode(turn[-1:]) == self._plain_end):
            return turn[-2:-1] == turn[-1:]
        place = "before {% endgeneration %}" if self.template.has_markers(asked.tools) else "after each turn"
        end = MARK_AT_END.search(tokenizer.decode(turn[-LONGEST_MARK:]))
        way = ""
        if end is not None and end[0] not in tokenizer.get_vocab():  # which model.new_tokens would refuse
            way = f"; if the template ends it with {end[0]}, write model.new_tokens: [{json.dumps(end[0])}]"
        raise RecipeError(
            f"{asked.where}: the trained part of an assistant turn ends with"
            f" {tokenizer.decode(turn[-3:])!r} and no special token, so the model would never learn to"
            f" stop. In data.chat_template put the end-of-turn token {place}, as the shipped {CHATML} does; the"
            f" tokenizer must know it as an added token{way}"
        )

    def _check_chat(
        self, asked: ChatRequest, written: _Rendering, sequence: LabelledIds, remarks: list[str]
    ) -> EncodedRow | BadRow:
        """The sequence with its remarks, or the problem of the chat or of chats of its shape."""
        key, ids = shape_of(asked, self.template.tested_texts), sequence[0]
        shape = self.shapes.get(key)
        self.num_seen += 1
        if shape is None:
            shape = self.shapes[key] = self._examine_shape(asked, written, ids)
        if shape.problem is not None:
            return shape.problem
        look = look_at(written.asked, written.text, written.spans)
        if look not in shape.looks or _is_compared(self.num_seen):
            problem, more = self._compare(asked, written, sequence)
            if problem is not None:
                return problem
            shape.looks.add(look)
            remarks = [*remarks, *more]
        if asked.tools is not None:
            problem, more = self._judge_tools(written)
            if problem is not None:
                return problem
            remarks = [*remarks, *more]
        if not written.guard and self.keys.special_tokens == "tokens" and self._has_special(asked):
            remarks.append(SPECIAL_AS_TOKENS)
        if _has_unknown(sequence, self.pieces):
            remarks.append(UNKNOWN)
        if self.pieces.begin is not None and ids[:2] == [self.pieces.begin] * 2:
            remarks.append(TWICE_BEGUN)
        return EncodedRow([sequence], tuple(dict.fromkeys((*shape.remarks, *remarks))))

    def _examine_shape(self, asked: ChatRequest, written: _Rendering, ids: list[int]) -> _Shape:
        """The first chat of a shape, looked at for all of them."""
        words = Words.of(asked, self.template.tested_texts)
        try:
            text, spans = self._render(words.replace_texts(asked))
            problems = problems_of_shape(asked, words, text, None if self.train_on == "all" else spans)
        except (RecipeError, TemplateRefusal):  # it accepts some texts only
            problems = []
        problems += self._find_other_prompts(written, ids)
        problem, remarks = self._judge(asked, problems)
        given = {key for key, value in asked.variables.items() if value is not None}
        if unread := sorted(given - self.template.variables(asked.tools)):
            remarks.append(f"with {', '.join(unread)} in `chat_template_kwargs`, which the chat template does not read")
        return _Shape(problem, tuple(dict.fromkeys(remarks)), set())

    def _judge(self, asked: ChatRequest, problems: list[Problem]) -> tuple[BadRow | None, list[str]]:
        """The first of the problems that is one, and what is said of the others."""
        remarks = []
        for problem in problems:
            if problem.part in self.keys.accept:
                remarks.append(f"where the chat template {problem.how} {problem.key}, as data.accept has it")
            elif problem.is_meant(asked):
                remarks.append(problem.remark)
            else:
                return self._bad_row(problem), []
        return None, remarks

    def _judge_tools(self, written: _Rendering) -> tuple[BadRow | None, list[str]]:
        """Return the problem of the row's tools as written, if any, and remarks; schemas differ within a shape."""
        key = hash(repr(written.asked.tools))
        if key not in self.tools:
            self.tools[key] = self._judge(written.asked, problems_of_tools(written.asked, written.text))
        return self.tools[key]

    def _bad_row(self, problem: Problem) -> BadRow:
        return BadRow(
            f"the chat template {problem.how} {problem.key}",
            f"{problem.place}: name another in data.chat_template, such as {CHATML_TOOLS}, {problem.remedy}or accept it"
            f" with data.accept: [{problem.part}]",
        )

    def _find_other_prompts(self, written: _Rendering, ids: list[int]) -> list[Problem]:
        """The turns with loss that do not begin right after the tokens by which generation is asked for them."""
        problems = []
        for k, (start, end) in zip(written.asked.trained, written.spans, strict=False):
            prompts = self._prompts(written.asked, k)
            cuts = {place for span in written.spans for place in span if place < start}
            fitting = []
            for text in filter(written.text.startswith, prompts):
                asked_with, _ = self.pieces.split(text, {cut for cut in cuts if cut < len(text)}, written.guard)
                if ids[: len(asked_with)] == asked_with:
                    fitting.append(text)
            key, ending = "generation prompt", f"which ends with {prompts[0][-40:]!a}" if prompts else ""
            if prompts and not fitting:
                problems.append(Problem("generation_prompt", k, key, ending, OTHER_BEGINNING))
            elif fitting and min(map(len, fitting)) > start:
                problems.append(Problem("generation_prompt", k, key, ending, "marks as the assistant's a part of its"))
            elif fitting and start not in map(len, fitting):
                problems.append(Problem("generation_prompt", k, key, ending, NOT_MARKED))
            special = self.pieces.special_texts.findall(written.text, start, end)
            if fitting and special[1:] and special[-1] == self._opening_token(written.asked, k, fitting[0]):
                problems.append(Problem("generation_prompt", k, key, f"{special[-1]!a} is another turn's", MARKS_NEXT))
        return problems

    def _opening_token(self, asked: ChatRequest, k: int, prompt: str) -> str:
        """The special token by which generation of message k is asked for; empty if there is none."""
        with contextlib.suppress(TemplateRefusal):
            before = self.template.render(asked, k)
            if prompt.startswith(before) and (match := self.pieces.special_texts.match(prompt, len(before))):
                return match[0]
        return ""

    def _prompts(self, asked: ChatRequest, k: int) -> list[str]:
        """The texts by which generation may be asked for message k; none if the template takes no chat so short."""
        prompts = []
        for variables in ({}, *THINKING):
            with contextlib.suppress(TemplateRefusal):
                prompts.append(self.template.render(asked, k, prompt=True, **variables))
        return list(dict.fromkeys(prompts))

    def _compare(
        self, asked: ChatRequest, written: _Rendering, sequence: LabelledIds
    ) -> tuple[BadRow | None, list[str]]:
        """A chat beside its words: its problem, and its remarks."""
        words = Words.of(written.asked, self.template.tested_texts)
        try:
            marked, spans = self._render(words.replace_texts(written.asked))
        except (RecipeError, TemplateRefusal):
            problems = find_left_out(words, written.text)
        else:
            # Those of its shape again, since the arguments of calls differ within one.
            problems = problems_of_shape(written.asked, words, marked, None if self.train_on == "all" else spans)
            if (leaf := find_changed_text(words, marked, written.text)) is not None:
                how = "changes" if leaf.text in written.text else "leaves out a part of"
                problems.append(Problem(leaf.part, leaf.message, leaf.key, leaf.detail, how))
            num_special = [self.pieces.num_special(text, written.guard) for text in (written.text, marked)]
            if not problems and self.keys.special_tokens != "tokens" and num_special[0] != num_special[1]:
                return BadRow("texts that the chat template joins to a special token"), []
        problem, remarks = self._judge(asked, problems)
        if problem is not None:
            return problem, []
        ids, labels = sequence
        tokenizer, text = self.pieces.tokenizer, _without(written.guard, written.text)
        if self.pieces.unknown in ids:
            return None, remarks if _has_unknown(sequence, self.pieces) else [*remarks, OTHER_TEXT]
        options = {} if self.keys.special_tokens == "tokens" else {"split_special_tokens": True}
        is_changed = self.pieces.stretches(self.pieces.decode(ids)) != self.pieces.stretches(text)
        # White space beside the template's own tokens is lost at inference too.
        if is_changed or self.pieces.loses_beside_added(asked.chat, **options):
            return None, [*remarks, OTHER_TEXT]
        if self.train_on != "all":
            trained = _without_space(tokenizer.decode([i for i, label in zip(ids, labels, strict=True) if label]))
            wanted = _without(written.guard, "".join(written.text[start:end] for start, end in written.spans))
            if trained != _without_space(wanted):
                return BadRow("the labels are not the text of the assistant's turns", f"{ascii(trained)[:80]}"), []
        return None, remarks


def _without_guard(written: tuple[str, list[Span]], guard: str) -> list[str]:
    """A chat's text and its marked stretches as if there were no guard."""
    text, spans = written
    return [_without(guard, text), *(_without(guard, text[start:end]) for start, end in spans)]


def _without(guard: str, text: str) -> str:
    return text.replace(guard, "") if guard else text


def _without_space(text: str) -> str:
    return "".join(text.split())
