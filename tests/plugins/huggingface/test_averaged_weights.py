"""Averaged weights, and the mean of checkpoints, in conversions, exports and generation."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import forked_run
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forked_run import different_tensors, finish, saved_tensors
from parity import config_of
from safetensors.torch import load_file
from test_learning import EMA_OPTIONS, train_with_averages
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchtrain.convert import main as convert
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.errors import ConfigError
from torchtrain.plugins.evaluation.trained_model import load_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_with_averages(tmp_path_factory.mktemp("run"))


@pytest.fixture
def flavor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("torchtrain.models.model_config.flavor_config", lambda *_: forked_run.TINY)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint that ``convert`` has written, by name."""
    dcp_to_torch_save(folder, folder.with_suffix(".pt"))
    tensors = torch.load(folder.with_suffix(".pt"), weights_only=True)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


@pytest.mark.usefixtures("flavor")
def test_averaged_weights_and_the_mean_of_checkpoints_are_converted(run: Path, tmp_path: Path) -> None:
    options = ("--to", "torchtrain", "--dtype", "float32")
    saved = {step: saved_tensors(run, step) for step in (4, 6, 8)}
    assert convert([str(run), str(tmp_path / "ema"), *options, "--weights", "ema"]) == 0
    found = weights_of(tmp_path / "ema")
    assert found.keys() == {name.removeprefix("model.") for name in saved[8] if name.startswith("model.")}
    for name, tensor in found.items():
        assert torch.equal(tensor, saved[8][f"ema.{name}"]), name
    assert convert([str(run), str(tmp_path / "mean"), *options, "--average", "3"]) == 0
    for name, tensor in weights_of(tmp_path / "mean").items():
        mean = torch.stack([tensors[f"model.{name}"] for tensors in saved.values()]).double().mean(dim=0)
        assert torch.equal(tensor, mean.float()), name


@pytest.mark.usefixtures("flavor")
@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("", ("--average", "9"), "the mean of 9 checkpoints was asked for, and .* has 4; give a run's folder"),
        ("checkpoint/step-8", ("--average", "2"), "the mean of 2 checkpoints was asked for, and .* is one"),
        ("", ("--average", "0"), "--average = 0 must be at least 1"),
        ("hf", ("--weights", "ema"), "has one set of weights; 'ema' needs the checkpoints of a run"),
        ("hf", ("--average", "2"), "has one set of weights"),
        ("plain", ("--weights", "ema"), "error: .*step-2 has no averaged .* take the trained weights$"),
    ],
)
def test_convert_rejects_averages_that_do_not_exist(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, options: tuple[str, ...], message: str
) -> None:
    folder = run / source
    if source == "hf" and not folder.exists():
        assert convert([str(run), str(folder)]) == 0
    if source == "plain" and not folder.exists():
        finish(folder, "--training.steps", "2", ranks=1)
    assert convert([str(folder), str(tmp_path / "out"), *options]) == 2
    assert re.search(message, capsys.readouterr().err.strip())
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("flavor")
def test_averaged_weights_are_used_by_validation_generation_and_export(run: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "validation_loss" in line][-1]
    tokenizer = load_tokenizer("")
    tokens = torch.tensor(tokenizer.encode((run / "texts/a.txt").read_text(), bos=True, eos=True))
    for weights, prefix in (("trained", "validation"), ("ema", "validation_ema")):
        model = load_model(run, "cpu", weights=weights).model
        windows = zip(tokens[:-1].split(32), tokens[1:].split(32), strict=True)
        losses = [F.cross_entropy(model(inputs[None])[0], labels, reduction="sum") for inputs, labels in windows]
        assert last[f"{prefix}_tokens"] == len(tokens) - 1
        assert last[f"{prefix}_loss"] == pytest.approx(sum(losses).item() / (len(tokens) - 1), rel=1e-5)
        dist.destroy_process_group()
    with pytest.raises(ConfigError, match="weights = 'emma' do not exist; there are trained and ema"):
        load_model(run, "cpu", weights="emma")
    export = ("--huggingface.export", "--huggingface.export_weights", "ema")
    finish(tmp_path, *EMA_OPTIONS, "--training.steps", "2", *export, "--huggingface.export_dtype", "float32", ranks=1)
    assert convert([str(tmp_path), str(tmp_path / "converted"), "--weights", "ema", "--dtype", "float32"]) == 0
    files = [load_file(tmp_path / name / "model-00001-of-00001.safetensors") for name in ("hf", "converted")]
    assert different_tensors(*files) == []


def test_averaged_weights_without_ema_are_not_exported() -> None:
    message = r"huggingface.export_weights = 'ema' needs averaged weights: set ema.enable = true"
    with pytest.raises(ConfigError, match=message):
        config_of(huggingface={"export_weights": "ema"})
