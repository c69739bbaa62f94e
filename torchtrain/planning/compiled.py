"""Simulation of ``torch.compile``: runs the graphs that Inductor would compile, and records the kernels it would fuse.

Graph capture, decompositions and the partitioner's choice of saved activations are those of ``torch.compile``. The
simulation assumes that Inductor writes to memory only the inputs of matrix products, attention, collectives and other
graphs, and fuses all other operations into the kernels that read their results.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn

from torchtrain.models.document_mask import compiled_create_block_mask
from torchtrain.models.llama.model import compiled_flex_attention
from torchtrain.planning.operations import MATMULS, VIEWS, nbytes
from torchtrain.planning.recorder import StepRecorder
from torchtrain.torch_internals import (
    aot_autograd,
    min_cut_rematerialization_partition,
    select_decomp_table,
    tree_map_only,
)


def is_extern_kernel(node: fx.Node) -> bool:
    """Whether ``node`` is a library call or a collective, which Inductor does not fuse."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OperatorBase):
        return False
    return (
        getattr(target, "overloadpacket", None) in MATMULS
        or getattr(target, "namespace", "") in ("_c10d_functional", "c10d", "higher_order")
        or "attention" in str(target)
        or (
            # Inductor generates no kernels for complex tensors.
            not is_view(node) and getattr(node.meta.get("val"), "is_complex", bool)()
        )
    )


def is_view(node: fx.Node) -> bool:
    """Whether the result of ``node`` shares the storage of its input, or is an element of a tuple."""
    if getattr(node.target, "__name__", "") == "getitem":
        return True
    return bool(getattr(node.target, "is_view", False)) or getattr(node.target, "overloadpacket", None) in VIEWS


def view_base(node: fx.Node) -> fx.Node:
    """Return the node whose storage ``node`` is a view of, or ``node`` itself."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


class FusedInterpreter(fx.Interpreter):
    """Interpreter that runs a graph and records its extern kernels and fused kernels in ``recorder``."""

    def __init__(self, module: fx.GraphModule, recorder: StepRecorder):
        super().__init__(module)
        self.recorder = recorder
        self.written: set[fx.Node] = set()  # nodes whose results are written to memory, without views
        for node in module.graph.nodes:
            if node.op == "output" or is_extern_kernel(node):
                self.written |= {node, *map(view_base, node.all_input_nodes)}
        self.reads: dict[fx.Node, frozenset[fx.Node]] = {}  # the nodes in memory that a node is computed from
        sources: dict[fx.Node, frozenset[fx.Node]] = {}  # the node itself if it is in memory, otherwise its reads
        for node in module.graph.nodes:
            self.reads[node] = frozenset().union(*(sources[n] for n in node.all_input_nodes))
            in_memory = node in self.written or node.op != "call_function"
            sources[node] = frozenset([node]) if in_memory else self.reads[node]

    def run_node(self, n: fx.Node) -> Any:
        recorder = self.recorder
        if n.op != "call_function" or is_extern_kernel(n):
            with self._phase_of(n):
                return super().run_node(n)
        source = view_base(n)
        if source.op == "call_function" and source not in self.written:
            return None  # fused into its readers; the shapes of their results are known from the graph's metadata
        with recorder.labeled(paused=True):
            result = empty_like(n.meta["val"]) if source is n else super().run_node(n)
        if n in self.written:
            with self._phase_of(n):
                recorder.record_fused_kernel(result, sum(nbytes(source.meta.get("val")) for source in self.reads[n]))
        return result

    def _phase_of(self, node: fx.Node) -> AbstractContextManager[None]:
        """Label forward nodes in the backward graph as "recompute"."""
        recomputed = self.recorder.phase == "backward" and node.meta.get("partitioner_tag") == "is_forward"
        return self.recorder.labeled(**({"phase_override": "recompute"} if recomputed else {}))


def empty_like(value: Any) -> Any:
    """Return empty tensors with the shapes, strides, dtypes and devices of those in ``value``, a nested structure."""
    return tree_map_only(
        Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device), value
    )


@contextmanager
def simulated_inductor(recorder: StepRecorder) -> Iterator[None]:
    """Patch ``torch.compile`` and ``Module.compile`` to use a backend that records its kernels in ``recorder``."""

    def compiler(module: fx.GraphModule, _: Any) -> Any:
        interpreter = FusedInterpreter(module, recorder)

        def boxed(arguments: list[Any]) -> Any:
            try:
                return interpreter.boxed_run(arguments)
            finally:
                interpreter.env = {}  # it would keep the results alive

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )

    def with_backend(compile_function: Any) -> Any:
        def compile_with_backend(target: Any, **options: Any) -> Any:
            options.pop("options", None)
            # Static shapes, because the sizes of results must be known before they are computed.
            return compile_function(target, **{**options, "dynamic": False, "backend": backend})

        return compile_with_backend

    torch._dynamo.reset()
    with (
        warnings.catch_warnings(),
        # Restores the budget that a simulated run sets, for the next simulation.
        torch._functorch.config.patch(activation_memory_budget=1.0),
        patch.object(nn.Module, "compile", with_backend(nn.Module.compile)),
        patch.object(torch, "compile", with_backend(torch.compile)),
    ):
        # Dynamo reads .grad of every tensor, which warns for non-leaf tensors.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        yield
    for cached in (compiled_flex_attention, compiled_create_block_mask):
        cached.cache_clear()  # the cached functions would keep recording in this recorder
    torch._dynamo.reset()
