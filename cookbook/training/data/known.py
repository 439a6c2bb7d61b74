"""Rows of files that were read before: what is known of them, while nobody needs the rows themselves.

Tokens are cached by a digest of the rows. A start that finds digests of the same files here therefore reads no row.
"""

import contextlib
import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache as once
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, overload

from cookbook.config import plugins
from cookbook.config.objectives import Objective
from cookbook.config.sections import BUILTIN_SOURCE, DataSection, Source
from cookbook.rows import row_kinds
from cookbook.system import lock, registry
from cookbook.system.digests import sha256_of
from cookbook.system.files import RecipeError, make_folder
from cookbook.system.record_files import replace_file
from cookbook.training.data.rows import Rows
from cookbook.training.data.sets import RowSets, read_data
from cookbook.training.data.sources import local_files
from cookbook.training.data.stdlib import python_files

Item = TypeVar("Item")
KEPT = [*(field.name for field in fields(Rows) if field.name not in ("rows", "numbers")), "fingerprint"]
NOT_OF_ROWS = {
    *("max_length", "too_long", "packing", "streaming", "shuffle_rows"),
    *("chat_template", "template_date", "accept", "special_tokens"),
}


class LazySequence(Sequence[Item]):
    """A sequence of known length that is read when somebody asks for an item."""

    def __init__(self, length: int, read: Callable[[], Sequence[Item]]) -> None:
        self._length, self._read = length, read

    @cached_property
    def _items(self) -> Sequence[Item]:
        return self._read()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        return self._items[index]


def known_rows(data: DataSection, objective: Objective, *, cache: Path) -> RowSets:
    """The rows as `read_data` has them; read at once only if no process has read the same content with the same
    settings before, and then by one process of a machine, under a file lock.

    Raises:
        RecipeError: as `read_data`. A row that is asked for later may also find changed files.
    """
    is_first = not cache.is_dir()  # of all starts here: with bad rows it leaves nothing behind
    key = _key_of(data, objective, None if is_first else cache)
    if key is None:
        return read_data(data, objective)
    record = cache / f"rows-{key}.json"
    if is_first:
        return _read_and_record(record, data, objective)
    if (known := _load(record, data, objective)) is not None:
        return known
    with lock.making(record.with_suffix(".lock")):
        return _load(record, data, objective) or _read_and_record(record, data, objective)


def _read_and_record(record: Path, data: DataSection, objective: Objective) -> RowSets:
    sets = read_data(data, objective)
    make_folder(record.parent)
    if record.name == f"rows-{_key_of(data, objective, record.parent)}.json":  # else a file was changed meanwhile
        _save(record, sets)
    return sets


def _key_of(data: DataSection, objective: Objective, cache: Path | None) -> str | None:
    """A digest of all that rows depend on; None if a source may change without a trace in a local file."""
    try:
        content = [_content(source, cache) for _, source in data.sources]
    except (OSError, RecipeError):  # a missing file, which `read_data` reports
        return None
    if data.streaming or None in content:
        return None
    folders = Path(__file__).parent, Path(str(row_kinds.__file__)).parent
    code = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    made_from = [
        content,
        data.model_dump(mode="json", exclude=NOT_OF_ROWS),
        [objective.model_dump(mode="json"), sorted(objective.rows), plugins.digest(registry.plugin_files())],
        [hashlib.sha256(path.read_bytes()).hexdigest() for path in code],
    ]
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]


def _content(source: Source, cache: Path | None) -> Any:
    if source.path == BUILTIN_SOURCE:
        stats = ((str(path), path.stat()) for path in python_files(Path(sysconfig.get_path("stdlib"))))
        return [sys.version, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)]
    files = local_files(source)
    digests = sha256_of(files, cache=cache)
    return [[path.name, digests[path]] for path in files] or None


def _save(record: Path, sets: RowSets) -> None:
    def facts(parts: list[Rows]) -> list[dict[str, Any]]:
        return [{name: getattr(rows, name) for name in KEPT} | {"num_rows": len(rows.rows)} for rows in parts]

    content = {"train": facts(sets.train), "eval": {name: facts(parts) for name, parts in sets.eval.items()}}
    with contextlib.suppress(OSError):  # the record only saves time
        replace_file(record, json.dumps(content, indent=1))


def _load(record: Path, data: DataSection, objective: Objective) -> RowSets | None:
    """The sets of a record, or None if it is missing or damaged."""

    @once
    def read() -> RowSets:
        return read_data(data, objective)

    def part(facts: dict[str, Any], name: str | None, i: int) -> Rows:
        num_rows, fingerprint = int(facts["num_rows"]), str(facts["fingerprint"])

        def read_checked() -> Rows:
            rows = (read().train if name is None else read().eval[name])[i]
            if rows.fingerprint != fingerprint:
                raise RecipeError(f"{rows.place}: its files were changed since this run began to read; try again")
            return rows

        known = Rows(
            **{key: facts[key] for key in KEPT if key != "fingerprint"},
            rows=LazySequence(num_rows, lambda: read_checked().rows),
            numbers=LazySequence(num_rows, lambda: read_checked().numbers or range(1, num_rows + 1)),
        )
        vars(known)["fingerprint"] = fingerprint  # what the cached property would compute from the rows
        return known

    try:
        content = json.loads(record.read_text(encoding="utf-8"))
        train = [part(facts, None, i) for i, facts in enumerate(content["train"])]
        evals = {
            name: [part(facts, name, i) for i, facts in enumerate(parts)] for name, parts in content["eval"].items()
        }
        return RowSets(train=train, eval=evals)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
