"""Rehearsals of a config on a fake GPU, and what they show: run inside ``fake_cuda.Worker``."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from call_order import calls_of, difference, disagreements

from torchtrain.config.parse import parse
from torchtrain.config.schema import JobConfig
from torchtrain.devices import planned_for_gpu
from torchtrain.distributed.mesh import Degrees, resolve_degrees
from torchtrain.errors import ConfigError
from torchtrain.models.llama.model import TransformerConfig
from torchtrain.parallelisms.limits.layout import check_layout, resolve_global_batch_size
from torchtrain.planning.fake_run import ranks_of_each_kind, rehearse
from torchtrain.planning.ledger import KINDS
from torchtrain.shape import model_shape

CAPABILITY = (9, 0)
# On the host, by design: a batch is made and its labels are counted there, and what the guard found is sent there.
HOST_WORK = {
    *("empty in forward", "clone in forward", "ne in forward", "sum in forward", "_to_copy in forward"),
    *("empty in update", "copy_ in update"),
    "zeros in forward",  # the random state that a pipeline's first run puts back
}


@dataclass(frozen=True)
class Seen:
    """What one rank did in its second step; the last two, in both."""

    rank: int
    peak: Mapping[str, int]  # live bytes by kind
    peak_bytes: int
    flops: int
    recomputed: int  # flops of that
    collectives: Counter[tuple[str, str, int]]  # axis, operation, bytes
    readbacks: Sequence[str]
    others: Counter[str]


@dataclass(frozen=True)
class Report:
    ranks: Sequence[Seen]
    disagreements: Sequence[str]
    refusal: str = ""

    @property
    def host_work(self) -> set[str]:
        """Operations on the host that no step should have."""
        return {name for seen in self.ranks for name in seen.others} - HOST_WORK

    @property
    def readbacks(self) -> list[str]:
        return [where for seen in self.ranks for where in seen.readbacks]


def config_of(options: Mapping[str, Any]) -> JobConfig:
    """``options``: as on the command line; True and False for flags."""
    arguments = []
    for key, value in options.items():
        if isinstance(value, bool):
            section, _, name = key.rpartition(".")
            arguments.append(f"--{section}.{name}" if value else f"--{section}.no-{name}")
        else:
            arguments += [f"--{key}", str(value)]
    return parse(arguments)


def checked(
    options: Mapping[str, Any], world_size: int, shape: Mapping[str, Any]
) -> tuple[JobConfig, TransformerConfig, Degrees]:
    """All that ``train`` does before it sets up a process group; ConfigError for what it refuses."""
    config = config_of(options)
    degrees = resolve_degrees(config.parallelism, world_size)
    resolve_global_batch_size(config, degrees)
    model = replace(model_shape(config.model, None, config.training.seq_len), **shape)
    with planned_for_gpu(CAPABILITY):
        check_layout(config, torch.device("cuda"), degrees, model)
    return config, model, degrees


def run(
    options: Mapping[str, Any],
    world_size: int,
    *,
    shape: Mapping[str, Any],
    device: str = "cuda",
    compare: bool = False,
    max_microbatches: int = 2,
    fault: Callable[[], AbstractContextManager[Any]] = nullcontext,
    refusals: bool = False,
) -> Report:
    """Refuse what ``train`` refuses; then rehearse each kind of rank.

    Args:
        shape: fields of the model that replace those of its flavor.
        device: of the fake tensors.
        compare: rehearse the last rank of the first stage, too, which has another place than rank 0 on every axis, and
            compare all that the two call.
        max_microbatches: of those that accumulate: more of them do the same again.
        fault: entered around it.
        refusals: whether to report one; else it is an error.
    """
    try:
        config, model, degrees = checked(options, world_size, shape)
    except ConfigError as error:
        if not refusals:
            raise
        return Report([], [], str(error))
    last = world_size // degrees.pipeline - 1
    ranks = sorted({*ranks_of_each_kind(degrees), *([last] if compare else ())})
    with fault():
        records = {
            rank: rehearse(
                config,
                model,
                degrees,
                rank,
                capability=CAPABILITY,
                max_microbatches=max_microbatches,
                device=torch.device(device, 0) if device == "cuda" else None,
            )
            for rank in ranks
        }
    seen = []
    for rank, record in records.items():
        step = record.ledger.steps[-1]
        collectives = Counter((o.axis, o.name, o.bytes) for o in step.operations if o.axis)
        flops = sum(o.flops for o in step.operations)
        recomputed = sum(o.flops for o in step.operations if o.phase == "recompute")
        ledger = record.ledger
        peak = dict(zip(KINDS, step.peak, strict=True))
        seen.append(Seen(rank, peak, sum(step.peak), flops, recomputed, collectives, ledger.readbacks, ledger.others))
    operations = {
        rank: [o for step in record.ledger.steps for o in step.operations] for rank, record in records.items()
    }
    found = disagreements(operations)
    if compare:
        found.append(difference("rank 0", calls_of(operations[0]), f"rank {last}", calls_of(operations[last])))
    return Report(seen, list(filter(None, found)))
