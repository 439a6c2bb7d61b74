"""A fine-tuning as users of transformers' Trainer write it; a program of the race, benchmarks/vs_peers.py."""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments


def tokenize(rows: Dataset, tokenizer: Any) -> Dataset:
    """Chats as tokens, of which those of the assistant carry loss."""

    def labelled(row: dict[str, Any]) -> dict[str, list[int]]:
        tokens = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        pairs = zip(tokens["input_ids"], tokens["assistant_masks"], strict=True)
        return {"input_ids": tokens["input_ids"], "labels": [token if carries else -100 for token, carries in pairs]}

    return rows.map(labelled, remove_columns=rows.column_names)


def build_trainer(settings: dict[str, Any]) -> Trainer:
    name = settings["model"]
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    return Trainer(
        model=AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False, use_safetensors=True),
        args=TrainingArguments(**settings["arguments"]),
        train_dataset=tokenize(load_dataset("json", data_files=settings["data"], split="train"), tokenizer),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )


def main() -> None:
    trainer = build_trainer(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    trainer.train()
    if trainer.is_world_process_zero():
        Path("log.json").write_text(
            json.dumps([line for line in trainer.state.log_history if "loss" in line]), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
