"""torch's compiler, whose import takes seconds, not before something that is to be compiled is called."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def compiled_when_called() -> Iterator[None]:
    """Import libraries in this context: what they decorate for the compiler alone imports nothing. A function is
    compiled by its first call, as some of bitsandbytes, which peft imports for any adapter; or kept from being compiled
    by it, as one of transformers, which the configurations of some models import.
    """
    import torch

    compile_now, disable_now = torch.compile, torch.compiler.disable

    def compile_later(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if function is None:
            return functools.partial(compile_later, **options)
        compiled = functools.cache(lambda: compile_now(function, **options))

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            return compiled()(*arguments, **named)

        return call

    def disable_later(function: Any = None, *arguments: Any, **options: Any) -> Any:
        if not inspect.isfunction(function) or arguments or options:
            return disable_now(function, *arguments, **options)
        disabled = functools.cache(lambda: disable_now(function))

        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            return disabled()(*given, **named)

        return call

    torch.compile, torch.compiler.disable = compile_later, disable_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile, torch.compiler.disable = compile_now, disable_now
