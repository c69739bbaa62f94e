"""Options of the model: [model] and [mup]."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torchtrain.config.registry import MODELS
from torchtrain.config.section import Count, Section


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
class MupConfig(Section, name="mup"):
    """muP and CompleteP. They transfer hyperparameters from a small model to a larger one with the same head_dim
    (docs/recipes.md)."""

    base_dim: Count | None = None
    """Dimension (dim) of the small model. Initial weights and learning rates are scaled by powers of dim / base_dim
    (muP). None: no muP."""
    base_layers: Count | None = None
    """Number of layers of the small model, if the depth differs, too: the output that each block adds to the residual
    stream is multiplied by base_layers / n_layers (CompleteP)."""
