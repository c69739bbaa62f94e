"""The Llama family: Llama 2, 3, 3.1 and 3.2."""

from torchtrain.models.llama.flavors import flavor_config
from torchtrain.models.llama.model import RopeScaling, Transformer, TransformerConfig

__all__ = ["RopeScaling", "Transformer", "TransformerConfig", "flavor_config"]
