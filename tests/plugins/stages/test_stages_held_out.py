"""Held-out documents in a run in stages."""

from pathlib import Path

from data_samples import DOCUMENTS, write_jsonl
from forked_run import CONFIG, finish, read_metrics


def test_sources_of_one_name_and_of_weight_zero_are_validated(tmp_path: Path) -> None:
    paths = []
    for folder in "abc":
        (tmp_path / folder).mkdir()
        paths.append(write_jsonl(tmp_path / folder / "train.jsonl", DOCUMENTS))
    tables = [f'{{path = "{path}", held_out = 0.3, weight = {n % 2}}}' for n, path in enumerate(paths, 1)]
    (tmp_path / "own.toml").write_text(
        f"{CONFIG.replace('steps = 8', '')}\n[data]\nsources = [{', '.join(tables)}]\n"
        '[[stages]]\nname = "first"\nsteps = 1\n[[stages]]\nname = "second"\nsteps = 1\n'
    )
    finish(tmp_path, "--job.config_file", str(tmp_path / "own.toml"), ranks=1)
    lines = [line for line in read_metrics(tmp_path) if "validation_loss" in line]
    assert lines
    assert {f"validation_loss_train_{number}" for number in (1, 2, 3)} <= lines[-1].keys()
