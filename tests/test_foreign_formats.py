"""Protects docs/data.md: it says what the code does with the formats of other projects, and no text of theirs is lost.

Run alone: python -m pytest -q tests/test_foreign_formats.py
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from conftest import ROOT

from benchmarks import foreign_formats

results = foreign_formats.outcomes
NO_TEXTS = {"role", "from", "type", "id", "tool_call_id"}
"""Keys whose texts a template writes in words of its own."""


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, str):
        yield value
    for item in value if isinstance(value, list) else ():
        yield from texts_in(item)
    for key, item in value.items() if isinstance(value, dict) else ():
        yield from texts_in(item) if key not in NO_TEXTS else ()


def test_the_page_is_what_the_code_does():
    assert foreign_formats.PAGE.read_text(encoding="utf-8") == foreign_formats.page()


def test_the_page_has_the_formats_of_each_project_and_is_found():
    projects = Counter(form.project for form in foreign_formats.FORMATS)
    assert len(foreign_formats.FORMATS) >= 60
    assert projects.keys() == {"TRL", "axolotl", "LLaMA-Factory", "Unsloth", "OpenAI"}
    assert min(projects.values()) >= 7
    headings = [f"{form.project}: {form.name}" for form in foreign_formats.FORMATS]
    assert len({foreign_formats.anchor(heading) for heading in headings}) == len(headings)
    for name in ("docs/README.md", "docs/recipes.md"):
        assert "data.md" in (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("number", range(len(foreign_formats.FORMATS)))
def test_no_text_of_a_row_is_lost_without_a_word(number: int):
    """A text of a column is in the sample, or the column is named in a note, or the row is refused."""
    form, what = results()[number]
    said = "\n".join(what.notes)
    shown = "\n".join(what.texts).replace("⟦", "").replace("⟧", "").replace("\\", "")
    for column, value in form.row.items():
        lost = [text for text in texts_in(value) if text.replace("\\", "") not in shown and column not in LABELS]
        assert not lost or f"`{column}`" in said or column in said or what.refused, (form.name, column, lost, said)


LABELS = {"label", "kto_tag"}
"""Columns of truth values."""


@pytest.mark.parametrize("number", range(len(foreign_formats.FORMATS)))
def test_a_refusal_names_what_to_do_or_the_place(number: int):
    form, what = results()[number]
    if what.refused:
        assert "row" in what.refused and len(what.refused) > 40, what.refused
    else:
        assert all("⟦" in text for text in what.texts), form.name


# Rows of these are read without a word too much, since they are the shapes that the projects recommend.
READ = {
    "TRL": ("prompt and completion, conversational", "tools and tool calls", "reasoning (`thinking`)"),
    "axolotl": ("`chat_template`", "`sharegpt`", "`message_field_training`", "`alpaca`", "`chatml.ultra`"),
    "LLaMA-Factory": ("alpaca, with `system` and `history`", "sharegpt, with `system` and `tools`", "openai"),
    "Unsloth": ("ShareGPT", "ChatML", "raw corpus"),
    "OpenAI": ("chat", "`weight`", "`tools`, arguments as text", "`functions` and `function_call` (older)"),
}


@pytest.mark.parametrize(("project", "name"), [(project, name) for project, names in READ.items() for name in names])
def test_the_shapes_that_projects_recommend_are_read(project: str, name: str):
    (what,) = [what for form, what in results() if (form.project, form.name) == (project, name)]
    assert what.refused == ""


def test_an_answer_without_weight_is_not_trained():
    (what,) = [what for form, what in results() if (form.project, form.name) == ("OpenAI", "`weight`")]
    assert "⟦Blue." in what.texts[0] and "⟦Red." not in what.texts[0] and "Red." in what.texts[0]


@pytest.mark.parametrize("number", range(len(foreign_formats.FORMATS)))
def test_a_note_of_what_is_not_read_names_columns_that_are_there_and_not_empty(number: int):
    form, what = results()[number]
    in_messages = {
        f"messages.{key}": value
        for messages in form.row.values()
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict)
        for key, value in message.items()
    }
    for note in what.notes:
        if note.startswith("not read: "):
            for name in note.removeprefix("not read: ").split(", "):
                assert (form.row | in_messages).get(name) not in (None, "", [], {}), (form.name, note)
