"""Plugin: model families that differ a little from Llama (docs/families.md)."""

from torchtrain.config.registry import MODELS

# As strings, which are imported on first use: --help and a rejected config need no PyTorch.
for _name in ("gemma3_text", "granite", "olmo2", "olmo3", "smollm3"):
    MODELS.add(_name, f"{__name__}.{_name}:{_name.upper()}")
