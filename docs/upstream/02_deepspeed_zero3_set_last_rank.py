"""ZeRO-3: safe_set_full_* fails on the last rank when the processes cannot share a parameter evenly.

torchrun --nproc_per_node 2 02_deepspeed_zero3_set_last_rank.py
"""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # saves compiling it; gloo serves as well
deepspeed.init_distributed("gloo", verbose=False)
rank = torch.distributed.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 1, bias=False), torch.nn.Linear(1, 5, bias=False))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
    },
)

for name, parameter in model.named_parameters():
    value = torch.full(tuple(parameter.ds_shape), 3.0)
    try:
        safe_set_full_fp32_param(parameter, value)
        said = "set"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    found = safe_get_full_fp32_param(parameter).flatten().tolist()
    print(f"rank {rank}: {name} of {value.numel()} elements: {said}; now {[round(x, 2) for x in found]}", flush=True)
