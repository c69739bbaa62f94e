"""A module imports only from lower layers, or from its own folder without a cycle; see docs/architecture.md."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "torchtrain").rglob("*.py"))

# Folders and modules of the package, from the top layer to the lowest. docs/architecture.md explains them.
LAYERS = {
    "commands": ("train", "prepare", "convert", "generate", "evaluate", "estimate", "compare", "launch"),
    "tools": ("planning", "comparison"),
    "trainer": ("trainer",),
    "inference": ("inference",),
    "checkpoints and metrics": ("checkpoint", "metrics"),
    "parallelism and optimizers": ("parallelisms", "optimizers", "fault_tolerance"),
    "CPU": ("cpu",),
    "data": ("datasets",),
    "models": ("models",),
    "process groups": ("distributed",),
    "config": ("config",),
    "ground": ("cli", "logging", "environment", "files", "errors", "devices", "pinned_memory", "torch_internals"),
}
LAYER_OF = {f"torchtrain.{name}": -number for number, names in enumerate(LAYERS.values()) for name in names}
GROUND = min(LAYER_OF.values())
# Models import neither the config nor process groups; the model file imports only torch and its RoPE scaling.
FORBIDDEN = {"torchtrain.models": {"torchtrain.config", "torchtrain.distributed"}}
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


def folder_of(module: str) -> str:
    """The top-level folder or module of the package that a module is in."""
    return ".".join(module.split(".")[:2])


def layer_of(module: str) -> int:
    name = folder_of(module)
    assert name in LAYER_OF, f"{module} is in no layer: add it to LAYERS and to docs/architecture.md"
    return LAYER_OF[name]


def imports_of(path: Path) -> set[str]:
    """All modules that ``path`` imports, including those imported inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full name"
            assert node.module is not None
            # "from package import module" imports a module, "from module import name" a name of that module.
            package = ROOT / node.module.replace(".", "/")
            for alias in node.names:
                is_module = (package / f"{alias.name}.py").exists() or (package / alias.name).is_dir()
                names.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_are_from_lower_layers(path: Path) -> None:
    module = module_name(path)
    if module == "torchtrain":
        return
    for imported in imports_of(path):
        for banned in FORBIDDEN.get(module, set()) | FORBIDDEN.get(folder_of(module), set()):
            allowed = imported in ALLOWED.get(module, ())
            assert allowed or not is_within(imported, banned), f"{module} must not import {imported}"
        if imported.startswith("torchtrain.") and folder_of(imported) != folder_of(module):
            own, other = layer_of(module), layer_of(imported)
            assert other < own or other == GROUND, f"{module} imports {imported}, which is not in a lower layer"


def test_imports_have_no_cycles() -> None:
    graph = {module_name(path): {i for i in imports_of(path) if i.startswith("torchtrain.")} for path in FILES}
    graphlib.TopologicalSorter(graph).prepare()
