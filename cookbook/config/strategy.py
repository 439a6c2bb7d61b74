"""A strategy: how a run is distributed. An accelerate YAML and the DeepSpeed JSON that it names, validated strictly.

Unknown keys are errors at every depth, because the libraries drop them silently: accelerate ignores a misspelt key
inside `fsdp_config`, DeepSpeed a misspelt top-level key (`zero_optimisation` would mean stage 0).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from cookbook.config.foreign import MEANINGS
from cookbook.config.mesh import Mesh
from cookbook.config.strategy_keys import Claim, settle
from cookbook.system.console import several
from cookbook.system.files import (
    Document,
    PathText,
    RecipeError,
    find_file,
    gathered,
    nearest,
    path_problem,
    read_document,
    refuse,
    show,
)
from cookbook.system.shipped import is_short, located, starts
from cookbook.system.validation import part, validate

STRATEGIES = Path("accelerate_configs")
Kind = Literal["single", "ddp", "fsdp1", "fsdp2", "zero", "tp", "pp"]

OWNED_BY_THE_RECIPE = {
    "mixed_precision": "the recipe owns it (mixed_precision)",
    "bf16": "the recipe owns it (mixed_precision)",
    "fp16": "the recipe owns it (mixed_precision)",
    "initial_scale_power": "the recipe owns it (loss_scale.initial, the scale itself)",
    "loss_scale_window": "the recipe owns it (loss_scale.window)",
    "hysteresis": "the recipe owns it (loss_scale.hysteresis)",
    "min_loss_scale": "the recipe owns it (loss_scale.minimum)",
    "loss_scale": "not supported: the scale is dynamic (loss_scale in the recipe)",
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
    "use_cpu": "a run uses all visible GPUs, else the CPU; with this key accelerate would train plain DDP instead",
    "dynamo_config": "not supported",
    "fp8_config": "not supported",
    "fsdp_state_dict_type": "checkpoints have one format under every strategy",
    "comm_hook": "the recipe owns it (optim.gradient_dtype)",
    "bucket_cap_mb": "write parallelism_config_ddp_bucket_cap_mb in parallelism_config",
    "gradient_as_bucket_view": "it is always on",
    "static_graph": "not supported: torch 2.13 fails with it where a step has several micro-batches",
}


def _integer(value: Any, *, choices: str) -> Any:
    if type(value) is not int:  # Literal[1] would accept true
        raise ValueError(f"is {show(value)}; write {choices}")
    return value


def _count_or_auto(value: Any, *, auto: str = "one per GPU") -> Any:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError(f"is {show(value)}; use auto ({auto}) or a count from 1")
    return value


def _stage(value: Any) -> Any:
    if value == 0:
        raise ValueError("is 0, which is DDP: take strategy ddp")
    return _integer(value, choices="1, 2 or 3")


_version = partial(_integer, choices="2, or 1")
_group_or_auto = partial(_count_or_auto, auto="the processes of a machine")
_size_or_auto = partial(_count_or_auto, auto="the processes that the other sizes leave")
Size = Annotated[int | Literal["auto"], BeforeValidator(_size_or_auto)]
SMALLEST = 2
"""What a size of a mesh has that the file leaves open, until it is known how many processes there are."""


class Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


SHARDING_STRATEGIES = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD", 5: "HYBRID_SHARD_ZERO2"}
OTHER_STRATEGIES = {"NO_SHARD": "ddp", "HYBRID_SHARD": "hsdp", "HYBRID_SHARD_ZERO2": "hsdp"}


def _sharding_strategy(value: Any) -> Any:
    name = SHARDING_STRATEGIES.get(value, value) if type(value) is int else value
    if isinstance(name, str) and name in OTHER_STRATEGIES:
        raise ValueError(f"is {show(value)}; for that take strategy {OTHER_STRATEGIES[name]}")
    return name


Device = Literal["none", "cpu", "nvme"]


class DeepspeedBlock(Block):
    """What a strategy says of ZeRO: a JSON, or in its place, as `accelerate config` asks for it, the rest."""

    deepspeed_config_file: PathText | None = None
    deepspeed_multinode_launcher: Literal["standard"] = "standard"
    zero_stage: Annotated[Literal[1, 2, 3] | None, BeforeValidator(_stage)] = None
    offload_optimizer_device: Device | None = None
    offload_param_device: Device | None = None
    offload_optimizer_nvme_path: PathText | None = None
    offload_param_nvme_path: PathText | None = None

    @property
    def in_place_of_json(self) -> dict[str, Any]:
        """The DeepSpeed configuration that these keys mean; empty where a file is named."""
        if self.deepspeed_config_file is not None:
            return {}
        zero: dict[str, Any] = {"stage": self.zero_stage or 2}  # accelerate's default
        for block, device, path in (
            ("offload_optimizer", self.offload_optimizer_device, self.offload_optimizer_nvme_path),
            ("offload_param", self.offload_param_device, self.offload_param_nvme_path),
        ):
            if device not in (None, "none"):
                zero[block] = {"device": device} | ({"nvme_path": path} if device == "nvme" else {})
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
    # Never open: `accelerate launch` 1.15 compares it with 1 (utils/launch.py).
    parallelism_config_sp_size: int = Field(default=1, gt=0)
    # Ours: accelerate 1.15 has neither pipelines nor experts and no keys for DDP, and passes over keys in this block
    # that it does not know.
    parallelism_config_pp_size: Size = 1
    parallelism_config_pp_chunks: int = Field(default=1, gt=0)
    parallelism_config_ep_size: Size = 1
    parallelism_config_ddp_bucket_cap_mb: int | None = Field(default=None, gt=0)

    @property
    def written(self) -> dict[str, int | Literal["auto"]]:
        """The sizes of the mesh, by their names in `Strategy`."""
        return {name.removeprefix("parallelism_config_"): size for name, size in self if name.endswith("_size")}

    @property
    def sizes(self) -> dict[str, Any]:
        """The same, the open ones as small as can be."""
        return {name: SMALLEST if size == "auto" else size for name, size in self.written.items()}

    @property
    def open_sizes(self) -> frozenset[str]:
        return frozenset(name for name, size in self.written.items() if size == "auto")


def _port(value: Any) -> Any:
    if type(value) is int and not 0 <= value <= 65535:
        raise ValueError(f"is {value}; write 1 to 65535, or 0 for a free one")
    return value


def _gpu_ids(value: Any) -> Any:
    """As torch reads CUDA_VISIBLE_DEVICES: numbers, or names that begin with GPU or MIG."""
    if value is None or value == "all":
        return value
    ids = [one.strip() for one in str(value).split(",")]
    if bad := [one for one in ids if not one.isdigit() and not one.startswith(("GPU-", "MIG-"))]:
        raise ValueError(f"is {show(value)}, and {bad[0]!r} is no GPU; write numbers as '0,1', or all")
    if len(set(ids)) < len(ids):
        raise ValueError(f"is {show(value)}, with a GPU twice; name each once")
    return str(value)


class AccelerateFile(Block):
    """The keys of an accelerate YAML that a strategy may write."""

    compute_environment: Literal["LOCAL_MACHINE"] = "LOCAL_MACHINE"
    distributed_type: Literal["NO", "MULTI_GPU", "FSDP", "DEEPSPEED"] = Field(examples=["MULTI_GPU"])
    num_processes: Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)] = Field(examples=["auto"])
    num_machines: int = Field(default=1, gt=0)
    machine_rank: int = Field(default=0, ge=0)
    main_process_ip: str | None = None
    main_process_port: Annotated[int | None, BeforeValidator(_port)] = None
    rdzv_backend: Literal["static", "c10d"] = "static"
    same_network: bool = True
    gpu_ids: Annotated[str | None, BeforeValidator(_gpu_ids)] = None
    enable_cpu_affinity: bool = False
    debug: bool = False
    deepspeed_config: DeepspeedBlock | None = None
    fsdp_config: FsdpBlock | None = None
    parallelism_config: ParallelismBlock | None = None


class JsonBlock(Block):
    """A block of a DeepSpeed JSON: a key that is left out has DeepSpeed's default, and null is no value."""

    @field_validator("*", mode="before")
    @classmethod
    def _as_deepspeed_reads(cls, value: Any, field: ValidationInfo) -> Any:
        info = cls.model_fields[str(field.field_name)]
        if value is None and not info.is_required():
            raise ValueError("is empty; write a value, or take the key out")
        # 5e8, as DeepSpeed's own pages have it: pydantic makes an integer of a whole number there.
        is_whole = isinstance(value, float) and value.is_integer() and "int" in str(info.annotation)
        return int(value) if is_whole else value


MOST_ELEMENTS = 10**11
"""Elements of a buffer: more than any GPU holds, of whatever dtype."""
BY_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
"""What accelerate 1.15 fills in where a JSON has "auto" (accelerator.py, _prepare_deepspeed)."""


def _elements(value: Any, *, least: int = 1, most: int = MOST_ELEMENTS, auto: bool = False) -> Any:
    if value is None or (auto and value == "auto"):
        return value
    if type(value) is not int:
        raise ValueError(f"is {show(value)}; write a whole number of elements{', or auto' * auto}")
    if not least <= value <= most:
        raise ValueError(f"is {value}; write {least} to {most} elements")
    return value


Elements = Annotated[int | None, BeforeValidator(_elements)]
ByHiddenSize = Annotated[int | Literal["auto"] | None, BeforeValidator(partial(_elements, auto=True))]
Ahead = Annotated[int | Literal["auto"] | None, BeforeValidator(partial(_elements, least=0, auto=True))]
Threshold = Annotated[
    int | Literal["auto"] | None, BeforeValidator(partial(_elements, least=0, most=10**30, auto=True))
]


class OffloadBlock(JsonBlock):
    device: Literal["cpu", "nvme"] = Field(examples=["cpu"])
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


class ZeroBlock(JsonBlock):
    """`zero_optimization`, without the keys that change the result or that DeepSpeed has deprecated."""

    stage: Annotated[Literal[1, 2, 3], BeforeValidator(_stage)] = Field(examples=[2])
    overlap_comm: bool | None = None
    contiguous_gradients: bool | None = None
    reduce_bucket_size: ByHiddenSize = None
    reduce_scatter: bool | None = None
    allgather_bucket_size: Elements = None
    allgather_partitions: bool | None = None
    round_robin_gradients: bool | None = None
    sub_group_size: int | None = Field(default=None, gt=0)
    stage3_prefetch_bucket_size: Ahead = None
    stage3_param_persistence_threshold: Threshold = None
    stage3_max_live_parameters: int | None = Field(default=None, ge=0)
    stage3_max_reuse_distance: int | None = Field(default=None, ge=0)
    zero_hpz_partition_size: Annotated[int | Literal["auto"] | None, BeforeValidator(_group_or_auto)] = None
    offload_optimizer: OffloadOptimizerBlock | None = None
    offload_param: OffloadParamBlock | None = None


class AioBlock(JsonBlock):
    block_size: int | None = Field(default=None, gt=0)
    queue_depth: int | None = Field(default=None, gt=0)
    intra_op_parallelism: int | None = Field(default=None, gt=0)
    single_submit: bool | None = None
    overlap_events: bool | None = None
    use_gds: bool | None = None


class DataTypesBlock(Block):
    grad_accum_dtype: Literal["fp32"]


class DeepspeedFile(Block):
    """The keys of a DeepSpeed JSON that a strategy may write, besides those of `strategy_keys`."""

    # Never true: DeepSpeedCPUAdam is not the optimizer of the other strategies, and needs a compiler.
    zero_force_ds_cpu_optimizer: Literal[False] | None = None
    communication_data_type: Literal["fp32"] | None = None
    data_types: DataTypesBlock | None = None
    zero_optimization: ZeroBlock = Field(examples=[{"stage": 2}])
    aio: AioBlock | None = None


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A validated strategy file, as plain values."""

    path: str
    kind: Kind
    num_processes: int | None
    """None: as many as there are GPUs (`num_processes: auto`)."""
    num_machines: int = 1
    main_process_ip: str | None = None
    main_process_port: int | None = None
    zero_stage: int = 0
    offload_optimizer: Literal["cpu", "nvme"] | None = None
    offload_param: Literal["cpu", "nvme"] | None = None
    deepspeed: dict[str, Any] | None = None
    """The DeepSpeed JSON as written, without what `passed` and `claims` have."""
    deepspeed_file: str | None = None
    deepspeed_name: str | None = None
    """`deepspeed_file` as the YAML has it, and accelerate hands it on."""
    fsdp: FsdpBlock | None = None
    has_parallelism_block: bool = False
    """Whether the YAML has one, for which accelerate sets variables."""
    bucket_cap_mb: int | None = None
    """MiB of a bucket of DDP; None: torch's default."""
    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    tp_size: int = 1
    sp_size: int = 1
    pp_size: int = 1
    pp_chunks: int = 1
    """Ranges of layers of a stage."""
    ep_size: int = 1
    written: dict[str, Any] = field(default_factory=dict, hash=False)
    """What accelerate reads of the YAML's sections, by the names of their keys."""
    claims: tuple[Claim, ...] = ()
    """What the files say of things that the recipe owns, to be compared with it."""
    passed: tuple[str, ...] = ()
    """Keys of the files that have no effect here, with their values."""
    open_sizes: frozenset[str] = frozenset()
    """The sizes above that the file leaves open (`auto`): `SMALLEST`, until `fitted` knows the machines."""

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def notes(self) -> list[str]:
        """For the user: keys that have no effect."""
        if not self.passed:
            return []
        return [f"{self.path}: these ask for nothing, or for what a run does in any case: {'; '.join(self.passed)}"]

    @property
    def offloads(self) -> bool:
        """Whether training keeps weights or optimizer state outside the GPU."""
        return bool(self.offload_optimizer or self.offload_param or (self.fsdp and self.fsdp.fsdp_offload_params))

    @property
    def is_sharded_while_read(self) -> bool:
        """Whether transformers applies FSDP2, to what tensor, pipeline or expert parallel left, before it reads the
        weights.
        """
        return self.fsdp is not None and max(self.tp_size, self.pp_size, self.ep_size) > 1

    @property
    def sends_each_micro_batch(self) -> bool:
        """Whether what it sends grows with the number of micro-batches: it shards gradients, and reduces each one's."""
        return self.fsdp is not None or self.zero_stage >= 2

    @property
    def has_autocast(self) -> bool:
        """Whether the forward runs under autocast over float32 weights; FSDP and ZeRO cast what they gather."""
        return self.kind in ("single", "ddp", "tp", "pp") and self.fsdp is None

    @property
    def gathers_weights(self) -> bool:
        """Whether weights are gathered again for each backward."""
        return self.zero_stage == 3 or bool(self.fsdp and self.fsdp.fsdp_reshard_after_forward)

    @property
    def offloads_to_nvme(self) -> bool:
        """Whether training keeps weights or optimizer state on a disk."""
        return "nvme" in (self.offload_optimizer, self.offload_param)

    @property
    def zero(self) -> dict[str, Any]:
        """The JSON's zero_optimization; empty without DeepSpeed. Sizes that are "auto" are left out."""
        block: dict[str, Any] = (self.deepspeed or {}).get("zero_optimization") or {}
        return {key: value for key, value in block.items() if key not in BY_HIDDEN_SIZE or value != "auto"}

    @property
    def aio(self) -> dict[str, Any]:
        """The JSON's aio; empty where it has none."""
        return (self.deepspeed or {}).get("aio") or {}

    @property
    def written_secondary_group_size(self) -> int | Literal["auto"]:
        """The `secondary_group_size` in the file; `auto`: the processes of a machine."""
        return self.zero.get("zero_hpz_partition_size") or 1

    def secondary_group_size(self, num_local: int) -> int:
        """Processes that share a second copy of the weights (ZeRO++'s hpZ, Wang et al. 2023); 1: there is none.

        Args:
            num_local: processes of a machine.
        """
        written = self.written_secondary_group_size
        return num_local if written == "auto" else written

    def num_local(self, num_processes: int) -> int:
        """Processes of a machine, if each of the machines that the file counts has an equal share."""
        return max(1, num_processes // self.num_machines)

    def fitted(self, num_processes: int, num_local: int | None = None) -> "Strategy":
        """The strategy with its open sizes filled in.

        One takes the processes that the other sizes leave; `tp_size` and `ep_size` at most those of a machine, for its
        fast links. Of two, the copies are one for each machine, or two on one machine, and a copy has the shards that
        this leaves.

        Args:
            num_local: processes of a machine; None: an equal share on each machine that the file counts.
        """
        if not self.open_sizes:
            return self
        num_local = num_local or self.num_local(num_processes)
        left = num_processes * SMALLEST ** len(self.open_sizes) // self.written_mesh.num_processes
        copies = num_processes // num_local if num_processes > num_local else SMALLEST
        if len(self.open_sizes) > 1:
            sizes = {"dp_replicate_size": copies, "dp_shard_size": left // copies}
        else:
            inside = ("tp_size", "ep_size")
            sizes = {name: min(left, num_local) if name in inside else left for name in self.open_sizes}
        filled: dict[str, Any] = {name: max(SMALLEST, size) for name, size in sizes.items()}
        return replace(self, **filled, open_sizes=frozenset())

    def of_width(self, hidden: int) -> "Strategy":
        """The strategy with the sizes that its JSON leaves "auto" as accelerate fills them in.

        Args:
            hidden: the model's `hidden_size`.
        """
        block: dict[str, Any] = (self.deepspeed or {}).get("zero_optimization") or {}
        filled = {key: size(hidden) for key, size in BY_HIDDEN_SIZE.items() if block.get(key) == "auto"}
        if not filled:
            return self
        return replace(self, deepspeed={**(self.deepspeed or {}), "zero_optimization": {**block, **filled}})

    @property
    def written_mesh(self) -> Mesh:
        """The sizes in the file, 1 where it leaves one out, `SMALLEST` where it leaves one open."""
        sizes = {
            "sequence": self.sp_size,
            "tensor": self.tp_size,
            "pipeline": self.pp_size,
            "chunks": self.pp_chunks,
            "expert": self.ep_size,
        }
        return Mesh(replicate=self.dp_replicate_size, shard=self.dp_shard_size, **sizes)

    def mesh(self, num_processes: int) -> Mesh:
        """The mesh of a run. Processes beyond the written mesh extend its data-parallel dimension: `shard` under FSDP
        and ZeRO, `replicate` elsewhere.
        """
        written = self.fitted(num_processes).written_mesh
        rest = max(1, num_processes // written.num_processes)
        if self.fsdp is not None or self.zero_stage > 0:
            return replace(written, shard=written.shard * rest)
        return replace(written, replicate=written.replicate * rest)

    def data_parallel_size(self, num_processes: int) -> int:
        """Number of processes, or tensor-parallel groups, that see different samples."""
        return self.mesh(num_processes).data_parallel_size


def strategy_path(name: str) -> Path:
    """`fsdp2` or `accelerate_configs/fsdp2.yaml` -> the path of the file, here or shipped."""
    return Path(located(str(STRATEGIES / f"{name}.yaml") if is_short(name) else name))


def load_strategy(path: Path) -> Strategy:
    """The strategy in an accelerate YAML and the DeepSpeed JSON that it names.

    Raises:
        RecipeError: all mistakes of both files together.
    """
    strategy, _, mistakes = read_strategy(path)
    if strategy is None:
        raise RecipeError(mistakes)
    return strategy


def read_strategy(path: Path) -> tuple[Strategy | None, tuple[Claim, ...], list[str]]:
    """The strategy, None if its files have mistakes; what they claim all the same; and the mistakes of both.

    Raises:
        RecipeError: the file cannot be read, or is none of a strategy.
    """
    document = read_document(path)
    refuse(_wrong_kind(document))
    rest, settled = settle(_with_names_of_today(document), AccelerateFile, "accelerate")
    parsed, mistakes = validate(rest, AccelerateFile, OWNED_BY_THE_RECIPE)
    found = [settled]
    deepspeed_name, source = None, _json_of_block(rest)
    if (written := _deepspeed_file(rest)) is not None:
        deepspeed_name = located(written, path)
        missing = find_file(deepspeed_name, lambda: document.place("deepspeed_config", "deepspeed_config_file"))
        mistakes += missing
        if not missing:
            with gathered(mistakes):
                source = read_document(Path(deepspeed_name))
    deepspeed = None
    if source is not None:
        source, more = settle(source, DeepspeedFile, "deepspeed")
        found.append(more)
        deepspeed, wrong = validate(source, DeepspeedFile, OWNED_BY_THE_RECIPE)
        mistakes += [*wrong, *_check_zero(source)]
    if parsed is not None:
        mistakes += _check_blocks(parsed, document.place)
    else:
        mistakes += _check_fsdp_alone(rest)
    foreign = [mistake for one in found for mistake in one.mistakes]
    claims = tuple(claim for one in found for claim in one.claims)
    if mistakes or foreign or parsed is None:
        way = f"{path}: `cookbook convert {path}` writes it in the terms of a strategy and a recipe of ours"
        return None, claims, [*dict.fromkeys([*foreign, *mistakes]), *[way] * bool(foreign)]
    blocks = (document.values.get(name) or {} for name in ("deepspeed_config", "fsdp_config"))
    in_blocks = {key: value for block in blocks for key, value in block.items()}
    passed = tuple(text for one in found for text in one.passed)
    strategy = _strategy(str(path), parsed, deepspeed, source, deepspeed_name, in_blocks)
    return replace(strategy, claims=claims, passed=passed), claims, []


def _wrong_kind(document: Document) -> list[str]:
    keys = document.values.keys() if isinstance(document.values, dict) else ()
    if "zero_optimization" in keys and "distributed_type" not in keys:
        return [
            f"{document.name}: is a DeepSpeed JSON, of which an accelerate YAML is the strategy; write one with"
            " distributed_type: DEEPSPEED, num_processes: auto and"
            f" deepspeed_config: {{deepspeed_config_file: {document.name}}}, or take the shipped zero2 as a copy"
        ]
    if {"model", "data"} <= {*keys}:
        return [f"{document.name}: is a recipe, not a strategy; name it first: cookbook launch {document.name}"]
    return []


def _with_names_of_today(document: Document) -> Document:
    """FSDP1's sharding strategy under the name that `accelerate config` 1.15 gives it."""
    values = document.values
    block = values.get("fsdp_config") if isinstance(values, dict) else None
    if isinstance(block, dict) and block.get("fsdp_reshard_after_forward") in SHARDING_STRATEGIES.values():
        block = {**block, "fsdp_sharding_strategy": block["fsdp_reshard_after_forward"]}
        del block["fsdp_reshard_after_forward"]
        values = {**values, "fsdp_config": block}
        lines = {
            (*path[:1], "fsdp_sharding_strategy") if path[1:] == ("fsdp_reshard_after_forward",) else path: line
            for path, line in document.lines.items()
        }
        return replace(document, values=values, lines=lines)
    return document


def _json_of_block(document: Document) -> Document | None:
    """What stands in the place of a DeepSpeed JSON, if none is named."""
    block = part(document, "deepspeed_config", DeepspeedBlock) if "deepspeed_config" in document.values else None
    return Document(document.name, block.in_place_of_json) if block is not None and block.in_place_of_json else None


def _deepspeed_file(document: Document) -> str | None:
    """The JSON's name, read before validation so that mistakes in the YAML do not hide those in the JSON."""
    block = document.values.get("deepspeed_config")
    name = block.get("deepspeed_config_file") if isinstance(block, dict) else None
    return name if isinstance(name, str) and path_problem(name) is None else None


LEAST_ZERO = "{zero_stage: 2}"
LEAST_FSDP = "{fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_reshard_after_forward: true}"
"""Blocks that a file without them may write."""


def _check_blocks(parsed: AccelerateFile, place: Callable[..., str]) -> Iterator[str]:
    family, count, machines = parsed.distributed_type, parsed.num_processes, parsed.num_machines
    for kind, name, least in (("DEEPSPEED", "deepspeed_config", LEAST_ZERO), ("FSDP", "fsdp_config", LEAST_FSDP)):
        is_given = getattr(parsed, name) is not None
        if family == kind and not is_given:
            yield f"{place('distributed_type')} is {kind}, but there is no {name}; add {name}: {least}"
        if family != kind and is_given:
            yield f"{place(name)}: would be ignored: distributed_type is {family}, not {kind}; take it out"
    given = f"{place('num_processes')} is {count}"
    if parsed.deepspeed_config is not None:
        yield from _check_deepspeed_block(parsed.deepspeed_config, place)
    if count != 1 and machines == 1 and parsed.gpu_ids not in (None, "all"):
        num_ids = len(str(parsed.gpu_ids).split(","))
        if num_ids < (2 if count == "auto" else count):
            yield f"{place('gpu_ids')} names {several(num_ids, 'GPU')}, and num_processes is {count}; name as many"
    if family == "NO" and count != 1:
        yield f"{given}; distributed_type NO runs one process: write 1"
    if machines > 1 and count == "auto":
        yield f"{given}; with num_machines {machines} write the count over all machines, as {8 * machines}"
    if isinstance(count, int) and count % machines:
        yield f"{given}, which num_machines {machines} cannot split evenly; write {-(-count // machines) * machines}"
    if parsed.machine_rank >= machines:
        ranks = f"0 to {machines - 1}" if machines > 1 else "0"
        yield f"{place('machine_rank')} is {parsed.machine_rank}, with num_machines {machines}; write {ranks}"
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
        fits = count == "auto" or count == least or (block.open_sizes and count > least and count % multiple == 0)
        if not fits:
            mesh = " x ".join(str(size) for size in block.written.values() if size != 1)
            more = f" or more, in multiples of {multiple}" if block.open_sizes else ""
            yield f"{given}, but the mesh of parallelism_config is {mesh}: write {least}{more}"
    if parsed.fsdp_config is not None:
        yield from _check_fsdp(parsed.fsdp_config, place)


def _check_deepspeed_block(block: DeepspeedBlock, place: Callable[..., str]) -> Iterator[str]:
    others = sorted(block.model_fields_set - {"deepspeed_config_file", "deepspeed_multinode_launcher"})
    if block.deepspeed_config_file is None and block.zero_stage is None:
        yield f"{place('deepspeed_config')}: names no JSON; add zero_stage: 2, or deepspeed_config_file"
    for key in others if block.deepspeed_config_file is not None else ():
        way = OWNED_BY_THE_RECIPE.get(key, "take it out")
        yield f"{place('deepspeed_config', key)}: would be ignored beside a JSON; {way}"


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
    if sequence > 1 and max(tensor, replicate, shard) > 1:
        return "sp_size goes with no other size; the processes beyond it see other samples"
    if block is not None and block.fsdp_version == 1:
        return "needs fsdp_version: 2; write it in fsdp_config"
    if tensor > 1 and family == "DEEPSPEED":
        return "tensor parallel together with DEEPSPEED is not supported; use tp_size 1"
    if max(tensor, expert) > 1 and block is not None:
        return _sharded_while_read_problem(block, shard * expert, "tp_size" if tensor > 1 else "ep_size")
    if family == "MULTI_GPU" and shard > 1:
        return "dp_shard_size goes with distributed_type FSDP; write that, or take it out"
    if family != "FSDP" and replicate > 1 and tensor == 1:
        return "dp_replicate_size goes with distributed_type FSDP or with tp_size"
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
    """What transformers, which applies FSDP2 to what another dimension left, does not take from the file.

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
    1: {"fsdp_sharding_strategy": "FULL_SHARD, or SHARD_GRAD_OP", "fsdp_use_orig_params": "true"},
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
    if block.fsdp_sync_module_states is False and block.fsdp_cpu_ram_efficient_loading:
        where = place("fsdp_config", "fsdp_sync_module_states")
        yield f"{where} is false: fsdp_cpu_ram_efficient_loading, on unless it is false, needs it; write true"
    if block.fsdp_use_orig_params is False:
        where = place("fsdp_config", "fsdp_use_orig_params")
        yield f"{where} is false: weight decay could not tell norms from weights; write true"
    if version == 1 and block.fsdp_offload_params:
        yield f"{place('fsdp_config', 'fsdp_offload_params')}: supported with fsdp_version 2 only"


def _check_fsdp_alone(document: Document) -> Iterator[str]:
    """The same of a file with other mistakes, as if it had the version that its keys belong to."""
    block = document.values.get("fsdp_config") if isinstance(document.values, dict) else None
    if not isinstance(block, dict):
        return
    guess = 1 if "fsdp_sharding_strategy" in block else 2
    whole = {"fsdp_version": guess, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} | block
    found = part(replace(document, values={"fsdp_config": whole}), "fsdp_config", FsdpBlock)
    if found is not None:
        yield from _check_fsdp(found, document.place)


def _check_zero(document: Document) -> Iterator[str]:
    """Keys of the JSON that contradict one another, if its zero_optimization is valid by itself."""
    zero, top = part(document, "zero_optimization", ZeroBlock), document.values
    if zero is None:
        return
    place = partial(document.place, "zero_optimization")
    given, offload = zero.model_fields_set, zero.offload_optimizer
    if zero.stage == 3:  # deepspeed 0.19.8's stage3.py never reads these
        for key in sorted({"allgather_bucket_size", "allgather_partitions", "round_robin_gradients"} & given):
            yield f"{place(key)}: stage 3 does not read it; take it out"
    else:
        late = ("offload_param", "sub_group_size", "zero_hpz_partition_size", "stage3_")
        for key in (key for key in ZeroBlock.model_fields if key.startswith(late) and key in given):
            yield f"{place(key)}: needs stage 3, the stage is {zero.stage}; take it out"
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
            for name in sorted(block.model_fields_set - {"device", "pin_memory"}):
                yield f"{place(key, name)}: would be ignored with device cpu; take it out"
    if "offload_optimizer" in on_nvme and zero.stage < 3:
        yield f"{place('offload_optimizer', 'device')} is nvme, which needs stage 3; use cpu"
    if offload is None and zero.offload_param is not None:
        yield f"{place('offload_param')}: goes with offload_optimizer; add offload_optimizer: {{device: cpu}}"
    if "offload_param" in on_nvme and zero.stage3_prefetch_bucket_size != 0:
        # partitioned_param_coordinator.py, __prefetch_nvme_param_partitions: its list may hold a parameter twice, once
        # for the end of the forward and once for the start of the backward.
        problem = "DeepSpeed 0.19.8 swaps a parameter in twice and stops at the second step"
        yield f"{place('stage3_prefetch_bucket_size')} must be 0 with parameters on nvme: {problem}; write 0"
    if "offload_param" in on_nvme and zero.zero_hpz_partition_size not in (None, 1):
        # partition_parameters.py, _partition_param_sec
        problem = "DeepSpeed 0.19.8 cannot put its second copy of the weights on nvme; take it out"
        yield f"{place('zero_hpz_partition_size')}: {problem}"
    if top.get("aio") is not None and not on_nvme:
        yield f"{document.place('aio')}: would be ignored: nothing is offloaded to nvme; take it out"


def _strategy(
    path: str,
    parsed: AccelerateFile,
    deepspeed: DeepspeedFile | None,
    source: Document | None,
    deepspeed_file: str | None,
    written: dict[str, Any],
) -> Strategy:
    mesh = parsed.parallelism_config or ParallelismBlock()
    sizes = mesh.sizes
    zero = deepspeed.zero_optimization if deepspeed else None
    kind: Kind
    if sizes["pp_size"] > 1:
        kind = "pp"
    elif parsed.distributed_type == "DEEPSPEED":
        kind = "zero"
    elif parsed.distributed_type == "FSDP":
        assert parsed.fsdp_config is not None
        kind = "fsdp1" if parsed.fsdp_config.fsdp_version == 1 else "fsdp2"
    elif sizes["tp_size"] > 1:
        kind = "tp"
    else:
        kind = "single" if parsed.distributed_type == "NO" else "ddp"
    return Strategy(
        path=path,
        kind=kind,
        num_processes=None if parsed.num_processes == "auto" else parsed.num_processes,
        num_machines=parsed.num_machines,
        main_process_ip=parsed.main_process_ip,
        main_process_port=parsed.main_process_port,
        zero_stage=zero.stage if zero else 0,
        offload_optimizer=zero.offload_optimizer.device if zero and zero.offload_optimizer else None,
        offload_param=zero.offload_param.device if zero and zero.offload_param else None,
        deepspeed=source.values if source else None,
        deepspeed_file=deepspeed_file,
        deepspeed_name=parsed.deepspeed_config.deepspeed_config_file if parsed.deepspeed_config else None,
        fsdp=parsed.fsdp_config,
        has_parallelism_block=bool(parsed.parallelism_config and parsed.parallelism_config.model_fields_set),
        bucket_cap_mb=mesh.parallelism_config_ddp_bucket_cap_mb,
        pp_chunks=mesh.parallelism_config_pp_chunks,
        **sizes,
        open_sizes=mesh.open_sizes,
        written=written,
    )


def known_strategies() -> list[str]:
    """The names of the files in accelerate_configs/, here and shipped."""
    return sorted({path.stem for start in starts() for path in (start / STRATEGIES).glob("*.yaml")})


def load_known() -> list[Strategy]:
    """All of `known_strategies`."""
    return [load_strategy(strategy_path(name)) for name in known_strategies()]


def find_strategy(name: str) -> Path:
    """The path of a strategy given by name or path.

    Raises:
        RecipeError: no such file, with the nearest name.
    """
    path = strategy_path(name)
    if not path.is_file():
        raise RecipeError(f"strategy {name!r}: no file {path}; {_meant(Path(name).stem)}")
    return path


def missing_strategy(name: str, place: Callable[[], str]) -> list[str]:
    """One mistake if the strategy that a recipe names, by name or path, does not exist."""
    path = strategy_path(name)
    if not is_short(name) and path == Path(name):
        return find_file(name, place, STRATEGIES)
    return [] if path.is_file() else [f"{place()} is {name!r}: no such strategy; {_meant(name)}"]


def _meant(name: str) -> str:
    """What to write instead of a name that no strategy has."""
    meaning = MEANINGS["strategy"].get(name.lower().replace("-", "_"))
    return meaning or nearest(name, known_strategies())


def exchange_precision(strategy: Strategy, mixed_precision: str, asked: str | None) -> str:
    """The precision in which processes exchange gradients; `no` is float32.

    Args:
        asked: the recipe's `optim.gradient_dtype`.
    """
    if asked is not None:
        return asked
    # deepspeed 0.19.8, runtime/engine.py, communication_data_type: by default the model's dtype.
    is_low = strategy.kind == "zero" and (strategy.deepspeed or {}).get("communication_data_type") != "fp32"
    return mixed_precision if is_low else "no"
