"""The interface of conversions of linear layers, such as to another dtype, which plugins bring."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import nn

from torchtrain.config.registry import LINEAR_CONVERSIONS
from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.errors import ConfigError
from torchtrain.models.spec import Decoder, DecoderConfig
from torchtrain.parallelisms.tensor_parallel import PLAIN_STYLES, LinearStyles


class LinearConversion(ABC):
    """Converts the linear layers of the blocks; see ``LINEAR_CONVERSIONS``.

    Each caller of ``linear_conversion`` builds its own instance from the config, so that instances must have no state.
    """

    @property
    def label(self) -> str:
        """A short name for the log, such as "8 bits (per row)"."""
        return type(self).__name__

    @abstractmethod
    def check(
        self,
        config: JobConfig,
        degrees: ParallelDims,
        model: DecoderConfig,
        tokens: int,
        capability: tuple[int, int] | None,
    ) -> None:
        """Raise ConfigError if the model, the layout or the device does not support the conversion.

        Args:
            config: the config, which ``resolve_layout`` has resolved.
            degrees: the degrees of the layout.
            model: the config of the model.
            tokens: number of tokens of one forward on a rank.
            capability: the compute capability of the GPU; None on CPUs.
        """

    @abstractmethod
    def convert(self, model: Decoder, shards: int) -> None:
        """Convert the layers in place, on the meta device. Names and shapes of parameters must not change.

        ``shards`` is the number of ranks over which FSDP shards a parameter.
        """

    def styles(self) -> LinearStyles:
        """The styles with which tensor parallelism shards the layers."""
        return PLAIN_STYLES

    @abstractmethod
    def after_change(self, model_parts: Sequence[nn.Module], shards: int) -> None:
        """Called whenever the weights have changed, with the parts of the parallelized model. Collective."""


def linear_conversion(config: JobConfig) -> LinearConversion | None:
    """The conversion that ``config`` asks for. Raises ConfigError if it asks for several."""
    built = ((name, LINEAR_CONVERSIONS[name](config)) for name in LINEAR_CONVERSIONS)
    found: dict[str, LinearConversion] = {name: conversion for name, conversion in built if conversion is not None}
    if len(found) > 1:
        raise ConfigError(f"linear layers can be converted once, and the config asks for {' and '.join(found)}")
    return next(iter(found.values()), None)
