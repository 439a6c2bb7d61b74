"""Protects the preview: it shows what a run would train on, and counts it right.

python -m pytest -q tests/test_preview.py
"""

import json
import re
from pathlib import PurePath

import pytest
from conftest import RECIPE, RECIPE_TEXT
from small_data import chat, make_tokenizer

from cookbook.commands.preview.sample_page import preview
from cookbook.system.files import RecipeError

SCRATCH = re.search(r"  from_scratch:\n(    .*\n)+", RECIPE_TEXT).group()


@pytest.fixture
def show(book, capsys):
    """Writes rows, and returns the lines that the preview of a recipe on them prints."""

    def show(rows, *assignments, num_samples=1):
        book.write("rows.jsonl", "\n".join(map(json.dumps, rows)))
        make_tokenizer().save_pretrained(book.root / "model")
        book.edit(RECIPE, (SCRATCH, "  name_or_path: ./model\n"), ("train: python-stdlib", "train: rows.jsonl"))
        book.edit(RECIPE, ("  eval: {path: python-stdlib, split: test}\n", ""))
        preview(book.root / RECIPE, list(assignments), num_samples, cache=book.root / "cache")
        return capsys.readouterr().out

    return show


def test_a_terminal_of_plain_letters_gets_plain_marks(show, monkeypatch):
    monkeypatch.setattr("cookbook.commands.preview.sample_page.can_show", lambda *_: False)
    out = show([chat("hi", "ho")])
    assert "assistant\n[[ho<|im_end|>]]\n" in out and out.isascii()


def test_trained_tokens_stand_in_marks_and_figures_are_those_of_a_count_by_hand(show):
    # A letter is a token: "<|im_start|>user\nhi<|im_end|>\n" 10, "<|im_start|>assistant\n" 11, answer, end, line end.
    out = show([chat("hi", "ho")] * 3 + [chat("hi", "ho" * 6)], "data.max_length=30", num_samples=9)
    assert out.count("<|im_start|>assistant\n⟦ho<|im_end|>⟧\n") == 3
    assert out.count("<|im_start|>assistant\n⟦hohohohoh⟧") == 1
    lines = out.splitlines()
    assert sum(line.endswith(": 25 tokens, 3 trained") for line in lines) == 3
    assert sum(line.endswith(": 30 tokens, 9 trained") for line in lines) == 1
    figures = out.split("FIGURES")[1]
    assert "data.train: 4 samples, 105 tokens (mean 26, median 25, max 30 a sequence), 17.1% trained" in figures
    assert (
        "1 of 4 rows (25.0%) are longer than data.max_length 30 and are cut there; 35 would keep 99% whole" in figures
    )
    lines = [line.split() for line in figures.splitlines() if " to " in line]
    assert ["24", "to", "27", "3", "█" * 40] in lines
    assert ["32", "to", "35", "1", "█" * 14, "over", "data.max_length"] in lines
    assert sum(int(line[3]) for line in lines) == 4
    # One step of one micro-batch of four rows of 30 cells.
    packed = "1.0 forwards a step with 0.0% padding if packed"
    assert f"1.0 forwards a step with 12.5% padding if padded, {packed}" in figures
    assert figures.endswith("steps per epoch: 1\n")


def test_what_was_understood_of_foreign_rows_is_shown(show):
    out = show([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}], num_samples=0)
    assert "data.train: rows look like ShareGPT: conversations -> messages, from -> role, value -> content" in out


def test_pairs_are_shown_together(show):
    row = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    out = show([row], "objective={name: dpo}")
    assert "pair 0, chosen: 5 tokens, 4 trained\nq⟦yes<|im_end|>⟧\n" in out
    assert "pair 0, rejected: 4 tokens, 3 trained\nq⟦no<|im_end|>⟧\n" in out
    assert "data.train: 1 pairs, 9 tokens" in out


def test_stream_is_previewed_by_its_first_block(show):
    texts = [{"text": letter * 4} for letter in "abcdef"]
    out = show(texts, "data.streaming=true", "data.shuffle_rows=2", "objective={name: cpt}", num_samples=2)
    assert {"a⟦aaa<|im_end|>⟧", "b⟦bbb<|im_end|>⟧"} <= set(out.splitlines())
    assert "(the first 2 samples of the stream)" in out and "steps per epoch: not known of a stream" in out


def test_short_stream_is_counted_once(show):
    texts = [{"text": letter * 4} for letter in "abcdef"]
    rows = [*texts, {"text": ""}]
    out = show(rows, "data.streaming=true", "data.on_bad_row=drop", "objective={name: cpt}", num_samples=50)
    assert out.count("--- sample") == 6
    assert "(the first 6 samples of the stream): 6 samples, 30 tokens" in out
    assert "data.train: dropped 1 row: empty text" in out


@pytest.mark.parametrize(("no_color", "expected"), [(None, "\x1b[1;32m"), ("1", "⟦")])
def test_colour_is_for_terminals_that_want_it(show, monkeypatch, no_color, expected):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    assert f"a{expected}b" in show([{"text": "ab"}])


def test_new_model_has_the_tokenizer_that_the_run_would_train(book, capsys):
    book.write("rows.jsonl", "\n".join(json.dumps(chat(f"question {i}", f"answer {i}")) for i in range(40)))
    changes = ["data.train=rows.jsonl", "data.eval={}", "data.holdout=0.2", "model.from_scratch.num_hidden_layers=1"]
    preview(book.root / RECIPE, changes, 1, cache=book.root / "cache")
    out = capsys.readouterr().out
    assert "⟦answer" in out and "evaluation holdout: " in out
    assert len(list((book.root / "cache").glob("model-*/tokenizer.json"))) == 1


def test_a_tokenizer_of_the_hub_is_fetched_without_the_weights(show, book, monkeypatch):
    asked = []

    def fetch(name, *, revision, allow_patterns):
        names = ("model.safetensors", "tokenizer.json")
        asked.append((name, revision, [file for file in names if any(map(PurePath(file).match, allow_patterns))]))
        return str(book.root / "model")

    monkeypatch.setattr("cookbook.training.models.model_source.snapshot_download", fetch)
    assert "a⟦b<|im_end|>⟧" in show([{"text": "ab"}], "model={name_or_path: some/model, revision: x}")
    assert asked == [("some/model", "x", ["tokenizer.json"])]


def test_bad_rows_are_reported_as_a_run_would(show):
    with pytest.raises(RecipeError, match=r"rows\.jsonl:1: missing keys"):
        show([{}])
