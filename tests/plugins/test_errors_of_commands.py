"""Errors of users in the commands of plugins, such as generate and convert."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from forked_command import run_command
from test_evaluate import skip_slow_parts, write_tasks
from test_launch import check_rejected_by_srun
from test_user_errors import (
    check_command_whose_reader_has_ended,
    check_rejected_command_of_a_pod,
    check_version,
    check_wrong_arguments,
    error_line,
)

from torchtrain import compare as compare_command
from torchtrain import convert, generate
from torchtrain import generate as generate_command
from torchtrain.checkpoint.format import FileRecord, manifest_bytes, read_manifest
from torchtrain.checkpoint.local_storage import LocalCheckpoint
from torchtrain.checkpoint.storage import MANIFEST
from torchtrain.config.parse import from_file
from torchtrain.errors import ConfigError
from torchtrain.plugins.evaluation.generate_command import read_prompts


def test_generate_rejects_invalid_output_files(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, why in (
        (tmp_path / "nowhere/out.jsonl", "its folder does not exist"),
        (tmp_path, "is a fold"),
    ):
        options = [str(trained_run), "--prompt", "a", "--output_file", str(file)]
        assert why in error_line(generate.main, options, capsys)
    seed = ["--seed", "99999999999999999999", "--max_new_tokens", "2"]
    assert generate.main([str(trained_run), "--prompt", "a", *seed]) == 0


def test_empty_prompt_starts_a_document(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([str(trained_run), "--prompt", "", "--max_new_tokens", "5"]) == 0
    assert capsys.readouterr().out.strip()
    for prompts in ([], ["--prompt", "", "--prompts_file", "x"]):
        assert "either --prompt or --prompts_file" in error_line(generate.main, [str(trained_run), *prompts], capsys)


def test_prompts_file_is_read_as_utf8_with_any_line_ending(trained_run: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c\\ud83d"}\n'.encode())
    options = ["--prompts_file", str(file), "--output_file", str(out), "--max_new_tokens", "1"]
    assert generate.main([str(trained_run), *options]) == 0
    assert [json.loads(line)["prompt"] for line in out.read_text("utf-8").split("\n")[:-1]] == ["a\u2028b", "c?"]
    (tmp_path / "prompts.txt").write_bytes("\ufeffa\u2028b\r\n\r\nc".encode())
    assert read_prompts(tmp_path / "prompts.txt") == ["a\u2028b", "c"]


def close_outputs() -> None:
    sys.stdout = sys.stderr = None  # type: ignore[assignment]


def write_ascii() -> None:
    sys.stdout.reconfigure(encoding="ascii")  # type: ignore[attr-defined]


def test_generate_works_with_closed_or_ascii_output(trained_run: Path) -> None:
    options = ("torchtrain.generate", str(trained_run), "--prompt", "d\u00e9 \u2192", "--max_new_tokens", "2")
    closed = run_command(*options, hook=close_outputs)
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, "", "")
    in_ascii = run_command(*options, hook=write_ascii)
    assert in_ascii.returncode == 0, in_ascii.stderr
    assert in_ascii.stdout.startswith("d? ?")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda step: (step / "config.toml").unlink(), "has no config.toml and so is not a checkpoint"),
        (lambda step: (step / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda step: os.truncate(step / "__0_0.distcp", 10), "has 10 bytes; its manifest says"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "convert"])
def test_incomplete_checkpoint_is_a_user_error(
    trained_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    step = tmp_path / "step-8"
    shutil.copytree(trained_run / "checkpoint/step-8", step)
    damage(step)
    if command == "generate":
        assert message in error_line(generate.main, [str(step), "--prompt", "a"], capsys)
    else:
        found = error_line(convert.main, [str(step), str(tmp_path / "out")], capsys)
        assert message in found or "config.toml is missing" in found or "is not a file" in found
        assert not (tmp_path / "out").exists()


def test_invalid_tokenizer_beside_weights_is_a_user_error(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert.main([str(trained_run), str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    (tmp_path / "hf/tokenizer.json").write_text("{}")
    assert "is not a tokenizer.json" in error_line(convert.main, [str(tmp_path / "hf"), str(tmp_path / "out")], capsys)
    assert not list(tmp_path.glob("out*"))


def test_checkpoint_with_an_option_value_that_is_no_longer_valid_is_loaded(trained_run: Path, tmp_path: Path) -> None:
    step = tmp_path / "step-8"
    shutil.copytree(trained_run / "checkpoint/step-8", step)
    config = (step / "config.toml").read_text()
    (step / "config.toml").write_text(config.replace("eps = 1e-08\n", "eps = 0.0\n").replace("gc_freq", "old_freq"))
    manifest = read_manifest(LocalCheckpoint(step))
    content = (step / "config.toml").read_bytes()
    record = FileRecord("config.toml", len(content), xxhash.xxh3_128_hexdigest(content))
    files = [record if file.name == record.name else file for file in manifest.files]
    (step / MANIFEST).write_bytes(manifest_bytes(replace(manifest, files=files)))
    with pytest.raises(ConfigError, match=r"optimizer\.eps = 0\.0 must be above 0"):
        from_file(str(step / "config.toml"))
    assert generate.main([str(step), "--prompt", "a", "--max_new_tokens", "2"]) == 0
    assert convert.main([str(step), str(tmp_path / "out")]) == 0
    options = ["--training.steps", "1", "--training.seq_len", "64", "--training.local_batch_size", "1"]
    options += ["--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder", str(tmp_path / "run")]
    options += ["--model.shape.n_layers", "2"]
    loaded = run_command("torchtrain.train", *options, "--checkpoint.initial_load_path", str(step))
    assert loaded.returncode == 0, loaded.stderr


def test_named_pipe_as_manifest_is_rejected(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained_run / "checkpoint/step-8", tmp_path / "step-8")
    (tmp_path / "step-8/manifest.json").unlink()
    os.mkfifo(tmp_path / "step-8/manifest.json")
    error = error_line(convert.main, [str(tmp_path / "step-8"), str(tmp_path / "out")], capsys)
    assert "manifest.json is missing (is not a regular file)" in error


def test_path_without_a_checkpoint_is_a_user_error(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(trained_run / "config.toml")
    message = f"{file} has no checkpoint; give a run's folder"
    assert message in error_line(generate.main, [file, "--prompt", "a"], capsys)
    assert message in error_line(convert.main, [file, f"{tmp_path}/out"], capsys)
    (tmp_path / "config.toml").touch()
    unsaved = (
        f"{tmp_path} is the folder of a run that has saved no checkpoint; a run saves them with checkpoint.enable; give"
    )
    assert unsaved in error_line(generate.main, [str(tmp_path), "--prompt", "a"], capsys)
    for command, options in (
        (generate.main, ["def " * 100, "--prompt", "a"]),
        (convert.main, [str(trained_run), "a" * 300]),
    ):
        assert "cannot be used: File name too long" in error_line(command, options, capsys)


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


@pytest.mark.parametrize("module", ["convert", "generate", "estimate", "compare"])
def test_every_command_has_a_version(module: str) -> None:
    check_version(module)


@pytest.mark.parametrize(
    "command",
    [
        ("torchtrain.explain", "nowhere", "--step", "3"),
        ("torchtrain.compare", "nowhere", "elsewhere"),
        ("torchtrain.estimate", "--model.flavor", "none"),
        ("torchtrain.perplexity", "nowhere"),
        ("torchtrain.generate", "nowhere", "--temperature", "-1"),
        ("torchtrain.convert", "nowhere", "elsewhere"),
    ],
)
def test_command_that_is_rejected_says_why_where_a_pod_sets_rank(command: tuple[str, ...]) -> None:
    assert "of the plugin" not in check_rejected_command_of_a_pod(*command)


@pytest.mark.parametrize("command", ["estimate --help training", "generate --help"])
def test_command_whose_reader_has_ended_says_nothing(command: str) -> None:
    check_command_whose_reader_has_ended(command)


@pytest.mark.parametrize(
    "command",
    ["generate", "evaluate", *(pytest.param(name, marks=pytest.mark.slow) for name in ("compare", "convert"))],
)
def test_command_started_by_srun_without_ranks_is_rejected(
    trained_run: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, command: str
) -> None:
    tasks = tmp_path_factory.mktemp("tasks")
    if command == "evaluate":
        pytest.importorskip("lm_eval")
        write_tasks(tasks)
    run, new = str(trained_run), str(tmp_path / "new")
    options = {
        "generate": [run, "--prompt", "def "],
        "evaluate": ["--model_args", f"checkpoint={run}", "--tasks", "choice", "--include_path", str(tasks)],
        "compare": [run, run],
        "convert": [run, new],
    }
    check_rejected_by_srun(tmp_path, command, *options[command], hook=skip_slow_parts if command == "evaluate" else int)


COMMAND_ERRORS = [
    ("generate run --prompt a --max_new_tokens many", "--max_new_tokens = 'many' must be an integer"),
    ("generate run --prompt a --temperature hot", "--temperature = 'hot' must be a number"),
    ("generate run --prompt a --max_new_tokens", "--max_new_tokens needs one value, and has none"),
    ("generate run --promt a", "--promt is not a known option; did you mean '--prompt'?"),
    ("generate run --prompt a -n 3", "-n is not a known option: options are named --OPTION; see --help"),
    (
        "generate --prompt a",
        "generate needs CHECKPOINT: python -m torchtrain.generate CHECKPOINT [--OPTION VALUE ...]; see --help",
    ),
    (
        "perplexity",
        "perplexity needs CHECKPOINT and FILES: python -m torchtrain.perplexity CHECKPOINT FILES ... "
        "[--OPTION VALUE ...]; see --help",
    ),
    ("perplexity run a.txt --json=maybe", "--json = 'maybe' must be true or false"),
    ("perplexity run a.txt --seq_len 0", "--seq_len = 0 must be at least 1"),
    (
        "explain run",
        "explain needs --step INTEGER: python -m torchtrain.explain RUN --step INTEGER [--OPTION VALUE ...]; see ",
    ),
    ("explain run --step 1 --rows 0 a", "--rows[1] = 'a' must be an integer"),
    (
        "explain --step 1.5 --json",
        "the command line:\n"
        "  explain needs RUN: python -m torchtrain.explain RUN --step INTEGER [--OPTION VALUE ...]; see --help\n"
        "  --step = '1.5' must be an integer",
    ),
    (
        "compare a b c",
        "'c' is one argument too many of compare: python -m torchtrain.compare RUN_A [RUN_B] [--OPTION VALUE ...]; "
        "see --help",
    ),
    ("convert run out --dtype float8", "--dtype = 'float8' must be one of 'bfloat16', 'float16', 'float32'"),
    ("convert run out --to gguf", "--to = 'gguf' must be one of 'hf', 'torchtrain'"),
    (
        "convert_config a.toml --into b",
        "--into is not a known option; there are --output",
    ),
    ("convert_config no/such", "FILE = 'no/such' is not a file (looked for "),
    ("estimate --estimate.gpu h100", "estimate.gpu = 'h100' must be one of "),
    ("estimate --wrong value", "--wrong is not a known option: options are named --SECTION.OPTION; see --help"),
    ("__main__ genrate run", "'genrate' is not a command; did you mean python -m torchtrain.generate run?"),
]


@pytest.mark.parametrize(("arguments", "message"), COMMAND_ERRORS, ids=[line for line, _ in COMMAND_ERRORS])
def test_every_command_rejects_wrong_arguments_by_one_message(arguments: str, message: str) -> None:
    check_wrong_arguments(arguments, message)
