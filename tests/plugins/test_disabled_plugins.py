"""``job.disable_plugins``: a run is as if these plugins were not installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_run import finish

from torchtrain.config.parse import parse
from torchtrain.config.registry import CONFIG_SECTIONS, HOOKS, OPTIMIZERS, disable_plugins
from torchtrain.errors import ConfigError


@pytest.fixture(autouse=True)
def enabled_again() -> Iterator[None]:
    yield
    disable_plugins(())


def test_entries_of_a_disabled_plugin_are_hidden_until_the_next_config() -> None:
    assert "report" in HOOKS
    parse(["--job.disable_plugins", "report", "muon", "--training.steps", "1"])
    assert "report" not in [*HOOKS]
    assert "report" not in CONFIG_SECTIONS
    with pytest.raises(ConfigError, match=r"muon' needs the plugin muon, which job.disable_plugins turns off"):
        OPTIMIZERS["muon"]
    parse([])
    assert "report" in [*HOOKS]
    assert "muon" in OPTIMIZERS


def test_options_of_a_disabled_plugin_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"report.enable needs the plugin report, which job.disable_plugins turns"):
        parse(["--job.disable-plugins", "report", "--report.enable"])
    file = tmp_path / "config.toml"
    file.write_text('[job]\ndisable_plugins = ["report"]\n[report]\nenable = true\n')
    with pytest.raises(ConfigError, match=r"report is not a known section: it is of the plugin report, which job"):
        parse(["--job.config_file", str(file)])


def test_unknown_plugins_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"'reports' is not a plugin; there are comparison, diagnostics, "):
        parse(["--job.disable_plugins", "reports"])


def test_run_without_the_report_writes_none(tmp_path: Path) -> None:
    log = finish(tmp_path / "run", "--job.disable_plugins", "report", "--training.steps", "2", ranks=1)
    assert "done: step 2" in log
    assert not (tmp_path / "run/report.md").exists()
