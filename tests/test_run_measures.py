"""Metrics of plugins, samples and callbacks within an evaluation, by hand: a planted model, engine and tokenizer.

python -m pytest -q tests/test_run_measures.py
"""

import math
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT

from cookbook.config.metric_functions import Metric
from cookbook.config.objectives.forward import LossOutput
from cookbook.config.recipe import load_recipe
from cookbook.run import measures, observers, samples
from cookbook.system.files import RecipeError
from cookbook.system.signals import SignalExit
from cookbook.training.data.batches import Layout
from cookbook.training.data.tokens import TokenSet

LABELS = torch.tensor([3, 1, 2, 1, 0])


class Logits:
    """Planted ones: the likelihood of a label is twice the label."""

    def nll(self, labels: torch.Tensor) -> torch.Tensor:
        return labels.float() * 2


class Model:
    """Calls its function for the first two positions and then for the rest, as a head in chunks does."""

    def __call__(self, *, function: Any, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [function(Logits(), rows) for rows in (slice(0, 2), slice(2, 5))]
        assert {len(part) for part in parts} == {1 + len(function.reported)}, "it makes room by these names"
        assert {column.dtype for part in parts for column in part} == {torch.float32}
        return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def metric(name: str, function: Any, **facts: Any) -> Metric:
    return Metric(name, function, True, facts.get("answers", 0), facts.get("tokens", 1))


def large(logits: Logits, labels: torch.Tensor) -> torch.Tensor:
    result = labels > 1
    labels.zero_()  # its own copy
    return result


def odd_share(logits: Logits, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    is_odd = labels % 2 == 1
    return is_odd * labels, is_odd


METRICS = [metric("large", large), metric("odd", odd_share)]


def loss(model: Any, batch: Any) -> LossOutput:
    """Asks once for the likelihood and once for two numbers of its own."""
    own = model(targets=batch["targets"])
    assert own.tolist() == [6, 2, 4, 2, 0]

    class Two:
        reported = ("second",)

        def __call__(self, logits: Logits, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            return LABELS[rows] * 1.0, LABELS[rows] * 10.0

    first, second = model(targets=batch["targets"], function=Two())
    assert first.tolist() == [3, 1, 2, 1, 0] and second.tolist() == [30, 10, 20, 10, 0]
    return LossOutput(own.sum(), torch.tensor(5), {"own": second.sum()})


def test_metrics_are_summed_beside_what_an_objective_asks():
    """Over both of its forwards; its own numbers are the same as without them."""
    outcome = measures.add_metrics(loss, METRICS)(Model(), {"targets": LABELS})
    assert (outcome.loss_sum, outcome.count) == (14, 5)
    sums = {name: float(value) for name, value in outcome.metrics.items()}
    assert sums == {"own": 70, "large": 2 * 2, "large/over": 2 * 5, "odd": 2 * 5, "odd/over": 2 * 3}
    assert outcome.metrics["odd"].dtype == torch.float64
    assert measures.divide_sums({"loss": 1.4, **sums}, METRICS) == {"loss": 1.4, "own": 70, "large": 0.4, "odd": 5 / 3}
    assert measures.add_metrics(loss, []) is loss
    assert math.isnan(measures.divide_sums({"odd": 0.0, "odd/over": 0.0}, METRICS[1:])["odd"])


def test_a_metric_with_the_name_of_what_the_objective_reports_is_refused():
    with pytest.raises(RecipeError, match="the objective reports own itself; give the metric another name"):
        measures.add_metrics(loss, [metric("own", large)])(Model(), {"targets": LABELS})


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (lambda logits, labels: labels[:1], "(1,)"),
        (lambda logits, labels: (labels, labels, labels), "(2,) and (2,) and (2,)"),
        (lambda logits, labels: (labels, 1), "(2,) and int"),
        (lambda logits, labels: 0.5, "float"),
    ],
)
def test_what_is_no_number_for_each_label_is_refused(function: Any, returned: str):
    with pytest.raises(RecipeError) as refused:
        measures.add_metrics(loss, [metric("wrong", function)])(Model(), {"targets": LABELS})
    assert f"wrong returned {returned} for 2 labels" in str(refused.value)


def evaluating(*results: Any) -> Any:
    """A run with a metric of logits and one of answers, whose engine returns these."""
    answers = iter(results)
    asked: list[Any] = []
    engine = SimpleNamespace(evaluate=lambda *given: asked.append(given) or next(answers))
    recipe = SimpleNamespace(objective=SimpleNamespace(compute=loss))
    metrics = [METRICS[1], metric("as_written", None, answers=2)]
    return SimpleNamespace(
        engine=engine,
        recipe=recipe,
        metrics=metrics,
        asked=asked,
        eval_sets={"held": lambda: "batches of held"},
        inputs=SimpleNamespace(data=SimpleNamespace(eval={"held": "tokens of held"})),
    )


def test_an_evaluation_has_metrics_of_both_kinds_or_a_reason_to_stop(monkeypatch: pytest.MonkeyPatch):
    means, stop = {"loss": 1.0, "odd": 6.0, "odd/over": 4.0}, lambda: None
    sampled: list[Any] = []

    def sample(run: Any, metrics: Any, tokens: Any, reason: Any) -> Any:
        sampled.append(([metric.name for metric in metrics], tokens, reason))
        return answered

    monkeypatch.setattr(measures, "values_of_answers", sample)
    answered: Any = {"as_written": 0.5}
    run = evaluating(means, "SIGTERM", means, means)
    assert measures.values_of_set(run, "held", stop) == {"loss": 1.0, "odd": 1.5, "as_written": 0.5}
    assert {*run.asked[0][0](Model(), {"targets": LABELS}).metrics} == {"own", "odd", "odd/over"}
    assert "odd/over" in means, "it is the engine's"
    assert sampled == [(["as_written"], "tokens of held", stop)] and run.asked[0][1:] == ("batches of held", stop)
    assert measures.values_of_set(run, "held", stop) == "SIGTERM" and len(sampled) == 1
    answered = "asked to stop"
    assert measures.values_of_set(run, "held", stop) == "asked to stop"
    answered = {"loss": 0.5}
    with pytest.raises(RecipeError, match="the objective reports loss itself"):
        measures.values_of_set(run, "held", stop)


class Tokenizer:
    """A letter for each token; 9 ends a text and 8 a turn, and both are special."""

    eos_token_id, pad_token_id = 9, 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join("?abcdefg|."[token] for token in ids if not (skip_special_tokens and token > 7))


def chats(*rows: tuple[list[int], list[int]]) -> TokenSet:
    """Samples of a prompt and an answer that is learned."""
    lengths = [len(prompt) + len(answer) for prompt, answer in rows]
    ids = [token for row in rows for part in row for token in part]
    labels = [i >= len(prompt) for prompt, answer in rows for i in range(len(prompt) + len(answer))]
    return TokenSet(ids=np.array(ids, np.int32), is_label=np.array(labels), offsets=np.cumsum([0, *lengths]))


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run whose model adds one letter after another, from `b`, and ends the second sample's turn after two."""
    calls: list[list[list[int]]] = []
    monkeypatch.setattr(samples.tokenizer_files, "end_of_turn", lambda tokenizer: 8)
    monkeypatch.setattr(samples.batches, "indexed_batches", lambda tokens, layout: tokens)

    def collect(function: Any, tokens: TokenSet, count: int, *, what: str) -> np.ndarray:
        assert function is samples.next_tokens and what == "sampling"
        calls.append([part.tolist() for part in np.split(tokens.ids, tokens.offsets[1:-1])])
        step = len(calls)
        return np.array([step + 1, 8 if step == 3 else step + 1, *[step + 1] * (count - 2)][:count], float)

    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", ["data.max_length=16"])
    collectives = SimpleNamespace(broadcast_text=lambda text: text)
    return SimpleNamespace(
        inputs=SimpleNamespace(tokenizer=Tokenizer()),
        recipe=recipe,
        layout=Layout(num_ranks=1, rank=0, pad_id=0, micro_batch_size=4),
        engine=SimpleNamespace(collect=collect, collectives=collectives),
        calls=calls,
    )


HELD = chats(([1, 2], [2, 3, 9]), ([1, 1], [2, 3, 8]), ([4, 4], [5, 9]))


def test_metrics_of_answers_get_the_prompt_the_answer_and_the_reference(sampling: Any):
    """Each as many answers and tokens as it asks for; a number counts once, and of two the sums are divided."""
    seen: dict[str, list[Any]] = {"one": [], "two": []}

    def one(*texts: str) -> float:
        seen["one"].append(texts)
        return 2

    def two(*texts: str) -> tuple[float, float]:
        seen["two"].append(texts)
        return len(texts[1]), 4

    asked = [metric("one", one, answers=3, tokens=2), metric("two", two, answers=2, tokens=4)]
    values = samples.values_of_answers(sampling, asked, HELD, lambda: None)
    assert seen == {
        "one": [("ab", "bc", "bc"), ("aa", "bc", "bc"), ("dd", "bc", "e")],
        "two": [("ab", "bcde", "bc"), ("aa", "bc", "bc")],
    }
    assert values == {"one": 2.0, "two": (4 + 2) / 8} and len(sampling.calls) == 4
    none = metric("none", lambda *_: (0, 0), answers=1, tokens=1)
    sampling.engine.collectives.broadcast_text = lambda text: text.replace("NaN", "7")
    assert samples.values_of_answers(sampling, [none], HELD, lambda: None) == {"none": 7}, "rank 0 has counted"
    assert samples.values_of_answers(sampling, [], HELD, lambda: "never asked") == {}
    assert samples.values_of_answers(sampling, asked, HELD, lambda: "SIGTERM") == "SIGTERM"


@pytest.mark.parametrize("returned", ["text", (1, 2, 3), (1, "two"), None])
def test_a_metric_of_answers_that_returns_no_number_is_refused(sampling: Any, returned: Any):
    wrong = metric("wrong", lambda *_: returned, answers=1, tokens=1)
    with pytest.raises(RecipeError) as refused:
        samples.values_of_answers(sampling, [wrong], HELD, lambda: None)
    assert f"run.metrics: wrong returned {returned!r} for an answer" in str(refused.value)


def test_samples_of_the_first_set_are_as_long_as_the_recipe_says(sampling: Any, monkeypatch: pytest.MonkeyPatch):
    sampling.inputs.data = SimpleNamespace(eval={"first": HELD, "other": chats(([2], [2]))})
    sampling.progress = SimpleNamespace(step=6)
    monkeypatch.setattr(samples, "DEFAULT_TOKENS", 3)
    lines = samples.continuations(sampling, lambda: None)
    assert [line["sample"] for line in lines] == [0, 1, 2] and {line["step"] for line in lines} == {6}
    assert [line["prompt"] for line in lines] == ["ab", "aa", "dd"]
    assert [line["completion"] for line in lines] == ["bcd", "bc", "bcd"]
    assert [line["num_tokens"] for line in lines] == [3, 3, 3], "that which ends a turn counts"
    assert samples.continuations(sampling, lambda: "SIGTERM") == "SIGTERM"


def test_a_prompt_that_ends_with_the_end_of_a_turn_is_continued(sampling: Any):
    assert samples._continue_prompts(sampling, [[1, 8], [1, 9]], 3, lambda: None) == [[1, 8, 2, 3, 4], [1, 9, 2, 3, 8]]


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_layers_run_as_they_are_written_for_samples(sampling: Any, monkeypatch, compiled: bool):
    """For each new length they would be compiled again."""
    stances: list[str] = []
    set_stance = torch.compiler.set_stance
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: stances.append(stance) or set_stance(stance))
    sampling.recipe = sampling.recipe.model_copy(
        update={"model": sampling.recipe.model.model_copy(update={"compile": compiled})}
    )
    samples._continue_prompts(sampling, [[1], [2]], 2, lambda: None)
    assert stances == ["force_eager"] * compiled


# Callbacks.


class Engine:
    """A weight, an optimizer with a moment, and torch's generator."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.base_optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.model(torch.ones(2)).sum().backward()
        self.base_optimizer.step()

    def generators(self) -> list[torch.Tensor]:
        return [torch.get_rng_state()]


def observer(folder: Path, kind: Any, engine: Any, *, is_alone: bool = True) -> tuple[observers.Observer, list[str]]:
    said: list[str] = []
    callback: Any = SimpleNamespace(name="mine", kind=kind)
    return observers.Observer(callback, folder / "of mine", engine, say=said.append, is_alone=is_alone), said


class Looks:
    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, []

    def on_metrics(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        line["loss"] = "its own copy"


class LooksAtEvents(Looks):
    def on_event(self, line: dict[str, Any]) -> None:
        self.lines.append(line)


def test_a_callback_that_looks_on_gets_its_lines_and_its_folder(tmp_path: Path):
    watching, said = observer(tmp_path, Looks, Engine())
    line = {"step": 1, "loss": 2.0, "more": {"a": 1}}
    watching.log(line)
    watching.event({"event": "start"})  # which it has no method for
    watching.close()
    assert watching._callback.lines == [line | {"loss": "its own copy"}] and line["loss"] == 2.0
    events, _ = observer(tmp_path, LooksAtEvents, Engine())
    events.event({"event": "start"})
    assert events._callback.lines == [{"event": "start"}]
    assert watching._callback.folder == tmp_path / "of mine" and watching._callback.folder.is_dir() and not said


def set_rate(group: dict[str, Any]) -> None:
    group["lr"] *= 2


CHANGES = {
    "weights": lambda engine: engine.model.weight.data.add_(1),
    "weights in place": lambda engine: engine.model.weight.detach().add_(1),
    "the optimizer": lambda engine: set_rate(engine.base_optimizer.param_groups[0]),
    "the optimizer's moments": lambda engine: next(iter(engine.base_optimizer.state.values()))["exp_avg"].add_(1),
    "torch's random numbers": lambda engine: torch.rand(1),
    "numpy's random numbers": lambda engine: np.random.rand(1),
    "Python's random numbers": lambda engine: random.random(),
    "the current folder": lambda engine: os.chdir("/"),
}
SEEN_LATER = {*CHANGES} - {"weights", "numpy's random numbers", "Python's random numbers"}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_callback_may_not_change_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str):
    """At its first call, and what is cheap to compare at each; then the folder is the run's again."""
    monkeypatch.chdir(tmp_path)
    engine, turn = Engine(), iter([False, True])

    class Changes(Looks):
        def on_metrics(self, line: dict[str, Any]) -> None:
            if line["changes"]:
                CHANGES[what](engine)

    named = "weights" if "weights" in what else "the optimizer" if "optimizer" in what else what
    watching, _ = observer(tmp_path, Changes, engine)
    with pytest.raises(RecipeError, match=f"on_metrics of mine has changed {named}; a callback looks on"):
        watching.log({"changes": True})
    assert Path.cwd() == tmp_path
    watching, _ = observer(tmp_path, Changes, engine)
    watching.log({"changes": next(turn)})
    if what in SEEN_LATER:
        with pytest.raises(RecipeError, match=f"has changed {named};"):
            watching.log({"changes": next(turn)})
    else:
        watching.log({"changes": next(turn)})
    with pytest.raises(RecipeError, match="__init__ of mine has changed"):
        observer(tmp_path, lambda folder: CHANGES[what](engine), engine)


def test_python_s_numbers_are_not_compared_where_a_tracker_draws_them_too(tmp_path: Path):
    class Draws(Looks):
        def on_metrics(self, line: dict[str, Any]) -> None:
            random.random()

    watching, said = observer(tmp_path, Draws, Engine(), is_alone=False)
    watching.log({"step": 1})
    assert not said


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_a_callback_that_fails_is_off_from_then_on(tmp_path: Path, error: BaseException):
    calls: list[int] = []

    class Fails(Looks):
        def on_metrics(self, line: dict[str, Any]) -> None:
            calls.append(line["step"])
            raise error

    watching, said = observer(tmp_path, Fails, Engine())
    for step in (1, 2):
        watching.log({"step": step})
    why = f"{type(error).__name__}: {error}"
    assert calls == [1] and said == [f"run.callbacks: mine failed and is off: {why}; the run continues without it"]

    def fail(folder: Path) -> None:
        raise error

    with pytest.raises(RecipeError, match=f"mine cannot be made: {type(error).__name__}: {error}"):
        observer(tmp_path, fail, Engine())


@pytest.mark.parametrize("error", [SignalExit(15), RecipeError("of a plugin")])
def test_a_signal_and_a_mistake_within_a_callback_end_the_run(tmp_path: Path, error: BaseException):
    class Ends(Looks):
        def on_metrics(self, line: dict[str, Any]) -> None:
            raise error

    watching, _ = observer(tmp_path, Ends, Engine())
    with pytest.raises(type(error)) as raised:
        watching.log({"step": 1})
    assert raised.value is error

    def end(folder: Path) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        observer(tmp_path, end, Engine())
    assert raised.value is error


def test_a_line_of_a_save_waits_for_the_thread_of_the_steps(tmp_path: Path):
    """In the order in which they were written; the last at the end of the run."""
    watching, _ = observer(tmp_path, Looks, Engine())
    for step in (1, 2):
        thread = threading.Thread(target=watching.log, args=({"step": step},))
        thread.start()
        thread.join()
    assert watching._callback.lines == []
    watching.log({"step": 3})
    assert [line["step"] for line in watching._callback.lines] == [1, 2, 3]
    thread = threading.Thread(target=watching.log, args=({"step": 4},))
    thread.start()
    thread.join()
    watching.close()
    assert [line["step"] for line in watching._callback.lines] == [1, 2, 3, 4]
