"""A fine-tuning as TRL's users write it; a program of the race, benchmarks/vs_peers.py."""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


def build_trainer(settings: dict[str, Any]) -> Any:
    name, arguments = settings["model"], settings["arguments"]
    lora = LoraConfig(r=settings["rank"], lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    parts = {
        "model": AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False, use_safetensors=True),
        "processing_class": AutoTokenizer.from_pretrained(name, trust_remote_code=False),
        "train_dataset": load_dataset("json", data_files=settings["data"], split="train"),
        "peft_config": lora if settings["rank"] else None,
    }
    if settings["objective"] == "dpo":
        return DPOTrainer(args=DPOConfig(**arguments, max_length=settings["max_length"]), **parts)
    packing = bool(settings["packed_rows"])
    config = SFTConfig(**arguments, assistant_only_loss=True, packing=packing, max_length=settings["max_length"])
    return SFTTrainer(args=config, **parts)


def main() -> None:
    trainer = build_trainer(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    trainer.train()
    if trainer.is_world_process_zero():
        Path("log.json").write_text(
            json.dumps([line for line in trainer.state.log_history if "loss" in line]), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
