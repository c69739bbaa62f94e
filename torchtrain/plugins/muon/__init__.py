"""Plugin: the optimizer Muon (docs/optimizers.md)."""

from torchtrain.config.registry import OPTIMIZERS

OPTIMIZERS.add("muon", "torchtrain.plugins.muon.muon:Muon")
