"""Protects run.memory_snapshot: the peak of a record by hand, and which lines of code its bytes are from.

pytest -q tests/test_gpu_memory_history.py    on a machine with a GPU also a record of torch's
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cookbook.training import memory_history
from cookbook.training.memory_history import NO_PYTHON, TORCH, MemoryHistory, start, summarize


def entry(action: str, size: int, addr: int = 0, *names: str) -> dict[str, Any]:
    return {"action": action, "size": size, "addr": addr, "frames": frames(*names)}


def frames(*names: str) -> list[dict[str, Any]]:
    return [{"filename": f"{TORCH}/x.py" if name == "torch" else "our.py", "line": 1, "name": name} for name in names]


def block(size: int, address: int, *names: str) -> dict[str, Any]:
    return {"requested_size": size, "address": address, "frames": frames(*names)}


TRACE = [
    entry("free_completed", 5, 9),  # allocated before the record
    entry("alloc", 20, 1, "torch", "forward", "main"),
    entry("alloc", 20, 2, "torch", "forward", "main"),
    entry("segment_alloc", 1000, 2),
    entry("alloc", 7, 3),  # the peak: 100 + 3 + 20 + 20 + 7
    entry("free_requested", 20, 2, "torch", "forward", "main"),
    entry("free_completed", 20, 2, "torch", "forward", "main"),
    entry("alloc", 2, 2, "later"),  # at the same address
    entry("free_completed", 20, 1, "torch", "forward", "main"),
    entry("oom", 9999, 0, "later"),
]
BLOCKS = [block(100, 7, "weights"), block(3, 8), block(7, 3), block(2, 2, "later")]


def test_the_peak_and_its_places_by_hand():
    found = summarize(TRACE, BLOCKS)
    assert found["bytes_over_time"] == [108, 103, 123, 143, 143, 150, 150, 130, 132, 112, 112]
    assert found["peak_bytes"] == 150 and found["is_whole"]
    assert {one["place"]: (one["bytes"], one["count"]) for one in found["at_peak"]} == {
        "our.py:1 weights": (100, 1),
        "our.py:1 forward": (40, 2),
        NO_PYTHON: (10, 2),
    }
    assert found["at_peak"][1]["stack"] == [f"{TORCH}/x.py:1 torch", "our.py:1 forward", "our.py:1 main"]
    json.dumps(found)


def test_the_bytes_over_time_are_divided_by_the_work_that_allocated_them(monkeypatch):
    monkeypatch.setattr(memory_history, "OURS", "our.py")
    trace = [
        entry("alloc", 20, 1, "torch", "_forward", "main"),
        entry("alloc", 9, 2, "torch"),  # by a thread of autograd
        entry("free_completed", 20, 1, "torch", "_forward", "main"),
        entry("alloc", 4, 3, "torch", "step", "_update", "main"),
        entry("alloc", 1, 4, "somewhere", "main"),
    ]
    blocks = [block(100, 7, "load", "prepare_model"), block(9, 2, "torch"), block(4, 3, "_update"), block(1, 4, "main")]
    found = summarize(trace, blocks)
    assert found["over_time"] == {
        "weights": [100] * 6,
        "activations": [0, 20, 20, 0, 0, 0],
        "backward": [0, 0, 9, 9, 9, 9],
        "update": [0, 0, 0, 0, 4, 4],
        "others": [0, 0, 0, 0, 0, 1],
    }
    assert [sum(sizes) for sizes in zip(*found["over_time"].values(), strict=True)] == found["bytes_over_time"]
    monkeypatch.setattr(memory_history, "MAX_POINTS", 2)
    found = summarize(trace, blocks)
    assert found["over_time"]["activations"] == [20, 0] and found["bytes_over_time"] == [129, 114]


def test_without_an_allocation_what_is_in_use_is_the_peak():
    found = summarize([], BLOCKS)
    assert found["peak_bytes"] == 112 == sum(one["bytes"] for one in found["at_peak"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu runs it there")
def test_the_peak_is_torch_s_own_and_is_written_when_memory_runs_out(tmp_path: Path):
    start()
    said: list[str] = []
    history = MemoryHistory(True, tmp_path, 0, torch.device("cuda", 0), said.append)
    with contextlib.suppress(torch.OutOfMemoryError), history:
        layer = torch.nn.Linear(1000, 3000, device="cuda")
        layer(torch.ones(5000, 1000, device="cuda")).relu().sum().backward()
        torch.ones(10**13, device="cuda")
    found = json.loads((tmp_path / "memory/rank_0.json").read_text())
    assert found["peak_bytes"] == torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert sum(one["bytes"] for one in found["at_peak"]) == found["peak_bytes"] and said
