"""Published runs of ZeRO of which nobody says what kind of memory was read, beside the plan's own forecast.

What was read may be what torch had allocated, what it held in reserve, or all that nvidia-smi saw. So a forecast agrees
if the figure lies between what it expects to be allocated and the most that it expects on the GPU. Each is an ordinary
recipe under a strategy of ours, but for the logits: transformers' own loss held them whole, where ours come in parts,
and the upper end has room for that. `GB` is taken for GiB, as nvidia-smi prints it.
"""

from dataclasses import dataclass, replace

from benchmarks.forecast_accuracy.memory_rows import Row
from benchmarks.forecast_accuracy.memory_runs import recipe
from benchmarks.forecast_accuracy.models import config_of
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import find_strategy, load_strategy
from cookbook.forecast.memory import GIB
from cookbook.forecast.outside import outside
from cookbook.forecast.verdict import of_run
from cookbook.start.run_plan import make_plan
from cookbook.system.hardware import parse_machines

WHOLE_LOGITS = 2 + 4 + 4
"""Bytes of a position and word: in 16 bits, as float32, and the gradient of that."""
EVERY_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, kw_only=True)
class Unsaid:
    """Facts of a row that its table does not say, and its program's scripts do."""

    strategy: str
    gpus: str
    length: int
    accumulation: int
    rank: int | None = None
    targets: tuple[str, ...] = ()


def _qwen_72b(length: int) -> Unsaid:
    """finetune.py of QwenLM/Qwen: LoRA of rank 64 on c_attn, c_proj, w1 and w2; its scripts recompute."""
    return Unsaid(
        strategy="zero3",
        gpus="4xA100-80GB",
        length=length,
        accumulation=8,
        rank=64,
        targets=tuple(EVERY_LINEAR),
    )


UNSAID = {
    "m511": _qwen_72b(256),
    "m512": _qwen_72b(512),
    "m226": _qwen_72b(1024),
    "m513": _qwen_72b(2048),
    "m228": _qwen_72b(4096),
    "m514": _qwen_72b(8192),
    "m246": Unsaid(strategy="zero3", gpus="4xA100-80GB", length=8192, accumulation=4),
    "m259": Unsaid(strategy="zero3", gpus="8xA100-80GB", length=8192, accumulation=2),
    "m418": Unsaid(
        strategy="zero2",
        gpus="8xA100-80GB",
        length=8192,
        accumulation=8,
        rank=8,
        targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
}
"""By the row. All have micro-batches of one sample, and recompute."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A row and its forecast; GiB of a GPU."""

    id: str
    source: str
    setup: str
    published: float
    allocated: float
    most: float
    """With fragments, CUDA, NCCL and whole logits."""
    is_inside: bool


def place(row: Row) -> Placed:
    """The forecast of a row of `UNSAID`."""
    setup = UNSAID[row["id"]]
    machines = parse_machines(setup.gpus)
    strategy = load_strategy(find_strategy(setup.strategy))
    written = _recipe(setup, row["model"], machines.num_gpus)
    plan = make_plan(
        written, strategy, num_processes=machines.num_gpus, num_gpus=machines.num_gpus, recipe_name=row["id"]
    )
    config = config_of(row["model"])
    memory = of_run(config, written, strategy, plan, machines.gpu)
    memory = replace(memory, outside=outside(strategy, machines, machines.num_gpus))
    published = float(row["reported_GiB_or_GB"])
    if row["what_is_measured"].startswith("sum over"):
        published /= machines.num_gpus
    logits = WHOLE_LOGITS * setup.length * config.vocab_size
    allocated, most = memory.allocated / GIB, (memory.needed[1] + logits) / GIB
    adapter = f", LoRA of rank {setup.rank}" if setup.rank else ""
    return Placed(
        id=row["id"],
        source=row["source"],
        setup=f"{row['model']}, 1 x {setup.length:,}, {setup.strategy} x {machines.num_gpus}{adapter}",
        published=round(published, 2),
        allocated=round(allocated, 2),
        most=round(most, 2),
        is_inside=allocated <= published <= most,
    )


def _recipe(setup: Unsaid, model: str, num_processes: int) -> Recipe:
    adapter = None
    if setup.rank is not None:
        adapter = {"name": "lora", "rank": setup.rank, "targets": list(setup.targets), "dropout": 0.05}
    return recipe(
        setup.strategy,
        {"name_or_path": model, "gradient_checkpointing": True},
        adapter,
        length=setup.length,
        rows=1,
        rows_a_step=num_processes * setup.accumulation,
    )
