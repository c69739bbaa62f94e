"""A model whose output is its embedding, through every entrance: it computes what transformers' does."""

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
from torchtrain.checkpoint.hf import write_hf_config
from torchtrain.checkpoint.states import ModelState
from torchtrain.convert import main as convert
from torchtrain.inference.trained_model import load_model
from torchtrain.models import families as hf

TIED = replace(TINY, tied_embeddings=True)
TOKENS = torch.randint(0, TIED.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A random tied model that transformers has saved, and its folder."""
    folder = tmp_path_factory.mktemp("theirs") / "hf"
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**hf.hf_config(TIED, "float32", 1, 2), attn_implementation="eager"))
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    model.save_pretrained(folder)
    write_hf_config(folder, TIED, "float32", "")
    return folder, model


@pytest.fixture(scope="module")
def run(theirs: tuple[Path, nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that starts from these weights on two ranks, resumes, and does not change them."""
    folder = tmp_path_factory.mktemp("run")
    options = ("--optimizer.lr", "0", "--checkpoint.initial_load_path", str(theirs[0]))
    assert "starts from the weights in" in finish(folder, *options, "--training.steps", "2", shape=TIED)
    assert "resumed from" in finish(folder, *options, "--training.steps", "4", shape=TIED)
    return folder


@pytest.fixture(autouse=True)
def tied_flavor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("torchtrain.models.model_config.flavor_config", lambda *_: TIED)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def assert_same_logits(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


def from_hf_folder(folder: Path, _: Path, __: Path) -> Path:
    return folder


def from_a_run(_: Path, run: Path, __: Path) -> Path:
    return run


def from_a_checkpoint_converted(folder: Path, _: Path, target: Path) -> Path:
    assert convert([str(folder), str(target / "ours"), "--to", "torchtrain", "--dtype", "float32"]) == 0
    return target / "ours"


def from_an_export(_: Path, run: Path, target: Path) -> Path:
    assert convert([str(run), str(target / "hf"), "--dtype", "float32"]) == 0
    return target / "hf"


Entrance = Callable[[Path, Path, Path], Path]
ENTRANCES = (from_hf_folder, from_a_run, from_a_checkpoint_converted, from_an_export)


@pytest.fixture(scope="module")
def through(
    theirs: tuple[Path, nn.Module], run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Entrance], Path]:
    """The folder of an entrance, made when a test first asks for it."""
    return cache(lambda entrance: entrance(theirs[0], run, tmp_path_factory.mktemp("entrance")))


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_generates_what_transformers_does(
    theirs: tuple[Path, nn.Module],
    through: Callable[[Entrance], Path],
    entrance: Entrance,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, opened = theirs[1], through(entrance)
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


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_is_scored_as_transformers_is(
    theirs: tuple[Path, nn.Module], through: Callable[[Entrance], Path], entrance: Entrance
) -> None:
    from torchtrain.evaluate import HarnessModel

    model, harness = theirs[1], HarnessModel(str(through(entrance)))
    context, continuation = TOKENS[0, :10].tolist(), TOKENS[0, 10:].tolist()
    ((score, _),) = harness._loglikelihood_tokens([(None, context, continuation)], disable_tqdm=True)
    log_probabilities = model(TOKENS[:1]).logits[0, 9:-1].log_softmax(-1)
    assert score == pytest.approx(log_probabilities.gather(1, TOKENS[0, 10:, None]).sum().item(), rel=1e-5)


def test_transformers_reads_the_export(theirs: tuple[Path, nn.Module], through: Callable[[Entrance], Path]) -> None:
    exported = through(from_an_export)
    assert json.loads((exported / "config.json").read_text())["tie_word_embeddings"] is True
    model = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager")
    assert_same_logits(model(TOKENS).logits, theirs[1](TOKENS).logits)


def test_names_that_share_an_entry_must_share_a_tensor() -> None:
    from torchtrain.models.llama import Transformer

    model = Transformer(TIED)
    model.output.weight = nn.Parameter(model.tok_embeddings.weight.detach().clone())
    with pytest.raises(AssertionError, match=r"output.weight and tok_embeddings.weight must be one parameter"):
        ModelState([model], tied=True).state_dict()
