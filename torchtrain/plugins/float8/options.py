"""The section [float8]."""

from dataclasses import dataclass
from typing import Literal

from torchtrain.config.schema import JobConfig
from torchtrain.config.section import Section, require


@dataclass(frozen=True)
class Float8Config(Section, name="float8"):
    """Linear layers in float8 on GPUs."""

    may_differ_between_stages = True

    recipe: Literal["none", "tensorwise", "rowwise"] = "none"
    """Compute the linear layers of the blocks in float8. tensorwise: one scale per tensor, faster, and tensor
    parallelism gathers activations in float8; rowwise: one scale per row, more accurate. It requires a GPU of compute
    capability 8.9 or higher and pip install -e '.[float8]'. Master weights, optimizer states and checkpoints do
    not change."""
    enable_fsdp_float8_all_gather: bool = True
    """With tensorwise scaling, all-gather the weights in float8, which halves the communicated bytes."""
    filter_small_layers: bool = False
    """Leave the layers as they are that torchao's measurements on an H100 found slower in float8, such as wk and wv of
    8B: with tensorwise scaling those of up to 1024 outputs and 4096 inputs; with rowwise scaling those of up to 2048
    outputs, of up to 1024 inputs, or of up to 4096 outputs and 2048 inputs."""

    def check(self, config: JobConfig) -> None:
        require(
            config.training.sums != "exact" or self.recipe != "tensorwise" or not self.enable_fsdp_float8_all_gather,
            "training.sums = 'exact' is bitwise identical on any number of ranks, but a float8 all-gather rounds "
            "weights differently than one rank does: set float8.enable_fsdp_float8_all_gather = false",
        )
