"""Protects rehearsals: every shipped recipe passes one for real, and a mistake makes one fail with its name.

Each starts the processes of its strategy, two by `accelerate launch` as a user's does, the others forked from a warm
parent: python -m pytest -q tests/test_rehearse.py -m slow
"""

import json
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment
from transformers import AutoConfig

from cookbook.commands.cli import main
from cookbook.commands.rehearse import rehearsal, small_recipe, standins
from cookbook.commands.rehearse.recompute import recompute
from cookbook.commands.rehearse.rehearsal import _find_error
from cookbook.config.objectives import Objective
from cookbook.config.strategy import find_strategy
from cookbook.facts import offline
from cookbook.facts.attention_layers import attention_layers
from cookbook.facts.packing import Packing
from cookbook.start.run_plan import load_pair
from cookbook.system.files import RecipeError
from tests.needs import need_builds_of, need_simulated_gpus

RECIPES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.yaml"))


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in set(rehearsal.os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(standins, "hub_answers", lambda: False)


def rehearsal_of(recipe: str, *assignments: str, strategy: str | None = None, on: str | None = None) -> int:
    path = find_strategy(strategy) if strategy else None
    return rehearsal.rehearse(Path(recipe), assignments=list(assignments), strategy=path, processes=None, on=on)


@pytest.fixture
def forked(gpu_lab, monkeypatch):
    """The processes of rehearsals are forked from a warm parent, and not started by `accelerate launch`."""

    def run(rehearsal, small, log):
        words = ["train.py", str(small), "--set", f"strategy={rehearsal.strategy.path}"]
        parent = gpu_lab.parent("cpu" if rehearsal.place == "CPU" else "gpu")
        adapter = rehearsal.recipe.adapter
        options = {"processes": rehearsal.num_processes, "limit": LIMIT_SECONDS}
        options["eager"] = adapter is not None and adapter.is_quantized  # bitsandbytes compiles on the CPU
        answer = parent.run(rehearsal.folder, words, **options)
        log.write_text("".join(path.read_text() for path in sorted(rehearsal.folder.glob("log_*"))))
        return next((code if code == 2 else 1 for code in answer["codes"] if code), 0)

    monkeypatch.setattr(rehearsal, "_run", run)


LIMIT_SECONDS = 240
LAUNCHED = ("recipes/quickstart.yaml", "recipes/qwen25_7b/sft.yaml")
ALIKE = ("orpo_lora", "sft_dora", "llama31_8b/sft_lora", "qwen3_4b/sft_lora", "llama31_70b/sft_qlora", "llama32_3b")
ALIKE += ("llama31_8b/sft.yaml", "qwen3_4b/sft.yaml", "qwen3_4b_32k", "qwen3_30b_a3b/sft.yaml", "llama33_70b")
ALIKE += ("smollm3_3b", "qwen35_4b", "ministral3_3b", "qwen3_30b_a3b/sft_qlora")
"""As another recipe: the same objective and adapter, of another size."""


def test_there_are_recipes_to_rehearse():
    assert len(RECIPES) >= 20 and set(LAUNCHED) < set(RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(recipe, marks=pytest.mark.thorough if any(x in recipe for x in ALIKE) else ()) for recipe in RECIPES],
)
def test_a_shipped_recipe_passes_its_rehearsal(recipe, capsys, request):
    need_simulated_gpus()
    need_builds_of(load_pair(Path(recipe))[1].name)
    if recipe not in LAUNCHED:
        request.getfixturevalue("forked")
    assert rehearsal_of(recipe) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert f"REHEARSAL of {recipe}: fine" in said
    assert "evaluation loss" in said
    assert "on simulated GPUs ..." in said and "the GPU's own paths in " in said
    assert "not covered" in said


@pytest.mark.slow
def test_a_rehearsal_under_another_strategy_says_which(capsys, forked):
    assert rehearsal_of("recipes/qwen3_0_6b/sft.yaml", strategy="zero1") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 processes under accelerate_configs/zero1.yaml" in said
    assert "trained in float32, stored in bfloat16 as the base model is" in said


@pytest.mark.slow
@pytest.mark.parametrize(("on", "told"), [("gpus", "the GPU's own paths in fp16"), ("cpu", "rehearsed in float32")])
def test_a_rehearsal_in_fp16_is_one_in_fp16_where_there_are_gpus(on, told, capsys, forked):
    if on == "gpus":
        need_simulated_gpus()
    assert rehearsal_of("recipes/qwen3_0_6b/sft.yaml", "mixed_precision=fp16", strategy="fsdp2", on=on) == 0
    assert told in capsys.readouterr().out


def test_without_a_compiler_a_rehearsal_says_so_and_takes_the_cpu(monkeypatch):
    monkeypatch.setattr(rehearsal.simulated_gpus, "problem", lambda: None)
    assert rehearsal._choose_place(None) == ("simulated GPUs", None)
    assert rehearsal._choose_place("cpu") == ("CPU", None)
    monkeypatch.setattr(rehearsal.simulated_gpus, "problem", lambda: "there is no C++ compiler")
    place, why = rehearsal._choose_place(None)
    assert place == "CPU" and "there is no C++ compiler" in why
    with pytest.raises(RecipeError, match=r"--on gpus: .*no C\+\+ compiler"):
        rehearsal._choose_place("gpus")


def test_real_gpus_come_before_simulated_ones(monkeypatch):
    monkeypatch.setattr(rehearsal, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(rehearsal, "num_gpus", lambda: 2)
    assert rehearsal._choose_place(None) == rehearsal._choose_place("gpus") == ("GPUs", None)


@pytest.mark.slow
def test_an_adapter_target_that_matches_nothing_fails_the_rehearsal_by_its_name(capsys, forked):
    code = rehearsal_of("recipes/qwen3_0_6b/sft_lora.yaml", "adapter.targets=[q_porj]", strategy="single")
    said = capsys.readouterr().err
    assert code == 2, said
    assert "q_porj" in said
    assert "q_proj" in said, "does not say which there are"
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_chat_template_that_marks_nothing_fails_the_rehearsal_by_its_name(tmp_path, capsys, forked):
    """The markers stand around nothing: no token would carry loss."""
    text = (ROOT / "recipes/chat_templates/chatml.jinja").read_text()
    turn = '{{- message["content"] + "<|im_end|>" -}}\n        {%- endgeneration -%}'
    assert turn in text
    template = tmp_path / "unmarked.jinja"
    template.write_text(text.replace(turn, '{%- endgeneration -%}\n        {{- message["content"] + "<|im_end|>" -}}'))
    code = rehearsal_of("recipes/qwen3_0_6b/sft.yaml", f"data.chat_template={template}", strategy="single")
    said = capsys.readouterr().err
    assert code == 2, said
    assert "the chat template marks 0 stretches of assistant tokens" in said
    assert "data.chat_template" in said


@pytest.mark.slow
def test_an_export_with_the_untrained_weights_fails_the_rehearsal(monkeypatch, capsys, forked):
    run = rehearsal._run

    def run_and_forget(rehearsal, small, log):
        code = run(rehearsal, small, log)
        for path in (small.parent / "model").glob("*.safetensors"):
            shutil.copy(path, small.parent / "out" / "export" / path.name)
        return code

    monkeypatch.setattr(rehearsal, "_run", run_and_forget)
    assert rehearsal_of("recipes/qwen3_0_6b/sft.yaml", strategy="single") == 1
    assert "the export, opened by transformers, has an evaluation loss of" in capsys.readouterr().err


def test_an_unknown_model_without_network_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(rehearsal, "_run", lambda *_: pytest.fail("a run was started"))
    with pytest.raises(RecipeError, match=r"someone/unheard-of.*offline_facts\.json"):
        rehearsal_of("recipes/qwen3_0_6b/sft.yaml", "model={name_or_path: someone/unheard-of}")


def test_a_batch_that_does_not_split_at_full_size_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(rehearsal, "_run", lambda *_: pytest.fail("a run was started"))
    with pytest.raises(RecipeError, match=r"batch\.global_batch_size is 102, but 4 processes x micro_batch_size 1 "):
        rehearsal_of("recipes/qwen25_7b/sft.yaml", "batch.global_batch_size=102")


def test_rows_of_the_hub_are_read_when_it_answers(monkeypatch, tmp_path):
    raw = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "x"}], "id": i}
        for i in range(9)
    ]
    asked = []

    def raw_rows(source, *, streaming):
        asked.append((source.path, streaming))
        return ((f"row {i}", row) for i, row in enumerate(raw))

    monkeypatch.setattr(standins, "hub_answers", lambda: True)
    monkeypatch.setattr(standins, "raw_rows", raw_rows)
    recipe = Packing(True, "").settle(load_pair(Path("recipes/qwen3_0_6b/sft.yaml"))[0])
    sources, rows, are_own = standins.few_rows(recipe, 5, tmp_path, standins.Notes())
    assert asked == [("trl-lib/Capybara", True)]
    assert are_own
    assert [row["messages"][0]["content"] for row in rows.rows] == ["0", "1", "2", "3", "4"]
    assert [Path(source.path).parent for source in sources] == [tmp_path]


def test_a_model_in_a_folder_brings_its_own_configuration_and_tokenizer(tmp_path):
    recipe = load_pair(Path("recipes/llama31_8b/sft.yaml"))[0]
    rows = standins.Rows(kind="messages", rows=standins.synthetic_rows("messages", 4))
    assert not standins.write_tiny_model(recipe, rows, tmp_path / "first", standins.Notes())
    model = recipe.model.model_copy(update={"name_or_path": str(tmp_path / "first"), "revision": None})
    notes = standins.Notes()
    assert standins.write_tiny_model(recipe.model_copy(update={"model": model}), rows, tmp_path / "second", notes)
    assert "its own configuration, with its own tokenizer" in notes.covered[0]
    tokenizers = [(tmp_path / name / "tokenizer.json").read_text() for name in ("first", "second")]
    assert tokenizers[0] == tokenizers[1]


LONG = {"prompt": "word " * 2000, "completion": "x"}
SHORT = [{"prompt": f"p{i}", "completion": f"a{i}"} for i in range(6)]


def test_rows_that_only_the_small_length_cuts_to_nothing_do_not_fail_a_rehearsal(tmp_path):
    first = load_pair(Path("recipes/qwen3_0_6b/sft.yaml"))[0]
    standins.write_tiny_model(first, standins.Rows(kind="completion", rows=SHORT), tmp_path / "own", standins.Notes())
    standins.write_jsonl(tmp_path / "rows.jsonl", [LONG, *SHORT])
    recipe, strategy = load_pair(
        Path("recipes/qwen3_0_6b/sft.yaml"),
        [f"data.train={tmp_path}/rows.jsonl", "data.max_length=4096", f"model={{name_or_path: {tmp_path}/own}}"],
    )
    rehearsal = small_recipe.Rehearsal(recipe=recipe, strategy=strategy, num_processes=2, place="CPU", folder=tmp_path)
    small = load_pair(small_recipe.write_small_recipe(rehearsal, Path("mine.yaml")))[0]
    assert (small.data.max_length, small.data.on_bad_row) == (1024, "drop")
    held_out = (tmp_path / "eval.jsonl").read_text()
    assert "word" not in held_out and held_out.count("\n") == small_recipe.NUM_EVAL_ROWS


def test_a_rehearsal_is_no_experiment_of_a_tracker(tmp_path):
    recipe, strategy = load_pair(Path("recipes/quickstart.yaml"))
    tracked = recipe.model_copy(update={"run": recipe.run.model_copy(update={"trackers": ["tensorboard"]})})
    rehearsal = small_recipe.Rehearsal(recipe=tracked, strategy=strategy, num_processes=2, place="CPU", folder=tmp_path)
    assert "tracker" not in small_recipe.write_small_recipe(rehearsal, Path("mine.yaml")).read_text()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_recomputed_loss_leaves_out_what_the_length_cuts_to_nothing(tmp_path, smoothing):
    recipe = load_pair(Path("recipes/qwen3_0_6b/sft.yaml"))[0]
    rows = [LONG, *SHORT]
    sample = standins.Rows(kind="completion", rows=SHORT)
    standins.write_tiny_model(recipe, sample, tmp_path / "model", standins.Notes())
    small = {
        "objective": {"name": "sft"},
        "data": {"max_length": 64},
        "mixed_precision": "no",
        "model": {"name_or_path": str(tmp_path / "model")},
    }
    objective, losses = Objective.of(name="sft", label_smoothing=smoothing), []
    for name, kept in (("all.jsonl", rows), ("short.jsonl", rows[1:])):
        standins.write_jsonl(tmp_path / name, kept)
        losses.append(recompute(tmp_path / "model", small, objective, tmp_path / name))
    assert losses[0] == losses[1] > 0


@pytest.mark.parametrize("processes", [0, -1])
def test_an_impossible_number_of_processes_is_refused(processes, capsys):
    assert main(["rehearse", RECIPES[0], "--processes", str(processes)]) == 2
    assert f"--processes is {processes}; write a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("name", json.loads((ROOT / "recipes/offline_facts.json").read_text())["models"])
def test_the_tiny_model_keeps_the_structure_of_the_large_one(name):
    facts = offline.known_model(name)
    assert facts is not None
    large = AutoConfig.for_model(**facts["config"])
    small = standins.shrink(large, 1000)
    assert type(small) is type(large)
    for key in ("tie_word_embeddings", "rope_parameters", "rms_norm_eps", "sliding_window", "attention_bias"):
        assert getattr(small, key, None) == getattr(large, key, None), key
    first_of_kinds = [{layer.window: layer for layer in reversed(attention_layers(c))} for c in (small, large)]
    assert len(first_of_kinds[0]) == len(first_of_kinds[1])
    for a, b in zip(*(kinds.values() for kinds in first_of_kinds), strict=True):
        assert a.num_heads * b.num_key_heads == b.num_heads * a.num_key_heads or a.num_key_heads == 1
        assert a.width / small.hidden_size == b.width / large.hidden_size
    assert small.hidden_size % 2 == 0
    assert standins.shrink(large, 1000, 6).num_hidden_layers == 6
    assert small.vocab_size == 1024


@pytest.mark.parametrize(
    "model_type",
    ["deepseek_v3", "gemma3n_text", "glm4_moe", "granitemoehybrid", "kimi_linear", "mamba2", "nemotron_h", "zamba2"],
)
def test_a_type_whose_sizes_depend_on_one_another_is_made_small_with_all_its_layers(model_type):
    large = AutoConfig.for_model(model_type)
    small = standins.small_model(large, Tokens(), 2).config
    assert small.model_type == model_type and small.vocab_size == 1024
    for key in ("layer_types", "layers_block_type", "mlp_layer_types"):
        assert set(getattr(small, key, ())) >= set(getattr(large, key, ())), key


def test_a_type_that_cannot_be_made_small_is_refused_in_words():
    with pytest.raises(RecipeError, match=r"model of type xlstm: .* cannot: .*\n.*run\.max_steps=3"):
        standins.small_model(AutoConfig.for_model("xlstm"), Tokens(), 2)


class Tokens:
    """A tokenizer of 1,000 tokens."""

    bos_token_id, eos_token_id, pad_token_id = 1, 2, 0

    def __len__(self):
        return 1000


LOGS = {
    "a mistake of the user": (
        "note\n\ndata.train: row 1: bad\nMend it\n\nE1120 13:00:00.0 1 torch/distributed/elastic/api.py] failed\n"
        "Traceback (most recent call last):\nChildFailedError",
        "data.train: row 1: bad\nMend it",
    ),
    "a crash": (
        "said before\nTraceback (most recent call last):\n  File x\nKeyError: 'a'\n\nW1120 13:00:00.0 1"
        " torch/distributed/elastic/api.py] Sending\nlater",
        "Traceback (most recent call last):\n  File x\nKeyError: 'a'",
    ),
    "a mistake in a single process": (
        "\nadapter.targets has 'x'\n\nTraceback (most recent call last):\n  File accelerate\n"
        "subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 2.\n",
        "adapter.targets has 'x'",
    ),
    "silence": ("", "the run ended without a message"),
}


@pytest.mark.parametrize(("log", "told"), LOGS.values(), ids=LOGS)
def test_find_error_is_shown_without_the_launchers_own_report(tmp_path, log, told):
    path = tmp_path / "log.txt"
    path.write_text(log)
    assert _find_error(path) == told
