"""Plugin: the same bits on any layout, ``training.sums = "exact"`` and [grains] (docs/parallelism.md)."""

from typing import TYPE_CHECKING

from torchtrain.config.registry import CONFIG_SECTIONS, GRADIENT_REDUCERS, MODEL_SPLITS
from torchtrain.config.schema import JobConfig

if TYPE_CHECKING:  # imports PyTorch
    from torchtrain.parallelisms.model_split import ModelSplit

CONFIG_SECTIONS.add("exact_sums", "torchtrain.plugins.exact_sums.options:ExactSumsConfig")
CONFIG_SECTIONS.add("grains", "torchtrain.plugins.exact_sums.options:GrainsConfig")
GRADIENT_REDUCERS.add("exact", "torchtrain.plugins.exact_sums.exact_sums:ExactGradientReducer")


@MODEL_SPLITS.register("grains")
def split_into_grains(config: JobConfig) -> "ModelSplit | None":
    """The split into the grains of [grains], if there is more than one."""
    from torchtrain.config.schema import section_of
    from torchtrain.plugins.exact_sums.options import GrainsConfig

    options = section_of(config, GrainsConfig)
    if not options.enabled:
        return None
    from torchtrain.plugins.exact_sums.grain_split import GrainSplit

    return GrainSplit(options, sequence_parallel=config.parallelism.enable_sequence_parallel)
