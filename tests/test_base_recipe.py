"""A recipe over another is the recipe that has the keys of both; every place that is named is the file that has it.

python -m pytest -q tests/test_base_recipe.py
"""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from conftest import RECIPE, RECIPE_TEXT, ROOT, Book

from cookbook.commands.cli import main
from cookbook.commands.tune import with_values
from cookbook.config.recipe import load_recipe, read_recipe, recipe_schema
from cookbook.system.files import RecipeError
from tests.curves import Lab, done_of
from tests.documented import documented

OVER = "recipes/over.yaml"
CHANGES: dict[str, Any] = {
    "optim": {"learning_rate": 0.5, "weight_decay": None},
    "data": {"eval": {"path": "python-stdlib", "max_rows": 3}},
    "model": {"from_scratch": {"num_hidden_layers": 2}},
    "objective": None,
    "seed": 7,
}


def by_hand(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge both as docs/recipes.md says, by JSON merge patch (RFC 7396), which has the same rules."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            old = result.get(key)
            result[key] = by_hand(old if isinstance(old, dict) else {}, value)
        else:
            result[key] = value
    return result


def over(book: Book, changes: dict[str, Any] | str, base: str = "small.yaml") -> Path:
    text = changes if isinstance(changes, str) else yaml.safe_dump(changes, sort_keys=False)
    book.write(OVER, f"base: {base}\n{text}")
    return Path(OVER)


def mistakes(path: str | Path, *assignments: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(Path(path), [*assignments])
    return caught.value.mistakes


def test_a_recipe_over_another_is_the_one_with_the_keys_of_both(book):
    path = over(book, CHANGES)
    whole = by_hand(yaml.safe_load(RECIPE_TEXT.replace("3e-3", "3.0e-3")), CHANGES)
    book.write("recipes/whole.yaml", yaml.safe_dump(whole))
    assert load_recipe(path) == load_recipe(Path("recipes/whole.yaml"))
    assert load_recipe(path) != load_recipe(Path(RECIPE))
    book.write("recipes/whole.yaml", yaml.safe_dump(whole | {"seed": 8}))
    assert load_recipe(path) != load_recipe(Path("recipes/whole.yaml"))


def test_a_list_replaces_that_of_the_base(book):
    book.edit(RECIPE, ("train: python-stdlib", "train: [a.jsonl, b.jsonl, c.jsonl]"))
    for name in "abcd":
        book.write(f"{name}.jsonl", "{}\n")
    path = over(book, "data: {train: [d.jsonl]}\n")
    assert [source.path for source in load_recipe(path).data.train] == ["d.jsonl"]


def test_of_keys_that_exclude_each_other_the_last_word_counts(book):
    path = over(book, "run: {num_epochs: 2}\nbatch: {micro_batch_tokens: 512}\n")
    recipe = load_recipe(path)
    assert (recipe.run.num_epochs, recipe.run.max_steps) == (2, None)
    assert (recipe.batch.micro_batch_tokens, recipe.batch.micro_batch_size) == (512, None)
    assert load_recipe(path, ["run.max_steps=5"]).run.num_epochs is None
    book.edit(OVER, ("num_epochs: 2", "num_epochs: 2, max_steps: 3"))
    assert any("num_epochs" in mistake and "max_steps" in mistake for mistake in mistakes(path))


def test_a_mistake_names_the_file_and_line_that_has_it(book):
    book.edit(RECIPE, ("weight_decay: 0.1", "weight_decay: -1"), ("max_length: 256", "max_lenght: 256"))
    path = over(book, "seed: x\noptim: {lr: 3}\n")
    text = (book.root / RECIPE).read_text().splitlines()
    decay = 1 + next(i for i, line in enumerate(text) if "weight_decay" in line)
    length = 1 + next(i for i, line in enumerate(text) if "max_lenght" in line)
    said = "\n".join(mistakes(path))
    assert f"{RECIPE}:{decay}: optim.weight_decay" in said
    assert f"{RECIPE}:{length}: data.max_lenght: unknown key" in said
    assert f"{OVER}:2: seed" in said and f"{OVER}:3: optim.lr" in said
    assert main(["check", str(path)]) == 2


def test_a_batch_that_does_not_split_names_the_line_of_the_base(book, capsys):
    path = over(book, "batch: {global_batch_size: 6}\n")
    assert main(["check", str(path), "--strategy", "single"]) == 2
    assert f"{OVER}:2: batch.global_batch_size is 6" in capsys.readouterr().err
    path = over(book, "seed: 1\n")
    book.edit(RECIPE, ("global_batch_size: 16", "global_batch_size: 6"))
    assert main(["check", str(path), "--strategy", "single"]) == 2
    assert f"{RECIPE}:20: batch.global_batch_size is 6" in capsys.readouterr().err


REFUSED = {
    "base:": "recipes/over.yaml:1: base is empty; write the path of one recipe, or take the line out",
    "base: null": "recipes/over.yaml:1: base is null; write the path of one recipe",
    "base: [small.yaml]": "recipes/over.yaml:1: base is ['small.yaml']; write the path of one recipe",
    "base: 3": "recipes/over.yaml:1: base is 3; write the path",
    "base: ''": "recipes/over.yaml:1: base is empty; write a path",
    "base: over.yaml": "recipes/over.yaml:1: base is 'over.yaml', the recipe itself",
    "base: smal.yaml": "recipes/over.yaml:1: base is 'smal.yaml': no such file; did you mean small.yaml?",
    "base: middle.yaml": "recipes/over.yaml:1: base is 'middle.yaml', which has a base itself "
    "(recipes/middle.yaml:1: base is 'small.yaml')",
    "base: broken.yaml": "recipes/broken.yaml:2: seed: given twice",
    "base: small.yaml\nseed:": "recipes/over.yaml:2: seed is empty; write null to take out what recipes/small",
    "base: small.yaml\nseed: ~": "recipes/over.yaml:2: seed is empty; write null",
    "base: small.yaml\nplugins: null": "recipes/over.yaml:2: plugins is null; write a value, or leave the key out",
    "base: small.yaml\nmodel: null": "recipes/over.yaml:2: model: is missing",
    "base: small.yaml\noptim: {base: small.yaml}": "recipes/over.yaml:2: optim.base: unknown key",
}


@pytest.mark.parametrize(("written", "word"), [("null", "null"), ("", "empty"), ("~", "empty")])
def test_a_key_without_a_value_in_the_base_is_called_as_it_is_written(book, written: str, word: str):
    path = over(book, "seed: 1\n")
    book.edit(RECIPE, ("max_length: 256", f"max_length: {written}"))
    (mistake,) = mistakes(path)
    assert f"data.max_length is {word}; write a value" in mistake


@pytest.mark.parametrize("text", REFUSED)
def test_a_base_that_cannot_be_is_refused_and_never_passed_over(book, text: str):
    book.write("recipes/middle.yaml", "base: small.yaml\n")
    book.write("recipes/broken.yaml", "seed: 1\nseed: 2\n")
    book.write(OVER, f"{text}\n")
    assert any(mistake.startswith(REFUSED[text]) for mistake in mistakes(OVER)), mistakes(OVER)


def test_the_command_line_names_no_base(book):
    for path in (OVER, RECIPE):
        over(book, "seed: 1\n")
        assert mistakes(path, "base=small.yaml") == [
            "--set base=small.yaml: a base is named in the recipe's file; write it there"
        ]


def test_paths_start_in_the_file_that_has_them(book):
    """The base, in another folder, names rows and a plugin that lie beside it."""
    own = RECIPE_TEXT.replace("train: python-stdlib", "train: rows.jsonl") + "plugins: [margin.py]\n"
    book.write("elsewhere/far/base.yaml", own)
    book.write("elsewhere/far/rows.jsonl", "{}\n")
    book.write("elsewhere/far/margin.py", (ROOT / "tests/plugins/margin.py").read_text())
    book.write("rows.jsonl", "{}\n")
    path = over(book, "seed: 3\n", base="../elsewhere/far/base.yaml")
    recipe = load_recipe(path)
    assert Path(recipe.data.train[0].path).resolve() == book.root / "elsewhere/far/rows.jsonl"
    assert recipe.plugins == [str(book.root / "elsewhere/far/margin.py")]
    path = over(book, "data: {train: rows.jsonl}\n", base="../elsewhere/far/base.yaml")
    assert Path(load_recipe(path).data.train[0].path).resolve() == book.root / "rows.jsonl"


def test_explain_says_which_file_each_value_is_from(book, capsys):
    path = over(book, "optim: {learning_rate: 0.25}\n")
    assert main(["explain", str(path), "--json"]) == 0
    answer = documented("explain", capsys.readouterr().out)
    quantities = answer["quantities"]
    assert f"{OVER}:2" in quantities["optimizer"]["peak rate"]["from"]
    assert quantities["batch"]["step"]["from"] == [f"{RECIPE}:20"]
    assert answer["files"] == {"recipe": OVER, "base": RECIPE, "yaml": "accelerate_configs/ddp.yaml"}
    assert main(["explain", RECIPE, "--json"]) == 0
    assert "base" not in documented("explain", capsys.readouterr().out)["files"]


def test_two_recipes_over_one_are_compared_by_the_lines_of_each(book, capsys):
    path = over(book, "optim: {learning_rate: 0.25}\n")
    assert main(["explain", RECIPE, str(path)]) == 0
    said = capsys.readouterr().out
    assert "B recipe:2" in said and "weight_decay" not in said


def test_an_error_for_programs_has_the_value_of_the_base(book, capsys):
    book.edit(RECIPE, ("weight_decay: 0.1", "weight_decay: -1"))
    path = over(book, "seed: 1\n")
    assert main(["check", str(path), "--json"]) == 2
    (error,) = documented("check", capsys.readouterr().out, is_refused=True)["errors"]
    assert (error["file"], error["key"], error["value"]) == (RECIPE, "optim.weight_decay", -1)


def test_a_copy_as_one_file_is_the_same_recipe_from_any_folder(book, capsys):
    book.write("recipes/near/rows.jsonl", "{}\n")
    book.edit(RECIPE, ("train: python-stdlib", "train: recipes/near/rows.jsonl"))
    path = over(book, "# no comment of the head\nseed: 9\nrun: {num_epochs: 1}\n")
    book.write(OVER, f"# What: a try\n# Run:  cookbook launch {OVER}\n{(book.root / OVER).read_text()}")
    for out in ("recipes/whole.yaml", "other/place/whole.yaml"):
        assert main(["init", "--copy", str(path), "--out", out]) == 0
        capsys.readouterr()
        text = Path(out).read_text()
        assert "base" not in yaml.safe_load(text)
        assert f"# What: a try\n# Run:  cookbook launch {out}\n" in text
        ours, copied = load_recipe(path), load_recipe(Path(out))
        for reached in (lambda recipe: recipe.data.train[0].path, lambda recipe: recipe.strategy):
            assert Path(reached(ours)).resolve() == Path(reached(copied)).resolve()
        same = {"data": ours.data, "strategy": ours.strategy}
        assert copied.model_copy(update=same) == ours and copied.seed == 9 and copied.run.max_steps is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--copy", RECIPE], f"{RECIPE}: has no base, and is a single file already"),
        (["--copy", OVER, "--out", RECIPE], f"{RECIPE}: exists, and is not overwritten"),
        (["--copy", OVER, "--out", "x.txt"], "--out is x.txt; a recipe ends in .yaml"),
        (["model", "--copy", OVER, "--gpus", "cpu"], "--gpus: would be ignored with --copy; take it out"),
        ([], "MODEL is missing; write cookbook init MODEL DATA"),
    ],
)
def test_a_copy_that_cannot_be_is_refused(book, capsys, words: list[str], said: str):
    over(book, "seed: 1\n")
    assert main(["init", *words]) == 2
    assert said in capsys.readouterr().err


def test_other_commands_that_read_or_write_a_recipe(book, capsys):
    path = over(book, "optim: {learning_rate: 0.25}\n")
    assert main(["convert", str(path)]) == 2
    assert f"{path}: is a recipe already" in capsys.readouterr().err
    # What tune writes lands in the recipe's own file, and goes before the base's.
    Path(path).write_text(with_values(path.read_text(), {"batch.micro_batch_size": "4", "strategy": "zero2"}))
    assert load_recipe(path).batch.micro_batch_size == 4 and "zero2" in load_recipe(path).strategy
    assert load_recipe(Path(RECIPE)).batch.micro_batch_size == 8
    words = ["submit", str(path), "--gpus", "1x2xH100", "--to", "k8s"]
    book.write("../outside.yaml", RECIPE_TEXT)
    over(book, "seed: 1\n", base="../../outside.yaml")
    assert main(words) == 2
    assert "recipes/../../outside.yaml: not in this folder" in capsys.readouterr().err
    over(book, "seed: 1\n")
    assert main(words) == 2
    assert "not in this folder" not in (said := capsys.readouterr().err) and "--image is missing" in said


def test_an_editor_asks_a_recipe_over_another_for_no_key_of_the_base():
    is_valid = jsonschema.Draft202012Validator(recipe_schema()).is_valid
    whole = yaml.safe_load(RECIPE_TEXT.replace("3e-3", "3.0e-3"))
    assert is_valid(whole)
    assert is_valid(
        {"base": "small.yaml", "optim": {"weight_decay": 0.5}, "data": {"eval": {"max_rows": 3}}, "seed": 7}
    )
    lacking = [{**whole, "batch": {}}, {**whole, "optim": {"name": "sgd"}}, {**whole, "adapter": {}}]
    lacking += [{**whole, "objective": {"name": "distill"}}, {**whole, "data": {"train": [{"max_rows": 3}]}}]
    lacking += [{key: value for key, value in whole.items() if key != "run"}]
    wrong = [{"base": 3}, {"base": "a.yaml", "sed": 3}, {"base": "a.yaml", "optim": {"lr": 3}}]
    assert not [values for values in lacking + wrong if is_valid(values)]


def test_a_run_records_the_resolved_recipe_and_the_digests_of_both_files(lab: Lab, tmp_path: Path):
    base, path = tmp_path / "base.yaml", tmp_path / "over.yaml"
    base.write_text((lab.folder / "recipe.yaml").read_text())
    path.write_text("base: base.yaml\noptim: {learning_rate: 0.125}\n")
    out = tmp_path / "out"
    job = lab.job(tmp_path, "single", {"run.max_steps": "5", "run.output_dir": str(out)}, limit=120)
    job["words"][1] = str(path)
    assert done_of(job, lab.parent.ask(job)).returncode == 0
    recorded = yaml.safe_load((out / "recipe.yaml").read_text())
    assert "base" not in recorded and recorded["optim"]["learning_rate"] == 0.125
    assert recorded["model"] == yaml.safe_load(base.read_text())["model"] | recorded["model"]
    expected = {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in (path, base)}
    files = json.loads((out / "run.json").read_text())["recipe_files"]
    assert {entry["file"]: entry["sha256"] for entry in files} == expected
    assert read_recipe(out / "recipe.yaml").digests.keys() == {str(out / "recipe.yaml")}
