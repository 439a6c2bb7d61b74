"""Imports of large libraries."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from functools import cache, partial, wraps
from importlib.machinery import PathFinder
from typing import Any


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


def load_peft() -> None:
    """Imports peft, and with it bitsandbytes, which asks torch to compile functions as it is imported. For that torch
    loads its compiler, a second and more; here it waits for the first call of such a function, if ever there is one.
    """
    if "peft" in sys.modules:
        return
    import torch

    def compile_later(function: Any = None, **options: Any) -> Any:
        if function is None:
            return partial(compile_later, **options)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        compiled = cache(partial(torch_compile, function, **options))
        return call

    torch_compile = torch.compile
    torch.compile = compile_later  # type: ignore[assignment]
    try:
        with imports():
            import peft  # noqa: F401
    finally:
        torch.compile = torch_compile


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
