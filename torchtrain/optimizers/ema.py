"""Exponential moving average (EMA) of the weights, whose validation loss is often lower than that of the weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FSDPModule

from torchtrain.distributed.mesh import local
from torchtrain.models.parameters import full_name
from torchtrain.optimizers.options import EMAConfig
from torchtrain.pinned_memory import in_buckets, pinned_like

BUCKET_BYTES = 1 << 28  # size of the parameters that are copied to pinned memory at once


class EMA(Stateful):
    """Float32 averages of the parameters of ``model_parts``, with the same sharding; initialized to the parameters."""

    def __init__(self, model_parts: Sequence[nn.Module], config: EMAConfig):
        self.model_parts, self.config = model_parts, config
        self.parameters = {full_name(name): p for part in model_parts for name, p in part.named_parameters()}
        self.averages = {
            name: parameter.detach().to("cpu" if config.offload else parameter.device, copy=True)
            for name, parameter in self.parameters.items()
        }
        self.after_swap: Callable[[], None] = lambda: None
        """Called after the averages and the weights were swapped."""

    @torch.no_grad()
    def update(self, step: int, skip: Tensor) -> None:
        """Update the averages; call it after the update of ``step``.

        ``skip``: float32 scalar, 1 if the update was skipped; the averages are then unchanged.

        average <- average + (1 - decay^interval) * (parameter - average). In early steps the decay is lower, (1 + step)
        / (10 + step), so that the initial weights soon have little weight.
        """
        if step % self.config.interval:
            return
        rate = 1 - min(self.config.decay, (1 + step) / (10 + step)) ** self.config.interval
        averages = {name: local(average) for name, average in self.averages.items()}
        parameters = {name: local(parameter) for name, parameter in self.parameters.items()}
        share = rate * (1 - skip.to(next(iter(averages.values())).device))
        for names in in_buckets(parameters, BUCKET_BYTES):
            bucket = {name: parameters[name] for name in names}
            if parameters[names[0]].device != averages[names[0]].device:
                bucket = copied_to_host(bucket)
            for name, parameter in bucket.items():
                # Each operation rounds separately, so that the result is independent of vectorized-tail rounding.
                averages[name] += (parameter - averages[name]).mul_(share)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context manager that swaps the averages into the model in place; nothing is stored twice."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self.parameters.items():
            own, average = local(parameter), local(self.averages[name])
            kept = own.clone()
            own.copy_(average)
            average.copy_(kept)
        for module in chain.from_iterable(part.modules() for part in self.model_parts):
            if isinstance(module, FSDPModule):
                module.reshard()  # unsharded parameters still have the values from before the swap
        self.after_swap()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.averages)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Reset averages that the checkpoint lacks to the parameters; the others were loaded in place."""
        for name in self.parameters.keys() - state_dict.keys():
            local(self.averages[name]).copy_(local(self.parameters[name]))


def copied_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of CUDA tensors in pinned memory; the host waits for the device once."""
    copies = pinned_like(tensors)
    for name, tensor in tensors.items():
        copies[name].copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return copies
