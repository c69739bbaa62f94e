"""What ``[validation]`` lets a validation compute beside the loss: samples, and scores of tasks."""

import importlib.util

from torchtrain.config.schema import JobConfig
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import ConfigError
from torchtrain.metrics.validation import ValidationContext, ValidationPart
from torchtrain.plugins.evaluation.samples import Samples, encode_prompts


class SamplesFactory:
    """Texts that the model generates for ``validation.prompts``."""

    @staticmethod
    def check(config: JobConfig, tokenizer: Tokenizer) -> None:
        encode_prompts(config, tokenizer)

    @staticmethod
    def check_data(config: JobConfig) -> None:
        pass  # prompts are options

    @staticmethod
    def build(context: ValidationContext) -> ValidationPart | None:
        config = context.config
        return Samples(config, context.tokenizer, context.model) if config.validation.prompts else None


class TasksFactory:
    """Scores of ``validation.tasks``, of lm-evaluation-harness."""

    @staticmethod
    def check(config: JobConfig, tokenizer: Tokenizer) -> None:  # noqa: ARG004
        if config.validation.tasks and importlib.util.find_spec("lm_eval") is None:
            raise ConfigError("validation.tasks need lm-evaluation-harness: pip install 'torchtrain[eval]'")

    @staticmethod
    def check_data(config: JobConfig) -> None:
        if config.validation.tasks:
            from torchtrain.plugins.evaluation.tasks import load_tasks  # imports lm-evaluation-harness

            load_tasks(config.validation)

    @staticmethod
    def build(context: ValidationContext) -> ValidationPart | None:
        if not context.config.validation.tasks:
            return None
        from torchtrain.plugins.evaluation.tasks import Tasks  # imports lm-evaluation-harness

        return Tasks(context.config, context.tokenizer, context.model, context.group)
