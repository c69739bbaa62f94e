"""``job.disable_plugins``: a run is as if these plugins were not installed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_command import run_command

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


def test_entries_of_a_plugin_that_was_imported_before_are_hidden() -> None:
    code = (
        "import torchtrain.plugins.muon; from torchtrain.config.parse import parse; "
        "from torchtrain.config.registry import OPTIMIZERS; parse(['--job.disable_plugins', 'muon']); "
        "assert 'muon' not in OPTIMIZERS"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
    options = ["--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder", str(tmp_path / "run")]
    options += ["--job.disable_plugins", "report", "--training.steps", "1", "--training.local_batch_size", "1"]
    options += ["--training.seq_len", "64", "--model.shape.n_layers", "1"]
    found = run_command("torchtrain.train", *options)
    assert found.returncode == 0, found.stderr
    assert "done: step 1 of 1" in found.stderr
    assert not (tmp_path / "run/report.md").exists()
