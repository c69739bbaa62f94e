"""Files that torchtrain.compare reads, and fingerprints of a run."""

from pathlib import Path

import torch

from torchtrain.plugins.comparison.fingerprints import FILE, StepFingerprints
from torchtrain.plugins.comparison.runs import open_run


def test_fingerprints_are_not_written_through_a_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of another user")
    (tmp_path / f"{FILE}.partial").symlink_to(secret)
    StepFingerprints({}, torch.zeros(1, 2, 3, dtype=torch.int32).numpy()).save(tmp_path)
    assert secret.read_text() == "of another user"
    assert (tmp_path / FILE).is_file()


def test_config_with_a_section_of_a_plugin_that_is_not_installed_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[unknown]\nx = 1\n[checkpoint]\nfolder = "mine"\n')
    assert open_run(tmp_path).config.checkpoint.folder == "mine"


def test_nested_or_foreign_lines_of_metrics_are_not_compared(tmp_path: Path) -> None:
    bad = [b'{"step": 3, "loss": ' + b"[" * 200_000, b'["loss"]', b'{"step": "4", "loss": 1.0}', b'\xff"loss"']
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in (b'{"step": 2, "loss": 2.0}', *bad)))
    (tmp_path / "config.toml").write_text("")
    assert set(open_run(tmp_path).lines) == {2}
