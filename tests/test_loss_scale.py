"""fp16's loss scale follows one path under every engine, worked out by hand.

python -m pytest -q -m "slow or not slow" tests/test_loss_scale.py
"""

import json

import pytest

from cookbook.config.sections import LossScaleSection
from cookbook.training.engine import Engine
from cookbook.training.engine.loss_scale import LossScale

SETTINGS = {"initial": 1024.0, "window": 2, "hysteresis": 2, "minimum": 256.0}
OVERFLOWS = {3, 4, 7}
PATH = [1024, 1024, 2048, 2048, 1024, 1024, 2048, 2048]
"""The scale of steps 1 to 8: two good ones double it; step 3 is tolerated, and 4 halves it; two double it; 7 is
tolerated again, since it has doubled since then."""
SELDOM = [pytest.mark.slow, pytest.mark.thorough]
FP16 = {"mixed_precision": "fp16", "run.max_steps": "8", "run.eval_every_steps": "null"}
FP16 |= {f"loss_scale.{name}": str(value) for name, value in SETTINGS.items()}


def faults(steps: set[int]) -> dict[str, str]:
    faults = [{"rank": 1, "at": "step.loss", "step": step, "do": "nan"} for step in sorted(steps)]
    return {"COOKBOOK_FAULTS": json.dumps(faults)}


def path_of(scaler, steps: int, overflows: set[int]) -> list[float]:
    """The scale of each step, of anything with `scale` and `update`."""
    scales = []
    for step in range(1, steps + 1):
        scales.append(scaler.scale)
        scaler.update(overflowed=step in overflows)
    return scales


def test_a_restored_run_goes_on_with_the_scale_and_the_counts_of_its_save():
    saved, engine, applied = LossScale(settings=LossScaleSection(**SETTINGS)), Engine.__new__(Engine), []
    path_of(saved, 2, OVERFLOWS)
    engine.loss_scale = LossScale(settings=LossScaleSection(**SETTINGS))
    engine.held_pieces, engine._apply_loss_scale = lambda kinds: iter(()), applied.append
    engine.restore(list, lambda name: [], {"updates": None, "loss_scaler": json.loads(json.dumps(saved.state()))})
    assert path_of(engine.loss_scale, 4, {1, 2}) == PATH[2:6] and applied == [2048]


class Torch:
    """torch's own scaler, on the CPU."""

    def __init__(self, window: int) -> None:
        import torch

        self.weight = torch.nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=window)

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def update(self, *, overflowed: bool) -> None:
        factor = float("nan") if overflowed else 1.0
        self.scaler.scale((self.weight * factor).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class DeepSpeed:
    """DeepSpeed's own."""

    def __init__(self, window: int) -> None:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

        self.scaler = DynamicLossScaler(1024.0, window, 1.0, 1, False)

    @property
    def scale(self) -> float:
        return self.scaler.cur_scale

    def update(self, *, overflowed: bool) -> None:
        self.scaler.update_scale(overflowed)


def test_the_rule_follows_the_path_worked_out_by_hand():
    assert path_of(LossScale(settings=LossScaleSection(**SETTINGS)), 8, OVERFLOWS) == PATH


def test_without_hysteresis_the_rule_is_torchs_and_deepspeeds_is_late(monkeypatch):
    overflows = {5, 6, 7, 14}
    rule = LossScale(settings=LossScaleSection(initial=1024.0, window=3))
    ours = path_of(rule, 20, overflows)
    assert ours == path_of(Torch(3), 20, overflows)
    assert len(set(ours)) > 3
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)
    theirs = path_of(DeepSpeed(3), 20, set())
    assert theirs.index(2048.0) == path_of(LossScale(settings=rule.settings), 20, set()).index(2048.0) + 1


def test_the_defaults_are_torchs():
    import torch

    settings, scaler = LossScaleSection(), torch.amp.GradScaler("cpu")
    assert (settings.initial, settings.window) == (scaler.get_scale(), scaler.get_growth_interval())
    assert (settings.hysteresis, scaler.get_backoff_factor(), scaler.get_growth_factor()) == (1, 0.5, 2.0)


def test_what_is_saved_goes_on_as_if_uninterrupted():
    first, second = (LossScale(settings=LossScaleSection(**SETTINGS)) for _ in range(2))
    begun = path_of(first, 3, OVERFLOWS)
    second.restore(json.loads(json.dumps(first.state())))
    assert begun + path_of(second, 5, {step - 3 for step in OVERFLOWS}) == PATH


def test_an_overflow_at_the_minimum_ends_the_run():
    rule = LossScale(settings=LossScaleSection(initial=2.0, minimum=1.0))
    rule.update(overflowed=True)
    with pytest.raises(FloatingPointError, match="smallest loss scale, 1 "):
        rule.update(overflowed=True)


@pytest.mark.parametrize("value", [1000.0, 3.0, 0.0, -2.0, 2.0**25])
def test_a_scale_that_would_round_or_overflow_is_refused(value):
    with pytest.raises(ValueError, match="initial"):
        LossScaleSection(initial=value)


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "fsdp1", "fsdp2", "zero2", "zero3", *(pytest.param(name, marks=SELDOM) for name in ("zero1", "hsdp"))],
)
def test_the_scale_follows_that_path_under_every_engine(gpu_lab, strategy):
    run = gpu_lab.run(strategy, FP16, variables=faults(OVERFLOWS))
    assert [line["loss_scale"] for line in run.steps] == PATH
    assert {line["step"] for line in run.steps if line["grad_norm"] is None} == OVERFLOWS


@pytest.mark.parametrize(("first", "second"), [("ddp", "zero3"), ("zero2", "fsdp2")])
def test_another_engine_goes_on_with_its_counts(gpu_lab, first, second):
    """After step 3, which was tolerated: without that count step 4 would be tolerated too."""
    stopped = gpu_lab.run(first, {**FP16, "run.stop_after_steps": "3"}, variables=faults(OVERFLOWS), ends=(75,))
    run = gpu_lab.run(second, {**FP16, "run.resume": "auto"}, variables=faults(OVERFLOWS), after=stopped)
    assert [line["loss_scale"] for line in run.steps] == PATH


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2"])
def test_every_engine_ends_at_the_minimum(gpu_lab, strategy):
    settings = FP16 | {"loss_scale.initial": "256", "loss_scale.hysteresis": "1"}
    run = gpu_lab.run(strategy, settings, variables=faults({2}), ends=None)
    assert 1 in run.codes and "smallest loss scale, 256" in run.log(0) + run.log(1)
    assert [line["loss_scale"] for line in run.steps] == [256]
