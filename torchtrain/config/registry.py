"""Registries: the implementations that an option selects by name, and a user's modules that add to them.

A registry maps each value of an option such as ``optimizer.name`` to an object: a class or a factory. Built-in entries
are strings, "module:attribute", which are imported on first use, so that parsing a config needs no PyTorch. A module
that is named in ``job.import`` is imported before the config is read, and calls ``register``.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

from torchtrain.errors import ConfigError

Entry = TypeVar("Entry")


class Registry:
    """Entries by name.

    Args:
        option: the full name of the option that selects an entry, for messages.
        builtin: "module:attribute" of each built-in entry, by name.
    """

    def __init__(self, option: str, builtin: Mapping[str, str]) -> None:
        self.option = option
        self._entries: dict[str, Any] = dict(builtin)

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Class or function decorator that registers an entry.

        Raises:
            ConfigError: there is another entry of this name.
        """

        def add(entry: Entry) -> Entry:
            # A module that is imported again, as by a reload in a notebook, may register its own entry again.
            earlier = _origin(self._entries.get(name, entry))
            if earlier != _origin(entry):
                raise ConfigError(f"{self.option} = {name!r} is registered twice, by {earlier} and {_origin(entry)}")
            self._entries[name] = entry
            return entry

        return add

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Any:
        """The entry ``name``; imports a built-in one. Raises ConfigError if there is none."""
        self.check(name, self.option)
        entry = self._entries[name]
        if isinstance(entry, str):
            module, attribute = entry.split(":")
            entry = getattr(import_module(module), attribute)
        return entry

    def check(self, name: str, option: str) -> None:
        """Raise ConfigError unless there is an entry ``name``, the value of ``option``."""
        if name not in self._entries:
            choices = ", ".join(repr(choice) for choice in self._entries)
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{option} = {name!r} must be one of {choices}, or one that a module in job.import registers{hint}"
            )


_LLAMA = "torchtrain.models.llama.specs"
MODELS = Registry(
    "model.name",
    {
        "llama2": f"{_LLAMA}:LLAMA2",
        "llama3": f"{_LLAMA}:LLAMA3",
        "mistral": f"{_LLAMA}:MISTRAL",
        "qwen2": f"{_LLAMA}:QWEN2",
        "qwen3": f"{_LLAMA}:QWEN3",
    },
)
"""Instances of ``torchtrain.models.spec.ModelSpec``."""
OPTIMIZERS = Registry(
    "optimizer.name",
    {"adamw": "torchtrain.optimizers.adamw:ShardedAdamW", "muon": "torchtrain.optimizers.muon:Muon"},
)
"""Subclasses of ``optimizers.base.ShardedOptimizer``."""


LR_SCHEDULES = Registry(
    "lr_scheduler.decay_type",
    {name: f"torchtrain.optimizers.lr_schedule:{name}" for name in ("constant", "linear", "cosine", "sqrt")},
)
"""Functions of a step after the warm-up and the ``optimizers.lr_schedule.SchedulePhases``, which return the learning
rate as a factor of its peak."""


def _origin(entry: Any) -> str:
    """Module and name of an entry."""
    return entry if isinstance(entry, str) else f"{entry.__module__}:{getattr(entry, '__qualname__', entry)}"


def import_modules(names: Sequence[str], option: str = "job.import") -> None:
    """Import the modules that ``option`` names, which register their entries.

    Raises:
        ConfigError: there is no such module. An error inside of a module is raised as it is, with its traceback.
    """
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"{option} = {name!r} must be the name of a module, such as 'my_package.my_module'")
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists, and imports one that does not
            raise ConfigError(
                f"{option} = {name!r} is not a module that Python finds: install its package, or add its folder to "
                "PYTHONPATH"
            ) from None


DATA_SOURCES = Registry(
    "data.type",
    {
        "files": "torchtrain.datasets.builtin_sources:Files",
        "hub": "torchtrain.datasets.builtin_sources:HubDataset",
        "standard_library": "torchtrain.datasets.builtin_sources:StandardLibrary",
        "standard_library_docs": "torchtrain.datasets.builtin_sources:StandardLibraryDocs",
    },
)
"""Subclasses of ``datasets.source.DataSource``, or classes with its class methods ``ask_once`` and ``open``."""


METRICS_WRITERS = Registry(
    "metrics.writers",
    {
        "tensorboard": "torchtrain.metrics.writers:TensorBoard",
        "wandb": "torchtrain.metrics.writers:WeightsAndBiases",
    },
)
"""Subclasses of ``metrics.writers.MetricsWriter``."""


CHECKPOINT_STORAGES = Registry(
    "the scheme of checkpoint.folder",
    {
        "file": "torchtrain.checkpoint.local_storage:LocalStorage",
        **dict.fromkeys(
            ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"), "torchtrain.checkpoint.object_storage:ObjectStorage"
        ),
    },
)
"""Subclasses of ``checkpoint.storage.CheckpointStorage``, by the scheme of their URLs."""
