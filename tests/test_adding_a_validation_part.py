"""The code of docs/plugins.md for a part of validation, as a user's module, on several layouts."""

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked_run import TINY, finish, read_metrics

SHAPE = replace(TINY, n_layers=2, n_kv_heads=2)
PAGE = (Path(__file__).parent.parent / "docs" / "plugins.md").read_text(encoding="utf-8")


def use_modules_of(folder: Path) -> Any:
    sys.path.insert(0, str(folder))


def accuracies(folder: Path, module: Path, ranks: int, *options: str) -> list[float]:
    text = module / "text.txt"
    text.write_text("aaaa bbbb aaaa bbbb cccc " * 40)
    training = ["--training.steps=6", "--checkpoint.no-enable", "--training.global_batch_size=4"]
    validation = ["--validation.enable", f"--validation.path={text}", "--validation.interval=3"]
    options = (
        *training,
        *validation,
        f"--data.path={text}",
        "--job.import",
        "accuracy",
        "--accuracy.top_k=1",
        *options,
    )
    finish(folder, *options, ranks=ranks, hook=partial(use_modules_of, module), shape=SHAPE)
    return [line["validation_accuracy"] for line in read_metrics(folder) if "validation_accuracy" in line]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("module")
    (code,) = re.findall(r"```python\n(# accuracy.py\n.*?)```", PAGE, re.DOTALL)
    (folder / "accuracy.py").write_text(code)
    return folder


@pytest.fixture(scope="module")
def on_one_rank(module: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return accuracies(tmp_path_factory.mktemp("one"), module, 1)


@pytest.mark.parametrize(
    "axis", ["tensor", "pipeline", *(pytest.param(axis, marks=pytest.mark.slow) for axis in ("data", "context"))]
)
def test_accuracy_is_that_of_one_rank(axis: str, module: Path, on_one_rank: list[float], tmp_path: Path) -> None:
    options = [] if axis == "data" else [f"--parallelism.{axis}_parallel_degree=2"]
    if axis == "pipeline":
        options += ["--training.local_batch_size=2"]
    found = accuracies(tmp_path, module, 2, *options)
    assert len(found) == 2
    assert found[1] > 0.1  # it learns the few words
    assert found == pytest.approx(on_one_rank, abs=0.01)
