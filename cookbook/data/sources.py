"""Where rows come from: a file, a folder, the Hub or python-stdlib -> raw rows with their places, one at a time."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cookbook import row_kinds
from cookbook.files import RecipeError
from cookbook.recipe import BUILTIN_SOURCE, Source
from cookbook.row_kinds import BadRow

MAX_ROW_BYTES = 1_000_000
PARQUET_ROWS = 64
"""Held at a time: a kilobyte of a file may say a thousand rows of a megabyte."""
SUFFIXES = (".jsonl", ".parquet")
OTHER_SPLITS = ("test", "val", "eval", "dev")


def raw_rows(source: Source, *, streaming: bool = False) -> Iterator[tuple[str, Any]]:
    """Each row with its place (`file:line`); a BadRow in the place of what cannot be parsed.

    Args:
        streaming: fetch a Hub dataset while it is read; local files are always read as they are needed.
    """
    if source.path == BUILTIN_SOURCE:
        yield from _number(BUILTIN_SOURCE, _stdlib_rows(source.split))
    elif files := local_files(source):
        for file in files:
            yield from _jsonl_rows(file) if file.suffix == ".jsonl" else _parquet_rows(file)
    else:
        yield from _number(source.path, _hub_rows(source, streaming))


def local_files(source: Source) -> list[Path]:
    """The files on this machine that are read for it, in their order; none of the Hub's or python-stdlib.

    Raises:
        RecipeError: a folder without a file of the split.
    """
    path = Path(source.path)
    if path.is_dir():
        return _files_of_split(path, source.split)
    return [path] if path.suffix in SUFFIXES else []


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
            batches = file.iter_batches(batch_size=PARQUET_ROWS, columns=columns)
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
    known = [column for column in columns if column in row_kinds.columns()]
    if not known:
        raise RecipeError([f"{name}: has columns {', '.join(columns)}; a row must have {row_kinds.shapes()}"])
    return known


def _hub_rows(source: Source, streaming: bool) -> Iterator[Any]:
    import datasets
    from huggingface_hub.errors import HTTPError  # of whichever client this version of the Hub library uses

    name = f"{source.path} (split {source.split!r})"
    try:
        dataset = datasets.load_dataset(
            source.path, source.name, split=source.split, revision=source.revision, streaming=streaming
        )
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        mistake = (
            f"{name}: cannot be loaded from the Hub: {_first_line(error)}."
            f" Check the name, the split and the network, or use a local file or {BUILTIN_SOURCE!r}"
        )
        raise RecipeError([mistake]) from error
    # A stream may not know its columns before its first row.
    yield from dataset.select_columns(_known_columns(name, dataset.column_names)) if dataset.column_names else dataset


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
