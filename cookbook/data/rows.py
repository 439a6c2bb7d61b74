"""Reads a source into checked rows of one kind; every bad row is named with its file and line."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cookbook.files import RecipeError
from cookbook.recipe import BUILTIN_SOURCE, Source

MAX_ROW_BYTES = 1_000_000
MAX_NAMED = 20

Kind = Literal["messages", "completion", "text"]
KEYS: dict[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}
COLUMNS = [key for keys in KEYS.values() for key in keys]
SHAPES = "`messages`, `prompt` and `completion`, or `text`"
SUFFIXES = (".jsonl", ".parquet")
OTHER_SPLITS = ("test", "val", "eval", "dev")
# What a message may carry that changes its meaning and is not served: without it, half a turn would be trained.
UNSERVED = ("tool_calls", "function_call", "reasoning_content", "thinking")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Good rows of one kind, with the keys of that kind only."""

    kind: Kind
    rows: list[dict[str, Any]]
    """`{"messages": [{"role", "content"}, ...]}`, `{"prompt", "completion"}` or `{"text"}`."""
    num_dropped: dict[str, int]
    """Bad rows by reason."""
    fingerprint: str
    """SHA-256 of kind and rows; the same whatever file format they came from."""


class BadRow(ValueError):
    """Why a row cannot be trained on: a reason to count, and what was seen."""

    def __init__(self, reason: str, seen: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {seen}" if seen else reason)


@dataclass
class BadRows:
    """Bad rows so far: counted by reason, the first ones worded."""

    num_by_reason: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)

    def add(self, place: str, bad: BadRow) -> None:
        self.num_by_reason[bad.reason] += 1
        if len(self.named) < MAX_NAMED:
            self.named.append(f"{place}: {bad}")

    def mistakes(self) -> list[str]:
        unnamed = self.num_by_reason.total() - len(self.named)
        return self.named + ([f"... and {unnamed} more"] if unnamed else [])

    def stop_if(self, on_bad_row: Literal["error", "drop"]) -> None:
        """Raises RecipeError if there is a bad row and the recipe does not drop them."""
        if self.named and on_bad_row == "error":
            raise RecipeError([*self.mistakes(), "Mend these rows, or leave them out with data.on_bad_row: drop"])


def read_rows(source: Source, on_bad_row: Literal["error", "drop"]) -> Rows:
    """The good rows of a source, in its order; the first good row decides the kind.

    Keys of a row that its kind does not have (ids, scores) are ignored. With `max_rows` nothing is read, or checked,
    after that many good rows.

    Raises:
        RecipeError: bad rows under on_bad_row "error", no row left, or a source that cannot be read.
    """
    bad_rows, rows = BadRows(), []
    kind: Kind | None = None
    for place, raw in _raw_rows(source):
        try:
            row_kind, row = _check_row(raw)
            if kind is not None and row_kind != kind:
                raise BadRow("another kind of row", f"{_keys(row_kind)}, where the rows before have {_keys(kind)}")
        except BadRow as bad:
            bad_rows.add(place, bad)
            continue
        kind = row_kind
        rows.append(row)
        if len(rows) == source.max_rows:
            break
    bad_rows.stop_if(on_bad_row)
    if kind is None:
        raise RecipeError([f"{source.path}: no row left to train on", *bad_rows.mistakes()])
    num_dropped = dict(bad_rows.num_by_reason)
    return Rows(kind=kind, rows=rows, num_dropped=num_dropped, fingerprint=_fingerprint(kind, rows))


def texts(rows: Rows) -> Iterator[str]:
    """Every text of the rows, to train a tokenizer on."""
    for row in rows.rows:
        if rows.kind == "messages":
            yield from (message["content"] for message in row["messages"])
        else:
            yield from (row[key] for key in KEYS[rows.kind])


def _keys(kind: Kind) -> str:
    return " and ".join(f"`{key}`" for key in KEYS[kind])


def _fingerprint(kind: Kind, rows: list[dict[str, Any]]) -> str:
    digest = hashlib.sha256(kind.encode())
    for row in rows:
        digest.update(b"\n" + json.dumps(row, ensure_ascii=False).encode())
    return digest.hexdigest()


# Where rows come from: each yields (place, raw row), the raw row being a BadRow where there is none.


def _raw_rows(source: Source) -> Iterator[tuple[str, Any]]:
    path = Path(source.path)
    if source.path == BUILTIN_SOURCE:
        yield from _number(BUILTIN_SOURCE, _stdlib_rows(source.split))
    elif path.suffix in SUFFIXES or path.is_dir():
        for file in _files_of_split(path, source.split) if path.is_dir() else [path]:
            yield from _jsonl_rows(file) if file.suffix == ".jsonl" else _parquet_rows(file)
    else:
        yield from _number(source.path, _hub_rows(source))


def _number(name: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, start=1):
        yield f"{name}:row {number}", row


def _stdlib_rows(split: str) -> list[dict[str, Any]]:
    from cookbook.data.stdlib import load_stdlib

    return load_stdlib(split)


def _files_of_split(folder: Path, split: str) -> list[Path]:
    for files in (_data_files(folder / split), _data_files(folder, prefix=split)):
        if files:
            return files
    files = _data_files(folder)
    foreign = [file.name for file in files if file.name.lower().startswith(OTHER_SPLITS)]
    if split == "train" and files and not foreign:
        return files
    found = f"; it has {', '.join(file.name for file in files[:5])}" if files else ""
    raise RecipeError(
        [f"{folder}: no folder {split}/ and no file {split}*.jsonl or {split}*.parquet for split {split!r}{found}"]
    )


def _data_files(folder: Path, prefix: str = "") -> list[Path]:
    if not folder.is_dir():
        return []
    names = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
    return [path for path in names if path.name.startswith(prefix) and not path.name.startswith(".")]


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_bounded_lines(file), start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # the byte order mark that some editors write
                if line.strip():
                    yield f"{path}:{number}", _parse(line)
    except OSError as error:
        raise RecipeError([f"{path}: cannot be read: {error.strerror}"]) from None


def _bounded_lines(file: Any) -> Iterator[bytes]:
    """Lines of at most a little over MAX_ROW_BYTES; what a line has beyond is read past, never held."""
    while line := file.readline(MAX_ROW_BYTES + 2):
        part = line
        while part and not part.endswith(b"\n"):
            part = file.readline(MAX_ROW_BYTES)
        yield line


def _parse(line: bytes) -> Any:
    line = line.rstrip(b"\r\n")
    if len(line) > MAX_ROW_BYTES:
        return BadRow(f"row larger than {MAX_ROW_BYTES:,} bytes")
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=_unique)
    except BadRow as bad:
        return bad
    except UnicodeDecodeError as error:
        return BadRow("not UTF-8", f"byte 0x{line[error.start]:02x} at column {error.start + 1}")
    except json.JSONDecodeError as error:
        return BadRow("not JSON", f"{error.msg} at column {error.colno}")
    except RecursionError:
        return BadRow("not JSON", "nested too deeply")
    except ValueError as error:  # a number of more digits than Python converts
        return BadRow("not JSON", str(error))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = Counter(key for key, _ in pairs)
        raise BadRow("key given twice", ", ".join(ascii(key) for key, count in names.items() if count > 1)[:200])
    return values


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = _known_columns(str(path), file.schema_arrow.names)
            batches = file.iter_batches(batch_size=1000, columns=columns)
            yield from _number(str(path), (row for batch in batches for row in _arrow_rows(batch)))
    except (pyarrow.ArrowException, OSError) as error:
        raise RecipeError([f"{path}: not a readable parquet file: {_first_line(error)}"]) from None


def _arrow_rows(batch: Any) -> list[Any]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        if len(batch) == 1:
            return [BadRow("not UTF-8")]
        return [row for i in range(len(batch)) for row in _arrow_rows(batch.slice(i, 1))]


def _known_columns(name: str, columns: list[str]) -> list[str]:
    known = [column for column in columns if column in COLUMNS]
    if not known:
        raise RecipeError([f"{name}: has columns {', '.join(columns)}; a row must have {SHAPES}"])
    return known


def _hub_rows(source: Source) -> Iterator[Any]:
    import datasets
    from huggingface_hub.errors import HTTPError  # of whichever client this version of the Hub library uses

    name = f"{source.path} (split {source.split!r})"
    try:
        dataset = datasets.load_dataset(source.path, source.name, split=source.split, revision=source.revision)
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        mistake = (
            f"{name}: cannot be loaded from the Hub: {_first_line(error)}."
            f" Check the name, the split and the network, or use a local file or {BUILTIN_SOURCE!r}"
        )
        raise RecipeError([mistake]) from error
    yield from dataset.select_columns(_known_columns(name, dataset.column_names))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


# What a row must be.


def _check_row(raw: Any) -> tuple[Kind, dict[str, Any]]:
    """The kind, and the row with the keys of that kind only.

    Raises:
        BadRow: the first thing that is wrong with it.
    """
    if isinstance(raw, BadRow):
        raise raw
    if not isinstance(raw, dict):
        raise BadRow("not an object", f"a {type(raw).__name__}; a row is an object with {SHAPES}")
    # A parquet file of mixed rows fills the columns that a row lacks with null.
    present = {key for key in COLUMNS if raw.get(key) is not None}
    kinds: list[Kind] = [kind for kind, keys in KEYS.items() if present.issuperset(keys)]
    if not kinds:
        nulls = [key for key in COLUMNS if key in raw and raw[key] is None]
        if nulls:
            raise BadRow("empty text", f"`{nulls[0]}` is null")
        raise BadRow("missing keys", f"found {', '.join(map(ascii, raw))[:200] or 'none'}; a row must have {SHAPES}")
    if len(kinds) > 1:
        raise BadRow("two kinds in one row", f"{' as well as '.join(map(_keys, kinds))}; keep the one to train on")
    kind = kinds[0]
    if kind == "messages":
        row: dict[str, Any] = {"messages": _check_messages(raw["messages"])}
        sizes = [len(message["content"].encode()) for message in row["messages"]]
    else:
        row = {key: _check_text(raw[key], f"`{key}`") for key in KEYS[kind]}
        sizes = [len(text.encode()) for text in row.values()]
    if sum(sizes) > MAX_ROW_BYTES:
        raise BadRow(f"row larger than {MAX_ROW_BYTES:,} bytes")
    return kind, row


def _check_messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list):
        raise BadRow("messages not a list", f"a {type(messages).__name__}")
    if not messages:
        raise BadRow("messages empty")
    checked: list[dict[str, str]] = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise BadRow("message not an object", f"message {number} is a {type(message).__name__}")
        before = checked[-1]["role"] if checked else None
        allowed = {None: ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user",)}[
            before
        ]
        role = message.get("role")
        if role not in allowed:
            hint = " (tool calls are not served)" if role == "tool" else ""
            raise BadRow(
                "wrong role", f"message {number} has {ascii(role)[:40]}; expected {' or '.join(allowed)}{hint}"
            )
        for key in UNSERVED:
            if message.get(key):
                raise BadRow("message with more than text", f"message {number} has `{key}`, which is not served")
        checked.append({"role": role, "content": _check_text(message.get("content"), f"message {number} content")})
    if all(message["role"] != "assistant" for message in checked):
        raise BadRow("no assistant turn")
    return checked


def _check_text(text: Any, name: str) -> str:
    if text is None:
        raise BadRow("empty text", f"{name} is null or missing")
    if not isinstance(text, str):
        raise BadRow("not text", f"{name} is a {type(text).__name__}")
    if not text.strip():
        raise BadRow("empty text", f"{name} is {'empty' if not text else 'only whitespace'}")
    if "\0" in text:
        raise BadRow("NUL character", f"{name} at character {text.index(chr(0)) + 1}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("lone surrogate", f"{name} at character {error.start + 1}; no text has it") from None
    return text
