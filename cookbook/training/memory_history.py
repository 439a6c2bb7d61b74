"""What a GPU's memory was filled with at its peak: torch's record of allocations, summed up as JSON.

torch itself writes that record with pickle, for a page that it publishes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = "memory"
MAX_ENTRIES = 200_000
"""Allocations and releases that torch keeps; older ones are dropped."""
MAX_PLACES, MAX_FRAMES, MAX_POINTS = 40, 12, 2000
SHOWN = 8
TORCH = str(Path(torch.__file__).parent)
NO_PYTHON = "no line of Python: the backward pass, or before the record"
OURS = str(Path(__file__).parents[1])
CATEGORIES = {
    "prepare_model": "weights",
    "restore": "weights",
    "_forward": "activations",
    "_backward": "backward",
    "_update": "update",
}
"""By the function of ours that was running when bytes were allocated: what a loading, a forward, a backward (gradients
and temporaries) and an update (the optimizer's state and temporaries) leave."""
BACKWARD, OTHERS = "backward", "others"


def start() -> None:
    """Record allocations from here on, with their Python stacks."""
    # "alloc": what is freed has the stack of its allocation.
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_ENTRIES)


def summarize(trace: list[dict[str, Any]], blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """The peak of a trace, the lines of code whose allocations were in use then, and the bytes over time.

    Undoing the trace from its end leads to what was in use at any time, also before its first entry. Bytes are those
    that were asked for, which torch rounds up.

    Args:
        trace: of torch's snapshot, for one device.
        blocks: those in use at its end.
    """
    signs = {"alloc": 1, "free_completed": -1}
    changes = [signs.get(entry["action"], 0) * entry["size"] for entry in trace]
    held = [sum(block["requested_size"] for block in blocks)]
    for change in reversed(changes):
        held.append(held[-1] - change)
    held.reverse()  # before the first entry, and after each
    kinds = [_category(entry.get("frames", [])) for entry in trace]
    left: dict[str, int] = {}
    for block in blocks:
        kind = _category(block.get("frames", []))
        left[kind] = left.get(kind, 0) + block["requested_size"]
    peak = max(range(len(held)), key=held.__getitem__)
    in_use = {block["address"]: (block["requested_size"], block.get("frames", [])) for block in blocks}
    for entry in reversed(trace[peak:]):
        if entry["action"] == "alloc":
            in_use.pop(entry["addr"], None)
        elif entry["action"] == "free_completed":
            in_use[entry["addr"]] = (entry["size"], entry["frames"])
    places: dict[str, dict[str, Any]] = {}
    for size, frames in in_use.values():
        found = places.setdefault(_place(frames), {"bytes": 0, "count": 0, "stack": _lines(frames)})
        found["bytes"] += size
        found["count"] += 1
    largest = sorted(places.items(), key=lambda item: -item[1]["bytes"])[:MAX_PLACES]
    width = -(-len(held) // MAX_POINTS)
    return {
        "peak_bytes": held[peak],
        "is_whole": len(trace) < MAX_ENTRIES,
        "at_peak": [{"place": place, **found} for place, found in largest],
        "bytes_over_time": [max(held[i : i + width]) for i in range(0, len(held), width)],
        "over_time": _over_time(held, changes, kinds, left, width),
    }


def _over_time(
    held: list[int], changes: list[int], kinds: list[str], left: dict[str, int], width: int
) -> dict[str, list[int]]:
    """The bytes of each category at the largest moment of each part, which add up to `bytes_over_time`.

    Args:
        left: those at the end, by category.
    """
    shown = {max(range(i, min(i + width, len(held))), key=held.__getitem__) for i in range(0, len(held), width)}
    now = dict.fromkeys(dict.fromkeys([*CATEGORIES.values(), OTHERS]), 0) | left
    found: dict[str, list[int]] = {kind: [] for kind in now}
    for place in reversed(range(len(held))):
        if place in shown:
            for kind, size in now.items():
                found[kind].append(size)
        if place:
            now[kinds[place - 1]] -= changes[place - 1]
    return {kind: sizes[::-1] for kind, sizes in found.items() if any(sizes)}


def _category(frames: list[dict[str, Any]]) -> str:
    """What kind of work allocated. Autograd's own threads have no frame of ours: they run the backward."""
    ours = [frame["name"] for frame in frames if frame["filename"].startswith(OURS)]
    return next((CATEGORIES[name] for name in ours if name in CATEGORIES), OTHERS if ours else BACKWARD)


def _place(frames: list[dict[str, Any]]) -> str:
    """The innermost line of code outside torch."""
    ours = [frame for frame in frames if not frame["filename"].startswith(TORCH)]
    return next(iter(_lines(ours or frames)), NO_PYTHON)


def _lines(frames: list[dict[str, Any]]) -> list[str]:
    return [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in frames[:MAX_FRAMES]]


class MemoryHistory:
    """Writes the summary when its context ends, also after an exception, such as out of memory. Not collective."""

    def __init__(self, is_on: bool, folder: Path, rank: int, device: torch.device, say: Callable[[str], None]) -> None:
        """Args: folder: of the run; say: shows the largest places."""
        self._is_on, self._rank, self._device, self._say = is_on, rank, device, say
        self._path = folder / FOLDER / f"rank_{rank}.json"

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if not self._is_on:
            return
        try:
            self._write()
        except (OSError, RuntimeError, LookupError) as error:  # which must not hide that of the run
            self._say(f"run.memory_snapshot: {self._path} could not be written: {type(error).__name__}: {error}")
        finally:
            torch.cuda.memory._record_memory_history(None)

    def _write(self) -> None:
        snapshot, index = torch.cuda.memory._snapshot(self._device), torch.cuda.current_device()
        blocks = [
            block
            for segment in snapshot["segments"]
            for block in segment["blocks"]
            if segment["device"] == index and block["state"].startswith("active")
        ]
        found = {"rank": self._rank, **summarize(snapshot["device_traces"][index], blocks)}
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        self._say(f"MEMORY at the peak of {found['peak_bytes'] / 2**30:.2f} GiB, rank {self._rank}: {self._path}")
        for one in found["at_peak"][:SHOWN]:
            self._say(f"  {one['bytes'] / 2**30:7.3f} GiB in {one['count']:>5}  {one['place']}")
