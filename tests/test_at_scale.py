"""Protects docs/at_scale.md: the page and its plot show the recorded forecasts, and these are computed again.

python -m pytest -q tests/test_at_scale.py
"""

import json
from itertools import pairwise

import pytest

from benchmarks import at_scale


@pytest.fixture(scope="module")
def results():
    return json.loads(at_scale.RESULTS.read_text(encoding="utf-8"))


def test_the_page_and_the_plot_show_the_results(results):
    assert at_scale.PAGE.read_text(encoding="utf-8") == at_scale.render(results)
    assert at_scale.PLOT.read_text(encoding="utf-8") == at_scale.plot(results)


@pytest.mark.parametrize("gpus", [64, 1024])
def test_the_forecasts_are_those_of_today(results, gpus):
    assert at_scale.forecasts(gpus) == results["scale"][str(gpus)]


def test_the_forecasts_of_the_large_model_are_those_of_today_and_what_a_mesh_is_for_shows(results):
    fewest = at_scale.GPUS_OF_LARGE[0]
    assert at_scale.of_large(fewest) == results["large"][str(fewest)]
    for at_size in results["large"].values():
        assert at_size["fsdp2_tp"]["gib"][0] < at_size["fsdp2"]["gib"][0]
        assert at_size["pp_fsdp2"]["messages"] < at_size["fsdp2"]["messages"]


def test_every_published_run_of_several_machines_is_there_and_inside_the_forecast(results):
    assert at_scale.published() == results["published"] and len(results["published"]) >= 4
    for row in results["published"]:
        low, high = row["forecast"]
        assert row["gpus"] >= 64 and low <= row["published"] <= high, row


def test_what_grows_and_what_shrinks_does_so_at_every_doubling(results):
    """All state is sharded over all GPUs, or over a group of a fixed size; a ring sends (n - 1) / n of a volume. Over
    4,096 GPUs the shards of norms are mostly padding. Latencies grow with a ring, and hardly with a tree.
    """
    scale = [results["scale"][str(gpus)] for gpus in at_scale.GPUS]
    for few, many in pairwise(scale):
        for name in at_scale.STRATEGIES:
            assert many[name]["gib"][0] < 1.02 * few[name]["gib"][0], name
            assert many[name]["seconds"][0] < 1.02 * few[name]["seconds"][0], name
            assert many[name]["seconds"][1] >= few[name]["seconds"][1], name
        assert 1 <= many["hsdp"]["seconds"][1] / few["hsdp"]["seconds"][1] < 1.02
    for at_size in scale:
        assert at_size["hsdp"]["messages"] < at_size["fsdp2"]["messages"]
