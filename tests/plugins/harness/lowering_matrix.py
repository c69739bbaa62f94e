"""The training steps that are compiled for GPUs without a GPU: the shipped configs, and options with one of them.

Used by ``tests/plugins/test_lowering.py`` and by ``scripts/benchmarks/lower.py --matrix``.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_cuda
import lowered_step
import simulated_step
from lowered_step import Lowered, problems

FOLDER = Path(__file__).parents[3] / "train_configs"
CONFIGS = sorted(FOLDER.glob("llama*[!s].toml"))  # without configs of stages
P = "parallelism."
DOCUMENTS = {"data.document_mask": True}
PIPELINE = {
    f"{P}pipeline_parallel_degree": 2,
    f"{P}pipeline_parallel_schedule": "1F1B",
    "training.local_batch_size": 12,  # microbatches
    "training.global_batch_size": 48,  # of two ranks, in two accumulation steps
}
TENSOR, ASYNC = (
    {f"{P}tensor_parallel_degree": 2},
    {f"{P}tensor_parallel_degree": 4, f"{P}enable_async_tensor_parallel": True},
)
TENSORWISE = {"float8.recipe": "tensorwise", "float8.enable_fsdp_float8_all_gather": True}
# Number of GPUs, and options on top of those of a config.
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (8, {}),
    "documents": (8, DOCUMENTS),
    "context": (32, {f"{P}context_parallel_degree": 4}),
    "context-documents": (32, {f"{P}context_parallel_degree": 4, **DOCUMENTS}),
    "async-tensor": (32, ASYNC),
    "float8-rowwise": (8, {"float8.recipe": "rowwise"}),
    "float8-tensorwise": (8, TENSORWISE),
    "float8-tensorwise-tensor": (8, {**TENSORWISE, **TENSOR}),
    "muon": (8, {"optimizer.name": "muon"}),
    "exact-sums": (8, {"training.sums": "exact"}),
    "z-loss": (8, {"training.z_loss_weight": 1e-4}),
    "deterministic": (8, {}),
    "pipeline": (4, PIPELINE),
    "pipeline-documents": (4, {**PIPELINE, **DOCUMENTS}),
}
# Further options, for a single mode.
FLOAT8_OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "float8-rowwise-tensor": (8, {"float8.recipe": "rowwise", **TENSOR}),
    "float8-async-tensor": (32, {**TENSORWISE, **ASYNC}),
}
MODES = ("none", "selective", "full", "memory_budget")
# Problems that an option always has. It is a problem, too, if one of them is missing.
ACCEPTED = {
    # ExactSums.finish reads the largest summand once per step.
    "exact-sums": "waits for the device: item in update",
    # torchao computes the scales in float64, from the largest element and to its reciprocal.
    "float8-rowwise": r"\w+_clamp_\w*reciprocal\w* computes in float64",
    "float8-tensorwise": r"\w+_clamp_\w*reciprocal\w* computes in float64",
    # The largest elements are reduced over the tensor-parallel ranks in float64.
    **dict.fromkeys(
        ("float8-tensorwise-tensor", *FLOAT8_OPTIONS),
        r"\w+_(abs_\w*max|clamp_\w*reciprocal)\w* computes in float64",
    ),
}


@dataclass(frozen=True)
class Case:
    """The step of a config with two layers, one of ``OPTIONS`` and a mode of activation checkpointing."""

    option: str
    mode: str = "none"
    gpu: str = "h100-80"
    config: str = "llama3_8b"

    def __str__(self) -> str:
        others = [value for value in (self.gpu, self.config) if value not in ("h100-80", "llama3_8b")]
        return "-".join((self.mode, self.option, *others))


MATRIX = [
    *(Case(option, mode) for mode in MODES for option in OPTIONS if (mode, option) != ("none", "plain")),
    *(
        Case(option, "selective", gpu)
        for gpu in ("a100-80", "b200")
        for option in ("documents", "async-tensor", "z-loss", "deterministic")
    ),
    Case("float8-rowwise", "selective", "b200"),
    Case("float8-rowwise-tensor", "selective"),
    Case("float8-async-tensor"),
    # Another head size: 64.
    *(Case("documents", "selective", gpu, "llama3_1b") for gpu in ("h100-80", "a100-80", "b200")),
]


def lower_config(worker: fake_cuda.Worker, path: Path, gpu: str) -> tuple[Lowered, list[str]]:
    """Compile the step of a shipped config; return it with its problems."""
    options, world_size, shape = simulated_step.shipped_config(path)
    lowered: Lowered = worker.run(lowered_step.lower, options, world_size, shape=shape, gpu=gpu)
    return lowered, problems(lowered, "flash", gpu)


def lower_case(worker: fake_cuda.Worker, case: Case, **arguments: Any) -> Lowered:
    world_size, options = (OPTIONS | FLOAT8_OPTIONS)[case.option]
    layers = 4 if f"{P}pipeline_parallel_degree" in options else 2
    lowered: Lowered = worker.run(
        lowered_step.lower,
        {
            "job.config_file": str(FOLDER / f"{case.config}.toml"),
            "training.local_batch_size": 1,
            "training.global_batch_size": 2 * world_size,
            "activation_checkpoint.mode": case.mode,
            **options,
        },
        world_size,
        shape={"n_layers": layers},
        gpu=case.gpu,
        deterministic=case.option == "deterministic",
        **arguments,
    )
    return lowered


def problems_of(case: Case, lowered: Lowered) -> list[str]:
    """Return the problems of a case, without those in ``ACCEPTED``."""
    found = problems(lowered, "flex" if "documents" in case.option else "flash", case.gpu)
    accepted = ACCEPTED.get(case.option)
    if accepted is None:
        return found
    others = [problem for problem in found if not re.fullmatch(accepted, problem)]
    return others if len(others) < len(found) else [*found, f"no problem {accepted}: remove it from ACCEPTED"]
