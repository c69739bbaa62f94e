"""Draw the picture in docs/architecture.md from the imports: ``python scripts/docs/draw_architecture.py``.

The picture is a Mermaid flowchart, which GitHub renders. Its boxes are the folders and modules of the package by layer.
An arrow means "imports". An arrow that other arrows imply, because there is a longer path, is omitted.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "architecture.md"
FILES = sorted((ROOT / "torchtrain").rglob("*.py"))

# Folders and modules of the package, from the top layer to the lowest. docs/architecture.md explains them.
LAYERS = {
    "commands": (
        "__main__",
        "train",
        "prepare",
        "cache",
        "convert",
        "generate",
        "evaluate",
        "perplexity",
        "estimate",
        "compare",
        "verify_layouts",
        "explain",
        "convert_config",
        "check",
        "launch",
    ),
    "plugins": ("plugins",),
    "trainer": ("trainer",),
    "resolve": ("resolve",),
    "checkpoints and metrics": ("checkpoint", "metrics"),
    "CPU": ("cpu",),
    "parallelism and optimizers": ("parallelisms", "optimizers", "fault_tolerance"),
    "data": ("datasets",),
    "models": ("models",),
    "process groups": ("distributed",),
    "config": ("config",),
    "ground": (
        "cli",
        "logging",
        "environment",
        "files",
        "errors",
        "devices",
        "labels",
        "optional_packages",
        "pinned_memory",
        "progress",
        "torch_internals",
    ),
}
# Layers that are one box, in which all modules are named. Every module imports from the ground, without arrows.
BOXES = ("commands", "ground")


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


def folder_of(module: str) -> str:
    """The top-level folder or module of the package that a module is in, given by its full name.

    The ``options.py`` of a folder of the core is a part of the config, although it stands beside what reads it.
    """
    _, name, *rest = module.split(".")
    return "config" if rest == ["options"] else name


def box_of(module: str) -> str:
    """The box of a module, given by its full name: its layer, if the layer is one box, or its top-level folder."""
    name = folder_of(module)
    return next((layer for layer in BOXES if name in LAYERS[layer]), name)


def box_graph() -> dict[str, set[str]]:
    """For each box, from the lowest layer to the highest, the boxes that it imports from."""
    boxes = [box for layer, names in LAYERS.items() for box in ((layer,) if layer in BOXES else names)]
    graph: dict[str, set[str]] = {box: set() for box in reversed(boxes)}
    for path in FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[1] == "__init__":
            continue
        box = box_of(".".join(parts))
        imported = {box_of(module) for module in imports_of(path) if module.startswith("torchtrain.")}
        graph[box] |= imported - {box, "ground"}
    return graph


def without_implied(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The transitive reduction of ``graph``, in which a box comes after those that it imports from."""
    reachable: dict[str, set[str]] = {}
    for box, imported in graph.items():
        reachable[box] = imported.union(*(reachable[other] for other in imported))
    return {box: imported - set().union(*(reachable[other] for other in imported)) for box, imported in graph.items()}


def draw() -> str:
    """The flowchart in Mermaid's language."""
    graph = without_implied(box_graph())
    lines = ["flowchart TB"]
    for layer, names in LAYERS.items():
        label = ", ".join(f"{name}.py" for name in names)
        if layer == "ground":
            lines.append(f'    ground["below all: {label}"]')
        elif layer in BOXES:
            lines.append(f'    {layer}["{layer}: {label}"]')
        else:
            for name in names:
                ending = "/" if (ROOT / "torchtrain" / name).is_dir() else ".py"
                lines.append(f'    {name}["{name}{ending}"]')
    for box in reversed(graph):
        lines += [f"    {box} --> {other}" for other in sorted(graph[box])]
    lines += [f"    {box} ~~~ ground" for box, imported in graph.items() if not imported and box != "ground"]
    return "\n".join(lines) + "\n"


def page_with_picture(page: str) -> str:
    """The text of the page with the current picture in place of its Mermaid block."""
    return re.sub(r"(?<=```mermaid\n).*?(?=```)", lambda _: draw(), page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page_with_picture(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
