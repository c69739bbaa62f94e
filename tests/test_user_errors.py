"""Errors of users and machines: each command prints one line with the rule and the way out, and exits with 2."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import pytest
import tomli
from data_samples import TOKENIZER
from disk_faults import DiskFaults
from forked_command import run_command
from forked_run import ForkedRun

import torchtrain
from torchtrain import optional_packages, prepare, train
from torchtrain.checkpoint.format import manifest_bytes, read_manifest
from torchtrain.checkpoint.local_storage import LocalCheckpoint
from torchtrain.checkpoint.storage import MANIFEST
from torchtrain.checkpoint.weights import find_checkpoint
from torchtrain.config.command_options import POSITIONAL, parse_command
from torchtrain.config.parse import config_file, parse
from torchtrain.config.registry import DATA_SOURCES
from torchtrain.datasets.data_source import SourceContext
from torchtrain.datasets.options import SourceConfig
from torchtrain.errors import DataError
from torchtrain.optional_packages import install_command

ROOT = Path(__file__).parent.parent


def error_line(command: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Call ``command``, assert that it returns 2, and return the one line that it prints after its first one."""
    assert command(arguments) == 2
    (error,) = (line for line in capsys.readouterr().err.splitlines() if not line.endswith("importing PyTorch"))
    assert "error: " in error
    return error


def sentencepiece_without_bytes(folder: Path) -> str:
    file = folder / "few.model"
    file.write_text("AA== 0\nAQ== 1\n")
    return f"--model.tokenizer_path {file}"


def dump_folder_below_a_file(folder: Path) -> str:
    (folder / "file").write_text("")
    return f"--job.dump_folder {folder}/file/run --training.steps 3"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--compile.enable yes", "compile.enable = 'yes' must be true or false"),
        ("--job.config_file a --job.config_file=b", "--job.config_file is given 2 times, as a, b: give one file"),
        (
            "--parallelism.tensor_parallel_degree 2",
            "1, but the product of tensor_parallel_degree = 2 is 2; start 2 ranks",
        ),
        (
            "--model.tokenizer_path no/such",
            f"model.tokenizer_path = 'no/such': No such file or directory (looked for {Path('no/such').absolute()})",
        ),
        ("--optimizer.lr inf", "optimizer.lr = inf must be a finite number"),
        ("--data.weight inf", "weight = inf of a data source must be a finite number"),
        (
            "--faults.wall_clock_limit_minutes 0.2",
            "faults.wall_clock_limit_minutes = 0.2 must exceed faults.stop_grace_seconds = 30",
        ),
        (sentencepiece_without_bytes, "has 2 ranks, and Llama 3's file has 128,000, the 256 bytes among them"),
        (lambda folder: f"--model.tokenizer_path {folder}", "no tokenizer.json or tokenizer.model is in it"),
        (dump_folder_below_a_file, "/file/run' cannot be used: Not a directory; name another folder"),
    ],
)
def test_train_rejects_invalid_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str | Callable[[Path], str], message: str
) -> None:
    words = (options if isinstance(options, str) else options(tmp_path)).split()
    folder = [] if "--job.dump_folder" in words else ["--job.dump_folder", str(tmp_path / "out")]
    assert message in error_line(train.main, [*words, *folder], capsys)
    assert not (tmp_path / "out").exists()


def test_named_pipe_as_tokenizer_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "tokenizer.model")  # opening it would block for ever
    options = ["--model.tokenizer_path", str(tmp_path / "tokenizer.model"), "--job.dump_folder", str(tmp_path / "out")]
    assert "is not a regular file" in error_line(train.main, options, capsys)


def test_read_only_dump_folder_is_a_user_error(disk: DiskFaults, tmp_path: Path) -> None:
    import errno

    disk.fail("mkdir", f"{tmp_path}/read_only/*", errno.EROFS)
    run = ForkedRun(tmp_path / "log", "--job.dump_folder", f"{tmp_path}/read_only/run", ranks=1)
    assert run.wait() == [2]
    assert "read_only/run' cannot be used: Read-only file system; name another folder" in run.output()


def test_unreadable_data_are_a_user_error(disk: DiskFaults, tmp_path: Path) -> None:
    import errno

    file = tmp_path / "secret.jsonl"
    file.write_text('{"text": "a"}\n' * 100)
    disk.fail("open", file, errno.EACCES)
    run = ForkedRun(tmp_path / "run", "--data.path", str(file), ranks=1)
    assert run.wait() == [2]
    assert f"{file} cannot be opened: Permission denied; let this user read it" in run.output()


def test_text_file_that_is_deleted_before_it_is_tokenized_is_a_user_error(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    source = SourceConfig(path=str(tmp_path))
    text = DATA_SOURCES[source.source_type].open_text(source, SourceContext("data", TOKENIZER))
    (tmp_path / "1.txt").unlink()
    with pytest.raises(DataError, match=r"1.txt was there when the run began, and is missing now: restore it"):
        list(text.texts())


def test_invalid_rank_environment_is_an_error(tmp_path: Path) -> None:
    options = ("--job.dump_folder", str(tmp_path), "--training.seq_len", "16", "--comm.init_timeout_seconds", "1")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port_in_use = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(taken.getsockname()[1]),
        }
        for environment, code, message in (
            ({"RANK": "a", "WORLD_SIZE": "2"}, 2, "RANK = 'a' in the environment is not a number: use torchrun"),
            ({"WORLD_SIZE": "2"}, 2, "environment variable RANK expected, but not set: start with torchrun"),
            (port_in_use, 74, f"MASTER_PORT = {port_in_use['MASTER_PORT']} is taken on this host"),
        ):
            found = run_command("torchtrain.train", *options, environment=environment)
            assert found.returncode == code
            assert message in found.stderr
            assert "Traceback" not in found.stderr


def test_prepare_rejects_a_file_as_output_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    error = error_line(prepare.main, ["--prepare.output", str(tmp_path / "file")], capsys)
    assert "/file' cannot be used: File exists; name another folder" in error


def test_path_that_is_too_long_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--training.steps", "3", "--data.path", "def " * 100], ["--model.tokenizer_path", "def " * 100]):
        assert "cannot be used: File name too long" in error_line(train.main, options, capsys)


def test_run_folder_may_be_named_like_a_checkpoint(trained_run: Path, tmp_path: Path) -> None:
    for name in ("step-by-step", "step-3"):
        (tmp_path / name).symlink_to(trained_run)
        assert str(find_checkpoint(tmp_path / name)) == str(tmp_path / name / "checkpoint/step-8")


def test_checkpoint_without_config_is_a_user_error(tmp_path: Path) -> None:
    run = ForkedRun(tmp_path, "--training.steps", "2", ranks=1)
    assert run.wait() == [0]
    step = tmp_path / "checkpoint/step-2"
    manifest = read_manifest(LocalCheckpoint(step))
    (step / MANIFEST).write_bytes(
        manifest_bytes(replace(manifest, files=[file for file in manifest.files if file.name != "config.toml"]))
    )
    (step / "config.toml").unlink()
    resumed = ForkedRun(tmp_path, "--training.steps", "4", ranks=1)
    assert resumed.wait() == [2]
    assert "config.toml cannot be read" in resumed.output()
    assert "Traceback" not in resumed.output()


def exit_at_first_process() -> None:
    subprocess.Popen = lambda *_, **__: sys.exit(3)  # type: ignore[assignment,misc]


@pytest.mark.parametrize(
    ("script", "options", "code"),
    [
        ("benchmarks/benchmark_checkpoint", "--width 8 --layers 1 --rounds 2 --loops 1", 0),
        ("faults/crash_test", "--kills 0", 3),
    ],
)
def test_scripts_keep_the_files_in_their_folder(tmp_path: Path, script: str, options: str, code: int) -> None:
    (tmp_path / "mine").write_text("must be kept")
    found = run_command(f"scripts/{script}.py", "--folder", str(tmp_path), *options.split(), hook=exit_at_first_process)
    assert found.returncode == code, found.stderr
    assert (tmp_path / "mine").exists()


def check(*options: str, ranks: str = "8") -> "subprocess.CompletedProcess[str]":
    return run_command("torchtrain.check", ranks, f"--job.config_file={ROOT}/train_configs/debug_model.toml", *options)


def test_check_describes_the_run_on_the_given_ranks_and_stores_nothing(tmp_path: Path) -> None:
    found = check(f"--job.dump_folder={tmp_path}/run", "--parallelism.tensor_parallel_degree=2")
    assert found.returncode == 0, found.stderr
    assert "8 ranks: shard 4 x tensor 2" in found.stderr
    assert "batch        32 sequences" in found.stderr  # 8 on each of 4 data-parallel ranks
    assert "no errors found" in found.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        (["--training.global_batch_size=8"], "8", "global_batch_size = 8 must be a multiple of local_batch_size = 8"),
        (["--data.path={}/a.jsonl"], "8", "a.jsonl"),
        (["--model.tokenizer_path={}/a"], "8", "model.tokenizer_path = "),
        (["--checkpoint.folder={}/file/a"], "8", "file"),
        ([], "none", "the first argument must be the number of ranks of the run"),
    ],
)
def test_check_rejects_what_would_end_the_run(tmp_path: Path, options: list[str], ranks: str, message: str) -> None:
    (tmp_path / "file").touch()
    given = [option.format(tmp_path) for option in options]
    found = check(f"--job.dump_folder={tmp_path}/run", *given, ranks=ranks)
    assert (found.returncode, "Traceback" in found.stderr) == (2, False), found.stderr
    assert message in found.stderr.partition("error: ")[2]


COMMAND_ERRORS = [
    ("cache --clean", "--clean is not a known option; did you mean '--clear'?"),
    ("cache list", "'list' is one argument too many of cache: python -m torchtrain.cache [--OPTION VALUE ...]; see "),
    ("prepare --prepare.outpt x", "--prepare.outpt is not a known option; did you mean '--prepare.output'?"),
    ("check --wrong value", "--wrong is not a known option: options are named --SECTION.OPTION; see --help"),
    ("train run", "'run' is not an option: options are named --SECTION.OPTION; see --help"),
    ("launch", "torchrun: the following arguments are required: training_script"),
    (
        "launch --max-restarted 1 -m x",
        "torchrun: --max-restarted is not a known option; did you mean '--max-restarts'?",
    ),
    (
        "launch --max-restarts x -m x",
        "torchrun: argument --max-restarts/--max_restarts: invalid int value: 'x'; such as",
    ),
    ("__main__ export", "'export' is not a command; see --help"),
    ("__main__ --wrong", "a command is a module of its own: python -m torchtrain.COMMAND --wrong"),
]


@pytest.mark.parametrize(("arguments", "message"), COMMAND_ERRORS, ids=[line for line, _ in COMMAND_ERRORS])
def test_every_command_rejects_wrong_arguments_by_one_message(arguments: str, message: str) -> None:
    check_wrong_arguments(arguments, message)


def check_wrong_arguments(arguments: str, message: str) -> None:
    name, *words = arguments.split()
    found = run_command(f"torchtrain.{name}", *words)
    assert (found.returncode, found.stdout) == (2, "")
    assert re.fullmatch(rf"[0-9:]{{8}} error: {re.escape(message)}[^\n]*\n", found.stderr), found.stderr


def test_values_of_the_small_commands_are_parsed() -> None:
    @dataclass
    class Options:
        files: Annotated[tuple[str, ...], POSITIONAL]
        prompt: str | None = None
        rows: tuple[int, ...] = ()
        json: bool = False
        scale: float = 1.0
        import_: tuple[str, ...] = ()

    def parsed(*words: str) -> dict[str, object]:
        found = asdict(parse_command(Options, "generate", None, words))
        return {key: value for key, value in found.items() if value != getattr(Options, key, None)}

    # A boolean takes no file; text may begin with a dash.
    assert parsed("--json", "a", "b", "--prompt", "-- a") == {"files": ("a", "b"), "json": True, "prompt": "-- a"}
    assert parsed("--json", "true", "a") == {"files": ("a",), "json": True}
    assert parsed("a", "--scale", "-2", "--rows", "1", "2") == {"files": ("a",), "scale": -2.0, "rows": (1, 2)}
    assert parsed("a", "--import=m", "--prompt=--x y", "--rows") == {
        "files": ("a",),
        "import_": ("m",),
        "prompt": "--x y",
    }
    assert parsed("a", "--prompt", "~/b\udcff") == {"files": ("a",), "prompt": "~/b\udcff"}  # as the shell passed it


@pytest.mark.parametrize("module", ["train", "prepare", "launch"])
def test_every_command_has_a_version(module: str) -> None:
    check_version(module)


def check_version(module: str) -> None:
    found = run_command(f"torchtrain.{module}", "--version")
    assert (found.returncode, found.stdout) == (0, f"torchtrain {torchtrain.__version__}\n")


def test_missing_packages_are_one_message_of_a_command() -> None:
    command = [sys.executable, "-S", "-m", "torchtrain.train"]  # without site-packages
    environment = {"PATH": os.environ["PATH"]}
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == (
        "error: the packages that torchtrain needs are not installed: pip install -e . (README.md)\n"
    )


def test_hint_names_the_packages_of_the_extra_and_the_constraints_of_the_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == optional_packages.DISTRIBUTION != "torchtrain"
    (requirement,) = project["optional-dependencies"]["s3"]
    monkeypatch.chdir(ROOT)
    assert install_command("s3") == f"pip install '{requirement}' -c constraints.txt"
    assert install_command("elastic") == "pip install 'torchft>=0.2,<0.3' -c constraints.txt"  # without its marker
    assert "-c" not in install_command("mlflow", with_constraints=False)
    monkeypatch.chdir(tmp_path)  # whatever the working folder
    assert (tmp_path / install_command("s3").split()[-1]).samefile(ROOT / "constraints.txt")


def test_hint_of_an_installed_package_has_the_requirements_of_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optional_packages, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # without the metadata of a torchtrain that pip installed
    assert install_command("s3") == "install the packages of 's3' in torchtrain's pyproject.toml"
    info = tmp_path / f"{optional_packages.DISTRIBUTION.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    elastic = "torchft<0.3,>=0.2; sys_platform == 'linux' and extra == 'elastic'"
    lines = ["torch>=2.11", 's3fs>=2025.9; extra == "s3"', elastic]
    fields = [f"Name: {optional_packages.DISTRIBUTION}", "Version: 1.0", *(f"Requires-Dist: {line}" for line in lines)]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *fields, ""]))
    assert install_command("s3") == "pip install 's3fs>=2025.9'"
    assert install_command("elastic") == "pip install 'torchft<0.3,>=0.2'"


def test_config_file_of_the_command_line_overrides_that_of_the_launcher(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[training]\nsteps = 77\n")
    # The command that the shell script would run.
    command = subprocess.run(
        [str(ROOT / "run_llama_train.sh"), "--job.config_file", str(mine), "--training.seq_len", "64"],
        env={**os.environ, "PYTHON": "echo", "NGPU": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    arguments = command[command.index("torchtrain.train") + 1 :]
    assert arguments.count("--job.config_file") == 1
    assert config_file(arguments) == str(mine)
    config = parse(arguments)
    assert config.training.steps == 77
    assert config.training.seq_len == 64
    assert config.job.config_file == str(mine)
    assert config.job.dump_folder == "outputs/mine"
    script = (ROOT / "scripts/train.slurm").read_text()
    assert 'arguments=(--job.config_file "${CONFIG_FILE:-train_configs/debug_model.toml}" "$@")' in script


def test_command_that_is_rejected_says_why_where_a_pod_sets_rank() -> None:
    check_rejected_command_of_a_pod("torchtrain.train", "--no.such.option", "1")


def check_rejected_command_of_a_pod(*command: str) -> str:
    """As in a pod of a PyTorchJob, in which somebody starts it."""
    pod = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "worker-0", "MASTER_PORT": "23456"}
    result = run_command(*command, environment={**pod, "LOCAL_RANK": "0"})
    assert result.returncode == 2
    assert "error: " in result.stderr
    return result.stderr


def test_rejected_config_is_reported_by_the_first_rank_of_a_node_alone() -> None:
    ranks = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    result = run_command("torchtrain.train", "--no.such.option", "1", environment=ranks)
    assert (result.returncode, result.stderr) == (2, "")


def test_command_whose_reader_has_ended_says_nothing() -> None:
    check_command_whose_reader_has_ended("train --help training")


def check_command_whose_reader_has_ended(command: str) -> None:
    """Such as ``| head``, which ends after the first lines."""
    module, *options = command.split()
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [sys.executable, "-u", "-m", f"torchtrain.{module}", *options]
    result = subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    os.close(writer)
    assert result.stderr == ""
    assert result.returncode == 128 + signal.SIGPIPE
