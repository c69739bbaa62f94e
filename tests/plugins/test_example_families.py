"""The families of the package in scripts/families compute what transformers does, the same on every layout."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli
import torch
import transformers
from data_samples import DOCUMENTS, write_jsonl
from draw_architecture import ROOT
from forked_run import CONFIG, finish, logged_losses
from gloo_pool import GlooPool
from json_tokenizers import save_tokenizer
from parity import TINY, assert_same_run, config_of
from plugin_rank_functions import gradients_of_example_family, train_example_family
from safetensors.torch import load_file
from test_hf_families import SMALL, assert_same_as_transformers, random_of_config
from test_parallelism import layout
from torch.utils.flop_counter import FlopCounterMode

from torchtrain.config.registry import MODELS
from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.errors import ConfigError
from torchtrain.models.llama import TransformerConfig
from torchtrain.models.model_config import build_model_config, flavor_config, to_model_section
from torchtrain.models.options import ModelConfig, ModelOverrides, MupConfig
from torchtrain.models.spec import build_model, flops_per_token
from torchtrain.plugins.huggingface.config import config_from_hf, hf_format

pytestmark = pytest.mark.usefixtures("example_families")
PACKAGE = ROOT / "scripts/families"
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.6,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# The config in transformers, and keys with which a model has layers of each kind, and windows shorter than a sequence.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "granite": ("GraniteConfig", MULTIPLIERS),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": {"rope_theta": 700.0, **YARN},
                "sliding_attention": {"rope_theta": 900.0, "rope_type": "default"},
            },
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "head_dim": 12,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 10,
            "sliding_window": 7,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_theta": 700.0, "rope_type": "linear", "factor": 3.0},
                "sliding_attention": {"rope_theta": 90.0, "rope_type": "default"},
            },
        },
    ),
}


def random_model(name: str, **changes: Any) -> Any:
    """A model of transformers in which norms differ from their initial values."""
    kind, keys = FAMILIES[name]
    mean = 0.0 if name == "gemma3_text" else 1.0  # Gemma adds 1 to the weight
    return random_of_config(kind, mean, **{**keys, **changes})


def tiny(name: str) -> TransformerConfig:
    """A config for sequences of 16 tokens, with a window of 5."""
    config_class = MODELS[name].config_class
    names = config_class.__dataclass_fields__
    changes = {**MULTIPLIERS, "no_rope_layer_interval": 2, "sliding_window": 5, "full_attention_interval": 2}
    sizes = {key: value for key, value in vars(TINY).items() if key != "head_size"}
    own = {key: value for key, value in changes.items() if key in names}
    tied = name not in ("olmo2", "olmo3")
    return config_class(**sizes | own | {"head_dim": 6, "tied_embeddings": tied, "family": name})  # type: ignore[no-any-return]


def test_package_registers_the_tested_families() -> None:
    project = tomli.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torchtrain.plugins"] == {"families": "torchtrain_families"}
    assert set(MODELS) - set(MODELS._core) == set(FAMILIES)
    for name in FAMILIES:
        assert hf_format(flavor_config(name, "debugmodel")).model_type == name


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", FAMILIES)
def test_family_computes_what_transformers_does(tmp_path: Path, name: str) -> None:
    assert_same_as_transformers(random_model(name), tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_config_survives_a_round_trip_through_the_model_section(name: str) -> None:
    kind, keys = FAMILIES[name]
    config = config_from_hf(getattr(transformers, kind)(**{**SMALL, "pad_token_id": None, **keys}).to_dict())
    section = to_model_section(config, "")
    assert build_model_config(section, None, config.max_seq_len) == config
    assert section.name == name


@pytest.mark.parametrize("name", FAMILIES)
def test_initial_norms_multiply_by_one(name: str) -> None:
    config = tiny(name)
    norms = {key: weight for key, weight in build_model(config).named_parameters() if weight.ndim == 1}
    assert len(norms) == {"olmo2": 4, "olmo3": 4, "gemma3_text": 6}.get(name, 2) * config.n_layers + 1
    for key, weight in norms.items():
        assert (weight == (0.0 if name == "gemma3_text" else 1.0)).all(), key


@pytest.mark.parametrize("name", FAMILIES)
def test_flops_are_those_of_a_forward(name: str) -> None:
    """Those of attention by the lengths of windows, 5 in every second layer of a family that has them."""
    config, seq = tiny(name), TINY.max_seq_len
    tokens = torch.zeros(1, seq, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        build_model(config)(tokens)
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    lengths = [5, seq, 5, seq] if hasattr(config, "sliding_window") else [seq] * 4
    attention = 12 * config.n_heads * config.head_size * sum(lengths)
    assert flops_per_token(config, seq) == 3 * products // seq + attention


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers = \[1, 0\] must be 0 in the last of each 4 layers"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window = True must be False in a smollm3"),
        ("granite", {"attention_multiplier": 0.0}, "attention_multiplier = 0.0 must be above 0"),
        ("olmo2", {"attention_bias": True}, "attention_bias = True must be False in a olmo2"),
        ("olmo3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = .* must have"),
        ("olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "must be given for 'full_attention' and"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 must be None"),
    ],
)
def test_config_json_of_another_computation_is_rejected(name: str, keys: dict[str, Any], message: str) -> None:
    kind, own = FAMILIES[name]
    content = getattr(transformers, kind)(**{**SMALL, **own, "num_hidden_layers": 2, "pad_token_id": None}).to_dict()
    with pytest.raises(ValueError, match=message):
        config_from_hf({**content, **keys})


@pytest.mark.parametrize("name", FAMILIES)
def test_options_of_other_families_are_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=f"qk_norm = true is an option of Qwen, not of {name}; omit it"):
        build_model_config(ModelConfig(name=name, shape=ModelOverrides(qk_norm=True)), None, 32)
    mup = MupConfig(base_dim=64)
    if name in ("smollm3", "granite"):
        assert build_model_config(ModelConfig(name=name), None, 32, mup).mup_ratios == (4, 1)
    else:
        with pytest.raises(ConfigError, match=f"have no rule for the norms of {name}; omit them"):
            build_model_config(ModelConfig(name=name), None, 32, mup)


def run(
    gloo: GlooPool, text: str, name: str, function: Callable[..., Any] = train_example_family, **options: Any
) -> list[Any]:
    """``function`` on a layout, such as "S2 T2" in ``test_parallelism``."""
    ranks, degrees = layout(text)
    config: JobConfig = config_of(training={"local_batch_size": 8 // degrees.get("data_parallel_shard_degree", 1)})
    config = replace(config, parallelism=replace(config.parallelism, **degrees, **options))
    shape = replace(tiny(name), n_layers=2)  # one of each kind
    return gloo.run(ranks, function, config, shape)


# Its norms of queries and keys have a gradient on each tensor-parallel rank. test_moe.py has those of olmo2.
WITH_QK_NORMS = "gemma3_text"


@pytest.mark.parametrize(
    "name", [name if name == WITH_QK_NORMS else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_gradients_of_tensor_parallel_ranks_are_those_of_one_rank(gloo: GlooPool, name: str) -> None:
    """Norms of queries and keys, and those after a layer, have a gradient on each rank, of its heads or its tokens."""
    (expected,) = run(gloo, "S1", name, gradients_of_example_family)
    for sequence in (True, False) if name == WITH_QK_NORMS else (True,):  # whose norms by heads depend on it
        for found in run(gloo, "T2", name, gradients_of_example_family, enable_sequence_parallel=sequence):
            errors = {key: (found[key] - gradient).norm() / gradient.norm() for key, gradient in expected.items()}
            assert {key: error for key, error in errors.items() if not error < 1e-5} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_tensor_parallelism_matches_one_rank(gloo: GlooPool, name: str) -> None:
    (reference,) = run(gloo, "S1", name)
    assert_same_run(run(gloo, "T2", name), reference)


# One of the default tests has a family on each of these layouts.
QUICK_LAYOUTS = {"olmo2": "S2", "olmo3": "C2", "smollm3": "P2"}


@pytest.mark.parametrize(("name", "text"), QUICK_LAYOUTS.items())
def test_layout_matches_one_rank(gloo: GlooPool, name: str, text: str) -> None:
    (reference,) = run(gloo, "S1", name)
    assert_same_run(run(gloo, text, name), reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layout_matches_one_rank(gloo: GlooPool, name: str) -> None:
    (reference,) = run(gloo, "S1", name)
    for text in ("S2", "C2", "P2", "S2 T2 C2"):
        assert_same_run(run(gloo, text, name), reference)
    assert_same_run(run(gloo, "T2", name, enable_sequence_parallel=False), reference)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


AXES = ("data_parallel_shard", "tensor_parallel", "context_parallel", "pipeline_parallel")


@pytest.mark.parametrize(
    ("name", "axes"),
    [("granite", AXES[-1:]), *(pytest.param(name, AXES, marks=pytest.mark.slow) for name in FAMILIES)],
)
def test_run_from_a_folder_of_transformers_ends_with_one(tmp_path: Path, name: str, axes: tuple[str, ...]) -> None:
    """On one rank and on two with each axis; transformers loads the exports, which are those of one rank."""
    source = tmp_path / "source"
    save_tokenizer(source, "byte-level BPE")
    random_model(name, vocab_size=640).save_pretrained(source)
    start = ["--model.hf_folder", str(source), "--checkpoint.initial_load_path", str(source), "--huggingface.export"]
    start += ["--huggingface.export_dtype", "float32", "--job.import", "torchtrain_families", "--training.steps", "2"]
    start += ["--data.path", write_jsonl(tmp_path / "data.jsonl", DOCUMENTS)]
    finish(tmp_path / "one", *start, ranks=1)
    expected, before = weights_in(tmp_path / "one/hf"), weights_in(source)
    assert max((tensor - before[key]).abs().max() for key, tensor in expected.items()) > 0.01
    for axis in axes:
        options = [f"--parallelism.{axis}_degree", "2", "--training.local_batch_size", "2"]
        finish(tmp_path / axis, *start, *options)
        found, reference = (logged_losses(tmp_path / folder) for folder in (axis, "one"))
        assert found == pytest.approx(reference, rel=1e-5)
        weights = weights_in(tmp_path / axis / "hf")
        assert weights.keys() == expected.keys()
        for key, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-3)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one/hf", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.config.model_type == name


@pytest.mark.slow  # test_moe.py has an installation of both packages
def test_package_that_is_installed_trains_without_an_option(tmp_path: Path) -> None:
    """The files of an installation by pip, whose metadata has the entry points of the pyproject.toml."""
    project = tomli.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / f"torchtrain_families-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"]["torchtrain.plugins"]
    lines = [f"{name} = {module}\n" for name, module in points.items()]
    (info / "entry_points.txt").write_text(f"[torchtrain.plugins]\n{''.join(lines)}")
    shutil.copytree(PACKAGE / "torchtrain_families", tmp_path / "site/torchtrain_families")
    (tmp_path / "config.toml").write_text(CONFIG)
    options = ["--job.config_file=config.toml", "--job.dump_folder=run", "--model.name=olmo2", "--training.steps=2"]
    sizes = ["--model.shape.dim=32", "--model.shape.n_layers=2", "--model.shape.ffn_dim=64"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torchtrain.train", *options, *sizes]
    result = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert result.returncode == 0, result.stderr
    assert len(logged_losses(tmp_path / "run")) == 2


def test_page_has_the_lines_of_each_module() -> None:
    page = (ROOT / "docs/families.md").read_text()
    stated = dict(re.findall(r"\| `(\w+)` \| (\d+) \|", page)) | dict(re.findall(r"(\w+)\.py\S*\s\((\d+)", page))
    lines = {path.stem: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py") if path.stem != "__init__"}
    assert {name: int(count) for name, count in stated.items()} == lines
    assert max(lines.values()) < 150


@pytest.mark.parametrize("name", ["olmo3", "gemma3_text"])
def test_schedule_that_windows_on_a_gpu_do_not_support_is_rejected(name: str) -> None:
    mesh = SimpleNamespace(degrees=ParallelDims(pipeline=2), context=SimpleNamespace(device_type="cuda"))
    config = config_of(parallelism={"pipeline_parallel_schedule": "ZBVZeroBubble"})
    with pytest.raises(ConfigError, match="'ZBVZeroBubble' runs the backward of a block in two passes, which flex"):
        MODELS[name].parallelize(None, mesh, config, None)
