"""Protects the rows that are not read again: found by content and settings, equal to those read, and never stale.

python -m pytest -q tests/test_data_known.py
"""

import json
import os
from pathlib import Path

import pytest
from small_data import make_tokenizer

from cookbook.config.objectives import Objective
from cookbook.config.sections import DataSection
from cookbook.system.files import RecipeError
from cookbook.training.data import known
from cookbook.training.data.known import known_rows
from cookbook.training.data.sets import read_data, tokenize_data

SFT = Objective.of(name="sft")


def text_file(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def reads(monkeypatch):
    """The calls of `read_data`, one entry each."""
    calls = []
    monkeypatch.setattr(known, "read_data", lambda *arguments: calls.append(1) or read_data(*arguments))
    return calls


def facts(sets):
    parts = [*sets.train, *(rows for parts in sets.eval.values() for rows in parts)]
    return [(rows.kind, rows.fingerprint, rows.num_dropped, rows.place, rows.renamed, len(rows.rows)) for rows in parts]


def settings(tmp_path, **keys):
    files = [text_file(tmp_path / f"{name}.jsonl", *(f"{name} {i}" for i in range(40)), "") for name in "ab"]
    return DataSection(train=files, holdout=0.2, on_bad_row="drop", **keys)


def test_rows_are_read_once_and_known_afterwards(tmp_path, reads):
    data = settings(tmp_path)
    first, second = (known_rows(data, SFT, cache=tmp_path / "cache") for _ in range(2))
    assert reads == [1]
    assert facts(first) == facts(second) == facts(read_data(data, SFT))
    assert first.fingerprint == second.fingerprint
    # Asked for, they are read, once for all sets.
    for first_set, other in zip(
        first.train + first.eval["holdout"], second.train + second.eval["holdout"], strict=True
    ):
        assert list(other.rows) == list(first_set.rows) and other.where(3) == first_set.where(3)
    assert reads == [1, 1]


def test_cached_tokens_need_no_row(tmp_path, reads):
    data, tokenizer, cache = settings(tmp_path, max_length=20), make_tokenizer(), tmp_path / "cache"
    made = tokenize_data(known_rows(data, SFT, cache=cache), tokenizer, data, SFT, cache=cache)
    again = tokenize_data(known_rows(data, SFT, cache=cache), tokenizer, data, SFT, cache=cache)
    assert reads == [1]
    assert again.train.fingerprint == made.train.fingerprint and again.notes == made.notes
    # With another length the rows are the same, and are read to be tokenized.
    longer = data.model_copy(update={"max_length": 30})
    other = tokenize_data(known_rows(longer, SFT, cache=cache), tokenizer, longer, SFT, cache=cache)
    assert reads == [1, 1] and len(other.train) == len(made.train)


def test_the_same_content_is_known_under_another_name_and_time(tmp_path, reads):
    data, cache = settings(tmp_path), tmp_path / "cache"
    before = known_rows(data, SFT, cache=cache)
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert facts(known_rows(data, SFT, cache=cache)) == facts(before) and reads == [1]


@pytest.mark.parametrize("change", ["content", "same size", "settings", "objective", "damaged record"])
def test_whatever_rows_depend_on_makes_them_read_again(tmp_path, reads, change):
    data, cache, objective = settings(tmp_path), tmp_path / "cache", SFT
    known_rows(data, objective, cache=cache)
    path = tmp_path / "a.jsonl"
    if change == "content":
        path.write_text(path.read_text() + '{"text": "one more"}\n')
    elif change == "same size":  # the digest is cached by time: a tool that sets it back is not believed
        stat = path.stat()
        path.write_text(path.read_text().replace("a 1", "a 2"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    elif change == "settings":
        data = data.model_copy(update={"holdout": 0.3})
    elif change == "objective":
        objective = Objective.of(name="cpt")
    else:
        next(cache.glob("rows-*.json")).write_text('{"train": [')
    assert facts(known_rows(data, objective, cache=cache)) == facts(read_data(data, objective))
    assert reads == [1, 1]


def test_other_classes_make_other_rows_of_the_same_file(tmp_path, reads):
    """A label becomes the number of its class as it is read."""
    path, cache = tmp_path / "rows.jsonl", tmp_path / "cache"
    path.write_text("".join(json.dumps({"text": label, "label": label}) + "\n" for label in ("good", "bad")))
    data = DataSection(train=[str(path)])
    first, other = (Objective.of(name="classify", classes=names) for names in (["bad", "good"], ["good", "bad"]))
    before, after = (known_rows(data, objective, cache=cache) for objective in (first, other))
    assert len(reads) == 2 and facts(after) == facts(read_data(data, other)) != facts(before)
    known_rows(data, other, cache=cache)
    assert len(reads) == 2


def test_a_change_of_any_code_that_reads_rows_makes_them_read_again(tmp_path, monkeypatch):
    data, read_bytes = settings(tmp_path), Path.read_bytes
    keys = {known._key_of(data, SFT, tmp_path)}
    assert keys == {known._key_of(data, SFT, tmp_path)}, "the key of the same code"
    code = [path.resolve() for room in ("rows", "training/data") for path in Path("cookbook", room).glob("*.py")]
    for changed in code:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda path, which=changed: read_bytes(path) + b"#" * (path == which))
            keys.add(known._key_of(data, SFT, tmp_path))
    assert len(keys) == 1 + len(code) > 20


def test_files_that_change_after_the_start_are_an_error_and_no_mixture(tmp_path, reads):
    data, cache = settings(tmp_path), tmp_path / "cache"
    known_rows(data, SFT, cache=cache)
    late = known_rows(data, SFT, cache=cache)
    text_file(tmp_path / "a.jsonl", "something else")
    with pytest.raises(RecipeError, match="were changed"):
        list(late.train[0].rows)


@pytest.mark.parametrize("is_first", [True, False])
def test_bad_rows_are_reported_at_every_start(tmp_path, reads, is_first):
    data, cache = DataSection(train=text_file(tmp_path / "x.jsonl", "a", "")), tmp_path / "cache"
    if not is_first:
        cache.mkdir()
    for _ in range(2):
        with pytest.raises(RecipeError, match=r"x\.jsonl:2"):
            known_rows(data, SFT, cache=cache)
    assert cache.exists() != is_first, "a first start with bad rows leaves nothing behind"
    assert not list(cache.glob("rows-*.json"))
    (tmp_path / "x.jsonl").unlink()
    with pytest.raises(RecipeError, match="cannot be read"):
        known_rows(data, SFT, cache=cache)
