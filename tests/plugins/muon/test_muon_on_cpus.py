"""On CPUs without bfloat16 matrix products, Muon computes them in float32."""

from test_cpu_matmul import TINY

from torchtrain.cpu.build import use_cpu_kernels
from torchtrain.models.llama.model import Transformer
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.options import OptimizerConfig


def test_muon_in_bfloat16_replaces_kernels(replacements: list[None]) -> None:
    for dtype in ("auto", "bfloat16"):
        assert not replacements
        config = OptimizerConfig(name="muon", options={"muon": {"dtype": dtype}})
        use_cpu_kernels(build_optimizer([Transformer(TINY)], config))
    assert replacements
