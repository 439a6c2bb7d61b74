"""torch's compiler, whose import takes seconds, not before something that is to be compiled is called."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def compiled_when_called() -> Iterator[None]:
    """Import libraries in this context: a function of theirs that `torch.compile` decorates, as some of bitsandbytes,
    which peft imports for any adapter, is compiled by its first call, and the decorator alone imports nothing.
    """
    import torch

    compile_now = torch.compile

    def compile_later(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if function is None:
            return functools.partial(compile_later, **options)
        compiled = functools.cache(lambda: compile_now(function, **options))

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            return compiled()(*arguments, **named)

        return call

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now
