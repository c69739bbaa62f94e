"""Train on one rank and on each layout, and compare."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.errors import ConfigError, TorchtrainError
from torchtrain.models.spec import Decoder, DecoderConfig, build_model
from torchtrain.parallelisms.check import check_layout
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.plugins.comparison.fingerprint_recorder import tensor_shapes
from torchtrain.plugins.exact_sums.grain_checks import check_grains
from torchtrain.plugins.exact_sums.options import GrainsConfig
from torchtrain.plugins.verify_layouts.bits import MICROBATCH_ROWS, compare_bits, train_and_compare_bits
from torchtrain.plugins.verify_layouts.layouts import Layout
from torchtrain.plugins.verify_layouts.rank import train_and_record
from torchtrain.plugins.verify_layouts.ranks import RankError, Ranks
from torchtrain.plugins.verify_layouts.small_config import without_chunks
from torchtrain.plugins.verify_layouts.source_lines import SourceLine, source_line
from torchtrain.plugins.verify_layouts.verdict import Comparison, compare_records, meaning_of_factor


@dataclass(frozen=True)
class Result:
    """The result of one layout."""

    layout: Layout
    verdict: str
    """same, differs, rejected (the config or the model does not support it), or fails."""
    comparison: Comparison | None = None
    line: SourceLine | None = None
    """The line of the model that computes the tensor that differs."""
    meaning: str = ""
    """What the factor of the difference usually means."""
    error: str = ""
    """Why it was rejected, or has failed."""
    where: str = ""
    """The place of the error in the source."""
    in_float64: Comparison | None = None
    """Of a layout whose bits differ: what a comparison in float64 says."""


Compare = Callable[[Layout], Comparison]
"""Trains on a layout, and compares with one rank. Raises TorchtrainError if it is not supported, or RankError."""


def verify(
    config: JobConfig,
    model_config: DecoderConfig,
    layouts: Sequence[Layout],
    timeout_seconds: float,
    bits: JobConfig | None = None,
) -> Iterator[Result]:
    """Yield the result of each layout.

    Args:
        config, model_config: of ``verified_config``.
        bits: the config of ``bits_config``, to compare bits; a layout whose bits differ is then compared in float64.

    Raises:
        ConfigError: the model cannot be trained on one rank.
    """
    with torch.device("meta"):
        model = build_model(model_config)
    with Ranks(config.job.import_, timeout_seconds) as ranks, tempfile.TemporaryDirectory() as folder:
        in_float64 = cache(partial(_compare_in_float64, ranks, config, model))
        of_bits = None if bits is None else _compare_bits(ranks, bits, model, Path(folder) / "reference.pt")
        compare = in_float64() if of_bits is None else of_bits
        for layout in layouts:
            try:
                comparison = compare(layout)
            except RankError as error:
                yield Result(layout, "fails", error=str(error), where=error.where)
                continue
            except TorchtrainError as error:
                yield Result(layout, "rejected", error=str(error))
                continue
            difference = comparison.difference
            if difference is None:
                yield Result(layout, "same", comparison)
                continue
            factor = difference.factor
            meaning = "" if factor is None else meaning_of_factor(factor, layout, difference.kind)
            line = source_line(model, difference.key)
            second = None if of_bits is None else in_float64()(layout)
            yield Result(layout, "differs", comparison, line, meaning, in_float64=second)


def _compare_in_float64(ranks: Ranks, config: JobConfig, model: Decoder) -> Compare:
    """Train on one rank, and return what compares a layout with it."""
    parameters, order = dict(model.named_parameters()), list(tensor_shapes(model.config))
    one_rank = Layout().apply(without_chunks(config))
    (reference,) = _on_one_rank(ranks, train_and_record, one_rank, model.config, None, True)

    def compare(layout: Layout) -> Comparison:
        own = _checked(layout, layout.apply(config), model.config)

        def records(activations: bool) -> Comparison:
            found = ranks.call(layout.ranks, train_and_record, own, model.config, reference.constant, activations)
            return compare_records(reference, found, order, parameters)

        first = records(False)
        if first.difference is None:
            return first
        second = records(True)  # the activations tell where it begins
        return first if second.difference is None else second

    return compare


def _compare_bits(ranks: Ranks, config: JobConfig, model: Decoder, file: Path) -> Compare:
    """Train on one rank, and return what compares a layout with it. ``file``: its tensors are stored there."""
    parameters, order = dict(model.named_parameters()), list(tensor_shapes(model.config))
    arguments = Layout().apply(config, microbatch_rows=MICROBATCH_ROWS), model.config, file
    (reference,) = _on_one_rank(ranks, train_and_compare_bits, *arguments, None)

    def compare(layout: Layout) -> Comparison:
        own = layout.apply(config, microbatch_rows=MICROBATCH_ROWS)
        resolved, dims = resolve_layout(own, model.config, layout.ranks)
        grains = section_of(config, GrainsConfig)
        check_grains(grains.tensor, grains.context, resolved, torch.device("cpu"), dims, model.config)
        own = _checked(layout, own, model.config)
        records = ranks.call(layout.ranks, train_and_compare_bits, own, model.config, file, reference.constant)
        return compare_bits(records, order, parameters)

    return compare


def _on_one_rank(ranks: Ranks, function: Callable[..., Any], *args: Any) -> list[Any]:
    try:
        return ranks.call(1, function, *args)
    except RankError as error:
        raise ConfigError(f"the model fails on one rank: {error} ({error.where})") from None


def _checked(layout: Layout, config: JobConfig, model: DecoderConfig) -> JobConfig:
    """``config``, if it supports the layout, else ConfigError is raised."""
    resolved, dims = resolve_layout(config, model, layout.ranks)
    check_layout(resolved, torch.device("cpu"), dims, model)
    return config
