"""Protects the thread that makes the next batch: order, errors, and that it neither runs away nor holds up the exit.

python -m pytest -q tests/test_data_ahead.py
"""

import itertools
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cookbook.system.files import RecipeError
from cookbook.training.data.ahead import Prefetcher

ROOT = Path(__file__).parents[1]
PATIENCE_SECONDS = 60


class Counted:
    """0, 1, 2 ..., and how many were made so far."""

    def __init__(self) -> None:
        self.made = [threading.Event() for _ in range(5)]

    def __iter__(self):
        for i in itertools.count():
            self.made[i].set()
            yield i


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "next batch"]


def test_the_items_are_the_same_in_the_same_order_and_end_where_they_end():
    with Prefetcher(iter(range(100))) as ahead:
        assert list(ahead) == list(range(100))
        assert next(ahead, "nothing") == "nothing"


def test_the_next_item_is_made_while_one_is_used_and_no_further_one():
    counted = Counted()
    with Prefetcher(iter(counted)) as ahead:
        assert not counted.made[0].is_set()
        assert next(ahead) == 0
        assert counted.made[1].wait(PATIENCE_SECONDS), "nobody asked for it yet"
        for thread in threads():
            thread.join()
        assert not counted.made[2].is_set()
        assert next(ahead) == 1


def test_an_error_is_raised_where_its_item_is_asked_for_and_not_before():
    def items():
        yield 0
        raise RecipeError(["rows.jsonl:7: empty text"])

    with Prefetcher(items()) as ahead:
        assert next(ahead) == 0
        for thread in threads():
            thread.join()
        for _ in range(2):
            with pytest.raises(RecipeError, match=r"rows\.jsonl:7: empty text"):
                next(ahead)


@pytest.mark.parametrize("error", [None, KeyError], ids=["at the end", "after an error"])
def test_no_thread_is_left_behind(error):
    try:
        with Prefetcher(itertools.count()) as ahead:
            next(ahead)
            if error is not None:
                raise error
    except KeyError:
        pass
    assert threads() == []


WAITING = """
import time
from cookbook.training.data.ahead import Prefetcher

def items():
    yield 0
    print("waits", flush=True)
    time.sleep(3600)

with Prefetcher(items()) as ahead:
    next(ahead)
    time.sleep(0.5)
print("left", flush=True)
"""


def test_a_source_that_never_answers_does_not_hold_up_the_exit():
    done = subprocess.run(
        [sys.executable, "-c", WAITING], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["waits", "left"], "")
