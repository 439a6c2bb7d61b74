"""The idea of this project in one page of plain Accelerate, PyTorch and DeepSpeed: a strategy never changes the curve.

    python examples/one_curve.py

trains one tiny language model on one process, and on two processes with two micro-batches each under DDP, DeepSpeed
ZeRO-3 and FSDP2. The four curves are equal. Then it makes the usual mistake under each of the three, the mean of the
micro-batches' mean losses, and gets another curve: samples differ in length, so a token of a short micro-batch counts
more than one of a long micro-batch, and the number of processes decides which samples share a micro-batch.

It uses two GPUs, or two CPU processes where there are fewer. All numbers are in float32.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.nn.utils.rnn import pad_sequence

STEPS, BATCH, VOCABULARY, WIDTH = 12, 16, 61, 32
IGNORED = -100
PROCESSES = {"one process": 1, "DDP": 2, "ZeRO-3": 2, "FSDP2": 2}
TOLERANCE = 1e-5
"""Each strategy adds up in another order, which float32 rounds. The mistake is a thousand times larger."""


def make_samples():
    """Sequences of 4 to 40 tokens, the same on every process. A token is the one before it, plus 1, 2 or 3."""
    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 41, (STEPS * BATCH,), generator=draws).tolist()
    return [torch.randint(1, 4, (length,), generator=draws).cumsum(0) % VOCABULARY for length in lengths]


def make_batch(samples):
    """Inputs (B, T), and as labels the next tokens, which are ignored beyond the end of a sample."""
    inputs = pad_sequence([tokens[:-1] for tokens in samples], batch_first=True)
    return inputs, pad_sequence([tokens[1:] for tokens in samples], batch_first=True, padding_value=IGNORED)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(gelu(self.up(hidden)))


class Model(nn.Module):
    _no_split_modules = ("Layer",)  # FSDP2 shards these one by one

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, inputs):
        return self.head(self.layers(self.embedding(inputs)))


def make_accelerator(strategy, micro_batches):
    if not torch.cuda.is_available():  # GPUs need none of this
        torch.distributed.init_process_group("gloo")
        PartialState(cpu=True)
        if strategy == "FSDP2":  # which accelerate 1.15 (state.py) has for no CPU: it would train DDP without a word
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugins = {}
    if strategy == "ZeRO-3":
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}  # 0: shard small weights too
        counts = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches}
        plugins["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config={**counts, "zero_optimization": zero})
    if strategy == "FSDP2":
        wrapped = {"auto_wrap_policy": "transformer_based_wrap", "reshard_after_forward": True}
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **wrapped)
    return Accelerator(gradient_accumulation_steps=micro_batches, **plugins)


def held_weights(model):
    """The number of weights that this process keeps between steps."""
    shards = [getattr(weight, "ds_tensor", weight) for weight in model.parameters()]  # ZeRO-3
    return sum((getattr(shard, "_local_tensor", shard)).numel() for shard in shards)  # FSDP2


def train(strategy, is_mean_of_means):
    """The loss of each step over all tokens of its global batch, and how many weights a process holds."""
    micro_batches = 1 if PROCESSES[strategy] == 1 else 2
    accelerator = make_accelerator(strategy, micro_batches)
    world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    assert world == PROCESSES[strategy], f"{world} processes train"
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    samples, curve = make_samples(), []
    for step in range(STEPS):
        mine = samples[step * BATCH : (step + 1) * BATCH][rank::world]
        batches = [make_batch(mine[i::micro_batches]) for i in range(micro_batches)]

        # What the idea is: the tokens that the global batch trains, of all processes and all micro-batches.
        num_tokens = sum((labels != IGNORED).sum() for _, labels in batches).float().to(device)
        num_tokens = accelerator.reduce(num_tokens, reduction="sum")

        total = torch.zeros((), device=device)
        for inputs, labels in batches:
            with accelerator.accumulate(model):
                logits, labels = model(inputs.to(device)).flatten(0, 1), labels.to(device).flatten()
                loss_sum = cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
                total += loss_sum.detach()
                if is_mean_of_means:
                    loss = loss_sum / (labels != IGNORED).sum()
                else:  # backward() takes the mean of micro-batches, and the engine of processes: undo both, divide once
                    loss = loss_sum * micro_batches * world / num_tokens
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        curve.append((accelerator.reduce(total, reduction="sum") / num_tokens).item())
    time.sleep(0.1)  # gloo's threads free the last tensors: once Python ends that would abort (torch 2.13)
    accelerator.end_training()
    return {"curve": curve, "held": held_weights(model)}


def launch(strategy, is_mean_of_means=False):
    """Run `train` in new processes, and return what it returns on rank 0."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if torch.cuda.device_count() < 2:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES[strategy])]
        words = [__file__, strategy, "mean of means" if is_mean_of_means else "", f"{folder}/result.json"]
        subprocess.run([sys.executable, *torchrun, *words], env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))


def main():
    reference, shown = launch("one process"), (0, 3, 7, STEPS - 1)
    print(f"{'loss at step':24}", *(f"{step + 1:8}" for step in shown), " weights held  off by at most")
    for is_mistaken in (False, True):
        for strategy in PROCESSES if not is_mistaken else ("DDP", "ZeRO-3", "FSDP2"):
            result = launch(strategy, is_mistaken)
            off = max(abs(a - b) for a, b in zip(result["curve"], reference["curve"], strict=True))
            print(
                f"{strategy + ', mean of means' * is_mistaken:24}",
                *(f"{result['curve'][i]:8.5f}" for i in shown),
                end="",
            )
            print(f" {result['held']:13} {off:10.0e}")
            assert (result["held"] < reference["held"]) == (strategy in ("ZeRO-3", "FSDP2")), "what is sharded is not"
            assert (off > 100 * TOLERANCE) if is_mistaken else (off < TOLERANCE), f"{strategy} is {off} away"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        strategy, mistake, file = sys.argv[1:]
        result = train(strategy, bool(mistake))
        if os.environ["RANK"] == "0":
            Path(file).write_text(json.dumps(result), encoding="utf-8")
