"""Preloaded by the fork server: imports modules and parses options once, so that forked processes need not."""

import gc
import inspect
from contextlib import suppress
from functools import cache
from importlib import import_module

gc.disable()  # it would take a quarter of the time, and objects of modules are not garbage
for name in (
    "torch._inductor.compile_fx",
    "torch.utils.tensorboard",
    "torchtrain.fault_tolerance.watchdog",
    "torchtrain.plugins.comparison.implementations",
    "torchtrain.plugins.remote_data.hub",  # and the libraries that are imported only when data need them
    "torchtrain.plugins.evaluation.generation",
    "torchtrain.launch",
    "torchtrain.metrics",
    "torchtrain.metrics.profiler",
    "torchtrain.metrics.validation",
    "parity",
    "psutil",
    "pytest",  # a test's module imports it when a rank calls one of its functions
):
    import_module(name)
for name in (
    "scipy.io",  # datasets imports it when it opens files
    "s3fs",
    "torchtrain.plugins.report.curves",
):
    with suppress(ImportError):  # they are optional
        import_module(name)
inspect.getsource = cache(inspect.getsource)  # each page of --help reads the option texts by it
import_module("torchtrain.config.parse").parse([])
gc.collect()
gc.enable()
gc.freeze()  # so that collections in forked processes do not copy this memory
