"""The planner's counts compared with real runs, published numbers and closed forms; the estimate command."""

import gc
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fit_attention
import pytest
import tomli
import torch
import torch.distributed as dist
import validate_estimate
from gloo_pool import GlooPool
from parity import TINY, build, config_of
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.profiler import ProfilerActivity, profile

from torchtrain import estimate as command
from torchtrain import train as trainer
from torchtrain.config.parse import from_file, from_toml, parse
from torchtrain.config.schema import JobConfig, TrainingConfig, section_of
from torchtrain.datasets.options import DataConfig
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.distributed.mesh import ParallelDims, resolve_parallel_dims
from torchtrain.errors import ConfigError
from torchtrain.models.model_config import build_model_config, flavor_config
from torchtrain.models.spec import flops_per_token
from torchtrain.parallelisms.context_parallel import ContextParallelAttention
from torchtrain.parallelisms.pipeline_schedule import STAGES_PER_RANK
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.plugins.diagnostics.options import DiagnosticsConfig
from torchtrain.plugins.planner import estimate_pool, search, simulation, summary
from torchtrain.plugins.planner.allocator import Allocation, peak_reserved
from torchtrain.plugins.planner.attention import SPEEDS, Kernel, attention_fraction, kernel_of
from torchtrain.plugins.planner.hardware import GIB, GPUS, Efficiency
from torchtrain.plugins.planner.operations import WAIT_FOR_MESSAGE, Operation, collective, moved_bytes, work_of
from torchtrain.plugins.planner.options import EstimateConfig
from torchtrain.plugins.planner.recorder import CATEGORIES, Action, StepRecorder
from torchtrain.plugins.planner.representative_ranks import (
    derive_step,
    gradient_states,
    representative_microbatches,
    representative_pipeline_ranks,
    represented_microbatch,
)
from torchtrain.plugins.planner.request import resolve_gpu, resolve_model_config
from torchtrain.plugins.planner.simulation import RankRecord, representative_ranks, simulate, simulate_steps
from torchtrain.plugins.planner.summary import Estimate, RankMemory, StepCosts, estimate
from torchtrain.plugins.planner.timing import CostModel, replay
from torchtrain.plugins.planner.torch_internals import SINCE_2_15
from torchtrain.trainer import Trainer

ROOT = Path(__file__).parents[3]
MIB = 2**20
SHAPE = replace(TINY, n_layers=2, n_heads=8, n_kv_heads=4, vocab_size=512)
DEEPER = replace(SHAPE, n_layers=4)
DOCUMENT_MASK = {"data": {"document_mask": True}}


def simulate_steps_of_rank(steps: int, *args: Any, **options: Any) -> RankRecord:
    with patch.object(simulation, "STEPS", steps):
        return simulate(*args, **options)


cached_simulate = cache(simulate_steps_of_rank)  # many tests simulate the plain layout


def simulated(
    ranks: int,
    rank: int = 0,
    gpu: bool = True,
    simulate: Any = cached_simulate,
    shape: Any = SHAPE,
    steps: int = 1,
    **sections: Any,
) -> RankRecord:
    """The record of ``rank``, or of the rank that represents it, in the first ``steps`` of a run."""
    config, degrees = resolve_layout(config_of(**sections), shape, ranks)
    first = max(r for r in representative_ranks(degrees) if r <= rank)
    record: RankRecord = simulate(steps, config, shape, degrees, first, gpu=gpu)
    return record


def estimate_of(config: JobConfig) -> Estimate:
    return estimate(config, resolve_model_config(config), resolve_gpu(config))


def with_estimate(config: JobConfig, **options: Any) -> JobConfig:
    """``config`` with these ``options`` of its section [estimate]."""
    own = replace(section_of(config, EstimateConfig), **options)
    return replace(config, plugins={**config.plugins, "estimate": own})


def flops(record: RankRecord, *phases: str) -> int:
    return sum(o.flops for o in record.recorder.steps[-1].operations if not phases or o.phase in phases)


def traffic(record: RankRecord, axis: str) -> dict[str, tuple[int, int]]:
    """Number and bytes of the collectives on ``axis`` outside of the update, by operation."""
    found: dict[str, tuple[int, int]] = {}
    for operation in record.recorder.steps[-1].operations:
        if operation.axis == axis and operation.phase != "update":
            count, size = found.get(operation.name, (0, 0))
            found[operation.name] = count + 1, size + operation.bytes
    return found


# The caching allocator


def test_free_block_is_reused_and_split() -> None:
    first = [Allocation(1, 40 * MIB, 0), Allocation(1, 0, 0)]
    assert peak_reserved([*first, Allocation(2, 30 * MIB, 0), Allocation(3, 10 * MIB, 0)]) == 40 * MIB
    # Memory is mapped in multiples of 20 MiB; a free block between two used ones is too small for a larger request.
    holes = [Allocation(n, 20 * MIB, 0) for n in range(3)] + [Allocation(1, 0, 0), Allocation(4, 30 * MIB, 0)]
    assert peak_reserved(holes) == 100 * MIB


def test_lowest_free_block_is_used_first_and_the_end_last() -> None:
    blocks = [Allocation(n, 20 * MIB, 0) for n in range(5)]
    freed = {n: Allocation(n, 0, 0) for n in range(5)}
    # Of the free blocks 0 and 2, the first is used. Freeing block 3 then leaves 40 MiB in one piece with block 2.
    equal = [*blocks, freed[2], freed[0], Allocation(5, 20 * MIB, 0), freed[3], Allocation(6, 40 * MIB, 0)]
    assert peak_reserved(equal) == 100 * MIB
    # There are free blocks of 40 MiB in the middle and of 20 MiB at the end. Only the end grows for the next request.
    end = [*blocks, freed[1], freed[2], freed[4], Allocation(5, 20 * MIB, 0), Allocation(6, 40 * MIB, 0)]
    assert peak_reserved(end) == 120 * MIB


def test_streams_and_small_blocks_have_separate_pools() -> None:
    assert peak_reserved([Allocation(1, 40 * MIB, 0), Allocation(1, 0, 0), Allocation(2, 40 * MIB, 1)]) == 80 * MIB
    assert peak_reserved([Allocation(n, 512, 0) for n in range(4096)]) == 2 * MIB


def test_segments_of_fixed_size_are_not_merged() -> None:
    halves = [Allocation(1, 21 * MIB, 0), Allocation(2, 21 * MIB, 0), Allocation(1, 0, 0), Allocation(2, 0, 0)]
    allocations = [*halves, Allocation(3, 42 * MIB, 0)]
    assert peak_reserved(allocations, expandable_segments=False) == (22 + 22 + 42) * MIB
    assert peak_reserved(allocations) < 64 * MIB


# Compared with real runs on CPUs


def train_with_ledger(config: JobConfig, shape: Any) -> tuple[list[int], list[int]]:
    """FLOPs and peaks of live bytes of two steps on real tensors."""
    recorder = StepRecorder("cpu")
    config, _ = resolve_layout(config, shape, dist.get_world_size())
    gc.collect()  # garbage of earlier tests would be freed within the steps
    simulate_steps(config, build(config, shape), recorder, new_tokens=torch.zeros)
    counts = [sum(o.flops for o in step.operations) for step in recorder.steps]
    return counts, [sum(step.peak) for step in recorder.steps]


@pytest.mark.parametrize(
    ("ranks", "parallelism", "optimizer", "ema"),
    [
        pytest.param(1, {}, "adamw", False, marks=pytest.mark.slow),
        pytest.param(2, {}, "adamw", False, marks=pytest.mark.slow),
        pytest.param(2, {"tensor_parallel_degree": 2}, "adamw", False, marks=pytest.mark.slow),  # as the last one
        pytest.param(2, {"pipeline_parallel_degree": 2}, "adamw", False, marks=pytest.mark.slow),
        pytest.param(2, {}, "muon", False, marks=pytest.mark.slow),
        (2, {"tensor_parallel_degree": 2}, "adamw", True),
    ],
    ids=["one", "shard", "tensor", "pipeline", "muon", "averages and z-loss"],
)
def test_simulation_for_cpus_counts_what_a_real_run_does(
    gloo: GlooPool, ranks: int, parallelism: dict[str, Any], optimizer: str, ema: bool
) -> None:
    sections: dict[str, Any] = {
        "parallelism": parallelism,
        "training": {"steps": 2, "local_batch_size": 2},
        "optimizer": {"name": optimizer},
        "ema": {"enable": ema},
    }
    sections["training"]["z_loss_weight"] = 1e-4 if ema else 0.0
    found = gloo.run(ranks, train_with_ledger, config_of(**sections), SHAPE)
    for rank, (counts, peaks) in enumerate(found):
        steps = simulated(ranks, rank=rank, gpu=False, steps=2, **sections).recorder.steps
        assert [sum(o.flops for o in step.operations) for step in steps] == counts
        assert [sum(step.peak) for step in steps] == pytest.approx(peaks, rel=0.03)


def test_tokenizer_by_url_is_not_fetched_where_the_size_of_its_vocabulary_is_given() -> None:
    config = from_file(str(Path(__file__).parents[3] / "train_configs/open_1b.toml"))
    assert config.model.tokenizer_path.startswith("https://")
    with patch("torchtrain.plugins.planner.request.tokenizer_file", side_effect=AssertionError):
        assert resolve_model_config(config).vocab_size == 49152


def test_averaged_weights_are_counted() -> None:
    plain, averaged = simulated(2, steps=2), simulated(2, steps=2, ema={"enable": True})
    averaged_bytes = [step.live_at_end["optimizer"] for step in averaged.recorder.steps]
    plain_bytes = [step.live_at_end["optimizer"] for step in plain.recorder.steps]
    assert [a - b for a, b in zip(averaged_bytes, plain_bytes, strict=True)] == [plain.parameter_bytes] * 2
    (offloaded,) = simulated(2, ema={"enable": True, "offload": True}).recorder.steps
    assert offloaded.live_at_end == plain.recorder.steps[0].live_at_end


def test_flops_are_those_of_the_profiler() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 32, requires_grad=True), torch.randn(32, 48, requires_grad=True)
    recorder = StepRecorder("cpu")
    with recorder:
        (a @ b).sum().backward()
    recorder.end_step()
    with profile(activities=[ProfilerActivity.CPU], with_flops=True, acc_events=True) as profiler:
        (a @ b).sum().backward()
    by_profiler = sum(event.flops for event in profiler.key_averages() if event.key == "aten::mm")
    assert sum(o.flops for o in recorder.steps[0].operations) == by_profiler == 3 * 2 * 64 * 32 * 48


# Compared with closed forms


def test_flops_of_a_step_are_those_of_the_formula() -> None:
    record, config = simulated(1), config_of()
    tokens = config.training.local_batch_size * config.training.seq_len
    attention = 2 * SHAPE.n_layers * SHAPE.n_heads * SHAPE.head_size * config.training.seq_len * tokens
    # The formula counts attention's backward as twice its forward; the kernel also computes the scores again.
    assert flops(record) == flops_per_token(SHAPE, config.training.seq_len) * tokens + attention


@pytest.mark.parametrize(
    ("degree", "dtype"),
    [
        (2, "float32"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "bfloat16"), (4, "float32"), (4, "bfloat16"))),
    ],
)
def test_context_parallel_ranks_compute_equal_parts_of_causal_attention(degree: int, dtype: str) -> None:
    """The kernels compute half of all pairs, in forward and backward, on every rank."""

    def computed(record: RankRecord, *phases: str) -> float:
        operations = record.recorder.steps[-1].operations
        return sum(o.flops * o.share for o in operations if "attention" in o.name and o.phase in phases)

    training = {"mixed_precision_param": dtype, "seq_len": 64}
    config = config_of(training=training, parallelism={"context_parallel_degree": degree})
    shape = replace(SHAPE, max_seq_len=64)
    config, degrees = resolve_layout(config, shape, degree)
    scores = config.training.local_batch_size * SHAPE.n_heads * 64 * 64 * SHAPE.head_size * SHAPE.n_layers
    for rank in range(degree):
        record = simulate(config, shape, degrees, rank)
        assert computed(record, "forward") == 4 * scores / 2 / degree
        assert computed(record, "backward") == 10 * scores / 2 / degree


def test_attention_without_a_mask_computes_all_pairs() -> None:
    q, k = torch.empty(2, 4, 8, 16, device="meta"), torch.empty(2, 4, 32, 16, device="meta")
    aten, name = torch.ops.aten, "_scaled_dot_product_flash_attention"
    pairs = 2 * 4 * 8 * 32 * 16
    for is_causal, share in ((True, 1 - 8 / 64), (False, 1.0)):
        expected = {"flops": 4 * pairs, "share": share, "keys": share * 32, "head_dim": 16}
        forward = aten._scaled_dot_product_flash_attention.default
        assert work_of(forward, name, (q, k, k, 0.0, is_causal), {}) == expected
        assert work_of(forward, name, (q, k, k), {"is_causal": is_causal}) == expected
        backward = aten._scaled_dot_product_flash_attention_backward.default
        arguments = (q, q, k, k, q, q, None, None, 8, 32, 0.0, is_causal, q, q)
        assert work_of(backward, f"{name}_backward", arguments, {}) == {**expected, "flops": 10 * pairs}
    assert work_of(forward, name, (q, k, k), {})["share"] == 1  # is_causal is False by default


def test_full_checkpointing_recomputes_the_blocks() -> None:
    plain, full = simulated(2), simulated(2, activation_checkpoint={"mode": "full"})
    # All but the output layer and the last product of each block, whose result is not needed.
    assert flops(full, "forward") == flops(plain, "forward")
    assert 0.7 * flops(plain, "forward") < flops(full, "recompute") <= flops(plain, "forward")
    assert flops(plain, "recompute") == 0


def fsdp_calls(record: RankRecord, name: str) -> list[Operation]:
    """FSDP's collectives called ``name`` in the last step, in the order of the calls."""
    return [o for o in record.recorder.steps[-1].operations if o.fsdp and o.name == name]


def test_fsdp_traffic_of_a_step() -> None:
    record = simulated(4)
    embedding = 4 * SHAPE.vocab_size * SHAPE.dim  # bytes in float32
    output = embedding + 4 * SHAPE.dim  # with the final norm
    first, last = [(4 * record.parameter_bytes - embedding - output) // SHAPE.n_layers] * SHAPE.n_layers
    # Each group once in forward, and again in backward the blocks but the last.
    assert [o.bytes for o in fsdp_calls(record, "allgather_base")] == [embedding, first, last, output, first]
    # The gradients of the output layer are reduced before the backward of the blocks, not at the end.
    assert [o.bytes for o in fsdp_calls(record, "reduce_scatter_base")] == [output, last, first, embedding]


OUTPUT_LAYOUTS: list[tuple[int, int, dict[str, Any]]] = [
    (2, 2, {}),
    (2, 2, {"fsdp_reshard_after_forward": "never", "fsdp_gradient_accumulation": "unsharded"}),
    (2, 2, {"fsdp_reshard_after_forward": "always"}),
    (4, 2, {"tensor_parallel_degree": 2}),
    (4, 2, {"pipeline_parallel_degree": 2}),  # the microbatches of a run of the schedule share one
]


@pytest.mark.parametrize(
    ("ranks", "gathers", "parallelism", "chunk_tokens"),
    [
        *((*case, 8) for case in (OUTPUT_LAYOUTS[0], OUTPUT_LAYOUTS[-1])),
        *(pytest.param(*case, 8, marks=pytest.mark.slow) for case in OUTPUT_LAYOUTS[1:-1]),
        *(pytest.param(*case, 0, marks=pytest.mark.slow) for case in OUTPUT_LAYOUTS),
    ],
    ids=str,
)
def test_output_layer_is_gathered_once_per_microbatch(
    ranks: int, gathers: int, parallelism: dict[str, Any], chunk_tokens: int
) -> None:
    """For any number of calls by the loss, which is in chunks or not."""
    training = {"loss_chunk_tokens": chunk_tokens, "global_batch_size": 8}
    record = simulated(ranks, rank=ranks - 1, training=training, parallelism=parallelism)
    modules = Counter(o.module for o in fsdp_calls(record, "allgather_base"))
    assert modules["norm"] == gathers
    assert "output" not in modules


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_tied_output_layer_is_gathered_with_the_embedding(ranks: int) -> None:
    tied = replace(SHAPE, tied_embeddings=True)
    parallelism = {"pipeline_parallel_degree": ranks // 2}
    record = simulated(ranks, rank=ranks - 1, shape=tied, parallelism=parallelism)
    root = 4 * (tied.vocab_size * tied.dim + tied.dim)  # with the final norm
    assert [o.bytes for o in fsdp_calls(record, "allgather_base")].count(root) == 1
    assert "norm" not in {o.module for o in fsdp_calls(record, "allgather_base")}


def test_fsdp_traffic_and_memory_of_gradient_accumulation() -> None:
    by_mode = {
        mode: simulated(4, training={"global_batch_size": 16}, parallelism={"fsdp_gradient_accumulation": mode})
        for mode in ("sharded", "unsharded")
    }
    counts = {mode: traffic(record, "shard")["reduce_scatter_base"][0] for mode, record in by_mode.items()}
    assert counts["sharded"] == 2 * counts["unsharded"]  # two microbatches
    # Gradients kept between microbatches: full float32 gradients, or a quarter of them.
    kept = {
        mode: max(moment.sizes[CATEGORIES.index("gradients")] for moment in record.recorder.steps[-1].timeline)
        for mode, record in by_mode.items()
    }
    assert kept["unsharded"] > 2 * kept["sharded"]  # the gradients of one block are full at a time


def test_exact_sums_keep_eight_bytes_per_gradient_element() -> None:
    fast, exact = (simulated(4, training={"sums": sums, "global_batch_size": 16}) for sums in ("fast", "exact"))
    kept = [max(m.sizes[CATEGORIES.index("gradients")] for m in r.recorder.steps[-1].timeline) for r in (fast, exact)]
    assert kept[1] > 1.5 * kept[0]
    # Summands are sent as they are, and added by the receiver.
    assert "alltoall_base" in traffic(exact, "shard")
    assert "reduce_scatter_base" not in traffic(exact, "shard")


@pytest.mark.slow
def test_peaks_differ_by_the_published_amounts() -> None:
    """8B on 8 GPUs, torchtitan #822: Adam's states, 2 x 4 N / 8; reshard never minus default, 31 blocks in bfloat16."""

    def peaks(reshard: str) -> tuple[float, float]:
        options = ["--job.config_file", str(ROOT / "train_configs/llama3_8b.toml"), "--estimate.world_size", "8"]
        options += ["--training.local_batch_size", "1", "--training.global_batch_size", "8", "--compile.no-enable"]
        options += ["--activation_checkpoint.mode", "selective", "--parallelism.fsdp_reshard_after_forward", reshard]
        (rank,) = estimate_of(parse(options)).ranks
        return rank["first_step_peak_active_gib"], rank["peak_active_gib"]

    (first, second), (_, never) = peaks("default"), peaks("never")
    parameters = 8_030_261_248
    assert second - first == pytest.approx(2 * 4 * parameters / 8 / GIB, rel=0.01)
    assert never - second == pytest.approx(31 * 218_112_000 * 2 / GIB, rel=0.01)
    if torch.__version__.startswith("2.13."):
        page = " ".join((ROOT / "docs/development/lowering.md").read_text(encoding="utf-8").split())
        assert f"the peak of a step is {second:.2f} GiB, that of the first one {first:.2f} GiB" in page


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the version of the table of the page")
@pytest.mark.parametrize(
    ("name", "sections"),
    [
        pytest.param("AdamW", {}, marks=pytest.mark.slow),
        pytest.param("AdamW, states in bfloat16", {"optimizer": {"state_dtype": "bfloat16"}}, marks=pytest.mark.slow),
        pytest.param("AdamW, averaged weights", {"ema": {"enable": True}}, marks=pytest.mark.slow),
        ("Muon", {"optimizer": {"name": "muon"}}),
    ],
)
def test_update_has_the_operations_and_the_live_bytes_of_the_page(name: str, sections: dict[str, Any]) -> None:
    record = simulated(8, shape=replace(flavor_config("llama3", "8B"), n_layers=2), steps=2, **sections)
    step = record.recorder.steps[-1]
    peak = max(sum(moment.sizes) for moment in step.timeline if moment.phase == "update")
    more = peak - 2 * record.parameter_bytes - step.live_at_end["optimizer"]
    operations = sum(operation.phase == "update" for operation in step.operations)
    page = (ROOT / "docs/development/lowering.md").read_text(encoding="utf-8")
    assert f"| {name} | {operations} | {more / 1e6:.1f} |" in page


@pytest.mark.parametrize(
    ("ranks", "parallelism"),
    [
        (2, {}),
        pytest.param(4, {"tensor_parallel_degree": 2}, marks=pytest.mark.slow),
        pytest.param(
            4, {"pipeline_parallel_degree": 2, "pipeline_parallel_layers_per_stage": (2, 1)}, marks=pytest.mark.slow
        ),
    ],
    ids=["shard", "shard and tensor", "pipeline"],
)
def test_extension_over_identical_layers_and_microbatches_is_exact(
    ranks: int, parallelism: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SHAPE, n_layers=sum(parallelism.get("pipeline_parallel_layers_per_stage", (4,))))
    training = {"local_batch_size": 2, "global_batch_size": 16}
    config = with_estimate(config_of(parallelism=parallelism, training=training), world_size=ranks)
    few = estimate(config, shape, GPUS["h100-80"])
    monkeypatch.setattr(summary, "MAX_MICROBATCHES", 100)
    full = estimate(with_estimate(config, all_layers=True), shape, GPUS["h100-80"])
    assert few.costs.flops_by_phase == full.costs.flops_by_phase
    assert few.costs.collectives == full.costs.collectives
    # The tokens and labels of the step are on the device, except those of the microbatch that is not simulated.
    left_out = 2 * config.training.local_batch_size * config.training.seq_len * 8 / GIB
    for one, other in zip(few.ranks, full.ranks, strict=True):
        assert one["peak_at"] == other["peak_at"]
        assert one["peak_reserved_gib"] == pytest.approx(other["peak_reserved_gib"], rel=0.1)
        for key in one.keys() - {"peak_at", "peak_reserved_gib"}:
            missing = other[key] - one[key]
            assert missing == pytest.approx(0, abs=1e-12) or missing == pytest.approx(left_out), key
    assert few.step_seconds == pytest.approx(full.step_seconds, rel=0.02)


@pytest.mark.parametrize(
    ("schedule", "stages", "expected"),
    [
        ("1F1B", (2, 2, 2, 2, 2, 1), [0, 1, 1, 1, 1, 5]),
        ("1F1B", (2, 2, 3, 3, 2, 1), [0, 1, 2, 2, 1, 5]),
        ("Interleaved1F1B", (1, 2, 2, 1, 1, 2, 3, 1), [0, 1, 2, 3]),  # rank 2 has stages 2 and 6
        ("InterleavedZeroBubble", (1, 2, 2, 1, 1, 2, 2, 1), [0, 2, 2, 3]),
        ("ZBVZeroBubble", (1, 2, 2, 1, 1, 2, 2, 1), [0, 2, 2, 3]),
        ("ZBVZeroBubble", (1, 2, 2, 1, 1, 3, 2, 1), [0, 1, 2, 3]),  # rank 2 has stages 2 and 5
        ("ZBVZeroBubble", (1, 2, 3, 1, 1, 3, 2, 1), [0, 1, 2, 3]),
        ("GPipe", (2, 2, 2, 2), [0, 1, 2, 3]),
    ],
)
def test_pipeline_ranks_with_other_layers_are_not_represented(
    schedule: str, stages: tuple[int, ...], expected: list[int]
) -> None:
    ranks = len(expected)
    assert representative_pipeline_ranks(stages, ranks, schedule) == expected


SPLIT_SCHEDULES = ("ZBVZeroBubble", "Interleaved1F1B", "InterleavedZeroBubble")  # of several stages on a rank


@pytest.mark.parametrize(
    ("schedule", "runs"),
    [
        ("1F1B", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("1F1B", 2), *((of, 1) for of in SPLIT_SCHEDULES))),
    ],
)
def test_middle_pipeline_ranks_are_represented_by_one_of_them(
    schedule: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = (1,) * (4 * STAGES_PER_RANK[schedule])
    parallelism = {
        "pipeline_parallel_degree": 4,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_layers_per_stage": layers,
    }
    split_backward = "ZeroBubble" in schedule
    local = 8 if split_backward else 4
    training = {"local_batch_size": local, "global_batch_size": 2 * local * runs}  # on two ranks
    config = with_estimate(config_of(parallelism=parallelism, training=training), world_size=8)
    shape = replace(SHAPE, n_layers=len(layers))
    full = estimate(with_estimate(config, all_layers=True), shape, GPUS["h100-80"])
    records = {record.rank: record for record in full.records}
    monkeypatch.setattr(summary, "simulate", lambda *args, **_: records[args[3]])
    few = estimate(config, shape, GPUS["h100-80"])  # of so few layers, all are simulated
    representative, represented = (2, 1) if split_backward else (1, 2)  # the one that needs more memory
    assert [rank["rank"] for rank in few.ranks] == [0, 2 * representative, 6]
    simulated, other = (full.records[i].recorder.steps[-1] for i in (representative, represented))
    actions = full.records[representative].pipeline_actions[represented]
    derived = derive_step(simulated, representative, represented, actions, (0, 2, 4, 6), schedule)
    assert [o.name for o in simulated.operations] != [o.name for o in other.operations]  # in another order
    assert without_module(derived.operations) == without_module(other.operations)
    assert derived.microbatches == other.microbatches
    assert few.step_seconds == full.step_seconds
    assert few.ranks == [full.ranks[i] for i in (0, representative, 3)]
    assert few.peak_reserved_gib == full.peak_reserved_gib
    for key in ("peak_active_gib", "peak_reserved_gib"):
        assert full.ranks[represented][key] <= full.ranks[representative][key]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "stages", "accumulation"),
    [
        ("1F1B", 2, "unsharded"),
        ("Interleaved1F1B", 8, "sharded"),
        ("Interleaved1F1B", 4, "unsharded"),
        ("InterleavedZeroBubble", 8, "sharded"),
        ("ZBVZeroBubble", 4, "sharded"),
    ],
)
def test_microbatches_of_a_full_pipeline_are_represented_by_those_of_one_repetition(
    schedule: str, stages: int, accumulation: str
) -> None:
    microbatches = 10
    parallelism = {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_layers_per_stage": (1,) * stages,
        "fsdp_gradient_accumulation": accumulation,
    }
    training = {"local_batch_size": microbatches, "global_batch_size": 2 * microbatches}
    config = with_estimate(config_of(parallelism=parallelism, training=training), world_size=4)
    shape = replace(SHAPE, n_layers=stages)
    few = estimate(config, shape, GPUS["h100-80"])
    full = estimate(with_estimate(config, all_layers=True), shape, GPUS["h100-80"])
    assert few.costs.seconds == full.costs.seconds
    assert few.costs.collectives == full.costs.collectives
    assert few.costs.flops_by_phase == full.costs.flops_by_phase
    # Tokens, labels and losses of the microbatches that are not simulated
    omitted = microbatches - representative_microbatches(microbatches, 2, schedule)
    left_out = omitted * (16 * config.training.seq_len + 4) / GIB
    for one, other in zip(few.ranks, full.ranks, strict=True):
        for key in one.keys() - {"peak_at", "peak_reserved_gib"}:
            assert -1e-12 <= other[key] - one[key] <= left_out + 1e-12, key
        assert one["peak_reserved_gib"] == pytest.approx(other["peak_reserved_gib"], rel=0.02)


class StageOfOneRank:
    """What a schedule reads of a stage while it makes its table of actions."""

    is_first, has_backward, group, group_rank, device = True, True, None, 0, torch.device("cpu")
    is_last, submod = True, torch.nn.Identity()

    def __init__(self, index: int, ranks: int, stages: int, v_shaped: bool) -> None:
        self.stage_index, self.group_size, self.num_stages = index, ranks, stages
        self.stage_index_to_group_rank = {i: min(i, stages - 1 - i) if v_shaped else i % ranks for i in range(stages)}


def actions_of(schedule: str, ranks: int, count: int) -> dict[int, list[Action]]:
    """The computations of each rank with two stages, in the order of torch's schedule."""
    v_shaped, stages = schedule == "ZBVZeroBubble", 2 * ranks
    own = (0, stages - 1) if v_shaped else (0, ranks)
    table: Any = get_schedule_class(schedule)(
        [StageOfOneRank(i, ranks, stages, v_shaped) for i in own],  # type: ignore[arg-type]
        n_microbatches=count,
        loss_fn=lambda *_: None,
    )
    return {
        rank: [Action(a.computation_type.name, a.stage_index // ranks, a.microbatch_index) for a in actions if a]
        for rank, actions in table.pipeline_order.items()
    }


@pytest.mark.skipif(SINCE_2_15, reason="since torch 2.15 all microbatches of these schedules are simulated")
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", SPLIT_SCHEDULES)
def test_a_microbatch_and_the_one_that_represents_it_have_the_same_actions_around_them(
    schedule: str, ranks: int
) -> None:
    """Then FSDP does the same in both: gathers parameters, reduces gradients, adds them to others."""
    count = representative_microbatches(20 * ranks, ranks, schedule)
    assert count < 5 * ranks
    few, many = (actions_of(schedule, ranks, n) for n in (count, count + 3 * ranks))

    def surroundings(actions: list[Action], i: int) -> list[tuple[str, int]]:
        return [(a.name, a.stage) for a in (*actions[max(0, i - 1) : i], *actions[i + 1 : i + 2])]

    for rank, actions in many.items():
        states, simulated_states = gradient_states(actions), gradient_states(few[rank])
        represented = set()
        for i, action in enumerate(actions):
            microbatch = represented_microbatch(action, count + 3 * ranks, count, schedule, ranks)
            template = action._replace(microbatch=microbatch)
            represented.add(template)
            assert surroundings(few[rank], few[rank].index(template)) == surroundings(actions, i), (rank, action)
            assert states.get(action) == simulated_states.get(template), (rank, action)
        assert represented == set(few[rank])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_bubble_of_a_pipeline_is_that_of_theory(schedule: str) -> None:
    """(ranks - 1) / (chunks x microbatches) of the computation: https://arxiv.org/abs/2104.04473, section 2.2."""
    ranks, microbatches, chunks = 4, 4, STAGES_PER_RANK[schedule]
    parallelism = {
        "pipeline_parallel_degree": ranks,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_layers_per_stage": (8 // (ranks * chunks),) * (ranks * chunks),
    }
    training = {"local_batch_size": microbatches, "global_batch_size": microbatches, "seq_len": 4096}
    config = with_estimate(config_of(parallelism=parallelism, training=training), world_size=ranks)
    shape = replace(flavor_config("llama3", "8B"), n_layers=8, vocab_size=1024)
    seconds = estimate(config, shape, GPUS["h100-80"]).costs.seconds
    waiting = seconds["waiting for pipeline"] + seconds["waiting for end of the step"]
    computing = seconds["forward"] + seconds["backward"]
    assert waiting / computing == pytest.approx((ranks - 1) / (chunks * microbatches), rel=0.2)


@pytest.mark.slow
def test_unsharded_gradients_of_tensor_parallel_ranks_are_counted_by_rank() -> None:
    def gradients(tensor: int) -> float:
        parallelism = {"tensor_parallel_degree": tensor, "fsdp_gradient_accumulation": "unsharded"}
        config = config_of(parallelism=parallelism, training={"local_batch_size": 1, "global_batch_size": 8})
        (rank,) = estimate(with_estimate(config, world_size=4), DEEPER, GPUS["h100-80"]).ranks
        return float(rank["gradients_gib"])

    assert gradients(2) < 0.65 * gradients(1)  # norms are replicated


def without_module(operations: list[Operation]) -> list[Operation]:
    """Remove module names, which have numbers of layers, except from FSDP's operations and waits."""
    return [replace(o, module=re.sub(r"\d+", "", o.module) if o.fsdp or o.name == "wait" else "") for o in operations]


@pytest.mark.slow
def test_all_layers_are_simulated_if_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "simulate", cache(simulate))
    config = config_of(
        activation_checkpoint={"mode": "selective", "selective_option": "2"},
        training={"global_batch_size": 8},
    )
    config = with_estimate(config, world_size=2)
    few, full = (
        estimate(with_estimate(config, all_layers=all_layers), DEEPER, GPUS["h100-80"]) for all_layers in (False, True)
    )
    assert few.costs == full.costs


# Bytes that an operation moves


def test_moved_bytes_of_operations() -> None:
    aten, kib = torch.ops.aten, torch.zeros(256)
    assert moved_bytes(aten.add.Tensor, (kib, kib), {}, kib.clone()) == 3 * 1024
    assert moved_bytes(aten.add_.Tensor, (kib, kib), {}, kib) == 3 * 1024  # the output is also an input
    assert moved_bytes(aten.copy_.default, (kib, kib.bfloat16()), {}, kib) == 1024 + 512  # the output is not read
    assert moved_bytes(aten.zero_.default, (kib,), {}, kib) == 1024
    table, rows = torch.zeros(1000, 256), torch.zeros(3, dtype=torch.int64)
    assert moved_bytes(aten.embedding.default, (table, rows), {}, table[:3]) == 2 * 3 * 1024
    assert moved_bytes(aten._fused_adamw_.default, ([kib], [kib], [kib], [kib], [], []), {}, None) == 8 * 1024


def test_allocations_and_views_are_not_operations() -> None:
    recorder = StepRecorder("cpu")
    with recorder:
        torch.empty(4, 4).view(16)
        torch.ops.aten._unsafe_view(torch.empty(4, 4), [16])
    assert recorder.record.operations == []


def test_waiting_for_a_collective_is_not_a_collective() -> None:
    x = torch.zeros(2)
    assert collective(torch.ops._c10d_functional.wait_tensor.default, (x,), x) is None


def test_norms_are_computed_correctly_after_a_simulation() -> None:
    """A simulation makes the CPU claim to have the GPU's kernel."""
    names = [o.name for o in simulated(2).recorder.steps[-1].operations]
    assert names.count("_fused_rms_norm") == names.count("_fused_rms_norm_backward") == 2 * SHAPE.n_layers + 1
    x = torch.randn(2, 8)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(torch.nn.functional.rms_norm(x, (8,), eps=1e-5), expected)


def test_loss_in_grains_is_counted_as_the_loss() -> None:
    """It also computes the gradients in its forward: three products of the same size."""
    plain = simulated(1)
    split = simulated(1, training={"sums": "exact"}, grains={"tensor": 2})
    assert flops(split, "loss") == 3 * flops(plain, "loss") > 0
    phases = "loss", "forward", "backward"
    assert flops(split, *phases) == flops(plain, *phases)


def test_compiled_blocks_save_less_memory_and_compute_as_much() -> None:
    eager, compiled = simulated(2), simulated(2, compile={"enable": True})
    assert flops(compiled, "forward", "loss") == flops(eager, "forward", "loss")
    assert sum(compiled.recorder.steps[-1].peak) < sum(eager.recorder.steps[-1].peak)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "memory_budget"])
def test_compiled_blocks_are_recomputed_under_tensor_parallelism(mode: str) -> None:
    if mode == "memory_budget" and "2.12" <= torch.__version__ < "2.13":
        pytest.skip("not supported by torch 2.12")
    options = {"compile": {"enable": True}, "parallelism": {"tensor_parallel_degree": 2}}
    assert flops(simulated(2, **options, activation_checkpoint={"mode": mode}), "recompute") > 0


@pytest.mark.slow
def test_compiled_selective_checkpointing_repeats_all_gathers_and_keeps_sums() -> None:
    options = {"compile": {"enable": True}, "parallelism": {"tensor_parallel_degree": 2}}
    record = simulated(2, **options, activation_checkpoint={"mode": "selective"})
    repeated = Counter(o.name for o in record.recorder.steps[-1].operations if o.axis and o.phase == "recompute")
    assert repeated == {"all_gather_into_tensor": 2 * SHAPE.n_layers}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "mode", "unfused"),
    [
        ("none", "none", {}),
        ("none", "selective", {}),
        ("tensorwise", "none", {("reduce_scatter_tensor", "backward"): 2}),
    ],
)
def test_collectives_that_the_compiler_fuses_are_marked(
    recipe: str, mode: str, unfused: dict[tuple[str, str], int]
) -> None:
    """As ``test_lowering.py`` finds them in the generated code: all of a block, but in float8 six of eight."""
    if recipe != "none":
        pytest.importorskip("torchao")
    sections = {
        "parallelism": {"tensor_parallel_degree": 2, "enable_async_tensor_parallel": True},
        "compile": {"enable": True},
        "activation_checkpoint": {"mode": mode},
        "training": {"mixed_precision_param": "bfloat16", "local_batch_size": 1},
        "float8": {"recipe": recipe},
    }
    step = simulated(2, shape=SHAPE, **sections).recorder.steps[-1]
    found = Counter(
        (o.fused_with_matmul, o.name, o.phase)
        for o in step.operations
        if o.module == "layers.1"
        and o.axis == "tensor"
        and o.name in ("all_gather_into_tensor", "reduce_scatter_tensor")
    )
    microbatches = len(step.microbatches)
    assert {key[1:]: count // microbatches for key, count in found.items() if not key[0]} == unfused
    assert sum(found.values()) == microbatches * (8 + 2 * (mode == "selective"))  # it gathers again in backward
    assert [o for o in step.operations if o.fused_with_matmul and not o.module.startswith("layers.")] == []


def test_only_fused_collectives_overlap() -> None:
    collective = Operation("reduce_scatter_tensor", "forward", "", bytes=10**9, axis="tensor", ranks=tuple(range(8)))
    operations = [collective, replace(collective, fused_with_matmul=True)]
    cost_model = CostModel(GPUS["h100-80"], Efficiency(async_tensor=0.25), JobConfig())
    time = replay({0: operations}, cost_model)[0]
    assert time.waiting["tensor"] == pytest.approx(1.75 * cost_model.communicate(collective), rel=0.01)


def test_muon_states_take_half_of_adamw_states_for_matrices() -> None:
    kept = simulated(2, optimizer={"name": "muon"}).recorder.steps[-1].live_at_end
    elements = kept["parameters"] // 4
    matrices = elements - SHAPE.vocab_size * SHAPE.dim - SHAPE.dim * (2 * SHAPE.n_layers + 1) // 2
    assert kept["optimizer"] == pytest.approx(
        4 * matrices + 8 * (elements - matrices), rel=0.02
    )  # and the guard's states


def test_offloaded_states_take_no_gpu_memory() -> None:
    offloaded = simulated(2, shape=DEEPER, training={"enable_cpu_offload": True}).recorder.steps[-1]
    plain = simulated(2, shape=DEEPER).recorder.steps[-1]
    on_host = [CATEGORIES.index(name) for name in ("parameters", "gradients", "optimizer")]
    assert [(moment, i) for moment in offloaded.timeline for i in on_host if moment.sizes[i] != 0] == []
    copied = Counter[str]()
    for operation in offloaded.operations:
        if operation.axis == "host":
            copied[operation.name] += operation.bytes
    microbatches, size = len(offloaded.microbatches), plain.live_at_end["parameters"]
    assert copied["copy_to_host"] + copied["copy_to_host_and_wait"] == size
    assert copied["copy_to_gpu"] > size * microbatches
    assert plain.live_at_end["optimizer"] == pytest.approx(2 * plain.live_at_end["parameters"], rel=0.01)


def test_float8_scales_need_one_all_reduce() -> None:
    pytest.importorskip("torchao")
    step = simulated(2, float8={"recipe": "tensorwise"}).recorder.steps[-1]
    reductions = [o.phase for o in step.operations if o.name == "all_reduce" and o.axis == "shard"]
    assert reductions == ["update"]


HIDDEN = 2 * 2 * TINY.max_seq_len * TINY.dim  # bytes of the activations of a microbatch in bfloat16


@pytest.mark.parametrize(
    ("float8", "gathers", "forward", "backward"),
    [
        pytest.param({"recipe": "none"}, HIDDEN, 0, 0, marks=pytest.mark.slow),
        ({"recipe": "tensorwise"}, HIDDEN // 2, 4, 7),
        pytest.param(
            *({"recipe": "tensorwise", "enable_fsdp_float8_all_gather": False}, HIDDEN // 2, 4 + 7, 7 + 7),
            marks=pytest.mark.slow,
        ),
        pytest.param({"recipe": "rowwise"}, HIDDEN, 4, 10, marks=pytest.mark.slow),
    ],
)
def test_float8_under_tensor_parallelism_is_counted(
    float8: dict[str, Any], gathers: int, forward: int, backward: int
) -> None:
    """The numbers are those of docs/parallelism.md."""
    pytest.importorskip("torchao")
    training = {"mixed_precision_param": "bfloat16"}
    sections = {"float8": float8, "training": training, "parallelism": {"tensor_parallel_degree": 2}}
    less, more = (simulated(4, shape=replace(SHAPE, n_layers=layers), **sections) for layers in (1, 2))
    counts: Counter[tuple[str, str, int]] = Counter()
    reductions: Counter[str] = Counter()
    flops: Counter[torch.dtype] = Counter()
    for sign, record in ((-1, less), (1, more)):
        for o in record.recorder.steps[-1].operations:
            if o.axis == "tensor" and o.name == "all_reduce" and o.phase != "loss":
                reductions[o.phase] += sign
            elif o.axis == "tensor" and o.phase != "update":
                counts[o.phase, o.name, o.bytes] += sign
            if "mm" in o.name:
                flops[o.dtype] += sign * o.flops
    layers = len(more.recorder.steps[-1].microbatches)  # an additional layer, for each microbatch
    assert {key: count / layers for key, count in counts.items() if count} == {
        (phase, name, size): 2
        for phase in ("forward", "backward")
        for name, size in (("all_gather_into_tensor", gathers), ("reduce_scatter_tensor", HIDDEN))
    }
    assert {phase: count / layers for phase, count in reductions.items() if count} == (
        {"forward": forward, "backward": backward} if forward else {}
    )
    in_float8 = {torch.float8_e4m3fn, torch.float8_e5m2}
    assert {dtype for dtype, count in flops.items() if count} <= (
        {torch.bfloat16} if float8["recipe"] == "none" else in_float8
    )


def test_gradients_are_freed_at_the_end_of_a_step() -> None:
    first, second = simulated(2, steps=2).recorder.steps
    assert first.live_at_end["gradients"] == second.live_at_end["gradients"] == 0
    assert second.timeline[0].sizes == tuple(first.live_at_end[kind] for kind in CATEGORIES)


def test_only_real_cpus_pad_shards() -> None:
    def padded(gpu: bool) -> set[str]:
        # A norm's 64 elements are not divisible by 3.
        return {o.name for o in simulated(3, gpu=gpu).recorder.steps[-1].operations if "pad" in o.name}

    assert padded(gpu=False) == {"constant_pad_nd"}
    assert padded(gpu=True) == set()


@pytest.mark.parametrize(
    "sections",
    [{}, *(pytest.param(of, marks=pytest.mark.slow) for of in ({"compile": {"enable": True}}, DOCUMENT_MASK))],
    ids=str,
)
def test_simulations_in_one_process_are_independent(sections: dict[str, Any]) -> None:
    """torch keeps meshes, shapes and compiled functions for the whole process."""

    def operations_and_peak(ranks: int, tensor: int) -> tuple[Any, ...]:
        parallelism = {"tensor_parallel_degree": tensor}
        recorder = simulated(ranks, simulate=simulate_steps_of_rank, parallelism=parallelism, **sections).recorder
        return [(o.name, o.flops, o.bytes, o.axis, o.ranks) for o in recorder.steps[-1].operations], recorder.steps[
            -1
        ].peak

    first = operations_and_peak(4, 2)
    assert operations_and_peak(8, 4) != first
    assert operations_and_peak(4, 2) == first


# Commands


@pytest.mark.parametrize("device", ["GPU", "GPU of a pipeline", "CPU"])
def test_out_of_memory_error_names_the_estimate_command(
    device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_memory(_: JobConfig) -> int:
        if device == "CPU":
            torch.empty(1 << 60)
        error = torch.OutOfMemoryError("CUDA out of memory. You tried to allocate 2.00 GiB.")
        if device == "GPU of a pipeline":  # as torch.distributed.pipelining reports it
            raise RuntimeError("[Stage 1] failed to run forward: you tried to allocate") from error
        raise error

    monkeypatch.setattr(trainer, "train", run_out_of_memory)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert trainer.main(["--job.description", "a b"]) == 1
    output = capsys.readouterr().err
    message = output[output.rindex("error: out of memory: ") :]  # after the traceback
    assert (
        "A rank computes 8 sequences (training.local_batch_size) of 2,048 tokens (training.seq_len) at once" in message
    )
    assert "activation_checkpoint.mode = 'full'" in message
    assert "you tried to allocate" in message.lower()
    assert "python -m torchtrain.estimate --job.description 'a b' --estimate.world_size 8" in message


OPTIONS = ["--job.config_file", str(ROOT / "train_configs/debug_model.toml"), "--training.seq_len", "64"]
OPTIONS += ["--model.shape.n_layers", "2"]


@pytest.fixture
def few_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a search have few candidates, which are quick to simulate."""
    monkeypatch.setattr(search, "LOCAL_BATCHES", (1,))
    monkeypatch.setattr(search, "MODES", ("none",))
    monkeypatch.setattr(search, "SCHEDULES", ("1F1B",))


def test_json_output_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "memory.png"
    argv = [*OPTIONS, "--estimate.world_size", "4", "--parallelism.pipeline_parallel_degree", "2", "--estimate.json"]
    argv += ["--training.local_batch_size", "2"]
    assert command.main([*argv, "--estimate.picture", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 2]
    assert found["fits"] is True
    keys = {"flops_per_step_per_rank", "model_flops_per_token", "step_seconds", "tokens_per_second_per_gpu", "mfu"}
    assert [key for key in keys if not (found[key] > 0)] == []
    assert {"axis", "op", "phase", "count", "bytes"} <= found["collectives"][0].keys()
    assert picture.stat().st_size > 1000


def test_missing_tokenizer_leaves_the_vocabulary_size_of_the_flavor() -> None:
    config = from_file(str(ROOT / "train_configs/llama3_8b.toml"))
    assert resolve_model_config(config).vocab_size == 128256
    assert resolve_model_config(JobConfig()).vocab_size == load_tokenizer("").vocab_size


@pytest.mark.parametrize("build", [Trainer, resolve_model_config])
def test_document_mask_needs_a_tokenizer_with_a_token_that_begins_a_document(build: Callable[[JobConfig], Any]) -> None:
    tokenizer = load_tokenizer("")
    tokenizer.bos_id = None
    config = JobConfig(data=DataConfig(document_mask=True))
    with (
        patch("torchtrain.resolve.load_tokenizer", lambda _: tokenizer),
        patch("torchtrain.plugins.planner.request.load_tokenizer", lambda _: tokenizer),
        pytest.raises(ConfigError, match="= true needs a tokenizer with a token that begins a document"),
    ):
        build(config)


HEAD = re.compile(r"estimate.world_size (\d+)`: ([\d.]+) GiB, ([\d,]+) to ([\d,]+) tokens per second per GPU")


CONFIGS = pytest.mark.parametrize(
    "path", sorted((ROOT / "train_configs").glob("llama*b.toml")), ids=lambda path: path.stem
)


def test_published_layouts_of_other_trainers_are_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in tomli.loads(validate_estimate.OTHERS.read_text())["run"]:
        from_toml(JobConfig, {key: run[key] for key in run.keys() - {"name", "source", "tokens"}})
    options = 'model = {name = "llama3", flavor = "debugmodel", shape = {n_layers = 1}}\nestimate = {world_size = 1}\n'
    config = from_toml(JobConfig, tomli.loads(options))
    speed = estimate(config, build_model_config(config.model, None, 2048), GPUS["h100-80"]).tokens_per_second_per_gpu
    rows = [f'[[run]]\nname = "{name}"\nsource = "here"\ntokens = {speed / 1.1}\n{options}' for name in ("a", "b")]
    monkeypatch.setattr(validate_estimate, "OTHERS", tmp_path / "runs.toml")
    validate_estimate.OTHERS.write_text("".join(rows))
    validate_estimate.print_others("^b")
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:3] for line in lines] == [["| b (here)", f"{speed / 1.1:,.0f}", "+10.0%"]]


@pytest.mark.parametrize(
    "changes",
    [pytest.param(validate_estimate.PLAIN_LOSS, marks=pytest.mark.slow), validate_estimate.OLD],
    ids=["plain", "old"],
)
def test_older_implementations_of_published_runs_are_simulated(changes: dict[str, Any]) -> None:
    row = replace(validate_estimate.ROWS[0], **changes)
    with patch.object(validate_estimate, "build_model_config", lambda *_: replace(TINY, n_layers=2, max_seq_len=8192)):
        assert validate_estimate.trace(row).active > 0


def test_ring_attention_of_published_runs_computes_as_much_in_more_kernels() -> None:
    """Merging and the float32 gradients of repeated keys and values are what it costs more."""
    degree, seq = 4, 8192
    row = next(row for row in validate_estimate.HELD_OUT if row.context == degree)
    row = replace(row, seq_len=seq, float8=False, compiled=False)
    shape = replace(TINY, n_layers=1, n_heads=4, n_kv_heads=2, max_seq_len=seq)
    with patch.object(validate_estimate, "build_model_config", lambda *_: shape):
        ring = validate_estimate.trace(row).operations
        with patch.object(validate_estimate, "ring_attention", ContextParallelAttention.forward):
            gathered = validate_estimate.trace(row).operations

    for direction, times in (("forward", 2), ("backward", 1)):  # forward is computed again
        kernels = [
            [o for o in operations if "attention" in o.name and ("backward" in o.name) == (direction == "backward")]
            for operations in (ring, gathered)
        ]
        assert [len(found) for found in kernels] == [times * n * shape.n_layers for n in (degree, 2)]
        work, expected = (sum(o.flops * o.share for o in found) for found in kernels)
        assert work == expected
    keys_and_values = 2 * shape.n_heads * seq // degree * shape.head_size  # elements of a rank's shard
    sent = [o.bytes for o in ring if o.name == "all_to_all_single"]
    assert sent == [4 * keys_and_values * degree // (degree - 1)] * degree * shape.n_layers
    gathers = [o.bytes for o in ring if o.axis == "context" and "gather" in o.name]
    assert gathers == [2 * keys_and_values * degree] * 3 * shape.n_layers  # forward, recomputed forward and backward


def test_rows_of_published_runs_are_found_by_name_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    rows = validate_estimate.ROWS + validate_estimate.HELD_OUT
    assert len({validate_estimate.label(row) for row in rows}) == len(rows)
    assert validate_estimate.label(rows[1]).startswith("8B, 8 GPUs, batch 2, compiled (torchtitan benchmarks/")
    for arguments, message in (
        (["--only", "9B"], "--only '9B' is in none of these rows:\n8B, 8 GPUs, batch 2 (torch"),
        (["--only", "8B", "--fit"], "--fit needs all rows; leave out --only"),
    ):
        with patch("sys.argv", ["validate_estimate.py", *arguments]), pytest.raises(SystemExit, match=r"^2$"):
            validate_estimate.main()
        assert message in capsys.readouterr().err


@CONFIGS
def test_slowest_step_of_a_config_is_far_below_the_hang_timeout(path: Path) -> None:
    match, config = HEAD.search(path.read_text()), parse(["--job.config_file", str(path)])
    assert match, path
    tokens = config.training.global_batch_size * config.training.seq_len
    slowest_seconds = tokens / int(match[1]) / float(match[3].replace(",", ""))
    assert 4 * slowest_seconds < config.comm.train_timeout_seconds


@pytest.mark.slow
@CONFIGS
def test_estimate_in_the_head_of_a_config_is_current(path: Path) -> None:
    match = HEAD.search(path.read_text())
    assert match, path
    found = estimate_of(parse(["--job.config_file", str(path), "--estimate.world_size", match[1]]))
    low, high = (found.tokens_per_second_per_gpu * (1 + sign * found.gpu.interval) for sign in (-1, 1))
    assert found.fits
    expected = [found.peak_reserved_gib, low, high]
    assert [float(match[i].replace(",", "")) for i in (2, 3, 4)] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "estimate.world_size is not set"),
        (
            ["--estimate.world_size", "6", "--parallelism.tensor_parallel_degree", "4"],
            "the product of the degrees must be the number of ranks, 6",
        ),
        (["--estimate.world_size", "8", "--parallelism.tensor_parallel_degree", "8"], "must divide the model's"),
        (["--estimate.world_size", "8", "--float8.recipe", "rowwise", "--estimate.gpu", "a100-80"], "8.9 or higher"),
        (["--estimate.world_size", "8", "--activation_checkpoint.mode", "memory_budget"], "lets the compiler choose"),
        (
            ["--estimate.world_size", "8", "--estimate.search", "--estimate.json"],
            "cannot be combined with estimate.search",
        ),
    ],
)
def test_estimate_rejects_what_the_trainer_rejects(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*OPTIONS, *options]) == 2
    assert message in capsys.readouterr().err


def test_rejected_search_leaves_no_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["--estimate.search"]) == 2
    assert "estimate.world_size is not set" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("few_layouts")
def test_layout_of_the_search_is_accepted_by_the_trainer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "cores_of_process", lambda: 1)
    best, small = tmp_path / "best.toml", ["--training.local_batch_size", "1", "--training.global_batch_size", "2"]
    argv = [*OPTIONS, *small, "--model.shape.n_layers", "4", "--estimate.world_size", "2", "--estimate.search"]
    argv += ["--diagnostics.norms_freq", "3"]
    assert command.main([*argv, "--estimate.output", str(best)]) == 0
    out = capsys.readouterr().out
    assert "; 0 skipped" in out  # however slow the machine is
    rates = [float(rate.replace(",", "")) for rate in re.findall(r"([\d,]+) +[\d.]+%", out)]
    assert len(rates) > 2
    assert [(first, second) for first, second in pairwise(rates) if not (first >= second)] == []
    config = parse(["--job.config_file", str(best)])
    assert resolve_parallel_dims(config.parallelism, 2)
    assert section_of(config, DiagnosticsConfig).norms_freq == 3  # other sections of plugins are kept
    # The search simulates few layers; the result must hold for all of them.
    full = estimate_of(with_estimate(config, world_size=2))
    assert full.tokens_per_second_per_gpu == pytest.approx(rates[0], rel=0.03)


@pytest.mark.usefixtures("few_layouts")
def test_search_starts_from_a_config_that_the_trainer_rejects(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "CPU_SECONDS", 0)
    argv = [*OPTIONS, "--estimate.world_size", "4", "--estimate.search", "--estimate.output", str(tmp_path / "best")]
    assert command.main([*argv, "--training.local_batch_size", "8", "--training.global_batch_size", "4"]) == 0
    training = parse(["--job.config_file", str(tmp_path / "best")]).training
    assert (training.local_batch_size <= 4, training.global_batch_size) == (True, 4)
    capsys.readouterr()
    rejected = ["--training.local_batch_size", "8", "--training.global_batch_size", "4"]
    assert command.main([*argv, *rejected, "--estimate.memory_gib", "0.01"]) == 2
    assert re.search(r"none of the 0 most promising of \d+ layouts on 4 GPUs fits", capsys.readouterr().err)
    assert command.main([*argv, "--training.global_batch_size", "5", "--estimate.world_size", "3"]) == 2
    assert "training.global_batch_size = 5 must be a multiple of" in capsys.readouterr().err


def test_unwritable_outputs_are_rejected_before_the_simulation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("it simulated before it rejected the options")

    monkeypatch.setattr(summary, "simulate", fail)
    (tmp_path / "file").touch()
    argv = [*OPTIONS, "--estimate.world_size", "4"]
    for options, message in (
        (["--estimate.search", "--estimate.output", str(tmp_path)], "is a folder; name a file in it"),
        (["--estimate.search", "--estimate.output", str(tmp_path / "file/best.toml")], "cannot be used: "),
        (["--estimate.picture", str(tmp_path / "memory.pdf")], "must end with .png"),
        (["--estimate.picture", str(tmp_path / "file/memory.png")], "cannot be used: "),
    ):
        assert command.main([*argv, *options]) == 2
        error = capsys.readouterr().err
        assert f"{options[-2][2:]} = '{options[-1]}' {message}" in error
    monkeypatch.setattr("torchtrain.files.find_spec", lambda _name: None)
    assert command.main([*argv, "--estimate.picture", str(tmp_path / "memory.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.usefixtures("few_layouts")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_result_is_printed_before_a_full_disk_is_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "CPU_SECONDS", 0)
    (tmp_path / "full.png").symlink_to("/dev/full")
    argv = [*OPTIONS, "--estimate.world_size", "1"]
    for options in (
        ["--estimate.search", "--estimate.output", "/dev/full"],
        ["--estimate.picture", str(tmp_path / "full.png")],
    ):
        assert command.main([*argv, *options]) == 2
        output = capsys.readouterr()
        assert "may fit" in output.out or "tokens/s a GPU" in output.out
        assert f"{options[-2][2:]} = '{options[-1]}' could not be written: No space left on device" in output.err
        assert "Traceback" not in output.err


@pytest.mark.usefixtures("few_layouts")
def test_search_without_time_simulates_only_the_given_layout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "CPU_SECONDS", 0)
    own = ["--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "2"]
    output = ["--estimate.output", str(tmp_path / "best.toml")]
    assert command.main([*OPTIONS, *own, *output, "--estimate.world_size", "4", "--estimate.search"]) == 0
    out = capsys.readouterr().out
    match = re.search(r"of which (\d+) may fit\n1 simulated in (\d+) s of CPU time, 1 of them fit; (\d+) skipped", out)
    assert match
    assert int(match[2]) > 0
    assert int(match[3]) == int(match[1]) - 1  # all but the given layout
    parallelism = parse(["--job.config_file", str(tmp_path / "best.toml")]).parallelism
    assert (parallelism.tensor_parallel_degree, parallelism.data_parallel_shard_degree) == (2, 2)


@pytest.mark.parametrize("simulations", [0, 2])
def test_ctrl_c_ends_a_search_with_the_best_so_far(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulations: int
) -> None:
    """Each layout and the best so far are logged. Before a layout fits, there is no result."""
    found = summary.estimate

    def interrupted(*arguments: Any) -> Any:
        nonlocal simulations
        simulations -= 1
        if simulations < 0:
            raise KeyboardInterrupt
        return found(*arguments)

    expected = simulations
    monkeypatch.setattr(search, "cores_of_process", lambda: 1)
    monkeypatch.setattr(estimate_pool, "estimate", interrupted)
    output = ["--estimate.output", str(tmp_path / "best.toml"), "--estimate.search_seconds", "1000"]
    assert command.main([*OPTIONS, *output, "--estimate.world_size", "4", "--estimate.search"]) == 130
    out, log = capsys.readouterr()
    shown = re.findall(r"layout (\d+) of \d+: .*batch \d+, checkpoint \w+: .* the best so far ([\d,]+) tokens/s", log)
    assert [number for number, _ in shown] == [str(number) for number in range(1, expected + 1)]
    if expected:
        assert re.search(
            r"^2 simulated in \d+ s of CPU time, 2 of them fit; \d+ skipped because of Ctrl-C$", out, re.MULTILINE
        )
        assert shown[-1][1] == out.splitlines()[4].split()[-2]  # the first row of the table
        assert parse(["--job.config_file", str(tmp_path / "best.toml")])
    else:
        assert not out
        assert not (tmp_path / "best.toml").exists()


def test_search_seconds_limit_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """With simulations of 10 s, the one that would end after the limit is skipped."""
    config = parse([*OPTIONS, "--estimate.world_size", "4", "--estimate.search"])
    result = estimate_of(config)
    simulated: list[JobConfig] = []

    def simulate(layout: JobConfig, *_: Any) -> Estimate:
        simulated.append(layout)
        return result

    monkeypatch.setattr(search, "cores_of_process", lambda: 1)
    monkeypatch.setattr(search, "stage_forwards", lambda *_: 1)
    monkeypatch.setattr(estimate_pool, "estimate", simulate)
    monkeypatch.setattr(estimate_pool.time, "process_time", lambda: 10 * len(simulated))
    for limit, number in ((45.0, 4), (25.0, 2)):
        simulated.clear()
        search.search(with_estimate(config, search_seconds=limit), lambda: None)
        assert len(simulated) == number


def test_durations_are_those_of_closed_forms() -> None:
    e = Efficiency(kernel_seconds=0.0)
    cost_model = CostModel(GPUS["h100-80"], e, JobConfig())
    product = Operation("mm", "forward", "", flops=10**12, dtype=torch.bfloat16)
    name = "_scaled_dot_product_flash_attention_for_cpu"  # where PyTorch chooses the kernel
    attention = replace(product, name=name, share=0.5, keys=900.0, head_dim=128)
    for operation, seconds in (
        (product, 1e12 / 989e12 / e.matmul),
        (replace(product, dtype=torch.float8_e4m3fn), 1e12 / 1979e12 / e.float8),
        (replace(product, dtype=torch.float32), 1e12 / 67e12 / e.matmul),
        (replace(attention, name="flex_attention"), 0.5e12 / 989e12 / (0.342 * 900 / (900 + 180))),
        (attention, 0.5e12 / 989e12 / (0.663 * 900 / (900 + 200))),
        (replace(attention, name=f"{attention.name}_backward"), 0.5e12 / 989e12 / (0.568 * 900 / 1266)),
        (Operation("add", "forward", "", bytes=10**9), 1e9 / 3.35e12 / e.memory),
    ):
        assert cost_model.compute(operation) == pytest.approx(seconds)
    limited = replace(cost_model, gpu=GPUS["h100-96"])
    assert limited.compute(product) == pytest.approx(1e12 / 989e12 / e.matmul / e.power_limited)
    # The host updates what is offloaded to it, and nothing else.
    offloading = replace(cost_model, config=JobConfig(training=TrainingConfig(enable_cpu_offload=True)))
    update = Operation("add", "update", "", bytes=10**9)
    assert offloading.compute(update) == pytest.approx(1e9 / 77e9 / e.memory)
    for model, operation in ((offloading, replace(update, phase="backward")), (cost_model, update)):
        assert model.compute(operation) == pytest.approx(1e9 / 3.35e12 / e.memory)
    copied = Operation("copy_to_gpu", "forward", "", bytes=10**9, axis="host", fsdp=True)
    assert offloading.communicate(copied) == pytest.approx(1e9 / (64e9 * e.link))
    slow_kernels = replace(cost_model, efficiency=replace(e, kernel_seconds=1.0))
    assert slow_kernels.compute(product) == 1.0
    near, far = 450e9 * e.link, 50e9 * e.network
    us = 1e-6
    for name, ranks, peer, seconds in (
        ("allgather_base", range(8), None, (8.4 + 7 * 3.4) * us + 7e9 / near),
        ("allreduce", range(8), None, (8.4 + 14 * 3.4) * us + 14e9 / near),
        ("allgather_base", range(16), None, (8.4 + 14 * 3.4 + 14) * us + 7.5e9 / (8 * far)),
        ("allreduce", (0, 8), None, 1.4 * (8.4 + 2 * 14) * us + 8e9 / far),
        ("alltoall_base", range(8), None, (8.4 + 3.4) * us + 7e9 / near),
        ("alltoall_base", range(16), None, (8.4 + 14) * us + 4e9 / far),
        ("send", (0, 1), 1, (8.4 + 3.4) * us + 8e9 / near),
        ("send", (0, 8), 8, (8.4 + 14) * us + 8e9 / far),
    ):
        sent = Operation(name, "forward", "", bytes=8 * 10**9, axis="shard", ranks=tuple(ranks), peer=peer)
        assert cost_model.communicate(sent) == pytest.approx(seconds, rel=1e-9)
    assert cost_model.communicate(replace(sent, ranks=(0,))) == 0.0


class OneSecondLaunches:
    """Operations take as many seconds as their ``bytes``, and the host issues one each second."""

    efficiency = Efficiency(launch_seconds=1.0, async_tensor=0.25)

    def compute(self, operation: Operation) -> float:
        return float(operation.bytes)

    communicate = compute


def computed(seconds: int, phase: str = "forward", name: str = "mm") -> Operation:
    return Operation(name, phase, "", bytes=seconds)


def sent(name: str, seconds: int, axis: str = "shard", **fields: Any) -> Operation:
    return Operation(name, "backward", axis=axis, bytes=seconds, **{"module": "m", "fsdp": axis != "tensor", **fields})


WAIT = Operation("wait", "forward", "m")


@pytest.mark.parametrize(
    ("operations", "seconds", "by_phase", "waiting"),
    [
        # The device waits for the host, which issues the operations after 1 and 2 seconds.
        ([computed(0), computed(3)], 5, {"forward": 3}, {"host": 2}),
        # A gather from 1 to 6, which the device waits for.
        ([sent("all_gather", 5), WAIT, computed(3)], 9, {"forward": 3}, {"shard": 6}),
        # The second gather, from 3 to 7, overlaps with the computation from 4 to 14.
        (
            [sent("all_gather", 2), WAIT, sent("all_gather", 4, module="n"), computed(10), replace(WAIT, module="n")],
            14,
            {"forward": 10},
            {"shard": 3, "host": 1},
        ),
        # A gather begins when the parameters of the one before are copied out, at 11, and ends at 15.
        (
            [sent("all_gather", 2), WAIT, computed(8, name="split_with_sizes_copy"), sent("all_gather", 4), WAIT],
            15,
            {"forward": 8},
            {"shard": 3 + 4},
        ),
        # One reduction at a time: from 6 to 16, and after a wait from 7 to 16, from 16 to 26.
        (
            [
                computed(5, "backward"),
                sent("reduce", 10),
                computed(1, "backward"),
                sent("reduce", 10),
                computed(20, "backward"),
            ],
            36,
            {"backward": 26},
            {"host": 1, "shard": 9},
        ),
        # An all-reduce over replicas follows on the same stream, and the device does not wait for it.
        (
            [computed(5, "backward"), sent("reduce", 2), sent("all_reduce", 4, "replicate"), computed(9, "backward")],
            15,
            {"backward": 14},
            {"host": 1},
        ),
        # The update waits for the reductions.
        ([computed(5, "backward"), sent("reduce", 10), computed(2, "update")], 18, None, {"host": 1, "shard": 10}),
        # Copies to the host are in order with the collectives; the host waits for one of them, until 14.
        (
            [computed(5), sent("reduce", 3), sent("copy_to_host", 2, "host"), computed(1)],
            11,
            {"forward": 6},
            {"host": 1, "shard": 4},
        ),
        (
            [computed(5), sent("reduce", 3), sent("copy_to_host_and_wait", 5, "host"), computed(1)],
            16,
            {"forward": 6},
            {"host": 1 + 9},
        ),
        # Copies to the device do not wait for the computation before them.
        ([computed(9), sent("copy_to_gpu", 2, "host"), sent("all_gather", 1), WAIT], 10, {"forward": 9}, {"host": 1}),
        # A gather of parameters that are copied to the device first, from 1 to 3.
        ([sent("copy_to_gpu", 2, "host"), sent("all_gather", 4), WAIT], 7, {}, {"shard": 7}),
        # Collectives of tensor parallelism, of which a fused one takes three quarters of its time.
        (
            [computed(2), sent("all_gather", 4, "tensor"), sent("reduce", 4, "tensor", fused_with_matmul=True)],
            10,
            {"forward": 2},
            {"host": 1, "tensor": 7},
        ),
    ],
)
def test_replay_waits_for_the_host_and_for_collectives(
    operations: list[Operation], seconds: float, by_phase: dict[str, float] | None, waiting: dict[str, float]
) -> None:
    cost_model: Any = OneSecondLaunches()
    time = replay({0: operations}, cost_model)[0]
    assert time.seconds == seconds
    assert {name: wait for name, wait in time.waiting.items() if wait} == waiting
    if by_phase is not None:
        assert time.by_phase == by_phase
    assert sum(time.by_phase.values()) + sum(time.waiting.values()) == seconds
    assert sum(time.kernels.values()) == sum(time.by_phase.values())


def test_kernels_of_a_step_are_products_attention_and_others() -> None:
    cost_model: Any = OneSecondLaunches()
    product = replace(computed(3), flops=1)
    attention = replace(computed(5, "backward"), flops=1, head_dim=64)
    time = replay({0: [product, attention, computed(7), product]}, cost_model)[0]
    assert time.kernels == {"forward, products": 6, "forward, others": 7, "backward, attention": 5}


def test_replay_waits_for_messages_and_for_the_slowest_rank() -> None:
    """Two messages of rank 0, which arrive at 6 + 2 and 9 + 2; rank 1 answers at 13 + 1."""
    cost_model: Any = OneSecondLaunches()

    def message(name: str, peer: int, seconds: int) -> Operation:
        return sent(name, seconds, "pipeline", peer=peer, fsdp=False)

    def waits_for(peer: int, later: int = 0) -> Operation:
        return Operation(WAIT_FOR_MESSAGE, "forward", "", peer=peer, message=later)

    sends = [computed(5), message("send", 1, 2), computed(3), message("send", 1, 2)]
    first = [*sends, message("recv", 1, 0), waits_for(1), computed(4)]
    receive = message("recv", 0, 0)
    second = [receive, waits_for(0), computed(1), receive, waits_for(0), computed(2), message("send", 0, 1)]
    times = replay({0: first, 1: second}, cost_model)
    assert [time.seconds for time in times.values()] == [18, 18]
    waits = [{name: wait for name, wait in time.waiting.items() if wait} for time in times.values()]
    assert waits == [{"host": 1, "pipeline": 5}, {"pipeline": 8 + 2, "end of the step": 5}]
    # A message that is received before it is needed does not let the device wait.
    early = [message("recv", 0, 0), computed(20), waits_for(0), computed(1)]
    assert replay({0: [computed(5), message("send", 1, 2)], 1: early}, cost_model)[1].seconds == 2 + 20 + 1
    # Messages may be needed in another order than they arrive.
    for later, arrival in ((1, 6 + 2), (0, 9 + 2)):
        late = [receive, receive, waits_for(0, later), computed(1)]
        assert replay({0: sends, 1: late}, cost_model)[1].by_phase == {"forward": 1}
        assert replay({0: sends, 1: late}, cost_model)[1].waiting["pipeline"] == arrival
    with pytest.raises(AssertionError, match=r"deadlock: ranks \[0\] wait for messages that no rank sends"):
        replay({0: [message("recv", 1, 0)], 1: []}, cost_model)


def test_attention_kernels_are_those_of_the_config() -> None:
    sdpa, direct = "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"
    for backend, capability, name, kernel in (
        ("auto", (9, 0), sdpa, "cudnn"),
        ("auto", (9, 0), direct, "flash"),
        ("auto", (9, 0), "flex_attention", "flash"),
        ("auto", (8, 0), sdpa, "flash"),
        ("cudnn", (8, 0), sdpa, "cudnn"),
        ("flash", (10, 0), sdpa, "flash"),
        ("fa3", (9, 0), direct, "fa3"),
    ):
        assert kernel_of(name, TrainingConfig(attention_backend=backend), capability) == kernel  # type: ignore[arg-type]
    assert kernel_of(sdpa, TrainingConfig(deterministic=True), (9, 0)) == "flash"


def test_attention_speeds_are_fitted_to_the_published_benchmarks() -> None:
    assert {kernel: fit_attention.fit(points) for kernel, points in fit_attention.read().items()} == SPEEDS
    # FlashAttention 2 on an H100, 16,384 tokens, causal: 335 TFLOP/s (arXiv:2407.08608, figure 5).
    fraction = attention_fraction(Kernel("flash", 9, "forward", 128), 8192)
    assert fraction * 989 == pytest.approx(335, rel=0.02)
    assert attention_fraction(Kernel("flash", 9, "forward", 96), 8192) == fraction


def test_estimate_follows_from_step_time_and_peak_memory() -> None:
    key = ("forward", "")
    small = RankMemory(0, 0.0, 0.0, 0.0, [{key: (1.0,) * 6}] * 2, {0: {key: 6.0}})
    streams = {0: {key: 50.0 * GIB}, 1: {key: 8.0 * GIB}}
    large = replace(small, rank=1, by_stream=streams, fragmentation=2.0 * GIB)
    figures = StepCosts([large, small], [], {}, {"step": 0.5}, {})
    found = Estimate(GPUS["h100-80"], ParallelDims(shard=4), figures, 4000, 172_800, 10**9, [])
    assert found.tokens_per_second_per_gpu == 2000
    assert found.mfu == pytest.approx(1e9 * 2000 / 989e12)
    assert (found.days, found.as_dict()["gpu_hours"]) == (1.0, 96.0)
    assert (found.peak_reserved_gib, found.fits) == (60.0, True)
    assert not replace(found, gpu=replace(found.gpu, memory_gib=59.0)).fits
