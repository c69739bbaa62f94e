"""The config of a run: all sections, those of the core in the ``options.py`` of their folders.

``JobConfig`` checks options beside each other; ``resolve.check_config`` what depends on the model and the layout.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal, Protocol, get_type_hints

from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.config.registry import CONFIG_SECTIONS, GRADIENT_REDUCERS
from torchtrain.config.section import (
    AnySection,
    Count,
    CountOrAuto,
    CountOrZero,
    NotNegative,
    Section,
    TokenCount,
    at_least,
    flat,
    key_of,
    require,
    require_one,
)
from torchtrain.datasets.options import DataConfig
from torchtrain.distributed.options import CommConfig
from torchtrain.fault_tolerance.options import FaultsConfig
from torchtrain.files import is_url
from torchtrain.metrics.options import MetricsConfig, ProfilingConfig, ValidationConfig
from torchtrain.models.options import ModelConfig, MupConfig
from torchtrain.optimizers.options import EMAConfig, LRSchedulerConfig, OptimizerConfig
from torchtrain.parallelisms.options import ActivationCheckpointConfig, CompileConfig, ParallelismConfig

LOCAL_OUTPUTS = (
    "be a local folder: set checkpoint.folder to a URL to store checkpoints, metrics and exports in a bucket"
)


@dataclass(frozen=True)
class JobSection(Section, name="job"):
    """Config file, folder of the outputs, device."""

    config_file: str = ""
    """TOML file with the options of the run, also by URL. Options on the command line override it."""
    dump_folder: Annotated[str, (LOCAL_OUTPUTS, lambda value: not is_url(value))] = ""
    """Folder for all outputs of the run: checkpoints, metrics, traces and the resolved config. Empty: outputs/NAME,
    where NAME is the name of the config file without its ending."""
    description: str = ""
    """Description of the run, saved with the resolved config."""
    import_: tuple[str, ...] = ()
    """Python modules to import before the config is read, such as ["my_package.my_module"]: they register models,
    optimizers and other components of your own (docs/extending.md). On the command line they replace those of the
    file."""
    disable_plugins: tuple[str, ...] = ()
    """Plugins to turn off, such as ["report"], by the names of their folders in torchtrain/plugins or of their entry
    points (docs/plugins.md): their components, sections and hooks are hidden."""
    stage: str = ""
    """Name of the stage that a resolved config is of; set by the trainer (docs/stages.md)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type to train on. auto: cuda if a GPU is available, else cpu."""


@dataclass(frozen=True)
class TrainingConfig(Section, name="training"):
    """Batch size, sequence length, steps, seed, precision."""

    local_batch_size: Count = 8
    """Batch size, in sequences, of one forward pass of a data-parallel rank."""
    global_batch_size: CountOrAuto = -1
    """Global batch size, in sequences, of one optimizer step. -1: local_batch_size times the data-parallel degree. A
    larger multiple of it accumulates gradients over several forward and backward passes."""
    global_batch_size_schedule: str = ""
    """Batch sizes by tokens, such as "256, 512 at 1B, 1024 at 10B": each is a stage (docs/stages.md). Also the value of
    global_batch_size if that is such a text."""
    seq_len: Count = 2048
    """Sequence length, in tokens."""
    steps: Count = 10000
    """Number of training steps, each of which is one optimizer step."""
    tokens: TokenCount = ""
    """Number of tokens to train on, in place of steps: such as "500M" or "20B", or "20x", 20 tokens for each parameter
    of the model, embeddings included. It is rounded up to whole steps. Such numbers have the units K, M, B or T."""
    max_norm: Annotated[float, ("be above 0", lambda value: value > 0)] = 1.0
    """Maximum norm for gradient clipping: if the norm of the global gradient exceeds it, the gradient is scaled down to
    it."""
    seed: CountOrZero = 0
    """Random seed of the initial weights and of the data order. Both are identical on every parallelism layout."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of parameters and activations in forward and backward; the master weights are float32. On a CPU without
    native bfloat16, matrix products are computed in float32 and rounded."""
    mixed_precision_reduce: Literal["bfloat16", "float32"] = "float32"
    """dtype in which parameter gradients are reduced over ranks, on every mesh dimension."""
    sums: Annotated[str, GRADIENT_REDUCERS] = "fast"
    """How gradients are summed over microbatches and ranks. fast: in floating point, so that the result depends on the
    order. exact: as 64-bit integers, so that the run is bitwise identical on any number of data-parallel ranks
    (docs/parallelism.md)."""
    loss_chunk_tokens: Annotated[int, at_least(-1)] = -1
    """Tokens per chunk of the loss. Logits are computed for one chunk at a time, with their loss and gradient, which
    bounds their memory and does not change the result. -1: as many tokens as fit in 1 GiB of float32 logits (8 MiB on a
    CPU), at least 256; 0: all tokens at once."""
    z_loss_weight: NotNegative = 0.0
    """Weight of the z-loss, the mean of log(Z)^2 over tokens, which keeps the softmax normalizer Z of the logits near
    1; PaLM uses 1e-4. It is added to the loss for backward, but not to the loss that is logged."""
    attention_backend: Literal["auto", "cudnn", "flash", "fa3", "efficient", "math"] = "auto"
    """Backend of scaled_dot_product_attention. auto: PyTorch's choice (on an H100 cuDNN, if newer than 9.15; with
    context parallelism flash); on a CPU in bfloat16 its flash kernel with a faster backward. flash: FlashAttention 2,
    which PyTorch contains. fa3: FlashAttention 3, for Hopper GPUs, also with context parallelism; it must be installed.
    The log names the kernel in use."""
    enable_cpu_offload: bool = False
    """Offload parameters, gradients and optimizer states to CPU memory (CUDA only)."""
    deterministic: bool = False
    """Use only deterministic kernels, so that a resumed run is bitwise identical on CUDA, too. Slower on CUDA."""
    gc_freq: Count = 50
    """Number of steps between runs of Python's garbage collector, which runs on all ranks at the same step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one(self, "tokens", "steps")


@dataclass(frozen=True)
class JobConfig:
    """The config of a run: all sections. ``section_of`` returns that of a plugin."""

    job: JobSection = field(default_factory=JobSection)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    mup: MupConfig = field(default_factory=MupConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    plugins: dict[str, Any] = field(default_factory=dict, hash=False)
    """Sections of plugins by name, without those whose options all have their defaults."""
    stages: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    """[[stages]]: tables with a name, a length and the options that differ (docs/stages.md)."""

    def __post_init__(self) -> None:
        require(
            self.faults.on_nonfinite != "rollback" or self.checkpoint.enable,
            "faults.on_nonfinite = 'rollback' needs checkpoints to load: set checkpoint.enable = true",
        )
        validation = self.validation
        require(
            not validation.enable or bool(validation.sources) or validation.is_set,
            "validation.enable = true needs data to validate on: set validation.path, validation.name or "
            "[[validation.sources]]. To validate on a part of the training data, set data.held_out alone",
        )
        require(
            self.validates or not self.checkpoint.keep_best_k,
            "checkpoint.keep_best_k needs validations: set data.held_out, or validation.enable = true and its data",
        )
        require(
            self.ema.enable or validation.weights == "trained",
            f"validation.weights = {validation.weights!r} needs averaged weights: set ema.enable = true",
        )
        require(
            not (self.training.deterministic and self.training.attention_backend == "cudnn"),
            "training.attention_backend = 'cudnn' has no deterministic backward, which training.deterministic = true "
            "requires; set it to 'flash' or 'auto', or set training.deterministic = false",
        )
        for name in CONFIG_SECTIONS:
            section_of(self, CONFIG_SECTIONS[name]).check(self)
        if self.checkpoint.allow_changes:
            of_plugins = {name: asdict(CONFIG_SECTIONS[name]()) for name in CONFIG_SECTIONS}
            known = flat(asdict(self) | of_plugins)
            for name in self.checkpoint.allow_changes:
                is_free = f"{name}.".startswith(("optimizer.options.", "lr_scheduler.options.", "data.options."))
                of_missing_plugin = "." in name and name.split(".")[0] not in section_types()
                require(
                    name in known or is_free or of_missing_plugin,
                    f"checkpoint.allow_changes names {name!r}, which is not an option; options look like "
                    "'optimizer.lr'",
                )

    @property
    def validates(self) -> bool:
        """Whether the run computes a loss on held-out data."""
        return self.validation.enable or any(source.held_out for source in self.data.all)


def section_types() -> dict[str, Any]:
    """The dataclass of each section by name, those of plugins last; [[stages]] are tables of any options.

    Raises:
        ConfigError: a plugin's section has the name of one of the core, or another name than it is registered by.
    """
    hints = get_type_hints(JobConfig)
    of_plugins = {name: CONFIG_SECTIONS[name] for name in CONFIG_SECTIONS}
    for name, section in of_plugins.items():
        where = f"{section.__module__}.{section.__qualname__}"
        require(name.isidentifier() and name not in hints, f"{where} cannot be the section {name!r}: take another name")
        has_defaults = is_dataclass(section) and all(
            field.default is not MISSING or field.default_factory is not MISSING for field in fields(section)
        )
        require(has_defaults, f"{where} must be a frozen dataclass, each of whose fields has a default and a docstring")
        same = section.section_name == name
        require(same, f"{where} is registered as the section {name!r}: it must be a Section with name={name!r}")
    return {name: hint for name, hint in hints.items() if name not in ("plugins", "stages")} | of_plugins


class HasPlugins(Protocol):
    """What has sections of plugins by name: a ``JobConfig``, or what is made from one."""

    @property
    def plugins(self) -> Mapping[str, Any]: ...


def section_of(config: HasPlugins, section: type[AnySection]) -> AnySection:
    """The options of ``config`` in the ``section`` of a plugin."""
    found: AnySection | None = config.plugins.get(section.section_name)
    return section() if found is None else found


def option_of_plugin(config: HasPlugins, name: str) -> Any:
    """The value of an option of a plugin, which may not be installed; None if its section has the defaults."""
    section, _, key = name.partition(".")
    return getattr(config.plugins.get(section), key, None)


def default_options() -> dict[str, Any]:
    """All options by full name with their defaults, those of plugins too."""
    return flat({name: to_dict(section()) for name, section in section_types().items()} | {"stages": []})


def to_dict(config: Any) -> dict[str, Any]:
    """The config, or a section of it, as nested dicts of plain values, without the options that are None."""

    def plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {
            key_of(k): list(value) if isinstance(value, tuple) else value for k, value in items if value is not None
        }

    options: dict[str, Any] = asdict(config, dict_factory=plain)
    of_plugins = options.pop("plugins") if isinstance(config, JobConfig) else {}
    return options | of_plugins
