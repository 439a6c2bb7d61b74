"""The record of a run before its first step: its header, run.json, what it opens, and the events of a start.

python -m pytest -q tests/test_run_record.py
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT

from cookbook.config.mesh import Mesh
from cookbook.config.recipe import load_recipe
from cookbook.facts.packing import Packing
from cookbook.run import forecasts, services, shortage
from cookbook.run.stages import Progress
from cookbook.start.run_plan import Plan
from cookbook.system import signals
from cookbook.training import metrics
from cookbook.training.data.batches import Layout
from cookbook.training.data.tokens import TokenSet

SETTINGS = ["batch.global_batch_size=4", "batch.micro_batch_size=2", "data.max_length=8", "run.monitor=false"]
HARDWARE = {"gpu": "NVIDIA H100", "simulated": False}


def samples_of(*lengths: int) -> TokenSet:
    num = sum(lengths)
    return TokenSet(ids=np.zeros(num, np.int32), is_label=np.ones(num, bool), offsets=np.cumsum([0, *lengths]))


class Collectives:
    def broadcast_text(self, text: str) -> str:
        return text


def run_of(folder: Path, *settings: str, num_local: int = 1, num_processes: int = 1, **changes: Any) -> Any:
    """A run of four samples in a batch, before its first step, as far as its records ask for it."""
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", [*SETTINGS, f"run.output_dir={folder}", *settings])
    mesh = Mesh(replicate=num_processes)
    plan = Plan(num_processes=num_processes, num_local=num_local, num_gpus=0, mesh=mesh, gradient_accumulation_steps=2)
    strategy = SimpleNamespace(name="ddp", path="accelerate_configs/ddp.yaml")
    engine = SimpleNamespace(
        is_main=True,
        world=SimpleNamespace(rank=0, local_rank=0, num_local=num_local, num_processes=num_processes),
        plan=plan,
        mesh=mesh,
        strategy=strategy,
        device=torch.device("cpu"),
        num_parameters=1000,
        num_trained=1000,
        current_step=3,
        collectives=Collectives(),
        describe=lambda: {"file": strategy.path},
        transformer=lambda: torch.nn.Linear(1, 1),
        model=torch.nn.Linear(1, 1),
    )
    data = SimpleNamespace(train=samples_of(4, 4, 2, 2), eval={"short": samples_of(3), "long": samples_of(5)})
    inputs = SimpleNamespace(config=SimpleNamespace(model_type="llama"), data=data, max_steps=1200, steps_per_epoch=300)
    run = SimpleNamespace(
        recipe=recipe,
        inputs=inputs,
        packing=Packing(True, ""),
        made_from={"data": "of the rows"},
        engine=engine,
        checkpoint=None,
        progress=Progress(),
        layout=Layout(num_ranks=1, rank=0, pad_id=0, micro_batch_size=2),
        metric_for_best=None,
        is_over=False,
        output_dir=folder,
        write_model_files=lambda: None,
    )
    vars(run).update(changes)
    return run


def header_of(run: Any, hardware: dict[str, Any] | None = None, expected: Any = None) -> dict[str, str]:
    return services._header(run, {"hardware": hardware or {}, "packing": services._padding(run)}, expected)


def test_a_header_has_the_sizes_of_model_data_and_steps(tmp_path: Path):
    run = run_of(tmp_path)
    rows = header_of(run)
    assert rows["model"] == "llama, 1,000 parameters, all trained"
    assert rows["data"] == "4 sequences, 12 tokens; at most 8 tokens each"
    assert rows["strategy"] == "ddp, precision no" and rows["padding"] == "none, samples are packed"
    assert rows["steps"] == "1,200, 300 an epoch" and "memory" not in rows
    assert rows["batch"] == "4 sequences a step = 1 data-parallel process x micro-batch 2 x accumulation 2"
    run.engine.num_trained = 25
    assert header_of(run)["model"] == "llama, 1,000 parameters, 25 trained (2.50%)"
    adapted = run_of(tmp_path, "adapter.name=lora", "adapter.rank=4")
    assert header_of(adapted)["model"].endswith("all trained, lora of rank 4")


def test_a_header_says_what_is_not_known_of_a_stream(tmp_path: Path):
    run = run_of(tmp_path, packing=Packing(False, "it was asked for", can_pack=True))
    run.inputs.data.train, run.inputs.steps_per_epoch = object(), None
    rows = header_of(run)
    assert rows["data"] == "stream; at most 8 tokens each"
    assert rows["steps"] == "1,200, an unknown number an epoch"
    assert rows["padding"] == "an unknown share of all positions: it was asked for"
    assert services._tokens_of_step(run) is None


def test_a_header_tells_where_a_run_goes_on(tmp_path: Path):
    assert header_of(run_of(tmp_path, progress=Progress(step=1000)))["steps"].endswith("; resumes after step 1,000")
    over = run_of(tmp_path, progress=Progress(step=1200), is_over=True)
    assert header_of(over)["steps"].endswith("; all were done before")


@pytest.mark.parametrize(
    ("num_processes", "num_local", "hardware", "said"),
    [
        (1, 1, HARDWARE, "1 GPU, NVIDIA H100"),
        (4, 4, HARDWARE, "4 GPUs, NVIDIA H100"),
        (4, 2, HARDWARE, "4 GPUs, NVIDIA H100 on 2 machines"),
        (2, 2, HARDWARE | {"simulated": True}, "2 GPUs, NVIDIA H100 (simulated: no speeds)"),
        (1, 1, {}, "1 process on 6 CPU cores"),
        (6, 2, {}, "6 processes on 6 CPU cores on 3 machines"),
    ],
)
def test_a_header_counts_processes_and_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_processes: int, num_local: int, hardware: Any, said: str
):
    monkeypatch.setattr(services, "num_cores", lambda: 6)
    run = run_of(tmp_path, num_processes=num_processes, num_local=num_local)
    assert header_of(run, hardware)["machine"] == said


def test_matrices_in_eight_bits_are_counted_and_of_a_pipeline_those_of_a_stage(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(services, "num_converted", lambda model: {"Linear": 7}[type(model).__name__])
    run = run_of(tmp_path, "mixed_precision=fp8")
    assert header_of(run)["strategy"] == "ddp, precision fp8 in 7 matrices"
    run.engine.mesh = replace(run.engine.mesh, pipeline=2)
    assert header_of(run)["strategy"] == "ddp, precision fp8 in 7 matrices of the first stage"


def test_a_forecast_of_memory_is_in_the_header_in_gib(tmp_path: Path):
    gib = 2**30
    expected = SimpleNamespace(allocated=3 * gib, reserved=(gib * 5 // 2, 4 * gib), moment="the loss")
    said = header_of(run_of(tmp_path), expected=expected)["memory"]
    assert said == "forecast 3.00 GiB a GPU at the loss, 2.50 to 4.00 reserved"


def test_padding_is_the_share_of_positions_without_a_token(tmp_path: Path):
    """A quarter of samples of 8 and 4 tokens in one forward; unknown where another process measures."""
    run = run_of(tmp_path, packing=Packing(False, "of its layers", can_pack=True))
    run.inputs.data.train = samples_of(8, 4, 8, 4)
    run.layout = replace(run.layout, micro_batch_size=4)
    record = services._padding(run)
    assert record == {"is_on": False, "why": "of its layers", "can_pack": True, "padding": 0.25}
    assert header_of(run)["padding"] == "25% of all positions: of its layers"
    run.engine.is_main = False
    assert services._padding(run)["padding"] is None
    assert services._padding(run_of(tmp_path)) == {"is_on": True}


def test_the_tokens_of_a_step_are_the_mean_of_a_sample_times_the_batch(tmp_path: Path):
    run = run_of(tmp_path)
    run.inputs.data.train = samples_of(1, 2, 6)
    assert services._tokens_of_step(run) == 3 * 4


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "environment_record", lambda device: {"hardware": HARDWARE, "seen": device.type})


@pytest.mark.usefixtures("hardware")
def test_a_record_has_what_a_comparison_of_runs_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forecasts, "step_time", lambda run, num_tokens: {"none": f"of {num_tokens} tokens"})
    monkeypatch.setattr(services.versions, "untested_libraries", list)
    run = run_of(tmp_path, num_processes=6, num_local=2)
    train, held_out = run.inputs.data.train, run.inputs.data.eval
    record = services._record(run, None, [])
    assert record["rows"] == {
        "train": "of the rows",
        "held_out": {"short": held_out["short"].fingerprint, "long": held_out["long"].fingerprint},
    }
    assert len({train.fingerprint, *record["rows"]["held_out"].values()}) == 3
    assert (record["seen"], record["strategy"], record["resumed_from"]) == (
        "cpu",
        {"file": run.engine.strategy.path},
        None,
    )
    assert (record["max_steps"], record["machines"], record["deterministic"]) == (1200, 3, False)
    assert {"data.max_length", "batch.global_batch_size"} <= {*record["written_settings"]}
    assert (
        "optim.beta1" not in record["written_settings"] and "run.price_per_gpu_hour" not in record["written_settings"]
    )
    assert record["packing"] == {"is_on": True} and record["header"]["padding"] == "none, samples are packed"
    assert record["step_forecast"] == {"none": "of 12.0 tokens"}
    assert not {"plugins", "untested", "kernels", "best_by", "forecast", "out_of_memory"} & record.keys()


@pytest.mark.usefixtures("hardware")
def test_a_record_names_what_is_there_and_another_process_measures_nothing(tmp_path: Path, monkeypatch):
    best = SimpleNamespace(name="hits", greater_is_better=True)
    checkpoint = SimpleNamespace(path=Path("other/checkpoints/step-3"))
    run = run_of(tmp_path, metric_for_best=best, checkpoint=checkpoint)
    monkeypatch.setattr(services.versions, "untested_libraries", lambda: ["torch 9"])
    monkeypatch.setattr(services.optional, "record", lambda: {"kernels": {"version": "1"}})
    monkeypatch.setattr(services.plugins, "record", lambda paths: [{"file": path} for path in paths])
    run.recipe = run.recipe.model_copy(update={"plugins": ["mine.py"]})
    run.engine.is_main = False
    answered = [{"from": "a", "to": "b", "reason": "c"}]
    expected = SimpleNamespace(allocated=1, reserved=(2, 3), needed=(4, 5), moment="the loss", parts={"weights": 6})
    record = services._record(run, expected, answered)
    assert record["best_by"] == {"metric": "hits", "greater_is_better": True}
    assert record["resumed_from"] == "other/checkpoints/step-3" and record["untested"] == ["torch 9"]
    assert record["kernels"] == {"kernels": {"version": "1"}} and record["plugins"] == [{"file": "mine.py"}]
    assert record["forecast"] == vars(expected) and record["out_of_memory"] == answered
    assert record["rows"]["held_out"] == {} and not {"step_forecast", "machines"} & record.keys()


def start(run: Any, *, notes: list[str] | None = None) -> services.Services:
    watch: Any = SimpleNamespace(timeout_seconds=600.0, beat=lambda *_: None, tell=None)
    return services.start_services(run, [3], notes if notes is not None else [], watch, {"recipe.yaml": "of the file"})


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("hardware")
def test_a_start_writes_its_recipe_its_record_its_status_and_its_notes(tmp_path: Path, monkeypatch, capsys):
    answered = [{"from": "a", "to": "b", "reason": "first"}, {"from": "b", "to": "c", "reason": "second"}]
    monkeypatch.setenv(shortage.HISTORY, json.dumps(answered))
    monkeypatch.setattr(services.optional, "unused_packages", lambda: ["fast", "faster"])
    run, notes = run_of(tmp_path / "run"), ["of the data"]
    opened = start(run, notes=notes)
    opened.log.close()
    record = json.loads((run.output_dir / "run.json").read_text())
    assert record["recipe_files"] == [{"file": "recipe.yaml", "sha256": "of the file"}]
    assert opened.record["recipe_files"] == record["recipe_files"] and record["out_of_memory"] == answered
    assert load_recipe(run.output_dir / "recipe.yaml", []) == run.recipe
    *shortages, begun = events_of(run.output_dir)
    assert [event["reason"] for event in shortages] == ["first", "second"]
    assert [(event["event"], event["step"]) for event in shortages] == [("out_of_memory", 0)] * 2
    begun = {key: begun[key] for key in ("event", "step", "strategy", "processes", "resumed_from")}
    assert begun == {"event": "start", "step": 0, "strategy": "ddp", "processes": 1, "resumed_from": None}
    status = json.loads((run.output_dir / "status.json").read_text())
    assert (status["state"], status["step"], status["failed_after"]) == ("running", 0, [3]) and "price" not in status
    said = " ".join("".join(capsys.readouterr()).split())
    assert "of the data" in said and f"RUN {run.output_dir}" in said and "1,200, 300 an epoch" in said
    assert "installed, and not used, since" in said and "fast, faster; the curve is that without them" in said
    assert notes[0] == "of the data" and opened.expected is None and opened.meter.per_hour is None


@pytest.mark.usefixtures("hardware")
def test_a_start_in_its_own_folder_goes_on_with_its_records(tmp_path: Path, monkeypatch):
    """And a shortage that an earlier start has written down there is not written again; one elsewhere begins anew."""
    answered = [{"from": "a", "to": "b", "reason": "first"}, {"from": "b", "to": "c", "reason": "second"}]
    monkeypatch.setenv(shortage.HISTORY, json.dumps(answered))
    for is_own, reasons, steps in ((True, ["second"], [1, 2, 3]), (False, ["first", "second"], [])):
        folder = tmp_path / str(is_own)
        folder.mkdir()
        lines = [{"step": step, "loss": 1.0, "price": 7.0} for step in (1, 2, 3, 4)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "run.json").write_text("{}")
        place = folder if is_own else tmp_path / "elsewhere"
        checkpoint = SimpleNamespace(
            path=place / "checkpoints/step-3", step=3, is_in=lambda root, place=place: root == place / "checkpoints"
        )
        run = run_of(folder, "run.price_per_gpu_hour=2", checkpoint=checkpoint, progress=Progress(step=3))
        monkeypatch.setattr(
            services.Saver, "start_from", lambda saver, checkpoint: saver.keep.add(checkpoint.path.name)
        )
        opened = start(run)
        opened.log.close()
        kept = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert kept == steps
        *shortages, begun = events_of(folder)
        assert [event["reason"] for event in shortages] == reasons
        assert begun["step"] == 3 and begun["resumed_from"] == str(checkpoint.path)
        assert opened.saver.keep == {"step-3"} and opened.meter.before == (7.0 if is_own else 0.0)
        assert opened.meter.per_hour == 2.0 and opened.status.record["step"] == 3
        assert json.loads((folder / "status.json").read_text())["price"] >= opened.meter.before


@pytest.mark.usefixtures("hardware")
def test_a_saver_has_the_recipe_s_limits_and_half_the_time_of_a_hang(tmp_path: Path, monkeypatch):
    keys = [
        "run.keep_last=5",
        "run.keep_best=2",
        "run.save_in_background=true",
        "run.eval_every_steps=1",
        "run.save_every_steps=1",
    ]
    run, beats = run_of(tmp_path, *keys, num_processes=4, num_local=4), []
    run.engine.world.rank, run.engine.is_main = 2, False
    events = []
    log: Any = SimpleNamespace(say=print, event=lambda *given: events.append(given))
    watch: Any = SimpleNamespace(timeout_seconds=600.0, beat=lambda *given: beats.append(given))
    saver = services._start_saver(run, log, watch, "start")
    assert (saver.root, saver.rank, saver.num_ranks, saver.attempt) == (tmp_path / "checkpoints", 2, 4, "start")
    assert (saver.keep_last, saver.keep_best, saver.in_background, saver.timeout_seconds) == (5, 2, True, 300.0)
    assert saver.say is print
    saver.on_save(7)
    saver.beat()
    assert events == [("save", 7)] and beats == [("save", 3)]
    assert not saver.stop_requested()
    monkeypatch.setattr(signals, "requested_stop", lambda: "SIGTERM")
    assert saver.stop_requested()


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"graph_breaks": 2, "given_up": 0, "reasons": []}, "2 graph breaks, 0 calls given up: parts of"),
        (
            {"graph_breaks": 0, "given_up": 1, "reasons": ["a", "b"]},
            "0 graph breaks, 1 calls given up (a; b): parts of",
        ),
        ({"graph_breaks": 0, "given_up": 0, "reasons": []}, None),
    ],
)
def test_what_the_compiler_gave_up_is_told_once_after_the_first_steps(tmp_path: Path, monkeypatch, counts, said):
    monkeypatch.setattr(services, "compile_counts", lambda: counts)
    told, events, ended = [], [], []
    log: Any = SimpleNamespace(
        say=lambda text, style: told.append((text, style)), event=lambda *words, **facts: events.append((words, facts))
    )
    opened: Any = SimpleNamespace(log=log, profile=SimpleNamespace(end_step=ended.append))
    run = run_of(tmp_path, "model.compile=true")
    for step in range(8, 16):
        run.progress.step = step
        services.Services.end_step(opened, run, 7)
    assert ended == [*range(8, 16)] and events == [(("compiled", 7 + services.STEPS_TO_COMPILE), counts)]
    assert [style for _, style in told] == ["bold red"] * (said is not None)
    assert said is None or said in told[0][0]
    services.Services.end_step(opened, run_of(tmp_path, progress=Progress(step=11)), 7)
    assert len(events) == 1, "nothing is compiled"


def test_a_callback_has_a_folder_of_its_own_and_python_s_numbers_if_no_tracker_draws_them(tmp_path: Path, monkeypatch):
    made = []
    monkeypatch.setattr(services, "callbacks", lambda: {"mine": "kind of mine", "other": "kind of other"})
    monkeypatch.setattr(services, "Observer", lambda *words, **facts: made.append((words, facts)))
    run, log = run_of(tmp_path), SimpleNamespace(say=print)
    for trackers in ({}, {"tensorboard": {}}):
        section = run.recipe.run.model_copy(update={"callbacks": ["other"], "trackers": trackers})
        run.recipe = run.recipe.model_copy(update={"run": section})
        assert len(services._observers(run, log)) == 1
    ((words, facts), (_, others)) = made
    assert words == ("kind of other", tmp_path / "callbacks" / "other", run.engine)
    assert facts == {"say": print, "is_alone": True} and others["is_alone"] is False


def test_a_model_folder_that_cannot_be_written_ends_no_run(tmp_path: Path):
    said = []

    def fail() -> None:
        raise ValueError("no room")

    run = run_of(tmp_path, write_model_files=fail)
    services._prepare_folder(run, SimpleNamespace(say=said.append))
    assert said == [f"{tmp_path / 'model'} could not be written: no room; retried at the end"]


def test_padding_is_measured_in_the_order_of_the_first_epoch(tmp_path: Path):
    """Drawn from the recipe's seed, as numpy's legacy generator draws it."""
    run = run_of(tmp_path, "batch.global_batch_size=2", "seed=7", packing=Packing(False, "of its layers"))
    lengths = np.arange(1, 41)
    run.inputs.data.train = samples_of(*lengths)

    def share(*seed: int) -> float:
        pairs = lengths[np.random.RandomState(seed).permutation(len(lengths))].reshape(-1, 2)
        return 1 - lengths.sum() / (2 * pairs.max(1).sum())

    assert services._padding(run)["padding"] == pytest.approx(share(7, 0))
    assert len({share(7, 0), share(7, 1), share(0, 7)}) == 3, "in another order it is another one"


@pytest.mark.usefixtures("hardware")
def test_trackers_of_the_main_process_get_each_setting_that_has_a_value(tmp_path: Path, monkeypatch):
    made, prepared, logs = [], [], []
    monkeypatch.setattr(services, "_prepare_folder", lambda run, log: prepared.append(run.engine.is_main))

    def track(*words: Any, **facts: Any) -> Any:
        made.append((words, facts))
        return SimpleNamespace(event=lambda line: None)

    monkeypatch.setattr(services.trackers, "Tracker", track)
    monkeypatch.setattr(services.trackers, "steps_logged_after", lambda path, step: {path.name: step})
    for is_main, place in ((True, "here"), (True, "elsewhere"), (False, "here")):
        folder = tmp_path / "run"
        checkpoint = SimpleNamespace(path=Path("step-3"), step=3, is_in=lambda root, place=place: place == "here")
        run = run_of(folder, "run.trackers={tensorboard: {}}", checkpoint=checkpoint, progress=Progress(step=3))
        run.engine.is_main, run.engine.strategy.path = is_main, "mine.yaml"
        log, *_ = services._open_log(run, [], {})
        assert len(log.followers) == is_main
        logs.append(log)
    assert prepared == [True, True], "by the main process alone"
    (((name, folder, settings, options), facts), (_, others)) = made
    assert (name, folder, options) == ("tensorboard", run.output_dir, {})
    assert (facts["step"], facts["repeated"], others["repeated"]) == (3, {"metrics.jsonl": 3}, {})
    assert settings["data.max_length"] == 8 and settings["strategy"] == "mine.yaml"
    assert (
        facts["say"] == logs[0].say
        and settings["processes"] == 1
        and None not in settings.values()
        and json.loads(json.dumps(settings)) == settings
    )


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize(("is_main", "local_rank", "expected"), [(True, 0, [(4, 2, 2)]), (False, 1, [])])
def test_the_first_process_of_a_machine_watches_its_hardware(
    tmp_path: Path, monkeypatch, is_main, local_rank, expected
):
    """And each process profiles, and tells of a hang, by the log; all of them know the start by one name."""
    monitors, profiles, hangs = [], [], []
    monkeypatch.setattr(
        services,
        "Monitor",
        lambda folder, first_rank, num_ranks, machine: monitors.append((first_rank, num_ranks, machine)),
    )
    monkeypatch.setattr(services, "Profile", lambda *words: profiles.append(words))
    monkeypatch.setattr(services, "_tell_of_hang", lambda *words: hangs.append(words))
    monkeypatch.setattr(services.forecasts, "flop_counter", lambda run, notes: f"counter of {len(notes)}")
    monkeypatch.setattr(services.uuid, "uuid4", lambda: SimpleNamespace(hex="0123456789"))
    run = run_of(tmp_path / "run", "run.monitor=true", num_processes=8, num_local=2)
    run.engine.is_main, run.engine.world.rank, run.engine.world.local_rank = is_main, 4 + local_rank, local_rank
    run.engine.collectives.broadcast_text = lambda text: f"{text} of rank 0"
    run.engine.transformer = lambda: "the model"
    watch: Any = SimpleNamespace(timeout_seconds=600.0, beat=lambda *_: None)
    started = services.start_services(run, [], ["a note"], watch, {})
    assert monitors == expected and started.flops == "counter of 1" and started.watch is watch
    assert profiles[0][:4] == (None, run.output_dir, 4 + local_rank, "the model") and callable(profiles[0][4])
    assert started.saver.attempt == "01234567 of rank 0"
    watch.tell("stuck", 5)
    assert hangs == [(started.log, "stuck", 5)]
    without = run_of(tmp_path / "other")
    monkeypatch.setattr(services, "Profile", lambda *words: None)
    services.start_services(without, [], [], watch, {})
    assert monitors == expected, "nobody asked"


def test_a_log_goes_on_where_the_checkpoint_says(tmp_path: Path, monkeypatch):
    """Nothing that was evaluated or sampled after its step is written again."""
    asked = []

    class Opened(Exception):
        pass

    def log(*words: Any, **facts: Any) -> None:
        asked.append((words, facts))
        raise Opened

    monkeypatch.setattr(services.metrics, "RunLog", log)
    for progress in (Progress(step=4, is_evaluated=True), Progress(step=4, is_sampled=True)):
        run = run_of(tmp_path, "run.log_every_steps=7", progress=progress)
        run.recipe = run.recipe.model_copy(
            update={"objective": SimpleNamespace(num_scores=1 if progress.is_sampled else None)}
        )
        with pytest.raises(Opened):
            services._open_log(run, [], {})
    first, second = (facts for _, facts in asked)
    assert first == {
        "is_main": True,
        "max_steps": 1200,
        "resumed_step": None,
        "is_evaluated": True,
        "is_sampled": False,
        "log_every_steps": 7,
        "counted": "tokens",
    }
    assert second == first | {"is_evaluated": False, "is_sampled": True, "counted": "scores"}


def test_what_earlier_starts_have_left_is_taken_away_by_the_main_process(tmp_path: Path, monkeypatch):
    done = []
    monkeypatch.setattr(services, "put_away_report", lambda folder: done.append(("report", folder)))
    monkeypatch.setattr(services.export_folder, "sweep_exports", lambda folder: done.append(("exports", folder)))
    run = run_of(tmp_path, write_model_files=lambda: done.append(("model", None)))
    services._prepare_folder(run, SimpleNamespace(say=print))
    assert sorted(done, key=str) == [("exports", tmp_path), ("model", None), ("report", tmp_path)]


def test_a_hang_is_an_event_and_waits_for_trackers_alone(monkeypatch):
    """A callback is the main thread's, which hangs."""
    closed, events = [], []

    class Tracker:
        def close(self, seconds: float) -> None:
            closed.append((self, seconds))

    monkeypatch.setattr(services.trackers, "Tracker", Tracker)
    tracker = Tracker()
    log: Any = SimpleNamespace(
        event=lambda *words, **facts: events.append((words, facts)), followers=[SimpleNamespace(), tracker]
    )
    services._tell_of_hang(log, "rank 1 waits", 9)
    assert closed == [(tracker, services.trackers.HANG_SECONDS)]
    assert events == [(("hang", 9), {"reason": "rank 1 waits"})]
