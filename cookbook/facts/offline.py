"""Facts about models and data sets for use without the Hub, and a check that the Hub answers."""

import copy
import difflib
import json
import re
import socket
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from cookbook.config.recipe import RECIPES
from cookbook.system.files import NEAR, RecipeError
from cookbook.system.shipped import path_from_here

FACTS = RECIPES / "offline_facts.json"


def known_model(name: str) -> dict[str, Any] | None:
    """The entry of a model in offline_facts.json: `config`, `bos_token`, `eos_token`, `special_tokens`."""
    return copy.deepcopy(_facts()["models"].get(name))  # a configuration changes what it is made of


def nearest_models(name: str) -> str:
    """The models in offline_facts.json that may be meant by a name, by what follows the owner's: names that are near
    it, and of its size, if it says one. Empty: none.
    """
    own, wanted = {known.rpartition("/")[2].lower(): known for known in _facts()["models"]}, name.rpartition("/")[2]
    close = difflib.get_close_matches(wanted.lower(), own, n=3, cutoff=NEAR)
    return ", ".join(own[known] for known in close if _sizes(wanted) <= _sizes(known))


def _sizes(name: str) -> set[str]:
    """Numbers of parameters that a model's name says, as `8b`."""
    return set(re.findall(r"(?<![a-z\d.])\d+(?:\.\d+)?[bm](?![a-z\d])", name.lower()))


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
        return _parse(Path(path_from_here(str(FACTS))).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{FACTS}: cannot be read ({error})") from None


@lru_cache(maxsize=1)
def _parse(text: str) -> dict[str, Any]:
    return json.loads(text)
