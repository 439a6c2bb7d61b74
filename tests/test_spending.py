"""The price so far is GPUs times hours times the price of one, of all starts of a run, and every command shows it.

python -m pytest -q tests/test_spending.py
"""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from cookbook.commands.cli import main
from cookbook.commands.watch import look
from cookbook.run import spending
from cookbook.system.status import Status, price_so_far
from tests.curves import Curve

DAY = 1e9
"""A day on the clock of the planted machine, on which the process began."""


class Clock:
    """A clock of which hours pass when it is told so; the process began half an hour before."""

    def __init__(self, monkeypatch) -> None:
        self.hours = 0.5
        now = SimpleNamespace(time=lambda: DAY + self.hours * 3600, monotonic=lambda: 77.0 + self.hours * 3600)
        monkeypatch.setattr(spending, "time", now)
        monkeypatch.setattr(spending.psutil, "Process", lambda: SimpleNamespace(create_time=lambda: DAY))


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def write(folder: Path, prices: list[float | None], status: float | None) -> None:
    """Write what a start leaves: a line of metrics for each price, and its status."""
    lines = [
        {"step": i, "epoch": 0.1, "loss": 1.0} | ({} if price is None else {"price": price})
        for i, price in enumerate(prices)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Status(folder, is_main=True, price=lambda: {} if status is None else {"price": status})


def test_the_price_is_hours_since_the_process_began_times_gpus_times_the_price_of_one(clock):
    meter = spending.meter(2.5, 8, None)
    assert meter.price() == {"price": pytest.approx(0.5 * 8 * 2.5)}
    clock.hours = 3.5
    assert meter.price() == {"price": pytest.approx(70.0)}


def test_a_start_that_resumes_adds_to_what_the_earlier_ones_have_cost(clock, tmp_path):
    """By its own price and number of GPUs."""
    write(tmp_path, [10.0, 12.0], 11.0)  # killed after a step: its status is of the save before
    assert spending.meter(3.0, 2, tmp_path).price() == {"price": pytest.approx(12.0 + 0.5 * 2 * 3.0)}
    write(tmp_path, [10.0, 12.0], 14.5)  # it ended, with an export
    assert spending.meter(3.0, 2, tmp_path).price() == {"price": pytest.approx(17.5)}
    write(tmp_path, [10.0], 13.0)  # the start after a kill, which trained no step: the log is cut, its price is not
    assert spending.meter(3.0, 2, tmp_path).price() == {"price": pytest.approx(16.0)}
    assert spending.meter(3.0, 2, None).price() == {"price": pytest.approx(3.0)}, "a new run has no earlier starts"


def test_there_is_none_where_it_is_not_known(clock, tmp_path, monkeypatch):
    write(tmp_path, [10.0, None, None], None)
    assert price_so_far(tmp_path, [{"step": 1}]) is None
    assert spending.meter(None, 8, tmp_path).price() == {}
    monkeypatch.setattr(spending.simulated_gpus, "is_active", lambda: True)
    assert spending.meter(2.5, 8, tmp_path).price() == {}


def test_every_command_that_looks_at_a_run_says_it(tmp_path, capsys):
    run, other = tmp_path / "run", tmp_path / "other"
    for folder, price in {run: 12.345, other: None}.items():
        folder.mkdir()
        write(folder, [price], price)
        assert look(folder).price == price
        assert main(["next", str(folder), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["price"] == price
        assert main(["report", str(folder), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["runs"][0]["price"] == price
        for command in ("next", "report"):
            assert main([command, str(folder)]) == 0
            printed = capsys.readouterr()
            assert ("12.3" in printed.out + printed.err) == (price is not None), (command, printed)


def test_the_forecast_takes_the_price_of_the_recipe(capsys):
    words = [
        "plan",
        "recipes/quickstart.yaml",
        "--gpus",
        "1xH100",
        "--strategy",
        "single",
        "--set",
        "mixed_precision=bf16",
    ]
    said = []
    for price in ([], ["--price", "3"], ["--set", "run.price_per_gpu_hour=3"]):
        assert main([*words, *price]) == 0
        said.append(capsys.readouterr().out.partition("  next ")[0])  # which repeats the words of the command
    assert "price" not in said[0] and "price" in said[1] and said[2] == said[1]


@pytest.mark.slow
def test_a_run_counts_all_of_its_time_over_a_kill_and_a_resume(lab, tmp_path):
    """At 3,600 an hour the price of two processes is twice the seconds."""
    settings = {"run.price_per_gpu_hour": "3600", "run.save_every_steps": "2", "run.resume": "auto"}
    settings |= {"run.output_dir": str(tmp_path / "run"), "run.max_steps": "6"}
    stopped = lab.start("ddp", settings | {"run.stop_after_steps": "3"}, 2)
    assert stopped.returncode == 75, stopped.stdout
    first = [line["price"] for line in Curve(tmp_path / "run").steps]
    ended = json.loads((tmp_path / "run/status.json").read_text())["price"]
    assert ended >= first[-1]
    # As if it had been killed after a step that no checkpoint has.
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "epoch": 0.5, "loss": 1.0, "price": ended + 1000}) + "\n")
    assert lab.start("ddp", settings, 2).returncode == 0
    curve = Curve(tmp_path / "run")
    assert [line["step"] for line in curve.steps] == [1, 2, 3, 4, 5, 6]
    for before, line in pairwise(curve.steps):
        took = 2 * sum(line[key] for key in ("step_seconds", "eval_seconds", "save_seconds"))
        earned = line["price"] - before["price"]
        if line["step"] == 4:  # after loading, at the price of the lost step
            assert earned > ended - first[-1] + 1000
        else:
            assert earned == pytest.approx(took, rel=0.05, abs=0.2)
    assert price_so_far(curve.folder, []) > curve.steps[-1]["price"], "the export takes time too"
