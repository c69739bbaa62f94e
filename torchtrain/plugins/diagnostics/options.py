"""The section [diagnostics]."""

from dataclasses import dataclass
from typing import Annotated

from torchtrain.config.section import FINITE, CountOrZero, Section, at_least


@dataclass(frozen=True)
class DiagnosticsConfig(Section, name="diagnostics"):
    """Norms by layer, losses by source, slow ranks."""

    changes_run = False

    norms_freq: CountOrZero = 0
    """How often, in steps, to log the L2 norms of each layer's gradient (before clipping), weights and update, the root
    mean square of each block's output, and without compile.enable the root mean square and maximum of its attention
    logits. 0: never. Such a step holds a copy of the parameters' shards. Reports of bad steps name the layer that left
    its usual range first."""
    enable_loss_by_source: bool = False
    """Log the training loss and the tokens of each source of [data], of all steps since the line before."""
    straggler_freq: CountOrZero = 100
    """How often to look for stragglers, ranks that delay the others, in steps. 0: never."""
    straggler_factor: Annotated[float, at_least(1), FINITE] = 2.0
    """A rank is a straggler if its wait for data or its computation takes more than this many times the median of all
    ranks."""
