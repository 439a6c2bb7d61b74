"""The curve is the right one: runs of one process against a plain loop that shares no code with this project.

python -m pytest -q tests/test_oracle.py
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.curves import Lab
from tests.oracle import IGNORED, SCORED, Setup, answer_of, train

LOSS, NORM, RATE, WEIGHT = 1e-6, 2e-5, 1e-7, 5e-3
"""Relative; that of weights to the peak rate. A run computes in float32, the loop in float64."""
NUM_ROWS, GROUP = 8, 3
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "engineers", "count", "every", "token"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def words(chance: random.Random, least: int, most: int) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(least, most)))


def group_of(tokenizer: Any, chance: random.Random, *, with_logprobs: bool) -> dict[str, Any]:
    """A prompt and three answers of unequal lengths."""
    asked = [{"role": "user", "content": words(chance, 2, 12)}]
    ends = [[{"role": "assistant", "content": words(chance, 1, 20)}] for _ in range(GROUP)]
    row: dict[str, Any] = {"prompt": asked, "completions": ends, "rewards": [chance.random() for _ in ends]}
    if with_logprobs:
        counts = [int((answer_of(asked + end, tokenizer, "last").labels != IGNORED).sum()) for end in ends]
        row["logprobs"] = [[-chance.uniform(5, 8) for _ in range(count)] for count in counts]
    return row


def conversations_of(chance: random.Random) -> dict[str, Any]:
    """A prompt and three conversations of token ids, in which every second stretch is not the policy's."""
    row: dict[str, Any] = {"prompt_ids": chance.choices(range(400), k=5), "rewards": [1.0, 0.0, chance.random()]}
    lengths = [[chance.randint(1, 9) for _ in range(turns)] for turns in (1, 3, 4)]
    row["completion_mask"] = [[1 - k % 2 for k, length in enumerate(parts) for _ in range(length)] for parts in lengths]
    return row | {"completion_ids": [chance.choices(range(400), k=sum(parts)) for parts in lengths]}


def row_of(kind: str, chance: random.Random) -> dict[str, Any]:
    asked = [{"role": "user", "content": words(chance, 2, 12)}]
    answers = [[{"role": "assistant", "content": words(chance, 1, 20)}] for _ in range(3)]
    if kind == "cpt":
        return {"text": words(chance, 5, 60)}
    if kind == "dpo":
        return {"chosen": asked + answers[0], "rejected": asked + answers[1]}
    if kind == "classify":
        return {"text": words(chance, 3, 40), "label": chance.choice(["bad", "fair", "good"])}
    if kind == "regress":
        return {"messages": asked, "label": chance.uniform(-1, 1)}
    if kind == "kto":
        return {"prompt": asked, "completion": answers[0], "label": chance.random() < 0.5}
    return {"messages": asked + answers[0] + [{"role": "user", "content": "and then"}] + answers[1]}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and rows of each kind, made without a word of the project."""
    folder, chance = tmp_path_factory.mktemp("oracle"), random.Random(3)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [" ".join(WORDS)], trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name in ("tied", "untied"):
        torch.manual_seed(5)
        config = LlamaConfig(
            vocab_size=400, num_key_value_heads=2, tie_word_embeddings=name == "tied", initializer_range=0.1, **sizes
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    for kind in ("sft", "cpt", "dpo", "kto", "classify", "regress"):
        lines = [json.dumps(row_of(kind, chance)) for _ in range(NUM_ROWS)]
        (folder / f"{kind}.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("grpo", "grpo_logprobs"):
        groups = (group_of(fast, chance, with_logprobs=name != "grpo") for _ in range(NUM_ROWS))
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in groups))
    talks = "".join(f"{json.dumps(conversations_of(chance))}\n" for _ in range(NUM_ROWS))
    (folder / "grpo_turns.jsonl").write_text(talks)
    return folder


CASES: dict[str, dict[str, Any]] = {
    "sft, tied, clipped, warm-up, decay": {"times": 2, "warmup": 4, "weight_decay": 0.1, "clip": 0.5, "least": 1e-4},
    "sft, last turn, untied": {"train_on": "last", "model": "untied", "schedule": "linear", "least": 2e-4},
    "sft, all tokens, packed": {"train_on": "all", "schedule": "constant", "packing": True},
    "sft, sgd": {"optimizer": "sgd", "peak": 0.1, "schedule": "wsd", "decay_steps": 6, "least": 0.03, "clip": 0.3},
    "cpt, packed": {"objective": "cpt", "schedule": "inverse_sqrt", "warmup": 3, "packing": True, "model": "untied"},
    "sft, smoothed": {"optimizer": "sgd", "peak": 0.1, "label_smoothing": 0.2, "clip": 0.3},
    "cpt, smoothed, packed, untied": {
        "objective": "cpt",
        "label_smoothing": 0.1,
        "packing": True,
        "model": "untied",
    },
    "dpo": {"objective": "dpo", "peak": 1e-4, "clip": 0.5},
    "dpo, smoothed, packed": {
        "objective": "dpo",
        "optimizer": "sgd",
        "peak": 0.01,
        "label_smoothing": 0.1,
        "packing": True,
    },
    "ipo": {"objective": "ipo", "peak": 1e-4, "beta": 0.2},
    "orpo": {"objective": "orpo", "peak": 1e-4, "beta": 0.3, "weight_decay": 0.01},
    "cpo": {"objective": "cpo", "optimizer": "sgd", "peak": 0.01, "beta": 0.2, "nll_weight": 1.0},
    "simpo, packed": {"objective": "simpo", "optimizer": "sgd", "peak": 0.01, "margin": 0.7, "packing": True},
    "kto": {"objective": "kto", "peak": 1e-4, "model": "untied"},
    "grpo, a divergence": {
        "objective": "grpo",
        "optimizer": "sgd",
        "peak": 0.05,
        "beta": 0.4,
        "deviation": "batch",
        "model": "untied",
    },
    "grpo, of answers, sampled before, packed": {
        "objective": "grpo",
        "optimizer": "sgd",
        "peak": 0.05,
        "mean": "answers",
        "beta": 0.0,
        "high": 0.28,
        "logprobs": True,
        "packing": True,
    },
    "grpo, of a constant, whole ratios": {
        "objective": "grpo",
        "beta": 0.2,
        "corrected": False,
        "optimizer": "sgd",
        "peak": 0.05,
        "mean": "64",
        "deviation": "none",
        "whole": True,
        "low": 1e-3,
        "high": 2e-3,
    },
    "grpo, conversations of tokens, a divergence, packed": {
        "objective": "grpo",
        "optimizer": "sgd",
        "peak": 0.05,
        "beta": 0.2,
        "turns": True,
        "packing": True,
    },
    "distill, few tokens and the rest": {
        "objective": "distill",
        "optimizer": "sgd",
        "peak": 0.05,
        "beta": 0.3,
        "kept": 7,
        "temperature": 2.0,
        "share": 0.6,
    },
    "distill, reverse, of the vocabulary, packed": {
        "objective": "distill",
        "optimizer": "sgd",
        "peak": 0.05,
        "beta": 1.0,
        "kept": 400,
        "share": 1.0,
        "clip": 0.5,
        "packing": True,
    },
    "reward": {"objective": "reward", "optimizer": "sgd", "peak": 0.01, "clip": 0.5, "weight_decay": 0.1},
    "reward, centred, packed, untied": {
        "objective": "reward",
        "optimizer": "sgd",
        "peak": 1e-3,
        "clip": 0.5,
        "center": 0.3,
        "packing": True,
        "model": "untied",
    },
    "classify, packed": {"objective": "classify", "optimizer": "sgd", "peak": 0.01, "clip": 0.5, "packing": True},
    "regress, of chats without an answer": {"objective": "regress", "optimizer": "sgd", "peak": 2e-4, "clip": 0.5},
    "sft, lora": {"adapter": True, "peak": 5e-3, "clip": 0.5, "weight_decay": 0.1},
    "sft, lora, dropout, packed": {"adapter": True, "peak": 5e-3, "clip": 0.5, "dropout": 0.1, "packing": True},
    "sft, noise": {"optimizer": "sgd", "peak": 0.1, "noise": 10.0, "clip": 0.5},
}
OF_RECIPE = {"kto": "kto_zero", "ipo": "dpo"}


def setup_of(shelf: Path, case: dict[str, Any]) -> Setup:
    beside = ("packing", "model", "adapter", "times", "logprobs", "turns")
    given = {key: value for key, value in case.items() if key not in beside}
    kind = given.get("objective", "sft")
    kind = next((f"grpo_{word}" for word in ("logprobs", "turns") if word in case), kind)
    of = {"distill": "sft", **dict.fromkeys(("ipo", "orpo", "cpo", "simpo", "reward"), "dpo")}
    rows = shelf / f"{of.get(kind, kind)}.jsonl"
    given |= {"teacher": shelf / "untied"} if kind == "distill" else {}
    return Setup(model=shelf / case.get("model", "tied"), rows=rows, **given)


def grpo_keys(setup: Setup) -> dict[str, Any]:
    constant = {"loss_type": "dr_grpo", "max_completion_length": int(setup.mean)} if setup.mean.isdigit() else {}
    return {
        **{"tokens": {"loss_type": "dapo"}, "answers": {"loss_type": "grpo"}}.get(setup.mean, constant),
        "scale_rewards": setup.deviation,
        "epsilon": setup.low,
        "epsilon_high": setup.high,
        "use_bias_correction_kl": setup.corrected,
        "importance_sampling_level": "sequence" if setup.whole else "token",
    }


def settings_of(setup: Setup, case: dict[str, Any]) -> dict[str, str]:
    times = case.get("times", 1)  # the batch is as many times that of the learning rate
    objective: dict[str, Any] = {"name": OF_RECIPE.get(setup.objective, setup.objective)}
    if setup.objective == "sft":
        objective["train_on"] = setup.train_on
    elif setup.objective == "reward":
        objective["center_rewards_coefficient"] = setup.center
    elif setup.objective == "classify":
        objective["classes"] = list(setup.classes)
    elif setup.objective not in ("cpt", "regress"):
        objective["beta"] = setup.beta
    objective |= {"loss": "ipo"} if setup.objective == "ipo" else {}
    objective |= {"gamma": setup.margin} if setup.objective == "simpo" else {}
    objective |= {"nll_weight": setup.nll_weight} if setup.objective == "cpo" else {}
    if setup.objective == "distill":
        objective |= {"teacher": str(setup.teacher), "loss_top_k": setup.kept, "temperature": setup.temperature}
        objective |= {"kd_ratio": setup.share}
    objective |= grpo_keys(setup) if setup.objective == "grpo" else {}
    objective |= {"label_smoothing": setup.label_smoothing} if setup.label_smoothing else {}
    optim = {"name": setup.optimizer, "learning_rate": setup.peak / times, "weight_decay": setup.weight_decay}
    optim |= {"momentum": 0.0} if setup.optimizer == "sgd" else {}
    schedule: dict[str, Any] = {"name": setup.schedule, "warmup_steps": setup.warmup}
    schedule |= {"decay_steps": setup.decay_steps} if setup.schedule == "wsd" else {}
    schedule |= {"scale_lr": "linear", "base_batch_size": NUM_ROWS // times} if times > 1 else {}
    schedule |= {"min_learning_rate": setup.least} if setup.least else {}
    sections: dict[str, Any] = {
        "model": {"name_or_path": str(setup.model), "neftune_alpha": setup.noise},
        "data": {"train": str(setup.rows), "max_length": 512, "packing": case.get("packing", False)},
        "objective": objective,
        "optim": optim | {"max_grad_norm": setup.clip},
        "schedule": schedule,
        "batch": {"global_batch_size": NUM_ROWS * GROUP, "micro_batch_size": 4}  # of groups, some cut by a micro-batch
        if setup.objective == "grpo"
        else {"global_batch_size": NUM_ROWS, "micro_batch_size": 2},
    }
    if "adapter" in case:
        sections["adapter"] = {"name": "lora", "rank": 4, "alpha": 8, "dropout": setup.dropout}
    return {name: json.dumps(section) for name, section in sections.items()} | {
        "run.max_steps": str(setup.steps),
        "seed": str(setup.seed),
    }


CORE = (
    "sft, tied, clipped, warm-up, decay",
    "sft, lora, dropout, packed",
    "sft, noise",
    "dpo, smoothed, packed",
    "grpo, of a constant, whole ratios",
)
"""Run by `make test`: the only runs there whose every step is compared with what is not ours."""


def with_first_head(setup: Setup, first: Path) -> Setup:
    """Setup from the weights with which a head was drawn, beside which all others are those of the model."""
    before, after = (load_file(folder / "model.safetensors") for folder in (setup.model, first))
    score = after.pop("score.weight")
    assert score.shape == (len(setup.classes) if setup.objective == "classify" else 1, 48)
    assert 0.07 < score.std() < 0.13  # initializer_range is 0.1
    before.pop("lm_head.weight", None)
    assert before.keys() == after.keys() and all(before[key].equal(after[key]) for key in before)
    return replace(setup, model=first)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.core] * (name in CORE)) for name in CASES])
def test_a_run_is_the_plain_loop(name: str, lab: Lab, shelf: Path):
    case = CASES[name]
    setup = setup_of(shelf, case)
    settings = settings_of(setup, case)
    curve = lab.run("single", settings)
    if "adapter" in case or setup.objective in SCORED:  # a step too small to move a weight leaves the first ones
        still = {"optim": json.dumps({"name": "sgd", "learning_rate": 1e-30}), "run.max_steps": "1"}
        first = lab.run("single", settings | still).folder / "export"
        setup = replace(setup, adapter=first) if "adapter" in case else with_first_head(setup, first)
    steps, weights = train(setup)
    for ours, theirs in zip(curve.steps, steps, strict=True):
        for key, limit in (("loss", LOSS), ("grad_norm", NORM), ("learning_rate", RATE)):
            # Advantages of a group add up to 0, and so may the loss. That of a score is computed from a difference of
            # numbers near 1, which rounds alike however small it is.
            small = LOSS if setup.objective in ("grpo", *SCORED) else None
            assert ours[key] == pytest.approx(theirs[key], rel=limit, abs=small), (ours["step"], key)
    exported = load_file(curve.folder / "export" / f"{'adapter_' if 'adapter' in case else ''}model.safetensors")
    worst = 0.0
    for key, weight in weights.items():
        worst = max(worst, float((exported[key.replace(".default", "")].double() - weight).abs().max()))
    assert len(exported) == len(weights) and worst < WEIGHT * setup.peak, worst


@pytest.mark.parametrize(
    "wrong",
    [{"weight_decay": 0.0}, {"clip": 0.0}, {"warmup": 3}, {"least": 0.0}, {"train_on": "last"}, {"optimizer": "sgd"}],
)
def test_another_training_is_not_it(wrong: dict[str, Any], lab: Lab, shelf: Path):
    case = CASES[CORE[0]]
    setup = setup_of(shelf, case)
    curve = lab.run("single", settings_of(setup, case))
    steps, _ = train(replace(setup, **wrong))
    assert any(
        abs(ours[key] - theirs[key]) > 10 * limit * theirs[key]
        for ours, theirs in zip(curve.steps, steps, strict=True)
        for key, limit in (("loss", LOSS), ("grad_norm", NORM), ("learning_rate", RATE))
    )
