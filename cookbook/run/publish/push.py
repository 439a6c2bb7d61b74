"""Pushes an export to the Hub: lists it first, private by default, with the token from the environment."""

import os
from pathlib import Path

from cookbook.system.console import page, say
from cookbook.system.files import RecipeError, first_line

TOKEN = "HF_TOKEN"  # noqa: S105  the name of the variable


def check_push(repository: str) -> None:
    """Raise mistakes that are known before an export is written."""
    parts = repository.split("/")
    if len(parts) != 2 or not all(parts):
        raise RecipeError(f"--push is {repository!r}; write OWNER/NAME")
    if not os.environ.get(TOKEN):
        raise RecipeError(f"--push: no {TOKEN} in the environment; set it to a token that may write to {repository}")


def push(folder: Path, repository: str, *, public: bool) -> str:
    """List the files of a folder and upload them in one commit. Returns the URL of the commit.

    Raises:
        RecipeError: the repository is public without --public, or the Hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError, RepositoryNotFoundError  # httpx's, under either of its names

    api = HfApi(token=os.environ[TOKEN])
    try:
        try:
            is_private: bool | None = api.repo_info(repository).private
        except RepositoryNotFoundError:
            is_private = None
        if is_private is False and not public:
            raise RecipeError(
                f"--push: {repository} is public; add --public if that is meant, or name another. Nothing was pushed"
            )
        kind = "a new repository" if is_private is None else "an existing repository"
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        say(f"pushing to {repository}, {kind}, {'public' if public and not is_private else 'private'}:")
        say(page(*((f"{path.stat().st_size:,} bytes", str(path.relative_to(folder))) for path in files)))
        if is_private is None:
            api.create_repo(repository, private=not public)
        commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export")
    except (HTTPError, OSError, ValueError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(f"--push: the Hub refused {repository} ({first_line(error)})") from None
    return commit.commit_url
