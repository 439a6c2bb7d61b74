"""Imports of large libraries."""

import contextlib
import functools
import gc
import importlib.util
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from cookbook.system import optional


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Imports a block without passes of the garbage collector, a fifth of their time, since what is imported is never
    freed. Later passes leave it out, also those that DeepSpeed's stage 3 asks for when it moves weights. Where torch
    asks in which line an operator is, the line's text is not looked for in the files of all modules.
    """
    describe_frame = inspect.getframeinfo
    inspect.getframeinfo = functools.partial(describe_frame, context=0)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        inspect.getframeinfo = describe_frame


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Have the garbage collector pass a hundredth as often. A trace makes a million objects and few cycles: of a plan's
    ten seconds the passes take nearly one.
    """
    before = gc.get_threshold()
    gc.set_threshold(100 * before[0], *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def import_models() -> None:
    """Import transformers with its list of models, which it makes of all of their files twice, once, and without a look
    at each of their lines.
    """
    spec = None if "transformers" in sys.modules else importlib.util.find_spec("transformers")
    if spec is not None:  # begun without its own code, which makes the list as soon as it has import_utils
        sys.modules["transformers"] = importlib.util.module_from_spec(spec)
        vars(sys.modules["transformers"])["__version__"] = metadata.version("transformers")
    from transformers.utils import import_utils

    make, read_names = import_utils.create_import_structure_from_path, import_utils.fetch__all__
    models = Path(import_utils.__file__).parent.parent / "models"

    def make_once(place: Any) -> Any:
        return make(models if place == str(models / "__init__.py") else place)

    import_utils.create_import_structure_from_path = make_once
    import_utils.fetch__all__ = lambda text: read_names(from_last_all(text))
    try:
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module(sys.modules["transformers"])
        importlib.import_module("transformers.models")
    finally:
        import_utils.create_import_structure_from_path, import_utils.fetch__all__ = make, read_names


ACTIVATIONS = "transformers.activations"


class _LateActivations(Mapping[str, Any]):
    """transformers' activation functions by name, whose import waits until one is asked for."""

    def __getitem__(self, name: str) -> Any:
        return self._functions()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions())

    def __len__(self) -> int:
        return len(self._functions())

    def _functions(self) -> Mapping[str, Any]:
        return importlib.import_module(ACTIVATIONS).ACT2FN


def import_validators() -> None:
    """Import transformers' checks of values, which the configurations of Llama and others import, without its
    activation functions, for whose names few of them ask: with these come accelerate and torch's distributed tensors,
    in more than a second.
    """
    if ACTIVATIONS in sys.modules:
        return
    stand_in = ModuleType(ACTIVATIONS)
    vars(stand_in)["ACT2FN"] = _LateActivations()
    sys.modules[ACTIVATIONS] = stand_in
    try:
        importlib.import_module("transformers.utils.type_validators")
    finally:
        del sys.modules[ACTIVATIONS]


def from_last_all(text: str) -> str:
    """The text of a module from the last line on that begins with `__all__`, which decides; all of it if none does."""
    return text[max(0, text.rfind("\n__all__") + 1) :]


def quiet_deepspeed() -> None:
    """Keep deepspeed, which transformers may import, from warning on stdout that there is no GPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def quiet_libraries() -> None:
    """Keep libraries from work and warnings that are of no use to a run. For the start of a run or a command, since it
    changes the whole process.
    """
    # transformers would import it wherever it is installed: 0.2 s, and lines of warnings. What else the process imports
    # does not find it either, until `show_torchao`; plugins do.
    sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]
    optional.hide()
    # A plugin imports torchao where it imports torch's parts that look for it, and this warns of kernels for other GPUs
    # and Pythons, and torch of how torchao uses it.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Imported by peft and transformers, it warns in each process without a GPU that a kernel could not be fetched.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # peft reads a property that transformers has renamed.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)


def has_torchao() -> bool:
    """True if torchao is installed, hidden or not."""
    return PathFinder.find_spec("torchao") is not None


def show_torchao() -> None:
    """Let torchao be imported from here on."""
    if sys.modules.get("torchao", ...) is None:
        del sys.modules["torchao"]
