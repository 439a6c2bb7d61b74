"""Kills overlapped rounds at random moments, and compares what is left with rounds that ran through.

    python benchmarks/killed_rounds.py [--seed 1] [--kills 30] [--rounds 6]

recipes/sums/grpo.yaml with `rounds.max_staleness: 1`, on this machine's CPU: once without a kill, then killed again and
again and started again at once by the same command. A kill is SIGKILL to the command alone, whose trainer and sampler
are left, SIGKILL to all of its processes, or SIGTERM, which it must answer with exit code 75. After the kills the
command runs to its end. Compared are the bytes of all samples and of each round's weights.
"""

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STOPPED = 75
SECONDS = (2.0, 22.0)
"""Between a start, which itself takes some, and its kill."""
ENDS = {
    "SIGKILL to the command": lambda process: process.kill(),
    "SIGKILL to all processes": lambda process: os.killpg(process.pid, signal.SIGKILL),
    "SIGTERM": lambda process: process.terminate(),
}


def start(folder: Path, rounds: int, log: Path) -> subprocess.Popen[bytes]:
    """The command, which goes on where an earlier start left the folder."""
    settings = {"rounds.num_rounds": rounds, "rounds.max_staleness": 1, "run.output_dir": folder}
    settings |= {"run.keep_last": rounds}  # the weights of all rounds, to compare them
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "cookbook", "rounds", str(ROOT / "recipes/sums/grpo.yaml"), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("ab") as file:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def finish(process: "subprocess.Popen[bytes]", log: Path) -> None:
    if process.wait() != 0:
        raise SystemExit(f"exit code {process.returncode}: {log.read_text(encoding='utf-8')[-2000:]}")


def digests(folder: Path, rounds: int) -> dict[str, str]:
    """SHA-256 of the samples and the weights of each round."""
    names = ("samples.jsonl", "run/export/model.safetensors")
    paths = [folder / f"rounds/{number:04}" / name for number in range(1, rounds + 1) for name in names]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=30, help="at most: rounds may be over before")
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    draws, ends = random.Random(given.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as temporary:
        whole, killed, log = Path(temporary, "whole"), Path(temporary, "killed"), Path(temporary, "log")
        begun = time.monotonic()
        finish(start(whole, given.rounds, log), log)
        print(f"{given.rounds} rounds without a kill: {time.monotonic() - begun:.0f} s", flush=True)
        for _ in range(given.kills):
            process, end = start(killed, given.rounds, log), draws.choice(list(ENDS))
            try:
                process.wait(draws.uniform(*SECONDS))
                break
            except subprocess.TimeoutExpired:
                ENDS[end](process)
            ends[end] += 1
            if process.wait() not in (-signal.SIGKILL, STOPPED):
                raise SystemExit(f"{end}: exit code {process.returncode}: {log.read_text(encoding='utf-8')[-2000:]}")
        finish(start(killed, given.rounds, log), log)
        expected, left = digests(whole, given.rounds), digests(killed, given.rounds)
    others = [name for name in expected if left[name] != expected[name]]
    print(f"{sum(ends.values())} kills ({', '.join(f'{count} {end}' for end, count in sorted(ends.items()))})")
    print(f"other bytes: {', '.join(others) or 'none'}, of {len(expected)} files")
    raise SystemExit(bool(others))


if __name__ == "__main__":
    main()
