"""Objectives of a head that scores whole sequences."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from cookbook.config.objectives.objective import Objective, TooLong, TrainOn
from cookbook.config.objectives.pair import PairObjective
from cookbook.rows.json_text import BadRow
from cookbook.system.registry import register

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from cookbook.config.objectives.forward import LossOutput

HEAD = "score"
"""The name of that head in transformers' models."""


class ScoreObjective(Objective):
    """The score of a sequence is read at its last token, so that what is before it are inputs alone."""

    mean_over = "samples"
    shares_samples = True

    @property
    def labels(self) -> TrainOn:
        return "all"

    def long_rows(self, chosen: TooLong | None) -> TooLong:
        """Longer rows are left out, as in TRL (1.16, trainer/reward_trainer.py): the end of a text is what a score is
        about."""
        return chosen or "drop"


@register
class Reward(ScoreObjective, PairObjective):
    """A reward model: that of Bradley and Terry (1952), as in eq. 1 of Ouyang et al. 2022 (arXiv 2203.02155).

    The loss of a pair is -log sigmoid(r(chosen) - r(rejected)), plus `center_rewards_coefficient` times
    (r(chosen) + r(rejected))^2, eq. 2 of Eisenstein et al. 2023 (arXiv 2312.09244).
    """

    name: Literal["reward"]
    center_rewards_coefficient: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """reward only: how strongly the two rewards of a pair are drawn to a sum of 0, which the loss of their difference
    leaves open. TRL recommends 0.01."""

    @property
    def num_scores(self) -> int:
        return 1

    def words(self) -> str:
        centred = f", rewards centred by {self.center_rewards_coefficient:g}" if self.center_rewards_coefficient else ""
        return f"reward, Bradley-Terry{centred}"

    def of_pairs(
        self, values: "Tensor", num_tokens: "Tensor", batch: dict[str, Any]
    ) -> "tuple[Tensor, dict[str, Tensor]]":
        import torch.nn.functional as F

        from cookbook.config.objectives.forward import reward_metrics

        chosen, rejected = values[0::2, 0], values[1::2, 0]
        losses = self.center_rewards_coefficient * (chosen + rejected).square() - F.logsigmoid(chosen - rejected)
        return losses, reward_metrics(chosen, rejected)


class LabelObjective(ScoreObjective):
    """A head that learns the label of a text or a chat."""

    rows = ("labelled_text", "labelled_chat")

    def number_of(self, label: str | float) -> float:
        """The number that the loss compares with the scores, a good label itself; raises BadRow."""
        raise NotImplementedError

    def check_row(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"label": self.number_of(row["label"])}


@register
class Classify(LabelObjective):
    """A classifier: cross-entropy of the softmax over the scores, one for each class."""

    name: Literal["classify"]
    classes: list[Annotated[str, Field(min_length=1)]] = Field(min_length=2)
    """classify only: the names of the classes in the order of the head's outputs, which are their numbers from 0 on. A
    label is a name or a number; a number that is another class's name as well is neither."""

    @field_validator("classes")
    @classmethod
    def _are_different(cls, classes: list[str]) -> list[str]:
        if twice := sorted({name for name in classes if classes.count(name) > 1}):
            raise ValueError(f"has {', '.join(twice)} more than once")
        return classes

    @property
    def num_scores(self) -> int:
        return len(self.classes)

    @property
    def problem_type(self) -> str:
        return "single_label_classification"

    @property
    def class_names(self) -> Sequence[str]:
        return self.classes

    def words(self) -> str:
        return f"classify, cross-entropy over {len(self.classes)} classes"

    def number_of(self, label: str | float) -> int:
        count = len(self.classes)
        if isinstance(label, str):
            if label in self.classes:
                return self.classes.index(label)
            if not label.isdecimal():  # as a cell of a table has a number
                raise BadRow(
                    "label is no class", f"`label` is {label[:40]!a}; objective.classes has {self._classes_in_words}"
                )
            label = int(label)
        if type(label) is not int:
            seen = f"`label` is {label}; write the name of a class, or its number from 0 to {count - 1}"
            raise BadRow("label is neither a name nor a whole number", seen)
        if not 0 <= label < count:
            seen = f"`label` is {label}; objective.classes has {count}, numbered from 0 to {count - 1}"
            raise BadRow("label out of range", seen)
        if str(label) in self.classes and (named := self.classes.index(str(label))) != label:
            seen = f"`label` is {label}, the name of class {named} and the number of {self.classes[label]!r}"
            raise BadRow(
                "label is the name of one class and the number of another", f"{seen}; write the name, as a text"
            )
        return label

    @property
    def _classes_in_words(self) -> str:
        more = f" and {len(self.classes) - 12} more" if len(self.classes) > 12 else ""
        return ", ".join(self.classes[:12]) + more

    def compute(self, model: "Module", batch: dict[str, Any]) -> "LossOutput":
        """The sum over the samples, whose classes are `values`."""
        import torch.nn.functional as F

        from cookbook.config.objectives.forward import LossOutput, scores_by_sequence

        scores, own = scores_by_sequence(model, batch)
        classes = batch["values"].long()
        losses = F.cross_entropy(scores, classes, reduction="none")
        return LossOutput.of(losses, own, {"accuracy": (scores.argmax(-1) == classes).float().sum()})


@register
class Regress(LabelObjective):
    """Regression: the squared difference between the one score and a number."""

    name: Literal["regress"]

    @property
    def num_scores(self) -> int:
        return 1

    @property
    def problem_type(self) -> str:
        return "regression"

    def words(self) -> str:
        return "regress, mean squared error"

    def number_of(self, label: str | float) -> float:
        try:
            number = math.nan if isinstance(label, bool) else float(label)  # a text, as a cell of a table
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise BadRow("label is no number", f"`label` is {ascii(label)[:40]}")
        return number

    def compute(self, model: "Module", batch: dict[str, Any]) -> "LossOutput":
        """The sum over the samples, whose numbers are `values`."""
        from cookbook.config.objectives.forward import LossOutput, scores_by_sequence

        scores, own = scores_by_sequence(model, batch)
        differences = scores[:, 0] - batch["values"]
        return LossOutput.of(differences.square(), own, {"absolute_error": differences.detach().abs().sum()})
