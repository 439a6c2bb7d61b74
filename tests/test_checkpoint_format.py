"""Files of runs, and how a checkpoint comes to be whole: one process, no model."""

import errno
import itertools
import json
import os
import pickle
import random
import re
import shutil
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from cookbook.system import faults
from cookbook.training.checkpoint import folder
from cookbook.training.checkpoint import saver as saver_module
from cookbook.training.checkpoint.content import read_content
from cookbook.training.checkpoint.folder import BrokenCheckpoint
from cookbook.training.checkpoint.saver import Saver
from cookbook.training.checkpoint.tensors import Reader, StagedPiece, room_for, write_pieces


def flat_pieces(name: str, whole: torch.Tensor, kind: str, borders: list[int]) -> list[StagedPiece]:
    """The flattened tensor cut at `borders`, as ZeRO and FSDP cut."""
    flat = whole.reshape(-1)
    edges = [0, *borders, len(flat)]
    return [StagedPiece(name, kind, low, 0, flat[None, low:high]) for low, high in itertools.pairwise(edges)]


def column_pieces(name: str, whole: torch.Tensor, kind: str, num_ranks: int) -> list[StagedPiece]:
    """A matrix cut by columns, as tensor parallelism cuts."""
    parts = torch.tensor_split(whole, num_ranks, dim=1)
    starts = [0, *itertools.accumulate(part.shape[1] for part in parts)][:-1]
    return [
        StagedPiece(name, kind, start, whole.shape[1], part.contiguous())
        for start, part in zip(starts, parts, strict=True)
    ]


def cut(how: str, name: str, whole: torch.Tensor, kind: str) -> list[StagedPiece]:
    if how == "columns":
        return column_pieces(name, whole, kind, 3)
    count = whole.numel()
    borders = {"whole": [], "halves": [count // 2], "anywhere": sorted(random.Random(1).sample(range(1, count), 5))}
    return flat_pieces(name, whole, kind, borders[how])


WAYS = ("whole", "halves", "anywhere", "columns")


@pytest.mark.parametrize("chunk", [2**24, 7])
@pytest.mark.parametrize(("written", "wanted"), list(itertools.product(WAYS, WAYS)))
def test_any_cut_is_read_back_as_any_other(tmp_path: Path, monkeypatch, written: str, wanted: str, chunk: int):
    monkeypatch.setattr("cookbook.training.checkpoint.tensors.CHUNK", chunk)
    whole = torch.randn(11, 10)
    paths = []
    for i, piece in enumerate(cut(written, "a.weight", whole, "weight")):
        paths.append(tmp_path / f"{i}.safetensors")
        write_pieces(paths[-1], [piece], room=room_for(["a.weight"]), step=1)
    reader = Reader(paths)
    assert reader.num_elements("a.weight", "weight") == 110
    for piece in cut(wanted, "a.weight", whole, "weight"):
        into = StagedPiece(piece.name, piece.kind, piece.start, piece.stride, torch.full(piece.data.shape, torch.nan))
        reader.read_into(into)
        assert torch.equal(into.data, piece.data)
    assert torch.equal(torch.cat([*reader.parts("a.weight", "weight", 110, torch.float32)]).view(11, 10), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("how", ["anywhere", "columns"])
def test_a_piece_of_another_dtype_has_the_values_of_the_file(tmp_path: Path, how: str, dtype: torch.dtype):
    whole = torch.randn(11, 10)
    write_pieces(tmp_path / "a", cut("whole", "a.weight", whole, "weight"), room=room_for(["a.weight"]), step=1)
    reader = Reader([tmp_path / "a"])
    for piece in cut(how, "a.weight", whole, "weight"):
        into = StagedPiece(piece.name, piece.kind, piece.start, piece.stride, torch.zeros_like(piece.data, dtype=dtype))
        reader.read_into(into)
        assert torch.equal(into.data, piece.data.to(dtype))


def test_a_piece_that_is_not_in_host_memory_is_read_into_host_memory_first(tmp_path: Path):
    """A tensor of the meta device has no memory that a file could be read into."""
    whole = torch.randn(11, 10)
    write_pieces(tmp_path / "a", cut("whole", "a.weight", whole, "weight"), room=room_for(["a.weight"]), step=1)
    elsewhere = torch.zeros(1, 110, device="meta")
    Reader([tmp_path / "a"]).read_into(StagedPiece("a.weight", "weight", 0, 0, elsewhere))
    with pytest.raises(BrokenCheckpoint, match="110 of 111 elements"):
        Reader([tmp_path / "a"]).read_into(StagedPiece("a.weight", "weight", 0, 0, torch.zeros(1, 111, device="meta")))


def test_many_files_are_read_with_few_of_them_open(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("cookbook.training.checkpoint.tensors.MAX_OPEN", 2)
    whole = torch.randn(30, 4)
    paths = []
    for i, piece in enumerate(flat_pieces("a", whole, "weight", list(range(4, 120, 4)))):
        paths.append(tmp_path / f"{i}.safetensors")
        write_pieces(paths[-1], [piece], room=room_for(["a"]), step=1)
    before = len(os.listdir("/proc/self/fd"))
    reader, into = Reader(paths), StagedPiece("a", "weight", 0, 0, torch.zeros(1, 120))
    reader.read_into(into)
    assert len(os.listdir("/proc/self/fd")) - before == 2
    assert torch.equal(into.data, whole.view(1, -1))
    del reader
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_load_reads_into_the_memory_that_is_there(tmp_path: Path):
    """By the kernel's count of resident pages; a mapped file, which is read the other way, would add its own."""
    whole = torch.zeros(1, 2**24)
    write_pieces(tmp_path / "0.safetensors", [StagedPiece("a", "weight", 0, 0, whole)], room=room_for(["a"]), step=1)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    into, before = StagedPiece("a", "weight", 0, 0, torch.ones(1, 2**24)), resident()
    Reader([tmp_path / "0.safetensors"]).read_into(into)
    assert resident() - before < 2**22
    assert not into.data.any()
    with safe_open(tmp_path / "0.safetensors", "pt") as file:
        mapped = file.get_tensor("a|weight|0")
        assert not mapped.any()
        assert resident() - before > 2**25


def test_what_is_missing_is_reported(tmp_path: Path):
    whole = torch.randn(4, 6)
    first = column_pieces("a", whole, "weight", 2)[0]
    write_pieces(tmp_path / "0.safetensors", [first], room=room_for(["a"]), step=1)
    with pytest.raises(BrokenCheckpoint, match="a: 12 of 24 elements of weight"):
        Reader([tmp_path / "0.safetensors"]).read_into(StagedPiece("a", "weight", 0, 0, torch.zeros(1, 24)))


def test_the_files_are_plain_safetensors(tmp_path: Path):
    whole = torch.randn(6, 4)
    pieces = [*flat_pieces("a", whole, "weight", []), *column_pieces("b", whole, "exp_avg", 2)]
    record = write_pieces(tmp_path / "x.safetensors", pieces, room=room_for(["a", "b"]), step=1)
    tensors = load_file(tmp_path / "x.safetensors")
    assert tensors.keys() == {"a|weight|0", "b|exp_avg|0/4", "b|exp_avg|2/4"}
    assert torch.equal(tensors["a|weight|0"], whole.flatten())
    assert torch.equal(tensors["b|exp_avg|2/4"], whole[:, 2:])
    assert record.bytes == (tmp_path / "x.safetensors").stat().st_size
    assert record.digest == folder.digest_file(tmp_path / "x.safetensors")


def test_the_digest_of_a_file_is_xxhash_s_own_and_takes_a_mebibyte_of_memory_at_most(tmp_path: Path):
    payload = random.Random(1).randbytes(3 * 2**19 + 1)
    (tmp_path / "x").write_bytes(payload)
    tracemalloc.start()
    try:
        digest = folder.digest_file(tmp_path / "x")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert digest == xxhash.xxh3_128_hexdigest(payload) and peak < 2**20


def saver(root: Path, **changes) -> Saver:
    options = dict(rank=0, num_ranks=1, attempt="a", keep_last=2, keep_best=0, in_background=False, say=print)
    return Saver(root, **(options | changes))


STATE = {"parameters": {"a": [4, 6]}}


def save(target: Saver, step: int, **options) -> None:
    torch.manual_seed(step)
    target.save(step, flat_pieces("a", torch.randn(4, 6), "weight", [5]), STATE, **options)
    target.wait()


def test_what_is_saved_in_the_background_is_the_moment_at_which_it_began(tmp_path: Path):
    """Two parts of one weight, of which each has a copy of its own."""
    whole = torch.arange(24.0).view(4, 6)
    target, before = saver(tmp_path, in_background=True), whole.clone()
    for step in (1, 2):
        staged = [StagedPiece.copy_of(piece) for piece in flat_pieces("a", whole, "weight", [12])]
        assert not any(tensor.data.data_ptr() == whole.data_ptr() for tensor in staged)
        target.save(step, flat_pieces("a", whole, "weight", [12]), STATE)
        whole += 100  # as the next step does
        target.wait()
        into = StagedPiece("a", "weight", 0, 0, torch.zeros(1, 24))
        Reader(target.newest.pieces).read_into(into)
        assert torch.equal(into.data.view(4, 6), before + 100 * (step - 1))


def test_what_a_name_promises_is_on_the_disk_before_it(tmp_path: Path, monkeypatch):
    """A power cut keeps what was flushed, and of the rest anything. Kills of processes would not show this order."""
    done: list[str] = []

    def recorded(what: str, name_of: Callable[..., str]) -> None:
        right = getattr(os, what)

        def call(*arguments: Any) -> None:
            being_written = re.fullmatch(r"\.(.*)\.[0-9]+", name := name_of(*arguments))
            done.append(f"{what} {being_written[1] if being_written else name}")
            right(*arguments)

        monkeypatch.setattr(os, what, call)

    recorded("fsync", lambda descriptor: Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
    recorded("replace", lambda old, new: Path(new).name)
    recorded("rename", lambda old, new: Path(new).name)
    save(saver(tmp_path / "root"), 3)
    of_tensors, build = "pieces-00000-of-00001.safetensors", ".saving-00000003-a"
    assert done == [
        f"fsync {of_tensors}",
        *("fsync state.json", "replace state.json"),
        *("fsync manifest.json", "replace manifest.json"),
        f"fsync {build}",
        *("rename step-00000003", "fsync root"),
        *("fsync LATEST", "replace LATEST", "fsync root"),
    ]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(saver(tmp_path), 3)
    return tmp_path / "step-00000003"


def test_a_save_leaves_a_whole_checkpoint_and_nothing_else(saved: Path):
    root = saved.parent
    assert {path.name for path in root.iterdir()} == {"LATEST", "step-00000003"}
    assert {path.name for path in saved.iterdir()} == {
        "manifest.json",
        "state.json",
        "pieces-00000-of-00001.safetensors",
    }
    assert (root / "LATEST").read_text() == "step-00000003\n"
    checkpoint = folder.open_checkpoint(saved)
    folder.verify(checkpoint)
    assert (checkpoint.step, checkpoint.state()) == (3, STATE)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def pieces(saved: Path) -> Path:
    return saved / "pieces-00000-of-00001.safetensors"


DAMAGES = {
    "a bit of the tensors": (lambda saved: flip(pieces(saved), -1), "does not have the digest"),
    "a bit of a header": (lambda saved: flip(pieces(saved), 30), "does not have the digest"),
    "a bit of the header's length": (lambda saved: flip(pieces(saved), 6), "does not have the digest"),
    "a bit of the state": (lambda saved: flip(saved / "state.json", 5), "does not have the digest"),
    "a bit of the manifest": (
        lambda saved: flip(saved / "manifest.json", 25),
        "manifest.json is damaged|its format is",
    ),
    "the end of the tensors": (lambda saved: pieces(saved).write_bytes(pieces(saved).read_bytes()[:-1]), "bytes, and"),
    "all of the tensors": (lambda saved: pieces(saved).unlink(), "is missing"),
    "all of the state": (lambda saved: (saved / "state.json").unlink(), "state.json is missing"),
    "the manifest": (lambda saved: (saved / "manifest.json").unlink(), "no manifest.json in it"),
    "half of the manifest": (lambda saved: (saved / "manifest.json").write_text("{"), "manifest.json is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_seen(saved: Path, damage: str):
    do, reason = DAMAGES[damage]
    folder.verify(folder.open_checkpoint(saved))
    do(saved)
    with pytest.raises(BrokenCheckpoint, match=reason):
        folder.verify(folder.open_checkpoint(saved))


@pytest.mark.parametrize("at", range(20))
def test_no_bit_of_the_manifest_matters_unseen(saved: Path, at: int):
    manifest = saved / "manifest.json"
    flip(manifest, random.Random(at).randrange(manifest.stat().st_size))
    with pytest.raises(BrokenCheckpoint):
        folder.open_checkpoint(saved)


CRAFTED = {
    "an endless number": lambda text: text.replace('"bytes": ', '"bytes": 1e999, "was": ', 1),
    "brackets": lambda text: "[" * 100_000,
    "no object": lambda text: "[1, 2]",
    "no step": lambda text: text.replace('"step"', '"stop"'),
}


@pytest.mark.parametrize("how", CRAFTED)
def test_a_crafted_manifest_is_damaged_and_no_more(saved: Path, how: str):
    manifest = saved / "manifest.json"
    manifest.write_text(CRAFTED[how](manifest.read_text()))
    with pytest.raises(BrokenCheckpoint, match="damaged"):
        folder.open_checkpoint(saved)


@pytest.mark.parametrize("what", ["pipe", "link", "folder"])
def test_a_manifest_that_is_no_plain_file_is_not_read(saved: Path, what: str):
    """Nobody would ever write into the pipe."""
    manifest = saved / "manifest.json"
    kept = manifest.rename(saved.parent / "kept.json")
    {"pipe": lambda: os.mkfifo(manifest), "link": lambda: manifest.symlink_to(kept), "folder": manifest.mkdir}[what]()
    with pytest.raises(BrokenCheckpoint, match="no plain file"):
        folder.open_checkpoint(saved)


def test_a_state_that_is_nested_without_end_is_broken(saved: Path):
    (saved / "state.json").write_text("[" * 100_000)
    with pytest.raises(BrokenCheckpoint, match=r"state\.json"):
        folder.Checkpoint(saved, {}).state()


def test_a_state_of_another_step_than_the_manifest_is_broken(tmp_path: Path):
    state = {
        "recipe": {"data": {"train": "x"}},
        "made_from": {},
        "run": {},
        "counts": {"updates": 3},
        "num_samples": 24,
    }
    for step, says in ((3, 3), (4, 3)):
        target = saver(tmp_path)
        target.save(step, flat_pieces("a", torch.randn(4, 6), "weight", []), STATE | state | {"step": says})
        if step == says:
            assert read_content(target.newest)[0]["step"] == 3
        else:
            with pytest.raises(BrokenCheckpoint, match="of different steps"):
                read_content(target.newest)


def test_another_format_is_named(saved: Path):
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(folder.seal_manifest({**manifest, "format": 99}))
    with pytest.raises(BrokenCheckpoint, match="its format is 99, and this program reads 1"):
        folder.open_checkpoint(saved)


@pytest.mark.parametrize("name", ["../../outside.safetensors", "/etc/hostname"])
def test_a_manifest_cannot_name_files_outside(saved: Path, name: str):
    manifest = json.loads((saved / "manifest.json").read_text())
    files = {**manifest["files"], name: {"bytes": 1, "digest": ""}}
    (saved / "manifest.json").write_text(folder.seal_manifest({**manifest, "files": files}))
    with pytest.raises(BrokenCheckpoint, match="not a file of this folder"):
        folder.open_checkpoint(saved)


def names(root: Path) -> list[int]:
    return sorted(checkpoint.step for checkpoint in folder.whole_checkpoints(root))


def test_the_last_and_the_best_stay(tmp_path: Path):
    target = saver(tmp_path, keep_best=1)
    for step, loss in ((1, 5.0), (2, 3.0), (3, 4.0), (4, 4.5), (5, None)):
        save(target, step, best_by=loss)
    assert names(tmp_path) == [2, 4, 5]


@pytest.mark.parametrize("seed", range(10))
def test_an_evaluation_that_is_not_a_number_neither_wins_nor_loses_the_best(tmp_path: Path, seed: int):
    losses = [3.48, 6.84, 8.19, float("nan"), float("inf")]
    random.Random(seed).shuffle(losses)
    target = saver(tmp_path, keep_best=1)
    for step, loss in enumerate(losses, start=1):
        save(target, step, best_by=loss)
    assert names(tmp_path) == sorted({losses.index(3.48) + 1, 4, 5})


def test_newest_is_what_the_manifest_says(tmp_path: Path):
    target = saver(tmp_path)
    for step in (4, 5):
        save(target, step)
    shutil.copytree(tmp_path / "step-00000004", tmp_path / "step-old")  # a person's backup
    shutil.copytree(tmp_path / "step-00000004", tmp_path / "step-00000007")
    (tmp_path / "LATEST").write_text("step-00000004\n")
    assert [path.name for path in folder.list_folders(tmp_path)] == [f"step-0000000{step}" for step in (7, 5, 4)]
    assert names(tmp_path) == [4, 5]
    with pytest.raises(BrokenCheckpoint, match=r"named step-00000007, and manifest\.json says step 4"):
        folder.open_checkpoint(tmp_path / "step-00000007")
    assert [path.name for path in folder.foreign_folders(tmp_path)] == ["step-old"]
    save(target, 6)
    assert folder.open_checkpoint(tmp_path / "step-old").step == 4, "people's own is never removed"


def test_a_checkpoint_that_was_moved_to_another_disk_counts_and_its_link_alone_is_removed(tmp_path: Path):
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    target = saver(root)
    for step in (4, 5):
        save(target, step)
    (root / "step-00000005").rename(elsewhere)
    (root / "step-00000005").symlink_to(elsewhere)
    assert names(root) == [4, 5]
    for step in (6, 7):
        save(target, step)
    assert names(root) == [6, 7] and not (root / "step-00000005").is_symlink()
    assert folder.open_checkpoint(elsewhere).step == 5


def test_a_checkpoint_that_is_read_is_removed_with_a_later_save(tmp_path: Path):
    target = saver(tmp_path)
    save(target, 4)
    with folder.hold_checkpoint(tmp_path / "step-00000004"):
        for step in (5, 6, 7):
            save(target, step)
        assert names(tmp_path) == [4, 6, 7]
    save(target, 8)
    assert names(tmp_path) == [7, 8]


def test_a_whole_checkpoint_in_the_place_of_a_new_one_keeps_its_bytes(tmp_path: Path):
    save(saver(tmp_path), 4)
    was = (tmp_path / "step-00000004" / "manifest.json").read_bytes()
    save(saver(tmp_path, attempt="b"), 4)
    (left,) = tmp_path.glob("left-*")
    assert (left / "manifest.json").read_bytes() == was and names(tmp_path) == [4]


def test_the_one_resumed_from_stays(tmp_path: Path):
    save(saver(tmp_path), 1)
    again = saver(tmp_path, attempt="b")
    again.start_from(folder.open_checkpoint(tmp_path / "step-00000001"))
    for step in (2, 3, 4):
        save(again, step)
    assert names(tmp_path) == [1, 3, 4]


def test_what_came_after_the_one_resumed_from_is_nobodys_newest(tmp_path: Path, capsys):
    target = saver(tmp_path)
    for step in (2, 4, 6):
        save(target, step)
    again = saver(tmp_path, attempt="b")
    again.start_from(folder.open_checkpoint(tmp_path / "step-00000004"))
    assert "step-00000006" in capsys.readouterr().out
    assert names(tmp_path) == [4]
    save(again, 5)
    save(again, 6)
    assert names(tmp_path) == [4, 5, 6]
    folder.verify(folder.open_checkpoint(tmp_path / "left-step-00000006-b"))


def test_a_save_that_dies_of_anything_is_not_taken_for_one(tmp_path: Path, capsys):
    def broken():
        raise KeyError("what is this")
        yield

    target = saver(tmp_path, in_background=True)
    target.save(1, [], {"parameters": {}})
    target.wait()
    assert target.failed is None
    target.in_background = False
    target.save(2, broken(), STATE)
    assert "what is this" in target.failed
    assert "step 2 could not be saved" in capsys.readouterr().out
    assert names(tmp_path) == [1]


def test_a_main_process_that_fails_first_waits_for_the_part_of_the_others_and_not_for_its_own(
    tmp_path: Path, capsys, monkeypatch
):
    has_failed = threading.Event()

    def refuse_first(point: str, step: int) -> None:
        if point == "save.begin" and not has_failed.is_set():
            has_failed.set()
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(faults, "at", refuse_first)
    first, second = (saver(tmp_path, rank=rank, num_ranks=2, in_background=True) for rank in range(2))
    first.save(1, [], {"parameters": {}})
    assert has_failed.wait(10) and list(tmp_path.iterdir()) == []
    second.save(1, [], {"parameters": {}})
    first.wait()
    second.wait()
    assert "step 1 could not be saved: [Errno 30] Read-only file system" in capsys.readouterr().out
    assert first.failed is not None and second.failed is None and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("in_background", [False, True])
def test_a_process_that_cannot_even_say_that_it_failed_ends_the_run(tmp_path: Path, monkeypatch, in_background: bool):
    monkeypatch.setattr(saver_module, "RECEIPT_SECONDS", 0.3)
    target = saver(tmp_path / "checkpoints", rank=1, num_ranks=2, in_background=in_background)
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(OSError, match=r"the save of step 1: .*checkpoints"):
        save(target, 1)


def test_on_a_disk_without_room_for_a_receipt_an_empty_one_tells(tmp_path: Path, capsys, monkeypatch):
    def no_room(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saver_module, "replace_file", no_room)
    first, second = (saver(tmp_path, rank=rank, num_ranks=2, in_background=True) for rank in range(2))
    for each in (second, first):
        each.save(1, [], {"parameters": {}})
    for each in (second, first):
        each.wait()
    assert "step 1 could not be saved: " in capsys.readouterr().out
    assert "No space left" in first.failed and "No space left" in second.failed and list(tmp_path.iterdir()) == []


def test_a_receipt_waits_for_a_folder_that_can_be_made(tmp_path: Path, capsys):
    first, second = (saver(tmp_path / "checkpoints", rank=rank, num_ranks=2, in_background=True) for rank in range(2))
    (tmp_path / "checkpoints").write_text("a file")
    second.save(1, [], {"parameters": {}})
    time.sleep(0.3)
    (tmp_path / "checkpoints").unlink()
    first.save(1, [], {"parameters": {}})
    first.wait()
    second.wait()
    assert "step 1 could not be saved: process 1: " in capsys.readouterr().out
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_part_that_came_too_late_is_removed_with_the_next_save(tmp_path: Path):
    target = saver(tmp_path)
    for name in (".saving-00000001-a", ".saving-00000003-a"):
        (tmp_path / name).mkdir()
    save(target, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"LATEST", "step-00000002", ".saving-00000003-a"}


def test_a_save_in_the_background_gives_no_sign_for_a_main_thread_that_hangs(tmp_path: Path):
    beats: list[str] = []
    target = saver(
        tmp_path,
        num_ranks=2,
        in_background=True,
        timeout_seconds=0.5,
        beat=lambda: beats.append(threading.current_thread().name),
    )
    target.save(1, [], {"parameters": {}})  # the other never comes
    time.sleep(1.0)
    assert beats == []
    target.wait()
    assert set(beats) == {"MainThread"} and "process 1 has written nothing" in target.failed


def test_a_save_that_latest_does_not_name_is_one(tmp_path: Path, capsys):
    target = saver(tmp_path)
    (tmp_path / "LATEST").mkdir()
    save(target, 1)
    assert "step 1 is saved, but LATEST does not name it" in capsys.readouterr().out
    assert target.failed is None and target.newest.step == 1 and names(tmp_path) == [1]


def test_broken_ones_do_not_count_as_kept_and_are_not_removed(tmp_path: Path):
    target = saver(tmp_path)
    for step in (1, 2, 3):
        save(target, step)
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    save(target, 4)
    assert names(tmp_path) == [2, 4]
    assert (tmp_path / "step-00000003").is_dir()


def test_removal_follows_no_link(tmp_path: Path):
    outside = tmp_path / "outside"
    save(saver(outside), 1)
    root = tmp_path / "root"
    target = saver(root)
    root.mkdir()
    (root / "step-00000001").symlink_to(outside / "step-00000001")
    (root / ".saving-00000009-x").symlink_to(outside)
    for step in (2, 3, 4, 5):
        save(target, step)
    saver(root)
    assert names(outside) == [1]
    assert names(root) == [4, 5]


def test_unfinished_saves_are_swept_at_the_next_start(tmp_path: Path):
    (tmp_path / ".saving-00000001-dead").mkdir()
    (tmp_path / ".trash-step-00000001-7").mkdir()
    (tmp_path / "notes of the user").mkdir()
    saver(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes of the user"]


@pytest.mark.parametrize("point", ["save.begin", "save.in_file", "save.after_file", "save.before_manifest"])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_costs_one_checkpoint_and_no_more(
    tmp_path: Path, monkeypatch, capsys, point: str, in_background: bool
):
    target = saver(tmp_path, in_background=in_background)
    save(target, 1)
    monkeypatch.setenv("COOKBOOK_FAULTS", json.dumps([{"at": point, "step": 2, "do": "ENOSPC"}]))
    save(target, 2)
    assert "step 2 could not be saved" in (said := capsys.readouterr().out)
    assert "No space left on device" in said
    assert f"the last checkpoint is {tmp_path / 'step-00000001'}, and the steps since are lost if" in said
    assert {path.name for path in tmp_path.iterdir()} == {"LATEST", "step-00000001"}
    save(target, 3)
    assert names(tmp_path) == [1, 3]


def test_saves_that_fail_in_a_row_are_counted_with_what_would_be_lost(tmp_path: Path, monkeypatch, capsys):
    target = saver(tmp_path)
    monkeypatch.setenv("COOKBOOK_FAULTS", json.dumps([{"at": "save.begin", "do": "ENOSPC"}]))
    save(target, 1)
    save(target, 2)
    first, second = capsys.readouterr().out.splitlines()
    assert "in a row" not in first and first.endswith("; all steps are lost if the run ends now")
    assert "; 2 saves in a row have failed; all steps are lost" in second
    monkeypatch.delenv("COOKBOOK_FAULTS")
    save(target, 3)
    monkeypatch.setenv("COOKBOOK_FAULTS", json.dumps([{"at": "save.begin", "do": "ENOSPC"}]))
    save(target, 4)
    assert "in a row" not in capsys.readouterr().out


def test_in_the_background_the_state_of_the_call_is_saved(tmp_path: Path):
    target = saver(tmp_path, in_background=True)
    tensor = torch.ones(4, 6)
    target.save(1, flat_pieces("a", tensor, "weight", []), STATE)
    tensor.zero_()
    target.wait()
    into = StagedPiece("a", "weight", 0, 0, torch.zeros(1, 24))
    Reader(folder.open_checkpoint(tmp_path / "step-00000001").pieces).read_into(into)
    assert torch.equal(into.data, torch.ones(1, 24))


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("name", ["pieces-00000-of-00001.safetensors", "state.json", "manifest.json", "optimizer.bin"])
def test_a_checkpoint_runs_no_code(saved: Path, tmp_path: Path, name: str):
    """A pickle in the place of each file, its digest in the manifest, as somebody could do who can write there."""
    marker = tmp_path / "marker"
    payload = pickle.dumps(Payload(marker))
    pickle.loads(payload)
    assert marker.exists()  # the payload works
    marker.unlink()
    (saved / name).write_bytes(payload)
    if name != "manifest.json":
        manifest = json.loads((saved / "manifest.json").read_text())
        record = {"bytes": len(payload), "digest": folder.digest_file(saved / name)}
        manifest["files"] = {**manifest["files"], name: record}
        (saved / "manifest.json").write_text(folder.seal_manifest(manifest))
    try:
        checkpoint = folder.open_checkpoint(saved)
        folder.verify(checkpoint)
        Reader(checkpoint.pieces)
        checkpoint.state()
    except BrokenCheckpoint:
        assert name != "optimizer.bin"
    assert not marker.exists()


def test_a_folder_that_was_removed_under_the_run_is_made_again(tmp_path: Path):
    target = saver(tmp_path / "checkpoints")
    save(target, 1)
    shutil.rmtree(tmp_path / "checkpoints")
    save(target, 2)
    assert names(tmp_path / "checkpoints") == [2]


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path, capsys):
    target = saver(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("a file")
    save(target, 1)
    assert "step 1 could not be saved: " in (said := capsys.readouterr().out) and "checkpoints" in said
    assert target.failed is not None
