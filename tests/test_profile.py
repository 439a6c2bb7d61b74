"""Protects the profile and why-slow: time is divided as by hand, and planted faults are named first.

python -m pytest -q tests/test_profile.py -m "slow or not slow"
"""

import base64
import gzip
import json
import pickletools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cookbook.commands.cli import main
from cookbook.commands.shared.history import History, read_history, read_ranks
from cookbook.commands.why_slow import GROUPS, advice, beside_forecast, shares
from cookbook.config.sections import ProfileSection
from cookbook.system.record_forms import OfRank
from cookbook.system.step_phases import PARTS, Event, divide, in_words
from cookbook.training.profiling import Profile
from tests.curves import ROOT, Lab
from tests.gpu_runs import GpuLab
from tests.test_hosts import run_on
from tests.two_machines import two_machines

PROFILED = {"run.profile": "{steps: [5, 6], ranks: [0, 1]}", "run.max_steps": "8", "schedule.warmup_steps": "2"}
MS = 1_000_000


def event(name: str, start: float, end: float, **more: Any) -> Event:
    return Event(name, int(start * MS), int(end * MS), **more)


def note(name: str, start: float, end: float, **more: Any) -> Event:
    return event(name, start, end, is_note=True, **more)


BY_HAND = [
    note("run: step", 0, 100),
    note("run: data", 0, 10),  # nothing runs: other
    note("run: forward", 10, 40),
    note("layer: model.layers.0", 12, 38),
    event("aten::linear", 15, 30, sequence=7),  # 10 of its own: compute
    event("aten::copy_", 20, 25),  # 5: copies
    event("MyFunction", 30, 35),  # Python's: other
    note("run: backward", 40, 90),
    event("autograd::engine::evaluate_function: X", 40, 70, sequence=7),  # its own time is no work
    event("aten::mm", 45, 65),  # 20: compute
    event("gloo:all_reduce", 50, 80, thread=3, is_async=True),  # 15 hidden behind mm, 15 exposed
    event("c10d::barrier", 92, 95),  # outside of the inner phases: of the step
]


def ms(record: dict[str, Any], phase: str) -> list[float]:
    return [round(record["phases"][phase][part] * 1000, 6) for part in PARTS]


def test_time_is_divided_as_by_hand():
    shares = divide(BY_HAND, num_steps=1)
    assert {name: ms(shares, name) for name in shares["phases"]} == {
        "data": [0, 0, 0, 10],
        "forward": [10, 5, 0, 15],
        "backward": [20, 0, 15, 15],
        "step": [0, 0, 3, 7],
    }
    assert shares["seconds"] == pytest.approx(0.1) and shares["hidden"] == pytest.approx(0.015)
    assert shares["operations"]["aten::linear"] == pytest.approx(0.010), "without what it calls"
    assert shares["layers"] == {"model.layers.0": pytest.approx({"forward": 0.026, "backward": 0.030})}
    assert divide(BY_HAND, num_steps=2)["seconds"] == pytest.approx(0.05)


def sizes_of_page(page: Path) -> set[int]:
    """The numbers in the snapshot of a page of torch's memory viewer, which is read without being unpickled."""
    (encoded,) = re.findall('"base64": "([^"]+)"', page.read_text())
    snapshot = base64.b64decode(encoded)
    return {value for _, value, _ in pickletools.genops(snapshot) if isinstance(value, int)}


@pytest.mark.parametrize("asked", [{}, {"record_shapes": True}, {"with_stack": True}, {"memory": True}], ids=str)
def test_shapes_stacks_and_memory_are_recorded_if_they_are_asked_for(asked: dict[str, bool], tmp_path: Path):
    """A product of 6 by 5 by 7 numbers, whose result of 6 x 7 has 168 bytes, and the table has neither."""
    profile = Profile(ProfileSection(steps=[1, 1], **asked), tmp_path, 0, torch.nn.Identity(), lambda line: None)
    profile.begin_step(1)
    product = torch.ones(6, 5) @ torch.ones(5, 7)
    profile.end_step(1)
    assert product.nbytes == 168
    folder = tmp_path / "profile"
    trace = json.loads(gzip.decompress((folder / "rank_0.pt.trace.json.gz").read_bytes()))["traceEvents"]
    (shapes,) = (event["args"].get("Input Dims") for event in trace if event["name"] == "aten::mm")
    assert (shapes == [[6, 5], [5, 7]]) == bool(asked.keys() & {"record_shapes", "memory"})
    has_lines = any("test_profile.py" in event["name"] for event in trace if event.get("cat") == "python_function")
    assert has_lines == bool(asked.keys() & {"with_stack", "memory"})
    page = folder / "rank_0.memory.html"
    assert page.exists() == ("memory" in asked)
    if page.exists():
        assert {168, 6 * 5 * 4} <= sizes_of_page(page)
    assert not [name for name in json.loads((folder / "rank_0.json").read_text())["operations"] if ".py" in name]


def test_with_a_gpu_its_own_events_are_the_work():
    """A kernel has the phase of its launch: the last of the forward runs while the host is in the backward, whose own
    are launched by autograd's thread. While there is none, the host's phase counts."""
    device = {"on_device": True, "thread": 7}
    on_gpu = [
        event("aten::matmul", 12, 14, link=1),
        event("aten::all_gather", 15, 16, link=2),
        event("aten::mm_backward", 42, 43, thread=9, link=3),
        note("run: forward", 12, 30, **device),  # torch's own, which ends with what the forward's thread launched
        event("gemm", 20, 40, link=1, **device),
        event("ncclDevKernel_AllGather", 30, 50, on_device=True, thread=8, link=2),
        event("gemm", 60, 85, link=3, **device),
        event("Memcpy DtoH", 95, 97, **device),  # launched by nobody here, after all phases
    ]
    shares = divide(BY_HAND + on_gpu, num_steps=1)
    assert ms(shares, "forward") == [20, 0, 10, 10] and shares["hidden"] == pytest.approx(0.010)
    assert ms(shares, "backward") == [25, 0, 0, 15] and ms(shares, "data") == [0, 0, 0, 10]
    assert ms(shares, "step") == [0, 2, 0, 8] and "aten::mm" not in shares["operations"]


def test_the_table_has_shares_of_a_step():
    lines = in_words(divide(BY_HAND, 1), "PROFILE").splitlines()
    assert lines[0] == "PROFILE: 0.100 s a step"
    cells = {words[0]: words[1:] for words in (line.replace(" %", "").split() for line in lines) if words}
    assert cells["backward"] == ["20.0", "-", "15.0", "15.0", "50.0"]
    assert cells["all"] == ["30.0", "5.0", "18.0", "47.0", "100.0"]
    assert "  communication: 0.033 s a step, 45% hidden behind work" in lines


def check_profile(folder: Path, layers: set[str]) -> list[dict[str, Any]]:
    """That of a run with PROFILED, its trace read as Perfetto and TensorBoard do."""
    records = read_ranks(folder / "profile", OfRank)
    assert [(record["rank"], record["steps"]) for record in records] == [(0, 2), (1, 2)]
    for record in records:
        trace = json.loads(gzip.decompress((folder / f"profile/rank_{record['rank']}.pt.trace.json.gz").read_bytes()))
        steps = [event for event in trace["traceEvents"] if event.get("name") == "run: step" and event.get("ph") == "X"]
        assert len(steps) >= 2 and "schemaVersion" in trace
        # In microseconds; of two, the host's.
        assert record["seconds"] == pytest.approx(sum(step["dur"] for step in steps[:2]) / 2e6, rel=0.01)
        assert {"data", "forward", "backward", "update"} <= set(record["phases"])
        assert set(record["layers"]) == layers
        for parts in (record["phases"][name] for name in ("forward", "backward", "update")):
            assert parts["compute"] > 0
        assert sum(parts["communication"] for parts in record["phases"].values()) + record["hidden"] > 0
    return records


SLOW = pytest.mark.slow
SELDOM = [pytest.mark.slow, pytest.mark.thorough]
LAYERS = {"model.layers.0", "model.layers.1"}


@pytest.mark.parametrize(
    "strategy", ["zero3", *(pytest.param(strategy, marks=SELDOM) for strategy in ("ddp", "fsdp2", "tp"))]
)
def test_a_run_is_profiled_under_every_kind_of_strategy_and_keeps_its_curve(lab: Lab, strategy: str):
    curve = lab.run(strategy, PROFILED)
    check_profile(curve.folder, LAYERS)
    plain = {name: value for name, value in PROFILED.items() if name != "run.profile"}
    assert curve.losses == lab.run(strategy, plain).losses, "to the bit"


@pytest.mark.parametrize(
    "strategy", ["fsdp2", *(pytest.param(strategy, marks=SELDOM) for strategy in ("ddp", "zero3"))]
)
def test_a_run_on_simulated_gpus_is_profiled(gpu_lab: GpuLab, strategy: str):
    run = gpu_lab.run(strategy, {"run.profile": "{steps: [2, 3], ranks: [0, 1]}"})
    check_profile(run.output, LAYERS)


@pytest.mark.parametrize(
    ("strategy", "sabotage", "settings", "said"),
    [
        ("ddp", "slow_data", {}, ["steps wait for their batch for", "data.streaming"]),
        pytest.param(
            "ddp",
            "slow_saves",
            {"run.save_every_steps": "1"},
            ["saving takes", "run.save_every_steps 1,"],
            marks=SELDOM,
        ),
        ("ddp", "slow_rank", {}, ["rank 1 is slower than the others, in its forward,"]),
        pytest.param("fsdp2", "slow_rank", {}, ["rank 1 is slower than the others, in its forward,"], marks=SELDOM),
        (
            "single",
            None,
            {"batch.micro_batch_size": "1", "run.profile": "{steps: [5, 6]}"},
            ["Python between the operations of 16 micro-batches a step: raise batch.micro_batch_size 1,"],
        ),
        (
            "single",
            None,
            {"batch.micro_batch_size": "16", "run.profile": "null", "model.from_scratch.num_hidden_layers": "12"},
            ["of the positions are padding: set data.packing: true about"],
        ),
    ],
    ids=["data", "saves", "rank", "rank under fsdp2", "micro-batches", "padding"],
)
def test_a_planted_fault_is_the_first_thing_to_change(lab: Lab, strategy, sabotage, settings, said, capsys):
    curve = lab.run(strategy, PROFILED | settings, sabotage=sabotage)
    assert main(["why-slow", str(curve.folder)]) == 0
    printed = capsys.readouterr().out
    first = " ".join(printed.partition("CHANGE FIRST")[2].partition("2.")[0].split())
    assert first.startswith("1.") and all(words in first for words in said), printed


@pytest.mark.thorough
@SLOW
def test_a_slow_link_between_machines_is_the_first_thing_to_change(lab: Lab, tmp_path: Path, capsys):
    folder = tmp_path / "run"
    with two_machines(delay=0.1) as machines:
        ends = run_on(machines, lab, tmp_path, "ddp", PROFILED | {"run.output_dir": str(folder)})
    assert [end.returncode for end in ends] == [0, 0], "".join(end.stdout[-3000:] for end in ends)
    assert main(["why-slow", str(folder)]) == 0
    printed = capsys.readouterr().out
    first = " ".join(printed.partition("CHANGE FIRST")[2].partition("2.")[0].split())
    assert first.startswith("1. communication that nothing hides") and "the link of the 2 machines" in first, printed
    assert "FORECAST of a step: there is none for a CPU" in printed


def test_what_a_step_takes_stands_beside_what_was_forecast():
    parts = {"compute": (0.3, 0.4), "GPU memory": (0.1, 0.2), "NVLink": (0.01, 0.02), "update": (0.05, 0.06)}
    of_parts = [{"name": name, "low": low, "high": high} for name, (low, high) in parts.items()]
    run = history_of(step_seconds=1.3, data_seconds=0.3)
    run.record["step_forecast"] = {"low": 0.4, "high": 0.7, "parts": of_parts}
    without = beside_forecast(run, run.steps, [])
    assert "1.000 s" in without and "0.400 to 0.700 s" in without and "1.4 times the most" in without
    assert "compute" not in without
    forward = {"compute": 0.5, "copies": 0.0, "communication": 0.2, "other": 0.1}
    update = {"compute": 0.04, "copies": 0.0, "communication": 0.06, "other": 0.0}
    profiles = [
        {"rank": rank, "seconds": 1.0, "hidden": 0.04, "phases": {"forward": forward, "update": update}}
        for rank in (0, 1)
    ]
    lines = {
        line.split()[0]: " ".join(line.split()[1:]) for line in beside_forecast(run, run.steps, profiles).splitlines()
    }
    assert lines["compute"] == "0.500 s 0.400 to 0.600 s"
    assert lines["communication"] == "0.300 s 0.010 to 0.020 s 15.0 times the most"
    assert lines["update"] == "0.040 s 0.050 to 0.060 s less" and lines["copies"] == "0.000 s 0.000 to 0.000 s"


@pytest.mark.parametrize(
    ("strategy", "machines", "said"),
    [
        (
            "zero3",
            1,
            "raise batch.micro_batch_size from 2, since each micro-batch sends; take strategy zero2 or fsdp2_grad_op",
        ),
        (
            "zero2",
            1,
            "raise batch.micro_batch_size from 2, since each micro-batch sends; take a strategy that sends less",
        ),
        ("ddp", 1, "take a strategy that sends less (cookbook plan ranks them)"),
        (
            "fsdp2",
            2,
            "measure the link of the 2 machines (ping, iperf3); raise batch.micro_batch_size from 2",
        ),
    ],
)
def test_what_sends_less_is_named_for_the_strategy(strategy: str, machines: int, said: str):
    run = history_of()
    run.settings["batch.micro_batch_size"] = 2
    run.record.update(strategy={"file": f"accelerate_configs/{strategy}.yaml", "processes": 2}, machines=machines)
    sends = [profile_of(rank, communication=0.4, other=0.02) for rank in (0, 1)]
    (line,) = advice(run, sends)
    assert line.what.startswith(f"communication that nothing hides takes 40%: {said}") and line.gain == pytest.approx(
        0.4
    )


def history_of(**of_each_step: float) -> History:
    line = {"loss": 1.0, "num_tokens": 100, "step_seconds": 1.0, "data_seconds": 0.0, "eval_seconds": 0.0}
    lines = [line | {"step": step, "save_seconds": 0.0} | of_each_step for step in range(1, 11)]
    settings = {"batch.global_batch_size": 16, "batch.micro_batch_size": 8}
    record = {"strategy": {"processes": 2}}
    return History(
        folder=Path("x"), lines=lines, events=[], record=record, settings=settings, state="", samples=[], monitor=[]
    )


def profile_of(rank: int, communication: float, other: float) -> dict[str, Any]:
    parts = {"compute": 1 - communication - other, "copies": 0.0, "communication": communication, "other": other}
    return {"rank": rank, "seconds": 1.0, "phases": {"forward": parts}, "hidden": 0.0}


def test_a_healthy_run_gets_no_advice_and_gains_are_shares_of_the_whole():
    healthy = [profile_of(rank, communication=0.02, other=0.02) for rank in (0, 1)]
    assert list(advice(history_of(), healthy)) == []
    (line,) = advice(history_of(step_seconds=2.0, data_seconds=1.0), healthy)
    assert line.gain == pytest.approx(0.5) and "for 50%" in line.what
    waits, slow = profile_of(0, communication=0.42, other=0.02), profile_of(1, communication=0.02, other=0.42)
    (line,) = advice(history_of(), [waits, slow])
    assert line.gain == pytest.approx(0.4) and line.what.startswith("rank 1 is slower"), (
        "and no word on sending or Python"
    )
    sends = [profile_of(rank, communication=0.4, other=0.02) for rank in (0, 1)]
    (line,) = advice(history_of(eval_seconds=0.0), sends)
    assert line.what.startswith("communication that nothing hides takes 40%")
    assert shares(history_of(save_seconds=3.0).lines)["saving"] == pytest.approx(0.75)
    of_step = shares(history_of(step_seconds=2.0, data_seconds=0.5).lines)
    assert (of_step["data"], of_step["step"]) == pytest.approx((0.25, 0.75)), "waiting is a part of the step"


@pytest.mark.parametrize(
    ("spent", "settings", "said"),
    [
        (
            "eval_seconds",
            {"run.eval_every_steps": 5, "data.holdout": 0.1},
            "raise run.eval_every_steps 5, or lower data",
        ),
        (
            "eval_seconds",
            {"run.evals_per_epoch": 2, "data.eval": "a"},
            "lower run.evals_per_epoch 2, or lower data.eval",
        ),
        ("eval_seconds", {"data.eval..path": "a.jsonl"}, ": lower data.eval.max_rows"),  # before and after training
        ("eval_seconds", {"run.eval_every_steps": None, "data.holdout": 0.0}, None),  # rounds
        (
            "save_seconds",
            {"run.save_every_minutes": 5},
            "save less often than run.save_every_minutes 5, or set run.save_in",
        ),
        ("save_seconds", {"run.save_every_steps": None}, ": set run.save_in_background: true"),  # at the end
    ],
)
def test_what_is_to_be_done_less_often_is_a_key_that_the_recipe_has(spent: str, settings: dict, said: str | None):
    run = history_of(**{spent: 1.0})
    run.settings.update(settings)
    advised = [line.what for line in advice(run, [])]
    assert len(advised) == (said is not None) and all(said in what and "None" not in what for what in advised)


def test_padding_costs_its_share_of_the_computing():
    run = history_of(step_seconds=2.0, data_seconds=1.0)
    run.record["packing"] = {"is_on": False, "why": "gpt2 mixes samples", "can_pack": False, "padding": 0.4}
    waits, padded = advice(run, [])
    assert padded.gain == pytest.approx(0.4 * 0.5) and waits.gain == pytest.approx(0.5)
    assert padded.what.startswith("40% of the positions are padding: gpt2 mixes samples; a smaller")
    run.record["packing"]["can_pack"] = True
    (_, padded) = advice(run, [profile_of(rank, communication=0.0, other=1 - rank / 10) for rank in (7, 5)])
    assert padded.gain == pytest.approx(0.4 * 0.5 * 0.5) and "data.packing: true" in padded.what
    for none in {"is_on": True}, {"is_on": False, "why": "data.packing is false", "padding": None}:
        run.record["packing"] = none
        assert len(list(advice(run, []))) == 1, "packed rows, and a stream's, of which nothing is known"


def test_small_micro_batches_beside_free_memory_are_named_without_a_profile():
    """8 micro-batches of a row each, a step of 1 s forecast as 0.4: on a GPU of 79 GiB there is room for 4 times 15,
    and three quarters of the 60% that nothing explains may go."""
    run = history_of()
    run.settings["batch.micro_batch_size"] = 1
    known: dict[str, Any] = {
        "hardware": {"gpu": "NVIDIA H100 80GB HBM3"},
        "step_forecast": {"low": 0.2, "high": 0.4, "parts": []},
        "forecast": {"needed": [14 * 2**30, 15 * 2**30]},
    }
    run.record.update(known)
    (line,) = advice(run, [])
    assert "8 micro-batches of some 6 tokens" in line.what and "batch.micro_batch_size 1 to 4, which" in line.what
    assert "at most 60 GiB" in line.what and line.gain == pytest.approx(0.6 * 0.75)
    assert list(advice(run, [profile_of(0, communication=0.0, other=0.02)])) == [], "a profile knows better"
    for key, other in (
        ("step_forecast", {"low": 0.2, "high": 1.1, "parts": []}),
        ("step_forecast", {"none": "the speed of this GPU is not known"}),
        ("forecast", {"needed": [40 * 2**30, 41 * 2**30]}),
        ("hardware", {"device": "cpu"}),
        ("strategy", {"processes": 2, "kind": "pp"}),
    ):
        unlike = history_of()
        unlike.settings["batch.micro_batch_size"] = 1
        unlike.record.update(known | {key: other})
        assert list(advice(unlike, [])) == [], key


def test_times_of_simulated_gpus_are_not_explained(gpu_lab: GpuLab, capsys):
    run = gpu_lab.run("fsdp2")
    assert "step_seconds" not in read_history(run.output).steps[0]
    assert main(["why-slow", str(run.output)]) == 2
    assert "simulated GPUs, whose times mean nothing" in capsys.readouterr().err


def test_steps_that_were_not_reached_are_reported(tmp_path):
    said: list[str] = []
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for ranks, reached in ([0], 4), ([1], 4), ([0], 5):
        profile = Profile(ProfileSection(steps=[5, 6], ranks=ranks), tmp_path, 0, model, said.append)
        for step in range(1, reached + 1):
            profile.begin_step(step)
            model(torch.ones(2))
            profile.end_step(step)
        profile.close()
        assert sum("nothing was profiled, as no step of [5, 6] was reached" in text for text in said) == 1
    assert any(text.startswith("PROFILE of steps 5 to 5, rank 0") for text in said), "a run that stops within"


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("{steps: [6, 5]}", "write the first step before the last"),
        ("{steps: [5]}", "run.profile.steps"),
        ("{steps: [5, 99]}", "but the run has 20 steps; name earlier ones"),
        ("{steps: [5, 6], ranks: [2]}", "run.profile.ranks is [2], but there are 2 processes; the last is 1"),
        ("{step: [5, 6]}", "unknown key"),
    ],
)
def test_a_profile_that_cannot_be_is_a_mistake_of_the_recipe(lab: Lab, profile: str, said: str, capsys):
    words = ["check", str(lab.folder / "recipe.yaml"), "--set", f"run.profile={profile}"]
    assert main([*words, "--strategy", "ddp", "--processes", "2"]) == 2
    assert said in capsys.readouterr().err


def test_each_part_of_the_forecast_is_held_against_a_part_of_the_profile():
    text = (ROOT / "cookbook/forecast/step_time.py").read_text()
    named = re.findall(r'(?:Portion\(\s*name=|_over\()"([^"]+)"', text)
    assert len(named) > 5 and set(named) <= {name for names in GROUPS.values() for name in names}
