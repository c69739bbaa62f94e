"""Tasks of lm-evaluation-harness in the loop: the scores of ``torchtrain.evaluate`` on the checkpoint."""

import errno
import json
import math
import os
import random
import re
import signal
import time
from collections.abc import Mapping
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_command import checked_command, run_command
from forked_run import different_tensors, read_metrics, saved_tensors
from gloo_pool import GlooPool
from parity import TINY, build, config_of, full_weights
from test_evaluate import CHOICES, TASKS, evaluate, skip_slow_parts, write_tasks
from test_samples import Letters

from torchtrain.config.schema import JobConfig
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.errors import ConfigError, StorageError, TorchtrainError
from torchtrain.models.llama import Transformer
from torchtrain.plugins.evaluation.generation import Sampling
from torchtrain.plugins.evaluation.harness import StoppedTexts, task_data_error
from torchtrain.plugins.evaluation.options import EvaluationConfig
from torchtrain.plugins.evaluation.task_files import load_tasks
from torchtrain.plugins.evaluation.tasks import CALLS_PER_CHECK, RequestCheck, Tasks, TrainingHarness

pytest.importorskip("lm_eval")

OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
# Examples and texts that are drawn, and a metric of several filters. The scores depend on each token.
DRAWN_TASKS = {
    "shots": """
task: shots
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: "{{choices[0]}}"
num_fewshot: 2
fewshot_split: test
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
""",
    "unbroken": """
task: unbroken
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{'qzj' * 200}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
""",
    "drawn": """
task: drawn
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\n\n\n"], max_gen_toks: 12, do_sample: true, temperature: 1.0}
filter_list:
  - {name: whole, filter: [{function: take_first}]}
  - {name: name-only, filter: [{function: regex, regex_pattern: "([a-z]+)"}, {function: take_first}]}
metric_list:
  - {metric: chrf, aggregation: chrf, higher_is_better: true}
""",
}


def train(folder: Path, tmp_path: Path, ranks: int, *options: str) -> list[dict[str, Any]]:
    """Train for four steps; returns the lines of metrics.jsonl."""
    checked_command(
        *("torchtrain.train", "--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder", str(folder)),
        *("--data.path", str(tmp_path / "text.txt"), "--training.steps", "4", "--training.seq_len", "64"),
        *("--training.local_batch_size", "2", "--training.global_batch_size", "4", "--ema.enable"),
        *("--training.mixed_precision_param", "float32", "--model.shape.n_layers", "2", "--metrics.log_freq", "1"),
        *("--model.shape.dim", "64", "--model.shape.n_heads", "4", "--model.shape.ffn_dim", "128"),
        *options,
        ranks=ranks,
        environment=OFFLINE,
        hook=skip_slow_parts,
    )
    return read_metrics(folder)


def prepare(tmp_path: Path) -> list[str]:
    """Write text and tasks; returns the options to score them with trained and averaged weights."""
    write_tasks(tmp_path, TASKS | DRAWN_TASKS)
    (tmp_path / "text.txt").write_text("".join(f"def name{n}(self):\n    return {n * n}\n\n\n" for n in range(300)))
    return [
        *("--validation.enable", "--validation.path", str(tmp_path / "text.txt"), "--validation.steps", "1"),
        *("--validation.interval", "2", "--validation.weights", "both", "--evaluation.tasks_path", str(tmp_path)),
        *("--evaluation.tasks", *TASKS, *DRAWN_TASKS),
    ]


def without_tasks(options: list[str]) -> list[str]:
    return options[: options.index("--evaluation.tasks")]


def scores_of(line: dict[str, Any], prefix: str) -> dict[str, float | None]:
    return {name: value for name, value in line.items() if name.startswith(f"{prefix}_task_")}


def scores_of_evaluate(folder: Path, weights: str, prefix: str, tmp_path: Path, ranks: int = 1) -> dict[str, float]:
    """Scores of ``torchtrain.evaluate`` on the last checkpoint in ``folder``, named as those of a validation."""
    output = tmp_path / f"{folder.name}_{weights}"
    model = f"checkpoint={folder},weights={weights}"
    scores = evaluate("torchtrain", model, tmp_path, output, ranks, names=[*TASKS, *DRAWN_TASKS])["scores"]
    return {
        f"{prefix}_task_{task}_{key.removesuffix(',none').replace(',', '_')}": value
        for task, metrics in scores.items()
        for key, value in metrics.items()
        if "," in key and "_stderr" not in key
    }


def assert_same_scores(found: dict[str, float | None], expected: dict[str, float]) -> None:
    """Likelihoods are sums of rounded numbers, and perplexities their exponentials.

    A perplexity too large for a float is null in metrics.jsonl.
    """

    def logarithms(scores: Mapping[str, float | None]) -> dict[str, float]:
        numbers = {name: math.inf if score is None else score for name, score in scores.items()}
        return {name: math.log(score) if "perplexity" in name else score for name, score in numbers.items()}

    assert logarithms(found) == pytest.approx(logarithms(expected), rel=1e-6)


def test_scores_are_those_of_evaluate(tmp_path: Path) -> None:
    """With the weights and with their averages; the run is not changed by tasks and samples, bit for bit."""
    tasks = prepare(tmp_path)
    write_questions(tmp_path, 5)
    samples = ["--evaluation.prompts", "def main(", "a", "--evaluation.prompt_max_new_tokens", "5"]
    lines = train(tmp_path / "with", tmp_path, 2, *tasks, "empty", *samples)
    without = train(tmp_path / "without", tmp_path, 2, "--report.no-enable")
    assert [line["loss"] for line in lines if "loss" in line] == [line["loss"] for line in without if "loss" in line]
    assert different_tensors(saved_tensors(tmp_path / "with", 4), saved_tensors(tmp_path / "without", 4)) == []
    by_step = {line["step"]: line for line in lines if "validation_loss" in line}
    assert list(by_step) == [2, 4]
    for prefix, weights, ranks in (("validation", "trained", 1), ("validation_ema", "ema", 2)):
        found = scores_of(by_step[4], prefix)
        assert found.pop(f"{prefix}_task_empty_acc") in (0.8, 1.0)  # as in test_answers_may_be_empty
        expected = scores_of_evaluate(tmp_path / "with", weights, prefix, tmp_path, ranks)
        assert_same_scores(found, expected)
        assert found[f"{prefix}_task_unbroken_word_perplexity"] is None
        assert {f"{prefix}_task_choice_acc", f"{prefix}_task_rolling_bits_per_byte"} < found.keys()
        assert found[f"{prefix}_task_drawn_chrf_whole"] != found[f"{prefix}_task_drawn_chrf_name-only"]
    report = (tmp_path / "with" / "report.md").read_text()
    assert f"| tasks | choice acc {by_step[4]['validation_task_choice_acc']:.4g} after step 4 |" in report
    assert by_step[2]["validation_task_rolling_bits_per_byte"] > by_step[4]["validation_task_rolling_bits_per_byte"]


def greedy_tokens(model: Transformer, tokens: list[int], count: int) -> list[int]:
    """The most likely ``count`` tokens after ``tokens``, one by one."""
    for _ in range(count):
        tokens = [*tokens, int(model(torch.tensor([tokens]))[0, -1].argmax())]
    return tokens[-count:]


def requests_and_scores() -> tuple[list[Any], list[tuple[float, bool]]]:
    """Answers of which all tokens are the most likely ones, all but one, or none, with their scores by the model."""
    model = Transformer(TINY)
    model.load_state_dict(full_weights(build(config_of()).model_parts))
    requests, scores = [], []
    for context in ([5, 9, 3], [7], [60, 4, 4, 12, 1]):
        greedy = greedy_tokens(model, context, 4)
        answers = [greedy, greedy[:1], [], [(token + 1) % TINY.vocab_size for token in greedy]]
        answers += [[*greedy[:i], (greedy[i] + 1) % TINY.vocab_size, *greedy[i + 1 :]] for i in range(4)]
        for answer in answers:
            logits = model(torch.tensor([context + answer]))[0, len(context) - 1 : len(context + answer) - 1]
            likelihoods = logits.log_softmax(dim=-1).gather(1, torch.tensor(answer, dtype=torch.int64)[:, None])
            requests.append((None, context, answer))
            scores.append((likelihoods.sum().item(), logits.argmax(dim=-1).tolist() == answer))
    return requests, scores


def scored_in_training(parallelism: dict[str, Any], requests: list[Any]) -> list[tuple[float, bool]]:
    config = config_of(parallelism=parallelism)
    harness = TrainingHarness(config, Letters(), build(config))
    return harness._loglikelihood_tokens(requests, disable_tqdm=True)


def scored_by_the_command(requests: list[Any]) -> list[tuple[float, bool]]:
    from torchtrain.plugins.evaluation.evaluate_command import HarnessModel

    model = Transformer(TINY)
    model.load_state_dict(full_weights(build(config_of()).model_parts))
    harness = HarnessModel.__new__(HarnessModel)
    harness.trained, harness.batch_size = Mock(model=model, device=torch.device("cpu")), 3
    return harness._loglikelihood_tokens(requests, disable_tqdm=True)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_answers_are_greedy_if_all_of_their_tokens_are(gloo: GlooPool, ranks: int) -> None:
    requests, expected = gloo.run(1, requests_and_scores)[0]
    assert [is_greedy for _, is_greedy in expected].count(True) == 9
    results = [*gloo.run(ranks, scored_in_training, {}, requests), *gloo.run(1, scored_by_the_command, requests)]
    for found in results:
        assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
        assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-5)


def numbers_drawn_by_tasks() -> list[float]:
    """Random numbers of Python, NumPy and torch that are drawn when tasks are loaded, and when they are checked."""
    drawn: list[float] = []

    def draw() -> None:
        drawn.extend((random.random(), np.random.rand(), torch.rand(()).item()))

    def load(*_: Any) -> Any:
        draw()
        return {"tasks": {}}

    random.seed(dist.get_rank())
    before = random.getstate()
    config = config_of(validation={"enable": True, "path": "text.jsonl"}, evaluation={"tasks": ("a",)})
    group: Any = dist.group.WORLD
    with (
        patch("lm_eval.tasks.TaskManager", Mock(return_value=Mock(all_tasks=["a"], load=load))),
        patch.object(RequestCheck, "check", lambda *_: draw()),
    ):
        Tasks(config, Letters(), build(config), group)
    assert random.getstate() == before
    return drawn


def test_tasks_draw_the_same_numbers_on_all_ranks_as_the_harness(gloo: GlooPool) -> None:
    """Also when they are loaded, as ``gpqa`` does; the harness's seeds are 0, 1234 and 1234."""
    number = torch.rand((), generator=torch.Generator().manual_seed(1234)).item()
    expected = [random.Random(0).random(), np.random.RandomState(1234).rand(), number]
    assert gloo.run(2, numbers_drawn_by_tasks) == [2 * expected] * 2


def test_text_ends_at_any_stop_sequence_or_eos() -> None:
    texts = StoppedTexts(Letters(), 4, stops=["7 8", "9"], eos_ids={3, 4})
    ended = [[texts.add(i, token) for token in row] for i, row in enumerate([[7, 8], [5, 9], [6, 3], [4]])]
    assert ended == [[False, True], [False, True], [False, True], [True]]
    assert texts.texts == ["7 8", "5 9", "6 3", "4"]


def test_stop_sequence_of_several_bytes_is_found_in_tokens_of_parts_of_a_character() -> None:
    tokenizer = load_tokenizer()
    tokens = tokenizer.encode("ab😀😀cd")
    texts = StoppedTexts(tokenizer, 1, stops=["😀c", "😀😀"], eos_ids=())
    ended = [texts.add(0, token) for token in tokens]
    assert texts.texts == ["ab😀😀cd"]
    first = ended.index(True)
    assert ended[first:] == [True] * (len(tokens) - first)
    assert tokenizer.decode(tokens[: first + 1]).endswith("😀😀")
    assert not tokenizer.decode(tokens[:first]).endswith("😀😀")


def test_generation_ends_when_all_texts_have_ended(gloo: GlooPool) -> None:
    """Two prompts, of which one has a stop sequence after its first token."""
    assert gloo.run(1, lengths_of_texts) == [[1, 5]]


def lengths_of_texts() -> list[int]:
    from torchtrain.plugins.evaluation.evaluate_command import HarnessModel

    model = Transformer(TINY)
    model.load_state_dict(full_weights(build(config_of()).model_parts))
    prompts = [[5, 9, 3], [7]]
    first = greedy_tokens(model, prompts[0], 1)[0]
    assert first not in greedy_tokens(model, prompts[1], 5)
    harness = HarnessModel.__new__(HarnessModel)
    harness.trained = Mock(model=model)
    texts = StoppedTexts(Letters(), 2, stops=[str(first)], eos_ids=())
    harness._generate(prompts, Sampling(), 5, 0, texts)
    return [texts.texts[0].split().index(str(first)) + 1, len(texts.tokens[1])]


TENSOR, CONTEXT, PIPELINE = (f"--parallelism.{name}_parallel_degree=2" for name in ("tensor", "context", "pipeline"))
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "FSDP": (4, ["--training.local_batch_size=1"]),
    "HSDP": (4, ["--training.local_batch_size=1", "--parallelism.data_parallel_replicate_degree=2"]),
    "TP": (2, [TENSOR]),
    "TP without sequence parallelism": (2, [TENSOR, "--parallelism.enable_sequence_parallel=false"]),
    "TP, FSDP": (4, [TENSOR]),
    "CP": (2, [CONTEXT]),
    "CP, FSDP": (4, [CONTEXT]),
    "CP, TP": (4, [CONTEXT, TENSOR]),
    "PP": (2, [PIPELINE]),
    "PP, FSDP": (4, [PIPELINE]),
    "PP, TP": (4, [PIPELINE, TENSOR]),
    "PP, CP": (4, [PIPELINE, CONTEXT]),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_on_layouts_are_those_of_evaluate(tmp_path: Path, layout: str) -> None:
    """With trained and averaged weights."""
    ranks, options = LAYOUTS[layout]
    lines = train(tmp_path / "run", tmp_path, ranks, *prepare(tmp_path), *options)
    (last,) = (line for line in lines if "validation_loss" in line and line["step"] == 4)
    for prefix, weights in (("validation", "trained"), ("validation_ema", "ema")):
        expected = scores_of_evaluate(tmp_path / "run", weights, prefix, tmp_path)
        assert len(expected) == 8
        assert_same_scores(scores_of(last, prefix), expected)


@pytest.mark.slow
def test_scores_of_a_compiled_model_are_those_of_evaluate(tmp_path: Path) -> None:
    """Texts of other lengths than training.seq_len, in another number of rows than a microbatch."""
    options = ["--compile.enable", "--training.local_batch_size", "1"]
    tasks = prepare(tmp_path)
    lines = train(tmp_path / "run", tmp_path, 1, *tasks, *options)
    (last,) = (line for line in lines if "validation_loss" in line and line["step"] == 4)
    for prefix, weights in (("validation", "trained"), ("validation_ema", "ema")):
        expected = scores_of_evaluate(tmp_path / "run", weights, prefix, tmp_path)
        assert len(expected) == 8
        assert_same_scores(scores_of(last, prefix), expected)


def test_unknown_tasks_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tasks(tmp_path)
    found = run_command(
        *("torchtrain.train", "--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder"),
        *(str(tmp_path / "run"), "--validation.enable", "--validation.path", str(tmp_path / "texts.jsonl")),
        *("--evaluation.tasks", "choice", "far", "--evaluation.tasks_path", str(tmp_path)),
        environment=OFFLINE,
        hook=skip_slow_parts,
    )
    assert found.returncode == 2
    assert "error: evaluation.tasks: far are not tasks of lm-evaluation-harness; `lm-eval ls tasks`" in found.stderr
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"need lm-evaluation-harness: pip install 'lm_eval>="):
        EvaluationConfig(tasks=("b",)).check_run(Mock(config=JobConfig()), torch.device("cpu"))


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
            load_tasks([task], str(tmp_path))
        return caught.value

    for task, problem in (("unsafe", "marked as unsafe"), ("pictures", "images or sound"), ("absent", "do not exist")):
        error = error_of(task)
        assert isinstance(error, ConfigError)
        assert problem in str(error)
    monkeypatch.setattr(TaskManager, "load", Mock(side_effect=datasets.exceptions.DatasetNotFoundError("no such data")))
    assert isinstance(error_of("choice"), ConfigError)
    monkeypatch.setattr(TaskManager, "load", Mock(side_effect=ConnectionError("Couldn't reach the Hub")))
    assert isinstance(error_of("choice"), StorageError)
    assert "Start again with a network" in str(error_of("choice"))
    full = OSError(errno.ENOSPC, "No space left on device")
    assert re.search("cannot be stored or read: .*No space left.* Free space", str(task_data_error(full, "--tasks")))


EMPTY_ANSWERS = """task: empty
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: 0
doc_to_choice: choices
metric_list: [{metric: acc}]
"""


def write_questions(folder: Path, count: int) -> None:
    """A task with answers in its first document only."""
    documents = [{"question": f"def f{n}(", "choices": ["", ""] if n else ["x", "y"]} for n in range(count)]
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}}}\n"
    (folder / "empty.yaml").write_text(f"{EMPTY_ANSWERS}{source}test_split: test\n")


@pytest.mark.slow  # test_scores_are_those_of_evaluate has such a task
@pytest.mark.parametrize(("ranks", "count"), [(1, 2), (2, 5)])
def test_answers_may_be_empty(tmp_path: Path, ranks: int, count: int) -> None:
    """All of a batch, so that no token is scored."""
    options = without_tasks(prepare(tmp_path))
    write_questions(tmp_path, count)
    lines = train(tmp_path / "run", tmp_path, ranks, *options, "--evaluation.tasks", "empty")
    scores = [line["validation_task_empty_acc"] for line in lines if "validation_task_empty_acc" in line]
    # Empty ones are equally likely, and the first one counts.
    assert len(scores) == 2
    assert [score for score in scores if round(score * count) not in (count - 1, count)] == []


def test_no_requests_have_no_answers() -> None:
    check = RequestCheck.__new__(RequestCheck)
    check.batch_size, check.seq_len = 2, 8
    assert check._loglikelihood_tokens([], disable_tqdm=True) == []
    assert check.generate_until([], disable_tqdm=True) == []
    assert check.loglikelihood_rolling([], disable_tqdm=True) == []


def signal_while_requests_are_built() -> None:
    from lm_eval.api.task import ConfigurableTask

    skip_slow_parts()
    original, calls = ConfigurableTask.construct_requests, 0

    def construct(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 250 + 20:  # in the first validation, after the check before training
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        assert calls <= 250 + 20 + CALLS_PER_CHECK, "the stop was not seen"
        return original(*arguments, **options)

    ConfigurableTask.construct_requests = construct


def test_stop_is_seen_while_requests_are_built(tmp_path: Path) -> None:
    options = [option for option in without_tasks(prepare(tmp_path)) if option not in ("--validation.weights", "both")]
    write_questions(tmp_path, 250)
    result = run_command(
        *("torchtrain.train", "--job.config_file", "train_configs/debug_model.toml"),
        *("--job.dump_folder", str(tmp_path / "run"), "--data.path", str(tmp_path / "text.txt")),
        *("--training.steps", "4", "--training.seq_len", "64", "--training.local_batch_size", "2"),
        *("--training.global_batch_size", "2", "--model.shape.n_layers", "1", "--model.shape.dim", "64"),
        *("--model.shape.n_heads", "4", "--model.shape.ffn_dim", "128", "--report.no-enable"),
        *(*options, "--evaluation.tasks", "empty"),
        environment=OFFLINE,
        hook=signal_while_requests_are_built,
    )
    assert result.returncode == 75, result.stderr
    assert "validation after step 2 is aborted: the run was asked to stop" in result.stderr


def test_requests_that_cannot_be_answered_are_rejected_before_training(tmp_path: Path) -> None:
    """An answer that is longer than training.seq_len; nothing is trained."""
    write_tasks(tmp_path)
    document = {**CHOICES[0], "choices": ["a", "long " * 80]}
    (tmp_path / "choices.jsonl").write_text(json.dumps(document) + "\n")
    found = run_command(
        *("torchtrain.train", "--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder"),
        *(str(tmp_path / "run"), "--validation.enable", "--validation.path", str(tmp_path / "texts.jsonl")),
        *("--evaluation.tasks", "choice", "--evaluation.tasks_path", str(tmp_path), "--training.seq_len", "64"),
        *("--model.shape.n_layers", "1", "--training.local_batch_size", "1"),
        environment=OFFLINE,
        hook=skip_slow_parts,
    )
    assert found.returncode == 2, found.stderr
    assert re.search(
        "error: evaluation.tasks: choice: the task scores answers of [0-9]+ tokens, .* has 64", found.stderr
    )
    assert "training begins" not in found.stderr
