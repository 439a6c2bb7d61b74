"""A model and tensors of your own under the strategy files of this project, in plain Accelerate.

    accelerate launch --config_file accelerate_configs/ddp.yaml examples/own_model.py
    accelerate launch --config_file accelerate_configs/zero3.yaml examples/own_model.py
    accelerate launch --config_file accelerate_configs/fsdp2.yaml examples/own_model.py

It uses your GPUs; the held-out accuracy is the same under each. Files of tensor, sequence, pipeline and expert parallel
(tp, sp, pp, ep) cut the layers of language models, and have no meaning for a module of your own.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH = 10, 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.layers(hidden)


class Classifier(nn.Module):
    _no_split_modules = ("Block",)  # FSDP shards these one by one

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), Block(64), Block(64), nn.Linear(64, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def main() -> None:
    # Each batch of 64 rows is split over the processes, so that their number decides nothing.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True))
    torch.manual_seed(0)  # the same weights, rows and order on every process
    inputs = torch.randn(4096 + 1024, 16)
    rows = TensorDataset(
        inputs, (inputs[:, :8] @ inputs[:, 8:].T).diagonal().mul(0.5).add(1).clamp(0, 2).round().long()
    )
    train, held_out = torch.utils.data.random_split(rows, [4096, 1024])
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    train, held_out = DataLoader(train, BATCH, shuffle=True), DataLoader(held_out, BATCH)
    model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)
    accelerator.print(f"{accelerator.num_processes} processes, {accelerator.distributed_type.value}")
    for epoch in range(1, EPOCHS + 1):
        model.train()
        for x, y in train:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)  # what accelerate makes of "auto" in a DeepSpeed JSON
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = [accelerator.gather_for_metrics(model(x).argmax(-1) == y) for x, y in held_out]
        accelerator.print(f"epoch {epoch}: held-out accuracy {torch.cat(right).float().mean().item():.4f}")
        if epoch % 5 == 0:
            accelerator.save_state(f"outputs/own_model/epoch-{epoch}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
