"""Gradient reduction: how gradients are summed over microbatches and ranks, and their squares for the gradient norm."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import Mesh
from torchtrain.distributed.process_group import all_reduce
from torchtrain.distributed.replicas import Replicas
from torchtrain.torch_internals import ReduceScatter


class GradientReducer:
    """Leaves the reduction of gradients to FSDP; a subclass may reduce them otherwise (``training.sums``).

    Attributes:
        mesh: the mesh of ``fully_shard``.
        dtype: the dtype in which gradients are reduced.
        state: state that later steps depend on, for checkpoints; None if there is none.
        by_block: whether each block and the output layer are an FSDP group of their own, which is all-gathered and
            reduced while blocks compute; otherwise all parameters are in one group.
        after_all_reduce: gets this rank's reduced gradients of each FSDP group, in ``dtype``, and may change them in
            place; None: nothing does.
    """

    state: Stateful | None = None
    by_block: bool = True
    after_all_reduce: Callable[[Tensor], None] | None = None

    def __init__(self, mesh: DeviceMesh, dtype: torch.dtype, replicas: Replicas | None = None) -> None:
        self.mesh = mesh
        self.dtype = dtype
        if replicas is not None and replicas.connected:
            self.after_all_reduce = replicas.all_reduce

    @classmethod
    def build(cls, config: JobConfig, mesh: Mesh) -> "GradientReducer":
        """The reducer of a run."""
        # With a dimension of replicas, even of one, FSDP sums the microbatches before ``after_all_reduce``.
        fsdp = mesh.hsdp if mesh.replicas.connected else mesh.fsdp
        return cls(fsdp, getattr(torch, config.training.mixed_precision_reduce), mesh.replicas)

    @classmethod
    def on_cpu(cls) -> type["GradientReducer"]:
        """The class whose ``build`` makes the reducer of a run on CPUs."""
        return cls

    def reduce_scatter(self) -> ReduceScatter | None:
        """A new reduce-scatter for one FSDP module; None: that of FSDP."""
        # With a dimension of replicas FSDP frees the sums of earlier microbatches on a stream of its own.
        return NoReduceScatter(records_stream=self.mesh.ndim > 1) if self.mesh.size() == 1 else None

    def reduce_scatters(self, modules: int) -> list[ReduceScatter | None]:
        """One for each FSDP module of a model part."""
        first = self.reduce_scatter()
        if isinstance(first, NoReduceScatter):  # each module waits for the one before
            return [first] * modules
        return [first, *(self.reduce_scatter() for _ in range(modules - 1))]

    def begin(self, rows: int) -> None:
        """Called before the first backward of a step. ``rows``: this rank's rows of the global batch."""

    def finish(self, model_parts: Sequence[nn.Module]) -> bool:  # noqa: ARG002
        """Complete the gradients; called after the last backward of a step. Collective.

        Returns False if the gradients are not usable: the step must then be recomputed.
        """
        return True

    def row_norms(self, gradient: DTensor) -> Tensor:
        """L2 norms along the last dimension of this rank's shard of a gradient; the result is 1-D."""
        norms: Tensor = torch.linalg.vector_norm(gradient.to_local(), dim=-1)
        return norms.flatten()

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum of the 1-D ``values`` of all ranks, as a scalar. Collective."""
        total = values.sum()
        all_reduce(total)
        return total


class NoReduceScatter(ReduceScatter):
    """For a single rank, which has nothing to reduce: the output is the input, so that FSDP's copy costs nothing.

    For each group of parameters, FSDP allocates the input, fills it with the gradients, allocates the output, copies
    the input to it, and keeps the output as the gradients of the group. The groups of a model part share one.

    ``records_stream``: also keep the memory of gradients until the host sees that FSDP's stream has used it.
    """

    input: Tensor | None = None  # set between the two calls of ``allocate``
    stream: torch.cuda.Stream | None = None  # that of FSDP's reductions, once it is known

    def __init__(self, *, records_stream: bool = False) -> None:
        self.records_stream = records_stream

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.input is None:
            if self.stream is not None:
                # There FSDP casts the gradients of a group, copies them to the host, or adds them to those of earlier
                # microbatches, and then frees them. This stream would reuse their memory too early.
                # (``Tensor.record_stream`` would keep it until the host sees that FSDP's stream has come so far. But
                # the host is a step ahead, and more and more memory is reserved.)
                torch.cuda.current_stream().wait_stream(self.stream)
            self.input = torch.empty(*size, dtype=dtype, device=device)
            return self.input
        filled, self.input = self.input, None
        if filled.is_cuda:
            self.stream = torch.cuda.current_stream()
            if self.records_stream:
                filled.record_stream(self.stream)
        return filled

    def __call__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("on one rank FSDP copies instead of reducing")
