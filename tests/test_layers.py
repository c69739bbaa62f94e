"""A module imports only from lower layers, or from its own folder without a cycle; see docs/architecture.md."""

import graphlib
from pathlib import Path

import pytest
from draw_architecture import FILES, LAYERS, ROOT, folder_of, imports_of, without_implied

LAYER_OF = {name: -number for number, names in enumerate(LAYERS.values()) for name in names}
GROUND = min(LAYER_OF.values())
# Models import neither the config nor process groups; the model file imports only torch and its RoPE scaling.
FORBIDDEN = {"models": {"torchtrain.config", "torchtrain.distributed"}}
FORBIDDEN["torchtrain.models.llama.model"] = {"torchtrain", "torch.distributed"}
FORBIDDEN["torchtrain.models.llama.rope_scaling"] = {"torchtrain", "torch.distributed"}
ALLOWED = {
    "torchtrain.models.llama.model": {"torchtrain.models.llama.rope_scaling"},
    "torchtrain.models.model_config": {f"torchtrain.config.{name}" for name in ("parse", "registry", "schema")},
    "torchtrain.models.spec": {"torchtrain.config.registry"},
}


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int:
    name = folder_of(module)
    assert name in LAYER_OF, f"{module} is in no layer: add it to LAYERS and to docs/architecture.md"
    return LAYER_OF[name]


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """By module."""
    return {module_name(path): imports_of(path) for path in FILES}


def test_imports_are_from_lower_layers(imports: dict[str, set[str]]) -> None:
    for module, imported in [(module, name) for module, names in imports.items() for name in names]:
        if module == "torchtrain":
            continue
        for banned in FORBIDDEN.get(module, set()) | FORBIDDEN.get(folder_of(module), set()):
            allowed = imported in ALLOWED.get(module, ())
            assert allowed or not is_within(imported, banned), f"{module} must not import {imported}"
        if imported.startswith("torchtrain.") and folder_of(imported) != folder_of(module):
            own, other = layer_of(module), layer_of(imported)
            assert other < own or other == GROUND, f"{module} imports {imported}, which is not in a lower layer"


def test_imports_have_no_cycles(imports: dict[str, set[str]]) -> None:
    graph = {name: {i for i in imported if i.startswith("torchtrain.")} for name, imported in imports.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_implied_arrows_are_omitted() -> None:
    graph = {"a": set(), "b": {"a"}, "c": {"a", "b"}, "d": {"a", "c"}}
    assert without_implied(graph) == {"a": set(), "b": {"a"}, "c": {"b"}, "d": {"c"}}


# Where the core knows a plugin by a word of it: the documentation of options that select it, and a command.
KNOWN_PLUGINS = {
    "muon": {"optimizers/options.py"},
    "wandb": {"metrics/options.py"},
    "mlflow": {"metrics/options.py"},
    "trackio": {"metrics/options.py"},
    "torchtitan": {"convert_config.py"},
    **{word: set() for word in ("fingerprint", "float8", "straggler", "lm_eval", "lighthouse", "torchft")},
    **{word: set() for word in ("recheck", "s3fs", "kubernetes")},
}


@pytest.mark.parametrize("word", KNOWN_PLUGINS)
def test_core_does_not_know_plugins(word: str) -> None:
    """Only the registries name plugins, for messages; a plugin enters by them."""
    core = [path for path in FILES if "plugins" not in path.relative_to(ROOT).parts]
    names = {path.relative_to(ROOT / "torchtrain").as_posix(): path.read_text(encoding="utf-8") for path in core}
    del names["config/registry.py"]
    assert {name for name, text in names.items() if word in text.lower()} == KNOWN_PLUGINS[word]
