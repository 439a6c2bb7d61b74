"""A question without a recipe or without GPUs is answered: the least number of each card, its time and its price.

python -m pytest -q tests/test_plan_any.py
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT
from transformers import AutoConfig

from cookbook.commands.cli import main
from cookbook.commands.plan.model_recipe import recipe_of_model
from cookbook.config.recipe import load_recipe
from cookbook.config.strategy import load_strategy
from cookbook.facts.offline import known_model
from cookbook.facts.served_code import served_code
from cookbook.forecast.any_gpus import for_each_card, simple
from cookbook.forecast.card_table import as_record, in_words
from cookbook.forecast.ranking import PlanReport, forecast_all, scores_in_words
from cookbook.system import console
from cookbook.system.hardware import find_gpu, parse_machines
from cookbook.system.prices import PRICES

NAME, SMALL = "HuggingFaceTB/SmolLM2-135M", "recipes/sums/model"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def forecast_of(name: str, *settings: str, method: str | None = None, length: int | None = None) -> PlanReport:
    machines = parse_machines("1xH100")
    recipe = recipe_of_model(name, method, length, machines, ["batch.micro_batch_size=1", *settings])
    single = load_strategy(Path("accelerate_configs/single.yaml"))
    return forecast_all(recipe, [single], machines, name, limits=False)


def test_a_name_a_folder_and_a_config_are_the_same_question(tmp_path):
    facts = known_model(NAME)
    assert facts is not None
    (tmp_path / "config.json").write_text(json.dumps(facts["config"]))
    answers = [
        forecast_of(name, method="full", length=512) for name in (NAME, str(tmp_path), f"{tmp_path}/config.json")
    ]
    assert {(answer.num_parameters, answer.num_trained) for answer in answers} == {(facts["num_parameters"],) * 2}
    assert len({answer.forecasts[0].memory.allocated for answer in answers}) == 1
    assert answers[0].recipe.data.max_length == 512


def test_attention_that_no_kernel_computes_is_named_with_the_size_of_its_scores():
    """64 heads of gpt-oss-20b x 4,096 x 4,096 scores of 2 bytes are 2 GiB; Llama's attention has a kernel."""
    for name, has_note in (("unsloth/gpt-oss-20b-BF16", True), (NAME, False)):
        facts = known_model(name)
        assert facts is not None
        recipe = recipe_of_model(name, "lora", 4096, None, ["batch.micro_batch_size=1"])
        config = AutoConfig.for_model(**facts["config"])
        note = scores_in_words(config, recipe, served_code(config))
        assert (note is not None) == has_note
        assert note is None or "64 heads x 4,096 x 4,096 scores are 2.0 GiB a sample" in note


@pytest.mark.parametrize("model_type", ["falcon_mamba", "mamba2", "rwkv"])
def test_a_model_without_attention_has_no_scores(model_type: str):
    recipe = recipe_of_model(NAME, "lora", 4096, None, [])
    config = AutoConfig.for_model(model_type)
    assert scores_in_words(config, recipe, served_code(config)) is None


def test_the_method_decides_what_is_trained():
    lora, qlora, default = (forecast_of(SMALL, method=method, length=128) for method in ("lora", "qlora", None))
    assert 0 < lora.num_trained == qlora.num_trained < lora.num_parameters
    assert default.forecasts[0].memory == lora.forecasts[0].memory
    weights = [report.forecasts[0].memory.parameters for report in (lora, qlora)]
    assert weights[1] < weights[0], "four bits are less than sixteen"


def test_the_settings_are_those_of_a_shipped_recipe_unless_the_user_has_others():
    like = load_recipe(Path("recipes/qwen3_0_6b/sft_lora.yaml"))
    recipe = recipe_of_model(NAME, None, None, None, [])
    assert (recipe.adapter, recipe.data.max_length) == (like.adapter, like.data.max_length)
    assert recipe.batch.global_batch_size == like.batch.global_batch_size != 12
    changed = recipe_of_model(NAME, None, None, None, ["batch.global_batch_size=12"])
    assert changed.batch.global_batch_size == 12


@pytest.mark.slow
def test_the_command_answers_for_a_model(capsys):
    assert main(["plan", SMALL, "--gpus", "1xH100", "--method", "full", "--length", "128"]) == 0
    assert SMALL in capsys.readouterr().out
    assert main(["plan", SMALL, "--json", "--length", "128"]) == 0
    cards = json.loads(capsys.readouterr().out)["cards"]
    assert {card["gpu"] for card in cards} >= {*PRICES} and {card["gpus"] for card in cards} == {1}


def test_the_number_of_each_card_is_the_least_and_the_price_is_by_hand():
    """Llama-3.1-8B, all weights: 16 bytes of each of 8.03 billion are 120 GiB."""
    recipe = load_recipe(Path("recipes/llama31_8b/sft.yaml"))
    strategies = [load_strategy(Path(f"accelerate_configs/{name}.yaml")) for name in ("single", "fsdp2")]
    data, batch = (
        section.model_copy(update=new)
        for section, new in ((recipe.data, {"max_length": 512}), (recipe.batch, {"global_batch_size": 2}))
    )
    recipe = recipe.model_copy(update={"data": data, "batch": batch})
    gpus = [find_gpu(name) for name in ("A100 80GB", "B300")]
    report = for_each_card(recipe, strategies, "recipe", gpus, room={})
    cards = {card.gpu.name: card for card in report.cards}
    least = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"micro_batch_size": 1})})
    for name, card in cards.items():
        count = card.machines.num_gpus
        verdicts = {
            number: [
                forecast.verdict
                for forecast in forecast_all(
                    least, strategies, parse_machines(f"{number}x{name}"), "recipe", limits=False
                ).forecasts
            ]
            for number in {count, max(1, count // 2)}
        }
        assert "fits" in verdicts[count] or "host memory unknown" in verdicts[count]
        assert count == 1 or not {"fits", "host memory unknown"}.intersection(verdicts[count // 2])
        hours = [seconds * 1e7 / (2 * 512) / 3600 for seconds in (card.time.low, card.time.high)]
        assert card.price(None) == pytest.approx([each * PRICES[name] * count for each in hours])
        assert card.price(10) == pytest.approx([each * PRICES[name] * count * 10 * 2 * 512 / 1e7 for each in hours])
    assert (cards["B300"].machines.num_gpus, cards["A100-80GB"].machines.num_gpus) == (1, 2)
    # Of one sample a step, which two GPUs cannot share: theirs has two, so that 99 samples are 50 steps of them.
    epoch = recipe.run.model_copy(update={"num_epochs": 1, "max_steps": None})
    of_sizes = [
        recipe.model_copy(update={"run": epoch, "batch": recipe.batch.model_copy(update={"global_batch_size": size})})
        for size in (1, 2)
    ]
    mixed = [replace(card, recipe=of_sizes[card.machines.num_gpus - 1]) for card in report.cards]
    rounded = replace(report, recipe=of_sizes[0], cards=mixed)
    for card in as_record(rounded, "recipe", num_samples=99)["cards"]:
        steps = {"B300": 99, "A100-80GB": 50}[card["gpu"]]
        assert card["steps"] == steps
        expected = [each * PRICES[card["gpu"]] * card["gpus"] * steps / 3600 for each in card["step_seconds"]]
        assert card["price"] == pytest.approx(expected)
    said = in_words(rounded, "recipe", ["x"], num_samples=99, is_all=True)
    assert "price of the run" in said and "a step on 2xA100-80GB has 2 samples" in said
    assert "a step on" not in in_words(report, "recipe", ["x"], num_samples=99, is_all=True), "the control"


def test_a_card_without_bf16_is_refused_for_a_recipe_and_has_fp16_where_nobody_chose():
    recipe, gpus = load_recipe(Path("recipes/smollm2_135m/sft.yaml")), [find_gpu("T4")]
    strategies = [load_strategy(Path("accelerate_configs/single.yaml"))]
    report = for_each_card(recipe, strategies, "recipe", gpus, room={})
    assert report.cards == [] and list(report.refused.values()) == [["T4"]] and "fp16" in next(iter(report.refused))
    free = for_each_card(recipe, strategies, "recipe", gpus, is_free=True, room={})
    assert [card.recipe.mixed_precision for card in free.cards] == ["fp16"]


def test_a_recipe_without_gpus_is_answered_for_any(capsys, monkeypatch):
    monkeypatch.setattr(console, "WIDTH", 80)
    assert main(["plan", "recipes/quickstart.yaml", "--samples", "20000", "--price", "1.5"]) == 0
    printed = capsys.readouterr().out
    assert "not judged" not in printed and "the least is 1x" in printed
    assert all(f"1x{name} " in printed for name in ("RTX3090", "H100"))
    columns = next(line for line in printed.splitlines() if "GiB a GPU" in line).split("  ")
    assert [column.strip() for column in columns if column] == ["GPUs", "strategy", "GiB a GPU"], "float32: no time"
    assert max(map(len, printed.splitlines())) <= 80
    assert "run.max_steps: 500 decides, and not --samples" in printed
    assert "without --gpus, and without a GPU here or in the recipe's label: any GPUs" in " ".join(printed.split())
    assert "--samples 20000 --price 1.5 " in printed.partition("next: ")[2]
    assert main(["plan", "recipes/quickstart.yaml", "--gpus", "cpu"]) == 0
    assert "1xRTX3090" not in capsys.readouterr().out, "the control: what was asked for"


def test_a_column_stands_where_any_gpu_has_a_value():
    """An H100 has a time in 16 bits; of a P100 nobody states a speed, and no price is listed."""
    recipe = load_recipe(Path("recipes/sums/sft.yaml"), ["mixed_precision=fp16"])
    strategies = [load_strategy(Path("accelerate_configs/single.yaml"))]
    for names, has_time in ((("P100", "H100"), True), (("P100",), False)):
        report = for_each_card(recipe, strategies, "recipe", list(map(find_gpu, names)), room={})
        assert [bool(card.time) for card in report.cards] == [has_time, False][-len(names) :]
        said = in_words(report, "recipe", ["x"], num_samples=None, is_all=True)
        assert (" step " in said) == ("price of" in said) == has_time


def test_only_models_that_may_be_meant_are_suggested(capsys):
    """A name that is near, with the size that was written; nothing is near to the second."""
    suggested = {"openai/gpt-oss-20b": ["unsloth/gpt-oss-20b-BF16"], "openai/gpt-oss-120b": [], "deepseek-ai/V3": []}
    for name, models in suggested.items():
        assert main(["plan", name]) == 2
        _, has, names = capsys.readouterr().err.partition("offline_facts.json, which has ")
        assert names.partition(". Connect")[0].split(", ") == models if models else not has


def test_only_strategies_that_any_number_of_gpus_runs_are_tried():
    names = ("single", "ddp", "fsdp2", "zero3_offload", "tp", "fsdp1")
    tried = simple([load_strategy(Path(f"accelerate_configs/{name}.yaml")) for name in names])
    assert [trial.name for trial in tried] == ["single", "ddp", "fsdp2"]


def test_every_price_is_of_a_gpu_of_the_table():
    assert [name for name in PRICES if find_gpu(name) is None or find_gpu(name).name != name] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("recipes/quickstart.yaml", "--method", "lora"), "is a recipe; write --set adapter.name=lora"),
        (("recipes/quickstart.yaml", "--length", "64"), "is a recipe; write --set data.max_length=64"),
        (("Qwen/Qwen3-8Bx",), "Qwen/Qwen3-8B"),
        (("nothing/config.json",), "no such file"),
        (("nothing.yaml",), "nothing.yaml"),
        (("recipes/qwen25_7b",), "recipes/qwen25_7b"),
        ((NAME, "--method", "dora"), "dora"),
        ((NAME, "--length", "0"), "--length is 0"),
        ((NAME, "--gpus", "any", "--host-gib", "-1"), "--host-gib is -1"),
        ((NAME, "--set", "batch.global_batch_sizes=1"), "global_batch_size"),
    ],
    ids=lambda value: value[-2:][0] if isinstance(value, tuple) else "",
)
def test_a_mistake_is_named(words, said, capsys):
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err
