"""On CPUs without bfloat16 matrix products, these are computed in float32. The tests run on any CPU."""

from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.library import _scoped_library

from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.cpu import matmul as cpu_matmul
from torchtrain.cpu.build import build_cpu_model
from torchtrain.cpu.matmul import apply_float32_matmul, replace_matmuls
from torchtrain.distributed.mesh import Mesh, ParallelDims
from torchtrain.models.llama.model import TransformerConfig

CPU = torch.device("cpu")
TINY = TransformerConfig(dim=32, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=64, vocab_size=64, max_seq_len=16)


# A float64 product that is computed in float32 differs on every CPU; a bfloat16 product may be the same.
DTYPES = (torch.bfloat16, torch.float64)


@pytest.fixture
def float32_matmuls() -> Iterator[None]:
    with _scoped_library("aten", "IMPL") as library:
        replace_matmuls(library, DTYPES)
        yield


def with_out(product: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    out = inputs[0].new_empty(product(*inputs).shape)
    assert product(*inputs, out=out) is out
    return out


PRODUCTS = {
    "mm": lambda x, y, _: x[0] @ y[0].T,
    "mm, out": lambda x, y, _: with_out(torch.mm, x[0], y[0].T),
    "bmm": lambda x, y, _: x @ y.transpose(1, 2),
    "bmm, out": lambda x, y, _: with_out(torch.bmm, x, y.transpose(1, 2)),
    "addmm": lambda x, y, bias: torch.nn.functional.linear(x[0], y[0], bias),
    "addmm, out": lambda x, y, bias: with_out(torch.addmm, bias, x[0], y[0].T),
    "baddbmm": lambda x, y, bias: torch.baddbmm(bias, x, y.transpose(1, 2), beta=0.5, alpha=2.0),
    "baddbmm, out": lambda x, y, bias: with_out(torch.baddbmm, bias, x, y.transpose(1, 2)),
}


@pytest.mark.usefixtures("float32_matmuls")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_equals_the_float32_product_rounded_once(name: str, dtype: torch.dtype) -> None:
    product = PRODUCTS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=dtype) for shape in ((3, 20, 70), (3, 30, 70), (30,))]
    result = product(*inputs)
    assert result.dtype is dtype
    assert torch.equal(result, product(*(x.float() for x in inputs)).to(dtype))


def test_kernels_of_other_dtypes_are_unchanged() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 20, 70), torch.randn(3, 30, 70), torch.randn(30)
    before = [product(*inputs) for product in PRODUCTS.values()]
    with _scoped_library("aten", "IMPL") as library:
        replace_matmuls(library, [torch.bfloat16])
        after = [product(*inputs) for product in PRODUCTS.values()]
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [True] * len(PRODUCTS)


@pytest.mark.usefixtures("float32_matmuls")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_computed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=dtype) for shape in ((2, 10, 70), (30, 70), (2, 10, 30))]
    gradients = []
    for x, weight, grad in (inputs, [value.float() for value in inputs]):
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        found = torch.autograd.grad(torch.nn.functional.linear(*leaves), leaves, grad)
        gradients.append([g.to(dtype) for g in found])
    assert [torch.equal(*pair) for pair in zip(*gradients, strict=True)] == [True] * 2


def test_kernels_are_replaced_only_for_slow_dtypes(replacements: list[None]) -> None:
    apply_float32_matmul(torch.float32)
    assert not replacements
    apply_float32_matmul(torch.bfloat16)
    assert replacements


def test_slow_dtypes_are_those_that_onednn_does_not_support() -> None:
    cpu_matmul.slow_dtypes.cache_clear()
    bfloat16, float16 = "torch.ops.mkldnn._is_mkldnn_bf16_supported", "torch.ops.mkldnn._is_mkldnn_fp16_supported"
    try:
        with patch(bfloat16, lambda: True), patch(float16, lambda: False):
            assert cpu_matmul.slow_dtypes() == (torch.float16,)
    finally:
        cpu_matmul.slow_dtypes.cache_clear()


@pytest.mark.usefixtures("process_group")
def test_training_in_bfloat16_replaces_kernels(replacements: list[None]) -> None:
    for dtype in ("float32", "bfloat16"):
        assert not replacements
        config = JobConfig(training=TrainingConfig(mixed_precision_param=dtype))
        build_cpu_model(TINY, Mesh(CPU, ParallelDims()), CPU, config)
    assert replacements
