"""A plain training loop that shares no code with this project: torch, transformers, peft and json.

One process, float64, one sample at a time without padding, every row in each step. What it computes is what a run of
any strategy should: losses, gradient norms, rates and weights.
"""

import json
import math
import statistics
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

IGNORED = -100
SCORED = ("reward", "classify", "regress")
"""Objectives of a head that scores sequences, which transformers' own classes have."""


@dataclass
class Setup:
    """A training, in the words of the papers."""

    model: Path
    rows: Path
    objective: str = "sft"
    """sft, cpt, dpo, ipo, kto (with its reference point at 0), orpo, cpo, simpo, grpo, distill, or of SCORED."""
    train_on: str = "assistant"
    beta: float = 0.1
    margin: float = 0.0
    nll_weight: float = 0.0
    label_smoothing: float = 0.0
    classes: tuple[str, ...] = ("bad", "fair", "good")
    center: float = 0.0
    """reward: the coefficient of the square of a pair's sum."""
    mean: str = "tokens"
    """grpo: over tokens, over answers, or a number of tokens that divides the sum of each answer."""
    deviation: str = "group"
    """grpo: what divides advantages; group, batch or none."""
    low: float = 0.2
    high: float = 0.2
    corrected: bool = True
    """grpo: whether the divergence is multiplied by the ratio."""
    whole: bool = False
    """grpo: whether the ratio is that of the whole answer."""
    teacher: Path | None = None
    """distill: whose `kept` likeliest tokens are learnt, by the divergence of `beta`, with `share` of the loss."""
    kept: int = 0
    temperature: float = 1.0
    share: float = 0.0
    optimizer: str = "adamw"
    peak: float = 1e-3
    weight_decay: float = 0.0
    clip: float = 0.0
    """0: gradients are not clipped."""
    schedule: str = "cosine"
    warmup: int = 0
    decay_steps: int = 0
    least: float = 0.0
    """The rate at which a decay ends."""
    steps: int = 12
    adapter: Path | None = None
    """peft's folder with the first weights of a LoRA."""
    dropout: float = 0.0
    """On the adapter's input."""
    noise: float = 0.0
    """NEFTune's alpha."""
    seed: int = 42
    """Gives the order of the rows, and what is drawn."""


@dataclass
class Answer:
    """The tokens of a chat or a text, (1, T), and its labels, IGNORED where there is no loss."""

    ids: torch.Tensor
    labels: torch.Tensor


def train(setup: Setup) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Loss, grad_norm and learning_rate of each step, and the trained weights by name."""
    tokenizer = AutoTokenizer.from_pretrained(setup.model)
    samples = [sample_of(json.loads(line), tokenizer, setup) for line in setup.rows.open()]
    auto: Any = AutoModelForSequenceClassification if setup.objective in SCORED else AutoModelForCausalLM
    model: Any = auto.from_pretrained(setup.model, dtype=torch.float64)
    references: list[list[torch.Tensor]] = [[] for _ in samples]
    if setup.objective not in SCORED:
        with torch.no_grad():
            references = [[log_likelihoods(model, answer) for answer in answers] for answers, _ in samples]
    if setup.objective == "grpo":
        samples = with_advantages(samples, setup)
    if setup.objective == "distill":
        taught: Any = AutoModelForCausalLM.from_pretrained(setup.teacher, dtype=torch.float64)
        with torch.no_grad():
            samples = [(answers, taught(input_ids=answers[0].ids).logits[0, :-1]) for answers, _ in samples]
    if setup.adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(setup.adapter), is_trainable=True, autocast_adapter_dtype=False)
        model = model.double()
    drawn = {"place": 0}
    draw_by_hand(model, setup, drawn)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = optimizer_of(setup, list(trained.values()))
    divisor = number_of(samples, setup)
    steps = []
    for step in range(setup.steps):
        rate = setup.peak * rate_of(setup, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        total = 0.0
        order = np.random.RandomState([setup.seed, step]).permutation(len(samples)).tolist()
        for i, ((answers, is_good), reference) in enumerate(zip(samples, references, strict=True)):
            drawn["place"] = step * len(samples) + order.index(i)
            loss = loss_of(model, answers, is_good, reference, setup) / divisor
            loss.backward()
            total += loss.item()
        limit = setup.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), limit).item()
        optimizer.step()
        steps.append({"loss": total, "grad_norm": norm, "learning_rate": rate})
    return steps, {name: parameter.detach() for name, parameter in trained.items()}


def mixed(words: np.ndarray) -> np.ndarray:
    """MurmurHash3.cpp, fmix32, of words in 64 bits."""
    words = words ^ words >> 16
    words = words * 0x85EBCA6B % 2**32
    words = words ^ words >> 13
    words = words * 0xC2B2AE35 % 2**32
    return words ^ words >> 16


def draws_of(seed: int, place: int, sequence: int, length: int, layer: str, width: int) -> np.ndarray:
    """Whole numbers below 65,536 for each token and feature, (length, width), as docs/recipes.md has them."""
    step, word = 0x9E3779B9, np.zeros(1, np.uint64)
    for value in (seed % 2**32, seed >> 32, place % 2**32, place >> 32, sequence):
        word = mixed(((word ^ np.uint64(value)) + step) % 2**32)
    tokens = mixed((word + np.arange(length, dtype=np.uint64) * step) % 2**32)
    pairs = np.arange(1, (width + 1) // 2 + 1, dtype=np.uint64)
    features = mixed((pairs * step + mixed(np.uint64(zlib.crc32(layer.encode())))) % 2**32)
    words = mixed((tokens[:, None] + features) % 2**32)
    halves = np.stack([words % 2**16, words >> 16], -1).reshape(length, -1)[:, :width]
    return (halves + 2**15) % 2**16


def draw_by_hand(model: Any, setup: Setup, now: dict[str, int]) -> None:
    """Drop the input of each adapted layer, and disturb the embeddings, for the sample that `now` has."""
    of_drop = round(setup.dropout * 2**16)

    class Dropped(torch.nn.Module):
        def __init__(self, layer: str) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            drawn = draws_of(setup.seed, now["place"], 0, *hidden.shape[1:2], self.layer, hidden.shape[2])
            return hidden * torch.from_numpy(drawn >= of_drop) / (1 - of_drop / 2**16)

    for name, layer in model.named_modules():
        if of_drop and hasattr(layer, "lora_dropout"):
            layer.lora_dropout["default"] = Dropped(name.removeprefix("base_model.model."))

    def disturb(_: Any, __: Any, embeddings: torch.Tensor) -> torch.Tensor:
        _, length, width = embeddings.shape
        drawn = draws_of(setup.seed, now["place"], 0, length, "neftune", width).astype(np.float64)
        even = torch.from_numpy((drawn + 0.5) / 2**15 - 1)
        return embeddings + even * setup.noise / math.sqrt(length * width)

    if setup.noise:
        model.get_input_embeddings().register_forward_hook(disturb)


def number_of(samples: list[tuple[list[Answer], Any]], setup: Setup) -> float:
    """Divisor of the sum of all losses."""
    if setup.objective in ("sft", "cpt", "distill") or (setup.objective == "grpo" and setup.mean == "tokens"):
        return sum(int((answer.labels[:, 1:] != IGNORED).sum()) for answers, _ in samples for answer in answers)
    return sum(len(answers) for answers, _ in samples) if setup.objective == "grpo" else len(samples)


def with_advantages(samples: list[tuple[list[Answer], Any]], setup: Setup) -> list[tuple[list[Answer], Any]]:
    """arXiv 2402.03300, section 4.1.2: rewards become distances from the mean of the group, in deviations."""
    of_all = statistics.stdev([reward for _, (rewards, _) in samples for reward in rewards])
    scored = []
    for answers, (rewards, sampled) in samples:
        divisor = {"group": statistics.stdev(rewards) + 1e-4, "batch": of_all + 1e-4, "none": 1.0}[setup.deviation]
        mean = sum(rewards) / len(rewards)
        scored.append((answers, ([(reward - mean) / divisor for reward in rewards], sampled)))
    return scored


def sample_of(row: dict[str, Any], tokenizer: Any, setup: Setup) -> tuple[list[Answer], Any]:
    """The answers of a row, and whether it is a good one; of a group its rewards, and the log-probabilities with which
    its answers were sampled, if it has them.
    """
    if setup.objective == "grpo" and "prompt_ids" in row:
        lines = zip(row["completion_ids"], row["completion_mask"], strict=True)
        return [sampled_before(row["prompt_ids"], *line) for line in lines], (row["rewards"], None)
    if setup.objective == "grpo":
        answers = [answer_of(row["prompt"] + completion, tokenizer, "last") for completion in row["completions"]]
        return answers, (row["rewards"], row.get("logprobs"))
    if setup.objective == "cpt":
        ids = torch.tensor([[*tokenizer(row["text"]).input_ids, tokenizer.eos_token_id]])
        return [Answer(ids, ids)], True
    if setup.objective in ("dpo", "ipo", "orpo", "cpo", "simpo", "reward"):
        return [answer_of(row[which], tokenizer, "last") for which in ("chosen", "rejected")], True
    if setup.objective == "classify":
        ids = torch.tensor([tokenizer(row["text"]).input_ids])
        return [Answer(ids, ids)], setup.classes.index(row["label"])
    if setup.objective == "regress":
        return [answer_of(row["messages"], tokenizer, "last")], row["label"]
    if setup.objective == "kto":
        return [answer_of(row["prompt"] + row["completion"], tokenizer, "last")], row["label"]
    return [answer_of(row["messages"], tokenizer, setup.train_on)], True


def answer_of(messages: list[dict[str, str]], tokenizer: Any, train_on: str) -> Answer:
    """The labels are the assistant's texts with the token that ends their turn, found in the rendered text."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans, start = [], 0
    for message in messages:
        whole = f"{message['content']}{tokenizer.eos_token}"
        start = text.index(whole, start)
        end = start + len(whole)
        spans += [(start, end)] if message["role"] == "assistant" else []
        start = end
    spans = {"assistant": spans, "last": spans[-1:], "all": [(0, len(text))]}[train_on]
    labels = [
        token if any(start <= first and last <= end for start, end in spans) else IGNORED
        for token, (first, last) in zip(encoded.input_ids, encoded.offset_mapping, strict=True)
    ]
    return Answer(torch.tensor([encoded.input_ids]), torch.tensor([labels]))


def sampled_before(asked: list[int], ids: list[int], mask: list[int]) -> Answer:
    """Token ids after those of a prompt, of which those whose mask is 1 carry loss."""
    labels = [IGNORED] * len(asked) + [token if own else IGNORED for token, own in zip(ids, mask, strict=True)]
    return Answer(torch.tensor([asked + ids]), torch.tensor([labels]))


def log_likelihoods(model: Any, answer: Answer) -> torch.Tensor:
    """Log-likelihoods of the labelled tokens, each given the tokens before it."""
    labels = answer.labels[0, 1:]
    logits = model(input_ids=answer.ids).logits[0, :-1]
    return -F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")[labels != IGNORED]


def loss_of(
    model: Any, answers: list[Answer], is_good: Any, reference: list[torch.Tensor], setup: Setup
) -> torch.Tensor:
    """The loss of a row: summed over its labels for sft and cpt, over its answers for grpo, else that of the pair or
    the answer."""
    if setup.objective == "distill":
        return distance_from(model, answers[0], is_good, setup)
    if setup.objective in SCORED:
        return loss_of_scores([model(input_ids=answer.ids).logits[0] for answer in answers], is_good, setup)
    if setup.objective in ("sft", "cpt") and setup.label_smoothing:
        return smoothed(model, answers[0], setup.label_smoothing)
    logps = [log_likelihoods(model, answer) for answer in answers]
    beta = setup.beta
    if setup.objective == "grpo":
        advantages, sampled = is_good
        old = reference if sampled is None else [torch.tensor(logps, dtype=torch.float64) for logps in sampled]
        return sum(map(loss_of_answer, logps, old, reference, advantages, [setup] * len(logps)), torch.tensor(0.0))
    if setup.objective in ("sft", "cpt"):
        return -logps[0].sum()
    if setup.objective == "kto":  # arXiv 2402.01306, eqs. 7 and 8, z0 = 0
        ratio = logps[0].sum() - reference[0].sum()
        return 1 - torch.sigmoid(beta * ratio if is_good else -beta * ratio)
    if setup.objective == "orpo":  # arXiv 2403.07691, eqs. 4 to 7
        means = [likelihoods.mean() for likelihoods in logps]
        odds = [mean.exp() / (1 - mean.exp()) for mean in means]
        return -means[0] - beta * F.logsigmoid(torch.log(odds[0] / odds[1]))
    if setup.objective in ("cpo", "simpo"):  # arXiv 2401.08417, eq. 3; arXiv 2405.14734, eq. 6
        rewards = [
            beta * (likelihoods.mean() if setup.objective == "simpo" else likelihoods.sum()) for likelihoods in logps
        ]
        return -F.logsigmoid(rewards[0] - rewards[1] - setup.margin) - setup.nll_weight * logps[0].mean()
    ratios = [likelihoods.sum() - first.sum() for likelihoods, first in zip(logps, reference, strict=True)]
    if setup.objective == "ipo":  # arXiv 2310.12036, eq. 17, on means over tokens
        per_token = [ratio / len(likelihoods) for ratio, likelihoods in zip(ratios, logps, strict=True)]
        return (per_token[0] - per_token[1] - 1 / (2 * beta)) ** 2
    margin, swapped = beta * (ratios[0] - ratios[1]), setup.label_smoothing  # arXiv 2305.18290, eq. 7
    return -(1 - swapped) * F.logsigmoid(margin) - swapped * F.logsigmoid(-margin)


def smoothed(model: Any, answer: Answer, share: float) -> torch.Tensor:
    """arXiv 1512.00567, section 7, by the class that Trainer has for it: a mean, times the number of labels."""
    from transformers.trainer_pt_utils import LabelSmoother

    labels = answer.labels.masked_fill(answer.labels == IGNORED, -100)
    output = model(input_ids=answer.ids)
    return LabelSmoother(share)(output, labels, shift_labels=True) * (labels[:, 1:] != -100).sum()


def distance_from(model: Any, answer: Answer, taught: torch.Tensor, setup: Setup) -> torch.Tensor:
    """arXiv 2306.13649, eq. 1, token by token, over the teacher's likeliest tokens and all others as one."""
    labels, total = answer.labels[0, 1:], torch.tensor(0.0, dtype=torch.float64)
    logits = model(input_ids=answer.ids).logits[0, :-1]
    for i in (labels != IGNORED).nonzero().flatten().tolist():
        teacher, student = (torch.softmax(scores[i] / setup.temperature, 0) for scores in (taught, logits))
        likeliest = teacher.argsort(descending=True)[: setup.kept]
        teacher, student = (
            torch.cat([shares[likeliest], 1 - shares[likeliest].sum()[None]]) for shares in (teacher, student)
        )
        if setup.kept == len(logits[i]):
            teacher, student = teacher[:-1], student[:-1]
        mixture = setup.beta * teacher + (1 - setup.beta) * student
        if setup.beta in (0, 1):
            first, second = (teacher, student) if setup.beta == 0 else (student, teacher)
            divergence = (first * (first / second).log()).sum()
        else:
            divergence = setup.beta * (teacher * (teacher / mixture).log()).sum()
            divergence = divergence + (1 - setup.beta) * (student * (student / mixture).log()).sum()
        total = total + setup.share * divergence + (1 - setup.share) * F.cross_entropy(logits[i], labels[i])
    return total


def loss_of_scores(scores: list[torch.Tensor], label: Any, setup: Setup) -> torch.Tensor:
    """arXiv 2203.02155, eq. 1, and arXiv 2312.09244, eq. 2; or by a label."""
    if setup.objective == "classify":
        return torch.log(torch.exp(scores[0]).sum()) - scores[0][label]
    if setup.objective == "regress":
        return (scores[0][0] - label) ** 2
    chosen, rejected = (score[0] for score in scores)
    return -torch.log(torch.sigmoid(chosen - rejected)) + setup.center * (chosen + rejected) ** 2


def loss_of_answer(
    logps: torch.Tensor, old: torch.Tensor, first: torch.Tensor, advantage: float, setup: Setup
) -> torch.Tensor:
    """arXiv 2402.03300, eqs. 3 and 4, token by token; over whole answers arXiv 2507.18071, eqs. 5 and 7."""
    total = torch.tensor(0.0, dtype=torch.float64)
    for i in range(len(logps)):
        ratio = torch.exp((logps - old).mean() if setup.whole else logps[i] - old[i])
        clipped = torch.clamp(ratio, 1 - setup.low, 1 + setup.high)
        away = first[i] - logps[i]
        divergence = (away.exp() - away - 1) * (ratio if setup.corrected else 1)  # arXiv 2512.02556
        total = total - torch.min(ratio * advantage, clipped * advantage) + setup.beta * divergence
    return total / (1 if setup.mean == "tokens" else len(logps) if setup.mean == "answers" else int(setup.mean))


def optimizer_of(setup: Setup, trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices decay, biases and norms do not."""
    groups = [
        {"params": [weight for weight in trained if weight.ndim >= 2], "weight_decay": setup.weight_decay},
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    if setup.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=setup.peak)
    return torch.optim.AdamW(groups, lr=setup.peak)


def rate_of(setup: Setup, step: int) -> float:
    """The share of the peak in a step, counted from 0."""
    least = setup.least / setup.peak
    warmup, steps = setup.warmup, setup.steps
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    down = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "wsd": min(1.0, (steps - step) / max(1, setup.decay_steps)),
    }
    return {
        **{name: share * (1 - least) + least for name, share in down.items()},
        "constant": 1.0,
        "inverse_sqrt": math.sqrt(warmup / (step + 1)),
    }[setup.schedule]
