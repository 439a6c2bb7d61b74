"""The logits of a head as a loss reads them: of the whole vocabulary, or of a part on each rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from cookbook.facts.model_types import TYPES, how_to_measure
from cookbook.facts.score_head import backbone_of
from cookbook.system.files import RecipeError, first_line
from cookbook.training.models.structure import LogitTransform, logit_transform


class Kernels(NamedTuple):
    """Functions of a head's logits that are compiled in a run with `model.compile`, without a float32 copy of them."""

    nll: Callable[[torch.Tensor, torch.Tensor, LogitTransform | None], torch.Tensor]
    gradient: Callable[..., torch.Tensor]


@dataclass(frozen=True)
class VocabularyPart:
    """Columns of the logits that a rank of a tensor-parallel group has. A loss needs a few numbers a position from
    each rank, instead of logits of the whole vocabulary (Shoeybi et al., 2019, arXiv:1909.08053, section 3).
    """

    start: int = 0
    """Token of the first column."""
    width: int | None = None
    """Columns of the largest part; None if every rank has the whole vocabulary."""
    num_tokens: int | None = None
    """Size of the vocabulary; None if every rank has it whole."""
    group: dist.ProcessGroup | None = None
    """None if every rank has the whole vocabulary."""

    def of_all(self, values: torch.Tensor) -> torch.Tensor:
        """(parts, *values.shape): the values of each part. Collective, differentiable."""
        return values.unsqueeze(0) if self.group is None else _OfAllParts.apply(values, self.group)

    def columns(self, tokens: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns of tokens, 0 where another rank has the token; and whether it is here."""
        columns = tokens - self.start
        is_here = (columns >= 0) & (columns < width)
        return columns * is_here, is_here


WHOLE = VocabularyPart()


def in_turn(evaluate: Callable[[slice], Any], chunks: Sequence[slice]) -> list[Any]:
    """Results of a function of each chunk of rows."""
    return [evaluate(rows) for rows in chunks]


class Reading(NamedTuple):
    """Way from a head's products to the logits of a model."""

    transform: LogitTransform | None
    kernels: Kernels
    part: VocabularyPart = WHOLE
    in_chunks: Callable[[Callable[[slice], Any], Sequence[slice]], list[Any]] = in_turn
    """`in_turn`, or a forecast's way, which counts chunks that are alike without running each."""


class HeadLogits:
    """`cookbook.config.objectives.forward.Logits` of a head's products.

    Each method reduces the products to a few numbers a position, joins those of all parts, and is differentiable.
    """

    def __init__(self, products: torch.Tensor, reading: Reading, known: Sequence[torch.Tensor] = ()) -> None:
        """
        Args:
            products: (L, V) of the head, before the model's transform; of a part of the vocabulary its columns.
            known: results of an earlier pass over the same rows, its `known`.
        """
        self.products, self.reading = products, reading
        self.known: list[torch.Tensor] = []
        """Results that `nll` need not compute again in a second pass, in the order of its calls: (k, L) each."""
        self._before = iter(known)

    def nll(self, tokens: torch.Tensor) -> torch.Tensor:
        known = next(self._before, None)
        if known is None:
            known = losses_of(self.products.detach(), tokens, self.reading)
        self.known.append(known)
        return _NegativeLogLikelihood.apply(self.products, tokens, known, self.reading)

    def at(self, tokens: torch.Tensor) -> torch.Tensor:
        columns, is_here = self.reading.part.columns(tokens, self.products.shape[1])
        values = transform_logits(self.products.gather(1, columns), self.reading.transform).float()
        return self.reading.part.of_all(values * is_here).sum(0)

    def argmax(self) -> torch.Tensor:
        part, logits = self.reading.part, transform_logits(self.products.detach(), self.reading.transform)
        if part.group is None:
            return logits.argmax(1)
        logits = F.pad(logits.double(), (0, 1), value=-torch.inf)  # the last ranks may have no column
        best = logits.argmax(1)
        values = logits.gather(1, best.unsqueeze(1)).squeeze(1)
        of_all = part.of_all(torch.stack([values, (best + part.start).double()]))
        return of_all[:, 1].gather(0, of_all[:, 0].argmax(0, keepdim=True)).squeeze(0).long()

    def rank(self, tokens: torch.Tensor) -> torch.Tensor:
        part, logits = self.reading.part, transform_logits(self.products.detach(), self.reading.transform).float()
        columns, is_here = part.columns(tokens.unsqueeze(1), logits.shape[1])
        own = part.of_all(logits.gather(1, columns) * is_here).sum(0)
        return part.of_all((logits > own).sum(1, dtype=torch.float32)).sum(0)

    def mean(self) -> torch.Tensor:
        part = self.reading.part
        total = part.of_all(transform_logits(self.products, self.reading.transform).sum(1, dtype=torch.float32)).sum(0)
        return total / (part.num_tokens or self.products.shape[1])

    def logsumexp(self, *, temperature: float = 1.0, without: torch.Tensor | None = None) -> torch.Tensor:
        part, width = self.reading.part, self.products.shape[1]
        columns = None
        if without is not None:
            columns, is_here = part.columns(without, width)
            columns = columns.where(is_here, width)
        logits = transform_logits(self.products, self.reading.transform)
        return part.of_all(_LogSumExp.apply(logits, temperature, columns)).logsumexp(0)

    def whole(self) -> torch.Tensor:
        if self.reading.part.group is not None:
            raise RecipeError(
                "whole() of logits: each process has a part of the vocabulary under tensor parallel; use argmax, rank,"
                " at, mean, nll or logsumexp, or a strategy without tensor parallel"
            )
        return transform_logits(self.products, self.reading.transform).to(torch.float32, copy=True)


class _OfAllParts(torch.autograd.Function):
    """The values of all ranks of a group, which all compute the same loss of them: each needs the gradient of its own
    values alone. Collective."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = values.new_empty(group.size() * len(values), *values.shape[1:])
        dist.all_gather_into_tensor(whole, values.contiguous(), group)
        return whole.view(group.size(), *values.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0][dist.get_rank(ctx.group)], None


class _LogSumExp(torch.autograd.Function):
    """The log-sum-exp of logits at a temperature, without some columns.

    torch's own would keep the logits, their quotient and a copy with -inf, and make three more in its backward.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, temperature: float, columns: torch.Tensor | None) -> torch.Tensor:
        # A column more, for tokens that other ranks have.
        scaled = F.pad(logits.float(), (0, 1), value=-torch.inf).div_(temperature)
        if columns is not None:
            scaled.scatter_(1, columns, -torch.inf)
        sums = scaled.logsumexp(1)
        ctx.save_for_backward(scaled, sums)
        ctx.temperature = temperature
        return sums

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        scaled, sums = ctx.saved_tensors
        # Of no column at all, -inf less -inf would be nan, and so is the gradient of what joins the parts.
        is_empty = sums == -torch.inf
        probabilities = scaled.sub_(sums.masked_fill(is_empty, torch.inf).unsqueeze(1)).exp_()
        scale = gradients[0].masked_fill(is_empty, 0.0) / ctx.temperature
        return probabilities.mul_(scale.unsqueeze(1))[:, :-1], None, None


class _NegativeLogLikelihood(torch.autograd.Function):
    """The loss of `losses_of`, whose gradient takes half the memory of torch's."""

    @staticmethod
    def forward(
        ctx: Any, products: torch.Tensor, tokens: torch.Tensor, known: torch.Tensor, reading: Reading
    ) -> torch.Tensor:
        ctx.save_for_backward(products, tokens, known)
        ctx.reading = reading
        return known[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        products, tokens, known = ctx.saved_tensors
        gradient = gradient_of_losses(products, tokens, known, ctx.reading)
        return gradient.mul_(gradients[0].unsqueeze(1)), None, None, None


def losses_of(products: torch.Tensor, tokens: torch.Tensor, reading: Reading) -> torch.Tensor:
    """(1, L) float32 negative log-likelihoods; (2, L) of a part, with the log-sum-exp over the vocabulary."""
    transform, part = reading.transform, reading.part
    if part.group is None:
        return reading.kernels.nll(products, tokens, transform).unsqueeze(0)
    columns, is_here = part.columns(tokens, products.shape[1])
    wide = transform_logits(products, transform).float()
    terms = torch.stack([wide.logsumexp(1), wide.gather(1, columns.unsqueeze(1)).squeeze(1) * is_here])
    of_all = part.of_all(terms)
    sums = of_all[:, 0].logsumexp(0)
    return torch.stack([sums - of_all[:, 1].sum(0), sums])


def gradient_of_losses(
    products: torch.Tensor, tokens: torch.Tensor, known: torch.Tensor, reading: Reading
) -> torch.Tensor:
    """Gradient of the sum of the losses by the products.

    Args:
        known: the result of `losses_of`.
    """
    part, sums = reading.part, None if reading.part.group is None else known[1]
    return reading.kernels.gradient(products, tokens, known[0], sums, part, reading.transform)


def transform_logits(logits: torch.Tensor, transform: LogitTransform | None) -> torch.Tensor:
    """The logits of a model, in float32 if it changes those of its head."""
    if transform is None:
        return logits
    scaled = logits.float() * transform.scale
    return scaled if transform.cap is None else torch.tanh(scaled / transform.cap) * transform.cap


def _nll(logits: torch.Tensor, targets: torch.Tensor, transform: LogitTransform | None) -> torch.Tensor:
    return F.cross_entropy(transform_logits(logits, transform).float(), targets, reduction="none")


def _gradient_of_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    nll: torch.Tensor,
    sums: torch.Tensor | None,
    part: VocabularyPart | None,
    transform: LogitTransform | None = None,
) -> torch.Tensor:
    """Gradient of the sum of the losses: probabilities, (L, V), less 1 at the target; times the transform's slope.

    In the dtype of the logits, of which only fp16 has no such small numbers: see `products_of`.

    Args:
        nll: (L,) losses.
        sums: of a part of the vocabulary, the log-sum-exp over the whole.
    """
    if transform is not None:
        wide = transform_logits(logits, transform)
        gradient = _gradient_of_logits(wide, targets, nll, sums, part)
        if transform.cap is not None:
            gradient *= wide.div_(transform.cap).square_().neg_().add_(1)  # tanh' = 1 - tanh^2, in the place of tanh
        gradient *= transform.scale
        return gradient.to(logits.dtype)
    # By way of the loss: a probability near 1 that was rounded to bf16 has no digits left after subtracting 1.
    at_target = torch.expm1(-nll).unsqueeze(1)
    if sums is None:
        probabilities = logits.softmax(-1)
        return probabilities.scatter_(1, targets.unsqueeze(1), at_target.to(probabilities.dtype))
    assert part is not None
    columns, is_here = part.columns(targets.unsqueeze(1), logits.shape[1])
    probabilities = (logits.float() - sums.unsqueeze(1)).exp_()
    probabilities.scatter_(1, columns, at_target.where(is_here, probabilities.gather(1, columns)))
    return probabilities.to(logits.dtype)


PLAIN = Kernels(_nll, _gradient_of_logits)


class _HiddenAlone(BaseModelOutputWithPast):
    """Outputs of a backbone, of which a model asks for more than the hidden states."""

    def __getattr__(self, name: str) -> None:
        return None


def other_logits(model: PreTrainedModel) -> str | None:
    """Why the loss would not be that of a model's own logits, or None: its class changes what its head returns in
    another way than `logit_transform` says. By the class's own forward between backbone and head, without any weight.
    """
    kind, known = type(model).__name__, model.config.model_type in TYPES
    text, head, backbone = model.config.get_text_config(), model.get_output_embeddings(), backbone_of(model)
    hidden = torch.linspace(-3, 3, text.hidden_size).view(1, 1, -1)

    def products(states: torch.Tensor) -> torch.Tensor:
        weights = torch.linspace(-1, 1, text.hidden_size) / text.hidden_size
        return (states.float() @ weights).unsqueeze(-1) * torch.linspace(-30, 30, text.vocab_size)

    try:
        backbone.forward, head.forward = lambda *_, **__: _HiddenAlone(last_hidden_state=hidden), products
        with torch.no_grad():
            logits = type(model).forward(model, input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits
        ours = transform_logits(products(hidden), logit_transform(model.config))
        if logits.shape == ours.shape and torch.allclose(logits.float(), ours.float(), rtol=1e-4, atol=1e-4):
            return None
        what = f"{kind} changes the logits after its head in a way that is not known, so that the loss would be another"
    except Exception as error:  # of a model's code, which may want other inputs
        if known:  # and so was compared by runs
            return None
        what = f"whether {kind} changes the logits after its head could not be seen ({first_line(error)})"
    finally:
        vars(backbone).pop("forward", None), vars(head).pop("forward", None)
    return what + how_to_measure(model.config.model_type)
