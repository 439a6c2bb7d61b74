"""Texts of others reach no terminal raw: rows, answers, names, and the files of a run, through the commands.

python -m pytest -q tests/test_foreign_text.py
"""

import io
import json
import re
import shutil
import unicodedata
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT
from test_chat import save_model

from cookbook.commands.cli import main
from cookbook.commands.preview.sample_page import preview
from cookbook.config.recipe import dump_recipe, load_recipe
from cookbook.system.console import printable, say
from cookbook.training.checkpoint import folder
from cookbook.training.checkpoint.saver import Saver
from cookbook.training.checkpoint.tensors import StagedPiece
from tests.small_data import make_tokenizer

ATTACKS = [
    "\x1b]52;c;ZWNobyBQV04=\x07",  # the clipboard
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
    "\x1b[2J\x1b[H\x9b2J",
    "\x1b[8mhidden",
    "\u202egnp.exe\u2066",
    "\x08\x08\x7fgone\rover",
]
EVIL = "evil " + " ".join(ATTACKS)


def raw(text: str) -> list[str]:
    """Characters that a terminal acts on."""
    turning = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    return [
        ascii(letter)
        for letter in text
        if (unicodedata.category(letter) == "Cc" and letter not in "\n\t")
        or unicodedata.bidirectional(letter) in turning
    ]


def test_texts_of_other_scripts_stay_as_they_are():
    plain = "déjà vu 数据 שלום 👩‍💻 tab\tline\n"
    assert printable(plain) == plain and not raw(printable(EVIL)) and len(raw(EVIL)) > 15


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose every file has such texts."""
    root = tmp_path_factory.mktemp("foreign")
    run = root / "run"
    rows = [{"messages": [{"role": "user", "content": EVIL}, {"role": "assistant", "content": EVIL}]}] * 2
    (root / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", [f"data.train={root}/rows.jsonl", f"run.output_dir={run}"])
    values = yaml.safe_load(dump_recipe(recipe))
    save_model(run / "export", 1)
    values["data"]["eval"] = {"path": str(root / "rows.jsonl")}
    (run / "recipe.yaml").write_text(yaml.safe_dump(values))
    record = {
        "strategy": {"file": EVIL, "processes": 1},
        "header": {EVIL: EVIL},
        "max_steps": 2,
        "written_settings": [],
    }
    record |= {"hardware": {"cores": 2, "gpu": EVIL}, "versions": {"torch": EVIL}, "commit": EVIL}
    (run / "run.json").write_text(json.dumps(record))
    measured = {"tokens_per_second": 1.0, "step_seconds": 1.0, "peak_memory_gib": 1.0, "epoch": 0.1, "num_tokens": 1}
    steps = [{"step": step, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, **measured} for step in (1, 2)]
    lines = [*steps, {"step": 2, "eval_set": EVIL, "eval_loss": 1.0, "eval_num_tokens": 3}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (run / "status.json").write_text(json.dumps({"state": "failed", "reason": EVIL, "step": 2, "exit_code": 1}))
    saver = Saver(
        run / "checkpoints", rank=0, num_ranks=1, attempt="a", keep_last=2, keep_best=0, in_background=False, say=str
    )
    state = {
        "parameters": {"w": [4]},
        "step": 2,
        "num_samples": 4,
        "counts": {"updates": None},
        "made_from": {},
        "run": record,
    }
    state |= {"recipe": recipe.model_dump(mode="json", exclude_none=True)}
    saver.save(2, [StagedPiece("w", "weight", 0, 0, torch.zeros(1, 4))], state)
    manifest = run / "checkpoints/step-00000002/manifest.json"
    manifest.write_text(folder.seal_manifest(json.loads(manifest.read_text()) | {"saved_at": EVIL}))
    return run


@pytest.mark.parametrize(
    "words",
    [
        "report RUN --out OUT",
        "watch RUN",
        "checkpoint RUN",
        "report RUN OTHER --out OUT",
        "chat RUN --from-run 1 --max-new-tokens 2",
        "chat RUN --max-new-tokens 2 --prompt EVIL",
        "evaluate RUN EVIL",
        "check EVIL",
        "check RUN/recipe.yaml --set EVIL=1",
        "check RUN/recipe.yaml --data --set data.train=ODD",
        "launch EVIL",
        "export EVIL",
        "report EVIL",
        "EVIL",
        "chat --EVIL",
        "sample EVIL",
    ],
)
def test_no_command_prints_it_raw(run: Path, tmp_path: Path, capsys, words: str):
    odd, other = tmp_path / "odd.jsonl", tmp_path / "other"
    odd.write_text(json.dumps({EVIL: EVIL, "b": {EVIL: 1}}) + "\n")
    shutil.copytree(run, other, ignore=lambda *_: ["export", "checkpoints"])
    if "OTHER" in words:
        values = yaml.safe_load((other / "recipe.yaml").read_text())
        values["data"]["system"] = EVIL
        (other / "recipe.yaml").write_text(yaml.safe_dump(values))
    places = {"RUN": run, "OTHER": other, "OUT": tmp_path / "out.html", "ODD": odd, "EVIL": EVIL}
    main([re.sub("|".join(places), lambda match: str(places[match[0]]), word) for word in words.split()])
    output = "".join(capsys.readouterr())
    assert raw(output) == [] and "evil" in output, output
    assert r"\x1b]52" in output or r"\x1b]0;" in output, output


def test_rows_are_previewed_and_answers_printed_without_it(run: Path, tmp_path: Path, capsys):
    from cookbook.commands.shared.generation import Printer

    make_tokenizer().save_pretrained(tmp_path / "model")
    values = yaml.safe_load((run / "recipe.yaml").read_text())
    values["model"] = {"name_or_path": str(tmp_path / "model")}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    preview(tmp_path / "recipe.yaml", ["data.max_length=1000"], 1, cache=tmp_path / "cache")
    printer = Printer(make_tokenizer())
    printer.on_finalized_text(EVIL, stream_end=True)
    output = capsys.readouterr().out
    assert raw(output) == [] and output.count(r"\x1b]52;c;") == 3 and printer.text == EVIL


def test_colours_are_the_commands_own(capsys):
    say("\x1b[8mhidden", "\x1b[30m")
    assert raw(capsys.readouterr().out) == []


def test_a_run_shows_its_samples_and_notes_without_it():
    from cookbook.system.screen import Screen

    file = io.StringIO()
    screen = Screen(max_steps=2, first_step=0, every=1, file=file)
    screen.header(EVIL, [(EVIL, EVIL)])
    for style in ("", "bold red"):
        screen.say(EVIL, style)
    assert raw(file.getvalue()) == [] and file.getvalue().count(r"\x1b]52;c;") == 5


def test_the_package_prints_by_the_one_function():
    sources = [path for path in (ROOT / "cookbook").rglob("*.py") if path.parent.name != "cookbook"]
    texts = {path: path.read_text() for path in (*sources, ROOT / "train.py")}
    raws = {path.stem: prints for path, text in texts.items() if (prints := re.findall(r"(?<![\w.])print\((.*)", text))}
    of_no_others = {"child", "hang_guard", "nvml", "probe", "__init__", "commands_and_scripts"}
    assert raws.keys() - of_no_others == {"generation", "chat", "console", "reopen", "submit", "sweep"}, (
        "say of system.console"
    )
    assert set(raws["chat"]) == {")"} and raws["generation"][0].startswith("printable(text)")
    assert raws["reopen"] == ["json.dumps(record))"]
