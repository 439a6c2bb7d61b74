"""Protects `export --gguf`: llama.cpp's converter gets the folder, and its file appears whole or not at all.

python -m pytest -q tests/test_gguf.py

The converter is a stand-in; docs/use_it.md says how the real one was tried.
"""

import os
import sys
from pathlib import Path

import pytest
from test_export import ADAPTERS, Run, here

from cookbook.commands.cli import main

pytestmark = pytest.mark.usefixtures(here.__name__)
CONVERTER = """\
import json, sys
from pathlib import Path
folder, target = sys.argv[1], sys.argv[sys.argv.index("--outfile") + 1]
kind = sys.argv[sys.argv.index("--outtype") + 1]
head = b"GGUF" + (3).to_bytes(4, "little") + (2).to_bytes(8, "little")
said = json.dumps({"files": sorted(p.name for p in Path(folder).iterdir()), "outtype": kind})
Path(target).write_bytes(head + said.encode())
"""
FAILS = CONVERTER + 'print("loading"); sys.exit("BPE pre-tokenizer was not recognized")\n'


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that puts a program on PATH as llama.cpp's converter."""

    def installed(text: str) -> None:
        folder = tmp_path / "llama.cpp"
        folder.mkdir()
        program = folder / "convert_hf_to_gguf.py"
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")

    return installed


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path, tie_word_embeddings=True)
    made.save(3)
    return made


@pytest.mark.parametrize(("words", "kind"), [([], "auto"), (["--dtype", "bf16"], "bf16"), (["--dtype", "fp32"], "f32")])
def test_the_converter_gets_the_export(run, install, tmp_path, words, kind, capsys):
    install(CONVERTER)
    target = tmp_path / "mine.gguf"
    assert main(["export", str(run.folder), "--gguf", str(target), *words]) == 0
    assert f'"outtype": "{kind}"' in target.read_text() and "model.safetensors" in target.read_text()
    assert f"{target}: {run.folder / 'export'} in one file" in capsys.readouterr().out


def test_without_the_converter_two_lines_say_what_to_write(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    target = tmp_path / "mine.gguf"
    assert main(["export", str(run.folder), "--gguf", str(target)]) == 2
    said = capsys.readouterr().err
    assert "git clone --depth 1 https://github.com/ggml-org/llama.cpp" in said
    assert f"convert_hf_to_gguf.py {run.folder / 'export'} --outfile {target}" in said
    assert not (run.folder / "export").exists(), "refused before anything was written"


def test_a_converter_that_fails_leaves_no_file_and_its_reason(run, install, tmp_path, capsys):
    install(FAILS)
    assert main(["export", str(run.folder), "--gguf", str(tmp_path / "mine.gguf")]) == 1
    assert "BPE pre-tokenizer was not recognized" in capsys.readouterr().err
    assert not list(tmp_path.glob("*mine.gguf*")) and (run.folder / "export/model.safetensors").is_file()


@pytest.mark.parametrize("left", ["", "not a model", "GGUF", "GGUF" + "\0" * 12])
def test_what_is_no_file_of_tensors_is_not_taken(run, install, tmp_path, capsys, left):
    install(CONVERTER + f"Path(target).write_text({left!r})\n")
    assert main(["export", str(run.folder), "--gguf", str(tmp_path / "mine.gguf")]) == 1
    assert "left no GGUF file with tensors" in capsys.readouterr().err
    assert not list(tmp_path.glob("*mine.gguf*")) and (run.folder / "export/model.safetensors").is_file()


def test_a_file_that_is_there_stays(run, install, tmp_path, capsys):
    install(CONVERTER)
    target = tmp_path / "mine.gguf"
    target.write_text("mine")
    assert main(["export", str(run.folder), "--gguf", str(target)]) == 2
    assert "exists; name another file" in capsys.readouterr().err and target.read_text() == "mine"
    assert main(["export", str(run.folder), "--gguf", str(tmp_path / "none/mine.gguf")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_file_that_comes_while_the_converter_runs_stays(run, install, tmp_path, capsys):
    target = tmp_path / "mine.gguf"
    install(CONVERTER + f"Path({str(target)!r}).write_text('mine')\n")
    assert main(["export", str(run.folder), "--gguf", str(target)]) == 1
    assert "has come meanwhile" in capsys.readouterr().err and target.read_text() == "mine"
    assert not list(tmp_path.glob(".mine.gguf*"))


def test_a_disk_without_hard_links_has_the_file_too(run, install, tmp_path, monkeypatch):
    """As exFAT, and many network disks."""
    monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(PermissionError("no links here")))
    install(CONVERTER)
    assert main(["export", str(run.folder), "--gguf", str(tmp_path / "mine.gguf")]) == 0
    assert "model.safetensors" in (tmp_path / "mine.gguf").read_text()


def test_an_adapter_is_merged_first(tmp_path, install, capsys):
    install(CONVERTER)
    made = Run(tmp_path, ADAPTERS["dora"], tie_word_embeddings=False)
    made.save(3)
    target = tmp_path / "mine.gguf"
    assert main(["export", str(made.folder), "--gguf", str(target)]) == 2
    assert "add --merged" in capsys.readouterr().err and not target.exists()
    assert main(["export", str(made.folder), "--gguf", str(target), "--merged"]) == 0
    assert '"adapter_config.json"' not in target.read_text() and "model.safetensors" in target.read_text()
