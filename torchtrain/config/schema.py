"""All options: one frozen dataclass for each section of the TOML file.

The docstring of a field is the documentation of the option, shown by ``--help``, and its type defines the valid values.
A section raises ConfigError for other values. ``resolve.check_config`` checks what depends on the model and the layout.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar, get_args, get_type_hints

from torchtrain.config.registry import (
    CHECKPOINT_STORAGES,
    CONFIG_SECTIONS,
    DATA_SOURCES,
    GRADIENT_REDUCERS,
    LR_SCHEDULES,
    METRICS_WRITERS,
    MODELS,
    OPTIMIZERS,
    Registry,
    suffixes_of,
)
from torchtrain.errors import ConfigError
from torchtrain.files import is_url, scheme_of


def require(holds: bool, rule: str) -> None:
    """Raise ``ConfigError(rule)`` unless ``holds``."""
    if not holds:
        raise ConfigError(rule)


Rule = tuple[str, Callable[[Any], bool]]
"""The text after "must" in the error message, and a function that returns whether a value is valid."""


def at_least(minimum: float) -> Rule:
    return f"be at least {minimum}", lambda value: value >= minimum


FINITE: Rule = ("be a finite number", lambda value: value < math.inf)

# Types of options, annotated with the rules for their values. None is valid for every rule.
Count = Annotated[int, at_least(1)]
CountOrZero = Annotated[int, at_least(0)]
CountOrAuto = Annotated[int, ("be -1 or at least 1", lambda value: value == -1 or value >= 1)]
Fraction = Annotated[float, ("be between 0 and 1", lambda value: 0 <= value <= 1)]
Decay = Annotated[float, ("be at least 0 and under 1", lambda value: 0 <= value < 1)]
NotNegative = Annotated[float, at_least(0), FINITE]
ABOVE_ZERO = "be above 0 and finite: with 0, a gradient of 0 would make 0 / 0"
Epsilon = Annotated[float, (ABOVE_ZERO, lambda value: 0 < value < math.inf)]
# PyTorch stores timeouts as 64-bit nanoseconds, which overflow after 292 years.
Timeout = Annotated[int, at_least(1), ("be at most 1000000000", lambda value: value <= 10**9)]
NO_URL = "be a local path; URLs are not supported: give a folder where the storage is mounted, or copy the files"
LOCAL: Rule = (NO_URL, lambda value: not is_url(value))
LocalPath = Annotated[str, LOCAL]
LOCAL_OUTPUTS = (
    "be a local folder: set checkpoint.folder to a URL to store checkpoints, metrics and exports in a bucket"
)
TOKENS = r"([0-9]+(?:\.[0-9]+)?)([KMBT]?|x)"
"""A number of tokens, such as 500M or 20B, or of tokens for each parameter of the model, such as 20x."""
TokenCount = Annotated[
    str,
    (
        "be a number of tokens such as '500M' or '20B', or of tokens for each parameter such as '20x'",
        lambda value: not value or bool(re.fullmatch(TOKENS, value) and 0 < float(value.rstrip("KMBTx")) < 2**63),
    ),
]


def require_local(path: str, option: str) -> None:
    """Raise ``ConfigError`` if ``path``, the value of ``option``, is a URL."""
    require(not is_url(path), f"{option} = {path!r} must {NO_URL}")


def rules_of(hint: Any) -> list[Rule]:
    """The rules in a type, such as ``Count | None`` or ``tuple[Count, ...]``."""
    parts = get_args(hint)  # for Annotated: the type, then its annotations
    return [part for part in parts if isinstance(part, tuple)] + [rule for part in parts for rule in rules_of(part)]


def registries_of(hint: Any) -> list[Registry]:
    """The registries in a type, such as ``Annotated[str, OPTIMIZERS] | None``."""
    parts = get_args(hint)
    own = [part for part in parts if isinstance(part, Registry)]
    return own + [registry for part in parts for registry in registries_of(part)]


def key_of(field_name: str) -> str:
    """The TOML key of a field: its name without the trailing underscore of a Python keyword (``import_``)."""
    return field_name.rstrip("_")


def check_values(options: Any, prefix: str) -> None:
    """Raise ``ConfigError`` for the first field, of a dataclass or of one nested in it, that violates a rule of its
    type.

    The value of a field that is annotated with a ``Registry`` must be the name of one of its entries.
    """
    for option in fields(options):
        value, name = getattr(options, option.name), f"{prefix}{key_of(option.name)}"
        for registry in registries_of(option.type):
            if value is not None:
                registry.check(value, name)
        if is_dataclass(value):
            check_values(value, f"{name}.")
        for number, item in enumerate(value if isinstance(value, tuple) else ()):
            if is_dataclass(item):
                check_values(item, f"{name}[{number}].")
        for rule, holds in rules_of(option.type):
            for one in value if isinstance(value, tuple) else (value,):
                require(one is None or holds(one), f"{name} = {one!r} must {rule}")


class Section:
    """Base class of a section that checks its values. ``name``: the name of the section in the TOML file."""

    section_name: ClassVar[str]
    changes_run: ClassVar[bool] = True
    """Of a plugin: whether its options change results, so that a run resumes with others only by ``allow_changes``."""

    def __init_subclass__(cls, name: str = "") -> None:
        cls.section_name = name

    def __post_init__(self) -> None:
        check_values(self, f"{self.section_name}." if self.section_name else "")

    is_of_data: ClassVar[bool] = False
    """Of a plugin: whether its options say how the data are read, so that a replay of a step keeps them."""
    output_files: ClassVar[tuple[str, ...]] = ()
    """Of a plugin: files and folders that it writes to the dump folder, and that are renamed if another run begins
    there."""
    may_differ_between_parts: ClassVar[bool] = False
    """Of a plugin: whether the parts of a run, such as stages, may have different options."""

    def check(self, config: "JobConfig") -> None:
        """Of a plugin: raise ConfigError if these options do not go with the other ones of ``config``. Called for each
        config, also for sections with the defaults."""

    def check_run(self, run: Any, device: Any) -> None:
        """Of a plugin: raise ConfigError if a run cannot have these options, given the ``resolve.ResolvedRun`` and the
        ``torch.device``. Called on each rank before the process groups are initialized."""

    def check_data(self) -> None:
        """Of a plugin: raise ConfigError if data that these options name cannot be loaded. Called on each rank before
        training begins, for the later parts of a run; the first one loads them."""

    def next_commands(self, config: "JobConfig", path: str) -> Sequence[str]:  # noqa: ARG002
        """Of a plugin: commands that use what a complete run with ``config`` has saved. ``path``: their argument, a
        folder or URL as a shell takes it."""
        return ()

    @property
    def trainer_class(self) -> str:
        """Of a plugin: "module:attribute" of the subclass of ``trainer.Trainer`` that trains a run with these options.
        "": any does."""
        return ""


AnySection = TypeVar("AnySection", bound=Section)

SAME_NUMBER = {
    "training.tokens": "training.steps",
    "lr_scheduler.warmup_tokens": "lr_scheduler.warmup_steps",
    "lr_scheduler.total_tokens": "lr_scheduler.total_steps",
    "lr_scheduler.decay_tokens": "lr_scheduler.decay_ratio",
    "checkpoint.interval_tokens": "checkpoint.interval",
    "validation.interval_tokens": "validation.interval",
}
"""Options in tokens, and those in steps that stand for the same number."""


def require_one(section: Any, in_tokens: str, other: str) -> None:
    """Raise ``ConfigError`` if two options of ``section`` that stand for the same number are both set.

    An option that has its default counts as not set. On the command line, one replaces the other in the file.
    """
    tokens, value, name = getattr(section, in_tokens), getattr(section, other), section.section_name
    defaults = {option.name: option.default for option in fields(section)}
    require(
        not tokens or value == defaults[other],
        f"{name}.{in_tokens} = {tokens!r} and {name}.{other} = {value!r} exclude each other; set one of them",
    )


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to options by full name: ``{"a": {"b": 1}}`` to ``{"a.b": 1}``."""
    options: dict[str, Any] = {}
    for key, value in table.items():
        options |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return options


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
    optimizers and other components of your own (docs/extending.md)."""
    disable_plugins: tuple[str, ...] = ()
    """Plugins to turn off, such as ["report"], by the names of their folders in torchtrain/plugins or of their entry
    points (docs/plugins.md): their components, sections and hooks are hidden."""
    stage: str = ""
    """Name of the stage that a resolved config is of; set by the trainer (docs/stages.md)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type to train on. auto: cuda if a GPU is available, else cpu."""


@dataclass(frozen=True)
class RopeScalingConfig:
    type: Literal["none", "llama3", "linear", "yarn"] | None = None
    """How RoPE is scaled for sequences longer than those of the original training. None: as in the flavor, or llama3 if
    another of these options is set."""
    factor: float | None = None
    """Factor by which the context is extended. Frequencies are divided by it: all of them with linear, the low ones
    with llama3 and yarn. None: the flavor's value, or 8."""
    low_freq_factor: float | None = None
    """llama3: frequencies that make at most this many turns within original_max_seq_len tokens are divided by factor.
    None: the flavor's value, or 1."""
    high_freq_factor: float | None = None
    """llama3: frequencies that make at least this many turns within original_max_seq_len tokens are not changed; those
    in between are interpolated. None: the flavor's value, or 4."""
    original_max_seq_len: int | None = None
    """llama3 and yarn: sequence length of the original training, in tokens. None: the flavor's value, or 8192."""
    beta_fast: float | None = None
    """yarn: frequencies that make at least this many turns within original_max_seq_len tokens are not changed. None:
    the flavor's value, or 32."""
    beta_slow: float | None = None
    """yarn: frequencies that make at most this many turns within original_max_seq_len tokens are divided by factor.
    None: the flavor's value, or 1."""
    attention_factor: float | None = None
    """yarn: factor by which queries and keys are multiplied. None: the flavor's value, or 0.1 ln(factor) + 1."""


@dataclass(frozen=True)
class ModelOverrides:
    """Overrides of the model sizes of model.flavor or model.hf_folder. None keeps their value."""

    dim: int | None = None
    """Dimension of the hidden states (the residual stream)."""
    n_layers: int | None = None
    """Number of transformer blocks."""
    n_heads: int | None = None
    """Number of query heads."""
    n_kv_heads: int | None = None
    """Number of key/value heads; it must divide n_heads."""
    ffn_dim: int | None = None
    """Hidden dimension of the feed-forward network."""
    head_dim: int | None = None
    """Dimension of a head. None: the flavor's value, or dim / n_heads."""
    norm_eps: float | None = None
    """Epsilon of RMSNorm."""
    rope_theta: float | None = None
    """Base of the RoPE frequencies."""
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    """[model.shape.rope_scaling]: RoPE scaling for long contexts."""
    tied_embeddings: bool | None = None
    """Share one weight between the token embedding and the output layer."""
    qk_norm: bool | None = None
    """Apply RMSNorm to the queries and keys of each head, as in Qwen3."""
    qkv_bias: bool | None = None
    """Add biases to wq, wk and wv, as in Qwen2."""
    max_position_embeddings: int | None = None
    """Maximum context, in tokens, that exports declare and that generate and evaluate accept, if it exceeds
    training.seq_len. None: that of hf_folder or of checkpoint.initial_load_path."""


@dataclass(frozen=True)
class ModelConfig(Section, name="model"):
    """Model: family, size, tokenizer."""

    name: Annotated[str, MODELS] = "llama3"
    """Model family: llama2, llama3, mistral, qwen2, qwen3, or one that a module in job.import registers."""
    flavor: str = "debugmodel"
    """Size within the model family. Empty: all sizes are set in [model.shape]. llama2: debugmodel, 7B, 13B, 70B;
    llama3: debugmodel, 1B, 3B, 8B, 70B, 405B; mistral: debugmodel; qwen2: debugmodel; qwen3: debugmodel, 0.6B, 1.7B,
    4B, 8B, 14B, 32B."""
    hf_folder: str = ""
    """Folder of a Hugging Face model of one of these families, or a URL such as s3://bucket/model. Its config.json
    replaces name and flavor, and its tokenizer is used unless tokenizer_path is set. Its weights are loaded only if
    checkpoint.initial_load_path names the folder, too."""
    vocab_size: int | None = None
    """Vocabulary size: the rows of the embedding and of the output layer. It must be at least the number of token ids
    of the tokenizer. None: that number, or the vocab_size of hf_folder."""
    tokenizer_path: str = ""
    """Tokenizer: a Hugging Face tokenizer.json, a SentencePiece model, a tiktoken rank file as Llama 3 has
    (tokenizer.model), or a folder with one of them; or a URL of these. Empty: the tokenizer of hf_folder, or the small
    one in the package."""
    shape: ModelOverrides = field(default_factory=ModelOverrides)
    """[model.shape]: overrides of the flavor, such as dim = 768 or n_layers = 12."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """[model.options]: fields of the config of a registered model that [model.shape] does not have. Set them in the
    config file; the command line can then change them."""


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
    beta1: Decay = 0.9
    """Decay of AdamW's running mean of the gradient."""
    beta2: Decay = 0.95
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
    """[optimizer.options.NAME]: options of the optimizer NAME, unless it is adamw (docs/optimizers.md). Set them in a
    TOML file."""
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
    decay: Decay = 0.999
    """Decay rate: the weight of the old average in an update. At step n it is at most (1 + n) / (10 + n), so that the
    initial weights are soon forgotten."""
    interval: Count = 1
    """Number of steps between updates of the average. An update then uses decay to the power of interval."""
    offload: bool = False
    """Keep the averages in CPU memory. Each update then waits for a copy of the parameters."""


@dataclass(frozen=True)
class MupConfig(Section, name="mup"):
    """muP and CompleteP. They transfer hyperparameters from a small model to a larger one with the same head_dim
    (docs/recipes.md)."""

    base_dim: Count | None = None
    """Dimension (dim) of the small model. Initial weights and learning rates are scaled by powers of dim / base_dim
    (muP). None: no muP."""
    base_layers: Count | None = None
    """Number of layers of the small model, if the depth differs, too: the output that each block adds to the residual
    stream is multiplied by base_layers / n_layers (CompleteP)."""


@dataclass(frozen=True)
class LRSchedulerConfig(Section, name="lr_scheduler"):
    """Learning-rate schedule: warm-up and decay."""

    warmup_steps: CountOrZero = 200
    """Steps of linear warm-up of the learning rate; at most the whole schedule."""
    warmup_tokens: TokenCount = ""
    """The warm-up in tokens, such as "2B", in place of warmup_steps."""
    total_steps: Count | None = None
    """Total number of steps of the schedule; later steps have the minimum learning rate. None: training.steps. Set it
    if training.steps may be increased later."""
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
    """[lr_scheduler.options]: options of a registered decay_type."""
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


BUILT_IN_SOURCES = (
    *("files", "remote_files", "hub"),
    *("standard_library", "standard_library_docs", "standard_library_prose"),
)


@dataclass(frozen=True)
class SourceConfig(Section):
    path: str | tuple[str, ...] = ""
    """Local .jsonl, .json, .csv, .tsv, .txt or .md file (each also as .gz, .zst or .xz), .parquet or .arrow file, a
    folder of such files, a pattern such as 'books/*.jsonl', a list of these, or a folder written by torchtrain.prepare.
    The first run tokenizes text into the cache, TORCHTRAIN_CACHE. The same by URLs such as s3://bucket/folder or
    gs://bucket/*.parquet: such text is streamed, without a copy."""
    name: str = ""
    """Name of a dataset on the Hugging Face hub."""
    subset: str = ""
    """Configuration name of the hub dataset, if it has several."""
    split: str = "train"
    """Split of the hub dataset, or of a folder written by DatasetDict.save_to_disk."""
    revision: str | None = None
    """Commit, branch or tag of the hub dataset. None: the newest commit at the start of the run; a resumed run uses the
    same commit."""
    download: bool = False
    """Download the hub dataset before training instead of streaming it."""
    text_column: str = "text"
    """Name of the column that contains the documents."""
    skip_not_utf8: bool = False
    """Skip files that are not UTF-8 (of streamed files the rest of the part that is read, from there on), and log their
    number. false: such a file is an error."""
    weight: float = 1.0
    """Share of the tokens that come from this source, relative to the weights of the other sources. 0: none; the source
    is only opened, and keeps its position for a later stage."""
    label: str = ""
    """Name of the source in the log, in metrics and plots. Empty: the name of its file, folder or dataset."""
    held_out: Annotated[float, ("be at least 0 and less than 1", lambda value: 0 <= value < 1)] = 0.0
    """Share of the documents that is not trained on, but validated on, without another option; [validation] has the
    interval. Documents are chosen by their content, so that equal ones are on the same side. Of several sources, all
    are trained on without the documents of the largest share. In a file that names no data it is of the standard
    library: --data.path unsets it."""
    type: str = ""
    """Type of the source: files, remote_files (those by URLs), hub, standard_library, standard_library_docs (its
    docstrings), standard_library_prose (the English sentences in them and in pydoc's pages), or one that a module in
    job.import registers (docs/extending.md). Empty: files or remote_files if path is set, hub if name is set."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """[data.options]: options of a registered type."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not (self.path and self.name),
            f"path = {self.path!r} and name = {self.name!r} of a data source exclude each other; set one of them",
        )
        require(
            re.fullmatch(r"[\w.+-]*", self.label) is not None,
            f"label = {self.label!r} of a data source must have letters, digits and _ . + - only",
        )
        require("" not in self.paths, f"path = {self.path!r} of a data source has an empty name in it")
        DATA_SOURCES.check(self.source_type, DATA_SOURCES.option)
        for_paths = self.type in ("files", "remote_files")
        require(not for_paths or bool(self.path), f"data.type = {self.type!r} needs data.path")
        require(
            self.type != "remote_files" or all(map(is_url, self.paths)),
            f"data.type = 'remote_files' is for URLs, and data.path = {self.path!r} is none",
        )
        require(self.type != "hub" or bool(self.name), "data.type = 'hub' needs data.name")
        require(
            not self.options or self.source_type not in BUILT_IN_SOURCES,
            f"data.options = {self.options} are for a type of your own, and data.type is {self.source_type!r}",
        )
        require(
            self.weight >= 0,
            f"weight = {self.weight} of a data source must be at least 0; with 0 it only keeps its position",
        )
        require(self.weight < math.inf, f"weight = {self.weight} of a data source must be a finite number")

    @property
    def source_type(self) -> str:
        """The name in ``DATA_SOURCES`` of the type of this source."""
        if self.type in ("", "files") and any(map(is_url, self.paths)):
            return "remote_files"
        return self.type or ("files" if self.path else "hub" if self.name else "standard_library")

    @property
    def is_set(self) -> bool:
        """Whether the config names this source, so that it is not the default one."""
        return bool(self.path or self.name or self.type)

    @property
    def title(self) -> str:
        """A short name for the metrics of this source."""
        if self.label:
            return self.label
        if self.path:
            path = Path(self.paths[0])
            name = path.name.removeprefix("*.")  # of a pattern such as *.jsonl: the file extension
            if name.isdecimal() and path.parent.name:  # as prepare names the folders of several sources
                return f"{path.parent.name}_{name}"
            kind, compression = suffixes_of(name)
            suffix = "".join(f".{word}" for word in (kind, compression) if word)
            return name.removesuffix(suffix) if kind else name
        return "_".join(filter(None, (self.name.split("/")[-1], self.subset))) or self.type

    @property
    def paths(self) -> tuple[str, ...]:
        """``path`` as a tuple; empty if it is not set."""
        paths = (self.path,) if isinstance(self.path, str) else self.path
        return paths if self.path else ()


@dataclass(frozen=True)
class SourcesConfig(SourceConfig):
    sources: tuple[SourceConfig, ...] = ()
    """Several sources, each a table [[....sources]] with the keys of a source."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.sources or not self.is_set,
            f"a path, name or type ({self.path or self.name or self.type!r}) and [[sources]] exclude each other; put "
            "all into [[sources]]",
        )
        require(
            not (self.sources and self.held_out),
            f"held_out = {self.held_out} is an option of each source: put it into the tables [[data.sources]]",
        )
        for number, source in enumerate(self.sources):
            require(source.is_set, f"[[sources]] number {number + 1} has neither path nor name nor type")
        require(any(source.weight for source in self.all), "at least one data source must have a weight above 0")

    @property
    def all(self) -> tuple[SourceConfig, ...]:
        """All sources: those in ``sources``, or this one."""
        return self.sources or (self,)

    @property
    def largest_held_out(self) -> float:
        """The largest share that a source holds out. No source is trained on its documents of this share."""
        return max(source.held_out for source in self.all)


@dataclass(frozen=True)
class DataConfig(SourcesConfig, name="data"):
    """Training data. Without path, name or sources, it is the source code of the Python standard library."""

    when_exhausted: Literal["repeat", "stop"] = "repeat"
    """What happens at the end of a source. repeat: read it again in another order; stop: end the run."""
    packing: Literal["cut", "best_fit"] = "cut"
    """How documents become sequences. cut: one after the other, cut where a sequence ends. best_fit: those that fit
    into a sequence are not cut, and the rest of a sequence is padding, which is not predicted; not for streamed
    data."""
    exclude: LocalPath = ""
    """File with a list of documents that are not trained on, which torchtrain.explain writes. Their tokens have no
    loss, and are replaced by the end of a document; all other tokens stay in their steps and rows."""
    document_mask: bool = False
    """Restrict attention to tokens of the same document, and count positions from its start. false: tokens attend to
    all earlier tokens of the sequence."""
    longest_seq_len: CountOrZero = 0
    """Order data so that training.seq_len can grow to this many tokens without reading any twice. 0: to the
    longest of all stages. A checkpoint keeps the order that it was saved with."""
    prefetch: CountOrZero = 2
    """Number of batches to read ahead in a background thread. 0: read each batch when the step needs it."""
    verify_gib: Annotated[float, ("be at least 0; inf verifies all", lambda value: value >= 0)] = 1.0
    """Size, in GiB, up to which data are hashed in full when a run starts: of each source the local files and the
    tokens, each by itself. Of larger files only parts are hashed, and of more tokens only sizes are compared;
    torchtrain.prepare with prepare.verify hashes all tokens of a folder. inf: always hash everything."""


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
class ParallelismConfig(Section, name="parallelism"):
    """Layout: data, tensor, context, pipeline parallelism."""

    data_parallel_replicate_degree: Count = 1
    """The degree of data parallelism for weight replication (HSDP): number of copies of the sharded model."""
    data_parallel_shard_degree: CountOrAuto = -1
    """The degree of data parallelism for weight sharding (FSDP): number of ranks over which parameters, gradients and
    optimizer states are sharded. -1: the world size divided by the other degrees."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether to free the all-gathered parameters of a block after its forward. default: free those of all blocks but
    the last, which backward needs next; with pipeline parallelism, where each microbatch would gather them again, and
    on one rank, free none."""
    fsdp_gradient_accumulation: Literal["sharded", "unsharded"] = "sharded"
    """How gradients are accumulated over microbatches, including those of a pipeline. sharded: reduce-scatter the
    gradient of each microbatch. unsharded: accumulate unsharded float32 gradients and reduce-scatter them once per
    step, which takes 4 bytes for each parameter of this rank's layers; for small models and slow links."""
    tensor_parallel_degree: Count = 1
    """Tensor parallelism degree: number of ranks over which each weight matrix is sharded. 1: disabled."""
    enable_sequence_parallel: bool = True
    """With tensor parallelism, also shard norms and the residual stream along the sequence."""
    enable_async_tensor_parallel: bool = False
    """Overlap the collectives of tensor parallelism with matrix products (CUDA and compile.enable only)."""
    context_parallel_degree: Count = 1
    """Context parallelism degree: number of ranks over which each sequence is sharded. 1: disabled."""
    pipeline_parallel_degree: Count = 1
    """Pipeline parallelism degree: number of ranks over which the layers are split. 1: disabled."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "Interleaved1F1B", "GPipe", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"
    """Pipeline schedule. 1F1B and GPipe have one stage per rank, ZBVZeroBubble has two, and the interleaved schedules
    have two or as many as pipeline_parallel_layers_per_stage defines."""
    pipeline_parallel_microbatches: CountOrAuto = -1
    """Number of microbatches into which a pipeline splits local_batch_size sequences. -1: one per sequence."""
    pipeline_parallel_layers_per_stage: tuple[Count, ...] = ()
    """Number of layers of each stage, from first to last. Empty: an even split, in which the embedding and the output
    layer count as one layer each."""


@dataclass(frozen=True)
class ActivationCheckpointConfig(Section, name="activation_checkpoint"):
    """Recomputation of activations in backward."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """Activation checkpointing: which activations are recomputed in backward. none: none; selective: some, as
    selective_option says; full: all activations of each block; memory_budget: the compiler chooses (compile.enable
    only)."""
    selective_option: str = "op"
    """For mode = "selective". op: save the results of expensive ops and recompute the others; an int n: recompute all
    activations of every n-th block."""
    memory_budget: Fraction = 0.5
    """For mode = "memory_budget": fraction of the activations of a block that the compiler may save. 0 recomputes all
    activations, 1 none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        option = self.selective_option
        require(
            option == "op" or (option.isdecimal() and int(option) >= 1),
            f"activation_checkpoint.selective_option = {option!r} must be 'op' or an integer from 1, such as '2'",
        )


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile."""

    enable: bool = False
    """Apply torch.compile to each transformer block and to the loss."""


@dataclass(frozen=True)
class CheckpointConfig(Section, name="checkpoint"):
    """Checkpoints, initial weights, export."""

    enable: bool = True
    """Save checkpoints, and resume from the latest."""
    folder: str = "checkpoint"
    """Where checkpoints are stored: a folder that all ranks share, relative to the dump folder, or a URL such as
    s3://bucket/run/checkpoint (docs/object-storage.md)."""
    interval: Count = 500
    """Checkpointing interval in steps. The last step is always saved."""
    interval_tokens: TokenCount = ""
    """Checkpointing interval in tokens, in place of interval."""
    interval_minutes: NotNegative = 30.0
    """Also save a checkpoint if this many minutes have passed since the end of the previous save, which bounds the work
    lost with slow steps. 0: save by steps only."""
    keep_latest_k: CountOrZero = 5
    """Keep only the latest k checkpoints. 0: keep all of them. A checkpoint takes 12 bytes per parameter (1B: 15 GB,
    8B: 96 GB), and while one is written the disk holds one more."""
    keep_every: CountOrZero = 0
    """Beside the latest, keep the first checkpoint at or after each multiple of this number of steps. 0: none."""
    keep_best_k: CountOrZero = 0
    """Beside the latest, keep the k checkpoints of the lowest validation loss: of those after whose step the run has
    validated, in each stage. 0: none."""
    load_step: Annotated[int, at_least(-1)] = -1
    """Step of the checkpoint to resume from. -1: the latest."""
    initial_load_path: str = ""
    """Initial weights of a new run: the folder of a run, a step-N in it, a Hugging Face folder, or a URL of these. A
    run that has a checkpoint of its own resumes from that instead."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
    """disabled: training waits until a checkpoint is on disk. async: training continues when the state has been copied
    to CPU memory. async_with_pinned_mem: training continues immediately, and the copy overlaps with the next forward
    and backward (CUDA; elsewhere the same as async). Both async modes keep one copy of the state in CPU memory."""
    allow_changes: tuple[str, ...] = ()
    """Names of options, such as "optimizer.lr", that may differ from the checkpoint's config although they change the
    results of the run (table in docs/checkpoints.md)."""
    max_failed_saves: Count = 3
    """Number of consecutive failed saves, for example on a full disk, after which the run ends with an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_url(self.folder):
            CHECKPOINT_STORAGES.check(scheme_of(self.folder), CHECKPOINT_STORAGES.option)
        given = self.enable or self.load_step == -1
        require(given, f"checkpoint.load_step = {self.load_step} needs checkpoint.enable = true")
        require_one(self, "interval_tokens", "interval")

    def location(self, dump_folder: str | Path) -> str:
        """Path or URL of the checkpoints of the run in ``dump_folder``."""
        return self.folder if is_url(self.folder) else str(Path(dump_folder) / (self.folder or "checkpoint"))


@dataclass(frozen=True)
class FaultsConfig(Section, name="faults"):
    """Non-finite steps, loss spikes, stopping in time."""

    on_nonfinite: Literal["skip", "rollback", "stop"] = "skip"
    """What to do in a bad step, whose loss or gradient norm is non-finite or a spike. skip: skip the update. rollback:
    load the latest valid checkpoint before the step, and continue with the next data. stop: end the run with an
    error."""
    max_bad_steps: CountOrZero = 5
    """Maximum number of consecutive bad steps, or of rollbacks that do not get past them; one more ends the run with an
    error."""
    spike_threshold: NotNegative = 0.0
    """A loss or gradient norm is a spike if it exceeds the mean of the last spike_window steps by more than this many
    standard deviations. 0: no spike detection."""
    spike_window: Annotated[int, at_least(2)] = 128
    """Number of steps over which spike detection computes mean and standard deviation."""
    wall_clock_limit_minutes: NotNegative = 0.0
    """Save and stop early enough that the process ends within this many minutes of its start. 0: no limit."""
    stop_grace_seconds: CountOrZero = 30
    """Grace period in seconds between a signal and the kill, and between stopping and the wall-clock limit. A save that
    exceeds it is aborted. After SLURM's warning, SIGUSR1, the grace period lasts until the job's time limit, if that is
    longer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        limit_seconds = 60 * self.wall_clock_limit_minutes
        require(
            limit_seconds == 0 or limit_seconds > self.stop_grace_seconds,
            f"faults.wall_clock_limit_minutes = {self.wall_clock_limit_minutes} must exceed "
            f"faults.stop_grace_seconds = {self.stop_grace_seconds} ({self.stop_grace_seconds / 60:.3g} minutes), the "
            "time before the limit at which the run stops; raise it, or set 0 for no limit",
        )


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
class ProfilingConfig(Section, name="profiling"):
    """Profiler traces and memory snapshots."""

    enable_profiling: bool = False
    """Write a torch.profiler trace of every rank to traces/ in the dump folder."""
    profile_freq: Annotated[int, at_least(3)] = 10
    """How often to collect profiler traces, in steps."""
    enable_memory_snapshot: bool = False
    """Write CUDA memory snapshots to traces/, every profile_freq steps and when memory runs out (CUDA only)."""


@dataclass(frozen=True)
class CommConfig(Section, name="comm"):
    """Timeouts of communication."""

    init_timeout_seconds: Timeout = 300
    """Timeout for communication operations, during initialization and the first train step, in seconds."""
    train_timeout_seconds: Timeout = 100
    """Time limit for each step after the first, in seconds; at least three times the duration of the first step.
    After it, each rank writes its stack traces to hangs/ in the dump folder; a few seconds later pending collectives
    time out."""


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
