"""lm-evaluation-harness gives the same scores for a checkpoint as for the exported model in transformers."""

import json
import sys
from collections.abc import Collection, Mapping
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_command import checked_command, run_command

from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.errors import CheckpointError, ConfigError, TokenizerError
from torchtrain.plugins.evaluation.trained_model import TrainedModel

pytest.importorskip("lm_eval")

CHOICES = [
    {"context": "import", "choices": [" os", " banana", " the sea"], "answer": 0},
    {"context": "def main", "choices": ["():", " of things", "class"], "answer": 0},
    {"context": "for i in", "choices": [" range(10):", " the", "\n"], "answer": 0},
    {"context": "return self", "choices": ["._name", " whale", "):\n        pass"], "answer": 0},
    {"context": "    def __init__(self", "choices": [", name):", "\n\n\n", " spoon"], "answer": 0},
]
TEXTS = [
    {"text": "import os\nimport sys\n\n\ndef main():\n    return 0\n" * n} for n in (1, 2, 9)
]  # the last is longer than a window
TASKS = {
    "choice": """
task: choice
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
""",
    "rolling": """
task: rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
    "complete": """
task: complete
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}


def skip_slow_parts() -> None:
    """Indexing the thousands of tasks of the harness, a list of all packages, and standard errors take many seconds."""
    from lm_eval import evaluator
    from lm_eval.api import metrics
    from lm_eval.tasks import TaskManager

    metrics.bootstrap_stderr = lambda *_, **__: 0.0
    TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)
    evaluator.add_env_info = lambda _results: None


def write_tasks(folder: Path, tasks: Mapping[str, str] = TASKS) -> None:
    """Write the tasks and their documents, for the harness's ``--include_path``."""
    for name, documents in (("choices", CHOICES), ("texts", TEXTS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, text in tasks.items():
        file = folder / ("texts.jsonl" if name == "rolling" else "choices.jsonl")
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test"
        (folder / f"{name}.yaml").write_text(text + source)


def evaluate(
    model: str, arguments: str, tasks: Path, output: Path, ranks: int = 1, names: Collection[str] = TASKS
) -> dict[str, Any]:
    module = "torchtrain.evaluate" if model == "torchtrain" else "lm_eval"
    checked_command(
        *(module, "--model", model, "--model_args", arguments, "--device", "cpu"),
        *("--tasks", ",".join(names), "--include_path", str(tasks), "--batch_size", "3", "--log_samples"),
        *("--output_path", str(output)),
        ranks=ranks,
        environment={"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"},
        hook=skip_slow_parts,
    )
    (results,) = output.rglob("results_*.json")
    scores = json.loads(results.read_text())["results"]
    samples = {}
    for task in names:
        lines = next(output.rglob(f"samples_{task}_*.jsonl")).read_text().splitlines()
        samples[task] = [json.loads(line)["filtered_resps"] for line in lines]
    return {"scores": scores, "samples": samples}


@pytest.fixture(scope="module")
def fluent_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dump folder of a run that continues each prompt in a different way, on every version of Python."""
    folder = tmp_path_factory.mktemp("fluent")
    (folder / "text.txt").write_text(
        "".join(f"def name{n}(self):\n    return {n * n} + self.value{n % 7}\n\n\n" for n in range(3000))
    )
    checked_command(
        *("torchtrain.train", "--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder", str(folder)),
        *("--data.path", str(folder / "text.txt"), "--training.steps", "12", "--training.seq_len", "64"),
        *("--training.local_batch_size", "4", "--training.mixed_precision_param", "float32"),
    )
    return folder


@pytest.mark.slow  # test_hf_to_hf.py compares the likelihoods and answers with lm-eval's own model
def test_scores_equal_those_of_the_exported_model(fluent_run: Path, tmp_path: Path) -> None:
    """On two ranks; test_tasks.py compares those of one with the scores of a run."""
    write_tasks(tmp_path)
    export = tmp_path / "hf"
    checked_command("torchtrain.convert", str(fluent_run), str(export), "--dtype", "float32")
    theirs = evaluate("hf", f"pretrained={export},dtype=float32", tmp_path, tmp_path / "theirs")
    ours = evaluate("torchtrain", f"checkpoint={fluent_run}", tmp_path, tmp_path / "ours", ranks=2)
    for task in TASKS:
        for metric, value in theirs["scores"][task].items():
            if isinstance(value, float):
                assert ours["scores"][task][metric] == pytest.approx(value, rel=1e-5), (task, metric)
    assert ours["samples"]["complete"] == theirs["samples"]["complete"]
    assert len(set(map(str, ours["samples"]["complete"]))) > 1
    for own, other in zip(ours["samples"]["choice"], theirs["samples"]["choice"], strict=True):
        assert [float(likelihood) for likelihood, _ in own] == pytest.approx([float(x) for x, _ in other], rel=1e-4)
        assert [greedy for _, greedy in own] == [greedy for _, greedy in other]


def test_unknown_or_invalid_arguments_are_rejected() -> None:
    from torchtrain.plugins.evaluation.evaluate_command import HarnessModel

    for arguments, message in (
        ({"checkpoint": "outputs/debug_model", "weight": "ema"}, "--model_args has weight; torchtrain takes"),
        ({"max_batch_size": None, "device": "cpu"}, "--model_args has no checkpoint=FOLDER"),
        (
            {"checkpoint": "outputs/debug_model", "dtype": "half"},
            "dtype = 'half' is not supported; there are auto, bfloat16",
        ),
        ({"checkpoint": "outputs/debug_model", "batch_size": "0"}, "--batch_size = '0' must be auto or an integer"),
    ):
        with pytest.raises(ConfigError, match=message):
            HarnessModel(**arguments)


def test_sampled_answers_differ_and_depend_on_the_seed(trained_run: Path) -> None:
    import torch
    from lm_eval.api.instance import Instance
    from torch import distributed as dist

    from torchtrain.plugins.evaluation.evaluate_command import HarnessModel

    # Like a task with repeats: one context and several answers, in more than one batch.
    options = {"do_sample": True, "temperature": 1.0, "top_k": -1, "max_gen_toks": 16, "until": []}
    model = HarnessModel(checkpoint=str(trained_run), device="cpu", batch_size=2)
    try:
        requests = [Instance("generate_until", {}, ("def ", options), i) for i in range(6)]
        with torch.random.fork_rng():
            torch.manual_seed(1)
            first, repeated = model.generate_until(requests), model.generate_until(requests)
            torch.manual_seed(2)
            other = model.generate_until(requests)
    finally:
        dist.destroy_process_group()
    assert len(set(first)) == 6
    assert first == repeated
    assert not set(first) & set(other)


def remove_bos_and_eos() -> None:
    from torchtrain.datasets.tokenizers import SentencePieceTokenizer

    skip_slow_parts()
    read = SentencePieceTokenizer.__init__

    def read_without_tokens(self: SentencePieceTokenizer, content: bytes) -> None:
        read(self, content)
        self.bos_id = self.eos_id = None

    SentencePieceTokenizer.__init__ = read_without_tokens  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "task", [task if task == "complete" else pytest.param(task, marks=pytest.mark.slow) for task in TASKS]
)
def test_task_without_context_needs_a_bos_or_eos_token(trained_run: Path, tmp_path: Path, task: str) -> None:
    write_tasks(tmp_path)
    (tmp_path / "choices.jsonl").write_text(json.dumps({**CHOICES[0], "context": ""}) + "\n")
    options = ["--model", "torchtrain", "--model_args", f"checkpoint={trained_run}", "--device", "cpu"]
    found = run_command(
        *("torchtrain.evaluate", *options, "--tasks", task, "--include_path", str(tmp_path)),
        environment={"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"},
        hook=remove_bos_and_eos,
    )
    assert found.returncode == 2, found.stderr
    assert "error: the task has texts without a context, and the tokenizer has neither a BOS" in found.stderr
    assert "Traceback" not in found.stderr


def remove_harness() -> None:
    sys.modules["lm_eval.__main__"] = None  # type: ignore[assignment]


def test_missing_harness_is_a_one_line_error() -> None:
    found = run_command("torchtrain.evaluate", "--tasks", "none", hook=remove_harness)
    assert found.returncode == 2
    assert found.stderr.startswith("error: evaluation needs lm-evaluation-harness: pip install 'lm_eval>=")
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--model torchtrain --model_args checkpoint=none --tasks none",
            "Tasks not found: none; `lm-eval ls tasks` lists",
        ),
        ("--model_args checkpoint=nowhere --tasks choice", "nowhere does not exist; give a run's folder"),
        pytest.param(
            "--model hf --model_args checkpoint=none --tasks choice",
            "missing 1 required positional argument: 'pretrained'",
            marks=pytest.mark.slow,
        ),
        ("--model other --model_args checkpoint=none --tasks choice", "load model 'other', but no model for this name"),
        pytest.param("--model_args checkpoint=none", "No tasks specified, or no tasks found", marks=pytest.mark.slow),
        pytest.param(
            "--model_args checkpoint=none --tasks choice --log_samples",
            "Specify --output_path if providing --log_samples",
            marks=pytest.mark.slow,
        ),
        ("--config nowhere.yaml", "Config file not found"),
    ],
)
def test_errors_of_the_harness_exit_with_2(tmp_path: Path, options: str, message: str) -> None:
    """Without --model, torchtrain is the default."""
    write_tasks(tmp_path)
    found = run_command(
        "torchtrain.evaluate",
        *(*options.split(), "--include_path", str(tmp_path)),
        environment={"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"},
        hook=skip_slow_parts,
    )
    assert found.returncode == 2, found.stderr
    assert message in found.stderr.splitlines()[-1]
    assert "Traceback" not in found.stderr


def go_offline() -> None:
    import datasets
    import huggingface_hub

    skip_slow_parts()
    huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True  # otherwise it retries for long


def test_task_data_that_cannot_be_fetched_exit_with_74(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "far.yaml").write_text(TASKS["choice"].replace("choice", "far", 1) + "dataset_path: of/nobody")
    found = run_command(
        *("torchtrain.evaluate", "--model", "torchtrain", "--model_args", f"checkpoint={trained_run}"),
        *("--device", "cpu", "--tasks", "far", "--include_path", str(tmp_path)),
        hook=go_offline,
    )
    assert found.returncode == 74
    assert "error: --tasks: the data of a task cannot be fetched: Couldn't reach 'of/nobody' on the Hub" in found.stderr
    assert "Traceback" not in found.stderr


def test_answer_longer_than_the_training_sequences_is_an_error(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "choices.jsonl").write_text(json.dumps({**CHOICES[0], "choices": [" os", " os" * 100]}) + "\n")
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/choices.jsonl}}}}\ntest_split: test"
    (tmp_path / "choice.yaml").write_text(TASKS["choice"] + source)
    options = ["--model", "torchtrain", "--model_args", f"checkpoint={trained_run}", "--device", "cpu"]
    found = run_command(
        *("torchtrain.evaluate", *options, "--tasks", "choice", "--include_path", str(tmp_path)),
        environment={"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"},
        hook=skip_slow_parts,
    )
    assert found.returncode == 2
    assert "the context of the model has 64: take a task with shorter answers" in found.stderr
    assert "Traceback" not in found.stderr


def test_long_context_is_truncated_from_the_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtrain.plugins.evaluation import evaluate_command as command

    inputs: list[Any] = []

    class EightTokens:
        config = SimpleNamespace(max_seq_len=8)

        def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
            inputs.extend(tokens.tolist())
            return torch.zeros(*tokens.shape, 100)

    model = command.HarnessModel.__new__(command.HarnessModel)
    model.batch_size = 2
    model.trained = TrainedModel(EightTokens(), load_tokenizer(), torch.device("cpu"), bos=True, eos_ids=frozenset({2}))
    model._loglikelihood_tokens([(None, list(range(20)), [50, 51])], disable_tqdm=True)
    assert inputs == [[*range(13, 20), 50]]
    inputs.clear()
    monkeypatch.setattr(command, "generate", lambda _, prompts, *__, **___: inputs.extend(prompts) or iter(()))
    text = " ".join(map(str, range(30)))
    model._complete([text], {"max_gen_toks": 3, "until": []}, 0)
    assert inputs == [model.tok_encode(text)[-5:]]


def test_weights_and_tokenizer_options_are_used(trained_run: Path) -> None:
    from torchtrain.plugins.evaluation.evaluate_command import HarnessModel

    with pytest.raises(TokenizerError, match="nowhere"):
        HarnessModel(checkpoint=str(trained_run), device="cpu", tokenizer_path="nowhere")
    try:
        with pytest.raises(CheckpointError, match="has no averaged weights"):
            HarnessModel(checkpoint=str(trained_run), device="cpu", weights="ema")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("option", [["--output_path", "{}/file/x"], ["-o={}/file/x.json"], ["--output_path={}/file/x"]])
def test_invalid_output_path_is_rejected_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    from torchtrain.plugins.evaluation import evaluate_command as command

    (tmp_path / "file").touch()
    monkeypatch.setattr(command, "cli_evaluate", lambda: pytest.fail("the evaluation started"))
    monkeypatch.setattr(sys, "argv", ["evaluate", "--tasks", "x", *(word.format(tmp_path) for word in option)])
    assert command.main() == 2
    assert "; name another folder" in capsys.readouterr().err


def test_failed_saving_of_results_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.loggers import EvaluationTracker

    from torchtrain.plugins.evaluation import evaluate_command as command

    def evaluate_and_save() -> None:
        EvaluationTracker("/proc/nowhere").save_results_aggregated({"results": {}}, {})

    monkeypatch.setattr(command, "cli_evaluate", evaluate_and_save)
    monkeypatch.setattr(sys, "argv", ["evaluate"])
    assert command.main() == 2
    assert "error: Could not save results aggregated: FileNotFoundError(" in capsys.readouterr().err
