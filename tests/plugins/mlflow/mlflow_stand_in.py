"""The part of MLflow's client that the writer uses, with a store in memory for each tracking URI."""

import re
import types
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple


class MlflowException(Exception):
    def __init__(self, message: str, error_code: str) -> None:
        super().__init__(message)
        self.error_code = error_code


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Entry(NamedTuple):
    key: str
    value: str


class Client:
    stores: dict[str, list[Any]] = defaultdict(list)  # noqa: RUF012

    def __init__(self, tracking_uri: str | None = None) -> None:
        self.uri = tracking_uri or ""

    @property
    def runs(self) -> list[Any]:
        if "unreachable" in self.uri:
            raise MlflowException(f"API request to {self.uri} failed", "INTERNAL_ERROR")
        return self.stores[self.uri]

    def get_experiment_by_name(self, name: str) -> Any:
        found = any(run.info.experiment_id == f"id of {name}" for run in self.runs)
        return SimpleNamespace(experiment_id=f"id of {name}") if found else None

    def create_experiment(self, name: str) -> str:
        return f"id of {name}"

    def create_run(self, experiment_id: str, tags: dict[str, str], run_name: str) -> Any:
        info = SimpleNamespace(
            run_id=f"run {len(self.runs)}", experiment_id=experiment_id, status="RUNNING", run_name=run_name
        )
        data = SimpleNamespace(params={}, tags=dict(tags), metrics={})
        self.runs.append(SimpleNamespace(info=info, data=data, history=[]))
        return self.runs[-1]

    def search_runs(self, experiment_ids: list[str], filter_string: str = "", **_: Any) -> list[Any]:
        """Those with the tag, the newest first."""
        match = re.fullmatch(r"tags\.`(\S+)` = '(.*)'", filter_string)
        found = [run for run in self.runs if run.info.experiment_id in experiment_ids]
        return [run for run in found[::-1] if match is None or run.data.tags.get(match[1]) == match[2]]

    def get_run(self, run_id: str) -> Any:
        return next(run for run in self.runs if run.info.run_id == run_id)

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        run = self.get_run(run_id)
        assert len(params) <= 100
        assert len(metrics) + len(params) + len(tags) <= 1000
        for entry in (*metrics, *params):
            if not re.fullmatch(r"[/\w.\- :]*", entry.key):
                raise MlflowException(f'Invalid value "{entry.key}"', "INVALID_PARAMETER_VALUE")
        for param in params:
            if run.data.params.setdefault(param.key, param.value) != param.value:
                raise MlflowException("Changing param values is not allowed", "INVALID_PARAMETER_VALUE")
        run.data.tags |= dict(tags)
        run.history += metrics

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.get_run(run_id).data.tags[key] = value

    def update_run(self, run_id: str, status: str) -> None:
        self.get_run(run_id).info.status = status

    def set_terminated(self, run_id: str, status: str = "FINISHED") -> None:
        self.get_run(run_id).info.status = status

    def get_metric_history(self, run_id: str, key: str) -> list[Metric]:
        return [metric for metric in self.get_run(run_id).history if metric.key == key]


def modules() -> dict[str, types.ModuleType]:
    """The modules to put into ``sys.modules``."""
    Client.stores.clear()
    contents: dict[str, dict[str, Any]] = {
        "mlflow": {"MlflowClient": Client, "__spec__": SimpleNamespace()},
        "mlflow.entities": {"Metric": Metric, "Param": Entry, "RunTag": Entry},
        "mlflow.exceptions": {"MlflowException": MlflowException},
    }
    found = {}
    for name, content in contents.items():
        found[name] = types.ModuleType(name)
        vars(found[name]).update(content)
    return found
