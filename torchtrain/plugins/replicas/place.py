"""The place in the data of all rows of the global batch, which every rank of every replica keeps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.checkpoint.states import LoaderState
from torchtrain.datasets.dataloader import DataLoader, LoaderLayout
from torchtrain.distributed.mesh import Mesh
from torchtrain.distributed.process_group import all_reduce
from torchtrain.plugins.replicas.group import ReplicaGroup


class PlaceState(LoaderState):
    """The state of the data loader after the last complete step, of all rows: so rows can move between ranks.

    A checkpoint of it is that of ``LoaderState``.

    Attributes:
        place: int64 (global_batch_size, columns), as ``DataLoader.state_dict`` of a loader of all rows.
    """

    def __init__(self, loader: DataLoader, mesh: Mesh) -> None:
        """``loader`` is given all rows, until ``read``."""
        super().__init__(loader, mesh)
        loader.reassign(range(loader.global_batch_size))
        self.place: Tensor = loader.state_dict()["rows"]
        self._layout = loader.layout
        self._must_reread = True

    @property
    def layout(self) -> LoaderLayout:
        """That of ``place``. Text has more columns after a change of the global batch size."""
        return self._layout

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.place} if self._expected is None else super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._expected is not None:
            super().load_state_dict(state_dict)
            self.place, self._layout = self.loader.state_dict()["rows"], self.loader.layout
        self._must_reread = True

    def set_sizes(self, state_sizes: Sequence[int]) -> None:
        """Prepare to load a state with so many columns for each source, of a replica that runs."""
        self._layout = replace(self._layout, state_sizes=tuple(state_sizes))
        columns = 1 + len(state_sizes) + sum(state_sizes)
        self.place = torch.zeros(len(self.place), columns, dtype=torch.int64)

    def read(self, rows: range) -> None:
        """Let the loader continue with ``rows``, from ``place``."""
        if self._must_reread or rows != self.loader.rows:
            self.loader.reassign(rows)
            self.loader.resume(self.place.numpy(), self.layout, [True] * len(self.layout.state_sizes))
        self._must_reread = False

    def discard(self) -> None:
        """The loader has read a batch of a step that is discarded: it reads it again."""
        self._must_reread = True

    def next(self, replicas: ReplicaGroup, group: dist.ProcessGroup) -> Tensor:
        """The place after the step whose batch was read, which is to be kept when the step is complete. Collective.

        The step is discarded if a row is computed by no rank, or by several.
        """
        rows, counts = self.loader.rows, torch.zeros(len(self.place), 1, dtype=torch.int64)
        table = torch.cat((counts, torch.zeros_like(self.place)), dim=1)
        # Ranks that share rows (tensor, context and pipeline parallelism) have the same: one of them adds it.
        if all(self.mesh.world.get_local_rank(name) == 0 for name in ("pipeline", "context", "tensor")):
            table[rows.start : rows.stop, 0] = 1
            table[rows.start : rows.stop, 1:] = self.loader.state_dict()["rows"]
        all_reduce(table, group)
        replicas.all_reduce(table)
        if not bool((table[:, 0] == 1).all()):
            replicas.fail("a row of the global batch is computed by no replica, or by several")
        return table[:, 1:].contiguous()
