"""A file of rows that is read during training takes memory for blocks of rows, and not for the file.

python -m pytest -q tests/test_data_memory.py
"""

import gc
import json
import os
import subprocess
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from curves import RECIPE, ROOT
from small_data import make_tokenizer

from cookbook.config.objectives import Objective
from cookbook.config.sections import DataSection, Source
from cookbook.training.data import readers
from cookbook.training.data.sets import read_data
from cookbook.training.data.stream import Stream

BLOCK, FEW, MANY = 50, 100, 800
TEXT = "def f(x):\n    return x\n" * 10


def lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("text\n" + "".join('"' + row["text"] + '"\n' for row in rows))


FORMATS: dict[str, Callable[[Path, list[dict[str, str]]], object]] = {
    ".jsonl": lines,
    ".csv": table,
    ".json": lambda path, rows: path.write_text(json.dumps(rows)),
}


def peak_of(do: Callable[[], object]) -> int:
    """Bytes that Python and NumPy held at most while `do` ran."""
    gc.collect()
    gc.freeze()  # else garbage in cycles waits the longer, the more the tests before have left in this process
    tracemalloc.start()
    try:
        do()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.unfreeze()


def test_a_list_in_json_is_read_alike_wherever_it_is_cut(tmp_path: Path, monkeypatch):
    rows = [{"text": 'a "b" \\ \u00e4\U0001f600', "n": [1, {"x": None}]}, {}, 12, "s", [], {"text": "]},["}, -1.5e3]
    path, source = tmp_path / "rows.json", Source(path=str(tmp_path / "rows.json"))
    for indent in (None, 2):
        path.write_text(" \n" + json.dumps(rows, indent=indent) + "\n\n", encoding="utf-8-sig")
        for size in (1, 2, 3, 7, 2**16):
            monkeypatch.setattr(readers, "READ_CHARACTERS", size)
            monkeypatch.setattr(readers, "MAX_ITEM", 1000)
            assert [row for _, row in readers.file_rows(path, source)] == rows


@pytest.mark.parametrize("kind", FORMATS)
def test_a_pass_over_a_file_of_eight_times_the_rows_takes_no_more_memory(tmp_path: Path, monkeypatch, kind: str):
    """And, read at once, it takes several times as much."""
    monkeypatch.setattr(readers, "READ_CHARACTERS", 4096)  # else more than the smaller file
    tokenizer, objective = make_tokenizer(), Objective.of(name="sft")
    streamed, whole = {}, {}
    for num_rows in (BLOCK, FEW, MANY):  # the first run fills caches
        path = tmp_path / f"{num_rows}{kind}"
        FORMATS[kind](path, [{"text": f"{TEXT}{i}"} for i in range(num_rows)])
        data = DataSection.model_validate({"train": str(path), "streaming": True, "shuffle_rows": BLOCK})
        stream = Stream(data=data, objective=objective, tokenizer=tokenizer)
        windows = stream.windows(seed=0, global_batch_size=BLOCK // 2, num_samples_consumed=0)
        steps = islice(windows, num_rows * 2 // BLOCK)
        streamed[num_rows] = peak_of(lambda: deque(steps, maxlen=1))  # noqa: B023
        assert stream.first_pass.num_rows == num_rows
        windows.close()
        at_once = data.model_copy(update={"streaming": False})
        whole[num_rows] = peak_of(lambda: read_data(at_once, objective))  # noqa: B023
    assert streamed[MANY] < 1.25 * streamed[FEW], (streamed, whole)
    assert whole[MANY] > 2.5 * whole[FEW], (streamed, whole)


TRAIN = """
import resource, sys
import train
sys.argv = ["train.py", sys.argv[1]]
code = train.main()
print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""
GIGABYTES = float(os.environ.get("COOKBOOK_ROWS_GB", "10"))


@pytest.mark.slow
@pytest.mark.thorough
def test_ten_gigabytes_of_rows_are_trained_from_in_the_memory_of_a_fiftieth(tmp_path: Path):
    """One pass: most of each row is a column that no kind of row has, which must be read, and not kept."""
    peaks = {}
    for gigabytes in (GIGABYTES / 50, GIGABYTES):
        rows = tmp_path / "rows.jsonl"
        ballast, num_rows = "x" * 900_000, round(gigabytes * 1e9 / 900_000 / 16) * 16
        with rows.open("w") as file:
            file.writelines(json.dumps({"text": f"{TEXT}{i}", "unused": ballast}) + "\n" for i in range(num_rows))
        recipe = tmp_path / "recipe.yaml"
        text = RECIPE.replace("eval: {path: DATA, max_rows: 21}", "streaming: true\n  shuffle_rows: 16")
        text = text.replace("max_steps: 20", f"max_steps: {num_rows // 16}").replace(
            "warmup_steps: 4", "warmup_steps: 1"
        )
        recipe.write_text(text.replace("DATA", str(rows)).replace("OUTPUT", str(tmp_path / f"run-{gigabytes}")))
        done = subprocess.run([sys.executable, "-c", TRAIN, str(recipe)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        peaks[rows.stat().st_size] = int(done.stdout.split("PEAK")[1])
        rows.unlink()
    print("file and peak, MB:", {size // 10**6: peak // 10**6 for size, peak in peaks.items()})
    assert max(peaks.values()) - min(peaks.values()) < 64 * 2**20
