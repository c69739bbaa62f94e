"""scripts/eight_gpus.sh runs its parts on two CPU ranks, and says what holds."""

import json
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import eight_gpus
import first_hour
import kill_replica
import pytest
import torch
from gpu_parts import Claim, Part, run_parts, summary

from torchtrain.config.parse import parse
from torchtrain.parallelisms.check import check_layout
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.plugins.planner.request import resolve_model_config

ROOT = Path(__file__).parents[2]
PARTS = ["machine", "speed", "layouts", "bits", "replicas", "checkpoint", "layouts-of-8B", "trained"]


@pytest.mark.slow
@pytest.mark.parametrize("parts", [["machine"], PARTS], ids=["machine", "all"])
def test_dry_run_says_what_holds(forked_ranks: dict[str, str], tmp_path: Path, parts: list[str]) -> None:
    python = forked_ranks["PYTHON_EXEC"]
    environment = {**forked_ranks, "PYTHON": python, "OUT": str(tmp_path), "WHEELS": "", "RANKS": "2"}
    environment["OMP_NUM_THREADS"] = "1"
    command = ["bash", "scripts/eight_gpus.sh", "--dry-run", "--only", *parts]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, text=True, capture_output=True)
    page = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert result.returncode == 0, page + result.stderr
    states = json.loads((tmp_path / "parts.json").read_text(encoding="utf-8"))["parts"]
    assert {name: state["result"] for name, state in states.items()} == dict.fromkeys(parts, "pass")
    claims = {
        text: (holds, figures) for text, holds, figures in re.findall(r"^\| (.*?) \| (yes|NO) \| (.*) \|$", page, re.M)
    }
    assert {holds for holds, _ in claims.values()} == {"yes"}
    exact = "all-reduces of whole numbers are exact on each rank"
    assert claims[exact][1] == "3,072 elements, 0 wrong"
    for part in PARTS:
        assert (f"| {part} | not known: not run | |" in page) == (part not in parts)
    if parts == PARTS:
        layouts = claims["each layout of 2 ranks trains the losses of a CPU, in float32"][1]
        assert layouts.startswith("5 of 5; losses at most ")
        assert "exact sums: shard=2 has the bits of one GPU" in claims
        assert "grains: tensor=2 has the bits of one GPU" in claims
        assert "a run of which a GPU is killed continues, and has the bits of an undisturbed one" in claims
        assert "a run resumes from a checkpoint" in claims
        assert (tmp_path / "trained.png").stat().st_size > 0


def test_layouts_are_all_divisions_of_the_ranks() -> None:
    layouts = [eight_gpus.name_of(degrees) for degrees in eight_gpus.divisions(8, list(eight_gpus.AXES))]
    assert len(set(layouts)) == len(layouts) == 35  # ways to give three factors of 2 to five axes
    assert {"shard=8", "pipeline=8", "replicate=2,context=2,tensor=2"} <= set(layouts)


@pytest.mark.usefixtures("mixtures_of_experts")
@pytest.mark.parametrize(("script", "ranks"), [(eight_gpus, 8), (first_hour, 1)], ids=["eight", "one"])
def test_options_of_each_run_are_accepted_on_a_gpu(script: ModuleType, ranks: int, tmp_path: Path) -> None:
    """None of the runs of a rented machine ends before its first step because of its options."""
    arguments = {"ranks": 8} if ranks > 1 else {}
    commands = [words for part in script.parts(False, tmp_path, tmp_path, **arguments) for words in part.commands]
    runs = [words[words.index("torchtrain.train") + 1 :] for words in commands if "torchtrain.train" in words]
    assert runs
    for words, options in zip((w for w in commands if "torchtrain.train" in w), runs, strict=True):
        config = parse(options)
        device = torch.device("cpu" if config.job.device == "cpu" else "cuda")
        model = resolve_model_config(config)
        config, dims = resolve_layout(config, model, ranks if f"--nproc-per-node={ranks}" in words else 1)
        check_layout(config, device, dims, model, (9, 0))
    if ranks > 1:
        (words,) = (words for words in commands if "scripts/faults/kill_replica.py" in words)
        own = [word for word in words[3:] if not word.startswith(("--ranks", "--output"))]
        config = parse([*own, *kill_replica.RUN, "--replicas.lighthouse=http://127.0.0.1:1", "--replicas.id=0"])
        resolve_layout(config, resolve_model_config(config), 4)


def test_the_page_says_what_does_not_hold_and_what_is_not_known(tmp_path: Path) -> None:
    good, bad, missing = (Part(name, 9, [["true"]]) for name in ("good", "bad", "missing"))
    good.claims = lambda _: [Claim("water is wet", True, "100%")]
    bad.claims = lambda _: [Claim("pigs fly", False, "0 of 3")]
    missing.claims = lambda output: [Claim(output[99], True)]
    for part in (good, bad, missing):
        part.run(tmp_path)
    page = summary("What was seen", [good, bad, missing])
    assert "| water is wet | yes | 100% |" in page
    assert "| pigs fly | NO | 0 of 3 |" in page
    assert "| missing | not known: FAIL (no figures) | |" in page


def test_a_second_start_runs_what_has_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    runs: list[str] = []

    def parts(dry_run: bool, work: Path, out: Path) -> list[Part]:  # noqa: ARG001
        def part(name: str, command: str) -> Part:
            return Part(name, 9, [[command]], figures=lambda _: runs.append(name) or name)

        return [part("one", "true"), part("two", "true" if runs else "false")]

    def start(*words: str) -> int:
        return run_parts("", "Title", "folder", parts, [*words])

    assert start() == 1
    assert runs == ["one", "two"]
    assert start() == 0
    assert runs == ["one", "two", "two"]
    assert start() == 0
    assert runs == ["one", "two", "two"]
    assert start("--only", "one") == 0
    assert runs == ["one", "two", "two", "one"]
    assert start("--dry-run") == 0  # whose results do not count for the machine
    assert runs == ["one", "two", "two", "one", "one", "two"]
    assert "| two | pass | 0 | two |" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        start("--only", "three")
