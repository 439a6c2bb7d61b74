"""Protects the page of what a run costs besides training: it shows its results, and every measurement runs.

python -m pytest -q tests/test_overhead.py
"""

import json

import pytest

from benchmarks import overhead


def test_the_page_shows_the_results():
    results = json.loads(overhead.RESULTS.read_text(encoding="utf-8"))
    text = overhead.PAGE.read_text(encoding="utf-8")
    assert text.split(overhead.BEGIN)[1].split(overhead.END)[0].strip() == overhead.render(results)
    assert [row["size"] for row in results["found"]["ranks"]] == list(overhead.RANKS)


MARKS = {"step_model": [pytest.mark.slow, pytest.mark.thorough]}
"""It is much like step_length."""


@pytest.mark.parametrize("section", [pytest.param(name, marks=MARKS.get(name, [])) for name in overhead.SLOPES])
def test_every_slope_is_measured(section, tmp_path):
    rows = overhead.slopes(section, True, tmp_path)
    assert rows and all(key in row for row in rows for key, _ in overhead.SLOPES[section][2].values())


def test_a_start_is_measured(tmp_path):
    (row,) = overhead.start(True, tmp_path)
    assert list(row["phases"])[:2] == ["reading the rows", "importing the libraries"]
    assert row["files"] + sum(row["phases"].values()) == pytest.approx(row["cpu"])


@pytest.mark.parametrize("is_same", [False, True])
def test_a_section_joins_those_of_the_same_machine_and_versions_only(is_same, tmp_path, monkeypatch, capsys):
    recorded = json.loads(overhead.RESULTS.read_text(encoding="utf-8"))
    cores, _, rest = recorded["hardware"].partition(" cores of ")
    monkeypatch.setattr(overhead.os, "cpu_count", lambda: int(cores))
    monkeypatch.setattr(overhead, "processor", lambda: rest.removesuffix(", no GPU") if is_same else "another")
    monkeypatch.setattr(overhead, "version", recorded["versions"].get)
    rows = [row | {"step_ms": 1.0} for row in recorded["found"]["ranks"]]
    monkeypatch.setattr(overhead, "slopes", lambda section, quick, base: rows)
    before = {}
    for name in ("RESULTS", "PAGE"):
        before[name] = getattr(overhead, name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(before[name], encoding="utf-8")
        monkeypatch.setattr(overhead, name, tmp_path / name)
    monkeypatch.setattr("sys.argv", ["overhead.py", "--sections", "ranks"])
    overhead.main()
    written = json.loads(overhead.RESULTS.read_text(encoding="utf-8"))
    assert '"step_ms": 1.0' in (said := capsys.readouterr().out)
    if is_same:
        assert written["found"]["ranks"] == rows and overhead.PAGE.read_text(encoding="utf-8") != before["PAGE"]
    else:
        assert "hardware is" in said and "printed only" in said
        assert {name: getattr(overhead, name).read_text(encoding="utf-8") for name in before} == before


def test_growth_is_that_of_the_last_size_over_the_first():
    rows = [{"size": 1, "a": 2.0, "b": 0.0}, {"size": 8, "a": 16.0, "b": 5.0}]
    assert (overhead.growth(rows, "a"), overhead.growth(rows, "b")) == ("x 8.0", "-")
