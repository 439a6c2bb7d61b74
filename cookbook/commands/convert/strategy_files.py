"""The strategy of converted files: a shipped one with their traits, or files for a new one."""

import json
from pathlib import Path
from typing import Any

import yaml

from cookbook.config.accelerate_yaml import DEFAULT_STAGE
from cookbook.config.strategy import Strategy, known_strategies, load_strategy, strategy_path
from cookbook.system.files import RecipeError, dump_yaml, read_document, show
from cookbook.system.shipped import path_from_here

TRAITS: dict[str, Any] = {
    "kind": "ddp",
    "zero_stage": 0,
    **dict.fromkeys(("offload_optimizer", "offload_param", "reshard")),
    "offload": False,
    **dict.fromkeys(("dp_replicate_size", "tp_size", "sp_size", "ep_size", "zero_hpz_partition_size"), 1),
}
"""Properties that make two strategies different, each with its value where a file is silent. The number of processes is
none of them, since a strategy takes it from the GPUs.
"""


def choose_strategy(properties: dict[str, Any], name: str, notes: list[str]) -> tuple[str, dict[Path, str]]:
    """The shipped strategy with the traits that the files gave, or `name` and the files to write for it.

    Args:
        given: properties of a strategy; `fsdp_version` is taken out.
        notes: receives a note where there are none.
    """
    version = properties.pop("fsdp_version", 1)
    if properties.get("kind") == "fsdp2":
        properties["kind"], version = "fsdp", 2
    if properties.get("zero_stage"):
        properties["kind"] = "zero"
    elif properties.get("kind") == "zero" and "zero_stage" in properties:
        properties["kind"] = "ddp"
    elif properties.get("kind") == "zero":
        properties["zero_stage"] = DEFAULT_STAGE
        notes.append(f"DeepSpeed without a stage in the files: {DEFAULT_STAGE}, which is accelerate's default")
    is_sharded = {"reshard", "offload"} & properties.keys() and "kind" not in properties
    kind = properties.get("kind", "fsdp" if is_sharded else "ddp")
    if not properties:
        notes.append("no distribution in the file: ddp; any other strategy has the same curve (docs/strategies.md)")
    wanted = TRAITS | properties
    if kind == "fsdp":
        plain = wanted["dp_replicate_size"] == wanted["tp_size"] == wanted["sp_size"] == 1
        kind = "fsdp1" if version == 1 and plain and "kind" in properties and not properties.get("offload") else "fsdp2"
        wanted |= {"reshard": properties.get("reshard", True), "offload": properties.get("offload", False)}
        if kind == "fsdp1":
            notes.append(
                "strategy fsdp1, as in the file, is for earlier runs; for new ones write fsdp2: the same curve"
            )
    else:
        wanted |= {"reshard": None, "offload": False}
    wanted["kind"] = kind
    traits = {trait: wanted[trait] for trait in TRAITS}
    for shipped in known_strategies():
        try:
            loaded = load_strategy(strategy_path(shipped))
            if traits_of(loaded) == traits and not loaded.open_sizes:  # an open size is another on other machines
                return shipped, {}
        except RecipeError:  # a broken file of the user's own
            continue
    return name, _new_strategy(name, wanted)


def compare_sizes(sizes: dict[str, Any], name: str, written: dict[Path, str]) -> tuple[list[str], list[str]]:
    """Settings of speed in a file, by their places there: the names of those that the strategy has too, and of each
    other one both values.

    Args:
        written: what is written for the strategy, if it is no shipped one.
    """
    path, json_file = strategy_path(name), Path("ds_configs") / f"{name}.json"
    if path in written:
        ours = {**yaml.safe_load(written[path]), **json.loads(written.get(json_file, "{}"))}
    else:
        ours = read_document(path).values
        if (config := ours.get("deepspeed_config", {}).get("deepspeed_config_file")) is not None:
            ours = {**ours, **read_document(Path(path_from_here(config))).values}
    same, others = [], []
    for place, value in sizes.items():
        here: Any = ours
        for key in place.split("."):
            here = here.get(key) if isinstance(here, dict) else None
        if here == value:
            same.append(place)
        else:
            has = "none here" if here is None else f"here {show(here)}"
            others.append(f"{place.rpartition('.')[2]} {show(value)} ({has})")
    return same, others


def traits_of(strategy: Strategy) -> dict[str, Any]:
    """The values of `TRAITS`."""
    fsdp = strategy.fsdp
    reshard = None
    if fsdp is not None:
        sharding = fsdp.fsdp_sharding_strategy
        reshard = sharding == "FULL_SHARD" if sharding else fsdp.fsdp_reshard_after_forward
    values = {
        "kind": "ddp" if strategy.kind == "tp" else strategy.kind,
        "reshard": reshard,
        "offload": fsdp is not None and fsdp.fsdp_offload_params,
        "zero_hpz_partition_size": strategy.written_secondary_group_size,
    }
    return {trait: values[trait] if trait in values else getattr(strategy, trait) for trait in TRAITS}


def _new_strategy(name: str, wanted: dict[str, Any]) -> dict[Path, str]:
    """An accelerate YAML, and under ZeRO a DeepSpeed JSON made from the shipped one of its stage."""
    kind, files = wanted["kind"], {}
    kinds = {"single": "NO", "ddp": "MULTI_GPU", "zero": "DEEPSPEED"}
    block: dict[str, Any] = {"distributed_type": kinds.get(kind, "FSDP"), "num_processes": "auto"}
    if kind == "zero":
        json_path = Path("ds_configs") / f"{name}.json"
        files[json_path] = json.dumps(_deepspeed(wanted), indent=2) + "\n"
        block["deepspeed_config"] = {
            "deepspeed_config_file": str(json_path),
            "deepspeed_multinode_launcher": "standard",
        }
    elif kind in ("fsdp1", "fsdp2"):
        base = read_document(strategy_path(kind)).values["fsdp_config"]
        block["fsdp_config"] = {**base, "fsdp_offload_params": wanted["offload"]}
        if kind == "fsdp1":
            block["fsdp_config"]["fsdp_sharding_strategy"] = "FULL_SHARD" if wanted["reshard"] else "SHARD_GRAD_OP"
        else:
            block["fsdp_config"]["fsdp_reshard_after_forward"] = wanted["reshard"]
    sizes = {key: wanted[key] for key in ("dp_replicate_size", "tp_size", "sp_size") if wanted[key] > 1}
    if kind == "fsdp2" and sizes.keys() - {"sp_size"}:
        sizes["dp_shard_size"] = 2  # at least; more processes extend it
    if sizes:
        block["parallelism_config"] = {f"parallelism_config_{key}": size for key, size in sizes.items()}
    text = f"# Converted by `cookbook convert`; no shipped strategy has these traits.\n{dump_yaml(block)}"
    return {strategy_path(name): text, **files}


def _deepspeed(wanted: dict[str, Any]) -> dict[str, Any]:
    values = read_document(Path(path_from_here(f"ds_configs/zero{wanted['zero_stage']}.json"))).values
    zero = values["zero_optimization"]
    disk = read_document(Path(path_from_here("ds_configs/zero3_nvme.json"))).values
    for key in ("offload_optimizer", "offload_param"):
        if (device := wanted.get(key)) is not None:
            values["zero_force_ds_cpu_optimizer"] = False
            zero[key] = {"device": "cpu", "pin_memory": True}
        if device == "nvme":
            zero[key] = disk["zero_optimization"][key] | {"nvme_path": wanted.get("nvme_path", "nvme_swap")}
            values["aio"] = disk["aio"]
    if wanted.get("offload_param") == "nvme":
        zero["stage3_prefetch_bucket_size"] = 0
    if wanted["zero_hpz_partition_size"] > 1:
        zero["zero_hpz_partition_size"] = wanted["zero_hpz_partition_size"]
    return values
