"""Protects what a run shows: lines that stay everywhere, one that changes on a terminal only, its numbers the log's.

python -m pytest -q tests/test_screen.py
"""

import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
import time

import pytest
from conftest import ROOT, clean_environment

from cookbook.system.screen import Screen
from cookbook.training.metrics import RunLog
from tests.curves import Lab
from tests.gpu_runs import GpuLab

LINE = {"loss": 2.5, "learning_rate": 3e-4, "grad_norm": 1.25, "tokens_per_second": 12345.6, "peak_memory_gib": 1.5}


def test_without_a_terminal_lines_stay_every_so_many_steps_with_the_numbers_of_the_log(tmp_path, capsys):
    log = RunLog(tmp_path, is_main=True, max_steps=24, log_every_steps=10)
    for step in range(1, 25):
        log.write({"step": step, **LINE, "mfu": 0.415})
    log.write({"step": 24, "eval_loss": 1.25, "eval_num_tokens": 7})
    log.close()
    shown = capsys.readouterr().err
    numbers = "loss 2.5000  rate 3.00e-04  norm 1.25    12,346 tokens/s  1.50 GiB  41.5% MFU"
    steps = [line for line in shown.splitlines() if "loss 2.5" in line]
    assert [line[:10] for line in steps] == ["step  1/24", "step 10/24", "step 20/24", "step 24/24"]
    assert all(numbers in line for line in steps)
    assert "step 24: held-out loss 1.2500 (7 tokens)" in shown.splitlines()
    scored = RunLog(tmp_path / "scored", is_main=True, max_steps=24, counted="scores")
    scored.write({"step": 24, "eval_loss": 1.25, "eval_reward_accuracy": 0.666, "eval_num_tokens": 30})
    scored.close()
    assert "step 24: held-out loss 1.2500, accuracy 0.67 (30 scores)" in capsys.readouterr().err.splitlines()
    assert "\r" not in shown and "\x1b" not in shown, "a file gets no bar and no colours"


def test_what_was_not_measured_is_not_shown():
    shown = io.StringIO()
    Screen(max_steps=1, first_step=0, every=1, file=shown).step({"step": 1, "loss": None, "grad_norm": 0.5})
    assert shown.getvalue() == "step 1/1  norm 0.5  \n"


def test_the_end_follows_the_steps_since_the_first_of_this_start():
    screen = Screen(max_steps=111, first_step=10, every=1, file=io.StringIO())
    screen._began = time.monotonic() - 20
    # After step 11 came 40 in 20 s, evaluations included; 60 are left.
    assert screen._end(51).startswith("0:00:30 left, ends ")
    assert screen._end(11) == screen._end(111) == ""


def test_the_page_shows_what_is_drawn():
    shown = io.StringIO()
    lines = re.findall(r"(?m)^(step +\d+/60  loss .*)", (ROOT / "docs/watching.md").read_text())
    for line in lines:
        step, loss, rate, norm, speed, memory = re.findall(r"(?:\s|^)([\d.,e-]*\d)(?=[\s/])", line)[:6]
        numbers = {"loss": loss, "learning_rate": rate, "grad_norm": norm, "peak_memory_gib": memory}
        numbers["tokens_per_second"] = speed.replace(",", "")
        Screen(max_steps=60, first_step=int(step) - 1, every=1, file=shown).step(
            {"step": int(step), **{key: float(value) for key, value in numbers.items()}}
        )
    assert len(lines) == 2
    assert [line.rstrip() for line in shown.getvalue().splitlines()] == [line.partition("  0:00:")[0] for line in lines]


PROGRAM = f"""
import time
from cookbook.system.screen import Screen
screen = Screen(max_steps=30, first_step=0, every=10)
screen.header("RUN [x]", [("model", "llama " * 30), ("machine", "2 GPUs")])
for step in range(1, 31):
    screen.step({{"step": step, **{LINE!r}}}, hardware=lambda: "GPU 97 %")
    time.sleep(0.05)
    if step == 15:
        screen.say("saved")
screen.close()
"""


@pytest.mark.parametrize(
    ("extra", "columns"), [({}, 140), ({"NO_COLOR": "1"}, 90)], ids=["colour", "narrow, no colour"]
)
def test_a_terminal_has_a_line_that_changes_below_those_that_stay(extra, columns):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    settings = {name: value for name, value in clean_environment().items() if name not in ("NO_COLOR", "COLUMNS")}
    settings |= {"TERM": "xterm"} | extra
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=settings, stderr=theirs, check=True)
    os.close(theirs)
    shown = ""
    while "30/30" not in shown or not shown.endswith("\r"):
        shown += os.read(ours, 65536).decode()
    os.close(ours)
    assert ("\x1b[36mmodel" in shown) == (not extra)
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    stays = [line.rpartition("\r")[2] for line in plain.replace("\r\n", "\n").split("\n")]
    assert [line[:10] for line in stays if line.startswith("step")] == [f"step {n:>2}/30" for n in (1, 10, 20, 30)]
    assert "saved" in stays and stays[0] == "RUN [x]"
    assert max(len(line) for line in stays if not line.startswith("step")) <= columns, "the header wraps between words"
    changing = re.findall(r"\r(\S+) +(step [^\r]*)", plain)
    assert any("GPU 97 %" in text for _, text in changing) == (columns == 140) and len(changing) > 2
    assert all(len(bar) + len(text) < columns for bar, text in changing), "a longer one would wrap, and stay"


def test_a_run_tells_what_it_is(lab: Lab):
    settings = {"run.max_steps": "3", "schedule.warmup_steps": "0", "adapter": "{name: lora, rank: 4}"}
    folder, printed = lab.attempt("zero3", settings)
    curve = json.loads((folder / "run.json").read_text())
    assert f"RUN {folder}" in printed and curve["header"]["machine"] in printed
    model = re.search(r"model +llama, ([\d,]+) parameters, ([\d,]+) trained \(([\d.]+)%\), lora of rank 4", printed)
    assert model is not None
    # 2 layers of 64: q, o 64x64; k, v 64x32; gate, up, down 64x96: ranks of 4 beside each input and output.
    trained = 2 * 4 * (2 * 128 + 2 * 96 + 3 * 160)
    assert int(model[2].replace(",", "")) == trained
    whole = 512 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) + 64 + trained
    assert int(model[1].replace(",", "")) == whole and float(model[3]) == pytest.approx(100 * trained / whole, abs=0.01)
    assert re.search(r"strategy +zero3, precision no", printed) and re.search(r"steps +3, 7 an epoch", printed)
    assert printed.count("step 1/3") == printed.count("step 3/3") == 1 and "step 2/3" not in printed


def test_simulated_gpus_show_the_forecast_and_no_speed(gpu_lab: GpuLab):
    run = gpu_lab.run("fsdp2")
    shown, expected = run.log(), run.record["forecast"]["allocated"] / 2**30
    assert f"forecast {expected:.2f} GiB a GPU at" in shown and "(simulated: no speeds)" in shown
    assert re.search(r"step 3/3  loss \d", shown) and "tokens/s" not in shown and "ends" not in shown
