"""In place of Inductor: the graphs that it would get, run operation by operation as it would have fused them.

Graphs, what the partitioner keeps for backward, and decompositions are those of ``torch.compile``. Inductor writes to
memory what a matrix product, attention, a collective or another graph takes; all between is fused into its readers.
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
from torchtrain.planning.ledger import Ledger
from torchtrain.planning.operations import PRODUCTS, VIEWS, nbytes
from torchtrain.torch_internals import (
    aot_autograd,
    min_cut_rematerialization_partition,
    select_decomp_table,
    tree_map_only,
)


def is_opaque(node: fx.Node) -> bool:
    """Not fused: what comes from a library or over the network."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OperatorBase):
        return False
    return (
        getattr(target, "overloadpacket", None) in PRODUCTS
        or getattr(target, "namespace", "") in ("_c10d_functional", "c10d", "higher_order")
        or "attention" in str(target)
        or (
            not is_view(node) and getattr(node.meta.get("val"), "is_complex", bool)()
        )  # Inductor has no kernels of these
    )


def is_view(node: fx.Node) -> bool:
    if getattr(node.target, "__name__", "") == "getitem":
        return True
    return bool(getattr(node.target, "is_view", False)) or getattr(node.target, "overloadpacket", None) in VIEWS


def base(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


class FusedRun(fx.Interpreter):
    """Runs a graph; the ledger sees what is written."""

    def __init__(self, module: fx.GraphModule, ledger: Ledger):
        super().__init__(module)
        self.ledger = ledger
        self.written: set[fx.Node] = set()  # what lies in memory; of a view, what it is a view of
        for node in module.graph.nodes:
            if node.op == "output" or is_opaque(node):
                self.written |= {node, *map(base, node.all_input_nodes)}
        self.reads: dict[fx.Node, frozenset[fx.Node]] = {}  # what lies in memory and a node is computed from
        sources: dict[fx.Node, frozenset[fx.Node]] = {}  # the same, or the node itself where it lies in memory
        for node in module.graph.nodes:
            self.reads[node] = frozenset().union(*(sources[n] for n in node.all_input_nodes))
            in_memory = node in self.written or node.op != "call_function"
            sources[node] = frozenset([node]) if in_memory else self.reads[node]

    def run_node(self, n: fx.Node) -> Any:
        ledger = self.ledger
        if n.op != "call_function" or is_opaque(n):
            with self._of(n):
                return super().run_node(n)
        source = base(n)
        if source.op == "call_function" and source not in self.written:
            return None  # fused into what reads it: the shapes of what is written are known without it
        with ledger.marking(paused=True):
            result = like(n.meta["val"]) if source is n else super().run_node(n)
        if n in self.written:
            with self._of(n):
                ledger.wrote(result, sum(nbytes(source.meta.get("val")) for source in self.reads[n]))
        return result

    def _of(self, node: fx.Node) -> AbstractContextManager[None]:
        """In the backward's graph, mark what belongs to the forward as computed again."""
        again = self.ledger.phase == "backward" and node.meta.get("partitioner_tag") == "is_forward"
        return self.ledger.marking(**({"part": "recompute"} if again else {}))


def like(value: Any) -> Any:
    return tree_map_only(
        Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device), value
    )


@contextmanager
def compiling_for(ledger: Ledger) -> Iterator[None]:
    """Let ``torch.compile`` and ``Module.compile`` give what ``ledger`` can follow."""

    def compiler(module: fx.GraphModule, _: Any) -> Any:
        run = FusedRun(module, ledger)

        def boxed(arguments: list[Any]) -> Any:
            try:
                return run.boxed_run(arguments)
            finally:
                run.env = {}  # or it would keep the results alive

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )

    def by_backend(original: Any) -> Any:
        def run(target: Any, **options: Any) -> Any:
            options.pop("options", None)
            # Not dynamic: the sizes of results must be known before they are computed.
            return original(target, **{**options, "dynamic": False, "backend": backend})

        return run

    torch._dynamo.reset()
    with (
        warnings.catch_warnings(),
        # What one rehearsal sets is not for the next.
        torch._functorch.config.patch(activation_memory_budget=1.0),
        patch.object(nn.Module, "compile", by_backend(nn.Module.compile)),
        patch.object(torch, "compile", by_backend(torch.compile)),
    ):
        # Dynamo looks at .grad of every tensor, and hides what torch says to that.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        yield
    for made_once in (compiled_flex_attention, compiled_create_block_mask):
        made_once.cache_clear()  # they would go on with this ledger
    torch._dynamo.reset()
