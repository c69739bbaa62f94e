"""Muon for matrices, with its work divided over the ranks of a pipeline stage.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), with the weight decay and the scale of Moonlight
(https://arxiv.org/abs/2502.16982). The Newton-Schulz iteration needs the full matrix. So each matrix has an owner among
the ranks of its pipeline stage: the ranks send their shards of the momentum to the owner, and the owner sends the
shards of the update back. Every layout computes the same update from the same numbers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchtrain.config.section import Count, Section
from torchtrain.distributed.mesh import Mesh, ParallelDims, local
from torchtrain.errors import ConfigError
from torchtrain.optimizers.base import ParameterGroup, ShardedOptimizer, assign
from torchtrain.optimizers.options import DecayRate, OptimizerConfig

A, B, C = 3.4445, -4.7750, 2.0315  # coefficients of the iteration x <- A x + B (x x^T) x + C (x x^T)^2 x
EPSILON = 1e-7
ADAMW_RMS = 0.2  # approximate root mean square of the elements of AdamW's updates
BUCKET_BYTES = 1 << 26  # size of the matrices of one owner in one exchange


def orthogonalize(matrix: Tensor, iterations: int) -> Tensor:
    """Orthogonalize the 2-D ``matrix`` U S V^T: singular values near 1, about U V^T. Computed in its dtype."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if is_tall else x


def shard_of(matrix: Tensor, degrees: ParallelDims, rank: int) -> tuple[slice, slice]:
    """Rows and columns of a parameter that ``rank`` of a pipeline stage holds; the last shards may be smaller.

    Tensor parallelism splits first, then FSDP splits the rows of each part.
    """
    # If there is tensor parallelism, it is the innermost dimension of the mesh.
    placement = matrix.placements[-1] if isinstance(matrix, DTensor) else Shard(0)
    spans = [range(size) for size in matrix.shape]
    by_tensor = 0, 0, 1  # all tensor-parallel ranks have the same, as of a router
    if isinstance(placement, Shard):
        by_tensor = placement.dim, rank % degrees.tensor, degrees.tensor
    by_fsdp = 0, rank // degrees.tensor % degrees.fsdp, degrees.fsdp
    for axis, number, count in (by_tensor, by_fsdp):
        size = math.ceil(len(spans[axis]) / count)
        spans[axis] = spans[axis][size * number : size * (number + 1)]
    rows, columns = (slice(span.start, span.stop) for span in spans)
    return rows, columns


def iteration_cost(matrix: Tensor) -> int:
    """Operations of a Newton-Schulz iteration, up to a constant factor."""
    short, long = sorted(matrix.shape)
    return short * short * (2 * long + short)


Bucket = list[list[Tensor]]
"""Matrices that are exchanged together: for each rank of the stage, those that it owns."""


def assign_owners(matrices: Sequence[Tensor], ranks: int, itemsize: int) -> list[Bucket]:
    """Assign each matrix to an owner and a bucket. In a bucket no rank owns more than ``BUCKET_BYTES``, or one matrix.

    The matrices are sorted by cost, the most expensive first; each goes to the rank with the lowest total so far.
    """
    buckets: list[Bucket] = [[[] for _ in range(ranks)]]
    costs, last_bucket, bucket_bytes = [0] * ranks, [0] * ranks, [0] * ranks  # of each rank
    for matrix in sorted(matrices, key=iteration_cost, reverse=True):
        owner, size = costs.index(min(costs)), matrix.numel() * itemsize
        costs[owner] += iteration_cost(matrix)
        if bucket_bytes[owner] and bucket_bytes[owner] + size > BUCKET_BYTES:
            last_bucket[owner], bucket_bytes[owner] = last_bucket[owner] + 1, 0
            if last_bucket[owner] == len(buckets):
                buckets.append([[] for _ in range(ranks)])
        bucket_bytes[owner] += size
        buckets[last_bucket[owner]][owner].append(matrix)
    return buckets


@dataclass(frozen=True)
class MuonOptions(Section, name="optimizer.options.muon"):
    """Options of Muon, [optimizer.options.muon]."""

    momentum: DecayRate = 0.95
    """Decay of Muon's running mean of the gradient, which looks one step ahead (Nesterov)."""
    iterations: Count = 5
    """Newton-Schulz iterations by which Muon orthogonalizes a matrix."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of these iterations, and of what ranks send each other for them. auto: bfloat16, on a CPU float32."""


class Muon(ShardedOptimizer):
    """Muon with owners: see the top of this file. ``step`` is collective over the ranks of the pipeline stage."""

    Options = MuonOptions

    def __init__(self, groups: Sequence[ParameterGroup], config: OptimizerConfig, options: Any, mesh: Mesh | None):
        super().__init__(groups, config, options, mesh)
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                self.check_parameter(name, parameter)
        self.degrees = degrees = mesh.degrees if mesh is not None else ParallelDims()
        self.group = mesh.stage.get_group() if mesh is not None else None
        self.ranks = degrees.replicate * degrees.fsdp * degrees.tensor
        self.rank = dist.get_rank(self.group) if mesh is not None else 0
        replica_ranks = degrees.fsdp * degrees.tensor
        # The ranks of this rank's replica, which together hold all gradients once. An owner receives only from these.
        first = self.rank // replica_ranks * replica_ranks
        self.replica = range(first, first + replica_ranks)
        of_all = {parameter: group for group in self.param_groups for parameter in group["params"]}
        self.group_of = {parameter: group for parameter, group in of_all.items() if parameter.ndim == 2}
        self.stacks = {parameter: group for parameter, group in of_all.items() if parameter.ndim == 3}
        # The device of communication and computation; with CPU offload the parameters are in CPU memory.
        device = torch.device(mesh.world.device_type) if mesh is not None else next(iter(of_all)).device
        assert all(self._elements(matrix, self.rank) == local(matrix).numel() for matrix in self.group_of)
        self.set_dtype(torch.bfloat16 if options.dtype == "auto" else getattr(torch, options.dtype), device)

    def set_dtype(self, dtype: torch.dtype, device: torch.device) -> None:
        """Set the dtype in which matrices are exchanged and orthogonalized on ``device``, and assign their owners."""
        self.empty = torch.empty(0, dtype=dtype, device=device)
        self.buckets = assign_owners(list(self.group_of), self.ranks, dtype.itemsize)

    @classmethod
    def mup_divisor(cls, width: float) -> float:
        """The largest singular value of an update, which has a fixed root mean square, grows as sqrt(``width``)."""
        return math.sqrt(width)

    def prepare_for_cpu(self) -> torch.dtype | None:
        if self.options.dtype == "auto":
            self.set_dtype(torch.float32, self.empty.device)
        return self.empty.dtype

    @classmethod
    def check_parameter(cls, name: str, parameter: Tensor) -> None:
        if parameter.ndim not in (2, 3):
            shape = " x ".join(map(str, parameter.shape))
            raise ConfigError(
                f"muon cannot update {name}, whose shape is {shape}: it takes matrices, of two dimensions, and stacks "
                f"of them. Select another optimizer for it: [[optimizer.groups]] with params = {name!r} and "
                "optimizer = 'adamw'"
            )

    @classmethod
    def create_process_groups(cls, mesh: Mesh) -> None:
        mesh.stage  # noqa: B018  # a cached property

    def init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter, dtype=self.state_dtype)}

    def _elements(self, matrix: Tensor, rank: int) -> int:
        return math.prod(span.stop - span.start for span in shard_of(matrix, self.degrees, rank))

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        # Software pipeline: while a bucket is computed, the momenta of the next one arrive, and the updates of the
        # previous one are sent.
        momenta: Callable[[], Tensor] | None = self._gather(self.buckets[0], skip)
        apply_previous: Callable[[], None] | None = None
        for bucket, next_bucket in zip_longest(self.buckets, self.buckets[1:]):
            assert momenta is not None
            matrices = self._assemble(bucket[self.rank], momenta())
            momenta = None if next_bucket is None else self._gather(next_bucket, skip)  # frees what was received
            updates = [orthogonalize(matrix, self.options.iterations) for matrix in matrices]
            if apply_previous is not None:
                apply_previous()
            apply_previous = partial(self._apply, bucket, self._scatter(bucket, updates), skip)
        assert apply_previous is not None
        apply_previous()
        for stack, group in self.stacks.items():
            self._update_stack(stack, group, skip)

    def _update_stack(self, stack: Tensor, group: ParameterGroup, skip: Tensor | None) -> None:
        """Update each matrix of ``stack`` (n, rows, columns), such as those of experts.

        FSDP and expert parallelism shard its first dimension, so that this rank has whole matrices, or with tensor
        parallelism parts, which its ranks gather; each of them then orthogonalizes all.
        """
        momentum, shard = self._accumulate(stack, skip).to(self.empty), local(stack)
        inner: list[tuple[DeviceMesh, Shard]] = []
        if isinstance(stack, DTensor):
            for name, axis in zip(stack.device_mesh.mesh_dim_names or (), stack.placements, strict=True):
                if isinstance(axis, Shard) and axis.dim > 0:
                    inner.append((stack.device_mesh[name], axis))
        for mesh, axis in inner:
            momentum = DTensor.from_local(momentum, mesh, [axis], run_check=False).full_tensor()
        update = torch.empty_like(momentum)
        for matrix, orthogonal in zip(momentum, update, strict=True):
            orthogonal.copy_(orthogonalize(matrix, self.options.iterations))
        for mesh, axis in inner:
            update = update.chunk(mesh.size(), axis.dim)[mesh.get_local_rank()]
        change = update.to(shard) * (-group["lr"] * ADAMW_RMS * math.sqrt(max(stack.shape[1:])))
        assign(shard, (shard * (1 - group["lr"] * group["weight_decay"])).add_(change), skip)

    def _gather(self, bucket: Bucket, skip: Tensor | None) -> Callable[[], Tensor]:
        """Start sending this rank's shards of the momenta to the owners.

        The function that is returned waits for the shards of the matrices that this rank owns.
        """
        momenta = [[self._accumulate(matrix, skip) for matrix in owned] for owned in bucket]
        return self._exchange(
            [momenta[rank] if rank in self.replica else [] for rank in range(self.ranks)],
            [
                sum(self._elements(matrix, rank) for matrix in bucket[self.rank]) if rank in self.replica else 0
                for rank in range(self.ranks)
            ],
        )

    def _accumulate(self, parameter: Tensor, skip: Tensor | None) -> Tensor:
        """Update the momentum; returns this rank's shard of it, one step ahead (Nesterov)."""
        momentum: float = self.options.momentum
        assert parameter.grad is not None
        mean = local(self.state_of(parameter)["momentum_buffer"])
        # Each operation rounds once. A fused one would not where a shard's last elements do not fill a SIMD vector.
        change = local(parameter.grad) * (1 - momentum)
        new = (mean.float() * momentum).add_(change)
        assign(mean, new, skip)
        return (new * momentum).add_(change)

    def _assemble(self, owned: Sequence[Tensor], received: Tensor) -> list[Tensor]:
        """Assemble the full matrices that this rank owns from the shards of all ranks."""
        matrices = [received.new_empty(matrix.shape) for matrix in owned]
        shards = [
            full[shard_of(matrix, self.degrees, rank)]
            for rank in self.replica
            for full, matrix in zip(matrices, owned, strict=True)
        ]
        for shard, values in zip(shards, torch.split(received, [shard.numel() for shard in shards]), strict=True):
            shard.copy_(values.view(shard.shape))
        return matrices

    def _scatter(self, bucket: Bucket, updates: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Start sending each rank its shards of ``updates``, those of the matrices that this rank owns.

        The function that is returned waits for the shards sent to this rank.
        """
        owned = list(zip(bucket[self.rank], updates, strict=True))
        return self._exchange(
            [[update[shard_of(matrix, self.degrees, rank)] for matrix, update in owned] for rank in range(self.ranks)],
            [sum(self._elements(matrix, self.rank) for matrix in matrices) for matrices in bucket],
        )

    def _exchange(self, shards: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> Callable[[], Tensor]:
        """Start an all-to-all over the stage, which sends ``shards[r]`` to rank r and receives ``sizes[r]`` elements.

        The function that is returned waits for the received elements.
        """
        sent = torch.cat([self.empty, *(shard.to(self.empty).flatten() for shard in chain.from_iterable(shards))])
        if self.ranks == 1:
            return lambda: sent
        received = sent.new_empty(sum(sizes))
        sent_sizes = [sum(shard.numel() for shard in to_rank) for to_rank in shards]
        handle = dist.all_to_all_single(received, sent, list(sizes), sent_sizes, self.group, async_op=True)

        def wait() -> Tensor:
            handle.wait()
            return received

        return wait

    def _apply(self, bucket: Bucket, wait: Callable[[], Tensor], skip: Tensor | None) -> None:
        """Apply the updates of a bucket, which arrive in the order of their owners, to this rank's shards."""
        matrices = list(chain.from_iterable(bucket))
        updates = torch.split(wait(), [self._elements(matrix, self.rank) for matrix in matrices])
        for matrix, update in zip(matrices, updates, strict=True):
            group, shard = self.group_of[matrix], local(matrix)
            factor = -group["lr"] * ADAMW_RMS * math.sqrt(max(matrix.shape))
            change = update.reshape(shard.shape).to(shard) * factor
            assign(shard, (shard * (1 - group["lr"] * group["weight_decay"])).add_(change), skip)
