"""Pipeline parallel: each group of processes, a stage, holds some layers; micro-batches pass through all stages.

transformers leaves a stage's layers in the model and puts identities in place of the others, so that names stay those
of the whole model. Schedule and messages are torch's. What torch splits into micro-batches are only their numbers:
every stage has the batches themselves.

A stage may have several ranges of layers, its chunks, each of which is a stage to torch (Narayanan et al. 2021, arXiv
2104.04473, section 2.2). The model then runs one of them at a time (`add_loss` in models/loss.py).
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _PipelineSchedule

from cookbook.config.objectives.forward import Batch, negative_log_likelihood
from cookbook.facts.pipeline_stages import num_planned
from cookbook.training.engine.base import Engine, num_elements
from cookbook.training.engine.collectives import add_up
from cookbook.training.engine.copies import Copies
from cookbook.training.engine.findings import Comparison
from cookbook.training.engine.fsdp2 import Fsdp2WhileRead
from cookbook.training.engine.norm import local

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class Pipeline(Copies):
    """Stages of whole layers, or of layers whose matrices its ranks shard."""

    def _start(self, *, on_cpu: bool, **options: Any) -> Accelerator:
        accelerator = super()._start(on_cpu=on_cpu, **options)
        size, num_stages = self.mesh.stage_size, self.mesh.pipeline
        self._index = self.mesh.stage(self.world.rank)
        pipelines = [dist.new_group(range(i, self.mesh.num_processes, size)) for i in range(size)]
        ends = [dist.new_group([i, i + (num_stages - 1) * size]) for i in range(size)]
        within = self.world.rank % size
        self._group, self._ends = pipelines[within], ends[within]
        self._modes: dict[bool, Any] = {}
        # NCCL makes a communicator at the first use, and of a batch of messages not all stages would take part in that.
        dist.all_reduce(torch.zeros(1, device=accelerator.device), group=self._group)
        return accelerator

    def _ranks_of(self, stage: int) -> range:
        return range(stage * self.mesh.stage_size, (stage + 1) * self.mesh.stage_size)

    @property
    def _is_last(self) -> bool:
        return self._index == self.mesh.pipeline - 1

    def prepare(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, counts_beside: str | None = None
    ) -> None:
        super().prepare(model, optimizer, counts_beside=counts_beside)
        sizes = {
            name: (num_elements(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()
        }
        parts = [json.loads(text) for text in self.collectives.gather_texts(json.dumps([self._shapes, sizes]))]
        self._shapes = {name: shape for shapes, _ in parts for name, shape in shapes.items()}
        whole = {name: size for _, part in parts for name, size in part.items()}
        self.num_parameters = sum(count for count, _ in whole.values())
        self.num_trained = sum(count for count, is_trained in whole.values() if is_trained)

    def _wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        is_adapted = any(not parameter.requires_grad for parameter in model.parameters())
        # That of one process, which adds up what the layers return in the dtype of the embedding. Messages in bf16
        # would be half the bytes, and round at each border: the curve would depend on the number of stages.
        self._hidden_dtype = self.frozen_dtype if is_adapted else torch.float32
        transformer: Any = model
        is_tied = transformer.config.tie_word_embeddings and self._index in (0, self.mesh.pipeline - 1)
        # With an adapter that trains rows of it, the matrix is frozen and they are tied.
        self._tied = [*transformer.get_input_embeddings().parameters()] if is_tied else []
        return super()._wrap(model, optimizer)

    def _accumulate(self, loss: Callable[[Any, Batch], torch.Tensor], micro_batches: list[Batch]) -> None:
        self._forwards(loss, micro_batches, lambda i: self._begin_micro_batch(i, len(micro_batches)))
        self._add_up_tied()
        self._average_over_copies()

    def _add_up_tied(self) -> None:
        """An embedding that is tied to the head has gradients in the first stage and in the last."""
        gradients = [local(weight.grad) for weight in self._tied if weight.grad is not None]
        if gradients:
            add_up(gradients, self._ends, self.gradient_dtype)

    def _forwards(
        self, function: Callable[[Any, Batch], Any], batches: list[Batch], begin: Callable[[int], None]
    ) -> list[Any]:
        """Pass micro-batches through all stages: their forwards, and if gradients are on, their backwards.

        Args:
            function: from the model and a batch to a result; with gradients on, to a loss.
            begin: called with the index of a micro-batch before its forward.

        Returns:
            The results; on all stages but the last those of a model that returns zeros.
        """
        has_backward, num_stages, chunks = torch.is_grad_enabled(), self.mesh.pipeline, self.mesh.chunks
        on_meta: dict[str, Any] = {"device": "meta", "requires_grad": has_backward}
        # torch declares one shape for all messages, so they are as long as the longest.
        num_tokens = max(batch["input_ids"].numel() for batch in batches)
        message = torch.empty(num_tokens, self.model.config.hidden_size, dtype=self._hidden_dtype, **on_meta)
        # A schedule for each step (0.2 ms): one that is kept would be bound to the batches and the length of another,
        # and would keep a buffer for each message of a step.
        stages, piped = [], []
        for chunk, index in enumerate(range(self._index, num_stages * chunks, num_stages)):
            # Loss and metrics are the last chunk's, once; the others only need what the model gets, and the loss of the
            # zeros that they return need not be 0 (DPO's is not).
            of_batch = function if chunk == chunks - 1 else negative_log_likelihood
            is_last = index == num_stages * chunks - 1
            stages.append(_Stage(self, chunk, of_batch, batches, begin, message, is_last=is_last))
            stage = _ScheduledStage(
                self,
                stages[-1],
                index,
                num_stages * chunks,
                self.device,
                input_args=(message,) if index else (),
                output_args=(torch.empty((), **on_meta) if is_last else message,),
                group=self._group,
            )
            piped.append(stage)
        # No zero-bubble schedule: its backward of weights computes a checkpointed layer again for each group of
        # weights, and runs no hook of a parameter (torch 2.13, pipelining/_backward.py, stage_backward_weight).
        # 1F1B needs a micro-batch for each stage; with fewer it would be GPipe: all forwards, then all backwards.
        of_one = _OneForwardOneBackward if len(batches) >= num_stages else _AllForwardsFirst
        loss = (lambda output, number: output) if has_backward else None
        # scale_grads would divide by the number of micro-batches, after `gradients` has divided by that of targets.
        options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
        schedule: Any = (
            _InterleavedSchedule(piped, len(batches), **options)
            if chunks > 1
            else of_one(piped[0], len(batches), **options)
        )
        # torch splits tensors into equal parts, which ragged and packed rows do not have; numbers of batches do.
        numbers = torch.arange(len(batches))
        try:
            schedule.step(
                number=numbers, target=numbers if self._is_last and has_backward else None, return_outputs=False
            )
        except RuntimeError as error:  # torch hides that of a forward, such as one out of memory, behind its own
            raise error.__cause__ or error from None
        return stages[-1].results

    def _num_shards(self, gradient: torch.Tensor) -> float:
        is_tied = any(gradient is weight.grad for weight in self._tied)
        return super()._num_shards(gradient) * self.mesh.pipeline / (2 if is_tied else 1)

    def _ranks_with(self, parameter: torch.nn.Parameter) -> Sequence[int]:
        if any(parameter is weight for weight in self._tied):
            return (*self._ranks_of(0), *self._ranks_of(self.mesh.pipeline - 1))
        return self._ranks_of(self._index)

    def _findings(self) -> Iterator[Comparison]:
        yield from super()._findings()
        stage = self.transformer()._pp_stage
        yield "stage", (self._index, self.mesh.pipeline), (stage.pp_rank, stage.pp_size)
        held = {int(index) for name, _ in self.model.named_parameters() for index in _LAYER.findall(name)}
        yield "ranges of layers", self.mesh.chunks, len({i for i in held if i - 1 not in held})
        asked, ranks = (dist.get_process_group_ranks(group) for group in (self._group, stage.pp_group))
        yield "ranks of the pipeline", asked, ranks


class ShardedPipeline(Pipeline, Fsdp2WhileRead):
    """Stages whose ranks share their layers by FSDP2, which transformers applies; accelerate has no part in it.

    A layer's weights are gathered for the forward of each micro-batch and again for its backward, and its gradients
    are reduced after that: between them a process has its shards only.
    """

    load_options = Fsdp2WhileRead.load_options

    def _wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        self._complete(model, optimizer)
        wrapped = super()._wrap(model, optimizer)
        self._hidden_dtype = self.low_dtype or torch.float32  # of what FSDP2's layers return
        return wrapped

    def _forward(self, function: Callable[[Any, Batch], Any], batch: Batch) -> Any:
        return Engine._forward(self, function, batch)  # without autocast: FSDP2 casts


class _ScheduledStage(PipelineStage):
    """A stage for torch's schedules, with something of the engine's around each backward."""

    def __init__(self, engine: Pipeline, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.engine = engine

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> None:
        with self.engine._backward_apart():
            super().backward_one_chunk(*arguments, **options)


class _VotesOnce(_PipelineSchedule):
    """At its start each schedule lets the stages vote whether all know their shapes, by messages, with a wait of the
    host for the GPU (torch 2.13, pipelining/schedules.py, _warmup_p2p; 2.15, _initialize_pipeline_distributed_state).
    The answer stays, with gradients and without.
    """

    def _warmup_p2p(self, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        self._vote_once("_warmup_p2p", stages, has_backward, p2p_done)

    def _initialize_pipeline_distributed_state(self, stages: list[Any], has_backward: bool, initialize: bool) -> None:
        self._vote_once("_initialize_pipeline_distributed_state", stages, has_backward, initialize)

    def _vote_once(self, method: str, stages: list[Any], has_backward: bool, flag: bool) -> None:
        modes = stages[0].engine._modes
        if has_backward not in modes:
            getattr(super(), method)(stages, has_backward, flag)
            modes[has_backward] = stages[0]._inference_mode
        for stage in stages:
            stage._inference_mode = modes[has_backward]


class _OneForwardOneBackward(_VotesOnce, Schedule1F1B):
    pass


class _AllForwardsFirst(_VotesOnce, ScheduleGPipe):
    pass


class _InterleavedSchedule(_VotesOnce, ScheduleInterleaved1F1B):
    """torch's schedule for any number of micro-batches: that for `num_planned`, without those that there are not."""

    def __init__(self, stages: list[Any], count: int, **options: Any) -> None:
        # Before it raises an error, it logs the whole order of all stages.
        logging.getLogger(ScheduleInterleaved1F1B.__module__).disabled = True
        self.count = count
        # torch refuses a number that its rounds do not divide, and its ScheduleLoopedBFS, which takes any, keeps the
        # activations of all micro-batches.
        super().__init__(stages, num_planned(count, stages[0].group_size, len(stages)), **options)

    def _prepare_schedule_with_comms(self, actions: dict[int, list[Any]], *arguments: Any) -> None:
        self._n_microbatches = self.count
        self.pipeline_order = {
            rank: [action for action in order if action is None or action.microbatch_index < self.count]
            for rank, order in actions.items()
        }
        super()._prepare_schedule_with_comms(self.pipeline_order, *arguments)


class _Stage(torch.nn.Module):
    """The module that torch calls with the number of a micro-batch, and with what came from the stage before."""

    def __init__(
        self,
        engine: Pipeline,
        chunk: int,
        function: Callable[[Any, Batch], Any],
        batches: list[Batch],
        begin: Callable[[int], None],
        message: torch.Tensor,
        *,
        is_last: bool,
    ) -> None:
        super().__init__()
        self.engine, self.function, self.batches, self.begin = engine, function, batches, begin
        self.chunk, self.message, self.is_last = chunk, message, is_last
        self.results: list[Any] = []

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """A message to the next stage, or on the last the loss, a scalar.

        Args:
            received: the message of the stage before, if there is one.
        """
        i = int(number)
        self.begin(i)
        rows, length = self.batches[i]["input_ids"].shape
        hidden = received[0][: rows * length].view(rows, length, -1) if received else None
        sent: list[torch.Tensor] = []

        def model(**inputs: Any) -> Any:
            result = self.engine.model(hidden=hidden, chunk=self.chunk, **inputs)
            if self.is_last:
                return result
            sent.append(result.flatten(0, 1).to(self.message.dtype))
            # So the objective runs on every stage, and all know the names of its metrics.
            return self.engine.transformer().zeros_of_result(**inputs)

        self.results.append(self.engine._forward(lambda _, batch: self.function(model, batch), self.batches[i]))
        if sent:
            return F.pad(sent[0], (0, 0, 0, len(self.message) - len(sent[0])))
        return self.results[-1] if torch.is_grad_enabled() else received[0].new_zeros(())
