"""Float8 on CPUs and gloo: products are computed in float32, and gloo, which cannot send float8, sends the bytes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from torchtrain.plugins.float8 import conversion

c10d = torch.ops._c10d_functional


def gather_bytes(op: Any, args: Any, kwargs: Any = None) -> Any:  # noqa: ARG001
    """All-gather of torchao's Float8TrainingTensor ``args[0]``, by bytes."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    shard, *others = args
    gathered = c10d.wait_tensor(op(shard._data.contiguous().view(torch.uint8), *others)).view(shard._data.dtype)
    configs = shard._orig_dtype, shard._linear_mm_config, shard._gemm_input_role
    return Float8TrainingTensor(gathered, shard._scale, *configs)


@contextmanager
def emulated_float8() -> Iterator[None]:
    """Context manager in which models with float8 can be built and trained on CPUs."""
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    with ExitStack() as stack:
        stack.enter_context(patch.object(conversion.Float8, "check"))
        stack.enter_context(patch.object(conversion, "Float8", partial(conversion.Float8, emulate=True)))
        stack.enter_context(patch.dict(FLOAT8_OPS_TABLE, {c10d.all_gather_into_tensor.default: gather_bytes}))
        yield
