"""Weights that are cut as soon as each is read, so that no process ever has all of them.

For frozen weights in 4 bits: each process reads and quantizes every weight, whole, since the scales of its blocks are
quantized together, and keeps its part before the next one is read.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import modeling_utils

from cookbook.system.files import RecipeError


@contextlib.contextmanager
def each_weight(replace: Callable[[torch.nn.Module, str, torch.nn.Parameter], torch.nn.Parameter]) -> Iterator[None]:
    """Put `replace(module, name, weight)` in the place of each weight that transformers reads inside of this context,
    one after the other (transformers 5.23, core_model_loading.py, convert_and_load_state_dict_in_model: a model that it
    quantizes is read without threads).
    """

    is_called = False

    def register(module: torch.nn.Module, name: str, weight: torch.nn.Parameter | None) -> torch.nn.Parameter | None:
        nonlocal is_called
        # Transformers reads into weights without data; others are of a model that is made meanwhile, to try packing on.
        before = module._parameters.get(name)
        if before is None or not before.is_meta:
            return None
        is_called = True
        return None if weight is None or weight.is_meta else replace(module, name, weight)

    # It would reserve the memory of the whole model on the GPU, to read faster.
    warm_up = modeling_utils.caching_allocator_warmup
    modeling_utils.caching_allocator_warmup = lambda *arguments: None
    # Its annotation lacks the parameter that a hook may return (torch/nn/modules/module.py, register_parameter).
    handle = register_module_parameter_registration_hook(register)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
        modeling_utils.caching_allocator_warmup = warm_up
    if not is_called:
        raise RecipeError("no weight of the model passed by while it was read; see docs/upgrade.md")


class Shards:
    """This process's shards of weights, by stand-ins of the same shape without data."""

    def __init__(self, rank: int, count: int, device: torch.device, *, keeps_whole: bool) -> None:
        """
        Args:
            rank: which of `count` equal shards of the rows this process keeps, on `device`.
            keeps_whole: leave weights outside of 4 bits that are no vectors as they are, since some will be trained.
        """
        self._rank, self._count, self._device, self._keeps_whole = rank, count, device, keeps_whole
        self._shards: dict[torch.nn.Parameter, torch.Tensor] = {}

    def take(self, module: torch.nn.Module, _: str, weight: torch.nn.Parameter) -> torch.nn.Parameter:
        """The stand-in for a weight, on the CPU, where adapters beside it are made."""
        is_whole = self._keeps_whole and isinstance(module, torch.nn.Embedding | torch.nn.Linear)
        if weight in self._shards or (is_whole and not hasattr(weight, "quant_state")):
            return weight
        chunks = weight.data.chunk(self._count)
        own = chunks[self._rank] if self._rank < len(chunks) else weight.data[:0]
        parameter = _like(weight, torch.empty((), dtype=weight.dtype).expand(weight.shape))
        self._shards[parameter] = torch.empty(own.shape, dtype=own.dtype, device=self._device).copy_(own)
        weight.data = weight.data.new_empty(0)  # transformers holds it until the next one is read
        return parameter

    def remove_from(self, model: torch.nn.Module) -> dict[tuple[torch.nn.Module, str], torch.Tensor]:
        """Replace the stand-ins in a model by others on the meta device, which FSDP2 shards without data.

        Returns:
            The shard of each module's parameter. The weights are then those of the caller.
        """
        metas = {
            weight: _like(weight, torch.empty(weight.shape, dtype=weight.dtype, device="meta"))
            for weight in self._shards
        }
        places = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter in metas:
                    module.register_parameter(name, metas[parameter])
                    places[module, name] = self._shards[parameter]
        return places


def _like(weight: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """A parameter of the same kind with other data: bitsandbytes and peft ask one in 4 bits for its scales."""
    parameter = type(weight)(data, requires_grad=weight.requires_grad)
    parameter.__dict__.update(weight.__dict__)
    return parameter
