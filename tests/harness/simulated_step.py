"""Rehearsals of a config on a fake GPU, and what they show: run inside ``fake_cuda.Worker``."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.config
from call_order import calls_of, difference, disagreements

from torchtrain.config.parse import from_file
from torchtrain.config.schema import JobConfig
from torchtrain.errors import ConfigError
from torchtrain.models.model_config import build_model_config
from torchtrain.planning import simulation
from torchtrain.planning.hardware import GPUS
from torchtrain.planning.ledger import KINDS, Ledger
from torchtrain.planning.operations import VIEWS, collective, tensors_in
from torchtrain.planning.request import refuse
from torchtrain.planning.simulation import representative_ranks, simulate

GPU = GPUS["h100-80"]
# On the host, by design: a batch is made and its labels are counted there, and what the guard found is sent there.
HOST_WORK = {
    *("empty in forward", "clone in forward", "ne in forward", "sum in forward", "_to_copy in forward"),
    "_to_copy in update",
    "zeros in forward",  # the random state that a pipeline's first run puts back
}


class WatchingLedger(Ledger):
    """Notes, too, with its phase, what made the host wait for the device, and what has tensors on another device."""

    def __init__(self, device_type: str, **options: Any):
        super().__init__(device_type, **options)
        self.readbacks: list[str] = []
        self.others: Counter[str] = Counter()
        self.reductions: set[tuple[str, str, torch.dtype, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == self.device_type:
            self.readbacks.append(f"item in {self.phase}")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        super()._note(func, args, kwargs, out)
        found = collective(func, args, out)
        if found is not None and "reduce" in found[0]:
            summands = tensors_in(args)[-1]  # after the output, where it is an argument
            axis = self.axes.get(found[1].group_name, "all")
            self.reductions.add((axis, found[0], summands.dtype, summands.ndim))
        if func.is_view or func.overloadpacket in VIEWS or func.namespace not in ("aten", "fsdp"):
            return
        name, own, inputs, outputs = func._opname, self.device_type, tensors_in((args, kwargs)), tensors_in(out)
        # A number is an argument of a kernel, wherever it lies; attention returns its random state beside the rest.
        away = [t.device.type not in (own, "meta") for t in outputs]
        if (away and all(away)) or any(t.ndim and t.device.type not in (own, "meta") for t in inputs):
            self.others[f"{name} in {self.phase}"] += 1
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            if name in ("copy_", "_to_copy") and waits and inputs[-1].device.type == own != outputs[0].device.type:
                self.readbacks.append(f"{name} in {self.phase}")


@dataclass(frozen=True)
class Seen:
    """What one rank did in its second step; the last two, in both."""

    rank: int
    peak: Mapping[str, int]  # live bytes by kind
    flops: int
    recomputed: int  # flops of that
    collectives: Counter[tuple[str, str, int]]  # axis, operation, bytes
    readbacks: Sequence[str]
    others: Counter[str]
    attention: set[str]  # its kernels
    reductions: set[tuple[str, str, torch.dtype, int]]  # axis, operation, dtype and dimensions of the summands


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
    def rounded_gradients(self) -> set[tuple[str, str, torch.dtype, int]]:
        """Reductions of other than activations, (bs, seq, ...), in fewer bits than float32."""
        reductions = set().union(*(seen.reductions for seen in self.ranks))
        return {r for r in reductions if r[2].itemsize < 4 and not (r[0] in ("tensor", "context") and r[3] >= 3)}

    @property
    def readbacks(self) -> list[str]:
        return [where for seen in self.ranks for where in seen.readbacks]


def config_of(options: Mapping[str, Any]) -> JobConfig:
    """``options``: values by "section.name", over those of the file "job.config_file"."""
    sections: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in options.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    file = options.get("job.config_file")
    config = from_file(file) if file else JobConfig()
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})


def run(
    options: Mapping[str, Any],
    world_size: int,
    *,
    shape: Mapping[str, Any],
    device: str = "cuda",
    compare: bool = False,
    fault: Callable[[], AbstractContextManager[Any]] = nullcontext,
    refusals: bool = False,
) -> Report:
    """Refuse what ``train`` refuses; then simulate each kind of rank.

    Args:
        shape: fields of the model that replace those of its flavor.
        device: of the fake tensors.
        compare: simulate the last rank of the first stage, too, which has another place than rank 0 on every axis, and
            compare all that the two call.
        fault: entered around it.
        refusals: whether to report one; else it is an error.
    """
    try:
        config = config_of({**options, "estimate.world_size": world_size})
        model = replace(build_model_config(config.model, None, config.training.seq_len), **shape)
        degrees = refuse(config, model, GPU)
    except ConfigError as error:
        if not refusals:
            raise
        return Report([], [], str(error))
    last = world_size // degrees.pipeline - 1
    ranks = sorted({*representative_ranks(degrees), *([last] if compare else ())})
    with (
        fault(),
        patch.object(simulation, "Ledger", WatchingLedger),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        records = {
            rank: simulate(
                config,
                model,
                degrees,
                rank,
                capability=GPU.capability,
                max_microbatches=2,  # more of them do the same again
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
        ledger, peak = record.ledger, dict(zip(KINDS, step.peak, strict=True))
        assert isinstance(ledger, WatchingLedger)
        attention = {o.name for o in step.operations if "attention" in o.name}
        noted = ledger.readbacks, ledger.others, attention, ledger.reductions
        seen.append(Seen(rank, peak, flops, recomputed, collectives, *noted))
    operations = {
        rank: [o for step in record.ledger.steps for o in step.operations] for rank, record in records.items()
    }
    found = disagreements(operations)
    if compare:
        found.append(difference("rank 0", calls_of(operations[0]), f"rank {last}", calls_of(operations[last])))
    return Report(seen, list(filter(None, found)))
