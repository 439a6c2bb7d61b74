"""Token ids of a text, none of which spans a border in it: where a prompt ends, generation begins with a new token."""

import re
from collections.abc import Collection, Iterable
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANCHORS = ("\n", ".", "a", "1")
"""Texts after which the beginning of another may be a token of its own."""
MAX_TAIL = 8
"""Tokens between a special token and the end of a prompt."""
Range = tuple[int, int]
"""First token of a stretch, and the one after its last."""


class Pieces:
    """Tokenizes texts whole, or in pieces."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        self.special_ids = set(special)
        others = (str(token) for i, token in tokenizer.added_tokens_decoder.items() if i not in special)
        self.plain_tokens = [token for token in others if token.strip()]
        # Properties of the tokenizer that look a token up at each access.
        self.begin, self.end, self.unknown = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id
        if self.unknown in (self.begin, self.end, tokenizer.pad_token_id):  # byte-level ones have no need of one
            self.unknown = None
        names = sorted(filter(None, special.values()), key=len, reverse=True)
        self._tails: dict[str, list[int]] = {}
        self.special_texts = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    @cached_property
    def _added_texts(self) -> re.Pattern[str]:
        plain = map(re.escape, sorted(self.plain_tokens, key=len, reverse=True))
        return re.compile("|".join([self.special_texts.pattern, *plain]))

    @cached_property
    def normalizes_special(self) -> bool:
        """True if the tokenizer looks for some special tokens in its own form of a text, in small letters, say."""
        tokens = self.tokenizer.added_tokens_decoder.values()
        has_normalizer = self.tokenizer.backend_tokenizer.normalizer is not None
        return has_normalizer and any(token.special and token.normalized for token in tokens)

    def makes_special(self, chat: Iterable[dict[str, Any]]) -> bool:
        """Return whether a text of the messages has a special token only in the tokenizer's form of it."""
        normalize, search = self.tokenizer.backend_tokenizer.normalizer.normalize_str, self.special_texts.search
        texts = [text for message in chat for text in message.values() if isinstance(text, str)]
        return any(search(normalize(text)) and not search(text) for text in texts)

    def encode(self, texts: list[str], **options: Any) -> Any:
        """The tokenizer's output for each text, without the tokens that it adds around a text."""
        return self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **options,
        )

    def ids(self, texts: list[str], **options: Any) -> list[list[int]]:
        """The ids of each text."""
        return self.encode(texts, **options)["input_ids"]

    def continue_ids(self, texts: list[str], **options: Any) -> list[list[int]]:
        """The ids of texts that continue another: without the space that some tokenizers put before a text."""
        if not self._puts_prefix:
            return self.ids(texts, **options)
        return self._after_anchor(texts, **options)

    def _after_anchor(self, texts: list[str], **options: Any) -> list[list[int]]:
        known: dict[int, list[int]] = {}
        for anchor in ANCHORS:
            left = [i for i in range(len(texts)) if i not in known]
            if not left:
                break
            encoded = self.encode([anchor + texts[i] for i in left], return_offsets_mapping=True, **options)
            for i, ids, offsets in zip(left, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                first = next((k for k, (start, end) in enumerate(offsets) if start >= 1 or end > 1), len(ids))
                if first == len(ids) or (first and offsets[first][0] >= 1):
                    known[i] = ids[first:]
        return [known[i] if i in known else self.ids([text], **options)[0] for i, text in enumerate(texts)]

    @cached_property
    def _puts_prefix(self) -> bool:
        """True if the tokenizer puts a space before a text, as SentencePiece does."""
        return self._after_anchor(["ab", "1"]) != self.ids(["ab", "1"])

    @cached_property
    def _puts_prefix_after_special(self) -> bool:
        """True if the tokenizer puts its space before a text after each special token too."""
        special = self.tokenizer.eos_token or ""
        return self.ids([special + "ab"])[0][1:] == self.ids(["ab"])[0]

    def range_of(self, encoding: Any, ids: list[int], text: str, start: int, end: int) -> Range | None:
        """The tokens of characters `start` to `end` of a text; None if a token spans one of these borders.

        Args:
            encoding: of the text, with its `ids`, which it would copy at each access.
        """
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        if first is None or last is None or (start and encoding.char_to_token(start - 1) is None):
            return None  # white space that the tokenizer leaves out, or that its offsets do
        if (begin := encoding.token_to_chars(first)[0]) < start:
            # A special token may take the white space after it, or before it.
            if ids[first] not in self.special_ids or text[begin:start].isspace():
                return None
            first += 1
        elif text[max(0, start - 2) : start].isspace() and not self._ends_alike(encoding, ids[:first], text, start):
            return None
        while last + 1 < len(ids) and encoding.token_to_chars(last + 1) == encoding.token_to_chars(last):
            last += 1  # several tokens for one character
        begin, after = encoding.token_to_chars(last)
        if after > end and (ids[last] not in self.special_ids or text[begin:end].isspace()):
            return None
        return first, last + 1

    def _ends_alike(self, encoding: Any, before: list[int], text: str, end: int) -> bool:
        """Return whether the tokens before character `end` are those of the text up to there.

        The text ends in white space, which some tokenizers split otherwise if a word follows it.
        """
        ids = before[-MAX_TAIL:]
        place = next((i for i in reversed(range(len(ids))) if ids[i] in self.special_ids), None)
        if place is None:
            return False
        start = encoding.token_to_chars(len(before) - len(ids) + place)[0]
        tail = text[start:end]
        if tail not in self._tails:
            self._tails[tail] = self.ids([tail])[0]
        return self._tails[tail] == ids[place:]

    def split(self, text: str, cuts: Collection[int], guard: str = "") -> tuple[list[int], dict[int, int]]:
        """The ids of a text whose pieces between the cuts are tokenized by themselves, and the number of tokens before
        each cut.

        Args:
            guard: a character that stands inside those special tokens of the text that are text; it is taken out.
        """
        ids: list[int] = []
        num_before = {}
        for start, end in pairwise(sorted({0, *cuts, len(text)})):
            num_before[start] = len(ids)
            if guard and guard in text[start:end]:
                self._append_guarded(ids, text[start:end], guard)
            else:
                self._append(ids, text[start:end])
        num_before[len(text)] = len(ids)
        return ids, num_before

    def _append(self, ids: list[int], text: str, **options: Any) -> None:
        starts_alike = not ids or (ids[-1] in self.special_ids and self._puts_prefix_after_special)
        ids += self.ids([text], **options)[0] if starts_alike else self.continue_ids([text], **options)[0]

    def _append_guarded(self, ids: list[int], text: str, guard: str) -> None:
        encoding = self.encode([text], return_offsets_mapping=True)
        place = 0
        special = [
            (i, offsets)
            for i, offsets in zip(encoding["input_ids"][0], encoding["offset_mapping"][0], strict=True)
            if i in self.special_ids and offsets[1] > offsets[0] and not text.startswith(guard, offsets[1])
        ]
        for i, (start, end) in special:
            if start > place:
                self._append(ids, text[place:start].replace(guard, ""), split_special_tokens=True)
            ids.append(i)
            place = end
        if rest := text[place:].replace(guard, ""):
            self._append(ids, rest, split_special_tokens=True)

    def guard(self, text: str, guard: str) -> str:
        """The text with `guard` inside each special token's text, so that it is none, or after one of a character."""
        return self.special_texts.sub(lambda match: match[0][0] + guard + match[0][1:], text)

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, with the white space that they have."""
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def stretches(self, text: str) -> list[str]:
        """The stretches of a text between added tokens, which may take white space beside them or get some."""
        return [stretch.strip() for stretch in self._added_texts.split(text)]

    def loses(self, text: str, decoded: str) -> bool:
        """Return whether a text and what its tokens decode to differ by more than white space that a decoder adds
        beside added tokens, or the space that it leaves out at the beginning.
        """
        written, read = (self._added_texts.split(side) for side in (text, decoded))
        written[0] = written[0].removeprefix(" ")
        return len(written) != len(read) or not all(map(_is_within, written, read))

    def loses_beside_added(self, chat: Iterable[dict[str, Any]], **options: Any) -> bool:
        """Return whether added tokens that stand in texts of the messages take white space of them."""
        texts = [text for message in chat for text in message.values() if isinstance(text, str)]
        texts = list(filter(self._added_texts.search, texts))
        return bool(texts) and any(map(self.loses, texts, map(self.decode, self.ids(texts, **options))))

    def num_special(self, text: str, guard: str) -> int:
        """Special tokens in a text, but for those with a guard."""
        matches = self.special_texts.finditer(text)
        return sum(not guard or not text.startswith(guard, match.end()) for match in matches)

    def without_space(self, ids: list[int]) -> list[int]:
        """The tokens up to the last one that is special or more than white space."""
        end = len(ids)
        while end and ids[end - 1] not in self.special_ids and not self.tokenizer.decode([ids[end - 1]]).strip():
            end -= 1
        return ids[:end]


def _is_within(text: str, decoded: str) -> bool:
    """Return whether there is nothing but white space around a text."""
    return text in decoded and not decoded.replace(text, "", 1).strip()
