"""Registries of components, and ``job.import``, which imports a user's modules before the config is read."""

from pathlib import Path

import pytest

from torchtrain.config.parse import from_toml, parse, to_toml
from torchtrain.config.registry import LINEAR_CONVERSIONS, Registry
from torchtrain.config.schema import JobConfig
from torchtrain.errors import ConfigError
from torchtrain.parallelisms.linear_conversion import linear_conversion


def test_registry_returns_builtin_and_registered_entries():
    registry = Registry("optimizer.name", {"path": "pathlib:Path"})
    registry.register("own")(int)
    assert registry["path"] is Path
    assert registry["own"] is int
    assert list(registry) == ["path", "own"]


def test_unknown_name_is_rejected_with_the_names_there_are():
    registry = Registry("optimizer.name", {"adamw": "pathlib:Path", "muon": "pathlib:Path"})
    with pytest.raises(
        ConfigError, match=r"optimizer.name = 'adam' must be one of 'adamw', 'muon'.*did you mean 'adamw'"
    ):
        registry["adam"]


def test_second_entry_of_one_name_is_rejected():
    registry = Registry("optimizer.name", {"adamw": "pathlib:Path"})
    registry.register("own")(int)
    registry.register("own")(int)  # the same one again, as after a reload
    with pytest.raises(ConfigError, match="'own' is registered twice, by builtins:int and builtins:str"):
        registry.register("own")(str)
    with pytest.raises(ConfigError, match="'adamw' is registered twice"):
        registry.register("adamw")(int)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module outside of the package that reports its import in a file."""
    name = f"users_own_{tmp_path.name.replace('-', '_')}"
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    (package / "broken.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize("written", ["file", "command line", "command line, by ="])
def test_job_import_imports_the_modules(written: str, user_module: str, tmp_path: Path):
    config = tmp_path / "config.toml"
    modules = [f"{user_module}.parts"] if written == "file" else []
    config.write_text(f"[job]\nimport = {modules}\n")
    argv = {"file": [], "command line": ["--job.import", f"{user_module}.parts"]}.get(
        written, [f"--job.import={user_module}.parts"]
    )
    parsed = parse(["--job.config_file", str(config), *argv])
    assert (tmp_path / "imported").exists()
    assert parsed.job.import_ == (f"{user_module}.parts",)
    assert f'import = [\n    "{user_module}.parts",\n]' in to_toml(parsed)


def test_missing_module_is_a_config_error(user_module: str):
    with pytest.raises(ConfigError, match=r"job.import = 'no_such_package.part' is not a module.*PYTHONPATH"):
        parse(["--job.import", "no_such_package.part"])
    with pytest.raises(ConfigError, match=f"job.import = '{user_module}.absent' is not a module"):
        parse(["--job.import", f"{user_module}.absent"])
    with pytest.raises(ConfigError, match=r"job.import = '../parts.py' must be the name of a module"):
        parse(["--job.import", "../parts.py"])


def test_error_inside_a_users_module_keeps_its_own_message(user_module: str):
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        parse(["--job.import", f"{user_module}.broken"])


@pytest.mark.parametrize("value", ["'parts'", "[1]"])
def test_job_import_of_another_type_is_rejected(value: str, tmp_path: Path):
    config = tmp_path / "config.toml"
    config.write_text(f"[job]\nimport = {value}\n")
    with pytest.raises(ConfigError, match=r"config.toml: job.import"):
        parse(["--job.config_file", str(config)])


def test_configs_with_options_of_own_components_are_hashable():
    config = from_toml(JobConfig, {"optimizer": {"options": {"adamw": {}}}}, checked=False)
    assert hash(config) == hash(JobConfig())
    assert config != JobConfig()


def test_entry_that_imports_a_missing_plugin_names_it() -> None:
    registry = Registry("an.option", {"a": "torchtrain.plugins.no_such.module:Thing", "b": "no_such_package:Thing"})
    with pytest.raises(ConfigError, match=r"an.option = 'a' needs the plugin torchtrain.plugins.no_such, which is not"):
        registry["a"]
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        registry["b"]


def test_linear_layers_are_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = JobConfig()
    assert linear_conversion(config) is None
    for name in ("one", "another"):
        monkeypatch.setitem(LINEAR_CONVERSIONS._entries, name, lambda _: object())
    with pytest.raises(ConfigError, match="converted once, and the config asks for another and one"):
        linear_conversion(config)
