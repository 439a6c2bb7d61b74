"""Classifiers and regression: which rows are theirs, what is exported, and that transformers' pipeline names the same.

python -m pytest -q tests/test_classify.py
"""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from cookbook.commands.cli import main
from cookbook.commands.rehearse.standins import with_names
from cookbook.config.objectives import Objective
from cookbook.config.sections import Source
from cookbook.system.files import RecipeError
from cookbook.training.data.rows import read_rows
from tests.curves import Lab
from tests.test_equivalence_features import CLASSES, LORA, preferences
from tests.test_reward import last_evaluation

ASK = [{"role": "user", "content": "q"}]
CLASSIFY = Objective.of(name="classify", classes=["bad", "good"])
REGRESS = Objective.of(name="regress")


def read(folder: Path, objective: Objective, *rows: dict) -> list[dict]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_rows(Source(path=str(path)), "error", objective).rows)


def test_a_label_is_a_name_or_a_number_of_a_class(tmp_path: Path):
    texts = [{"text": "a", "label": label} for label in ("good", 0, 1, "1")]
    rows = read(tmp_path, CLASSIFY, *texts)
    assert [row["label"] for row in rows] == [1, 0, 1, 1] and read(tmp_path, CLASSIFY, *rows) == rows
    named = Objective.of(name="classify", classes=["1", "0"])
    assert [row["label"] for row in read(tmp_path, named, texts[3], texts[3] | {"label": "0"})] == [0, 1]
    stars = Objective.of(name="classify", classes=["0", "1", "many"])  # each number names itself
    assert [row["label"] for row in read(tmp_path, stars, *texts[1:])] == [0, 1, 1]
    chats = [{"messages": ASK, "label": 1}, {"messages": [*ASK, {"role": "assistant", "content": "r"}], "label": 0}]
    assert [len(row["messages"]) for row in read(tmp_path, CLASSIFY, *chats)] == [1, 2]
    assert [row["label"] for row in read(tmp_path, REGRESS, {"text": "a", "label": 2}, {"text": "a", "label": "-0.5"})]
    assert read(tmp_path, Objective.of(name="cpt"), *texts[:2]) == [{"text": "a"}] * 2  # as before


@pytest.mark.parametrize(("classes", "label"), [(["1", "0"], 1), (["1", "2", "3", "4", "5"], 4), (["a", "0"], 0)])
def test_a_number_that_names_another_class_is_refused(tmp_path: Path, classes: list[str], label: int):
    """Stars from 1 to 5 would each be trained as the next class."""
    objective = Objective.of(name="classify", classes=classes)
    with pytest.raises(RecipeError, match=r"name of class \d and the number of '\w+'; write the name, as a text"):
        read(tmp_path, objective, {"text": "a", "label": label})
    rows = read(tmp_path, objective, {"text": "a", "label": str(label)})
    assert rows[0]["label"] == classes.index(str(label))
    assert read(tmp_path, objective, *with_names(rows, objective)) == rows, "as a rehearsal reads its held-out rows"


@pytest.mark.parametrize(
    ("objective", "wrong"),
    [
        (
            CLASSIFY,
            {
                "no label: `label` is null; classify needs a label": None,
                "label is no class: `label` is 'fair'; objective.classes has bad, good": "fair",
                "label out of range: `label` is 2; objective.classes has 2, numbered from 0 to 1": 2,
                "label out of range: `label` is -1": -1,
                "label is neither a name nor a whole number: `label` is 1.0; write the name of a class": 1.0,
                "label is neither a name nor a whole number: `label` is True": True,
                "label is neither a name nor a number: `label` is [1]": [1],
            },
        ),
        (
            REGRESS,
            {
                "label is no number: `label` is 'good'": "good",
                "label is no number: `label` is False": False,
                "label is neither a name nor a number: `label` is nan": math.nan,
            },
        ),
    ],
    ids=["classify", "regress"],
)  # fmt: skip
def test_all_bad_labels_are_named_with_their_lines(tmp_path: Path, objective: Objective, wrong: dict):
    rows = [{"text": "a"}, *({"text": "a", "label": label} for label in wrong.values()), {"text": "a", "label": 1}]
    with pytest.raises(RecipeError) as error:
        read(tmp_path, objective, *rows)
    *mistakes, advice = error.value.mistakes
    said = [f"no label: `label` is missing beside 'text'; {objective.name} needs a label for each row", *wrong]
    for number, (mistake, words) in enumerate(zip(mistakes, said, strict=True), start=1):
        assert mistake.startswith(f"{tmp_path}/rows.jsonl:{number}: {words}")
    assert "data.on_bad_row" in advice


def test_the_losses_are_those_of_torch():
    scores = torch.tensor([[0.3, -1.2, 2.0], [0.1, 0.7, -0.4]], requires_grad=True)
    batch = {"num_sequences": 2, "target_sequences": torch.arange(2), "input_ids": None}
    three = Objective.of(name="classify", classes=CLASSES)
    outcome = three.compute(lambda **_: scores, batch | {"values": torch.tensor([2.0, 0.0]).double()})
    expected = torch.nn.CrossEntropyLoss(reduction="sum")(scores, torch.tensor([2, 0]))
    assert outcome.loss_sum.item() == pytest.approx(expected.item(), rel=1e-6) and outcome.count == 2
    assert outcome.metrics["accuracy"] == 1
    outcome = REGRESS.compute(lambda **_: scores[:, :1], batch | {"values": torch.tensor([1.0, -0.5]).double()})
    assert outcome.loss_sum.item() == pytest.approx(0.7**2 + 0.6**2, rel=1e-6)
    assert outcome.metrics["absolute_error"].item() == pytest.approx(1.3, rel=1e-6)


@pytest.mark.slow
def test_the_pipeline_of_transformers_names_the_classes_that_the_run_counted(
    lab: Lab, capsys: pytest.CaptureFixture[str]
):
    run = lab.run("single", preferences(lab, "classify")).folder
    export, expected = run / "export", last_evaluation(run)
    model = AutoModelForSequenceClassification.from_pretrained(export)
    assert model.config.id2label == dict(enumerate(CLASSES)) and model.config.label2id["good"] == 2
    assert model.config.problem_type == "single_label_classification"
    tokenizer = AutoTokenizer.from_pretrained(export)
    rows = [json.loads(line) for line in (lab.folder / "labelled.jsonl").read_text().splitlines()[:9]]
    name = pipeline("text-classification", model=model, tokenizer=tokenizer)
    answers = [name(row["text"], top_k=None) for row in rows]
    of_label = [
        next(answer["score"] for answer in some if answer["label"] == row["label"])
        for some, row in zip(answers, rows, strict=True)
    ]
    assert -sum(map(math.log, of_label)) / 9 == pytest.approx(expected["eval_loss"], rel=1e-5)
    hits = sum(some[0]["label"] == row["label"] for some, row in zip(answers, rows, strict=True))
    assert expected["eval_accuracy"] == pytest.approx(hits / 9)
    # The control: an end-of-sequence token after the text gives other scores.
    ended = [name(row["text"] + tokenizer.eos_token, top_k=None) for row in rows]
    assert [some[0]["score"] for some in ended] != pytest.approx([some[0]["score"] for some in answers], rel=1e-3)
    capsys.readouterr()
    assert main(["evaluate", str(export)]) == 0
    assert f"{expected['eval_loss']:.4f}"[:6] in capsys.readouterr().out
    onward = {"model": json.dumps({"name_or_path": str(export)}), "run.max_steps": "1"}
    again = lab.run("single", preferences(lab, "classify") | onward)
    assert again.evaluations[0][1] == pytest.approx(expected["eval_loss"], rel=1e-6)
    _, said = lab.attempt("single", preferences(lab, "classify") | onward | {"objective": other_order()})
    assert "the classes of its head are bad, fair, good; write them so in objective.classes" in said


def other_order() -> str:
    return f"{{name: classify, classes: {CLASSES[::-1]}}}"


@pytest.mark.slow
def test_an_adapter_of_a_classifier_is_merged_into_one_with_its_names(lab: Lab, capsys: pytest.CaptureFixture[str]):
    settings = preferences(lab, "classify") | LORA | {"run.check_export": "true", "optim.learning_rate": "0.05"}
    curve = lab.run("fsdp2", settings, processes=2)
    assert main(["export", str(curve.folder), "--merged"]) == 0, capsys.readouterr().err
    merged = AutoModelForSequenceClassification.from_pretrained(curve.folder / "merged")
    assert merged.config.id2label == dict(enumerate(CLASSES))
    name = pipeline(
        "text-classification", model=merged, tokenizer=AutoTokenizer.from_pretrained(curve.folder / "merged")
    )
    rows = [json.loads(line) for line in (lab.folder / "labelled.jsonl").read_text().splitlines()[:9]]
    hits = sum(name(row["text"])[0]["label"] == row["label"] for row in rows)
    assert last_evaluation(curve.folder)["eval_accuracy"] == pytest.approx(hits / 9)
