"""Protects the figures: the tables of docs/speed.md are those of the results, and a missed goal or a failure shows.

python -m pytest -q tests/test_benchmarks.py
"""

import copy
import json
import re

import pytest
from conftest import ROOT

from benchmarks import vs_trl


@pytest.fixture(scope="module")
def results():
    return json.loads(vs_trl.RESULTS.read_text(encoding="utf-8"))


def pair(ours, theirs, **changes):
    """A row of paired steps, after two of warm-up that would change every figure."""
    seconds = [(9.0, 1.0), (9.0, 1.0), *zip(ours, theirs, strict=True)]
    keys = ("seconds", "their_seconds", "clock_seconds", "their_clock_seconds")
    steps = [dict(zip(keys, (a, b, a, b), strict=True), num_targets=600) for a, b in seconds]
    return {"model": "5 M", "precision": "no", "baseline": "trl", "measured": steps, **changes}


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_shows_the_results(results):
    text = vs_trl.PAGE.read_text(encoding="utf-8")
    assert text.split(vs_trl.BEGIN)[1].split(vs_trl.END)[0].strip() == vs_trl.render(results)


def test_the_results_are_complete(results):
    assert set(results["measured"]) == set(vs_trl.SECTIONS)
    kinds = {(row["model"], row["precision"], row["baseline"]) for row in results["pairs"]}
    assert {(m, p, b) for m in vs_trl.MODELS for p in vs_trl.PRECISIONS for b in vs_trl.BASELINES} <= kinds
    assert {row["strategy"] for row in results["launched"]} == {"ddp", "zero2"}
    assert results["hardware"]["gpu"] is None, "the page says that no GPU was used"


def test_both_sides_began_with_the_same_loss(results):
    rows = [row for row in results["pairs"] if "measured" in row]
    assert len(rows) >= 10
    for row in rows:
        limit = 1e-4 if row["precision"] == "no" else 1e-2
        assert row["first_loss"] == pytest.approx(row["their_first_loss"], abs=limit)


def test_the_versions_are_the_pinned_ones(results):
    files = [ROOT / "requirements.txt", ROOT / "benchmarks/requirements-trl.txt"]
    pins = dict(re.findall(r"(?m)^(\w+)==(\S+)$", "\n".join(path.read_text() for path in files)))
    found = {name: number.partition("+")[0] for name, number in results["versions"].items()}
    assert len(found) >= 6
    assert found == {name: pins[name] for name in found}


def test_a_ratio_is_the_median_of_pairs_and_not_of_sides():
    # Theirs over ours is 3, 2 and 4; the medians of the sides would say 2 over 1, and the sums 9 over 4.
    middle, shown = vs_trl.compare([1.0, 2.0, 1.0], [3.0, 4.0, 4.0])
    assert middle == 3.0
    assert shown == "**3.00** [2.50..3.50] | 2.75"


@pytest.mark.parametrize(
    ("num_steps", "seconds", "verdict"),
    [(14, 2.1, "2.0: reached"), (14, 1.9, "2.0: missed"), (3, 2.1, "2.0: reached in few steps")],
)
def test_a_row_says_whether_its_goal_is_reached(num_steps, seconds, verdict):
    row = cells(vs_trl.speed_table([pair([1.0] * num_steps, [seconds] * num_steps)])[-1])
    assert row[:5] == ["5 M", "fp32", "TRL", str(num_steps), "600"]
    assert row[-1] == verdict


def test_a_run_that_failed_is_a_row_with_its_reason(results):
    reason = "ValueError: no such thing"
    assert reason in vs_trl.speed_table([{**pair([], []), "failed": reason}])[-1]
    broken = copy.deepcopy(results)
    for row in broken["launched"]:
        row["failed"] = reason
    assert vs_trl.render(broken).count(reason) == 2


def test_results_of_other_versions_are_not_mixed(results):
    other = copy.deepcopy(results)
    other["versions"]["trl"] = "0.1"
    with pytest.raises(AssertionError, match=re.escape("trl")):
        vs_trl.merged(results, other)
