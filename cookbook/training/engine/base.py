"""Base of all strategies: the loop over micro-batches, the step, evaluation, and the check of what is in effect.

Each family of strategies subclasses `Engine` in a file of its own. The methods here serve whole parameters and DTensors
in plain torch.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function
from transformers import PreTrainedConfig

from cookbook.config.objectives.forward import Batch, LossOutput
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy
from cookbook.start.launchers import World
from cookbook.start.run_plan import Plan
from cookbook.system import faults
from cookbook.system.files import RecipeError
from cookbook.system.replaced import check_hooks, forget_hooks
from cookbook.system.step_phases import PHASE
from cookbook.training.engine import agreement, state
from cookbook.training.engine.collectives import Collectives, to_device
from cookbook.training.engine.findings import Comparison, as_json, describe_optimizer, num_shards
from cookbook.training.engine.loss_scale import LossScale, grad_scaler
from cookbook.training.engine.norm import clip, square_sum, squares
from cookbook.training.engine.start import limits_of_collectives, prepare_process
from cookbook.training.engine.unusual import UnusualGradient, UsualNorms

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EVALUATION_BATCHES = 8
"""Batches between two checks for a stop request: an evaluation may take longer than a scheduler waits."""

LossFunction = Callable[[torch.nn.Module, Batch], LossOutput]
"""`compute` of an objective: from the model and a micro-batch to its loss sum and metrics."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of an optimizer step, the same on every rank."""

    means: dict[str, float]
    """`loss` and the objective's metrics, each the mean over the global batch."""
    grad_norm: float
    """Before clipping. If it is not finite, the weights were not updated."""
    maxima: list[float]
    """Maximum over the ranks of each value passed to `Engine.step`."""
    unusual: UnusualGradient | None = None
    """If with this step the norm has left what was usual."""


class Engine:
    """A running strategy. All methods are collective: every rank must call them.

    A family overrides, where it differs: `_start`, `fit_to`, `load_options`, `reading`, `apart`, `frozen_dtype` and
    `_wrap`; `_accumulate`, or only
    `_synchronise` and `_backward`; `_update`, or only `_num_shards` and `_clear_gradients`; `_squares`; `_forward`,
    `_forwards`,
    `_end_evaluation`; `unreached`, or only `_is_reached`; `held_pieces`, or only `_ranks_with`; `_finish_restore`,
    `base_optimizer`, `_scaler_class`, `_device_of_gradients` and `_apply_loss_scale`; `_findings`; `close`.
    """

    def __init__(self, strategy: Strategy, plan: Plan, world: World, recipe: Recipe, *, timeout: timedelta) -> None:
        """Start the process group.

        Args:
            recipe: of which a strategy needs precision, clipping and batch.
            timeout: limit for a collective. Longer than the watchdog's, which can report more; it ends a run in which a
                rank stays busy for ever and never reaches the collective.

        Raises:
            RecipeError: more processes than GPUs.
        """
        self.strategy, self.plan, self.world, self.mesh = strategy, plan, world, plan.mesh
        self.recipe, self.timeout = recipe, timeout
        self.mixed_precision, self.max_grad_norm = recipe.compute_precision, recipe.optim.max_grad_norm
        self.loss_scale = LossScale(settings=scaling) if (scaling := recipe.loss_scaling) is not None else None
        """fp16's; its `scale` is that of the step to come."""
        prepare_process(plan, timeout)
        forget_hooks()
        self.accelerator = self._start(on_cpu=not torch.cuda.is_available())
        self.device: torch.device = self.accelerator.device
        self.collectives = Collectives(world, self.mesh, self.device, lambda doing: self.beat(doing, self.current_step))
        self.sequence_mesh: DeviceMesh | None = None
        """The ranks that share the tokens of the same samples, if the strategy splits sequences."""
        if (size := self.mesh.sequence) > 1:
            # init_device_mesh would split NCCL's communicator, and so need one for the groups of other samples as well.
            groups = [dist.new_group(range(i * size, (i + 1) * size)) for i in range(self.mesh.data_parallel_size)]
            self.sequence_mesh = DeviceMesh.from_group(groups[self.data_parallel_rank], self.device.type)
        self.current_step = 0
        self._losses: list[torch.Tensor] = []
        self._are_reached = False
        # Empty at each start: all ranks must decide alike, and only rank 0 has the log of the norms before.
        self._usual = UsualNorms(overflows=self.mixed_precision == "fp16")
        self.beat: Callable[[str, int], None] = lambda doing, step: None
        """Heartbeat for the watchdog: called with the work that begins, and its step."""
        # Any: DDP, FSDP and DeepSpeed each wrap the model in a class of their own.
        self.model: Any
        self.optimizer: Any

    def _start(self, *, on_cpu: bool, **options: Any) -> Accelerator:
        """Create the Accelerator, after the process group if there is one.

        On CPU most families must change accelerate's state first, or it silently trains plain DDP.
        """
        accelerator = Accelerator(cpu=on_cpu, mixed_precision=self.mixed_precision, **options)
        if accelerator.scaler is not None and self.loss_scale is not None:
            # Not the library's: after equal overflows torch and DeepSpeed have other scales, and skip other steps.
            kind, device = self._scaler_class(accelerator), self._device_of_gradients
            accelerator.scaler = grad_scaler(kind, self.loss_scale, device)
        return accelerator

    @property
    def _device_of_gradients(self) -> torch.device | None:
        """The device of gradients, where it is not that of the loss."""
        return None

    def _scaler_class(self, accelerator: Accelerator) -> type:
        """Class of the loss scaler: torch's, which finds and skips what is not finite."""
        return type(accelerator.scaler)

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes."""
        return self.world.rank == 0

    def describe(self) -> dict[str, Any]:
        """The strategy in effect, for run.json."""
        effects = {what: as_json(value) for what, _, value in self.findings()}
        return {"file": self.strategy.path, "kind": self.strategy.kind, "processes": self.plan.num_processes, **effects}

    @property
    def data_parallel_rank(self) -> int:
        """Rank among the processes that see different samples."""
        return self.mesh.data_parallel_rank(self.world.rank)

    @property
    def low_dtype(self) -> torch.dtype | None:
        """The dtype of forwards and backwards; None for float32."""
        return DTYPES.get(self.mixed_precision)

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """The dtype in which the recipe has gradients exchanged; None for the strategy's own."""
        return DTYPES.get(self.recipe.optim.gradient_dtype or "")

    @property
    def frozen_dtype(self) -> torch.dtype:
        """The dtype of frozen weights: that of the forward, since no optimizer needs more."""
        return self.low_dtype or torch.float32

    def fit_to(self, config: PreTrainedConfig) -> None:
        """Fill in what a strategy leaves open until the model is known. Called before it is read."""

    def load_options(self, *, is_quantized: bool) -> dict[str, Any]:
        """Arguments of `from_pretrained` that keep weights out of host memory where they are not needed.

        Weights that stay whole on a GPU are read straight to it.

        Args:
            is_quantized: whether the model is quantized to 4 bits.
        """
        return {"device_map": {"": self.device}} if self.device.type == "cuda" else {}

    def reading(self, *, is_quantized: bool) -> contextlib.AbstractContextManager:
        """Surrounds `from_pretrained`: a strategy that shards frozen weights keeps its part of each as it is read.

        Args:
            is_quantized: whether the model is quantized to 4 bits.
        """
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Surrounds `from_pretrained` of a model that is not trained: each process reads all of it."""
        yield

    def prepare(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, counts_beside: str | None = None
    ) -> None:
        """Wrap model and optimizer, then check that the strategy asked for is in effect.

        Args:
            counts_beside: the state tensor beside which the optimizer keeps `step`; needed to restore it.

        Raises:
            RuntimeError: another strategy is in effect; lists every difference.
        """
        self.counts_beside = counts_beside
        # Whole shapes, also where ZeRO-3 has placeholders and tensor parallel has shards.
        self.num_parameters = sum(num_elements(parameter) for parameter in model.parameters())
        self.num_trained = sum(num_elements(p) for p in model.parameters() if p.requires_grad)
        self._shapes = {
            name: list(getattr(parameter, "ds_shape", parameter.shape))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.asked_optimizer = describe_optimizer(optimizer)
        self.model, self.optimizer = self._wrap(model, optimizer)
        # Before any step: accelerate trains plain DDP for some files of FSDP and DeepSpeed, without a word.
        self.assert_in_force()

    def _wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """Wrap model and optimizer for training."""
        return self.accelerator.prepare(model, optimizer)

    def assert_in_force(self) -> None:
        """Compare the running state with strategy, recipe and plan.

        Raises:
            RuntimeError: lists every difference.
        """
        wrong = [(what, asked, effect) for what, asked, effect in self.findings() if asked != effect]
        if wrong:
            lines = [f"  {what}: asked for {asked!r}, found {effect!r}" for what, asked, effect in wrong]
            raise RuntimeError("\n".join([f"{self.strategy.path} is not what runs:", *lines]))

    def findings(self) -> Iterator[Comparison]:
        """Everything that a library could have changed: strategy, precision and clipping do change silently."""
        yield "processes", self.plan.num_processes, dist.get_world_size() if dist.is_initialized() else 1
        if dist.is_initialized():
            yield "limit of a collective", {self.timeout}, limits_of_collectives()
        yield "processes seen by accelerate", self.plan.num_processes, self.accelerator.num_processes
        shared = getattr(self.transformer(), "sequence_mesh", None)
        yield "processes that share a row", self.mesh.sequence, 1 if shared is None else shared.size()
        yield "optimizer and its groups", self.asked_optimizer, describe_optimizer(self.optimizer)
        yield from self._findings()

    def _findings(self) -> Iterator[Comparison]:
        """Findings of the family; these are common to all that train in plain torch."""
        yield "precision", self.mixed_precision, self.accelerator.mixed_precision
        trained = self._trained_tensors()
        yield "dtype of the trained weights", {torch.float32}, {parameter.dtype for parameter in trained}
        owned = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        yield "trained parameters or others in the optimizer alone", 0, len(owned ^ {id(p) for p in trained})

    def gradients(self, loss_function: LossFunction, micro_batches: list[Batch], count: int) -> dict[str, torch.Tensor]:
        """Run every forward and backward of one optimizer step.

        Every engine averages gradients over the D ranks that see different tokens, and we want d(sum of all losses)/N.
        So each rank runs backward on  loss sum x D / N,  where N counts the whole global batch. Accumulation adds up
        micro-batches and needs no factor: accelerate has 1, and DeepSpeed's backward `scale_wrt_gas=False`.

        Args:
            count: N, the number of targets or samples that the loss is a mean of, over all ranks.

        Returns:
            This rank's contribution to the mean over the global batch of `loss` and each metric, on the device. `step`
            adds them up over the ranks.
        """
        scale = self.mesh.token_parallel_size / count
        totals: dict[str, torch.Tensor] = {}
        self._losses = []

        def scaled_loss(model: Any, batch: Batch) -> torch.Tensor:
            outcome = loss_function(model, batch)
            _add(totals, outcome)
            loss = outcome.loss_sum * scale
            if not self._losses and faults.at("step.loss", self.current_step):
                loss = loss * math.nan
            # Not `item()`: a step waits for the device once, in `_update` (tests/test_gpu_waits.py).
            self._losses.append(loss.detach())
            return loss

        before = None if self._are_reached else self.generators()
        self._accumulate(scaled_loss, micro_batches)
        if before is not None:
            self._assert_none_drawn(before)
        return {name: total / count for name, total in totals.items()}

    def _accumulate(self, loss: Callable[[Any, Batch], torch.Tensor], micro_batches: list[Batch]) -> None:
        """Run forward and backward of each micro-batch, and reduce the gradients."""
        for i, batch in enumerate(micro_batches):
            self._begin_micro_batch(i, len(micro_batches))
            with self._synchronise(last=i == len(micro_batches) - 1):
                with record_function(f"{PHASE}forward"):
                    scaled = self._forward(loss, batch)
                with record_function(f"{PHASE}backward"):
                    self._backward(scaled)
                del scaled  # before the next forward: bitsandbytes' graph holds its weights, which ZeRO-3 gathered

    def _begin_micro_batch(self, i: int, count: int) -> None:
        self.beat(f"micro-batch {i + 1} of {count}", self.current_step)
        faults.at("step.forward", self.current_step)

    def _synchronise(self, last: bool) -> contextlib.AbstractContextManager:
        """Context of a micro-batch; decides whether its gradients are reduced.

        DDP waits for the last micro-batch. Strategies that shard gradients (FSDP, ZeRO-2, -3) reduce each one: keeping
        whole gradients until the last would cost the memory that they are there to save.
        """
        return contextlib.nullcontext()

    def _backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def nonfinite_micro_batches(self) -> list[int]:
        """Indices of this rank's micro-batches of the last step whose loss is not finite."""
        return [i for i, loss in enumerate(self._losses) if not torch.isfinite(loss)]

    def unreached_parameters(self) -> list[str]:
        """Trained parameters that no rank's loss depends on, so that they would not learn. Only the first call looks.

        To be called after the first step's `gradients`.

        Raises:
            RecipeError: on every rank, after the process group has ended, where the strategy cannot train then.
        """
        if self._are_reached:
            return []
        self._are_reached = True
        check_hooks()
        mine = {name for name, parameter in self.trained_parameters() if not self._is_reached(parameter)}
        candidates = self._of_any_rank(mine)
        if not candidates:
            return []
        # A rank may hold no part of a parameter that others have a gradient for.
        held = {name for name, _ in self.trained_parameters()}
        return sorted(candidates - self._of_any_rank(candidates & held - mine))

    def _is_reached(self, parameter: torch.nn.Parameter) -> bool:
        return parameter.grad is not None

    def _of_any_rank(self, names: set[str]) -> set[str]:
        return {name for text in self.collectives.gather_texts(json.dumps(sorted(names))) for name in json.loads(text)}

    def generators(self) -> list[torch.Tensor]:
        """States of torch's random generators of this process."""
        on_gpu = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *on_gpu]

    def _assert_none_drawn(self, before: list[torch.Tensor]) -> None:
        """Check that the first step drew no number but those of `draws`. What a process draws from its own generator
        depends on the strategy, and on where a run was resumed.

        Raises:
            RecipeError: on every rank, after the process group has ended.
        """
        if self.collectives.all_true(all(map(torch.equal, before, self.generators()))):
            return
        self.close()
        raise RecipeError(
            "model, objective: the first step drew random numbers of its own, beside dropout that is drawn for each"
            " token, so that the curve would depend on processes and micro-batches; set what draws to 0 (in the model's"
            " config.json, or in the code of the objective)"
        )

    def begin_step(self, number: int) -> None:
        """Name the step to faults, heartbeat and checks."""
        self.current_step = number

    def step(self, shares: dict[str, torch.Tensor], *values: float) -> StepResult:
        """Clip, update the weights and clear the gradients. If the global gradient norm is not finite, the weights stay
        unchanged, under every strategy and on every rank alike.

        Synchronizes with the device once, for all values that the host needs. On a GPU the update stays queued, so its
        time shows in the next synchronization.

        Args:
            shares: the result of `gradients`.
            values: numbers whose maximum over the ranks is wanted.
        """
        self.beat("update", self.current_step)
        faults.at("step.update", self.current_step)
        with record_function(f"{PHASE}update"):
            return self._update(shares, values)

    def _update(self, shares: dict[str, torch.Tensor], values: tuple[float, ...]) -> StepResult:
        if self.accelerator.scaler is not None:
            self.accelerator.unscale_gradients()
        # Not accelerator.clip_grad_norm_, whose norm is float32: DeepSpeed's is float64, and would clip otherwise.
        squares = square_sum(self.model.parameters(), self._num_shards, self._on_device)
        # The step's one wait for the device: whatever the host must know, votes to stop included, goes into this.
        rows = self.collectives.all_gather(*shares.values(), squares, *values)
        rows[:, len(shares)] = np.sqrt(rows[:, len(shares)].mean())
        result = self._result(shares, rows)
        # Before clipping, which scales what it looks at.
        result = replace(result, unusual=self._unusual(result.grad_norm))
        # The norm decides, not the loss: a loss that is not finite gives such a norm, which is the same on all ranks.
        # Under fp16 the scaler must see a step that is not finite: it skips it and lowers its scale.
        if math.isfinite(result.grad_norm) or self.accelerator.scaler is not None:
            if self.max_grad_norm:
                clip(self.model.parameters(), result.grad_norm, self.max_grad_norm)
            if self.loss_scale is not None:
                self.loss_scale.update(overflowed=not math.isfinite(result.grad_norm))
            self._complete_gradients()
            self.optimizer.step()
        self._clear_gradients()
        return result

    def _complete_gradients(self) -> None:
        """Give weights that this step's loss does not depend on their gradient, zero: torch's optimizers would leave
        them out, with their decay and moments, and DeepSpeed, whose tensors are flat, does not.
        """
        for parameter in self._trained_tensors():
            if parameter.grad is None and parameter.numel():  # FSDP1 has weights of which a process holds nothing
                parameter.grad = torch.zeros_like(parameter)

    def _unusual(self, norm: float) -> UnusualGradient | None:
        """Find where the gradients are large, if their norm is unusual. Called while they are there."""
        usual = self._usual.median
        if not self._usual.begins(norm):
            return None
        names = list(self.parameter_shapes())
        places = {name: i for i, name in enumerate(names)}
        squares = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        for name, square in self._squares():
            squares[places[name]] = square
        means = self.collectives.all_reduce_mean(squares).tolist()
        return UnusualGradient(norm=norm, usual=usual, squares=dict(zip(names, means, strict=True)))

    def _squares(self) -> Iterator[tuple[str, torch.Tensor | float]]:
        """Yield, by parameter of this rank, numbers whose mean over the ranks is the square of its gradient's norm."""
        return squares(self.trained_parameters(), self._num_shards)

    def _num_shards(self, gradient: torch.Tensor) -> float:
        """Into how many different parts the ranks divide this gradient."""
        return num_shards(gradient)

    def _clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _result(self, shares: dict[str, torch.Tensor], rows: np.ndarray) -> StepResult:
        """Reduce `rows` [ranks, columns] over the ranks; the columns are shares, gradient norm and values."""
        means = self.collectives.sums(rows[:, : len(shares)])
        norm, *maxima = rows[:, len(shares) :].max(0).tolist()
        return StepResult(means=dict(zip(shares, means, strict=True)), grad_norm=norm, maxima=maxima)

    @torch.no_grad()
    def evaluate(
        self,
        loss_function: LossFunction,
        batches: Iterable[Batch],
        stop_reason: Callable[[], str | None] = lambda: None,
    ) -> dict[str, float] | str:
        """Means over the whole set of `loss` and the objective's metrics, and `num_tokens`, the targets in it.

        Args:
            batches: the same number on every rank.
            stop_reason: called on every rank every few batches, may be collective; a reason ends the evaluation and is
                returned.
        """
        self.model.eval()
        totals: dict[str, torch.Tensor] = {}
        count = num_tokens = 0.0
        for start, group in _in_groups(batches):
            if reason := stop_reason():
                self._end_evaluation()
                return reason
            outcomes = self._forwards(loss_function, group, partial(self._begin_evaluation_batch, start))
            for batch, outcome in zip(group, outcomes, strict=True):
                _add(totals, outcome)
                count += outcome.count
                num_tokens += len(batch["targets"])
        self._end_evaluation()
        *sums, count, num_tokens = self.collectives.sums(
            self.collectives.all_gather(*totals.values(), count, num_tokens)
        )
        means = {name: total / max(count, 1) for name, total in zip(totals, sums, strict=True)}
        return means | {"num_tokens": round(num_tokens)}

    @torch.no_grad()
    def collect(
        self,
        function: Callable[[Any, Batch], torch.Tensor],
        batches: Iterable[tuple[Batch, torch.Tensor]],
        size: int,
        *,
        what: str,
    ) -> np.ndarray:
        """Evaluate a function on every sequence; all values on every rank, float64 [size].

        Args:
            function: from the model and a batch to a value for each of its sequences.
            batches: with the indices of their sequences; each sequence once over all data-parallel ranks, and the same
                number of batches on every rank.
            what: names the batches to the watchdog.
        """
        self.model.eval()
        values = torch.zeros(size, dtype=torch.float64, device=self.device)
        for start, group in _in_groups(batches):
            begin = partial(self._begin_batch_of, what, start)
            results = self._forwards(function, [batch for batch, _ in group], begin)
            for (_, indices), result in zip(group, results, strict=True):
                values[self._on_device(indices)] = result.double()
        self._end_evaluation()
        return self.collectives.all_reduce_sum(values).cpu().numpy()

    def _forwards(
        self, function: Callable[[Any, Batch], Any], batches: list[Batch], begin: Callable[[int], None]
    ) -> Iterable[Any]:
        """The function's result for each batch, without gradients; before each, `begin` is called with its index."""
        for i, batch in enumerate(batches):
            begin(i)
            yield self._forward(function, batch)

    def _begin_evaluation_batch(self, start: int, i: int) -> None:
        self.beat(f"evaluation batch {start + i + 1}", self.current_step)
        faults.at("eval.batch", self.current_step)

    def _begin_batch_of(self, what: str, start: int, i: int) -> None:
        self.beat(f"{what} batch {start + i + 1}", self.current_step)

    def _end_evaluation(self) -> None:
        """Return to training mode. FSDP must reshard here: it keeps gathered weights for a backward that never comes,
        while state is read and written in shards, and the next forward must see what was written.
        """
        self.model.train()

    def check_ranks(self, position: dict[str, Any]) -> None:
        """Compare weights and optimizer state that several ranks hold, and the position in the data, by digest.

        Args:
            position: of this rank.

        Raises:
            RuntimeError: see `agreement.check`.
        """
        digests = agreement.digests(self._replicated_tensors())
        agreement.check({**position, **digests}, self.collectives, self.current_step)

    def _replicated_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that several ranks hold alike, by a name that is the same on these."""
        for piece in self.held_pieces():
            if piece.copies > 1:
                where = f", from element {piece.start}" if piece.start else ""
                yield f"{piece.kind} of {piece.name}{where}", piece.data

    def parameter_shapes(self) -> dict[str, list[int]]:
        """Whole shapes of the trained parameters by their names in the transformers model; tied ones come once."""
        return self._shapes

    def pieces(self) -> Iterator[state.Piece]:
        """The part of weights and optimizer state that this rank writes; all ranks together write everything once.

        Use each piece before the next is drawn, see `held_pieces`.
        """
        return (share for piece in self.held_pieces() if (share := piece.share()).data.numel())

    def held_pieces(self, create: state.KindsOf | None = None) -> Iterator[state.Piece]:
        """Yield this rank's part of every trained parameter and its optimizer state; tied parameters come once.

        A piece is valid until the next is drawn: state on NVMe is swapped in only that long.

        Args:
            create: the optimizer state to create, in zeros, where there is none yet; what is then written into pieces
                is kept. Without it, pieces are read-only.
        """
        parameters = ((name, parameter, self._ranks_with(parameter)) for name, parameter in self.trained_parameters())
        return state.held_pieces(parameters, state.Moments(self.base_optimizer), self.world.rank, create)

    def _ranks_with(self, parameter: torch.nn.Parameter) -> Sequence[int]:
        """The ranks that hold a parameter of this rank, or parts of it."""
        return range(self.world.num_processes)

    def restore(
        self, fill: Callable[[Iterable[state.Piece]], None], kinds: state.KindsOf, counts: dict[str, Any]
    ) -> None:
        """Restore weights, optimizer state, and the result of `counts` from when they were saved.

        Args:
            fill: writes into the pieces, each before it draws the next.
            kinds: see `state.KindsOf`.
        """
        fill(self.held_pieces(kinds))
        self._finish_restore(counts["updates"])
        if counts["loss_scaler"] is not None and self.loss_scale is not None:
            self.loss_scale.restore(counts["loss_scaler"])
            self._apply_loss_scale(self.loss_scale.scale)

    def _finish_restore(self, num_updates: int | None) -> None:
        """Restore the optimizer's count and the copies that forwards read, after all pieces were written."""
        if num_updates is None:
            return
        for parameter, moments in self.base_optimizer.state.items():
            if self.counts_beside in moments:  # what lacks it, as Muon's matrices do, counts nothing
                # On the device where fused AdamW creates it. DeepSpeed's own and bitsandbytes' count in an int.
                fresh = torch.zeros((), device=parameter.device)
                old = moments.get("step", fresh)
                moments["step"] = torch.full_like(old, num_updates) if isinstance(old, torch.Tensor) else num_updates

    def counts(self) -> dict[str, Any]:
        """The optimizer's number of updates, for Adam's bias correction, and under fp16 the loss scaler's state."""
        # An optimizer may not count, and a rank may hold no part of what is trained.
        mine = {int(moments["step"]) for moments in self.base_optimizer.state.values() if "step" in moments}
        assert len(mine) <= 1, f"the optimizer counts different updates: {sorted(mine)}"
        updates = int(self.collectives.all_reduce_max(*mine or [-1])[0])
        scaler = None if self.loss_scale is None else self.loss_scale.state()
        return {"updates": None if updates < 0 else updates, "loss_scaler": scaler}

    def _apply_loss_scale(self, scale: float) -> None:
        """Hand a restored scale to the library."""
        scaler = self.accelerator.scaler
        scaler.load_state_dict(scaler.state_dict() | {"scale": scale})

    @property
    def base_optimizer(self) -> Any:
        """torch's optimizer inside its wrappers."""
        return self.optimizer.optimizer

    def _trained_tensors(self) -> list[torch.nn.Parameter]:
        return [parameter for _, parameter in self.trained_parameters()]

    def trained_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Trained parameters in the model's order, by names without the wrappers' prefixes; tied ones come once."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""), parameter

    def transformer(self) -> Any:
        """The transformers model inside the wrapper."""
        return getattr(self.model, "module", self.model)

    def close(self) -> None:
        """End the process group together with all other ranks."""
        self.collectives.leave(self.timeout)

    def _forward(self, function: Callable[[Any, Batch], Any], batch: Batch) -> Any:
        batch = self.on_device(batch)
        shared = {} if self.sequence_mesh is None else {"sequence_group": self.sequence_mesh.get_group()}
        return function(self.model, batch | shared)

    def on_device(self, batch: Batch) -> Batch:
        """A micro-batch with its tensors on the device of this process."""
        return {
            name: self._on_device(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()
        }

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return to_device(tensor, self.device)


def _in_groups(batches: Iterable[Any]) -> Iterator[tuple[int, list[Any]]]:
    """Groups of at most EVALUATION_BATCHES, each with the number of batches before it."""
    rest, start = iter(batches), 0
    while group := list(islice(rest, EVALUATION_BATCHES)):
        yield start, group
        start += len(group)


def _add(totals: dict[str, torch.Tensor], outcome: LossOutput) -> None:
    """Add loss and metrics of a micro-batch, in float64 on the device."""
    for name, value in {"loss": outcome.loss_sum.detach(), **outcome.metrics}.items():
        totals[name] = totals.get(name, 0) + value.double()


def num_elements(parameter: torch.nn.Parameter) -> int:
    """Size of the whole parameter, also where it is a placeholder (ZeRO-3) or holds two weights a byte (4 bits)."""
    quantized = getattr(parameter, "quant_state", None)
    if quantized is not None:
        return math.prod(quantized.shape)
    return getattr(parameter, "ds_numel", parameter.numel())
