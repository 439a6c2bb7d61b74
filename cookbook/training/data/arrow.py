"""Tables of Arrow -> rows as JSON would have them.

In a struct each row has the keys of all rows, with null where it has no such key: nulls of structs are left out, at
every depth. Columns of the table, items of lists and values of maps keep theirs, since Arrow adds none there. What the
schema declares as JSON (`arrow.json`, `Json` of `datasets`) is decoded and keeps its nulls. No value is guessed at.
"""

import json
import operator
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow
import pyarrow.compute

from cookbook.rows.json_text import BadRow, json_value, unique

Decoder = Callable[[Any], list[Any]]
"""An array -> its values."""
as_they_are: Decoder = operator.methodcaller("to_pylist")

MEDIA = ("Image", "Audio", "Video", "Pdf", "Nifti", "Mesh", "BioSequence", "BioStructure")
"""Types of `datasets` whose values are files or parts of them."""
LISTS = (
    pyarrow.ListType,
    pyarrow.LargeListType,
    pyarrow.FixedSizeListType,
    pyarrow.ListViewType,
    pyarrow.LargeListViewType,
)
ROLES = frozenset({"role", "from"})
types = pyarrow.types
TEXTS = (types.is_string, types.is_large_string, types.is_string_view)
OTHERS = (types.is_boolean, types.is_integer, types.is_floating, types.is_null)
"""Other types whose values JSON has."""


@dataclass(frozen=True, repr=False)
class UnreadableValue:
    """Stands for a value that JSON does not have, such as a date: harmless where nobody reads it."""

    words: str
    """The kind of value and the remedy, for messages."""

    def __repr__(self) -> str:
        return self.words


def row_decoder(schema: Any, roles: Set[str] = frozenset()) -> Callable[[Any], list[dict[str, Any]]]:
    """A function from a record batch of this schema to its rows.

    Args:
        roles: more keys that a message may have for its role. A column of one object whose values are lists, with such
            a key, is a list of messages as `Sequence` of `datasets` stores it.
    """
    features = _features(schema)
    names = schema.names
    decoders = [_decoder(field.type, features.get(field.name), field.name, ROLES | roles) for field in schema]

    def rows(batch: Any) -> list[dict[str, Any]]:
        columns = [decode(column) for decode, column in zip(decoders, batch.columns, strict=True)]
        return [dict(zip(names, values, strict=False)) for values in zip(*columns, strict=True)]

    return as_they_are if all(decode is as_they_are for decode in decoders) else rows


def _features(schema: Any) -> dict[str, Any]:
    """The types of the columns as `datasets` writes them beside the schema."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _decoder(kind: Any, feature: Any, place: str, roles: Set[str] = frozenset()) -> Decoder:
    """The decoder of arrays of a type.

    Args:
        feature: the same type as `datasets` writes it, or None.
        place: the column and the keys that lead to the values.
    """
    name = feature.get("_type") if isinstance(feature, dict) else None
    name = name if isinstance(name, str) else ""  # else the type of a struct's key `_type`
    if types.is_dictionary(kind):
        inner = _decoder(kind.value_type, feature, place)
        return as_they_are if inner is as_they_are else lambda array: inner(array.dictionary_decode())
    if types.is_run_end_encoded(kind):
        inner = _decoder(kind.value_type, feature, place)
        return lambda array: inner(pyarrow.compute.run_end_decode(array))
    is_text = any(is_such(kind) for is_such in TEXTS)
    if getattr(kind, "extension_name", "") == "arrow.json" or (name == "Json" and is_text):
        return partial(_json_values, place)
    if name in MEDIA:
        return _unreadable_decoder(f"{name} of datasets", place)
    if types.is_struct(kind):
        return _struct_decoder(kind, feature, place, roles)
    if types.is_map(kind) and any(is_such(kind.key_type) for is_such in TEXTS):
        return partial(_map_values, _decoder(kind.item_type, None, place), place)
    if isinstance(kind, LISTS):
        of_items = feature.get("feature") if name else feature[0] if isinstance(feature, list) and feature else None
        inner = _decoder(kind.value_type, of_items, place)
        return as_they_are if inner is as_they_are else partial(_list_values, inner)
    if is_text or any(is_such(kind) for is_such in OTHERS):
        return as_they_are
    return _unreadable_decoder(str(kind)[:80], place)


def _unreadable_decoder(kind: str, place: str) -> Decoder:
    value = UnreadableValue(f"of type {kind} (column {place!a}), which JSON does not have; write it as text")
    return lambda array: [value if is_valid else None for is_valid in array.is_valid().to_pylist()]


def _json_values(place: str, array: Any) -> list[Any]:
    values = [None if text is None else json_value(text) for text in array.to_pylist()]
    return [_replace_unreadable(value, f"a text of JSON (column {place!a})") for value in values]


def _replace_unreadable(value: Any, what: str) -> Any:
    return UnreadableValue(f"{what}: {value}") if isinstance(value, BadRow) else value


def _struct_decoder(kind: Any, feature: Any, place: str, roles: Set[str]) -> Decoder:
    fields = [kind.field(i) for i in range(kind.num_fields)]
    names = [field.name for field in fields]
    if len({*names}) < len(names):
        return _unreadable_decoder(f"{kind}"[:80], place)
    of_keys = feature if isinstance(feature, dict) else {}
    of_sequence = of_keys.get("feature") if of_keys.get("_type") == "Sequence" else None
    if isinstance(of_sequence, dict):
        of_keys = {key: {"_type": "List", "feature": feature} for key, feature in of_sequence.items()}
    are_lists = bool(fields) and all(isinstance(field.type, LISTS) for field in fields)
    is_sequence = are_lists and (isinstance(of_sequence, dict) or not roles.isdisjoint(names))
    decoders = [_decoder(field.type, of_keys.get(field.name), f"{place}.{field.name}") for field in fields]

    def values(array: Any) -> list[Any]:
        columns = [decode(column) for decode, column in zip(decoders, array.flatten(), strict=True)]
        objects: list[Any] = _objects(names, columns) if names else [{} for _ in range(len(array))]
        if is_sequence:
            objects = [_items_of(lists) for lists in objects]
        return _with_nulls(objects, array)

    return values


def _objects(names: list[str], columns: Iterable[list[Any]]) -> list[dict[str, Any]]:
    """An object per place of the columns, without keys whose value is null."""
    rows = zip(*columns, strict=True)
    if not any(None in column for column in columns):
        return [dict(zip(names, row, strict=False)) for row in rows]
    return [{name: value for name, value in zip(names, row, strict=False) if value is not None} for row in rows]


def _items_of(lists: dict[str, list[Any]]) -> Any:
    """The objects of a dictionary of lists; itself if the lists differ in length."""
    is_table = len({len(values) for values in lists.values()}) == 1
    return _objects(list(lists), lists.values()) if is_table else lists


def _with_nulls(values: list[Any], array: Any) -> list[Any]:
    """The values where the array has one, else null."""
    if not array.null_count:
        return values
    return [value if is_valid else None for value, is_valid in zip(values, array.is_valid().to_pylist(), strict=True)]


def _list_values(decode: Decoder, array: Any) -> list[Any]:
    # By offsets, as pyarrow flattens no lists of JSON if a null among them has items.
    starts, ends = _bounds(array)
    first = min(starts, default=0)
    items = decode(array.values.slice(first, max(ends, default=0) - first))
    lists = [items[start - first : end - first] for start, end in zip(starts, ends, strict=True)]
    return _with_nulls(lists, array)


def _bounds(array: Any) -> tuple[list[int], list[int]]:
    """Return the places at which the items of each list begin and end among those that the array holds."""
    if isinstance(array, pyarrow.FixedSizeListArray):
        size = array.type.list_size
        starts = [size * (array.offset + i) for i in range(len(array))]
        return starts, [start + size for start in starts]
    offsets = array.offsets.to_pylist()
    if isinstance(array, pyarrow.ListViewArray | pyarrow.LargeListViewArray):
        return offsets, [start + size for start, size in zip(offsets, array.sizes.to_pylist(), strict=True)]
    return offsets[:-1], offsets[1:]


def _map_values(decode: Decoder, place: str, array: Any) -> list[Any]:
    starts, ends = _bounds(array)
    first, last = min(starts, default=0), max(ends, default=0)
    keys = array.keys.slice(first, last - first).to_pylist()
    pairs = list(zip(keys, decode(array.items.slice(first, last - first)), strict=True))
    objects = [_object(pairs[start - first : end - first], place) for start, end in zip(starts, ends, strict=True)]
    return _with_nulls(objects, array)


def _object(pairs: list[tuple[str, Any]], place: str) -> Any:
    try:
        return unique(pairs)
    except BadRow as bad:
        return UnreadableValue(f"a map (column {place!a}) with a {bad}")
