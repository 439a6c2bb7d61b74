"""Facts about models and data sets for use without the Hub, and a check that the Hub answers."""

import difflib
import json
import socket
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from cookbook.config.recipe import RECIPES
from cookbook.system.files import RecipeError
from cookbook.system.shipped import located

FACTS = RECIPES / "offline_facts.json"


def known_model(name: str) -> dict[str, Any] | None:
    """The entry of a model in offline_facts.json: `config`, `bos_token`, `eos_token`, `special_tokens`."""
    return _facts()["models"].get(name)


def nearest_models(name: str) -> str:
    """The models in offline_facts.json whose names are most like one, by what follows the owner's."""
    own = {known.rpartition("/")[2].lower(): known for known in _facts()["models"]}
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), own, n=3, cutoff=0.0)
    return ", ".join(own[known] for known in close)


def known_kind(name: str) -> str | None:
    """The row kind of a Hub data set (`cookbook.rows.row_kinds`) by offline_facts.json, or None."""
    return _facts()["data"].get(name)


@cache
def hub_answers() -> bool:
    """Return whether the Hub accepts a connection within 3 seconds."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    address = urlparse(constants.ENDPOINT)
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=3).close()
    except OSError:
        return False
    return True


def _facts() -> dict[str, Any]:
    try:
        return json.loads(Path(located(str(FACTS))).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{FACTS}: cannot be read ({error})") from None
