"""Protects the layers: imports point downwards only, the words need no torch, and no setting is read by nobody.

python -m pytest -q tests/test_layers.py
"""

import ast
import re
import subprocess
import sys

import pytest
from conftest import ROOT, clean_environment

import cookbook
from cookbook.config.recipe import Recipe
from cookbook.config.registry import Named, Section

HEAVY = ("torch", "transformers", "accelerate", "deepspeed", "numpy", "datasets", "tokenizers")


LAYERS = re.findall(r"^(\w+)  +", str(cookbook.__doc__), re.MULTILINE)
"""Names of the folders, the highest first, as the picture in cookbook/__init__.py has them."""


def imports(path):
    """Layer and part of cookbook that a file imports, at its top or inside its functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        yield from (tuple(module.split(".")[1:3]) for module in modules if module.startswith("cookbook."))


SOURCES = [path for path in sorted((ROOT / "cookbook").rglob("*.py")) if path.parent != ROOT / "cookbook"]


def place_of(path):
    """Layer and part that a file belongs to."""
    layer, part = path.relative_to(ROOT / "cookbook").parts[:2]
    return layer, part.removesuffix(".py")


WITHOUT_TORCH = sorted({".".join(place_of(path)) for path in SOURCES if LAYERS.index(place_of(path)[0]) > 1})


def test_every_folder_is_a_layer():
    folders = {path.name for path in (ROOT / "cookbook").iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == set(LAYERS) and len(LAYERS) == 5


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path):
    layer, part = place_of(path)
    for other_layer, other in set(imports(path)) - {(layer, part)}:
        assert LAYERS.index(other_layer) >= LAYERS.index(layer), f"{path} imports {other}, which stands above it"
        assert (layer, other_layer) != ("training", "training"), f"{path} imports {other}, a part like itself"


def test_there_are_imports_to_check():
    assert sum(len(set(imports(path))) for path in SOURCES) > 15


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_the_lower_layers_load_without_the_machinery(module):
    """Bad input has to be reported in a moment, and importing torch takes seconds."""
    code = (
        f"import sys, time; start = time.perf_counter(); import cookbook.{module.removesuffix('.__init__')};"
        f"print(time.perf_counter() - start, *[name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean_environment(), capture_output=True, text=True, check=True
    )
    seconds, *heavy = done.stdout.split()
    print(f"cookbook.{module}: {float(seconds):.2f} s")
    assert heavy == []


def questions_for_the_kind(text):
    """Comparisons and matches with a strategy's kind."""
    for node in ast.walk(ast.parse(text)):
        asked = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [getattr(node, "subject", None)]
        yield from (one for one in asked if isinstance(one, ast.Attribute) and one.attr == "kind")


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
                for kind in candidate.kinds() if issubclass(candidate, Named) else [candidate]:
                    yield from fields(kind, (*path, name))


def attributes_read(paths):
    """Names that stand after a dot, methods of the models themselves left out."""
    names = set()
    for path in paths:
        tree = ast.parse(path.read_text())
        validators = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and any("validator" in ast.unparse(item) for item in node.decorator_list)
            for inner in ast.walk(node)
        }
        names |= {
            node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in validators
        }
    return names


def test_every_setting_is_read_somewhere():
    found = list(fields())
    assert len(found) > 40
    read = attributes_read([*SOURCES, ROOT / "train.py"])
    whole = {("model", "from_scratch")}  # its sizes go to the model's configuration as one dict
    unread = [".".join(path) for path in found if path[-1] not in read and path[:-1] not in whole]
    assert unread == []


def test_the_sizes_of_a_new_model_are_handed_over_as_a_whole():
    calls = [
        node
        for node in ast.walk(ast.parse((ROOT / "cookbook/training/models/__init__.py").read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "model_dump"
    ]
    assert calls, "models.py no longer dumps from_scratch: check that each of its sizes is read"


def test_a_setting_that_nobody_reads_would_be_found(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("def f(recipe):\n    return recipe.seed\n")
    assert attributes_read([path]) == {"seed"}
