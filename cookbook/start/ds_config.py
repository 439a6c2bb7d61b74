"""The DeepSpeed configuration that a run passes to DeepSpeed. No torch."""

import copy
import hashlib
import math
from pathlib import Path
from typing import Any

from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy
from cookbook.start.run_plan import Plan


def deepspeed_config(strategy: Strategy, plan: Plan, recipe: Recipe) -> dict[str, Any] | None:
    """The strategy's JSON with every "auto" replaced by the recipe's value; None without DeepSpeed. A `gradient_dtype`
    that the recipe does not write is the JSON's, or DeepSpeed's default.
    """
    if strategy.deepspeed is None:
        return None
    accumulation, config = plan.gradient_accumulation_steps, copy.deepcopy(strategy.deepspeed)
    micro_batch_size = int(recipe.batch.micro_batch_size or 1)  # under a token budget it varies
    precision, gradient_dtype, scale = recipe.compute_precision, recipe.optim.gradient_dtype, recipe.loss_scaling
    fp16: dict[str, Any] = {"enabled": scale is not None}
    if scale is not None:
        fp16 |= {"initial_scale_power": round(math.log2(scale.initial)), "loss_scale_window": scale.window}
        fp16 |= {"hysteresis": scale.hysteresis, "min_loss_scale": scale.minimum}
    if "zero_hpz_partition_size" in config["zero_optimization"]:
        config["zero_optimization"]["zero_hpz_partition_size"] = strategy.secondary_group_size(plan.num_local)
    return {
        **config,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": fp16,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro_batch_size * accumulation * plan.num_processes,  # as DeepSpeed counts
        "gradient_clipping": recipe.optim.max_grad_norm,
        **({"communication_data_type": gradient_dtype} if gradient_dtype else {}),
        # Else DeepSpeed refuses every optimizer but its own for the host, which needs a compiler.
        **({"zero_force_ds_cpu_optimizer": False} if "offload_optimizer" in config["zero_optimization"] else {}),
        "zero_allow_untested_optimizer": True,  # torch's AdamW and SGD; DeepSpeed knows its own only
        "steps_per_print": 2**31,
    }


def separate_swap(config: dict[str, Any] | None, output_dir: str) -> dict[str, Path]:
    """Sets a swap folder per run, as DeepSpeed names swap files by rank only. Returns the folders by block."""
    folders = {}
    for key in ("offload_optimizer", "offload_param"):
        block = config["zero_optimization"].get(key, {}) if config else {}
        if block.get("device") == "nvme":
            folders[key] = Path(block["nvme_path"]).expanduser() / run_name(Path(output_dir))
            block["nvme_path"] = str(folders[key])
    return folders


def run_name(output_dir: Path) -> str:
    """A unique name for a run: its output folder's name and a digest of the whole path."""
    digest = hashlib.sha256(str(output_dir.resolve()).encode()).hexdigest()[:8]
    return f"{output_dir.name}-{digest}"
