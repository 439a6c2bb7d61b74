"""ZeRO-3: loading a universal checkpoint gives every parameter group the hyperparameters of the first.

torchrun --nproc_per_node 2 03_deepspeed_universal_groups.py save
python -m deepspeed.checkpoint.ds_to_universal --input_folder zero3/step2 --output_folder zero3/step2_universal
torchrun --nproc_per_node 2 03_deepspeed_universal_groups.py load
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # saves compiling it; gloo serves as well
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(0)
model = torch.nn.Linear(6, 4)
groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(groups, lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
        "checkpoint": {"load_universal": sys.argv[1] == "load"},
    },
)


def show(when: str) -> None:
    if torch.distributed.get_rank() == 0:
        print(f"{when}: weight_decay of the groups is {[g['weight_decay'] for g in engine.optimizer.param_groups]}")


if sys.argv[1] == "save":
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 6)).sum())
        engine.step()
    show("saved")
    engine.save_checkpoint("zero3", tag="step2")
else:
    show("before the load")
    engine.load_checkpoint("zero3", tag="step2_universal")
    show("after the load")
