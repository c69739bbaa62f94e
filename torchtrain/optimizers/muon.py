"""Muon for the blocks' matrices: the work is divided over the ranks that share them.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), with the decay and the scale of Moonlight
(https://arxiv.org/abs/2502.16982). The Newton-Schulz iteration needs the whole of a matrix. So each matrix has an owner
among the ranks of its pipeline stage: all send it their parts of the momentum, and it sends their parts of the update
back, so that every layout makes the same update of the same numbers.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from torchtrain.config.schema import OptimizerConfig
from torchtrain.cpu.matmul import apply_float32_matmul
from torchtrain.devices import device_kind
from torchtrain.distributed.mesh import Mesh, ParallelDims, local

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


def block_of(matrix: Tensor, degrees: ParallelDims, rank: int) -> tuple[slice, slice]:
    """Rows and columns that ``rank`` of a pipeline stage holds of a parameter; the last parts may be smaller.

    Tensor parallelism splits first, then FSDP by rows what that leaves.
    """
    # The innermost axis of the mesh is that of tensor parallelism, where there is any.
    placement = matrix.placements[-1] if isinstance(matrix, DTensor) else Shard(0)
    assert isinstance(placement, Shard)
    spans = [range(size) for size in matrix.shape]
    by_tensor = placement.dim, rank % degrees.tensor, degrees.tensor
    by_fsdp = 0, rank // degrees.tensor % degrees.fsdp, degrees.fsdp
    for axis, number, parts in (by_tensor, by_fsdp):
        size = math.ceil(len(spans[axis]) / parts)
        spans[axis] = spans[axis][size * number : size * (number + 1)]
    rows, columns = (slice(span.start, span.stop) for span in spans)
    return rows, columns


def work(matrix: Tensor) -> int:
    """Operations of an iteration, but for a factor."""
    short, long = sorted(matrix.shape)
    return short * short * (2 * long + short)


Bucket = list[list[Tensor]]
"""What is exchanged at once: of each rank of the stage, matrices that it owns."""


def deal(matrices: Sequence[Tensor], ranks: int, itemsize: int) -> list[Bucket]:
    """Give each matrix an owner and a bucket, in which no rank owns more than ``BUCKET_BYTES``, or one matrix.

    The matrices with the most work come first, each goes to the rank that has the least so far.
    """
    buckets: list[Bucket] = [[[] for _ in range(ranks)]]
    given, number, filled = [0] * ranks, [0] * ranks, [0] * ranks
    for matrix in sorted(matrices, key=work, reverse=True):
        owner, size = given.index(min(given)), matrix.numel() * itemsize
        given[owner] += work(matrix)
        if filled[owner] and filled[owner] + size > BUCKET_BYTES:
            number[owner], filled[owner] = number[owner] + 1, 0
            if number[owner] == len(buckets):
                buckets.append([[] for _ in range(ranks)])
        filled[owner] += size
        buckets[number[owner]][owner].append(matrix)
    return buckets


class Muon:
    """The rule "muon" of groups of ``optimizer``, whose parameters are DTensors on ``mesh``; None: plain tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig, mesh: Mesh | None) -> None:
        self.optimizer, self.config = optimizer, config
        self.degrees = degrees = mesh.degrees if mesh is not None else ParallelDims()
        self.group = mesh.stage.get_group() if mesh is not None else None
        self.ranks = degrees.replicate * degrees.fsdp * degrees.tensor
        self.rank = dist.get_rank(self.group) if mesh is not None else 0
        of_replica = degrees.fsdp * degrees.tensor
        # Ranks that together have one copy of all gradients, this one among them. An owner hears of no others.
        self.replica = range(self.rank // of_replica * of_replica, (self.rank // of_replica + 1) * of_replica)
        groups = [group for group in optimizer.param_groups if group["rule"] == "muon"]
        self.options = {matrix: group for group in groups for matrix in group["params"]}
        # Where ranks talk to each other and compute. Under CPU offload the parameters lie elsewhere.
        device = torch.device(mesh.world.device_type) if mesh is not None else next(iter(self.options)).device
        auto = "float32" if device_kind(device.type) == "cpu" else "bfloat16"
        dtype = getattr(torch, auto if config.muon_dtype == "auto" else config.muon_dtype)
        apply_float32_matmul(dtype, device)
        self.nothing = torch.empty(0, dtype=dtype, device=device)
        assert all(self._elements(matrix, self.rank) == local(matrix).numel() for matrix in self.options)
        self.buckets = deal(list(self.options), self.ranks, dtype.itemsize)

    def _elements(self, matrix: Tensor, rank: int) -> int:
        return math.prod(span.stop - span.start for span in block_of(matrix, self.degrees, rank))

    @torch.no_grad()
    def step(self) -> None:
        """Update the matrices. Collective over the ranks of the pipeline stage."""
        # While a bucket is computed, the momenta of the next one arrive, and the updates of the one before leave.
        momenta: Callable[[], Tensor] | None = self._gather(self.buckets[0])
        leaving: Callable[[], None] | None = None
        for bucket, following in zip_longest(self.buckets, self.buckets[1:]):
            assert momenta is not None
            wholes = self._assemble(bucket[self.rank], momenta())
            momenta = None if following is None else self._gather(following)  # and what has arrived is freed
            updates = [orthogonalize(whole, self.config.muon_iterations) for whole in wholes]
            if leaving is not None:
                leaving()
            leaving = partial(self._apply, bucket, self._scatter(bucket, updates))
        assert leaving is not None
        leaving()

    def _gather(self, bucket: Bucket) -> Callable[[], Tensor]:
        """Begin to send what this rank has of the momenta to the owners. The result waits for those that it owns."""
        momenta = [[self._accumulate(matrix) for matrix in owned] for owned in bucket]
        return self._exchange(
            [momenta[rank] if rank in self.replica else [] for rank in range(self.ranks)],
            [
                sum(self._elements(matrix, rank) for matrix in bucket[self.rank]) if rank in self.replica else 0
                for rank in range(self.ranks)
            ],
        )

    def _accumulate(self, parameter: Tensor) -> Tensor:
        """This rank's part of the momentum after this step, and one step ahead (Nesterov)."""
        state, momentum = self.optimizer.state[parameter], self.config.muon_momentum
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=getattr(torch, self.config.state_dtype))
        assert parameter.grad is not None
        mean = local(state["momentum_buffer"])
        # Kernels that round once: those that fuse two operations do not, where a split leaves less than a vector.
        share = local(parameter.grad) * (1 - momentum)
        new = (mean.float() * momentum).add_(share)
        self._write(mean, new)
        return (new * momentum).add_(share)

    def _assemble(self, mine: Sequence[Tensor], received: Tensor) -> list[Tensor]:
        """The whole of each matrix that this rank owns."""
        wholes = [received.new_empty(matrix.shape) for matrix in mine]
        blocks = [[block_of(matrix, self.degrees, rank) for matrix in mine] for rank in self.replica]
        parts = [whole[block] for of_rank in blocks for whole, block in zip(wholes, of_rank, strict=True)]
        for part, values in zip(parts, torch.split(received, [part.numel() for part in parts]), strict=True):
            part.copy_(values.view(part.shape))
        return wholes

    def _scatter(self, bucket: Bucket, updates: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Begin to send each rank its parts of ``updates``, made here. The result waits for those sent to this rank."""
        mine = list(zip(bucket[self.rank], updates, strict=True))
        return self._exchange(
            [[update[block_of(matrix, self.degrees, rank)] for matrix, update in mine] for rank in range(self.ranks)],
            [sum(self._elements(matrix, self.rank) for matrix in owned) for owned in bucket],
        )

    def _exchange(self, parts: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> Callable[[], Tensor]:
        """Begin to send ``parts[r]`` to rank r of the stage. The result waits for ``sizes[r]`` elements from each."""
        sent = torch.cat([self.nothing, *(part.to(self.nothing).flatten() for to_one in parts for part in to_one)])
        if self.ranks == 1:
            return lambda: sent
        received = sent.new_empty(sum(sizes))
        sent_sizes = [sum(part.numel() for part in to_one) for to_one in parts]
        work = dist.all_to_all_single(received, sent, list(sizes), sent_sizes, self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return received

        return wait

    def _apply(self, bucket: Bucket, wait: Callable[[], Tensor]) -> None:
        """Add the updates of a bucket, which come in the order of their owners, to this rank's parts."""
        matrices = list(chain.from_iterable(bucket))
        updates = torch.split(wait(), [self._elements(matrix, self.rank) for matrix in matrices])
        for matrix, update in zip(matrices, updates, strict=True):
            rate, part = self.options[matrix]["lr"], local(matrix)
            factor = -rate * ADAMW_RMS * math.sqrt(max(matrix.shape))
            change = update.reshape(part.shape).to(part) * factor
            self._write(part, (part * (1 - rate * self.options[matrix]["weight_decay"])).add_(change))

    def _write(self, tensor: Tensor, new: Tensor) -> None:
        """``tensor`` becomes ``new``, unless the update is refused (see ``groups.update``)."""
        refused: Tensor | None = getattr(self.optimizer, "found_inf", None)
        tensor.copy_(new if refused is None else torch.where(refused > 0, tensor, new))
