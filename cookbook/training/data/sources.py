"""Sources of rows: a file, a folder, the Hub or python-stdlib -> raw rows with their places, one at a time."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cookbook.config.sections import BUILTIN_SOURCE, COMPRESSIONS, Source, data_format
from cookbook.rows.doubts import NUM_LOOKED_AT
from cookbook.rows.row_checks import with_messages
from cookbook.system.files import RecipeError, first_line
from cookbook.training.data.readers import (
    ROWS_PER_READ,
    arrow_rows,
    file_rows,
    known_columns,
    number_rows,
    unread_columns,
)

OTHER_SPLITS = ("test", "val", "eval", "dev")
ARROW_FILES = (".arrow",)
TEXT_FILES = tuple(text + end for text in (".txt", ".md") for end in ("", *COMPRESSIONS))
FOLDER_FORMATS = (
    (".jsonl", ".parquet"),
    ARROW_FILES,
    (".json", ".csv", ".tsv"),
    tuple(table + end for table in (".jsonl", ".json", ".csv", ".tsv") for end in COMPRESSIONS),
    TEXT_FILES,
)
"""Endings of files that are read together; of the folder's, the first group."""


def raw_rows(source: Source, *, streaming: bool = False, unread: set[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Each row with its place (`file:line`); a BadRow instead of a row that cannot be parsed.

    Args:
        streaming: download a Hub dataset while it is read; local files are always read as needed.
        unread: receives the names of columns that are in a file's schema and not in its rows, since nothing reads them.
    """
    unread = set() if unread is None else unread
    for place, row in _written_rows(source, streaming, unread):
        yield place, with_messages(row)


def _written_rows(source: Source, streaming: bool, unread: set[str]) -> Iterator[tuple[str, Any]]:
    if source.path == BUILTIN_SOURCE:
        from cookbook.training.data.stdlib import load_stdlib

        yield from number_rows(BUILTIN_SOURCE, load_stdlib(source.split))
    elif files := local_files(source):
        for file in files:
            unread.update(unread_columns(file, source))
            yield from file_rows(file, source)
    else:
        yield from number_rows(source.path, _hub_rows(source, streaming, unread))


def local_files(source: Source) -> list[Path]:
    """The files of a local source, in reading order; empty for the Hub and python-stdlib.

    Raises:
        RecipeError: a folder without a file of the split.
    """
    path = Path(source.path)
    if path.is_dir():
        return _files_of_split(path, source.split)
    return [path] if data_format(source.path) else []


def _files_of_split(folder: Path, split: str) -> list[Path]:
    # Of several formats in one folder the first is read: a README beside the data is no row.
    suffixes = next(
        (endings for endings in FOLDER_FORMATS if _data_files(folder / split, endings) or _data_files(folder, endings)),
        (),
    )
    files = _data_files(folder, suffixes)
    is_text = suffixes == TEXT_FILES  # whose names are titles
    of_split = [] if is_text else [path for path in files if path.name.startswith(split)]
    if chosen := _data_files(folder / split, suffixes) or of_split:
        return chosen
    foreign = [] if is_text else [path for path in files if path.name.lower().startswith(OTHER_SPLITS)]
    if split == "train" and files and not foreign:
        return files
    hint = f"; it has {', '.join(file.name for file in files[:5])}" if files else ""
    raise RecipeError(
        f"{folder}: no folder {split}/ and no file {split}*.jsonl or {split}*.parquet for split {split!r}{hint}"
    )


def unread_note(source: Source) -> str | None:
    """A note on files of rows beside those that are read of a folder, or None. Files of other splits are none, nor
    are .json, which may describe the data.
    """
    folder = Path(source.path)
    if not folder.is_dir():
        return None
    read = set(local_files(source))
    beside = {path for place in {folder / source.split, *(path.parent for path in read)} for path in _visible(place)}
    others = tuple(split for split in OTHER_SPLITS if not source.split.startswith(split))
    left = sorted(path.name for path in beside - read if _has_rows(path) and not path.name.lower().startswith(others))
    if not left:
        return None
    more = f" and {len(left) - 5} more" if len(left) > 5 else ""
    verb = "is" if len(left) == 1 else "are"
    return f"{folder}: {', '.join(left[:5])}{more} {verb} not read beside the other files; list files as sources"


def _has_rows(path: Path) -> bool:
    is_cache = path.suffix in ARROW_FILES and (path.parent / "state.json").is_file()  # of `datasets`
    endings = (ending for group in FOLDER_FORMATS if group != TEXT_FILES for ending in group if ending != ".json")
    return path.name.endswith(tuple(endings)) and not is_cache


def _visible(folder: Path) -> list[Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return [path for path in paths if path.is_file() and not path.name.startswith(".")]


def _data_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if not folder.is_dir():
        return []
    state = folder / "state.json"
    if suffixes == ARROW_FILES and state.is_file():
        return _saved_files(folder, state)
    paths = folder.rglob("*") if suffixes == TEXT_FILES else folder.iterdir()
    visible = (path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return sorted(path for path in visible if path.name.endswith(suffixes) and path.is_file())


def _saved_files(folder: Path, state: Path) -> list[Path]:
    """The files of a data set that `save_to_disk` wrote; others there are caches."""
    try:
        names = [file["filename"] for file in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecipeError(f"{state}: not as save_to_disk writes it: {first_line(error)}") from None
    return [folder / Path(name).name for name in names]


def _hub_rows(source: Source, streaming: bool, unread: set[str]) -> Iterator[Any]:
    import datasets
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
    from huggingface_hub.errors import HTTPError  # of whichever client this version of the Hub library uses

    if source.path in _PACKAGED_DATASETS_MODULES:  # which would read whatever lies in the current folder
        raise RecipeError(f"{source.path}: a reader of the library datasets, no data set; write a path, or OWNER/NAME")
    name = f"{source.path} (split {source.split!r})"
    try:
        dataset = datasets.load_dataset(
            source.path, source.name, split=source.split, revision=source.revision, streaming=streaming
        )
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        raise RecipeError(
            f"{name}: cannot be loaded from the Hub: {first_line(error)}."
            f" Check the name, the split and the network, or use a local file or {BUILTIN_SOURCE!r}"
        ) from error
    # As tables, so that the schema decides what is JSON and which nulls are a row's own; files in them stay unopened.
    tables = dataset.with_format("arrow")
    columns = names = dataset.column_names or []  # a stream may not know its columns before its first row
    if names:
        columns = known_columns(dataset.features.arrow_schema, source)
        unread.update({*names} - {*columns})

    def batches(part: Any) -> Iterator[Any]:
        parts = iter(part) if streaming else part.iter(ROWS_PER_READ)  # tables of a stream may differ in schema
        return (batch for table in parts for batch in table.to_batches())

    rest = tables.select_columns(columns) if names else tables
    yield from arrow_rows(batches(tables.take(NUM_LOOKED_AT)), batches(rest.skip(NUM_LOOKED_AT)), columns, source)
