"""Compute in float64 what was written for float32 and bfloat16."""

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NARROW = (torch.float32, torch.bfloat16, torch.float16)
CONVERSIONS: tuple[Callable[..., Any], ...] = (Tensor.float, Tensor.bfloat16, Tensor.half)
BACKWARDS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class Float64(TorchFunctionMode):
    """Context manager in which a conversion to a narrower floating-point dtype, and a new tensor of one, is float64.

    So ``x.float()`` in a norm, a loss or an optimizer does not round ``x``. Set the default dtype to float64, too.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in CONVERSIONS:
            return args[0].double()
        kwargs = {key: _wide(value) for key, value in (kwargs or {}).items()}
        if func in BACKWARDS:
            with patch("torch.autograd._engine_run_backward", self._wrap(torch.autograd._engine_run_backward)):  # type: ignore[attr-defined]
                return func(*args, **kwargs)
        return func(*map(_wide, args), **kwargs)

    def _wrap(self, engine: Callable[..., Any]) -> Callable[..., Any]:
        """Turn this mode on again for ``engine``, or else a checkpoint would recompute activations without it: PyTorch
        turns a mode off while it handles a function.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return engine(*args, **kwargs)

        return run


def _wide(value: Any) -> Any:
    return torch.float64 if type(value) is torch.dtype and value in NARROW else value
