"""`batch.micro_batch_size: auto` is the most that fits, `model.gradient_checkpointing: auto` the fastest, by the
forecast; in all that a run writes they are values. And what a number loses beside the most that fits.

python -m pytest -q tests/test_micro_batch.py
"""

import itertools
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, clean_environment
from needs import need_simulated_gpus

import simulated_gpus
from cookbook.config.recipe import Recipe, load_recipe
from cookbook.config.sections import Auto, BatchSection
from cookbook.config.strategy import load_strategy, strategy_path
from cookbook.forecast import fitting, headline, order, verdict
from cookbook.forecast.fitting import by_auto
from cookbook.forecast.ranking import forecast_all
from cookbook.forecast.show import as_record, in_words
from cookbook.forecast.step_time import Range
from cookbook.forecast.verdict import TraceCache
from cookbook.run import auto_settings
from cookbook.start.run_plan import autos, even, make_plan
from cookbook.system.files import RecipeError, dump_yaml
from cookbook.system.hardware import parse_machines
from cookbook.training.models.structure import config_of

QUICKSTART = Path("recipes/quickstart.yaml")
ROOM = replace(parse_machines("1x24GB"), usable_gib=4.0)
"""Less than the whole step takes."""


def recipe_with(*settings: str) -> Recipe:
    whole = ["batch.micro_batch_size=auto", "batch.global_batch_size=768", "mixed_precision=bf16"]
    return load_recipe(QUICKSTART, [*whole, *settings])


def chosen(recipe: Recipe, strategy: str, *, processes: int = 1, gpus: int = 1) -> tuple[int, str]:
    loaded = load_strategy(strategy_path(strategy))
    plan = make_plan(recipe, loaded, num_processes=processes, num_gpus=gpus, recipe_name=str(QUICKSTART))
    choices = auto_settings.choose(QUICKSTART, recipe, loaded, plan)
    return choices["batch.micro_batch_size"]


@pytest.mark.slow
def test_auto_is_the_largest_that_splits_the_batch_and_fits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(auto_settings, "machines_of", lambda plan: ROOM)
    recipe = recipe_with()
    size, why = chosen(recipe, "single")
    assert 1 < size < 768 and 768 % size == 0 and "4 GiB" in why
    verdicts = []
    for count in (size, next(larger for larger in range(size + 1, 769) if 768 % larger == 0)):
        batch = recipe.batch.model_copy(update={"micro_batch_size": count})
        changed, single = recipe.model_copy(update={"batch": batch}), load_strategy(strategy_path("single"))
        (forecast,) = forecast_all(changed, [single], ROOM, "", limits=False).forecasts
        verdicts.append(forecast.verdict)
    assert verdicts == ["fits", "tight"]


QLORA = Path("recipes/llama31_8b/sft_qlora.yaml")


def single_of(monkeypatch: pytest.MonkeyPatch, path: Path, gpus: str, *settings: str) -> tuple:
    """A library recipe under `single` on one such GPU, as arguments of `choose`."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(auto_settings, "machines_of", lambda plan: parse_machines(gpus))
    recipe, single = load_recipe(path, [*settings]), load_strategy(strategy_path("single"))
    return path, recipe, single, make_plan(recipe, single, num_processes=1, num_gpus=1, recipe_name=str(path))


@pytest.mark.slow
@pytest.mark.parametrize("gpus", ["1xH100", "1x24GB"])
def test_checkpointing_and_micro_batch_are_chosen_together(monkeypatch: pytest.MonkeyPatch, gpus: str):
    """Held against all of them, tried one by one: the least time, and of that kind the most samples."""
    keys = ["batch.micro_batch_size=auto", "model.gradient_checkpointing=auto"]
    path, recipe, single, plan = single_of(monkeypatch, QLORA, gpus, *keys)
    choices = auto_settings.choose(path, recipe, single, plan)
    fit = {}
    for kind, micro in itertools.product((False, "selective", True), (1, 2, 4, 8, 16)):
        model = recipe.model.model_copy(update={"gradient_checkpointing": kind})
        batch = recipe.batch.model_copy(update={"micro_batch_size": micro})
        changed = recipe.model_copy(update={"model": model, "batch": batch})
        (forecast,) = forecast_all(changed, [single], parse_machines(gpus), "", limits=False).forecasts
        if forecast.verdict == "fits":
            fit[kind, micro] = forecast.time.low + forecast.time.high if forecast.time else 0.0
    best = choices["model.gradient_checkpointing"][0], choices["batch.micro_batch_size"][0]
    assert best[1] == max(micro for kind, micro in fit if kind == best[0])
    report = forecast_all(recipe, [single], parse_machines(gpus), str(path), limits=False)
    (shown,) = by_auto(report, str(path), all_of_them=True)  # by plan, as launch takes it
    assert (shown.best.checkpointing, shown.best.batch.micro_batch_size) == best
    if gpus == "1xH100":  # where a time is forecast
        assert fit[best] == min(fit.values()) and best == (False, 2)
        assert " s a step by the forecast; " in choices["model.gradient_checkpointing"][1]
    else:
        assert best[0] is True and not any(kind is False for kind, _ in fit)


@pytest.mark.parametrize("estimate", [None, 1, 39, 40, 41, 2**16])
def test_the_largest_that_fits_is_found_around_an_estimate(estimate: int | None):
    """Whatever the estimate is, as a walk through all sizes finds it; with the right one hardly more are tried."""
    sizes = even(10**10 // 8)
    batches = [recipe_with().batch.model_copy(update={"micro_batch_size": size}) for size in sizes]
    for most in (0, 1, 40, 50, 2**17):
        tried: list[int] = []

        def is_too_large(batch: BatchSection, most: int = most, tried: list[int] = tried) -> bool:
            tried.append(batch.micro_batch_size)
            return batch.micro_batch_size > most

        count = fitting._first_too_large(batches, is_too_large, lambda: estimate)
        assert count == sum(size <= most for size in sizes)
        if most in (40, estimate) and estimate in (40, 41):
            assert {*tried} == {1, 40, 50}
        if most == 0:
            assert tried == [1], "of a run that is too large with one sample no other number is tried"
        elif estimate is None:
            assert max(tried) > 100, "what takes longest is tried without one"


def test_one_sample_is_taken_where_more_are_refused(monkeypatch: pytest.MonkeyPatch):
    def refuse_more(traces: TraceCache, *arguments: Any, **options: Any) -> verdict.Forecast:
        own = verdict.forecast(traces, *arguments, **options)
        is_refused = traces.recipe.batch.micro_batch_size > 1
        return replace(own, verdict="cannot run", memory=None, time=None) if is_refused else own

    monkeypatch.setattr(fitting, "forecast", refuse_more)
    recipe, single = recipe_with("batch.global_batch_size=8"), load_strategy(strategy_path("single"))
    batches = [recipe.batch.model_copy(update={"micro_batch_size": size}) for size in even(8)]
    (fit,) = fitting.fitting(recipe, single, parse_machines("1xH100"), "", batches, [True])
    assert fit.batch is batches[0]


@pytest.mark.parametrize("gib", [80.0, 1.5])
def test_the_best_alone_is_the_first_of_all_kinds(gib: float, monkeypatch: pytest.MonkeyPatch):
    """Where the whole step fits without recomputation no other kind is looked at, and else each is."""
    recipe, single = recipe_with("batch.global_batch_size=256"), load_strategy(strategy_path("single"))
    machines = replace(parse_machines("1xH100"), usable_gib=gib)
    batches = [recipe.batch.model_copy(update={"micro_batch_size": size}) for size in even(256)]
    asked = (recipe, single, machines, "", batches, (False, "selective", True))
    of_all = fitting.fitting(*asked)
    kinds = set()
    changed = fitting.TraceCache.with_sections

    def noted(traces: TraceCache, **own: Any) -> TraceCache:
        kinds.update(section.gradient_checkpointing for name, section in own.items() if name == "model")
        return changed(traces, **own)

    monkeypatch.setattr(fitting.TraceCache, "with_sections", noted)
    alone = fitting.fitting(*asked, best_alone=True)
    assert alone[0] == of_all[0] and len(of_all) > 1
    assert (alone[0].checkpointing is False and alone[0].batch.micro_batch_size == 256) == (gib == 80)
    assert kinds == ({False} if gib == 80 else {False, True, "selective"})


def noted_traces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, int, bool]]:
    """Checkpointing, tokens of a micro-batch and whether weights are cast, of each trace from now on that is new."""
    made: list[tuple[object, int, bool]] = []
    trace_pass = verdict.trace_pass

    def noted(config: Any, recipe: Recipe, **options: Any) -> Any:
        kind = recipe.model.model_dump()["gradient_checkpointing"]
        made.append((kind, options["rows"] * options["length"], options["autocast"]))
        return trace_pass(config, recipe, **options)

    monkeypatch.setattr(verdict, "trace_pass", noted)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("single", False), ("single", True), ("fsdp2", "selective")])
def test_a_bound_of_memory_is_below_what_a_trace_tells(monkeypatch: pytest.MonkeyPatch, name: str, kind: object):
    """With and without accumulation. The control counts the loss too, and is the memory itself."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe = load_recipe(Path("recipes/qwen3_0_6b/sft_lora.yaml"), ["batch.global_batch_size=32"])
    model = recipe.model.model_copy(update={"gradient_checkpointing": kind})
    traces = TraceCache(config_of(recipe)[0], recipe.model_copy(update={"model": model}))
    strategy, machines = load_strategy(strategy_path(name)), parse_machines("1xH100" if name == "single" else "2xH100")
    assert traces.fills_chunks(strategy) > 1, "the loss of a sample is smaller than a chunk"
    for size in (8, 16):
        larger = traces.with_sections(batch=recipe.batch.model_copy(update={"micro_batch_size": size}))
        memory = verdict.forecast(larger, strategy, machines, limits=False).memory
        assert memory is not None
        asked = (larger, strategy, machines, (1, 2))
        least, whole = (verdict.extrapolated_need(*asked, is_least=is_least) for is_least in (True, False))
        assert 0.9 * memory.needed[1] < least < whole == pytest.approx(memory.needed[1], rel=1e-3)
        assert least <= memory.needed[1]


@pytest.mark.slow
def test_a_bound_of_time_is_below_each_time():
    """Each strategy, micro-batch and checkpointing takes more, compiled or not; the control: not three fifths more."""
    recipe = recipe_with("batch.global_batch_size=32")
    traces, machines = TraceCache(config_of(recipe)[0], recipe), parse_machines("4xH100")
    for name in ("ddp", "zero2", "fsdp2", "zero3"):
        strategy, shares = load_strategy(strategy_path(name)), []
        whole = traces.with_sections(
            batch=recipe.batch.model_copy(update={"micro_batch_size": 8}),
            model=recipe.model.model_copy(update={"gradient_checkpointing": False}),
        )
        least = verdict.least_time(whole, strategy, machines)
        assert least is not None
        for kind, size in itertools.product((False, True, "selective"), (1, 2, 8)):
            model = recipe.model.model_copy(update={"gradient_checkpointing": kind})
            batch = recipe.batch.model_copy(update={"micro_batch_size": size})
            changed = traces.with_sections(model=model, batch=batch)
            times = [verdict.forecast(changed, strategy, machines, limits=False).time]
            times += [verdict.time_compiled(changed, strategy, machines)]
            for time in filter(None, times):
                assert least.low <= time.low and least.high <= time.high
                shares.append(least.high / time.high)
        assert max(shares) > 0.4


@pytest.mark.slow
def test_a_short_answer_traces_no_strategy_that_it_cannot_name(monkeypatch: pytest.MonkeyPatch):
    """On one GPU those that are not surely faster than the plain process; what all of them give is the same."""
    monkeypatch.setattr(verdict, "TRACES", {})
    machines = replace(parse_machines("1xH100"), usable_gib=1.5)
    recipe = recipe_with("batch.global_batch_size=256", "model.gradient_checkpointing=auto")
    named = [load_strategy(strategy_path(name)) for name in ("zero1", "single", "fsdp2")]
    report = forecast_all(recipe, named, machines, "", limits=False)
    made = noted_traces(monkeypatch)
    alone = by_auto(report, "", all_of_them=False, best_alone=True)
    of_alone = [*made]
    assert len({*of_alone}) == len(of_alone) == 7
    whole = by_auto(report, "", all_of_them=False)
    assert [setting.strategy.name for setting in alone] == ["single"] and len(whole) > 1
    casts = [{casts for *_, casts in traces} for traces in (of_alone, made[len(of_alone) :])]
    assert casts == [{True}, {False}], "weights are cast in the plain process alone"
    best, same = (headline.best_by_auto(report, settings) for settings in (whole, alone))
    assert best is not None and (best.strategy, best.best, best.compiled) == (same.strategy, same.best, same.compiled)


@pytest.mark.slow
def test_on_one_gpu_the_plain_process_alone_is_forecast_if_none_is_surely_faster(monkeypatch: pytest.MonkeyPatch):
    """The report is the first of the whole one; with more GPUs, less room or a lower bound all are forecast."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(verdict, "TRACES", {})
    auto = ["batch.global_batch_size=4", "batch.micro_batch_size=auto", "model.gradient_checkpointing=auto"]
    recipe = load_recipe(Path("recipes/qwen3_0_6b/sft_lora.yaml"), auto)
    machines = parse_machines("1xL4")
    named = [load_strategy(strategy_path(name)) for name in ("zero1", "single", "fsdp2", "fsdp2_tp")]
    made = noted_traces(monkeypatch)
    short = forecast_all(recipe, named, machines, "", limits=False, first_alone=True)
    settings = by_auto(short, "", all_of_them=False, best_alone=True)
    assert fitting.is_settled(short, settings, "") and {casts for *_, casts in made} == {True}
    whole = forecast_all(recipe, named, machines, "", limits=False)
    assert fitting.is_settled(whole, [], "")
    assert short.forecasts == whole.forecasts[:1] and [*map(len, (short.left_out, whole.left_out))] == [3, 0]
    assert headline.best_by_auto(short, settings) == headline.best_by_auto(whole, by_auto(whole, "", all_of_them=False))
    for other in (parse_machines("2xL4"), replace(machines, usable_gib=1.0)):
        assert not forecast_all(recipe, named, other, "", limits=False, first_alone=True).left_out
    assert not fitting.is_settled(short, [], ""), "nothing fits by auto"
    none = Range(low=0.0, high=0.0, bottleneck="", parts=())
    for room in (order, fitting):
        monkeypatch.setattr(room, "least_time", lambda *_: none)
    assert not fitting.is_settled(short, settings, "")
    assert not forecast_all(recipe, named, machines, "", limits=False, first_alone=True).left_out


@pytest.mark.parametrize("gpus", ["1xH100", "4xH100"])
def test_what_is_left_out_is_never_the_answer(gpus: str):
    """Drawn times, many of them equal, of which some bounds lie far below: the best of all is among what is left."""
    recipe, machines = recipe_with("batch.global_batch_size=8"), parse_machines(gpus)
    names = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp2")
    named = {name: load_strategy(strategy_path(name)) for name in names}
    report = forecast_all(recipe, list(named.values())[:1], machines, "", limits=False)
    draw, left_out = random.Random(1), 0
    for _ in range(500):
        rows, bounds = {}, {}
        for name in draw.sample(names, 4):
            low, width, below = draw.randint(4, 9), draw.randint(0, 4), draw.randint(0, 2)
            time = Range(low=low, high=low + width, bottleneck="", parts=())
            bounds[name] = replace(time, low=low - below, high=low + width - below) if draw.random() < 0.9 else None
            judged = draw.choice(["fits", "fits", "host memory unknown"])
            forecast = verdict.Forecast(strategy=named[name], verdict=judged, why=[], time=time)
            rows[name] = fitting.ByAuto(named[name], fitting.Fitting(True, recipe.batch, forecast), None)
        waiting, kept = [fitting._Candidate(named[name], []) for name in rows], []
        while waiting:
            kept.append(rows[waiting.pop(0).strategy.name])
            waiting = fitting._left(kept, waiting, machines, lambda candidate, by=bounds: by[candidate.strategy.name])
        left_out += len(rows) - len(kept)
        assert headline.best_by_auto(report, kept) is headline.best_by_auto(report, list(rows.values()))
    assert left_out > 250


def test_a_kind_that_is_still_open_is_forecast_as_one_that_recomputes():
    recipe, single = recipe_with("batch.global_batch_size=2"), load_strategy(strategy_path("single"))
    batches = [recipe.batch.model_copy(update={"micro_batch_size": 1})]
    of_auto, of_true = (
        fitting.fitting(recipe, single, parse_machines("1xH100"), "", batches, [kind]) for kind in ("auto", True)
    )
    assert of_auto[0].forecast.memory == of_true[0].forecast.memory


def test_a_number_says_what_a_larger_one_would_save(monkeypatch: pytest.MonkeyPatch):
    """A sample of 2,048 tokens in 4 bits leaves an H100 waiting for the host; one of 4,096 does not."""
    smallest = "batch.micro_batch_size=1"
    said = auto_settings.larger_micro_batch(*single_of(monkeypatch, QLORA, "1xH100", smallest))
    assert said and said.startswith("batch.micro_batch_size 1: 16 fits too, and by the forecast a step takes 4.5 to ")
    assert (
        auto_settings.larger_micro_batch(*single_of(monkeypatch, QLORA.with_name("sft_lora.yaml"), "1xH100", smallest))
        is None
    )
    assert auto_settings.larger_micro_batch(*single_of(monkeypatch, QLORA, "1x24GB", smallest)) is None, (
        "no time is forecast"
    )


def test_plan_has_a_row_of_what_auto_takes_for_each_strategy(monkeypatch):
    """With a number in the recipe too; the time with compile is that of a recipe which compiles."""
    machines = parse_machines("2xH100")
    named = [load_strategy(strategy_path(name)) for name in ("ddp", "zero3", "pp")]
    recipe = recipe_with("batch.micro_batch_size=2", "batch.global_batch_size=32", "data.max_length=128")
    report = forecast_all(recipe, named, machines, "", limits=False)
    choices = {choice.strategy.name: choice for choice in by_auto(report, "", all_of_them=True)}
    assert {name: choice.best.batch.micro_batch_size for name, choice in choices.items()} == {
        "ddp": 16,
        "zero3": 16,
        "pp": 1,
    }
    assert not any(choice.best.checkpointing for choice in choices.values()), "all of it fits"
    assert choices["zero3"].compiled is None, "compile is refused there"
    model = recipe.model.model_copy(update={"compile": True})
    compiled = recipe.model_copy(update={"model": model, "batch": choices["ddp"].best.batch})
    (whole,) = forecast_all(compiled, named[:1], machines, "", limits=False).forecasts
    assert whole.time == choices["ddp"].compiled and whole.time != choices["ddp"].best.time
    model = recipe.model.model_copy(update={"gradient_checkpointing": False})
    chosen = recipe.model_copy(update={"model": model, "batch": choices["ddp"].best.batch})
    (alone,) = forecast_all(chosen, named[:1], machines, "", limits=False).forecasts
    assert (alone.time, alone.memory) == (choices["ddp"].best.time, choices["ddp"].best.forecast.memory)

    monkeypatch.setattr(fitting, "MOST_BY_AUTO", 1)
    few = by_auto(report, "", all_of_them=False)
    assert [choice.strategy.name for choice in few] == [report.forecasts[0].strategy.name], (
        "the recipe's own is another"
    )
    words = in_words(report, "", num_samples=None, price=None, settings=few)
    *_, table = words.split("With batch.micro_batch_size and model.gradient_checkpointing by auto:\n")
    assert table.splitlines()[1].split()[:3] == [few[0].strategy.name, "16", "false"]
    (record,) = as_record(report, "", num_samples=None, price=None, settings=few)["by_auto"]
    assert (record["micro_batch_size"], record["gradient_checkpointing"]) == (16, False)
    assert record["step_seconds"] == [few[0].best.time.low, few[0].best.time.high]
    assert by_auto(forecast_all(recipe, named[:1], parse_machines("cpu"), "", limits=False), "", all_of_them=True) == []


@pytest.mark.parametrize(
    ("strategy", "gpus", "said"), [("ddp", 0, "what a CPU holds"), ("pp", 2, "stages of a pipeline")]
)
def test_auto_is_one_where_the_most_is_not_known_or_not_the_fastest(strategy: str, gpus: int, said: str):
    size, why = chosen(recipe_with("mixed_precision='no'"), strategy, processes=2, gpus=gpus)
    assert size == 1 and said in why


@pytest.mark.parametrize("error", [RecipeError(["no such model", "nor this"]), ZeroDivisionError("division by zero")])
def test_a_forecast_that_fails_leaves_what_needs_least_memory(monkeypatch: pytest.MonkeyPatch, error: Exception):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(auto_settings, "machines_of", lambda plan: ROOM)
    monkeypatch.setattr(fitting, "fitting", fail)
    assert chosen(recipe_with(), "single") == (1, f"there is no forecast: {str(error).splitlines()[0]}")


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
    model = recipe_with("model.gradient_checkpointing=auto").model
    assert f"{model.gradient_checkpointing}" == "auto" and model.recompute is True
    assert model.model_dump()["gradient_checkpointing"] is True
    recipe = recipe_with("model.gradient_checkpointing=auto")
    assert autos(recipe) == ["batch.micro_batch_size", "model.gradient_checkpointing"]


def settled(recipe: Recipe, tmp_path: Path, *, gpus: int) -> tuple[Recipe, int, list[str]]:
    ddp = load_strategy(strategy_path("ddp"))
    plan = make_plan(recipe, ddp, num_processes=2, num_gpus=gpus, recipe_name=str(QUICKSTART))
    recipe, plan, notes = auto_settings.settle(str(QUICKSTART), recipe, ddp, plan, cache=tmp_path / "cache")
    return recipe, plan.gradient_accumulation_steps, notes


def test_each_process_of_a_start_takes_what_the_first_one_chose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Ranks of which one has moved an earlier run's folder away would choose otherwise than those before."""
    sizes = iter([6, 3])
    monkeypatch.setattr(auto_settings, "choose", lambda *_, **__: {"batch.micro_batch_size": (next(sizes), "it fits")})
    recipe = recipe_with(f"run.output_dir={tmp_path / 'out'}")
    for attempt, size in (("a", 6), ("a", 6), ("b", 3)):
        monkeypatch.setattr(auto_settings.status, "attempt_id", lambda attempt=attempt: attempt)
        filled, accumulation, notes = settled(recipe, tmp_path, gpus=2)
        assert filled.batch.micro_batch_size == size and not autos(filled)
        assert accumulation == 768 // 2 // size and notes == [f"batch.micro_batch_size: auto is {size}: it fits"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_a_run_that_no_command_of_ours_starts_takes_what_launch_takes(launcher: str, tmp_path: Path):
    need_simulated_gpus()
    variables = clean_environment() | simulated_gpus.environment(2, memory=12 * 2**27) | {"OMP_NUM_THREADS": "1"}
    settings = ["model.gradient_checkpointing=auto", f"run.output_dir={tmp_path}", "run.max_steps=1"]
    settings += ["batch.micro_batch_size=auto", "batch.global_batch_size=64", "mixed_precision=bf16"]
    words = [str(QUICKSTART), "--set", "strategy=fsdp2", *(word for text in settings for word in ("--set", text))]
    start = ["accelerate.commands.launch", "--main_process_port", "0", "--num_processes", "2", "--config_file"]
    start += ["accelerate_configs/fsdp2.yaml"]
    if launcher == "torchrun":
        start = ["torch.distributed.run", "--nproc_per_node", "2"]
    for program in ([*start, "train.py"], ["cookbook", "launch", "--processes", "2"]):
        command = [sys.executable, "-m", *program, *words]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        values = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
        taken = values["batch"]["micro_batch_size"], values["model"]["gradient_checkpointing"]
        assert taken == (32, False), program
        assert (done.stdout + done.stderr).count("auto is") == 2


def test_without_a_gpu_a_start_takes_what_needs_least_memory(tmp_path: Path):
    recipe, accumulation, notes = settled(recipe_with("model.gradient_checkpointing=auto"), tmp_path, gpus=0)
    assert (recipe.batch.micro_batch_size, recipe.model.gradient_checkpointing, accumulation) == (1, True, 384)
    assert len(notes) == 2 and not (tmp_path / "cache").exists()
    assert settled(recipe, tmp_path, gpus=0) == (recipe, 384, [])
