"""One of two processes fails at its first start. Under torchrun --rdzv-backend static the restart cannot connect.

torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 --rdzv-backend static --rdzv-id 0 --master-addr 127.0.0.1 \
    --master-port 29611 --max-restarts 1 09_static_rendezvous_restart.py
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

restart, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
try:
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    total = torch.ones(())
    dist.all_reduce(total)
    print(f"start {restart}, rank {rank}: {total.item():.0f} processes", flush=True)
except RuntimeError as error:
    print(f"start {restart}, rank {rank}: {str(error)[:120]}", flush=True)
    sys.exit(1)
if restart == "0" and rank == "1":
    sys.exit(1)
dist.barrier()
