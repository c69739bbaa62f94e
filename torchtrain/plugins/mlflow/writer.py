"""Metrics writer for MLflow."""

import importlib.util
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from torchtrain.config.schema import JobConfig
from torchtrain.config.section import Section, require
from torchtrain.errors import ConfigError, TorchtrainError
from torchtrain.logging import BestEffort, logger
from torchtrain.metrics.history import read_run
from torchtrain.metrics.writers import MetricsWriter, WriterContext, grouped, hyperparameters
from torchtrain.optional_packages import install_command

RUN_TAG = "torchtrain.run"  # id of the run, by which a start finds its MLflow run
STEP_TAG = "torchtrain.step"  # the last step of which metrics are stored
WAITING_LINES = 10_000  # at most, while the server does not answer
RETRY_SECONDS = 30.0
CLOSE_SECONDS = 20.0  # for which the end of a run waits until all lines are sent
# Limits of a request (https://mlflow.org/docs/latest/rest-api.html).
MOST_PARAMETERS = 100
MOST_METRICS = 900  # 1000 with the tag
LONGEST_PARAMETER = 6000
LONGEST_NAME = 250


@dataclass(frozen=True)
class MLflowOptions(Section, name="metrics.options.mlflow"):
    """Options of the writer, [metrics.options.mlflow]."""

    tracking_uri: str = ""
    """Address of the server, such as "http://localhost:5000", or of a database. "": MLFLOW_TRACKING_URI, or else
    MLflow's default."""
    experiment: str = "torchtrain"
    """Name of the experiment, which is created if there is none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.experiment != "", 'metrics.options.mlflow.experiment = "" must be a name')
        require(
            urlsplit(self.tracking_uri).password is None,
            "metrics.options.mlflow.tracking_uri has a password, which would be stored in config.toml and in the "
            "parameters of the MLflow run: set the environment variable MLFLOW_TRACKING_URI, or "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        )


class MLflow(MetricsWriter):
    """MLflow. A resumed run continues its MLflow run, which is found by a tag with the id of the run.

    MLflow cannot remove metrics. When steps are undone, a new MLflow run with the same tag begins, with the earlier
    steps of metrics.jsonl; the one before keeps what was undone.

    A thread sends the requests, because MLflow's client retries for minutes while a server does not answer. Meanwhile
    lines wait in a queue.
    """

    label = "MLflow"
    Options = MLflowOptions

    @classmethod
    def check(cls, options: MLflowOptions, config: JobConfig) -> None:  # noqa: ARG003
        if importlib.util.find_spec("mlflow") is None:
            command = install_command("mlflow", with_constraints=False)  # it requires other versions
            raise ConfigError(f"metrics.writers = ['mlflow'] needs the package mlflow: {command}")

    def __init__(self, context: WriterContext) -> None:
        self.requests: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING_LINES)
        self.closed = threading.Event()
        self.sender = _Sender(context)
        self.requests.put(partial(self.sender.open, time.time()))
        self.thread = threading.Thread(target=self._send_all, name="mlflow", daemon=True)
        self.thread.start()

    def _send_all(self) -> None:
        """Send the requests in their order. One that fails is sent again after a while."""
        effort = BestEffort(self.label)
        while (request := self.requests.get()) is not None and not self.closed.is_set():
            sent = False
            while not sent:
                with effort:
                    request()
                    sent = True
                if not sent and self.closed.wait(RETRY_SECONDS):
                    return

    def _request(self, request: Callable[[], None]) -> None:
        try:
            self.requests.put_nowait(request)
        except queue.Full:
            raise TorchtrainError(f"{WAITING_LINES:,} lines of metrics wait for the server") from None

    def write(self, line: dict[str, Any]) -> None:
        self._request(partial(self.sender.write, dict(line), time.time()))

    def undo(self, step: int) -> None:
        self._request(partial(self.sender.begin_again, step, time.time()))

    def close(self) -> None:
        failed = sys.exc_info()[0] is not None  # the error that ends training, if one does
        with suppress(TorchtrainError):
            self._request(partial(self.sender.end, "FAILED" if failed else "FINISHED"))
        with suppress(queue.Full):
            self.requests.put_nowait(None)
        self.thread.join(CLOSE_SECONDS)
        self.closed.set()
        if self.thread.is_alive():
            logger.warning(
                f"MLflow: the server has not answered for {CLOSE_SECONDS:.0f} s; the last lines of metrics.jsonl are "
                "missing there, until the run is resumed"
            )


class _Sender:
    """Sends the metrics of a run to MLflow. The writer's thread calls its methods, again if they have failed."""

    def __init__(self, context: WriterContext) -> None:
        self.context = context
        self.options = context.options
        values = hyperparameters(context.config_toml).items()
        self.parameters = {name: str(value)[:LONGEST_PARAMETER] for name, value in values}
        self.client: Any = None
        self.run_id = ""
        self.stored_step = -1  # metrics up to this step are stored
        self.has_rejected = False

    def open(self, seconds: float) -> None:
        """Continue the MLflow run of this run, or begin one, with the lines before this start that it lacks.

        ``seconds``: the time of this start, which MLflow shows for these lines, here and in other methods.
        """
        from mlflow import MlflowClient

        self.client = MlflowClient(self.options.tracking_uri or None)
        found = self._newest()
        if found is None:
            self._begin("", self.context.start_step, seconds)
            return
        self.run_id = found.info.run_id
        if self.context.undone:
            self.begin_again(self.context.start_step, seconds)
            return
        self.stored_step = int(found.data.tags.get(STEP_TAG, -1))
        self.client.update_run(self.run_id, status="RUNNING")
        stored = found.data.params
        self._log_parameters({name: value for name, value in self.parameters.items() if name not in stored})
        for name, value in self.parameters.items():
            if stored.get(name, value) != value:  # MLflow does not change parameters
                self.client.set_tag(self.run_id, f"resumed_with.{name}", value)
        self._add_lines(self.context.start_step, seconds)

    def _newest(self) -> Any:
        """The last MLflow run of this run; None if there is none."""
        experiment = self.client.get_experiment_by_name(self.options.experiment)
        if experiment is None or not self.context.run:
            return None
        of_this_run = f"tags.`{RUN_TAG}` = '{self.context.run}'"
        runs = self.client.search_runs(
            [experiment.experiment_id], of_this_run, order_by=["attributes.start_time DESC"], max_results=1
        )
        return runs[0] if runs else None

    def _begin(self, after: str, step: int, seconds: float) -> None:
        """Begin an MLflow run with the parameters of the config and the lines up to ``step``."""
        name = self.options.experiment
        experiment = self.client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(name)
        run_name = f"{self.context.folder.resolve().name}{after}"
        run = self.client.create_run(experiment_id, tags={RUN_TAG: self.context.run}, run_name=run_name)
        self.run_id, self.stored_step = run.info.run_id, -1
        self._log_parameters(self.parameters)
        self._add_lines(step, seconds)

    def _log_parameters(self, parameters: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        params = [Param(name, value) for name, value in parameters.items()]
        for first in range(0, len(params), MOST_PARAMETERS):
            self.client.log_batch(self.run_id, params=params[first : first + MOST_PARAMETERS])

    def begin_again(self, step: int, seconds: float) -> None:
        """Begin a new MLflow run, which continues from ``step``."""
        self.client.set_tag(self.run_id, "torchtrain.undone_after_step", str(step))
        self.client.set_terminated(self.run_id)
        self._begin(f" (again from step {step})", step, seconds)
        logger.info(f"MLflow: steps after {step} are undone; the run continues as the MLflow run {self.run_id}")

    def _add_lines(self, step: int, seconds: float) -> None:
        """Add the lines of metrics.jsonl up to ``step`` that are not stored."""
        lines: list[dict[str, Any]] = []
        if step > 0:
            with suppress(TorchtrainError):  # the file has no steps
                lines = read_run(self.context.folder, lambda _: None).lines
        metrics: list[Any] = []
        for line in lines:
            if self.stored_step < line["step"] <= step:
                of_line = _metrics(line, seconds)
                if metrics and len(metrics) + len(of_line) > MOST_METRICS:
                    self._store(metrics, metrics[-1].step)
                    metrics = []
                metrics += of_line
        if metrics:
            self._store(metrics, metrics[-1].step)

    def write(self, line: dict[str, Any], seconds: float) -> None:
        """Add a line of metrics.jsonl, which was written at the time ``seconds``."""
        step, is_event = line["step"], "event" in line
        if is_event or step >= self.stored_step:  # else a resumed run repeats the step, with the same values
            self._store(_metrics(line, seconds), None if is_event else step)

    def _store(self, metrics: list[Any], step: int | None) -> None:
        """Store ``metrics``, after which all metrics up to ``step`` are stored."""
        from mlflow.entities import RunTag
        from mlflow.exceptions import MlflowException

        tags = [] if step is None else [RunTag(STEP_TAG, str(step))]
        try:
            for first in range(0, len(metrics), MOST_METRICS):
                self.client.log_batch(self.run_id, metrics=metrics[first : first + MOST_METRICS], tags=tags)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise  # they are sent again
            if not self.has_rejected:
                logger.warning(f"MLflow rejects metrics, which are dropped: {error}")
            self.has_rejected = True
        else:
            self.stored_step = self.stored_step if step is None else step

    def end(self, status: str) -> None:
        self.client.set_terminated(self.run_id, status)


def _metrics(line: dict[str, Any], seconds: float) -> list[Any]:
    """The numbers in a line as MLflow's metrics; of an event its name."""
    from mlflow.entities import Metric

    values = {f"faults/{line['event']}": 1} if "event" in line else grouped(line)
    return [Metric(metric_name(key), value, int(1000 * seconds), line["step"]) for key, value in values.items()]


def metric_name(name: str) -> str:
    """A name from ``grouped``, with "_" for characters that MLflow rejects in names, or reads as folders."""
    group, _, rest = name.partition("/")
    accepted = re.sub(r"[^\w. -]", "_", rest)
    return f"{group}/{accepted}"[:LONGEST_NAME]
