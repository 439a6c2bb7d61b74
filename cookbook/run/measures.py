"""Metrics of plugins in an evaluation: sums over the labels, in the same forward as the loss, of the same chunks; and
those of sampled answers.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cookbook.config.metric_functions import Metric
from cookbook.config.objectives.forward import Batch, FunctionOfLogits, Logits, LossOutput
from cookbook.run.samples import values_of_answers
from cookbook.system.files import RecipeError

if TYPE_CHECKING:
    from cookbook.run.stages import Run

OVER = "/over"
"""Behind the name of a metric, the sum that it is divided by."""
Loss = Callable[[Any, Batch], LossOutput]


def values_of_set(run: "Run", name: str, stop_reason: Callable[[], str | None]) -> dict[str, float] | str:
    """All values of an evaluation on a set of a run, or the reason to stop. Every rank must call."""
    of_answers = [metric for metric in run.metrics if metric.num_answers]
    of_logits = [metric for metric in run.metrics if not metric.num_answers]
    compute = add_metrics(run.recipe.objective.compute, of_logits)
    means = run.engine.evaluate(compute, run.eval_sets[name](), stop_reason)
    if isinstance(means, str):
        return means
    answered = values_of_answers(run, of_answers, run.inputs.data.eval[name], stop_reason)
    if isinstance(answered, str):
        return answered
    _refuse_taken([name for name in answered if name in means])
    return divide_sums(means, of_logits) | answered


def _refuse_taken(names: Collection[str]) -> None:
    if names:
        raise RecipeError(f"run.metrics: the objective reports {min(names)} itself; give the metric another name")


def add_metrics(loss: Loss, metrics: Sequence[Metric]) -> Loss:
    """The loss of an objective, with the two sums of each metric among what it reports.

    As sums they go the way of the loss: whatever divides tokens, samples or layers between processes, `Engine.evaluate`
    adds up what each has seen.
    """

    def compute(model: Any, batch: Batch) -> LossOutput:
        meter = _Meter(model, metrics)
        outcome = loss(meter, batch)
        _refuse_taken({metric.name for metric in metrics} & outcome.metrics.keys())
        return LossOutput(outcome.loss_sum, outcome.count, outcome.metrics | meter.sums)

    return compute if metrics else loss


def divide_sums(means: dict[str, float], metrics: Sequence[Metric]) -> dict[str, float]:
    """The values of an evaluation, in which each metric is the quotient of its sums; nan where nothing was counted."""
    values = dict(means)
    for metric in metrics:
        over = values.pop(f"{metric.name}{OVER}")
        values[metric.name] = values[metric.name] / over if over else float("nan")
    return values


class _Meter:
    """A model as an objective calls it, which answers the metrics in the same forward."""

    def __init__(self, model: Any, metrics: Sequence[Metric]) -> None:
        self.model, self.metrics = model, metrics
        self.sums: dict[str, torch.Tensor] = {}

    def __call__(self, *, function: FunctionOfLogits | None = None, **inputs: Any) -> Any:
        joined = _JoinedFunction(function, inputs["targets"], self.metrics)
        results = self.model(**inputs, function=joined)
        own = results[: joined.num_own]
        for name, values in zip(joined.names, results[joined.num_own :], strict=True):
            self.sums[name] = self.sums.get(name, 0) + values.double().sum()
        return own[0] if function is None else own


class _JoinedFunction:
    """A function of logits, or the likelihood of the labels, with the values of metrics behind its own."""

    def __init__(self, function: FunctionOfLogits | None, labels: torch.Tensor, metrics: Sequence[Metric]) -> None:
        self.function, self.labels, self.metrics = function, labels, metrics
        self.names = [name for metric in metrics for name in (metric.name, f"{metric.name}{OVER}")]
        reported = () if function is None else function.reported
        self.num_own, self.reported = 1 + len(reported), (*reported, *self.names)

    def __call__(self, logits: Logits, rows: slice) -> tuple[torch.Tensor, ...]:
        labels = self.labels[rows]
        own = (logits.nll(labels),) if self.function is None else self.function(logits, rows)
        return *own, *(column for metric in self.metrics for column in _columns(metric, logits, labels))


def _columns(metric: Metric, logits: Logits, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A metric's values and what they are divided by, float32 (L,) each."""
    returned = metric.call(logits, labels.clone())  # which many a function masks in place
    columns = returned if isinstance(returned, tuple) else (returned,)
    shapes = [tuple(column.shape) if isinstance(column, torch.Tensor) else type(column).__name__ for column in columns]
    if len(columns) > 2 or set(shapes) != {labels.shape}:
        raise RecipeError(
            f"run.metrics: {metric.name} returned {' and '.join(map(str, shapes))} for {len(labels)} labels; return a"
            " tensor of a number for each label, or two of them"
        )
    values, *over = columns
    return values.float(), (over[0] if over else torch.ones_like(labels)).float()
