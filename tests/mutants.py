"""Plants faults that a user would suffer from, one at a time, in a copy of the tree: a quick test must notice each.

    python tests/mutants.py [AREA ...]    says what became of each; exit code 1 if one is not noticed

tests/test_mutants.py sees that each can still be planted.
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
    test: str
    """Notices it: FILE::NAME, with all of its cases that are quick."""

    def planted_in(self, code: str) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: the place is not there, or there more than once.
        """
        if code.count(self.text) != 1 or self.text == self.change:
            raise ValueError(f"{self.file} has {code.count(self.text)} times: {self.text}")
        return code.replace(self.text, self.change)


ENGINE, SYSTEM = "cookbook/training/engine", "cookbook/system"
CHECKPOINT = "cookbook/training/checkpoint"
FAULTS = (
    Fault(
        "loss",
        f"{ENGINE}/base.py",
        "scale = self.mesh.token_parallel_size / count",
        "scale = self.mesh.token_parallel_size / (count + 1)",
        "every gradient is too small, under all strategies alike",
        "tests/test_oracle.py::test_a_run_is_the_plain_loop",
    ),
    Fault(
        "dropout",
        f"{ENGINE}/base.py",
        "self.world.rank // self.mesh.tensor]",
        "self.world.rank]",
        "the processes of a tensor-parallel group drop different values of one tensor",
        "tests/test_tensor_parallel.py::test_the_processes_of_a_tensor_parallel_group_draw_alike_and_no_others",
    ),
    Fault(
        "read-back",
        f"{ENGINE}/fsdp2.py",
        "{self._block.fsdp_reshard_after_forward}, reshards",
        "reshards, reshards",
        "a library that keeps all weights gathered goes unnoticed",
        "tests/test_read_back.py::test_every_setting_that_is_compared_is_refused_when_another_runs",
    ),
    Fault(
        "read-back",
        f"{ENGINE}/zero.py",
        'yield "clipping", self.max_grad_norm, model.gradient_clipping()',
        'yield "clipping", self.max_grad_norm, self.max_grad_norm',
        "a run clips at another norm than its recipe says",
        "tests/test_read_back.py::test_every_setting_that_is_compared_is_refused_when_another_runs",
    ),
    Fault(
        "read-back",
        f"{ENGINE}/ddp.py",
        'yield "DDP", self._options, found',
        'yield "DDP", found, found',
        "DDP runs with other buckets than its file says",
        "tests/test_read_back.py::test_every_setting_that_is_compared_is_refused_when_another_runs",
    ),
    Fault(
        "adapters",
        "cookbook/training/adapters/__init__.py",
        "first.uniform_(-(num_inputs**-0.5), num_inputs**-0.5,",
        "first.uniform_(-2 * num_inputs**-0.5, 2 * num_inputs**-0.5,",
        "adapters begin twice as wide as peft's",
        "tests/test_adapters.py::test_first_weights_are_as_wide_as_those_of_peft",
    ),
    Fault(
        "checkpoint",
        f"{CHECKPOINT}/tensors.py",
        "        os.fsync(self._descriptor)\n",
        "",
        "after a power cut a whole manifest names files without their data",
        "tests/test_checkpoint_format.py::test_what_a_name_promises_is_on_the_disk_before_it",
    ),
    Fault(
        "checkpoint",
        f"{CHECKPOINT}/folder.py",
        'replace_file(build / MANIFEST, sealed({"format": FORMAT, **manifest}), flush=True)',
        'replace_file(build / MANIFEST, sealed({"format": FORMAT, **manifest}))',
        "after a power cut the newest checkpoint has an empty manifest",
        "tests/test_checkpoint_format.py::test_what_a_name_promises_is_on_the_disk_before_it",
    ),
    Fault(
        "checkpoint",
        f"{CHECKPOINT}/folder.py",
        "    flush_folder(build)\n",
        "",
        "after a power cut files of a checkpoint have no names",
        "tests/test_checkpoint_format.py::test_what_a_name_promises_is_on_the_disk_before_it",
    ),
    Fault(
        "checkpoint",
        f"{CHECKPOINT}/saver.py",
        'replace_file(file, json.dumps(state, indent=1) + "\\n", flush=True)',
        'replace_file(file, json.dumps(state, indent=1) + "\\n")',
        "after a power cut a whole manifest names an empty state",
        "tests/test_checkpoint_format.py::test_what_a_name_promises_is_on_the_disk_before_it",
    ),
    Fault(
        "checkpoint",
        f"{CHECKPOINT}/folder.py",
        "    os.rename(build, final)\n    flush_folder(root)\n",
        "    os.rename(build, final)\n",
        "after a power cut LATEST names a checkpoint that has no name yet",
        "tests/test_checkpoint_format.py::test_what_a_name_promises_is_on_the_disk_before_it",
    ),
    Fault(
        "checkpoint",
        f"{CHECKPOINT}/resume.py",
        '"run.num_epochs", ',
        "",
        "a resumed run changes its length, and with it the learning rates, without a word",
        "tests/test_resume.py::test_a_run_that_resumes_does_not_change_its_length_without_consent",
    ),
    Fault(
        "export",
        "cookbook/run/publish/__init__.py",
        "end_of_turn=models.end_of_turn(tokenizer))",
        "end_of_turn=None)",
        "an exported model does not stop at the end of its turn",
        "tests/test_export.py::test_what_is_exported_stops_at_the_end_of_its_turn_and_where_its_model_did",
    ),
    Fault(
        "rows",
        "cookbook/config/row_kinds.py",
        "            chat = _masked(chat, key, from_json(raw[key]))\n    chat = _begun(raw, chat)\n",
        "            chat = _masked(chat, key, from_json(raw[key]))\n",
        "system prompts beside messages are not trained with",
        "tests/test_data_keys.py::test_every_kind_with_chats_reads_system_history_tools_and_what_is_for_the_template",
    ),
    Fault(
        "rows",
        "cookbook/config/row_columns.py",
        "readings({key for key, value in raw.items() if value is not None})",
        "readings(set(raw))",
        "init takes a table of several kinds of rows, whose other columns are null, for another kind",
        "tests/test_data_rows.py::test_columns_of_other_kinds_that_are_null_do_not_make_a_row_ambiguous",
    ),
    Fault(
        "rows",
        "cookbook/training/data/rows.py",
        "present = frozenset(key for key, value in raw.items() if value is not None)",
        "present = frozenset(raw)",
        "a table of several kinds of rows, whose other columns are null, is refused",
        "tests/test_data_rows.py::test_columns_of_other_kinds_that_are_null_do_not_make_a_row_ambiguous",
    ),
    Fault(
        "rows",
        "cookbook/training/data/encode.py",
        'adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]',
        "adds_bos = bos is not None",
        "texts begin with a token that the model was never given",
        "tests/test_data_tokens.py::test_a_begin_token_that_the_tokenizer_has_and_does_not_write_is_not_added",
    ),
    Fault(
        "hangs",
        f"{SYSTEM}/hang_report.py",
        "for rank in members if rank in stuck and rank not in inside]",
        "for rank in members if rank not in inside]",
        "a dead rank is said to be missing from collectives that ended long ago",
        "tests/test_watch.py::test_a_silent_rank_is_missing_from_what_others_wait_in_and_from_nothing_else",
    ),
    Fault(
        "hangs",
        f"{SYSTEM}/watchdog.py",
        "silent += min(now - before, 2 * self._poll_seconds)",
        "silent += now - before",
        "a run on a suspended laptop is ended when it wakes",
        "tests/test_watch.py::test_time_in_which_the_process_was_stopped_is_no_silence",
    ),
    Fault(
        "launch",
        "cookbook/planning/launchers.py",
        "range(int(found[1]), int(found[2]) + 1)",
        "range(int(found[1]), int(found[2]))",
        "a batch that the largest group cannot share is found when it has come to be",
        "tests/test_hosts.py::test_the_sizes_of_a_group_that_may_change_are_those_of_torchrun_s_flag",
    ),
    Fault(
        "launch",
        "cookbook/commands/launch.py",
        "max(1, num_cores() // num_local)",
        "max(1, num_cores() // (num_local * num_machines))",
        "half of the cores of two machines are idle",
        "tests/test_hosts.py::test_without_a_count_each_machine_has_as_many_processes_and_threads_as_alone",
    ),
    Fault(
        "launch",
        "cookbook/commands/submit.py",
        "set -- {shlex.join(task.words)}",
        "set -- {' '.join(task.words)}",
        "settings with blanks break, and a value may run as a command",
        "tests/test_submit.py::test_bash_gives_launch_the_words_of_a_slurm_script_as_they_were_written",
    ),
    Fault(
        "plan",
        "cookbook/forecast/verdict.py",
        "return order, round(seconds, 3), offload, simplicity",
        "return order, offload, round(seconds, 3), simplicity",
        "plan recommends what takes longer",
        "tests/test_forecast.py::test_the_ranking_by_hand",
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


def first_failure(tree: Path, tests: list[str]) -> str | None:
    """The first of these tests that fails there.

    Raises:
        RuntimeError: they could not be run.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}")
    failed = (line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR ")))
    return next(failed, None)


def survivors(faults: list[Fault]) -> list[Fault]:
    """The faults that no test noticed; says of each what became of it.

    Raises:
        RuntimeError: a test fails without any fault.
    """
    alive = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        tree = Path(name)
        copy_of_tree(tree)
        if failed := first_failure(tree, sorted({fault.test for fault in faults})):
            raise RuntimeError(f"without any fault: {failed}")
        for fault in faults:
            right = (tree / fault.file).read_text(encoding="utf-8")
            (tree / fault.file).write_text(fault.planted_in(right), encoding="utf-8")
            is_noticed = first_failure(tree, [fault.test]) is not None
            (tree / fault.file).write_text(right, encoding="utf-8")
            alive += [] if is_noticed else [fault]
            print(f"{'noticed' if is_noticed else 'NOT NOTICED'}: {fault.area}: {fault.harm}", flush=True)
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
