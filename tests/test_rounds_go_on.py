"""Protects what rounds take from one another: the dice, which run is over, and where a prompt ends.

python -m pytest -q tests/test_rounds_go_on.py
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoTokenizer

from cookbook.commands.rounds import loop, prompt_rows, rounds_folder
from cookbook.commands.rounds.rounds_folder import Round
from cookbook.commands.rounds.sampling import encode
from cookbook.config.recipe import load_recipe
from cookbook.system.files import RecipeError
from tests.curves import Lab
from tests.test_rounds import ROUNDS, WORDS, are_of_their_tokens, read, settings, start

ALL_PROMPTS = ROUNDS | {"prompts_per_round": len(WORDS)}
BATCH = {"global_batch_size": 28, "micro_batch_size": 14}


@pytest.fixture(scope="module")
def model(lab) -> Path:
    return lab.run("single").folder / "export"


@pytest.fixture
def ends(monkeypatch, model) -> Callable[..., list[str]]:
    """Lets each round's run end as told, its model as it was; gives the list of the rounds that were launched."""

    def every_run(code: int, state: str) -> list[str]:
        launched: list[str] = []

        def launch(_path, *, assignments, **_others):
            values = dict(assignment.split("=", 1) for assignment in assignments)
            launched.append(values["rounds.round"])
            run = Path(json.loads(values["run.output_dir"]))
            run.mkdir(parents=True, exist_ok=True)
            (run / "status.json").write_text(json.dumps({"state": state, "step": 1, "exit_code": code}))
            if state == "finished":
                shutil.copytree(model, run / "export")
            return code

        monkeypatch.setattr(loop, "launch", launch)
        return launched

    return every_run


def test_each_round_has_its_own_random_numbers(lab: Lab, ends, model: Path, tmp_path: Path):
    """Both rounds ask the same weights the same question."""
    rounds = ROUNDS | {"prompts_per_round": 1, "num_generations": 12}
    sampled = []
    for name in ("one", "again"):
        (tmp_path / name).mkdir()
        values = settings(tmp_path / name, model, rounds=rounds, batch={"global_batch_size": 12, "micro_batch_size": 6})
        prompts = tmp_path / name / "prompts.jsonl"
        prompts.write_text(prompts.read_text().splitlines()[0] + "\n")
        ends(0, "finished")
        assert start(lab, values) == 0
        lines = [read(tmp_path / name / f"out/rounds/{number:04}/samples.jsonl") for number in (1, 2)]
        are_of_their_tokens(lines[0] + lines[1], AutoTokenizer.from_pretrained(model))
        sampled.append([[line["completion_ids"] for line in round_lines] for round_lines in lines])
    (first, second), again = sampled
    assert again == [first, second] and first != second


def test_a_round_whose_model_is_gone_or_not_finite_says_what_to_do(lab: Lab, ends, model: Path, tmp_path: Path, capsys):
    values, out = settings(tmp_path, model, rounds=ALL_PROMPTS, batch=BATCH), tmp_path / "out"
    ends(75, "stopped")
    assert start(lab, values) == 75
    trained = shutil.copytree(model, out / "rounds/0001/run/export")
    (out / "rounds/0001/run/status.json").write_text(json.dumps({"state": "finished", "step": 1, "exit_code": 0}))
    weights = load_file(trained / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, trained / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert start(lab, values) == 2
    assert f"{trained}: model.norm.weight has values that are not finite" in capsys.readouterr().err
    shutil.rmtree(trained)
    assert start(lab, values) == 2
    again = f"{trained}: is gone, and round 2 begins with it; remove {out / 'rounds/0001'}, and round 1 is done again"
    assert again in capsys.readouterr().err


def test_samples_where_no_folder_can_be_are_a_mistake(tmp_path: Path):
    (tmp_path / "rounds").write_text("")
    with pytest.raises(RecipeError, match="cannot be written"):
        rounds_folder.write_lines(Round(tmp_path, 1).unscored, [ANSWERS])


@pytest.mark.parametrize(
    ("code", "state", "expected"), [(75, "stopped", 75), (1, "failed", 1), (0, "running", 1)], ids=str
)
def test_a_round_whose_run_is_not_over_is_begun_again_with_the_same_samples(
    lab: Lab, ends, model: Path, tmp_path: Path, code: int, state: str, expected: int
):
    values, out = settings(tmp_path, model, rounds=ALL_PROMPTS, batch=BATCH), tmp_path / "out"
    launched = ends(code, state)
    assert start(lab, values) == expected
    assert launched == ["1"] and not (out / "rounds/0002").exists()
    status = json.loads((out / "status.json").read_text())
    wanted = ("stopped" if code == 75 else "failed", expected, "in round 1")
    assert (status["state"], status["exit_code"], status["reason"]) == wanted
    before = (out / "rounds/0001/samples.jsonl").read_bytes()
    launched = ends(0, "finished")
    assert start(lab, values) == 0
    assert launched == ["1", "2"] and (out / "rounds/0001/samples.jsonl").read_bytes() == before


def test_a_signal_as_the_run_of_a_round_finishes_starts_no_other_round(
    lab: Lab, ends, model: Path, tmp_path: Path, monkeypatch
):
    launched = ends(0, "finished")
    monkeypatch.setattr("cookbook.system.child._signal", "SIGTERM")
    assert start(lab, settings(tmp_path, model, rounds=ALL_PROMPTS, batch=BATCH)) == 75
    status = json.loads((tmp_path / "out/status.json").read_text())
    assert launched == ["1"] and (status["state"], status["reason"]) == ("stopped", "in round 1")


def test_a_text_is_asked_without_the_end_token_that_its_tokenizer_adds(model: Path, tmp_path: Path):
    """Else the model is asked what comes after an end."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end[0]}", special_tokens=[end]
    )
    tokenizer.save_pretrained(tmp_path / "model")
    shutil.copy(model / "config.json", tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("over")["input_ids"][-1] == end[1]
    values = settings(tmp_path, model)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "over"}) + "\n")
    recipe = load_recipe(Path("recipes/quickstart.yaml").resolve(), [f"{key}={value}" for key, value in values.items()])
    assert recipe.rounds is not None
    (ids,) = encode(prompt_rows.read_prompts(recipe.data, recipe.rounds), str(tmp_path / "model"), recipe)
    assert tokenizer.decode(ids) == "over"


ANSWERS = {
    "round": 1,
    "row": 0,
    "prompt": "add",
    "completions": ["a"],
    "ended": [True],
    "num_tokens": [1],
    "prompt_ids": [1],
    "completion_ids": [[2]],
}
WRITTEN = json.dumps(ANSWERS) + "\n"


@pytest.mark.parametrize("left", ["", "{", "5\n", "[]\n", '{"round": 1}\n', WRITTEN + WRITTEN[:20], WRITTEN + "{}\n"])
def test_samples_that_are_not_whole_are_named_and_not_trained_on(tmp_path: Path, left: str):
    first = Round(tmp_path, 1)
    rounds_folder.write_lines(first.samples, [ANSWERS, ANSWERS])
    assert len(first.lines) == 2
    first.samples.write_text(left)
    with pytest.raises(RecipeError, match=r"samples\.jsonl: is damaged; remove it"):
        _ = first.lines


def test_a_round_that_is_over_may_lose_its_samples(tmp_path: Path):
    first, recipe = Round(tmp_path, 1), load_recipe(ROOT / "recipes/sums/grpo.yaml")
    first.run.mkdir(parents=True)
    (first.run / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    assert rounds_folder.show_as_one_run(tmp_path, recipe, [first]) == 3
    assert read(tmp_path / "metrics.jsonl") == [{"step": 3, "loss": 1.0}]


@pytest.mark.parametrize("left", ["", "[]", "{}", '{"recipe": {}, "made_from": {}}', '{"recipe": 5, "made_from": 5}'])
def test_a_damaged_record_of_rounds_is_no_reason_to_begin_again(tmp_path: Path, left: str):
    recipe = load_recipe(ROOT / "recipes/sums/grpo.yaml", ["run.resume=auto"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/rounds.json").write_text(left)
    with pytest.raises(RecipeError, match=r"rounds\.json: is damaged; put it back, or begin again"):
        loop._begin(tmp_path / "out", recipe, {"plugins": ""})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _refusal(lab: Lab, values: dict[str, str], capsys: pytest.CaptureFixture[str]) -> str:
    """Words of the command on rounds that go on with other values; "" if it goes on."""
    capsys.readouterr()
    assert start(lab, values) == 2
    said = capsys.readouterr().err
    return said if "cannot resume" in said else ""


def test_rounds_go_on_by_the_template_and_the_length_that_they_were_begun_with(
    lab: Lab, model: Path, tmp_path: Path, capsys, monkeypatch
):
    """Both decide what later rounds ask; another file of the same template is the same."""

    def fail(*_: Any) -> None:
        raise RecipeError("here")

    monkeypatch.setattr(loop, "write_samples", fail)
    template = (ROOT / "recipes/chat_templates/chatml.jinja").read_text()
    for name, text in (("one", template), ("moved", template), ("other", template.replace("user", "human") + " ")):
        (tmp_path / f"{name}.jinja").write_text(text)
    values = settings(tmp_path, model, data__chat_template=str(tmp_path / "one.jinja"))

    def with_data(**changed: Any) -> dict[str, str]:
        return values | {"data": json.dumps(json.loads(values["data"]) | changed)}

    assert _refusal(lab, values, capsys) == _refusal(lab, values, capsys) == ""
    assert _refusal(lab, with_data(chat_template=str(tmp_path / "moved.jinja")), capsys) == ""
    assert "data.chat_template was" in _refusal(lab, with_data(chat_template=str(tmp_path / "other.jinja")), capsys)
    assert "data.max_length was 64" in _refusal(lab, with_data(max_length=63), capsys)


@pytest.mark.parametrize("date", ['strftime_now("%d %B %Y")', '"29 November 2026"'])
def test_prompts_with_the_date_of_the_day_are_refused(model: Path, tmp_path: Path, date: str):
    """A round that is killed and goes on the day after would be asked otherwise."""
    shipped = (ROOT / "recipes/chat_templates/chatml.jinja").read_text()
    (tmp_path / "dated.jinja").write_text("{{- " + date + " }}" + shipped)
    values = settings(tmp_path, model, data__chat_template=str(tmp_path / "dated.jinja"))
    recipe = load_recipe(ROOT / "recipes/sums/grpo.yaml", [f"{key}={value}" for key, value in values.items()])
    assert recipe.rounds is not None
    asked = prompt_rows.read_prompts(recipe.data, recipe.rounds, recipe.seed)
    if "strftime" not in date:
        assert len(encode(asked, str(model), recipe)) == len(WORDS)
        return
    with pytest.raises(RecipeError, match=r"prompts\.jsonl:1: the chat template prints today's date"):
        encode(asked, str(model), recipe)
