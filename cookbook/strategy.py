"""A strategy: how to spread the work. An accelerate YAML, with the DeepSpeed JSON that it names, read at every depth.

Both files are refused for what the libraries would drop without a word: accelerate ignores a misspelt key inside
`fsdp_config`, DeepSpeed ignores a misspelt top-level key (`zero_optimisation` would mean stage 0).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cookbook.files import (
    Document,
    PathText,
    RecipeError,
    find_file,
    nearest,
    part,
    path_problem,
    read_document,
    show,
    validate,
)
from cookbook.mesh import Mesh

Kind = Literal["single", "ddp", "fsdp1", "fsdp2", "zero", "tp"]

OWNED_BY_THE_RECIPE = {
    "mixed_precision": "the recipe owns it (mixed_precision)",
    "bf16": "the recipe owns it (mixed_precision)",
    "fp16": "the recipe owns it (mixed_precision)",
    "gradient_accumulation_steps": "it is derived from the recipe's batch section",
    "train_batch_size": "the recipe owns it (batch.global_batch_size)",
    "train_micro_batch_size_per_gpu": "the recipe owns it (batch.micro_batch_size)",
    "gradient_clipping": "the recipe owns it (optim.max_grad_norm)",
    "offload_optimizer_device": "write zero_optimization.offload_optimizer in the JSON",
    "offload_param_device": "write zero_optimization.offload_param in the JSON",
    "zero_stage": "write zero_optimization.stage in the JSON",
    "optimizer": "the recipe owns it (optim): a strategy must not change the mathematics",
    "scheduler": "the recipe owns it (schedule): a strategy must not change the mathematics",
    "activation_checkpointing": "the recipe owns it (model.gradient_checkpointing)",
    "fsdp_activation_checkpointing": "the recipe owns it (model.gradient_checkpointing)",
    "use_cpu": "the run uses the GPUs it finds, else the CPU; with this key accelerate would train plain DDP instead",
    "dynamo_config": "not served",
    "fp8_config": "not served",
    "fsdp_state_dict_type": "the run saves by itself, the same under every strategy",
}


def _integer(value: Any) -> Any:
    if type(value) is not int:  # a Literal takes true for 1
        raise ValueError(f"is {show(value)}; write an integer")
    return value


def _count_or_auto(value: Any) -> Any:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError(f"is {show(value)}; use auto (one per GPU) or a count from 1")
    return value


class Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DeepspeedBlock(Block):
    deepspeed_config_file: PathText
    deepspeed_multinode_launcher: Literal["standard"] = "standard"


class FsdpBlock(Block):
    fsdp_version: Annotated[Literal[1, 2], BeforeValidator(_integer)]
    fsdp_auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP"]
    fsdp_reshard_after_forward: bool | None = None
    fsdp_sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP"] | None = None
    fsdp_offload_params: bool = False
    fsdp_cpu_ram_efficient_loading: bool = True
    fsdp_sync_module_states: bool | None = None
    fsdp_use_orig_params: bool | None = None
    fsdp_backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] | None = None
    fsdp_forward_prefetch: bool | None = None


class ParallelismBlock(Block):
    parallelism_config_dp_replicate_size: int = Field(default=1, gt=0)
    parallelism_config_dp_shard_size: int = Field(default=1, gt=0)
    parallelism_config_tp_size: int = Field(default=1, gt=0)


class AccelerateFile(Block):
    """The keys of an accelerate YAML that a strategy may write."""

    compute_environment: Literal["LOCAL_MACHINE"] = "LOCAL_MACHINE"
    distributed_type: Literal["NO", "MULTI_GPU", "FSDP", "DEEPSPEED"]
    num_processes: Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)]
    num_machines: int = Field(default=1, gt=0)
    machine_rank: int = Field(default=0, ge=0)
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: Literal["static", "c10d"] = "static"
    same_network: bool = True
    gpu_ids: str | None = None
    enable_cpu_affinity: bool = False
    debug: bool = False
    deepspeed_config: DeepspeedBlock | None = None
    fsdp_config: FsdpBlock | None = None
    parallelism_config: ParallelismBlock | None = None


class OffloadBlock(Block):
    device: Literal["cpu", "nvme"]
    nvme_path: PathText | None = None
    pin_memory: bool = True
    buffer_count: int | None = Field(default=None, gt=0)


class OffloadOptimizerBlock(OffloadBlock):
    pipeline_read: bool | None = None
    pipeline_write: bool | None = None
    fast_init: bool | None = None


class OffloadParamBlock(OffloadBlock):
    buffer_size: int | None = Field(default=None, gt=0)
    max_in_cpu: int | None = Field(default=None, ge=0)


class ZeroBlock(Block):
    """`zero_optimization`, less the keys that change the result or that DeepSpeed itself has retired."""

    stage: Annotated[Literal[1, 2, 3], BeforeValidator(_integer)]
    overlap_comm: bool | None = None
    contiguous_gradients: bool | None = None
    reduce_bucket_size: int | None = Field(default=None, gt=0)
    reduce_scatter: bool | None = None
    allgather_bucket_size: int | None = Field(default=None, gt=0)
    allgather_partitions: bool | None = None
    round_robin_gradients: bool | None = None
    sub_group_size: int | None = Field(default=None, gt=0)
    stage3_prefetch_bucket_size: int | None = Field(default=None, ge=0)
    stage3_param_persistence_threshold: int | None = Field(default=None, ge=0)
    stage3_max_live_parameters: int | None = Field(default=None, ge=0)
    stage3_max_reuse_distance: int | None = Field(default=None, ge=0)
    zero_hpz_partition_size: int | None = Field(default=None, gt=0)
    offload_optimizer: OffloadOptimizerBlock | None = None
    offload_param: OffloadParamBlock | None = None


class PrecisionBlock(Block):
    enabled: Literal["auto"]


class AioBlock(Block):
    block_size: int | None = Field(default=None, gt=0)
    queue_depth: int | None = Field(default=None, gt=0)
    intra_op_parallelism: int | None = Field(default=None, gt=0)
    single_submit: bool | None = None
    overlap_events: bool | None = None
    use_gds: bool | None = None


class DataTypesBlock(Block):
    grad_accum_dtype: Literal["fp32"]


class DeepspeedFile(Block):
    """The keys of a DeepSpeed JSON that a strategy may write; what the recipe owns is "auto"."""

    bf16: PrecisionBlock
    fp16: PrecisionBlock
    train_batch_size: Literal["auto"]
    train_micro_batch_size_per_gpu: Literal["auto"]
    gradient_accumulation_steps: Literal["auto"]
    gradient_clipping: Literal["auto"]
    zero_force_ds_cpu_optimizer: Literal[False] | None = None
    communication_data_type: Literal["fp32"] | None = None
    data_types: DataTypesBlock | None = None
    zero_optimization: ZeroBlock
    aio: AioBlock | None = None


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What a strategy file asks for, as plain values."""

    path: str
    kind: Kind
    num_processes: int | None
    """None: as many as there are GPUs (`num_processes: auto`)."""
    num_machines: int = 1
    main_process_port: int | None = None
    zero_stage: int = 0
    offload_optimizer: Literal["cpu", "nvme"] | None = None
    offload_param: Literal["cpu", "nvme"] | None = None
    deepspeed: dict[str, Any] | None = None
    """The DeepSpeed JSON as written, with its "auto" values."""
    deepspeed_file: str | None = None
    fsdp: FsdpBlock | None = None
    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    tp_size: int = 1

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def offloads_to_nvme(self) -> bool:
        """Whether anything of it lies on a disk while it trains."""
        return "nvme" in (self.offload_optimizer, self.offload_param)

    @property
    def secondary_group_size(self) -> int:
        """Processes that share a second copy of the weights (ZeRO++'s hpZ, Wang et al. 2023); 1: there is none."""
        return ((self.deepspeed or {}).get("zero_optimization") or {}).get("zero_hpz_partition_size") or 1

    @property
    def written_mesh(self) -> Mesh:
        """The sizes in the file, 1 where it leaves one out."""
        return Mesh(replicate=self.dp_replicate_size, shard=self.dp_shard_size, tensor=self.tp_size)

    def mesh(self, num_processes: int) -> Mesh:
        """How the strategy lays out a run's processes: what the file leaves open is one more data-parallel dimension,
        which shards under FSDP and ZeRO, and replicates elsewhere.
        """
        written = self.written_mesh
        rest = max(1, num_processes // written.num_processes)
        if self.fsdp is not None or self.zero_stage > 0:
            return replace(written, shard=written.shard * rest)
        return replace(written, replicate=written.replicate * rest)

    def data_parallel_size(self, num_processes: int) -> int:
        """Processes that see different samples. A tensor-parallel group shares its samples."""
        return self.mesh(num_processes).data_parallel_size


def strategy_path(name: str) -> Path:
    """`fsdp2` or `accelerate_configs/fsdp2.yaml` -> the path of the file."""
    path = Path(name)
    return path if path.suffix or len(path.parts) > 1 else Path("accelerate_configs") / f"{name}.yaml"


def load_strategy(path: Path) -> Strategy:
    """The strategy in an accelerate YAML and the DeepSpeed JSON that it names.

    Raises:
        RecipeError: all mistakes of both files together.
    """
    document = read_document(path)
    parsed, mistakes = validate(document, AccelerateFile, OWNED_BY_THE_RECIPE)
    deepspeed_name = _deepspeed_file(document)
    deepspeed, deepspeed_document = None, None
    if deepspeed_name is not None:
        missing = find_file(deepspeed_name, lambda: document.place(("deepspeed_config", "deepspeed_config_file")))
        mistakes += missing
        if not missing:
            try:
                deepspeed_document = read_document(Path(deepspeed_name))
                deepspeed, found = validate(deepspeed_document, DeepspeedFile, OWNED_BY_THE_RECIPE)
                mistakes += found
            except RecipeError as error:
                mistakes += error.mistakes
    if parsed is not None:
        mistakes += _check_blocks(parsed, document)
    if deepspeed_document is not None:
        mistakes += _check_zero(deepspeed_document)
    if mistakes or parsed is None:
        raise RecipeError(mistakes)
    return _strategy(str(path), parsed, deepspeed, deepspeed_document)


def _deepspeed_file(document: Document) -> str | None:
    """Read before validation, so that mistakes of the YAML do not hide those of the JSON."""
    block = document.values.get("deepspeed_config")
    name = block.get("deepspeed_config_file") if isinstance(block, dict) else None
    return name if isinstance(name, str) and path_problem(name) is None else None


def _check_blocks(parsed: AccelerateFile, document: Document) -> list[str]:
    mistakes = []
    block_of = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config"}
    for kind, name in block_of.items():
        block = getattr(parsed, name)
        if parsed.distributed_type == kind and block is None:
            mistakes.append(
                f"{document.place(('distributed_type',))} is {kind}, but there is no {name}; add that block"
            )
        if parsed.distributed_type != kind and block is not None:
            mistakes.append(
                f"{document.place((name,))}: would be ignored: distributed_type is {parsed.distributed_type},"
                f" not {kind}; take it out"
            )
    count = parsed.num_processes
    place = document.place(("num_processes",))
    if parsed.distributed_type == "NO" and count != 1:
        mistakes.append(f"{place} is {count}; distributed_type NO runs one process: write 1")
    if parsed.num_machines > 1 and count == "auto":
        mistakes.append(f"{place} is auto; with num_machines {parsed.num_machines} write the count over all machines")
    if isinstance(count, int) and count % parsed.num_machines:
        mistakes.append(
            f"{place} is {count}, which num_machines {parsed.num_machines} cannot split evenly; use a multiple"
        )
    if parsed.machine_rank >= parsed.num_machines:
        mistakes.append(
            f"{document.place(('machine_rank',))} is {parsed.machine_rank}, with num_machines {parsed.num_machines};"
            f" write 0{f' to {parsed.num_machines - 1}' if parsed.num_machines > 1 else ''}"
        )
    if parsed.num_machines == 1 and parsed.main_process_ip is not None:
        mistakes.append(f"{document.place(('main_process_ip',))}: would be ignored with one machine; take it out")
    mistakes += _check_mesh(parsed, document)
    if parsed.fsdp_config is not None:
        mistakes += _check_fsdp(parsed.fsdp_config, document)
    return mistakes


def _check_mesh(parsed: AccelerateFile, document: Document) -> list[str]:
    mesh = parsed.parallelism_config
    if mesh is None:
        return []
    place = document.place(("parallelism_config",))
    replicate, shard = mesh.parallelism_config_dp_replicate_size, mesh.parallelism_config_dp_shard_size
    tensor = mesh.parallelism_config_tp_size
    if parsed.distributed_type == "FSDP":
        if parsed.fsdp_config is not None and parsed.fsdp_config.fsdp_version == 1:
            return [f"{place}: needs fsdp_version 2"]
        if tensor > 1:
            return [f"{place}: tensor parallel together with FSDP is not served; use tp_size 1"]
    elif parsed.distributed_type == "MULTI_GPU":
        if replicate > 1 or shard > 1:
            return [f"{place}: dp_replicate_size and dp_shard_size go with distributed_type FSDP"]
    else:
        return [f"{place}: would be ignored with distributed_type {parsed.distributed_type}"]
    product = replicate * shard * tensor
    if parsed.num_processes == "auto" or parsed.num_processes != product:
        return [
            f"{document.place(('num_processes',))} is {parsed.num_processes}, but the mesh of parallelism_config is"
            f" {replicate} x {shard} x {tensor}: write {product}"
        ]
    return []


def _check_fsdp(block: FsdpBlock, document: Document) -> list[str]:
    """Keys of the other FSDP generation, which accelerate would ignore."""
    first = {"fsdp_sharding_strategy", "fsdp_use_orig_params", "fsdp_backward_prefetch", "fsdp_forward_prefetch"}
    first |= {"fsdp_sync_module_states"}
    foreign = {1: {"fsdp_reshard_after_forward"}, 2: first}[block.fsdp_version] & block.model_fields_set
    mistakes = [
        f"{document.place(('fsdp_config', key))}: would be ignored with fsdp_version {block.fsdp_version}; take it out"
        for key in [key for key in FsdpBlock.model_fields if key in foreign]
    ]
    needed = {1: ("fsdp_sharding_strategy", "fsdp_use_orig_params"), 2: ("fsdp_reshard_after_forward",)}
    for key in needed[block.fsdp_version]:
        if key not in block.model_fields_set:
            mistakes.append(f"{document.place(('fsdp_config',))}: {key} is missing; write it out")
    if block.fsdp_use_orig_params is False:
        mistakes.append(
            f"{document.place(('fsdp_config', 'fsdp_use_orig_params'))} is false: weight decay could not tell"
            " norms from weights; write true"
        )
    if block.fsdp_version == 1 and block.fsdp_offload_params:
        mistakes.append(f"{document.place(('fsdp_config', 'fsdp_offload_params'))}: served with fsdp_version 2 only")
    return mistakes


def _check_zero(document: Document) -> list[str]:
    """Keys of the JSON that do not fit one another, if its zero_optimization is right by itself."""
    mistakes, place = [], ("zero_optimization",)
    zero = part(document, "zero_optimization", ZeroBlock)
    if zero is None:
        return []
    if zero.stage == 3:  # which deepspeed 0.19.8's stage3.py never reads
        early = {"allgather_bucket_size", "allgather_partitions", "round_robin_gradients"} & zero.model_fields_set
        for key in sorted(early):
            mistakes.append(f"{document.place((*place, key))}: stage 3 does not read it; take it out")
    if zero.offload_optimizer is None and "zero_force_ds_cpu_optimizer" in document.values:
        mistakes.append(f"{document.place(('zero_force_ds_cpu_optimizer',))}: goes with offload_optimizer; take it out")
    if zero.stage < 3:
        late = {"offload_param", "sub_group_size", "zero_hpz_partition_size"}
        late |= {name for name in ZeroBlock.model_fields if name.startswith("stage3_")}
        for key in [key for key in ZeroBlock.model_fields if key in late & zero.model_fields_set]:
            mistakes.append(f"{document.place((*place, key))}: needs stage 3, the stage is {zero.stage}; take it out")
    if zero.stage == 1 and document.values.get("data_types") is not None and zero.offload_optimizer is None:
        mistakes.append(
            f"{document.place(('data_types',))}: with stage 1 DeepSpeed would run its BF16_Optimizer, not ZeRO-1;"
            " take it out, or use stage 2"
        )
    for key in ("offload_optimizer", "offload_param"):
        block: OffloadBlock | None = getattr(zero, key)
        if block is None:
            continue
        if block.device == "nvme" and not block.nvme_path:
            mistakes.append(
                f"{document.place((*place, key, 'device'))} is nvme, but there is no nvme_path: name a folder"
            )
        if block.device == "nvme" and zero.stage < 3 and key == "offload_optimizer":
            mistakes.append(f"{document.place((*place, key, 'device'))} is nvme, which needs stage 3; use cpu")
        if block.device == "cpu":
            only_nvme = {
                "nvme_path",
                "buffer_count",
                "buffer_size",
                "pipeline_read",
                "pipeline_write",
                "fast_init",
                "max_in_cpu",
            }
            for name in sorted(only_nvme & block.model_fields_set):
                mistakes.append(f"{document.place((*place, key, name))}: would be ignored with device cpu")
    offload = zero.offload_optimizer
    if offload is not None and "zero_force_ds_cpu_optimizer" not in document.values:
        mistakes.append(
            f"{document.place((*place, 'offload_optimizer'))}: needs zero_force_ds_cpu_optimizer: false at the"
            " top level; else DeepSpeed refuses every optimizer but its own"
        )
    if zero.offload_param is not None and offload is None:
        mistakes.append(f"{document.place((*place, 'offload_param'))}: goes with offload_optimizer; add that block")
    parameters_on_nvme = zero.offload_param is not None and zero.offload_param.device == "nvme"
    if parameters_on_nvme and zero.stage3_prefetch_bucket_size != 0:
        # partitioned_param_coordinator.py, __prefetch_nvme_param_partitions: its list may hold a parameter twice, once
        # for the end of the forward and once for the start of the backward.
        mistakes.append(
            f"{document.place((*place, 'stage3_prefetch_bucket_size'))} must be 0 with parameters on nvme:"
            " DeepSpeed 0.19.8 swaps a parameter in twice and stops at the second step"
        )
    if parameters_on_nvme and (zero.zero_hpz_partition_size or 1) > 1:  # partition_parameters.py, _partition_param_sec
        mistakes.append(
            f"{document.place((*place, 'zero_hpz_partition_size'))}: DeepSpeed 0.19.8 can't put its second"
            " copy of the weights on nvme; take it out"
        )
    uses_nvme = any(block is not None and block.device == "nvme" for block in (offload, zero.offload_param))
    if document.values.get("aio") is not None and not uses_nvme:
        mistakes.append(f"{document.place(('aio',))}: would be ignored: nothing is offloaded to nvme")
    return mistakes


def _strategy(path: str, parsed: AccelerateFile, deepspeed: DeepspeedFile | None, source: Document | None) -> Strategy:
    mesh = parsed.parallelism_config or ParallelismBlock()
    zero = deepspeed.zero_optimization if deepspeed else None
    kind: Kind
    if parsed.distributed_type == "DEEPSPEED":
        kind = "zero"
    elif parsed.distributed_type == "FSDP":
        assert parsed.fsdp_config is not None
        kind = "fsdp1" if parsed.fsdp_config.fsdp_version == 1 else "fsdp2"
    elif mesh.parallelism_config_tp_size > 1:
        kind = "tp"
    else:
        kind = "single" if parsed.distributed_type == "NO" else "ddp"
    return Strategy(
        path=path,
        kind=kind,
        num_processes=None if parsed.num_processes == "auto" else parsed.num_processes,
        num_machines=parsed.num_machines,
        main_process_port=parsed.main_process_port,
        zero_stage=zero.stage if zero else 0,
        offload_optimizer=zero.offload_optimizer.device if zero and zero.offload_optimizer else None,
        offload_param=zero.offload_param.device if zero and zero.offload_param else None,
        deepspeed=source.values if source else None,
        deepspeed_file=parsed.deepspeed_config.deepspeed_config_file if parsed.deepspeed_config else None,
        fsdp=parsed.fsdp_config,
        dp_replicate_size=mesh.parallelism_config_dp_replicate_size,
        dp_shard_size=mesh.parallelism_config_dp_shard_size,
        tp_size=mesh.parallelism_config_tp_size,
    )


def known_strategies() -> str:
    """The names of the shipped files, for messages."""
    return ", ".join(sorted(path.stem for path in Path("accelerate_configs").glob("*.yaml")))


def find_strategy(name: str) -> Path:
    """The path of a strategy given by name or path.

    Raises:
        RecipeError: no such file, with the nearest name.
    """
    path = strategy_path(name)
    if not path.is_file():
        names = known_strategies().split(", ")
        raise RecipeError([f"strategy {name!r}: no file {path}; {nearest(Path(name).stem, names)}"])
    return path


def missing_strategy(name: str, place: Callable[[], str]) -> list[str]:
    """A mistake if a recipe names a strategy, by name or path, that is not there."""
    path = strategy_path(name)
    if path == Path(name):
        return find_file(name, place, Path("accelerate_configs"))
    names = known_strategies().split(", ")
    return [] if path.is_file() else [f"{place()} is {name!r}: no such strategy; {nearest(name, names)}"]
