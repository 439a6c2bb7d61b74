"""Reference log-probabilities are computed once for the same tokens and weights, and read from disk after that."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cookbook.config.objectives import Objective
from cookbook.training.data.reference import with_reference
from cookbook.training.data.sets import TokenSets
from cookbook.training.data.tokens import TokenSet

DPO = Objective.of(name="dpo")
PAIRS = TokenSet(
    ids=np.arange(8, dtype=np.int32),
    is_label=np.ones(8, dtype=bool),
    offsets=np.array([0, 2, 4, 6, 8]),
    group_size=2,
    part_sizes=(2,),
)


class Model:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tokens: TokenSet) -> np.ndarray:
        self.calls += 1
        return -np.arange(len(tokens.lengths), dtype=np.float64) - self.calls


@pytest.fixture
def model() -> Model:
    return Model()


def reference(
    cache: Path, model: Model, made_from: str = "weights", tokens: TokenSet = PAIRS, agree=lambda value: value
):
    sets = TokenSets(train=tokens, eval={}, notes=[])
    return with_reference(sets, [made_from], DPO, cache=cache, all_true=agree, compute=model).train.reference_logps


def test_the_second_run_reads_what_the_first_computed(tmp_path: Path, model: Model):
    first = reference(tmp_path, model)
    assert first.tolist() == [-1, -2, -3, -4]
    assert reference(tmp_path, model).tolist() == first.tolist() and model.calls == 1


def test_other_weights_or_other_tokens_are_computed_anew(tmp_path: Path, model: Model):
    reference(tmp_path, model)
    reference(tmp_path, model, "other weights")
    reference(tmp_path, model, tokens=replace(PAIRS, ids=PAIRS.ids + 1))
    assert model.calls == 3


def test_all_processes_compute_if_one_of_them_has_no_file(tmp_path: Path, model: Model):
    reference(tmp_path, model)
    assert reference(tmp_path, model, agree=lambda value: False).tolist() == [-2, -3, -4, -5] and model.calls == 2


@pytest.mark.parametrize("bit", [None, *range(0, 64 * 4, 5)])
def test_a_damaged_file_is_computed_again(tmp_path: Path, model: Model, bit: int | None):
    """A flipped bit of any of the four numbers, the smallest of their digits among them."""
    reference(tmp_path, model)
    (path,) = tmp_path.glob("reference-*.safetensors")
    content = bytearray(path.read_bytes())
    if bit is not None:
        content[-32 + bit // 8] ^= 1 << bit % 8
    path.write_bytes(content if bit is not None else b"torn")
    reference(tmp_path, model)
    reference(tmp_path, model)
    assert model.calls == 2
