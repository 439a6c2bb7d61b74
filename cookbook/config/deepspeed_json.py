"""DeepSpeed's JSON: the keys that a strategy may write, and which of them contradict one another."""

import copy
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from cookbook.config.foreign import tables
from cookbook.system.files import Document, PathText, show
from cookbook.system.validation import part


@functools.cache
def facts() -> dict[str, Any]:
    """Names, bounds and defaults of DeepSpeed's own configuration, by benchmarks/deepspeed_facts.py."""
    text = Path(__file__).with_name("deepspeed_facts.json").read_text(encoding="utf-8")
    return cast(dict[str, Any], json.loads(text))


def as_deepspeed_reads(document: Document) -> Document:
    """The document with the names of keys that DeepSpeed prints, and with its defaults where it names a scheduler or an
    optimizer.
    """
    if not isinstance(document.values, dict):
        return document
    return _with_defaults(_with_aliases(document))


def _with_aliases(document: Document) -> Document:
    """The document with aliases in the place of the names of fields, and without null where DeepSpeed takes it for the
    default. An "auto" keeps its name, since accelerate fills in aliases only.
    """
    values, lines = copy.deepcopy(document.values), dict(document.lines)
    for dotted, fields in facts()["blocks"].items():
        path = tuple(dotted.split("."))
        block: Any = values
        for name in path:
            block = block.get(name) if isinstance(block, dict) else None
        if not isinstance(block, dict):
            continue
        for alias, field in fields.items():
            name = field.get("field")
            if name in block and alias not in block and block[name] != "auto":
                block[alias] = block.pop(name)
                lines = {(*path, alias) if at == (*path, name) else at: line for at, line in lines.items()}
            if alias in block and block[alias] is None and field.get("null"):
                del block[alias]
    return replace(document, values=values, lines=lines)


def _with_defaults(document: Document) -> Document:
    """The document with DeepSpeed's own defaults of the scheduler and the optimizer that it names.

    The defaults that are no counterpart of a recipe's key are left out.
    """
    values, assumed = document.values, set()
    for section, kinds in (("scheduler", "schedulers"), ("optimizer", "optimizers")):
        written = values.get(section)
        params = (written.get("params") or {}) if isinstance(written, dict) else None
        if not isinstance(written, dict) or not isinstance(params, dict):
            continue
        kind = str(written.get("type")).lower() + " torch_adam" * (params.get("torch_adam") is True)
        for key, default in facts()[kinds].get(kind, {}).items():
            # whoever trains fills in numbers, and no words
            is_silent = key not in params or (params[key] == "auto" and isinstance(default, str))
            counterpart = tables().projects["deepspeed"].keys.get(f"{section}.params.{key}")
            if is_silent and counterpart is not None and counterpart.ours is not None:
                params = {**params, key: default}
                assumed.add((section, "params", key))
        values = {**values, section: {**written, "params": params}}
    return replace(document, values=values, assumed=frozenset(assumed))


class Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def integer(value: Any, *, choices: str) -> Any:
    if type(value) is not int:  # Literal[1] would accept true
        raise ValueError(f"is {show(value)}; write {choices}")
    return value


def count_or_auto(value: Any, *, auto: str = "one per GPU") -> Any:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError(f"is {show(value)}; use auto ({auto}) or a count from 1")
    return value


def stage_number(value: Any) -> Any:
    if value == 0:
        raise ValueError("is 0, which is DDP: take strategy ddp")
    return integer(value, choices="1, 2 or 3")


BY_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
"""Values that accelerate 1.15 fills in where a JSON has "auto" (accelerator.py, _prepare_deepspeed)."""
MaybeAuto = int | Literal["auto"] | None
"""A size that accelerate or, of `zero_hpz_partition_size` and `buffer_size`, a run fills in."""


class JsonBlock(Block):
    """A block of a DeepSpeed JSON: a key that is left out has DeepSpeed's default, and null is no value."""

    block: ClassVar[str] = ""
    """Place in the JSON, by which its bounds are known."""

    @field_validator("*", mode="before")
    @classmethod
    def _as_deepspeed_reads(cls, value: Any, field: ValidationInfo) -> Any:
        info = cls.model_fields[str(field.field_name)]
        if value is None and not info.is_required():
            raise ValueError("is null; write a value, or take the key out")
        if value == "auto" and not info.is_required() and info.annotation != MaybeAuto:
            raise ValueError("is 'auto', and accelerate fills in none; take it out")
        if "int" not in str(info.annotation) or value == "auto":
            return value
        # 5e8, as DeepSpeed's own pages have it: pydantic makes an integer of a whole number there.
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        if type(value) is not int:
            (usual,) = tables().projects["deepspeed"].fields[f"{cls.block}.{field.field_name}"].default
            way = "or auto" if info.annotation == MaybeAuto else f"as {usual}"
            raise ValueError(f"is {show(value)}; write a whole number, {way}")
        bounds = facts()["blocks"].get(cls.block, {}).get(field.field_name, {})
        least = bounds["gt"] + 1 if "gt" in bounds else bounds.get("ge", value)
        if value < least:
            raise ValueError(f"is {value}; write {least} or more")
        return value


class OffloadBlock(JsonBlock):
    device: Literal["cpu", "nvme"] = Field(examples=["cpu"])
    nvme_path: PathText | None = None
    pin_memory: bool = True
    buffer_count: int | None = None


class OffloadOptimizerBlock(OffloadBlock):
    block = "zero_optimization.offload_optimizer"
    pipeline_read: bool | None = None
    pipeline_write: bool | None = None
    fast_init: bool | None = None


class OffloadParamBlock(OffloadBlock):
    block = "zero_optimization.offload_param"
    buffer_size: MaybeAuto = None
    max_in_cpu: int | None = None


class ZeroBlock(JsonBlock):
    """`zero_optimization`, without the keys that change the result or that DeepSpeed has deprecated."""

    block = "zero_optimization"
    stage: Annotated[Literal[1, 2, 3], BeforeValidator(stage_number)] = Field(examples=[2])
    overlap_comm: bool | None = None
    contiguous_gradients: bool | None = None
    reduce_bucket_size: MaybeAuto = None
    reduce_scatter: bool | None = None
    allgather_bucket_size: int | None = None
    allgather_partitions: bool | None = None
    round_robin_gradients: bool | None = None
    sub_group_size: int | None = None
    stage3_prefetch_bucket_size: MaybeAuto = None
    stage3_param_persistence_threshold: MaybeAuto = None
    stage3_max_live_parameters: int | None = None
    stage3_max_reuse_distance: int | None = None
    zero_hpz_partition_size: MaybeAuto = None
    offload_optimizer: OffloadOptimizerBlock | None = None
    offload_param: OffloadParamBlock | None = None


class AioBlock(JsonBlock):
    block = "aio"
    block_size: int | None = Field(default=None, gt=0)
    queue_depth: int | None = Field(default=None, gt=0)
    intra_op_parallelism: int | None = Field(default=None, gt=0)
    single_submit: bool | None = None
    overlap_events: bool | None = None
    use_gds: bool | None = None


class DataTypesBlock(Block):
    grad_accum_dtype: Literal["fp32"]


def _refuse_forced(value: Any) -> Any:
    if value is True:
        raise ValueError("is true: DeepSpeedCPUAdam is not the optimizer of the other strategies; write false")
    return value


class DeepspeedFile(Block):
    """The keys of a DeepSpeed JSON that a strategy may write, besides those of `strategy_keys`."""

    zero_force_ds_cpu_optimizer: Annotated[bool | None, BeforeValidator(_refuse_forced)] = None
    communication_data_type: Literal["fp32"] | None = None
    data_types: DataTypesBlock | None = None
    zero_optimization: ZeroBlock = Field(examples=[{"stage": 2}])
    aio: AioBlock | None = None


def _asks(key: str, value: Any, block: str = "zero_optimization") -> bool:
    """Return whether a key that some stage or device does not read asks for something."""
    return value not in ("auto", facts()["blocks"][block].get(key, {}).get("default", "auto"))


def check_zero(document: Document) -> Iterator[str]:
    """Keys of the JSON that contradict one another, if its zero_optimization is valid by itself."""
    zero, top = part(document, "zero_optimization", ZeroBlock), document.values
    if zero is None:
        return
    place = partial(document.place, "zero_optimization")
    written = document.values["zero_optimization"]
    given, offload = zero.model_fields_set & {*written}, zero.offload_optimizer  # not what `part` guesses
    if zero.stage == 3:  # its optimizer takes none of these
        for key in sorted({"allgather_bucket_size", "allgather_partitions", "round_robin_gradients"} & given):
            if not _asks(key, getattr(zero, key)):
                continue
            yield f"{place(key)}: stage 3 does not read it; take it out"
    else:
        late = ("offload_param", "sub_group_size", "zero_hpz_partition_size", "stage3_")
        for key in (key for key in ZeroBlock.model_fields if key.startswith(late) and key in given):
            if not _asks(key, getattr(zero, key)):
                continue
            yield f"{place(key)}: needs stage 3, the stage is {zero.stage}; take it out"
    if zero.stage < 3 and (zero.allgather_bucket_size or 0) % 2:  # stage_1_and_2.py, nccl_start_alignment_factor
        way = f"write {zero.allgather_bucket_size + 1}" if zero.allgather_bucket_size else ""
        yield f"{place('allgather_bucket_size')} is {zero.allgather_bucket_size}, which must be even; {way}"
    if zero.stage == 1 and top.get("data_types") is not None and offload is None:
        problem = "with stage 1 DeepSpeed would run its BF16_Optimizer, not ZeRO-1; take it out, or use stage 2"
        yield f"{document.place('data_types')}: {problem}"
    blocks = {"offload_optimizer": offload, "offload_param": zero.offload_param}
    on_nvme = [key for key, block in blocks.items() if block is not None and block.device == "nvme"]
    for key, block in blocks.items():
        if key in on_nvme and block is not None and not block.nvme_path:
            way = "add nvme_path: nvme_swap, or another folder"
            yield f"{place(key, 'device')} is nvme, but there is no nvme_path; {way}"
        elif block is not None and key not in on_nvme:
            for name in sorted((block.model_fields_set & {*written.get(key, ())}) - {"device", "pin_memory"}):
                if not _asks(name, getattr(block, name), block.block):
                    continue
                yield f"{place(key, name)}: would be ignored with device cpu; take it out"
    if "offload_optimizer" in on_nvme and zero.stage < 3:
        yield f"{place('offload_optimizer', 'device')} is nvme, which needs stage 3; use cpu"
    if "offload_param" in on_nvme and zero.stage3_prefetch_bucket_size != 0:
        # partitioned_param_coordinator.py, __prefetch_nvme_param_partitions: its list may hold a parameter twice, once
        # for the end of the forward and once for the start of the backward.
        problem = "DeepSpeed swaps a parameter in twice and stops at the second step"
        yield f"{place('stage3_prefetch_bucket_size')} must be 0 with parameters on nvme: {problem}; write 0"
    if "offload_param" in on_nvme and zero.zero_hpz_partition_size not in (None, 1):
        # partition_parameters.py, _partition_param_sec
        problem = "DeepSpeed cannot put its second copy of the weights on nvme; take it out"
        yield f"{place('zero_hpz_partition_size')}: {problem}"
    if top.get("aio") is not None and not on_nvme:
        yield f"{document.place('aio')}: would be ignored: nothing is offloaded to nvme; take it out"
