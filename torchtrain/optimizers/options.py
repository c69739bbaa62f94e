"""Options of the optimizer: [optimizer], [lr_scheduler] and [ema]."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torchtrain.config.registry import LR_SCHEDULES, OPTIMIZERS
from torchtrain.config.section import Count, CountOrZero, Fraction, NotNegative, Section, TokenCount, require_one

DecayRate = Annotated[float, ("be at least 0 and under 1", lambda value: 0 <= value < 1)]
ABOVE_ZERO = "be above 0 and finite: with 0, a gradient of 0 would make 0 / 0"
Epsilon = Annotated[float, (ABOVE_ZERO, lambda value: 0 < value < math.inf)]


@dataclass(frozen=True)
class ParameterGroupConfig:
    lr_factor: NotNegative = 1.0
    """Factor of the learning rate of these parameters."""
    weight_decay: NotNegative | None = None
    """Their decoupled weight decay. None: optimizer.weight_decay; for no_decay 0."""


@dataclass(frozen=True)
class ParameterPatternConfig:
    params: Annotated[str, ("name parameters, such as 'layers.*.attention.wq.weight'", bool)] = ""
    """Names of parameters, as in a checkpoint; * matches any characters, ? one, [abc] one of these. A parameter belongs
    to the first table whose pattern matches its name."""
    lr_factor: NotNegative | None = None
    """Factor of the learning rate of these parameters. None: that of their group: hidden, embedding or no_decay."""
    weight_decay: NotNegative | None = None
    """Their decoupled weight decay. None: that of their group."""
    optimizer: Annotated[str, OPTIMIZERS] | None = None
    """Their optimizer. None: that of their group."""


@dataclass(frozen=True)
class OptimizerConfig(Section, name="optimizer"):
    """Optimizer: rate, decay, parameter groups."""

    name: Annotated[str, OPTIMIZERS] = "adamw"
    """Optimizer of the blocks' matrices: adamw, muon, or one that a module in job.import registers. Other parameters
    use AdamW, unless [[optimizer.groups]] says otherwise (docs/optimizers.md)."""
    lr: NotNegative = 3e-4
    """Peak learning rate."""
    beta1: DecayRate = 0.9
    """Decay of AdamW's running mean of the gradient."""
    beta2: DecayRate = 0.95
    """Decay of AdamW's running mean of the squared gradient."""
    eps: Epsilon = 1e-8
    """AdamW's epsilon."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of the blocks' matrices and the embeddings; norms and biases have none."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """How AdamW computes its update: in one kernel, one operation at a time, or one parameter at a time."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype in which optimizer states, such as AdamW's two means, are stored between steps. bfloat16 halves
    them; the update is computed in float32. A beta2 above 0.99 then hardly changes the second mean."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """[optimizer.options.NAME]: options of the optimizer NAME, unless it is adamw (docs/optimizers.md). Set them in
    the config file; the command line can then change them."""
    hidden: ParameterGroupConfig = field(default_factory=ParameterGroupConfig)
    """[optimizer.hidden]: the blocks' matrices."""
    embedding: ParameterGroupConfig = field(default_factory=ParameterGroupConfig)
    """[optimizer.embedding]: embedding and output."""
    no_decay: ParameterGroupConfig = field(default_factory=ParameterGroupConfig)
    """[optimizer.no_decay]: norms and biases."""
    groups: tuple[ParameterPatternConfig, ...] = ()
    """Parameters selected by name, each pattern a table [[optimizer.groups]]."""


@dataclass(frozen=True)
class EMAConfig(Section, name="ema"):
    """Exponential moving average (EMA) of the weights."""

    enable: bool = False
    """Maintain an exponential moving average (EMA) of the weights, in float32: 4 bytes per parameter, sharded as the
    parameters are."""
    decay: DecayRate = 0.999
    """Decay rate: the weight of the old average in an update. At step n it is at most (1 + n) / (10 + n), so that the
    initial weights are soon forgotten."""
    interval: Count = 1
    """Number of steps between updates of the average. An update then uses decay to the power of interval."""
    offload: bool = False
    """Keep the averages in CPU memory. Each update then waits for a copy of the parameters."""


@dataclass(frozen=True)
class LRSchedulerConfig(Section, name="lr_scheduler"):
    """Learning-rate schedule: warm-up and decay."""

    warmup_steps: CountOrZero = 200
    """Steps of linear warm-up of the learning rate; at most the whole schedule."""
    warmup_tokens: TokenCount = ""
    """The warm-up in tokens, such as "2B", in place of warmup_steps."""
    total_steps: Count | None = None
    """Total number of steps of the schedule; later steps have the minimum learning rate, or without a decay the peak.
    None: training.steps. Set it if training.steps may be increased later."""
    total_tokens: TokenCount = ""
    """Length of the schedule in tokens, in place of total_steps."""
    decay_ratio: Fraction | None = None
    """Fraction of the schedule, at its end, that is allocated to the decay phase. Between warm-up and decay the
    learning rate is constant (WSD). None: the decay starts directly after the warm-up."""
    decay_tokens: TokenCount = ""
    """Length of the decay in tokens, in place of decay_ratio."""
    decay_type: Annotated[str, LR_SCHEDULES] = "cosine"
    """Shape of the decay, or a schedule that a module in job.import registers. constant: no decay, the peak learning
    rate after the warm-up."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """[lr_scheduler.options]: options of a registered decay_type. Set them in the config file; the command line can
    then change them."""
    start_step: CountOrZero = 0
    """Step after which the schedule begins; warm-up and decay are parts of the steps from there to total_steps. Set for
    a stage with a schedule of its own."""
    initial_lr: NotNegative = 0.0
    """Learning rate from which the warm-up begins."""
    min_lr_factor: Fraction = 0.0
    """Minimum learning rate, as a fraction of optimizer.lr. The decay reaches it one step after the end of the
    schedule, so that no step of the schedule has a learning rate of 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one(self, "warmup_tokens", "warmup_steps")
        require_one(self, "total_tokens", "total_steps")
        require_one(self, "decay_tokens", "decay_ratio")
