"""A fine-tuning loop as accelerate's documentation writes it; a program of the race, benchmarks/vs_peers.py."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

from benchmarks.peers.with_trainer import tokenize


def train(settings: dict[str, Any], accelerator: Accelerator) -> list[dict[str, float]]:
    """The mean loss of the labelled tokens of all processes, step by step."""
    name, arguments = settings["model"], settings["arguments"]
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False, use_safetensors=True)
    if arguments["gradient_checkpointing"]:
        model.gradient_checkpointing_enable()
    rows = tokenize(load_dataset("json", data_files=settings["data"], split="train"), tokenizer)
    batch_size = arguments["per_device_train_batch_size"]
    loader = DataLoader(rows, batch_size=batch_size, collate_fn=DataCollatorForSeq2Seq(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments["learning_rate"], weight_decay=0.0, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses: list[torch.Tensor] = []
    for batch in loader:
        # As in "gradient accumulation with samples of variable size": a mean over the tokens of all processes.
        num_labels = accelerator.gather((batch["labels"] != -100).sum()).sum()
        loss = model(**batch, num_items_in_batch=num_labels).loss * accelerator.num_processes
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(accelerator.reduce(loss.detach(), "mean"))
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) == arguments["max_steps"]:
            break
    return [{"loss": loss.item()} for loss in losses]


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    accelerator = Accelerator(cpu=settings["cpu"], mixed_precision=settings["precision"])
    log = train(settings, accelerator)
    if accelerator.is_main_process:
        Path("log.json").write_text(json.dumps(log), encoding="utf-8")
    accelerator.end_training()


if __name__ == "__main__":
    main()
