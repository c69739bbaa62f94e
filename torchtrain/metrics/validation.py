"""Validation: layout-independent loss on held-out data, and other results that hooks compute with it."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.datasets.dataloader import DataLoader
from torchtrain.errors import DataError
from torchtrain.labels import IGNORE_INDEX
from torchtrain.logging import logger
from torchtrain.metrics.hooks import Hooks, Watched
from torchtrain.metrics.options import ValidationConfig
from torchtrain.models.loss import exact_nats
from torchtrain.parallelisms.microbatches import Microbatch, Microbatches
from torchtrain.parallelisms.parallel_model import ParallelModel

LARGEST_LOSS = 709  # the exponential of larger numbers overflows


class _Stopped(Exception):
    """The run was asked to stop during a validation."""


@dataclass(eq=False)
class Validator:
    """Computes the loss on all data of each of ``loaders``, every ``config.interval`` steps, then asks ``hooks``."""

    config: ValidationConfig
    loaders: Mapping[str, DataLoader]  # by label; finite, and built with drop_last=False
    model: ParallelModel
    microbatches: Microbatches
    report: Callable[[int, dict[str, Any]], None]  # called with the step and the results by name, on all ranks
    _: KW_ONLY
    must_stop: Callable[[], bool]  # called before each batch; must return the same on all ranks
    watch: Callable[[str], AbstractContextManager[None]]  # context of each batch: the watchdog
    averaged: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context manager in which the model has its averaged weights."""
    hooks: Hooks = field(default_factory=Hooks)

    def __post_init__(self) -> None:
        self.beginnings = {label: loader.state_dict() for label, loader in self.loaders.items()}

    def held_out(self, label: str, watched: Watched) -> Iterator[Microbatch]:
        """This rank's part of the data of a source, up to ``validation.steps`` batches from the beginning.

        For ``Hook.validate``, which passes its ``watched``. Row r of the global batch number b is window b *
        ``training.global_batch_size`` + r of the source, a data-parallel rank has consecutive rows, and with context
        parallelism the part of each that ``context_parallel.local_sequence`` takes. A hook may stop early if all ranks
        stop after the same number of microbatches.
        """
        loader, number = self.loaders[label], 0
        loader.load_state_dict(self.beginnings[label])
        with closing(loader):
            while number != self.config.steps:
                with watched():  # also the caller's work on the microbatches of the batch
                    batch = next(loader, None)
                    if batch is None:
                        return
                    yield from self.microbatches(batch)
                number += 1

    def maybe_run(self, step: int, last: bool = False) -> None:
        """Validate after ``step`` if it is a multiple of ``config.interval``, or the ``last`` step of the run.

        If the run is asked to stop during the validation, nothing is reported.
        """
        if not (self.loaders and (last or step % self.config.interval == 0)):
            return
        what = f"validation after step {step}"
        results: dict[str, Any] = {}
        logger.info("%s begins: %s", what, ", ".join(self.loaders))
        try:
            if self.config.weights in ("trained", "both"):
                results |= self._all_results(step, what, "validation")
            if self.config.weights in ("ema", "both"):
                with self.averaged():
                    results |= self._all_results(step, what, "validation_ema")
        except _Stopped:
            logger.info("%s is aborted: the run was asked to stop", what)
        else:
            self.report(step, results)

    def _all_results(self, step: int, what: str, prefix: str) -> dict[str, Any]:
        """Results of all sources together, of each source and of hooks, with the current weights of the model."""
        sums = {label: self._sums(label, what) for label in self.loaders}
        results: dict[str, Any] = results_of(torch.stack(list(sums.values())).sum(dim=0), prefix, "")
        if len(sums) > 1:
            for label, own in sums.items():
                results |= results_of(own, prefix, f"_{label}")
        for hook in self.hooks.all:
            found = hook.validate(step, prefix, partial(self._watched, what))
            _check_results(type(hook).__name__, found, prefix, results)
            results |= found
        return results

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        with self.watch(what):
            if self.must_stop():
                raise _Stopped
            yield

    @torch.no_grad()
    def _sums(self, label: str, what: str) -> Tensor:
        """Sums over all ranks of loss in nats, tokens, and bytes of a source: float64, shape (3,)."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.model.device)
        watched = partial(self._watched, what)
        for microbatch in self.held_out(label, watched):
            loss = self.model.forward(microbatch)
            if not self.model.has_loss:
                continue
            known = microbatch.labels != IGNORE_INDEX
            assert microbatch.label_bytes is not None
            sums += torch.stack((exact_nats(loss), known.sum().double(), (microbatch.label_bytes * known).sum()))
        dist.all_reduce(sums, group=self.model.mesh.loss.get_group())
        return sums


def _check_results(hook: str, found: Mapping[str, Any], prefix: str, others: Mapping[str, Any]) -> None:
    """Raise TypeError if a result of the hook of this name is not of the kinds that ``Hook.validate`` returns.

    Otherwise it would only be noticed when the line is written, which then has no loss either.
    """
    for name, value in found.items():
        is_right = isinstance(value, list) if name.endswith("_samples") else isinstance(value, int | float)
        if not is_right:
            raise TypeError(f"{hook}.validate returned a {type(value).__name__} as {name}: give a number")
        if name in others or not name.startswith(f"{prefix}_"):
            raise TypeError(f"{hook}.validate returned {name}: begin names with {prefix}_, each its own")


def perplexity_of(loss: float) -> float:
    """The exponential of ``loss``, in nats; infinite, and no OverflowError, where it is too large for a float."""
    return math.inf if loss > LARGEST_LOSS else math.exp(loss)


def results_of(sums: Tensor, prefix: str, suffix: str) -> dict[str, float]:
    """Loss per token, perplexity and bits per byte, from sums of loss in nats, tokens, and bytes."""
    nats, tokens, size = sums.tolist()
    if tokens == 0:
        raise DataError("validation: a source has no document with text; correct the [validation] section")
    loss = nats / tokens
    return {
        f"{prefix}_loss{suffix}": loss,
        f"{prefix}_perplexity{suffix}": perplexity_of(loss),
        f"{prefix}_bits_per_byte{suffix}": nats / math.log(2) / max(size, 1),
        f"{prefix}_tokens{suffix}": int(tokens),
    }
