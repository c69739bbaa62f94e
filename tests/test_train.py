"""The train command: launched from the shell, killed and resumed, and with invalid arguments."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_command import checked_command, run_command, start_command
from forked_run import ForkedRun, finish, logged_losses, read_metrics

from torchtrain.train import main

ROOT = Path(__file__).parent.parent
CONFIG = str(ROOT / "train_configs" / "debug_model.toml")
# A small model with short steps.
STEPS = 28
SMALL = [
    *("--job.config_file", CONFIG, "--training.seq_len", "32", "--training.steps", str(STEPS)),
    *("--model.shape.dim", "64", "--model.shape.n_layers", "2", "--model.shape.n_heads", "2"),
    *("--model.shape.n_kv_heads", "2", "--model.shape.ffn_dim", "128", "--metrics.log_freq", "1"),
    *("--training.local_batch_size", "2", "--training.global_batch_size", "4", "--checkpoint.interval", "6"),
]


def environment(**extra: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "NGPU", "CONFIG_FILE", "LOG_RANK")}
    return clean | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | extra


def launch(ranks: int, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
    """Start run_llama_train.sh."""
    return subprocess.Popen(
        [str(ROOT / "run_llama_train.sh"), *arguments],
        env=environment(NGPU=str(ranks), **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(ranks: int, *arguments: str) -> str:
    process = launch(ranks, *arguments)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    return output


def logged_metrics(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder) if "event" not in line]


def wait_for_step(step: int, folder: Path, is_alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not any(line["step"] >= step for line in logged_metrics(folder)):
        assert is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def tensor_hashes(folder: Path) -> dict[str, str]:
    """Return the hash of each file with tensors in the checkpoint ``folder``."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return {file["name"]: file["xxh3_128"] for file in manifest["files"] if file["name"].endswith(".distcp")}


def test_default_run_learns_and_writes_all_outputs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fewer = ["--training.local_batch_size", "2", "--validation.steps", "4"]
    output = run(1, "--job.dump_folder", str(folder), "--training.steps", "10", *fewer)
    assert "warn" not in output.lower()
    *logged, validated = logged_metrics(folder)
    assert [line["step"] for line in logged] == [1, 10]
    assert validated["step"] == 10
    assert validated["validation_tokens"] > 1000
    assert abs(validated["validation_loss"] - logged[-1]["loss"]) < 1
    keys = "step loss loss_max grad_norm lr tokens_per_second mfu memory_gib data_wait_fraction step_seconds"
    assert [line for line in logged if not (set(keys.split()) <= line.keys())] == []
    assert logged[0]["loss"] - logged[-1]["loss"] > 1.5
    assert [line for line in logged if line["mfu"] is not None] == []  # no peak is known for a CPU
    assert (folder / "checkpoint" / "step-10").is_dir()
    assert list((folder / "tensorboard").iterdir())
    assert "steps = 10" in (folder / "config.toml").read_text()
    assert str(folder) in output.splitlines()[-1]

    same = ["--job.config_file", CONFIG, "--job.dump_folder", str(folder), *fewer, "--training.steps"]
    again = checked_command("torchtrain.train", *same, "10").stderr
    assert "the run is complete: step 10 of 10" in again
    checked_command("torchtrain.train", *same, "11")
    assert [line["step"] for line in logged_metrics(folder) if "loss" in line][2:] == [11]


@pytest.mark.slow  # test_faults.py kills the ranks of smaller runs, and one of torchrun's
def test_run_killed_twice_is_bitwise_identical_to_an_uninterrupted_run(
    tmp_path: Path, forked_ranks: dict[str, str]
) -> None:
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    # With synchronous saves, a checkpoint to resume from is complete before the kill.
    arguments = [*SMALL, "--checkpoint.async_mode", "disabled"]
    train = partial(checked_command, "torchtrain.train", ranks=2)
    with ThreadPoolExecutor() as executor:
        other = executor.submit(train, *arguments, "--job.dump_folder", str(uninterrupted))
        arguments += ["--job.dump_folder", str(killed)]
        with launch(2, *arguments, **forked_ranks) as process:
            wait_for_step(7, killed, lambda: process.poll() is None)
            # torchrun starts its workers in their own sessions, so that they are killed one by one.
            for victim in [*psutil.Process(process.pid).children(recursive=True), process]:
                victim.send_signal(signal.SIGKILL)
            process.communicate()
        ranks, _ = start_command(tmp_path, "torchtrain.train", *arguments, ranks=2)
        wait_for_step(13, killed, ranks[0].is_alive)
        for rank in ranks:
            rank.kill()
            rank.join()
        assert not (killed / "checkpoint" / f"step-{STEPS}").exists()
        output = train(*arguments)
        other.result()
    assert "resumed from" in output.stderr
    last_checkpoints = [folder / "checkpoint" / f"step-{STEPS}" for folder in (uninterrupted, killed)]
    assert tensor_hashes(last_checkpoints[0]) == tensor_hashes(last_checkpoints[1])
    assert logged_losses(uninterrupted) == logged_losses(killed)


def test_load_step_selects_a_checkpoint_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    finish(tmp_path, "--training.steps", "6", ranks=1)
    output = finish(tmp_path, "--training.steps", "6", "--checkpoint.load_step", "4", ranks=1)
    assert f"resumed from {tmp_path}/checkpoint/step-4" in output
    assert [line["step"] for line in logged_metrics(tmp_path)] == [*range(1, 7), 5, 6]
    config = (tmp_path / "config.toml").read_bytes()
    failed = ForkedRun(tmp_path, "--checkpoint.load_step", "5", ranks=1)
    assert failed.wait() == [2]
    assert "checkpoint.load_step = 5 cannot be loaded" in failed.output()
    assert (tmp_path / "config.toml").read_bytes() == config  # the config of the previous run is kept


def test_profiler_writes_a_trace(tmp_path: Path) -> None:
    options = ["--checkpoint.no-enable", "--profiling.enable_profiling", "--profiling.profile_freq", "4"]
    finish(tmp_path, "--training.steps", "4", *options, ranks=1)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.glob("traces/*/*")] == [
        "traces/step-4/rank-0.trace.json.gz"
    ]


@pytest.fixture
def invalid_files(tmp_path: Path) -> Path:
    (tmp_path / "misspelt.toml").write_text("[training]\nstepz = 3\n")
    (tmp_path / "no_tokenizer.model").write_text("hello\nworld\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "other.jsonl").write_text('{"body": "text"}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--job.config_file {}/misspelt.toml", "training.stepz is not a known key; did you mean 'training.steps'?"),
        ("--job.config_file {}/missing.toml", "missing.toml' is not a file"),
        ("--training.stepz 3", "--training.steps"),
        ("--training.steps three", "three"),
        ("--model.flavor 9B", "model.flavor = '9B' is not a flavor of llama3"),
        ("--model.tokenizer_path {}/missing.model", "missing.model"),
        ("--model.tokenizer_path {}/no_tokenizer.model", "no_tokenizer.model"),
        ("--training.steps 3 --data.path {}/missing.jsonl", "missing.jsonl"),
        ("--training.steps 3 --data.path {}/empty.jsonl", "empty.jsonl"),
        ("--training.steps 3 --data.path {}/other.jsonl", "body"),
        (
            "--training.global_batch_size 4194304",
            "It counts sequences of training.seq_len tokens, not tokens: try 2048",
        ),
        ("--training.global_batch_size 12", "global_batch_size = 12 must be a multiple of local_batch_size = 8"),
        ("--parallelism.data_parallel_replicate_degree 2", "the number of ranks, 1"),
        ("--training.enable_cpu_offload --job.device cpu", "enable_cpu_offload = true needs a GPU"),
    ],
)
def test_invalid_arguments_are_a_short_error_with_exit_code_2(
    invalid_files: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    message: str,
) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")
    words = [word.format(invalid_files) for word in arguments.split()]
    code = main([*words, "--job.dump_folder", str(invalid_files / "out")])
    output = capsys.readouterr().err
    assert code == 2
    assert message in output
    assert len(output.splitlines()) < 25
    assert "Traceback" not in output
    assert not (invalid_files / "out").exists()


@pytest.mark.parametrize(
    "options", [[], ["--job.device", "cpu", "--data.path", "README.md", "--metrics.log_freq", "3"]]
)
def test_start_without_a_config_file_is_an_error_that_lists_the_configs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    options = [str(ROOT / word) if word == "README.md" else word for word in options]
    monkeypatch.chdir(tmp_path)
    assert main(options) == 2
    starting, message, configs = capsys.readouterr().err.splitlines()
    assert "importing PyTorch" in starting
    assert "nothing says what to train: name a config by --job.config_file, or set options of " in message
    assert configs.startswith(f"  in {ROOT / 'train_configs'}: ")
    assert " debug_english.toml, debug_model.toml, " in configs
    assert not list(tmp_path.iterdir())


def test_config_error_of_all_ranks_is_printed_once() -> None:
    failed = run_command("torchtrain.train", "--parallelism.data_parallel_shard_degree", "3", ranks=2)
    assert failed.returncode == 2
    assert failed.stderr.count("the number of ranks, 2") == 1


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys, torchtrain.train as t\n"
        "try: t.main(['--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.gpu
def test_cuda_run_learns(tmp_path: Path) -> None:
    """The default run in bfloat16 on a GPU."""
    run(1, "--job.dump_folder", str(tmp_path), "--training.steps", "30", "--job.device", "cuda")
    losses = [line["loss"] for line in logged_metrics(tmp_path) if "loss" in line]  # others are of validations
    assert losses[0] - losses[-1] > 1.5
