"""A model whose weights stay in its files: read for the layer that computes, and dropped after it."""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers.core_model_loading import revert_weight_conversion

from cookbook.facts.language_part import language_key, open_config, whole_config
from cookbook.facts.score_head import auto_class, is_scored
from cookbook.training.checkpoint.tensors import CHUNK, DTYPES, TensorFile, Weight, files_of
from cookbook.training.checkpoint.write_model import saved_buffers

PROBE_TOKENS = 16
"""Length of the input on which two models' logits are compared."""


class StreamedModel:
    """A model in float32 on the CPU; of a model with a tower, its language part."""

    def __init__(self, model: Any, places: dict[str, tuple[TensorFile, str]]) -> None:
        """
        Args:
            model: parameters on the meta device, buffers on the CPU.
            places: file and key of each parameter and saved buffer.
        """
        self.model, self._places = model, places
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, buffer in model.named_buffers():
            if name in places:
                buffer.copy_(self._read(name).view(buffer.shape))

    @classmethod
    def open(cls, folder: Path) -> "StreamedModel | None":
        """None if its files do not have each tensor as it is in memory: experts that are stacked there, or the names
        and dtypes of others.
        """
        config = open_config(folder)
        with init_empty_weights(include_buffers=False):
            model = auto_class(config).from_config(copy.deepcopy(config), dtype=torch.float32)
        model.tie_weights()
        named = dict(model.named_parameters()) | saved_buffers(model)
        names = {id(tensor): name for name, tensor in named.items()}
        keys = {names.get(id(tensor)): key for key, tensor in revert_weight_conversion(model, dict(named)).items()}
        is_part = whole_config(folder) is not None
        files = {language_key(key) if is_part else key: (file, key) for key, file in files_of(folder).items()}
        try:
            places = {name: files[keys[name]] for name in named}
        except KeyError:
            return None
        pairs = ((named[name].shape, file.tensors[key]) for name, (file, key) in places.items())
        is_direct = all(list(shape) == entry["shape"] and entry["dtype"] in DTYPES for shape, entry in pairs)
        return cls(model, places) if is_direct else None

    def weight(self, name: str) -> Weight:
        """A parameter as it is in the files."""
        file, key = self._places[name]
        shape: list[int] = file.tensors[key]["shape"]
        size = torch.Size(shape).numel()

        def parts(dtype: torch.dtype) -> Iterator[torch.Tensor]:
            for begin in range(0, size, CHUNK):
                part = torch.empty(min(CHUNK, size - begin))
                file.read(key, begin, part)
                yield part.to(dtype)

        return Weight(shape, parts)

    def tensors_of(self, module: torch.nn.Module) -> list[str]:
        """Names of the parameters that a module itself has in the files."""
        return [key for key, parameter in module.named_parameters(recurse=False) if id(parameter) in self._names]

    def keep_filled(self, *modules: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """The parameters of these modules, and of all in them, in memory."""
        return self._keep_filled(module for root in modules for module in root.modules())

    @contextlib.contextmanager
    def _keep_filled(self, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
        empty = [
            (module, key, parameter)
            for module in modules
            for key, parameter in module.named_parameters(recurse=False)
            if id(parameter) in self._names
        ]
        self._fill(empty)
        try:
            yield
        finally:
            for module, key, parameter in empty:
                module._parameters[key] = parameter

    def _fill(self, empty: Iterable[tuple[torch.nn.Module, str, torch.nn.Parameter]]) -> None:
        read: dict[int, torch.nn.Parameter] = {}  # tied ones once
        for module, key, parameter in empty:
            if id(parameter) not in read:
                tensor = self._read(self._names[id(parameter)]).view(parameter.shape)
                read[id(parameter)] = torch.nn.Parameter(tensor, requires_grad=False)
            module._parameters[key] = read[id(parameter)]

    def _read(self, name: str) -> torch.Tensor:
        file, key = self._places[name]
        tensor = torch.empty(file.tensors[key]["shape"])
        file.read(key, 0, tensor)
        return tensor

    def probe_logits(self) -> torch.Tensor:
        """The logits of `probe_logits`, with one layer and all that is outside of the layers in memory."""
        classes = set(self.model._no_split_modules or ())
        layers = [module for module in self.model.modules() if type(module).__name__ in classes]
        inside = {id(module) for layer in layers for module in layer.modules()}
        outside = [module for module in self.model.modules() if id(module) not in inside]
        with contextlib.ExitStack() as stack:
            for layer in layers:
                stack.enter_context(self._fill_in_forward(layer))
            stack.enter_context(self._keep_filled(outside))
            return probe_logits(self.model)

    @contextlib.contextmanager
    def _fill_in_forward(self, layer: torch.nn.Module) -> Iterator[None]:
        filled = contextlib.ExitStack()
        before = layer.register_forward_pre_hook(lambda *_: filled.enter_context(self.keep_filled(layer)))
        after = layer.register_forward_hook(lambda *_: filled.close())
        try:
            yield
        finally:
            before.remove()
            after.remove()


@torch.no_grad()
def probe_logits(model: Any) -> torch.Tensor:
    """Logits (1, PROBE_TOKENS, V) on the first tokens of the vocabulary, or the scores of four sequences of them."""
    rows = 4 if is_scored(model.config) else 1
    return model.eval()(input_ids=torch.arange(PROBE_TOKENS).view(rows, -1)).logits.float()
