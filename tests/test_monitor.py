"""Protects the monitor: it measures each rank's GPU, ends with its run however that ends, and what is wrong is named.

python -m pytest -q tests/test_monitor.py
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, clean_environment

from cookbook.commands.cli import main
from cookbook.commands.report import hardware_problems
from cookbook.commands.shared.charts import MOST_POINTS, thin
from cookbook.commands.shared.history import History, read_history
from cookbook.system import monitor
from tests.curves import Lab
from tests.gpu_runs import GpuLab
from tests.simulated_driver import variables
from tests.test_report import Page, offences, write_run

HEALTHY = {
    "busy": 97,
    "memory.total": 80 * 2**30,
    "memory.used": 70 * 2**30,
    "power": 612_500,
    "power.limit": 700_000,
    "temperature": 61,
    "clock": 1755,
    "clock.max": 1980,
    "clock.reasons": 0,
    "errors": 0,
    "errors.corrected": 4,
    "rows": "1 0 0 0",
    "pcie.sent": 2_500_000,
    "pcie.received": 40_000,
    "field.138": 7_000_000,
    "field.59": 0,
    "field.94": 12,
    "xids": "",
}
MEASURED = {
    "busy_percent": 97,
    "memory_gib": 70,
    "memory_total_gib": 80,
    "watts": 612.5,
    "watts_limit": 700,
    "celsius": 61,
    "clock_mhz": 1755,
    "clock_limit_mhz": 1980,
    "uncorrected_errors": 0,
    "corrected_errors": 4,
    "pcie_sent_mb_s": 2500,
    "pcie_received_mb_s": 40,
    "nvlink_mb_s": 0,
    "nvlink_recoveries": 0,
    "pcie_replays": 0,
}
TOTAL = {"memory_total_gib": 80}


def facts(**of_gpu_1: object) -> str:
    lines = [f"gpu.*.{name} {value}" for name, value in HEALTHY.items()]
    return "\n".join(["count 2", *lines, *(f"gpu.1.{key} {value}" for key, value in of_gpu_1.items())]) + "\n"


def measure(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> list[dict[str, Any]]:
    """The first line's GPUs, by a monitor that is closed at once."""
    for name, value in variables(folder, text).items():
        monkeypatch.setenv(name, value)
    watching = monitor.Monitor(folder, first_rank=8, num_ranks=ranks, machine=1)
    watching.close()
    return json.loads((folder / "monitor-1.jsonl").read_text().splitlines()[0])["gpus"]


def test_each_rank_has_the_numbers_of_its_own_gpu_in_usual_units(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    sick = {"busy": 12, "temperature": 91, "clock.reasons": 0x4 | 0x40 | 0x1, "power": "error 3", "errors": 2}
    first, second = measure(tmp_path, facts(**sick), monkeypatch)
    assert second == {"rank": 9, **MEASURED}
    changed = {"busy_percent": 12, "celsius": 91, "uncorrected_errors": 2}
    expected = {"rank": 8, **MEASURED, **changed, "throttled": ["heat, hardware slowdown", "power cap"]}
    del expected["watts"]  # which this driver does not report
    assert first == expected


def test_errors_of_a_gpu_and_what_its_links_carry_are_measured(tmp_path, monkeypatch):
    """An Xid is delivered once; counters count from the run's beginning, whatever they were before it."""
    grows = {"field.59": "grows 1000000", "xids": "79 31 79", "rows": "0 2 1 0"}
    healthy, sick = measure(tmp_path, facts(**grows), monkeypatch)
    assert healthy == {"rank": 8, **MEASURED}
    assert sick["xids"] == [31, 79] and sick["remapping"] == "pending" and sick["nvlink_recoveries"] >= 1


def test_the_rate_of_a_counter_is_in_megabytes_a_second(tmp_path):
    """The counter is of KiB. The process may lose the CPU between clock and counter."""
    code = "import time; from cookbook.system.monitor import gpu_handles, gpu_samples\n"
    code += "found = gpu_samples(gpu_handles(1)[0]); next(found); time.sleep(0.5); print(next(found)['nvlink_mb_s'])"
    environment = clean_environment(**variables(tmp_path, facts() + f"gpu.*.field.138 grows {5e6 / 1.024}\n"))
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert float(said.stdout) == pytest.approx(5000, rel=0.5)


def test_what_a_driver_does_not_offer_is_left_out(tmp_path, monkeypatch):
    text = "count 1\ngpu.*.busy 50\n"
    assert measure(tmp_path, text, monkeypatch) == [{"rank": 8, "busy_percent": 50, "memory_gib": 0, **TOTAL}]


def test_an_error_is_kept_beside_samples_without_one():
    summary = monitor.summarise([{"xids": [48], "remapping": "pending"}, {"nvlink_recoveries": 2}, {}])
    assert summary == {"xids": [48], "remapping": "pending", "nvlink_recoveries": 2}


def test_a_driver_that_hangs_delays_the_end_of_a_run_for_two_seconds_at_most(tmp_path, monkeypatch):
    for name, value in variables(tmp_path, facts(busy="hang")).items():
        monkeypatch.setenv(name, value)
    watching, began = monitor.Monitor(tmp_path, first_rank=0, num_ranks=2, machine=0), time.monotonic()
    child = watching._child
    watching.close()
    assert 1.9 < time.monotonic() - began < 20 and not (tmp_path / monitor.FILE).exists()
    child.kill()


def test_it_ends_with_a_run_that_is_killed(tmp_path):
    code = "from cookbook.system.monitor import Monitor; from pathlib import Path; import sys, time\n"
    code += "found = Monitor(Path(sys.argv[1]), first_rank=0, num_ranks=1, machine=0)\n"
    code += "print(found._child.pid, flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    run = subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(run.stdout.readline()))
    assert child.is_running() and child.name().startswith("python")
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    child.wait(timeout=30)
    run.stdout.close()


def test_a_run_on_the_cpu_is_measured_and_leaves_no_process(lab: Lab):
    curve = lab.run("ddp", {"run.monitor": "true"})
    lines = [json.loads(line) for line in (curve.folder / monitor.FILE).read_text().splitlines()]
    cpu = lines[-1]["cpu"]
    assert lines[-1]["gpus"] == [] and 0 < cpu["busy_percent"] <= 100
    assert cpu["memory_total_gib"] == pytest.approx(psutil.virtual_memory().total / 2**30, abs=0.01)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(curve.folder) in (p.info["cmdline"] or [])]
    assert not (lab.run("ddp").folder / monitor.FILE).exists()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_run_on_simulated_gpus_measures_the_gpu_of_each_rank(gpu_lab: GpuLab, strategy: str, tmp_path):
    driver = variables(tmp_path, facts(temperature=91))
    run = gpu_lab.run(strategy, {"run.monitor": "true"}, variables=driver)
    history = read_history(run.output)
    assert [gpu["rank"] for gpu in history.monitor[-1]["gpus"]] == [0, 1]
    assert [gpu["celsius"] for gpu in history.monitor[-1]["gpus"]] == [61, 91]
    assert hardware_problems.findings(history) == ["GPU at 91 degrees (rank 1), not below 80: look at fans and air"]


def history_of(*samples: dict[str, Any], cpu: dict[str, Any] | None = None) -> History:
    """A history of 20 lines, in which each rank's GPU is healthy but for its sample."""
    cpu = {"busy_percent": 50, "memory_gib": 100, "memory_total_gib": 1000} | (cpu or {})
    gpus = [{"rank": rank, **MEASURED, **sample} for rank, sample in enumerate(samples)]
    lines = [{"time": 10.0 * i, "gpus": gpus, "cpu": cpu} for i in range(20)]
    return History(folder=Path("x"), lines=[], events=[], record={}, settings={}, state="", samples=[], monitor=lines)


@pytest.mark.parametrize(
    ("samples", "cpu", "said"),
    [
        ([{}, {}], {}, []),
        ([{}, {"busy_percent": 71}], {}, ["GPU busy 71 % of the time (rank 1), not 90: see cookbook why-slow"]),
        ([{"celsius": 80}, {"celsius": 84}], {}, ["GPU at 80 to 84 degrees (rank 0, rank 1), not below 80"]),
        ([{"memory_gib": 30}, {"memory_gib": 40}], {}, ["GPU memory at most 50% used: a larger batch.micro_batch"]),
        ([{"memory_gib": 30}, {}], {}, []),
        ([{}, {"uncorrected_errors": 3}], {}, ["uncorrected memory errors since its driver started: 3 (rank 1)"]),
        (
            [{"xids": [13]}, {"xids": [79, 999]}],
            {},
            ["Xid 13 (rank 0): ", "Xid 79 (rank 1): the GPU has", "Xid 999 (rank 1): see"],
        ),
        ([{}, {"remapping": "pending"}], {}, ["rows of GPU memory wait to be replaced (rank 1): reset"]),
        (
            [{}, {"nvlink_recoveries": 3, "pcie_replays": 7}],
            {},
            ["NVLinks failed and recovered 3 times (rank 1)", "PCIe messages were sent again 7 times (rank 1)"],
        ),
        (
            [{"nvlink_mb_s": 9000}, {"nvlink_mb_s": 5000}, {"nvlink_mb_s": 8}],
            {},
            ["NVLinks carried 8 MB/s (rank 2), 5,000 on the others"],
        ),
        ([{"corrected_errors": 900}, {"nvlink_mb_s": 0}], {}, []),
        ([{}, {"throttled": ["heat"]}], {}, ["clocks lowered in 100 % of the time (rank 1) by heat"]),
        ([{}, {}, {"clock_mhz": 1200}], {}, ["clock of 1200 MHz (rank 2), 1755 on the others"]),
        ([{}], {"memory_gib": 950}, ["host memory 95% used"]),
        ([{"busy_percent": 10}] * 8, {}, ["GPU busy 10 % of the time (8 ranks, rank 0 among them)"]),
    ],
)
def test_what_is_wrong_is_named_with_its_rank_and_nothing_else_is(samples, cpu, said):
    findings = hardware_problems.findings(history_of(*samples, cpu=cpu))
    assert len(findings) == len(said) and all(a.startswith(b) for a, b in zip(findings, said, strict=True)), findings


def test_the_report_draws_what_was_measured(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = history_of({}, {"busy_percent": 71}).monitor
    (folder / monitor.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(folder)]) == 0
    page = Page(folder / "report.html")
    assert offences(page) == [] and page.tags["svg"] == 7 + 8
    expected = "busy and memory of 2 GPUs and the CPU; heat, power, clock, NVLink and PCIe both ways of 2 GPUs"
    assert page.curves()[-18:] == [20] * 18, expected
    assert "GPU busy 71 % of the time (rank 1), not 90" in "".join(page.words)


def test_a_long_curve_is_thinned_without_losing_a_spike():
    points = [(float(i), 0.0) for i in range(100_000)]
    points[54_321], points[77_777] = (54_321.0, 9.0), (77_777.0, -9.0)
    thinned = thin(points)
    assert len(thinned) <= MOST_POINTS and {points[54_321], points[77_777]} <= set(thinned)
    assert thinned == sorted(thinned) and thin(points[:MOST_POINTS]) == points[:MOST_POINTS]
