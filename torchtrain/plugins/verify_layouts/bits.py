"""Verify by bits: with grains (docs/parallelism.md), each layout has the bits of one rank, in the config's dtype."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.cpu.build import build_cpu_model
from torchtrain.datasets.dataloader import Batch
from torchtrain.distributed.mesh import Mesh, local
from torchtrain.errors import ConfigError
from torchtrain.metrics.hooks import Hook
from torchtrain.models.loss import TokenLoss
from torchtrain.models.parameters import local_block
from torchtrain.models.spec import DecoderConfig
from torchtrain.parallelisms.parallel_model import ParallelModel
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.plugins.comparison.fingerprint_recorder import LOSS
from torchtrain.plugins.exact_sums.grain_checks import check_grains
from torchtrain.plugins.exact_sums.options import ExactSumsConfig, GrainsConfig
from torchtrain.plugins.verify_layouts.layouts import Layout
from torchtrain.plugins.verify_layouts.rank import initialize_with_noise, named_parameters, train
from torchtrain.plugins.verify_layouts.verdict import GRAD_NORM, Comparison, Difference, factor_of, kind_of

GRAINS = ((4, 4), (2, 4), (4, 1), (1, 4), (2, 1))
"""Numbers of tensor grains and of chunks to try: the first ones allow most layouts, and more would cost more."""
MICROBATCH_ROWS = 2
RATIOS = 256  # of different elements, from which a factor is found


@dataclass(frozen=True)
class BitDifference:
    """Where the part of a tensor that a rank has differs from that of one rank."""

    count: int
    elements: int
    distance: float
    """The largest difference, relative to the largest element."""
    ratios: Sequence[float]
    """Some of the elements, divided by what they should be."""


@dataclass
class BitRecord:
    """What one rank has compared, by step."""

    steps: list[dict[str, BitDifference | None]] = field(default_factory=list)
    """By key; None: it has the same bits."""
    constant: frozenset[str] = frozenset()
    """See ``RankRecord``."""


def bits_config(config: JobConfig, of_user: JobConfig, model: DecoderConfig) -> tuple[JobConfig, str]:
    """The config that is trained, and what it replaces, as text.

    Args:
        config: that of ``verified_config``, for float64.
        of_user: that of the user.

    Raises:
        ConfigError: no number of grains fits the model.
    """
    training = replace(
        config.training,
        mixed_precision_param=of_user.training.mixed_precision_param,
        mixed_precision_reduce="float32",
        sums="exact",
        loss_chunk_tokens=of_user.training.loss_chunk_tokens,
    )
    optimizer = replace(config.optimizer, state_dtype=of_user.optimizer.state_dtype)
    layout = replace(config.parallelism, fsdp_gradient_accumulation="sharded", pipeline_parallel_schedule="1F1B")
    config = replace(config, training=training, optimizer=optimizer, parallelism=layout)

    def with_grains(options: GrainsConfig) -> JobConfig:
        found = replace(
            config, plugins={**config.plugins, "grains": options, "exact_sums": ExactSumsConfig("all_to_all")}
        )
        resolved, dims = resolve_layout(Layout().apply(found, microbatch_rows=MICROBATCH_ROWS), model, 1)
        check_grains(options.tensor, options.context, resolved, torch.device("cpu"), dims, model)
        return found

    given = section_of(of_user, GrainsConfig)
    errors = []
    for options in [given] if given.enabled else [GrainsConfig(*pair) for pair in GRAINS]:
        try:
            found = with_grains(options)
        except ConfigError as error:
            errors.append(error)
            continue
        return found, f'training.sums = "exact"; grains.tensor = {options.tensor}; grains.context = {options.context}'
    raise ConfigError(f"--bits needs grains, which this model does not support: {errors[0]}")


class BitHook(Hook):
    """Compares what a rank has with the tensors of one rank in ``reference``, a file; on one rank it writes them."""

    def __init__(self, model: ParallelModel, reference: Path, *, write: bool) -> None:
        self.model = model
        self.file, self.write = reference, write
        self.parameters = named_parameters(model)
        self.reference: list[dict[str, Tensor]] = [] if write else torch.load(reference, mmap=True)
        self.found: dict[str, BitDifference | None] = {}
        self.record = BitRecord()

    def add(self, key: str, tensor: Tensor) -> None:
        """Compare ``tensor``, a DTensor of any layout."""
        block, spans = local_block(tensor)
        block = local(block).detach()
        if self.write:
            self.reference[-1][key] = block.clone()
        if block.numel():
            self.found[key] = bit_difference(block, self.reference[len(self.record.steps)][key][spans])

    def before_forward_backward(self, batch: Batch) -> None:  # noqa: ARG002
        self.found = {}
        if self.write:
            del self.reference[len(self.record.steps) :]  # of an attempt that exact sums repeat
            self.reference.append({})
        for name, parameter in self.parameters.items():
            self.add(name, parameter)

    def after_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.add(f"{name} gradient", parameter.grad)

    def after_update(self) -> None:
        for name, parameter in self.parameters.items():
            self.add(f"{name} update", parameter)

    def after_step(self, step: int, batch: Batch, loss: TokenLoss, grad_norm: Tensor) -> None:  # noqa: ARG002
        total = loss.total.clone()
        dist.all_reduce(total, group=self.model.mesh.loss.get_group())
        self.add(LOSS, total)
        self.add(GRAD_NORM, grad_norm)
        self.record.steps.append(self.found)
        if self.write:
            torch.save(self.reference, self.file)


def bit_difference(ours: Tensor, theirs: Tensor) -> BitDifference | None:
    """How ``ours`` differs from ``theirs``; None if all bits are equal, also those of NaN and of -0."""
    if ours.dtype != theirs.dtype:
        return BitDifference(ours.numel(), ours.numel(), math.inf, ())
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.itemsize]
    wrong = ours.contiguous().view(kind) != theirs.contiguous().view(kind)
    if not wrong.any():
        return None
    x, y = ours.double(), theirs.double()
    distance = ((x - y).abs().max() / y.abs().max().clamp(min=1e-150)).item()
    large = y.abs() > 0.1 * y.abs().max()
    ratios = (x[large] / y[large])[:RATIOS].tolist()
    return BitDifference(int(wrong.sum()), ours.numel(), math.inf if math.isnan(distance) else distance, ratios)


def train_and_compare_bits(
    config: JobConfig, model_config: DecoderConfig, reference: Path, constant: frozenset[str] | None
) -> BitRecord:
    """Train ``config.training.steps`` steps on this process group, and compare all results with those of one rank.

    Args:
        config: the result of ``Layout.apply``, with ``MICROBATCH_ROWS``.
        reference: a file, which one rank writes.
        constant: the names of parameters to add noise to; None on one rank, which finds them.
    """
    torch.set_default_dtype(torch.float32)
    config, dims = resolve_layout(config, model_config, dist.get_world_size())
    model = build_cpu_model(model_config, Mesh(torch.device("cpu"), dims), torch.device("cpu"), config)
    hook = BitHook(model, reference, write=constant is None)
    hook.record.constant = initialize_with_noise(model, config.training.seed, constant)
    train(config, model_config, model, hook)
    return hook.record


def compare_bits(records: Sequence[BitRecord], order: Sequence[str], parameters: Mapping[str, Tensor]) -> Comparison:
    """What the ranks of a layout have found; ``order`` and ``parameters`` as for ``compare_records``."""
    tensors = 0
    for step in range(1, len(records[0].steps) + 1):
        for key in _with_norm(order):
            found = {rank: record.steps[step - 1].get(key) for rank, record in enumerate(records)}
            if not any(key in record.steps[step - 1] for record in records):
                continue
            tensors += 1
            wrong = {rank: difference for rank, difference in found.items() if difference is not None}
            if wrong:
                return Comparison(_difference(step, key, wrong, parameters), step, tensors, 0.0, is_bitwise=True)
    return Comparison(None, len(records[0].steps), tensors, 0.0, is_bitwise=True)


def _with_norm(order: Sequence[str]) -> Iterator[str]:
    """The keys, with the gradient norm between the gradients and the updates."""
    yield from (key for key in order if not key.endswith(" update"))
    yield GRAD_NORM
    yield from (key for key in order if key.endswith(" update"))


def _difference(
    step: int, key: str, wrong: Mapping[int, BitDifference], parameters: Mapping[str, Tensor]
) -> Difference:
    count, elements = (sum(getattr(of, name) for of in wrong.values()) for name in ("count", "elements"))
    factor = factor_of(np.concatenate([np.array(of.ratios) for of in wrong.values()]))
    note = f"{count:,} of {elements:,} elements there" if elements > len(wrong) else ""
    kind = GRAD_NORM if key == GRAD_NORM else kind_of(key, parameters)
    distance = max(of.distance for of in wrong.values())
    return Difference(step, key, kind, distance, tuple(wrong), factor, note)
