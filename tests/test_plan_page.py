"""Protects the page of `plan --html`: its bars are the forecast's bytes, nothing beats its front, no file is replaced.

python -m pytest -q tests/test_plan_page.py
"""

import json
import random
import re
from pathlib import Path

import pytest
from conftest import ROOT
from test_report import Page, offences

from cookbook.commands.cli import main
from cookbook.commands.plan.forecast_page import Point, front
from cookbook.commands.shared.html_page import beginning

SMALL = "recipes/sums/model"
QUESTION = ["plan", SMALL, "--length", "128", "--strategy", "single", "--strategy", "ddp"]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def bars_of(figure: str) -> list[list[float]]:
    """Widths of the parts of each bar of a drawing, by the height at which it lies."""
    rows: dict[float, list[float]] = {}
    for x, y, right in re.findall(
        r'<path d="M ([\d.]+) ([\d.]+) \nL ([\d.]+) \2 \nL \3 [\d.]+ \nL \1 [\d.]+ \nz', figure
    ):
        rows.setdefault(float(y), []).append(float(right) - float(x))
    return [*rows.values()]


def test_the_page_has_a_bar_for_each_strategy_with_the_bytes_of_the_forecast(tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.html"
    assert main([*QUESTION, "--gpus", "2xH100", "--gpus", "2xA100", "--price", "2", "--html", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    page = Page(path)
    assert offences(page) == [] and page.tags["figure"] == 3
    figures = re.findall(r"<figure>.*?</figure>", page.text, re.DOTALL)
    for figure, gpus in zip(figures, ("2xH100", "2xA100"), strict=False):
        assert gpus in figure and len(re.findall(r'id="m\d-limit-\d', figure)) == 2, "a line for each bar"
        assert main([*QUESTION, "--gpus", gpus, "--json"]) == 0
        for forecast, widths in zip(json.loads(capsys.readouterr().out)["forecasts"], bars_of(figure), strict=True):
            memory = forecast["memory"]
            parts = [memory[name] for name in ("parameters", "gradients", "optimizer", "gathered", "activations")]
            sizes = [*parts, memory["logits"], memory["needed"][1] - memory["allocated"]]
            total = sum(sizes)
            assert total == memory["needed"][1]
            expected = [size / total for size in sizes if size]
            assert [width / sum(widths) for width in widths] == pytest.approx(expected, abs=1e-3)
    assert len(re.findall('id="p-point', figures[2])) == 4, "two strategies on two kinds of GPU"


def test_any_gpus_have_a_page_too(tmp_path: Path, capsys) -> None:
    path = tmp_path / "any.html"
    assert main([*QUESTION, "--gpus", "any", "--json", "--html", str(path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    page = Page(path)
    assert answer["page"] == str(path) and offences(page) == []
    assert len(bars_of(page.text)) == len(answer["cards"]) > 10
    assert page.text.count('id="p-point') == sum(card["price"] is not None for card in answer["cards"]) > 5


def test_the_front_is_what_nothing_beats_in_both() -> None:
    draw = random.Random(7)
    points = [Point(str(i), (draw.random(),) * 2, (draw.random(),) * 2) for i in range(60)]

    def is_beaten(point: Point) -> bool:
        return any(
            other.middle[0] <= point.middle[0] and other.middle[1] <= point.middle[1]
            for other in points
            if other is not point
        )

    unbeaten = {point.name for point in points if not is_beaten(point)}
    assert {point.name for point in front(points)} == unbeaten and 2 < len(unbeaten) < 30


@pytest.mark.parametrize("kind", ["foreign", "link", "folder", "own"])
def test_a_page_replaces_no_file_but_its_own(kind: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.html"
    if kind == "link":
        (tmp_path / "notes.html").write_text("notes")
        path.symlink_to(tmp_path / "notes.html")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text(beginning("plan" if kind == "own" else "report") + "<title>of before</title>")
    before = None if kind == "folder" else path.read_bytes()
    code = main(["plan", SMALL, "--gpus", "cpu", "--html", str(path), "--strategy", "single"])
    said = capsys.readouterr().err
    if kind == "own":
        assert code == 0 and "of before" not in path.read_text()
    else:
        assert code == 2 and "--html" in said and str(path) in said
        assert before is None or path.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "any"], "any is all of them; write it alone"),
        (["--gpus", "1xT4"], "one is named twice"),
        (["--gpus", "1xH100", "--json"], "--json answers for one"),
    ],
)
def test_several_gpus_that_are_no_question_are_refused(words: list[str], message: str, capsys) -> None:
    assert main(["plan", SMALL, "--gpus", "1xT4", *words]) == 2
    written = capsys.readouterr()
    assert message in written.out + written.err
