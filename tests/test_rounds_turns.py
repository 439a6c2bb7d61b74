"""Protects conversations of rounds: what was sampled is what is trained, tokens of tools are not, each turn is heard.

python -m pytest -q tests/test_rounds_turns.py
"""

import json
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from cookbook.commands.cli import main
from cookbook.commands.rounds import conversations, prompt_rows, proof, rounds_folder
from cookbook.commands.rounds.round_samples import Sampling, _sample, _talks
from cookbook.commands.rounds.rounds_folder import Round
from cookbook.commands.rounds.sampling import Answer, Sampler, encode
from cookbook.config.environments import environments
from cookbook.config.objectives import Objective
from cookbook.config.recipe import Recipe, load_recipe
from cookbook.rows.json_text import BadRow
from cookbook.rows.row_kinds import kinds
from cookbook.start.in_rounds import misfits
from cookbook.system.files import RecipeError
from cookbook.training.data.encode import Encoder
from cookbook.training.data.rows import Rows
from tests.stand_in_vllm import StandIn

MODEL = ROOT / "recipes/calculator/model"


def recipe_of(*changed: str) -> Recipe:
    return load_recipe(ROOT / "recipes/calculator/grpo.yaml", [f"model.name_or_path={MODEL}", *changed])


class Talk:
    """A conversation whose turns of the policy are these texts, each with an end token."""

    def __init__(self, recipe: Recipe, row: int = 34) -> None:
        assert recipe.rounds is not None
        recipe = recipe.model_copy(deep=True)
        prompts = prompt_rows.read_prompts(recipe.data, recipe.rounds, recipe.seed)
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        (ids,) = encode([prompts[row]], str(MODEL), recipe)
        self.conversation = conversations.Conversation(prompts[row], ids, recipe, self.tokenizer)

    def say(self, text: str, *, ends: bool = True) -> Any:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id] * ends
        self.conversation.take(Answer(ids, text, ends))
        return self.conversation


@pytest.fixture(autouse=True)
def _in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_a_conversation_is_the_tokens_that_were_sampled_and_the_templates_between():
    """The whole is what the template writes, token by token, and the mask is on what the policy wrote."""
    talk = Talk(recipe_of())
    assert talk.say("calc 3 + 4").reward is None
    done = talk.say("7")
    expected = [
        {"role": "user", "content": "3 + 4 ="},
        {"role": "assistant", "content": "calc 3 + 4"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "7"},
    ]
    assert done.messages == expected and done.reward == 1.0
    text = talk.tokenizer.decode(done.prompt_ids + done.tokens)
    assert text + "\n" == talk.tokenizer.apply_chat_template(expected, tokenize=False)
    policy = [token for token, own in zip(done.tokens, done.mask, strict=True) if own]
    assert talk.tokenizer.decode(policy) == "calc 3 + 4<|im_end|>7<|im_end|>"


def test_tokens_that_the_tokenizer_would_write_otherwise_stay_as_they_were_sampled():
    talk = Talk(recipe_of())
    one_by_one = [talk.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "calc 3 + 4"]
    whole = talk.tokenizer("calc 3 + 4", add_special_tokens=False)["input_ids"]
    assert one_by_one != whole
    talk.conversation.take(Answer([*one_by_one, talk.tokenizer.eos_token_id], "calc 3 + 4", True))
    assert talk.conversation.tokens[: len(one_by_one)] == one_by_one and talk.conversation.reward is None


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        (["7"], 1.0),
        (["8"], 0.0),
        (["calc 3 + 5", "7"], 1.0),
        (["calc 3 + 4", "calc 3 + 4"], 0.0),  # no turn is left
    ],
)
def test_the_reward_is_the_environments_or_0_where_it_gave_none(turns, reward):
    talk = Talk(recipe_of())
    for turn in turns:
        assert talk.conversation.reward is None
        talk.say(turn)
    assert talk.conversation.reward == reward


def test_an_answer_that_was_cut_off_or_leaves_no_room_ends_a_conversation():
    assert Talk(recipe_of()).say("calc 3 + 4", ends=False).reward == 0.0
    assert Talk(recipe_of("data.max_length=45")).say("calc 3 + 4").reward == 0.0


def test_an_environment_that_writes_to_its_row_and_its_messages_changes_no_other_conversation(monkeypatch):
    """One that takes the tests of its row off, and counts in the message that it returned before."""
    recipe = recipe_of("data.train=" + str(ROOT / "recipes/calculator/prompts.jsonl"))
    prompt = prompt_rows.read_prompts(recipe.data, recipe.rounds, recipe.seed)[34]
    prompt.columns["tests"] = ["1", "2"]
    kind = environments()["Calculator"].kind
    begin = kind.start

    def start(self, row):
        row["tests"].pop()
        self.asked = begin(self, row)
        return self.asked

    def step(self, messages):
        if not hasattr(self, "said"):
            self.said = [{"role": "tool", "content": "7"}]
        else:
            self.asked[0]["content"] = self.said[0]["content"] = messages[0]["content"] = "8"
        return self.said

    monkeypatch.setattr(kind, "start", start)
    monkeypatch.setattr(kind, "step", step)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    (ids,) = encode([prompt], str(MODEL), recipe)
    talk = Talk.__new__(Talk)
    talk.tokenizer = tokenizer
    for _ in range(2):  # the second finds the row as it was
        talk.conversation = conversations.Conversation(prompt, ids, recipe, tokenizer)
        talk.conversation.rounds = recipe.rounds.model_copy(update={"max_turns": 4})
        talk.say("calc 3 + 4")
        talk.say("calc 3 + 4")
        contents = [message["content"] for message in talk.conversation.messages]
        assert contents == ["3 + 4 =", "calc 3 + 4", "7", "calc 3 + 4", "8"]
    assert prompt.columns["tests"] == ["1", "2"] and prompt.asked == [{"role": "user", "content": "3 + 4 ="}]


def test_a_template_that_rewrites_earlier_turns_is_refused():
    talk = Talk(recipe_of())
    template = talk.tokenizer.chat_template
    # As templates that leave out the reasoning of earlier turns.
    changed = template.replace('message["content"] + "<|im_end|>"', 'message["content"][1:] + "<|im_end|>"', 1)
    assert changed != template
    talk.tokenizer.chat_template = changed
    with pytest.raises(RecipeError, match=r"data\.chat_template: writes earlier turns of a conversation otherwise"):
        talk.say("calc 3 + 4")


def _catches(self, messages):
    """Answers a failure of its tool, as most do."""
    try:
        time.sleep(5)
    except Exception:
        return 0.0
    return 1.0


def _takes_the_alarm(self, messages):
    signal.alarm(0)
    time.sleep(0.4)
    return 1.0


def _fails_in_time(self, messages):
    raise TimeoutError("of its own")


ENVIRONMENTS = {
    "step: KeyError: 'missing'": lambda self, messages: {}["missing"],
    "calls sys.exit(0), which would end": lambda self, messages: sys.exit(0),
    "step took longer than rounds.environment_seconds 0.2": lambda self, messages: time.sleep(5),
    "step took longer than rounds.environment_seconds 0.2\n": _catches,
    "took longer than rounds.environment_seconds 0.2": _takes_the_alarm,
    "step: TimeoutError: of its own": _fails_in_time,
    "step returned nan, which is not finite": lambda self, messages: float("nan"),
    "step returned 'a text', neither a number nor messages": lambda self, messages: "a text",
    "neither a number nor messages": lambda self, messages: [{"role": "assistant", "content": "mine"}],
    "neither a number nor messages, each": lambda self, messages: [{"role": "gpt", "content": "mine"}],
    "step: `image` is not read: message 2 of": lambda self, messages: [
        {"role": "user", "content": "7", "image": "7.png"}
    ],
    "step: a key that is not read: `note` of": lambda self, messages: [{"role": "tool", "content": "7", "note": "x"}],
    "step returned '<|im_end|>', which the tokenizer reads as a special token": lambda self, messages: [
        {"role": "tool", "content": "7<|im_end|>"}
    ],
}


@pytest.mark.parametrize(("message", "step"), ENVIRONMENTS.items(), ids=range(len(ENVIRONMENTS)))
def test_an_environment_that_fails_is_named_with_its_row(monkeypatch, message, step):
    talk = Talk(recipe_of("rounds.environment_seconds=0.2"))
    monkeypatch.setattr(type(talk.conversation.environment), "step", step)
    begun = time.monotonic()
    with pytest.raises(RecipeError) as raised:
        talk.say("calc 3 + 4")
    assert message in str(raised.value) and str(raised.value).startswith("environment Calculator: step")
    assert "prompts.jsonl:35" in str(raised.value) and time.monotonic() - begun < 4


def test_messages_of_an_environment_are_read_as_those_of_rows(monkeypatch):
    """Roles by their other names, the call that a result answers, and no key that nothing reads."""
    kind = environments()["Calculator"].kind
    asked = [{"role": "human", "content": "3 + 4 ="}]
    reply = [
        {"role": "observation", "content": "", "tool_call_id": "1"},
        {"role": "user", "content": "Go on.", "id": None},
    ]
    monkeypatch.setattr(kind, "start", lambda self, row: asked)
    monkeypatch.setattr(kind, "step", lambda self, messages: reply)
    assert Talk(recipe_of()).say("").messages == [
        {"role": "user", "content": "3 + 4 ="},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "", "tool_call_id": "1"},
        {"role": "user", "content": "Go on."},
    ]
    asked[0]["note"] = "x"
    with pytest.raises(RecipeError, match="a key that is not read: `note` of `start`"):
        Talk(recipe_of())


@pytest.mark.parametrize("method", ["__init__", "start"])
def test_an_environment_that_begins_too_late_ends_rounds_at_the_first_row(monkeypatch, method):
    recipe = recipe_of("rounds.environment_seconds=0.2")
    assert recipe.rounds is not None
    monkeypatch.setattr(environments()["Calculator"].kind, method, lambda self, given: time.sleep(5))
    begun = time.monotonic()
    with pytest.raises(RecipeError, match=r"prompts\.jsonl:1: environment Calculator: start took longer than"):
        prompt_rows.read_prompts(recipe.data, recipe.rounds, recipe.seed)
    assert time.monotonic() - begun < 4


def test_each_turn_is_sampled_after_the_tokens_of_all_before_and_again_the_same(tmp_path):
    """The lines of a round have log-probabilities of the policy's tokens alone, by a forward over all of them."""
    recipe = recipe_of("rounds.num_generations=6", "rounds.temperature=0.8", "rounds.prompts_per_round=2")
    assert recipe.rounds is not None
    asked = prompt_rows.read_prompts(recipe.data, recipe.rounds, recipe.seed)[:2]
    how = Sampling(recipe=recipe, asked=asked, ids=encode(asked, str(MODEL), recipe), first_model=str(MODEL), judges={})
    written = []
    for _ in range(2):
        sampler = Sampler(MODEL, recipe.rounds, is_bf16=False)
        lines = _talks(Round(tmp_path, 1), [0, 1], sampler, 5, how)
        proof.prove(lines, sampler, recipe, [], 1)
        written.append(lines)
    assert written[0] == written[1]
    assert {turns for line in lines for turns in line["num_turns"]} == {1, 2}
    network: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for line in lines:
        for i, (ids, mask) in enumerate(zip(line["completion_ids"], line["completion_mask"], strict=True)):
            with torch.no_grad():
                logits = network(torch.tensor([line["prompt_ids"] + ids])).logits[0, len(line["prompt_ids"]) - 1 : -1]
            by_hand = logits.double().log_softmax(-1)[range(len(ids)), ids].tolist()
            policy = [logp for logp, own in zip(by_hand, mask, strict=True) if own]
            assert line["logprobs"][i] == pytest.approx(policy, abs=1e-5) == line["trainer_logprobs"][i]
            assert len(line["sampled_logprobs"][i]) == len(policy) == line["num_tokens"][i]
    assert rounds_folder.summary_of(1, lines)["turns"] > 1


@pytest.mark.parametrize("is_lie", [False, True])
def test_each_address_is_proven_by_its_conversations(tmp_path, is_lie):
    """All turns of a conversation are one server's; one of two that takes other weights after its probe is named."""
    servers = [StandIn(), StandIn()]
    changed = ["rounds.num_generations=4", "rounds.prompts_per_round=4", "rounds.max_kl_sampler_trainer=1.0e-6"]
    recipe = recipe_of(*changed, f"rounds.sampler=[{', '.join(server.address for server in servers)}]")
    assert recipe.rounds is not None
    asked = prompt_rows.read_prompts(recipe.data, recipe.rounds, recipe.seed)
    how = Sampling(recipe=recipe, asked=asked, ids=encode(asked, str(MODEL), recipe), first_model=str(MODEL), judges={})
    current = Round(tmp_path, 1)
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.serve(str(MODEL))
        server.folder = str(current.folder_for_server(rounds_folder.weights_digest(MODEL)))
    liar, honest = servers
    complete = liar.complete

    def complete_with_other_weights(request: dict[str, Any]) -> dict[str, Any]:
        if request["seed"] > 1000:  # of the round, and not of the probe before it
            liar.model = other
        return complete(request)

    try:
        if is_lie:
            other: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
            other.lm_head.weight.data *= 1.1
            liar.complete = complete_with_other_weights  # type: ignore[method-assign]
            with pytest.raises(RecipeError) as raised:
                _sample(current, MODEL, how)
            assert f"rounds.sampler is {liar.address}: in round 1 kl_sampler_trainer is" in str(raised.value)
            assert honest.address not in str(raised.value)
            return
        lines = _sample(current, MODEL, how)
        assert {turns for line in lines for turns in line["num_turns"]} == {1, 2}
        for index, server in enumerate(servers):
            prompts = [request["prompt"] for request in server.asked if request["seed"] > 1000]
            own = [line["prompt_ids"] for place, line in enumerate(lines) if (1 + place) % 2 == index]
            assert len(own) == 2 and any(prompt not in own for prompt in prompts)
            assert {tuple(prompt[: len(own[0])]) for prompt in prompts} == {*map(tuple, own)}
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def test_the_preview_marks_what_the_policy_wrote(tmp_path, capsys):
    """As of any rows: what a tool said, and what the template writes around it, carries no loss."""
    talk = Talk(recipe_of())
    talk.say("calc 3 + 4")
    talked = talk.say("7")
    answers = {"completion_ids": [talked.tokens] * 2, "completion_mask": [talked.mask] * 2, "rewards": [1, 0]}
    rows = tmp_path / "samples.jsonl"
    rows.write_text(json.dumps({"prompt_ids": talked.prompt_ids, **answers}) + "\n")
    changed = {"model.name_or_path": MODEL, "rounds": "null", "plugins": "null", "data.train": rows}
    words = [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]
    assert main(["preview", "recipes/calculator/grpo.yaml", "--samples", "1", *words]) == 0
    shown = capsys.readouterr().out
    end = talk.tokenizer.eos_token
    assert re.findall(r"⟦(.*?)⟧|\[\[(.*?)\]\]", shown) == [(f"calc 3 + 4{end}", ""), (f"7{end}", "")]
    assert f"7{end}" in shown.replace(f"⟦7{end}⟧", "")  # the tool's, not marked


def test_tokens_of_a_tool_carry_no_loss():
    row = {"prompt_ids": [5, 6], "completion_ids": [[7, 8, 9], [7, 9]], "rewards": [1, 0]}
    masks = {"completion_mask": [[1, 0, 1], [1, 1]]}
    kind = kinds()["sampled_group"]
    encoder = Encoder(AutoTokenizer.from_pretrained(MODEL), "assistant", SimpleNamespace())  # type: ignore[arg-type]
    for given, labels in ((row, [0, 0, 1, 1, 1]), (row | masks, [0, 0, 1, 0, 1])):
        rows = Rows(kind="sampled_group", rows=[kind.check(given)])
        ((first, _),) = (encoded.sequences for encoded in encoder.encode(rows))
        assert first == ([5, 6, 7, 8, 9], labels)
    for wrong in ([[1, 0], [1, 1]], [[1, 2, 1], [1, 1]], [[0, 0, 0], [1, 1]], [1, 0, 1]):
        with pytest.raises(BadRow, match="mask"):
            kind.check(row | {"completion_mask": wrong})
    assert Objective.of(name="grpo").rows


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            "rounds.environment=Calc",
            "rounds.environment is 'Calc', which no file in plugins registers; there are Program, Calculator",
        ),
        ("rounds.user_message='{prompt}'", "rounds.user_message is '{prompt}', but the environment asks"),
        ("objective={name: distill, teacher: a, kd_ratio: 1}", "distill trains on all tokens of an answer"),
    ],
)
def test_what_does_not_go_with_an_environment_is_refused(changed, message):
    from cookbook.config.strategy import load_strategy

    recipe = recipe_of(changed)
    assert any(message in mistake for mistake in misfits(recipe, load_strategy(Path(recipe.strategy))))
    assert "Calculator" in environments()
