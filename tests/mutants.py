"""Plants faults that a user would suffer from, one at a time, in a copy of the tree: the test beside must notice each.

    python tests/mutants.py [PATH ...]              says what became of each; exit code 1 if one is not noticed
    python tests/mutants.py --part 3/20 --checked   the same of every 20th fault, from this one on

The faults are in tests/faults.toml; with PATH, only those of files that have it in their path. The tests of each run
in a process forked from one that has imported the libraries; it imports the project again. There are as many copies as
cores, and as many such processes.
"""

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":  # not in a process that a test spawns: its tree is the copy
    sys.path.insert(0, str(ROOT))
from tests.planted import FAULTS, Fault  # noqa: E402

LIBRARIES = (
    "accelerate",
    "datasets",
    "peft",
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer_utils",
)
OTHER_RUNS = ("PYTEST_", "CURVES", "GPU_RUNS", "TURN")
"""Variables of a pytest around this one. With its folder of runs, those of a fault would be taken for the others'."""
LONGEST_TEST = 120
NONE_CHOSEN = 5
"""pytest's exit code."""


def copy_of_tree(folder: Path) -> None:
    """Copy git's files, as they are here now, with what Python and pytest have compiled of them, and the environment of
    this tree.
    """
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in map(Path, filter(None, names.split("\0"))):
        compiled = (ROOT / name.parent / "__pycache__").glob(f"{name.stem}.*.pyc") if name.suffix == ".py" else ()
        for path in (name, *(path.relative_to(ROOT) for path in compiled)):
            if (ROOT / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, folder / path)
    (folder / ".venv").symlink_to((ROOT / ".venv").resolve())


def first_failure(tests: list[str], *options: str) -> str | None:
    """The first of these tests that fails in the working directory.

    Raises:
        RuntimeError: they could not be run.
    """
    import pytest

    with tempfile.TemporaryFile() as output:
        if not (child := os.fork()):
            os.setsid()
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            code = 1
            try:
                code = int(
                    pytest.main(
                        [
                            "-q",
                            "-x",
                            "-p",
                            "no:cacheprovider",
                            "-p",
                            "no:xdist",
                            f"--timeout={LONGEST_TEST}",
                            *options,
                            *tests,
                        ]
                    )
                )
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what a test that failed has left
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code == NONE_CHOSEN and not options:  # all of its cases were slow when they were last measured
        return first_failure(tests, "-m", "not thorough")
    if code not in (0, 1):
        raise RuntimeError(f"{' '.join(tests)} ended with {code}:\n{text[-2000:]}")
    failed = (line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR ")))
    return next(failed, "FAILED to run") if code else None


def is_noticed(tree: Path, fault: Fault) -> bool:
    """True if the fault's test fails with it."""
    path = tree / fault.file
    right, times = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(fault.planted_in(right), encoding="utf-8")
    # Cases of a test that are slow are tried only where the others pass.
    fails = any(first_failure([fault.test], *options) is not None for options in ((), ("-m", "not thorough")))
    path.write_text(right, encoding="utf-8")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # what is compiled of it holds again
    return fails


def survivors(faults: list[Fault], *, checks_first: bool) -> list[Fault]:
    """The faults that no test noticed; says of each what became of it.

    Args:
        checks_first: run the tests without a fault, too.

    Raises:
        RuntimeError: one fails then.
    """
    alive = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        tree = Path(name)
        copy_of_tree(tree)
        os.chdir(tree)
        sys.path[:] = [str(tree), *(path for path in sys.path if path != str(ROOT))]
        for library in LIBRARIES:
            importlib.import_module(library)
        for module in [
            loaded for loaded in sys.modules if loaded.partition(".")[0] in ("cookbook", "simulated_gpus", "tests")
        ]:
            del sys.modules[module]  # the child's are the tree's
        if checks_first and (failed := first_failure(sorted({fault.test for fault in faults}))):
            raise RuntimeError(f"without any fault: {failed}")
        for fault in faults:
            begun = time.monotonic()
            alive += [] if (noticed := is_noticed(tree, fault)) else [fault]
            seconds = time.monotonic() - begun
            print(f"{'noticed' if noticed else 'NOT NOTICED'}, {seconds:.1f} s: {fault.file}: {fault.harm}", flush=True)
        os.chdir(ROOT)
    return alive


def in_parallel(words: list[str], count: int) -> int:
    """The exit code of this program for so many parts at a time."""
    command = [sys.executable, __file__, *words]
    parts = [subprocess.Popen([*command, "--part", f"{i}/{count}"]) for i in range(count)]
    return max(part.wait() for part in parts)


def part(text: str) -> tuple[int, int]:
    """A part and the number of parts, from `3/20`."""
    number, count = map(int, text.split("/"))
    if not 0 <= number < count:
        raise ValueError
    return number, count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", metavar="PATH", help="a part of the path of a file; else all files")
    parser.add_argument("--part", type=part, metavar="I/N", help="every Nth fault from I on, in this process")
    parser.add_argument("--checked", action="store_true", help="their tests have passed without any fault")
    given = parser.parse_args()
    for path in given.paths:
        if not any(path in fault.file for fault in FAULTS):
            parser.error(f"no file with a fault has {path} in its path")
    if given.part is None:
        return in_parallel(sys.argv[1:], os.cpu_count() or 1)
    number, count = given.part
    faults = [fault for fault in FAULTS if any(path in fault.file for path in given.paths or [""])][number::count]
    if not faults:  # pytest without names would run all tests
        return 0
    for name in [variable for variable in os.environ if variable.startswith(OTHER_RUNS)]:
        del os.environ[name]
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    alive = survivors(faults, checks_first=not given.checked)
    print(f"{len(faults) - len(alive)} of {len(faults)} faults were noticed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
