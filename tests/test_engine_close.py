"""Protects the end of a run: processes leave together, also where no launcher holds the store through which they meet.

python -m pytest -q tests/test_engine_close.py
"""

import os
import socket
import subprocess
import sys

import pytest
from conftest import ROOT, TORCHRUN_VARIABLES, clean_environment

# Ranks in the environment, as srun's users set them: rank 0 holds the store in its own process. One rank is late to
# look whether the others are past the barrier.
RUN = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from cookbook.training.engine.collectives import Collectives
from cookbook.start.launchers import read_world
from cookbook.config.mesh import Mesh

late, world = int(sys.argv[1]), read_world()
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
if world.rank == late:
    wait = dist.PrefixStore.wait

    def slowly(store, keys, *patience):
        if "left" in keys[0]:
            time.sleep(2)
        return wait(store, keys, *patience)

    dist.PrefixStore.wait = slowly
collectives = Collectives(world, Mesh(replicate=2), torch.device("cpu"), beat=lambda what: None)
collectives.leave(timedelta(seconds=30))
"""


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_without_a_launcher_s_store_all_end_well(late):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    ranks = []
    for rank in ("0", "1"):
        place = {**dict.fromkeys(TORCHRUN_VARIABLES, "2"), "RANK": rank, "LOCAL_RANK": rank}
        environment = clean_environment(**place, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        command = [sys.executable, "-c", RUN, str(late)]
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    told = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(told)
