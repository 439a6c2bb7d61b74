"""Protects the library: every recipe loads, fits its strategy and the hardware in its label, and is on its page.

python -m pytest -q tests/test_recipes.py
"""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT

from cookbook import library
from cookbook.costs.inputs import cost_inputs
from cookbook.costs.memory import states
from cookbook.forecast.skeleton import skeleton
from cookbook.models.structure import find_config
from cookbook.plan import load_pair, make_plan
from cookbook.recipe import BUILTIN_SOURCE, Recipe, load_recipe
from cookbook.strategy import load_strategy

QUICKSTART = "recipes/quickstart.yaml"
RECIPES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.yaml"))
LIBRARY = [name for name in RECIPES if name != QUICKSTART and Path(name).parent != Path("recipes")]
FACTS = json.loads((ROOT / "recipes/offline_facts.json").read_text())


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_library_is_there():
    assert len(LIBRARY) >= 19
    assert "recipes/qwen25_7b/sft_zero3.yaml" in LIBRARY  # make finetune-7b


@pytest.mark.parametrize("name", LIBRARY)
def test_a_recipe_is_short_and_its_label_complete(name):
    lines = Path(name).read_text().splitlines()
    assert 25 <= len(lines) <= 40
    assert lines[0] == "# yaml-language-server: $schema=../schema.json"
    assert (Path(name).parent / lines[0].split("=")[1]).is_file()
    label = library.read_label(Path(name))
    assert list(label) == list(library.LABEL)
    assert all(label.values())
    assert label["Run"] == f"make train RECIPE={name}"
    assert library.read_needs(label).num_gpus
    assert "Arithmetic, not measured" in label["Needs"] or not label["Measured"].startswith("not yet")
    assert re.search(r"arXiv \d{4}\.\d{5}|https://\S+|trl/scripts/", label["Settings"]), "no published source"


@pytest.mark.parametrize("name", LIBRARY)
def test_a_recipe_is_named_by_its_model_objective_adapter_and_strategy(name):
    recipe = load_recipe(Path(name))
    parts = [recipe.objective.name, recipe.adapter.name if recipe.adapter else None, Path(recipe.strategy).stem]
    assert Path(name).stem == "_".join(filter(None, parts))
    assert recipe.run.output_dir == f"outputs/{Path(name).parent.name}-{Path(name).stem}"


@pytest.mark.parametrize("name", LIBRARY)
def test_a_recipe_has_a_plan_on_the_gpus_of_its_label(name):
    recipe, strategy = load_pair(Path(name))
    count = library.read_needs(library.read_label(Path(name))).num_gpus
    assert count is not None
    plan = make_plan(recipe, strategy, num_processes=count, num_gpus=count, recipe_name=name)
    assert plan.num_processes == count


def gigabytes_per_gpu(recipe: Recipe, num_gpus: int) -> float:
    """Weights, gradients, optimizer states and buffers; activations come on top."""
    model = skeleton(find_config(recipe.model)[0], recipe)
    return states(model, cost_inputs(recipe, load_strategy(Path(recipe.strategy)), num_gpus)).gpu.total / 1e9


@pytest.mark.parametrize("name", LIBRARY)
def test_a_recipe_fits_the_gpus_of_its_label_with_a_quarter_to_spare(name):
    recipe = load_recipe(Path(name))
    needs = library.read_needs(library.read_label(Path(name)))
    assert needs.num_gpus is not None
    assert needs.gpu_gb is not None
    assert gigabytes_per_gpu(recipe, needs.num_gpus) < 0.75 * needs.gpu_gb


@pytest.mark.parametrize("name", LIBRARY)
def test_a_label_counts_the_parameters_of_its_model(name):
    recipe = load_recipe(Path(name))
    said = re.findall(r"([\d.]+) B (?:frozen )?parameters", library.read_label(Path(name))["Needs"])
    facts = FACTS["models"][recipe.model.name_or_path]
    billions = facts["num_parameters"] / 1e9
    assert said, "the arithmetic names no parameters"
    if recipe.adapter is not None and recipe.adapter.name == "qlora":  # those in 4 bits
        config = facts["config"]
        billions -= 2 * config["vocab_size"] * config["hidden_size"] / 1e9
    assert float(said[0]) == pytest.approx(billions, rel=0.04)


def test_a_share_of_the_largest_matrix_fits_an_nvme_buffer():
    """DeepSpeed's AsyncPartitionedParameterSwapper asserts it, after minutes of loading."""
    found = 0
    for name in LIBRARY:
        recipe = load_recipe(Path(name))
        strategy = load_strategy(Path(recipe.strategy))
        if strategy.offload_param != "nvme":
            continue
        found += 1
        assert strategy.deepspeed is not None
        buffer_size = strategy.deepspeed["zero_optimization"]["offload_param"]["buffer_size"]
        config = FACTS["models"][recipe.model.name_or_path]["config"]
        largest = config["hidden_size"] * max(config["vocab_size"], config["intermediate_size"])
        assert largest / library.read_needs(library.read_label(Path(name))).num_gpus <= buffer_size
    assert found >= 1


def test_offline_facts_know_what_the_recipes_name_and_nothing_else():
    models, data = set(), set()
    for name in LIBRARY:
        recipe = load_recipe(Path(name))
        models.add(recipe.model.name_or_path)
        data |= {source.path for source in (*recipe.data.train, *recipe.data.eval.values())}
    assert set(FACTS["models"]) == models
    assert set(FACTS["data"]) == data - {BUILTIN_SOURCE}


@pytest.mark.parametrize("name", FACTS["models"])
def test_a_known_structure_has_the_published_number_of_parameters(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = FACTS["models"][name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts["config"]))
    assert model.num_parameters() == facts["num_parameters"]


def test_the_page_is_what_the_recipes_say():
    assert library.PAGE.read_text() == library.library_page(), "write it anew: python -m cookbook library"


def test_a_machine_that_is_too_small_is_told_what_to_do_instead():
    text = library.what_it_takes(Path("recipes/qwen25_7b/sft_zero3.yaml"))
    assert "4 GPUs of 80 GB" in text
    assert "make rehearse RECIPE=recipes/qwen25_7b/sft_zero3.yaml" in text
    assert "make train RECIPE=recipes/qwen25_7b/sft_zero2_offload.yaml" in text
    for command in re.findall(r"RECIPE=(\S+)", text):
        assert Path(command).is_file()


def test_the_smallest_recipe_still_has_a_smaller_one():
    assert "recipes/quickstart.yaml" in library.what_it_takes(Path("recipes/smollm2_135m/sft_single.yaml"))
