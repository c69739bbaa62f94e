"""Each model family computes the same as its implementation in transformers, and is exported for it without loss."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gloo_pool import GlooPool
from parity import TINY
from rank_functions import build_without_tensor_parallel_plan, generate_greedily
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrain.checkpoint.states import ModelState
from torchtrain.checkpoint.weights import check_same_architecture, load_weights, resolve_model_section
from torchtrain.config import registry, schema
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.errors import CheckpointError, ConfigError
from torchtrain.models.llama import RopeScaling, Transformer, TransformerConfig, hf
from torchtrain.models.llama.families import LINEAR_LAYERS
from torchtrain.models.llama.model import TransformerBlock
from torchtrain.models.model_config import build_model_config, flavor_config, to_model_section
from torchtrain.models.spec import build_model
from torchtrain.parallelisms.activation_checkpoint import MATRIX_PRODUCTS
from torchtrain.plugins.evaluation.generation import Sampling, generate
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


def assert_close_to_largest(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", MODELS)
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


def test_config_sections_list_all_families_flavors_and_fields() -> None:
    assert set(hf.FAMILIES) == set(registry.MODELS._core)
    listed = "; ".join(f"{name}: {', '.join(registry.MODELS[name].flavors)}" for name in sorted(hf.FAMILIES))
    assert listed in " ".join((Path(schema.__file__).read_text()).split())
    others = {"vocab_size", "max_seq_len", "family", "head_size", *(field.name for field in fields(schema.MupConfig))}
    assert {field.name for field in fields(schema.ModelOverrides)} == {
        field.name for field in fields(TransformerConfig)
    } - others
    assert [field.name for field in fields(schema.RopeScalingConfig)] == [field.name for field in fields(RopeScaling)]
    for name, family in hf.FAMILIES.items():
        shape = flavor_config(name, "debugmodel")
        (architecture,) = hf.hf_config(shape, "float32", None, None)["architectures"]
        assert getattr(transformers, architecture).config_class.model_type == family.model_type


def test_config_json_of_a_llama_is_read_as_llama3() -> None:
    for name, family in {"llama2": "llama3", "llama3": "llama3", "mistral": "mistral", "qwen3": "qwen3"}.items():
        content = hf.hf_config(flavor_config(name, "debugmodel"), "float32", None, None)
        assert config_from_hf(content).family == family


def section(**values: Any) -> schema.ModelConfig:
    return schema.ModelConfig(**values)


def shape_of(model: schema.ModelConfig) -> TransformerConfig:
    return build_model_config(model, load_tokenizer(), 128)


def test_shape_overrides_the_flavor() -> None:
    flavor = replace(flavor_config("llama3", "debugmodel"), vocab_size=4096, max_seq_len=128)
    assert shape_of(section()) == flavor
    changes = {"dim": 768, "n_layers": 12, "n_heads": 12, "ffn_dim": 2048}
    found = shape_of(section(shape=schema.ModelOverrides(**changes)))
    assert found == replace(flavor, **changes)
    assert found.head_size == 64
    yarn = schema.ModelOverrides(
        rope_scaling=schema.RopeScalingConfig("yarn", factor=2.0, original_max_seq_len=64), qk_norm=True
    )
    found = shape_of(section(vocab_size=4224, shape=yarn))
    scaling = RopeScaling("yarn", factor=2.0, original_max_seq_len=64)
    assert found == replace(flavor, rope_scaling=scaling, qk_norm=True, vocab_size=4224)
    assert (
        shape_of(section(shape=schema.ModelOverrides(rope_scaling=schema.RopeScalingConfig("none")))).rope_scaling
        is None
    )
    more = schema.ModelOverrides(rope_scaling=schema.RopeScalingConfig(factor=32.0))
    assert shape_of(section(shape=more)).rope_scaling == RopeScaling("llama3", factor=32.0)
    assert shape_of(section(name="llama2", shape=more)).rope_scaling == RopeScaling("llama3", factor=32.0)


@pytest.mark.parametrize("name", MODELS)
def test_model_config_survives_a_round_trip_through_the_model_section(name: str) -> None:
    kind, keys = MODELS[name]
    shape = config_from_hf(getattr(transformers, f"{kind}Config")(**{**SMALL, **keys}).to_dict())
    shape = replace(shape, vocab_size=4096, max_seq_len=128)
    assert shape_of(to_model_section(shape, "")) == shape
    assert shape_of(to_model_section(shape, "")).family == shape.family


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (section(vocab_size=4000), "model.vocab_size = 4000 must be at least 4096, the number of the tokenizer's ids"),
        (section(shape=schema.ModelOverrides(n_heads=7)), "n_kv_heads = 4 must divide n_heads = 7"),
        (
            section(shape=schema.ModelOverrides(n_heads=12)),
            "n_heads = 12 must divide dim = 256, unless head_dim is set",
        ),
        (section(shape=schema.ModelOverrides(head_dim=9)), "head_dim = 9 must be even"),
        (section(shape=schema.ModelOverrides(n_layers=0)), "n_layers = 0 must be above 0"),
        (section(shape=schema.ModelOverrides(rope_theta=float("inf"))), "rope_theta = inf must be above 0, and finite"),
        (
            section(shape=schema.ModelOverrides(rope_scaling=schema.RopeScalingConfig(factor=-1.0))),
            "rope_scaling.factor = -1.0 must be a number above 0",
        ),
        (
            section(shape=schema.ModelOverrides(rope_scaling=schema.RopeScalingConfig("yarn", factor=float("inf")))),
            "rope_scaling.factor = inf must be a number above 0, and finite",
        ),
        (
            section(shape=schema.ModelOverrides(rope_scaling=schema.RopeScalingConfig(low_freq_factor=4.0))),
            "rope_scaling.low_freq_factor = 4.0 must be below high_freq_factor = 4.0",
        ),
        (
            section(shape=schema.ModelOverrides(rope_theta=1.0, rope_scaling=schema.RopeScalingConfig("yarn"))),
            "rope_theta = 1.0 must be above 1: yarn divides by its logarithm",
        ),
        (section(flavor="", shape=schema.ModelOverrides(dim=64)), "model.flavor is empty, .* 'n_layers', 'n_heads'"),
        (section(name="qwen3", shape=schema.ModelOverrides(qkv_bias=True)), "qk_norm and qkv_bias exclude each other"),
    ],
)
def test_invalid_shape_is_rejected(model: schema.ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_of(model)


def test_hf_folder_sets_shape_and_tokenizer(tmp_path: Path) -> None:
    random_model("tied Qwen3").save_pretrained(tmp_path)
    shape = read_hf_config(tmp_path)
    found = resolve_model_section(section(hf_folder=str(tmp_path)))
    assert (found.hf_folder, found.tokenizer_path) == ("", str(tmp_path))
    assert found == to_model_section(shape, str(tmp_path))
    changed = resolve_model_section(
        section(hf_folder=str(tmp_path), vocab_size=400, tokenizer_path="t", shape=schema.ModelOverrides(n_layers=5))
    )
    assert (changed.vocab_size, changed.tokenizer_path, changed.shape.n_layers) == (400, "t", 5)
    assert changed.shape.dim == found.shape.dim == 32
    longer = section(
        hf_folder=str(tmp_path), shape=schema.ModelOverrides(rope_scaling=schema.RopeScalingConfig("yarn", factor=2.0))
    )
    assert resolve_model_section(longer).shape.rope_scaling == schema.RopeScalingConfig("yarn", factor=2.0)
    random_model("yarn").save_pretrained(tmp_path / "yarn")
    more = section(
        hf_folder=str(tmp_path / "yarn"), shape=schema.ModelOverrides(rope_scaling=schema.RopeScalingConfig(factor=8.0))
    )
    assert resolve_model_section(more).shape.rope_scaling == schema.RopeScalingConfig(
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


@pytest.mark.parametrize("bias", [False, True])
def test_initial_biases_are_zero_and_initial_norms_one(bias: bool) -> None:
    model = Transformer(replace(TINY, qkv_bias=bias, qk_norm=True))
    vectors = {name: p for name, p in model.layers["1"].named_parameters() if p.ndim == 1}
    assert len(vectors) == (7 if bias else 4)
    for name, vector in vectors.items():
        assert (vector == (0.0 if name.endswith("bias") else 1.0)).all(), name


@pytest.mark.parametrize("bias", [False, True])
def test_block_lists_its_matrix_products(bias: bool) -> None:
    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.products += func in MATRIX_PRODUCTS
            return func(*args, **(kwargs or {}))

    block = TransformerBlock(replace(TINY, qkv_bias=bias))
    table = torch.ones(1, 8, 1, 4)
    with Count() as count:
        block(torch.randn(2, 8, TINY.dim), table, table)
    assert count.products == len(LINEAR_LAYERS)
    assert {f"{name}.weight" for name in LINEAR_LAYERS} == {n for n, p in block.named_parameters() if p.ndim == 2}


def test_parameter_missing_from_the_tensor_parallel_plan_is_named(gloo: GlooPool) -> None:
    gloo.run(2, build_without_tensor_parallel_plan, "attention.wo")


def test_tensor_parallel_ranks_generate_what_one_rank_does(gloo: GlooPool) -> None:
    shape = replace(TINY, head_dim=12, qk_norm=True, qkv_bias=True)
    (expected,) = gloo.run(1, generate_greedily, shape, 1)
    assert gloo.run(2, generate_greedily, shape, 2) == [expected, expected]
    assert len(set(expected)) > 2
