"""Advice of a message is right: obeyed, the message does not come again, and in the end the check passes.

python -m pytest -q tests/test_obeyed.py
"""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import RECIPE, Book

from cookbook.start.run_plan import load_pair
from cookbook.system.files import RecipeError
from tests.test_bad_input import RECIPE_MISTAKES, STRATEGY_MISTAKES, every_path

PLACE = r"(?P<file>[\w./]+)(?::\d+)?: (?P<key>[\w.]+)"
"""As `Document.place` writes it."""
NO_VALUE = r"(?!(?:an?|the|less|one|at|in|it|numbers|text|write|[\d.]+ values|\w+ in quotes)\b)"
VALUE = rf"{NO_VALUE}(?P<value>\[[^]]*\]|\{{.*?\}}\}}?|'[^']*'|\"[^\"]*\"|[-\w.+/]+)"
END = r"(?=$|[,;:)]| or | \()"
RENAME = [
    rf"{PLACE}: (?:unknown key|.*); did you mean (?P<name>\w+)\?",
    rf"{PLACE}: does not belong here; write (?:it as )?(?P<name>[\w.]+)$",
]
REMOVE = [
    rf"{PLACE}(?: is .*|: .*); take (?:it|the key) out",
    rf"{PLACE} is (?:empty|null); write a value, or (?:take the key out|leave the key out for its default)",
]
INSERT = [
    rf"{PLACE}(?:: is missing| is (?:empty|null)); this key has no default, for example \w+: (?P<value>.*)",
    rf"{PLACE}: (?P<name>\w+) is missing; write {VALUE}{END}",
    rf"{PLACE}(?: is .*|: .*); add (?P<name>\w+): {VALUE}",
]
CORRECT = [
    rf"{PLACE} is .*; write (?:a section, for example )?\w+: {VALUE}",
    rf"{PLACE} is .*; write {VALUE} in quotes",
    rf"{PLACE} is .*; write a whole number, or {VALUE}",
    rf"{PLACE} is .* write .*, as {VALUE}",
    rf"{PLACE} is .*; write {VALUE} to [\d.]+",
    rf"{PLACE} is .*; it must be greater than or equal to {VALUE}",
    rf"{PLACE} is .*\(did you mean {VALUE}\?\)",
    rf"{PLACE} is .*; did you mean {VALUE}\?",
    rf"{PLACE} is .*; (?:write|use) {VALUE}{END}",
    rf"{PLACE} (?:is|must be) .*[;:] write {VALUE}{END}",
]


def obey(mistake: str) -> str | None:
    """Does in the files what a mistake says. Returns what was done; None: it names nothing that can be written."""
    for kind, patterns in (("rename", RENAME), ("remove", REMOVE), ("insert", INSERT), ("correct", CORRECT)):
        for pattern in patterns:
            if match := re.fullmatch(rf"{pattern}.*", mistake, re.DOTALL):
                change(Path(match["file"]), kind, match["key"].split("."), match.groupdict())
                return kind
    return None


def at(values: Any, keys: list[str]) -> Any:
    for key in keys:
        values = values[int(key) if isinstance(values, list) else key]
    return values


def change(path: Path, kind: str, keys: list[str], matched: dict[str, str]) -> None:
    values = yaml.safe_load(path.read_text())
    value = yaml.safe_load(matched["value"]) if "value" in matched else None
    name = matched.get("name")
    if kind == "insert" and name:
        keys = [*(keys if isinstance(at(values, keys), dict) else keys[:-1]), name]
    section = at(values, keys[:-1])
    last = int(keys[-1]) if isinstance(section, list) else keys[-1]
    if kind in ("remove", "rename"):
        value = section.pop(last)
    if kind == "rename":
        *to, last = name.split(".") if "." in name else [*keys[:-1], name]
        section = values
        for key in to:
            section = section.setdefault(key, {})
    if kind != "remove":
        section[last] = value
    path.write_text(json.dumps(values) if path.suffix == ".json" else yaml.safe_dump(values))


NAMES_NO_TEXT = (
    "write less than", "write less",
    "write 2 values", "write one of them", "write the folder in full", "write a path",
    "write the value out", "write a plain value", "write KEY: COLUMN", "write it in quotes", "write MULTI_GPU or FSDP",
    "write zero_optimization.stage in the JSON", "would be ignored with pp_size; write true",
    "would be ignored with ep_size; write true", "would be ignored with tp_size; write true",
    "take the other sizes out", "take one of them out", "write that, or take it out", "write it in fsdp_config",
)  # fmt: skip
"""Ends of messages that leave the choice to whoever reads them, or speak of another key than that of their place."""
WAYS = re.compile(r"\b(?:write|use|take|add|did you mean|for example)\b")


def follow(strategy: str | None) -> int:
    """Obeys the first message that names a text, checks again, and so on. Returns how many were obeyed."""
    obeyed: list[str] = []
    while mistakes := mistakes_of(strategy):
        mistakes = [mistake for mistake in mistakes if "cookbook convert" not in mistake]
        done = next((mistake for mistake in mistakes if obey(mistake)), None)
        if done is None:
            rest = [mistake for mistake in mistakes if not any(end in mistake for end in NAMES_NO_TEXT)]
            assert not any(WAYS.search(mistake) or obeyed for mistake in rest), (rest, obeyed)
            break
        assert done not in obeyed, obeyed
        obeyed.append(done)
    return len(obeyed)


def mistakes_of(strategy: str | None) -> list[str]:
    try:
        load_pair(Path(RECIPE), [f"strategy={strategy}"] if strategy else [])
    except RecipeError as error:
        return error.mistakes
    return []


@pytest.mark.parametrize("row", RECIPE_MISTAKES)
def test_a_recipe_as_the_message_has_it_passes(book: Book, row: str):
    old, new, _ = RECIPE_MISTAKES[row]
    book.edit(RECIPE, (old, new))
    follow(None)


@pytest.mark.parametrize("row", STRATEGY_MISTAKES)
def test_a_strategy_as_the_message_has_it_passes(book: Book, row: str):
    name, file, old, new, _ = STRATEGY_MISTAKES[row]
    book.edit(file.format(name), (old, new))
    follow(f"accelerate_configs/{name}.yaml")


GONE, SHORT = object(), object()


def faulty(original: Any, path: tuple[Any, ...]) -> Iterator[Any]:
    """The values with something wrong at a path: no key, another name, nothing, and values of other kinds."""
    for odd in (GONE, SHORT, None, "xyz", -1, True, []):
        values = copy.deepcopy(original)
        section = at(values, list(path[:-1]))
        if odd is GONE:
            del section[path[-1]]
        elif odd is SHORT:
            section[str(path[-1])[:-1]] = section.pop(path[-1])
        else:
            section[path[-1]] = odd
        yield values


@pytest.mark.parametrize(
    ("strategy", "file", "least"),
    [
        pytest.param(None, RECIPE, 60, marks=pytest.mark.slow),
        pytest.param("zero3_nvme", "ds_configs/zero3_nvme.json", 60, marks=pytest.mark.slow),
        ("zero2_offload", "accelerate_configs/zero2_offload.yaml", 10),
        ("fsdp1", "accelerate_configs/fsdp1.yaml", 20),
        ("hsdp", "accelerate_configs/hsdp.yaml", 20),
    ],
)
def test_whatever_is_wrong_with_a_key_its_messages_lead_to_files_that_pass(book, strategy, file, least):
    book.write("rows.jsonl", '{"text": "x"}')  # that an example of a recipe names
    for name in (file, "accelerate_configs/zero3.yaml", "ds_configs/zero3.json"):  # advice may be about any of them
        book.own(name)
    written = {name: Path(name).read_text() for name in (RECIPE, file)}
    original, obeyed = yaml.safe_load(written[file]), 0
    for path in every_path(original):
        if not isinstance(path[-1], str):
            continue
        for values in faulty(original, path):
            Path(file).write_text(json.dumps(values) if file.endswith("json") else yaml.safe_dump(values))
            obeyed += follow(strategy and f"accelerate_configs/{strategy}.yaml") > 0
            for name, text in written.items():
                Path(name).write_text(text)
    assert obeyed >= least, obeyed
