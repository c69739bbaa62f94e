"""What Kubernetes does with ``kubernetes/base/job.yaml``: each pod's command, and the action for its exit code."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "scripts/kubernetes"


def manifests(name: str, edits: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The objects in a file by kind, after replacing the lines that a user edits."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    for old, new in (edits or {}).items():
        assert text.count(old) == 1, f"{name} has {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    return {entry["kind"]: entry for entry in yaml.safe_load_all(text)}


def container_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """The only container of a Job's pods."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


def pod_command(
    job: Mapping[str, Any],
    index: int,
    secrets: Mapping[str, Mapping[str, str]],
    fields: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Command and environment of the pod with this completion index.

    ``fields``: the values of variables that Kubernetes takes from the pod's own fields.
    """
    fields = fields or {}
    container = container_of(job)
    environment = {"JOB_COMPLETION_INDEX": str(index)}
    for source in container["envFrom"]:
        environment.update(secrets[source["secretRef"]["name"]])
    for variable in container["env"]:
        name = variable["name"]
        environment[name] = fields[name] if "valueFrom" in variable else variable["value"]
    words = [*container["command"], *container["args"]]
    return [re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], word) for word in words], environment


def action_for(job: Mapping[str, Any], exit_code: int, conditions: tuple[str, ...] = ()) -> str:
    """The action of the first rule of the Job's podFailurePolicy that matches a failed pod."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        if exit_code in rule.get("onExitCodes", {"values": ()})["values"]:
            return rule["action"]
        if any(pattern["type"] in conditions for pattern in rule.get("onPodConditions", ())):
            return rule["action"]
    return "Count"


def copy_image(folder: Path) -> Path:
    """Copy the files that the Dockerfile copies; returns the working directory of the container in ``folder``."""
    instructions = re.findall(r"^COPY (.+)$", (FOLDER / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    for instruction in instructions:
        *sources, target = instruction.split()
        for source in sources:
            if (ROOT / source).is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, folder / target, dirs_exist_ok=True, ignore=ignore)
            else:
                (folder / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, folder / target)
    return folder
