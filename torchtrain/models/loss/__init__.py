"""The training loss: cross-entropy, with optional z-loss."""

from torchtrain.models.loss.output_loss import (
    OutputLoss,
    TokenLoss,
    cross_entropy_sum,
    exact_nats,
    token_losses,
)

__all__ = ["OutputLoss", "TokenLoss", "cross_entropy_sum", "exact_nats", "token_losses"]
