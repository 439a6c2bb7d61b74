"""Protects the forecast of how long a round samples: by arithmetic, and by published times.

python -m pytest -q tests/test_sampling_time.py
"""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from benchmarks.forecast_accuracy import sampling
from cookbook.commands.cli import main
from cookbook.config.recipe import load_recipe
from cookbook.forecast.sampler import SamplerForecast, forecast_sampler, sampler_memory
from cookbook.forecast.sampling_time import EngineRates, SamplingTime, round_work, seconds_of_generate, seconds_of_vllm
from cookbook.forecast.step_time import share_of_peak
from cookbook.forecast.verdict import TraceCache
from cookbook.system.hardware import find_gpu, parse_machines
from tests.test_forecast_sampler import GRPO, LLAMA

UNTIED = LLAMA | {"tie_word_embeddings": False}
PLAIN = LlamaConfig(**UNTIED)
MIXTURE = Qwen3MoeConfig(
    **UNTIED, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1
)
SHORT = ["data.max_length=100", "rounds.max_completion_length=40", "rounds.num_generations=4", "adapter=null"]
FEW = [*SHORT, "rounds.prompts_per_round=6", "rounds.generation_batch_size=8", "batch.global_batch_size=8"]


def of(config: PreTrainedConfig, *assignments: str, on: str = "1xH100", trainer: int | None = None) -> SamplerForecast:
    recipe = load_recipe(Path(GRPO), [*FEW, *assignments])
    sampler = forecast_sampler(config, recipe, TraceCache(config, recipe).sizes, parse_machines(on), trainer)
    assert sampler is not None
    return sampler


def work(config: PreTrainedConfig) -> Any:
    recipe = load_recipe(Path(GRPO), FEW)
    memory, sizes = sampler_memory(config, recipe), TraceCache(config, recipe).sizes
    return round_work(memory, sizes, prompts=6, generations=4, completion=40)


def test_a_step_reads_what_the_model_s_sizes_say():
    """Matrices of 3 layers, norms and the head in bf16, and not the embedding; the keys and values of a prompt of 60
    tokens and 20 of the answer, which is the mean while 40 are sampled."""
    needs = work(PLAIN)
    matrices = 3 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128) + 512 * 64
    norms = 3 * 2 * 64 + 64
    assert 0 <= needs.weights - 2 * (matrices + norms) <= 64 and needs.experts == 0  # and rotary frequencies
    assert needs.cache == pytest.approx(2 * 2 * 16 * 3 * 2 * (60 + 40 / 2), rel=0.01)
    assert needs.token_flops == 2 * matrices
    assert needs.launches > 3 * 20


def test_a_mixture_reads_the_experts_that_any_answer_chose():
    needs = work(MIXTURE)
    experts = 2 * 3 * 8 * 3 * 64 * 32
    assert (needs.experts, needs.chosen) == (experts, 0.25)
    assert needs.read(1) == needs.weights + experts / 4
    assert needs.read(2) == needs.weights + experts * (1 - 0.75**2)
    assert needs.read(1000) == pytest.approx(needs.weights + experts)


ONLY_MEMORY = EngineRates(memory=(1.0, 1.0), step=(0.0, 0.0), answer=(0.0, 0.0))


def test_vllm_s_time_is_that_of_a_loop_over_steps():
    """24 answers in flights of 10, 10 and 4: each step alone by hand, with prompts once at best, 4 times at worst."""
    gpu, needs = find_gpu("H100"), work(PLAIN)
    assert gpu is not None and gpu.half_flops is not None
    decoding = 40 * sum((needs.weights + count * needs.cache) / gpu.bandwidth for count in (10, 10, 4))
    worst, best = share_of_peak(gpu)
    low, high = seconds_of_vllm(needs, gpu, 10, rates=ONLY_MEMORY)
    assert low == pytest.approx(decoding + 6 * needs.prompt_flops / gpu.half_flops / best)
    assert high == pytest.approx(decoding + 24 * needs.prompt_flops / gpu.half_flops / worst)
    beside = replace(ONLY_MEMORY, step=(1e-3, 2e-3), answer=(1e-5, 1e-5))
    slow = seconds_of_vllm(needs, gpu, 10, rates=beside)
    assert slow[0] - low == pytest.approx(40 * (3 * 1e-3 + 24 * 1e-5))
    assert slow[1] - high == pytest.approx(40 * (3 * 2e-3 + 24 * 1e-5))


def test_two_servers_take_half_and_two_gpus_of_one_server_more_than_half():
    gpu = find_gpu("H100")
    assert gpu is not None
    needs = replace(work(PLAIN), weights=14e9, cache=1e8)
    alone, halves = seconds_of_vllm(needs, gpu, 12), seconds_of_vllm(needs, gpu, 12, servers=2)
    shared = seconds_of_vllm(needs, gpu, 12, gpus=2)
    for end in (0, 1):
        assert halves[end] == pytest.approx(alone[end] / 2, rel=0.02)
        assert alone[end] / 2 < shared[end] < alone[end]


def test_generate_waits_for_the_longer_of_launches_and_memory():
    gpu, needs = find_gpu("H100"), work(PLAIN)
    assert gpu is not None
    low, high = seconds_of_generate(needs, gpu, 8)
    assert (low, high) == (
        pytest.approx(3 * 40 * needs.launches * 9e-6, rel=0.01),
        pytest.approx(3 * 40 * needs.launches * 53e-6, rel=0.01),
    )
    large = replace(needs, weights=1e12)
    assert seconds_of_generate(large, gpu, 8)[1] == pytest.approx(3 * 40 * 1e12 / (0.6 * gpu.bandwidth), rel=0.01)


def times(**others: Any) -> SamplingTime:
    ends = {"sampling": (10.0, 20.0), "proof": (1.0, 2.0), "has_own_gpus": False, "beside": False}
    return SamplingTime(**(ends | others), answers=1, completion=1, at_once=1, by="one")


def test_a_round_is_the_sum_or_the_longer_of_both():
    assert times().of_round((5.0, 30.0)) == (16.0, 52.0)
    assert times(beside=True).of_round((5.0, 30.0)) == (11.0, 52.0), "one GPU does both"
    servers = times(beside=True, has_own_gpus=True)
    assert servers.of_round((5.0, 30.0)) == (11.0, 32.0) and servers.of_round((40.0, 50.0)) == (40.0, 52.0)


@pytest.mark.parametrize(
    ("assignment", "on", "why"),
    [
        ("rounds.sampler=vllm", "1xMI300X", "no published time of vLLM on a MI300X was fitted"),
        ("rounds.sampler=vllm --quantization fp8", "1xH100", "no published time was fitted with --quantization"),
        ("rounds.sampler=vllm --enforce-eager", "1xH100", "no published time was fitted with --enforce-eager"),
        ("rounds.sampler=vllm --pipeline-parallel-size 2", "2xH100", "fitted with --pipeline-parallel-size"),
        ("mixed_precision=no", "1xH100", "no forecast of time for it"),
        ("mixed_precision=fp16", "1xH100", "it samples in float32"),
        ("seed=1", "1x80GB", "name the GPU"),
        ("seed=1", "cpu", "no forecast of time for a CPU"),
    ],
)
def test_what_no_published_time_tells_has_no_forecast(assignment: str, on: str, why: str):
    sampler = of(PLAIN, assignment, on=on)
    assert sampler.time is None and why in str(sampler.no_time)


def test_an_environment_has_no_forecast():
    turns = ["rounds.reward_funcs=[]", "rounds.user_message=null", "rounds.environment=Any"]
    assert of(PLAIN, *turns).no_time == "how long an environment takes is not known"


def test_the_answers_in_flight_are_those_of_the_recipe_of_vllm_s_options_and_of_the_room():
    def in_flight(*assignments: str, on: str = "1xH100") -> tuple[int, str]:
        time = of(PLAIN, *assignments, on=on).time
        assert time is not None
        return time.at_once, time.by

    assert in_flight() == (8, "the first H100")
    assert in_flight("rounds.sampler=vllm") == (8, "the first H100")
    assert in_flight("rounds.sampler=vllm --max_num_seqs=3") == (3, "the first H100")
    assert in_flight("rounds.sampler=vllm --data-parallel-size 2 --max-num-seqs 3", on="2xH100") == (6, "2 H100")
    assert in_flight("rounds.sampler=[http://a:1, http://b:1]") == (8, "2 servers with one H100 each")
    each = 2 * 2 * 16 * 3 * 2 * 100
    assert in_flight(f"rounds.sampler=vllm --kv-cache-memory-bytes {5 * each}") == (5, "the first H100")


PAIRS = list(zip(sampling.facts(), json.loads(sampling.RESULTS.read_text())["rows"], strict=True))


def test_every_published_row_is_forecast_as_it_is_recorded():
    assert [fact["id"] for fact, _ in PAIRS] == [row["id"] for _, row in PAIRS] and len(PAIRS) > 150
    for fact, row in PAIRS:
        assert sampling.forecast_of(fact, row) == pytest.approx(row["forecast"], rel=1e-3)
    cards = {fact["machines"].partition("x")[2] for fact, _ in PAIRS}
    assert len(cards) >= 6 and len({fact["source"] for fact, _ in PAIRS}) >= 6


def test_most_published_rows_lie_inside_and_none_would_at_half_the_speed():
    vllm = sampling.of_vllm(PAIRS)
    judged = sampling.judged(vllm)
    assert judged["inside"] > 0.85 * judged["rows"] and judged["median"] < 0.25
    slower = [(fact | {"seconds": str(2.5 * float(fact["seconds"]))}, row) for fact, row in vllm]
    assert sampling.judged(slower)["inside"] < 0.1 * judged["rows"]


def test_a_published_row_is_traced_as_it_is_recorded():
    fact, row = next((fact, row) for fact, row in PAIRS if fact["model"] == "Qwen/Qwen3-8B")
    assert sampling.work_of(fact) == {key: row[key] for key in ("in_flight", "work")}


@pytest.mark.slow
def test_the_rates_are_those_of_a_fit_on_all_rows():
    assert asdict(sampling.fitted(sampling.of_vllm(PAIRS))) == asdict(sampling.VLLM_RATES)


@pytest.mark.slow
def test_plan_says_how_long_a_round_samples_and_trains(capsys):
    words = ["plan", GRPO, "--strategy", "single", "--gpus", "1xA100-80GB"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    sampler = answer["sampler"]
    low, high = sampler["seconds"]
    assert sampler["answers_of_round"] == 5120 and sampler["in_flight"] == 320 and 0 < low < high
    assert main([*words, "--price", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"round \S+ to \S+ hours by published rates: sampling \S+ to \S+ minutes for 5,120 answers", said)
    assert "of 1,024 tokens, the most that they may have" in said and "one after the other; training" in said
    assert main([*words, "--all"]) == 0
    assert "a round's sampling, by the rates of published runs: " in " ".join(capsys.readouterr().out.split())
