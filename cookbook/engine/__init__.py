"""Runs a strategy: starts it on GPU or CPU, owns all forwards and backwards of a step, and proves what is in force.

`train.py` knows no strategy; it says `gradients`, `step`, `evaluate`. What differs between strategies lies here, in
`start` (how one begins) and in `findings` (how one is recognised).
"""

import contextlib
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cookbook import faults
from cookbook.ds_config import deepspeed_config, separate_swap
from cookbook.engine import state
from cookbook.engine.findings import describe_optimizer, find, is_sharded
from cookbook.engine.norm import clip, square_sums
from cookbook.engine.start import build_ops, make_deterministic, start_accelerator, wrap_fsdp1_on_cpu
from cookbook.launch import World
from cookbook.plan import Plan
from cookbook.strategy import Strategy

__all__ = ["Batch", "Engine", "Objective", "Outcome", "StepResult", "build_ops", "make_deterministic"]

PATIENCE = timedelta(days=1)
"""For the main process to write the model, which no collective could wait for."""

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


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Where this process stands among those that see different samples."""

    size: int
    rank: int


class Engine:
    """One strategy in force. All methods are collective: every process calls them."""

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
        self.strategy, self.plan, self.world = strategy, plan, world
        self.mixed_precision, self.max_grad_norm = mixed_precision, max_grad_norm
        self.deepspeed_config = deepspeed_config(strategy, plan, mixed_precision, micro_batch_size, max_grad_norm)
        self.swap_folders = separate_swap(self.deepspeed_config, run_name)
        self._swap_seen = not self.swap_folders
        self.timeout = timeout
        self.accelerator = start_accelerator(strategy, plan, mixed_precision, self.deepspeed_config, timeout)
        self.device: torch.device = self.accelerator.device
        self.current_step = 0
        self._losses: list[torch.Tensor] = []
        self._told = 0
        self.beat: Callable[[str, int], None] = lambda doing, step: None
        """Told what begins, of which step; for who watches over this process."""
        self.data_parallel = DataParallel(size=plan.data_parallel_size, rank=world.rank // strategy.tp_size)
        # Any: DDP, FSDP and DeepSpeed each wrap the model in a class of their own.
        self.model: Any
        self.optimizer: Any

    @property
    def is_main(self) -> bool:
        """True on the one process that prints and writes."""
        return self.world.rank == 0

    def describe(self) -> dict[str, Any]:
        """The strategy in force, as `assert_in_force` found it."""
        found = {what: _plain(value) for what, _, value in find(self)}
        return {"file": self.strategy.path, "kind": self.strategy.kind, "processes": self.plan.num_processes, **found}

    @property
    def frozen_dtype(self) -> torch.dtype:
        """What weights that are not trained are held in: the forward multiplies in it, and no optimizer needs more.

        FSDP1 flattens frozen and trained weights together, in one dtype.
        """
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.mixed_precision)
        return torch.float32 if low is None or self.strategy.kind == "fsdp1" else low

    def load_options(self, *, is_quantized: bool) -> dict[str, Any]:
        """What `from_pretrained` must be told, so that no process has the whole model in host memory without need.

        Tensor parallel cuts the model while it is read, and puts each piece on its GPU. Weights that stay whole on a
        GPU are read straight to it. Of FSDP the first process of a machine reads, and the first of all sends each its
        share; the others must be told to leave the files alone, which transformers 5.23 reads everywhere
        (modeling_utils.py, _load_pretrained_model). ZeRO-3 cuts each weight as it is made.

        Args:
            is_quantized: to 4 bits. No such weight is sent (accelerate 1.15, fsdp_utils.py, fsdp2_prepare_model), so
                each process of FSDP reads and quantises all.
        """
        if self.strategy.kind == "tp":
            from transformers.distributed import DistributedConfig

            return {"distributed_config": DistributedConfig(tp_size=self.strategy.tp_size)}
        stays_whole = self.strategy.kind in ("single", "ddp") or self.strategy.zero_stage in (1, 2)
        if stays_whole and self.device.type == "cuda":
            return {"device_map": {"": self.device}}
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        receives = plugin is not None and plugin.cpu_ram_efficient_loading and self.world.local_rank != 0
        return {"device_map": {"": "meta"}} if receives and not is_quantized else {}

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
        if self.strategy.kind == "tp":
            # transformers has cut the model already; accelerate's own preparation would wrap it in DDP.
            self.model = model if self.device.type == "cpu" else model.to(self.device)
            self.optimizer = self.accelerator.prepare(optimizer)
        else:
            if self.strategy.kind == "fsdp1" and self.device.type == "cpu":
                model = wrap_fsdp1_on_cpu(self.accelerator, model)
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.assert_in_force()

    def assert_in_force(self) -> None:
        """Compares the running state with strategy, recipe and plan.

        Raises:
            RuntimeError: lists every difference.
        """
        wrong = [(what, asked, found) for what, asked, found in find(self) if asked != found]
        if wrong:
            lines = [f"  {what}: asked for {asked!r}, found {found!r}" for what, asked, found in wrong]
            raise RuntimeError("\n".join([f"{self.strategy.path} is not what runs:", *lines]))

    def gradients(self, objective: Objective, micro_batches: list[Batch], count: int) -> dict[str, torch.Tensor]:
        """Runs every forward and backward of one optimizer step.

        Every engine divides the gradient sum over the data-parallel processes by their number D, and we want
        d(sum of all losses)/N. Hence each process runs backward on  loss sum x D / N,  N counting the whole global
        batch. Accumulation adds up micro-batches and needs no factor: accelerate is told 1, and DeepSpeed
        `scale_wrt_gas=False`.

        Args:
            count: N, what the objective is a mean of (targets or pairs), over all processes.

        Returns:
            Of `loss` and each metric of the objective, what this process adds to the mean over the global batch, on the
            device: for `step`, which asks for all at once.
        """
        scale = self.data_parallel.size / count
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
                if self.strategy.kind == "zero":
                    self.model.backward(loss, scale_wrt_gas=False)
                else:
                    self.accelerator.backward(loss)
                # Before the next forward: bitsandbytes' part of the graph holds its weights, which ZeRO-3 gathered.
                del outcome, loss
        return {name: total / count for name, total in totals.sums.items()}

    def nonfinite_micro_batches(self) -> list[int]:
        """Which of this process's micro-batches in the last step had a loss that is not finite."""
        return [i for i, loss in enumerate(self._losses) if not torch.isfinite(loss)]

    def begin_step(self, number: int, seed: int) -> None:
        """Seeds dropout, from the step and the data-parallel process alone: nothing to save, nothing to resume."""
        self.current_step = number
        sequence = np.random.SeedSequence([seed, number, self.data_parallel.rank])
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
        if self.strategy.kind == "zero":
            # Looks at the norm itself, and leaves the step out.
            self.model.step()
            norm = math.nan if self.model.optimizer.overflow else self.model.get_global_grad_norm()
            if not self._swap_seen and not self.model.optimizer.overflow:
                self._assert_swapped()
            return self._result(shares, self._exchange(*shares.values(), norm, *values))
        if self.accelerator.scaler is not None:
            self.accelerator.unscale_gradients()
        whole, parts = square_sums(self.model.parameters(), self._is_cut, self._on_device)
        rows = self._exchange(*shares.values(), whole, *values, parts)
        rows[:, len(shares)] = np.sqrt(rows[:, len(shares)].max() + rows[:, -1].sum() / self.strategy.dp_replicate_size)
        result = self._result(shares, rows[:, :-1])
        # Under fp16 the scaler leaves out what is not finite, and lowers its scale.
        if math.isfinite(result.grad_norm) or self.accelerator.scaler is not None:
            if self.max_grad_norm:
                clip(self.model.parameters(), result.grad_norm, self.max_grad_norm)
            self.optimizer.step()
        self._clear_gradients()
        return result

    def _result(self, shares: dict[str, torch.Tensor], rows: np.ndarray) -> StepResult:
        """From columns of shares, the gradient norm and values."""
        means = self._over_data(rows[:, : len(shares)])
        norm, *maxima = rows[:, len(shares) :].max(0).tolist()
        return StepResult(means=dict(zip(shares, means, strict=True)), grad_norm=norm, maxima=maxima)

    def _clear_gradients(self) -> None:
        # DDP's are views of its buckets. Set to None, those of all micro-batches but the last would lie beside them.
        self.optimizer.zero_grad(set_to_none=not isinstance(self.model, DistributedDataParallel))

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
        *sums, count, num_tokens = self._over_data(self._exchange(*totals.sums.values(), count, num_tokens))
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
        return self.sum_over_data(values).cpu().numpy()

    def _end_evaluation(self) -> None:
        """Back to training. FSDP keeps what it has gathered for a backward that does not come; but state is read and
        written in shards, and the next forward must see what was written.
        """
        self.model.train()
        if self.strategy.kind == "fsdp2":
            from torch.distributed.fsdp import FSDPModule

            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        if self.strategy.kind == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel
            from torch.distributed.fsdp._runtime_utils import _reshard

            for unit in FullyShardedDataParallel.fsdp_modules(self.model):
                handle: Any = unit._handle
                if handle is not None and handle.uses_sharded_strategy:
                    _reshard(unit, handle, True)

    def agree(self, value: bool) -> bool:
        """Whether `value` is true on every process."""
        return -self.maxima(-float(value))[0] > 0

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over data-parallel processes; a tensor-parallel group computes one value together and counts once."""
        if dist.is_initialized() and self.data_parallel.size > 1:
            dist.all_reduce(values)
        return values

    def maxima(self, *values: float) -> list[float]:
        """Of each value, the largest over the processes."""
        return self._exchange(*values).max(0).tolist() if dist.is_initialized() else [float(value) for value in values]

    def _exchange(self, *values: torch.Tensor | float) -> np.ndarray:
        """These values, of every process: float64 [processes, values]. Waits for the device, once."""
        numbers = [0.0 if isinstance(value, torch.Tensor) else value for value in values]
        mine = self._on_device(torch.tensor(numbers, dtype=torch.float64))
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                mine[i] = value
        if not dist.is_initialized():
            return mine.cpu().numpy()[None]
        rows = mine.new_empty(self.world.num_processes * len(values))
        dist.all_gather_into_tensor(rows, mine)
        return rows.view(-1, len(values)).cpu().numpy()

    def _over_data(self, rows: np.ndarray) -> list[float]:
        """Sums of what `_exchange` gave, as `sum_over_data`."""
        return rows[:: self.strategy.tp_size].sum(0).tolist()

    def tell_all(self, text: str) -> str:
        """The main process's text, on every process."""
        if not dist.is_initialized():
            return text
        store = dist.distributed_c10d._get_default_store()
        self._told += 1
        key = f"cookbook/told/{self._told}"
        if self.is_main:
            store.set(key, text)
        else:
            self.beat("waiting for the main process", self.current_step)
        return store.get(key).decode()

    def parameter_shapes(self) -> dict[str, list[int]]:
        """Of every trained parameter, whole, by its name in the transformers model; tied ones come once."""
        return {name: list(shape) for name, shape in self._shapes.items()}

    def pieces(self) -> Iterator[state.Piece]:
        """The part of weights and optimizer state that this process writes; those of all processes make the whole.

        Each must be used before the next is asked for.
        """
        return (share for piece in state.pieces(self) if (share := piece.share()).data.numel())

    def restore(
        self, fill: Callable[[Iterable[state.Piece]], None], kinds: state.KindsOf, counts: dict[str, Any]
    ) -> None:
        """Takes up a state: weights, optimizer state, and what `counts` gave when it was saved.

        Args:
            fill: writes into pieces of this process's memory, each before it asks for the next.
            kinds: see `state.KindsOf`.
        """
        fill(state.pieces(self, create=kinds))
        state.finish_restore(self, counts["updates"])
        if counts["loss_scaler"] is not None and self.mixed_precision == "fp16":
            self._set_loss_scaler(counts["loss_scaler"])

    def counts(self) -> dict[str, Any]:
        """What the optimizer counts: its updates, and under fp16 the state of the loss scale. Collective."""
        mine = state.updates_made(self)  # None on a process that has no share of what is trained
        updates = int(self.maxima(-1 if mine is None else mine)[0])
        return {"updates": None if updates < 0 else updates, "loss_scaler": self._loss_scaler()}

    def _loss_scaler(self) -> dict[str, Any] | None:
        if self.mixed_precision != "fp16":
            return None
        if self.strategy.kind == "zero":
            scaler = self.model.optimizer.loss_scaler
            return {"scale": float(scaler.cur_scale)} | {k: v for k, v in vars(scaler).items() if _is_number(v)}
        return self.accelerator.scaler.state_dict()

    def _set_loss_scaler(self, values: dict[str, Any]) -> None:
        """The scale under any strategy; when it changes next, only under the kind that counted."""
        scaler = self.model.optimizer.loss_scaler if self.strategy.kind == "zero" else self.accelerator.scaler
        known = vars(scaler) if self.strategy.kind == "zero" else scaler.state_dict()
        kept = {name: value for name, value in values.items() if name in known}
        if self.strategy.kind == "zero":
            known.update(kept | {"cur_scale": values["scale"]})
        else:
            scaler.load_state_dict(known | kept)

    def transformer(self) -> Any:
        """The transformers model inside the wrapper."""
        return getattr(self.model, "module", self.model)

    def close(self) -> None:
        """Leaves together. A process that exits while another still reads its last message breaks a run that was right.

        A barrier is not enough: with gloo its own last message is lost when the sender's sockets close too soon. So
        each process says in the store that it is past the barrier, and waits for the others to say so. The store may
        lie in the main process, where no launcher holds it (srun, ranks in the environment): that one leaves last.
        """
        if not dist.is_initialized():
            return
        self.beat("meeting the others", self.current_step)
        store = dist.distributed_c10d._get_default_store()
        # The main process may still be writing the model; it comes last and need not wait long.
        self._meet(store, "done", self.timeout if self.is_main else PATIENCE)
        # Without the device, NCCL's barrier guesses it and says so.
        dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)
        self._meet(store, "left", self.timeout)
        try:
            dist.destroy_process_group()
        finally:
            if not self.is_main:
                store.set(f"cookbook/gone/{self.world.rank}", "1")
        if self.is_main:
            self._meet(store, "gone", self.timeout)
        if self.world.local_rank == 0:
            for folder in self.swap_folders.values():
                shutil.rmtree(folder, ignore_errors=True)

    def _meet(self, store: dist.Store, place: str, patience: timedelta) -> None:
        """Waits for every process without a collective."""
        store.set(f"cookbook/{place}/{self.world.rank}", "1")
        store.wait([f"cookbook/{place}/{rank}" for rank in range(self.world.num_processes)], patience)

    def _assert_swapped(self) -> None:
        """After the first step, what was meant for NVMe must lie there.

        DeepSpeed keeps tensors under 1 MiB in memory (runtime/swap_tensor/utils.py, MIN_AIO_BYTES).
        """
        self._swap_seen = True
        optimizer = self.swap_folders.get("offload_optimizer")
        # The state of an adapter may well be too small; what is there to be swapped then are the frozen weights.
        has_state = all(parameter.requires_grad for parameter in self.model.parameters())
        swapped = list(optimizer.glob(f"**/optimizer/rank{self.world.rank}/*.swp")) if optimizer else []
        if optimizer is not None and has_state and not swapped:
            raise RuntimeError(
                f"{self.strategy.path} is not what runs: no optimizer state reached {optimizer}. Tensors under 1 MiB"
                " stay in memory, so a model this small has no use for NVMe: take zero3_offload"
            )
        parameters = self.swap_folders.get("offload_param")
        shares = [p.ds_tensor.ds_numel * p.ds_tensor.element_size() for p in self.model.parameters()]
        if parameters is not None and max(shares) >= 2**20 and not list(parameters.glob("**/*params/**/*.swp")):
            raise RuntimeError(f"{self.strategy.path} is not what runs: no parameter reached {parameters}")

    def _forward(self, function: Callable[[Any, Batch], Any], batch: Batch) -> Any:
        batch = {
            name: self._on_device(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()
        }
        # Only what accelerate has not prepared lacks its autocast.
        with self.accelerator.autocast() if self.strategy.kind == "tp" else contextlib.nullcontext():
            return function(self.model, batch)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Without waiting: from memory that is not pinned, a copy is done before the host goes on."""
        if self.device.type == "cuda" and not tensor.is_cuda:
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _synchronise(self, last: bool) -> contextlib.AbstractContextManager:
        """Communicates gradients when that is needed, and not before.

        DDP waits for the last micro-batch. What shards gradients (FSDP, ZeRO-2, -3) reduces each one: keeping whole
        gradients until the last would cost the memory that the strategy is there to save. HSDP reduces inside the
        shard group each time and between the replicas at the last.
        """
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        if self.strategy.kind == "tp":
            return self._apart_from_earlier_gradients()
        if self.strategy.kind == "fsdp2":
            self.model.set_requires_all_reduce(last)
        if self.strategy.kind == "zero":
            # Our windows may be shorter at the end of an epoch than gradient_accumulation_steps.
            self.model.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _apart_from_earlier_gradients(self) -> Iterator[None]:
        """Keeps the gradients of earlier micro-batches out of a tensor-parallel backward, for whole parameters.

        transformers 5.23 sums some of them over the mesh after each backward (Qwen3's q_norm and k_norm; class
        ReplicatedWithGradAllReduce): with what was accumulated before, that part would be summed again each time.
        """
        earlier = [(p, p.grad) for p in self.model.parameters() if p.grad is not None and not isinstance(p, DTensor)]
        for parameter, _ in earlier:
            parameter.grad = None
        yield
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _is_cut(self, gradient: torch.Tensor) -> bool:
        return is_sharded(gradient) or self.strategy.kind == "fsdp1"


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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _plain(value: Any) -> Any:
    """A finding as JSON has it; of a set with one element, that."""
    if isinstance(value, set | frozenset | tuple | list):
        items = [_plain(item) for item in value]
        return items[0] if isinstance(value, set | frozenset) and len(items) == 1 else items
    return value if isinstance(value, str | int | float | bool) or value is None else str(value).removeprefix("torch.")
