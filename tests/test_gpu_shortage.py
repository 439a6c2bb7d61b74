"""Protects the end of a run that ran out of memory: a sentence and what to change, status.json, and no traceback.

python -m pytest -q tests/test_gpu_shortage.py
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_escalation import start_of, write_recipe

from cookbook.run import forecasts, shortage
from cookbook.start.launchers import NOTE_FILE
from cookbook.system import status
from tests.curves import write_chats

# As torch 2.13's allocator writes it (c10/cuda/CUDACachingAllocator.cpp), shortened.
FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.02 GiB is free."
    " Process 7 has 78.08 GiB memory in use. Of the allocated memory {} GiB is allocated by PyTorch, and {} GiB is"
    " reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("The size of tensor a (3) must match"), False),
        (OSError("out of memory"), False),
    ],
)
def test_a_shortage_of_memory_is_known_by_its_words(error, is_one):
    assert shortage.is_shortage(error) is is_one


def test_fragments_are_worth_a_word_where_they_are_a_large_share():
    assert shortage.fragments_gib(FULL.format("60.00", "17.00")) == 17
    assert shortage.fragments_gib(FULL.format("76.00", "1.00")) == 0
    assert shortage.first_sentence(FULL) == "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.core
def test_the_report_of_a_shortage_names_a_large_share_of_fragments(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shortage, "REPORT_SECONDS", 0)
    monkeypatch.setattr(shortage.signals, "stop_deferring", lambda **_: None)  # of this process
    write_chats(tmp_path / "rows.jsonl", 2)
    start = start_of(write_recipe(tmp_path, tmp_path / "rows.jsonl"), "accelerate_configs/fsdp2.yaml", [])
    for unallocated, is_told in (("17.00", True), ("1.00", False)):
        error = torch.OutOfMemoryError(FULL.format("60.00", unallocated))
        assert shortage.end_run(error, start.recipe, start.strategy, start.plan, start.recipe_name, []) == 1
        told = capsys.readouterr().err
        assert ("17.0 GiB lie in fragments: PYTORCH_ALLOC_CONF=" in told) is is_told and "Next: " in told


def test_expandable_segments_are_advice_only_where_a_run_has_none():
    for settings in (None, "", "max_split_size_mb:512", "expandable_segments:False"):
        assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in shortage.remedy(settings)
    assert shortage.remedy("max_split_size_mb:512,expandable_segments:True") == ""


def test_a_run_that_does_not_fit_ends_with_one_sentence(gpu_lab):
    run = gpu_lab.run("fsdp2", recipe="memory", memory=150_000_000, ends=None)
    assert 1 in run.codes and not {0, 2} & set(run.codes)
    told = "".join(run.log(rank) for rank in range(2))
    assert "Traceback" not in told
    assert told.count("CUDA out of memory") == 1, "the first prints for all"
    assert "\n  Next: " in told
    status = json.loads((run.output / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert "CUDA out of memory" in status["reason"]


def test_without_our_launcher_it_ends_with_the_line_that_goes_on(gpu_lab):
    run = gpu_lab.run(
        "fsdp2", {"run.on_out_of_memory": "smaller_micro_batch"}, recipe="memory", memory=170_000_000, ends=None
    )
    told = "".join(run.log(rank) for rank in range(2))
    line = next(line for line in told.splitlines() if "To continue: " in line)
    assert "accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2" in line
    assert "--set batch.micro_batch_size=1" in line and "--set run.on_out_of_memory=smaller_micro_batch" in line


@pytest.fixture
def shortage_of(tmp_path, monkeypatch, capsys):
    """Ends a run as a process of two that runs out of memory does; returns the code, what it told, and its naps."""

    def end(error: Exception, *settings: str, rank: int = 0, gpus: int = 2, **variables: str):
        naps: list[float] = []
        monkeypatch.setattr(shortage.time, "sleep", naps.append)
        deferred: list[dict[str, bool]] = []
        monkeypatch.setattr(shortage.signals, "stop_deferring", lambda **facts: deferred.append(facts))
        monkeypatch.setattr(shortage, "suggestion", lambda recipe, strategy, plan, name: f"advice for {name}")
        for name, value in {"LOCAL_RANK": str(rank), "RANK": str(rank + 4), **variables}.items():
            monkeypatch.setenv(name, value)
        write_chats(tmp_path / "rows.jsonl", 2)
        path = write_recipe(tmp_path, tmp_path / "rows.jsonl")
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run/run.json").write_text("{}")
        start = start_of(path, "accelerate_configs/fsdp2.yaml", [*settings], 2 if gpus else 0)
        plan = replace(start.plan, num_gpus=gpus)
        code = shortage.end_run(error, start.recipe, start.strategy, plan, start.recipe_name, [*settings])
        assert deferred == [{"is_main": False}], "a launcher that ends this process need not wait"
        return code, capsys.readouterr().err, naps

    return end


def begin(folder: Path) -> None:
    """Write what a run that has begun leaves."""
    folder.mkdir(exist_ok=True)
    status.Status(folder, is_main=True)


FULL_GPU = torch.OutOfMemoryError(FULL.format("76.00", "1.00"))


def test_a_process_that_ran_out_later_waits_for_the_report_of_the_first(shortage_of, tmp_path):
    """Each of those that share a machine comes half a second after the other; the first advises for all."""
    code, told, naps = shortage_of(FULL_GPU, rank=2)
    assert code == 1 and told.startswith("\nrank 6: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    assert naps == [2 * shortage.STAGGER_SECONDS, shortage.REPORT_SECONDS], "the first has not even begun"
    begin(tmp_path / "run")
    code, told, naps = shortage_of(FULL_GPU)
    assert (code, naps) == (1, [0.0]) and f"Next: advice for {tmp_path / 'recipe.yaml'}.\n" in told
    report = json.loads((tmp_path / "run/status.json").read_text())
    assert (report["state"], report["exit_code"]) == ("failed", 1) and "CUDA out of memory" in report["reason"]
    assert shortage_of(FULL_GPU, rank=1) == (1, "", [shortage.STAGGER_SECONDS, shortage.REPORT_SECONDS])
    earlier = tmp_path / "run/status.json"
    earlier.write_text(json.dumps(report | {"launch": "yesterday's", "pid": 1}))
    assert "Next: advice for " in shortage_of(FULL_GPU)[1], "which failed, and is another start"
    begin(tmp_path / "run")
    earlier.write_text(json.dumps(json.loads(earlier.read_text()) | {"pid": 1}))
    assert "Next: " in shortage_of(FULL_GPU)[1]
    assert json.loads(earlier.read_text())["state"] == "failed", "the main process is killed before it can write that"


@pytest.mark.parametrize(
    ("error", "gpus", "keys", "said"),
    [
        (FULL_GPU, 2, [], "Next: advice for "),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), 2, [], "Next: advice for "),
        (MemoryError(), 2, [], " shows how much host memory each strategy takes."),
        (MemoryError(), 2, ["run.on_out_of_memory=smaller_micro_batch"], " shows how much host memory each strategy"),
        (FULL_GPU, 1, ["run.on_out_of_memory=smaller_micro_batch"], "Next: advice for "),
        (FULL_GPU, 2, ["run.on_out_of_memory=smaller_micro_batch"], "To continue: accelerate launch "),
        (MemoryError(), 0, ["run.on_out_of_memory=smaller_micro_batch"], "To continue: accelerate launch "),
    ],
)
def test_the_advice_is_for_the_memory_that_ran_out(shortage_of, tmp_path, monkeypatch, error, gpus, keys, said):
    """A line to go on only where one machine has all processes, as the recipe asks for it."""
    begin(tmp_path / "run")
    monkeypatch.setattr(forecasts, "smaller_micro_batch", lambda *given: given[-1][0])
    monkeypatch.delenv(NOTE_FILE, raising=False)
    code, told, _ = shortage_of(error, *keys, gpus=gpus)
    assert code == 1 and said in told and told.count("\n  ") == 1
    if "To continue" in said:
        assert "batch.micro_batch_size=4" in told and f"--set {keys[0]}" in told
    if "host" in said:
        assert "rank 4: out of memory.\n" in told and f"cookbook plan {tmp_path / 'recipe.yaml'} shows" in told


def test_where_a_launcher_goes_on_the_process_leaves_its_reason_and_no_advice(shortage_of, tmp_path):
    """Not without the key; and not for the memory of a host, which a smaller micro-batch on the GPU hardly changes."""
    begin(tmp_path / "run")
    note, key = tmp_path / "note", "run.on_out_of_memory=smaller_micro_batch"
    for error, keys in ((FULL_GPU, []), (MemoryError(), [key])):
        told = shortage_of(error, *keys, **{NOTE_FILE: str(note)})[1]
        assert ("Next: " in told or "host memory" in told) and not note.exists()
        begin(tmp_path / "run")
    code, told, _ = shortage_of(FULL_GPU, key, **{NOTE_FILE: str(note)})
    assert code == 1 and told == "\nrank 4: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    assert json.loads(note.read_text()) == {"reason": "rank 4: CUDA out of memory. Tried to allocate 2.00 GiB."}


def test_a_line_to_go_on_resumes_if_there_is_a_checkpoint_and_is_left_out_if_it_cannot_be_made(
    shortage_of, tmp_path, monkeypatch
):
    key, saved = "run.on_out_of_memory=smaller_micro_batch", tmp_path / "run/checkpoints/step-00000003"
    monkeypatch.setattr(forecasts, "smaller_micro_batch", lambda *given: given[-1][0])
    monkeypatch.delenv(NOTE_FILE, raising=False)
    begin(tmp_path / "run")
    assert 'run.resume="never"' in shortage_of(FULL_GPU, key)[1]
    saved.mkdir(parents=True)
    begin(tmp_path / "run")
    assert 'run.resume="auto"' in shortage_of(FULL_GPU, key)[1]
    for answer in (None, ZeroDivisionError()):
        begin(tmp_path / "run")

        def fail(*_: object, answer: Exception | None = answer) -> None:
            if answer is not None:
                raise answer

        monkeypatch.setattr(forecasts, "smaller_micro_batch", fail)
        assert "Next: advice for " in shortage_of(FULL_GPU, key)[1]
    begin(tmp_path / "run")
    offered: list[str] = []
    monkeypatch.setattr(forecasts, "smaller_micro_batch", lambda *given: None)
    monkeypatch.setattr(forecasts, "next_strategy", lambda *given: offered.extend(other.name for other in given[4]))
    assert "Next: advice for " in shortage_of(FULL_GPU, "run.on_out_of_memory=next_strategy")[1]
    assert "zero3" in offered and "fsdp2" not in offered, "which it ran under"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be\n", "CUDA error: out of memory."),
        ("\n no room\nat all", "no room."),
        ("", "out of memory."),
        ("HIP out of\nmemory. Tried to allocate 64.00 MiB. GPU", "HIP out of\nmemory. Tried to allocate 64.00 MiB."),
        ("no room.", "no room."),
    ],
)
def test_what_failed_is_told_in_one_sentence(text: str, sentence: str):
    assert shortage.first_sentence(text) == sentence


def test_fragments_are_read_in_each_unit_from_a_tenth_of_what_is_reserved():
    text = "{} is allocated by PyTorch, and {} is reserved by PyTorch but unallocated"
    assert shortage.fragments_gib(text.format("1.00 GiB", "512.00 MiB")) == 0.5
    assert shortage.fragments_gib(text.format("512.00 KiB", "1024.00 KiB")) == 2**-10
    assert shortage.fragments_gib(text.format("9.00 GiB", "1.00 GiB")) == 0, "a tenth is not more than a tenth"
    assert shortage.fragments_gib("of another library") == 0


def test_what_a_launch_has_answered_is_read_of_its_variable(monkeypatch):
    monkeypatch.delenv(shortage.HISTORY, raising=False)
    assert shortage.history() == []
    monkeypatch.setenv(shortage.HISTORY, '[{"from": "a"}]')
    assert shortage.history() == [{"from": "a"}]
