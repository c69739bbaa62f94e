"""Fixtures of the tests with runs of replicas."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_run import Hook, finish, nothing
from replica_run import CONFIG, SHAPE, Reference, Replicas


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the undisturbed run with these options, which is trained once."""
    found: dict[tuple[Any, ...], Reference] = {}

    def reference(*options: str, ranks: int = 1, config: Path | None = None, hook: Hook = nothing) -> Reference:
        key = (*options, config, hook)
        if key not in found:
            folder = tmp_path_factory.mktemp("reference")
            (folder / "own.toml").write_text(config.read_text() if config else CONFIG)
            words = ["--job.config_file", str(folder / "own.toml"), *options]
            finish(folder, *words, ranks=ranks, shape=SHAPE, hook=hook)
            found[key] = Reference(folder)
        return found[key]

    return reference


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Returns replicas that are killed at the end of the test."""
    all_started = []

    def start(*options: str, **arguments: Any) -> Replicas:
        replicas = Replicas(tmp_path / f"run{len(all_started)}", *options, **arguments)
        all_started.append(replicas)
        return replicas

    yield start
    for replicas in all_started:
        replicas.end()
