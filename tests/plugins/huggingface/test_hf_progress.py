"""Progress of loading Hugging Face's files."""

from pathlib import Path

import pytest
import torch
from captured_log import captured_log
from safetensors.torch import save_file

from torchtrain import progress
from torchtrain.plugins.huggingface.safetensors_folder import Source, read_into


def test_loading_counts_the_bytes_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_SECONDS", -1)
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0)
    monkeypatch.setattr(progress, "terminal_width", lambda: None)
    expected = {name: torch.randn(500, 500) for name in ("a", "b")}
    save_file(expected, tmp_path / "model.safetensors")
    found = {name: torch.zeros(500, 500) for name in expected}
    with captured_log() as lines:
        read_into(found, {name: Source(tmp_path / "model.safetensors", name) for name in expected})
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert lines[-1].startswith("loading weights: 100% of 2.00MB")
