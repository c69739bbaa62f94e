"""Plugin: mixtures of experts, OLMoE and Qwen3-MoE (docs/mixture-of-experts.md)."""

from torchtrain.config.registry import CONFIG_SECTIONS, HOOKS, MODELS

# As strings, which are imported on first use: --help and a rejected config need no PyTorch.
for _name in ("olmoe", "qwen3_moe"):
    MODELS.add(_name, f"{__name__}.families:{_name.upper()}")
CONFIG_SECTIONS.add("moe", f"{__name__}.options:MoESection")
HOOKS.add("experts", f"{__name__}.hook:build_hook")
