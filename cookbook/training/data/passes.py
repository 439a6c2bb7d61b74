"""Passes over the sources of a stream, in blocks of rows: all rows of one source after another, or so many of each."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from cookbook.config.objectives import Objective
from cookbook.config.sections import DataSection, Source
from cookbook.system.files import RecipeError
from cookbook.training.data.rows import BadRows, Reader, Rows, good_rows, place_of
from cookbook.training.data.sources import local_files

Stamps = Mapping[Path, tuple[int, int]]
"""Size and time of modification of files, which identify their content as in `sha256_of`."""


def stamps_of(data: DataSection) -> Stamps:
    """The stamps of the local files of data.train; of one that is gone there is none."""
    stamps = {}
    for path in (path for source in data.train for path in local_files(source) if path.exists()):
        stat = path.stat()
        stamps[path] = stat.st_size, stat.st_mtime_ns
    return stamps


class Passes:
    """Passes over data.train, one after another. Of a mixture each goes on where the last one ended."""

    def __init__(self, data: DataSection, objective: Objective, stamps: Stamps | None = None) -> None:
        """
        Args:
            stamps: of the files that are read; default: those that they have now.
        """
        self._data, self._stamps = data, stamps_of(data) if stamps is None else stamps
        self._sources = [
            _Turns(source, objective, place_of("data.train", data.train, i)) for i, source in enumerate(data.train)
        ]

    def blocks(self, bad_rows: BadRows) -> Iterator[list[Rows]]:
        """The next pass in blocks of data.shuffle_rows good rows (the last may have fewer; those of a mixture differ by
        a row a source), each as one `Rows` per source in it. Holds one block in memory.

        Raises:
            RecipeError: as `read_rows`, when the block with the bad row is full or the pass ends; a file that has
                changed since the first pass began.
        """
        blocks = self._mix_sources(bad_rows) if self._data.is_streamed_mixture else self._in_order(bad_rows)
        for parts in blocks:
            self._compare_files()
            bad_rows.stop_if(self._data.on_bad_row)
            if parts:
                yield parts

    def _compare_files(self) -> None:
        now = stamps_of(self._data)
        changed = sorted(path for path in {*self._stamps, *now} if self._stamps.get(path) != now.get(path))
        if changed:
            raise RecipeError(
                f"{changed[0]}: {'has changed' if changed[0] in now else 'is gone'} while the run reads it, and other"
                " rows would be trained than those that it began with; put it back as it was, and start again"
            )

    def _in_order(self, bad_rows: BadRows) -> Iterator[list[Rows]]:
        parts: list[Rows] = []
        room = self._data.shuffle_rows
        for source in self._sources:
            source.begin(bad_rows)
            while part := source.take(room):
                parts.append(part)
                room -= len(part.rows)
                if not room:
                    yield parts
                    parts, room = [], self._data.shuffle_rows
        yield parts

    def _mix_sources(self, bad_rows: BadRows) -> Iterator[list[Rows]]:
        counts = [source.rows_per_epoch or 0 for source in self._data.train]
        total, size = sum(counts), self._data.shuffle_rows
        for start in range(0, total, size):
            end = min(start + size, total)
            parts: list[Rows] = []
            for source, count in zip(self._sources, counts, strict=True):
                # So many of all before the end, less those before the start: over the pass, exactly its own.
                parts += source.take_around(count * end // total - count * start // total, bad_rows)
            yield parts


class _Turns:
    """The good rows of a source, from the beginning as often as asked."""

    def __init__(self, source: Source, objective: Objective, place: str) -> None:
        self._source, self._objective, self._place = source, objective, place
        self._bad_rows = BadRows()
        self._number = 0
        """Good rows so far, since the last beginning."""
        self._rows: Iterator[dict[str, object]] = iter(())
        self._reader: Reader | None = None

    def begin(self, bad_rows: BadRows) -> None:
        self._reader = Reader(self._source, self._objective)
        self._rows, self._number = good_rows(self._reader, bad_rows, streaming=True), 0

    def take(self, count: int) -> Rows | None:
        """The next good rows, at most so many; None at the end."""
        assert self._reader is not None
        rows, first = list(islice(self._rows, count)), self._number + 1
        if not rows:
            return None
        self._number += len(rows)
        self._reader.ask()
        part = Rows(kind=self._reader.kind, rows=rows, place=self._place, numbers=range(first, first + len(rows)))
        reader = self._reader
        told = {name: getattr(reader, name) for name in ("renamed", "unread", "untold", "unread_keys")}
        return replace(part, **told)

    def take_around(self, count: int, bad_rows: BadRows) -> list[Rows]:
        """The next so many good rows, from the beginning again where they end."""
        parts: list[Rows] = []
        if self._reader is None:
            self.begin(self._bad_rows)
        while count:
            part = self.take(count)
            if part is None and not self._number:
                raise RecipeError([f"{self._place}: no row left to train on", *self._bad_rows.mistakes()])
            if part is None:
                self.begin(self._bad_rows)
                continue
            parts.append(part)
            count -= len(part.rows)
        self._bad_rows.move_to(bad_rows)
        return parts
