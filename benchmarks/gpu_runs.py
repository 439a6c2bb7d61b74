"""Writes down what the tests on simulated GPUs ran, or compares with it what they ran on real ones.

make simulated-gpus                       writes benchmarks/results/simulated_gpus.json
python benchmarks/gpu_runs.py --forecast  computes the forecasts there again; what was measured is kept
make test-gpu                             prints a line for each run on real GPUs, and writes real_gpus.json beside it
"""

import argparse
import json
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cookbook.forecast.outside import workspaces  # noqa: E402
from cookbook.system.hardware import find_gpu  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "simulated_gpus.json"
REAL = RESULTS.with_name("real_gpus.json")
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes")


def read_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """By the name of its folder, which is made from all that the run was given: what a finished run did."""
    runs = {}
    for path in sorted(folder.glob("*/case.json")):
        case = json.loads(path.read_text())
        metrics = path.parent / "run" / "metrics.jsonl"
        if set(json.loads((path.parent / "codes.json").read_text())) != {0} or case["on"] != "gpu":
            continue
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        reports = [json.loads(report.read_text()) for report in path.parent.glob("rank_*.json")]
        record = json.loads((path.parent / "run" / "run.json").read_text())
        runs[path.parent.name] = {
            **{key: case[key] for key in ("strategy", "settings", "processes", "recipe")},
            "losses": [line["loss"] for line in lines if "loss" in line],
            "norms": [line["grad_norm"] for line in lines if "loss" in line],
            "peak_bytes": max(max(report["peak_bytes"]) for report in reports),
            "forecast_bytes": record.get("forecast", {}).get("allocated"),
            "gpu": record["hardware"].get("gpu"),
            "versions": record["versions"],
        }
    return runs


def compare(real: dict[str, dict[str, Any]], simulated: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each run that both have. Simulated GPUs have no cuBLAS, whose workspaces are added to their peak."""
    rows = [f"{'run':64} {'loss':>8} {'norm':>8} {'peak, MB':>10} {'simulated':>10} {'forecast':>10}"]
    for name, run in real.items():
        other = simulated.get(name)
        if other is None:
            continue
        loss = max(abs(a - b) for a, b in zip(run["losses"], other["losses"], strict=True))
        norms = [abs(a / b - 1) for a, b in zip(run["norms"], other["norms"], strict=True) if a and b]
        settings = " ".join(f"{key}={value}" for key, value in run["settings"].items())
        peak, forecast = run["peak_bytes"], run.get("forecast_bytes")
        expected = other["peak_bytes"] + workspaces(find_gpu(run["gpu"] or ""))
        rows.append(
            f"{run['strategy'] + ' ' + settings:64.64} {loss:8.1e} {max(norms, default=0.0):8.1e} {peak / 1e6:10.1f}"
            f" {expected / peak - 1:+10.1%}" + (f" {forecast / peak - 1:+10.1%}" if forecast else "")
        )
    return rows


def forecast_again(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A run on simulated GPUs with its forecast as of now; `folder` is for its recipe."""
    from benchmarks.forecast_accuracy.simulated import forecast_of

    if run["forecast_bytes"] is None:
        return run
    settings = {key: run[key] for key in ("processes", "recipe")}
    return run | {"forecast_bytes": forecast_of(run["strategy"], run["settings"], folder, **settings)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", help="with the runs")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--forecast", action="store_true")
    arguments = parser.parse_args()
    if arguments.forecast:
        recorded = json.loads(RESULTS.read_text())
        with tempfile.TemporaryDirectory() as made:
            again = {name: forecast_again(run, Path(made)) for name, run in recorded.pop("runs").items()}
        write(RESULTS, again, **recorded)
        return
    if arguments.folder is None:
        parser.error("write the folder with the runs")
    runs = read_runs(arguments.folder)
    if not runs:
        sys.exit(f"{arguments.folder}: no finished run there")
    if arguments.compare:
        print("\n".join(compare(runs, json.loads(RESULTS.read_text())["runs"])))
        write(REAL, runs, command="make test-gpu")
        return
    versions = {name: version(name) for name in PACKAGES}
    write(RESULTS, runs, command="make simulated-gpus", machine=f"{platform.machine()}, CPU only", versions=versions)


def write(path: Path, runs: dict[str, dict[str, Any]], **about: Any) -> None:
    if "versions" in about:  # of all alike
        runs = {name: {key: run[key] for key in run if key != "versions"} for name, run in runs.items()}
    path.write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(runs)} runs")


if __name__ == "__main__":
    main()
