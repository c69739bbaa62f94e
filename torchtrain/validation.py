"""The loss on data that are not trained on: the same tokens and the same number on every layout."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.config.schema import Validation
from torchtrain.datasets.loader import Batch, Loader
from torchtrain.errors import DataError
from torchtrain.log import logger
from torchtrain.loss import IGNORE_INDEX, exact_nats
from torchtrain.parallelisms.microbatches import Microbatches
from torchtrain.parallelisms.parallel_model import ParallelModel


class Validator:
    """Takes the loss on each of ``loaders``, from its beginning to its end, every so many steps.

    Args:
        loaders: by label; they end, and mask what is left of the last rows.
        token_bytes: for each token the bytes of text it stands for.
        report: called with the step and the results by name, on all ranks.
        averaged: a context in which the model has its averaged weights.
        must_stop: asked before each batch, on all ranks, which get the same answer: whether to end without results.
        watch: a context, named, for what should not take long: each batch.
    """

    def __init__(
        self,
        config: Validation,
        loaders: Mapping[str, Loader],
        model: ParallelModel,
        microbatches: Microbatches,
        token_bytes: Sequence[int],
        report: Callable[[int, dict[str, float]], None],
        *,
        averaged: Callable[[], AbstractContextManager[None]] = nullcontext,
        must_stop: Callable[[], bool],
        watch: Callable[[str], AbstractContextManager[None]],
    ):
        self.config = config
        self.loaders = loaders
        self.beginnings = {label: loader.state_dict() for label, loader in loaders.items()}
        self.model = model
        self.microbatches = microbatches
        self.token_bytes = torch.tensor(token_bytes, device=model.device)
        self.report = report
        self.averaged = averaged
        self.must_stop = must_stop
        self.watch = watch

    def maybe_run(self, step: int, last: bool = False) -> None:
        """Validate after ``step`` if it is a multiple of ``config.interval``, or the ``last`` of the run."""
        if not (self.loaders and (last or step % self.config.interval == 0)):
            return
        results: dict[str, float] = {}
        for prefix, weights in (("validation", "trained"), ("validation_ema", "ema")):
            if self.config.weights not in (weights, "both"):
                continue
            with self.averaged() if weights == "ema" else nullcontext():
                found = self._all_results(step, prefix)
            if found is None:
                logger.info("validation after step %d is cut short: asked to stop", step)
                return
            results |= found
        self.report(step, results)

    def _all_results(self, step: int, prefix: str) -> dict[str, float] | None:
        """With the weights that the model has now, of all sources together and of each. None: must stop."""
        sums: dict[str, Tensor] = {}
        for label in self.loaders:
            found = self._sums(label, f"validation after step {step}")
            if found is None:
                return None
            sums[label] = found
        results = _results(torch.stack(list(sums.values())).sum(dim=0), prefix, "")
        if len(sums) > 1:
            for label, own in sums.items():
                results |= _results(own, prefix, f"_{label}")
        return results

    @torch.no_grad()
    def _sums(self, label: str, what: str) -> Tensor | None:
        """Loss in nats, tokens and bytes of a source, summed over all ranks: float64 (3,). None: must stop."""
        loader = self.loaders[label]
        loader.load_state_dict(self.beginnings[label])
        sums = torch.zeros(3, dtype=torch.float64, device=self.model.device)
        number = 0
        while number != self.config.steps:
            with self.watch(what):
                if self.must_stop():
                    loader.close()
                    return None
                batch = next(loader, None)
                if batch is None:
                    break
                sums += self._sums_of(batch)
                number += 1
        loader.close()
        dist.all_reduce(sums, group=self.model.mesh.loss.get_group())
        return sums

    def _sums_of(self, batch: Batch) -> Tensor:
        """The part of this rank, for one batch."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.model.device)
        for microbatch in self.microbatches(batch):
            loss = self.model.forward(microbatch)
            if not self.model.has_loss:
                continue
            labels = microbatch.labels
            known = labels != IGNORE_INDEX
            size = (self.token_bytes[labels.clamp(min=0)] * known).sum()
            sums += torch.stack((exact_nats(loss), known.sum().double(), size.double()))
        return sums


def _results(sums: Tensor, prefix: str, suffix: str) -> dict[str, float]:
    """What a sum of losses, tokens and bytes says: the mean by token, and bits per byte of the text."""
    nats, tokens, size = sums.tolist()
    if tokens == 0:
        raise DataError("validation: a source has not a single document with text; correct the [validation] section")
    loss = nats / tokens
    return {
        f"{prefix}_loss{suffix}": loss,
        f"{prefix}_perplexity{suffix}": math.exp(loss),
        f"{prefix}_bits_per_byte{suffix}": nats / math.log(2) / max(size, 1),
        f"{prefix}_tokens{suffix}": int(tokens),
    }
