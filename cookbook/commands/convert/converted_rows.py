"""The rows that converted files name, as sources of a recipe."""

from typing import Any

from cookbook.commands.convert import source_sections
from cookbook.commands.convert.collected import Collected, in_short
from cookbook.config.foreign import NoCounterpart, Project, asks_for_nothing, share, tables
from cookbook.system.files import read_document, show

ROWS = (
    *("~dataset", "~sources", "~mixture", "~mixer", "~registered", "~listed", "~dataset_list", "~data_files"),
    *("~pretraining", "~dataset_component"),
)
"""Derived keys that name rows to train on."""
SOURCE_KEYS = {key: key for key in ("path", "name", "split", "revision", "weight")}
SOURCE_KEYS |= {"id": "path", "data_files": "path", "config": "name"}
COLUMN_KEYS = {"field_chosen": "chosen", "field_rejected": "rejected", "text_column": "text", "field": "text"}
COLUMN_KEYS |= {"field_messages": "messages", "message_field_role": "role", "message_field_content": "content"}
USUAL = (
    ("type", "pretrain"),
    ("roles_to_train", ["assistant"]),
    ("train_on_eos", "turn"),
    ("ds_type", "json"),
    ("train_on_split", "train"),
)
"""What axolotl's keys of a data set are where a file is silent, or what the rows show."""
RECOGNIZED_TYPES = ("alpaca", "chat_template", "completion", "sharegpt")
SOURCE_ADVICE = "no counterpart; the shape of rows is recognized, and data.columns maps the rest"


def read_test_split(collected: Collected, project: Project | None) -> None:
    """TRL's `dataset_test_split` is `test`, and is read where a file asks for evaluations."""
    is_named = collected.other.keys() & {"~mixture", "~sources", "~test_split"} or "~dataset" not in collected.other
    if (
        project is tables().projects["trl"]
        and not is_named
        and collected.other.get("~eval_strategy") in ("steps", "epoch")
    ):
        collected.other["~test_split"] = "test"
        collected.notes.append("not in the file: the split test is evaluated, TRL's own")


def derive_rows(collected: Collected) -> None:
    """`data.train`, `data.eval`, `data.holdout` and `data.columns`."""
    path, config, split = collected.take("dataset"), collected.take("dataset_config"), collected.take("train_split")
    test, rows, held_out = collected.take("test_split"), collected.take("max_rows"), collected.take("val")
    part = source_sections.share_held_out(split, (held_out or {}).get("split"))
    if part is not None:
        collected.recipe["data.holdout"], held_out = part, None
        split = split.partition("[")[0]
    sources = _sources(collected, path, config, split)
    if rows is not None:
        sources = [{**source, "max_rows": rows} for source in sources]
    if sources:
        only = sources[0]["path"] if sources[0].keys() == {"path"} else sources[0]
        collected.recipe["data.train"] = sources if len(sources) > 1 else only
    is_used = "~dataset_component" in collected.places or any(source["path"] == path for source in sources)
    if test is not None and is_used:
        collected.recipe["data.eval"] = {**sources[0], "split": test}
    for key, value in {"dataset": path, "dataset_config": config, "train_split": split, "test_split": test}.items():
        if value is not None and not is_used:
            collected.change(f"~{key}", "left out: other keys name the rows; write it at its source in data.train")
    for name in _names(collected, "registered_eval"):
        collected.recipe.setdefault("data.eval", {})[name] = f"path/to/{name}.jsonl"
    others = _list_of_sources(collected, "test_sources") + _listed(collected, "listed_eval")
    for i, source in enumerate([*others, *([_of_torchtune(collected, held_out, "~val")] if held_out else [])]):
        collected.recipe.setdefault("data.eval", {})[f"set{i}" if i else "eval"] = source
    columns = {"text": collected.take("text_field"), "messages": collected.take("messages_column")}
    columns |= {
        source_sections.COLUMN_MAP.get(key, key): column for key, column in collected.take("column_map", {}).items()
    }
    if columns := {key: column for key, column in columns.items() if column not in (None, key)}:
        collected.recipe["data.columns"] = columns


def _sources(collected: Collected, path: str | None, config: Any, split: Any) -> list[dict[str, Any]]:
    mixture = collected.take("mixture")
    if mixture is not None:
        _mixture(collected, mixture)
    if "~pretraining" in collected.other:
        collected.other["~sources"], collected.places["~sources"] = (
            collected.take("pretraining"),
            collected.places["~pretraining"],
        )
        collected.recipe |= {"objective.name": "cpt", "data.streaming": True}
    if sources := [*_list_of_sources(collected, "sources"), *_listed(collected, "listed")]:
        return sources
    splits, mixer = collected.take("splits"), collected.take("mixer")
    if mixer is not None:
        return _of_mixer(collected, mixer, splits or ["train"])
    if names := _names(collected, "registered"):
        return [{"path": f"path/to/{name}.jsonl"} for name in names]
    if several := collected.take("dataset_list"):
        return [_of_torchtune(collected, section, "~dataset_list") for section in several]
    component, files = collected.take("dataset_component"), collected.take("data_files")
    name = str(component).rpartition(".")[2]
    if name in source_sections.ALPACA:
        _alpaca(collected, "~dataset_component")
        collected.recipe["data.columns"] = {"user": "instruction", "context": "input", "assistant": "output"}
    if source_sections.trains_on_input(name) and "objective.train_on" not in collected.given:
        collected.recipe["objective.train_on"] = "all"
        collected.note("~dataset_component", "train_on_input is true where the file is silent: objective.train_on all")
    if files is not None:
        path, split = files, None
    if path is None and component is not None:
        path = source_sections.KNOWN.get(name)
        if path is None:
            path = "path/to/rows.jsonl"
            collected.note("~dataset_component", "write the path of its rows in data.train")
    if path is None:
        return []
    if split is not None and "[" in str(split):
        collected.change("~train_split", "write data.train.max_rows for a part of a split")
        split = str(split).partition("[")[0]
    extra = {"name": config, "split": split if split != "train" else None}
    return [{"path": path, **{key: value for key, value in extra.items() if value is not None}}]


def _mixture(collected: Collected, mixture: dict[str, Any]) -> None:
    collected.other["~sources"] = mixture.get("datasets", [])
    collected.places["~sources"] = collected.places["~mixture"]
    for key in sorted(mixture.keys() - {"datasets"}):
        if key == "test_split_size" and mixture[key] is not None:
            try:
                collected.recipe["data.holdout"] = share(mixture[key])
            except NoCounterpart as problem:
                collected.change("~mixture", f"{key} {show(mixture[key])}: {problem}")
        elif not asks_for_nothing(mixture[key]):
            collected.change("~mixture", f"{key} {show(mixture[key])}: no counterpart")


def _of_torchtune(collected: Collected, section: Any, place: str) -> dict[str, Any]:
    """A source from a section of torchtune's."""
    if not isinstance(section, dict):
        collected.change(place, f"{in_short(section)} is no section; write the source")
        return {"path": "path/to/rows.jsonl"}
    source, left_out = source_sections.of_torchtune(section)
    for line in left_out:
        collected.change(place, line)
    return source


def _listed(collected: Collected, key: str) -> list[dict[str, Any]]:
    """The sources in a file that LLaMA-Factory v1 names, or the one that it is."""
    name = collected.take(key)
    if name is None:
        return []
    if not name.endswith((".yaml", ".yml")):
        return [{"path": name}]
    if (path := collected.find(name)) is None:
        collected.note(f"~{key}", "no such file; write the paths of its rows, or their names on the Hub")
        return [{"path": "path/to/rows.jsonl"}]
    sources, left_out = source_sections.of_listed(read_document(path).values)
    for line in left_out:
        collected.change(f"~{key}", line)
    return sources


def _alpaca(collected: Collected, place: str) -> None:
    """Rows in Alpaca's prompt, whatever the model's template."""
    if collected.recipe.get("data.chat_template", "alpaca") != "alpaca":
        collected.note(
            place, f"has Alpaca's prompt, so data.chat_template {collected.recipe['data.chat_template']} is left out"
        )
    collected.recipe["data.chat_template"] = "alpaca"


def _of_mixer(collected: Collected, mixer: dict[str, Any], splits: list[str]) -> list[dict[str, Any]]:
    """The handbook's {data set: fraction}, whose splits are by name for training or test."""
    train = [split for split in splits if "train" in split] or ["train"]
    test = [split for split in splits if "test" in split]
    if test:
        collected.recipe["data.eval"] = {
            f"{path.replace('/', '-')}-{split}": {"path": path, "split": split} for path in mixer for split in test
        }
    if any(_number_of(part) != 1 for part in mixer.values()):
        collected.change("~mixer", "a fraction became weight: each epoch uses another part of the rows")
    sources = []
    for path, part in mixer.items():
        weight = {"weight": part} if _number_of(part) != 1 else {}
        sources += [{"path": path, **({"split": split} if split != "train" else {}), **weight} for split in train]
    return sources


def _names(collected: Collected, key: str) -> list[str]:
    """Names of LLaMA-Factory's dataset_info.json, each to be replaced by a path."""
    names = collected.take(key, [])
    if names:
        collected.note(
            f"~{key}", "names in dataset_info.json; write the paths of their rows, or their names on the Hub"
        )
    return names


def _list_of_sources(collected: Collected, key: str) -> list[dict[str, Any]]:
    sources: list[dict[str, Any]] = []
    types: list[str] = []
    for entry in collected.take(key) or []:
        source = entry if isinstance(entry, dict) else {"path": entry}
        converted: dict[str, Any] = {}
        columns: dict[str, Any] = {}
        for key_there, value in source.items():
            ours = SOURCE_KEYS.get(key_there)
            if value is None or (key_there == "split" and value == "train") or (key_there == "weight" and value == 1):
                continue
            if ours is not None and not (key_there == "path" and source.get("data_files")):  # then a format: json, csv
                converted[ours] = value
            elif (key_there, value) in USUAL or (key_there == "columns" and isinstance(value, list)):
                continue
            elif key_there in COLUMN_KEYS:
                is_prompt = key_there == "field_messages" and str(source.get("type")).startswith("chat_template.")
                columns["prompt" if is_prompt else COLUMN_KEYS[key_there]] = value
            elif key_there == "message_property_mappings" and isinstance(value, dict):
                columns |= {name: value[name] for name in ("role", "content") if name in value}
            elif key_there == "type" and str(value).removesuffix(".default") in RECOGNIZED_TYPES:
                types.append(value)
            else:
                collected.change(f"~{key}", f"{key_there} {in_short(value)}: {SOURCE_ADVICE}")
        converted.setdefault("path", "path/to/rows.jsonl")
        columns = {ours: column for ours, column in columns.items() if ours != column}
        sources.append({**converted, **({"columns": columns} if columns else {})})
    if sources and types == ["completion"] * len(sources):
        collected.recipe.setdefault("data.too_long", "split")
    if sources and types == ["alpaca"] * len(sources):
        _alpaca(collected, f"~{key}")
    elif "alpaca" in types:
        collected.change(f"~{key}", "type alpaca: a run has one prompt; for Alpaca's, write data.chat_template: alpaca")
    return sources


def _number_of(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 1.0
