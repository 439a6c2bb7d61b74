"""Prefetching: the next item is made while the current one is used."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

Item = TypeVar("Item")

LEAVE_SECONDS = 2.0
"""Limit of the wait for the thread at the end: a batch takes milliseconds, and a network is not worth waiting for."""


class Prefetcher(Iterator[Item], Generic[Item]):
    """Iterates over the same items, prefetching one in a thread.

    An error in the thread is raised by `next`. A `with` block leaves no thread behind.
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
        self._coming = coming = Future[Item]()

        def make() -> None:
            try:
                coming.set_result(next(self._items))
            except BaseException as error:
                coming.set_exception(error)

        # No worker processes: a step is made from mapped tokens in a fraction of the time that it trains, and they
        # would add a start, a queue and copies.
        # A daemon, since Python would wait at exit for any other thread.
        self._thread = threading.Thread(target=make, name="next batch", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Prefetcher[Item]":
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._thread.join(LEAVE_SECONDS)
