"""Loss and gradients of a head of 11 tokens over two ranks, trained and frozen, against those of the whole one.

One process of a run of tests/warm_parent.py. Prints the largest difference, for each number of rows at a time.
"""

from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cookbook.config.objectives.forward import Batch, Logits, OfTargets
from cookbook.training.models import loss
from cookbook.training.models.structure import LogitTransform

ROWS_AT_ONCE = (2, 100)


WEIGHTS = torch.linspace(-1, 2, 7)


def of_all_methods(logits: Logits, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = batch["teacher_tokens"]
    numbers = [logits.mean(), logits.logsumexp(temperature=1.5), logits.logsumexp(temperature=1.5, without=tokens)]
    nll = logits.nll(batch["targets"]).unsqueeze(1)
    columns = torch.cat([nll, logits.at(tokens), *(values.unsqueeze(1) for values in numbers)], 1)
    return columns @ WEIGHTS, columns


def largest_difference(mesh: DeviceMesh, rows: int, *, is_frozen: bool) -> float:
    loss.LOGITS_BUDGET = rows * 6 * (loss.OF_FROZEN if is_frozen else 1)  # of the first shard
    torch.manual_seed(3)
    whole, hidden, targets = torch.nn.Linear(8, 11), torch.randn(5, 8), torch.tensor([0, 5, 6, 10, 6])
    scale = torch.linspace(0.5, 1.5, 5)
    head = torch.nn.Linear(8, 11)
    for name, parameter in whole.named_parameters():
        head.register_parameter(name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    head.__class__ = loss.ShardedLossHead
    head.requires_grad_(not is_frozen)
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    pairs = []
    for transform in (None, LogitTransform(scale=3.0, cap=1.5)):
        losses_here, logits = head(inputs[0], targets, transform), whole(inputs[1])
        changed = logits if transform is None else 1.5 * torch.tanh(3.0 * logits / 1.5)
        expected = torch.nn.functional.cross_entropy(changed, targets, reduction="none")
        for losses in (losses_here, expected):
            (losses * scale).sum().backward()
        pairs.append((losses_here, expected))
        tokens = torch.tensor([[5, 6, 0], [0, 1, 10], [10, 9, 8], [6, 7, 5], [2, 5, 3]])
        losses_here = head(
            inputs[0],
            transform=transform,
            function=OfTargets(of_all_methods, ("columns",), {"targets": targets, "teacher_tokens": tokens}),
        )
        logits = whole(inputs[1])
        changed = logits if transform is None else 1.5 * torch.tanh(3.0 * logits / 1.5)
        columns = [changed.gather(1, tokens), changed.mean(1, keepdim=True), (changed / 1.5).logsumexp(1, keepdim=True)]
        rest = (changed / 1.5).scatter(1, tokens, -torch.inf).logsumexp(1, keepdim=True)
        nll = torch.nn.functional.cross_entropy(changed, targets, reduction="none").unsqueeze(1)
        expected = torch.cat([nll, *columns, rest], 1)
        for losses in (losses_here[0], expected @ WEIGHTS):
            (losses * scale).sum().backward()
        pairs += [(losses_here[0], expected @ WEIGHTS), (losses_here[1], expected)]
    pairs.append((inputs[0].grad, inputs[1].grad))
    if not is_frozen:
        pairs += [
            (head.get_parameter(name).grad.full_tensor(), parameter.grad)
            for name, parameter in whole.named_parameters()
        ]
    return max((left - right).abs().max().item() for left, right in pairs)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    shards = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    cases = product(ROWS_AT_ONCE, (False, True))
    print("DIFFERENCES", *(largest_difference(shards, rows, is_frozen=frozen) for rows, frozen in cases), flush=True)
    dist.destroy_process_group()
