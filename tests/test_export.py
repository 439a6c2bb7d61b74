"""A checkpoint becomes a Hugging Face folder that is what was trained, or nothing. No process group, no network.

python -m pytest -q tests/test_export.py
"""

import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from curves import RECIPE, ROOT
from documented import documented
from peft import AutoPeftModelForCausalLM
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from cookbook.commands.cli import main
from cookbook.config.recipe import Recipe, dump_recipe, load_recipe
from cookbook.config.sections import ModelSection
from cookbook.run.publish import card, export_folder, merged, model_folder, reopen
from cookbook.system.console import in_bytes
from cookbook.system.files import RecipeError
from cookbook.training.adapters import base_model, insertion
from cookbook.training.checkpoint import folder, streamed
from cookbook.training.checkpoint import write_model as building
from cookbook.training.checkpoint.listing import recipe_of
from cookbook.training.checkpoint.saver import Saver
from cookbook.training.checkpoint.streamed import StreamedModel
from cookbook.training.checkpoint.tensors import StagedPiece
from cookbook.training.models.model_source import weights_digest
from cookbook.training.models.tokenizer_files import train_tokenizer

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.arange(40).reshape(2, 20)


def new_model(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **HEADS, **changes}))


class Run:
    """A run's folder as train.py leaves it, without the training: weights are moved by chance."""

    def __init__(
        self, root: Path, adapter: dict[str, Any] | None = None, *, stored: torch.dtype = torch.float32, **config: Any
    ) -> None:
        self.folder, self.base = root / "run", root / "base"
        self.tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 5, 300)
        new_model(**config).to(stored).save_pretrained(self.base)
        self.tokenizer.save_pretrained(self.base)
        values = yaml.safe_load(RECIPE.replace("DATA", "rows.jsonl").replace("OUTPUT", str(self.folder)))
        values["model"] = {"name_or_path": str(self.base)}
        values["data"] |= {"train": [{"path": "some-org/some-set"}], "eval": {"": {"path": "rows.jsonl"}}}
        values["optim"]["learning_rate"] = 0.1
        values |= {"adapter": adapter} if adapter else {}
        self.recipe = Recipe.model_validate(values)
        self.model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        if self.recipe.adapter:
            insertion.add_adapter(self.model, self.recipe.adapter, seed=0)
        model_folder.write_model_files(
            self.folder,
            str(self.base),
            ModelSection(name_or_path=str(self.base)),
            config=AutoConfig.from_pretrained(self.base),
            tokenizer=self.tokenizer,
            digest=weights_digest(self.base),
        )
        (self.folder / "run.json").write_text("{}")

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def move(self, seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        for tensor in self.trained.values():
            tensor += 0.05 * torch.randn(tensor.shape, generator=chance)

    def save(self, step: int, *, loss: float | None = None, num_ranks: int = 2, resumed: str | None = None) -> Path:
        """A checkpoint as two processes write it, each a half of every tensor."""
        self.move(step)
        root = self.folder / "checkpoints"
        options: dict[str, Any] = {"attempt": "a", "keep_last": 99, "keep_best": 0, "in_background": False}
        savers = [Saver(root, rank=rank, num_ranks=num_ranks, say=print, **options) for rank in range(num_ranks)]
        state = {
            "step": step,
            "num_samples": 16 * step,
            "num_skipped": 0,
            "is_evaluated": True,
            **({"eval_loss": loss} if loss is not None else {}),
            "parameters": {name: list(tensor.shape) for name, tensor in self.trained.items()},
            "counts": {"updates": None, "loss_scaler": None},
            "recipe": self.recipe.model_dump(mode="json", exclude_none=True),
            "made_from": {"data": "d" * 16, "model": weights_digest(self.base)},
            "run": {
                "versions": {"torch": "2.13.0", "deepspeed": None},
                "strategy": {"file": "accelerate_configs/zero3.yaml", "kind": "zero", "processes": num_ranks},
                "resumed_from": resumed,
            },
        }
        for rank, saver in reversed(list(enumerate(savers))):  # the first waits for the others
            pieces = []
            for name, tensor in self.trained.items():
                low, high = (tensor.numel() * i // num_ranks for i in (rank, rank + 1))
                for kind in ("weight", "momentum_buffer"):
                    pieces.append(StagedPiece(name, kind, low, 0, tensor.reshape(-1)[None, low:high]))
            saver.save(step, pieces, state, best_by=loss)
            saver.wait()
        return root / folder.folder_name(step)

    def logits(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model.eval()(input_ids=IDS).logits


ADAPTERS = {
    "lora": {"name": "lora", "rank": 4},
    "dora": {"name": "dora", "rank": 4, "modules_to_save": ["lm_head"]},
    "qlora": {"name": "qlora", "rank": 4, "rslora": True},
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path, tie_word_embeddings=True)
    made.save(3)
    return made


@pytest.fixture
def lora(tmp_path: Path) -> Run:
    made = Run(tmp_path, ADAPTERS["dora"], tie_word_embeddings=False)
    made.save(3)
    return made


@pytest.fixture
def here(monkeypatch) -> None:
    """Reopens in this process: starting another takes seconds, which a few tests are enough to spend."""

    def opened(export: Path, model_files: Path, checkpoint: Path, dtype: torch.dtype) -> dict[str, str]:
        try:
            return reopen.reopen(export, model_files, checkpoint, dtype)
        except reopen.ExportDifference as error:
            raise export_folder.BrokenExport(f"was removed: {error}") from None

    monkeypatch.setattr(export_folder, "_reopen", opened)


def export(made: Run, *arguments: str) -> int:
    return main(["export", str(made.folder), *arguments])


@pytest.mark.parametrize(
    ("tied", "stored", "word", "dtype"),
    [
        (True, torch.float32, "as-is", torch.float32),
        (True, torch.float32, "bf16", torch.bfloat16),
        (False, torch.float32, "bf16", torch.bfloat16),
        (False, torch.bfloat16, "as-is", torch.bfloat16),
    ],
    ids=["tied", "tied, bf16 asked for", "untied, bf16 asked for", "untied, bf16 as its base"],
)
def test_transformers_opens_what_was_trained(
    tmp_path: Path, capsys, here, tied: bool, stored: torch.dtype, word: str, dtype: torch.dtype
):
    made = Run(tmp_path, tie_word_embeddings=tied, stored=stored)
    made.save(3)
    assert export(made, "--dtype", word) == 0
    said = capsys.readouterr().out
    assert f"reopened in a fresh process: {len(made.trained)} tensors equal to the checkpoint's; logits equal" in said
    again = AutoModelForCausalLM.from_pretrained(made.folder / "export", dtype="auto")
    assert again.dtype == dtype
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, made.trained[name].to(dtype)), name
    (path,) = (made.folder / "export").glob("*.safetensors")
    with safe_open(path, "pt") as file:
        assert ("lm_head.weight" in file.keys()) != tied, "a tied matrix is there once"  # noqa: SIM118


@pytest.mark.parametrize("name", ADAPTERS)
def test_peft_opens_an_adapter(tmp_path: Path, capsys, monkeypatch, here, name: str):
    monkeypatch.chdir(tmp_path)
    made = Run(Path(), ADAPTERS[name], tie_word_embeddings=False)
    made.save(3)
    assert export(made) == 0
    assert "logits equal to those of the checkpoint" in capsys.readouterr().out
    monkeypatch.chdir("/")  # from where its base, which the recipe named without a folder, is another path
    folder = tmp_path / "run" / "export"
    with torch.no_grad():
        again = AutoPeftModelForCausalLM.from_pretrained(folder).eval()(input_ids=IDS).logits
    assert torch.allclose(again, made.logits(), atol=1e-5)
    assert (folder / base_model.BASE_RECORD).is_file()
    modes = {path.name: path.stat().st_mode & 0o044 for path in folder.iterdir()}
    assert set(modes.values()) == {0o044}, f"a server runs as another user: {modes}"


def test_what_is_exported_stops_at_the_end_of_its_turn_and_where_its_model_did(tmp_path: Path, here):
    made = Run(tmp_path, eos_token_id=5)
    made.save(3)
    assert export(made) == 0
    end = made.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end != 5 and GenerationConfig.from_pretrained(made.folder / "export").eos_token_id == [5, end]


def test_the_sampling_settings_of_the_model_stay_and_all_tokens_at_which_it_stops(tmp_path: Path):
    (tmp_path / "base").mkdir()
    written = {"do_sample": True, "temperature": 0.3, "top_k": 7, "eos_token_id": [5, 6], "pad_token_id": 1}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(written))
    for end, stops in ((9, [5, 6, 9]), (6, [5, 6]), (None, [5, 6])):
        folder = tmp_path / str(end)
        folder.mkdir()
        building.write_generation_config(folder, like=tmp_path / "base", end_of_turn=end)
        settings = json.loads((folder / "generation_config.json").read_text())
        assert {key: settings[key] for key in written} == written | {"eos_token_id": stops}


def test_adapter_and_base_become_one(lora: Run, capsys, here):
    assert export(lora, "--merged") == 0
    assert "reopened as one model" in capsys.readouterr().out
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(lora.folder / "merged").eval()(input_ids=IDS).logits
    assert torch.allclose(again, lora.logits(), atol=1e-4)
    names = {path.name for path in (lora.folder / "merged").iterdir()}
    assert {"model.safetensors", "README.md", "export.json", "generation_config.json"} <= names
    assert "adapter.tmp" not in names


MERGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({"name": "lora"}, {"attention_bias": True}),
    "dora, tied": ({"name": "dora"}, {"tie_word_embeddings": True}),
    "qlora": ({"name": "qlora", "rslora": True}, {}),
    "whole head": ({"name": "lora", "targets": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}, {}),
}


@pytest.mark.parametrize("case", MERGED)
def test_merged_layer_by_layer_it_is_what_peft_merges_as_a_whole(tmp_path: Path, case: str):
    adapter, config = MERGED[case]
    made = Run(tmp_path, adapter | {"rank": 4, "alpha": 8}, **config)
    with export_folder.find_checkpoint(made.folder, saved_step(made)) as checkpoint:
        export_folder.export(made.folder, checkpoint, reopened=False)
    parts, logits = merged._merge_in_parts(made.base, made.folder / "export")
    expected, expected_logits = merged._merge_whole(made.base, made.folder / "export")
    assert parts.keys() == expected.keys()
    for dtype in (torch.float32, torch.bfloat16):
        assert all(torch.equal(parts[name].read(dtype), expected[name].read(dtype)) for name in expected)
    assert torch.equal(logits, expected_logits)
    before = load_file(made.base / "model.safetensors")
    assert sum(not torch.equal(expected[name].read(torch.float32), before[name]) for name in expected) >= 4


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)], ids=str
)
def test_a_merge_with_other_logits_is_refused(tmp_path: Path, monkeypatch, dtype: torch.dtype, limit: float):
    made = Run(tmp_path, {"name": "lora", "rank": 4, "alpha": 8})
    with export_folder.find_checkpoint(made.folder, saved_step(made)) as checkpoint:
        export_folder.export(made.folder, checkpoint, reopened=False)
    right = merged._logits_of
    for times, refused in ((0.5, False), (1.5, True)):
        monkeypatch.setattr(merged, "_logits_of", lambda folder, times=times: right(folder) * (1 + times * limit))
        with pytest.raises(RuntimeError, match="from those of the adapter") if refused else contextlib.nullcontext():
            (tmp_path / str(times)).mkdir()
            merged.write_merged(made.folder / "export", tmp_path / str(times), dtype)


def saved_step(made: Run) -> int:
    made.save(3)
    return 3


def test_a_streamed_weight_is_that_of_the_files_however_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(streamed, "CHUNK", 7)
    whole_model = StreamedModel.open(tmp_path)
    assert whole_model is not None
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(whole_model.weight(name).read(torch.float32), tensor), name


def test_files_that_differ_from_the_model_in_memory_are_not_streamed(tmp_path: Path):
    """Experts apart in the files, stacked in memory."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    assert StreamedModel.open(tmp_path) is None
    new_model().save_pretrained(tmp_path / "direct")
    assert StreamedModel.open(tmp_path / "direct") is not None


def test_logits_of_a_model_are_computed_with_one_of_its_layers_in_memory(tmp_path: Path):
    whole = new_model().eval()
    whole.save_pretrained(tmp_path)
    opened = StreamedModel.open(tmp_path)
    assert opened is not None
    layers, places = opened.model.model.layers, []
    for layer in layers:
        layer.mlp.register_forward_hook(
            lambda *_: places.append([layer.mlp.up_proj.weight.is_meta for layer in layers])
        )
    torch.testing.assert_close(opened.probe_logits(), streamed.probe_logits(whole))
    assert places == [[k != i for k in range(len(layers))] for i in range(len(layers))] and len(layers) > 1


@pytest.mark.parametrize("left", ["file", "settings"])
def test_an_adapter_that_does_not_fit_its_settings_is_not_merged(lora: Run, here, left: str):
    assert export(lora) == 0
    path = lora.folder / "export" / "adapter_model.safetensors"
    tensors = load_file(path)
    if left == "settings":
        tensors.popitem()
    else:
        tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 32)
    save_file(tensors, path)
    with pytest.raises(RuntimeError, match="not in its file" if left == "settings" else "without a place"):
        merged._merge_in_parts(lora.base, lora.folder / "export")


MERGES = """
import json, sys, threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from cookbook.run.publish import merged
{grown_by}
tiny, base, adapter, out = map(Path, sys.argv[1:])
merged.write_merged(tiny, tiny.parent, None)  # what is imported then counts for both
print(json.dumps([grown_by(lambda: merged.write_merged(adapter, out, None)),
                  grown_by(lambda: merged._merge_whole(base, adapter))]))
"""


def test_a_merge_holds_a_layer_and_not_the_model(tmp_path: Path, capsys):
    """By private pages, beside the merge of the whole model, in a process that has freed nothing yet."""
    dora = {"name": "dora", "rank": 4, "alpha": 8}
    tiny, made = Run(tmp_path / "small", dora), Run(tmp_path, dora, **LARGE)
    for run in (tiny, made):
        with export_folder.find_checkpoint(run.folder, saved_step(run)) as checkpoint:
            export_folder.export(run.folder, checkpoint, reopened=False)
    size = sum(tensor.nbytes for tensor in load_file(made.base / "model.safetensors").values())
    program = MERGES.format(grown_by=inspect.getsource(grown_by))
    folders = [tiny.folder / "export", made.base, made.folder / "export", tmp_path]
    words = [sys.executable, "-c", program, *map(str, folders)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    merged, whole = json.loads(done.stdout.splitlines()[-1])
    print("MiB:", {name: n >> 20 for name, n in dict(model=size, merge=merged, whole=whole).items()})
    assert merged < size / 2 < size < whole


LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6}


def grown_by(do: Callable[[], Any]) -> int:
    """Bytes of memory of its own that this process had at most, above those before."""

    def private() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

    before = peak = private()
    done = threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, private())

    looker = threading.Thread(target=look)
    looker.start()
    do()
    done.set()
    looker.join()
    return peak - before


@pytest.mark.thorough
def test_an_export_needs_the_run_alone(run: Run, tmp_path: Path):
    """No base model, no cache, no Hub."""
    shutil.rmtree(run.base)
    environment = {**os.environ, "HF_HOME": str(tmp_path / "empty"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "cookbook", "export", str(run.folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    again = AutoTokenizer.from_pretrained(run.folder / "export")
    chat = [{"role": "user", "content": "hi"}]
    assert again.apply_chat_template(chat, tokenize=False) == run.tokenizer.apply_chat_template(chat, tokenize=False)


BUILD = """
import os, signal, sys
from pathlib import Path
from cookbook.training.checkpoint import write_model as export

folder, moment = Path(sys.argv[1]), sys.argv[2]
def die(*_, **options): os.kill(os.getpid(), signal.SIGKILL)
if moment == "between the renames":
    export._exchange = lambda *_: False
    rename = Path.rename
    Path.rename = lambda path, target: die() if path.name.startswith(".export.build") else rename(path, target)
if moment == "after the exchange":
    export.shutil.rmtree = die
with export.building(folder) as build:
    (build / "new").touch()
    if moment == "while it writes":
        die()
"""


@pytest.mark.parametrize("moment", ["while it writes", "between the renames", "after the exchange"])
def test_a_killed_export_leaves_an_older_one_and_nothing_that_stays(tmp_path: Path, moment: str):
    target = tmp_path / "export"
    target.mkdir()
    (target / "older").touch()
    killed = subprocess.run([sys.executable, "-c", BUILD, str(target), moment], cwd=ROOT)
    assert killed.returncode == -9
    if moment != "between the renames":  # where two names cannot be exchanged, a moment is left
        assert [path.name for path in target.iterdir()] == ["new" if moment == "after the exchange" else "older"]
    building.sweep_builds(target)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert [path.name for path in target.iterdir()] == ["new" if moment == "after the exchange" else "older"]


def test_an_export_that_is_being_written_is_not_swept(tmp_path: Path):
    target = tmp_path / "export"
    with building.building(target) as build:
        (build / "new").touch()
        building.sweep_builds(target)
        assert (build / "new").exists()
    assert [path.name for path in target.iterdir()] == ["new"]


def test_the_step_asked_for_is_exported(run: Run, here):
    run.save(5)  # neither the first nor the last
    first = {name: tensor.clone() for name, tensor in run.trained.items()}
    run.save(7)
    assert export(run, "--step", "5", "--out", str(run.folder / "early")) == 0
    assert export(run) == 0
    early, late = (load_file(run.folder / name / "model.safetensors") for name in ("early", "export"))
    assert all(torch.equal(early[name], first[name]) for name in first)
    assert all(torch.equal(late[name], tensor) for name, tensor in run.trained.items())
    assert json.loads((run.folder / "export" / "export.json").read_text())["step"] == 7


def test_large_models_are_written_in_parts_with_an_index(run: Run, monkeypatch, here):
    monkeypatch.setattr(export_folder.write_model, "__kwdefaults__", {"shard_size": "20KB"})
    assert export(run) == 0
    index = json.loads((run.folder / "export" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["weight_map"].keys() == run.trained.keys()


def test_the_card_tells_what_the_model_is(run: Run, here, monkeypatch: pytest.MonkeyPatch):
    # As on a machine whose text files are in Latin-1: the Hub reads UTF-8.
    monkeypatch.setattr(io, "text_encoding", lambda encoding, stacklevel=2: encoding or "latin-1")
    lines = [
        {"step": 2, "loss": 5.0},
        {"step": 3, "loss": 4.25},
        {"step": 3, "eval_loss": 4.5},
        {"step": 3, "eval_loss": 4.75, "eval_set": "größe"},
        {"step": 4, "loss": 1.0},
        {"step": 4, "eval_loss": 1.0},
    ]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "lo')
    assert export(run) == 0
    _, front, body = (run.folder / "export" / "README.md").read_bytes().decode().split("---\n", 2)
    card = yaml.safe_load(front)
    assert card["library_name"] == "transformers" and card["datasets"] == ["some-org/some-set"]
    assert card["tags"] == ["sft"] and "base_model" not in card, "a local folder means nothing on the Hub"
    assert "training loss | 4.2500 at step 3" in body and "evaluation loss | 4.5000 at step 3" in body
    assert "evaluation loss of größe | 4.7500 at step 3" in body
    assert "`zero3`, 2 processes" in body and "torch 2.13.0" in body and "deepspeed" not in body
    assert "`some-org/some-set`, split train, no revision pinned" in body
    written = body.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(written)["seed"] == 7


def test_files_are_readable_by_others_and_folders_can_be_entered(tmp_path: Path):
    (tmp_path / "templates").mkdir(mode=0o700)
    path = tmp_path / "templates" / "a"
    path.touch(mode=0o600)
    before = os.umask(0o027)
    try:
        export_folder._make_readable(tmp_path)
    finally:
        assert os.umask(before) == 0o027
    assert [oct(place.stat().st_mode & 0o777) for place in (path, path.parent)] == ["0o640", "0o750"]


def test_an_export_is_readable_by_others_and_its_card_has_no_path_of_this_machine(run: Run, here):
    """A server runs as another user, and a card is uploaded."""
    assert export(run) == 0
    for path in (run.folder / "export").rglob("*"):
        assert path.stat().st_mode & 0o044 == 0o044, path
    card = (run.folder / "export" / "README.md").read_text()
    assert str(run.folder.parent) not in card and "/tmp" not in card
    assert "output_dir: run" in card and "name_or_path: base" in card


def test_a_path_within_another_does_not_keep_the_other_s_folder_in_the_card(book):
    book.write("my/runs/a.jsonl", '{"text": "a"}\n')
    words = ["run.output_dir=my/runs/a", f"data.train={Path('my/runs/a.jsonl').absolute()}"]
    recipe = load_recipe(Path("recipes/small.yaml"), words)
    written = yaml.safe_load(card._without_folders(dump_recipe(recipe), recipe))
    assert (written["run"]["output_dir"], written["data"]["train"][0]["path"]) == ("a", "a.jsonl")


# What is broken is removed.


def sabotage(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    name = next(reversed(tensors))
    changed = {key: tensor.clone() for key, tensor in tensors.items()}
    if how == "a changed value":
        changed[name].view(-1)[-1] += 1e-3
    elif how == "a value that is not finite":
        changed[name].view(-1)[-1] = torch.nan
    elif how == "an empty tensor":
        changed[name] = changed[name][:0]
    elif how == "a missing tensor":
        del changed[name]
    elif how == "a tensor too many":
        changed["more"] = torch.zeros(2)
    return changed


BROKEN = {
    "a changed value": "is not what the checkpoint holds",
    "a value that is not finite": "not finite",
    "an empty tensor": "is empty",
    "a missing tensor": "missing keys|not those that were trained|other parameters",
    "a tensor too many": "unexpected keys|not those that were trained",
    "another setting": "its logits are",
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("kind", ["all weights", "adapter"])
def test_a_broken_export_is_removed_and_the_older_one_stays(
    tmp_path: Path, capsys, monkeypatch, here, kind: str, how: str
):
    made = Run(tmp_path, ADAPTERS["lora"] if kind == "adapter" else None, tie_word_embeddings=False)
    made.save(3)
    assert export(made) == 0
    before = {path.name: path.read_bytes() for path in (made.folder / "export").iterdir()}
    there = sorted(path.name for path in made.folder.iterdir())
    right = export_folder._reopen

    def broken(part: Path, *rest: Any) -> dict[str, str]:
        if how == "another setting":
            path, key = {"adapter": ("adapter_config.json", "lora_alpha")}.get(kind, ("config.json", "rms_norm_eps"))
            values = json.loads((part / path).read_text())
            (part / path).write_text(json.dumps(values | {key: values[key] * 100}))
        else:
            (path,) = part.glob("*.safetensors")
            save_file(sabotage(load_file(path), how), path, metadata={"format": "pt"})
        return right(part, *rest)

    monkeypatch.setattr(export_folder, "_reopen", broken)
    made.save(4)
    capsys.readouterr()
    assert export(made) == 1
    said = capsys.readouterr().err
    assert "was removed" in said and len(said.splitlines()) == 1
    assert any(words in said for words in BROKEN[how].split("|")), said
    assert {path.name: path.read_bytes() for path in (made.folder / "export").iterdir()} == before
    assert sorted(path.name for path in made.folder.iterdir()) == there


@pytest.mark.parametrize("kind", ["all weights", "adapter"])
@pytest.mark.parametrize("how", [None, "a changed value", "a missing tensor", "a tensor too many"])
def test_what_is_too_large_to_be_opened_is_compared_in_parts(
    tmp_path: Path, capsys, monkeypatch, here, kind: str, how: str | None
):
    monkeypatch.setattr(reopen, "LIMIT_GIB", 0.0)
    made = Run(tmp_path, ADAPTERS["dora"] if kind == "adapter" else None, tie_word_embeddings=False)
    made.save(3)
    right = export_folder._reopen

    def opened(part: Path, *rest: Any) -> dict[str, str]:
        (path,) = part.glob("*.safetensors")
        save_file(sabotage(load_file(path), how or ""), path, metadata={"format": "pt"})
        return right(part, *rest)

    monkeypatch.setattr(export_folder, "_reopen", opened)
    assert export(made) == (0 if how is None else 1)
    said = capsys.readouterr().out
    if how is None:
        assert f"{len(made.trained)} tensors equal" in said and "logits not compared: 0.0 GiB of weights" in said


def test_an_adapter_whose_base_is_gone_is_compared_all_the_same(lora: Run, capsys, here):
    shutil.rmtree(lora.base)
    assert export(lora) == 0
    assert "is not on this machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    "kind", ["all weights", pytest.param("adapter", marks=[pytest.mark.slow, pytest.mark.thorough])]
)
def test_a_fresh_process_says_yes_and_no(tmp_path: Path, capsys, monkeypatch, kind: str):
    """An export as a user starts it: another process opens it, and what it finds ends the command."""
    monkeypatch.chdir(tmp_path)
    made = Run(Path(), ADAPTERS["lora"] if kind == "adapter" else None, tie_word_embeddings=False)
    made.save(3)
    assert export(made) == 0
    assert "tensors equal to the checkpoint's; logits equal" in capsys.readouterr().out
    right = export_folder._reopen

    def broken(part: Path, *rest: Any) -> dict[str, str]:
        (path,) = part.glob("*.safetensors")
        save_file(sabotage(load_file(path), "a changed value"), path, metadata={"format": "pt"})
        return right(part, *rest)

    monkeypatch.setattr(export_folder, "_reopen", broken)
    assert export(made, "--out", str(tmp_path / "other")) == 1
    said = capsys.readouterr().err
    assert "was removed: reopened," in said and "is not what the checkpoint holds" in said
    assert not (tmp_path / "other").exists()


# Bad input: one message, exit code 2, nothing touched.


def damage(made: Run) -> None:
    (path, *_) = (made.folder / "checkpoints" / "step-00000003").glob("pieces*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def another_format(made: Run) -> None:
    path = made.folder / "checkpoints" / "step-00000003" / "manifest.json"
    path.write_text(folder.seal_manifest({**json.loads(path.read_text()), "format": 99}))


def something_else_there(made: Run) -> None:
    (made.folder / "export").mkdir()
    (made.folder / "export" / "thesis.txt").write_text("years of work")


def another_frame(made: Run) -> None:
    path = made.folder / "model" / base_model.BASE_RECORD
    path.write_text(json.dumps({**json.loads(path.read_text()), "sha256": "0" * 64}))


BAD: dict[str, tuple[Callable[[Run], Any], list[str], str]] = {
    "no run": (lambda made: shutil.rmtree(made.folder), [], "not a run's folder"),
    "no checkpoint": (lambda made: shutil.rmtree(made.folder / "checkpoints"), [], "no checkpoint in it"),
    "a step that is not there": (
        lambda made: made.save(12),
        ["--step", "5"],
        "no checkpoint after step 5; there are those of step 3, 12",
    ),
    "a broken checkpoint": (damage, [], "does not have the digest that it was written with; there is no other"),
    "another format": (another_format, [], "its format is 99, and this program reads 1"),
    "a folder that is not ours": (something_else_there, [], "is no export of ours"),
    "no model/": (lambda made: shutil.rmtree(made.folder / "model"), [], "model: missing"),
    "model/ of another": (another_frame, [], "is of another model than the checkpoint was made with"),
    "nothing to merge": (lambda made: None, ["--merged"], "there is no adapter to merge"),
    "public without push": (lambda made: None, ["--public"], "would be ignored without --push"),
    "push without a token": (lambda made: None, ["--push", "me/mine"], "no HF_TOKEN in the environment"),
    "push to nowhere": (lambda made: None, ["--push", "mine"], "write OWNER/NAME"),
}


def everything(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_reported_and_nothing_is_touched(run: Run, capsys, monkeypatch, case: str):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    spoil, arguments, expected = BAD[case]
    spoil(run)
    before = everything(run.folder.parent)
    assert export(run, *arguments) == 2
    said = capsys.readouterr().err
    assert expected in said and len(said.splitlines()) == 1
    assert everything(run.folder.parent) == before


def test_a_disk_without_room_is_reported_first(run: Run, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert export(run) == 2
    assert re.search(r": 1000 B are free, and the export needs \S+ \S+, \S+ \S+ more$", capsys.readouterr().err.strip())


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon", "sgd"])
def test_the_recipe_of_every_optimizer_is_read_back(name: str):
    values = yaml.safe_load(RECIPE.replace("DATA", "rows.jsonl").replace("OUTPUT", "out"))
    recipe = Recipe.model_validate(values | {"optim": {"name": name, "learning_rate": 1.0, "weight_decay": 0.25}})
    assert recipe_of(recipe.model_dump(mode="json", exclude_none=True)) == recipe


# What is known by hand.


@pytest.mark.parametrize(("free", "lacking"), [(7199, "1 B"), (7200, None)])
def test_the_room_of_an_export_is_each_element_once_in_its_dtype(tmp_path: Path, monkeypatch, free: int, lacking):
    """On the disk of the nearest folder that is there."""
    state = {"parameters": {"a": [30, 40], "b": [2400]}}
    asked: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=free))
    target = tmp_path / "not" / "there"
    if lacking is None:
        export_folder._check_room(target, state, torch.bfloat16)
    else:
        with pytest.raises(RecipeError, match=f"{tmp_path}: .* are free, and the export needs .*, {lacking} more"):
            export_folder._check_room(target, state, torch.bfloat16)
    assert asked == [tmp_path]


def test_only_an_export_or_an_empty_folder_is_replaced(tmp_path: Path):
    empty, ours, file, link = (tmp_path / name for name in ("empty", "ours", "file", "link"))
    empty.mkdir()
    ours.mkdir()
    for path in (ours / "export.json", ours / "model.safetensors", file):
        path.write_text("{}")
    link.symlink_to(tmp_path / "nowhere")
    for allowed in (empty, ours, tmp_path / "new"):
        export_folder.check_target(allowed)
    for other in (file, link, tmp_path):
        with pytest.raises(RecipeError, match=r"exists, and is no export of ours \(no export.json\); name another"):
            export_folder.check_target(other)


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_the_record_of_an_export_says_of_what_it_is_and_what_was_compared(tmp_path: Path, monkeypatch, adapter):
    made = Run(tmp_path, adapter and ADAPTERS[adapter], stored=torch.bfloat16)
    saved_step(made)
    asked: list[Any] = []
    compared = {"tensors": "t", "logits": "l"}
    monkeypatch.setattr(export_folder, "_reopen", lambda *given: asked.append(given) or {**compared})
    monkeypatch.setattr(export_folder, "write_merged", lambda part, build, dtype: f"merged as {dtype}")
    kinds = [(False, "as-is", None), (False, "fp16", "float16")]
    kinds += [(True, "as-is", None), (True, "bf16", "bf16")] if adapter else []
    for is_merged, dtype, stored in kinds:
        said: list[str] = []
        own = "float32" if adapter else "bfloat16"  # an adapter's own weights are not of the base
        in_record = dtype if is_merged else stored or own
        with export_folder.find_checkpoint(made.folder, None) as checkpoint:
            target = export_folder.export(
                made.folder, checkpoint, dtype=dtype, merged=is_merged, say=said.append, target=tmp_path / "out"
            )
            record = json.loads((target / "export.json").read_text())
            logits = f"reopened as one model, merged as {export_folder.STORED_DTYPES[dtype]}" if is_merged else "l"
            assert record == {
                "step": checkpoint.step,
                "saved_at": checkpoint.manifest["saved_at"],
                "seal": checkpoint.manifest.get("seal"),
                "dtype": in_record,
                "merged": is_merged,
                "reopened": compared | {"logits": logits},
            }
            assert asked[-1][1:3] == (made.folder / "model", checkpoint.path)
        size = in_bytes(sum(path.stat().st_size for path in target.rglob("*")))
        assert said[0] == f"{target}: step {record['step']}, {size}"
        assert said[1:] == [f"  reopened in a fresh process: t; {logits}"]
        assert (target / "adapter.tmp").exists() is False and (target / "README.md").is_file()
        assert not {"buffers.safetensors", "tower.json"} & {path.name for path in target.iterdir()}
    with export_folder.find_checkpoint(made.folder, None) as checkpoint:
        target = export_folder.export(made.folder, checkpoint, reopened=False, say=said.append)
    assert target == made.folder / "export" and json.loads((target / "export.json").read_text())["reopened"] == {}
    assert "checked | not yet" in (target / "README.md").read_text() and len(asked) == len(kinds)


@pytest.mark.parametrize(
    ("code", "err", "reason"),
    [
        (0, "", None),
        (1, "Traceback\n  KeyError: 1\nweights differ\n", "weights differ"),
        (-9, "\n", "it ended with exit code -9"),
    ],
)
def test_another_process_compares_on_the_cpu_without_the_variables_of_a_run(
    tmp_path: Path, monkeypatch, code: int, err: str, reason: str | None
):
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "TORCHELASTIC_RUN_ID", "COOKBOOK_FAULTS", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("MINE", "stays")
    monkeypatch.chdir(tmp_path)
    asked: list[Any] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append((command, options))
        return SimpleNamespace(returncode=code, stderr=err, stdout='loading\n{"tensors": "t"}\n')

    monkeypatch.setattr(export_folder.subprocess, "run", run)
    Path("step-3").mkdir()
    given = (Path("out"), Path("model"), Path("step-3"), torch.bfloat16)
    if reason is None:
        assert export_folder._reopen(*given) == {"tensors": "t"}
    else:
        with pytest.raises(export_folder.BrokenExport, match=f"the export of step-3 was removed: reopened, {reason}$"):
            export_folder._reopen(*given)
    (((python, *words), options),) = asked
    assert python == sys.executable and words[:2] == ["-m", "cookbook.run.publish.reopen"]
    assert words[2:] == [*(str(tmp_path / name) for name in ("out", "model", "step-3")), "bfloat16"]
    own = options["env"]
    assert own["MINE"] == "stays" and own["HF_HUB_OFFLINE"] == "1" and own["DS_ACCELERATOR"] == "cpu"
    assert own["CUDA_VISIBLE_DEVICES"] == "" and own["PYTHONPATH"] == str(ROOT) and options["cwd"] == "/"
    left = {"ACCELERATE_USE_FSDP", "FSDP_VERSION", "TORCHELASTIC_RUN_ID", "COOKBOOK_FAULTS", "RANK", "WORLD_SIZE"}
    assert not left & own.keys() and options["errors"] == "replace"
    Path("step-3").rmdir()
    if reason is not None:
        with pytest.raises(RecipeError, match="step-3: was removed while it was exported, by its run; export a copy"):
            export_folder._reopen(*given)


def test_killed_exports_of_both_kinds_are_swept(tmp_path: Path, monkeypatch):
    swept: list[Path] = []
    monkeypatch.setattr(export_folder, "sweep_builds", swept.append)
    export_folder.sweep_exports(tmp_path)
    assert swept == [tmp_path / "export", tmp_path / "merged"]


def test_a_run_exports_its_last_checkpoint_or_the_best_that_is_kept(tmp_path: Path):
    made = Run(tmp_path)
    for step, loss in ((3, 2.0), (6, 1.0), (9, 3.0)):
        made.save(step, loss=loss)
    last = folder.open_checkpoint(made.folder / "checkpoints" / folder.folder_name(9))
    for is_best, step in ((False, 9), (True, 6)):
        with export_folder.choose_checkpoint(made.folder, last, is_best=is_best) as checkpoint:
            assert checkpoint.step == step and (checkpoint is last) == (step == 9)


def test_a_model_folder_says_where_its_model_is_from(tmp_path: Path, monkeypatch):
    """An export is opened in other working folders too; a name on the Hub stays one, with its revision."""
    monkeypatch.chdir(tmp_path)
    made = Run(tmp_path)
    monkeypatch.setattr(model_folder.model_source, "revision_of", lambda folder: f"of {Path(folder).name}")
    config = AutoConfig.from_pretrained(made.base)
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    rows = {"<a>": 7}
    new: Any = {"vocab_size": 300} | dict.fromkeys(sizes, 2) | {"num_attention_heads": 1, "num_key_value_heads": 1}
    for number, (section, place, revision, is_new) in enumerate(
        [
            (ModelSection(name_or_path="base"), str(made.base), "of base", False),
            (ModelSection(name_or_path="org/name", revision="v2"), "org/name", "v2", False),
            (ModelSection(from_scratch=new), str(made.base), "of base", True),
        ]
    ):
        run = tmp_path / str(number)
        buffers = {"own": torch.ones(2)} if number else None
        assert not model_folder.has_model_files(run)
        model_folder.write_model_files(
            run,
            "base",
            section,
            config=config,
            tokenizer=made.tokenizer,
            digest="d",
            new_tokens={"<a>": 7},
            buffers=buffers,
        )
        assert model_folder.has_model_files(run)
        base = base_model.Base.read(run / "model")
        assert (base.name_or_path, base.revision, base.is_new) == (place, revision, is_new)
        assert (base.sha256, base.new_tokens, base.head) == ("d", rows, None)
        assert (run / "model" / building.BUFFERS).exists() == bool(number)
        assert json.loads((run / "model/config.json").read_text())["vocab_size"] == config.vocab_size
        end = made.tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert GenerationConfig.from_pretrained(run / "model").eos_token_id == end


def test_a_base_is_rebuilt_with_the_rows_and_the_head_of_its_run(tmp_path: Path, monkeypatch):
    from cookbook.training.models import first_head, grown

    monkeypatch.setattr(merged, "read_tokenizer", lambda folder: f"tokenizer of {folder.name}")
    monkeypatch.setattr(grown, "grown_folder", lambda *words, cache: f"grown {words} in {cache}")
    monkeypatch.setattr(first_head, "scored_folder", lambda *words, seed, cache: f"scored {words} by {seed} in {cache}")
    plain = base_model.Base("org/base", None, "d")
    assert merged.rebuild_base("base", tmp_path, plain, cache=tmp_path) == "base"
    rows: Any = dataclasses.replace(plain, new_tokens={"<a>": 7})
    with_rows = f"grown {('base', f'tokenizer of {tmp_path.name}', {'<a>': 7})} in {tmp_path}"
    assert merged.rebuild_base("base", tmp_path, rows, cache=tmp_path) == with_rows
    scored: Any = dataclasses.replace(rows, head="head")
    with_head = f"scored {(with_rows, 'head')} by 0 in {tmp_path}"
    assert merged.rebuild_base("base", tmp_path, scored, cache=tmp_path) == with_head


@pytest.mark.parametrize(("largest", "limit"), [(100.0, 1e-3), (0.1, 1e-5)])
def test_logits_are_equal_within_a_share_of_the_largest(largest: float, limit: float):
    reference = torch.tensor([0.0, -largest], dtype=torch.float64)
    said = reopen._compare_logits(reference + 0.9 * limit, reference)
    assert said == "logits equal to those of the checkpoint within 9e-06"
    for other in (reference - 1.1 * limit, reference * torch.nan):
        with pytest.raises(reopen.ExportDifference, match=r"its logits are (1.1e-05|nan) from those of the checkpoint"):
            reopen._compare_logits(other, reference)


# Memory.


@pytest.mark.thorough
@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path):
    """Private pages, as /proc counts them; those of mapped files are the disk's, and go when others need the room."""
    script = """
import json, sys, threading, time, re
from pathlib import Path
from cookbook.run.publish import export_folder
export_folder._reopen = lambda *_: {"tensors": "", "logits": ""}
peak = [0]
def private():
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(kb) for kb in re.findall(r"^(?:Private_Dirty|Anonymous): +(\\d+)", text, re.M)[-1:]) / 1024
stop = threading.Event()
def watch():
    while not stop.is_set():
        peak[0] = max(peak[0], private()); time.sleep(0.005)
run = Path(sys.argv[1])
with export_folder.find_checkpoint(run, None) as checkpoint:
    pass
before = private()
thread = threading.Thread(target=watch); thread.start()
export_folder.export(run, checkpoint, say=lambda _: None)
stop.set(); thread.join()
print(json.dumps(peak[0] - before))
"""
    grown = []
    for hidden in (64, 1024):
        made = Run(tmp_path / str(hidden), hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=4)
        made.save(1, num_ranks=2)
        done = subprocess.run(
            [sys.executable, "-c", script, str(made.folder)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        grown.append(float(done.stdout.splitlines()[-1]))
        size = sum(tensor.nbytes for tensor in made.trained.values()) / 2**20
    print(f"export of {size:.0f} MiB: {grown[1]:.0f} MiB of private memory, of a tiny model {grown[0]:.0f}")
    assert size > 200 and grown[1] - grown[0] < 2 * 64 + 20, "two buffers of CHUNK elements"


# Pushing, to a stand-in.


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as a commit of small files needs."""

    private: bool | None = None
    seen: list[tuple[str, str, Any]]

    def answer(self, status: int, body: Any, **headers: str) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(text)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        type(self).seen.append(("GET", self.path, self.headers.get("Authorization")))
        if self.private is None:
            self.answer(404, {"error": "not found"}, **{"X-Error-Code": "RepoNotFound"})
        else:
            self.answer(200, {"id": "me/mine", "private": self.private, "siblings": [], "tags": [], "downloads": 0})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        body = [json.loads(line) for line in text.splitlines() if line]
        type(self).seen.append(("POST", self.path, body))
        if self.path.endswith("/api/repos/create"):
            type(self).private = body[0].get("private", body[0].get("visibility") == "private")
            self.answer(200, {"url": f"http://{self.headers['Host']}/me/mine", "id": "1", "name": "me/mine"})
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in body[0]["files"]
            ]
            self.answer(200, {"files": files})
        elif "/commit/" in self.path:
            self.answer(
                200,
                {
                    "success": True,
                    "commitOid": "0" * 40,
                    "commitUrl": f"http://{self.headers['Host']}/me/mine/commit/0",
                },
            )
        else:
            self.answer(200, {"errors": [], "warnings": []})

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, type[Hub]]]:
    handler = type("FreshHub", (Hub,), {"seen": [], "private": None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()


def pushed(made: Run, address: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_TOKEN": "hf_secretsecret", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "cookbook", "export", str(made.folder), "--push", "me/mine", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.thorough
def test_a_push_says_what_goes_and_is_private(run: Run, hub):
    address, handler = hub
    done = pushed(run, address)
    assert done.returncode == 0, done.stderr
    assert "pushing to me/mine, a new repository, private:" in done.stdout and "model.safetensors" in done.stdout
    assert "hf_secretsecret" not in done.stdout + done.stderr
    assert handler.private is True
    (commit,) = [body for method, path, body in handler.seen if "/commit/" in path]
    sent = {line["value"]["path"] for line in commit if line["key"] == "file"}
    assert sent == {path.name for path in (run.folder / "export").iterdir()}


def test_nothing_is_pushed_to_a_public_repository_unasked(run: Run, hub):
    address, handler = hub
    handler.private = False
    done = pushed(run, address)
    assert done.returncode == 2 and "me/mine is public; add --public" in done.stderr
    assert not [path for method, path, _ in handler.seen if method == "POST"]


# Listing.


def test_the_list_tells_what_is_whole_and_how_to_go_on(run: Run, capsys):
    run.save(5, loss=4.5)
    run.save(7, loss=4.75, resumed=str(run.folder / "checkpoints" / "step-00000003"))
    assert main(["checkpoint", str(run.folder)]) == 0
    said = capsys.readouterr().out
    lines = {line.split()[0]: line for line in said.splitlines() if line.startswith("  step-")}
    assert "[newest]" in lines["step-00000007"] and "evaluation loss 4.7500" in lines["step-00000007"]
    assert "[best]" in lines["step-00000005"] and "zero3, 2 processes" in lines["step-00000005"]
    assert "[resumed from]" in lines["step-00000003"]
    assert "all weights; optimizer sgd (momentum_buffer)" in said
    assert "fsdp2" in said and "optim.learning_rate" in said


def test_programs_get_json(lora: Run, capsys):
    assert main(["checkpoint", str(lora.folder / "checkpoints"), "--json"]) == 0
    (checkpoint,) = documented("checkpoint", capsys.readouterr().out)["checkpoints"]
    assert (checkpoint["step"], checkpoint["processes"], checkpoint["adapter"]) == (3, 2, "dora of rank 4")
    assert "tp" not in checkpoint["strategies"] and "zero3" in checkpoint["strategies"], "what is refused is left out"
    keys = checkpoint["keys"]
    assert "optim.learning_rate" in keys["with_consent"] and "optim.name" in keys["fixed"]
    assert "adapter.rank" in keys["fixed"] and "strategy" in keys["free"] and "data.max_length" in keys["by_content"]


def test_a_broken_checkpoint_is_named_and_the_exit_code_tells(run: Run, capsys):
    run.save(5)
    damage(run)
    assert main(["checkpoint", str(run.folder)]) == 1
    said = capsys.readouterr().out
    assert "step-00000003  BROKEN: pieces-0000" in said and "step-00000005  whole" in said
    assert main(["checkpoint", str(run.folder / "checkpoints" / "step-00000005")]) == 0
    assert main(["checkpoint", str(run.folder / "checkpoints" / "step-00000003")]) == 1


def test_missing_elements_are_seen_although_every_digest_is_right(run: Run, capsys):
    path = run.folder / "checkpoints" / "step-00000003" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]["pieces-00001-of-00002.safetensors"]
    path.write_text(folder.seal_manifest(manifest))
    assert main(["checkpoint", str(run.folder)]) == 1
    assert "elements of" in capsys.readouterr().out


NO_CHECKPOINT = {
    "nothing": (lambda made: made.folder / "nowhere", "no such folder"),
    "another folder": (lambda made: made.base, "neither a run, nor its checkpoints/, nor one checkpoint"),
    "another format": (
        lambda made: (another_format(made), made.folder / "checkpoints" / "step-00000003")[1],
        "its format is 99",
    ),
    "a run without any": (
        lambda made: (shutil.rmtree(made.folder / "checkpoints"), made.folder)[1],
        "no checkpoint in it",
    ),
}


@pytest.mark.parametrize("case", NO_CHECKPOINT)
def test_what_is_no_checkpoint_is_refused(run: Run, capsys, case: str):
    spoil, expected = NO_CHECKPOINT[case]
    assert main(["checkpoint", str(spoil(run))]) == 2
    said = capsys.readouterr().err
    assert expected in said and len(said.splitlines()) == 1


def test_checkpoints_are_listed_without_torch(run: Run):
    code = (
        "import sys; sys.modules['torch'] = None; from cookbook.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "checkpoint", str(run.folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


OF_A_MODEL = {
    f"{name} {what}": (name, damage)
    for name in ("config.json", "tokenizer.json", "generation_config.json")
    for what, damage in (("gone", Path.unlink), ("a list", lambda path: path.write_text("[]")), ("a pipe", a_pipe))
}
del OF_A_MODEL["generation_config.json gone"]  # a model need not have one


@pytest.mark.parametrize(("name", "damage"), OF_A_MODEL.values(), ids=OF_A_MODEL)
def test_a_damaged_file_of_the_model_is_named_before_anything_is_written(run: Run, name: str, damage):
    damage(run.folder / "model" / name)
    names = {*run.folder.iterdir()}
    with pytest.raises(RecipeError, match=rf"model/{name}|model: .*; put back what the run wrote there"):
        export_folder.export(run.folder, folder.open_checkpoint(run.folder / "checkpoints" / "step-00000003"))
    assert {*run.folder.iterdir()} == names


def test_a_new_token_that_its_tokenizer_does_not_have_is_refused(run: Run):
    path = run.folder / "model" / base_model.BASE_RECORD
    path.write_text(json.dumps({**json.loads(path.read_text()), "new_tokens": {"<new>": 10**9}}))
    with pytest.raises(RecipeError, match="gives <new> the id 1000000000, and its tokenizer another"):
        export_folder.export(run.folder, folder.open_checkpoint(run.folder / "checkpoints" / "step-00000003"))


def test_what_it_started_from_must_be_named(run: Run):
    (run.folder / "model" / base_model.BASE_RECORD).write_text("[]")
    with pytest.raises(RecipeError, match=r"base_model\.json: holds an empty list"):
        export_folder.export(run.folder, folder.open_checkpoint(run.folder / "checkpoints" / "step-00000003"))
