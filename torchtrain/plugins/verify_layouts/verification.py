"""Train on one rank and on each layout, and compare."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torchtrain.config.schema import JobConfig
from torchtrain.errors import ConfigError, TorchtrainError
from torchtrain.models.spec import DecoderConfig, build_model
from torchtrain.parallelisms.check import check_layout
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.plugins.comparison.fingerprint_recorder import tensor_shapes
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


def verify(
    config: JobConfig, model_config: DecoderConfig, layouts: Sequence[Layout], timeout_seconds: float
) -> Iterator[Result]:
    """Yield the result of each layout.

    Args:
        config, model_config: of ``verified_config``.

    Raises:
        ConfigError: the model cannot be trained on one rank.
    """
    ranks = Ranks(config.job.import_, timeout_seconds)
    with torch.device("meta"):
        model = build_model(model_config)
    parameters = dict(model.named_parameters())
    order = list(tensor_shapes(model_config))
    try:
        (reference,) = ranks.call(1, train_and_record, Layout().apply(without_chunks(config)), model_config, None)
    except RankError as error:
        raise ConfigError(f"the model fails on one rank: {error} ({error.where})") from None
    for layout in layouts:
        own = layout.apply(config)
        try:
            resolved, dims = resolve_layout(own, model_config, layout.ranks)
            check_layout(resolved, torch.device("cpu"), dims, model_config)
            records = ranks.call(layout.ranks, train_and_record, own, model_config, reference.constant)
        except RankError as error:
            yield Result(layout, "fails", error=str(error), where=error.where)
            continue
        except TorchtrainError as error:
            yield Result(layout, "rejected", error=str(error))
            continue
        comparison = compare_records(reference, records, order, parameters)
        difference = comparison.difference
        if difference is None:
            yield Result(layout, "same", comparison)
            continue
        factor = difference.factor
        meaning = "" if factor is None else meaning_of_factor(factor, layout, difference.kind)
        yield Result(layout, "differs", comparison, source_line(model, difference.key), meaning)
