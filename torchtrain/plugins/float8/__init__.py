"""Plugin: linear layers in float8 on GPUs (docs/performance.md)."""

from typing import TYPE_CHECKING

from torchtrain.config.registry import CONFIG_SECTIONS, LINEAR_CONVERSIONS
from torchtrain.config.schema import JobConfig

if TYPE_CHECKING:  # imports PyTorch
    from torchtrain.parallelisms.linear_conversion import LinearConversion

CONFIG_SECTIONS.add("float8", "torchtrain.plugins.float8.options:Float8Config")


@LINEAR_CONVERSIONS.register("float8")
def float8(config: JobConfig) -> "LinearConversion | None":
    """The conversion to float8, if ``float8.recipe`` names one."""
    from torchtrain.config.schema import section_of
    from torchtrain.plugins.float8.options import Float8Config

    options = section_of(config, Float8Config)
    if options.recipe == "none":
        return None
    from torchtrain.plugins.float8.conversion import Float8

    return Float8(options)
