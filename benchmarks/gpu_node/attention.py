"""FlashAttention 3 or 4, as torch 2.13 calls it, beside torch's own kernel, on one GPU: attention.py FA3 NEAR LENGTH...

Prints a line of JSON: `distances` from float32 at NEAR tokens, of what a layer's attention returns and of the gradients
of queries, keys and values, and `seconds` of a forward with its backward for each LENGTH; of both kernels, packed and
padded, with the heads of an 8B model. Exits with 2 on a GPU that the kernel does not serve.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn.attention import activate_flash_attention_impl

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cookbook.training.models.attention import Lengths, Segments, attend  # noqa: E402

SERVED = {"FA3": (9,), "FA4": (9, 10)}
"""Major compute capabilities, by torch's nn/attention/_fa3.py and _fa4.py."""
HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
REPEATS = 5
LAYOUTS = ("packed", "padded")


def tensors(layout: str, length: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, Segments | None]:
    """Queries, keys and values with the gradient of what is made of them; packed, with one sample of a quarter."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, length, HEAD_DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    drawn = [torch.randn(shape, generator=generator).bfloat16() for shape in (*shapes, (1, length, HEADS, HEAD_DIM))]
    *inputs, gradient = [tensor.to("cuda", dtype) for tensor in drawn]
    if layout == "padded":
        return inputs, gradient, None
    lengths = (length // 4, length - length // 4)
    offsets = torch.tensor([0, lengths[0], length], dtype=torch.int32, device="cuda")
    return inputs, gradient, Segments(offsets, lengths[1], Lengths(lengths))


def results(layout: str, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    inputs, gradient, segments = tensors(layout, length, dtype)
    query, key, value = leaves = [tensor.requires_grad_() for tensor in inputs]
    output, _ = attend(torch.nn.Module(), query, key, value, None, segments=segments)
    output.backward(gradient)
    return [output.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)]


def seconds(layout: str, length: int) -> float:
    inputs, gradient, segments = tensors(layout, length, torch.bfloat16)
    query, key, value = (tensor.requires_grad_() for tensor in inputs)
    taken = []
    for _ in range(REPEATS + 1):  # the first, which loads kernels, is not counted
        torch.cuda.synchronize()
        start = time.perf_counter()
        attend(torch.nn.Module(), query, key, value, None, segments=segments)[0].backward(gradient)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def measured(near: int, lengths: list[int], exact: dict[str, list[torch.Tensor]]) -> dict[str, object]:
    """Distances and seconds of the active kernel."""
    distances: dict[str, list[float]] = {}
    for layout in LAYOUTS:
        pairs = zip(results(layout, near, torch.bfloat16), exact[layout], strict=True)
        distances[layout] = [(result - other).abs().max().item() for result, other in pairs]
    return {
        "distances": distances,
        "seconds": {f"{length} {layout}": seconds(layout, length) for length in lengths for layout in LAYOUTS},
    }


def main() -> None:
    name, near, *lengths = sys.argv[1], *map(int, sys.argv[2:])
    major, minor = torch.cuda.get_device_capability()
    if major not in SERVED[name]:
        print(f"this GPU has compute capability {major}.{minor}; it needs {' or '.join(map(str, SERVED[name]))}")
        sys.exit(2)
    exact = {layout: results(layout, near, torch.float32) for layout in LAYOUTS}
    kernels = {"default": measured(near, lengths, exact)}
    activate_flash_attention_impl(name)
    kernels[name] = measured(near, lengths, exact)
    print(json.dumps(kernels), flush=True)
    os._exit(0)  # with all measured: of ten ends on simulated GPUs one was an abort, "terminate called without ..."


if __name__ == "__main__":
    main()
