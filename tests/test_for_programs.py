"""Protects what scripts read: with --json each command prints one object, as documented, and nothing else.

python -m pytest -q tests/test_for_programs.py
"""

import json
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import RECIPE, RECIPE_TEXT, ROOT, Book
from documented import documented, schemas
from small_data import chat, make_tokenizer

from cookbook.commands import launch, schema
from cookbook.commands.cli import GROUPS, app, main
from cookbook.commands.next import WAYS
from cookbook.commands.shared.answer_forms import ANSWERS
from cookbook.commands.shared.for_programs import as_object
from cookbook.commands.shared.history import RunState
from cookbook.system import versions
from cookbook.training.checkpoint.folder import commit, digest_file

STEP = {"epoch": 0.1, "step_seconds": 2.0, "tokens_per_second": 50.0, "num_tokens": 100, "peak_memory_gib": 1.5}
OF_AXOLOTL = """\
base_model: Qwen/Qwen3-0.6B
datasets: [{path: rows.jsonl, type: alpaca}]
val_set_size: 0.1
learning_rate: 1e-4
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: adamw_torch
sequence_len: 512
output_dir: outputs/mine
"""


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def make_run(folder: Path, losses: Sequence[float] = (3.0, 2.5, 2.0, 1.5), **state: Any) -> Path:
    """A run's folder with the files of a run of these losses, and `state` in its status."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"step": step, "loss": loss, **STEP} for step, loss in enumerate(losses, 1)]
    lines.append({"step": len(losses), "eval_loss": losses[-1] + 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.yaml").write_text((ROOT / "recipes/quickstart.yaml").read_text())
    record = {
        "strategy": {"file": "accelerate_configs/zero2.yaml", "processes": 2},
        "hardware": {"cores": 4},
        "max_steps": 40,
        "command": ["train.py", "recipes/quickstart.yaml", "--set", "seed=7"],
    }
    (folder / "run.json").write_text(json.dumps(record))
    if state:
        status = {"step": len(losses), "pid": os.getpid(), "host": socket.gethostname(), "started": 1e9} | state
        (folder / "status.json").write_text(json.dumps(status))
    return folder


@pytest.fixture
def small(book: Book) -> Book:
    """A recipe on three rows, with a tokenizer in a folder."""
    book.write("rows.jsonl", "\n".join(json.dumps(chat("hi", answer)) for answer in ("ho", "hoho", "ho")))
    make_tokenizer().save_pretrained(book.root / "model")
    scratch = re.search(r"  from_scratch:\n(    .*\n)+", RECIPE_TEXT)
    assert scratch is not None
    book.edit(RECIPE, (scratch[0], "  name_or_path: ./model\n"), ("train: python-stdlib", "train: rows.jsonl"))
    book.edit(RECIPE, ("  eval: {path: python-stdlib, split: test}\n", ""))
    return book


def ask(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """The documented object of a command that ends with a code."""
    assert main([*words, "--json"]) == code
    return documented(words[0], capsys.readouterr().out, is_refused=code == 2)


@pytest.mark.core
def test_every_command_with_json_is_documented_and_no_other(monkeypatch, capsys):
    with_json = set()
    for name in (command.__name__.replace("_", "-") for group in GROUPS.values() for command in group):
        assert main([name, "--help"]) == 0
        with_json |= {name} if " --json " in capsys.readouterr().out else set()
    assert with_json == ANSWERS.keys() and len(app.registered_commands) > len(with_json) >= 12
    assert schemas().keys() - {"refused"} == with_json
    monkeypatch.chdir(ROOT)
    assert schemas() == schema.answer_schemas(), "run cookbook schema"
    assert (ROOT / "docs/for_programs.md").read_text() == schema.for_programs(), "run cookbook schema"


def test_check_has_rows_warnings_and_notes_of_versions(book, monkeypatch, capsys):
    book.write("rows.jsonl", "\n".join(json.dumps(chat("hi", answer)) for answer in ("ho", "hoho", "ho")))
    book.edit(RECIPE, ("train: python-stdlib", "train: rows.jsonl"))
    book.edit(RECIPE, ("  eval: {path: python-stdlib, split: test}\n", ""))
    monkeypatch.setattr(versions, "notes", lambda: ["versions: untested: transformers 99.1"])
    answer = ask(capsys, "check", RECIPE, "--data", "--set", "schedule.warmup_steps=30", "--set", "run.max_steps=6")
    (recipe,) = answer["recipes"]
    (rows,) = recipe["rows"]
    assert recipe["recipe"] == RECIPE and recipe["processes"] == 2
    assert (rows["set"], rows["path"], rows["rows"]) == ("data.train", "rows.jsonl", 3)
    warmup, of_versions = answer["warnings"]
    assert (warmup["key"], warmup["value"]) == ("schedule.warmup_steps", 30)
    assert of_versions["text"] == "versions: untested: transformers 99.1"


def test_all_mistakes_are_objects_with_place_value_and_what_to_write(book, capsys):
    book.edit(RECIPE, ("learning_rate:", "learnin_rate:"))
    answer = ask(capsys, "check", RECIPE, "--set", "mixed_precision=fp17", code=2)
    by_key = {error["key"]: error for error in answer["errors"]}
    typo, precision = by_key["optim.learnin_rate"], by_key["mixed_precision"]
    line = next(i for i, text in enumerate((book.root / RECIPE).read_text().splitlines(), 1) if "learnin_rate" in text)
    assert (typo["file"], typo["line"], typo["instead"]) == (RECIPE, line, "did you mean learning_rate?")
    assert isinstance(typo["value"], float), "the value of the file, not its text"
    assert precision["value"] == "fp17" and precision["file"] is None and "bf16" in precision["instead"]


@pytest.mark.parametrize(
    ("text", "file", "line", "key", "problem", "instead"),
    [
        ("a/b.yaml:3: optim.x: unknown key; write y", "a/b.yaml", 3, "optim.x", "unknown key", "write y"),
        ("a.jsonl:7: no text; write one", "a.jsonl", 7, None, "no text", "write one"),
        ("--set run.x is 'a; b' (text); use c", None, None, "run.x", "is 'a; b' (text)", "use c"),
        ("--set seed=7: batch.x is 7, no. Use 8.", None, None, "batch.x", "is 7, no", "Use 8."),
        ("--samples is -1; it must be at least 0", None, None, "--samples", "is -1", "it must be at least 0"),
        ("RECIPE is missing; write it", None, None, "RECIPE", "is missing", "write it"),
        ("run.resume is 'x': no checkpoint", None, None, "run.resume", "is 'x': no checkpoint", None),
        ("outputs/a: no such folder; write b", "outputs/a", None, None, "no such folder", "write b"),
        ("r.yaml under zero3: batch.x is 1; write 2", "r.yaml", None, "batch.x", "is 1", "write 2"),
        ("something odd happened", None, None, None, "something odd happened", None),
    ],
)  # fmt: skip
def test_a_message_is_taken_apart_by_its_form(text, file, line, key, problem, instead):
    mistake = as_object(text)
    assert (mistake.file, mistake.line, mistake.key) == (file, line, key)
    assert (mistake.problem, mistake.instead, mistake.text) == (problem, instead, text)


@pytest.mark.parametrize(
    "line",
    [f"{command} nowhere.yaml" for command in ("preview", "explain", "plan", "doctor", "convert", "check")]
    + [f"{command} nowhere" for command in ("why-slow", "report", "watch", "evaluate", "checkpoint")]
    + ["next README.md", "check --fast"],
)
def test_a_refused_command_answers_with_its_mistakes_alone(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").touch()
    assert main([*line.split(), "--json"]) == 2
    printed = capsys.readouterr()
    (error,) = documented(line.split()[0], printed.out, is_refused=True)["errors"]
    assert error["text"] and printed.err == ""
    assert main(line.split()) == 2
    assert capsys.readouterr().err.splitlines()[-1] == error["text"], "as in words"


def test_preview_has_the_trained_pieces(small, capsys):
    answer = ask(capsys, "preview", RECIPE, "--samples", "3")
    assert len(answer["samples"]) == 3 and answer["padded"]["padding_ratio"] >= answer["packed"]["padding_ratio"]
    for sample in answer["samples"]:
        trained = [piece["text"] for piece in sample["pieces"] if piece["is_trained"]]
        assert trained in (["ho<|im_end|>"], ["hoho<|im_end|>"])
        assert sample["num_trained"] == len(trained[0]) - len("<|im_end|>") + 1, "a letter is a token"
    assert answer["sets"][0]["num_tokens"] == sum(sample["num_tokens"] for sample in answer["samples"])


def test_numbers_of_a_run_are_those_of_its_lines(tmp_path, capsys):
    run, other = make_run(tmp_path / "a", state="finished"), make_run(tmp_path / "b", [3.0, 9.0, 1.0], state="finished")
    (watched,) = ask(capsys, "watch", str(run))["runs"]
    assert (watched["state"], watched["step"], watched["max_steps"]) == ("finished", 4, 40)
    assert watched["loss"] == pytest.approx((3 + 2.5 + 2 + 1.5) / 4) and watched["seconds_left"] is None
    slow = ask(capsys, "why-slow", str(run))
    assert slow["num_steps"] == 2 and slow["seconds_a_step"] == 2.0 and slow["tokens_per_second"] == 50.0
    assert sum(slow["shares"].values()) == pytest.approx(1)
    answer = ask(capsys, "report", str(run), str(other), "--out", str(tmp_path / "compare.html"))
    assert [of["last_loss"] for of in answer["runs"]] == [pytest.approx(2.25), pytest.approx(13 / 3)]
    assert answer["best"] == str(other), "whose held-out loss is 1.5, and not 2.0"
    (alone,) = ask(capsys, "report", str(run))["runs"]
    assert alone == answer["runs"][0]


def test_a_damaged_line_is_a_warning(tmp_path, capsys):
    run = make_run(tmp_path / "a", state="finished")
    (run / "events.jsonl").write_text('{"event": 1}\n')
    (warning,) = ask(capsys, "report", str(run))["warnings"]
    assert warning["file"] == str(run / "events.jsonl") and "damaged" in warning["problem"]


def test_convert_has_files_settings_and_what_is_left_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(OF_AXOLOTL)
    answer = ask(capsys, "convert", "theirs.yaml")
    assert answer["recipe"] == "recipes/theirs.yaml" and set(answer["files"]) == {"recipes/theirs.yaml"}
    assert answer["settings"]["optim"]["learning_rate"] == 1e-4 and Path(answer["recipe"]).is_file()
    assert all(mistake["text"] for mistake in answer["to_correct"]) and "strategy single" in " ".join(answer["notes"])


def test_each_place_of_a_refused_conversion_is_an_error_of_its_own(tmp_path, monkeypatch, capsys):
    """A person reads one line for the places with one reason."""
    monkeypatch.chdir(tmp_path)
    keys = {"use_galore": True, "use_apollo": True, "stage": "ppo"}
    lines = ["model_name_or_path: m", "dataset: a", "finetuning_type: full", "cutoff_len: 64"]
    lines += [f"{key}: {json.dumps(value)}" for key, value in keys.items()]
    Path("theirs.yaml").write_text("\n".join(lines))
    errors = ask(capsys, "convert", "theirs.yaml", code=2)["errors"]
    assert {error["key"]: (error["file"], error["line"], error["value"]) for error in errors} == {
        key: ("theirs.yaml", place, value) for place, (key, value) in enumerate(keys.items(), 5)
    }
    for error in errors:
        assert error["problem"].startswith(f"is {error['value']!r}: not the same training: ".lower())
        assert not any(other in error["text"] for other in keys if other != error["key"])
    of_optimizers = [error["instead"] for error in errors if error["key"] != "stage"]
    assert of_optimizers == ["docs/convert.md#what-there-is-not has what comes nearest"] * 2
    assert main(["convert", "theirs.yaml"]) == 2
    told = capsys.readouterr().err
    assert "theirs.yaml:5: use_galore is true; 6: use_apollo is true: not the same training: " in told


def test_a_training_that_a_file_names_itself_has_its_place(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    known = ["stage: ppo", "model_name_or_path: m", "dataset: a", "finetuning_type: freeze", "cutoff_len: 64"]
    Path("theirs.yaml").write_text("\n".join([*known, *(f"own_{i}: 1" for i in range(9))]))
    errors = ask(capsys, "convert", "theirs.yaml", code=2)["errors"]
    assert [(error["line"], error["key"], error["value"]) for error in errors] == [
        (1, "stage", "ppo"),
        (4, "finetuning_type", "freeze"),
    ]
    assert all("not the same training" in error["problem"] for error in errors)


def test_each_word_that_lacks_its_set_is_an_error_of_its_own(book, capsys):
    errors = ask(capsys, "plan", RECIPE, "seed=1", "run.max_steps=3", code=2)["errors"]
    assert [error["text"].partition(":")[0] for error in errors] == ["seed=1", "run.max_steps=3"]
    assert all(f"--set {error['text'].partition(':')[0]}" in error["problem"] for error in errors)


@pytest.mark.parametrize("arguments", [["quickstart.yaml"], ["zero2", "zero3"]])
def test_explain_and_its_comparison_are_as_documented(arguments, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = [f"recipes/{word}" if word.endswith(".yaml") else word for word in arguments]
    assert ask(capsys, "explain", *words)["errors"] == []


def test_what_a_library_prints_does_not_reach_stdout(book, monkeypatch, capfd):
    def noisy() -> list[str]:
        print("from Python")
        os.write(1, b"from C\n")
        subprocess.run(["echo", "from a child"], check=True)
        return []

    monkeypatch.setattr(versions, "notes", noisy)
    assert main(["check", RECIPE]) == 0 and capfd.readouterr().out.count("from ") == 3, "the noise is there"
    assert main(["check", RECIPE, "--json"]) == 0
    printed = capfd.readouterr()
    assert documented("check", printed.out) and printed.err.count("from ") == 3


def test_a_document_that_lies_would_be_found(tmp_path, capsys):
    main(["watch", str(make_run(tmp_path / "a", state="finished")), "--json"])
    answer = json.loads(capsys.readouterr().out)
    for change in ({"runs": [{**answer["runs"][0], "step": "4"}]}, {"new": 1}):
        with pytest.raises(jsonschema.ValidationError):
            documented("watch", json.dumps(answer | change))


# `next`.


def finished(folder: Path) -> Path:
    return make_run(folder, state="finished", exit_code=0)


STATES: dict[str, Callable[[Path], Any]] = {
    "never started": lambda folder: None,
    "starting": lambda folder: (folder.parent / f".{folder.name}.lock").write_text(
        json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": ""})
    ),
    "running": lambda folder: make_run(folder, state="running"),
    "exporting": lambda folder: make_run(folder, state="stopped", reason="export"),
    "killed": lambda folder: make_run(folder, state="running", pid=2**22 + 1),
    "stopped": lambda folder: make_run(folder, state="stopped", reason="SIGTERM"),
    "finished": finished,
    "failed": lambda folder: make_run(folder, state="failed", reason="OSError: no network"),
    "diverged": lambda folder: make_run(folder, state="failed", reason="FloatingPointError: step 4: ..."),
    "out of memory": lambda folder: make_run(
        folder, state="failed", reason="OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    ),
    "hung": lambda folder: make_run(folder, state="failed", reason="hang: no sign for 30 min"),
    "damaged": lambda folder: (make_run(folder) / "status.json").write_text("{"),
}


@pytest.mark.parametrize("command", ["next", "watch", "report", "why-slow", "chat", "evaluate"])
def test_of_a_folder_of_runs_one_is_to_be_named(command, tmp_path, capsys):
    """As of a sweep, in which no run can begin; nor is it waited for."""
    folder = tmp_path / "rates-sweep"
    for name in ("rate=1", "rate=2"):
        finished(folder / name)
    (folder / "compare.html").write_text("")
    assert main([command, str(folder)]) == 2
    assert f"name a run in it: {folder / 'rate=1'}, {folder / 'rate=2'}" in capsys.readouterr().err


def test_next_sends_no_run_into_the_folder_of_something_else(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    assert main(["next", str(tmp_path / "model")]) == 0 and "never started" in capsys.readouterr().out
    (tmp_path / "model/config.json").write_text("{}")
    assert main(["next", str(tmp_path / "model")]) == 2
    assert f"{tmp_path / 'model'}: no run's folder (it has config.json); name the" in capsys.readouterr().err


def test_the_folder_of_something_else_is_not_watched_as_a_run_that_has_not_begun(tmp_path, capsys):
    """As that of another program's checkpoints, of which no state would ever come."""
    (tmp_path / "checkpoint-4").mkdir()
    assert main(["watch", str(tmp_path), "--json"]) == 2
    assert f"{tmp_path}: no run's folder (it has checkpoint-4); name the" in capsys.readouterr().out


@pytest.mark.parametrize("verdict", STATES)
def test_next_has_one_verdict_for_each_state_with_a_command_that_is_taken(verdict, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "run"
    STATES[verdict](folder)
    answer = ask(capsys, "next", str(folder))
    assert answer["verdict"] == verdict and answer["why"]
    assert main(["next", str(folder)]) == 0 and (answer["command"] or "").split(" ")[0] in capsys.readouterr().out
    if verdict == "never started":
        assert answer["command"] is None and f"run.output_dir={folder}" in answer["advice"]
        return
    program, command, *words = shlex.split(answer["command"])
    assert program == "cookbook"
    launched: list[list[str]] = []
    monkeypatch.setattr(launch, "run_child", lambda command, *_: launched.append(command) or 0)
    if command in ("watch", "plan"):  # the one goes on until the run ends, the other takes seconds
        assert words[0].startswith(str(folder)) and Path(words[0]).exists()
    elif command == "checkpoint":
        assert main([command, *words]) == 2 and "no checkpoint in it" in capsys.readouterr().err
    else:
        assert main([command, *words]) == 0, capsys.readouterr().err
    if verdict in ("killed", "stopped", "failed", "hung"):
        (line,) = launched
        assert "zero2.yaml" in " ".join(line) and "seed=7" in line and f"run.output_dir={folder}" in line
        assert "run.resume=auto" in line
    if verdict == "diverged":
        (line,) = launched
        assert f"run.output_dir={folder}-half-rate" in line and any(word.endswith("rate=0.0015") for word in line)


def add_checkpoint(run: Path, step: int) -> Path:
    """A checkpoint of a model without parameters, with the run's run.json in it."""
    counts = {"step": step, "num_samples": step, "counts": {"updates": step}}
    record = json.loads((run / "run.json").read_text())
    state = {"recipe": {"data": {"train": []}}, "made_from": {}, "run": record, "parameters": {}, **counts}
    build = run / "checkpoints/.saving"
    build.mkdir(parents=True)
    (build / "state.json").write_text(json.dumps(state))
    entry = {"bytes": (build / "state.json").stat().st_size, "digest": digest_file(build / "state.json")}
    return commit(build, build.parent, {"step": step, "attempt": "a", "files": {"state.json": entry}}).path


def of_another_format(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "format": 2}))


HARMS: dict[str, Callable[[Path], Any]] = {
    "state.json is missing": lambda checkpoint: (checkpoint / "state.json").unlink(),
    "its format is 2": of_another_format,
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("verdict", ["stopped", "killed", "failed", "hung"])
def test_next_resumes_from_no_broken_checkpoint(verdict, harm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    STATES[verdict](tmp_path / "run")
    older, newer = (add_checkpoint(tmp_path / "run", step) for step in (2, 4))
    whole = ask(capsys, "next", str(tmp_path / "run"))
    assert whole["checkpoint"] == str(newer) and "run.resume=auto" in whole["command"]
    assert "broken" not in whole["why"] + (whole["advice"] or "")

    HARMS[harm](newer)
    step = ask(capsys, "next", str(tmp_path / "run"))
    assert step["checkpoint"] == str(older) and step["command"] == whole["command"]
    assert f"{newer} is broken: {harm}" in step["advice"] and "from step-00000002" in step["advice"]

    HARMS[harm](older)
    step = ask(capsys, "next", str(tmp_path / "run"))
    assert step["checkpoint"] is None and f"{older} is broken: {harm}" in step["advice"]
    assert verdict != "stopped" or ("can go on" in whole["why"] and "cannot go on" in step["why"])
    launched: list[list[str]] = []
    monkeypatch.setattr(launch, "run_child", lambda command, *_: launched.append(command) or 0)
    assert main(shlex.split(step["command"])[1:]) == 0
    assert f"run.output_dir={tmp_path / 'run'}-again" in launched[0] and "run.resume=auto" not in launched[0]


def test_next_takes_the_command_from_a_checkpoint_or_says_that_it_is_not_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    STATES["stopped"](run)
    recorded = ask(capsys, "next", str(run))
    assert "saved nothing" in recorded["why"]
    (run / "run.json").rename(tmp_path / "run.json")
    step = ask(capsys, "next", str(run))
    assert step["command"] is None and "run.json" in step["advice"] and f"run.output_dir={run}" in step["advice"]
    (tmp_path / "run.json").rename(run / "run.json")
    add_checkpoint(run, 4)
    (run / "run.json").write_text("{")
    step = ask(capsys, "next", str(run))
    assert step["command"] == recorded["command"] and step["max_steps"] == 40 and "can go on" in step["why"]


def test_there_is_a_state_for_each_verdict():
    assert STATES.keys() == WAYS.keys() == set(schemas()["next"]["properties"]["verdict"]["enum"])


def test_a_run_that_never_started_is_started_by_the_recipe_that_writes_there(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("cookbook.commands.next.recipe_files", lambda: [Path("recipes/quickstart.yaml")])
    monkeypatch.setattr("cookbook.commands.next.state_of", lambda _: RunState(name="starting"))
    answer = ask(capsys, "next", "outputs/quickstart")
    assert answer["command"] == "cookbook launch recipes/quickstart.yaml"
