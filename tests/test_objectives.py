"""Objectives against slow references written from their papers. pytest tests/test_objectives.py"""

import math

import pytest
import torch
from target_grid import from_grid

from cookbook.config.objectives import Objective
from cookbook.config.objectives.forward import LossOutput, sequence_logps
from tests.needs import need_trl

NUM_PAIRS, LENGTH, VOCAB = 3, 7, 11


def model(logits: torch.Tensor):
    """A model that returns the negative log-likelihood of each target."""

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
    targets = from_grid(grid)
    return {
        "input_ids": grid.clamp(min=0),
        **targets,
        "target_sequences": targets["target_positions"] // LENGTH,
        "num_sequences": 2 * NUM_PAIRS,
        "values": torch.tensor([1.0, 0.0] * NUM_PAIRS, dtype=torch.float64),
        "reference_logps": torch.randn(2 * NUM_PAIRS, generator=chance) - 12.0,
    }


@pytest.fixture
def logits() -> torch.Tensor:
    chance = torch.Generator().manual_seed(1)
    return torch.randn(2 * NUM_PAIRS, LENGTH, VOCAB, generator=chance).requires_grad_()


def log_probability(logits: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
    """Log-probability of one sequence and its number of labels, token by token."""
    total, count = 0.0, 0
    for position, target in enumerate(targets.tolist()):
        if target != -100:
            weights = [math.exp(value) for value in logits[position].tolist()]
            total += math.log(weights[target] / sum(weights))
            count += 1
    return total, count


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_sigmoid_is_equation_7_of_the_dpo_paper(batch, grid, logits, smoothing: float):
    settings = Objective.of(name="dpo", beta=0.3, label_smoothing=smoothing)
    outcome = settings.compute(model(logits), batch)
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
    outcome = Objective.of(name="dpo", loss="ipo", beta=0.4).compute(model(logits), batch)
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
    Objective.of(name="dpo", beta=0.3).compute(model(logits), batch).loss_sum.backward()
    ours = logits.grad.clone()
    logits.grad = None
    logps = sequence_logps(model(logits), batch)
    rewards = 0.3 * (logps - batch["reference_logps"]).detach()
    weights = 0.3 * torch.sigmoid(rewards[1::2] - rewards[0::2])
    (-(weights * (logps[0::2] - logps[1::2])).sum()).backward()
    assert torch.allclose(ours, logits.grad, atol=1e-6)


def test_the_loss_of_samples_is_float32_whatever_they_were_summed_in():
    output = LossOutput.of(torch.tensor([1.0, 2.0], dtype=torch.float64), torch.ones(5), {})
    assert (output.loss_sum.dtype, float(output.loss_sum), output.count) == (torch.float32, 3.0, 2)


def test_an_untrained_model_has_no_reward_and_the_loss_of_a_coin(batch, logits):
    reference = sequence_logps(model(logits), batch).detach()
    outcome = Objective.of(name="dpo").compute(model(logits), batch | {"reference_logps": reference})
    assert outcome.loss_sum.item() / NUM_PAIRS == pytest.approx(math.log(2), abs=1e-6)
    assert outcome.metrics["reward_margin"].item() == 0


def test_swapped_answers_are_another_loss(batch, logits):
    settings = Objective.of(name="dpo", beta=0.3)
    swapped = batch | {"target_sequences": batch["target_sequences"] ^ 1}
    right, wrong = (settings.compute(model(logits), each).loss_sum for each in (batch, swapped))
    assert abs(right - wrong).item() > 0.1


@pytest.mark.parametrize("name", ["dpo", "orpo", "cpo", "simpo", "kto_zero", "grpo"])
def test_a_micro_batch_without_samples_still_has_a_backward(batch, logits, name: str):
    batch |= {"old_logps": torch.zeros(len(batch["targets"]), dtype=torch.float64)}
    empty = {"input_ids": batch["input_ids"][:1, :2]}
    empty |= {name: value[:0] for name, value in batch.items() if name not in ("input_ids", "num_sequences")}
    empty["num_sequences"] = 0
    outcome = Objective.of(name=name).compute(model(logits[:1, :2]), empty)
    outcome.loss_sum.backward()
    assert (outcome.loss_sum.item(), outcome.count) == (0, 0) and not logits.grad.any()


@pytest.mark.parametrize("name", ["sft", "cpt"])
def test_a_token_loss_is_a_sum_over_labels(batch, grid, logits, name: str):
    outcome = Objective.of(name=name).compute(model(logits), batch)
    rows = [log_probability(logits[row], grid[row]) for row in range(2 * NUM_PAIRS)]
    assert outcome.loss_sum.item() == pytest.approx(-sum(total for total, _ in rows), rel=1e-5)
    assert outcome.count == sum(count for _, count in rows)


# ORPO, from the equations of its paper.


def orpo_by_the_paper(logits, grid, weight: float) -> float:
    """Eqs. 3 to 7 of arXiv 2403.07691: odds of the likelihood of a token, geometric mean over the answer."""
    total = 0.0
    for pair in range(NUM_PAIRS):
        means = [
            math.exp(total / count)
            for total, count in (log_probability(logits[2 * pair + i], grid[2 * pair + i]) for i in (0, 1))
        ]
        odds = [mean / (1 - mean) for mean in means]
        total += -math.log(means[0]) - weight * math.log(1 / (1 + math.exp(-math.log(odds[0] / odds[1]))))
    return total


def test_orpo_is_equations_3_to_7_of_its_paper(batch, grid, logits):
    outcome = Objective.of(name="orpo", beta=0.7).compute(model(logits), batch)
    assert outcome.loss_sum.item() == pytest.approx(orpo_by_the_paper(logits, grid, 0.7), rel=1e-5)
    assert outcome.count == NUM_PAIRS
    chosen = sum(
        log_probability(logits[row], grid[row])[0] / log_probability(logits[row], grid[row])[1] for row in (0, 2, 4)
    )
    assert outcome.metrics["nll_chosen"].item() == pytest.approx(-chosen, rel=1e-5)


def test_orpo_needs_no_reference_and_swapped_answers_are_another_loss(batch, logits):
    without = {name: value for name, value in batch.items() if name != "reference_logps"}
    swapped = without | {"target_sequences": batch["target_sequences"] ^ 1}
    right, wrong = (Objective.of(name="orpo").compute(model(logits), each).loss_sum for each in (without, swapped))
    assert abs(right - wrong).item() > 0.01


def test_the_gradient_of_orpo_is_that_of_finite_differences(batch, grid, logits):
    Objective.of(name="orpo", beta=0.7).compute(model(logits), batch).loss_sum.backward()
    place, step = (1, LENGTH - 2, 3), 1e-2
    moved = []
    for sign in (1, -1):
        other = logits.detach().clone()
        other[place] += sign * step
        moved.append(orpo_by_the_paper(other, grid, 0.7))
    assert abs(logits.grad[place]).item() > 1e-3
    assert logits.grad[place].item() == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-2)


def test_a_likelihood_of_one_has_a_finite_gradient(batch):
    logits = torch.zeros(2 * NUM_PAIRS, LENGTH, VOCAB)
    logits.view(-1, VOCAB)[batch["target_positions"], batch["targets"]] = 1e4
    logits.requires_grad_()
    outcome = Objective.of(name="orpo").compute(model(logits), batch)
    outcome.loss_sum.backward()
    assert math.isfinite(outcome.loss_sum.item()) and logits.grad.isfinite().all()


# CPO and SimPO.


@pytest.mark.parametrize(
    "keys", [{"name": "cpo", "beta": 0.3}, {"name": "simpo", "beta": 2.5, "gamma": 0.8}], ids=["cpo", "simpo"]
)
def test_cpo_and_simpo_are_the_equations_of_their_papers(batch, grid, logits, keys):
    """Eq. 3 of arXiv 2401.08417 with the likelihood beside it; eq. 6 of arXiv 2405.14734. Swapped is another loss."""
    without = {name: value for name, value in batch.items() if name != "reference_logps"}
    outcome = Objective.of(**keys).compute(model(logits), without)
    losses, margins = [], []
    for pair in range(NUM_PAIRS):
        (chosen, count), (rejected, other) = (
            log_probability(logits[row], grid[row]) for row in (2 * pair, 2 * pair + 1)
        )
        if keys["name"] == "simpo":
            margins.append(2.5 * chosen / count - 2.5 * rejected / other)
            losses.append(-math.log(1 / (1 + math.exp(-(margins[-1] - 0.8)))))
        else:
            margins.append(0.3 * chosen - 0.3 * rejected)
            losses.append(-math.log(1 / (1 + math.exp(-margins[-1]))) - chosen / count)
    assert outcome.loss_sum.item() == pytest.approx(sum(losses), rel=1e-5) and outcome.count == NUM_PAIRS
    assert outcome.metrics["reward_margin"].item() == pytest.approx(sum(margins), rel=1e-4)
    assert outcome.metrics["reward_accuracy"].item() == sum(margin > 0 for margin in margins)
    swapped = without | {"target_sequences": batch["target_sequences"] ^ 1}
    assert abs(Objective.of(**keys).compute(model(logits), swapped).loss_sum - outcome.loss_sum).item() > 0.01


# GRPO.

VARIANTS = {
    "dapo": {"beta": 0.3, "epsilon_high": 0.28},
    "grpo": {"loss_type": "grpo", "epsilon": 0.1, "beta": 0.2, "use_bias_correction_kl": False},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 9, "beta": 0.1},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "beta": 0.2},
    "dapo of whole ratios": {"importance_sampling_level": "sequence", "epsilon": 0.05},
}


@pytest.fixture
def answers(batch, logits) -> dict[str, torch.Tensor]:
    """A batch of answers, each token of which was sampled with another probability and has one under the reference."""
    chance = torch.Generator().manual_seed(4)
    now = -model(logits)(**{name: batch[name] for name in ("input_ids", "targets", "target_positions")}).detach()
    old, reference = (now.double() + 0.3 * torch.randn(len(now), generator=chance) for _ in range(2))
    advantages = torch.randn(2 * NUM_PAIRS, generator=chance).double()
    return batch | {"old_logps": old, "token_reference_logps": reference, "values": advantages}


@pytest.fixture
def drawn(answers) -> dict[str, torch.Tensor]:
    """Answers whose tokens were drawn from another distribution than the model's, some from a nearly impossible one."""
    away = torch.randn(len(answers["old_logps"]), generator=torch.Generator().manual_seed(5)).double()
    return answers | {"sampled_logps": answers["old_logps"] + away}


def loss_of_answers(answers, keys: dict) -> tuple[float, float]:
    """Token by token from eqs. 3 and 4 of arXiv 2402.03300 and eq. 7 of arXiv 2507.18071; and the clipped share.

    Of tokens that were drawn from another distribution each is weighted by exp(old - sampled), which is cut off at 3.
    """
    logps = answers["logps"]
    loss = clipped = 0.0
    divisor = len(logps) if keys.get("loss_type", "dapo") == "dapo" else 2 * NUM_PAIRS
    for answer in range(2 * NUM_PAIRS):
        mine = (answers["target_sequences"] == answer).nonzero().flatten().tolist()
        advantage, low = answers["values"][answer].item(), keys.get("epsilon", 0.2)
        high, weight = keys.get("epsilon_high", low), 1.0
        if keys.get("loss_type", "dapo") != "dapo":
            weight = 1 / len(mine)
        parts = [logps[i].item() - answers["old_logps"][i].item() for i in mine]
        if keys.get("importance_sampling_level") == "sequence":
            parts = [sum(parts) / len(parts)] * len(parts)
        for i, part in zip(mine, parts, strict=True):
            ratio, away = math.exp(part), (answers["token_reference_logps"][i] - logps[i]).item()
            inside = max(min(ratio, 1 + high), 1 - low)
            divergence = (math.exp(away) - away - 1) * (ratio if keys.get("use_bias_correction_kl", True) else 1)
            term = -min(ratio * advantage, inside * advantage) + keys.get("beta", 0) * divergence
            if "sampled_logps" in answers:
                term *= min(math.exp(answers["old_logps"][i].item() - answers["sampled_logps"][i].item()), 3.0)
            loss += term / keys["max_completion_length"] if "max_completion_length" in keys else term * weight
            clipped += weight * (ratio * advantage > inside * advantage)
    return loss / divisor, clipped / divisor


@pytest.mark.parametrize("source", ["answers", "drawn"])
@pytest.mark.parametrize("keys", VARIANTS.values(), ids=VARIANTS)
def test_grpo_is_the_equations_of_its_papers(request, logits, keys, source):
    answers = request.getfixturevalue(source)
    outcome = Objective.of(name="grpo", **keys).compute(model(logits), answers)
    names = ("input_ids", "targets", "target_positions")
    logps = -model(logits)(**{name: answers[name] for name in names}).detach().double()
    loss, clipped = loss_of_answers(answers | {"logps": logps}, keys)
    assert outcome.loss_sum.item() / outcome.count == pytest.approx(loss, rel=1e-5)
    assert outcome.metrics["clipped"].item() / outcome.count == pytest.approx(clipped) and clipped > 0
    swapped = answers | {"values": -answers["values"]}
    assert abs(Objective.of(name="grpo", **keys).compute(model(logits), swapped).loss_sum - outcome.loss_sum) > 0.01


def test_the_ratio_of_an_answer_of_one_token_is_that_of_its_token(answers, logits):
    sequences = answers["target_sequences"].tolist()
    first = torch.tensor([sequences.index(answer) for answer in range(2 * NUM_PAIRS)])
    ones = {
        key: value[first] if isinstance(value, torch.Tensor) and len(value) == len(sequences) else value
        for key, value in answers.items()
    }
    of_answers, of_tokens = (
        Objective.of(name="grpo", loss_type="grpo", importance_sampling_level=level).compute(model(logits), ones)
        for level in ("sequence", "token")
    )
    assert of_answers.loss_sum.item() == pytest.approx(of_tokens.loss_sum.item(), rel=1e-6) != 0


def test_truncated_samples_give_the_gradient_of_the_policy_itself(batch):
    """One token, all that top-k leaves of a vocabulary, each as often as it is drawn: the expected gradient is the sum
    of p A grad log p over what is left, by autograd of the probabilities; without weights it is another one."""
    chance = torch.Generator().manual_seed(8)
    logits, rewards = torch.randn(VOCAB, generator=chance).double(), torch.randn(VOCAB, generator=chance).double()
    kept = logits.topk(3).indices
    drawn = logits[kept].softmax(0)
    gradients = []
    for names in (("old_logps", "sampled_logps"), ("old_logps",)):
        leaf = logits.clone().requires_grad_()
        for token, chance_of in zip(kept, drawn, strict=True):
            logp = leaf.log_softmax(0)[token]
            values = {
                "target_sequences": torch.tensor([0]),
                "num_sequences": 1,
                "targets": token[None],
                "values": rewards[token][None],
                "old_logps": logp.detach()[None],
                "sampled_logps": chance_of.log()[None],
            }
            given = {name: value for name, value in values.items() if name in names or not name.endswith("_logps")}
            outcome = Objective.of(name="grpo").compute(lambda logp=logp, **_: -logp[None], {**inputs(batch), **given})
            (chance_of * outcome.loss_sum).backward()
        gradients.append(leaf.grad)
    leaf = logits.clone().requires_grad_()
    (-(leaf.softmax(0) * rewards)[kept]).sum().backward()
    # grad p = p grad log p
    assert gradients[0] == pytest.approx(leaf.grad, abs=1e-6)
    assert (gradients[1] - leaf.grad).abs().max() > 0.05


def inputs(batch) -> dict[str, torch.Tensor]:
    return {name: batch[name] for name in ("input_ids", "target_positions")}


def test_advantages_are_those_within_a_group():
    groups = [[1.0, 0.0, 0.5], [2.0, 2.0], [0.0, 4.0]]
    mean, half = [0.5, -0.5, 0.0, 0.0, 0.0, -2.0, 2.0], 8**0.5
    whole = torch.tensor([reward for group in groups for reward in group]).double().std().item()
    for scaled, divisors in {
        "none": [1.0] * 7,
        "group": [0.5 + 1e-4] * 3 + [1e-4] * 2 + [half + 1e-4] * 2,
        "batch": [whole + 1e-4] * 7,
    }.items():
        values = Objective.of(name="grpo", scale_rewards=scaled).values_of(groups)
        assert values == pytest.approx([a / b for a, b in zip(mean, divisors, strict=True)])


@pytest.mark.parametrize("keys", VARIANTS.values(), ids=VARIANTS)
def test_parts_of_a_batch_add_up_to_its_loss_and_their_means_do_not(answers, logits, keys):
    objective = Objective.of(name="grpo", **keys)
    whole, parts = objective.compute(model(logits), answers), []
    for first, last in ((0, 2), (2, 2 * NUM_PAIRS)):
        mine = (answers["target_sequences"] >= first) & (answers["target_sequences"] < last)
        names = ("targets", "target_positions", "target_sequences", "old_logps", "token_reference_logps")
        part = answers | {name: answers[name][mine] for name in names} | {"values": answers["values"][first:last]}
        part |= {"target_sequences": part["target_sequences"] - first, "num_sequences": last - first}
        parts.append(objective.compute(model(logits), part))
    assert sum(part.count for part in parts) == whole.count
    assert sum(part.loss_sum for part in parts).item() == pytest.approx(whole.loss_sum.item(), rel=1e-5)
    mean = sum(part.loss_sum.item() / part.count for part in parts) / len(parts)
    assert abs(mean - whole.loss_sum.item() / whole.count) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("source", ["answers", "drawn"])
@pytest.mark.parametrize("keys", VARIANTS.values(), ids=VARIANTS)
def test_grpo_is_that_of_trl(request, tmp_path, grid, keys, source):
    """Loss and gradient norm of `GRPOTrainer._compute_loss` on the same answers. TRL has the weights of tokens that
    were drawn otherwise too, but not on the divergence."""
    answers = request.getfixturevalue(source)
    keys = keys | ({"beta": 0.0} if source == "drawn" else {})
    need_trl()
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(6)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    network = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, initializer_range=0.5, **sizes)).eval()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"e": 0, "u": 1}, unk_token="u")), pad_token="e", eos_token="e"
    )
    trainer = GRPOTrainer(
        model=network,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            tmp_path, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", num_generations=2,
            per_device_train_batch_size=2 * NUM_PAIRS, gradient_accumulation_steps=1, **keys | {"beta": 0.0},
        ),
        train_dataset=Dataset.from_list([{"prompt": "u"}] * 8),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.beta = keys.get("beta", 0.0)  # the reference's log-probabilities are given, so it need not load one
    trainer.current_gradient_accumulation_steps = 1
    # Positions 0 to LENGTH - 1 predict `grid`, so the completions are the tokens one place on.
    mask = (grid != -100).int()
    ids = torch.cat([torch.ones(len(grid), 1, dtype=torch.long), grid.clamp(min=0)], 1)
    by_place = {}
    weighted = answers | {
        "sampled_logps": torch.exp(answers["old_logps"] - answers.get("sampled_logps", 0)).clamp(max=3)
    }
    for name in ("old_logps", "token_reference_logps", "sampled_logps"):
        by_place[name] = torch.zeros(grid.shape, dtype=torch.float64)
        by_place[name][mask.bool()] = weighted[name]
    trainer.use_vllm = source == "drawn"
    trainer.vllm_importance_sampling_correction = True
    theirs = trainer._compute_loss(
        network,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones(len(grid), 1, dtype=torch.int),
            "completion_ids": ids[:, 1:],
            "completion_mask": torch.ones_like(mask),
            "tool_mask": mask,
            "advantages": answers["values"],
            "old_per_token_logps": by_place["old_logps"],
            "ref_per_token_logps": by_place["token_reference_logps"],
            "num_items_in_batch": mask.sum(),
            "importance_sampling_ratio": by_place["sampled_logps"],
        },
    )
    theirs.backward()
    expected = torch.nn.utils.get_total_norm([parameter.grad for parameter in network.parameters()]).item()
    network.zero_grad()

    def ours(*, input_ids, targets, target_positions):
        scores = network(input_ids=ids[:, :-1]).logits.flatten(0, 1)[target_positions]
        return torch.nn.functional.cross_entropy(scores, targets, reduction="none")

    outcome = Objective.of(name="grpo", **keys).compute(ours, answers)
    (outcome.loss_sum / outcome.count).backward()
    assert (outcome.loss_sum / outcome.count).item() == pytest.approx(theirs.item(), rel=1e-5)
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in network.parameters()]).item()
    assert norm == pytest.approx(expected, rel=1e-5) and norm > 0.01


# KTO with z0 = 0.


def test_kto_zero_is_equations_7_and_8_of_its_paper_with_z0_at_zero(batch, grid, logits):
    settings = Objective.of(name="kto_zero", beta=0.3, desirable_weight=0.5, undesirable_weight=2.0)
    outcome = settings.compute(model(logits), batch)
    loss, num_right = 0.0, 0
    for row in range(2 * NUM_PAIRS):
        ratio = log_probability(logits[row], grid[row])[0] - batch["reference_logps"][row].item()
        is_good = row % 2 == 0
        weight, sign = (0.5, 1) if is_good else (2.0, -1)
        value = weight / (1 + math.exp(-0.3 * sign * ratio))
        loss += weight - value
        num_right += sign * ratio > 0
    assert outcome.loss_sum.item() == pytest.approx(loss, rel=1e-5)
    assert (outcome.count, outcome.metrics["reward_accuracy"].item()) == (2 * NUM_PAIRS, num_right)


def test_kto_zero_with_the_labels_swapped_is_another_loss(batch, logits):
    settings = Objective.of(name="kto_zero", beta=0.3)
    swapped = batch | {"values": 1 - batch["values"]}
    right, wrong = (settings.compute(model(logits), each).loss_sum for each in (batch, swapped))
    assert abs(right - wrong).item() > 0.01
