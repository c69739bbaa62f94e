"""Metrics of the routers, of the last step before each line."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch

from torchtrain.distributed.process_group import all_reduce
from torchtrain.metrics.hooks import Hook
from torchtrain_moe.config import MoEConfig
from torchtrain_moe.model import routers

if TYPE_CHECKING:
    from torchtrain.trainer import Trainer


class ExpertsHook(Hook):
    """Loads are relative to the mean: 1 is a perfect balance. Losses are without their weights."""

    shown_metrics: ClassVar[Mapping[str, str]] = {"experts/load_max": "load {:.2f}"}

    def __init__(self, trainer: "Trainer", config: MoEConfig) -> None:
        self.config, self.model = config, trainer.model
        training = trainer.config.training
        self.sequences, self.tokens = training.global_batch_size, training.global_batch_size * training.seq_len

    def metrics(self) -> Mapping[str, float]:
        config = self.config
        # By layer, over pipeline stages; all ranks of a stage have the same numbers.
        totals = torch.zeros(config.n_layers, 2 * config.n_experts + 4, dtype=torch.float64, device=self.model.device)
        seen = torch.zeros(config.n_layers, dtype=torch.float64, device=self.model.device)
        for part in self.model.model_parts:
            for layer, router in zip(part.layers, routers([part]), strict=True):
                if router.last is not None:
                    totals[int(layer)], seen[int(layer)] = router.last, 1.0
        all_reduce(totals)
        all_reduce(seen)
        return expert_metrics(totals / seen[:, None], config, self.tokens, self.sequences)


def expert_metrics(totals: torch.Tensor, config: MoEConfig, tokens: int, sequences: int) -> dict[str, float]:
    """Metrics from the ``Router.totals`` of a step, float64 (layers, 2 E + 4)."""
    experts = config.n_experts
    counts, probabilities, sums = totals.split([experts, experts, 4], dim=1)
    loads = counts * experts / (tokens * config.top_k)
    entropies, squares, balance, computed = sums.sum(0).tolist()
    balance_of_batch = (loads * probabilities).sum().item() / tokens
    layers = config.n_layers
    by_expert = {f"experts/load_{number}": load for number, load in enumerate(loads.mean(0).tolist())}
    return {
        "experts/load_max": loads.max().item(),
        "experts/load_min": loads.min().item(),
        "experts/entropy": entropies / (layers * tokens),
        "experts/balance_loss": balance_of_batch / layers,
        "experts/sequence_balance_loss": balance / (layers * sequences),
        "experts/z_loss": squares / (layers * tokens),
        "experts/dropped_tokens": counts.sum().item() - computed,
        **by_expert,
    }


def build_hook(trainer: "Trainer") -> ExpertsHook | None:
    """The hook of a mixture of experts; None for another model."""
    return ExpertsHook(trainer, trainer.model_config) if isinstance(trainer.model_config, MoEConfig) else None
