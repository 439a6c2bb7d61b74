"""Base class of objectives that compare two answers to one prompt."""

from typing import TYPE_CHECKING, Any

from cookbook.config.objectives.objective import Objective

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from cookbook.config.objectives.forward import LossOutput


class PairObjective(Objective):
    """A loss of each pair of a chosen and a rejected answer."""

    rows = ("chat_preference", "preference")
    sample = "pair"
    sequences = ("chosen", "rejected")
    mean_over = "samples"
    shares_samples = True

    def of_pairs(
        self, values: "Tensor", num_tokens: "Tensor", batch: dict[str, Any]
    ) -> "tuple[Tensor, dict[str, Tensor]]":
        """The loss of each pair, and sums over the pairs for the metrics.

        Args:
            values: float64, of each sequence: 2i is the chosen answer of pair i, 2i + 1 the rejected one. The
                log-probability, (S,); of a head with scores these, (S, k).
            num_tokens: of each sequence.
        """
        raise NotImplementedError

    def compute(self, model: "Module", batch: dict[str, Any]) -> "LossOutput":
        """The sum over the pairs."""
        from cookbook.config.objectives.forward import LossOutput, negative_log_likelihood, sums_by_sequence

        own = negative_log_likelihood(model, batch)
        values, num_tokens = sums_by_sequence(own if self.num_scores else -own, batch)
        losses, metrics = self.of_pairs(values, num_tokens, batch)
        return LossOutput.of(losses, own, metrics)
