"""Results that `cookbook plan` keeps on disk: found by whoever asks the same, made again by whoever does not."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, clean_environment
from towers import whole_config
from transformers import AutoConfig, PreTrainedConfig

from cookbook.config.recipe import Recipe, dump_recipe, load_recipe
from cookbook.config.strategy import load_strategy
from cookbook.forecast import verdict
from cookbook.forecast.activations import ActivationTrace
from cookbook.forecast.costs.inputs import Skeleton
from cookbook.forecast.verdict import TraceCache
from cookbook.run import auto_settings
from cookbook.start.run_plan import make_plan
from cookbook.system import kept_results
from cookbook.system.hardware import parse_machines
from cookbook.training.models import structure

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def config_of(**sizes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model("llama", **SIZES | sizes)


def recipe(**sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "strategy": "accelerate_configs/single.yaml",
        "mixed_precision": "bf16",
        "model": {"name_or_path": "x/y"},
        "data": {"train": "python-stdlib", "max_length": 16},
        "batch": {"global_batch_size": 4, "micro_batch_size": 1},
        "optim": {"learning_rate": 1e-4},
        "run": {"max_steps": 1, "output_dir": "out"},
    }
    return Recipe(**values | sections)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ActivationTrace]:
    """The traces that were made, and not found."""
    traces: list[ActivationTrace] = []
    trace_pass = verdict.trace_pass

    def counted(*args: Any, **options: Any) -> ActivationTrace:
        traces.append(trace_pass(*args, **options))
        return traces[-1]

    monkeypatch.setattr(verdict, "trace_pass", counted)
    monkeypatch.setattr(verdict, "TRACES", {})
    monkeypatch.setattr(verdict, "SKELETONS", {})
    return traces


def ask(cache: Path | None, settings: Recipe | None = None, strategy: str = "single", **sizes: Any) -> ActivationTrace:
    """The trace of a question in a process that has made none before."""
    verdict.TRACES.clear()
    verdict.SKELETONS.clear()
    with kept_results.kept_results(cache):
        loaded = load_strategy(Path(f"accelerate_configs/{strategy}.yaml"))
        return TraceCache(config_of(**sizes), settings or recipe()).work(loaded, 1)


def files(cache: Path) -> list[Path]:
    """Files of traces; beside each model's is its skeleton."""
    return [path for path in cache.rglob("*") if path.is_file() and "phases" in path.read_text()]


def test_the_second_question_finds_the_trace_of_the_first(made: list[ActivationTrace], tmp_path: Path):
    first, again = ask(tmp_path), ask(tmp_path)
    assert again == first and len(made) == 1 and len(files(tmp_path)) == 1
    ask(None)
    assert len(made) == 2, "outside of the context"


def test_the_second_question_finds_the_skeleton_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[Skeleton] = []
    skeleton_of = verdict.skeleton_of
    monkeypatch.setattr(verdict, "skeleton_of", lambda *args: made.append(skeleton_of(*args)) or made[-1])
    adapted = recipe(adapter={"name": "lora", "rank": 2})
    for settings, sizes in ((recipe(), {}), (adapted, {}), (adapted, {"tie_word_embeddings": True})):
        asked = []
        for _ in range(2):
            monkeypatch.setattr(verdict, "SKELETONS", {})
            with kept_results.kept_results(tmp_path):
                asked.append(TraceCache(config_of(**sizes), settings))
        assert asked[0].skeleton == asked[1].skeleton == made[-1] and asked[0].sizes == asked[1].sizes
    assert len(made) == 3


def test_the_second_question_finds_the_words_about_a_part_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    counted: list[str] = []
    count_part = structure._count_part
    monkeypatch.setattr(structure, "_count_part", lambda config: counted.append(count_part(config)) or counted[-1])
    for vocab_size in (97, 98):
        config = whole_config("gemma3")
        config.text_config.vocab_size = vocab_size
        words = []
        for _ in range(2):
            monkeypatch.setattr(structure, "COUNTED", {})
            with kept_results.kept_results(tmp_path):
                words.append(structure.part_in_words(config))
        assert words == [counted[-1]] * 2
    assert len(counted) == len(set(counted)) == 2


PLAN = """
import sys
from cookbook.commands.cli import main
code = main(["plan", *sys.argv[1:], "--gpus", "1x24GB"])
print("MODELS", code, "transformers.modeling_utils" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "recipe.yaml"])
def test_the_second_question_loads_no_code_of_models(what: str, tmp_path: Path):
    """It takes seconds, and only a new trace needs it. The recipe's model has a tower, whose parameters are told."""
    config_of().save_pretrained(tmp_path / "model")
    whole_config("gemma3").save_pretrained(tmp_path / "tower")
    settings = recipe(model={"name_or_path": "tower", "gradient_checkpointing": "auto"}, adapter={"name": "lora"})
    (tmp_path / "recipe.yaml").write_text(dump_recipe(settings))
    here = clean_environment(PYTHONPATH=str(ROOT))
    answers = [
        subprocess.run([sys.executable, "-c", PLAN, what], cwd=tmp_path, env=here, capture_output=True, text=True)
        for _ in range(2)
    ]
    lines = [answer.stdout.partition("MODELS ") for answer in answers]
    assert [line[2].strip() for line in lines] == ["0 True", "0 False"], answers
    assert lines[0][0] == lines[1][0] and "YES" in lines[0][0]


# What a trace depends on, and what it does not: optimizer, steps and folders are no part of a forward and backward.
OTHERS: list[dict[str, Any]] = [
    {"settings": recipe(data={"train": "python-stdlib", "max_length": 32})},
    {"settings": recipe(mixed_precision="no")},
    {"settings": recipe(adapter={"name": "lora", "rank": 2})},
    {"settings": recipe(model={"name_or_path": "x/y", "gradient_checkpointing": True})},
    {"settings": recipe(objective={"name": "cpt"})},
    {"strategy": "fsdp2"},
    {"vocab_size": 65},
    {"num_key_value_heads": 4},
]
SAME: list[dict[str, Any]] = [
    {"settings": recipe(optim={"learning_rate": 1e-5})},
    {"settings": recipe(run={"max_steps": 7, "output_dir": "elsewhere"})},
    {"settings": recipe(batch={"global_batch_size": 8, "micro_batch_size": 1})},
]


@pytest.mark.parametrize("question", OTHERS, ids=lambda question: str(next(iter(question))))
def test_another_question_has_a_trace_of_its_own(question: dict[str, Any], made: list[ActivationTrace], tmp_path: Path):
    ask(tmp_path)
    other = ask(tmp_path, **question)
    assert len(made) == 2 and other == made[1]


def test_what_is_no_part_of_a_micro_batch_changes_nothing(made: list[ActivationTrace], tmp_path: Path):
    traces = [ask(tmp_path, **question) for question in ({}, *SAME)]
    assert len(made) == 1 and traces == made * 4


def test_traces_of_other_code_are_not_found_and_go(
    made: list[ActivationTrace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ask(tmp_path)
    package = tmp_path / "package"
    package.mkdir()
    (package / "trace.py").write_text("changed = True\n")
    monkeypatch.setattr(kept_results, "PACKAGE", package)
    kept_results._code_digest.cache_clear()
    try:
        ask(tmp_path / "cache")
        (before,) = files(tmp_path / "cache")
        (package / "trace.py").write_text("changed = False\n")
        kept_results._code_digest.cache_clear()
        ask(tmp_path / "cache")
        (after,) = files(tmp_path / "cache")
    finally:
        monkeypatch.undo()
        kept_results._code_digest.cache_clear()
    assert len(made) == 3 and before.name == after.name and before.parent != after.parent


def test_a_library_s_other_version_makes_its_own(
    made: list[ActivationTrace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ask(tmp_path)
    monkeypatch.setattr(kept_results, "installed_version", lambda name: "0.1")
    kept_results._code_digest.cache_clear()
    try:
        ask(tmp_path)
    finally:
        kept_results._code_digest.cache_clear()
    assert len(made) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"phases": 3}', '{"phases": [{"name": "embed", "layer": "x"}]}'])
def test_a_damaged_trace_is_made_again(content: str, made: list[ActivationTrace], tmp_path: Path):
    first = ask(tmp_path)
    (path,) = files(tmp_path)
    path.write_text(content)
    assert ask(tmp_path) == first and len(made) == 2
    assert ask(tmp_path) == first and len(made) == 2


def test_a_cache_that_cannot_be_written_keeps_none(made: list[ActivationTrace], tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    assert ask(tmp_path / "cache") == ask(tmp_path / "cache")
    assert len(made) == 2 and (tmp_path / "cache").read_text() == "a file"


@pytest.mark.parametrize("settings", [{"plugins": ["mine.py"]}, {"model": {"name_or_path": "x/y", "kernels": ["fla"]}}])
def test_what_other_code_computes_is_not_kept(settings: dict[str, Any], tmp_path: Path):
    """No key tells one version of that code from another."""
    traces = TraceCache(config_of(), recipe().model_copy(update=dict(recipe(**settings))))
    with kept_results.kept_results(tmp_path):
        traces._keep(("a key",), ActivationTrace(phases=()))
    assert files(tmp_path) == []


def test_a_start_finds_the_traces_of_another(
    made: list[ActivationTrace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Choices of `auto` are the same, and nothing is traced for them; without the folder all is."""
    monkeypatch.setattr(auto_settings, "machines_of", lambda plan: parse_machines("1x24GB"))
    path = Path("recipes/quickstart.yaml")
    keys = ["batch.micro_batch_size=auto", "model.gradient_checkpointing=auto", "mixed_precision=bf16"]
    settings, single = load_recipe(path, keys), load_strategy(Path("accelerate_configs/single.yaml"))
    plan = make_plan(settings, single, num_processes=1, num_gpus=1, recipe_name=str(path))
    choices, counts = [], []
    for cache in (tmp_path, tmp_path, None):
        verdict.TRACES.clear()
        choices.append(auto_settings.choose(path, settings, single, plan, cache=cache))
        counts.append(len(made))
    assert choices[0] == choices[1] == choices[2] and "by the forecast" in choices[0]["batch.micro_batch_size"][1]
    assert counts[1] == counts[0] > 2 and counts[2] == 2 * counts[0]
