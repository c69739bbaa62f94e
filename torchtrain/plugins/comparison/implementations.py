"""Compare our model with that of transformers, on the same weights and rows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtrain.checkpoint.weights import check_same_architecture, find_checkpoint
from torchtrain.datasets.build import build_dataloader
from torchtrain.datasets.dataloader import Batch
from torchtrain.distributed.mesh import Mesh, ParallelDims
from torchtrain.errors import CheckpointError, ConfigError
from torchtrain.models.loss import cross_entropy_sum
from torchtrain.models.spec import Decoder
from torchtrain.plugins.comparison.fingerprint_recorder import FingerprintRecorder
from torchtrain.plugins.comparison.fingerprints import StepFingerprints, first_difference
from torchtrain.plugins.comparison.runs import Finding, RunFolder, summarize
from torchtrain.plugins.evaluation.trained_model import load_model
from torchtrain.plugins.huggingface.config import hf_format, read_hf_config
from torchtrain.plugins.huggingface.meta import meta_rows_to_ours


def compare_implementations(run: RunFolder, hf_folder: Path) -> dict[str, dict[str, Any]]:
    """Compare the run's newest checkpoint with the model that transformers loads from ``hf_folder``, on the run's data.

    Raises:
        ConfigError: transformers is not installed.
        CheckpointError: a model cannot be loaded, or their shapes differ.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(f"--against needs transformers: pip install transformers ({error})") from None
    trained, training = load_model(run.path, "cpu", "float32"), run.config.training
    ours = trained.model.requires_grad_(True)
    hf_name = hf_format(ours.config).parameter_name
    may_differ = ("norm_eps", "rope_theta", "rope_scaling")
    check_same_architecture(read_hf_config(hf_folder), ours.config, hf_folder, may_differ)
    try:
        theirs = AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32)
    except Exception as error:  # of files that are missing or damaged it has many kinds
        raise CheckpointError(f"{hf_folder} cannot be loaded by transformers: {error}") from error
    for dtype in (torch.bfloat16, torch.float16):  # of the folder, perhaps: then ours are rounded like an export
        if all(torch.equal(parameter, parameter.to(dtype).float()) for parameter in theirs.parameters()):
            for parameter in ours.parameters():
                parameter.data = parameter.data.to(dtype).float()
    loader = build_dataloader(
        replace(run.config.data, when_exhausted="repeat"),  # they may not fill this batch
        trained.tokenizer,
        seq_len=training.seq_len,
        global_batch_size=2,
        rows=range(2),
        seed=training.seed,
        device=trained.device,
    )
    batch = next(loader)
    loader.close()
    step = fingerprint_of(ours, ours, str, batch)
    finding, before = first_difference(step, fingerprint_of(theirs, ours, hf_name, batch), 1)
    about = Finding(f"{find_checkpoint(run.path)} and {hf_folder}, on one batch of the data")
    if finding is None:
        count = len(step.tensors)
        agree = Finding(f"{count} tensors agree to {before:.1e}", True, steps=1, tensors=count)
        return {"computed": summarize([about, agree])}
    findings = [about, Finding(str(finding), False, finding._asdict())]
    for kind, heads in {"attention.wq": ours.config.n_heads, "attention.wk": ours.config.n_kv_heads}.items():
        if finding.key.endswith(f"{kind}.weight"):
            other = theirs.get_parameter(hf_name(finding.key))
            if torch.allclose(meta_rows_to_ours(other, heads), ours.get_parameter(finding.key)):
                findings.append(Finding("its rows are in the order of Meta's files, not in that of Hugging Face's"))
    return {"computed": summarize(findings)}


def fingerprint_of(model: nn.Module, ours: Decoder, name_of: Callable[[str], str], batch: Batch) -> StepFingerprints:
    """Record fingerprints of forward and backward of ``batch``; ``name_of`` maps our parameter names to the model's."""
    parameters = {name: model.get_parameter(name_of(name)) for name, _ in ours.named_parameters()}
    modules = {
        name.removesuffix(".weight"): model.get_submodule(name_of(name).removesuffix(".weight"))
        for name in parameters
        if name.endswith(".weight") and name != "output.weight"
    }
    rows, seq = batch.tokens.shape
    prints = FingerprintRecorder(
        ours.config, Mesh(torch.device("cpu"), ParallelDims()), "float32", rows, torch.arange(seq)
    )
    prints.begin(batch.tokens, parameters)
    with prints.recording({model: modules}):
        logits = model(batch.tokens)
        total = cross_entropy_sum(getattr(logits, "logits", logits), batch.labels)
        (total / batch.labels.numel()).backward()  # type: ignore[no-untyped-call]
    prints.add_parameters("gradient", {name: p.grad for name, p in parameters.items() if p.grad is not None})
    prints.add_loss(total.detach())
    step = prints.collect(batch)
    assert step is not None
    return step
