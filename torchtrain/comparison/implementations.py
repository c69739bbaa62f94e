"""Our model and transformers' beside each other, on the same weights and rows."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from torchtrain.checkpoint.hf import check_same_shape
from torchtrain.comparison.runs import Section, open_run
from torchtrain.datasets.build import build_loader
from torchtrain.datasets.loader import Batch
from torchtrain.errors import ConfigError
from torchtrain.fingerprints.judge import Step, read, walk
from torchtrain.fingerprints.record import Fingerprints, Place
from torchtrain.loss import cross_entropy_sum
from torchtrain.models.families import hf_name, read_hf_config
from torchtrain.models.llama import TransformerConfig
from torchtrain.models.llama.meta import meta_rows_to_ours
from torchtrain.trained_model import load_model


def compare_implementations(folder: Path, hf_folder: Path) -> list[Section]:
    """Our model, of the newest checkpoint in ``folder``, beside transformers' of ``hf_folder``, on rows of the data."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(f"--against needs transformers: pip install transformers ({error})") from None
    run, section = open_run(folder), Section("computed")
    trained = load_model(folder, "cpu", "float32")
    others_may = ("norm_eps", "rope_theta", "rope_scaling")
    check_same_shape(read_hf_config(hf_folder), trained.model.config, hf_folder, others_may)
    ours, training = trained.model.requires_grad_(True), run.config.training
    theirs = AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16):  # of the folder, perhaps: then ours are rounded like an export
        if all(torch.equal(parameter, parameter.to(dtype).float()) for parameter in theirs.parameters()):
            for parameter in ours.parameters():
                parameter.data = parameter.data.to(dtype).float()
    loader = build_loader(
        run.config.data,
        trained.tokenizer,
        seq_len=training.seq_len,
        global_batch_size=2,
        rows=range(2),
        seed=training.seed,
        device=trained.device,
    )
    batch = next(loader)
    loader.close()
    own, others = dict(ours.named_parameters()), dict(theirs.named_parameters())
    found = []
    for model, name_of in ((ours, str), (theirs, hf_name)):
        parameters = {name: model.get_parameter(name_of(name)) for name in own}
        leaves = [name.rpartition(".")[0] for name in own if name.endswith("weight") and name != "output.weight"]
        modules = {n: model.get_submodule(name_of(f"{n}.weight").removesuffix(".weight")) for n in leaves}
        found.append(fingerprint_of(model, modules, parameters, ours.config, batch))
    finding, before = walk(found[0], found[1], 1)
    if finding is None:
        section.say(f"{len(found[0].tensors)} tensors agree to {before:.1e}", True)
        return [section]
    section.say(str(finding), False, **finding._asdict())
    heads = {"attention.wq": ours.config.n_heads, "attention.wk": ours.config.n_kv_heads}
    for kind, count in heads.items():
        if not finding.key.endswith(f"{kind}.weight"):
            continue
        if torch.allclose(meta_rows_to_ours(others[hf_name(finding.key)], count), own[finding.key]):
            section.say("its rows are in the order of Meta's files, not in that of Hugging Face's")
    return [section]


def fingerprint_of(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    parameters: Mapping[str, Tensor],
    config: TransformerConfig,
    batch: Batch,
) -> Step:
    """Of forward and backward of ``batch``, on this process alone, by our names."""
    rows, seq = batch.tokens.shape
    with tempfile.TemporaryDirectory() as folder:
        place = Place(range(rows), rows, torch.arange(seq), seq)
        prints = Fingerprints(Path(folder), config, place, "float32")
        prints.add_parameters("", parameters)
        prints.begin(batch.tokens)
        with prints.watching({model: modules}):
            logits = model(batch.tokens)
            total = cross_entropy_sum(getattr(logits, "logits", logits), batch.labels)
            (total / batch.labels.numel()).backward()  # type: ignore[no-untyped-call]
        prints.add_parameters("gradient", {name: p.grad for name, p in parameters.items() if p.grad is not None})
        prints.add_loss(total.detach())
        prints.write(1, batch.tokens, batch.labels)
        return read(Path(folder) / "step-1")
