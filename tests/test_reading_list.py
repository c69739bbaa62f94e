"""The reading list is the set of the core's files in which a default training run executes functions."""

import ast
import json
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from forkserver import context

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torchtrain"
TIMEOUT_SECONDS = 240

# Files that a default run executes and that the reading list omits. docs/architecture.md lists them, too.
INFRASTRUCTURE = {
    "cli.py": "exit codes of the commands",
    "environment.py": "limits on threads and address space",
    "files.py": "atomic writes, and reads with retries",
    "logging.py": "the logger",
    "pinned_memory.py": "pinned buffers",
    "progress.py": "progress bars",
    "torch_internals.py": "private names of PyTorch",
    "config/registry.py": "components by name",
    "distributed/connections.py": "gloo connections of many ranks",
}
# What only a CPU needs. A run on GPUs executes no function of this folder.
CPU_FOLDER = "cpu/"
# A plugin asks in its __init__ whether the config needs it, and its options.py has the section of the config. A default
# run executes nothing else of a plugin, but for the report at its end, and the question whether a validation is to
# have samples and tasks.
PLUGIN = r"plugins/\w+/(__init__|options)\.py|plugins/(report|evaluation)/\w+\.py"
# The options of a folder of the core; docs/reading.md names all of these files together.
NOT_LISTED = re.compile(rf"{PLUGIN}|\w+/options\.py")


class Trace:
    """Records the functions of the package that execute, in all threads that start after ``start``.

    Functions that are called while a module is imported do not count, nor do the bodies of modules and classes.
    """

    def __init__(self) -> None:
        self.functions: dict[str, set[int]] = {}  # file in the package -> first lines of the functions
        self.threads: set[str] = set()

    def start(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{PACKAGE}/") or code.co_name == "<module>":
            return
        name = code.co_filename.removeprefix(f"{PACKAGE}/")
        is_function = bool(code.co_flags & 1)  # inspect.CO_OPTIMIZED: class bodies do not have it
        if is_function and code.co_firstlineno not in self.functions.get(name, ()) and not is_import(frame):
            self.functions.setdefault(name, set()).add(code.co_firstlineno)
            self.threads.add(threading.current_thread().name)


def is_import(frame: FrameType | None) -> bool:
    """Whether ``frame`` is called, directly or not, by the body of a module of the package."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            return True
        frame = frame.f_back
    return False


def run_traced(output: Path, options: list[str]) -> None:
    """Train in this process, and write the files, their functions and the threads to ``output`` as JSON."""
    import torch

    from torchtrain.datasets import standard_library
    from torchtrain.train import main

    # The fork server has found the default data, so that other tests need not.
    standard_library._text_of.cache_clear()
    standard_library.standard_library_files.cache_clear()
    torch.set_num_threads(1)
    trace = Trace()
    trace.start()
    code = main(options)
    trace.stop()
    functions = {name: sorted(lines) for name, lines in trace.functions.items()}
    output.write_text(json.dumps({"exit_code": code, "functions": functions, "threads": sorted(trace.threads)}))


def traced_run(folder: Path, *options: str) -> dict[str, Any]:
    """The result of ``run_traced`` in a forked process: two short steps with one block, and two checkpoints."""
    arguments = [
        *("--job.config_file", str(ROOT / "train_configs/debug_model.toml"), "--job.dump_folder", str(folder / "run")),
        *("--training.steps", "2", "--training.seq_len", "32", "--training.local_batch_size", "1"),
        *("--model.shape.n_layers", "1", "--validation.steps", "1"),
        *("--checkpoint.interval", "1", *options),
    ]
    output = folder / "trace.json"
    process = context().Process(target=run_traced, args=(output, arguments))
    process.start()
    process.join(TIMEOUT_SECONDS)
    process.kill()
    result: dict[str, Any] = json.loads(output.read_text())
    return result


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return traced_run(tmp_path_factory.mktemp("default"))


def reading_list() -> list[str]:
    page = (ROOT / "docs/reading.md").read_text(encoding="utf-8")
    return re.findall(r"^\| \[([^]]+\.py)\]\(\.\./torchtrain/\1\) \|", page, re.MULTILINE)


def differences(listed: list[str], executed: set[str]) -> list[str]:
    """The edits of the table that make it the list of files in ``executed`` beside the infrastructure."""
    core = {name for name in executed - INFRASTRUCTURE.keys() if not NOT_LISTED.fullmatch(name)}
    expected = {name for name in core if not name.startswith(CPU_FOLDER)}
    edits = [f"remove the row of {name}: a default run executes none of its functions" for name in listed]
    edits = [edit for edit, name in zip(edits, listed, strict=True) if name not in expected]
    for name in sorted(expected.difference(listed)):
        docstring = ast.get_docstring(ast.parse((PACKAGE / name).read_text(encoding="utf-8"))) or ""
        edits.append(f"add the row: | [{name}](../torchtrain/{name}) | {docstring.splitlines()[0]} |")
    return edits


def test_reading_list_is_what_a_default_run_executes(default_run: dict[str, Any]) -> None:
    assert default_run["exit_code"] == 0
    edits = differences(reading_list(), set(default_run["functions"]))
    assert not edits, "docs/reading.md:\n" + "\n".join(edits)
    assert len(reading_list()) == len(set(reading_list()))


def test_infrastructure_is_executed_and_documented(default_run: dict[str, Any]) -> None:
    assert INFRASTRUCTURE.keys() <= default_run["functions"].keys()
    architecture = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = architecture.split("## Infrastructure")[1].split("\n## ")[0]
    assert set(re.findall(r"`([\w/]+\.py|cpu/)`", section)) == {*INFRASTRUCTURE, CPU_FOLDER}


def test_trace_covers_background_threads(default_run: dict[str, Any]) -> None:
    assert {"MainThread", "data", "save", "signals", "watchdog"} <= set(default_run["threads"])


@pytest.mark.slow  # that the trace finds the files of a run is also tested by the whole list
def test_option_that_is_on_is_traced(tmp_path: Path, default_run: dict[str, Any]) -> None:
    run = traced_run(tmp_path, "--ema.enable")
    assert set(run["functions"]) - set(default_run["functions"]) == {"optimizers/ema.py"}


def test_differences_are_edits_of_the_table(default_run: dict[str, Any]) -> None:
    listed, executed = reading_list(), {*default_run["functions"], "optimizers/ema.py"}
    (edit,) = differences(listed, executed)
    assert edit.startswith("add the row: | [optimizers/ema.py](../torchtrain/optimizers/ema.py) | ")
    (edit,) = differences([*listed, "optimizers/ema.py", "plugins/muon/muon.py"], executed)
    assert edit == "remove the row of plugins/muon/muon.py: a default run executes none of its functions"
