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
import tomllib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml
from conftest import ROOT, clean_environment
from curves import Lab
from filelock import FileLock
from pydantic import TypeAdapter

import cookbook
from cookbook.commands import cli
from cookbook.commands import launch as launching
from cookbook.config.recipe import Recipe, load_recipe
from cookbook.config.strategy import Strategy, load_known
from cookbook.forecast.costs.flops import ModelSizes, Step, sizes_of
from cookbook.forecast.costs.traffic import Transfer, host_traffic, transfers
from cookbook.forecast.ranking import forecast_all
from cookbook.forecast.skeleton import skeleton
from cookbook.forecast.verdict import tokens_of_step
from cookbook.rows.row_kinds import kinds
from cookbook.start.run_plan import make_plan
from cookbook.system.hardware import parse_machines
from cookbook.system.registry import NamedSection, Section
from cookbook.training.models.structure import find_config
from tests.needs import need_simulated_gpus

PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "recipes/README.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
STRATEGIES = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
RECIPES_OF_THE_LIBRARY = [path.relative_to(ROOT) for path in RECIPES if path.parent.name != "recipes"]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
TARGETS = dict(re.findall(r"(?m)^([a-z][a-z0-9-]*):.*?##-? (.*)", (ROOT / "Makefile").read_text()))
"""Targets of make, with the help of each."""

# What pages may name though it is not there: made by a run, or by the reader.
MADE = (
    "outputs/",
    "run.output_dir/",
    "export/",
    "merged/",
    ".venv",
    ".cache",
    "dist/",
    "nvme_swap",
    "recipes/mine",
    "path/to/",
    "checkpoints/",
    "hang/",
    "step-",
    "model/",
    "profile/",
    "callbacks/",
)
WRITTEN_BY_A_RUN = {"recipe.yaml", "run.json", "metrics.jsonl", "status.json", "adapter_config.json", "base_model.json"}
WRITTEN_BY_A_RUN |= {"manifest.json", "state.json", "export.json", "events.jsonl", "report.html", "compare.html"}
WRITTEN_BY_A_RUN |= {"monitor.jsonl", "monitor-1.jsonl"}
OF_OTHERS = {"zero_to_fp32.py", "default_config.yaml", "dataset_info.json", "config.json"}
"""Files of DeepSpeed, accelerate, LLaMA-Factory, and a model."""


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
    """`cookbook` in this process. `launch` goes as far as to the moment where it would start accelerate: it prints
    that line, having checked all.
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
        case ["python", "-m", "pytest", *arguments]:
            for name in (word for word in arguments if "/" in word):
                assert (ROOT / name).exists(), f"{name} is not there"
        case ["python", script, *_] if script.startswith("benchmarks/"):
            assert (ROOT / script).is_file(), f"{script} is not there"
        case ["pip", "install", "-r", name] | ["pip", "install", "--require-hashes", "-r", name]:
            assert (ROOT / name).is_file(), f"{name} is not there"
        case ["pip", "install", "--group", name]:
            assert name in GROUPS, f"pyproject.toml has no group {name}"
        case ["pip", "install", *packages] if all("==" in package for package in packages):
            assert packages in GROUPS.values(), f"pyproject.toml has other versions than {packages}"
        case ["pip", "install", package] if re.fullmatch(r"onecurve-cookbook(\[[a-z0-9,]+\])?", package):
            assert set(re.findall(r"\w+", package.partition("[")[2])) <= GROUPS.keys()
        case ["uvx", "onecurve-cookbook", *arguments]:
            return attempt_cookbook(arguments, folder)
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
        case ["source", ".venv/bin/activate"] | ["apt-get", "install", *_] | ["git", "clone", *_]:
            pass  # the reader's machine
        case _:
            raise AssertionError(f"no way to try {line!r} is known")
    return []


def attempt_make(arguments: list[str], folder: Path) -> list[list[str]]:
    """Only what make has by name, with variables that the help of these targets names."""
    targets = [word for word in arguments if "=" not in word]
    assert set(targets) <= TARGETS.keys(), f"make {targets}: the Makefile has {[*TARGETS]}"
    for variable in (word.partition("=")[0] for word in arguments if "=" in word):
        assert any(f"{variable}=" in TARGETS[target] for target in targets), f"make {targets} ignores {variable}"
    lines = []
    for line in run(folder, "make", "-n", *arguments).splitlines():
        if match := re.match(r"\.venv/bin/python -m cookbook (.*)", line):
            lines += attempt_cookbook(shlex.split(match.group(1)), folder)
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
    if verb in ("init", "convert"):  # run for real by their own tests; the commands that follow need a recipe
        shutil.copy(folder / "recipes/quickstart.yaml", folder / "recipes/mine.yaml")
    if verb in ("check", "explain", "--help"):
        run_cookbook(folder, *arguments)
        return []
    if verb in (
        "preview",
        "plan",
        "rehearse",
        "rounds",
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
    line: str
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
        "simulated_gpus",
        "train.py",
        "Makefile",
        "requirements.txt",
        "pyproject.toml",
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
    commands, is_run = [], False
    for line in label(path):
        is_run = line.startswith("Run:") or (is_run and not re.match(r"[A-Z][a-z]+:", line))
        if is_run:
            commands.append(re.split(r"  +", line.removeprefix("Run:").strip())[0])
    return commands


@cache
def all_commands() -> list[tuple[str, str]]:
    """(place, command), in the order in which a reader meets them."""
    pages = [(page, line) for page in PAGES for line in commands(text_of(page))]
    labels = [(str(path.relative_to(ROOT)), line) for path in RECIPES for line in label_commands(path)]
    return pages + labels


def places_with_commands() -> list[str]:
    return list(dict.fromkeys(place for place, _ in all_commands()))


@pytest.fixture(scope="module")
def trials(shared_folder: Path) -> Callable[[str], list[Trial]]:
    """Outcome of each command of a place, tried up to the line that would start processes; a fresh workplace for
    each page or recipe. Workers share the outcomes: whoever asks first tries them.
    """

    @cache
    def try_all(place: str) -> list[Trial]:
        folder = shared_folder / "docs" / place.replace("/", "-")
        outcomes = Path(f"{folder}.json")
        folder.parent.mkdir(exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not outcomes.exists():
                workplace(folder)
                tried = [asdict(try_command(line, folder)) for there, line in all_commands() if there == place]
                outcomes.write_text(json.dumps(tried, default=str))
        return [Trial(**trial | {"folder": folder}) for trial in json.loads(outcomes.read_text())]

    return try_all


def try_command(line: str, folder: Path) -> Trial:
    trial = Trial(line, folder)
    try:
        trial.accelerate_lines = attempt(line, folder)
    except AssertionError as error:
        trial.mistake = str(error)
    return trial


def test_there_are_commands_to_try():
    places = [place for place, _ in all_commands()]
    assert len(places) >= 20
    assert places.count("README.md") >= 10 and {"docs/recipes.md", "recipes/quickstart.yaml"} <= set(places)


@pytest.mark.core  # the first line of a page pays for all of its lines
@pytest.mark.parametrize(("place", "line"), all_commands())
def test_a_command_of_the_pages_exists_and_finds_nothing_wrong(trials, place, line):
    if "simulate" in line.lower():
        need_simulated_gpus()
    mistakes = [trial.mistake for trial in trials(place) if trial.line == line]
    assert mistakes and not any(mistakes), mistakes


def test_the_accelerate_lines_behind_the_commands_pass_a_dry_run(trials, lab):
    """Three are run of lines that differ only in the strategy, and of the library's, which are all alike."""
    chosen: dict[tuple[str, ...], dict[str, tuple[list[str], Path]]] = {}
    for place in places_with_commands():
        for words, folder in [(words, trial.folder) for trial in trials(place) for words in trial.accelerate_lines]:
            at = words.index("--config_file") + 1
            assert (ROOT / words[at]).is_file(), words
            is_library = Path(place) in RECIPES_OF_THE_LIBRARY
            same = chosen.setdefault(("library",) if is_library else tuple(words[words.index("train.py") :]), {})
            if len(same) < 3:
                same.setdefault(words[at], (words, folder))
    lines = [line for same in chosen.values() for line in same.values()]
    assert len(lines) >= 5
    for words, folder in lines:
        launch(words, folder, lab)


WRONG = [
    "make fly",
    "make quickstart STRATEGIES=zero2",
    "make quickstart STRATEGY=zero9",
    "make finetune-7b ARGS=--fast",
    "make check ARGS=recipes/quickstart.yaml",
    "python -m cookbook check",
    "cookbook launch recipes/none.yaml",
    "cookbook launch recipes/quickstart.yaml --strategies zero2",
    "python train.py recipes/none.yaml",
    "python train.py --set optim.learnig_rate=1",
    "cookbook levitate",
    "pip install --group peer",
    "pip install tensorboard==2.20.0",
    "pip install onecurve",
    "pip install onecurve-cookbook[trakio]",
    "uvx onecurve-cookbook levitate",
    "cookbook chat outputs/quickstart --temprature 1",
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
        is_line = name.endswith(".py") and re.fullmatch(r"L\d+", anchor)  # tests/test_readme.py looks what is there
        if not target.exists() or (anchor and not is_line and anchor not in slugs):
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
        and word not in WRITTEN_BY_A_RUN | OF_OTHERS
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
    page = "See [a](docs/none.md), [b](README.md#no-such-heading), `tests/none.py` and `cookbook/start/run_plan.py`.\n"
    assert broken_links("README.md", page) == (2, ["docs/none.md", "README.md#no-such-heading"])
    assert missing_paths(page) == (2, ["tests/none.py"])


def misspelt(text: str) -> tuple[int, list[str]]:
    """How many commands a text names, and those that do not exist or have another spelling elsewhere."""
    code = " ".join(re.findall(r"`[^`]+`", text))
    named = re.findall(r"(python -m cookbook|make|cookbook)\s+([a-z][a-z0-9-]*)", code)
    known = {"make": TARGETS, "cookbook": list(typer.main.get_command(cli.app).commands)}
    return len(named), [f"{program} {name}" for program, name in named if name not in known.get(program, [])]


@pytest.mark.parametrize("page", PAGES)
def test_a_command_named_in_a_sentence_exists_and_has_one_spelling(page):
    assert misspelt(prose(text_of(page)))[1] == []


def test_a_misspelt_command_would_be_found():
    assert sum(misspelt(prose(text_of(page)))[0] for page in PAGES) >= 50
    text = "`make fly`, `make check`, `make test`, `python -m cookbook check`, `cookbook\nlevitate`, `cookbook check`"
    assert misspelt(text) == (6, ["make fly", "make check", "python -m cookbook check", "cookbook levitate"])


# The README.


def test_the_index_of_pages_lists_every_page_once():
    there = {path.name for path in (ROOT / "docs").iterdir() if path.suffix in ("", ".md", ".ipynb")} - {"README.md"}
    listed = re.findall(r"(?m)^- \[[^]]+\]\((?!\.\./)([^)]+)\)", text_of("docs/README.md"))
    assert sorted(listed) == sorted(there) and "(docs/README.md)" in text_of("README.md")


def text_blocks(page: str) -> list[str]:
    """Texts that its terminals show."""
    return re.findall(r"(?ms)^```text\n(.*?)^```", text_of(page))


@pytest.mark.slow
def test_the_table_of_the_plan_page_is_what_plan_prints():
    (shown,) = [block for block in text_blocks("docs/plan.md") if block.startswith("PLAN")]
    options = ["--gpus", "8xH100", "--host-gib", "1024", "--all"]
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
    rows = json.loads((ROOT / "benchmarks/forecast_accuracy/results/simulated.json").read_text())["rows"]
    errors = [abs(row["peak_bytes"] / row["forecast_bytes"] - 1) for row in rows if "peak_bytes" in row]
    match = re.search(
        r"(\d+) runs of (\d+) strategies peak within ([\d.]+)% of", " ".join(text_of("README.md").split())
    )
    assert match is not None
    assert (int(match[1]), int(match[2])) == (len(errors), len({row["strategy"] for row in rows}))
    assert 0 <= float(match[3]) / 100 - max(errors) < 0.001


def test_the_readme_is_short():
    assert len(prose(text_of("README.md")).splitlines()) <= 130


def test_a_page_keeps_a_place_for_the_equivalence_table():
    text = text_of("docs/equivalence.md")
    assert text.count("<!-- equivalence:begin -->") == text.count("<!-- equivalence:end -->") == 1


def test_the_page_of_strategies_offers_every_one():
    rows = re.findall(r"(?m)^\| \[`(\w+)`\]\((\S+)\) \|", text_of("docs/strategies.md"))
    assert len(rows) >= 14
    assert sorted(rows) == [(name, f"../accelerate_configs/{name}.yaml") for name in STRATEGIES]


def section(page: str, heading: str) -> str:
    """Text under a heading, up to the next one of any depth."""
    _, _, text = text_of(page).partition(f"\n{heading}\n")
    assert text, f"{page} has no {heading}"
    return re.split(r"(?m)^#+ (?=\w)", text)[0]


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    lines = f"\n{section(page, heading)}".partition("\n\n|")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names_in(text: str) -> list[str]:
    """The strategies that a text names."""
    return [name for name in re.findall(r"\w+", text) if name in STRATEGIES]


@pytest.fixture
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def plan_options(page: str) -> tuple[Recipe, dict[str, str]]:
    """The recipe with what is set, and the other flags, of the last `cookbook plan` of a page, that of its table."""
    *_, line = [line for line in commands(text_of(page)) if line.startswith("cookbook plan ")]
    recipe, *words = shlex.split(line)[2:]
    flags = list(zip(words[::2], words[1::2], strict=True))
    assignments = [value for flag, value in flags if flag == "--set"]
    return load_recipe(ROOT / recipe, assignments), {flag: value for flag, value in flags if flag != "--set"}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("in_the_repository")
def test_the_longest_samples_are_those_of_plan():
    recipe, options = plan_options("docs/long_context.md")
    room = {key: float(options[f"--{key.replace('_', '-')}"]) for key in ("host_gib", "nvme_gib")}
    report = forecast_all(recipe, load_known(), parse_machines(options["--gpus"], **room), "recipe")
    longest = {
        forecast.strategy.name: forecast.longest or 0
        for forecast in report.forecasts
        if forecast.verdict != "cannot run"
    }
    shown = [
        (name, int(cell.replace(",", "")) if cell[0].isdigit() else 0)
        for names, cell in table("docs/long_context.md", "## The longest sample")
        for name in names_in(names)
    ]
    assert dict(shown) == longest
    lengths = [length for _, length in shown]
    assert len(lengths) == len(longest) >= 25 and lengths == sorted(lengths, reverse=True)


LINKS = "## Links, and what a strategy sends over them"
HOST = "### Inside a machine, and to its host"


@cache
def known() -> dict[str, Strategy]:
    return {strategy.name: strategy for strategy in load_known()}


def sizes_for(recipe: Recipe) -> ModelSizes:
    config, _ = find_config(recipe.model)
    return sizes_of(config, skeleton(config, recipe))


@cache
def of_the_links() -> tuple[ModelSizes, Recipe]:
    """Sizes and recipe of the tables of docs/several_machines.md."""
    recipe, _ = plan_options("docs/several_machines.md")
    return sizes_for(recipe), recipe


def sent(
    name: str, sizes: ModelSizes, recipe: Recipe, number: int | None = None
) -> tuple[list[Transfer], tuple[float, float]]:
    """Transfers of a strategy's step on two machines of eight GPUs, and the bytes from each GPU to its host and back.

    Args:
        number: of micro-batches; None: the recipe's.
    """
    count = known()[name].num_processes or 16
    strategy = replace(known()[name].for_processes(count, 8), num_machines=-(-count // 8))
    plan = make_plan(recipe, strategy, num_processes=count, num_gpus=min(count, 8), recipe_name="recipe")
    tokens = tokens_of_step(recipe)
    step = Step(
        num_tokens=tokens,
        num_labelled=tokens,
        length=recipe.data.max_length,
        micro_batches=number or plan.gradient_accumulation_steps,
        recompute=recipe.model.recompute,
        precision="bf16",
    )
    host = host_traffic(strategy, sizes, step, num_processes=count, gpus_each=8)
    return transfers(strategy, sizes, step, count, num_local=8), (host.down, host.up)


def gb_to_others(messages: list[Transfer]) -> float:
    return sum(message.over_links(8)[1] for message in messages) / 1e9


NUMBER = 3
"""Micro-batches for which formulas with A are compared: with two a sum and a product may be the same."""
KINDS = {"gather": "all-gather", "reduction": "reduce-scatter", "all-reduce": "all-reduce"}


def times_in(cell: str) -> dict[str, int]:
    """`2 A - 1 gathers, one all-reduce` -> how often each kind comes in `NUMBER` micro-batches."""
    calls = dict.fromkeys(KINDS.values(), 0)
    for factor, is_each, less, kind in re.findall(r"(\d |one )?(A )?(- \d )?\b(gather|reduction|all-reduce)s?\b", cell):
        times = (1 if factor in ("", "one ") else int(factor)) * (NUMBER if is_each else 1)
        calls[KINDS[kind]] += times - int(less[2:] or 0)
    return calls


@pytest.mark.usefixtures("in_the_repository")
def test_the_table_of_links_has_what_each_strategy_sends_over_which():
    sizes, recipe = of_the_links()
    rows = table("docs/several_machines.md", LINKS)
    assert sorted(name for row in rows for name in names_in(row[0])) == STRATEGIES
    dense = [(name, row) for row in rows for name in names_in(row[0]) if name != "fsdp2_ep"]
    for name, (_, between, inside, gigabytes, _) in dense:
        messages, _ = sent(name, sizes, recipe, NUMBER)
        of_states = [message for message in messages if message.what.startswith(("weights", "gradients"))]
        for cell, leaves in ((between, True), (inside, False)):
            here = [message for message in of_states if (message.over_links(8)[1] > 0) == leaves]
            times = {kind: sum(message.times for message in here if message.kind == kind) for kind in KINDS.values()}
            assert times_in(cell) == times, (name, cell)
        others = {message.what: message.over_links(8)[1] > 0 for message in messages if message not in of_states}
        assert all(leaves == (what == "hidden states") for what, leaves in others.items()), name
        assert ("activations" in inside, name.startswith("pp")) == ("activations" in others, "hidden states" in others)
        assert float(gigabytes) == two_digits(gb_to_others(sent(name, sizes, recipe)[0])), name


def two_digits(value: float) -> float:
    return float(f"{value:.2g}")


@pytest.mark.slow
@pytest.mark.usefixtures("in_the_repository")
def test_the_network_is_the_limit_at_the_rates_of_the_page():
    recipe, options = plan_options("docs/several_machines.md")
    text = " ".join(section("docs/several_machines.md", LINKS).split())
    said = re.search(r"Of (\d+), (\d+), (\d+) and (\d+) Gbit/s (.+?)\. ", text)
    assert said is not None
    rates = list(map(int, said.groups()[:4]))
    first = {
        name: 0 if rate == "none" else int(rate)
        for rate, names in re.findall(r"(?:from|at) (\d+|none)((?: \w+)*? `.+?)(?=, from|, at|, and at|$)", said[5])
        for name in names_in(names)
    }
    assert len(first) >= 6
    strategies = [known()[name] for name in first]
    for rate in rates:
        machines = parse_machines(options["--gpus"], fabric_gbits=float(rate))
        report = forecast_all(recipe, strategies, machines, "recipe", limits=False)
        limits = {
            forecast.strategy.name: forecast.time.bottleneck == "network"
            for forecast in report.forecasts
            if forecast.time
        }
        assert limits == {name: rate <= most for name, most in first.items()}, rate


@pytest.mark.usefixtures("in_the_repository")
def test_what_expert_parallel_sends_is_that_of_the_ledger():
    written = re.search(
        r"\[Qwen3-30B-A3B\]\(\.\./(\S+)\), in micro-batches of (\d+) too, it sends (\d+) GB, and `fsdp2` (\d+)",
        " ".join(text_of("docs/several_machines.md").split()),
    )
    assert written is not None
    recipe = load_recipe(ROOT / written[1], [f"batch.micro_batch_size={written[2]}"])
    sizes = sizes_for(recipe)
    for strategy, number in (("fsdp2_ep", written[3]), ("fsdp2", written[4])):
        messages, _ = sent(strategy, sizes, recipe)
        assert float(number) == float(f"{gb_to_others(messages):.2g}"), strategy
        assert all(message.kind != "all-to-all" or message.over_links(8)[1] == 0 for message in messages)


@pytest.mark.usefixtures("in_the_repository")
def test_the_table_of_offloading_has_what_the_ledger_copies():
    sizes, recipe = of_the_links()
    rows = table("docs/several_machines.md", HOST)
    offloading = [name for name in STRATEGIES if name != "fsdp2_ep" and any(sent(name, sizes, recipe)[1])]
    assert sorted(name for row in rows for name in names_in(row[0])) == offloading
    values = {"A": NUMBER, "P": sizes.num_trained, "H": sizes.head, "D": 16}
    for names, down, up, cell in rows:
        for name in names_in(names):
            formulas = [re.sub(r"(?<=[\d)]) (?=[A-Z(])|(?<=[A-Z]) (?=[A-Z])", "*", formula) for formula in (down, up)]
            assert [eval(formula, {}, values) for formula in formulas] == pytest.approx(
                sent(name, sizes, recipe, NUMBER)[1]
            )
            numbers = [two_digits(amount / 1e9) for amount in sent(name, sizes, recipe)[1]]
            assert list(map(float, cell.split(" and "))) == numbers, name


def branches() -> dict[str, list[str]]:
    """The leaves under each line of the tree that has no other line above it, and of several machines each branch."""
    (drawing,) = fences(section("docs/strategies.md", "## The tree"), "text")
    branches_of: dict[str, list[str]] = {}
    root = where = ""
    for line in drawing.splitlines():
        words, _, leaves = line.partition(" ..")
        if re.match(r"\w", words):
            root = where = words
        elif re.match(r"[├└]", words) and root.startswith("several machines"):
            where = words.lstrip("├└─ ")
        branches_of.setdefault(where, []).extend(re.findall(r"\w+", leaves))
    return {where: leaves for where, leaves in branches_of.items() if leaves}


def test_each_leaf_of_the_tree_is_a_strategy_and_each_strategy_a_leaf_or_named_beside_it():
    leaves = {leaf for names in branches().values() for leaf in names}
    beside = re.findall(r"(?m)^Not a leaf is `(\w+)`: \w+", section("docs/strategies.md", "## The tree"))
    assert leaves.isdisjoint(beside)
    assert sorted([*leaves, *beside]) == STRATEGIES


def test_the_branches_of_several_machines_are_what_goes_between_them():
    """By the table of links, which has what the ledger counts."""
    tree = branches()
    between = {name: times_in(row[1]) for row in table("docs/several_machines.md", LINKS) for name in names_in(row[0])}
    at = [where for where in tree if re.match(r"one sum|sums in each|gathers of|no more than hidden", where)]
    assert len(at) == 4
    for where, gathers, sums in zip(at, ({0, 1}, {0, 1}, {2 * NUMBER}, {0}), (1, NUMBER, NUMBER, 0), strict=True):
        for name in tree[where]:
            times = between[name]
            assert times["all-gather"] in gathers, (where, name)
            assert times["reduce-scatter"] + times["all-reduce"] == sums, (where, name)


def test_the_readme_starts_with_leaves_of_the_tree():
    named = [name for row in table("README.md", "## Which strategy") for name in names_in(row[0])]
    leaves = {leaf for names in branches().values() for leaf in names}
    assert len(named) >= 7 and set(named) <= leaves


AXES = {"replicas": "replicate", "shards": "shard"} | {
    axis: axis for axis in ("pipeline", "sequence", "tensor", "expert")
}


def held_under(name: str) -> list[str]:
    """Weights of eight processes, as the drawing has them: data parallel alone keeps them whole, and every dimension
    but the replicas shards them."""
    mesh = known()[name].for_processes(8, 8).mesh(8)
    sharing = 8 // mesh.replicate if mesh.shard * mesh.tensor > 1 else 1
    among = mesh.shard * mesh.tensor
    if mesh.pipeline > 1:
        return [f"L{mesh.stage(rank)}" + (f".{rank % among}" if among > 1 else "") for rank in range(8)]
    if mesh.expert > 1:
        return [f"E{rank % mesh.expert}.{rank // mesh.expert}" for rank in range(8)]
    copies = [f"+C{rank % 4}" if name == "zero3_hpz" else "" for rank in range(8)]  # on two machines of four
    return [(f"W{rank % sharing}" if sharing > 1 else "W") + copies[rank] for rank in range(8)]


@pytest.mark.usefixtures("in_the_repository")
def test_the_drawing_of_who_has_what_is_the_mesh_of_each_file():
    (drawing,) = fences(section("docs/strategies.md", "## Who has what"), "text")
    lines = drawing.splitlines()[2:]
    drawn = []
    for parts, samples in zip(lines[::3], lines[1::3], strict=True):
        names, cells = parts[:20], parts[20:].split(maxsplit=8)
        sizes = {AXES[axis]: int(size) for size, axis in re.findall(r"(\d+) (\w+)", cells[8].partition(",")[0])}
        for name in names_in(names):
            mesh = known()[name].for_processes(8, 8).mesh(8)
            written = {axis: size for axis in AXES.values() if (size := getattr(mesh, axis)) > 1}
            assert sizes == written, name
            part = (f".{mesh.sequence_rank(rank)}" if mesh.sequence > 1 else "" for rank in range(8))
            shown = [f"s{mesh.data_parallel_rank(rank)}{each}" for rank, each in enumerate(part)]
            assert samples.split() == shown, name
            assert cells[:8] == held_under(name), name
            drawn.append(name)
    beside = names_in(section("docs/strategies.md", "## Who has what").partition("Not drawn:")[2])
    assert len(drawn) >= 16 and set(drawn) | set(beside) == set(STRATEGIES)


def test_the_layers_of_the_contributing_page_are_those_of_the_package():
    rows = re.findall(r"(?m)^\w+  .*$", cookbook.__doc__)
    assert len(rows) == 9
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
    pairs = [pair for path in files for pair in settings(yaml.safe_load(path.read_text()))]
    assert len({key for key, _ in pairs}) >= 35
    # stage, device and enabled are what a file is named for.
    keys = {key for key, _ in pairs} - {"stage", "zero_optimization", "device", "enabled"}
    assert sorted(key for key in keys if f"`{key}`" not in text) == []
    rows = re.findall(r"(?m)^\| ((?:`\w+`(?:, )?)+) \| (\d[^|`]*) \|", text)
    numbers = {
        key: {float(n) for n in re.findall(r"\d[\de.]*", cell)}
        for keys, cell in rows
        for key in keys[1:-1].split("`, `")
    }
    assert len(keys & set(numbers)) >= 10
    for key, value in pairs:
        if key in numbers:
            assert value in numbers[key], f"{key} is {value}"


def test_every_value_of_the_disk_settings_is_the_one_in_the_file():
    text = text_of("docs/strategies.md")
    aio = json.loads((ROOT / "ds_configs/zero3_nvme.json").read_text())["aio"]
    assert len(aio) == 5
    for key, value in aio.items():
        written = json.dumps(value)
        assert f"`{key}` | {written} |" in text or f"`{key}` `{written}`" in text, key


# Recipes: labels, and docs/recipes.md.


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a key holds: alone, or None, or in a list, or by name."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_in, get_args(annotation))), None)


def recipe_keys(model: type[Section] = Recipe, path: str = "") -> list[tuple[str, Any]]:
    """(key, default) of every key; ... for one that must be written. `data.eval` has the keys of `data.train`."""
    keys = []
    for name, info in model.model_fields.items():
        inner, key = section_in(info.annotation), f"{path}{name}"
        if inner is None or path == "data." or info.default is None:
            default = "derived" if info.default_factory else info.default
            keys.append((key, ... if info.is_required() else default))
        if inner is not None and key != "data.eval":
            if issubclass(inner, NamedSection):
                keys.append((f"{key}.name", inner.default))
                of_kinds = [pair for kind in inner.kinds() for pair in recipe_keys(kind, f"{key}.")]
                keys += [pair for pair in of_kinds if pair[0] != f"{key}.name"]
            else:
                keys += recipe_keys(inner, f"{key}.")
    return keys


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
        elif isinstance(default, float):  # an objective's may be another's with another default
            defaults = {value for other, value in keys if other == key}
            assert set(map(float, re.findall(r"\d[\d.e-]*", cell))) == defaults, key
        else:
            assert yaml.safe_load(cell) == (list(default) if isinstance(default, tuple) else default), key


def kinds_of_rows_without_a_shape(table: str) -> list[str]:
    """The kinds whose own keys stand in no row of a table."""
    rows = [{*re.findall(r"`(\w+)`", line)} for line in table.splitlines()]
    return [kind.name for kind in kinds().values() if not any({*kind.keys} <= row for row in rows)]


def test_every_kind_of_rows_is_a_shape_of_the_page_of_recipes():
    table = text_of("docs/recipes.md").partition("| shape | columns | read as |")[2].partition("\n\n")[0]
    assert len(kinds()) > 10 and kinds_of_rows_without_a_shape(table) == []
    lines = [line for line in table.splitlines() if "`completions`" not in line]
    assert set(kinds_of_rows_without_a_shape("\n".join(lines))) == {"chat_group", "group", "sampled_group", "sampled"}


def test_a_key_that_only_some_kinds_have_is_explained_for_each():
    """`objective.label_smoothing` is another thing under dpo than under sft."""
    rows = dict(re.findall(r"(?m)^\| `([\w.]+)` \| \S[^|]* \| (\S.*) \|$", text_of("docs/recipes.md")))
    pairs = []
    for section, info in Recipe.model_fields.items():
        family: Any = section_in(info.annotation)
        if family is not None and issubclass(family, NamedSection):
            for kind in family.kinds():
                (name,) = get_args(kind.model_fields["name"].annotation)
                pairs += [(name, f"{section}.{key}") for key in kind.model_fields.keys() - family.model_fields.keys()]
    everywhere = {
        ("sft", "objective.label_smoothing"),
        ("dpo", "objective.label_smoothing"),
        ("wsd", "schedule.decay_steps"),
    }
    assert len(pairs) > 40 and everywhere <= {*pairs}
    assert [pair for pair in sorted(pairs) if not re.search(rf"\b{pair[0]}\b", rows[pair[1]])] == []


def test_every_piece_of_a_recipe_in_the_pages_is_a_good_one():
    count = 0
    for page in PAGES:
        for block in fences(text_of(page), "yaml"):
            for name, values in yaml.safe_load(block).items():
                TypeAdapter(Recipe.model_fields[name].annotation).validate_python(values)
                count += 1
    assert count >= 6


def test_a_whole_recipe_in_the_readme_lacks_nothing():
    (whole,) = (values for block in fences(text_of("README.md"), "yaml") if "run" in (values := yaml.safe_load(block)))
    assert [name for name, field in Recipe.model_fields.items() if field.is_required() and name not in whole] == []


def keys_of_dicts(source: str, where: str) -> set[str]:
    """The text keys of the dicts in `source` that stand in calls of `where`, or are assigned to it."""
    keys = set()
    for node in ast.walk(ast.parse(text_of(source))):
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func) == where
        if is_call or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == where):
            inner = [inside for inside in ast.walk(node) if isinstance(inside, ast.Dict)]
            keys |= {key.value for table in inner for key in table.keys if isinstance(key, ast.Constant)}
    return keys


def reported(source: str) -> set[str]:
    """The names that the calls of `OfTargets` in `source` give to what is reported beside a loss."""
    calls = [node for node in ast.walk(ast.parse(text_of(source))) if isinstance(node, ast.Call)]
    return {name for call in calls if ast.unparse(call.func) == "OfTargets" for name in ast.literal_eval(call.args[1])}


def test_every_key_of_the_metrics_is_explained():
    objectives = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "cookbook/config/objectives").glob("*.py"))
    means = {"loss"}.union(*(keys_of_dicts(path, "metrics") for path in objectives))
    means = means.union(*(reported(path) for path in objectives))
    assert len(means) >= 5 and {"nll", "divergence"} <= means
    keys = keys_of_dicts("train.py", "services.log.write") | keys_of_dicts("train.py", "label") | means
    keys |= {"mfu", "price"}
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
