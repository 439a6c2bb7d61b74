"""Protects what `convert` knows of other projects: their own keys and defaults, all of them.

python -m pytest -q tests/test_owner_schemas.py
"""

import copy
import dataclasses
import json
import re
from random import Random

import pytest

from benchmarks import owner_schemas
from cookbook.commands.convert.collected import keys_of
from cookbook.commands.convert.keys import Conversion
from cookbook.config.foreign import Project, tables
from cookbook.system.files import Document
from tests import newest
from tests.needs import need_trl

PINS = newest.read_pins(["peers"])
PROJECTS = [name for name, project in tables().projects.items() if project.schema and project.is_read]


def own_keys(project: Project) -> dict:
    """The keys of a schema that are no sections of others."""
    sections = {path.rpartition(".")[0] for path in (*project.fields, *project.keys)}
    return {path: own for path, own in project.fields.items() if path not in sections}


@pytest.mark.parametrize("name", PROJECTS)
def test_every_key_of_a_schema_has_an_entry(name):
    project = tables().projects[name]
    keys = own_keys(project)
    assert len(keys) > 40 and len(PROJECTS) >= 11
    assert [path for path in keys if project.entry(path) is None and path not in project.passes] == []


@pytest.mark.parametrize("owner", ["transformers", "seq2seq", "trl", "accelerate"])
def test_the_schema_of_an_installed_package_is_that_of_its_version(owner):
    """After an update: python benchmarks/owner_schemas.py. Another version than the pinned one has the same keys."""
    place, package = owner_schemas.found(owner, None), owner_schemas.SOURCES[owner].package
    assert place is not None and package is not None
    schema = owner_schemas.schema_of(owner, *place) | {"version": PINS[package]}
    assert owner_schemas.dumps(schema) == (owner_schemas.OWNERS / f"{owner}.json").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_keys_of_deepspeed_are_those_that_the_installed_one_asks_for():
    """After an update: python -m benchmarks.deepspeed_facts"""
    from benchmarks import deepspeed_facts

    text = owner_schemas.dumps(deepspeed_facts.keys())
    assert text == (owner_schemas.OWNERS / "deepspeed.json").read_text(encoding="utf-8")


@pytest.mark.slow
def test_keys_and_defaults_are_those_of_the_classes_themselves():
    """Syntax trees against the imported classes, which share no code with them."""
    need_trl()
    import trl

    own = tables().projects["trl"]
    kinds = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "reward": trl.RewardConfig, "grpo": trl.GRPOConfig}
    for objective, kind in kinds.items():
        defaults, compared = own.schema_defaults(objective), 0
        for field in dataclasses.fields(kind):
            if field.name.startswith("_") or not field.init:
                continue
            assert field.name in own.fields
            if field.default is not dataclasses.MISSING and field.name in defaults:
                default = getattr(field.default, "value", field.default)
                assert json.dumps(defaults[field.name]) == json.dumps(default), field.name
                compared += 1
        assert compared > 80


# xavier_normal_ and a dropout of the adapter's output (nemo_automodel/components/_peft/lora.py), where peft has
# kaiming_uniform_ and one of its input.
UNLIKE = {"automodel": {"peft.lora_A_init", "peft.dropout_position"}}
"""Keys whose owner's default is not what a run does here."""


@pytest.mark.parametrize("name", PROJECTS)
def test_a_file_of_its_owners_defaults_asks_for_nothing_else(name, tmp_path, monkeypatch, capsys):
    """As print(args.to_json_string()) writes them: each is read, or needs nothing."""
    monkeypatch.chdir(tmp_path)
    project = tables().projects[name]
    values: dict = {}
    for path, default in project.schema_defaults("sft").items():
        if path in own_keys(project):
            *sections, last = path.split(".")
            home = values
            for section in sections:
                home = home.setdefault(section, {})
            home[last] = default
    conversion = Conversion(None)
    conversion.read(Document("file.json", values), project)
    assert conversion.others == [] and len(conversion.idle) > len(own_keys(project)) / 3
    assert {line.split()[1] for line in conversion.changes if "file.json" in line} == UNLIKE.get(name, set())


def lists_of(conversion: Conversion, path: str) -> set[str]:
    """The lists of the output that have a key: one that is carried may have a line as well."""
    lines = {"others": conversion.others, "changes": conversion.changes, "notes": conversion.notes}

    def with_line(start: str) -> set[str]:
        return {name for name, texts in lines.items() if any(f"file.json: {start}" in text for text in texts)}

    lists = with_line(f"{path} is ")
    lists |= {name for name, keys in {"idle": conversion.idle, "sizes": conversion.sizes}.items() if path in keys}
    if not lists:  # a section without a counterpart has one line for its keys
        lists = set().union(*(with_line(f"{path[: dot.start()]}: ") for dot in re.finditer(r"\.", path)))
    ours = conversion.carried.get(path, "")
    if not lists and (ours.startswith(("~", "strategy.")) or ours in conversion.recipe):
        lists.add("recipe")
    return lists


VALUES = {"int": 3, "float": 0.5, "bool": True, "str": "text", "list": ["a"], "dict": {"a": 1}}


@pytest.mark.parametrize("name", PROJECTS)
def test_each_key_of_a_file_is_in_exactly_one_list(name, tmp_path, monkeypatch):
    """Random files of a project's keys, each with its default or with another value of its type."""
    monkeypatch.chdir(tmp_path)
    project, random = tables().projects[name], Random(name)
    keys, defaults = own_keys(project), project.schema_defaults("sft")
    for _ in range(30):
        values: dict = {}
        for path in random.sample(sorted(keys), 25):
            kind = next((value for word, value in VALUES.items() if word in keys[path].kind.lower()), "text")
            *sections, last = path.split(".")
            home = values
            for section in sections:
                home = home.setdefault(section, {})
            home[last] = random.choice([kind, defaults.get(path)])
        conversion = Conversion(None)
        conversion.read(Document("file.json", copy.deepcopy(values)), project)
        conversion.derive(None if project.is_distribution else project)
        for path in keys_of(values, project):
            assert len(lists_of(conversion, path)) == 1, (path, lists_of(conversion, path), conversion.recipe)
