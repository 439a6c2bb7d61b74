"""accelerate's YAML: the keys that a strategy may write, and which of them contradict one another."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cookbook.config.deepspeed_json import Block, count_or_auto, integer, stage_number
from cookbook.config.foreign import owner_of, tables
from cookbook.system.console import several
from cookbook.system.files import Document, PathText, show
from cookbook.system.validation import part

_version = partial(integer, choices="2, or 1")
_size_or_auto = partial(count_or_auto, auto="the processes that the other sizes leave")
Size = Annotated[int | Literal["auto"], BeforeValidator(_size_or_auto)]
SMALLEST = 2
"""Value of a size of a mesh that the file leaves open, until the number of processes is known."""

SHARDING_STRATEGIES = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD", 5: "HYBRID_SHARD_ZERO2"}
OTHER_STRATEGIES = {"NO_SHARD": "ddp", "HYBRID_SHARD": "hsdp", "HYBRID_SHARD_ZERO2": "hsdp"}


def _sharding_strategy(value: Any) -> Any:
    name = SHARDING_STRATEGIES.get(value, value) if type(value) is int else value
    if isinstance(name, str) and name in OTHER_STRATEGIES:
        raise ValueError(f"is {show(value)}; for that take strategy {OTHER_STRATEGIES[name]}")
    return name


Device = Literal["none", "cpu", "nvme"]
DEFAULT_STAGE = 2
"""ZeRO's stage where accelerate 1.15 is told none (utils/dataclasses.py, `DeepSpeedPlugin`)."""


class DeepspeedBlock(Block):
    """The part of a strategy on ZeRO: a JSON, or in its place, as `accelerate config` asks for it, the rest."""

    deepspeed_config_file: PathText | None = None
    deepspeed_multinode_launcher: Literal["standard"] = "standard"
    zero_stage: Annotated[Literal[1, 2, 3] | None, BeforeValidator(stage_number)] = None
    offload_optimizer_device: Device | None = None
    offload_param_device: Device | None = None
    offload_optimizer_nvme_path: PathText | None = None
    offload_param_nvme_path: PathText | None = None

    @property
    def in_place_of_json(self) -> dict[str, Any]:
        """The DeepSpeed configuration that these keys mean; empty where a file is named."""
        if self.deepspeed_config_file is not None:
            return {}
        zero: dict[str, Any] = {"stage": self.zero_stage or DEFAULT_STAGE}
        for block, device, path in (
            ("offload_optimizer", self.offload_optimizer_device, self.offload_optimizer_nvme_path),
            ("offload_param", self.offload_param_device, self.offload_param_nvme_path),
        ):
            if device not in (None, "none"):
                zero[block] = {"device": device} | ({"nvme_path": path} if path is not None else {})
        if self.offload_param_device == "nvme":
            zero["stage3_prefetch_bucket_size"] = 0  # see `_check_zero`
        return {"zero_optimization": zero}


class FsdpBlock(Block):
    fsdp_version: Annotated[Literal[1, 2], BeforeValidator(_version)] = Field(examples=[2])
    fsdp_auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP"] = Field(examples=["TRANSFORMER_BASED_WRAP"])
    fsdp_reshard_after_forward: bool | None = None
    fsdp_sharding_strategy: Annotated[
        Literal["FULL_SHARD", "SHARD_GRAD_OP"] | None, BeforeValidator(_sharding_strategy)
    ] = None
    fsdp_offload_params: bool = False
    fsdp_cpu_ram_efficient_loading: bool = True
    fsdp_sync_module_states: bool | None = None
    fsdp_use_orig_params: bool | None = None
    fsdp_backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] | None = None
    fsdp_forward_prefetch: bool | None = None


class ParallelismBlock(Block):
    parallelism_config_dp_replicate_size: Size = 1
    parallelism_config_dp_shard_size: Size = 1
    parallelism_config_tp_size: Size = 1
    # Never open: `accelerate launch` 1.15 compares it with 1 (utils/launch.py, prepare_multi_gpu_env).
    parallelism_config_sp_size: int = Field(default=1, gt=0)
    # Ours: accelerate 1.15 (parallelism_config.py, ParallelismConfig) has neither pipelines nor experts and no keys for
    # DDP, and passes over keys in this block that it does not know.
    parallelism_config_pp_size: Size = 1
    parallelism_config_pp_chunks: int = Field(default=1, gt=0)
    parallelism_config_ep_size: Size = 1
    parallelism_config_ddp_bucket_cap_mb: int | None = Field(default=None, gt=0)

    @property
    def mesh_sizes(self) -> dict[str, int | Literal["auto"]]:
        """The sizes of the mesh, by their names in `Strategy`."""
        return {name.removeprefix("parallelism_config_"): size for name, size in self if name.endswith("_size")}

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of the mesh, with the smallest that is possible for each open one."""
        return {name: SMALLEST if size == "auto" else size for name, size in self.mesh_sizes.items()}

    @property
    def open_sizes(self) -> frozenset[str]:
        return frozenset(name for name, size in self.mesh_sizes.items() if size == "auto")


def _port(value: Any) -> Any:
    if type(value) is int and not 0 <= value <= 65535:
        raise ValueError(f"is {value}; write 1 to 65535, or 0 for a free one")
    return value


def _address(value: Any) -> Any:
    if isinstance(value, str) and (parts := re.fullmatch(r"([^:]+):(\d+)", value)):
        raise ValueError(f"is {show(value)}; write {parts[1]}, and main_process_port: {parts[2]}")
    return value


def _gpu_ids(value: Any) -> Any:
    """As torch reads CUDA_VISIBLE_DEVICES: numbers, or names that begin with GPU or MIG."""
    if value is None or value == "all":
        return value
    if type(value) is int:  # accelerate splits it as a text (commands/launch.py, _validate_launch_command)
        raise ValueError(f"is {value}; write '{value}' in quotes")
    ids = [part.strip() for part in str(value).split(",")]
    if bad := [gpu for gpu in ids if not gpu.isdigit() and not gpu.startswith(("GPU-", "MIG-"))]:
        raise ValueError(f"is {show(value)}, and {bad[0]!r} is no GPU; write numbers as '0,1', or all")
    if len(set(ids)) < len(ids):
        raise ValueError(f"is {show(value)}, with a GPU twice; name each once")
    return str(value)


class AccelerateFile(Block):
    """The keys of an accelerate YAML that a strategy may write."""

    compute_environment: Literal["LOCAL_MACHINE"] = "LOCAL_MACHINE"
    distributed_type: Literal["NO", "MULTI_GPU", "FSDP", "DEEPSPEED"] = Field(examples=["MULTI_GPU"])
    num_processes: Annotated[int | Literal["auto"], BeforeValidator(count_or_auto)] = Field(examples=["auto"])
    num_machines: int = Field(default=1, gt=0)
    machine_rank: int = Field(default=0, ge=0)
    main_process_ip: Annotated[str | None, BeforeValidator(_address)] = None
    main_process_port: Annotated[int | None, BeforeValidator(_port)] = None
    rdzv_backend: Literal["static", "c10d"] = "static"
    same_network: bool = False  # as accelerate reads a file without it
    gpu_ids: Annotated[str | None, BeforeValidator(_gpu_ids)] = None
    use_cpu: bool = False
    enable_cpu_affinity: bool = False
    debug: bool = False
    deepspeed_config: DeepspeedBlock | None = None
    fsdp_config: FsdpBlock | None = None
    parallelism_config: ParallelismBlock | None = None


SECTIONS: dict[str, type[Block]] = {
    "deepspeed_config": DeepspeedBlock,
    "fsdp_config": FsdpBlock,
    "parallelism_config": ParallelismBlock,
}


def indent_sections(document: Document) -> tuple[Document, list[str]]:
    """The document with the keys of a section that stand beside it, as on a page that lost its indentation, and a
    mistake for each such section.
    """
    values, lines, mistakes = document.values, document.lines, []
    if isinstance(values, dict) and values.keys() <= AccelerateFile.model_fields.keys():
        return document, []
    for section, model in SECTIONS.items():
        if not isinstance(values, dict) or values.get(section) is not None:
            continue
        prefix, known = f"{section}.", tables().projects["accelerate"]
        own = {name.removeprefix(prefix) for name in (*known.keys, *known.passes) if name.startswith(prefix)}
        own |= set(model.model_fields)
        elsewhere = {*AccelerateFile.model_fields, *(() if section in values else (*known.keys, *known.passes))}
        lost = [key for key in values if key in own - elsewhere]
        if lost:
            block = {key: values[key] for key in lost}
            values = {key: value for key, value in values.items() if key not in lost} | {section: block}
            lines = {(section, *path) if path and path[0] in lost else path: line for path, line in lines.items()}
            names = f"{', '.join(lost)}, which {'belongs' if len(lost) == 1 else 'belong'} to it"
            state = "is empty" if section in document.values else "is missing"
            mistakes.append(f"{document.place(section)} {state}, and beside it are {names}; indent them below it")
    return replace(document, values=values, lines=lines), mistakes


USE_CPU = "take it out: a run uses all visible GPUs, else the CPU"
LEAST_ZERO = "{zero_stage: 2}"
LEAST_FSDP = "{fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_reshard_after_forward: true}"
"""Blocks that a file without them may write."""


def check_blocks(parsed: AccelerateFile, place: Callable[..., str]) -> Iterator[str]:
    family, count, machines = parsed.distributed_type, parsed.num_processes, parsed.num_machines
    for kind, name, least in (("DEEPSPEED", "deepspeed_config", LEAST_ZERO), ("FSDP", "fsdp_config", LEAST_FSDP)):
        is_given = getattr(parsed, name) is not None
        if family == kind and not is_given:
            yield f"{place('distributed_type')} is {kind}, but there is no {name}; add {name}: {least}"
        if family != kind and is_given:
            yield f"{place(name)}: would be ignored: distributed_type is {family}, not {kind}; take it out"
    if parsed.use_cpu and family in ("DEEPSPEED", "FSDP"):
        yield f"{place('use_cpu')} is true: accelerate would drop {family} and train plain DDP; {USE_CPU}"
    given = f"{place('num_processes')} is {count}"
    if parsed.deepspeed_config is not None:
        yield from _check_deepspeed_block(parsed.deepspeed_config, place)
        if machines > 1 and "deepspeed_multinode_launcher" not in parsed.deepspeed_config.model_fields_set:
            why = "else accelerate takes pdsh"
            yield f"{place('deepspeed_config')}: deepspeed_multinode_launcher is missing; write standard: {why}"
    if count != 1 and parsed.gpu_ids not in (None, "all"):
        num_ids = len(str(parsed.gpu_ids).split(","))
        if num_ids < (2 if count == "auto" else count // machines):
            of = f"num_processes is {count}{f' over {machines} machines' * (machines > 1)}"
            yield f"{place('gpu_ids')} names {several(num_ids, 'GPU')}, and {of}; name as many"
    if family == "NO" and count != 1:
        yield f"{given}; distributed_type NO runs one process: write 1"
    if family == "NO" and machines > 1:
        yield f"{place('num_machines')} is {machines}; distributed_type NO runs one process: write 1"
        return
    if machines > 1 and count == "auto":
        yield f"{given}; with num_machines {machines} write the count over all machines, as {8 * machines}"
    if isinstance(count, int) and count % machines:
        yield f"{given}, which num_machines {machines} cannot split evenly; write {-(-count // machines) * machines}"
    if parsed.machine_rank >= machines:
        ranks = f"0 to {machines - 1}" if machines > 1 else "0"
        yield f"{place('machine_rank')} is {parsed.machine_rank}, with num_machines {machines}; write {ranks}"
    if machines > 1 and parsed.main_process_port == 0:
        yield f"{place('main_process_port')} is 0: each machine would choose another; write 29500"
    if parsed.rdzv_backend == "c10d" and parsed.same_network:
        yield f"{place('rdzv_backend')} is 'c10d', to which accelerate tells no address with same_network; write static"
    if machines == 1 and parsed.main_process_ip is not None:
        yield f"{place('main_process_ip')}: would be ignored with one machine; take it out"
    if parsed.parallelism_config is not None and (problem := _mesh_problem(parsed, parsed.parallelism_config)):
        yield f"{place('parallelism_config')}: {problem}"
    elif parsed.parallelism_config is not None:
        yield from _check_ignored(parsed, parsed.parallelism_config, place)
        block = parsed.parallelism_config
        least = math.prod(block.sizes.values())
        copies = (machines if machines > 1 else SMALLEST) if len(block.open_sizes) > 1 else 1
        multiple = copies * least // SMALLEST ** len(block.open_sizes)
        fits = count == "auto" or least in (1, count) or (block.open_sizes and count > least and count % multiple == 0)
        if not fits:
            mesh = " x ".join(str(size) for size in block.mesh_sizes.values() if size != 1)
            more = f" or more, in multiples of {multiple}" if block.open_sizes else ""
            yield f"{given}, but the mesh of parallelism_config is {mesh}: write {least}{more}"
    if parsed.fsdp_config is not None:
        yield from _check_fsdp(parsed.fsdp_config, place)


def _check_deepspeed_block(block: DeepspeedBlock, place: Callable[..., str]) -> Iterator[str]:
    others = sorted(block.model_fields_set - {"deepspeed_config_file", "deepspeed_multinode_launcher"})
    if block.deepspeed_config_file is None and block.zero_stage is None:
        yield f"{place('deepspeed_config')}: names no JSON; add zero_stage: 2, or deepspeed_config_file"
    for key in others if block.deepspeed_config_file is not None else ():
        way = owner_of(key) or "take it out"
        yield f"{place('deepspeed_config', key)}: would be ignored beside a JSON; {way}"


def in_terms_of_block(mistakes: Iterable[str]) -> list[str]:
    """Mistakes of `DeepspeedBlock.in_place_of_json` by the keys of the YAML."""
    placed = []
    for mistake in mistakes:
        for block in ("offload_optimizer", "offload_param"):
            mistake = mistake.replace(f"zero_optimization.{block}.device", f"deepspeed_config.{block}_device")
            mistake = mistake.replace(f"zero_optimization.{block}.nvme_path", f"deepspeed_config.{block}_nvme_path")
            mistake = mistake.replace(f"zero_optimization.{block}", f"deepspeed_config.{block}_device")
            if f"deepspeed_config.{block}_device is" in mistake:
                mistake = mistake.replace("no nvme_path; add nvme_path", f"no {block}_nvme_path; add {block}_nvme_path")
        placed.append(mistake)
    return placed


def _check_ignored(parsed: AccelerateFile, mesh: ParallelismBlock, place: Callable[..., str]) -> Iterator[str]:
    key = "parallelism_config_ddp_bucket_cap_mb"
    others = max(mesh.sizes["tp_size"], mesh.sizes["pp_size"], mesh.sizes["ep_size"])
    if key in mesh.model_fields_set and (parsed.distributed_type != "MULTI_GPU" or others > 1):
        yield f"{place('parallelism_config', key)}: would be ignored: this strategy does not use DDP; take it out"
    key = "parallelism_config_pp_chunks"
    if key in mesh.model_fields_set and mesh.sizes["pp_size"] == 1:
        yield f"{place('parallelism_config', key)}: would be ignored: there is no pp_size from 2 on; take it out"


def _mesh_problem(parsed: AccelerateFile, mesh: ParallelismBlock) -> str | None:
    family, block = parsed.distributed_type, parsed.fsdp_config
    replicate, shard, tensor, sequence, pipeline, expert = mesh.sizes.values()
    if family == "NO":
        return "would be ignored with distributed_type NO; take it out"
    if len(mesh.open_sizes) > 1 and mesh.open_sizes != {"dp_replicate_size", "dp_shard_size"}:
        return f"{' and '.join(sorted(mesh.open_sizes))} are auto; leave one open, or both dp sizes"
    if expert > 1 and (family != "FSDP" or max(replicate, tensor, sequence, pipeline) > 1):
        return "ep_size goes with distributed_type FSDP and with dp_shard_size only; take the other sizes out"
    if pipeline > 1:
        return _pipeline_problem(family, block, sequence, replicate, shard)
    own = "replicate" if family == "MULTI_GPU" else "shard"  # what processes beyond the mesh extend, see Strategy.mesh
    others = {"dp_replicate_size": replicate, "dp_shard_size": shard, "tp_size": tensor}
    wrong = [f"parallelism_config_{name}" for name, size in others.items() if size > 1 and name != f"dp_{own}_size"]
    if sequence > 1 and wrong:
        return f"sp_size goes with dp_{own}_size only under {family}; take {' and '.join(wrong)} out"
    if block is not None and block.fsdp_version == 1:
        return "needs fsdp_version: 2; write it in fsdp_config"
    if tensor > 1 and family == "DEEPSPEED":
        return "tensor parallel together with DEEPSPEED is not supported; use tp_size 1"
    if max(tensor, expert) > 1 and block is not None:
        return _sharded_while_read_problem(block, shard * expert, "tp_size" if tensor > 1 else "ep_size")
    if family == "MULTI_GPU" and shard > 1:
        return "dp_shard_size goes with distributed_type FSDP; write that, or take it out"
    if family == "FSDP" and replicate > 1 and shard == 1:
        return "dp_replicate_size with distributed_type FSDP needs a dp_shard_size from 2 on, or auto"
    if family != "FSDP" and replicate > 1 and max(tensor, sequence) == 1:
        return "dp_replicate_size goes with distributed_type FSDP, or with tp_size or sp_size; take it out"
    return None


def _pipeline_problem(family: str, block: FsdpBlock | None, sequence: int, replicate: int, shard: int) -> str | None:
    if family not in ("MULTI_GPU", "FSDP"):
        return f"pp_size with distributed_type {family} is not supported; write MULTI_GPU or FSDP"
    if max(sequence, shard if block is None else replicate) > 1:
        key = "dp_replicate_size" if block is None else "dp_shard_size"
        return f"pp_size with distributed_type {family} goes with {key} and tp_size only; take the other sizes out"
    if block is not None and block.fsdp_version == 1:
        return "needs fsdp_version: 2; write it in fsdp_config"
    return None if block is None else _sharded_while_read_problem(block, shard, "pp_size")


def _sharded_while_read_problem(block: FsdpBlock, shard: int, key: str) -> str | None:
    """Name what transformers, which applies FSDP2 to what another dimension left, does not take from the file.

    Args:
        key: the size in the file that makes transformers do so.
    """
    if shard == 1:
        return f"{key} with distributed_type FSDP needs a dp_shard_size from 2 on"
    if block.fsdp_offload_params:
        return f"fsdp_offload_params with {key} is not supported; take one of them out"
    if block.fsdp_reshard_after_forward is False:
        return f"fsdp_reshard_after_forward: false would be ignored with {key}; write true"
    if "fsdp_cpu_ram_efficient_loading" in block.model_fields_set:
        why = "each process reads its own shards"
        return f"fsdp_cpu_ram_efficient_loading would be ignored with {key}: {why}; take it out"
    return None


FSDP1_KEYS = {
    "fsdp_sharding_strategy",
    "fsdp_use_orig_params",
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_sync_module_states",
}


NEEDED = {
    1: {"fsdp_sharding_strategy": "FULL_SHARD, or SHARD_GRAD_OP"},
    2: {"fsdp_reshard_after_forward": "true (as FULL_SHARD), or false (as SHARD_GRAD_OP)"},
}
"""Keys that a version needs, with the values to write."""


def _same_in_fsdp2(block: FsdpBlock) -> set[str]:
    """Keys of FSDP1 that say what FSDP2 does in any case."""
    does = {
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": True,
        "fsdp_forward_prefetch": False,
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_sharding_strategy": "SHARD_GRAD_OP" if block.fsdp_reshard_after_forward is False else "FULL_SHARD",
    }
    return {key for key, value in does.items() if getattr(block, key) == value}


def _check_fsdp(block: FsdpBlock, place: Callable[..., str]) -> Iterator[str]:
    """Keys of the other FSDP version, which accelerate would ignore, and keys that a version needs."""
    version, given = block.fsdp_version, block.model_fields_set
    others = FSDP1_KEYS - _same_in_fsdp2(block) if version == 2 else {"fsdp_reshard_after_forward"}
    for key in FsdpBlock.model_fields:
        if key in given and key in others:
            yield f"{place('fsdp_config', key)}: would be ignored with fsdp_version {version}; take it out"
    for key, value in NEEDED[version].items():
        if key not in given:
            yield f"{place('fsdp_config')}: {key} is missing; write {value}"
    if version == 1 and block.fsdp_sync_module_states is False and block.fsdp_cpu_ram_efficient_loading:
        where = place("fsdp_config", "fsdp_sync_module_states")
        yield f"{where} is false: fsdp_cpu_ram_efficient_loading, on unless it is false, needs it; write true"
    if version == 1 and block.fsdp_use_orig_params is False:
        where = place("fsdp_config", "fsdp_use_orig_params")
        yield f"{where} is false: weight decay could not tell norms from weights; write true"
    if version == 1 and block.fsdp_offload_params:
        where = place("fsdp_config", "fsdp_offload_params")
        yield f"{where}: supported with fsdp_version 2 only; take strategy fsdp2_offload"


def check_fsdp_alone(document: Document) -> Iterator[str]:
    """Mistakes of fsdp_config in a file that has other mistakes, too."""
    block = document.values.get("fsdp_config") if isinstance(document.values, dict) else None
    if not isinstance(block, dict) or not block:
        return
    whole = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} | block
    checked = part(replace(document, values={"fsdp_config": whole}), "fsdp_config", FsdpBlock)
    if checked is not None:
        yield from _check_fsdp(checked, document.place)
