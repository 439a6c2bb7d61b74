"""The messages of a chat: names that other projects give to roles and keys, and what a valid chat is. No torch."""

import json
from typing import Any

from cookbook.system.files import kind_in_words

Chat = list[dict[str, Any]]

FOREIGN_KEYS = {"from": "role", "value": "content"}
"""Keys of a ShareGPT message, by what they are called here."""
ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "developer": "system",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
"""Roles under other names."""

FOLLOWING = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "tool": ("assistant", "tool"),
}
"""Roles that may follow a role; after tool calls, only their results."""
TEMPLATE_KEYS = ("tool_calls", "reasoning_content", "thinking")
"""Keys of an assistant message besides its content, which a chat template must write."""


class BadRow(ValueError):
    """A row that cannot be trained on, with a reason to count by and the value seen."""

    def __init__(self, reason: str, seen: str = "") -> None:
        self.reason, self.seen = reason, seen
        super().__init__(f"{reason}: {seen}" if seen else reason)

    def __reduce__(self) -> tuple[type["BadRow"], tuple[str, str]]:
        return BadRow, (self.reason, self.seen)


def is_foreign(messages: Any) -> bool:
    """Whether messages have ShareGPT's keys."""
    first = messages[0] if isinstance(messages, list) and messages else messages
    return isinstance(first, dict) and "from" in first and "role" not in first


def own_names(messages: Any) -> Any:
    """The messages, or the single one, with the keys and roles that are used here; anything else as it is."""
    if isinstance(messages, dict):
        messages = [messages]
    if not isinstance(messages, list):
        return messages
    return [_own_names(message) if isinstance(message, dict) else message for message in messages]


def _own_names(message: dict[str, Any]) -> dict[str, Any]:
    if is_foreign(message):
        message = {FOREIGN_KEYS.get(key, key): value for key, value in message.items()}
    role, call = message.get("role"), message.get("function_call")
    if role == "function_call":
        role, call, message = "assistant", message.get("content"), message | {"content": None}
    if call:
        message = {key: value for key, value in message.items() if key != "function_call"}
        calls = from_json(call)
        message["tool_calls"] = calls if isinstance(calls, list) else [calls]
    return message | {"role": ROLES.get(role, role)} if isinstance(role, str) else message


def from_json(value: Any) -> Any:
    """The value of a JSON text; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def check_messages(messages: Any, name: str = "") -> Chat:
    """The validated messages, reduced to what a template writes and `train: false`; `name` is their key if not
    `messages`."""
    if not isinstance(messages, list):
        raise BadRow("messages not a list", f"{name and f'`{name}` is '}{kind_in_words(messages)}")
    if not messages:
        raise BadRow("messages empty", f"`{name}`" if name else "")
    checked: Chat = []
    for number, message in enumerate(messages, start=1):
        which = f"message {number}" + (f" of `{name}`" if name else "")
        if not isinstance(message, dict):
            raise BadRow("message not an object", f"{which} is {kind_in_words(message)}")
        before = checked[-1] if checked else {}
        allowed = ("tool",) if "tool_calls" in before else FOLLOWING[before.get("role")]
        if message.get("role") not in allowed:
            has = f"has {ascii(message['role'])[:40]}" if "role" in message else f"is {kind_in_words(message)}, no role"
            raise BadRow("wrong role", f"{which} {has}; expected {' or '.join(allowed)}")
        checked.append(_check_message(message, which))
    if all(message["role"] != "assistant" for message in checked):
        raise BadRow("no assistant turn", f"`{name}`" if name else "")
    return checked


def _check_message(message: dict[str, Any], which: str) -> dict[str, Any]:
    checked = {"role": message["role"], "content": ""}
    is_assistant = message["role"] == "assistant"
    for key in TEMPLATE_KEYS:
        value = message.get(key)
        if value and not is_assistant:
            raise BadRow("message with more than text", f"{which} has `{key}`, but its role is {message['role']}")
        if value:
            checked[key] = _check_calls(value, which) if key == "tool_calls" else check_text(value, f"{which} {key}")
    content = _joined(message.get("content"), which)
    if content or ("tool_calls" not in checked and (message["role"] != "tool" or content is None)):
        checked["content"] = check_text(content, f"{which} content")
    if message["role"] == "tool":
        checked |= {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
    train = message.get("train")
    if train is not None and not isinstance(train, bool):
        raise BadRow("train is not true or false", f"{which} has {ascii(train)[:40]}")
    if train and not is_assistant:
        raise BadRow("train: true of another role", f"{which}; only the assistant's messages carry loss")
    return checked | ({"train": False} if train is False and is_assistant else {})


def _joined(content: Any, which: str) -> Any:
    """The text of a list of text parts; anything else as it is."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    for part, text in zip(content, texts, strict=True):
        if not isinstance(text, str):
            has_type = isinstance(part, dict) and "type" in part
            kind = ascii(part["type"])[:40] if has_type else kind_in_words(part)
            raise BadRow("not text", f"{which} content is a list with {kind}; only parts of text are read")
    return "".join(map(str, texts))


def _check_calls(calls: Any, which: str) -> list[dict[str, Any]]:
    """Tool calls as chat templates expect them, with arguments as an object."""
    calls = from_json(calls)
    if not isinstance(calls, list):
        raise BadRow("tool calls not a list", f"{which} has {kind_in_words(calls)}")
    checked = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else {}
        name = function.get("name") if isinstance(function, dict) else None
        arguments = from_json(function.get("arguments")) if name else None
        if not isinstance(name, str) or not isinstance(arguments or {}, dict):
            raise BadRow(
                "not a tool call", f"{which} has {ascii(call)[:80]}; it needs a name, and arguments as an object"
            )
        identity = {key: value for key, value in call.items() if key == "id" and isinstance(value, str)}
        checked.append({**identity, "type": "function", "function": {"name": name, "arguments": arguments or {}}})
    return checked


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """The tools that a chat may call, for the template."""
    tools = from_json(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("tools not a list of objects", kind_in_words(tools))
    return tools


def check_text(text: Any, name: str) -> str:
    if text is None:
        raise BadRow("empty text", f"{name} is null or missing")
    if not isinstance(text, str):
        raise BadRow("not text", f"{name} is {kind_in_words(text)}")
    if not text.strip():
        raise BadRow("empty text", f"{name} is {'empty' if not text else 'only whitespace'}")
    if "\0" in text:
        raise BadRow("NUL character", f"{name} at character {text.index(chr(0)) + 1}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("lone surrogate", f"{name} at character {error.start + 1}; not valid in text") from None
    return text
