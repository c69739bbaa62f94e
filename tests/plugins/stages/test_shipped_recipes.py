"""Recipes with stages in train_configs/: their rates and lengths are the published ones, and each trains in small."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
from data_samples import DOCUMENTS, write_jsonl
from forked_command import checked_command
from forked_run import read_metrics

from torchtrain.config.parse import from_file
from torchtrain.config.schema import JobConfig, section_of
from torchtrain.models.spec import DecoderConfig, count_parameters
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.plugins.planner.options import EstimateConfig
from torchtrain.plugins.planner.request import resolve_model_config
from torchtrain.plugins.stages.driver import resolve_stages

FOLDER = Path(__file__).parent.parent.parent.parent / "train_configs"
RECIPES = sorted(FOLDER.glob("[!d]*_stages.toml"))


def resolved(name: str) -> list[JobConfig]:
    config = from_file(str(FOLDER / f"{name}_stages.toml"))
    ranks = section_of(config, EstimateConfig).world_size

    def resolve_one(config: JobConfig) -> tuple[JobConfig, DecoderConfig]:
        model = resolve_model_config(config)
        return resolve_layout(config, model, ranks)[0], model

    return resolve_stages(config, resolve_one)


def lr_of(config: JobConfig, step: int) -> float:
    return LRSchedule(config.lr_scheduler, config.optimizer.lr, config.training.steps).rate(step)


def tokens_of(configs: list[JobConfig]) -> list[float]:
    """The length of each stage in units of 1e12 tokens."""
    ends = [config.training.steps for config in configs]
    steps = [end - begin for begin, end in itertools.pairwise([0, *ends])]
    training = [config.training for config in configs]
    return [n * own.global_batch_size * own.seq_len / 1e12 for n, own in zip(steps, training, strict=True)]


def test_olmo_2_has_its_published_sizes_and_rates() -> None:
    """The second stage of the published run begins with step 928,646 and a rate of 6.1499e-5."""
    web, annealing = resolved("olmo2_7b")
    assert count_parameters(resolve_model_config(web)) == pytest.approx(7.30e9, rel=1e-3)
    assert web.training.global_batch_size * web.training.seq_len == 4_194_304
    assert web.training.steps == pytest.approx(928_646, rel=2e-3)
    assert lr_of(web, 2000) == 3e-4
    assert lr_of(annealing, web.training.steps + 1) == pytest.approx(6.15e-5, rel=2e-3)
    assert lr_of(annealing, annealing.training.steps) < 1e-8
    assert tokens_of([web, annealing]) == pytest.approx([3.9, 0.05], abs=1e-5)


def test_smollm3_has_its_published_sizes_and_rates() -> None:
    configs = resolved("smollm3_3b")
    stable, more, decay, long, longer = configs
    assert count_parameters(resolve_model_config(stable)) == pytest.approx(3.08e9, rel=2e-3)
    assert tokens_of(configs) == pytest.approx([8.14, 1.76, 1.23, 0.047, 0.052], abs=5e-3)
    assert {config.training.global_batch_size * config.training.seq_len for config in configs} == {2_359_296}
    assert [config.training.steps for config in (stable, more, decay)] == [3_450_000, 4_198_000, 4_720_000]
    assert lr_of(stable, 2000) == lr_of(more, 4_198_000) == 2e-4
    assert lr_of(decay, 4_459_000) == pytest.approx(1e-4, rel=1e-4)
    assert lr_of(decay, 4_720_000) < 1e-9
    for config, begin in ((long, 4_720_000), (longer, 4_740_000)):
        assert lr_of(config, begin + 1000) == 2e-5
        assert lr_of(config, config.training.steps) < 1e-9


def in_small(table: Any, folder: Path) -> Any:
    """The table of a recipe, or a part of it, with fewer layers and steps, and at most two ranks on each axis."""
    if isinstance(table, list):
        return [in_small(part, folder) for part in table]
    if not isinstance(table, dict):
        return table
    small = {key: in_small(value, folder) for key, value in table.items()}
    if "seq_len" in small:
        small |= {"seq_len": small["seq_len"] // 256, "local_batch_size": 1, "global_batch_size": 4}
    elif "global_batch_size" in small:  # of a stage, in which it grows
        small["global_batch_size"] = 8
    for key, value in small.items():
        if key == "path":
            small[key] = write_jsonl(folder / f"{Path(value).name}.jsonl", DOCUMENTS)
        elif key.endswith("_degree"):
            small[key] = min(value, 2)
    if "name" in small and small.keys() & {"steps", "tokens"}:  # a stage
        small = {key: value for key, value in small.items() if key != "tokens"} | {"steps": 6}
    for key in ("warmup_steps", "warmup_tokens"):
        if small.pop(key, None):
            small["warmup_steps"] = 2
    return small


def train(recipe: Path, folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Train ``recipe`` in small; returns its lines of metrics."""
    table = in_small(tomli.loads(recipe.read_text("utf-8")), folder)
    if ranks == 1:
        for part in (table, *table["stages"]):
            part.pop("parallelism", None)
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64}
    table["model"] = {"name": table["model"]["name"], "shape": {**table["model"].get("shape", {}), **sizes}}
    table["optimizer"]["lr"] *= 30
    table["checkpoint"] = {"interval": 100}
    del table["compile"]
    config = folder / f"{recipe.stem}.toml"
    config.write_text(tomli_w.dumps(table))
    run = folder / f"on_{ranks}"
    checked_command(
        *("torchtrain.train", "--job.config_file", str(config), "--job.dump_folder", str(run)),
        *("--training.mixed_precision_param", "float32", "--metrics.log_freq", "1"),
        ranks=ranks,
    )
    return [line for line in read_metrics(run) if "loss" in line]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_trains_in_small_on_its_axes_as_on_one_rank(recipe: Path, tmp_path: Path) -> None:
    stages = tomli.loads(recipe.read_text("utf-8"))["stages"]
    lines, reference = (train(recipe, tmp_path, ranks) for ranks in (4, 1))
    assert [line["stage"] for line in lines] == [stage["name"] for stage in stages for _ in range(6)]
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [line[key] for line in lines] == pytest.approx([line[key] for line in reference], rel=2e-5), key
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
