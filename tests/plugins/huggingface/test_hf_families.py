"""Each model family computes the same as its implementation in transformers, and is exported for it without loss."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_families import section, shape_of
from torch import Tensor

from torchtrain.checkpoint.states import ModelState
from torchtrain.checkpoint.weights import check_same_architecture, load_weights, resolve_model_section
from torchtrain.config import registry
from torchtrain.errors import CheckpointError
from torchtrain.models.llama import RopeScaling
from torchtrain.models.model_config import flavor_config, to_model_section
from torchtrain.models.options import ModelOverrides, RopeScalingConfig
from torchtrain.models.spec import build_model
from torchtrain.plugins.evaluation.generation import Sampling, generate
from torchtrain.plugins.huggingface import llama as hf
from torchtrain.plugins.huggingface.config import config_from_hf, hf_format, read_hf_config
from torchtrain.plugins.huggingface.safetensors_folder import save_hf

VOCAB = 320
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    # These are no family's defaults, so that using a default, or another norm's epsilon, gives a different result.
    "rms_norm_eps": 0.03,
    "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
}


def rope(**keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 700.0, **keys}}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama with its own head_dim": ("Llama", {"head_dim": 12}),
    "linear": ("Llama", rope(rope_type="linear", factor=3.0)),
    "Mistral": ("Mistral", {"sliding_window": None, "head_dim": 16, **rope(rope_type="default")}),
    "Qwen2": ("Qwen2", rope(rope_type="default")),
    "yarn": ("Qwen2", rope(**YARN)),
    "yarn with all keys": (
        "Qwen3",
        {"head_dim": 16, **rope(**YARN, beta_fast=4.0, beta_slow=2.0, attention_factor=0.7)},
    ),
    "Qwen3": ("Qwen3", {"head_dim": 16}),
    "tied Qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}
TOKENS = torch.randint(0, VOCAB, (2, 48), generator=torch.Generator().manual_seed(0))


def random_model(name: str) -> Any:
    """A model of transformers in which norms and biases differ from their initial values."""
    kind, keys = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **keys})
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager")
    for key, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if key.endswith("norm.weight") else 0.0, 0.2)
    return model


def random_of_config(kind: str, norm_mean: float = 1.0, **keys: Any) -> Any:
    """A model of transformers with a config of class ``kind``; the weights of its norms are around ``norm_mean``."""
    config = getattr(transformers, kind)(**{**SMALL, "pad_token_id": None, **keys})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    for key, parameter in model.named_parameters():
        mean = norm_mean if key.endswith("norm.weight") else 0.0
        torch.nn.init.normal_(parameter, mean, 0.2, generator=generator)
    return model


def assert_close_to_largest(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("linear", "Qwen2", "Qwen3") else name for name in MODELS],
)
def test_imported_and_exported_models_compute_what_transformers_does(tmp_path: Path, name: str) -> None:
    assert_same_as_transformers(random_model(name), tmp_path)


def assert_same_as_transformers(theirs: Any, tmp_path: Path) -> None:
    """Assert that torchtrain has its logits, gradients and generated tokens, and exports it without loss."""
    theirs.save_pretrained(tmp_path / "in")
    shape = read_hf_config(tmp_path / "in")
    model = build_model(shape)
    load_weights([model], tmp_path / "in", shape)
    logits, expected = model(TOKENS), theirs(TOKENS).logits
    assert_close_to_largest(logits, expected)
    weights = torch.randn_like(logits)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    name_of = hf_format(shape).parameter_name
    ours = {name_of(key): parameter.grad for key, parameter in model.named_parameters()}
    assert ours.keys() == gradients.keys()
    for key, gradient in ours.items():
        assert_close_to_largest(gradient, gradients[key])

    save_hf(ModelState([model], shape.tied_embeddings).state_dict(), tmp_path / "out", shape, "float32", "")
    assert read_hf_config(tmp_path / "out") == shape
    reloaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    assert type(reloaded) is type(theirs)
    ours, expected_rope = (model.config.rope_parameters for model in (reloaded, theirs))
    for kind in {*expected_rope} & {"full_attention", "sliding_attention"} or [None]:  # or values for all layers
        one, other = (rope if kind is None else rope[kind] for rope in (ours, expected_rope))
        assert one.items() >= other.items()
    assert_close_to_largest(reloaded(TOKENS).logits, expected)

    prompt = TOKENS[:1, :5]
    mask = torch.ones_like(prompt)
    generated = theirs.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    steps = generate(model, prompt.tolist(), Sampling(), max_new_tokens=8)
    assert [token for (token,) in steps] == generated[0, 5:].tolist()


def test_each_family_of_the_core_has_a_format() -> None:
    assert set(hf.FAMILIES) == set(registry.MODELS._core)
    for name, family in hf.FAMILIES.items():
        shape = flavor_config(name, "debugmodel")
        (architecture,) = hf.hf_config(shape, "float32", None, None)["architectures"]
        assert getattr(transformers, architecture).config_class.model_type == family.model_type


def test_family_from_outside_with_the_decoder_of_the_core_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.MODELS._entries, "mine", registry.MODELS["qwen3"])
    model = flavor_config("mine", "debugmodel")
    assert hf_format(model).to_config(model, "float32", None, None)["model_type"] == "qwen3"


def test_config_json_of_a_llama_is_read_as_llama3() -> None:
    for name, family in {"llama2": "llama3", "llama3": "llama3", "mistral": "mistral", "qwen3": "qwen3"}.items():
        content = hf.hf_config(flavor_config(name, "debugmodel"), "float32", None, None)
        assert config_from_hf(content).family == family


@pytest.mark.parametrize("name", MODELS)
def test_model_config_survives_a_round_trip_through_the_model_section(name: str) -> None:
    kind, keys = MODELS[name]
    shape = config_from_hf(getattr(transformers, f"{kind}Config")(**{**SMALL, **keys}).to_dict())
    shape = replace(shape, vocab_size=4096, max_seq_len=128)
    assert shape_of(to_model_section(shape, "")) == shape
    assert shape_of(to_model_section(shape, "")).family == shape.family


def test_hf_folder_sets_shape_and_tokenizer(tmp_path: Path) -> None:
    random_model("tied Qwen3").save_pretrained(tmp_path)
    shape = read_hf_config(tmp_path)
    found = resolve_model_section(section(hf_folder=str(tmp_path)))
    assert (found.hf_folder, found.tokenizer_path) == ("", str(tmp_path))
    assert found == to_model_section(shape, str(tmp_path))
    changed = resolve_model_section(
        section(hf_folder=str(tmp_path), vocab_size=400, tokenizer_path="t", shape=ModelOverrides(n_layers=5))
    )
    assert (changed.vocab_size, changed.tokenizer_path, changed.shape.n_layers) == (400, "t", 5)
    assert changed.shape.dim == found.shape.dim == 32
    longer = section(
        hf_folder=str(tmp_path),
        shape=ModelOverrides(rope_scaling=RopeScalingConfig("yarn", factor=2.0)),
    )
    assert resolve_model_section(longer).shape.rope_scaling == RopeScalingConfig("yarn", factor=2.0)
    random_model("yarn").save_pretrained(tmp_path / "yarn")
    more = section(
        hf_folder=str(tmp_path / "yarn"),
        shape=ModelOverrides(rope_scaling=RopeScalingConfig(factor=8.0)),
    )
    assert resolve_model_section(more).shape.rope_scaling == RopeScalingConfig(
        "yarn", 8.0, 1.0, 4.0, original_max_seq_len=16, beta_fast=32.0, beta_slow=1.0
    )
    with pytest.raises(CheckpointError, match=r"nowhere/config.json does not describe a supported model"):
        resolve_model_section(section(hf_folder=str(tmp_path / "nowhere")))


@pytest.mark.usefixtures("process_group")
def test_rope_scaling_may_differ_from_the_checkpoint_if_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model("Qwen3").save_pretrained(tmp_path)
    shape = read_hf_config(tmp_path)
    longer = replace(shape, rope_scaling=RopeScaling("yarn", factor=4.0, original_max_seq_len=64))
    with pytest.raises(CheckpointError, match="a different model than the config: rope_scaling = None, here Rope"):
        check_same_architecture(shape, longer, tmp_path)
    monkeypatch.setattr("torchtrain.logging.logger.propagate", True)
    check_same_architecture(shape, longer, tmp_path, {"rope_scaling"})
    assert "of a model with rope_scaling = None, here Rope" in caplog.text
