"""What a terminal shows of commands of plugins, and of a default run with the report."""

import re
from pathlib import Path

import pytest
from test_terminal import (
    LABELS,
    ROOT,
    TERMINALS,
    check_output_in_a_terminal,
    help_of_commands,
    labels_of,
    results_of_a_run,
    run_of_two_steps,
    stop_run,
)

from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.config.schema import JobConfig, JobSection
from torchtrain.metrics.results import next_commands

RESULTS = ["time", "tokens", "loss", "checkpoints", "report", "next"]


def test_end_of_a_run_has_its_results_and_the_next_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder, lines = results_of_a_run(tmp_path, "--report.enable")
    assert labels_of(lines) == RESULTS
    assert lines[6] == f"  report       {folder}/report.md"
    assert lines[7:10] == [  # on a line each, so that they can be copied
        "  next",
        f'    python -m torchtrain.generate {folder} --prompt "..."',
        f"    python -m torchtrain.convert {folder} {folder}_hf",
    ]
    assert max(map(len, lines[:8])) <= 78 < min(map(len, lines[8:10]))
    report = (folder / "report.md").read_text()
    assert f"| validation | {lines[4][15:]} |" in report
    assert "![Curves of the run](curves.png)" in report
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [label for label in LABELS if f"| {label} |" not in report] == []


def test_commands_that_come_next_read_a_bucket_by_url() -> None:
    bucket = CheckpointConfig(folder="s3://my-bucket/my-run/checkpoint")
    config = JobConfig(job=JobSection(dump_folder="outputs/my-run"), checkpoint=bucket)
    assert next_commands(config, 8, is_complete=True) == [
        'python -m torchtrain.generate s3://my-bucket/my-run/checkpoint --prompt "..."',
        "python -m torchtrain.convert s3://my-bucket/my-run/checkpoint outputs/my-run_hf",
    ]


def test_quickstart_shows_the_screens_of_a_default_run() -> None:
    """Its description and its results have the rows of a run (tests above), in their order and columns."""
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    results = [*RESULTS[:3], "validation", *RESULTS[3:]]
    for head, labels in (("run debug_model: ", LABELS), ("results of debug_model:", results)):
        (block,) = (block for block in blocks if re.search(rf"^[0-9:]+ {head}", block, re.MULTILINE))
        rows = re.split(rf"^[0-9:]+ {head}.*\n", block, flags=re.MULTILINE)[1].splitlines()
        assert [row[:15].strip() for row in rows if re.match(r"  \w", row)] == labels
        aligned_rows = rows[: labels.index("next")] if "next" in labels else rows
        assert [row for row in aligned_rows if not (row[14] == " " and row[15] != " ")] == []
    assert "\n  start        resumes from outputs/debug_model/checkpoint/step-100\n" in text
    assert "\n  devices      cpu (x86_64), 2 ranks: shard 2\n" in text


COMMANDS: dict[str, tuple[str, ...]] = {
    "estimate": ("--job.config_file", "small.toml", "--estimate.world_size", "2"),
    "compare": ("run", "run"),
    "generate": ("run", "--prompt", "def", "--max_new_tokens", "3"),
    "perplexity": ("run", "text.txt"),
    "convert": ("run", "exported"),
    "convert_config": ("titan.toml",),
    "explain": ("run", "--step", "2"),
}


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of_two_steps(tmp_path_factory.mktemp("commands"))


@pytest.mark.parametrize(("columns", "variables"), TERMINALS)
def test_output_of_each_command_in_a_terminal(
    small_run: Path, tmp_path: Path, columns: int, variables: dict[str, str]
) -> None:
    check_output_in_a_terminal(COMMANDS, small_run, tmp_path, columns, variables)


def test_help_of_each_command_fits_80_columns() -> None:
    screen = help_of_commands([*COMMANDS])
    assert "  --max_new_tokens INTEGER\n      Maximum number of new tokens per prompt." in screen
    assert '  --dtype bfloat16|float16|float32  (default: "bfloat16")\n' in screen
    assert "  --top_k INTEGER  (default: 0)\n" in screen
    assert "\n    python -m torchtrain.explain RUN --step N\n" in screen


def test_stopped_run_writes_no_report(tmp_path: Path) -> None:
    stop_run(tmp_path, "--report.enable")
    assert not (tmp_path / "report.md").exists()
