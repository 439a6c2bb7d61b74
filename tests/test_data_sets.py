"""Protects the sets of a recipe: several sources, what is held out, and streams.

python -m pytest -q tests/test_data_sets.py
"""

import itertools
import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import PAD, chat, make_tokenizer, write_lines

from cookbook.config.objectives import Objective
from cookbook.config.sections import DataSection
from cookbook.system.files import RecipeError
from cookbook.training.data.batches import Layout, StepBatch, steps_per_epoch, train_steps
from cookbook.training.data.sets import TokenSets, read_data, read_eval, tokenize_data
from cookbook.training.data.stream import Stream
from cookbook.training.models.tokenizer_files import train_tokenizer

SFT = Objective.of()


def text_file(path, *texts):
    return write_lines(path, *(json.dumps({"text": text}) for text in texts))


def words(count, start=0):
    """Texts that are all different."""
    return [f"w{i}" for i in range(start, start + count)]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def prepare(data, tokenizer, cache, objective=SFT):
    return tokenize_data(read_data(data, objective), tokenizer, data, objective, cache=cache)


def decoded(tokens, tokenizer):
    spans = itertools.pairwise(tokens.offsets)
    return [tokenizer.decode(tokens.ids[a:b].tolist(), skip_special_tokens=True) for a, b in spans]


# Sources together.


def test_sources_of_several_kinds_stand_in_order_and_evaluation_sets_apart(tmp_path, tokenizer):
    first = text_file(tmp_path / "one.jsonl", "a", "b")
    two = write_lines(tmp_path / "two.jsonl", json.dumps(chat("q", "y")), json.dumps({"id": 1}))
    data = DataSection(
        train=[{"path": first, "weight": 2.0}, two], eval={"x": first, "y": two}, on_bad_row="drop", max_length=21
    )
    sets = prepare(data, tokenizer, tmp_path / "cache")
    texts = decoded(sets.train, tokenizer)
    assert texts[:2] == ["a", "b"] and texts[2].startswith("user\nq") and len(texts) == 3
    assert (sets.train.part_sizes, sets.train.weights) == ((2, 1), (2.0, 1.0))
    assert steps_per_epoch(sets.train, 1) == 5
    assert {name: len(tokens) for name, tokens in sets.eval.items()} == {"x": 2, "y": 1}
    long = "are longer than data.max_length 21 and are cut there; 23 would keep 99% whole"
    assert sets.notes == [
        "data.train: dropped 1 row: missing keys",
        f"data.train: 1 of 3 rows (33.3%) {long}",
        # Twice the end of "a" and of "b", which nothing but a first token precedes; once the "y", cut before its end.
        f"data.train: an epoch has 5 samples: {first} 4 samples (80% of them, 80% of the trained tokens), "
        f"{two} 1 samples (20% of them, 20% of the trained tokens)",
        "data.eval.y: dropped 1 row: missing keys",
        f"data.eval.y: 1 of 1 rows (100.0%) {long}",
    ]


def test_mistakes_of_all_sources_are_reported_together_with_their_places(tmp_path, tokenizer):
    bad = [text_file(tmp_path / f"{name}.jsonl", "a", "") for name in "xyz"]
    with pytest.raises(RecipeError) as error:
        read_data(DataSection(train=bad[:2], eval=bad[2]), SFT)
    assert [line.split(": ")[0] for line in error.value.mistakes if "empty" in line] == [f"{path}:2" for path in bad]
    rows = read_data(DataSection(train=bad, on_bad_row="drop"), SFT)
    assert [part.where(0) for part in rows.train] == [f"data.train.{i} ({path}): row 1" for i, path in enumerate(bad)]


@pytest.mark.parametrize("held_out", [{"eval": {"one": "a", "two": "b"}}, {"eval": "a"}, {"holdout": 0.5}], ids=str)
def test_the_held_out_rows_alone_are_those_of_all_with_their_places(tmp_path, held_out: dict):
    paths = {name: text_file(tmp_path / f"{name}.jsonl", *(f"{name} {i}" for i in range(8))) for name in "ab"}
    written = json.dumps({"train": "b"} | held_out)
    for name, path in paths.items():
        written = written.replace(f'"{name}"', json.dumps(str(path)))
    data = DataSection(**json.loads(written))
    expected = read_data(data, SFT).eval
    assert read_eval(data, SFT) == expected
    places = {rows.place for parts in expected.values() for rows in parts}
    assert places == {"data.train"} if "holdout" in held_out else all(place.startswith("data.eval") for place in places)


def test_one_source_has_the_texts_and_the_place_it_always_had(tmp_path):
    rows = read_data(DataSection(train=text_file(tmp_path / "x.jsonl", "a", "b")), SFT)
    assert list(rows.texts()) == ["a", "b"] and rows.train[0].where(1) == "data.train: row 2"
    other = read_data(DataSection(train=text_file(tmp_path / "y.jsonl", "a", "c")), SFT)
    assert rows.fingerprint != other.fingerprint


def test_a_number_of_rows_of_each_source_is_used_in_an_epoch_and_others_in_the_next(tmp_path, tokenizer):
    first, two = (text_file(tmp_path / f"{name}.jsonl", *words(5, start)) for name, start in (("one", 0), ("two", 5)))
    data = DataSection(train=[{"path": first, "rows_per_epoch": 2}, {"path": two, "rows_per_epoch": 7}], max_length=8)
    sets = prepare(data, tokenizer, tmp_path / "cache")
    assert f"{first} 2 samples (22% of them, 22% of the trained tokens), {two} 7 samples (78%" in sets.notes[-1]
    order = [text for (text,) in shown(stream_steps(sets.train, 45, size=1), tokenizer)]
    used = [Counter(order[i : i + 9]) for i in range(0, 45, 9)]
    for epoch in used:
        assert sum(epoch[text] for text in words(5)) == 2 and sum(epoch.values()) == 9
    assert sum(used, Counter()) == Counter(dict.fromkeys(words(5), 2) | dict.fromkeys(words(5, 5), 7))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train": [{"path": "a.jsonl", "weight": 1, "rows_per_epoch": 2}]}, "weight 1 and rows_per_epoch 2 are both"),
        ({"train": "a.jsonl", "eval": {"x": {"path": "b.jsonl", "rows_per_epoch": 2}}}, "rows_per_epoch of 'b.jsonl'"),
        ({"train": [{"path": "a.jsonl", "rows_per_epoch": 2}, "b.jsonl"], "streaming": True}, "'b.jsonl' is missing"),
        ({"train": {"path": "a.jsonl", "weight": 2}, "streaming": True}, "write rows_per_epoch for each source"),
    ],
)
def test_a_number_of_rows_that_would_not_be_used_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        DataSection.model_validate(settings)


# Holdout.


def held_out(*files, share=0.3):
    rows = read_data(DataSection(train=list(files), holdout=share), SFT)
    return {text for part in rows.eval["holdout"] for text in (row["text"] for row in part.rows)}, set(rows.texts())


def test_equal_rows_fall_on_one_side_whatever_the_order_and_the_sources(tmp_path):
    texts = words(200) * 2
    file = text_file(tmp_path / "one.jsonl", *texts)
    out, kept = held_out(file)
    assert not out & kept and out | kept == set(texts)
    assert 40 < len(out) < 80  # 60 expected; 6.5 is one standard deviation
    backwards = text_file(tmp_path / "backwards.jsonl", *texts[::-1])
    halves = [text_file(tmp_path / f"{i}.jsonl", *texts[i::2]) for i in (0, 1)]
    assert held_out(backwards) == held_out(*halves) == (out, kept)
    # A larger share only adds, and a row does not care for its neighbours.
    assert out < held_out(file, share=0.5)[0]
    assert held_out(text_file(tmp_path / "half.jsonl", *words(100)))[0] == out & set(words(100))


def test_holdout_is_an_evaluation_set_and_never_trained_on(tmp_path, tokenizer):
    path = text_file(tmp_path / "x.jsonl", *words(60))
    data = DataSection(train=path, eval=path, holdout=0.25)
    sets = prepare(data, tokenizer, tmp_path / "cache")
    assert sorted(sets.eval) == ["", "holdout"]
    train, out = (set(decoded(tokens, tokenizer)) for tokens in (sets.train, sets.eval["holdout"]))
    assert not train & out and train | out == set(words(60)) == set(decoded(sets.eval[""], tokenizer))


@pytest.mark.parametrize(("share", "taken"), [(1e-9, "none"), (1 - 1e-9, "all")])
def test_holdout_that_leaves_a_side_empty_is_refused(tmp_path, share, taken):
    path = text_file(tmp_path / "x.jsonl", *words(9))
    with pytest.raises(RecipeError, match=f"data.holdout is {share}: it takes {taken} of the 9 rows of data.train"):
        read_data(DataSection(train=path, holdout=share), SFT)


def test_a_row_keeps_its_number_when_others_are_held_out(tmp_path, tokenizer):
    rows = read_data(DataSection(train=text_file(tmp_path / "x.jsonl", *words(50)), holdout=0.5), SFT)
    for part in (*rows.train, *rows.eval["holdout"]):
        assert [part.where(i) for i in range(len(part.rows))] == [
            f"data.train: row {int(row['text'][1:]) + 1}" for row in part.rows
        ]


# Streams.


def stream_of(paths, tokenizer, objective=SFT, **settings):
    settings = {"shuffle_rows": 4, "max_length": 8} | settings
    data = DataSection(train=paths, streaming=True, **settings)
    return prepare(data, tokenizer, None, objective).train


def stream_steps(stream, count, *, consumed=0, size=3, **layout):
    layout = Layout(**{"num_ranks": 1, "rank": 0, "pad_id": PAD, "micro_batch_size": 1} | layout)
    steps = train_steps(stream, layout, seed=5, global_batch_size=size, num_samples_consumed=consumed)
    return list(itertools.islice(steps, count))


def shown(steps, tokenizer):
    """The texts of each step, sorted."""
    return [
        sorted(
            text for batch in step.micro_batches for text in tokenizer.batch_decode(batch["input_ids"], True) if text
        )
        for step in steps
    ]


def slow_stream(samples_of_block, num_samples, seed=5):
    """The order that a stream must have: all blocks of an epoch listed, each permuted, epoch after epoch."""
    order, epoch = [], 0
    while len(order) < num_samples:
        for block, samples in enumerate(samples_of_block):
            for i in np.random.RandomState([seed, epoch, block]).permutation(len(samples)):
                order.append(samples[i])
        epoch += 1
    return order[:num_samples]


def test_stream_is_the_blocks_of_its_sources_permuted_one_pass_after_the_other(tmp_path, tokenizer):
    paths = [text_file(tmp_path / "a.jsonl", *words(7)), text_file(tmp_path / "b.jsonl", *words(3, start=7))]
    blocks = [words(10)[i : i + 4] for i in (0, 4, 8)]
    stream = stream_of(paths, tokenizer)
    steps = stream_steps(stream, 12)
    order = slow_stream(blocks, 36)
    assert shown(steps, tokenizer) == [sorted(order[i : i + 3]) for i in range(0, 36, 3)]
    assert [step.num_samples for step in steps] == [3] * 12  # steps go over the ends of blocks and passes
    assert [step.epoch for step in steps[:4]] == [0, 0, 0, 1] and steps[-1].epoch == 3
    assert Counter(order[:10]) == Counter(order[10:20]) and order[:10] != order[10:20]
    assert steps_per_epoch(stream, 3) is None


def slow_mixture(sources, counts, num_samples, seed=5):
    """A stream of so many rows of each source a pass, in blocks of 4, each permuted; sources begin again at the end."""
    turns, order, epoch = [itertools.cycle(source) for source in sources], [], 0
    while len(order) < num_samples:
        taken = [0] * len(sources)
        for block, end in enumerate(range(4, sum(counts) + 4, 4)):
            samples = []
            for i, count in enumerate(counts):
                upto = count * min(end, sum(counts)) // sum(counts)
                samples += itertools.islice(turns[i], upto - taken[i])
                taken[i] = upto
            order += [samples[i] for i in np.random.RandomState([seed, epoch, block]).permutation(len(samples))]
        assert taken == counts
        epoch += 1
    return order[:num_samples]


@pytest.mark.parametrize("consumed", [0, 1, 7, 8, 9, 20, 41])
def test_a_streamed_mixture_takes_so_many_rows_of_each_source_and_resumes_exactly(tmp_path, tokenizer, consumed):
    sources = words(7), words(3, start=7)
    paths = [text_file(tmp_path / f"{i}.jsonl", *texts) for i, texts in enumerate(sources)]
    mixed = [{"path": path, "rows_per_epoch": count} for path, count in zip(paths, (3, 5), strict=True)]
    stream = stream_of(mixed, tokenizer)
    steps = stream_steps(stream, 6, consumed=consumed)
    order = slow_mixture(sources, [3, 5], consumed + 18)[consumed:]
    assert shown(steps, tokenizer) == [sorted(order[i : i + 3]) for i in range(0, 18, 3)]
    assert [step.epoch for step in steps] == [(consumed + 3 * i - 1) // 8 for i in range(1, 7)]
    again = stream_of(mixed, tokenizer).windows(
        seed=5, global_batch_size=3, num_samples_consumed=consumed + 3, digest=steps[0].stream_digest
    )
    assert next(again).digest == steps[1].stream_digest
    assert stream.fingerprint(tmp_path / "cache") != stream_of(paths, tokenizer).fingerprint(tmp_path / "cache")
    data = DataSection(train=mixed, streaming=True, max_length=8)
    notes = prepare(data, tokenizer, None).notes
    assert notes == [f"data.train: an epoch has 8 rows: {paths[0]} 3 (38%), {paths[1]} 5 (62%)"]


@pytest.mark.parametrize("consumed", [1, 3, 4, 9, 10, 12, 25, 30, 47])
def test_resumed_stream_goes_on_at_the_next_sample(tmp_path, tokenizer, consumed):
    path = text_file(tmp_path / "a.jsonl", *words(10))
    blocks = [words(10)[i : i + 4] for i in (0, 4, 8)]
    steps = stream_steps(stream_of([path], tokenizer), 5, consumed=consumed)
    order = slow_stream(blocks, consumed + 15)[consumed:]
    assert shown(steps, tokenizer) == [sorted(order[i : i + 3]) for i in range(0, 15, 3)]


def test_stream_shows_the_same_on_any_number_of_ranks(tmp_path, tokenizer):
    path = text_file(tmp_path / "a.jsonl", *(word * (1 + i % 3) for i, word in enumerate(words(10))))
    steps = stream_steps(stream_of([path], tokenizer), 6)
    for num_ranks in (2, 3):
        ranks = [
            stream_steps(stream_of([path], tokenizer), 6, num_ranks=num_ranks, rank=rank) for rank in range(num_ranks)
        ]
        for step, shares in zip(steps, zip(*ranks, strict=True), strict=True):
            together = sorted(text for share in shares for text in shown([share], tokenizer)[0])
            assert [together] == shown([step], tokenizer)
            assert {(share.num_targets, share.num_tokens, share.num_samples, share.epoch) for share in shares} == {
                (step.num_targets, step.num_tokens, step.num_samples, step.epoch)
            }


def test_stream_of_long_texts_counts_their_pieces(tmp_path, tokenizer):
    texts = ["abcdefghijklmnop", "x", "qrstuvwxyzabcdef"]
    cpt = Objective.of(name="cpt")
    stream = stream_of([text_file(tmp_path / "a.jsonl", *texts)], tokenizer, cpt, shuffle_rows=2)
    blocks = [["abcdefgh", "hijklmno", "op", "x"], ["qrstuvwx", "xyzabcde", "ef"]]
    steps, order = stream_steps(stream, 6), slow_stream(blocks, 18)
    assert shown(steps, tokenizer) == [sorted(order[i : i + 3]) for i in range(0, 18, 3)]


@pytest.mark.parametrize("place", ["a.jsonl", ""], ids=["a file", "a folder"])
def test_a_stream_whose_source_grew_is_other_data(tmp_path, tokenizer, place):
    """A count of samples would resume it elsewhere, once its first pass is over."""
    (tmp_path / "rows").mkdir()
    first = Path(text_file(tmp_path / "rows/a.jsonl", *words(10)))
    digests = []
    for num_words in (10, 10, 11):
        grown = first if place else first.with_name("b.jsonl")
        text_file(first, *words(10))
        text_file(grown, *words(num_words if place else num_words - 9))
        digests.append(stream_of([str(tmp_path / "rows" / place)], tokenizer).fingerprint(tmp_path / "cache"))
    assert digests[0] == digests[1] != digests[2]


def test_stream_holds_two_blocks_at_most(tmp_path, tokenizer, monkeypatch):
    path = text_file(tmp_path / "a.jsonl", *words(400))
    read, lock = [0], threading.Lock()
    import cookbook.training.data.rows as rows

    def counted(source, **options):
        for item in raw_rows(source, **options):
            with lock:
                read[0] += 1
            yield item

    raw_rows = rows.raw_rows
    monkeypatch.setattr(rows, "raw_rows", counted)
    stream = stream_of([path], tokenizer)
    assert read[0] == 4  # of the first block, which a tokenizer could be trained on
    read[0] = 0
    layout = Layout(num_ranks=1, rank=0, pad_id=PAD, micro_batch_size=1)
    for i, _ in enumerate(itertools.islice(train_steps(stream, layout, seed=0, global_batch_size=1), 50), start=1):
        assert read[0] <= i + 8


def test_bad_row_of_a_stream_stops_it_with_its_place_or_is_dropped_and_counted(tmp_path, tokenizer):
    path = text_file(tmp_path / "a.jsonl", *words(6), "", *words(3))
    stream = stream_of([path], tokenizer, shuffle_rows=4)
    with pytest.raises(RecipeError, match=r"a\.jsonl:7: empty text"):
        stream_steps(stream, 3)
    with pytest.raises(RecipeError, match=r"a\.jsonl:7: empty text"):
        stream_of([path], tokenizer, shuffle_rows=20)
    stream = stream_of([path], tokenizer, on_bad_row="drop")
    assert sum(map(len, shown(stream_steps(stream, 3), tokenizer))) == 9
    assert stream.first_pass.num_dropped == {"empty text": 1}


def test_what_a_stream_dropped_and_cut_is_reported_once_however_many_passes_there_were(tmp_path, tokenizer):
    path = text_file(tmp_path / "a.jsonl", *words(6), "w" * 20, "", *words(3), "")
    data = DataSection(train=path, streaming=True, shuffle_rows=5, max_length=8, on_bad_row="drop")
    cut = "data.train: 1 of 10 rows (10.0%) are longer than data.max_length 8 and are cut there"
    # Blocks of five: the first without a fault, the second with one dropped and one cut; the last row follows them.
    expected = {1: [], 2: ["data.train: dropped 1 row: empty text", cut]}
    expected[4] = expected[12] = ["data.train: dropped 2 rows: empty text", cut]
    for num_steps, notes in expected.items():
        sets = prepare(data, tokenizer, tmp_path)
        assert sets.closing_notes() == []
        stream_steps(sets.train, num_steps)
        assert sets.closing_notes() == notes


def test_first_block_of_a_stream_is_what_training_begins_with(tmp_path, tokenizer):
    stream = stream_of([text_file(tmp_path / "a.jsonl", *words(10))], tokenizer)
    block, order = stream.first_block(seed=5)
    steps = stream_steps(stream, 4, size=1)
    begin = [decoded(block, tokenizer)[i] for i in order]
    assert begin == slow_stream([words(10)[:4]], 4) == [text for (text,) in shown(steps, tokenizer)]


def test_stream_of_which_nothing_is_left_ends_with_an_error(tmp_path, tokenizer):
    rows = [json.dumps({"prompt": "p" * 20, "completion": "c"})]
    stream = stream_of([write_lines(tmp_path / "a.jsonl", *rows)], tokenizer, on_bad_row="drop")
    with pytest.raises(RecipeError, match="no row left to train on"):
        stream_steps(stream, 1)


def test_hub_stream_is_fetched_while_it_is_read(tmp_path, tokenizer, monkeypatch):
    import datasets

    def load(path, name, split, revision, streaming):
        assert streaming
        table = datasets.Dataset.from_list([{"text": word, "id": i} for i, word in enumerate(words(6))])
        return table.to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    steps = stream_steps(stream_of(["some/data"], tokenizer), 2)
    assert sorted(itertools.chain(*shown(steps, tokenizer))) == words(6)


def test_a_stream_that_goes_on_with_other_rows_is_refused(tmp_path, tokenizer):
    """Rows before the place that it resumes from, known only by reading them for the Hub's sets."""
    rows = words(10)

    def steps_from(chosen: list[str], num_consumed: int, digest: str | None) -> list[StepBatch]:
        path = write_lines(tmp_path / "a.jsonl", *(json.dumps({"text": word}) for word in chosen))
        layout = Layout(num_ranks=1, rank=0, pad_id=0, micro_batch_size=1)
        stream = stream_of([path], tokenizer)  # blocks of 4
        position = dict(seed=0, global_batch_size=3, num_samples_consumed=num_consumed, stream_digest=digest)
        return list(itertools.islice(train_steps(stream, layout, **position), 5))

    whole = steps_from(rows, 0, None)
    for num_steps in (1, 3, 4):  # in the first block; in the last; in the second pass
        digest = whole[num_steps - 1].stream_digest
        (again, *_) = steps_from(rows, 3 * num_steps, digest)
        assert again.stream_digest == whole[num_steps].stream_digest
        for edited in (["other", *rows[1:]], [rows[1], rows[0], *rows[2:]]):
            with pytest.raises(RecipeError, match="not what the checkpoint was made with"):
                steps_from(edited, 3 * num_steps, digest)
    # What comes later may be other rows: nobody has seen them.
    steps_from([*rows[:8], "other", "rows"], 3, whole[0].stream_digest)


def _append(path: Path) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"text": "more"}) + "\n")


def _replace(path: Path) -> None:
    os.replace(text_file(path.with_suffix(".new"), *words(40, start=100)), path)


def _write_over_in_secret(path: Path) -> None:
    """By other words of the same length, under the time of before, as of a data set of the Hub nothing is known."""
    stat = path.stat()
    other = Path(text_file(path.with_suffix(".new"), *words(35, start=50)))
    assert other.stat().st_size == stat.st_size
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, path)  # at once: the stream reads ahead in a thread, and would see the time in between


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_append, r"rows\.jsonl: has changed while the run reads it"),
        (_replace, r"rows\.jsonl: has changed while the run reads it"),
        (Path.unlink, r"rows\.jsonl: is gone while the run reads it"),
        (lambda path: text_file(path.with_name("rows_new.jsonl"), "new"), r"rows_new\.jsonl: has changed while"),
        (_write_over_in_secret, "pass 2 has other rows than the first, from block 1 of data.shuffle_rows on"),
        (lambda path: path.chmod(0o400), None),
        (lambda path: None, None),
    ],
)
def test_a_stream_whose_rows_change_while_it_is_read_ends(tmp_path: Path, change, message):
    path = Path(text_file(tmp_path / "rows.jsonl", *words(35, start=10)))
    text_file(tmp_path / "rows_after.jsonl", *words(5, start=90))
    data = DataSection(train=str(tmp_path / "rows*.jsonl"), streaming=True, shuffle_rows=5, max_length=8)
    tokenizer = train_tokenizer([" ".join(words(100))], 300)
    stream = Stream(data=data, objective=SFT, tokenizer=tokenizer)
    steps = stream.windows(seed=0, global_batch_size=5, num_samples_consumed=0)
    next(steps)
    if change is _write_over_in_secret:  # of the first pass nothing is known to compare with
        list(itertools.islice(steps, 7))
    change(path)
    if message is None:
        assert [step.epoch for step in itertools.islice(steps, 20)][-1] == 2
        return
    with pytest.raises(RecipeError, match=message):
        list(itertools.islice(steps, 20))


def test_a_stream_is_known_by_what_it_is_read_from_and_with(tmp_path: Path):
    """Edited, shuffled or other rows are other data, as another tokenizer is; a file that was moved is the same."""
    rows = [{"prompt": f"what is {i}", "completion": f"it is {i}"} for i in range(50)]

    def write(name: str, chosen: list[dict]) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in chosen))
        return path

    def fingerprint(path: Path, tokenizer: Any, **settings: Any) -> str:
        data = DataSection(train=str(path), streaming=True, shuffle_rows=5, max_length=8, **settings)
        stream = Stream(data=data, objective=Objective.of(), tokenizer=tokenizer)
        return TokenSets(train=stream, eval={}, notes=[]).fingerprint(tmp_path / "cache")

    words = train_tokenizer(["what is it"], 300)
    first = fingerprint(write("rows.jsonl", rows), words)
    assert fingerprint(write("moved.jsonl", rows), words) == first
    assert fingerprint(write("rows.jsonl", rows), words, packing=True) == first, "it may change in a run that goes on"
    assert fingerprint(write("rows.jsonl", rows[::-1]), words) != first
    # prompt and completion as one exchange
    assert fingerprint(write("rows.jsonl", rows), words, columns={"user": "prompt", "assistant": "completion"}) != first
    assert fingerprint(write("rows.jsonl", rows), words, too_long="drop") != first
    assert fingerprint(write("rows.jsonl", [*rows[:-1], {"prompt": "a", "completion": "b"}]), words) != first
    path = write("rows.jsonl", rows)
    assert fingerprint(path, words) == first
    assert fingerprint(path, train_tokenizer(["completely different words"], 300)) != first
    words.chat_template = words.chat_template + " "
    assert fingerprint(path, words) != first


@pytest.mark.parametrize("labels", [[True, True, True], [True, False, True]])
def test_labels_that_are_all_the_same_are_told(tmp_path, tokenizer, labels):
    """The sources count together: good and bad answers may lie in a file each."""
    objective = Objective.model_validate({"name": "kto_zero"})
    rows = [json.dumps({"prompt": "q", "completion": "a", "label": label}) for label in labels]
    paths = [write_lines(tmp_path / "some.jsonl", *rows[:2]), write_lines(tmp_path / "other.jsonl", rows[2])]
    sets = prepare(DataSection(train=paths, max_length=32), tokenizer, tmp_path / "cache", objective)
    told = [note for note in sets.notes if "the same label" in note]
    alike = "data.train: all 3 samples have the same label or advantage, 1: nothing sets them apart"
    assert told == ([alike] if all(labels) else [])
