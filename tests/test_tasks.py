"""Tasks of lm-evaluation-harness in the loop: the scores of ``torchtrain.evaluate`` on the checkpoint."""

from functools import partialmethod
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
from forked_command import checked_command, run_command
from forked_run import read_metrics
from test_evaluate import evaluate, skip_default_tasks, write_tasks

from torchtrain.config.schema import ValidationConfig
from torchtrain.errors import ConfigError, StorageError, TorchtrainError
from torchtrain.inference.samples import check_tasks
from torchtrain.inference.tasks import load_tasks

pytest.importorskip("lm_eval")

OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}


def test_scores_are_those_of_evaluate(tmp_path: Path) -> None:
    """On one rank and on two, with the weights and with their averages; the run is not changed."""
    write_tasks(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"def name{n}(self):\n    return {n * n}\n\n\n" for n in range(300)))
    options = [
        *("--job.config_file", "train_configs/debug_model.toml", "--data.path", str(tmp_path / "text.txt")),
        *("--training.steps", "4", "--training.seq_len", "64", "--training.local_batch_size", "2"),
        *("--training.global_batch_size", "4", "--training.mixed_precision_param", "float32", "--ema.enable"),
        *("--model.shape.n_layers", "2", "--metrics.log_freq", "1"),
    ]
    tasks = [
        *("--validation.enable", "--validation.path", str(tmp_path / "text.txt"), "--validation.steps", "1"),
        *("--validation.interval", "2", "--validation.weights", "both", "--validation.tasks_path", str(tmp_path)),
        *("--validation.tasks", "choice", "rolling", "complete"),
    ]
    lines = {}
    for ranks, more in ((1, tasks), (2, tasks), (1, [])):
        folder = tmp_path / f"{ranks}{bool(more)}"
        checked_command(
            *("torchtrain.train", *options, "--job.dump_folder", str(folder), *more),
            ranks=ranks,
            environment=OFFLINE,
            hook=skip_default_tasks,
        )
        lines[ranks, bool(more)] = read_metrics(folder)
    one, two = ({line["step"]: line for line in lines[ranks, True] if "validation_loss" in line} for ranks in (1, 2))
    assert list(one) == list(two) == [2, 4]
    losses = [[line["loss"] for line in lines[1, more] if "loss" in line] for more in (True, False)]
    assert losses[0] == losses[1]
    for prefix, weights in (("validation", "trained"), ("validation_ema", "ema")):
        arguments = f"checkpoint={tmp_path / '1True'},weights={weights}"
        scores = evaluate("torchtrain", arguments, tmp_path, tmp_path / weights)["scores"]
        found = {name: value for name, value in one[4].items() if name.startswith(f"{prefix}_task_")}
        expected = {
            f"{prefix}_task_{task}_{key.removesuffix(',none')}": value
            for task, metrics in scores.items()
            for key, value in metrics.items()
            if key.endswith(",none") and "_stderr" not in key
        }
        assert found == pytest.approx(expected, rel=1e-6)  # likelihoods are sums of rounded numbers
        assert {f"{prefix}_task_choice_acc", f"{prefix}_task_rolling_bits_per_byte"} < found.keys()
        assert {name: two[4][name] for name in found} == pytest.approx(found, rel=1e-5)
    report = (tmp_path / "1True" / "report.md").read_text()
    assert f"| tasks | choice acc {one[4]['validation_task_choice_acc']:.4g} after step 4 |" in report
    assert one[2]["validation_task_rolling_bits_per_byte"] > one[4]["validation_task_rolling_bits_per_byte"]


def test_unknown_tasks_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tasks(tmp_path)
    found = run_command(
        *("torchtrain.train", "--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder"),
        *(str(tmp_path / "run"), "--validation.enable", "--validation.path", str(tmp_path / "texts.jsonl")),
        *("--validation.tasks", "choice", "far", "--validation.tasks_path", str(tmp_path)),
        environment=OFFLINE,
        hook=skip_default_tasks,
    )
    assert found.returncode == 2
    assert "error: validation.tasks: far are no tasks of lm-evaluation-harness; `lm-eval ls tasks`" in found.stderr
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"need lm-evaluation-harness: pip install 'torchtrain\[eval\]'"):
        check_tasks()


def test_tasks_that_cannot_be_scored_are_rejected_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
    write_tasks(tmp_path)
    choice = (tmp_path / "choice.yaml").read_text().replace("task: choice", "task: {}")
    for name, change in (("unsafe", "unsafe_code: true"), ("pictures", "doc_to_image: [context]"), ("absent", "")):
        (tmp_path / f"{name}.yaml").write_text(choice.replace("{}", name) + f"\n{change}\n")
    absent = (tmp_path / "absent.yaml").read_text().replace("choices.jsonl", "absent.jsonl")
    (tmp_path / "absent.yaml").write_text(absent)

    def error_of(task: str) -> TorchtrainError:
        with pytest.raises(TorchtrainError) as caught:
            load_tasks(ValidationConfig(enable=True, path="text.txt", tasks=(task,), tasks_path=str(tmp_path)))
        return caught.value

    for task, problem in (("unsafe", "marked as unsafe"), ("pictures", "images or sound"), ("absent", "do not exist")):
        error = error_of(task)
        assert isinstance(error, ConfigError)
        assert problem in str(error)
    monkeypatch.setattr(TaskManager, "load", Mock(side_effect=datasets.exceptions.DatasetNotFoundError("no such data")))
    assert isinstance(error_of("choice"), ConfigError)
    monkeypatch.setattr(TaskManager, "load", Mock(side_effect=ConnectionError("Couldn't reach the Hub")))
    assert isinstance(error_of("choice"), StorageError)
