"""Mixtures of experts on layouts, against a loop in float64 that is written by hand, and that against transformers."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from gloo_pool import GlooPool
from parity import TINY, Curve, config_of, global_batch
from plugin_rank_functions import train_mixture_with_first_step
from test_moe import FAMILIES, LOSSES, tiny
from test_parallelism import layout
from torch import Tensor

from torchtrain.checkpoint.states import ModelState
from torchtrain.config.registry import MODELS
from torchtrain.config.schema import JobConfig
from torchtrain.models.spec import build_model
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.plugins.huggingface.safetensors_folder import save_hf

pytestmark = pytest.mark.usefixtures("mixtures_of_experts")
STEPS = 3
LAYERS = 2
LAYOUTS = [
    ("S1", 1),
    ("S2", 1),
    ("S2", 2),
    ("S4", 1),
    ("S4", 2),
    ("S4", 4),
    ("R2", 1),
    ("R2 S2", 2),
    ("C2", 2),
    ("S2 C2", 2),
    ("S2 C2", 4),
    ("T2", 1),
    ("S2 T2", 2),
    ("P2", 1),
    ("P2 S2", 2),
]


class Forward(NamedTuple):
    """By hand: the mean loss of tokens; the loss of routers, with its weights; of each layer how often experts were
    chosen (layers, E)."""

    loss: Tensor
    router_loss: Tensor
    counts: Tensor


def labeled_batch(step: int) -> tuple[Tensor, Tensor]:
    """The batch of ``parity.train``."""
    windows = global_batch(step, TINY.vocab_size, TINY.max_seq_len)
    labels = windows[:, 1:].clone()
    for row in range(len(windows)):
        labels[row, : row + step % 3] = -100
    return windows[:, :-1], labels


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def attention(x: Tensor, w: dict[str, Tensor], c: Any) -> Tensor:
    """Of one sequence (seq, dim)."""
    seq, half = len(x), c.head_size // 2
    angles = torch.arange(seq)[:, None] / c.rope_theta ** (torch.arange(half).double() / half)
    heads = {}
    for name, count in (("q", c.n_heads), ("k", c.n_kv_heads)):
        y, weight = x @ w[f"attention.w{name}.weight"].T, w[f"attention.{name}_norm.weight"]
        if c.norm_all_heads:
            y = norm(y, weight, c.norm_eps).view(seq, count, -1)
        else:
            y = norm(y.view(seq, count, -1), weight, c.norm_eps)
        first, second = y[..., :half], y[..., half:]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        heads[name] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    v = (x @ w["attention.wv.weight"].T).view(seq, c.n_kv_heads, -1)
    outputs = []
    for head in range(c.n_heads):
        shared = head // (c.n_heads // c.n_kv_heads)
        scores = heads["q"][:, head] @ heads["k"][:, shared].T / c.head_size**0.5
        scores = scores.masked_fill(torch.ones(seq, seq).triu(1) > 0, -torch.inf)
        outputs.append(scores.softmax(-1) @ v[:, shared])
    return torch.cat(outputs, dim=-1) @ w["attention.wo.weight"].T


def experts(x: Tensor, probabilities: Tensor, bias: Tensor, w: dict[str, Tensor], c: Any) -> tuple[Tensor, Tensor]:
    """Of one sequence (seq, dim): outputs, and how often each expert was chosen. One token and expert at a time."""
    outputs, counts = [], torch.zeros(c.n_experts, dtype=torch.float64)
    for token, p in zip(x, probabilities, strict=True):
        chosen = (p.detach() + bias).topk(c.top_k).indices.tolist()
        total = sum(p[e] for e in chosen) if c.normalize_top_k else 1
        output = torch.zeros_like(token)
        for e in chosen:
            w1, w2, w3 = (w[f"feed_forward.experts.{name}"][e] for name in ("w1", "w2", "w3"))
            output = output + p[e] / total * (w2 @ (F.silu(w1 @ token) * (w3 @ token)))
            counts[e] += 1
        outputs.append(output)
    return torch.stack(outputs), counts


def forward(weights: dict[str, Tensor], c: Any, tokens: Tensor, labels: Tensor, loads: Tensor, bias: Tensor) -> Forward:
    """``loads``, ``bias``: of each layer (layers, E)."""
    loss, router_loss = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    counts = torch.zeros(c.n_layers, c.n_experts, dtype=torch.float64)
    rows, seq = tokens.shape
    for row in range(rows):
        x = weights["tok_embeddings.weight"][tokens[row]]
        for layer in range(c.n_layers):
            prefix = f"layers.{layer}."
            w = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
            x = x + attention(norm(x, w["attention_norm.weight"], c.norm_eps), w, c)
            h = norm(x, w["ffn_norm.weight"], c.norm_eps)
            logits = h @ w["feed_forward.router.weight"].T
            p = logits.softmax(-1)
            output, chosen = experts(h, p, bias[layer], w, c)
            x, counts[layer] = x + output, counts[layer] + chosen
            of_row = (c.z_weight or 0) * logits.logsumexp(-1).square().mean()
            of_row = of_row + (c.batch_balance_weight or 0) * c.n_experts * (loads[layer] * p.mean(0)).sum()
            share = chosen / (seq * c.top_k)
            of_row = of_row + (c.sequence_balance_weight or 0) * c.n_experts * (share * p.mean(0)).sum()
            router_loss = router_loss + of_row / (rows * c.n_layers)
        logits = norm(x, weights["norm.weight"], c.norm_eps) @ weights["output.weight"].T
        loss = loss + F.cross_entropy(logits, labels[row], reduction="sum")
    return Forward(loss / (labels != -100).sum(), router_loss, counts)


class Run(NamedTuple):
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the first step, before clipping."""
    updates: dict[str, Tensor]
    """Of the first step: what was added to the weights."""


def train_by_hand(weights: dict[str, Tensor], c: Any, config: JobConfig) -> Run:
    """Train from ``weights`` with AdamW and clipping, in float64."""
    weights = {name: tensor.double().requires_grad_() for name, tensor in weights.items()}
    options, schedule = config.optimizer, LRSchedule(config.lr_scheduler, config.optimizer.lr, STEPS)
    loads = torch.full((c.n_layers, c.n_experts), 1 / c.n_experts, dtype=torch.float64)
    bias = torch.zeros_like(loads)
    means = {name: (torch.zeros_like(tensor), torch.zeros_like(tensor)) for name, tensor in weights.items()}
    run = Run([], [], {}, {})
    for step in range(1, STEPS + 1):
        found = forward(weights, c, *labeled_batch(step), loads, bias)
        gradients = torch.autograd.grad(found.loss + found.router_loss, list(weights.values()))
        total = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        run.losses.append(found.loss.item())
        run.norms.append(total.item())
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            first, second = means[name]
            run.gradients.setdefault(name, gradient)
            gradient = gradient * min(1, config.training.max_norm / (total + 1e-6))
            first.lerp_(gradient, 1 - options.beta1)
            second.lerp_(gradient.square(), 1 - options.beta2)
            mean, square = first / (1 - options.beta1**step), second / (1 - options.beta2**step)
            decay = 0 if "norm" in name else options.weight_decay
            update = -schedule.rate(step) * (mean / (square.sqrt() + options.eps) + decay * weight.detach())
            weight.data += update
            run.updates.setdefault(name, update)
        loads = found.counts / found.counts.sum(1, keepdim=True)
        bias += (c.bias_rate or 0) * (found.counts.mean(1, keepdim=True) - found.counts).sign()
    return run


def config_on(text: str, experts: int) -> tuple[int, JobConfig]:
    ranks, degrees = layout(text)
    rows = 8 // (degrees.get("data_parallel_shard_degree", 1) * degrees.get("data_parallel_replicate_degree", 1))
    training = {"local_batch_size": rows, "global_batch_size": 8}
    return ranks, config_of(training=training, moe={"expert_parallel_degree": experts}, parallelism=degrees)


def differences(results: list[tuple[Curve, dict[str, Tensor], dict[str, Tensor]]], c: Any, config: JobConfig) -> Any:
    """The largest differences of a layout in float32 from the loop in float64.

    Of losses and gradient norms: relative. Of the gradients of the first step: relative to the largest element of a
    parameter's. Of its update: the norm of the difference, relative to that of a parameter's update.
    """
    first = {key: weight for curve, _, _ in results for key, weight in curve.first.items()}
    gradients = {key: gradient for _, of_rank, _ in results for key, gradient in of_rank.items()}
    weights = {key: weight for _, _, of_rank in results for key, weight in of_rank.items()}
    expected = train_by_hand(first, c, config)
    curve = results[0][0]
    found = []
    for ours, theirs in ((curve.losses, expected.losses), (curve.grad_norms, expected.norms)):
        found.append(max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True)))
    updates = {key: weights[key].double() - weight.double() for key, weight in first.items()}
    for of_layout, by_hand, order in ((gradients, expected.gradients, math.inf), (updates, expected.updates, 2.0)):
        assert of_layout.keys() == by_hand.keys()
        errors = [of_layout[key] - tensor for key, tensor in by_hand.items()]
        sizes = zip(errors, by_hand.values(), strict=True)
        found.append(max((error.norm(order) / tensor.norm(order)).item() for error, tensor in sizes))
    return found


@pytest.mark.parametrize(
    ("name", "text", "experts"),
    [
        pytest.param(name, *of, marks=[] if (name, *of) == ("olmoe", "S2", 2) else pytest.mark.slow)
        for name in FAMILIES
        for of in LAYOUTS
    ],
)
def test_layout_computes_what_a_loop_in_float64_does(gloo: GlooPool, name: str, text: str, experts: int) -> None:
    c = tiny(name, n_layers=LAYERS, **LOSSES)
    ranks, config = config_on(text, experts)
    results = gloo.run(ranks, train_mixture_with_first_step, config, c, STEPS)
    loss, grad_norm, gradient, update = differences(results, c, config)
    assert loss < 1e-6
    assert grad_norm < 1e-6
    assert gradient < 2e-6
    assert update < 1e-3  # AdamW divides an element by its size, also a tiny one, whose relative error is larger


@pytest.mark.usefixtures("process_group")
def test_loop_computes_what_transformers_does(tmp_path: Path) -> None:
    """With equal weights: loss, and the gradients of what both have as one tensor.

    transformers rounds norms and softmax to float32 also in a model in float64.
    """
    c = tiny("qwen3_moe", n_layers=LAYERS)
    model = build_model(c)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2, generator=generator)
    save_hf(ModelState([model]).state_dict(), tmp_path / "out", c, "float32", "")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float64, experts_implementation="eager"
    )
    tokens, labels = labeled_batch(1)
    logits = theirs(tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    none = torch.zeros(c.n_layers, c.n_experts, dtype=torch.float64)
    found = forward(weights, c, tokens, labels, none, none).loss
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    found.backward()
    name_of = MODELS["qwen3_moe"].hf.parameter_name
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    compared = {key: name_of(key) for key in weights if ".experts." not in key}
    for ours, name in compared.items():
        largest = gradients[name].abs().max().item()
        torch.testing.assert_close(weights[ours].grad, gradients[name], rtol=0, atol=2e-6 * largest)
