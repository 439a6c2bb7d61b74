"""Sequence parallel: the parts of a row are the row, and heads that cannot be divided are refused.

The curves of the shipped files are in the matrix (tests/test_equivalence*.py); here are mistakes and arithmetic.
"""

import pytest
import torch
from transformers import LlamaConfig

from cookbook.config.mesh import Mesh
from cookbook.facts.meshes import sequence_problem
from cookbook.training.data.batches import collate, sequence_part
from tests.curves import SGD, Lab, distance
from tests.small_data import PAD, token_set
from tests.test_equivalence import SGD_LOSS, SGD_NORM
from tests.test_equivalence_features import preferences

LENGTHS = [5, 9, 3, 14]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_parts_of_a_micro_batch_are_the_micro_batch(size: int, packing: bool):
    whole = collate(token_set(LENGTHS), [0, 1, 2, 3], PAD, packing=packing, multiple=size)
    parts = [sequence_part(whole, size, rank, group_size=1) for rank in range(size)]
    assert torch.equal(torch.cat([part["input_ids"] for part in parts], dim=1), whole["input_ids"])
    length = whole["input_ids"].shape[1]
    positions = torch.cat([part["position_ids"] for part in parts], dim=1)
    assert torch.equal(positions, whole["position_ids"] if packing else torch.arange(length)[None])
    # Each target once, of the same sequence, at the place in the whole rows that its part points to.
    triples = []
    for rank, part in enumerate(parts):
        width = length // size
        row, column = part["target_positions"] // width, part["target_positions"] % width + rank * width
        places = (row * length + column).tolist()
        triples += zip(places, part["targets"].tolist(), part["target_sequences"].tolist(), strict=True)
    names = ("target_positions", "targets", "target_sequences")
    expected = zip(*(whole[name].tolist() for name in names), strict=True)
    assert sorted(triples) == sorted(expected) and len(triples) == sum(LENGTHS) - len(LENGTHS)
    assert all(part.get("lengths") == whole.get("lengths") for part in parts)


def test_the_samples_of_a_group_are_shared_out_by_hand():
    """Three pairs over two ranks, and one, of which the second rank has none."""
    whole = {"input_ids": torch.zeros(6, 4), "target_positions": torch.arange(6), "targets": torch.arange(6)}
    whole |= {"target_sequences": torch.arange(6), "num_sequences": 6}
    whole |= {"values": torch.tensor([7.0, 8.0, 9.0]), "reference_logps": torch.arange(6) / 10}
    parts = [sequence_part(whole, 2, rank, group_size=2) for rank in range(2)]
    assert [part["own_sequences"].tolist() for part in parts] == [[0, 1, 4, 5], [2, 3]]
    assert [part["values"].tolist() for part in parts] == [[7.0, 9.0], [8.0]]
    assert torch.equal(parts[1]["reference_logps"], whole["reference_logps"][2:4])
    alone = whole | {"num_sequences": 2, "values": torch.ones(1), "reference_logps": torch.ones(2)}
    assert [len(sequence_part(alone, 2, rank, group_size=2)["own_sequences"]) for rank in range(2)] == [2, 0]


def test_ranks_of_a_mesh_by_hand():
    mesh = Mesh(shard=2, sequence=2)
    assert (mesh.num_processes, mesh.data_parallel_size, mesh.token_parallel_size) == (4, 2, 4)
    assert [mesh.data_parallel_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [mesh.sequence_rank(rank) for rank in range(4)] == [0, 1, 0, 1]
    meshes = (Mesh(), Mesh(sequence=3), Mesh(tensor=2), Mesh(sequence=6, tensor=2))
    assert [mesh.length_multiple(100) for mesh in meshes] == [1, 3, 4, 12]


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "fits"),
    [(8, 8, 4, True), (8, 2, 2, True), (8, 2, 4, True), (8, 2, 8, True), (8, 8, 3, False), (12, 3, 2, False)],
)
def test_every_process_takes_a_part_of_the_heads(heads: int, key_heads: int, size: int, fits: bool):
    config = LlamaConfig(hidden_size=96, num_attention_heads=heads, num_key_value_heads=key_heads)
    problem = sequence_problem(config, size)
    assert (problem is None) == fits
    assert fits or f"{heads} query and {key_heads} key heads" in problem


def test_a_window_is_refused():
    config = LlamaConfig(num_attention_heads=8, sliding_window=64)
    assert "its attention window is 64 tokens" in sequence_problem(config, 2)


def test_fewer_key_heads_than_processes_are_repeated(lab: Lab):
    settings = SGD | {"model.from_scratch.num_key_value_heads": "1"}
    apart = distance(lab.run("ddp_sp", settings, processes=2), lab.run("single", settings))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart


@pytest.mark.parametrize(
    ("strategy", "packing"),
    [
        ("fsdp2_sp", "true"),
        pytest.param("ddp_sp", "true", marks=pytest.mark.slow),
        pytest.param("zero3_sp", "false", marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_groups_that_see_other_samples(lab: Lab, strategy: str, packing: str):
    settings = SGD | {"batch.micro_batch_size": "2", "data.packing": packing}
    apart = distance(lab.run(strategy, settings, processes=4), lab.run("single", SGD))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart


@pytest.mark.slow
def test_groups_that_see_other_pairs(lab: Lab):
    """The last step of an epoch has five pairs, so that one group of two processes has a micro-batch of one."""
    settings = preferences(lab)
    apart = distance(lab.run("fsdp2_sp", settings, processes=4), lab.run("single", settings))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart


@pytest.mark.parametrize("mistake", ["no_exchange_of_heads_and_tokens", "gradient_divided_by_samples_processes"])
def test_a_mistake_leaves_the_curve(lab: Lab, mistake: str):
    apart = distance(lab.run("ddp_sp", SGD, processes=2, sabotage=mistake), lab.run("single", SGD))
    assert apart.loss > 100 * SGD_LOSS or apart.norm > 100 * SGD_NORM, apart


@pytest.mark.slow
def test_a_loss_over_whole_samples_is_that_of_one_process_and_a_mistake_leaves_it(lab: Lab):
    """Packed pairs, one in a micro-batch: of two ranks one has no sample, and all have tokens."""
    settings = preferences(lab)
    reference = lab.run("single", settings)
    single_pairs = settings | {"batch": "{global_batch_size: 8, micro_batch_size: 1}", "data.packing": "true"}
    apart = distance(lab.run("ddp_sp", single_pairs), reference)
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart
    for mistake in ("log_probabilities_of_a_part", "gradient_of_own_samples"):
        wrong = distance(lab.run("ddp_sp", settings, sabotage=mistake), reference)
        assert wrong.loss > 100 * SGD_LOSS or wrong.norm > 100 * SGD_NORM, wrong


def test_an_odd_number_of_processes_is_refused(lab: Lab):
    folder, said = lab.attempt("ddp_sp", SGD, processes=3)
    assert (folder / "exit_code").read_text() == "2"
    assert "is a mesh of 2 processes, but 3 were requested" in said and "or a multiple" in said
    assert not (folder / "metrics.jsonl").exists()
