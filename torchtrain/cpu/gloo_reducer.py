"""The gradient reducer for CPUs: reduce-scatter over gloo."""

from torchtrain.config.registry import GRADIENT_REDUCERS
from torchtrain.config.schema import JobConfig
from torchtrain.distributed.gradient_reducer import GradientReducer
from torchtrain.distributed.mesh import Mesh
from torchtrain.parallelisms.reduce_scatter import AllToAllReduceScatter
from torchtrain.torch_internals import ReduceScatter


class CPUGradientReducer(GradientReducer):
    """The default gradient reducer, with a faster reduce-scatter than that of gloo."""

    def reduce_scatter(self) -> ReduceScatter | None:
        return AllToAllReduceScatter() if self.mesh.size() > 1 else super().reduce_scatter()


def build_cpu_gradient_reducer(config: JobConfig, mesh: Mesh) -> GradientReducer:
    """``build_gradient_reducer`` for CPUs."""
    kind: type[GradientReducer] = GRADIENT_REDUCERS[config.training.sums]
    reducer = (CPUGradientReducer if kind is GradientReducer else kind.on_cpu()).build(config, mesh)
    # A single rank has no communication that could overlap with computation, and each FSDP group adds host overhead.
    reducer.by_block = reducer.mesh.size() > 1 or config.parallelism.fsdp_reshard_after_forward != "default"
    return reducer
