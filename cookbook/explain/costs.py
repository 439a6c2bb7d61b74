"""What a strategy costs, in bytes a parameter: the memory of states, the traffic of a step, the precision of each.

The arithmetic of docs/strategies.md. Activations, buffers and the number of parameters are not counted here.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from cookbook.optim.adamw import AdamW
from cookbook.optim.base import Optimizer
from cookbook.recipe import AdapterSection, Recipe
from cookbook.strategy import Strategy

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
NO_TRAFFIC = "none: one process"

Where = Literal["GPU", "host", "disk"]
PLACES: tuple[Where, ...] = ("GPU", "host", "disk")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the costs depend on, of a recipe, a strategy and a number of processes."""

    strategy: Strategy
    num_processes: int
    accumulation: int
    mixed_precision: str = "bf16"
    optim: Optimizer = field(default_factory=lambda: AdamW(learning_rate=1.0))
    adapter: AdapterSection | None = None

    @property
    def low_bytes(self) -> int:
        """Of a number in the precision of the forward."""
        return 4 if self.mixed_precision == "no" else 2

    @property
    def moment_bytes(self) -> float:
        """Of what the optimizer keeps for each parameter, beside a copy of it."""
        return sum(self.optim.state(is_matrix=True).values())

    @property
    def moments(self) -> str:
        """What to call them."""
        return self.optim.state_words

    @property
    def num_shards(self) -> int:
        """Processes over which the strategy cuts what it cuts."""
        if self.strategy.kind == "tp":
            return self.strategy.tp_size
        return self.num_processes // self.strategy.dp_replicate_size


def setting_of(recipe: Recipe, strategy: Strategy, num_processes: int, accumulation: int) -> Setting:
    """The setting of a run."""
    return Setting(
        strategy=strategy,
        num_processes=num_processes,
        accumulation=accumulation,
        mixed_precision=recipe.mixed_precision,
        optim=recipe.optim,
        adapter=recipe.adapter,
    )


def precision(setting: Setting) -> dict[str, str]:
    """The dtype of each thing; the engine asserts those of weights and ZeRO's configuration at the start of a run."""
    strategy, low = setting.strategy, DTYPES[setting.mixed_precision]
    found: dict[str, str]
    if strategy.kind == "zero":
        config = strategy.deepspeed or {}
        accumulates = (config.get("data_types") or {}).get("grad_accum_dtype")
        found = {
            "weights": low,
            "compute": low,
            "gradients": "float32" if accumulates == "fp32" else low,
            # deepspeed 0.19.8, runtime/engine.py, communication_data_type: that of the model unless the JSON says.
            "reductions": "float32" if config.get("communication_data_type") == "fp32" else low,
            "master copy": "float32, beside the weights",
        }
    else:
        how = {"fsdp1": "weights are gathered in it", "fsdp2": "weights are gathered in it"}
        autocast = "matrix products, by autocast; the rest float32"
        detail = "" if low == "float32" else f" ({how.get(strategy.kind, autocast)})"
        reductions = f"{low}, of activations" if strategy.kind == "tp" else "float32"
        found = {
            "weights": "float32",
            "compute": low + detail,
            "gradients": "float32",
            "reductions": reductions,
            "master copy": "none: the weights are float32",
        }
    if setting.num_processes == 1:
        found["reductions"] = NO_TRAFFIC
    if setting.adapter is not None:
        rest = "float32" if strategy.kind == "fsdp1" else low
        found["frozen weights"] = (
            f"4 bits (NF4) in linear layers, {rest} elsewhere" if setting.adapter.is_quantized else rest
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one process holds of something."""

    where: Where
    what: str
    num_bytes: float
    """A parameter, before the cut."""
    num_shards: int


def shares(setting: Setting) -> list[Share]:
    """The states of a trained parameter on one process, between micro-batches."""
    if setting.strategy.kind == "zero":
        return _zero_shares(setting)
    fsdp = setting.strategy.fsdp
    where: Where = "host" if fsdp is not None and fsdp.fsdp_offload_params else "GPU"
    cut = 1 if setting.strategy.kind in ("single", "ddp") else setting.num_shards
    sizes = {"weights": 4, "gradients": 4, setting.moments: setting.moment_bytes}
    found = [Share(where=where, what=what, num_bytes=size, num_shards=cut) for what, size in sizes.items() if size]
    if _keeps_gathered(setting.strategy) and setting.num_processes > 1:
        found.append(Share(where="GPU", what="gathered weights", num_bytes=setting.low_bytes, num_shards=1))
    return found


def _keeps_gathered(strategy: Strategy) -> bool:
    """Whether FSDP keeps a layer's gathered weights from its forward to its backward."""
    fsdp = strategy.fsdp
    return fsdp is not None and (
        fsdp.fsdp_reshard_after_forward is False or fsdp.fsdp_sharding_strategy == "SHARD_GRAD_OP"
    )


def _zero_shares(setting: Setting) -> list[Share]:
    strategy, low = setting.strategy, setting.low_bytes
    places: dict[str | None, Where] = {None: "GPU", "cpu": "host", "nvme": "disk"}
    optimizer, weights = places[strategy.offload_optimizer], places[strategy.offload_param]
    cut, stage = setting.num_shards, strategy.zero_stage
    gradient = 4 if precision(setting)["gradients"] == "float32" else low
    found = [Share(where=weights, what="weights", num_bytes=low, num_shards=cut if stage == 3 else 1)]
    if strategy.offload_optimizer is None:
        found.append(Share(where="GPU", what="gradients", num_bytes=gradient, num_shards=cut if stage > 1 else 1))
    else:
        if stage == 3 or setting.accumulation > 1:
            found.append(Share(where="host", what="gradients as they come", num_bytes=low, num_shards=cut))
        found.append(Share(where=optimizer, what="gradients", num_bytes=4, num_shards=cut))
    found.append(Share(where=optimizer, what=setting.moments, num_bytes=4 + setting.moment_bytes, num_shards=cut))
    return found


def frozen_share(setting: Setting) -> Share | None:
    """What one process holds of a parameter that is not trained; None where all are."""
    if setting.adapter is None:
        return None
    strategy, fsdp = setting.strategy, setting.strategy.fsdp
    num_bytes = 0.5 if setting.adapter.is_quantized else 4 if strategy.kind == "fsdp1" else setting.low_bytes
    is_cut = strategy.kind in ("fsdp1", "fsdp2", "tp") or strategy.zero_stage == 3
    places: dict[str | None, Where] = {None: "GPU", "cpu": "host", "nvme": "disk"}
    where: Where = "host" if fsdp is not None and fsdp.fsdp_offload_params else places[strategy.offload_param]
    return Share(where=where, what="frozen", num_bytes=num_bytes, num_shards=setting.num_shards if is_cut else 1)


def total(found: list[Share], where: Where) -> float:
    """Bytes a parameter on one process, in one place."""
    return math.fsum(share.num_bytes / share.num_shards for share in found if share.where == where)


def states_in_words(setting: Setting, where: Where) -> str:
    """`weights 2 + gradients 2/4 + optimizer 12/4 = 5.5; of a frozen one 2`; empty if nothing lies there."""
    found, frozen = shares(setting), frozen_share(setting)
    terms = [_term(share) for share in found if share.where == where]
    words = [f"{' + '.join(terms)} = {total(found, where):.4g}"] if terms else []
    if frozen is not None and frozen.where == where:
        words.append(
            f"of a frozen one {'about ' if frozen.num_bytes < 1 else ''}{_term(frozen).removeprefix('frozen ')}"
        )
    return "; ".join(words)


def _term(share: Share) -> str:
    return f"{share.what} {share.num_bytes:g}" + (f"/{share.num_shards}" if share.num_shards > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Movement:
    """Something that every process sends in a step."""

    what: str
    times: int
    num_bytes: int
    """A parameter, each time; an all-reduce counts twice, for it is a reduction and a gather."""
    num_shards: int = 1
    """Of a parameter, one of which is sent."""


def movements(setting: Setting) -> list[Movement]:
    """What a process sends to the others in a step; under tensor parallel, of the parameters nothing.

    Counted as in Rajbhandari et al. 2020 (arXiv 1910.02054), section 7; a ring of D processes sends (D - 1) / D of it.
    """
    strategy, times, low = setting.strategy, setting.accumulation, setting.low_bytes
    if setting.num_processes == 1 or strategy.kind in ("single", "tp"):
        return []
    if strategy.kind == "ddp":
        return [Movement(what="all-reduces of the gradients", times=1, num_bytes=8)]
    num_bytes = 4 if precision(setting)["reductions"] == "float32" else low
    if strategy.kind == "zero" and strategy.zero_stage < 3:
        # Section 7 has a reduction to the owner; DeepSpeed 0.19.8 reduces to all, and each keeps its part
        # (runtime/zero/stage_1_and_2.py, allreduce_and_scatter).
        reductions = times if strategy.zero_stage == 2 else 1
        return [
            Movement(what="all-reduces of the gradients", times=reductions, num_bytes=2 * num_bytes),
            Movement(what="gathers of the updated weights", times=1, num_bytes=low),
        ]
    gathers = times if _keeps_gathered(strategy) else 2 * times
    found = [
        Movement(what="gathers of the weights", times=gathers, num_bytes=low),
        Movement(what="reductions of the gradients", times=times, num_bytes=num_bytes),
    ]
    if strategy.dp_replicate_size > 1:
        shards = setting.num_shards
        found.append(Movement(what="all-reduces between groups", times=1, num_bytes=8, num_shards=shards))
    return found


def traffic_in_words(setting: Setting) -> str:
    """What moves in a step, with its sum in bytes a parameter."""
    if setting.num_processes == 1:
        return "; ".join([NO_TRAFFIC, *_over_pcie(setting.strategy)])
    if setting.strategy.kind == "tp":
        return "for each micro-batch and layer two all-reduces of activations in each direction"
    found = movements(setting)
    terms = [f"{m.what} {m.times} x {m.num_bytes}" + (f"/{m.num_shards}" if m.num_shards > 1 else "") for m in found]
    sentences = [f"{' + '.join(terms)} = {total_traffic(setting):.4g} a step"]
    if setting.adapter is not None:
        gathers = setting.strategy.zero_stage == 3 or setting.strategy.fsdp is not None
        sentences.append("of a frozen one the gathers" if gathers else "of a frozen one nothing")
    return "; ".join([*sentences, *_over_pcie(setting.strategy)])


def total_traffic(setting: Setting) -> float:
    """Bytes of a trained parameter that a process sends in a step."""
    return math.fsum(m.times * m.num_bytes / m.num_shards for m in movements(setting))


def _over_pcie(strategy: Strategy) -> list[str]:
    if strategy.offload_param is not None or (strategy.fsdp is not None and strategy.fsdp.fsdp_offload_params):
        place = "the disk" if strategy.offload_param == "nvme" else "host memory"
        return [f"between {place} and GPU its share of the weights for each gather, and of the gradients"]
    if strategy.offload_optimizer is not None:
        return ["between host memory and GPU its share of the gradients, and of the updated weights"]
    return []


def as_dict(setting: Setting) -> dict[str, Any]:
    """States and traffic in bytes of a parameter, for programs."""
    found, frozen = shares(setting), frozen_share(setting)
    return {
        "states": [vars(share) for share in found],
        "frozen": vars(frozen) if frozen else None,
        "traffic": [vars(movement) for movement in movements(setting)],
    }
