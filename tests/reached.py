"""Notes which blocks of code each test reaches, in whatever process. Imports nothing of the project, nor of pytest.

tests/drawn_mutants.py puts it into a copy of the tree, compiled, as a module of the package and a plugin of pytest.
"""

import json
import os

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
FOLDER = os.path.join(ROOT, ".reached")
"""Lines of each process: `T` and a test, `B` and a block that it reached. RESULTS has how the tests ended."""
RESULTS = "results.jsonl"

noted: set[str] = set()
writer: tuple[int, int, str] | None = None
"""This process's id, its file, and the test that was written last."""


def reach(block: str) -> None:
    """Is called at the beginning of each block."""
    if block not in noted:
        noted.add(block)
        write(block)


def write(block: str) -> None:
    """Writes at once: a process of a test may be killed at any time."""
    global writer
    test = os.environ.get("PYTEST_CURRENT_TEST", "")  # processes inherit it
    pid, file, last = writer or (0, 0, "")
    lines = f"B {block}\n"
    if pid != os.getpid() or last != test:
        if pid != os.getpid():
            os.makedirs(FOLDER, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            file = os.open(os.path.join(FOLDER, f"{os.getpid()}.txt"), flags, 0o666)
        lines = f"T {test}\n{lines}"
        writer = (os.getpid(), file, test)
    os.write(file, lines.encode())


os.register_at_fork(after_in_child=noted.clear)


def pytest_runtest_setup() -> None:
    noted.clear()


def pytest_runtest_call() -> None:
    noted.clear()


def pytest_runtest_logreport(report: object) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.makedirs(FOLDER, exist_ok=True)
        facts = {name: getattr(report, name) for name in ("nodeid", "when", "outcome", "duration")}
        with open(os.path.join(FOLDER, RESULTS), "a", encoding="utf-8") as file:
            file.write(json.dumps(facts | {"is_core": "core" in report.keywords}) + "\n")


def pytest_collection_modifyitems(items: list) -> None:
    """Leaves the first `REACHED_CASES` cases of each quick test, and none that takes more than `REACHED_SECONDS`."""
    with open(os.path.join(ROOT, "tests", "durations.json"), encoding="utf-8") as file:
        seconds = json.load(file)
    counts: dict[str, int] = {}
    chosen = []
    for item in items:
        function = item.nodeid.partition("[")[0]
        is_quick = not item.get_closest_marker("slow") and not item.get_closest_marker("thorough")
        is_short = seconds.get(item.nodeid, 0.0) <= float(os.environ["REACHED_SECONDS"])
        if is_quick and is_short and counts.get(function, 0) < int(os.environ["REACHED_CASES"]):
            counts[function] = counts.get(function, 0) + 1
            chosen.append(item)
    items[:] = chosen
