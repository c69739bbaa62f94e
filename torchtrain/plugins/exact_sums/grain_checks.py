"""Check that a model, a layout and a device support grains."""

import torch
from torch import nn

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.errors import ConfigError
from torchtrain.models.spec import DecoderConfig, build_model, spec_of
from torchtrain.parallelisms.resolve import nearest_multiples

SIMD_ELEMENTS = 64
"""Two vectors of a CPU with AVX-512 in bfloat16: kernels compute the elements after the last such group differently."""


def check_grains(
    tensor: int, context: int, config: JobConfig, device: torch.device, degrees: ParallelDims, model: DecoderConfig
) -> None:
    """Raise ConfigError if the model, the layout or the device does not support these numbers of grains.

    Args:
        tensor, context: the options of [grains].
        config: the config, which ``resolve_layout`` has resolved.
    """
    seq_len = config.training.seq_len
    off = "or set grains.tensor = 1 and grains.context = 1"
    _check_degrees(tensor, context, degrees)
    for name in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size"):
        size = getattr(model, name)
        if size % tensor:
            raise ConfigError(
                f"grains.tensor = {tensor} must divide the model's {name} = {size}: each grain has as much of it; try "
                f"{size & -size}, or another {name}, such as {nearest_multiples(size, tensor)}"
            )
    if seq_len % (tensor * context):
        raise ConfigError(
            f"training.seq_len = {seq_len} must be a multiple of grains.tensor = {tensor} times grains.context = "
            f"{context}; try {nearest_multiples(seq_len, tensor * context)}"
        )
    at_once = seq_len // context * (model.ffn_dim // tensor)
    if device.type == "cpu" and at_once % SIMD_ELEMENTS:
        raise ConfigError(
            f"training.seq_len / grains.context * ffn_dim / grains.tensor = {at_once} must be a multiple of "
            f"{SIMD_ELEMENTS} on CPUs, whose kernels round the last elements of a tensor differently; take fewer "
            f"grains, {off}"
        )
    if context > 1 and config.data.document_mask and device.type == "cuda":
        raise ConfigError(
            f"grains.context = {context} does not support data.document_mask = true on GPUs, whose kernel computes all "
            "queries at once; set grains.context = 1, or document_mask = false"
        )
    if degrees.pipeline > 1 and model.tied_embeddings:
        raise ConfigError(
            "[grains] does not support tied embeddings on a pipeline, which rounds the gradients of the embedding and "
            "of the output layer separately; set parallelism.pipeline_parallel_degree = 1, or take a model without "
            f"tied embeddings, {off}"
        )
    _check_modules(model, off)


def _check_degrees(tensor: int, context: int, degrees: ParallelDims) -> None:
    if tensor % degrees.tensor:
        raise ConfigError(
            f"grains.tensor = {tensor} must be a multiple of parallelism.tensor_parallel_degree = "
            f"{degrees.tensor}: each rank computes as many grains; try {1 << (degrees.tensor - 1).bit_length()}, or "
            "another degree"
        )
    least = 2 * degrees.context if degrees.context > 1 else 1
    if context % least:
        raise ConfigError(
            f"grains.context = {context} must be a multiple of 2 * parallelism.context_parallel_degree = "
            f"{least}: each rank takes chunks from both ends of a sequence; try {1 << (least - 1).bit_length()}, or "
            "another degree"
        )


def _check_modules(config: DecoderConfig, off: str) -> None:
    """Check that the model consists of modules whose gradients are added in trees."""
    spec = spec_of(config)
    name = f"model.name = {config.family!r}"
    if spec.parallelize is not None:
        raise ConfigError(
            f"{name} has a ModelSpec.parallelize of its own, and [grains] replaces that of parallelize_llama: leave it "
            f"out, {off}"
        )
    with torch.device("meta"):
        model = build_model(config)
    linear = {f"layers.{i}.{layer}": style for i in model.layers for layer, style in spec.linear_layers.items()}
    for path, module in model.named_modules():
        if not list(module.parameters(recurse=False)):
            continue
        kind: type[nn.Module] = nn.RMSNorm
        if path in linear or path == "output":
            kind = nn.Linear
        elif path == "tok_embeddings":
            kind = nn.Embedding
        if type(module) is not kind:
            raise ConfigError(
                f"{name}: {path} is a {type(module).__name__}, and [grains] needs {kind.__name__} there: of other "
                f"modules it does not know how their gradients are added; take that, {off}"
            )
        if linear.get(path) == "rowwise" and module.bias is not None:
            raise ConfigError(f"{name}: {path} has a bias, which each grain would add; take a layer without one, {off}")
