"""Installed from its wheel, the project is a tool: a `cookbook` command that works in any folder, with the recipes and
strategies that it ships; a recipe's relative paths are its own.

    python -m pytest -q -m "slow or not slow" tests/test_installed.py
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from conftest import ROOT, clean_environment

from cookbook.commands import library
from cookbook.commands.cli import main
from cookbook.config.recipe import LOCAL, Recipe, read_located
from cookbook.config.strategy import find_strategy, load_strategy
from cookbook.system import shipped
from cookbook.system.files import PathText
from cookbook.system.registry import NamedSection
from cookbook.system.shipped import own_folder, path_from_here

SHIPPED = ("accelerate_configs", "ds_configs", "recipes", "examples")
RECIPE = """\
strategy: zero2
mixed_precision: 'no'
model: {from_scratch: {vocab_size: 300, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
  num_attention_heads: 2, num_key_value_heads: 2}}
data: {train: data/rows.jsonl, max_length: 32}
objective: {name: cpt}
batch: {global_batch_size: 4, micro_batch_size: 2}
optim: {learning_rate: 1e-3}
run: {max_steps: 2}
"""


def project(folder: Path) -> Path:
    """A recipe with its rows beside it. Returns the recipe."""
    (folder / "data").mkdir(parents=True)
    (folder / "mine.yaml").write_text(RECIPE)
    rows = ({"text": f"def name{i}(self): return self.value{i}"} for i in range(16))
    (folder / "data/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "mine.yaml"


@pytest.mark.parametrize(
    ("file", "folder"),
    [
        ("project/recipes/mine.yaml", "project"),
        ("project/recipes/llama/mine.yaml", "project"),
        ("project/accelerate_configs/mine.yaml", "project"),
        ("project/mine.yaml", "project"),
    ],
)
def test_relative_paths_of_a_file_start_in_the_folder_of_its_project(file, folder, tmp_path):
    assert own_folder(tmp_path / file) == tmp_path / folder


def test_a_path_is_sought_beside_its_file_then_here_then_among_what_is_shipped(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "recipes").mkdir(parents=True)
    there.mkdir()
    monkeypatch.chdir(here)
    name, recipe = "recipes/quickstart.yaml", there / "mine.yaml"
    assert path_from_here(name, recipe) == str(ROOT / name)
    (here / name).touch()
    assert path_from_here(name, recipe) == name
    (there / "recipes").mkdir()
    (there / name).touch()
    assert path_from_here(name, recipe) == str(there / name)
    assert path_from_here(name) == name
    assert path_from_here("rows.jsonl", recipe) == "rows.jsonl"


def test_a_shipped_path_is_shown_as_it_is_reached_from_here(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "IS_INSTALLED", True)
    monkeypatch.chdir(tmp_path)
    text = (
        f"{ROOT}/recipes/quickstart.yaml:3: wrong under {ROOT}/accelerate_configs/ddp.yaml; {tmp_path}/recipes/a.yaml"
    )
    shown = f"recipes/quickstart.yaml:3: wrong under accelerate_configs/ddp.yaml; {tmp_path}/recipes/a.yaml"
    assert shipped.short(text) == shown
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/quickstart.yaml").touch()
    assert shipped.short(text) == shown.replace("recipes/quick", f"{ROOT}/recipes/quick"), "another file has that name"


def test_a_recipe_elsewhere_trains_on_the_rows_beside_it_and_not_on_those_here(tmp_path, monkeypatch):
    from cookbook.start.run_plan import load_pair

    recipe = project(tmp_path / "there")
    here = project(tmp_path / "here").parent
    monkeypatch.chdir(here)
    loaded, strategy = load_pair(recipe)
    assert [source.path for source in loaded.data.train] == [str(recipe.parent / "data/rows.jsonl")]
    assert loaded.run.output_dir == "outputs/mine-zero2"  # what a run writes is here
    assert Path(strategy.path) == ROOT / "accelerate_configs/zero2.yaml"
    assert strategy.deepspeed_file == str(ROOT / "ds_configs/zero2.json")
    loaded, _ = load_pair(recipe, ["data.train=data/rows.jsonl"])  # typed here
    assert [source.path for source in loaded.data.train] == ["data/rows.jsonl"]


def names_path(annotation: Any, metadata: Sequence[Any] = ()) -> bool:
    (check,) = get_args(PathText)[1:]
    return check in metadata or any(
        names_path(part, getattr(part, "__metadata__", ()))
        for part in get_args(annotation)
        if not isinstance(part, str)
    )


def test_every_key_with_a_path_is_sought_beside_the_recipe_but_for_what_a_run_writes():
    sections = {}
    for name, field in Recipe.model_fields.items():
        models = [part for part in (field.annotation, *get_args(field.annotation)) if isinstance(part, type)]
        sections[name] = [
            kind for model in models for kind in (model.kinds() if issubclass(model, NamedSection) else [model])
        ]
    keys = {
        (name, key)
        for name, models in sections.items()
        for model in models
        for key, field in getattr(model, "model_fields", {}).items()
        if names_path(field.annotation, field.metadata)
    }
    rows = {("data", "train"), ("data", "eval")}  # Source has their path
    assert keys - rows == {*LOCAL, ("run", "output_dir")} - rows and ("objective", "teacher") in keys


def test_a_teacher_and_an_adapter_are_sought_beside_the_recipe(tmp_path, monkeypatch):
    for name in ("teacher", "adapter"):
        (tmp_path / "there" / name).mkdir(parents=True)
    recipe = tmp_path / "there/mine.yaml"
    recipe.write_text("adapter: {path: adapter}\nobjective: {teacher: teacher}\n")
    monkeypatch.chdir(tmp_path)
    values = read_located(recipe).values
    assert values["adapter"] == {"path": f"{tmp_path}/there/adapter"}
    assert values["objective"] == {"teacher": f"{tmp_path}/there/teacher"}


# `library --copy`: what is shipped becomes a file of one's own.


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_shipped_file_is_copied_by_its_path_or_by_a_name_of_its_own():
    names = library.names_of_copies()
    files = [*(ROOT / "recipes").rglob("*.yaml"), *(ROOT / "accelerate_configs").glob("*.yaml")]
    files += [*(ROOT / "recipes/chat_templates").glob("*.jinja"), *(ROOT / "examples").glob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in files} == {str(path) for path in names.values()}
    for file in files:  # no other file has taken its short name
        assert len([name for name, path in names.items() if path == file.relative_to(ROOT)]) >= 2, file


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("zero3", ["accelerate_configs/zero3.yaml", "ds_configs/zero3.json"]),
        ("accelerate_configs/fsdp2.yaml", ["accelerate_configs/fsdp2.yaml"]),
        ("quickstart", ["recipes/quickstart.yaml", "recipes/schema.json"]),
        (
            "qwen25_3b/grpo_lora",
            ["recipes/qwen25_3b/grpo_lora.yaml", "recipes/qwen25_3b/gsm8k.py", "recipes/schema.json"],
        ),
        ("chatml", ["recipes/chat_templates/chatml.jinja"]),
        ("own_model", ["examples/own_model.py"]),
    ],
)
def test_a_copy_has_what_the_file_names_and_the_bytes_that_are_shipped(name, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # a second time nothing is left to do
        assert main(["library", "--copy", name]) == 0
        assert files_in(tmp_path) == {file: (ROOT / file).read_bytes() for file in files}
    assert capsys.readouterr().out.count("is here, as shipped") == len(files)


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "accelerate_configs").glob("*.yaml"))])
def test_a_copied_strategy_is_the_one_that_its_name_means_in_this_folder(name, tmp_path, monkeypatch):
    shipped_one = load_strategy(find_strategy(name))
    monkeypatch.chdir(tmp_path)
    assert load_strategy(find_strategy(name)).path == str(ROOT / f"accelerate_configs/{name}.yaml")
    assert main(["library", "--copy", name]) == 0
    copied = load_strategy(find_strategy(name))
    assert copied.path == f"accelerate_configs/{name}.yaml"
    assert not Path(copied.deepspeed_file or "").is_absolute()
    assert (copied.kind, copied.deepspeed, copied.fsdp) == (shipped_one.kind, shipped_one.deepspeed, shipped_one.fsdp)


def test_no_file_of_the_users_is_overwritten_and_nothing_is_copied_beside_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs/zero3.json").write_text("{}")
    (tmp_path / "recipes").write_text("a file")
    assert main(["library", "--copy", "fsdp2", "--copy", "zero3"]) == 2
    assert capsys.readouterr().err == (
        "ds_configs/zero3.json is here and differs from the shipped one; rename or remove it first\n"
    )
    assert main(["library", "--copy", "fsdp2", "--copy", "quickstart"]) == 2
    assert "recipes/quickstart.yaml: cannot be written (" in capsys.readouterr().err
    assert main(["library", "--copy", "zero-3", "--copy", "qwen3_4b/stf"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "--copy zero-3: nothing shipped has this name; did you mean zero3?",
        "--copy qwen3_4b/stf: nothing shipped has this name; did you mean qwen3_4b/sft?",
    ]
    assert files_in(tmp_path) == {"ds_configs/zero3.json": b"{}", "recipes": b"a file"}


def texts_of(path: Path) -> list[str]:
    """The strings of a Python file that somebody may read while it runs."""
    tree = ast.parse(path.read_text())
    asides = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text.value for text in texts if id(text) not in asides]


def test_messages_name_cookbook_and_not_make_which_a_package_lacks():
    targets = "|".join(re.findall(r"(?m)^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text()))
    files = [*(ROOT / "cookbook").rglob("*.py"), ROOT / "train.py"]
    texts = {str(path.relative_to(ROOT)): "\n".join(texts_of(path)) for path in files}
    assert {name for name, text in texts.items() if re.search(rf"\bmake ({targets})\b", text)} == {
        "cookbook/commands/submit.py",  # writes jobs that run in the repository's folder
        "cookbook/commands/doctor/software.py",  # only there, by `in_repository`
    }
    assert [name for name, text in texts.items() if "python -m cookbook " in text] == []
    assert sum(len(re.findall(r"cookbook (launch|plan|rehearse|check)\b", text)) for text in texts.values()) >= 10


def run(*command: str | Path, cwd: Path, **extra: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean_environment(**extra), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """The sdist, and the wheel that is built from it, as a release has them; from the files that Git has."""
    folder = tmp_path_factory.mktemp("packages")
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = run(*listed, cwd=ROOT).split("\0")[:-1]
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "source" / name)
    run(".ci/release", cwd=folder / "source", PYTHON=sys.executable, PIP_NO_INDEX="1")
    return folder / "source/dist"


def test_what_is_no_code_in_the_package_is_named_for_the_wheel():
    """Quick, where the test below builds it: a file that is left out is missed by whoever installs."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    held = {
        path
        for package, patterns in named.items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    tracked = subprocess.run(["git", "ls-files", "cookbook"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {ROOT / name for name in tracked.stdout.splitlines() if not name.endswith(".py")}
    files = {path for path in files if not path.is_symlink()}  # those of the repository's own folders
    assert files <= held and len(files) > 5, files - held


@pytest.mark.slow
def test_sdist_and_wheel_hold_recipes_strategies_and_jsons_as_they_are_here(packages):
    ours = [path for name in SHIPPED for path in sorted((ROOT / name).rglob("*")) if path.is_file()]
    code = [path for path in sorted((ROOT / "cookbook").rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    gpus = [ROOT / "simulated_gpus" / name for name in ("bin/nvidia-smi", "inject/sitecustomize.py")]
    gpus += [path for path in (ROOT / "simulated_gpus").iterdir() if path.suffix in (".cpp", ".h", ".py")]
    assert len(ours) > 40 and len(code) > 150 and len(gpus) > 12
    code += gpus
    (wheel,), (sdist,) = packages.glob("*.whl"), packages.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        for path in [*ours, ROOT / "train.py", ROOT / "pyproject.toml"]:
            assert archive.read(f"cookbook/shipped/{path.relative_to(ROOT)}") == path.read_bytes()
        for path in code:
            assert archive.read(str(path.relative_to(ROOT))) == path.read_bytes()
        assert {name.split("/")[0].removesuffix("-0.1.0.dist-info") for name in archive.namelist()} == {
            "cookbook",
            "simulated_gpus",
            wheel.name.split("-")[0],
        }
        needed = archive.read(f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/METADATA").decode()
    pinned = [line.strip() for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    requirements = [line.split(": ")[1] for line in needed.splitlines() if line.startswith("Requires-Dist")]
    assert [line for line in requirements if "extra ==" not in line] == pinned
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for extra in ("fp8", "tensorboard", "wandb", "mlflow", "trackio"):  # the groups that the package's messages name
        of_extra = [line.split(";")[0] for line in requirements if line.endswith(f'extra == "{extra}"')]
        assert of_extra == groups[extra]
        assert all(f'{package}; extra == "trackers"' in requirements for package in of_extra) == (extra != "fp8")
    assert set(re.findall(r"(?m)^Provides-Extra: (.+)$", needed)) & {"dev", "peers", "timm", "oldest"} == set()
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {str(path.relative_to(ROOT)) for path in [*ours, *code, ROOT / "train.py"]} <= held


@pytest.fixture(scope="module")
def tool(packages) -> Path:
    """The command, in an environment of its own that sees the libraries of this one."""
    venv = packages / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=packages)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (wheel,) = packages.glob("*.whl")
    offline = ("--no-index", "--no-deps", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", venv / "bin/python", "install", "-q", *offline, wheel, cwd=packages)
    # As pip writes it where accelerate is installed too.
    program = venv / "bin/accelerate"
    program.write_text(f"#!{venv}/bin/python\nfrom accelerate.commands.accelerate_cli import main\nmain()\n")
    program.chmod(0o755)
    return venv / "bin/cookbook"


@pytest.mark.thorough
@pytest.mark.slow
def test_the_installed_command_checks_and_explains_in_another_folder(tool, tmp_path):
    packaged = next((tool.parents[1] / "lib").glob("python*/site-packages/cookbook/shipped"))
    answer = run(tool, "--version", cwd=tmp_path)
    assert answer.startswith("cookbook 0.1.0\n")
    answer = run(tool, "check", cwd=tmp_path)
    for name in SHIPPED[::2]:
        for path in (ROOT / name).rglob("*.yaml"):
            assert f"\n{path.relative_to(ROOT)}: fine" in f"\n{answer}"
    assert str(packaged) not in answer, "what leads there from here is shorter"
    answer = run(tool, "explain", "recipes/qwen25_7b/sft.yaml", "--strategy", "zero2", cwd=tmp_path)
    assert "accelerate launch" in answer and str(packaged / "train.py") in answer
    refused = subprocess.run(
        [tool, "launch", "recipes/qwen25_7b/sft.yaml"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2
    assert "  cookbook rehearse recipes/qwen25_7b/sft.yaml" in refused.stderr
    assert "  cookbook launch recipes/quickstart.yaml" in refused.stderr and "make " not in refused.stderr
    words = ["submit", "recipes/quickstart.yaml", "--to", "slurm", "--gpus", "8xH100"]
    refused = subprocess.run([tool, *words], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2 and "type it in a clone" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_the_installed_command_trains_a_recipe_of_another_folder(tool, tmp_path):
    recipe = project(tmp_path / "own words" / "project")
    here = tmp_path / "here"
    here.mkdir()
    (here / "train.py").write_text("raise SystemExit('not ours')")
    dry = run(tool, "launch", recipe, "--strategy", "zero3", "--processes", "2", "--dry-run", cwd=here)
    assert "fine under" in dry and "zero3.yaml" in dry
    run(tool, "launch", recipe, "--strategy", "ddp", "--processes", "2", cwd=here)
    steps = [json.loads(line) for line in (here / "outputs/mine-ddp/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == [1, 2]
    assert (here / "outputs/mine-ddp/export/model.safetensors").is_file()
    record = json.loads((here / "outputs/mine-ddp/run.json").read_text())
    assert record["commit"] is None
    assert sorted(os.listdir(recipe.parent)) == ["data", "mine.yaml"]


@pytest.mark.slow
def test_by_the_packages_name_the_quickstart_and_a_recipe_of_init_train_in_an_empty_folder(tool, tmp_path):
    program = tool.with_name("onecurve-cookbook")
    three_steps = ("--set", "run.max_steps=3", "--set", "schedule.warmup_steps=1")
    run(
        program,
        "launch",
        "recipes/quickstart.yaml",
        "--strategy",
        "ddp",
        "--processes",
        "2",
        *three_steps,
        cwd=tmp_path,
    )
    assert sorted(os.listdir(tmp_path)) == [".cache", "outputs"]
    assert (tmp_path / "outputs/quickstart/export/model.safetensors").is_file()
    # What is edited here is what runs.
    run(program, "library", "--copy", "zero2", "--copy", "sums/sft", cwd=tmp_path)
    json_file = tmp_path / "ds_configs/zero2.json"
    settings = json.loads(json_file.read_text())
    settings["zero_optimization"]["reduce_bucket_size"] = 123456
    json_file.write_text(json.dumps(settings))
    run(program, "init", "recipes/sums/model", "recipes/sums/answers.jsonl", "--gpus", "cpu", cwd=tmp_path)
    recipe = tmp_path / "recipes/mine.yaml"
    assert yaml.safe_load(recipe.read_text())["model"]["name_or_path"] == "recipes/sums/model"
    run(program, "launch", recipe, "--strategy", "zero2", "--processes", "1", *three_steps, cwd=tmp_path)
    record = json.loads((tmp_path / "outputs/mine/run.json").read_text())
    assert "123456" in json.dumps(record)
