"""Muon for the blocks' matrices: the work is divided over the ranks that share them.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), with the decay and the scale of Moonlight
(https://arxiv.org/abs/2502.16982). The Newton-Schulz iteration needs the whole of a matrix. So each matrix has an owner
among the ranks of its pipeline stage: all send it their parts of the momentum, and it sends their parts of the update
back, so that every layout makes the same update of the same numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from torchtrain.config.schema import Optimizer
from torchtrain.devices import device_kind
from torchtrain.distributed.mesh import Degrees, Mesh, local

A, B, C = 3.4445, -4.7750, 2.0315  # of the iteration x <- A x + B (x x^T) x + C (x x^T)^2 x
EPSILON = 1e-7
ADAMW_RMS = 0.2  # of the elements of AdamW's updates, about
BUCKET_BYTES = 1 << 26  # of matrices that a rank owns, in one exchange


def orthogonalize(matrix: Tensor, iterations: int) -> Tensor:
    """The 2-D ``matrix``, U S V^T, with singular values near 1: about U V^T. Computed in its dtype."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if is_tall else x


@cache
def block_of(shape: tuple[int, int], axis: int, degrees: Degrees, rank: int) -> tuple[slice, slice]:
    """Rows and columns of a matrix that ``rank`` of a pipeline stage holds.

    Tensor parallelism splits first, along ``axis``; then FSDP by rows what that leaves. The last parts may be smaller.
    """

    def part(span: range, number: int, parts: int) -> range:
        size = -(-len(span) // parts)
        return span[size * number : size * (number + 1)]

    spans = [range(size) for size in shape]
    spans[axis] = part(spans[axis], rank % degrees.tensor, degrees.tensor)
    spans[0] = part(spans[0], rank // degrees.tensor % degrees.fsdp, degrees.fsdp)
    rows, columns = (slice(span.start, span.stop) for span in spans)
    return rows, columns


@dataclass(frozen=True)
class Matrix:
    """A parameter of two dimensions, split over the ranks of a pipeline stage, and the options of its group."""

    parameter: Tensor
    degrees: Degrees
    options: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole."""
        rows, columns = self.parameter.shape
        return rows, columns

    @property
    def work(self) -> int:
        """Operations of an iteration, but for a factor."""
        short, long = sorted(self.shape)
        return short * short * (2 * long + short)

    def block(self, rank: int) -> tuple[slice, slice]:
        """Rows and columns that ``rank`` holds."""
        axis = 0
        if self.degrees.tensor > 1:
            assert isinstance(self.parameter, DTensor)
            placement = self.parameter.placements[-1]
            assert isinstance(placement, Shard)
            axis = placement.dim
        return block_of(self.shape, axis, self.degrees, rank)

    def elements(self, rank: int) -> int:
        return math.prod(span.stop - span.start for span in self.block(rank))


def deal(matrices: Sequence[Matrix], ranks: int) -> list[list[Matrix]]:
    """What each rank owns: the matrices with the most work first, each to the rank that has the least so far."""
    owned: list[list[Matrix]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    for matrix in sorted(matrices, key=lambda matrix: -matrix.work):
        rank = work.index(min(work))
        owned[rank].append(matrix)
        work[rank] += matrix.work
    return owned


def in_buckets(owned: Sequence[Sequence[Matrix]], itemsize: int) -> list[list[list[Matrix]]]:
    """``owned`` cut into exchanges: of each the matrices by their owners. A rank's first is in the first of them."""
    buckets: list[list[list[Matrix]]] = []
    filled = [BUCKET_BYTES] * len(owned)
    for turn in range(max(map(len, owned))):
        mine = [matrices[turn : turn + 1] for matrices in owned]
        added = [sum(matrix.parameter.numel() for matrix in one) * itemsize for one in mine]
        filled = [before + bytes for before, bytes in zip(filled, added, strict=True)]
        if max(filled) > BUCKET_BYTES:
            buckets.append([[] for _ in owned])
            filled = added
        for bucket, one in zip(buckets[-1], mine, strict=True):
            bucket += one
    return buckets


@dataclass(frozen=True)
class Transfer:
    """What other ranks send, on its way here."""

    received: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.received


class Muon:
    """The rule "muon" of groups of ``optimizer``, whose parameters are DTensors on ``mesh``; None: plain tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: Optimizer, mesh: Mesh | None) -> None:
        self.optimizer = optimizer
        degrees = mesh.degrees if mesh is not None else Degrees()
        self.group = mesh.stage.get_group() if mesh is not None else None
        self.ranks = degrees.replicate * degrees.fsdp * degrees.tensor
        self.rank = dist.get_rank(self.group) if mesh is not None else 0
        of_replica = degrees.fsdp * degrees.tensor
        # Ranks that together have one copy of all gradients, this one among them. An owner hears of no others.
        self.replica = range(self.rank // of_replica * of_replica, (self.rank // of_replica + 1) * of_replica)
        groups = [group for group in optimizer.param_groups if group["rule"] == "muon"]
        matrices = [Matrix(parameter, degrees, group) for group in groups for parameter in group["params"]]
        # Where ranks talk to each other and compute. Under CPU offload the parameters lie elsewhere.
        device = torch.device(mesh.world.device_type) if mesh is not None else matrices[0].parameter.device
        dtype = config.muon_dtype
        if dtype == "auto":
            dtype = "float32" if device_kind(device.type) == "cpu" else "bfloat16"
        self.nothing = torch.empty(0, dtype=getattr(torch, dtype), device=device)
        self.momentum, self.iterations = config.muon_momentum, config.muon_iterations
        self.state_dtype = getattr(torch, config.state_dtype)
        for matrix in matrices:
            assert matrix.elements(self.rank) == local(matrix.parameter).numel()
        self.buckets = in_buckets(deal(matrices, self.ranks), self.nothing.itemsize)

    @torch.no_grad()
    def step(self) -> None:
        """Update the matrices. Collective over the ranks of the pipeline stage."""
        # While a bucket is computed, the momenta of the next one arrive, and the updates of the one before leave.
        arriving, leaving = self._gather(0), None
        for number in range(len(self.buckets)):
            wholes = self._assemble(number, arriving.wait())
            arriving = self._gather(number + 1)
            updates = [orthogonalize(whole, self.iterations) for whole in wholes]
            if leaving is not None:
                self._apply(number - 1, leaving.wait())
            leaving = self._scatter(number, updates)
        if leaving is not None:
            self._apply(len(self.buckets) - 1, leaving.wait())

    def _gather(self, number: int) -> Transfer:
        """Begin to send what this rank has of the matrices of a bucket to their owners. After the last: nothing."""
        if number == len(self.buckets):
            return Transfer(self.nothing, None)
        bucket = self.buckets[number]
        momenta = [[self._accumulate(matrix.parameter) for matrix in matrices] for matrices in bucket]
        return self._exchange(
            [momenta[rank] if rank in self.replica else [] for rank in range(self.ranks)],
            [sum(m.elements(rank) for m in bucket[self.rank]) * (rank in self.replica) for rank in range(self.ranks)],
        )

    def _accumulate(self, parameter: Tensor) -> Tensor:
        """This rank's part of the momentum after this step, and one step ahead (Nesterov)."""
        state = self.optimizer.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=self.state_dtype)
        assert parameter.grad is not None
        mean = local(state["momentum_buffer"])
        # Kernels that round once: those that fuse two operations do not, where a split leaves less than a vector.
        share = local(parameter.grad) * (1 - self.momentum)
        new = (mean.float() * self.momentum).add_(share)
        self._write(mean, new)
        return (new * self.momentum).add_(share)

    def _assemble(self, number: int, received: Tensor) -> list[Tensor]:
        """The whole of each matrix that this rank owns."""
        mine = self.buckets[number][self.rank]
        wholes = [received.new_empty(matrix.shape) for matrix in mine]
        parts = [whole[matrix.block(rank)] for rank in self.replica for matrix, whole in zip(mine, wholes, strict=True)]
        for part, values in zip(parts, torch.split(received, [part.numel() for part in parts]), strict=True):
            part.copy_(values.view(part.shape))
        return wholes

    def _scatter(self, number: int, updates: Sequence[Tensor]) -> Transfer:
        """Begin to send each rank its parts of ``updates``, which are of the matrices that this rank owns."""
        bucket = self.buckets[number]
        return self._exchange(
            [
                [update[matrix.block(rank)] for matrix, update in zip(bucket[self.rank], updates, strict=True)]
                for rank in range(self.ranks)
            ],
            [sum(matrix.elements(self.rank) for matrix in matrices) for matrices in bucket],
        )

    def _exchange(self, parts: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> Transfer:
        """Begin to send ``parts[r]`` to rank r of the stage, and to receive ``sizes[r]`` elements from it."""
        sent = torch.cat([self.nothing, *(part.to(self.nothing).flatten() for to_one in parts for part in to_one)])
        if self.ranks == 1:
            return Transfer(sent, None)
        received = sent.new_empty(sum(sizes))
        sent_sizes = [sum(part.numel() for part in to_one) for to_one in parts]
        work = dist.all_to_all_single(received, sent, list(sizes), sent_sizes, self.group, async_op=True)
        return Transfer(received, work)

    def _apply(self, number: int, received: Tensor) -> None:
        """Add the updates of a bucket, which come in the order of their owners."""
        matrices = [matrix for owned in self.buckets[number] for matrix in owned]
        updates = torch.split(received, [matrix.elements(self.rank) for matrix in matrices])
        for matrix, update in zip(matrices, updates, strict=True):
            self._add(matrix, update)

    def _add(self, matrix: Matrix, update: Tensor) -> None:
        """Add to this rank's part of ``matrix`` that of its ``update``."""
        rate, part = matrix.options["lr"], local(matrix.parameter)
        change = update.reshape(part.shape).to(part) * (-rate * ADAMW_RMS * math.sqrt(max(matrix.shape)))
        self._write(part, (part * (1 - rate * matrix.options["weight_decay"])).add_(change))

    def _write(self, tensor: Tensor, new: Tensor) -> None:
        """``tensor`` becomes ``new``, unless the update is refused (see ``groups.update``)."""
        refused: Tensor | None = getattr(self.optimizer, "found_inf", None)
        tensor.copy_(new if refused is None else torch.where(refused > 0, tensor, new))
