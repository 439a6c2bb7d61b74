"""The Hugging Face Hub: whether it answers, and whether it serves the recipe's model and data. The token is sent to the
Hub alone and never printed.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote, urlsplit

from cookbook.commands.doctor.finding import Finding, failure, ok, warning
from cookbook.config.recipe import Recipe
from cookbook.config.sections import BUILTIN_SOURCE, data_format, is_pattern
from cookbook.system.masking import may_have_secret

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class HubRepo:
    """A model or data set of the Hub that the recipe names."""

    key: str
    """Where the recipe names it."""
    name: str
    revision: str | None
    repo_type: Literal["model", "dataset"]


def repos_of(recipe: Recipe | None) -> list[HubRepo]:
    """Models and data sets of a recipe that are on the Hub: neither a folder, a file nor built in."""
    if recipe is None:
        return []
    model, repos = recipe.model, []
    if model.name_or_path is not None and not Path(model.name_or_path).exists():
        key = "model.name_or_path"
        repos.append(HubRepo(key=key, name=model.name_or_path, revision=model.revision, repo_type="model"))
    for key, source in recipe.data.sources:
        is_local = Path(source.path).exists() or data_format(source.path) or is_pattern(source.path)
        if source.path != BUILTIN_SOURCE and not is_local and source.path not in {repo.name for repo in repos}:
            repos.append(HubRepo(key=key, name=source.path, revision=source.revision, repo_type="dataset"))
    return repos


def check_hub(things: list[HubRepo]) -> Iterator[Finding]:
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
            text = f"HF_HUB_OFFLINE is set, and {thing.name} ({thing.key}) is not in the local cache"
            yield failure("Hub", text, "unset HF_HUB_OFFLINE, or hf download it where there is a network")
        if not things:
            yield ok("Hub", "HF_HUB_OFFLINE is set: nothing will be fetched")
        return
    address = urlsplit(constants.ENDPOINT)
    host = address.hostname or "no host"  # never the whole, which may hold a password
    token = get_token()
    if token and not may_have_secret(address):
        text = f"HF_ENDPOINT is not https: the token would travel to {host} for all to read"
        yield failure("Hub", text, "HF_ENDPOINT=https://...")
        return
    with_token = "a token is set" if token else "no token is set"
    try:
        if not things:
            _ask(f"{constants.ENDPOINT}/api/models?limit=1", None)
            yield ok("Hub", f"{host} answers; {with_token}")
        for thing in missing:
            yield _check_thing(constants.ENDPOINT, host, thing, token, with_token)
    except Exception as error:  # httpx has no class for all of its own
        text = f"{host} does not answer ({_reason(error)})"
        if not missing:
            yield ok("Hub", f"{text}; nothing needs it")
            return
        names = ", ".join(thing.name for thing in missing)
        remedy = "set HTTPS_PROXY or HF_ENDPOINT, or fetch elsewhere and set HF_HUB_OFFLINE=1"
        yield failure("Hub", f"{text}, and {names} must be fetched", remedy)


def _reason(error: BaseException | None) -> str:
    """Reason of an error, without the request, which has the token."""
    name = type(error).__name__
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return name


def _check_thing(endpoint: str, host: str, thing: HubRepo, token: str | None, with_token: str) -> Finding:
    from huggingface_hub import errors
    from huggingface_hub.utils import validate_repo_id

    where = f"{thing.name} ({thing.key})"
    try:
        validate_repo_id(thing.name)
    except errors.HFValidationError:
        return failure("Hub", f"{where} is neither a path here nor a name on the Hub", "fix the name in the recipe")
    # Metadata is public also where files are gated, so a file is asked for. A data set may have any.
    page, file = f"datasets/{thing.name}", "README.md"
    if thing.repo_type == "model":
        page, file = thing.name, "config.json"
    url = f"{endpoint}/{page}/resolve/{quote(thing.revision or 'main', safe='')}/{file}"
    error = _ask(url, token)
    status = error.response.status_code if error else 200
    if error is None or isinstance(error, errors.EntryNotFoundError):
        return ok("Hub", f"{host} serves {thing.name}; {with_token}")
    if isinstance(error, errors.GatedRepoError) or status == 403:
        remedy = f"accept its licence on https://{host}/{page}, then export HF_TOKEN=... of that account"
        return failure("Hub", f"{where} is gated; {with_token}", remedy)
    # The Hub refuses an expired token even for public files; only a request without it tells the two apart.
    if status == 401 and token and _ask(url, None) is None:
        text = f"{where} is public, but the token that is set is refused"
        return failure("Hub", text, "renew or unset HF_TOKEN")
    if isinstance(error, errors.RevisionNotFoundError):
        return failure("Hub", f"{where} has no revision {thing.revision}", "write a commit, tag or branch that it has")
    if status == 401 or isinstance(error, errors.RepositoryNotFoundError):
        text = f"{where} is private or does not exist (401); {with_token}"
        return failure("Hub", text, "fix the name in the recipe, or export HF_TOKEN=... of an account that may read it")
    return warning("Hub", f"{where}: {host} answers {status}", "try again later")


def _ask(url: str, token: str | None) -> "HfHubHTTPError | None":
    """The error that the Hub answers with, if any.

    Raises:
        Exception: no answer in time, which the library's own limit does not ensure while it looks up the host; or an
            error of the server.
    """
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.errors import HfHubHTTPError

    asking = ThreadPoolExecutor(1).submit(get_hf_file_metadata, url, token=token or False, timeout=TIMEOUT_SECONDS)
    try:
        asking.result(TIMEOUT_SECONDS)
    except HfHubHTTPError as error:
        if error.response.status_code >= 500:
            raise OSError(None, f"status {error.response.status_code}") from None
        return error
    return None


def is_cached(thing: HubRepo, cache: Path) -> bool:
    """Return whether the revision is in the Hub's cache, with the weights if it is a model."""
    from huggingface_hub import errors, snapshot_download

    try:
        folder = snapshot_download(
            thing.name,
            repo_type=thing.repo_type,
            revision=thing.revision,
            cache_dir=cache,
            allow_patterns="config.json" if thing.repo_type == "model" else None,  # its weights are looked for below
            local_files_only=True,
        )
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        return False
    if thing.repo_type == "dataset":
        return True
    snapshot = Path(folder)
    try:
        files = set(json.loads((snapshot / "model.safetensors.index.json").read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError):
        files = {"model.safetensors"}
    return all((snapshot / file).is_file() for file in ("config.json", *files))
