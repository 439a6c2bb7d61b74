"""The questions of a start to the forecast for `auto`, and its words on what it took; the forecast is planted.

python -m pytest -q tests/test_auto_choices.py
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT

from cookbook.config.recipe import Recipe, load_recipe
from cookbook.config.strategy import load_strategy, strategy_path
from cookbook.run import auto_settings, forecasts
from cookbook.start.run_plan import Plan, make_plan
from cookbook.system.files import RecipeError, dump_yaml
from cookbook.system.hardware import parse_machines

PATH = ROOT / "recipes/quickstart.yaml"
BATCH, KIND = "batch.micro_batch_size", "model.gradient_checkpointing"
BOTH = [f"{BATCH}=auto", f"{KIND}=auto"]
Start = tuple[Path, Recipe, Any, Plan]


def start_of(*settings: str, strategy: str = "ddp", gpus: int = 2) -> Start:
    recipe = load_recipe(PATH, ["batch.global_batch_size=24", *settings])
    loaded = load_strategy(strategy_path(strategy))
    plan = make_plan(recipe, loaded, num_processes=2, num_gpus=gpus, recipe_name=str(PATH))
    return PATH, recipe, loaded, plan


def fit(size: int | None, kind: object, seconds: float | None) -> Any:
    """An answer of the forecast, of a step that takes a tenth less to a tenth more."""
    time = None if seconds is None else SimpleNamespace(low=0.9 * seconds, high=1.1 * seconds)
    batch = SimpleNamespace(micro_batch_size=size)
    return SimpleNamespace(batch=batch, checkpointing=kind, time=time, seconds=seconds)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The answers that the forecast will give, and what it was asked."""
    planted = SimpleNamespace(answers=[], asked=[], machines=replace(parse_machines("1xH100"), usable_gib=22.4))

    def fitting(recipe: Any, strategy: Any, machines: Any, name: str, batches: Any, kinds: Any, *, cache: Any) -> Any:
        sizes = [batch.micro_batch_size for batch in batches]
        assert (recipe.batch.global_batch_size, strategy.name) in ((24, "ddp"), (24, "pp"))
        planted.asked.append((sizes, list(kinds), machines.num_gpus, name, cache))
        answer = planted.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(forecasts, "fitting", fitting)
    monkeypatch.setattr(auto_settings, "machines_of", lambda plan: planted.machines)
    return planted


def test_all_that_is_auto_is_asked_at_once_and_the_fastest_taken(planted: Any, tmp_path: Path):
    planted.answers = [[fit(6, "selective", 2.0), fit(2, False, 3.0), fit(12, True, None)]]
    assert auto_settings.choose(*start_of(*BOTH), cache=tmp_path) == {
        BATCH: (6, "it fits in 22 GiB of GPU memory by the forecast, and 12 may not"),
        KIND: ("selective", "1.8 to 2.2 s a step by the forecast; 2.7 to 3.3 s with false"),
    }
    assert planted.asked == [([1, 2, 3, 4, 6, 12], [False, "selective", True], 2, str(PATH), tmp_path)]


def test_what_is_written_is_not_chosen_and_the_rest_asked_for_it(planted: Any):
    planted.answers = [[fit(12, "selective", None)], [fit(4, False, None), fit(4, True, None)]]
    batch, kind = start_of(f"{BATCH}=auto", f"{KIND}=selective"), start_of(f"{BATCH}=4", f"{KIND}=auto")
    fits = "it fits in 22 GiB of GPU memory by the forecast"
    assert auto_settings.choose(*batch) == {BATCH: (12, f"{fits}, and is all of a step")}
    assert auto_settings.choose(*kind) == {KIND: (False, fits)}
    assert [asked[:2] for asked in planted.asked] == [
        ([1, 2, 3, 4, 6, 12], ["selective"]),
        ([4], [False, "selective", True]),
    ]


@pytest.mark.parametrize(
    ("kept", "asked", "chosen"),
    [
        ({BATCH: 6}, ([6], [False, "selective", True]), {BATCH: 6, KIND: True}),
        ({KIND: "selective"}, ([1, 2, 3, 4, 6, 12], ["selective"]), {BATCH: 3, KIND: "selective"}),
        ({KIND: "offload"}, ([1, 2, 3, 4, 6, 12], ["offload"]), {BATCH: 3, KIND: "offload"}),
        ({BATCH: 5, KIND: "other"}, ([1, 2, 3, 4, 6, 12], [False, "selective", True]), {BATCH: 3, KIND: True}),
        ({BATCH: 12, KIND: False}, None, {BATCH: 12, KIND: False}),
    ],
)
def test_what_the_resumed_run_had_stays_where_it_splits_the_batch(planted: Any, tmp_path: Path, kept, asked, chosen):
    """Another choice would change its memory in the middle of the run."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in kept.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text(dump_yaml(sections))
    planted.answers = [[fit(3, True, None)]]
    start = start_of(*BOTH, f"run.output_dir={tmp_path}", "run.resume=auto")
    choices = auto_settings.choose(*start)
    assert {key: value for key, (value, _) in choices.items()} == chosen
    as_before = [key for key, (_, why) in choices.items() if why == "as in the run that is resumed"]
    assert as_before == [key for key in kept if chosen[key] == kept[key]]
    assert [given[:2] for given in planted.asked] == ([] if asked is None else [asked])
    planted.answers = [[fit(1, True, None)]]
    anew = auto_settings.choose(*start_of(*BOTH, f"run.output_dir={tmp_path}", "run.resume=never"))
    assert anew[BATCH][0] == 1, "of a run that begins anew"
    (tmp_path / "recipe.yaml").unlink()
    planted.answers = [[fit(2, True, None)]]
    assert auto_settings.choose(*start)[BATCH][0] == 2, "no start has come so far"


def test_where_nothing_is_known_or_fits_it_is_what_takes_least_memory(planted: Any):
    least = {BATCH: 1, KIND: True}

    def why(start: Start) -> set[str]:
        choices = auto_settings.choose(*start)
        assert {key: value for key, (value, _) in choices.items()} == least
        return {reason for _, reason in choices.values()}

    planted.answers = [[], ValueError("no such model\nnor another")]
    assert why(start_of(*BOTH)) == {"by the forecast even that may exceed 22 GiB of GPU memory"}
    assert why(start_of(*BOTH)) == {"there is no forecast: no such model"}
    assert why(start_of(*BOTH, gpus=0)) == {"no forecast says what a CPU holds"}
    planted.machines = replace(planted.machines, usable_gib=None)
    assert why(start_of(*BOTH)) == {"the memory of this GPU is not known"}
    assert len(planted.asked) == 2 and auto_settings.choose(*start_of(f"{BATCH}=4")) == {}


def test_the_stages_of_a_pipeline_get_one_sample_each_and_are_asked_for_the_rest(planted: Any):
    planted.answers = [[fit(1, "selective", 1.0)]]
    choices = auto_settings.choose(*start_of(*BOTH, strategy="pp"))
    assert choices[BATCH] == (1, "the more micro-batches, the less do the stages of a pipeline wait")
    assert choices[KIND] == ("selective", "0.9 to 1.1 s a step by the forecast")
    assert [asked[0] for asked in planted.asked] == [[1]]
    assert auto_settings.choose(*start_of(f"{BATCH}=auto", strategy="pp")) == {BATCH: choices[BATCH]}


@pytest.mark.parametrize(
    ("current", "best", "is_told"),
    [
        ([fit(2, False, 2.0)], [fit(12, False, 1.8)], True),
        ([fit(2, False, 2.0)], [fit(12, False, 1.81)], False),
        ([fit(2, False, None)], [fit(12, False, 0.5)], False),
        ([fit(2, False, 1.0)], [fit(12, False, None)], False),
        ([], [fit(12, False, 0.5)], False),
        ([fit(2, False, 1.0)], [], False),
        (RecipeError("none"), [], False),
    ],
)
def test_a_larger_number_is_advice_if_it_saves_a_tenth(planted: Any, tmp_path: Path, current, best, is_told: bool):
    planted.answers = [current, best]
    said = auto_settings.larger_micro_batch(*start_of(f"{BATCH}=2", f"{KIND}=selective"), cache=tmp_path)
    assert said == (
        f"{BATCH} 2: 12 fits too, and by the forecast a step takes 1.6 to 2 s in the place of 1.8 to 2.2 s, on the"
        " same curve; `auto` takes the most that fits"
        if is_told
        else None
    )
    first, *second = planted.asked
    assert first == ([2], ["selective"], 2, str(PATH), tmp_path)
    assert second == ([] if isinstance(current, Exception) else [([3, 4, 6, 12], *first[1:])])


@pytest.mark.parametrize(
    "start",
    [
        start_of("batch.micro_batch_size=null", "batch.micro_batch_tokens=512"),
        start_of(f"{BATCH}=auto"),
        start_of(f"{BATCH}=2", gpus=0),
        start_of(f"{BATCH}=2", strategy="pp"),
    ],
    ids=["tokens", "auto", "cpu", "pipeline"],
)
def test_there_is_no_advice_where_no_number_could_be_larger(planted: Any, start: Start):
    assert auto_settings.larger_micro_batch(*start) is None and not planted.asked


@pytest.mark.parametrize("unknown", ["gpu", "usable_gib"])
def test_there_is_no_advice_for_a_gpu_that_is_not_known(planted: Any, unknown: str):
    planted.machines = replace(planted.machines, **{unknown: None})
    assert auto_settings.larger_micro_batch(*start_of(f"{BATCH}=2")) is None and not planted.asked


def test_the_forecast_is_asked_for_all_machines(planted: Any):
    _, _, _, plan = start_of(f"{BATCH}=2")
    machines = auto_settings._machines(replace(plan, num_processes=12, num_local=4))
    assert (machines.gpus_each, machines.num_machines) == (4, 3)


def test_a_choice_is_kept_for_this_folder_and_this_start(planted: Any, tmp_path: Path, monkeypatch):
    """A start elsewhere at the same time has one of its own, and so does a process of another machine in this cache."""
    sizes, cache = iter([6, 3, 2, 4, 12]), tmp_path / "deep" / "cache"

    def choose(path: Path, recipe: Recipe, strategy: Any, plan: Plan, *, cache: Path) -> Any:
        assert (path.name, recipe.batch.global_batch_size, strategy.name) == (PATH.name, 24, "ddp")
        assert plan.num_local == 1 and cache.name == "cache"
        return {BATCH: (next(sizes), "it fits"), KIND: (True, "so")}

    monkeypatch.setattr(auto_settings, "choose", choose)
    monkeypatch.setattr(auto_settings.status, "attempt_id", lambda: "a start")

    def settled(folder: str, gpus: int = 2) -> tuple[Any, ...]:
        _, recipe, strategy, plan = start_of(*BOTH, f"run.output_dir={tmp_path / folder}", gpus=gpus)
        plan = replace(plan, num_local=1)
        filled, plan, notes = auto_settings.settle(str(PATH), recipe, strategy, plan, cache=cache)
        assert filled.model.gradient_checkpointing is True and filled.seed == recipe.seed
        assert plan.gradient_accumulation_steps * filled.batch.micro_batch_size == 12
        assert (plan.num_processes, plan.num_local, plan.num_gpus) == (2, 1, gpus)
        return filled.batch.micro_batch_size, *notes

    first = 6, f"{BATCH}: auto is 6: it fits", f"{KIND}: auto is true: so"
    assert [settled("one"), settled("one")] == [first, first] and settled("two")[0] == 3
    monkeypatch.setattr(auto_settings, "gethostname", lambda: "another")
    assert settled("one")[0] == 2
    assert [settled("one", gpus=0)[0] for _ in range(2)] == [4, 12], "of a CPU each process finds it for itself"
