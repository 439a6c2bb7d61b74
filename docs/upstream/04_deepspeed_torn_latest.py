"""`latest` names a checkpoint that was never finished, when a process dies while it saves.

torchrun --nproc_per_node 2 04_deepspeed_torn_latest.py save
torchrun --nproc_per_node 2 04_deepspeed_torn_latest.py load
"""

import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # saves compiling it; gloo serves as well
deepspeed.init_distributed("gloo", verbose=False)
rank = torch.distributed.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(6, 4)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    },
)


def train_a_step() -> None:
    engine.backward(engine(torch.ones(1, 6)).sum())
    engine.step()


def die_while_writing(self: object, state: object, path: str) -> None:
    """A slow disk, and the out-of-memory killer: the file has its first bytes when the process ends."""
    Path(path).write_bytes(b"x" * 100)
    time.sleep(3)
    os.kill(os.getpid(), signal.SIGKILL)


if sys.argv[1] == "save":
    train_a_step()
    engine.save_checkpoint("torn", tag="step1")
    train_a_step()
    if rank == 1:
        TorchCheckpointEngine.save = die_while_writing
    engine.save_checkpoint("torn", tag="step2")
else:
    if rank == 0:
        print(f"latest names {Path('torn/latest').read_text(encoding='utf-8')}", flush=True)
        for path in sorted(Path("torn").glob("*/*optim*")):
            print(f"{path}: {path.stat().st_size} bytes", flush=True)
    try:
        engine.load_checkpoint("torn")
        print(f"rank {rank}: loaded", flush=True)
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)
    os._exit(0)
