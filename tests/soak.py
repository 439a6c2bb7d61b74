"""Kills runs at random moments under random strategies, and compares the end with the uninterrupted run.

    python tests/soak.py [--kills 30] [--seed 0] [--folder FOLDER]      (make soak)

One training, started again and again. Each start draws a strategy, a number of processes, whether saves happen in the
background, a moment, and what is killed then: one process, all, or the launcher with them; or it gets SIGTERM. The last
start runs to the end. Its curve, weights and positions must be those of a run that nothing happened to. The learning
rate is low, for a run at the edge of stability makes of the last bits in which strategies differ another curve: at 3e-3
the difference was 4e-7 until step 200 and then grew tenfold every ten steps.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from curves import ADAMW, ROOT, Curve, Lab, distance, environment

from cookbook.checkpoint import folder

STRATEGIES = ["ddp:2", "ddp:3", "fsdp1:2", "fsdp2:2", "zero1:2", "zero2:3", "zero3:2", "zero3:3", "tp:2", "single:1"]
WAYS = ["one process", "all processes", "launcher and all", "SIGTERM to one", "SIGTERM to all"]
SETTINGS = ADAMW | {
    "optim.eps": "1e-4",
    "optim.learning_rate": "1e-4",
    "batch.global_batch_size": "24",
    "batch.micro_batch_size": "4",
    "run.save_every_steps": "5",
    "run.eval_every_steps": "50",
    "run.max_steps": "1500",
    "run.keep_last": "3",
    "run.resume": "auto",
}


def workers_of(launcher: psutil.Process) -> list[psutil.Process]:
    """The training processes below a launcher."""
    found = [launcher, *launcher.children(recursive=True)]
    return [
        process
        for process in found
        if "train.py" in " ".join(process.cmdline()) and "launch" not in " ".join(process.cmdline())
    ]


def hurt(launcher: psutil.Process, way: str, chance: random.Random) -> None:
    """Does it to what is running now."""
    try:
        workers = workers_of(launcher)
        if not workers:
            return
        if way == "one process":
            chance.choice(workers).kill()
        elif way == "all processes":
            for worker in workers:
                worker.kill()
        elif way == "launcher and all":
            for process in (launcher, *workers):
                process.kill()
        elif way == "SIGTERM to one":
            chance.choice(workers).send_signal(signal.SIGTERM)
        else:
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
    except psutil.NoSuchProcess:
        return


def main() -> int:
    parser = argparse.ArgumentParser(description="Random kills, random strategies, one curve.")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    base = arguments.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    chance = random.Random(arguments.seed)
    lab = Lab(base)
    reference = lab.run("single", SETTINGS)
    output = base / "soak"
    counts: Counter[str] = Counter()
    resumed: Counter[str] = Counter()
    started = time.monotonic()
    kills = 0
    while True:
        where, _, processes = chance.choice(STRATEGIES).partition(":")
        strategy = where
        settings = SETTINGS | {
            "run.output_dir": str(output),
            "run.save_in_background": chance.choice(["true", "false"]),
            "run.hang_timeout_minutes": "2",
        }
        if kills >= arguments.kills:  # the last start runs on
            strategy, processes, way = "ddp", "2", None
        else:
            way = chance.choice(WAYS)
        command = lab.command(strategy, settings, int(processes) if strategy != "single" else None)
        with (base / "said.txt").open("w") as said:
            run = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=said, stderr=said)
        launcher = psutil.Process(run.pid)
        if way is not None:
            # From the first line that tells of training on; some kills come before, in start-up or loading.
            wait = time.monotonic() + chance.uniform(4, 14)
            while time.monotonic() < wait and run.poll() is None:
                time.sleep(0.02)
            hurt(launcher, way, chance)
        try:
            code = run.wait(timeout=300)
        except subprocess.TimeoutExpired:
            print(f"HANG: {strategy}, {way}\n{(base / 'said.txt').read_text()[-3000:]}")
            return 1
        text = (base / "said.txt").read_text(errors="replace")
        newest = next(iter(folder.whole_checkpoints(output / "checkpoints")), None)
        step = newest.step if newest else 0
        if way is None:
            if code:
                print(text[-3000:])
                return 1
            break
        kills += 1
        counts[way] += 1
        resumed[strategy] += "goes on from" in text
        for path in folder.list_folders(output / "checkpoints"):
            folder.verify(folder.open_checkpoint(path))  # whole or absent, whatever was killed
        print(f"{kills:3} {strategy}:{processes} {way}: exit code {code}, newest checkpoint {step}", flush=True)
        if (output / "export").exists():
            print(f"the run ended before {arguments.kills} kills; raise run.max_steps")
            break
        status = output / "status.json"
        if status.exists():  # kills at the same step are no defect of that step here
            status.unlink()
    found = distance(Curve(output), reference)
    minutes = (time.monotonic() - started) / 60
    print(json.dumps({"kills": dict(counts), "resumed": dict(resumed), "minutes": round(minutes, 1), **vars(found)}))
    ok = found.loss < 1e-5 and found.norm < 1e-4 and found.weight < 1e-5
    print("the end is that of the uninterrupted run" if ok else f"DIFFERENT; see {base}")
    return 0 if ok else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
