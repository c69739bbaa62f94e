"""Compiled runs in stages."""

from pathlib import Path

import pytest
from forked_run import CONFIG
from test_compile import graphs_with_validations


@pytest.mark.slow
def test_number_of_graphs_grows_by_the_same_with_each_stage(tmp_path: Path) -> None:
    config = tmp_path / "stages.toml"
    stage = '[[stages]]\nname = "{}"\nsteps = 2\n[stages.training]\nseq_len = {}\n'
    config.write_text(CONFIG.replace("steps = 8\n", "") + stage.format("short", 16) + stage.format("long", 32))
    few = graphs_with_validations(tmp_path / "few", "--training.steps=2")
    assert few > 0
    assert graphs_with_validations(tmp_path / "stages", "--job.config_file", str(config)) == 2 * few
