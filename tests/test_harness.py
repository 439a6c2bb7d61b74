"""`evaluate --tasks`: lm-evaluation-harness on a trained model, against log-probabilities of plain transformers.

python -m pytest -q tests/test_harness.py
"""

import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from needs import need_lm_eval
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cookbook.commands.cli import main
from cookbook.training.models import train_tokenizer

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
TASK = """\
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
"""
WORDS = ["def f", "return", "x", "(x):", "add", "y", "f(y)", "a = x"]
"""Without white space at their ends, which lm_eval moves from a question to its answer."""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run with a random model, an adapter of it, and a task with its rows."""
    root = tmp_path_factory.mktemp("harness")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, initializer_range=0.5))
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 5, 300)
    for folder in (root / "run/export", root / "adapter"):
        tokenizer.save_pretrained(folder)
    model.save_pretrained(root / "run/export")
    (root / "run/run.json").write_text("{}")
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, lora)
    adapted.peft_config["default"].base_model_name_or_path = str(root / "run/export")
    adapted.save_pretrained(root / "adapter")
    rows = [
        {"question": question, "choices": [a, b], "answer": i % 2}
        for i, (question, a, b) in enumerate(product(WORDS, WORDS, WORDS))
        if a != b and i % 7 == 0
    ]
    (root / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (root / "mine.yaml").write_text(TASK.replace("ROWS", str(root / "rows.jsonl")))
    return SimpleNamespace(run=root / "run", adapter=root / "adapter", rows=rows, task=root / "mine.yaml")


@torch.no_grad()
def share_right(folder: Path, rows: list[dict], *, is_chat: bool) -> float:
    """How often the right choice has the highest log-probability after the question, one sequence at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()  # of an adapter too, with its base
    right = 0
    for row in rows:
        start = row["question"]
        if is_chat:
            chat = [{"role": "user", "content": start}]
            start = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        length, found = len(tokenizer(start)["input_ids"]), []
        for choice in row["choices"]:
            ids = torch.tensor(tokenizer(start + choice)["input_ids"])
            logs = model(ids[None]).logits[0, length - 1 : -1].log_softmax(-1)
            found.append(logs.gather(1, ids[length:, None]).sum().item())
        right += found.index(max(found)) == row["answer"]
    return right / len(rows)


def evaluate(capsys: pytest.CaptureFixture, *words: str | Path) -> list[dict]:
    assert main(["evaluate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_without_lm_eval_the_answer_is_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", "outputs/mine", "--tasks", "arc_easy"]) == 2
    assert "pip install lm_eval==" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rows.jsonl", "--tasks", "a"], "DATA would be ignored beside --tasks"),
        (["--tasks", "a", "--set", "seed=1"], "--set would be ignored beside --tasks"),
        (["--limit", "3", "--plain"], "--limit, --plain would be ignored without --tasks"),
        (["--tasks", "a", "--few-shot", "-1"], "--few-shot is -1; write 0 or more"),
        (["--tasks", "a", "--limit", "0"], "--limit is 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_would_be_ignored_is_refused(words, message, capsys):
    assert main(["evaluate", "outputs/mine", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.thorough(needs="lm_eval")
def test_a_task_of_ones_own_has_the_numbers_of_plain_transformers(shelf, capsys):
    need_lm_eval()
    seen = set()
    for folder, model in ((shelf.run, shelf.run / "export"), (shelf.adapter, shelf.adapter)):
        for is_chat, words in ((True, []), (False, ["--plain"])):
            (line,) = evaluate(capsys, folder, "--tasks", shelf.task, *words)
            expected = share_right(model, shelf.rows, is_chat=is_chat)
            assert line["metrics"]["acc"]["value"] == pytest.approx(expected)
            assert (line["task"], line["samples"], line["chat_template"]) == ("mine", len(shelf.rows), is_chat)
            seen.add(expected)
    assert len(seen) > 2, "without templates, or without the adapter, two of the four would be the same"
    kept = [json.loads(line) for line in (shelf.run / "tasks.jsonl").read_text().splitlines()]
    assert [line["chat_template"] for line in kept] == [True, False]
    assert not (shelf.adapter / "tasks.jsonl").exists()  # a model of no run is left as it was


@pytest.mark.slow
@pytest.mark.thorough(needs="lm_eval")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "nowhere.yaml"], "no such file: nowhere.yaml"),
        (["--tasks", "TASK,arc_eazy"], "not known to lm_eval: arc_eazy (arc_easy?)"),
        (["--tasks", " , "], "write names with commas between them"),
        (["--tasks", "ZERO", "--few-shot", "2"], "mine sets num_fewshot to 0, which lm_eval keeps"),
        (["--tasks", "LOST"], "lost.jsonl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_lm_eval_cannot_do_ends_with_2_and_the_reason(words, message, shelf, tmp_path, capsys):
    need_lm_eval()
    (tmp_path / "zero.yaml").write_text(shelf.task.read_text() + "num_fewshot: 0\n")
    (tmp_path / "lost.yaml").write_text(TASK.replace("ROWS", str(tmp_path / "lost.jsonl")))
    places = {"TASK": shelf.task, "ZERO": tmp_path / "zero.yaml", "LOST": tmp_path / "lost.yaml"}
    for name, path in places.items():
        words = [word.replace(name, str(path)) for word in words]
    assert main(["evaluate", str(shelf.run), *words]) == 2
    assert message in capsys.readouterr().err
