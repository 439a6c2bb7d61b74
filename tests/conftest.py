"""A copy of the files that a recipe needs, and ways to run the front door in it."""

import compileall
import functools
import gc
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

# Two workers and their runs share the cores: threads that wait for one another spin, and a run of one process, which
# accelerate gives all cores, took three times its CPU time. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import typer.main
from curves import Lab

from cookbook.system import versions
from cookbook.system.imports import quiet_libraries
from tests.gpu_runs import REAL, GpuLab
from tests.needs import lacked_types
from tests.turns import ALONE, LONG

# It reads the signatures of all commands at each call of `main`, of which the tests make hundreds in one process.
typer.main.get_command = functools.cache(typer.main.get_command)
quiet_libraries()  # as a run and a command do; before transformers is imported
# A shell without job control starts background commands with these ignored, and every child would inherit that.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

ROOT = Path(__file__).parents[1]
RECIPE = "recipes/small.yaml"
RECIPE_TEXT = """\
# A recipe for the tests.
strategy: accelerate_configs/ddp.yaml
mixed_precision: 'no'
seed: 42
model:
  from_scratch:
    vocab_size: 2048
    hidden_size: 128
    intermediate_size: 352
    num_hidden_layers: 4
    num_attention_heads: 4
    num_key_value_heads: 2
data:
  train: python-stdlib
  eval: {path: python-stdlib, split: test}
  max_length: 256
objective:
  train_on: assistant
batch:
  global_batch_size: 16
  micro_batch_size: 8
optim:
  learning_rate: 3e-3
  weight_decay: 0.1
schedule:
  name: cosine
  warmup_steps: 10
run:
  max_steps: 30
  output_dir: outputs/small
  check_export: false
"""

LAUNCHER_VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "CUDA_VISIBLE_DEVICES")
LAUNCHER_VARIABLES += ("DS_ACCELERATOR",)  # which tests in this process may have set
TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


for name in ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"):
    os.environ.pop(name, None)  # of `make test`, which a make that a test starts would take for its own


def clean_environment(**extra: str) -> dict[str, str]:
    """This environment without what a launcher or a user may have set for some other run."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_VARIABLES) and name not in TORCHRUN_VARIABLES
    }
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "", **extra}


DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds of each test that takes more than `LONG`, as `--write-durations` measured them."""
PARTS, THOROUGH_PARTS = 48, 192
"""With TURN=2 `make test-long` runs the third of so many parts of the slow and of the thorough tests: they are `due`.
With no TURN all slow tests are due and no thorough one.
"""
BUILDS = "zero3_nvme"
"""DeepSpeed's builds for these, minutes on two cores, are made for all of them in one part."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help="measure tests/durations.json, the order of tests")


class Durations:
    """Seconds of each test, set-up included; registered in the process that hears of all tests."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        durations = {name: seconds for name, seconds in known.items() if name not in self.seconds}
        durations |= {name: round(seconds, 2) for name, seconds in self.seconds.items() if seconds > LONG}
        DURATIONS.write_text(json.dumps(dict(sorted(durations.items())), indent=0) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ and not sys.dont_write_bytecode:
        for name in ("cookbook", "simulated_gpus", "benchmarks"):  # once, where each worker would compile all of it
            compileall.compile_dir(ROOT / name, quiet=1, workers=0)
    if config.getoption("--write-durations") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Durations())


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Marks what takes long; of what -m and -k leave, puts long tests first in each part of the list that xdist gives
    one of its workers: at the end only moments are left to steal.
    """
    known = json.loads(DURATIONS.read_text())
    for item in items:
        if REAL and item.get_closest_marker("simulated"):
            item.add_marker(pytest.mark.skip(reason="real GPUs do not count what this reads"))
        is_kept = item.get_closest_marker("core") or item.nodeid in ALONE
        if known.get(item.nodeid, 0.0) > LONG and not is_kept:
            item.add_marker("slow")
        if is_due(item):
            item.add_marker("due")
        if version := lacked_types().get(model_type_of(item)):
            item.add_marker(pytest.mark.skip(reason=f"its model type is measured with transformers {version}"))
    yield
    items.sort(key=lambda item: known.get(item.nodeid, 0.0), reverse=True)
    num_long = sum(item.nodeid in known for item in items)
    long, short = items[:num_long], items[num_long:]  # short ones stay together by module, for their fixtures
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    worker_of = deal_files(long, known, workers)
    ends = [len(items) * (i + 1) // workers for i in range(workers)]
    items.clear()
    for i, end in enumerate(ends):
        items += [item for item in long if worker_of[item.path] == i]
        count = max(0, end - len(items)) if i + 1 < workers else len(short)
        items += short[:count]
        del short[:count]


def deal_files(items: list[pytest.Item], seconds: dict[str, float], num_workers: int) -> dict[Path, int]:
    """The worker for all long tests of a file, which share what the first of them has made: parents of runs, fixtures,
    syntax trees.

    Args:
        seconds: of each test, by its node id.
    """
    of_file: Counter[Path] = Counter()
    for item in items:
        of_file[item.path] += seconds[item.nodeid]
    loads, worker_of = [0.0] * num_workers, {}
    for path, taken in of_file.most_common():
        worker_of[path] = loads.index(min(loads))
        loads[worker_of[path]] += taken
    return worker_of


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collects no garbage during imports, and leaves the million objects that they made out of later collections."""
    gc.disable()
    try:
        if "PYTEST_XDIST_WORKER" in os.environ:
            import_own_part_first(session)
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def import_own_part_first(session: pytest.Session) -> None:
    """Imports all test files, each worker from another one on: pytest takes as long to rewrite their asserts as for all
    else of a collection, and finds written what another worker had before.
    """
    if sys.dont_write_bytecode or session.config.args != session.config.getini("testpaths"):
        return
    names = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py"))
    own = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    first = len(names) * own // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for name in names[first:] + names[:first]:
        importlib.import_module(name)


def model_type_of(item: pytest.Item) -> str:
    """The model type that is a test's parameter; empty if it has none."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return str(parameters.get("model_type", ""))


def is_due(item: pytest.Item) -> bool:
    """True if `make test-long` runs a test."""
    thorough = item.get_closest_marker("thorough")
    if thorough is None and item.get_closest_marker("slow") is None:
        return False
    turn, options = os.environ.get("TURN"), thorough.kwargs if thorough else {}
    if turn is None or "needs" in options:
        return thorough is None
    if "turn" in options:
        part, parts = options["turn"]
        return int(turn) % parts == part
    parts = THOROUGH_PARTS if thorough else PARTS
    name = _dealt_as(item.nodeid)
    return _dealt(parts).get(name, crc32(name.encode()) % parts) == int(turn) % parts


def _dealt_as(nodeid: str) -> str:
    return BUILDS if BUILDS in nodeid else nodeid


@functools.cache
def _dealt(parts: int) -> dict[str, int]:
    """The part of each test that takes long: dealt as cards are, the longest first and to and fro, so that no turn has
    much more to do than another.
    """
    seconds: Counter[str] = Counter()
    for nodeid, taken in json.loads(DURATIONS.read_text()).items():
        if taken > LONG:
            seconds[_dealt_as(nodeid)] += taken
    to_and_fro = itertools.cycle([*range(parts), *reversed(range(parts))])
    names = sorted(seconds, key=lambda name: (-seconds[name], name))
    return dict(zip(names, to_and_fro, strict=False))


@pytest.fixture(scope="session", autouse=True)
def installed_versions_are_tested() -> Iterator[None]:
    """Takes the note on untested versions out of what commands say in the processes of the tests.

    What they say else is the same under the newest libraries (tests/newest.py); tests/test_versions.py has the note.
    """
    pinned, here = versions.tested_versions(), {name: versions.installed_version(name) for name in versions.LIBRARIES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "tested_versions", lambda: [*pinned, here])
        yield


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of this session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def lab(shared_folder: Path) -> Iterator[Lab]:
    """Where a run with the same arguments happens once, whatever test of whatever worker asks for it."""
    lab = Lab(Path(os.environ.get("CURVES", shared_folder / "curves")).resolve())
    yield lab
    lab.close()


@pytest.fixture(scope="session")
def gpu_lab(shared_folder: Path, lab: Lab) -> Iterator[GpuLab]:
    """As `lab`, on simulated GPUs."""
    gpu_lab = GpuLab(Path(os.environ.get("GPU_RUNS", shared_folder / "gpus")).resolve(), lab.parent)
    yield gpu_lab
    gpu_lab.close()


@dataclass
class Book:
    """A copy of the repository's words: edit its files, then load or run them."""

    root: Path

    def edit(self, name: str, *replacements: tuple[str, str]) -> None:
        """Replaces texts in a file; each must be there."""
        path = self.own(name)
        text = path.read_text(encoding="utf-8")
        for old, new in replacements:
            assert old in text, f"{name} has no {old!r}"
            text = text.replace(old, new, 1)
        path.write_text(text, encoding="utf-8")

    def write(self, name: str, content: str | bytes) -> None:
        path = self.own(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def own(self, name: str) -> Path:
        """The path of a file, whose folder all books share until one of them changes it."""
        path = self.root / name
        for folder in path.relative_to(self.root).parents:
            if (self.root / folder).is_symlink():
                shared = (self.root / folder).readlink()
                (self.root / folder).unlink()
                shutil.copytree(shared, self.root / folder)
        return path

    def names(self) -> set[str]:
        """Every file and folder here."""
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if "__pycache__" not in path.parts}

    def train(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess:
        """`python train.py ...` in the copy."""
        command = [sys.executable, "train.py", *arguments]
        return subprocess.run(
            command, cwd=self.root, env=clean_environment(**extra), capture_output=True, text=True, timeout=120
        )


def times_of(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture(scope="session")
def shared_book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of recipes and strategies that no test may change."""
    folder = tmp_path_factory.mktemp("shared_book")
    for name in ("recipes", "accelerate_configs", "ds_configs"):
        shutil.copytree(ROOT / name, folder / name)
    for path in (folder / "accelerate_configs").iterdir():
        path.write_text(re.sub(r"(?m)^#.*\n", "", path.read_text()))
    before = times_of(folder)
    yield folder
    changed = dict(times_of(folder).items() - before.items())
    assert not changed, f"write it with Book.edit or Book.write: {changed}"


@pytest.fixture
def book(shared_book, tmp_path, monkeypatch) -> Book:
    """A fresh copy of strategies, of the recipes without a folder of their own, and RECIPE; the working directory.

    Strategies are without their comments: then a line number in a test does not depend on them.
    """
    for name in ("accelerate_configs", "ds_configs"):
        (tmp_path / name).symlink_to(shared_book / name)
    (tmp_path / "recipes").mkdir()
    for path in (shared_book / "recipes").iterdir():
        if not path.is_dir():
            shutil.copy(path, tmp_path / "recipes" / path.name)
    (tmp_path / RECIPE).write_text(RECIPE_TEXT)
    for name in ("cookbook", "simulated_gpus", "train.py", "requirements.txt", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(LAUNCHER_VARIABLES) or name in TORCHRUN_VARIABLES:
            monkeypatch.delenv(name)
    return Book(tmp_path)


@pytest.fixture
def library(book: Book, shared_book: Path) -> Book:
    """A book with all recipes."""
    for path in (shared_book / "recipes").iterdir():
        if path.is_dir():
            (book.root / "recipes" / path.name).symlink_to(path)
    return book
