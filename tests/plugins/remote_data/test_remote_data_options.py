"""Options of data that the plugin reads."""

from pathlib import Path
from typing import Any

import pytest
from test_datasets_failures import check_folder_that_a_rank_cannot_write
from test_prepare import run as prepare
from test_prepare import text_folder
from test_resume_compatibility import toml

from torchtrain.checkpoint.resume_compatibility import check_resume_compatibility
from torchtrain.config.parse import parse, to_toml
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.errors import ConfigError
from torchtrain.metrics.options import ValidationConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "hub"}, "data.type = 'hub' needs data.name"),
        ({"type": "remote_files", "path": "a.txt"}, "'remote_files' is for URLs, and data.path = 'a.txt' is none"),
        ({"type": "hub", "name": "a", "sources": (SourceConfig(path="b"),)}, "a path, name or type .* exclude"),
    ],
)
def test_wrong_types_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(**options)


def test_cache_that_is_too_small_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"remote_data.cache_gib = 0.5 must be at least 1"):
        parse(["--remote_data.cache_gib", "0.5"])


def test_tables_of_sources_are_parsed(tmp_path: Path) -> None:
    file = tmp_path / "mix.toml"
    file.write_text('[[data.sources]]\npath = "a.jsonl"\nweight = 3\n[[data.sources]]\nname = "org/b"\n')
    config = parse(["--job.config_file", str(file)])
    assert [(source.path, source.name, source.weight) for source in config.data.all] == [
        ("a.jsonl", "", 3.0),
        ("", "org/b", 1.0),
    ]
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    assert parse(["--job.config_file", str(tmp_path / "resolved.toml")]).data == config.data


def test_same_data_under_another_name_are_a_harmless_change() -> None:
    same = {"data.name": "1 file"}
    (line,) = check_resume_compatibility(toml(data={"name": "a"}), toml(data={"name": "b"}), (), same, same)
    assert "(harmless): data.name" in line


def test_labels_of_subsets_are_distinct() -> None:
    sources = [SourceConfig(name="org/web", subset=subset) for subset in ("deu", "fra")]
    sources += [SourceConfig(path=f"held/wiki.{language}.jsonl.gz") for language in ("en", "de")]
    labels = [source.title for source in ValidationConfig(enable=True, sources=tuple(sources)).all]
    assert labels == ["web_deu", "web_fra", "wiki.en", "wiki.de"]


def test_a_rank_that_cannot_write_the_cache_ends_all_ranks_with_one_message(tmp_path: Path) -> None:
    url = (tmp_path / "0/text.jsonl").as_uri()
    check_folder_that_a_rank_cannot_write(tmp_path, "remote_data.cache_folder", url)


def test_output_inside_the_data_is_rejected(tmp_path: Path) -> None:
    texts = text_folder(tmp_path / "texts")
    for path, output in (
        (tmp_path.as_uri(), f"{tmp_path}/out"),
        (texts, (tmp_path / "texts/out").as_uri()),
        ("memory://x/", "memory://x/out"),
    ):
        assert "is inside the data folder" in prepare("--data.path", path, "--prepare.output", output)
