"""FSDP2: each parameter a DTensor, sharded by rows, alone or with replicas of the shards (HSDP)."""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from cookbook.system.replaced import count_calls, replace_function
from cookbook.training.engine.as_read import Shards, each_weight
from cookbook.training.engine.base import Engine
from cookbook.training.engine.findings import Comparison, is_sharded
from cookbook.training.engine.fsdp import Fsdp
from cookbook.training.engine.start import shard_while_loading, start_processes


class Fsdp2(Fsdp):
    casts_output = True
    """True if the output of a layer has its dtype from FSDP2."""

    def _plugin(self, *, on_cpu: bool) -> Any:
        block, low, reduce = self._block, self.low_dtype, self._reduce_dtype
        # accelerate's default rounds the returned loss sum to bf16 (8.3240 for 8.3414) and reduces gradients in it.
        policy = reduce and MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=reduce, output_dtype=torch.float32 if low else None
        )
        return FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy=block.fsdp_auto_wrap_policy,
            reshard_after_forward=block.fsdp_reshard_after_forward,
            cpu_ram_efficient_loading=block.fsdp_cpu_ram_efficient_loading,
            cpu_offload=CPUOffloadPolicy(pin_memory=not on_cpu) if block.fsdp_offload_params else None,
            mixed_precision_policy=policy,
        )

    @property
    def _device_of_gradients(self) -> torch.device | None:
        return torch.device("cpu") if self._block.fsdp_offload_params else None

    _shards: Shards | None = None
    """Shards that a model in 4 bits has read, until FSDP2 has them."""

    def reading(self, *, is_quantized: bool) -> contextlib.AbstractContextManager:
        if not is_quantized:
            return super().reading(is_quantized=is_quantized)
        count, adapter = self.mesh.num_shards, self.recipe.adapter
        self._shards = Shards(
            self.world.rank % count,
            count,
            torch.device("cpu") if self._block.fsdp_offload_params else self.device,
            keeps_whole=adapter is not None and bool(adapter.modules_to_save),
        )
        return each_weight(self._shards.take)

    def _wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        if any(hasattr(parameter, "quant_state") for parameter in model.parameters()):
            _gather_as_bytes()
        shards = {} if self._shards is None else self._shards.remove_from(model)
        with self._saved_buffers_sent(model):
            wrapped = super()._wrap(model, optimizer)
        _fill(wrapped[0], shards)
        self._shards = None
        if self.low_dtype is not None:
            _cast_between_units(wrapped[0], self.low_dtype)
        return wrapped

    @contextlib.contextmanager
    def _saved_buffers_sent(self, model: torch.nn.Module) -> Iterator[None]:
        """Send rank 0's values of the buffers that a checkpoint holds, such as the biases of DeepSeek-V3's router.
        Collective.

        accelerate 1.15 sends the state dict as if all of it were sharded parameters (fsdp_utils.py,
        fsdp2_load_full_state_dict); buffers outside of the state dict it leaves as they are.
        """
        saved = [
            (module, name)
            for module in model.modules()
            for name, _ in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]
        for module, name in saved:
            sent = getattr(module, name).to(self.device)
            dist.broadcast(sent, src=0)
            module.register_buffer(name, sent, persistent=False)
        yield
        for module, name in saved:
            module._non_persistent_buffers_set.discard(name)

    @contextlib.contextmanager
    def _synchronise(self, last: bool) -> Iterator[None]:
        """Reduce-scatter inside a shard group each time; all-reduce between replicas at the last micro-batch."""
        # Not set_requires_gradient_sync(last): whole gradients in float32 would stay until the last micro-batch, which
        # is the memory that FSDP2 saves.
        self.model.set_requires_all_reduce(last)
        if self.gradient_dtype is None:
            yield
            return
        _leave_sums_in_float32()
        waiting = [group for group in _groups(self.model) if group._partial_reduce_output is not None]
        yield
        if not last:
            self._keep_sums_in_float32(waiting)

    def _keep_sums_in_float32(self, waiting: list[Any]) -> None:
        """Make FSDP2 add up in float32 the gradients that wait for the exchange with the replicas.

        It would add in the dtype of the exchange, and lose what is small beside the sum (torch 2.13,
        _fsdp_collectives.py, foreach_reduce). On the stream on which it adds.

        Args:
            waiting: the groups whose sums were in float32 before this micro-batch.

        Raises:
            RuntimeError: the sum of one is not any more.
        """
        for group in waiting:
            if (dtype := group._partial_reduce_output.dtype) is not torch.float32:
                raise RuntimeError(f"FSDP2 has rounded the sum of gradients of {group._module_fqn} to {dtype}")
        for group in _groups(self.model):
            if group._partial_reduce_output is not None:
                with group.device_handle.stream(group.comm_ctx.reduce_scatter_stream):
                    group._partial_reduce_output = group._partial_reduce_output.float()

    def _reduce_in_gradient_dtype(self, model: torch.nn.Module) -> None:
        """Change what transformers, which reduces in float32, applied. Before the first forward, which reads it."""
        if self.gradient_dtype is not None:
            for place in _policies(_groups(model)):
                place.mp_policy = replace(place.mp_policy, reduce_dtype=self.gradient_dtype)

    def _end_evaluation(self) -> None:
        super()._end_evaluation()
        for unit in self._units():
            unit.reshard()

    def _units(self) -> list[Any]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def _meshes(self) -> set[tuple[int, ...]]:
        """The shapes of the parameters' device meshes: those of norms, which tensor parallel leaves whole, and of
        matrices.
        """
        sharded = (self.mesh.num_shards,)
        mesh = (self.mesh.replicate, *sharded) if self.mesh.replicate > 1 else sharded
        return {mesh, (*mesh, self.mesh.tensor)} if self.mesh.tensor > 1 else {mesh}

    def _findings(self) -> Iterator[Comparison]:
        yield from super()._findings()
        model: Any = self.model
        if FSDPModule not in type(model).__mro__:
            yield "wrapper", "FSDPModule", type(model).__name__
            return
        yield "whole parameters", 0, sum(not is_sharded(parameter) for parameter in model.parameters())
        yield "mesh", self._meshes(), {tuple(p.device_mesh.shape) for p in model.parameters() if isinstance(p, DTensor)}
        # FSDP2 replaces the class of a module by a subclass of another name, so look at the bases. A layer may hold
        # another, as a hybrid's of Zamba2 does.
        names = set(model._no_split_modules)
        every = [module for module in model.modules() if names & {base.__name__ for base in type(module).__mro__}]
        layers: list[Any] = [module for module in every if isinstance(module, FSDPModule)]
        yield "layers that are units", len(every), len(layers)
        # torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, class FSDPParamGroup
        groups: list[Any] = [unit._get_fsdp_state()._fsdp_param_group for unit in layers]
        reshards = {group.post_forward_mesh_info is not None for group in groups}
        yield "reshard after forward", {self._block.fsdp_reshard_after_forward}, reshards
        policies = {
            (place.mp_policy.param_dtype, place.mp_policy.reduce_dtype, place.mp_policy.output_dtype)
            for place in _policies(groups)
        }
        output = torch.float32 if self.low_dtype and self.casts_output else None
        dtypes = self.low_dtype, self._reduce_dtype, output
        yield "dtypes of a layer's weights, reductions and output", {dtypes}, policies
        offloaded = {type(group.offload_policy).__name__ for group in groups}
        asked = "CPUOffloadPolicy" if self._block.fsdp_offload_params else "OffloadPolicy"
        yield "parameter offload", {asked}, offloaded


class Fsdp2WhileRead(Fsdp2):
    """FSDP2 that transformers applies before it reads the weights, to what another dimension of the mesh left of them:
    accelerate has no part in it.
    """

    casts_output = False

    def _start(self, *, on_cpu: bool, **options: Any) -> Accelerator:
        start_processes(self.timeout, as_gpus=True)
        return Engine._start(self, on_cpu=on_cpu, **options)

    def load_options(self, *, is_quantized: bool) -> dict[str, Any]:
        # Before the adapter, which so has to join the groups that are there: applied after it, FSDP2 would need each
        # process to hold its whole share of the model first.
        return shard_while_loading(self.mesh, fsdp_mixed_precision=self.mixed_precision == "bf16")

    def _wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        self._complete(model, optimizer)
        return model, self.accelerator.prepare(optimizer)

    def _complete(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Finish what transformers left to do. Before the first forward."""
        shard_late(model, optimizer)
        gather_tied_once(model)
        self._reduce_in_gradient_dtype(model)


def _groups(model: torch.nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters, each of which is gathered and reduced together."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from _groups_of(module._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    """A unit's groups of parameters. In torch 2.10 it has one at most, under another name
    (_fsdp_state.py, `FSDPState`)."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _policies(groups: Iterable[Any]) -> Iterator[Any]:
    """Holders of the dtypes of each group, as `mp_policy`: the group, since torch 2.15 each of its parameters
    (_fsdp_param_group.py, `FSDPParamGroup`)."""
    for group in groups:
        yield from [group] if hasattr(group, "mp_policy") else group.fsdp_params


def _set_groups(state: Any, groups: list[Any]) -> None:
    if hasattr(state, "_fsdp_param_groups"):
        state._fsdp_param_groups[:] = groups
    else:
        state._fsdp_param_group = groups[0] if groups else None


@functools.cache
def _leave_sums_in_float32() -> None:
    """Have FSDP2 not cast a sum that waits for the exchange with the replicas to the dtype of the exchange, as it does
    since torch 2.15 (_fsdp_param_group.py, FSDPParamGroup). Releases before leave it as it is.
    """
    if prepare := getattr(FSDPParamGroup, "_prepare_partial_reduce_output", None):
        replace_function(
            FSDPParamGroup,
            "_prepare_partial_reduce_output",
            lambda group, params, sizes, dtype: prepare(group, params, sizes, torch.float32),
        )


def _fill(model: torch.nn.Module, shards: dict[tuple[torch.nn.Module, str], torch.Tensor]) -> None:
    """Give parameters that FSDP2 has sharded without data this process's shards of them, in place."""
    for group in _groups(model):
        for held in group.fsdp_params:
            place = held._module_info
            if held.sharded_param.is_meta:
                own = shards.pop((place.module, place.param_name))
                held.sharded_param = torch.nn.Parameter(held.to_sharded_dtensor(own), requires_grad=False)
                held._setattr_on_modules(held.sharded_param)
                held.reset_sharded_param()


def shard_late(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Shard the parameters that came after FSDP2, those of an adapter, in model and optimizer, in place. Before the
    first forward.

    FSDP2 shards what a unit has when it is applied to it, and is applied to a unit once. So each parameter joins those
    of the innermost unit that it is in, with which it is gathered and reduced, as if it had been there. The whole model
    may have had none of its own, beside embedding and head: then these are its first.
    """
    first = next(_groups(model))  # of embedding or layer: the experts of a layer, on another mesh, come after it
    places = [held._module_info for group in _groups(model) for held in group.fsdp_params]
    known = {getattr(place.module, place.param_name) for place in places}
    sharded: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in reversed(list(model.modules())):  # what is inside of a unit first
        late = [parameter for parameter in module.parameters() if parameter not in known]
        if not isinstance(module, FSDPModule) or not late:
            continue
        state: Any = module._get_fsdp_state()
        own = _groups_of(state)
        group = own[0] if own else first
        # Not a unit for each adapter: that is one more gather and one more reduction a layer. This group is only made
        # for its shards, which join the unit's own.
        made = type(group)(
            late,
            (module,),
            group.mesh_info,
            group.post_forward_mesh_info,
            group.device,
            None,
            next(_policies([group])).mp_policy,
            group.offload_policy,
        )
        if own:
            group.fsdp_params += made.fsdp_params
        else:
            _set_groups(state, [made])
        sharded |= zip(late, (held.sharded_param for held in made.fsdp_params), strict=True)
        known |= set(sharded.values())
    for settings in optimizer.param_groups:
        settings["params"] = [sharded.get(parameter, parameter) for parameter in settings["params"]]


def gather_tied_once(model: torch.nn.Module) -> None:
    """Have FSDP2 gather a tied weight once, for all modules that have it. Before the first forward.

    transformers 5.23 applies FSDP2 to embedding and head before it ties them (distributed/fsdp.py,
    apply_fully_sharded_data_parallelism), and torch 2.13 then keeps two states of what has become one parameter. If its
    rows do not divide evenly each pads a copy, and one is never updated.
    """
    owners: dict[torch.nn.Parameter, Any] = {}
    for module in reversed(list(model.modules())):  # the root, which has what others left, comes last
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        for group in _groups_of(state):
            for held in list(group.fsdp_params):
                place = held._module_info
                owner = owners.setdefault(getattr(place.module, place.param_name), held)
                if owner is not held:
                    owner._module_info.shared_modules.append(place.module)
                    owner._module_info.shared_param_names.append(place.param_name)
                    group.fsdp_params.remove(held)
        _set_groups(state, [group for group in _groups_of(state) if group.fsdp_params])


def _cast_between_units(model: torch.nn.Module, low: torch.dtype) -> None:
    """Have torch's own modules that lie outside of all units but the root, such as Gemma 4's projection of what its
    layers get beside their input, take their input in the dtype of their gathered weights: units return float32, which
    torch's products and norms refuse beside 16 bits.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    inside = {module for unit in units for module in unit.modules()}
    for module in model.modules():
        if module not in inside and type(module).__module__.startswith("torch.nn.modules") and module._parameters:
            module.register_forward_pre_hook(count_calls(partial(_cast_inputs, low), "modules between FSDP2's units"))


def _cast_inputs(low: torch.dtype, _: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.to(low) if torch.is_tensor(value) and value.is_floating_point() else value for value in inputs)


def _gather_as_bytes() -> None:
    """Have FSDP2 gather all weights of this process as bytes.

    4-bit weights lie in 16-bit floats here, and CUDA's `_foreach_copy_`, with which FSDP2 fills the buffer that it
    gathers, gives every NaN among them the same bits (bitsandbytes issue 1945; losses seen on an H100). FSDP2 itself
    takes bytes where dtypes differ (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_all_gather`).
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    read: Any = collectives._get_all_gather_input_metadatas

    def as_bytes(inputs: list[list[torch.Tensor]]) -> tuple[list[list[torch.dtype]], list[list[int]], torch.dtype]:
        dtypes, sizes, _ = read(inputs)
        return dtypes, sizes, torch.uint8

    replace_function(collectives, "_get_all_gather_input_metadatas", as_bytes)
