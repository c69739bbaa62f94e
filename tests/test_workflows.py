"""Interactions of options and commands: resuming, and changed data or weights."""

import json
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked_command import run_command
from forked_run import finish, patched_loss
from test_resume_compatibility import toml

from torchtrain.checkpoint.resume_compatibility import check_resume_compatibility
from torchtrain.datasets.local_files import identify
from torchtrain.datasets.options import SourceConfig
from torchtrain.devices import peak_flops
from torchtrain.errors import CheckpointError, ConfigError
from torchtrain.metrics.options import ValidationConfig


def test_run_resumes_after_its_initial_weights_were_deleted(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    finish(first, "--training.steps", "2", ranks=1)
    start = ("--checkpoint.initial_load_path", str(first))
    finish(second, *start, "--training.steps", "2", ranks=1)
    shutil.rmtree(first)
    assert "resumed from" in finish(second, *start, "--training.steps", "4", ranks=1)


def test_same_data_in_another_folder_are_a_harmless_change() -> None:
    before, now = toml(data={"path": "a"}), toml(data={"path": "/elsewhere/a"})
    assert check_resume_compatibility(before, now, (), {"data.path": "1 file"}, {"data.path": "1 file"}) == [
        "config differs from the checkpoint's (harmless): data.path = '/elsewhere/a' (checkpoint: 'a')"
    ]
    with pytest.raises(CheckpointError, match="would not continue the same run"):
        check_resume_compatibility(before, now, (), {"data.path": "1 file"}, {"data.path": "2 files"})
    key = "model.tokenizer_path"
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
    sources = tuple(SourceConfig(path=f"held/wiki.{language}.jsonl.gz") for language in ("en", "de"))
    labels = [source.title for source in ValidationConfig(enable=True, sources=sources).all]
    assert labels == ["wiki.en", "wiki.de"]
    named = [
        SourceConfig(path="prepared/0"),
        SourceConfig(path="prepared/1", label="math"),
        SourceConfig(path="0.jsonl"),
    ]
    assert [source.title for source in named] == ["prepared_0", "math", "0"]
    with pytest.raises(ConfigError, match=r"label = 'a b' of a data source must have letters, digits and"):
        SourceConfig(path="a", label="a b")


def test_mig_slice_has_no_known_peak_flops() -> None:
    assert peak_flops("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None


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
