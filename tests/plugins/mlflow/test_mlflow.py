"""The writer for MLflow, with the package where it is installed, and with a stand-in for its client."""

import importlib.util
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow_stand_in
import pytest
from captured_log import captured_log
from forkserver import free_port

from torchtrain.config.registry import METRICS_WRITERS
from torchtrain.config.schema import JobConfig
from torchtrain.errors import ConfigError
from torchtrain.metrics.options import MetricsConfig
from torchtrain.metrics.writers import Writers, changes_steps, check_writers
from torchtrain.plugins.mlflow import writer as mlflow_writer
from torchtrain.plugins.mlflow.writer import MLflow, metric_name

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of MLflow and of SQLAlchemy
CONFIG = """
[training]
steps = 8
[data]
sources = [{path = "a.txt"}]
"""


@pytest.fixture(params=["stand-in", "package", pytest.param("server", marks=pytest.mark.slow)])
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A tracking URI of the stand-in, of a database, or of a server of MLflow."""
    database = f"sqlite:///{tmp_path}/mlflow.db"
    if request.param == "stand-in":
        for name, module in mlflow_stand_in.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        yield database
        return
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    pytest.importorskip("mlflow.client")  # this folder is a module mlflow, too, where the package is missing
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if request.param == "package":
        yield database
        return
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", database, "--port", str(port)]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen([*command, "--workers", "1"], cwd=tmp_path, stdout=log, stderr=log)
    yield f"http://127.0.0.1:{port}"  # the writer waits until it answers
    server.terminate()
    server.wait()


def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(uri)


def open_writers(
    folder: Path, uri: str, start_step: int = 0, options: str = "a", config: str = CONFIG, **own: Any
) -> Writers:
    """Writers as a process of the run opens them, with its first line."""
    folder.mkdir(exist_ok=True)
    undone = changes_steps(folder / "metrics.jsonl", start_step, options)
    metrics = MetricsConfig(
        enable_tensorboard=False, writers=("mlflow",), options={"mlflow": {"tracking_uri": uri, **own}}
    )
    writers = Writers(metrics, folder, config, start_step, "1234", undone)
    writers.write({"step": start_step, "event": "start", "options": options, "run": "1234"})
    return writers


def losses(uri: str, name: str = "loss/average") -> list[list[tuple[int, float]]]:
    """Steps and losses of each MLflow run, the oldest first."""
    experiment = client(uri).get_experiment_by_name("torchtrain")
    runs = client(uri).search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])
    histories = [client(uri).get_metric_history(run.info.run_id, name) for run in runs[::-1]]
    return [sorted((metric.step, metric.value) for metric in history) for history in histories]


def newest(uri: str) -> Any:
    experiment = client(uri).get_experiment_by_name("torchtrain")
    return client(uri).search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])[0]


@pytest.fixture(autouse=True)
def long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_writer, "CLOSE_SECONDS", 3600.0)  # the time limit of a test ends it
    monkeypatch.setattr(mlflow_writer, "RETRY_SECONDS", 0.2)


def test_run_and_its_resume_are_one_mlflow_run(tmp_path: Path, uri: str) -> None:
    writers = open_writers(tmp_path / "out", uri)
    for step in (1, 2, 3):
        writers.write({"step": step, "loss": 5.0 - step, "source_loss_my (text)": 1.0, "validation_samples": []})
    writers.close()
    assert newest(uri).data.params["training.steps"] == "8"
    assert "a.txt" in newest(uri).data.params["data.sources"]
    assert (newest(uri).info.run_name, newest(uri).info.status) == ("out", "FINISHED")
    writers = open_writers(tmp_path / "out", uri, 2, config=CONFIG.replace("8", "9") + "[model]\nname = 'new'\n")
    for step in (3, 4):  # step 3 is repeated
        writers.write({"step": step, "loss": 5.0 - step})
    try:
        raise ValueError
    except ValueError:  # as at the end of a run that fails
        writers.close()
    (found,) = losses(uri)
    assert dict(found) == {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}
    assert losses(uri, "source/loss_my _text_") == [[(1, 1.0), (2, 1.0), (3, 1.0)]]
    assert losses(uri, "faults/start") == [[(0, 1.0), (2, 1.0)]]
    assert newest(uri).info.status == "FAILED"
    assert newest(uri).data.tags["resumed_with.training.steps"] == "9"
    assert newest(uri).data.params["training.steps"] == "8"
    assert newest(uri).data.params["model.name"] == "new"


def test_each_line_of_a_step_is_stored_at_its_time_in_milliseconds(tmp_path: Path, uri: str) -> None:
    """A step has a line of its training, and one of its validation."""
    begin = time.time()
    writers = open_writers(tmp_path / "out", uri)
    for step in (1, 2):
        writers.write({"step": step, "loss": 5.0 - step})
        writers.write({"step": step, "validation_loss": 6.0 - step})
    writers.close()
    assert losses(uri) == [[(1, 4.0), (2, 3.0)]]
    assert losses(uri, "validation/loss") == [[(1, 5.0), (2, 4.0)]]
    history = client(uri).get_metric_history(newest(uri).info.run_id, "loss/average")
    assert [metric for metric in history if not (1000 * begin - 1 <= metric.timestamp <= 1000 * time.time())] == []


def test_undone_steps_begin_a_new_mlflow_run(tmp_path: Path, uri: str) -> None:
    """After a rollback, after a resume with the same options, and after one with others."""
    folder = tmp_path / "out"
    writers = open_writers(folder, uri)
    for step, loss in ((1, 5.0), (2, 4.0), (3, 9.0)):
        writers.write({"step": step, "loss": loss})
    writers.undo(1)
    for step, loss in ((2, 4.5), (3, 7.0)):
        writers.write({"step": step, "loss": loss})
    writers.close()
    first = [(1, 5.0), (2, 4.0), (3, 9.0)]
    assert losses(uri) == [first, [(1, 5.0), (2, 4.5), (3, 7.0)]]
    assert newest(uri).info.run_name == "out (again from step 1)"
    for options, loss in (("a", 7.0), ("b", 2.0)):
        writers = open_writers(folder, uri, 2, options)
        writers.write({"step": 3, "loss": loss})
        writers.close()
    assert [dict(run) for run in losses(uri)] == [dict(first), {1: 5.0, 2: 4.5, 3: 7.0}, {1: 5.0, 2: 4.5, 3: 2.0}]
    assert losses(uri)[2] == [(1, 5.0), (2, 4.5), (3, 2.0)]


def test_lines_that_mlflow_lacks_are_added_from_metrics_jsonl(tmp_path: Path, uri: str) -> None:
    """Of a run that has used no MLflow before, and of one whose last lines were not sent."""
    folder = tmp_path / "out"
    folder.mkdir()
    lines = [json.dumps({"step": step, "loss": float(step), "tokens": step}) + "\n" for step in range(1, 1201)]
    (folder / "metrics.jsonl").write_text("".join(lines[:1000]))
    open_writers(folder, uri, 1000).close()
    assert losses(uri) == [[(step, float(step)) for step in range(1, 1001)]]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(lines[1000:])
    open_writers(folder, uri, 1200).close()
    assert losses(uri) == [[(step, float(step)) for step in range(1, 1201)]]


def test_server_that_does_not_answer_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(mlflow_writer, "CLOSE_SECONDS", 1.0)
    monkeypatch.setattr(mlflow_writer, "WAITING_LINES", 5)
    monkeypatch.setattr(mlflow_writer, "RETRY_SECONDS", 3600.0)  # this test would time out
    client(uri)  # imports the package
    with captured_log() as log:
        writers = open_writers(tmp_path / "out", f"http://127.0.0.1:{free_port()}/unreachable")
        for step in range(10):
            writers.write({"step": step, "loss": 1.0})
        writers.close()
    text = "".join(log)
    assert "MLflow: API request to http" in text
    assert "MLflow: 5 lines of metrics wait for the server; training continues without it" in text
    assert "MLflow: the server has not answered for 1 s; the last lines of metrics.jsonl are missing there" in text
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count("loss") == 10


def test_lines_wait_for_a_server_that_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    fails = iter([True, False, True, False])
    log_batch = mlflow_writer._Sender._store

    def flaky(*arguments: Any) -> None:
        if next(fails, False):
            raise OSError("no connection")
        log_batch(*arguments)

    monkeypatch.setattr(mlflow_writer._Sender, "_store", flaky)
    with captured_log() as log:
        writers = open_writers(tmp_path / "out", uri)
        for step in (1, 2):
            writers.write({"step": step, "loss": 1.0})
        writers.close()
    assert losses(uri) == [[(1, 1.0), (2, 1.0)]]
    texts = [text for text in log if text.startswith("MLflow: ") and "URL" not in text and "API" not in text]
    assert [text.rstrip() for text in texts] == [
        "MLflow: no connection; training continues without it",
        "MLflow: works again",
        "MLflow: no connection; training continues without it",
        "MLflow: works again",
    ]


def test_metrics_that_mlflow_rejects_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    monkeypatch.setattr(mlflow_writer, "metric_name", lambda name: name)
    with captured_log() as log:
        writers = open_writers(tmp_path / "out", uri)
        for step, name in enumerate(("a", "a(b)", "c(d)", "a"), 1):
            writers.write({"step": step, name: 1.0})
        writers.close()
    assert losses(uri, "other/a") == [[(1, 1.0), (4, 1.0)]]
    assert sum("MLflow rejects metrics, which are dropped: " in text for text in log) == 1


def test_names_are_those_that_mlflow_accepts() -> None:
    names = ["loss/average", "norm/grad_layers.0", "source/loss_../data/*.txt", "source/tokens_é:1"]
    assert [metric_name(name) for name in names] == [
        *("loss/average", "norm/grad_layers.0", "source/loss_.._data__.txt", "source/tokens_é_1")
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experimnt": "a"}, "metrics.options.mlflow.experimnt is not a known key; did you mean"),
        ({"experiment": 3}, "metrics.options.mlflow.experiment = 3 must be a string"),
        ({"experiment": ""}, 'metrics.options.mlflow.experiment = "" must be a name'),
        ({"tracking_uri": "postgresql://me:secret@host/db"}, "tracking_uri has a password, .* MLFLOW_TRACKING_URI"),
    ],
)
def test_wrong_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        MLflow.read_options(options, "metrics.options.mlflow")
    assert "secret" not in str(error.value)


def test_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert METRICS_WRITERS["mlflow"] is MLflow
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs the package mlflow: pip install 'mlflow>=[\d.]+'$"):
        check_writers(JobConfig(metrics=MetricsConfig(writers=("mlflow",))))
