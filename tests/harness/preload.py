"""Preloaded by the fork server: imports modules, parses options and finds the default data once for all processes."""

import gc
import inspect
from contextlib import suppress
from functools import cache
from importlib import import_module

gc.disable()  # it would take a quarter of the time, and objects of modules are not garbage
for name in (
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.debug",  # a run would import it when it destroys its process groups
    "torch.utils.serialization.config",  # and this one when it saves
    "torch.utils.tensorboard",
    "torchtrain.fault_tolerance.watchdog",
    "torchtrain.launch",
    "torchtrain.metrics",
    "torchtrain.metrics.profiler",
    "torchtrain.metrics.validation",
    "torchtrain.models.llama.families",
    "parity",
    "psutil",
    "pytest",  # a test's module imports it when a rank calls one of its functions
):
    import_module(name)
with suppress(ModuleNotFoundError):  # in a tree without plugins
    import_module("plugin_preload")
inspect.getsource = cache(inspect.getsource)  # each page of --help reads the option texts by it
import_module("torchtrain.config.parse").parse([])
import_module("torchtrain.datasets.standard_library").standard_library()  # the data of most runs
gc.collect()
gc.enable()
gc.freeze()  # so that collections in forked processes do not copy this memory
