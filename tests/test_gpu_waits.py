"""Protects the GPU from idling: how often the host waits for it in a step, counted on simulated GPUs.

A run of four steps less one of two with the same settings leaves what two steps cost.

python -m pytest -q tests/test_gpu_waits.py
"""

from collections import Counter

import pytest

from tests.curves import Lab
from tests.experts import experts
from tests.gpu_runs import GpuLab

pytestmark = pytest.mark.simulated

PACKED = {"data.packing": "true"}
MORE = {"batch.micro_batch_size": "1"}
"""Four micro-batches a step on each of two processes, instead of two."""


def waits_of_two_steps(lab: GpuLab, strategy: str, settings: dict[str, str], recipe: str = "sft") -> Counter[str]:
    """Why and where, by the innermost file and line, of the first process."""
    once = {"run.eval_every_steps": "100"} if recipe == "sft" else {}
    counted = []
    for steps in ("2", "4"):  # what the first makes for both (a reference, say) is in the cache for the second
        run = lab.run(strategy, settings | once | {"run.max_steps": steps}, recipe=recipe)
        counted.append(Counter[str]())
        for wait in run.report()["waits"]:
            counted[-1][f"{wait['why']} at {wait['at']}"] += wait["times"]
    assert sum(counted[0].values()) > 0, "nothing was counted"
    return counted[1] - counted[0]


def ours(waits: Counter[str]) -> int:
    return sum(times for place, times in waits.items() if "cookbook/" in place or "train.py" in place)


@pytest.mark.parametrize(
    ("strategy", "settings", "recipe"),
    [
        ("single", {}, "sft"),
        ("single", MORE, "sft"),
        ("ddp", PACKED, "sft"),
        ("ddp", PACKED, "dpo"),
        ("ddp", PACKED | {"mixed_precision": "'no'"}, "sft"),
        ("fsdp2", {"mixed_precision": "fp16"}, "sft"),
        pytest.param("pp", PACKED, "sft", marks=pytest.mark.slow),
        pytest.param("ddp_sp", PACKED, "sft", marks=pytest.mark.slow),
        pytest.param("hsdp", PACKED, "sft", marks=pytest.mark.slow),
    ],
    ids=["padded", "more micro-batches", "packed", "preferences", "float32", "float16", "pp", "sp", "hsdp"],
)
def test_a_step_waits_once_however_many_micro_batches_it_has(gpu_lab: GpuLab, strategy, settings, recipe):
    waits = waits_of_two_steps(gpu_lab, strategy, settings, recipe)
    assert sum(waits.values()) == 2 and ours(waits) == 2, waits


@pytest.mark.parametrize("strategy", ["fsdp2_offload", "zero3", pytest.param("tp", marks=pytest.mark.slow)])
def test_where_a_library_waits_we_add_one_wait_a_step(gpu_lab: GpuLab, strategy: str):
    """And the counter sees theirs: FSDP2 copies gradients to the host, DeepSpeed asks for norm and overflow, DTensor
    writes through a mask of the tokens that another shard looks up.
    """
    waits = waits_of_two_steps(gpu_lab, strategy, PACKED)
    assert ours(waits) == 2 and sum(waits.values()) > 4, waits


@pytest.mark.slow
def test_expert_parallel_waits_once_for_a_layer_in_a_forward(gpu_lab: GpuLab, lab: Lab):
    """For the numbers of tokens that come from each process (`Long`), by which the tokens' own exchange is sized. The
    CPU's product of stacked experts waits beside it, where CUDA has a kernel.
    """
    report = gpu_lab.run("fsdp2_ep", {"mixed_precision": "'no'"} | PACKED | experts(lab)).report()
    asked = Counter((name, kind) for _, name, kind, *_ in report["asked"])
    here = "transformers/distributed/expert_parallel.py"
    waits = sum(wait["times"] for wait in report["waits"] if here in wait["at"] and wait["why"].startswith("copy to"))
    assert waits == asked["all_to_all", "Long"] > 0


def test_ddp_holds_the_gradients_once_while_it_accumulates(gpu_lab: GpuLab):
    """Twice would be 4 bytes a parameter more, a sixth of the peak of this run."""
    peaks = {}
    for strategy in ("single", "ddp"):
        run = gpu_lab.run(strategy, PACKED | {"run.max_steps": "4"}, recipe="memory")
        peaks[strategy] = run.report()["peak_bytes"][0]
    assert len(run.steps) == 4 and peaks["ddp"] == pytest.approx(peaks["single"], rel=0.01), peaks
