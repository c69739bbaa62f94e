"""Plugin: replicas of a job that may die and join while the run continues (docs/replicas.md)."""

from torchtrain.config.registry import CONFIG_SECTIONS

REQUIRES = ("torchtrain.plugins.exact_sums", "torchtrain.plugins.recheck")

CONFIG_SECTIONS.add("replicas", "torchtrain.plugins.replicas.options:ReplicasConfig")
