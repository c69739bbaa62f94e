"""What the fork server preloads for the tests of plugins, beside ``preload.py``."""

from contextlib import suppress
from importlib import import_module

for name in (
    "torchtrain.plugins.comparison.implementations",
    "torchtrain.plugins.diagnostics.stragglers",
    "torchtrain.plugins.evaluation.generation",
    "torchtrain.plugins.verify_layouts.rank",
    "torchtrain.plugins.remote_data.hub",  # and the libraries that are imported only when data need them
):
    import_module(name)
for name in (
    "scipy.io",  # datasets imports it when it opens files
    "s3fs",
    "lm_eval.evaluator",  # with transformers, of which it takes seconds to import a model
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "torchtrain.plugins.report.curves",
):
    with suppress(ImportError):  # they are optional
        import_module(name)
