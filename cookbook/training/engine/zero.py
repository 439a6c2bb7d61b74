"""ZeRO through DeepSpeed: optimizer state, gradients (stage 2) and weights (stage 3) sharded, on GPU, host or NVMe."""

import contextlib
import importlib
import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin
from transformers import PreTrainedConfig

from cookbook.config.optim.orthogonal import Run
from cookbook.config.strategy import Strategy, exchange_precision
from cookbook.facts.meshes import share_of_weight
from cookbook.facts.score_head import empty_model
from cookbook.start.ds_config import deepspeed_config, separate_swap
from cookbook.system import lock
from cookbook.system.files import RecipeError
from cookbook.system.imports import imports
from cookbook.system.replaced import check_function, count_calls
from cookbook.training.engine import state
from cookbook.training.engine.as_read import each_weight
from cookbook.training.engine.base import DTYPES, Engine, StepResult
from cookbook.training.engine.findings import Comparison
from cookbook.training.engine.loss_scale import LossScale


def build_ops(strategy: Strategy, cache: Path) -> None:
    """Compile DeepSpeed's asynchronous I/O for NVMe offload, once per machine, before a process group could time out
    over it: it takes minutes the first time. Does nothing for other strategies.

    Raises:
        RecipeError: compiler or headers are missing. `launch.check_machine` has checked what a GPU needs.
    """
    if not strategy.offloads_to_nvme:
        return
    from deepspeed.ops.op_builder import AsyncIOBuilder

    # ninja is installed beside the interpreter, which is not on PATH unless the environment was activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # A folder of our own: in torch's, a lock file that is removed below could be another program's, and in use.
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str((cache / "torch_extensions").resolve())))
    folder.mkdir(parents=True, exist_ok=True)
    with lock.making(folder / "cookbook.lock"):
        if not AsyncIOBuilder().is_compatible(verbose=False):
            needs = "a C++ compiler, libaio and its headers: apt-get install g++ libaio-dev"
            raise RecipeError(f"{strategy.path}: NVMe offload needs {needs}")
        # A killed build leaves a lock that torch waits for endlessly (torch/utils/cpp_extension.py, FileBaton). Under
        # our own lock it can only be a stale one.
        for stale in folder.glob("**/lock"):
            stale.unlink()
        AsyncIOBuilder().load(verbose=False)


def import_deepspeed() -> ModuleType:
    """DeepSpeed 0.19.8, without what it imports for features that are not used here: mlflow for its autotuner, and
    torch's compiler for its Muon, a class that each engine compares with (zero/utils.py, is_zero_supported_optimizer).
    """
    hides_mlflow = "mlflow" not in sys.modules
    with imports():
        if hides_mlflow:
            sys.modules["mlflow"] = None  # type: ignore[assignment]
        try:
            import deepspeed
            from deepspeed.runtime import compiler
        finally:
            if hides_mlflow:
                del sys.modules["mlflow"]
        compiled, compiler.compile = compiler.compile, lambda: lambda function: function
        try:
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        finally:
            compiler.compile = compiled
    return deepspeed


class Zero(Engine):
    """`self.model` is DeepSpeed's engine, `self.model.optimizer` its ZeRO optimizer."""

    def _start(self, *, on_cpu: bool, **options: Any) -> Accelerator:
        deepspeed = import_deepspeed()
        config = deepspeed_config(self.strategy, self.plan, self.recipe)
        assert config is not None
        self.deepspeed_config = config
        self.swap_folders = separate_swap(config, self.recipe.run.output_dir)
        self._swap_seen = not self.swap_folders
        if on_cpu:
            # A shared-memory collective that takes 80 s to compile at first use; gloo does as well.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # PartialState reads the environment, not the plugin
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        PartialState(timeout=self.timeout, **({"backend": "gloo"} if on_cpu else {}))
        steps = self.plan.gradient_accumulation_steps
        # on_cpu=False: with cpu=True accelerate 1.15 excludes DeepSpeed (state.py, AcceleratorState).
        return super()._start(on_cpu=False, deepspeed_plugin=plugin, gradient_accumulation_steps=steps)

    @property
    def _is_stage3(self) -> bool:
        return self.strategy.zero_stage == 3

    def fit_to(self, config: PreTrainedConfig) -> None:
        """Fill in the size of the buffers of weights on NVMe, each of which must hold a process's share of any weight
        (deepspeed 0.19.8, swap_tensor/partitioned_param_swapper.py, `get_buffer`).
        """
        if self.strategy.zero.get("offload_param", {}).get("buffer_size") != "auto":
            return
        with torch.device("meta"):
            largest = max(weight.numel() for weight in empty_model(config).parameters())
        size, plugin = share_of_weight(largest, self.plan.num_processes), self.accelerator.state.deepspeed_plugin
        for settings in (self.deepspeed_config, plugin.deepspeed_config):
            settings["zero_optimization"]["offload_param"]["buffer_size"] = size
        plugin.set_deepspeed_weakref()  # a copy, by which transformers has stage 3 shard what it reads

    def load_options(self, *, is_quantized: bool) -> dict[str, Any]:
        """Stage 3 shards each weight as it is created."""
        return {} if self._is_stage3 else super().load_options(is_quantized=is_quantized)

    def reading(self, *, is_quantized: bool) -> contextlib.AbstractContextManager:
        """transformers 5.23 has DeepSpeed shard while it creates a model, unless that is in 4 bits
        (modeling_utils.py, get_init_context).
        """
        if self._is_stage3 and not is_quantized:
            return self._partition_at_creation()
        if not self._is_stage3:
            return super().reading(is_quantized=is_quantized)
        from deepspeed.runtime.zero.partition_parameters import Init
        from transformers.integrations import deepspeed_config as config_in_force

        # Of a module without parameters, for the linear layers that it puts in the place of torch's.
        init = Init(module=torch.nn.Module(), config_dict_or_path=config_in_force())

        def partition(module: torch.nn.Module, _: str, weight: torch.nn.Parameter) -> torch.nn.Parameter:
            init._convert_to_zero_parameters([weight])  # not a second time, where it is tied
            return weight

        return each_weight(partition)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        from transformers.integrations import deepspeed as of_transformers

        config: Any = of_transformers._hf_deepspeed_config_weak_ref
        of_transformers._hf_deepspeed_config_weak_ref = None  # by which transformers has stage 3 shard what it reads
        try:
            yield
        finally:
            of_transformers._hf_deepspeed_config_weak_ref = config

    @contextlib.contextmanager
    def _partition_at_creation(self) -> Iterator[None]:
        """The code of some models draws weights by their rows or shapes (RWKV, Youtu), or divides a matrix of the files
        by the rows of its weights (Sarvam, Lara), of which a cut one has none.
        """
        try:
            yield
        except (IndexError, RuntimeError) as error:
            if isinstance(error, IndexError):
                why = f"cannot draw weights that are cut ({error})"
            elif "split_with_sizes" in str(error):
                why = "divides a matrix of the files by the sizes of weights, which are cut here"
            else:
                raise
            raise RecipeError(f"{self.strategy.path}: transformers' code of this model {why}; use fsdp2") from error

    def _wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        if self._is_stage3:
            _gather_for_readers(model)
        wrapped = super()._wrap(model, optimizer)
        if self._is_stage3:
            _ask_for_gradients(model)
        if self.loss_scale is not None:
            # DeepSpeed 0.19.8 (runtime/fp16/loss_scaler.py, update_scale) doubles its scale a step after its window,
            # torch at it; one rule replaces both.
            wrapped[0].optimizer.loss_scaler = _ruled_scaler(self.loss_scale)
        self._with_gradient: set[torch.Tensor] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                count_calls(self._with_gradient.add, "the gradients of parameters")
            )
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        return wrapped

    def prepare(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, counts_beside: str | None = None
    ) -> None:
        super().prepare(model, optimizer, counts_beside=counts_beside)
        self._look_before_updates(self.model.optimizer)
        if hasattr(self.base_optimizer, "read_flat"):
            self.base_optimizer.read_flat(dict(self._runs()), self.device)

    def _look_before_updates(self, zero: Any) -> None:
        """Read a step's numbers, and look at its gradients if they are unusual, between their norm and the update,
        which takes them apart: DeepSpeed's step updates the loss scale there, of every precision (zero/stage3.py,
        `step`, and stage_1_and_2.py, `step`).
        """
        from deepspeed.runtime.utils import combine_grad_norm_groups

        of_norm = "_get_norm_groups" if self._is_stage3 else "scaled_global_norm"
        for name in (of_norm, "_update_scale"):
            check_function(type(zero), name)
        norm_of, update_scale = getattr(zero, of_norm), zero._update_scale
        norms: list[Any] = []

        def with_norm() -> Any:
            norms[:] = [norm_of()]
            return norms[0]

        def after_norm(overflowed: bool) -> None:
            norm: Any = math.nan
            if not overflowed:
                norm = (combine_grad_norm_groups(norms[0]) if self._is_stage3 else norms[0]) / zero.loss_scale
            shares, values = self._numbers
            result = self._result(shares, self.collectives.all_gather(*shares.values(), norm, *values))
            self._stepped = replace(result, unusual=self._unusual(result.grad_norm))
            update_scale(overflowed)

        setattr(zero, of_norm, with_norm)
        zero._update_scale = after_norm

    def _squares(self) -> Iterator[tuple[str, torch.Tensor | float]]:
        zero, parts = self.model.optimizer, self.world.num_processes
        names = {id(parameter): name for name, parameter in self.trained_parameters()}
        groups = zero.fp16_groups if self._is_stage3 else zero.params_in_partition
        for i, group in enumerate(groups):
            if self.strategy.offload_optimizer:  # DeepSpeed has them already
                norms = [zero.norm_for_param_grads.get(zero.get_param_id(parameter), 0.0) for parameter in group]
            else:
                # Behind those of the parameters lie the zeros that fill the share of the last process.
                held = zero.averaged_gradients[i][: len(group)]
                norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in held]
            yield from ((names[id(parameter)], parts * norm**2) for parameter, norm in zip(group, norms, strict=True))

    def unreached_parameters(self) -> list[str]:
        names = super().unreached_parameters()
        while self._hooks:
            self._hooks.pop().remove()
        return names

    def _is_reached(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._with_gradient  # DeepSpeed takes a gradient away as soon as it has come

    def _synchronise(self, last: bool) -> contextlib.AbstractContextManager:
        # The last step of an epoch may have fewer micro-batches than gradient_accumulation_steps.
        self.model.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def _backward(self, loss: torch.Tensor) -> None:
        # Not accelerator.backward, which under DeepSpeed steps as well, before clipping and the check of the norm.
        self.model.backward(loss, scale_wrt_gas=False)

    def _update(self, shares: dict[str, torch.Tensor], values: tuple[float, ...]) -> StepResult:
        self._numbers = shares, values
        self.model.step()  # skips the update itself if the norm is not finite
        self._let_gathers_wait()
        if not self._swap_seen and not self.model.optimizer.overflow:
            self._assert_swapped()
        return self._stepped

    def _let_gathers_wait(self) -> None:
        """Let the next step's gathers of stage 3, which have a stream of their own, wait for the update: DeepSpeed
        0.19.8 does where it gathers small weights that stay whole (stage3.py, `_post_step`), and nowhere else.
        """
        if self._is_stage3:
            coordinator = self.model.optimizer.parameter_offload.param_coordinator
            gathers = coordinator._PartitionedParameterCoordinator__allgather_stream
            if gathers is not None:
                gathers.wait_stream(torch.cuda.current_stream())

    def _assert_swapped(self) -> None:
        """Check after the first step that state meant for NVMe is there, but for what DeepSpeed takes for too small."""
        self._swap_seen = True
        optimizer = self.swap_folders.get("offload_optimizer")
        # An adapter's state may be too small to be swapped; its frozen weights are.
        has_state = all(parameter.requires_grad for parameter in self.model.parameters())
        swapped = list(optimizer.glob(f"**/optimizer/rank{self.world.rank}/*.swp")) if optimizer else []
        if optimizer is not None and has_state and not swapped:
            raise RuntimeError(
                f"{self.strategy.path} is not what runs: no optimizer state reached {optimizer}. Tensors under 1 MiB"
                " (or the JSON's aio.block_size) stay in memory, so a model this small has no use for NVMe: take"
                " zero3_offload"
            )
        parameters = self.swap_folders.get("offload_param")
        if (
            parameters is not None
            and any(parameter.nvme_swapper.swappable_tensor(parameter) for parameter in self.model.parameters())
            and not list(parameters.glob("**/*params/**/*.swp"))
        ):
            raise RuntimeError(f"{self.strategy.path} is not what runs: no parameter reached {parameters}")

    def close(self) -> None:
        super().close()
        if self.world.local_rank == 0:
            for folder in self.swap_folders.values():
                shutil.rmtree(folder, ignore_errors=True)

    # State.

    @property
    def base_optimizer(self) -> Any:
        return self.model.optimizer.optimizer

    def _apply_loss_scale(self, scale: float) -> None:
        self.model.optimizer.loss_scaler.cur_scale = scale

    def held_pieces(self, create: state.KindsOf | None = None) -> Iterator[state.Piece]:
        return self._sub_group_pieces(create) if self._is_stage3 else self._partition_pieces(create)

    def _replicated_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that ranks hold whole: in stages 1 and 2 all of the forward's; in stage 3 the smallest."""
        for name, parameter in self.trained_parameters():
            if not self._is_stage3 or parameter.ds_status.name == "AVAILABLE":  # type: ignore[attr-defined]
                yield f"{state.WEIGHT} of {name}", parameter

    def _runs(self) -> Iterator[tuple[torch.Tensor, list[Run]]]:
        """Yield the runs of parameters in each flat tensor that the optimizer updates."""
        zero = self.model.optimizer
        run_of = self._run_in_sub_group if self._is_stage3 else self._run_in_partition
        flats = zero.fp32_partitioned_groups_flat if self._is_stage3 else zero.single_partition_of_fp32_groups
        groups = zero.fp16_groups if self._is_stage3 else zero.bit16_groups
        for i, (flat, group) in enumerate(zip(flats, groups, strict=True)):
            runs = [run_of(parameter, i) for parameter in group]
            yield flat, [run for run in runs if run.length or run.is_split]

    def _run_in_partition(self, parameter: Any, i: int) -> Run:
        """Stages 1 and 2: see `_partition_pieces`."""
        zero, mapping, shape = self.model.optimizer, parameter._hp_mapping, tuple(parameter.shape)
        is_split = len(zero.param_to_partition_ids[i][zero.get_param_id(parameter)]) > 1
        if mapping is None:
            return Run(shape=shape, start=0, place=0, length=0, is_split=is_split)
        start, held = mapping.lp_fragment_address.start, mapping.hp_fragment_address
        return Run(shape=shape, start=start, place=held.start, length=held.numel, is_split=is_split)

    def _run_in_sub_group(self, parameter: Any, i: int) -> Run:
        """Stage 3: see `_sub_group_pieces`."""
        place, start, length = self._part_of(parameter, i)
        is_split = self.world.num_processes > 1
        return Run(shape=tuple(parameter.ds_shape), start=start, place=place, length=length, is_split=is_split)

    def _part_of(self, parameter: Any, i: int) -> tuple[int, int, int]:
        """Stage 3: offset of this rank's part in the flat tensor of sub-group `i`, its first element, its length."""
        # Sub-group, offset in its flat tensor, and length with padding (stage3.py, set_grad_positions).
        index, offset, _ = self.model.optimizer.grad_position[self.model.optimizer.get_param_id(parameter)]
        assert index == i
        part = parameter.ds_tensor.ds_numel
        start = min(self.world.rank * part, parameter.ds_numel)
        return offset, start, min(part, parameter.ds_numel - start)

    def _partition_pieces(self, create: state.KindsOf | None) -> Iterator[state.Piece]:
        """Stages 1 and 2: a group's parameters lie end to end in a flat tensor, partitioned over the ranks."""
        moments = state.Moments(self.base_optimizer)
        for name, parameter in self.trained_parameters():
            # utils/tensor_fragment.py, tensor_fragment: lp is the whole 16-bit parameter, hp this rank's float32 part.
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:  # all of it is on other ranks
                continue
            flat = self.model.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
            held = {state.WEIGHT: flat.detach(), **moments.of(flat, create and create(name))}
            place = mapping.hp_fragment_address
            parts = {kind: tensor.narrow(0, place.start, place.numel) for kind, tensor in held.items()}
            yield from state.flat_pieces(name, parameter.shape, mapping.lp_fragment_address.start, parts)
        moments.keep(create)

    def _sub_group_pieces(self, create: state.KindsOf | None) -> Iterator[state.Piece]:
        """Stage 3: every rank has an equal part of each parameter, the last padded; sub-groups may lie on NVMe."""
        zero = self.model.optimizer
        moments = state.Moments(self.base_optimizer)
        names = {id(parameter): name for name, parameter in self.trained_parameters()}
        # else the optimizer's groups are empty (stage3.py, _clear_fp32_optimizer_param_groups)
        zero._set_fp32_optimizer_param_groups()
        try:
            for i, group in enumerate(zero.fp16_groups):
                with _swap_in(zero, i, changed=create is not None):
                    for parameter in group:
                        name, flat = names[id(parameter)], zero.fp32_partitioned_groups_flat[i]
                        held = {state.WEIGHT: flat.detach(), **moments.of(flat, create and create(name))}
                        offset, start, length = self._part_of(parameter, i)
                        if length > 0:
                            parts = {kind: tensor.narrow(0, offset, length) for kind, tensor in held.items()}
                            yield from state.flat_pieces(name, parameter.ds_shape, start, parts)
                    moments.keep(create)
        finally:  # the run may continue after a save that failed
            zero._clear_fp32_optimizer_param_groups()

    def _finish_restore(self, num_updates: int | None) -> None:
        super()._finish_restore(num_updates)
        zero = self.model.optimizer
        if self._is_stage3:
            for i in range(len(zero.fp16_groups)):
                with _swap_in(zero, i, changed=True):
                    zero._reassign_or_swap_out_partitioned_parameters(i)
            for parameter in zero.persistent_parameters:
                parameter.partition()
            if zero.persistent_parameters:
                zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
            zero.invalidate_secondary_tensor()
            self._let_gathers_wait()
            return
        from deepspeed.runtime.utils import all_gather_dp_groups

        # As at the end of DeepSpeed's step (stage_1_and_2.py, `step`): each rank copies its part, and all-gathers the
        # others.
        for i, master in enumerate(zero.single_partition_of_fp32_groups):
            rank = dist.get_rank(zero.real_dp_process_group[i])
            zero.parallel_partitioned_bit16_groups[i][rank].data.copy_(master.data)
        all_gather_dp_groups(
            groups_flat=zero.bit16_groups_flat,
            partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
            dp_process_group=zero.real_dp_process_group,
            start_alignment_factor=zero.nccl_start_alignment_factor,
            allgather_bucket_size=zero.allgather_bucket_size,
        )

    def _findings(self) -> Iterator[Comparison]:
        from deepspeed import DeepSpeedEngine

        strategy, plan, model = self.strategy, self.plan, self.model
        yield "wrapper", "DeepSpeedEngine", type(model).__name__
        if not isinstance(model, DeepSpeedEngine):
            return
        config, zero = self.deepspeed_config, model._config.zero_config
        yield "ZeRO stage", strategy.zero_stage, model.zero_optimization_stage()
        for name in ("offload_optimizer", "offload_param"):
            block = getattr(zero, name)
            is_off = block is None or block.device == "none"
            yield name, getattr(strategy, name), None if is_off else str(getattr(block.device, "value", block.device))
        yield "micro-batch size", config["train_micro_batch_size_per_gpu"], model.train_micro_batch_size_per_gpu()
        yield "gradient accumulation", plan.gradient_accumulation_steps, model.gradient_accumulation_steps()
        yield "clipping", self.max_grad_norm, model.gradient_clipping()
        found_precision = "bf16" if model.bfloat16_enabled() else "fp16" if model.fp16_enabled() else "no"
        yield "precision", self.mixed_precision, found_precision
        exchange = exchange_precision(strategy, self.mixed_precision, self.recipe.optim.gradient_dtype)
        asked_dtype = DTYPES.get(exchange, torch.float32)
        yield "dtype of exchanged gradients", asked_dtype, getattr(model.optimizer, "communication_data_type", None)
        wrapper = "DeepSpeedZeroOptimizer_Stage3" if self._is_stage3 else "DeepSpeedZeroOptimizer"
        yield "optimizer wrapper", wrapper, type(model.optimizer).__name__
        yield "data-parallel processes", self.plan.num_processes, dist.get_world_size(model.data_parallel_group)
        asked, in_force = config["zero_optimization"], zero.model_dump(by_alias=True)
        open_keys = {key for key, value in asked.items() if value == "auto"}  # by the model's hidden size
        for key in sorted(asked.keys() & in_force.keys() - {"stage", "offload_optimizer", "offload_param"} - open_keys):
            yield f"zero_optimization.{key}", asked[key], in_force[key]
        size = asked.get("offload_param", {}).get("buffer_size")
        for swapper in _swappers_of_weights(model) if size is not None else ():
            yield "elements of a buffer of weights", size, swapper.elements_per_buffer
        for name, handle in _aio_handles(model):
            for key, value in config.get("aio", {}).items():
                yield f"aio.{key}, {name}", value, getattr(handle, f"get_{key}")()
        partitioned = [hasattr(parameter, "ds_tensor") for parameter in model.parameters()]
        yield "partitioned parameters", self._is_stage3, all(partitioned)
        if self._is_stage3:
            persistent = zero.param_persistence_threshold
            states = {p.ds_status.name for p in model.parameters() if p.ds_numel > persistent}
            yield "parameters between steps", {"NOT_AVAILABLE"}, states or {"NOT_AVAILABLE"}
        if (group := asked.get("zero_hpz_partition_size", 1)) > 1:
            sizes = {parameter.ds_secondary_tensor_group_size for parameter in model.parameters()}
            yield "processes that share a second copy of the weights", {group}, sizes


def _ruled_scaler(rule: LossScale) -> Any:
    """DeepSpeed's loss scaler with the scale of `rule`."""
    from deepspeed.runtime.fp16.loss_scaler import LossScalerBase

    class RuledScaler(LossScalerBase):
        def update_scale(self, overflow: bool) -> None:
            rule.update(overflowed=bool(overflow))
            self.cur_scale = rule.scale

    return RuledScaler(rule.scale)


def _gather_for_readers(model: torch.nn.Module) -> None:
    """Have stage 3 gather all weights inside of a module that reads them itself when its forward begins. Otherwise it
    gathers those of each module at that one's own forward, and an adapter's of stacked experts have none.
    """
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module

    for module in model.modules():
        if getattr(module, "reads_weights_inside", False):
            set_z3_leaf_module(module, True)


def _ask_for_gradients(model: torch.nn.Module) -> None:
    """Have an input of each module that DeepSpeed gathers as a whole (blocks of experts, by their class, and those of
    `_gather_for_readers`) need a gradient. Where none does, as before the first adapter of a model, torch calls a
    module's backward hook before its weights have their gradients, which DeepSpeed 0.19.8 takes in that hook
    (stage3.py, `reduce_leaf_module_grads`).
    """
    from deepspeed.utils import z3_leaf_module

    def ask(_: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        given = dict(enumerate(inputs)) | named
        floats = {
            place: value for place, value in given.items() if torch.is_tensor(value) and value.is_floating_point()
        }
        if torch.is_grad_enabled() and floats and not any(value.requires_grad for value in floats.values()):
            place = next(iter(floats))
            given[place] = floats[place].detach().requires_grad_()
        return tuple(given[place] for place in range(len(inputs))), {name: given[name] for name in named}

    for module in model.modules():
        if z3_leaf_module(module):
            module.register_forward_pre_hook(ask, prepend=True, with_kwargs=True)


@contextlib.contextmanager
def _swap_in(zero: Any, i: int, *, changed: bool) -> Iterator[None]:
    """Swap a sub-group's state in from NVMe, if it is there, and always release its buffers, which are few."""
    if not zero._swappable_optimizer_subgroup(i):
        yield
        return
    zero._optimizer_states_and_gradient_swap_in(i)
    try:
        yield
    finally:
        if changed:
            zero._optimizer_states_and_gradient_swap_out(i)
        else:
            zero._release_swap_buffers(i)


def _swappers_of_weights(model: Any) -> list[Any]:
    """DeepSpeed's one swapper of weights, or none."""
    return [*filter(None, (getattr(parameter, "nvme_swapper", None) for parameter in [*model.parameters()][:1]))]


def _aio_handles(model: Any) -> Iterator[tuple[str, Any]]:
    """DeepSpeed's handles for swap files, which hold the settings of their I/O threads."""
    of_states = getattr(model.optimizer, "optimizer_swapper", None)
    for swapper in (*filter(None, [of_states]), *_swappers_of_weights(model)):
        for name in ("aio_handle", "read_aio_handle", "write_aio_handle", "aio_read_handle", "aio_write_handle"):
            handle = getattr(swapper, name, None)
            # `aio_handle` of the parameters' swapper is the class.
            if hasattr(handle, "get_block_size") and not isinstance(handle, type):
                yield f"{type(swapper).__name__}.{name}", handle
