"""Tiny mixtures of experts for the strategies that need one."""

from typing import Any

import yaml
from filelock import FileLock
from transformers import PreTrainedConfig

from tests.curves import ROOT, Lab


def needs_experts(strategy: str) -> bool:
    """True if a shipped strategy divides experts, so that no dense model trains under it."""
    values = yaml.safe_load((ROOT / "accelerate_configs" / f"{strategy}.yaml").read_text())
    return "parallelism_config_ep_size" in values.get("parallelism_config", {})


def experts(lab: Lab, model_type: str = "qwen3_moe", **changes: Any) -> dict[str, str]:
    """The setting of a recipe that trains a tiny mixture, with a tokenizer of the lab's rows: of six experts a layer,
    which two groups of two processes cannot share evenly.

    Args:
        changes: of its configuration.
    """
    from transformers import AutoTokenizer

    from benchmarks import tiny_models

    words = "".join(f"-{key}_{value}" for key, value in changes.items())
    folder = lab.folder / f"experts-{model_type}{words}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            AutoTokenizer.from_pretrained(lab.run("single").folder / "export").save_pretrained(folder)
            tiny_models.tiny_model(experts_config(model_type, **changes)).save_pretrained(folder)
    return {"model": f"{{name_or_path: {folder}}}"}


def experts_config(model_type: str = "qwen3_moe", **changes: Any) -> PreTrainedConfig:
    """The configuration of `experts`."""
    from benchmarks import tiny_models

    config = tiny_models.tiny_config(model_type)
    count = "num_local_experts" if model_type == "mixtral" else "num_experts"
    for key, value in ({count: 6, "tie_word_embeddings": True} | changes).items():
        setattr(config, key, value)
    return config
