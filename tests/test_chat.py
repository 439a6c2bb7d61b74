"""A trained model in use: chats, answers to held-out rows, and its loss on any rows, each against plain transformers.

python -m pytest -q tests/test_chat.py
"""

import io
import json
import math
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT, Book, clean_environment
from documented import documented
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cookbook.commands.cli import main
from cookbook.commands.shared.find_model import recipe_of_run
from cookbook.config.recipe import load_recipe
from cookbook.system.console import printable
from cookbook.system.files import RecipeError
from cookbook.training.models.model_source import weights_digest
from cookbook.training.models.tokenizer_files import train_tokenizer

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
NUM_NEW = 8
LENGTH = ("--max-new-tokens", str(NUM_NEW))
ROWS = [
    {"messages": [{"role": "user", "content": "add"}, {"role": "assistant", "content": "def f(x):\n    return x\n"}]},
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "return"}]},
    {"messages": [{"role": "user", "content": "f"}, {"role": "assistant", "content": "def f"}]},
]


def save_model(folder: Path, seed: int) -> Path:
    """A random model, whose answers depend on every token before them."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, initializer_range=0.5))
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 5, 300)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run of a fully trained model, another with an adapter, and the base model of both."""
    root = tmp_path_factory.mktemp("chat")
    base = save_model(root / "base", 0)
    run = root / "run"
    save_model(run / "export", 1)
    (run / "run.json").write_text("{}")
    (run / "model").mkdir()
    record = {"name_or_path": str(base), "revision": None, "sha256": weights_digest(base), "is_new": False}
    (run / "model/base_model.json").write_text(json.dumps(record))
    (root / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    recipe: dict[str, Any] = {
        "strategy": "single",
        "mixed_precision": "no",
        "model": {"name_or_path": str(base)},
        "data": {"train": str(root / "rows.jsonl"), "eval": str(root / "rows.jsonl"), "max_length": 128},
        "batch": {"global_batch_size": 2, "micro_batch_size": 2},
        "optim": {"learning_rate": 1e-3},
        "run": {"max_steps": 2, "output_dir": str(run)},
    }
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(root / "adapter")
    AutoTokenizer.from_pretrained(base).save_pretrained(root / "adapter")
    return SimpleNamespace(root=root, base=base, run=run, adapter=root / "adapter", rows=root / "rows.jsonl")


def answer(folder: Path, chat: list[dict[str, str]]) -> str:
    """Answer of plain transformers to a chat."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return plain_answer(folder, text)


def plain_answer(folder: Path, text: str) -> str:
    """Answer of plain transformers to a text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    answers = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False)
    return tokenizer.decode(answers[0, ids.shape[1] :], skip_special_tokens=True)


def talk(lines: list[str], monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", *map(str, arguments), *LENGTH])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_chat_remembers_its_turns_until_reset(shelf, monkeypatch, capsys):
    assert talk(["add", "", "x", "/reset", "x", "/exit", "never read"], monkeypatch, shelf.run) == 0
    first = answer(shelf.run / "export", [user("add")])
    second = answer(shelf.run / "export", [user("add"), assistant(first), user("x")])
    alone = answer(shelf.run / "export", [user("x")])
    assert second != alone, "the test sees no memory"
    printed = capsys.readouterr()
    assert printed.out == printable(f"{first}\n{second}\n{alone}\n")
    assert f"CHAT with {shelf.run / 'export'} on" in printed.err


def test_a_system_prompt_starts_every_conversation(shelf, monkeypatch, capsys):
    assert talk(["x", "/reset", "x"], monkeypatch, shelf.run, "--system", "def") == 0
    expected = answer(shelf.run / "export", [{"role": "system", "content": "def"}, user("x")])
    assert expected != answer(shelf.run / "export", [user("x")])
    assert capsys.readouterr().out == printable(f"{expected}\n" * 2)


def test_compare_has_the_base_model_beside_the_tuned_one(shelf, monkeypatch, capsys):
    assert talk(["add", "x"], monkeypatch, shelf.run, "--compare") == 0
    expected = ""
    chats: dict[Path, list[dict[str, str]]] = {shelf.run / "export": [], shelf.base: []}
    for text in ("add", "x"):
        for (folder, chat), name in zip(chats.items(), ("tuned", "base"), strict=True):
            said = answer(folder, [*chat, user(text)])
            chat += [user(text), assistant(said)]
            expected += f"[{name}] {said}\n"
    assert capsys.readouterr().out == printable(expected)


def test_compare_switches_an_adapter_off(shelf, monkeypatch, capsys):
    assert talk(["add"], monkeypatch, shelf.adapter, "--compare") == 0
    expected = printable(answer(shelf.base, [user("add")]))
    printed = capsys.readouterr().out
    tuned, separator, base = printed.partition("\n[base] ")
    assert separator and base == f"{expected}\n"
    assert tuned.startswith("[tuned] ") and tuned != f"[tuned] {expected}"


def test_an_adapter_on_another_base_than_its_own_is_refused(shelf, tmp_path, monkeypatch, capsys):
    """A run that begins in the base's folder leaves another model there. The base was moved since the training."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(shelf.base, base)
    shutil.copytree(shelf.adapter, adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(base)}))
    record = {"name_or_path": "where it was", "revision": None, "sha256": weights_digest(base)}
    (adapter / "base_model.json").write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    evaluation = ["evaluate", str(adapter), str(shelf.rows), "--set", "data.max_length=128"]
    commands = [["chat", str(adapter), "--prompt", "x", *LENGTH], evaluation]
    assert talk(["add"], monkeypatch, adapter) == 0 and [main(words) for words in commands] == [0, 0]
    save_model(base, 7)
    capsys.readouterr()
    assert talk(["add"], monkeypatch, adapter) == 2 and [main(words) for words in commands] == [2, 2]
    printed = capsys.readouterr()
    assert printed.err.count(f"{base}: its files are not those that {adapter} was trained on") == 3
    assert "EVALUATION" not in printed.out and "answer" not in printed.out


def without_template(folder: Path, tmp_path: Path) -> Path:
    target = tmp_path / "plain"
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(target)
    return target


def test_without_a_template_each_line_is_continued_and_that_is_shown(shelf, tmp_path, monkeypatch, capsys):
    folder = without_template(shelf.base, tmp_path)
    assert talk(["def", "x", "def"], monkeypatch, folder) == 0
    printed = capsys.readouterr()
    answers = {text: plain_answer(folder, text) for text in ("def", "x")}
    assert printed.out == "".join(f"{printable(answers[text])}\n" for text in ("def", "x", "def"))
    assert "no chat template: each line is a text of its own" in printed.err
    assert talk(["x"], monkeypatch, folder, "--system", "def") == 2
    assert "--system: the model has no chat template" in capsys.readouterr().err


def test_a_template_that_leaves_the_system_prompt_out_is_refused(shelf, tmp_path, monkeypatch, capsys):
    folder = without_template(shelf.base, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    assert talk(["x"], monkeypatch, folder, "--system", "def") == 2
    assert "chat template leaves it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "RUN", "--temperature", "-1"], "--temperature is -1.0; write a number from 0"),
        (["chat", "RUN", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["chat", "nowhere"], "nowhere: no model there"),
        (["chat", "UNFINISHED"], "write its newest checkpoint first: cookbook export"),
        (["chat", "RUN", "--max-new-tokens", "255"], "would exceed the model's 256 positions"),
        (["chat", "BASE", "--compare"], "has no record of its base model (it is in no run's folder)"),
        (["chat", "RUN", "--prompt", "x", "--from-run", "1"], "--prompt would be ignored beside --from-run"),
        (["chat", "RUN", "--system", "x", "--from-run", "1"], "--system would be ignored beside --from-run"),
        (["chat", "BASE", "--from-run", "1"], "is not a run, and has no rows"),
        (["evaluate", "BASE"], "there are no held-out rows; name DATA as well"),
        (["evaluate", "BASE", "none.jsonl"], "none.jsonl"),
        (["evaluate", "RUN", "--set", "objective={name: dpo}"], "compares with the model before training"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_refused(arguments, message, shelf, tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints/step-1").mkdir(parents=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("add\n"))
    places = {"RUN": shelf.run, "BASE": shelf.base, "UNFINISHED": tmp_path}
    assert main([str(places.get(word, word)) for word in arguments]) == 2
    assert message in capsys.readouterr().err


def test_chat_answers_the_held_out_prompts_of_a_run(shelf, capsys):
    assert main(["chat", str(shelf.run), "--from-run", "2", *LENGTH]) == 0
    expected = ""
    for row in ROWS[:2]:
        prompt, reference = row["messages"]
        said = answer(shelf.run / "export", [prompt])
        expected += f"--- prompt\nuser: {prompt['content']}\n--- answer\n{said}\n"
        expected += f"--- reference\n{reference['content']}\n"
    assert capsys.readouterr().out == printable(expected)


def test_each_prompt_is_a_chat_of_its_own_with_the_system_prompt_for_both_models(shelf, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)  # nobody is asked for more
    words = ["--prompt", "add", "--prompt", "x", "--system", "def", "--compare"]
    assert main(["chat", str(shelf.run), *words, *LENGTH]) == 0
    expected = ""
    for text in ("add", "x"):
        messages = [{"role": "system", "content": "def"}, user(text)]
        expected += f"--- prompt\nsystem: def\nuser: {text}\n"
        for name, folder in (("tuned", shelf.run / "export"), ("base", shelf.base)):
            expected += f"--- answer of the {name} model\n{answer(folder, messages)}\n"
    assert capsys.readouterr().out == printable(expected)


def cycling_model(folder: Path) -> Path:
    """A model by hand: `go` and `on` follow each other for ever; `halt` is followed by the end."""
    words = ["<end>", "go", "on", "halt"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<end>")
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    options = {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None, "max_position_embeddings": 1_000_000}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4, **sizes, **options))
    weights = model.state_dict()
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name or "embed" in name or "lm_head" in name:
            weight.zero_()  # then the head sees the last token alone
    for token, following in ((1, 2), (2, 1), (3, 0)):
        weights["model.embed_tokens.weight"][token, token] = 1.0
        weights["lm_head.weight"][following, token] = 1.0
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def test_on_a_terminal_ctrl_c_ends_an_answer_and_ctrl_d_the_chat(tmp_path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cookbook", "chat", str(cycling_model(tmp_path)), "--max-new-tokens", "900000"],
        cwd=ROOT,
        env=clean_environment(CUDA_VISIBLE_DEVICES="", TERM="dumb"),
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # the first one opened becomes the terminal
    )
    os.close(theirs)
    seen = ""

    def wait_for(text: str) -> None:
        nonlocal seen
        deadline = time.monotonic() + 120
        while text not in seen:
            assert time.monotonic() < deadline, f"waiting for {text!r}: {seen[-500:]!r}"
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096).decode()

    try:
        wait_for("> ")
        os.write(ours, b"go\n")
        wait_for("on go on go")
        os.write(ours, b"\x03")
        seen = ""
        wait_for("\r\n> ")
        os.write(ours, b"\x04")
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        os.close(ours)
    assert "Traceback" not in seen


def test_the_python_of_the_page_runs(shelf):
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", (ROOT / "docs/use_it.md").read_text(encoding="utf-8"))
    (code,) = (block for block in blocks if "from transformers import" in block)
    for folder in (shelf.run / "export", shelf.adapter):
        changed = code.replace('"outputs/quickstart/export"', repr(str(folder)))
        if folder == shelf.adapter:
            changed = changed.replace("from transformers import AutoModelForCausalLM,", "from transformers import")
            changed = "from peft import AutoPeftModelForCausalLM as AutoModelForCausalLM\n" + changed
        done = subprocess.run(
            [sys.executable, "-c", changed],
            env=clean_environment(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1"),
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


# Evaluation.


def evaluate(book: Book, *arguments: str | Path) -> dict[str, Any]:
    """In a process of its own, since accelerate keeps its first settings."""
    done = subprocess.run(
        [sys.executable, "-m", "cookbook", "evaluate", *map(str, arguments), "--json"],
        cwd=book.root,
        env=clean_environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return documented("evaluate", done.stdout)


def plain_loss(folder: Path) -> tuple[float, int]:
    """Mean over the assistant's tokens of transformers' own loss, a row at a time; and their number."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    total, count = 0.0, 0
    for row in ROWS:
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, tokenize=False)
        whole = prompt + row["messages"][1]["content"] + "<|im_end|>"
        start = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor(tokenizer(whole)["input_ids"])[None]
        labels = ids.clone()
        labels[:, :start] = -100
        with torch.no_grad():
            num = ids.shape[1] - start
            total += model(input_ids=ids, labels=labels).loss.item() * num
            count += num
    return total / count, count


def test_evaluate_computes_the_loss_of_plain_transformers(shelf, book):
    expected, num_tokens = plain_loss(shelf.run / "export")
    (line,) = evaluate(book, shelf.run)["sets"]
    assert line["eval_num_tokens"] == num_tokens
    assert line["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert line["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)


@pytest.mark.thorough
def test_evaluate_takes_the_adapter_of_no_run_with_its_adapter_on(shelf, book):
    base, _ = plain_loss(shelf.base)
    tuned, num_tokens = plain_loss(shelf.adapter)
    assert abs(tuned - base) > 1e-2
    (line,) = evaluate(book, shelf.adapter, shelf.rows, "--set", "data.max_length=128")["sets"]
    assert line["eval_num_tokens"] == num_tokens
    assert line["eval_loss"] == pytest.approx(tuned, rel=1e-5)


ADAPTERS = {
    "none": [],
    "dora and a whole head": ["mixed_precision=bf16", "adapter={name: dora, rank: 4, modules_to_save: [lm_head]}"],
    "qlora": ["mixed_precision=bf16", "adapter={name: qlora, rank: 4}", "data.packing=true"],
}


def test_a_run_that_the_command_line_made_short_is_read_by_its_own_record(tmp_path: Path):
    """Its warm-up ends behind its end, which is a mistake where a recipe is written so."""
    text = (ROOT / "recipes/sums/sft.yaml").read_text()
    short = text.replace("run: {max_steps: 600", "run: {max_steps: 6")
    (tmp_path / "recipe.yaml").write_text(short)
    assert short != text and recipe_of_run(tmp_path, ["seed=5"]).run.max_steps == 6
    with pytest.raises(RecipeError, match="write less than 6"):
        load_recipe(tmp_path / "recipe.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=() if name == "none" else pytest.mark.thorough)
        for name, settings in ADAPTERS.items()
    ],
)
def test_evaluate_repeats_the_last_evaluation_of_a_run(settings: list[str], shelf, book: Book):
    settings = ["strategy=single", "run.max_steps=2", "schedule.warmup_steps=1", *settings]
    if len(settings) > 3:
        settings += [f"model={{name_or_path: {shelf.base}}}", f"data.train={shelf.rows}", f"data.eval={shelf.rows}"]
        settings.append("optim.learning_rate=0.1")
    done = book.train("recipes/small.yaml", *(word for setting in settings for word in ("--set", setting)))
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (book.root / "outputs/small/metrics.jsonl").read_text().splitlines())
    first, last = [line for line in lines if "eval_loss" in line]
    (line,) = evaluate(book, book.root / "outputs/small")["sets"]
    assert line["eval_num_tokens"] == last["eval_num_tokens"]
    assert line["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    assert line["eval_loss"] != pytest.approx(first["eval_loss"], rel=1e-3)
