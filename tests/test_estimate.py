"""The planner: what it counts beside real runs, published identities and closed forms; its command."""

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

import pytest
import torch
import validate_estimate
from gloo_pool import GlooPool
from parity import TINY, build, config_of
from torch.profiler import ProfilerActivity, profile

from torchtrain import estimate as command
from torchtrain import train as trainer
from torchtrain.config.parse import from_file, parse
from torchtrain.config.schema import DataConfig, JobConfig
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.distributed.mesh import ParallelDims, resolve_parallel_dims
from torchtrain.errors import ConfigError
from torchtrain.models.llama.flops import flops_per_token
from torchtrain.parallelisms.pipeline_schedule import STAGES_PER_RANK
from torchtrain.planning import search, summary
from torchtrain.planning.allocator import Allocation, peak_reserved
from torchtrain.planning.hardware import GIB, GPUS, Efficiency
from torchtrain.planning.ledger import KINDS, Ledger
from torchtrain.planning.operations import Operation, collective, moved_bytes
from torchtrain.planning.representative_ranks import stand_in
from torchtrain.planning.request import gpu_of, shape_of
from torchtrain.planning.simulation import RankRecord, representative_ranks, simulate, simulate_steps
from torchtrain.planning.summary import Estimate, Figures, RankFigures, estimate
from torchtrain.planning.timing import Clock
from torchtrain.trainer import Trainer

ROOT = Path(__file__).parent.parent
MIB = 2**20
SHAPE = replace(TINY, n_layers=2, n_heads=8, n_kv_heads=4, vocab_size=512)
DEEPER = replace(SHAPE, n_layers=4)


rehearsed = cache(simulate)  # the plain layout is asked for by many tests


def planned(
    ranks: int, rank: int = 0, capability: Any = (9, 0), simulate: Any = rehearsed, shape: Any = SHAPE, **sections: Any
) -> RankRecord:
    """Of ``rank``, or of the first one of its kind."""
    config = config_of(**sections)
    degrees = resolve_parallel_dims(config.parallelism, ranks)
    first = max(kind for kind in representative_ranks(degrees) if kind <= rank)
    record: RankRecord = simulate(config, shape, degrees, first, capability=capability)
    return record


def estimate_of(config: JobConfig) -> Estimate:
    return estimate(config, shape_of(config), gpu_of(config))


def asked(config: JobConfig, **options: Any) -> JobConfig:
    """With these ``options`` of its section [estimate]."""
    return replace(config, estimate=replace(config.estimate, **options))


def flops(record: RankRecord, *phases: str) -> int:
    return sum(o.flops for o in record.ledger.steps[-1].operations if not phases or o.phase in phases)


def sent(record: RankRecord, axis: str) -> dict[str, tuple[int, int]]:
    """Number and bytes by operation."""
    found: dict[str, tuple[int, int]] = {}
    for operation in record.ledger.steps[-1].operations:
        if operation.axis == axis and operation.phase != "update":
            count, size = found.get(operation.name, (0, 0))
            found[operation.name] = count + 1, size + operation.bytes
    return found


# The caching allocator


def test_a_free_block_is_taken_again_and_split() -> None:
    first = [Allocation(1, 40 * MIB, 0), Allocation(1, 0, 0)]
    assert peak_reserved([*first, Allocation(2, 30 * MIB, 0), Allocation(3, 10 * MIB, 0)]) == 40 * MIB
    # 20 MiB are mapped at once; a block between two that are in use is too small for more.
    holes = [Allocation(n, 20 * MIB, 0) for n in range(3)] + [Allocation(1, 0, 0), Allocation(4, 30 * MIB, 0)]
    assert peak_reserved(holes) == 100 * MIB


def test_of_free_blocks_the_lowest_is_taken_and_the_growing_end_last() -> None:
    blocks = [Allocation(n, 20 * MIB, 0) for n in range(5)]
    freed = {n: Allocation(n, 0, 0) for n in range(5)}
    # Of 0 and 2 the first is taken: so with 3 the third makes room for 40 MiB.
    equal = [*blocks, freed[2], freed[0], Allocation(5, 20 * MIB, 0), freed[3], Allocation(6, 40 * MIB, 0)]
    assert peak_reserved(equal) == 100 * MIB
    # 40 MiB are free between, and 20 at the end, which stay: with 20 more they are the next 40.
    end = [*blocks, freed[1], freed[2], freed[4], Allocation(5, 20 * MIB, 0), Allocation(6, 40 * MIB, 0)]
    assert peak_reserved(end) == 120 * MIB


def test_streams_and_small_blocks_have_pools_of_their_own() -> None:
    assert peak_reserved([Allocation(1, 40 * MIB, 0), Allocation(1, 0, 0), Allocation(2, 40 * MIB, 1)]) == 80 * MIB
    assert peak_reserved([Allocation(n, 512, 0) for n in range(4096)]) == 2 * MIB


def test_segments_of_fixed_size_are_not_joined() -> None:
    halves = [Allocation(1, 21 * MIB, 0), Allocation(2, 21 * MIB, 0), Allocation(1, 0, 0), Allocation(2, 0, 0)]
    whole = [*halves, Allocation(3, 42 * MIB, 0)]
    assert peak_reserved(whole, expandable_segments=False) == (22 + 22 + 42) * MIB
    assert peak_reserved(whole) < 64 * MIB


# Beside real runs on CPUs


def train_in_a_ledger(config: JobConfig, shape: Any) -> tuple[list[int], list[int]]:
    """Operations of matrix products and attention, and peaks of live bytes, of two steps on real tensors."""
    ledger = Ledger("cpu")
    simulate_steps(config, build(config, shape), ledger, new_tokens=torch.zeros)
    counts = [sum(o.flops for o in step.operations) for step in ledger.steps]
    return counts, [sum(step.peak) for step in ledger.steps]


@pytest.mark.parametrize(
    ("ranks", "parallelism", "optimizer", "ema"),
    [
        (1, {}, "adamw", False),
        (2, {}, "adamw", False),
        (2, {"tensor_parallel_degree": 2}, "adamw", False),
        (2, {"pipeline_parallel_degree": 2}, "adamw", False),
        (2, {}, "muon", False),
        (2, {"tensor_parallel_degree": 2}, "adamw", True),
    ],
    ids=["one", "shard", "tensor", "pipeline", "muon", "averages and z-loss"],
)
def test_a_plan_for_cpus_is_what_a_real_run_does(
    gloo: GlooPool, ranks: int, parallelism: dict[str, Any], optimizer: str, ema: bool
) -> None:
    sections: dict[str, Any] = {
        "parallelism": parallelism,
        "training": {"steps": 2, "local_batch_size": 2},
        "optimizer": {"name": optimizer},
        "ema": {"enable": ema},
    }
    sections["training"]["z_loss_weight"] = 1e-4 if ema else 0.0
    found = gloo.run(ranks, train_in_a_ledger, config_of(**sections), DEEPER)
    for rank, (counts, peaks) in enumerate(found):
        steps = planned(ranks, rank=rank, capability=None, shape=DEEPER, **sections).ledger.steps
        assert [sum(o.flops for o in step.operations) for step in steps] == counts
        assert [sum(step.peak) for step in steps] == pytest.approx(peaks, rel=0.03)


def test_averages_are_counted() -> None:
    plain, averaged = planned(2), planned(2, ema={"enable": True})
    more = [step.kept["optimizer"] for step in averaged.ledger.steps], [s.kept["optimizer"] for s in plain.ledger.steps]
    assert [a - b for a, b in zip(*more, strict=True)] == [plain.parameter_bytes] * 2
    offloaded = planned(2, ema={"enable": True, "offload": True})
    assert offloaded.ledger.steps[-1].kept == plain.ledger.steps[-1].kept


def test_operations_are_those_of_the_profiler() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 32, requires_grad=True), torch.randn(32, 48, requires_grad=True)
    ledger = Ledger("cpu")
    with ledger:
        (a @ b).sum().backward()
    ledger.end_step()
    with profile(activities=[ProfilerActivity.CPU], with_flops=True, acc_events=True) as profiler:
        (a @ b).sum().backward()
    by_profiler = sum(event.flops for event in profiler.key_averages() if event.key == "aten::mm")
    assert sum(o.flops for o in ledger.steps[0].operations) == by_profiler == 3 * 2 * 64 * 32 * 48


# Beside closed forms


def test_operations_of_a_step_are_those_of_the_formula() -> None:
    record, config = planned(1), config_of()
    tokens = config.training.local_batch_size * config.training.seq_len
    attention = 2 * SHAPE.n_layers * SHAPE.n_heads * SHAPE.head_size * config.training.seq_len * tokens
    # The formula counts twice the forward for attention's backward; its kernel computes the scores once more.
    assert flops(record) == flops_per_token(SHAPE, config.training.seq_len) * tokens + attention


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_context_parallel_ranks_share_causal_attention_evenly(degree: int, dtype: str) -> None:
    """What the kernels compute, which is half of all pairs, forward and backward; whichever two parts a rank has."""

    def computed(record: RankRecord, *phases: str) -> float:
        operations = record.ledger.steps[-1].operations
        return sum(o.flops * o.share for o in operations if "attention" in o.name and o.phase in phases)

    training = {"mixed_precision_param": dtype, "seq_len": 64}
    config = config_of(training=training, parallelism={"context_parallel_degree": degree})
    degrees = resolve_parallel_dims(config.parallelism, degree)
    shape = replace(SHAPE, max_seq_len=64)
    scores = config.training.local_batch_size * SHAPE.n_heads * 64 * 64 * SHAPE.head_size * SHAPE.n_layers
    for rank in range(degree):
        record = simulate(config, shape, degrees, rank, capability=(9, 0))
        assert computed(record, "forward") == 4 * scores / 2 / degree
        assert computed(record, "backward") == 10 * scores / 2 / degree


def test_full_checkpointing_computes_the_blocks_again() -> None:
    plain, full = planned(2), planned(2, activation_checkpoint={"mode": "full"})
    # All but the last product of a block, whose result nothing asks for, and the output.
    assert flops(full, "forward") == flops(plain, "forward")
    assert 0.7 * flops(plain, "forward") < flops(full, "recompute") <= flops(plain, "forward")
    assert flops(plain, "recompute") == 0


def test_traffic_of_fsdp() -> None:
    record = planned(4)
    gathers, reductions = sent(record, "shard")["allgather_base"], sent(record, "shard")["reduce_scatter_base"]
    blocks = SHAPE.n_layers
    # A gathering for each block and the root in forward; for all but the last block and the root again in backward.
    assert gathers[0] == (blocks + 1) + (blocks - 1)
    assert reductions[0] == blocks + 1
    assert reductions[1] == 4 * record.parameter_bytes  # float32, of four ranks


def test_traffic_of_accumulation() -> None:
    by = {
        way: planned(4, training={"global_batch_size": 16}, parallelism={"fsdp_gradient_accumulation": way})
        for way in ("sharded", "unsharded")
    }
    counts = {way: sent(record, "shard")["reduce_scatter_base"][0] for way, record in by.items()}
    assert counts["sharded"] == 2 * counts["unsharded"]  # two microbatches
    # What is kept between microbatches: whole float32 gradients, or a quarter of them.
    kept = {
        way: max(moment.sizes[KINDS.index("gradients")] for moment in record.ledger.steps[-1].timeline)
        for way, record in by.items()
    }
    assert kept["unsharded"] > 2 * kept["sharded"]  # that of one block is whole for a moment


def test_exact_sums_keep_eight_bytes_of_each_gradient() -> None:
    fast, exact = (planned(4, training={"sums": sums, "global_batch_size": 16}) for sums in ("fast", "exact"))
    kept = [max(m.sizes[KINDS.index("gradients")] for m in r.ledger.steps[-1].timeline) for r in (fast, exact)]
    assert kept[1] > 1.5 * kept[0]
    # They travel as they are, and are added where they arrive.
    assert "alltoall_base" in sent(exact, "shard")
    assert "reduce_scatter_base" not in sent(exact, "shard")


def test_published_identities() -> None:
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


@pytest.mark.parametrize(
    "parallelism",
    [
        {"tensor_parallel_degree": 2},
        {"pipeline_parallel_degree": 2, "pipeline_parallel_layers_per_stage": (2, 1)},
    ],
    ids=["shard and tensor", "pipeline"],
)
def test_layers_and_microbatches_that_are_alike_are_extended_exactly(
    parallelism: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SHAPE, n_layers=sum(parallelism.get("pipeline_parallel_layers_per_stage", (4,))))
    training = {"local_batch_size": 2, "global_batch_size": 16}
    config = config_of(parallelism=parallelism, training=training, estimate={"world_size": 4})
    few = estimate(config, shape, GPUS["h100-80"])
    monkeypatch.setattr(summary, "MICROBATCHES", 100)
    whole = estimate(asked(config, all_layers=True), shape, GPUS["h100-80"])
    assert few.figures.flops_by_phase == whole.figures.flops_by_phase
    assert few.figures.collectives == whole.figures.collectives
    # The step's tokens and labels are on the device: those of the microbatch that is left out are not.
    left_out = 2 * config.training.local_batch_size * config.training.seq_len * 8 / GIB
    for one, other in zip(few.ranks, whole.ranks, strict=True):
        assert one["peak_at"] == other["peak_at"]
        assert one["peak_reserved_gib"] == pytest.approx(other["peak_reserved_gib"], rel=0.1)
        for key in one.keys() - {"peak_at", "peak_reserved_gib"}:
            missing = other[key] - one[key]
            assert missing == pytest.approx(0, abs=1e-12) or missing == pytest.approx(left_out), key
    assert few.step_seconds == pytest.approx(whole.step_seconds, rel=0.02)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_ranks_in_the_middle_of_a_pipeline_do_what_their_first_does(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = (1,) * (4 * STAGES_PER_RANK[schedule])
    parallelism = {
        "pipeline_parallel_degree": 4,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_layers_per_stage": layers,
    }
    rows = 16 if schedule == "1F1B" else 8  # two runs of the schedule on each of two ranks, or one
    training = {"local_batch_size": 4, "global_batch_size": rows}
    config = config_of(parallelism=parallelism, training=training, estimate={"world_size": 8})
    shape = replace(SHAPE, n_layers=len(layers))
    whole = estimate(asked(config, all_layers=True), shape, GPUS["h100-80"])
    records = {record.rank: record for record in whole.records}
    monkeypatch.setattr(summary, "simulate", lambda *args, **_: records[args[3]])
    few = estimate(asked(config, all_layers=True, search=True), shape, GPUS["h100-80"])
    assert [rank["rank"] for rank in few.ranks] == [0, 2, 6]
    second, third = (record.ledger.steps[-1] for record in whole.records[1:3])
    alike = stand_in(second, 1, 2, whole.records[1].orders[2], (0, 2, 4, 6))
    assert [o.name for o in second.operations] != [o.name for o in third.operations]  # another order
    assert without_module(alike.operations) == without_module(third.operations)
    assert alike.microbatches == third.microbatches
    assert few.step_seconds == whole.step_seconds
    # The second has the most microbatches under way.
    assert few.ranks == [whole.ranks[i] for i in (0, 1, 3)]
    assert few.peak_reserved_gib == whole.peak_reserved_gib
    assert all(whole.ranks[2][key] <= whole.ranks[1][key] for key in ("peak_active_gib", "peak_reserved_gib"))


def without_module(operations: list[Operation]) -> list[Operation]:
    """Only what gathers and waits needs its module, by a number that differs between stages."""
    return [replace(o, module=re.sub(r"\d+", "", o.module) if o.fsdp or o.name == "wait" else "") for o in operations]


def test_where_layers_are_not_alike_all_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "simulate", rehearsed)
    config = config_of(
        activation_checkpoint={"mode": "selective", "selective_option": "2"},
        training={"global_batch_size": 8},
        estimate={"world_size": 2},
    )
    found, whole = (estimate(asked(config, all_layers=whole), DEEPER, GPUS["h100-80"]) for whole in (False, True))
    assert found.figures == whole.figures


# What an operation moves


def test_bytes_that_operations_move() -> None:
    aten, kib = torch.ops.aten, torch.zeros(256)
    assert moved_bytes(aten.add.Tensor, (kib, kib), {}, kib.clone()) == 3 * 1024
    assert moved_bytes(aten.add_.Tensor, (kib, kib), {}, kib) == 3 * 1024  # its own is read and written
    assert moved_bytes(aten.copy_.default, (kib, kib.bfloat16()), {}, kib) == 1024 + 512  # its own is not read
    assert moved_bytes(aten.zero_.default, (kib,), {}, kib) == 1024
    table, rows = torch.zeros(1000, 256), torch.zeros(3, dtype=torch.int64)
    assert moved_bytes(aten.embedding.default, (table, rows), {}, table[:3]) == 2 * 3 * 1024
    assert moved_bytes(aten._fused_adamw_.default, ([kib], [kib], [kib], [kib], [], []), {}, None) == 8 * 1024


def test_memory_is_taken_and_shapes_are_changed_without_a_kernel() -> None:
    ledger = Ledger("cpu")
    with ledger:
        torch.empty(4, 4).view(16)
        torch.ops.aten._unsafe_view(torch.empty(4, 4), [16])
    assert ledger.record.operations == []


def test_a_wait_for_a_collective_is_none_itself() -> None:
    x = torch.zeros(2)
    assert collective(torch.ops._c10d_functional.wait_tensor.default, (x,), x) is None


def test_real_norms_are_computed_after_a_plan() -> None:
    """A plan lets a CPU claim the kernel that a GPU has."""
    names = [o.name for o in planned(2).ledger.steps[-1].operations]
    assert names.count("_fused_rms_norm") == names.count("_fused_rms_norm_backward") == 2 * SHAPE.n_layers + 1
    x = torch.randn(2, 8)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(torch.nn.functional.rms_norm(x, (8,), eps=1e-5), expected)


def test_compiled_blocks_keep_less_and_compute_as_much() -> None:
    eager, compiled = planned(2), planned(2, compile={"enable": True})
    assert flops(compiled, "forward", "loss") == flops(eager, "forward", "loss")
    assert sum(compiled.ledger.steps[-1].peak) < sum(eager.ledger.steps[-1].peak)


def test_compiled_blocks_that_are_computed_again_under_tensor_parallelism() -> None:
    options = {"compile": {"enable": True}, "parallelism": {"tensor_parallel_degree": 2}}
    can_count = not "2.12" <= torch.__version__ < "2.13"  # limits/layout.py
    for mode in ("full", "memory_budget")[: 1 + can_count]:
        assert flops(planned(2, **options, activation_checkpoint={"mode": mode}), "recompute") > 0, mode


def test_compiled_blocks_gather_again_what_selective_checkpointing_frees_and_keep_sums() -> None:
    options = {"compile": {"enable": True}, "parallelism": {"tensor_parallel_degree": 2}}
    record = planned(2, **options, activation_checkpoint={"mode": "selective"})
    again = Counter(o.name for o in record.ledger.steps[-1].operations if o.axis and o.phase == "recompute")
    assert again == {"all_gather_into_tensor": 2 * SHAPE.n_layers}


def test_muon_keeps_half_of_adamw_s_states_for_matrices() -> None:
    kept = planned(2, optimizer={"name": "muon"}).ledger.steps[-1].kept
    elements = kept["parameters"] // 4
    matrices = elements - SHAPE.vocab_size * SHAPE.dim - SHAPE.dim * (2 * SHAPE.n_layers + 1) // 2
    assert kept["optimizer"] == pytest.approx(4 * matrices + 8 * (elements - matrices), rel=0.02)  # and the guard's


def test_offloaded_states_take_no_memory_of_the_gpu() -> None:
    offloaded = planned(2, shape=DEEPER, training={"enable_cpu_offload": True}).ledger.steps[-1]
    plain = planned(2, shape=DEEPER).ledger.steps[-1]
    assert offloaded.kept["parameters"] == offloaded.kept["optimizer"] == 0
    assert plain.kept["optimizer"] == pytest.approx(2 * plain.kept["parameters"], rel=0.01)


def test_float8_scales_are_computed_by_one_reduction() -> None:
    pytest.importorskip("torchao")
    step = planned(2, float8={"recipe": "tensorwise"}).ledger.steps[-1]
    reductions = [o.phase for o in step.operations if o.name == "all_reduce" and o.axis == "shard"]
    assert reductions == ["update"]


def test_gradients_do_not_outlive_their_step() -> None:
    first, second = planned(2).ledger.steps
    assert first.kept["gradients"] == second.kept["gradients"] == 0
    assert second.timeline[0].sizes == tuple(first.kept[kind] for kind in KINDS)


def test_padding_is_for_real_cpus_alone() -> None:
    def padded(capability: Any) -> set[str]:
        # A third of a norm's 64 elements is no multiple of them.
        return {o.name for o in planned(3, capability=capability).ledger.steps[-1].operations if "pad" in o.name}

    assert padded(None) == {"constant_pad_nd"}
    assert padded((9, 0)) == set()


@pytest.mark.parametrize("sections", [{"compile": {"enable": True}}, {"data": {"document_mask": True}}], ids=str)
def test_one_rehearsal_leaves_nothing_to_the_next(sections: dict[str, Any]) -> None:
    """What torch remembers of meshes, shapes and compiled functions belongs to one process, not to one run in it."""

    def seen(ranks: int, tensor: int) -> tuple[Any, ...]:
        parallelism = {"tensor_parallel_degree": tensor}
        ledger = planned(ranks, simulate=simulate, parallelism=parallelism, **sections).ledger
        return [(o.name, o.flops, o.bytes, o.axis, o.ranks) for o in ledger.steps[-1].operations], ledger.steps[-1].peak

    first = seen(4, 2)
    assert seen(8, 4) != first
    assert seen(4, 2) == first


# The doors


@pytest.mark.parametrize("device", ["GPU", "GPU of a pipeline", "CPU"])
def test_a_device_that_runs_out_of_memory_names_the_command(
    device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: JobConfig) -> int:
        if device == "CPU":
            torch.empty(1 << 60)
        full = torch.OutOfMemoryError("CUDA out of memory. You tried to allocate 2.00 GiB.")
        if device == "GPU of a pipeline":  # as torch.distributed.pipelining reports it
            raise RuntimeError("[Stage 1] failed to run forward: you tried to allocate") from full
        raise full

    monkeypatch.setattr(trainer, "train", full)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(RuntimeError):
        trainer.main(["--job.description", "a b"])
    said = capsys.readouterr().err
    assert "you tried to allocate" in said.lower()
    assert "python -m torchtrain.estimate --job.description 'a b' --estimate.world_size 8" in said


OPTIONS = ["--job.config_file", str(ROOT / "train_configs/debug_model.toml"), "--training.seq_len", "64"]
OPTIONS += ["--model.shape.n_layers", "2"]


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "memory.png"
    argv = [*OPTIONS, "--estimate.world_size", "4", "--parallelism.pipeline_parallel_degree", "2", "--estimate.json"]
    argv += ["--training.local_batch_size", "2"]
    assert command.main([*argv, "--estimate.picture", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 2]
    assert found["fits"] is True
    keys = {"flops_per_step_per_rank", "model_flops_per_token", "step_seconds", "tokens_per_second_per_gpu", "mfu"}
    assert all(found[key] > 0 for key in keys)
    assert {"axis", "op", "phase", "count", "bytes"} <= found["collectives"][0].keys()
    assert picture.stat().st_size > 1000


def test_a_tokenizer_that_is_not_here_leaves_the_flavors_vocabulary() -> None:
    config = from_file(str(ROOT / "train_configs/llama3_8b.toml"))
    assert shape_of(config).vocab_size == 128256
    assert shape_of(JobConfig()).vocab_size == load_tokenizer("").vocab_size


@pytest.mark.parametrize("plan", [Trainer, shape_of])
def test_documents_that_nothing_begins_are_refused(plan: Callable[[JobConfig], Any]) -> None:
    tokenizer = load_tokenizer("")
    tokenizer.bos_id = None
    config = JobConfig(data=DataConfig(document_mask=True))
    with (
        patch("torchtrain.trainer.load_tokenizer", lambda _: tokenizer),
        patch("torchtrain.planning.request.load_tokenizer", lambda _: tokenizer),
        pytest.raises(ConfigError, match="= true needs a tokenizer with a token that begins a document"),
    ):
        plan(config)


HEAD = re.compile(r"estimate.world_size (\d+)`: ([\d.]+) GiB, ([\d,]+) to ([\d,]+) tokens a second and GPU")


CONFIGS = pytest.mark.parametrize(
    "path", sorted((ROOT / "train_configs").glob("llama*.toml")), ids=lambda path: path.stem
)


@pytest.mark.parametrize("changes", [validate_estimate.PLAIN_LOSS, validate_estimate.OLD], ids=["plain", "old"])
def test_what_published_runs_did_in_another_way_is_rehearsed(changes: dict[str, Any]) -> None:
    row = replace(validate_estimate.ROWS[0], **changes)
    with patch.object(validate_estimate, "build_model_config", lambda *_: replace(TINY, n_layers=2, max_seq_len=8192)):
        assert validate_estimate.trace(row).active > 0


@CONFIGS
def test_a_step_of_a_config_that_takes_long_is_not_reported_as_a_hang(path: Path) -> None:
    told, config = HEAD.search(path.read_text()), parse(["--job.config_file", str(path)])
    assert told, path
    tokens = config.training.global_batch_size * config.training.seq_len
    slowest_seconds = tokens / int(told[1]) / float(told[3].replace(",", ""))
    assert 4 * slowest_seconds < config.comm.train_timeout_seconds


@pytest.mark.slow
@CONFIGS
def test_the_head_of_a_config_is_its_estimate(path: Path) -> None:
    told = HEAD.search(path.read_text())
    assert told, path
    found = estimate_of(parse(["--job.config_file", str(path), "--estimate.world_size", told[1]]))
    low, high = (found.tokens_per_second_per_gpu * (1 + sign * summary.INTERVAL) for sign in (-1, 1))
    assert found.fits
    expected = [found.peak_reserved_gib, low, high]
    assert [float(told[i].replace(",", "")) for i in (2, 3, 4)] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "estimate.world_size is not set"),
        (["--estimate.world_size", "6", "--parallelism.tensor_parallel_degree", "4"], "must multiply to"),
        (["--estimate.world_size", "8", "--parallelism.tensor_parallel_degree", "8"], "must divide the model's"),
        (["--estimate.world_size", "8", "--float8.recipe", "rowwise", "--estimate.gpu", "a100-80"], "8.9 or more"),
        (["--estimate.world_size", "8", "--activation_checkpoint.mode", "memory_budget"], "choice of the compiler"),
        (["--estimate.world_size", "96", "--data.name", "org/texts"], "96 data-parallel ranks must divide that"),
        (["--estimate.world_size", "8", "--estimate.search", "--estimate.json"], "estimate.search looks for one"),
    ],
)
def test_refusals_are_the_trainers(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*OPTIONS, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_search_that_is_refused_leaves_no_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["--estimate.search"]) == 2
    assert "estimate.world_size is not set" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_search_writes_what_the_trainer_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SECONDS", 4)
    best, small = tmp_path / "best.toml", ["--training.local_batch_size", "1", "--training.global_batch_size", "4"]
    argv = [*OPTIONS, *small, "--model.shape.n_layers", "6", "--estimate.world_size", "4", "--estimate.search"]
    assert command.main([*argv, "--estimate.output", str(best)]) == 0
    out = capsys.readouterr().out
    rates = [float(line.split()[-2].replace(",", "")) for line in out.splitlines() if line.endswith("%")]
    assert all(first >= second for first, second in pairwise(rates))
    config = parse(["--job.config_file", str(best)])
    assert resolve_parallel_dims(config.parallelism, 4)
    # What it rehearsed of few layers is what all of them do.
    whole = estimate_of(asked(config, world_size=4))
    assert whole.tokens_per_second_per_gpu == pytest.approx(rates[0], rel=0.03)
    assert command.main([*argv, "--estimate.memory_gib", "0.01"]) == 2
    assert "none of the" in capsys.readouterr().err


def test_a_search_may_begin_where_the_trainer_refuses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SECONDS", 0)
    argv = [*OPTIONS, "--estimate.world_size", "4", "--estimate.search", "--estimate.output", str(tmp_path / "best")]
    assert command.main([*argv, "--training.local_batch_size", "8", "--training.global_batch_size", "4"]) == 0
    training = parse(["--job.config_file", str(tmp_path / "best")]).training
    assert (training.local_batch_size <= 4, training.global_batch_size) == (True, 4)
    capsys.readouterr()
    assert command.main([*argv, "--training.global_batch_size", "5", "--estimate.world_size", "3"]) == 2
    assert "training.global_batch_size = 5 must be a multiple of" in capsys.readouterr().err


def test_what_cannot_be_written_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_work(*_: Any, **__: Any) -> None:
        pytest.fail("it rehearsed before it refused")

    monkeypatch.setattr(summary, "simulate", no_work)
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
    assert "pip install 'torchtrain[plot]'" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_was_found_is_told_before_a_disk_is_full(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SECONDS", 0)
    (tmp_path / "full.png").symlink_to("/dev/full")
    argv = [*OPTIONS, "--estimate.world_size", "1"]
    for options in (
        ["--estimate.search", "--estimate.output", "/dev/full"],
        ["--estimate.picture", str(tmp_path / "full.png")],
    ):
        assert command.main([*argv, *options]) == 2
        said = capsys.readouterr()
        assert "of which may fit" in said.out or "tokens a second and GPU" in said.out
        assert f"{options[-2][2:]} = '{options[-1]}' could not be written: No space left on device" in said.err
        assert "Traceback" not in said.err


def test_without_time_a_search_rehearses_the_layout_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SECONDS", 0)
    own = ["--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "2"]
    output = ["--estimate.output", str(tmp_path / "best.toml")]
    assert command.main([*OPTIONS, *own, *output, "--estimate.world_size", "4", "--estimate.search"]) == 0
    out = capsys.readouterr().out
    told = re.search(
        r"(\d+) of which may fit; 1 rehearsed in (\d+) s of CPU time, 1 of them fit; (\d+) passed over", out
    )
    assert told
    assert int(told[2]) > 0
    assert int(told[3]) == int(told[1]) - 1  # all but this one, which is among them
    parallelism = parse(["--job.config_file", str(tmp_path / "best.toml")]).parallelism
    assert (parallelism.tensor_parallel_degree, parallelism.data_parallel_shard_degree) == (2, 2)


def test_durations_are_those_of_closed_forms() -> None:
    e = Efficiency(kernel_seconds=0.0, collective_seconds=0.0)
    clock = Clock(GPUS["h100-80"], e, JobConfig())
    product = Operation("mm", "forward", "", flops=10**12, dtype=torch.bfloat16)
    for operation, seconds in (
        (product, 1e12 / 989e12 / e.matrices),
        (replace(product, dtype=torch.float8_e4m3fn), 1e12 / 1979e12 / e.float8),
        (replace(product, dtype=torch.float32), 1e12 / 67e12 / e.matrices),
        (replace(product, name="flash_attention", share=0.5), 0.5e12 / 989e12 / e.attention),
        (Operation("add", "forward", "", bytes=10**9), 1e9 / 3.35e12 / e.memory),
    ):
        assert clock.compute(operation) == pytest.approx(seconds)
    near, far = 450e9 * e.link, 50e9 * e.network
    for name, ranks, peer, seconds in (
        ("allgather_base", range(8), None, 7e9 / near),
        ("allreduce", range(8), None, 14e9 / near),
        ("allgather_base", range(16), None, 7.5e9 / (8 * far)),
        ("allreduce", (0, 8), None, 8e9 / far),
        ("send", (0, 8), 8, 8e9 / far),
    ):
        sent = Operation(name, "forward", "", bytes=8 * 10**9, axis="shard", ranks=tuple(ranks), peer=peer)
        assert clock.communicate(sent) == pytest.approx(seconds)


def test_what_follows_from_a_step_and_from_the_rank_with_the_most() -> None:
    place = ("forward", "")
    small = RankFigures(0, 0.0, 0.0, 0.0, [{place: (1.0,) * 6}] * 2, {0: {place: 6.0}})
    streams = {0: {place: 50.0 * GIB}, 1: {place: 8.0 * GIB}}
    large = replace(small, rank=1, by_stream=streams, scattered=2.0 * GIB)
    figures = Figures([large, small], [], {}, {"step": 0.5})
    found = Estimate(GPUS["h100-80"], ParallelDims(shard=4), figures, 4000, 172_800, 10**9, [])
    assert found.tokens_per_second_per_gpu == 2000
    assert found.mfu == pytest.approx(1e9 * 2000 / 989e12)
    assert (found.days, found.as_dict()["gpu_hours"]) == (1.0, 96.0)
    assert (found.peak_reserved_gib, found.fits) == (60.0, True)
    assert not replace(found, gpu=replace(found.gpu, memory_gib=59.0)).fits
