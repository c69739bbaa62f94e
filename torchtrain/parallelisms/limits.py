"""What a layout asks of the model and the batch, refused before any process group starts."""

from torchtrain.config.schema import ActivationCheckpoint, Compile, Parallelism, Training
from torchtrain.distributed.mesh import Degrees
from torchtrain.errors import ConfigError
from torchtrain.models.llama.model import TransformerConfig
from torchtrain.parallelisms.pipeline_llama import plan_stages, resolve_microbatches


def check_layout(
    model: TransformerConfig,
    degrees: Degrees,
    *,
    training: Training,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
    device_type: str,
    document_mask: bool = False,
) -> None:
    """Raise ConfigError, with the rule and a way out, where ``degrees`` cannot split ``model`` and its sequences."""
    _check_tensor(model, degrees.tensor)
    _check_sequence(degrees, training.seq_len, parallelism.enable_sequence_parallel)
    if parallelism.enable_async_tensor_parallel:
        _check_async_tensor(degrees.tensor, parallelism, compile, device_type)
    if degrees.pipeline > 1:
        plan_stages(model, parallelism)
        resolve_microbatches(parallelism, training)
        has_flex_attention = document_mask and device_type == "cuda"
        _check_split_backward(
            parallelism.pipeline_parallel_schedule, activation_checkpoint, compile, has_flex_attention
        )


def _check_tensor(model: TransformerConfig, degree: int) -> None:
    widths = {"n_heads": model.n_heads, "n_kv_heads": model.n_kv_heads, "ffn_dim": model.ffn_dim}
    for name, width in widths.items():
        if width % degree:
            fitting = [n for n in range(1, degree) if all(w % n == 0 for w in widths.values())]
            raise ConfigError(
                f"parallelism.tensor_parallel_degree = {degree} must divide the model's {name} = {width}; "
                f"try {' or '.join(map(str, fitting[-2:]))}"
            )


def _check_sequence(degrees: Degrees, seq_len: int, sequence_parallel: bool) -> None:
    context, tensor = degrees.context, degrees.tensor
    if context > 1 and seq_len % (2 * context):
        raise ConfigError(
            f"training.seq_len = {seq_len} must be a multiple of 2 * parallelism.context_parallel_degree = "
            f"{2 * context}: each rank takes two parts of a sequence; try {_near(seq_len, 2 * context)}"
        )
    if tensor > 1 and sequence_parallel and seq_len // context % tensor:
        step = tensor * context * (2 if context > 1 else 1)
        of = f" / context_parallel_degree = {seq_len // context}" if context > 1 else ""
        raise ConfigError(
            f"training.seq_len = {seq_len}{of} must be a multiple of parallelism.tensor_parallel_degree = {tensor} "
            f"with sequence parallelism; try {_near(seq_len, step)}, or set enable_sequence_parallel = false"
        )


def _check_split_backward(
    schedule: str, activation_checkpoint: ActivationCheckpoint, compile: Compile, has_flex_attention: bool
) -> None:
    if schedule not in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        return
    given = f"parallelism.pipeline_parallel_schedule = {schedule!r} runs the backward of a block in two passes"
    if compile.enable:
        raise ConfigError(f"{given}, which compiled blocks cannot; switch compile.enable off, or take Interleaved1F1B")
    if has_flex_attention:
        raise ConfigError(
            f"{given}, which flex_attention cannot, the compiled kernel for data.document_mask on a GPU; take the "
            "schedule Interleaved1F1B, or switch data.document_mask off"
        )
    if activation_checkpoint.mode == "selective" and activation_checkpoint.selective_option == "op":
        raise ConfigError(
            f"{given}, and what activation_checkpoint.mode = 'selective' keeps by op serves only one; take mode 'full' "
            "or selective_option '2', or the schedule Interleaved1F1B"
        )


def _near(value: int, step: int) -> str:
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)


def _check_async_tensor(degree: int, parallelism: Parallelism, compile: Compile, device_type: str) -> None:
    needs = {
        "a GPU": device_type == "cuda",
        "compile.enable": compile.enable,
        "parallelism.tensor_parallel_degree above 1": degree > 1,
        "parallelism.enable_sequence_parallel": parallelism.enable_sequence_parallel,
    }
    missing = [need for need, there in needs.items() if not there]
    if missing:
        raise ConfigError(
            f"parallelism.enable_async_tensor_parallel needs {' and '.join(missing)}: it lets the compiler overlap "
            "CUDA kernels; add what is missing or switch it off"
        )
