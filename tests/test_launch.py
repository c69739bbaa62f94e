"""The launcher's exit code, signals and errors, and the shell script that starts it."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed.run
from disk_faults import DiskFaults
from forked_command import run_command, start_command
from forkserver import free_port

from torchtrain.datasets.tokenizers import tokenizer_file
from torchtrain.distributed.process_group import world_size
from torchtrain.environment import require_one_process
from torchtrain.errors import ConfigError, HardwareError, StoppedError, StorageError, TorchtrainError
from torchtrain.launch import SHARED_ENDINGS

ROOT = Path(__file__).parent.parent
LAUNCH = ("torchtrain.launch", "--standalone", "--no-python", "--nproc-per-node")


def launch(folder: Path, script: str) -> tuple[BaseProcess, Path, Path]:
    """Start two ranks that run a line of bash; returns the launcher's process, and its stdout and stderr files."""
    [process], [output, errors] = start_command(folder, *LAUNCH, "2", "bash", "-c", script)
    return process, output, errors


@pytest.mark.parametrize(
    ("script", "code"),
    [
        pytest.param("exit $((RANK == 1 ? 75 : 0))", 75, marks=pytest.mark.slow),
        ("[ $RANK = 0 ] && sleep 60; kill -35 $BASHPID", 163),  # a signal without a name
        # SIGUSR1 is ignored, also by the ranks, until they install a handler.
        ("kill -USR1 $BASHPID $PPID; exit", 0),
    ],
)
def test_exit_code_is_that_of_the_first_failure(tmp_path: Path, script: str, code: int) -> None:
    process, _, errors = launch(tmp_path, script)
    process.join(120)
    assert process.exitcode == code, errors.read_text()
    assert "Traceback" not in errors.read_text()
    assert ("rank 1 was ended by signal 35" in errors.read_text()) == (code == 163)


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_nodes_that_do_not_meet_are_one_error(node: int) -> None:
    nodes = ("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--rdzv-conf", "timeout=1")
    address = ("--master-addr", "localhost", "--master-port", str(free_port()))
    result = run_command("torchtrain.launch", *nodes, *address, "--no-python", "true")
    assert result.returncode == 1
    assert "error: the nodes did not meet, or lost each other: " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "option"),
    [
        (("--nnodes", "2", "--node-rank", "0", "--master-addr", "localhost", "--master-port"), "--master-port"),
        (("--rdzv-backend", "c10d", "--rdzv-endpoint"), "--rdzv-endpoint HOST:PORT"),
    ],
)
def test_port_that_is_taken_is_named_with_its_option(options: tuple[str, ...], option: str) -> None:
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        address = f"localhost:{port}" if "c10d" in options else str(port)
        result = run_command("torchtrain.launch", *options, address, "--nproc-per-node", "1", "--no-python", "true")
    assert result.returncode == 74, result.stderr
    assert f"error: port {port} of this host is taken, by another job or program: give another one by {option}" in (
        result.stderr
    )
    assert "Traceback" not in result.stderr


def test_last_line_after_a_hang_is_that_of_the_watchdog(tmp_path: Path) -> None:
    """NCCL aborts the rank, and the launcher would blame that one, which is healthy."""
    message = {"message": "HangError: rank 1 on host x hangs in step 4", "extraInfo": {"timestamp": "1"}}
    (tmp_path / "reply.json").write_text(json.dumps({"message": message}))
    script = f"[ $RANK = 0 ] || sleep 60; cp {tmp_path}/reply.json $TORCHELASTIC_ERROR_FILE; kill -ABRT $BASHPID"
    process, _, errors = launch(tmp_path, script)
    process.join(120)
    assert process.exitcode == 74, errors.read_text()
    assert errors.read_text().splitlines()[-1].endswith("error: rank 1 on host x hangs in step 4")


def test_ranks_use_the_store_of_torchrun_and_get_its_sigterm(tmp_path: Path) -> None:
    """A port that is chosen here and bound by a rank seconds later may be taken by then."""
    script = 'trap "echo rank $RANK stops; exit 0" TERM; echo $TORCHELASTIC_USE_AGENT_STORE'
    process, output, errors = launch(tmp_path, f"{script}; for i in $(seq 300); do sleep 0.2; done")
    while not output.exists() or output.read_text() != "True\nTrue\n":
        assert process.is_alive(), errors.read_text()
        time.sleep(0.02)
    process.terminate()
    process.join(120)
    assert sorted(output.read_text().splitlines()[2:]) == ["rank 0 stops", "rank 1 stops"]
    assert process.exitcode == 143
    assert "Traceback" not in errors.read_text()


def ignore_hangup() -> None:
    """As nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_launcher_and_ranks_ignore_sighup_under_nohup(tmp_path: Path) -> None:
    script = f"echo ready; until [ -e {tmp_path}/go ]; do sleep 0.1; done; echo end"
    arguments = (*LAUNCH, "2", "bash", "-c", script)
    [process], [output, errors] = start_command(tmp_path, *arguments, hook=ignore_hangup)
    while not output.exists() or output.read_text() != "ready\nready\n":
        assert process.is_alive(), errors.read_text()
        time.sleep(0.02)
    os.kill(process.pid or 0, signal.SIGHUP)
    time.sleep(0.5)
    (tmp_path / "go").touch()
    process.join(120)
    assert process.exitcode == 0, errors.read_text()
    assert output.read_text() == "ready\nready\nend\nend\n"


def test_sigterm_during_the_start_leaves_no_rank_running() -> None:
    script = "[ $RANK = 0 ] && kill -TERM $PPID; for i in $(seq 300); do sleep 0.2; done"
    with subprocess.Popen(
        [sys.executable, "-m", *LAUNCH, "8", "bash", "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        _, errors = process.communicate(timeout=40)  # a rank that is still running holds the pipes for a minute
    assert process.returncode == 143
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_ranks_alone_report_a_signal_to_the_job(number: signal.Signals, code: int) -> None:
    rank = (
        # Each line in one write: both ranks share the pipes. A rank that gets no signal ends with another exit code.
        "import os, signal, sys, time; stop = lambda *_: (os.write(2, b'stopped as requested\\n'), sys.exit(1))\n"
        "signal.signal(signal.SIGINT, stop); signal.signal(signal.SIGTERM, stop); os.write(1, b'ready\\n')\n"
        "for _ in range(600): time.sleep(0.1)"
    )
    # A background process of a shell script ignores SIGINT, and its children inherit that.
    begin = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-m", *LAUNCH, "2", sys.executable, "-c", rank]
    with subprocess.Popen(
        [sys.executable, "-c", begin, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    ) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # it prints where it hangs
        _, errors = process.communicate()
    assert process.returncode == code, errors
    assert errors.splitlines() == ["stopped as requested"] * 2


def interrupt_rendezvous() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell started the tests in the background

    def wait_for_nodes(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    torch.distributed.run.run = wait_for_nodes


def test_ctrl_c_before_ranks_are_started_is_a_one_line_error() -> None:
    found = run_command(*LAUNCH, "2", "true", hook=interrupt_rendezvous)
    assert found.returncode == 130
    assert found.stderr.endswith("stopped by Ctrl-C\n")
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize("options", [["--nproc-per-node", "two"], ["--nproc-per-node", "0"], ["--nnodes", "1:a"]])
def test_options_that_torchrun_rejects_exit_with_2(options: list[str]) -> None:
    found = run_command("torchtrain.launch", *options, "-m", "torchtrain.train")
    assert found.returncode == 2
    assert "error: --nnodes 1" in found.stderr
    assert "Traceback" not in found.stderr


def fill_tmp() -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/torchelastic_0")

    tempfile.mkdtemp = fail  # type: ignore[assignment]


def remove_tmp() -> None:
    tempfile._candidate_tempdir_list = lambda: ["/proc"]  # type: ignore[attr-defined]
    tempfile.tempdir = None


def test_unusable_folders_of_torchrun_exit_with_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for options, hook, message in (
        ([], fill_tmp, "[Errno 28] No space left on device: '/tmp/torchelastic_0'"),
        ([], remove_tmp, "[Errno 2] No usable temporary directory found in ['/proc']"),
        (["--log-dir", str(tmp_path / "file")], fill_tmp, f"log_dir: {tmp_path}/file is a file"),
    ):
        found = run_command("torchtrain.launch", "--standalone", *options, "--no-python", "true", hook=hook)
        assert found.returncode == 2
        assert found.stderr.endswith(f"error: {message}\n")
        assert "Traceback" not in found.stderr


@pytest.mark.parametrize("rank", [-1, pytest.param(1, marks=pytest.mark.slow)])
def test_error_before_process_group_initialization_is_printed_once(
    disk: DiskFaults, forked_ranks: dict[str, str], tmp_path: Path, rank: int
) -> None:
    file = tmp_path / "tokenizer.model"
    shutil.copy(tokenizer_file(), file)
    disk.fail("open", file, errno.EACCES, rank=rank)  # -1 means all ranks
    options = ("--model.tokenizer_path", str(file), "--job.dump_folder", str(tmp_path / "run"))
    train = ("--standalone", "--nproc-per-node", "2", "-m", "torchtrain.train", *options)
    found = run_command("torchtrain.launch", *train, environment=forked_ranks)
    assert found.returncode == 2
    assert found.stderr.count(f"error: {file} cannot be read: Permission denied") == 1
    assert ("[rank 1] error: " in found.stderr) == (rank == 1)


def test_shared_exit_codes_are_those_of_the_trainer() -> None:
    kinds = (TorchtrainError, HardwareError, StorageError, StoppedError)
    assert set(SHARED_ENDINGS) == {kind.exit_code for kind in kinds}


@pytest.mark.parametrize("ranks", ["0", "two"])
def test_shell_script_rejects_an_invalid_number_of_ranks(ranks: str) -> None:
    command, environment = [str(ROOT / "run_llama_train.sh")], {**os.environ, "NGPU": ranks}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert found.stderr == f"error: NGPU = '{ranks}' must be a number of ranks, 1 or more\n"


@pytest.mark.parametrize(("visible", "ranks"), [(None, 4), ("1,3", 2), ("GPU-8932f937", 1), ("", 1), ("-1", 1)])
def test_shell_script_starts_one_rank_for_each_visible_gpu(tmp_path: Path, visible: str | None, ranks: int) -> None:
    for name, text in {"nvidia-smi": "printf 'GPU %s: NVIDIA H100\\n' 0 1 2 3", "python": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"} | path
    command = [str(ROOT / "run_llama_train.sh")]
    started = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    module = f"torchtrain.launch --nproc-per-node {ranks}" if ranks > 1 else "torchtrain.train"
    assert started.startswith(f"-m {module} ")


@pytest.mark.parametrize(
    ("system", "gpus", "ranks", "environment"),
    [
        ("Linux", 0, 2, "OMP_NUM_THREADS=4 GLOO_SOCKET_IFNAME="),
        ("Linux", 4, 4, "OMP_NUM_THREADS=2 GLOO_SOCKET_IFNAME="),  # for initial weights and offloading
        ("Linux", 0, 16, "OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME="),
        ("Darwin", 0, 2, "OMP_NUM_THREADS=3 GLOO_SOCKET_IFNAME=lo0"),  # six performance cores
    ],
)
def test_shell_script_divides_cores_and_selects_the_loopback_interface_on_a_mac(
    tmp_path: Path, system: str, gpus: int, ranks: int, environment: str
) -> None:
    programs = {
        "nvidia-smi": f"for i in $(seq {gpus}); do echo GPU $i; done",
        "uname": f"echo {system}",
        "nproc": "echo 8" if system == "Linux" else "exit 127",
        "sysctl": '[ "$2" = hw.perflevel0.physicalcpu ] && echo 6',
        "python": 'echo "OMP_NUM_THREADS=$OMP_NUM_THREADS GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-}"; echo "$@"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    unset = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NGPU": str(ranks)}
    own |= {"NUMA_BINDING": "node"} if gpus else {}
    environ = {key: value for key, value in os.environ.items() if key not in unset} | own
    command = [str(ROOT / "run_llama_train.sh")]
    output = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.splitlines()
    assert output[0] == environment
    assert ("--local-addr localhost --numa-binding node" if gpus else "--local-addr localhost -m") in output[1]


SRUN = {"SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3"}


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        (SRUN, "SLURM_STEP_NUM_TASKS"),
        ({**SRUN, "ENVIRONMENT": "BATCH"}, "SLURM_STEP_NUM_TASKS"),  # srun within a batch script
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3"}, "SLURM_NTASKS"),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "3", "PMI_RANK": "1"}, "PMI_SIZE"),
    ],
)
def test_several_processes_without_rank_variables_are_rejected(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], variable: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"^{variable} = 3 in the environment, and RANK is not set: 3 processes"):
        world_size()
    with pytest.raises(ConfigError, match=rf"^convert runs in one process, and {variable} = 3: start it once"):
        require_one_process("convert")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert world_size() == 3


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_NTASKS": "3", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},  # a batch script
        {"SLURM_NTASKS": "3"},  # the shell of salloc
        {**SRUN, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_one_process_in_a_job_of_several_tasks_is_accepted(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    require_one_process("convert")
    assert world_size() == 1


def test_command_started_by_srun_without_ranks_is_rejected(tmp_path: Path) -> None:
    options = ["--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder", str(tmp_path / "new")]
    check_rejected_by_srun(tmp_path, "train", *options)


def check_rejected_by_srun(tmp_path: Path, command: str, *options: str, hook: Callable[[], object] = int) -> None:
    """The command is rejected where srun starts several tasks without ranks, before it writes to ``tmp_path``."""
    found = run_command(f"torchtrain.{command}", *options, environment=SRUN, hook=hook)
    assert found.returncode == 2, found.stderr
    assert found.stderr.count("error: ") == 1
    assert "SLURM_STEP_NUM_TASKS = 3" in found.stderr
    assert list(tmp_path.iterdir()) == []


def on_a_fast_clock() -> None:
    """Time passes three times as fast."""
    monotonic, sleep = time.monotonic, time.sleep
    time.monotonic = lambda: monotonic() * 3
    time.sleep = lambda seconds: sleep(seconds / 3)


@pytest.mark.parametrize(
    ("nodes", "came"),
    [
        pytest.param([1], "nothing listens there", marks=pytest.mark.slow),
        ([0, 2], "2 of 4 nodes have come, missing: node rank 1, 3"),
    ],
)
def test_node_that_waits_for_the_others_says_where_and_for_whom(tmp_path: Path, nodes: list[int], came: str) -> None:
    """In the first case as if the rendezvous were on another host than that of node rank 0."""
    port = free_port()
    started = []
    for node in nodes:
        (folder := tmp_path / str(node)).mkdir()
        options = ("--nnodes", "4", "--node-rank", str(node), "--master-addr", "localhost", "--master-port", str(port))
        command = ("torchtrain.launch", *options, "-m", "torchtrain.train")
        started.append(start_command(folder, *command, hook=on_a_fast_clock))
    try:
        for [process], [_, errors] in started:
            while process.is_alive() and not (errors.exists() and "has waited" in errors.read_text()):
                time.sleep(0.1)
    finally:
        for [process], _ in started:
            process.kill()
    for node, ([process], [_, errors]) in zip(nodes, started, strict=True):
        process.join()
        assert process.exitcode == -signal.SIGKILL, errors.read_text()  # it was still waiting
        where = f"node rank {node} of 4, has waited for 45 s for the other nodes, at localhost:{port} ({came}): is that"
        assert where in errors.read_text()
