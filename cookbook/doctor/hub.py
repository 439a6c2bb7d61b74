"""The Hugging Face Hub: whether it answers, and whether it would hand out the recipe's model and data. The token is
sent to the Hub alone, and is never part of what is said.
"""

import errno
import http.client
import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from cookbook.doctor.finding import Finding, failure, ok, warning
from cookbook.recipe import BUILTIN_SOURCE, Recipe

TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Something of the Hub that the recipe names."""

    key: str
    """Where the recipe names it."""
    name: str
    revision: str | None
    is_model: bool

    @property
    def page(self) -> str:
        return self.name if self.is_model else f"datasets/{self.name}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would send the token along, to whatever host the answer names."""

    def redirect_request(self, *_: object, **__: object) -> None:  # type: ignore[override]
        return None


def wanted(recipe: Recipe | None) -> list[Wanted]:
    """What is neither a folder, a file nor built in."""
    found: list[Wanted] = []
    if recipe is None:
        return found
    name = recipe.model.name_or_path
    if name is not None and not Path(name).exists():
        found.append(Wanted(key="model.name_or_path", name=name, revision=recipe.model.revision, is_model=True))
    for key, source in [
        *(("data.train", source) for source in recipe.data.train),
        *(("data.eval", source) for source in recipe.data.eval.values()),
    ]:
        path = Path(source.path)
        is_local = path.exists() or path.suffix in (".jsonl", ".parquet")
        if source.path != BUILTIN_SOURCE and not is_local and source.path not in {one.name for one in found}:
            found.append(Wanted(key=key, name=source.path, revision=source.revision, is_model=False))
    return found


def check_hub_for(recipe: Recipe | None) -> Iterator[Finding]:
    """What the recipe needs of the Hub."""
    yield from check_hub(wanted(recipe))


def check_hub(things: list[Wanted]) -> Iterator[Finding]:
    """Each thing, from the cache or from the Hub; without things, whether the Hub answers."""
    from huggingface_hub import constants, get_token

    missing = []
    for thing in things:
        if is_cached(thing, Path(constants.HF_HUB_CACHE)):
            yield ok("Hub", f"{thing.name} is in the local cache")
        else:
            missing.append(thing)
    if constants.HF_HUB_OFFLINE:
        for thing in missing:
            says = f"HF_HUB_OFFLINE is set, and {thing.name} ({thing.key}) is not in the local cache"
            yield failure("Hub", says, "unset HF_HUB_OFFLINE, or hf download it where there is a network")
        if not things:
            yield ok("Hub", "HF_HUB_OFFLINE is set: nothing will be fetched")
        return
    address = urlsplit(constants.ENDPOINT)
    host = address.hostname or "no host"  # never the whole, which may hold a password
    token = get_token()
    if token and address.scheme != "https" and host not in ("localhost", "127.0.0.1", "::1"):
        says = f"HF_ENDPOINT is not https: the token would travel to {host} for all to read"
        yield failure("Hub", says, "HF_ENDPOINT=https://...")
        return
    try:
        with_token = "a token is set" if token else "no token is set"
        status, _ = _ask(constants.ENDPOINT, "api/models?limit=1", None)
        if status >= 500:
            yield _unreachable(f"{host} answers {status}", missing)
            return
        if not things:
            yield ok("Hub", f"{host} answers; {with_token}")
        for thing in missing:
            yield _check_thing(constants.ENDPOINT, host, thing, token, with_token)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        yield _unreachable(f"{host} does not answer ({_reason(reason)})", missing)


def _reason(reason: object) -> str:
    """What went wrong, without what was asked: an error of the http module may quote headers."""
    return (reason.strerror if isinstance(reason, OSError) else None) or type(reason).__name__


def _unreachable(says: str, missing: list[Wanted]) -> Finding:
    remedy = "set HTTPS_PROXY or HF_ENDPOINT, or fetch elsewhere and set HF_HUB_OFFLINE=1"
    if missing:
        names = ", ".join(thing.name for thing in missing)
        return failure("Hub", f"{says}, and {names} must be fetched", remedy)
    return ok("Hub", f"{says}; nothing needs it")


def _check_thing(endpoint: str, host: str, thing: Wanted, token: str | None, with_token: str) -> Finding:
    # Metadata is public also where files are gated, so a file is asked for. A data set may have any.
    file = "config.json" if thing.is_model else "README.md"
    path = f"{thing.page}/resolve/{quote(thing.revision or 'main', safe='')}/{file}"
    status, code = _ask(endpoint, path, token)
    where = f"{thing.name} ({thing.key})"
    if status < 400 or code == "EntryNotFound":
        return ok("Hub", f"{host} hands out {thing.name}; {with_token}")
    if code == "GatedRepo" or status == 403:
        accept = f"accept its licence on https://{host}/{thing.page}"
        return failure("Hub", f"{where} is gated; {with_token}", f"{accept}, then export HF_TOKEN=... of that account")
    if status == 401 and token and _ask(endpoint, path, None)[0] < 400:
        return failure(
            "Hub", f"{where} is open to all, but the token that is set is refused", "renew or unset HF_TOKEN"
        )
    if code == "RevisionNotFound":
        return failure("Hub", f"{where} has no revision {thing.revision}", "write a commit, tag or branch that it has")
    if status == 401 or code == "RepoNotFound":
        says = f"{where} is private or does not exist (401); {with_token}"
        return failure(
            "Hub", says, "mend the name in the recipe, or export HF_TOKEN=... of an account that may read it"
        )
    return warning("Hub", f"{where}: {host} answers {status}", "try again later")


def _ask(endpoint: str, path: str, token: str | None) -> tuple[int, str]:
    """As `_request`, within the time limit: urllib's own does not hold for looking up the name of the host.

    Raises:
        OSError: no answer.
    """
    answers: queue.Queue[tuple[int, str] | Exception] = queue.Queue()

    def work() -> None:
        try:
            answers.put(_request(endpoint, path, token))
        except (OSError, http.client.HTTPException, ValueError) as error:
            answers.put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        answer = answers.get(timeout=TIMEOUT_SECONDS)
    except queue.Empty:
        raise TimeoutError(errno.ETIMEDOUT, f"for {TIMEOUT_SECONDS:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _request(endpoint: str, path: str, token: str | None) -> tuple[int, str]:
    """Status and the Hub's own error code, from a HEAD request that follows no redirection."""
    headers = {"User-Agent": "cookbook-doctor"}
    request = urllib.request.Request(f"{endpoint.rstrip('/')}/{path}", method="HEAD", headers=headers)
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_SECONDS) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("X-Error-Code", "")


def is_cached(thing: Wanted, cache: Path) -> bool:
    """Whether the revision is in the Hub's cache; of a model with weights."""
    kind = "models" if thing.is_model else "datasets"
    folder = cache / f"{kind}--{thing.name.replace('/', '--')}"
    revision = thing.revision or "main"
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    snapshot = folder / "snapshots" / commit
    if not thing.is_model:
        return snapshot.is_dir() and any(snapshot.iterdir())
    try:
        files = set(json.loads((snapshot / "model.safetensors.index.json").read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError):
        files = {"model.safetensors"}
    return all((snapshot / file).is_file() for file in ("config.json", *files))
