"""What torchtrain.estimate prints and draws: the verdict first, words for collectives, named phases."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import pytest
from forked_command import run_command
from terminal import Terminal

from torchtrain import estimate as command
from torchtrain.config.parse import parse
from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.parallelisms.options import ActivationCheckpointConfig
from torchtrain.plugins.planner.advice import advice
from torchtrain.plugins.planner.hardware import GIB, GPUS
from torchtrain.plugins.planner.report import (
    draw_memory,
    format_estimate,
    format_ranking,
    format_stages,
    merged_phases,
    verdict,
)
from torchtrain.plugins.planner.request import resolve_gpu, resolve_model_config
from torchtrain.plugins.planner.summary import Estimate, RankMemory, StepCosts, estimate

OPTIONS = ["--job.config_file", "train_configs/debug_model.toml", "--training.global_batch_size", "8"]
OPTIONS += ["--model.shape.n_layers", "1"]  # a layer takes as long as all else
SEARCHED = r"^[0-9:]+ layout (\d+) of \d+: .*: [\d.]+ GiB, .*; the best so far ([\d,]+) tokens/s$"


def test_estimate_begins_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*OPTIONS, "--estimate.world_size", "4", "--parallelism.tensor_parallel_degree", "2"]
    assert command.main([*argv, "--training.local_batch_size", "4"]) == 0
    fits, duration, _, *rows = capsys.readouterr().out.splitlines()
    n = "[0-9.,]+"
    assert re.match(f"fits: {n} of 79.1 GiB; {n} to {n} tokens/s a GPU; MFU {n}%", fits)
    assert re.fullmatch(f"{n} to {n} seconds, under 0.01 GPU-hours", duration)
    assert [" ".join(row.split()) for row in rows[:6]] == [
        "model 2.88M parameters, vocabulary of 4,096 from the package's tokenizer",
        "GPUs 4 of 989 TFLOP/s in bfloat16",
        "machines 8 GPUs each, 3,600 Gb/s between two of them; 3,200 Gb/s to others",
        "attention cuDNN, as PyTorch chooses if it is newer than 9.15",
        "layout shard 2, tensor 2",
        "length 100 steps of 2.05K tokens, 205K in all",
    ]
    assert max(map(len, (fits, duration, *rows))) <= 80
    named = [line for line in rows if line.startswith(("shard: ", "tensor: "))]
    assert [line for line in named if line.startswith("shard: reduce-scatter, backward ")] != []
    assert [line for line in named if line.startswith("tensor: all-gather of activations, forward ")] != []
    assert [line for line in named if "_" in line] == []


def test_network_is_that_of_a_machine_and_attention_that_of_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--estimate.gpus_per_node", "2", "--estimate.network_gigabits", "200", "--estimate.world_size", "2"]
    options += ["--training.local_batch_size", "2"]
    config = parse([*OPTIONS, *options], "torchtrain.estimate", "")
    assert resolve_gpu(config).network_bandwidth == 200e9 / 8 / 2
    for argv, kernel in (
        (["--training.deterministic"], "FlashAttention 2"),
        (["--data.document_mask", "--training.seq_len=256"], "flex_attention, with the speed of FlashAttention 2"),
        (["--parallelism.context_parallel_degree=2"], "FlashAttention 2"),
    ):
        assert command.main([*OPTIONS, *options, *argv]) == 0
        machines, attention = capsys.readouterr().out.splitlines()[5:7]
        assert machines == "  machines   2 GPUs each, 3,600 Gb/s between two of them; 200 Gb/s to others"
        assert attention == f"  attention  {kernel}"


@cache
def on_one_gpu() -> tuple[JobConfig, Estimate]:
    config = parse([*OPTIONS, "--estimate.world_size", "1"], "", "")
    return config, estimate(config, resolve_model_config(config), resolve_gpu(config))


def test_tables_of_a_large_run_fit_80_columns_and_have_plain_numbers() -> None:
    config, found = on_one_gpu()
    text = format_estimate(found)
    assert "collectives" not in text  # one GPU has none
    memory = RankMemory(
        0, 3 * GIB, 3 * GIB, 7 * GIB, [{("loss", ""): (40.0 * GIB,) * 6}] * 2, {0: {("", ""): 99.5 * GIB}}
    )
    other = replace(memory, rank=1, peaks=[{("backward", "layers.30.feed_forward"): (1.0 * GIB,) * 6}] * 2)
    collective = {"axis": "shard", "op": "all_gather_into_tensor", "phase": "forward", "count": 2176, "bytes": 1e12}
    flops = {"forward": 9.57e15, "loss": 4.295e9}
    large = StepCosts(
        [memory, other], [collective], flops, {"step": 50.0, "forward": 50.0}, {"forward, attention": 12.5}
    )
    text = format_estimate(replace(found, costs=large))
    assert max(map(len, text.splitlines())) <= 80
    assert "peak in loss on rank 0; backward layers.30.feed_forward on rank 1" in text
    assert re.search("TFLOP per step on the busiest rank: 9,570\n  forward +9,570\n  loss +0.004295\n", text)
    assert re.search("shard: all-gather of activations, forward +2,176 +931.323\n", text)
    assert re.search("seconds per step: 50.000 +products +attention +others +all\n  forward +12.500 +50.000$", text)
    stages = [(config, replace(found, costs=large, steps=1_234_567, dollars_per_gpu_hour=2.0))] * 2
    assert max(map(len, format_stages(stages).splitlines())) <= 80


def test_duration_and_price_have_limits_and_three_digits() -> None:
    found = replace(on_one_gpu()[1], dollars_per_gpu_hour=2.5)
    days = replace(found, costs=replace(found.costs, seconds={"step": 86400.0}), steps=1000)
    text = verdict(days).splitlines()[1]
    # A step may be faster or slower by the interval of the estimate, 15%.
    assert text == "870 to 1,180 days, 20,900 to 28,200 GPU-hours, 52,200 to 70,600 dollars"
    assert days.as_dict()["dollars"] == 1000 * 24 * 2.5


def test_stages_have_a_price_and_a_sum() -> None:
    config, found = on_one_gpu()
    found = replace(found, dollars_per_gpu_hour=2.0)
    day = replace(found, costs=replace(found.costs, seconds={"step": 864.0}), steps=100)
    titles, *stages, whole, _ = format_stages([(config, day), (config, day)]).splitlines()
    assert titles.split()[-1] == "dollars"
    assert [line.split()[-1] for line in (*stages, whole)] == ["48", "48", "96"]
    free = replace(day, dollars_per_gpu_hour=0.0)
    assert "dollars" not in format_stages([(config, free)])


def test_slow_estimate_is_not_followed_by_others(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*LONG, "--activation_checkpoint.mode", "full"]
    assert command.main(argv) == 0
    assert "faster, and it fits" in capsys.readouterr().out
    with patch("torchtrain.plugins.planner.command.SLOW_SECONDS", 0.0):
        assert command.main(argv) == 0
    assert "faster, and it fits" not in capsys.readouterr().out


LONG = [*OPTIONS, "--estimate.world_size", "1", "--training.seq_len", "512", "--training.local_batch_size", "8"]


@cache
def estimated(*options: str) -> tuple[str, Estimate]:
    config = parse([*LONG, *options], "torchtrain.estimate", "")
    model, gpu = resolve_model_config(config), resolve_gpu(config)
    result = estimate(config, model, gpu)
    return advice(config, result, model, gpu), result


def test_advice_for_a_run_that_does_not_fit_makes_it_fit() -> None:
    _, none = estimated()
    _, full = estimated("--activation_checkpoint.mode", "full")
    assert full.peak_reserved_gib < none.peak_reserved_gib
    between = str((full.peak_reserved_gib + none.peak_reserved_gib) / 2)
    text, result = estimated("--estimate.memory_gib", between)
    assert not result.fits
    options = re.match(
        r"it fits with activation_checkpoint.mode = '(\w+)' \([\d.]+ GiB, [\d,]+ tokens/s a GPU\); ", text
    )
    assert options
    assert estimated("--estimate.memory_gib", between, "--activation_checkpoint.mode", options[1])[1].fits
    text, _ = estimated("--estimate.memory_gib", "0.001")
    assert text.startswith("more GPUs alone are not enough, because activations and gathered parameters take the mem")


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [(), ("--parallelism.data_parallel_shard_degree", "1")])
def test_advice_names_the_number_of_gpus_that_are_enough(degrees: tuple[str, ...]) -> None:
    """Of a model whose states are most of its memory."""
    wide = [*OPTIONS, "--model.shape.dim=1024", "--model.shape.n_layers=2", "--training.seq_len=64"]
    wide += ["--training.local_batch_size=1", "--training.global_batch_size=4", *degrees]

    def on(gpus: int, *options: str) -> tuple[Estimate, str]:
        sharded = [option if option != "1" or gpus == 1 else str(gpus) for option in wide]
        config = parse([*sharded, "--estimate.world_size", str(gpus), *options], "torchtrain.estimate", "")
        model, gpu = resolve_model_config(config), resolve_gpu(config)
        result = estimate(config, model, gpu)
        return result, advice(config, result, model, gpu)

    two, four = (on(gpus)[0].peak_reserved_gib for gpus in (2, 4))
    result, text = on(1, "--estimate.memory_gib", str((two + four) / 2))
    assert not result.fits
    assert text == f"it fits with 4 GPUs ({four:.1f} GiB); --estimate.search tries all layouts"


@pytest.mark.slow
def test_advice_of_a_smaller_batch_keeps_the_global_batch() -> None:
    options = ("--activation_checkpoint.mode", "full", "--training.global_batch_size", "-1")
    large = estimated(*options)[1].peak_reserved_gib
    small = estimated(*options, "--training.local_batch_size", "4")[1].peak_reserved_gib
    text, _ = estimated(*options, "--estimate.memory_gib", str((small + large) / 2))
    changed = "training.local_batch_size = 4 and training.global_batch_size = 8, as it is now"
    assert text.startswith(f"it fits with {changed} (")


def test_advice_for_a_run_that_recomputes_without_need() -> None:
    text, _ = estimated("--activation_checkpoint.mode", "full")
    assert re.match(r"\d+% faster, and it fits: activation_checkpoint.mode = 'none' \(", text)
    assert estimated()[0] == ""


def test_plot_of_memory_names_phases_and_microbatches(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = str(tmp_path / "memory.png")
    argv = [*OPTIONS, "--estimate.world_size", "2", "--estimate.picture", picture, "--training.local_batch_size", "2"]
    config = parse(argv, "torchtrain.estimate", "")
    found = estimate(config, resolve_model_config(config), resolve_gpu(config))
    figure = draw_memory(found, picture)
    (axes,) = figure.axes
    phases = [label.get_text() for label in axes.get_xticklabels()]
    assert phases.count("forward") == phases.count("backward") == 4
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts == ["step 1", "microbatch 1", "microbatch 2", "step 2", "microbatch 1", "microbatch 2"]
    assert [text.get_text() for text in figure.legends[0].get_texts()][-1] == "parameters"
    assert Path(picture).read_bytes().startswith(b"\x89PNG")


def test_short_phases_belong_to_the_one_before() -> None:
    assert merged_phases(["a"] * 60 + ["b"] + ["a"] * 40 + ["b"] * 9) == [("a", 0, 101), ("b", 101, 110)]


def test_ranking_fits_a_screen_of_80_columns() -> None:
    """What all layouts have in common is said once."""

    def layout(batch: int, mode: str, memory: int) -> tuple[JobConfig, Estimate]:
        config = JobConfig(activation_checkpoint=ActivationCheckpointConfig(mode=mode))  # type: ignore[arg-type]
        config = replace(config, training=replace(config.training, local_batch_size=batch))
        rank = RankMemory(0, 0, 0, 0, [{("", ""): (0,) * 6}] * 2, {0: {("", ""): memory * GIB}})
        costs = StepCosts([rank], [], {}, {"step": 1.0}, {})
        return config, Estimate(GPUS["h100-80"], ParallelDims(shard=8, tensor=2), costs, 1 << 20, 9, 1, ())

    common, wrapped, *table = format_ranking([layout(1, "none", 60), layout(16, "full", 20)]).splitlines()
    assert common == "in all of them pipeline 1, replicate 1, shard 8, context 1, tensor 2, reshard"
    assert wrapped == "  default"
    assert [line.split() for line in table] == [
        ["batch", "checkpoint", "GiB", "tokens/s", "MFU"],
        ["1", "none", "60.0", "65,536", "0.0%"],
        ["16", "full", "20.0", "65,536", "0.0%"],
    ]
    alone = format_ranking([layout(1, "none", 60)])
    assert alone.splitlines() == [
        "   GiB  tokens/s   MFU  layout",
        "  60.0    65,536  0.0%  shard 8, tensor 2, batch 1, checkpoint none, reshard",
        "                        default",
    ]
    assert max(map(len, [common, *table, *alone.splitlines()])) <= 80


def few_layouts(use_terminal: Callable[[], object]) -> None:
    from torchtrain.plugins.planner import search

    search.LOCAL_BATCHES, search.MODES = (2,), ("none",)  # type: ignore[assignment]
    use_terminal()


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120, None])
def test_screen_of_a_search(tmp_path: Path, columns: int | None) -> None:
    """A line for each layout while it runs, and a table that fits 80 columns; that of the quick start has its form."""
    terminal = None if columns is None else Terminal(columns)
    hook = partial(few_layouts, int if terminal is None else terminal.hook)
    options = ("--estimate.world_size", "2", "--estimate.search", "--estimate.output", str(tmp_path / "layout.toml"))
    options = (*options, "--model.shape.n_layers", "2", "--training.local_batch_size", "4")
    found = run_command("torchtrain.estimate", *OPTIONS, *options, hook=hook)
    log = found.stderr if terminal is None else terminal.close()
    assert found.returncode == 0, log
    shown = re.findall(SEARCHED, log.replace("\n  ", " "), re.MULTILINE)  # lines break between words
    assert sorted(int(number) for number, _ in shown) == list(range(1, len(shown) + 1))
    assert [line for line in found.stdout.splitlines()[:-1] if len(line) > 80] == []
    unwrapped = re.sub(r"\n  (?=[a-z(])(?!shard|tensor)", " ", found.stdout)
    _, head, common, titles, first, *_, last = unwrapped.splitlines()
    assert common.startswith("in all of them ")
    assert re.match(rf"{len(shown)} simulated in \d+ s of CPU time, {len(shown)} of them fit; 0 skipped", head)
    assert first.split()[-2] == shown[-1][1]
    assert last.startswith("wrote the first layout as a config for the trainer: ")
    page = (Path(__file__).parents[3] / "docs" / "quickstart.md").read_text(encoding="utf-8")
    assert re.search(SEARCHED, page, re.MULTILINE)
    shown_table = re.search(r"^in all of them.*\n(.*)$", page, re.MULTILINE)
    assert shown_table
    assert shown_table[1].split()[-5:] == ["checkpoint", "reshard", *titles.split()[-3:]]
