"""Protects results from what they were not made from: whatever changes tokens, rows or prompts changes the key by which
they are kept, and a run resumes only where what it was made from is the same. Names and folders are no part of it.

python -m pytest -q tests/test_made_from.py
"""

import dataclasses
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel
from small_data import make_tokenizer, write_lines

from cookbook.commands.rehearse.standins import synthetic_rows
from cookbook.commands.rounds.prompt_rows import Prompt, digest, read_prompts
from cookbook.config import plugins
from cookbook.config.effects import effect_of
from cookbook.config.objectives import Objective
from cookbook.config.recipe import Recipe, leaves
from cookbook.config.sections import DataSection, RoundsSection
from cookbook.rows.row_kinds import kinds
from cookbook.system import registry
from cookbook.system.files import RecipeError
from cookbook.training.checkpoint import resume
from cookbook.training.data.known import known_rows
from cookbook.training.data.rows import Rows
from cookbook.training.data.tokens import TokenSet, cached_tokens

NEEDED = {"distill": {"teacher": "t"}, "classify": {"classes": ["good", "bad"]}}
"""Keys of objectives that have no default."""
CANDIDATES = (False, True, 2, 3, 12, 40, 0.25, 0.75, "x", ["reasoning"], ["bad", "good"], "2026-01-31")
"""Values that are tried for each key, beside those that its type names."""


def named_values(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
    for inner in typing.get_args(annotation):
        yield from named_values(inner)


def variants(section: BaseModel) -> Iterator[tuple[str, BaseModel]]:
    """The section with each of its keys changed, by every value that the key takes."""
    given = section.model_dump(mode="json", exclude_unset=True)
    for key, field in type(section).model_fields.items():
        before = getattr(section, key)
        for value in (*named_values(field.annotation), *CANDIDATES):
            try:
                changed = type(section).model_validate(given | {key: value})
            except ValueError:
                continue
            if getattr(changed, key) != before and key != "name":
                yield key, changed


def objectives() -> Iterator[tuple[Objective, str]]:
    """Each objective with each kind of rows that it trains on."""
    for name, entry in registry.members("objective").items():
        for kind in entry.rows:
            yield Objective.of(name=name, **NEEDED.get(name, {})), kind


def content(tokens: TokenSet) -> dict[str, Any]:
    """All that is in a token set."""
    values = {field.name: getattr(tokens, field.name) for field in dataclasses.fields(tokens)}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
        if name != "target_counts"
    }


def made(rows: Rows, objective: Objective, data: DataSection, cache: Path) -> Any:
    """Content to train on, with that cache; the mistake if there is none."""
    try:
        tokens, dropped = cached_tokens([rows], TOKENIZER, data, objective, cache=cache, place="data.train")
    except ValueError as error:  # RecipeErrors, and settings that a recipe of this objective may not have
        return str(error)
    return content(tokens), dropped


TOKENIZER = make_tokenizer()
PAIRS = list(objectives())


@pytest.mark.parametrize(("objective", "kind"), PAIRS, ids=[f"{o.name}-{kind}" for o, kind in PAIRS])
def test_tokens_from_the_cache_are_those_of_these_settings(objective: Objective, kind: str, tmp_path: Path):
    """A key that changes what a fresh cache has must not find the tokens of before."""
    known = kinds()[kind]
    made_up = synthetic_rows(kind, 3)
    for i, row in enumerate(row for row in made_up if "rewards" in row):  # else a reward divided is the same reward
        row["rewards"] = [float(i + 1) * k * k for k in range(len(row["rewards"]))]
    rows = Rows(kind=kind, rows=[known.check(row) for row in made_up])
    data = DataSection(train=[{"path": "x.jsonl"}], max_length=200)
    before = made(rows, objective, data, tmp_path / "shared")
    changing = set()
    of_data = ((key, objective, other) for key, other in variants(data) if key not in ("train", "eval", "columns"))
    of_objective = ((key, other, data) for key, other in variants(objective))
    for i, (key, other_objective, other_data) in enumerate((*of_data, *of_objective)):
        fresh = made(rows, other_objective, other_data, tmp_path / f"fresh{i}")
        assert made(rows, other_objective, other_data, tmp_path / "shared") == fresh, key
        changing |= {key} if fresh != before else set()
    assert changing, "no key of these changes anything, so nothing was shown"
    assert made(rows, objective, data, tmp_path / "shared") == before
    if kinds()[kind].values is not None and objective.settings_of_values:
        assert changing >= {*objective.settings_of_values}


KIND = """
from cookbook.rows.row_checks import check_texts
from cookbook.rows.row_kinds import RowKind
from cookbook.system.registry import register

texts = lambda row: (None, (row["note"] + "!",))
register(RowKind(name="noted", keys=("note",), check=check_texts("note"), texts=texts, made_up=dict))
"""


@pytest.fixture(autouse=True)
def _forget_plugins():
    yield
    plugins.use([])


def test_tokens_of_a_plugins_kind_are_those_of_its_present_content(tmp_path: Path):
    file = tmp_path / "kind.py"
    texts = []
    for end in ("!", "?"):
        file.write_text(KIND.replace('"!"', f'"{end}"'))
        plugins.use([str(file)])
        objective = Objective.of(name="sft")
        rows = Rows(kind="noted", rows=[{"note": "a"}])
        data = DataSection(train=[{"path": "x.jsonl"}], max_length=40)
        tokens, _ = cached_tokens([rows], TOKENIZER, data, objective, cache=tmp_path / "cache", place="")
        texts.append(TOKENIZER.decode(tokens.ids.tolist()))
    assert texts[0].startswith("a!") and texts[1].startswith("a?")
    moved = tmp_path / "elsewhere.py"
    moved.write_text(file.read_text())
    digests = []
    for path in (file, moved):
        plugins.use([str(path)])
        digests.append(plugins.digest([str(path)]))
    assert digests[0] == digests[1]


COLUMNS = {"wanted": "4", "level": 3, "notes": ["a"], "facts": {"b": None}}


@pytest.mark.parametrize("key", ["prompt", *COLUMNS])
def test_a_changed_column_of_a_prompt_is_another_set_of_prompts(key: str, tmp_path: Path):
    """Reward functions are given every column: with another right answer, rewards of before are no rewards."""

    def of(rows: list[dict[str, Any]], name: str) -> str:
        data = DataSection(train=[{"path": write_lines(tmp_path / name, *map(json.dumps, rows))}])
        return digest(read_prompts(data, RoundsSection(num_rounds=1, prompts_per_round=1)))

    rows = [{"prompt": f"{number} + 1", **COLUMNS} for number in range(3)]
    changed = [*rows[:2], rows[2] | {key: "other"}]
    before = of(rows, "a.jsonl")
    assert of(changed, "a.jsonl") != before
    assert of(rows, "moved.jsonl") == before
    if key != "prompt":
        without = {name: value for name, value in rows[2].items() if name != key}
        assert of([*rows[:2], without], "a.jsonl") != before
    assert digest([Prompt(place="x", asked="a", columns={})]) == digest([Prompt(place="y", asked="a", columns={})])


def test_rows_are_read_again_where_a_setting_or_the_content_changed(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    write_lines(path, '{"text": "a", "other": "b"}', '{"text": "c", "other": "d"}', '{"text": "e", "other": "f"}')
    data, objective = DataSection(train=[{"path": str(path)}]), Objective.of(name="sft")

    def read(data: DataSection, cache: Path) -> Any:
        try:
            return [list(rows.rows) for rows in known_rows(data, objective, cache=cache).train]
        except (RecipeError, ValueError) as error:
            return str(error)

    shared = tmp_path / "shared"
    before = read(data, shared)
    seen = set()
    of_sources: list[dict[str, Any]] = [{"max_rows": 2}, {"columns": {"text": "other"}}, {"ignore": ["text"]}, {}]
    for i, source in enumerate(of_sources):
        values = {} if source else {"holdout": 0.5}
        changed = DataSection(train=[{"path": str(path)} | source], **values)
        assert read(changed, shared) == read(changed, tmp_path / f"fresh{i}")
        seen.add(str(read(changed, shared)))
    assert str(before) not in seen and len(seen) >= 3
    write_lines(path, '{"text": "A", "other": "b"}', '{"text": "c", "other": "d"}', '{"text": "e", "other": "f"}')
    assert read(data, shared) != before


MADE_FROM = {"data": "1", "model": "2", "teacher": "3", "adapter": "4", "plugins": "5"}
LEAVES = sorted(leaves(Recipe))


class Given:
    """A recipe with given values, as `resume.changes` asks it."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.run = type("run", (), {"allow_changes": [], "resume": "never"})

    def model_dump(self, **_: Any) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for key, value in self.values.items():
            *path, name = key.split(".")
            section = nested
            for part in path:
                section = section.setdefault(part, {})
            section[name] = value
        return nested


@pytest.mark.parametrize("key", LEAVES)
def test_a_changed_key_is_refused_by_a_resume_or_changes_no_curve(key: str):
    was, now = Given({key: "before"}), Given({key: "after"})
    state = {"recipe": was.model_dump(), "made_from": MADE_FROM}
    mistakes, notes = resume.changes(state, now, MADE_FROM)
    owner = next((what for prefix, what in resume.BY_CONTENT.items() if key.startswith(prefix)), None)
    if key == "model.kernels":  # other packages change the last bits, and a resume asks for consent
        assert mistakes
        return
    may_change = effect_of(key) != "curve" or key in resume.FREE
    moved = owner is not None and not key.startswith(resume.NEVER)
    assert bool(mistakes or notes) != (may_change or moved), key
    if owner is not None and not may_change:  # content that is another is refused, whatever its name
        others = MADE_FROM | {owner: "other"}
        assert resume.changes(state, was, others)[0] and resume.changes(state, now, others)[0]
    assert resume.changes(state, was, MADE_FROM) == ([], [])


def test_noise_on_the_embeddings_is_no_part_of_a_models_content():
    """A model's digest is the same with it, and the curve is not."""
    state = {"recipe": {"model": {"name_or_path": "a", "neftune_alpha": 0.0}}, "made_from": MADE_FROM}
    now = Given({"model.name_or_path": "b", "model.neftune_alpha": 5.0})
    (mistake, *_), _ = resume.changes(state, now, MADE_FROM)
    assert mistake == "model.neftune_alpha was 0.0 when the checkpoint was made, and is 5.0"
    assert resume.changes(state, Given({"model.name_or_path": "b", "model.neftune_alpha": 0.0}), MADE_FROM) == ([], [])


@pytest.mark.parametrize("compares", [{"keep_best": 1}, {"early_stopping_patience": 2}, {}])
def test_losses_of_two_held_out_sets_are_not_compared_in_silence(compares: dict[str, int]):
    before, after = MADE_FROM | {"eval": "6"}, MADE_FROM | {"eval": "7"}
    now = Given({})
    now.run = type("run", (), {"keep_best": 0, "early_stopping_patience": None, "allow_changes": [], "resume": "x"})
    for key, value in compares.items():
        setattr(now.run, key, value)
    state = {"recipe": {}, "made_from": before}
    mistakes, notes = resume.changes(state, now, after)
    said = "the held-out rows are not those of the checkpoint"
    assert [line.startswith(said) for line in (*mistakes[:1], *notes)] == [True]
    assert bool(mistakes) == bool(compares)
    now.run.allow_changes = ["data.eval"]
    assert resume.changes(state, now, after)[0] == [] and resume.changes(state, now, after)[1]
    assert resume.changes(state, now, before) == ([], [])
    assert resume.changes({"recipe": {}, "made_from": MADE_FROM}, now, after) == ([], []), "of a version without it"
