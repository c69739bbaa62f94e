"""What ``[evaluation]`` lets a validation compute beside the loss: samples, and scores of tasks."""

import importlib.util

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import ConfigError
from torchtrain.metrics.validation import ValidationContext, ValidationPart, ValidationPartFactory
from torchtrain.optional_packages import install_command
from torchtrain.plugins.evaluation.options import EvaluationConfig
from torchtrain.plugins.evaluation.samples import Samples, encode_prompts


class SamplesFactory(ValidationPartFactory):
    """Texts that the model generates for ``evaluation.prompts``."""

    @staticmethod
    def check(config: JobConfig, tokenizer: Tokenizer) -> None:
        encode_prompts(config, tokenizer)

    @staticmethod
    def build(context: ValidationContext) -> ValidationPart | None:
        if not section_of(context.config, EvaluationConfig).prompts:
            return None
        return Samples(context.config, context.tokenizer, context.model)


class TasksFactory(ValidationPartFactory):
    """Scores of ``evaluation.tasks``, of lm-evaluation-harness."""

    @staticmethod
    def check(config: JobConfig, tokenizer: Tokenizer) -> None:  # noqa: ARG004
        if section_of(config, EvaluationConfig).tasks and importlib.util.find_spec("lm_eval") is None:
            raise ConfigError(f"evaluation.tasks need lm-evaluation-harness: {install_command('eval')}")

    @staticmethod
    def check_data(config: JobConfig) -> None:
        if section_of(config, EvaluationConfig).tasks:
            from torchtrain.plugins.evaluation.tasks import load_tasks  # imports lm-evaluation-harness

            load_tasks(section_of(config, EvaluationConfig))

    @staticmethod
    def build(context: ValidationContext) -> ValidationPart | None:
        if not section_of(context.config, EvaluationConfig).tasks:
            return None
        from torchtrain.plugins.evaluation.tasks import Tasks  # imports lm-evaluation-harness

        return Tasks(context.config, context.tokenizer, context.model, context.group)
