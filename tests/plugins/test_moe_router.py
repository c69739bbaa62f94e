"""The losses, the bias and the metrics of a router, against formulas and transformers."""

import importlib
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from parity import config_of
from plugin_rank_functions import count_routers, router_states
from test_moe import LOSSES, tiny
from test_parallelism import layout
from torch import Tensor
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

pytestmark = pytest.mark.usefixtures("mixtures_of_experts")
EXPERTS, TOP_K, SEQUENCES, SEQ = 8, 3, 4, 16


def router_of(**losses: float) -> Any:
    """A router for ``SEQUENCES`` sequences, of a model with one layer, whose loads have not been equal."""
    module = importlib.import_module("torchtrain_moe.router")
    router = module.Router(tiny("olmoe", n_layers=1, **losses))
    router.init_buffers()
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    router.batch = module.Batch(SEQUENCES)
    return router


def hidden_states() -> Tensor:
    return torch.randn(SEQUENCES, SEQ, 32, generator=torch.Generator().manual_seed(1))


def loss_gradient(router: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the router's losses alone, and its logits."""
    logits = router(x)
    probabilities, chosen, weights = router.choose(logits)
    (router.with_losses(weights, logits, probabilities, chosen, rows=0) * 0).sum().backward()
    return router.weight.grad, logits.detach()


def test_sequence_balance_loss_is_that_of_transformers() -> None:
    """Of each sequence by itself; transformers does not divide the counts by top_k."""
    router, x = router_of(sequence_balance_weight=0.7), hidden_states()
    found, _ = loss_gradient(router, x)
    weight = router.weight.detach().clone().requires_grad_()
    losses = [load_balancing_loss_func((row @ weight.T,), EXPERTS, TOP_K) / TOP_K for row in x]
    expected = sum(losses) / SEQUENCES
    torch.testing.assert_close(found, torch.autograd.grad(0.7 * expected, weight)[0])
    torch.testing.assert_close(router.totals[-2] / SEQUENCES, expected.detach().double(), rtol=1e-6, atol=0)


def test_batch_balance_loss_follows_the_loads_of_the_step_before() -> None:
    router, x = router_of(batch_balance_weight=0.7), hidden_states()
    found, _ = loss_gradient(router, x)
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-7)  # as if loads had been equal
    router.finish_step(router.totals, 1, skip=torch.zeros(()))
    router.weight.grad = None
    found, _ = loss_gradient(router, x)
    weight = router.weight.detach().clone().requires_grad_()
    logits = x.flatten(0, 1) @ weight.T
    expected = load_balancing_loss_func((logits,), EXPERTS, TOP_K) / TOP_K  # the same tokens: the same loads
    torch.testing.assert_close(found, torch.autograd.grad(0.7 * expected, weight)[0])


def test_z_loss_is_the_mean_of_squared_log_sums() -> None:
    router, x = router_of(z_weight=0.7), hidden_states()
    found, _ = loss_gradient(router, x)
    weight = router.weight.detach().clone().requires_grad_()
    expected = 0.7 * (x @ weight.T).logsumexp(-1).square().mean()
    torch.testing.assert_close(found, torch.autograd.grad(expected, weight)[0])


def test_bias_moves_tokens_to_experts_with_less_load_and_leaves_the_weights_alone() -> None:
    router, x = router_of(bias_rate=0.001), hidden_states() / 10  # probabilities that a small bias can reorder

    def loads() -> Tensor:
        router.totals = None
        loss_gradient(router, x)
        counts: Tensor = router.totals[:EXPERTS]
        return counts

    before = loads()
    for _ in range(60):
        counts, bias = loads(), router.bias.clone()
        router.finish_step(router.totals, 1, skip=torch.zeros(()))
        torch.testing.assert_close(router.bias - bias, 0.001 * (counts.mean() - counts).sign().float())
    after = loads()
    assert before.sum() == after.sum() == SEQUENCES * SEQ * TOP_K
    assert after.max() - after.mean() < (before.max() - before.mean()) / 2
    probabilities, chosen, weights = router.choose(router(x))
    assert torch.equal(weights, probabilities.gather(-1, chosen))


def test_forward_without_backward_and_one_that_is_repeated_are_counted_once() -> None:
    router, x = router_of(**LOSSES), hidden_states()
    with torch.no_grad():
        logits = router(x)
        probabilities, chosen, weights = router.choose(logits)
        assert router.with_losses(weights, logits, probabilities, chosen, rows=0) is weights
    assert router.totals is None

    def forward(x: Tensor) -> Tensor:
        logits = router(x)
        probabilities, chosen, weights = router.choose(logits)
        return router.with_losses(weights, logits, probabilities, chosen, rows=5)  # type: ignore[no-any-return]

    torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False).sum().backward()
    assert router.totals[:EXPERTS].sum() == SEQUENCES * SEQ * TOP_K
    assert router.totals[-1] == 5


@pytest.mark.parametrize(("text", "experts"), [("S2", 2), pytest.param("S1", 1, marks=pytest.mark.slow)])
def test_skipped_step_changes_neither_loads_nor_biases(gloo: GlooPool, text: str, experts: int) -> None:
    """The gradient of step 2 is not finite."""
    ranks, degrees = layout(text)
    config = config_of(
        training={"local_batch_size": 4, "global_batch_size": 8},
        moe={"expert_parallel_degree": experts},
        parallelism=degrees,
    )
    for load, bias in gloo.run(ranks, router_states, config, tiny("olmoe", n_layers=2, **LOSSES), 2):
        assert load.shape == bias.shape == (3, 2, EXPERTS)
        for state in (load, bias):
            assert torch.equal(state[1], state[0])
            assert not torch.equal(state[2], state[1])
        torch.testing.assert_close(load.sum(-1), torch.ones(3, 2))


def test_step_that_is_computed_again_is_counted_once(gloo: GlooPool) -> None:
    """Exact sums repeat the first step, because they do not know how large its gradients are."""
    config = config_of(training={"sums": "exact", "local_batch_size": 4, "global_batch_size": 8})
    ((totals),) = gloo.run(1, count_routers, config, tiny("olmoe", n_layers=2, **LOSSES), 1)
    assert totals[:, :EXPERTS].sum(1).tolist() == [8 * 16 * TOP_K] * 2


@pytest.mark.parametrize(
    ("text", "experts"),
    [("S2", 2), *(pytest.param(*of, marks=pytest.mark.slow) for of in (("T2", 1), ("C2", 2)))],
)
def test_metrics_do_not_depend_on_the_layout(gloo: GlooPool, text: str, experts: int) -> None:
    def counted(text: str, experts: int) -> list[Tensor]:
        ranks, degrees = layout(text)
        config = config_of(
            training={"local_batch_size": 4, "global_batch_size": 8},
            moe={"expert_parallel_degree": experts},
            parallelism=degrees,
        )
        return gloo.run(ranks, count_routers, config, tiny("olmoe", n_layers=2, **LOSSES))

    (expected,) = counted("S1", 1)
    for totals in counted(text, experts):
        torch.testing.assert_close(totals, expected, rtol=1e-5, atol=0)
    metrics = importlib.import_module("torchtrain_moe.hook").expert_metrics
    tokens = 8 * 16
    found = metrics(expected, tiny("olmoe", n_layers=2), tokens, 8)
    assert found["experts/dropped_tokens"] == 0
    assert sum(found[f"experts/load_{i}"] for i in range(EXPERTS)) == pytest.approx(EXPERTS)
    assert found["experts/load_min"] < 1 < found["experts/load_max"]
    assert found["experts/entropy"] == pytest.approx(expected[:, -4].mean().item() / tokens)
    shares, probabilities = expected[:, :EXPERTS] / (tokens * TOP_K), expected[:, EXPERTS : 2 * EXPERTS] / tokens
    balance = EXPERTS * (shares * probabilities).sum(1).mean()
    assert found["experts/balance_loss"] == pytest.approx(balance.item())
