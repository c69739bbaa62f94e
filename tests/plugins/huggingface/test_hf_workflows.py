"""Workflows with Hugging Face's files: exports, conversions, and training that begins from them."""

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_command import run_command
from forked_run import TINY, finish
from safetensors import safe_open
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer

from torchtrain.checkpoint.states import parameter_shapes
from torchtrain.checkpoint.weights import resolve_model_section
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.distributed.connections import gloo_backend
from torchtrain.errors import CheckpointError, ConfigError
from torchtrain.models.model_config import build_model_config
from torchtrain.models.options import ModelConfig
from torchtrain.plugins.evaluation.trained_model import load_model
from torchtrain.plugins.huggingface.conversion import convert
from torchtrain.plugins.huggingface.safetensors_folder import find_tensors, save_hf, write_hf_config

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def exported_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dump folder of a run with an export, which must not be changed."""
    folder = tmp_path_factory.mktemp("exported")
    finish(folder, "--training.steps", "2", "--huggingface.export", ranks=1)
    return folder


def test_concurrent_exports_to_one_folder_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtrain.plugins.huggingface.safetensors_folder.FILE_BYTES", 20_000)  # three files
    dist.init_process_group(gloo_backend(), store=dist.HashStore(), rank=0, world_size=1)
    target, shapes = tmp_path / "target", parameter_shapes(TINY)
    other_started, finish_other, errors = threading.Event(), threading.Event(), []

    def zeros(name: str) -> torch.Tensor:
        if not other.ident:
            other.start()
            assert other_started.wait(30)
        return torch.zeros_like(shapes[name], device="cpu")

    def ones(name: str) -> torch.Tensor:
        other_started.set()
        assert finish_other.wait(30)
        return torch.ones_like(shapes[name], device="cpu")

    def run_other() -> None:
        try:
            save_hf(shapes, target, TINY, "float32", "", read=ones)
        except ConfigError as error:
            errors.append(str(error))

    other = threading.Thread(target=run_other)
    save_hf(shapes, target, TINY, "float32", "", read=zeros)
    try:
        found = find_tensors(target, TINY)
    finally:
        finish_other.set()
        other.join()
        dist.destroy_process_group()
    for path, name in found.values():
        with safe_open(path, framework="pt") as opened:
            assert not opened.get_tensor(name).any(), name
    assert errors
    assert "another process has created it in the meantime" in errors[0]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_target_made_by_another_process_meanwhile_is_kept(
    exported_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtrain.models.model_config.flavor_config", lambda *_: TINY)
    target = tmp_path / "target"

    def make_target(tensor: torch.Tensor, _: str) -> torch.Tensor:
        target.mkdir(exist_ok=True)
        (target / "theirs").write_text("theirs")
        return tensor

    monkeypatch.setattr("torchtrain.plugins.huggingface.conversion.finite", make_target)
    with pytest.raises(CheckpointError, match=r"target could not be written: .*Directory not empty"):
        convert(exported_run, target, "torchtrain", "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert [path.name for path in target.iterdir()] == ["theirs"]


def test_run_without_checkpoints_replaces_an_earlier_export(exported_run: Path, tmp_path: Path) -> None:
    shutil.copytree(exported_run, tmp_path, dirs_exist_ok=True)
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    before = file.read_bytes()
    options = ("--training.steps", "2", "--huggingface.export", "--checkpoint.no-enable", "--training.seed", "1")
    finish(tmp_path, *options, ranks=1)
    assert file.read_bytes() != before


def test_changed_tokenizer_is_an_error_in_convert_and_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtrain.models.model_config.flavor_config", lambda *_: TINY)
    file, run = tmp_path / "tokenizer.model", tmp_path / "run"
    content = (ROOT / "torchtrain/assets/tokenizer.model").read_bytes()
    file.write_bytes(content)
    finish(run, "--model.tokenizer_path", str(file), "--training.steps", "2", ranks=1)
    proto = sentencepiece_model_pb2.ModelProto.FromString(content)
    proto.pieces[300].piece, proto.pieces[301].piece = proto.pieces[301].piece, proto.pieces[300].piece
    file.write_bytes(proto.SerializeToString())
    for use in (lambda: convert(run, tmp_path / "hf", "hf", "float32"), lambda: load_model(run)):
        with pytest.raises(CheckpointError, match=r"was another one \(SHA-256 .*name the one to use by tokenizer_path"):
            use()
    convert(run, tmp_path / "hf", "hf", "float32", str(file))


def test_special_token_beyond_the_vocabulary_size_is_allowed(tmp_path: Path) -> None:
    write_hf_config(tmp_path, TINY, "float32", "")
    file = tmp_path / "tokenizer.json"
    library = Tokenizer.from_file(str(file))
    library.add_special_tokens(["<pad>"])
    library.save(str(file))
    section = resolve_model_section(ModelConfig(hf_folder=str(tmp_path)))
    tokenizer = load_tokenizer(section.tokenizer_path)
    assert (tokenizer.vocab_size, build_model_config(section, tokenizer, 32).vocab_size) == (4097, 4096)
    library.add_tokens(["one more word"])
    library.save(str(file))
    with pytest.raises(ConfigError, match=r"vocab_size = 4096 must be at least 4098"):
        build_model_config(section, load_tokenizer(section.tokenizer_path), 32)


def test_config_for_continued_pretraining_needs_model_and_data_options(exported_run: Path, tmp_path: Path) -> None:
    config = ("torchtrain.train", "--job.config_file", "train_configs/continue_hf.toml")
    folder = tmp_path / "run"
    rejected = run_command(*config, "--job.dump_folder", str(folder))
    assert (rejected.returncode, "YOUR_MODEL" in rejected.stderr) == (2, True)
    hf = str(exported_run / "hf")
    small = ("--training.seq_len", "32", "--training.global_batch_size", "2", "--training.steps", "2")
    start = (*config, "--job.dump_folder", str(folder), "--model.hf_folder", hf, *small)
    start += ("--checkpoint.initial_load_path", hf, "--metrics.log_freq", "1", "--report.no-enable")
    rejected = run_command(*start)
    assert (rejected.returncode, "data.path = 'YOUR_TEXTS' does not exist" in rejected.stderr) == (2, True), (
        rejected.stderr
    )
    assert not folder.exists()
    text = tmp_path / "mine.txt"
    text.write_text("some words of mine\n" * 100)
    found = run_command(*start, "--data.path", str(text))
    assert found.returncode == 0, found.stderr
    assert f"starts from the weights in {hf}" in found.stderr
    assert "has weights for sequences of" not in found.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert 0 < max(line.get("lr", 0) for line in lines) <= 3e-5
    assert (folder / "hf/config.json").exists()


def test_shorter_sequences_than_those_of_the_initial_weights_are_warned_of(exported_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(exported_run / "hf", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    start = ("--checkpoint.initial_load_path", str(folder), "--training.steps", "1")
    warning = "has weights for sequences of 64 tokens, and training.seq_len is 32"
    assert warning in finish(tmp_path / "short", *start, "--training.seq_len", "32", ranks=1)
