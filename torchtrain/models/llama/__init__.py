"""The dense decoder-only transformer of Llama, Mistral and Qwen."""

from torchtrain.models.llama.model import Transformer, TransformerConfig
from torchtrain.models.llama.rope_scaling import RopeScaling

__all__ = ["RopeScaling", "Transformer", "TransformerConfig"]
