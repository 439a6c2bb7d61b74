"""Runs train.py and stops before its third update, with the bytes that this process holds by then.

Every process writes FOLDER/held-<rank>.json. Usage: held_bytes.py FOLDER [arguments of train.py]

What is walked are the engines' own objects, each storage once. What lies in which memory follows from the object, since
without a GPU everything lies in one.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import train

KINDS = ("weights", "masters", "gradients", "moments", "buffers")


class Count:
    """Bytes by place and kind; a storage counts where it is met first."""

    def __init__(self) -> None:
        self.bytes = {place: dict.fromkeys(KINDS, 0) for place in ("gpu", "host", "disk")}
        self.seen: set[int] = set()

    def add(self, place: str, kind: str, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            storage = plain(tensor).untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self.seen:
                self.seen.add(storage.data_ptr())
                self.bytes[place][kind] += storage.nbytes()

    def add_slices(self, place: str, kind: str, tensors: Iterable[Any]) -> None:
        """Adds tensors that are slices of a file in memory: the slices alone, which is what a GPU gets."""
        for tensor in map(plain, tensors):
            self.seen.add(tensor.untyped_storage().data_ptr())
            self.bytes[place][kind] += tensor.numel() * tensor.element_size()


def plain(tensor: Any) -> Any:
    """This process's part of a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)


def state_tensors(optimizer: Any) -> Iterator[Any]:
    import torch

    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def quantization(model: Any) -> Iterator[Any]:
    """The constants beside 4-bit weights: a parameter carries them, or its module where FSDP replaced that."""
    packed = (tensor for module in model.modules() for tensor in getattr(module, "packed", {}).values())
    for owner in (*model.parameters(), *model.modules(), *packed):
        state = getattr(owner, "quant_state", None)
        while state is not None:
            yield from (tensor for tensor in (state.absmax, state.code, state.offset) if tensor is not None)
            state = state.state2


def count_plain(engine: Any, count: Count) -> None:
    """DDP, FSDP, tensor parallel, one process: parameters, their gradients and the optimizer's state."""
    strategy = engine.strategy
    place = "host" if strategy.fsdp is not None and strategy.fsdp.fsdp_offload_params else "gpu"
    parameters = list(engine.model.parameters())
    if strategy.tp_size > 1 or strategy.is_sharded_while_read:
        count.add_slices(place, "weights", parameters if strategy.fsdp is None else padded(engine.model))
    else:
        count.add(place, "weights", parameters)
    if strategy.kind == "fsdp1":  # what is not trained may still be in its gathered form, which is no parameter
        flat = [handle.flat_param for handle in engine.model._all_handles]
        count.add(place, "weights", flat)
    count.add("gpu", "weights", quantization(engine.model))
    count.add(place, "gradients", (p.grad for p in parameters if p.grad is not None))
    if strategy.kind == "fsdp2":
        sums = (group._partial_reduce_output for group in fsdp2_groups(engine.model))
        count.add(place, "gradients", (tensor for tensor in sums if tensor is not None))
    count.add(place, "moments", state_tensors(engine.optimizer.optimizer))
    count.add("gpu", "buffers", engine.model.buffers())


def padded(model: Any) -> Iterator[Any]:
    """FSDP2's shards with their padding, of which parameters are views (torch 2.13, FSDPParam)."""
    for group in fsdp2_groups(model):
        yield from (parameter._sharded_param_data for parameter in group.fsdp_params)


def fsdp2_groups(model: Any) -> Iterator[Any]:
    """Until the last micro-batch HSDP keeps its sums in them, beside the parameters (torch 2.13, FSDPParamGroup)."""
    from torch.distributed.fsdp import FSDPModule

    distinct: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            distinct |= {id(group): group for group in groups if group is not None}  # two modules may share one
    yield from distinct.values()


def count_zero12(engine: Any, count: Count) -> None:
    zero = engine.model.optimizer
    place = "host" if zero.cpu_offload else "gpu"
    count.add("gpu", "weights", zero.bit16_groups_flat)
    count.add("gpu", "weights", engine.model.parameters())
    count.add("gpu", "weights", quantization(engine.model))
    count.add(place, "masters", zero.single_partition_of_fp32_groups)
    if zero.cpu_offload:
        count.add("host", "gradients", (flat.grad for flat in zero.single_partition_of_fp32_groups))
        count.add("host", "gradients", zero.accumulated_grads_in_cpu.values())
        count.add("host", "buffers", zero.param_buffer_of_bit16_for_cpu_offload_groups)
        count.add("host", "buffers", [zero.temp_grad_buffer_for_cpu_offload])
        count.add("gpu", "buffers", [zero.temp_grad_buffer_for_gpu_offload])
    for gradients in (*zero.averaged_gradients.values(), *zero.all_grad_tensors.values()):
        count.add("gpu", "gradients", gradients or [])
    for group in zero.bit16_groups:
        summands = (tensor for p in group for tensor in (p.grad, getattr(p, "grad_accum", None)))
        count.add("gpu", "gradients", (tensor for tensor in summands if tensor is not None))
    count.add(place, "moments", state_tensors(zero.optimizer))
    count.add("gpu", "buffers", (buffer for bucket in zero.ipg_buckets.values() for buffer in bucket.buffer))
    count.add("gpu", "buffers", engine.model.buffers())


def count_zero3(engine: Any, count: Count) -> None:
    zero = engine.model.optimizer
    offloads, swaps = zero.offload_param, zero.params_in_nvme_and_cpu
    parameters = list(engine.model.parameters())
    if swaps:  # between layers a partition is a placeholder
        swapper = parameters[0].nvme_swapper
        count.add("host", "buffers", [swapper.buffers, *filter(is_tensor, [swapper.partitioned_swap_buffer])])
        count.add("host", "buffers", [swapper.invalid_buffer])
    count.add("host" if offloads else "gpu", "weights", (p.ds_tensor for p in parameters))
    count.add("host" if offloads else "gpu", "weights", (f for f in zero.fp16_partitioned_groups_flat if f is not None))
    # With one process what is available is the part itself; of one on the host, a GPU would have a copy.
    add = count.add_slices if offloads and engine.world.num_processes == 1 else count.add
    add("gpu", "weights", (p.data for p in parameters if p.ds_status.name == "AVAILABLE"))
    count.add("gpu", "weights", quantization(engine.model))
    second = (p.ds_secondary_tensor for p in parameters if p.ds_secondary_tensor is not None)
    count.add("host" if offloads else "gpu", "buffers", second)
    place = "host" if zero.offload_optimizer else "gpu"
    count.add(place, "masters", zero.fp32_partitioned_groups_flat)
    count.add(place, "gradients", [zero.grad_partitions_flat_buffer])
    count.add(place, "gradients", (f.grad for f in zero.fp32_partitioned_groups_flat if f.grad is not None))
    for gradients in zero.averaged_gradients.values():
        count.add(place, "gradients", gradients or [])
    count.add(place, "moments", state_tensors(zero.optimizer))
    count.add("gpu", "buffers", (bucket.buffer for bucket in zero.ipg_buckets.values()))
    count.add("host", "buffers", zero.param_groups_fp16_flat_cpu_memory)
    count.add("gpu", "buffers", engine.model.buffers())
    if zero.swap_optimizer:
        count.add("host", "buffers", zero.optimizer_swapper.swap_buffer_manager.all_buffers)
        for swapped_group in zero.optimizer_swapper.swap_params_info.values():
            count.add("host", "gradients", swapped_group.unswapped_gradients.values())
    swapped = engine.swap_folders
    if "offload_param" in swapped:
        files = swapped["offload_param"].glob(f"**/*params/rank{engine.world.rank}/*.swp")
        count.bytes["disk"]["weights"] = sum(path.stat().st_size for path in files)
    if "offload_optimizer" in swapped:
        for path in swapped["offload_optimizer"].glob(f"**/optimizer/rank{engine.world.rank}/*.swp"):
            is_moment = path.name.startswith(("exp_avg", "momentum_buffer"))
            kind = "gradients" if "_gradient_" in path.name else "moments" if is_moment else "masters"
            count.bytes["disk"][kind] += path.stat().st_size


def is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def uncounted(count: Count) -> list[tuple[int, str, list[int]]]:
    """Every other tensor that lives in Python: bytes, dtype and shape, largest first."""
    tensors = []
    for thing in gc.get_objects():
        if is_tensor(thing) and thing.device.type == "cpu":
            try:
                storage = plain(thing).untyped_storage()
                place = storage.data_ptr()
            except (RuntimeError, NotImplementedError):  # a tensor without memory, as torch.compile makes
                continue
            if storage.nbytes() and place and place not in count.seen:
                count.seen.add(place)
                tensors.append((storage.nbytes(), str(thing.dtype), list(thing.shape)))
    return sorted(tensors, reverse=True)


def counted(engine: Any) -> Count:
    count = Count()
    if engine.strategy.kind != "zero":
        count_plain(engine, count)
    elif engine.strategy.zero_stage == 3:
        count_zero3(engine, count)
    else:
        count_zero12(engine, count)
    return count


def held(engine: Any) -> dict[str, Any]:
    count = counted(engine)
    gc.collect()
    time.sleep(0.5)  # gloo's threads let go of what the last collective sent, which no Python object holds
    others = uncounted(count)
    return {**count.bytes, "others": sum(size for size, *_ in others), "largest_others": others[:12]}


def gradient_memory(engine: Any) -> list[int]:
    """Where the gradients lie."""
    gradients = (plain(p.grad) for p in engine.model.parameters() if p.grad is not None)
    return sorted({tensor.untyped_storage().data_ptr() for tensor in gradients})


def stop_at_third_update(folder: Path) -> None:
    """In the third step also notes the gradients on the GPU before the first and the second micro-batch, and whether
    they lie where they lay in the second: DDP's buckets, which Python does not see and DDP makes again after the first
    step, keep their memory.
    """
    from cookbook.training.engine import Engine

    right_gradients, right_step = Engine.gradients, Engine.step
    gradients: list[int] = []
    memory: list[list[int]] = []

    def watched_gradients(engine: Any, *arguments: Any) -> Any:
        beat = engine.beat

        def watched_beat(doing: str, step: int) -> None:
            if step == 3 and doing.startswith(("micro-batch 1 ", "micro-batch 2 ")):
                gradients.append(counted(engine).bytes["gpu"]["gradients"])
            beat(doing, step)

        engine.beat = watched_beat
        shares = right_gradients(engine, *arguments)
        engine.beat = beat
        return shares

    def watched_step(engine: Any, *arguments: Any) -> Any:
        memory.append(gradient_memory(engine))
        if engine.current_step < 3:
            return right_step(engine, *arguments)
        record = held(engine) | {"gradients_before": gradients, "gradients_stay": memory[1] == memory[2]}
        (folder / f"held-{engine.world.rank}.json").write_text(json.dumps(record))
        engine.close()
        sys.stdout.flush()
        os._exit(0)

    Engine.gradients, Engine.step = watched_gradients, watched_step


if __name__ == "__main__":
    stop_at_third_update(Path(sys.argv.pop(1)))
    sys.exit(train.main())
