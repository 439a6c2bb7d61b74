"""Protects runs over several machines: their command line, the network between them, and that it changes no curve.

python -m pytest -q tests/test_hosts.py
python -m pytest -q -m slow tests/test_hosts.py    as root, with iproute2: two network namespaces are the machines
"""

import contextlib
import json
import shlex
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import RECIPE, ROOT, clean_environment
from curves import Curve, distance, done_of

from cookbook.commands import launch
from cookbook.commands.cli import main
from cookbook.config.strategy import load_strategy
from cookbook.start import hosts, launchers
from cookbook.start.run_plan import launch_command
from tests import simulated_driver
from tests.needs import need_simulated_gpus
from tests.two_machines import ADDRESSES, set_cable, two_machines

LOCAL = ["--first", "127.0.0.1"]


@pytest.fixture
def launched(book, monkeypatch):
    """The command lines and environments that `cookbook launch` would run."""
    calls = []
    monkeypatch.setattr(launch, "run_child", lambda command, environment, folder: calls.append((command, environment)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in hosts.INTERFACES:
        monkeypatch.delenv(name, raising=False)
    return calls


def test_launch_hands_the_machines_to_accelerate_with_the_interface_between_them(launched):
    main(["launch", RECIPE, "--machines", "2", "--machine", "1", *LOCAL, "--port", "29511", "--processes", "2"])
    ((command, environment),) = launched
    flags = "--num_processes 2 --num_machines 2 --machine_rank 1 --main_process_ip 127.0.0.1 --main_process_port 29511"
    assert shlex.join(command).partition("ddp.yaml ")[2] == f"{flags} train.py {RECIPE}"
    assert [environment[name] for name in hosts.INTERFACES] == ["lo", "=lo"]


def test_an_interface_of_the_user_s_is_kept(launched, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker")
    main(["launch", RECIPE, "--machines", "2", "--machine", "0", *LOCAL, "--processes", "2"])
    ((_, environment),) = launched
    assert [environment[name] for name in hosts.INTERFACES] == ["lo", "^docker"]


def test_without_a_count_each_machine_has_as_many_processes_and_threads_as_alone(launched, monkeypatch):
    monkeypatch.setattr(launch, "num_cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    main(["launch", RECIPE])
    main(["launch", RECIPE, "--machines", "2", "--machine", "0", *LOCAL, "--set", "batch.micro_batch_size=4"])
    alone, two = (int(command[command.index("--num_processes") + 1]) for command, _ in launched)
    assert two == 2 * alone
    assert [environment["OMP_NUM_THREADS"] for _, environment in launched] == [str(16 // alone)] * 2


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--machines 2", ["--machine is missing: write", "--first is missing: write the address of machine 0"]),
        ("--machines 2 --machine 0 --first=", ["--first is empty: write the address of machine 0"]),
        ("--machines 2 --machine 2 --first 127.0.0.1", ["--machine is 2, with --machines 2; write 0 to 1"]),
        ("--machines 2 --machine -1 --first 127.0.0.1", ["--machine is -1, with --machines 2; write 0 to 1"]),
        ("--machines 0", ["--machines is 0; write a number above 0"]),
        ("--machine 1 --first here", ["--machine, --first: would be ignored without --machines; add it"]),
        ("--machines 2 --machine 0 --first 127.0.0.1 --port 70000", ["--port is 70000; write 1 to 65535"]),
        (
            "--machines 2 --machine 0 --first 127.0.0.1 --processes 3 --set batch.global_batch_size=24",
            ["3 processes, which 2 machines cannot split evenly; write a multiple with --processes"],
        ),
        (
            "--machines 2 --machine 0 --first nowhere.invalid",
            ["machine 0 at nowhere.invalid: ", "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (one of "],
        ),
        ("--machines 2 --machine 0 --first localhost", ["this name resolves to 127.0.0.1 here, which no other"]),
        (
            "--machines 3 --machine 5 --processes 4 --set batch.global_batch_size=30",
            [
                "--machine is 5, with --machines 3; write 0 to 2",
                "--first is missing",
                "4 processes, which 3 machines cannot split evenly",
                "batch.global_batch_size is 30, but 4 processes",
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_in_the_machines_are_answered_together(launched, capsys, flags, expected):
    assert main(["launch", RECIPE, *flags.split()]) == 2
    answer = capsys.readouterr().err
    assert [text for text in expected if text not in answer] == [] and launched == [], answer


def test_an_interface_that_is_not_here_is_refused(launched, monkeypatch, capsys):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    assert main(["launch", RECIPE, "--machines", "2", "--machine", "0", *LOCAL]) == 2
    assert "GLOO_SOCKET_IFNAME=eth77: no such network interface; here are " in capsys.readouterr().err


def ranks(rank, **extra):
    """The variables of a process of two machines of two."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    return place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"} | extra


FOUR = ["--set", "batch.micro_batch_size=4", "--dry-run"]


def test_four_processes_on_two_machines_of_two_gpus_pass_and_on_one_do_not(book):
    """As torchrun starts them: the strategy's file knows nothing of machines."""
    need_simulated_gpus()
    gpus = simulated_driver.variables(book.root, "count 2")
    done = book.train(RECIPE, *FOUR, **gpus, **ranks(0))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    alone = book.train(RECIPE, *FOUR, **gpus, **ranks(0, LOCAL_WORLD_SIZE="4"))
    assert alone.returncode == 2 and "4 processes on this machine, which has 2 GPUs" in alone.stderr


def test_a_process_whose_machine_does_not_reach_the_first_says_so(book):
    done = book.train(RECIPE, *FOUR, **ranks(2, MASTER_ADDR="nowhere.invalid"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "machine 0 at nowhere.invalid: " in done.stderr


def test_a_user_s_interface_is_taken_unless_it_does_not_leave_the_machine():
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    for name in others:
        given = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
        assert hosts.set_interfaces("nowhere.invalid", dict(given)) == []
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert others and hosts.set_interfaces("127.0.0.1", dict(loopback)) == []
    notes = hosts.set_interfaces("10.88.0.1", loopback)
    assert [text.partition("; ")[0] for text in notes] == [
        f"{name}=lo does not leave this machine, and machine 0 is 10.88.0.1" for name in loopback
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("torchrun --nnodes 1:2 --nproc-per-node 2 train.py", [2, 4]),
        ("python -m torch.distributed.run --nnodes=2:4 train.py", [4, 6, 8]),
        ("torchrun --nnodes 2 train.py", []),
        ("torchrun --nproc-per-node 2 train.py --nnodes 1:2x", []),
    ],
)
def test_the_sizes_of_a_group_that_may_change_are_those_of_torchrun_s_flag(monkeypatch, words, expected):
    monkeypatch.setattr(launchers, "_list_ancestors", lambda: iter([["bash"], words.split()]))
    assert (
        launchers.elastic_sizes(launchers.World(rank=0, local_rank=0, num_processes=2, num_local=2, is_launched=True))
        == expected
    )


def test_what_keeps_a_group_that_changes_from_going_on_is_refused_before_its_first_step(book):
    """Here two machines of two are there, and a third may come, for which the batch has no share."""
    elastic = {"PET_NNODES": "1:3", "CUDA_VISIBLE_DEVICES": "", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = book.train(RECIPE, *FOUR, **ranks(0), **elastic)
    assert done.returncode == 2
    assert "run.resume is never: each time the group changes it would start there; write auto" in done.stderr
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on each machine" in done.stderr
    assert "batch.global_batch_size is 16, but 6 processes x micro_batch_size 4" in done.stderr
    resuming = ["--set", "run.resume=auto", "--set", "batch.global_batch_size=48"]
    good = book.train(RECIPE, *FOUR, *resuming, **ranks(0), **elastic | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert (good.returncode, good.stderr) == (0, ""), good.stderr


@pytest.fixture(scope="module")
def machines():
    with two_machines() as names:
        yield names


def run_on(machines, lab, logs, strategy, settings, *, disks=(), faults=(), of_second=None):
    """A process on each machine, as `cookbook launch` starts it. Returns what each machine's launch came to.

    Args:
        logs: a folder.
        disks: of the second machine, see tests/warm_parent.py.
        faults: see cookbook/system/faults.py.
        of_second: settings of the second machine alone.
    """
    loaded, jobs = load_strategy(Path(f"accelerate_configs/{strategy}.yaml")), []
    for index, name in enumerate(machines):
        this = hosts.Hosts(count=2, index=index, first=ADDRESSES[0])
        command = launch_command("recipe", loaded, num_processes=2, assignments=[], hosts=this)
        (logs / str(index)).mkdir()
        own = settings | (of_second or {} if index else {})
        job = lab.job(logs / str(index), strategy, own, 2, launched=True, limit=240)
        job |= {"accelerate": command[2 : command.index("train.py")], "host": name}
        jobs.append(job | {"disks": disks if index else [], "variables": {"COOKBOOK_FAULTS": json.dumps(faults)}})
    return list(map(done_of, jobs, lab.parent.ask_all(jobs, at_once=2)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "pp", "zero3"])
def test_two_machines_have_the_curve_of_one_process(machines, lab, tmp_path, strategy):
    folder = tmp_path / "run"
    ends = run_on(machines, lab, tmp_path, strategy, {"run.output_dir": str(folder)})
    assert [end.returncode for end in ends] == [0, 0], "".join(end.stdout[-3000:] for end in ends)
    apart = distance(Curve(folder), lab.run("single"))
    assert apart.loss < 2e-6 and apart.norm < 1e-6 and apart.weight < 1e-6, apart


@pytest.mark.thorough
@pytest.mark.slow
def test_torchrun_s_own_line_has_the_curve_of_one_process(machines, lab, tmp_path):
    """As in docs/several_machines.md."""

    def train(index):
        line = ["ip", "netns", "exec", machines[index], sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        line += ["--nproc-per-node", "1", "--node-rank", str(index), "--master-addr", ADDRESSES[0]]
        line += ["--master-port", "29500", "train.py", str(lab.folder / "recipe.yaml"), "--set", "strategy=ddp"]
        line += ["--set", f"run.output_dir={tmp_path / 'run'}"]
        environment = clean_environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)

    with ThreadPoolExecutor() as both:
        ends = list(both.map(train, range(2)))
    assert [end.returncode for end in ends] == [0, 0], "".join(end.stdout[-2000:] + end.stderr[-2000:] for end in ends)
    apart = distance(Curve(tmp_path / "run"), lab.run("single"))
    assert apart.loss < 2e-6 and apart.norm < 1e-6 and apart.weight < 1e-6, apart


@pytest.mark.thorough
@pytest.mark.slow
def test_machines_without_a_common_output_folder_are_refused_before_the_first_step(machines, lab, tmp_path):
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir()
    shared.mkdir()
    settings = {"run.output_dir": str(shared / "run"), "run.max_steps": "8", "run.hang_timeout_minutes": "0.3"}
    ends = run_on(machines, lab, tmp_path, "ddp", settings, disks=[[str(own), str(shared)]])
    for end in ends:
        assert "rank 1 cannot see what rank 0 wrote there; several machines need one folder" in end.stdout, end.stdout
        assert "Traceback" not in end.stdout.split("run.output_dir ")[0], end.stdout
    assert not list(tmp_path.rglob("metrics.jsonl")) and not list(tmp_path.rglob("step-*"))


@pytest.mark.slow
def test_machines_whose_launchers_found_other_values_for_auto_are_refused(machines, lab, tmp_path):
    """As of GPUs that differ; the run would hang, or hold other shares of a batch."""
    settings, other = {"run.output_dir": str(tmp_path / "run")}, {"batch.micro_batch_size": "1"}
    for end in run_on(machines, lab, tmp_path, "ddp", settings, of_second=other):
        assert "machines differ: rank 0 has batch.micro_batch_size=" in end.stdout, end.stdout
        assert "; rank 1 has batch.micro_batch_size=1, " in end.stdout and "with --set, the same on" in end.stdout
    assert not list(tmp_path.rglob("metrics.jsonl"))


SILENT_SECONDS = 8.0


def run_with_a_cut(machines, lab, tmp_path, at, cut):
    """A run under ddp whose second machine stops at a point of step 6.

    Args:
        cut: called beside the run with that machine, the parent of the processes and the path of the report of a hang;
            returns whether it came to what it waits for.

    Returns:
        The run's folder, and what each machine's launch came to.
    """
    folder = tmp_path / "run"
    settings = {"run.output_dir": str(folder), "run.hang_timeout_minutes": str(SILENT_SECONDS / 60)}
    faults = [{"rank": 1, "at": at, "step": 6, "do": "SIGSTOP"}]
    with ThreadPoolExecutor() as beside:
        cutting = beside.submit(cut, machines[1], lab.parent, folder / "hang/report.txt")
        ends = run_on(machines, lab, tmp_path, "ddp", settings, faults=faults)
        set_cable(machines[1], "up")
        assert cutting.result(), "".join(end.stdout[-3000:] for end in ends)
    return folder, ends


@pytest.mark.slow
def test_a_machine_that_falls_silent_ends_the_run_on_the_other_and_is_named(machines, lab, tmp_path):
    """As by a power cut: the process stops in a step, and the cable is dead from then on. No connection closes."""
    folder, ends = run_with_a_cut(machines, lab, tmp_path, "step.forward", cut_power)
    assert ends[0].returncode == 1, ends[0].stdout[-3000:]
    report = (folder / "hang/report.txt").read_text()
    assert f"machine {machines[1]} is silent, with all its processes: rank 1." in report
    assert f"on {machines[1]}) never entered gloo:" in report and "Last heartbeat: " in report
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["reason"].partition(",")[0]) == ("failed", f"hang: machine {machines[1]} is silent")


@pytest.mark.slow
def test_a_cut_cable_ends_the_run_on_both_machines(machines, lab, tmp_path):
    """All ranks wait in the same collective: none of them is at fault."""
    folder, ends = run_with_a_cut(machines, lab, tmp_path, "data.next", cut_cable)
    assert [end.returncode for end in ends] == [1, 1], "".join(end.stdout[-3000:] for end in ends)
    report = (folder / "hang/report.txt").read_text()
    assert "the network between" in report and "is silent" not in report, report


def cut_cable(machine, parent, _):
    """Cuts the cable of the machine while its process is stopped in a step, which then goes on. Returns whether one
    was.
    """
    dead = until_stopped(parent)
    set_cable(machine, "down")
    for process in dead:
        process.resume()
    return bool(dead)


def cut_power(machine, parent, report, *, limit=200.0):
    """Cuts the cable of the machine whose process stops. Once the other has reported, kills what is stopped, so that
    its launcher ends. Returns whether the report came.
    """
    deadline = time.monotonic() + limit
    dead = until_stopped(parent)
    set_cable(machine, "down")
    while not report.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in dead:
        process.kill()
    return bool(dead) and report.exists()


def until_stopped(parent, *, limit=200.0):
    """The processes of a run that stop, as soon as one does."""
    deadline = time.monotonic() + limit
    while not (process := stopped(parent.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return process


def stopped(parent):
    """The stopped processes of a run."""
    with contextlib.suppress(psutil.Error):  # one has ended meanwhile
        children = psutil.Process(parent).children(recursive=True) if parent else []
        return [child for child in children if child.status() == psutil.STATUS_STOPPED]
    return []
