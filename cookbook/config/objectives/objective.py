"""Base class of objectives."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from cookbook.system.registry import NamedSection

if TYPE_CHECKING:
    from torch.nn import Module

    from cookbook.config.objectives.forward import FunctionOfLogits, LossOutput

TrainOn = Literal["assistant", "last", "all"]
TooLong = Literal["cut", "drop", "split", "error"]


class Question(NamedTuple):
    """A question to a teacher, asked for each target of the data."""

    teacher: str
    """Hub name or folder of a causal language model."""
    top_k: int
    """Number of its most probable tokens that are kept."""
    temperature: float
    """Divides its logits."""

    @property
    def bytes_per_target(self) -> int:
        """Bytes of an answer: a token and a float32 for each that is kept, and a float32 for all others together."""
        return 8 * self.top_k + 4

    def words(self) -> str:
        """Describe what is kept, for `plan` and `explain`."""
        size = f"{self.bytes_per_target:,} bytes in the cache for each trained token"
        return f"its {self.top_k:,} likeliest tokens, {size} ({self.bytes_per_target / 1e3:.3g} GB a million)"


class Objective(NamedSection):
    """A recipe's `objective`."""

    family = "objective"
    default = "sft"
    name: str

    rows: ClassVar[tuple[str, ...]]
    """Names of the row kinds that it trains on (`cookbook.rows.row_kinds`); a rehearsal generates the first."""
    sample: ClassVar[str] = "sequence"
    """The thing that a batch counts, in the singular."""
    sequences: ClassVar[tuple[str, ...]] = ("",)
    """Names of the sequences of a sample."""
    mean_over: ClassVar[Literal["tokens", "samples"]] = "tokens"
    """The things over which the loss is averaged: labelled tokens, or samples. A property where the keys decide it."""
    shares_samples: ClassVar[bool] = False
    """True if ranks that share the tokens of samples may share the samples too, for a loss over samples: `compute`
    takes its sums from `sums_by_sequence`, and `values` and `reference_logps` are those of the sequences that it
    returns.
    """
    needs_reference: ClassVar[bool] = False
    """True if batches carry `reference_logps`, computed by the model before training."""
    reference_of: ClassVar[Literal["sequences", "tokens"]] = "sequences"
    """With tokens, batches carry `token_reference_logps` of each target instead, and `old_logps` if rows have
    them, or the reference."""
    settings_of_values: ClassVar[tuple[str, ...]] = ()
    """Keys that `values_of` depends on, or which tokens carry loss."""
    splits_rows: ClassVar[bool] = False
    """True if rows longer than data.max_length are split into several samples if the recipe does not choose."""

    @property
    def labels(self) -> TrainOn:
        """The tokens that carry loss, for row kinds that leave the choice to the objective."""
        return "assistant"

    @property
    def num_scores(self) -> int | None:
        """Numbers of a head that scores each sequence at its last token, in the place of the one that predicts tokens;
        None if the model keeps that. A target is then such a token."""
        return None

    @property
    def problem_type(self) -> str | None:
        """The kind of such a head in a configuration, as transformers reads it."""
        return None

    @property
    def class_names(self) -> Sequence[str]:
        """The names of its numbers, as a configuration has them; none if each is not that of a class."""
        return ()

    def check_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row that its kind has checked, as this objective reads it: a good row again.

        Raises:
            BadRow: this objective cannot train on it.
        """
        return row

    @property
    def asks(self) -> "Question | None":
        """The question to a teacher before the first step; None without one."""
        return None

    @property
    def masks_truncated(self) -> bool:
        """Return whether an answer that was cut off while sampling carries no loss; it is a sample all the same."""
        return False

    @property
    def takes_parts(self) -> bool:
        """True if a row may be split into several samples."""
        return self.mean_over == "tokens" and not self.shares_samples

    def compares(self, given: Collection[str]) -> bool:
        """Return whether an objective that needs a reference does so for a set that has these log-probabilities.

        Args:
            given: of `old_logps`, `sampled_logps` and `token_reference_logps`.
        """
        return True

    def values_of(self, groups: Sequence[Sequence[float]]) -> list[float]:
        """The `values` of batches.

        Args:
            groups: of each row of a set the numbers of its samples (`RowKind.value` or `values`).
        """
        return [value for group in groups for value in group]

    def remarks(self, values: Sequence[float]) -> tuple[str, ...]:
        """Remarks for the user on a row with these numbers."""
        return ()

    def long_rows(self, chosen: TooLong | None) -> TooLong:
        """Choose what happens to rows longer than data.max_length.

        Args:
            chosen: data.too_long.
        """
        return chosen or ("split" if self.splits_rows else "cut")

    def words(self) -> str:
        """Name and settings, for `explain`."""
        return self.name

    def function(self, batch: dict[str, Any]) -> "FunctionOfLogits | None":
        """The loss of each target as a function of the logits there; None: the negative log-likelihood."""
        return None

    def compute(self, model: "Module", batch: dict[str, Any]) -> "LossOutput":
        """The loss of one micro-batch, made of `cookbook.config.objectives.forward`. Collective.

        Args:
            batch: the output of `cookbook.training.data.batches.collate`, with its tensors on the device.
        """
        raise NotImplementedError
