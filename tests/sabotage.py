"""Runs train.py with one deliberate mistake, so that the equivalence tests can show that they would notice it.

Each mistake is one that projects of the field have made. Usage: sabotage.py MISTAKE [arguments of train.py]
"""

import contextlib
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import train


def mean_of_means() -> None:
    """The loss as the mean over micro-batches of their means: short micro-batches weigh too much."""
    from cookbook.training.engine import Engine

    def gradients(self, objective, micro_batches, num_targets):
        total = 0.0
        for i, batch in enumerate(micro_batches):
            targets = max(1, len(batch["targets"]))
            with self._synchronise(i == len(micro_batches) - 1):
                loss = self._forward(objective, batch).loss_sum / targets / len(micro_batches)
                self.accelerator.backward(loss)
            total += loss.detach() / self.mesh.token_parallel_size
        return {"loss": total}

    Engine.gradients = gradients


def unused_module(kind: str = "LayerNorm", *sizes: int) -> None:
    """The model has a layer that its forward does not use."""
    import torch

    from cookbook.training.models import language_model

    right = language_model.load_model

    def load_model(*arguments, **options):
        model = right(*arguments, **options)
        model.planted = getattr(torch.nn, kind)(*sizes or [8])
        torch.nn.init.ones_(model.planted.weight)
        return model

    language_model.load_model = load_model


def unused_matrix() -> None:
    """That layer has a matrix of ones."""
    unused_module("Linear", 8, 8)


def no_exchange_of_heads_and_tokens() -> None:
    """Under sequence parallel, attention sees this process's part of each row alone."""
    from cookbook.training.models import attention

    right = attention.attend

    def attend(*arguments, sequence_mesh=None, **options):
        return right(*arguments, **options)

    attention.AttentionInterface.register(attention.PACKED, attend)


def log_probabilities_of_a_part() -> None:
    """Under sequence parallel, a loss over whole samples has the log-probabilities of this process's tokens alone."""
    from cookbook.config.objectives import forward

    forward._all_reduce = lambda values, group: values.clone()


def gradient_of_own_samples() -> None:
    """Under sequence parallel, what this process's tokens do to the losses of other processes' samples is left out."""
    from cookbook.config.objectives import forward

    forward._AddedUp.backward = staticmethod(lambda ctx, gradient: (gradient, None))


def gradient_divided_by_samples_processes() -> None:
    """The processes that share a sample are not counted among those that gradients are averaged over."""
    from cookbook.training.engine import Engine

    right = Engine.gradients

    def gradients(self, loss_function, micro_batches, count):
        shares = right(self, loss_function, micro_batches, count * self.mesh.sequence)
        return {name: share * self.mesh.sequence for name, share in shares.items()}

    Engine.gradients = gradients


def second_copy_outlives_the_update() -> None:
    """ZeRO++'s second copy of the weights is not made again after an update."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    DeepSpeedZeroOptimizer_Stage3.invalidate_secondary_tensor = lambda self: None


def copies_not_averaged() -> None:
    """Each tensor-parallel group updates its copy by its own samples."""
    from cookbook.training.engine.tensor_parallel import TensorParallel

    TensorParallel._average_over_copies = lambda self: None


def tied_gradients_not_added() -> None:
    """A pipeline's first and last stage each update their copy of a tied embedding by their own gradients."""
    from cookbook.training.engine.pipeline import Pipeline

    Pipeline._add_up_tied = lambda self: None


def every_chunk_runs_all_layers() -> None:
    """A stage with several ranges of layers computes all of them each time."""
    from cookbook.training.models import loss

    right = loss._only
    loss._only = lambda backbone, layers, *, is_last: right(backbone, range(len(backbone.layers)), is_last=is_last)


def copies_of_stages_not_averaged() -> None:
    """Each pipeline updates its copy by its own samples."""
    from cookbook.training.engine.pipeline import Pipeline

    Pipeline._average_over_copies = lambda self: None


def gradients_summed_again() -> None:
    """A gradient that a tensor-parallel group sums is summed again, with what earlier micro-batches left of it."""
    import contextlib

    from cookbook.training.engine.copies import Copies

    @contextlib.contextmanager
    def backward(self):
        yield
        self._keep_shards()

    Copies._backward_apart = backward


def copies_taken_for_shards() -> None:
    """The ranks of a stage, which see other samples or have other shards, all average their gradients."""
    from cookbook.config.mesh import Mesh

    Mesh.copies = lambda self: [
        range(start, start + self.stage_size) for start in range(0, self.num_processes, self.stage_size)
    ]


def counts_of_all_stages() -> None:
    """Counts of the samples that pass through all stages of a pipeline are added up over them."""
    from cookbook.training.engine.collectives import Collectives

    Collectives.sums = lambda self, rows: rows.sum(0).tolist()


def loss_counted_by_two_stages() -> None:
    """The backward of a pipeline begins twice."""
    import torch

    from cookbook.training.engine.pipeline import _Stage

    right = _Stage.forward

    def forward(self, *received, number):
        sent = right(self, *received, number=number)
        return 2 * sent if self.is_last and torch.is_grad_enabled() else sent

    _Stage.forward = forward


def adapter_drawn_by_the_layers_of_a_process() -> None:
    """Which of its layers it is decides about an adapter's first weights, and not which of the model's."""
    from itertools import count
    from types import SimpleNamespace

    from cookbook.training.adapters import insertion

    numbers = count()
    insertion.zlib = SimpleNamespace(crc32=lambda name: next(numbers))


def adapter_of_equal_shards() -> None:
    """As peft draws a matrix of an adapter that tensor parallel shards: each rank the same numbers."""
    from torch.distributed.tensor import DTensor

    from cookbook.training.adapters import insertion

    def distribute(whole, mesh, placements, **options):
        shard = whole.chunk(mesh.size(), placements[0].dim)[0].contiguous()
        return DTensor.from_local(shard, mesh, placements)

    insertion.distribute_tensor = distribute


def adapter_left_out_of_fsdp2() -> None:
    """Nothing shards what peft adds to a model that FSDP2 has been applied to, nor reduces its gradients."""
    from cookbook.training.engine import fsdp2

    fsdp2.shard_late = lambda model, optimizer: None


def adapter_left_out_of_fsdp2_unchecked() -> None:
    """The same, and nothing looks for whole parameters."""
    from cookbook.training.engine import Engine

    adapter_left_out_of_fsdp2()
    Engine.assert_in_force = lambda self: None


def in_float64() -> None:
    """No mistake: all that is float32 has twice the digits, so that what is left of a difference is no rounding."""
    import torch
    from transformers.integrations import moe

    from cookbook.training.engine import Engine
    from cookbook.training.models import language_model

    moe._can_use_grouped_mm = lambda *matrices: False  # torch's kernel has no float64
    read, prepare = language_model.load_model, Engine.prepare

    def prepare_in_float64(self, *arguments, **options):
        prepare(self, *arguments, **options)
        # Only now: safetensors reads by these names. Norms, routers and losses ask for float32 by them.
        torch.float32 = torch.float = torch.float64
        torch.Tensor.float = torch.Tensor.double

    train.LAST_SAVE_TRIES = 1  # no checkpoint has float64
    train.CACHE /= "float64"  # where no reference is one of float32
    language_model.load_model = lambda *arguments, **options: read(*arguments, **{**options, "dtype": torch.float64})
    Engine.prepare = prepare_in_float64
    Engine.assert_in_force = lambda self: None


def no_memory_in_step_2() -> None:
    """On the last process, in a forward."""
    from cookbook.config.objectives.token_loss import TokenLoss

    right, seen = TokenLoss.compute, []

    def compute(self, model, batch):
        import torch.distributed as dist

        seen.append(batch)
        if len(seen) == 12 and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return right(self, model, batch)

    TokenLoss.compute = compute


def loss_of_a_shard() -> None:
    """The log-sum-exp over the part of the vocabulary that a process of a tensor-parallel group has."""
    import torch

    from cookbook.training.models import logits, loss

    right = logits.losses_of

    def losses(products, tokens, reading):
        result = right(products, tokens, reading)
        own = logits.transform_logits(products, reading.transform).float().logsumexp(1)
        return result if reading.part.group is None else torch.stack([result[0], own])

    loss.losses_of = losses


def rows_of_a_shard() -> None:
    """Each process of a tensor-parallel group trains those rows of new tokens that its part of the head has."""
    from cookbook.training.models import loss

    loss._SharedRows.backward = staticmethod(lambda ctx, *gradients: (gradients[0], None))


def norm_of_a_process() -> None:
    """A part of a gradient is taken for the whole."""
    from cookbook.training.engine import Engine

    Engine._num_shards = lambda self, gradient: 1


def experts_of_other_processes_left_out() -> None:
    """Under expert parallel each process lets its own experts alone see its tokens."""
    from transformers.distributed.expert_parallel import AllToAllEP

    def call(self, hidden_states, top_k_index, top_k_weights):
        here = top_k_index // self.num_local_experts == self.ep_mesh.get_local_rank()
        return self.experts_forward(hidden_states, top_k_index % self.num_local_experts, top_k_weights * here)

    AllToAllEP.__call__ = call


def adapters_of_the_first_experts() -> None:
    """Under expert parallel each process multiplies its experts with the adapters of the group's first process."""
    from cookbook.training.adapters import stacked

    stacked._first_expert = lambda weight, num_here: 0


def experts_divided_by_their_own_group() -> None:
    """Gradients of experts, to which tokens of a whole group contribute, are averaged over those that share them."""
    from cookbook.training.engine.expert_parallel import ExpertParallel

    right = ExpertParallel._wrap

    def wrap(self, model, optimizer):
        for module in model.modules():
            if hasattr(module, "_is_expert_parallel"):
                module.set_gradient_divide_factor(float(self.mesh.shard))
        return right(self, model, optimizer)

    ExpertParallel._wrap = wrap


def experts_divided_by_their_own_group_unchecked() -> None:
    """The same, and nothing looks at the divisor."""
    from cookbook.training.engine import Engine

    experts_divided_by_their_own_group()
    Engine.assert_in_force = lambda self: None


def shards_of_experts_counted_along_one_dimension() -> None:
    """The norm takes the parts of experts for parts along the first dimension of their mesh."""
    from cookbook.training.engine import Engine

    Engine._num_shards = lambda self, gradient: gradient.device_mesh.size(0)


def gradient_not_finite_in_step_3() -> None:
    """One parameter's gradient on one process is nan; every loss is a number."""
    from cookbook.training.engine import Engine

    right = Engine.gradients

    def gradients(self, *arguments):
        parameter = next(iter(self.model.parameters()))
        is_one = self.current_step == 3 and self.world.rank == 1
        hook = parameter.register_hook(lambda gradient: gradient * float("nan")) if is_one else None
        result = right(self, *arguments)
        if hook is not None:
            hook.remove()
        return result

    Engine.gradients = gradients


def layer_1_explodes() -> None:
    """The gradient of a weight in the second layer is a million times as large in steps 14 and 15, with that in the
    first a third of this, and not finite from step 17 on.
    """
    from cookbook.training.engine import Engine

    right, hooks = Engine.gradients, {}
    large = {"layers.1.mlp.up_proj": 1e6, "layers.0.mlp.up_proj": 3e5}
    planted = {14: large, 15: large} | {step: {"layers.1.mlp.up_proj": float("nan")} for step in range(17, 100)}

    def gradients(self, *arguments):
        def before(factor, module, inputs):  # where FSDP has the whole weight
            if (weight := module.weight).requires_grad and id(weight) not in hooks:
                hooks[id(weight)] = weight.register_hook(lambda gradient: gradient * factor)

        watched = []
        for name, module in self.model.named_modules():
            for place, factor in planted.get(self.current_step, {}).items():
                if name.replace("_fsdp_wrapped_module.", "").endswith(place) and hasattr(module, "weight"):
                    watched.append(module.register_forward_pre_hook(partial(before, factor)))
        result = right(self, *arguments)
        for hook in [*watched, *hooks.values()]:
            hook.remove()
        hooks.clear()
        return result

    Engine.gradients = gradients


def weight_scaled_up_in_step_14() -> None:
    """The last norm's weight, which scales the logits, so that the tied head's gradient explodes."""
    from cookbook.training.engine import Engine

    right = Engine.gradients

    def gradients(self, *arguments):
        for name, parameter in self.trained_parameters():
            if name == "model.norm.weight" and self.current_step == 14:
                parameter.data.mul_(20)
        return right(self, *arguments)

    Engine.gradients = gradients


def export_not_what_was_trained() -> None:
    """The last weight of the export is another."""
    from cookbook.run.publish import export_folder

    right = export_folder.write_model

    def write(weights, folder, **options):
        right(weights, folder, **options)
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"\x00\x00\x80\x3f")

    export_folder.write_model = write


def schedule_per_process() -> None:
    """The schedule advances once per process, as a scheduler does that was given to `accelerator.prepare`."""
    import cookbook.config.schedule as schedule

    right = schedule.learning_rate
    schedule.learning_rate = lambda step, max_steps, *rest: right(min(2 * step, max_steps), max_steps, *rest)


def clip_not_handed_over() -> None:
    """DeepSpeed does not get the clip value and takes its own default, 1.0."""
    from cookbook.training.engine import zero

    right = zero.deepspeed_config

    def without_clip(*arguments):
        config = right(*arguments)
        config["gradient_clipping"] = 1.0
        return config

    zero.deepspeed_config = without_clip


def clip_not_handed_over_and_unchecked() -> None:
    """The same, with the engine's own check switched off: then the curve must show it."""
    from cookbook.training.engine import Engine

    clip_not_handed_over()
    Engine.assert_in_force = lambda self: None


def groups_with_another_limit() -> None:
    """Process groups that a library makes keep torch's limit of a collective."""
    from datetime import timedelta

    from cookbook.training.engine import base

    right = base.prepare_process
    base.prepare_process = lambda plan, timeout: right(plan, timedelta(minutes=30))


def wrong_divisor() -> None:
    """The factor that undoes the averaging over processes is forgotten."""
    from cookbook.training.engine import Engine

    right = Engine.gradients

    def gradients(self, objective, micro_batches, num_targets):
        shares = right(self, objective, micro_batches, num_targets * self.mesh.token_parallel_size)
        return {name: value * self.mesh.token_parallel_size for name, value in shares.items()}

    Engine.gradients = gradients


def around_the_wrapper() -> None:
    """The model inside the wrapper is called, so that DDP does not see the forward and synchronises nothing."""
    from cookbook.config.objectives import forward

    right = forward.negative_log_likelihood
    forward.negative_log_likelihood = lambda model, batch: right(getattr(model, "module", model), batch)


def parts_alone() -> None:
    """Under ZeRO, of a matrix that two processes have parts of, each orthogonalizes its own."""
    from types import SimpleNamespace

    from cookbook.config.optim import orthogonal

    orthogonal.dist = SimpleNamespace(all_reduce=lambda whole: None)


def samples_see_each_other() -> None:
    """Packed rows without their borders: positions start again at 0, but attention runs over the whole row."""
    from cookbook.config.objectives import forward

    right = forward.negative_log_likelihood

    def nll(model, batch):
        if "lengths" in batch:
            batch = batch | {"lengths": (sum(batch["lengths"]),), "offsets": batch["offsets"][[0, -1]]}
        return right(model, batch)

    forward.negative_log_likelihood = nll


def draws_of_the_micro_batch() -> None:
    """A sample is known by its place in the micro-batch."""
    from cookbook.training.data import batches

    right = batches._collate

    def collate(tokens, samples, layout, places=None):
        return right(tokens, samples, layout, None if places is None else list(range(len(places))))

    batches._collate = collate


def draws_of_the_row() -> None:
    """A position is counted from the begin of a row, in which samples may stand one after another."""
    import torch

    from cookbook.config import draws
    from cookbook.training.data import batches

    right = batches.collate

    def collate(*given, **keys):
        batch = right(*given, **keys)
        if "draw_words" in batch:
            rows, length = batch["input_ids"].shape
            batch["draw_words"] = torch.from_numpy(draws.token_words(0, 0, 0, length)).repeat(rows, 1)
        return batch

    batches.collate = collate


def draws_without_an_offset() -> None:
    """Each part of the features is taken for the first."""
    from cookbook.training.models import sample_draws

    right = sample_draws.draw_for_tokens
    sample_draws.draw_for_tokens = lambda model, alpha, shard, size: right(model, alpha, 0, size)


def draws_without_a_step() -> None:
    """A run that goes on draws as in its first step."""
    from cookbook.training.data import batches

    right = batches._collate

    def collate(tokens, samples, layout, places=None):
        size = 16
        return right(tokens, samples, layout, None if places is None else [place % size for place in places])

    batches._collate = collate


def every_model_is_served() -> None:
    """Whatever its attention and its loss."""
    from cookbook.training.models import structure

    structure.not_served = lambda config: None


def four_bits_repacked() -> None:
    """bitsandbytes may repack 4-bit weights in place while the model is evaluated."""
    import bitsandbytes.nn.modules as modules

    from cookbook.training.adapters import insertion

    right = insertion.add_adapter

    def add_adapter(model, *arguments, **options):
        right(model, *arguments, **options)
        for module in model.modules():
            if isinstance(module, modules.Linear4bit):
                module.support_avx512bf16_for_cpu = modules.has_avx512bf16()

    insertion.add_adapter = add_adapter


def reductions_in_16_bits() -> None:
    """FSDP's policy, whatever was asked for, as accelerate makes it by itself."""
    from dataclasses import replace

    from cookbook.training.engine import Fsdp1, Fsdp2

    for family in (Fsdp1, Fsdp2):

        def plugin(self, *, plugin_of=family._plugin, **options):
            plugin = plugin_of(self, **options)
            policy = plugin.mixed_precision_policy
            plugin.mixed_precision_policy = replace(policy, reduce_dtype=policy.param_dtype)
            return plugin

        family._plugin = plugin


def another_bucket() -> None:
    """DeepSpeed gets another size than the JSON's."""
    from cookbook.training.engine import zero

    plugin_of = zero.DeepSpeedPlugin

    def plugin(**options):
        plugin = plugin_of(**options)
        plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] //= 2
        return plugin

    zero.DeepSpeedPlugin = plugin


def weights_diverge() -> None:
    """In step 3 a weight of one process changes, by less than a curve would show."""
    from cookbook.training.engine import Engine

    right = Engine.step

    def step(self, *arguments):
        result = right(self, *arguments)
        if self.current_step == 3 and self.world.rank == self.world.num_processes - 1:
            for name, tensor in self._replicated_tensors():
                if name.startswith("weight of model.norm"):
                    tensor.detach().view(-1)[5] += 1e-6
        return result

    Engine.step = step


def position_diverges() -> None:
    """After step 3 one process believes to have seen another sample."""
    from cookbook.run.stages import Progress

    right = Progress.advance

    def advance(self, batch, **options):
        import torch.distributed as dist

        right(self, batch, **options)
        self.num_samples += self.step == 3 and dist.get_rank() == 1

    Progress.advance = advance


def slow_data() -> None:
    """Each batch comes late."""
    from cookbook.training.data import batches

    right = batches.train_steps

    def late(*arguments, **options):
        for batch in right(*arguments, **options):
            time.sleep(1.0)
            yield batch

    batches.train_steps = late


def slow_rank() -> None:
    """One process takes long for its forwards."""
    from cookbook.training.engine import Engine

    right = Engine._forward

    def forward(self, *arguments):
        time.sleep(0.5 if self.world.rank == 1 and self.model.training else 0.0)
        return right(self, *arguments)

    Engine._forward = forward


def no_pause_before_the_last_save_is_tried_again() -> None:
    """Not a mistake, but time that a test does not need."""
    train.LAST_SAVE_PAUSE_SECONDS = 0


def slow_saves() -> None:
    """The disk is slow."""
    from cookbook.training.checkpoint.saver import Saver

    right = Saver._save

    def save(self, *arguments):
        time.sleep(1.0)
        return right(self, *arguments)

    Saver._save = save


def silently_ddp() -> None:
    """The strategy falls back to plain DDP, as accelerate does for FSDP with cpu=True."""
    from cookbook.training.engine import FAMILIES

    def start(self, *, on_cpu):
        from accelerate import Accelerator

        return Accelerator(cpu=True)

    for family in FAMILIES.values():
        family._start = start


def batches_take_half_a_second() -> None:
    """No mistake: the making of a batch waits, as for a network."""
    import time

    from cookbook.training.data import batches

    collate = batches._collate

    def slowly(*given, **places):
        time.sleep(0.5)
        return collate(*given, **places)

    batches._collate = slowly


def clock_set_back() -> None:
    """No mistake: from step 5 on the clock of each process is an hour behind."""
    from cookbook.training.engine import Engine

    right, now = Engine.begin_step, time.time

    def begin_step(self, number):
        if number == 5:
            time.time = lambda: now() - 3600
        return right(self, number)

    Engine.begin_step = begin_step


def bytes_on_the_wire() -> None:
    """No mistake: each process prints the bytes that its sockets have sent, as the kernel counts them, at each step."""
    import socket
    import struct
    import time

    from cookbook.training.engine import Engine

    def sent() -> int:
        total = 0
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # no socket, or none of TCP
                link_socket = socket.socket(fileno=int(link.name))
                try:
                    info = link_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                finally:
                    link_socket.detach()
                total += struct.unpack_from("Q", info, 120)[0]  # linux/tcp.h, tcpi_bytes_acked
        return total

    right = Engine.begin_step

    def begin_step(self, number):
        time.sleep(0.05)  # until the receivers have acknowledged all
        print(f"SENT {number} {self.world.rank} {sent()} {self.num_parameters} {self.num_trained}", flush=True)
        return right(self, number)

    Engine.begin_step = begin_step


def messages_of_a_step() -> None:
    """No mistake: each process prints what step 3 hands to gloo, each call with its numbers of elements."""
    import json

    import torch
    from torch.profiler import ProfilerActivity, profile

    from cookbook.training.engine import Engine

    right, running = Engine.begin_step, profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    def numel(shape: list) -> int:
        """Number of elements in a tensor, or in a list of them."""
        return sum(map(numel, shape)) if shape and isinstance(shape[0], list) else torch.Size(shape).numel()

    def begin_step(self, number):
        if number == 4:
            running.stop()
            events = running.profiler.kineto_results.events()
            calls = [
                (event.name(), [numel(shape) for shape in event.shapes()], event.dtypes())
                for event in events
                if event.name().startswith(("c10d::", "gloo:"))
            ]
            print("CALLS", self.world.rank, json.dumps(calls), flush=True)
        result = right(self, number)
        if number == 3:
            running.start()
        return result

    Engine.begin_step = begin_step


def bytes_and_positions() -> None:
    """No mistake: the same, and the positions that have passed through a process."""
    from cookbook.training.engine import Engine

    bytes_on_the_wire()
    begin, forward = Engine.begin_step, Engine._forward
    positions = 0

    def begin_step(self, number):
        print(f"POSITIONS {number} {self.world.rank} {positions}", flush=True)
        return begin(self, number)

    def counted(self, function, batch):
        nonlocal positions
        positions += batch["input_ids"].numel()
        return forward(self, function, batch)

    Engine.begin_step, Engine._forward = begin_step, counted


def sizes_of_buckets() -> None:
    """No mistake: in step 3, when DDP has made its buckets again, it prints how large they are."""
    from cookbook.training.engine import Engine

    right = Engine.begin_step

    def begin_step(self, number):
        if number == 3 and self.is_main:
            buckets = self.model.reducer._get_zeros_like_grad_buckets()
            print("BUCKETS", *[bucket.buffer().numel() for bucket in buckets], flush=True)
        return right(self, number)

    Engine.begin_step = begin_step


def exchange_left_in_float32() -> None:
    """DDP has no hook."""
    from torch.nn.parallel import DistributedDataParallel

    DistributedDataParallel.register_comm_hook = lambda self, state, hook: None


def sums_over_micro_batches_in_16_bits() -> None:
    """Sums that wait for the replicas stay in the dtype of the exchange."""
    from cookbook.training.engine import fsdp2

    fsdp2.Fsdp2._keep_sums_in_float32 = lambda self, waiting: None
    fsdp2._leave_sums_in_float32 = lambda: None


def compile_without_inductor() -> None:
    """No mistake: inductor's graphs, decomposed and cut in two as it does, without its processes, which do not survive
    a fork, and without a minute for their code."""
    import torch

    torch.compile = partial(torch.compile, backend="aot_eager_decomp_partition")


def compile_with_symbols() -> None:
    """Layers that FSDP2 has wrapped get symbols in place of their sizes."""
    from torch import nn

    right = nn.Module.compile
    nn.Module.compile = lambda self, **options: right(self, backend="aot_eager", dynamic=True)


if __name__ == "__main__":
    mistake = sys.argv.pop(1)
    globals()[mistake]()
    sys.exit(train.main())
