"""The forecast of sampling beside published times of vLLM and of transformers' generate, in sampling_published.csv.

A row is requests of one length that are answered with one number of tokens. Its forecast is that of a round with as
many answers, of prompts that differ. vLLM's rates are those of the best mean interval score (Gneiting and Raftery 2007,
section 6.2, for 90 %) of the logarithm of seconds, in which each source has the same weight, whatever its rows. What
such a fit makes of rows that it has not seen is told by one on half of the rows, by the name of each as in
frameworks_fit.py.
"""

import csv
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.forecast_accuracy.frameworks_fit import is_held_out
from benchmarks.forecast_accuracy.models import config_of
from benchmarks.records import dump
from cookbook.config.recipe import Recipe
from cookbook.facts.offline import known_model
from cookbook.forecast.sampler import sampler_memory
from cookbook.forecast.sampler_sizes import SamplerMemory
from cookbook.forecast.sampling_time import (
    VLLM_RATES,
    EngineRates,
    RoundWork,
    round_work,
    seconds_of_generate,
    seconds_of_vllm,
)
from cookbook.forecast.verdict import TraceCache
from cookbook.forecast.vllm_options import SHARE_OF_VLLM
from cookbook.system.hardware import GIB, parse_machines

FACTS = Path(__file__).resolve().parent / "sampling_published.csv"
RESULTS = Path(__file__).resolve().parent / "results" / "sampling.json"
OUTSIDE = 2 / 0.1
SHARES = [share / 100 for share in range(60, 100, 5)]
STEPS = [half * 0.5e-3 for half in range(9)]
ANSWERS = [micro / 1e6 for micro in (0, 10, 20, 40, 60, 80, 100, 150)]
LEFT_OUT_ROWS = {
    "LLM-Inference-Bench's other lengths, batches and models": "more of the same; prompts and answers of 128 and of"
    " 2,048 tokens, 1, 16 and 64 at a time, are here",
    "LLM-Inference-Bench's MI250 and MI300X": "vLLM of 2024 on ROCm often took more than ten times what arithmetic"
    " says, and no table of a later version was found with lengths and answers in flight: `plan` forecasts no time of"
    " vLLM on AMD's GPUs",
    "two A100 PCIe under vLLM 0.19": "its runs repeat prompts that the server had kept: they end before a GPU could"
    " have computed them at its whole peak; so of an RTX 4090's prompts of 2,048 tokens and more",
    "tt-inference-server's Qwen3 on an A100": "which A100 is not said",
    "Lambda's, io.net's, systalyze's and Azure's": "requests that arrive one after another, or answers that end by"
    " themselves: how many are in flight at a time is not known",
    "Oracle's and NVIDIA's tables": "weights in 8 or 4 bits",
}


def facts() -> list[dict[str, str]]:
    """The published rows."""
    with FACTS.open(newline="") as file:
        return list(csv.DictReader(file))


@cache
def _traced(model: str, prompt: int, completion: int) -> tuple[SamplerMemory, RoundWork]:
    """The sampler of rounds of two answers, and one answer's work."""
    known = known_model(model)
    config = config_of(model) if known is None else AutoConfig.for_model(**known["config"])
    recipe = Recipe.model_validate(
        {
            "strategy": "accelerate_configs/single.yaml",
            "mixed_precision": "bf16",
            "model": {"name_or_path": model},
            "data": {"train": "prompts.jsonl", "max_length": prompt + completion},
            "objective": {"name": "grpo"},
            "batch": {"global_batch_size": 2, "micro_batch_size": 1},
            "optim": {"learning_rate": 1e-6},
            "run": {"max_steps": 1, "output_dir": "out"},
            "rounds": {
                "num_rounds": 1,
                "prompts_per_round": 1,
                "num_generations": 2,
                "generation_batch_size": 2,
                "max_completion_length": completion,
                "reward_funcs": ["any"],
            },
        }
    )
    memory, sizes = sampler_memory(config, recipe), TraceCache(config, recipe).sizes
    return memory, round_work(memory, sizes, prompts=1, generations=1, completion=completion)


def work_of(fact: dict[str, str]) -> dict[str, Any]:
    """A row's work, with the answers that are in flight: no more than vLLM has room for."""
    memory, work = _traced(fact["model"], int(fact["prompt"]), int(fact["completion"]))
    machines, at_once = parse_machines(fact["machines"]), int(fact["at_once"])
    assert machines.usable_gib is not None
    if fact["engine"] == "vllm":
        room = SHARE_OF_VLLM * machines.usable_gib * GIB * machines.gpus_each - memory.weights
        at_once = min(at_once, int(room / (memory.cache / memory.answers)))
    numbers = asdict(work) | {"answers": int(fact["requests"]), "prompts": int(fact["requests"])}
    return {"in_flight": at_once, "work": {key: float(f"{value:.7g}") for key, value in numbers.items()}}


_machines = cache(parse_machines)


def forecast_of(fact: dict[str, str], row: dict[str, Any], rates: EngineRates = VLLM_RATES) -> tuple[float, float]:
    """The seconds of a row."""
    return _seconds(fact, row["in_flight"], _work(row), rates)


def _work(row: dict[str, Any]) -> RoundWork:
    whole = ("answers", "prompts", "completion", "layers", "hidden", "launches")
    return RoundWork(**{key: int(value) if key in whole else value for key, value in row["work"].items()})


def _seconds(fact: dict[str, str], in_flight: int, work: RoundWork, rates: EngineRates) -> tuple[float, float]:
    machines = _machines(fact["machines"])
    assert machines.gpu is not None
    if fact["engine"] == "vllm":
        return seconds_of_vllm(work, machines.gpu, in_flight, gpus=machines.gpus_each, rates=rates)
    return seconds_of_generate(work, machines.gpu, in_flight)


Pair = tuple[dict[str, str], dict[str, Any]]


def fitted(pairs: Sequence[Pair]) -> EngineRates:
    """vLLM's rates of the best score: both ends apart, as the score is a sum of what each makes of it."""
    weights = Counter(fact["source"] for fact, _ in pairs)
    rows = [(fact, row["in_flight"], _work(row), math.log(float(fact["seconds"]))) for fact, row in pairs]
    best = [(math.inf, (0.0, 0.0, 0.0))] * 2
    for share, step, answer in product(SHARES, STEPS, ANSWERS):
        rates = EngineRates(memory=(share, share), step=(step, step), answer=(answer, answer))
        scores = [0.0, 0.0]
        for fact, in_flight, work, measured in rows:
            low, high = map(math.log, _seconds(fact, in_flight, work, rates))
            scores[0] += (OUTSIDE * max(0.0, low - measured) - low) / weights[fact["source"]]
            scores[1] += (OUTSIDE * max(0.0, measured - high) + high) / weights[fact["source"]]
        best = [min(kept, (new, (share, step, answer))) for kept, new in zip(best, scores, strict=True)]
    (_, fast), (_, slow) = best
    return EngineRates(memory=(fast[0], slow[0]), step=(fast[1], slow[1]), answer=(fast[2], slow[2]))


def judged(pairs: Sequence[Pair], rates: EngineRates = VLLM_RATES) -> dict[str, Any]:
    """How far the forecasts of some rows are."""
    errors: list[float] = []
    widths: list[float] = []
    inside = 0
    for fact, row in pairs:
        low, high = forecast_of(fact, row, rates)
        measured = float(fact["seconds"])
        errors.append(math.sqrt(low * high) / measured - 1)
        inside += low <= measured <= high
        widths.append(high / low)
    worst = max(errors, key=abs)
    return {
        "rows": len(errors),
        "inside": inside,
        "median": round(statistics.median(map(abs, errors)), 3),
        "worst": round(worst, 3),
        "width": round(statistics.median(widths), 2),
    }


def of_vllm(pairs: Sequence[Pair]) -> list[Pair]:
    """Rows of vLLM."""
    return [(fact, row) for fact, row in pairs if fact["engine"] == "vllm"]


def held_out(pairs: Sequence[Pair]) -> dict[str, Any]:
    """A fit of vLLM's rates on one half, and what it makes of the other."""
    halves = [[pair for pair in of_vllm(pairs) if is_held_out(pair[0]["id"]) == held] for held in (False, True)]
    rates = fitted(halves[0])
    return {"rates": asdict(rates), "own": judged(halves[0], rates), "other": judged(halves[1], rates)}


def section() -> list[str]:
    """A section of the page."""
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    pairs = list(zip(facts(), record["rows"], strict=True))
    half, every = record["half"], judged(of_vllm(pairs))
    generate = judged([pair for pair in pairs if pair[0]["engine"] != "vllm"])
    own, other = half["own"], half["other"]
    lines = [
        "## Seconds of sampling",
        "",
        "```text",
        f"{record['command']}    # {record['seconds']} seconds on two cores",
        "```",
        "",
        f"`plan` forecasts what a round's [sampling](plan.md#of-rounds) takes. Published times of vLLM gave its rates:"
        f" {every['rows']} rows of {len({fact['source'] for fact, _ in of_vllm(pairs)})} sources, in which each source"
        f" has the same weight, as most rows are of one. A fit on {own['rows']} of them, by their names, has"
        f" {other['inside']} of the {other['rows']} others inside its range, whose ends are {other['width']:g} times"
        f" apart; the median error of its middle is {other['median']:.0%}, the largest {other['worst']:+.0%}. The rates"
        f" of the forecast are those of a fit on all: {every['inside']} of {every['rows']} rows are inside,"
        f" {every['width']:g} times apart, with a median error of {every['median']:.0%} and a largest of"
        f" {every['worst']:+.0%}.",
        "",
        "| rates | best | worst |",
        "|---|---|---|",
        f"| share of the memory's bandwidth | {VLLM_RATES.memory[0]:.0%} | {VLLM_RATES.memory[1]:.0%} |",
        f"| ms of a step, beside its kernels | {VLLM_RATES.step[0] * 1e3:g} | {VLLM_RATES.step[1] * 1e3:g} |",
        f"| microseconds of an answer in a step | {VLLM_RATES.answer[0] * 1e6:g} | {VLLM_RATES.answer[1] * 1e6:g} |",
        "",
        f"transformers' `generate` waits for the host, which launches {LAUNCHES}; of {generate['rows']} published"
        f" rows, each of one answer at a time, {generate['inside']} are inside, {generate['width']:g} times apart, with"
        f" a median error of {generate['median']:.0%}. No row of it has several answers at a time, and none of either"
        " program has an adapter.",
        "",
        "| source | program | GPUs | rows | inside | median error | largest |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, ...], list[Pair]] = {}
    for fact, row in pairs:
        program = f"{fact['engine']} {fact['version']}".strip()
        groups.setdefault((f"[{fact['source']}]({fact['url']})", program, fact["machines"]), []).append((fact, row))
    for names, rows in groups.items():
        of_group = judged(rows)
        cells = [*names, f"{of_group['rows']}", f"{of_group['inside']}"]
        cells += [f"{of_group['median']:.0%}", f"{of_group['worst']:+.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Nine of the {every['rows'] - every['inside']} rows outside are of LLM-Inference-Bench and slower than the"
        " range: of 64 answers of 4,096 tokens with their prompts, and of 16 of Llama 2 70B. It does not say why.",
        "",
        *[f"- Left out: {rows}: {why}." for rows, why in LEFT_OUT_ROWS.items()],
    ]
    return lines


LAUNCHES = "each operation by itself: 9 to 53 microseconds, from the fastest of these rows to what was measured"
LAUNCHES += " [on an H100](on_gpu.md)"


def main(*, only_page: bool) -> None:
    """Writes the results, unless only the page is asked for, then the page."""
    import time

    from benchmarks.forecast_accuracy import published  # which asks for the section

    if not only_page:
        begun = time.monotonic()
        rows = [{"id": fact["id"]} | work_of(fact) for fact in facts()]
        pairs = list(zip(facts(), rows, strict=True))
        half, rates = held_out(pairs), asdict(fitted(of_vllm(pairs)))
        for fact, row in pairs:
            row["forecast"] = [float(f"{end:.4g}") for end in forecast_of(fact, row)]
        record: dict[str, Any] = {"command": "python benchmarks/forecast_accuracy/run.py sampling"}
        record |= {"seconds": round(time.monotonic() - begun), "half": half, "rates": rates, "rows": rows}
        RESULTS.write_text(dump(record) + "\n", encoding="utf-8")
    published.main(only_page=True)
