"""A JSON text -> its value, in which no key is given twice."""

import json
from collections import Counter
from typing import Any

from cookbook.config.row_kinds import BadRow


def json_value(text: str) -> Any:
    """The value of a JSON text; a BadRow if it is none."""
    try:
        return json.loads(text, object_pairs_hook=unique)
    except BadRow as bad:
        return bad
    except json.JSONDecodeError as error:
        return BadRow("not JSON", f"{error.msg.removesuffix(' at')} at column {error.colno}")
    except RecursionError:
        return BadRow("not JSON", "nested too deeply")
    except ValueError as error:  # a number of more digits than Python converts
        return BadRow("not JSON", str(error))


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values; raises BadRow if a key is given twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = Counter(key for key, _ in pairs)
        raise BadRow("key given twice", ", ".join(ascii(key) for key, count in names.items() if count > 1)[:200])
    return values
