"""Protects `cookbook rounds`: what is sampled is what is trained on, each step is done once, whenever it is killed.

python -m pytest -q tests/test_rounds.py -m "slow or not slow"
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import ROOT
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from benchmarks.tiny_models import tiny_config, tiny_model
from cookbook.commands.cli import main
from cookbook.commands.rounds import loop, prompt_rows, scoring, served
from cookbook.commands.rounds.rounds_folder import Round
from cookbook.commands.rounds.served import Client, ServedModel, Servers
from cookbook.config.objectives import Objective
from cookbook.config.recipe import load_recipe
from cookbook.config.schedule import learning_rate
from cookbook.config.sections import DataSection, RoundsSection
from cookbook.rows.json_text import BadRow
from cookbook.system import lock
from cookbook.system.files import RecipeError
from cookbook.system.gpus import InstalledGpu
from cookbook.training.data.rows import read_rows
from tests.curves import Lab, environment
from tests.needs import need_own_network
from tests.stand_in_vllm import StandIn
from tests.turns import TRAINED, others_by_turn

PLUGIN = ROOT / "tests/plugins/rewards.py"
ROUNDS: dict[str, Any] = {
    "num_rounds": 2,
    "prompts_per_round": 6,
    "num_generations": 4,
    "max_completion_length": 8,
    "reward_funcs": ["longer", "has_the"],
    "reward_weights": [1.0, 0.5],
    "generation_batch_size": 12,
}
NUM_PROBES = 6
"""Answers that prove a server at an address before a round of `ROUNDS`; their seeds begin with the round's number."""
WORDS = ("dog", "the fox", "a token jumps over it", "engineers", "count", "lazy dogs and foxes", "over")


def settings(folder: Path, model: Path, **others: Any) -> dict[str, str]:
    """Values for --set, which make rounds of the lab's recipe."""
    rows = [{"prompt": [{"role": "user", "content": text}], "wanted": "e"} for text in WORDS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model": {"name_or_path": str(model)},
        "plugins": [str(PLUGIN)],
        "data": {"train": str(folder / "prompts.jsonl"), "max_length": 64, "packing": False},
        "objective": {"name": "grpo"},
        "batch": {"global_batch_size": 12, "micro_batch_size": 6},
        "optim": {"learning_rate": 3e-3},
        "schedule": {"name": "linear", "warmup_steps": 3},
        "run": {
            "num_epochs": 1,
            "output_dir": str(folder / "out"),
            "resume": "auto",
            "check_export": False,
            "monitor": False,
        },
        "rounds": ROUNDS,
    }
    for key, value in others.items():
        section, _, name = key.partition("__")
        values[section] = {**values[section], name: value} if name else value
    return {key: json.dumps(value) for key, value in values.items()}


def arguments(lab: Lab, values: dict[str, str]) -> list[str]:
    return [
        "rounds",
        str(lab.folder / "recipe.yaml"),
        *(word for item in values.items() for word in ("--set", "=".join(item))),
    ]


def start(lab: Lab, values: dict[str, str]) -> int:
    """The command in this process, which has no folder locked from before."""
    release_folders()
    return main(arguments(lab, values))


def release_folders() -> None:
    while lock._held_locks:
        lock._held_locks.pop().release()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def model(lab) -> Path:
    return lab.run("single").folder / "export"


@pytest.fixture
def forked(lab, monkeypatch):
    """Runs of rounds are started from the warm parent; the list of their values for --set."""
    started: list[dict[str, str]] = []

    def launch(path, *, strategy, processes, assignments):
        started.append(dict(assignment.split("=", 1) for assignment in assignments))
        done = lab.start("single", started[-1])
        print(done.stdout)
        return done.returncode

    monkeypatch.setattr(loop, "launch", launch)
    return started


def test_rounds_sample_score_and_train_on_what_was_sampled(lab, forked, model, tmp_path, capsys):
    assert start(lab, settings(tmp_path, model)) == 0, capsys.readouterr()
    out, tokenizer = tmp_path / "out", AutoTokenizer.from_pretrained(model)
    assert [setting["rounds.round"] for setting in forked] == ["1", "2"]
    for number, before in ((1, model), (2, out / "rounds/0001/run/export")):
        lines, run = read(out / f"rounds/{number:04}/samples.jsonl"), out / f"rounds/{number:04}/run"
        assert len(lines) == 6
        are_of_their_tokens(lines, tokenizer)
        # The run begins at the weights that sampled: the first step's ratios to the cached probabilities are 1.
        first = next(line for line in read(run / "metrics.jsonl") if "loss" in line)
        assert first["ratio"] == pytest.approx(1, abs=1e-6)
        recipe = load_recipe(run / "recipe.yaml")
        assert Path(recipe.model.name_or_path or "") == before
        rows = read_rows(recipe.data.train[0], "error", recipe.objective)
        sampled = [line["completion_ids"] for line in lines]
        assert rows.kind == "sampled_group" and [row["completion_ids"] for row in rows.rows] == sampled
    earlier, two = (load_file(out / f"rounds/000{k}/run/export/model.safetensors") for k in (1, 2))
    assert any(np.abs(earlier[name] - two[name]).max() > 1e-5 for name in earlier)
    assert not (out / "rounds/0001/run/checkpoints").exists()
    assert (out / "export").resolve() == (out / "rounds/0002/run/export").resolve()
    _is_shown_as_one_run(lab, out, capsys)


def test_answers_that_a_round_cut_off_are_masked_where_the_recipe_says_so(lab, forked, model, tmp_path, capsys):
    masked = {"objective__mask_truncated_completions": True, "rounds__num_rounds": 1, "schedule": {"warmup_steps": 0}}
    assert start(lab, settings(tmp_path, model, **masked)) == 0, capsys.readouterr()
    ended = [flag for line in read(tmp_path / "out/rounds/0001/samples.jsonl") for flag in line["ended"]]
    steps = [line for line in read(tmp_path / "out/metrics.jsonl") if "loss" in line]
    share = sum(line["masked"] for line in steps) / len(steps)
    assert len(steps) == 2 and share == pytest.approx(1 - sum(ended) / len(ended)) and 0 < share < 1
    assert steps[0]["ratio"] == pytest.approx(1, abs=1e-6)


def are_of_their_tokens(lines: list[dict[str, Any]], tokenizer) -> None:
    """Prompts, ends, texts and rewards of a round's samples are those of the token ids."""
    for line in lines:
        asked = tokenizer.apply_chat_template(line["prompt"], add_generation_prompt=True)["input_ids"]
        assert line["prompt_ids"] == asked
        ends = [ids[-1] == tokenizer.eos_token_id for ids in line["completion_ids"]]
        assert line["ended"] == ends and line["num_tokens"] == list(map(len, line["completion_ids"]))
        assert all(end or len(ids) == 8 for end, ids in zip(ends, line["completion_ids"], strict=True))
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in line["completion_ids"]]
        assert [completion[0]["content"] for completion in line["completions"]] == texts
        assert line["rewards"] == [min(len(text), 40) / 40 + 0.5 * ("e" in text) for text in texts]


def _is_shown_as_one_run(lab, out, capsys):
    lines = read(out / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    rounds = [line for line in lines if "reward" in line]
    for number, line in enumerate(rounds, start=1):
        rewards = [reward for row in read(out / f"rounds/{number:04}/samples.jsonl") for reward in row["rewards"]]
        assert (line["round"], line["step"]) == (number, 2 * number - 2)
        assert line["reward"] == pytest.approx(sum(rewards) / len(rewards)) and line["num_answers"] == 24
    # One warm-up and one decay over both rounds, as of a run of four steps.
    rates = [line["learning_rate"] for line in lines if "loss" in line]
    whole = load_recipe(lab.folder / "recipe.yaml", ["schedule={name: linear, warmup_steps: 3}"]).schedule
    assert rates == pytest.approx([learning_rate(step, 4, 3e-3, whole) for step in range(4)])
    capsys.readouterr()
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "Mean reward of a round" in page and "<th>round</th><th>prompt</th><th>answer</th><th>reward</th>" in page
    assert "finished" in page
    assert f"{rounds[0]['reward']:.3f} in round 1, {rounds[1]['reward']:.3f} in round 2" in capsys.readouterr().out
    assert main(["chat", str(out), "--from-run", "1", "--max-new-tokens", "2"]) == 0
    (first,) = read(out / "rounds/0001/samples.jsonl")[0]["prompt"]
    assert f"\nuser: {first['content']}\n" in capsys.readouterr().out


def test_padding_changes_no_answer(lab, model, tmp_path):
    """A temperature near 0 takes the most probable tokens: beside longer prompts the same as alone, by transformers."""
    from cookbook.commands.rounds.sampling import Sampler, encode

    values = settings(tmp_path, model)
    values["rounds"] = json.dumps(ROUNDS | {"temperature": 1e-5, "num_generations": 2, "generation_batch_size": 14})
    recipe = load_recipe(
        Path("tests/curves.py").parent.parent / "recipes/quickstart.yaml", [f"{k}={v}" for k, v in values.items()]
    )
    assert recipe.rounds is not None
    ids = encode(prompt_rows.read_prompts(recipe.data, recipe.rounds), str(model), recipe)
    assert len({*map(len, ids)}) > 2
    alone: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    for weight in alone.parameters():  # after so short a training all answers are one token again and again
        torch.nn.init.normal_(weight.data, std=0.3)
    alone.generation_config.repetition_penalty = 9.0  # what a folder proposes is not the model that is trained
    alone.save_pretrained(tmp_path / "model")
    alone.generation_config.repetition_penalty = 1.0
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "model")
    groups = Sampler(tmp_path / "model", recipe.rounds, is_bf16=False).answers(ids, seed=1)
    assert len({tuple(group[0].ids) for group in groups}) > len(ids) / 2
    for asked, group in zip(ids, groups, strict=True):
        tokens = alone.generate(torch.tensor([asked]), do_sample=False, max_new_tokens=8)[0, len(asked) :].tolist()
        assert [answer.ids for answer in group] == [tokens] * 2


APART = ("deepseek_v4", "recurrent_gemma", "rwkv")
"""Types whose code answers a padded prompt, or one of a batch, otherwise than alone, or not at all."""


@pytest.mark.parametrize("model_type", others_by_turn(TRAINED, ["llama", "mamba2", "recurrent_gemma", "rwkv"]))
def test_of_every_type_an_answer_is_that_of_its_prompt_alone(model_type, capsys):
    from cookbook.commands.rounds.sampling import Sampler

    model, sampler = tiny_model(tiny_config(model_type)).eval(), Sampler.__new__(Sampler)
    greedy = {"max_new_tokens": 5, "eos_token_id": [2], "pad_token_id": 0}
    sampler.model, sampler.tokenizer, sampler.ends = model, SimpleNamespace(decode=lambda *_, **__: ""), [2]
    model.generation_config = GenerationConfig()
    sampler.rounds = RoundsSection(num_rounds=1, prompts_per_round=4, num_generations=2)
    sampler.settings = GenerationConfig(do_sample=True, temperature=1e-5, top_k=0, num_return_sequences=2, **greedy)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 512, (size,), generator=generator).tolist() for size in (7, 2, 13, 7)]
    for prompt, answers in zip(prompts, sampler.answers(prompts, seed=1), strict=True):
        for answer in answers:
            assert len(answer.ids) == 5 or answer.has_ended
            for i, token in enumerate(answer.ids):  # without a cache
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([prompt + answer.ids[:i]]), use_cache=False).logits[0, -1]
                assert logits.max() - logits[token] < 1e-3  # at this temperature the most probable, but for a tie
    assert ("at a time" in capsys.readouterr().out) == (model_type in APART)


@pytest.mark.parametrize(("is_tie", "is_alike"), [(True, True), (False, False)])
def test_a_tie_that_rounding_decides_does_not_part_prompts(is_tie: bool, is_alike: bool, monkeypatch):
    """Behind another token all logits are others."""
    from cookbook.commands.rounds.sampling import Sampler

    first, after, other = torch.tensor([3.0, 3.001, 0.0]), torch.tensor([1.0, 0.0, 5.0]), torch.tensor([5.0, 0.0, 1.0])
    beside = [first + torch.tensor([0.002 * is_tie, 0.0, 0.0]), other]
    monkeypatch.setattr(Sampler, "_next_logits", lambda self, prompts: beside)
    assert Sampler.__new__(Sampler)._is_alike([first, after], [[1], [2]]) == is_alike


def test_answers_are_drawn_from_the_models_probabilities(lab, model, tmp_path):
    from cookbook.commands.rounds.sampling import Sampler

    keys = {"num_generations": 4000, "max_completion_length": 1, "temperature": 0.2}
    values = settings(tmp_path, model, rounds=ROUNDS | keys)
    recipe = load_recipe(lab.folder / "recipe.yaml", [f"{key}={value}" for key, value in values.items()])
    assert recipe.rounds is not None
    sampler = Sampler(model, recipe.rounds, is_bf16=False)
    (group,) = sampler.answers([[5, 6, 7]], seed=3)
    with torch.no_grad():
        logits = sampler.model(torch.tensor([[5, 6, 7]])).logits[0, -1]
    counts = Counter(answer.ids[0] for answer in group)
    shares = torch.tensor([counts[i] / 4000 for i in range(len(logits))])
    distances = [float((shares - torch.softmax(logits / heat, -1)).abs().sum() / 2) for heat in (0.2, 1.0)]
    assert distances[0] < 0.2 and distances[1] > 2 * distances[0], distances
    assert sampler.answers([[5, 6, 7]], seed=3) == [group] != sampler.answers([[5, 6, 7]], seed=4)


@pytest.mark.parametrize("is_own", [True, False])
def test_an_answer_of_a_base_model_ends_where_a_turn_of_the_chat_template_ends(model, tmp_path, is_own):
    """As by the export of a run from it, which names that token; of a template in its folder, and of the recipe's."""
    from cookbook.commands.rounds.sampling import Sampler

    base, recipes = tmp_path / "base", tmp_path / "chat.jinja"
    shutil.copytree(model, base, ignore=shutil.ignore_patterns("chat_template.jinja"))
    tokenizer, config = AutoTokenizer.from_pretrained(model), GenerationConfig.from_pretrained(model)
    turn = tokenizer.eos_token_id
    other = next(token for token in range(3, 20) if token not in tokenizer.all_special_ids)
    recipes.write_text(tokenizer.chat_template)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(other)
    tokenizer.chat_template = tokenizer.chat_template if is_own else None
    tokenizer.save_pretrained(base)
    config.eos_token_id = other
    config.save_pretrained(base)
    rounds, template = RoundsSection(**ROUNDS | {"num_generations": 200}), None if is_own else str(recipes)
    sampler = Sampler(base, rounds, is_bf16=False, chat_template=template)
    (answers,) = sampler.answers([[5, 6, 7]], seed=1)
    assert {answer.ids[-1] for answer in answers if answer.has_ended} == {turn, other}
    assert all(token not in (turn, other) for answer in answers for token in answer.ids[:-1])
    assert is_own or Sampler(base, rounds, is_bf16=False).ends == [other]


MISTAKES = {
    "rounds.sampler is 'vlm'; write transformers, vllm": {"rounds": ROUNDS | {"sampler": "vlm"}},
    "rounds.sampler has --port, which rounds give": {"rounds": ROUNDS | {"sampler": "vllm --port=8000"}},
    "rounds.sampler has 'Qwen/Qwen3-8B' after vllm": {"rounds": ROUNDS | {"sampler": "vllm Qwen/Qwen3-8B"}},
    "rounds.sampler is http://127.0.0.1:9, and it does not answer ([Errno 111]": {
        "rounds": ROUNDS | {"sampler": "http://127.0.0.1:9"}
    },
    "rounds.reward_funcs has 'missing', which no file in plugins registers; they have longer": {
        "rounds": ROUNDS | {"reward_funcs": ["missing"], "reward_weights": None}
    },
    "user_message 'Answer.' has no {prompt}": {"rounds": ROUNDS | {"user_message": "Answer."}},
    "a prompt of messages: rounds.user_message asks texts": {"rounds": ROUNDS | {"user_message": "{prompt} Why?"}},
    "objective.name is sft, which does not train on sampled tokens": {"objective": {"name": "sft"}},
    "adapter.name is qlora: answers would be sampled by the model in 16": {"adapter": {"name": "qlora"}},
    "no adapter_model.safetensors in it": {"adapter": {"name": "lora", "path": "recipes"}},
    "run.stop_after_steps: would end each round": {"run__stop_after_steps": 3},
    "run.price_per_gpu_hour: would leave out what sampling costs": {"run__price_per_gpu_hour": 2.0},
    "batch.global_batch_size is 48, but a round has 24 answers": {"batch__global_batch_size": 48},
    "data.eval or data.holdout: held-out prompts": {"data__holdout": 0.2},
    "reward_weights has 1 numbers for 2 reward_funcs": {"rounds": ROUNDS | {"reward_weights": [1.0]}},
    "warmup_steps is 8, but the run has 8 steps": {
        "schedule__warmup_steps": 8,
        "run": {"max_steps": 4, "output_dir": "outputs/none"},
    },
    "reward function one_number: returned 1 numbers for 4 answers": {
        "rounds": ROUNDS | {"reward_funcs": "one_number", "reward_weights": None}
    },
    "reward function not_finite: returned nan, which is not finite": {
        "rounds": ROUNDS | {"reward_funcs": "not_finite", "reward_weights": None}
    },
    "no such file": {"plugins": ["missing.py"]},
    "rounds.reward_funcs is './none': not a folder": {
        "rounds": ROUNDS | {"reward_funcs": ["./none"], "reward_weights": None}
    },
    "whose head gives words, not a reward": {"rounds": ROUNDS | {"reward_funcs": ["MODEL"], "reward_weights": None}},
    "data.max_length 9 less rounds.max_completion_length 8 leaves 1 tokens to a prompt": {"data__max_length": 9},
}


@pytest.mark.parametrize(("message", "changed"), MISTAKES.items(), ids=range(len(MISTAKES)))
def test_a_mistake_ends_rounds_before_anything_is_sampled(lab, model, tmp_path, capsys, message, changed):
    values = {key: value.replace("MODEL", str(model)) for key, value in settings(tmp_path, model, **changed).items()}
    assert start(lab, values) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, "no prompt: found 'question'; a row has `prompt`"),
        ({"prompt": ""}, "empty text: `prompt` is empty"),
        ({"prompt": "a", "completions": ["b"]}, "`completions` is not read"),
        ({"prompt": [{"role": "assistant", "content": "b"}]}, "prompt ends with an answer"),
        ({"prompt": "a", "system": "b"}, "`system` is not read: write it into the prompt"),
        (
            {"prompt": [{"role": "user", "content": "b", "mood": "sad", "id": 1}]},
            "`messages.id` is not read: no chat template or reward function is given it; to pass it over: data.ignore:"
            " [messages.id, messages.mood]",
        ),
    ],
)
def test_a_row_without_a_prompt_is_named(lab, model, tmp_path, capsys, row, message):
    values = settings(tmp_path, model)
    path = tmp_path / "prompts.jsonl"
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    assert start(lab, values) == 2
    assert f"{path}:8: {message}" in capsys.readouterr().err


def test_a_key_of_a_prompt_s_messages_is_passed_over_if_the_recipe_says_so(tmp_path):
    message = {"role": "user", "content": "b"}
    row = {"prompt": [message | {"id": 1, "mood": None}], "id": 2}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    rounds = RoundsSection(num_rounds=1, prompts_per_round=1)
    data = DataSection(train=str(tmp_path / "rows.jsonl"), ignore=["messages.id"])
    (prompt,) = prompt_rows.read_prompts(data, rounds)
    assert prompt.asked == [message] and prompt.columns == {"id": 2}


def test_a_single_run_of_a_recipe_with_rounds_is_refused(lab, model, tmp_path, capsys):
    for verb in ("launch", "preview", "tune"):
        assert main([verb, *arguments(lab, settings(tmp_path, model))[1:]]) == 2
        assert "rows are prompts without answers; start it with cookbook rounds" in capsys.readouterr().err, verb
    assert main(["rounds", "recipes/quickstart.yaml"]) == 2
    assert "recipes/quickstart.yaml: has no rounds" in capsys.readouterr().err


def test_the_recipe_for_mathematics_asks_and_checks_as_its_source_does(tmp_path, monkeypatch):
    """A row of GSM8K's form; verl's question and its rule for the number, written down here."""
    monkeypatch.chdir(ROOT)
    row = {"question": "What is {3} x 416?", "answer": "3 x 416 = <<3*416=1248>>1,248\n#### 1,248"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    changed = [f"data.train={tmp_path / 'rows.jsonl'}"]
    recipe = load_recipe(Path("recipes/qwen25_3b/grpo_lora.yaml"), changed)
    assert recipe.rounds is not None
    (prompt,) = prompt_rows.read_prompts(recipe.data, recipe.rounds)
    asked = 'What is {3} x 416? Let\'s think step by step and output the final answer after "####".'
    assert prompt.asked == [{"role": "user", "content": asked}]
    right = ["#### 1248", "so #### 1,248.", "#### $1248.00\n", "#### 1248 #### 5"]
    wrong = ["1248", "#### 1249", "#### -1248", "#### ", "#### 5 #### 1248", "### 1248", ""]
    (rewards,) = scoring.score(recipe.rounds, prompt, right + wrong, [[]] * 11, {}).values()
    assert rewards == [1.0] * 4 + [0.0] * 7


def test_each_prompt_comes_once_an_epoch():
    rows = [row for number in range(1, 8) for row in prompt_rows.of_round(number, 3, 7, seed=5)]
    assert sorted(rows[:7]) == sorted(rows[7:14]) == sorted(rows[14:]) == list(range(7))
    assert rows[:7] != rows[7:14]


def test_a_reward_function_that_fails_is_told_and_costs_no_sample(lab, forked, model, tmp_path, capsys, monkeypatch):
    plugin = tmp_path / "mine.py"
    plugin.write_text(PLUGIN.read_text())
    values = settings(
        tmp_path,
        model,
        plugins=[str(plugin)],
        rounds=ROUNDS | {"num_rounds": 1, "reward_funcs": "raises_later", "reward_weights": None},
        schedule={"name": "constant"},
    )
    assert start(lab, values) == 2
    error = capsys.readouterr().err
    assert "reward function raises_later: KeyError: 'a key that is not there'" in error
    assert re.search(r"prompt \(.*prompts.jsonl:\d\): \[", error) and "\n  answer: " in error
    folder = tmp_path / "out/rounds/0001"
    assert not forked and [path.name for path in folder.iterdir()] == ["unscored.jsonl"]
    sampled = read(folder / "unscored.jsonl")
    plugin.write_text(plugin.read_text().replace("if any(map(text_of, completions))", "if not completions"))
    assert start(lab, values) == 0, capsys.readouterr()
    assert "the plugins have changed" in capsys.readouterr().out
    assert [line["completion_ids"] for line in read(folder / "samples.jsonl")] == [
        line["completion_ids"] for line in sampled
    ]


def test_rounds_of_another_recipe_do_not_go_on(lab, forked, model, tmp_path, capsys):
    values = settings(tmp_path, model, rounds=ROUNDS | {"num_rounds": 1}, schedule={"name": "constant"})
    assert start(lab, values) == 0, capsys.readouterr()
    other = values | {"optim": "{learning_rate: 0.002}"}
    assert start(lab, other) == 2
    assert "cannot resume in" in (error := capsys.readouterr().err) and "optim.learning_rate was 0.003" in error
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": [{"role": "user", "content": "another"}], "wanted": "e"}) + "\n")
    assert start(lab, values) == 2
    assert "the data is not what" in capsys.readouterr().err
    assert start(lab, values | {"run.resume": "never"}) == 0
    assert (tmp_path / "out.1/rounds/0001/samples.jsonl").is_file()
    assert len(forked) == 2


LORA = {"name": "lora", "rank": 4, "alpha": 8}


def logps_of(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()


def test_rounds_train_one_adapter_on(lab, forked, model, tmp_path, capsys):
    """The second round samples with the first one's adapter, by peft's own answers, and trains on from it; its
    divergence is from the model before the first round, without an adapter.
    """
    from cookbook.commands.rounds.sampling import Sampler

    others = {"adapter": LORA, "optim": {"learning_rate": 0.1}, "schedule": {"name": "constant"}}
    values = settings(tmp_path, model, objective__beta=0.2, **others)
    assert start(lab, values) == 0, capsys.readouterr()
    first, second = (tmp_path / f"out/rounds/{number:04}" for number in (1, 2))
    assert [settings.get("adapter.path") for settings in forked] == [None, json.dumps(str(first / "run/export"))]
    assert f"ROUND 2 of 2: samples answers with {first / 'run/export'}" in capsys.readouterr().out
    step = next(line for line in read(second / "run/metrics.jsonl") if "loss" in line)
    assert step["ratio"] == pytest.approx(1, abs=1e-6)
    assert not [*(second / "run/export").glob("model*.safetensors")]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tuned: Any = PeftModel.from_pretrained(base, str(first / "run/export")).eval()
    lines = read(second / "samples.jsonl")
    asked = [line["prompt_ids"] for line in lines]

    def answers() -> list[list[int]]:
        options = {"do_sample": False, "max_new_tokens": 8}
        return [tuned.generate(input_ids=torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in asked]

    section = RoundsSection(num_rounds=1, prompts_per_round=1, temperature=1e-5, max_completion_length=8)
    sampled = Sampler(first / "run/export", section, is_bf16=False).answers(asked, seed=1)
    assert [group[0].ids for group in sampled] == answers()
    kl = [next(line["kl"] for line in read(run / "run/metrics.jsonl") if "kl" in line) for run in (first, second)]
    assert abs(kl[0]) < 1e-6 < 1e-3 < kl[1]  # before its first step
    with tuned.disable_adapter():
        assert [group[0].ids for group in sampled] != answers()
        for line in lines:
            for ids, logps in zip(line["completion_ids"], line["reference_logprobs"], strict=True):
                assert logps == pytest.approx(logps_of(tuned, line["prompt_ids"], ids), abs=1e-5)
    with pytest.raises(BadRow, match="reference_logprobs without a divergence"):
        Objective.of(name="grpo").check_row(lines[0])


@pytest.fixture
def server():
    """A server at an address, which serves nothing yet."""
    started = StandIn()
    threading.Thread(target=started.serve_forever, daemon=True).start()
    yield started
    started.shutdown()
    started.server_close()


def test_a_server_samples_from_the_weights_of_each_round_or_not_at_all(lab, forked, model, tmp_path, capsys, server):
    """Started again by hand for each round; its answers and their log-probabilities are transformers' of the export."""
    values = settings(tmp_path, model, rounds=ROUNDS | {"sampler": server.address})
    out, told = tmp_path / "out", []
    server.serve(str(model))  # the right weights, in a folder that does not say so
    for number, before in ((1, model), (2, out / "rounds/0001/run/export")):
        assert start(lab, values) == 2
        error = capsys.readouterr().err
        assert f"serves {server.folder}; round {number} samples with other weights" in error
        assert json.loads((out / "status.json").read_text())["state"] == "failed"
        (folder,) = re.findall(r"`vllm serve (\S+)`", error)
        assert Path(folder).resolve() == before.resolve() and len(forked) == number - 1
        told.append(folder)
        server.serve(folder)
    assert start(lab, values) == 0, capsys.readouterr()
    assert len(set(told)) == 2 and not [*out.glob("rounds/*/model-*")]
    asked = [request for request in server.asked if request["seed"] > 2000]
    seeds = [request["seed"] for request in asked]
    assert len(server.asked) - len(asked) == 2 * NUM_PROBES
    assert len(seeds) == len(set(seeds)) == 2 * 24
    assert all(request["top_k"] == 0 and request["repetition_penalty"] == 1 for request in asked)
    for number, before in ((1, model), (2, out / "rounds/0001/run/export")):
        of_export, lines = AutoModelForCausalLM.from_pretrained(before), read(out / f"rounds/{number:04}/samples.jsonl")
        for line in lines:
            for ids, logps in zip(line["completion_ids"], line["logprobs"], strict=True):
                assert logps == pytest.approx(logps_of(of_export, line["prompt_ids"], ids), abs=1e-5)
        sent = Counter(tuple(request["prompt"]) for request in asked[24 * (number - 1) : 24 * number])
        assert sent == Counter(tuple(line["prompt_ids"]) for line in lines for _ in range(4))
        run = out / f"rounds/{number:04}/run"
        assert next(line for line in read(run / "metrics.jsonl") if "loss" in line)["ratio"] == pytest.approx(
            1, abs=1e-5
        )
        assert "logprobs" in load_recipe(run / "recipe.yaml").data.train[0].columns


@pytest.mark.slow
def test_a_round_killed_while_a_server_samples_is_sampled_again_whole(lab, forked, model, tmp_path, capsys, server):
    """The server answers otherwise the second time, as vLLM may: no answer of the first is scored or trained on."""
    values = settings(tmp_path, model, rounds=ROUNDS | {"num_rounds": 1, "sampler": server.address})
    values["schedule"] = '{"name": "constant"}'
    server.serve(str(model))
    assert start(lab, values) == 2
    (folder,) = re.findall(r"`vllm serve (\S+)`", capsys.readouterr().err)
    server.serve(folder)
    first, second, goes_on = [], [], threading.Event()

    def note(answer: dict[str, Any], answers: list[tuple[int, ...]]) -> dict[str, Any]:
        if answer["choices"][0]["seed"] > 2000:
            answers.append(tuple(answer["choices"][0]["token_ids"]))
        return answer

    server.spoil = lambda answer: note(answer, first) if len(first) < 5 or goes_on.wait() else None
    release_folders()
    words = [sys.executable, "-m", "cookbook", *arguments(lab, values)]
    with subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL) as running:
        while len(first) < 5 or len(server.asked) < NUM_PROBES + 10:
            assert running.poll() is None
            time.sleep(0.01)
        running.kill()
    goes_on.set()
    assert not [*tmp_path.glob("out/rounds/*/*.jsonl")] and not forked
    seeds, complete = {request["seed"] for request in server.asked}, server.complete
    server.asked.clear()
    server.spoil = lambda answer: note(answer, second)
    server.complete = lambda asked: complete(asked | {"seed": asked["seed"] + 1000})
    assert start(lab, values) == 0, capsys.readouterr()
    lines = read(tmp_path / "out/rounds/0001/samples.jsonl")
    sampled = Counter(tuple(ids) for line in lines for ids in line["completion_ids"])
    assert sampled == Counter(second) and not sampled >= Counter(first) and len(second) == 24
    assert seeds <= {request["seed"] - 1000 for request in server.asked}
    trained = load_recipe(tmp_path / "out/rounds/0001/run/recipe.yaml")
    rows = read_rows(trained.data.train[0], "error", trained.objective).rows
    assert Counter(tuple(ids) for row in rows for ids in row["completion_ids"]) == sampled


def with_token(answer: dict[str, Any], token: int) -> dict[str, Any]:
    """An answer that ends as before, of at most 8 tokens, and begins with another one."""
    return {"choices": [answer["choices"][0] | {"token_ids": [token, *answer["choices"][0]["token_ids"]][:8]}]}


SPOILT: dict[str, Any] = {
    "returned no token_ids": lambda answer: answer["choices"][0].pop("token_ids") and answer,
    "returned 2 answers where one was asked for": lambda answer: {"choices": answer["choices"] * 2},
    "ended an answer after 2 tokens (finish_reason 'length'), neither": lambda answer: {
        "choices": [answer["choices"][0] | {"token_ids": [5, 6]}]
    },
    "as the ids of tokens": lambda answer: with_token(answer, -1),
    f"returned [{2**70}": lambda answer: with_token(answer, 2**70),
    "as the log-probabilities of": lambda answer: {"choices": [answer["choices"][0] | {"logprobs": {}}]},
    "answered 500 to /v1/completions: out of memory": lambda answer: {"error": {"message": "out of\nmemory"}},
    "does not answer (Remote end closed connection": lambda answer: None,
}


@pytest.mark.parametrize(("message", "spoil"), SPOILT.items(), ids=range(len(SPOILT)))
def test_a_server_that_fails_is_told_in_a_line(model, server, message, spoil):
    server.serve(str(model))
    section = RoundsSection(num_rounds=1, prompts_per_round=1, max_completion_length=8, generation_batch_size=2)
    server.spoil = lambda answer: spoil(answer) if len(server.asked) > 3 else answer
    served_model = ServedModel(model, section, Client(server.address, server.address), 1)
    with pytest.raises(RecipeError, match=re.escape(message)) as raised:
        Servers([served_model]).answers([[5, 6, 7]], seed=1)
    assert str(raised.value).startswith(f"rounds.sampler is {server.address}, and it") and "\n" not in str(raised.value)
    server.spoil = lambda answer: answer
    (group,) = Servers([ServedModel(model, section, Client(f"{server.address}/v1/", ""), 1)]).answers(
        [[5, 6, 7]], seed=1
    )
    assert [answer.has_ended for answer in group] == [answer.ids[-1] in served_model.ends for answer in group]
    server.spoil = lambda answer: {"choices": [answer["choices"][0] | {"logprobs": None}]}
    (again,) = Servers([ServedModel(model, section, Client(server.address, ""), 1)]).answers([[5, 6, 7]], seed=1)
    assert again == [answer._replace(logps=None) for answer in group]


def test_a_round_that_has_its_answers_needs_no_server(lab, model, tmp_path):
    values = settings(tmp_path, model, rounds=ROUNDS | {"sampler": "http://127.0.0.1:9"})
    recipe = load_recipe(lab.folder / "recipe.yaml", [f"{key}={value}" for key, value in values.items()])
    for number, name in ((1, "samples"), (2, "unscored")):
        with pytest.raises(RecipeError, match="does not answer"):
            served.check(recipe)
        folder = (round_here := Round(tmp_path / "out", number)).run
        folder.mkdir(parents=True)
        getattr(round_here, name).touch()
        served.check(recipe)
        (folder / "status.json").write_text('{"state": "finished"}')


def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(served, "CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(RecipeError, match=r"does not answer \(no answer within 0.2 s\)"):
            Client(address, address).models()


def test_a_server_ends_with_a_command_that_is_killed(tmp_path):
    (first := Round(tmp_path, 1)).folder.mkdir(parents=True)
    asks = os.fork()
    if not asks:
        try:
            command = ["sh", "-c", "echo $$ $VLLM_BATCH_INVARIANT; exec sleep 600"]
            client, log = Client("http://127.0.0.1:9", "vllm"), first.folder / served.LOG
            with served._start(command, {served.INVARIANCE: "1"}, client, log):
                pass
        finally:
            os._exit(1)
    log, deadline = first.folder / served.LOG, time.monotonic() + 30
    while not (log.is_file() and log.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    number, variable = log.read_text().split()
    server = psutil.Process(int(number))
    os.kill(asks, signal.SIGKILL)
    os.waitpid(asks, 0)
    assert psutil.wait_procs([server], timeout=10)[1] == [] and variable == "1"


@pytest.mark.parametrize(
    ("capabilities", "environment", "variables"),
    [
        ([(8, 0), (9, 0)], {}, {"VLLM_BATCH_INVARIANT": "1"}),
        ([(8, 0)], {"VLLM_BATCH_INVARIANT": "0"}, {}),
        ([(9, 0), (7, 5)], {}, {}),
        ([None], {}, {}),
        ([], {}, {}),
    ],
)
def test_vllm_is_asked_for_answers_that_a_batch_does_not_change_where_it_can(capabilities, environment, variables):
    gpus = [InstalledGpu(index=index, capability=capability) for index, capability in enumerate(capabilities)]
    assert served.invariance(gpus, environment) == variables


@pytest.mark.slow
def test_vllm_is_started_for_each_round_with_the_adapter_merged(lab, forked, model, tmp_path, capsys, monkeypatch):
    """A program of that name on the PATH, by transformers; it ends with its round, and its failure is reported."""
    program = tmp_path / "bin/vllm"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", str(program.parent))
    values = settings(tmp_path, model, rounds=ROUNDS | {"sampler": "vllm"})
    assert start(lab, values) == 2
    assert "rounds.sampler is vllm, and there is no vllm on the PATH" in capsys.readouterr().err
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/stand_in_vllm.py "$@"\n')
    program.chmod(0o755)
    rounds = ROUNDS | {"sampler": "vllm --enforce-eager"}
    values = settings(tmp_path, model, rounds=rounds, adapter=LORA, optim={"learning_rate": 0.1})
    values["schedule"] = '{"name": "constant"}'
    assert start(lab, values) == 0, capsys.readouterr()
    assert "--dtype float32 --max-model-len 64 --enforce-eager; its log: " in capsys.readouterr().out
    first, second = (tmp_path / f"out/rounds/{number:04}" for number in (1, 2))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tuned: Any = PeftModel.from_pretrained(base, str(first / "run/export")).eval()
    for line in read(second / "samples.jsonl"):
        for ids, logps in zip(line["completion_ids"], line["logprobs"], strict=True):
            assert logps == pytest.approx(logps_of(tuned, line["prompt_ids"], ids), abs=1e-4)
            with tuned.disable_adapter():
                assert logps != pytest.approx(logps_of(tuned, line["prompt_ids"], ids), abs=1e-3)
    assert not [*second.glob("model-*")]
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or [])
    ]
    program.write_text("#!/bin/sh\necho ValueError: no such device >&2\nexit 3\n")
    values["run"] = json.dumps(json.loads(values["run"]) | {"output_dir": str(tmp_path / "other")})
    assert start(lab, values) == 2
    assert "vllm serve ended with code 3: ValueError: no such device; its log: " in capsys.readouterr().err


@pytest.mark.slow
def test_the_reward_of_the_recipe_for_laptops_rises(lab, forked, tmp_path, monkeypatch, capsys):
    """The first of its 22 rounds; and falls where a right answer costs."""
    monkeypatch.chdir(ROOT)
    rewards = {}
    for weight, count in ((1.0, 3), (-1.0, 2)):
        folder = tmp_path / str(weight)
        own = load_recipe(Path("recipes/sums/grpo.yaml"), [f"run.output_dir={folder}", f"rounds.num_rounds={count}"])
        values = own.model_dump(mode="json", exclude_unset=True)
        values["rounds"]["reward_weights"] = [weight]
        assert start(lab, {key: json.dumps(value) for key, value in values.items()}) == 0, capsys.readouterr()
        rewards[weight] = [line["reward"] * weight for line in read(folder / "metrics.jsonl") if "reward" in line]
    assert rewards[1.0][0] == rewards[-1.0][0] < 0.2, rewards
    assert rewards[1.0][2] > 0.3 and rewards[-1.0][1] < 0.08, rewards


@pytest.mark.slow
def test_the_student_of_the_recipe_for_laptops_comes_near_its_teacher(lab, forked, tmp_path, monkeypatch, capsys):
    """After the first of its 4 rounds; and stays where it is if the teacher knows no more than itself."""
    monkeypatch.chdir(ROOT)
    rewards = {}
    for teacher in ("teacher", "model"):
        folder = tmp_path / teacher
        changed = [f"run.output_dir={folder}", "rounds.num_rounds=2", f"objective.teacher=recipes/sums/{teacher}"]
        values = load_recipe(Path("recipes/sums/distill.yaml"), changed).model_dump(mode="json", exclude_unset=True)
        assert start(lab, {key: json.dumps(value) for key, value in values.items()}) == 0, capsys.readouterr()
        rewards[teacher] = [line["reward"] for line in read(folder / "metrics.jsonl") if "reward" in line]
    assert rewards["teacher"][0] == rewards["model"][0] < 0.2, rewards
    assert rewards["teacher"][1] > 0.6 and rewards["model"][1] < 0.2, rewards


@pytest.mark.slow
def test_a_program_of_the_recipe_for_laptops_passes_where_its_tests_do(lab, forked, tmp_path, monkeypatch, capsys):
    """As Python says without a sandbox, of programs that the recipe's model can write."""
    need_own_network()
    monkeypatch.chdir(ROOT)
    sizes = {"rounds.num_rounds": 1, "rounds.prompts_per_round": 4, "rounds.num_generations": 8}
    sizes |= {"rounds.generation_batch_size": 32, "batch": "{global_batch_size: 32, micro_batch_size: 32}"}
    changed = [f"run.output_dir={tmp_path}", *(f"{key}={value}" for key, value in sizes.items())]
    values = load_recipe(Path("recipes/programs/grpo.yaml"), changed).model_dump(mode="json", exclude_unset=True)
    assert start(lab, {key: json.dumps(value) for key, value in values.items()}) == 0, capsys.readouterr()
    rewards = []
    for line in read(tmp_path / "rounds/0001/samples.jsonl"):
        tests = line["prompt"][-1]["content"].split("\n\n")[1]
        for messages, reward in zip(line["completions"], line["rewards"], strict=True):
            program = f"{messages[0]['content']}\n{tests}"
            passed = subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL).returncode == 0
            assert reward == passed, program
            rewards.append(reward)
    assert len(rewards) == 32 and set(rewards) == {0.0, 1.0}


@pytest.fixture(scope="module")
def judge(model, tmp_path_factory) -> Path:
    """A reward model with weights by chance, for answers to chats."""
    folder = tmp_path_factory.mktemp("judge")
    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = {
        "num_labels": 1,
        "pad_token_id": tokenizer.pad_token_id,
        "architectures": ["LlamaForSequenceClassification"],
    }
    torch.manual_seed(0)
    made = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(model, **sizes))
    made.score.weight.data.normal_()
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def score_by_transformers(folder: Path, text: str) -> float:
    encoded = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        return AutoModelForSequenceClassification.from_pretrained(folder)(**encoded).logits.item()


def test_a_reward_model_scores_answers_as_transformers_does(lab, forked, model, judge, tmp_path, capsys):
    rounds = ROUNDS | {"num_rounds": 1, "reward_funcs": ["longer", str(judge)], "reward_weights": [0.0, 2.0]}
    values = settings(tmp_path, model, rounds=rounds, schedule={"name": "constant"})
    assert start(lab, values) == 0, capsys.readouterr()
    lines, tokenizer = read(tmp_path / "out/rounds/0001/samples.jsonl"), AutoTokenizer.from_pretrained(judge)
    assert len({reward for line in lines for reward in line["rewards"]}) > 4
    for line in lines[:2]:
        texts = [
            tokenizer.apply_chat_template(line["prompt"] + completion, tokenize=False)
            for completion in line["completions"]
        ]
        expected = [score_by_transformers(judge, text) for text in texts]
        assert line["scores"][str(judge)] == pytest.approx(expected, abs=1e-5)
        assert line["rewards"] == pytest.approx([2 * score for score in expected], abs=2e-5)


def test_a_reward_model_reads_a_text_with_its_end(model, judge, tmp_path):
    from cookbook.commands.rounds.reward_models import RewardModel

    asked = prompt_rows.Prompt(place="prompts.jsonl:1", asked="the fox", columns={})
    answers = [" jumps", " jumps over the lazy dog", ""]
    end = AutoTokenizer.from_pretrained(judge).eos_token
    expected = [score_by_transformers(judge, f"the fox{answer}{end}") for answer in answers]
    section = RoundsSection(num_rounds=1, prompts_per_round=1, reward_funcs=[str(judge)], generation_batch_size=2)
    assert RewardModel(str(judge), section, is_bf16=False).score(asked, answers) == pytest.approx(expected, abs=1e-5)
    assert expected[0] != pytest.approx(score_by_transformers(judge, "the fox jumps"), abs=1e-3)


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_on_its_own_answers(lab, forked, model, tmp_path, capsys):
    """The loss of a round's first step is the reverse KL by transformers, over what the student wrote."""
    teacher, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    torch.manual_seed(0)
    for parameter in teacher.parameters():
        parameter.data += parameter.data.std() * torch.randn_like(parameter)
    teacher.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    size = teacher.config.vocab_size
    keys = {"name": "distill", "teacher": str(tmp_path / "teacher"), "loss_top_k": size, "beta": 1.0, "kd_ratio": 1.0}
    rounds = {key: value for key, value in ROUNDS.items() if not key.startswith("reward")}
    batch = {"global_batch_size": 24, "micro_batch_size": 12}
    schedule = {"name": "constant"}
    others = {"rounds": rounds, "batch": batch, "schedule": schedule, "run__num_epochs": 4}
    values = settings(tmp_path, model, objective=keys, optim={"learning_rate": 1e-3}, **others)
    assert start(lab, values) == 0, capsys.readouterr()
    assert "ROUND 1: 24 answers" in capsys.readouterr().out
    losses, own = {}, {1: model, 2: tmp_path / "out/rounds/0001/run/export"}
    for number in (1, 2):
        folder = tmp_path / f"out/rounds/{number:04}"
        losses[number] = [line["loss"] for line in read(folder / "run/metrics.jsonl") if "loss" in line]
        if own[number].is_dir():  # of the exports the newest are kept
            student = AutoModelForCausalLM.from_pretrained(own[number], dtype=torch.float32)
            expected = reverse_kl(student, teacher, read(folder / "samples.jsonl"))
            assert losses[number][0] == pytest.approx(expected, rel=1e-4)
    assert losses[2][-1] < losses[1][-1] < losses[1][0] > 0.01, losses
    assert start(lab, values | {"objective": json.dumps(keys | {"kd_ratio": 0.5})}) == 2
    assert "the rest is the likelihood of the labels" in capsys.readouterr().err


def reverse_kl(student, teacher, lines: list[dict[str, Any]]) -> float:
    """The mean over the sampled tokens."""
    terms: list[float] = []
    for line in lines:
        for answer in line["completion_ids"]:
            ids, start = torch.tensor([line["prompt_ids"] + answer]), len(line["prompt_ids"]) - 1
            with torch.no_grad():
                own, other = (model(ids).logits[0, start:-1].double().log_softmax(-1) for model in (student, teacher))
            terms += (own.exp() * (own - other)).sum(-1).tolist()
    return sum(terms) / len(terms)


def files_of(folder: Path) -> dict[str, bytes]:
    """Files of rounds that must not depend on kills."""
    wanted = [*folder.glob("rounds/*/samples.jsonl"), *folder.glob("rounds/*/run/export/*.safetensors")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(wanted)}


@pytest.mark.slow
@pytest.mark.parametrize("trained", others_by_turn(["all weights", "an adapter", "ahead"], ["all weights"]))
def test_rounds_that_were_killed_end_with_the_same_samples_and_weights(lab, model, tmp_path, trained):
    """Killed with all their processes when the first answers, a checkpoint and a later round's samples are there."""
    others = {"an adapter": {"adapter": LORA, "objective__beta": 0.1}}.get(trained, {})
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    rounds = ROUNDS | {"prompts_per_round": 24, "num_generations": 8}
    rounds |= {"num_rounds": 3, "max_staleness": 1} if trained == "ahead" else {}
    keys = {
        "rounds": rounds,
        "batch": {"global_batch_size": 12, "micro_batch_size": 12},
        "strategy": "single",
        **others,
    }
    settled = {name: settings(tmp_path / name, model, **keys) for name in ("whole", "killed")}
    settled["killed"]["run.save_every_steps"] = settled["whole"]["run.save_every_steps"] = "2"
    commands = {name: [sys.executable, "-m", "cookbook", *arguments(lab, values)] for name, values in settled.items()}
    whole = subprocess.run(commands["whole"], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr[-3000:]
    out, kills = tmp_path / "killed/out", 0
    last = f"rounds/000{rounds['num_rounds']}/samples.jsonl"
    for pattern in ("rounds/0001/*.jsonl", "rounds/0001/run/checkpoints/step-*", last, ""):
        running = subprocess.Popen(
            commands["killed"], cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while running.poll() is None and not (pattern and any(out.glob(pattern))):
            time.sleep(0.02)
        if running.poll() is None:
            for process in [*psutil.Process(running.pid).children(recursive=True), psutil.Process(running.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            kills += 1
        running.wait()
    assert (kills, running.returncode) == (3, 0)
    expected, files = files_of(tmp_path / "whole/out"), files_of(out)
    assert len(expected) == 2 * rounds["num_rounds"] and files == expected
