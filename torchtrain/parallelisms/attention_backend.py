"""Which kernel attention takes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend

from torchtrain.cpu.attention_backward import BatchedBackwardAttention
from torchtrain.devices import device_kind
from torchtrain.errors import ConfigError
from torchtrain.models.llama.model import Transformer, TransformerConfig

CPU_BACKENDS = ("flash", "math")


def attention_backend_name(
    wanted: str,
    model: TransformerConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    documents: bool = False,
    split: bool = False,
) -> str:
    """Name of the kernel that causal attention of this shape gets; ConfigError where ``wanted`` has none for it.

    ``documents``: whether a mask keeps them apart; ``split``: whether sequences are split over ranks.
    """
    if documents and device.type == "cuda":
        return "flex"
    # ``attend`` repeats the keys of grouped heads for a GPU in float32.
    kv_heads = model.n_heads if device.type == "cuda" and dtype is torch.float32 else model.n_kv_heads
    q, k = (  # of full size, and in the memory of one head's vector
        torch.empty(model.head_size, dtype=dtype, device=device).expand(1, heads, model.max_seq_len, -1)
        for heads in (model.n_heads, kv_heads)
    )
    try:
        choice = SDPBackend(torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=model.n_heads != kv_heads))
    except RuntimeError:
        raise ConfigError(
            f"training.attention_backend = {wanted!r} has no kernel here for {model.n_heads} heads of "
            f"{model.head_size} channels with {model.n_kv_heads} key/value heads, in {dtype}; take 'auto'"
        ) from None
    name = choice.name.removesuffix("_ATTENTION").lower()
    batched = has_batched_backward(wanted, dtype, device) and not (documents or split)
    return f"{name}, backward in batched products" if batched else name


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


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """For attention whose shapes change with each call: cuDNN builds a plan for each shape, in 20 to 40 ms."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def has_batched_backward(wanted: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``auto`` takes ``BatchedBackward``: in float32 torch's own backward is the faster one."""
    return wanted == "auto" and device_kind(device.type) == "cpu" and dtype is torch.bfloat16


def apply_attention_backend(model: Transformer, wanted: str, dtype: torch.dtype, device: torch.device) -> None:
    """Put ``BatchedBackwardAttention`` into every block of ``model`` where it is the fastest."""
    if has_batched_backward(wanted, dtype, device):
        model.replace_inner_attention(lambda _: BatchedBackwardAttention())
