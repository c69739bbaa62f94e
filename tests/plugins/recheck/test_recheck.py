"""The plugin recheck names a rank that computes wrong, changes nothing, and is seen by no other hook."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_run import ForkedRun, different_tensors, finish, patched_loss, read_metrics, saved_tensors
from gloo_pool import GlooPool
from parity import TINY, Curve, config_of, train
from recheck_faults import BAD_RANK, Outcome, Planter, Replay
from torch import Tensor

from torchtrain.config.registry import HOOKS
from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.errors import ConfigError, HardwareError
from torchtrain.metrics.hooks import Hook
from torchtrain.plugins.diagnostics.loss_by_source import LossBySource
from torchtrain.plugins.diagnostics.norms import NormsByLayer
from torchtrain.plugins.recheck.hashes import CHUNK, SummandObserver, TensorHash
from torchtrain.plugins.recheck.options import RecheckConfig
from torchtrain.plugins.recheck.recheck import Device, Recheck, check_same_kind, members_of_batch_ranks
from torchtrain.plugins.recheck.vote import VOTES, Verdict, contradictions, majority, vote
from torchtrain.resolve import ResolvedRun
from torchtrain.trainer import TrainStep

SHAPE = replace(TINY, n_layers=2)
HIGH_BITS = range(20, 30)  # of the mantissa and the exponent of a float32
EACH_STEP = RecheckConfig(interval=1)
Report = list[tuple[int, dict[str, Any]]]


def rows(count: int) -> Callable[[int, int, int], Tensor]:
    """A global batch of ``count`` rows, for ``train``."""
    return partial(batch_of, count)


def batch_of(count: int, step: int, vocab_size: int, seq_len: int) -> Tensor:
    return torch.randint(0, vocab_size, (count, seq_len + 1), generator=torch.Generator().manual_seed(step))


def attach(train_step: TrainStep, kind: type[Recheck] = Recheck, options: RecheckConfig = EACH_STEP) -> Recheck:
    """Add a recheck to ``train_step``, as the plugin does."""
    world = dist.group.WORLD
    assert world is not None
    hook = kind(options, train_step, world, lambda *_: None)
    train_step.hooks.add([hook])
    return hook


# A run is the same with a recheck in each step, and all hooks see the same.


class Counter(Hook):
    def __init__(self) -> None:
        self.microbatches: list[int] = []

    def before_microbatch(self, index: int) -> None:
        self.microbatches.append(index)


def observed_run(config: JobConfig, count: int, with_recheck: bool) -> tuple[Curve, Any, Any]:
    """Train with norms by layer, losses by source and a hook that counts; returns what they have seen, and the steps
    with findings and the number of checks."""
    seen: list[Any] = []
    hooks: list[Recheck] = []
    counter = Counter()

    def add(train_step: TrainStep) -> None:
        model = train_step.model
        norms = NormsByLayer(model, 1, lambda step, found: seen.append((step, found)))
        losses = LossBySource(["a", "b", "c"], model.loss, model.mesh.loss.get_group(), model.device)
        train_step.hooks.all += [norms, losses, counter]
        if with_recheck:
            hooks.append(attach(train_step))
        seen.append(losses)

    curve = train(config, SHAPE, 2, batch=rows(count), attach=add)
    seen[0] = seen[0].metrics()
    checks = [(hook.found_in, hook.checks) for hook in hooks]
    return curve, (seen, counter.microbatches), checks


EXACT = {"training": {"sums": "exact"}}
UNCHANGED = [
    pytest.param(3, 12, EXACT, id="exact sums, three ranks"),
    pytest.param(2, 8, {"training": {"mixed_precision_param": "bfloat16"}}, id="fast sums, bfloat16"),
    pytest.param(
        4, 16, {"parallelism": {"data_parallel_replicate_degree": 2}}, id="fast sums, HSDP", marks=pytest.mark.slow
    ),
    pytest.param(
        4,
        16,
        {**EXACT, "parallelism": {"data_parallel_replicate_degree": 2}},
        id="exact sums, HSDP",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        4,
        8,
        {**EXACT, "grains": {"tensor": 2, "context": 4}, "parallelism": {"context_parallel_degree": 2}},
        id="context, grains",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        2,
        8,
        {
            **EXACT,
            "grains": {"context": 2},
            "parallelism": {"context_parallel_degree": 2, "data_parallel_shard_degree": 1},
        },
        id="context alone, grains",
        marks=pytest.mark.slow,
    ),
    pytest.param(4, 8, {**EXACT, "parallelism": {"tensor_parallel_degree": 2}}, id="tensor", marks=pytest.mark.slow),
    pytest.param(4, 8, {"parallelism": {"context_parallel_degree": 2}}, id="context", marks=pytest.mark.slow),
    pytest.param(4, 8, {"parallelism": {"pipeline_parallel_degree": 2}}, id="pipeline", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "count", "changes"), UNCHANGED)
def test_run_with_recheck_is_bitwise_identical_and_hooks_see_the_same(
    gloo: GlooPool, ranks: int, count: int, changes: dict[str, dict[str, Any]]
) -> None:
    config = config_of(**changes)
    plain = gloo.run(ranks, observed_run, config, count, False)
    checked = gloo.run(ranks, observed_run, config, count, True)
    for (curve, seen, _), (reference, expected, _) in zip(checked, plain, strict=True):
        assert curve.losses == reference.losses
        assert curve.grad_norms == reference.grad_norms
        assert different_tensors(curve.last, reference.last) == []
        assert different_tensors(curve.moments, reference.moments) == []
        assert seen == expected
    assert [checks for _, _, checks in checked] == [[([], 2)]] * ranks


# Planted flips. scripts/faults/recheck_faults.py makes the table of docs/recheck.md with the same faults.


def planted_run(
    config: JobConfig, count: int, kind: str, repeats: bool, steps: int, hook: type[Recheck] = Recheck
) -> list[Outcome]:
    planters: list[Planter] = []

    def add(train_step: TrainStep) -> None:
        planters.append(Planter(train_step, attach(train_step, hook), kind, repeats, seed=1, bits=HIGH_BITS))
        context = planters[0].attached()
        contexts.append(context)
        context.__enter__()

    contexts: list[AbstractContextManager[None]] = []
    train(config, SHAPE, steps, batch=rows(count), attach=add)
    contexts[0].__exit__(None, None, None)
    return planters[0].outcomes


HSDP = {**EXACT, "parallelism": {"data_parallel_replicate_degree": 2}}
TENSOR = {**EXACT, "parallelism": {"tensor_parallel_degree": 2}}
BOTH = [0, 1]
SLOW = pytest.mark.slow
REPLICAS = {"parallelism": {"data_parallel_replicate_degree": 3}}
PLANTED = [
    # ranks, rows, config, kind, repeats, named ranks, suspected ranks
    pytest.param(3, 12, EXACT, "forward", False, [1], [], id="forward"),
    pytest.param(3, 12, EXACT, "backward", True, [], [0, 1, 2], id="three ranks, repeats", marks=SLOW),
    pytest.param(4, 16, EXACT, "backward", True, [1], [], id="four ranks, repeats", marks=SLOW),
    pytest.param(2, 8, {}, "backward", False, [1], [], id="two ranks, fast sums", marks=SLOW),
    pytest.param(2, 8, EXACT, "backward", True, [], BOTH, id="two ranks, repeats", marks=SLOW),
    pytest.param(4, 16, HSDP, "received weights", False, [1], [], id="HSDP, received weights", marks=SLOW),
    pytest.param(4, 16, HSDP, "weight", False, [], [1, 3], id="HSDP, weight", marks=SLOW),
    pytest.param(3, 12, REPLICAS, "optimizer state", False, [1], [], id="three replicas, optimizer state"),
    pytest.param(3, 12, {}, "weight during the step", False, [], [0, 1, 2], id="a weight that all gather", marks=SLOW),
    pytest.param(4, 8, TENSOR, "backward", False, BOTH, [], id="tensor", marks=SLOW),
]


@pytest.mark.parametrize(("ranks", "count", "changes", "kind", "repeats", "named", "suspected"), PLANTED)
def test_planted_flips_name_the_right_rank(
    gloo: GlooPool,
    ranks: int,
    count: int,
    changes: dict[str, dict[str, Any]],
    kind: str,
    repeats: bool,
    named: list[int],
    suspected: list[int],
) -> None:
    for outcomes in gloo.run(ranks, planted_run, config_of(**changes), count, kind, repeats, 4):
        effective = [outcome for outcome in outcomes if outcome.changed]
        assert len(effective) >= 3  # the others have changed no bit of a gradient
        assert {(tuple(o.named), tuple(o.suspected)) for o in effective} == {(tuple(named), tuple(suspected))}
        assert [o for o in outcomes if not o.changed and (o.named or o.suspected)] == []


def stopped_run(config: JobConfig, count: int) -> tuple[str, bool]:
    """The message of the error that ends a run with a fault, and whether the weights are those before the step."""
    planters: list[Planter] = []

    def add(train_step: TrainStep) -> None:
        hook = attach(train_step, options=RecheckConfig(interval=1, on_wrong_rank="stop"))
        planters.append(Planter(train_step, hook, "backward", repeats=True, bits=HIGH_BITS))
        contexts.append(planters[0].attached())
        contexts[0].__enter__()

    contexts: list[AbstractContextManager[None]] = []
    with pytest.raises(HardwareError) as error:
        train(config, SHAPE, 3, batch=rows(count), attach=add)
    contexts[0].__exit__(None, None, None)
    unchanged = zip(planters[0].states(), planters[0].saved, strict=True)
    return str(error.value), all(torch.equal(tensor, saved) for tensor, saved in unchanged)


def test_stop_raises_the_same_error_on_all_ranks_before_the_update(gloo: GlooPool) -> None:
    (first, unchanged), *others = gloo.run(3, stopped_run, config_of(**EXACT), 12)
    assert first.startswith("step 1: rank 1 on ")
    assert re.search(
        r"computes wrong, or rank 0 on \S+ \(cpu\), rank 2 on \S+ \(cpu\) have the same fault; found", first
    )
    assert unchanged
    assert others == [(first, True)] * 2


@pytest.mark.slow
def test_replay_on_the_same_rank_does_not_see_a_fault_that_repeats(gloo: GlooPool) -> None:
    for repeats in (False, True):
        for outcomes in gloo.run(3, planted_run, config_of(**EXACT), 12, "backward", repeats, 4, Replay):
            if repeats:
                assert [outcome for outcome in outcomes if outcome.named] == []
            else:
                assert [outcome for outcome in outcomes if outcome.changed] != []
                assert [outcome for outcome in outcomes if outcome.named != [BAD_RANK] * outcome.changed] == []


# The run as a whole.


def wrong_from_step(first: int) -> AbstractContextManager[None]:
    """On rank 1, scale the loss of the block's last step and later: a fault that repeats. With one microbatch per rank
    and a check in each step, step ``n`` computes the losses 2n - 1 and 2n."""

    def change(call: int, losses: Tensor) -> Tensor:
        return losses * (1 + 2.0**-20) if call >= 2 * first - 1 else losses

    wrong: AbstractContextManager[None] = patched_loss(change)
    return wrong if os.environ["RANK"] == str(BAD_RANK) else nullcontext()


class OneForward(Hook):
    """Observes the model from the beginning of a step to its end, in which there must be one forward."""

    def __init__(self, trainer: Any) -> None:
        self.block = trainer.model.model_parts[0].layers["0"]

    def before_step(self, step: int, batch: Any) -> None:  # noqa: ARG002
        self.forwards = 0
        self.handle = self.block.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.forwards += 1

    def after_step(self, step: int, *_: Any) -> None:
        self.handle.remove()
        assert self.forwards == 1, f"{self.forwards} forwards in step {step}"


def count_forwards() -> None:
    HOOKS.add("a hook whose name comes before that of recheck", OneForward)


RANKS = 4
PLAIN = ("--training.global_batch_size", "4", "--diagnostics.norms_freq", "1", "--diagnostics.enable_loss_by_source")
OPTIONS = (*PLAIN, "--recheck.interval", "1")


def numbers_of_step(folder: Path, step: int) -> dict[str, Any]:
    """Losses, norms and logits of a step in the metrics, those of each layer and source, too."""
    kinds = ("loss", "grad_norm", "norm_", "rms_", "max_", "source_", "tokens")
    lines = [line for line in read_metrics(folder) if line["step"] == step and "event" not in line]
    return {k: v for line in lines for k, v in line.items() if k.startswith(kinds) and k != "tokens_per_second"}


def test_stop_ends_all_ranks_with_one_message_and_no_checkpoint_of_the_step(tmp_path: Path) -> None:
    stop = ("--recheck.on_wrong_rank", "stop", "--checkpoint.async_mode", "disabled")
    run = ForkedRun(tmp_path, *OPTIONS, *stop, ranks=RANKS, hook=partial(wrong_from_step, 4))
    assert run.wait() == [HardwareError.exit_code] * RANKS, run.output()
    (error,) = (line for line in run.output().splitlines() if "error: " in line)
    assert "step 4: rank 1 on " in error
    assert "computes wrong; found in the gradient of norm and output" in error
    assert "The last check that found nothing: step 3" in error
    (event,) = (line for line in read_metrics(tmp_path) if line.get("event") == "wrong_rank")
    assert (event["step"], event["named"], event["ranks"]) == (4, True, [1])
    assert sorted(path.name for path in tmp_path.glob("checkpoint/step-*")) == ["step-2"]


def test_warn_records_each_finding_and_continues(tmp_path: Path) -> None:
    options = ("--training.global_batch_size", "2", "--training.steps", "5", "--recheck.interval", "1")
    fingerprints = ("--comparison.fingerprint_steps", "4")  # which a check would disturb
    output = finish(tmp_path, *options, *fingerprints, hook=partial(wrong_from_step, 3))
    events = [line for line in read_metrics(tmp_path) if line.get("event") == "wrong_rank"]
    assert [(event["step"], event["named"], event["ranks"]) for event in events] == [(3, False, BOTH), (5, False, BOTH)]
    assert output.count("one of these computes wrong: rank 0 on ") == 2
    assert "4 checks: different bits in steps 3, 5" in output


@pytest.mark.slow
def test_start_after_a_stop_ends_like_a_run_without_checks(tmp_path: Path) -> None:
    options = (*OPTIONS, "--recheck.on_wrong_rank", "stop")
    run = ForkedRun(tmp_path, *options, ranks=RANKS, hook=partial(wrong_from_step, 4))
    assert run.wait() == [HardwareError.exit_code] * RANKS, run.output()
    output = finish(tmp_path, *options, ranks=RANKS, hook=count_forwards)
    assert "no wrong rank" in output
    finish(tmp_path / "plain", *PLAIN, ranks=RANKS)
    for step in (1, 3, 8):
        assert {"loss", "rms_output_layers.0", "max_logits_layers.0"} <= numbers_of_step(tmp_path, step).keys()
        assert numbers_of_step(tmp_path, step) == numbers_of_step(tmp_path / "plain", step)
    assert different_tensors(saved_tensors(tmp_path, 8), saved_tensors(tmp_path / "plain", 8)) == []


# What is rejected.

REJECTED = [
    (ParallelDims(tensor=2), {}, "needs at least two data-parallel ranks"),
    (ParallelDims(shard=2), {"parallelism": {"fsdp_gradient_accumulation": "unsharded"}}, "= 'sharded'"),
    (
        ParallelDims(shard=2, pipeline=2),
        {"parallelism": {"pipeline_parallel_schedule": "ZBVZeroBubble"}},
        "take '1F1B', or set interval = 0",
    ),
]


@pytest.mark.parametrize(("degrees", "changes", "message"), REJECTED)
def test_layouts_without_comparable_gradients_are_rejected(
    degrees: ParallelDims, changes: dict[str, dict[str, Any]], message: str
) -> None:
    config = config_of(**changes)
    with pytest.raises(ConfigError, match=message):
        EACH_STEP.check_run(run_of(config, degrees), torch.device("cpu"))
    RecheckConfig().check_run(run_of(config, degrees), torch.device("cpu"))


def run_of(config: JobConfig, degrees: ParallelDims) -> ResolvedRun:
    unused: Any = None
    return ResolvedRun(config, unused, unused, degrees)


def test_gpus_need_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(config: JobConfig) -> None:
        EACH_STEP.check_run(run_of(config, ParallelDims(shard=2)), torch.device("cuda"))

    with pytest.raises(ConfigError, match=r"set training.deterministic = true"):
        check(config_of())
    deterministic = {"training": {"deterministic": True}}
    check(config_of(**deterministic))
    for compiled in ({"compile": {"enable": True}}, {"data": {"document_mask": True}}):
        config = config_of(**deterministic, **compiled)
        monkeypatch.delenv("TORCHINDUCTOR_DETERMINISTIC", raising=False)
        with pytest.raises(ConfigError, match=r"set TORCHINDUCTOR_DETERMINISTIC=1"):
            check(config)
        monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "1")
        check(config)


def test_rejected_before_any_work(tmp_path: Path) -> None:
    run = ForkedRun(tmp_path, "--recheck.interval", "1", ranks=1)
    assert run.wait() == [2]
    assert "recheck.interval = 1 compares" in run.output()
    assert not (tmp_path / "checkpoint").exists()


def test_a_gpu_is_named_by_its_number_model_and_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H100", uuid="5d0e41c2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    device = Device.of(torch.device("cuda", 3))
    assert device.name == "cuda:3, NVIDIA H100 5d0e41c2"
    assert device.kind == f"NVIDIA H100, torch {torch.__version__}"


def test_devices_of_several_kinds_are_rejected() -> None:
    devices = [Device("a", "cuda:0", "H100, torch 2"), Device("b", "cuda:0", "H200, torch 2")]
    with pytest.raises(ConfigError, match="rank 0 on a has H100, torch 2, rank 1 on b has H200, torch 2"):
        check_same_kind(devices)
    check_same_kind(devices[:1] * 2)


# Hashes and votes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_hash_depends_on_each_bit_and_its_place(dtype: torch.dtype) -> None:
    hash_of = TensorHash(torch.device("cpu"))
    size = CHUNK["cpu"] * 9 // 4 + 1  # several chunks, and an odd number of elements
    tensor = torch.randint(0, 2**8, (size,), generator=torch.Generator().manual_seed(1)).to(dtype)
    original = int(hash_of(tensor))
    assert int(hash_of(tensor.clone())) == original
    bits = tensor.view(torch.uint8)
    found = {original}
    places = [0, 1, len(bits) // 2, len(bits) - 1]
    for place in places:
        for bit in range(8):
            bits[place] ^= 1 << bit
            found.add(int(hash_of(tensor)))
            bits[place] ^= 1 << bit
    assert len(found) == 1 + 8 * len(places)
    signs = tensor.clone()
    signs[[3, 5]] *= -1  # the same change of two words
    assert (int(hash_of(signs)) == original) == (dtype == torch.uint8 and bool((signs == tensor).all()))
    assert int(hash_of(tensor.flip(0))) != original
    assert int(hash_of(tensor[:0])) == 0


def test_discarded_summands_leave_each_bit_of_the_gradient() -> None:
    """Also a negative zero, to which a positive one must not be added."""
    observer = SummandObserver(TensorHash(torch.device("cpu")))
    observer.start(discard=True)
    summands, gradient = torch.ones(4), torch.tensor([-0.0, 0.0, 1.5, -1.0])
    observer.see("group", summands)
    assert torch.equal((gradient + summands).view(torch.int32), gradient.view(torch.int32))


def test_hash_depends_on_the_order_of_chunks() -> None:
    hash_of = TensorHash(torch.device("cpu"))
    first, second = torch.rand(2, CHUNK["cpu"])
    assert int(hash_of(torch.cat((first, second)))) != int(hash_of(torch.cat((second, first))))


def computed(
    ranks: int, votes: int, faults: dict[int, str], distances: Sequence[int] = range(VOTES)
) -> list[list[str]]:
    """What the ranks compute of the microbatches; those of ``faults`` compute wrong at ``distances``."""
    return [
        [
            f"microbatch {(rank - distance) % ranks}{faults.get(rank, '') if distance in distances else ''}"
            for rank in range(ranks)
        ]
        for distance in range(votes)
    ]


@pytest.mark.parametrize("ranks", range(4, 8))
def test_vote_names_the_only_wrong_rank_whatever_it_computes(ranks: int) -> None:
    votes = min(ranks, VOTES)
    for bad in range(ranks):
        for case in range(1 << votes):
            wrong_at = [distance for distance in range(votes) if case >> distance & 1]
            wrong = {bad} if case & 3 else set()
            assert vote(computed(ranks, votes, {bad: "x"}, wrong_at)) == Verdict(wrong), (bad, case)


@pytest.mark.parametrize("ranks", range(3, 9))
@pytest.mark.parametrize("apart", [1, 2])
def test_two_ranks_with_the_same_fault_do_not_get_another_one_named(ranks: int, apart: int) -> None:
    votes = min(ranks, VOTES)
    for first in range(ranks):
        bad = {first: "x", (first + apart) % ranks: "x"}
        verdict = vote(computed(ranks, votes, bad))
        if ranks < VOTES:
            assert verdict.wrong == set()
            assert verdict.suspects >= bad.keys()
        else:
            assert verdict == Verdict({*bad})
        if ranks == 3:
            assert verdict == Verdict(set(), {0, 1, 2}, {0, 1, 2} - bad.keys())


def test_three_ranks_name_only_the_one_that_contradicts_itself() -> None:
    for bad in range(3):
        for distances in ([0], [1], [0, 1, 2]):
            hashes = computed(3, 3, {bad: "x"}, distances)
            assert vote(hashes) == Verdict(set(), {0, 1, 2}, {bad})
            assert contradictions(hashes, computed(3, 3, {})) == Verdict({bad})
            assert contradictions(hashes, hashes) == Verdict(set(), {0, 1, 2}, {bad})


def test_two_ranks_name_only_the_one_that_contradicts_itself() -> None:
    right = [["a", "b"], ["b", "a"]]  # own microbatches; that of the other rank
    assert not contradictions(right, right)
    wrong_once = [["x", "b"], ["b", "a"]]
    assert contradictions(wrong_once, right) == Verdict({0})
    assert contradictions(wrong_once, wrong_once) == Verdict(set(), {0, 1})
    assert contradictions([["a", "b"], ["b", "x"]], right) == Verdict({1})


def test_majority_of_replicas() -> None:
    assert not majority("aabb", [(0, 1), (2, 3)])
    assert majority("axa", [(0, 1, 2)]) == Verdict({1})
    assert majority("abax", [(0, 2), (1, 3)]) == Verdict(set(), {1, 3})
    assert majority("abc", [(0, 1, 2)]) == Verdict(set(), {0, 1, 2})


def test_ranks_that_share_weights_are_not_all_named() -> None:
    verdict = Verdict({0, 1, 3})
    verdict.doubt([(0, 1), (2, 3)])
    assert verdict == Verdict({3}, {0, 1})
    alone = Verdict({0})
    alone.doubt([(0,), (1,)])
    assert alone == Verdict({0})


def test_members_of_a_data_parallel_rank() -> None:
    assert members_of_batch_ranks(ParallelDims(shard=2, tensor=2)) == [[0, 1], [2, 3]]
    degrees = ParallelDims(pipeline=2, replicate=2, context=2)
    assert members_of_batch_ranks(degrees) == [[0, 1, 4, 5], [2, 3, 6, 7]]
