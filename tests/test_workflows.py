"""Interactions of options and commands: resuming, exporting, converting, and changed data, tokenizers or weights."""

import importlib.util
import json
import re
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_command import run_command
from forked_run import TINY, finish, patched_loss
from safetensors import safe_open
from sentencepiece import sentencepiece_model_pb2
from test_plot import numbers, write_run
from test_resume_compatibility import toml
from tokenizers import Tokenizer

from torchtrain import compare as compare_command
from torchtrain import generate as generate_command
from torchtrain.checkpoint.resume_compatibility import check_resume_compatibility
from torchtrain.checkpoint.states import parameter_shapes
from torchtrain.checkpoint.weights import resolve_model_section
from torchtrain.config.parse import parse
from torchtrain.config.schema import ModelConfig, SourceConfig, ValidationConfig
from torchtrain.datasets.local_files import identify
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.devices import peak_flops
from torchtrain.distributed.connections import gloo_backend
from torchtrain.errors import CheckpointError, ConfigError
from torchtrain.models.model_config import build_model_config
from torchtrain.plugins.evaluation.trained_model import load_model
from torchtrain.plugins.huggingface.conversion import convert
from torchtrain.plugins.huggingface.safetensors_folder import find_tensors, save_hf, write_hf_config
from torchtrain.plugins.planner.request import resolve_model_config

ROOT = Path(__file__).parent.parent


def test_run_resumes_after_its_initial_weights_were_deleted(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    finish(first, "--training.steps", "2", ranks=1)
    start = ("--checkpoint.initial_load_path", str(first))
    finish(second, *start, "--training.steps", "2", ranks=1)
    shutil.rmtree(first)
    assert "resumed from" in finish(second, *start, "--training.steps", "4", ranks=1)


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


def test_target_made_by_another_process_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtrain.models.model_config.flavor_config", lambda *_: TINY)
    run, target = tmp_path / "run", tmp_path / "target"
    finish(run, "--training.steps", "2", ranks=1)

    def make_target(tensor: torch.Tensor, _: str) -> torch.Tensor:
        target.mkdir(exist_ok=True)
        (target / "theirs").write_text("theirs")
        return tensor

    monkeypatch.setattr("torchtrain.plugins.huggingface.conversion.finite", make_target)
    with pytest.raises(CheckpointError, match=r"target could not be written: .*Directory not empty"):
        convert(run, target, "torchtrain", "float32")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "target"}
    assert [path.name for path in target.iterdir()] == ["theirs"]


def test_run_without_checkpoints_replaces_an_earlier_export(tmp_path: Path) -> None:
    options = ("--training.steps", "2", "--huggingface.export")
    finish(tmp_path, *options, ranks=1)
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    before = file.read_bytes()
    finish(tmp_path, *options, "--checkpoint.no-enable", "--training.seed", "1", ranks=1)
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


def test_same_data_in_another_folder_are_a_harmless_change() -> None:
    before, now = toml(data={"path": "a"}), toml(data={"path": "/elsewhere/a"})
    assert check_resume_compatibility(before, now, (), {"data.path": "1 file"}, {"data.path": "1 file"}) == [
        "config differs from the checkpoint's (harmless): data.path = '/elsewhere/a' (checkpoint: 'a')"
    ]
    with pytest.raises(CheckpointError, match="would not continue the same run"):
        check_resume_compatibility(before, now, (), {"data.path": "1 file"}, {"data.path": "2 files"})
    key = "model.tokenizer_path"
    same = {"data.name": "1 file"}
    (line,) = check_resume_compatibility(toml(data={"name": "a"}), toml(data={"name": "b"}), (), same, same)
    assert "(harmless): data.name" in line
    assert (
        len(check_resume_compatibility(toml(), toml(model={"tokenizer_path": "x"}), (), {key: "same"}, {key: "same"}))
        == 1
    )
    with pytest.raises(CheckpointError, match="tokenizer_path"):
        check_resume_compatibility(toml(), toml(model={"tokenizer_path": "x"}), ())


@pytest.mark.parametrize("whole", [True, False])
def test_renamed_data_file_is_the_same_data_if_the_order_stays(tmp_path: Path, whole: bool) -> None:
    files = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, file in enumerate(files):
        file.write_text(f'{{"text": "{number}"}}\n' * 10)

    def identity() -> str:
        return identify(sorted(tmp_path.iterdir()), whole=whole).text

    before = identity()
    files[1].rename(tmp_path / "1b.jsonl")
    assert identity() == before
    (tmp_path / "1b.jsonl").rename(tmp_path / "3.jsonl")  # another order
    assert identity() != before
    (tmp_path / "3.jsonl").rename(tmp_path / "1.txt")  # another format
    assert identity() != before


def test_labels_of_validation_sources_are_distinct() -> None:
    sources = [SourceConfig(name="org/web", subset=subset) for subset in ("deu", "fra")]
    sources += [SourceConfig(path=f"held/wiki.{language}.jsonl.gz") for language in ("en", "de")]
    labels = [source.title for source in ValidationConfig(enable=True, sources=tuple(sources)).all]
    assert labels == ["web_deu", "web_fra", "wiki.en", "wiki.de"]
    named = [
        SourceConfig(path="prepared/0"),
        SourceConfig(path="prepared/1", label="math"),
        SourceConfig(path="0.jsonl"),
    ]
    assert [source.title for source in named] == ["prepared_0", "math", "0"]
    with pytest.raises(ConfigError, match=r"label = 'a b' of a data source must have letters, digits and"):
        SourceConfig(path="a", label="a b")


def test_plot_leaves_out_steps_before_a_restart_from_scratch(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("plot", ROOT / "scripts" / "plot.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    start = {"step": 0, "event": "start"}
    run = write_run(tmp_path / "run", [start, *(numbers(n, 8.0) for n in (1, 2, 3)), start, numbers(1, 9.0)])
    assert [(line["step"], line["loss"]) for line in script.read_run(run).lines] == [(1, 9.0)]


def test_mig_slice_has_no_known_peak_flops() -> None:
    assert peak_flops("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None


def test_estimate_needs_no_tokenizer_in_the_hf_folder(tmp_path: Path) -> None:
    content = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    content |= {"num_attention_heads": 2, "vocab_size": 512, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = parse(["--model.hf_folder", str(tmp_path)])
    assert resolve_model_config(replace(config, model=resolve_model_section(config.model))).vocab_size == 512


def test_prepare_rejects_an_output_inside_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "some words " * 50}) + "\n")
    output = tmp_path / "prepared"
    found = run_command("torchtrain.prepare", "--data.path", str(tmp_path), "--prepare.output", str(output))
    assert found.returncode == 2, found.stderr
    assert "is inside the data folder" in found.stderr
    assert not output.exists()


def test_run_and_checkpoints_have_the_same_resolved_config(tmp_path: Path) -> None:
    options = ("--training.global_batch_size", "-1", "--training.local_batch_size", "3", "--training.steps", "2")
    finish(tmp_path, *options, "--metrics.enable_tensorboard", ranks=2)
    config = (tmp_path / "config.toml").read_text()
    assert config == (tmp_path / "checkpoint/step-2/config.toml").read_text()
    assert "global_batch_size = 6" in config
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"global_batch_size = 6" in events.read_bytes()


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (generate_command, ["run", "--prompts_file", "s3://b/p.txt"]),
        (generate_command, ["run", "--prompt", "a", "--output_file", "s3://b/p.txt"]),
        (compare_command, ["run", "--against", "hf://org/model"]),
        (compare_command, ["run", "run", "--picture", "s3://b/p.png"]),
    ],
)
def test_other_commands_reject_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: Any, arguments: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 2
    assert "must be a local path; URLs are not supported" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def slow_steps(seconds: float) -> Any:
    def sleep(_: int, loss: Any) -> Any:
        time.sleep(seconds)
        return loss

    return patched_loss(sleep)


def test_slow_steps_from_the_start_are_not_reported_as_a_hang(tmp_path: Path) -> None:
    options = ("--comm.train_timeout_seconds", "1", "--training.steps", "3", "--training.global_batch_size", "1")
    output = finish(tmp_path, *options, ranks=1, hook=partial(slow_steps, 1.3))
    assert "takes more than" not in output
    assert not (tmp_path / "hangs").exists()
    assert "training begins with step 1 of 3" in output


def test_steps_with_a_learning_rate_of_zero_are_warned_of(tmp_path: Path) -> None:
    options = ("--lr_scheduler.decay_type", "linear", "--lr_scheduler.total_steps", "4", "--training.steps")
    assert "the learning rate is 0" not in finish(tmp_path, *options, "4", ranks=1)
    output = finish(tmp_path, *options, "6", ranks=1)
    assert "after step 4 (lr_scheduler.total_steps) the learning rate is 0: later steps" in output


def test_last_step_before_the_data_end_is_logged(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some words and more\n" * 150)
    prepared = str(tmp_path / "prepared")
    assert run_command("torchtrain.prepare", "--data.path", str(text), "--prepare.output", prepared).returncode == 0
    options = ("--data.path", prepared, "--data.when_exhausted", "stop", "--metrics.log_freq", "1000")
    options += ("--training.steps", "100")
    output = finish(tmp_path / "run", *options, ranks=1)
    (end,) = re.findall(r"the data ended .*: step (\d+) of 100", output)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, int(end)]


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


def test_config_for_continued_pretraining_needs_model_and_data_options(tmp_path: Path) -> None:
    config = ("torchtrain.train", "--job.config_file", "train_configs/continue_hf.toml")
    folder = tmp_path / "run"
    rejected = run_command(*config, "--job.dump_folder", str(folder))
    assert (rejected.returncode, "YOUR_MODEL" in rejected.stderr) == (2, True)
    finish(tmp_path / "first", "--training.steps", "1", "--huggingface.export", ranks=1)
    hf = str(tmp_path / "first/hf")
    small = ("--training.seq_len", "32", "--training.global_batch_size", "2", "--training.steps", "2")
    start = (*config, "--job.dump_folder", str(folder), "--model.hf_folder", hf, *small)
    start += ("--checkpoint.initial_load_path", hf, "--metrics.log_freq", "1")
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
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert 0 < max(line.get("lr", 0) for line in lines) <= 3e-5
    assert (folder / "hf/config.json").exists()


def test_shorter_sequences_than_those_of_the_initial_weights_are_warned_of(tmp_path: Path) -> None:
    first = tmp_path / "first"
    finish(first, "--training.steps", "2", "--huggingface.export", ranks=1)
    config = json.loads((first / "hf/config.json").read_text())
    (first / "hf/config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    start = ("--checkpoint.initial_load_path", str(first / "hf"), "--training.steps", "1")
    warning = "has weights for sequences of 64 tokens, and training.seq_len is 32"
    assert warning in finish(tmp_path / "short", *start, "--training.seq_len", "32", ranks=1)
    assert "has weights for" not in finish(tmp_path / "long", *start, "--training.seq_len", "64", ranks=1)
