"""The dense decoder of Llama, Mistral and Qwen."""

from torchtrain.models.llama.model import RopeScaling, Transformer, TransformerConfig

__all__ = ["RopeScaling", "Transformer", "TransformerConfig"]
