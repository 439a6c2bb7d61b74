"""Records that a run writes about itself. pytest tests/test_metrics.py"""

import json
import math
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cookbook.forecast.costs.flops import ModelSizes
from cookbook.run.forecasts import FlopCounter, flop_counter
from cookbook.start.ds_config import run_name
from cookbook.system.files import RecipeError
from cookbook.training import metrics
from cookbook.training.metrics import (
    RunLog,
    environment_record,
    peak_memory_gib,
)


def test_numbers_are_written_at_full_precision(tmp_path: Path):
    log = RunLog(tmp_path, is_main=True, max_steps=1)
    line = {"step": 1, "loss": 1 / 3, "tokens_per_second": 2 / 3}
    log.write(line)
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == line


def test_what_is_not_finite_is_null_in_json(tmp_path: Path):
    log = RunLog(tmp_path, is_main=True, max_steps=1)
    log.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "tokens_per_second": 1.0})
    log.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    values = json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    assert values == {"step": 1, "loss": None, "grad_norm": None, "tokens_per_second": 1.0}


def test_a_write_that_takes_a_part_is_followed_by_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a disk that is nearly full."""
    log = RunLog(tmp_path, is_main=True, max_steps=1)
    file = log._lines._file
    in_parts = SimpleNamespace(fileno=file.fileno, write=lambda text: file.write(text[:5]), close=file.close)
    monkeypatch.setattr(log._lines, "_file", in_parts)
    log.write({"step": 1, "loss": 1.0, "tokens_per_second": 1.0})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 1.0


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_in_the_place_of_the_metrics_is_refused(tmp_path: Path, make: Callable[[Path], object]):
    """To open a pipe waits for a reader."""
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(RecipeError, match=r"metrics\.jsonl is (no file|a folder).*; remove it"):
        RunLog(tmp_path, is_main=True, max_steps=1)


def test_only_the_main_process_writes(tmp_path: Path):
    log = RunLog(tmp_path / "run", is_main=False, max_steps=1)
    log.write({"step": 1, "loss": 1.0, "tokens_per_second": 1.0})
    log.write_record("run.json", {})
    log.close()
    assert not (tmp_path / "run").exists()


def test_mfu_is_that_of_the_ledger_and_of_a_known_peak_only():
    sizes = ModelSizes(
        num_parameters=100,
        num_trained=100,
        num_matrix=60,
        num_matrix_trained=60,
        num_layers=4,
        hidden=8,
        num_heads=2,
        head_dim=5,
        vocab=5,
    )
    batch = SimpleNamespace(num_tokens=16, num_sequences=2, num_targets=3)
    # 6 x 60 for the matrices, 12 x 4 x 10 x 8 / 2 for causal attention over 8 positions, of 16 tokens; the head's 3
    flops = 16 * (360 + 1920) + 3 * 6 * 40
    assert FlopCounter(sizes=sizes, peak=1000.0).mfu(batch, 2.0, 4) == {"mfu": flops / 2.0 / 4000.0}
    assert FlopCounter(sizes=sizes, peak=None).mfu(batch, 2.0, 4) == {}, "the peak of a CPU is not known"


def test_the_peak_memory_of_this_process_is_plausible():
    assert 0.05 < peak_memory_gib(torch.device("cpu")) < 24


def test_runs_in_different_folders_have_different_names(tmp_path: Path):
    assert run_name(tmp_path / "a" / "run") != run_name(tmp_path / "b" / "run")


def test_the_record_names_the_versions_that_ran():
    record = environment_record(torch.device("cpu"))
    assert record["versions"]["torch"] == torch.__version__
    assert record["commit"] is None or len(record["commit"]) >= 40


@pytest.mark.parametrize("secret", ["HF_TOKEN", "WANDB_API_KEY"])
def test_secrets_of_the_environment_are_not_recorded(secret: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(secret, "canary-4711")
    assert "canary-4711" not in json.dumps(environment_record(torch.device("cpu")))


def test_an_earlier_run_is_set_aside_and_not_written_over(tmp_path: Path):
    for number in range(3):
        log = RunLog(tmp_path / "run", is_main=True, max_steps=1)
        log.write_record("run.json", {"number": number})
        log.close()
    numbers = {path.parent.name: json.loads(path.read_text())["number"] for path in tmp_path.glob("*/run.json")}
    assert numbers == {"run.1": 0, "run.2": 1, "run": 2}


def test_a_folder_without_a_run_is_used_as_it_is(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    RunLog(tmp_path, is_main=True, max_steps=1).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_the_peak_belongs_to_the_device(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    run = SimpleNamespace(engine=SimpleNamespace(device=torch.device("cuda"), is_main=False))
    assert flop_counter(run, []).peak == peak


def test_what_cannot_be_read_of_the_metrics_is_taken_out_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The log is decoration: whatever is in it, the run goes on."""
    good = [json.dumps({"step": step, "loss": 1.0}).encode() + b"\n" for step in (1, 2, 3)]
    bad = [b'{"st\xe9p": 1}\n', b"null\n", b'{"loss": 1}\n', b"[" * 100_000 + b"\n", b'{"step": "2"}\n']
    content = b"".join([good[0], *bad, *good[1:], b'{"step": 4, "lo'])
    (tmp_path / "metrics.jsonl").write_bytes(content)
    log = RunLog(tmp_path, is_main=True, max_steps=5, resumed_step=2)
    log.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == good[0] + good[1]
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == content
    assert "5 lines cannot be read" in capsys.readouterr().err


def test_a_damaged_last_line_is_kept_beside_too(tmp_path: Path):
    """It has its end, so no crash cut it short."""
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\xff{"step": 2}\n')
    RunLog(tmp_path, is_main=True, max_steps=5, resumed_step=2).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n'
    assert (tmp_path / "metrics.damaged.jsonl").is_file()


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_an_evaluation_that_runs_again_stands_once(tmp_path: Path, is_evaluated: bool):
    """A stop after a step saves before the evaluation; a start evaluates and is killed before it saves again."""
    trained, evaluated = [b'{"step": 1}\n', b'{"step": 2}\n'], b'{"step": 2, "eval_loss": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(trained) + evaluated)
    RunLog(tmp_path, is_main=True, max_steps=5, resumed_step=2, is_evaluated=is_evaluated).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(trained) + (evaluated if is_evaluated else b"")


def test_later_lines_are_taken_out_without_room_for_another_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        assert metrics._truncate_lines(path, (2, True)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_metrics_whose_folder_is_removed_go_on_in_a_new_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = RunLog(tmp_path / "run", is_main=True, max_steps=5)
    log.write({"step": 1, "eval_loss": 1.0, "eval_num_tokens": 1})
    shutil.rmtree(tmp_path / "run")
    log.write({"step": 2, "eval_loss": 1.0, "eval_num_tokens": 1})
    log.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [2]
    assert "was removed during the run" in capsys.readouterr().err
