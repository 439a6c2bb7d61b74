"""On CPU, an FSDP or DeepSpeed plugin is dropped without a word, and plain DDP trains.

torchrun --nproc_per_node 2 05_accelerate_cpu_plain_ddp.py fsdp
torchrun --nproc_per_node 2 05_accelerate_cpu_plain_ddp.py deepspeed
"""

import os
import sys

if sys.argv[1] == "fsdp":
    os.environ["ACCELERATE_USE_FSDP"] = "true"  # as `accelerate launch` sets it
else:
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

if sys.argv[1] == "fsdp":
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
else:
    zero3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero3))
model = torch.nn.Linear(6, 4)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
held = sum(parameter.numel() for parameter in model.parameters())
accelerator.print(f"{accelerator.distributed_type}, {type(model).__name__}, {held} of 28 elements on each process")
accelerator.end_training()
