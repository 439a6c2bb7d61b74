"""The rows that converted files name, as sources of a recipe."""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from cookbook.commands.convert import source_sections
from cookbook.commands.convert.collected import CollectedKeys, in_short
from cookbook.config.foreign import NoCounterpart, Project, share, tables
from cookbook.config.owner_schemas import read_classes
from cookbook.rows.row_columns import MESSAGE_KEYS
from cookbook.rows.row_kinds import kinds
from cookbook.system.files import read_document, show

ROWS = (
    *("~dataset", "~sources", "~mixture", "~mixer", "~registered", "~listed", "~dataset_list", "~data_files"),
    *("~pretraining", "~dataset_component"),
)
"""Derived keys that name rows to train on."""
SOURCE_KEYS = {key: key for key in ("path", "name", "split", "revision", "weight")}
SOURCE_KEYS |= {"id": "path", "data_files": "path", "config": "name"}
AXOLOTL_COLUMNS = {"field_chosen": "chosen", "field_rejected": "rejected", "text_column": "text", "field": "text"}
AXOLOTL_COLUMNS |= {"field_messages": "messages", "message_field_role": "role", "message_field_content": "content"}
"""Keys of axolotl's data sets that name one column, with ours."""
USUAL = (
    ("type", "pretrain"),
    ("roles_to_train", ["assistant"]),
    ("train_on_eos", "turn"),
    ("ds_type", "json"),
    ("train_on_split", "train"),
)
"""Values of axolotl's keys of a data set that hold where a file is silent, or that the rows show."""
RECOGNIZED_TYPES = ("alpaca", "chat_template", "completion", "sharegpt")
FRACTION = "a fraction became weight: each epoch uses another part of the rows"
SOURCE_ADVICE = "no counterpart; the shape of rows is recognized, and data.columns maps the rest"


def read_test_split(collected: CollectedKeys, project: Project | None) -> None:
    """TRL's `dataset_test_split` is `test`, and is read where a file asks for evaluations."""
    is_named = collected.other.keys() & {"~mixture", "~sources", "~test_split"} or "~dataset" not in collected.other
    if (
        project is tables().projects["trl"]
        and not is_named
        and collected.other.get("~eval_strategy") in ("steps", "epoch")
    ):
        collected.other["~test_split"] = "test"
        collected.notes.append("not in the file: the split test is evaluated, TRL's own")


def derive_rows(collected: CollectedKeys, project: Project | None) -> None:
    """`data.train`, `data.eval`, `data.holdout` and `data.columns`."""
    path, config, split = collected.take("dataset"), collected.take("dataset_config"), collected.take("train_split")
    config = config[0] if isinstance(config, list) and len(config) == 1 else config
    test, rows, held_out = collected.take("test_split"), collected.take("max_rows"), collected.take("val")
    part = source_sections.share_held_out(split, (held_out or {}).get("split"))
    if part is not None:
        collected.recipe["data.holdout"], held_out = part, None
        split = split.partition("[")[0]
    builder = str(collected.other.get("~dataset_component", "")).rpartition(".")[2]
    if "~mixture" in collected.other:
        _mixture(collected, collected.take("mixture"), project)
    is_mixed = "~mixer" in collected.other
    sources = _sources(collected, path, config, split)
    if rows is not None:
        sources = [{**source, "max_rows": rows} for source in sources]
    if sources:
        only = sources[0]["path"] if sources[0].keys() == {"path"} else sources[0]
        collected.recipe["data.train"] = sources if len(sources) > 1 else only
    is_used = "~dataset_component" in collected.places or any(source["path"] == path for source in sources)
    if test is not None and is_used:
        collected.recipe["data.eval"] = {**sources[0], "split": test}
    config = None if is_mixed else config
    for key, value in {"dataset": path, "dataset_config": config, "train_split": split, "test_split": test}.items():
        if value is not None and not is_used:
            collected.change(f"~{key}", "left out: other keys name the rows; write it at its source in data.train")
    for name in _names(collected, "registered_eval"):
        collected.recipe.setdefault("data.eval", {})[name] = f"path/to/{name}.jsonl"
    others = _list_of_sources(collected, "test_sources") + _list_sources(collected, "listed_eval")
    for i, source in enumerate([*others, *(_of_torchtune(collected, held_out, "~val") if held_out else [])]):
        collected.recipe.setdefault("data.eval", {})[f"set{i}" if i else "eval"] = source
    columns = {"text": collected.take("text_field"), "messages": collected.take("messages_column")}
    columns["prompt"] = collected.take("prompt_column")
    columns |= source_sections.columns_of(builder, collected.take("column_map"))
    if columns := {key: column for key, column in columns.items() if column not in (None, key)}:
        collected.recipe["data.columns"] = columns


def _sources(collected: CollectedKeys, path: str | None, config: Any, split: Any) -> list[dict[str, Any]]:
    if "~pretraining" in collected.other:
        _pretraining(collected)
    if sources := [*_list_of_sources(collected, "sources"), *_list_sources(collected, "listed")]:
        return sources
    splits, mixer = collected.take("splits"), collected.take("mixer")
    if mixer is not None:
        return _of_mixer(collected, mixer, splits or ["train"], config)
    if names := _names(collected, "registered"):
        return [{"path": f"path/to/{name}.jsonl"} for name in names]
    if several := collected.take("dataset_list"):
        return [source for section in several for source in _of_torchtune(collected, section, "~dataset_list")]
    component, files = collected.take("dataset_component"), collected.take("data_files")
    name = str(component).rpartition(".")[2]
    known = source_sections.KNOWN.get(name, {})
    if name in source_sections.ALPACA:
        _alpaca(collected, "~dataset_component")
    if source_sections.trains_on_input(name) and "objective.train_on" not in collected.given:
        collected.recipe["objective.train_on"] = "all"
        collected.note("~dataset_component", "train_on_input is true where the file is silent: objective.train_on all")
    if files is not None and (paths := source_sections.files_in(files, split)):
        return [{"path": path} for path in paths]
    if path is None and component is not None:
        path = known.get("path")
        if path is None:
            path = "path/to/rows.jsonl"
            collected.note("~dataset_component", "write the path of its rows in data.train")
    if path is None:
        return []
    if split is not None and "[" in str(split) and collected.recipe.get("data.streaming"):
        collected.change("~train_split", "a stream has no part of a split; write data.train.max_rows")
        split = str(split).partition("[")[0]
    if source_sections.FOLDER in known:
        collected.change("~dataset_component", source_sections.folder_advice(known))
    extra = {"name": config or known.get("name"), "split": split if split != "train" else None}
    return [{"path": path, **{key: value for key, value in extra.items() if value is not None}}]


def _pretraining(collected: CollectedKeys) -> None:
    """axolotl's stream of texts. A packed one cuts a text into windows (`PretrainTokenizationStrategy` in its
    prompt_strategies/pretrain.py), another the end of it (`encode_streaming` in utils/data/streaming.py)."""
    rows, place = collected.take("pretraining"), collected.places["~pretraining"]
    collected.other["~sources"], collected.places["~sources"] = rows, place
    is_packed = collected.recipe.get("data.packing") is True
    too_long = "split" if is_packed else "cut"
    if collected.recipe.get("data.too_long", too_long) != too_long:
        collected.change("data.too_long", f"of no effect on pretraining_dataset; data.too_long is {too_long}")
    collected.recipe |= {"objective.name": "cpt", "data.streaming": True, "data.too_long": too_long}
    first = rows[0] if isinstance(rows, list) and rows else rows
    is_of_windows = not isinstance(first, dict) or first.get("type") in (None, "pretrain")
    if is_packed and is_of_windows:
        collected.change(
            "~pretraining",
            "a text above data.max_length becomes windows there, each of which begins with the last min(256,"
            " (sequence_len - 1) // 2) tokens of the one before; the parts of data.too_long: split do not overlap",
        )
    elif not is_packed:
        collected.note("~pretraining", "without sample_packing a text is cut at its end: data.too_long cut")


def _mixture(collected: CollectedKeys, mixture: dict[str, Any], project: Project | None) -> None:
    """TRL's mixture, and the handbook's, whose keys with a default of their class need nothing."""
    collected.other["~sources"] = mixture.get("datasets", [])
    collected.places["~sources"] = collected.places["~mixture"]
    own = read_classes(project.schema).get("DatasetMixtureConfig", {}) if project is not None else {}
    for key in sorted(mixture.keys() - {"datasets"}):
        if mixture[key] is None or [mixture[key]] == own.get(key, ())[1:]:
            collected.idle.append(f"dataset_mixture.{key}")
        elif key == "streaming":
            collected.recipe["data.streaming"] = mixture[key]
        elif key == "seed":
            collected.change("~mixture", f"seed {show(mixture[key])}: the rows that are held out are those of our seed")
        elif key == "test_split_size":
            try:
                collected.recipe["data.holdout"] = share(mixture[key])
            except NoCounterpart as problem:
                collected.change("~mixture", f"{key} {show(mixture[key])}: {problem}")
        else:
            collected.change("~mixture", f"{key} {show(mixture[key])}: no counterpart")


def _of_torchtune(collected: CollectedKeys, section: Any, place: str) -> list[dict[str, Any]]:
    """The sources from a section of torchtune's, one for each of its files."""
    if not isinstance(section, dict):
        collected.change(place, f"{in_short(section)} is no section; write the source")
        return [{"path": "path/to/rows.jsonl"}]
    files = source_sections.files_in(section.get("data_files"), section.get("split"))
    sections = [{**section, "data_files": file} for file in files] or [section]
    converted = [source_sections.of_torchtune(part) for part in sections]
    left_out = converted[0][1] + (source_sections.of_all_sources(section) if place == "~dataset_list" else [])
    for line in left_out:
        collected.change(place, line)
    return [source for source, _ in converted]


def _list_sources(collected: CollectedKeys, key: str) -> list[dict[str, Any]]:
    """The sources in a file that LLaMA-Factory v1 names, or the one that it is."""
    name = collected.take(key)
    if name is None:
        return []
    if not name.endswith((".yaml", ".yml")):
        return [{"path": name}]
    if (path := collected.find(name)) is None:
        collected.note(f"~{key}", "no such file; write the paths of its rows, or their names on the Hub")
        return [{"path": "path/to/rows.jsonl"}]
    sources, left_out = source_sections.of_listed(read_document(path, takes_last=True).values)
    for line in left_out:
        collected.change(f"~{key}", line)
    return sources


def _alpaca(collected: CollectedKeys, place: str) -> None:
    """Rows in Alpaca's prompt, whatever the model's template."""
    if collected.recipe.get("data.chat_template", "alpaca") != "alpaca":
        collected.note(
            place, f"has Alpaca's prompt, so data.chat_template {collected.recipe['data.chat_template']} is left out"
        )
    collected.recipe["data.chat_template"] = "alpaca"


def _of_mixer(collected: CollectedKeys, mixer: dict[str, Any], splits: list[str], configs: Any) -> list[dict[str, Any]]:
    """The handbook's {data set: fraction}, whose splits are by name for training or test, and whose configurations are
    in the order of the data sets (`mix_datasets` in its data.py)."""
    names: dict[str, dict[str, Any]] = {path: {} for path in mixer}
    if configs is not None:
        listed = configs if isinstance(configs, list) else [configs]
        if len(listed) == len(mixer):
            names = {path: {"name": name} if name else {} for path, name in zip(mixer, listed, strict=True)}
        else:
            collected.change("~dataset_config", f"not one for each of {len(mixer)} data sets; write name at its source")
    train = [split for split in splits if "train" in split] or ["train"]
    test = [split for split in splits if "test" in split]
    if test:
        collected.recipe["data.eval"] = {
            f"{path.replace('/', '-')}-{split}": {"path": path, **names[path], "split": split}
            for path in mixer
            for split in test
        }
    if any(_number_of(part) < 1 for part in mixer.values()):
        collected.change("~mixer", FRACTION)
    sources = []
    for path, part in mixer.items():
        number = _number_of(part)  # above 1 that of rows, as open-instruct has it
        weight = {"weight": part} if number < 1 else {"max_rows": int(number)} if number > 1 else {}
        sources += [
            {"path": path, **names[path], **({"split": split} if split != "train" else {}), **weight} for split in train
        ]
    return sources


def _names(collected: CollectedKeys, key: str) -> list[str]:
    """Names of LLaMA-Factory's dataset_info.json, each to be replaced by a path."""
    names = collected.take(key, [])
    if names:
        collected.note(
            f"~{key}", "names in dataset_info.json; write the paths of their rows, or their names on the Hub"
        )
    return names


def _list_of_sources(collected: CollectedKeys, key: str) -> list[dict[str, Any]]:
    sources: list[dict[str, Any]] = []
    types: list[str] = []
    entries = [entry if isinstance(entry, dict) else {"path": entry} for entry in collected.take(key) or []]
    for source in [part for entry in entries for part in _parts_of(entry)]:
        converted: dict[str, Any] = {}
        columns: dict[str, Any] = {}
        alone: dict[str, str] = {}
        for key_there, value in source.items():
            ours = SOURCE_KEYS.get(key_there)
            if value is None or (key_there == "split" and value == "train") or (key_there == "weight" and value == 1):
                continue
            if key_there == "data_files" and "/" in str(source.get("path", "")):
                folder = str(source["path"])
                if collected.is_folder(folder):
                    converted["path"] = str(PurePosixPath(folder) / str(value))
                else:
                    collected.change(f"~{key}", f"data_files {in_short(value)} of {folder}: all of its files are read")
            elif key_there == "path" and source.get("data_files") and "/" not in str(value):
                continue  # the format of the files: json, csv
            elif ours is not None:
                converted.setdefault(ours, value)
            elif (key_there, value) in USUAL:
                continue
            elif key_there == "columns" and isinstance(value, list) and _are_of_one_kind(value):
                alone = {name: name for name in value}  # what data.columns names is all that is read
            elif key_there == "columns":
                collected.change(
                    f"~{key}",
                    f"columns {in_short(value)}: no other is read there; write columns of the source, as in {{messages:"
                    " messages}, with which these alone are read",
                )
            elif key_there in AXOLOTL_COLUMNS:
                is_prompt = key_there == "field_messages" and str(source.get("type")).startswith("chat_template.")
                columns["prompt" if is_prompt else AXOLOTL_COLUMNS[key_there]] = value
            elif key_there == "message_property_mappings" and isinstance(value, dict):
                columns |= {name: value[name] for name in MESSAGE_KEYS if name in value}
                if others := {name: there for name, there in value.items() if there != name}.keys() - {*MESSAGE_KEYS}:
                    collected.change(f"~{key}", f"{key_there} of {', '.join(sorted(others))}: {SOURCE_ADVICE}")
            elif key_there == "type" and str(value).removesuffix(".default") in RECOGNIZED_TYPES:
                types.append(value)
            else:
                collected.change(f"~{key}", f"{key_there} {in_short(value)}: {SOURCE_ADVICE}")
        converted.setdefault("path", "path/to/rows.jsonl")
        columns = alone | {ours: column for ours, column in columns.items() if ours != column}
        sources.append({**converted, **({"columns": columns} if columns else {})})
    if any("weight" in source for source in sources):
        collected.change(f"~{key}", FRACTION)
    if sources and types == ["completion"] * len(sources):
        collected.recipe.setdefault("data.too_long", "split")
    if sources and types == ["alpaca"] * len(sources):
        _alpaca(collected, f"~{key}")
    elif "alpaca" in types:
        collected.change(f"~{key}", "type alpaca: a run has one prompt; for Alpaca's, write data.chat_template: alpaca")
    return sources


def _parts_of(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """An entry for each of its files, or of its configurations, as axolotl reads a list of names."""
    files: list[Any] = source_sections.files_in(entry.get("data_files"), entry.get("split"))
    names = entry.get("name")
    for name in names if isinstance(names, list) and names else [names]:
        for file in files or [None]:
            part = {"name": name, "data_files": file}
            yield {**entry, **{key: value for key, value in part.items() if key in entry}}


def _are_of_one_kind(columns: list[Any]) -> bool:
    """Return whether columns have the names of the keys of one kind of rows, those that it requires among them."""
    return any(
        all(name in columns for name in kind.keys) and all(name in (*kind.keys, *kind.other_keys) for name in columns)
        for kind in kinds().values()
    )


def _number_of(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 1.0
