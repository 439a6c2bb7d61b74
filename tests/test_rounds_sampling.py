"""Protects what the samples of a round say of themselves, and that a sampler that lies ends the round.

python -m pytest -q tests/test_rounds_sampling.py -m "slow or not slow"
"""

import copy
import json
import math
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from cookbook.commands.cli import main
from cookbook.commands.rounds import loop, proof, rounds_folder, sampler_divergence
from cookbook.commands.rounds.drawing import logps, truncate
from cookbook.commands.rounds.round_samples import Sampling, _lines
from cookbook.commands.rounds.rounds_folder import Round
from cookbook.commands.rounds.sampling import Answer, OpenFile, Sampler
from cookbook.config.recipe import load_recipe
from cookbook.config.sections import RoundsSection
from cookbook.system.files import RecipeError
from tests.stand_in_vllm import StandIn
from tests.test_rounds import LORA, ROUNDS, logps_of, read, settings, start

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.7, "top_p": 0.8, "top_k": 9, "min_p": 0.05},
}


@pytest.fixture(scope="module")
def model(lab, tmp_path_factory) -> Path:
    """The lab's with weights by chance, by which some tokens are much more probable than others."""
    before = lab.run("single").folder / "export"
    sharp = AutoModelForCausalLM.from_pretrained(before)
    torch.manual_seed(0)
    for name, parameter in sharp.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter.data, std=0.25)
    folder = tmp_path_factory.mktemp("sharp")
    for file in before.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    sharp.save_pretrained(folder)
    return folder


def rounds_of(**keys: Any) -> RoundsSection:
    return RoundsSection(num_rounds=1, prompts_per_round=1, max_completion_length=8, **keys)


def drawn_by_hand(logits: list[float], keys: dict[str, Any]) -> dict[int, float]:
    """The probability of each token that is left, by the definitions, a token at a time."""
    heated = [logit / keys.get("temperature", 1) for logit in logits]
    total = sum(map(math.exp, heated))
    left = {token: math.exp(logit) / total for token, logit in enumerate(heated)}
    left = {token: p for token, p in left.items() if p >= keys.get("min_p", 0) * max(left.values())}
    ranked = sorted(left, key=lambda token: -left[token])[: keys.get("top_k") or len(left)]
    kept, mass, whole = [], 0.0, sum(left[token] for token in ranked)
    for token in ranked:
        if mass >= keys.get("top_p", 1) * whole:
            break
        kept.append(token)
        mass += left[token]
    return {token: left[token] / mass for token in kept}


@pytest.mark.parametrize("keys", SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_drawn_from_what_the_settings_leave(keys):
    """Tokens and probabilities by the definitions; and the tokens those of transformers for one setting alone."""
    logits = 2 * torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
    shares = truncate(logits, rounds_of(**keys)).softmax(-1)
    for row, expected in zip(shares, (drawn_by_hand(row, keys) for row in logits.tolist()), strict=True):
        assert {token: row[token].item() for token in row.nonzero().flatten().tolist()} == pytest.approx(
            expected, rel=1e-4
        )
    warpers: dict[str, Any] = {"top_p": TopPLogitsWarper, "top_k": TopKLogitsWarper, "min_p": MinPLogitsWarper}
    if len(keys) == 1 and (name := next(iter(keys))) in warpers:
        theirs = warpers[name](keys[name])(None, logits.clone()) > -torch.inf
        assert torch.equal(theirs, shares > 0) and not theirs.all()


def test_a_token_that_was_drawn_has_a_probability_where_rounding_left_it_out():
    logits, keys = torch.tensor([[3.0, 2.0, 1.0]]), rounds_of(top_k=1)
    assert logps(truncate(logits, keys), torch.tensor([1])).item() == -math.inf
    both = math.exp(3) + math.exp(2)
    logp = logps(truncate(logits, keys, torch.tensor([1])), torch.tensor([1])).item()
    assert logp == pytest.approx(math.log(math.exp(2) / both))


@pytest.mark.parametrize("keys", [{}, *SETTINGS.values()], ids=["none", *SETTINGS])
def test_each_answer_says_how_probable_its_tokens_were(model, keys):
    """By a forward without a cache, beside no other answer, and the definitions."""
    sampler = Sampler(model, rounds_of(num_generations=3, **keys), is_bf16=False)
    alone: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts = [[5, 6, 7], [9, 11, 13, 14, 8]]
    for prompt, group in zip(prompts, sampler.answers(prompts, seed=3), strict=True):
        for answer in group:
            assert answer.logps == pytest.approx(logps_of(alone, prompt, answer.ids), abs=1e-5) and answer.seed == 3
            assert (answer.drawn_logps is None) == (not keys)
            for i, (token, logp) in enumerate(zip(answer.ids, answer.drawn_logps or (), strict=False)):
                with torch.no_grad():
                    logits = alone(input_ids=torch.tensor([prompt + answer.ids[:i]])).logits[0, -1]
                assert logp == pytest.approx(math.log(drawn_by_hand(logits.tolist(), keys)[token]), abs=1e-4)


KEYS = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}


@pytest.mark.slow
def test_a_round_trains_on_the_probabilities_that_its_settings_gave(lab, model, tmp_path, capsys, monkeypatch):
    """Ratios begin at 1, and the weights of tokens at what truncation made of them; both are in the samples."""
    monkeypatch.setattr(loop, "launch", launch_in(lab))
    batch = {"global_batch_size": 24, "micro_batch_size": 12}
    rounds = ROUNDS | {"num_rounds": 1, **KEYS}
    values = settings(tmp_path, model, rounds=rounds, batch=batch, schedule={"name": "constant"})
    assert start(lab, values) == 0, capsys.readouterr()
    lines = read(tmp_path / "out/rounds/0001/samples.jsonl")
    assert {line["weights"] for line in lines} == {lines[0]["weights"]} and len(lines[0]["weights"]) == 64
    assert all(line["sampling"] == {"min_p": 0.0, **KEYS} and len(line["seeds"]) == 4 for line in lines)
    weights = [
        min(math.exp(own - drawn), 3)
        for line in lines
        for pair in zip(line["logprobs"], line["sampled_logprobs"], strict=True)
        for own, drawn in zip(*pair, strict=True)
    ]
    first = next(line for line in read(tmp_path / "out/rounds/0001/run/metrics.jsonl") if "loss" in line)
    assert first["ratio"] == pytest.approx(1, abs=1e-6)
    assert first["sampling_weight"] == pytest.approx(sum(weights) / len(weights), rel=1e-5) and min(weights) < 0.99
    assert main(["report", str(tmp_path / "out")]) == 0
    assert "Divergence of the trained weights from the sampler" in (tmp_path / "out/report.html").read_text()


def launch_in(lab) -> Callable[..., int]:
    def launch(path, *, strategy, processes, assignments):
        done = lab.start("single", dict(assignment.split("=", 1) for assignment in assignments))
        print(done.stdout)
        return done.returncode

    return launch


def test_a_penalty_is_refused_with_the_reason(lab, model, tmp_path, capsys):
    values = settings(tmp_path, model, rounds=ROUNDS | {"repetition_penalty": 1.1})
    assert start(lab, values) == 2
    assert "repetition_penalty: a penalty makes a token's probability depend" in capsys.readouterr().err


def test_the_divergence_is_that_of_the_definition_at_each_depth():
    lines = [{"logprobs": [[-1.0] * 6, [-0.5]], "trainer_logprobs": [[-1.0] * 5 + [-1.3], [-0.1]]}]
    late, early = math.exp(-0.3) - 1 + 0.3, math.exp(0.4) - 1 - 0.4
    expected = {
        sampler_divergence.KL: (late + early) / 7,
        f"{sampler_divergence.KL}_from_0": early / 5,
        f"{sampler_divergence.KL}_from_4": late / 2,
    }
    assert sampler_divergence.metrics(lines) == pytest.approx(expected)
    assert sampler_divergence.metrics([{"completion_ids": []}]) == {}
    lines[0]["trainer_logprobs"][1] = [-0.1 + 900]
    assert math.isfinite(sampler_divergence.metrics(lines)[sampler_divergence.KL])


def test_the_divergence_estimates_that_of_two_distributions():
    """KL(sampler, trainer) as the sum over a vocabulary, when each token comes as often as the sampler draws it."""
    own, other = (torch.randn(9, generator=torch.Generator().manual_seed(i)).double().log_softmax(0) for i in (1, 2))
    terms = torch.tensor(sampler_divergence.of_tokens(own.tolist(), other.tolist()))
    assert (own.exp() * terms).sum().item() == pytest.approx((own.exp() * (own - other)).sum().item())


class Lies:
    """Log-probabilities that a sampler claims, by itself or by another model than the round's."""

    def __init__(self, model: Path, tmp_path: Path) -> None:
        self.model, self.tmp_path = model, tmp_path
        self.right: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.rounds = rounds_of(num_generations=6)
        self.groups = Sampler(model, self.rounds, is_bf16=False).answers([[5, 6, 7], [9, 11, 13, 14]], seed=1)

    def other(self, name: str, seed: int) -> tuple[Path, Any]:
        """A folder of other weights, and the model."""
        torch.manual_seed(seed)
        other: Any = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        for parameter in other.parameters():
            parameter.data += 0.05 * parameter.data.std() * torch.randn_like(parameter)
        for file in self.model.iterdir():
            (self.tmp_path / name).mkdir(exist_ok=True)
            (self.tmp_path / name / file.name).write_bytes(file.read_bytes())
        other.save_pretrained(self.tmp_path / name)
        return self.tmp_path / name, other

    def check(self, said: Callable[[int, list[int], list[int]], list[float]], others=(), **keys: Any) -> None:
        """Compare lines whose log-probabilities are what `said` returns for the number, prompt and tokens of each."""
        prompts, number = [[5, 6, 7], [9, 11, 13, 14]], 0
        lines: list[dict[str, Any]] = []
        for prompt, group in zip(prompts, self.groups, strict=True):
            ids, said_of = [answer.ids for answer in group], []
            for answer in ids:
                said_of.append(said(number, prompt, answer))
                number += 1
            line = {"prompt_ids": prompt, "completion_ids": ids, "logprobs": said_of}
            lines.append(line | {"ended": [answer.has_ended for answer in group]})
        recipe = load_recipe(Path("recipes/sums/grpo.yaml").resolve(), [f"rounds.{k}={v}" for k, v in keys.items()])
        trainer = OpenFile(self.model, is_bf16=False)
        proof.prove(lines, trainer, recipe, others, 3)


@pytest.fixture
def lies(model, tmp_path) -> Lies:
    return Lies(model, tmp_path)


def test_who_samples_with_the_weights_is_not_accused(lies):
    others = [lies.other("one", 1)[0]]
    lies.check(lambda number, prompt, ids: logps_of(lies.right, prompt, ids), others)
    half = AutoModelForCausalLM.from_pretrained(lies.model, dtype=torch.bfloat16)
    lies.check(lambda number, prompt, ids: logps_of(half, prompt, ids), others)  # as a server in bf16


def test_a_token_that_the_model_does_not_have_is_named(lies):
    num_embeddings = lies.right.get_input_embeddings().weight.shape[0]
    answer = lies.groups[1][2]
    for token in (num_embeddings - 1, num_embeddings):
        lies.groups[1][2] = answer._replace(ids=[token, *answer.ids[1:]])
        if token < num_embeddings:
            lies.check(lambda number, prompt, ids: logps_of(lies.right, prompt, ids))
            continue
        with pytest.raises(RecipeError, match=f"returned the token {token}, but the model has {num_embeddings}"):
            lies.check(lambda number, prompt, ids: [-1.0] * len(ids))


@pytest.mark.parametrize("num_known", [0, 1, 3, 4])
def test_log_probabilities_of_some_answers_alone_are_refused(num_known):
    """One answer without would else take those of all away, and the proof with them."""
    recipe = load_recipe(Path("recipes/sums/grpo.yaml").resolve(), ["rounds.sampler=http://localhost:8000"])
    how = Sampling(recipe=recipe, asked=[], ids=[[5], [6]], first_model="", judges={})
    answers = [Answer([7], "", True, [-1.0] if i < num_known else None) for i in range(4)]
    groups = [answers[:2], answers[2:]]
    if 0 < num_known < 4:
        with pytest.raises(RecipeError, match=f"and {num_known} of 4 answers came with log-probabilities"):
            _lines(Round(Path("out"), 1), [0, 1], groups, how)
    else:
        lines = _lines(Round(Path("out"), 1), [0, 1], groups, how)
        assert [line.get("logprobs") for line in lines] == [[[-1.0]] * 2 if num_known else None] * 2


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_a_server_without_log_probabilities_leaves_ratios_to_the_weights_that_sampled(
    tmp_path, max_staleness, has_logprobs
):
    """With samples of earlier weights the run cannot compute these before its first step."""
    changed = ["rounds.sampler=http://localhost:8000", f"rounds.max_staleness={max_staleness}"]
    recipe = load_recipe(Path("recipes/sums/grpo.yaml").resolve(), changed)
    line = {"row": 0, "round": 2, "completions": [" 1"], "ended": [True], "num_tokens": [1], "prompt_ids": [5]}
    line |= {"completion_ids": [[7]], "rewards": [1.0], "trainer_logprobs": [[-1.0]]}
    line |= {"logprobs": [[-1.1]]} if has_logprobs else {}
    current = Round(tmp_path, 2)
    rounds_folder.write_lines(current.samples, [line])
    (source,) = [word for word in loop._of_round(current, tmp_path, [], recipe) if word.startswith("data.train=")]
    columns = json.loads(source.removeprefix("data.train="))["columns"]
    expected = "logprobs" if has_logprobs else "trainer_logprobs" if max_staleness else None
    assert columns.get("logprobs") == expected


@pytest.mark.parametrize("share", [1, 2], ids=["one server", "two servers that differ"])
def test_a_server_with_weights_of_before_is_found_where_the_bound_would_not(lies, share):
    """The one that is served is named, of two models of before; the divergence is far below the bound."""
    others = [lies.other("first", 1), lies.other("second", 2)]

    def said(number: int, prompt: list[int], ids: list[int]) -> list[float]:
        return logps_of(lies.right if number % share else others[1][1], prompt, ids)

    with pytest.raises(RecipeError, match=r"other weights were sampled with, those of .*/second") as raised:
        lies.check(said, [folder for folder, _ in others], max_kl_sampler_trainer=1)
    assert "above" not in str(raised.value)
    concerned = re.search(r"(\d+) of 12 answers are concerned: are there several servers", str(raised.value))
    assert (concerned is not None) == (share == 2) and (concerned is None or concerned[1] == "6")


def test_a_server_that_kept_the_head_of_before_is_found_where_the_bound_would_not(lies):
    """As vLLM 0.32.0 keeps on a CPU, where it is tied, and took all other weights."""
    others = [lies.other("first", 1), lies.other("second", 2)]
    mixed = copy.deepcopy(lies.right)
    mixed.lm_head.weight = others[0][1].lm_head.weight
    with pytest.raises(RecipeError, match=r"but for the head, which is that of .*/first: with that") as raised:
        lies.check(
            lambda number, prompt, ids: logps_of(mixed, prompt, ids),
            [folder for folder, _ in others],
            max_kl_sampler_trainer=1,
        )
    assert "above" not in str(raised.value)


def test_a_cause_is_named_by_what_explains_it(lies):
    half = AutoModelForCausalLM.from_pretrained(lies.model, dtype=torch.bfloat16)

    def of_ends(number: int, prompt: list[int], ids: list[int]) -> list[float]:
        return [*logps_of(lies.right, prompt, ids)[:-1], -9.0]

    cases: dict[str, Callable[[int, list[int], list[int]], list[float]]] = {
        "it may compute in bfloat16, and the trainer in float32": lambda number, prompt, ids: logps_of(
            half, prompt, ids
        ),
        "another template wrote the prompts, without its first token": lambda number, prompt, ids: logps_of(
            lies.right, prompt[1:], ids
        ),
        "neither other weights": lambda number, prompt, ids: [-3.0 - i for i in range(len(ids))],
    }
    if any(answer.has_ended for group in lies.groups for answer in group):
        cases["it ends answers by another rule"] = of_ends
    for words, said in cases.items():
        with pytest.raises(RecipeError, match=r"above rounds\.max_kl_sampler_trainer 1e-09") as raised:
            lies.check(said, max_kl_sampler_trainer=1e-9)
        assert words in str(raised.value)


@pytest.fixture
def server():
    started = StandIn()
    threading.Thread(target=started.serve_forever, daemon=True).start()
    yield started
    started.shutdown()
    started.server_close()


@pytest.mark.slow
def test_a_server_that_keeps_its_weights_ends_the_round(lab, model, tmp_path, capsys, monkeypatch, server):
    """It lists the folder of the adapter that it was told to load, and samples with the model of before."""
    monkeypatch.setattr(loop, "launch", launch_in(lab))
    rounds = ROUNDS | {"sampler": server.address, **KEYS}
    others = {"adapter": LORA, "optim": {"learning_rate": 0.05}, "schedule": {"name": "constant"}}
    values = settings(tmp_path, model, rounds=rounds, **others)
    server.serve(str(model))
    for number in (1, 2):
        assert start(lab, values) == 2
        (folder,) = re.findall(r"`vllm serve (\S+)`", capsys.readouterr().err)
        if number == 1:
            server.serve(folder)
        server.folder = folder
    assert start(lab, values) == 2
    error = capsys.readouterr().err
    assert f"rounds.sampler is {server.address}: in round 2 kl_sampler_trainer is" in error
    assert f"other weights were sampled with, those of {model}: with that" in error
    assert not [*tmp_path.glob("out/rounds/0002/*.jsonl")]
    assert json.loads((tmp_path / "out/status.json").read_text())["exit_code"] == 2
    server.serve(folder)
    assert start(lab, values) == 0, capsys.readouterr()
    for line in read(tmp_path / "out/rounds/0001/samples.jsonl"):
        for ids, drawn in zip(line["completion_ids"], line["sampled_logprobs"], strict=True):
            with torch.no_grad():
                logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([line["prompt_ids"] + ids])).logits
            place = len(line["prompt_ids"]) - 1
            by_hand = [drawn_by_hand(logits[0, place + i].tolist(), KEYS)[token] for i, token in enumerate(ids)]
            assert drawn == pytest.approx([math.log(p) for p in by_hand], abs=1e-4)


def test_a_server_that_samples_with_other_settings_is_found(lies):
    with pytest.raises(RecipeError, match=r"tokens are none that temperature 1, top_p 1, top_k 2, min_p 0 leaves"):
        lies.check(lambda number, prompt, ids: logps_of(lies.right, prompt, ids), top_k=2)


def test_probabilities_after_truncation_are_told_from_other_weights(lies):
    lies.rounds = rounds_of(num_generations=6, top_k=5)
    lies.groups = Sampler(lies.model, lies.rounds, is_bf16=False).answers([[5, 6, 7], [9, 11, 13, 14]], seed=1)

    def said(number: int, prompt: list[int], ids: list[int]) -> list[float]:
        (group,) = [group for group in lies.groups if any(answer.ids == ids for answer in group)][:1]
        return next(answer.drawn_logps for answer in group if answer.ids == ids)

    with pytest.raises(RecipeError, match="log-probabilities are those after temperature and truncation"):
        lies.check(said, top_k=5)
