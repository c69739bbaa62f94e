"""Memory of a model that Muon updates, checked before it is allocated."""

from dataclasses import replace

from test_layout_checks import check_memory_by_parameter

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.models.model_config import flavor_config
from torchtrain.optimizers.options import OptimizerConfig
from torchtrain.parallelisms.check import check_memory


def test_memory_that_a_model_needs_is_counted_by_parameter() -> None:
    optimizer = OptimizerConfig(name="muon")
    check_memory_by_parameter({"optimizer": optimizer}, 10)
    model = replace(flavor_config("llama3", "8B"), vocab_size=128256)
    check_memory(JobConfig(optimizer=optimizer), ParallelDims(), model, 80 * 2**30, 1)
