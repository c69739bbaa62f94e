"""The interface of other ways to split a model over tensor- and context-parallel ranks, which plugins bring."""

from abc import ABC, abstractmethod
from typing import Any

from torchtrain.config.registry import MODEL_SPLITS
from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import Mesh
from torchtrain.models.loss import OutputLoss
from torchtrain.models.spec import Decoder


class ModelSplit(ABC):
    """Replaces ``apply_tensor_parallel`` and ``apply_context_parallel``; see ``MODEL_SPLITS``. It has no state."""

    @abstractmethod
    def apply(self, model: Decoder, mesh: Mesh) -> None:
        """Split ``model``, or a pipeline stage of it, on the meta device, in place.

        Names and shapes of parameters must not change. The final norm must return the full sequences of a rank, as a
        DTensor on ``mesh.tensor`` if there are tensor-parallel ranks.
        """

    @abstractmethod
    def loss(self, mesh: Mesh, *args: Any, **options: Any) -> OutputLoss:
        """The loss; ``args`` and ``options`` are those of ``OutputLoss``."""


def model_split(config: JobConfig) -> ModelSplit | None:
    """The split that ``config`` asks for; None: that of ``parallelize_llama``."""
    built = (MODEL_SPLITS[name](config) for name in MODEL_SPLITS)
    return next((split for split in built if split is not None), None)
