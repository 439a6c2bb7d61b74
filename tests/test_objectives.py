"""Objectives against slow references written from their papers. pytest tests/test_objectives.py"""

import math

import pytest
import torch
from target_grid import from_grid

from cookbook.objectives import build_objective, sequence_logps
from cookbook.recipe import ObjectiveSection

NUM_PAIRS, LENGTH, VOCAB = 3, 7, 11


def model(logits: torch.Tensor):
    """What `model(...)` gives: the negative log-likelihood of each target."""

    def forward(*, input_ids, targets, target_positions):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1)[target_positions], targets, reduction="none")

    return forward


@pytest.fixture
def grid() -> torch.Tensor:
    """Targets, a row for each sequence."""
    chance = torch.Generator().manual_seed(0)
    targets = torch.randint(0, VOCAB, (2 * NUM_PAIRS, LENGTH), generator=chance)
    for row in range(2 * NUM_PAIRS):
        targets[row, : 1 + row % 3] = -100  # prompts of uneven length
    return targets


@pytest.fixture
def batch(grid) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(2)
    found = from_grid(grid)
    return {
        "input_ids": grid.clamp(min=0),
        **found,
        "target_sequences": found["target_positions"] // LENGTH,
        "reference_logps": torch.randn(2 * NUM_PAIRS, generator=chance) - 12.0,
    }


@pytest.fixture
def logits() -> torch.Tensor:
    chance = torch.Generator().manual_seed(1)
    return torch.randn(2 * NUM_PAIRS, LENGTH, VOCAB, generator=chance).requires_grad_()


def log_probability(logits: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
    """Of one sequence, token by token."""
    total, count = 0.0, 0
    for position, target in enumerate(targets.tolist()):
        if target != -100:
            weights = [math.exp(value) for value in logits[position].tolist()]
            total += math.log(weights[target] / sum(weights))
            count += 1
    return total, count


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_sigmoid_is_equation_7_of_the_dpo_paper(batch, grid, logits, smoothing: float):
    settings = ObjectiveSection(name="dpo", beta=0.3, label_smoothing=smoothing)
    outcome = build_objective(settings).run(model(logits), batch)
    losses, margins = [], []
    for pair in range(NUM_PAIRS):
        ratio = [
            log_probability(logits[row], grid[row])[0] - batch["reference_logps"][row].item()
            for row in (2 * pair, 2 * pair + 1)
        ]
        margins.append(0.3 * (ratio[0] - ratio[1]))
        right, wrong = (math.log(1 / (1 + math.exp(-sign * margins[-1]))) for sign in (1, -1))
        losses.append(-(1 - smoothing) * right - smoothing * wrong)
    assert outcome.loss_sum.item() == pytest.approx(sum(losses), rel=1e-5)
    assert outcome.count == NUM_PAIRS
    assert outcome.metrics["reward_margin"].item() == pytest.approx(sum(margins), rel=1e-5)
    assert outcome.metrics["reward_accuracy"].item() == sum(margin > 0 for margin in margins)
    chosen, rejected = outcome.metrics["reward_chosen"], outcome.metrics["reward_rejected"]
    assert (chosen - rejected).item() == pytest.approx(sum(margins), rel=1e-5)


def test_ipo_pulls_the_margin_per_token_to_one_over_two_beta(batch, grid, logits):
    outcome = build_objective(ObjectiveSection(name="dpo", loss="ipo", beta=0.4)).run(model(logits), batch)
    expected = 0.0
    for pair in range(NUM_PAIRS):
        ratio = []
        for row in (2 * pair, 2 * pair + 1):
            total, count = log_probability(logits[row], grid[row])
            ratio.append((total - batch["reference_logps"][row].item()) / count)
        expected += (ratio[0] - ratio[1] - 1 / 0.8) ** 2
    assert outcome.loss_sum.item() == pytest.approx(expected, rel=1e-5)


def test_the_gradient_is_that_of_the_paper(batch, logits):
    """Below eq. 7: -beta * sigmoid(rejected reward - chosen reward) * (grad log pi(chosen) - grad log pi(rejected))."""
    build_objective(ObjectiveSection(name="dpo", beta=0.3)).run(model(logits), batch).loss_sum.backward()
    ours = logits.grad.clone()
    logits.grad = None
    logps = sequence_logps(model(logits), batch | {"sample_index": torch.arange(2 * NUM_PAIRS)})
    rewards = 0.3 * (logps - batch["reference_logps"]).detach()
    weights = 0.3 * torch.sigmoid(rewards[1::2] - rewards[0::2])
    (-(weights * (logps[0::2] - logps[1::2])).sum()).backward()
    assert torch.allclose(ours, logits.grad, atol=1e-6)


def test_an_untrained_model_has_no_reward_and_the_loss_of_a_coin(batch, logits):
    index = torch.arange(2 * NUM_PAIRS)
    reference = sequence_logps(model(logits), batch | {"sample_index": index}).detach()
    outcome = build_objective(ObjectiveSection(name="dpo")).run(model(logits), batch | {"reference_logps": reference})
    assert outcome.loss_sum.item() / NUM_PAIRS == pytest.approx(math.log(2), abs=1e-6)
    assert outcome.metrics["reward_margin"].item() == 0


def test_swapped_answers_are_another_loss(batch, logits):
    settings = ObjectiveSection(name="dpo", beta=0.3)
    swapped = batch | {"target_sequences": batch["target_sequences"] ^ 1}
    right, wrong = (build_objective(settings).run(model(logits), each).loss_sum for each in (batch, swapped))
    assert abs(right - wrong).item() > 0.1


def test_a_micro_batch_without_pairs_still_has_a_backward(batch, logits):
    empty = {"input_ids": batch["input_ids"][:1, :2]}
    empty |= {name: tensor[:0] for name, tensor in batch.items() if name != "input_ids"}
    outcome = build_objective(ObjectiveSection(name="dpo")).run(model(logits[:1, :2]), empty)
    outcome.loss_sum.backward()
    assert (outcome.loss_sum.item(), outcome.count) == (0, 0) and not logits.grad.any()


@pytest.mark.parametrize("name", ["sft", "cpt"])
def test_a_token_loss_is_a_sum_over_labels(batch, grid, logits, name: str):
    outcome = build_objective(ObjectiveSection(name=name)).run(model(logits), batch)
    rows = [log_probability(logits[row], grid[row]) for row in range(2 * NUM_PAIRS)]
    assert outcome.loss_sum.item() == pytest.approx(-sum(total for total, _ in rows), rel=1e-5)
    assert outcome.count == sum(count for _, count in rows)
