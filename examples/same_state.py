"""A checkpoint that belongs to no strategy, in one page of plain Accelerate and PyTorch: train, save, resume elsewhere.

    python examples/same_state.py

trains one tiny model for 12 steps without a stop. Then it trains 4 steps under one strategy, saves, resumes under
another for 4 more, and under a third for the rest: one process, DDP and FSDP2 in several orders. The weights and Adam's
moments go by their names and whole sizes, so that each strategy cuts them for itself. The state after a resume is the
saved one to the last bit, and the losses are those of the run without a stop. Then it makes the usual mistake, to save
the weights alone: another state comes back, for Adam begins anew, and so does another curve.

It uses two GPUs, or two CPU processes where there are fewer. All numbers are in float32.
"""

import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

PROCESSES = {"one process": 1, "DDP": 2, "FSDP2": 2}
STEPS, BATCH, WIDTH = 12, 8, 16
LEGS = (0, 4, 8, STEPS)
TOLERANCE = 1e-6
"""Each strategy adds up in another order, which float32 rounds. The mistake is a thousand times larger."""


class Model(nn.Module):
    _no_split_modules = ("Linear",)  # FSDP2 shards these one by one

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 4 * WIDTH)
        self.head = nn.Linear(4 * WIDTH, 1)

    def forward(self, inputs):
        return self.head(torch.relu(self.second(torch.relu(self.first(inputs))))).squeeze(-1)


def make_batch(step):
    """The rows of a step follow from its number alone, whoever trains it."""
    draws = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(BATCH, WIDTH, generator=draws)
    return inputs, inputs.square().sum(-1) / WIDTH


def make_accelerator(strategy):
    if not torch.cuda.is_available():  # GPUs need none of this
        torch.distributed.init_process_group("gloo")
        PartialState(cpu=True)
        if strategy == "FSDP2":  # which accelerate 1.15 (state.py) has for no CPU: it would train DDP without a word
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    if strategy != "FSDP2":
        return Accelerator()
    wrapped = {"auto_wrap_policy": "transformer_based_wrap", "reshard_after_forward": True}
    return Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **wrapped))


def state_of(model, optimizer, *, is_whole=False):
    """Weights and moments by name, each process its part or, if `is_whole`, all; every process must call."""
    options = StateDictOptions(full_state_dict=is_whole, cpu_offload=is_whole)
    weights, moments = get_state_dict(model, optimizer.optimizer, options=options)
    return {"weights": weights, "moments": moments}


def digests(model, optimizer):
    """A digest of each whole tensor, by its path; empty but on rank 0."""
    state = state_of(model, optimizer, is_whole=True)
    tensors = dict(state["weights"])
    for name, moments in state["moments"].get("state", {}).items():
        tensors |= {f"{name} {kind}": tensor for kind, tensor in moments.items()}
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def train(strategy, leg, folder, is_mistaken):
    """Trains a leg from the state in `folder`, and saves there. Returns its losses, and digests of its two ends."""
    accelerator = make_accelerator(strategy)
    world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    assert world == PROCESSES[strategy], f"{world} processes train"
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    begin, end = leg
    if begin:
        state = state_of(model, optimizer)
        parts = {"weights": state["weights"]} if is_mistaken else state
        checkpoint.load(parts, checkpoint_id=f"{folder}/{begin}")  # into the tensors of this strategy
        set_state_dict(model, optimizer.optimizer, model_state_dict=state["weights"], optim_state_dict=state["moments"])
    first, losses = digests(model, optimizer), []
    for step in range(begin, end):
        inputs, targets = (rows[rank::world].to(device) for rows in make_batch(step))
        loss_sum = (model(inputs) - targets).square().sum()
        accelerator.backward(loss_sum * world / BATCH)  # the engine takes the mean of processes
        optimizer.step()
        optimizer.zero_grad()
        losses.append((accelerator.reduce(loss_sum.detach(), reduction="sum") / BATCH).item())
    checkpoint.save(state_of(model, optimizer), checkpoint_id=f"{folder}/{end}")
    last = digests(model, optimizer)
    time.sleep(0.1)  # gloo's threads free the last tensors: once Python ends that would abort (torch 2.13)
    accelerator.end_training()
    return {"losses": losses, "first": first, "last": last}


def launch(strategy, leg, folder, is_mistaken=False):
    """Run `train` in new processes, and return what it returns on rank 0."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if torch.cuda.device_count() < 2:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES[strategy])]
    words = [__file__, json.dumps([strategy, leg, folder, is_mistaken]), f"{folder}.json"]
    subprocess.run([sys.executable, *torchrun, *words], env=environment, check=True, stdout=subprocess.DEVNULL)
    return json.loads(Path(f"{folder}.json").read_text(encoding="utf-8"))


def main():
    with tempfile.TemporaryDirectory() as folder:
        reference = launch("one process", (0, STEPS), f"{folder}/reference")["losses"]
        print(f"{'trained under':40}  tensors that came back otherwise  losses off by")
        tries = [(order, False) for order in (("FSDP2", "one process", "DDP"), ("DDP", "FSDP2", "one process"))]
        for order, is_mistaken in [*tries, (tries[0][0], True)]:
            ends = [launch(name, LEGS[i : i + 2], f"{folder}/run", is_mistaken) for i, name in enumerate(order)]
            pairs = [(before["last"], after["first"]) for before, after in itertools.pairwise(ends)]
            others = [name for last, first in pairs for name in last if last[name] != first.get(name)]
            losses = [loss for end in ends for loss in end["losses"]]
            off = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
            total = sum(len(last) for last, _ in pairs)
            name = ", ".join(order) + ", weights alone" * is_mistaken
            print(f"{name:40}  {len(others):20} of {total:3} {off:18.0e}")
            assert total == 2 * 4 * len(list(Model().parameters())), "weights, two moments and a count of steps each"
            assert bool(others) == is_mistaken, others
            assert (off > 100 * TOLERANCE) if is_mistaken else (off < TOLERANCE), f"{name} is {off} away"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        result = train(*json.loads(sys.argv[1]))
        if os.environ["RANK"] == "0":
            Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
