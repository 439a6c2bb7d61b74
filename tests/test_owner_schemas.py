"""Protects what `convert` knows of other projects: their own keys and defaults, all of them.

python -m pytest -q tests/test_owner_schemas.py
"""

import dataclasses
import json

import pytest

from benchmarks import owner_schemas
from cookbook.commands.convert.keys import Conversion
from cookbook.config.foreign import Project, tables
from cookbook.system.files import Document
from tests.needs import need_trl

PROJECTS = [name for name, project in tables().projects.items() if project.schema and project.is_read]


def own_keys(project: Project) -> dict:
    """The keys of a schema that are no sections of others."""
    sections = {path.rpartition(".")[0] for path in (*project.fields, *project.keys)}
    return {path: own for path, own in project.fields.items() if path not in sections}


@pytest.mark.parametrize("name", PROJECTS)
def test_every_key_of_a_schema_has_an_entry(name):
    project = tables().projects[name]
    keys = own_keys(project)
    assert len(keys) > 40 and len(PROJECTS) >= 7
    assert [path for path in keys if project.entry(path) is None] == []


@pytest.mark.parametrize("owner", ["transformers", "seq2seq", "trl"])
def test_the_schema_of_an_installed_package_is_that_of_its_version(owner):
    """After an update: python benchmarks/owner_schemas.py"""
    found = owner_schemas.found(owner, None)
    assert found is not None
    text = owner_schemas.dumps(owner_schemas.schema_of(owner, *found))
    assert text == (owner_schemas.OWNERS / f"{owner}.json").read_text(encoding="utf-8")


@pytest.mark.slow
def test_keys_and_defaults_are_those_of_the_classes_themselves():
    """Syntax trees against the imported classes, which share no code with them."""
    need_trl()
    import trl

    own = tables().projects["trl"]
    for objective, kind in {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "reward": trl.RewardConfig}.items():
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


@pytest.mark.parametrize("name", PROJECTS)
def test_a_file_of_its_owners_defaults_asks_for_nothing_else(name, tmp_path, monkeypatch, capsys):
    """As print(args.to_json_string()) writes them: each is read, or needs nothing."""
    monkeypatch.chdir(tmp_path)
    project = tables().projects[name]
    others = {path for path, key in project.keys.items() if key.is_of_method}
    values: dict = {}
    for path, default in project.schema_defaults("sft").items():
        if path in own_keys(project) and path not in others:
            *sections, last = path.split(".")
            home = values
            for section in sections:
                home = home.setdefault(section, {})
            home[last] = default
    conversion = Conversion(None)
    conversion.read(Document("file.json", values), project)
    assert conversion.others == [] and len(conversion.idle) > len(own_keys(project)) / 3
    assert [line for line in conversion.changes if "file.json" in line] == []
