"""Run ``python -m module`` in forked processes that have imported torch, on one rank or several."""

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from types import MappingProxyType
from typing import Any, NoReturn

from forkserver import context, free_port

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_SECONDS = 200


def _nothing() -> None:
    pass


def run_command(
    module: str,
    *arguments: str,
    ranks: int = 1,
    environment: Mapping[str, str] = MappingProxyType({}),
    hook: Callable[[], object] = _nothing,
) -> "CompletedProcess[str]":
    """Run ``python -m module arguments`` in the repository, or the same on ``ranks`` ranks, and wait for it.

    The returned exit code is that of the first rank that fails. ``hook`` is called in each process before the module.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes, files = start_command(
            Path(folder), module, *arguments, ranks=ranks, environment=environment, hook=hook
        )
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            assert all(process.exitcode is not None for process in processes), files[1].read_text()
        finally:
            for process in processes:
                process.kill()
                process.join()
        code = next(filter(None, (process.exitcode for process in processes)), 0)
        return CompletedProcess([module, *arguments], code, *(file.read_text() for file in files))


def start_command(
    output: Path,
    module: str,
    *arguments: str,
    ranks: int = 1,
    environment: Mapping[str, str] = MappingProxyType({}),
    hook: Callable[[], object] = _nothing,
) -> tuple[list[BaseProcess], list[Path]]:
    """Start the processes that ``run_command`` runs; returns them, and the files in ``output`` that they write to."""
    files = [output / name for name in ("stdout", "stderr")]
    rank_environments: list[dict[str, str]] = [{}]
    if ranks > 1:
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        rank_environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    processes: list[BaseProcess] = [
        context().Process(target=_run, args=(module, arguments, {**environment, **own}, hook, files))
        for own in rank_environments
    ]
    for process in processes:
        process.start()
    return processes, files


def checked_command(module: str, *arguments: str, **options: Any) -> "CompletedProcess[str]":
    """Run ``run_command`` and assert that the exit code is 0."""
    result = run_command(module, *arguments, **options)
    assert result.returncode == 0, result.stderr
    return result


def _run(
    module: str, arguments: Sequence[str], environment: dict[str, str], hook: Callable[[], object], files: list[Path]
) -> None:
    for descriptor, file in enumerate(files, start=1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
    os.chdir(ROOT)
    run_program(module, arguments, environment, hook)


def run_program(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], hook: Callable[[], object] = _nothing
) -> NoReturn:
    """Run ``python -m program arguments`` or ``python program.py``, with file descriptors 1 and 2 as its output."""
    import torch

    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    os.environ.update(environment)
    torch.set_num_threads(1)
    multiprocessing.current_process().daemon = False  # a new interpreter may start processes
    sys.argv[1:] = arguments
    code: object = 0
    try:
        hook()
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            if not hasattr(sys.modules.get(program), "__path__"):
                sys.modules.pop(program, None)  # otherwise runpy warns that it is imported already
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)
