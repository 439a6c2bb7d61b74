"""A run whose GPU memory ran out goes on: with a smaller micro-batch, then under another strategy, on the same curve.

python -m pytest -q tests/test_escalation.py
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

import simulated_gpus
from cookbook.commands.cli import main
from cookbook.commands.launch import run_and_restart
from cookbook.config.recipe import Recipe
from cookbook.config.sections import BatchSection
from cookbook.config.strategy import Strategy
from cookbook.run import forecasts, shortage
from cookbook.run import next_start as next_starts
from cookbook.run.next_start import Start, next_start, smaller_batches, suggestion
from cookbook.start.launchers import NOTE_FILE
from cookbook.start.run_plan import load_pair, make_plan
from cookbook.system import status
from tests.curves import file_of, write_chats
from tests.gpu_runs import LIMIT_SECONDS, NUM_GPUS, RECIPE, RECIPES, GpuLab
from tests.needs import need_simulated_gpus

BATCH = "{global_batch_size: 16, micro_batch_size: 8}"
BAND = 2e-3
"""In loss, under bf16: another micro-batch rounds otherwise."""


def start_of(path: Path, strategy: str, assignments: list[str], num_gpus: int = NUM_GPUS) -> Start:
    recipe, loaded = load_pair(path, assignments, Path(strategy))
    plan = make_plan(recipe, loaded, num_processes=2, num_gpus=num_gpus, recipe_name=str(path))
    return Start(recipe_name=str(path), assignments=assignments, recipe=recipe, strategy=loaded, plan=plan)


def write_recipe(folder: Path, rows: Path, batch: str = BATCH) -> Path:
    text = RECIPE.format(**RECIPES["memory"] | {"batch": batch, "steps": 3}).replace("LONG", str(rows))
    (folder / "recipe.yaml").write_text(text.replace("OUTPUT", str(folder / "run")))
    return folder / "recipe.yaml"


def recipe_with_a_row(folder: Path, batch: str = BATCH) -> Path:
    """A recipe that passes the checks of a start."""
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    return write_recipe(folder, rows, batch)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture
def gpus_of(gpu_lab: GpuLab, monkeypatch):
    """Runs `run_and_restart` on two simulated GPUs of so much memory; returns its exit code and the command lines."""
    need_simulated_gpus()

    def climb(folder: Path, strategy: str, memory: int, *settings: str) -> tuple[int, list[list[str]]]:
        limit = {"SIMULATED_GPU_MEMORY": str(memory)}
        for name, value in (simulated_gpus.environment(NUM_GPUS) | limit).items():
            monkeypatch.setenv(name, value)
        commands = []

        def run_child(command: list[str], environment: dict[str, str], output_dir: Path) -> int:
            commands.append(command)
            program = command.index("train.py")
            names = (NOTE_FILE, shortage.HISTORY)
            job = {"folder": str(folder), "words": command[program:], "accelerate": command[2:program]}
            job |= {"processes": 2, "limit": LIMIT_SECONDS}
            job["variables"] = {name: environment[name] for name in names} | limit
            return gpu_lab.parent("gpu").ask(job)["codes"][0]

        path = write_recipe(folder, gpu_lab.folder / "long.jsonl")
        return run_and_restart(start_of(path, strategy, list(settings)), run_child, {}), commands

    return climb


@pytest.mark.parametrize(("code", "starts"), [(75, 1), (0, 1), (1, 3)])
def test_a_run_that_was_asked_to_stop_or_has_ended_is_not_started_again(tmp_path, code, starts):
    """Although memory ran out within it; any other end is answered with the rungs that are left, 4 and 2."""
    commands = []

    def run_child(command: list[str], environment: dict[str, str], output_dir: Path) -> int:
        commands.append(command)
        Path(environment[NOTE_FILE]).write_text(json.dumps({"reason": "CUDA out of memory"}))
        return code if len(commands) < 3 else 75

    write_chats(tmp_path / "chats.jsonl")
    path = write_recipe(tmp_path, tmp_path / "chats.jsonl")
    start = start_of(path, "accelerate_configs/ddp.yaml", ["run.on_out_of_memory=smaller_micro_batch"])
    assert run_and_restart(start, run_child, {}) == (code if code != 1 else 75)
    assert len(commands) == starts


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("strategy", "memory"),
    [
        pytest.param("fsdp2", 225_000_000, marks=[pytest.mark.slow, pytest.mark.thorough]),
        ("zero3", 700_000_000),
    ],
)
def test_a_run_goes_on_with_a_smaller_micro_batch(gpus_of, gpu_lab, tmp_path, capsys, strategy, memory):
    settings = ["run.on_out_of_memory=smaller_micro_batch", "run.save_every_steps=1"]
    code, commands = gpus_of(tmp_path, file_of(strategy, tmp_path), memory, *settings)
    told = (tmp_path / "log_0").read_text() + (tmp_path / "log_1").read_text()
    assert code == 0, told[-3000:]
    assert len(commands) == 2 and "batch.micro_batch_size=4" in commands[1]
    assert f"out of memory under {strategy} with micro-batch 8: starts again" in capsys.readouterr().err
    record = json.loads((tmp_path / "run/run.json").read_text())
    (step,) = record["out_of_memory"]
    assert (step["from"], step["to"]) == (f"{strategy} with micro-batch 8", f"{strategy} with micro-batch 4")
    assert "CUDA out of memory" in step["reason"]
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "out_of_memory"]
    assert event["step"] == 1 and record["resumed_from"], "the first step fitted: no optimizer state yet"
    plenty = tmp_path / "plenty"
    plenty.mkdir()
    assert gpus_of(plenty, file_of(strategy, plenty), 80 << 30, *settings)[0] == 0
    assert losses(tmp_path) == pytest.approx(losses(plenty), abs=BAND)


@pytest.mark.simulated
def test_where_no_micro_batch_fits_it_goes_on_under_another_strategy(gpus_of, tmp_path, capsys):
    settings = ["run.on_out_of_memory=next_strategy", "run.save_every_steps=1"]
    code, commands = gpus_of(tmp_path, "accelerate_configs/zero3.yaml", 480_000_000, *settings)
    told = (tmp_path / "log_0").read_text() + (tmp_path / "log_1").read_text()
    assert code == 0, told[-3000:]
    assert "accelerate_configs/fsdp2.yaml" in commands[-1]
    record = json.loads((tmp_path / "run/run.json").read_text())
    (step,) = record["out_of_memory"]
    assert (step["from"], step["to"]) == ("zero3 with micro-batch 8", "fsdp2 with micro-batch 8")
    assert record["strategy"]["file"] == "accelerate_configs/fsdp2.yaml"
    assert "still 16 sequences a step" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.simulated
def test_without_the_key_or_a_rung_it_ends_as_before(gpus_of, tmp_path, capsys):
    code, commands = gpus_of(
        tmp_path, "accelerate_configs/fsdp2.yaml", 90_000_000, "run.on_out_of_memory=smaller_micro_batch"
    )
    assert code == 1 and len(commands) == 1, "no smaller micro-batch fits by the forecast"
    assert "nothing is left to try. Next: " in capsys.readouterr().err


def test_a_micro_batch_shrinks_by_half_or_more_and_splits_the_batch(tmp_path):
    recipe, _ = load_pair(recipe_with_a_row(tmp_path, "{global_batch_size: 24, micro_batch_size: 12}"))
    assert [batch.micro_batch_size for batch in smaller_batches(recipe, 2)] == [6, 3, 1]
    assert [batch.micro_batch_size for batch in smaller_batches(recipe, 3)] == [4, 2, 1]
    tokens = BatchSection(global_batch_size=24, micro_batch_tokens=1000)
    batches = smaller_batches(recipe.model_copy(update={"batch": tokens}), 2)
    assert [batch.micro_batch_tokens for batch in batches] == [500, 250, 192], "a sample has up to 192"


def test_the_strategy_that_is_tried_next_is_the_forecasts(tmp_path, monkeypatch):
    """With the micro-batch that somebody wrote among those offered, and without a strategy that was tried."""
    path = recipe_with_a_row(tmp_path)
    first = start_of(path, "accelerate_configs/ddp.yaml", ["run.on_out_of_memory=next_strategy"])
    start = first.change(first.strategy, BatchSection(global_batch_size=16, micro_batch_size=1), resumes=False)
    offered = []

    def answer(recipe: Recipe, strategy: Strategy, machines: object, name: str, others: list, batches: list):
        offered.append(([other.name for other in others], [batch.micro_batch_size for batch in batches]))
        others = [other for other in others if other.name == "zero2"]
        return (others[0], batches[0]) if others else None

    monkeypatch.setattr(forecasts, "smaller_micro_batch", lambda *given: None)
    monkeypatch.setattr(forecasts, "next_strategy", answer)
    new = next_start(start, first, {"accelerate_configs/ddp.yaml"}, resumes=False)
    assert new is not None and new.words == "zero2 with micro-batch 8" and offered[0][1] == [8, 4, 2, 1]
    assert {"zero2", "fsdp2"} <= {*offered[0][0]} and "ddp" not in offered[0][0]
    assert next_start(start, first, {first.strategy.path, new.strategy.path}, resumes=False) is None


def test_an_advice_names_the_recipe_that_ran_out(tmp_path, monkeypatch):
    path = recipe_with_a_row(tmp_path)
    start = start_of(path, "accelerate_configs/ddp.yaml", [])
    given = start.recipe, start.strategy, start.plan, str(path)
    monkeypatch.setattr(
        forecasts, "first_change", lambda *given: f"for {[type(of).__name__ for of in given]} {given[3]}"
    )
    assert suggestion(*given) == f"for ['Recipe', 'Strategy', 'Machines', 'str'] {path}"


@pytest.mark.parametrize("resumes", [True, False])
def test_a_smaller_micro_batch_by_the_forecast_comes_before_another_strategy(tmp_path, monkeypatch, resumes):
    """It is asked of the run's own machines, and goes on from a checkpoint if there is one."""
    path, asked = recipe_with_a_row(tmp_path), []
    start = start_of(path, "accelerate_configs/ddp.yaml", ["run.on_out_of_memory=next_strategy"])
    monkeypatch.setattr(next_starts, "machines_of", lambda plan: f"machines of {plan.num_processes}")
    monkeypatch.setattr(forecasts, "smaller_micro_batch", lambda *given: asked.append(given) or given[4][1])
    new = next_start(start, start, {start.strategy.path}, resumes=resumes)
    assert new is not None and new.words == "ddp with micro-batch 2"
    assert new.recipe.run.resume == ("auto" if resumes else start.recipe.run.resume)
    ((*given, batches),) = asked
    assert given == [start.recipe, start.strategy, "machines of 2", str(path)]
    assert [batch.micro_batch_size for batch in batches] == [4, 2, 1]


@pytest.mark.parametrize(("key", "gpus"), [("smaller_micro_batch", 2), ("next_strategy", 0)])
def test_another_strategy_is_tried_on_gpus_and_if_it_is_asked_for(tmp_path, monkeypatch, key, gpus):
    start = start_of(
        recipe_with_a_row(tmp_path), "accelerate_configs/ddp.yaml", [f"run.on_out_of_memory={key}"], num_gpus=gpus
    )
    monkeypatch.setattr(forecasts, "smaller_micro_batch", lambda *given: None)
    assert next_start(start, start, {start.strategy.path}, resumes=True) is None


def test_strategies_that_name_another_number_of_processes_are_not_tried(tmp_path, monkeypatch):
    start, asked = (
        start_of(recipe_with_a_row(tmp_path), "accelerate_configs/ddp.yaml", ["run.on_out_of_memory=next_strategy"]),
        [],
    )
    known = [SimpleNamespace(path=name, num_processes=count) for name, count in (("a", None), ("b", 2), ("c", 4))]
    monkeypatch.setattr(next_starts, "load_known", lambda: known)
    monkeypatch.setattr(next_starts, "machines_of", lambda plan: "machines")
    monkeypatch.setattr(forecasts, "smaller_micro_batch", lambda *given: None)
    monkeypatch.setattr(forecasts, "next_strategy", lambda *given: asked.append(given))
    assert next_start(start, start, set(), resumes=True) is None
    ((*given, others, batches),) = asked
    assert given == [start.recipe, start.strategy, "machines", start.recipe_name] and batches[0] == start.recipe.batch
    assert [other.path for other in others] == ["a", "b"]


def test_what_is_passed_on_is_the_same_run(tmp_path):
    start = start_of(recipe_with_a_row(tmp_path), "accelerate_configs/ddp.yaml", ["seed=7", "batch.micro_batch_size=8"])
    changed = start.change(start.strategy, start.recipe.batch.model_copy(update={"micro_batch_size": 2}), resumes=True)
    assert changed.recipe.run.resume == "auto" and changed.plan.gradient_accumulation_steps == 4
    same = changed.recipe.model_copy(update={"batch": start.recipe.batch, "run": start.recipe.run})
    assert same == start.recipe
    assert changed.command.count("batch.micro_batch_size=2") == 1 and "batch.micro_batch_size=8" not in changed.command
    spaced = start_of(
        Path(start.recipe_name), start.strategy.path, ["batch.micro_batch_size =8", "run.output_dir=mine"]
    )
    tokens = BatchSection(global_batch_size=16, micro_batch_tokens=512)
    others = replace(spaced, logs=tmp_path / "logs").change(spaced.strategy, tokens, resumes=False)
    assert others.words == "ddp with micro-batch 512 tokens" and str(tmp_path / "logs") in others.command
    assert sorted(text.partition("=")[0] for text in others.assignments) == [
        "batch.micro_batch_tokens",
        "run.output_dir",
        "run.resume",
    ]
    assert others.recipe.run.output_dir == "mine" and others.recipe.run.resume == spaced.recipe.run.resume


def test_the_first_process_that_ran_out_leaves_the_answer_to_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv(NOTE_FILE, str(tmp_path / "note"))
    assert shortage._note("first") and shortage._note("second")
    assert json.loads((tmp_path / "note").read_text()) == {"reason": "first"}
    monkeypatch.delenv(NOTE_FILE)
    assert not shortage._note("third"), "nobody would read it"


def test_several_machines_are_refused(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = ["--machines", "2", "--machine", "0", "--first", "127.0.0.1"]
    assert main(["launch", "recipes/quickstart.yaml", *words, "--set", "run.on_out_of_memory=next_strategy"]) == 2
    assert "run.on_out_of_memory is next_strategy: each machine has a launcher" in capsys.readouterr().err


def test_a_shortage_that_was_answered_is_no_failure_of_the_next_start(tmp_path):
    for attempt in range(status.MAX_FAILURES + 1):
        failures = status.past_failures(tmp_path)
        assert failures == [], attempt
        status.Status(tmp_path, is_main=True, failed_after=failures).end("failed", exit_code=1)
        status.mark_stopped(tmp_path, "out of memory")
