"""Metrics: metrics.jsonl, the log, TensorBoard, Weights & Biases, stragglers and profiler traces."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from captured_log import captured_log
from forked_run import read_metrics
from gloo_pool import GlooPool
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtrain.config.schema import JobConfig
from torchtrain.devices import peak_flops
from torchtrain.metrics.history import Run, validation_losses
from torchtrain.metrics.hooks import Hook, Hooks, RunResults
from torchtrain.metrics.options import MetricsConfig, ProfilingConfig
from torchtrain.metrics.profiler import Profiler
from torchtrain.metrics.recorder import MetricsRecorder, duration, peak_memory, step_words
from torchtrain.metrics.run_description import RunDescription
from torchtrain.metrics.writers import has_validation
from torchtrain.models.loss import TokenLoss

CONFIG = '[training]\nsteps = 40\n[data]\nsources = ["a"]\n'


def recorder_in(folder: str, start_step: int = 0, **options: Any) -> MetricsRecorder:
    return MetricsRecorder(
        MetricsConfig(**{"log_freq": 1, **options}),
        Path(folder),
        device=torch.device("cpu"),
        loss_group=dist.group.WORLD,
        tokens_per_step=100,
        tokens_after=lambda step: 100 * step,
        flops_per_token=6,
        peak_flops=None,
        start_step=start_step,
        last_step=40,
        config_toml=CONFIG,
        run="a",
    )


def record_steps(folder: str, options: dict[str, Any], start_step: int, steps: int) -> None:
    with recorder_in(folder, start_step, **options) as recorder:
        for step in range(start_step + 1, steps + 1):
            recorder.record(step, TokenLoss(torch.tensor(3.0 * step), torch.tensor(2)), torch.tensor(0.5), 1e-3)
            if step == 3:
                recorder.record_event(step, "bad_step_skip", {"problem": "not finite", "loss": float("nan")})


def record_validations(folder: str, steps: list[int]) -> list[str]:
    """The log of validations after ``steps`` whose losses are 10 minus the step, after a start at step 4."""
    with captured_log() as texts, recorder_in(folder, start_step=4) as recorder:
        for step in steps:
            names = ("loss", "perplexity", "bits_per_byte", "tokens")
            recorder.record_validation(step, {f"validation_{name}": 10 - step for name in names})
            (Path(folder) / "metrics.jsonl").write_text("")  # not read again
    return [text.rpartition("; the best ")[2] for text in texts if text.startswith("validation after")]


def test_best_validation_is_that_of_the_steps_before(gloo: GlooPool, tmp_path: Path) -> None:
    earlier = [{"step": 2, "validation_loss": 5.5}, {"step": 3, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in earlier))
    (texts,) = gloo.run(1, record_validations, str(tmp_path), [5, 8, 6, 7])  # rolled back from step 8
    assert texts == ["so far", "so far", "so far", "so far"]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 2, "validation_loss": 2.5}) + "\n")
    (texts,) = gloo.run(1, record_validations, str(tmp_path), [5, 8, 6])
    assert texts == ["was 2.5000 after step 2", "so far", "was 2.5000 after step 2"]


def test_metrics_and_events_are_appended_after_a_restart(gloo: GlooPool, tmp_path: Path) -> None:
    gloo.run(2, record_steps, str(tmp_path), {}, 0, 4)
    gloo.run(2, record_steps, str(tmp_path), {}, 2, 5)
    lines = read_metrics(tmp_path)
    logged = [(line["step"], line.get("event", "metrics")) for line in lines]
    first = [(0, "start"), (1, "metrics"), (2, "metrics"), (3, "metrics"), (3, "bad_step_skip"), (4, "metrics")]
    assert logged == [*first, (2, "start"), (3, "metrics"), (3, "bad_step_skip"), (4, "metrics"), (5, "metrics")]
    assert [line["loss"] for line in lines if "event" not in line] == [1.5, 3.0, 4.5, 6.0, 4.5, 6.0, 7.5]
    skip = next(line for line in lines if line.get("event") == "bad_step_skip")
    assert skip["loss"] is None
    assert lines[0]["ranks"] == 2


def record_with_a_fake_clock(folder: str) -> None:
    """Record three steps, of which the first and the last are logged. Loss, tokens and data wait differ by rank."""
    rank, now = dist.get_rank(), 0.0

    class Batches:
        wait_seconds = 0.5 * rank

        def __iter__(self) -> Iterator[None]:
            yield from [None] * 3

    loss = TokenLoss(*(torch.tensor((a, b)[rank]) for a, b in ((6.0, 4.0), (3, 1), (0.3, 0.1))))
    with (
        patch("torchtrain.metrics.recorder.time.perf_counter", lambda: now),
        recorder_in(folder, log_freq=3, enable_tensorboard=False) as recorder,
    ):
        recorder.peak_flops = 1000.0
        for step, _ in enumerate(recorder.time_waiting(Batches()), 1):  # type: ignore[arg-type]
            now += 2.0
            recorder.record(step, loss, torch.tensor(0.5), 1e-3)
            with recorder.untimed():
                now += 5.0


def test_logged_metrics_are_reduced_over_ranks(gloo: GlooPool, tmp_path: Path) -> None:
    gloo.run(2, record_with_a_fake_clock, str(tmp_path))
    _, first, last = read_metrics(tmp_path)
    assert first.pop("memory_gib") > 0
    expected = {"loss": 2.5, "loss_max": 4.0, "z_loss": 0.1, "grad_norm": 0.5, "lr": 1e-3, "step_seconds": 2.0}
    # 100 tokens on 2 ranks in 2 seconds; 6 FLOPs per token; a peak of 1000 FLOPs per second.
    expected |= {"step": 1, "tokens": 100, "tokens_per_second": 25.0, "mfu": 0.15, "data_wait_fraction": 0.25}
    assert first == pytest.approx(expected)
    assert {key: last[key] for key in expected} == pytest.approx(expected | {"step": 3, "tokens": 300})


def test_tensorboard_has_grouped_curves_the_config_and_faults(gloo: GlooPool, tmp_path: Path) -> None:
    gloo.run(1, record_steps, str(tmp_path), {}, 0, 4)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    groups = {tag.split("/")[0] for tag in events.Tags()["scalars"]}
    assert groups == {"loss", "optimization", "throughput", "memory", "data", "faults"}
    assert [(e.step, e.value) for e in events.Scalars("loss/average")] == [(1, 1.5), (2, 3.0), (3, 4.5), (4, 6.0)]
    assert [(e.step, e.value) for e in events.Scalars("faults/bad_step_skip")] == [(3, 1.0)]
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "steps = 40" in text
    hparams = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"training.steps" in hparams


def record_at(seconds: float, *arguments: Any) -> None:
    with patch("torchtrain.metrics.writers.time.time", lambda: seconds):
        record_steps(*arguments)


@pytest.mark.parametrize("first_clock", [2e9, 300.0])
def test_tensorboard_shows_the_last_start_even_if_the_clock_goes_back(
    gloo: GlooPool, tmp_path: Path, first_clock: float
) -> None:
    gloo.run(1, record_at, first_clock, str(tmp_path), {}, 0, 4)
    gloo.run(1, record_at, 1e9, str(tmp_path), {}, 2, 5)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("loss/average")] == [1, 2, 3, 4, 5]


def test_validation_losses_are_finite_and_of_steps_that_are_not_undone(tmp_path: Path) -> None:
    assert validation_losses(tmp_path) == {}
    lines: list[dict[str, Any]] = [
        {"step": 2, "validation_loss": 3.0},
        {"step": 4, "validation_loss": None},  # was not finite
        {"step": 6, "validation_loss": 1.0},
        {"step": 4, "event": "rolled_back"},
        {"step": 5, "loss": 2.0},
        {"step": 5, "validation_ema_loss": 2.5},  # of averaged weights alone
        {"step": 6, "stage": "anneal", "validation_loss": 2.75, "validation_ema_loss": 2.5},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 7, "validation_lo')
    assert validation_losses(tmp_path) == {2: ("", 3.0), 5: ("", 2.5), 6: ("anneal", 2.75)}


def test_logged_validation_is_valid_until_the_run_restarts_before_its_step(tmp_path: Path) -> None:
    file, four = tmp_path / "metrics.jsonl", '{"step": 4, "validation_loss": 2.5}\n'
    assert not has_validation(file, 4)
    file.write_text('{"step": 0, "event": "start"}\n{"step": 4, "loss": 2.4}\n' + four[:-9])
    assert not has_validation(file, 4)  # truncated line
    file.write_text(four)
    for start, found in ((4, True), (6, True), (2, False)):
        file.write_text(file.read_text() + f'{{"step": {start}, "event": "start"}}\n')
        assert has_validation(file, 4) is found
    file.write_text(file.read_text() + four)
    assert has_validation(file, 4)
    assert not has_validation(file, 5)
    file.write_text(
        file.read_text() + '{"step": 6, "event": "bad_step_rollback"}\n{"step": 4, "event": "rolled_back"}\n'
    )
    assert has_validation(file, 4)
    file.write_text(file.read_text() + '{"step": 2, "event": "rolled_back"}\n')
    assert not has_validation(file, 4)


def test_peak_flops_are_not_those_of_a_gpu_whose_name_is_a_substring() -> None:
    peaks = {"H100 80GB HBM3": 989e12, "H200": 989e12, "H200 NVL": 835e12, "B200": 2.25e15, "GB200": 2.5e15}
    assert {name: peak_flops(f"NVIDIA {name}") for name in peaks} == peaks


def test_log_line_has_the_remaining_time() -> None:
    line = dict.fromkeys(("loss", "grad_norm", "lr", "tokens_per_second", "memory_gib", "data_wait_fraction"), 1.0)
    line |= {"step": 10, "tokens": 20480, "step_seconds": 2.0, "mfu": None}

    def text(line: dict[str, Any], width: int | None = None, left: int = 90) -> str:
        return "  ".join(word for _, word in step_words(line, 100, left, width, {}))

    assert text(line).startswith(
        "step  10/100  20.5K tokens  loss 1.0000  grad norm 1.000  lr 1.00e+00        1 tokens"
    )
    assert text(line).endswith("2.000 s/step  1.00 GiB  data wait 100.0%   3m00s left")
    assert "left" not in text(line, left=0)
    assert text(line, 70) == "step  10/100  loss 1.0000  norm 1.000        1 tok/s   3m00s left"
    assert text(line, 5) == "step  10/100  loss 1.0000"
    large = {**line, "tokens_per_second": 1e6, "tokens": 1.05e12, "mfu": 0.5, "step": 1}
    assert len("  ".join(word for _, word in step_words(large, 1_000_000, 999_999, 111, {}))) <= 111
    assert [duration(s) for s in (59.7, 41, 3725, 187200)] == ["1m00s", "41s", "1h02m", "2d04h"]


def test_words_of_step_lines_stay_below_each_other() -> None:
    """From the first line, with a large loss and gradient and a small rate, to the last, which has no time left."""
    names = ("step", "loss", "grad_norm", "tokens_per_second", "step_seconds", "tokens")
    numbers = [
        *((1, 12.0312, 118.935, 130.0, 15.7, 2048), (10, 6.4808, 1.709, 98220.0, 0.02, 20480)),
        *((20, 6.1030, 11.047, 312301.0, 0.007, 40960), (100, 4.8784, 1.251, 305156.0, 0.007, 204800)),
    ]
    other = {"lr": 1e-3, "mfu": None, "memory_gib": 0.8, "data_wait_fraction": 0.0}
    for width in (71, 91, 111, None):
        columns: dict[int, int] = {}
        lines = []
        for values in numbers:
            line = dict(zip(names, values, strict=True)) | other
            left = 0 if line["step"] in (1, 100) else 100 - int(line["step"])
            lines.append("  ".join(word for _, word in step_words(line, 100, left, width, columns)))
        labels = ("loss", "tok/s" if width == 71 else "tokens/s", "norm", *(["lr", "s/step"] if width is None else []))
        for label in labels:
            assert len({line.index(label) for line in lines}) == 1, lines
        assert width is None or max(map(len, lines)) <= width, lines
        assert [line.endswith("left") for line in lines] == [False, True, True, False]


def test_memory_of_a_gpu_is_that_of_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    reset: list[torch.device] = []
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {device: 3 << 30}.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", {device: 4 << 30}.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_stats", {device: {"num_alloc_retries": 2}}.__getitem__)
    total = SimpleNamespace(total_memory=16 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {device: total}.__getitem__)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    memory = peak_memory(device)
    assert memory == {
        "memory_gib": 3.0,
        "memory_reserved_gib": 4.0,
        "memory_fraction": 0.25,
        "memory_alloc_retries": 2.0,
    }
    assert reset == [device]
    line = dict.fromkeys(("step", "tokens", "loss", "grad_norm", "lr", "tokens_per_second", "step_seconds"), 1.0)
    words = step_words({**line, "mfu": None, "data_wait_fraction": 0.0, **memory}, 1, 0, None, {})
    assert "3.00 GiB (25% reserved)" in [word for _, word in words]


def test_no_trace_is_written_for_a_step_that_did_not_run(tmp_path: Path) -> None:
    with Profiler(
        ProfilingConfig(enable_profiling=True, profile_freq=3), tmp_path, 0, torch.device("cpu"), 0
    ) as profiler:
        for step in range(1, 6):  # the profiler records the step after the second and after the fifth
            torch.ones(2).relu()
            profiler.step(step)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_time_of_writing_a_trace_is_not_that_of_training_steps(tmp_path: Path) -> None:
    files_at: list[int] = []

    @contextmanager
    def untimed() -> Iterator[None]:
        files_at.append(len(list(tmp_path.rglob("*.json.gz"))))
        yield
        files_at.append(len(list(tmp_path.rglob("*.json.gz"))))

    config = ProfilingConfig(enable_profiling=True, profile_freq=3)
    with Profiler(config, tmp_path, 0, torch.device("cpu"), 0, untimed) as profiler:
        for step in range(1, 4):
            torch.ones(2).relu()
            profiler.step(step)
    assert files_at == [0, 1]


def test_trace_is_named_by_its_step_after_a_rollback(tmp_path: Path) -> None:
    with Profiler(
        ProfilingConfig(enable_profiling=True, profile_freq=3), tmp_path, 0, torch.device("cpu"), 4
    ) as profiler:
        for step in (5, 6, 5, 6):
            torch.ones(2).relu()
            profiler.step(step)
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]


def test_profiler_keeps_the_events_of_one_trace_in_memory(tmp_path: Path) -> None:
    kept = []
    with Profiler(
        ProfilingConfig(enable_profiling=True, profile_freq=3), tmp_path, 0, torch.device("cpu"), 0
    ) as profiler:
        assert profiler.profile is not None
        for step in range(1, 10):
            torch.ones(2).relu()
            profiler.step(step)
            if step % 3 == 0:
                kept.append(len(profiler.profile.events() or ()))
    assert kept == [kept[0]] * 3


def test_peak_memory_is_in_gib() -> None:
    assert 0.03 < peak_memory(torch.device("cpu"))["memory_gib"] < 4096  # importing torch takes more than 32 MiB


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"loss": 1.0}, "Odd.metrics returned loss, which has another meaning"),
        ({"event": 1.0}, "Odd.metrics returned event, which has another meaning"),
        ({"validation_loss": 1.0}, "Odd.metrics returned validation_loss, which has another meaning"),
        ({"mine": torch.tensor(1.0)}, "Odd.metrics returned mine, a Tensor: give a number"),
    ],
)
def test_wrong_numbers_of_a_hook_are_rejected(found: dict[str, Any], message: str) -> None:
    class Odd(Hook):
        def metrics(self) -> dict[str, Any]:
            return found

    with pytest.raises(TypeError, match=message):
        Hooks(Odd()).add_metrics({"step": 1, "loss": 2.0})


def record_with_a_rollback(folder: str) -> list[int]:
    undone = []

    class Watch(Hook):
        def undo(self, step: int) -> None:
            undone.append(step)

    with recorder_in(folder, log_freq=4) as recorder:
        recorder.hooks.add([Watch()])
        recorder.undo(2)
    return undone


def test_hooks_are_called_after_a_rollback(gloo: GlooPool, tmp_path: Path) -> None:
    assert gloo.run(1, record_with_a_rollback, str(tmp_path)) == [[2]]


def test_first_hooks_are_called_before_the_others() -> None:
    class First(Hook):
        is_first = True

    class Other(Hook):
        pass

    hooks = Hooks(Other())
    hooks.add([None, Other(), First()])
    assert [type(hook) for hook in hooks.all] == [First, Other, Other]


def test_hook_that_fails_at_the_end_does_not_take_the_results_of_others() -> None:
    class Fails(Hook):
        def results(self, results: RunResults) -> list[tuple[str, str]]:
            raise ValueError(results.rows)

    class Works(Hook):
        def results(self, results: RunResults) -> list[tuple[str, str]]:
            return [("mine", str(results.rows))]

    results = RunResults(JobConfig(), Run("run", [], [], [], []), RunDescription("", [], {}), [], [])
    with captured_log() as log:
        assert Hooks(Fails(), Works()).results(results) == [("mine", "[]")]
    assert "the results of Fails" in "".join(log)
