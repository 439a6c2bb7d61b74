"""Secrets of the environment: what of a text is one, and where one may be sent."""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any, TextIO, cast
from urllib.parse import SplitResult, parse_qsl, quote, unquote

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
NAME = re.compile(r"TOKEN(?!IZER)|KEY|SECRET|PASS|CREDENTIAL|AUTH(?!OR)", re.IGNORECASE)
"""In the name of a variable, or of a key in an address, whose value is a secret."""
OTHER_NAME = re.compile(r"_(PWD|PAT|SAS)$|COOKIE|HEADERS|CONNECTION_STRING|WEBHOOK", re.IGNORECASE)
"""In the name of another such variable. A webhook's address is a secret from its path on."""
IN_ADDRESS = re.compile(r"(?<=://)[^\s/?#'\"<>]+@")
"""Name and password in an address, or a token in their place."""
SWITCHES = {"true", "false", "none", "null", "auto"}
SHORTEST, LONG = 4, 12
"""Letters of a secret: a shorter value is a switch; one that is not long is masked as a whole word alone."""
MASK = "***"


def mask_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """A text, as of a library's error, without the environment's secrets and without the credentials of any address."""
    if len(text) < SHORTEST:
        return text
    text = IN_ADDRESS.sub(f"{MASK}@", text) if "://" in text else text
    pattern = _pattern(tuple(_secrets(environment)))
    return text if pattern is None else pattern.sub(MASK, text)


def masked_values(value: Any) -> Any:
    """Plain values, as those of a record, with all their texts after `mask_secrets`."""
    if isinstance(value, str):
        return mask_secrets(value)
    if isinstance(value, dict):
        return {key: masked_values(inner) for key, inner in value.items()}
    return [masked_values(inner) for inner in value] if isinstance(value, list | tuple) else value


def _secrets(environment: Mapping[str, str]) -> Iterable[str]:
    """Values of variables with such names, and secrets in the addresses of others."""
    for name, value in environment.items():
        if _names_secret(name):
            yield value.strip()
        if "://" in value:
            for credentials in re.findall(r"://(\S+)@", value):
                yield credentials
                yield credentials.partition(":")[2] or credentials
            # By length where a key's name says nothing: short values are words, as of sslmode=require.
            query = parse_qsl(value.partition("?")[2], separator="&")
            yield from (text for key, text in query if NAME.search(key) or len(text) >= LONG)
            if OTHER_NAME.search(name):
                yield value.strip().partition("://")[2].partition("/")[2]


@cache
def _names_secret(variable: str) -> bool:
    return bool(NAME.search(variable) or OTHER_NAME.search(variable))


@lru_cache(maxsize=4)
def _pattern(secrets: tuple[str, ...]) -> re.Pattern[str] | None:
    forms = {form for secret in secrets for form in (secret, unquote(secret), quote(secret, safe=""))}
    forms = {form for form in forms if len(form) >= SHORTEST and form.lower() not in SWITCHES}
    texts = [
        re.escape(form) if len(form) >= LONG else rf"(?<!\w){re.escape(form)}(?!\w)"
        for form in sorted(forms, key=len, reverse=True)
    ]
    return re.compile("|".join(texts)) if texts else None


class MaskedStream:
    """A stream that shows every text after `mask_secrets`, also those that libraries print and log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(mask_secrets(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mask_streams() -> None:
    """Mask what this process prints. Before libraries are imported, whose loggers keep the stream that they find."""
    sys.stdout, sys.stderr = cast(TextIO, MaskedStream(sys.stdout)), cast(TextIO, MaskedStream(sys.stderr))


def may_have_secret(address: SplitResult) -> bool:
    """Return whether a secret that is sent to an address stays on this machine or is encrypted on its way."""
    return address.scheme in ("https", "unix") or address.hostname in LOCAL_HOSTS
