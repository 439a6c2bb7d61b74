"""Published runs of ZeRO of which nobody says what kind of memory was read, beside the plan's own forecast.

    python benchmarks/plan_accuracy.py

What was read may be what torch had allocated, what it held in reserve, or all that nvidia-smi saw. So a forecast agrees
if the figure lies between what it expects to be allocated and the most that it expects on the GPU. Each is an ordinary
recipe under a strategy of ours, but for the logits: transformers' own loss held them whole, where ours come in parts,
and the upper end has room for that. `GB` is taken for GiB, as nvidia-smi prints it.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from benchmarks.published_rows import LLAMA_2, Row
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import load_strategy
from cookbook.forecast.memory import GIB
from cookbook.forecast.outside import outside
from cookbook.forecast.verdict import of_run
from cookbook.planning.offline import known_model
from cookbook.planning.run_plan import make_plan
from cookbook.system.hardware import parse_machines

ROOT = Path(__file__).resolve().parent.parent
WHOLE_LOGITS = 2 + 4 + 4
"""Bytes of a position and word: in 16 bits, as float32, and the gradient of that."""
EVERY_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QWEN_72B = dict(
    model_type="qwen2",
    vocab_size=152064,
    hidden_size=8192,
    intermediate_size=24576,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=64,
    tie_word_embeddings=False,
)
QWEN_14B = dict(
    model_type="qwen2",
    vocab_size=152064,
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
LLAMA_7B = LLAMA_2 | dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)


@dataclass(frozen=True, kw_only=True)
class Unsaid:
    """What of a row its table does not say, and its program's scripts do."""

    sizes: dict[str, Any] | str
    """Sizes of the model, or its name in recipes/offline_facts.json."""
    strategy: str
    gpus: str
    length: int
    accumulation: int
    rank: int | None = None
    targets: tuple[str, ...] = ()


def _qwen_72b(length: int) -> Unsaid:
    """finetune.py of QwenLM/Qwen: LoRA of rank 64 on c_attn, c_proj, w1 and w2; its scripts recompute."""
    return Unsaid(
        sizes=QWEN_72B,
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
    "m246": Unsaid(sizes="Qwen/Qwen2.5-7B", strategy="zero3", gpus="4xA100-80GB", length=8192, accumulation=4),
    "m259": Unsaid(sizes=QWEN_14B, strategy="zero3", gpus="8xA100-80GB", length=8192, accumulation=2),
    "m418": Unsaid(
        sizes=LLAMA_7B,
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
    strategy = load_strategy(ROOT / f"accelerate_configs/{setup.strategy}.yaml")
    recipe = _recipe(setup, machines.num_gpus)
    plan = make_plan(
        recipe, strategy, num_processes=machines.num_gpus, num_gpus=machines.num_gpus, recipe_name=row["id"]
    )
    config = _config(setup)
    memory = of_run(config, recipe, strategy, plan, machines.gpu)
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


def _config(setup: Unsaid) -> PreTrainedConfig:
    if isinstance(setup.sizes, str):
        facts = known_model(setup.sizes)
        assert facts is not None
        return AutoConfig.for_model(**facts["config"])
    return AutoConfig.for_model(**setup.sizes)


def _recipe(setup: Unsaid, num_processes: int) -> Recipe:
    adapter = None
    if setup.rank is not None:
        adapter = {"name": "lora", "rank": setup.rank, "targets": list(setup.targets), "dropout": 0.05}
    return Recipe.model_validate(
        {
            "strategy": f"accelerate_configs/{setup.strategy}.yaml",
            "model": {"name_or_path": "published", "gradient_checkpointing": True},
            "data": {"train": "python-stdlib", "max_length": setup.length, "packing": False},
            "adapter": adapter,
            "batch": {"global_batch_size": num_processes * setup.accumulation, "micro_batch_size": 1},
            "optim": {"learning_rate": 1e-5},
            "run": {"max_steps": 1, "output_dir": "outputs/published"},
        }
    )
