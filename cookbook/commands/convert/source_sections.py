"""Sources of rows from sections of other projects' files."""

import re
from pathlib import PurePosixPath
from typing import Any

from cookbook.system.files import kind_in_words, show

ALPACA = ("alpaca_dataset", "alpaca_cleaned_dataset")
ALPACA_COLUMNS = {"user": "instruction", "context": "input", "assistant": "output"}
FOLDER = "data_dir"
KNOWN: dict[str, dict[str, Any]] = {
    "alpaca_dataset": {"path": "tatsu-lab/alpaca", "columns": ALPACA_COLUMNS},
    "alpaca_cleaned_dataset": {"path": "yahma/alpaca-cleaned", "columns": ALPACA_COLUMNS},
    "grammar_dataset": {"path": "liweili/c4_200m"},
    "samsum_dataset": {"path": "Samsung/samsum", "columns": {"user": "dialogue", "assistant": "summary"}},
    "slimorca_dataset": {"path": "Open-Orca/SlimOrca-Dedup"},
    "stack_exchange_paired_dataset": {
        "path": "lvwerra/stack-exchange-paired",
        "columns": {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
        FOLDER: "data/rl",
    },
    "hh_rlhf_helpful_dataset": {"path": "RLHFlow/HH-RLHF-Helpful-standard"},
    "cnn_dailymail_articles_dataset": {"path": "ccdv/cnn_dailymail", "name": "3.0.0", "columns": {"text": "article"}},
    "wikitext_dataset": {
        "path": "EleutherAI/wikitext_document_level",
        "name": "wikitext-103-v1",
        "columns": {"text": "page"},
    },
}
"""Columns by ours, and a folder in the data set, that torchtune's builders read where a file is silent. A builder has
its name in torchtune/datasets/."""
COLUMN_MAP = {"input": "user", "output": "assistant", "conversations": "messages"}
COLUMN_MAP |= {"question": "user", "answer": "assistant"}
"""Keys of torchtune's column_map, with ours of data.columns; the others have the same name."""
LISTED = {"path": "path", "file_name": "path", "hf_hub_url": "path", "split": "split", "subset": "name"}
LISTED |= {"num_samples": "max_rows", "size": "max_rows", "weight": "weight"}
"""Keys of a data set in LLaMA-Factory v1's files, with ours."""
BUILDER_COLUMNS = {"conversation_column": "messages", "column": "text"}
"""Keys of torchtune's builders that name one column, with ours."""
PATHS = ("data_files", "source", "path_or_dataset_id", "path_or_dataset", "dataset_name")
"""Keys that name rows, as torchtune and Automodel have them; the first that is there holds."""
LIMITS = ("limit_dataset_samples", "num_samples_limit")
SHAPES = (
    *("converter", "source", "_component_", "packed", "train_on_input", "conversation_style", "add_eos"),
    *("_target_", "tokenizer", "seq_length", "padding", "truncation", "pad_to_max_length", "answer_only_loss_mask"),
)
"""Keys that say how rows are read or used, which is recognized, or is that of all sources."""


def trains_on_input(builder: str) -> bool:
    """Return whether the loss of one of torchtune's builders is on the prompt too, where the file does not say."""
    return builder in ALPACA


def columns_of(builder: str, column_map: Any) -> dict[str, str]:
    """`data.columns` of one of torchtune's builders, whose own columns hold where a file has no map."""
    if not isinstance(column_map, dict) or not column_map:
        return dict(KNOWN.get(builder, {}).get("columns", {}))
    names = {there: ours for ours, there in ALPACA_COLUMNS.items()} if builder in ALPACA else COLUMN_MAP
    return {str(names.get(key, key)): column for key, column in column_map.items()}


def folder_advice(source: dict[str, Any]) -> str:
    """Advice for a folder in a data set."""
    return (
        f"its rows are those in the folder {source[FOLDER]} of the data set, and here all of it is read; download the"
        " folder, and write its path"
    )


def of_all_sources(section: dict[str, Any]) -> list[str]:
    """Advice for settings of one of several sources that are here those of all."""
    builder = str(section.get("_component_", "")).rpartition(".")[2]
    asked = {
        "packed true: write data.packing: true": section.get("packed"),
        "train_on_input true: write objective.train_on: all": section.get("train_on_input", trains_on_input(builder)),
        "has Alpaca's prompt: write data.chat_template: alpaca, which is that of all rows": builder in ALPACA,
    }
    return [advice for advice, is_asked in asked.items() if is_asked]


def files_in(value: Any, split: Any) -> list[str]:
    """The files that `data_files` of the library datasets names for a split: one, several, or those of each split."""
    if isinstance(value, dict):
        value = value.get(str(split or "train"))
    return [str(file) for file in value] if isinstance(value, list) else [] if value is None else [str(value)]


def share_held_out(train: Any, held_out: Any) -> float | None:
    """The share that two slices of one split hold out, as `train[:95%]` and `train[95%:]` do."""
    kept = re.fullmatch(r"(\w+)\[:(\d+)%\]", str(train))
    held = re.fullmatch(r"(\w+)\[(\d+)%:\]", str(held_out))
    if kept is None or held is None or kept.groups() != held.groups():
        return None
    return round(1 - int(kept[2]) / 100, 2)


def of_torchtune(section: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A source from a section `dataset` or `dataset_val`, and what of it is left out."""
    builder = str(section.get("_component_", "")).rpartition(".")[2]
    named = next((section[key] for key in PATHS if section.get(key)), None)
    known = KNOWN.get(builder, {})
    source: dict[str, Any] = {"path": named or known.get("path", "path/to/rows.jsonl")}
    source |= {key: known[key] for key in ("name",) if key in known}
    columns = columns_of(builder, section.get("column_map"))
    left_out = [folder_advice(known)] if FOLDER in known else []
    for key, value in section.items():
        if key in LIMITS and value is not None:
            source["max_rows"] = value
            continue
        if value is None or key in PATHS or (key == "split" and "data_files" in section):
            continue
        if key in ("name", "split") and value != "train":
            source[key] = value
        elif key in BUILDER_COLUMNS:
            columns |= {BUILDER_COLUMNS[key]: value} if BUILDER_COLUMNS[key] != value else {}
        elif key not in ("column_map", *SHAPES, "name", "split"):
            left_out.append(f"{key} {_short(value)}: no counterpart")
    return {**source, **({"columns": columns} if columns else {})}, left_out


def of_listed(values: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The sources in a file of LLaMA-Factory v1's data sets, and what of them is left out."""
    sources, left_out = [], []
    for name, entry in values.items():
        section = entry if isinstance(entry, dict) else {"path": entry}
        source = {LISTED[key]: value for key, value in section.items() if key in LISTED and value is not None}
        folder = section.get("dataset_dir")
        path = str(source.get("path") or f"path/to/{name}.jsonl")
        sources.append({**source, "path": str(PurePosixPath(str(folder)) / path) if folder else path})
        unknown = [key for key in section if key not in (*LISTED, *SHAPES, "dataset_dir")]
        left_out += [f"{name}.{key} {_short(section[key])}: no counterpart" for key in unknown]
    return sources, left_out


def _short(value: Any) -> str:
    return kind_in_words(value) if isinstance(value, list | dict) and value else show(value)
