"""Protects the end of a run that ran out of memory: a sentence and what to change, status.json, and no traceback.

python -m pytest -q tests/test_gpu_shortage.py
"""

import json

import pytest
import torch
from test_escalation import start_of, write_recipe

from cookbook.run import shortage
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
@pytest.mark.parametrize(("unallocated", "is_told"), [("17.00", True), ("1.00", False)])
def test_the_report_of_a_shortage_names_a_large_share_of_fragments(unallocated, is_told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shortage, "REPORT_SECONDS", 0)
    monkeypatch.setattr(shortage.signals, "stop_deferring", lambda **_: None)  # of this process
    write_chats(tmp_path / "rows.jsonl", 2)
    start = start_of(write_recipe(tmp_path, tmp_path / "rows.jsonl"), "accelerate_configs/fsdp2.yaml", [])
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
