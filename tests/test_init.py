"""Protects `init`: the recipe it writes is the one that counting by hand gives, and what fits it by `plan`.

python -m pytest -q tests/test_init.py
"""

import json
import re
from pathlib import Path

import pytest
from small_data import chat, make_tokenizer
from transformers import AutoConfig

from cookbook.commands.cli import main
from cookbook.commands.init import ANY, EXAMPLES, _recipe
from cookbook.commands.shared.labels import read_label
from cookbook.config.recipe import load_recipe
from cookbook.system.hardware import Machines

OUT = "recipes/mine.yaml"
CHATS = [chat("hi", f"{i:050}") for i in range(298)] + [chat("hi", "a" * 400), chat("hi", "b" * 400)]
PAIRS = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(50)]


@pytest.fixture
def model(book, monkeypatch):
    """Makes a model's folder with a tokenizer of one token per letter, and without weights."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def model(hidden=64, layers=2, template=None, kind="llama"):
        tokenizer = make_tokenizer()
        if template is not None:
            tokenizer.chat_template = template
        tokenizer.save_pretrained("model")
        sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": hidden // 4}
        config = AutoConfig.for_model(kind, vocab_size=300, max_position_embeddings=512, **sizes, **heads)
        config.save_pretrained("model")
        return "./model"

    return model


def write(rows, name="rows.jsonl"):
    Path(name).write_text("\n".join(map(json.dumps, rows)))
    return name


def made(*arguments):
    assert main(["init", *arguments]) == 0
    return load_recipe(Path(OUT))


def test_chats_on_two_gpus(model, capsys):
    recipe = made(model(), write(CHATS), "--gpus", "2x8GB")
    # 23 tokens of ChatML, "hi" included, and the answer: 73 for 298 rows, 423 for two, which are less than 1 %.
    assert (recipe.data.max_length, recipe.data.holdout, recipe.data.packing) == (128, 0.05, "auto")
    assert (recipe.objective.name, recipe.adapter, Path(recipe.strategy).stem) == ("sft", None, "ddp")
    # 285 rows are left: ten steps of 16, where the example has 128. Both ranks take 8.
    assert (recipe.batch.global_batch_size, recipe.batch.micro_batch_size) == (16, 8)
    assert (recipe.optim.learning_rate, recipe.schedule.name) == (1e-3, "cosine")  # as smollm2_135m/sft
    # Two epochs of 18 steps, a tenth of them warm-up.
    assert (recipe.run.num_epochs, recipe.schedule.warmup_steps, recipe.run.save_every_steps) == (2, 0.1, 4)
    assert (recipe.run.eval_every_steps, recipe.run.keep_best, recipe.run.resume) == (4, 1, "auto")
    another = [line for line in Path(OUT).read_text().splitlines() if not line.startswith("strategy:")]
    Path("another.yaml").write_text("\n".join([*another, "strategy: zero3"]))
    assert load_recipe(Path("another.yaml")).run.output_dir == recipe.run.output_dir == "outputs/mine"
    text, printed = Path(OUT).read_text(), capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    assert "# Needs:     2 GPUs of 8 GB. " in text and "SmolLM2-135M-Instruct" in text
    assert "  # 99.3% of the rows are not longer; the longest has 423 tokens\n  max_length: 128\n" in text
    *_, fine, warning, preview, launch = printed.splitlines()
    assert fine.startswith(f"{OUT}: fine under accelerate_configs/ddp.yaml")
    assert "it has no weights in safetensors" in warning  # and this folder has none
    assert (preview, launch) == (f"cookbook preview {OUT}", f"cookbook launch {OUT}")


@pytest.mark.parametrize(("num_rows", "num_steps", "often"), [(24, 3, 3), (64, 8, 4), (144, 18, 5)])
def test_a_short_run_saves_a_few_times_and_not_at_each_step(num_rows, num_steps, often, model):
    recipe = made(model(), write(CHATS[:num_rows]), "--gpus", "cpu")
    assert recipe.run.num_epochs * -(-num_rows // recipe.batch.global_batch_size) == num_steps
    assert recipe.run.save_every_steps == often


def test_preferences_on_a_gpu(model):
    recipe = made(model(), write(PAIRS), "--gpus", "1x8GB")
    assert (recipe.objective.name, recipe.objective.beta, recipe.data.holdout) == ("dpo", 0.01, 0)
    assert (recipe.adapter.name, recipe.adapter.rank, recipe.optim.learning_rate) == ("lora", 16, 5e-6)
    assert (recipe.batch.global_batch_size, recipe.data.max_length) == (8, 64)
    assert "# prompt and answer are joined as they are written, without the tokenizer's chat" in Path(OUT).read_text()
    assert (recipe.run.num_epochs, recipe.schedule.warmup_steps, recipe.run.keep_best) == (1, 0.1, 0)


def test_texts_without_a_gpu(model, book, capsys):
    for name in "ab":
        book.write(f"texts/{name}.txt", "a" * 999)
    recipe = made(model(), "texts", "--gpus", "cpu")
    assert (recipe.objective.name, recipe.data.max_length, recipe.data.too_long) == ("cpt", 512, None)
    assert (recipe.mixed_precision, Path(recipe.strategy).stem, recipe.adapter.name) == ("no", "single", "lora")
    assert recipe.run.save_every_steps == 1
    text = Path(OUT).read_text()
    capsys.readouterr()
    assert main(["plan", OUT, "--gpus", "cpu", "--all"]) == 0
    peak = re.search(r"peak +(\S+) GiB allocated", capsys.readouterr().out)
    assert peak is not None and f"# Needs:     no GPU. {peak[1]} GiB of this machine's memory" in text
    assert "# no GPU" in text
    assert "# 100.0% of the rows are longer, and are split; the longest has 1,000 tokens" in text
    assert "tokens; limited to the model's positions\n  max_length: 512\n" in text


def test_columns_whose_names_do_not_say_what_they_are_are_asked_about(model, capsys):
    rows = [{"id": i, "Frage": f"Was ist {i}?", "Antwort": f"Das ist {i}."} for i in range(20)]
    assert main(["init", model(), write(rows), "--gpus", "1x8GB"]) == 2 and not Path(OUT).exists()
    error = capsys.readouterr().err
    assert "which columns are to be trained on?" in error and "'id', 'Frage', 'Antwort'" in error
    (offered,) = re.findall(r"--columns '(.*)'", error)
    recipe = made("./model", "rows.jsonl", "--gpus", "1x8GB", "--columns", offered, "--ignore", "[id]")
    assert (recipe.objective.name, recipe.data.columns) == ("sft", {"user": "Frage", "assistant": "Antwort"})
    assert recipe.data.ignore == ["id"]
    assert main(["init", "./model", "rows.jsonl", "--out", "a.yaml", "--columns", "{user: [}"]) == 2
    assert "--columns is '{user: [}': not YAML" in capsys.readouterr().err
    assert main(["init", "./model", "rows.jsonl", "--out", "a.yaml", "--columns", "{frage: Frage}"]) == 2
    assert "data.columns has 'frage'; write KEY: COLUMN" in capsys.readouterr().err


def test_columns_named_as_ours_but_for_their_case_or_one_by_one_are_written(model):
    rows = [{"system": "Be brief.", "Question": f"What is {i}?", "Response": f"{i} it is."} for i in range(9)]
    recipe = made(model(), write(rows), "--gpus", "1x8GB")
    assert recipe.data.columns == {"user": "Question", "assistant": "Response", "system": "system"}
    assert "# what each column is\n" in Path(OUT).read_text()
    Path(OUT).unlink()
    rows = [{"question": f"What is {i}?", "solution": f"{i} it is.", "id": "x"} for i in range(9)]
    recipe = made("./model", write(rows), "--gpus", "1x8GB")
    assert recipe.data.columns == {"user": "question", "assistant": "solution"}
    assert "# what each column is; not read: 'id'\n" in Path(OUT).read_text()


def test_shapes_of_others_and_a_few_bad_rows_are_noted(model):
    rows = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}] * 9 + [{"x": 1}]
    recipe = made(model(), write(rows), "--gpus", "1x8GB")
    assert recipe.data.on_bad_row == "drop" and recipe.data.columns is None
    text = Path(OUT).read_text()
    assert "# rows look like ShareGPT: conversations -> messages" in text and "# 1 row: missing keys" in text


def test_rows_that_are_mostly_bad_are_an_error(model, capsys):
    rows = [{"prompt": "a", "completion": "b"}] + [chat("hi", "ho")] * 9
    assert main(["init", model(), write(rows), "--gpus", "1x8GB"]) == 2
    assert "another kind of row" in capsys.readouterr().err and not Path(OUT).exists()


def test_a_template_that_can_be_trained_with_is_found(library, model):
    recipe = made(model(template="{{ messages[0]['content'] }}"), write(CHATS[:9]), "--gpus", "1x8GB")
    assert recipe.data.chat_template == "recipes/chat_templates/chatml.jinja"
    assert "the first that serves;" in Path(OUT).read_text()


def test_a_model_with_a_template_of_its_own_keeps_its_format(library, model):
    """As Qwen3's, it drops earlier reasoning, so that without markers its turns cannot be found."""
    template = re.sub(r"\{%- (end)?generation -%\}", "", Path("recipes/chat_templates/qwen3.jinja").read_text())
    thoughts = [{"role": "assistant", "content": f"{n}", "reasoning_content": "So."} for n in range(2)]
    questions = [{"role": "user", "content": f"{n}?"} for n in range(2)]
    rows = [{"messages": [questions[0], thoughts[0], questions[1], thoughts[1]]}] * 9
    recipe = made(model(template=template), write(rows), "--gpus", "1x8GB")
    assert recipe.data.chat_template == "recipes/chat_templates/qwen3.jinja"
    assert "  # renders as the tokenizer's own; " in Path(OUT).read_text()
    # Trained is what the template writes of each row: the last turn with its reasoning.
    assert recipe.objective.train_on == "last"
    assert "  chat_template: qwen3\n" in Path(OUT).read_text()


def test_chats_with_tools_and_reasoning_get_a_template_that_writes_them(library, model):
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}, answer], "tools": [{"name": "add"}]} for i in range(9)]
    recipe = made(model(), write(rows), "--gpus", "cpu")
    assert recipe.data.chat_template == "recipes/chat_templates/chatml_tools.jinja"
    assert "leaves out `tools`" in Path(OUT).read_text()
    assert (recipe.batch.global_batch_size, recipe.batch.micro_batch_size) == (8, 4)  # for two processes as well


@pytest.mark.parametrize(("kind", "expected"), [("messages", "sft"), ("judged", "kto_zero"), ("completion", "sft")])
def test_the_task_is_that_of_the_rows(model, kind, expected):
    completion = {"prompt": "q", "completion": "a"}
    rows = {"messages": chat("q", "a"), "judged": completion | {"label": True}, "completion": completion}
    assert made(model(), write([rows[kind]] * 3), "--gpus", "1x8GB").objective.name == expected


def test_another_task_for_the_same_rows(model):
    assert made(model(), write(PAIRS), "--gpus", "1x8GB", "--task", "orpo").optim.learning_rate == 8e-5
    assert "`chosen` and `rejected`" in Path(OUT).read_text()


def test_a_task_for_other_rows_is_an_error(model, capsys):
    assert main(["init", model(), write(PAIRS), "--gpus", "1x8GB", "--task", "sft"]) == 2
    error = capsys.readouterr().err
    assert "--task is sft" in error and "rows.jsonl has `chosen` and `rejected`; use --task dpo" in error
    assert not Path(OUT).exists()


def test_rows_that_no_task_trains_on_name_the_objectives_that_do(model, capsys):
    groups = [{"prompt": "1 + 1", "completions": ["2", "3"], "rewards": [1, 0]}] * 3
    assert main(["init", model(), write(groups), "--gpus", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "has `prompt` and `completions` and `rewards`; write a recipe with objective.name grpo" in error
    labelled = [{"text": f"a film, {number} stars", "label": "good"} for number in range(9)]
    assert made(model(), write(labelled), "--gpus", "cpu").objective.name == "cpt"
    said = " ".join(Path(OUT).read_text().replace("# ", "").split())
    assert "trains on the rows' `text`; objective.name classify or regress would train on more of them" in said


def test_a_file_is_never_overwritten(model, capsys):
    Path(OUT).write_text("mine")
    assert main(["init", model(), write(CHATS), "--gpus", "1x8GB"]) == 2
    assert f"{OUT}: exists, and is not overwritten" in capsys.readouterr().err and Path(OUT).read_text() == "mine"


def test_mistakes_are_reported_together(book, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["init", "./none", "none.jsonl", "--gpus", "1x8GX", "--out", "mine.txt"]) == 2
    error = capsys.readouterr().err
    for mistake in ("'./none': no such folder", "'none.jsonl': no such file", "8GX", "--out is mine.txt"):
        assert mistake in error
    assert main(["init", "no/model", write([{"x": []}])]) == 2
    error = capsys.readouterr().err
    assert "'no/model': not a folder, and not fetched" in error and "rows.jsonl:1: missing keys" in error


def test_in_a_folder_named_recipes_the_rows_are_those_that_were_named(book, monkeypatch):
    """There a path in a file starts in the parent, and what somebody types in the folder itself."""
    Path("recipes").mkdir(exist_ok=True)
    monkeypatch.chdir("recipes")
    write([{"prompt": "a", "completion": "b"}], "rows.jsonl")
    write([{"x": 1}], "../rows.jsonl")
    values = {"strategy": "single", "model": {"name_or_path": "no/model"}, "data": {"train": "rows.jsonl"}}
    values |= {"batch": {"global_batch_size": 1, "micro_batch_size": 1}, "optim": {"learning_rate": 1.0}}
    (source,) = _recipe(values | {"run": {"num_epochs": 1}}).data.train
    assert Path(source.path).resolve() == Path("rows.jsonl").resolve()


def test_a_folder_that_holds_no_model_is_an_error_that_names_the_model(model, capsys):
    for name, file in (("run/export", "config.json"), ("lora/export", "adapter_config.json")):
        Path(name).mkdir(parents=True)
        Path(name, file).write_text("{}")
    rows = write(CHATS)
    cases = {"run": "the folder of a run; name its model: run/export", "a/b/c": "no such folder"}
    cases["lora/export"] = "an adapter without its base; write both as one with `cookbook export --merged`"
    for folder, said in cases.items():
        assert main(["init", folder, rows]) == 2
        assert f"model.name_or_path is '{folder}'" in (printed := capsys.readouterr().err) and said in printed
    assert not Path(OUT).exists()


@pytest.mark.parametrize(
    ("gpus", "adapter"), [("1x24GB", "lora"), pytest.param("1x12GB", "qlora", marks=pytest.mark.thorough)]
)
def test_what_is_chosen_fits_by_plan_and_what_is_not_does_not(model, gpus, adapter, capsys):
    """7 B parameters."""
    recipe = made(model(hidden=4096, layers=32), write(CHATS), "--gpus", gpus)
    assert recipe.adapter.name == adapter and Path(recipe.strategy).stem == "single"
    plan = ["plan", OUT, "--gpus", gpus, "--strategy", "single"]
    assert main(plan) == 0
    heavier = {"lora": "adapter=null", "qlora": "adapter.name=lora"}[adapter]
    assert main([*plan, "--set", heavier]) == 1


def test_nothing_fits(model, monkeypatch, capsys):
    here = Machines(text="cpu", host_gib=0.5)
    monkeypatch.setattr("cookbook.commands.init.this_machine", lambda: here)
    assert main(["init", model(), write(CHATS)]) == 2
    assert "nothing fits 0 GiB of memory: ./model has 0.00 B parameters" in capsys.readouterr().err
    assert not Path(OUT).exists()


def test_a_note_cannot_become_keys(model):
    breaks = "{{ raise_exception('no' + '\u2028' + 'seed: 7') }}"
    assert made(model(template=breaks), write(CHATS[:9]), "--gpus", "1x8GB").seed == 42
    assert "no seed: 7" in Path(OUT).read_text()


@pytest.mark.parametrize(("task", "has_adapter"), EXAMPLES)
def test_every_example_is_a_shipped_recipe_for_its_task(book, task, has_adapter):
    examples = EXAMPLES[task, has_adapter]
    assert [example.billions for example in examples] == sorted(example.billions for example in examples)
    assert examples[-1].billions == ANY
    for example in examples:
        recipe = load_recipe(example.path)
        assert (recipe.adapter is not None) == has_adapter
        assert recipe.objective.name == task or (task, has_adapter) == ("cpt", True)
        assert (recipe.schedule.warmup_steps > 0) == (example.warmup > 0)
        assert read_label(example.path)["Settings"]


@pytest.mark.thorough
def test_what_fits_no_gpu_is_offloaded_last(model):
    recipe = made(model(hidden=4096, layers=32), write(CHATS), "--gpus", "1x4GB")
    assert (recipe.adapter.name, Path(recipe.strategy).stem) == ("qlora", "fsdp2_offload")
    text = Path(OUT).read_text()
    assert "# all weights do not fit on these GPUs without offloading" in text
    assert "host memory unknown, needs" in text and "GB of host memory." in text


LONG_QUESTIONS = [chat("h" * (400 + i), "yes") for i in range(2)]
SAME_START = [{"prompt": "q" * (400 + i), "chosen": "yes", "rejected": "no"} for i in range(2)]


@pytest.mark.parametrize(
    ("rows", "too_long"),
    [
        ([chat(f"hi{i}", "a" * 50) for i in range(298)] + LONG_QUESTIONS, "drop"),
        pytest.param([PAIRS[0] | {"prompt": f"q{i}"} for i in range(298)] + SAME_START, "drop", marks=pytest.mark.slow),
        ([chat(f"hi{i}", "a" * 50) for i in range(298)] + [chat("hi", "a" * 400)], None),
    ],
    ids=["answers past the end", "pairs alike up to the end", "answers that begin before it"],
)
def test_preview_accepts_the_recipe_that_init_writes(model, capsys, rows, too_long):
    recipe = made(model(), write(rows), "--gpus", "2x8GB")
    assert recipe.data.too_long == too_long
    assert main(["preview", OUT]) == 0
    out = capsys.readouterr().out
    assert ("2 rows would have nothing to train on" in out) == (too_long is not None)
    lengths = out.partition("as it is in the data:\n")[2].partition("  evaluation")[0].splitlines()
    counts = [int(line.split()[3]) for line in lengths]
    assert len(counts) == 2 and min(counts) > 0  # most rows, and the long ones; nothing of what lies between
    if too_long:
        assert load_recipe(Path(OUT), ["data.too_long=cut"]).data.too_long == "cut"
        assert main(["preview", OUT, "--set", "data.too_long=cut"]) == 2
        assert "after truncation" in capsys.readouterr().err


@pytest.mark.slow
def test_rows_that_are_equal_are_not_held_out_and_a_note_says_so(model):
    rows = [chat("hi", "a" * 50)] * 298 + [chat("hi", letter * 400) for letter in "bc"]
    recipe = made(model(), write(rows), "--gpus", "2x8GB")
    assert (recipe.data.holdout, recipe.run.eval_every_steps, recipe.run.keep_best) == (0, None, 0)
    words = " ".join(Path(OUT).read_text().replace("# ", "").split())
    assert "no held-out rows: equal rows stay together, so 5% of these cannot be taken" in words
    assert main(["check", OUT, "--data"]) == 0
    assert main(["check", OUT, "--data", "--set", "data.holdout=0.05"]) == 2


def test_init_says_that_a_folder_serves_as_a_model(book, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["init", "no/model", write(CHATS)]) == 2
    assert "; a folder with the model's files serves as well" in capsys.readouterr().err
