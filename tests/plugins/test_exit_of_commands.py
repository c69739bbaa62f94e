"""Commands of plugins exit with their code, also where a thread needs the GIL."""

import importlib
import os
from pathlib import Path

import pytest
from test_exit import exit_code, start_thread_in_torch


def test_generate_convert_and_compare_exit_with_their_code(trained_run: Path, tmp_path: Path) -> None:
    run, log = str(trained_run), tmp_path / "log"
    for arguments, message in (
        (["torchtrain.generate", run, "--prompt", "def ", "--max_new_tokens", "2"], "def "),
        (["torchtrain.convert", run, str(tmp_path / "hf")], f"wrote {tmp_path}/hf"),
        (["torchtrain.compare", run, run], "match bitwise: 8 logged steps"),
    ):
        code = exit_code(arguments, log)
        assert message in log.read_text()
        assert code == 0, log.read_text()


def test_evaluate_exits_with_its_code(trained_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    evaluate = importlib.import_module("test_evaluate")
    evaluate.write_tasks(tmp_path)
    arguments = [
        *("torchtrain.evaluate", "--model", "torchtrain", "--model_args", f"checkpoint={trained_run}"),
        *("--device", "cpu", "--tasks", "choice", "--include_path", str(tmp_path)),
    ]
    code = exit_code(arguments, tmp_path / "log", prepare_evaluation)
    assert "|choice|" in (tmp_path / "log").read_text()
    assert code == 0


def prepare_evaluation() -> None:
    os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")
    importlib.import_module("test_evaluate").skip_slow_parts()
    start_thread_in_torch()
