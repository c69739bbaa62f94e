"""Tied embeddings: logits, generation and evaluation equal transformers', for every way to load the model."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_run import TINY, finish
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from torchtrain import generate
from torchtrain.convert import main as convert
from torchtrain.plugins.evaluation.trained_model import load_model
from torchtrain.plugins.huggingface import llama as hf
from torchtrain.plugins.huggingface.safetensors_folder import write_hf_config

TIED = replace(TINY, tied_embeddings=True)
TOKENS = torch.randint(0, TIED.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A random tied model of transformers, and the folder that it is saved in."""
    folder = tmp_path_factory.mktemp("hf_model") / "hf"
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**hf.hf_config(TIED, "float32", 1, 2), attn_implementation="eager"))
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    model.save_pretrained(folder)
    write_hf_config(folder, TIED, "float32", "")
    return folder, model


@pytest.fixture(scope="module")
def run(hf_model: tuple[Path, nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that starts from these weights on two ranks, resumes on one, and does not change them."""
    folder = tmp_path_factory.mktemp("run")
    options = ("--optimizer.lr", "0", "--checkpoint.initial_load_path", str(hf_model[0]))
    assert "starts from the weights in" in finish(folder, *options, "--training.steps", "2", shape=TIED)
    assert "resumed from" in finish(folder, *options, "--training.steps", "4", ranks=1, shape=TIED)
    return folder


@pytest.fixture(autouse=True)
def tied_flavor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("torchtrain.models.model_config.flavor_config", lambda *_: TIED)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def assert_same_logits(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def from_hf_folder(folder: Path, _: Path, __: Path) -> Path:
    return folder


def from_run(_: Path, run: Path, __: Path) -> Path:
    return run


def from_converted_checkpoint(folder: Path, _: Path, target: Path) -> Path:
    assert convert([str(folder), str(target / "ours"), "--to", "torchtrain", "--dtype", "float32"]) == 0
    return target / "ours"


def from_export(_: Path, run: Path, target: Path) -> Path:
    assert convert([str(run), str(target / "hf"), "--dtype", "float32"]) == 0
    return target / "hf"


Source = Callable[[Path, Path, Path], Path]
ON_SOURCES = pytest.mark.parametrize(
    "source",
    [
        from_hf_folder,
        from_run,
        *(pytest.param(source, marks=pytest.mark.slow) for source in (from_converted_checkpoint, from_export)),
    ],
)


@pytest.fixture(scope="module")
def folder_of(
    hf_model: tuple[Path, nn.Module], run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Source], Path]:
    """Return a function from a source to its folder, which is created at the first call."""
    return cache(lambda source: source(hf_model[0], run, tmp_path_factory.mktemp("source")))


@ON_SOURCES
def test_generated_text_equals_transformers(
    hf_model: tuple[Path, nn.Module],
    folder_of: Callable[[Source], Path],
    source: Source,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, opened = hf_model[1], folder_of(source)
    texts = []
    for _ in range(2):
        assert (
            generate.main([str(opened), "--prompt", "def main(", "--max_new_tokens", "12", "--temperature", "0"]) == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    trained = load_model(opened)
    assert_same_logits(trained.model(TOKENS), model(TOKENS).logits)
    prompt = torch.tensor([trained.tokenizer.encode("def main(", bos=True)])
    expected = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    after_bos = expected[0, 1:].tolist()
    assert texts[0].strip() == trained.tokenizer.decode(after_bos).strip()


@ON_SOURCES
def test_log_likelihood_equals_transformers(
    hf_model: tuple[Path, nn.Module], folder_of: Callable[[Source], Path], source: Source
) -> None:
    from torchtrain.plugins.evaluation.evaluate_command import HarnessModel

    model, harness = hf_model[1], HarnessModel(str(folder_of(source)))
    context, continuation = TOKENS[0, :10].tolist(), TOKENS[0, 10:].tolist()
    ((score, _),) = harness._loglikelihood_tokens([(None, context, continuation)], disable_tqdm=True)
    log_probabilities = model(TOKENS[:1]).logits[0, 9:-1].log_softmax(-1)
    assert score == pytest.approx(log_probabilities.gather(1, TOKENS[0, 10:, None]).sum().item(), rel=1e-5)


def test_transformers_loads_the_export(hf_model: tuple[Path, nn.Module], folder_of: Callable[[Source], Path]) -> None:
    exported = folder_of(from_export)
    assert json.loads((exported / "config.json").read_text())["tie_word_embeddings"] is True
    model = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager")
    assert_same_logits(model(TOKENS).logits, hf_model[1](TOKENS).logits)
