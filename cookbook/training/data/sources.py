"""Sources of rows: a file, a folder, the Hub or python-stdlib -> raw rows with their places, one at a time."""

import glob
import json
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from cookbook.config.sections import (
    BINARY_FORMATS,
    BUILTIN_SOURCE,
    COMPRESSIONS,
    TEXT_FORMATS,
    Source,
    data_format,
    is_pattern,
)
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

ARROW_FILES = (".arrow",)
TEXT_FILES = tuple(text + end for text in (".txt", ".md") for end in ("", *COMPRESSIONS))
ROW_FORMATS = (
    (".jsonl", ".parquet"),
    ARROW_FILES,
    (".json", ".csv", ".tsv"),
    tuple(table + end for table in (".jsonl", ".json", ".csv", ".tsv") for end in COMPRESSIONS),
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
        RecipeError: a folder without a file of the split or the configuration, or a pattern that no data file fits.
    """
    path = Path(source.path)
    if path.is_dir():
        return _files_of_folder(path, source.split, source.name)[0]
    if is_pattern(source.path):
        return _files_of_pattern(source.path)
    return [path] if data_format(source.path) else []


def _files_of_pattern(pattern: str) -> list[Path]:
    files = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if data_format(name)]
    if not files:
        raise RecipeError(f"{pattern}: no data file fits this pattern (looked in {Path.cwd()})")
    return files


def _files_of_folder(folder: Path, split: str, name: str | None) -> tuple[list[Path], set[Path]]:
    """The files of a split in a folder, and those of other splits.

    The folder may be a data set of the Hub, or what `save_to_disk` wrote.
    """
    described = _described_files(folder, name)
    if described is not None:
        splits = described
        if chosen := splits.get(_as_datasets(split), []):
            return chosen, {path for paths in splits.values() for path in paths} - {*chosen}
    elif name is not None:
        if not (folder / name).is_dir():
            inner = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir())) or "none"
            raise RecipeError(f"{folder}: no configuration and no folder {name!r}; its folders: {inner}")
        folder = folder / name
    # Of several formats in one folder the first is read, and texts last: a README beside the data is no row.
    places = (folder / split, folder)
    endings = next((some for some in ROW_FORMATS if any(_data_files(place, some) for place in places)), None)
    files = _data_files(folder, endings or TEXT_FILES)
    if endings is None and (below := _below(folder)):
        endings = next(some for some in ROW_FORMATS if any(path.name.endswith(some) for path in below))
        files = [path for path in below if path.name.endswith(endings)]
    others: set[Path] = set()
    if endings is None:  # texts, whose names are titles
        files = _data_files(folder / split, TEXT_FILES) or (files if split == "train" else [])
    else:
        files, others = _of_split(folder, split, files, endings)
    if files:
        return files, others
    seen = sorted(others) or _data_files(folder, endings or TEXT_FILES)
    hint = f"; it has {', '.join(str(path.relative_to(folder)) for path in seen[:5])}" if seen else ""
    raise RecipeError(
        f"{folder}: no folder {split}/ and no file {split}*.jsonl or {split}*.parquet for split {split!r}{hint}"
    )


def _of_split(folder: Path, split: str, files: list[Path], endings: tuple[str, ...]) -> tuple[list[Path], set[Path]]:
    """The files of a split among files of rows of one format, and all those of other splits."""
    split_of = {} if endings == ARROW_FILES else _splits_by_name(folder)
    others = {path for path, name in split_of.items() if name != _as_datasets(split)}
    chosen = _data_files(folder / split, endings)
    chosen = chosen or [path for path in files if path in split_of and path not in others]
    if _as_datasets(split) not in ("train", "validation", "test"):  # a name of the user's own
        chosen = chosen or [path for path in files if path.name.startswith(split)]
    if not chosen and split == "train" and others.isdisjoint(files):
        chosen = files
    tops = sorted({path.relative_to(folder).parts[0] for path in chosen if path.parent != folder})
    if len(tops) > 1:
        raise RecipeError(
            f"{folder}: files of rows lie in the folders {', '.join(tops)}; choose one with name, as in"
            f" {{path: {folder}, name: {tops[0]}}}, or list several as sources"
        )
    return chosen, others - {*chosen}


def _as_datasets(split: str) -> str:
    """The name that `datasets` gives a split, for which it has several words."""
    from datasets.data_files import SPLIT_KEYWORDS

    return next((str(name) for name, words in SPLIT_KEYWORDS.items() if split in words), split)


def _splits_by_name(folder: Path) -> dict[Path, str]:
    """The split that `datasets` finds in the name of each file; those in which it finds none are left out."""
    from datasets.data_files import DEFAULT_PATTERNS_ALL, DataFilesDict, EmptyDatasetError, get_data_patterns

    try:
        patterns = get_data_patterns(str(folder))
        by_split = {} if patterns == DEFAULT_PATTERNS_ALL else DataFilesDict.from_patterns(patterns, str(folder))
    except (EmptyDatasetError, FileNotFoundError):
        by_split = {}
    at = Path(os.path.abspath(folder))
    return {folder / Path(name).relative_to(at): split for split, names in by_split.items() for name in names}


def _described_files(folder: Path, name: str | None) -> dict[str, list[Path]] | None:
    """The files of each split of a configuration as the folder's README describes them; None if it describes none."""
    readme = folder / "README.md"
    if not readme.is_file() or not readme.read_bytes().startswith(b"---"):
        return None
    from datasets.data_files import DataFilesDict, sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    try:
        configs = MetadataConfigs.from_dataset_card_data(DatasetCard.load(readme).data)
        chosen = name or configs.get_default_config_name() or (next(iter(configs)) if len(configs) == 1 else None)
        if not configs or (name is not None and name not in configs):
            return None
        if chosen is None:
            raise RecipeError(
                f"{folder}: its README.md has the configurations {', '.join(configs)}; choose one with name, as in"
                f" {{path: {folder}, name: {next(iter(configs))}}}"
            )
        config = configs[chosen]
        if "data_files" not in config:
            return None
        base = folder / config.get("data_dir", "")
        by_split = DataFilesDict.from_patterns(sanitize_patterns(config["data_files"]), base_path=str(base))
    except (OSError, ValueError, yaml.YAMLError) as error:
        if isinstance(error, RecipeError):
            raise
        return None  # a card of another kind, or of files that are not here
    return {split: sorted(Path(name) for name in names if data_format(name)) for split, names in by_split.items()}


def unread_note(source: Source) -> str | None:
    """A note on files beside those that are read of a folder, or of those that a pattern fits, or None. In a folder,
    files of other splits are none, nor are .json, texts and files without an ending, which may describe the data.
    """
    folder = Path(source.path)
    if is_pattern(source.path):
        fitting = (Path(name) for name in glob.glob(source.path, recursive=True))
        left = sorted(str(path) for path in fitting if path.is_file() and not data_format(path.name))
    elif folder.is_dir():
        read, others = _files_of_folder(folder, source.split, source.name)
        beside = {
            path for place in {folder / source.split, *(path.parent for path in read)} for path in _visible(place)
        }
        left = sorted(path.name for path in beside - {*read} - others if _may_have_rows(path))
    else:
        return None
    if not left:
        return None
    more = f" and {len(left) - 5} more" if len(left) > 5 else ""
    verb = "is" if len(left) == 1 else "are"
    formats = ", ".join((*TEXT_FORMATS, *BINARY_FORMATS))
    way = "list files as sources" if all(map(data_format, left)) else f"rows are read of {formats}"
    return f"{source.path}: {', '.join(left[:5])}{more} {verb} not read beside the other files; {way}"


def _may_have_rows(path: Path) -> bool:
    # Not by the endings that are read: rows of another format would be left out in silence.
    is_cache = path.suffix in ARROW_FILES and (path.parent / "state.json").is_file()  # of `datasets`
    return bool(path.suffix) and not path.name.endswith((".json", *TEXT_FILES)) and not is_cache


def _below(folder: Path) -> list[Path]:
    """The visible files of rows in the sub-folders, sorted."""
    paths = (path for path in folder.rglob("*") if path.name.endswith(tuple(chain(*ROW_FORMATS))) and path.is_file())
    return sorted(path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts))


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
    if names and source.ignore:
        tables = tables.select_columns([name for name in names if name not in source.ignore])
    yield from arrow_rows(batches(tables.take(NUM_LOOKED_AT)), batches(rest.skip(NUM_LOOKED_AT)), columns, source)
