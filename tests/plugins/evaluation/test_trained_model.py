"""Loading the model of a run."""

from pathlib import Path

import pytest
from forked_command import run_command

from torchtrain.plugins.evaluation import trained_model
from torchtrain.plugins.evaluation.trained_model import load_model


@pytest.mark.usefixtures("process_group")
def test_loading_a_model_in_bfloat16_replaces_kernels(
    trained_run: Path, replacements: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained_model, "init_process_group", lambda *_: None)
    load_model(trained_run)
    assert not replacements
    load_model(trained_run, dtype="bfloat16")
    assert replacements


def test_checkpoint_folder_that_is_a_dangling_link_is_named(tmp_path: Path) -> None:
    for run, link in ((tmp_path / "run", tmp_path / "run/checkpoint"), (tmp_path / "away", tmp_path / "away")):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to("/mnt/scratch/not mounted")
        found = run_command("torchtrain.generate", str(run), "--prompt", "a")
        assert found.returncode == 2
        assert f"{link} is a link to '/mnt/scratch/not mounted', which does not exist" in found.stderr
