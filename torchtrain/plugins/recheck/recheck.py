"""Hook that names a rank that computes wrong: each rank repeats a microbatch of another one.

In a checked step, data-parallel rank r first repeats a microbatch of rank r - 1, whose tokens it gets; the weights are
the same. What FSDP would reduce of it is hashed, and replaced by zeros. In the course of the step, rank r - 1 hashes
the same of its own microbatch. If the two differ, up to three more ranks compute the microbatch, too, and vote.
"""

import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchtrain.datasets.dataloader import Batch
from torchtrain.distributed.agreement import gather_from_all_ranks
from torchtrain.distributed.mesh import ParallelDims, local
from torchtrain.distributed.process_group import all_reduce
from torchtrain.errors import ConfigError, HardwareError
from torchtrain.labels import IGNORE_INDEX
from torchtrain.logging import logger
from torchtrain.metrics.hooks import Hook, RunResults
from torchtrain.models.parameters import full_name
from torchtrain.plugins.recheck.hashes import (
    Hashes,
    ObservedReduceScatter,
    SummandObserver,
    TensorHash,
    combine,
    read,
)
from torchtrain.plugins.recheck.options import RecheckConfig
from torchtrain.plugins.recheck.vote import VOTES, Verdict, contradictions, differing, majority, vote
from torchtrain.torch_internals import DefaultReduceScatter
from torchtrain.trainer import TrainStep

GROUP_NAMES = {"": "tok_embeddings", "norm": "norm and output"}  # of FSDP's groups that are not blocks (apply_fsdp)


@dataclass(frozen=True)
class Device:
    """A device and its host, for messages; ``kind`` must be the same on all ranks, whose bits are compared."""

    host: str
    name: str
    kind: str

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """``device``, which is of this process."""
        if device.type == "cuda":
            properties: Any = torch.cuda.get_device_properties(device)
            model = properties.name
            name = f"{device}, {model} {getattr(properties, 'uuid', '')}".rstrip()
        else:
            name, model = "cpu", f"CPU with {torch.backends.cpu.get_cpu_capability()}"
        return cls(socket.gethostname(), name, f"{model}, torch {torch.__version__}")


class Recheck(Hook):
    """Checks all ranks every ``options.interval`` steps.

    A data-parallel rank is named with all its ranks, such as those of a tensor-parallel group: an error of one of them
    reaches the others by their collectives. Of HSDP's replicas, also the weights, optimizer states and gradients of the
    global batch are compared.

    Args:
        group: a gloo group of all ranks.
        report: called with the step, "wrong_rank" and the ranks, hosts and devices that are named.
        skipped_steps: steps that are not checked.

    Raises:
        ConfigError: the devices are of several models, or the versions of PyTorch differ.
    """

    is_first = True
    """No other hook has begun to observe the step when a microbatch is repeated."""

    def __init__(
        self,
        options: RecheckConfig,
        train_step: TrainStep,
        group: dist.ProcessGroup,
        report: Callable[[int, str, dict[str, Any]], None],
        skipped_steps: Collection[int] = (),
    ) -> None:
        self.options, self.group, self.report, self.skipped_steps = options, group, report, skipped_steps
        self.model, self.microbatches = train_step.model, train_step.microbatches
        self.optimizer = train_step.optimizer
        degrees = self.model.mesh.degrees
        self.batch_group = self.model.mesh.batch.get_group()
        self.members = members_of_batch_ranks(degrees)
        self.shard_groups = [range(first, first + degrees.shard) for first in range(0, degrees.batch, degrees.shard)]
        self.replicas = list(zip(*self.shard_groups, strict=True))
        self.devices = gather_from_all_ranks(lambda: Device.of(self.model.device), group)
        check_same_kind(self.devices)
        self.hash_of = TensorHash(self.model.device)
        self.observer = SummandObserver(self.hash_of)
        for part in self.model.model_parts:
            modules = {name: module for name, module in part.named_modules() if isinstance(module, FSDPModule)}
            inners = self.model.reducer.reduce_scatters(len(modules))
            for (name, module), inner in zip(modules.items(), inners, strict=True):
                name = full_name(f"{name}.")[:-1]
                observed = ObservedReduceScatter(
                    inner or DefaultReduceScatter(), GROUP_NAMES.get(name, name), self.observer
                )
                module.set_custom_reduce_scatter(observed)
        self.step = 0
        self.is_due = False
        self.checks = 0
        self.found_in: list[int] = []  # steps
        self.last_clean = 0  # the last step whose check found nothing

    def before_step(self, step: int, batch: Batch) -> None:
        self.step = step
        self.is_due = step % self.options.interval == 0 and step not in self.skipped_steps
        if not self.is_due:
            return
        size, self.rows = self.microbatches.local_batch_size, len(batch.tokens)
        self.checked = step // self.options.interval % (self.rows // size)
        rows = slice(self.checked * size, (self.checked + 1) * size)
        device = self.model.device
        self.own_tokens = torch.stack((batch.tokens[rows], batch.labels[rows])).to(device)
        # As ``TrainStep`` computes it, which has not yet done so.
        self.global_tokens = (batch.labels != IGNORE_INDEX).sum().to(device)
        all_reduce(self.global_tokens, group=self.batch_group)
        self.model.mesh.replicas.all_reduce(self.global_tokens)
        self.repeated = self.repeat(1)

    def before_forward_backward(self, batch: Batch) -> None:  # noqa: ARG002
        self.own: dict[str, list[Tensor]] = {}

    def before_microbatch(self, index: int) -> None:
        if not self.is_due:
            return
        if index == self.checked:
            self.observer.start()
        elif index == self.checked + 1:
            self.own = self.observer.stop()

    def after_backward(self) -> None:
        if self.is_due and not self.own:  # the last microbatch is checked
            self.own = self.observer.stop()

    def after_gradients(self) -> None:
        """Compare the hashes of all ranks.

        Raises:
            HardwareError: they differ, and ``options.on_wrong_rank`` is "stop".
        """
        if not self.is_due:
            return
        self.checks += 1
        own, repeated, state = read(self.own), read(self.repeated), read(self.state_hashes())
        all_own, all_repeated, all_states = zip(*self.gather(own, repeated, state), strict=True)
        verdict, what = majority(all_states, self.replicas), "the state"
        # Ranks whose weights differ compute different gradients, but none of them computes wrong.
        if not verdict and differing((all_own, all_repeated)):
            verdict, what = self.compute_again(all_own, all_repeated), "the gradient"
            verdict.doubt(self.shard_groups)
        if not verdict:
            self.last_clean = self.step
            return
        self.found_in.append(self.step)
        details = gather_from_all_ranks(lambda: (own, repeated, state), self.group)
        where = self.first_state(verdict, details) if what == "the state" else self.first_group(details)
        self.announce(verdict, where)

    def compute_again(self, own: Sequence[Any], repeated: Sequence[Any]) -> Verdict:
        """Compute the microbatches on more ranks; if these are too few, again on each of them."""
        distances = range(min(len(self.members), VOTES))
        hashes = [own, repeated, *map(self.hashes_of_all, distances[2:])]
        verdict = vote(hashes)
        if verdict.suspects:
            named, verdict = verdict.wrong, contradictions(hashes, [*map(self.hashes_of_all, distances)])
            verdict.wrong |= named
        return verdict

    def hashes_of_all(self, distance: int) -> list[Any]:
        """The hash on each data-parallel rank of the microbatch of the rank ``distance`` before it."""
        return [value for (value,) in self.gather(read(self.repeat(distance)))]

    def repeat(self, distance: int) -> dict[str, list[Tensor]]:
        """Repeat the microbatch of the data-parallel rank ``distance`` before this one; returns its hashes."""
        tokens, labels = self.receive(distance)
        (microbatch,) = self.microbatches(Batch(tokens, labels))
        self.model.begin_gradients(self.rows)
        self.observer.start(discard=True)
        self.model.forward_backward(microbatch, self.global_tokens, is_last=False)
        return self.observer.stop()

    def receive(self, distance: int) -> Tensor:
        """Tokens and labels (2, local_batch_size, seq) of the checked microbatch of the rank ``distance`` before this
        one."""
        rank, ranks = self.batch_group.rank(), self.batch_group.size()
        sent, received = ([0] * ranks for _ in range(2))
        sent[(rank + distance) % ranks] = received[(rank - distance) % ranks] = len(self.own_tokens)
        tokens = torch.empty_like(self.own_tokens)
        dist.all_to_all_single(tokens, self.own_tokens, received, sent, group=self.batch_group)
        return tokens

    def state_hashes(self) -> dict[str, list[Tensor]]:
        """Hashes of this rank's shards of weights, gradients and optimizer states; none if there are no replicas."""
        if len(self.shard_groups) == 1:
            return {}
        tensors: dict[str, Tensor] = {}
        for part in self.model.model_parts:
            for name, parameter in part.named_parameters():
                tensors[full_name(name)] = parameter
                if parameter.grad is not None:
                    tensors[f"{full_name(name)} gradient"] = parameter.grad
        tensors |= self.optimizer.state_dict()
        return {name: [self.hash_of(local(tensor)).to(self.model.device)] for name, tensor in tensors.items()}

    def gather(self, *hashes: Hashes) -> list[tuple[Any, ...]]:
        """Gather each of ``hashes`` of all data-parallel ranks: a value that can be compared for each of them."""
        own = torch.tensor([combine(of.values()) for of in hashes])
        by_rank = [torch.empty_like(own) for _ in self.devices]
        dist.all_gather(by_rank, own, group=self.group)
        table = torch.stack(by_rank).tolist()
        return [tuple(zip(*(table[rank] for rank in ranks), strict=True)) for ranks in self.members]

    def first_group(self, details: Sequence[tuple[Hashes, Hashes, Hashes]]) -> str:
        """The FSDP group whose gradient differed first in backward."""
        for batch_rank, ranks in enumerate(self.members):
            following = self.members[(batch_rank + 1) % len(self.members)]
            # The backward begins in the last pipeline stage, whose ranks come last.
            for rank, next_rank in zip(reversed(ranks), reversed(following), strict=True):
                own, repeated = details[rank][0], details[next_rank][1]
                for name in own:
                    if own[name] != repeated.get(name):
                        return f"the gradient of {name}, the first in backward that differs"
        return "the gradient"

    def first_state(self, verdict: Verdict, details: Sequence[tuple[Hashes, Hashes, Hashes]]) -> str:
        """The first tensor that differs between replicas."""
        named = verdict.wrong | verdict.suspects
        for group in self.replicas:
            if named.isdisjoint(group):
                continue
            for replicas in zip(*(self.members[batch_rank] for batch_rank in group), strict=True):
                states = [details[rank][2] for rank in replicas]
                for name in states[0]:
                    if any(state[name] != states[0][name] for state in states):
                        return f"{name}, the first tensor that differs between replicas"
        return "the state"

    def announce(self, verdict: Verdict, where: str) -> None:
        """Log and record a finding, or raise HardwareError on all ranks."""
        ranks = self.ranks_of(verdict.wrong or verdict.suspects)
        devices = [self.devices[rank] for rank in ranks]
        if verdict.wrong:
            who = self.compute_wrong(verdict.wrong)
        elif len(verdict.odd) == 1:
            others = self.places(verdict.suspects - verdict.odd)
            who = f"{self.compute_wrong(verdict.odd)}, or {others} have the same fault"
        else:
            who = f"one of these computes wrong: {self.places(verdict.suspects)}"
        before = f"step {self.last_clean}" if self.last_clean else "none since this start"
        message = f"step {self.step}: {who}; found in {where}. The last check that found nothing: {before}"
        values = {
            "named": bool(verdict.wrong),
            "ranks": ranks,
            "hosts": [of.host for of in devices],
            "devices": [of.name for of in devices],
            "where": where,
        }
        self.report(self.step, "wrong_rank", values)
        if self.options.on_wrong_rank == "stop":
            raise HardwareError(f"{message}. Exclude that machine or device, and start again")
        logger.warning("%s", message)

    def ranks_of(self, batch_ranks: Collection[int]) -> list[int]:
        """The ranks of data-parallel ranks, in ascending order of these."""
        return [rank for batch_rank in sorted(batch_ranks) for rank in self.members[batch_rank]]

    def places(self, batch_ranks: Collection[int]) -> str:
        """The ranks, hosts and devices of data-parallel ranks."""
        ranks = self.ranks_of(batch_ranks)
        return ", ".join(f"rank {rank} on {self.devices[rank].host} ({self.devices[rank].name})" for rank in ranks)

    def compute_wrong(self, batch_ranks: Collection[int]) -> str:
        verb = "computes" if len(self.ranks_of(batch_ranks)) == 1 else "compute"
        return f"{self.places(batch_ranks)} {verb} wrong"

    def results(self, results: RunResults) -> Sequence[tuple[str, str]]:  # noqa: ARG002
        found = f"different bits in steps {', '.join(map(str, self.found_in))}" if self.found_in else "no wrong rank"
        return [("recheck", f"{self.checks} checks: {found}")]


def members_of_batch_ranks(degrees: ParallelDims) -> list[list[int]]:
    """The ranks of each data-parallel rank, in ascending order: those of its tensor-parallel group, for example."""
    members: list[list[int]] = [[] for _ in range(degrees.batch)]
    for rank in range(degrees.pipeline * degrees.batch * degrees.context * degrees.tensor):
        members[degrees.batch_rank(rank)].append(rank)
    return members


def check_same_kind(devices: Sequence[Device]) -> None:
    """Raise ConfigError if the devices of two ranks are not of the same kind."""
    for rank, device in enumerate(devices):
        if device.kind != devices[0].kind:
            raise ConfigError(
                f"recheck.interval compares the bits of all ranks, which must have the same devices and the same "
                f"PyTorch: rank 0 on {devices[0].host} has {devices[0].kind}, rank {rank} on {device.host} has "
                f"{device.kind}; take machines of one kind, or set interval = 0"
            )
