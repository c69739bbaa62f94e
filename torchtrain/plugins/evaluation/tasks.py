"""Tasks of EleutherAI's lm-evaluation-harness, scored on the model under training (``evaluation.tasks``)."""

import io
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.distributed.agreement import on_all_ranks
from torchtrain.errors import ConfigError
from torchtrain.logging import logger
from torchtrain.metrics.hooks import Hook, Watched
from torchtrain.parallelisms.parallel_model import ParallelModel
from torchtrain.plugins.evaluation.generation import Sampling
from torchtrain.plugins.evaluation.harness import (
    HarnessBase,
    StoppedTexts,
    infinite_perplexities,
)
from torchtrain.plugins.evaluation.options import EvaluationConfig
from torchtrain.plugins.evaluation.task_files import load_tasks, same_random_numbers
from torchtrain.plugins.evaluation.training_logits import TrainingLogits, right_padded

FEWSHOT_SEED = 1234
CALLS_PER_CHECK = 100  # documents and texts between two checks for a stop, in a few milliseconds


class TrainingHarness(HarnessBase):
    """The model under training as a model of the harness; requests are divided among data-parallel ranks."""

    watched: Watched
    """Context of each part of the work, such as a forward; set for each validation."""

    def __init__(self, config: JobConfig, tokenizer: Tokenizer, model: ParallelModel) -> None:
        super().__init__()
        self.logits = TrainingLogits(model, config)
        self.device_of_model = model.device
        self.tokenizer_of_run = tokenizer
        self.seq_len = config.training.seq_len
        self.batch_size = config.training.local_batch_size * self.logits.data_ranks
        self.watched = nullcontext
        self.host_work = 0

    @property
    def max_length(self) -> int:
        return self.seq_len

    @property
    def text_tokenizer(self) -> Tokenizer:
        return self.tokenizer_of_run

    @property
    def eos_ids(self) -> Collection[int]:
        return ()  # beside the tokenizer's

    @property
    def added_ids(self) -> tuple[list[int], list[int]]:
        return self.tokenizer_of_run.added_bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        self.count_host_work()
        return super().tok_encode(string, add_special_tokens, **options)

    def count_host_work(self) -> None:
        """Called for each document and text, equally often on all ranks: checks now and then for a stop."""
        self.host_work += 1
        if self.host_work % CALLS_PER_CHECK == 0:
            with self.watched():
                pass

    @contextmanager
    def counting_host_work(self, tasks: Any) -> Iterator[None]:
        """A context manager in which building requests and processing results of ``tasks`` can be stopped, too."""

        def counted(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                self.count_host_work()
                return method(*arguments, **options)

            return call

        with ExitStack() as stack:
            for task in tasks:
                for name in ("construct_requests", "process_results"):
                    stack.callback(delattr, task, name)
                    setattr(task, name, counted(getattr(task, name)))
            yield

    def _scores(self, rows: Sequence[Sequence[int]], counts: Sequence[int]) -> list[tuple[float, bool]]:
        own = self.logits.share(len(rows))
        shape = self.logits.batch_shape(len(own), max(max(len(rows[i]) for i in own) - 1, 1))
        tokens = right_padded([rows[i][:-1] for i in own], shape, self.device_of_model)
        scored = [
            (row, position, rows[i][position + 1])
            for row, i in enumerate(own)
            for position in range(len(rows[i]) - 1 - counts[i], len(rows[i]) - 1)
        ]
        scored_tokens = torch.tensor(scored, dtype=torch.int64, device=self.device_of_model)
        at, positions, wanted = scored_tokens.view(-1, 3).unbind(dim=1)  # none, if all answers are empty

        def score(logits: torch.Tensor, part: slice) -> torch.Tensor:
            likelihoods = logits.log_softmax(dim=-1).gather(1, wanted[part, None])[:, 0]
            return torch.stack((likelihoods.double(), (logits.argmax(dim=-1) == wanted[part]).double()), dim=1)

        with self.watched():
            scores = self.logits(tokens, at, positions, score, width=2)
        by_row = torch.split(scores, [counts[i] for i in own])
        # Sums in float32, as ``torchtrain.evaluate`` computes them.
        results = torch.stack([torch.stack((one[:, 0].float().sum().double(), one[:, 1].prod())) for one in by_row])
        return [(likelihood, bool(greedy)) for likelihood, greedy in self.logits.gather(results, len(rows)).tolist()]

    def _generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        max_new_tokens: int,
        first_prompt: int,
        texts: StoppedTexts,
    ) -> None:
        count = len(self.logits.share(len(prompts)))
        own = StoppedTexts(self.text_tokenizer, count, texts.stops, texts.eos_ids)
        generated = self.logits.generate_for_all(prompts, first_prompt, sampling, max_new_tokens, own.add, self.watched)
        for i, row in enumerate(generated):
            for token in row:
                texts.add(i, token)


class RequestCheck(TrainingHarness):
    """Answers all requests without the model: tokenizes them, and raises the errors that a validation would raise."""

    def _scores(self, rows: Sequence[Sequence[int]], counts: Sequence[int]) -> list[tuple[float, bool]]:  # noqa: ARG002
        return [(0.0, False)] * len(rows)

    def _generate(self, *arguments: Any) -> None:
        """Leave all texts empty."""

    def check(self, tasks: Any, limit: int | None) -> None:
        """Raise ConfigError if a request of ``tasks`` cannot be answered."""
        for name, task in tasks.items():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
            task.build_all_requests(limit=limit)
            try:
                for kind, requests in groupby(task.instances, key=attrgetter("request_type")):
                    getattr(self, kind)(list(requests), disable_tqdm=True)
            except ConfigError as error:
                raise ConfigError(f"evaluation.tasks: {name}: {error}") from None


class Tasks(Hook):
    """At each validation, scores the tasks as ``python -m torchtrain.evaluate`` scores a checkpoint of the step."""

    def __init__(self, config: JobConfig, tokenizer: Tokenizer, model: ParallelModel, group: dist.ProcessGroup) -> None:
        """Load the tasks and their data. Collective over ``group``.

        Raises:
            ConfigError: there is no such task, it is unsafe or not of text, its data do not exist, or it has a request
                that the model cannot answer, such as one longer than ``training.seq_len``.
            StorageError: its data cannot be fetched.
        """
        self.config = section_of(config, EvaluationConfig)
        self.harness = TrainingHarness(config, tokenizer, model)
        self.loaded = on_all_ranks(lambda: load_tasks(self.config.tasks, self.config.tasks_path), group)
        limit = self.config.tasks_limit or None
        with same_random_numbers(model.device), redirect_stderr(io.StringIO()):
            check = RequestCheck(config, tokenizer, model)
            on_all_ranks(lambda: check.check(self.loaded["tasks"], limit), group)

    def validate(self, step: int, prefix: str, watched: Watched) -> dict[str, float]:
        """Score after ``step``; returns ``{prefix}_task_{task}_{metric}``."""
        from lm_eval.evaluator import evaluate

        logger.info("scoring %s after step %d", ", ".join(self.config.tasks), step)
        self.harness.watched = watched
        tasks = list(self.loaded["tasks"].values())
        for task in tasks:
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        # Progress bars of the harness go to stderr on all ranks.
        with (
            same_random_numbers(self.harness.device_of_model),
            redirect_stderr(io.StringIO()),
            self.harness.counting_host_work(tasks),
            infinite_perplexities(),
        ):
            found = evaluate(
                lm=self.harness,
                task_dict=self.loaded,
                limit=self.config.tasks_limit or None,
                bootstrap_iters=0,
                log_samples=False,
            )
        return {
            f"{prefix}_task_{task}_{metric_name(key)}": float(value)
            for task, metrics in found["results"].items()
            for key, value in metrics.items()
            if "," in key and "_stderr" not in key and isinstance(value, int | float)
        }


def metric_name(key: str) -> str:
    """``acc`` for the harness's ``acc,none``; with a filter, ``exact_match_strict-match``."""
    metric, _, filtered = key.partition(",")
    return metric if filtered == "none" else f"{metric}_{filtered}"
