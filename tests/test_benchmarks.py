"""Protects the race's figures: the tables of docs/speed.md are those of the results; a missed goal or a failure shows.

python -m pytest -q tests/test_benchmarks.py
"""

import copy
import json
import re
import sys
import tomllib
from dataclasses import asdict

import pytest
from conftest import ROOT

from benchmarks import vs_peers
from benchmarks.race.cells import PEERS, Cell, all_cells, cell_of
from benchmarks.race.page import compare, loss_difference, render, speed_table


@pytest.fixture(scope="module")
def results():
    return json.loads(vs_peers.RESULTS.read_text(encoding="utf-8"))


def row(cell, ours, theirs, **changes):
    """A row of results, whose steps took so many seconds."""
    sides = {
        name: {"clock": seconds, "cpu": seconds, "losses": [2.0, 1.5, 1.0], "tokens": [600] * len(seconds)}
        for name, seconds in (("ours", ours), ("theirs", theirs))
    }
    return {**asdict(cell), **sides, **changes}


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_shows_the_results(results):
    text = vs_peers.PAGE.read_text(encoding="utf-8")
    assert text.split(vs_peers.BEGIN)[1].split(vs_peers.END)[0].strip() == render(results)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_cell_is_measured_or_named_as_not_measured(device, results):
    def name(cell: Cell) -> str:
        return cell.words().replace(" | ", ", ").rstrip(", ")

    def unmeasured(results: dict) -> list[str]:
        lines = [line for line in render({device: results}).splitlines() if line.startswith("Not measured: ")] or [
            ": ."
        ]
        return lines[0].split(": ", 1)[1].removesuffix(".").split("; ")

    cells = all_cells(device)
    assert len(cells) == len(set(cells)) >= {"cpu": 30, "cuda": 7}[device]
    measured = [name(cell_of(row)) for row in results[device]["rows"]]
    assert sorted(measured + list(filter(None, unmeasured(results[device])))) == sorted(map(name, cells))
    fewer = results[device] | {"rows": results[device]["rows"][1:]}
    assert measured[0] in unmeasured(fewer)
    assert "### On a GPU\n\nNot measured." in render({"cpu": results["cpu"]})


def test_both_sides_have_the_same_losses(results):
    """To five decimals in float32, where they train on the same batches from the same weights."""
    rows = [row for row in results["cpu"]["rows"] if "ours" in row and not row["packed_rows"]]
    assert {row["peer"] for row in rows} == PEERS.keys() and len(rows) >= 10
    for row in rows:
        few = 1 if row["lora"] else None  # its matrices are drawn
        ours, theirs = (row[side]["losses"][:few] for side in ("ours", "theirs"))
        assert len(ours) == len(theirs) >= (1 if few else 5)
        assert ours == pytest.approx(theirs, abs=2e-5 if row["precision"] == "no" else 2e-2), cell_of(row)
        assert few or len(set(ours)) == len(ours), "it trains"


def test_the_versions_are_the_pinned_ones(results):
    peers = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["peers"]
    pins = dict(re.findall(r"(?m)^(\w+)==(\S+)$", "\n".join([(ROOT / "requirements.txt").read_text(), *peers])))
    measured = {name: number.partition("+")[0] for name, number in results["cpu"]["versions"].items()}
    assert len(measured) >= 6
    assert measured == {name: pins[name] for name in measured}


def test_a_ratio_is_the_median_of_pairs_and_not_of_sides():
    # Theirs over ours is 3, 2 and 4; the medians of the sides would say 2 over 1, and the sums say 11 over 4.
    line = cells(speed_table([row(Cell("trl"), [1.0, 2.0, 1.0], [3.0, 4.0, 4.0])], "cpu")[-1])
    assert compare([3.0, 2.0, 4.0]) == (3.0, "3.00 [2.50..3.50]")
    assert line[5:9] == ["3", "3.00 [2.50..3.50]", "2.75", "3.00 [2.50..3.50]"]


def test_other_batches_are_compared_by_their_tokens():
    pair = row(Cell("trl", packed_rows=1), [1.0] * 3, [3.0] * 3)
    pair["theirs"]["tokens"] = [1200] * 3
    line = cells(speed_table([pair], "cpu")[-1])
    assert line[6:8] == ["1.50 [1.50..1.50]", "1.50"] and line[9] == "other batches"


@pytest.mark.parametrize(("peer", "seconds", "verdict"), [("trl", 2.1, "2.0: reached"), ("trl", 1.9, "2.0: missed")])
def test_a_row_says_whether_its_goal_is_reached(peer, seconds, verdict):
    line = cells(speed_table([row(Cell(peer), [1.0] * 8, [seconds] * 8)], "cpu")[-1])
    assert line[:6] == ["TRL", "single", "5 M", "fp32", "", "8"] and line[-1] == verdict


def test_on_a_gpu_the_clock_decides():
    pair = row(Cell("trl"), [1.0] * 3, [1.5] * 3)
    pair["theirs"]["clock"] = [2.5] * 3
    verdicts = [cells(speed_table([pair], device)[-1])[-1] for device in ("cpu", "cuda")]
    assert verdicts == ["2.0: missed", "2.0: reached"]


def test_losses_that_differ_show():
    pair = row(Cell("trl"), [1.0] * 3, [2.0] * 3)
    pair["theirs"]["losses"] = [2.0, 1.5, 1.01]
    assert loss_difference(pair) == "1e-02"


def test_a_program_that_failed_is_a_row_with_its_reason(results):
    reason = "ValueError: no such thing"
    failed = {**asdict(Cell("trl")), "failed": reason}
    assert reason in speed_table([failed], "cpu")[-1]
    broken = copy.deepcopy(results)
    broken["cpu"]["rows"][0] = {**results["cpu"]["rows"][0], "failed": reason}
    assert render(broken).count(reason) == 1


ELSEWHERE = {"cpu": "another", "cores": 2, "machine": "x86_64", "gpu": None}


@pytest.fixture
def race_of_one_cell(results, tmp_path, monkeypatch, capsys):
    """Runs the program on this machine with a row made up in the place of a race, beside results that were committed
    on the hardware given: what it prints, then the committed results and those that it kept apart.
    """
    cell = Cell("trl")
    here = {"hardware": {"cpu": "this", "cores": 2, "machine": "x86_64", "gpu": None}, "versions": {"torch": "2.13"}}
    made = row(cell, [1.0] * 8, [7.0] * 8, date="2026-11-25", load=0.1) | {"failed": "made up"}

    def run(committed_on, *words):
        committed = here | {"hardware": committed_on, "data": results["cpu"]["data"], "commands": ["earlier"]}
        committed["rows"] = [row(cell, [1.0] * 8, [2.0] * 8, date="2026-11-24", load=0.1)]
        for side in ("ours", "theirs"):
            committed["rows"][0][side] |= {"first_cpu": 1.0, "memory": 1, "parts": {}}
        for name, folder in (("RESULTS", "committed"), ("APART", "apart")):
            monkeypatch.setattr(vs_peers, name, tmp_path / folder / "vs_peers.json")
        monkeypatch.setattr(vs_peers, "PAGE", tmp_path / "speed.md")
        vs_peers.PAGE.write_text(f"{vs_peers.BEGIN}\nas committed\n{vs_peers.END}\n")
        vs_peers.write_results(vs_peers.RESULTS, {"cpu": committed})
        monkeypatch.setattr(vs_peers, "device", lambda: "cpu")
        monkeypatch.setattr(vs_peers, "environment", lambda: here)
        monkeypatch.setattr(vs_peers, "make_workplace", lambda folder: results["cpu"]["data"])
        monkeypatch.setattr(vs_peers, "measure", lambda cell, shared, num_pairs: made | asdict(cell))
        monkeypatch.setattr(sys, "argv", ["vs_peers.py", *(words or ("--cells", "TRL", "single", "fp32"))])
        vs_peers.main()
        records = (vs_peers.read_results(path) for path in (vs_peers.RESULTS, vs_peers.APART))
        return committed, here["hardware"], capsys.readouterr().out, *records

    return run


def test_rows_of_another_machine_are_printed_beside_the_committed_ones_and_kept_apart(race_of_one_cell):
    committed, here, said, written, apart = race_of_one_cell(ELSEWHERE)
    assert "hardware: cpu is this, in the record another" in said
    first, *others = [line for line in said.splitlines() if line.startswith(("| committed", "| here"))]
    assert cells(first)[0] == "committed" and cells(first)[7] == "2.00 [2.00..2.00]"
    assert cells(others[0])[:6] == ["here", "TRL", "single", "5 M", "fp32", ""] and "made up" in others[0]
    assert written == {"cpu": committed} and "as committed" in vs_peers.PAGE.read_text()
    assert apart["cpu"]["hardware"] == here and {failure["failed"] for failure in apart["cpu"]["rows"]} == {"made up"}
    *_, again = race_of_one_cell(ELSEWHERE, "--cells", "TRL", "zero3")
    assert len(again["cpu"]["rows"]) == len(apart["cpu"]["rows"]) + 1, "rows of one machine gather there"


def test_rows_of_the_same_machine_replace_the_committed_ones(race_of_one_cell):
    """The control of the test before."""
    here = race_of_one_cell(ELSEWHERE)[1]
    vs_peers.APART.unlink()
    _, _, said, written, apart = race_of_one_cell(here)
    assert "kept apart" not in said and "committed" not in said and apart == {}
    assert written["cpu"]["rows"][0]["failed"] == "made up" and len(written["cpu"]["commands"]) == 2
    page = vs_peers.PAGE.read_text()
    assert "made up" in page and "as committed" not in page


def test_words_that_no_cell_has_are_refused_before_anything_runs(race_of_one_cell, capsys):
    with pytest.raises(SystemExit) as ended:
        race_of_one_cell(ELSEWHERE, "--cells", "TRL", "fp8")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "--cells TRL fp8: no cell has all these words" in said and "TRL | single | 5 M | fp32 | DPO" in said


def test_results_of_other_versions_are_not_mixed(results):
    other = copy.deepcopy(results["cpu"])
    other["versions"]["trl"] = "0.1"
    with pytest.raises(AssertionError, match=re.escape("trl")):
        vs_peers.merged(results, "cpu", other)
