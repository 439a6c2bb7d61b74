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
    log = [Asked(*asked) for asked in report["asked"]]
    first, second = [i for i, asked in enumerate(log) if (asked.type, asked.sizes) == ("Double", [5])][:2]
    return log[first + 1 : second]


def sent(run: GpuRun) -> tuple[list[Counter[str]], Counter[str]]:
    """Calls by kind of each process, and bytes by kind, the mean of all: of whole tensors, as the ledger has them."""
    calls, mean = [Counter[str]() for _ in run.codes], Counter[str]()
    for counted, report in zip(calls, run.reports(), strict=True):
        for asked in step_2(report):
            kind, elements = KINDS.get(asked.name.partition(" ")[0]), sum(asked.sizes)
            elements *= (len(report["groups"][asked.group]) or len(run.codes)) if kind == "all-gather" else 1
            elements //= 2 if kind == "all-to-all" else 1  # to and from
            num_bytes = WIDTHS.get(asked.type, 0) * elements
            if kind is not None and num_bytes > FEW:
                counted[kind] += 1
                mean[kind] += num_bytes / len(run.codes)
    return calls, mean


def labelled(run: GpuRun, strategy: Strategy) -> int:
    """Tokens in the loss of the step: two float32 numbers of each are gathered where the vocabulary is divided."""
    gathers = [asked for report in run.reports() for asked in step_2(report) if asked.name.startswith("all_gather")]
    return sum(sum(gather.sizes) for gather in gathers if gather.type == "Float") // 2 // strategy.tp_size


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
    for transfer in transfers(strategy, sizes, step, count):
        calls[transfer.kind] += transfer.calls or 0
        num_bytes[transfer.kind] += transfer.sent if transfer.kind == "send" else transfer.num_bytes
        vague |= {transfer.kind} if transfer.is_least or transfer.calls is None else set()
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
    calls, volumes = sent(run)
    trained, in_loss = run.steps[1]["num_tokens"], labelled(run, strategy)
    multiple = strategy.mesh(count).length_multiple(recipe.data.max_length)
    tried = []
    for num_tokens in range(trained + -trained % multiple, SAMPLES * recipe.data.max_length + 1, multiple):
        expected_calls, expected, vague = forecast(strategy, sizes, count, num_tokens, in_loss, recipe.model.recompute)
        if strategy.zero_stage == 3:  # as shipped, it keeps the weights of so small a model whole
            expected["all-gather"] = volumes["all-gather"]
        tried.append(expected)
    assert volumes.keys() == expected.keys(), f"{name}: {volumes}, forecast {expected}"
    for kinds in ({"send"}, volumes.keys() - {"send"}):  # all of a pipeline's are as long as its longest micro-batch
        mine = {kind: volumes[kind] for kind in kinds & volumes.keys()}
        known = [{kind: forecast[kind] for kind in mine} for forecast in tried]
        within = WITHIN if strategy.fsdp is not None else 1e-9
        assert any(mine == pytest.approx(forecast, rel=within) for forecast in known), (
            f"{name}: {mine}, forecast {known}"
        )
    counted = expected.keys() - vague
    mine, known = ({kind: numbers[kind] for kind in counted} for numbers in (calls[-1], expected_calls))
    assert mine == known, f"{name}: {mine} calls, forecast {known}"
