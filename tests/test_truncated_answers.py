"""Protects `mask_truncated_completions`: an answer that was cut off while sampling carries no loss.

It counts in its group, as in TRL. pytest tests/test_truncated_answers.py; with -m slow it compares with TRL, and trains
under other strategies.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from test_equivalence import SGD_LOSS, SGD_NORM
from test_objectives import VARIANTS

from cookbook.config.objectives import Objective
from cookbook.config.sections import Source
from cookbook.system.files import RecipeError
from cookbook.training.data.batches import collate
from cookbook.training.data.rows import read_rows
from tests.curves import Lab, distance, processes_of
from tests.needs import need_trl
from tests.small_data import make_tokenizer, run_tokenize
from tests.turns import others_by_turn

PAD, END, OTHER_END = 0, 2, 3
"""The padding and the end token of `make_tokenizer`, and a token that a model's folder has as an end besides."""
MASKED = {"name": "grpo", "mask_truncated_completions": True}
GROUP = {
    "prompt_ids": [5, 6],
    "completion_ids": [[7, END], [7, 8, 9], [7, 8, PAD], [9, OTHER_END]],
    "rewards": [1.0, 0.0, 0.5, 2.0],
}


def written(folder: Path, *rows: dict) -> Source:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(path=str(path))


def tokens_of(folder: Path, row: dict, tokenizer=None, **keys):
    """The tokens of one row, and those of it without its cut answers masked."""
    objectives = [Objective.of(**MASKED | keys | {"mask_truncated_completions": is_on}) for is_on in (True, False)]
    tokenizer = tokenizer or make_tokenizer()
    return [
        run_tokenize(read_rows(written(folder, row), "error", objective), tokenizer, **objective.model_dump())[0]
        for objective in objectives
    ]


def test_an_answer_without_an_end_token_carries_no_loss_and_counts_in_its_group(tmp_path):
    """The third ends in padding, which TRL counts as an end; the fourth in a token that no file names as one."""
    logprobs = [[-1.0] * 2, [-2.0] * 3, [-3.0] * 3, [-4.0] * 2]
    masked, plain = tokens_of(tmp_path, GROUP | {"logprobs": logprobs})
    assert masked.num_targets.tolist() == [2, 0, 3, 0] and plain.num_targets.tolist() == [2, 3, 3, 2]
    assert masked.old_logps.tolist() == [-1.0] * 2 + [-3.0] * 3
    assert masked.ids.tolist() == plain.ids.tolist() and masked.values.tolist() == plain.values.tolist()
    assert [remark.num_rows for remark in masked.remarks if "cut off" in remark.words] == [1]
    assert not any("cut off" in remark.words for remark in plain.remarks)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_the_end_tokens_of_the_models_folder_end_an_answer_too(tmp_path, name):
    tokenizer = make_tokenizer()
    (tmp_path / name).write_text(json.dumps({"eos_token_id": [END, OTHER_END], "model_type": "llama"}))
    tokenizer.name_or_path = str(tmp_path)
    masked, _ = tokens_of(tmp_path, GROUP, tokenizer)
    assert masked.num_targets.tolist() == [2, 0, 3, 2]


def test_what_a_row_says_of_its_answers_is_taken_as_it_is(tmp_path):
    """Who sampled knows: one that a stop string ended has no end token, and one of the greatest length may."""
    masked, _ = tokens_of(tmp_path, GROUP | {"ended": [False, True, True, False]})
    assert masked.num_targets.tolist() == [0, 3, 3, 0]


def test_a_conversation_without_room_for_its_next_turn_was_cut_off(tmp_path):
    """Its last tokens are the environment's, though each turn of the policy has ended."""
    mask = [[1, 1], [1, 1, 0], [1, 1, 1], [1, 1]]
    masked, plain = tokens_of(tmp_path, GROUP | {"completion_mask": mask, "ended": [True] * 4})
    assert masked.num_targets.tolist() == [2, 0, 3, 2] and plain.num_targets.tolist() == [2, 2, 3, 2]


TEXTS = {"prompt": "q", "completions": ["yes", "no"], "rewards": [1, 0]}


def test_texts_say_which_were_cut_off_or_are_refused(tmp_path):
    """A text that was cut off has one log-probability less than it has tokens here, with the end that it never had."""
    logprobs = [[-1.0] * 4, [-1.0] * 2]
    masked, _ = tokens_of(tmp_path, TEXTS | {"ended": [True, True]})
    assert masked.num_targets.tolist() == [4, 3]
    row = TEXTS | {"ended": [True, False], "logprobs": logprobs}
    rows = read_rows(written(tmp_path, row), "error", Objective.of(**MASKED))
    masked, _ = run_tokenize(rows, make_tokenizer(), **MASKED)
    assert masked.num_targets.tolist() == [4, 0] and len(masked.old_logps) == 4
    with pytest.raises(RecipeError, match=r"rows\.jsonl:1: no word of which answers were cut off: .*`ended`"):
        read_rows(written(tmp_path, TEXTS), "error", Objective.of(**MASKED))


@pytest.mark.parametrize("ended", [[True], [1, 0, 1, 0], "yes"])
def test_another_ended_is_a_bad_row(tmp_path, ended):
    with pytest.raises(RecipeError, match=r"rows\.jsonl:1: not true or false for each answer: `ended`"):
        read_rows(written(tmp_path, GROUP | {"ended": ended}), "error", Objective.of(**MASKED))


@pytest.mark.parametrize("keys", VARIANTS.values(), ids=VARIANTS)
def test_a_step_without_a_whole_answer_has_no_gradient_and_no_nan(tmp_path, keys):
    row = GROUP | {"ended": [False] * 4, "reference_logprobs": [[-1.0] * len(ids) for ids in GROUP["completion_ids"]]}
    keys = keys | {"beta": 0.1}
    tokens, _ = tokens_of(tmp_path, row | {"logprobs": row["reference_logprobs"]}, **keys)
    weight = torch.ones(1, requires_grad=True)
    batch = collate(tokens, range(4), PAD)
    outcome = Objective.of(**MASKED | keys).compute(lambda targets, **_: weight.expand(len(targets)), batch)
    outcome.loss_sum.backward()
    assert (outcome.loss_sum.item(), weight.grad.item()) == (0, 0)
    answers = 0 if Objective.of(**MASKED | keys).mean_over == "tokens" else 4
    assert outcome.count == answers and outcome.metrics["ratio"] == answers and outcome.metrics["kl"] == 0


def sampled_groups(chance: random.Random, count: int, share_cut: float) -> list[dict]:
    """Groups of three answers of ragged lengths, some without an end token."""
    rows = []
    for _ in range(count):
        answers = [[chance.randrange(4, 200) for _ in range(chance.randint(2, 12))] for _ in range(3)]
        answers = [ids if chance.random() < share_cut else [*ids, chance.choice((END, PAD))] for ids in answers]
        prompt = [chance.randrange(4, 200) for _ in range(chance.randint(1, 6))]
        rewards = [chance.random() for _ in answers]
        rows.append({"prompt_ids": prompt, "completion_ids": answers, "rewards": rewards})
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("keys", VARIANTS.values(), ids=VARIANTS)
def test_loss_and_gradient_are_those_of_trl_on_the_same_samples(tmp_path, keys):
    """TRL is given the sampled tokens and rewards, and finds itself which were cut off, what their advantages are, and
    what the sum is divided by. Not masked, it is another loss."""
    need_trl()
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(6)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=300, initializer_range=0.5, eos_token_id=[END, OTHER_END], **sizes)
    network, before, reference = (LlamaForCausalLM(config).eval() for _ in range(3))
    with torch.no_grad():  # near one another, so that not every ratio is clipped
        for other, shift in ((before, 0.02), (reference, 0.05)):
            for parameter, own in zip(other.parameters(), network.parameters(), strict=True):
                parameter.copy_(own + shift * torch.randn_like(own))
    rows = sampled_groups(random.Random(5), 4, 0.4)
    prompts = [row["prompt_ids"] for row in rows for _ in row["rewards"]]
    answers = [ids for row in rows for ids in row["completion_ids"]]
    for row in rows:
        for name, other in (("logprobs", before), ("reference_logprobs", reference)):
            row[name] = [logps(other, row["prompt_ids"], ids).tolist() for ids in row["completion_ids"]]
    if not keys.get("beta"):
        rows = [{key: value for key, value in row.items() if key != "reference_logprobs"} for row in rows]

    constant = {"max_completion_length": 16} | {key: keys[key] for key in keys if key == "max_completion_length"}
    trainer = GRPOTrainer(
        model=network,
        reward_funcs=lambda completions, **_: [reward for row in rows for reward in row["rewards"]],
        args=GRPOConfig(
            tmp_path, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", num_generations=3,
            per_device_train_batch_size=len(answers), gradient_accumulation_steps=1, mask_truncated_completions=True,
            disable_dropout=True, **keys | constant | {"beta": 0.0},
        ),
        train_dataset=Dataset.from_list([{"prompt": "u"}] * 8),
        processing_class=make_tokenizer(),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    given = {"prompt_ids": prompts, "completion_ids": answers, "logprobs": None}
    trainer.rollout_func = lambda *_: dict(given)
    network.train()
    inputs = trainer._generate_and_score_completions([{"prompt": "u"}] * len(answers))
    trainer.beta = keys.get("beta", 0.0)  # now, as it would ask a reference that it had loaded by its name
    width = inputs["completion_ids"].shape[1]
    for name, other in (("old_per_token_logps", before), ("ref_per_token_logps", reference)):
        by_answer = [logps(other, prompt, ids) for prompt, ids in zip(prompts, answers, strict=True)]
        inputs[name] = torch.stack([torch.cat([row, row.new_zeros(width - len(row))]) for row in by_answer])
    theirs = trainer._compute_loss(network, inputs)
    theirs.backward()
    expected = [parameter.grad.clone() for parameter in network.parameters()]

    outcomes = {}
    for is_masked in (True, False):
        network.zero_grad()
        objective = Objective.of(**MASKED | keys | {"mask_truncated_completions": is_masked})
        tokenizer = make_tokenizer()
        network.save_pretrained(tmp_path / "model")
        tokenizer.name_or_path = str(tmp_path / "model")
        read = read_rows(written(tmp_path, *rows), "error", objective)
        tokens, _ = run_tokenize(read, tokenizer, **objective.model_dump())

        def ours(*, input_ids, targets, target_positions):
            logits = network(input_ids=input_ids).logits.flatten(0, 1)[target_positions]
            return torch.nn.functional.cross_entropy(logits, targets, reduction="none")

        outcome = objective.compute(ours, collate(tokens, range(len(answers)), PAD))
        count = int(tokens.num_targets.sum()) if objective.mean_over == "tokens" else len(tokens)
        (outcome.loss_sum / count).backward()
        gradients = [parameter.grad.clone() for parameter in network.parameters()]
        outcomes[is_masked] = outcome.loss_sum.item() / count, gradients, (tokens.num_targets == 0).sum()
    loss, gradients, num_masked = outcomes[True]
    assert 2 < num_masked < len(answers) - 2
    assert loss == pytest.approx(theirs.item(), rel=1e-5)
    worst = max(float((a - b).abs().max()) for a, b in zip(gradients, expected, strict=True))
    largest = max(float(gradient.abs().max()) for gradient in expected)
    assert worst < 1e-5 * largest, (worst, largest)
    wrong = max(float((a - b).abs().max()) for a, b in zip(outcomes[False][1], expected, strict=True))
    assert wrong > 0.01 * largest, wrong


def logps(network, prompt: list[int], ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def settings(lab: Lab, *, share_cut: float = 0.4, **keys) -> dict[str, str]:
    path = lab.folder / f"sampled_{share_cut}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in sampled_groups(random.Random(8), 18, share_cut)))
    return {
        "objective": json.dumps(MASKED | keys),
        "data.train": str(path),
        "data.eval": f"{{path: {path}, max_rows: 3}}",
        "batch": "{global_batch_size: 16, micro_batch_size: 4}",
        "optim.learning_rate": "0.05",
    }


@pytest.mark.slow
@pytest.mark.parametrize("strategy", others_by_turn(["ddp", "ddp_sp", "fsdp2", "pp", "tp", "zero3"], ["ddp", "ddp_sp"]))
@pytest.mark.parametrize("keys", [{"beta": 0.3}, {"loss_type": "grpo", "epsilon": 0.1}], ids=["dapo", "grpo"])
def test_the_curve_is_that_of_one_process_where_answers_are_masked(lab: Lab, strategy: str, keys: dict):
    reference = lab.run("single", settings(lab, **keys))
    curve = lab.run(strategy, settings(lab, **keys), processes=processes_of(strategy))
    off = distance(curve, reference)
    assert off.loss < SGD_LOSS and off.norm < SGD_NORM, off
    assert [step["masked"] for step in curve.steps] == [step["masked"] for step in reference.steps]
    assert 0.2 < sum(step["masked"] for step in curve.steps) / len(curve.steps) < 0.6
    assert curve.steps[0]["ratio"] == pytest.approx(1, abs=1e-6)
    if strategy == "ddp":
        unmasked = lab.run("single", settings(lab, **keys, mask_truncated_completions=False))
        assert "masked" not in unmasked.steps[0]
        apart = [abs(a - b) for a, b in zip(unmasked.losses, reference.losses, strict=True)]
        assert max(apart) > 100 * SGD_LOSS


@pytest.mark.core
def test_steps_without_a_whole_answer_are_said_and_leave_the_weights(lab: Lab):
    still = settings(lab, share_cut=1.0) | {"optim.weight_decay": "0", "run.max_steps": "2"}
    curve = lab.run("ddp", still, processes=2)
    assert [(step["loss"], step["grad_norm"], step["masked"]) for step in curve.steps] == [(0, 0, 1)] * 2
    assert [(loss, count) for _, loss, count in curve.evaluations] == [(0, 0)] * len(curve.evaluations)
    output = (curve.folder / "output.txt").read_text()
    assert "step 2: all its answers were cut off, and none carries loss" in output
