"""Each plugin declares the packages that it imports, and an error names them where one is missing."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from forked_command import run_command
from test_dependencies import PLUGINS, PROJECT, ROOT, names, packages_imported_by

from torchtrain import verify_layouts
from torchtrain.optional_packages import install_command

FOLDERS = sorted(path.parent for path in PLUGINS.glob("*/__init__.py"))
# Extras that were named before there were plugins, and what one command of a plugin compares with.
OTHER_EXTRAS = {"evaluation": ["eval"], "replicas": ["elastic"], "comparison": ["dev"]}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_plugin_declares_the_packages_that_it_imports(folder: Path) -> None:
    extras = PROJECT["optional-dependencies"]
    required = names(PROJECT["dependencies"])
    for extra in (folder.name.replace("_", "-"), *OTHER_EXTRAS.get(folder.name, [])):
        required |= names(extras.get(extra, []))
    if folder.name == "evaluation":
        required.add("huggingface_hub")  # of lm_eval
    if folder.name == "comparison":
        required.add("transformers")  # of --against
    if folder.name == "remote_data":
        required.add("pyarrow")
    assert set().union(*map(packages_imported_by, folder.rglob("*.py"))) <= required


# The command and its options that need the package.
MISSING = {
    "datasets": ("train", "--data.name=org/dataset", "remote_data"),
    "tomlkit": ("convert_config", "torchtitan.toml", "from_torchtitan"),
    "fsspec": ("train", "--data.path=https://localhost:9/a.txt", "remote_data"),
}


def remove(package: str, plugin: str) -> None:
    """In this process, ``package`` is not installed, and the modules of ``plugin`` were not imported."""
    for name in [*sys.modules]:
        if name.startswith((f"{package}.", f"torchtrain.plugins.{plugin}.")):
            parent, _, child = name.rpartition(".")
            vars(sys.modules.get(parent, sys)).pop(child, None)
            del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "package", ["datasets", *(pytest.param(name, marks=pytest.mark.slow) for name in MISSING if name != "datasets")]
)
def test_missing_package_is_named_with_the_command_that_installs_it(package: str, tmp_path: Path) -> None:
    name, option, plugin = MISSING[package]
    options = [option, *([f"--job.dump_folder={tmp_path}", "--training.steps=2"] if name == "train" else [])]
    found = run_command(f"torchtrain.{name}", *options, hook=partial(remove, package, plugin))
    install = install_command(plugin.replace("_", "-"))
    message = f"the plugin {plugin} needs the package {package}, which is not installed: {install}"
    assert message in found.stderr.replace("\n", " ")
    assert "Traceback" not in found.stderr
    assert found.returncode == 2


def test_package_that_a_module_of_the_user_needs_is_no_package_of_a_plugin(modules: Callable[[str, str], None]) -> None:
    modules("module_with_a_need", "import package_that_is_missing")
    with pytest.raises(ModuleNotFoundError, match="package_that_is_missing"):
        verify_layouts.main(["--job.import", "module_with_a_need"])


@pytest.mark.slow  # .ci/core trains without these packages
def test_run_on_local_data_needs_no_package_of_a_plugin(tmp_path: Path) -> None:
    """But what its end shows."""
    optional = ["datasets", "fsspec", "huggingface_hub", "tomlkit", "torchao", "transformers", "lm_eval", "wandb"]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({optional}))
from torchtrain.train import main
sys.exit(main(sys.argv[1:]))
"""
    options = ["--job.config_file=train_configs/debug_model.toml", f"--job.dump_folder={tmp_path}/run"]
    options += ["--training.steps=2", "--training.seq_len=64", "--training.local_batch_size=1"]
    command = [sys.executable, "-W", "error", "-c", code, *options]
    found = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "run" / "curves.png").is_file()
