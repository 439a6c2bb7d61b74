"""The rows that converted files name, as sources of a recipe."""

from pathlib import Path
from typing import Any

from cookbook.commands.convert import source_sections
from cookbook.commands.convert.collected import Collected, in_short
from cookbook.config.foreign import NoCounterpart, Project, asks_for_nothing, share, tables
from cookbook.system.files import read_document, show

SOURCE_KEYS = {key: key for key in ("path", "name", "split", "revision", "weight")}
SOURCE_KEYS |= {"id": "path", "data_files": "path", "config": "name"}
COLUMN_KEYS = {"field_chosen": "chosen", "field_rejected": "rejected", "text_column": "text", "field": "text"}
COLUMN_KEYS |= {"field_messages": "messages", "message_field_role": "role", "message_field_content": "content"}
USUAL = (("roles_to_train", ["assistant"]), ("train_on_eos", "turn"), ("ds_type", "json"), ("train_on_split", "train"))
"""What axolotl's keys of a data set are where a file is silent, or what the rows show."""
RECOGNIZED_TYPES = ("alpaca", "chat_template", "completion", "sharegpt")
SOURCE_ADVICE = "no counterpart; the shape of rows is recognized, and data.columns maps the rest"


def read_test_split(found: Collected, project: Project | None) -> None:
    """TRL's `dataset_test_split` is `test`, and is read where a file asks for evaluations."""
    is_named = found.other.keys() & {"~mixture", "~sources", "~test_split"} or "~dataset" not in found.other
    if project is tables().projects["trl"] and not is_named and found.other.get("~eval_strategy") in ("steps", "epoch"):
        found.other["~test_split"] = "test"
        found.notes.append("not in the file: the split test is evaluated, TRL's own")


def derive_rows(found: Collected) -> None:
    """`data.train`, `data.eval`, `data.holdout` and `data.columns`."""
    path, config, split = found.take("dataset"), found.take("dataset_config"), found.take("train_split")
    test, rows, held_out = found.take("test_split"), found.take("max_rows"), found.take("val")
    part = source_sections.share_held_out(split, (held_out or {}).get("split"))
    if part is not None:
        found.recipe["data.holdout"], held_out = part, None
        split = split.partition("[")[0]
    sources = _sources(found, path, config, split)
    if rows is not None:
        sources = [{**source, "max_rows": rows} for source in sources]
    if sources:
        only = sources[0]["path"] if sources[0].keys() == {"path"} else sources[0]
        found.recipe["data.train"] = sources if len(sources) > 1 else only
    is_used = "~dataset_component" in found.places or any(source["path"] == path for source in sources)
    if test is not None and is_used:
        found.recipe["data.eval"] = {**sources[0], "split": test}
    for key, value in {"dataset": path, "dataset_config": config, "train_split": split, "test_split": test}.items():
        if value is not None and not is_used:
            found.change(f"~{key}", "left out: other keys name the rows; write it at its source in data.train")
    for name in _names(found, "registered_eval"):
        found.recipe.setdefault("data.eval", {})[name] = f"path/to/{name}.jsonl"
    others = _list_of_sources(found, "test_sources") + _listed(found, "listed_eval")
    for i, source in enumerate([*others, *([_of_torchtune(found, held_out, "~val")] if held_out else [])]):
        found.recipe.setdefault("data.eval", {})[f"set{i}" if i else "eval"] = source
    columns = {"text": found.take("text_field"), "messages": found.take("messages_column")}
    columns |= {
        source_sections.COLUMN_MAP.get(key, key): column for key, column in found.take("column_map", {}).items()
    }
    if columns := {key: column for key, column in columns.items() if column not in (None, key)}:
        found.recipe["data.columns"] = columns


def _sources(found: Collected, path: str | None, config: Any, split: Any) -> list[dict[str, Any]]:
    mixture = found.take("mixture")
    if mixture is not None:
        _mixture(found, mixture)
    if "~pretraining" in found.other:
        found.other["~sources"], found.places["~sources"] = found.take("pretraining"), found.places["~pretraining"]
        found.recipe |= {"objective.name": "cpt", "data.streaming": True}
    if sources := [*_list_of_sources(found, "sources"), *_listed(found, "listed")]:
        return sources
    splits, mixer = found.take("splits"), found.take("mixer")
    if mixer is not None:
        return _of_mixer(found, mixer, splits or ["train"])
    if names := _names(found, "registered"):
        return [{"path": f"path/to/{name}.jsonl"} for name in names]
    if several := found.take("dataset_list"):
        return [_of_torchtune(found, one, "~dataset_list") for one in several]
    component, files = found.take("dataset_component"), found.take("data_files")
    name = str(component).rpartition(".")[2]
    if name in source_sections.ALPACA:
        _alpaca(found, "~dataset_component")
        found.recipe["data.columns"] = {"user": "instruction", "context": "input", "assistant": "output"}
    if source_sections.trains_on_input(name) and "objective.train_on" not in found.given:
        found.recipe["objective.train_on"] = "all"
        found.note("~dataset_component", "train_on_input is true where the file is silent: objective.train_on all")
    if files is not None:
        path, split = files, None
    if path is None and component is not None:
        path = source_sections.KNOWN.get(name)
        if path is None:
            path = "path/to/rows.jsonl"
            found.note("~dataset_component", "write the path of its rows in data.train")
    if path is None:
        return []
    if split is not None and "[" in str(split):
        found.change("~train_split", "write data.train.max_rows for a part of a split")
        split = str(split).partition("[")[0]
    extra = {"name": config, "split": split if split != "train" else None}
    return [{"path": path, **{key: value for key, value in extra.items() if value is not None}}]


def _mixture(found: Collected, mixture: dict[str, Any]) -> None:
    found.other["~sources"] = mixture.get("datasets", [])
    found.places["~sources"] = found.places["~mixture"]
    for key in sorted(mixture.keys() - {"datasets"}):
        if key == "test_split_size" and mixture[key] is not None:
            try:
                found.recipe["data.holdout"] = share(mixture[key])
            except NoCounterpart as problem:
                found.change("~mixture", f"{key} {show(mixture[key])}: {problem}")
        elif not asks_for_nothing(mixture[key]):
            found.change("~mixture", f"{key} {show(mixture[key])}: no counterpart")


def _of_torchtune(found: Collected, given: Any, place: str) -> dict[str, Any]:
    """A source from a section of torchtune's."""
    if not isinstance(given, dict):
        found.change(place, f"{in_short(given)} is no section; write the source")
        return {"path": "path/to/rows.jsonl"}
    source, left_out = source_sections.of_torchtune(given)
    for line in left_out:
        found.change(place, line)
    return source


def _listed(found: Collected, key: str) -> list[dict[str, Any]]:
    """The sources in a file that LLaMA-Factory v1 names, or the one that it is."""
    name = found.take(key)
    if name is None:
        return []
    if not name.endswith((".yaml", ".yml")):
        return [{"path": name}]
    path = next((one for one in (Path(name), found.folder / name) if one.is_file()), None)
    if path is None:
        found.note(f"~{key}", "no such file; write the paths of its rows, or their names on the Hub")
        return [{"path": "path/to/rows.jsonl"}]
    sources, left_out = source_sections.of_listed(read_document(path).values)
    for line in left_out:
        found.change(f"~{key}", line)
    return sources


def _alpaca(found: Collected, place: str) -> None:
    """Rows in Alpaca's prompt, whatever the model's template."""
    if found.recipe.get("data.chat_template", "alpaca") != "alpaca":
        found.note(
            place, f"has Alpaca's prompt, so data.chat_template {found.recipe['data.chat_template']} is left out"
        )
    found.recipe["data.chat_template"] = "alpaca"


def _of_mixer(found: Collected, mixer: dict[str, Any], splits: list[str]) -> list[dict[str, Any]]:
    """The handbook's {data set: fraction}, whose splits are by name for training or test."""
    train = [split for split in splits if "train" in split] or ["train"]
    test = [split for split in splits if "test" in split]
    if test:
        found.recipe["data.eval"] = {
            f"{path.replace('/', '-')}-{split}": {"path": path, "split": split} for path in mixer for split in test
        }
    if any(_number_of(part) != 1 for part in mixer.values()):
        found.change("~mixer", "a fraction became weight: each epoch uses another part of the rows")
    sources = []
    for path, part in mixer.items():
        weight = {"weight": part} if _number_of(part) != 1 else {}
        sources += [{"path": path, **({"split": split} if split != "train" else {}), **weight} for split in train]
    return sources


def _names(found: Collected, key: str) -> list[str]:
    """Names of LLaMA-Factory's dataset_info.json, each to be replaced by a path."""
    names = found.take(key, [])
    if names:
        found.note(f"~{key}", "names in dataset_info.json; write the paths of their rows, or their names on the Hub")
    return names


def _list_of_sources(found: Collected, key: str) -> list[dict[str, Any]]:
    sources: list[dict[str, Any]] = []
    types: list[str] = []
    for given in found.take(key) or []:
        source = given if isinstance(given, dict) else {"path": given}
        own: dict[str, Any] = {}
        columns: dict[str, Any] = {}
        for theirs, value in source.items():
            ours = SOURCE_KEYS.get(theirs)
            if value is None or (theirs == "split" and value == "train") or (theirs == "weight" and value == 1):
                continue
            if ours is not None and not (theirs == "path" and source.get("data_files")):  # then a format: json, csv
                own[ours] = value
            elif (theirs, value) in USUAL or (theirs == "type" and value == "pretrain"):
                continue
            elif theirs in COLUMN_KEYS:
                is_prompt = theirs == "field_messages" and str(source.get("type")).startswith("chat_template.")
                columns["prompt" if is_prompt else COLUMN_KEYS[theirs]] = value
            elif theirs == "message_property_mappings" and isinstance(value, dict):
                columns |= {one: value[one] for one in ("role", "content") if one in value}
            elif theirs == "type" and str(value).removesuffix(".default") in RECOGNIZED_TYPES:
                types.append(value)
            else:
                line = found.change if theirs in ("type", "shards") else found.note
                line(f"~{key}", f"{theirs} {in_short(value)}: {SOURCE_ADVICE}")
        own.setdefault("path", "path/to/rows.jsonl")
        columns = {ours: column for ours, column in columns.items() if ours != column}
        sources.append({**own, **({"columns": columns} if columns else {})})
    if sources and types == ["completion"] * len(sources):
        found.recipe.setdefault("data.too_long", "split")
    if sources and types == ["alpaca"] * len(sources):
        _alpaca(found, f"~{key}")
    elif "alpaca" in types:
        found.change(f"~{key}", "type alpaca: a run has one prompt; for Alpaca's, write data.chat_template: alpaca")
    return sources


def _number_of(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 1.0
