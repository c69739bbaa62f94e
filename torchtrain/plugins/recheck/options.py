"""The section [recheck]."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torchtrain.config.schema import option_of_plugin
from torchtrain.config.section import CountOrZero, Section
from torchtrain.errors import ConfigError

if TYPE_CHECKING:  # imports PyTorch
    import torch

    from torchtrain.resolve import ResolvedRun


@dataclass(frozen=True)
class RecheckConfig(Section, name="recheck"):
    """Name a rank that computes wrong (docs/recheck.md)."""

    changes_run = False

    interval: CountOrZero = 0
    """How often to check all ranks, in steps: each data-parallel rank repeats a microbatch of the rank before it, and
    the bits of the gradients must agree. On GPUs it needs training.deterministic. 0: never."""
    on_wrong_rank: Literal["warn", "stop"] = "warn"
    """What to do when a check finds different bits. warn: log a warning, record an event in metrics.jsonl, and
    continue. stop: end the run before the update of that step, with exit code 70."""

    def check_run(self, run: "ResolvedRun", device: "torch.device") -> None:
        if not self.interval:
            return
        config, degrees = run.config, run.parallel_dims
        if degrees.batch < 2 and option_of_plugin(config, "replicas.lighthouse"):
            return  # only the states of the replicas are compared
        given = f"recheck.interval = {self.interval} compares the gradients of the same microbatch on several ranks"
        if degrees.batch < 2:
            raise ConfigError(
                f"{given}, and needs at least two data-parallel ranks; there is 1: start more ranks, or set interval = "
                "0"
            )
        if config.parallelism.fsdp_gradient_accumulation != "sharded":
            raise ConfigError(
                f"{given}, which only exist if each microbatch is reduced by itself: set "
                "parallelism.fsdp_gradient_accumulation = 'sharded', or interval = 0"
            )
        if degrees.pipeline > 1 and "ZeroBubble" in config.parallelism.pipeline_parallel_schedule:
            raise ConfigError(
                f"{given}, which parallelism.pipeline_parallel_schedule = "
                f"{config.parallelism.pipeline_parallel_schedule!r} adds up first; take '1F1B', or set interval = 0"
            )
        if device.type == "cuda" and not config.training.deterministic:
            raise ConfigError(
                f"{given}, which on GPUs are only the same with deterministic kernels: set training.deterministic = "
                "true, or interval = 0"
            )
        has_compiled_kernels = config.compile.enable or config.data.document_mask  # flex_attention
        if device.type == "cuda" and has_compiled_kernels and os.environ.get("TORCHINDUCTOR_DETERMINISTIC") != "1":
            raise ConfigError(
                f"{given}, and autotuning may choose another compiled kernel on each of them (compile.enable, "
                "data.document_mask): set TORCHINDUCTOR_DETERMINISTIC=1 in the environment, or interval = 0"
            )
