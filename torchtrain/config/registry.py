"""Registries: the implementations that an option selects by name, and the plugins and modules that add to them.

A registry maps each value of an option such as ``optimizer.name`` to an object: a class or a factory. An entry may be a
string, "module:attribute", which is imported on first use, so that parsing a config needs no PyTorch. Entries of the
core are given here. Plugins add theirs when they are imported, before a registry is used for the first time. A module
that is named in ``job.import`` is imported before the config is read, and calls ``register``.
"""

import difflib
import pkgutil
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from torchtrain.errors import ConfigError

Entry = TypeVar("Entry")
PLUGINS = Path(__file__).parent.parent / "plugins"


class Registry:
    """Entries by name.

    Args:
        option: the full name of the option that selects an entry, for messages.
        core: "module:attribute" of each entry of the core, by name.
        of_plugins: the plugins of this repository that register other names, for messages.
    """

    disabled: ClassVar[frozenset[str]] = frozenset()
    """The plugins whose entries are hidden, in all registries (``disable_plugins``)."""

    def __init__(
        self, option: str, core: Mapping[str, str] | None = None, of_plugins: Mapping[str, str] | None = None
    ) -> None:
        self.option = option
        self.of_plugins = of_plugins or {}
        self._core = tuple(core or ())
        self._entries: dict[str, Any] = dict(core or {})

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Class or function decorator that registers an entry.

        Raises:
            ConfigError: there is another entry of this name.
        """

        def add(entry: Entry) -> Entry:
            self.add(name, entry)
            return entry

        return add

    def add(self, name: str, entry: Any) -> None:
        """Register an entry: an object, or "module:attribute". Raises ConfigError as ``register`` does."""
        # A module that is imported again, as by a reload in a notebook, may register its own entry again.
        earlier = _origin(self._entries.get(name, entry))
        if earlier != _origin(entry):
            raise ConfigError(f"{self.option} = {name!r} is registered twice, by {earlier} and {_origin(entry)}")
        self._entries[name] = entry

    def _is_there(self, name: object) -> bool:
        if name not in self._entries:
            return False
        return not self.disabled or _plugin_of(self._entries[str(name)]) not in self.disabled

    def __iter__(self) -> Iterator[str]:
        """The names: those of the core, then the others by name, whatever the order of imports."""
        load_plugins()
        others = sorted(self._entries.keys() - set(self._core))
        return iter([*self._core, *(name for name in others if self._is_there(name))])

    def __contains__(self, name: object) -> bool:
        load_plugins()
        return self._is_there(name)

    def __getitem__(self, name: str) -> Any:
        """The entry ``name``, which is imported if it is a string. Raises ConfigError if there is none."""
        self.check(name, self.option)
        entry = self._entries[name]
        if isinstance(entry, str):
            module = entry.partition(":")[0]
            try:
                entry = import_entry(entry)
            except ModuleNotFoundError as error:
                plugin = missing_plugin(error, module)
                if plugin is None:
                    raise
                raise ConfigError(
                    f"{self.option} = {name!r} needs the plugin {plugin}, which is not installed"
                ) from error
        return entry

    def missing_plugin(self, name: str) -> str:
        """Which plugin would add the entry ``name``, which is not there, and why it does not; "" if none is known."""
        if name in self._entries:
            return f"the plugin {_plugin_of(self._entries[name])}, which job.disable_plugins turns off"
        return f"the plugin {self.of_plugins[name]}, which is not installed" if name in self.of_plugins else ""

    def check(self, name: str, option: str) -> None:
        """Raise ConfigError unless there is an entry ``name``, the value of ``option``."""
        load_plugins()
        if not self._is_there(name):
            if plugin := self.missing_plugin(name):
                raise ConfigError(f"{option} = {name!r} needs {plugin}")
            choices = ", ".join(map(repr, self))
            near = difflib.get_close_matches(name, list(self), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{option} = {name!r} must be one of {choices}, or one that a plugin or a module in job.import "
                f"registers{hint}"
            )


_LLAMA = "torchtrain.models.llama.families"
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
    {"adamw": "torchtrain.optimizers.adamw:ShardedAdamW"},
    {"muon": "torchtrain.plugins.muon"},
)
"""Subclasses of ``optimizers.base.ShardedOptimizer``."""


LR_SCHEDULES = Registry(
    "lr_scheduler.decay_type",
    {name: f"torchtrain.optimizers.lr_schedule:{name.title()}" for name in ("constant", "linear", "cosine", "sqrt")},
)
"""Subclasses of ``optimizers.lr_schedule.Decay``."""


def import_entry(entry: str) -> Any:
    """What "module:attribute" names."""
    module, attribute = entry.split(":")
    return getattr(import_module(module), attribute)


def missing_plugin(error: ModuleNotFoundError, module: str) -> str | None:
    """The plugin of this repository that ``module`` is in, if it was not found; None if another module was not."""
    parts = module.split(".")
    plugin = ".".join(parts[:3])
    is_missing = error.name is not None and f"{module}.".startswith(f"{error.name}.")
    return plugin if is_missing and parts[:2] == ["torchtrain", "plugins"] else None


def _origin(entry: Any) -> str:
    """Module and name of an entry."""
    return entry if isinstance(entry, str) else f"{entry.__module__}:{getattr(entry, '__qualname__', entry)}"


def _plugin_of(entry: Any) -> str:
    """The plugin whose code ``entry`` is, by the name of its folder or entry point; "" for the core's and a user's."""
    parts = re.split(r"[.:]", _origin(entry))
    return parts[2] if parts[:2] == ["torchtrain", "plugins"] else _names_of_packages().get(parts[0], "")


@cache
def _names_of_packages() -> dict[str, str]:
    """The entry points of plugins, by the package that each names."""
    return {re.split(r"[.:]", point.value)[0]: point.name for point in entry_points(group="torchtrain.plugins")}


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


_REMOTE = "torchtrain.plugins.remote_data"
DATA_SOURCES = Registry(
    "data.type",
    {
        "files": "torchtrain.datasets.builtin_sources:Files",
        "standard_library": "torchtrain.datasets.builtin_sources:StandardLibrary",
        "standard_library_docs": "torchtrain.datasets.builtin_sources:StandardLibrary",
        "standard_library_prose": "torchtrain.datasets.builtin_sources:StandardLibrary",
    },
    {"remote_files": _REMOTE, "hub": _REMOTE},
)
"""Subclasses of ``datasets.data_source.SourceType``, such as ``DataSource`` and ``TextInput``."""


_FORMATS = "torchtrain.datasets.builtin_formats"
FILE_FORMATS = Registry(
    "the suffix of a file of text",
    {
        "jsonl": f"{_FORMATS}:JSON_LINES",
        "json": f"{_FORMATS}:JSON_FILE",
        "csv": f"{_FORMATS}:CSV",
        "tsv": f"{_FORMATS}:TSV",
        "txt": f"{_FORMATS}:TEXT",
        "md": f"{_FORMATS}:TEXT",
        "parquet": f"{_FORMATS}:PARQUET",
        "arrow": f"{_FORMATS}:ARROW",
    },
)
"""Instances of ``datasets.file_formats.FileFormat``, by the suffix of their files."""


COMPRESSIONS = Registry(
    "the suffix of a compressed file", {suffix: f"{_FORMATS}:{suffix}" for suffix in ("gz", "zst", "xz")}
)
"""Functions that get an open binary file, and yield blocks of its decompressed bytes."""


def suffixes_of(name: str) -> tuple[str, str]:
    """The suffix of a file's format and that of its compression, in lower case; "" where there is none."""
    words = name.lower().split(".")
    compression = words.pop() if len(words) > 1 and words[-1] in COMPRESSIONS else ""
    return (words[-1] if len(words) > 1 and words[-1] in FILE_FORMATS else ""), compression


TOKEN_FOLDERS = Registry("a folder of tokens by URL", of_plugins={"url": _REMOTE})
"""Called with a location, its option and a ``SourceContext`` or None; return a ``datasets.token_folder.DataFolder``."""


METRICS_WRITERS = Registry(
    "metrics.writers",
    {"tensorboard": "torchtrain.metrics.writers:TensorBoard"},
    {name: f"torchtrain.plugins.{name}" for name in ("mlflow", "trackio", "wandb")},
)
"""Subclasses of ``metrics.writers.MetricsWriter``."""


OBJECT_STORE_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
CHECKPOINT_STORAGES = Registry(
    "the scheme of checkpoint.folder",
    {"file": "torchtrain.checkpoint.local_storage:LocalStorage"},
    dict.fromkeys(OBJECT_STORE_SCHEMES, "torchtrain.plugins.object_storage"),
)
"""Subclasses of ``checkpoint.storage.CheckpointStorage``, by the scheme of their URLs."""


URL_READERS = Registry(
    "the scheme of a URL",
    of_plugins=dict.fromkeys((*OBJECT_STORE_SCHEMES, "http", "https"), "torchtrain.plugins.object_storage"),
)
"""Instances of ``config.urls.URLReader``, by the scheme of the URLs that options name files by."""


GRADIENT_REDUCERS = Registry(
    "training.sums",
    {"fast": "torchtrain.distributed.gradient_reducer:GradientReducer"},
    {"exact": "torchtrain.plugins.exact_sums"},
)
"""``distributed.gradient_reducer.GradientReducer`` and subclasses of it."""


_HUGGING_FACE = "torchtrain.plugins.huggingface"
WEIGHT_FORMATS = Registry("the name of a format of weights", of_plugins={"huggingface": _HUGGING_FACE})
"""Instances of ``checkpoint.other_formats.WeightFormat``."""


LINEAR_CONVERSIONS = Registry("the name of a conversion of linear layers")
"""Functions that get the config, and return a ``parallelisms.linear_conversion.LinearConversion``, or None if it does
not ask for one."""


MODEL_SPLITS = Registry("the name of a split of models")
"""Functions that get the config, and return a ``parallelisms.model_split.ModelSplit``, or None if it does not ask for
one."""


CONFIG_SECTIONS = Registry(
    "the name of a section",
    {"prepare": "torchtrain.config.prepare_options:PrepareConfig"},
    of_plugins={
        "estimate": "torchtrain.plugins.planner",
        "grains": "torchtrain.plugins.exact_sums",
        **{
            name: f"torchtrain.plugins.{name}"
            for name in (
                *("comparison", "diagnostics", "evaluation", "exact_sums", "float8", "huggingface", "recheck"),
                *("remote_data", "replicas", "report"),
            )
        },
    },
)
"""Subclasses of ``config.section.Section``, by the name that they also pass to it."""


OPTION_HINTS = Registry("the name of a source of hints")
"""Instances of ``OptionHints``, which know options of other programs."""


class OptionHints(Protocol):
    """What to say about options that do not exist here."""

    def about_option(self, name: str) -> str:
        """What an error about the unknown option ``name`` says after it; empty if it is unknown here, too."""

    def about_file(self, names: Collection[str]) -> str:
        """What the error about a config file with these options says at its end; empty if there is nothing to say."""


RUN_PLANS = Registry("the name of a plan of runs", of_plugins={"stages": "torchtrain.plugins.stages"})
"""Subclasses of ``config.run_plan.RunPlan``, which divide a run into stages."""


HOOKS = Registry("the name of a hook")
"""Functions that get the ``Trainer`` when all else is built, and return a ``metrics.hooks.Hook``, or None if the config
does not ask for it."""


@cache
def load_plugins() -> None:
    """Import the plugins, which register their entries: the folders of ``torchtrain/plugins``, and installed packages.

    A package declares a plugin by an entry point of the group ``torchtrain.plugins``, whose value is a module.

    Raises:
        ConfigError: an installed plugin cannot be imported.
    """
    for module in pkgutil.iter_modules([str(PLUGINS)]):
        import_module(f"torchtrain.plugins.{module.name}")
    for point in sorted(entry_points(group="torchtrain.plugins"), key=lambda point: point.name):
        try:
            point.load()
        except Exception as error:  # of any kind: it is code of somebody else
            package = point.dist.name if point.dist else "?"
            raise ConfigError(
                f"the plugin {point.name!r} of the package {package!r} cannot be imported: "
                f"{type(error).__name__}: {error}; install what it needs, or uninstall it (pip uninstall {package})"
            ) from error


def disable_plugins(names: Collection[str]) -> None:
    """Hide the entries of these plugins, and show those of all others, until the next call.

    Raises:
        ConfigError: there is no such plugin.
    """
    load_plugins()
    own = [module.name for module in pkgutil.iter_modules([str(PLUGINS)])]
    known = [*own, *sorted(point.name for point in entry_points(group="torchtrain.plugins"))] if names else []
    for name in names:
        if name not in known:
            raise ConfigError(f"job.disable_plugins: {name!r} is not a plugin; there are {', '.join(known)}")
    Registry.disabled = frozenset(names)
