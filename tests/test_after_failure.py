"""Protects what acts after a failure, without a run: the start after a shortage, a process without its launcher, and
an answer with its end in the middle.

python -m pytest -q tests/test_after_failure.py
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cookbook.commands.launch import run_and_restart
from cookbook.commands.rounds.sampling import Sampler
from cookbook.config.sections import RoundsSection
from cookbook.start.launchers import NOTE_FILE
from cookbook.system import signals, status
from tests.curves import write_chats
from tests.test_escalation import start_of, write_recipe


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_start_after_a_shortage_goes_on_from_this_runs_checkpoint_alone(tmp_path: Path, has_begun: bool):
    """A start that ended before it wrote its state leaves the checkpoint of an earlier run in the folder."""
    rows = tmp_path / "chats.jsonl"
    write_chats(rows, 8)
    path, folder = write_recipe(tmp_path, rows), tmp_path / "run"
    (folder / "checkpoints/step-000001").mkdir(parents=True)
    status.Status(folder, is_main=True, step=1).end("finished", exit_code=0)
    resumes: list[bool] = []

    def run_child(command: list[str], environment: dict[str, str], output_dir: Path) -> int:
        resumes.append('run.resume="auto"' in command)
        if len(resumes) > 1:
            return 0
        Path(environment[NOTE_FILE]).write_text(json.dumps({"reason": "no memory"}))
        if has_begun:
            status.Status(output_dir, is_main=True)
        return 1

    settings = ["run.on_out_of_memory=smaller_micro_batch", "run.resume=never"]
    assert run_and_restart(start_of(path, "accelerate_configs/ddp.yaml", settings, num_gpus=0), run_child, {}) == 0
    assert resumes == [False, has_begun]


def test_a_process_notices_that_its_launcher_has_gone():
    """The launcher is a child that forks the process, waits until it has looked once, and ends."""
    read, write = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        launcher_pid = os.getpid()
        if os.fork():
            time.sleep(0.3)
            os._exit(0)
        signals._parent, signals._received = launcher_pid, None
        before = signals.requested_stop()
        deadline = time.monotonic() + 20
        while signals.requested_stop() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        os.write(write, f"{before} {signals.requested_stop()}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(launcher, 0)
    said = os.read(read, 100).decode()
    os.close(read)
    assert said == f"None {signals.PARENT_GONE}"


@pytest.mark.parametrize(
    ("sampled", "kept", "has_ended"),
    [([5, 6, 2, 7, 2], [5, 6, 2], True), ([5, 6, 3, 9, 9], [5, 6, 3], True), ([5, 6, 7], [5, 6, 7], False)],
)
def test_a_reward_reads_an_answer_without_its_end_and_what_follows(sampled, kept, has_ended):
    words = {2: "<end>", 3: "<stop>", 5: "fi", 6: "ve", 7: "!", 9: "<pad>"}

    def decode(ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(words[i] for i in ids if not (skip_special_tokens and words[i].startswith("<")))

    sampler = Sampler.__new__(Sampler)
    sampler.ends, sampler.tokenizer = [2, 3], SimpleNamespace(decode=decode)
    sampler.rounds, sampler.seed = RoundsSection(num_rounds=1, prompts_per_round=1), 4
    answer = sampler._answer(sampled, [[-float(i), 0.0] for i in range(len(sampled))])
    assert (answer.ids, answer.has_ended, answer.seed) == (kept, has_ended, 4)
    assert answer.logps == [0.0, -1.0, -2.0] and answer.drawn_logps is None
    assert answer.text == ("five" if has_ended else "five!")
