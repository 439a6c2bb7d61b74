"""The stages of a run before its first step, each by itself: what machines must share, what a run is made from, and why
it ends early. And what it asks of the forecast, and in which words it hears that there is none.

python -m pytest -q tests/test_stages.py
"""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT

from cookbook.config.recipe import load_recipe
from cookbook.facts.packing import Packing
from cookbook.run import forecasts, next_start, stages
from cookbook.run.stages import Inputs, Progress, Run
from cookbook.system import lock
from cookbook.system.files import RecipeError
from cookbook.system.hardware import DRIVER_RESERVE_GIB, parse_machines
from cookbook.training.data.tokens import TokenSet

RECIPE = ROOT / "recipes/quickstart.yaml"


class Collectives:
    """Answers of processes of which each sees and says what is planted."""

    def __init__(self, *planted: Any) -> None:
        self.planted, self.asked = list(planted), []

    def broadcast_text(self, text: str) -> str:
        return text

    def gather_texts(self, text: str) -> list[str]:
        self.asked.append(text)
        return [text, *self.planted.pop(0)]

    def all_gather(self, value: float) -> np.ndarray:
        return np.array([[value], *([other] for other in self.planted.pop(0))])


def engine_of(*planted: Any, num_local: int = 2, num_processes: int = 4) -> Any:
    ended: list[bool] = []
    world = SimpleNamespace(rank=0, num_local=num_local, num_processes=num_processes)
    collectives = Collectives(*planted)
    return SimpleNamespace(
        world=world, collectives=collectives, is_main=True, ended=ended, close=lambda: ended.append(True)
    )


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The naps of whoever waits for a file, on a clock of which they alone are the time."""
    naps: list[float] = []
    monkeypatch.setattr(stages, "time", SimpleNamespace(monotonic=lambda: 5.0 + sum(naps), sleep=naps.append))
    return naps


def test_machines_that_see_one_folder_go_on_at_once(tmp_path: Path, patience: list[float]):
    recipe = load_recipe(RECIPE, [f"run.output_dir={tmp_path / 'run'}"])
    (tmp_path / "run").mkdir()
    engine = engine_of([1.0, 1.0, 1.0])
    stages._check_folder(recipe, engine)
    assert not engine.ended and not patience
    alone = engine_of(num_local=4)
    stages._check_folder(recipe, alone)
    stages._check_auto(recipe, alone)
    assert not alone.collectives.asked, "one machine asks nobody"


@pytest.mark.parametrize(("others", "said"), [([1.0, 0.0, 1.0], "rank 2"), ([1.0, 0.0, 0.0], "ranks 2, 3")])
def test_a_machine_that_does_not_see_the_folder_is_named(tmp_path: Path, patience: list[float], others, said: str):
    recipe = load_recipe(RECIPE, [f"run.output_dir={tmp_path / 'run'}"])
    engine = engine_of(others)
    with pytest.raises(RecipeError, match=f": {said} cannot see what rank 0 wrote there"):
        stages._check_folder(recipe, engine)
    assert engine.ended == [True], "the process group has ended"


def test_a_folder_is_waited_for_as_long_as_a_file_system_may_cache(tmp_path: Path, patience: list[float], monkeypatch):
    """A rank that sees another signature until the third look goes on; one that never does, says so."""
    recipe = load_recipe(RECIPE, [f"run.output_dir={tmp_path}"])
    looks = ["of rank 0", "older", "older", "of rank 0"]
    monkeypatch.setattr(lock, "signature", lambda folder: looks.pop(0) if looks else "older")
    stages._check_folder(recipe, engine_of([1.0, 1.0, 1.0]))
    assert len(patience) == 2
    patience.clear()
    looks = ["of rank 0"]
    engine = engine_of([1.0, 1.0, 1.0])
    with pytest.raises(RecipeError, match="rank 0 cannot see"):
        stages._check_folder(recipe, engine)
    assert stages.SIGHT_SECONDS <= sum(patience) <= stages.SIGHT_SECONDS + 1


def test_machines_whose_forecasts_differ_are_named_with_what_each_found():
    recipe = load_recipe(RECIPE, ["batch.micro_batch_size=2", "model.gradient_checkpointing=true"])
    own = "batch.micro_batch_size=2, model.gradient_checkpointing=true"
    engine = engine_of([own, own, own], [stages.optional.digest()] * 3)
    stages._check_auto(recipe, engine)
    assert engine.collectives.asked[0] == own and not engine.ended
    other = own.replace("=2", "=1")
    engine = engine_of([own, other, other])
    with pytest.raises(RecipeError) as refused:
        stages._check_auto(recipe, engine)
    assert f"machines differ: rank 0 has {own}; rank 2 has {other}; write these keys" in str(refused.value)
    assert engine.ended == [True]


def test_machines_with_other_kernels_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stages.optional, "digest", lambda: "mine")
    recipe = load_recipe(RECIPE, ["batch.micro_batch_size=2"])

    def engine(*digests: str) -> Any:
        engine = engine_of()
        gather = engine.collectives.gather_texts = lambda text: [text, *digests] if text == "mine" else [text] * 3
        assert gather
        return engine

    same, differing = engine("mine", "mine"), engine("mine", "theirs")
    stages._check_auto(recipe, same)
    with pytest.raises(RecipeError, match=r"the packages of .* have other versions or contents on some"):
        stages._check_auto(recipe, differing)
    assert differing.ended == [True] and not same.ended


def test_a_run_is_made_from_all_that_could_change_its_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stages.model_source, "weights_digest", lambda folder, cache: f"{folder.name} in {cache.name}")
    monkeypatch.setattr(
        stages.adapter_files, "weights_digest", lambda adapter, cache: f"{adapter.path} in {cache.name}"
    )
    monkeypatch.setattr(stages.plugins, "digest", lambda paths: f"{len(paths)} plugins")
    monkeypatch.setattr(stages.optional, "digest", lambda: "of kernels")
    checked: list[Any] = []
    monkeypatch.setattr(stages.base_model, "check_base", lambda adapter, digest: checked.append((adapter, digest)))
    held_out = {"a": SimpleNamespace(fingerprint="1"), "b": SimpleNamespace(fingerprint="2")}
    data = SimpleNamespace(fingerprint=lambda cache: f"rows in {cache.name}", eval=held_out)
    inputs: Any = SimpleNamespace(data=data, base="models/base", teacher=SimpleNamespace(folder="models/teacher"))
    recipe: Any = SimpleNamespace(
        adapter=SimpleNamespace(path="before"), plugins=["a.py", "b.py"], model=SimpleNamespace(kernels=["fast"])
    )
    engine: Any = SimpleNamespace(is_main=True, collectives=Collectives())
    taken = stages.take_fingerprints(recipe, inputs, engine, cache=tmp_path)
    assert taken == {
        "data": f"rows in {tmp_path.name}",
        "model": f"base in {tmp_path.name}",
        "eval": hashlib.sha256(b'[["a", "1"], ["b", "2"]]').hexdigest(),
        "teacher": f"teacher in {tmp_path.name}",
        "adapter": f"before in {tmp_path.name}",
        "plugins": "2 plugins",
        "kernels": "of kernels",
    }
    assert checked == [(recipe.adapter, taken["model"])]
    plain: Any = SimpleNamespace(adapter=None, plugins=[], model=SimpleNamespace(kernels=None))
    inputs.data.eval, inputs.teacher = {}, None
    assert stages.take_fingerprints(plain, inputs, engine, cache=tmp_path).keys() == {"data", "model"}
    plain.adapter = SimpleNamespace(path=None)
    assert "adapter" not in stages.take_fingerprints(plain, inputs, engine, cache=tmp_path) and len(checked) == 2
    engine.is_main, engine.collectives.broadcast_text = False, lambda text: json.dumps({"data": "x", "model": "y"})
    assert stages.take_fingerprints(recipe, inputs, engine, cache=tmp_path) == {"data": "x", "model": "y"}


def test_packing_by_auto_is_that_of_the_run_to_resume(monkeypatch: pytest.MonkeyPatch):
    given: list[Any] = []
    monkeypatch.setattr(stages, "decide", lambda *words, before: given.append((words, before)) or Packing(True, ""))
    inputs: Any = SimpleNamespace(config="config")
    checkpoint: Any = SimpleNamespace(state=lambda: {"recipe": {"data": {"packing": False}}})
    for saved in (None, checkpoint):
        stages.choose_packing("recipe", inputs, saved)  # type: ignore[arg-type]
    assert given == [(("recipe", "config"), None), (("recipe", "config"), False)]


def test_the_rows_of_new_tokens_are_all_of_theirs():
    rows = Inputs.new_rows.fget  # type: ignore[attr-defined]
    assert rows(SimpleNamespace(new_tokens={"<a>": 7, "<b>": 8, "<c>": 9})) == range(7, 10)
    assert len(rows(SimpleNamespace(new_tokens={}))) == 0


def test_a_step_counts_its_samples_and_makes_the_evaluation_before_it_old():
    before = Progress(
        step=3, num_samples=12, is_evaluated=True, is_sampled=True, eval_loss=1.0, best_by=2.0, best_step=2
    )
    batch: Any = SimpleNamespace(num_samples=4, stream_digest="after 16")
    before.advance(batch, is_skipped=True)
    assert before == Progress(step=4, num_samples=16, num_skipped=1, stream_digest="after 16", best_step=2)
    before.advance(batch, is_skipped=False)
    assert (before.step, before.num_samples, before.num_skipped) == (5, 20, 1)


def test_evaluations_are_compared_by_the_metric_that_is_named_and_else_by_the_loss():
    assert Progress(eval_loss=1.0).rating == 1.0 and Progress(eval_loss=1.0, best_by=-3.0).rating == -3.0
    progress = Progress(step=1)
    progress.judge(0.0)
    assert progress == Progress(step=1), "there was none after this step"


@pytest.mark.parametrize(
    ("metric", "rating", "said"),
    [
        (None, 1.5, "no held-out loss below 1.5000, that of step 2"),
        (None, None, "no finite held-out loss"),
        (SimpleNamespace(name="hits", greater_is_better=True), -0.75, "no held-out hits above 0.7500, that of step 2"),
        (
            SimpleNamespace(name="length", greater_is_better=False),
            7.0,
            "no held-out length below 7.0000, that of step 2",
        ),
        (SimpleNamespace(name="hits", greater_is_better=True), None, "no finite held-out hits"),
    ],
)
def test_a_run_that_ends_early_says_why(metric: Any, rating: float | None, said: str):
    why, over = (getattr(Run, name).fget for name in ("early_end", "is_over"))
    progress = Progress(step=9, num_worse=3, best_rating=rating, best_step=2)
    run = SimpleNamespace(
        stops_early=True, progress=progress, inputs=SimpleNamespace(max_steps=20), metric_for_best=metric
    )
    assert why(run) == f"early stopping after step 9: {said}, in 3 evaluations" and over(run)
    run.stops_early = False
    assert why(run) is None and not over(run)
    run.inputs.max_steps = 9
    assert over(run), "all steps are done"
    run.stops_early = True
    assert why(run) is None and over(run), "nor is that an early end"


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_what_an_export_needs_is_written_of_the_run(monkeypatch: pytest.MonkeyPatch, adapter: str | None):
    """Buffers too, unless an adapter is trained; the metric that chooses is the plugin's."""
    written: list[Any] = []
    monkeypatch.setattr(
        stages.model_folder, "write_model_files", lambda *words, **facts: written.append((words, facts))
    )
    monkeypatch.setattr(stages, "saved_buffers", lambda model: f"buffers of {model}")
    monkeypatch.setattr(stages, "metrics", lambda: {"hits": "the metric"})
    settings = SimpleNamespace(output_dir="out", metric_for_best_model=adapter and "hits", metrics=["hits"])
    run: Any = SimpleNamespace(
        recipe=SimpleNamespace(run=settings, model="section", adapter=adapter),
        inputs=SimpleNamespace(base="base", new_tokens="tokens", head="head", config="config", tokenizer="tokenizer"),
        made_from={"model": "digest"},
        engine=SimpleNamespace(transformer=lambda: "the model"),
    )
    run.output_dir = Run.output_dir.fget(run)  # type: ignore[attr-defined]
    Run.write_model_files(run)
    ((words, facts),) = written
    assert words == (Path("out"), "base", "section")
    buffers = None if adapter else "buffers of the model"
    assert facts == {
        **{name: name for name in ("head", "config", "tokenizer", "digest")},
        "new_tokens": "tokens",
        "buffers": buffers,
    }
    best, all_of_them = (getattr(Run, name).fget(run) for name in ("metric_for_best", "metrics"))
    assert best == (adapter and "the metric") and all_of_them == ["the metric"]


def test_a_reference_is_a_number_for_each_target_or_for_each_sequence(monkeypatch: pytest.MonkeyPatch):
    is_label = np.array([0, 1, 1, 0, 0, 1], bool)
    tokens = TokenSet(ids=np.arange(6, dtype=np.int32), is_label=is_label, offsets=np.array([0, 3, 6]))
    asked: list[Any] = []
    for name in ("batches_of_targets", "indexed_batches"):
        monkeypatch.setattr(stages.batches, name, lambda tokens, layout, name=name: (name, layout))
    engine: Any = SimpleNamespace(collect=lambda *words, what: asked.append((*words, what)))
    for of in ("tokens", "sequences"):
        objective: Any = SimpleNamespace(reference_of=of)
        stages._reference_of(engine, objective, tokens, "layout")  # type: ignore[arg-type]
    assert asked == [
        (stages.target_logps, ("batches_of_targets", "layout"), 3, "reference"),
        (stages.sequence_logps, ("indexed_batches", "layout"), 2, "reference"),
    ]


# What a run asks of the forecast.


def run_on(device: str, *, is_main: bool = True) -> Any:
    engine = SimpleNamespace(device=torch.device(device), is_main=is_main, strategy="strategy", plan="plan")
    return SimpleNamespace(engine=engine, recipe="recipe", inputs=SimpleNamespace(config="config"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Questions to the forecast on a GPU that is known."""
    from cookbook.forecast import verdict

    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(forecasts, "find_gpu", lambda name: f"gpu {name[-4:]}")
    monkeypatch.setattr(verdict, "of_run", lambda *given: asked.append(given) or "memory")
    monkeypatch.setattr(verdict, "time_of_run", lambda *given: asked.append(given) or SimpleNamespace(record=dict))
    return asked


def test_memory_is_forecast_by_the_main_process_on_a_gpu(asked: list[Any]):
    notes: list[str] = []
    assert forecasts.memory(run_on("cuda"), notes) == "memory"
    assert asked == [("config", "recipe", "strategy", "plan", "gpu HBM3")]
    assert forecasts.memory(run_on("cuda", is_main=False), notes) is None
    assert forecasts.memory(run_on("cpu"), notes) is None and len(asked) == 1 and not notes


def test_the_time_of_a_step_is_forecast_for_its_tokens_on_a_gpu(asked: list[Any], monkeypatch: pytest.MonkeyPatch):
    from cookbook.forecast import verdict

    assert forecasts.step_time(run_on("cpu"), 12.0) == {"none": "there is none for a CPU"}
    assert forecasts.step_time(run_on("cuda"), 12.0) == {}
    assert asked == [("config", "recipe", "strategy", "plan", "gpu HBM3", 12.0)]
    monkeypatch.setattr(verdict, "time_of_run", lambda *_: "no speed is known")
    assert forecasts.step_time(run_on("cuda"), None) == {"none": "no speed is known"}


def test_a_forecast_that_fails_is_a_note_and_ends_no_run(asked: list[Any], monkeypatch: pytest.MonkeyPatch):
    from cookbook.forecast import skeleton, verdict

    def fail(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    for place, name in ((verdict, "of_run"), (verdict, "time_of_run"), (skeleton, "skeleton")):
        monkeypatch.setattr(place, name, fail)
    notes: list[str] = []
    run = run_on("cuda")
    assert forecasts.memory(run, notes) is None
    assert forecasts.step_time(run, 1.0) == {"none": "division by zero"}
    counter = forecasts.flop_counter(run, notes)
    assert counter.sizes is None and counter.peak and counter.peak > 1e14
    assert notes == ["no forecast of memory: division by zero", "mfu is not logged: division by zero"]


def test_sizes_are_counted_by_the_main_process_where_the_peak_is_known(asked, monkeypatch: pytest.MonkeyPatch):
    from cookbook.forecast import skeleton
    from cookbook.forecast.costs import flops

    monkeypatch.setattr(skeleton, "skeleton", lambda config, recipe: f"skeleton of {config} by {recipe}")
    monkeypatch.setattr(flops, "sizes_of", lambda config, model: f"sizes of {config}, {model}")
    notes: list[str] = []
    sizes = "sizes of config, skeleton of config by recipe"
    assert forecasts.flop_counter(run_on("cuda"), notes).sizes == sizes
    assert forecasts.flop_counter(run_on("cuda", is_main=False), notes).sizes is None
    assert forecasts.flop_counter(run_on("cpu"), notes) == forecasts.FlopCounter(sizes=None, peak=None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU of tomorrow")
    assert forecasts.flop_counter(run_on("cuda"), notes) == forecasts.FlopCounter(sizes=None, peak=None)
    assert not notes


def test_a_question_goes_to_the_forecast_as_it_was_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from cookbook.forecast import changes, fitting

    kept: list[Any] = []

    class Kept:
        def __enter__(self) -> None:
            kept.append("open")

        def __exit__(self, *_: object) -> None:
            kept.append("closed")

    monkeypatch.setattr(forecasts, "kept_results", lambda cache: kept.append(cache) or Kept())
    monkeypatch.setattr(forecasts, "load_known", lambda: "known")
    monkeypatch.setattr(fitting, "fitting", lambda *given: (*given, kept[-1]))
    for name in ("smaller_micro_batch", "next_strategy", "rung_below"):
        monkeypatch.setattr(changes, name, lambda *given, name=name: (name, *given))
    given: Any = ("recipe", "strategy", "machines", "name")
    asked_of: Any = forecasts
    assert asked_of.smaller_micro_batch(*given, "sizes") == ("smaller_micro_batch", *given, "sizes")
    assert asked_of.next_strategy(*given, "others", "sizes") == ("next_strategy", *given, "others", "sizes")
    assert asked_of.fitting(*given, "sizes", "kinds", cache=tmp_path) == (*given, "sizes", "kinds", "open")
    assert kept == [tmp_path, "open", "closed"]
    assert asked_of.first_change(*given) == ("rung_below", *given, "known")
    monkeypatch.setattr(changes, "rung_below", lambda *given: None)
    assert asked_of.first_change(*given) == changes.NOTHING_HELPS


def test_the_machines_of_a_run_are_its_processes_and_of_simulated_ones_all_memory(monkeypatch: pytest.MonkeyPatch):
    here = parse_machines("8xH100")
    monkeypatch.setattr(next_start, "this_machine", lambda: here)
    monkeypatch.setattr(next_start.simulated_gpus, "is_active", lambda: False)
    plan: Any = SimpleNamespace(num_gpus=8, num_processes=4)
    machines = next_start.machines_of(plan)
    assert (machines.gpus_each, machines.gpu, machines.usable_gib) == (4, here.gpu, here.usable_gib)
    monkeypatch.setattr(next_start.simulated_gpus, "is_active", lambda: True)
    assert here.usable_gib and next_start.machines_of(plan).usable_gib == here.usable_gib + DRIVER_RESERVE_GIB
    monkeypatch.setattr(next_start, "this_machine", lambda: parse_machines("cpu"))
    assert next_start.machines_of(plan).usable_gib is None
    monkeypatch.setattr(next_start, "this_machine", lambda: here)
    on_cpu = next_start.machines_of(SimpleNamespace(num_gpus=0, num_processes=4))  # type: ignore[arg-type]
    assert (on_cpu.gpus_each, on_cpu.gpu, on_cpu.usable_gib) == (0, None, None)


@pytest.mark.parametrize(("processes", "gpus", "machines"), [(8, 8, 1), (9, 8, 2), (16, 8, 2), (2, 0, 2), (0, 8, 1)])
def test_an_advice_is_for_as_many_machines_as_the_processes_fill(monkeypatch, processes, gpus, machines):
    monkeypatch.setattr(next_start, "this_machine", lambda: parse_machines(f"{gpus}xH100" if gpus else "cpu"))
    monkeypatch.setattr(
        forecasts, "first_change", lambda recipe, strategy, here, name: f"{here.num_machines} for {name}"
    )
    plan: Any = SimpleNamespace(num_processes=processes)
    given: Any = (None, None, plan, "mine.yaml")
    assert next_start.suggestion(*given) == f"{machines} for mine.yaml"

    def fail(*_: object) -> None:
        raise ValueError("no driver")

    monkeypatch.setattr(forecasts, "first_change", fail)
    assert next_start.suggestion(*given) == "cookbook plan mine.yaml (no advice from here: no driver)"
