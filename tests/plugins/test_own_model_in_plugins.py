"""Models of a user's module in plugins: norms by layer, generation, conversion and the search of layouts."""

import re
from functools import partial
from pathlib import Path

import pytest
from forked_command import run_command
from forked_run import ForkedRun, finish, read_metrics
from test_own_model import LAYOUTS, import_from, losses, of_models, on_layouts, options, write_modules

from torchtrain.errors import ConfigError

NORMS = ("--diagnostics.norms_freq", "4")


def norms(folder: Path) -> dict[str, float]:
    """The norms by layer of step 4."""
    lines = [line for line in read_metrics(folder) if line["step"] == 4]
    return {key: value for line in lines for key, value in line.items() if key.startswith(("norm_", "rms_"))}


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_modules(tmp_path_factory.mktemp("modules"))


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, modules: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """The name of a walkthrough's model, and the folder of a run of it on one rank."""
    folder = tmp_path_factory.mktemp("one_rank")
    output = finish(folder, *options(request.param), *NORMS, ranks=1, hook=partial(import_from, modules))
    assert f'--prompt "..." --import {request.param}' in output
    assert "torchtrain.convert" not in output  # it cannot be converted to Hugging Face's format
    return request.param, folder


@on_layouts(("sandwich", "tensor"))
def test_norms_of_an_own_model_are_the_same_on_two_ranks(
    trained: tuple[str, Path], modules: Path, layout: str, tmp_path: Path
) -> None:
    name, one_rank = trained
    switches = [*LAYOUTS[layout], *NORMS, "--checkpoint.no-enable"]
    finish(tmp_path, *options(name), *switches, ranks=2, hook=partial(import_from, modules))
    assert losses(tmp_path) == pytest.approx(losses(one_rank), rel=1e-5)
    assert norms(tmp_path) == pytest.approx(norms(one_rank), rel=1e-3)
    layers = [
        "tok_embeddings",
        "layers.0",
        "layers.1",
        "norm",
        "output",
        *["embedding_norm"] * (name in ("sandwich", "layer_norm")),
    ]
    assert {key for key in norms(tmp_path) if "weight" in key} == {f"norm_weight_{layer}" for layer in layers}


@pytest.mark.slow
def test_layouts_of_an_own_model_are_searched_in_several_processes(modules: Path, tmp_path: Path) -> None:
    """Each of which imports the module."""
    command = ["--job.config_file", "train_configs/debug_model.toml", *options("sandwich"), "--estimate.search"]
    command += ["--estimate.world_size", "2", "--estimate.search_seconds", "5"]
    command += ["--estimate.output", str(tmp_path / "layout.toml")]
    found = run_command("torchtrain.estimate", *command, hook=partial(import_from, modules))
    assert found.returncode == 0, found.stderr
    match = re.search(r"^(\d+) simulated in .*; \d+ skipped for lack of time", found.stdout, re.MULTILINE)
    assert match
    assert int(match[1]) > 1


@of_models("sandwich")
def test_commands_need_the_module_of_an_own_model(trained: tuple[str, Path], modules: Path) -> None:
    name, folder = trained
    command = [str(folder), "--prompt", "def ", "--max_new_tokens", "3", "--device", "cpu"]
    rejected = run_command("torchtrain.generate", *command, hook=partial(import_from, modules))
    assert rejected.returncode == ConfigError.exit_code
    assert f"loading a checkpoint runs no code: give --import {name}" in " ".join(rejected.stderr.split())
    found = run_command("torchtrain.generate", *command, "--import", name, hook=partial(import_from, modules))
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("def ")


@of_models("sandwich")
def test_own_model_without_hf_format_is_not_exported(trained: tuple[str, Path], modules: Path, tmp_path: Path) -> None:
    name, folder = trained
    hook = partial(import_from, modules)
    found = run_command("torchtrain.convert", str(folder), str(tmp_path / "hf"), "--import", name, hook=hook)
    assert found.returncode == ConfigError.exit_code
    assert f"model.name = '{name}' cannot be converted to Hugging Face's format" in " ".join(found.stderr.split())
    target = tmp_path / "own"
    found = run_command(
        "torchtrain.convert", str(folder), str(target), "--import", name, "--to", "torchtrain", hook=hook
    )
    assert found.returncode == 0, found.stderr
    run = ForkedRun(tmp_path / "run", *options(name), "--huggingface.export", ranks=1, hook=hook)
    assert run.wait() == [ConfigError.exit_code]
    assert "cannot be converted to Hugging Face's format" in " ".join(run.output().split())
