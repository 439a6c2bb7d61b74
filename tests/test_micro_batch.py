"""`batch.micro_batch_size: auto` is the most that fits, and a number in all that a run writes.

python -m pytest -q tests/test_micro_batch.py
"""

from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.commands.shared import micro_batch
from cookbook.config.recipe import Recipe, load_recipe
from cookbook.config.sections import Auto
from cookbook.config.strategy import load_strategy, strategy_path
from cookbook.forecast.ranking import forecast_all
from cookbook.planning.run_plan import make_plan
from cookbook.system.files import dump_yaml
from cookbook.system.hardware import parse_machines

QUICKSTART = Path("recipes/quickstart.yaml")
ROOM = replace(parse_machines("1x24GB"), usable_gib=4.0)
"""Less than the whole step takes."""


def recipe_with(*settings: str) -> Recipe:
    whole = ["batch.micro_batch_size=auto", "batch.global_batch_size=768", "mixed_precision=bf16"]
    return load_recipe(QUICKSTART, [*whole, *settings])


def chosen(recipe: Recipe, strategy: str, *, processes: int = 1, gpus: int = 1) -> tuple[int, str]:
    loaded = load_strategy(strategy_path(strategy))
    plan = make_plan(recipe, loaded, num_processes=processes, num_gpus=gpus, recipe_name=str(QUICKSTART))
    return micro_batch.choose(QUICKSTART, recipe, loaded, plan)


@pytest.mark.slow
def test_auto_is_the_largest_that_splits_the_batch_and_fits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(micro_batch, "machines_of", lambda plan: ROOM)
    recipe = recipe_with()
    size, why = chosen(recipe, "single")
    assert 1 < size < 768 and 768 % size == 0 and "4 GiB" in why
    verdicts = []
    for one in (size, next(one for one in range(size + 1, 769) if 768 % one == 0)):
        batch = recipe.batch.model_copy(update={"micro_batch_size": one})
        changed, single = recipe.model_copy(update={"batch": batch}), load_strategy(strategy_path("single"))
        (found,) = forecast_all(changed, [single], ROOM, "", limits=False).forecasts
        verdicts.append(found.verdict)
    assert verdicts == ["fits", "tight"]


@pytest.mark.parametrize(
    ("strategy", "gpus", "said"), [("ddp", 0, "what a CPU holds"), ("pp", 2, "stages of a pipeline")]
)
def test_auto_is_one_where_the_most_is_not_known_or_not_the_fastest(strategy: str, gpus: int, said: str):
    size, why = chosen(recipe_with("mixed_precision='no'"), strategy, processes=2, gpus=gpus)
    assert size == 1 and said in why


def test_a_resumed_run_keeps_its_number(tmp_path: Path):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text(dump_yaml({"batch": {"global_batch_size": 768, "micro_batch_size": 6}}))
    folder = f"run.output_dir={tmp_path}"
    assert chosen(recipe_with(folder, "run.resume=auto"), "ddp", processes=2, gpus=0)[0] == 6
    assert chosen(recipe_with(folder, "run.resume=never"), "ddp", processes=2, gpus=0)[0] == 1


def test_what_is_written_of_auto_is_a_number():
    batch = recipe_with().batch
    assert isinstance(batch.micro_batch_size, Auto) and f"{batch.micro_batch_size}" == "auto"
    assert batch.model_dump()["micro_batch_size"] == 1 and type(batch.model_dump()["micro_batch_size"]) is int
