"""Protects the rooms of the package: who may import whom, what loads without torch, and that each setting is read.

python -m pytest -q tests/test_layers.py
"""

import ast
import functools
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment

import cookbook
from cookbook.commands.cli import app
from cookbook.config.recipe import Recipe
from cookbook.system.registry import NamedSection, Section

pytestmark = pytest.mark.core  # what holds the rooms apart, however long it takes

PACKAGE = ROOT / "cookbook"
HEAVY = ("torch", "transformers", "accelerate", "deepspeed", "numpy", "datasets", "tokenizers")
ROOMS = re.findall(r"^(\w+)  +", str(cookbook.__doc__), re.MULTILINE)
"""Names of the folders, the highest first, as the picture in cookbook/__init__.py has them."""
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE]
DOOR = "cookbook.run.forecasts"
WITH_TORCH = {
    "cookbook.config.draws": "the hash that draws, on the host and on the device",
    "cookbook.config.objectives.forward": "the passes over a model that objectives share",
    "cookbook.config.optim.eight_bits": "AdamW's states in 8 bits",
    "cookbook.config.optim.groups": "parameter groups, and the class of each optimizer",
    "cookbook.config.optim.orthogonal": "Muon's iteration",
}
"""Files of the rooms below training that load torch."""


def name_of(path: Path) -> str:
    """The module in a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in [*SOURCES, ROOT / "train.py"]}


def room_of(module: str) -> str:
    return module.split(".")[1]


def statements_in(node: ast.AST):
    """The statements directly below another, or below a handler or a case of it. To visit expressions takes seconds."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        yield from getattr(node, name, ())


def imports(path: Path, *, typing: bool = True):
    """(module of this repository, whether it is imported inside a function or for types only), one by one."""

    def walk(node, is_lazy):
        for child in statements_in(node):
            is_typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            if is_typing and not typing:
                continue
            if isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                for alias in child.names:
                    whole = f"{child.module}.{alias.name}"
                    yield (whole if whole in MODULES else child.module), is_lazy
            elif isinstance(child, ast.Import):
                yield from ((alias.name, is_lazy) for alias in child.names)
            yield from walk(child, is_lazy or is_typing or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    return {node for node in walk(ast.parse(path.read_text()), False) if node[0] in MODULES}


@functools.cache
def graph_of_imports() -> dict[str, set[str]]:
    return {module: {other for other, _ in imports(path)} for module, path in MODULES.items()}


def reached(start: str, graph: dict[str, set[str]] | None = None) -> set[str]:
    """All modules that one imports, at any time, at any depth."""
    graph = graph_of_imports() if graph is None else graph
    modules, ahead = set(), [start]
    while ahead:
        module = ahead.pop()
        if module not in modules:
            modules.add(module)
            ahead += graph[module]
    return modules


def test_every_folder_is_a_room():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == set(ROOMS) and len(ROOMS) == 9
    assert all((path.parent / "__init__.py").is_file() for path in SOURCES), "each folder says what it is"


def upward(graph) -> list[tuple[str, str]]:
    imports = []
    for module, others in graph.items():
        for other in others - {module}:
            if module == "train" or not other.startswith("cookbook."):
                continue
            mine, its = room_of(module), room_of(other)
            is_sibling = mine == its == "training" and module.split(".")[2] != other.split(".")[2]
            if ROOMS.index(its) < ROOMS.index(mine) or is_sibling:
                imports.append((module, other))
    return imports


def circles(graph) -> list[set[str]]:
    """Groups of modules that reach one another."""
    closed = {module: reached(module, graph) for module in graph}
    return [
        group for module in graph if len(group := {other for other in closed[module] if module in closed[other]}) > 1
    ]


def test_imports_point_downwards():
    assert sum(map(len, graph_of_imports().values())) > 500
    assert upward(graph_of_imports()) == []


def test_no_modules_import_one_another():
    """For types neither."""
    assert circles(graph_of_imports()) == []


def test_an_import_upward_or_in_a_circle_would_be_found():
    wrong = graph_of_imports() | {"cookbook.system.files": {"cookbook.config.recipe"}}
    assert ("cookbook.system.files", "cookbook.config.recipe") in upward(wrong)
    assert {"cookbook.system.files", "cookbook.config.recipe"} <= circles(wrong)[0]


def test_a_run_imports_no_command_and_the_forecast_through_one_door():
    """At any time: what `train.py` reaches, also from inside its functions, as long as it passes no door."""
    graph = graph_of_imports() | {DOOR: {other for other in graph_of_imports()[DOOR] if room_of(other) != "forecast"}}
    modules = reached("train", graph)
    assert len(modules) > 100
    assert {module for module in modules if module != "train" and room_of(module) in ("commands", "forecast")} == set()
    through = [is_lazy for other, is_lazy in imports(MODULES[DOOR]) if room_of(other) == "forecast"]
    assert len(through) > 3 and all(through), "the door imports the forecast only when it is asked"


def test_the_cookbook_imports_simulated_gpus_and_never_the_other_way_round():
    def imported(paths):
        nodes: list[ast.AST] = [ast.parse(path.read_text()) for path in paths]
        for node in nodes:  # which grows meanwhile
            nodes += statements_in(node)
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        return {name.partition(".")[0] for name in names}

    beside = [path for path in (ROOT / "simulated_gpus").rglob("*.py") if "build" not in path.parts]
    users = [path for path in SOURCES if "simulated_gpus" in path.read_text()]
    assert "simulated_gpus" in imported(users) and len(beside) > 4
    assert not {"cookbook", "train", "benchmarks", "conftest"} & imported(beside)


def test_commands_are_verbs():
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands}
    parts = {path.stem for path in (PACKAGE / "commands").iterdir()} - {"__pycache__", "__init__"}
    assert parts - {"cli", "shared"} == {verb.replace("-", "_") for verb in verbs}


def test_an_init_says_what_its_folder_holds_and_does_little_more():
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCES if path.name == "__init__.py"}
    assert len(lengths) > 20 and {path: length for path, length in lengths.items() if length > 50} == {}


def test_the_file_that_is_read_first_is_short():
    assert len((ROOT / "train.py").read_text().splitlines()) <= 500


def test_no_two_modules_have_one_name():
    """Whoever opens a file by its name must not find another one's job."""
    names = Counter(path.stem for path in SOURCES if path.stem != "__init__")
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_what_stands_below_training_loads_without_torch_file_by_file():
    """Bad input has to be reported in a moment, and importing torch takes seconds."""
    below = {
        module for module in MODULES if module != "train" and ROOMS.index(room_of(module)) > ROOMS.index("training")
    }
    costs = {module for module in MODULES if module.startswith("cookbook.forecast.costs")}
    early = {"cookbook.run.shortage", "cookbook.run.next_start", DOOR, "cookbook.commands.cli"}
    light = sorted((below | costs | early) - WITH_TORCH.keys())
    assert len(light) > 60
    code = (
        "import importlib, sys\n"
        f"for name in {light}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [one for one in {HEAVY} if one in sys.modules]\n"
        "    if heavy:\n"
        "        sys.exit(f'{name} loads {heavy}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean_environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    for module in WITH_TORCH:
        tops = {
            node.names[0].name for node in ast.parse(MODULES[module].read_text()).body if isinstance(node, ast.Import)
        }
        assert "torch" in tops, f"{module} no longer loads torch: take it out of the list"


STATE = """
import gc, importlib, json, logging, os, signal, sys, torch, warnings

def state():
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    return {
        "hidden modules": {name for name, module in sys.modules.items() if module is None},
        "torch.compile": torch.compile,
        "loggers": [(each.name, each.level, each.handlers) for each in loggers if each.level or each.handlers],
        "environment": dict(os.environ),
        "path": list(sys.path),
        "finders": list(sys.meta_path),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "warnings": list(warnings.filters),
        "garbage collector": (gc.isenabled(), gc.get_freeze_count()),
    }

before = state()
"""
CHANGED = "\nafter = state()\nprint(json.dumps([what for what in before if before[what] != after[what]]))\n"


def changed_by(*codes: str) -> list[list[str]]:
    """State that code has changed in a fresh process that has imported torch before; after each of several."""
    done = subprocess.run(
        [sys.executable, "-c", STATE + "".join(code + CHANGED for code in codes)],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()[-len(codes) :]]


def test_an_import_of_the_cookbook_changes_nothing_in_a_process():
    modules = ["cookbook", "cookbook.config.recipe", "cookbook.commands.cli", "train", "simulated_gpus"]
    assert changed_by("".join(f"import {name}\n" for name in modules)) == [[]]


def test_what_a_run_changes_in_its_process_would_be_found():
    """At the start of a run and of a command, where nobody else's process is meant."""
    start = "from cookbook.system import imports, signals\nimports.quiet_libraries()\nsignals.install()\n"
    others = "imports.quiet_deepspeed()\ntorch.compile = print\nwith imports.imports():\n    pass\n"
    by_start, by_all = changed_by(start, others)
    assert by_start == ["hidden modules", "loggers", "finders", "signals", "warnings"]
    assert set(by_all) == {*by_start, "torch.compile", "environment", "garbage collector"}


def dotted_names(text: str) -> set[str]:
    """Names of modules as the tests, settings and pages write them in strings."""
    return set(re.findall(r"(?<![\w./-])cookbook(?:\.[a-z_]\w*)+", text))


def exists(name: str) -> bool:
    """True if a name is a module of the package, or stands for something in one."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        place = ROOT.joinpath(*parts[:length])
        if place.with_suffix(".py").is_file() or (place / "__init__.py").is_file():
            source = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
            return length == len(parts) or parts[length] in source.read_text()
        if place.is_dir() and length == len(parts):
            return True
    return False


def test_module_names_in_strings_exist():
    """`-m` lines, package data and warm parents, which no linter looks at."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [name for name in tracked if Path(name).suffix in (".py", ".toml", ".md", ".sh", ".ipynb", ".yml", "")]
    named = {name for file in files if (ROOT / file).is_file() for name in dotted_names((ROOT / file).read_text())}
    here = {
        "cookbook.shipped",
        "cookbook.__doc__",
        "cookbook.__file__",
        "cookbook.lock",
    }  # of a wheel, of every module (2), a file
    assert len(named) > 100
    assert {name for name in named if not exists(name)} - here <= {"cookbook.of.nobody"}
    assert not exists("cookbook.of.nobody") and exists("cookbook.config.recipe.Recipe")


def questions_for_the_kind(text):
    """Comparisons and matches with a strategy's kind."""
    for node in ast.walk(ast.parse(text)):
        asked = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [getattr(node, "subject", None)]
        yield from (node for node in asked if isinstance(node, ast.Attribute) and node.attr == "kind")


def test_the_engine_asks_for_no_kind_of_strategy():
    """A family is a class: what differs lies in its file, and one table leads to it."""
    for path in sorted((ROOT / "cookbook/training/engine").glob("*.py")):
        assert not list(questions_for_the_kind(path.read_text())), path
    code = 'if strategy.kind == "tp":\n    pass\nmatch strategy.kind:\n    case "zero":\n        pass\n'
    assert len(list(questions_for_the_kind(code))) == 2


def fields(model=Recipe, path=()):
    for name, info in model.model_fields.items():
        yield (*path, name)
        for candidate in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, Section):
                for kind in candidate.kinds() if issubclass(candidate, NamedSection) else [candidate]:
                    yield from fields(kind, (*path, name))


def attributes_read(paths):
    """Names that stand after a dot, methods of the models themselves left out."""
    return frozenset().union(*map(attributes_read_in, paths))


@functools.cache
def attributes_read_in(path):
    tree = ast.parse(path.read_text())
    validators = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("validator" in ast.unparse(item) for item in node.decorator_list)
        for inner in ast.walk(node)
    }
    return frozenset(
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in validators
    )


def test_every_setting_is_read_somewhere():
    paths = list(fields())
    assert len(paths) > 40
    read = attributes_read([*SOURCES, ROOT / "train.py"])
    whole = {("model", "from_scratch")}  # its sizes go to the model's configuration as one dict
    unread = [".".join(path) for path in paths if path[-1] not in read and path[:-1] not in whole]
    assert unread == []


def unread_by_kind(kinds):
    """(kind, key) of keys that not all kinds have, and that neither the kind's own classes nor another room reads."""
    base = next(parent for parent in kinds[0].__mro__ if NamedSection in parent.__bases__)
    folder = PACKAGE / "config" / base.__module__.split(".")[2]
    outside = attributes_read([path for path in SOURCES if not path.with_suffix("").is_relative_to(folder)])
    for kind in kinds:
        classes = {parent.__name__ for parent in kind.__mro__ if issubclass(parent, base)}
        modules = {sys.modules[parent.__module__].__file__ for parent in kind.__mro__ if issubclass(parent, base)}
        trees = [ast.parse(Path(str(file)).read_text()) for file in modules]
        own = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes]
        read = {node.attr for tree in own for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for key in kind.model_fields.keys() - base.model_fields.keys() - read - outside:
            yield kind.__name__, key


def test_every_key_of_a_kind_is_read_for_that_kind():
    """By its own classes: dpo read `label_smoothing` while sft had no use for it."""
    families = [info.annotation for info in Recipe.model_fields.values()]
    families = [candidate for family in families for candidate in (family, *getattr(family, "__args__", ()))]
    families = [family for family in families if isinstance(family, type) and issubclass(family, NamedSection)]
    assert len(families) == 3
    assert [pair for family in families for pair in unread_by_kind(family.kinds())] == []

    class Idle(next(kind for kind in families[0].kinds() if kind.__name__ == "CPT")):
        gamma: float = 0.0

    assert list(unread_by_kind([Idle])) == [("Idle", "gamma")]


def test_the_sizes_of_a_new_model_are_handed_over_as_a_whole():
    calls = [
        node
        for node in ast.walk(ast.parse((ROOT / "cookbook/training/models/model_source.py").read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "model_dump"
    ]
    assert calls, "model_source.py no longer dumps from_scratch: check that each of its sizes is read"


def test_a_setting_that_nobody_reads_would_be_found(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("def f(recipe):\n    return recipe.seed\n")
    assert attributes_read([path]) == {"seed"}
