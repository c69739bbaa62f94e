"""The sections [exact_sums] and [grains]."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from torchtrain.config.schema import JobConfig, option_of_plugin
from torchtrain.config.section import Count, Rule, Section, require

if TYPE_CHECKING:  # imports PyTorch
    import torch

    from torchtrain.resolve import ResolvedRun


@dataclass(frozen=True)
class ExactSumsConfig(Section, name="exact_sums"):
    """Communication of training.sums = "exact"."""

    changes_run = False
    may_differ_between_stages = True

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


POWER_OF_TWO: Rule = (
    "be a power of two, such as 2, 4 or 8: only then do the sums of all degrees have one order",
    lambda value: value & (value - 1) == 0,
)


@dataclass(frozen=True)
class GrainsConfig(Section, name="grains"):
    """The same bits on any tensor, context and pipeline degree; with training.sums = "exact"."""

    tensor: Annotated[Count, POWER_OF_TWO] = 1
    """Number of parts, a power of two, into which tensor-parallel layers are divided on every layout, also on one rank.
    Runs are bitwise identical for each tensor_parallel_degree that divides it."""
    context: Annotated[Count, POWER_OF_TWO] = 1
    """Number of chunks, a power of two, into which each sequence is divided on every layout. Runs are bitwise identical
    for each context_parallel_degree of which it is a multiple of twice; 1: only without context parallelism."""

    @property
    def enabled(self) -> bool:
        """Whether the model is split into grains."""
        return self.tensor > 1 or self.context > 1

    def check(self, config: JobConfig) -> None:
        if not self.enabled:
            return
        given = f"grains.tensor = {self.tensor} and grains.context = {self.context}"
        rule = f"{given} make runs bitwise identical on any layout;"
        off = "or set both to 1"
        require(config.training.sums == "exact", f"{given} need training.sums = 'exact'; set that, {off}")
        ring = option_of_plugin(config, "exact_sums.transport") == "ring" and self.context > 1
        require(not ring, f"{rule} set exact_sums.transport = 'all_to_all' or 'auto', not 'ring', {off}")
        for is_set, option, way_out in (
            (config.compile.enable, "compile.enable = true", "set it to false"),
            (option_of_plugin(config, "float8.recipe") not in (None, "none"), "float8.recipe", "set it to 'none'"),
            (
                option_of_plugin(config, "comparison.fingerprint_steps"),
                "comparison.fingerprint_steps",
                "take losses and checkpoints, whose bits can be compared",
            ),
            (
                option_of_plugin(config, "evaluation.prompts") or option_of_plugin(config, "evaluation.tasks"),
                "evaluation.prompts and evaluation.tasks",
                "evaluate checkpoints by python -m torchtrain.evaluate",
            ),
            # Not tried with grains: it needs a GPU.
            (config.training.enable_cpu_offload, "training.enable_cpu_offload = true", "set it to false"),
        ):
            require(not is_set, f"{rule} {option} cannot be combined with them: {way_out}, {off}")

    def check_run(self, run: "ResolvedRun", device: "torch.device") -> None:
        if self.enabled:
            from torchtrain.plugins.exact_sums.grain_checks import check_grains

            check_grains(self.tensor, self.context, run.config, device, run.parallel_dims, run.model_config)
