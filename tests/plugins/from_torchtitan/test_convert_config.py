"""``torchtrain.convert_config``: configs of torchtitan become valid configs of torchtrain."""

import math
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from forked_command import run_command
from test_from_torchtitan import DEBUG_FILE

from torchtrain.config.parse import from_file, from_text
from torchtrain.config.registry import CONFIG_SECTIONS
from torchtrain.config.schema import JobConfig, section_of, to_dict
from torchtrain.config.section import flat
from torchtrain.errors import ConfigError
from torchtrain.models.llama.model import TransformerConfig
from torchtrain.models.model_config import build_model_config
from torchtrain.optimizers.options import ParameterGroupConfig
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
# Its options are those of torchtitan from 2024-05-21 to 2024-07-16; defaults are those of the last day.
# For one machine.

[model]
flavor = "8B"
shape.rope_scaling.type = "none"  # model.flavor of torchtitan
tokenizer_path = "tokenizer.model"  # Meta's
# norm_type = "rmsnorm"  # always RMSNorm
# models end here

[optimizer]
# a comment of the rate
lr = 3e-4
name = "adamw"
implementation = "foreach"  # torchtitan's default
no_decay.weight_decay = 0.1  # torchtitan also decays norms

[training]
local_batch_size = 2
# something_new = 1  # neither torchtitan nor torchtrain has this option

[lr_scheduler]
warmup_steps = 20  # of 1000
decay_type = "linear"  # torchtitan's default

[compile]
enable = true

[data]
name = "allenai/c4"
subset = "en"  # training.dataset of torchtitan

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
    return from_text(convert_config(text, "theirs.toml").text, "ours.toml")


def test_comments_values_and_defaults_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    converted = convert_config(THEIRS, "theirs.toml")
    assert converted.text == OURS
    assert [line.partition(":")[0] for line in converted.to_set] == ["model.tokenizer_path", "data"]
    assert [line.partition(" =")[0] for line in converted.left_out] == [
        "training.something_new",
        "experimental.pipeline_parallel_split_points",
    ]
    from_text(converted.text, "ours.toml")
    (tmp_path / "tokenizer.model").touch()
    assert len(convert_config(THEIRS, "theirs.toml").to_set) == 1


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
        (
            "[validation]\nenable = true",
            "validation",
            {"name": "allenai/c4", "subset": "en", "split": "validation", "interval": 10},
        ),
        ("[validation]\nenable = true\ndataset_path = 'a'", "validation", {"name": "", "path": "a", "interval": 10}),
        ("[training]\ndata_parallel_degree = 4", "parallelism", {"data_parallel_shard_degree": 4}),
        ("[model]\nconverters = ['quantize.linear.float8']", "float8", {"recipe": "tensorwise"}),
        ("[model]\nconverters = 'float8'", "float8", {"recipe": "tensorwise"}),
        (
            "[quantize.linear.float8]\nrecipe_name = 'rowwise'\nfilter_fqns = ['auto_filter_small_kn']\n"
            "[model]\nconverters = ['quantize.linear.float8']",
            "float8",
            {"recipe": "rowwise", "filter_small_layers": True},
        ),
        ("[training]\nfsdp_reshard_after_forward = 'never'", "parallelism", {"fsdp_reshard_after_forward": "never"}),
        ("[model]\nattn_mask_type = 'block_causal'", "data", {"document_mask": True}),
        ("[model]\nflavor = '8B_flex'", "data", {"document_mask": True}),
        ("[model]\nflavor = '8B_flex'", "model", {"flavor": "8B"}),
        ("[model]\nname = 'llama3_simple_fsdp'\nflavor = 'debugmodel_varlen_attn'", "data", {"document_mask": True}),
        ("[model]\nname = 'llama3_simple_fsdp'\nflavor = '8B_varlen'", "model", {"name": "llama3", "flavor": "8B"}),
        ("[optimizer]\nweight_decay = 0.2", "optimizer", {"no_decay": ParameterGroupConfig(weight_decay=0.2)}),
        (
            "[optimizer]\nimplementation = 'fused_opt_states_bf16'",
            "optimizer",
            {"implementation": "fused", "state_dtype": "bfloat16"},
        ),
        (
            "[fault_tolerance]\nenable = true\nreplica_id = 3\nmin_replica_size = 2\nprocess_group_timeout_ms = 2500",
            "replicas",
            {"id": "3", "min": 2, "collective_timeout_seconds": 3},
        ),
        ("[fault_tolerance]\nreplica_id = 3", "replicas", {"id": ""}),
        ("[checkpoint]\ninterval_type = 'seconds'\ninterval = 600", "checkpoint", {"interval_minutes": 10.0}),
        ("[experimental]\ncustom_import = 'tomli'", "job", {"import_": ("tomli",)}),
        (
            "[parallelism]\nmodule_fqns_per_model_part = [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2']]",
            "parallelism",
            {"pipeline_parallel_layers_per_stage": (1, 2)},
        ),
        ("[parallelism]\npipeline_parallel_microbatch_size = 2", "parallelism", {"pipeline_parallel_microbatches": 4}),
        ("[training]\ncompile = true\n[compile]\nenable = false", "compile", {"enable": False}),
        ("[compile]\nenable = true\n[training]\ncompile = false", "compile", {"enable": True}),
        (
            "[training]\nmax_context_length = 1024\nnum_tokens_per_microbatch_per_dp_rank = 4096\n"
            "num_tokens_per_train_step = -1",
            "training",
            {"seq_len": 1024, "local_batch_size": 4, "global_batch_size": -1},
        ),
    ],
)
def test_values_are_converted(theirs: str, section: str, expected: dict[str, Any]) -> None:
    config = converted(theirs)
    of_plugin = section in CONFIG_SECTIONS
    options = section_of(config, CONFIG_SECTIONS[section]) if of_plugin else getattr(config, section)
    assert {key: getattr(options, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ("", {"checkpoint.keep_latest_k": 10, "optimizer.implementation": "fused", "model.shape.n_layers": 6}),
        (  # 2024-09-10 to 2025-02-24
            "[training]\ndata_parallel_shard_degree = 2\n[optimizer]\nfused = false\n[experimental]\n"
            "pipeline_parallel_degree = 2",
            {
                "checkpoint.keep_latest_k": 0,
                "optimizer.implementation": "foreach",
                "model.shape.n_layers": 8,
                "parallelism.pipeline_parallel_microbatches": 2,
            },
        ),
        # until 2025-03-11
        ("[training]\nwarmup_steps = 5", {"checkpoint.keep_latest_k": 10, "optimizer.implementation": "fused"}),
        ("[training]\nenable_fp8_linear = false", {"optimizer.implementation": "foreach", "model.shape.n_layers": 8}),
    ],
)
def test_defaults_are_those_of_the_version(theirs: str, expected: dict[str, Any]) -> None:
    """The values that torchtitan had where the file sets none."""
    config = flat(to_dict(converted(f"{theirs}\n[checkpoint]\nenable{'' if not theirs else '_checkpoint'} = true")))
    of_all_versions = {
        "training.local_batch_size": 8,
        "training.seq_len": 2048,
        "training.steps": 10000,
        "training.mixed_precision_param": "bfloat16",
        "optimizer.lr": 8e-4,
        "optimizer.no_decay.weight_decay": 0.1,
        "lr_scheduler.decay_type": "linear",
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_option": "2",
        "checkpoint.async_mode": "disabled",
        "model.shape.n_heads": 16,
        "model.shape.n_kv_heads": 16,
    }
    expected = of_all_versions | expected
    assert {name: config[name] for name in expected} == expected


def test_sizes_that_torchtrain_lacks_are_those_of_torchtitan() -> None:
    """By hand, from the formula of torchtitan's models: the feed-forward has 8/3 dim, rounded up to 256."""
    for name, flavor, dim, layers, heads, ffn_dim in (
        ("llama2", "271M", 1024, 16, 8, 2816),
        ("llama2", "1B", 2048, 18, 16, 5632),
        ("llama2", "26B", 5120, 80, 40, 13824),
        ("llama3", "debugmodel", 256, 6, 16, 768),
        ("qwen3", "debugmodel", 256, 8, 16, 3072),
    ):
        config = converted(f"[model]\nname = '{name}'\nflavor = '{flavor}'")
        model = build_model_config(config.model, None, 128)
        assert isinstance(model, TransformerConfig)
        assert (model.dim, model.n_layers, model.n_heads, model.ffn_dim) == (dim, layers, heads, ffn_dim)
        if name != "qwen3":
            assert model.n_kv_heads == heads
            assert ffn_dim == 256 * math.ceil(8 * dim // 3 / 256)
    for theirs, scaled in (
        ("[model]\nflavor = '8B'", True),
        ("[training]\nbatch_size = 1\n[model]\nflavor = '8B'", False),
    ):
        model = build_model_config(converted(theirs).model, None, 128)
        assert isinstance(model, TransformerConfig)
        assert (model.rope_scaling is not None) is scaled


def test_float8_of_the_output_layer_is_reported() -> None:
    on = "[model]\nconverters = ['float8']\n"
    assert convert_config(f"{on}[float8]\nfilter_fqns = ['output']\n", "theirs.toml").left_out == []
    assert "float8 of the output layer" in convert_config(on, "theirs.toml").left_out[0]
    assert (
        "float8.filter_fqns = ['wq']"
        in convert_config(f"{on}[float8]\nfilter_fqns = ['wq']", "theirs.toml").left_out[0]
    )
    assert convert_config("[float8]\nfilter_fqns = ['wq']", "theirs.toml").left_out == []


def test_replicas_need_the_lighthouse() -> None:
    converted = convert_config("[fault_tolerance]\nenable = true\nsemi_sync_method = 'diloco'", "theirs.toml")
    assert converted.to_set == [
        "data: c4_test is a file of torchtitan's repository; set data.path, or the source code of Python is read",
        "replicas.lighthouse: the address in torchtitan's TORCHFT_LIGHTHOUSE; see docs/replicas.md",
    ]
    assert "semi_sync_method = 'diloco': replicas always sync" in "\n".join(converted.left_out)


def test_command_writes_a_file_only_if_it_is_valid(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.toml", tmp_path / "ours.toml"
    for text, message in (
        ("[optimizer]\nname = 'Adam'\n", "optimizer.name = 'Adam' must be one of"),
        ("[model]\nname = 'llama4'\n", "model.name = 'llama4' must be one of"),
        ("[model]\nflavor = '8B_other'\n", "model.flavor = '8B_other' is not a flavor of llama3"),
        ("[model\n", "theirs.toml is not valid TOML"),
    ):
        theirs.write_text(text)
        found = run_command("torchtrain.convert_config", str(theirs), "--output", str(ours))
        assert (found.returncode, found.stdout) == (2, "")
        assert f"error: the converted config: {message}" in found.stderr or message in found.stderr
        assert not ours.exists()
    theirs.write_text(THEIRS)
    found = run_command("torchtrain.convert_config", str(theirs), "--output", str(ours))
    assert (found.returncode, found.stdout) == (0, "")
    assert from_file(str(ours)).training.local_batch_size == 2
    assert "left out: training.something_new = 1: neither torchtitan nor torchtrain has this option" in found.stderr
    found = run_command("torchtrain.convert_config", str(theirs), "--output", str(ours))
    assert found.returncode == 2
    assert "exists: name a new file, or remove it" in found.stderr


def test_python_config_is_an_error_that_names_the_way(tmp_path: Path) -> None:
    file = tmp_path / "config_registry.py"
    file.write_text("def llama3_8b():\n    return Trainer.Config(hf_assets_path='x')\n")
    found = run_command("torchtrain.convert_config", str(file))
    assert (found.returncode, found.stdout) == (2, "")
    assert "is a Python config of torchtitan, which has no TOML files since 2026-02-23" in found.stderr


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
        ("[parallelism]\npipeline_parallel_microbatch_size = 3", "pipeline_parallel_microbatch_size = 3"),
        ("[parallelism]\npipeline_parallel_layers_per_stage = 4", "pipeline_parallel_layers_per_stage = 4"),
        (
            "[model]\nconverters = ['float8', 'quantize.grouped_mm.float8']",
            "'quantize.grouped_mm.float8']  # set float8.r",
        ),
        ("[training]\nnum_tokens_per_microbatch_per_dp_rank = 1000", "num_tokens_per_microbatch_per_dp_rank = 1000"),
        ("[training]\nbatch_size = '8'\n[parallelism]\npipeline_parallel_microbatch_size = 2", "_size = 2"),
        ("[model]\nconverters = true", "converters = true"),
        ("[model]\nconverters = ['mx']", "converters = ['mx']"),
        ("[[validation.sources]]\npath = 'x'", "sources = path = 'x'"),
    ],
)
def test_value_that_cannot_be_converted_is_left_as_a_comment(theirs: str, left: str) -> None:
    converted = convert_config(theirs, "theirs.toml")
    assert [line for line in converted.text.splitlines() if line.startswith("# ") and left in line]
    assert converted.left_out


def test_comments_of_a_value_that_another_key_replaces_are_kept() -> None:
    theirs = "[model]\n# why\nconverters = ['float8']  # here\n[float8]\nrecipe_name = 'rowwise'  # there\n"
    text = convert_config(theirs, "theirs.toml").text
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
