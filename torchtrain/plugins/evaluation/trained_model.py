"""Load a trained model for inference, from a checkpoint of any layout or from a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path

import torch

from torchtrain.checkpoint.states import STATES
from torchtrain.checkpoint.weights import find_weights, load_weights, saved_config
from torchtrain.config.schema import JobConfig
from torchtrain.cpu.matmul import apply_float32_matmul
from torchtrain.datasets.tokenizers import Tokenizer, load_tokenizer, tokenizer_file
from torchtrain.distributed.mesh import Mesh, ParallelDims
from torchtrain.distributed.options import CommConfig
from torchtrain.distributed.process_group import init_process_group, pick_device, world_size
from torchtrain.errors import ConfigError
from torchtrain.models.model_config import build_model_config, longest_context
from torchtrain.models.spec import Decoder, build_model
from torchtrain.parallelisms.check import check_layout
from torchtrain.parallelisms.options import ParallelismConfig
from torchtrain.parallelisms.tensor_parallel import apply_tensor_parallel
from torchtrain.plugins.huggingface.tokenizer import begins_with_bos, check_tokenizer, find_eos_ids


@dataclass(frozen=True)
class TrainedModel:
    """A model for inference with its tokenizer.

    ``model.config.max_seq_len`` is its longest context (``longest_context``). ``bos`` is whether texts begin with a BOS
    token (``begins_with_bos``). Each of ``eos_ids`` ends a text.
    """

    model: Decoder
    tokenizer: Tokenizer
    device: torch.device
    bos: bool
    eos_ids: frozenset[int]

    @property
    def added_ids(self) -> tuple[list[int], list[int]]:
        """Ids before and after a text that begins like the texts that the model was trained on."""
        return self.tokenizer.added_bos if self.bos else self.tokenizer.added_ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of ``text``, which begins like the texts that the model was trained on."""
        return self.tokenizer.encode_prompt(text, self.added_ids)


def load_model(
    path: str | Path, device: str = "auto", dtype: str = "auto", tokenizer_path: str = "", weights: str = "trained"
) -> TrainedModel:
    """Load a trained model for inference. With torchrun, the model is sharded over all ranks by tensor parallelism.

    Args:
        path: a run's folder, one of its checkpoints (of any layout), or a Hugging Face folder.
        dtype: "bfloat16", "float16", "float32", or "auto" for bfloat16 on a GPU and float32 on the CPU.
        tokenizer_path: replaces the tokenizer of the run's config or of the folder.
        weights: "trained", or "ema" for the averaged weights.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigError: an argument is invalid, or the number of ranks does not divide the model's heads.
    """
    if weights not in STATES:
        raise ConfigError(f"weights = {weights!r} do not exist; there are {' and '.join(STATES)}")
    if dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise ConfigError(f"dtype = {dtype!r} is not supported; there are auto, bfloat16, float16 and float32")
    folder = find_weights(path)
    config = saved_config(folder)
    tokenizer = load_tokenizer(tokenizer_path or config.model.tokenizer_path)
    if not (tokenizer_path or isinstance(folder, Path)):
        check_tokenizer(folder, tokenizer, config.model.tokenizer_path)
    bos = begins_with_bos(folder, tokenizer)
    own_tokenizer = tokenizer_file(tokenizer_path or config.model.tokenizer_path)
    config_folder = folder if isinstance(folder, Path) else own_tokenizer.parent
    eos_ids = frozenset(find_eos_ids(tokenizer, config_folder, bos=bos))
    model_config = build_model_config(config.model, tokenizer, longest_context(config))
    torch_device = pick_device(device)
    if dtype == "auto":
        dtype = "bfloat16" if torch_device.type == "cuda" else "float32"
    # A generation step has one token per prompt, so there is no sequence to shard for sequence parallelism.
    layout = JobConfig(parallelism=ParallelismConfig(enable_sequence_parallel=False))
    dims = ParallelDims(tensor=world_size())
    check_layout(layout, torch_device, dims, model_config)
    init_process_group(torch_device, CommConfig().init_timeout_seconds)
    if torch_device.type == "cpu":
        apply_float32_matmul(getattr(torch, dtype))
    with torch.device("meta"):
        model = build_model(model_config)
    if dims.tensor > 1:
        apply_tensor_parallel(model, Mesh(torch_device, dims).tensor, sequence_parallel=False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))  # not the buffers: the RoPE tables remain float32
    model.to_empty(device=torch_device)
    model.tie_weights()  # to_empty splits a shared parameter in two
    model.init_buffers()
    load_weights([model], folder, model_config, weights=weights)
    return TrainedModel(model.eval().requires_grad_(False), tokenizer, torch_device, bos, eos_ids)
