"""Additions of a user without touching the package: an objective, an optimizer, a schedule and a kind of rows."""

from typing import Literal

from pydantic import Field

from cookbook.config.objectives import Objective
from cookbook.config.optim import Optimizer
from cookbook.config.optim.optimizer import Refusal
from cookbook.config.schedule import Schedule
from cookbook.rows.row_kinds import BadRow, RowKind, check_text
from cookbook.system.registry import register


def check_duel(raw):
    row = {key: check_text(raw[key], f"`{key}`") for key in ("question", "better", "worse")}
    if not isinstance(raw["weight"], int | float) or raw["weight"] <= 0:
        raise BadRow("weight is not above 0", repr(raw["weight"])[:40])
    return row | {"weight": float(raw["weight"])}


register(
    RowKind(
        name="duel",
        keys=("question", "better", "worse", "weight"),
        check=check_duel,
        texts=lambda row: (row["question"], (row["better"], row["worse"])),
        value=lambda row: row["weight"],
        made_up=lambda some: {"question": some.text(), "better": some.text(), "worse": some.text(), "weight": 0.5},
    )
)


@register
class Margin(Objective):
    """Weighted duels: the mean log-probability of a token of the better answer should be `margin` above the other's."""

    rows = ("duel",)
    sample = "duel"
    sequences = ("better", "worse")
    mean_over = "samples"
    name: Literal["margin"]
    margin: float = Field(default=1.0, gt=0)

    def words(self):
        return f"margin of {self.margin:g}"

    def compute(self, model, batch):
        from cookbook.config.objectives.forward import LossOutput, negative_log_likelihood, sums_by_sequence

        nll = negative_log_likelihood(model, batch)
        sums, num_tokens = sums_by_sequence(-nll, batch)
        means = sums / num_tokens
        losses = batch["values"] * (self.margin - (means[0::2] - means[1::2])).square()
        return LossOutput(losses.sum().float() + 0.0 * nll.sum(), len(losses), {"weight": batch["values"].sum()})


@register
class HeavyBall(Optimizer):
    """Momentum without dampening, one state tensor of its own name."""

    refusals = (
        Refusal(
            what="FSDP1",
            clashes=lambda strategy: strategy.kind == "fsdp1",
            why="nobody has tried it",
            seen="by design",
            way_out="accelerate_configs/fsdp2.yaml",
        ),
    )
    name: Literal["heavy_ball"]
    inertia: float = Field(default=0.8, ge=0, lt=1)

    def state(self, *, is_matrix):
        return {"velocity": 4}

    def words(self):
        return [f"inertia {self.inertia:g}", *super().words()]

    def build(self, groups, model, mixed_precision):
        import torch

        class Ball(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is None:
                            continue
                        state = self.state[parameter]
                        if "velocity" not in state:
                            state["velocity"] = torch.zeros_like(parameter)
                        state["velocity"].mul_(group["inertia"]).add_(parameter.grad)
                        parameter.sub_(group["lr"] * (state["velocity"] + group["weight_decay"] * parameter))

        return Ball(groups, {"lr": self.learning_rate, "inertia": self.inertia, "weight_decay": self.weight_decay})


@register
class Sawtooth(Schedule):
    """Falls to a third and jumps back, every `tooth_steps`."""

    stretches = ("tooth_steps",)
    name: Literal["sawtooth"]
    tooth_steps: int = Field(gt=0)

    def factor(self, step, max_steps):
        return 1 - 2 / 3 * ((step - self.warmup_steps) % self.tooth_steps) / self.tooth_steps

    def ends(self):
        return f"from the peak to a third of it, every {self.tooth_steps} steps"
