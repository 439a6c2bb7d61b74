"""Protects the reading of YAML and JSON: what a value is, where it stands, and that shipped files know no misspelling.

python -m pytest -q tests/test_files.py
"""

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import RECIPE, ROOT

from cookbook.start.run_plan import load_pair
from cookbook.system.files import (
    MAX_FILE_BYTES,
    Document,
    RecipeError,
    apply_overrides,
    dump_yaml,
    make_folder,
    path_problem,
    read_document,
)
from cookbook.system.record_files import new_file
from tests.turns import others_by_turn

SHIPPED = sorted(
    str(path.relative_to(ROOT))
    for folder, pattern in (("recipes", "*.yaml"), ("accelerate_configs", "*.yaml"), ("ds_configs", "*.json"))
    for path in (ROOT / folder).rglob(pattern)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5), ("2E-5", 2e-5), ("2.0e-5", 2e-5), ("1.", 1.0), (".5", 0.5), ("1_000", 1000),
        ("-1e3", -1000), ("2e8", 200_000_000), ("5E7", 50_000_000), ("2.5e-1", 0.25), ("2.0", 2.0), ("1e300", 1e300),
        ("0", 0), ("-7", -7), ("010", "010"), ("0x10", "0x10"), ("1:30", "1:30"), ("2020-01-01", "2020-01-01"),
        ("true", True), ("no", False), ("'no'", "no"),
        ("~", None), ("", None), ("a b", "a b"), ("=", "="), ("1e", "1e"),
        ("e5", "e5"), (".", "."), ("[1, {a: b}]", [1, {"a": "b"}]), ("12e5", 1_200_000), ("'12e5'", "12e5"),
    ],
)  # fmt: skip
def test_a_yaml_value_is_what_it_looks_like(tmp_path, text, value):
    path = tmp_path / "x.yaml"
    path.write_text(f"key: {text}\n")
    read = read_document(path).values["key"]
    assert (type(read), read) == (type(value), value)


def test_a_file_that_is_read_again_is_as_it_stands(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: {b: [1]}\n")
    document = read_document(path)
    document.values["a"]["b"].append(2)
    document.lines.clear()
    again = read_document(path)
    assert again.values == {"a": {"b": [1]}} and again.lines[("a", "b")] == 1
    path.write_text("a: {b: [3]}\n")
    assert read_document(path).values == {"a": {"b": [3]}}


def test_a_json_size_may_be_written_as_deepspeed_s_documentation_does(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"bucket": 2e8, "share": 1.5e-1, "time": 2.0, "huge": 1e300}')
    values = read_document(path).values
    assert [(type(value), value) for value in values.values()] == [
        (int, 200_000_000),
        (float, 0.15),
        (float, 2.0),
        (float, 1e300),
    ]


def test_written_yaml_reads_back_to_equal_values(tmp_path):
    values = {"a": ["2e-5", "12e5", "no", "010", "1:30", "~", "", "null", "a: b", "2020-01-01", "é", " x", "0x1", ".5"]}
    values["b"] = {"c": [2e-5, 1e22, -0.0, 3, 10**18, True, False, None]}
    path = tmp_path / "x.yaml"
    path.write_text(dump_yaml(values))
    assert repr(read_document(path).values) == repr(values)


@pytest.mark.parametrize("name", ["x.yaml", "x.json"])
def test_a_place_is_the_line_of_the_key(tmp_path, name):
    path = tmp_path / name
    path.write_text(
        '{\n"a": 1,\n"b": {\n\t"c": [\n  1, 2]\n}}' if name == "x.json" else "a: 1\nb:\n  c: [\n\n  1, 2]\n"
    )
    document = read_document(path)
    lines = {("a",): 2, ("b",): 3, ("b", "c"): 4, ("b", "c", 1): 5} if name == "x.json" else {("a",): 1, ("b", "c"): 3}
    for key, line in lines.items():
        assert document.place(*key) == f"{path}:{line}: {'.'.join(map(str, key))}"
    assert document.place("b", "missing").startswith(f"{path}:{lines.get(('b',), 2)}:")


def test_a_file_at_the_limit_is_read_and_one_above_is_not(tmp_path):
    path = tmp_path / "x.yaml"
    head = "a: 1\n#"
    path.write_text(head + "x" * (MAX_FILE_BYTES - len(head)))
    assert read_document(path).values == {"a": 1}
    path.write_text(head + "x" * (MAX_FILE_BYTES - len(head) + 1))
    with pytest.raises(RecipeError, match="too many"):
        read_document(path)


def misspelt(key):
    """The key with one letter more, which no schema knows."""
    return f"{key[:2]}q{key[2:]}"


def keys_of(name):
    """Each key of a file at every depth, with its line: found by the YAML parser's events, not by our reader."""
    keys = []

    def walk(node, path):
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                keys.append(((*path, key.value), key.start_mark))
                walk(value, (*path, key.value))

    walk(yaml.compose((ROOT / name).read_text()), ())
    return keys


def recipe_for(book, name):
    """A recipe that uses a shipped file."""
    if name.startswith("recipes"):
        return name
    strategy = name
    if name.endswith(".json"):
        strategy = next(path for path in SHIPPED if path.startswith("accelerate") and name in (ROOT / path).read_text())
    book.edit(RECIPE, ("accelerate_configs/ddp.yaml", strategy))
    return RECIPE


@pytest.mark.parametrize("name", others_by_turn(SHIPPED, SHIPPED[::6]))
def test_every_key_of_a_shipped_file_is_refused_when_misspelt(library, name):
    recipe = Path(recipe_for(library, name))
    load_pair(recipe)  # the file itself is accepted
    text, keys = (ROOT / name).read_text(), keys_of(name)
    lines = text.splitlines(keepends=True)
    assert keys
    for path, mark in keys:
        wrong = misspelt(path[-1])
        line = lines[mark.line]
        mutated = line[: mark.column] + line[mark.column :].replace(path[-1], wrong, 1)
        library.write(name, "".join([*lines[: mark.line], mutated, *lines[mark.line + 1 :]]))
        with pytest.raises(RecipeError) as caught:
            load_pair(recipe)
        place = f"{name}:{mark.line + 1}: {'.'.join((*path[:-1], wrong))}: "
        if path[:-1] == ("data", "columns"):  # whose keys are told together
            place = f"{name}:{mark.line + 1}: data.columns has {wrong!r}; "
        assert any(mistake.startswith(place) for mistake in caught.value.mistakes), (place, caught.value.mistakes)


def test_there_are_enough_keys_to_misspell():
    assert len(SHIPPED) >= 21
    assert sum(len(keys_of(name)) for name in SHIPPED) > 150


def test_reader_agrees_with_pyyaml_and_json_on_shipped_files():
    assert len(SHIPPED) >= 21
    for name in SHIPPED:
        text = (ROOT / name).read_text()
        if name.endswith(".json"):
            assert read_document(ROOT / name).values == json.loads(text)
        else:  # PyYAML reads 3e-3 as text; nothing else differs
            text = re.sub(r"(?<![\d.])(\d+)e-(\d+)", r"\1.0e-\2", text)
            assert read_document(ROOT / name).values == yaml.safe_load(text)


def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=r"file/x: cannot be written \(Not a directory\); use a folder that you can"):
        make_folder(tmp_path / "file" / "x")


def test_a_link_to_itself_is_a_file_that_cannot_be_read(tmp_path):
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    with pytest.raises(RecipeError, match=r"cannot be read \(Too many levels of symbolic links\)"):
        load_pair(loop)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/x/ok ü #1.jsonl", "YAML takes '#1.jsonl' for a comment; write the value in quotes within it: \"/x/ok ü #1"),
        ("#1", "YAML takes '#1' for a comment"),
        ("[a, b] # c", "YAML takes '# c' for a comment"),
        ("~", "~ is not expanded here, and means null; write the folder in full, or null to unset the key"),
    ],
    ids=lambda value: value[:12],
)
def test_no_part_of_a_value_on_the_command_line_is_left_out(text, expected):
    (mistake,) = apply_overrides(Document("file", {}), [f"a.b={text}"]).mistakes
    assert mistake.startswith(f"--set a.b={text}: {expected}")


@pytest.mark.parametrize(
    ("text", "value"), [('"/x/ok #1"', "/x/ok #1"), ("a#b", "a#b"), ("null", None), (" [a, 'b #'] ", ["a", "b #"])]
)
def test_a_value_that_yaml_reads_whole_is_taken(text, value):
    document = Document("file", {})
    assert not apply_overrides(document, [f"a={text}"]).mistakes and document.values == {"a": value}


@pytest.mark.parametrize(
    ("assignments", "notes"),
    [
        (
            ["data={train: b}"],
            ["--set data={train: b}: replaces the whole of data, without length: 64, eval.path: 'e'"],
        ),
        (["data.length=8", "data={eval: {path: f}}"], ["replaces the whole of data, without train: 'a', length: 8"]),
        (["seed=1", "seed=2"], ["--set seed=2: replaces 1 of an earlier --set"]),
        (["seed=1", "seed=1", "data={train: b, length: 2, eval: {path: f}}"], []),
        (["data=null", "data={train: b}"], []),
        (["data.length=8", "other={train: b}"], []),
    ],
)
def test_what_an_assignment_replaces_beside_its_own_key_is_named(assignments: list[str], notes: list[str]):
    """The file's own value of the key is what it is there to replace."""
    values = {"seed": 0, "data": {"train": "a", "length": 64, "eval": {"path": "e"}}}
    document = apply_overrides(Document("file", values), assignments)
    assert len(document.notes) == len(notes) and not document.mistakes
    for note, words in zip(document.notes, notes, strict=True):
        assert note.endswith(words), note


@pytest.mark.parametrize("text", ["$HOME/x", "${HOME}/x", "/data/$USER/x", "~/x"])
def test_what_a_shell_would_expand_is_refused_in_a_path(text):
    assert re.fullmatch(r"is '.*', and (~|\$HOME|\$\{HOME\}|\$USER) is not expanded here; .*", path_problem(text))
    assert path_problem("/data/a$b") is None


@pytest.mark.parametrize("there", [False, True])
def test_a_new_file_is_written_whole_or_not_at_all(there: bool, tmp_path: Path):
    """A disk with room for 10 bytes, and a file that another process made in between."""
    path = tmp_path / "new.yaml"
    if there:
        path.write_text("mine")
    code = f"""
import resource, signal
from pathlib import Path
from cookbook.system.record_files import new_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if not {there}:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    new_file(Path({str(path)!r}), "a" * 100)
except OSError as error:
    print(type(error).__name__, error.errno)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    expected = ["FileExistsError", str(errno.EEXIST)] if there else ["OSError", str(errno.EFBIG)]
    assert done.stdout.split() == expected
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == ({"new.yaml": "mine"} if there else {})
    path.unlink(missing_ok=True)
    new_file(path, "text")
    assert path.read_text() == "text" and len(list(tmp_path.iterdir())) == 1
