"""Protects the site of forecasts: each cell is plan's answer, links lead to their view, a second build asks nothing.

python -m pytest -q tests/test_fit_site.py -m "slow or not slow"
"""

import html
import json
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

from benchmarks.fit_site import build
from cookbook.commands.cli import main
from cookbook.commands.plan import planning
from cookbook.system.hardware import GIB, find_gpu
from tests.needs import need_chromium

MODEL = "recipes/sums/model"
CARDS = ("H100", "H200")
LENGTH = 128


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(planning, "GPUS", tuple(find_gpu(name) for name in CARDS))


def figures_of(page: str) -> dict:
    match = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    assert match is not None
    return json.loads(match[1])


def test_each_cell_is_what_plan_answers_and_is_asked_once(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(build, "METHODS", ("full",))
    asked = build.questions([MODEL], [LENGTH])
    answers = list(build.ask(asked, tmp_path / "cache", 1e9))
    build.write(tmp_path / "site", build.site(answers))
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == ["fit.js", "index.html"]
    figures = figures_of((tmp_path / "site/index.html").read_text())
    cells = {(cell["model"], cell["method"], cell["gpu"]): cell for cell in figures["cells"]}
    assert set(cells) == {(MODEL, "full", gpu) for gpu in CARDS}
    capsys.readouterr()
    assert main(["plan", MODEL, "--method", "full", "--length", str(LENGTH), "--gpus", "any", "--json"]) == 0
    for card in json.loads(capsys.readouterr().out)["cards"]:
        cell = cells[MODEL, "full", card["gpu"]]
        assert cell["gib"][:2] == [round(size / GIB, 1) for size in card["needed"]]
        assert (cell["count"], cell["machines"]) == (card["gpus"], card["machines"])

    def never(question):
        raise AssertionError(f"{question} was asked again")

    monkeypatch.setattr(build, "answer_of", never)
    assert list(build.ask(asked, tmp_path / "cache", 1e9)) == answers
    monkeypatch.setattr(build, "state_of_code", lambda: "another state")
    with pytest.raises(AssertionError, match="was asked again"):
        list(build.ask(asked, tmp_path / "cache", 1e9))
    assert list(build.ask(asked, tmp_path / "cache", -1.0)) == [], "no time, so the page has nothing new"


def test_the_nearest_measurement_is_by_hand() -> None:
    measured = [
        build.Measurement("a", "", "lora", 8.0, 2048, "", 0.1),
        build.Measurement("b", "", "lora", 8.0, 4096, "", 0.2),
        build.Measurement("c", "", "full", 7.5, 8192, "", 0.3),
        build.Measurement("d", "", "lora", 64.0, 8192, "", 0.4),
    ]
    # One doubling of length to b; two to a; three doublings of size to d; c is of another method.
    assert build.nearest(measured, build.Question("m", "lora", 8192), 8.0) == 1
    assert build.nearest(measured, build.Question("m", "lora", 8192), 60.0) == 3
    assert build.nearest(measured, build.Question("m", "full", 128), 0.1) == 2
    assert build.nearest(measured, build.Question("m", "qlora", 128), 8.0) is None


def test_measurements_are_those_of_the_page_of_accuracy() -> None:
    memory, speed = build.memory_measurements(), build.speed_measurements()
    assert {run.method for run in memory} == {"full", "lora", "qlora"} and len(memory) > 40 and len(speed) > 60
    by_id = {run.id: run for run in memory}
    assert (by_id["m125"].method, by_id["m125"].billions, by_id["m125"].length) == ("lora", 7.0, 1304)
    page = (ROOT / "docs/plan_accuracy.md").read_text()
    for run in memory:
        (line,) = re.findall(rf"(?m)^\| {run.id} \|.*$", page)
        assert f"{run.error:+.1%}" in line


SCRIPT = """<script>
addEventListener("load", () => {
  const cells = [...document.querySelectorAll("tbody td")].map((cell) => cell.textContent);
  const detail = document.getElementById("detail");
  const wide = document.documentElement.scrollWidth > innerWidth;
  const said = { cells, rows: document.querySelectorAll("tbody tr").length, detail: detail.innerText, wide };
  (parent === window ? document : parent.document).title = JSON.stringify(said);
});
</script>"""


@pytest.mark.slow
def test_a_browser_shows_the_view_of_a_link(tmp_path: Path) -> None:
    chromium = need_chromium()
    cell = {
        "model": "Qwen/A-8B", "method": "full", "length": 8192, "gpu": "H100", "count": 4, "machines": "4xH100",
        "strategy": "fsdp2", "verdict": "fits", "settings": "micro-batch 1", "batch": 16, "gib": [50.0, 60.0, 79.0],
        "step": [1.0, 2.0], "speed": [1000.0, 2000.0], "hours": [1.0, 2.0], "price": None, "memory": 0, "time": None,
    }  # fmt: skip
    run = {"id": "m1", "run": "Llama", "published": "60 GiB allocated", "error": -0.035, "source": "https://a.b/c"}
    figures = {
        "models": [["Qwen/A-8B", 8.0], ["Other/B-1B", 1.0]], "gpus": [["T4", 16], ["H100", 80]],
        "methods": ["full", "lora"], "lengths": [2048, 8192], "cells": [cell, cell | {"gpu": "T4", "count": 1}],
        "refused": [["Other/B-1B", "full", 8192, "T4", "<b>no</b> room"]], "memory": [run], "speed": [],
        "versions": {"torch": "2"}, "prices": "by a list",
    }  # fmt: skip
    build.write(tmp_path, figures)
    page = tmp_path / "index.html"
    page.write_text(page.read_text().replace("</head>", f"{SCRIPT}</head>"))

    def seen(fragment: str) -> dict:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
        flags += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr"]
        done = subprocess.run([chromium, *flags, f"{page.as_uri()}{fragment}"], capture_output=True, text=True)
        assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr
        title = re.search(r"<title>(.*?)</title>", done.stdout)
        assert title is not None
        return json.loads(html.unescape(title[1]))

    plain = seen("")
    assert plain["rows"] == 2 and plain["cells"] == ["-"] * 4 and not plain["wide"], "lora of 2,048 was not asked"
    linked = seen("#q=qwen+8b&method=full&length=8192&gpu=h100&cell=Qwen%2FA-8B%40H100")
    assert linked["rows"] == 1 and linked["cells"] == ["4"]
    for words in ("50 to 60 of 79 GiB", "published 60 GiB allocated, forecast -4 %", "--length 8192 --gpus 4xH100"):
        assert words in linked["detail"]
    assert "no price on the list" in linked["detail"] and "none of this method" in linked["detail"]
    refused = seen("#method=full&length=8192&cell=Other%2FB-1B%40T4")
    assert refused["detail"].endswith("<b>no</b> room"), "as text"
