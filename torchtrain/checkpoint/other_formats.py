"""Weights in other formats than a checkpoint's, which plugins bring, to start from."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from torchtrain.models.spec import DecoderConfig


class WeightFormat(ABC):
    """Folders of weights that ``checkpoint.initial_load_path`` may name; see ``WEIGHT_FORMATS``."""

    @abstractmethod
    def recognizes(self, path: Path) -> bool:
        """Whether ``path`` is such a folder."""

    def files_of(self, names: Sequence[str]) -> Sequence[str]:  # noqa: ARG002
        """Which files of a folder by URL are needed, of those with ``names``; none if it is no such folder."""
        return ()

    @abstractmethod
    def read_config(self, folder: Path) -> DecoderConfig:
        """The config of the model; CheckpointError if it is not supported."""

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor], folder: Path, model: DecoderConfig) -> None:
        """Write the weights of ``folder`` into ``tensors`` by the names of ``model``'s parameters. Collective.

        Raises:
            CheckpointError: a file is missing or damaged, or a parameter is not in it or has another shape.
        """
