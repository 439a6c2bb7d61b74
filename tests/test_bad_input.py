"""Protects the front door: bad input ends with exit code 2 and one message that lists every mistake; nothing is left.

python -m pytest -q tests/test_bad_input.py
"""

import contextlib
import copy
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import RECIPE, ROOT, clean_environment

from cookbook.commands.check.warnings import doubts
from cookbook.commands.cli import main
from cookbook.config.recipe import load_recipe
from cookbook.start.run_plan import load_pair
from cookbook.system.files import RecipeError
from tests import simulated_driver

ZERO3 = "accelerate_configs/zero3.yaml"
ZERO3_JSON = "ds_configs/zero3.json"
LIMIT_SECONDS = 3


def refuse(book, *arguments, **extra):
    """Runs train.py on bad input; returns the lines of its one message."""
    before, started = book.names(), os.times()
    done = book.train(*arguments, **extra)
    ended = os.times()  # of the processor, so that a busy machine does not count
    seconds = ended.children_user + ended.children_system - started.children_user - started.children_system
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr and done.stdout == "", done.stderr
    assert seconds < LIMIT_SECONDS, f"{seconds:.1f} seconds"
    assert book.names() == before
    return done.stderr.strip().splitlines()


def says(expected, line):
    """True if a line is the expected one, in which `...` stands for anything."""
    return re.fullmatch(re.escape(expected).replace(re.escape("..."), ".*"), line)


def three_broken_files(book):
    book.edit(
        RECIPE,
        ("ddp.yaml", "zero3.yaml"),
        ("seed: 42", "sede: 42"),
        ("train: python-stdlib", "train: nope.jsonl"),
        ("max_steps: 30", "max_steps: -1"),
    )
    book.edit(ZERO3, ("num_processes: auto", "downcast_bf16: true\nnum_processes: many"))
    book.edit(
        ZERO3_JSON,
        ('"gradient_clipping": "auto"', '"wall_clock_breakdown": true'),
        ('"overlap_comm"', '"overlap_com"'),
    )
    return [
        "recipes/small.yaml:4: sede: unknown key; did you mean seed?",
        "recipes/small.yaml:29: run.max_steps is -1; it must be greater than 0",
        f"recipes/small.yaml:14: data.train is 'nope.jsonl': no such file (looked in {book.root})",
        "accelerate_configs/zero3.yaml:2: downcast_bf16 is true: for TPUs only; take it out",
        "ds_configs/zero3.json:11: wall_clock_breakdown is true: every step is written to metrics.jsonl; take it out",
        "accelerate_configs/zero3.yaml:3: num_processes is 'many'; use auto (one per GPU) or a count from 1",
        "ds_configs/zero3.json:14: zero_optimization.overlap_com: unknown key; did you mean overlap_comm?",
        "accelerate_configs/zero3.yaml: `cookbook convert accelerate_configs/zero3.yaml` writes it in the terms of a"
        " strategy and a recipe of ours",
    ]


@pytest.mark.parametrize("dry_run", [["--dry-run"], []], ids=["dry run", "real run"])
def test_mistakes_of_recipe_yaml_and_json_are_listed_together(book, dry_run):
    expected = three_broken_files(book)
    assert refuse(book, RECIPE, *dry_run) == expected


def test_mistakes_of_the_environment_and_the_batch_come_with_those_of_the_files(book):
    book.edit(RECIPE, ("seed:", "sede:"))
    settings = ("--set", "batch.global_batch_size=7", "--set", "run.deterministic=true", "--dry-run")
    done = book.train(RECIPE, *settings, FSDP_VERSION="2", CUBLAS_WORKSPACE_CONFIG=":1:1")
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 4
    starts = (
        f"{RECIPE}:4: sede: unknown key",
        "FSDP_VERSION=2",
        "run.deterministic and CUBLAS",
        f"{RECIPE}: batch.global",
    )
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), lines


def test_sound_files_pass_the_same_door(book):
    before = book.names()
    done = book.train(RECIPE, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "fine under" in done.stdout
    assert book.names() == before


def test_bad_input_is_reported_before_torch_is_imported(book):
    three_broken_files(book)
    done = book.train(RECIPE, PYTHONPROFILEIMPORTTIME="1")
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "cookbook.config.recipe" in imported
    assert not imported & {"torch", "accelerate", "deepspeed", "transformers"}


def test_a_process_that_is_not_the_first_of_its_machine_lets_that_one_speak(book):
    """torchrun ends all processes at the first that exits, and would cut the message off."""
    three_broken_files(book)
    with pytest.raises(subprocess.TimeoutExpired) as waiting:
        subprocess.run(
            [sys.executable, str(ROOT / "train.py"), RECIPE, "--dry-run"],
            env=clean_environment(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2"),
            capture_output=True,
            timeout=5,
        )
    assert not waiting.value.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes/nope.yaml"], "recipes/nope.yaml: no such file (looked in ...)"),
        (["recipes"], "recipes: a folder, not a file (looked in ...)"),
        ([RECIPE, "--set", "max_steps"], "--set max_steps: write it as section.key=value"),
        (
            [RECIPE, "--set", "optim.lr=1e-3"],
            "--set optim.lr: does not belong here; write it as optim.learning_rate",
        ),
        (
            [RECIPE, "--set", "optim.learning_rate=fast"],
            "--set optim.learning_rate is 'fast' (text); it must be a number",
        ),
    ],
    ids=["no recipe", "folder", "set without =", "set of unknown key", "set of wrong type"],
)
def test_the_command_line_is_checked_like_a_file(book, arguments, message):
    (line,) = refuse(book, *arguments)
    assert says(message, line), line


def test_broken_rows_are_named_with_file_and_line(book):
    good = '{"text": "hello"}'
    book.write("rows.jsonl", f'{good}\n{{"text": 3}}\n{good}\n{{"txt": "x"}}\nnot json\n')
    book.edit(RECIPE, ("train: python-stdlib", "train: rows.jsonl"))
    lines = refuse(book, RECIPE)
    assert [line.split(": ")[0] for line in lines[:3]] == ["rows.jsonl:2", "rows.jsonl:4", "rows.jsonl:5"]
    assert "data.on_bad_row" in lines[3]


def fake_gpus(book, count):
    return simulated_driver.variables(book.root, f"count {count}\n{simulated_driver.H200}")


def test_a_driver_that_fails_is_an_error(book):
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    (line,) = refuse(book, RECIPE, **simulated_driver.variables(book.root, "init error 15"), **world)
    assert line == "the NVIDIA driver fails: GPU is lost; reboot, or reinstall it"


def test_more_processes_than_gpus_are_refused_and_as_many_are_fine(book):
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}
    (line,) = refuse(book, RECIPE, "--set", "batch.micro_batch_size=4", "--dry-run", **fake_gpus(book, 2), **world)
    assert "4 processes on this machine, which has 2 GPUs; ask for at most 2" in line
    done = book.train(RECIPE, "--set", "batch.micro_batch_size=4", "--dry-run", **fake_gpus(book, 4), **world)
    assert done.returncode == 0, done.stderr


def test_an_impossible_split_names_the_nearest_batches(book):
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    (line,) = refuse(book, RECIPE, "--set", "batch.global_batch_size=50", **world)
    assert "2 processes x micro_batch_size 8 = 16 sequences per forward" in line
    assert "Use global_batch_size 48 or 64, or micro_batch_size 5." in line


def test_a_large_and_tangled_file_is_refused_in_time(book):
    book.write(RECIPE, "\n".join(f"key_{i}: {{a: [1, 2]}}" for i in range(1700)))
    assert len(refuse(book, RECIPE)) > 1700
    book.write(RECIPE, "#" * 2_000_000)
    (line,) = refuse(book, RECIPE)
    assert line == "recipes/small.yaml: 2,000,000 bytes are too many for a settings file (50,000)"


def mistakes(book, *assignments):
    with pytest.raises(RecipeError) as caught:
        load_pair(Path(RECIPE), list(assignments))
    return caught.value.mistakes


# What is replaced in the recipe, and the only message.
TOLD = {
    "in a section of its own": ("run:", "run:\n  profile: {wait: 3}", "write run.profile: {steps: [10, 14]}"),
    "under another name": ("global_batch_size", "train_batch_size", "write it as batch.global_batch_size"),
    "elsewhere": (
        "optim:\n  learning_rate: 3e-3\n  weight_decay: 0.1",
        "learning_rate: 3e-3",
        "write it as optim.learning_rate",
    ),
    "elsewhere, but not all of its section": (
        "batch:\n  global_batch_size: 16\n  micro_batch_size: 8",
        "batch: {gradient_accumulation_steps: 2, micro_batch_size: 8}",
        "batch.global_batch_size: is missing",
    ),
}


@pytest.mark.parametrize("case", TOLD)
def test_a_key_that_a_message_says_to_write_is_not_missing_besides(book, case):
    old, new, message = TOLD[case]
    book.edit(RECIPE, (old, new))
    said = mistakes(book)
    assert message in said[-1] and len([text for text in said if "is missing" in text]) == ("missing" in message)


def test_what_is_missing_in_a_section_of_which_one_key_stands_elsewhere_is_told(book):
    book.edit(RECIPE, ("batch:\n  global_batch_size: 16\n  micro_batch_size: 8", "micro_batch_size: 8"))
    moved, missing = mistakes(book)
    assert "write it as batch.micro_batch_size" in moved and "batch.global_batch_size: is missing" in missing


# One row a mistake: what is replaced in the recipe, and the message after its place.
RECIPE_MISTAKES = {
    "key at the top": ("seed: 42", "sead: 42", "4: sead: unknown key; did you mean seed?"),
    "key in a section": (
        "weight_decay",
        "wieght_decay",
        "24: optim.wieght_decay: unknown key; did you mean weight_decay?",
    ),
    "key two deep": (
        "hidden_size",
        "hiden_size",
        "8: model.from_scratch.hiden_size: unknown key; did you mean hidden_size?",
    ),
    "key in a flow mapping": ("split: test", "splt: test", "15: data.eval.splt: unknown key; did you mean split?"),
    "key of a section": ("optim:", "optm:", "22: optm: unknown key; did you mean optim?"),
    "key of another section": (
        "seed: 42",
        "learning_rate: 1",
        "4: learning_rate: does not belong here; write it as optim.learning_rate",
    ),
    "merge key": ("seed: 42", "<<: {seed: 42}", "4: <<: unknown key; known here: ..."),
    "list as key": (
        "seed: 42",
        "? [a]\n: 42",
        "4: a key must be a plain word, found a list or mapping before the colon",
    ),
    "text for a number": ("seed: 42", "seed: '42'", r"4: seed is '42' (text); it must be an integer"),
    "true for a number": ("seed: 42", "seed: true", r"4: seed is true (true/false); it must be an integer"),
    "number for text": ("outputs/small", "7", r"30: run.output_dir is 7 (an integer); it must be text"),
    "fraction for a count": (
        "max_steps: 30",
        "max_steps: 2.5",
        r"29: run.max_steps is 2.5 (a number); it must be an integer",
    ),
    "no octal": ("seed: 42", "seed: 010", r"4: seed is '010' (text); it must be an integer"),
    "no sexagesimal": ("seed: 42", "seed: 1:30", r"4: seed is '1:30' (text); it must be an integer"),
    "no date": ("seed: 42", "seed: 2020-13-45", r"4: seed is '2020-13-45' (text); it must be an integer"),
    "endless number": (
        "seed: 42",
        "seed: " + "9" * 5000,
        "4: seed is a number of 5000 characters; write less than 2^63",
    ),
    "number too large": ("seed: 42", "seed: 4294967296", "4: seed is 4294967296; it must be less than 4294967296"),
    "negative": ("max_steps: 30", "max_steps: -1", "29: run.max_steps is -1; it must be greater than 0"),
    "zero": ("3e-3", "0", "23: optim.learning_rate is 0; it must be greater than 0"),
    "nan": ("3e-3", ".nan", "23: optim.learning_rate is nan; it must be a finite number"),
    "inf": ("3e-3", ".inf", "23: optim.learning_rate is inf; it must be a finite number"),
    "overflow": ("3e-3", "1e400", "23: optim.learning_rate is inf; it must be a finite number"),
    "a rate that no run has": (
        "3e-3",
        "1e308",
        "23: optim.learning_rate is 1e+308; it must be less than or equal to 1000",
    ),
    "a length that no memory holds": (
        "max_length: 256",
        f"max_length: 1{'0' * 12}",
        "16: data.max_length is 1000000000000; it must be less than or equal to 100000000",
    ),
    "more digits than any library takes": (
        "max_length: 256",
        f"max_length: 1{'0' * 400}",
        "16: data.max_length is a number of 401 characters; write less than 2^63",
    ),
    "the least number that is too large": (
        "max_steps: 30",
        f"max_steps: {2**63}",
        "29: run.max_steps is 9223372036854775808; write less than 2^63",
    ),
    "written null": ("seed: 42", "seed: null", "4: seed is null; write a value, or leave the key out for its default"),
    "null": ("seed: 42", "seed:", "4: seed is empty; write a value, or leave the key out for its default"),
    "number for a section": (
        "schedule:\n  name: cosine\n  warmup_steps: 10",
        "schedule: 3",
        r"25: schedule is 3 (an integer); it must be a section of `key: value` lines",
    ),
    "list for a section": (
        "objective:\n  train_on: assistant",
        "objective: []",
        r"17: objective is [] (a list); it must be a section of `key: value` lines",
    ),
    "list for a source": (
        "train: python-stdlib",
        "train: [python-stdlib, 3]",
        "14: data.train.1 is 3 (an integer); it must be a section of `key: value` lines",
    ),
    "section without its first key": (
        "{path: python-stdlib, split: test}",
        "{split: test}",
        "15: data.eval: path is missing; split is a key of a source, so no set can be called that",
    ),
    "too few betas": ("weight_decay: 0.1", "betas: [0.9]", "24: optim.betas has too few values"),
    "too many betas": (
        "weight_decay: 0.1",
        "betas: [0.9, 0.9, 0.9]",
        r"24: optim.betas is [0.9, 0.9, 0.9]; write 2 values",
    ),
    "beta out of range": ("weight_decay: 0.1", "betas: [0.9, 1.5]", "24: optim.betas.1 is 1.5; it must be less than 1"),
    "key of the other optimizer": (
        "weight_decay: 0.1",
        "momentum: 0.9",
        "22: optim: momentum would be ignored by adamw; take it out",
    ),
    "key twice": ("seed: 42", "seed: 42\nseed: 43", r"5: seed: given twice (first in line 4); keep one of them"),
    "key twice in a section": (
        "  warmup_steps: 10",
        "  warmup_steps: 10\n  warmup_steps: 11",
        r"28: schedule.warmup_steps: given twice (first in line 27); keep one of them",
    ),
    "bare no": ("'no'", "no", r"3: mixed_precision is false (YAML reads a bare no so); write 'no' in quotes"),
    "unknown precision": ("'no'", "fp32", "3: mixed_precision is 'fp32': 32 bits; write 'no'"),
    "loss scale without fp16": (
        "seed: 42",
        "loss_scale: {window: 10}\nseed: 42",
        "4: loss_scale: would be ignored with mixed_precision no; ...",
    ),
    "workers": ("seed: 42", "num_workers: 4\nseed: 42", "4: num_workers: does not belong here; rows ... ahead ..."),
    "gradients in fp16 without a loss scale": (
        "  weight_decay: 0.1",
        "  gradient_dtype: fp16",
        "24: optim.gradient_dtype is fp16 with mixed_precision no: small gradients would be 0 ...",
    ),
    "precision in capitals": ("'no'", "BF16", r"3: mixed_precision is 'BF16'; ... (did you mean 'bf16'?)"),
    "accumulation": (
        "seed: 42",
        "gradient_accumulation_steps: 2",
        r"4: gradient_accumulation_steps: does not belong here; it is derived: ...",
    ),
    "clipping under DeepSpeed's name": (
        "  weight_decay: 0.1",
        "  gradient_clipping: 1",
        "24: optim.gradient_clipping: does not belong here; write optim.max_grad_norm",
    ),
    "processes": (
        "seed: 42",
        "num_processes: 2",
        "4: num_processes: does not belong here; the accelerate YAML ... owns it ...",
    ),
    "warm-up as long as the run": (
        "warmup_steps: 10",
        "warmup_steps: 30",
        "27: schedule.warmup_steps is 30, but the run has 30 steps: ...; write less than 30",
    ),
    "both lengths": (
        "max_steps: 30",
        "max_steps: 30\n  num_epochs: 1",
        r"28: run: num_epochs 1 and max_steps 30 are both given; keep one (null unsets a key)",
    ),
    "no length": ("  max_steps: 30\n", "", "28: run: neither num_epochs nor max_steps is given; write one of them"),
    "both models": (
        "  from_scratch:",
        "  name_or_path: x\n  from_scratch:",
        "5: model: name_or_path 'x' and from_scratch are both given; keep one",
    ),
    "odd heads": (
        "num_attention_heads: 4",
        "num_attention_heads: 3",
        "6: model.from_scratch: hidden_size 128 / num_attention_heads 3 must be an even integer",
    ),
    "missing strategy": (
        "ddp.yaml",
        "ddpx.yaml",
        "2: strategy is 'accelerate_configs/ddpx.yaml': no such file; did you mean accelerate_configs/ddp.yaml?",
    ),
    "name of no strategy": (
        "accelerate_configs/ddp.yaml",
        "zerro3",
        "2: strategy is 'zerro3': no such strategy; did you mean zero3?",
    ),
    "missing template": (
        "max_length",
        "chat_template: no.jinja\n  max_length",
        r"16: data.chat_template is 'no.jinja': no such file (looked in ...)",
    ),
    "name of no template": (
        "max_length",
        "chat_template: qwenn3\n  max_length",
        "16: data.chat_template is 'qwenn3': no such template; did you mean qwen3?",
    ),
    "missing data": (
        "train: python-stdlib",
        "train: no.parquet",
        r"14: data.train is 'no.parquet': no such file (looked in ...)",
    ),
    "missing folder": (
        "train: python-stdlib",
        "train: ./no",
        r"14: data.train is './no': no such folder (looked in ...)",
    ),
    "data file of another kind": (
        "train: python-stdlib",
        "train: train.py",
        "14: data.train is 'train.py': a data file must end in .jsonl, .json, ...",
    ),
    "split of the built-in source": (
        "split: test",
        "split: tset",
        "15: data.eval.split is 'tset'; python-stdlib has train and test",
    ),
    "slice of a file": (
        "train: python-stdlib",
        "train: {path: README.md, split: 'train[:20%]'}",
        "14: data.train.split is 'train[:20%]', but a file is read whole; take it out, limit ...",
    ),
    "slice of a folder": (
        "train: python-stdlib",
        "train: {path: ./recipes, split: 'train[:20%]'}",
        "14: data.train.split is 'train[:20%]', but a slice is for the Hub; take it out, ...",
    ),
    "Hub key of a local source": (
        "split: test",
        "name: x",
        "15: data.eval: name would be ignored: python-stdlib is not on the Hub; take it out",
    ),
    "home folder": (
        "train: python-stdlib",
        "train: ~/rows",
        "14: data.train.path is '~/rows', and ~ is not expanded here; write the folder in full",
    ),
    "home folder of outputs": (
        "outputs/small",
        "~/x",
        "30: run.output_dir is '~/x', and ~ is not expanded here; write the folder in full",
    ),
    "outputs under a file": (
        "outputs/small",
        "train.py/x",
        "30: run.output_dir is 'train.py/x', but train.py is a file; name a folder",
    ),
    "empty path": ("outputs/small", "''", "30: run.output_dir is empty; write a path"),
    "NUL in a path": (
        "accelerate_configs/ddp.yaml",
        r'"a\0b"',
        r"2: strategy is 'a\x00b', with a character that no path should have",
    ),
    "endless path": (
        "accelerate_configs/ddp.yaml",
        "a" * 3000,
        r"2: strategy is 'aaa..., which is too long for a path",
    ),
    "anchor": (
        "seed: 42",
        "seed: &s 42",
        r"4: not valid YAML: anchors (&name) and aliases (*name) are not supported; ...",
    ),
    "python tag": (
        "seed: 42",
        "seed: !!python/object/apply:os.system [ls]",
        r"4: not valid YAML: tags are not supported (...); write a plain value",
    ),
    "tag on a section": (
        "data:",
        "data: !!python/object:os.X",
        r"13: not valid YAML: tags are not supported (...); write a plain value",
    ),
    "control character": ("seed: 42", 'seed: "\x07"', r"4: not valid YAML: character '\x07' is not allowed"),
    "checkpointing of another kind": (
        "  from_scratch:",
        "  gradient_checkpointing: full\n  from_scratch:",
        "6: model.gradient_checkpointing is 'full'; use false, true, 'selective', 'offload' or 'auto'",
    ),
    "number for a choice with true": (
        "  from_scratch:",
        "  gradient_checkpointing: 1\n  from_scratch:",
        "6: model.gradient_checkpointing is 1; use false, true, 'selective', 'offload' or 'auto'",
    ),
    "one target as text": (
        "batch:",
        "adapter: {name: lora, targets: q_proj}\nbatch:",
        "19: adapter.targets is 'q_proj'; write all-linear, or a list: [q_proj]",
    ),
    "number for a target": (
        "batch:",
        "adapter: {name: lora, targets: [1]}\nbatch:",
        "19: adapter.targets.0 is 1 (an integer); it must be text",
    ),
    "number for the targets": (
        "batch:",
        "adapter: {name: lora, targets: 1}\nbatch:",
        "19: adapter.targets is 1 (an integer); it must be a list",
    ),
    "no target": (
        "batch:",
        "adapter: {name: lora, targets: []}\nbatch:",
        "19: adapter.targets is empty; write all-linear, or name layers",
    ),
    "columns the wrong way round": (
        "train: python-stdlib",
        "train: python-stdlib\n  columns: {question: user}",
        "15: data.columns has 'question'; write KEY: COLUMN with a key of ...; did you mean user: question?",
    ),
    "no source": ("train: python-stdlib", "train: []", "14: data.train is empty; name at least one source"),
    "evaluation sets without names": (
        "{path: python-stdlib, split: test}",
        "[a, b]",
        "15: data.eval is a list; give each set a name, as in {...}",
    ),
    "number for evaluation sets": (
        "{path: python-stdlib, split: test}",
        "3",
        "15: data.eval is 3 (an integer); it must be a section of `key: value` lines",
    ),
    "evaluation set called like a key": (
        "{path: python-stdlib, split: test}",
        "{name: x/y, code: z}",
        "15: data.eval: path is missing; name is a key of a source, so no set can be called that",
    ),
    "tab": ("  max_steps", "\tmax_steps", r"29: not valid YAML: ... (indent with spaces)"),
    "two documents": (
        "model:",
        "---\nmodel:",
        "5: not valid YAML: expected a single document in the stream, but found another document",
    ),
}


@pytest.mark.parametrize(("old", "new", "message"), RECIPE_MISTAKES.values(), ids=RECIPE_MISTAKES)
def test_a_mistake_in_a_recipe_is_one_line_with_its_place(book, old, new, message):
    book.edit(RECIPE, (old, new))
    (line,) = mistakes(book)
    assert says(f"{RECIPE}:{message}", line), line


def test_an_evaluation_interval_without_data_is_refused(book):
    book.edit(
        RECIPE,
        ("  eval: {path: python-stdlib, split: test}\n", ""),
        ("max_steps: 30", "max_steps: 30\n  eval_every_steps: 5"),
    )
    place = "recipes/small.yaml:29: run.eval_every_steps"
    assert mistakes(book) == [f"{place} is 5, but there is no data.eval; add it, or take this key out"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ": the file is empty"),
        ("# nothing\n", ": the file is empty"),
        ("- a\n- b\n", ": expected `key: value` lines, found a list"),
        ("hello", ": expected `key: value` lines, found text"),
        ("a: [1\nb: 2", ":2: not valid YAML: ..."),
        (b"\x00\xff", ": not UTF-8 text ..."),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", ":1: not valid YAML: anchors ..."),
        ("a: " + "[" * 5000, ":1: not valid YAML: nested too deeply"),
        ("a: " + "{a: " * 3000 + "}" * 3000, ":1: not valid YAML: nested too deeply"),
    ],
    ids=["empty", "comment", "list", "text", "not YAML", "not text", "alias bomb", "deep list", "deep mapping"],
)
def test_a_file_that_is_no_recipe_is_refused(book, content, message):
    book.write(RECIPE, content)
    (line,) = mistakes(book)
    assert says(RECIPE + message, line), line


# One row a mistake: the strategy, the file, what is replaced there, and the message after the file's name.
YAML, JSON = "accelerate_configs/{}.yaml", "ds_configs/{}.json"
STRATEGY_MISTAKES = {
    "YAML key": (
        "ddp",
        YAML,
        "num_processes",
        "num_proceses",
        ":2: num_proceses: unknown key; did you mean num_processes?",
    ),
    "YAML key in a block": (
        "fsdp2",
        YAML,
        "fsdp_version",
        "fsdp_verion",
        ":4: fsdp_config.fsdp_verion: unknown key; did you mean fsdp_version?",
    ),
    "YAML key twice": (
        "fsdp2",
        YAML,
        "  fsdp_version: 2",
        "  fsdp_version: 2\n  fsdp_version: 2",
        r":5: fsdp_config.fsdp_version: given twice (first in line 4); ...",
    ),
    "buckets of DDP in a strategy without it": (
        "pp",
        YAML,
        "  parallelism_config_pp_size: 2",
        "  parallelism_config_pp_size: 2\n  parallelism_config_ddp_bucket_cap_mb: 50",
        ":5: parallelism_config.parallelism_config_ddp_bucket_cap_mb: would be ignored: ...",
    ),
    "buckets of DDP beside FSDP": (
        "hsdp",
        YAML,
        "  parallelism_config_dp_shard_size: auto",
        "  parallelism_config_ddp_bucket_cap_mb: 50\n  parallelism_config_dp_shard_size: auto",
        ":9: parallelism_config.parallelism_config_ddp_bucket_cap_mb: would be ignored: ...",
    ),
    "chunks without a pipeline": (
        "ddp_tp",
        YAML,
        "  parallelism_config_tp_size: 2",
        "  parallelism_config_tp_size: 2\n  parallelism_config_pp_chunks: 2",
        ":6: parallelism_config.parallelism_config_pp_chunks: would be ignored: there is no pp_size ...",
    ),
    "no chunks": (
        "pp",
        YAML,
        "  parallelism_config_pp_size: 2",
        "  parallelism_config_pp_size: 2\n  parallelism_config_pp_chunks: 0",
        ":5: parallelism_config.parallelism_config_pp_chunks is 0; ...",
    ),
    "a static graph for DDP": (
        "ddp_sp",
        YAML,
        "  parallelism_config_sp_size: 2",
        "  parallelism_config_sp_size: 2\n  static_graph: true",
        ":5: parallelism_config.static_graph: does not belong here; not supported: torch 2.13 fails with it ...",
    ),
    "precision": (
        "ddp",
        YAML,
        "num_processes",
        "mixed_precision: bf16\nnum_processes",
        ":2: mixed_precision is 'bf16', but the recipe's mixed_precision is 'no'; ...",
    ),
    "clipping": (
        "zero3",
        YAML,
        "  deepspeed_multinode",
        "  gradient_clipping: 2\n  deepspeed_multinode",
        ":5: deepspeed_config.gradient_clipping is 2, but the recipe's optim.max_grad_norm is 1.0; ...",
    ),
    "stage in the YAML": (
        "zero3",
        YAML,
        "  deepspeed_multinode",
        "  zero_stage: 2\n  deepspeed_multinode",
        ":5: deepspeed_config.zero_stage: would be ignored beside a JSON; write zero_optimization.stage in the JSON",
    ),
    "use_cpu": (
        "zero3",
        YAML,
        "num_processes",
        "use_cpu: true\nnum_processes",
        ":...: use_cpu is true: accelerate would drop DEEPSPEED and train plain DDP; take it out: ...",
    ),
    "MULTI_CPU": (
        "ddp",
        YAML,
        "MULTI_GPU",
        "MULTI_CPU",
        ":1: distributed_type is 'MULTI_CPU': without GPUs a run takes the CPU by itself; write MULTI_GPU",
    ),
    "bare NO": (
        "single",
        YAML,
        "'NO'",
        "NO",
        r":1: distributed_type is false (YAML reads a bare no so); write 'NO' in quotes",
    ),
    "no count": ("ddp", YAML, "auto", "0", r":2: num_processes is 0; use auto (one per GPU) or a count from 1"),
    "true for a count": (
        "ddp",
        YAML,
        "auto",
        "true",
        r":2: num_processes is true; use auto (one per GPU) or a count from 1",
    ),
    "single with two": (
        "single",
        YAML,
        "1",
        "2",
        ":2: num_processes is 2; distributed_type NO runs one process: write 1",
    ),
    "uneven machines": (
        "ddp",
        YAML,
        "auto",
        "3\nnum_machines: 2",
        ":2: num_processes is 3, which num_machines 2 cannot split evenly; write 4",
    ),
    "auto over machines": (
        "ddp",
        YAML,
        "auto",
        "auto\nnum_machines: 2",
        ":2: num_processes is auto; with num_machines 2 write the count over all machines, as 16",
    ),
    "rank of a machine that is not": (
        "ddp",
        YAML,
        "auto",
        "4\nnum_machines: 2\nmachine_rank: 5",
        ":4: machine_rank is 5, with num_machines 2; write 0 to 1",
    ),
    "address without another machine": (
        "ddp",
        YAML,
        "auto",
        "auto\nmain_process_ip: 10.0.0.1",
        ":3: main_process_ip: would be ignored with one machine; take it out",
    ),
    "block without its type": (
        "fsdp2",
        YAML,
        "FSDP",
        "MULTI_GPU",
        ":3: fsdp_config: would be ignored: distributed_type is MULTI_GPU, not FSDP; take it out",
    ),
    "type without its block": (
        "ddp",
        YAML,
        "MULTI_GPU",
        "FSDP",
        ":1: distributed_type is FSDP, but there is no fsdp_config; add fsdp_config: {...}",
    ),
    "mesh of another size": (
        "fsdp2_tp",
        YAML,
        "num_processes: auto",
        "num_processes: 2",
        ":2: num_processes is 2, but the mesh of parallelism_config is 2 x 2: write 4",
    ),
    "fewer processes than an open mesh has at least": (
        "hsdp",
        YAML,
        "num_processes: auto",
        "num_processes: 2",
        ":2: num_processes is 2, but the mesh of parallelism_config is auto x auto: write 4 or more, in multiples of 2",
    ),
    "two open sizes that do not say which is which": (
        "fsdp2_tp",
        YAML,
        "parallelism_config_dp_shard_size: 2\n  parallelism_config_tp_size: 2",
        "parallelism_config_dp_shard_size: auto\n  parallelism_config_tp_size: auto",
        ":7: parallelism_config: dp_shard_size and tp_size are auto; leave one open, or both dp sizes",
    ),
    "tensor parallel and FSDP without shards": (
        "fsdp2_tp",
        YAML,
        "parallelism_config_dp_shard_size: 2",
        "parallelism_config_dp_shard_size: 1",
        ":7: parallelism_config: tp_size with distributed_type FSDP needs a dp_shard_size from 2 on",
    ),
    "pipeline and sequence parallel": (
        "pp_tp",
        YAML,
        "parallelism_config_tp_size: 2",
        "parallelism_config_sp_size: 2",
        ":3: parallelism_config: pp_size with distributed_type MULTI_GPU goes with dp_replicate_size and tp_size ...",
    ),
    "pipeline, FSDP and copies": (
        "pp_fsdp2",
        YAML,
        "parallelism_config_pp_size: 2",
        "parallelism_config_pp_size: 2\n  parallelism_config_dp_replicate_size: 2",
        ":7: parallelism_config: pp_size with distributed_type FSDP goes with dp_shard_size and tp_size only; ...",
    ),
    "pipeline and FSDP without shards": (
        "pp_fsdp2",
        YAML,
        "parallelism_config_dp_shard_size: 2",
        "parallelism_config_dp_shard_size: 1",
        ":7: parallelism_config: pp_size with distributed_type FSDP needs a dp_shard_size from 2 on",
    ),
    "pipeline, FSDP and whole weights": (
        "pp_fsdp2",
        YAML,
        "fsdp_reshard_after_forward: true",
        "fsdp_reshard_after_forward: false",
        ":7: parallelism_config: fsdp_reshard_after_forward: false would be ignored with pp_size; write true",
    ),
    "expert parallel and copies": (
        "fsdp2_ep",
        YAML,
        "parallelism_config_ep_size: 2",
        "parallelism_config_ep_size: 2\n  parallelism_config_dp_replicate_size: 2",
        ":7: parallelism_config: ep_size goes with distributed_type FSDP and with dp_shard_size only; ...",
    ),
    "expert parallel and gathered layers": (
        "fsdp2_ep",
        YAML,
        "fsdp_reshard_after_forward: true",
        "fsdp_reshard_after_forward: false",
        ":7: parallelism_config: fsdp_reshard_after_forward: false would be ignored with ep_size; write true",
    ),
    "pipeline and ZeRO": (
        "zero3_sp",
        YAML,
        "parallelism_config_sp_size: 2",
        "parallelism_config_pp_size: 2",
        ":6: parallelism_config: pp_size with distributed_type DEEPSPEED is not supported; write MULTI_GPU or FSDP",
    ),
    "tensor parallel and offload": (
        "fsdp2_tp",
        YAML,
        "fsdp_reshard_after_forward: true",
        "fsdp_reshard_after_forward: true\n  fsdp_offload_params: true",
        ":8: parallelism_config: fsdp_offload_params with tp_size is not supported; take one of them out",
    ),
    "tensor parallel and gathered layers": (
        "fsdp2_tp",
        YAML,
        "fsdp_reshard_after_forward: true",
        "fsdp_reshard_after_forward: false",
        ":7: parallelism_config: fsdp_reshard_after_forward: false would be ignored with tp_size; write true",
    ),
    "tensor parallel and one reader": (
        "fsdp2_tp",
        YAML,
        "fsdp_reshard_after_forward: true",
        "fsdp_reshard_after_forward: true\n  fsdp_cpu_ram_efficient_loading: true",
        ":8: parallelism_config: fsdp_cpu_ram_efficient_loading would be ignored with tp_size: ...",
    ),
    "original parameters off": (
        "fsdp1",
        YAML,
        "use_orig_params: true",
        "use_orig_params: false",
        ":7: fsdp_config.fsdp_use_orig_params is false: ...; write true",
    ),
    "true for a version": (
        "fsdp2",
        YAML,
        "version: 2",
        "version: true",
        ":4: fsdp_config.fsdp_version is true; write 2, or 1",
    ),
    "number for a block": (
        "zero3",
        YAML,
        "  deepspeed_config_file: ds_configs/zero3.json\n  deepspeed_multinode_launcher: standard",
        "  - 3",
        r":3: deepspeed_config is [3] ...",
    ),
    "missing JSON": (
        "zero3",
        YAML,
        "zero3.json",
        "zero33.json",
        ":4: deepspeed_config.deepspeed_config_file is 'ds_configs/zero33.json': no such file; did you mean ...?",
    ),
    "JSON key": ("zero3", JSON, '"bf16"', '"bf61"', ":2: bf61: unknown key; did you mean bf16?"),
    "JSON key in a block": (
        "zero3",
        JSON,
        '"overlap_comm"',
        '"overlap_com"',
        ":14: zero_optimization.overlap_com: unknown key; did you mean overlap_comm?",
    ),
    "JSON key twice": (
        "zero3",
        JSON,
        '"stage": 3,',
        '"stage": 3, "stage": 2,',
        r":13: zero_optimization.stage: given twice (first in line 13); ...",
    ),
    "JSON clipping": (
        "zero3",
        JSON,
        '"gradient_clipping": "auto"',
        '"gradient_clipping": 0.5',
        ":11: gradient_clipping is 0.5, but the recipe's optim.max_grad_norm is 1.0; ...",
    ),
    "JSON batch": (
        "zero3",
        JSON,
        '"train_batch_size": "auto"',
        '"train_batch_size": 32',
        ":8: train_batch_size is 32, but the recipe's batch.global_batch_size is 16; ...",
    ),
    "JSON precision": (
        "zero3",
        JSON,
        '"auto"',
        "true",
        ":3: bf16.enabled is true, but the recipe's bf16 is false; ...",
    ),
    "JSON optimizer": (
        "zero3",
        JSON,
        '"bf16"',
        '"optimizer": {"type": "SGD"}, "bf16"',
        ":2: optimizer.type is 'SGD', but the recipe's optim.name is 'adamw'; ...",
    ),
    "group of half a machine": (
        "zero3_hpz",
        JSON,
        '"auto",\n    "overlap',
        '"half",\n    "overlap',
        ":14: zero_optimization.zero_hpz_partition_size is 'half'; write a whole number, or auto",
    ),
    "stage 4": ("zero3", JSON, '"stage": 3', '"stage": 4', ":13: zero_optimization.stage is 4; use 1, 2 or 3"),
    "stage true": (
        "zero1",
        JSON,
        '"stage": 1',
        '"stage": true',
        ":13: zero_optimization.stage is true; write 1, 2 or 3",
    ),
    "offloaded parameters at stage 2": (
        "zero2_offload",
        JSON,
        '"offload_optimizer": {',
        '"offload_param": {"device": "cpu"}, "offload_optimizer": {',
        ":19: zero_optimization.offload_param: needs stage 3, the stage is 2; take it out",
    ),
    "float32 sums in stage 1": (
        "zero1",
        JSON,
        '"zero_optimization": {',
        '"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {',
        ":12: data_types: with stage 1 DeepSpeed would run its BF16_Optimizer, not ZeRO-1; ...",
    ),
    "prefetching from a disk": (
        "zero3_nvme",
        JSON,
        '"stage3_prefetch_bucket_size": 0',
        '"stage3_prefetch_bucket_size": 7',
        ":19: zero_optimization.stage3_prefetch_bucket_size must be 0 with parameters on nvme: ...; write 0",
    ),
    "NVMe at stage 2": (
        "zero2_offload",
        JSON,
        '"device": "cpu"',
        '"device": "nvme", "nvme_path": "x"',
        ":20: zero_optimization.offload_optimizer.device is nvme, which needs stage 3; use cpu",
    ),
    "NVMe without a path": (
        "zero3_nvme",
        JSON,
        '      "nvme_path": "nvme_swap",\n',
        "",
        ":24: zero_optimization.offload_optimizer.device is nvme, but there is no nvme_path; add nvme_path: ...",
    ),
    "offload to nothing": (
        "zero2_offload",
        JSON,
        '"device": "cpu"',
        '"device": null',
        ":20: zero_optimization.offload_optimizer.device is null; ...",
    ),
    "a key that stage 3 does not read": (
        "zero3",
        JSON,
        '"overlap_comm"',
        '"round_robin_gradients": true,\n    "overlap_comm"',
        ":14: zero_optimization.round_robin_gradients: stage 3 does not read it; take it out",
    ),
    "forced optimizer": (
        "zero2_offload",
        JSON,
        "false",
        "true",
        ":12: zero_force_ds_cpu_optimizer is true: DeepSpeedCPUAdam is not the ...; write false",
    ),
    "NaN": (
        "zero3",
        JSON,
        "200000000",
        "NaN",
        r":16: zero_optimization.reduce_bucket_size is nan; write a whole number, or auto",
    ),
    "negative": (
        "zero3",
        JSON,
        "200000000",
        "-1",
        ":16: zero_optimization.reduce_bucket_size is -1; write 1 or more",
    ),
    "null": (
        "zero3",
        JSON,
        "200000000",
        "null",
        ":16: zero_optimization.reduce_bucket_size is null; write a value, or take the key out",
    ),
    "endless number": ("zero3", JSON, "200000000", "9" * 5000, ": not valid JSON: a number with too many digits"),
    "trailing comma": ("zero3", JSON, '"auto"\n  }', '"auto",\n  }', ":...: not valid JSON: ..."),
    "comment": ("zero3", JSON, "{", "// hi\n{", ":1: not valid JSON: ..."),
    "deep JSON": ("zero3", JSON, '"auto"', "[" * 900 + "]" * 900, ":3: not valid ...: nested too deeply"),
}


@pytest.mark.parametrize(("name", "file", "old", "new", "message"), STRATEGY_MISTAKES.values(), ids=STRATEGY_MISTAKES)
def test_a_mistake_in_a_strategy_is_one_line_with_its_place(book, name, file, old, new, message):
    book.edit(file.format(name), (old, new))
    line, *more = mistakes(book, f"strategy=accelerate_configs/{name}.yaml")
    assert says(file.format(name) + message, line), line
    assert all("cookbook convert" in line for line in more) and len(more) <= 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ": the file is empty"),
        ("[]", ": expected `key: value` lines, found a list"),
        ("null", ": the file is empty"),
    ],
    ids=["empty", "list", "null"],
)
def test_a_json_that_is_no_mapping_is_refused(book, content, message):
    book.write(ZERO3_JSON, content)
    assert mistakes(book, f"strategy={ZERO3}") == [ZERO3_JSON + message]


SET_MISTAKES = {
    "no value": (
        "optim.learning_rate=",
        "--set optim.learning_rate=: is empty; write a value, or null to unset the key",
    ),
    "not YAML": ("run.max_steps=[1", r"--set run.max_steps=[1: not valid YAML: ..."),
    "alias": ("seed=*a", r"--set seed=*a: not valid YAML: anchors ..."),
    "no key": ("=3", "--set =3: write it as section.key=value"),
    "no last key": ("optim.=3", "--set optim.=3: write it as section.key=value"),
    "unknown section": ("a.b.c=1", "--set a.b.c: a: unknown key; known here: ..."),
    "key of a number": ("seed.x=3", "--set seed.x=3: seed is 42, which has no keys; set seed as a whole"),
    "key of a short source": (
        "data.train.split=test",
        "--set data.train.split=test: data.train is 'python-stdlib', ...",
    ),
    "index of a list": ("optim.betas.0=1", "--set optim.betas.0: optim.betas is ...; it must be a list"),
    "section": ("optim=3", r"--set optim is 3 (an integer); ..."),
    "strategy": (
        "strategy=zerro3",
        "--set strategy is 'zerro3': no such strategy; did you mean zero3?",
    ),
}


@pytest.mark.parametrize(("assignment", "message"), SET_MISTAKES.values(), ids=SET_MISTAKES)
def test_a_mistake_in_an_override_says_so(book, assignment, message):
    (line,) = mistakes(book, assignment)
    assert says(message, line), line


def test_a_broken_recipe_does_not_hide_the_strategy_of_an_override(book):
    book.edit(RECIPE, ("seed: 42", "sead: 42"))
    book.edit("accelerate_configs/zero1.yaml", ("auto", "0"))
    lines = mistakes(book, "strategy=accelerate_configs/zero1.yaml")
    assert [line.split(":")[0] for line in lines] == [RECIPE, "accelerate_configs/zero1.yaml"]


CONTRADICTION = "ds_configs/zero3.json:11: gradient_clipping is 0.5, but the recipe's optim.max_grad_norm is 1.0; ..."


@pytest.mark.parametrize("what", ["strategy", "recipe", "both"])
def test_what_a_file_with_mistakes_says_against_the_other_is_reported_with_them(book, what):
    book.edit(ZERO3_JSON, ('"gradient_clipping": "auto"', '"gradient_clipping": 0.5'))
    if what != "recipe":
        book.edit(ZERO3_JSON, ('"overlap_comm"', '"overlap_com"'))
    if what != "strategy":
        book.edit(RECIPE, ("max_steps: 30", "max_steps: -1"))
    *others, last, way = mistakes(book, f"strategy={ZERO3}")
    assert says(CONTRADICTION, last) and f"`cookbook convert {ZERO3}`" in way, last
    assert len(others) == (2 if what == "both" else 1)
    book.edit(ZERO3_JSON, ("0.5", "1.0"))
    assert [mistake for mistake in mistakes(book, f"strategy={ZERO3}") if mistake != way] == others


@pytest.mark.parametrize("command", ["check", "launch"])
@pytest.mark.parametrize("broken", ["max_steps: -1", "num_epochs: 1\n  max_steps: 3"])
def test_a_broken_recipe_does_not_hide_a_mesh_of_another_size(book, command, broken, capsys):
    book.edit(RECIPE, ("max_steps: 30", broken))
    assert main([command, RECIPE, "--strategy", "tp", "--processes", "3"]) == 2
    said = capsys.readouterr().err
    assert "is a mesh of 2 processes, but 3 were requested" in said and f"{RECIPE}:2" in said
    assert main([command, RECIPE, "--strategy", "tp", "--processes", "2"]) == 2
    assert "is a mesh" not in capsys.readouterr().err


def test_a_broken_strategy_does_not_hide_a_checkpoint_that_is_not_there(book, capsys):
    book.edit(ZERO3_JSON, ('"overlap_comm"', '"overlap_com"'))
    assert main(["check", RECIPE, "--strategy", "zero3", "--set", "run.resume=nowhere"]) == 2
    said = capsys.readouterr().err
    assert "overlap_com: unknown key" in said and "run.resume is 'nowhere': no such folder" in said


@pytest.mark.parametrize("command", ["check", "explain", pytest.param("plan", marks=pytest.mark.slow)])
def test_a_recipe_without_a_strategy_is_served_where_the_command_line_names_one(book, command, capsys):
    book.edit(RECIPE, ("strategy: accelerate_configs/ddp.yaml\n", ""))
    assert main([command, RECIPE, "--strategy", "zero2"]) == 0
    assert "zero2" in capsys.readouterr().out
    assert load_pair(Path(RECIPE), [], Path(ZERO3))[0].run.output_dir == "outputs/small"
    assert main([command, RECIPE]) == 2


ODD_VALUES = (
    None, True, -1, 0, 2**70, 2**63 - 1, 0.5, float("nan"), float("inf"), "", "~", "auto", "no", "x" * 400, "a\nb",
    "\0", [], [[]], [None, 1], {}, {"a": {"b": [1]}}, {"path": None}, {"device": "nvme"}, {"": 1}, "../..", "/", ".",
    "3",
)  # fmt: skip


def every_path(values, path=()):
    """The path of each value, sections included."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from every_path(value, (*path, key))


def test_no_mutation_of_the_files_ever_gives_anything_but_a_clear_refusal(book):
    """Each round puts one to three odd values into one of the three files; only a RecipeError may come of it."""
    draw = random.Random(5)
    files = [RECIPE, "accelerate_configs/zero3_nvme.yaml", "ds_configs/zero3_nvme.json"]
    originals = {name: yaml.safe_load(Path(name).read_text()) for name in files}
    originals[RECIPE]["strategy"] = files[1]

    def write(name, values):
        return json.dumps(values) if name.endswith("json") else yaml.safe_dump(values)

    for name, values in originals.items():
        book.write(name, write(name, values))
    load_pair(Path(RECIPE))
    refusals = []
    for _ in range(300):
        name = draw.choice(files)
        values = copy.deepcopy(originals[name])
        for _ in range(draw.randint(1, 3)):
            *path, key = draw.choice(list(every_path(values)) or [("x",)])
            section = values
            for part in path:
                section = section[part]
            if draw.random() < 0.2 and isinstance(section, dict):
                section[draw.choice(["", "~", "a\nb", "x" * 400, "no", "3"])] = section.pop(key, None)
            else:
                section[key] = draw.choice(ODD_VALUES)
        book.write(name, write(name, values))
        try:
            load_pair(Path(RECIPE))
        except RecipeError as error:
            refusals.append(error)
        book.write(name, write(name, originals[name]))
    assert len(refusals) > 200
    assert [line for error in refusals for line in error.mistakes if not line.isprintable() or len(line) > 600] == []


def test_no_mutation_of_the_characters_ever_gives_anything_but_a_clear_refusal(book):
    draw = random.Random(6)
    book.edit(RECIPE, ("ddp.yaml", "zero3.yaml"))
    for _ in range(200):
        name = draw.choice([RECIPE, ZERO3, ZERO3_JSON])
        text = original = Path(name).read_text()
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(text))
            text = (
                text[:at] + draw.choice(list("{}[]:,#&*!|>'\"%@`-? \n\t0x\x01é~<=")) + text[at + draw.randint(0, 2) :]
            )
        book.write(name, text)
        with contextlib.suppress(RecipeError):
            load_pair(Path(RECIPE))
        book.write(name, original)


def test_a_run_that_the_command_line_makes_short_runs_and_says_so(book):
    done = book.train(RECIPE, "--dry-run", "--set", "run.max_steps=3")
    assert done.returncode == 0
    (short,) = [doubt for doubt in doubts(load_recipe(Path(RECIPE), ["run.max_steps=3"])) if "warm-up" in doubt]
    assert short == "schedule.warmup_steps is 10, but the run has 3 steps: none would follow the warm-up"
    book.edit(RECIPE, ("max_steps: 30", "max_steps: 3"))
    assert "write less than 3" in mistakes(book)[0]


def test_a_folder_that_cannot_be_written_is_told_before_a_launch(book, monkeypatch):
    output_dir = Path("there", "run")
    output_dir.parent.mkdir()
    recipe = load_recipe(Path(RECIPE), [f"run.output_dir={output_dir}"])
    assert not [doubt for doubt in doubts(recipe) if "run.output_dir" in doubt]
    able = os.access  # root may write anywhere, whatever the mode says
    monkeypatch.setattr(os, "access", lambda path, mode: path != output_dir.parent.absolute() and able(path, mode))
    (told,) = [doubt for doubt in doubts(recipe) if "run.output_dir" in doubt]
    expected = f"run.output_dir is 'there/run', and you cannot write to {output_dir.parent.absolute()} on this machine"
    assert told == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "seed=1", "run.max_steps=3"], "run.max_steps=3: write --set before each: --set run.max_steps=3"),
        (["--epochs", "10"], "--epochs: write --set run.num_epochs=10"),
        (["--learning_rate=1e-4"], "--learning_rate=1e-4: write --set optim.learning_rate=VALUE"),
    ],
)
def test_a_slip_on_the_command_line_is_answered_with_what_to_write(book, words, said):
    done = book.train(RECIPE, "--dry-run", *words)
    assert done.returncode == 2 and said in done.stderr and "usage" not in done.stderr


def test_on_the_command_line_a_bare_no_is_a_precision(book):
    assert load_recipe(Path(RECIPE), ["mixed_precision=no"]).mixed_precision == "no"


@pytest.mark.parametrize("name", ["config.json", "rows.jsonl", "other-run/run.json"])
def test_a_folder_that_no_run_made_is_not_taken(book, name):
    book.write(f"outputs/taken/{name}", "{}")
    (mistake,) = mistakes(book, "run.output_dir=outputs/taken")
    assert "which is no run's folder and not empty" in mistake
    book.write("outputs/taken/run.json", "{}")
    load_pair(Path(RECIPE), ["run.output_dir=outputs/taken"])
