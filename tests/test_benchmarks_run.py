"""Protects the benchmarks from rotting unnoticed: each of their programs runs, in as few steps as it can.

python -m pytest -q tests/test_benchmarks_run.py

`--page` programs write into a copy of the pages, which must come out as they are here. What else forecast_accuracy and
recipe_labels.py compute is tested by tests/test_plan_accuracy.py, tests/test_at_scale.py, tests/test_gpu_memory.py and
tests/test_recipes.py; tests/test_overhead.py runs overhead.py, and tests/test_architectures.py tries one of
architectures.py.
"""

import gzip
import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from benchmarks import pictures, trace_picture
from benchmarks.forecast_accuracy import simulated
from cookbook.system import step_phases
from tests.curves import Lab, done_of, environment
from tests.gpu_runs import GpuLab, own_gpus
from tests.needs import need_chromium, need_trl

COPIED = ("benchmarks", "docs")
TRIED = {"architectures", "checkpoints", "equivalence_table", "forecast_accuracy/run", "gpu_runs", "on_gpu"}
TRIED |= {"foreign_formats", "overhead", "pictures", "plan_seconds", "recipe_labels", "speed_goals", "vs_peers"}
TRIED |= {"loss_of_logits", "dropout", "killed_rounds"}
TRIED |= {"owner_schemas"}  # in test_owner_schemas.py
TRIED |= {"deepspeed_facts"}  # in test_convert.py
TRIED |= {"upgrade_places"}  # in test_upgrade.py
TRIED |= {"tokenizing"}  # in test_tokenizing_cost.py
TRIED |= {"gpu_node/run", "gpu_node/fit"}  # in test_gpu_node.py
TRIED |= {"fit_site/build"}  # in test_fit_site.py
LED = {
    "gpu_node/attention",
    "gpu_node/collectives",
    "gpu_node/liger",
    "race/gate",
    "peers/with_accelerate",
    "peers/with_trainer",
    "peers/with_trl",
    "with_facts",
}
"""Programs that gpu_node, vs_peers and architectures start."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The project, with pages and results that a program may write."""
    for path in ROOT.iterdir():
        if path.name in COPIED:
            shutil.copytree(path, tmp_path / path.name)
        elif path.name not in (".git", "outputs"):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def run(lab: Lab, copy: Path, *words: str) -> str:
    """A program in the copy, forked from the parent that has torch; what it prints."""
    logs = copy / "logs"
    logs.mkdir(exist_ok=True)
    job = {"folder": str(logs), "words": [str(copy / "benchmarks" / words[0]), *words[1:]], "limit": 900.0}
    done = done_of(job, lab.parent.ask(job | {"processes": 1, "cwd": str(copy)}))
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def changed(copy: Path) -> list[str]:
    """Files whose text is not that of the project."""
    files = [path for name in COPIED for path in (copy / name).rglob("*") if path.suffix != ".pyc" and path.is_file()]
    assert len(files) > 40
    return [
        str(path.relative_to(copy))
        for path in files
        if path.read_bytes() != (ROOT / path.relative_to(copy)).read_bytes()
    ]


def test_every_program_is_tried():
    folder = ROOT / "benchmarks"
    programs = [path for path in folder.rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    assert {str(path.relative_to(folder).with_suffix("")) for path in programs} == TRIED | LED


FORECAST_ACCURACY = [
    f"forecast_accuracy/run.py {name}" for name in ("published", "reports", "sampling", "at-scale", "simulated")
]


@pytest.mark.parametrize(
    "program", ["architectures.py", "on_gpu.py", "plan_seconds.py", "speed_goals.py", "vs_peers.py", *FORECAST_ACCURACY]
)
def test_a_page_comes_out_as_it_is_here(lab: Lab, copy: Path, program: str):
    run(lab, copy, *program.split(), "--page")
    assert changed(copy) == []


def test_each_loss_is_measured_in_both_dtypes(lab: Lab, copy: Path):
    said = run(lab, copy, "loss_of_logits.py", "--quick")
    rows = re.findall(r"(?m)^\| (float32|bfloat16) \| (\w[^|]*) \| \d+\.\d\d \| [\d,]+ \|$", said)
    losses = {"plain", "sft", "sft, frozen head", "sft, smoothed", "distill"}
    assert len(rows) == 10 and {loss for _, loss in rows} == losses


def test_dropout_is_measured_beside_torch_s(lab: Lab, copy: Path):
    said = run(lab, copy, "dropout.py", "--quick", "--layers", "1")
    assert len(re.findall(r"(?m)^\| as they are \| [^|]+ \| \d+\.\d{3} \| [\d,]+ \|$", said)) == 3


@pytest.mark.slow
def test_rounds_that_were_killed_leave_the_bytes_of_rounds_that_were_not(lab: Lab, copy: Path):
    said = run(lab, copy, "killed_rounds.py", "--kills", "2", "--rounds", "2")
    assert re.search(r"(?m)^[12] kills \(.*\)$", said) and "other bytes: none, of 4 files" in said


def test_the_page_of_formats_comes_out_as_it_is_here(lab: Lab, copy: Path):
    run(lab, copy, "foreign_formats.py")
    assert changed(copy) == []


def test_the_table_of_equivalence_is_made_from_what_the_tests_leave(lab: Lab, copy: Path):
    path = copy / "benchmarks/results/equivalence.json"
    results, folder = json.loads(path.read_text()), copy / "curves"
    folder.mkdir()
    for strategy, row in results["strategies"].items():
        for column in row.keys() - {"processes"}:
            told = row[column] | {"strategy": strategy, "column": column, "processes": row["processes"]}
            told |= results["curves"][strategy]
            (folder / f"matrix-{strategy}-{column}.json").write_text(json.dumps(told))
    for name, losses in results["mistakes"].items():
        (folder / f"mistake-{name}.json").write_text(json.dumps(losses))
    run(lab, copy, "equivalence_table.py", str(folder))
    written = json.loads(path.read_text())
    assert written["strategies"] == results["strategies"] and written["mistakes"] == results["mistakes"]
    assert "docs/equivalence.svg" not in changed(copy)


def test_memory_is_measured_and_its_runs_are_compared(lab: Lab, gpu_lab: GpuLab, copy: Path):
    row = next(simulated.measure(gpu_lab, lab, ["ddp"], ["full"], ["false"]))
    error = simulated.error_of(row)
    assert error is not None and abs(error) < 0.02
    lines = run(lab, copy, "gpu_runs.py", str(gpu_lab.folder), "--compare").splitlines()
    assert lines[0].split()[:3] == ["run", "loss", "norm"]


def test_a_label_is_filled_in(lab: Lab, copy: Path):
    text = (ROOT / "recipes/smollm2_135m/sft.yaml").read_text()
    text = re.sub(r"(?m)^# +8x24GB .*\n", "", text)  # which takes longer
    assert text.count("GB     nothing\n") == 1
    wrong, count = re.subn(r"(?m) single \d+$", " single 99", text)
    assert count == 1
    (copy / "one.yaml").write_text(wrong)
    run(lab, copy, "recipe_labels.py", "one.yaml")
    assert (copy / "one.yaml").read_text() == text


@pytest.mark.thorough
def test_checkpoints_are_compared():
    words = [sys.executable, "benchmarks/checkpoints.py", "--quick", "--strategies", "single"]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    row = next(line for line in done.stdout.splitlines() if line.startswith("| `single`"))
    assert len(re.findall(r"\d\.\d\d", row)) == 9 and "fails" not in row  # six times and three ratios


@pytest.mark.thorough
def test_all_peers_race_and_have_our_losses():
    need_trl()
    words = [sys.executable, "benchmarks/vs_peers.py", "--quick"]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    sides = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert sides.keys() == {"ours", "trl", "trainer", "accelerate"}
    for name, side in sides.items():
        assert side["losses"] == pytest.approx(sides["ours"]["losses"], abs=1e-5), name
        assert len(side["cpu"]) == len(side["clock"]) == 1 and min(side["cpu"]) > 0, name
        assert side["parts"]["matrices"] > 0, name
    assert len(set(sides["ours"]["losses"])) == len(sides["ours"]["losses"]) == 4, "it trains"
    assert sides["trl"]["tokens"] == sides["ours"]["tokens"], "both count the same tokens"


ON_TERMINAL = (
    "accelerate launch ...\nRUN outputs/mine\n  model     llama\n"
    "\r\x1b[36mstep   1/120\x1b[0m  loss 7.6660\n\r##  step  66/120  loss 4.4\r##  step  69/120  loss 4.3"
    "\r            \r\x1b[36mstep  70/120\x1b[0m  loss 4.2\n"
)


def test_the_picture_of_a_screen_has_its_lines_and_the_one_that_changes():
    text = pictures.screen(ON_TERMINAL)
    assert re.sub(r"\x1b\[\d+m", "", text).split("\n") == [
        "RUN outputs/mine",
        "  model     llama",
        "step   1/120  loss 7.6660",
        "##  step  69/120  loss 4.3",
    ]
    assert "llama" in pictures.drawn(text) and "font-face" not in pictures.drawn(text)


def test_the_picture_of_the_page_is_that_of_a_screen_as_it_is_today():
    """The names in its header are those of the page's example."""
    picture = html.unescape((ROOT / "docs/screen.svg").read_text()).replace("\xa0", " ")
    example = (ROOT / "docs/watching.md").read_text().partition("RUN outputs/quickstart")[2].partition("step 0")[0]
    names = re.findall(r"(?m)^  (\w+) ", example)
    assert len(names) > 5 and all(re.search(rf">\s*{name}\s*<", picture) for name in names)


def test_the_picture_of_a_step_fills_each_lane_to_the_share_of_its_time(tmp_path: Path):
    def event(name: str, start: int, end: int, thread: int = 1) -> dict:
        kind = "user_annotation" if ":" in name and "::" not in name else "cpu_op"
        return {"ph": "X", "cat": kind, "name": name, "tid": thread, "ts": start, "dur": end - start}

    path = tmp_path / "rank_0.pt.trace.json.gz"
    made = [event("run: step", 1000, 2000), event("run: forward", 1000, 1800), event("aten::mm", 1000, 1250)]
    made += [event("aten::copy_", 1300, 1400), event("gloo:all_reduce", 1200, 1500, thread=2)]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": made}).encode()))
    events = trace_picture.read_trace(path)
    parts = trace_picture.stretches(events, next(event for event in events if event.name == "run: step"))
    assert {part: sum(b - a for a, b in of) // 1000 for part, of in parts.items()} == {
        "compute": 250,
        "copies": 100,
        "communication": 300,
        "other": 500,
    }
    filled = trace_picture.shares(parts["communication"], 1e6, 2e6, 8)
    assert [round(share, 3) for share in filled] == [0, 0.4, 1, 1, 0, 0, 0, 0]
    drawn = trace_picture.draw([path, path], "two ranks")
    assert drawn.count("communication 30%") == 2 and ">forward<" in drawn


def test_the_picture_of_a_step_has_the_parts_and_phases_that_a_profile_has_today():
    picture = (ROOT / "docs/trace.svg").read_text()
    assert "prefers-color-scheme: dark" in picture and picture.count(">rank ") == 2
    for part in step_phases.PARTS:
        assert len(re.findall(rf">{part} \d+%<", picture)) == 2, part
    phases = set(re.findall(r"<title>([\w ]+)</title>", picture))
    assert phases >= {"data", "forward", "backward", "update"}


@pytest.mark.slow
@pytest.mark.thorough
def test_the_pictures_are_made_from_runs(lab: Lab, copy: Path):
    need_chromium()
    run(lab, copy, "pictures.py")
    assert sorted(changed(copy)) == ["docs/compare.png", "docs/report.png", "docs/screen.svg", "docs/trace.svg"]


def test_workers_of_the_gpu_tests_have_gpus_of_their_own(tmp_path: Path):
    with own_gpus(tmp_path, 2, 4) as own, own_gpus(tmp_path, 2, 4) as other:
        assert sorted(own + other) == [0, 1, 2, 3]
    with own_gpus(tmp_path, 4, 4) as all_of_them:
        assert all_of_them == [0, 1, 2, 3]
