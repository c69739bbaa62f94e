"""Runs in stages: configs of the stages, comparison with the chain of runs by hand, kills, and edits of a run."""

import gc
import os
import re
import shutil
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch
from crash_test_s3 import tensors
from data_samples import DOCUMENTS, write_jsonl, write_tokens
from forked_run import (
    CONFIG,
    TINY,
    ForkedRun,
    different_tensors,
    finish,
    logged_losses,
    read_metrics,
    saved_tensors,
    slow_steps,
)
from s3_server import S3Server
from terminal import Terminal
from test_evaluate import skip_slow_parts

from torchtrain.checkpoint.resume_compatibility import check_resume_compatibility
from torchtrain.checkpoint.saved_run import SavedRun
from torchtrain.checkpoint.storage import open_storage
from torchtrain.config.parse import command_line_type, from_text, parse, to_toml
from torchtrain.config.run_plan import OtherStageError, plan_of
from torchtrain.config.schema import JobConfig, to_dict
from torchtrain.config.section import flat, key_of, registries_of
from torchtrain.datasets.build import open_source
from torchtrain.datasets.data_source import SourceContext
from torchtrain.datasets.options import SourceConfig
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.errors import CheckpointError, ConfigError, DataError, FaultError, StoppedError
from torchtrain.fault_tolerance.stop_request import StopRequest
from torchtrain.models.spec import DecoderConfig
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.parallelisms.attention_backend import choose_attention_backend
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.plugins.comparison.fingerprints import read as read_fingerprints
from torchtrain.plugins.stages import StagePlan, driver
from torchtrain.plugins.stages.configs import nested, set_options, stage_configs
from torchtrain.plugins.stages.driver import (
    _build_or_other_step,
    open_data_of_later_stages,
    resolve_stages,
    stage_of_step,
    train_in_stages,
)
from torchtrain.trainer import Trainer

MODEL = TINY
BASE = CONFIG.replace("steps = 8\n", "")
THREE = """
[[stages]]
name = "main"
steps = 10
[[stages]]
name = "long"
tokens = "2K"
[stages.training]
seq_len = 64
[stages.model.shape]
rope_theta = 20000
[[stages]]
name = "decay"
steps = 4
[stages.training]
global_batch_size = 2
[stages.lr_scheduler]
decay_type = "linear"
"""


def resolve_one(config: JobConfig) -> tuple[JobConfig, DecoderConfig]:
    return resolve_layout(config, MODEL, 1)[0], MODEL


def resolved(text: str) -> list[JobConfig]:
    return resolve_stages(from_text(text, "test.toml"), resolve_one)


def lr_of(config: JobConfig, step: int) -> float:
    return LRSchedule(config.lr_scheduler, config.optimizer.lr, config.training.steps).rate(step)


# The configs of the stages


def test_stages_have_their_options_and_absolute_last_steps() -> None:
    main, long, decay = resolved(BASE + THREE)
    assert [config.job.stage for config in (main, long, decay)] == ["main", "long", "decay"]
    assert [config.training.steps for config in (main, long, decay)] == [10, 18, 22]  # 2000 tokens: 8 steps of 256
    assert [config.training.seq_len for config in (main, long, decay)] == [32, 64, 32]
    assert [config.training.global_batch_size for config in (main, long, decay)] == [4, 4, 2]
    assert [config.model.shape.rope_theta for config in (main, long, decay)] == [None, 20000.0, None]
    assert plan_of(long).tokens_after(5) == 5 * 128
    assert plan_of(decay).tokens_after(22) == plan_of(main).tokens_after(22) == 10 * 128 + 8 * 256 + 4 * 64


def test_schedule_of_a_stage_begins_at_the_last_rate_of_the_one_before() -> None:
    main, long, decay = resolved(BASE + THREE)
    assert [lr_of(main, step) for step in (1, 2, 10)] == [0.005, 0.01, 0.01]
    assert lr_of(long, 18) == 0.01
    assert [lr_of(decay, step) for step in range(19, 23)] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    warm = THREE + "warmup_steps = 2\nmin_lr_factor = 1.0\n[stages.optimizer]\nlr = 0.03\n"
    assert [lr_of(resolved(BASE + warm)[2], step) for step in (19, 20, 21, 22)] == pytest.approx(
        [0.02, 0.03, 0.03, 0.03]
    )


def test_decay_in_tokens_is_one_of_the_last_stage_without_a_length() -> None:
    decay = THREE.replace("steps = 4\n", "") + 'decay_tokens = "256"\n'
    main, long, last = resolved(BASE.replace("seq_len = 32", 'seq_len = 32\ntokens = "4K"') + decay)
    assert [config.training.steps for config in (main, long, last)] == [10, 18, 29]  # 672 of 4000 tokens, 64 a step
    rates = [lr_of(last, step) for step in range(19, 30)]
    assert rates == pytest.approx([0.01] * 8 + [0.0075, 0.005, 0.0025])  # 256 tokens are 4 steps
    too_long = decay.replace('"256"', '"1K"')
    with pytest.raises(ConfigError, match=r"stage 'decay': lr_scheduler.decay_tokens = '1K' are 16 steps, more than"):
        resolved(BASE.replace("seq_len = 32", 'seq_len = 32\ntokens = "4K"') + too_long)


def test_warm_up_in_tokens_spans_stages_with_other_batches() -> None:
    ramp = BASE.replace("global_batch_size = 4", 'global_batch_size = "4, 8 at 1K, 16 at 3K"\ntokens = "10K"')
    for tokens, steps in (("512", 4), ("1024", 8), ("2048", 12), ("4096", 18)):  # stages of 8 x 128, 8 x 256, 14 x 512
        configs = resolved(ramp.replace("warmup_steps = 2", f'warmup_tokens = "{tokens}"'))
        assert {config.lr_scheduler.warmup_steps for config in configs} == {steps}


def test_schedule_outside_of_the_stages_spans_all() -> None:
    text = BASE.replace('"constant"', '"linear"') + THREE.replace('[stages.lr_scheduler]\ndecay_type = "linear"\n', "")
    configs = resolved(text)
    whole = LRSchedule(configs[0].lr_scheduler, 0.01, 22)
    assert [whole.rate(step) for step in (2, 22)] == [0.01, pytest.approx(0.01 / 20)]
    assert [
        (config, step) for config in configs for step in range(1, 23) if lr_of(config, step) != whole.rate(step)
    ] == []


def test_config_of_any_stage_is_the_config_of_the_run() -> None:
    configs = resolved(BASE + THREE)
    for config in configs:
        again = resolve_stages(from_text(to_toml(config), "config.toml"), resolve_one)
        assert [to_toml(other) for other in again] == [to_toml(other) for other in configs]


def test_sources_keep_their_numbers_and_positions() -> None:
    text = (
        BASE
        + """
[data]
path = "a"
text_column = "content"
[[stages]]
name = "one"
steps = 1
[[stages]]
name = "two"
steps = 1
[stages.data]
sources = [{path = "b", weight = 2.0}]
[[stages]]
name = "three"
steps = 1
[stages.data]
sources = [{path = "c"}, {path = "a", text_column = "content"}]
"""
    )
    mixes = [[(source.path, source.weight) for source in config.data.sources] for config in resolved(text)]
    assert mixes == [[("a", 1.0)], [("a", 0.0), ("b", 2.0)], [("a", 1.0), ("b", 0.0), ("c", 1.0)]]


def test_batch_sizes_by_tokens_are_stages() -> None:
    text = BASE.replace("global_batch_size = 4", 'global_batch_size = "4, 8 at 1K, 16 at 3K"\ntokens = "10K"')
    configs = resolved(text)
    assert [config.training.global_batch_size for config in configs] == [4, 8, 16]
    assert [config.training.steps for config in configs] == [8, 16, 30]  # 1000 / 128; 2000 / 256; 6928 / 512
    assert plan_of(configs[2]).tokens_after(30) >= 10_000 > plan_of(configs[2]).tokens_after(29)
    assert [config.job.stage for config in configs] == ["batch 4", "batch 8 from 1K", "batch 16 from 3K"]
    again = resolved(BASE.replace("global_batch_size = 4", 'global_batch_size = "4, 8 at 1K, 4 at 1.5K"\nsteps = 30'))
    assert [config.job.stage for config in again] == ["batch 4", "batch 8 from 1K", "batch 4 from 1.5K"]
    option = ["--training.global_batch_size", "4, 8 at 1K", "--training.steps", "20", "--training.seq_len", "32"]
    assert [config.training.global_batch_size for config in stage_configs(parse(option))] == [4, 8]


def batch_sizes(sizes: Sequence[int], begins: Sequence[int], total: int) -> dict[int, int]:
    """The batch size of each step, by the definition: the last one whose number of tokens has been processed."""
    step = tokens = 0
    expected = {}
    while tokens < total:
        size = next(size for size, begin in reversed(list(zip(sizes, begins, strict=True))) if tokens >= begin)
        step, tokens = step + 1, tokens + 32 * size
        expected[step] = size
    return expected


def test_batch_sizes_begin_with_the_first_step_after_their_tokens() -> None:
    """Increasing and decreasing ones, also where a batch has no step because the one before is larger."""
    random = Random(0)
    for _ in range(25):
        sizes = [random.choice((1, 2, 4, 8, 16, 64)) for _ in range(random.randint(2, 5))]
        begins = [0, *sorted(random.sample(range(100, 50_000), len(sizes) - 1))]
        total = begins[-1] + random.randint(1, 10_000)
        text = ", ".join(
            f"{size} at {begin}" if begin else str(size) for size, begin in zip(sizes, begins, strict=True)
        )
        ramp = BASE.replace("global_batch_size = 4", f'global_batch_size = "{text}"\ntokens = "{total}"')
        found: dict[int, int] = {}
        for config in resolved(ramp):
            for step in range(len(found) + 1, config.training.steps + 1):
                found[step] = config.training.global_batch_size
        assert found == batch_sizes(sizes, begins, total), text


@pytest.mark.parametrize("base", ["4", '"4, 8 at 1K"'])
def test_schedule_of_batch_sizes_in_a_stage_is_rejected(base: str) -> None:
    text = BASE.replace("global_batch_size = 4", f"global_batch_size = {base}") + THREE
    with pytest.raises(ConfigError) as error:
        resolved(text.replace("global_batch_size = 2", 'global_batch_size = "16, 32 at 50K"'))
    expected = "stages[2] (decay): training.global_batch_size = '16, 32 at 50K' must be a number; make each batch size"
    assert (expected if base == "4" else "make each batch size a stage") in str(error.value)


VALUES: dict[str, list[Any]] = {
    "training.global_batch_size": ["2, 8 at 1K", 8],
    "training.global_batch_size_schedule": ["2, 8 at 1K"],
    "data.sources": [[{"path": "b"}]],
    "validation.sources": [[{"path": "b"}]],
    "optimizer.groups": [[{"params": "*", "lr_factor": 2.0}]],
    "data.options": [{"a": 1}],
    "optimizer.options": [{"adamw": {"a": 1}}],
    "activation_checkpoint.selective_option": ["2"],
    "model.shape.tied_embeddings": [True],
}
"""Values other than the default of options where a generic one is not valid."""


def values_of(option: str, default: Any, hint: Any) -> Iterator[Any]:
    """Candidates for a value of ``option`` other than its ``default``."""
    yield from VALUES.get(option, ())
    parts = [hint, *get_args(hint), *(inner for part in get_args(hint) for inner in get_args(part))]
    for choices in [get_args(part) for part in parts if get_origin(part) is Literal]:
        yield from (choice for choice in choices if choice != default)
    for registry in registries_of(hint):
        yield from (name for name in registry if name != default)
    if isinstance(default, bool) or "bool" in str(hint):
        yield not default
    if isinstance(default, (int, float)):
        yield from (default + 1, default + 4, default / 2, 0.5, 1)
    yield from (3, 0.25, "1K", "some text", ["some text"], [3])


def options_of(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name, default and type of each option of ``section``, a dataclass."""
    hints = get_type_hints(type(section), include_extras=True)
    for option in fields(section):
        name, default = f"{prefix}{key_of(option.name)}", getattr(section, option.name)
        if is_dataclass(default):
            yield from options_of(default, f"{name}.")
        elif name != "stages":
            yield name, default, hints[option.name]


def test_every_option_in_a_stage_has_an_effect_or_is_rejected() -> None:
    base = from_text(BASE + THREE, "test.toml")
    rejected: set[str] = set()
    in_effect: set[str] = set()
    for option, default, hint in options_of(command_line_type()()):
        for value in values_of(option, default, hint):
            if option in in_effect:
                break
            table = {**base.stages[2], **nested({**set_options(base.stages[2]), option: value})}
            try:
                changed = flat(to_dict(stage_configs(replace(base, stages=(base.stages[0], table)))[1]))
            except ConfigError:
                rejected.add(option)
                continue
            own_source = changed["data.sources"][-1] if option.startswith("data.") and changed["data.sources"] else {}
            found = [changed.get(option), own_source.get(option.removeprefix("data."))]
            if option.endswith(".sources"):
                found = [[{"path": changed[option][-1]["path"]}]]
            assert value in found, (option, value)
            in_effect.add(option)
    assert {"training.seq_len", "checkpoint.interval", "checkpoint.interval_tokens", "optimizer.lr"} <= in_effect
    assert {"training.global_batch_size_schedule", "job.dump_folder", "ema.enable"} <= rejected - in_effect
    assert len(in_effect) > 80


@pytest.mark.parametrize("pair", [("checkpoint.interval", 500), ("validation.interval", 500)])
def test_number_of_a_stage_replaces_that_of_the_file_in_other_units(pair: tuple[str, int]) -> None:
    """Also by the number that is the default."""
    (in_steps, default), in_tokens = pair, f"{pair[0]}_tokens"
    section = in_steps.partition(".")[0]
    for of_file, of_stage, value in ((in_tokens, in_steps, default), (in_steps, in_tokens, "7K")):
        base = from_text(BASE.replace("interval = 2\n", "") + THREE, "test.toml")
        own = {of_file.partition(".")[2]: "9K" if of_file == in_tokens else 9}
        config = replace(base, **{section: replace(getattr(base, section), **own)})
        table = {**base.stages[2], **nested({**set_options(base.stages[2]), of_stage: value})}
        changed = flat(to_dict(stage_configs(replace(config, stages=(*base.stages[:2], table)))[2]))
        assert changed[of_stage] == value
        assert changed[of_file] in ("", default)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "steps = 4\nmodel.shape.dim = 8",
            "stages[2] (decay): model.shape.dim must not differ between stages: the model",
        ),
        ('steps = 4\nmodel.flavor = "8B"', "stages[2] (decay): model.flavor must not differ between stages"),
        ('steps = 4\noptimizer.name = "muon"', "optimizer.name must not differ between stages: another optimizer has"),
        ("steps = 4\noptimizer.groups = []", "optimizer.groups must not differ between stages"),
        ('steps = 4\noptimizer.state_dtype = "bfloat16"', "optimizer.state_dtype must not differ between stages: the"),
        (
            "steps = 4\nmup.base_dim = 8",
            "mup.base_dim must not differ between stages: the initial weights depend on it",
        ),
        ("steps = 4\ntraining.deterministic = true", "training.deterministic must not differ between stages: it must"),
        ("steps = 4\nema.enable = true", "ema.enable must not differ between stages: the averages begin with the run"),
        (
            "steps = 4\nremote_data.streams = 8",
            "remote_data.streams must not differ between stages: the position in streamed data",
        ),
        ('steps = 4\njob.dump_folder = "x"', "job.dump_folder must not differ between stages: it is an option of the"),
        ("steps = 4\ncheckpoint.enable = false", "checkpoint.enable must not differ between stages: it is an option"),
        ("steps = 4\nfaults.max_bad_steps = 1", "faults.max_bad_steps must not differ between stages: it is an option"),
        (
            "steps = 4\nlr_scheduler.total_steps = 1",
            "lr_scheduler.total_steps must not differ between stages: the sched",
        ),
        ("steps = 4\nlr_scheduler.start_step = 1", "lr_scheduler.start_step must not differ between stages"),
        ("steps = 4\nlr_scheduler.initial_lr = 1", "lr_scheduler.initial_lr must not differ between stages"),
        ("steps = 4\nlr_scheduler.total_tokens = '1K'", "lr_scheduler.total_tokens must not differ between stages"),
        ("steps = 0", "stages[2] (decay): steps = 0 must be an integer of at least 1"),
        ('steps = 4\ntokens = "1B"', "stages[2] (decay): steps = 4 and tokens = '1B' exclude each other"),
        ('tokens = "many"', "stages[2] (decay): training.tokens = 'many' must be a number of tokens"),
        ("", "stages[2] (decay): set its length, or training.tokens, or training.steps to another number than its def"),
        ("steps = 4\ndata.wieght = 1", "stages[2] (decay): data.wieght is not a known key; did you mean 'data.weight'"),
        ("steps = 4\nvalidation.steps = 0", "stages[2] (decay): validation.steps = 0 must be -1 or at least 1"),
    ],
)
def test_options_that_must_not_differ_are_rejected(table: str, message: str) -> None:
    text = BASE + THREE.split('[[stages]]\nname = "decay"')[0] + f'[[stages]]\nname = "decay"\n{table}\n'
    with pytest.raises(ConfigError) as error:
        resolved(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "long"', 'name = "main"', "stages[0] (main): another stage has this name"),
        ('name = "long"', "name = 3", "stages[1] (3): name must be a text"),
        ("steps = 10", "", "stages[0] (main): set its length, steps or tokens; only the last stage may lack it"),
        (
            "seq_len = 32",
            "seq_len = 32\nseed = 1\nsteps = 7",
            "training.steps = 7 and the steps of the last stage exclude",
        ),
        (
            "warmup_steps = 2",
            "warmup_steps = 2\ntotal_steps = 9",
            "lr_scheduler.total_steps = 9 does not go with stages",
        ),
        (
            "interval = 2",
            "interval = 2\nenable = false",
            "checkpoint.enable = false does not go with stages",
        ),
        ("global_batch_size = 4", 'global_batch_size = "4, 8 at 1K"', "and [[stages]] exclude each other"),
        (
            "seq_len = 64",
            "seq_len = 64\nglobal_batch_size = 9\nlocal_batch_size = 2",
            "stage 'long': training.global_batch",
        ),
        (
            'decay_type = "constant"',
            'decay_type = "linear"\ndecay_tokens = "1K"',
            "lr_scheduler.decay_tokens = '1K' does",
        ),
    ],
)
def test_invalid_stages_are_rejected(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolved((BASE + THREE).replace(old, new, 1))
    assert message in str(error.value)


def test_errors_of_all_stages_are_in_one_message() -> None:
    text = BASE + THREE.replace("seq_len = 64", "seed = 1").replace("global_batch_size = 2", "seed = 2")
    with pytest.raises(ConfigError) as error:
        resolved(text)
    assert "stages[1] (long): training.seed must not differ" in str(error.value)
    assert "stages[2] (decay): training.seed must not differ" in str(error.value)


def test_first_stage_trains_on_nothing_that_a_later_one_holds_out() -> None:
    base = BASE + '[data]\npath = "a.jsonl"\nheld_out = 0.01\n'
    later = '[[stages]]\nname = "one"\nsteps = 4\n[[stages]]\nname = "two"\nsteps = 4\n[stages.data]\nheld_out = '
    assert [of.data.largest_held_out for of in resolved(base + later + "0.005")] == [0.01, 0.01]
    with pytest.raises(
        ConfigError,
        match=r"stages\[1\] \(two\): held_out = 0.02 of a source must not be larger than in the first stage",
    ):
        resolved(base + later + "0.02")


@pytest.mark.parametrize("sizes", ["4, 8", "4 at 1K", "4, 8 at 2K, 16 at 1K", "four", "4,, 8 at 1K", "4, 8 at 20x"])
def test_invalid_batch_sizes_by_tokens_are_rejected(sizes: str) -> None:
    text = BASE.replace("global_batch_size = 4", f'global_batch_size = "{sizes}"\nsteps = 20')
    with pytest.raises(ConfigError, match="must be batch sizes with increasing numbers of tokens, from which on each"):
        resolved(text)


def test_batch_size_of_the_command_line_replaces_the_schedule_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ramp.toml"
    file.write_text(BASE.replace("global_batch_size = 4", 'global_batch_size = "4, 8 at 1K"\nsteps = 20'))
    options = ["--job.config_file", str(file), "--training.global_batch_size"]
    config = parse([*options, "16"])
    assert not StagePlan.divides(config)
    assert config.training.global_batch_size == 16
    assert parse([*options, "16", options[-1], "2, 4 at 1K"]).training.global_batch_size_schedule == "2, 4 at 1K"
    assert not StagePlan.divides(parse([*options, "2, 4 at 1K", f"{options[-1]}=16"]))


def test_run_that_ends_before_its_last_stage_is_rejected() -> None:
    text = BASE.replace("global_batch_size = 4", 'global_batch_size = "4, 8 at 1K"\nsteps = 8')
    with pytest.raises(
        ConfigError, match=r"training.steps = 8 ends before the last stage, 'batch 8 from 1K', begins \(after step 8"
    ):
        resolved(text)


# Resume


def check(saved: JobConfig, current: JobConfig, step: int) -> list[str]:
    now = plan_of(current).config_of_saved_stage(to_toml(saved), step, ())
    return check_resume_compatibility(to_toml(saved), now, ())


def test_edited_future_is_accepted() -> None:
    before = resolved(BASE + THREE)
    longer = (BASE + THREE).replace("steps = 4", "steps = 9").replace("rope_theta = 20000", "rope_theta = 30000")
    more = longer + '[[stages]]\nname = "last"\nsteps = 1\n'
    after = resolved(more)
    for step in (6, 10):
        lines = check(before[0], after[stage_of_step(after, step)], step)
        assert [
            line for line in lines if not line.startswith("config differs from the checkpoint's (harmless): stages")
        ] == []
    longer_now = resolved((BASE + THREE).replace("steps = 10", "steps = 12"))
    (line,) = check(before[0], longer_now[0], 6)  # the stage under way, too
    assert line.startswith("config differs from the checkpoint's (harmless): stages")
    assert "training.steps = 12 (checkpoint: 10)" in line


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps = 10", "steps = 12", "stage 'main' is finished and cannot be changed: steps = 12 (checkpoint: 10)"),
        ("steps = 10", "steps = 10\nz = 1", ""),
        (
            'name = "main"',
            'name = "first"',
            "after the stages ['main'], and the stages of this run are ['first', 'long'",
        ),
    ],
)
def test_edited_past_is_rejected(old: str, new: str, message: str) -> None:
    before = resolved(BASE + THREE)
    text = (BASE + THREE).replace(old, new.replace("z = 1", "training.z_loss_weight = 0.1"))
    message = message or "'main' is finished and cannot be changed: training.z_loss_weight = 0.1 (checkpoint: 0.0)"
    after = resolved(text)
    with pytest.raises(CheckpointError) as error:
        check(before[1], after[1], 14)
    assert message in str(error.value)


def test_edit_of_a_later_stage_is_named_option_by_option() -> None:
    saved, current = resolved(BASE + THREE), resolved(BASE + THREE.replace("rope_theta = 20000", "rope_theta = 30000"))
    (line,) = check(saved[0], current[0], 4)
    assert line == (
        "config differs from the checkpoint's (harmless): stages[long].model.shape.rope_theta = 30000.0 (checkpoint: "
        "20000.0)"
    )
    longer = resolved(BASE + THREE + '[[stages]]\nname = "more"\nsteps = 2\n')
    (line,) = check(saved[0], longer[0], 4)
    assert "stages = ['main', 'long', 'decay', 'more'] (checkpoint: ['main', 'long', 'decay'])" in line
    assert len(line) < 1000


def test_option_of_the_stage_under_way_is_compared_as_in_any_run() -> None:
    before, after = (resolved((BASE + THREE).replace("20000", base)) for base in ("20000", "30000"))
    with pytest.raises(CheckpointError, match=r"model.shape.rope_theta = 30000.0 \(checkpoint: 20000.0\)"):
        check(before[1], after[1], 14)
    with pytest.raises(CheckpointError, match=r"stage 'main' has been trained up to step 6, and now ends after step 5"):
        check(before[0], resolved((BASE + THREE).replace("steps = 10", "steps = 5"))[1], 6)


def test_checkpoint_of_another_stage_is_not_resumed_from() -> None:
    stages = resolved(BASE + THREE)
    for number, step in ((1, 9), (2, 10), (0, 11)):
        with pytest.raises(OtherStageError):
            check(stages[stage_of_step(stages, step - 1)], stages[number], step)


# What is shown


def test_stages_are_described_at_the_start_and_in_the_report(tmp_path: Path, sources: dict[str, str]) -> None:
    """With the tokens, the steps, the rates and the epochs of the whole run, also where a later stage describes it."""
    file = staged_config(tmp_path, sources)
    terminal = Terminal(120)
    options = ("--job.config_file", str(file), "--report.enable", "--metrics.log_freq", "1")
    finish(tmp_path / "run", *options, ranks=1, hook=terminal.hook)
    screen = terminal.close()
    table = [
        ("stage", "steps", "tokens", "batch", "length", "learning rate", "data"),
        ("main", "1 to 3", "384", "4", "32", "0.005 to 0.01", "a 0.333, b 0.667"),
        ("long", "4 to 6", "768", "4", "64", "0.01", "a 0.167, b 0.333, c 0.5"),
        ("decay", "7 to 9", "192", "2", "32", "0.01 to 0.00333", "a 0.167, b 0.333, c 0.5"),
    ]
    lines = screen.splitlines()
    (begin,) = (number for number, line in enumerate(lines) if "the stages of the run:" in line)
    shown = [tuple(re.split(r"  +", line.strip())) for line in lines[begin + 1 : begin + 5]]
    assert shown == table
    report = (tmp_path / "run" / "report.md").read_text()
    assert [row for row in table if f"| {' | '.join(row)} |" not in report] == []
    total = [line for line in read_metrics(tmp_path / "run") if "loss" in line][-1]["tokens"]
    assert total == 384 + 768 + 192
    starts = [line for line in read_metrics(tmp_path / "run") if line.get("event") == "start"]
    assert [(line["steps"], line["total_tokens"]) for line in starts] == [(9, total)] * 3
    for letter, share in (("a", 384 / 3 + (768 + 192) / 6), ("c", (768 + 192) / 2)):
        (source,) = (source for source in starts[-1]["sources"] if source["source"] == letter)
        assert source["epochs"] == pytest.approx(share / source["tokens"])
    texts = [dict(line["banner"]) for line in starts]
    run = f"the run in 9 steps 1.34K, {total / starts[0]['parameters']:.2g} per parameter"
    assert [text["batch"] for text in texts] == [
        f"4 sequences, 128 tokens; {run}",
        f"4 sequences, 256 tokens; {run}",
        f"2 sequences, 64 tokens; {run}",
    ]
    assert texts[2]["stage"] == "decay (3 of 3): steps 7 to 9, 192 tokens"
    assert texts[2]["schedule"] == "linear to 0 after step 9"
    assert f"| batch | {texts[2]['batch']} |" in report


# Runs

SHAPE = replace(TINY, n_kv_heads=2)  # for tensor parallelism
OPTIONS = {
    "float32": [],
    "bfloat16": ["--training.mixed_precision_param", "bfloat16"],
    "adamw": [],
    "muon": ["--optimizer.name", "muon", "--ema.enable"],
    "one rank": [],
    "shard 2 x tensor 2": ["--parallelism.tensor_parallel_degree", "2"],
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sources")
    a = write_jsonl(folder / "a.jsonl", DOCUMENTS)
    b = write_tokens(folder / "b", write_jsonl(folder / "b.jsonl", [text[::-1] for text in DOCUMENTS]))
    return {"a": a, "b": b, "c": write_jsonl(folder / "c.jsonl", DOCUMENTS[:30])}


def mix(sources: dict[str, str], letters: str) -> str:
    tables = ", ".join(f'{{path = "{sources[letter]}", weight = {n + 1}}}' for n, letter in enumerate(letters))
    return f"sources = [{tables}]"


def staged_config(folder: Path, sources: dict[str, str], lengths: tuple[int, int, int] = (3, 3, 3)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    main, long, decay = lengths
    file = folder / "staged.toml"
    file.write_text(
        f"{CONFIG.replace('steps = 8', '')}\n"
        f'[[stages]]\nname = "main"\nsteps = {main}\n[stages.data]\n{mix(sources, "ab")}\n'
        f'[[stages]]\nname = "long"\nsteps = {long}\n[stages.data]\n{mix(sources, "abc")}\n'
        "[stages.training]\nseq_len = 64\n[stages.model.shape]\nrope_theta = 20000.0\n"
        f'[[stages]]\nname = "decay"\nsteps = {decay}\n[stages.data]\n{mix(sources, "abc")}\n'
        '[stages.training]\nglobal_batch_size = 2\n[stages.lr_scheduler]\ndecay_type = "linear"\n'
    )
    return file


def run_by_hand(folder: Path, sources: dict[str, str], options: list[str], ranks: int) -> None:
    """The chain of runs: the same command three times, with other options and what may change."""
    schedule = [
        f"lr_scheduler.{key}" for key in ("decay_type", "total_steps", "start_step", "initial_lr", "warmup_steps")
    ]
    allowed = ["data.sources", "training.seq_len", "training.global_batch_size", "model.shape.rope_theta", *schedule]
    spanning = ["--lr_scheduler.total_steps", "9"]
    of_stages = [
        ("ab", ["--training.steps", "3", *spanning]),
        (
            "abc",
            [
                *("--training.steps", "6", "--training.seq_len", "64", "--model.shape.rope_theta", "20000"),
                *spanning,
            ],
        ),
        (
            "abc",
            [
                *("--training.steps", "9", "--training.global_batch_size", "2", "--lr_scheduler.warmup_steps", "0"),
                *("--lr_scheduler.decay_type", "linear", "--lr_scheduler.start_step", "6"),
                *("--lr_scheduler.initial_lr", "0.01"),
            ],
        ),
    ]
    folder.mkdir(exist_ok=True)
    for letters, own in of_stages:
        file = folder / "by_hand.toml"
        file.write_text(f"{CONFIG}\n[data]\n{mix(sources, letters)}\n")
        arguments = ["--job.config_file", str(file), *options, *own, "--checkpoint.allow_changes", *allowed]
        # A run in stages knows the longest sequences of all, and orders its data for them.
        finish(folder, *arguments, "--data.longest_seq_len", "64", ranks=ranks, shape=SHAPE)


@pytest.mark.parametrize(
    ("layout", "dtype", "optimizer"),
    [
        ("one rank", "float32", "adamw"),
        *(
            pytest.param(layout, dtype, optimizer, marks=pytest.mark.slow)
            for layout in ("one rank", "shard 2 x tensor 2")
            for dtype in ("float32", "bfloat16")
            for optimizer in ("adamw", "muon")
            if (layout, dtype, optimizer) != ("one rank", "float32", "adamw")
        ),
    ],
)
def test_stages_are_the_chain_of_runs_by_hand(
    tmp_path: Path, sources: dict[str, str], layout: str, dtype: str, optimizer: str
) -> None:
    options = [*OPTIONS[layout], *OPTIONS[dtype], *OPTIONS[optimizer]]
    ranks = 1 if layout == "one rank" else 4
    config = staged_config(tmp_path / "staged", sources)
    options += ["--diagnostics.norms_freq", "3"]
    output = finish(tmp_path / "staged", "--job.config_file", str(config), *options, ranks=ranks, shape=SHAPE)
    run_by_hand(tmp_path / "by_hand", sources, options, ranks)
    for step in (2, 3, 4, 6, 8, 9):
        ours, theirs = (saved_tensors(tmp_path / name, step) for name in ("staged", "by_hand"))
        assert different_tensors(ours, theirs) == [], f"step {step}"
    assert logged_losses(tmp_path / "staged") == logged_losses(tmp_path / "by_hand")
    lines = [line for line in read_metrics(tmp_path / "staged") if "loss" in line]
    assert [line["stage"] for line in lines] == ["main"] * 3 + ["long"] * 3 + ["decay"] * 3
    assert [line for line in read_metrics(tmp_path / "staged") if "event" not in line and "stage" not in line] == []
    assert [line["tokens"] for line in lines] == [128, 256, 384, 640, 896, 1152, 1216, 1280, 1344]
    assert "stage 'long' (2 of 3): steps 4 to 6, 4 sequences of 64 tokens a step" in output


@pytest.mark.parametrize("order", ["aba", pytest.param("bab", marks=pytest.mark.slow)])
def test_source_continues_from_its_place_after_a_stage_without_it(
    tmp_path: Path, sources: dict[str, str], order: str
) -> None:
    """Text and prepared data: the batches are those of a run that reads only this source."""
    config = CONFIG.replace("steps = 8", "")
    tables = ""
    for number, letter in enumerate(order):
        tables += f'[[stages]]\nname = "{number}"\nsteps = 2\n[stages.data]\npath = "{sources[letter]}"\n'

    def batches(name: str, text: str, *steps: int) -> list[list[list[int]]]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "own.toml").write_text(f"{config}\n{text}\n[comparison]\nfingerprint_steps = {list(steps)}\n")
        last = [] if "stages" in text else ["--training.steps", "4"]
        finish(folder, "--job.config_file", str(folder / "own.toml"), *last, ranks=1)
        return [read_fingerprints(folder / f"fingerprints/step-{step}").rows.tolist() for step in steps]

    staged = batches("staged", tables, 1, 2, 5, 6)
    # Of two sources, as the order of a source depends on its number.
    tables = ", ".join(f'{{path = "{sources[letter]}", weight = {1 - n}}}' for n, letter in enumerate(order[:2]))
    assert staged == batches("alone", f"[data]\nsources = [{tables}]", 1, 2, 3, 4)
    assert len({str(batch) for batch in staged}) == 4


class AtBorder(AbstractContextManager[None]):
    """Calls ``action`` between two stages."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.patch = patch("torchtrain.plugins.stages.driver._release_memory", lambda _: action())

    def __enter__(self) -> None:
        self.patch.start()

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


def killed_at_border() -> AtBorder:
    return AtBorder(lambda: os._exit(9))


def signal_at_border() -> AtBorder:
    """Only the second rank receives it."""
    return AtBorder(lambda: os.kill(os.getpid(), signal.SIGUSR1) if os.environ["RANK"] == "1" else None)


@contextmanager
def limit_in_step_3() -> Iterator[None]:
    """The wall-clock limit is reached in step 3, after the ranks have agreed to continue."""
    save = Trainer.save

    def save_late(self: Trainer, *arguments: Any, **options: Any) -> None:
        save(self, *arguments, **options)
        if self.step == 3:
            self.stop._clock_deadline = time.monotonic() + 1

    with patch.object(Trainer, "save", save_late):
        yield


def test_stop_between_stages_is_one_of_the_run(tmp_path: Path, sources: dict[str, str]) -> None:
    """By a signal between two stages, and by the wall-clock limit in the last step of one; then the run resumes."""
    config = staged_config(tmp_path, sources, (2, 1, 1))
    options = ["--job.config_file", str(config), "--huggingface.export", "--report.enable"]
    for hook, ranks, step, message in (
        (signal_at_border, 2, 2, "stopped as requested: before stage 'long' continues"),
        (limit_in_step_3, 1, 3, "stopped as requested: step 3 of 4; outputs are in"),
    ):
        run = ForkedRun(tmp_path, *options, ranks=ranks, hook=hook)
        assert run.wait() == [StoppedError.exit_code] * ranks, run.output()
        assert message in run.output()
        assert max(logged_losses(tmp_path)) == step
        assert (tmp_path / f"checkpoint/step-{step}").is_dir()
        assert not (tmp_path / "hf").exists()
        assert not (tmp_path / "report.md").exists()
    output = finish(tmp_path, *options, ranks=1)
    assert list(logged_losses(tmp_path)) == [1, 2, 3, 4]
    assert output.count("done: step 4 of 4; outputs are in") == output.count("done: ") == 1
    assert output.count("results of") == 2  # those of the run that was stopped in step 3, and of the last one
    assert output.count(f"wrote {tmp_path}/hf") == 1
    assert (tmp_path / "report.md").exists()


def test_data_that_end_in_a_middle_stage_end_the_run(tmp_path: Path, sources: dict[str, str]) -> None:
    config = staged_config(tmp_path, sources, (1, 900, 1))
    config.write_text(config.read_text() + '[data]\nwhen_exhausted = "stop"\n')
    options = ["--job.config_file", str(config), "--huggingface.export"]
    output = finish(tmp_path, *options, "--metrics.log_freq", "100", "--checkpoint.interval", "1000", ranks=1)
    assert "the data of stage 'long' ended at step" in output
    assert output.count("the data ended (data.when_exhausted = 'stop'): step") == 1
    assert "done: " not in output
    assert (tmp_path / "hf/config.json").exists()


def test_data_of_later_stages_are_opened_before_the_first_step(tmp_path: Path, sources: dict[str, str]) -> None:
    config = staged_config(tmp_path, {**sources, "c": str(tmp_path / "missing.jsonl")})
    run = ForkedRun(tmp_path, "--job.config_file", str(config), ranks=1)
    assert run.wait() == [DataError.exit_code], run.output()
    assert "stage 'long': data" in run.output()
    assert "missing.jsonl" in run.output()
    assert not logged_losses(tmp_path)


def test_tasks_of_later_stages_are_loaded_before_the_first_step(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    file, held_out = tmp_path / "staged.toml", tmp_path / "held-out.txt"
    held_out.write_text("some words")
    validation = (
        f'[stages.validation]\nenable = true\npath = "{held_out}"\n'
        '[stages.evaluation]\ntasks = ["no_such_task"]\n[stages.training]\n'
    )
    file.write_text(BASE + THREE.replace("[stages.training]\n", validation, 1))
    run = ForkedRun(tmp_path, "--job.config_file", str(file), ranks=1, hook=skip_slow_parts)
    assert run.wait() == [ConfigError.exit_code], run.output()
    assert "stage 'long': evaluation.tasks: no_such_task are not tasks" in run.output()
    assert not logged_losses(tmp_path)


def test_all_stages_are_checked_before_the_first(tmp_path: Path) -> None:
    file = tmp_path / "staged.toml"
    backend = '[stages.training]\nattention_backend = "cudnn"\n'
    file.write_text(BASE + THREE.replace("[stages.training]\n", backend, 1))
    with pytest.raises(ConfigError, match=r"stage 'long': training.attention_backend = 'cudnn' needs a GPU"):
        train_in_stages(parse(["--job.config_file", str(file), "--job.device", "cpu"]), pytest.fail)


@dataclass
class FakeTrainer:
    """Trains a stage of ``BASE + THREE`` by calling ``action`` in its last step."""

    config: JobConfig
    stop: StopRequest
    action: Callable[["FakeTrainer"], None]
    gloo_group: None = None
    metrics: Any = field(default_factory=SimpleNamespace)

    def __post_init__(self) -> None:
        self.step = {"main": 0, "long": 10, "decay": 18}[self.config.job.stage]

    def train(self) -> int:
        self.step = self.config.training.steps
        self.action(self)
        return StoppedError().exit_code if self.stop.agreed else 0


def train_fake_stages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    action: Callable[[FakeTrainer], None],
    built: list[str],
    options: str = "",
    open_data: Callable[..., None] = lambda *_: None,
) -> int:
    """``train_in_stages`` without process groups, model and data; appends the name of each stage to ``built``."""

    def build(config: JobConfig, _: Any, stop: StopRequest, __: Any) -> Any:
        built.append(config.job.stage)
        return FakeTrainer(config, stop, action)

    monkeypatch.setattr("torchtrain.plugins.stages.driver.open_data_of_later_stages", open_data)
    monkeypatch.setattr("torchtrain.plugins.stages.driver.destroy_process_group", lambda: None)
    monkeypatch.setattr("torchtrain.fault_tolerance.stop_request.all_reduce", lambda *_: None)
    file = tmp_path / "staged.toml"
    file.write_text(f'{BASE}{THREE}\n[job]\ndump_folder = "{tmp_path}"\n{options}')
    return train_in_stages(parse(["--job.config_file", str(file), "--job.device", "cpu"]), build)


@pytest.mark.parametrize("step", [4, 10])
def test_stopped_stage_ends_the_run_if_torchrun_has_restarts_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: int
) -> None:
    """Within the first stage and after its last step; the exit code is then 0 as that of a finished stage."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")

    def stop(trainer: FakeTrainer) -> None:
        trainer.step, trainer.stop.agreed = step, True

    built: list[str] = []
    assert train_fake_stages(tmp_path, monkeypatch, stop, built) == 0
    assert built == ["main"]
    assert "the data of stage" not in caplog.text


def test_signals_are_handled_only_after_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In later stages also during setup. The wall-clock limit counts from the beginning."""
    handled: list[bool] = []

    def note(*_: object) -> Any:
        handled.append(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)

    class Noting(list[str]):
        def append(self, stage: str) -> None:
            super().append(stage)
            note()

    resolve = driver.resolve_stages

    def resolve_and_note(*arguments: Any) -> Any:
        resolved_at.append(time.monotonic())
        return resolve(*arguments)

    resolved_at: list[float] = []
    starts: list[float] = []
    built = Noting()
    monkeypatch.setattr("torchtrain.plugins.stages.driver.resolve_stages", resolve_and_note)

    def action(trainer: FakeTrainer) -> None:
        starts.append(trainer.stop._clock_deadline - 60 * 1000)
        note()

    code = train_fake_stages(
        tmp_path, monkeypatch, action, built, "[faults]\nwall_clock_limit_minutes = 1000\n", open_data=note
    )
    assert code == 0
    assert built == ["main", "long", "decay"]
    assert handled == [False, False, True, True, True, True, True]
    assert starts[0] <= resolved_at[0]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


class StopBuilding(Exception):
    pass


def test_attention_backend_of_a_stage_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the next stage has the default, "auto"; a run without stages keeps the choice of the process."""
    monkeypatch.setattr("torchtrain.trainer.enable_flight_recorder", Mock(side_effect=StopBuilding))
    names = ("math", "auto", "flash", "auto")
    tables = (
        f'[[stages]]\nname = "{n}"\nsteps = 2\n[stages.training]\nattention_backend = "{name}"\n'
        for n, name in enumerate(names)
    )
    found = []
    try:
        for config in resolved(BASE + "".join(tables)):
            with pytest.raises(StopBuilding):
                Trainer(config)
            kinds = ("cudnn", "flash", "mem_efficient", "math")
            found.append([kind for kind in kinds if getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()])
        everything = ["cudnn", "flash", "mem_efficient", "math"]
        assert found == [["math"], everything, ["flash"], everything]
        torch.backends.cuda.enable_cudnn_sdp(False)
        with pytest.raises(StopBuilding):
            Trainer(from_text(BASE, "test.toml"))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        choose_attention_backend("auto")


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_code_of_a_stage_is_freed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    reset, collect = Mock(), Mock()
    monkeypatch.setattr(torch.compiler, "reset", reset)
    monkeypatch.setattr(driver.gc, "collect", collect)
    options = f"[compile]\nenable = {str(compiled).lower()}\n"
    train_fake_stages(tmp_path, monkeypatch, lambda _: None, [], options)
    assert (reset.call_count, collect.call_count) == (3 * compiled, 3)


def test_later_stages_of_a_process_are_marked_in_its_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = []
    train_fake_stages(tmp_path, monkeypatch, lambda trainer: marks.append(trainer.metrics.same_process), [])
    assert marks == [False, True, True]


def trainer_of(config: JobConfig) -> Any:
    """What ``open_data_of_later_stages`` uses of a trainer; its data are opened without a process group."""
    tokenizer = load_tokenizer("")

    def opened(section: str, source: SourceConfig) -> Any:
        context = SourceContext(section, tokenizer, config.training.global_batch_size, plugins=config.plugins)
        return open_source(source, context)

    training = [opened("data", source) for source in config.data.all]
    validation = config.validation.all if config.validation.enable else ()
    return SimpleNamespace(
        dataloader=SimpleNamespace(sources=training),
        validation_loaders={of.title: SimpleNamespace(sources=[opened("validation", of)]) for of in validation},
        tokenizer=tokenizer,
        gloo_group=None,
        saved=SavedRun(config),
    )


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("on_rank0", "on_all_ranks"):
        monkeypatch.setattr(f"torchtrain.plugins.stages.driver.{name}", lambda function, _: function())


def open_data(text: str, ranks: int = 1) -> None:
    stages = resolve_stages(from_text(text, "test.toml"), lambda own: (resolve_layout(own, MODEL, ranks)[0], MODEL))
    open_data_of_later_stages(stages, trainer_of(stages[0]))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["url", "hub", "tokens"])
def test_data_are_streamed_in_the_same_number_of_streams_in_all_stages(tmp_path: Path, kind: str) -> None:
    """A folder of tokens has no streams. Validation begins again in each stage, and may be in any number of them."""
    (tmp_path / "text").mkdir()
    text = write_jsonl(tmp_path / "text" / "train.jsonl", DOCUMENTS)
    url = (tmp_path / "text").as_uri()
    if kind == "tokens":
        source = f'path = "{Path(write_tokens(tmp_path / "tokens", text)).as_uri()}"'
    else:
        source = f'path = "{url}"' if kind == "url" else f'name = "{tmp_path}/text"'
    batches = BASE.replace("global_batch_size = 4", 'global_batch_size = "96, 128 at 1M"\ntokens = "2M"')
    config = f'{batches}\n[data]\n{source}\n[validation]\nenable = true\npath = "{url}"\n'
    open_data(f"{config}[remote_data]\nstreams = 32\n")
    if kind == "tokens":
        open_data(config)
        return
    with pytest.raises(
        DataError,
        match=r"^stage 'batch 128 from 1M': data\..* is streamed in 64 streams with training.global_batch_size = 128, "
        "and in 48 in an earlier stage",
    ):
        open_data(config)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("section", ["data", "validation"])
def test_ranks_that_do_not_divide_the_streams_of_a_later_stage_are_an_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    text = write_jsonl(tmp_path / "train.jsonl", DOCUMENTS)
    stages = f'''[[stages]]
name = "local"
steps = 2
[[stages]]
name = "streamed"
steps = 2
{section}.path = "{Path(text).as_uri()}"
'''
    config = BASE.replace("global_batch_size = 4", "global_batch_size = 12") + stages
    config += f'[data]\npath = "{text}"\n[validation]\nenable = true\npath = "{text}"\n[remote_data]\nstreams = 6\n'
    open_data(config)
    monkeypatch.setattr("torchtrain.plugins.stages.driver.world_size", lambda: 4)
    message = rf"^stage 'streamed': {section}.path = .* is streamed in 6 streams, .* data-parallel ranks must divide"
    with pytest.raises(DataError, match=message):
        open_data(config, ranks=4)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_streamed", [False, True])
def test_later_stage_without_held_out_documents_is_an_error_at_the_start(tmp_path: Path, is_streamed: bool) -> None:
    first = write_jsonl(tmp_path / "first.jsonl", DOCUMENTS)
    later = Path(write_jsonl(tmp_path / "later.jsonl", DOCUMENTS[:1]))
    url = later.as_uri() if is_streamed else later
    tables = f'''[data]
path = "{first}"
held_out = 0.5
[[stages]]
name = "one"
steps = 2
[[stages]]
name = "two"
steps = 2
data.path = "{url}"
data.held_out = 1e-6
'''
    with pytest.raises(DataError, match=r"^stage 'two': data.held_out = 1e-06 holds out none of the .*documents"):
        open_data(BASE + tables)


@pytest.mark.parametrize("error", [None, FaultError("not finite")])
def test_garbage_is_collected_again_after_training(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """Automatically, as in the construction of the next stage's trainer."""
    monkeypatch.setattr("torchtrain.trainer.destroy_process_group", lambda: None)
    enabled = []

    def run_steps() -> None:
        enabled.append(gc.isenabled())
        if error is not None:
            raise error

    trainer = MagicMock(run_steps=run_steps)
    trainer.running = lambda: Trainer.running(trainer)
    trainer.misses_validation.return_value = trainer.was_stopped.return_value = False
    try:
        with nullcontext() if error is None else pytest.raises(FaultError, match="not finite"):
            assert Trainer.train(trainer) == 0
        assert enabled == [False]
        assert gc.isenabled()
    finally:
        gc.enable()


def no_validation_seen() -> Any:
    return patch("torchtrain.plugins.stages.driver.has_validation", lambda *_: False)


def slow_steps_in(environment: dict[str, str]) -> Any:
    os.environ.update(environment)
    return slow_steps()


def hold_before_the_second_stage(folder: Path, environment: dict[str, str]) -> Any:
    """Wait, once the first stage has ended, until the file ``go`` is in ``folder``."""
    os.environ.update(environment)
    build = driver._build_or_other_step

    def wait(make: Any, stage: JobConfig, *arguments: Any) -> Any:
        if stage.job.stage == "long":
            (folder / "held").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
        return build(make, stage, *arguments)

    return patch.object(driver, "_build_or_other_step", wait)


@pytest.mark.parametrize("where", ["folder", pytest.param("bucket", marks=pytest.mark.slow)])
def test_older_start_between_two_stages_does_not_take_the_lease_from_a_newer_one(
    tmp_path: Path, sources: dict[str, str], where: str, s3_server: S3Server
) -> None:
    options = ["--job.config_file", str(staged_config(tmp_path, sources))]
    if where == "bucket":
        options += ["--checkpoint.folder", "s3://bucket/stages/checkpoint"]
    hold = partial(hold_before_the_second_stage, tmp_path, s3_server.environment)
    older = ForkedRun(tmp_path / "older", *options, ranks=1, hook=hold)
    older.wait_for((tmp_path / "held").exists)
    options += ["--checkpoint.folder", str(tmp_path / "older/checkpoint")] if where == "folder" else []
    newer = ForkedRun(tmp_path / "newer", *options, ranks=1, hook=partial(slow_steps_in, s3_server.environment))
    newer.wait_for(lambda: "saved " in newer.output())
    (tmp_path / "go").touch()
    assert older.wait() == [2], older.output()
    assert newer.wait() == [0], newer.output()
    assert "now saves to" in older.output()


def numbers_by_step(folder: Path) -> list[tuple[int, float, float, float]]:
    """Step, loss, gradient norm and learning rate of all lines, also of repeated steps."""
    lines = [line for line in read_metrics(folder) if "loss" in line and "event" not in line]
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in lines]


@dataclass
class Undisturbed:
    folder: Path
    seconds: float  # from the start to the end, with slow steps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, sources: dict[str, str]) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    options = ("--job.config_file", str(staged_config(folder, sources)), "--training.sums", "exact")
    run = ForkedRun(folder, *options, ranks=1, hook=slow_steps)
    run.wait_for(lambda: run.output() != "")  # the first process of the tests also waits for the fork server
    began = time.monotonic()
    assert run.wait() == [0], run.output()
    return Undisturbed(folder, time.monotonic() - began)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("where", ["folder", "bucket"])
@pytest.mark.parametrize("seed", range(20))
def test_two_starts_at_random_offsets_with_one_suspended(
    tmp_path: Path,
    sources: dict[str, str],
    undisturbed: Undisturbed,
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    seed: int,
) -> None:
    """The start that holds the lease ends with 0. The other one ends with 2 and says why, if it was not done before."""
    for key, value in s3_server.environment.items():
        monkeypatch.setenv(key, value)
    rng = Random(f"{where} {seed}")
    # By mistake, a run is started twice on one machine, or on two machines that share nothing but the bucket.
    first, second = ("run", "run") if where == "folder" else ("first", "second")
    location = str(tmp_path / "run/checkpoint") if where == "folder" else f"s3://bucket/pair-{seed}/checkpoint"
    options = ["--job.config_file", str(staged_config(tmp_path, sources)), "--training.sums", "exact"]
    options += ["--checkpoint.folder", location]
    hook = partial(slow_steps_in, s3_server.environment)

    began = time.monotonic()
    offset = rng.uniform(0, undisturbed.seconds)
    suspended = rng.randrange(2)
    suspended_at = suspended * offset + rng.uniform(0, undisturbed.seconds)
    resumed_at = suspended_at + rng.uniform(0, undisturbed.seconds)
    starts = [ForkedRun(tmp_path / first, *options, ranks=rng.choice([1, 1, 2]), hook=hook)]
    events: list[tuple[float, Callable[[], object]]] = [
        (offset, lambda: starts.append(ForkedRun(tmp_path / second, *options, ranks=rng.choice([1, 1, 2]), hook=hook))),
        (suspended_at, lambda: starts[suspended].kill(number=signal.SIGSTOP)),
        (resumed_at, lambda: starts[suspended].kill(number=signal.SIGCONT)),
    ]
    for moment, event in sorted(events, key=lambda it: it[0]):
        time.sleep(max(0.0, began + moment - time.monotonic()))
        event()
    codes = [start.wait() for start in starts]
    holder = open_storage(location).read_lease().process
    for start, found in zip(starts, codes, strict=True):
        assert len(set(found)) == 1, start.output()
        assert found[0] == 0 or holder != start.processes[0].pid, start.output()
        assert found[0] == 0 or (found[0] == 2 and "error: generation" in start.output()), start.output()
        assert "Traceback" not in start.output()
    expected = numbers_by_step(undisturbed.folder)
    for folder in {tmp_path / first, tmp_path / second}:
        assert set(numbers_by_step(folder)) <= set(expected)
    complete = [tmp_path / (first, second)[n] for n in range(2) if codes[n][0] == 0]
    for folder in complete:
        assert set(numbers_by_step(folder)) == set(expected)
    assert different_tensors(tensors(open_storage(location).open(9)), saved_tensors(undisturbed.folder, 9)) == []
    assert not [name for name in open_storage(location).names() if "superseded" in name or "damaged" in name]


def test_complete_stage_is_not_called_a_complete_run(tmp_path: Path, sources: dict[str, str]) -> None:
    """If the validation of its last step is found only when its trainer is built."""
    (tmp_path / "held_out.txt").write_text("some words\n" * 50)
    validation = ("--validation.enable", "--validation.path", str(tmp_path / "held_out.txt"))
    options = ("--job.config_file", str(staged_config(tmp_path, sources, (1, 1, 1))), *validation)
    finish(tmp_path / "run", *options, ranks=1)
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"run/checkpoint/step-{step}")
    output = finish(tmp_path / "run", *options, ranks=1, hook=no_validation_seen)
    assert "stage 'main' is complete: step 1" in output
    assert output.count("the run is complete") == 0


def test_nothing_refers_to_a_trainer_whose_construction_failed() -> None:
    built: list[Any] = []

    def build(*_: object) -> Any:
        model = torch.nn.Linear(1, 1)
        built.append(weakref.ref(model))
        raise OtherStageError(7)

    unused: Any = None
    assert _build_or_other_step(build, unused, unused, unused, unused) == 7
    assert built[0]() is None


@pytest.mark.parametrize("killed", [(2,), pytest.param((2, 1), marks=pytest.mark.slow)])
def test_run_killed_at_borders_ends_like_an_undisturbed_one(
    tmp_path: Path, sources: dict[str, str], killed: tuple[int, ...]
) -> None:
    """With exact sums bitwise, also on other numbers of ranks. ``killed``: ranks until the end of the next stage."""
    exact = ["--training.sums", "exact"]
    config = staged_config(tmp_path / "whole", sources, (2, 1, 1))
    finish(tmp_path / "whole", "--job.config_file", str(config), *exact, ranks=1)
    config = staged_config(tmp_path / "killed", sources, (2, 1, 1))
    options = ["--job.config_file", str(config), *exact]
    for ranks in killed:
        run = ForkedRun(tmp_path / "killed", *options, ranks=ranks, hook=killed_at_border)
        assert run.wait() == [9] * ranks, run.output()
    finish(tmp_path / "killed", *options, ranks=1)
    for step in (2, 3, 4):
        ours, theirs = (saved_tensors(tmp_path / name, step) for name in ("killed", "whole"))
        assert different_tensors(ours, theirs) == [], f"step {step}"
    assert logged_losses(tmp_path / "killed") == logged_losses(tmp_path / "whole")


@pytest.fixture
def complete(complete_run: Path, tmp_path: Path) -> Path:
    """A copy of ``complete_run``."""
    return Path(shutil.copytree(complete_run, tmp_path, dirs_exist_ok=True))


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory: pytest.TempPathFactory, sources: dict[str, str]) -> Path:
    """The folder of a run in stages of 3, 1 and 1 steps."""
    folder = tmp_path_factory.mktemp("complete")
    finish(folder, "--job.config_file", str(staged_config(folder, sources, (3, 1, 1))), ranks=1)
    return folder


def test_damaged_checkpoint_leads_back_to_the_stage_before(tmp_path: Path, complete: Path) -> None:
    first = (complete / "rank-0.log").read_text()
    before = saved_tensors(tmp_path, 5)
    for step in (3, 4):
        shutil.rmtree(tmp_path / f"checkpoint/step-{step}")
    (file,) = (tmp_path / "checkpoint/step-5").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    output = finish(tmp_path, "--job.config_file", str(tmp_path / "staged.toml"), ranks=1).removeprefix(first)
    begun = re.findall(r"stage '(\w+)' \(\d of 3\)|(resumed from) \S+/(step-\d)", output)
    assert begun == [
        *[("decay", "", ""), ("main", "", ""), ("", "resumed from", "step-2")],
        *[("long", "", ""), ("", "resumed from", "step-3"), ("decay", "", ""), ("", "resumed from", "step-4")],
    ]
    assert (tmp_path / "checkpoint/step-5.damaged").is_dir()
    assert different_tensors(saved_tensors(tmp_path, 5), before) == []


def test_run_is_edited_and_extended(tmp_path: Path, complete: Path) -> None:
    config = complete / "staged.toml"
    options = ["--job.config_file", str(config)]
    config.write_text(config.read_text() + '[[stages]]\nname = "more"\nsteps = 2\n')
    finish(tmp_path, *options, ranks=1)
    assert list(logged_losses(tmp_path)) == [1, 2, 3, 4, 5, 6, 7]
    config.write_text(config.read_text().replace("20000.0", "10.0"))
    run = ForkedRun(tmp_path, *options, ranks=1)
    assert run.wait() == [CheckpointError.exit_code]
    assert "stage 'long' is finished and cannot be changed: model.shape.rope_theta = 10.0" in run.output()


@pytest.mark.slow
def test_run_killed_ten_times_on_three_numbers_of_ranks(tmp_path: Path, sources: dict[str, str]) -> None:
    exact = ["--training.sums", "exact", "--checkpoint.interval", "1"]

    def options(folder: Path) -> list[str]:
        config = staged_config(folder, sources, (6, 6, 6))
        config.write_text(config.read_text().replace("global_batch_size = 2", "global_batch_size = 8"))
        return ["--job.config_file", str(config), *exact]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(whole, *options(whole), ranks=1)
    at_border = {6, 12}
    kills = [(1, 2), (3, 4), (4, 1), (6, 2), (8, 4), (10, 1), (11, 2), (12, 4), (13, 1), (15, 2)]
    for step, ranks in kills:
        hook = {"hook": killed_at_border} if step in at_border else {}
        run = ForkedRun(killed, *options(killed), ranks=ranks, **hook)
        if step in at_border:
            assert run.wait() == [9] * ranks, run.output()
            assert max(logged_losses(killed)) == step
        else:
            run.wait_for(lambda: max(logged_losses(killed), default=0) >= step)  # noqa: B023
            run.end()
    finish(killed, *options(killed), ranks=4)
    assert different_tensors(saved_tensors(killed, 18), saved_tensors(whole, 18)) == []
    assert logged_losses(killed) == logged_losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, []),
        (4, ["--parallelism.tensor_parallel_degree", "2"]),
        (2, ["--parallelism.context_parallel_degree", "2"]),
        (4, ["--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "2"]),
        (2, ["--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "2"]),
    ],
)
def test_losses_are_those_of_one_rank(tmp_path: Path, sources: dict[str, str], ranks: int, layout: list[str]) -> None:
    config = staged_config(tmp_path / "one", sources)
    config.write_text(config.read_text().replace("global_batch_size = 2", "global_batch_size = 8"))
    shape = replace(SHAPE, n_layers=2)
    finish(tmp_path / "one", "--job.config_file", str(config), ranks=1, shape=shape)
    finish(tmp_path / "other", "--job.config_file", str(config), *layout, ranks=ranks, shape=shape)
    expected: Any = logged_losses(tmp_path / "one")
    assert logged_losses(tmp_path / "other") == pytest.approx(expected, abs=1e-5)
