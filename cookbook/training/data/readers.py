"""Data files: each format -> raw rows with their places, one at a time."""

import bz2
import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from cookbook.config.sections import Source, data_format
from cookbook.rows import row_columns, row_kinds
from cookbook.rows.doubts import NUM_LOOKED_AT
from cookbook.rows.json_text import NO_JSON, BadRow, json_value, unique
from cookbook.system.files import RecipeError, first_line, kind_in_words

MAX_ROW_BYTES = 1_000_000
MAX_TEXT_CHARACTERS = MAX_ROW_BYTES // 4
"""A character of UTF-8 has at most 4 bytes."""
MAX_ITEM = 64 * MAX_ROW_BYTES
"""Characters of an item of a list, which is decoded before its size is known, after which no end of it is sought."""
READ_CHARACTERS = 2**16
TABLES = (".parquet", ".arrow")
ROWS_PER_READ = 64
"""Rows decoded at a time: compressed, a thousand rows of a megabyte may take a kilobyte."""


def file_rows(path: Path, source: Source) -> Iterator[tuple[str, Any]]:
    """Each row of a data file with its place; a BadRow instead of a row that cannot be parsed.

    Raises:
        RecipeError: the file cannot be read, or read further.
    """
    import pyarrow

    kind = data_format(str(path))
    assert kind is not None
    try:
        if kind in TABLES:
            yield from number_rows(str(path), _table_rows(path, source))
            return
        with _open_file(path) as file:
            yield from READERS[kind](path, file)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror or first_line(error)}") from None
    except (pyarrow.ArrowException, EOFError, zlib.error) as error:
        raise RecipeError(f"{path}: not a readable {kind[1:]} file: {first_line(error)}") from None


def _open_file(path: Path) -> io.BufferedReader:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.open(path))  # type: ignore[type-var]
    if path.suffix == ".bz2":
        return io.BufferedReader(bz2.open(path))  # type: ignore[type-var]
    if path.suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def _jsonl_rows(
    path: Path, file: io.BufferedReader, *, remedy: str = "write each object in one line"
) -> Iterator[tuple[str, Any]]:
    rows = _lines_of_json(path, file)
    for place, row in islice(rows, 1):
        if isinstance(row, BadRow) and row.reason == NO_JSON and (value := _object_over_lines(path)):
            raise RecipeError(f"{path}: {kind_in_words(value)}, written over several lines; {remedy}")
        yield place, row
    yield from rows


def _lines_of_json(path: Path, file: io.BufferedReader) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_bounded_lines(file), start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")  # the byte order mark that some editors write
        if line.strip():
            yield f"{path}:{number}", _parse(line)


def _json_rows(path: Path, file: io.BufferedReader) -> Iterator[tuple[str, Any]]:
    """A list of objects, or one object per line, as many files of that name have."""
    start = file.peek(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):
        yield from _jsonl_rows(path, file, remedy="write a list of objects, or each object in one line")
        return
    number = 0
    with io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        try:
            for place, row in number_rows(str(path), _list_items(text)):
                number += 1
                yield place, row
        except (ValueError, RecursionError) as error:
            what = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)
            raise RecipeError(f"{path}: not a list of objects in JSON: {what}, in row {number + 1}") from None


def _object_over_lines(path: Path) -> dict[str, Any] | None:
    """The object with which a file begins, if it ends in a later line."""
    with _open_file(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace") as text:
        start = text.read(MAX_ITEM).lstrip()
    try:
        value, end = json.JSONDecoder().raw_decode(start)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "\n" in start[:end] else None


def _list_items(text: io.TextIOWrapper) -> Iterator[Any]:
    """The items of a list in JSON, of which it holds one.

    Raises:
        ValueError: it is not well-formed.
    """
    decoder = json.JSONDecoder(object_pairs_hook=unique)
    rest = _skip_blanks(_skip_blanks("", text)[1:], text)  # after the bracket
    more = not rest.startswith("]")
    while more:
        item, rest = _first_item(decoder, rest, text)
        yield item
        rest = _skip_blanks(rest, text)
        if more := rest.startswith(","):
            rest = _skip_blanks(rest[1:], text)
    if not rest.startswith("]"):
        raise ValueError("neither a comma nor the end of the list after an item")
    if (rest[1:] + text.read(READ_CHARACTERS)).strip():
        raise ValueError("more text after the list")


def _skip_blanks(rest: str, text: io.TextIOWrapper) -> str:
    """Return the rest of the text from its first character that is not white space; empty at the end."""
    while not (rest := rest.lstrip()) and (more := text.read(READ_CHARACTERS)):
        rest = more
    return rest


def _first_item(decoder: json.JSONDecoder, rest: str, text: io.TextIOWrapper) -> tuple[Any, str]:
    """The item with which `rest` begins, and what follows it."""
    while True:
        error: ValueError = ValueError("the list does not end")
        try:
            item, end = decoder.raw_decode(rest)
            if not isinstance(item, int | float) or rest[end : end + 1] in {",", "]", " ", "\t", "\r", "\n"}:
                return item, rest[end:]  # a number may continue
        except json.JSONDecodeError as found:
            error = found
        more = text.read(max(READ_CHARACTERS, len(rest))) if len(rest) <= MAX_ITEM else ""
        if not more:
            raise error
        rest += more


def _csv_rows(path: Path, file: io.BufferedReader, delimiter: str = ",") -> Iterator[tuple[str, Any]]:
    """Rows of cells under a line of column names; an empty cell is null."""
    csv.field_size_limit(MAX_ROW_BYTES)
    delimiter = _delimiter_of(file, delimiter)
    # A cell that is not UTF-8 becomes a bad row and not the end of the file.
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        lines = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            names = next(lines, [])
            if stray := next((name for name in names if not _is_text(name)), ""):
                raise RecipeError(
                    f"{path}: not UTF-8: {_escaped_byte(stray)} in a column's name; save the file as UTF-8"
                )
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise RecipeError(f"{path}: two columns are called {twice[0]!r}")
            for cells in lines:
                place = f"{path}:{lines.line_num}"
                if len(cells) > len(names):
                    yield place, BadRow("more cells than columns", f"{len(cells)} cells, {len(names)} columns")
                elif stray := next((cell for cell in cells if not _is_text(cell)), ""):
                    yield place, BadRow("not UTF-8", f"{_escaped_byte(stray)}; save the file as UTF-8")
                elif cells:
                    yield place, {name: cell or None for name, cell in zip_longest(names, cells, fillvalue="")}
        except csv.Error as error:
            raise RecipeError(f"{path}:{lines.line_num}: not readable as cells: {error}") from None


def _delimiter_of(file: io.BufferedReader, usual: str) -> str:
    """The delimiter under which the line of names has most columns: the usual one, or one that other programs write."""
    head = file.peek(READ_CHARACTERS).decode("utf-8-sig", errors="replace")

    def num_columns(delimiter: str) -> int:
        try:
            return len(next(csv.reader(io.StringIO(head, newline=""), delimiter=delimiter), []))
        except csv.Error:
            return 0

    return max((usual, ",", ";", "\t"), key=num_columns)  # the first of those that are equal


def _escaped_byte(cell: str) -> str:
    """The first escaped byte of a cell, and where it is."""
    place = next(i for i, letter in enumerate(cell) if not _is_text(letter))
    return f"byte 0x{ord(cell[place]) & 0xFF:02x} after {ascii(cell[:place])[:40]}"


def _is_text(cell: str) -> bool:
    """Return whether no byte of the cell was escaped, as those that are not UTF-8 are."""
    try:
        cell.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text_rows(path: Path, file: io.BufferedReader) -> Iterator[tuple[str, Any]]:
    """The whole file is a text; a long one becomes several, broken at line ends."""
    number, rest = 0, ""
    with io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        try:
            while (part := text.read(MAX_TEXT_CHARACTERS - len(rest))) or rest or not number:
                rest, number = rest + part, number + 1
                is_whole = len(rest) < MAX_TEXT_CHARACTERS
                end = len(rest) if is_whole else rest.rfind("\n") + 1 or len(rest)
                yield f"{path}:part {number}", {"text": rest[:end]}
                rest = rest[end:]
        except UnicodeDecodeError as error:
            yield f"{path}:part {number + 1}", BadRow("not UTF-8", f"byte 0x{error.object[error.start]:02x}")


READERS: dict[str, Callable[[Path, io.BufferedReader], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": partial(_csv_rows, delimiter="\t"),
    ".txt": _text_rows,
    ".md": _text_rows,
}


def _bounded_lines(file: Any) -> Iterator[bytes]:
    """Lines truncated to a little over MAX_ROW_BYTES; the rest of a longer line is skipped, never held."""
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
        return json_value(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow("not UTF-8", f"byte 0x{line[error.start]:02x} at column {error.start + 1}")


@contextmanager
def _open_table(path: Path) -> Iterator[tuple[Any, Callable[[list[str]], Iterable[Any]]]]:
    """The schema of a Parquet or Arrow file, and a function from the columns to read to its record batches.

    An Arrow file is a stream, as `save_to_disk` writes it, or has an index.
    """
    import pyarrow
    import pyarrow.parquet

    if data_format(str(path)) == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as parquet:
            yield parquet.schema_arrow, partial(parquet.iter_batches, ROWS_PER_READ, None)
        return
    with pyarrow.memory_map(str(path)) as file:
        is_stream = file.read(6) != b"ARROW1"
    open_reader = pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file

    def batches(columns: list[str]) -> Iterator[Any]:
        with pyarrow.memory_map(str(path)) as file:
            reader = open_reader(file)
            for batch in reader if is_stream else map(reader.get_batch, range(reader.num_record_batches)):
                yield batch.select(columns)

    with pyarrow.memory_map(str(path)) as file:
        yield open_reader(file).schema, batches


def _table_rows(path: Path, source: Source) -> Iterator[Any]:
    with _open_table(path) as (schema, batches_of):
        columns = known_columns(schema, source)
        if twice := [name for name, count in Counter(columns).items() if count > 1]:
            raise RecipeError(f"{path}: two columns are called {twice[0]!r}")
        names = [name for name in schema.names if name not in (source.ignore or ())]
        names = names if len({*names}) == len(names) else columns
        first = _slices(batches_of(names), 0, NUM_LOOKED_AT)
        yield from arrow_rows(first, _slices(batches_of(columns), NUM_LOOKED_AT), columns, source)


def _slices(batches: Iterable[Any], start: int, count: int | None = None) -> Iterator[Any]:
    """The rows of record batches from `start` on, all or so many."""
    for batch in batches:
        part = batch.slice(start, count)
        start = max(0, start - len(batch))
        if len(part):
            yield part
        if count is not None and (count := count - len(part)) <= 0:
            return


def arrow_rows(first: Iterable[Any], rest: Iterable[Any], columns: list[str], source: Source) -> Iterator[Any]:
    """The rows of record batches, as JSON would have them; a BadRow instead of a row that is not UTF-8.

    Args:
        first: batches with more columns than these, which do no harm if they are not UTF-8.
    """
    for batch in first:
        try:
            yield from _decoder_of(batch, source)(batch)
        except UnicodeDecodeError:
            yield from chain.from_iterable(_decode_parts([batch.select(columns)], source))
    yield from chain.from_iterable(_decode_parts(rest, source))


def _decoder_of(batch: Any, source: Source) -> Callable[[Any], list[Any]]:
    from cookbook.training.data.arrow import row_decoder

    return row_decoder(batch.schema, {(source.columns or {}).get("role", "role")})


def _decode_parts(batches: Iterable[Any], source: Source) -> Iterator[list[Any]]:
    schema = decode = None
    for batch in batches:
        if schema is None or not schema.equals(batch.schema, check_metadata=True):
            schema = batch.schema
            decode = _decoder_of(batch, source)
        for start in range(0, len(batch), ROWS_PER_READ):
            yield _decode(batch.slice(start, ROWS_PER_READ), decode)


def _decode(batch: Any, decode: Any) -> list[Any]:
    try:
        return decode(batch)
    except UnicodeDecodeError:
        if len(batch) == 1:
            return [BadRow("not UTF-8")]
        return [row for i in range(len(batch)) for row in _decode(batch.slice(i, 1), decode)]


def known_columns(schema: Any, source: Source) -> list[str]:
    """The columns of an Arrow schema to read or refuse, and those of numbers, which may be marks; all if none is known,
    so that the first row shows what there is."""
    from pyarrow import types

    ignored = {*(source.ignore or ())}
    known = {*row_kinds.columns(), *row_columns.MEANT, *(source.columns or {}).values()} - ignored
    if known.isdisjoint(schema.names):
        return schema.names
    numbers = (types.is_boolean, types.is_integer, types.is_floating)
    known |= {field.name for field in schema if any(is_such(field.type) for is_such in numbers)} - ignored
    return [column for column in schema.names if column in known]


def unread_columns(path: Path, source: Source) -> list[str]:
    """The columns of a Parquet or Arrow file that `known_columns` leaves out; none of another, whose rows have all."""
    import pyarrow

    if data_format(str(path)) not in TABLES:
        return []
    try:
        with _open_table(path) as (schema, _):
            return sorted({*schema.names} - {*known_columns(schema, source)})
    except (OSError, pyarrow.ArrowException):  # which `file_rows` reports
        return []


def number_rows(name: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Rows with their places in what has no lines."""
    for number, row in enumerate(rows, start=1):
        yield f"{name}:row {number}", row
