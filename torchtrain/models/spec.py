"""Model specs: what the rest of torchtrain needs to know about a model, one ``ModelSpec`` per ``model.name``.

``torchtrain.config.registry.MODELS`` has the specs by name. docs/adding-a-model.md adds one from a module of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from torchtrain.config.registry import MODELS
from torchtrain.errors import ConfigError


class DecoderConfig(Protocol):
    """The fields that the config of a model must have; it is a frozen dataclass, and may have more."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def dim(self) -> int:
        """Width of the residual stream."""

    @property
    def n_layers(self) -> int:
        """Number of blocks."""

    @property
    def n_heads(self) -> int:
        """Number of query heads."""

    @property
    def n_kv_heads(self) -> int:
        """Number of key/value heads."""

    @property
    def head_size(self) -> int:
        """Width of a head."""

    @property
    def ffn_dim(self) -> int:
        """Inner width of the feed-forward network."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding and of the output layer."""

    @property
    def max_seq_len(self) -> int:
        """Number of positions that the model can compute."""

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output layer uses the embedding's parameter."""

    @property
    def family(self) -> str:
        """The model's name in ``MODELS``; ``build_model_config`` sets it."""


class Decoder(nn.Module):
    """Interface of a model: attributes and methods that it must have. It need not inherit from this class.

    A pipeline stage is the same model with the children of other stages set to None, or removed from ``layers``.
    """

    config: Any  # a DecoderConfig
    tok_embeddings: nn.Module | None
    layers: nn.ModuleDict  # blocks by number, "0", "1", ...
    norm: nn.Module | None  # the final norm; forward calls it before the output layer, which FSDP gathers with it
    output: nn.Module | None  # a linear layer without bias, from dim to vocab_size

    def init_weights(self) -> None:
        """Initialize all parameters by functions of ``torch.nn.init``, and all buffers."""
        raise NotImplementedError

    def init_buffers(self) -> None:
        """Compute all buffers; on the meta device it does nothing. Checkpoints do not contain buffers."""
        raise NotImplementedError

    def tie_weights(self) -> None:
        """Share the embedding's parameter with the output layer if ``config.tied_embeddings`` and both exist."""
        raise NotImplementedError

    def replace_inner_attention(self, make: Callable[[nn.Module], nn.Module]) -> None:
        """Replace the inner attention of each block, a module like ``CausalAttention``, by ``make(inner_attention)``.

        Context parallelism and the key/value cache of generation are such replacements.
        """
        raise NotImplementedError

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Any = None,
        head: Callable[[Tensor, nn.Module], Tensor] | None = None,
    ) -> Tensor:
        """Compute logits; arguments and results are those of ``Transformer.forward`` (models/llama/model.py)."""
        raise NotImplementedError


@dataclass(frozen=True)
class HFFormat:
    """Conversion of a model to and from Hugging Face's format (``transformers``)."""

    model_type: str
    """``model_type`` in ``config.json``."""
    parameter_name: Callable[[str], str]
    """Hugging Face's name of a parameter, such as ``layers.3.attention.wq.weight``."""
    to_config: Callable[[Any, str, int | None, int | None], dict[str, Any]]
    """Content of ``config.json`` for a model config, a dtype, and the ids of bos and eos. ValueError: there is none."""
    from_config: Callable[[Mapping[str, Any]], Any]
    """Model config for the content of a ``config.json``. KeyError: a key is missing. ValueError: not supported."""
    reads: bool = True
    """Whether a ``config.json`` with this ``model_type`` is read as this model; False if it is another model's."""
    stored: Callable[[str], Literal["whole", "slices", "not"]] = lambda name: "whole"  # noqa: ARG005
    """How files have a parameter. "slices": each ``weight[i]`` is a tensor, such as the matrix of an expert;
    ``parameter_name`` gets the name with ".i" at its end. "not": it is a state of training."""


@dataclass(frozen=True, repr=False)
class ModelSpec:
    """Describes a model to the trainer, the parallelisms, checkpoints, the planner and the other commands."""

    config_class: type[Any]
    """Frozen dataclass with the fields of ``DecoderConfig``. It raises ValueError for invalid values."""
    model_class: Callable[[Any], nn.Module]
    """Maps a config to a model with the interface ``Decoder``."""
    flavors: Mapping[str, Any]
    """Configs by ``model.flavor``."""
    linear_layers: Mapping[str, Literal["colwise", "rowwise"]]
    """The linear layers of a block in forward order, by their names in it. They are in child modules of the block, such
    as "feed_forward.w1": tensor parallelism gathers the input of each such child once. It shards the output features of
    "colwise" layers and the input features of "rowwise" ones, which write to the residual stream. Selective activation
    checkpointing, FLOPs per token and muP use the list, too."""
    first_stage: tuple[str, ...] = ("tok_embeddings",)
    """Children of the model that only the first pipeline stage has (and the last one, of tied embeddings)."""
    last_stage: tuple[str, ...] = ("norm", "output")
    """Children of the model that only the last pipeline stage has."""
    hf: HFFormat | None = None
    """Hugging Face's format; None: the model cannot be imported from or exported to it. Of the families of this
    repository, the plugin knows it."""
    check: Callable[[Any], object] | None = None
    """Raises ValueError for a config that must not be trained."""
    flops: Callable[[Any, int], int] | None = None
    """``flops_per_token`` of a model that the default formula is wrong for."""
    parallelize: Callable[..., None] | None = None
    """Parallelizes a model or a pipeline stage of it on the meta device; None: ``parallelize_llama``, which
    needs ``linear_layers`` and norms that are ``nn.RMSNorm``."""
    finish_step: Callable[..., None] | None = None
    """Called on all ranks as ``finish_step(model_parts, mesh, skip)`` after the update of a step, for state that
    follows from its forwards, such as the loads of experts. ``skip``: a scalar, not 0 if the update was skipped, so
    that the state must not change either; None: the step is computed again, and this attempt must not count."""

    def __post_init__(self) -> None:
        for name in self.linear_layers:
            if "." not in name:
                raise ConfigError(
                    f"{self!r}: linear_layers names {name!r}, a child of the block itself; put it into a child module, "
                    f"such as 'mlp.{name}': tensor parallelism gathers the input of that module"
                )

    def __repr__(self) -> str:
        return f"ModelSpec of {self.model_class.__module__}.{getattr(self.model_class, '__qualname__', '')}"


def spec_of(config: DecoderConfig) -> ModelSpec:
    """The spec of the model that ``config`` describes."""
    spec: ModelSpec = MODELS[config.family]
    return spec


def build_model(config: DecoderConfig) -> Decoder:
    """Build the model that ``config`` describes, with initialized weights (on the meta device: without values)."""
    model: Any = spec_of(config).model_class(config)
    return model  # type: ignore[no-any-return]


def count_parameters(config: DecoderConfig) -> int:
    """Number of parameters of the model that ``config`` describes, a shared one once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(config).parameters())


def matrix_shapes(config: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the weights of all linear layers by full name: those of the blocks, and ``output.weight``."""
    key: Any = config
    return _matrix_shapes(config.family, key)


@cache
def _matrix_shapes(family: str, config: Any) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG001
    # By family, too: configs of two families may be equal.
    with torch.device("meta"):
        model = build_model(config)
    names = [f"layers.{i}.{name}.weight" for i in model.layers for name in spec_of(config).linear_layers]
    return {name: tuple(model.get_parameter(name).shape) for name in [*names, "output.weight"]}


def flops_per_token(config: DecoderConfig, seq_len: int) -> int:
    """Floating-point operations of forward and backward per token, without recomputation.

    6 per parameter of a linear layer (the embedding lookup does not count) plus 12 * layers * heads * head_dim *
    seq_len for attention, not halved for causality, as in PaLM (https://arxiv.org/abs/2204.02311, appendix B).
    """
    spec = spec_of(config)
    if spec.flops is not None:
        return spec.flops(config, seq_len)
    matrices = sum(rows * columns for rows, columns in matrix_shapes(config).values())
    return 6 * matrices + 12 * config.n_layers * config.n_heads * config.head_size * seq_len


def mup_ratios(config: DecoderConfig) -> tuple[float, float]:
    """Ratios of dim and n_layers to those of the base model (muP); 1.0 for a config class without a base model."""
    ratios: tuple[float, float] = getattr(config, "mup_ratios", (1.0, 1.0))
    return ratios
