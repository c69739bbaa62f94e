"""The numbers that the kernels for a GPU compute: run on the CPU by Triton's interpreter, and compared with eager."""

from collections.abc import Iterator
from dataclasses import replace

import fake_cuda
import fake_gpu_compiler
import pytest
import torch
from lowered_functions import FUNCTIONS, Processes, compare
from triton_interpreter import Program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(fake_cuda.COMPILER is None, reason="a fake GPU needs g++"),
    pytest.mark.skipif(
        bool(fake_gpu_compiler.triton_version_problem()), reason=fake_gpu_compiler.triton_version_problem()
    ),
]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    started = Processes(tmp_path_factory.mktemp("gpu"))
    yield started
    started.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_generated_kernels_compute_what_eager_does(processes: Processes, name: str, dtype: torch.dtype) -> None:
    assert compare(processes, name, dtype).problems == []


# Faults in the generated code of a function: text of a kernel, and its replacement.
FAULTS = {
    "RMSNorm": ("1e-05, tl.float32", "1e-02, tl.float32"),
    "RoPE": ("tmp9 - tmp12", "tmp9 + tmp12"),
    "loss": ("tl_math.log(", "tl_math.log2("),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_a_kernel_is_detected(processes: Processes, name: str) -> None:
    text, replacement = FAULTS[name]

    def edit(program: Program) -> Program:
        calls = [replace(call, source=call.source.replace(text, replacement)) for call in program.calls]
        assert calls != program.calls
        return replace(program, calls=calls)

    assert compare(processes, name, torch.float32, edit).problems


def test_kernel_that_is_not_launched_is_detected(processes: Processes) -> None:
    def edit(program: Program) -> Program:
        first = program.calls[0]
        launches = [line for line in first.source.splitlines() if ".run(" in line]
        source = first.source.replace(launches[0], launches[0].split("triton_")[0] + "pass")
        return replace(program, calls=[replace(first, source=source), *program.calls[1:]])

    with pytest.raises(AssertionError, match="not launched"):
        compare(processes, "RoPE", torch.float32, edit)
