"""Pretraining Llama models in native PyTorch."""
