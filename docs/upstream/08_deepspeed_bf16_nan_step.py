"""bf16 with check_grad_overflow: false applies a step whose gradient norm is not finite; fp32 does not.

torchrun --nproc_per_node 2 08_deepspeed_bf16_nan_step.py [1|2]
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # saves compiling it; gloo serves as well
deepspeed.init_distributed("gloo", verbose=False)
rank = torch.distributed.get_rank()
stage = int(sys.argv[1]) if len(sys.argv) > 1 else 2
settings = {
    "fp32": {},
    "bf16, check_grad_overflow true": {"enabled": True},
    "bf16, check_grad_overflow false": {"enabled": True, "check_grad_overflow": False},
}
for name, bf16 in settings.items():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "bf16": bf16,
            "zero_optimization": {"stage": stage},
        },
    )
    loss = engine(torch.ones(1, 6, dtype=model.weight.dtype)).sum()
    engine.backward(loss * float("nan") if rank == 1 else loss)
    engine.step()
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    if rank == 0:
        print(f"{name}: skipped steps {engine.skipped_steps}, weights finite {finite}", flush=True)
