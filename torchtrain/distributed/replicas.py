"""What connects this job with other replicas of it; in a run without the plugin ``replicas``, nothing."""

from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

Loss = TypeVar("Loss")  # TokenLoss, which is in a layer beside this one


class StepDiscarded(Exception):
    """The replicas discard the step: nothing has changed, and it is computed again."""


class Replicas:
    """The replicas of a job. This class stands for one replica, which has nobody to communicate with.

    A replica is a whole job: it has all parameters, and computes some rows of the global batch. A subclass of several
    replicas (``plugins/replicas``) connects the ranks of the same number in all of them. Its collectives do not raise:
    after the first error of a step they do nothing, and ``vote`` discards the step.
    """

    connected = False
    """Whether gradients are summed over other replicas, too."""

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce ``tensor`` in place over the ranks of this number in all replicas. Collective over them."""

    def sum_loss(self, loss: Loss) -> Loss:
        """The sum of ``loss``, a ``TokenLoss``, over these ranks. Collective over them."""
        return loss

    def vote(self) -> None:
        """Called when all collectives of a step over replicas are done, before anything changes. Collective.

        Raises:
            StepDiscarded: on all ranks of this replica, if a collective of any of them has failed.
        """
