"""The resume contract: what a changed option means for a run that resumes."""

from dataclasses import fields, is_dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

import pytest

from torchtrain.checkpoint.contract import KINDS, Kind, check_contract, kind_of
from torchtrain.config.parse import to_dict, to_toml
from torchtrain.config.schema import Checkpoint, JobConfig
from torchtrain.errors import CheckpointError, ConfigError


def toml(**changes: dict[str, Any]) -> str:
    config = JobConfig()
    sections = {section: replace(getattr(config, section), **values) for section, values in changes.items()}
    return to_toml(replace(config, **sections))  # type: ignore[arg-type]


def test_same_config_has_nothing_to_say() -> None:
    assert check_contract(toml(), toml(), ()) == []


def test_harmless_and_layout_changes_are_each_logged_in_a_line() -> None:
    now = toml(metrics={"log_freq": 1}, job={"description": "again"}, training={"local_batch_size": 2})
    assert check_contract(toml(), now, ()) == [
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
def test_change_of_the_run_is_refused_unless_allowed(section: str, key: str, value: Any) -> None:
    name = f"{section}.{key}"
    now = toml(**{section: {key: value}})
    with pytest.raises(CheckpointError, match=rf"{name} = .* checkpoint.allow_changes = \['{name}"):
        check_contract(toml(), now, ())
    with pytest.raises(CheckpointError, match=rf"allow_changes = \['optimizer.eps', '{name}'\]"):
        check_contract(toml(), now, ["optimizer.eps"])
    (line,) = check_contract(toml(), now, [name])
    assert line.startswith(f"config differs from the checkpoint's (changes the run): {name} = ")


def test_another_model_is_impossible_whatever_is_allowed() -> None:
    with pytest.raises(CheckpointError, match=r"not fit this run: model.flavor = '8B' \(checkpoint: 'debugmodel'"):
        check_contract(toml(), toml(model={"flavor": "8B"}), ["model.flavor"])


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("optimizer", "name", "muon"),  # has other states
        ("training", "global_batch_size", 64),  # the place in the data is kept by row
        ("data", "streams", 128),  # and by stream: rows that shared one would go on with the same documents
    ],
)
def test_what_the_states_do_not_fit_is_impossible_whatever_is_allowed(section: str, key: str, value: Any) -> None:
    name = f"{section}.{key}"
    with pytest.raises(CheckpointError, match=rf"not fit this run: {name} = .* checkpoint.initial_load_path"):
        check_contract(toml(), toml(**{section: {key: value}}), [name])


def test_more_steps_are_harmless_only_if_they_leave_the_schedule_alone() -> None:
    pinned, constant = {"total_steps": 10000}, {"decay_type": "constant"}
    more = {"steps": 20000}
    with pytest.raises(CheckpointError, match=r"training.steps = 20000 is also the length of the learning-rate"):
        check_contract(toml(), toml(training=more), ())
    assert len(check_contract(toml(), toml(training=more, lr_scheduler=pinned), ())) == 1
    assert len(check_contract(toml(lr_scheduler=constant), toml(training=more, lr_scheduler=constant), ())) == 1
    with pytest.raises(CheckpointError, match=r"the checkpoint's schedule has 100 steps"):  # shorter than the warm-up
        check_contract(toml(training={"steps": 100}, lr_scheduler=constant), toml(lr_scheduler=constant), ())


def test_a_run_that_is_extended_is_told_of_training_steps_and_of_two_ways_that_work() -> None:
    before = toml(training={"steps": 137})
    now = {"steps": 411}
    with pytest.raises(CheckpointError) as refused:
        check_contract(before, toml(training=now), ["optimizer.eps"])
    message = str(refused.value)
    assert "training.steps = 411 is also the length of the learning-rate schedule" in message
    assert "lr_scheduler.total_steps = 411" not in message  # which the user has not set
    keep = "lr_scheduler.total_steps = 137: later steps have its last rate (lr_scheduler.min_lr_factor = 0.0)"
    assert keep in message
    assert "checkpoint.allow_changes = ['optimizer.eps', 'lr_scheduler.total_steps']" in message
    assert check_contract(before, toml(training=now, lr_scheduler={"total_steps": 137}), ())
    assert check_contract(before, toml(training=now), ["lr_scheduler.total_steps"])

    with pytest.raises(CheckpointError, match=r"optimizer.lr = 1.0 .*Also, training.steps = 411 is also the length"):
        check_contract(before, toml(training=now, optimizer={"lr": 1.0}), ())
    with pytest.raises(CheckpointError, match=r"lr_scheduler.total_steps = 411 \(checkpoint: 137\)"):  # set by the user
        check_contract(before, toml(training=now, lr_scheduler={"total_steps": 411}), ())
    shorter = toml(training={"steps": 50}, lr_scheduler={"min_lr_factor": 0.25})
    with pytest.raises(CheckpointError, match=r"training.steps = 50 .* has 137 steps.*total_steps = 137"):
        check_contract(toml(training={"steps": 137}, lr_scheduler={"min_lr_factor": 0.25}), shorter, ())


@pytest.mark.parametrize(
    "name", ["optimizer.rate", "optimizer", "optimizer.matrices", "optimizer.matrices.rate", "data.all", "lr", ""]
)
def test_allow_changes_must_name_options(name: str) -> None:
    with pytest.raises(ConfigError, match=f"allow_changes names '{name}', which is no option"):
        JobConfig(checkpoint=Checkpoint(allow_changes=("optimizer.lr", name)))


def options_of(section: Any, prefix: str = "") -> list[str]:
    inner = [(f"{prefix}{field.name}", getattr(section, field.name)) for field in fields(section)]
    return list(chain.from_iterable(options_of(x, f"{name}.") if is_dataclass(x) else [name] for name, x in inner))


def test_all_that_a_refusal_can_name_may_be_allowed() -> None:
    names = [name for name in options_of(JobConfig()) if kind_of(name) is Kind.CHANGES]
    assert {"optimizer.lr", "optimizer.vectors.weight_decay", "mup.base_dim", "lr_scheduler.total_steps"} <= set(names)
    JobConfig(checkpoint=Checkpoint(allow_changes=tuple(names)))


def test_every_section_has_a_kind_and_every_exception_is_an_option() -> None:
    options = to_dict(JobConfig())
    names = [name for names in KINDS.values() for name in names]
    assert len(names) == len(set(names))
    assert {name for name in names if "." not in name} == options.keys()
    for name in names:
        attrgetter(name)(JobConfig())  # AttributeError: there is no such option
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
def test_identities_are_compared_in_what_both_state(saved: str, current: str, same: bool) -> None:
    if same:
        assert check_contract(toml(), toml(), (), {"data.path": saved}, {"data.path": current}) == []
        return
    with pytest.raises(CheckpointError, match=r"data.path = '1 file\(s\).* \(checkpoint: "):
        check_contract(toml(), toml(), (), {"data.path": saved}, {"data.path": current})
