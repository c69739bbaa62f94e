"""The model compared with transformers' Llama, and its numbers of parameters with the published ones."""

from dataclasses import replace

import pytest
import torch
import transformers
from parity import TINY
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from torchtrain.checkpoint.states import ModelState
from torchtrain.errors import ConfigError
from torchtrain.models.llama import RopeScaling, Transformer, TransformerConfig
from torchtrain.models.model_config import flavor_config
from torchtrain.models.spec import flops_per_token

SHAPES = {
    # No norm_eps and no rope_theta is the default value.
    "llama2": TransformerConfig(64, 3, 4, 4, 176, 320, max_seq_len=96, norm_eps=0.02, rope_theta=3000.0),
    "llama3.1": TransformerConfig(
        64,
        2,
        8,
        2,
        128,
        512,
        max_seq_len=96,
        norm_eps=0.04,
        rope_theta=500000.0,
        # With this original length, each of the three frequency ranges of the scaling has some frequencies.
        rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=64),
    ),
    "tied": TransformerConfig(64, 2, 4, 2, 128, 384, max_seq_len=96, norm_eps=0.03, tied_embeddings=True),
}


def reference_of(model: Transformer) -> transformers.LlamaForCausalLM:
    """Build transformers' model with the config and the weights of ``model``."""
    config = model.config
    scaling = config.rope_scaling
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling is not None:
        rope = {
            "rope_type": "llama3",
            "rope_theta": config.rope_theta,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tied_embeddings,
            attn_implementation="eager",
        )
    )
    names = {
        "tok_embeddings": "model.embed_tokens",
        "norm": "model.norm",
        "output": "lm_head",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention": "self_attn",
        "feed_forward": "mlp",
        "layers": "model.layers",
        **{f"w{x}": f"{x}_proj" for x in "qkvo"},
        "w1": "gate_proj",
        "w2": "down_proj",
        "w3": "up_proj",
    }
    state = {".".join(names.get(w, w) for w in key.split(".")): value for key, value in model.state_dict().items()}
    reference.load_state_dict(state)
    return reference


def assert_close_to_largest(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients_equal_those_of_transformers(shape: str) -> None:
    torch.manual_seed(0)
    config = SHAPES[shape]
    model = Transformer(config)
    for parameter in model.parameters():  # norms too: with equal weights, swapped norms would not be detected
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.ndim > 1 else 1.0, std=0.1)
    reference = reference_of(model)
    tokens = torch.randint(0, config.vocab_size, (2, config.max_seq_len))
    logits, expected = model(tokens), reference(tokens).logits
    assert_close_to_largest(logits, expected)

    weights = torch.randn_like(logits)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    theirs = dict(reference.named_parameters())
    assert len(theirs) == len(list(model.parameters()))
    pairs = zip(model.parameters(), reference_order(model, theirs), strict=True)
    for ours, other in pairs:
        assert ours.grad is not None
        assert other.grad is not None
        assert_close_to_largest(ours.grad, other.grad)


def reference_order(model: Transformer, theirs: dict[str, torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the parameters in ``theirs`` in the order of ``model.parameters()``, matched by value."""
    found = []
    for ours in model.parameters():
        found.append(next(p for p in theirs.values() if p.shape == ours.shape and torch.equal(p, ours)))
    return found


def test_no_gradient_flows_from_a_future_token() -> None:
    model = Transformer(SHAPES["llama3.1"])
    assert model.tok_embeddings is not None
    tokens = torch.arange(40)[None]  # all different, so that each row of the embedding belongs to one position
    position = 17
    model(tokens)[0, position].sum().backward()
    gradient = model.tok_embeddings.get_parameter("weight").grad
    assert gradient is not None
    assert (gradient[: position + 1].abs().sum(dim=1) > 0).all()
    assert (gradient[position + 1 :] == 0).all()


def test_default_positions_equal_explicit_ones() -> None:
    model = Transformer(SHAPES["llama3.1"])
    tokens = torch.randint(0, 512, (2, 20))
    assert torch.equal(model(tokens), model(tokens, positions=torch.arange(20)[None]))
    assert not torch.allclose(model(tokens), model(tokens, positions=torch.arange(20)[None] * 2))


@pytest.mark.parametrize(
    ("name", "flavor", "parameters"),
    [
        ("llama2", "7B", 6_738_415_616),
        ("llama2", "13B", 13_015_864_320),
        ("llama2", "70B", 68_976_648_192),
        ("llama3", "1B", 1_235_814_400),
        ("llama3", "3B", 3_212_749_824),
        ("llama3", "8B", 8_030_261_248),
        ("llama3", "70B", 70_553_706_496),
        ("llama3", "405B", 405_853_388_800),
        ("qwen3", "0.6B", 596_049_920),
        ("qwen3", "1.7B", 1_720_574_976),
        ("qwen3", "4B", 4_022_468_096),
        ("qwen3", "8B", 8_190_735_360),
        ("qwen3", "14B", 14_768_307_200),
        ("qwen3", "32B", 32_762_123_264),
    ],
)
def test_number_of_parameters_is_the_published_one(name: str, flavor: str, parameters: int) -> None:
    config = flavor_config(name, flavor)
    with torch.device("meta"):
        model = Transformer(replace(config, n_layers=1))
    total, of_block = (sum(p.numel() for p in part.parameters()) for part in (model, model.layers["0"]))
    assert total + (config.n_layers - 1) * of_block == parameters


@pytest.mark.parametrize("shape", [*SHAPES, "8B", "0.6B"])
@pytest.mark.parametrize("tied", [False, True])
def test_flops_per_token_are_those_that_torch_counts(shape: str, tied: bool) -> None:
    """Backward costs twice the forward. The output layer is a matrix product, tied or not; the embedding is not."""
    published = {"8B": ("llama3", "8B"), "0.6B": ("qwen3", "0.6B")}
    config = flavor_config(*published[shape]) if shape in published else SHAPES[shape]
    config, seq_len = replace(config, n_layers=2, tied_embeddings=tied, max_seq_len=4096), 80
    with torch.device("meta"):
        model = Transformer(config)
        model.replace_inner_attention(lambda _: NonCausalAttention())
        tokens = torch.zeros(3, seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    assert 3 * counter.get_total_flops() == flops_per_token(config, seq_len) * tokens.numel()


class NonCausalAttention(torch.nn.Module):
    """Attention without a causal mask: ``flops_per_token`` does not subtract what the mask saves."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, _: None) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def test_unknown_flavor_error_lists_the_flavors() -> None:
    with pytest.raises(ConfigError, match="'8b' is not a flavor of llama3; there are debugmodel, 1B"):
        flavor_config("llama3", "8b")


def test_init_weights_initializes_all_tensors_after_to_empty() -> None:
    config = replace(SHAPES["tied"], max_seq_len=32)
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(float("nan"))
    model.init_weights()
    assert [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.isfinite().all()] == []
    assert model.output is not None
    assert model.tok_embeddings is not None
    assert model.output.weight is model.tok_embeddings.weight


def test_tied_names_must_be_one_parameter() -> None:
    model = Transformer(replace(TINY, tied_embeddings=True))
    model.output.weight = nn.Parameter(model.tok_embeddings.weight.detach().clone())
    with pytest.raises(AssertionError, match=r"output.weight and tok_embeddings.weight must be one parameter"):
        ModelState([model], tied=True).state_dict()
