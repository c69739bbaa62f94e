"""Pretraining Llama models in native PyTorch."""

__version__ = "0.1.0"
