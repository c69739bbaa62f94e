"""Compute in float64 what was written for float32 and bfloat16."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NARROW = (torch.float32, torch.bfloat16, torch.float16)
CONVERSIONS: tuple[Callable[..., Any], ...] = (Tensor.float, Tensor.bfloat16, Tensor.half)


class Float64(TorchFunctionMode):
    """Context manager in which a conversion to a narrower floating-point dtype, and a new tensor of one, is float64.

    So ``x.float()`` in a norm, a loss or an optimizer does not round ``x``. Set the default dtype to float64, too.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in CONVERSIONS:
            return args[0].double()
        if kwargs:
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
            return func(*map(_wide, args), **kwargs)
        return func(*map(_wide, args))


def _wide(value: Any) -> Any:
    return torch.float64 if type(value) is torch.dtype and value in NARROW else value
