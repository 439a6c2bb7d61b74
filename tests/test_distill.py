"""Distillation: the head's log-probabilities, the divergence, what is kept of a teacher, and who may be one.

python -m pytest -q tests/test_distill.py
"""

import json
import math
import shutil
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cookbook.commands.cli import main
from cookbook.config.objectives import Objective, Question
from cookbook.config.objectives.forward import Batch, Logits, OfTargets
from cookbook.config.recipe import load_recipe
from cookbook.run import teacher
from cookbook.run.teacher import LikeliestTokens, find_teacher, with_answers
from cookbook.start.launchers import World
from cookbook.start.run_plan import load_pair, make_plan
from cookbook.system.files import RecipeError
from cookbook.training.data.answers import AnswersFile, load_answers
from cookbook.training.data.sets import TokenSets
from cookbook.training.engine import Engine, engine_class
from cookbook.training.engine.collectives import Collectives
from cookbook.training.models import loss
from cookbook.training.models.logits import PLAIN, HeadLogits, Reading
from cookbook.training.models.model_source import weights_digest
from cookbook.training.models.structure import LogitTransform
from tests.curves import ROOT, Lab
from tests.needs import need_trl
from tests.small_data import token_set, write_lines

COUNT, WIDTH, VOCAB = 7, 5, 11
CAPPED = LogitTransform(scale=3.0, cap=1.5)


def tokens_of(top_k: int) -> torch.Tensor:
    """Other tokens for each target, each once."""
    chance = torch.Generator().manual_seed(top_k)
    return torch.stack([torch.randperm(VOCAB, generator=chance)[:top_k] for _ in range(COUNT)])


def logits_of(products: torch.Tensor, transform: LogitTransform | None = None) -> HeadLogits:
    return HeadLogits(products, Reading(transform, PLAIN))


def test_all_logits_are_a_copy_of_ones_own():
    """A function of the logits may write in what it was given."""
    products = torch.randn(COUNT, VOCAB)
    logits = logits_of(products)
    before = logits.nll(torch.zeros(COUNT, dtype=torch.long))
    logits.whole().zero_()
    assert torch.equal(logits.nll(torch.zeros(COUNT, dtype=torch.long)), before) and products.any()


def terms(logits: Logits, batch: Batch, temperature: float) -> torch.Tensor:
    """(L, 2 + k): the negative log-likelihood of the target; at the temperature, the log-probability of all tokens
    together that are none of `teacher_tokens`, and those of these."""
    tokens = batch["teacher_tokens"].long()
    rest = logits.logsumexp(temperature=temperature, without=tokens).unsqueeze(1)
    whole = logits.logsumexp(temperature=temperature).unsqueeze(1)
    return torch.cat(
        [logits.nll(batch["targets"]).unsqueeze(1), rest - whole, logits.at(tokens) / temperature - whole], 1
    )


@pytest.mark.parametrize("budget", [2**27, 4 * VOCAB], ids=["at once", "chunked"])
@pytest.mark.parametrize("transform", [None, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("top_k", [1, 4, VOCAB])
def test_the_head_gives_log_probabilities_and_gradients_of_all_logits(top_k, transform, budget, monkeypatch):
    monkeypatch.setattr(loss, "LOGITS_BUDGET", budget)
    torch.manual_seed(0)
    head, hidden, targets = torch.nn.Linear(WIDTH, VOCAB), torch.randn(COUNT, WIDTH), torch.arange(COUNT)
    tokens, weights = tokens_of(top_k), 2 * torch.rand(2 + top_k).double() - 1
    of_targets = torch.linspace(-1, 1.5, COUNT).double()
    scale = of_targets.outer(weights)
    if top_k == VOCAB:
        scale[:, 1] = 0  # nothing is left over
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, head.weight, head.bias)]
    logits = F.linear(*wide)
    logits = logits if transform is None else 1.5 * torch.tanh(3.0 * logits / 1.5)
    tempered = F.log_softmax(logits / 2, 1)
    picked = tempered.gather(1, tokens)
    rest = tempered.exp().scatter(1, tokens, 0.0).sum(1, keepdim=True).clamp(min=1e-30).log()
    expected = torch.cat([F.cross_entropy(logits, targets, reduction="none")[:, None], rest, picked], 1)
    (expected * scale).sum().backward()

    head.__class__ = loss.LossHead
    inputs = hidden.clone().requires_grad_()
    batch = {"targets": targets, "teacher_tokens": tokens}

    def function(logits: Logits, batch: Batch) -> tuple[torch.Tensor, ...]:
        columns = terms(logits, batch, 2.0)
        weighed = torch.where(torch.isfinite(columns), columns * weights.float(), 0.0).sum(1)
        return weighed, columns

    losses, logps = head(inputs, transform=transform, function=OfTargets(function, ("columns",), batch))
    (losses * of_targets).sum().backward()
    assert not logps.requires_grad
    assert logps.dtype == torch.float32 and bool((logps[:, 1] == -math.inf).all()) == (top_k == VOCAB)
    columns = [i for i in range(2 + top_k) if i != 1 or top_k < VOCAB]
    assert (logps - expected)[:, columns].abs().max() < 1e-6
    for ours, theirs in zip((inputs, head.weight, head.bias), wide, strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 2e-6
    # What peft's layer on a head makes of it.
    plain = terms(logits_of(head(hidden), transform), batch, 2.0)
    assert torch.allclose(plain, logps, atol=1e-6)


def test_what_is_left_over_has_its_digits_where_the_candidates_have_nearly_all():
    """1 less their sum would be 0 in float32, or rounding alone."""
    logits = torch.tensor([[30.0, 2.0, 1.0, 0.0]], requires_grad=True)
    parts = terms(logits_of(logits), {"targets": torch.tensor([0]), "teacher_tokens": torch.tensor([[0]])}, 1.0)
    expected = logits.double().softmax(1)[0, 1:].sum().log().item()
    assert parts[0, 1].item() == pytest.approx(expected, rel=1e-6) and expected < -27


def test_a_teacher_s_likeliest_tokens_are_those_of_its_softmax_over_common_tokens():
    torch.manual_seed(1)
    head, hidden = torch.nn.Linear(WIDTH, VOCAB), torch.randn(COUNT, WIDTH)
    log_probabilities = F.log_softmax(head(hidden)[:, : VOCAB - 2] / 1.5, 1)
    head.__class__ = loss.LossHead
    with torch.no_grad():
        logps, tokens = head(hidden, function=LikeliestTokens(Question("teacher", 3, 1.5), VOCAB - 2))
    for row, expected in enumerate(log_probabilities.tolist()):
        order = sorted(range(VOCAB - 2), key=lambda i: -expected[i])
        assert tokens[row].tolist() == order[:3]
        rest = math.log(sum(math.exp(expected[i]) for i in order[3:]))
        assert logps[row].tolist() == pytest.approx([rest, *(expected[i] for i in order[:3])], abs=1e-5)


def asked(logits: torch.Tensor, top_k: int, temperature: float) -> dict[str, Any]:
    """A batch with a teacher's answers, made of its logits by torch's own sort."""
    values, tokens = F.log_softmax(logits.detach().double() / temperature, 1).sort(1, descending=True)
    rest = values[:, top_k:].logsumexp(1, keepdim=True)
    kept = torch.cat([rest, values[:, :top_k]], 1).float()
    places = torch.arange(len(logits))
    return {
        "input_ids": places[None],
        "targets": places % VOCAB,
        "target_positions": places,
        "teacher_tokens": tokens[:, :top_k].int(),
        "teacher_logps": kept,
    }


def student(logits: torch.Tensor):
    def forward(*, input_ids, targets, target_positions, function):
        return function(logits_of(logits), slice(None))

    return forward


def by_formula(student: list[float], teacher: list[float], top_k: int, temperature: float, beta: float) -> float:
    """The divergence of one token from its logits, in plain Python: eq. 1 of arXiv 2306.13649 over outcomes."""
    spread = [[math.exp(logit / temperature) for logit in logits] for logits in (teacher, student)]
    whole = [[weight / sum(weights) for weight in weights] for weights in spread]
    likeliest = sorted(range(len(teacher)), key=lambda i: -teacher[i])[:top_k]
    p, q = ([shares[i] for i in likeliest] + [1 - sum(shares[i] for i in likeliest)] for shares in whole)
    if top_k == len(teacher):
        p, q = p[:-1], q[:-1]

    def kl(first: list[float], second: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(first, second, strict=True))

    if beta in (0, 1):
        return kl(p, q) if beta == 0 else kl(q, p)
    mixture = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(5)
    ours, teacher = (2 * torch.randn(COUNT, VOCAB, generator=chance) for _ in range(2))
    return ours.requires_grad_(), teacher


def objective(**keys: Any) -> Objective:
    return Objective.of(name="distill", teacher="teacher", **keys)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("top_k", [1, 4, VOCAB])
def test_the_loss_is_the_formula_over_the_likeliest_tokens_and_the_rest(pair, top_k: int, beta: float):
    ours, teacher = pair
    batch = asked(teacher, top_k, 1.7)
    settings = objective(loss_top_k=top_k, temperature=1.7, beta=beta, kd_ratio=0.6)
    outcome = settings.compute(student(ours), batch)
    rows = zip(ours.tolist(), teacher.tolist(), strict=True)
    divergence = sum(by_formula(*row, top_k, 1.7, beta) for row in rows)
    nll = F.cross_entropy(ours.detach().double(), batch["targets"], reduction="sum").item()
    assert outcome.count == COUNT
    assert outcome.loss_sum.item() == pytest.approx(0.6 * divergence + 0.4 * nll, rel=1e-5)
    assert outcome.metrics["divergence"].item() == pytest.approx(divergence, rel=1e-5) and divergence > 0.1
    assert outcome.metrics["nll"].item() == pytest.approx(nll, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_with_the_whole_vocabulary_it_is_trl_s_divergence_in_loss_and_gradient(pair, beta: float, monkeypatch):
    need_trl()
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # its warning of an interface that may change
    from trl.experimental.gkd import GKDTrainer

    ours, teacher = pair
    outcome = objective(loss_top_k=VOCAB, temperature=0.9, beta=beta, kd_ratio=1.0).compute(
        student(ours), asked(teacher, VOCAB, 0.9)
    )
    (mine,) = torch.autograd.grad(outcome.loss_sum, ours)
    labels = torch.zeros(1, COUNT, dtype=torch.long)
    theirs = GKDTrainer.generalized_jsd_loss(ours[None], teacher[None], labels, beta, 0.9, num_items_in_batch=1)
    (expected,) = torch.autograd.grad(theirs, ours)
    assert outcome.loss_sum.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert (mine - expected).abs().max() < 1e-5 < expected.abs().max()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient_of_one(pair, beta: float):
    ours, _ = pair
    batch = asked(ours, 4, 1.0)
    outcome = objective(loss_top_k=4, beta=beta, kd_ratio=1.0).compute(student(ours), batch)
    outcome.loss_sum.backward()
    assert abs(outcome.loss_sum.item()) < 1e-5 and ours.grad.abs().max() < 1e-6
    other = batch | {"teacher_logps": batch["teacher_logps"].roll(1, 0)}
    assert objective(loss_top_k=4, beta=beta, kd_ratio=1.0).compute(student(ours), other).loss_sum > 0.1


def test_parts_of_a_batch_add_up_to_its_loss(pair):
    ours, teacher = pair
    batch, settings = asked(teacher, 3, 1.0), objective(loss_top_k=3)
    names = ("targets", "target_positions", "teacher_tokens", "teacher_logps")
    parts = [{**batch, **{name: batch[name][part] for name in names}} for part in (slice(0, 2), slice(2, COUNT))]
    sums = [
        settings.compute(student(ours[part["target_positions"]]), part | {"target_positions": part["targets"]}).loss_sum
        for part in parts
    ]
    assert sum(sums).item() == pytest.approx(settings.compute(student(ours), batch).loss_sum.item(), rel=1e-5)


# What is kept.


def written(path: Path) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.RandomState(0)
    tokens, logps = chance.randint(0, 99, (6, 2)).astype(np.int32), chance.randn(6, 3).astype(np.float32)
    file = AnswersFile(path, 6, 2)
    for part in ([4, 0], [5, 3, 1, 2]):
        file.put(np.array(part), tokens[part], logps[part])
    assert load_answers(path, 6, 2) is None, "it has no name before it is whole"
    file.finish()
    return tokens, logps


def test_answers_are_read_back_as_they_were_written_by_us_and_by_safetensors(tmp_path: Path):
    from safetensors.numpy import load_file

    path = tmp_path / "teacher.safetensors"
    expected = written(path)
    for answers in (load_answers(path, 6, 2), [load_file(path)[name] for name in ("tokens", "logps")]):
        assert answers is not None and all(np.array_equal(*both) for both in zip(answers, expected, strict=True))
    assert load_answers(path, 6, 3) is None and load_answers(path, 5, 2) is None
    assert [path.name for path in tmp_path.iterdir()] == ["teacher.safetensors"]


@pytest.mark.parametrize("place", [-1, -60, -100, 40])
def test_a_damaged_file_is_no_answer(tmp_path: Path, place: int):
    path = tmp_path / "teacher.safetensors"
    written(path)
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    assert load_answers(path, 6, 2) is None


# Who may be a teacher.


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, and teachers with the same tokens, with more rows, and with another token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from cookbook.training.models.tokenizer_files import train_tokenizer

    folder = tmp_path_factory.mktemp("teachers")
    tokenizer = train_tokenizer(["one two three four five"], 280)
    rows = len(tokenizer)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name, count in (("student", rows), ("teacher", rows), ("padded", rows + 24), ("other", rows)):
        torch.manual_seed(len(name))
        LlamaForCausalLM(LlamaConfig(vocab_size=count, **sizes)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    text = (folder / "other" / "tokenizer.json").read_text()
    (folder / "other" / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|im_begin|>"))
    chats = [
        [{"role": "user", "content": f"count {i}"}, {"role": "assistant", "content": "one two three " * (1 + i % 3)}]
        for i in range(12)
    ]
    write_lines(folder / "chats.jsonl", *(json.dumps({"messages": chat}) for chat in chats))
    return folder


def sections_of(shelf: Path, **keys: Any) -> dict[str, Any]:
    asks = {"name": "distill", "teacher": str(shelf / "teacher"), "loss_top_k": 5, **keys}
    return {
        "model": {"name_or_path": str(shelf / "student")},
        "data": {"train": str(shelf / "chats.jsonl"), "eval": str(shelf / "chats.jsonl"), "max_length": 64},
        "objective": asks,
        "batch": {"global_batch_size": 4, "micro_batch_size": 2},
        "optim": {"name": "sgd", "learning_rate": 0.01},
        "schedule": {"name": "constant"},
    }


def recipe_of(shelf: Path, path: Path, **keys: Any) -> str:
    whole = {"strategy": "single", "mixed_precision": "no", **sections_of(shelf, **keys)}
    (path / "recipe.yaml").write_text(json.dumps(whole | {"run": {"max_steps": 2, "output_dir": str(path / "out")}}))
    return str(path / "recipe.yaml")


REFUSED = {
    "another token": (
        "other",
        5,
        "its vocabulary is not the student's: token 1 is '<|im_begin|>', and '<|im_start|>'",
    ),
    "more tokens than there are": ("teacher", 9999, "objective.loss_top_k is 9999, and the teacher scores"),
    "no folder": ("../nowhere/at/all", 5, "no such folder"),
}


@pytest.mark.parametrize(("teacher", "top_k", "words"), REFUSED.values(), ids=REFUSED)
def test_a_teacher_that_does_not_fit_is_refused_by_its_files(shelf, tmp_path, capsys, teacher, top_k, words):
    recipe = recipe_of(shelf, tmp_path, teacher=str(shelf / teacher), loss_top_k=top_k)
    assert main(["check", recipe]) == 2
    error = capsys.readouterr().err
    assert "objective." in error and words in " ".join(error.split())


def test_a_teacher_with_more_rows_is_served_and_a_stream_is_refused(shelf, tmp_path, capsys):
    recipe = recipe_of(shelf, tmp_path, teacher=str(shelf / "padded"))
    assert main(["check", recipe]) == 0
    assert main(["check", recipe, "--set", "data.streaming=true"]) == 2
    assert "asks a teacher about all rows before the first step" in capsys.readouterr().err


@pytest.mark.slow
def test_a_teacher_is_asked_once_and_its_own_student_starts_at_no_divergence(shelf, tmp_path, lab: Lab, monkeypatch):
    """The run of a student that is its own teacher; then again, from what is kept; then with a teacher that changed."""
    monkeypatch.chdir(ROOT)
    own = shutil.copytree(shelf / "student", tmp_path / "own")
    unseen = f'{{"of": "{uuid.uuid4()}, this test",'  # answers are kept from one pytest to the next
    (own / "config.json").write_text((own / "config.json").read_text().replace("{", unseen, 1))
    settings = {
        name: json.dumps(section) for name, section in sections_of(shelf, teacher=str(own), kd_ratio=0.3).items()
    }
    settings |= {"run.output_dir": str(tmp_path / "out"), "run.save_every_steps": "1", "run.max_steps": "2"}

    def run(**more: str) -> tuple[int, str, list[dict[str, Any]]]:
        done = lab.start("single", settings | more)
        lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
        return done.returncode, done.stdout, lines

    code, said, lines = run()
    assert code == 0 and said.count("the teacher answered for") == 1, "the held-out rows are the same"
    first = lines[0]
    assert abs(first["eval_divergence"]) < 1e-6
    assert first["eval_loss"] == pytest.approx(0.7 * first["eval_nll"], abs=1e-6) and first["eval_nll"] > 1
    code, said, again = run()
    assert code == 0 and "the teacher answered" not in said and again[0]["eval_loss"] == first["eval_loss"]
    (own / "config.json").write_text((own / "config.json").read_text().replace("this test", "that test"))
    code, said, _ = run(**{"run.resume": "auto", "run.max_steps": "3"})
    assert code == 2 and "the teacher is not what the checkpoint was made with" in said, said


@pytest.fixture
def engines() -> Iterator[Callable[[str], Engine]]:
    """Engines of one process in a precision; what they set for the process ends with the test."""
    AcceleratorState._reset_state(True)

    def start(precision: str) -> Engine:
        AcceleratorState._reset_state(True)
        changed = [f"mixed_precision='{precision}'"]
        recipe, strategy = load_pair(Path("recipes/quickstart.yaml"), changed, Path("accelerate_configs/single.yaml"))
        plan = make_plan(recipe, strategy, num_processes=1, num_gpus=0, recipe_name="recipes/quickstart.yaml")
        world = World(rank=0, local_rank=0, num_processes=1, num_local=1, is_launched=False)
        return engine_class(strategy)(strategy, plan, world, recipe, timeout=timedelta(minutes=5))

    yield start
    AcceleratorState._reset_state(True)


@pytest.mark.core
def test_another_question_and_another_teacher_are_asked_anew(shelf, tmp_path, monkeypatch, engines):
    """Whatever changes an answer: its temperature and number, the dtype of the forward, the weights; not the loss."""
    monkeypatch.chdir(ROOT)
    own = shutil.copytree(shelf / "teacher", tmp_path / "own")
    tokenizer, tokens = AutoTokenizer.from_pretrained(own), token_set([9, 4, 12, 7, 5])
    recipe = load_recipe(Path("recipes/quickstart.yaml"))

    def notes(engine: Engine, **asks: Any) -> list[str]:
        """Notes of a run on asking about the same rows: one, if there was no answer."""
        question = objective(**{"loss_top_k": 5} | asks).asks
        assert question is not None
        told: list[str] = []
        teacher = find_teacher(question, str(own), tokenizer, None, 64)
        data = TokenSets(train=tokens, eval={}, notes=[])
        with_answers(data, teacher, weights_digest(own), recipe, 0, engine, cache=tmp_path, notes=told)
        return told

    def scale(factor: float) -> None:
        weights = load_file(own / "model.safetensors")
        weights["model.norm.weight"] *= factor
        save_file(weights, own / "model.safetensors", metadata={"format": "pt"})

    whole = engines("no")
    questions: list[dict[str, Any]] = [{}, {"temperature": 2.0}, {"loss_top_k": 4}]
    assert [len(notes(whole, **question)) for question in questions] == [1] * 3
    assert [notes(whole, beta=1.0, kd_ratio=0.2), notes(whole, loss_top_k=4)] == [[], []]
    scale(2)
    assert len(notes(whole)) == 1 and notes(whole) == []
    assert len(notes(engines("bf16"))) == 1
    whole = engines("no")
    assert notes(whole) == []
    on_another = iter([False])  # whose machine has no file
    monkeypatch.setattr(Collectives, "all_true", lambda self, value: next(on_another, value))
    assert len(notes(whole)) == 1, "each asks about a part of the samples"
    scale(math.nan)
    with pytest.raises(RecipeError, match="log-probabilities are not finite"):
        notes(engines("no"))


def test_plan_tells_what_is_kept_of_a_teacher_and_what_it_takes(shelf, tmp_path):
    from cookbook.config.recipe import load_recipe
    from cookbook.forecast.ranking import _teacher_notes
    from cookbook.system.hardware import parse_machines

    recipe = load_recipe(Path(recipe_of(shelf, tmp_path)))
    kept, takes = _teacher_notes(recipe, parse_machines("1x80GB"))
    file = AnswersFile(tmp_path / "kept.safetensors", 1000, 5)
    file.finish()
    size = round((tmp_path / "kept.safetensors").stat().st_size / 1000)  # with a header
    assert f"its 5 likeliest tokens, {size} bytes in the cache for each trained token" in kept
    assert "each process holds the whole teacher" in takes and "take a smaller one" not in takes
    assert "million" not in takes  # 80 GB have no rate
    teacher = AutoModelForCausalLM.from_pretrained(shelf / "teacher")
    matrices = sum(
        matrix.numel() for name, matrix in teacher.named_parameters() if matrix.ndim == 2 and "embed" not in name
    )
    in_bf16 = recipe.model_copy(update={"mixed_precision": "bf16"})
    _, takes = _teacher_notes(in_bf16, parse_machines("8xA100-80GB"))
    fastest = 2 * matrices * 1e6 / (8 * 312e12)  # of a data sheet's dense rate 40 to 70% are reached
    assert f", {fastest / 0.7:.2g} to {fastest / 0.4:.2g} s for a million tokens" in takes


def test_the_answers_of_each_rank_are_taken_without_what_fills_them_up(monkeypatch: pytest.MonkeyPatch):
    """This rank has one target, and the other two."""
    monkeypatch.setattr(teacher.dist, "is_initialized", lambda: True)
    others = {1: [[7], [8]], 2: [[70, 71], [80, 81]]}

    def gather(buffer: torch.Tensor, own: torch.Tensor) -> None:
        buffer.copy_(torch.cat([own, torch.tensor(others[own.shape[1]], dtype=own.dtype)]))

    monkeypatch.setattr(teacher.dist, "all_gather_into_tensor", gather)
    counts = SimpleNamespace(all_gather=lambda count: np.array([[float(count)], [2.0]]))
    tensors = torch.tensor([5]), torch.tensor([[50, 51]]), torch.tensor([[-1.0, -2.0]])
    answers = teacher._of_all_ranks(*tensors, SimpleNamespace(collectives=counts))
    numbers = [[array.tolist() for array in of_rank] for of_rank in answers]
    assert numbers == [[[5], [[50, 51]], [[-1.0, -2.0]]], [[7, 8], others[2], [[70.0, 71.0], [80.0, 81.0]]]]
