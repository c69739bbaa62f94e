"""Validation: layout-independent loss on held-out data, and other results that are computed with it."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.config.registry import VALIDATION_PARTS
from torchtrain.config.schema import JobConfig, ValidationConfig
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import DataError
from torchtrain.labels import IGNORE_INDEX
from torchtrain.logging import logger
from torchtrain.models.loss import exact_nats
from torchtrain.parallelisms.microbatches import Microbatch, Microbatches
from torchtrain.parallelisms.parallel_model import ParallelModel

LARGEST_LOSS = 709  # the exponential of larger numbers overflows


class _Stopped(Exception):
    """The run was asked to stop during a validation."""


Watched = Callable[[], AbstractContextManager[None]]


class ValidationPart(Protocol):
    """What a validation computes beside the loss: the result of ``ValidationPartFactory.build``."""

    def __call__(self, step: int, prefix: str, watched: Watched) -> Mapping[str, Any]:
        """Compute results after ``step``, with the current weights of the model, which must not change. Collective.

        Args:
            prefix: how the names of the results begin, such as ``validation``.
            watched: context manager for each part of the work that takes up to seconds, such as a forward. It starts
                the timeout again, and ends the validation if the run is asked to stop.

        Returns:
            Numbers by names of their own that begin with ``prefix`` and "_"; under a name that ends in ``_samples``, a
            list of tables with ``prompt`` and ``text``. Only those of rank 0 are written. Empty, where nothing is due:
            an interval of the part's own counts validations that there are, the last one after
            ``training.steps``.
        """


@dataclass(frozen=True)
class ValidationContext:
    """What a part of validation is built from."""

    config: JobConfig
    tokenizer: Tokenizer
    model: ParallelModel
    """``forward`` computes the loss of a microbatch; ``forward_with_head`` what needs the logits or hidden states."""
    group: dist.ProcessGroup
    """A gloo group of all ranks."""
    held_out: Mapping[str, Callable[[Watched], Iterator[Microbatch]]]
    """By the label of each source, a function that returns this rank's part of its data, up to ``validation.steps``
    batches from the beginning. It takes the argument ``watched`` of the part. Row r of the global batch number b is
    window b * ``training.global_batch_size`` + r of the source, a data-parallel rank has consecutive rows, and with
    context parallelism the part of each that ``context_parallel.local_sequence`` takes. A part may stop early if all
    ranks stop after the same number of microbatches."""


class ValidationPartFactory:
    """Base class of what builds a part of validation if the config asks for it; a subclass is registered in
    ``config.registry.VALIDATION_PARTS``. It is asked only if the run validates (``JobConfig.validates``).
    """

    @staticmethod
    def check(config: JobConfig, tokenizer: Tokenizer) -> None:
        """Raise ConfigError if the config asks for what cannot be computed with ``tokenizer``. Called on each rank,
        before all work. What depends on the options and the layout alone, a section of the plugin checks."""

    @staticmethod
    def check_data(config: JobConfig) -> None:
        """Raise ConfigError if data of the part cannot be loaded. Called on rank 0, for a later part of the run."""

    @staticmethod
    @abstractmethod
    def build(context: ValidationContext) -> ValidationPart | None:
        """The part, or None. Collective over ``context.group``."""


def check_validation_parts(config: JobConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if a part of validation cannot be computed."""
    for name in VALIDATION_PARTS:
        VALIDATION_PARTS[name].check(config, tokenizer)


def check_data_of_validation_parts(config: JobConfig) -> None:
    """Raise ConfigError if data of a part of validation cannot be loaded."""
    for name in VALIDATION_PARTS if config.validates else ():
        VALIDATION_PARTS[name].check_data(config)


def build_validation_parts(context: ValidationContext) -> dict[str, ValidationPart]:
    """The parts that the config asks for, by name. Collective over ``context.group``."""
    built = {name: VALIDATION_PARTS[name].build(context) for name in VALIDATION_PARTS}
    return {name: part for name, part in built.items() if part is not None}


def read_microbatches(
    loader: DataLoader, beginning: dict[str, Any], steps: int, microbatches: Microbatches, watched: Watched
) -> Iterator[Microbatch]:
    """The microbatches of up to ``steps`` batches (-1: of all) from the ``beginning`` of ``loader``.

    The caller's work on the microbatches of a batch is in ``watched``, too.
    """
    loader.load_state_dict(beginning)
    number = 0
    with closing(loader):
        while number != steps:
            with watched():
                batch = next(loader, None)
                if batch is None:
                    return
                yield from microbatches(batch)
            number += 1


@dataclass(eq=False)
class Validator:
    """Computes the loss on all data of each of ``loaders``, every ``config.interval`` steps, then runs ``parts``."""

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
    parts: Mapping[str, ValidationPart] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.beginnings = {label: loader.state_dict() for label, loader in self.loaders.items()}

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
        """Results of all sources together, of each source and of the parts, with the current weights of the model."""
        sums = {label: self._sums(loader, self.beginnings[label], what) for label, loader in self.loaders.items()}
        results: dict[str, Any] = results_of(torch.stack(list(sums.values())).sum(dim=0), prefix, "")
        if len(sums) > 1:
            for label, own in sums.items():
                results |= results_of(own, prefix, f"_{label}")
        for name, part in self.parts.items():
            found = part(step, prefix, partial(self._watched, what))
            _check_results(name, found, prefix, results)
            results |= found
        return results

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        with self.watch(what):
            if self.must_stop():
                raise _Stopped
            yield

    @torch.no_grad()
    def _sums(self, loader: DataLoader, beginning: dict[str, Any], what: str) -> Tensor:
        """Sums over all ranks of loss in nats, tokens, and bytes of a source: float64, shape (3,)."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.model.device)
        watched = partial(self._watched, what)
        for microbatch in read_microbatches(loader, beginning, self.config.steps, self.microbatches, watched):
            loss = self.model.forward(microbatch)
            if not self.model.has_loss:
                continue
            known = microbatch.labels != IGNORE_INDEX
            assert microbatch.label_bytes is not None
            sums += torch.stack((exact_nats(loss), known.sum().double(), (microbatch.label_bytes * known).sum()))
        dist.all_reduce(sums, group=self.model.mesh.loss.get_group())
        return sums


def _check_results(part: str, found: Mapping[str, Any], prefix: str, others: Mapping[str, Any]) -> None:
    """Raise TypeError if a result of the part of this name is not of the kinds that ``ValidationPart`` returns.

    Otherwise it would only be noticed when the line is written, which then has no loss either.
    """
    for name, value in found.items():
        is_right = isinstance(value, list) if name.endswith("_samples") else isinstance(value, int | float)
        if not is_right:
            raise TypeError(f"the validation part {part!r} returned a {type(value).__name__} as {name}: give a number")
        if name in others or not name.startswith(f"{prefix}_"):
            raise TypeError(f"the validation part {part!r} returned {name}: begin names with {prefix}_, each its own")


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
