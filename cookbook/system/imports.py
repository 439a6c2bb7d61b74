"""Imports of large libraries."""

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """For a block of imports: without passes of the garbage collector, a fifth of their time, since what is imported is
    never freed. Later passes leave it out, also those that DeepSpeed's stage 3 asks for when it moves weights.

    And without torchao, which transformers would import wherever it is installed: a second, and lines of warnings.
    """
    gc.disable()
    is_hidden = sys.modules.setdefault("torchao", None) is None  # type: ignore[arg-type]
    try:
        yield
    finally:
        if is_hidden:
            sys.modules.pop("torchao", None)
        gc.freeze()
        gc.enable()
