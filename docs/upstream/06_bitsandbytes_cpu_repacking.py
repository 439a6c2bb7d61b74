"""On a CPU with AVX512-BF16, one evaluation takes the gradient away from all that lies before a 4-bit layer.

python 06_bitsandbytes_cpu_repacking.py
"""

import bitsandbytes
import torch

torch.manual_seed(0)
first = torch.nn.Linear(64, 64)  # an adapter, say: what is trained
frozen = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
frozen.weight = bitsandbytes.nn.Params4bit(torch.randn(64, 64), requires_grad=False, quant_type="nf4")
model = torch.nn.Sequential(first, frozen).to("cpu")
inputs = torch.randn(8, 64)


def gradient() -> str:
    model.train().zero_grad()
    output = model(inputs)
    if not output.requires_grad:
        return "none: the output does not require one"
    output.square().mean().backward()
    return "none" if first.weight.grad is None else f"norm {first.weight.grad.norm():.4f}"


print("the CPU has AVX512-BF16:", frozen.support_avx512bf16_for_cpu)
print("gradient before the evaluation:", gradient())
with torch.no_grad():
    model.eval()(inputs)
print("repacked:", getattr(frozen.weight.quant_state, "packing_format_for_cpu", False))
print("gradient after the evaluation: ", gradient())
