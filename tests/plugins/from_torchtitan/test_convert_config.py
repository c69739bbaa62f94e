"""``torchtrain.convert_config``: configs of torchtitan become valid configs of torchtrain."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from forked_command import run_command
from test_from_torchtitan import DEBUG_FILE

from torchtrain.config.parse import from_file, from_text
from torchtrain.config.registry import CONFIG_SECTIONS
from torchtrain.config.schema import JobConfig, section_of
from torchtrain.errors import ConfigError
from torchtrain.plugins.from_torchtitan.conversion import convert_config

# As people write them: comments above, beside and below keys, and keys of old versions.
THEIRS = """
# For one machine.

[model]
flavor = "8B"
tokenizer_path = "tokenizer.model"  # Meta's
norm_type = "rmsnorm"
# models end here

[optimizer]
# a comment of the rate
lr = 3e-4
name = "AdamW"

[training]
batch_size = 2
warmup_steps = 20  # of 1000
compile = true
dataset = "c4"
fp8_linear = ""
something_new = 1

[experimental]
pipeline_parallel_schedule = "1f1b"
pipeline_parallel_split_points = ["layers.4"]
"""
OURS = """\
# theirs.toml of torchtitan, converted by torchtrain.convert_config
# For one machine.

[model]
flavor = "8B"
tokenizer_path = "tokenizer.model"  # Meta's
# norm_type = "rmsnorm"  # always RMSNorm
# models end here

[optimizer]
# a comment of the rate
lr = 3e-4
name = "adamw"

[training]
local_batch_size = 2
# something_new = 1  # it has no counterpart in torchtrain

[lr_scheduler]
warmup_steps = 20  # of 1000
decay_type = "linear"  # torchtitan's default

[compile]
enable = true

[data]
name = "allenai/c4"
subset = "en"

[float8]
recipe = "none"

[parallelism]
pipeline_parallel_schedule = "1F1B"

[job]
# experimental.pipeline_parallel_split_points = ["layers.4"]  # set parallelism.pipeline_parallel_layers_per_stage by \
hand, a list: the number of layers of each stage

[activation_checkpoint]
mode = "selective"  # torchtitan's default
selective_option = "2"  # torchtitan's default

[checkpoint]
enable = false  # torchtitan's default

[metrics]
enable_tensorboard = false  # torchtitan's default

# To set: model.tokenizer_path: tokenizer.model does not exist here; name the tokenizer of the model
# To set: data: c4 is allenai/c4 on the Hugging Face Hub; for files, set data.path
"""


def converted(text: str) -> JobConfig:
    return from_text(convert_config(text, "theirs.toml")[0], "ours.toml")


def test_comments_values_and_defaults_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, to_set = convert_config(THEIRS, "theirs.toml")
    assert text == OURS
    assert [line.partition(":")[0] for line in to_set] == ["model.tokenizer_path", "data"]
    from_text(text, "ours.toml")
    (tmp_path / "tokenizer.model").touch()
    assert len(convert_config(THEIRS, "theirs.toml")[1]) == 1


def test_file_of_the_newest_version_is_valid_and_has_its_values() -> None:
    config = converted(tomli_w.dumps(DEBUG_FILE))
    assert (config.optimizer.name, config.optimizer.lr, config.training.steps) == ("adamw", 8e-4, 10)
    assert (config.lr_scheduler.decay_ratio, config.lr_scheduler.decay_type) == (0.8, "linear")
    assert config.model.tokenizer_path == "./tests/assets/tokenizer"
    assert (config.activation_checkpoint.mode, config.activation_checkpoint.selective_option) == ("selective", "2")
    assert not config.checkpoint.enable
    assert (config.validation.name, config.validation.split, config.validation.interval) == (
        "allenai/c4",
        "validation",
        5,
    )


@pytest.mark.parametrize(
    ("theirs", "section", "expected"),
    [
        ("[float8]\nenable_float8_linear = true", "float8", {"recipe": "tensorwise"}),
        ("[training]\nfp8_linear = 'dynamic'", "float8", {"recipe": "tensorwise"}),
        ("[model]\nconverters = ['float8']\n[float8]\nrecipe_name = 'rowwise'", "float8", {"recipe": "rowwise"}),
        (
            "[model]\nconverters = ['float8']",
            "float8",
            {"recipe": "tensorwise", "enable_fsdp_float8_all_gather": False},
        ),
        ("[optimizer]\nfused = true", "optimizer", {"implementation": "fused"}),
        ("[optimizer]\nfused = false", "optimizer", {"implementation": "foreach"}),
        (
            "[training]\nlocal_batch_size = 8\n[parallelism]\npipeline_parallel_microbatch_size = 2",
            "parallelism",
            {"pipeline_parallel_microbatches": 4},
        ),
        (
            "[parallelism]\npipeline_parallel_microbatch_size = 2\n[training]\nlocal_batch_size = 16",
            "parallelism",
            {"pipeline_parallel_microbatches": 8},
        ),
        ("[model]\nconverters = []\n[float8]\nrecipe_name = 'rowwise'", "float8", {"recipe": "none"}),
        ("[quantize.linear.float8]\nrecipe_name = 'rowwise'", "float8", {"recipe": "none"}),
        ("model = {name = 'llama3', flavor = '8B'}", "model", {"flavor": "8B"}),
        ("[training]\ndataset = 'c4'\ndataset_path = 'texts'", "data", {"path": "texts", "name": ""}),
        ("[checkpoint]\nenable_checkpoint = true", "checkpoint", {"enable": True, "keep_latest_k": 10}),
        ("[training]\ndata_parallel_degree = 4", "parallelism", {"data_parallel_shard_degree": 4}),
    ],
)
def test_values_are_converted(theirs: str, section: str, expected: dict[str, Any]) -> None:
    config = converted(theirs)
    of_plugin = section in CONFIG_SECTIONS
    options = section_of(config, CONFIG_SECTIONS[section]) if of_plugin else getattr(config, section)
    assert {key: getattr(options, key) for key in expected} == expected


def test_command_prints_the_config_and_names_what_is_left(tmp_path: Path) -> None:
    file = tmp_path / "theirs.toml"
    file.write_text(THEIRS)
    found = run_command("torchtrain.convert_config", str(file))
    assert found.returncode == 0, found.stderr
    (tmp_path / "ours.toml").write_text(found.stdout)
    assert from_file(str(tmp_path / "ours.toml")).training.local_batch_size == 2
    assert "to set: model.tokenizer_path: tokenizer.model does not exist here" in found.stderr
    file.write_text("[optimizer]\nname = 'Adam'\n")
    found = run_command("torchtrain.convert_config", str(file))
    assert found.returncode == 2
    assert "name = 'Adam'" in found.stdout
    assert "error: the converted config: optimizer.name = 'Adam' must be one of 'adamw', 'muon'" in found.stderr


@pytest.mark.parametrize(
    ("theirs", "left"),
    [
        ("[parallelism]\npipeline_parallel_microbatch_size = 'a'", "pipeline_parallel_microbatch_size = 'a'"),
        ("[training]\nbatch_size = '8'\n[parallelism]\npipeline_parallel_microbatch_size = 2", "_size = 2"),
        ("[model]\nconverters = true", "converters = true"),
        ("[model]\nconverters = ['mx']", "converters = ['mx']"),
        ("[[validation.sources]]\npath = 'x'", "sources = path = 'x'"),
    ],
)
def test_value_that_cannot_be_converted_is_left_as_a_comment(theirs: str, left: str) -> None:
    lines = convert_config(theirs, "theirs.toml")[0].splitlines()
    assert [line for line in lines if line.startswith("# ") and left in line]


def test_comments_of_a_value_that_another_key_replaces_are_kept() -> None:
    theirs = "[model]\n# why\nconverters = ['float8']  # here\n[float8]\nrecipe_name = 'rowwise'  # there\n"
    text = convert_config(theirs, "theirs.toml")[0]
    assert "[float8]\n# why\n# here\nrecipe = 'rowwise'  # there\n" in text


@pytest.mark.parametrize("theirs", ["[model\n", "[model]\nname = 'a'\nname = 'b'\n", f"a = {'[' * 200}{']' * 200}\n"])
def test_command_rejects_what_is_not_toml(tmp_path: Path, theirs: str) -> None:
    file = tmp_path / "theirs.toml"
    file.write_text(theirs)
    found = run_command("torchtrain.convert_config", str(file))
    assert found.returncode == 2
    assert "theirs.toml is not valid TOML: " in found.stderr
    assert found.stdout == ""


def test_wrong_type_is_an_error_after_the_converted_file(tmp_path: Path) -> None:
    file = tmp_path / "theirs.toml"
    file.write_text("[model]\ntokenizer_path = 5\n")
    found = run_command("torchtrain.convert_config", str(file))
    assert found.returncode == 2
    assert "error: the converted config: model.tokenizer_path = 5 must be a string" in found.stderr


def test_file_that_is_not_toml_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"theirs\.toml is not valid TOML: "):
        convert_config("[model\n", "theirs.toml")
