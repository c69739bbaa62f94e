"""Options of the log and of validation: [metrics], [validation] and [profiling]."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torchtrain.config.registry import METRICS_WRITERS
from torchtrain.config.section import Count, CountOrAuto, Section, TokenCount, at_least, require, require_one
from torchtrain.datasets.options import SourcesConfig


@dataclass(frozen=True)
class MetricsConfig(Section, name="metrics"):
    """Log, TensorBoard, other writers."""

    log_freq: Count = 10
    """How often to log metrics, in steps: to the log, to metrics.jsonl and to TensorBoard."""
    enable_tensorboard: bool = True
    """Log metrics to TensorBoard."""
    writers: tuple[str, ...] = ()
    """More writers of metrics: wandb, for Weights & Biases (pip install -e '.[wandb]'; WANDB_MODE=offline writes
    only to the dump folder), mlflow (pip install -e '.[mlflow]'), trackio (pip install -e '.[trackio]'), or
    one that a module in job.import registers (docs/extending.md)."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """[metrics.options.NAME]: options of the writer NAME in writers: of wandb project and log_export, of mlflow
    tracking_uri and experiment, of trackio project, space_id and private (docs/watching.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.writers:
            METRICS_WRITERS.check(name, METRICS_WRITERS.option)
        for name, options in self.options.items():
            require(
                name in self.writers and isinstance(options, dict),
                f"metrics.options.{name} must be a table with the options of a writer in metrics.writers = "
                f"{list(self.writers)}",
            )


@dataclass(frozen=True)
class ValidationConfig(SourcesConfig, name="validation"):
    """Loss on held-out data during training."""

    enable: bool = False
    """Compute the loss on the data that are named here. With several sources, for each of them and for all together.
    The part of the training data that data.held_out holds out is validated on also where this is false."""
    interval: Count = 500
    """Number of steps between validations. There is always one after the last step."""
    interval_tokens: TokenCount = ""
    """Number of tokens between validations, in place of interval."""
    steps: CountOrAuto = -1
    """Number of batches of each source. -1: the whole source, once."""
    weights: Literal["trained", "ema", "both"] = "trained"
    """Weights to validate. Results of the averaged weights (ema.enable) are named validation_ema_..."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one(self, "interval_tokens", "interval")
        require(
            not any(source.held_out for source in self.all),
            "held_out is an option of [data] and [[data.sources]]: the documents of [validation] are all held out",
        )
        labels = [source.title for source in self.all]
        require(
            len(set(labels)) == len(labels),
            "[[validation.sources]] must differ in label, by default the name of their file or dataset, which "
            f"their metrics have; they are {', '.join(labels)}",
        )


@dataclass(frozen=True)
class ProfilingConfig(Section, name="profiling"):
    """Profiler traces and memory snapshots."""

    enable_profiling: bool = False
    """Write a torch.profiler trace of every rank to traces/ in the dump folder."""
    profile_freq: Annotated[int, at_least(3)] = 10
    """How often to collect profiler traces, in steps."""
    enable_memory_snapshot: bool = False
    """Write CUDA memory snapshots to traces/, every profile_freq steps and when memory runs out (CUDA only)."""
