"""List the options of torchtitan's whole history, for the tests: python scripts/docs/torchtitan_options.py REPOSITORY

REPOSITORY is a clone of https://github.com/pytorch/torchtitan. The list, tests/plugins/from_torchtitan/history.toml,
has the names, dates and defaults of all options that its parser or its dataclasses define in any commit of the main
branch, and the names that its TOML files set, which include those of experiments.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli

from torchtrain.config.help import toml

OUTPUT = Path(__file__).parent.parent.parent / "tests/plugins/from_torchtitan/history.toml"
HEAD = """\
# Options of torchtitan from 2024-02 to {date} ({commit}), written by scripts/docs/torchtitan_options.py. For each:
#   [first day, last day or "" if it still exists, each default with the day from which it holds, as Python]
"""
TOML_ERA = ("torchtrain/config_manager.py", "torchtitan/config_manager.py", "torchtitan/config/job_config.py")
PYTHON_ERA = (
    *("torchtitan/components", "torchtitan/config", "torchtitan/distributed", "torchtitan/experiments/ft"),
    *("torchtitan/experiments/torchft", "torchtitan/hf_datasets", "torchtitan/protocols", "torchtitan/tools"),
    "torchtitan/trainer.py",
)
DATA_LOADERS = "ParallelAwareDataloader HuggingFaceTextDataLoader BaseDataLoader GrainDataLoader ChatDataLoader"
DATA_LOADERS += " InterleavedHuggingFaceTextDataLoader InterleavedChatDataLoader"
SECTIONS = {  # of torchtitan's Trainer.Config: the classes whose fields are its options
    "": "Trainer",
    "activation_checkpoint": "ActivationCheckpointConfig ActivationCheckpointing SelectiveAC MemoryBudgetAC",
    "checkpoint": "BaseCheckpointManager CheckpointManager TorchFTCheckpointManager",
    "comm": "CommConfig",
    "compile": "CompileConfig",
    "dataloader": DATA_LOADERS,
    "debug": "DebugConfig",
    "fault_tolerance": "TorchFTManager FaultTolerance",
    "loss": "ChunkedLossWrapper ChunkedCELoss CrossEntropyLoss",
    "lr_scheduler": "LRSchedulersContainer",
    "metrics": "MetricsProcessor",
    "model_converters": "ModelConvertersContainer",
    "optimizer": "OptimizersContainer",
    "override": "OverrideConfig",
    "parallelism": "ParallelismConfig",
    "profiler": "Profiler",
    "profiling": "ProfilingConfig",
    "training": "TrainingConfig",
    "validator": "BaseValidator Validator",
    "validator.dataloader": DATA_LOADERS,
}
Options = dict[str, str]  # defaults as Python by name


def git(repository: str, *arguments: str) -> str:
    found = subprocess.run(["git", "-C", repository, *arguments], check=True, capture_output=True)
    return found.stdout.decode(errors="replace")


def annotated(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement


def default_of(value: ast.expr | None) -> str:
    """The default of a field, without the factory of a mutable one."""
    text = ast.unparse(value) if value else "None"
    factory = re.fullmatch(r"field\(default_factory=(?:lambda: )?(.*)\)", text)
    return {"list": "[]", "dict": "{}"}.get(factory[1], factory[1]) if factory else text


def options_of_parser(tree: ast.Module) -> Options:
    """The options of an ArgumentParser, or of the dataclass JobConfig, in one version of a module."""
    options: Options = {}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            default = {"'store_true'": "False", "'store_false'": "True"}.get(keywords.get("action", ""), "None")
            for name in node.args:
                if isinstance(name, ast.Constant) and name.value.startswith("--"):
                    options[name.value[2:]] = keywords.get("default", default)

    def add_fields(node: ast.ClassDef, prefix: str) -> None:
        for name, field in annotated(node):
            nested = classes.get(ast.unparse(field.annotation))
            if nested is not None:
                add_fields(nested, f"{prefix}{name}.")
            else:
                options[prefix + name] = default_of(field.value)

    if "JobConfig" in classes:
        add_fields(classes["JobConfig"], "")
    return options


def options_of_components(tree: ast.Module) -> Options:
    """The options of the components' nested class Config, and of other config classes, in one version of a module."""
    options: Options = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        nested = [inner for inner in node.body if isinstance(inner, ast.ClassDef) and inner.name == "Config"]
        for section, names in SECTIONS.items():
            if node.name in names.split():
                for name, field in annotated(nested[0] if nested else node):
                    is_section = not section and name in SECTIONS
                    if not name.startswith("_") and not is_section and not (name == "dataloader" and section):
                        options[f"{section}.{name}".strip(".")] = default_of(field.value)
    return options


def history(repository: str) -> dict[str, list[Any]]:
    """First day, last day, and the defaults by their first day, of each option."""
    found: dict[str, list[Any]] = {}
    in_file: dict[str, set[str]] = {}

    def add(day: str, path: str, options: Options) -> None:
        for name, default in options.items():
            entry = found.setdefault(name, [day, "", {}])
            if not any(name in names for other, names in in_file.items() if other != path):
                entry[0] = min(entry[0], day)
            entry[1] = ""
            defaults = list(entry[2].values())
            if not defaults or defaults[-1] != default:
                entry[2][day] = default
        gone = in_file.get(path, set()) - options.keys()
        in_file[path] = set(options)
        for name in gone:
            if not any(name in names for names in in_file.values()):
                found[name][1] = day

    first = git(repository, "log", "--diff-filter=A", "--format=%H", "HEAD", "--", "torchtitan/config/configs.py")
    for paths, commits, read in (
        (TOML_ERA, "HEAD", options_of_parser),
        (PYTHON_ERA, f"{first.split()[-1]}^..HEAD", options_of_components),
    ):
        options = ("--first-parent", "--reverse", "--name-only", "--no-renames", "--format=@%H %as")
        log = git(repository, "log", *options, commits, "--", *paths)
        for line in log.splitlines():
            if line.startswith("@"):
                commit, day = line[1:].split()
            elif line.endswith(".py") and "/tests/" not in line:
                text = subprocess.run(["git", "-C", repository, "show", f"{commit}:{line}"], capture_output=True).stdout
                try:
                    add(day, line, read(ast.parse(text)))
                except SyntaxError:  # a commit of 2025-07-20 does not parse
                    continue
    return found


def names_in_files(repository: str) -> dict[str, list[str]]:
    """First and last day of each name that a TOML file sets."""

    def flat(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for key, value in table.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield prefix + key

    days: dict[str, list[str]] = {}
    log = git(repository, "log", "--raw", "--no-abbrev", "--format=@%as", "HEAD", "--", "*.toml", ":!pyproject.toml")
    for line in log.splitlines():
        if line.startswith("@"):
            day = line[1:]
        elif line.startswith(":") and set(blob := line.split()[3]) != {"0"}:
            for name in flat(tomli.loads(git(repository, "cat-file", "blob", blob))):
                days.setdefault(name, []).append(day)
    return {name: [min(found), max(found)] for name, found in days.items()}


def main(repository: str) -> None:
    options = history(repository)
    for name, days in names_in_files(repository).items():
        options.setdefault(name, [*days, {}])
    commit, date = git(repository, "log", "-1", "--format=%h %as", "HEAD").split()
    lines = [HEAD.format(date=date, commit=commit)]
    for name, (first, last, defaults) in sorted(options.items()):
        shown = ", ".join(f'"{day}" = {toml(value)}' for day, value in defaults.items())
        lines.append(f'"{name}" = ["{first}", "{last}", {{{shown}}}]\n')
    OUTPUT.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
