"""The bytes that a step of a run on simulated GPUs sent, against the forecast's."""

import json
from collections import Counter
from pathlib import Path

import pytest

from cookbook.config.recipe import load_recipe
from cookbook.config.strategy import Strategy, load_strategy
from cookbook.forecast.costs.flops import ModelSizes, Recompute, Step, sizes_of
from cookbook.forecast.costs.traffic import transfers
from cookbook.forecast.skeleton import skeleton
from cookbook.training.models.structure import find_config
from tests.exchanges import Asked
from tests.gpu_runs import GpuRun

KINDS = {
    "all_gather_into_tensor": "all-gather",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    "reduce_scatter_tensor": "reduce-scatter",
    "send": "send",
}
WIDTHS = {"BFloat16": 2, "Float": 4, "Long": 8, "Int": 4, "Byte": 1}
FEW = 64
"""Bytes; of so many are the sums and norms that the forecast leaves out."""
SAMPLES, PER_MICRO_BATCH = 8, 2
"""In a step, by `RECIPES["sft"]`."""
WITHIN = 2e-3
"""Where FSDP pads what it divides; else bytes are the forecast's."""


def step_2(report: dict) -> list[Asked]:
    """Requests of a process from its first step to its second, each of which ends with five numbers of all."""
    log = [Asked(*one) for one in report["asked"]]
    first, second = [i for i, one in enumerate(log) if (one.type, one.sizes) == ("Double", [5])][:2]
    return log[first + 1 : second]


def sent(run: GpuRun) -> tuple[list[Counter[str]], Counter[str]]:
    """Calls by kind of each process, and bytes by kind, the mean of all: of whole tensors, as the ledger has them."""
    calls, mean = [Counter[str]() for _ in run.codes], Counter[str]()
    for counted, report in zip(calls, run.reports(), strict=True):
        for one in step_2(report):
            kind, elements = KINDS.get(one.name.partition(" ")[0]), sum(one.sizes)
            elements *= (len(report["groups"][one.group]) or len(run.codes)) if kind == "all-gather" else 1
            elements //= 2 if kind == "all-to-all" else 1  # to and from
            num_bytes = WIDTHS.get(one.type, 0) * elements
            if kind is not None and num_bytes > FEW:
                counted[kind] += 1
                mean[kind] += num_bytes / len(run.codes)
    return calls, mean


def labelled(run: GpuRun, strategy: Strategy) -> int:
    """Tokens in the loss of the step: two float32 numbers of each are gathered where the vocabulary is divided."""
    gathers = [one for report in run.reports() for one in step_2(report) if one.name.startswith("all_gather")]
    return sum(sum(one.sizes) for one in gathers if one.type == "Float") // 2 // strategy.tp_size


def forecast(
    strategy: Strategy, sizes: ModelSizes, count: int, num_tokens: int, num_labelled: int, recompute: Recompute
) -> tuple[Counter[str], Counter[str], set[str]]:
    """Calls and bytes by kind, and the kinds whose calls are not known."""
    calls, num_bytes, vague = Counter[str](), Counter[str](), set()
    micro = SAMPLES // PER_MICRO_BATCH // strategy.data_parallel_size(count)
    step = Step(
        num_tokens=num_tokens,
        num_labelled=num_labelled,
        length=1,
        micro_batches=micro,
        recompute=recompute,
        precision="bf16",
    )
    for one in transfers(strategy, sizes, step, count):
        calls[one.kind] += one.calls or 0
        num_bytes[one.kind] += one.sent if one.kind == "send" else one.num_bytes
        vague |= {one.kind} if one.is_least or one.calls is None else set()
    return calls, num_bytes, vague


def assert_sends_what_is_forecast(run: GpuRun, name: str) -> None:
    """Each kind of message as often as forecast, and as many bytes, for a packed run of `RECIPES["sft"]` in bf16.

    Where processes divide a sample, a packed micro-batch is filled up to a multiple of some tokens: of all such numbers
    of tokens one must give the bytes of every kind at once.
    """
    settings = json.loads((run.folder / "case.json").read_text())["settings"]
    recipe = load_recipe(run.folder / "recipe.yaml", [f"{key}={value}" for key, value in settings.items()])
    strategy = load_strategy(Path(f"accelerate_configs/{name}.yaml"))
    config, count = find_config(recipe.model)[0], len(run.codes)
    sizes = sizes_of(config, skeleton(config, recipe))
    calls, found = sent(run)
    trained, in_loss = run.steps[1]["num_tokens"], labelled(run, strategy)
    multiple = strategy.mesh(count).length_multiple(recipe.data.max_length)
    tried = []
    for num_tokens in range(trained + -trained % multiple, SAMPLES * recipe.data.max_length + 1, multiple):
        expected_calls, expected, vague = forecast(strategy, sizes, count, num_tokens, in_loss, recipe.model.recompute)
        if strategy.zero_stage == 3:  # as shipped, it keeps the weights of so small a model whole
            expected["all-gather"] = found["all-gather"]
        tried.append(expected)
    assert found.keys() == expected.keys(), f"{name}: {found}, forecast {expected}"
    for kinds in ({"send"}, found.keys() - {"send"}):  # all of a pipeline's are as long as its longest micro-batch
        mine = {kind: found[kind] for kind in kinds & found.keys()}
        known = [{kind: one[kind] for kind in mine} for one in tried]
        within = WITHIN if strategy.fsdp is not None else 1e-9
        assert any(mine == pytest.approx(one, rel=within) for one in known), f"{name}: {mine}, forecast {known}"
    counted = expected.keys() - vague
    mine, known = ({kind: one[kind] for kind in counted} for one in (calls[-1], expected_calls))
    assert mine == known, f"{name}: {mine} calls, forecast {known}"
