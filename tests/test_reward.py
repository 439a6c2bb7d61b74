"""A head for sequences: drawn once, trained, exported for transformers and peft, and with TRL's loss.

python -m pytest -q tests/test_reward.py
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from small_data import make_tokenizer, rows_of, run_tokenize
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cookbook.commands.cli import main
from cookbook.config.objectives import Objective
from cookbook.facts.score_head import ScoreHead
from cookbook.training.data.batches import collate
from cookbook.training.data.tokens import _at_the_end, join
from cookbook.training.models.first_head import scored_folder
from tests.curves import Curve, Lab
from tests.needs import need_trl
from tests.test_equivalence_features import LORA, preferences
from tests.test_resume import leg

CENTER = 0.1
EXPORTED = {"run.check_export": "true"}


def pairs_of(lab: Lab, count: int) -> list[dict]:
    lines = (lab.folder / "pairs.jsonl").read_text().splitlines()[:count]
    return [json.loads(line) for line in lines]


def scores_by_transformers(model, tokenizer, rows: list[dict], which: str) -> torch.Tensor:
    """Scores of whole chats in one padded batch, (rows,)."""
    texts = [tokenizer.apply_chat_template(row["prompt"] + row[which], tokenize=False) for row in rows]
    encoded = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt", padding_side="right")
    with torch.no_grad():
        return model.eval()(input_ids=encoded.input_ids, attention_mask=encoded.attention_mask).logits[:, 0].double()


def loss_and_accuracy(model, tokenizer, rows: list[dict]) -> tuple[float, float]:
    chosen, rejected = (scores_by_transformers(model, tokenizer, rows, which) for which in ("chosen", "rejected"))
    losses = torch.log1p(torch.exp(rejected - chosen)) + CENTER * (chosen + rejected) ** 2
    return losses.mean().item(), (chosen > rejected).double().mean().item()


@pytest.mark.parametrize(("too_long", "count"), [(None, 1), ("cut", 2)])
def test_a_pair_with_a_long_answer_is_left_out_unless_the_recipe_cuts_it(too_long: str | None, count: int):
    rows = rows_of("preference", [{"prompt": "q", "chosen": "y", "rejected": "n" * size} for size in (1, 30)])
    tokens, _ = run_tokenize(rows, make_tokenizer(), max_length=16, too_long=too_long, name="reward")
    assert len(tokens.lengths) == 2 * count and tokens.row_lengths.max() > 30


def test_a_head_is_drawn_from_the_seed_as_wide_as_transformers_draws_one(tmp_path: Path):
    sizes = {"hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, initializer_range=0.05, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    config.num_labels = 60
    theirs = AutoModelForSequenceClassification.from_config(config).score.weight

    def drawn(seed: int) -> torch.Tensor:
        head = ScoreHead(60, pad_token_id=0)
        folder = scored_folder(str(tmp_path / "base"), head, seed=seed, cache=tmp_path / "cache")
        return AutoModelForSequenceClassification.from_pretrained(folder).score.weight

    assert torch.equal(drawn(1), drawn(1)) and (drawn(1) - drawn(2)).abs().max() > 0.05
    assert drawn(1).std().item() == pytest.approx(theirs.std().item(), rel=0.05)


def last_evaluation(folder: Path) -> dict:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "eval_loss" in line][-1]


@pytest.fixture
def run(lab: Lab) -> Path:
    return lab.run("single", preferences(lab, "reward")).folder


@pytest.mark.slow
def test_an_export_gives_transformers_the_scores_of_the_run(lab: Lab, run: Path, capsys: pytest.CaptureFixture[str]):
    export = run / "export"
    model = AutoModelForSequenceClassification.from_pretrained(export)
    tokenizer, expected, rows = AutoTokenizer.from_pretrained(export), last_evaluation(run), pairs_of(lab, 9)
    assert type(model).__name__ == "LlamaForSequenceClassification" and model.config.num_labels == 1
    loss, accuracy = loss_and_accuracy(model, tokenizer, rows)
    assert loss == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert accuracy == pytest.approx(expected["eval_reward_accuracy"])
    assert not (export / "generation_config.json").exists()
    # The control: scores at another token are others.
    for row in rows:
        row["chosen"] = [{"role": "assistant", "content": row["chosen"][0]["content"] + " a"}]
    assert loss_and_accuracy(model, tokenizer, rows)[0] != pytest.approx(loss, rel=1e-4)
    capsys.readouterr()
    assert main(["evaluate", str(export)]) == 0
    assert f"{loss:.4f}"[:6] in capsys.readouterr().out
    assert main(["chat", str(export), "--prompt", "x"]) == 2
    assert "its head scores texts and writes none" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reward_model_goes_on_with_its_head_and_writes_no_text(
    lab: Lab, run: Path, capsys: pytest.CaptureFixture[str]
):
    onward = {"model": json.dumps({"name_or_path": str(run / "export")}), "run.max_steps": "1"}
    curve = lab.run("single", preferences(lab, "reward") | onward)
    assert curve.evaluations[0][1] == pytest.approx(last_evaluation(run)["eval_loss"], rel=1e-6)
    _, said = lab.attempt("single", onward)
    assert "objective.name is sft, which predicts tokens" in said
    words = ["check", str(lab.folder / "recipe.yaml"), "--set", "objective={name: reward}"]
    assert main([*words, "--set", "run.sample_every_steps=5"]) == 2
    assert "reward trains a head that writes no text" in capsys.readouterr().err


@pytest.mark.slow
def test_an_adapter_and_its_head_are_opened_by_peft_and_merged(lab: Lab, capsys: pytest.CaptureFixture[str]):
    from peft import PeftModel

    settings = preferences(lab, "reward") | LORA | EXPORTED | {"optim.learning_rate": "0.05"}
    curve = lab.run("single", settings)
    export, expected, rows = curve.folder / "export", last_evaluation(curve.folder), pairs_of(lab, 9)
    written = json.loads((export / "adapter_config.json").read_text())
    assert (written["task_type"], written["modules_to_save"]) == ("SEQ_CLS", ["score"])
    tokenizer = AutoTokenizer.from_pretrained(export)
    base = AutoModelForSequenceClassification.from_pretrained(
        written["base_model_name_or_path"], num_labels=1, pad_token_id=tokenizer.pad_token_id
    )
    loss, accuracy = loss_and_accuracy(PeftModel.from_pretrained(base, str(export)), tokenizer, rows)
    assert loss == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert accuracy == pytest.approx(expected["eval_reward_accuracy"])
    assert main(["export", str(curve.folder), "--merged"]) == 0, capsys.readouterr().err
    merged = AutoModelForSequenceClassification.from_pretrained(export.parent / "merged")
    assert loss_and_accuracy(merged, tokenizer, rows)[0] == pytest.approx(loss, rel=1e-4)
    assert lab.run("zero3", settings, processes=2).losses == pytest.approx(curve.losses, rel=2e-6)


@pytest.mark.slow
def test_a_stopped_run_goes_on_under_another_strategy_with_its_head(lab: Lab, run: Path, tmp_path: Path):
    settings = preferences(lab, "reward") | {"batch.micro_batch_size": "2"}
    leg(lab, tmp_path / "run", "zero3:2", settings, num_steps=8)
    leg(lab, tmp_path / "run", "fsdp2:2", settings, num_steps=None)
    assert Curve(tmp_path / "run").losses == pytest.approx(Curve(run).losses, rel=2e-6)


@pytest.mark.slow
def test_the_first_loss_is_that_of_trl_on_the_same_rows(lab: Lab, tmp_path: Path):
    need_trl()
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    settings = preferences(lab, "reward") | {"optim.learning_rate": "1e-30", "run.max_steps": "1"}
    still = lab.run("single", settings)
    export = still.folder / "export"
    rows = Dataset.from_list(pairs_of(lab, 9))
    arguments = RewardConfig(
        tmp_path, use_cpu=True, bf16=False, report_to="none", per_device_eval_batch_size=9, max_length=96,
        center_rewards_coefficient=CENTER,
    )  # fmt: skip
    trainer = RewardTrainer(
        AutoModelForSequenceClassification.from_pretrained(export),
        arguments,
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(export),
    )
    measured, ours = trainer.evaluate(), still.evaluations[0][1]
    assert measured["eval_loss"] == pytest.approx(ours, rel=1e-5) and not math.isclose(ours, math.log(2), rel_tol=1e-3)


def test_a_sequence_is_scored_at_its_last_token_that_is_no_padding():
    ids = [np.array(numbers, dtype=np.int32) for numbers in ([5, 6, 7, 9, 9], [5, 6], [9, 9])]  # 9 pads, and ends texts
    tokens = join([(answer, _at_the_end(answer, 9)) for answer in ids], are_scored=True)
    assert tokens.num_targets.tolist() == [1, 1, 1]
    padded, packed = (collate(tokens, [0, 1, 2], 9, packing=packing) for packing in (False, True))
    assert padded["target_positions"].tolist() == [2, 5 + 1, 10] and packed["target_positions"].tolist() == [2, 6, 7]
    for batch in (padded, packed):
        assert batch["input_ids"].flatten()[batch["target_positions"]].tolist() == [7, 6, 9]
        assert batch["target_sequences"].tolist() == [0, 1, 2]


def test_a_reward_is_the_equation_of_bradley_and_terry():
    scores = torch.tensor([[0.3], [-1.2], [0.1], [0.7]])
    batch = {"num_sequences": 4, "target_sequences": torch.arange(4), "input_ids": None}
    outcome = Objective.of(name="reward", center_rewards_coefficient=CENTER).compute(lambda **_: scores, batch)
    expected = math.log(1 + math.exp(-1.5)) + math.log(1 + math.exp(0.6)) + CENTER * (0.9**2 + 0.8**2)
    assert outcome.loss_sum.item() == pytest.approx(expected, rel=1e-6) and outcome.count == 2
    assert outcome.metrics["reward_accuracy"] == 1 and outcome.metrics["reward_margin"].item() == pytest.approx(0.9)
