"""A file imports from lower floors, or from its own folder where the order has no circle: see docs/architecture.md."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "torchtrain").rglob("*.py"))

# The first entry that a module's name starts with gives its floor.
FLOORS = {
    "torchtrain.estimate": 7,
    "torchtrain.planning": 6,
    "torchtrain.comparison": 6,
    "torchtrain.validation": 4,
    "torchtrain.export": 4,
    "torchtrain.trainer": 5,
    "torchtrain.trained_model": 4,
    "torchtrain.compare": 7,
    "torchtrain.convert": 7,
    "torchtrain.conversion": 4,
    "torchtrain.train": 7,
    "torchtrain.generate": 7,
    "torchtrain.launch": 7,
    "torchtrain.evaluate": 7,
    "torchtrain.prepare": 7,
    "torchtrain.parallelisms": 3,
    "torchtrain.checkpoint": 3,
    "torchtrain.faults": 3,
    "torchtrain.optimizers": 3,
    "torchtrain.fingerprints": 3,
    "torchtrain.lr_schedule": 3,
    "torchtrain.metrics": 3,
    "torchtrain.generation": 3,
    "torchtrain.profiling": 3,
    "torchtrain.shape": 3,
    "torchtrain.attention": 2,
    "torchtrain.float8": 2,
    "torchtrain.compilation": 2,
    "torchtrain.cpu_products": 2,
    "torchtrain.distributed": 2,
    "torchtrain.datasets": 2,
    "torchtrain.models": 1,
    "torchtrain.tokenizers": 1,
    "torchtrain.initialization": 1,
    "torchtrain.loss": 1,
    "torchtrain.devices": 0,
    "torchtrain.config": 0,
    "torchtrain.log": 0,
    "torchtrain.environment": 0,
    "torchtrain.errors": 0,
    "torchtrain.outputs": 0,
    "torchtrain.pinned_memory": 0,
    "torchtrain.reading": 0,
    "torchtrain.torch_internals": 0,
}
# Pure files know neither config nor ranks; the model file knows torch and its RoPE scaling alone.
FORBIDDEN = {name: {"torchtrain.config"} for name, floor in FLOORS.items() if floor == 1}
FORBIDDEN["torchtrain.models.llama.model"] = {"torchtrain", "torch.distributed"}
FORBIDDEN["torchtrain.models.llama.rope_scaling"] = {"torchtrain", "torch.distributed"}
BUT = {"torchtrain.models.llama.model": {"torchtrain.models.llama.rope_scaling"}}


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> int:
    for prefix, floor in FLOORS.items():
        if is_within(module, prefix):
            return floor
    raise AssertionError(f"{module} stands on no floor: give it one in FLOORS and in docs/architecture.md")


def folder_of(module: str) -> str:
    """The part of the house a module belongs to: a folder of the package, or the module itself."""
    return ".".join(module.split(".")[:2])


def imports_of(path: Path) -> set[str]:
    """All modules that ``path`` imports, those inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full name"
            assert node.module is not None
            # "from package import module" names a module, "from module import thing" a thing.
            package = ROOT / node.module.replace(".", "/")
            for alias in node.names:
                is_module = (package / f"{alias.name}.py").exists() or (package / alias.name).is_dir()
                names.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_down(path: Path) -> None:
    module = module_name(path)
    if module == "torchtrain":
        return
    for imported in imports_of(path):
        for banned in FORBIDDEN.get(module, set()) | FORBIDDEN.get(folder_of(module), set()):
            known = imported in BUT.get(module, ())
            assert known or not is_within(imported, banned), f"{module} must not know {imported}"
        if imported.startswith("torchtrain.") and folder_of(imported) != folder_of(module):
            floor, below = floor_of(module), floor_of(imported)
            assert below < floor or below == 0, f"{module} (floor {floor}) imports {imported} (floor {below})"


def test_no_circles() -> None:
    graph = {module_name(path): {i for i in imports_of(path) if i.startswith("torchtrain.")} for path in FILES}
    graphlib.TopologicalSorter(graph).prepare()
