"""Select the attention kernel (SDPA backend)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend

from torchtrain.errors import ConfigError
from torchtrain.models.spec import DecoderConfig

CPU_BACKENDS = ("flash", "math")
BACKENDS = ("cudnn", "flash", "efficient", "math")


def attention_backend_name(
    wanted: str,
    model: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    documents: bool = False,
) -> str:
    """Return the name of the kernel that torch selects for causal attention of ``model``.

    ``documents``: whether a document mask is used.

    Raises:
        ConfigError: the backend ``wanted`` has no kernel for these shapes.
    """
    if documents and device.type == "cuda":
        return "flex"
    # On a GPU in float32, ``attend`` repeats key/value heads instead of using grouped-query attention.
    kv_heads = model.n_heads if device.type == "cuda" and dtype is torch.float32 else model.n_kv_heads
    q, k = (  # expanded: full shapes, but memory for only one head's vector
        torch.empty(model.head_size, dtype=dtype, device=device).expand(1, heads, model.max_seq_len, -1)
        for heads in (model.n_heads, kv_heads)
    )
    try:
        choice = SDPBackend(torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=model.n_heads != kv_heads))
    except RuntimeError:
        raise ConfigError(
            f"training.attention_backend = {wanted!r} has no kernel here for {model.n_heads} heads of "
            f"{model.head_size} channels with {model.n_kv_heads} key/value heads, in {dtype}; set 'auto'"
        ) from None
    return choice.name.removesuffix("_ATTENTION").lower()


def check_attention_backend(wanted: str, device: torch.device) -> None:
    """Raise ConfigError if the SDPA backend ``wanted`` does not exist on this type of device."""
    if device.type == "cpu" and wanted not in (*CPU_BACKENDS, "auto"):
        raise ConfigError(
            f"training.attention_backend = {wanted!r} needs a GPU; on CPU there are {', '.join(CPU_BACKENDS)} and auto"
        )


def choose_attention_backend(wanted: str) -> None:
    """Enable only the SDPA backend ``wanted`` in this process, or with "auto" all of them."""
    enabled = BACKENDS if wanted == "auto" else (wanted,)
    # Set for the process instead of around each call: compiled blocks treat it as a constant, and it applies to all
    # attention.
    torch.backends.cuda.enable_cudnn_sdp("cudnn" in enabled)
    torch.backends.cuda.enable_flash_sdp("flash" in enabled)
    torch.backends.cuda.enable_mem_efficient_sdp("efficient" in enabled)
    torch.backends.cuda.enable_math_sdp("math" in enabled)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Context manager that disables cuDNN attention, for shapes that change with each call.

    cuDNN builds an execution plan for each shape, which takes 20 to 40 ms.
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
