"""A metric of a plugin has one value under every strategy, that of plain transformers, and may choose the best.

python -m pytest -q tests/test_metric_functions.py -m "slow or not slow"
"""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback

from cookbook.config import plugins
from cookbook.config.metric_functions import metric
from cookbook.config.recipe import load_recipe
from cookbook.run.stages import Progress
from cookbook.system.files import RecipeError
from tests.curves import Curve, Lab

PLUGIN = ROOT / "tests/plugins/watching.py"
PLUGINS = {"plugins": f"[{PLUGIN}]"}
NAMES = ("hits", "third", "hits_of_odd", "surprise", "of_micro_batches")
SETTINGS = {**PLUGINS, "run.metrics": f"[writes_to_labels, {', '.join(NAMES)}, of_none]", "run.max_steps": "6"}
CLOSE = 1e-6
QUICK = ("ddp", "zero3")
OTHERS = ("fsdp2", "zero2", "fsdp1", "tp", "pp", "ddp_sp", "fsdp2_tp", "zero3_sp")


@pytest.fixture(autouse=True)
def _forget_plugins():
    yield
    plugins.use([])


def last_of(curve: Curve) -> dict[str, float]:
    return [line for line in curve.lines if "eval_loss" in line][-1]


def by_transformers(curve: Curve, lab: Lab) -> dict[str, float]:
    """The metrics of a run's export on the rows that it evaluates, one sample at a time, by the library alone."""
    model = AutoModelForCausalLM.from_pretrained(curve.folder / "export", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(curve.folder / "export")
    logits, labels = [], []
    for row in map(json.loads, (lab.folder / "chats.jsonl").read_text().splitlines()[:21]):
        encoded = tokenizer.apply_chat_template(
            row["messages"], return_assistant_tokens_mask=True, return_dict=True, max_length=96, truncation=True
        )
        ids, is_label = torch.tensor(encoded["input_ids"]), torch.tensor(encoded["assistant_masks"])[1:] == 1
        with torch.no_grad():
            logits.append(model(input_ids=ids.unsqueeze(0)).logits[0, :-1][is_label])
        labels.append(ids[1:][is_label])
    all_logits, all_labels = torch.cat(logits), torch.cat(labels)
    is_hit, is_odd = all_logits.argmax(1) == all_labels, all_labels % 2 == 1
    top = all_logits.topk(3, dim=1).indices
    return {
        "hits": is_hit.double().mean().item(),
        "third": (top == all_labels.unsqueeze(1)).any(1).double().mean().item(),
        "hits_of_odd": (is_hit & is_odd).sum().item() / is_odd.sum().item(),
        "surprise": torch.nn.functional.cross_entropy(all_logits.double(), all_labels).item(),
    }


def answers_by_transformers(curve: Curve, lab: Lab) -> dict[str, float]:
    """The metrics of sampled answers, by `generate` of the library."""
    model = AutoModelForCausalLM.from_pretrained(curve.folder / "export", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(curve.folder / "export")
    letters = whole = length = 0
    for i, row in enumerate(map(json.loads, (lab.folder / "chats.jsonl").read_text().splitlines()[:5])):
        encoded = tokenizer.apply_chat_template(
            row["messages"], return_assistant_tokens_mask=True, return_dict=True, max_length=96, truncation=True
        )
        ids, is_label = encoded["input_ids"], encoded["assistant_masks"]
        begin = is_label.index(1)
        end = is_label.index(0, begin) if 0 in is_label[begin:] else len(ids)
        prompt, most = torch.tensor([ids[:begin]]), min(8, 96 - begin)
        made: Any = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=most, do_sample=False)
        answer = made[0, begin:].tolist()
        text, reference = (tokenizer.decode(part, skip_special_tokens=True) for part in (answer, ids[begin:end]))
        letters += sum(a == b for a, b in zip(text, reference, strict=False))
        whole += len(text) + len(reference) + len(tokenizer.decode(ids[:begin]))
        length += len(tokenizer.decode(answer[:4], skip_special_tokens=True)) if i < 3 else 0
    return {"as_written": letters / whole, "length": length / 3}


def check(lab: Lab, strategy: str) -> None:
    single, other = last_of(lab.run("single", SETTINGS)), last_of(lab.run(strategy, SETTINGS))
    for name in NAMES[:-1]:
        assert other[f"eval_{name}"] == pytest.approx(single[f"eval_{name}"], rel=CLOSE), name
    # What is a mean of means comes out otherwise, so the comparison could have failed.
    if lab.run(strategy, SETTINGS).record["strategy"]["processes"] > 1 and strategy not in ("tp", "pp"):
        assert other["eval_of_micro_batches"] != pytest.approx(single["eval_of_micro_batches"], rel=100 * CLOSE)


def test_a_metric_is_that_of_plain_transformers(lab: Lab):
    curve = lab.run("single", SETTINGS)
    line, expected = last_of(curve), by_transformers(curve, lab)
    assert {name: line[f"eval_{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert 0 < expected["hits"] < expected["third"] < 1 and expected["hits"] != expected["hits_of_odd"]
    assert line["eval_surprise"] == pytest.approx(line["eval_loss"], rel=1e-7)
    assert line["eval_of_none"] is None
    without = last_of(lab.run("single", {"run.max_steps": "6"}))
    assert without["eval_loss"] == line["eval_loss"] and "eval_hits" not in without
    # By these `report` and `sweep` know whether the losses of two runs compare.
    rows = curve.record["rows"]
    assert (
        rows == lab.run("single", {"run.max_steps": "6"}).record["rows"]
        and len({rows["train"], *rows["held_out"].values()}) > 1
    )


@pytest.mark.parametrize("strategy", ["single", "ddp", pytest.param("fsdp2_tp", marks=pytest.mark.slow)])
def test_a_metric_of_answers_is_that_of_the_librarys_own_generation(lab: Lab, strategy: str):
    metrics = {"run.metrics": "[as_written, hits, length]", "run.metric_for_best_model": "as_written"}
    curve = lab.run(
        strategy,
        {**PLUGINS, **metrics, "run.max_steps": "20", "run.early_stopping_patience": "9", "run.eval_every_steps": "10"},
    )
    line, expected = last_of(curve), answers_by_transformers(curve, lab)
    assert {name: line[f"eval_{name}"] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert 0 < expected["as_written"] < 0.5 and line["eval_hits"] > 0
    state = json.loads((curve.folder / "checkpoints/step-00000020/state.json").read_text())
    assert state["best_by"] == -line["eval_as_written"]


@pytest.mark.parametrize("strategy", QUICK)
def test_a_metric_is_the_same_under_every_strategy(lab: Lab, strategy: str):
    check(lab, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", OTHERS)
def test_a_metric_is_the_same_where_tokens_layers_or_the_vocabulary_are_divided(lab: Lab, strategy: str):
    check(lab, strategy)


def test_the_best_checkpoint_and_early_stopping_follow_the_metric(lab: Lab):
    """The loss falls, so more of it is found at the beginning: by `regret` the best is the first, and the last by the
    loss."""
    often = {**PLUGINS, "run.eval_every_steps": "2", "run.save_every_steps": "2", "run.keep_best": "1"}
    often |= {"run.early_stopping_patience": "3", "run.max_steps": "10"}
    by_metric = lab.run(
        "ddp", often | {"run.metrics": "[regret]", "run.metric_for_best_model": "regret", "run.export": "best"}
    )
    by_loss = lab.run("ddp", often)
    losses = [loss for step, loss, _ in by_loss.evaluations if step]
    assert losses == sorted(losses, reverse=True) and len(losses) == 5
    assert [step for step, _, _ in by_metric.evaluations] == [0, 2, 4, 6, 8]
    assert [step for step, _, _ in by_loss.evaluations] == [0, 2, 4, 6, 8, 10]
    first = [line["eval_regret"] for line in by_metric.lines if "eval_regret" in line][1]
    (end,) = [event for event in by_metric.events if event["event"] == "finish"]
    assert f"no held-out regret above {first:.4f}, that of step 2, in 3 evaluations" in end["reason"]
    assert json.loads((by_metric.folder / "export/export.json").read_text())["step"] == 2
    kept = {path.name for path in (by_metric.folder / "checkpoints").glob("step-*")}
    assert kept == {"step-00000002", "step-00000006", "step-00000008"}
    assert "step-00000002" not in {path.name for path in (by_loss.folder / "checkpoints").glob("step-*")}


@pytest.mark.parametrize("greater", [True, False])
def test_early_stopping_by_a_metric_is_that_of_transformers(greater: bool):
    values = [0.2, 0.3, 0.25, 0.31, 0.32, 0.29, 0.28, 0.27, 0.4]
    callback = EarlyStoppingCallback(2, 0.02)
    arguments: Any = SimpleNamespace(greater_is_better=greater, metric_for_best_model="eval_hits")
    state: Any = SimpleNamespace(best_metric=None)
    control: Any = SimpleNamespace(should_training_stop=False)
    progress, ours, theirs = Progress(), [], []
    for step, value in enumerate(values, 1):
        progress.step, progress.eval_loss, progress.best_by = step, 1.0, -value if greater else value
        progress.judge(0.02)
        callback.on_evaluate(arguments, state, control, {"eval_hits": value})
        if state.best_metric is None or (value > state.best_metric if greater else value < state.best_metric):
            state.best_metric = value
        ours.append(progress.num_worse)
        theirs.append(callback.early_stopping_patience_counter)
    assert ours == theirs and max(ours) > 0


REFUSED = {
    "run.metrics=[hit]": "run.metrics has 'hit', which no file in plugins registers; did you mean hits?",
    "run.metrics=[hits,hits]": "has 'hits' twice",
    "run.metric_for_best_model=hits": "metric_for_best_model is 'hits', which metrics does not name; add it there",
    "run.metrics=[hits] run.metric_for_best_model=hits": "would be ignored without early_stopping_patience",
    "run.metrics=[hits] data.eval=null": "run.metrics is ['hits'], but there is no data.eval",
    "run.metrics=[hits] plugins=[]": "which no file in plugins registers; none registers a metric",
    "run.metrics=[hits] objective={name: regress}": "regress trains a head of scores, which has no logits",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_metric_that_cannot_be_is_refused_before_the_run(lab: Lab, words: str):
    given = words.replace("name: r", "name:r").split(" ")
    settings = [f"plugins=[{PLUGIN}]", *(word.replace("name:r", "name: r") for word in given)]
    with pytest.raises(RecipeError, match=r".*") as caught:
        load_recipe(lab.folder / "recipe.yaml", settings)
    assert REFUSED[words] in "\n".join(caught.value.mistakes)


NO_METRICS = {
    "no_number": ("returned '", "for an answer; return a number"),
    "one_number": ("returned () for ", "a number for each label"),
    "of_a_missing_name": (f"failed at {PLUGIN}:69: AttributeError: ", "no_such_thing"),
}


@pytest.mark.parametrize("name", NO_METRICS)
def test_what_is_no_metric_ends_the_run_before_its_first_step(lab: Lab, name: str):
    folder, output = lab.attempt("ddp", {**PLUGINS, "run.metrics": f"[{name}]", "run.max_steps": "5"})
    assert (folder / "exit_code").read_text() == "2" and not (folder / "metrics.jsonl").read_text()
    assert all(words in output for words in (f"run.metrics: {name}", *NO_METRICS[name])) and "Traceback" not in output


@pytest.mark.slow
def test_all_logits_are_refused_where_the_vocabulary_is_divided(lab: Lab):
    settings = {**PLUGINS, "run.metrics": "[of_all_logits]", "run.max_steps": "5"}
    folder, output = lab.attempt("tp", settings)
    assert (folder / "exit_code").read_text() == "2"
    assert "whole() of logits: each process has a part of the vocabulary under tensor parallel" in output
    assert last_of(lab.run("single", settings))["eval_of_all_logits"] > 0


def test_a_name_of_an_evaluations_own_is_taken():
    def loss(logits, labels): ...

    with pytest.raises(ValueError, match="metric 'loss' is taken"):
        metric(loss)


def test_a_metric_of_no_token_cannot_be():
    with pytest.raises(ValueError, match="metric 'short' has answers=3 and tokens=0; write at least 0 and 1"):

        @metric(answers=3, tokens=0)
        def short(prompt, answer, reference): ...
