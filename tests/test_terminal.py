"""What a run shows in a terminal of 80 and of 120 columns, and in a log file."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked_command import checked_command, run_command
from forked_run import CONFIG, ForkedRun, finish, read_metrics, slow_steps
from terminal import Terminal

from torchtrain import __version__
from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.datasets.data_source import SourceSize
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.logging import aligned, counted, wrapped
from torchtrain.metrics.history import read_run
from torchtrain.metrics.results import summarize
from torchtrain.metrics.run_description import _schedule, _source_rows, describe_sources
from torchtrain.metrics.validation_log import format_validation
from torchtrain.optimizers.options import LRSchedulerConfig

LABELS = ["versions", "devices", "model", "data", "validation", "batch", "optimizer", "schedule", "precision"]
LABELS += ["compile", "checkpoints", "start"]
SOURCES, ENDINGS = ("all sources", "code", "prose"), ("", "_code", "_prose")
ROOT = Path(__file__).parent.parent
PREPARE_IMPORTS = """
import sys
from torchtrain import train
def imported(config): print("torch" in sys.modules, config.job.dump_folder); return 0
train.train = imported
train.main(["--job.config_file", "train_configs/debug_model.toml"])
"""


def banner(screen: str) -> list[str]:
    """The lines of the last banner, its title first."""
    lines = screen.splitlines()
    first = max(number for number, line in enumerate(lines) if " run " in line and "outputs in" in line)
    last = next(number for number in range(first + 1, len(lines)) if not lines[number].startswith("  "))
    return lines[first:last]


def show(folder: Path, columns: int | None, *options: str, ranks: int = 1) -> str:
    """Train; returns what a terminal of ``columns`` shows, or what a log file contains."""
    if columns is None:
        return finish(folder, *options, ranks=ranks)
    terminal = Terminal(columns)
    finish(folder, *options, ranks=ranks, hook=terminal.hook)
    return terminal.close()


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.slow), None])
def test_screen_of_a_new_run_and_of_a_resumed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int | None
) -> None:
    monkeypatch.chdir(tmp_path)  # short paths, as a user's
    for steps, start in ((2, "new run, initial weights of seed 0"), (4, "resumes from run/checkpoint/step-2")):
        options = ("--training.steps", str(steps), "--metrics.log_freq", "2")
        screen = show(Path("run"), columns, *options)
        lines = banner(screen)
        assert len(lines) <= 15, screen
        assert lines[0].endswith("run run: run/test.toml, outputs in run")
        assert [line[:15].strip() for line in lines[1:] if line[:15].strip()] == LABELS
        assert [line for line in lines[1:] if line[14] != " " or line[15] == " "] == [], "texts are aligned"
        assert lines[-1] == f"  start        {start}"
        assert "\\x1b" not in screen
        if columns is not None:
            assert max(map(len, lines)) <= columns
            assert max(len(line) for line in screen.splitlines() if " step " in line) <= columns
        # PyTorch is imported, the ranks connect and data are opened between these two lines.
        assert f"torchtrain {__version__}, run/test.toml: importing PyTorch" in screen.splitlines()[0]
    starts = [line for line in read_metrics(Path("run")) if line.get("event") == "start"]
    assert [line["step"] for line in starts] == [0, 2]
    assert starts[0]["tokens_per_step"] == 4 * 32
    assert starts[0]["parameters"] == 2 * 4096 * 16 + 16 * (16 + 8 + 8 + 16) + 3 * 16 * 32 + 3 * 16
    (source,) = starts[1]["sources"]
    assert source["epochs"] == pytest.approx(4 * 128 / source["tokens"])
    assert source["share"] == 1


@pytest.mark.parametrize("columns", [80, *(pytest.param(columns, marks=pytest.mark.slow) for columns in (120, None))])
def test_screen_of_two_ranks_is_that_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int | None
) -> None:
    monkeypatch.chdir(tmp_path)  # short paths, as a user's
    data = (str(ROOT / "README.md"), str(ROOT / "docs"))
    screen = show(Path("run"), columns, "--training.steps", "1", "--data.path", *data, ranks=2)
    lines = banner(screen)
    assert len(lines) <= 15
    if columns is not None:
        assert max(map(len, lines[1:])) <= columns
    assert "  devices      cpu (" in screen
    assert "2 ranks: shard 2" in screen
    assert "  batch        4 sequences, 128 tokens; in 1 step 128, 0.00096 per parameter" in screen
    assert "  data         README: " in screen
    assert sum("importing PyTorch" in line for line in screen.splitlines()) == 1, "rank 0 alone logs"


@pytest.mark.parametrize(
    ("variables", "is_colored"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        pytest.param({"CI": "1"}, True, marks=pytest.mark.slow),
        pytest.param({"TERM": "dumb"}, False, marks=pytest.mark.slow),
    ],
)
def test_step_lines_are_colored_only_where_the_terminal_shows_it(
    tmp_path: Path, variables: dict[str, str], is_colored: bool
) -> None:
    terminal = Terminal(140, **variables)
    finish(tmp_path, "--training.steps", "1", ranks=1, hook=terminal.hook)
    screen = terminal.close_raw()
    (line,) = (line for line in screen.splitlines() if "loss" in line and "grad norm" in line)
    step = "\x1b[36mstep 1/1\x1b[0m  \x1b[36m  128 tokens\x1b[0m" if is_colored else "step 1/1    128 tokens"
    assert re.match(rf"[0-9:]{{8}} {re.escape(step)}  ", line), repr(line)
    assert ("\x1b" in screen) is is_colored


def run_of_two_steps(folder: Path) -> Path:
    (folder / "text.txt").write_text("def f(x):\n    return x\n" * 400)
    (folder / "small.toml").write_text(
        "[model.shape]\ndim = 32\nn_layers = 1\nn_heads = 2\nn_kv_heads = 1\nffn_dim = 64\n"
        "[training]\nseq_len = 32\nlocal_batch_size = 2\nsteps = 2\n"
        f'[data]\npath = "{folder}/text.txt"\n[optimizer]\nlr = 0.001\n'
    )
    options = ("--job.config_file", str(folder / "small.toml"), "--job.dump_folder", str(folder / "run"))
    checked_command("torchtrain.train", *options)
    return folder


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps."""
    return run_of_two_steps(tmp_path_factory.mktemp("commands"))


COMMANDS: dict[str, tuple[str, ...]] = {
    "prepare": ("--job.config_file", "small.toml", "--prepare.output", "prepared"),
    "cache": (),
}
TERMINALS = [
    (80, {"NO_COLOR": "1"}),
    pytest.param(80, {"TERM": "dumb"}, marks=pytest.mark.slow),
    pytest.param(140, {}, marks=pytest.mark.slow),
    pytest.param(140, {"CI": "1"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("columns", "variables"), TERMINALS)
def test_output_of_each_command_in_a_terminal(
    small_run: Path, tmp_path: Path, columns: int, variables: dict[str, str]
) -> None:
    check_output_in_a_terminal(COMMANDS, small_run, tmp_path, columns, variables)


def check_output_in_a_terminal(
    commands: dict[str, tuple[str, ...]], small_run: Path, tmp_path: Path, columns: int, variables: dict[str, str]
) -> None:
    """Colors only where the terminal has them, and none as text."""
    shutil.copytree(small_run, tmp_path, dirs_exist_ok=True)
    (tmp_path / "titan.toml").write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\n')
    files = {"small.toml", "titan.toml", "run", "text.txt", "exported", "prepared"}
    for name, arguments in commands.items():
        terminal = Terminal(columns, **variables)
        given = [str(tmp_path / word) if word in files else word for word in arguments]
        result = run_command(f"torchtrain.{name}", *given, hook=terminal.hook_of_all)
        screen = terminal.close_raw()
        assert result.returncode == 0, screen
        assert screen.strip(), name
        if name == "compare":  # it has no long word
            assert max(map(len, screen.replace("\r\n", "\n").split("\n"))) <= columns, screen
        assert "\\x1b" not in screen
        if variables.keys() & {"NO_COLOR", "TERM"}:
            assert "\x1b" not in screen, (name, screen)


HELP = """
import sys
from importlib import import_module
for name in {names!r}:
    try:
        import_module(f"torchtrain.{{name}}").main(["--help"])
    except SystemExit:
        print(name, "has ended")
"""


def test_help_of_each_command_fits_80_columns() -> None:
    assert "usage: python -m torchtrain.train " in help_of_commands(["train", *COMMANDS])


def help_of_commands(names: list[str]) -> str:
    """The help of the commands in a terminal of 80 columns, which has no colors and no markup."""
    terminal = Terminal(80)
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "CI")}
    environment["TERM"] = "xterm-256color"
    script = [sys.executable, "-c", HELP.format(names=names)]
    subprocess.run(script, env=environment, stdout=terminal.slave, stderr=terminal.slave, check=True)
    screen = terminal.close_raw().replace("\r\n", "\n")
    for name in names:
        assert f"{name} has ended" in screen
        assert re.search(rf"^usage: python -m torchtrain\.{name} ", screen, re.MULTILINE)
    assert [line for line in screen.splitlines() if len(line) > 80] == []
    assert [text for text in ("\x1b", "``", "STR", "None|", "\n\n\n") if text in screen] == []
    return screen


def test_first_line_is_logged_before_torch_is_imported() -> None:
    found = subprocess.run([sys.executable, "-c", PREPARE_IMPORTS], capture_output=True, text=True, check=True)
    assert found.stdout == "False outputs/debug_model\n"
    assert f"torchtrain {__version__}, train_configs/debug_model.toml: importing PyTorch" in found.stderr


@dataclass
class Sized:
    """A data source that knows its size."""

    found: SourceSize
    name: str = "sized"

    def size(self, tokenizer: object) -> SourceSize:  # noqa: ARG002
        return self.found


@pytest.mark.usefixtures("process_group")
def test_sources_have_their_weight_size_and_epochs() -> None:
    """The epochs of a source: the tokens that the run reads from it, by its weight, over those that it has."""
    weights = {"books": 1.0, "web": 3.0, "code": 1.0}
    config = JobConfig(
        data=DataConfig(sources=tuple(SourceConfig(path=p, weight=w) for p, w in weights.items())),
        training=TrainingConfig(global_batch_size=5, seq_len=20, steps=100),
    )
    sizes = [SourceSize(1000, 5000), SourceSize(4_100_000, 12_000_000, is_estimate=True), SourceSize()]
    found = describe_sources(config, [Sized(size) for size in sizes], None)  # type: ignore
    assert [source["epochs"] for source in found] == [2.0, pytest.approx(6000 / 4_100_000), None]
    assert _source_rows(found[:2]) == [
        "web: weight 0.6, 12 MB, about 4.1M tokens, under 0.01 epochs",
        "books: weight 0.2, 0.005 MB, 1K tokens, 2.00 epochs",
    ]
    assert _source_rows(found)[2:] == ["code: weight 0.2, size not known"]
    assert _source_rows(found[2:]) == ["code: size not known"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"decay_type": "constant", "warmup_steps": 0}, "constant"),
        ({"warmup_steps": 10}, "warm-up of 10 steps, then cosine to 0 after step 10,000"),
        (
            {"warmup_steps": 10, "decay_ratio": 0.25, "decay_type": "linear", "min_lr_factor": 0.1},
            "warm-up of 10 steps, then constant for 7,490 steps, then linear to 3e-05 after step 10,000",
        ),
    ],
)
def test_schedule_is_described(options: dict[str, object], text: str) -> None:
    schedule = LRSchedulerConfig(**options)  # type: ignore[arg-type]
    assert _schedule(schedule, JobConfig().optimizer.lr, JobConfig().training.steps) == text


def test_one_has_no_plural() -> None:
    assert [counted(number, "GPU") for number in (0, 1, 2, 4000)] == ["0 GPUs", "1 GPU", "2 GPUs", "4,000 GPUs"]


def test_list_of_the_commands_has_each_with_a_line() -> None:
    """The modules themselves are listed, so that one of a plugin is found, too."""
    screen = checked_command("torchtrain.__main__").stdout.splitlines()
    listed = {line.split()[0]: line[18:] for line in screen if re.match(r"  [a-z]", line)}
    files = [file for file in (ROOT / "torchtrain").glob("[a-z]*.py") if "__main__" in file.read_text(encoding="utf-8")]
    assert {*COMMANDS, "train", "launch", "evaluate"} <= {file.stem for file in files} == listed.keys()
    assert next(iter(listed)) == "train"
    assert listed["perplexity"] == "Loss and perplexity of a trained model on text files"
    assert max(map(len, screen)) <= 80
    result = run_command("torchtrain.__main__", "generate", "outputs/x")
    assert result.returncode == 2
    assert result.stderr.endswith("error: a command is a module of its own: python -m torchtrain.generate outputs/x\n")


def test_long_texts_are_wrapped_below_themselves() -> None:
    rows = [("a", "one two three four five six"), ("long", "x" * 40)]
    wrapped = ["  a     one two three four", "        five six", f"  long  {'x' * 40}"]
    assert aligned(rows, 30).splitlines() == wrapped
    assert aligned(rows).splitlines() == ["  a     one two three four five six", f"  long  {'x' * 40}"]


def test_lines_of_the_log_are_wrapped_between_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held_out.txt").write_text("def held_out(x):\n    return x\n" * 40)
    options = ("--validation.enable", "--validation.path", "held_out.txt", "--validation.interval", "1")
    terminal = Terminal(80)
    finish(Path("run"), *options, "--training.steps", "2", ranks=1, hook=terminal.hook)
    screen = terminal.close()
    assert re.search(r"validation after step 2: loss .*\n  .*the best", screen), screen
    assert max(map(len, screen.splitlines())) <= 80, screen
    text = "rank 1: " + " ".join(["word"] * 40) + "\n  " + " ".join(["item"] * 30) + "\n" + "x" * 100
    shown = "\n".join(wrapped(line, 50) for line in text.split("\n"))
    assert shown.split() == text.split()
    assert [len(line) for line in shown.splitlines() if len(line) > 50] == [100]
    assert "\n    item item" in shown


def results_of_a_run(tmp_path: Path, *options: str) -> tuple[Path, list[str]]:
    """The folder of a run of 8 steps, and the lines of its results, of which the first ones are checked."""
    (tmp_path / "held_out.txt").write_text("def held_out(x):\n    return x\n" * 40)
    options = (*options, "--validation.enable", "--validation.path", "held_out.txt", "--validation.interval", "2")
    terminal = Terminal(78)
    folder = Path("a_name_that_makes_commands_long")
    finish(folder, *options, ranks=1, hook=terminal.hook)
    screen = terminal.close()
    lines = screen[screen.index(f"results of {folder}:") :].splitlines()
    metrics = read_metrics(folder)
    steps = [line for line in metrics if "step_seconds" in line]
    validation = [line for line in metrics if "validation_loss" in line]
    best = min(validation, key=lambda line: line["validation_loss"])
    seconds = sum(line["step_seconds"] for line in steps)
    assert re.fullmatch(r"  time         \d+s in 8 training steps, \d+s with validation and saves", lines[1])
    assert lines[2] == f"  tokens       1.02K, on average {8 * 128 / seconds:,.0f} per second"
    assert lines[3] == f"  loss         {steps[-1]['loss']:.4f} in step 8, {steps[0]['loss']:.4f} in step 1"
    last_loss, best_loss = validation[-1]["validation_loss"], best["validation_loss"]
    assert lines[4] == f"  validation   loss {last_loss:.4f}, the best {best_loss:.4f} after step {best['step']}"
    assert lines[5] == f"  checkpoints  {folder}/checkpoint, the last one step-8"
    return folder, lines


def labels_of(lines: list[str]) -> list[str]:
    labels = [line[:15].strip() for line in lines[1:] if re.match(r"  \w", line)]
    return [label for label in labels if label != "validation"]


def test_end_of_a_run_has_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, lines = results_of_a_run(tmp_path)
    assert labels_of(lines)[:4] == ["time", "tokens", "loss", "checkpoints"]


def test_validation_of_several_sources_has_a_row_each_with_the_best_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a resume, where the best was reached before."""
    monkeypatch.chdir(tmp_path)
    for name in ("code", "prose"):
        (tmp_path / f"{name}.txt").write_text(f"def {name}(x):\n    return x\n" * 40)
    sources = "".join(f'[[validation.sources]]\npath = "{name}.txt"\n' for name in ("code", "prose"))
    config = f"{CONFIG}\n[ema]\nenable = true\n[validation]\nenable = true\ninterval = 2\nweights = 'both'\n{sources}"
    (tmp_path / "several.toml").write_text(config)
    terminal = Terminal(120)
    options = ("--job.config_file", "several.toml", "--training.steps")
    finish(Path("run"), *options, "2", ranks=1)
    finish(Path("run"), *options, "4", ranks=1, hook=terminal.hook)
    screen = terminal.close()
    assert "validation after step 4 begins: code, prose\n" in screen
    rows = screen[screen.index("validation after step 4:") :].splitlines()[1:7]
    labels = [f"{label}, {weights} weights" for weights in ("trained", "averaged") for label in SOURCES]
    assert [row[:33].strip() for row in rows] == labels
    lines = {line["step"]: line for line in read_metrics(Path("run")) if "validation_loss" in line}
    for row, key in zip(rows, [f"validation_{ema}loss{name}" for ema in ("", "ema_") for name in ENDINGS], strict=True):
        assert row[33:].startswith(f"loss {lines[4][key]:.4f}, perplexity ")
        assert row.endswith("best so far" if lines[4][key] < lines[2][key] else "after step 2")
        assert len(row) <= 120


def test_results_of_a_validation_name_the_best() -> None:
    results = {"validation_loss": 2.5, "validation_perplexity": 12.18, "validation_bits_per_byte": 1.25}
    results |= {"validation_tokens": 20480, "validation_samples": [], "validation_ema_task_arc_easy_acc": 0.25}
    own = {"validation_repetition": 0.125}
    assert format_validation(own, []) == [("others", "repetition 0.125")]
    text = "loss 2.5000, perplexity 12.18, bits per byte 1.2500, 20.5K tokens"
    scores = ("tasks", "ema arc easy acc 0.25")
    assert format_validation(results, []) == [("", text), scores]
    lines = [{"step": 5, "validation_loss": 2.75}, {"step": 9, "validation_loss": None}, {"step": 11, "loss": 0.5}]
    assert format_validation(results, lines) == [("", f"{text}; the best so far"), scores]
    better = {"step": 1500, "validation_loss": 2.25}
    assert format_validation(results, [*lines, better])[0][1] == f"{text}; the best was 2.2500 after step 1,500"
    for loss in (math.nan, math.inf):  # earlier ones of this process are not read from the file
        diverged = {"step": 1, "validation_loss": loss}
        assert format_validation(results, [diverged, better])[0][1].endswith("the best was 2.2500 after step 1,500")
        assert format_validation(results, [diverged]) == format_validation(results, [])
    averaged = {name.replace("validation_", "validation_ema_"): value for name, value in results.items()}
    averaged = {name: value for name, value in averaged.items() if not name.endswith(("samples", "acc"))}
    averaged |= {"validation_ema_loss": 2.375, "validation_task_arc_easy_acc": 0.125}
    text_of_averaged = text.replace("2.5000", "2.3750")
    line = {"step": 7, "validation_loss": 2.625, "validation_ema_loss": 2.0}
    assert format_validation({**results, **averaged}, [line]) == [
        ("trained weights", f"{text}; the best so far"),
        ("averaged weights", f"{text_of_averaged}; the best was 2.0000 after step 7"),
        ("tasks", "ema arc easy acc 0.25, arc easy acc 0.125"),
    ]
    own = {"validation_loss_on_math": 1.5, "validation_tokens_per_second": 1e4}  # of a part that a user has added
    others = ("others", "loss on math 1.5, tokens per second 1e+04")
    assert format_validation({**results, **own}, [*lines, own | {"step": 3}]) == [
        ("", f"{text}; the best so far"),
        scores,
        others,
    ]


def test_stopped_run_names_how_to_resume(tmp_path: Path) -> None:
    stop_run(tmp_path)


def stop_run(tmp_path: Path, *options: str) -> None:
    run = ForkedRun(tmp_path, *options, "--training.steps", "1000", ranks=1, hook=slow_steps)
    run.wait_for(lambda: len(read_metrics(tmp_path)) > 2)
    run.kill(number=signal.SIGTERM)
    assert run.wait() == [75], run.output()
    assert "next         the same command again resumes the run" in run.output()


def test_rate_of_tokens_is_that_of_the_steps_of_the_file(tmp_path: Path) -> None:
    """A run that was begun elsewhere, up to step 20, of which each step has 100 tokens and takes 0.5 s."""
    step = {"loss": 1.0, "step_seconds": 0.5}
    lines = [
        {"step": 20, "event": "start", "time": 0.0},
        *({"step": number, "tokens": 100 * number, **step} for number in (21, 24, 30)),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = dict(summarize(read_run(tmp_path)))
    assert rows["time"].startswith("5s in 10 training steps, ")
    assert rows["tokens"] == "3K, on average 200 per second"


def test_best_validation_is_that_of_the_same_stage(tmp_path: Path) -> None:
    """Another stage may validate on other data, or on longer sequences."""
    losses = [(2, "first", 1.0), (4, "first", 1.5), (6, "second", 3.0), (8, "second", 3.5)]
    lines = [{"step": step, "stage": stage, "validation_loss": loss} for step, stage, loss in losses]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = summarize(read_run(tmp_path))
    assert ("validation", "loss 3.5000, the best of second 3.0000 after step 6") in rows


def test_results_are_those_of_the_steps_that_count(tmp_path: Path) -> None:
    """After a resume from step 2, what was written of later steps does not count, except for the time of a start."""
    step = {"tokens_per_second": 1.0, "step_seconds": 0.5}
    lines = [
        {"step": 0, "event": "start", "time": 0.0},
        *({"step": n, "tokens": 100 * n, "loss": 5.0 - n, **step} for n in (1, 2, 4)),
        {"step": 2, "event": "start", "time": 0.0},
        {"step": 3, "tokens": 300, "loss": None, **step},
        {"step": 1, "validation_loss": 2.5, "validation_ema_loss": 1.75, "validation_ema_loss_task_a": 2.5},
        {"step": 3, "validation_loss": 2.0, "validation_loss_task_a": 3.0, "validation_ema_task_a_loss": 0.25},
        {"step": 3, "validation_ema_loss": 1.875, "validation_ema_loss_task_a": 2.25, "validation_task_a_loss": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = summarize(read_run(tmp_path))
    assert rows[0][1].startswith("2s in 3 training steps of 2 starts; ")
    assert rows[0][1].endswith(" since the last one")
    assert rows[1:3] == [
        ("tokens", "300, on average 200 per second"),
        ("loss", "not finite in step 3, 4.0000 in step 1"),
    ]
    assert rows[3:] == [
        ("validation", "loss 2.0000, the best 2.0000 after step 3"),
        ("validation", "ema loss 1.8750, the best 1.7500 after step 1"),
        ("validation", "ema loss task a 2.2500, the best 2.2500 after step 3"),
        ("validation", "loss task a 3.0000, the best 3.0000 after step 3"),
        ("tasks", "ema a loss 0.25 after step 3"),
        ("tasks", "a loss 0.5 after step 3"),
    ]
