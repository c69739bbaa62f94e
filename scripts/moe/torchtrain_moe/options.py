"""The section [moe]."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtrain.config.section import Count, Section

if TYPE_CHECKING:  # imports PyTorch
    import torch

    from torchtrain.resolve import ResolvedRun


@dataclass(frozen=True)
class MoESection(Section, name="moe"):
    """How a mixture of experts is divided over ranks. What it computes is set in [model.options]."""

    changes_run = False
    may_differ_between_stages = True

    expert_parallel_degree: Count = 1
    """Number of ranks that divide the experts of a layer among them, out of those over which FSDP shards: each computes
    its experts for the tokens of all. 1: each rank gathers all experts and computes its own tokens."""

    def check_run(self, run: "ResolvedRun", device: "torch.device") -> None:  # noqa: ARG002
        from torchtrain_moe.parallel import check_run

        check_run(self.expert_parallel_degree, run.config, run.model_config, run.parallel_dims)
