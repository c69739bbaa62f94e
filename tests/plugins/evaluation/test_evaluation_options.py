"""Options of evaluation that need others."""

import pytest

from torchtrain.config.parse import from_text
from torchtrain.config.schema import JobConfig
from torchtrain.datasets.options import DataConfig
from torchtrain.errors import ConfigError
from torchtrain.plugins.evaluation.options import EvaluationConfig


def test_prompts_without_validations_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"evaluation.prompts needs validations: set data.held_out, or"):
        JobConfig(plugins={"evaluation": EvaluationConfig(prompts=("a",))})
    JobConfig(plugins={"evaluation": EvaluationConfig(prompts=("a",))}, data=DataConfig(held_out=0.3))


def test_option_that_moved_to_the_section_of_the_plugin_is_named() -> None:
    with pytest.raises(ConfigError, match=r"validation.prompts is .*; did you mean 'evaluation.prompts'\?"):
        from_text("[validation]\nprompts = ['a']\n", "test.toml")
