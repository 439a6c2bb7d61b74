"""Plants faults that a user would suffer from, one at a time, in a copy of the tree: the tests named must notice.

    python tests/mutants.py [AREA ...]    prints what became of each; exit code 1 if one survives or is not in its file

tests/test_unnoticed.py sees that each fault can still be planted.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    """A change of one place, in which a program that runs is wrong."""

    area: str
    file: str
    text: str
    """Occurs once in the file."""
    change: str
    harm: str
    """What a user suffers."""
    tests: str
    """Arguments of pytest, of which one test fails."""

    def planted_in(self, code: str) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: the place is not there, or there more than once.
        """
        if code.count(self.text) != 1 or self.text == self.change:
            raise ValueError(f"{self.file} has {code.count(self.text)} times: {self.text}")
        return code.replace(self.text, self.change)


ENGINE, HANGS = "cookbook/training/engine", "cookbook/system"
CHECKPOINT = "cookbook/training/checkpoint"
FAULTS = (
    Fault(
        "loss",
        f"{ENGINE}/base.py",
        "scale = self.mesh.token_parallel_size / count",
        "scale = self.mesh.token_parallel_size / (count + 1)",
        "every gradient is too small, under all strategies alike",
        "tests/test_oracle.py",
    ),
    Fault(
        "dropout",
        f"{ENGINE}/base.py",
        "self.world.rank // self.mesh.tensor]",
        "self.world.rank]",
        "the processes of a tensor-parallel group drop different values of one tensor",
        "tests/test_tensor_parallel.py",
    ),
    Fault(
        "read-back",
        f"{ENGINE}/fsdp2.py",
        "{self._block.fsdp_reshard_after_forward}, reshards",
        "reshards, reshards",
        "a library that keeps all weights gathered goes unnoticed",
        "tests/test_read_back.py",
    ),
    Fault(
        "adapters",
        "cookbook/training/adapters/__init__.py",
        "first.uniform_(-(num_inputs**-0.5), num_inputs**-0.5,",
        "first.uniform_(-2 * num_inputs**-0.5, 2 * num_inputs**-0.5,",
        "adapters begin twice as wide as peft's",
        "tests/test_adapters.py",
    ),
    Fault(
        "checkpoint",
        f"{CHECKPOINT}/tensors.py",
        "        os.fsync(self._descriptor)\n",
        "",
        "after a power cut a whole manifest names files without their data",
        "tests/test_checkpoint_format.py",
    ),
    Fault(
        "checkpoint",
        f"{CHECKPOINT}/folder.py",
        'replace_file(build / MANIFEST, sealed({"format": FORMAT, **manifest}), flush=True)',
        'replace_file(build / MANIFEST, sealed({"format": FORMAT, **manifest}))',
        "after a power cut the newest checkpoint has an empty manifest",
        "tests/test_checkpoint_format.py",
    ),
    Fault(
        "checkpoint",
        f"{CHECKPOINT}/folder.py",
        "    flush_folder(build)\n",
        "",
        "after a power cut files of a checkpoint have no names",
        "tests/test_checkpoint_format.py",
    ),
    Fault(
        "checkpoint",
        f"{CHECKPOINT}/resume.py",
        ', "run.num_epochs")',
        ")",
        "a resumed run changes its length, and with it the learning rates, without a word",
        "tests/test_resume.py",
    ),
    Fault(
        "export",
        "cookbook/run/publish/__init__.py",
        "end_of_turn=models.end_of_turn(tokenizer))",
        "end_of_turn=None)",
        "an exported model does not stop at the end of its turn",
        "tests/test_export.py",
    ),
    Fault(
        "rows",
        "cookbook/config/row_kinds.py",
        "            chat = _masked(chat, key, from_json(raw[key]))\n    chat = _begun(raw, chat)\n",
        "            chat = _masked(chat, key, from_json(raw[key]))\n",
        "system prompts beside messages are not trained with",
        "tests/test_data_keys.py",
    ),
    Fault(
        "rows",
        "cookbook/config/row_columns.py",
        "readings({key for key, value in raw.items() if value is not None})",
        "readings(set(raw))",
        "a table of several kinds of rows, whose other columns are null, is refused",
        "tests/test_data_rows.py",
    ),
    Fault(
        "rows",
        "cookbook/training/data/encode.py",
        'adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]',
        "adds_bos = bos is not None",
        "texts begin with a token that the model was never given",
        "tests/test_data_tokens.py",
    ),
    Fault(
        "hangs",
        f"{HANGS}/hang_report.py",
        "for rank in members if rank in stuck and rank not in inside]",
        "for rank in members if rank not in inside]",
        "a dead rank is said to be missing from collectives that ended long ago",
        "tests/test_watch.py",
    ),
    Fault(
        "hangs",
        f"{HANGS}/watchdog.py",
        "silent += min(now - before, 2 * self._poll_seconds)",
        "silent += now - before",
        "a run on a suspended laptop is ended when it wakes",
        "tests/test_watch.py",
    ),
    Fault(
        "launch",
        "cookbook/planning/launchers.py",
        "range(int(found[1]), int(found[2]) + 1)",
        "range(int(found[1]), int(found[2]))",
        "a batch that the largest group cannot share is found when it has come to be",
        "tests/test_hosts.py",
    ),
    Fault(
        "launch",
        "cookbook/commands/launch.py",
        "max(1, num_cores() // num_local)",
        "max(1, num_cores() // (num_local * num_machines))",
        "half of the cores of two machines are idle",
        "tests/test_hosts.py",
    ),
    Fault(
        "launch",
        "cookbook/commands/submit.py",
        "set -- {shlex.join(task.words)}",
        "set -- {' '.join(task.words)}",
        "settings with blanks break, and a value may run as a command",
        "tests/test_submit.py",
    ),
    Fault(
        "plan",
        "cookbook/forecast/verdict.py",
        "return order, round(seconds, 3), offload, simplicity",
        "return order, offload, round(seconds, 3), simplicity",
        "plan recommends what takes longer",
        "tests/test_forecast.py",
    ),
)


def copy_of_tree(folder: Path) -> None:
    """What git has, as it is here now, with the environment of this tree."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to((ROOT / ".venv").resolve())


def failed_tests(tree: Path, words: str) -> list[str]:
    """The tests, of those that these arguments of pytest choose, that fail there; it stops at the first.

    Raises:
        RuntimeError: they could not be run.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *words.split()]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest {words} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]


def survivors(faults: list[Fault]) -> list[Fault]:
    """The faults that no test noticed; says of each what became of it."""
    alive = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        tree = Path(name)
        copy_of_tree(tree)
        for fault in faults:
            right = (tree / fault.file).read_text(encoding="utf-8")
            (tree / fault.file).write_text(fault.planted_in(right), encoding="utf-8")
            noticed = failed_tests(tree, fault.tests)
            (tree / fault.file).write_text(right, encoding="utf-8")
            alive += [] if noticed else [fault]
            print(f"{fault.area}: {fault.harm}: {noticed[0] if noticed else 'NOT NOTICED'}", flush=True)
    return alive


def main() -> int:
    areas = sorted({fault.area for fault in FAULTS})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(areas)}; else all")
    chosen = parser.parse_args().areas
    if unknown := sorted(set(chosen) - set(areas)):
        parser.error(f"no area {', '.join(unknown)}; there are {', '.join(areas)}")
    faults = [fault for fault in FAULTS if not chosen or fault.area in chosen]
    alive = survivors(faults)
    print(f"{len(faults) - len(alive)} of {len(faults)} faults were noticed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
