"""What a run says of itself before its first step."""

from dataclasses import asdict

import torch

from torchtrain.attention.backends import attention_backend_name
from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import Degrees
from torchtrain.distributed.process_group import world_size
from torchtrain.log import logger
from torchtrain.models.llama import Transformer, TransformerConfig


def describe(config: JobConfig, model: TransformerConfig, device: torch.device, degrees: Degrees) -> None:
    """Log what is about to be trained, and on what. ``config``: with the global batch size as a number."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Transformer(model).parameters())
    axes = [f"{axis} {degree}" for axis, degree in asdict(degrees).items() if degree > 1]
    ranks = f"{world_size()} rank(s) on {device.type}" + (f" ({' x '.join(axes)})" if axes else "")
    rows, dtype = config.training.global_batch_size, config.training.mixed_precision_param
    logger.info(f"{parameters:,} parameters, vocabulary {model.vocab_size}; {ranks}; {rows} sequences a step")
    numbers = dtype if config.float8.recipe == "none" else f"{dtype} and float8 ({config.float8.recipe})"
    compiled = "compiled" if config.compile.enable else "not compiled"
    attention = attention_backend_name(
        config.training.attention_backend,
        model,
        getattr(torch, dtype),
        device,
        documents=config.data.document_mask,
        split=degrees.context > 1,
    )
    logger.info(f"{numbers}, {compiled}; attention: {attention}")
