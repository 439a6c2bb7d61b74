"""Imports of large libraries."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """For a block of imports: without passes of the garbage collector, a fifth of their time, since what is imported is
    never freed. Later passes leave it out, also those that DeepSpeed's stage 3 asks for when it moves weights.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
