"""Whatever is wrong with a model's folder, every command that opens it ends with exit code 2 and names the file.

python -m pytest -q tests/test_damaged_models.py
"""

import io
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from cookbook.commands.cli import main
from cookbook.config.sections import AdapterSection
from cookbook.facts.model_files import read_config
from cookbook.facts.model_types import TYPES, ModelType
from cookbook.system.files import RecipeError
from cookbook.training.adapters import base_model
from cookbook.training.models.model_source import weights_digest
from cookbook.training.models.tokenizer_files import train_tokenizer
from tests.curves import Lab

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, SETTINGS, TEMPLATE, GENERATION = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
ROWS = [{"messages": [{"role": "user", "content": "add"}, {"role": "assistant", "content": "def f(x):"}]}] * 4


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Replaces a file."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def keys(name: str, **changed: object) -> Callable[[Path], None]:
    """Changes keys of a JSON file."""

    def damage(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changed))

    return damage


def place(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Puts something else where a file was."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def header(change: Callable[[dict], object] | bytes) -> Callable[[Path], None]:
    """Changes the header of the weights; its data stays."""

    def damage(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        if isinstance(change, bytes):
            written = change
        else:
            values = json.loads(content[8:end])
            change(values)
            written = json.dumps(values).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(written)) + written + content[end:])

    return damage


def first(values: dict) -> dict:
    return next(entry for key, entry in values.items() if key != "__metadata__")


def shards(files: object) -> Callable[[Path], None]:
    """Has an index say where the weights are."""

    def damage(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-1.safetensors")
        shutil.copy(folder / "model-1.safetensors", folder.parent / "outside.safetensors")
        (folder / INDEX).write_text(files if isinstance(files, str) else json.dumps(files))

    return damage


def renamed(name: str) -> Callable[[Path], object]:
    """Has the weights under another name."""
    return lambda folder: (folder / WEIGHTS).rename(folder / name)


NEST = "[" * 100_000
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "config empty": (text(CONFIG, ""), CONFIG),
    "config no JSON": (text(CONFIG, "{"), CONFIG),
    "config a list": (text(CONFIG, "[]"), CONFIG),
    "config not UTF-8": (text(CONFIG, b'{"a": "\xff"}'), CONFIG),
    "config nested": (text(CONFIG, NEST), CONFIG),
    "config without a type": (text(CONFIG, "{}"), CONFIG),
    "config of an unknown type": (keys(CONFIG, model_type="evil"), "has no such model_type; correct it, or take"),
    "config type a list": (keys(CONFIG, model_type=[1]), CONFIG),
    "config size a text": (keys(CONFIG, hidden_size="32"), CONFIG),
    "config no heads": (keys(CONFIG, num_attention_heads=0), CONFIG),
    "config layers without end": (keys(CONFIG, num_hidden_layers=10**9), CONFIG),
    "config layers below zero": (keys(CONFIG, num_hidden_layers=-2), CONFIG),
    "config vocabulary without end": (keys(CONFIG, vocab_size=10**18), CONFIG),
    "config hidden act": (keys(CONFIG, hidden_act="evil"), CONFIG),
    "config rope": (keys(CONFIG, rope_parameters={"rope_type": "evil", "rope_theta": 1.0}), CONFIG),
    "config dtype of integers": (keys(CONFIG, dtype="int8"), "dtype is 'int8', and should be float32, bfloat16"),
    "config dtype a number": (keys(CONFIG, torch_dtype=5), "torch_dtype is 5, and should be float32"),
    "config dtype no name": (keys(CONFIG, dtype="auto"), "dtype is 'auto', and should be"),
    "config dtype of 8 bits": (keys(CONFIG, dtype="float8_e4m3fn"), "dtype is 'float8_e4m3fn', and should be"),
    "config dropout": (keys(CONFIG, attention_dropout=2.0), "attention_dropout is 2.0, and should be at least 0"),
    "config eos a text": (keys(CONFIG, eos_token_id="<|im_end|>"), "Field 'eos_token_id' with value '<|im_end|>'"),
    "config attention": (keys(CONFIG, attn_implementation="flash_attention_2"), CONFIG),
    "config quantization a list": (keys(CONFIG, quantization_config=[1]), CONFIG),
    "config quantization empty": (keys(CONFIG, quantization_config={}), "quantized"),
    "config a pipe": (place(CONFIG, os.mkfifo), CONFIG),
    "config a folder": (place(CONFIG, Path.mkdir), CONFIG),
    "tokenizer gone": (
        lambda folder: [(folder / name).unlink() for name in (TOKENIZER, SETTINGS)],
        f"lay {TOKENIZER} and {SETTINGS} of the model there",
    ),
    "tokenizer empty": (text(TOKENIZER, ""), TOKENIZER),
    "tokenizer nested": (text(TOKENIZER, NEST), TOKENIZER),
    "tokenizer without a model": (text(TOKENIZER, "{}"), TOKENIZER),
    "tokenizer of an unknown model": (keys(TOKENIZER, model={"type": "evil"}), TOKENIZER),
    "tokenizer with odd added tokens": (keys(TOKENIZER, added_tokens=5), TOKENIZER),
    # Rust panics, with an error that is no Exception
    "tokenizer of no characters": (
        keys(TOKENIZER, normalizer={"type": "Precompiled", "precompiled_charsmap": ""}),
        TOKENIZER,
    ),
    "tokenizer a pipe": (place(TOKENIZER, os.mkfifo), TOKENIZER),
    "tokenizer a folder": (place(TOKENIZER, Path.mkdir), TOKENIZER),
    "settings a list": (text(SETTINGS, "[]"), SETTINGS),
    "settings nested": (text(SETTINGS, NEST), SETTINGS),
    "settings a pipe": (place(SETTINGS, os.mkfifo), SETTINGS),
    "settings token a number": (keys(SETTINGS, eos_token=5), SETTINGS),
    "settings class": (keys(SETTINGS, tokenizer_class=["evil"]), SETTINGS),
    "settings length a text": (keys(SETTINGS, model_max_length="evil"), SETTINGS),
    "special tokens a list": (text("special_tokens_map.json", "[1]"), "special_tokens_map.json"),
    "added tokens a list": (text("added_tokens.json", "[1]"), "added_tokens.json"),
    "template not UTF-8": (text(TEMPLATE, b"\xff"), TEMPLATE),
    "template a pipe": (place(TEMPLATE, os.mkfifo), TEMPLATE),
    "generation no JSON": (text(GENERATION, "{"), GENERATION),
    "generation a list": (text(GENERATION, "[]"), GENERATION),
    "generation of texts": (keys(GENERATION, eos_token_id="evil"), GENERATION),
    "generation odd": (keys(GENERATION, max_new_tokens=-1, num_beams="evil"), GENERATION),
    "generation a pipe": (place(GENERATION, os.mkfifo), GENERATION),
    "weights empty": (text(WEIGHTS, ""), WEIGHTS),
    "weights short": (lambda folder: os.truncate(folder / WEIGHTS, 1000), WEIGHTS),
    "weights a page": (text(WEIGHTS, "<!DOCTYPE html><html><body>Not found</body></html>"), WEIGHTS),
    "weights a pipe": (place(WEIGHTS, os.mkfifo), WEIGHTS),
    "weights a folder": (place(WEIGHTS, Path.mkdir), WEIGHTS),
    "header longer than a file can be": (text(WEIGHTS, b"\xff" * 8 + b"{}"), WEIGHTS),
    "header nested": (header(b"[" * 100_000), WEIGHTS),
    "header offsets overlap": (header(lambda values: first(values).update(data_offsets=[0, 8])), WEIGHTS),
    "header offsets below zero": (header(lambda values: first(values).update(data_offsets=[-8, 0])), WEIGHTS),
    "header dtype": (header(lambda values: first(values).update(dtype="I32x")), WEIGHTS),
    "header dtype of integers": (
        header(lambda values: first(values).update(dtype="I32")),
        "lm_head.weight in I32, which no weight is",
    ),
    "header dtype wider": (header(lambda values: first(values).update(dtype="F64")), WEIGHTS),
    "header shape below zero": (header(lambda values: first(values).update(shape=[-1, -32])), WEIGHTS),
    "header shape without end": (header(lambda values: first(values).update(shape=[2**40, 2**40])), WEIGHTS),
    "header metadata": (header(lambda values: values.update(__metadata__=5)), WEIGHTS),
    "index no JSON": (shards("{"), INDEX),
    "index without a map": (shards({}), INDEX),
    "index map a list": (shards({"weight_map": ["model-1.safetensors"]}), INDEX),
    "index map empty": (shards({"weight_map": {}}), INDEX),
    "index of numbers": (shards({"weight_map": {"lm_head.weight": 5}}), INDEX),
    "index outside": (shards({"weight_map": {"lm_head.weight": "../outside.safetensors"}}), INDEX),
    "index missing": (
        shards({"metadata": {}, "weight_map": {"lm_head.weight": "model-2.safetensors"}}),
        "model-2.safetensors",
    ),
    "index without metadata": (shards({"weight_map": {"lm_head.weight": "model-1.safetensors"}}), '"metadata": {}'),
    "index alone": (
        lambda folder: [
            shards({"metadata": {}, "weight_map": {"lm_head.weight": "model-1.safetensors"}})(folder),
            (folder / "model-1.safetensors").unlink(),
        ],
        "model-1.safetensors cannot be read (No such file",
    ),
    "weights in shards without an index": (renamed("model-00001-of-00002.safetensors"), f"but no {INDEX}"),
    "weights under another name": (
        renamed("consolidated.safetensors"),
        f"it has consolidated.safetensors, but no {WEIGHTS}",
    ),
    "weights of an adapter alone": (
        lambda folder: [
            renamed("adapter_model.safetensors")(folder),
            (folder / "adapter_config.json").write_text("{}"),
        ],
        "with `cookbook export --merged`, or with peft's `merge_and_unload` if no run here made it",
    ),
    "weights pickled": (renamed("pytorch_model.bin"), "from_pretrained(OLD).save_pretrained(NEW) writes it so"),
    "weights of llama.cpp": (renamed("model-Q4_K_M.gguf"), "from_pretrained(OLD, gguf_file=NAME).save_pretrained(NEW)"),
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound model, an adapter of it in a run's folder, and a recipe and rows for both."""
    root = tmp_path_factory.mktemp("damaged")
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 5, 300)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer), **ids))
    model.save_pretrained(root / "sound")
    tokenizer.save_pretrained(root / "sound")
    adapted = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = "model"
    adapted.save_pretrained(root / "run/export")
    tokenizer.save_pretrained(root / "run/export")
    record = {"name_or_path": "model", "revision": None, "is_new": False}
    record["sha256"] = weights_digest(root / "sound")
    (root / "run/export/base_model.json").write_text(json.dumps(record))
    shutil.copy(root / "sound" / GENERATION, root / "run/export")
    (root / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    recipe = {
        "strategy": "single",
        "mixed_precision": "no",
        "model": {"name_or_path": "model"},
        # Packed, check would try a small model of the type each time.
        "data": {"train": "rows.jsonl", "max_length": 64, "packing": False},
        "batch": {"global_batch_size": 2, "micro_batch_size": 2},
        "optim": {"learning_rate": 1e-3},
        "run": {"max_steps": 2, "output_dir": "out"},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


@pytest.fixture
def place_of(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage, which is also the folder that commands run in."""
    shutil.copytree(shelf, tmp_path, dirs_exist_ok=True)
    (tmp_path / "sound").rename(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


PROMPT = ("--prompt", "def", "--max-new-tokens", "2")
COMMANDS = {
    "check": ("check", "recipe.yaml"),
    "preview": ("preview", "recipe.yaml"),
    "prompt": ("chat", "model", *PROMPT),
    "chat": ("chat", "model", "--max-new-tokens", "2"),
    "evaluate": ("evaluate", "model", "rows.jsonl", "--set", "data.max_length=64"),
    "init": ("init", "model", "rows.jsonl", "--out", "new.yaml", "--gpus", "cpu"),
    "plan": ("plan", "recipe.yaml"),
    "prompt to an adapter": ("chat", "run", *PROMPT),
    "merge": ("export", "run", "--merged"),
}


def refused(command: tuple[str, ...], file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command]) == 2
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if not line.startswith("[transformers]")]
    assert len(lines) == 1 and file in lines[0], said


@pytest.mark.parametrize("damage", DAMAGES)
def test_check_names_the_damaged_file(damage: str, place_of: Path, capsys: pytest.CaptureFixture[str]):
    make, file = DAMAGES[damage]
    make(place_of / "model")
    refused(COMMANDS["check"], file, capsys)


OTHERS = {
    "config a pipe": "check preview prompt chat init plan merge",
    "tokenizer a pipe": "preview prompt init",
    "generation a pipe": "prompt evaluate",
    "weights a pipe": "prompt merge",
    "config nested": "preview prompt evaluate init plan",
    "config layers without end": "prompt init plan",
    "settings token a number": "preview evaluate init",
    "header longer than a file can be": "prompt evaluate",
    "index outside": "prompt chat evaluate",
}


@pytest.mark.parametrize(
    ("damage", "command"), [(damage, command) for damage, commands in OTHERS.items() for command in commands.split()]
)
def test_every_command_that_opens_the_file_names_it(
    damage: str, command: str, place_of: Path, capsys: pytest.CaptureFixture[str]
):
    make, file = DAMAGES[damage]
    make(place_of / "model")
    refused(COMMANDS[command], file, capsys)


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"plan"}))
def test_a_sound_folder_is_opened_by_every_command(command: str, place_of: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("/exit\n"))
    assert main([*COMMANDS[command]]) == 0


@pytest.mark.parametrize("command", ["prompt", "chat", "evaluate", "prompt to an adapter"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_model_whose_values_are_not_finite_is_used_by_no_command(
    value: float, command: str, place_of: Path, capsys: pytest.CaptureFixture[str]
):
    (place_of / "run/export/base_model.json").unlink()  # which would know another digest
    weights = load_file(place_of / "model" / WEIGHTS)
    weights["model.norm.weight"][3] = value
    save_file(weights, place_of / "model" / WEIGHTS, metadata={"format": "pt"})
    refused(COMMANDS[command], "norm.weight has values that are not finite", capsys)


def test_a_run_of_such_a_model_says_how_to_look_at_it(place_of: Path, lab: Lab):
    """Its values are not read before: a rank may have no more than a shard of them."""
    weights = load_file(place_of / "model" / WEIGHTS)
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, place_of / "model" / WEIGHTS, metadata={"format": "pt"})
    sections = yaml.safe_load((place_of / "recipe.yaml").read_text())
    sections["model"]["name_or_path"] = str(place_of / "model")
    sections["data"]["train"] = str(place_of / "rows.jsonl")
    settings = {name: json.dumps(sections[name]) for name in ("model", "data", "batch")}
    settings |= {"run.output_dir": str(place_of / "out"), "run.max_steps": "2", "schedule.warmup_steps": "0"}
    done = lab.start("single", settings)
    assert done.returncode == 1 and f"cookbook evaluate {place_of / 'model'} ROWS says whether" in done.stdout


ADAPTER, ADAPTED = "adapter_config.json", "adapter_model.safetensors"


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Changes the weights of an adapter, in place."""

    def damage(folder: Path) -> None:
        values = load_file(folder / ADAPTED)
        change(values)
        save_file(values, folder / ADAPTED, metadata={"format": "pt"})

    return damage


def first_is(made: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return tensors(lambda values: values.update({min(values): made(values[min(values)])}))


ADAPTERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON": (text(ADAPTER, "{"), ADAPTER),
    "settings a pipe": (place(ADAPTER, os.mkfifo), ADAPTER),
    "of an unknown kind": (keys(ADAPTER, peft_type="EVIL"), "adapter_config.json|peft_type"),
    "of a prompt, not of layers": (keys(ADAPTER, peft_type="PROMPT_TUNING", num_virtual_tokens=4), "PROMPT_TUNING"),
    "a rank that is none": (keys(ADAPTER, r="evil"), "r is a string"),
    "a rank of another": (keys(ADAPTER, r=8), r"\[4, 32\]|adapter.rank: 8"),
    "an alpha that is no number": (keys(ADAPTER, lora_alpha=math.nan), "lora_alpha is a number, which it cannot be"),
    "a flag that is text": (keys(ADAPTER, use_rslora="no"), "use_rslora is a string"),
    "weights gone": (lambda folder: (folder / ADAPTED).unlink(), f"no {ADAPTED} in it"),
    "weights a pipe": (place(ADAPTED, os.mkfifo), f"{ADAPTED} is no file"),
    "weights cut": (lambda folder: os.truncate(folder / ADAPTED, 100), f"{ADAPTED} does not begin as safetensors"),
    "weights of another shape": (first_is(lambda weight: weight[:, :7].contiguous()), r"\[4, 7\]"),
    "weights that are not finite": (first_is(lambda weight: weight.fill_(math.nan)), "no finite fractions"),
    "weights that are whole": (first_is(lambda weight: weight.int()), "no finite fractions"),
    "weights of no adapter": (
        tensors(lambda values: values.update({"base_model.model.model.norm.weight": torch.ones(32)})),
        "norm.weight is",
    ),
    "weights without a prefix": (
        tensors(lambda values: [values.update({key[17:]: values.pop(key)}) for key in [*values]]),
        "lora_A.weight is None",
    ),
    "record of the base a list": (text("base_model.json", "[]"), "base_model.json"),
    "record of the base of numbers": (keys("base_model.json", name_or_path=5), "base_model.json: name_or_path"),
}
IN_A_RECIPE = "adapter={name: lora, rank: 4, alpha: 8, targets: [q_proj], path: run/export}"
"""The recipe's adapter begins with the one of the run's folder."""
SETTINGS_OF_OTHERS = ("record of the base a list", "record of the base of numbers")
"""Records that `check` does not read: a run compares the bases."""


def test_a_type_of_a_newer_transformers_is_told_from_one_of_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(TYPES, "of_next_year", ModelType(transformers="99.1"))
    for name, words in {
        "of_next_year": "no model_type 'of_next_year', and 99.1 has",
        "evil": "no such model_type",
    }.items():
        (tmp_path / CONFIG).write_text(json.dumps({"model_type": name}))
        with pytest.raises(RecipeError, match=words):
            read_config(tmp_path)


@pytest.mark.parametrize("damage", ADAPTERS)
def test_a_damaged_adapter_is_named_too(damage: str, place_of: Path, capsys: pytest.CaptureFixture[str]):
    make, words = ADAPTERS[damage]
    make(place_of / "run/export")
    commands = {name: COMMANDS[name] for name in ("prompt to an adapter", "merge")}
    if damage not in SETTINGS_OF_OTHERS:
        commands["check"] = ("check", "recipe.yaml", "--set", IN_A_RECIPE)
    for name, command in commands.items():
        assert main([*command]) == 2, name
        said = capsys.readouterr().err
        assert re.search(words, said) and "Traceback" not in said, f"{name}: {said}"
    assert not (place_of / "run/merged").exists()


def test_a_sound_adapter_is_one_that_a_recipe_may_begin_with(place_of: Path):
    assert main(["check", "recipe.yaml", "--set", IN_A_RECIPE]) == 0


def test_the_tokenizer_of_an_adapter_is_named_too(place_of: Path, capsys: pytest.CaptureFixture[str]):
    (place_of / "run/export" / TOKENIZER).write_text("{}")
    assert main([*COMMANDS["prompt to an adapter"]]) == 2
    assert TOKENIZER in capsys.readouterr().err


def test_a_run_compares_the_base_of_the_adapter_that_it_begins_with(place_of: Path):
    (place_of / "run/export/base_model.json").write_text("[]")
    settings = AdapterSection(name="lora", path="run/export")
    with pytest.raises(RecipeError, match=r"base_model\.json: holds an empty list"):
        base_model.check_base(settings, "0")
