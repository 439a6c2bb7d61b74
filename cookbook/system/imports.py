"""Imports of large libraries."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder


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


def quiet_deepspeed() -> None:
    """Keep deepspeed, which transformers may import, from warning on stdout that there is no GPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def hide_torchao() -> None:
    """Keep transformers from importing it wherever it is installed: a second, and lines of warnings. Whatever else a
    process imports does not find it either, until `show_torchao`; plugins do.
    """
    sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]


def has_torchao() -> bool:
    """Whether it is installed, hidden or not."""
    return PathFinder.find_spec("torchao") is not None


def show_torchao() -> None:
    """Let it be imported from here on."""
    if sys.modules.get("torchao", ...) is None:
        del sys.modules["torchao"]
