"""Protects the comparison of what tokenizing costs: the page shows its record, and a package is compared with itself.

Run alone: python -m pytest -q -m "slow or not slow" tests/test_tokenizing_cost.py
"""

import json

import pytest
from conftest import ROOT

from benchmarks import tokenizing


def test_the_page_shows_the_results():
    results = json.loads(tokenizing.RESULTS.read_text(encoding="utf-8"))
    text = tokenizing.PAGE.read_text(encoding="utf-8")
    assert text.split(tokenizing.BEGIN)[1].split(tokenizing.END)[0].strip() == tokenizing.render(results)
    assert results["found"].keys() == set(tokenizing.TEMPLATES)


def test_the_checks_of_rows_cost_at_most_a_twentieth_and_a_cached_start_nothing():
    """By the record, whose command names the commit before them."""
    rows = json.loads(tokenizing.RESULTS.read_text(encoding="utf-8"))["found"]
    for row in rows.values():
        assert row["samples"] >= 15_000
        assert row["tokenize"]["ratio"] < 1.05 and row["first"]["ratio"] < 1.05
        assert row["cached"]["here"] < row["first"]["here"] / 50


@pytest.mark.slow
def test_a_package_is_compared_with_itself(capsys: pytest.CaptureFixture[str]):
    rows = tokenizing.compare(ROOT, 60, 1)
    assert rows.keys() == set(tokenizing.TEMPLATES)
    assert [row["samples"] for row in rows.values()] == [54, 60]
    for row in rows.values():
        assert row["same_tokens"] and all(row[key]["ratio"] > 0 for key in tokenizing.MEASURED)
