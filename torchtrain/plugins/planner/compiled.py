"""Simulation of ``torch.compile``: runs the graphs that Inductor would compile, and records the kernels it would fuse.

Graph capture, decompositions and the partitioner's choice of saved activations are those of ``torch.compile``. The
simulation assumes that Inductor writes to memory only the inputs of matrix products, attention, collectives and other
graphs, and fuses all other operations (``fused_kernels``). ``tests/plugins/test_lowering.py`` compares its bytes with
those of the kernels that Inductor generates.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn

from torchtrain.models.document_mask import compiled_create_block_mask
from torchtrain.models.llama.model import compiled_flex_attention
from torchtrain.plugins.planner.operations import MATMULS, VIEWS, nbytes
from torchtrain.plugins.planner.recorder import StepRecorder
from torchtrain.plugins.planner.torch_internals import (
    aot_autograd,
    micro_pipeline_tp_pass,
    min_cut_rematerialization_partition,
    select_decomp_table,
    tree_map_only,
    unset_fake_temporarily,
)

aten = torch.ops.aten
FUSIBLE_COLLECTIVES = (
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
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


@dataclass
class FusedKernel:
    """A kernel that Inductor would generate: the tensors that it writes to memory and those that it reads from it."""

    written: list[fx.Node]
    read: set[fx.Node]
    elements: int
    """Number of elements that it iterates over."""
    by_columns: bool
    """Whether it reduces over all dimensions but the last ones, as for the gradient of a norm's weight."""

    @property
    def bytes(self) -> int:
        """Bytes read and written, each tensor once."""
        return sum(nbytes(node.meta.get("val")) for node in {*self.read, *self.written})


MAX_READS = 4  # of a value that several kernels compute, instead of one kernel (realize_reads_threshold of Inductor)
REDUCTIONS = ("sum", "amax", "amin", "max", "min", "mean", "var_mean")


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Shape of the result of ``node`` without dimensions of size 1; () if it is not a tensor."""
    return tuple(size for size in getattr(node.meta.get("val"), "shape", ()) if size != 1)


def is_global_reduction(node: fx.Node) -> bool:
    """Whether ``node`` reduces over an outer dimension or all: no kernel reduces so and uses the result."""
    packet = getattr(node.target, "overloadpacket", None)
    if node.op != "call_function" or getattr(packet, "__name__", "") not in REDUCTIONS:
        return False
    source = node.all_input_nodes[0].meta["val"]
    dims: Any = node.args[1] if len(node.args) > 1 else None
    reduced = {dim % source.ndim for dim in ([dims] if isinstance(dims, int) else dims or range(source.ndim))}
    strides = [(i in reduced, stride) for i, stride in enumerate(source.stride()) if source.shape[i] != 1]
    kept = [stride for is_reduced, stride in strides if not is_reduced]
    return not kept or min(kept) <= max((stride for is_reduced, stride in strides if is_reduced), default=0)


def tensor_in_memory(node: fx.Node) -> fx.Node:
    """Return the node of the whole tensor that ``node`` is a view of: for several results, an element of the tuple."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        source = node.all_input_nodes[0]
        if is_extern_kernel(source) and not isinstance(source.meta.get("val"), Tensor):
            break
        node = source
    return node


def nodes_in_memory(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose results are written to memory, without views of them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output" or is_extern_kernel(node):
            found |= {node, *map(view_base, node.all_input_nodes)}
        elif is_global_reduction(node):
            found.add(node)
    return found


def fused_kernels(graph: fx.Graph) -> list[FusedKernel]:
    """Group the operations that Inductor generates code for into kernels.

    As Inductor's scheduler does, this fuses a tensor into a kernel that iterates over as many elements, if it is
    computed from what that kernel reads or writes, and not from anything else that depends on the kernel.
    """
    in_memory = nodes_in_memory(graph)
    sources: dict[fx.Node, set[fx.Node]] = {}  # the tensors in memory that a node is computed from, or is
    elements: dict[fx.Node, int] = {}  # of the largest tensor of a fused computation
    producers: dict[fx.Node, FusedKernel] = {}
    kernels: list[FusedKernel] = []

    def reads_of(node: fx.Node) -> set[fx.Node]:
        """The tensors in memory that the kernel which writes ``node``, a tensor in memory, reads."""
        if node in producers:
            return producers[node].read
        source = view_base(node)  # of an element of the tuple that an extern kernel returns
        return set().union(*(sources[n] for n in source.all_input_nodes)) if source.op == "call_function" else set()

    def depend_on(nodes: set[fx.Node], kernel: FusedKernel) -> bool:
        """Whether one of ``nodes``, tensors in memory, depends on ``kernel``."""
        waiting, seen = list(nodes), set(nodes)
        while waiting:
            node = waiting.pop()
            if producers.get(node) is kernel:
                return True
            more = reads_of(node) - seen
            seen |= more
            waiting += more
        return False

    def fits(node: fx.Node, kernel: FusedKernel) -> bool:
        by_columns, reads = is_global_reduction(node) and shape_of(node) != (), sources[node]
        own = reads.intersection(kernel.written)
        return (
            (kernel.elements, kernel.by_columns) == (elements[node], by_columns)
            and bool(own or reads & kernel.read)
            and not any(map(is_global_reduction, own))
            and not depend_on(reads - own, kernel)
        )

    for node in graph.nodes:
        inputs = node.all_input_nodes
        sources[node] = set().union(*(sources[n] for n in inputs))
        elements[node] = max([prod(shape_of(node)), *(elements[n] for n in inputs)])
        if len(sources[node]) > MAX_READS and len(node.users) > 1 and not is_view(node):
            in_memory.add(node)  # cheaper than computing it again in each kernel that uses it
        if node.op == "call_function" and view_base(node) not in in_memory:
            continue  # fused into the kernels that read it
        if node.op == "call_function" and view_base(node) is node and not is_extern_kernel(node):
            kernel = next((kernel for kernel in reversed(kernels) if fits(node, kernel)), None)
            if kernel is None:
                kernel = FusedKernel([], set(), elements[node], is_global_reduction(node) and shape_of(node) != ())
                kernels.append(kernel)
            kernel.read |= sources[node].difference(kernel.written)
            kernel.written.append(node)
            producers[node] = kernel
        sources[node] = {tensor_in_memory(node)}
        elements[node] = prod(shape_of(node))
    return kernels


def boundary_bytes(module: fx.GraphModule) -> int:
    """Bytes of the inputs and outputs of a graph, each tensor once."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    outputs = next(node for node in module.graph.nodes if node.op == "output").all_input_nodes
    return sum(nbytes(node.meta.get("val")) for node in {*inputs, *map(view_base, outputs)})


def fused_collectives(module: fx.GraphModule) -> set[fx.Node]:
    """The collectives that Inductor fuses with matrix products, if asynchronous tensor parallelism is enabled.

    They are those that its pass, and the one of this package, remove from a copy of the graph.
    """
    import torch._inductor.config  # slow to import

    found = {node for node in module.graph.nodes if node.target in FUSIBLE_COLLECTIVES}
    if not found or not torch._inductor.config._micro_pipeline_tp:
        return set()
    extra_pass: Any = torch._inductor.config.post_grad_custom_pre_pass
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    for node in list(graph.nodes):  # as Inductor's earlier passes do
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        elif node.target is aten.slice.Tensor and node.meta["val"].shape == node.args[0].meta["val"].shape:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    log = logging.getLogger("torch._inductor.fx_passes.micro_pipeline_tp")
    with (
        unset_fake_temporarily(),  # the graph's fake tensors have another mode than the simulation's
        patch.object(torch.distributed, "is_nccl_available", lambda: True),  # the pass does nothing without NCCL,
        # nor, since 2.15, without a GPU's symmetric memory
        patch("torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group", lambda _: True),
        patch.object(log, "disabled", True),  # it warns of collectives that it cannot fuse
    ):
        if extra_pass is not None:  # the one of set_async_tensor_parallel
            extra_pass(graph)
        micro_pipeline_tp_pass(graph)
    left = set(graph.nodes)
    return {node for node in found if copies[node] not in left}


class FusedInterpreter(fx.Interpreter):
    """Interpreter that runs a graph and records its extern kernels and fused kernels in ``recorder``."""

    def __init__(self, module: fx.GraphModule, recorder: StepRecorder):
        super().__init__(module)
        self.recorder = recorder
        kernels = fused_kernels(module.graph)
        self.written = {node for kernel in kernels for node in kernel.written}
        self.last = {kernel.written[-1]: kernel.bytes for kernel in kernels}  # a kernel runs when it can write all
        with recorder.labeled(paused=True):
            self.fused_collectives = fused_collectives(module)

    def run_node(self, n: fx.Node) -> Any:
        recorder = self.recorder
        if n.op != "call_function" or is_extern_kernel(n):
            with self._labeled(n):
                return super().run_node(n)
        source = view_base(n)
        if source.op == "call_function" and source not in self.written and not is_extern_kernel(source):
            return None  # fused into its readers; the shapes of their results are known from the graph's metadata
        with recorder.labeled(paused=True):
            result = empty_like(n.meta["val"]) if source is n else super().run_node(n)
        if n in self.written:
            with self._labeled(n):
                recorder.record_fused_kernel(result, self.last.get(n, 0))
        return result

    def _labeled(self, node: fx.Node) -> AbstractContextManager[None]:
        """Label forward nodes in the backward graph as "recompute", and collectives that are fused with a product."""
        labels: dict[str, Any] = {"fused_with_matmul": node in self.fused_collectives}
        if self.recorder.phase == "backward" and node.meta.get("partitioner_tag") == "is_forward":
            labels["phase_override"] = "recompute"
        return self.recorder.labeled(**labels)


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
