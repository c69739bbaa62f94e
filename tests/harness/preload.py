"""What the fork server does before it forks, so that no process forked from it has to: import, and parse options."""

import gc
import inspect
from contextlib import suppress
from functools import cache
from importlib import import_module

gc.disable()  # else a quarter of the time goes to it: what modules make stays
for name in (
    "torch._inductor.compile_fx",
    "torch.utils.tensorboard",
    "torchtrain.fault_tolerance.watchdog",
    "torchtrain.comparison.implementations",
    "torchtrain.inference.generation",
    "torchtrain.launch",
    "torchtrain.metrics",
    "torchtrain.metrics.profiler",
    "torchtrain.metrics.validation",
    "parity",
    "psutil",
    "pytest",  # with the module of a test, when one of its functions is called
):
    import_module(name)
with suppress(ImportError):  # no dependency of ours
    import_module("scipy.io")  # datasets does, when it opens files
inspect.getsource = cache(inspect.getsource)  # tyro reads the text of options from it at each parse
import_module("torchtrain.config.parse").parse([])
gc.collect()
gc.enable()
gc.freeze()  # this memory stays shared: forked processes do not look through it
