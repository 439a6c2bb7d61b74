"""Protects which files of a folder are rows of a split: those that `datasets` finds there, or a refusal.

Run alone: python -m pytest -q tests/test_data_folders.py
"""

import bz2
import json
import os
import re
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from cookbook.config.objectives import Objective
from cookbook.config.recipe import Draft, parse_recipe
from cookbook.config.sections import Source
from cookbook.system.files import RecipeError
from cookbook.training.data.rows import read_rows
from cookbook.training.data.sources import local_files, unread_note

CARD = "---\nlicense: mit\n---\n# A set\n"
CONFIGS = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/first.jsonl}
  - {split: test, path: main/second.jsonl}
- config_name: extra
  data_files: extra/*.jsonl
---
"""


def lay_out(folder: Path, names: list[str], card: str = CARD) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": [name]}), path)
        else:
            path.write_text(card if path.suffix == ".md" else json.dumps({"text": name}) + "\n")


def read(path: Path | str, **source) -> list[str]:
    rows = read_rows(Source(path=str(path), **source), "error", Objective.of(name="cpt"))
    return [row["text"] for row in rows.rows]


LAYOUTS = {
    "downloaded": ["README.md", "data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"],
    "several shards": ["README.md", "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
    "a folder of the converter": ["CHANGES.txt", "default/train.jsonl"],
    "in the middle of a name": ["gsm_train.jsonl", "gsm_test.jsonl"],
    "behind other signs": ["qa-train.jsonl", "qa-validation.jsonl", "qa.dev.jsonl", "qa test.jsonl"],
    "other words": ["training.jsonl", "valid.jsonl", "evaluation.jsonl"],
    "parts of words": ["trainer_notes.jsonl", "contest.jsonl", "devices.jsonl"],
    "folders": ["train/a.jsonl", "train/b.jsonl", "dev/c.jsonl"],
}


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("names", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_files_of_a_split_are_those_that_the_library_finds(tmp_path, names, split):
    lay_out(tmp_path, names)
    rows = [name for name in names if Path(name).suffix in (".jsonl", ".parquet")]
    files = datasets.load_dataset_builder(str(tmp_path), cache_dir=str(tmp_path / ".cache")).config.data_files
    expected = sorted(os.path.relpath(name, tmp_path) for name in files.get(split, []))
    expected = [name for name in expected if name in rows]
    if not expected:
        with pytest.raises(RecipeError, match=f"for split '{split}'"):
            read(tmp_path, split=split)
        return
    assert sorted(read(tmp_path, split=split)) == expected
    assert unread_note(Source(path=str(tmp_path), split=split)) is None


def test_a_configuration_is_named_or_asked_for(tmp_path):
    files = ["main/first.jsonl", "main/second.jsonl", "extra/third.jsonl"]
    lay_out(tmp_path, ["README.md", *files], CONFIGS)
    with pytest.raises(RecipeError) as error:
        read(tmp_path)
    assert f"configurations main, extra; choose one with name, as in {{path: {tmp_path}, name: main}}" in str(
        error.value
    )
    assert read(tmp_path, name="main") == [files[0]] and read(tmp_path, name="main", split="test") == [files[1]]
    assert read(tmp_path, name="extra") == [files[2]]
    (tmp_path / "README.md").unlink()
    with pytest.raises(RecipeError, match=r"lie in the folders extra, main; choose one with name, as in"):
        read(tmp_path)
    assert read(tmp_path, name="extra") == [files[2]]
    with pytest.raises(RecipeError, match="no configuration and no folder 'other'; its folders: extra, main"):
        read(tmp_path, name="other")


def test_a_pattern_is_read_in_order_and_compressed_files_too(tmp_path, monkeypatch):
    lay_out(tmp_path, ["b.jsonl", "a.jsonl", "a.txt"])
    (tmp_path / "c.jsonl.bz2").write_bytes(bz2.compress(b'{"text": "packed"}\n'))
    assert read(tmp_path / "*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert read(tmp_path / "c.jsonl.bz2") == ["packed"]
    assert [path.name for path in local_files(Source(path=str(tmp_path / "[bc].jsonl*")))] == ["b.jsonl", "c.jsonl.bz2"]
    with pytest.raises(RecipeError, match=r"none\*: no data file fits this pattern"):
        read(tmp_path / "none*")
    for path, said in ((tmp_path / "*.jsonl", None), (tmp_path / "pipe.jsonl", "a pipe or a device")):
        if said is not None:
            os.mkfifo(path)
        values = {"strategy": "single", "model": {"name_or_path": "no/model"}, "data": {"train": str(path)}}
        values |= {"batch": {"global_batch_size": 1, "micro_batch_size": 1}, "optim": {"learning_rate": 1.0}}
        draft = Draft("x", values | {"run": {"num_epochs": 1}}, file=Path("recipes/mine.yaml"))
        if said is None:
            assert parse_recipe(draft).data.train[0].path == str(path)
            continue
        with pytest.raises(RecipeError, match=said):
            parse_recipe(draft)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv"])
def test_a_table_is_read_with_the_delimiter_that_its_names_have(tmp_path, name, delimiter):
    lines = [["instruction", "input", "output"], ["Hi", "", "yes; indeed"], ["Ho", "there", "no"]]
    quoted = [[f'"{cell}"' if ";" in cell else cell for cell in line] for line in lines]
    (tmp_path / name).write_text("".join(delimiter.join(line) + "\n" for line in quoted))
    rows = read_rows(Source(path=str(tmp_path / name)), "error", Objective.of(name="sft"))
    assert rows.rows[0] == {"user": "Hi", "assistant": "yes; indeed"} and rows.rows[1]["context"] == "there"
    (tmp_path / name).write_text('text\n"a; b, c"\n')
    assert read(tmp_path / name) == ["a; b, c"]


def test_a_card_alone_is_no_row_beside_a_split_that_is_asked_for(tmp_path):
    lay_out(tmp_path, ["README.md", "data/train-00000-of-00001.parquet"])
    with pytest.raises(RecipeError) as error:
        read(tmp_path, split="test")
    assert re.search(r"it has data/train-00000-of-00001\.parquet$", str(error.value))
