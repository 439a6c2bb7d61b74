"""Runs train.py many times from one warm parent: each run forks its processes, which saves their imports.

    python tests/warm_parent.py ROOM ADDRESS    writes into the file ADDRESS where it can be reached; reads a JSON
                                                object a line, jobs of `WarmParent.run`, and answers with the exit codes
                                                by rank and the seconds of each
    python tests/warm_parent.py JOB RANK PORT    is one process of a run, on a real GPU

It is started with the variables of `simulated_gpus.environment`, or without them for runs on the CPU.
`WarmParent` is its other side. All workers of pytest share one, which forks a process for each of them.
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parents[1]))
import simulated_gpus
from cookbook.system import signals

ROOT = Path(__file__).parents[1]
INHERITED = dict(os.environ)
"""Before any test: the test that happens to ask a parent first must not give its own variables to all later runs."""
LIBRARIES = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer_utils",
    "torch.distributed.run",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "accelerate.commands.launch",
    "datasets",
    "deepspeed.launcher.runner",
    "deepspeed.module_inject.auto_ep_layer",  # which each of its engines imports, with experts or without
    "deepspeed.runtime.superoffload.superoffload_stage3",  # as each ZeRO-3 does
    "setuptools",  # DeepSpeed compiles a line with it at each start
    "deepspeed.runtime.zero.muon.muon_optimizer",  # which ZeRO imports at its start, and which imports torch's compiler
    "peft",
    "rich.console",
    "rich.table",
)
OURS = (
    "train",
    "cookbook.run.measures",
    "cookbook.run.services",
    "cookbook.run.stages",
    "cookbook.forecast.ranking",
    "cookbook.run.publish.export_folder",
    "cookbook.training.checkpoint.folder",
    "cookbook.training.checkpoint.resume",
    "cookbook.training.checkpoint.saver",
    "cookbook.training.checkpoint.tensors",
)
START_SECONDS, IDLE_SECONDS = 60.0, 2.0
"""The parent ends if nobody has come for so long, or come again: on a busy machine the first one takes its time."""
GRACE_SECONDS = 10.0
"""For processes to end by themselves after SIGTERM; torchrun gives 30."""
ANSWER = "ended.json"
ROOM_FOR_WORDS = 4000
"""Letters of a command line that a process can put in the place of its own, see `show_command_line`."""


class WarmParent:
    """Starts it when it is first asked, or joins the one that another process has started in the same folder."""

    pid: int | None = None
    """Process id of the parent, once it is there: its children are launchers, theirs the processes of a run."""

    def __init__(self, variables: dict[str, str], folder: Path) -> None:
        """Args: variables of its environment, beside this process's; a folder of all processes that may share it."""
        self.variables, self.folder = variables, folder
        self._lines: Any = None

    def run(self, folder: Path, words: list[str], *, processes: int = 1, limit: float, **options: Any) -> dict:
        """A run as torchrun starts it, to its end: where one process fails the others are ended, and started again as
        often as is asked for.

        Args:
            folder: where each process's output goes, log_<rank>, and what simulated GPUs report, rank_<rank>.json.
            words: a program that calls `train.main`, and its arguments.
            limit: seconds, after which all are killed.
            options: `variables` of the environment of its processes; `restarts`; `accelerate`, the flags of an
                `accelerate launch`, which then starts them in torchrun's place; `sabotage`, "module:function" to be
                called first; `launched`, torchrun's variables for one process as well, which else is a plain
                `python train.py`; `shared`, all on one GPU; `machines`, a number to which these processes believe to
                belong; `eager`, nothing compiled by torch, whose compiler does not survive a fork; `cwd`; `host`, the
                network namespace of the run, and `disks`, pairs of a folder and the place where this run alone finds
                it (as root).

        Returns:
            codes: exit codes by rank; seconds.
        """
        return self.ask({"folder": str(folder), "words": words, "processes": processes, "limit": limit, **options})

    def ask(self, job: dict) -> dict:
        """Hands a job over, and waits for its answer."""
        return self.ask_all([job])[0]

    def ask_all(self, jobs: list[dict], *, at_once: int = 1) -> list[dict]:
        """Hands jobs over, of which so many run at once, and waits for their answers."""
        if self._lines is None:
            self._join()
        self._lines.write(json.dumps({"jobs": jobs, "at_once": at_once}) + "\n")
        self._lines.flush()
        answer = self._lines.readline()
        assert answer, "the parent of the runs has ended"
        return json.loads(answer)

    def _join(self) -> None:
        digest = hashlib.sha256(json.dumps(self.variables, sort_keys=True).encode()).hexdigest()
        address = self.folder / f"parent-{digest[:16]}"
        with FileLock(f"{address}.lock"):
            channel = connected(address)
            if channel is None:
                self._start(address)
                channel = connected(address)
        assert channel is not None, "the parent of the runs has not started"
        self._lines = channel.makefile("rw", encoding="utf-8")
        channel.close()  # with the lines
        self.pid = int(self._lines.readline())

    def _start(self, address: Path) -> None:
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        # The compilers' ninja stands beside the interpreter.
        path = f"{Path(sys.executable).parent}{os.pathsep}{INHERITED['PATH']}"
        subprocess.run(
            [sys.executable, __file__, "-" * ROOM_FOR_WORDS, str(address)],
            cwd=ROOT,
            env={**INHERITED, "PATH": path, **threads, **self.variables},
            stdin=subprocess.DEVNULL,
            check=True,
        )

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def connected(address: Path) -> socket.socket | None:
    """A channel to the parent that a file names; none if it has ended, or never was."""
    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.connect(address.read_text(encoding="utf-8"))
    except (FileNotFoundError, ConnectionRefusedError):
        channel.close()
        return None
    return channel


def warm_up() -> None:
    """Imports what runs import, without starting a thread that a fork would lose."""
    importlib.import_module("cookbook.system.imports").quiet_libraries()  # before any is imported
    torch = importlib.import_module("torch")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    for name in (*LIBRARIES, *OURS):
        importlib.import_module(name)
    # transformers builds it with the first model that a process loads.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    # DeepSpeed asks it at each load of what it has compiled, which takes a second (ops/op_builder/builder.py:436).
    cpuinfo: Any = importlib.import_module("cpuinfo")
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
    gc.collect()
    gc.freeze()  # else each collection in each process goes through all that was imported, and copies its pages


def run_all(jobs: list[dict], at_once: int) -> list[dict]:
    """Each in a process of its own, its launcher, so that two runs have two parents. Returns their answers."""
    running: set[int] = set()
    for job in jobs:
        if len(running) == at_once:
            running.remove(os.wait()[0])
        running.add(in_a_process_of_its_own(job))
    for pid in running:
        os.waitpid(pid, 0)
    return [answer_of(job) for job in jobs]


def answer_of(job: dict) -> dict:
    """The answer of a run that has ended, or whose launcher was killed."""
    path = Path(job["folder"]) / ANSWER
    return json.loads(path.read_text()) if path.exists() else {"codes": [-signal.SIGKILL], "seconds": None}


def in_a_process_of_its_own(job: dict) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            answer = launch(job)
            (Path(job["folder"]) / ANSWER).write_text(json.dumps(answer))
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return pid


def launch(job: dict) -> dict:
    """Forks the processes of a run, again where they failed and restarts are left, and waits for all."""
    started = time.monotonic()
    if job.get("host"):
        enter_host(job["host"], job.get("disks", []))
    os.chdir(job.get("cwd") or ROOT)
    if job.get("accelerate") is not None:
        return {"codes": [accelerate_launch(job)], "seconds": round(time.monotonic() - started, 2)}
    deadline, restarts = started + job["limit"], job.get("restarts", 0)
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = str(restarts)
    codes: list[int] = []
    for restart in range(restarts + 1):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restart)
        codes = fork_ranks(job, deadline)
        if not any(codes):
            break
    return {"codes": codes, "seconds": round(time.monotonic() - started, 2)}


def enter_host(namespace: str, disks: list[list[str]]) -> None:
    """This process and its children see the network and the disks of a machine of their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        # CLONE_NEWNET; CLONE_NEWNS and CLONE_NEWUTS, which has the machine's name
        if libc.setns(file.fileno(), 0x40000000) or libc.unshare(0x00020000 | 0x04000000):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    socket.sethostname(namespace)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for disk in disks:
        subprocess.run(["mount", "--bind", *disk], check=True)


def accelerate_launch(job: dict) -> int:
    """`accelerate launch`, its agent and its environment, but that it forks the processes which it would start.

    Returns:
        Its exit code.
    """
    from accelerate.commands import launch as command
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    def popen(handler: Any, words: tuple[str, ...], env: dict[str, str]) -> Forked:
        return Forked({**job, "words": list(words[words.index("-u") + 1 :])}, env)

    SubprocessHandler._popen = popen  # type: ignore[assignment, method-assign]
    write_to(Path(job["folder"]) / "log_launcher")
    sys.argv = ["accelerate-launch", *job["accelerate"], *job["words"]]
    show_command_line(sys.argv)

    def give_up(*_: object) -> None:
        raise TimeoutError(f"not within {job['limit']} s")  # torchrun's agent ends its processes on any exception

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(int(job["limit"]))
    try:
        command.main()
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def show_command_line(words: list[str]) -> None:
    """Other processes see this command from now on, as train.py does when it looks for its launcher (Linux)."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])  # proc(5): arg_start
    text = "\0".join(words).encode() + b"\0"
    assert len(text) <= end - start, "ROOM_FOR_WORDS is too small"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


class Forked:
    """Part of a `subprocess.Popen` that torchrun's agent needs."""

    gate: tuple[int, int] | None = None
    """A pipe that closes when all ranks of a start are forked. Before, none may connect to the agent, whose thread then
    asks for the name of the address: a fork meanwhile would copy the resolver's lock as taken, for ever (glibc)."""
    num_forked = 0

    def __init__(self, job: dict, env: dict[str, str]) -> None:
        self.args: list[str] = job["words"]
        self.returncode: int | None = None
        read, write = Forked.gate = Forked.gate or os.pipe()
        self.pid = os.fork()
        if self.pid:
            Forked.num_forked += 1
            if Forked.num_forked % int(env["LOCAL_WORLD_SIZE"]) == 0:
                os.close(read)
                os.close(write)
                Forked.gate = None
        if self.pid == 0:
            os.close(write)
            os.read(read, 1)
            os.close(read)
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM):  # not the agent's
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.clear()
            os.environ.update(env)
            end_as_rank({**job, "processes": 1}, int(env["LOCAL_RANK"]))

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def fork_ranks(job: dict, deadline: float) -> list[int]:
    """Each process once. Returns their exit codes."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a launcher's agent holds it so
    pids: list[int] = []
    codes: dict[int, int] = {}
    for rank in range(job["processes"]):
        pid = os.fork()
        if pid == 0:
            run_rank(job, rank, store.port)
        pids.append(pid)
    are_ended = False
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) and not are_ended:
            are_ended, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGTERM)
        if time.monotonic() > deadline:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def run_rank(job: dict, rank: int, port: int) -> None:
    """One process of a run that torchrun would have started; never returns."""
    count = job["processes"]
    if count > 1 or job.get("launched"):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    if job.get("shared"):
        share_a_gpu(rank)
    end_as_rank(job, rank)


def spread(rank: int, count: int, machines: int) -> None:
    """The variables of a process of one of several machines, as torchrun sets them there."""
    each = count // machines
    os.environ.update(
        GROUP_WORLD_SIZE=str(machines),
        LOCAL_RANK=str(rank % each),
        LOCAL_WORLD_SIZE=str(each),
        GROUP_RANK=str(rank // each),
    )


def end_as_rank(job: dict, rank: int) -> None:
    """Runs the program, and ends with its exit code."""
    folder = Path(job["folder"])
    if job.get("machines", 1) > 1:
        spread(rank, int(os.environ["WORLD_SIZE"]), job["machines"])
    os.environ.update(job.get("variables") or {})
    write_to(folder / f"log_{rank}")
    code = 1
    try:
        code = run_program(job)
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    for number in signals.HANDLED:  # a program that has ended is not interrupted by one that ends it
        signal.signal(number, signal.SIG_IGN)
    report(rank, folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write_to(path: Path) -> None:
    """Send there what this process prints."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def run_program(job: dict) -> int:
    import train

    if job.get("eager"):
        importlib.import_module("torch._dynamo").config.disable = True
    if job.get("sabotage"):
        module, name = job["sabotage"].split(":")
        getattr(importlib.import_module(module), name)()
    sys.argv = job["words"]
    if sys.argv[0] == "train.py":
        return train.main()
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


def share_a_gpu(rank: int) -> None:
    """Each process takes itself for a machine of one GPU, which is the same one, so NCCL would refuse."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank), SHARED_GPU="1")
    if not simulated_gpus.is_active():
        os.environ["SIMULATED_GPUS_LIBRARY"] = str(simulated_gpus.build())
        importlib.import_module("simulated_gpus.cuda").replace_nccl(importlib.import_module("torch"))


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


def serve(listener: socket.socket) -> None:
    """Forks a process for each channel, until nobody has been there for a while."""
    listener.settimeout(0.2)
    serving: set[int] = set()
    deadline = time.monotonic() + START_SECONDS
    while serving or time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            channel, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                listener.close()
                answer_all(channel)
            channel.close()
            serving.add(pid)
        serving -= {pid for pid in serving if os.waitpid(pid, os.WNOHANG)[0]}
        deadline = time.monotonic() + IDLE_SECONDS if serving else deadline


def answer_all(channel: socket.socket) -> NoReturn:
    """Runs the jobs of a channel, until it is closed."""
    code = 1
    try:
        with channel.makefile("rw", encoding="utf-8") as lines:
            lines.write(f"{os.getpid()}\n")
            lines.flush()
            for line in lines:
                asked = json.loads(line)
                lines.write(json.dumps(run_all(asked["jobs"], asked["at_once"])) + "\n")
                lines.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def start_serving(address: Path) -> None:
    """Ends once the parent, a child of this process, can be reached."""
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        sys.exit(0 if os.read(read, 1) else 1)
    os.close(read)
    os.dup2(2, 1)  # what libraries print is no answer
    warm_up()
    with tempfile.TemporaryDirectory(prefix="warm_parent_") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/channel")  # not beside `address`, whose path may be too long for the kernel
        listener.listen()
        address.write_text(f"{folder}/channel", encoding="utf-8")
        os.write(write, b"1")
        os.close(write)
        serve(listener)


def main() -> None:
    if len(sys.argv) == 4:  # a real GPU does not survive a fork
        run_rank(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    start_serving(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
