"""Protects slurm/job.sh, on a real Slurm of two nodes: signal, save, queue again, resume; and when it must not. And
the script that `cookbook submit` makes of it.

python -m pytest -q -m slow tests/test_slurm.py    as root, with iproute2, slurm-wlm and munge
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import ROOT, clean_environment
from curves import Curve, distance

import simulated_gpus
from cookbook.commands.cli import main
from tests.needs import need_simulated_gpus, need_slurm
from tests.two_machines import ADDRESSES, two_machines

pytestmark = pytest.mark.slow

CONFIG = """\
ClusterName=test
SlurmctldHost={host}({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=1
ReturnToService=2
MpiDefault=none
SlurmdParameters=config_overrides
KillWait=5
SlurmctldPort=16817
SlurmctldPidFile={folder}/controller.pid
SlurmctldLogFile={folder}/controller.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool.%n
NodeName=n1 NodeHostname={host} NodeAddr={addresses[0]} Port=17001 CPUs=4 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr={addresses[1]} Port=17002 CPUs=4 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def until(condition, what, seconds=120):
    """The first true value of a condition."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)
    return result


def enter(machine):
    """Runs a command there. `ip netns exec` would mount another /sys, without the control groups that slurmd wants."""
    return ["nsenter", f"--net=/run/netns/{machine}"]


class Slurm:
    """A cluster whose controller and first node are the first of two machines."""

    def __init__(self, folder, machines):
        self.folder, self.machines, self.daemons = folder, machines, []
        self.environment = clean_environment(SLURM_CONF=str(folder / "slurm.conf"), CUDA_VISIBLE_DEVICES="")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        text = CONFIG.format(folder=folder, host=socket.gethostname(), addresses=ADDRESSES)
        (folder / "slurm.conf").write_text(text)

    def start(self):
        places = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log"}
        options = [f"--{name}={self.folder / file}" for name, file in (places | {"seed-file": "munge.seed"}).items()]
        self._daemon(["munged", "--foreground", "--force", *options])
        until((self.folder / "munge.socket").exists, "munged")
        on = [enter(name) for name in self.machines]
        self._daemon([*on[0], "slurmctld", "-D"])
        self._daemon([*on[0], "slurmd", "-D", "-N", "n1"])
        self._daemon([*on[1], "slurmd", "-D", "-N", "n2"])
        until(lambda: self.call("sinfo", "-h", "-o", "%T %D", check=False) == "idle 2\n", "two idle nodes", 30)

    def _daemon(self, command):
        with (self.folder / "daemons.log").open("a") as log:
            self.daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def call(self, *command, check=True, **variables):
        command = [*enter(self.machines[0]), *command]
        environment = self.environment | variables
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def job(self, number):
        """Slurm's record of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.call("scontrol", "show", "job", number)))

    def stop(self):
        self.call("scancel", "--signal=KILL", "--full", "--user=root", check=False)
        with contextlib.suppress(AssertionError):
            until(lambda: not self.call("squeue", "-h", check=False), "an empty queue", 20)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(20)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    need_slurm()
    folder = tmp_path_factory.mktemp("slurm")
    names = ("cookbook", "simulated_gpus", "train.py", "slurm", "accelerate_configs", "ds_configs", "requirements.txt")
    for name in names:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    with two_machines() as machines:
        cluster = Slurm(folder, machines)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def stopped_at(slurm, lab, output_dir, point, step):
    """Submits the small recipe, whose first process stops at a named point. Returns job, process and the job's log."""
    fault = {"rank": 0, "at": point, "step": step, "do": "SIGSTOP"}
    words = ["slurm/job.sh", str(lab.folder / "recipe.yaml"), "--strategy", "ddp", "--processes", "2"]
    words += ["--set", f"run.output_dir={output_dir}", "--set", "run.check_export=false"]
    log = slurm.folder / f"{output_dir.name}.txt"
    submit = ("sbatch", "--parsable", "--nodes=2", f"--output={log}", *words)
    job = slurm.call(*submit, COOKBOOK_FAULTS=json.dumps([fault])).strip()

    def find():
        assert slurm.job(job)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), log.read_text()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED and f"run.output_dir={output_dir}" in process.cmdline():
                    return process
        return None

    return job, until(find, f"a process at {point}"), log


def send_signal_before_the_limit(slurm, job, process):
    """As Slurm does: to the batch script alone."""
    slurm.call("scancel", "--signal=USR1", "--batch", job)
    until(lambda: signal.SIGUSR1 in pending(process), "the signal at the first process")
    process.send_signal(signal.SIGCONT)


def pending(process):
    """Signals that a stopped process has yet to handle."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    bits = int(re.search(r"ShdPnd:\s*(\w+)", text)[1], 16)
    return {number for number in signal.Signals if bits >> (number - 1) & 1}


def test_a_job_saves_before_its_limit_queues_again_and_resumes_on_the_same_curve(slurm, lab, tmp_path):
    folder = tmp_path / "resumed"
    job, process, log = stopped_at(slurm, lab, folder, "data.next", 8)
    send_signal_before_the_limit(slurm, job, process)
    until(lambda: slurm.job(job)["JobState"] == "PENDING", "the job in the queue again")
    first = json.loads((folder / "status.json").read_text())
    assert (first["state"], first["exit_code"], first["step"]) == ("stopped", 75, 8), log.read_text()
    time.sleep(2)  # slurmd takes a job that it gets back within the same second for one that has ended
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")  # and not after two minutes, as is usual
    until(lambda: slurm.job(job)["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), "its end")
    ended, text = slurm.job(job), log.read_text()
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("COMPLETED", "1", "0:0"), text
    assert "stopped after step 8; the job queues again" in text and "resuming from" in text and "Traceback" not in text
    apart = distance(Curve(folder), lab.run("single"))
    assert apart.loss < 2e-6 and apart.norm < 1e-6 and apart.weight < 1e-6, apart
    assert not list(slurm.folder.glob("slurm-*.step"))


@pytest.mark.thorough
def test_slurm_s_own_limit_stops_a_job_that_queues_again(slurm, lab, tmp_path):
    """A minute, the shortest there is; the signal comes half of it before, or sooner."""
    folder, log = tmp_path / "limited", tmp_path / "log.txt"
    words = ["slurm/job.sh", str(lab.folder / "recipe.yaml"), "--strategy", "ddp", "--processes", "2"]
    words += ["--set", f"run.output_dir={folder}", "--set", "run.max_steps=1000000"]
    options = ("--nodes=2", "--time=1", "--signal=B:USR1@30", f"--output={log}")
    job = slurm.call("sbatch", "--parsable", *options, *words).strip()
    try:
        until(lambda: slurm.job(job)["Restarts"] == "1", "the job in the queue again", 150)
    finally:
        slurm.call("scancel", job)
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75) and status["step"] > 0, log.read_text()
    assert f"stopped after step {status['step']}; the job queues again" in log.read_text()


@pytest.mark.thorough
def test_a_job_that_makes_no_step_does_not_queue_again(slurm, lab, tmp_path):
    job, process, log = stopped_at(slurm, lab, tmp_path / "slow", "phase.reading the rows", 0)
    send_signal_before_the_limit(slurm, job, process)
    until(lambda: slurm.job(job)["JobState"] not in ("RUNNING", "COMPLETING"), "the end of the job")
    ended = slurm.job(job)
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", "0", "75:0"), log.read_text()
    assert "no step was made since step 0, so the job does not queue again" in log.read_text()


def test_a_mistake_ends_the_job_with_its_own_code(slurm, lab, tmp_path):
    log = tmp_path / "log.txt"
    words = ("slurm/job.sh", str(lab.folder / "recipe.yaml"), "--strategy", "ddp", "--processes", "3")
    job = slurm.call("sbatch", "--parsable", "--nodes=2", f"--output={log}", *words).strip()
    until(lambda: slurm.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), "the end of the job")
    assert slurm.job(job)["ExitCode"] == "2:0", log.read_text()
    assert log.read_text().count("3 processes, which 2 machines cannot split evenly") == 2


@pytest.mark.thorough
def test_auto_is_one_number_on_both_machines_of_a_job(slurm, tmp_path):
    """As tests/test_micro_batch.py has it of two such GPUs in one machine, by accelerate launch and torchrun."""
    need_simulated_gpus()
    folder, log = tmp_path / "auto", tmp_path / "log.txt"
    settings = ["model.gradient_checkpointing=auto", f"run.output_dir={folder}", "run.max_steps=1"]
    settings += ["batch.micro_batch_size=auto", "batch.global_batch_size=64", "mixed_precision=bf16"]
    words = [str(ROOT / "recipes/quickstart.yaml"), "--strategy", "fsdp2", "--processes", "2"]
    words += [word for text in settings for word in ("--set", text)]
    variables = simulated_gpus.environment(1, memory=12 * 2**27) | {"OMP_NUM_THREADS": "1"}
    submit = ("sbatch", "--parsable", "--nodes=2", f"--output={log}", "slurm/job.sh", *words)
    job = slurm.call(*submit, **variables).strip()
    until(lambda: slurm.job(job)["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), "its end", 600)
    assert slurm.job(job)["ExitCode"] == "0:0", log.read_text()
    values = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert (values["batch"]["micro_batch_size"], values["model"]["gradient_checkpointing"]) == (32, False)
    said = [line for line in log.read_text().splitlines() if "auto is" in line]
    assert len(said) == 4 and len({*said}) == 2, "both machines say so of both keys"


@pytest.mark.thorough
def test_a_process_that_dies_ends_the_job_with_1(slurm, lab, tmp_path):
    folder, log = tmp_path / "killed", tmp_path / "log.txt"
    fault = {"rank": 1, "at": "step.forward", "step": 6, "do": "SIGKILL"}
    words = ["slurm/job.sh", str(lab.folder / "recipe.yaml"), "--strategy", "ddp", "--processes", "2"]
    submit = ("sbatch", "--parsable", "--nodes=2", f"--output={log}", *words, "--set", f"run.output_dir={folder}")
    job = slurm.call(*submit, COOKBOOK_FAULTS=json.dumps([fault])).strip()
    until(lambda: slurm.job(job)["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), "its end", 240)
    ended = slurm.job(job)
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", "0", "1:0"), log.read_text()
    assert json.loads((folder / "status.json").read_text())["exit_code"] == 1, log.read_text()


@pytest.mark.thorough
def test_a_sweep_is_an_array_of_jobs_each_with_a_line_of_its_own(slurm, lab, tmp_path):
    """And a task without a line ends, before it repeats another's run."""
    rates = {1: "0.01", 2: "0.02"}
    lines = [f"--set optim.learning_rate={rate} --set run.output_dir={tmp_path}/{task}" for task, rate in rates.items()]
    sweep = tmp_path / "sweep.txt"
    sweep.write_text("\n".join(lines) + "\n")
    words = ("slurm/job.sh", str(lab.folder / "recipe.yaml"), "--strategy", "ddp", "--processes", "2")
    short = ("--set", "run.max_steps=5", "--set", "run.check_export=false")
    options = ("--array=1-3", "--nodes=1", f"--output={tmp_path}/%a.txt")
    job = slurm.call("sbatch", "--parsable", *options, *words, *short, SWEEP=str(sweep)).strip()
    until(lambda: not slurm.call("squeue", "-h", "-j", job, check=False), "the end of the array", 240)
    logs = [(tmp_path / f"{task}.txt").read_text() for task in (1, 2, 3)]
    assert f"task 3 of an array: SWEEP={sweep} has no such line" in logs[2] and not (tmp_path / "3").exists()
    for task, rate in rates.items():
        assert f"learning_rate: {rate}\n" in (tmp_path / f"{task}/recipe.yaml").read_text(), logs[task - 1]
        assert json.loads((tmp_path / f"{task}/status.json").read_text())["exit_code"] == 0, logs[task - 1]


@pytest.mark.thorough
def test_a_sweep_in_slurm_trains_each_value_and_the_best_is_named_when_they_have_ended(
    slurm, lab, tmp_path, monkeypatch, capsys
):
    script, rates = tmp_path / "script.sh", ("0.01", "0.02")
    monkeypatch.chdir(slurm.folder)
    words = ["sweep", str(lab.folder / "recipe.yaml"), f"optim.learning_rate={','.join(rates)}", "--strategy", "ddp"]
    words += [
        word for setting in (f"run.output_dir={tmp_path / 'out'}", "run.max_steps=5") for word in ("--set", setting)
    ]
    assert main([*words, "--to", "slurm", "--gpus", "1xcpu"]) == 0
    script.write_text(capsys.readouterr().out)
    job = slurm.call("sbatch", "--parsable", f"--output={tmp_path}/%a.txt", str(script)).strip()
    until(lambda: not slurm.call("squeue", "-h", "-j", job, check=False), "the end of the array", 240)
    for task, rate in enumerate(rates, start=1):
        folder, log = tmp_path / f"out-sweep/optim.learning_rate={rate}", (tmp_path / f"{task}.txt").read_text()
        assert f"learning_rate: {rate}\n" in (folder / "recipe.yaml").read_text(), log
        status = json.loads((folder / "status.json").read_text())
        assert (status["state"], status["step"], status["exit_code"]) == ("finished", 5, 0), log
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.count("is finished") == 2 and "at the end of" in printed


@pytest.mark.thorough
def test_a_script_of_submit_has_the_curve_of_one_process(slurm, lab, tmp_path, monkeypatch, capsys):
    folder, log, script = tmp_path / "submitted", tmp_path / "log.txt", tmp_path / "script.sh"
    monkeypatch.chdir(slurm.folder)
    words = ["--to", "slurm", "--gpus", "2xcpu", "--strategy", "ddp", "--set", f"run.output_dir={folder}"]
    assert main(["submit", str(lab.folder / "recipe.yaml"), *words]) == 0
    script.write_text(capsys.readouterr().out)
    job = slurm.call("sbatch", "--parsable", f"--output={log}", str(script)).strip()
    until(lambda: slurm.job(job)["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), "its end", 240)
    ended = slurm.job(job)
    assert (ended["JobState"], ended["JobName"], ended["NumNodes"]) == ("COMPLETED", "submitted", "2"), log.read_text()
    apart = distance(Curve(folder), lab.run("single"))
    assert apart.loss < 2e-6 and apart.norm < 1e-6 and apart.weight < 1e-6, apart
