"""Kills runs at random moments under random strategies, and compares the end with the uninterrupted run.

    python tests/soak.py [--kills 30] [--seed 0] [--folder FOLDER]      (make soak)

One training, started again and again. Each start draws a strategy, a number of processes, CPU or simulated GPUs,
whether saves happen in the background, what is killed (one process, all, or the launcher with them; or it gets
SIGTERM), and when: after some seconds, from the start-up on, or at a named moment of the start, of a save or of the
export. When the kills are done the last start runs to the end. Its curve, weights and positions must be those of a run
that nothing happened to. The learning rate is low, for a run at the edge of stability makes of the last bits in which
strategies differ another curve: at 3e-3 the difference was 4e-7 until step 200 and then grew tenfold every ten steps;
at 1e-4, over 6,000 steps that learn the rows by heart, it was 2e-5 where the gradient's norm had grown to 50.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from curves import ADAMW, ROOT, Curve, Lab, distance, done_of

import simulated_gpus
from cookbook.system.watchdog import PHASES
from cookbook.training.checkpoint import folder
from tests.warm_parent import WarmParent

STRATEGIES = [
    *("single:1", "ddp:2", "ddp:3", "fsdp1:2", "fsdp2:2", "fsdp2:3", "fsdp2_grad_op:2", "fsdp2_offload:2", "hsdp:4"),
    *("zero1:2", "zero2:3", "zero2_offload:2", "zero3:2", "zero3:3", "zero3_offload:2", "tp:2"),
    *("zero3_hpz:4", "ddp_sp:2", "fsdp2_sp:4", "zero3_sp:2", "ddp_tp:4", "fsdp2_tp:4"),
    *("pp:2", "pp_tp:4", "pp_fsdp2:4"),
]
WAYS = ["one process", "all processes", "launcher and all", "SIGTERM to one", "SIGTERM to all"]
POINTS = [
    *(f"phase.{phase}" for phase in PHASES[: PHASES.index("exporting")]),
    "data.next",
    "step.forward",
    "step.update",
]
POINTS += [f"save.{point}" for point in ("begin", "in_file", "after_file", "after_receipt")]
POINTS += [f"save.{point}" for point in ("before_manifest", "before_rename", "before_latest", "after_latest")]
AT_A_POINT = 0.4
"""Share of the kills that fall at a named moment."""
EXPORT_SHARE = 0.1
"""Share of the kills that fall into the export, after the last step."""
LIMIT_SECONDS = 300.0
REFERENCE_SECONDS = 3600.0
GPU_SHARE = 0.4
SAVE_EVERY = 5
SETTINGS = ADAMW | {
    "optim.eps": "1e-4",
    "optim.learning_rate": "3e-5",
    "batch.global_batch_size": "12",
    "batch.micro_batch_size": "1",
    "run.save_every_steps": str(SAVE_EVERY),
    "run.eval_every_steps": "50",
    "run.keep_last": "3",
    "run.resume": "auto",
    "run.hang_timeout_minutes": "2",
}
STEPS_PER_KILL = 14


class Soak:
    """One training in a folder, with what kills it."""

    def __init__(self, lab: Lab, output: Path, chance: random.Random, max_steps: int) -> None:
        self.lab, self.output, self.chance = lab, output, chance
        self.settings = SETTINGS | {"run.max_steps": str(max_steps), "run.output_dir": str(output)}
        self.parents = {"CPU": lab.parent, "simulated GPUs": WarmParent(simulated_gpus.environment(4), lab.folder)}

    def start(self, strategy: str, processes: int, place: str, way: str | None, point: str | None) -> tuple[int, str]:
        """One start, hurt in some way at some point, or after some seconds. Returns its exit code and what it said."""
        settings = self.settings | {"run.save_in_background": self.chance.choice(["true", "false"])}
        faults = []
        if point is not None:
            rank = self.chance.randrange(processes) if point.startswith(("phase", "data", "step")) else 0
            faults = [{"rank": rank, "at": point, "do": "SIGKILL"}]
            if not point.startswith("phase"):
                step = self._next_step() + self.chance.randrange(STEPS_PER_KILL)
                faults[0]["step"] = -(-step // SAVE_EVERY) * SAVE_EVERY if point.startswith("save") else step
        with tempfile.TemporaryDirectory(prefix="soak-logs-") as logs:
            job = self.lab.job(Path(logs), strategy, settings, processes, limit=LIMIT_SECONDS)
            job["variables"] = {"COOKBOOK_FAULTS": json.dumps(faults)}
            answers: list[dict] = []
            thread = threading.Thread(target=lambda: answers.append(self.parents[place].ask(job)))
            thread.start()
            while thread.is_alive() and self.parents[place].pid is None:  # the first to ask waits for its imports
                thread.join(0.1)
            if way is not None and point is None:
                thread.join(self.chance.uniform(0.5, 8.0))
                hurt(self.parents[place].pid, way, self.chance)
            thread.join()
            done = done_of(job, answers[0])
        return done.returncode, done.stdout

    def _next_step(self) -> int:
        newest = next(iter(folder.whole_checkpoints(self.output / "checkpoints")), None)
        return 1 + (newest.step if newest else 0)

    def close(self) -> None:
        for parent in self.parents.values():
            parent.close()


def hurt(parent: int | None, way: str, chance: random.Random) -> None:
    """Does it to the run of a warm parent that is running now."""
    with contextlib.suppress(psutil.Error, IndexError):
        launcher = psutil.Process(parent).children()[0]
        workers = launcher.children()
        if way == "one process":
            chance.choice(workers).kill()
        elif way == "SIGTERM to one":
            chance.choice(workers).send_signal(signal.SIGTERM)
        else:
            for process in ([launcher] if way.startswith("launcher") else []) + workers:
                process.send_signal(signal.SIGTERM if way.startswith("SIGTERM") else signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random kills, random strategies, one curve.")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    base = arguments.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    chance, lab, started = random.Random(arguments.seed), Lab(base), time.monotonic()
    soak = Soak(lab, base / "soak", chance, max_steps=STEPS_PER_KILL * arguments.kills)
    reference = base / "reference"
    done = lab.start("single", soak.settings | {"run.output_dir": str(reference)}, limit=REFERENCE_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:]
    counts: Counter[str] = Counter()
    kills = 0
    while True:
        strategy, _, processes = chance.choice(STRATEGIES).partition(":")
        place = "simulated GPUs" if chance.random() < GPU_SHARE else "CPU"
        is_last = kills >= arguments.kills
        way = None if is_last else chance.choice(WAYS)
        point = chance.choice(POINTS) if way is not None and chance.random() < AT_A_POINT else None
        if not is_last and kills >= (1 - EXPORT_SHARE) * arguments.kills:
            way, point = "main process", "phase.exporting"
        code, said = soak.start(strategy, int(processes), place, way, point)
        if is_last:
            if code:
                print(said[-3000:])
                return 1
            break
        kills += 1
        counts[f"{point.partition('.')[0] if point else 'after seconds'}: {'SIGKILL' if point else way}"] += 1
        counts[f"on {place}"] += 1
        counts["resumed"] += "resuming from" in said
        for path in folder.list_folders(soak.output / "checkpoints"):
            folder.verify(folder.open_checkpoint(path))  # whole or absent, whatever was killed
        what = point or way
        print(f"{kills:3} {strategy}:{processes} on {place}, {what}: exit code {code}", flush=True)
        if "HANG" in said:
            print(said[-3000:])
            return 1
        status = soak.output / "status.json"
        if status.exists():  # kills at the same step are no defect of that step here
            status.unlink()
    soak.close()
    apart = distance(Curve(soak.output), Curve(reference))
    minutes = (time.monotonic() - started) / 60
    print(json.dumps({"kills": kills, **counts, "minutes": round(minutes, 1), **vars(apart)}))
    ok = apart.loss < 1e-5 and apart.norm < 1e-4 and apart.weight < 1e-5
    print("the end is that of the uninterrupted run" if ok else f"DIFFERENT; see {base}")
    return 0 if ok else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
