"""Tensor parallel beside data parallel: groups that see other samples are averaged over once, whatever shares a shard.

The curves of the shipped files are in the matrix (tests/test_equivalence*.py); here are mistakes and arithmetic.
"""

from pathlib import Path

import pytest
import torch

from cookbook.training.engine.state import _distance, _holders
from tests.curves import SGD, Lab, distance
from tests.test_equivalence import SGD_LOSS, SGD_NORM
from tests.test_equivalence_features import LORA

QWEN3 = {"model.from_scratch.model_type": "qwen3", "batch.micro_batch_size": "2"}


def test_the_holders_of_a_shard_by_hand():
    # Ranks 0 to 7 are 2 copies x 2 shards x 2 of tensor parallel: distances 4, 2, 1.
    assert _holders(((2, 2), (1, 2)), range(8), 5) == [1, 5]  # a matrix, sharded both ways
    assert _holders(((2, 2),), range(8), 5) == [0, 1, 4, 5]  # a norm, which tensor parallel leaves whole
    assert _holders(((1, 2),), range(4), 2) == [0, 2]  # a matrix of copies of two
    assert _holders((), range(3), 1) == [0, 1, 2]


def test_the_distances_of_a_mesh_by_hand():
    ranks = torch.arange(8).view(2, 2, 2)
    assert [_distance(ranks, dim) for dim in range(3)] == [4, 2, 1]
    assert _distance(torch.tensor([1, 3, 5]), 0) == 2 and _distance(torch.tensor([[5]]), 1) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["ddp_tp"]
    + [pytest.param(strategy, marks=pytest.mark.thorough) for strategy in ("fsdp2_tp", "hsdp_tp", "pp_tp_fsdp2")],
)
def test_gradients_that_transformers_sums_by_itself_count_once(lab: Lab, strategy: str):
    """Gradients of Qwen3's norms of queries and keys, over several micro-batches."""
    apart = distance(lab.run(strategy, QWEN3), lab.run("single", QWEN3))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart


def test_shards_may_divide_a_tied_embedding_unevenly(lab: Lab):
    """The losses differed by 2e-2 while embedding and head had a padded copy each, of which one was updated."""
    rows = {"model.from_scratch.vocab_size": "514"}
    apart = distance(lab.run("fsdp2_tp", rows | {"batch.micro_batch_size": "4"}), lab.run("single", rows))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart


@pytest.mark.core
def test_a_head_whose_vocabulary_is_divided_gives_loss_and_gradients_of_the_whole(lab: Lab, tmp_path: Path):
    """In parts of two rows, and at once; a head that is trained, and a frozen one."""
    done = lab.parent.run(tmp_path, ["tests/divided_head.py"], processes=2, limit=60)
    said = [(tmp_path / f"log_{rank}").read_text() for rank in range(2)]
    assert done["codes"] == [0, 0], said
    for text in said:
        _, *numbers = next(line for line in text.splitlines() if line.startswith("DIFFERENCES")).split()
        assert len(numbers) == 4 and all(float(number) < 1e-6 for number in numbers), numbers


def test_a_loss_of_a_shard_alone_leaves_the_curve(lab: Lab):
    apart = distance(lab.run("tp", SGD, sabotage="loss_of_a_shard"), lab.run("single", SGD))
    assert apart.loss > 100 * SGD_LOSS or apart.norm > 100 * SGD_NORM, apart


@pytest.mark.parametrize("mistake", ["copies_not_averaged", "norm_of_a_process"])
def test_a_mistake_leaves_the_curve(lab: Lab, mistake: str):
    apart = distance(lab.run("ddp_tp", SGD, processes=4, sabotage=mistake), lab.run("single", SGD))
    assert apart.loss > 100 * SGD_LOSS or apart.norm > 100 * SGD_NORM, apart


MICRO = {"batch.micro_batch_size": "2"}
DROPOUT = LORA | MICRO | {"adapter.dropout": "0.2", "data.max_length": "95", "run.save_every_steps": "10"}
"""Rows that no mesh pads."""
OF_COLUMNS = {"adapter.targets": "[q_proj, k_proj, v_proj, gate_proj, up_proj]"}
"""Their inputs are whole on each process, as without tensor parallel."""


@pytest.mark.slow
@pytest.mark.thorough
def test_a_tensor_parallel_group_drops_the_same_inputs_of_an_adapter(lab: Lab):
    """Two groups of two draw as two processes do; a save compares what the processes of a group hold alike."""
    curve, others = lab.run("fsdp2_tp", DROPOUT | OF_COLUMNS), lab.run("fsdp2", DROPOUT | OF_COLUMNS, processes=2)
    apart = distance(curve, others)
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart
    assert distance(others, lab.run("single", DROPOUT | OF_COLUMNS)).loss > 100 * SGD_LOSS, "nothing was dropped"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [
        "adapter_of_equal_shards",
        pytest.param("adapter_left_out_of_fsdp2_unchecked", marks=pytest.mark.thorough),
    ],
)
def test_a_mistake_with_an_adapter_leaves_the_curve(lab: Lab, mistake: str):
    apart = distance(lab.run("fsdp2_tp", LORA | MICRO, sabotage=mistake), lab.run("single", LORA | MICRO))
    assert apart.loss > 100 * SGD_LOSS or apart.norm > 100 * SGD_NORM, apart


@pytest.mark.slow
def test_an_adapter_that_fsdp2_did_not_shard_is_refused(lab: Lab):
    folder, output = lab.attempt("fsdp2_tp", LORA | MICRO, sabotage="adapter_left_out_of_fsdp2")
    assert (folder / "exit_code").read_text() != "0"
    assert "whole parameters: asked for 0, found 14" in output
