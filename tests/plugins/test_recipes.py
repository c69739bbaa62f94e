"""scripts/recipes.py: the configs that it runs, their order, stored results and the report."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
from recipes import DECAYS, RATES, SEEDS, Recipe, Results, prepare, reaches, recipes_of, report, train

from torchtrain.config.parse import parse

START = Recipe("adamw", 0.0, dim=128, layers=4, tokens=100 * 2048)
CHOSEN = argparse.Namespace(rates=RATES, optimizers=("adamw", "muon"))


def curve_to(loss: float) -> list[dict[str, float]]:
    return [{"step": 50, "loss": loss + 1, "ema": loss + 1}, {"step": 100, "loss": loss, "ema": loss - 0.5}]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    results = Results(tmp_path / "results.jsonl")
    for recipe in recipes_of("rates", START, results, CHOSEN):
        loss = 100 * abs(recipe.lr - {"adamw": 1e-3, "muon": 4e-3}[recipe.optimizer])
        results.add(recipe, curve_to(4 + loss), 0.5, 1)
    return results


def test_one_file_in_20_is_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.subprocess.run", lambda *_, **__: None)  # in place of the tokenization
    prepare(tmp_path)
    held_out, train = ((tmp_path / f"data/{name}.jsonl").read_bytes().count(b"\n") for name in ("held_out", "train"))
    assert 10 < train / held_out < 40


def test_every_recipe_is_a_valid_config(results: Results, tmp_path: Path) -> None:
    for part in ("rates", "decays", "seeds", "schedules", "z", "mup"):
        recipes = list(recipes_of(part, START, results, CHOSEN))
        for recipe in (recipes[0], recipes[-1]):
            config = parse(recipe.options(tmp_path, tmp_path))
            assert (config.optimizer.name, config.optimizer.lr) == (recipe.optimizer, recipe.lr)
            assert config.training.z_loss_weight == recipe.z
            assert config.mup.base_dim == recipe.base_dim
            assert config.training.steps * 2048 == recipe.tokens


def test_later_parts_use_the_best_learning_rate_and_weight_decay(results: Results) -> None:
    decays = list(recipes_of("decays", START, results, CHOSEN))
    assert [(r.optimizer, r.lr, r.decay) for r in decays] == [
        (name, lr, decay) for name, lr in (("adamw", 1e-3), ("muon", 4e-3)) for decay in DECAYS
    ]
    results.add(replace(START, lr=1e-3, decay=0.3), curve_to(3.5), 0.5, 1)
    seeds = [r for r in recipes_of("seeds", START, results, CHOSEN) if r.optimizer == "adamw"]
    assert [(r.lr, r.decay, r.seed) for r in seeds] == [(1e-3, 0.3, seed) for seed in SEEDS]


def test_part_without_its_prerequisite_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="part z needs the best rate of adamw: run --parts rates with it first"):
        list(recipes_of("z", START, Results(tmp_path / "results.jsonl"), CHOSEN))


def test_results_are_read_from_the_file(results: Results) -> None:
    again = Results(results.file)
    assert again.lines == results.lines
    assert len(again.lines) == 12


def test_truncated_line_of_results_is_skipped(results: Results) -> None:
    with results.file.open("a") as file:
        file.write('{"name": "cut sho')
    again = Results(results.file)
    assert again.lines == results.lines
    again.add(replace(START, lr=1.0), curve_to(9.0), 0.5, 1)
    assert Results(results.file).lines == again.lines


def test_truncated_lines_of_metrics_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = argparse.Namespace(returncode=0)
    monkeypatch.setattr("recipes.subprocess.run", lambda *_, **__: ended)  # in place of the training
    lines = ['{"step": 1, "step_seconds": 2.0}', '{"step": 2, "lo', '{"step": 2, "validation_loss": 3.0']
    lines += ['{"step": 2, "validation_loss": 3.0, "validation_ema_loss": 4.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert train(START, tmp_path, tmp_path, 1) == ([{"step": 2, "loss": 3.0, "ema": 4.0}], 2.0, 1)


def test_failed_run_is_reported_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = argparse.Namespace(returncode=75)
    monkeypatch.setattr("recipes.subprocess.run", lambda *_, **__: ended)
    with pytest.raises(SystemExit, match=r"^75$"):
        train(START, tmp_path, tmp_path, 1)
    assert capsys.readouterr().err == f"error: the run ended with exit code 75; {tmp_path}/log.txt says why\n"


def test_tokens_to_a_loss_are_interpolated_linearly() -> None:
    assert reaches(curve_to(4.0), 4.25, 10) == 875
    assert reaches(curve_to(4.0), 6.0, 10) == 500
    assert reaches(curve_to(4.0), 3.9, 10) is None


def test_report_marks_missing_results(results: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    report(results, START, tmp_path / "curves.png")
    text = capsys.readouterr().out
    assert "| muon | 4.350 | 4.300 | 4.200 | 4.000 | 4.400 | 5.200 |" in text
    assert "muon at its best rate, 0.004, by decay: 0: not run, 0.1: 4.000, 0.3: not run" in text
    assert "| muon | 1 | 4.000 (4.000 to 4.000; 1) | 3.500 (3.500 to 3.500; 1) | not run | not run |" in text
    assert "muon, seed 0: AdamW's last loss, 4.000: after 204,800 tokens, 50 s of 0.50 a step" in text
    assert "| width 256, [mup] | not run | not run | not run | not run | not run | not run |" in text
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
