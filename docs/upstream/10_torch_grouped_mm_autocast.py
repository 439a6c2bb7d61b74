"""Autocast leaves the products of stacked experts in float32.

python 10_torch_grouped_mm_autocast.py
"""

import torch

tokens = torch.randn(32, 64)
weights = torch.randn(4, 64, 32)
ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
with torch.autocast("cpu", torch.bfloat16):
    print("mm:        ", torch.mm(tokens, weights[0]).dtype)
    print("bmm:       ", torch.bmm(tokens.view(4, 8, 64), weights).dtype)
    print("grouped_mm:", torch.nn.functional.grouped_mm(tokens, weights, offs=ends).dtype)
for key in ("AutocastCPU", "AutocastCUDA"):
    print(key, "has a kernel:", torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", key))
