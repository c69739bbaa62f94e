"""Weights in the formats of Hugging Face and Meta: imported and exported models have the logits of transformers."""

import base64
import copy
import io
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import sentencepiece
import tomli
import torch
import torch.distributed as dist
from forked_command import checked_command
from forked_run import TINY, ForkedRun, finish
from gloo_pool import GlooPool
from json_tokenizers import hard_texts
from plugin_rank_functions import export, load_and_export_sharded
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from torchtrain import convert as convert_command
from torchtrain import generate
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.storage import MANIFEST
from torchtrain.checkpoint.weights import check_same_architecture, load_weights
from torchtrain.config.schema import JobConfig, JobSection
from torchtrain.datasets.tokenizers import load_tokenizer, tokenizer_file
from torchtrain.distributed.connections import gloo_backend, new_gloo_group
from torchtrain.errors import CheckpointError, ConfigError
from torchtrain.logging import logger
from torchtrain.models.llama import RopeScaling, Transformer, TransformerConfig
from torchtrain.models.model_config import flavor_config
from torchtrain.optimizers.options import EMAConfig
from torchtrain.parallelisms.options import ParallelismConfig
from torchtrain.plugins.evaluation.trained_model import load_model
from torchtrain.plugins.huggingface import llama as hf
from torchtrain.plugins.huggingface.config import config_from_hf, read_hf_config
from torchtrain.plugins.huggingface.conversion import SourceWeights, convert
from torchtrain.plugins.huggingface.export import ORIGIN, export_origin, is_export_missing
from torchtrain.plugins.huggingface.meta import config_from_meta
from torchtrain.plugins.huggingface.options import HuggingFaceConfig
from torchtrain.plugins.huggingface.safetensors_folder import files_by_size, write_hf_config
from torchtrain.plugins.object_storage.storage import ObjectStore

VOCAB = 4096  # vocabulary size of the default tokenizer
LLAMA2 = TransformerConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=48, vocab_size=VOCAB, max_seq_len=64)
SHAPES = {
    "Llama 2": LLAMA2,
    "Llama 3.1": replace(
        LLAMA2,
        n_kv_heads=2,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=32),
    ),
    "tied Llama 3.2": replace(
        LLAMA2, n_kv_heads=2, rope_scaling=RopeScaling(factor=32.0, original_max_seq_len=32), tied_embeddings=True
    ),
}
TOKENS = torch.randint(0, VOCAB, (2, 48), generator=torch.Generator().manual_seed(0))


def random_model(shape: TransformerConfig) -> Transformer:
    torch.manual_seed(1)
    model = Transformer(shape)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.1)  # norms of ones would hide a misplaced norm
    return model


def assert_same_logits(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.usefixtures("process_group")
def test_export_is_renamed_after_all_its_files_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush, rename, flushed = os.fsync, Path.rename, set()

    def recorded_fsync(descriptor: int) -> None:
        flush(descriptor)
        status = os.fstat(descriptor)
        flushed.add((status.st_ino, status.st_size))

    def checked_rename(folder: Path, target: Path) -> Path:
        for path in (folder, *folder.iterdir()):
            assert (path.stat().st_ino, path.stat().st_size) in flushed, path
        flushed.clear()
        return rename(folder, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", checked_rename)
    export(random_model(next(iter(SHAPES.values()))), tmp_path / "hf")
    assert {inode for inode, _ in flushed} == {tmp_path.stat().st_ino}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", SHAPES)
def test_transformers_loads_an_exported_model(tmp_path: Path, name: str) -> None:
    model = random_model(SHAPES[name])
    export(model, tmp_path / "hf")
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    assert theirs.config.rope_parameters["rope_theta"] == SHAPES[name].rope_theta
    assert theirs.dtype == torch.float32
    assert_same_logits(model(TOKENS), theirs(TOKENS).logits)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", SHAPES)
def test_models_saved_by_transformers_are_loaded(tmp_path: Path, name: str) -> None:
    shape = SHAPES[name]
    config = hf.hf_config(shape, "float32", 1, 2)
    theirs = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager"))
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    model = random_model(shape)
    load_weights([model], tmp_path / "hf", shape)
    assert_same_logits(model(TOKENS), theirs(TOKENS).logits)


@pytest.mark.parametrize("name", [pytest.param("Llama 3.1", marks=pytest.mark.slow), "tied Llama 3.2"])
@pytest.mark.parametrize(
    ("ranks", "parallelism"),
    [
        pytest.param(2, ParallelismConfig(), marks=pytest.mark.slow, id="fsdp"),
        pytest.param(4, ParallelismConfig(tensor_parallel_degree=2), id="fsdp x tp"),
    ],
)
def test_weights_survive_a_round_trip_through_a_sharded_model(
    gloo: GlooPool, tmp_path: Path, name: str, ranks: int, parallelism: ParallelismConfig
) -> None:
    shape = SHAPES[name]
    theirs = LlamaForCausalLM(LlamaConfig(**hf.hf_config(shape, "float32", 1, 2)))
    theirs.save_pretrained(tmp_path / "in")
    local_sizes = gloo.run(ranks, load_and_export_sharded, tmp_path / "in", tmp_path / "out", shape, parallelism)
    assert max(local_sizes) == VOCAB * shape.dim // ranks
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], tensor), key


def export_in_small_files(source: Path, target: Path, shape: TransformerConfig, parallelism: ParallelismConfig) -> None:
    with patch("torchtrain.plugins.huggingface.safetensors_folder.FILE_BYTES", 300_000):
        load_and_export_sharded(source, target, shape, parallelism)


@pytest.mark.parametrize("small_files", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exported_bytes_do_not_depend_on_process_and_layout(gloo: GlooPool, tmp_path: Path, small_files: bool) -> None:
    """DCP's own safetensors header has a random order."""
    shape, export_function = SHAPES["Llama 3.1"], export_in_small_files if small_files else load_and_export_sharded
    LlamaForCausalLM(LlamaConfig(**hf.hf_config(shape, "float32", 1, 2))).save_pretrained(tmp_path / "in")
    for number, ranks in enumerate((1, 1, 4)):
        layout = ParallelismConfig(tensor_parallel_degree=2 if ranks == 4 else 1)
        gloo.run(ranks, export_function, tmp_path / "in", tmp_path / f"out-{number}", shape, layout)
    outputs = [
        {path.name: path.read_bytes() for path in sorted((tmp_path / f"out-{number}").iterdir())} for number in range(3)
    ]
    assert [output for output in outputs if output != outputs[0]] == []
    weights = [name for name in outputs[0] if name.endswith(".safetensors")]
    assert (len(weights) > 2) == small_files
    for name in weights:
        content = outputs[0][name]
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert header.pop("__metadata__") == {"format": "pt"}
        assert list(header) == sorted(header)
        assert [entry for entry in header.values() if entry.keys() != {"dtype", "shape", "data_offsets"}] == []
    assert b"DCP" not in b"".join(outputs[0].values())
    ours, theirs = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("out-2", "in"))
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []


def test_two_processes_convert_a_checkpoint_to_the_same_bytes(trained_run: Path, tmp_path: Path) -> None:
    """The second has the random hash seed of the fork server, which is another than that of this process."""
    assert convert_command.main([str(trained_run), str(tmp_path / "1")]) == 0
    checked_command("torchtrain.convert", str(trained_run), str(tmp_path / "2"))
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("1", "2"))
    assert first == second


@pytest.mark.usefixtures("process_group")
def test_export_has_the_configured_dtype(tmp_path: Path) -> None:
    export(random_model(LLAMA2), tmp_path / "hf", dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").dtype == torch.bfloat16


@pytest.mark.usefixtures("process_group")
def test_weights_of_another_model_are_rejected(tmp_path: Path) -> None:
    export(random_model(LLAMA2), tmp_path / "hf")
    other = replace(LLAMA2, rope_theta=500000.0, n_layers=3)
    with pytest.raises(CheckpointError, match=r"n_layers = 2, here 3; rope_theta = 10000.0, here 500000.0"):
        check_same_architecture(read_hf_config(tmp_path / "hf"), other, tmp_path / "hf")


@pytest.mark.usefixtures("process_group")
def test_missing_weight_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    export(random_model(LLAMA2), tmp_path / "hf")
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"lacks model.norm.weight, which model.safetensors.index.json lists"):
        load_weights([Transformer(LLAMA2)], tmp_path / "hf", LLAMA2)


def test_model_config_survives_a_round_trip_through_hugging_face() -> None:
    for shape in SHAPES.values():
        assert config_from_hf(hf.hf_config(shape, "float32", 1, 2)) == shape
        # transformers 5 writes RoPE in another format.
        assert config_from_hf(LlamaConfig(**hf.hf_config(shape, "float32", 1, 2)).to_dict()) == shape


# A value for each field that is not its default.
OTHER_VALUES: dict[str, Any] = {
    "dim": 48,
    "n_layers": 5,
    "n_heads": 8,
    "n_kv_heads": 2,
    "ffn_dim": 72,
    "vocab_size": 333,
    "max_seq_len": 777,
    "norm_eps": 0.03,
    "rope_theta": 3000.0,
    "rope_scaling": RopeScaling("linear", factor=3.0),
    "tied_embeddings": True,
    "head_dim": 12,
    "qk_norm": True,
    "qkv_bias": True,
    "max_position_embeddings": 888,
}
OTHER_SCALING: dict[str, Any] = {
    "factor": 3.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 17.0,
    "original_max_seq_len": 2222,
    "beta_fast": 24.0,
    "beta_slow": 2.5,
    "attention_factor": 0.75,
}


def test_each_field_survives_a_round_trip_through_hugging_face() -> None:
    only_ours = {"family", "base_dim", "base_layers"}
    assert OTHER_VALUES.keys() == {f.name for f in fields(TransformerConfig) if f.init} - only_ours
    for name, value in OTHER_VALUES.items():
        shape = replace(LLAMA2, **{name: value})
        back = config_from_hf(hf.hf_config(shape, "float32", 1, 2))
        if name == "max_position_embeddings":
            assert back == replace(LLAMA2, max_seq_len=888)
        else:
            assert back == shape != LLAMA2
    assert OTHER_SCALING.keys() == {f.name for f in fields(RopeScaling)} - {"type"}
    used = {
        "linear": {"factor"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"},
        "yarn": {"factor", "original_max_seq_len", "beta_fast", "beta_slow", "attention_factor"},
    }
    for kind, names in used.items():
        given: Any = {"type": kind, **OTHER_SCALING}  # fields of other types are ignored
        shape = replace(LLAMA2, rope_scaling=RopeScaling(**given))
        expected = RopeScaling(kind, **{name: OTHER_SCALING[name] for name in names})  # type: ignore[arg-type]
        assert config_from_hf(hf.hf_config(shape, "float32", 1, 2)) == replace(LLAMA2, rope_scaling=expected)
    assert hf.hf_config(replace(LLAMA2, max_position_embeddings=16), "float32", 1, 2)["max_position_embeddings"] == 64


@dataclass(frozen=True)
class WithActivation(TransformerConfig):
    activation: str = field(default="silu", compare=False)


@dataclass(frozen=True)
class WithMscale(RopeScaling):
    mscale: float | None = None


def test_field_unknown_to_the_export_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaForCausalLM(LlamaConfig(**hf.hf_config(LLAMA2, "float32", 1, 2))).save_pretrained(tmp_path / "in")
    write_hf_config(tmp_path / "in", LLAMA2, "float32", "")
    monkeypatch.setattr(hf, "TransformerConfig", WithActivation)
    monkeypatch.setattr(hf, "RopeScaling", WithMscale)
    read = read_hf_config
    changes: tuple[dict[str, Any], ...] = (
        {"activation": "relu"},
        {"rope_scaling": WithMscale("yarn", factor=2.0, mscale=0.7)},
    )
    for change in changes:
        monkeypatch.setattr(
            "torchtrain.plugins.huggingface.conversion.read_hf_config",
            lambda _, c=change: replace(read(tmp_path / "in"), **c),
        )
        assert convert_command.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 2
        (name,) = change
        assert f"{name} = {change[name]!r} cannot be exported: the config.json of a llama" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
        # A run raises before it trains.
        exporting = {"huggingface": HuggingFaceConfig(export=True)}
        config = JobConfig(job=JobSection(dump_folder=str(tmp_path)), plugins=exporting)
        run: Any = SimpleNamespace(config=config, model_config=replace(read(tmp_path / "in"), **change))
        with pytest.raises(ConfigError, match=f"{name} = .* cannot be exported"):
            HuggingFaceConfig(export=True).check_run(run, torch.device("cpu"))
    monkeypatch.setattr("torchtrain.plugins.huggingface.conversion.read_hf_config", read)
    assert convert_command.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 3e4},
        },
    ],
)
def test_rope_is_read_as_transformers_reads_it(rope: dict[str, Any]) -> None:
    keys = {key: value for key, value in hf.hf_config(LLAMA2, "float32", 1, 2).items() if "rope" not in key}
    ours, theirs = config_from_hf({**keys, **rope}), LlamaConfig(**keys, **copy.deepcopy(rope)).rope_parameters
    assert ours.rope_theta == theirs["rope_theta"]
    assert (ours.rope_scaling.factor if ours.rope_scaling else None) == theirs.get("factor")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "model_type = 'mixtral' is not supported; there are llama, mistral, qwen2, qwen3"),
        ({"attention_bias": True}, "attention_bias"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type = 'dynamic' is not supported; there are default, linear",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type = 'longrope'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate = False"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "factor of RoPE with rope_type = 'linear' must be"),
        ({"rope_theta": "ten"}, "rope_theta = 'ten' must be a number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"model_type": "mistral"}, "sliding_window = 4096 must be None .* sliding windows is not supported"),
        ({"model_type": "mistral", "sliding_window": 1024}, "sliding_window = 1024"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window = True"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "no sliding windows"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"head_dim": 7}, "head_dim = 7 must be even"),
        ({"hidden_size": "32"}, "dim = '32' must be of type int"),
        ({"num_hidden_layers": 2.0}, "n_layers = 2.0 must be of type int"),
        ({"max_position_embeddings": None}, "max_seq_len = None must be of type int"),
        ({"tie_word_embeddings": "false"}, "tied_embeddings = 'false' must be of type bool"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor = '2' must be a number above 0"),
        ({"num_attention_heads": 5, "head_dim": None}, "n_kv_heads = 4 must divide n_heads = 5"),
    ],
)
def test_unsupported_models_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf({**hf.hf_config(LLAMA2, "float32", 1, 2), **change})


def test_files_are_filled_up_to_the_maximum_size() -> None:
    sizes = {"a": 3 * 10**9, "b": 2 * 10**9, "c": 1, "d": 6 * 10**9, "e": 1}
    assert files_by_size(sizes) == {"a": 1, "b": 1, "c": 2, "d": 3, "e": 4}


# From the params.json of three of Meta's releases: the keys that are read.
LLAMA31 = {"norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": True, "n_heads": 32, "n_kv_heads": 8}
PARAMS = {
    ("llama2", "70B"): {
        "dim": 8192,
        "multiple_of": 4096,
        "ffn_dim_multiplier": 1.3,
        "n_heads": 64,
        "n_kv_heads": 8,
        "n_layers": 80,
        "norm_eps": 1e-05,
    },
    ("llama3", "8B"): {"dim": 4096, "n_layers": 32, "ffn_dim_multiplier": 1.3, "multiple_of": 1024, **LLAMA31},
    ("llama3", "1B"): {"dim": 2048, "n_layers": 16, "ffn_dim_multiplier": 1.5, "multiple_of": 256, **LLAMA31},
}


@pytest.mark.parametrize("flavor", PARAMS, ids="-".join)
def test_meta_params_give_the_flavors(flavor: tuple[str, str]) -> None:
    shape = flavor_config(*flavor)
    assert config_from_meta(PARAMS[flavor], shape.vocab_size) == shape


def to_meta_row_order(weight: Tensor, n_heads: int) -> Tensor:
    rows, dim = weight.shape
    return weight.view(n_heads, 2, rows // n_heads // 2, dim).transpose(1, 2).reshape(rows, dim)


@pytest.mark.parametrize("files", [1, 2])
def test_meta_checkpoint_is_converted_for_transformers(tmp_path: Path, files: int) -> None:
    shape = replace(LLAMA2, n_kv_heads=2, ffn_dim=256, max_seq_len=4096, norm_eps=0.02, rope_theta=3000.0)
    model = random_model(shape)
    meta = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in meta:
        if name.endswith(("wq.weight", "wk.weight")):
            meta[name] = to_meta_row_order(meta[name], shape.n_heads if "wq" in name else shape.n_kv_heads)
    source = tmp_path / "meta"
    source.mkdir()
    by_columns = (".wo.", ".w2.", "tok_embeddings")
    for number in range(files):
        part = {"rope.freqs": torch.zeros(4)}
        for name, tensor in meta.items():
            dim = 1 if any(module in name for module in by_columns) else 0
            part[name] = tensor if tensor.ndim == 1 else tensor.chunk(files, dim)[number].clone()
        torch.save(part, source / f"consolidated.0{number}.pth")
    params = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 256}
    params |= {"norm_eps": 0.02, "rope_theta": 3000.0}  # not the defaults
    (source / "params.json").write_text(json.dumps(params))
    (source / "tokenizer.model").write_bytes(tokenizer_file().read_bytes())
    convert(source, tmp_path / "hf", "hf", "float32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert_same_logits(model(TOKENS), theirs(TOKENS).logits)

    last = source / f"consolidated.0{files - 1}.pth"
    torch.save({name: tensor for name, tensor in part.items() if name != "norm.weight"}, last)
    with pytest.raises(CheckpointError, match=f"{last} lacks norm.weight"):
        convert(source, tmp_path / "again", "hf", "float32")
    torch.save(part, last)
    for damaged, content in ((last, last.read_bytes()[:-100]), (source / "params.json", b'{"dim": 32}')):
        damaged.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{damaged} is damaged, or not in Meta's format"):
            convert(source, tmp_path / "again", "hf", "float32")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("to", ["hf", "torchtrain"])
def test_weights_beyond_the_range_of_float16_are_not_converted_to_it(tmp_path: Path, to: str) -> None:
    dist.init_process_group(gloo_backend(), store=dist.HashStore(), rank=0, world_size=1)
    model = random_model(LLAMA2)
    with torch.no_grad():
        model.layers["1"].get_submodule("attention").get_submodule("wq").weight[3, 5] = 1e5
    export(model, tmp_path / "source", "bfloat16")
    dist.destroy_process_group()  # convert initializes its own
    with pytest.raises(
        ConfigError, match=r"weight has numbers that are not finite in float16, the dtype of the export"
    ):
        convert(tmp_path / "source", tmp_path / "target", to, "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    convert(tmp_path / "source", tmp_path / "target", to, "bfloat16")


def test_convert_rejects_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start it without torchrun"):
        convert(tmp_path, tmp_path / "out", "hf", "float32")


SAMPLE = "def f(x):\n    return x + 1  # é 世界\n\ttab   three 12345 it's\r\n"


def test_transformers_reads_the_default_sentencepiece_tokenizer(tmp_path: Path) -> None:
    write_hf_config(tmp_path, LLAMA2, "float32", "")
    ours, theirs = load_tokenizer(), AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode(SAMPLE) == ours.encode(SAMPLE, bos=True)
    assert theirs.encode("a text", "and another") == [*ours.encode("a text", bos=True), *ours.encode("and another")]
    again = load_tokenizer(str(tmp_path))
    assert again.encode(SAMPLE, bos=True, eos=True) == ours.encode(SAMPLE, bos=True, eos=True)
    assert again.token_bytes == ours.token_bytes
    assert theirs.decode(ours.encode(SAMPLE)) == SAMPLE
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (ours.bos_id, ours.eos_id, ours.vocab_size)
    # Other programs, such as llama.cpp, read the name in the template as the token.
    template = json.loads((tmp_path / "tokenizer.json").read_text())["post_processor"]["single"]
    assert template[0]["SpecialToken"]["id"] == theirs.bos_token


LIKE_LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}


@pytest.mark.parametrize(
    "options",
    [
        {},  # a Unigram model, on text in NFKC without extra spaces
        {"model_type": "bpe", "byte_fallback": True},
        {"model_type": "bpe", **LIKE_LLAMA},
        {"model_type": "bpe", **LIKE_LLAMA, "bos_id": -1, "eos_id": -1},
        {
            "model_type": "bpe",
            **LIKE_LLAMA,
            "bos_id": 2,
            "bos_piece": "[B]",
            "eos_id": 0,
            "unk_id": 1,
            "unk_piece": "[U]",
        },
        {"model_type": "bpe", **LIKE_LLAMA, "user_defined_symbols": ["<tool>", "<tool>+"], "control_symbols": ["[C]"]},
    ],
    ids=["default", "bpe", "Llama 2", "no bos", "other names", "own symbols"],
)
def test_transformers_reads_a_custom_sentencepiece_model(tmp_path: Path, options: dict[str, Any]) -> None:
    """transformers' LlamaTokenizer would have other ids for it, and one out of range for a missing BOS."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(io.__file__).read_text().splitlines()),
        **{"model_writer": model, "vocab_size": 500, "hard_vocab_limit": False, "minloglevel": 2, **options},
    )
    (tmp_path / "own.model").write_bytes(model.getvalue())
    (tmp_path / "hf").mkdir()
    write_hf_config(tmp_path / "hf", LLAMA2, "float32", str(tmp_path / "own.model"))
    ours, theirs = load_tokenizer(str(tmp_path / "own.model")), AutoTokenizer.from_pretrained(tmp_path / "hf")
    again = load_tokenizer(str(tmp_path / "hf"))
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (ours.bos_id, ours.eos_id, ours.vocab_size)
    for text in [text.encode("utf-8", "replace").decode() for text in hard_texts(150)] + ["a<tool>+b <tool> "]:
        if not re.search("</?s>|<unk>|\\[[BC]]", text):
            assert theirs.encode(text) == ours.encode(text, bos=True), text
            assert again.encode(text, bos=True, eos=True) == ours.encode(text, bos=True, eos=True)
            if options:  # without byte fallback, the two decode unknown characters differently
                assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert again.token_bytes == ours.token_bytes


@pytest.mark.parametrize("options", [{"model_type": "word"}, {"treat_whitespace_as_suffix": True}])
def test_sentencepiece_model_that_transformers_reads_differently_is_warned_of(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(io.__file__).read_text().splitlines()),
        **{"model_writer": model, "vocab_size": 200, "hard_vocab_limit": False, "minloglevel": 2, **options},
    )
    (tmp_path / "own.model").write_bytes(model.getvalue())
    write_hf_config(tmp_path, LLAMA2, "float32", str(tmp_path / "own.model"))
    assert "has other ids in transformers" in caplog.text
    ours, theirs = load_tokenizer(str(tmp_path / "own.model")), AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode("the text of a file") != ours.encode("the text of a file", bos=True)


def test_transformers_reads_a_tiktoken_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [
        b"de",
        b"def",
        b" f",
        b"re",
        b"tu",
        b"retu",
        b"rn",
        b"return",
        b"  ",
        b"    ",
        b"12",
        b"345",
        b"\xc3\xa9",
        b" it",
        *(b"hell", b"he", b"ll"),  # a token before its parts
    ]
    tokens = [bytes([byte]) for byte in range(256)] + pieces
    monkeypatch.setattr("torchtrain.datasets.tokenizers.LLAMA3_RANKS", len(tokens))
    file = tmp_path / "ranks"
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    write_hf_config(tmp_path, LLAMA2, "float32", str(file))
    ours, theirs = load_tokenizer(str(file)), AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode("shells") == ours.encode("shells", bos=True) == [ours.bos_id, *b"s", 270, *b"s"]
    assert theirs.encode("shells", "12") == [ours.bos_id, *b"s", 270, *b"s", 266]
    assert theirs.encode(SAMPLE) == ours.encode(SAMPLE, bos=True)
    again = load_tokenizer(str(tmp_path))
    assert again.encode(SAMPLE, bos=True, eos=True) == ours.encode(SAMPLE, bos=True, eos=True)
    assert again.token_bytes == ours.token_bytes
    assert theirs.decode(ours.encode(SAMPLE)) == SAMPLE
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (ours.bos_id, ours.eos_id, ours.vocab_size)
    # Other programs, such as llama.cpp, read the name in the template as the token.
    template = json.loads((tmp_path / "tokenizer.json").read_text())["post_processor"]["single"]
    assert template[0]["SpecialToken"]["id"] == theirs.bos_token


def test_existing_target_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists"):
        convert(tmp_path, tmp_path, "hf", "float32")


@contextmanager
def log_timeout_of_export() -> Iterator[None]:
    finish_export = HuggingFaceStorageWriter.finish

    def logged_finish(*args: Any, **options: Any) -> None:
        assert dist.group.WORLD is not None
        logger.info("others wait %s", dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout)
        finish_export(*args, **options)

    with patch.object(HuggingFaceStorageWriter, "finish", logged_finish):
        yield


def test_run_starts_from_hf_weights_and_exports_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtrain.models.model_config.flavor_config", lambda *_: TINY)
    first, second = tmp_path / "first", tmp_path / "second"
    at_end = ("--huggingface.export", "--huggingface.export_dtype", "float32")
    # The first rank consolidates the files, which may take longer than a step.
    assert "others wait 1:00:00" in finish(first, "--training.steps", "2", *at_end, hook=log_timeout_of_export)
    convert(first, tmp_path / "converted", "hf", "float32")
    exported = AutoModelForCausalLM.from_pretrained(first / "hf").state_dict()
    for key, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "converted").state_dict().items():
        assert torch.equal(tensor, exported[key]), key
    # With a learning rate of 0, the weights stay as they were loaded.
    start = ("--training.steps", "1", "--optimizer.lr", "0", "--checkpoint.initial_load_path", str(first / "hf"))
    start += ("--lr_scheduler.warmup_steps", "1")  # longer ones would be cut to the number of steps
    assert f"starts from the weights in {first / 'hf'}" in finish(second, *start, *at_end, ranks=1)
    for key, tensor in AutoModelForCausalLM.from_pretrained(second / "hf").state_dict().items():
        assert torch.equal(tensor, exported[key]), key
    resumed = finish(second, "--training.steps", "2", *start[2:], ranks=1)
    assert "is not used: the run resumes from its own step 1" in resumed


@pytest.mark.parametrize("kind", [pytest.param("link", marks=pytest.mark.slow), "broken link", "file"])
def test_file_or_link_at_the_path_of_the_export_is_an_error_at_the_start(tmp_path: Path, kind: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    if kind == "file":
        (tmp_path / "hf").write_text("mine")
    else:
        (tmp_path / "hf").symlink_to(tmp_path / ("elsewhere" if kind == "link" else "nowhere"))
    run = ForkedRun(tmp_path, "--huggingface.export", ranks=1)
    assert run.wait() == [2]
    assert str(tmp_path / "hf") in run.output()
    assert "huggingface.export writes" in run.output()
    assert "Traceback" not in run.output()
    assert not (tmp_path / "metrics.jsonl").exists()
    assert not (tmp_path / "checkpoint").exists()
    # Without the export, it does not matter.
    finish(tmp_path, "--training.steps", "1", ranks=1)


@pytest.mark.parametrize("to", ["hf", "torchtrain"])
def test_broken_link_as_target_is_rejected(tmp_path: Path, to: str) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="out exists"):
        convert(tmp_path, tmp_path / "out", to, "float32")


def save_model_of_96_positions(folder: Path) -> tuple[str, ...]:
    """Returns the options of a run that starts from its weights."""
    config = LlamaConfig(**hf.hf_config(replace(TINY, max_seq_len=96), "float32", 1, 2))
    LlamaForCausalLM(config).save_pretrained(folder)
    write_hf_config(folder, replace(TINY, max_seq_len=96), "float32", "")
    return ("--checkpoint.initial_load_path", str(folder), "--huggingface.export")


def context(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["max_position_embeddings"])


@pytest.mark.slow
def test_export_keeps_the_context_length_of_the_initial_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtrain.models.model_config.flavor_config", lambda *_: TINY)
    source, run = tmp_path / "source", tmp_path / "run"
    weights = save_model_of_96_positions(source)
    message = "training.seq_len is 32: exports of this run, evaluate and generate take 96 as the longest context"
    assert message in finish(run, *weights, "--model.hf_folder", str(source), "--training.steps", "1", ranks=1)
    assert context(run / "hf") == 96
    convert(run, tmp_path / "converted", "hf", "float32")
    assert context(tmp_path / "converted") == 96
    convert(run, tmp_path / "ours", "torchtrain", "float32")
    convert(tmp_path / "ours", tmp_path / "again", "hf", "float32")
    assert context(tmp_path / "again") == 96
    assert load_model(run).model.config.max_seq_len == 96


@pytest.mark.slow
def test_export_of_a_run_by_flavor_keeps_the_context_length_or_has_that_of_its_options(tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    weights = save_model_of_96_positions(source)
    finish(run, *weights, "--training.steps", "2", ranks=1)
    shutil.rmtree(source)
    shutil.rmtree(run / "hf")
    finish(run, *weights, "--training.steps", "3", ranks=1)  # resumes
    assert context(run / "hf") == 96

    start = ("--checkpoint.initial_load_path", str(run), "--huggingface.export", "--training.steps", "1")
    for length, expected in (("48", 48), ("16", 32)):
        finish(tmp_path / length, *start, "--model.shape.max_position_embeddings", length, ranks=1)
        assert context(tmp_path / length / "hf") == expected
    finish(tmp_path / "longer", *start, "--training.seq_len", "128", ranks=1)
    assert context(tmp_path / "longer/hf") == 128


def test_initial_weights_of_another_model_are_rejected(tmp_path: Path) -> None:
    finish(tmp_path / "first", "--training.steps", "1", "--model.shape.n_layers", "2", ranks=1)
    # With four heads instead of two, the matrices have the same shapes; with one layer instead of two, none is missing.
    shape = ("--model.shape.n_heads", "4", "--model.shape.n_kv_heads", "2", "--model.shape.n_layers", "1")
    run = ForkedRun(tmp_path / "second", "--checkpoint.initial_load_path", str(tmp_path / "first"), *shape, ranks=1)
    assert run.wait() == [2]
    message = r"step-1 contains a different model .*: n_layers = 2, here 1; n_heads = 2, here 4; n_kv_heads = 1, here 2"
    assert re.search(message, run.output()), run.output()
    assert "Traceback" not in run.output()


def test_missing_initial_weights_are_rejected_before_the_start(tmp_path: Path) -> None:
    run = ForkedRun(tmp_path, "--checkpoint.initial_load_path", str(tmp_path / "nowhere"), ranks=1)
    assert run.wait() == [2]
    assert "nowhere does not exist" in run.output()


def damage_folder(folder: Path, how: str) -> None:
    """Damage a folder that transformers has saved."""
    (file,) = folder.glob("*.safetensors")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(file)
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "quantized":
        config["quantization_config"] = {"quant_method": "fp8"}
    elif how == "float8":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    elif how == "int8":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    elif how == "bias":
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    elif how == "third layer":
        tensors |= {name.replace(".1.", ".2."): tensor for name, tensor in tensors.items() if ".layers.1." in name}
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    elif how == "shape":
        tensors["model.norm.weight"] = torch.ones(16)
    elif how == "escape":
        tensors["\x1b]0;owned\x07\n"] = torch.ones(1)
    elif how == "pipe":
        file.unlink()
        os.mkfifo(file)
    elif how == "NUL":
        file.unlink()
        (folder / "model-00001-of-00001.safetensors").write_bytes(b"")
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b\\u0000.safetensors"}}')
    elif how == "two files":
        save_file({"model.norm.weight": torch.ones(32)}, folder / "zz_old.safetensors")
        file = file.rename(folder / "weights.safetensors")
    elif how == "pickled":
        file.rename(folder / "pytorch_model.bin")
    elif how == "bad index":
        file = file.rename(folder / "weights.safetensors")
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret.safetensors"}}')
    elif how == "list":
        (folder / "config.json").write_text("[]")
    elif how == "null":
        (folder / "config.json").write_text("null")
    elif how == "no width":
        del config["hidden_size"]
    if how not in ("truncated", "empty", "pickled", "pipe", "NUL"):
        save_file(tensors, file)
    if how not in ("list", "null"):
        (folder / "config.json").write_text(json.dumps(config))


DAMAGES = [
    ("truncated", "is damaged or truncated"),
    ("empty", "is damaged or truncated"),
    ("quantized", "it has a quantization_config"),
    ("float8", "model.norm.weight in .* is F8_E4M3; weights must be F32, BF16, F16"),
    ("int8", "model.norm.weight in .* is I8; weights must be F32, BF16, F16"),
    ("bias", "does not have: model.layers.0.self_attn.q_proj.bias"),
    ("third layer", "does not have: model.layers.2.input_layernorm.weight, .* and 4 more"),
    ("shape", r"has shape \(16,\); by config.json it has \(32,\)"),
    ("escape", r"does not have: '\\x1b\]0;owned\\x07\\n'"),
    ("pipe", r"model.safetensors is not a regular file"),
    ("NUL", r"names 'b\\+x00.safetensors', which is not in its folder"),
    ("two files", "contains 2 safetensors files and neither model.safetensors nor model.safetensors.index.json"),
    ("pickled", "has a config.json, and no weights in safetensors files beside it"),
    ("bad index", "names '../../secret.safetensors', which is not in its folder"),
    ("list", "it contains '\\[\\]', not an object"),
    ("null", "it contains 'None', not an object"),
    ("no width", "config.json lacks 'hidden_size'"),
]
# Of the weights and of the config.
FOR_EVERY_COMMAND = ("shape", "list")


def save_damaged(folder: Path, how: str) -> None:
    LlamaForCausalLM(LlamaConfig(**hf.hf_config(LLAMA2, "float32", 1, 2))).save_pretrained(folder)
    write_hf_config(folder, LLAMA2, "float32", "")
    damage_folder(folder, how)


def check_rejected(code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a command in this process has ended with one line."""
    if dist.is_initialized():
        dist.destroy_process_group()
    errors = capsys.readouterr().err
    assert code == 2
    assert re.search(message, errors), errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(("how", "message"), DAMAGES)
def test_damaged_hf_folder_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, message: str
) -> None:
    save_damaged(tmp_path / "hf", how)
    capsys.readouterr()  # transformers' progress bar
    check_rejected(convert_command.main([str(tmp_path / "hf"), str(tmp_path / "out")]), message, capsys)


@pytest.mark.parametrize(
    ("how", "message"),
    [pytest.param(*case, marks=() if case[0] in FOR_EVERY_COMMAND else pytest.mark.slow) for case in DAMAGES],
)
def test_damaged_hf_folder_is_rejected_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, message: str
) -> None:
    folder = tmp_path / "hf"
    save_damaged(folder, how)
    capsys.readouterr()  # transformers' progress bar
    check_rejected(generate.main([str(folder), "--prompt", "a"]), message, capsys)
    run = ForkedRun(tmp_path / "run", "--checkpoint.initial_load_path", str(folder), shape=LLAMA2, ranks=1)
    assert run.wait() == [2]
    assert re.search(message, run.output()), run.output()
    assert "Traceback" not in run.output()


@pytest.mark.usefixtures("process_group")
def test_non_finite_weights_are_rejected(tmp_path: Path) -> None:
    model = random_model(LLAMA2)
    model.norm.weight.data[3] = torch.nan
    with patch("torchtrain.plugins.huggingface.safetensors_folder.finite", lambda tensor, _: tensor):
        export(model, tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"not finite, in norm.weight; take another"):
        load_weights([random_model(LLAMA2)], tmp_path / "hf", LLAMA2)


@pytest.mark.usefixtures("process_group")
def test_index_selects_the_files_that_are_read(tmp_path: Path) -> None:
    theirs = LlamaForCausalLM(LlamaConfig(**hf.hf_config(LLAMA2, "float32", 1, 2), attn_implementation="eager"))
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    stale = {name: torch.zeros_like(tensor) for name, tensor in theirs.state_dict().items()}
    save_file({**stale, "and.another": torch.zeros(1)}, tmp_path / "hf/zz_old.safetensors")
    model = random_model(LLAMA2)
    load_weights([model], tmp_path / "hf", LLAMA2)
    assert_same_logits(model(TOKENS), theirs(TOKENS).logits)


def test_missing_key_of_config_json_has_the_default_of_transformers() -> None:
    keys = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False}
    others = {k: v for k, v in hf.hf_config(LLAMA2, "float32", 1, 2).items() if k not in keys and "rope" not in k}
    config = LlamaConfig(**others)
    ours = config_from_hf(others)
    assert (ours.norm_eps, ours.max_seq_len, ours.tied_embeddings) == tuple(getattr(config, key) for key in keys)
    assert ours.rope_theta == config.rope_parameters["rope_theta"]


def test_converted_checkpoint_has_the_sequence_length() -> None:
    config = tomli.loads(SourceWeights(LLAMA2, {}, lambda _: TOKENS, "").config_toml())
    assert config["training"]["seq_len"] == LLAMA2.max_seq_len == 64


def test_changed_checkpoint_or_options_need_a_new_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtrain.plugins.huggingface.export.on_rank0", lambda ask, _: ask())
    options = HuggingFaceConfig(export=True)
    config = JobConfig(
        job=JobSection(dump_folder=str(tmp_path)), ema=EMAConfig(enable=True), plugins={"huggingface": options}
    )
    for step in (2, 4):
        (tmp_path / f"checkpoint/step-{step}").mkdir(parents=True)
        (tmp_path / f"checkpoint/step-{step}" / MANIFEST).write_text(str(step))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    (tmp_path / ORIGIN).write_text(json.dumps(export_origin(config, 2)))
    group: Any = None
    assert not is_export_missing(config, 2, group)
    assert is_export_missing(config, 4, group)
    for changes in ({"export_weights": "ema"}, {"export_dtype": "float32"}):
        changed: Any = replace(options, **changes)
        assert is_export_missing(replace(config, plugins={"huggingface": changed}), 2, group)


def needs_export_from_slow_store() -> bool:
    def read(*_: object) -> bytes:
        time.sleep(6)
        raise FileNotFoundError

    config = JobConfig(checkpoint=CheckpointConfig(enable=True, folder="s3://bucket/checkpoint"))
    group = new_gloo_group(timedelta(seconds=4))
    with patch.object(ObjectStore, "read", read):
        return is_export_missing(config, 2, group)


def test_request_for_the_state_of_an_export_may_exceed_the_timeout_of_collectives(gloo: GlooPool) -> None:
    assert gloo.run(2, needs_export_from_slow_store) == [True, True]
