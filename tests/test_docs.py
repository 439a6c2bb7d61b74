"""Protects the pages: commands, links, paths, keys and numbers in them are tried against what is there.

Commands run in a copy of the files with --dry-run, so that nothing is trained. Run alone: pytest -q tests/test_docs.py
"""

import ast
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from conftest import ROOT, clean_environment
from curves import Lab
from pydantic import TypeAdapter

import cookbook
from cookbook.commands import cli
from cookbook.commands import launch as launching
from cookbook.config.recipe import Recipe
from cookbook.config.registry import Named, Section
from tests.needs import need_simulated_gpus

PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "recipes/README.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
STRATEGIES = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
RECIPES_OF_THE_LIBRARY = [path.relative_to(ROOT) for path in RECIPES if path.parent.name != "recipes"]
TARGETS = re.findall(r"(?m)^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text())

# What pages may name though it is not there: made by a run, or by the reader.
MADE = (
    "outputs/",
    "run.output_dir/",
    "export/",
    "merged/",
    ".venv",
    ".cache",
    "nvme_swap",
    "recipes/mine",
    "path/to/",
    "checkpoints/",
    "hang/",
    "step-",
    "model/",
    "memory/",
    "profile/",
)
WRITTEN_BY_A_RUN = {"recipe.yaml", "run.json", "metrics.jsonl", "status.json", "adapter_config.json", "base_model.json"}
WRITTEN_BY_A_RUN |= {"manifest.json", "state.json", "export.json", "events.jsonl", "report.html", "compare.html"}
WRITTEN_BY_A_RUN |= {"monitor.jsonl", "monitor-1.jsonl"}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def fences(text: str, language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", text)


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"(?ms)^```.*?^```$", "", text)


def commands(text: str) -> list[str]:
    lines = [line for block in fences(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.strip() and not line.startswith("#")]


# Trying a command. Each function raises AssertionError with what is wrong, and returns the accelerate lines behind it.


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=clean_environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def run_cookbook(folder: Path, *arguments: str) -> str:
    """`python -m cookbook` in this process. `launch` goes as far as to the moment where it would start accelerate: it
    prints that line, having checked all.
    """
    printed, errors, environment = io.StringIO(), io.StringIO(), dict(os.environ)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(errors):
        patch.chdir(folder)
        patch.setattr(launching, "run_child", lambda *_: 0)
        for name in set(os.environ) - set(clean_environment()):
            del os.environ[name]
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        try:
            code = cli.main(list(arguments))
        except SystemExit as error:
            code = int(error.code or 0)
        finally:  # `launch --simulate-gpus` changes it for the processes that it starts
            os.environ.clear()
            os.environ.update(environment)
    said = printed.getvalue() + errors.getvalue()
    assert code == 0, f"cookbook {shlex.join(arguments)} ended with {code}:\n{said}"
    return printed.getvalue()


def attempt(line: str, folder: Path) -> list[list[str]]:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    match words:
        case ["make", *arguments]:
            return attempt_make(arguments, folder)
        case ["accelerate", "launch", *_]:
            return [words]
        case ["python", "train.py", *arguments]:
            run(folder, sys.executable, "train.py", *arguments, "--dry-run")
        case ["python", "-m", "cookbook", *arguments]:
            return attempt_cookbook(arguments, folder)
        case ["python", "-m", "pytest", *arguments]:
            for name in (word for word in arguments if "/" in word):
                assert (ROOT / name).exists(), f"{name} is not there"
        case ["python", script, *_] if script.startswith("benchmarks/"):
            assert (ROOT / script).is_file(), f"{script} is not there"
        case ["pip", "install", "-r", name] | ["pip", "install", "--require-hashes", "-r", name]:
            assert (ROOT / name).is_file(), f"{name} is not there"
        case ["pip", "install", "."] | ["pip", "wheel", "--no-deps", "-w", _, "."]:
            assert (ROOT / "pyproject.toml").is_file()  # tests/test_installed.py does both
        case ["cookbook", *arguments]:
            return attempt_cookbook(arguments, folder)
        case ["cp", source, target]:
            shutil.copy(folder / source, folder / target)
        case ["sbatch", *arguments]:
            at = next(i for i, word in enumerate(arguments) if not word.startswith("--"))
            assert os.access(ROOT / arguments[at], os.X_OK), f"{arguments[at]} is not a script"
            return attempt_cookbook(["launch", *arguments[at + 1 :]], folder)
        case ["source", ".venv/bin/activate"] | ["apt-get", "install", *_]:
            pass  # the reader's machine
        case _:
            raise AssertionError(f"no way to try {line!r} is known")
    return []


def attempt_make(arguments: list[str], folder: Path) -> list[list[str]]:
    makefile = text_of("Makefile")
    assignments = [word for word in arguments if "=" in word]
    targets = [word for word in arguments if "=" not in word]
    assert set(targets) <= set(TARGETS), f"make {targets}: the Makefile has {TARGETS}"
    for name in (word.split("=")[0] for word in assignments):
        assert f"$({name})" in makefile, f"{name}= is read by no rule"
    lines = []
    for line in run(folder, "make", "-n", *arguments).splitlines():
        if found := re.match(r"\.venv/bin/python -m cookbook (.*)", line):
            lines += attempt_cookbook(shlex.split(found.group(1)), folder)
    return lines


def attempt_cookbook(arguments: list[str], folder: Path) -> list[list[str]]:
    verb = arguments[0]
    if verb == "launch" and "--machines" in arguments:  # this machine has no route to the one that a page names
        run_cookbook(folder, "check", arguments[1])
    elif verb == "launch":
        # Without --dry-run, a recipe whose label asks for GPUs would be refused here, where there are none.
        dry_run = [] if "--dry-run" in arguments else ["--dry-run"]
        printed = run_cookbook(folder, *arguments, *dry_run)
        return [shlex.split(printed.splitlines()[-1])]
    if verb == "init":  # run for real by its own tests; the commands that follow need a recipe
        shutil.copy(folder / "recipes/quickstart.yaml", folder / "recipes/mine.yaml")
    if verb in ("check", "explain", "--help"):
        run_cookbook(folder, *arguments)
        return []
    if verb in (
        "preview",
        "plan",
        "rehearse",
        "submit",
    ):  # run for real by their own tests; the recipe must be a good one
        for name in (word for word in arguments if word.endswith(".yaml")):
            run_cookbook(folder, "check", name)
    explained = run_cookbook(folder, verb, "--help")
    for flag in (word for word in arguments if word.startswith("--")):
        assert flag in explained, f"{verb} has no {flag}"
    return []


def launch(words: list[str], folder: Path, lab: Lab) -> None:
    """Runs an accelerate line with --dry-run."""
    if "--dry-run" not in words:
        words = [*words, "--dry-run"]
    at = words.index("train.py")
    printed = lab.accelerate(words[2:at], words[at:], folder)
    assert ": fine under accelerate_configs/" in printed, printed


@dataclass
class Trial:
    folder: Path
    mistake: str | None = None
    accelerate_lines: list[list[str]] = field(default_factory=list)


def workplace(folder: Path) -> Path:
    """A copy of the files that a reader may edit, and links to the rest."""
    folder.mkdir(parents=True)
    for name in ("recipes", "accelerate_configs", "ds_configs"):
        shutil.copytree(ROOT / name, folder / name)
    for name in (
        "cookbook",
        "train.py",
        "Makefile",
        "requirements.txt",
        "requirements-dev.txt",
        "requirements-trackers.txt",
        "requirements-fp8.txt",
        "requirements-peers.txt",
    ):
        (folder / name).symlink_to(ROOT / name)
    return folder


def label(path: Path) -> list[str]:
    """The comment at the top of a recipe or strategy, without marks and without the editor's line."""
    lines = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
    assert lines is not None
    return [line.removeprefix("#").strip() for line in lines.group().splitlines() if "yaml-language-server" not in line]


def label_commands(path: Path) -> list[str]:
    """The commands of a label's `Run:`, which may go on over lines; a remark stands two spaces away."""
    found, is_run = [], False
    for line in label(path):
        is_run = line.startswith("Run:") or (is_run and not re.match(r"[A-Z][a-z]+:", line))
        if is_run:
            found.append(re.split(r"  +", line.removeprefix("Run:").strip())[0])
    return found


def all_commands() -> list[tuple[str, str]]:
    """(place, command), in the order in which a reader meets them."""
    pages = [(page, line) for page in PAGES for line in commands(text_of(page))]
    labels = [(str(path.relative_to(ROOT)), line) for path in RECIPES for line in label_commands(path)]
    return pages + labels


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Trial]:
    """Every command, tried up to the line that would start processes; a fresh workplace for each page."""
    base, folders, found = tmp_path_factory.mktemp("docs"), {}, {}
    for place, line in all_commands():
        if place not in folders:
            folders[place] = workplace(base / str(len(folders)))
        trial = found[place, line] = Trial(folders[place])
        try:
            trial.accelerate_lines = attempt(line, trial.folder)
        except AssertionError as error:
            trial.mistake = str(error)
    return found


def test_there_are_commands_to_try():
    places = [place for place, _ in all_commands()]
    assert len(places) >= 20
    assert places.count("README.md") >= 10 and {"docs/recipes.md", "recipes/quickstart.yaml"} <= set(places)


@pytest.mark.parametrize(("place", "line"), all_commands())
def test_a_command_of_the_pages_exists_and_finds_nothing_wrong(trials, place, line):
    if "simulate" in line.lower():
        need_simulated_gpus()
    assert trials[place, line].mistake is None, trials[place, line].mistake


def test_the_accelerate_lines_behind_the_commands_pass_a_dry_run(trials, lab):
    """Three are run of lines that differ only in the strategy, and of the library's, which are all alike."""
    chosen: dict[tuple[str, ...], dict[str, tuple[list[str], Path]]] = {}
    for (place, _), trial in trials.items():
        for words in trial.accelerate_lines:
            at = words.index("--config_file") + 1
            assert (ROOT / words[at]).is_file(), words
            is_library = Path(place) in RECIPES_OF_THE_LIBRARY
            same = chosen.setdefault(("library",) if is_library else tuple(words[words.index("train.py") :]), {})
            if len(same) < 3:
                same.setdefault(words[at], (words, trial.folder))
    lines = [line for same in chosen.values() for line in same.values()]
    assert len(lines) >= 5
    for words, folder in lines:
        launch(words, folder, lab)


WRONG = [
    "make fly",
    "make train RECIPE=recipes/quickstart.yaml STRATEGIES=zero2",
    "make train RECIPE=recipes/none.yaml",
    "make train RECIPE=recipes/quickstart.yaml STRATEGY=zero9",
    "python train.py recipes/none.yaml",
    "python train.py --set optim.learnig_rate=1",
    "python -m cookbook levitate",
    "python -m cookbook sample outputs/quickstart --temperature 1",
    "python -m pytest tests/test_nothing.py",
    "cp recipes/none.yaml recipes/mine.yaml",
    "frobnicate recipes",
]


@pytest.mark.parametrize("line", WRONG)
def test_a_made_up_command_would_be_caught(tmp_path, line):
    with pytest.raises((AssertionError, OSError)):
        attempt(line, workplace(tmp_path / "w"))


def test_a_made_up_accelerate_line_would_be_caught(tmp_path, lab):
    line = "accelerate launch --config_file accelerate_configs/zero3.yaml train.py --set seed=-1"
    with pytest.raises(AssertionError, match="seed"):
        launch(shlex.split(line), workplace(tmp_path / "w"), lab)


# Links and paths.


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def broken_links(page: str, text: str) -> tuple[int, list[str]]:
    """How many relative links there are, and those that lead nowhere."""
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)) if "://" not in link]
    broken = []
    for link in links:
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        content = text if not name else target.read_text() if target.is_file() and anchor else ""
        slugs = {slug(heading) for heading in re.findall(r"(?m)^#+ (.*)$", prose(content))}
        if not target.exists() or (anchor and anchor not in slugs):
            broken.append(link)
    return len(links), broken


def missing_paths(text: str) -> tuple[int, list[str]]:
    """How many paths of this repository are named as `code`, and those that are not there."""
    pattern = r"[\w.*-]+(?:/[\w.*-]+)*/?"
    words = [word for code in re.findall(r"`([^`\n]+)`", prose(text)) for word in code.split()]
    words += [line.split()[0] for block in fences(text, "") for line in block.splitlines() if line.strip()]
    paths = [
        word
        for word in words
        if re.fullmatch(pattern, word)
        and ("/" in word or re.search(r"\.(py|yaml|json|md|txt|toml|jinja)$", word))
        and not word.startswith(MADE)
        and word not in WRITTEN_BY_A_RUN
    ]
    return len(paths), [path for path in paths if not list(ROOT.glob(path.rstrip("/")))]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_path_of_a_page_is_there(page):
    assert broken_links(page, text_of(page))[1] == []
    assert missing_paths(text_of(page))[1] == []


def test_there_are_links_and_paths_to_check():
    assert sum(broken_links(page, text_of(page))[0] for page in PAGES) >= 25
    assert sum(missing_paths(text_of(page))[0] for page in PAGES) >= 30


def test_a_link_or_path_to_nowhere_would_be_found():
    page = "See [a](docs/none.md), [b](README.md#no-such-heading), `tests/none.py` and `cookbook/planning/plan.py`.\n"
    assert broken_links("README.md", page) == (2, ["docs/none.md", "README.md#no-such-heading"])
    assert missing_paths(page) == (2, ["tests/none.py"])


@pytest.mark.parametrize("page", PAGES)
def test_a_make_target_named_in_a_sentence_exists(page):
    named = re.findall(r"`make ([a-z][a-z0-9-]*)[^`]*`", text_of(page))
    assert set(named) <= set(TARGETS)


# The README.


def test_the_readme_lists_every_page():
    there = {f"docs/{path.name}" for path in (ROOT / "docs").iterdir() if path.suffix in ("", ".md")}
    assert {name for name in there if f"({name})" not in text_of("README.md")} == set()


def text_blocks(page: str) -> list[str]:
    """What its terminals show."""
    return re.findall(r"(?ms)^```text\n(.*?)^```", text_of(page))


@pytest.mark.slow
def test_the_plan_of_the_readme_is_what_plan_prints():
    (shown,) = [block for block in text_blocks("README.md") if block.startswith("PLAN")]
    options = ["--gpus", "8xH100", "--host-gib", "1024"]
    command = [sys.executable, "-m", "cookbook", "plan", "recipes/qwen25_7b/sft.yaml", *options]
    environment = clean_environment(HF_HUB_OFFLINE="1")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    printed = iter(done.stdout.splitlines())
    assert [line for line in shown.splitlines() if line.strip() != "..." and line not in printed] == []


def test_the_quickstart_of_the_readme_is_the_run_that_its_label_records():
    (shown,) = [block for block in text_blocks("README.md") if "SUMMARY" in block]
    label = (ROOT / "recipes/quickstart.yaml").read_text()
    (before, after) = re.findall(r"held-out loss\s+([\d.]+) (?:->|at step 0,) ([\d.]+)", label + shown)
    assert before == after, "the label's and the README's figures"
    steps = re.findall(r"step (\d+): held-out loss ([\d.]+) \(10876 tokens\)", shown)
    assert (f"{float(steps[0][1]):.3f}", f"{float(steps[-1][1]):.3f}") == before


def test_the_readme_has_the_errors_of_memory_that_were_measured():
    rows = json.loads((ROOT / "benchmarks/results/gpu_memory.json").read_text())["rows"]
    errors = [abs(row["peak_bytes"] / row["forecast_bytes"] - 1) for row in rows if "peak_bytes" in row]
    found = re.search(
        r"(\d+) runs of (\d+) strategies peak within ([\d.]+)% of", " ".join(text_of("README.md").split())
    )
    assert found is not None
    assert (int(found[1]), int(found[2])) == (len(errors), len({row["strategy"] for row in rows}))
    assert 0 <= float(found[3]) / 100 - max(errors) < 0.001


def test_the_readme_is_short():
    assert len(prose(text_of("README.md")).splitlines()) <= 130


def test_a_page_keeps_a_place_for_the_equivalence_table():
    text = text_of("docs/equivalence.md")
    assert text.count("<!-- equivalence:begin -->") == text.count("<!-- equivalence:end -->") == 1


def test_the_page_of_strategies_offers_every_one():
    rows = re.findall(r"(?m)^\| \[`(\w+)`\]\((\S+)\) \|", text_of("docs/strategies.md"))
    assert len(rows) >= 14
    assert sorted(rows) == [(name, f"../accelerate_configs/{name}.yaml") for name in STRATEGIES]


def test_the_layers_of_the_contributing_page_are_those_of_the_package():
    rows = re.findall(r"(?m)^\w+  .*$", cookbook.__doc__)
    assert len(rows) == 5
    for row in rows:
        assert row.split() in [line.split() for line in text_of("CONTRIBUTING.md").splitlines()], row


# Strategies: labels, and docs/strategies.md.


def settings(values: Any) -> list[tuple[str, Any]]:
    """(key, value) at every depth; sections too."""
    if not isinstance(values, dict):
        return []
    return [pair for key, value in values.items() for pair in [(key, value), *settings(value)]]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_has_a_label_and_few_settings(name):
    path = ROOT / f"accelerate_configs/{name}.yaml"
    lines = label(path)
    assert 2 <= len(lines) <= 4
    assert "Use it" in " ".join(lines) and "Costs" in " ".join(lines)
    assert max(map(len, path.read_text().splitlines())) <= 120
    assert len([value for _, value in settings(yaml.safe_load(path.read_text())) if not isinstance(value, dict)]) <= 12


def test_every_strategy_has_its_own_section():
    headings = re.findall(r"(?m)^### (\w+)$", text_of("docs/strategies.md"))
    assert sorted(headings) == STRATEGIES


def test_every_setting_of_a_strategy_file_is_explained_with_its_value():
    text = text_of("docs/strategies.md")
    files = [*(ROOT / "accelerate_configs").glob("*.yaml"), *(ROOT / "ds_configs").glob("*.json")]
    found = [pair for path in files for pair in settings(yaml.safe_load(path.read_text()))]
    assert len({key for key, _ in found}) >= 35
    # stage, device and enabled are what a file is named for.
    keys = {key for key, _ in found} - {"stage", "zero_optimization", "device", "enabled"}
    assert sorted(key for key in keys if f"`{key}`" not in text) == []
    rows = re.findall(r"(?m)^\| ((?:`\w+`(?:, )?)+) \| (\d[^|`]*) \|", text)
    numbers = {
        key: {float(n) for n in re.findall(r"\d[\de.]*", cell)}
        for keys, cell in rows
        for key in keys[1:-1].split("`, `")
    }
    assert len(keys & set(numbers)) >= 10
    for key, value in found:
        if key in numbers:
            assert value in numbers[key], f"{key} is {value}"


def test_every_value_of_the_disk_settings_is_the_one_in_the_file():
    text = text_of("docs/strategies.md")
    aio = json.loads((ROOT / "ds_configs/zero3_nvme.json").read_text())["aio"]
    assert len(aio) == 5
    for key, value in aio.items():
        written = json.dumps(value)
        assert f"`{key}` {written}" in text or f"`{key}` `{written}`" in text, key


# Recipes: labels, and docs/recipes.md.


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a key holds: alone, or None, or in a list, or by name."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_in, get_args(annotation))), None)


def recipe_keys(model: type[Section] = Recipe, path: str = "") -> list[tuple[str, Any]]:
    """(key, default) of every key; ... for one that must be written. `data.eval` has the keys of `data.train`."""
    found = []
    for name, info in model.model_fields.items():
        inner, key = section_in(info.annotation), f"{path}{name}"
        if inner is None or path == "data." or info.default is None:
            default = "derived" if info.default_factory else info.default
            found.append((key, ... if info.is_required() else default))
        if inner is not None and key != "data.eval":
            if issubclass(inner, Named):
                found.append((f"{key}.name", inner.default))
                of_kinds = [pair for kind in inner.kinds() for pair in recipe_keys(kind, f"{key}.")]
                found += [pair for pair in of_kinds if pair[0] != f"{key}.name"]
            else:
                found += recipe_keys(inner, f"{key}.")
    return found


def test_every_key_of_a_recipe_is_explained_with_its_default():
    rows = dict(re.findall(r"(?m)^\| `([\w.]+)` \| (\S[^|]*) \| \S", text_of("docs/recipes.md")))
    keys = recipe_keys()
    assert len(keys) >= 60 and {"data.train.weight", "data.eval", "adapter", "adapter.rank"} <= dict(keys).keys()
    assert [key for key, _ in keys if key not in rows] == []
    for key, default in keys:
        cell = rows[key].strip("`")
        if default is ...:
            assert cell == "-", key
        elif default is None or default == {}:
            assert cell == "none", key
        elif isinstance(default, float):
            assert float(cell) == default, key
        else:
            assert yaml.safe_load(cell) == (list(default) if isinstance(default, tuple) else default), key


def test_every_piece_of_a_recipe_in_the_pages_is_a_good_one():
    found = 0
    for page in PAGES:
        for block in fences(text_of(page), "yaml"):
            for name, values in yaml.safe_load(block).items():
                TypeAdapter(Recipe.model_fields[name].annotation).validate_python(values)
                found += 1
    assert found >= 6


def test_a_whole_recipe_in_the_readme_lacks_nothing():
    (whole,) = (values for block in fences(text_of("README.md"), "yaml") if "run" in (values := yaml.safe_load(block)))
    assert [name for name, field in Recipe.model_fields.items() if field.is_required() and name not in whole] == []


def keys_of_dicts(source: str, where: str) -> set[str]:
    """The text keys of the dicts in `source` that stand in calls of `where`, or are assigned to it."""
    found = set()
    for node in ast.walk(ast.parse(text_of(source))):
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func) == where
        if is_call or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == where):
            inner = [one for one in ast.walk(node) if isinstance(one, ast.Dict)]
            found |= {key.value for one in inner for key in one.keys if isinstance(key, ast.Constant)}
    return found


def test_every_key_of_the_metrics_is_explained():
    objectives = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "cookbook/config/objectives").glob("*.py"))
    means = {"loss"}.union(*(keys_of_dicts(path, "metrics") for path in objectives))
    assert len(means) >= 5
    keys = keys_of_dicts("train.py", "services.log.write") | keys_of_dicts("train.py", "label") | means | {"mfu"}
    keys |= {f"eval_{key}" for key in means | {"num_tokens"}}
    assert len(keys) >= 20 and {"step", "grad_norm", "eval_set", "eval_reward_margin"} <= keys
    assert sorted(key for key in keys if f"`{key}`" not in text_of("docs/recipes.md")) == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recipe_says_what_it_is_how_to_run_it_what_it_needs_and_on_what_it_was_measured(path):
    lines = label(path)
    assert lines and re.match(r"[^:]+: \S|[A-Z].* \S", lines[0]), "the first line says what it is"
    for word in ("Run", "Needs", "Measured"):
        assert any(re.match(rf"{word}: +\S", line) for line in lines), f"no {word}:"
    assert str(path.relative_to(ROOT)) in "\n".join(label_commands(path)) or "make quickstart" in label_commands(path)


def test_there_are_recipes_to_read():
    assert len(RECIPES) >= 20
