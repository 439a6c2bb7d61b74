"""A JSON text -> its value, in which no key is given twice; what is wrong is a bad row. No torch."""

import json
from collections import Counter
from typing import Any

NO_JSON = "not JSON"


class BadRow(ValueError):
    """A row that cannot be trained on, with a reason to count by and the value seen."""

    def __init__(self, reason: str, seen: str = "") -> None:
        self.reason, self.seen = reason, seen
        super().__init__(f"{reason}: {seen}" if seen else reason)

    def __reduce__(self) -> tuple[type["BadRow"], tuple[str, str]]:
        return BadRow, (self.reason, self.seen)


def json_value(text: str) -> Any:
    """The value of a JSON text; a BadRow if it is none."""
    try:
        return json.loads(text, object_pairs_hook=unique)
    except BadRow as bad:
        return bad
    except json.JSONDecodeError as error:
        return BadRow(NO_JSON, f"{error.msg.removesuffix(' at')} at column {error.colno}")
    except RecursionError:
        return BadRow(NO_JSON, "nested too deeply")
    except ValueError as error:  # a number of more digits than Python converts
        return BadRow(NO_JSON, str(error))


def from_json(value: Any) -> Any:
    """The value of a JSON text; anything else as it is.

    Raises:
        BadRow: an object in the text has a key twice.
    """
    parsed = json_value(value) if isinstance(value, str) else value
    if not isinstance(parsed, BadRow):
        return parsed
    if parsed.reason == NO_JSON:
        return value
    raise BadRow(parsed.reason, f"in a JSON text: {parsed.seen}")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values.

    Raises:
        BadRow: a key is given twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        names = Counter(key for key, _ in pairs)
        raise BadRow("key given twice", ", ".join(ascii(key) for key, count in names.items() if count > 1)[:200])
    return values
