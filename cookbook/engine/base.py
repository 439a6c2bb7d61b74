"""What all strategies share: the loop over micro-batches, the step, evaluation, and the check of what is in force.

A family of strategies is a class of its own file. It overrides what it does differently, from `_start` to `_findings`;
what stands here serves whole parameters and DTensors in plain torch.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from cookbook import faults
from cookbook.engine import state
from cookbook.engine.collectives import Collectives, to_device
from cookbook.engine.findings import Finding, as_json, describe_optimizer, is_sharded
from cookbook.engine.norm import clip, square_sums
from cookbook.engine.start import prepare_process
from cookbook.launch import World
from cookbook.plan import Plan
from cookbook.strategy import Strategy

EVALUATION_BATCHES = 8
"""Between two questions whether to stop: an evaluation may take longer than a scheduler waits."""

Batch = dict[str, Any]
"""Tensors by name, which go to the device, and what stays on the host."""


class Outcome(Protocol):
    """Of one micro-batch: a loss sum with its graph, what it is a sum over, and sums of metrics over the same."""

    @property
    def loss_sum(self) -> torch.Tensor: ...
    @property
    def count(self) -> int: ...
    @property
    def metrics(self) -> dict[str, torch.Tensor]: ...


Objective = Callable[[torch.nn.Module, Batch], Outcome]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Of an optimizer step, the same on every process."""

    means: dict[str, float]
    """`loss` and the objective's metrics, each the mean over the global batch."""
    grad_norm: float
    """Before clipping. One that is not finite means that the weights were left as they were."""
    maxima: list[float]
    """Of what `Engine.step` was given."""


class Engine:
    """One strategy in force. All methods are collective: every process calls them.

    A family overrides, where it differs: `_start`, `load_options`, `frozen_dtype` and `_wrap`; `_synchronise`,
    `_backward` and `_update`, or of the last only `_is_shard` and `_clear_gradients`; `_forward` and `_end_evaluation`;
    `held_pieces`, `_finish_restore`, `base_optimizer` and the loss scaler; `_findings`; `close`.
    """

    def __init__(
        self,
        strategy: Strategy,
        plan: Plan,
        world: World,
        *,
        mixed_precision: str,
        micro_batch_size: int,
        max_grad_norm: float,
        run_name: str,
        timeout: timedelta,
    ) -> None:
        """Starts the process group.

        Args:
            run_name: tells apart the swap files of runs on one machine.
            timeout: of a collective; longer than the watch's, so that it can report. Where a rank gives signs
                for ever and never comes, the collective ends the run.

        Raises:
            RecipeError: more processes than GPUs.
        """
        self.strategy, self.plan, self.world, self.mesh = strategy, plan, world, plan.mesh
        self.mixed_precision, self.max_grad_norm = mixed_precision, max_grad_norm
        self.micro_batch_size, self.run_name, self.timeout = micro_batch_size, run_name, timeout
        prepare_process(plan)
        self.accelerator = self._start(on_cpu=not torch.cuda.is_available())
        self.device: torch.device = self.accelerator.device
        self.collectives = Collectives(world, self.mesh, self.device, lambda doing: self.beat(doing, self.current_step))
        self.current_step = 0
        self._losses: list[torch.Tensor] = []
        self.beat: Callable[[str, int], None] = lambda doing, step: None
        """Called with what begins, and its step; for who watches over this process."""
        # Any: DDP, FSDP and DeepSpeed each wrap the model in a class of their own.
        self.model: Any
        self.optimizer: Any

    def _start(self, *, on_cpu: bool) -> Any:
        """The Accelerator, and before it the process group, if there is one.

        On CPU each family needs its own way in, or accelerate trains plain DDP without a word.
        """
        raise NotImplementedError

    @property
    def is_main(self) -> bool:
        """True on the one process that prints and writes."""
        return self.world.rank == 0

    def describe(self) -> dict[str, Any]:
        """The strategy in force, as `assert_in_force` found it."""
        found = {what: as_json(value) for what, _, value in self.findings()}
        return {"file": self.strategy.path, "kind": self.strategy.kind, "processes": self.plan.num_processes, **found}

    @property
    def data_parallel_rank(self) -> int:
        """Where this process stands among those that see different samples."""
        return self.mesh.data_parallel_rank(self.world.rank)

    @property
    def low_dtype(self) -> torch.dtype | None:
        """What forwards and backwards compute in; None for float32."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.mixed_precision)

    @property
    def frozen_dtype(self) -> torch.dtype:
        """What weights that are not trained are held in: the forward multiplies in it, and no optimizer needs more."""
        return self.low_dtype or torch.float32

    def load_options(self, *, is_quantized: bool) -> dict[str, Any]:
        """For `from_pretrained`, so that no process has the whole model in host memory without need.

        Weights that stay whole on a GPU are read straight to it.

        Args:
            is_quantized: to 4 bits.
        """
        return {"device_map": {"": self.device}} if self.device.type == "cuda" else {}

    def prepare(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, counts_beside: str | None = None
    ) -> None:
        """Wraps model and optimizer, then asserts that what runs is what was asked for.

        Args:
            counts_beside: the state tensor beside which the optimizer keeps `step`; needed to restore it.

        Raises:
            RuntimeError: another strategy is in force; lists every difference.
        """
        self.counts_beside = counts_beside
        # Whole shapes: of the placeholders of ZeRO-3, and of the pieces of tensor parallel too.
        self.num_parameters = sum(_num_elements(parameter) for parameter in model.parameters())
        self.num_trained = sum(_num_elements(p) for p in model.parameters() if p.requires_grad)
        self._shapes = {
            name: tuple(getattr(parameter, "ds_shape", parameter.shape))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.asked_optimizer = describe_optimizer(optimizer)
        self.model, self.optimizer = self._wrap(model, optimizer)
        self.assert_in_force()

    def _wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """The model that is called from now on, and the optimizer that steps."""
        return self.accelerator.prepare(model, optimizer)

    def assert_in_force(self) -> None:
        """Compares the running state with strategy, recipe and plan.

        Raises:
            RuntimeError: lists every difference.
        """
        wrong = [(what, asked, found) for what, asked, found in self.findings() if asked != found]
        if wrong:
            lines = [f"  {what}: asked for {asked!r}, found {found!r}" for what, asked, found in wrong]
            raise RuntimeError("\n".join([f"{self.strategy.path} is not what runs:", *lines]))

    def findings(self) -> Iterator[Finding]:
        """Everything that a library could have changed behind our back: they change strategies, precision and clipping
        without a word.
        """
        yield "processes", self.plan.num_processes, dist.get_world_size() if dist.is_initialized() else 1
        yield "processes seen by accelerate", self.plan.num_processes, self.accelerator.num_processes
        yield "optimizer and its groups", self.asked_optimizer, describe_optimizer(self.optimizer)
        yield from self._findings()

    def _findings(self) -> Iterator[Finding]:
        """What the family adds. Here of all that train in plain torch."""
        yield "precision", self.mixed_precision, self.accelerator.mixed_precision
        trained = self._trained()
        yield "dtype of the trained weights", {torch.float32}, {parameter.dtype for parameter in trained}
        owned = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        yield "trained parameters or others in the optimizer alone", 0, len(owned ^ {id(p) for p in trained})

    def gradients(self, objective: Objective, micro_batches: list[Batch], count: int) -> dict[str, torch.Tensor]:
        """Runs every forward and backward of one optimizer step.

        Every engine divides the gradient sum over those who see different tokens by their number D, and we want
        d(sum of all losses)/N. Hence each process runs backward on  loss sum x D / N,  N counting the whole global
        batch. Accumulation adds up micro-batches and needs no factor: accelerate has 1, and DeepSpeed's backward
        `scale_wrt_gas=False`.

        Args:
            count: N, what the objective is a mean of (targets or pairs), over all processes.

        Returns:
            Of `loss` and each metric of the objective, what this process adds to the mean over the global batch, on the
            device: for `step`, which asks for all at once.
        """
        scale = self.mesh.token_parallel_size / count
        totals = _Totals()
        self._losses = []
        for i, batch in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            self.beat(f"micro-batch {i + 1} of {len(micro_batches)}", self.current_step)
            faults.at("step.forward", self.current_step)
            with self._synchronise(last):
                outcome = self._forward(objective, batch)
                totals.add(outcome)
                loss = outcome.loss_sum * scale
                if i == 0 and faults.at("step.loss", self.current_step):
                    loss = loss * math.nan
                self._losses.append(loss.detach())
                self._backward(loss)
                # Before the next forward: bitsandbytes' part of the graph holds its weights, which ZeRO-3 gathered.
                del outcome, loss
        return {name: total / count for name, total in totals.sums.items()}

    def _synchronise(self, last: bool) -> contextlib.AbstractContextManager:
        """Around a micro-batch: communicates gradients when that is needed, and not before.

        DDP waits for the last micro-batch. What shards gradients (FSDP, ZeRO-2, -3) reduces each one: keeping whole
        gradients until the last would cost the memory that the strategy is there to save.
        """
        return contextlib.nullcontext()

    def _backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def nonfinite_micro_batches(self) -> list[int]:
        """Which of this process's micro-batches in the last step had a loss that is not finite."""
        return [i for i, loss in enumerate(self._losses) if not torch.isfinite(loss)]

    def begin_step(self, number: int, seed: int) -> None:
        """Seeds dropout, from the step and the data-parallel process alone: nothing to save, nothing to resume."""
        self.current_step = number
        sequence = np.random.SeedSequence([seed, number, self.data_parallel_rank])
        torch.manual_seed(int(sequence.generate_state(1)[0]))

    def step(self, shares: dict[str, torch.Tensor], *values: float) -> StepResult:
        """Clips, updates the weights and clears the gradients, unless their norm is not finite: then, under every
        strategy, the weights stay as they are. On all processes alike, since the norm is that of all.

        Waits for the device once, for all that the host must know, and on a GPU leaves the update queued: its time
        shows in what waits next.

        Args:
            shares: what `gradients` gave.
            values: of which the largest over the processes is wanted.
        """
        self.beat("update", self.current_step)
        faults.at("step.update", self.current_step)
        return self._update(shares, values)

    def _update(self, shares: dict[str, torch.Tensor], values: tuple[float, ...]) -> StepResult:
        """See `step`."""
        if self.accelerator.scaler is not None:
            self.accelerator.unscale_gradients()
        whole, parts = square_sums(self.model.parameters(), self._is_shard, self._on_device)
        rows = self.collectives.all_gather(*shares.values(), whole, *values, parts)
        rows[:, len(shares)] = np.sqrt(rows[:, len(shares)].max() + rows[:, -1].sum() / self.mesh.replicate)
        result = self._result(shares, rows[:, :-1])
        # Under fp16 the scaler leaves out what is not finite, and lowers its scale.
        if math.isfinite(result.grad_norm) or self.accelerator.scaler is not None:
            if self.max_grad_norm:
                clip(self.model.parameters(), result.grad_norm, self.max_grad_norm)
            self.optimizer.step()
        self._clear_gradients()
        return result

    def _is_shard(self, gradient: torch.Tensor) -> bool:
        """Whether each process has another part of this gradient."""
        return is_sharded(gradient)

    def _clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _result(self, shares: dict[str, torch.Tensor], rows: np.ndarray) -> StepResult:
        """From columns of shares, the gradient norm and values."""
        means = self.collectives.sums(rows[:, : len(shares)])
        norm, *maxima = rows[:, len(shares) :].max(0).tolist()
        return StepResult(means=dict(zip(shares, means, strict=True)), grad_norm=norm, maxima=maxima)

    @torch.no_grad()
    def evaluate(
        self, objective: Objective, batches: Iterable[Batch], stop_reason: Callable[[], str | None] = lambda: None
    ) -> dict[str, float] | str:
        """`loss` and the objective's metrics, each a mean over the whole set, and `num_tokens`, the targets in it.

        Args:
            batches: the same number on every process.
            stop_reason: asked on every process now and then, may be collective; what it says ends the evaluation, and
                is returned.
        """
        self.model.eval()
        totals = _Totals()
        count = num_tokens = 0.0
        for i, batch in enumerate(batches):
            self.beat(f"evaluation batch {i + 1}", self.current_step)
            faults.at("eval.batch", self.current_step)
            if i % EVALUATION_BATCHES == 0 and (reason := stop_reason()):
                self._end_evaluation()
                return reason
            outcome = self._forward(objective, batch)
            totals.add(outcome)
            count += outcome.count
            num_tokens += len(batch["targets"])
        self._end_evaluation()
        *sums, count, num_tokens = self.collectives.sums(
            self.collectives.all_gather(*totals.sums.values(), count, num_tokens)
        )
        means = {name: total / count for name, total in zip(totals.sums, sums, strict=True)}
        return means | {"num_tokens": round(num_tokens)}

    @torch.no_grad()
    def collect(
        self, function: Callable[[Any, Batch], torch.Tensor], batches: Iterable[tuple[Batch, torch.Tensor]], size: int
    ) -> np.ndarray:
        """What a function makes of each sample, from all processes on every one of them, float64 [size].

        Args:
            function: from the model and a batch to a value for each of its sequences.
            batches: with the numbers of their samples; each sample once over all data-parallel processes, and the same
                number of batches on every process.
        """
        self.model.eval()
        values = torch.zeros(size, dtype=torch.float64, device=self.device)
        for i, (batch, sample_index) in enumerate(batches):
            self.beat(f"reference batch {i + 1}", self.current_step)
            sample_index = self._on_device(sample_index)
            found = self._forward(function, batch)
            values[sample_index] = found.double()
        self._end_evaluation()
        return self.collectives.all_reduce_sum(values).cpu().numpy()

    def _end_evaluation(self) -> None:
        """Back to training. FSDP keeps what it has gathered for a backward that does not come; but state is read and
        written in shards, and the next forward must see what was written.
        """
        self.model.train()

    def parameter_shapes(self) -> dict[str, list[int]]:
        """Of every trained parameter, whole, by its name in the transformers model; tied ones come once."""
        return {name: list(shape) for name, shape in self._shapes.items()}

    def pieces(self) -> Iterator[state.Piece]:
        """The part of weights and optimizer state that this process writes; those of all processes make the whole.

        Each must be used before the next is asked for.
        """
        return (share for piece in self.held_pieces() if (share := piece.share()).data.numel())

    def held_pieces(self, create: state.KindsOf | None = None) -> Iterator[state.Piece]:
        """What this process holds of every trained parameter, tied ones once.

        A piece must be read or written before the next is asked for: what lies on NVMe is there only so long.

        Args:
            create: which optimizer state to make, in zeros, where there is none yet; what is written into pieces then
                lasts. Without it, pieces are only read.
        """
        return state.held_pieces(self.trained_parameters(), state.Moments(self.base_optimizer), self.world, create)

    def restore(
        self, fill: Callable[[Iterable[state.Piece]], None], kinds: state.KindsOf, counts: dict[str, Any]
    ) -> None:
        """Takes up a state: weights, optimizer state, and what `counts` gave when it was saved.

        Args:
            fill: writes into pieces of this process's memory, each before it asks for the next.
            kinds: see `state.KindsOf`.
        """
        fill(self.held_pieces(kinds))
        self._finish_restore(counts["updates"])
        if counts["loss_scaler"] is not None and self.mixed_precision == "fp16":
            self._set_loss_scaler(counts["loss_scaler"])

    def _finish_restore(self, num_updates: int | None) -> None:
        """After all pieces were written: the optimizer's count, and the copies that forwards read."""
        if num_updates is None:
            return
        for parameter, moments in self.base_optimizer.state.items():
            if self.counts_beside in moments:  # what lacks it, as Muon's matrices do, counts nothing
                # Where the fused AdamW makes it. DeepSpeed's own and bitsandbytes' count in an int.
                fresh = torch.zeros((), device=parameter.device)
                old = moments.get("step", fresh)
                moments["step"] = torch.full_like(old, num_updates) if isinstance(old, torch.Tensor) else num_updates

    def counts(self) -> dict[str, Any]:
        """What the optimizer counts: its updates, which Adam's bias correction needs, and under fp16 the state of the
        loss scale.
        """
        # An optimizer may not count, and a process may have no share of what is trained.
        mine = {int(moments["step"]) for moments in self.base_optimizer.state.values() if "step" in moments}
        assert len(mine) <= 1, f"the optimizer counts different updates: {sorted(mine)}"
        updates = int(self.collectives.all_reduce_max(*mine or [-1])[0])
        scaler = self._loss_scaler() if self.mixed_precision == "fp16" else None
        return {"updates": None if updates < 0 else updates, "loss_scaler": scaler}

    def _loss_scaler(self) -> dict[str, Any]:
        return self.accelerator.scaler.state_dict()

    def _set_loss_scaler(self, values: dict[str, Any]) -> None:
        """The scale under any strategy; when it changes next, only under the family that counted."""
        known = self.accelerator.scaler.state_dict()
        kept = {name: value for name, value in values.items() if name in known}
        self.accelerator.scaler.load_state_dict(known | kept)

    @property
    def base_optimizer(self) -> Any:
        """torch's, inside what wraps it."""
        return self.optimizer.optimizer

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for _, parameter in self.trained_parameters()]

    def trained_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """In the model's order, by names without what wrappers add; tied ones come once."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""), parameter

    def transformer(self) -> Any:
        """The transformers model inside the wrapper."""
        return getattr(self.model, "module", self.model)

    def close(self) -> None:
        """Leaves together with all other processes."""
        self.collectives.leave(self.timeout)

    def _forward(self, function: Callable[[Any, Batch], Any], batch: Batch) -> Any:
        batch = {
            name: self._on_device(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()
        }
        return function(self.model, batch)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return to_device(tensor, self.device)


class _Totals:
    """Sums of loss and metrics over the micro-batches of this process, float64 on the device."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, outcome: Outcome) -> None:
        for name, value in {"loss": outcome.loss_sum.detach(), **outcome.metrics}.items():
            self.sums[name] = self.sums.get(name, 0) + value.double()


def _num_elements(parameter: torch.nn.Parameter) -> int:
    """Of the whole parameter, also where it is a placeholder (ZeRO-3) or holds two weights a byte (4 bits)."""
    quantized = getattr(parameter, "quant_state", None)
    if quantized is not None:
        return math.prod(quantized.shape)
    return getattr(parameter, "ds_numel", parameter.numel())
