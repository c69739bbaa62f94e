"""Our model and transformers' beside each other, on the same weights and tokens."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from torchtrain.checkpoint.hf import check_same_shape
from torchtrain.comparison.runs import Line, first_difference
from torchtrain.datasets.loader import Batch
from torchtrain.distributed.mesh import Degrees, Mesh
from torchtrain.errors import CheckpointError, ConfigError
from torchtrain.loss import cross_entropy_sum
from torchtrain.models.families import hf_name, read_hf_config
from torchtrain.models.llama import Transformer
from torchtrain.steps.fingerprinted_step import Recorder, Step, watch
from torchtrain.trained_model import load_model


def compare_implementations(run: Path, hf_folder: Path) -> Line:
    """Our model, of the run's newest checkpoint, beside transformers' of ``hf_folder``, on two rows of any tokens."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(f"--against needs transformers: pip install transformers ({error})") from None
    ours = load_model(run, "cpu", "float32").model.requires_grad_(True)
    check_same_shape(read_hf_config(hf_folder), ours.config, hf_folder, ("norm_eps", "rope_theta", "rope_scaling"))
    try:
        theirs = AutoModelForCausalLM.from_pretrained(hf_folder, dtype="auto")
    except Exception as error:  # of files that are missing or damaged it has many kinds
        raise CheckpointError(f"{hf_folder} cannot be loaded by transformers: {error}") from error
    for parameter in ours.parameters():
        parameter.data = parameter.data.to(theirs.dtype).float()  # rounded, as by an export
    theirs.float()  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(ours.config.vocab_size, (2, ours.config.max_seq_len), generator=generator)
    return first_difference(fingerprint(ours, ours, str, tokens), fingerprint(theirs, ours, hf_name, tokens), 1)


def fingerprint(model: nn.Module, ours: Transformer, name_of: Callable[[str], str], tokens: Tensor) -> Step:
    """Of forward and backward in ``model``, whose names for our parameters ``name_of`` gives."""
    parameters = {name: model.get_parameter(name_of(name)) for name, _ in ours.named_parameters()}
    modules = {
        name.removesuffix(".weight"): model.get_submodule(name_of(name).removesuffix(".weight"))
        for name in parameters
        if name.endswith(".weight") and name != "output.weight"
    }
    rows, seq = tokens.shape
    recorder = Recorder(ours.config, Mesh(torch.device("cpu"), Degrees()), rows, torch.arange(seq))
    recorder.add_parameters("", parameters)
    with watch(modules, recorder.see):
        logits = model(tokens)
        total = cross_entropy_sum(getattr(logits, "logits", logits), tokens)
        (total / tokens.numel()).backward()  # type: ignore[no-untyped-call]
    recorder.add_parameters("gradient", {name: p.grad for name, p in parameters.items() if p.grad is not None})
    return recorder.collect(Batch(tokens, tokens))
