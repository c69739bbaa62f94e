"""The compiler pass for asynchronous tensor parallelism: Inductor finds all collectives, and results stay the same."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from gloo_pool import GlooPool
from parity import TINY
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh

from torchtrain.distributed.mesh import local
from torchtrain.models.llama import Transformer
from torchtrain.parallelisms.tensor_parallel import apply_tensor_parallel


def fusible(graph: fx.Graph) -> tuple[int, int]:
    """Number of collectives for which Inductor finds a product, and of all all-gathers and reduce-scatters."""
    from torch._inductor.fx_passes import micro_pipeline_tp

    gathers = micro_pipeline_tp.find_all_gather_patterns(graph)
    scatters = micro_pipeline_tp.find_reduce_scatter_patterns(graph)
    found = [bool(micro_pipeline_tp._find_consumer_matmuls(match.res_node)) for match in gathers]
    found += [micro_pipeline_tp._find_producer_matmul(match.input_node) is not None for match in scatters]
    return sum(found), len(found)


def block_results(batch: int, backend: Any) -> list[Tensor]:
    """Output and gradients of a tensor-parallel block of this rank; eager without a ``backend``."""
    torch.manual_seed(0)
    model = Transformer(TINY)
    apply_tensor_parallel(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)), sequence_parallel=True)
    block = model.layers["0"]
    if backend is not None:
        torch._dynamo.reset()
        block.compile(fullgraph=True, dynamic=False, backend=backend)
    rank = torch.distributed.get_rank()
    x, grad = torch.randn(2, batch, TINY.max_seq_len, TINY.dim).unbind()
    part = x.chunk(2, dim=1)[rank].clone().requires_grad_()
    out = block(part, model.rope_cos[None, :, None], model.rope_sin[None, :, None])
    out.backward(grad.chunk(2, dim=1)[rank])
    gradients = [part.grad, *(local(parameter.grad) for parameter in block.parameters() if parameter.grad is not None)]
    return [out.detach(), *(gradient for gradient in gradients if gradient is not None)]


class Results(NamedTuple):
    """Results of a block, and of each of its graphs, which are the forward and the backward."""

    eager: list[Tensor]
    compiled: list[Tensor]
    before: list[tuple[int, int]]
    """``fusible`` of the graphs without the pass."""
    after: list[tuple[int, int]]
    plain_outputs: list[list[Tensor]]
    """Outputs of the graphs without the pass."""
    outputs: list[list[Tensor]]


def _results(batch: int) -> Results:
    # Slow to import, and with deprecated parts.
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    from torchtrain.parallelisms.async_tensor_parallel import FusibleCollectives

    results = Results(block_results(batch, None), [], [], [], [], [])

    def compiler(module: fx.GraphModule, _: Any) -> Any:
        view_to_reshape(module)
        plain = copy.deepcopy(module)
        results.before.append(fusible(module.graph))
        FusibleCollectives()(module.graph)
        results.after.append(fusible(module.graph))
        for each in (plain, module):
            each.graph.lint()
            each.recompile()

        def run_both(*args: Any) -> Any:
            for each, outputs in ((plain, results.plain_outputs), (module, results.outputs)):
                found = each(*args)
                outputs.append([out.detach().clone() for out in found if isinstance(out, Tensor)])
            return found

        return make_boxed_func(run_both)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, decompositions=select_decomp_table())
    results.compiled.extend(block_results(batch, backend))
    return results


@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
@pytest.mark.parametrize(("batch", "found"), [(1, [2, 0]), pytest.param(2, [4, 2], marks=pytest.mark.slow)])
def test_all_collectives_of_a_block_become_fusible_without_a_change_of_results(
    gloo: GlooPool, batch: int, found: list[int]
) -> None:
    for results in gloo.run(2, _results, batch):
        assert results.before == [(count, 4) for count in found]  # forward and backward, as Inductor does without it
        assert results.after == [(4, 4), (4, 4)]
        assert len(results.compiled) == len(results.eager) == 11
        assert torch.equal(results.outputs[0][0], results.plain_outputs[0][0])
        torch.testing.assert_close(results.outputs, results.plain_outputs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(results.compiled, results.eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("numbers", [(), (2.0,)])
def test_sum_of_products_is_merged_unless_a_number_is_added(numbers: tuple[float, ...]) -> None:
    from torchtrain.parallelisms.async_tensor_parallel import ADD, MM, RESHAPE, insert, merge_sum_of_products

    torch.manual_seed(0)
    inputs = [torch.randn(6, 4), torch.randn(4, 5), torch.randn(6, 3), torch.randn(3, 5)]
    graph = fx.Graph()
    nodes = [graph.placeholder(f"input_{i}") for i in range(4)]
    for node, tensor in zip(nodes, inputs, strict=True):
        node.meta["val"] = tensor
    total, other = (insert(graph, RESHAPE, insert(graph, MM, *pair), [2, 3, 5]) for pair in (nodes[:2], nodes[2:]))
    for summand in (*numbers, other):
        total = insert(graph, ADD, total, summand)
    graph.output(total)
    merge_sum_of_products(total)
    assert [node.target for node in graph.nodes].count(MM) == 1 + len(numbers)
    expected = (inputs[0] @ inputs[1] + inputs[2] @ inputs[3]).view(2, 3, 5) + sum(numbers)
    torch.testing.assert_close(fx.GraphModule(torch.nn.Module(), graph)(*inputs), expected)
