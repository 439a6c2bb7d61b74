"""Compiled layers of a tiny model against those that are not, in one process.

With inductor's graphs, decomposed and cut in two as it does, and without its code, whose kernels on a CPU are others
than those of a GPU and take a minute for each model type.
"""

import importlib
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cookbook.config.sections import AdapterSection, ModelSection  # noqa: E402
from cookbook.facts.served_code import check_layers, served_code  # noqa: E402
from cookbook.training.adapters.insertion import add_adapter  # noqa: E402
from cookbook.training.models.efficiency import compile_counts  # noqa: E402
from cookbook.training.models.language_model import load_model  # noqa: E402
from tests.target_grid import from_grid  # noqa: E402

Recomputed = Literal[False, True, "selective"]
LENGTHS = ((9, 16), (20, 11))
"""Tokens of the rows of two batches, padded to two lengths: for the second one a layer is compiled for any."""
LIMIT_SECONDS = 300


class Failed(Exception):
    """Error that a process ended with; torch's own errors do not travel between processes."""


def compare(folder: Path, recomputed: Recomputed = False, adapter: AdapterSection | None = None) -> dict[str, Any]:
    """Changes that compiling makes to a folder's model, seen in a process that ends with it.

    Args:
        recomputed: as `model.gradient_checkpointing`.

    Returns:
        `loss`: the largest difference of a batch's mean loss; `gradient`: of all gradients, relative to their norm; and
        the counts of `compile_counts`.

    Raises:
        RecipeError: its layers cannot be compiled, or recomputed.
        Failed: any other error, or none in `LIMIT_SECONDS`.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    settings = ModelSection(name_or_path=str(folder), compile=True, gradient_checkpointing=recomputed)
    check_layers(settings, config, served_code(config))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply_async(_compare, (folder, recomputed, adapter)).get(LIMIT_SECONDS)


def _compare(folder: Path, recomputed: Recomputed, adapter: AdapterSection | None) -> dict[str, Any]:
    importlib.import_module("tests.sabotage").compile_without_inductor()
    try:
        plain, compiled = (
            _train(folder, recomputed, adapter, is_compiled=is_compiled) for is_compiled in (False, True)
        )
    except Exception as error:
        raise Failed(f"{type(error).__name__}: {str(error)[:400]}") from None
    (losses, gradients), (others, their_gradients) = plain, compiled
    assert gradients.keys() == their_gradients.keys(), "other weights have a gradient"
    apart = torch.stack([(gradients[name] - their_gradients[name]).norm() for name in gradients]).norm()
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, others, strict=True)),
        "gradient": float(apart / torch.stack([gradient.norm() for gradient in gradients.values()]).norm()),
        **compile_counts(),
    }


def _train(
    folder: Path, recomputed: Recomputed, adapter: AdapterSection | None, *, is_compiled: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Mean losses, and the sum of their gradients."""
    torch.manual_seed(0)
    settings = ModelSection(name_or_path=str(folder), compile=is_compiled, gradient_checkpointing=recomputed)
    model = load_model(str(folder), settings, packing=False)
    if adapter is not None:
        add_adapter(model, adapter, seed=0)
    losses = []
    for batch in _batches():
        of_targets = model(**batch)
        of_targets.mean().backward()
        losses.append(float(of_targets.detach().double().mean()))
    return losses, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def _batches() -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for lengths in LENGTHS:
        samples = [torch.randint(3, 512, (length + 1,), generator=generator) for length in lengths]
        ids = pad_sequence([sample[:-1] for sample in samples], batch_first=True)
        targets = pad_sequence([sample[1:] for sample in samples], batch_first=True, padding_value=-100)
        yield {"input_ids": ids, **from_grid(targets)}
