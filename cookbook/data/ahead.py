"""The next item is made while the one before is used."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

Item = TypeVar("Item")

LEAVE_SECONDS = 2.0
"""For what is being made when nobody wants it any more: a batch takes milliseconds, and a network is not waited for."""


class Ahead(Iterator[Item], Generic[Item]):
    """The same items in the same order; while one is used, a thread makes the next.

    What goes wrong there is raised where the item is asked for. A `with` block leaves no thread behind.
    """

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self._coming: Future[Item] | None = None
        self._thread: threading.Thread | None = None

    def __next__(self) -> Item:
        if self._coming is None:
            self._begin()
        assert self._coming is not None
        item = self._coming.result()
        self._begin()
        return item

    def _begin(self) -> None:
        coming: Future[Item] = Future()
        # A daemon, else Python would wait for it at the exit, whatever it waits for.
        self._thread = threading.Thread(target=_make, args=(self._items, coming), name="next batch", daemon=True)
        self._coming = coming
        self._thread.start()

    def __enter__(self) -> "Ahead[Item]":
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._thread.join(LEAVE_SECONDS)


def _make(items: Iterator[Item], coming: Future[Item]) -> None:
    try:
        coming.set_result(next(items))
    except BaseException as error:
        coming.set_exception(error)
