"""One long run with evaluations and saves, whose memory and descriptors must not grow.

    python tests/steady.py [--steps 2000] [--strategy zero2] [--processes 2] [--gpus]      (make steady)

Samples each process once a second, from the first save on, and compares the first quarter with the last.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from curves import ADAMW, ROOT, Lab, done_of

import simulated_gpus
from tests.warm_parent import WarmParent

GROWTH = 0.02
"""Share by which resident memory may grow; more is a leak: 2,000 steps that leave 1 kB each are 2 MB of about 700."""
SETTINGS = ADAMW | {
    "optim.learning_rate": "1e-4",
    "batch.micro_batch_size": "2",
    "run.save_every_steps": "25",
    "run.save_in_background": "true",
    "run.eval_every_steps": "50",
    "run.keep_last": "2",
}


def sample(parent: int, running: threading.Thread, output: Path) -> dict[int, list[tuple[float, int]]]:
    """Resident MB and open descriptors of each process of the run, once a second."""
    samples: dict[int, list[tuple[float, int]]] = {}
    while running.is_alive():
        if (output / "checkpoints" / "LATEST").exists():
            with contextlib.suppress(psutil.Error, IndexError):
                for process in psutil.Process(parent).children()[0].children():
                    with process.oneshot():
                        row = process.memory_info().rss / 1e6, process.num_fds()
                    samples.setdefault(process.pid, []).append(row)
        time.sleep(1.0)
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description="One long run, whose memory and descriptors must not grow.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--strategy", default="zero2")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="simulated ones")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="steady-") as base:
        lab, logs, output = Lab(Path(base)), Path(base) / "logs", Path(base) / "run"
        logs.mkdir()
        parent = WarmParent(simulated_gpus.environment(4), lab.folder) if arguments.gpus else lab.parent
        settings = SETTINGS | {"run.max_steps": str(arguments.steps), "run.output_dir": str(output)}
        job = lab.job(logs, arguments.strategy, settings, arguments.processes, limit=3600)
        answers: list[dict] = []
        running = threading.Thread(target=lambda: answers.append(parent.ask(job)))
        running.start()
        while parent.pid is None:
            time.sleep(0.1)
        by_process = sample(parent.pid, running, output)
        done = done_of(job, answers[0])
        if done.returncode:
            print(done.stdout[-3000:])
            return 1
        rows, ok = [], bool(by_process)
        for samples in by_process.values():
            memory, descriptors = zip(*samples[: len(samples) - 3], strict=True)  # the last seconds write the export
            quarter = len(memory) // 4
            early, late = statistics.median(memory[:quarter]), statistics.median(memory[-quarter:])
            opened = max(descriptors[:quarter]), max(descriptors[-quarter:])
            ok = ok and late / early - 1 < GROWTH and opened[1] <= opened[0]
            rows.append({"samples": len(memory), "MB": [round(early, 1), round(late, 1)], "descriptors": opened})
        print(json.dumps({"strategy": arguments.strategy, "steps": arguments.steps, "processes": rows}))
        parent.close()
        lab.close()
    print("steady" if ok else "it GROWS")
    return 0 if ok else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
