"""Resume compatibility: the effect of each changed option on a run that resumes."""

import copy
import re
from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

import pytest
import tomli
import tomli_w

from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.resume import rate_change
from torchtrain.checkpoint.resume_compatibility import KINDS, Kind, check_resume_compatibility, kind_of
from torchtrain.config.parse import command_line_type, to_toml
from torchtrain.config.registry import CONFIG_SECTIONS, OPTIMIZERS
from torchtrain.config.schema import JobConfig, section_types, to_dict
from torchtrain.config.section import key_of
from torchtrain.errors import CheckpointError, ConfigError

FROZEN: dict[Kind, dict[str, str]] = {  # every option of the core, by kind and section
    Kind.HARMLESS: {
        "job": "config_file dump_folder description device import disable_plugins stage",
        "model": "shape.max_position_embeddings",
        "training": "steps gc_freq",
        "data": "label longest_seq_len revision prefetch verify_gib",
        "validation": (
            "label path name subset split revision download text_column skip_not_utf8 weight type options sources "
            "held_out enable interval interval_tokens steps weights"
        ),
        "prepare": "output processes verify",
        "checkpoint": (
            "enable folder interval interval_tokens interval_minutes keep_latest_k keep_every keep_best_k load_step "
            "initial_load_path async_mode allow_changes max_failed_saves"
        ),
        "faults": (
            "on_nonfinite max_bad_steps spike_threshold spike_window wall_clock_limit_minutes stop_grace_seconds"
        ),
        "metrics": "log_freq enable_tensorboard writers options",
        "profiling": "enable_profiling profile_freq enable_memory_snapshot",
        "comm": "init_timeout_seconds train_timeout_seconds",
    },
    Kind.LAYOUT: {
        "optimizer": "implementation",
        "ema": "offload",
        "training": "local_batch_size loss_chunk_tokens attention_backend enable_cpu_offload deterministic",
        "parallelism": (
            "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
            "fsdp_gradient_accumulation tensor_parallel_degree enable_sequence_parallel "
            "enable_async_tensor_parallel context_parallel_degree pipeline_parallel_degree "
            "pipeline_parallel_schedule pipeline_parallel_microbatches pipeline_parallel_layers_per_stage"
        ),
        "activation_checkpoint": "mode selective_option memory_budget",
        "compile": "enable",
    },
    Kind.CHANGES: {
        "optimizer": (
            "lr beta1 beta2 eps weight_decay state_dtype "
            "hidden.lr_factor hidden.weight_decay embedding.lr_factor embedding.weight_decay "
            "no_decay.lr_factor no_decay.weight_decay groups options"
        ),
        "ema": "enable decay interval",
        "mup": "base_dim base_layers",
        "lr_scheduler": (
            "warmup_steps warmup_tokens total_steps total_tokens decay_ratio decay_tokens decay_type options "
            "start_step initial_lr min_lr_factor"
        ),
        "model": (
            "tokenizer_path shape.rope_theta shape.rope_scaling.type shape.rope_scaling.factor "
            "shape.rope_scaling.low_freq_factor "
            "shape.rope_scaling.high_freq_factor shape.rope_scaling.original_max_seq_len "
            "shape.rope_scaling.beta_fast shape.rope_scaling.beta_slow shape.rope_scaling.attention_factor"
        ),
        "training": (
            "global_batch_size global_batch_size_schedule "
            "tokens seq_len max_norm seed mixed_precision_param mixed_precision_reduce sums "
            "z_loss_weight"
        ),
        "data": (
            "path name subset split download text_column skip_not_utf8 weight type options sources when_exhausted "
            "document_mask exclude held_out"
        ),
    },
    Kind.IMPOSSIBLE: {
        "model": (
            "options name flavor hf_folder vocab_size shape.dim shape.n_layers shape.n_heads shape.n_kv_heads "
            "shape.ffn_dim shape.head_dim shape.norm_eps shape.tied_embeddings shape.qk_norm shape.qkv_bias"
        ),
        "optimizer": "name",
        "data": "packing",
    },
}


def toml(**changes: dict[str, Any]) -> str:
    config = JobConfig()
    sections = {section: replace(getattr(config, section), **values) for section, values in changes.items()}
    return to_toml(replace(config, **sections))  # type: ignore[arg-type]


def test_same_config_gives_no_log_lines() -> None:
    assert check_resume_compatibility(toml(), toml(), ()) == []


def test_harmless_and_layout_changes_give_one_log_line_each() -> None:
    now = toml(metrics={"log_freq": 1}, job={"description": "again"}, training={"local_batch_size": 2})
    assert check_resume_compatibility(toml(), now, ()) == [
        "config differs from the checkpoint's (harmless): job.description = 'again' (checkpoint: ''); "
        "metrics.log_freq = 1 (checkpoint: 10)",
        "config differs from the checkpoint's (layout): training.local_batch_size = 2 (checkpoint: 8)",
    ]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("optimizer", "lr", 1.0),
        ("data", "path", "/other"),
        ("training", "seed", 1),
        ("lr_scheduler", "decay_ratio", 0.5),
    ],
)
def test_change_of_the_run_is_rejected_unless_allowed(section: str, key: str, value: Any) -> None:
    name = f"{section}.{key}"
    now = toml(**{section: {key: value}})
    with pytest.raises(CheckpointError, match=rf"{name} = .* checkpoint.allow_changes = \['{name}"):
        check_resume_compatibility(toml(), now, ())
    with pytest.raises(CheckpointError, match=rf"allow_changes = \['optimizer.eps', '{name}'\]"):
        check_resume_compatibility(toml(), now, ["optimizer.eps"])
    (line,) = check_resume_compatibility(toml(), now, [name])
    assert line.startswith(f"config differs from the checkpoint's (changes the run): {name} = ")


def test_other_options_in_the_folder_of_a_run_name_a_folder_for_a_new_one() -> None:
    tables = [{"path": f"/data/{name}.jsonl", "weight": 1.0} for name in ("a", "b", "c", "d", "e", "f")]
    before = tomli.loads(toml(job={"dump_folder": "outputs/a"}))
    now = copy.deepcopy(before)
    now["data"] |= {"sources": tables}
    now["optimizer"]["lr"] = 1.0
    with pytest.raises(CheckpointError) as error:
        check_resume_compatibility(tomli_w.dumps(before), tomli_w.dumps(now), ())
    new, *differences, allow = str(error.value).splitlines()
    assert new.startswith(
        "a new run needs a folder of its own: --job.dump_folder outputs/a_2. Here, resuming would not"
    )
    assert differences == [
        "  data.sources = [/data/a.jsonl, /data/b.jsonl, /data/c.jsonl, /data/d.jsonl and 2 more] (checkpoint: [])",
        "  optimizer.lr = 1.0 (checkpoint: 0.0003)",
    ]
    assert "checkpoint.allow_changes = ['data.sources', 'optimizer.lr']" in allow
    before = copy.deepcopy(now)
    now["data"]["sources"][1]["weight"] = 2.0
    now["checkpoint"]["folder"] = "s3://bucket/run"
    with pytest.raises(CheckpointError) as error:
        check_resume_compatibility(tomli_w.dumps(before), tomli_w.dumps(now), ())
    assert "outputs/a_2 --checkpoint.folder s3://bucket/run_2. " in str(error.value)
    assert "data.sources = [1] weight = 2.0 (checkpoint: [1] weight = 1.0)" in str(error.value)
    with pytest.raises(CheckpointError, match=r"^a new run needs .*a_2 .*\. The checkpoint in this one does not fit"):
        check_resume_compatibility(tomli_w.dumps(before), tomli_w.dumps(now | {"model": {"flavor": "8B"}}), ())
    with pytest.raises(
        CheckpointError, match=r"^resuming would not continue the same run: data.path = "
    ):  # other files
        check_resume_compatibility(toml(), toml(), (), {"data.path": "a"}, {"data.path": "b"})


def test_large_change_of_the_learning_rate_is_logged() -> None:
    """That of the README, from the end of a schedule to the middle of a longer one."""
    schedule = {"warmup_steps": 10, "decay_type": "linear", "min_lr_factor": 0.1, "total_steps": 100}
    saved = toml(training={"steps": 100}, optimizer={"lr": 2e-3}, lr_scheduler=schedule)
    longer = toml(training={"steps": 300}, optimizer={"lr": 2e-3}, lr_scheduler={**schedule, "total_steps": 300})
    assert rate_change(saved, longer, 100) == (
        "the learning rate changes to 0.00144 in step 101: with the checkpoint's options it would be 0.0002, and step "
        "100 had 0.00022 (changed: lr_scheduler.total_steps)"
    )
    assert rate_change(saved, longer, 20) == ""  # 0.0019 in place of 0.0018
    assert rate_change(saved, saved, 100) == rate_change(saved, saved, 1) == ""  # also in the warm-up
    higher = toml(training={"steps": 100}, optimizer={"lr": 4e-3}, lr_scheduler=schedule)
    assert rate_change(saved, higher, 50).endswith("(changed: optimizer.lr)")


def test_another_model_is_rejected_even_if_allowed() -> None:
    with pytest.raises(CheckpointError, match=r"not fit this run: model.flavor = '8B' \(checkpoint: 'debugmodel'"):
        check_resume_compatibility(toml(), toml(model={"flavor": "8B"}), ["model.flavor"])


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("optimizer", "name", "mine"),  # has different states
        ("data", "packing", "best_fit"),  # has other windows
    ],
)
def test_change_that_the_states_do_not_fit_is_rejected_even_if_allowed(section: str, key: str, value: Any) -> None:
    OPTIMIZERS.add("mine", "module:Mine")
    name = f"{section}.{key}"
    with pytest.raises(CheckpointError, match=rf"not fit this run: {name} = .* checkpoint.initial_load_path"):
        check_resume_compatibility(toml(), toml(**{section: {key: value}}), [name])


def test_more_steps_are_harmless_only_if_the_schedule_stays_the_same() -> None:
    pinned, constant = {"total_steps": 10000}, {"decay_type": "constant"}
    more = {"steps": 20000}
    with pytest.raises(CheckpointError, match=r"training.steps = 20000 is also the length of the learning-rate"):
        check_resume_compatibility(toml(), toml(training=more), ())
    assert len(check_resume_compatibility(toml(), toml(training=more, lr_scheduler=pinned), ())) == 1
    assert (
        len(check_resume_compatibility(toml(lr_scheduler=constant), toml(training=more, lr_scheduler=constant), ()))
        == 1
    )
    with pytest.raises(CheckpointError, match=r"the checkpoint's schedule has 100 steps"):  # shorter than the warm-up
        check_resume_compatibility(
            toml(training={"steps": 100}, lr_scheduler=constant), toml(lr_scheduler=constant), ()
        )


def test_error_for_more_steps_names_the_option_and_two_solutions() -> None:
    before = toml(training={"steps": 137})
    now = {"steps": 411}
    with pytest.raises(CheckpointError) as error:
        check_resume_compatibility(before, toml(training=now), ["optimizer.eps"])
    message = str(error.value)
    assert "training.steps = 411 is also the length of the learning-rate schedule" in message
    assert "lr_scheduler.total_steps = 411" not in message  # which the user has not set
    assert "lr_scheduler.total_steps = 137: later steps have its last rate (" in message
    assert "checkpoint.allow_changes = ['optimizer.eps', 'lr_scheduler.total_steps']" in message
    assert check_resume_compatibility(before, toml(training=now, lr_scheduler={"total_steps": 137}), ())
    assert check_resume_compatibility(before, toml(training=now), ["lr_scheduler.total_steps"])

    with pytest.raises(
        CheckpointError, match=r"(?s)optimizer.lr = 1.0 .*Also, training.steps = 411 is also the length"
    ):
        check_resume_compatibility(before, toml(training=now, optimizer={"lr": 1.0}), ())
    with pytest.raises(CheckpointError, match=r"lr_scheduler.total_steps = 411 \(checkpoint: 137\)"):  # set by the user
        check_resume_compatibility(before, toml(training=now, lr_scheduler={"total_steps": 411}), ())
    shorter = toml(training={"steps": 50}, lr_scheduler={"min_lr_factor": 0.25})
    with pytest.raises(CheckpointError, match=r"training.steps = 50 .* has 137 steps.*total_steps = 137"):
        check_resume_compatibility(toml(training={"steps": 137}, lr_scheduler={"min_lr_factor": 0.25}), shorter, ())


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        ({"warmup_steps": 10}, "lr_scheduler.min_lr_factor = 0.0"),
        ({"warmup_steps": 137}, "optimizer.lr"),  # without a decay
        ({"warmup_steps": 10, "decay_ratio": 0.0}, "optimizer.lr"),
        ({"decay_type": "constant"}, "optimizer.lr"),
    ],
)
def test_error_for_more_steps_names_the_rate_after_the_schedule(schedule: dict[str, Any], rate: str) -> None:
    saved, longer = (toml(training={"steps": steps}, lr_scheduler=schedule) for steps in (137, 411))
    with pytest.raises(CheckpointError, match=rf"later steps have its last rate \({re.escape(rate)}\)"):
        check_resume_compatibility(saved, longer, ())


@pytest.mark.parametrize(
    "name", ["optimizer.rate", "optimizer", "optimizer.hidden", "optimizer.hidden.rate", "data.all", "lr", ""]
)
def test_allow_changes_accepts_only_names_of_options(name: str) -> None:
    with pytest.raises(ConfigError, match=f"allow_changes names '{name}', which is not an option"):
        JobConfig(checkpoint=CheckpointConfig(allow_changes=("optimizer.lr", name)))


def options_of(section: Any, prefix: str = "") -> list[str]:
    inner = [(f"{prefix}{key_of(field.name)}", getattr(section, field.name)) for field in fields(section)]
    return list(chain.from_iterable(options_of(x, f"{name}.") if is_dataclass(x) else [name] for name, x in inner))


def another_value(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return [7] if isinstance(value, (list, tuple)) else "another" if isinstance(value, str) else (value or 0) + 7


def observed_kind(name: str, saved: str) -> Kind:
    """The kind that the resume check assigns to a change of the option ``name`` of the config ``saved``."""
    now = tomli.loads(saved)
    *sections, key = name.split(".")
    table = now
    for section in sections:
        table = table.setdefault(section, {})
    tables = {"sources": [{"path": "another"}], "stages": [{"name": "another"}]}
    table[key] = tables.get(key) or another_value(table.get(key))
    try:
        (message,) = check_resume_compatibility(saved, tomli_w.dumps(now), ())
    except CheckpointError as error:
        message = str(error)
    assert f"{name} = " in message
    if "does not fit this run" in message:
        return Kind.IMPOSSIBLE
    return next((kind for kind in Kind if f"({kind.value})" in message), Kind.CHANGES)


def test_kind_of_each_option_is_the_frozen_one() -> None:
    of_plugins = set(CONFIG_SECTIONS) - set(CONFIG_SECTIONS._core)
    check_kinds(FROZEN, set(section_types()) - of_plugins)


def check_kinds(expected: dict[Kind, dict[str, str]], checked: Collection[str]) -> None:
    """For a new option, decide what a change of it means for a run that resumes, and add it to ``expected``.

    Args:
        expected: by kind and section.
        checked: the names of the sections.
    """
    frozen = {
        f"{section}.{name}": kind
        for kind, sections in expected.items()
        for section, names in sections.items()
        for name in names.split()
    }
    names = [name for name in options_of(command_line_type()()) if name.split(".")[0] in checked]
    saved = toml(lr_scheduler={"total_steps": 10000})  # independent of training.steps
    assert {name: observed_kind(name, saved) for name in names} == frozen


def test_changed_options_of_a_registered_optimizer_must_be_allowed() -> None:
    saved, current = (toml(optimizer={"options": {"lion": {"beta1": value}}}) for value in (0.9, 0.95))
    with pytest.raises(CheckpointError, match=r"optimizer.options.lion.beta1 = 0.95 \(checkpoint: 0.9\)"):
        check_resume_compatibility(saved, current, ())
    assert len(check_resume_compatibility(saved, current, ["optimizer.options.lion.beta1"])) == 1


def test_every_option_that_changes_the_run_can_be_allowed() -> None:
    names = [name for name in options_of(command_line_type()()) if kind_of(name) is Kind.CHANGES]
    assert {"optimizer.lr", "optimizer.no_decay.weight_decay", "mup.base_dim", "lr_scheduler.total_steps"} <= set(names)
    JobConfig(checkpoint=CheckpointConfig(allow_changes=tuple(names)))


def test_every_section_has_a_kind_and_every_exception_is_an_option() -> None:
    options = to_dict(JobConfig())
    names = [name for names in KINDS.values() for name in names]
    assert len(names) == len(set(names))
    assert {name for name in names if "." not in name} == options.keys()
    for name in names:
        attrgetter(name)(JobConfig())  # raises AttributeError if there is no such option
    assert kind_of("not_yet.invented") is Kind.CHANGES


SAMPLED, CHANGED = "1 file(s) of 2,000,000 bytes, hash aaaa", "1 file(s) of 2,000,000 bytes, hash aaab"


@pytest.mark.parametrize(
    ("saved", "current", "same"),
    [
        (SAMPLED, SAMPLED, True),
        (SAMPLED, CHANGED, False),
        (SAMPLED, f"{SAMPLED}, content cccc", True),  # another data.verify_gib, or a checkpoint of an earlier version
        (f"{SAMPLED}, content cccc", SAMPLED, True),
        (f"{SAMPLED}, content cccc", f"{SAMPLED}, content cccd", False),
        (f"{SAMPLED}; {SAMPLED}", f"{SAMPLED}, content cccc; {SAMPLED}", True),
        (f"{SAMPLED}; {SAMPLED}, content cccc", f"{SAMPLED}; {SAMPLED}, content cccd", False),
        (f"{SAMPLED}; {SAMPLED}", SAMPLED, False),
        (SAMPLED, f"{SAMPLED}a", False),
        ("", SAMPLED, False),
    ],
)
def test_data_identities_are_compared_by_what_both_contain(saved: str, current: str, same: bool) -> None:
    if same:
        assert check_resume_compatibility(toml(), toml(), (), {"data.path": saved}, {"data.path": current}) == []
        return
    with pytest.raises(CheckpointError, match=r"data.path = '1 file\(s\).* \(checkpoint: "):
        check_resume_compatibility(toml(), toml(), (), {"data.path": saved}, {"data.path": current})
