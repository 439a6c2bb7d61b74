"""One of Liger's kernels in a model of Qwen3-0.6B's widths, on one GPU: `python liger.py rope` prints its loss.

`none` is the model as it is. The launches of the CUDA kernels are waited for, so that an error names its own.
"""

import os
import sys

os.environ["CUDA_LAUNCH_BLOCKING"] = "1"

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

KERNELS = ("rope", "rms_norm", "swiglu")
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "head_dim": 128, "vocab_size": 8192}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8}


def main() -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS)).cuda()
    tokens = torch.randint(8192, (8, 2048), device="cuda")
    if sys.argv[1] != "none":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance  # type: ignore[import-not-found]

        chosen = {name: name == sys.argv[1] for name in KERNELS}
        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False, **chosen)
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    print(f"loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
