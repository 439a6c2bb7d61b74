"""Record of the base model of a run or an adapter: where it is from and the digest of its weights."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook.config.sections import AdapterSection, ModelSection
from cookbook.facts.model_files import values_of
from cookbook.facts.score_head import ScoreHead
from cookbook.system.files import RecipeError, first_line

if TYPE_CHECKING:
    pass

BASE_RECORD = "base_model.json"
NO_ROWS = range(0)


@dataclass(frozen=True)
class Base:
    """The model that a run has trained, or that an adapter belongs to."""

    name_or_path: str
    revision: str | None
    sha256: str
    """SHA-256 of its weights; see `model_source.weights_digest`."""
    is_new: bool = False
    """True if it was created for the run."""
    new_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that the run added, with their ids, which are consecutive."""
    head: ScoreHead | None = None
    """The head for sequences that the run trained in the place of the model's own."""

    @property
    def new_rows(self) -> range:
        """Rows of the new tokens in embedding and head."""
        ids = self.new_tokens.values()
        return range(min(ids), max(ids) + 1) if ids else NO_ROWS

    @classmethod
    def read(cls, folder: Path) -> "Base":
        """The record in a folder.

        Raises:
            FileNotFoundError: there is none.
            RecipeError: it is damaged.
        """
        path = folder / BASE_RECORD
        path.lstat()
        try:
            base = cls(**values_of(path))
            base = base if base.head is None else replace(base, head=ScoreHead(**vars(base)["head"]))
        except TypeError as error:
            raise RecipeError(f"{path}: is no record of a base model ({first_line(error)}); put it back") from None
        if not all(isinstance(number, int) for number in base.new_tokens.values()):
            raise RecipeError(f"{path}: new_tokens has ids that are no numbers; put it back")
        return base

    def write(self, folder: Path) -> None:
        (folder / BASE_RECORD).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def check_base(settings: AdapterSection, digest: str) -> None:
    """Compare the base that the adapter in `path` was trained on with the model. Adapters of other projects have no
    record of their base, and pass.

    Args:
        digest: `model_source.weights_digest` of the model.

    Raises:
        RecipeError: another base, or a damaged record of it.
    """
    if settings.path is None:
        return
    try:
        base = Base.read(Path(settings.path))
    except FileNotFoundError:
        return
    if base.sha256 != digest:
        raise RecipeError(
            f"adapter.path is {settings.path!r}, which was trained on {base.name_or_path} with other weights than those"
            " of model.name_or_path (another SHA-256); name its base there"
        )


def base_notes(settings: AdapterSection, model: ModelSection) -> list[str]:
    """Notes for the user if the adapter in `path` names another base than the recipe, and no digest of its weights.

    Names are compared by their last part, since a model of the Hub may lie in a folder.
    """
    if settings.path is None or (Path(settings.path) / BASE_RECORD).exists():
        return []
    saved = values_of(Path(settings.path) / "adapter_config.json")
    name, revision = saved.get("base_model_name_or_path") or "", saved.get("revision")
    here = model.name_or_path or "a new one (model.from_scratch)"
    revisions = {revision, model.revision} - {None}
    if Path(name).name == Path(here).name and len(revisions) < 2:
        return []
    named = f"{name} at {revision}" if revision else name
    ours = f"{here} at {model.revision}" if model.revision else here
    return [
        f"adapter.path is {settings.path!r}, an adapter of {named or 'a base without a name'} by its"
        f" adapter_config.json, and the model here is {ours}: only their shapes were compared"
    ]
