"""The code of docs/adding-an-optimizer.md, as a user's modules: Lion and the inverse square root schedule."""

import importlib
import json
import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
import torch
from forked_run import CONFIG, ForkedRun, different_tensors, finish, saved_tensors, slow_steps

from torchtrain.config.parse import from_toml
from torchtrain.errors import ConfigError
from torchtrain.optimizers.groups import build_optimizer, own_options
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.optimizers.options import LRSchedulerConfig, OptimizerConfig

PAGE = (Path(__file__).parent.parent / "docs" / "adding-an-optimizer.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the modules of the page, which are also registered in this process."""
    monkeypatch.syspath_prepend(tmp_path)
    for code in blocks("python"):
        name = re.match(r"# (\w+)\.py\n", code)
        assert name is not None
        (tmp_path / f"{name[1]}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name[1], raising=False)
        importlib.import_module(name[1])
    return tmp_path


def config_file(folder: Path, number: int) -> Path:
    """The config of forked runs, with the options of the page's TOML block ``number``."""
    table, changes = tomli.loads(CONFIG), tomli.loads(blocks("toml")[number])
    for section, options in changes.items():
        table[section] = {**table.get(section, {}), **options}
    file = folder / f"{number}.toml"
    file.write_text(tomli_w.dumps(table))
    return file


def use_modules_of(folder: Path, slow: bool = False) -> Any:
    sys.path.insert(0, str(folder))
    return slow_steps() if slow else None


def logged(folder: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


@pytest.mark.parametrize("layout", [pytest.param("shard 2", marks=pytest.mark.slow), "tensor 2"])
def test_lion_on_two_ranks_trains_as_on_one(layout: str, modules: Path, tmp_path: Path) -> None:
    options = ["--job.config_file", str(config_file(tmp_path, 0)), "--model.shape.n_kv_heads", "2"]
    options += ["--training.steps", "4"]
    degree = ["--parallelism.tensor_parallel_degree", "2"] if layout == "tensor 2" else []
    for ranks, more in ((1, []), (2, degree)):
        finish(tmp_path / f"{ranks}", *options, *more, ranks=ranks, hook=partial(use_modules_of, modules))
    assert logged(tmp_path / "2", "loss") == pytest.approx(logged(tmp_path / "1", "loss"), rel=1e-5)
    state = saved_tensors(tmp_path / "2", 4)
    assert "optimizer.layers.0.attention.wq.weight.exp_avg" in state
    assert "optimizer.layers.0.attention.wq.weight.exp_avg_sq" not in state
    assert "optimizer.output.weight.exp_avg_sq" not in state  # selected by [[optimizer.groups]]
    assert "optimizer.tok_embeddings.weight.exp_avg_sq" in state


def test_run_with_lion_that_is_killed_resumes_bitwise(modules: Path, tmp_path: Path) -> None:
    options = ("--job.config_file", str(config_file(tmp_path, 0)))
    finish(tmp_path / "whole", *options, hook=partial(use_modules_of, modules), ranks=1)
    killed = ForkedRun(tmp_path / "killed", *options, hook=partial(use_modules_of, modules, slow=True), ranks=1)
    killed.wait_for(lambda: (tmp_path / "killed" / "checkpoint" / "step-4").exists())
    killed.end()
    assert "resumed from" in finish(tmp_path / "killed", *options, hook=partial(use_modules_of, modules), ranks=1)
    assert different_tensors(saved_tensors(tmp_path / "killed", 8), saved_tensors(tmp_path / "whole", 8)) == []


@pytest.mark.usefixtures("modules")
def test_lion_computes_the_update_of_its_paper() -> None:
    table = {"name": "lion", "lr": 0.02, "weight_decay": 0.3, "options": {"lion": {"beta1": 0.8, "beta2": 0.7}}}
    config = from_toml(OptimizerConfig, table, "optimizer.")
    module = torch.nn.Linear(5, 3, bias=False)
    optimizer = build_optimizer([module], config)
    (group,) = optimizer.param_groups
    expected, average = module.weight.detach().double(), torch.zeros(3, 5, dtype=torch.float64)
    for step in range(1, 4):
        gradient = torch.randn(3, 5, generator=torch.Generator().manual_seed(step))
        module.weight.grad = gradient.clone()
        group["lr"] = 0.02 / step
        before = {name: value.clone() for name, value in optimizer.state_dict().items()}
        optimizer.step(torch.tensor(1.0))
        assert [name for name, value in optimizer.state_dict().items() if not torch.equal(value, before[name])] == []
        optimizer.step(torch.tensor(0.0))
        # Algorithm 2 of https://arxiv.org/abs/2302.06675
        direction = torch.sign(0.8 * average + 0.2 * gradient)
        expected = expected - 0.02 / step * (direction + 0.3 * expected)
        average = 0.7 * average + 0.3 * gradient
        torch.testing.assert_close(module.weight.detach().double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("modules")
def test_wrong_option_of_lion_is_named() -> None:
    config = from_toml(OptimizerConfig, {"name": "lion", "options": {"lion": {"beta3": 0.5}}}, "optimizer.")
    with pytest.raises(ConfigError, match=r"optimizer.options.lion.beta3 is not a known key; did you mean"):
        own_options("lion", config)


def test_inverse_square_root_schedule_follows_its_formula(modules: Path, tmp_path: Path) -> None:
    file = config_file(tmp_path, 1)
    finish(tmp_path / "run", "--job.config_file", str(file), hook=partial(use_modules_of, modules), ranks=1)
    peak = tomli.loads(file.read_text())["optimizer"]["lr"]
    expected = [peak * (step / 3 if step <= 3 else math.sqrt(3 / step)) for step in range(1, 9)]
    assert logged(tmp_path / "run", "lr") == pytest.approx(expected, rel=1e-12)


@pytest.mark.usefixtures("modules")
def test_schedule_may_have_no_warmup() -> None:
    schedule = LRSchedule(LRSchedulerConfig(decay_type="inverse_sqrt", warmup_steps=0), 0.5, 100)
    assert [schedule.rate(step) for step in (1, 4, 100)] == [0.5, 0.25, 0.05]


def test_unknown_schedule_is_rejected_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"lr_scheduler.decay_type = 'cosin' must be one of .*did you mean 'cosine'"):
        LRSchedulerConfig(decay_type="cosin")


@pytest.mark.usefixtures("modules")
def test_options_of_a_schedule_are_read_and_checked() -> None:
    config = LRSchedulerConfig(decay_type="inverse_sqrt", warmup_steps=0, options={"timescale": 25})
    schedule = LRSchedule(config, 0.5, 100)
    assert [schedule.rate(step) for step in (1, 25, 100)] == [0.5, 0.5, 0.25]
    with pytest.raises(ConfigError, match=r"lr_scheduler.options.timscale is not a known key; did you mean"):
        LRSchedule(LRSchedulerConfig(decay_type="inverse_sqrt", options={"timscale": 25}), 0.5, 100)
    with pytest.raises(ConfigError, match=r"lr_scheduler.options.timescale is not a known key"):
        LRSchedule(LRSchedulerConfig(decay_type="cosine", options={"timescale": 25}), 0.5, 100)
