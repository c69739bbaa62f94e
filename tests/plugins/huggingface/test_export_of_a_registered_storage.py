"""The export of a run whose checkpoints are in a storage of the user's."""

from functools import partial
from pathlib import Path

import pytest
from forked_run import finish
from test_adding_a_checkpoint_storage import options_of_the_page, register_module_of_the_page, use_module_of


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return register_module_of_the_page(tmp_path, monkeypatch)


def test_export_of_a_run_in_the_database_is_in_the_dump_folder(module: Path, tmp_path: Path) -> None:
    """And the next start finds it complete."""
    folder = tmp_path / "run"
    options = (*options_of_the_page(tmp_path), "--huggingface.export", "--training.steps", "2")
    output = finish(folder, *options, ranks=1, hook=partial(use_module_of, module))
    assert f"wrote {folder}/hf" in output
    assert (folder / "hf/config.json").is_file()
    assert "the run is complete: step 2 of 2" in finish(folder, *options, ranks=1, hook=partial(use_module_of, module))
    (folder / "hf/config.json").unlink()
    assert f"wrote {folder}/hf" in finish(folder, *options, ranks=1, hook=partial(use_module_of, module))
