"""One training in many legs, each under another strategy and number of processes, is the uninterrupted one.

pytest tests/test_resume.py                 a few legs each
pytest tests/test_resume.py -m slow         every strategy file, adapters, optimizers, bf16
"""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file

from cookbook.commands import launch
from cookbook.commands.cli import main
from cookbook.config.recipe import load_recipe
from cookbook.config.schedule import Schedule
from cookbook.start.own_folder import reads_own_folder
from cookbook.training.checkpoint import folder, resume
from cookbook.training.checkpoint.content import complete_kinds
from cookbook.training.checkpoint.folder import BrokenCheckpoint
from cookbook.training.checkpoint.listing import describe
from cookbook.training.checkpoint.tensors import Reader
from tests.curves import ADAMW, ROOT, Curve, Lab, distance, processes_of
from tests.experts import experts

STOPPED = 75
SGD_STEPS = {"run.max_steps": "4", "schedule.warmup_steps": "2"}


def start(
    lab: Lab,
    output: Path,
    strategy: str,
    settings: dict[str, str],
    processes: int | None = None,
    program: tuple[str, ...] = ("train.py",),
    **variables: str,
) -> subprocess.CompletedProcess:
    """One start of a run in a folder of its own."""
    settings = {**settings, "run.output_dir": str(output)}
    return lab.start(strategy, settings, processes, program=program, variables=variables)


def leg(lab: Lab, output: Path, where: str, settings: dict[str, str], *, num_steps: int | None, **extra) -> str:
    """Goes on for some steps, or to the end. `where` is strategy:processes. Returns what was printed."""
    strategy, _, processes = where.partition(":")
    slice_of = {"run.resume": "auto"} | ({"run.stop_after_steps": str(num_steps)} if num_steps else {})
    done = start(lab, output, strategy, {**settings, **slice_of}, int(processes) if processes else None, **extra)
    assert done.returncode == (0 if num_steps is None else STOPPED), done.stdout[-4000:]
    assert ("run.stop_after_steps); saved" in done.stdout) == (num_steps is not None), done.stdout[-4000:]
    return done.stdout


def chain(
    lab: Lab, folder_: Path, legs: list[str], settings: dict[str, str], *, num_steps: int = 1, is_exact: bool = True
) -> Curve:
    """A run whose every leg takes up what the one before left, under another strategy, to its end. Each leg saves what
    it has taken up before it trains, and that must be what it was given: weights, moments and counts, bit by bit.
    """
    output = folder_ / "run"
    for i, where in enumerate(legs):
        again = folder_ / f"again-{i}"
        steps = num_steps if i < len(legs) - 1 else None
        leg(lab, output, where, settings, num_steps=steps, program=("tests/resave.py",), RESAVE=str(again))
        if i == 0:
            continue
        (resaved,) = folder.list_folders(again)
        given = output / "checkpoints" / resaved.name
        if not given.exists():
            continue  # removed since, as the last legs of a long run do
        ours, theirs = tensors_of(resaved), tensors_of(given)
        assert ours.keys() == theirs.keys(), where
        differ = [key for key in theirs if not torch.equal(ours[key], theirs[key])]
        assert not (differ and is_exact), f"{where}: {differ[:5]} of {len(theirs)} differ"
        counts = [folder.open_checkpoint(path).state()["counts"] for path in (resaved, given)]
        assert counts[0] == counts[1], where
    return Curve(output)


def tensors_of(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor of a checkpoint, whole and flat."""
    checkpoint = folder.open_checkpoint(path)
    folder.verify(checkpoint)
    reader = Reader(checkpoint.pieces)
    sizes = {name: torch.Size(shape).numel() for name, shape in checkpoint.state()["parameters"].items()}
    return {
        (name, kind): torch.cat(list(reader.parts(name, kind, sizes[name], torch.float32)))
        for name in sizes
        for kind in reader.kinds(name)
    }


QUICK_LEGS = ["zero3:3", "fsdp2_sp:2", "single", "zero1:2", "tp:2", "ddp:3"]
ALL_LEGS = [
    "zero3:3",
    "fsdp2:2",
    "zero2:2",
    "hsdp:4",
    "zero3_offload:2",
    "ddp:3",
    "fsdp1:2",
    "zero1:4",
    "tp:2",
    "zero2_offload:2",
    "fsdp2_offload:2",
    "fsdp2_grad_op:2",
    "ddp_sp:2",
    "fsdp2_sp:4",
    "zero3_sp:2",
    "fsdp2_tp:4",
    "ddp_tp:4",
    "pp:4",
    "single",
]
EXACT = ADAMW | {"optim.eps": "1e-4", "batch.global_batch_size": "24", "batch.micro_batch_size": "2"}
EXACT |= {"run.eval_every_steps": "1"}
"""AdamW without clipping, an untied head, sizes that three processes do not divide; an evaluation before each save."""


@pytest.mark.slow
@pytest.mark.thorough
def test_six_legs_under_six_strategies_are_one_run(lab: Lab, tmp_path: Path):
    curve = chain(lab, tmp_path, QUICK_LEGS, EXACT, num_steps=3)
    apart = distance(curve, lab.run("single", EXACT))
    assert apart.loss < 1e-5 and apart.norm < 1e-4 and apart.weight < 1e-5, apart


CHAINS: dict[str, tuple[list[str], dict[str, str]]] = {
    "adamw": (ALL_LEGS, EXACT),
    "stages of matrices": (["pp_tp:4", "fsdp2_tp:4", "pp_tp:4", "single"], EXACT),
    "stages of matrices, tied": (["tp:2", "pp_tp:4", "pp:2", "pp_tp:4", "single"], {}),
    "experts": (["fsdp2_ep:4", "zero3:2", "fsdp2_ep:4", "fsdp2:3", "single"], EXACT),
    "stages of shards": (["fsdp2:2", "pp_fsdp2:4", "zero3_hpz:4", "pp_fsdp2:4", "single"], EXACT),
    "eight": (["pp_tp_fsdp2:8", "zero3:2", "hsdp_tp:8", "single"], EXACT),
    "eight, tied": (["hsdp_tp:8", "pp_tp_fsdp2:8", "pp_tp:4", "fsdp2_tp:4", "single"], {}),
    "stages of shards, tied": (["pp_fsdp2:4", "pp:2", "pp_fsdp2:4", "single"], {}),
    "sgd, tied, clipped, packed": (
        ["fsdp1:2", "zero3:2", "tp:2", "pp:2", "zero1:3", "fsdp2:3", "pp:4", "single"],
        {"data.packing": "true"},
    ),
    "nvme": (["zero3_nvme:2", "ddp:2", "zero3_nvme:2", "fsdp2:2"], EXACT | {"model.from_scratch.vocab_size": "8192"}),
    "muon": (["fsdp2:2", "zero2:3", "tp:2", "zero3:2", "hsdp:4", "zero1:2", "single"], EXACT | {"optim.name": "muon"}),
    "lora": (["zero3:2", "fsdp2:2", "pp:2", "tp:2", "fsdp1:2", "zero2:3", "ddp:2"], EXACT | {"adapter.name": "lora"}),
    "lora of shards": (["fsdp2_tp:4", "zero3:2", "fsdp2_tp:4", "pp_fsdp2:4", "tp:2"], EXACT | {"adapter.name": "lora"}),
    "lora, eight": (["hsdp_tp:8", "pp_tp_fsdp2:8", "fsdp2_tp:4", "ddp:2"], EXACT | {"adapter.name": "lora"}),
    "dora": (["zero3:2", "fsdp2:2", "ddp:3", "zero1:2"], EXACT | {"adapter.name": "dora"}),
    "qlora": (["zero2:2", "fsdp2:2", "ddp:3", "zero3:2"], EXACT | {"adapter.name": "qlora"}),
    "experts in 4 bits": (
        ["fsdp2:2", "zero3:2", "hsdp:4", "zero2:3", "single"],
        EXACT | {"adapter.name": "qlora", "adapter.targets": "[all-linear, gate_up_proj, down_proj]"},
    ),
}


def test_every_strategy_file_is_in_a_chain():
    shipped = {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert {where.partition(":")[0] for legs, _ in CHAINS.values() for where in legs} == shipped


THOROUGH = [pytest.mark.slow, pytest.mark.thorough]
NOT_THOROUGH = ("adamw", "stages of shards")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in NOT_THOROUGH else THOROUGH) for name in CHAINS]
)
def test_a_chain_of_strategies_is_one_run(lab: Lab, tmp_path: Path, name: str):
    legs, settings = CHAINS[name]
    if name.startswith("experts"):
        kept = {key: value for key, value in settings.items() if not key.startswith("model.")}
        settings = kept | experts(lab, tie_word_embeddings=False)
    if "global_batch_size" not in str(settings):
        settings = settings | {"batch.global_batch_size": "24", "batch.micro_batch_size": "2"}
    curve = chain(lab, tmp_path, legs, settings, num_steps=min(3, 19 // (len(legs) - 1)))
    apart = distance(curve, lab.run("single", settings))
    # An adapter's second matrix begins at zero, so the first steps of AdamW turn rounding into differences.
    loss, norm = (1e-4, 1e-3) if "adapter.name" in settings else (1e-5, 1e-4)
    assert apart.loss < loss and apart.norm < norm, apart


@pytest.mark.slow
def test_a_chain_drawn_at_random_is_one_run(lab: Lab, tmp_path: Path):
    """Other strategies, processes and settings with each commit: TURN is the seed."""
    chance = random.Random(int(os.environ.get("TURN", 0)))
    # Of what all take; zero3_nvme and fsdp2_ep need models of their own.
    names = sorted({path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")} - {"zero3_nvme", "fsdp2_ep"})
    legs = [f"{name}:{processes_of(name)}" for name in chance.sample(names, 9)]
    settings = EXACT | chance.choice([{}, {"adapter.name": "lora"}, {"data.packing": "true"}])
    settings |= {"model.from_scratch.tie_word_embeddings": chance.choice(["false", "true"])}
    print(legs, settings)
    curve = chain(lab, tmp_path, legs, settings, num_steps=2)
    apart = distance(curve, lab.run("single", settings))
    assert apart.loss < 1e-4 and apart.norm < 1e-3, apart


@pytest.mark.thorough
@pytest.mark.slow
def test_a_chain_in_bf16(lab: Lab, tmp_path: Path):
    settings = EXACT | {"mixed_precision": "bf16"}
    curve = chain(lab, tmp_path, ["zero3:2", "ddp:2", "zero1:2", "fsdp2:2"], settings, num_steps=3)
    apart = distance(curve, lab.run("ddp", settings, processes=2))
    assert apart.loss < 2e-2, apart


@pytest.mark.thorough
@pytest.mark.slow
def test_moments_in_8_bits_come_back_to_the_bit_where_they_are_cut_alike(lab: Lab, tmp_path: Path):
    settings = EXACT | {"optim.name": "adamw_8bit"}
    for i, where in enumerate(("fsdp2:2", "zero2:2")):
        chain(lab, tmp_path / str(i), [where, where], settings | SGD_STEPS, num_steps=3)
    curve = chain(lab, tmp_path / "across", ["fsdp2:2", "ddp:3", "zero3:2"], settings, num_steps=3, is_exact=False)
    apart = distance(curve, lab.run("single", settings))
    assert apart.loss < 5e-3, apart


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero3", *(pytest.param(name, marks=THOROUGH) for name in ("fsdp2", "tp"))])
def test_dropout_is_drawn_as_in_the_uninterrupted_run(lab: Lab, tmp_path: Path, strategy: str):
    """Dropout, packing and one process count: the resumed run is the other one, to the last bit."""
    settings = ADAMW | {"adapter.name": "lora", "adapter.dropout": "0.2", **SGD_STEPS}
    where = "single" if strategy == "single" else f"{strategy}:2"
    leg(lab, tmp_path / "run", where, settings, num_steps=2)
    leg(lab, tmp_path / "run", where, settings, num_steps=None)
    reference = lab.run(strategy, settings, processes=None if strategy == "single" else 2)
    ours, theirs = (
        [(line["loss"], line["grad_norm"]) for line in curve.steps] for curve in (Curve(tmp_path / "run"), reference)
    )
    assert ours == theirs
    assert all(np.array_equal(Curve(tmp_path / "run").weights[k], v) for k, v in reference.weights.items())


@pytest.mark.core
def test_an_interrupted_run_is_the_uninterrupted_one_to_the_last_bit(lab: Lab, tmp_path: Path):
    settings = SGD_STEPS | {"run.save_in_background": "true"}
    output = tmp_path / "run"
    leg(lab, output, "ddp:2", settings, num_steps=2)
    leg(lab, output, "ddp:2", settings, num_steps=None)
    reference = lab.run("ddp", settings, processes=2)
    assert Curve(output).steps[-1]["loss"] == reference.steps[-1]["loss"]
    ours, theirs = Curve(output).weights, reference.weights
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []


@pytest.fixture(scope="module")
def stopped(lab: Lab) -> Path:
    """A run that was stopped after two of its steps, each saved, of which tests take a copy."""
    output = lab.folder / "stopped"
    with FileLock(f"{output}.lock"):
        if not output.exists():
            unfinished = Path(f"{output}-unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            leg(lab, unfinished, "single", SGD_STEPS | {"run.save_every_steps": "1"}, num_steps=2)
            unfinished.rename(output)
    return output


@pytest.fixture
def broken_newest(stopped: Path, tmp_path: Path) -> Path:
    """A run with two checkpoints, a bit of the newer one flipped."""
    output = tmp_path / "run"
    shutil.copytree(stopped, output)
    newest = folder.list_folders(output / "checkpoints")[0]
    (pieces,) = newest.glob("*.safetensors")
    content = bytearray(pieces.read_bytes())
    content[-5] ^= 4
    pieces.write_bytes(content)
    return output


def test_a_broken_checkpoint_is_passed_over_aloud(lab: Lab, broken_newest: Path):
    said = leg(lab, broken_newest, "single", SGD_STEPS, num_steps=None)
    assert "step-00000002 is broken" in said and "does not have the digest" in said
    assert "resuming from" in said and "step-00000001" in said.split("resuming from")[1]
    assert [line["step"] for line in Curve(broken_newest).steps] == [1, 2, 3, 4]


DAMAGES = {
    "a key is missing": lambda state: state.pop("made_from"),
    "another step": lambda state: state.update(step=-3),
    "a count below zero": lambda state: state.update(num_samples=-4),
    "a recipe that is none": lambda state: state.update(recipe=[]),
    "shapes that are none": lambda state: state.update(parameters={"w": ["x"]}),
}


HEADERS = {
    "offsets that overlap": lambda entry: entry.update(data_offsets=[0, entry["data_offsets"][1]]),
    "a dtype that is none": lambda entry: entry.update(dtype="I32x"),
    "a dtype that no save writes": lambda entry: entry.update(dtype="I32"),
    "a shape without end": lambda entry: entry.update(shape=[2**40, 2**40]),
    "a shape below zero": lambda entry: entry.update(shape=[-1]),
}


def seal(saved: Path) -> None:
    """Gives a changed checkpoint the digests of what it has now."""
    manifest = json.loads((saved / "manifest.json").read_text())
    for name in manifest["files"]:
        size = (saved / name).stat().st_size
        manifest["files"][name] = {"bytes": size, "digest": folder.digest_file(saved / name)}
    (saved / "manifest.json").write_text(folder.seal_manifest(manifest))


def forge_header(saved: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the entry of the last tensor in a file, and seals the checkpoint."""
    (path,) = saved.glob("*.safetensors")
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(
        max((entry for key, entry in header.items() if key != "__metadata__"), key=lambda entry: entry["data_offsets"])
    )
    written = json.dumps(header, separators=(",", ":")).encode().ljust(end - 8)
    path.write_bytes(len(written).to_bytes(8, "little") + written + content[end:])
    seal(saved)


@pytest.mark.parametrize("damage", [*DAMAGES, *HEADERS])
def test_a_sealed_checkpoint_with_wrong_content_is_broken(stopped: Path, tmp_path: Path, damage: str):
    newest = tmp_path / "step-00000002"
    shutil.copytree(folder.list_folders(stopped / "checkpoints")[0], newest)
    assert resume._why_broken(newest, 0, 1) is None
    if damage in DAMAGES:
        state = json.loads((newest / "state.json").read_text())
        DAMAGES[damage](state)
        (newest / "state.json").write_text(json.dumps(state))
        seal(newest)
    else:
        forge_header(newest, HEADERS[damage])
    reason = resume._why_broken(newest, 0, 1)
    assert reason and "BrokenCheckpoint" not in reason, "a reason of ours is said as it is"
    assert describe(newest)["broken"]


def test_two_runs_of_a_tensor_at_one_place_are_broken(tmp_path: Path):
    """Their elements are as many as the tensor has, and half of it would be whatever was in memory."""
    shapes, halves = {"w": [4]}, {"w|weight|0": torch.ones(2), "w|weight|2": torch.ones(2)}
    save_file(halves, tmp_path / "sound.safetensors")
    save_file({"w|weight|0": torch.ones(2), "w|weight|1": torch.ones(2)}, tmp_path / "twice.safetensors")
    assert complete_kinds([tmp_path / "sound.safetensors"], shapes) == {"weight"}
    with pytest.raises(BrokenCheckpoint, match="there twice"):
        complete_kinds([tmp_path / "twice.safetensors"], shapes)


@pytest.mark.slow
def test_a_run_falls_back_from_a_forged_checkpoint(lab: Lab, stopped: Path, tmp_path: Path):
    output = tmp_path / "run"
    shutil.copytree(stopped, output)
    forge_header(folder.list_folders(output / "checkpoints")[0], HEADERS["offsets that overlap"])
    said = leg(lab, output, "single", SGD_STEPS, num_steps=None)
    assert "step-00000002 is broken" in said and "it is skipped" in said and "Traceback" not in said
    assert "step-00000001" in said.split("resuming from")[1]
    assert [line["step"] for line in Curve(output).steps] == [1, 2, 3, 4]


def test_no_whole_checkpoint_means_no_start(lab: Lab, broken_newest: Path):
    oldest = folder.list_folders(broken_newest / "checkpoints")[-1]
    (oldest / "manifest.json").unlink()
    before = sorted(path for path in broken_newest.rglob("*"))
    done = start(lab, broken_newest, "single", SGD_STEPS | {"run.resume": "auto"})
    said = done.stdout
    assert done.returncode == 2 and "Traceback" not in said
    assert "no manifest.json in it" in said and "run.resume: never" in said
    assert sorted(path for path in broken_newest.rglob("*")) == before


@pytest.mark.parametrize("named", ["auto", "elsewhere"])
def test_a_checkpoint_that_is_a_link_is_the_runs_own(lab: Lab, stopped: Path, tmp_path: Path, named: str):
    output, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(stopped, output)
    newest = folder.list_folders(output / "checkpoints")[0]
    newest.rename(elsewhere)
    newest.symlink_to(elsewhere)
    done = start(lab, output, "single", SGD_STEPS | {"run.resume": named if named == "auto" else str(elsewhere)})
    assert done.returncode == 0, done.stdout[-3000:]
    assert [line["step"] for line in Curve(output).steps] == [1, 2, 3, 4] and not (tmp_path / "run.1").exists()


def test_a_checkpoint_that_would_be_set_aside_with_the_run_is_refused(lab: Lab, stopped: Path, tmp_path: Path):
    output = tmp_path / "run"
    shutil.copytree(stopped, output)
    kept = folder.list_folders(output / "checkpoints")[0].rename(output / "kept")
    done = start(lab, output, "single", SGD_STEPS | {"run.resume": str(kept)})
    assert done.returncode == 2 and "which is set aside at its start; move the checkpoint to" in done.stdout
    assert kept.is_dir() and not (tmp_path / "run.1").exists()


CHANGES = {
    "seed": ({"seed": "8"}, "seed was 7 when the checkpoint was made, and is 8\n"),
    "batch": ({"batch.global_batch_size": "32"}, "batch.global_batch_size was 16 .* and is 32\n"),
    "data": ({"data.max_length": "64"}, "the data is not what the checkpoint was made with"),
    "model": ({"model.from_scratch.hidden_size": "32"}, "the model is not what the checkpoint was made with"),
    "optimizer": ({"optim.name": "adamw"}, "optim.name was 'sgd' .* and is 'adamw'\n"),
    "learning rate": ({"optim.learning_rate": "0.05"}, r"--set 'run.allow_changes=\[optim.learning_rate\]' to go on"),
    "steps": ({"run.max_steps": "5"}, r"--set 'run.allow_changes=\[run.max_steps\]' to go on"),
    "adapter": ({"adapter.name": "lora"}, "adapter.name was not set .* and is 'lora'"),
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.name_or_path", "export"),
        ("data.train", "[recipes/sums/answers.jsonl, {path: RUN/export/rows.jsonl}]"),
        ("data.train", "export/*.jsonl"),
        ("adapter", "{name: lora, path: RUN/export/../export}"),
        ("objective", "{name: distill, teacher: RUN/export}"),
    ],
)
def test_a_run_does_not_move_away_what_it_reads(tmp_path: Path, monkeypatch, capsys, key: str, value: str):
    """A second stage begins with the export of the first, in the same folder, which its start would rename."""
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "run"
    shutil.copytree("recipes/sums/model", folder / "export")
    shutil.copyfile("recipes/sums/answers.jsonl", folder / "export/rows.jsonl")
    (folder / "run.json").write_text("{}")
    text = value.replace("RUN", str(folder)) if "RUN" in value else f"{folder}/{value}"
    settings = [
        "model={name_or_path: recipes/sums/model}",
        "run.resume=never",
        f"run.output_dir={folder}",
        f"{key}={text}",
    ]
    words = [word for assignment in settings for word in ("--set", assignment)]
    before = sorted(tmp_path.rglob("*"))
    for command in ("check", "launch"):
        assert main([command, "recipes/sums/sft.yaml", *words]) == 2
        error = capsys.readouterr().err
        assert f"in run.output_dir '{folder}', which this start sets aside; name another run.output_dir" in error
    assert sorted(tmp_path.rglob("*")) == before
    # Elsewhere, and in a folder whose run goes on, nothing is moved.
    assert (
        reads_own_folder(load_recipe(ROOT / "recipes/sums/sft.yaml", [*settings, f"run.output_dir={folder}-2"])) == []
    )
    (folder / "checkpoints/step-00000001").mkdir(parents=True)
    assert reads_own_folder(load_recipe(ROOT / "recipes/sums/sft.yaml", [*settings, "run.resume=auto"])) == []
    assert reads_own_folder(load_recipe(ROOT / "recipes/sums/sft.yaml", settings)) != []


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_recipe_is_refused_or_needs_consent(lab: Lab, stopped: Path, tmp_path: Path, change: str):
    settings, message = CHANGES[change]
    output = tmp_path / "run"
    shutil.copytree(stopped, output)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    done = start(lab, output, "single", {**SGD_STEPS, "run.resume": "auto", **settings})
    said = done.stdout
    assert done.returncode == 2 and "Traceback" not in said, said[-3000:]
    assert re.search(message, said), said
    assert ("run.allow_changes" in said) == (change in ("learning rate", "steps")), said
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()} == before


SECOND_TRIES = {
    "learning rate": {"optim.learning_rate": "0.05"},
    "length": {"run.max_steps": "9", "schedule.name": "cosine"},
    "seed and length": {"seed": "8", "run.max_steps": "9"},
}


@pytest.mark.parametrize("change", SECOND_TRIES)
def test_a_second_try_is_refused_before_processes_and_each_way_that_it_names_works(
    lab: Lab, stopped: Path, tmp_path: Path, change: str, monkeypatch, capsys
):
    shutil.copytree(stopped, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run_command", lambda *_: pytest.fail("processes were started"))
    settings = SGD_STEPS | {"run.output_dir": "run", "run.resume": "auto"}

    def answer(verb: str, *words: str, **changed: str) -> str:
        sets = [word for name, value in (settings | changed).items() for word in ("--set", f"{name}={value}")]
        recipe, strategy = str(lab.folder / "recipe.yaml"), str(ROOT / "accelerate_configs/single.yaml")
        assert main([verb, recipe, "--strategy", strategy, *sets, *words]) in (0, 2)
        return capsys.readouterr().err

    assert answer("check") == ""
    changed = SECOND_TRIES[change]
    refusals = {answer(verb, **changed) for verb in ("check", "launch")}
    assert len(refusals) == 1, refusals
    (refusal,) = refusals
    assert refusal.startswith("run.resume: cannot resume from run/checkpoints/step-00000002:\n")
    ways = [shlex.split(line)[1] for line in refusal.splitlines() if line.startswith("  --set ")]
    can_go_on = "seed" not in changed
    assert [way.partition("=")[0] for way in ways] == [
        "run.output_dir",
        *["run.allow_changes"] * can_go_on,
        "run.resume",
    ]
    for way in ways:
        assert answer("check", "--set", way, **changed) == "", way
    if not can_go_on:
        assert "seed was 7 when" in answer("check", "--set", "run.allow_changes=[seed,run.max_steps]", **changed)


def test_consent_lets_the_learning_rate_change_and_says_so(lab: Lab, stopped: Path, tmp_path: Path):
    output = tmp_path / "run"
    shutil.copytree(stopped, output)
    settings = SGD_STEPS | {"optim.learning_rate": "0.05", "run.allow_changes": "[optim.learning_rate]"}
    said = leg(lab, output, "single", settings, num_steps=None)
    assert "optim.learning_rate was 0.1 when the checkpoint was made, and is 0.05, as run.allow_changes allows" in said
    rates = [line["learning_rate"] for line in Curve(output).steps]
    assert rates[2] < rates[1]


def test_a_run_that_resumes_does_not_change_its_length_without_consent():
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml")
    lengths = {"max_steps": recipe.run.max_steps, "num_epochs": recipe.run.num_epochs}
    for key, was in lengths.items():
        longer = recipe.run.model_copy(update={key: (was or 1) + 1})
        state = {"recipe": recipe.model_dump(mode="json", exclude_none=True), "made_from": {}}
        (mistake, *ways), _ = resume.changes(state, recipe.model_copy(update={"run": longer}), {})
        assert mistake.startswith(f"run.{key} was {was or 'not set'} when ")
        assert f"run.allow_changes=[run.{key}]" in "".join(ways)
        consented = longer.model_copy(update={"allow_changes": [f"run.{key}"]})
        mistakes, (note,) = resume.changes(state, recipe.model_copy(update={"run": consented}), {})
        assert not mistakes and note.startswith(f"run.{key} was {was or 'not set'} when ")


@pytest.mark.slow
def test_a_stream_whose_source_grew_meanwhile_does_not_go_on(lab: Lab, tmp_path: Path):
    rows, before = tmp_path / "rows.jsonl", (lab.folder / "chats.jsonl").read_bytes()
    rows.write_bytes(before)
    settings = SGD_STEPS | {"data.train": str(rows), "data.streaming": "true", "data.shuffle_rows": "30"}
    leg(lab, tmp_path / "run", "zero3:2", settings, num_steps=2)
    with rows.open("ab") as file:
        file.write(before.splitlines(keepends=True)[0])
    done = start(lab, tmp_path / "run", "fsdp2", settings | {"run.resume": "auto"}, 2)
    assert done.returncode == 2 and "the data is not what the checkpoint was made with\n" in done.stdout
    rows.write_bytes(before)
    leg(lab, tmp_path / "run", "fsdp2:2", settings, num_steps=None)
    assert [line["step"] for line in Curve(tmp_path / "run").steps] == [1, 2, 3, 4]


def test_the_order_of_a_stream_may_not_change():
    """Its place in the stream is a number of rows, which in another order are others."""
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml")
    state = {"recipe": recipe.model_dump(mode="json", exclude_none=True), "made_from": {"data": "same"}}
    other = recipe.model_copy(update={"data": recipe.data.model_copy(update={"shuffle_rows": 7})})
    mistakes, _ = resume.changes(state, other, {"data": "same"})
    assert any(mistake.startswith("data.shuffle_rows ") for mistake in mistakes), mistakes


def test_a_schedule_of_another_kind_needs_consent_to_each_key_or_to_the_section():
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml")
    before = recipe.model_copy(update={"schedule": Schedule.of(name="wsd", warmup_steps=30, decay_steps=2)})
    state = {"recipe": before.model_dump(mode="json", exclude_none=True), "made_from": {}}
    mistakes, _ = resume.changes(state, recipe, {})
    assert [mistake.split(" ")[0] for mistake in mistakes[:3]] == ["schedule.decay_steps", "schedule.name", "Put"]
    allowing = recipe.model_copy(update={"run": recipe.run.model_copy(update={"allow_changes": ["schedule"]})})
    mistakes, notes = resume.changes(state, allowing, {})
    assert mistakes == [] and len(notes) == 2


def test_a_run_can_begin_at_a_checkpoint_of_another(lab: Lab, stopped: Path, tmp_path: Path):
    output = tmp_path / "other"
    path = folder.list_folders(stopped / "checkpoints")[0]
    done = start(lab, output, "single", SGD_STEPS | {"run.resume": str(path)})
    assert done.returncode == 0, done.stdout[-3000:]
    assert [line["step"] for line in Curve(output).steps] == [3, 4]


def test_auto_packs_a_new_run_and_resumes_a_padded_one_as_it_was(lab: Lab, stopped: Path, tmp_path: Path):
    auto, old, new = SGD_STEPS | {"data.packing": "auto"}, tmp_path / "old", tmp_path / "new"
    said = leg(lab, new, "ddp:2", auto, num_steps=2)
    assert Curve(new).record["packing"] == {"is_on": True} and "none, samples are packed" in said
    assert "  packing: true\n" in (new / "recipe.yaml").read_text()
    assert Curve(new).losses == pytest.approx(Curve(stopped).losses, abs=2e-6)
    leg(lab, new, "single", auto, num_steps=1)
    assert Curve(new).record["packing"]["is_on"]

    shutil.copytree(stopped, old)
    said = leg(lab, old, "single", auto, num_steps=1)
    packing = Curve(old).record["packing"]
    assert not packing["is_on"] and packing["why"].startswith("the run was started with padded rows")
    assert 0.05 < packing["padding"] < 0.5 and f"{packing['padding']:.0%} of all positions: {packing['why']}" in said
    leg(lab, old, "single", auto | {"data.packing": "true"}, num_steps=None)
    assert Curve(old).record["packing"]["is_on"]


def test_a_path_that_is_no_checkpoint_is_refused(lab: Lab, stopped: Path, tmp_path: Path):
    for path, reason in ((tmp_path / "nothing", "no such folder"), (stopped, "no manifest.json in it")):
        done = start(lab, tmp_path / "out", "single", SGD_STEPS | {"run.resume": str(path)})
        said = done.stdout
        assert done.returncode == 2 and reason in said and "Traceback" not in said, said[-3000:]
        assert not (tmp_path / "out" / "metrics.jsonl").exists()
