"""Protects the library: every recipe loads, fits its strategy and the hardware in its label, and is on its page.

python -m pytest -q tests/test_recipes.py
"""

import json
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from conftest import ROOT

from cookbook.commands import library
from cookbook.commands.shared import labels
from cookbook.config.recipe import Recipe, Section, default_output_dir, load_recipe
from cookbook.config.sections import BUILTIN_SOURCE
from cookbook.config.strategy import find_strategy
from cookbook.facts.offline import known_model
from cookbook.facts.packing import decide, known_config
from cookbook.start.run_plan import find_runs_elsewhere, load_pair, make_plan
from cookbook.system.hardware import GIB
from cookbook.system.registry import NamedSection

QUICKSTART = "recipes/quickstart.yaml"
RECIPES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.yaml"))
LIBRARY = [name for name in RECIPES if name != QUICKSTART and Path(name).parent != Path("recipes")]
ON_GPUS = [name for name in LIBRARY if labels.read_needs(labels.read_label(Path(name))).num_gpus]
"""The others are for any machine: nothing of theirs is downloaded, and their numbers are ours."""
FACTS = json.loads((ROOT / "recipes/offline_facts.json").read_text())


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_library_is_there():
    assert len(ON_GPUS) >= 17
    on_any_machine = {"calculator": ("grpo", "sft"), "programs": ("grpo", "sft"), "sums": ("distill", "grpo", "sft")}
    assert [name for name in LIBRARY if name not in ON_GPUS] == [
        f"recipes/{folder}/{name}.yaml" for folder, names in on_any_machine.items() for name in names
    ]
    assert "recipes/qwen25_7b/sft.yaml" in LIBRARY  # make finetune-7b


@pytest.mark.parametrize("name", LIBRARY)
def test_a_recipe_is_short_and_its_label_complete(name):
    lines = Path(name).read_text().splitlines()
    assert len(lines) <= 50
    assert lines[0] == "# yaml-language-server: $schema=../schema.json"
    assert (Path(name).parent / lines[0].split("=")[1]).is_file()
    label = labels.read_label(Path(name))
    is_on_gpus = name in ON_GPUS
    assert list(label) == [part for part in labels.LABEL if part != "Fits" or is_on_gpus]
    assert all(label.values())
    assert label["Run"] == f"cookbook {'launch' if load_recipe(Path(name)).rounds is None else 'rounds'} {name}"
    if is_on_gpus:
        assert "not measured" in label["Fits"]
        assert re.search(r"arXiv \d{4}\.\d{5}|https://\S+|trl/scripts/", label["Settings"]), "no published source"
    else:
        assert label["Needs"].startswith("2 CPU cores") and label["Settings"].startswith("ours")


@pytest.mark.parametrize("name", LIBRARY)
def test_a_recipe_is_named_by_its_model_objective_and_adapter(name):
    recipe, text = load_recipe(Path(name)), Path(name).read_text()
    assert Path(name).stem == "_".join(filter(None, [recipe.objective.name, recipe.adapter and recipe.adapter.name]))
    strategy = Path(recipe.strategy).stem
    assert f"\nstrategy: {strategy}\n" in text and "output_dir" not in text
    assert recipe.run.output_dir == f"outputs/{Path(name).parent.name}-{Path(name).stem}-{strategy}"


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_recipe_has_a_plan_on_the_gpus_of_its_label(name):
    recipe, strategy = load_pair(Path(name))
    count = labels.read_needs(labels.read_label(Path(name))).num_gpus
    assert count is not None
    plan = make_plan(recipe, strategy, num_processes=count, num_gpus=count, recipe_name=name)
    assert plan.num_processes == count


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_recipe_fits_the_machine_that_it_needs(name):
    """By the table of its label, which the test below compares with `plan`."""
    label, own = labels.read_label(Path(name)), Path(load_recipe(Path(name)).strategy).stem
    needs, fits = labels.read_needs(label), labels.read_fits(label)
    assert 3 <= len(fits) <= 4
    assert any(re.search(r"\w \d", text) for text in fits.values())
    fitting = re.findall(r"(\w+) \d", fits[needs.machine])
    assert own in fitting or (needs.num_gpus == 1 and "single" in fitting)  # one process of ddp is single
    if needs.host_gb is not None:
        host = re.search(rf"\b{own} \d+ \+ ([\d,]+)", fits[needs.machine])
        assert host is not None and int(host[1].replace(",", "")) * GIB < needs.host_gb * 1e9
    assert labels.gpus_needed(label, "no such strategy") == needs.num_gpus


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "sft.yaml" in name else pytest.mark.thorough) for name in ON_GPUS]
)
def test_the_table_of_a_label_is_what_plan_computes(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from benchmarks.recipe_labels import fits

    assert fits(Path(name)) in Path(name).read_text(), "write it again: python benchmarks/recipe_labels.py"


def test_a_strategy_that_fits_on_fewer_gpus_needs_fewer():
    label = {"Needs": "4 GPUs of 80 GB.", "Fits": "GiB. 1x24GB zero3_offload 9 + 2 2x8x80GB zero3 30, fsdp2 28"}
    assert labels.read_fits(label) == {"1x24GB": "zero3_offload 9 + 2", "2x8x80GB": "zero3 30, fsdp2 28"}
    needed = {name: labels.gpus_needed(label, name) for name in ("zero3_offload", "fsdp2", "ddp")}
    assert needed == {"zero3_offload": 1, "fsdp2": 4, "ddp": 4}
    assert labels.gpus_needed({}, "ddp") == 0
    assert labels.gpus_needed(labels.read_label(Path("recipes/qwen3_0_6b/sft.yaml")), "ddp") == 1


@pytest.mark.parametrize("name", LIBRARY)
def test_a_long_recipe_saves_and_resumes_by_itself(name):
    run = load_recipe(Path(name)).run
    assert run.save_every_steps or run.save_every_minutes
    assert run.resume == "auto"
    if run.save_every_steps and run.max_steps:
        assert run.save_every_steps <= run.max_steps / 5


def test_the_quickstart_is_short_enough_to_begin_anew():
    assert (load_recipe(Path(QUICKSTART)).run.max_steps or 0) <= 500


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_packs_and_holds_rows_out_where_it_can(name):
    recipe = load_recipe(Path(name))
    data, run, config = recipe.data, recipe.run, known_config(recipe.model)
    packing = decide(recipe, config)
    assert packing.is_on or not packing.can_pack or name == QUICKSTART
    is_held_out = bool((data.eval or data.holdout) and run.eval_every_steps)
    assert is_held_out != (data.streaming or recipe.rounds is not None)


def test_offline_facts_know_what_the_recipes_name_and_nothing_else():
    models, data = set(), set()
    for name in LIBRARY:
        recipe = load_recipe(Path(name))
        models |= {recipe.model.name_or_path} - {None}
        data |= {source.path for source in (*recipe.data.train, *recipe.data.eval.values())}
    here = {path for path in models | data if Path(path).exists()}
    assert all(path.startswith(("recipes/sums/", "recipes/calculator/", "recipes/programs/")) for path in here)
    models, data = models - here, data - here
    asked = {name for name, facts in FACTS["models"].items() if facts.get("of_no_recipe")}  # by users of plan
    assert set(FACTS["models"]) - asked == models and not asked & models
    assert set(FACTS["data"]) == data - {BUILTIN_SOURCE}


def test_offline_facts_are_those_of_the_file_as_it_is_and_a_copy_for_each_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "recipes" / "offline_facts.json"
    file.parent.mkdir()
    for layers in (2, 3):
        file.write_text(json.dumps({"models": {"mine": {"config": {"rope": {}, "layers": layers}}}}))
        for _ in range(2):
            config = known_model("mine")["config"]
            assert config == {"rope": {}, "layers": layers}
            config["rope"]["theta"] = 1
    assert known_model("another") is None


@pytest.mark.parametrize("name", FACTS["models"])
def test_a_known_structure_has_the_published_number_of_parameters(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = FACTS["models"][name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts["config"]))
    assert model.num_parameters() == facts["num_parameters"]


@pytest.mark.parametrize("folder", ["recipes/sums", "recipes/calculator", "recipes/programs"])
def test_a_model_beside_a_recipe_has_the_sizes_of_the_recipe_that_made_it(folder):
    sizes = load_recipe(Path(folder) / "sft.yaml").model.from_scratch
    for model in (path.parent for path in Path(folder).glob("*/config.json")):
        config = json.loads((model / "config.json").read_text())
        assert sizes is not None and {key: config[key] for key in sizes.model_dump()} == sizes.model_dump()


def test_the_page_is_what_the_recipes_say():
    assert library.PAGE.read_text() == library.library_page(), "write it again: cookbook library --page"


def test_on_a_machine_that_is_too_small_the_answer_is_what_to_do_instead():
    text = labels.what_it_takes(Path("recipes/qwen25_7b/sft.yaml"))
    assert "4 GPUs of 80 GB" in text
    assert "cookbook rehearse recipes/qwen25_7b/sft.yaml" in text
    assert "(--strategy ...)" in text and re.search(r"1x24GB +.*zero3_offload \d", text)
    named = re.findall(r"cookbook (?:launch|rehearse) (\S+)", text)
    assert len(named) >= 3 and all(Path(name).is_file() for name in named)


def test_the_smallest_recipe_still_has_a_smaller_one():
    assert "recipes/quickstart.yaml" in labels.what_it_takes(Path("recipes/smollm2_135m/sft.yaml"))


# What no recipe shows.


def shown(value, key="", kind="") -> set[str]:
    """Keys that a recipe writes, and `key: word` of those that choose by a word; each with the kind that it is of."""
    if isinstance(value, list):
        return {key}.union(*(shown(item, key, kind) for item in value))
    if isinstance(value, dict):
        is_named = key == "data.eval" and "path" not in value
        family = FAMILIES.get(key)
        return {key}.union(
            *(
                shown(item, key if is_named else f"{key}.{name}".lstrip("."), family and of_kind(family, value, name))
                for name, item in value.items()
            )
        )
    return {f"{key}{kind or ''}", f"{key}: {value}{kind or ''}"} if isinstance(value, str) else {f"{key}{kind or ''}"}


FAMILIES = {
    name: kind
    for name, info in Recipe.model_fields.items()
    for kind in (info.annotation, *get_args(info.annotation))
    if isinstance(kind, type) and issubclass(kind, NamedSection)
}
"""Sections whose keys depend on their name."""


def of_kind(family: type[NamedSection], values: dict[str, Any], key: str) -> str:
    """The name of the kind in parentheses, for a key that some kinds of a family have and others may have otherwise."""
    return "" if key in family.model_fields else f" ({values.get('name', family.default)})"


def choices(model=Recipe, key="", family=None):
    """Every key of a recipe, and every word that a key chooses by; each with the kind that it is of."""
    for name, info in model.model_fields.items():
        (default,) = get_args(model.model_fields["name"].annotation) if family else ("",)
        own, of = f"{key}{name}", of_kind(family, {"name": default}, name) if family else ""
        yield own + of
        kinds, words = [info.annotation], []
        while kinds:
            kind = kinds.pop()
            if get_origin(kind) is Literal:
                words += [word for word in get_args(kind) if isinstance(word, str)]
            elif isinstance(kind, type) and issubclass(kind, NamedSection):
                yield f"{own}.name"
                for named in kind.kinds():
                    (word,) = get_args(named.model_fields["name"].annotation)
                    if word != kind.default:
                        yield f"{own}.name: {word}"
                    yield from (
                        choice for choice in choices(named, f"{own}.", kind) if not choice.startswith(f"{own}.name")
                    )
            elif isinstance(kind, type) and issubclass(kind, Section):
                yield from choices(kind, f"{own}.")
            else:
                kinds += get_args(kind)
        yield from (f"{own}: {word}{of}" for word in words if word != info.default)


def test_a_key_that_another_objective_has_too_is_no_choice_that_a_recipe_shows():
    recipe = {"objective": {"name": "dpo", "label_smoothing": 0.1, "beta": 0.2}}
    assert {"objective.label_smoothing (dpo)", "objective.beta (dpo)"} <= shown(recipe)
    assert "objective.label_smoothing (sft)" in set(choices()) - shown(recipe)
    assert "objective.train_on (sft)" in shown({"objective": {"train_on": "all"}})


def test_what_no_recipe_shows_stands_with_its_reason_in_a_list():
    in_recipes = set()
    for name in RECIPES:
        in_recipes |= shown(yaml.safe_load(Path(name).read_text()))
        fits = " ".join(labels.read_fits(labels.read_label(Path(name))).values())
        in_recipes |= {f"strategy: {strategy}" for strategy in re.findall(r"([a-z]\w+) \d", fits)}
    everything = {*choices(), *(f"strategy: {path.stem}" for path in Path("accelerate_configs").glob("*.yaml"))}
    missing = sources(everything) - sources(in_recipes)
    assert len(everything) > 90 and len(missing) > 20
    reasons = yaml.safe_load(Path("tests/keys_no_recipe_shows.yaml").read_text())
    assert all(reasons.values())
    explained = [key for keys in reasons for key in keys.split(", ")]
    assert sorted(missing) == sorted(explained)


def sources(keys: set[str]) -> set[str]:
    """`data.eval` has the keys of `data.train`."""
    return {key.replace("data.eval.", "data.train.") for key in keys}


# Where a run writes.


@pytest.mark.parametrize(
    ("path", "strategy", "folder"),
    [
        ("recipes/qwen25_7b/sft.yaml", None, "outputs/qwen25_7b-sft-zero3"),
        ("recipes/qwen25_7b/sft.yaml", "accelerate_configs/fsdp2.yaml", "outputs/qwen25_7b-sft-fsdp2"),
        ("recipes/../recipes/qwen25_7b/sft.yaml", None, "outputs/qwen25_7b-sft-zero3"),
        ("recipes/mine.yaml", None, "outputs/mine-zero3"),
        ("elsewhere/mine.yaml", None, "outputs/elsewhere-mine-zero3"),
    ],
)
def test_the_default_folder_has_the_names_of_recipe_and_strategy(library, path, strategy, folder):
    if not Path(path).is_file():
        library.write(path, Path("recipes/qwen25_7b/sft.yaml").read_text())
    library.own("recipes/qwen25_7b/sft.yaml")
    assert load_pair(Path(path), [], strategy and Path(strategy))[0].run.output_dir == folder
    assert load_pair(Path(path), ["run.output_dir=outputs/own"])[0].run.output_dir == "outputs/own"
    assert load_pair(Path(path), ["run.output_dir=null"])[0].run.output_dir.startswith("outputs/")


def test_a_run_under_another_strategy_names_the_folder_that_it_could_resume(library):
    path = Path("recipes/qwen25_7b/sft.yaml")
    library.own(str(path))
    recipe, _ = load_pair(path, [], find_strategy("fsdp2"))
    folder = default_output_dir(path, "fsdp2")
    Path("outputs/qwen25_7b-sft_lora-zero3/checkpoints/step-00000003").mkdir(parents=True)
    assert find_runs_elsewhere(folder, recipe, "fsdp2") == []
    begun = Path("outputs/qwen25_7b-sft-zero3/checkpoints/step-00000003")
    begun.mkdir(parents=True)
    (note,) = find_runs_elsewhere(folder, recipe, "fsdp2")
    assert "--set run.output_dir=outputs/qwen25_7b-sft-zero3" in note
    never = load_pair(path, ["run.resume=never"], find_strategy("fsdp2"))[0]
    own = load_pair(path, ["run.output_dir=outputs/own"], find_strategy("fsdp2"))[0]
    assert find_runs_elsewhere(folder, never, "fsdp2") == find_runs_elsewhere(folder, own, "fsdp2") == []
    Path("outputs/qwen25_7b-sft-fsdp2/checkpoints/step-00000001").mkdir(parents=True)
    assert find_runs_elsewhere(folder, recipe, "fsdp2") == []
