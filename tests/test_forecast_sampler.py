"""Protects the forecast of what samples in rounds: to the byte where arithmetic or a real model's cache tells it.

python -m pytest -q tests/test_forecast_sampler.py
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig

from cookbook.commands.cli import main
from cookbook.commands.rounds import sampling
from cookbook.config.recipe import Recipe, load_recipe
from cookbook.config.strategy import load_strategy
from cookbook.forecast import sampler_trace
from cookbook.forecast.any_gpus import for_each_card
from cookbook.forecast.ranking import forecast_all
from cookbook.forecast.sampler import SamplerForecast, forecast_sampler, sampler_memory
from cookbook.forecast.verdict import TraceCache
from cookbook.system.hardware import GIB, GPUS, Machines, find_gpu, parse_machines

LLAMA = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
GRPO = "recipes/qwen25_3b/grpo_lora.yaml"


def recipe(*assignments: str) -> Recipe:
    """6 prompts with 4 answers each, of which `generate` makes 3 x 4 at a time, each of at most 100 tokens."""
    few = ["rounds.num_generations=4", "rounds.prompts_per_round=6", "rounds.generation_batch_size=14"]
    lengths = ["data.max_length=100", "rounds.max_completion_length=40", "batch.global_batch_size=8"]
    return load_recipe(Path(GRPO), [*few, *lengths, *assignments])


def test_weights_adapter_and_cache_are_those_of_arithmetic():
    memory = sampler_memory(LlamaConfig(**LLAMA), recipe("adapter.rank=8"))
    assert (memory.answers, memory.length) == (12, 100)
    # Keys and values of 2 heads of 16 in 3 layers, in bf16, of 100 tokens of 12 answers.
    assert memory.cache == 2 * 2 * 16 * 3 * 2 * 100 * 12
    attention, mlp = 64 * (64 + 32 + 32) + 64 * 64, 3 * 64 * 128
    parameters = 512 * 64 + 3 * (attention + mlp + 2 * 64) + 64  # the embedding is the head too
    rotary = 2 * 8 * 2 if memory.weights != 2 * parameters else 0  # the frequencies, and their originals
    assert memory.weights - 2 * parameters in (0, rotary, 2 * rotary)
    projections = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    assert memory.adapter == 2 * 3 * sum(8 * (inside + outside) for inside, outside in projections)
    assert memory.peak > memory.cache and memory.total == memory.weights + memory.adapter + memory.peak
    assert sampler_memory(LlamaConfig(**LLAMA), recipe("adapter=null")).adapter == 0


WINDOW = {"sliding_window": 16, "num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}


@pytest.mark.parametrize(
    "config", [LlamaConfig(**LLAMA), Gemma3TextConfig(**LLAMA | WINDOW)], ids=["full attention", "sliding windows"]
)
def test_the_cache_is_that_of_the_real_model(config: PreTrainedConfig):
    """Real tensors, as `generate` holds them: of layers with a window no more than that has."""
    forecast = sampler_memory(config, recipe("adapter=null"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        cache = model(torch.zeros(12, 99, dtype=torch.long), use_cache=True).past_key_values
        cache = model(torch.zeros(12, 1, dtype=torch.long), past_key_values=cache, use_cache=True).past_key_values
    tensors = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    held = sum(-(-tensor.untyped_storage().nbytes() // 512) * 512 for tensor in tensors)  # as CUDA's allocator rounds
    assert forecast.cache == held
    everything = 12 * 100 * 2 * 2 * 2 * 16 * config.num_hidden_layers
    assert (forecast.cache < 0.5 * everything) == ("sliding_attention" in (getattr(config, "layer_types", None) or []))


def at(gib: float | None, *assignments: str, trainer: int | None = None, gpus: int = 1) -> SamplerForecast:
    machines = Machines(text="there", gpus_each=gpus if gib else 0, usable_gib=gib)
    written, config = recipe(*assignments), LlamaConfig(**LLAMA)
    sampler = forecast_sampler(config, written, TraceCache(config, written).sizes, machines, trainer)
    assert sampler is not None
    return sampler


def test_what_does_not_fit_is_answered_with_the_most_answers_that_do():
    many = "rounds.prompts_per_round=600", "rounds.generation_batch_size=2000"
    memory = at(1.0, *many).memory
    assert memory is not None and memory.answers == 2000 and memory.sampling > memory.proof
    room = (memory.total - 1) / GIB
    refused = at(room, *many)
    assert not refused.fits and "before each run begins: does not fit" in refused.words
    (most,) = re.findall(r"write rounds.generation_batch_size: (\d+)", refused.words)
    assert int(most) == 1996, "one prompt's 4 less"
    assert at(room, *many, f"rounds.generation_batch_size={most}").fits
    assert "take a larger GPU" in at((memory.weights + 1) / GIB, *many).words


def test_beside_a_run_there_is_what_the_run_leaves():
    memory = at(1.0).memory
    assert memory is not None
    room, stale = (memory.total + 1000) / GIB, "rounds.max_staleness=1"
    assert at(room, trainer=1001).fits and at(room, stale, trainer=1000).fits
    refused = at(room, stale, trainer=1001)
    assert not refused.fits and "beside the run, which leaves" in refused.words
    assert "nothing is judged" in at(None, stale, trainer=1001).words


@pytest.mark.parametrize(
    ("written", "gpus", "share", "copies"),
    [
        ("vllm", 1, 0.92, 1),
        ("vllm --gpu-memory-utilization 0.5", 1, 0.5, 1),
        ("vllm --gpu-memory-utilization=0.5 --tensor-parallel-size 2", 2, 1.0, 1),
        ("vllm --data_parallel_size 2", 2, 0.92, 2),
        ("vllm --tensor-parallel-size=2 --data-parallel-size=2", 4, 1.84, 2),
        ("vllm --tensor-parallel-size 8 --tensor-parallel-size 2", 2, 1.84, 1),
    ],
)
def test_of_vllm_it_says_how_many_answers_have_room_at_a_time(written: str, gpus: int, share: float, copies: int):
    """`share` is that of the GPUs of a copy, together. An adapter is merged into the weights that vLLM loads."""
    sampler = at(1.0, f"rounds.sampler={written}", gpus=gpus)
    memory = sampler.memory
    assert memory is not None and sampler.fits
    each = memory.cache / memory.answers
    assert f"at most {copies * int((share * GIB - memory.weights) / each):,} answers at a time" in sampler.words
    small = at(memory.weights / GIB / share, f"rounds.sampler={written}", gpus=gpus)
    assert not small.fits and small.words.endswith("does not fit; " + sampler.words.rpartition("; ")[2])
    if gpus > 1:
        fewer = at(1.0, f"rounds.sampler={written}", gpus=gpus - 1)
        assert not fewer.fits and f"does not fit, a machine of these has {gpus - 1}" in fewer.words


def test_with_adapters_of_its_own_vllm_needs_them_beside_the_weights():
    memory = at(1.0).memory
    assert memory is not None and memory.adapter > 0
    each = memory.cache / memory.answers
    sampler = at(1.0, "rounds.sampler=vllm --enable-lora", "adapter.name=lora")
    assert f"at most {int((0.92 * GIB - memory.weights - memory.adapter) / each):,} answers" in sampler.words


def test_a_vllm_that_stays_has_the_room_that_a_run_leaves():
    stays = ["rounds.sampler=vllm", "rounds.keep_server=true"]
    trainer = int(0.3 * GIB)
    assert at(1.0, stays[0], trainer=trainer).fits, "it ends before a run begins"
    for others in (stays, [stays[0], "rounds.max_staleness=1"]):
        refused = at(1.0, *others, trainer=trainer)
        assert not refused.fits and "beside the run, which leaves 0.7 of 1.0 GiB" in refused.words
        (share,) = re.findall(r"write --gpu-memory-utilization (\S+?);", refused.words)
        assert share == "0.7"
        smaller = [f"rounds.sampler=vllm --gpu-memory-utilization {share}", *others[1:]]
        assert at(1.0, *smaller, trainer=trainer).fits
    assert "a server with GPUs of its own" in at(1.0, *stays, trainer=GIB).words


def test_what_changes_numbers_is_said_to_be_left_out():
    sampler = at(1.0, "rounds.sampler=vllm --kv-cache-dtype fp8 --kv-cache-memory-bytes 25G")
    assert "without counting --kv-cache-dtype and --kv-cache-memory-bytes" in sampler.words


def test_of_a_server_it_says_the_smallest_gpus_that_have_room():
    """By hand, for GPUs that are sold: of 8 GB none is in the table, and the smallest is of 10."""
    memory = at(1.0).memory
    assert memory is not None
    assert "at least 1x10GB, less what" in at(1.0, "rounds.sampler=http://a:1").words
    each = memory.cache / memory.answers
    usable = min(gpu.usable_gib for gpu in GPUS if gpu.sold_gb == 80)
    many = int((0.92 * usable * GIB - memory.weights - memory.adapter) / each)
    sampler = at(1.0, "rounds.sampler=http://a:1", f"rounds.generation_batch_size={many}")
    assert f"at least 1x10GB, and 1x80GB to sample {many:,} at a time" in sampler.words
    sampler = at(1.0, "rounds.sampler=[http://a:1, http://b:1]", f"rounds.generation_batch_size={many}")
    assert f"1x48GB to sample {-(-many // 2):,} at a time" in sampler.words


def test_a_server_and_a_conversation_are_told_their_bound():
    assert "each server at http://a:1 http://b:1 needs" in at(1.0, "rounds.sampler=[http://a:1, http://b:1]").words
    assert at(1.0).words.endswith("100 tokens, data.max_length, counted for each answer with its prompt")
    turns = ["rounds.reward_funcs=[]", "rounds.user_message=null", "rounds.environment=Any", "rounds.max_turns=3"]
    assert at(1.0, *turns).words.endswith("with its prompt and all of its turns, of which there are up to 3")


def test_constants_of_the_sampler_are_its_own():
    assert sampler_trace.TOKENS_OF_PROOF == sampling.TOKENS_AT_A_TIME


def ask(capsys, *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", GRPO, "--strategy", "single", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_plan_has_trainer_and_sampler_side_by_side_and_no_room_for_one_is_none(capsys):
    code, answer = ask(capsys, "--gpus", "1xA100-80GB")
    of_sampler = answer["sampler"]
    # 36 layers, 2 heads of 128 for keys and values, bf16, 320 answers of 1536 tokens; the recipe says 18 GB.
    assert of_sampler["cache"] == 36 * 2 * 2 * 128 * 2 * 320 * 1536
    assert code == 0 and of_sampler["fits"] and answer["forecasts"][0]["memory"]["allocated"] > 0
    assert answer["steps"] == 105 * 4, "of all rounds"
    code, answer = ask(capsys, "--gpus", "1xRTX4090")
    assert code == 1 and answer["forecasts"][0]["verdict"] != "does not fit" and not answer["sampler"]["fits"]
    assert main(["plan", GRPO, "--strategy", "single", "--gpus", "1xRTX4090"]) == 1
    assert capsys.readouterr().out.startswith("NO, on 1xRTX4090: the sampler has no room; a run has: single")


@pytest.mark.slow
def test_any_gpus_are_those_on_which_the_sampler_has_room_too():
    """As a plan for each by itself has it; without rounds there is no sampler, and the smaller one does."""
    strategies = [load_strategy(Path("accelerate_configs/single.yaml"))]
    gpus = [find_gpu(name) for name in ("RTX4090", "A100-80GB")]
    rounds = load_recipe(Path(GRPO))
    report = for_each_card(rounds, strategies, GRPO, gpus, room={})
    (card,) = report.cards
    alone = forecast_all(rounds, strategies, card.machines, GRPO, limits=False).sampler
    assert card.machines.text == "1xA100-80GB" and card.sampler.memory == alone.memory and alone.fits
    (reason,) = report.refused
    assert report.refused[reason] == ["RTX4090"] and "the sampler has no room" in reason
    assert not forecast_all(rounds, strategies, parse_machines("1xRTX4090"), GRPO, limits=False).sampler.fits
    smaller = load_recipe(Path(GRPO), ["rounds.generation_batch_size=8"])
    names = {card.gpu.name for card in for_each_card(smaller, strategies, GRPO, gpus, room={}).cards}
    assert names == {"RTX4090", "A100-80GB"}
