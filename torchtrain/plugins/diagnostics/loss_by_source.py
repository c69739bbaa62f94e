"""The training loss of each data source, from the forward pass of the step itself."""

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.datasets.dataloader import Batch
from torchtrain.datasets.options import DataConfig
from torchtrain.distributed.replicas import Replicas
from torchtrain.metrics.hooks import Hook
from torchtrain.models.loss import OutputLoss, TokenLoss


def source_labels(config: DataConfig) -> list[str]:
    """A label for each source of ``config``; those that occur again are numbered."""
    labels = [source.title or source.source_type for source in config.all]
    return [
        f"{label}_{labels[:number].count(label) + 1}" if labels.count(label) > 1 else label
        for number, label in enumerate(labels)
    ]


class LossBySource(Hook):
    """Sums losses and tokens by the source of each row, over the steps from one line of metrics to the next.

    All tokens of a row are from one source. The sums over all sources are exactly the loss of the step, because losses
    are rounded to multiples of 2^-20 nats by row (``exact_nats``). While it is attached, the training loss is computed
    from these; it differs by the rounding of a float32 sum. Gradients do not change.

    Args:
        labels: names of the sources.
        group: the ranks over which the loss is summed.
        replicas: whose ranks of this number it is summed over, too.
    """

    def __init__(
        self,
        labels: list[str],
        loss: OutputLoss,
        group: dist.ProcessGroup,
        device: torch.device,
        replicas: Replicas | None = None,
    ) -> None:
        self.labels = labels
        self.loss = loss
        self.group = group
        self.replicas = Replicas() if replicas is None else replicas
        self.sums = torch.zeros(2, len(labels), dtype=torch.float64, device=device)
        """Of this rank's rows in the last step, and of those of other replicas: losses in nats, and tokens, by
        source."""
        self.sums_since_line = torch.zeros_like(self.sums)
        """The same of all steps since the last call of ``metrics``; sources whose loss is not finite are left out."""

    def before_forward_backward(self, batch: Batch) -> None:
        assert batch.sources is not None
        self.sources = batch.sources.to(self.sums.device, non_blocking=True)
        self.loss.by_row = []

    def after_backward(self) -> None:
        self.sums.zero_()
        if self.loss.by_row:  # else this rank has another pipeline stage than the last
            # Calls are in the order of the rows, also those of a pipeline, whose microbatches are never reordered.
            self.sums.index_add_(1, self.sources, torch.cat(self.loss.by_row, dim=1))
        self.loss.by_row = None  # validation does not record

    def after_gradients(self) -> None:
        self.replicas.all_reduce(self.sums)

    def after_step(self, step: int, batch: Batch, loss: TokenLoss, grad_norm: Tensor) -> None:  # noqa: ARG002
        self.sums_since_line += torch.where(self.sums[0].isfinite(), self.sums, 0.0)

    def begin_interval(self) -> None:
        self.sums_since_line = torch.zeros_like(self.sums)

    def metrics(self) -> dict[str, float]:
        """Mean loss and number of tokens since the last call, by source and of all, over all ranks. Collective.

        A source without tokens has no loss.
        """
        sums = self.sums_since_line.clone()
        dist.all_reduce(sums, group=self.group)
        found: dict[str, float] = {}
        total, all_tokens = sums.sum(dim=1).tolist()
        if all_tokens:
            found["loss_mean"] = total / all_tokens
        for label, loss, tokens in zip(self.labels, *sums.tolist(), strict=True):
            if tokens:
                found[f"source_loss_{label}"] = loss / tokens
            found[f"source_tokens_{label}"] = int(tokens)
        return found
