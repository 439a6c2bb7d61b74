"""The messages of a chat: names that other projects give to roles and keys, and what a valid chat is. No torch.

Every key of a message, a part of its content and a tool call is read, named as metadata by `unread_keys`, or refused.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from cookbook.rows.json_text import BadRow, from_json
from cookbook.system.files import kind_in_words

Chat = list[dict[str, Any]]

FOREIGN_KEYS = {"from": "role", "value": "content"}
"""Keys of a ShareGPT message, by what they are called here."""
OTHER_ROLES = {
    "system": ("developer", "system_prompt"),
    "user": ("human", "prompter"),
    "assistant": ("gpt", "chatgpt", "model", "bot", "chatbot", "ai", "bing", "bard"),
    "tool": (
        *("observation", "function", "function_response", "function_result", "tool_response", "tool_result"),
        *("tool_results", "tool_output", "ipython"),
    ),
}
"""Roles under other names, in small letters."""
ROLES = {name: role for role, names in OTHER_ROLES.items() for name in (role, *names)}
CALL_ROLES = ("function_call", "tool_call")
"""Roles of messages that are tool calls of the assistant, each with one call or a list of them for its content."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of the reasoning before an assistant's answer; read as `reasoning_content`."""
LOSS_MARKS = ("train", "training", "loss", "loss_mask", "weight", "loss_weight", "mask", "masked")
"""Keys that say if a message carries loss: true, false, 1 or 0; `masked` is the opposite."""
WRITES_CALLS = ("assistant", "tool")
"""Roles of a message before a tool's result, where the calls are text."""
IN_MESSAGES = "messages."
"""Begins the name of a key of messages, whatever column they are in."""
READ_KEYS = frozenset(
    ("role", "content", "name", "tool_call_id", "tool_calls", "function_call", *REASONING_KEYS, *LOSS_MARKS)
)
PLAIN_KEYS = frozenset(("role", "content"))
ONLY_TEXT = "only text is trained on"
MEANT_KEYS = {
    **dict.fromkeys(("image", "images", "image_url", "audio", "audios", "input_audio", "video", "videos"), ONLY_TEXT),
    **dict.fromkeys(("file", "files", "documents"), ONLY_TEXT),
    **dict.fromkeys(("tools", "functions"), "tools stand beside the messages, in the row's `tools`"),
    "refusal": "write its text as the `content`",
    "tool_plan": "write its text as the `content`",
    **dict.fromkeys(("reasoning_details", "thinking_blocks"), "write their text as `reasoning_content`"),
    **dict.fromkeys(("train_detail", "training_detail"), "loss is on whole messages"),
    **dict.fromkeys(("channel", "recipient", "prefix"), "no counterpart here"),
}
"""Other keys of a message that a known format gives a meaning, and why they are not read."""

PART_TEXTS = ("text", "input_text", "output_text")
PART_REASONING = ("thinking", "reasoning")
PART_CALLS = ("tool_call",)
PART_KEYS = frozenset(("type", "text", "value", "thought", *PART_REASONING))
PARTS_ELSEWHERE = {
    "tool_use": "; write the call in `tool_calls`",
    "tool_result": "; write it as a message of the role tool",
    "refusal": "; write it as text",
}
"""Parts whose content a message has in another place."""
ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Names of a call's arguments."""
FUNCTION_KEYS = frozenset(("name", *ARGUMENTS))
CALL_KEYS = FUNCTION_KEYS | {"id", "type", "function"}


def is_foreign(messages: Any) -> bool:
    """Return whether messages have ShareGPT's keys."""
    first = messages[0] if isinstance(messages, list) and messages else messages
    return isinstance(first, dict) and "from" in first and "role" not in first


def role_of(message: Any) -> Any:
    """The role of a message under this project's name; a role that is not known as it is."""
    if not isinstance(message, dict):
        return None
    role = message.get("role") or message.get("from")
    if not isinstance(role, str):
        return role
    return "assistant" if _is_call_role(message) else ROLES.get(role.strip().lower(), role)


def check_messages(messages: Any, name: str = "") -> Chat:
    """The messages of `read_messages`, at least one of them the assistant's."""
    checked = read_messages(messages, name)
    if all(message["role"] != "assistant" for message in checked):
        raise BadRow("no assistant turn", f"`{name}`" if name else "")
    return checked


def read_messages(messages: Any, name: str = "") -> Chat:
    """The validated messages under this project's names; `name` is their key if not `messages`.

    Each has `role` and `content` and, where there are some, `tool_calls` (with arguments as an object),
    `reasoning_content`, `name`, `tool_call_id`, and `train: false` for an assistant's turn without loss. Roles may come
    in any order that a chat template writes, but a tool's result needs a call before it.
    """
    messages = from_json(messages)
    if isinstance(messages, dict):
        messages = [messages]
    if not isinstance(messages, list):
        advice = "write a list of them, or name the columns of texts in data.columns"
        raise BadRow("messages not a list", f"`{name or 'messages'}` is {kind_in_words(messages)}; {advice}")
    if not messages:
        raise BadRow("messages empty", f"`{name}`" if name else "")
    checked: Chat = []
    has_calls = False
    for number, message in enumerate(messages, start=1):
        try:
            turn = _read_message(message)
            if "tool_calls" in turn:
                if has_calls and _is_call_role(message) and _is_call_role(messages[number - 2]):
                    before = checked[-1]  # calls of one turn, each in a message of its own
                    if before == turn | {"tool_calls": before["tool_calls"]}:
                        before["tool_calls"] += turn["tool_calls"]
                        continue
                has_calls = True
            elif turn["role"] == "tool" and not (has_calls or (checked[-1:] and checked[-1]["role"] in WRITES_CALLS)):
                raise BadRow("tool result without a call", "has the role tool; no message before it has `tool_calls`")
        except BadRow as bad:
            which = f"message {number}" + (f" of `{name}`" if name else "")
            raise BadRow(bad.reason, f"{which} {bad.seen}") from None
        checked.append(turn)
    return checked


def _is_call_role(message: dict[str, Any]) -> bool:
    role = message.get("role") or message.get("from")
    return isinstance(role, str) and role.strip().lower() in CALL_ROLES


def _read_message(message: Any) -> dict[str, Any]:
    if type(message) is dict and len(message) == 2 and message.keys() == PLAIN_KEYS:  # most are: nothing to look for
        role, content = message["role"], message["content"]
        if role in ("user", "assistant", "system") and type(content) is str:
            return {"role": role, "content": check_text(content, "content")}
    if not isinstance(message, dict):
        raise BadRow("message not an object", f"is {kind_in_words(message)}")
    message = {key: value for key, value in message.items() if value is not None}
    if is_foreign(message):
        if message.keys() >= {"content", "value"} and message["content"] != message["value"]:
            raise BadRow("two contents in one message", "has `content` and `value`; write one, or pass one over")
        message = {FOREIGN_KEYS.get(key, key): value for key, value in message.items()}
    if "role" not in message:
        raise BadRow("wrong role", f"is {kind_in_words(message)}, no role; {_ROLES_IN_WORDS}")
    role = role_of(message)
    if not isinstance(role, str) or role not in OTHER_ROLES:
        raise BadRow("wrong role", f"has {ascii(message['role'])[:40]}; {_ROLES_IN_WORDS}")
    if _is_call_role(message):
        message = message | {"content": "", "function_call": message.get("content")}
    for key in MEANT_KEYS.keys() & message.keys():
        _refuse_key(key, message[key], MEANT_KEYS[key], way_out=f"{IN_MESSAGES}{key}")
    return _check_content(message, role)


_ROLES_IN_WORDS = "a role is system, user, assistant or tool, or one of their other names (docs/recipes.md)"


def _check_content(message: dict[str, Any], role: str) -> dict[str, Any]:
    content, reasoning, calls = _split_parts(message.get("content"))
    calls = [*_find_calls(message), *calls]
    reasonings = {check_text(message[key], key) for key in REASONING_KEYS if message.get(key)} | set(reasoning)
    if len(reasonings) > 1:
        raise BadRow("two reasonings in one message", f"has {' and '.join(map(ascii, sorted(reasonings)))[:120]}")
    checked: dict[str, Any] = {"role": role, "content": ""}
    for key, value in (("tool_calls", calls), ("reasoning_content", next(iter(reasonings), None))):
        if value and role != "assistant":
            named = next((name for name in (*REASONING_KEYS, "function_call") if message.get(name)), key)
            raise BadRow("message with more than text", f"has `{named}`, but its role is {role}")
        if value:
            checked[key] = value
    if content or (not calls and (role != "tool" or content is None)):
        checked["content"] = check_text(content, "content")
    for key in ("name", "tool_call_id"):
        if value := message.get(key):
            if not isinstance(value, str):
                raise BadRow("not text", f"{key} is {kind_in_words(value)}")
            if key == "tool_call_id" and role != "tool":
                raise BadRow("message with more than text", f"has `{key}`, but its role is {role}")
            checked[key] = value
    if _loss_mark(message, role) is False and role == "assistant":
        checked["train"] = False
    return checked


def _loss_mark(message: Mapping[str, Any], role: str) -> bool | None:
    """Return whether the message says that it carries loss; None if it says nothing."""
    mark: bool | None = None
    for key in LOSS_MARKS:
        if (value := message.get(key)) is None:
            continue
        shown = f"has `{key}` {ascii(value)[:40]}"
        if key == "mask":
            raise BadRow("mask that can mean two things", f"{shown}; write `train`: true or false")
        if not isinstance(value, int | float) or value not in (0, 1):
            way_out = f"or pass it over with data.ignore: [{IN_MESSAGES}{key}]"
            raise BadRow(f"`{key}` is not true or false", f"{shown}; a message carries loss or none, {way_out}")
        carries = bool(value) != (key == "masked")
        # OpenAI's weight of a question is 1 like any other's, and an unmasked one is the default of `masked`.
        if carries and role != "assistant" and key not in ("weight", "masked"):
            raise BadRow(
                f"{key}: true of another role",
                f"{shown}; only the assistant's messages carry loss (all tokens do with objective.train_on: all)",
            )
        if mark is not None and mark != carries:
            raise BadRow("loss marks that disagree", f"{shown}, and another mark says the opposite")
        mark = carries
    return mark


def _split_parts(content: Any) -> tuple[Any, list[str], list[dict[str, Any]]]:
    """The text of a list of parts, its reasoning and its tool calls; anything else as it is."""
    if not isinstance(content, list):
        return content, [], []
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind in PART_CALLS:
            calls += _check_calls(part.get("value"))
            continue
        text = _part_text(part, kind)
        if text is None:
            shown = ascii(kind)[:40] if kind is not None else kind_in_words(part)
            instead = PARTS_ELSEWHERE.get(kind, "") if isinstance(kind, str) else ""
            raise BadRow("not text", f"content is a list with {shown}; only parts of text are read{instead}")
        for key in MEANT_KEYS.keys() & part.keys():
            _refuse_key(key, part[key], MEANT_KEYS[key], place=" of a part of the content")
        is_reasoning = kind in PART_REASONING or part.get("thought") is True  # Gemini's
        if text and (calls or (is_reasoning and any(texts))):
            raise BadRow("parts in another order", "content has text after a call, or reasoning after text")
        (reasoning if is_reasoning else texts).append(text)
    joined = "".join(reasoning)
    return "".join(texts), [check_text(joined, "reasoning")] if joined else [], calls


def _part_text(part: Any, kind: Any) -> str | None:
    if not isinstance(part, dict) or not (kind is None or kind in PART_TEXTS or kind in PART_REASONING):
        return None
    values = [part[key] for key in ("text", "value", *PART_REASONING) if part.get(key) is not None]
    if sum(value not in ("", []) for value in values) > 1:
        raise BadRow("two texts in one part", f"content has {kind_in_words(part)}; write a part for each text")
    text = next((value for value in values if value), values[0] if values else None)
    if isinstance(text, list):  # reasoning in parts of its own
        texts = [_part_text(item, item.get("type")) if isinstance(item, dict) else None for item in text]
        text = "".join(map(str, texts)) if None not in texts else None
    return text if isinstance(text, str) else None


def _find_calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls, call = message.get("tool_calls"), message.get("function_call")
    if calls and call:
        raise BadRow("not a tool call", "has both `tool_calls` and `function_call`")
    if call:
        call = from_json(call)
        calls = call if isinstance(call, list) else [call]
    return _check_calls(calls) if calls else []


def _check_calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls as chat templates expect them, with arguments as an object."""
    calls = from_json(calls)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        raise BadRow("tool calls not a list", f"has {kind_in_words(calls)}")
    return [_check_call(call) for call in calls]


def _check_call(call: Any) -> dict[str, Any]:
    function = (call.get("function") or call) if isinstance(call, dict) else {}
    name = function.get("name") if isinstance(function, dict) else None
    places = () if not name else (call,) if function is call else (function, call)
    given = [from_json(place[key]) for place in places for key in ARGUMENTS if key in place]
    given = [value for value in given if value not in (None, "", {})]
    if len(given) > 1 or (name and call.get("name") not in (None, "", name)):
        raise BadRow("not a tool call", f"has {ascii(call)[:80]}; it needs one name, and its arguments once")
    arguments = given[0] if given else {}
    if (
        not isinstance(name, str)
        or not isinstance(arguments or {}, dict)
        or call.get("type") not in (None, "", "function", *PART_CALLS)
    ):
        seen = f"has {ascii(call)[:80]}; it needs a name, and arguments as an object or its JSON text"
        raise BadRow("not a tool call", seen)
    if (identity := call.get("id")) and not isinstance(identity, str):
        raise BadRow("not a tool call", f"has the id {ascii(identity)[:40]}; an id is text")
    named = {"id": identity} if identity else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def _refuse_key(key: str, value: Any, why: str, *, place: str = "", way_out: str = "") -> None:
    """Raise unless the value asks for nothing."""
    if value not in (None, "", [], {}, False):
        advice = f", or pass it over with data.ignore: [{way_out}]" if way_out else ""
        raise BadRow(f"`{key}` is not read", f"has `{key}`{place}, {kind_in_words(value)}: {why}{advice}")


def unread_keys(messages: Any) -> Iterator[str]:
    """The keys of checked messages, of their parts and calls, that have a value and that nothing reads: metadata."""
    if isinstance(messages, dict):
        messages = [messages]
    if not isinstance(messages, list):
        return
    for message in messages:
        if type(message) is not dict:
            continue
        content = message.get("content")
        if message.keys() <= PLAIN_KEYS and type(content) is str:
            continue
        read = READ_KEYS if message.get("role") is not None else READ_KEYS | FOREIGN_KEYS.keys()
        yield from _list_unread(message, read | MEANT_KEYS.keys(), "")
        for part in _objects(content if content is not None else message.get("value")):
            yield from _list_unread(part, PART_KEYS | MEANT_KEYS.keys(), "content.")
        for call in _objects(message.get("tool_calls")):
            yield from _list_unread(call, CALL_KEYS, "tool_calls.")
            if isinstance(function := call.get("function"), dict):
                yield from _list_unread(function, FUNCTION_KEYS, "tool_calls.function.")


def unread_of_answers(messages: Any) -> Iterator[tuple[dict[str, Any], Collection[str]]]:
    """Each of the assistant's messages with its own keys that have a value and that nothing reads."""
    for message in messages if isinstance(messages, list) else [messages]:
        if type(message) is dict and role_of(message) == "assistant":
            keys = message.keys() - READ_KEYS - MEANT_KEYS.keys() - FOREIGN_KEYS.keys()
            yield message, [key for key in keys if message[key] is not None] if keys else ()


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _list_unread(value: Mapping[str, Any], read: Any, place: str) -> Iterator[str]:
    for key in value.keys() - read:
        if value[key] not in (None, "", [], {}):
            yield f"{IN_MESSAGES}{place}{key}"


def check_tools(tools: Any, wrap: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> list[dict[str, Any]]:
    """The tools that a chat may call, for the template; each an object or its JSON text."""
    tools = from_json(tools)
    if isinstance(tools, dict) and tools.keys() & {"name", "function"}:
        tools = [tools]
    if isinstance(tools, list):
        tools = [from_json(tool) for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("tools not a list of objects", kind_in_words(tools))
    return [wrap(tool) for tool in tools]


def check_parts(text: Any, name: str) -> str:
    """A text, or a list of parts of it."""
    text, *others = _split_parts(text)
    if any(others):
        raise BadRow("not text", f"{name} has a part that is no text")
    return check_text(text, name)


def check_text(text: Any, name: str) -> str:
    if text is None:
        raise BadRow("empty text", f"{name} is null or missing")
    if not isinstance(text, str):
        has_roles = isinstance(text, list) and text and role_of(text[0]) is not None
        advice = "; messages stand in `messages`, or in `prompt` beside `completion`" if has_roles else ""
        advice = advice or ("; write its JSON text" if isinstance(text, dict | list) else "")
        raise BadRow("not text", f"{name} is {kind_in_words(text)}{advice}")
    if not text.strip():
        raise BadRow("empty text", f"{name} is {'empty' if not text else 'only whitespace'}")
    if "\0" in text:
        raise BadRow("NUL character", f"{name} at character {text.index(chr(0)) + 1}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("lone surrogate", f"{name} at character {error.start + 1}; not valid in text") from None
    return text
