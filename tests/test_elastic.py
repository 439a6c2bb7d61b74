"""Protects `torchrun --nnodes 1:2`: a machine is lost and comes back, and the curve is that of one process.

python -m pytest -q -m slow tests/test_elastic.py    as root, with iproute2: two network namespaces are the machines
"""

import contextlib
import json
import signal
import subprocess
import sys

import psutil
import pytest
from conftest import ROOT, clean_environment
from curves import Curve, distance
from test_slurm import pending, until

from tests.two_machines import ADDRESSES, two_machines

pytestmark = pytest.mark.slow

STOPS = [
    {"rank": 0, "at": "data.next", "step": step, "restart": count, "do": "SIGSTOP"} for count, step in ((0, 6), (1, 12))
]
"""Stops of the first process: before the machine is lost, and once it trains alone."""


class Cluster:
    """torchrun on two machines, the first of which is the meeting point."""

    def __init__(self, machines, lab, tmp_path):
        self.machines, self.folder, self.agents = machines, tmp_path / "run", {}
        self.logs = [tmp_path / f"{machine}.txt" for machine in "ab"]
        settings = {"strategy": "ddp", "run.output_dir": str(self.folder), "run.save_every_steps": "4"}
        settings |= {"run.resume": "auto"}
        self.words = ["train.py", str(lab.folder / "recipe.yaml")]
        self.words += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]

    def start(self, machine):
        own = {"OMP_NUM_THREADS": "1", "COOKBOOK_FAULTS": json.dumps(STOPS), "CUDA_VISIBLE_DEVICES": ""}
        flags = f"--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-id {self.folder.name}"
        flags += f" --rdzv-endpoint {ADDRESSES[0]}:29600 --local-addr {ADDRESSES[machine]}"
        flags += f" --rdzv-conf is_host={1 - machine},last_call_timeout=3"
        command = ["ip", "netns", "exec", self.machines[machine], sys.executable, "-m", "torch.distributed.run"]
        with self.logs[machine].open("a") as log:
            self.agents[machine] = subprocess.Popen(
                [*command, *flags.split(), *self.words],
                cwd=ROOT,
                env=clean_environment(**own, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def processes(self, machine):
        """torchrun and its children there."""
        with contextlib.suppress(psutil.Error):
            agent = psutil.Process(self.agents[machine].pid)
            return [agent, *agent.children(recursive=True)]
        return []

    def lose(self, machine):
        for process in self.processes(machine):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.agents[machine].wait()

    def stopped(self):
        """The training process of the first machine, once it stops."""
        assert self.agents[0].poll() is None, self.printed()
        return next((process for process in self.processes(0) if process.status() == psutil.STATUS_STOPPED), None)

    def num_processes(self):
        return json.loads((self.folder / "run.json").read_text())["strategy"]["processes"]

    def printed(self):
        return "\n".join(log.read_text(errors="replace")[-4000:] for log in self.logs if log.exists())


def test_a_machine_is_lost_and_comes_back_on_the_curve_of_one_process(lab, tmp_path):
    with two_machines() as machines:
        cluster = Cluster(machines, lab, tmp_path)
        try:
            cluster.start(0)
            cluster.start(1)
            first = until(cluster.stopped, "a stop before step 6")
            assert cluster.num_processes() == 2
            cluster.lose(1)
            first.send_signal(signal.SIGCONT)
            alone = until(cluster.stopped, "a stop of the group of one")
            assert cluster.num_processes() == 1
            cluster.start(1)
            until(lambda: signal.SIGTERM in pending(alone), "torchrun's signal to form a new group")
            alone.send_signal(signal.SIGCONT)
            codes = [agent.wait(240) for agent in cluster.agents.values()]
        finally:
            cluster.lose(0)
            cluster.lose(1)
    assert codes == [0, 0], cluster.printed()
    assert cluster.num_processes() == 2
    apart = distance(Curve(cluster.folder), lab.run("single"))
    assert apart.loss < 2e-6 and apart.norm < 1e-6 and apart.weight < 1e-6, apart
