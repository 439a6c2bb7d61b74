"""Protects run.check_ranks_every_steps: ranks that agree go on, and one that differs in a bit is named.

python -m pytest -q tests/test_agreement.py -m "slow or not slow"
"""

import json
import re
from dataclasses import dataclass

import pytest
import torch

from cookbook.training.engine.agreement import check, differences, digests
from tests.curves import Lab, processes_of
from tests.gpu_runs import GpuLab

CHECKED = {"run.check_ranks_every_steps": "1", "run.max_steps": "5", "schedule.warmup_steps": "2"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_digest_knows_each_bit_and_its_place(dtype: torch.dtype):
    tensor = torch.arange(100).to(dtype).view(10, 10)
    flipped, swapped = tensor.clone(), tensor.clone()
    bits = flipped.view(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    bits[37] ^= 1
    swapped[[2, 3]] = tensor[[3, 2]]
    sums = digests({"a": tensor, "same": tensor.clone(), "flipped": flipped, "swapped": swapped}.items())
    assert sums["a"] == sums["same"] and sums["a"] != sums["flipped"] != sums["swapped"] != sums["a"]


def test_the_rank_that_differs_is_named_among_those_that_hold_the_same():
    ranks = [{"a": 1, "left": 5}, {"a": 1, "left": 5}, {"a": 1, "right": 7}, {"a": 2, "right": 8}]
    assert differences(ranks) == ["  a: rank 3 unlike rank 0", "  right: rank 3 unlike rank 2"]
    assert differences([{"a": 1}, {"a": 1}]) == differences([{"a": 1}, {"b": 2}]) == []
    assert differences([{str(i): 0 for i in range(9)}, {str(i): 1 for i in range(9)}])[-1] == "  and 4 more"


@dataclass
class TwoRanks:
    """Collectives of a rank beside another that has these values."""

    other: dict[str, int]

    def gather_texts(self, text: str) -> list[str]:
        return [text, json.dumps(self.other)]

    def broadcast_text(self, text: str) -> str:
        return text


def test_a_difference_ends_the_run_and_agreement_does_not():
    check({"a": 1}, TwoRanks({"a": 1}), step=3)
    with pytest.raises(RuntimeError, match=r"step 3: the ranks no longer agree .*\n  a: rank 1 unlike rank 0"):
        check({"a": 1}, TwoRanks({"a": 2}), step=3)


SELDOM = [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize(
    ("strategy", "is_replicated"),
    [
        ("ddp", True),
        pytest.param("zero3", True, marks=pytest.mark.slow),
        *(pytest.param(strategy, True, marks=SELDOM) for strategy in ("zero2", "hsdp", "tp")),
        pytest.param("fsdp2", False, marks=pytest.mark.slow),
        pytest.param("fsdp1", False, marks=SELDOM),
    ],
)
def test_ranks_that_agree_go_on_and_one_that_does_not_ends_the_run(lab: Lab, strategy: str, is_replicated: bool):
    assert len(lab.run(strategy, CHECKED).steps) == 5
    if is_replicated:
        folder, printed = lab.attempt(strategy, CHECKED, sabotage="weights_diverge")
        assert "step 3: the ranks no longer agree (run.check_ranks_every_steps):" in printed
        rank = processes_of(strategy) - 1
        assert re.search(rf"  weight of model\.norm\.weight(, from element \d+)?: rank {rank} unlike rank \d", printed)
        assert (folder / "exit_code").read_text() == "1"
    folder, printed = lab.attempt(strategy, CHECKED, sabotage="position_diverges")
    assert "  samples trained on: rank 1 unlike rank 0" in printed and (folder / "exit_code").read_text() == "1"


def test_without_the_check_it_would_go_on(lab: Lab):
    settings = {name: value for name, value in CHECKED.items() if name != "run.check_ranks_every_steps"}
    assert len(lab.run("ddp", settings, sabotage="weights_diverge").steps) == 5


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_ranks_on_simulated_gpus_agree(gpu_lab: GpuLab, strategy: str):
    assert len(gpu_lab.run(strategy, {"run.check_ranks_every_steps": "1"}).steps) == 3
