"""Traces decoder layers and the loss as torch.compile runs them.

AOTAutograd and its min-cut partitioner, which inductor also uses, decide what a layer keeps for the backward. Results
of operations that inductor fuses count only if a product, an attention kernel or the caller reads them.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.func import functional_call
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cookbook.facts.score_head import head_of
from cookbook.training.models.efficiency import is_saved
from cookbook.training.models.logits import PLAIN, Kernels
from cookbook.training.models.loss import LossHead

Uncounted = Callable[[], AbstractContextManager]
Kept = Callable[[list[str]], list[bool]]
"""Maps the ATen names of a layer's operations, in order, to whether checkpointing keeps each result."""


def kept_by(checkpointing: bool | str) -> Kept | None:
    """Return what a recipe's `model.gradient_checkpointing` keeps; None without checkpointing."""
    if checkpointing == "selective":
        return lambda names: [is_saved(name) for name in names]
    return (lambda names: [False] * len(names)) if checkpointing else None


def trace_compiled(model: PreTrainedModel, *, kept: Kept | None, uncounted: Uncounted) -> None:
    """Gives each decoder layer the forward of `cookbook.training.models.efficiency.compile_layers`, and the head the
    loss of `cookbook.training.models.loss.compile_loss`, without a compiler.

    Layers of one shape share the graphs of the first call, which also allocates tensors that no run does. Checkpointing
    is part of the compiled function (transformers 5.23, modeling_layers.py, GradientCheckpointingLayer), so the
    partitioner applies it.

    Args:
        kept: None without checkpointing.
        uncounted: a context in which tensors are not counted.
    """
    graphs: dict[tuple, Callable[..., Any]] = {}
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = False
            layer.forward = _Forward(layer, graphs, kept, uncounted)  # type: ignore[assignment]
    head = head_of(model)
    if isinstance(head, LossHead):
        head.kernels = Kernels(*(_Fusing(kernel, uncounted) for kernel in PLAIN))


class _Fusing:
    """A function without a backward, of whose results only what a kernel writes counts. Chunks of one shape share a
    graph.
    """

    def __init__(self, compute: Callable[..., Any], uncounted: Uncounted) -> None:
        self._compute, self._uncounted = compute, uncounted
        self._graphs: dict[tuple, tuple[GraphModule, set[Node]]] = {}

    def __call__(self, *arguments: Any) -> Any:
        inputs = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        key = tuple(
            (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value
            for value in arguments
        )
        if key not in self._graphs:
            with self._uncounted():
                others = [torch.empty_like(tensor) for tensor in inputs]  # a graph keeps what it was traced with
                graph = make_fx(partial(self._call, arguments), decomposition_table=select_decomp_table())(*others)
            self._graphs[key] = graph, set(_written_nodes(graph))
        graph, written = self._graphs[key]
        return _FusedGraph(graph, written, self._uncounted).run(*inputs)

    def _call(self, arguments: Sequence[Any], *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        return self._compute(*(next(given) if isinstance(value, torch.Tensor) else value for value in arguments))


class _Forward:
    """The forward of one layer."""

    def __init__(
        self,
        layer: torch.nn.Module,
        graphs: dict[tuple, Callable[..., Any]],
        kept: Kept | None,
        uncounted: Uncounted,
    ) -> None:
        self._layer, self._plain, self._graphs = layer, layer.forward, graphs
        self._kept, self._uncounted = kept, uncounted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = {**dict(self._layer.named_parameters()), **dict(self._layer.named_buffers())}
        leaves, spec = tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        kinds = ((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in (*tensors.values(), *inputs))
        key = (str(spec), *kinds)
        if key not in self._graphs:
            rest = [... if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            self._graphs[key] = aot_function(
                partial(self._call_plain, rest, spec),
                fw_compiler=self._runner,
                bw_compiler=self._runner,
                partition_fn=self._partition,
                decompositions=select_decomp_table(),
            )
        result = self._graphs[key](tensors, inputs)
        return tuple(result) if isinstance(result, list) else result

    def _partition(self, joint: GraphModule, *args: Any, **kwargs: Any) -> tuple:
        if self._kept is not None:
            _mark(joint, self._kept)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def _call_plain(self, rest: list[Any], spec: Any, tensors: dict[str, torch.Tensor], inputs: Any) -> Any:
        given = iter(inputs)
        args, kwargs = tree_unflatten([next(given) if leaf is ... else leaf for leaf in rest], spec)
        self._layer.forward = self._plain
        try:
            return functional_call(self._layer, tensors, args, kwargs)
        finally:
            self._layer.forward = self  # type: ignore[assignment]

    def _runner(self, gm: GraphModule, example_inputs: Any) -> Callable[[list[Any]], Any]:
        written = set(_written_nodes(gm))

        def run(arguments: list[Any]) -> Any:
            return _FusedGraph(gm, written, self._uncounted).boxed_run(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _mark(joint: GraphModule, kept: Kept) -> None:
    """Marks what checkpointing keeps, as dynamo does."""
    forward = [
        node
        for node in joint.graph.nodes
        if node.op == "call_function" and node.meta.get("partitioner_tag") != "is_backward"
    ]
    made = [node for node in forward if node.target is not operator.getitem]
    keeps = dict(zip(made, kept([getattr(node.target, "_opname", "") for node in made]), strict=True))
    for node in forward:
        keep = keeps[node if node in keeps else node.args[0]]
        if keep and isinstance(node.meta.get("val"), tuple | list):
            continue  # a tuple has no size; its elements do
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
        node.meta["ac_graph_id"] = 0


def _written_nodes(graph: GraphModule) -> Iterator[Node]:
    """The nodes whose results a kernel writes to memory."""
    kinds = get_default_op_list()

    def is_view(node: Node) -> bool:
        return node.target is operator.getitem or kinds.is_view(node)

    def is_read(node: Node) -> bool:
        return any(
            is_read(user) if is_view(user) else user.op == "output" or not kinds.is_fusible(user) for user in node.users
        )

    for node in graph.graph.nodes:
        if node.op == "call_function" and not is_view(node) and (not kinds.is_fusible(node) or is_read(node)):
            yield node


class _FusedGraph(Interpreter):
    """Runs a graph by operation and counts only results that a kernel writes."""

    def __init__(self, graph: GraphModule, written: set[Node], uncounted: Uncounted) -> None:
        super().__init__(graph)
        self._written_nodes, self._uncounted = written, uncounted

    def run_node(self, node: Node) -> Any:
        with nullcontext() if node in self._written_nodes else self._uncounted():
            return super().run_node(node)
