"""The forecast's bytes of FSDP2 and of one process are those that torch's own memory trackers count.

They run the model on tensors without data, as one process of a group that does not exist: so a forecast for 64
processes has an oracle too, where `tests/test_forecast_states.py` measures runs of up to 8.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from cookbook.config.recipe import load_recipe
from cookbook.config.strategy import load_strategy
from cookbook.forecast.costs.inputs import CostInputs
from cookbook.forecast.costs.states import States, states
from cookbook.forecast.skeleton import skeleton
from tests.curves import ROOT
from tests.test_forecast_states import RECIPE

PROCESSES = 64
CONFIG = AutoConfig.for_model(
    "llama",
    hidden_size=48,
    intermediate_size=150,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    vocab_size=515,
    tie_word_embeddings=False,
)


def forecast(tmp_path: Path, name: str, processes: int, rank: int) -> States:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("DATA", "python-stdlib").replace("OUTPUT", "out"))
    model = skeleton(CONFIG, load_recipe(tmp_path / "recipe.yaml"))
    strategy = load_strategy(ROOT / f"accelerate_configs/{name}.yaml")
    return states(model, CostInputs(strategy=strategy, num_processes=processes), rank)


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process's rank among PROCESSES, of which it is the only one."""
    dist.init_process_group("fake", rank=request.param, world_size=PROCESSES, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def two_steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tracker: MemTracker, ids: torch.Tensor
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by their kind, at the end of the first step and at the peak of the second."""
    held: dict[str, int] = {}
    with tracker:
        for _ in range(2):
            tracker.reset_mod_stats()
            model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()
            optimizer.step()
            held = held or by_name(tracker.get_tracker_snapshot("current"))
            optimizer.zero_grad()
    return held, by_name(tracker.get_tracker_snapshot("peak"))


def by_name(snapshot: dict[torch.device, dict[Any, int]]) -> dict[str, int]:
    return {getattr(kind, "value", kind): size for kind, size in snapshot[torch.device("cpu")].items()}


def test_one_process_holds_what_torch_s_tracker_counts(tmp_path: Path):
    predicted = forecast(tmp_path, "single", 1, 0).gpu
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters())
        tracker, ids = MemTracker(), torch.zeros(2, 32, dtype=torch.long)
        tracker.track_external(model, optimizer, ids)
        held, _ = two_steps(model, optimizer, tracker, ids)
    assert (predicted.weights, predicted.gradients) == (held["Parameter"], held["Gradient"])
    assert (predicted.moments, predicted.buffers) == (held["Optstate"], held["Buffer"])


@pytest.mark.parametrize("group", [0, PROCESSES - 1], indirect=True)
def test_each_of_64_processes_holds_what_torch_s_tracker_of_fsdp2_counts(group: int, tmp_path: Path):
    predicted = forecast(tmp_path, "fsdp2", PROCESSES, group)
    mesh = dist.device_mesh.init_device_mesh("cpu", (PROCESSES,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(CONFIG)
        for module in (model.model.embed_tokens, *model.model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        tracker, ids = FSDPMemTracker(model, optimizer), torch.zeros(2, 32, dtype=torch.long)
        tracker.track_inputs((ids,))
        held, peak = two_steps(model, optimizer, tracker, ids)
    # The tracker takes a shard with fewer rows than others, a view of one with padding, for an activation.
    weights = held["Sharded Param"] + held["Activation"]
    assert (predicted.gpu.weights, predicted.gpu.gradients) == (weights, held["Sharded Grad"])
    assert (predicted.gpu.moments, predicted.gpu.buffers) == (held["OptState"], held["Buffer"])
    # The peak is in the head, whose unit is gathered then.
    assert predicted.units[-1].weights == peak["Unsharded Param"]
    fewer = forecast(tmp_path, "fsdp2", PROCESSES // 2, group)
    assert fewer.gpu.weights != weights and fewer.units[-1].weights != peak["Unsharded Param"]
