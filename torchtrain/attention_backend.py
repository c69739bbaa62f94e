"""Which kernel scaled_dot_product_attention takes."""

import torch
from torch.nn.attention import SDPBackend

from torchtrain.errors import ConfigError
from torchtrain.models.llama.model import TransformerConfig

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
CPU_BACKENDS = ("flash", "math")


def attention_backend_name(model: TransformerConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Name of the kernel that causal attention of this shape gets."""
    if device.type not in ("cpu", "cuda"):
        return "unknown"
    q, k = (
        torch.empty(1, heads, model.max_seq_len, model.head_dim, dtype=dtype, device=device)
        for heads in (model.n_heads, model.n_kv_heads)
    )
    choice = SDPBackend(torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=model.n_heads != model.n_kv_heads))
    return next(name for name, backend in BACKENDS.items() if backend == choice)


def choose_attention_backend(wanted: str, device: torch.device) -> None:
    """Let this process take the kernel ``wanted`` alone, or any for auto; ConfigError where the device has it not."""
    if wanted == "auto":
        return
    if device.type == "cpu" and wanted not in CPU_BACKENDS:
        raise ConfigError(
            f"training.attention_backend = {wanted!r} needs a GPU; on CPU there are {', '.join(CPU_BACKENDS)} and auto"
        )
    # For the whole process and not around each call: compiled blocks see it as a constant, and all attention obeys.
    torch.backends.cuda.enable_cudnn_sdp(wanted == "cudnn")
    torch.backends.cuda.enable_flash_sdp(wanted == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(wanted == "efficient")
    torch.backends.cuda.enable_math_sdp(wanted == "math")
