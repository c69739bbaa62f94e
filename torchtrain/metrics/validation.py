"""The loss on data that are not trained on: the same tokens and the same number on every layout."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.config.schema import ValidationConfig
from torchtrain.datasets.loader import Batch, DataLoader
from torchtrain.errors import DataError
from torchtrain.logging import logger
from torchtrain.models.loss import IGNORE_INDEX, exact_nats
from torchtrain.parallelisms.microbatches import Microbatches
from torchtrain.parallelisms.parallel_model import ParallelModel

LARGEST_LOSS = 709  # whose exponential is a float


class _Stopped(Exception):
    """The run was asked to stop, in the middle of a validation."""


@dataclass(eq=False)
class Validator:
    """Takes the loss on each of ``loaders``, from its beginning to its end, every so many steps."""

    config: ValidationConfig
    loaders: Mapping[str, DataLoader]  # by label; they end, and mask what is left of the last rows
    model: ParallelModel
    microbatches: Microbatches
    report: Callable[[int, dict[str, float]], None]  # called with the step and the results by name, on all ranks
    _: KW_ONLY
    must_stop: Callable[[], bool]  # asked before each batch; all ranks get the same answer
    watch: Callable[[str], AbstractContextManager[None]]  # a context for each batch, which should not take long
    averaged: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context in which the model has its averaged weights."""

    def __post_init__(self) -> None:
        self.beginnings = {label: loader.state_dict() for label, loader in self.loaders.items()}

    def maybe_run(self, step: int, last: bool = False) -> None:
        """Validate after ``step`` if it is a multiple of ``config.interval``, or the ``last`` of the run.

        Nothing is reported where the run is asked to stop before the end.
        """
        if not (self.loaders and (last or step % self.config.interval == 0)):
            return
        what = f"validation after step {step}"
        results: dict[str, float] = {}
        try:
            if self.config.weights in ("trained", "both"):
                results |= self._all_results(what, "validation")
            if self.config.weights in ("ema", "both"):
                with self.averaged():
                    results |= self._all_results(what, "validation_ema")
        except _Stopped:
            logger.info("%s is cut short: asked to stop", what)
        else:
            self.report(step, results)

    def _all_results(self, what: str, prefix: str) -> dict[str, float]:
        """Of all sources together and of each, with the weights that the model has now."""
        sums = {label: self._sums(loader, self.beginnings[label], what) for label, loader in self.loaders.items()}
        results = results_of(torch.stack(list(sums.values())).sum(dim=0), prefix, "")
        if len(sums) > 1:
            for label, own in sums.items():
                results |= results_of(own, prefix, f"_{label}")
        return results

    @torch.no_grad()
    def _sums(self, loader: DataLoader, beginning: dict[str, Any], what: str) -> Tensor:
        """Loss in nats, tokens and bytes of a source, summed over all ranks: float64 (3,)."""
        loader.load_state_dict(beginning)
        sums = torch.zeros(3, dtype=torch.float64, device=self.model.device)
        number = 0
        with closing(loader):
            while number != self.config.steps:
                with self.watch(what):
                    if self.must_stop():
                        raise _Stopped
                    batch = next(loader, None)
                    if batch is None:
                        break
                    sums += self._sums_of(batch)
                    number += 1
        dist.all_reduce(sums, group=self.model.mesh.loss.get_group())
        return sums

    def _sums_of(self, batch: Batch) -> Tensor:
        """The part of this rank, for one batch."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.model.device)
        for microbatch in self.microbatches(batch):
            loss = self.model.forward(microbatch)
            if not self.model.has_loss:
                continue
            known = microbatch.labels != IGNORE_INDEX
            assert microbatch.label_bytes is not None
            sums += torch.stack((exact_nats(loss), known.sum().double(), (microbatch.label_bytes * known).sum()))
        return sums


def results_of(sums: Tensor, prefix: str, suffix: str) -> dict[str, float]:
    """What a sum of losses, tokens and bytes says: the mean by token, and bits per byte of the text."""
    nats, tokens, size = sums.tolist()
    if tokens == 0:
        raise DataError("validation: a source has not a single document with text; correct the [validation] section")
    loss = nats / tokens
    return {
        f"{prefix}_loss{suffix}": loss,
        f"{prefix}_perplexity{suffix}": math.inf if loss > LARGEST_LOSS else math.exp(loss),
        f"{prefix}_bits_per_byte{suffix}": nats / math.log(2) / max(size, 1),
        f"{prefix}_tokens{suffix}": int(tokens),
    }
