"""Runs train.py many times from one warm parent: each run forks its processes, which saves their imports.

    python tests/gpu_server.py    reads a JSON object a line: {"folder", "processes", "arguments", "sabotage", "limit"}
                                  and answers with one: {"codes": [..], "seconds": ..}

It is started with the variables of `cookbook.simulated_gpus.environment`, or without them for runs on the CPU.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
LIBRARIES = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer_utils",
    "accelerate",
    "datasets",
    "deepspeed",
    "peft",
)
OURS = (
    "train",
    "cookbook.stages",
    "cookbook.forecast",
    "cookbook.publish",
    "cookbook.checkpoint.folder",
    "cookbook.checkpoint.resume",
    "cookbook.checkpoint.saver",
    "cookbook.checkpoint.tensors",
)
GRACE_SECONDS = 20.0
"""For the other processes to end by themselves, once one has failed."""


def warm_up() -> None:
    """Imports what runs import, without starting a thread that a fork would lose."""
    torch = importlib.import_module("torch")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    for name in (*LIBRARIES, *OURS):
        importlib.import_module(name)


def run_rank(job: dict, rank: int, port: int) -> None:
    """One process of a run; never returns."""
    count, folder = job["processes"], Path(job["folder"])
    if count > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    log = os.open(folder / f"log_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["train.py", *job["arguments"]]
    code = 1
    try:
        import train

        if job.get("sabotage"):
            from tests import gpu_sabotage

            getattr(gpu_sabotage, job["sabotage"])(rank)
        code = train.main()
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(KeyError):  # on the CPU there is nothing to report
        cuda = sys.modules["simulated_cuda"]
        os.environ["RANK"] = str(rank)
        cuda.write_report(sys.modules["torch"], cuda.library, folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(job: dict) -> dict:
    """Forks the processes of a run and waits for all."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a launcher's agent holds it so
    started, codes = time.monotonic(), {}
    pids = []
    for rank in range(job["processes"]):
        pid = os.fork()
        if pid == 0:
            run_rank(job, rank, store.port)
        pids.append(pid)
    deadline = started + job["limit"]
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] not in (0, 75):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return {"codes": [codes[pid] for pid in pids], "seconds": round(time.monotonic() - started, 2)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    warm_up()
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
