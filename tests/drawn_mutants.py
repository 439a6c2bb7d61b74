"""Changes the code by a rule, one place at a time, in a copy of the tree, and asks whether a quick test notices.

    python tests/drawn_mutants.py reach                      notes which quick tests reach which code
    python tests/drawn_mutants.py alone                      writes tests/alone.json, after `reach --cases 1000`
    python tests/drawn_mutants.py draw --seed 1 --count 30   draws places, and writes what became of each change
    python tests/drawn_mutants.py again --seed 1 FILE ...    tries what was not noticed with the tests of FILE
    python tests/drawn_mutants.py page                       prints the tables of CONTRIBUTING.md

tests/code_sites.py has the operators. Each is drawn equally often, its places uniformly over the code of the rooms. A
change is tried with the quick tests that reach its block, first those of the files that reach little else, until one
fails. A change that hangs, or with which pytest cannot start, is noticed. tests/equivalent_changes.toml has those that
no test can notice, each with the reason. A draw goes on where it ended.
"""

import argparse
import ast
import contextlib
import importlib
import importlib._bootstrap_external as import_files  # has the form of compiled files
import importlib.util
import itertools
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zlib import crc32

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
from tests.code_sites import AT_IMPORT, OPERATORS, Site, blocks_of, files_of, sites_of  # noqa: E402
from tests.mutants import LIBRARIES, OTHER_RUNS, copy_of_tree, part  # noqa: E402
from tests.turns import LONG  # noqa: E402

ROOMS = ("training", "config", "run", "rows", "forecast/costs")
REACHED = ROOT / ".cache" / "reached.json"
RECORD = ROOT / "benchmarks" / "results" / "drawn_mutants.json"
EQUIVALENT = Path(__file__).with_name("equivalent_changes.toml")
FIRST_FILES = 5
"""Test files that are tried before all others, which take long to import."""
RECORDER = "_reached"
"""tests/reached.py as a module of the package, in a copy alone: each process that runs the package finds it there."""
LONGEST_TEST = 120
MOST_SECONDS = 300
"""For the tests of one change; the record says how many of them have run."""


def compile_with_recorder(tree: Path) -> None:
    """Puts compiled files beside the sources of a copy, which note each block; no source changes but that of the parent
    of runs, which hands the name of the test on to them.
    """
    for name in files_of(tree, ["."]):
        source = (tree / name).read_bytes()
        code = ast.parse(source)
        blocks_of(code, recorder="_reach", file=name)
        if name.count("/") > 1:  # `import cookbook` itself imports nothing
            first = sum(1 for statement in code.body[:2] if is_before_imports(statement))
            code.body[first:first] = ast.parse(f"from cookbook.{RECORDER} import reach as _reach").body
            write_compiled(code, source, Path(importlib.util.cache_from_source(str(tree / name))))
    recorder = (tree / "tests" / "reached.py").read_bytes()
    write_compiled(ast.parse(recorder), recorder, tree / "cookbook" / f"{RECORDER}.pyc")
    path = tree / "tests" / "warm_parent.py"
    before, text = "        if self._lines is None:\n", path.read_text(encoding="utf-8")
    assert text.count(before) == 1, path
    test = '{"PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST", "")}'
    told = f'        for job in jobs:\n            job["variables"] = {test} | (job.get("variables") or {{}})\n'
    path.write_text(text.replace(before, told + before), encoding="utf-8")


def is_before_imports(statement: ast.stmt) -> bool:
    """A docstring, or an import from __future__."""
    return isinstance(statement, ast.Expr) or (
        isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
    )


def write_compiled(code: ast.Module, source: bytes, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    compiled = compile(ast.fix_missing_locations(code), str(path), "exec")
    path.write_bytes(import_files._code_to_hash_pyc(compiled, importlib.util.source_hash(source), False))


def reach(given: argparse.Namespace) -> None:
    """Runs quick tests once in a copy that notes what they reach."""
    with tempfile.TemporaryDirectory(prefix="reached-") as name:
        tree = Path(name)
        copy_of_tree(tree)
        compile_with_recorder(tree)
        options = ["-q", "-p", "no:cacheprovider", "-n", str(given.jobs), "--dist", "worksteal"]
        command = [str(tree / ".venv/bin/python"), "-m", "pytest", "-p", f"cookbook.{RECORDER}", *options]
        limits = {"REACHED_CASES": str(given.cases), "REACHED_SECONDS": str(given.longest)}
        subprocess.run(command, cwd=tree, env={**os.environ, **limits})  # tests of the tree's own files fail in a copy
        REACHED.parent.mkdir(exist_ok=True)
        REACHED.write_text(json.dumps(read_reached(tree)), encoding="utf-8")


def read_reached(tree: Path) -> dict[str, Any]:
    """Read which blocks a copy's tests reached.

    Returns:
        blocks: numbers of the tests by file and line of a block; tests: names and seconds of those that passed; core:
        names of those with that marker; files: the digest of each file, whose lines hold no longer when it has changed.
    """
    seconds: Counter[str] = Counter()
    failed, core = set(), set()
    for line in (tree / ".reached" / "results.jsonl").read_text(encoding="utf-8").splitlines():
        report = json.loads(line)
        seconds[report["nodeid"]] += report["duration"]
        if report["outcome"] != "passed":
            failed.add(report["nodeid"])
        if report["is_core"]:
            core.add(report["nodeid"])
    tests = {name: place for place, name in enumerate(sorted(set(seconds) - failed))}
    of_file = defaultdict(list)
    for name, place in tests.items():
        of_file[name.partition("::")[0]].append(place)
    blocks: defaultdict[str, set[int]] = defaultdict(set)
    for path in (tree / ".reached").glob("*.txt"):
        places: list[int] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            kind, _, text = line.partition(" ")
            if kind == "B":
                blocks[text].update(places)
                continue
            name, _, phase = text.rpartition(" ")
            places = [tests[name]] if name in tests else []
            if phase == "(setup)":  # what a fixture reaches belongs to all tests that have it
                places = of_file[name.partition("::")[0]]
    return {
        "blocks": {block: sorted(places) for block, places in blocks.items() if places},
        "tests": {name: round(seconds[name], 2) for name in tests},
        "core": sorted(core),
        "files": {name: digest_of((tree / name).read_text(encoding="utf-8")) for name in files_of(tree, ["."])},
    }


def digest_of(code: str) -> int:
    return crc32(code.encode())


def alone(facts: dict[str, Any], seconds: dict[str, float]) -> list[str]:
    """The long tests without which the others would not reach all blocks: chosen one by one, each time the one that
    reaches most that is left for its seconds.

    Args:
        facts: of `read_reached`, for all cases of the tests.
        seconds: of long tests.
    """
    tests = list(facts["tests"])
    kept = {place for place, name in enumerate(tests) if seconds.get(name, 0.0) <= LONG or name in facts["core"]}
    blocks_of: defaultdict[int, set[str]] = defaultdict(set)
    for block, places in facts["blocks"].items():
        if kept.isdisjoint(places):
            for place in places:
                blocks_of[place].add(block)
    left, chosen = set().union(*blocks_of.values()), []
    while left:
        best = max(blocks_of, key=lambda place: len(blocks_of[place] & left) / seconds[tests[place]])
        left -= blocks_of[best]
        chosen.append(tests[best])
    return sorted(chosen)


class Reached:
    """The tests that reach a place."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.seconds: dict[str, float] = facts["tests"]
        self.tests = list(facts["tests"])
        self.files = facts["files"]
        # A quarter of all tests is long.
        border = sorted(self.seconds.values())[len(self.seconds) * 3 // 4]
        self.long = {place for place, name in enumerate(self.tests) if self.seconds[name] > border}
        self.blocks: dict[str, list[int]] = facts["blocks"]
        self.of_file: defaultdict[str, set[int]] = defaultdict(set)
        self.num_blocks: Counter[int] = Counter()
        for block, places in self.blocks.items():
            self.of_file[block.rpartition(":")[0]].update(places)
            self.num_blocks.update(places)

    def batches(self, site: Site, code: str, importers: dict[str, set[str]]) -> list[list[str]]:
        """Tests that reach a place: quick ones of a few files that reach little else, all quick ones with their other
        cases, long ones. Then all tests of files that name its module.
        """
        is_known = site.block != AT_IMPORT and self.files.get(site.file) == digest_of(code)
        places = set(self.blocks.get(f"{site.file}:{site.block}", ())) if is_known else self.of_file[site.file]
        if site.block == AT_IMPORT:  # constants and tables, which others read
            places = places.union(*(self.of_file[file] for file in importers.get(site.file, ())))
        by_file: defaultdict[str, list[int]] = defaultdict(list)
        for place in sorted(places - self.long, key=self.cost):
            by_file[self.file_of(place)].append(place)

        def worth(file: str) -> float:
            return max(1 / self.num_blocks[place] / (0.1 + self.cost(place)) for place in by_file[file])

        ordered = sorted(by_file, key=worth, reverse=True)
        batches = [
            [place for file in ordered[:FIRST_FILES] for place in by_file[file]],
            [place for file in ordered for place in by_file[file]],
            sorted(places & self.long, key=self.cost),
        ]
        # With a file that is gone pytest would not start, which passes for a notice.
        are_there = {file for file in by_file if (ROOT / file).is_file()}
        are_there |= {file for file in map(self.file_of, places & self.long) if (ROOT / file).is_file()}
        names = [[self.tests[place] for place in batch if self.file_of(place) in are_there] for batch in batches]
        names[1] = list(dict.fromkeys(name.partition("[")[0] for name in names[1]))
        return [batch for batch in (*names, files_that_name(site.file)) if batch]

    def file_of(self, place: int) -> str:
        return self.tests[place].partition("::")[0]

    def cost(self, place: int) -> float:
        return self.seconds[self.tests[place]]


class Chosen:
    """A plugin of pytest: runs these tests in this order, and writes which of them failed."""

    def __init__(self, tests: list[str], record: Path, deadline: float) -> None:
        self.order = {name: place for place, name in enumerate(tests)}
        """By name; or by that of a test for its cases, or of a file for its tests."""
        self.record, self.deadline = record, deadline
        self.session: Any = None

    def pytest_sessionstart(self, session: Any) -> None:
        self.session = session

    def pytest_collection_finish(self, session: Any) -> None:
        places = {}
        for item in session.items:
            names = item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]
            if known := [self.order[name] for name in names if name in self.order]:
                places[item] = known[0]
        session.items[:] = sorted(places, key=lambda item: places[item])

    def write(self, **facts: Any) -> None:
        with self.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.write(failed=report.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.write(failed=report.nodeid)
        elif report.when == "call":
            self.write(passed=report.nodeid)
        if time.monotonic() > self.deadline:
            self.session.shouldstop = "out of time"


def run_tests(tests: list[str], seconds: float) -> tuple[str | None, int]:
    """The first of these tests that fails in the working directory, and how many passed before."""
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record")
        record.touch()
        if not (child := os.fork()):
            os.setsid()
            output = os.open(Path(folder, "output"), os.O_WRONLY | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(output, stream)
            code = 1
            try:
                files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
                options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", f"--timeout={LONGEST_TEST}"]
                chosen = Chosen(tests, record, time.monotonic() + seconds)
                code = int(pytest.main([*options, *files], plugins=[chosen]))
            finally:
                os._exit(code)
        code = wait_for(child, seconds + 2 * LONGEST_TEST)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what a test that failed has left
        reports = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    failed = next((report["failed"] for report in reports if "failed" in report), None)
    if failed is None and code not in (0, 2, 5):  # 2: out of time; 5: none of these names is left
        failed = f"pytest ended with {code}"
    return failed, sum("passed" in report for report in reports)


def wait_for(child: int, seconds: float) -> int:
    """The exit code of a process, killed after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)


@dataclass(frozen=True)
class Change:
    """A place and one way to change it."""

    site: Site
    before: str
    after: str
    whole: str
    """The file with it."""

    def facts(self) -> dict[str, Any]:
        """Facts that tell a change from others when lines have moved."""
        site = self.site
        place = {"file": site.file, "function": site.function, "at": site.at, "operator": site.operator}
        return {**place, "before": self.before, "after": self.after}


def drawn(seed: int, rooms: list[str]) -> Iterator[Change]:
    """Changes in the order in which this seed draws them."""
    codes = {file: (ROOT / file).read_text(encoding="utf-8") for file in files_of(ROOT, rooms)}
    by_operator: defaultdict[str, list[Site]] = defaultdict(list)
    for file, code in codes.items():
        for site in sites_of(file, code):
            by_operator[site.operator].append(site)
    draw = random.Random(seed)
    for name in OPERATORS:
        draw.shuffle(by_operator[name])
    while any(by_operator.values()):
        for name in OPERATORS:
            while by_operator[name]:
                site = by_operator[name].pop()
                if changes := list(site.changes(codes[site.file])):
                    yield Change(site, *draw.choice(changes))
                    break


def name_of(facts: dict[str, Any]) -> tuple[str, ...]:
    """Facts that tell a change from most others wherever its lines are."""
    return tuple(facts[name] for name in ("file", "function", "operator", "before", "after"))


def find_change(facts: dict[str, Any]) -> Change | None:
    """A change of the record in the code of today; None if its code is gone, or stands at several other places."""
    code = (ROOT / facts["file"]).read_text(encoding="utf-8") if (ROOT / facts["file"]).exists() else ""
    changes = []
    for site in sites_of(facts["file"], code):
        if (site.function, site.operator) == (facts["function"], facts["operator"]):
            changes += [Change(site, *words) for words in site.changes(code)]
    alike = [change for change in changes if name_of(change.facts()) == name_of(facts)]
    here = [change for change in alike if change.site.at == facts["at"]]
    return here[0] if here else alike[0] if len(alike) == 1 else None


class Copy:
    """A copy of the tree, in which changes are tried, by processes forked from this one."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.passing: set[str] = set()
        """Tests that were seen to pass without a change."""
        copy_of_tree(tree)
        os.chdir(tree)
        sys.path[:] = [str(tree), *(path for path in sys.path if path != str(ROOT))]
        for library in LIBRARIES:
            importlib.import_module(library)
        for module in [
            name for name in sys.modules if name.partition(".")[0] in ("cookbook", "simulated_gpus", "tests")
        ]:
            del sys.modules[module]  # the child's are the tree's

    def noticed_by(self, change: Change, batches: list[list[str]], seconds: float) -> tuple[str | None, int]:
        """The test that fails with a change and passes without it, and how many tests passed with it before."""
        path = self.tree / change.site.file
        code, times = path.read_text(encoding="utf-8"), path.stat()
        deadline, failed, num_passed = time.monotonic() + seconds, None, 0
        while failed is None and batches and time.monotonic() < deadline:
            tests, *batches = batches
            path.write_text(change.whole, encoding="utf-8")
            failed, passed = run_tests(tests, deadline - time.monotonic())
            num_passed += passed
            path.write_text(code, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # what is compiled of it holds again
            shutil.rmtree(self.tree / ".cache", ignore_errors=True)  # made with the change
            if failed and failed not in self.passing:
                again = [failed] if "::" in failed else tests[:1]  # what is no test is a file that cannot be imported
                if run_tests(again, seconds)[0]:
                    print(f"fails without a change: {failed}", flush=True)
                    failed, rest = None, tests[tests.index(failed) + 1 :] if failed in tests else []
                    batches = [rest, *batches] if rest else batches
                else:
                    self.passing.add(failed)
        return failed, num_passed


def try_part(given: argparse.Namespace) -> None:
    """Tries every Nth of the changes that are drawn and were not tried before, and writes a line for each."""
    number, count = given.part
    lines = lines_of(given.seed)
    reached = Reached(json.loads(REACHED.read_text(encoding="utf-8")))
    importers = importers_of()
    changes = itertools.islice(enumerate(drawn(given.seed, given.rooms)), given.count)
    done = {facts["draw"] for facts in read_lines(lines)}
    with tempfile.TemporaryDirectory(prefix="drawn-") as name:
        copy = Copy(Path(name))
        for place, change in [drawn for drawn in changes if drawn[0] not in done][number::count]:
            begun = time.monotonic()
            batches = reached.batches(change.site, (ROOT / change.site.file).read_text(encoding="utf-8"), importers)
            test, num_passed = copy.noticed_by(change, batches, given.seconds)
            facts = {
                "draw": place,
                **change.facts(),
                "test": test,
                "num_passed": num_passed,
                "seconds": round(time.monotonic() - begun, 1),
            }
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")
            print(f"{'noticed' if test else 'NOT NOTICED'}: {facts}", flush=True)
        os.chdir(ROOT)


def lines_of(seed: int) -> Path:
    """Where the parts of a draw write."""
    return REACHED.with_name(f"drawn_{seed}.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def try_again(given: argparse.Namespace) -> None:
    """Tries changes that no test noticed with all quick tests of these files; the record says which notices now."""
    record = read_record()
    with tempfile.TemporaryDirectory(prefix="drawn-") as name:
        copy = Copy(Path(name))
        for facts in record[str(given.seed)]["changes"]:
            is_asked = given.draws is None or facts["draw"] in given.draws
            if is_asked and what_became(facts) == "not noticed" and (change := find_change(facts)):
                facts["since"], _ = copy.noticed_by(change, [given.files], given.seconds)
                print(f"{facts['since'] or 'NOT NOTICED'}: {facts}", flush=True)
        os.chdir(ROOT)
    write_record(record)


def read_record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def write_record(record: dict[str, Any]) -> None:
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def draw(given: argparse.Namespace) -> None:
    """Tries a draw in several processes, and writes it into the record."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    head = {
        "commit": subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "pytest")},
        "rooms": given.rooms,
        "seconds": given.seconds,
    }
    command = [sys.executable, __file__, *sys.argv[1:]]
    parts = [subprocess.Popen([*command, "--part", f"{place}/{given.jobs}"]) for place in range(given.jobs)]
    if max(process.wait() for process in parts):
        sys.exit(1)
    changes = sorted(read_lines(lines_of(given.seed)), key=lambda facts: facts["draw"])
    write_record(read_record() | {str(given.seed): head | {"changes": changes}})


def equivalent_changes() -> dict[tuple[str, ...], str]:
    """The reason why no test can notice a change, by `name_of` it."""
    reasons = {}
    for file, functions in tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).items():
        for function, changes in functions.items():
            for reason, (operator, before, after) in changes.items():
                reasons[file, function, operator, before, after] = reason
    return reasons


def what_became(facts: dict[str, Any]) -> str:
    if facts["test"]:
        return "noticed"
    if facts.get("since"):
        return "noticed since"
    return "equivalent" if name_of(facts) in equivalent_changes() else "not noticed"


COLUMNS = ("noticed", "noticed since", "not noticed", "equivalent")


def page() -> str:
    """The table of the record: by seed, room and operator."""
    record = read_record()
    counts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    rooms = [f"cookbook/{room}" for room in ROOMS]
    for seed, facts_of_draw in record.items():
        for facts in facts_of_draw["changes"]:
            room = next(room for room in rooms if facts["file"].startswith(f"{room}/"))
            for row in (("seed", seed), ("room", room), ("operator", facts["operator"])):
                counts[row][what_became(facts)] += 1
    lines = [f"| | drawn | {' | '.join(COLUMNS)} | share as drawn | share now |", "|---" * 8 + "|"]
    for kind, names in {"seed": record, "room": rooms, "operator": OPERATORS}.items():
        for name in names:
            row = counts[kind, name]
            if real := row.total() - row["equivalent"]:
                noticed = row["noticed"], row["noticed"] + row["noticed since"]
                shares = [f"{100 * count / real:.0f} %" for count in noticed]
                cells = [row.total(), *(row[column] for column in COLUMNS), *shares]
                lines.append(f"| {kind} `{name}` | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def files_that_name(file: str) -> list[str]:
    """Test files that import a module, or speak of it in a text, the shortest first."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    room, _, name = module.rpartition(".")
    pattern = re.compile(rf"{re.escape(module)}\b|from {re.escape(room)} import [^\n]*\b{name}\b")
    codes = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py")}
    named = [path for path, code in codes.items() if pattern.search(code)]
    return [str(path.relative_to(ROOT)) for path in sorted(named, key=lambda path: len(codes[path]))]


def importers_of() -> dict[str, set[str]]:
    """The files that import each file's names."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name in files_of(ROOT, ["."]):
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for module in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    importers[f"{module.replace('.', '/')}.py"].add(name)
    return importers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    reaching = verbs.add_parser("reach")
    reaching.add_argument("--cases", type=int, default=1, help="of each test that has several")
    reaching.add_argument("--longest", type=float, default=1000, help="seconds of a test, by tests/durations.json")
    reaching.add_argument("--jobs", type=int, default=os.cpu_count())
    verbs.add_parser("alone")
    verbs.add_parser("page")
    for verb in (drawing := verbs.add_parser("draw"), again := verbs.add_parser("again")):
        verb.add_argument("--seed", type=int, required=True)
        verb.add_argument("--seconds", type=float, default=MOST_SECONDS, help="for the tests of one change")
    drawing.add_argument("--count", type=int, required=True)
    drawing.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=ROOMS)
    drawing.add_argument("--jobs", type=int, default=os.cpu_count())
    drawing.add_argument("--part", type=part, help=argparse.SUPPRESS)
    again.add_argument("--draws", type=int, nargs="+", help="numbers of changes, if not all")
    again.add_argument("files", nargs="+", help="test files, or tests")
    given = parser.parse_args()
    for name in [name for name in os.environ if name.startswith(OTHER_RUNS)]:
        del os.environ[name]
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    os.environ.setdefault("SIMULATED_GPUS_CACHE", str(ROOT / ".cache" / "simulated_gpus"))  # else compiled in each copy
    sys.dont_write_bytecode = True
    if given.verb == "reach":
        reach(given)
    elif given.verb == "alone":
        durations = json.loads(Path(__file__).with_name("durations.json").read_text(encoding="utf-8"))
        names = alone(json.loads(REACHED.read_text(encoding="utf-8")), durations)
        Path(__file__).with_name("alone.json").write_text(json.dumps(names, indent=0) + "\n", encoding="utf-8")
    elif given.verb == "page":
        print(page())
    elif given.verb == "again":
        try_again(given)
    elif given.part:
        try_part(given)
    else:
        draw(given)


if __name__ == "__main__":
    main()
