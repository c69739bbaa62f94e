"""A copy of the state in CPU memory, so that training can go on while the copy is written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from torchtrain.distributed.mesh import local
from torchtrain.pinned_memory import pinned_like


class Stager:
    """Copies this rank's part of each tensor into CPU buffers that are kept from one save to the next.

    Buffers for tensors on a GPU are pinned, so that copies run at full speed. Without ``overlap``, ``stage`` returns
    when the copy is made. With it, ``stage`` only enqueues the copies on a CUDA stream, where they run beside the next
    forward and backward: call ``before_update`` before the optimizer step, and ``wait`` before reading staged values.
    """

    def __init__(self, overlap: bool) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream() if overlap and torch.cuda.is_available() else None  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the local parts, valid until the next call."""
        parts = {name: local(tensor) for name, tensor in tensors.items()}
        new = {name: part for name, part in parts.items() if name not in self._buffers}
        self._buffers |= pinned_like({name: part for name, part in new.items() if part.is_cuda})
        for name in new.keys() - self._buffers.keys():
            self._buffers[name] = torch.empty_like(new[name], device="cpu")
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # None: on the current one
            for name, part in parts.items():
                self._buffers[name].copy_(part, non_blocking=True)
        if self._stream is None and any(part.is_cuda for part in parts.values()):
            torch.cuda.current_stream().synchronize()
        return self._buffers

    def before_update(self) -> None:
        """Make the current stream wait for copies under way; the CPU does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def wait(self) -> None:
        """Block until the staged values are there. Safe to call from another thread."""
        if self._stream is not None:
            self._stream.synchronize()
