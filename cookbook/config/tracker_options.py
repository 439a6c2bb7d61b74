"""Options of experiment trackers in a recipe: arguments of each one's own function, as installed."""

import difflib
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any, Literal, TypeAlias

from cookbook.system import masking

TrackerName: TypeAlias = Literal["tensorboard", "wandb", "mlflow", "trackio"]

OWNERS: dict[str, str] = {
    "tensorboard": "torch.utils.tensorboard.SummaryWriter",
    "wandb": "wandb.init",
    "mlflow": "accelerate.tracking.MLflowTracker",
    "trackio": "trackio.init",
}
"""The function or class that takes the options of a tracker."""
OF_THE_RUN = "the run itself decides it, so that a resume goes on with the tracker's own run"
OF_THE_SETTINGS = "a tracker gets all settings of the recipe, after its start"
IN_EFFECT_ALREADY = "it has no effect here: console, code and diff are kept from wandb"
OF_THE_ENVIRONMENT = "an address may hold a secret, which does not belong in a recipe: write {variable} instead"
REFUSED: dict[str, dict[str, str]] = {
    "tensorboard": {
        "log_dir": OF_THE_RUN,
        "purge_step": OF_THE_RUN,
        "comment": "SummaryWriter has no use for it beside a folder; write run.output_dir",
    },
    "wandb": {
        **dict.fromkeys(("dir", "id", "resume", "resume_from", "fork_from", "reinit", "settings"), OF_THE_RUN),
        **dict.fromkeys(("config", "config_exclude_keys", "config_include_keys", "allow_val_change"), OF_THE_SETTINGS),
        "save_code": IN_EFFECT_ALREADY,
        "anonymous": "wandb takes it no more",
    },
    "mlflow": {"run_id": OF_THE_RUN, "nested_run": OF_THE_RUN},
    "trackio": {
        "resume": OF_THE_RUN,
        "config": OF_THE_SETTINGS,
        "settings": "trackio has no use for it",
        "webhook_url": OF_THE_ENVIRONMENT.format(variable="TRACKIO_WEBHOOK_URL"),
        "server_url": OF_THE_ENVIRONMENT.format(variable="TRACKIO_SERVER_URL"),
    },
}
"""Arguments that a recipe may not give, and why. All others of the owner's signature are passed on."""


def by_name(value: Any) -> Any:
    """The options of each tracker that a word, a list of words or a mapping names; other values as they are."""
    value = [value] if isinstance(value, str) else value
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        if again := sorted({name for name in value if value.count(name) > 1}):
            raise ValueError(f"has {', '.join(again)} more than once; keep one of them")
        return {name: {} for name in value}
    if isinstance(value, dict):
        return {name: {} if options is None else options for name, options in value.items()}
    return value


def check(name: str, options: Mapping[str, Any], place: Callable[..., str]) -> Iterator[str]:
    """Mistakes of the options of an installed tracker, by its own signature.

    Args:
        place: from the words of a key below the tracker's, where a reader finds it.
    """
    if not options:
        return
    module, _, function = OWNERS[name].rpartition(".")
    owner = getattr(importlib.import_module(module), function)
    taken = [key for key in inspect.signature(owner).parameters if key not in REFUSED[name]]
    for key, value in options.items():
        if key in REFUSED[name]:
            yield f"{place(key)}: {REFUSED[name][key]}"
        elif key not in taken:
            near = difflib.get_close_matches(key, taken, 1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(taken)}"
            yield f"{place(key)}: {OWNERS[name]} ({name} {version(_package(name))}) has no such argument; {hint}"
        elif masking.NAME.search(key):
            yield f"{place(key)}: a secret does not belong in a recipe; leave it in the tracker's environment variable"
        elif name == "mlflow" and os.environ.get(variable := f"MLFLOW_{key.upper()}") not in (None, value):
            # accelerate 1.15, tracking.py, MLflowTracker: the environment wins
            yield f"{place(key)} is {value!r}, and {variable} is set, which would win; unset it"


def _package(name: str) -> str:
    return "torch" if name == "tensorboard" else "accelerate" if name == "mlflow" else name
