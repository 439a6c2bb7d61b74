"""What every objective has."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from cookbook.registry import Named

if TYPE_CHECKING:
    from torch.nn import Module

    from cookbook.objectives.forward import Outcome

TrainOn = Literal["assistant", "all"]


class Answer(NamedTuple):
    """A sequence as a model sees it, in plain numbers."""

    logp: float
    """Log-probability of its labelled tokens."""
    num_tokens: int
    """How many those are."""
    reference_logp: float
    """As `logp`, of the model before training."""


class Objective(Named):
    """What a recipe's `objective` is; a kind overrides what is different with it."""

    family = "objective"
    default = "sft"
    name: str

    rows: ClassVar[tuple[str, ...]]
    """Kinds of rows that it trains on, by name (`cookbook.row_kinds`). Where a rehearsal makes rows up, the first."""
    sample: ClassVar[str] = "sequence"
    """What a batch counts, in the singular."""
    sequences: ClassVar[tuple[str, ...]] = ("",)
    """The sequences of a sample, by name."""
    mean_over: ClassVar[Literal["tokens", "samples"]] = "tokens"
    """What its loss is a mean of: trained tokens, or samples."""
    needs_reference: ClassVar[bool] = False
    """Whether batches carry `reference_logps`, of the model before training."""
    splits_rows: ClassVar[bool] = False
    """Whether a row over data.max_length becomes several samples, instead of one that is cut."""

    @property
    def labels(self) -> TrainOn:
        """The tokens that carry loss, where the kind of row leaves that open."""
        return "assistant"

    def words(self) -> str:
        """For `explain`: name and settings."""
        return self.name

    def compute(self, model: "Module", batch: dict[str, Any]) -> "Outcome":
        """The loss of one micro-batch, see `cookbook.objectives.forward`. Every process calls it equally often.

        Args:
            batch: as `cookbook.data.batches.collate` makes it, its tensors on the device.
        """
        raise NotImplementedError

    def by_hand(self, samples: Sequence[Sequence[Answer]], values: Sequence[float]) -> float:
        """The mean loss of samples, in plain numbers. A rehearsal compares the run with it.

        Args:
            samples: each with its sequences.
            values: of each, see `RowKind.value`; nan where its kind of row has none.
        """
        raise NotImplementedError
