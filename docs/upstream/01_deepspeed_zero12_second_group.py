"""ZeRO-1/2: the optimizer state of all parameter groups but the first cannot be read.

torchrun --nproc_per_node 2 01_deepspeed_zero12_second_group.py [1|2]
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
from deepspeed.utils import safe_get_full_optimizer_state

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # saves compiling it; gloo serves as well
deepspeed.init_distributed("gloo", verbose=False)
rank = torch.distributed.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(6, 2)
groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(groups, lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": int(sys.argv[1]) if len(sys.argv) > 1 else 2},
    },
)

for _ in range(2):
    engine.backward(engine(torch.ones(1, 6)).sum())
    engine.step()

for name, parameter in model.named_parameters():
    try:
        state = safe_get_full_optimizer_state(parameter, "exp_avg")
        print(f"rank {rank}: {name}: read, {state.numel()} elements", flush=True)
    except Exception as error:
        print(f"rank {rank}: {name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        os._exit(1)
