"""Protects runs on many GPUs from what one machine without any hides: collectives in another order, messages that wait
for each other, streams that do not wait. `GpuLab.run` looks at every run that a test makes, those of every strategy in
`test_gpu_matrix.py` among them; here is that it sees, and what those do not do: stop, go on, run out of memory.

python -m pytest -q tests/test_gpu_exchanges.py
"""

from itertools import groupby
from typing import Any

import pytest

from benchmarks.forecast_accuracy.simulated import settings_of
from tests.curves import Lab
from tests.exchanges import Asked, stuck
from tests.experts import experts, needs_experts
from tests.gpu_runs import GpuLab, GpuRun, assert_orderly
from tests.step_messages import assert_sends_what_is_forecast, step_2
from tests.test_equivalence import DISTRIBUTED, STRATEGIES
from tests.test_gpu_features import SIGTERM_IN_STEP_1
from tests.test_gpu_matrix import BANDS, PACKED, assert_same_curve, settings_for
from tests.turns import others_by_turn

pytestmark = pytest.mark.simulated
EVERY = [name for name in STRATEGIES if name != "single"]
PAIR = {"0": [0, 1]}
BACKGROUND = {"run.save_in_background": "true", "run.save_every_steps": "1"}
FP16 = {"mixed_precision": "fp16"}
SLOW = pytest.mark.slow
PINNED = "pinned memory that a copy may still be"
TO_PINNED, FROM_PINNED = (f"copy {way} pinned host memory, non_blocking" for way in ("to", "from"))
A_LAYER = 100
"""Uses of memory in the forward of a layer, or more."""


def asked(name: str, size: int = 4, peer: int = -1, batch: int = -1, group: str = "0", **others: Any) -> Asked:
    return Asked(group, name, "Float", others.get("sizes", [size]), peer, batch)


def logs_of(run: GpuRun) -> list[list[Asked]]:
    return [[Asked(*asked) for asked in report["asked"]] for report in run.reports()]


def first_pair(log: list[Asked], differs: str) -> int:
    """Where two neighbours are of two kinds."""
    return next(i for i in range(len(log)) if getattr(log[i], differs) != getattr(log[i + 1], differs))


def test_two_collectives_that_one_process_asks_for_the_other_way_round_are_found(gpu_lab: GpuLab):
    logs = logs_of(gpu_lab.run("fsdp2", settings_for("fsdp2", "bf16", True)))
    assert len(logs[0]) > 50 and stuck(logs, PAIR) == []
    i = first_pair(logs[1], "name")
    logs[1][i : i + 2] = logs[1][i + 1], logs[1][i]
    waiting = stuck(logs, PAIR)
    assert len(waiting) == 2 and logs[0][i].name in waiting[0] and logs[0][i].name not in waiting[1]
    assert stuck([logs[0], logs[0][:-1]], PAIR)[1] == "rank 1: at its end"


def test_messages_of_a_pipeline_that_cross_are_found(gpu_lab: GpuLab):
    """Both send, then both receive: NCCL needs them in a batch, which begins them at once; gloo does not."""
    run = gpu_lab.run("pp", settings_for("pp", "bf16", True))
    logs = logs_of(run)
    batched = [[asked for asked in log if asked.batch >= 0] for log in logs]
    assert {asked.name for asked in batched[0]} == {"send", "recv"}, "1F1B sends forward and receives backward at once"
    alone = [[asked._replace(batch=-1) for asked in sorted(log, key=lambda asked: asked.batch)] for log in batched]
    crossed = [sorted(log[:2], key=lambda asked: asked.name, reverse=True) for log in alone]
    assert [asked.name for asked in crossed[0]] == [asked.name for asked in crossed[1]] == ["send", "recv"]
    groups = {name: ranks or [0, 1] for name, ranks in run.report()["groups"].items()}
    assert len(stuck(crossed, groups)) == 2 and stuck([[log[0], log[1]] for log in batched], groups) == []


def test_what_meets_what_by_hand():
    def meet(log: list[Asked], other: list[Asked]) -> bool:
        return not stuck([log, other], PAIR | {"1": [0, 1]})

    assert meet([asked("send", peer=1)], [asked("recv", peer=0)])
    assert not meet([asked("send", peer=1)], [asked("recv", peer=0, size=5)])
    assert not meet([asked("send", peer=1, batch=0)], [asked("recv", peer=0)]), "by another communicator"
    assert not meet([asked("all_reduce", size=4)], [asked("all_reduce", size=5)])
    assert not meet([asked("broadcast", peer=0)], [asked("broadcast", peer=1)])
    both = asked("all_reduce"), asked("all_reduce", group="1")
    assert not meet([*both], [*reversed(both)]), "two groups, each in order"
    uneven = asked("all_to_all", sizes=[1, 2, 1, 3]), asked("all_to_all", sizes=[3, 4, 2, 4])
    assert meet([uneven[0]], [uneven[1]]) and not meet([uneven[0]], [uneven[0]])


def test_who_failed_may_be_waited_for_and_nobody_else():
    ranks = {"0": [0, 1, 2], "1": [1, 2]}
    first, then = asked("all_reduce"), asked("all_reduce", group="1")
    logs = [[first], [first, first, then], [first, first, then]]
    assert len(stuck(logs, ranks)) == 3 and stuck(logs, ranks, failed=[0]) == []
    others = [[first], [first, then, first], [first, first, then]]
    assert stuck(others, ranks, failed=[0]) == [], "the third waits for the failed one, and the second for it"
    crossed = [[first], [first, then, asked("barrier", group="1")], [first, asked("barrier", group="1"), then]]
    assert len(stuck(crossed, ranks, failed=[0])) == 3


def packed(strategy: str, lab: Lab) -> dict[str, str]:
    """In bf16; under expert parallel a mixture, of which each token goes to all experts, see `test_gpu_matrix.py`."""
    mixture = experts(lab, num_experts_per_tok=6) if needs_experts(strategy) else {}
    return settings_for(strategy, "bf16", True) | mixture


@pytest.mark.slow
@pytest.mark.parametrize("strategy", others_by_turn(EVERY, ("zero3",)))
def test_a_stop_and_a_resume_are_in_order(gpu_lab: GpuLab, lab: Lab, strategy: str):
    """A signal to one process, and the rest of the run up to its export."""
    settings = packed(strategy, lab) | {"run.resume": "auto"}
    stopped = gpu_lab.run(strategy, settings, variables=SIGTERM_IN_STEP_1, ends=(75,))
    assert len(stopped.steps) == 1
    resumed = gpu_lab.run(strategy, settings, after=stopped)
    assert resumed.record["resumed_from"] and (resumed.output / "export").is_dir()
    assert_same_curve(resumed, gpu_lab.run(strategy, packed(strategy, lab)), BANDS["bf16"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", others_by_turn(EVERY, ()))
def test_a_shortage_is_in_order(gpu_lab: GpuLab, lab: Lab, strategy: str):
    """And has its own answer, wherever a fifth of the peak was too much."""
    settings = packed(strategy, lab)
    peak = max(max(report["peak_bytes"]) for report in gpu_lab.run(strategy, settings).reports())
    run = gpu_lab.run(strategy, settings, memory=peak * 4 // 5, sabotage="told_before_it_waits", ends=None)
    assert 1 in run.codes and not {0, 2} & {*run.codes} and len(run.reports()) == len(run.codes), run.codes
    assert_orderly(run)
    told = [run.log(rank) for rank in range(len(run.codes))]
    short = [log for log in told if "CUDA out of memory" in log]  # others may have waited in a collective
    assert len(short) == 1 and "Traceback" not in short[0], told


def test_bytes_of_another_strategy_are_not_those_of_the_forecast(gpu_lab: GpuLab):
    run = gpu_lab.run("fsdp2", settings_for("fsdp2", "bf16", True))
    assert_sends_what_is_forecast(run, "fsdp2")
    for other in ("fsdp2_grad_op", "fsdp2_tp", "ddp", "zero3"):
        with pytest.raises(AssertionError):
            assert_sends_what_is_forecast(run, other)


@pytest.mark.slow
def test_expert_parallel_sends_what_is_forecast(gpu_lab: GpuLab, lab: Lab):
    """A mixture whose experts the processes share evenly, and each token of which goes to all."""
    settings = settings_for("fsdp2_ep", "bf16", True) | experts(lab, num_experts=12, num_experts_per_tok=12)
    assert_sends_what_is_forecast(gpu_lab.run("fsdp2_ep", settings), "fsdp2_ep")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", others_by_turn(DISTRIBUTED, ("fsdp2", "zero2", "tp")))
def test_with_an_adapter_a_step_sends_what_is_forecast(gpu_lab: GpuLab, strategy: str):
    settings = settings_for(strategy, "bf16", True)
    lora = gpu_lab.run(strategy, settings | {"adapter.name": "lora", "adapter.rank": "4"})
    assert_sends_what_is_forecast(lora, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("adapted", ["all-linear", "[q_proj, v_proj]", "[up_proj]", ""])
@pytest.mark.parametrize("recompute", ["false", "true", "selective"])
def test_tensor_parallel_sends_what_is_forecast_whatever_is_adapted_or_recomputed(gpu_lab: GpuLab, adapted, recompute):
    """Below the first adapter nothing needs a gradient, unless its layer is recomputed."""
    settings = settings_for("tp", "bf16", True) | {"model.gradient_checkpointing": recompute}
    settings |= {"adapter": f"{{name: lora, rank: 4, targets: {adapted}}}"} if adapted else {}
    assert_sends_what_is_forecast(gpu_lab.run("tp", settings), "tp")


def gathers_run_beside_layers(run: GpuRun, num_units: int = 3) -> bool:
    """True if in each micro-batch of step 2 under FSDP2 a unit's gather need not wait for what the unit before computes
    in the forward; and is asked for before the unit that comes first in the backward has reduced its gradients.
    """
    holds = []
    for report in run.reports():
        log = [asked for asked in step_2(report) if asked.name.startswith(("all_gather", "reduce_scatter"))]
        of_micro_batch = 3 * num_units - 1  # what comes last in the forward stays gathered
        for start in range(0, len(log), of_micro_batch):
            holds += [asked.begun - asked.done > A_LAYER / 2 for asked in log[start + 2 : start + num_units]]
            of_backward = log[start + num_units : start + of_micro_batch]
            holds.append([asked.name[:3] for asked in of_backward] == ["all"] * (num_units - 1) + ["red"] * num_units)
    assert len(holds) == 2 * 2 * 2, "two processes of two micro-batches"
    return all(holds)


def test_the_next_layer_is_gathered_while_one_computes(gpu_lab: GpuLab):
    """As the fast end of the forecast has it; a gather of its own time has the same curve."""
    settings = settings_for("fsdp2", "bf16", True)
    run, in_turn = (gpu_lab.run("fsdp2", settings, sabotage=name) for name in (None, "gathers_in_turn"))
    assert gathers_run_beside_layers(run) and not gathers_run_beside_layers(in_turn)
    assert in_turn.losses == run.losses


def backward_goes_on_beside_sums(run: GpuRun) -> bool:
    """True if under DDP the layers compute on between the first sum of gradients that is asked for and the last."""
    sums = [[asked for asked in step_2(report) if asked.name.startswith("all_reduce")] for report in run.reports()]
    return all(log[-1].begun - log[0].begun > 2 * A_LAYER for log in sums)


@pytest.mark.slow
def test_gradients_are_summed_while_the_backward_goes_on(gpu_lab: GpuLab):
    """In buckets of 25 MiB, of which this model has three."""
    settings = settings_for("ddp", "bf16", True)
    run, at_the_end = (gpu_lab.run("ddp", settings, recipe="memory", sabotage=name) for name in (None, "one_bucket"))
    assert backward_goes_on_beside_sums(run) and not backward_goes_on_beside_sums(at_the_end)
    assert at_the_end.losses == run.losses


def gathers_before_layers_compute(run: GpuRun, num_layers: int = 4) -> bool:
    """True if in each micro-batch of step 2 under ZeRO-3 the weights of all layers are asked for within the time of
    one, by gathers that wait for none of them.
    """
    holds = []
    for report in run.reports():
        kinds = [(kind, list(some)) for kind, some in groupby(step_2(report), lambda asked: asked.name[:10])]
        for gathers in [some for kind, some in kinds if kind == "all_gather"]:
            assert sum(sum(gather.sizes) for gather in gathers) > num_layers * 10**6, (
                "half of a layer's weights and more"
            )
            ahead = gathers[-1].begun - gathers[0].begun < A_LAYER
            holds.append(ahead and len({gather.done for gather in gathers}) == 1)
    assert len(holds) == 2 * 2, "two processes of two micro-batches"
    return all(holds)


@pytest.mark.slow
def test_zero3_gathers_layers_before_they_compute(gpu_lab: GpuLab):
    """As many weights as its prefetch takes, which here is all that it does not keep whole."""
    settings = settings_for("zero3", "bf16", True)
    names = (None, "gathers_when_needed")
    run, needed = (gpu_lab.run("zero3", settings, recipe="memory", sabotage=name) for name in names)
    assert gathers_before_layers_compute(run) and not gathers_before_layers_compute(needed)
    assert needed.losses == run.losses


@pytest.mark.slow
def test_an_adapter_is_gathered_after_its_update(gpu_lab: GpuLab):
    """Where no weight stays whole, DeepSpeed's stream of gathers waits for nothing after a step."""
    settings = settings_of("zero3_hpz", "qlora", "false", accumulates=True)
    gpu_lab.run("zero3_hpz", settings, recipe="memory")
    races = gpu_lab.run("zero3_hpz", settings, recipe="memory", sabotage="gathers_beside_the_update").races()
    assert len(races) == 1 and "aten::cat.out reads what aten::copy_ wrote on another stream" in races.pop()


def test_a_result_that_is_read_before_its_wait_is_found_though_the_curve_is_right(gpu_lab: GpuLab):
    run = gpu_lab.run("ddp", PACKED, sabotage="result_read_before_its_wait")
    assert run.losses == gpu_lab.run("ddp", PACKED | {"mixed_precision": "bf16"}).losses
    races = run.races()
    assert races and all("reads what all_reduce wrote on another stream, without waiting" in race for race in races)
    with pytest.raises(AssertionError, match="races between streams"):
        assert_orderly(run)


@pytest.mark.parametrize(
    ("sabotage", "strategy", "settings", "told"),
    [
        ("batch_in_the_memory_of_the_one_before", "ddp", PACKED, f"writes {PINNED} reading"),
        pytest.param("saved_before_it_is_there", "ddp", PACKED | BACKGROUND, f"reads {PINNED} writing", marks=SLOW),
        pytest.param(
            "loss_scale_beside_gradients_of_the_host",
            "fsdp2_offload",
            PACKED | FP16,
            f"_amp_foreach_non_finite_check_and_unscale_ reads {PINNED} writing",
            marks=SLOW,
        ),
    ],
    ids=["overwritten", "saved", "scaler"],
)
def test_a_host_that_does_not_wait_for_a_copy_is_found(gpu_lab: GpuLab, sabotage, strategy, settings, told):
    run = gpu_lab.run(strategy, settings, sabotage=sabotage, ends=None)
    assert any(told in race for race in run.races()), run.races()
    with pytest.raises(AssertionError, match="races between streams"):
        assert_orderly(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "settings", "ways"),
    [
        ("ddp", PACKED, [FROM_PINNED]),
        ("ddp", PACKED | {"model.gradient_checkpointing": "offload"}, [TO_PINNED, FROM_PINNED]),
        ("fsdp2_offload", PACKED | FP16, [TO_PINNED, FROM_PINNED]),
        ("zero2_offload", PACKED, [TO_PINNED, FROM_PINNED]),
        ("zero3_offload", PACKED, [TO_PINNED, FROM_PINNED]),
    ],
    ids=["batches", "activations", "fsdp2", "zero2", "zero3"],
)
def test_the_host_waits_for_what_it_reads_of_copies_that_do_not(gpu_lab: GpuLab, strategy, settings, ways):
    """`GpuLab.run` finds no race; and there is something to find."""
    run = gpu_lab.run(strategy, settings)
    copies = run.report()["operations"]
    assert all(copies.get(way, 0) >= 6 for way in ways), {way: copies.get(way) for way in (TO_PINNED, FROM_PINNED)}
    assert_same_curve(run, gpu_lab.run("single", settings), BANDS[settings.get("mixed_precision", "bf16")])
