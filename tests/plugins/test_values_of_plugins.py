"""Values of options of the core that plugins add."""

import pytest

from torchtrain.config.parse import parse
from torchtrain.errors import ConfigError
from torchtrain.metrics.options import MetricsConfig


def test_help_lists_the_values_of_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        parse(["--help", "training.sums"])
    assert "Values: fast, exact." in capsys.readouterr().out


def test_error_of_an_unknown_writer_lists_those_of_plugins() -> None:
    with pytest.raises(
        ConfigError, match=r"metrics.writers = 'absent' must be one of 'tensorboard', 'mlflow', 'trackio', 'wandb'"
    ):
        MetricsConfig(writers=("absent",))
