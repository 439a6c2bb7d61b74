"""The answer of `plan` in four lines, and what it says of options and batches that are not what they seem.

python -m pytest -q tests/test_headline.py
"""

import json
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from transformers import LlamaForCausalLM, PreTrainedConfig

from benchmarks.tiny_models import tiny_config
from cookbook.commands.cli import main
from cookbook.commands.plan import planning
from cookbook.commands.plan.model_recipe import recipe_of_model
from cookbook.config.recipe import load_recipe
from cookbook.config.sections import ModelSection
from cookbook.config.strategy import known_strategies, load_strategy
from cookbook.facts.pipeline_stages import StagePass, pipeline_order, stage_passes
from cookbook.forecast import card_table, headline
from cookbook.forecast.any_gpus import for_each_card
from cookbook.forecast.costs.inputs import cost_inputs
from cookbook.forecast.costs.states import heaviest, states
from cookbook.forecast.fitting import ByAuto, Fitting, by_auto
from cookbook.forecast.other_machines import fewer_gpus
from cookbook.forecast.ranking import forecast_all
from cookbook.forecast.show import as_record, hours_in_words, in_words, overridden
from cookbook.forecast.step_time import Range
from cookbook.forecast.verdict import Forecast, TraceCache, time_compiled, time_of_run, why_no_time
from cookbook.start.run_plan import MOST_SAMPLES, even
from cookbook.system import console
from cookbook.system.files import RecipeError
from cookbook.system.hardware import find_gpu, parse_machines
from cookbook.training.models.language_model import load_config
from cookbook.training.models.structure import SIZES, config_of, doubts_about, find_config

SMALL = "recipes/sums/sft.yaml"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def strategies(*names: str):
    return [load_strategy(Path(f"accelerate_configs/{name}.yaml")) for name in names]


def answer(capsys, *words: str, code: int = 0) -> list[str]:
    assert main(["plan", *words]) == code, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def test_an_option_and_a_set_that_say_otherwise_are_refused_together(capsys, tmp_path):
    tiny_config("llama").save_pretrained(tmp_path)
    words = ["plan", str(tmp_path), "--gpus", "1xH100", "--method", "full", "--length", "64"]
    assert main([*words, "--set", "adapter.name=lora", "--set", "data.max_length=32"]) == 2
    said = capsys.readouterr().err
    assert "--method full: --set makes it lora; leave" in said and "--length 64: --set makes it 32; leave" in said
    assert main([*words, "--set", "data.max_length=64"]) == 0


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_words_for_a_recipe_that_a_message_names_are_taken_and_say_what_was_asked(capsys, method):
    words = [SMALL, "--gpus", "1xH100", "--strategy", "single"]
    assert main(["plan", *words, "--method", method, "--length", "48"]) == 2
    instead = capsys.readouterr().err.partition("; write ")[2].split()
    assert main(["plan", *words, *instead, "--json"]) == 0
    taken = json.loads(capsys.readouterr().out)
    assert taken["a_step"]["tokens_at_most"] == 48 * taken["a_step"]["sequences"]
    assert (taken["model"]["trained"] == taken["model"]["parameters"]) == (method == "full")


def test_gpus_that_are_paid_for_and_not_used_are_named_with_the_batch_that_uses_them(capsys):
    def said(batch: int, *strategies: str) -> str:
        words = [word for name in strategies for word in ("--strategy", name)]
        of_batch = ["--set", f"batch.global_batch_size={batch}", "--set", "batch.micro_batch_size=1"]
        return " ".join(" ".join(answer(capsys, SMALL, "--gpus", "3xA100", *words, *of_batch)).split())

    idle = "note single runs on 1 of the 3 GPUs, and a price is of all"
    assert f"{idle}; with batch.global_batch_size: 18 all can share the samples of a step" in said(16, "single", "ddp")
    assert f"{idle} next" in said(18, "single")
    assert "runs on" not in said(18, "ddp")


def test_weights_that_no_run_can_train_are_named_beside_the_answer(capsys, tmp_path):
    """The model's size is all that the answer is of, and 16 bits of it may be had; in JSON too."""
    values = tiny_config("llama").to_dict() | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}
    for name, given in (("fp8", values), ("plain", {k: v for k, v in values.items() if k != "quantization_config"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(given))
        ways = [("--gpus", "1xH100"), ("--gpus", "1xH100", "--json"), ("--gpus", "any")]
        for words in ways if name == "fp8" else ways[:1]:
            said = " ".join(" ".join(answer(capsys, str(tmp_path / name), "--length", "64", *words)).split())
            assert ("its weights are quantized (fp8), which cannot be trained; name" in said) == (name == "fp8")
            assert "YES" in said or "--json" in words


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization", {"group_size": 64, "bits": 4}),  # of mlx-lm
        ("compression_config", {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
        ("quantization_config", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),  # of early transformers
    ],
)
def test_nor_is_it_passed_over_by_a_name_that_transformers_does_not_read(key: str, value: dict, capsys, tmp_path):
    values = tiny_config("llama").to_dict() | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(values))
    said = " ".join(" ".join(answer(capsys, str(tmp_path), "--length", "64", "--gpus", "1xH100")).split())
    assert f"its weights are quantized ({key}" in said and "which cannot be trained; name" in said


@pytest.mark.parametrize(
    ("model_type", "size"),
    [("llama", "hidden_size"), ("gpt2", "n_layer"), ("longcat_flash", "num_layers"), ("qwen3_vl", "vocab_size")],
)
def test_sizes_that_a_configuration_lacks_are_named_with_those_of_transformers(model_type: str, size: str, tmp_path):
    """A file that transformers wrote lacks none, under whatever name and in whatever part it has them."""
    whole = tiny_config(model_type).to_diff_dict()
    part = whole.get("text_config", whole)
    lacking = {key: value for key, value in part.items() if key != size}
    for values in (whole, whole | {"text_config": lacking} if "text_config" in whole else lacking):
        (tmp_path / "config.json").write_text(json.dumps(values))
        model = ModelSection(name_or_path=str(tmp_path))
        doubts = doubts_about(config := find_config(model)[0], model)
        if values is whole or size == "num_layers":  # of which transformers makes num_hidden_layers, and writes none
            assert doubts == ()
        else:
            number = f"{getattr(config, size):,}"
            assert len(doubts) == 1 and re.search(rf"lacks (\w+ \({number}\)): the forecast", doubts[0]), doubts


def test_they_are_the_sizes_that_transformers_promises_of_all_configurations():
    promised = PreTrainedConfig.__doc__.partition("Common attributes")[2].partition("<Tip")[0]
    assert set(SIZES) == set(re.findall(r"- \*\*(\w+)\*\* \(`int`\)", promised))


def test_a_plan_says_that_a_configuration_lacks_a_size(capsys, tmp_path):
    values = {key: value for key, value in tiny_config("llama").to_dict().items() if key != "vocab_size"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    said = " ".join(" ".join(answer(capsys, str(tmp_path), "--length", "64", "--gpus", "1xH100")).split())
    assert "config.json lacks vocab_size (32,000): the forecast is of transformers' own; write" in said


def test_a_dynamic_rotary_embedding_is_forecast_as_the_default_one_whose_frequencies_it_has(capsys, tmp_path):
    """Up to the length for which it was made; a longer one is refused."""
    said = {}
    for kind in ("default", "dynamic"):
        rope = {"rope_type": kind, "rope_theta": 1e4} | ({"factor": 2.0} if kind == "dynamic" else {})
        config = tiny_config("llama")
        config.rope_parameters = rope
        config.save_pretrained(tmp_path / kind)
        torch.manual_seed(0)
        with torch.no_grad():
            said[kind] = LlamaForCausalLM(config)(torch.arange(64)[None] % 7).logits
    assert torch.equal(said["default"], said["dynamic"])
    words = ("--length", "64", "--gpus", "1xH100", "--strategy", "single")
    plain, dynamic = (answer(capsys, str(tmp_path / kind), *words) for kind in ("default", "dynamic"))
    assert dynamic[:3] == plain[:3] and "YES" in plain[0]


def test_the_answer_is_four_lines_and_fits_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(console, "WIDTH", 80)
    words = (SMALL, "--set", "mixed_precision=bf16", "--gpus", "1xH100", "--strategy", "single")
    lines = answer(capsys, *words)
    assert re.match(r"YES, on 1xH100: single, micro-batch \d+, checkpointing \w+$", lines[0])
    starts = [line.split()[0] for line in lines[1:] if line[2] != " "]
    assert starts == ["memory", "time", "next"]
    assert "cookbook launch recipes/sums/sft.yaml" in "\n".join(lines)
    everything = answer(capsys, *words, "--all")
    assert everything[: len(lines)] == lines and len(everything) > 3 * len(lines)
    assert max(map(len, everything)) <= 80
    assert "a wider terminal also has" in "\n".join(everything)


def test_the_fastest_by_auto_comes_first_even_if_its_own_settings_are_slow():
    def setting(name: str, seconds: float, compiled: float | None = None, low: float | None = None) -> ByAuto:
        time = Range(low=low or seconds, high=seconds, bottleneck="", parts=())
        (strategy,) = strategies(name)
        best = Forecast(strategy=strategy, verdict="fits", why=[], time=time)
        faster = None if compiled is None else replace(time, low=compiled, high=compiled)
        return ByAuto(strategy, Fitting(True, load_recipe(Path(SMALL)).batch, best), faster)

    def first(gpus: str, *settings: ByAuto) -> str:
        report = forecast_all(load_recipe(Path(SMALL)), strategies("single"), parse_machines(gpus), "", limits=False)
        best = headline.best_by_auto(report, settings)
        return best.strategy.name

    eager, compiled = setting("zero3", 3.0), setting("fsdp2", 4.0, compiled=2.0)
    assert first("8xH100", eager, setting("fsdp2", 4.0)) == "zero3"
    assert first("8xH100", eager, compiled) == "fsdp2"
    assert first("1xH100", eager, setting("single", 5.0, low=2.5)) == "single", "not surely slower"
    assert first("1xH100", eager, setting("single", 5.0)) == "zero3"
    assert first("2xH100", eager, setting("single", 5.0, low=2.5)) == "zero3"


def test_meshes_that_one_gpu_can_never_run_are_not_named(capsys):
    recipe = load_recipe(Path(SMALL))
    report = forecast_all(recipe, strategies("single", "tp", "pp"), parse_machines("1xH100"), "", limits=False)
    assert "cannot run" not in in_words(report, "", num_samples=None, price=None)
    alone = forecast_all(recipe, strategies("tp"), parse_machines("1xH100"), "", limits=False)
    assert "tp cannot run" in in_words(alone, "", num_samples=None, price=None), "what was asked for"


def test_what_does_not_fit_is_one_line_with_the_nearest():
    recipe = load_recipe(Path("recipes/llama31_8b/sft.yaml"))
    report = forecast_all(recipe, strategies("single", "ddp", "zero3"), parse_machines("8xH100"), "", limits=False)
    printed = in_words(report, "", num_samples=None, price=None)
    assert re.search(r"does not fit: single, ddp; nearest single, \d+ to \d+ of 79 GiB\n", printed)
    assert not re.search(r"^  ddp +8", printed, flags=re.MULTILINE)


def test_samples_beside_max_steps_are_named_and_the_epoch_is_right():
    recipe = load_recipe(Path(SMALL))
    size = recipe.batch.global_batch_size
    steps = recipe.model_copy(update={"run": recipe.run.model_copy(update={"max_steps": 10, "num_epochs": None})})
    (note,) = overridden(steps, 7 * size - 1)
    assert f"{10 * size:,} samples" in note and note.endswith("--set run.max_steps=7")
    assert overridden(steps, None) == []
    epochs = recipe.model_copy(update={"run": recipe.run.model_copy(update={"max_steps": None, "num_epochs": 1})})
    assert overridden(epochs, 100) == []
    rounds = load_recipe(Path("recipes/sums/grpo.yaml"))
    assert rounds.rounds is not None
    (note,) = overridden(rounds, 100)
    assert note.startswith(f"rounds.num_rounds: {rounds.rounds.num_rounds} decides, and not --samples")


def test_a_batch_of_fewer_samples_than_gpus_is_what_is_to_change():
    """16 samples for 64 GPUs."""
    recipe = load_recipe(Path("recipes/llama31_8b/sft.yaml"))
    batch = recipe.batch.model_copy(update={"global_batch_size": 16, "micro_batch_size": 1})
    recipe = recipe.model_copy(update={"batch": batch})
    report = forecast_all(
        recipe, strategies("single", "fsdp2"), parse_machines("8x8xH100"), "", limits=False, suggests="all"
    )
    assert report.suggestion == "with batch.global_batch_size: 64, fsdp2 fits; or on 2x8xH100, fsdp2 fits"
    said = headline.in_words(report, [], next_step=["x"], is_recipe=True, num_samples=None, price=None)
    assert said.startswith("NO, on 8x8xH100: batch.global_batch_size: 16 is less than the 64 GPUs")
    assert "of 79 GiB" not in said, "the memory of one process, which nobody asked for"
    assert "take more" not in said
    larger = recipe.model_copy(update={"batch": batch.model_copy(update={"global_batch_size": 64})})
    for changed, gpus in ((larger, "8x8xH100"), (recipe, "2x8xH100")):
        (fits,) = forecast_all(changed, strategies("fsdp2"), parse_machines(gpus), "", limits=False).forecasts
        assert fits.verdict == "fits"


def test_fewer_gpus_are_powers_of_two_of_whole_machines():
    ways = [way.text for way in fewer_gpus(parse_machines("256x8xH800"), 33)]
    assert ways == ["4x8xH800", "2x8xH800", "8xH800", "4xH800", "2xH800", "1xH800"]


def test_the_heaviest_rank_is_that_of_a_loop_over_all():
    """The control: the last rank alone has less."""
    recipe = load_recipe(Path("recipes/sums/sft.yaml"))
    optim = recipe.optim.model_copy(update={"gradient_dtype": "bf16"})
    recipe = recipe.model_copy(update={"mixed_precision": "bf16"})
    num_compared, num_unequal = 0, 0
    for changed in (recipe, recipe.model_copy(update={"optim": optim})):
        traces = TraceCache(config_of(changed)[0], changed)
        for name in known_strategies():
            (strategy,) = strategies(name)
            for count in (8, 24):
                try:
                    fitted = strategy.for_processes(count, 8).of_width(traces.sizes.hidden)
                    inputs = cost_inputs(changed, fitted, count, num_local=8)
                    every = [states(traces.skeleton, inputs, rank) for rank in range(count)]
                except (RecipeError, ZeroDivisionError, IndexError):  # a mesh that this model has not
                    continue
                assert heaviest(traces.skeleton, inputs) == max(every, key=lambda held: held.gpu.total), name
                num_compared += 1
                num_unequal += every[-1].gpu.total < max(held.gpu.total for held in every)
    assert num_compared > 20 and num_unequal > 2


def test_a_long_step_of_a_pipeline_holds_what_all_its_turns_do():
    def by_turns(count: int, stage: int, stages: int, chunks: int) -> set[StagePass]:
        moments, counts, is_first = set(), [0] * chunks, True
        for is_backward, chunk, _ in pipeline_order(count, stage, stages, chunks):
            counts[chunk] += not is_backward
            moments.add(StagePass(chunk=chunk, counts=tuple(counts), is_first=is_first))
            counts[chunk] -= is_backward
            is_first = is_first and not is_backward
        return moments

    for stages in (2, 4):
        for chunks in (1, 2, 3):
            for count in (1, stages, 63, 64, 97, 130, 255):
                for stage in (0, stages - 1):
                    assert stage_passes(count, stage, stages, chunks) == by_turns(count, stage, stages, chunks)
    assert stage_passes(10**10, 0, 4, 2) == stage_passes(400, 0, 4, 2)


def test_micro_batches_of_a_huge_batch_are_found_at_once():
    assert even(12) == [1, 2, 3, 4, 6, 12]
    assert even(10**10)[-1] == max(size for size in range(1, MOST_SAMPLES + 1) if 10**10 % size == 0)


def test_the_next_command_is_of_the_run_that_was_asked(capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(console, "WIDTH", 80)
    asked = ["adapter={name: lora, rank: 3}", "data.max_length=24", "batch.micro_batch_size=25"]
    sets = [word for assignment in asked for word in ("--set", assignment)]

    def following(*words: str) -> list[str]:
        lines = answer(capsys, *words)
        (first,) = (i for i, line in enumerate(lines) if re.match(r" +next:? ", line))
        return shlex.split("\n".join(lines[first:]).replace("\\\n", "").partition("cookbook ")[2])

    _, recipe, *options = following(SMALL, *sets, "--gpus", "1xH100", "--strategy", "single")
    by_auto = ["batch.micro_batch_size=auto", "model.gradient_checkpointing=auto"]
    obeyed = [word for name, word in pairwise(options) if name == "--set"]
    assert load_recipe(Path(recipe), obeyed) == load_recipe(Path(SMALL), [*asked[:2], *by_auto])
    assert load_recipe(Path(recipe), obeyed) != load_recipe(Path(SMALL), by_auto), "the control: without what was asked"

    own = tmp_path / "own.yaml"
    own.write_text((ROOT / "accelerate_configs" / "fsdp2.yaml").read_text())
    options = following(SMALL, "--gpus", "1xH100", "--strategy", str(own))
    assert options[options.index("--strategy") + 1] == str(own)

    cards = following(SMALL, *sets[:4], "--gpus", "any", "--strategy", "zero3")
    assert cards[:-1] == ["plan", SMALL, *sets[:4], "--strategy", "zero3", "--gpus"]


def test_a_length_beyond_the_models_positions_is_refused_as_a_run_refuses_it(capsys, tmp_path: Path):
    """A model's own length, which nobody wrote, is within them; the control is the largest length that it has."""
    words = ("--gpus", "1xH100", "--strategy", "single")
    with pytest.raises(RecipeError) as of_run:
        load_config("recipes/sums/model", 2049)
    for asked in ((SMALL, "--set", "data.max_length=2049"), ("recipes/sums/model", "--length", "2049")):
        assert main(["plan", *asked, *words]) == 2
        assert capsys.readouterr().err.strip() == str(of_run.value)
    assert answer(capsys, SMALL, "--set", "data.max_length=2048", *words)
    short = json.loads(Path("recipes/sums/model/config.json").read_text()) | {"max_position_embeddings": 40}
    (tmp_path / "config.json").write_text(json.dumps(short))
    assert answer(capsys, str(tmp_path), *words)


def test_what_a_forecast_of_time_leaves_out_is_said_and_no_time_is_invented(tmp_path: Path):
    """Routing of experts is not in the time, and attention without a kernel has no time of compiled layers, whose
    formulas know no scores. Llama has neither.
    """
    machines, (single,) = parse_machines("1xH100"), strategies("single")
    least = ["batch.global_batch_size=1", "batch.micro_batch_size=1", "model.gradient_checkpointing=true"]
    for model_type, has_both in (("gpt_oss", True), ("llama", False)):
        tiny_config(model_type).save_pretrained(tmp_path / model_type)
        recipe = recipe_of_model(str(tmp_path / model_type), "lora", 32, machines, least)
        report = forecast_all(recipe, [single], machines, "", limits=False)
        of_machine = headline.in_words(report, [], next_step=["x"], is_recipe=True, num_samples=None, price=None)
        cards = for_each_card(recipe, [single], "", [find_gpu("H100")], room={})
        for said in (of_machine, card_table.in_words(cards, "", ["x"], num_samples=None, is_all=True)):
            words = " ".join(said.split())
            assert ("experts: routing, uneven loads" in words) == ("no kernel computes" in words) == has_both
        compiled = time_compiled(TraceCache(config_of(recipe)[0], recipe), single, machines)
        assert (compiled is None) == has_both
        compiles = recipe.model_copy(update={"model": recipe.model.model_copy(update={"compile": True})})
        config, plan = config_of(recipe)[0], report.forecasts[0].plan
        time = time_of_run(config, compiles, single, plan, machines.gpu, None)
        reason = why_no_time(TraceCache(config, compiles), machines)
        assert (time == reason) == has_both and (reason is None) == isinstance(time, Range)
        assert reason is None or "no forecast of time with model.compile: no kernel" in reason


def test_the_range_if_fused_ends_where_the_compiled_recipe_does(tmp_path: Path):
    """From the slow end of the model's code to the fast end of `model.compile: true`, here by its own forecast."""
    machines, (single,) = parse_machines("1xH100"), strategies("single")
    tiny_config("llama").save_pretrained(tmp_path)
    least = ["batch.global_batch_size=4", "batch.micro_batch_size=2", "model.gradient_checkpointing=true"]
    plain, compiled = (
        forecast_all(
            recipe_of_model(str(tmp_path), "full", 32, machines, [*least, f"model.compile={value}"]),
            [single],
            machines,
            "",
            limits=False,
        )
        for value in ("false", "true")
    )
    (of_code,), (fused,) = (report.forecasts for report in (plain, compiled))
    assert fused.time.low < of_code.time.low, "else both ranges are one"
    (row,) = as_record(plain, "", num_samples=None, price=None)["forecasts"]
    tokens = 4 * 32
    assert row["tokens_per_second_a_gpu_if_fused"] == pytest.approx(
        [tokens / of_code.time.high, tokens / fused.time.low]
    )
    said = in_words(plain, "", num_samples=None, price=None)
    assert re.search(r"if fused [\d,]+ to [\d,]+ tokens/s a GPU", said)
    (row,) = as_record(compiled, "", num_samples=None, price=None)["forecasts"]
    assert "tokens_per_second_a_gpu_if_fused" not in row and "if fused" not in in_words(
        compiled, "", num_samples=None, price=None
    )


def test_how_machines_were_read_is_said_beside_the_answer(capsys):
    """More GPUs than a machine has are several machines; of AMD's all is arithmetic; one machine has no network."""
    sets = [
        f"--set={setting}"
        for setting in ("mixed_precision=bf16", "batch.global_batch_size=32", "batch.micro_batch_size=2")
    ]

    def said(*words: str) -> str:
        return " ".join(" ".join(answer(capsys, SMALL, *sets, *words)).split())

    assert "note 16xH100 is taken for 2 machines of 8" in said("--strategy", "ddp", "--gpus", "16xH100")
    assert "note" not in said("--strategy", "ddp", "--gpus", "2x8xH100").split()
    of_amd = said("--strategy", "single", "--gpus", "1xMI300X", "--fabric", "200")
    assert "tried on ROCm" in of_amd and "note --fabric is of messages between machines" in of_amd


def test_gpus_that_nobody_asked_for_are_named_with_their_reason(capsys, monkeypatch):
    """A label asks for one GPU of 16 GB; GPUs of this machine, and those that are asked for, need no reason."""
    path = "recipes/smollm2_135m/sft.yaml"
    assert re.search(r"^# Needs: +1 GPU of 16 GB", Path(path).read_text(), flags=re.MULTILINE)
    short = ("--set", "data.max_length=64", "--strategy", "single")
    said = " ".join(" ".join(answer(capsys, path, *short)).split())
    assert "on 1x16GB" in said and "1x16GB, which the recipe's label names" in said and "--gpus any" in said
    assert "note" not in " ".join(answer(capsys, path, "--gpus", "1x16GB", *short)).split(), "asked for"
    of_label = planning.machines_or_any(Path(path), None, {})
    assert of_label is not None and (of_label.text, bool(of_label.notes)) == ("1x16GB", True)
    too_small = replace(of_label, usable_gib=0.1)
    report = forecast_all(load_recipe(Path(SMALL)), strategies("single"), too_small, "", limits=False)
    said = headline.in_words(report, [], next_step=["x"], is_recipe=True, num_samples=None, price=None)
    assert said.startswith("NO,") and "which the recipe's label names" in " ".join(said.split())
    monkeypatch.setattr(planning, "this_machine", lambda: parse_machines("2xH100"))
    here = planning.machines_or_any(Path(path), None, {})
    assert here is not None and (here.num_gpus, here.notes) == (2, [])


def test_times_have_the_unit_that_suits():
    words = [hours_in_words(low / 3600, high / 3600) for low, high in ((1.2, 6), (60, 180), (1800, 7200))]
    assert words == ["1.2 to 6 s", "1 to 3 minutes", "0.5 to 2 hours"]


def test_what_was_asked_of_a_model_is_said_beside_init_which_chooses_for_itself(capsys):
    words = ("recipes/sums/model", "--gpus", "1xH100", "--strategy", "single")
    assert "then" not in " ".join(answer(capsys, *words)).split()
    said = " ".join(" ".join(answer(capsys, *words, "--method", "full", "--length", "32")).split())
    assert said.endswith("its recipe is to have no adapter, data.max_length: 32")
    said = " ".join(" ".join(answer(capsys, *words, "--method", "lora", "--set", "optim.learning_rate=0.1")).split())
    assert said.endswith("its recipe is to have adapter.name: lora, optim.learning_rate: 0.1")


@pytest.mark.slow
@pytest.mark.parametrize("gpus", ["2048x8xH100", "256x8xH800"])
def test_thousands_of_gpus_are_answered(gpus, capsys):
    words = ("NousResearch/Meta-Llama-3.1-8B", "--method", "full", "--gpus", gpus)
    assert answer(capsys, *words)[0].startswith("YES")


def test_the_answer_of_a_plan_is_among_what_auto_takes():
    recipe = load_recipe(Path(SMALL)).model_copy(update={"mixed_precision": "bf16"})
    report = forecast_all(recipe, strategies("single", "fsdp2"), parse_machines("1xH100"), "", limits=False)
    settings = by_auto(report, "", all_of_them=True)
    said = headline.in_words(report, settings, next_step=["x"], is_recipe=True, num_samples=None, price=3.0)
    best = headline.best_by_auto(report, settings)
    tokens = recipe.batch.global_batch_size * recipe.data.max_length
    hours = [seconds * 1e7 / tokens / 3600 for seconds in (best.best.time.low, best.best.time.high)]
    low, high = (float(text) for text in re.findall(r"price ([\d.]+) to ([\d.]+)", " ".join(said.split()))[0])
    if recipe.run.max_steps is None:
        assert (low, high) == (pytest.approx(3 * hours[0], rel=0.06), pytest.approx(3 * hours[1], rel=0.06))
