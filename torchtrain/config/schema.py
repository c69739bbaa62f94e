"""Every option there is: one frozen dataclass per section of the TOML file.

The text under a field is its documentation, shown by ``--help``, and its type says which values it may have. A section
refuses others; ``trainer.validate`` rejects what depends on several sections or on the number of ranks.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from torchtrain.config.registry import Registry
from torchtrain.errors import ConfigError


def require(holds: bool, rule: str) -> None:
    """Raise ``ConfigError(rule)`` unless ``holds``."""
    if not holds:
        raise ConfigError(rule)


Rule = tuple[str, Callable[[Any], bool]]
"""What goes after "must" in a message, and whether a value keeps to it."""


def at_least(minimum: float) -> Rule:
    return f"be at least {minimum}", lambda value: value >= minimum


FINITE: Rule = ("be a finite number", lambda value: value < math.inf)

# Types of options with the rules that their values keep to. None keeps to all.
Count = Annotated[int, at_least(1)]
CountOrZero = Annotated[int, at_least(0)]
CountOrOpen = Annotated[int, ("be -1 or at least 1", lambda value: value == -1 or value >= 1)]
Share = Annotated[float, ("lie in 0 to 1", lambda value: 0 <= value <= 1)]
Decay = Annotated[float, ("be at least 0 and under 1", lambda value: 0 <= value < 1)]
NotNegative = Annotated[float, at_least(0), FINITE]
ZERO_BY_ZERO = "be above 0 and finite: with 0, a gradient of 0 would make 0 / 0"
Epsilon = Annotated[float, (ZERO_BY_ZERO, lambda value: 0 < value < math.inf)]
# Longer than 292 years does not fit into 64 bits of nanoseconds.
Timeout = Annotated[int, at_least(1), ("be at most 1000000000", lambda value: value <= 10**9)]
URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
NO_URL = "be a local path; URLs are not supported: give a folder where the storage is mounted, or copy the files"
LOCAL: Rule = (NO_URL, lambda value: not URL.match(value))
LocalPath = Annotated[str, LOCAL]


def require_local(path: str, option: str) -> None:
    """Raise ``ConfigError`` where ``path``, the value of ``option``, is a URL."""
    require(not URL.match(path), f"{option} = {path!r} must {NO_URL}")


def rules_of(hint: Any) -> list[Rule]:
    """The rules in a type, such as ``Count | None`` or ``tuple[Count, ...]``."""
    parts = get_args(hint)  # of an Annotated the type, and then what it is annotated with
    return [part for part in parts if isinstance(part, tuple)] + [rule for part in parts for rule in rules_of(part)]


def key_of(field_name: str) -> str:
    """The key of a field in a TOML file: its name without the underscore after a keyword of Python (``import_``)."""
    return field_name.rstrip("_")


def check_values(options: Any, prefix: str) -> None:
    """Raise ``ConfigError`` for the first field of a dataclass that breaks a rule of its type; also of those in it.

    The value of a field that is annotated with a ``Registry`` must be the name of one of its entries.
    """
    for option in fields(options):
        value, name = getattr(options, option.name), f"{prefix}{key_of(option.name)}"
        for registry in get_args(option.type):
            if isinstance(registry, Registry):
                registry.check(value, name)
        if is_dataclass(value):
            check_values(value, f"{name}.")
        for rule, holds in rules_of(option.type):
            for one in value if isinstance(value, tuple) else (value,):
                require(one is None or holds(one), f"{name} = {one!r} must {rule}")


class Section:
    """A section that checks its values. ``name``: as in the TOML file."""

    section_name: ClassVar[str]

    def __init_subclass__(cls, name: str = "") -> None:
        cls.section_name = name

    def __post_init__(self) -> None:
        check_values(self, f"{self.section_name}." if self.section_name else "")


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``: options by full name."""
    options: dict[str, Any] = {}
    for key, value in table.items():
        options |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return options


@dataclass(frozen=True)
class JobSection(Section, name="job"):
    config_file: LocalPath = ""
    """TOML file to read the options from; options on the command line win over it."""
    dump_folder: LocalPath = ""
    """Folder for everything the run writes. Empty: outputs/<name of the config file>."""
    description: str = ""
    """What this run is for, in your words; kept with the resolved config."""
    import_: tuple[str, ...] = ()
    """Python modules to import before the config is read, such as ["my_package.my_module"]: they register models,
    optimizers and other components of your own (docs/extending.md)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. auto: cuda where there is a GPU, else cpu."""


@dataclass(frozen=True)
class RopeScalingConfig:
    type: Literal["none", "llama3", "linear", "yarn"] | None = None
    """How RoPE is scaled for sequences longer than those first trained on. None: as the flavor has it, or llama3 if
    another of these options is set."""
    factor: float | None = None
    """How many times longer; frequencies are divided by it. None: the flavor's, or 8."""
    low_freq_factor: float | None = None
    """llama3: frequencies of at most this many turns in the original length are divided. None: the flavor's, or 1."""
    high_freq_factor: float | None = None
    """llama3: frequencies of at least this many turns are kept. None: the flavor's, or 4."""
    original_max_seq_len: int | None = None
    """llama3 and yarn: the sequence length first trained on. None: the flavor's, or 8192."""
    beta_fast: float | None = None
    """yarn: frequencies of at least this many turns in the original length are kept. None: the flavor's, or 32."""
    beta_slow: float | None = None
    """yarn: frequencies of at most this many turns are divided. None: the flavor's, or 1."""
    attention_factor: float | None = None
    """yarn: queries and keys are multiplied by it. None: the flavor's, or 0.1 ln(factor) + 1."""


@dataclass(frozen=True)
class ModelOverrides:
    """The model's shape, where it differs from that of model.flavor or model.hf_folder."""

    dim: int | None = None
    """Width of the residual stream."""
    n_layers: int | None = None
    """Blocks."""
    n_heads: int | None = None
    """Query heads."""
    n_kv_heads: int | None = None
    """Key/value heads; they must divide the query heads."""
    ffn_dim: int | None = None
    """Inner width of the feed-forward network."""
    head_dim: int | None = None
    """Width of a head. None: the flavor's own, or dim / n_heads."""
    norm_eps: float | None = None
    """Epsilon of the norms."""
    rope_theta: float | None = None
    """Base of RoPE's wavelengths."""
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    """[model.shape.rope_scaling]"""
    tied_embeddings: bool | None = None
    """Use the embedding as the output layer, too."""
    qk_norm: bool | None = None
    """Normalize queries and keys, each head by itself, as Qwen3 does."""
    qkv_bias: bool | None = None
    """Biases of wq, wk and wv, as in Qwen2."""
    max_position_embeddings: int | None = None
    """Longest context, which exports state and generate and evaluate accept, where it is more than training.seq_len.
    None: that of hf_folder or of checkpoint.initial_load_path."""


@dataclass(frozen=True)
class ModelConfig(Section, name="model"):
    name: Literal["llama2", "llama3", "mistral", "qwen2", "qwen3"] = "llama3"
    """Family of the model."""
    flavor: str = "debugmodel"
    """Size within the family; empty: [model.shape] gives all. llama2: debugmodel, 7B, 13B, 70B; llama3: debugmodel, 1B,
    3B, 8B, 70B, 405B; mistral: debugmodel; qwen2: debugmodel; qwen3: debugmodel, 0.6B, 1.7B, 4B, 8B, 14B, 32B."""
    hf_folder: LocalPath = ""
    """Hugging Face folder of a model of these families: its shape in place of name and flavor, and its tokenizer unless
    tokenizer_path names another. Its weights are not read; that is checkpoint.initial_load_path."""
    vocab_size: int | None = None
    """Rows of embedding and output: at least as many as the tokenizer has ids. None: as many, or as in hf_folder."""
    tokenizer_path: LocalPath = ""
    """Hugging Face tokenizer.json, SentencePiece model, Llama 3's tiktoken rank file (tokenizer.model), or a folder
    with one of them. Empty: that of hf_folder, or the small one in the package."""
    shape: ModelOverrides = field(default_factory=ModelOverrides)
    """[model.shape]: what is not as the flavor has it, such as dim = 768 or n_layers = 12."""


@dataclass(frozen=True)
class ParameterGroupConfig:
    lr_factor: NotNegative = 1.0
    """Factor of the learning rate of these parameters."""
    weight_decay: NotNegative | None = None
    """Their decoupled weight decay. None: optimizer.weight_decay; for vectors 0."""


@dataclass(frozen=True)
class OptimizerConfig(Section, name="optimizer"):
    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the blocks' matrices; other parameters always use AdamW (docs/optimizers.md)."""
    lr: NotNegative = 3e-4
    """Peak learning rate."""
    beta1: Decay = 0.9
    """Decay of AdamW's running mean of the gradient."""
    beta2: Decay = 0.95
    """Decay of AdamW's running mean of the squared gradient."""
    eps: Epsilon = 1e-8
    """AdamW's epsilon."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of matrices and embeddings; vectors (norms, biases) have none."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """How AdamW computes its update: in one kernel, one operation at a time, or one parameter at a time."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype in which AdamW's two means and Muon's one are kept between steps. bfloat16 halves them; the update is
    computed in float32. A beta2 above 0.99 then hardly changes the second mean."""
    muon_momentum: Decay = 0.95
    """Decay of Muon's running mean of the gradient, which looks one step ahead (Nesterov)."""
    muon_iterations: Count = 5
    """Newton-Schulz iterations by which Muon makes a matrix orthogonal."""
    muon_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of these iterations, and of what ranks send each other for them. auto: bfloat16, on a CPU float32."""
    matrices: ParameterGroupConfig = field(default_factory=ParameterGroupConfig)
    """[optimizer.matrices]: the blocks' matrices."""
    embeddings: ParameterGroupConfig = field(default_factory=ParameterGroupConfig)
    """[optimizer.embeddings]: embedding and output."""
    vectors: ParameterGroupConfig = field(default_factory=ParameterGroupConfig)
    """[optimizer.vectors]: norms and biases."""


@dataclass(frozen=True)
class EMAConfig(Section, name="ema"):
    enable: bool = False
    """Keep averaged weights, an exponential moving average of the parameters: 4 bytes for each parameter."""
    decay: Decay = 0.999
    """Weight of the old average in an update; in step n at most (1 + n) / (10 + n)."""
    interval: Count = 1
    """Steps between updates of the average; an update then uses decay to the power of interval."""
    offload: bool = False
    """Keep the averages in CPU memory; each update waits for a copy of the parameters."""


@dataclass(frozen=True)
class MupConfig(Section, name="mup"):
    """Hyperparameters of a small model for a larger one of the same head_dim (docs/recipes.md)."""

    base_dim: Count | None = None
    """Width (dim) of the small model. Initial weights and learning rates are scaled by width / base_dim (muP)."""
    base_layers: Count | None = None
    """Layers of the small model, if it has fewer: what blocks add to the residual stream is scaled by base_layers /
    n_layers (CompleteP)."""


@dataclass(frozen=True)
class LRSchedulerConfig(Section, name="lr_scheduler"):
    warmup_steps: CountOrZero = 200
    """Steps of linear warm-up; the whole schedule, if that is shorter."""
    total_steps: Count | None = None
    """Length of the whole schedule; later steps have the floor's rate. None: training.steps. Set it if training.steps
    may be raised later."""
    decay_ratio: Share | None = None
    """Share of the schedule, at its end, in which the rate decays; before, it is constant. None: after the warm-up."""
    decay_type: Literal["constant", "linear", "cosine", "sqrt"] = "cosine"
    """Shape of the decay; constant keeps the peak rate after the warm-up."""
    min_lr_factor: Share = 0.0
    """Floor of the decay, as a share of optimizer.lr. The decay reaches it one step after the last of the schedule, so
    that no step has a rate of 0."""


@dataclass(frozen=True)
class TrainingConfig(Section, name="training"):
    local_batch_size: Count = 8
    """Sequences in one forward pass of one data-parallel rank."""
    global_batch_size: CountOrOpen = -1
    """Sequences in one optimizer step over all ranks. -1: local_batch_size times the data-parallel ranks; a
    larger one accumulates gradients."""
    seq_len: Count = 2048
    """Tokens in a sequence."""
    steps: Count = 10000
    """Optimizer steps of the run."""
    max_norm: Annotated[float, ("be above 0", lambda value: value > 0)] = 1.0
    """Largest norm of the whole gradient; above it the gradient is scaled down."""
    seed: CountOrZero = 0
    """Seed of the initial weights and of the data order, which are the same on every layout."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of parameters and activations in forward and backward; master weights are float32. A CPU that cannot
    multiply in bfloat16 computes products in float32 and rounds them."""
    mixed_precision_reduce: Literal["bfloat16", "float32"] = "float32"
    """dtype in which gradients of parameters are reduced over ranks, on every axis of the mesh."""
    sums: Literal["fast", "exact"] = "fast"
    """How gradients are added up. exact: as 64-bit integers, so that the run has the same bits on any number of
    data-parallel ranks (docs/parallelism.md)."""
    loss_chunk_tokens: Annotated[int, at_least(-1)] = -1
    """Tokens whose logits exist at once: loss and gradient are computed chunk by chunk, with the same result. -1: as
    many as 1 GiB of float32 logits hold, on CPU 8 MiB, and 256 at least; 0: all."""
    z_loss_weight: NotNegative = 0.0
    """Weight of the z-loss, the mean of log(Z)^2 over tokens, which keeps the logits' softmax normalizer Z near 1; PaLM
    has 1e-4. It is trained on, but not part of the loss that is reported."""
    attention_backend: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """Kernel of scaled_dot_product_attention. auto: PyTorch's choice, on an H100 cuDNN's where it is newer than 9.15;
    in bfloat16 on a CPU its flash kernel with a faster backward. The log names the kernel."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states in CPU memory (CUDA only)."""
    deterministic: bool = False
    """Use only deterministic kernels, so that a resumed run is bitwise the same on CUDA too; slower there."""
    gc_freq: Count = 50
    """Steps between collections of Python's garbage, made on all ranks at once."""


@dataclass(frozen=True)
class SourceConfig(Section):
    path: LocalPath | tuple[LocalPath, ...] = ""
    """Local .jsonl, .json, .csv, .tsv, .txt or .md file (all also .gz or .zst), .parquet or .arrow file, a folder of
    them, a pattern such as 'books/*.jsonl', a list of these, or a folder that torchtrain.prepare wrote."""
    name: str = ""
    """Name of a dataset on the Hugging Face hub."""
    subset: str = ""
    """Configuration of the hub dataset, where it has several."""
    split: str = "train"
    """Split of the hub dataset, or of a folder that DatasetDict.save_to_disk wrote."""
    revision: str | None = None
    """Commit, branch or tag of the hub dataset. None: the newest commit when the run begins, to which a resumed run
    keeps."""
    download: bool = False
    """Download the hub dataset before training; else it is streamed."""
    text_column: str = "text"
    """Column that holds the documents."""
    skip_not_utf8: bool = False
    """Skip local files that are not UTF-8, and count them in the log. false: such a file is an error."""
    weight: float = 1.0
    """Share of the tokens, relative to the weights of the other sources."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not (self.path and self.name),
            f"path = {self.path!r} and name = {self.name!r} of a data source exclude each other; give one",
        )
        require("" not in self.paths, f"path = {self.path!r} of a data source has an empty name in it")
        require(
            self.weight > 0,
            f"weight = {self.weight} of a data source must be above 0, or leave the source out",
        )
        require(self.weight < math.inf, f"weight = {self.weight} of a data source must be a finite number")

    @property
    def label(self) -> str:
        """A short name, for curves."""
        if self.path:
            name = Path(self.paths[0]).name.removeprefix("*.")  # of a pattern for all files of a kind, the kind
            return re.sub(r"\.(jsonl?|csv|tsv|txt|md|parquet|arrow)(\.(gz|zst))?$", "", name)
        return "_".join(filter(None, (self.name.split("/")[-1], self.subset)))

    @property
    def paths(self) -> tuple[str, ...]:
        """``path`` as a list."""
        paths = (self.path,) if isinstance(self.path, str) else self.path
        return paths if self.path else ()


@dataclass(frozen=True)
class SourcesConfig(SourceConfig):
    sources: tuple[SourceConfig, ...] = ()
    """Several sources, each a table [[....sources]] with the keys above."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.sources or not (self.path or self.name),
            f"a path or name ({self.path or self.name!r}) and [[sources]] exclude each other; put all into [[sources]]",
        )
        for number, source in enumerate(self.sources):
            require(bool(source.path or source.name), f"[[sources]] number {number + 1} has neither path nor name")

    @property
    def all(self) -> tuple[SourceConfig, ...]:
        """The several, or the one."""
        return self.sources or (self,)


@dataclass(frozen=True)
class DataConfig(SourcesConfig, name="data"):
    """Without path, name or sources, the text is the source code of the Python standard library."""

    when_exhausted: Literal["repeat", "stop"] = "repeat"
    """What happens when a source has been read to its end: it is read again in another order, or the run stops."""
    document_mask: bool = False
    """Tokens attend only to their own document, whose positions begin at 0. false: to all earlier tokens."""
    streams: Count = 64
    """Files of streamed data to read at once: the largest divisor of the global batch up to this number. The number of
    data-parallel ranks must divide it. Another number gives another order of the data."""
    prefetch: CountOrZero = 2
    """Batches to read ahead in the background; 0 reads when the step needs them."""
    verify_gib: Annotated[float, ("be at least 0; inf verifies all", lambda value: value >= 0)] = 1.0
    """A source's local files, its converted copy and its prepared data are each hashed in full up to this size when a
    run starts. Of larger files only parts are hashed, and of larger copies and prepared data only the sizes are
    compared; torchtrain.prepare with prepare.verify hashes all prepared data."""


@dataclass(frozen=True)
class ValidationConfig(SourcesConfig, name="validation"):
    enable: bool = False
    """Compute the loss on held-out data. With several sources, of each and of all together."""
    interval: Count = 500
    """Steps between validations; there is always one after the last step."""
    steps: CountOrOpen = -1
    """Batches of each source; -1: all of it, once."""
    weights: Literal["trained", "ema", "both"] = "trained"
    """Weights to validate. The names of averaged weights' results (ema.enable) begin with validation_ema_."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.enable or bool(self.sources or self.path or self.name),
            "validation.enable needs data of its own: set validation.path, validation.name or [[validation.sources]]",
        )
        labels = [source.label for source in self.all]
        require(
            len(set(labels)) == len(labels),
            f"[[validation.sources]] must differ in the names of their files or datasets, to tell their curves apart; "
            f"they are {', '.join(labels)}",
        )


@dataclass(frozen=True)
class PrepareConfig(Section, name="prepare"):
    """For python -m torchtrain.prepare alone, which tokenizes the sources of [data] once."""

    output: LocalPath = ""
    """Folder for the prepared data; with several sources, folders 0, 1, ... in it."""
    processes: CountOrZero = 0
    """Processes that tokenize. 0: one for each core."""
    verify: bool = False
    """Only compare the hashes of all files in the output folder with those in its manifest."""


@dataclass(frozen=True)
class ParallelismConfig(Section, name="parallelism"):
    data_parallel_replicate_degree: Count = 1
    """Copies of the (sharded) model: HSDP's replicate axis."""
    data_parallel_shard_degree: CountOrOpen = -1
    """Ranks over which FSDP shards parameters, gradients and optimizer states. -1: all that the others leave."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free a block's gathered parameters after its forward. default: always, but for the last block, whose backward is
    next; never with pipeline stages, where every microbatch would gather them again, and on one rank."""
    fsdp_gradient_accumulation: Literal["sharded", "unsharded"] = "sharded"
    """How microbatches, also those of a pipeline, add up their gradients. sharded: each is reduced into the shards.
    unsharded: whole float32 gradients are reduced once a step; they take 4 bytes for each parameter of this rank's
    layers. For small models and slow links."""
    fsdp_exact_transport: Literal["auto", "ring", "all_to_all"] = "auto"
    """How training.sums = "exact" sends gradients: by the backend's reduce-scatter, 8 bytes each, or by an all-to-all
    in mixed_precision_param. auto: the all-to-all on CPUs and among ranks of one machine."""
    tensor_parallel_degree: Count = 1
    """Ranks over which each matrix is split."""
    enable_sequence_parallel: bool = True
    """With tensor parallelism, split norms and residuals along the sequence, too."""
    enable_async_tensor_parallel: bool = False
    """Overlap the collectives of tensor parallelism with its matrix products (CUDA and compile.enable only)."""
    context_parallel_degree: Count = 1
    """Ranks over which each sequence is split."""
    pipeline_parallel_degree: Count = 1
    """Ranks over which the layers are split."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "Interleaved1F1B", "GPipe", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"
    """Order of forwards and backwards. 1F1B and GPipe have one stage a rank, ZBVZeroBubble two, the interleaved ones
    two or as many as pipeline_parallel_layers_per_stage says."""
    pipeline_parallel_microbatches: CountOrOpen = -1
    """Microbatches that a pipeline splits its local_batch_size sequences into. -1: one for each sequence."""
    pipeline_parallel_layers_per_stage: tuple[Count, ...] = ()
    """Layers of each stage, first to last. Empty: an even split, in which embedding and output count as one each."""


@dataclass(frozen=True)
class ActivationCheckpointConfig(Section, name="activation_checkpoint"):
    mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """Recompute activations in backward: none of them, those of some ops or layers, or all of each block; with
    memory_budget the compiler chooses what fits (compile.enable only)."""
    selective_option: str = "op"
    """op: keep the results of expensive ops, recompute the rest; a number n: recompute all of every n-th block."""
    memory_budget: Share = 0.5
    """Share of a block's activations that the compiler may keep; 0 recomputes all, 1 nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        option = self.selective_option
        require(
            option == "op" or (option.isdecimal() and int(option) >= 1),
            f"activation_checkpoint.selective_option = {option!r} must be 'op' or a whole number from 1, such as '2'",
        )


@dataclass(frozen=True)
class CompileConfig:
    enable: bool = False
    """Compile each transformer block, and the loss, with torch.compile."""


@dataclass(frozen=True)
class Float8Config:
    recipe: Literal["none", "tensorwise", "rowwise"] = "none"
    """Compute the blocks' linear layers in float8, with one scale for a tensor (faster) or one for each row (more
    exact). Needs a GPU of compute capability 8.9 or more and pip install 'torchtrain[float8]'. Master weights,
    optimizer states and checkpoints do not change."""
    enable_fsdp_float8_all_gather: bool = True
    """With tensorwise scales, gather the weights in float8: half the bytes."""


@dataclass(frozen=True)
class CheckpointConfig(Section, name="checkpoint"):
    enable: bool = True
    """Save checkpoints, and resume from the newest."""
    interval: Count = 500
    """Steps between checkpoints; the last step is always saved."""
    interval_minutes: NotNegative = 30.0
    """Also save when so many minutes have passed since the end of the last save, so that slow steps are not lost. 0:
    save by steps alone."""
    keep_latest_k: CountOrZero = 5
    """Checkpoints to keep; 0 keeps all. Each takes 12 bytes for each parameter (1B: 15 GB, 8B: 96 GB), and while one is
    written there is one more."""
    load_step: Annotated[int, at_least(-1)] = -1
    """Step to resume from. -1: the newest."""
    initial_load_path: LocalPath = ""
    """Weights that a new run starts from: a run's folder, a step-N in it, or a Hugging Face folder. A run that resumes
    goes on from its own checkpoint."""
    last_save_in_hf: bool = False
    """At the end of the run, also write the weights to hf/ in the dump folder, as transformers loads them."""
    export_weights: Literal["trained", "ema"] = "trained"
    """The weights in hf/; ema: the averaged ones (ema.enable)."""
    export_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """dtype of the weights in hf/."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
    """disabled: wait until a checkpoint is on disk. async: go on once the state is copied to CPU memory.
    async_with_pinned_mem: go on at once, copying beside the next forward and backward (CUDA; elsewhere the same as
    async). Both async modes keep one copy of the state in CPU memory."""
    allow_changes: tuple[str, ...] = ()
    """Options, such as "optimizer.lr", that may differ from the checkpoint's although they change the run.
    docs/checkpoints.md has the table of what needs this."""
    max_failed_saves: Count = 3
    """Failed saves in a row, as on a full disk, after which the run stops."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.enable or self.load_step == -1
        require(given, f"checkpoint.load_step = {self.load_step} needs checkpoint.enable = true")


@dataclass(frozen=True)
class FaultsConfig(Section, name="faults"):
    on_nonfinite: Literal["skip", "rollback", "stop"] = "skip"
    """What to do when loss or gradient are not finite, or a spike. skip: make no update in that step. rollback: load
    the newest good checkpoint from before it, and go on with the next data. stop: end the run with an error."""
    max_bad_steps: CountOrZero = 5
    """Bad steps in a row that are skipped, or rollbacks without getting past them, before the run stops."""
    spike_threshold: NotNegative = 0.0
    """A loss or gradient norm so many standard deviations above the mean of the last spike_window steps is a spike.
    0: none is."""
    spike_window: Annotated[int, at_least(2)] = 128
    """Steps that a spike is measured against."""
    wall_clock_limit_minutes: NotNegative = 0.0
    """Save and stop so that this process ends within so many minutes. 0: no limit."""
    stop_grace_seconds: CountOrZero = 30
    """Time between a signal and being killed, and the time before the wall-clock limit at which to stop: a save that
    takes longer is given up. After SLURM's warning, SIGUSR1, there is time until the job's limit, if that is more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        limit_seconds = 60 * self.wall_clock_limit_minutes
        require(
            limit_seconds == 0 or limit_seconds > self.stop_grace_seconds,
            f"faults.wall_clock_limit_minutes = {self.wall_clock_limit_minutes} must be longer than "
            f"faults.stop_grace_seconds = {self.stop_grace_seconds} ({self.stop_grace_seconds / 60:.3g} minutes), the "
            "time before the limit at which the run stops; raise it, or set 0 for no limit",
        )


@dataclass(frozen=True)
class MetricsConfig(Section, name="metrics"):
    log_freq: Count = 10
    """Steps between lines in the log, in metrics.jsonl and in TensorBoard."""
    enable_tensorboard: bool = True
    """Write TensorBoard event files."""
    enable_wandb: bool = False
    """Log to Weights & Biases (pip install 'torchtrain[wandb]'); WANDB_MODE=offline writes to the dump folder alone."""
    wandb_project: str = "torchtrain"
    """Project in Weights & Biases."""
    straggler_freq: CountOrZero = 100
    """Steps between checks for ranks that keep the others waiting; 0: never."""
    straggler_factor: Annotated[float, at_least(1), FINITE] = 2.0
    """A rank is slow if its data wait or its computation takes more than this many times the median of all ranks."""


@dataclass(frozen=True)
class ProfilingConfig(Section, name="profiling"):
    enable_profiling: bool = False
    """Write a torch.profiler trace of every rank to traces/."""
    profile_freq: Annotated[int, at_least(3)] = 10
    """Steps between traces."""
    enable_memory_snapshot: bool = False
    """Write CUDA memory snapshots to traces/ as often as profiler traces, and when memory runs out (CUDA only)."""


@dataclass(frozen=True)
class DebugConfig(Section, name="debug"):
    fingerprint_steps: tuple[Count, ...] = ()
    """Steps whose tensors are described in fingerprints/, for python -m torchtrain.compare (docs/compare.md). They take
    longer, and memory for a second copy of the parameters."""


@dataclass(frozen=True)
class CommConfig(Section, name="comm"):
    init_timeout_seconds: Timeout = 300
    """Time-out of collectives up to the end of the first step, which may compile and load."""
    train_timeout_seconds: Timeout = 100
    """Time for a step after the first one; on a CPU at least three times that of the first one. When it is over, each
    rank writes its stacks to hangs/ in the dump folder, and a few seconds later collectives still under way fail."""


@dataclass(frozen=True)
class EstimateConfig(Section, name="estimate"):
    """For python -m torchtrain.estimate alone, which tells what a run needs and how fast it goes, without a GPU."""

    world_size: CountOrZero = 0
    """Ranks, one a GPU. 0: the product of the degrees in [parallelism], of which none may be -1."""
    gpu: Literal["a100-40", "a100-80", "h100-80", "h100-96", "h200", "b200"] = "h100-80"
    """Kind of GPU, the number being its memory in GB. h200 has 141, b200 180."""
    gpus_per_node: Count = 8
    """GPUs of a machine."""
    memory_gib: NotNegative = 0.0
    """Memory of a GPU. 0: that of its kind."""
    network_gigabits: NotNegative = 0.0
    """Speed of a GPU's network card in Gb/s. 0: that of its kind."""
    all_layers: bool = False
    """Run every layer on fake tensors, not only a few that stand for all: slower, to check the estimate."""
    search: bool = False
    """Look for the layout with the most tokens a second that fits."""
    output: LocalPath = ""
    """TOML file for the best layout of a search, to be given to the trainer. Empty: layout.toml in job.dump_folder."""
    json: bool = False
    """Print JSON instead of a table."""
    picture: LocalPath = ""
    """PNG file for a picture of memory over two steps (pip install 'torchtrain[plot]')."""


@dataclass(frozen=True)
class JobConfig:
    """All sections."""

    job: JobSection = field(default_factory=JobSection)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    mup: MupConfig = field(default_factory=MupConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    estimate: EstimateConfig = field(default_factory=EstimateConfig)

    def __post_init__(self) -> None:
        require(
            self.faults.on_nonfinite != "rollback" or self.checkpoint.enable,
            "faults.on_nonfinite = 'rollback' needs checkpoints to load: set checkpoint.enable = true",
        )
        for key, weights in (
            ("validation.weights", self.validation.weights),
            ("checkpoint.export_weights", self.checkpoint.export_weights),
        ):
            require(
                self.ema.enable or weights == "trained",
                f"{key} = {weights!r} needs averaged weights: set ema.enable = true",
            )
        require(
            not (self.training.deterministic and self.training.attention_backend == "cudnn"),
            "training.attention_backend = 'cudnn' has no deterministic backward, which training.deterministic = true "
            "asks for; take 'flash' or 'auto', or set training.deterministic = false",
        )
        if self.training.sums == "exact":
            layout = self.parallelism
            split = layout.pipeline_parallel_degree > 1 and "ZeroBubble" in layout.pipeline_parallel_schedule
            rule = "training.sums = 'exact' rounds and reduces the gradient of each microbatch by itself:"
            sharded = layout.fsdp_gradient_accumulation == "sharded"
            require(sharded, f"{rule} set parallelism.fsdp_gradient_accumulation = 'sharded'")
            in_float32 = self.training.mixed_precision_reduce == "float32"
            require(in_float32, f"{rule} set training.mixed_precision_reduce = 'float32'")
            require(not split, f"{rule} take parallelism.pipeline_parallel_schedule = '1F1B', not a zero-bubble one")
            require(
                self.float8.recipe != "tensorwise" or not self.float8.enable_fsdp_float8_all_gather,
                "training.sums = 'exact' gives the same bits on any number of ranks, and weights that are gathered in "
                "float8 are rounded otherwise than on one: set float8.enable_fsdp_float8_all_gather = false",
            )
        require(
            not (self.debug.fingerprint_steps and self.compile.enable),
            "debug.fingerprint_steps needs compile.enable = false: what lies within a compiled block cannot be seen; "
            "compare runs that are not compiled, and then one of them with a compiled one by their curves",
        )
        for name in self.checkpoint.allow_changes:
            require(
                name in flat(asdict(self)),
                f"checkpoint.allow_changes names {name!r}, which is no option; options look like 'optimizer.lr'",
            )
