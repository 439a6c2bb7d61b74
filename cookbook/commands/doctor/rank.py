"""One process of the short collective: `python -m cookbook.commands.doctor.rank FOLDER RANK COUNT BACKEND PARENT`.

It appends each stage to FOLDER/stage-RANK, touches FOLDER/alive-RANK as a heartbeat, and writes its times to
FOLDER/times-RANK: so its parent can find which rank hangs, and where.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import simulated_gpus
from cookbook.system import signals

REPEATS = 5
BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}
"""Size of the tensor that is reduced: enough for the links to reach their rate."""
WORK = {"gloo": 1024, "nccl": 8192}
"""Rows of the square matrices whose product each process computes for itself, to find a slow one."""
BEAT_SECONDS = 0.2


def main(folder: Path, rank: int, count: int, backend: str) -> None:
    stages = (folder / f"stage-{rank}").open("a", buffering=1)

    def enter(stage: str) -> None:
        stages.write(stage + "\n")

    enter("import of torch")
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    # Not before: the imports and the driver's start keep every other thread waiting for seconds.
    (folder / f"alive-{rank}").touch()  # the first sign does not depend on when a thread comes to run
    threading.Thread(target=_beat, args=(folder / f"alive-{rank}",), daemon=True).start()
    enter("joining the others")
    store = dist.FileStore(str(folder / "store"), count)
    # Whoever started this ends it long before.
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timedelta(minutes=10))

    device_ids = [rank] if backend == "nccl" else None  # else NCCL's barrier guesses it and warns

    def wait() -> None:
        if backend == "nccl":
            torch.cuda.synchronize()

    size = "gloo" if simulated_gpus.is_active() else backend  # the cores compute
    numel = BYTES[size] // 4 // count * count  # all-gather takes an equal part of each
    matrix = torch.ones(WORK[size], WORK[size], device=device)
    whole = torch.empty(numel, device=device)
    part = torch.full((numel // count,), float(rank), device=device)
    times: dict[str, list[float]] = {"work": [], "all_reduce": [], "all_gather": []}
    right = True
    for repeat in range(REPEATS + 1):
        enter(f"work {repeat}")
        _time(times["work"], lambda: matrix @ matrix, wait)
        for name in ("all_reduce", "all_gather"):
            whole.fill_(rank + 1)
            enter(f"barrier before {name} {repeat}")
            dist.barrier(device_ids=device_ids)
            enter(f"{name} {repeat}")
            if name == "all_reduce":
                _time(times[name], lambda: dist.all_reduce(whole), wait)
                right &= bool((whole == count * (count + 1) / 2).all())
            else:
                _time(times[name], lambda: dist.all_gather_into_tensor(whole, part), wait)
                right &= bool((whole.view(count, -1).mean(1).round() == torch.arange(count, device=device)).all())
    # The first one of each pays for connections and warm-up.
    best = {name: min(values[1:]) for name, values in times.items()}
    report = folder / f"times-{rank}.part"
    report.write_text(json.dumps({**best, "right": right, "bytes": numel * 4}))
    report.rename(folder / f"times-{rank}")
    enter("end")
    dist.barrier(device_ids=device_ids)
    dist.destroy_process_group()


def _time(values: list[float], call: Callable[[], object], wait: Callable[[], None]) -> None:
    wait()
    start = time.perf_counter()
    call()
    wait()
    values.append(time.perf_counter() - start)


def _beat(path: Path) -> None:
    while True:
        path.touch()
        time.sleep(BEAT_SECONDS)


if __name__ == "__main__":
    signals.die_with_parent(int(sys.argv[5]))
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    sys.stdout.flush()
    os._exit(0)  # the heart still beats
