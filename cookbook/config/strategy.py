"""A strategy: how a run is distributed. An accelerate YAML and the DeepSpeed JSON that it names, validated strictly.

Unknown keys are errors at every depth, because the libraries drop them silently: accelerate ignores a misspelt key
inside `fsdp_config`, DeepSpeed a misspelt top-level key (`zero_optimisation` would mean stage 0).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cookbook.config.accelerate_yaml import (
    SHARDING_STRATEGIES,
    SMALLEST,
    AccelerateFile,
    DeepspeedBlock,
    FsdpBlock,
    ParallelismBlock,
    check_blocks,
    check_fsdp_alone,
    in_terms_of_block,
    indent_sections,
)
from cookbook.config.deepspeed_json import BY_HIDDEN_SIZE, DeepspeedFile, as_deepspeed_reads, check_zero
from cookbook.config.foreign import is_of_a_training, meaning_of, owner_of
from cookbook.config.mesh import Mesh
from cookbook.config.strategy_keys import Claim, Sorting, contradictions
from cookbook.system.files import (
    Document,
    RecipeError,
    find_file,
    gather_mistakes,
    nearest,
    path_problem,
    read_document,
    refuse,
)
from cookbook.system.shipped import is_short, path_from_here, starts
from cookbook.system.validation import part, validate

STRATEGIES = Path("accelerate_configs")
Kind = Literal["single", "ddp", "fsdp1", "fsdp2", "zero", "tp", "pp"]


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
    rdzv_backend: Literal["static", "c10d"] = "static"
    gpu_ids: tuple[str, ...] = ()
    """The GPUs of a machine that a run sees; empty: all."""
    use_cpu: bool = False
    """True if the file asks for the CPU, which a run takes only where there is no GPU."""
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
    """True if the YAML has one, for which accelerate sets variables."""
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
    """The values that accelerate reads in the YAML's sections, by the names of their keys."""
    claims: tuple[Claim, ...] = ()
    """Values in the files for keys that the recipe owns, to be compared with it."""
    passed: tuple[str, ...] = ()
    """Keys of the files that have no effect here, with their values."""
    open_sizes: frozenset[str] = frozenset()
    """The sizes above that the file leaves open (`auto`): `SMALLEST`, until `for_processes` knows the machines."""

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
    def address_problem(self) -> str | None:
        """The mistake of a file for several machines that names none of them, unless whoever starts it does; without
        an address accelerate 1.15 waits for a machine of the name None (utils/launch.py, `prepare_multi_gpu_env`).
        """
        if self.num_machines == 1 or self.main_process_ip is not None:
            return None
        way = "as machine 0 has it; or leave num_machines out: srun, or launch --machines and --first, say both"
        return f"{self.path}: num_machines is {self.num_machines}; add main_process_ip: 10.0.0.1, {way}"

    @property
    def offloads(self) -> bool:
        """True if training keeps weights or optimizer state outside the GPU."""
        return bool(self.offload_optimizer or self.offload_param or (self.fsdp and self.fsdp.fsdp_offload_params))

    @property
    def is_sharded_while_read(self) -> bool:
        """True if transformers applies FSDP2, to what tensor, pipeline or expert parallel left, before it reads the
        weights.
        """
        return self.fsdp is not None and max(self.tp_size, self.pp_size, self.ep_size) > 1

    @property
    def sends_each_micro_batch(self) -> bool:
        """True if its traffic grows with the number of micro-batches: it reduces the gradients of each, in shards."""
        return self.fsdp is not None or self.zero_stage >= 2

    @property
    def has_autocast(self) -> bool:
        """True if the forward runs under autocast over float32 weights; FSDP and ZeRO cast what they gather."""
        return self.kind in ("single", "ddp", "tp", "pp") and self.fsdp is None

    @property
    def gathers_weights(self) -> bool:
        """True if weights are gathered again for each backward."""
        block = self.fsdp
        again = block is not None and (block.fsdp_reshard_after_forward or block.fsdp_sharding_strategy == "FULL_SHARD")
        return self.zero_stage == 3 or bool(again)

    @property
    def offloads_to_nvme(self) -> bool:
        """True if training keeps weights or optimizer state on a disk."""
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

    def for_processes(self, num_processes: int, num_local: int | None = None) -> "Strategy":
        """The strategy with its open sizes filled in.

        A single open size takes the processes that the other sizes leave; `tp_size` and `ep_size` at most those of a
        machine, for its fast links. If both `dp` sizes are open, there is a copy for each machine, or two on one
        machine, and each copy has the shards that this leaves.

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
        written = self.for_processes(num_processes).written_mesh
        rest = max(1, num_processes // written.num_processes)
        if self.fsdp is not None or self.zero_stage > 0:
            return replace(written, shard=written.shard * rest)
        return replace(written, replicate=written.replicate * rest)

    def data_parallel_size(self, num_processes: int) -> int:
        """Number of processes, or tensor-parallel groups, that see different samples."""
        return self.mesh(num_processes).data_parallel_size


def strategy_path(name: str) -> Path:
    """`fsdp2` or `accelerate_configs/fsdp2.yaml` -> the path of the file, here or shipped."""
    return Path(path_from_here(str(STRATEGIES / f"{name}.yaml") if is_short(name) else name))


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
    refuse(_check_kind(document))
    document, lost = indent_sections(document)
    sorted_keys = [Sorting(_update_names(document), "accelerate")]
    rest = sorted_keys[0].strip(AccelerateFile)
    parsed, mistakes = validate(rest, AccelerateFile, partial(owner_of, of_all=False), meaning_of)
    mistakes = [*lost, *_check_stopping_keys(document), *mistakes]
    deepspeed_name, source = None, _make_json(rest)
    if (written := _find_json_name(rest)) is not None:
        deepspeed_name = path_from_here(written, path)
        missing = find_file(deepspeed_name, lambda: document.place("deepspeed_config", "deepspeed_config_file"))
        mistakes += missing
        if not missing:
            with gather_mistakes(mistakes):
                source = as_deepspeed_reads(read_document(Path(deepspeed_name)))
                source = replace(source, name=min(deepspeed_name, os.path.relpath(deepspeed_name), key=len))
    deepspeed = None
    if source is not None:
        sorted_keys.append(Sorting(source, "deepspeed"))
        source = sorted_keys[1].strip(DeepspeedFile)
        deepspeed, wrong = validate(source, DeepspeedFile, partial(owner_of, of_all=False))
        mistakes += [*wrong, *check_zero(source)] if written is not None else in_terms_of_block(check_zero(source))
    if parsed is not None:
        lacks_a_size = any("parallelism_config." in mistake for mistake in sorted_keys[0].mistakes)
        in_blocks = check_blocks(parsed, document.place)
        of_mesh = "the mesh of parallelism_config is"
        mistakes += [mistake for mistake in in_blocks if not (lacks_a_size and of_mesh in mistake)]
    else:
        mistakes += check_fsdp_alone(rest)
    foreign = [mistake for keys in sorted_keys for mistake in keys.mistakes]
    claims = tuple(claim for keys in sorted_keys for claim in keys.claims)
    passed = tuple(text for keys in sorted_keys for text in keys.passed)
    if mistakes or foreign or parsed is None:
        is_foreign = bool(foreign or claims or passed)
        return None, claims, [*dict.fromkeys([*foreign, *mistakes]), *[to_convert(path)] * is_foreign]
    blocks = (document.values.get(name) or {} for name in ("deepspeed_config", "fsdp_config"))
    written_keys = {PREFIXED.get(key, key): value for block in blocks for key, value in block.items()}
    strategy = _make_strategy(str(path), parsed, deepspeed, source, deepspeed_name, written_keys)
    return replace(strategy, claims=claims, passed=passed), claims, []


def explain_contradictions(path: str | Path, claims: tuple[Claim, ...], ours: dict[str, Any]) -> list[str]:
    """`contradictions` of a strategy's claims, and what to do about them."""
    mistakes = list(contradictions(claims, ours))
    return [*mistakes, *[to_convert(path)] * bool(mistakes)]


def to_convert(path: str | Path) -> str:
    """The end of a refusal of a file that has keys of others."""
    return f"{path}: `cookbook convert {path}` writes it in the terms of a strategy and a recipe of ours"


def _check_kind(document: Document) -> list[str]:
    keys = document.values.keys() if isinstance(document.values, dict) else ()
    if keys and document.values.get("compute_environment") == "AMAZON_SAGEMAKER":
        return [
            f"{document.name}: is for SageMaker's own launcher; take a strategy with compute_environment:"
            " LOCAL_MACHINE, as ddp, and start it there as on any machines (docs/several_machines.md)"
        ]
    if "zero_optimization" in keys and "distributed_type" not in keys:
        block = document.values["zero_optimization"]
        stage = block.get("stage") if isinstance(block, dict) else None
        shipped = f"zero{stage}" if stage in (1, 2, 3) else "ddp"
        return [
            f"{document.name}: is a DeepSpeed JSON, of which an accelerate YAML is the strategy; write one with"
            " distributed_type: DEEPSPEED, num_processes: auto and"
            f" deepspeed_config: {{deepspeed_config_file: {document.name}}}, or take the shipped {shipped} as a copy"
        ]
    if {"model", "data"} <= {*keys}:
        return [f"{document.name}: is a recipe, not a strategy; name it first: cookbook launch {document.name}"]
    if "distributed_type" not in keys and is_of_a_training(keys):
        return [
            f"{document.name}: is a file of a training, not a strategy; `cookbook convert {document.name}` makes a"
            " recipe of it, and names its strategy"
        ]
    return []


def _check_stopping_keys(document: Document) -> list[str]:
    """Keys that say nothing here, and that accelerate 1.15 stops at (config_args.py, BaseConfig.from_yaml_file)."""
    keys = document.values if isinstance(document.values, dict) else {}
    why = "accelerate starts nothing from a file with this key; take it out"
    return [f"{document.place(key)}: {why}" for key in ("gradient_accumulation_steps", "ipex_config") if key in keys]


RESHARD = "fsdp_reshard_after_forward"
PREFIXED = {name.removeprefix("fsdp_"): name for name in FsdpBlock.model_fields}
"""Keys that accelerate 1.15 completes in fsdp_config (commands/launch.py, `_validate_launch_command`)."""


def _update_names(document: Document) -> Document:
    """Replace older names in fsdp_config by those of accelerate 1.15: the number of FSDP1's sharding strategy, keys
    without their prefix, and the missing version of a file from before there were two, which accelerate reads as 1
    (commands/launch.py, launch_command_parser).
    """
    values = document.values
    block = values.get("fsdp_config") if isinstance(values, dict) else None
    names = PREFIXED | {"fsdp_backward_prefetch_policy": "fsdp_backward_prefetch"}
    if isinstance(block, dict) and str(block.get(RESHARD)) in SHARDING_STRATEGIES.values():
        names[RESHARD] = "fsdp_sharding_strategy"
    if not isinstance(block, dict):
        return document
    older = block.get("fsdp_sharding_strategy")
    older = SHARDING_STRATEGIES.get(older, older) if isinstance(older, int) else older
    if older is not None and block.get(RESHARD) == older:  # said by both names
        block = {key: value for key, value in block.items() if key != RESHARD}
    names = {old: name for old, name in names.items() if old in block and name not in block}
    block = {names.get(key, key): value for key, value in block.items()}
    if "fsdp_sharding_strategy" in block:
        block.setdefault("fsdp_version", 1)
    lines = {(*path[:1], *(names.get(str(key), key) for key in path[1:])): at for path, at in document.lines.items()}
    return replace(document, values={**values, "fsdp_config": block}, lines=lines)


def _make_json(document: Document) -> Document | None:
    """The configuration that the keys of deepspeed_config mean where no JSON is named; None where one is."""
    block = part(document, "deepspeed_config", DeepspeedBlock) if "deepspeed_config" in document.values else None
    return Document(document.name, block.in_place_of_json) if block is not None and block.in_place_of_json else None


def _find_json_name(document: Document) -> str | None:
    """The JSON's name, read before validation so that mistakes in the YAML do not hide those in the JSON."""
    block = document.values.get("deepspeed_config")
    name = block.get("deepspeed_config_file") if isinstance(block, dict) else None
    return name if isinstance(name, str) and path_problem(name) is None else None


def _make_strategy(
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
        rdzv_backend=parsed.rdzv_backend,
        gpu_ids=() if parsed.gpu_ids in (None, "all") else tuple(str(parsed.gpu_ids).split(",")),
        use_cpu=parsed.use_cpu,
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
        raise RecipeError(f"strategy {name!r}: no file {path}; {_suggest_strategy(Path(name).stem)}")
    return path


def missing_strategy(name: str, place: Callable[[], str]) -> list[str]:
    """One mistake if the strategy that a recipe names, by name or path, does not exist."""
    path = strategy_path(name)
    if not is_short(name) and path == Path(name):
        return find_file(name, place, STRATEGIES)
    return [] if path.is_file() else [f"{place()} is {name!r}: no such strategy; {_suggest_strategy(name)}"]


def _suggest_strategy(name: str) -> str:
    """Advice for a name that no strategy has."""
    return meaning_of("strategy", name.lower().replace("-", "_")) or nearest(name, known_strategies())


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
