"""Plugin: replicas of a job that may die and join while the run continues (docs/replicas.md)."""

from typing import Any

from torchtrain.config.registry import CONFIG_SECTIONS, TRAINERS

REQUIRES = ("torchtrain.plugins.exact_sums", "torchtrain.plugins.recheck")

CONFIG_SECTIONS.add("replicas", "torchtrain.plugins.replicas.options:ReplicasConfig")


@TRAINERS.register("replicas")
def replica_trainer(config: Any) -> type[Any] | None:
    """The trainer of a replica; None without ``replicas.lighthouse``."""
    from torchtrain.config.schema import section_of
    from torchtrain.plugins.replicas.options import ReplicasConfig

    if not section_of(config, ReplicasConfig).lighthouse:
        return None
    from torchtrain.plugins.replicas.trainer import ReplicaTrainer  # imports PyTorch

    return ReplicaTrainer
