"""The configs in train_configs, and options of plugins that are local paths."""

import dataclasses
from pathlib import Path

import pytest
from test_config import CONFIGS

from torchtrain.config.parse import from_file, parse
from torchtrain.errors import ConfigError


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_shipped_configs_are_valid(file: Path) -> None:
    assert dataclasses.is_dataclass(from_file(str(file)))


def test_shipped_configs_include_all_llama_sizes() -> None:
    names = {file.stem for file in CONFIGS}
    assert names >= {"debug_model", "continue_hf"} | {f"llama2_{size}" for size in ("7b", "13b", "70b")}
    assert names >= {f"llama3_{size}" for size in ("1b", "3b", "8b", "70b", "405b")}


URLS = ["s3://bucket/run", "gs://a/b.parquet", "hdfs://n:9000/x", "file:///tmp/x", "https://a.org/b", "HF://datasets/x"]


@pytest.mark.parametrize("url", URLS)
def test_url_is_rejected_for_every_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.chdir(tmp_path)
    for option in ("estimate.output", "estimate.picture", "evaluation.tasks_path"):
        with pytest.raises(ConfigError, match=rf"^{option} = '{url}' must be a local path; URLs are not supported"):
            parse([f"--{option}", url])
    assert not list(tmp_path.iterdir())
