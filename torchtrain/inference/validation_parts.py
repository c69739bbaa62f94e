"""What a validation computes with the model under training beside the loss: samples, and scores of tasks."""

import importlib.util

import torch.distributed as dist

from torchtrain.config.schema import JobConfig
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import ConfigError
from torchtrain.inference.samples import Samples, encode_prompts
from torchtrain.metrics.validation import ValidationPart
from torchtrain.parallelisms.parallel_model import ParallelModel


def check_validation_parts(config: JobConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if a prompt cannot be continued, or lm-evaluation-harness is missing for tasks."""
    encode_prompts(config, tokenizer)
    if config.validation.tasks and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("validation.tasks need lm-evaluation-harness: pip install 'torchtrain[eval]'")


def build_validation_parts(
    config: JobConfig, tokenizer: Tokenizer, model: ParallelModel, group: dist.ProcessGroup
) -> list[ValidationPart]:
    """The parts that ``[validation]`` enables. Collective over ``group``; raises the errors of ``Tasks``."""
    parts: list[ValidationPart] = []
    if config.validation.prompts:
        parts.append(Samples(config, tokenizer, model))
    if config.validation.tasks:
        from torchtrain.inference.tasks import Tasks  # imports lm-evaluation-harness

        parts.append(Tasks(config, tokenizer, model, group))
    return parts
