"""Protects which samples make up a step on each rank, and what a micro-batch holds of them.

python -m pytest -q tests/test_data_batches.py
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from small_data import PAD, token_set
from target_grid import to_grid

from cookbook.system.files import RecipeError
from cookbook.training.data.batches import (
    Layout,
    balance_over_ranks,
    collate,
    epoch_order,
    eval_batches,
    indexed_batches,
    measure,
    split_micro_batches,
    steps_per_epoch,
    train_steps,
)


def samples_in(tokens, micro_batches):
    """Sample numbers, in order, found by the id of their first token."""
    by_first_id = {int(tokens.ids[start]): i for i, start in enumerate(tokens.offsets[:-1])}
    firsts = (int(row[0]) for batch in micro_batches for row in batch["input_ids"])
    return [by_first_id[first] for first in firsts if first != PAD]


def targets_in(micro_batches):
    return sorted(torch.cat([batch["targets"] for batch in micro_batches]).tolist())


def test_collate_shifts_the_targets_inside_each_sample():
    # ids 1 2 3 | 4 5; labels at 2, 4 (a first token: nothing predicts it) and 5.
    tokens = token_set([3, 2], is_label=[0, 1, 0, 1, 1])
    batch = collate(tokens, [1, 0], pad_id=9)
    assert batch["input_ids"].tolist() == [[4, 5, 9], [1, 2, 3]]
    assert batch["targets"].tolist() == [5, 2]
    assert batch["target_positions"].tolist() == [0, 3]
    assert tokens.num_targets.tolist() == [1, 1]
    assert (batch["target_sequences"].tolist(), batch.pop("num_sequences")) == ([0, 1], 2)
    assert sorted(batch) == ["input_ids", "target_positions", "target_sequences", "targets"]
    assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in batch.values())


def test_no_samples_make_a_row_without_targets():
    batch = collate(token_set([3]), [], pad_id=9)
    assert plain(batch) == {
        "input_ids": [[9, 9]],
        "targets": [],
        "target_positions": [],
        "target_sequences": [],
        "num_sequences": 0,
    }


def test_order_depends_on_seed_and_epoch_only():
    tokens = token_set([2] * 100)
    order = epoch_order(tokens, seed=1, epoch=0)
    assert sorted(order.tolist()) == list(range(100))
    assert order.tolist() == epoch_order(tokens, seed=1, epoch=0).tolist()
    # (1, 0) and (0, 1) would be the same order if seed and epoch were added.
    others = [epoch_order(tokens, seed, epoch).tolist() for seed, epoch in ((0, 1), (1, 1), (2, 0))]
    assert order.tolist() not in others and others[0] not in others[1:]


def test_two_epochs_of_twelve_rows_by_hand():
    """The numbers are those of `numpy.random.RandomState([7, epoch]).permutation(12)`, which numpy guarantees."""
    steps = train_steps(
        token_set([3] * 12), Layout(num_ranks=1, rank=0, pad_id=PAD, micro_batch_size=5), seed=7, global_batch_size=5
    )
    windows = [sorted(number for mine in next(steps).sample_numbers for number in mine) for _ in range(6)]
    first, second = [5, 11, 0, 1, 7, 3, 4, 10, 9, 6, 2, 8], [7, 5, 10, 0, 11, 2, 6, 3, 9, 8, 1, 4]
    expected = [order[begin : begin + 5] for order in (first, second) for begin in (0, 5, 10)]
    assert windows == [sorted(window) for window in expected]


@pytest.mark.parametrize(("num_samples", "size", "steps"), [(10, 4, 3), (8, 4, 2), (3, 4, 1)])
def test_steps_per_epoch_counts_the_partial_one(num_samples, size, steps):
    assert steps_per_epoch(token_set([2] * num_samples), size) == steps


def test_deal_by_hand():
    # 9 to rank 0; 5 and 4 to rank 1, now full; 1 to rank 0.
    assert balance_over_ranks([5, 9, 4, 1], 2) == [[1, 3], [0, 2]]
    # Three for two ranks: 9 to rank 0, 5 to rank 1 and 4 as well.
    assert balance_over_ranks([5, 9, 4], 2) == [[1], [0, 2]]
    assert balance_over_ranks([7], 3) == [[0], [], []]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("num_samples", [0, 1, 7, 16, 64])
def test_deal_gives_each_sample_once_in_counts_that_differ_by_at_most_one(num_samples, num_ranks):
    lengths = np.random.default_rng(0).lognormal(5, 1, num_samples).astype(int).tolist()
    dealt = balance_over_ranks(lengths, num_ranks)
    assert sorted(itertools.chain(*dealt)) == list(range(num_samples))
    counts = [len(mine) for mine in dealt]
    assert max(counts) - min(counts) <= 1
    for mine in dealt:
        assert [lengths[i] for i in mine] == sorted((lengths[i] for i in mine), reverse=True)


def dealt_slowly(lengths, num_ranks):
    """The rule as it is written down: look at all ranks for each sample."""
    shares, num_tokens = [[] for _ in range(num_ranks)], [0] * num_ranks
    quota, num_extra = divmod(len(lengths), num_ranks)
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room = [rank for rank in range(num_ranks) if len(shares[rank]) < quota + (num_extra > 0)]
        rank = min(room, key=lambda rank: (num_tokens[rank], rank))
        num_extra -= len(shares[rank]) == quota
        shares[rank].append(position)
        num_tokens[rank] += lengths[position]
    return shares


def test_deal_is_that_of_the_rule_for_any_lengths():
    """A run resumes in the middle of an epoch with the samples of each rank as before."""
    random = np.random.default_rng(0)
    for _ in range(2000):
        num_ranks, num_samples = int(random.integers(1, 20)), int(random.integers(0, 60))
        lengths = random.integers(1, int(random.integers(2, 300)), num_samples).tolist()  # many equal ones too
        assert balance_over_ranks(lengths, num_ranks) == dealt_slowly(lengths, num_ranks)
    lengths = random.lognormal(5, 1, 4099).astype(int).tolist()
    assert balance_over_ranks(lengths, 512) == dealt_slowly(lengths, 512)


def test_every_rank_runs_as_many_micro_batches_as_the_rank_with_most():
    """Their number is computed from counts where it can be; here by splitting for every rank."""
    tokens = token_set([2] * 21)
    for num_ranks, size in ((1, 4), (2, 3), (4, 2), (5, 1), (8, 3)):
        layout = Layout(num_ranks=num_ranks, rank=num_ranks - 1, pad_id=PAD, micro_batch_size=size)
        shares = balance_over_ranks([2] * 21, num_ranks)
        splits = [split_micro_batches(tokens.lengths[:, None], share, layout) for share in shares]
        step = next(train_steps(tokens, layout, seed=0, global_batch_size=21))
        assert len(step.micro_batches) == max(map(len, splits))


def test_deal_balances_better_than_round_robin():
    lengths = np.random.default_rng(0).lognormal(5, 1, 64).astype(int).tolist()

    def wait(dealt):
        loads = [sum(lengths[i] for i in mine) for mine in dealt]
        return max(loads) / (sum(loads) / len(loads))

    round_robin = [list(range(rank, 64, 8)) for rank in range(8)]
    assert wait(balance_over_ranks(lengths, 8)) < 1.02
    assert wait(round_robin) > 1.3


LENGTHS = [3, 9, 2, 5, 30, 4, 4, 7, 2, 12]


def steps_of(tokens, rank, num_ranks, count, *, seed=7, num_samples_consumed=0, **limit):
    layout = Layout(num_ranks=num_ranks, rank=rank, pad_id=PAD, **limit or {"micro_batch_size": 1})
    position = {"seed": seed, "global_batch_size": 4, "num_samples_consumed": num_samples_consumed}
    return list(itertools.islice(train_steps(tokens, layout, **position), count))


@pytest.mark.parametrize(("num_ranks", "micro_batch_size"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 4), (5, 1)])
def test_every_split_shows_the_same_samples_and_targets_in_each_step(num_ranks, micro_batch_size):
    tokens = token_set(LENGTHS)
    expected = steps_of(tokens, 0, 1, 6)
    ranks = [steps_of(tokens, rank, num_ranks, 6, micro_batch_size=micro_batch_size) for rank in range(num_ranks)]
    for step, shares in enumerate(zip(*ranks, strict=True)):
        assert len({len(share.micro_batches) for share in shares}) == 1
        assert len(shares[0].micro_batches) == -(-shares[0].num_samples // (micro_batch_size * num_ranks))
        together = [batch for share in shares for batch in share.micro_batches]
        assert sorted(samples_in(tokens, together)) == sorted(samples_in(tokens, expected[step].micro_batches))
        assert targets_in(together) == targets_in(expected[step].micro_batches)
        for share in shares:
            assert share.num_targets == len(targets_in(together))
            assert share.num_tokens == sum(LENGTHS[i] for i in samples_in(tokens, together))
            assert (share.num_samples, share.epoch) == (expected[step].num_samples, expected[step].epoch)


def test_an_epoch_shows_every_sample_once_and_its_last_step_is_partial():
    tokens = token_set(LENGTHS)
    steps = steps_of(tokens, 0, 1, 6)
    assert [step.num_samples for step in steps] == [4, 4, 2] * 2
    assert [step.epoch for step in steps] == [0.4, 0.8, 1.0, 1.4, 1.8, 2.0]
    epochs = [[samples_in(tokens, step.micro_batches) for step in steps[i : i + 3]] for i in (0, 3)]
    for epoch, shown in enumerate(epochs):
        assert sorted(itertools.chain(*shown)) == list(range(10))
        order = epoch_order(tokens, 7, epoch).tolist()
        assert [sorted(step) for step in shown] == [sorted(order[i : i + 4]) for i in (0, 4, 8)]
    assert epochs[0] != epochs[1]


def test_the_comparison_of_splits_sees_a_wrong_window():
    """Negative control: another seed changes what each step shows, and the checks above would say so."""
    tokens = token_set(LENGTHS)
    first, other = steps_of(tokens, 0, 1, 1)[0], steps_of(tokens, 0, 1, 1, seed=8)[0]
    assert targets_in(first.micro_batches) != targets_in(other.micro_batches)
    half = steps_of(tokens, 0, 2, 1)[0]
    assert len(targets_in(half.micro_batches)) < half.num_targets


@pytest.mark.parametrize(("consumed", "done"), [(0, 0), (4, 1), (8, 2), (10, 3), (14, 4), (20, 6)])
def test_resumed_steps_are_those_of_the_uninterrupted_run(consumed, done):
    tokens = token_set(LENGTHS)
    whole, rest = steps_of(tokens, 1, 2, 8), steps_of(tokens, 1, 2, 8 - done, num_samples_consumed=consumed)
    assert sum(step.num_samples for step in whole[:done]) == consumed
    for own, other in zip(whole[done:], rest, strict=True):
        assert own.epoch == other.epoch
        for a, b in zip(own.micro_batches, other.micro_batches, strict=True):
            assert all(same(a[key], b[key]) for key in a)


def same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_resuming_where_no_step_ends_is_refused():
    with pytest.raises(RecipeError, match=r"global_batch_size is 4, .* has consumed 3 samples of an epoch"):
        steps_of(token_set(LENGTHS), 0, 1, 1, num_samples_consumed=13)


@pytest.mark.parametrize(("num_ranks", "micro_batch_size"), [(1, 1), (1, 4), (2, 3), (3, 1), (4, 4)])
def test_evaluation_shows_every_sample_once_longest_first(num_ranks, micro_batch_size):
    tokens = token_set(LENGTHS)
    ranks = [
        list(
            eval_batches(tokens, Layout(num_ranks=num_ranks, rank=rank, pad_id=PAD, micro_batch_size=micro_batch_size))
        )
        for rank in range(num_ranks)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    together = list(itertools.chain(*ranks))
    assert sorted(samples_in(tokens, together)) == list(range(10))
    assert len(targets_in(together)) == tokens.num_targets.sum()
    assert ranks[0][0]["input_ids"].shape[1] == 30
    for batches in ranks:
        widths = [batch["input_ids"].shape[1] for batch in batches]
        assert widths == sorted(widths, reverse=True)


# Packing, and limits in tokens.


def unpacked(batch):
    """The sequences of a packed micro-batch as (ids, positions, targets), read off its lengths alone."""
    rows = (batch["input_ids"], batch["position_ids"], to_grid(batch))
    assert all(row.shape == (1, sum(batch["lengths"])) for row in rows)
    split = zip(*(row[0].split(list(batch["lengths"])) for row in rows), strict=True)
    return [tuple(part.tolist() for part in parts) for parts in split]


def test_packed_samples_by_hand():
    tokens = token_set([3, 2], is_label=[0, 1, 0, 1, 1])
    batch = collate(tokens, [1, 0], pad_id=9, packing=True)
    assert plain(batch) == {
        "input_ids": [[4, 5, 1, 2, 3]],
        "position_ids": [[0, 1, 0, 1, 2]],
        # Not 1 after 5: no sample is the target of another.
        "targets": [5, 2],
        "target_positions": [0, 2],
        "target_sequences": [0, 1],
        "num_sequences": 2,
        "lengths": (2, 3),
        "offsets": [0, 2, 5],
    }
    # What torch's kernel for ragged samples wants.
    assert batch["offsets"].dtype == torch.int32
    others = {name: tensor for name, tensor in batch.items() if name not in ("lengths", "offsets", "num_sequences")}
    assert all(tensor.dtype == torch.int64 for tensor in others.values())
    # A tensor would be moved to the device by what wraps the model, and asking for it there costs a wait.
    assert [type(length) for length in batch["lengths"]] == [int, int]


def test_packed_micro_batch_without_samples():
    assert plain(collate(token_set([3]), [], pad_id=9, packing=True)) == {
        "input_ids": [[9, 9]],
        "position_ids": [[0, 1]],
        "targets": [],
        "target_positions": [],
        "target_sequences": [],
        "num_sequences": 0,
        "lengths": (2,),
        "offsets": [0, 2],
    }


def test_rows_of_a_multiple_by_hand():
    tokens = token_set([3, 2], is_label=[0, 1, 0, 1, 1])
    padded = collate(tokens, [1, 0], pad_id=9, multiple=4)
    assert padded["input_ids"].tolist() == [[4, 5, 9, 9], [1, 2, 3, 9]]
    assert (padded["targets"].tolist(), padded["target_positions"].tolist()) == ([5, 2], [0, 4])
    packed = collate(tokens, [1, 0], pad_id=9, packing=True, multiple=4)
    assert packed["input_ids"].tolist() == [[4, 5, 1, 2, 3, 9, 9, 9]]
    assert packed["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]]
    assert (packed["lengths"], packed["offsets"].tolist()) == ((2, 3, 3), [0, 2, 5, 8])
    assert (packed["targets"].tolist(), packed["num_sequences"]) == ([5, 2], 2)
    assert collate(tokens, [1, 0], pad_id=9, packing=True, multiple=5)["lengths"] == (2, 3)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_budget_of_tokens_counts_what_rows_are_padded_with(packing):
    tokens = token_set(LENGTHS)
    limit = {"micro_batch_tokens": 32, "packing": packing}
    for step in steps_of(tokens, 0, 1, 6, length_multiple=8, **limit):
        sizes = [batch["input_ids"].shape for batch in step.micro_batches]
        assert all(rows * length <= 32 and length % 8 == 0 for rows, length in sizes)
    loose = [batch["input_ids"].shape for step in steps_of(tokens, 0, 1, 6, **limit) for batch in step.micro_batches]
    assert any(length % 8 for _, length in loose)


def plain(batch):
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


LIMITS = [
    {"micro_batch_size": 1},
    {"micro_batch_size": 3},
    {"micro_batch_tokens": 30},
    {"micro_batch_tokens": 37},
    {"micro_batch_tokens": 10_000},
]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: "-".join(f"{key[12:]}{limit[key]}" for key in limit))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_packing_limit_and_ranks_do_not_change_what_a_step_shows(num_ranks, limit, packing):
    tokens = token_set(LENGTHS)
    expected = steps_of(tokens, 0, 1, 6)
    ranks = [steps_of(tokens, rank, num_ranks, 6, packing=packing, **limit) for rank in range(num_ranks)]
    for step, shares in zip(expected, zip(*ranks, strict=True), strict=True):
        assert len({len(share.micro_batches) for share in shares}) == 1
        batches = [batch for share in shares for batch in share.micro_batches]
        assert targets_in(batches) == targets_in(step.micro_batches)
        if packing:
            alone = sorted(
                unpacked(collate(tokens, [i], PAD, packing=True))[0] for i in samples_in(tokens, step.micro_batches)
            )
            shown = sorted(sequence for batch in batches for sequence in unpacked(batch))
            assert [sequence for sequence in shown if sequence[0] != [PAD, PAD]] == alone
        for share in shares:
            counts = (share.num_targets, share.num_tokens, share.num_samples, share.epoch)
            assert counts == (step.num_targets, step.num_tokens, step.num_samples, step.epoch)
        if "micro_batch_tokens" in limit:
            assert all(batch["input_ids"].numel() <= limit["micro_batch_tokens"] for batch in batches)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("limit", [{"micro_batch_size": 2}, {"micro_batch_tokens": 37, "length_multiple": 4}], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_padding_of_an_epoch_is_what_its_batches_have(num_ranks, limit, packing):
    tokens, limit = token_set(LENGTHS), limit | {"packing": packing}
    steps = [step for rank in range(num_ranks) for step in steps_of(tokens, rank, num_ranks, 3, **limit)]
    batches = [batch["input_ids"] for step in steps for batch in step.micro_batches if batch["num_sequences"]]
    layout = Layout(num_ranks=num_ranks, rank=0, pad_id=PAD, **limit)
    waste = measure(tokens, epoch_order(tokens, 7, 0), layout, global_batch_size=4)
    assert waste.padding == pytest.approx(1 - sum(LENGTHS) / sum(ids.numel() for ids in batches))
    assert waste.forwards == pytest.approx(len(batches) / 3 / num_ranks)


@pytest.mark.parametrize(
    ("packing", "expected"),
    # Packed 9 + 3 = 12 and 4 + 4 + 4 = 12; padded 2 x 9 is too much, and so is 4 x 4.
    [(True, [[9, 3], [4, 4, 4], [2, 1]]), (False, [[9], [3, 4, 4], [4, 2, 1]])],
    ids=["packed", "padded"],
)
def test_cuts_by_tokens_by_hand(packing, expected):
    lengths = [9, 3, 4, 4, 4, 2, 1]
    layout = Layout(num_ranks=1, rank=0, pad_id=PAD, micro_batch_tokens=12, packing=packing)
    cuts = split_micro_batches(np.array(lengths)[:, None], range(7), layout)
    assert [[lengths[i] for i in cut] for cut in cuts] == expected


def test_the_number_of_forwards_is_that_of_the_rank_with_most():
    # 12 to rank 0; 9 and 4 to rank 1, now full; 2 to rank 0. With 13 tokens a forward, rank 0 needs two.
    tokens = token_set([12, 9, 4, 2])
    layouts = [Layout(num_ranks=2, rank=rank, pad_id=PAD, micro_batch_tokens=13, packing=True) for rank in (0, 1)]
    steps = [next(train_steps(tokens, layout, seed=0, global_batch_size=4)) for layout in layouts]
    assert [[batch["lengths"] for batch in step.micro_batches] for step in steps] == [
        [(12,), (2,)],
        [(9, 4), (2,)],
    ]
    assert [targets_in(step.micro_batches[1:]) for step in steps] == [[27], []]


# Pairs.


def pair_set(pairs, reference=False):
    """Token set of (chosen, rejected) lengths."""
    tokens = token_set([length for pair in pairs for length in pair])
    logps = -np.arange(1.0, 2 * len(pairs) + 1) if reference else None
    return dataclasses.replace(tokens, group_size=2, reference_logps=logps)


PAIRS = [(3, 5), (2, 9), (4, 4), (7, 2), (6, 6), (2, 3), (8, 5)]


def sequences_in(batch):
    """(sequence, its targets), by `target_sequences` alone."""
    numbers = batch["target_sequences"]
    return [(int(n), batch["targets"][numbers == n].tolist()) for n in numbers.unique()]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_pair_micro_batch_by_hand(packing):
    tokens = pair_set([(2, 3), (2, 2), (2, 2)], reference=True)
    batch = collate(tokens, [2, 0], PAD, packing=packing)
    expected = [[10, 11, 0], [12, 13, 0], [1, 2, 0], [3, 4, 5]]
    if packing:
        expected = [[10, 11, 12, 13, 1, 2, 3, 4, 5]]
    assert batch["input_ids"].tolist() == expected
    assert batch["targets"].tolist() == [11, 13, 2, 4, 5]
    assert batch["target_sequences"].tolist() == [0, 1, 2, 3, 3]
    assert batch["reference_logps"].tolist() == [-5.0, -6.0, -1.0, -2.0]
    assert batch["reference_logps"].dtype == torch.float64 and batch["target_sequences"].dtype == torch.int64
    empty = collate(tokens, [], PAD, packing=packing)
    assert empty["reference_logps"].shape == empty["target_sequences"].shape == (0,)
    assert "reference_logps" not in collate(pair_set([(2, 3)]), [0], PAD, packing=packing)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_sample_keeps_its_value(packing):
    tokens = dataclasses.replace(token_set([3, 2, 4]), values=np.array([1.0, 0.0, 0.5]))
    batch = collate(tokens, [2, 0], PAD, packing=packing)
    assert batch["values"].tolist() == [0.5, 1.0] and batch["values"].dtype == torch.float64
    assert collate(tokens, [], PAD, packing=packing)["values"].shape == (0,)
    assert dataclasses.replace(tokens, values=tokens.values[::-1]).fingerprint != tokens.fingerprint


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("limit", [{"micro_batch_size": 2}, {"micro_batch_tokens": 18}], ids=["pairs", "tokens"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_pairs_stay_together_and_each_is_shown_once_an_epoch(num_ranks, limit, packing):
    tokens = pair_set(PAIRS, reference=True)
    ranks = [steps_of(tokens, rank, num_ranks, 2, packing=packing, **limit) for rank in range(num_ranks)]
    assert [step.num_samples for step in ranks[0]] == [4, 3]
    assert steps_per_epoch(tokens, 4) == 2
    seen = []
    for shares in zip(*ranks, strict=True):
        assert len({len(share.micro_batches) for share in shares}) == 1
        batches = [batch for share in shares for batch in share.micro_batches]
        assert shares[0].num_targets == len(targets_in(batches))
        for batch in batches:
            if not len(batch["reference_logps"]):
                continue
            numbers, targets = zip(*sequences_in(batch), strict=True)
            assert numbers == tuple(range(len(batch["reference_logps"])))
            firsts = [tokens.offsets[:-1].tolist().index(target[0] - 2) for target in targets]
            for chosen, rejected in zip(firsts[::2], firsts[1::2], strict=True):
                assert rejected == chosen + 1 and chosen % 2 == 0
            assert [-first - 1.0 for first in firsts] == batch["reference_logps"].tolist()
            seen += firsts
            if "micro_batch_tokens" in limit:
                assert batch["input_ids"].numel() <= 18
    assert sorted(seen) == list(range(14))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("limit", [{"micro_batch_size": 2}, {"micro_batch_tokens": 18}], ids=["pairs", "tokens"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_results_by_sequence_add_up_over_ranks(num_ranks, limit, packing):
    """Each rank does as for reference log-probabilities, with the sum of a sequence's targets as its result."""
    tokens = pair_set(PAIRS)
    whole, counts = np.zeros(14), set()
    for rank in range(num_ranks):
        layout = Layout(num_ranks=num_ranks, rank=rank, pad_id=PAD, packing=packing, **limit)
        batches = list(indexed_batches(tokens, layout))
        counts.add(len(batches))
        for batch, index in batches:
            if len(index):
                sums = torch.zeros(len(index), dtype=torch.int64)
                sums.index_add_(0, batch["target_sequences"], batch["targets"])
                whole[index.numpy()] += sums.numpy()
    assert len(counts) == 1
    assert whole.tolist() == [tokens.ids[a + 1 : b].sum() for a, b in itertools.pairwise(tokens.offsets)]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_sequences_of_one_length_keep_their_order_on_every_processor(num_ranks: int):
    """Ranks that sorted them otherwise, as numpy's fastest way does by the processor, would leave some out."""
    lengths = [2 + i * 7 % 3 for i in range(60)]
    expected = sorted(range(60), key=lambda i: -lengths[i])
    for rank in range(num_ranks):
        layout = Layout(num_ranks=num_ranks, rank=rank, pad_id=PAD, micro_batch_size=4)
        indices = [i for _, index in indexed_batches(token_set(lengths), layout) for i in index.tolist()]
        assert indices == expected[rank::num_ranks]


# Mixtures.


def mixture(sizes, weights):
    return dataclasses.replace(token_set([2] * sum(sizes)), part_sizes=tuple(sizes), weights=tuple(weights))


def shown_in(tokens, epoch, seed=3):
    """How often an epoch shows each sample of each source."""
    counts = np.bincount(epoch_order(tokens, seed, epoch), minlength=len(tokens))
    return [part.tolist() for part in np.split(counts, np.cumsum(tokens.part_sizes)[:-1])]


def test_without_weights_the_order_of_several_sources_is_that_of_one():
    order = epoch_order(token_set([2] * 9), 3, 1).tolist()
    assert epoch_order(mixture([4, 5], []), 3, 1).tolist() == order
    assert epoch_order(mixture([4, 5], [1.0, 1.0]), 3, 1).tolist() == order
    # numpy's legacy generator, written out: an upgrade must not change the order of a run that is resumed.
    assert order == np.random.RandomState([3, 1]).permutation(9).tolist()


def test_a_whole_weight_shows_each_row_that_often():
    assert shown_in(mixture([3, 4], [2.0, 1.0]), 0) == [[2] * 3, [1] * 4]


def test_a_quarter_shows_another_quarter_in_each_epoch():
    tokens = mixture([8, 3], [0.25, 1.0])
    epochs = [np.array(shown_in(tokens, epoch)[0]) for epoch in range(5)]
    assert [epoch.sum() for epoch in epochs] == [2] * 5
    assert sum(epochs[:4]).tolist() == [1] * 8
    assert epochs[4].tolist() == epochs[0].tolist()
    assert steps_per_epoch(tokens, 2) == 3  # 2 + 3 samples
    # Another seed, another quarter; and the quarter is no run of neighbours for every seed.
    assert len({tuple(shown_in(tokens, 0, seed)[0]) for seed in range(20)}) > 5


@pytest.mark.parametrize(("size", "weight", "count"), [(10, 0.25, 3), (3, 0.01, 1), (10, 1.5, 15), (7, 0.5, 4)])
def test_any_weight_evens_out_over_epochs(size, weight, count):
    tokens = mixture([size], [weight])
    shown = np.zeros(size, dtype=int)
    for epoch in range(25):
        times = np.array(shown_in(tokens, epoch)[0])
        assert times.sum() == count and times.max() - times.min() <= 1
        shown += times
        assert shown.max() - shown.min() <= 1


def test_resuming_a_mixture_goes_on_where_it_stood():
    tokens = mixture([8, 3], [0.25, 2.0])  # 2 + 6 samples an epoch
    whole, rest = steps_of(tokens, 1, 2, 9), steps_of(tokens, 1, 2, 4, num_samples_consumed=20)
    for own, other in zip(whole[5:], rest, strict=True):
        assert own.epoch == other.epoch
        assert targets_in(own.micro_batches) == targets_in(other.micro_batches)
