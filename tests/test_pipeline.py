"""Pipeline parallel: stages of layers, through which the same samples pass, and copies of them for other samples.

The curves of the shipped file are in the matrix (tests/test_equivalence*.py); here are mistakes, sizes and arithmetic.
"""

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from cookbook.config.mesh import Mesh
from cookbook.config.objectives.forward import LossOutput, negative_log_likelihood
from cookbook.facts.meshes import pipeline_problem
from cookbook.facts.pipeline_stages import (
    head_layers,
    num_turns,
    pipeline_order,
    slowest_share,
    stage_chunks,
    stage_layers,
    stage_passes,
)
from cookbook.forecast.activations import ActivationTrace, Phase
from cookbook.forecast.costs.inputs import sketch, stage_of
from cookbook.training.data.batches import collate
from cookbook.training.engine import Engine
from cookbook.training.engine.pipeline import Pipeline, _InterleavedSchedule
from cookbook.training.models.loss import add_loss
from tests.curves import ADAMW, SGD, Lab, distance, with_stages
from tests.test_engine_step import MICRO_BATCHES, losses_of, new_model, samples
from tests.test_equivalence import SGD_LOSS, SGD_NORM
from tests.test_equivalence_features import LORA, preferences
from tests.test_resume import EXACT, chain
from tests.test_tensor_parallel import QWEN3

FOUR_LAYERS = {"model.from_scratch.num_hidden_layers": "4"}
LLAMA = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 5, "vocab_size": 32}


def test_the_stage_of_a_rank_by_hand():
    mesh = Mesh(replicate=2, tensor=2, pipeline=3)
    assert (mesh.num_processes, mesh.stage_size, mesh.data_parallel_size) == (12, 4, 2)
    assert [mesh.stage(rank) for rank in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    assert [mesh.data_parallel_rank(rank) for rank in range(12)] == 3 * [0, 0, 1, 1]
    assert [list(ranks) for ranks in mesh.copies()] == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11]]


@pytest.mark.parametrize("num_layers", [4, 5, 17, 32])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("head", [0, 1, 4, 40])
def test_no_other_cut_has_a_faster_slowest_stage(num_layers: int, num_stages: int, head: int):
    """Against all cuts into stages of at least a layer."""
    layers = [stage_layers(num_layers, stage, num_stages, head_layers=head) for stage in range(num_stages)]
    assert [i for stage in layers for i in stage] == list(range(num_layers)) and all(layers)
    borders = itertools.combinations(range(1, num_layers), num_stages - 1)
    cuts = [[b - a for a, b in itertools.pairwise((0, *inner, num_layers))] for inner in borders]
    best = min(max(*cut[:-1], cut[-1] + head) for cut in cuts)
    counts = [*map(len, layers)]
    assert max(*counts[:-1], counts[-1] + head) == best and counts[:-1] == sorted(counts[:-1])
    assert slowest_share(num_layers, num_stages, head_layers=head) == pytest.approx(best / (num_layers + head))


def test_the_stages_of_known_models_by_hand():
    """Llama-3.1-8B: 128,256 x 4,096 numbers in the head, 218 million in a layer, so the head is 2.4 layers."""
    assert head_layers(128_256 * 4_096, 218_112_000) == 2
    assert [len(stage_layers(32, stage, 2, head_layers=2)) for stage in range(2)] == [17, 15]
    assert [len(stage_layers(80, stage, 4, head_layers=1)) for stage in range(4)] == [20, 20, 20, 20]
    assert [len(stage_layers(28, stage, 2, head_layers=10)) for stage in range(2)] == [19, 9]  # Qwen3-0.6B
    assert [len(stage_layers(33, stage, 4, head_layers=0)) for stage in range(4)] == [8, 8, 8, 9]


def most_begun(num_micro_batches: int, num_stages: int, chunks: int = 1) -> list[int]:
    """For each stage, the most micro-batches, of whatever chunk, that have begun at once."""
    stages = (stage_passes(num_micro_batches, stage, num_stages, chunks) for stage in range(num_stages))
    return [max(sum(move.counts) for move in stage) for stage in stages]


def test_micro_batches_that_a_stage_has_begun_before_its_first_backward_by_hand():
    assert most_begun(8, 4) == [4, 3, 2, 1]  # 1F1B
    assert most_begun(4, 4) == [4, 3, 2, 1]
    assert most_begun(3, 4) == [3, 3, 3, 3]  # GPipe
    # Narayanan et al. 2021, figure 4: (chunks - 1) x stages + 2 (stages - 1 - stage) + 1
    assert most_begun(8, 4, chunks=2) == [11, 9, 7, 5]
    assert most_begun(101, 2, chunks=2) == [5, 3]
    assert most_begun(1, 2, chunks=3) == [3, 3]
    first = {move for move in stage_passes(1, 0, 2, 2) if move.is_first}
    assert {(move.chunk, move.counts, move.waiting) for move in first} == {(0, (1, 0), (0, 0)), (1, (1, 1), (1, 0))}


def torchs(num_micro_batches: int, num_stages: int, chunks: int) -> dict[int, list]:
    """Work that torch's schedules give each stage."""

    def actions_of(stage: int) -> list:
        named = {"num_stages": num_stages * chunks, "group_size": num_stages, "group_rank": stage}
        pieces = [SimpleNamespace(**named, stage_index=stage, has_backward=True) for _ in range(chunks)]
        if chunks > 1:
            return _InterleavedSchedule(pieces, num_micro_batches, loss_fn=max).pipeline_order[stage]
        kind = Schedule1F1B if num_micro_batches >= num_stages else ScheduleGPipe
        return kind(pieces[0], num_micro_batches, loss_fn=max)._get_pipeline_order()[stage]

    orders = {}
    for stage in range(num_stages):
        # The rest are pauses, and what a stage does once at the end.
        orders[stage] = [
            action
            for action in actions_of(stage)
            if action and action.computation_type.name in ("FORWARD", "FULL_BACKWARD")
        ]
        if chunks == 1:  # where torch 2.13, which does not run this list, counts the last stage's forwards from 1
            seen = Counter()
            for i, action in enumerate(orders[stage]):
                orders[stage][i] = action._replace(microbatch_index=seen[action.computation_type])
                seen[action.computation_type] += 1
    return orders


def time_of(orders: dict[int, list], num_stages: int, chunks: int) -> float:
    """How long all stages take, each in its order, if a forward takes 1/3 of a chunk's turn and a backward 2/3."""
    ends, at, free = {}, Counter(), Counter()
    while any(at[stage] < len(order) for stage, order in orders.items()):
        before = sum(at.values())
        for stage, order in orders.items():
            while at[stage] < len(order):
                kind, piece, i = order[at[stage]].computation_type, order[at[stage]].stage_index, order[at[stage]][2]
                needs = (kind, piece - 1 if kind.name == "FORWARD" else piece + 1, i)
                if 0 <= needs[1] < num_stages * chunks and needs not in ends:
                    break
                free[stage] = max(free[stage], ends.get(needs, 0)) + (1 if kind.name == "FORWARD" else 2)
                ends[kind, piece, i] = free[stage]
                at[stage] += 1
        assert sum(at.values()) > before, "all stages wait"
    return max(free.values()) / 3


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_the_order_of_a_stage_and_the_time_of_all_are_those_of_torchs_schedule(num_stages: int, chunks: int):
    """Where torch has no schedule for so many micro-batches, ours ends later than the least, and no later than what the
    forecast has for it, nor than with one chunk.
    """
    for count in range(1, 20):
        orders = torchs(count, num_stages, chunks)
        for stage, order in orders.items():
            expected = [
                (action.computation_type.name != "FORWARD", action.stage_index // num_stages, action[2])
                for action in order
            ]
            if chunks > 1 or count >= num_stages:  # GPipe's backwards have another order, which changes nothing
                assert list(pipeline_order(count, stage, num_stages, chunks)) == expected, (count, stage)
            assert len(expected) == len(set(expected)) == 2 * chunks * count
        least, taken = chunks * count + num_stages - 1, time_of(orders, num_stages, chunks)
        turns = num_turns(count, num_stages, chunks)
        rounds = max(1, count // num_stages)
        if chunks == 1 or (count >= num_stages and count % rounds == 0):
            assert taken == pytest.approx(turns) == pytest.approx(least)
        else:
            assert least < taken + 1e-9 <= turns + 1e-6 and taken <= chunks * (count + num_stages - 1), count


@pytest.mark.parametrize("is_tied", [True, False])
def test_stages_together_have_each_weight_once_and_a_tied_one_twice(is_tied: bool):
    whole = sketch(LLAMA | {"tie_word_embeddings": is_tied}, 10_000)
    parts = [stage_of(whole, stage, 3) for stage in range(3)]
    count = sum(weight.num_elements for part in parts for weight in part.weights)
    expected = sum(weight.num_elements for weight in whole.weights)
    assert count == expected + (32 * 8 if is_tied else 0)
    assert [part.num_layers for part in parts] == [1, 2, 2]
    assert [{weight.part for weight in part.weights} for part in parts] == [
        {"embedding", "layer"},
        {"layer"},
        {"layer", "head"},
    ]


def test_the_chunks_of_a_stage_by_hand():
    chunks = [stage_chunks(8, stage, 2, 2, head_layers=0) for stage in range(2)]
    assert chunks == [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]
    # Llama-3.1-8B: 8 + 9 layers, and 8 + 7 with a head of two.
    chunks = [stage_chunks(32, stage, 2, 2, head_layers=2) for stage in range(2)]
    assert [[*map(len, chunk)] for chunk in chunks] == [[8, 9], [8, 7]]
    assert slowest_share(32, 2, 2, head_layers=2) == 0.5
    whole = sketch(LLAMA | {"tie_word_embeddings": False}, 10_000)
    parts = [stage_of(whole, stage, 2, 2) for stage in range(2)]
    names = [
        sorted({weight.name.split(".")[1] for weight in part.weights if weight.layer is not None}) for part in parts
    ]
    assert names == [["0", "2"], ["1", "3", "4"]]
    assert [{weight.layer for weight in part.weights} - {None} for part in parts] == [{0, 1}, {0, 1, 2}]


def test_what_a_stage_holds_by_hand():
    """A layer keeps 100 bytes, hidden states are 10, and so is their gradient; what is made before the layers is 3, and
    the gradient of a tied head, which waits for that of the embedding, 7.
    """
    forward = [Phase(name="forward", layer=i, held=13 + 100 * i, peak=113 + 100 * i) for i in range(4)]
    backward = [Phase(name="backward", layer=i, held=120 + 100 * i, peak=150 + 100 * i) for i in (3, 2, 1, 0)]
    embed, end = (Phase(name=name, layer=None, held=held, peak=30) for name, held in (("embed", 0), ("end", 17)))
    head, back = (Phase(name=name, layer=None, held=413, peak=500) for name in ("head", "head backward"))
    trace = ActivationTrace(phases=(embed, *forward, head, back, *backward, end))
    first = trace.of_stage([range(2)], 4, waiting=[1], message=10, tied=7)
    assert [(phase.name, phase.layer, phase.held) for phase in first.phases] == [
        ("embed", None, 203),
        ("forward", 0, 216),
        ("forward", 1, 316),
        ("backward", 1, 416),
        ("backward", 0, 316),
        ("end", None, 213),
    ]
    last = trace.of_stage([range(2, 4)], 4, waiting=[0], message=10, tied=7)
    assert [(phase.name, phase.layer, phase.held, phase.peak) for phase in last.phases] == [
        ("forward", 0, 3, 103),
        ("forward", 1, 113, 213),
        ("head", None, 213, 300),
        ("head backward", None, 213, 300),
        ("backward", 1, 213, 243),
        ("backward", 0, 113, 143),
    ]
    # What was received lies in the buffers of messages, whether a layer keeps it or not.
    last = replace(trace, keeps_inputs=True).of_stage([range(2, 4)], 4, waiting=[1], message=10, tied=7)
    assert [phase.held for phase in last.phases] == [193 + held for held in (3, 103, 203, 203, 203, 103)]
    # Two chunks: layers 0 and 2. Three micro-batches wait in the first and one in the second, each with its layer and
    # what is made before the layers.
    first = trace.of_stage([range(1), range(2, 3)], 4, waiting=[3, 1], message=10, tied=7)
    assert [trace.kept_by(layers, 4, message=10, tied=7) for layers in (range(1), range(2, 3))] == [103, 103]
    assert [(phase.name, phase.layer, phase.held) for phase in first.phases] == [
        ("embed", None, 412),
        ("forward", 0, 412 + 13),
        ("forward", 1, 412 + 3),
        ("backward", 1, 412 + 113),
        ("backward", 0, 412 + 113),
        ("end", None, 412 + 10),
    ]


def test_models_whose_code_has_more_between_the_layers_are_refused():
    from transformers import AutoConfig

    assert pipeline_problem(AutoConfig.for_model("gemma"), 1) is None
    assert "gemma is not one of the models" in str(pipeline_problem(AutoConfig.for_model("gemma"), 2))
    assert pipeline_problem(AutoConfig.for_model("qwen2", num_hidden_layers=3), 3) is None
    assert "3 layers cannot be divided" in str(pipeline_problem(AutoConfig.for_model("qwen2", num_hidden_layers=3), 4))
    three = AutoConfig.for_model("qwen2", num_hidden_layers=3)
    assert pipeline_problem(three, 2, 2) == "3 layers cannot be divided over pp_size 2 x pp_chunks 2"


@pytest.mark.parametrize(
    ("strategy", "mistake", "processes"),
    [
        ("pp", "tied_gradients_not_added", 2),
        ("pp", "copies_of_stages_not_averaged", 4),
        ("pp_fsdp2", "tied_gradients_not_added", 4),
        pytest.param("pp_tp", "tied_gradients_not_added", 4, marks=[pytest.mark.slow, pytest.mark.thorough]),
        pytest.param("pp_tp_fsdp2", "tied_gradients_not_added", 8, marks=[pytest.mark.slow, pytest.mark.thorough]),
        pytest.param("pp_tp", "copies_of_stages_not_averaged", 8, marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_a_mistake_leaves_the_curve(lab: Lab, strategy: str, mistake: str, processes: int):
    settings = {"batch.micro_batch_size": "2"} if processes >= 4 else SGD
    apart = distance(lab.run(strategy, settings, processes=processes, sabotage=mistake), lab.run("single", SGD))
    assert apart.loss > 100 * SGD_LOSS, apart


@pytest.mark.slow
@pytest.mark.thorough
def test_gradients_that_transformers_sums_by_itself_count_once_in_a_stage(lab: Lab):
    """Gradients of Qwen3's norms of queries and keys, over several micro-batches."""
    reference = lab.run("single", QWEN3)
    apart = distance(lab.run("pp_tp", QWEN3), reference)
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart
    wrong = distance(lab.run("pp_tp", QWEN3, sabotage="gradients_summed_again"), reference)
    assert wrong.loss > 100 * SGD_LOSS or wrong.norm > 100 * SGD_NORM, wrong


@pytest.mark.slow
@pytest.mark.thorough
def test_copies_of_stages_of_shards_have_the_curve_of_one_process(lab: Lab):
    """Eight processes; and where the ranks that have other shards count as copies, the engine refuses to train."""
    small = {"batch.micro_batch_size": "2"}
    apart = distance(lab.run("pp_tp", small, processes=8), lab.run("single", SGD))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart
    _, output = lab.attempt("pp_tp", small, processes=8, sabotage="copies_taken_for_shards")
    assert "processes with the same layers and other samples: asked for 2, found 4" in output


def test_an_adapter_that_each_stage_draws_by_itself_leaves_the_curve(lab: Lab):
    wrong = lab.run("pp", LORA, sabotage="adapter_drawn_by_the_layers_of_a_process")
    assert distance(wrong, lab.run("single", LORA)).loss > 100 * SGD_LOSS


def test_counts_of_all_stages_are_noticed(lab: Lab):
    wrong = lab.run("pp", SGD, sabotage="counts_of_all_stages")
    with pytest.raises(AssertionError, match="evaluations count other tokens"):
        distance(wrong, lab.run("single", SGD))


def test_a_loss_that_two_stages_count_leaves_the_curve(lab: Lab):
    wrong, right = lab.run("pp", SGD, sabotage="loss_counted_by_two_stages"), lab.run("single", SGD)
    assert wrong.steps[0]["grad_norm"] == pytest.approx(2 * right.steps[0]["grad_norm"], rel=1e-5)
    assert distance(wrong, right).loss > 100 * SGD_LOSS


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(FOUR_LAYERS, id="plain"),
        pytest.param(FOUR_LAYERS | {"data.packing": "true"}, id="packed"),
        pytest.param(FOUR_LAYERS | {"model.gradient_checkpointing": "true"}, id="checkpointing"),
        pytest.param(FOUR_LAYERS | {"batch.micro_batch_size": "8"}, id="fewer micro-batches than stages"),
        pytest.param({"model.from_scratch.num_hidden_layers": "5"}, id="uneven layers"),
        pytest.param(FOUR_LAYERS | {"model.from_scratch.model_type": "qwen3"}, id="qwen3"),
    ],
)
def test_four_stages_have_the_curve_of_one_process(lab: Lab, settings: dict[str, str]):
    apart = distance(lab.run(with_stages(lab.folder, "pp", 4), settings, processes=4), lab.run("single", settings))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart


THOROUGH = [pytest.mark.slow, pytest.mark.thorough]
SHARES = {"batch.micro_batch_size": "2"}
BUDGET = {"batch": "{global_batch_size: 16, micro_batch_tokens: 300}", "model.from_scratch.num_hidden_layers": "5"}
CHUNKED = [
    pytest.param("pp", 2, 2, {"data.packing": "true", "model.gradient_checkpointing": "true"}, 2, id="packed"),
    pytest.param("pp_fsdp2", 2, 2, SGD, 4, id="shards"),
    pytest.param("pp", 2, 2, "dpo", 2, id="dpo"),
    pytest.param("pp", 2, 2, BUDGET, 2, id="micro-batches of many shapes", marks=THOROUGH),
    pytest.param("pp", 2, 2, ADAMW, 2, id="adamw, untied, as many micro-batches as stages", marks=THOROUGH),
    pytest.param("pp", 2, 2, LORA, 2, id="adapter", marks=THOROUGH),
    pytest.param("pp", 2, 2, SHARES, 4, id="copies", marks=THOROUGH),
    pytest.param("pp_tp", 2, 2, SHARES, 4, id="matrices", marks=THOROUGH),
    pytest.param("pp_tp_fsdp2", 2, 2, SHARES, 8, id="matrices and shards", marks=THOROUGH),
    pytest.param("pp", 4, 2, {"model.from_scratch.num_hidden_layers": "8"} | SHARES, 4, id="eight", marks=THOROUGH),
    pytest.param("pp", 2, 3, {"model.from_scratch.num_hidden_layers": "7"}, 2, id="three chunks", marks=THOROUGH),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "chunks", "more", "processes"), CHUNKED)
def test_chunks_of_layers_have_the_curve_of_one_process(
    lab: Lab, name: str, count: int, chunks: int, more: dict[str, str] | str, processes: int
):
    settings = FOUR_LAYERS | (preferences(lab, more) if isinstance(more, str) else more)
    curve = lab.run(with_stages(lab.folder, name, count, chunks), settings, processes=processes)
    apart = distance(curve, lab.run("single", settings))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart
    assert curve.record["strategy"]["ranges of layers"] == chunks


@pytest.mark.slow
def test_layers_that_run_with_every_chunk_of_their_stage_leave_the_curve(lab: Lab):
    wrong = lab.run(with_stages(lab.folder, "pp", chunks=2), FOUR_LAYERS, sabotage="every_chunk_runs_all_layers")
    assert distance(wrong, lab.run("single", FOUR_LAYERS)).loss > 100 * SGD_LOSS


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [["fsdp2", "pp/2", "single"], pytest.param(["pp/2", "pp_fsdp2/2", "pp", "pp_tp/2", "zero3"], marks=THOROUGH)],
    ids=["two", "four"],
)
def test_a_run_goes_on_with_and_without_chunks(lab: Lab, tmp_path: Path, where: list[str]):
    """Every part resumes with weights, moments and counts equal to the bit; `/2` has chunks."""
    settings = {key: value for key, value in EXACT.items() if key != "run.eval_every_steps"} | FOUR_LAYERS
    legs = []
    for leg in where:
        name, _, chunks = leg.partition("/")
        file = with_stages(lab.folder, name, chunks=2) if chunks else name
        legs.append(file if name == "single" else f"{file}:{4 if name in ('pp_fsdp2', 'pp_tp') else 2}")
    apart = distance(chain(lab, tmp_path, legs, settings, num_steps=3), lab.run("single", settings))
    assert apart.loss < 1e-5 and apart.norm < 1e-4, apart


def test_stages_of_shards_may_divide_a_tied_embedding_unevenly(lab: Lab):
    """The losses differed by 2.9 while embedding and head had a padded copy each, of which one was updated."""
    rows = {"model.from_scratch.vocab_size": "511"}
    apart = distance(lab.run("pp_fsdp2", rows | {"batch.micro_batch_size": "2"}), lab.run("single", rows))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(FOUR_LAYERS | {"model.from_scratch.vocab_size": "1024"}, id="three layers and one with the head"),
        pytest.param(FOUR_LAYERS | {"model.gradient_checkpointing": "true"}, id="checkpointing"),
    ],
)
def test_stages_of_shards_have_the_curve_of_one_process(lab: Lab, settings: dict[str, str]):
    apart = distance(lab.run("pp_fsdp2", settings | {"batch.micro_batch_size": "2"}), lab.run("single", settings))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_the_other_models_have_the_curve_of_one_process_too(lab: Lab, kind: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = lab.folder / f"tiny_{kind}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            shutil.copytree(lab.run("single", SGD).folder / "export", folder)
            sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
            sizes += ("num_key_value_heads", "tie_word_embeddings", "pad_token_id", "eos_token_id")
            llama = AutoConfig.from_pretrained(folder)
            config = AutoConfig.for_model(kind, **{name: getattr(llama, name) for name in sizes})
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    settings = {"model": f"{{name_or_path: {folder}}}"}
    apart = distance(lab.run("pp", settings), lab.run("single", settings))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart


@pytest.mark.slow
def test_a_token_budget_makes_micro_batches_of_many_shapes(lab: Lab):
    budget = {"batch": "{global_batch_size: 16, micro_batch_tokens: 300}"}
    apart = distance(lab.run("pp", budget, processes=4), lab.run("single", SGD))
    assert apart.loss < SGD_LOSS and apart.norm < SGD_NORM, apart


@pytest.mark.slow
def test_bf16_stays_in_the_band_of_one_process(lab: Lab):
    settings = {"model.from_scratch.num_hidden_layers": "3", "mixed_precision": "bf16"}
    apart = distance(lab.run("pp", settings), lab.run("single", settings))
    assert apart.loss < 5e-3 and apart.norm < 2e-2, apart


@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=THOROUGH)])
def test_memory_that_runs_out_in_a_stage_is_reported_as_such(lab: Lab, chunks: int):
    """torch hides what a forward raised behind an error of its own."""
    file = "pp" if chunks == 1 else with_stages(lab.folder, "pp", chunks=chunks)
    folder, output = lab.attempt(file, SGD if chunks == 1 else FOUR_LAYERS, sabotage="no_memory_in_step_2")
    assert (folder / "exit_code").read_text() != "0"
    assert "rank 1: CUDA out of memory" in output and "failed to run forward" not in output, output[-3000:]
    assert "Full Schedule" not in output


def test_more_stages_than_layers_are_refused(lab: Lab):
    folder, output = lab.attempt(with_stages(lab.folder, "pp", 3), {"batch.micro_batch_size": "4"}, processes=3)
    assert (folder / "exit_code").read_text() == "2" and "2 layers cannot be divided over pp_size 3" in output


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def in_two_chunks(model: Any, low: torch.dtype | None = None) -> Pipeline:
    """One process that hands on from the first layer to the second as between stages; they are torch's schedule's."""
    model._pp_stage = SimpleNamespace(pp_is_last_stage=True, chunks=[range(1), range(1, 2)])
    add_loss(model)
    engine = object.__new__(Pipeline)
    engine.mesh, engine._index, engine._group, engine._modes = Mesh(chunks=2), 0, dist.group.WORLD, {}
    engine._are_reached = True
    engine.mixed_precision, engine.sequence_mesh = {None: "no", torch.bfloat16: "bf16"}[low], None
    engine.device, engine.current_step, engine.beat = torch.device("cpu"), 1, lambda doing, step: None
    engine.accelerator = SimpleNamespace(
        autocast=lambda: torch.autocast("cpu", low, enabled=low is not None),
        prepare=lambda optimizer: optimizer,
    )
    engine.model, engine.optimizer = engine._wrap(model, torch.optim.SGD(model.parameters()))
    return engine


def one_more(model: Any, batch: dict[str, Any]) -> LossOutput:
    """A loss that is not 0 where the log-likelihoods are, as a preference's is not."""
    nll = negative_log_likelihood(model, batch)
    return LossOutput.of(1 + nll, nll, {"ones": torch.ones_like(nll).detach().sum()})


def test_two_chunks_have_the_loss_metrics_and_gradients_of_plain_torch(alone):
    model, plain, tokens = new_model(), new_model(), samples()
    every = torch.cat(losses_of(plain, tokens))
    every.mean().backward()
    batches = [collate(tokens, mine, pad_id=0) for mine in MICRO_BATCHES]
    engine = in_two_chunks(model)
    sums = engine.gradients(one_more, batches, len(every))
    assert sums == {"loss": pytest.approx(1 + every.mean().item(), rel=1e-6), "ones": 1}
    assert set(engine._modes) == {True}, "each schedule would vote again: torch calls another method (docs/upgrade.md)"
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_what_stages_hand_on_under_bf16_is_not_rounded(alone):
    """transformers' layers add up in the dtype of the embedding, which is float32."""
    model, whole, tokens = new_model(), new_model(), samples()
    add_loss(whole)
    batches = [collate(tokens, mine, pad_id=0) for mine in MICRO_BATCHES]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = [negative_log_likelihood(whole, batch).sum().item() for batch in batches]
    sums: list[float] = []

    def kept(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        losses = negative_log_likelihood(model, batch).sum()
        sums.append(losses.item())
        return losses

    in_two_chunks(model, torch.bfloat16)._forwards(kept, batches, lambda i: None)
    assert sums == expected


def test_a_tied_matrix_is_in_the_checkpoint_once_and_what_all_stages_train_is_counted(monkeypatch):
    """Six processes: three stages, each with two copies; the matrix is in the first stage and in the last."""
    tied, own, frozen = (torch.nn.Parameter(torch.zeros(5), requires_grad=i < 2) for i in range(3))
    engine = object.__new__(Pipeline)
    engine.mesh, engine._index, engine._tied = Mesh(replicate=2, pipeline=3), 2, [tied]
    assert [*engine._ranks_with(tied)] == [0, 1, 4, 5] and [*engine._ranks_with(own)] == [4, 5]
    monkeypatch.setattr(Engine, "prepare", lambda self, *arguments, **options: setattr(self, "_shapes", {"a": [5]}))
    others = json.dumps([{"a": [5], "first": [7]}, {"a": [5, True], "first": [7, True], "below": [11, False]}])
    engine.collectives = SimpleNamespace(gather_texts=lambda text: [others, text])
    model = torch.nn.ParameterDict({"a": tied, "b": own, "c": frozen})
    engine.prepare(model, torch.optim.SGD(model.parameters()))
    assert (engine.num_parameters, engine.num_trained) == (5 + 7 + 11 + 5 + 5, 5 + 7 + 5)


def test_run_json_counts_the_parameters_of_the_whole_model(lab: Lab):
    assert Path(lab.run("pp", SGD).folder / "export/model.safetensors").is_file()
    assert lab.run("pp", SGD).record["strategy"]["stage"] == [0, 2]
