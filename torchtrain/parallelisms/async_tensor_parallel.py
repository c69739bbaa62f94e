"""A compiler pass that lets Inductor fuse more collectives of tensor parallelism with matrix products.

Inductor's pass for asynchronous tensor parallelism (``torch/_inductor/fx_passes/micro_pipeline_tp.py``) finds products
by the operations between them and a collective. This pass runs before it and rewrites two cases that it does not find:

- With a local batch size of 1, PyTorch restores the sequence that an all-gather returns, (ranks, seq / ranks, dim), by
  two views, (1, seq, dim) and then (seq, dim). They become one view, and the product's result one with the shape
  (ranks, seq / ranks, n).
- In backward, the gradients of all linear layers with the same input are added, and the sum is reduce-scattered. The
  sum of products becomes one product of concatenated matrices: [a, b] @ [[c], [d]] = a @ c + b @ d.

The first changes no result. The second adds products before they are rounded, instead of afterwards.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from torchtrain.torch_internals import find_reduce_scatter_patterns

aten, collectives = torch.ops.aten, torch.ops._c10d_functional
RESHAPE, MM, ADD = aten.reshape.default, aten.mm.default, aten.add.Tensor
SCALED_MM = aten._scaled_mm.default  # of converted linear layers


class FusibleCollectives(CustomGraphPass):
    """The pass, for ``torch._inductor.config.post_grad_custom_pre_pass``."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.target is collectives.wait_tensor.default:
                gathered: Any = node.args[0]
                if gathered.target is collectives.all_gather_into_tensor.default:
                    merge_views_of_gathered(node)
        for match in find_reduce_scatter_patterns(graph):
            merge_sum_of_products(match.input_node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def value(node: fx.Node) -> Tensor:
    """The fake tensor of ``node``."""
    found: Tensor = node.meta["val"]
    return found


def insert(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Insert a call at the graph's insert point, with its fake tensor."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, value))
    return node


def merge_views_of_gathered(wait: fx.Node) -> None:
    """Let products read a gathered tensor, ``wait``, and write their results through one view each."""
    shape, graph = value(wait).shape, wait.graph
    if len(shape) != 3:
        return
    restored = [user for user in wait.users if user.target is RESHAPE]
    for rows in [user for view in restored for user in view.users]:
        if rows.target is not RESHAPE or value(rows).shape != (shape[0] * shape[1], shape[2]):
            continue
        rows.args = (wait, list(value(rows).shape))
        for product in list(rows.users):
            if product.target not in (MM, SCALED_MM) or product.args[0] is not rows:
                continue
            with graph.inserting_after(product):
                result = insert(graph, RESHAPE, product, [*shape[:2], value(product).shape[1]])
            with graph.inserting_after(result):
                same = insert(graph, RESHAPE, result, list(value(product).shape))
            for user in list(product.users):
                if user is not result:
                    user.replace_input_with(product, same)


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The operands of a sum of two tensors; empty if ``node`` is something else, such as a tensor plus a number."""
    operands = [argument for argument in node.args if isinstance(argument, fx.Node)]
    return operands if node.target is ADD and not node.kwargs and len(operands) == 2 else []


def summands(node: fx.Node) -> list[fx.Node]:
    """The operands of a sum of two or more tensors, whose partial sums have no other use; otherwise ``node``."""
    operands = operands_of(node) if len(node.users) == 1 else []
    return [summand for operand in operands for summand in summands(operand)] or [node]


def merge_sum_of_products(total: fx.Node) -> None:
    """Replace ``total`` by one product if it is a sum of products (rows @ matrix), each viewed with its shape."""
    operands = [summand for operand in operands_of(total) for summand in summands(operand)]
    products: list[Any] = [operand.args[0] for operand in operands if operand.target is RESHAPE]
    if len(products) < 2 or len(products) != len(operands):
        return
    shape, graph = value(total).shape, total.graph
    if any(product.target is not MM or len(product.users) > 1 for product in products):
        return
    if any(value(operand).shape != shape or len(operand.users) > 1 for operand in operands):
        return
    with graph.inserting_before(total):
        # The fused kernel needs the rows in the shape of the sum, since it scatters along one of its dimensions.
        parts = [
            insert(graph, RESHAPE, product.args[0], [*shape[:-1], value(product.args[0]).shape[-1]])
            for product in products
        ]
        rows = insert(graph, aten.cat.default, parts, -1)
        matrix = insert(graph, aten.cat.default, [product.args[1] for product in products], 0)
        flat = insert(graph, RESHAPE, rows, [prod(shape[:-1]), value(rows).shape[-1]])
        result = insert(graph, RESHAPE, insert(graph, MM, flat, matrix), list(shape))
    total.replace_all_uses_with(result)
    graph.eliminate_dead_code()
