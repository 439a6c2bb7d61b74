"""Protects the time to the first step and that of a step: a run imports what it uses, and its steps hide no waiting.

python -m pytest -q tests/test_start.py
"""

import ast
import json
import subprocess
import sys
from collections import Counter

import pytest
from conftest import ROOT, clean_environment

from tests.curves import RECIPE
from tests.small_data import chat

LOADED = {"files": 159, "lines of code": 19_324}
"""Most that a run in one process may load of the package before its first step. Lower it when it falls."""
BEFORE_THE_FIRST_STEP = """
import sys
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
import train
loop = train.loop

def first(run, services):
    names = sorted(name for name in sys.modules if name.startswith("cookbook."))
    print("BEFORE", sum(name == sys.argv[1] for name in opened), *names)
    print("FOREIGN", sum(name.endswith("/foreign.yaml") for name in opened))
    return loop(run, services)

train.loop = first
sys.argv[0] = "train.py"
assert train.main() == 0
"""
STAYS = 11
"""Files that a recipe's name passes through before torch is imported, each return counted."""
WALK = """
import sys
from pathlib import Path
from cookbook.start import run_plan

NAME, HERE = "recipes/quickstart.yaml", str(Path.cwd())
carried, walk = [], []

def is_name(value):
    return str(value) == NAME if isinstance(value, str | Path) else getattr(value, "name", None) == NAME

def visit(frame, event, _):
    code = frame.f_code
    if not code.co_filename.startswith((f"{HERE}/cookbook/", f"{HERE}/train.py")) or code.co_name.startswith("<"):
        return
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if event == "call" and any(is_name(frame.f_locals.get(one)) for one in given):
        carried.append(frame)
    elif event == "return" and carried and carried[-1] is frame:
        carried.pop()
    else:
        return
    if carried and walk[-1:] != [carried[-1].f_code.co_filename]:
        walk.append(carried[-1].f_code.co_filename)

sys.setprofile(visit)
run_plan.check(NAME, [])
sys.setprofile(None)
print("WALK", *(Path(one).relative_to(HERE) for one in walk))
"""
HEAVY = ("deepspeed", "mlflow", "pandas", "peft", "datasets", "torch._inductor.compile_fx", "tensorboard", "wandb")
"""Each takes 0.1 to 3 s."""
MUON = "from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam"


def heavy_after(code, *arguments):
    """Modules of HEAVY that a fresh process has imported after `code`."""
    return lines_after(code, *arguments)["HEAVY"]


def lines_after(code, *arguments):
    """The words behind BEFORE and HEAVY that a fresh process prints."""
    code += f"\nimport sys; print('HEAVY', *[name for name in {HEAVY} if sys.modules.get(name)])"
    environment = clean_environment() | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    marks = ("HEAVY", "BEFORE", "FOREIGN", "WALK")
    return {
        word: words for word, *words in map(str.split, filter(str.strip, done.stdout.splitlines())) if word in marks
    }


def code_lines(path):
    """Lines that hold code: neither blank, nor comments, nor docstrings."""
    tree = ast.parse(path.read_text())
    texts = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    lines = enumerate(path.read_text().splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and i not in texts for i, line in lines)


def test_a_run_in_one_process_imports_nothing_that_it_does_not_use(tmp_path):
    recipe, rows = tmp_path / "recipe.yaml", tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(chat("Count.", f"one two three {i}")) + "\n" for i in range(32)))
    recipe.write_text(RECIPE.replace("DATA", str(rows)).replace("OUTPUT", str(tmp_path / "out")))
    settings = ("--set", "run.max_steps=1", "--set", "schedule.warmup_steps=0")
    lines = lines_after(BEFORE_THE_FIRST_STEP, str(recipe), *settings)
    assert lines["HEAVY"] == []
    assert (tmp_path / "out" / "export" / "model.safetensors").is_file()
    num_reads, *modules = lines["BEFORE"]
    assert num_reads == "1", "a recipe is read once"
    assert lines["FOREIGN"] == ["0"], "tables of other projects' keys are for keys that are not ours"
    rooms = Counter(name.split(".")[1] for name in modules)
    assert not {"commands", "forecast"} & rooms.keys() and rooms["training"] > 30
    paths = {ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in modules}
    paths = {path if path.is_file() else path.with_suffix("") / "__init__.py" for path in paths}
    loaded = {"files": len(paths), "lines of code": sum(map(code_lines, paths))}
    print(loaded)
    for what, number in loaded.items():
        assert number <= LOADED[what], f"{what}: {number}, and {LOADED[what]} are on record"


def test_a_recipe_goes_through_few_files_on_its_way_into_a_run():
    walk = lines_after(WALK)["WALK"]
    print(len(walk), *walk)
    assert {"cookbook/system/files.py", "cookbook/config/recipe.py", "cookbook/start/run_plan.py"} <= set(walk)
    assert len(walk) <= STAYS


CHECKED = """
import sys
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
from cookbook.commands.cli import main
code = main(["check", "recipes/quickstart.yaml", *sys.argv[1:]])
print("FOREIGN", code, sum(name.endswith("/foreign.yaml") for name in opened))
"""


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ((), ["0", "0"]),
        (("--set", "seed=-1"), ["2", "0"]),
        (("--set", "num_train_epochs=3"), ["2", "1"]),
        (("--set", "optim.name=paged_adamw_8bit"), ["2", "1"]),
    ],
    ids=["a good recipe", "a wrong value", "a key of another project", "a value of another project"],
)
def test_the_keys_of_other_projects_are_read_when_one_is_met(words, answer):
    """The code of `check`, and how often it opens their tables."""
    assert lines_after(CHECKED, *words)["FOREIGN"] == answer


def test_lines_of_code_are_counted_without_words(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        '"""Words\nof two lines."""\n\n# A comment.\nx = 1  # one\n\n\ndef f():\n    """Words."""\n    return x\n'
    )
    assert code_lines(path) == 3


def test_deepspeed_comes_without_autotuner_and_compiler_and_its_own_muon_is_whole():
    code = f"""
import gc
from cookbook.training.engine.zero import import_deepspeed
import_deepspeed()
assert gc.isenabled() and gc.get_freeze_count() > 100_000
{MUON}
import inspect, torch
assert issubclass(MuonWithAuxAdam, torch.optim.Optimizer)
from deepspeed.runtime import compiler
assert compiler.compile() is torch.compile or callable(compiler.compile())
"""
    assert heavy_after(code) == ["deepspeed"]


def test_by_itself_it_imports_the_compiler():
    """Else the test above would pass for nothing."""
    assert "torch._inductor.compile_fx" in heavy_after(MUON)


def test_the_time_of_a_step_has_the_wait_for_its_batch(lab):
    """Six batches take three seconds at least, made one after the other and one step ahead."""
    settings = {"run.max_steps": "6", "batch.micro_batch_size": "16"}
    curve = lab.run("single", settings, sabotage="batches_take_half_a_second")
    seconds = [step["step_seconds"] for step in curve.steps]
    assert len(seconds) == 6 and sum(seconds) >= 3.0
