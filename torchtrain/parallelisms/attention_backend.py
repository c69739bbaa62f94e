"""Select the attention kernel (SDPA backend)."""

import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from torchtrain.errors import ConfigError
from torchtrain.models.spec import DecoderConfig
from torchtrain.parallelisms.context_parallel import has_flash_kernel, is_supported_by_flash

CPU_BACKENDS = ("flash", "math")
BACKENDS = ("cudnn", "flash", "efficient", "math")
FA3 = "FA3"  # torch's name of FlashAttention 3, which replaces the kernels of the backend "flash"


def attention_backend_name(
    wanted: str,
    model: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    documents: bool = False,
    context: bool = False,
) -> str:
    """Return the name of the kernel that computes causal attention of ``model``.

    ``documents``: whether a document mask is used. ``context``: whether sequences are sharded (context parallelism).

    Raises:
        ConfigError: the backend ``wanted`` has no kernel for these shapes.
    """
    if documents and device.type == "cuda":
        return "flex"
    flash = (current_flash_attention_impl() or "flash").lower()
    context = context and device.type == "cuda"
    if context and has_flash_kernel(device.type) and is_supported_by_flash(dtype, model.head_size):
        return flash
    # On a GPU in float32 or with an explicit mask, ``attend`` repeats key/value heads instead of using grouped-query
    # attention.
    repeats = context or (device.type == "cuda" and dtype is torch.float32)
    kv_heads = model.n_heads if repeats else model.n_kv_heads
    q, k = (  # expanded: full shapes, but memory for only one head's vector
        torch.empty(model.head_size, dtype=dtype, device=device).expand(1, heads, model.max_seq_len, -1)
        for heads in (model.n_heads, kv_heads)
    )
    mask = q.new_empty(q.shape[2], dtype=torch.bool).expand(q.shape[2], -1) if context else None
    gqa = model.n_heads != kv_heads
    try:
        choice = SDPBackend(torch._fused_sdp_choice(q, k, k, mask, is_causal=mask is None, enable_gqa=gqa))
    except RuntimeError:
        raise ConfigError(
            f"training.attention_backend = {wanted!r} has no kernel here for {model.n_heads} heads of "
            f"{model.head_size} channels with {model.n_kv_heads} key/value heads, in {dtype}; set 'auto'"
        ) from None
    if choice == SDPBackend.FLASH_ATTENTION and device.type == "cuda":
        return flash
    return choice.name.removesuffix("_ATTENTION").lower()


def check_attention_backend(wanted: str, device: torch.device) -> None:
    """Raise ConfigError if the SDPA backend ``wanted`` does not exist on this type of device."""
    if device.type == "cpu" and wanted not in (*CPU_BACKENDS, "auto"):
        raise ConfigError(
            f"training.attention_backend = {wanted!r} needs a GPU; on CPU there are {', '.join(CPU_BACKENDS)} and auto"
        )


def choose_attention_backend(wanted: str) -> None:
    """Enable only the SDPA backend ``wanted`` in this process, or with "auto" all of them.

    Raises:
        ConfigError: ``wanted`` is "fa3", and FlashAttention 3 is not installed.
    """
    if current_flash_attention_impl() == FA3:
        restore_flash_attention_impl()
    if wanted == "fa3":
        try:
            activate_flash_attention_impl(FA3)
        except (ImportError, RuntimeError) as error:  # RuntimeError: a build without kernels
            raise ConfigError(
                "training.attention_backend = 'fa3' needs the package flash_attn_3, and its module "
                f"flash_attn_interface cannot be used: {error}; install it from "
                "https://github.com/Dao-AILab/flash-attention (in the folder hopper: python setup.py install), or set "
                "'auto'"
            ) from None
    enabled = BACKENDS if wanted == "auto" else ("flash",) if wanted == "fa3" else (wanted,)
    # Set for the process instead of around each call: compiled blocks treat it as a constant, and it applies to all
    # attention.
    torch.backends.cuda.enable_cudnn_sdp("cudnn" in enabled)
    torch.backends.cuda.enable_flash_sdp("flash" in enabled)
    torch.backends.cuda.enable_mem_efficient_sdp("efficient" in enabled)
    torch.backends.cuda.enable_math_sdp("math" in enabled)
