"""Protects who runs a recipe: no file that it loads runs code, secrets stay in the environment, and a run writes where
its recipe says. The promises stand in SECURITY.md.

python -m pytest -q tests/test_security.py
"""

import ast
import base64
import json
import os
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch
from conftest import RECIPE, ROOT, Book, clean_environment
from curves import write_chats
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from small_data import chat, make_tokenizer, marked, rows_of, run_tokenize
from transformers import LlamaConfig, LlamaForCausalLM

from cookbook.commands.cli import main
from cookbook.config.sections import ModelSection
from cookbook.start.run_plan import load_pair
from cookbook.system.files import RecipeError
from cookbook.training.models.language_model import load_config, load_model
from cookbook.training.models.model_source import resolve_model
from cookbook.training.models.tokenizer_files import load_tokenizer, train_tokenizer

# Our own code: nothing in it unpickles, evaluates text, starts a shell or trusts the code of others.

SOURCES = [
    path
    for place in ("train.py", "cookbook", "simulated_gpus", "benchmarks", "docs")
    for path in ([ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py")))
]

EVALUATE = ("eval", "exec", "compile", "__import__")
"""Ruff finds calls of the first two alone, and not `map(eval, texts)`."""
REFUSED_UNLESS = {"allow_pickle": False, "weights_only": True, "trust_remote_code": False, "shell": False}
CARRY_NO_CODE = ("GenerationConfig", "PeftConfig", "PeftModel")
"""Their `from_pretrained` knows no remote code; PeftModel unpickles weights only, by torch's restricted reader."""


def findings(source: str) -> list[str]:
    """Faults of a file beside those that ruff refuses by pyproject.toml, each with its line."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in EVALUATE:
            faults.append(f"line {node.lineno}: {node.id}")
        if isinstance(node, ast.Dict):
            named = [(k.value, v) for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)]
        elif isinstance(node, ast.Call):
            named = [(keyword.arg, keyword.value) for keyword in node.keywords]
        else:
            continue
        arguments = {key: ast.unparse(value) for key, value in named}
        for key, value in REFUSED_UNLESS.items():
            if arguments.get(key, str(value)) != str(value):
                faults.append(f"line {node.lineno}: {key}={arguments[key]}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained":
            owner = ast.unparse(node.func.value)
            if owner not in CARRY_NO_CODE and "trust_remote_code" not in arguments:
                faults.append(f"line {node.lineno}: {owner} without trust_remote_code=False")
            if owner not in CARRY_NO_CODE and "Model" in owner and arguments.get("use_safetensors") != "True":
                faults.append(f"line {node.lineno}: {owner} without use_safetensors=True")
    return faults


def test_our_code_opens_what_others_made_without_their_code():
    assert len(SOURCES) >= 35 and {"train.py", "cli.py", "vs_peers.py"} <= {path.name for path in SOURCES}
    assert {str(path): faults for path in SOURCES if (faults := findings(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "accelerator.load(x, weights_only=False)",
        "np.load('x', allow_pickle=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=False)",
        "AutoConfig.from_pretrained(x, trust_remote_code=True)",
        "options = {'trust_remote_code': True}",
        "f(x, trust_remote_code=settings.trust)",
        "AutoTokenizer.from_pretrained(x)",
        "list(map(eval, texts))",
        "compile('1', 'x', 'eval')",
        "subprocess.run(text, **{'shell': True})",
        "__import__(name)",
    ],
)
def test_what_trusts_a_folder_or_a_text_is_found(source: str):
    assert findings(source)


UNSAFE = """
import pickle
import pickle as p
from pickle import loads
import os, shelve
from dill import load as dilled
import marshal; marshal.loads(b"")
import joblib.numpy_pickle
import torch; torch.load("x")
import torch as t; t.load("x", weights_only=True)
from torch import load as read
import torch; map(torch.load, [])
import pandas as pd; pd.read_pickle("x")
import yaml; yaml.load("x")
import yaml; yaml.load("x", Loader=yaml.Loader)
import yaml; yaml.full_load("x")
import yaml; L = yaml.UnsafeLoader
import torch; getattr(torch, "load")("x")
eval("1")
exec("x = 1")
import runpy
import subprocess; subprocess.run("ls", shell=True)
import os; os.system("ls")
from os import system as run
import os; os.popen("ls")
import subprocess; subprocess.getoutput("ls")
"""
ALIKE = """
import re, subprocess, torch, yaml, json, numpy as np
model.eval(); re.compile("x"); torch.compile(model); np.load("x.npy"); json.load(file); load("x")
subprocess.run(["ls"], shell=False); yaml.load(text, Loader=yaml.SafeLoader); yaml.safe_load(text)
"""


def test_ruff_refuses_what_unpickles_evaluates_text_or_starts_a_shell():
    def lines(source: str) -> set[int]:
        """Lines that a rule of S, TID251 or B009 (getattr of a constant name) refuses by pyproject.toml."""
        words = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=json"]
        words += ["--stdin-filename=cookbook/new.py", "-"]
        done = subprocess.run(words, input=source, capture_output=True, text=True, cwd=ROOT)
        refusals = json.loads(done.stdout)
        return {refusal["location"]["row"] for refusal in refusals if re.match(r"S\d|TID251|B009", refusal["code"])}

    rows = UNSAFE.splitlines()
    assert [rows[i] for i in range(1, len(rows)) if i + 1 not in lines(UNSAFE)] == []
    assert lines(ALIKE) == set()


# Runs: secrets stay in the environment, and files come to lie where the recipe says.

SECRETS = {
    name: f"{prefix}canary{number}Xq7Lk2"
    for number, (name, prefix) in enumerate(
        [
            ("HF_TOKEN", "hf_"),
            ("WANDB_API_KEY", ""),
            ("AWS_SECRET_ACCESS_KEY", ""),
            ("GITHUB_TOKEN", "ghp_"),
            ("MY_PASSWORD", ""),
            ("DATABASE_URL", "postgres://user:"),
        ]
    )
}

SMALL = """\
strategy: accelerate_configs/ddp.yaml
mixed_precision: 'no'
model:
  from_scratch: {vocab_size: 320, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1,
                 num_attention_heads: 2, num_key_value_heads: 1}
data: {train: chats.jsonl, eval: {path: chats.jsonl, max_rows: 4}, max_length: 64}
batch: {global_batch_size: 4, micro_batch_size: 2}
optim: {learning_rate: 1e-3}
run: {max_steps: 2, output_dir: outputs/run}
"""

CRASHING = """\
import runpy
import sys

sys.path.insert(0, {root!r})
from cookbook.training.engine import Engine


def step(self, *unused):
    raise RuntimeError("a crash on order")


Engine.step = step
runpy.run_path({root!r} + "/train.py", run_name="__main__")
"""


def leaks(folder: Path, printed: str) -> list[str]:
    """Where a secret, or its base64, stands in a file, a file's name or the printed text."""
    marks = [value.encode() for value in SECRETS.values()]
    # Of base64, what does not depend on the bytes before and after.
    marks += [base64.b64encode(b"\0" * shift + mark)[4:-4] for mark in marks[:] for shift in range(3)]

    def has_mark(content: bytes) -> bool:
        return any(mark in content for mark in marks)

    places = ["printed"] if has_mark(printed.encode()) else []
    for path in folder.rglob("*"):
        inside = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        if has_mark(str(path).encode()) or has_mark(inside):
            places.append(str(path.relative_to(folder)))
    return places


def launch(book: Book, *arguments: str) -> tuple[int, str, set[str]]:
    """Runs SMALL through the front door, with secrets in the environment and a home of its own.

    Returns the exit code, everything printed, and the files and folders that are new.
    """
    write_chats(book.root / "chats.jsonl", 12)
    book.write(RECIPE, SMALL)
    for name in ("home", "tmp"):
        (book.root / name).mkdir()
    before = book.names()
    places = {"HOME": str(book.root / "home"), "TMPDIR": str(book.root / "tmp"), "HF_HUB_OFFLINE": "1"}
    environment = clean_environment(**SECRETS, **places)
    for name in ("HF_HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "cookbook", "launch", RECIPE, *arguments]
    done = subprocess.run(
        command,
        cwd=book.root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, book.names() - before


def outside(names: set[str], *allowed: str) -> list[str]:
    """New files in other places; PyTorch and its launcher have folders of their own for what is temporary."""
    names = {name for name in names if not re.match(r"tmp/(torchelastic|torchinductor)_", name)}
    return sorted(name for name in names if not any(name == place or name.startswith(f"{place}/") for place in allowed))


def test_a_run_of_two_processes_tells_no_secret_and_writes_where_it_should(book: Book):
    code, printed, new = launch(book, "--strategy", "zero2", "--processes", "2")
    assert code == 0, printed
    assert {"outputs/run/export/model.safetensors", "outputs/run/metrics.jsonl"} <= new
    assert outside(new, "outputs", ".cache") == []
    assert outside({name for name in new if name.startswith("outputs/")}, "outputs/run", "outputs/.run.lock") == []
    assert leaks(book.root, printed) == []


@pytest.mark.thorough
def test_a_run_that_crashes_tells_no_secret(book: Book):
    (book.root / "train.py").unlink()
    book.write("train.py", CRASHING.format(root=str(ROOT)))
    code, printed, new = launch(book, "--processes", "2")
    assert code not in (0, 2) and "a crash on order" in printed, printed
    assert outside(new, "outputs", ".cache") == []
    assert leaks(book.root, printed) == []


def test_a_secret_that_leaks_would_be_found(tmp_path: Path):
    secret = SECRETS["MY_PASSWORD"]
    (tmp_path / "run.json").write_text(json.dumps({"environment": {"MY_PASSWORD": secret}}))
    (tmp_path / "log").write_bytes(base64.b64encode(f"header: {secret}; more".encode()))
    (tmp_path / f"{secret}.txt").touch()
    (tmp_path / "link").symlink_to(secret)
    (tmp_path / "fine.txt").write_text("canary")
    assert len(leaks(tmp_path, "")) == 4
    assert leaks(tmp_path / "none", f"Traceback: {secret}") == ["printed"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ('"out\\nputs"', "no path should have"),
        ('"out\\u202eputs"', "no path should have"),
        ('"out\\0puts"', "not valid YAML|no path should have"),
        ("~/outputs", "~ is not expanded"),
        ('""', "is empty"),
        ('" "', "is empty"),
        ("x" * 300, "too long"),
        ("train.py/outputs", "is a file"),
        ("recipes/small.yaml", "is a file"),
        (".", "the current folder"),
        ("./recipes/..", "the current folder"),
        ("..", "a parent of the current folder"),
        ("/", "a parent of the current folder"),
    ],
)
def test_an_output_folder_with_an_odd_name_is_refused_before_anything_is_written(book: Book, name: str, reason: str):
    before = book.names()
    with pytest.raises(RecipeError, match=reason):
        load_pair(Path(RECIPE), [f"run.output_dir={name}"])
    assert book.names() == before


def test_a_name_that_a_shell_would_run_is_a_name(book: Book):
    """`launch` starts the processes without a shell, and prints a line that a shell reads back to the same words."""
    name = "; touch marker; $(touch marker) `touch marker` a' && touch marker && 'b"
    text = json.dumps(f"outputs/{name}")
    line = subprocess.run(
        [sys.executable, "-m", "cookbook", "launch", RECIPE, "--set", f"run.output_dir={text}", "--dry-run"],
        cwd=book.root,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert line.returncode == 0, line.stderr
    assert not (book.root / "marker").exists() and not (book.root / "outputs").exists()


@pytest.mark.thorough
def test_a_folder_behind_a_link_or_above_is_where_the_run_writes_and_nothing_else_there_changes(book: Book):
    """Who names such a folder means it; what lies beside the run is not touched."""
    shelf = book.root / "shelf"
    (shelf / "precious").mkdir(parents=True)
    (shelf / "precious/export").write_text("mine")
    (book.root / "outputs").mkdir()
    (book.root / "outputs/link").symlink_to(shelf)
    code, printed, new = launch(book, "--strategy", "single", "--set", "run.output_dir=recipes/../outputs/link/run")
    assert code == 0, printed
    assert (shelf / "run/metrics.jsonl").is_file()
    assert outside(new, "shelf/run", "shelf/.run.lock", ".cache") == []
    assert (shelf / "precious/export").read_text() == "mine"


# Models, adapters, templates and recipes of others: read, never run.


class Payload:
    """Unpickled by a reader without restraint, it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound little model with its tokenizer."""
    return save_model(tmp_path / "model")


def save_model(folder: Path) -> Path:
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 5, 300)
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def open_model(folder: Path) -> None:
    """Open a model of others as train.py does."""
    settings = ModelSection(name_or_path=str(folder))
    name = resolve_model(settings, seed=0, texts=[], fingerprint="", cache=folder.parent / "cache")
    load_config(name, 32)
    load_tokenizer(name, None)
    load_model(name, settings, packing=False)


def test_a_sound_model_opens(folder: Path):
    open_model(folder)


CODE = """\
import os
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

os.mkdir({marker!r})


class Config(LlamaConfig):
    model_type = "unheard_of"


class Model(LlamaForCausalLM):
    config_class = Config


class Tokens(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}


@pytest.mark.parametrize("kind", ["a model of a new kind", "a model of a known kind", "a tokenizer"])
def test_code_in_a_model_folder_is_not_run_even_for_a_yes(
    kind: str, folder: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
):
    """transformers asks on the terminal whether to run it, unless `trust_remote_code` is given."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "y")
    (folder / "code.py").write_text(CODE.format(marker=str(marker)))
    if kind == "a tokenizer":
        auto_map = {"AutoTokenizer": [None, "code.Tokens"]}
        edit_json(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="Tokens")
    else:
        edit_json(folder / "config.json", auto_map=AUTO_MAP)
    if kind == "a model of a new kind":
        edit_json(folder / "config.json", model_type="unheard_of")
    if kind != "a model of a known kind":
        with pytest.raises(RecipeError, match="contains custom code"):
            open_model(folder)
    else:
        open_model(folder)
    assert not marker.exists() and asked == []


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickle_beside_other_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")


def index_of_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    save_file({}, folder / "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("disguise", [only_pickle, pickle_beside_other_safetensors, index_of_pickles])
def test_pickled_weights_are_refused(disguise, folder: Path, marker: Path):
    torch.save({"model.norm.weight": Payload(marker)}, folder / "pytorch_model.bin")
    disguise(folder)
    with pytest.raises(RecipeError, match="no weights in safetensors"):
        open_model(folder)
    assert not marker.exists()


def test_pickled_weights_beside_safetensors_are_not_read(folder: Path, marker: Path):
    torch.save({"model.norm.weight": Payload(marker)}, folder / "pytorch_model.bin")
    open_model(folder)
    assert not marker.exists()


def test_a_pickled_adapter_is_not_run(folder: Path, marker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    adapter = tmp_path / "adapter"
    settings = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"])
    model = get_peft_model(LlamaForCausalLM.from_pretrained(folder), settings)
    model.peft_config["default"].base_model_name_or_path = str(folder)
    model.save_pretrained(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({"x": Payload(marker)}, adapter / "adapter_model.bin")
    make_tokenizer().save_pretrained(adapter)
    assert main(["chat", str(adapter), "--prompt", "x"]) == 2
    assert "no adapter_model.safetensors in it" in capsys.readouterr().err
    assert not marker.exists()


def test_the_payload_would_run(marker: Path, tmp_path: Path):
    torch.save(Payload(marker), tmp_path / "x.bin")
    torch.load(tmp_path / "x.bin", weights_only=False)
    assert marker.is_dir()


TEMPLATES = {
    "classes": "{{ ''.__class__.__mro__ }}",
    "subclasses": "{{ messages.__class__.__base__.__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.mkdir('MARKER') }}",
    "globals of a function": "{{ raise_exception.__globals__['os'].mkdir('MARKER') }}",
    "by attr": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "by format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "a changed chat": "{{ messages.append(1) }}",
    "another file": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("text", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_reaches_nothing_but_the_chat(text: str, marker: Path):
    tokenizer = make_tokenizer(text.replace("MARKER", str(marker)) + "{{ messages[0].content + eos_token }}")
    try:
        tokens, _ = run_tokenize(rows_of("messages", [chat("hi", "ho")]), tokenizer, train_on="all")
        said = marked(tokens, 0, tokenizer)
    except (RecipeError, TypeError) as error:
        said = str(error)
    assert re.search(r"unsafe|(refused by the|the) chat template|no loader|^\[hi<\|im_end\|>\]$", said), said
    assert not marker.exists()


@pytest.mark.parametrize(
    "form", ["({})", "[{}]", "(({}))+1", "{{{{1: {}}}}}", "not {}", "-{}", "f({})", "{} if 1 else 2"]
)
def test_a_template_that_is_nested_too_deeply_is_refused_in_a_sentence(form: str):
    text = "1"
    for _ in range(1_500):
        text = form.format(text)
    with pytest.raises(RecipeError) as refused:
        run_tokenize(rows_of("messages", [chat("hi", "ho")]), make_tokenizer(f"{{{{ {text} }}}}"))
    assert "template" in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_template_file_that_cannot_be_read_is_named(folder: Path, tmp_path: Path, content: bytes | None):
    file = tmp_path / "x.jinja"
    file.mkdir() if content is None else file.write_bytes(content)
    with pytest.raises(RecipeError, match=r"x\.jinja: no chat template can be read"):
        load_tokenizer(str(folder), str(file))


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
HOSTILE = {
    "a tag that calls": ("seed: !!python/object/apply:os.mkdir [marker]\n", "tags are not supported"),
    "a tag that makes": ("seed: !!python/object/new:os.mkdir [marker]\n", "tags are not supported"),
    "a tag of a name": ("seed: !!python/name:os.mkdir\n", "tags are not supported"),
    "an alias bomb": (BOMB, "anchors"),
    "a key given twice": ("seed: 1\nseed: 2\n", "given twice"),
    "a deep nest": ("seed: " + "[" * 2_000, "nested too deeply"),
    "a large file": ("#" * 60_000, "too many for a settings file"),
}


@pytest.mark.parametrize("file", [RECIPE, "accelerate_configs/ddp.yaml"])
@pytest.mark.parametrize(("text", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_settings_file_is_refused_in_a_moment(book: Book, file: str, text: str, reason: str):
    book.write(file, text)
    started = time.process_time()
    with pytest.raises(RecipeError, match=reason):
        load_pair(Path(RECIPE), [])
    assert time.process_time() - started < 2
    assert not (book.root / "marker").exists()


def test_a_hostile_value_on_the_command_line_is_refused(book: Book):
    with pytest.raises(RecipeError, match="tags are not supported"):
        load_pair(Path(RECIPE), ["seed=!!python/object/apply:os.mkdir [marker]"])
    assert not (book.root / "marker").exists()


# What pip installs: the same bytes for everybody.


def pins_of(name: str) -> dict[str, str]:
    """Package and version of each line of a requirements file, which may have nothing but exact versions."""
    pins = {}
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        pin = re.fullmatch(r"([\w.-]+)==(\S+)(?: \\)?", line)
        if pin:
            pins[canonicalize_name(pin.group(1))] = pin.group(2)
        else:
            assert re.match(r"#|$|    (--hash|#)", line), f"{name}: {line!r} is no exact version"
    return pins


def test_the_lock_has_a_digest_of_everything_and_nothing_of_one_machine():
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"(?m)^(?=[\w-]+==)", "".join(f"{line}\n" for line in text.splitlines() if line[:1] != "#"))
    entries = [entry for entry in entries if entry.strip()]
    assert len(entries) == len(pins_of("requirements.lock")) > 50
    for entry in entries:
        assert re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+\n", entry), entry
    assert not re.search(r"://|index-url|find-links|\+cpu|\+cu", text)


def test_the_lock_has_the_versions_of_requirements_txt():
    wanted, locked = pins_of("requirements.txt"), pins_of("requirements.lock")
    assert len(wanted) >= 10
    assert {name: locked.get(name) for name in wanted} == wanted


def test_the_lock_leaves_nothing_to_be_found_while_installing():
    """Packages that locked ones need are locked too, as far as the same versions are installed here."""
    locked, seen, missing = pins_of("requirements.lock"), 0, []
    environment = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64", "extra": ""}
    for name, version in locked.items():
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if installed.version.split("+")[0] != version:
            continue
        for text in installed.requires or []:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate(environment):
                seen += 1
                pin = locked.get(canonicalize_name(need.name))
                if pin is None or not need.specifier.contains(pin, prereleases=True):
                    missing.append(f"{name} needs {text}")
    assert seen > 50 and missing == []


def test_the_lock_is_the_one_for_gpus():
    locked = pins_of("requirements.lock")
    assert "triton" in locked and len([name for name in locked if name.startswith("nvidia-")]) >= 10
