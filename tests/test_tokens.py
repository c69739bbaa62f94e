"""Options in tokens, and the steps that they stand for."""

from pathlib import Path

import pytest
from forked_run import TINY, finish, logged_losses, read_metrics

from torchtrain.config.parse import from_file, parse
from torchtrain.config.schema import JobConfig, to_dict
from torchtrain.config.section import SAME_NUMBER, flat
from torchtrain.config.tokens import format_tokens, parse_tokens
from torchtrain.errors import ConfigError
from torchtrain.models.spec import count_parameters
from torchtrain.parallelisms.resolve import resolve_layout

MODEL = TINY
BATCH = ["--training.seq_len", "32", "--training.global_batch_size", "8", "--training.local_batch_size", "2"]


def resolved(*options: str) -> JobConfig:
    return resolve_layout(parse([*BATCH, *options]), MODEL, 2)[0]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("500", 500), ("2K", 2000), ("1.5M", 1_500_000), ("20B", 20 * 10**9), ("15T", 15 * 10**12), ("20x", 2000)],
)
def test_numbers_of_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text, lambda: 100) == tokens


def test_tokens_for_a_person() -> None:
    numbers = (0, 999, 1024, 999_999, 1.05e6, 20e9, 999.96e9, 15.6e12, 2e15)
    assert [format_tokens(number) for number in numbers] == [
        *("0", "999", "1.02K", "1M", "1.05M", "20B", "1T", "15.6T", "2000T")
    ]


def test_tokens_become_steps_in_the_resolved_config() -> None:
    config = resolved(
        *("--training.tokens", "1M", "--lr_scheduler.warmup_tokens", "10K", "--lr_scheduler.total_tokens", "2M"),
        *("--lr_scheduler.decay_tokens", "100K", "--checkpoint.interval_tokens", "50K"),
        *("--validation.interval_tokens", "100"),
    )
    # 256 tokens a step
    assert config.training.steps == 3907  # 1000000 / 256 = 3906.25, rounded up
    assert (config.lr_scheduler.warmup_steps, config.lr_scheduler.total_steps) == (39, 7813)
    assert round(config.lr_scheduler.decay_ratio * 7813) == 391
    assert (config.checkpoint.interval, config.validation.interval) == (195, 1)
    assert resolve_layout(config, MODEL, 2)[0] == config
    assert not config.training.tokens


def test_tokens_for_each_parameter_count_all_parameters() -> None:
    parameters = 2 * 4096 * 16 + 2 * 16 + 16 + 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32
    assert count_parameters(MODEL) == parameters
    assert resolved("--training.tokens", "20x").training.steps == -(-20 * parameters // 256)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--training.tokens", "20 billion"], "training.tokens = '20 billion' must be a number of tokens such as"),
        (["--training.tokens", "0B"], "training.tokens = '0B' must be a number of tokens"),
        (
            ["--training.steps", "10", "--lr_scheduler.decay_tokens", "1M"],
            "lr_scheduler.decay_tokens = '1M' are 3906 steps, more than the 10 steps of the schedule",
        ),
    ],
)
def test_invalid_tokens_are_rejected(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(*options)


@pytest.mark.parametrize(("in_tokens", "other"), SAME_NUMBER.items())
def test_number_in_tokens_replaces_that_of_the_file_in_steps(tmp_path: Path, in_tokens: str, other: str) -> None:
    """And the reverse; both in one place exclude each other."""
    values = {in_tokens: '"1M"', other: "0.5" if other.endswith("ratio") else "7"}
    default = flat(to_dict(JobConfig())).get(other)
    file = tmp_path / "config.toml"

    def given(in_file: str, *on_command_line: str) -> tuple[str, object]:
        section, _, key = in_file.rpartition(".")
        file.write_text(f"[{section}]\n{key} = {values[in_file]}\n")
        words = [word for name in on_command_line for word in (f"--{name}", values[name].strip('"'))]
        options = flat(to_dict(parse(["--job.config_file", str(file), *words])))
        return options[in_tokens], options.get(other)

    assert given(other, in_tokens) == ("1M", default)
    assert given(in_tokens, other) == ("", float(values[other]))
    with pytest.raises(ConfigError, match=f"{in_tokens} = '1M' and {other} = {values[other]} exclude each other; set"):
        given(in_tokens, in_tokens, other)


def test_run_in_tokens_is_the_run_in_steps(tmp_path: Path) -> None:
    # 128 tokens a step
    in_steps = "--training.steps", "5", "--lr_scheduler.warmup_steps", "3", "--checkpoint.interval", "4"
    in_tokens = "--training.tokens", "600", "--lr_scheduler.warmup_tokens", "384", "--checkpoint.interval_tokens", "512"
    finish(tmp_path / "steps", *in_steps, ranks=1)
    output = finish(tmp_path / "tokens", *in_tokens, ranks=1)
    assert logged_losses(tmp_path / "tokens") == logged_losses(tmp_path / "steps")
    assert sorted(file.name for file in (tmp_path / "tokens/checkpoint").glob("step-*")) == ["step-4", "step-5"]
    assert [line["tokens"] for line in read_metrics(tmp_path / "tokens") if "loss" in line] == [128, 256, 384, 512, 640]
    assert "in 5 steps 640, " in output
    written = from_file(str(tmp_path / "tokens/config.toml"))
    assert (written.training.tokens, written.training.steps, written.checkpoint.interval) == ("", 5, 4)
