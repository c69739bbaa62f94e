"""The section [exact_sums]."""

from dataclasses import dataclass
from typing import Literal

from torchtrain.config.schema import JobConfig, Section, require


@dataclass(frozen=True)
class ExactSumsConfig(Section, name="exact_sums"):
    """Communication of training.sums = "exact"."""

    changes_run = False
    may_differ_between_parts = True

    transport: Literal["auto", "ring", "all_to_all"] = "auto"
    """How training.sums = "exact" communicates gradients. ring: the backend's reduce-scatter of 8-byte integers;
    all_to_all: an all-to-all in training.mixed_precision_param. auto: all_to_all on a CPU and among ranks of one
    machine, else ring."""

    def check(self, config: JobConfig) -> None:
        if config.training.sums != "exact":
            return
        layout = config.parallelism
        split = layout.pipeline_parallel_degree > 1 and "ZeroBubble" in layout.pipeline_parallel_schedule
        rule = "training.sums = 'exact' rounds and reduces the gradient of each microbatch separately:"
        sharded = layout.fsdp_gradient_accumulation == "sharded"
        require(sharded, f"{rule} set parallelism.fsdp_gradient_accumulation = 'sharded'")
        in_float32 = config.training.mixed_precision_reduce == "float32"
        require(in_float32, f"{rule} set training.mixed_precision_reduce = 'float32'")
        require(not split, f"{rule} set parallelism.pipeline_parallel_schedule = '1F1B', not a zero-bubble schedule")
