"""Sections of other plugins in a run in stages."""

import pytest
from test_core import DataConfig

from torchtrain.config.parse import from_text
from torchtrain.config.registry import CONFIG_SECTIONS
from torchtrain.config.schema import section_of
from torchtrain.errors import ConfigError
from torchtrain.plugins.stages.configs import stage_configs

STAGES = """
[example]
size = 5
[[stages]]
name = "first"
steps = 2
[[stages]]
name = "second"
steps = 2
"""


def test_section_of_a_plugin_is_that_of_all_stages() -> None:
    CONFIG_SECTIONS.add("example", DataConfig)
    configs = stage_configs(from_text(STAGES, "test.toml"))
    assert [section_of(config, DataConfig).size for config in configs] == [5, 5]
    with pytest.raises(ConfigError, match=r"example.size must not differ between stages: it is an option of the whole"):
        stage_configs(from_text(f"{STAGES}[stages.example]\nsize = 6\n", "test.toml"))
