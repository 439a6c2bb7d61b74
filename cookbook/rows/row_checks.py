"""Checks of the rows of each kind, and what is kept of a row. No torch."""

import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

from cookbook.rows.json_text import BadRow, from_json
from cookbook.rows.messages import (
    OTHER_ROLES,
    ROLES,
    Chat,
    check_messages,
    check_parts,
    check_text,
    check_tools,
    read_messages,
    role_of,
)
from cookbook.system.files import kind_in_words

Row = dict[str, Any]

FOR_TEMPLATE = ("tools", "functions", "chat_template_kwargs")
"""Keys of what a chat template is given besides the messages."""

LOGPROBS = {
    "logprobs": "old_logps",
    "sampled_logprobs": "sampled_logps",
    "reference_logprobs": "token_reference_logps",
}
"""Keys of a group with log-probabilities, and what a token set calls them: of the model that sampled an answer; of the
distribution that it was drawn from, if temperature or truncation made another of it; and under the reference."""
MASK = "completion_mask"
"""Key of a group of token ids: for each answer 1 for a token that the policy wrote, and 0 for one without loss."""
ENDED = "ended"
"""Key of a group: for each answer whether it ended by itself; false if it was cut off at a length."""
NUMBERS = ("rewards", MASK, ENDED, *LOGPROBS)
"""Keys of a group whose values are numbers, or true and false."""
TOKENS = ("prompt_ids", "completion_ids")
"""Keys of a group whose values are token ids; TRL's names."""
LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


def is_empty(value: Any) -> bool:
    """Return whether the value of an optional key asks for nothing."""
    if isinstance(value, list):
        return all(map(is_empty, value))
    return value is None or value in ("", {}) or (isinstance(value, str) and not value.strip())


PRINTED = re.compile(r"\[?\s*\{\s*'(role|from|content|value)'\s*:")
"""Beginning of messages that Python printed, as pandas writes them into a table of cells."""


def with_messages(row: Any) -> Any:
    """The row with the lists of messages whose JSON texts its columns hold; a BadRow if a key is given twice there."""
    for value in row.values() if isinstance(row, dict) else ():
        if type(value) is str and value.startswith("["):
            try:
                return {key: _parse_messages(value) for key, value in row.items()}
            except BadRow as bad:
                return bad
    return row


def _parse_messages(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith("["):
        return value
    try:
        parsed = from_json(value)
    except BadRow:
        if '"role"' in value or '"from"' in value:
            raise
        return value
    return (
        parsed
        if isinstance(parsed, list) and parsed and all(role_of(message) in OTHER_ROLES for message in parsed)
        else value
    )


def refuse_printed(row: Row) -> None:
    """Raise BadRow if a text holds messages as Python prints them."""
    for key, value in row.items():
        if isinstance(value, str) and PRINTED.match(value):
            seen = f"`{key}` begins with {value[:24]!a}; write JSON, as json.dumps does, or Parquet"
            raise BadRow("messages as Python prints them", seen)


def texts_in(row: Row) -> Iterator[str]:
    """Every text of a checked row."""
    for key, value in row.items():
        if isinstance(value, str):
            yield value
        elif key in FOR_TEMPLATE:
            yield json.dumps(value, ensure_ascii=False)
        elif isinstance(value, list) and key not in (*NUMBERS, *TOKENS):
            yield from _texts_of_list(value)


def _texts_of_list(items: list[Any]) -> Iterator[str]:
    for entry in items:
        if isinstance(entry, str):
            yield entry
            continue
        if isinstance(entry, list):
            yield from _texts_of_list(entry)
            continue
        yield entry.get("content", "")
        if more := {key: item for key, item in entry.items() if key not in ("role", "content", "train")}:
            yield json.dumps(more, ensure_ascii=False)


def has_calls(row: Row) -> bool:
    """Return whether a message of a checked row calls a tool."""
    items = (item for value in row.values() if isinstance(value, list) for item in value)
    return any(isinstance(item, dict) and "tool_calls" in item for item in items)


def check_texts(*keys: str) -> Callable[[Row], Row]:
    return lambda raw: {key: check_text(raw.get(key), f"`{key}`") for key in keys}


def _check_same_form(raw: Row) -> None:
    if isinstance(raw["rejected"], str) != isinstance(raw["chosen"], str):
        seen = f"`chosen` is {kind_in_words(raw['chosen'])}, `rejected` {kind_in_words(raw['rejected'])}"
        raise BadRow("chosen and rejected of different form", seen)


def check_preference(raw: Row) -> Row:
    """Plain texts, used without a chat template like `prompt` and `completion`."""
    _check_same_form(raw)
    if raw.get("prompt") is None:
        raw = raw | _split_prompt(*(check_text(raw[key], f"`{key}`") for key in ("chosen", "rejected")))
    row = check_asked(raw, "chosen", "rejected")
    if row["chosen"] == row["rejected"]:
        raise BadRow("chosen and rejected are the same")
    return row


def _split_prompt(chosen: str, rejected: str) -> Row:
    """The beginning that both texts share, up to the last white space in it, and the two ends."""
    # The white space goes to the ends, as most tokenizers join it to the word after it.
    num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    shared = re.match(r"(.*\S)\s", chosen[:num_shared], re.DOTALL)
    if shared is None:
        raise BadRow("no prompt", "`prompt` is missing, and `chosen` and `rejected` share no beginning")
    end = len(shared[1])
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def check_asked(raw: Row, *answers: str) -> Row:
    """The texts of a prompt, with its context, and of the answers to it."""
    row = check_texts("prompt", *answers)(raw)
    return row if is_empty(raw.get("context")) else row | {"prompt": _add_context(row["prompt"], raw["context"])}


def _add_context(prompt: str, context: Any) -> str:
    """The prompt and, after an empty line, its context, unless the prompt has it already."""
    context = check_text(context, "`context`")
    return prompt if context in prompt else f"{prompt}\n\n{context}"


CHAT_KEYS = ("system", "history", *FOR_TEMPLATE)
"""Optional keys of every kind with chats."""
OF_THE_ENCODER = (
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
    *("padding", "truncation", "max_length", "tokenizer_kwargs", "strftime_now", "raise_exception"),
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
"""Keys of `apply_chat_template` that are not a row's to set."""


def _template_keys(raw: Row) -> Row:
    """The tools of a chat and the keys that its row gives to the template, if any."""
    kept: Row = {}
    keys = [key for key in ("tools", "functions") if not is_empty(from_json(raw.get(key)))]
    if len(keys) > 1:
        raise BadRow("tools given twice", "as `tools` and as `functions`")
    if keys:
        wrap = _as_tool if keys == ["functions"] else dict
        if tools := check_tools(raw[keys[0]], wrap):
            kept["tools"] = tools
    kwargs = from_json(raw.get("chat_template_kwargs"))
    if not is_empty(kwargs):
        if not isinstance(kwargs, dict):
            raise BadRow("not an object", f"`chat_template_kwargs` is {kind_in_words(kwargs)}")
        if taken := sorted(kwargs.keys() & set(OF_THE_ENCODER)):
            raise BadRow("`chat_template_kwargs` that are not a row's to set", ", ".join(taken))
        kept["chat_template_kwargs"] = kwargs
    return kept


def _as_tool(function: dict[str, Any]) -> dict[str, Any]:
    return function if isinstance(function.get("function"), dict) else {"type": "function", "function": function}


def _check_history(history: Any) -> Chat:
    """Earlier turns: messages, or pairs of a question and its answer."""
    history = from_json(history)
    pairs = history if isinstance(history, list) else [None]
    if any(isinstance(pair, dict) for pair in pairs):
        return check_messages(history, "history")
    turns: Chat = []
    for number, pair in enumerate(pairs, start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadRow("history is not pairs", f"`history` needs [question, answer], and item {number} is not")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            turns.append({"role": role, "content": check_text(text, f"`history` {number}")})
    return turns


def _prepend_turns(raw: Row, chat: Chat) -> Chat:
    """The chat after the row's system message and earlier turns, if it has any."""
    system, history = ([] if is_empty(raw.get(key)) else [raw[key]] for key in ("system", "history"))
    if not system and not history:
        return chat
    start: Chat = [{"role": "system", "content": check_parts(text, "`system`")} for text in system]
    if chat and chat[0]["role"] == "system":
        if start and start[0]["content"] != chat[0]["content"]:
            raise BadRow("two system messages", "`system`, and the first message; write one of them")
        start, chat = chat[:1], chat[1:]
    return [*start, *(turn for exchange in history for turn in _check_history(exchange)), *chat]


def check_chat(raw: Row) -> Row:
    chat = read_messages(raw["messages"])
    for key in ("loss_mask", "mask"):
        if not is_empty(raw.get(key)):
            chat = _apply_mask(chat, key, from_json(raw[key]))
    chat = _prepend_turns(raw, chat)
    if all(message["role"] != "assistant" for message in chat):
        raise BadRow("no assistant turn")
    return {"messages": chat} | _template_keys(raw)


def _apply_mask(chat: Chat, key: str, mask: Any) -> Chat:
    """The chat with `train: false` in the assistant's messages whose value in the mask is 0."""
    if key == "mask" and isinstance(mask, str) and ROLES.get(mask.lower()) == "user":
        return chat  # NeMo names the role without loss
    if not isinstance(mask, list) or any(isinstance(mark, str) or mark not in (0, 1) for mark in mask):
        raise BadRow("loss mask is not a list of 0 and 1", f"`{key}` is {kind_in_words(mask)}")
    if len(mask) != len(chat):
        seen = f"`{key}` has {len(mask)} values for {len(chat)} messages; loss is on whole messages"
        raise BadRow("loss mask of another length", seen)
    masked: Chat = []
    for number, (message, carries) in enumerate(zip(chat, mask, strict=True), start=1):
        if carries and message["role"] != "assistant":
            raise BadRow(
                f"{key}: true of another role",
                f"message {number}; only the assistant's messages carry loss (all tokens do with"
                " objective.train_on: all)",
            )
        if message["role"] == "assistant" and not carries:
            message = message | {"train": False}
        masked.append(message)
    return masked


def check_exchange(raw: Row) -> Row:
    """A single exchange, whose texts become the messages of a chat; optional texts may be empty."""
    optional = {key for key in ("system", "context", "reasoning_content") if is_empty(raw.get(key))}
    if "system" not in optional:
        raw = raw | {"system": check_parts(raw["system"], "`system`")}
    keys = ("system", "user", "context", "reasoning_content", "assistant")
    row = check_texts(*(key for key in keys if key not in optional))(raw)
    if not is_empty(raw.get("history")):
        row["history"] = _check_history(raw["history"])
    return row | _template_keys(raw)


def chat_of_exchange(row: Row) -> Chat:
    asked = "\n\n".join(row[key] for key in ("user", "context") if key in row)
    system = [{"role": "system", "content": row["system"]}] if "system" in row else []
    # For a template that writes them apart, as Alpaca's does.
    parts = {"instruction": row["user"], "input": row["context"]} if "context" in row else {}
    question = {"role": "user", "content": asked, **parts}
    answer = {"role": "assistant", "content": row["assistant"]}
    if "reasoning_content" in row:
        answer["reasoning_content"] = row["reasoning_content"]
    return [*system, *row.get("history", ()), question, answer]


def check_chat_preference(raw: Row) -> Row:
    """Splits two conversations into their common beginning and the two ends that differ."""
    _check_same_form(raw)
    raw = _unpack_request(raw)
    chosen, rejected = (_prepend_turns(raw, _join_conversation(raw, key)) for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise BadRow("chosen and rejected are the same")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    ends = chosen[shared:], rejected[shared:]
    if not all(end and end[0]["role"] == "assistant" for end in ends):
        seen = "the first message in which they differ must be the assistant's in both"
        raise BadRow("chosen and rejected do not answer the same prompt", f"message {shared + 1}; {seen}")
    if not shared:
        raise BadRow("no prompt", "`prompt` is missing, and `chosen` and `rejected` share no beginning")
    return {"prompt": chosen[:shared], "chosen": ends[0], "rejected": ends[1]} | _template_keys(raw)


def _unpack_request(raw: Row) -> Row:
    """The row with the messages and tools of a prompt that is a request, as OpenAI has it."""
    prompt = raw.get("prompt")
    if not isinstance(prompt, dict) or "messages" not in prompt:
        return raw
    if left := sorted(key for key in prompt.keys() - {"messages", *FOR_TEMPLATE, "parallel_tool_calls"} if prompt[key]):
        raise BadRow("`prompt` with more than messages and tools", ", ".join(map(ascii, left))[:80])
    given = {key: prompt[key] for key in FOR_TEMPLATE if prompt.get(key)}
    return raw | {"prompt": prompt["messages"]} | given


def is_rating(value: Any) -> bool:
    """Return whether a label says good or bad, and does not name a class."""
    return str(value).strip().lower() in LABELS


def check_label(raw: Row) -> bool:
    if not is_rating(raw["label"]):
        raise BadRow("label is not true or false", f"`label` is {ascii(raw['label'])[:40]}")
    return LABELS[str(raw["label"]).strip().lower()]


def check_class(raw: Row) -> str | float:
    """A name or a number; the objective says which."""
    label = raw["label"]
    if isinstance(label, str) and label.strip():
        return label
    if not isinstance(label, int | float) or not math.isfinite(label):
        seen = f"`label` is {ascii(label)[:40] if label == label else 'nan'}"
        raise BadRow("label is neither a name nor a number", seen)
    return label


def check_labelled_chat(raw: Row) -> Row:
    """A chat that need not have an answer in it."""
    chat = _prepend_turns(raw, read_messages(raw["messages"]))
    return {"messages": chat, "label": check_class(raw)} | _template_keys(raw)


def check_chat_completion(raw: Row) -> Row:
    """A prompt of messages, or of one user's text, and the answer to it."""
    answer = _read_answer(raw["completion"])
    if not isinstance(answer, list) or not answer or role_of(answer[0]) != "assistant":
        raise BadRow("completion is not an answer", "its first message must be the assistant's")
    num_answered = len(check_messages(answer, "completion"))
    chat = _prepend_turns(raw, _join_conversation(raw, "completion"))
    return {"prompt": chat[:-num_answered], "completion": chat[-num_answered:]} | _template_keys(raw)


def _read_answer(value: Any) -> Any:
    """The messages of an answer; a text that is not the JSON of a message is the assistant's."""
    if not isinstance(value, str):
        return [value] if isinstance(value, dict) else value
    messages = _parse_messages(value if value.startswith("[") else f"[{value}]")
    return messages if isinstance(messages, list) else [{"role": "assistant", "content": value}]


def check_chat_judgement(raw: Row) -> Row:
    label = check_label(raw)
    answered = check_chat_completion(raw)
    return {"prompt": answered.pop("prompt"), "completion": answered.pop("completion"), "label": label} | answered


def _check_group(raw: Row, key: str = "completions") -> tuple[list[Any], Row]:
    """The answers of a group as they are, and its numbers."""
    answers, rewards = (from_json(raw.get(name)) for name in (key, "rewards"))
    if not isinstance(answers, list):
        raise BadRow(f"{key} not a list", f"`{key}` is {kind_in_words(answers)}")
    if len(answers) < 2:
        seen = f"`{key}` has {len(answers)}; an advantage compares the answers to one prompt"
        raise BadRow("a group of fewer than two answers", seen)
    numbers: Row = {"rewards": _numbers(rewards, "`rewards`", len(answers))}
    given = {name: from_json(raw.get(name)) for name in LOGPROBS}
    lists = {name: _logprobs(value, name, len(answers)) for name, value in given.items() if not is_empty(value)}
    if not is_empty(ended := from_json(raw.get(ENDED))):
        numbers[ENDED] = _truths(ended, ENDED, len(answers))
    return answers, numbers | lists


def _truths(value: Any, name: str, count: int) -> list[bool]:
    if not isinstance(value, list) or len(value) != count or any(type(item) is not bool for item in value):
        raise BadRow("not true or false for each answer", f"`{name}` has one of them for each of {count} completions")
    return value


def _logprobs(value: Any, name: str, count: int) -> list[list[float]]:
    if not isinstance(value, list) or len(value) != count:
        seen = f"{len(value)} lists" if isinstance(value, list) else kind_in_words(value)
        raise BadRow("logprobs of another length", f"`{name}` is {seen} for {count} completions")
    lists = [_numbers(item, f"`{name}` {i}") for i, item in enumerate(value, start=1)]
    if any(logp > 0 for logps in lists for logp in logps):
        raise BadRow("logprobs above 0", "a log-probability is at most 0")
    return lists


def _numbers(value: Any, name: str, count: int | None = None) -> list[float]:
    if not isinstance(value, list):
        raise BadRow("not a list of numbers", f"{name} is {kind_in_words(value)}")
    for number in value:
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise BadRow("not a finite number", f"{name} has {ascii(number)[:40]}")
    if count is not None and len(value) != count:
        raise BadRow("rewards of another length", f"{name} has {len(value)} for {count} completions")
    return list(map(float, value))


def check_text_group(raw: Row) -> Row:
    answers, numbers = _check_group(raw)
    texts = [check_text(answer, f"completion {i}") for i, answer in enumerate(answers, start=1)]
    return {**check_asked(raw), "completions": texts, **numbers}


def check_chat_group(raw: Row) -> Row:
    answers, numbers = _check_group(raw)
    checked = []
    for i, answer in enumerate(answers, start=1):
        try:
            checked.append(check_chat_completion(raw | {"completion": answer}))
        except BadRow as bad:
            raise BadRow(bad.reason, f"completion {i}: {bad.seen}") from None
    prompts, ends = zip(*((row.pop("prompt"), row.pop("completion")) for row in checked), strict=True)
    return {"prompt": prompts[0], "completions": list(ends), **numbers, **checked[0]}


def check_sampled_group(raw: Row) -> Row:
    answers, numbers = _check_group(raw, "completion_ids")
    row = {**_check_tokens(raw, answers), **numbers}
    if is_empty(masks := from_json(raw.get(MASK))):
        return row
    lengths = [len(answer) for answer in row["completion_ids"]]
    are_lists = isinstance(masks, list) and all(isinstance(mask, list) for mask in masks)
    if not are_lists or [len(mask) for mask in masks] != lengths:
        raise BadRow("a mask of another length", f"`{MASK}` has not one number for each of `completion_ids`")
    if any(value not in (0, 1) for mask in masks for value in mask) or not all(map(any, masks)):
        raise BadRow("not a mask", f"`{MASK}` is of 0 and 1, and each answer has a 1")
    return {**row, MASK: [list(map(int, mask)) for mask in masks]}


def check_sampled(raw: Row) -> Row:
    answers = from_json(raw["completion_ids"])
    if not isinstance(answers, list) or not answers:
        raise BadRow("not a list of answers", f"`completion_ids` is {kind_in_words(answers)}")
    return _check_tokens(raw, answers)


def _check_tokens(raw: Row, answers: list[Any]) -> Row:
    asked = _token_ids(from_json(raw["prompt_ids"]), "`prompt_ids`")
    sampled = [_token_ids(answer, f"`completion_ids` {i}") for i, answer in enumerate(answers, start=1)]
    return {"prompt_ids": asked, "completion_ids": sampled}


def _token_ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise BadRow("not a list of tokens", f"{name} is {kind_in_words(value) if value != [] else 'empty'}")
    for token in value:
        if type(token) is not int or not 0 <= token < 2**31:
            raise BadRow("not a token", f"{name} has {ascii(token)[:40]}; write ids, from 0 on")
    return value


def is_chat_group(raw: Row) -> bool:
    answers = from_json(raw["completions"])
    return are_messages(raw.get("prompt")) or (isinstance(answers, list) and any(map(are_messages, answers)))


def _join_conversation(raw: Row, name: str) -> Chat:
    """The whole conversation of a prompt (a text, messages or None) and an answer that may repeat the prompt."""
    prompt, answer = raw.get("prompt"), _read_answer(raw[name])
    context = None if is_empty(raw.get("context")) else raw["context"]
    is_answer_only = isinstance(answer, list) and bool(answer) and role_of(answer[0]) == "assistant"
    if context is not None and not (isinstance(prompt, str) and is_answer_only):
        raise BadRow("`context` is not read", "beside a conversation it has no place; write it into a message")
    if prompt is None:
        return check_messages(answer, name)
    if isinstance(prompt, str):
        text = check_text(prompt, "`prompt`")
        asked = [{"role": "user", "content": text if context is None else _add_context(text, context)}]
    elif isinstance(prompt, list | dict):
        asked = read_messages(prompt, "prompt")
    else:
        raise BadRow("messages not a list", f"`prompt` is {kind_in_words(prompt)}")
    chat = check_messages(answer, name)
    if isinstance(raw[name], str) and asked[-1]["role"] == "assistant":
        raise BadRow("prompt ends with an answer", f"`{name}` is a text, which would be a second one")
    if is_answer_only:
        return [*asked, *chat]
    if isinstance(prompt, str) and asked[0] not in chat:  # a system message or earlier turns may precede it
        raise BadRow("prompt is not in the conversation", f"no user message of `{name}` is the `prompt`")
    if not isinstance(prompt, str) and chat[: len(asked)] != asked:
        raise BadRow("prompt is not in the conversation", f"`{name}` does not begin with the messages of `prompt`")
    return chat


def num_turns(chat: Chat) -> int:
    """Number of assistant turns."""
    return sum(message["role"] == "assistant" for message in chat)


def are_messages(value: Any) -> bool:
    return role_of(value[0] if isinstance(value, list) and value else value) is not None


def is_chat_completion(raw: Row) -> bool:
    return are_messages(raw["prompt"]) or are_messages(raw["completion"])


def is_chat_preference(raw: Row) -> bool:
    return not isinstance(raw["chosen"], str) or isinstance(raw.get("prompt"), list | dict)
