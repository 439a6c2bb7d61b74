"""Runs train.py many times from one warm parent: each run forks its processes, which saves their imports.

    python tests/warm_parent.py    reads a JSON object a line: {"folder", "processes", "arguments", "sabotage",
                                   "shared", "variables", "limit"}, and answers with one: {"codes": [..], "seconds": ..}
    python tests/warm_parent.py JOB RANK PORT    is one process of a run, on a real GPU

It is started with the variables of `cookbook.simulated_gpus.environment`, or without them for runs on the CPU.
`WarmParent` is its other side.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from cookbook import simulated_gpus

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


def share_a_gpu(rank: int) -> None:
    """Each process takes itself for a machine of one GPU, which is the same one, so NCCL would refuse."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank), SHARED_GPU="1")
    if not simulated_gpus.is_active():
        os.environ["SIMULATED_GPUS_LIBRARY"] = str(simulated_gpus.build())
        importlib.import_module("cookbook.simulated_gpus.cuda").replace_nccl(importlib.import_module("torch"))


def run_rank(job: dict, rank: int, port: int) -> None:
    """One process of a run; never returns."""
    count, folder = job["processes"], Path(job["folder"])
    os.environ.update(job.get("variables", {}))
    if count > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    if job.get("shared"):
        share_a_gpu(rank)
    log = os.open(folder / f"log_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["train.py", *job["arguments"]]
    code = 1
    try:
        import train

        if job.get("sabotage"):
            module, name = job["sabotage"].split(":")
            getattr(importlib.import_module(module), name)()
        code = train.main()
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    report(rank, folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report(rank: int, folder: Path) -> None:
    """rank_<n>.json: of simulated GPUs all that they count, of real ones the peak."""
    torch, cuda = sys.modules.get("torch"), sys.modules.get("simulated_cuda")
    if torch is None:  # it ended before
        return
    os.environ["RANK"] = str(rank)
    if cuda is not None:
        cuda.write_report(torch, cuda.library, folder)
    elif torch.cuda.is_initialized():
        record = {"device": 0, "peak_bytes": [torch.cuda.max_memory_allocated()], "waits": [], "attention": {}}
        (folder / f"rank_{rank}.json").write_text(json.dumps(record))


class WarmParent:
    """Starts it when it is first asked."""

    def __init__(self, variables: dict[str, str]) -> None:
        """Args: variables of its environment, beside this process's."""
        self.variables = variables
        self._process: subprocess.Popen[str] | None = None

    def ask(self, job: dict) -> dict:
        """A run, to its end."""
        if self._process is None:
            threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
            # The compilers' ninja stands beside the interpreter.
            kept = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}  # other tests set it
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                cwd=Path(__file__).parents[1],
                env={**kept, "PATH": path, **threads, **self.variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the parent of the runs has ended"
        return json.loads(answer)

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(60)


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
    if len(sys.argv) == 4:  # a real GPU does not survive a fork
        run_rank(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    warm_up()
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
