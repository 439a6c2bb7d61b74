"""Cost of dropout that is drawn for each token, beside torch's: a forward and a backward of a small LoRA.

    python benchmarks/dropout.py

A Llama of some layers with adapters on all linear layers, whose inputs lose 5 %: by nothing, by torch's dropout, by
that of `cookbook/config/draws.py`; layers as they are, and compiled. The best of some rounds, which take turns: seconds
of CPU time on all threads, and how far the process grew. --quick takes small sizes once, uncompiled.
"""

import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loss_of_logits import measure
from cookbook.config.draws import token_words
from cookbook.config.objectives.forward import negative_log_likelihood
from cookbook.config.sections import AdapterSection
from cookbook.training.adapters.insertion import add_adapter
from cookbook.training.models.efficiency import compile_layers
from cookbook.training.models.loss import add_loss
from cookbook.training.models.sample_draws import draw_for_tokens

DROPOUT = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    hidden, tokens, rounds = (64, 64, 1) if args.quick else (args.hidden, args.tokens, args.rounds)
    print(f"{args.layers} layers, hidden size {hidden}, one row of {tokens} tokens; torch {version('torch')}, float32")
    print(f"{torch.get_num_threads()} threads on {os.cpu_count()} cores\n")
    print("| layers | dropout | CPU seconds | peak, MiB |\n|---|---|---|---|")
    batch = {
        "input_ids": torch.randint(512, (1, tokens)),
        "targets": torch.randint(512, (tokens,)),
        "target_positions": torch.arange(tokens),
        "draw_words": torch.from_numpy(token_words(7, 0, 0, tokens))[None],
    }
    for layers in ("as they are",) if args.quick else ("as they are", "compiled"):
        for kind in ("none", "torch's", "for each token"):
            model = model_of(hidden, args.layers, kind, is_compiled=layers == "compiled")

            def step(model: LlamaForCausalLM = model) -> None:
                model.zero_grad(set_to_none=True)
                negative_log_likelihood(model, batch).sum().backward()

            seconds, peak = measure(step, rounds)
            print(f"| {layers} | {kind} | {seconds:.3f} | {peak / 2**20:,.0f} |", flush=True)


def model_of(hidden: int, num_layers: int, dropout: str, *, is_compiled: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 32,
    )
    model = LlamaForCausalLM(config)
    add_loss(model)
    add_adapter(model, AdapterSection(name="lora", dropout=0.0 if dropout == "none" else DROPOUT), seed=0)
    if dropout == "for each token":
        draw_for_tokens(model, 0.0, 0, 1)
    if is_compiled:
        compile_layers(model)
    return model.train()


if __name__ == "__main__":
    main()
