"""The writer for Trackio, with the package where it is installed, and with a stand-in for it."""

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtrain.config.registry import METRICS_WRITERS
from torchtrain.config.schema import JobConfig
from torchtrain.errors import ConfigError
from torchtrain.metrics.options import MetricsConfig
from torchtrain.metrics.writers import Writers, changes_steps, check_writers
from torchtrain.plugins.trackio.writer import Trackio

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Trackio
CONFIG = "[training]\nsteps = 8\n"
Losses = Callable[[], list[dict[int, float]]]


class StandIn(types.ModuleType):
    """What the writer uses of Trackio; runs are stored by project and name."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.__spec__ = SimpleNamespace()  # type: ignore[assignment]
        self.runs: dict[tuple[str, str], Any] = {}

    def init(self, project: str, name: str, config: dict[str, Any], resume: str, **options: Any) -> Any:
        assert resume == "allow"
        print("* Trackio project initialized")  # noqa: T201
        run = self.runs.setdefault((project, name), SimpleNamespace(name=name, lines=[], options=options))
        run.config = config
        run.log = lambda values, step: run.lines.append((step, values))
        run.finish = lambda: None
        return run


@pytest.fixture(params=["stand-in", "package"])
def losses(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Losses:
    """Reads losses by step of each Trackio run, the oldest first."""
    if request.param == "stand-in":
        stand_in = StandIn()
        monkeypatch.setitem(sys.modules, "trackio", stand_in)
        return lambda: [
            {step: values["loss/average"] for step, values in run.lines if "loss/average" in values}
            for (project, _), run in stand_in.runs.items()
            if project == "mine"
        ]
    pytest.importorskip("trackio.sqlite_storage")  # this folder is a module trackio, too
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")

    def read() -> list[dict[int, float]]:
        found = []
        for name in sqlite_storage.SQLiteStorage.get_runs("mine"):
            logs = sqlite_storage.SQLiteStorage.get_logs("mine", name)
            found.append({log["step"]: log["loss/average"] for log in logs if log.get("loss/average") is not None})
        return found

    return read


def open_writers(folder: Path, start_step: int, options: str) -> Writers:
    folder.mkdir(exist_ok=True)
    undone = changes_steps(folder / "metrics.jsonl", start_step, options)
    config = MetricsConfig(enable_tensorboard=False, writers=("trackio",), options={"trackio": {"project": "mine"}})
    writers = Writers(config, folder, CONFIG, start_step, "run", undone)
    writers.write({"step": start_step, "event": "start", "options": options, "run": "run"})
    return writers


def test_trackio_has_the_losses_of_metrics_jsonl(
    tmp_path: Path, losses: Losses, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a rollback, after a resume with the same options, and after one with others."""
    folder = tmp_path / "out"
    writers = open_writers(folder, 0, "a")
    for step, loss in ((1, 5.0), (2, 4.0), (3, 9.0)):
        writers.write({"step": step, "loss": loss})
    writers.undo(1)
    for step, loss in ((2, 4.5), (3, 7.0)):
        writers.write({"step": step, "loss": loss})
    writers.close()
    assert losses() == [{1: 5.0, 2: 4.0, 3: 9.0}, {1: 5.0, 2: 4.5, 3: 7.0}]
    for options, loss in (("a", 7.0), ("b", 2.0)):
        writers = open_writers(folder, 2, options)
        writers.write({"step": 3, "loss": loss})
        writers.close()
    assert losses() == [{1: 5.0, 2: 4.0, 3: 9.0}, {1: 5.0, 2: 4.5, 3: 7.0}, {1: 5.0, 2: 4.5, 3: 2.0}]
    assert (folder / "trackio_run").read_text().startswith("out-")
    assert (folder / "trackio_run").read_text().endswith("-from-step-2")
    assert capsys.readouterr().out == ""


def test_run_that_could_not_be_opened_is_opened_with_the_steps_before(
    tmp_path: Path, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trackio

    def fail(**_: Any) -> None:
        raise OSError("no connection")

    writers = open_writers(tmp_path / "out", 0, "a")
    writers.write({"step": 1, "loss": 5.0})
    writers.write({"step": 2, "loss": 4.0})
    with monkeypatch.context() as patch:
        patch.setattr(trackio, "init", fail)
        writers.undo(1)
        writers.write({"step": 2, "loss": 3.0})  # is dropped
    writers.write({"step": 3, "loss": 2.0})
    writers.close()
    assert losses() == [{1: 5.0, 2: 4.0}, {1: 5.0, 3: 2.0}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projct": "a"}, "metrics.options.trackio.projct is not a known key; did you mean"),
        ({"private": "no"}, "metrics.options.trackio.private = 'no' must be true or false"),
        ({"project": ""}, 'metrics.options.trackio.project = "" must be a name'),
    ],
)
def test_wrong_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trackio.read_options(options, "metrics.options.trackio")


def test_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert METRICS_WRITERS["trackio"] is Trackio
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs the package trackio: pip install 'trackio>=[\d.]+'$"):
        check_writers(JobConfig(metrics=MetricsConfig(writers=("trackio",))))
