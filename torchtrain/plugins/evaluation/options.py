"""The section [evaluation]."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtrain.config.schema import JobConfig
from torchtrain.config.section import Count, CountOrZero, LocalPath, NotNegative, Section, require
from torchtrain.errors import ConfigError
from torchtrain.optional_packages import install_command

if TYPE_CHECKING:  # imports PyTorch
    import torch

    from torchtrain.datasets.tokenizers import Tokenizer
    from torchtrain.resolve import ResolvedRun


@dataclass(frozen=True)
class EvaluationConfig(Section, name="evaluation"):
    """Samples and scores of tasks at each validation."""

    changes_run = False
    may_differ_between_stages = True

    prompts: tuple[str, ...] = ()
    """Prompts that the model continues at each validation: samples for the log, TensorBoard and report.md. The same
    seed and step give the same texts (docs/watching.md)."""
    prompt_max_new_tokens: Count = 64
    """Maximum number of new tokens for a prompt; each takes a forward."""
    prompt_temperature: NotNegative = 0.8
    """Divides the logits before a token is sampled; 0 always selects the most likely token."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness that are scored at each validation, such as "hellaswag" (pip install -e '.[eval]';
    docs/watching.md)."""
    tasks_path: LocalPath = ""
    """Folder with task definitions (YAML) of your own."""
    tasks_limit: CountOrZero = 0
    """Score only the first documents of each task, up to this number. 0: all of them."""

    def check(self, config: JobConfig) -> None:
        for option, is_set in (("evaluation.prompts", self.prompts), ("evaluation.tasks", self.tasks)):
            require(
                config.validates or not is_set,
                f"{option} needs validations: set data.held_out, or validation.enable = true and its data",
            )

    def next_commands(self, config: JobConfig, path: str) -> Sequence[str]:  # noqa: ARG002
        return [f'python -m torchtrain.generate {path} --prompt "..."']

    def check_run(self, run: "ResolvedRun", device: "torch.device") -> None:  # noqa: ARG002
        self.encode_prompts(run.tokenizer, run.config.training.seq_len)
        if self.tasks and importlib.util.find_spec("lm_eval") is None:
            raise ConfigError(f"evaluation.tasks need lm-evaluation-harness: {install_command('eval')}")

    def encode_prompts(self, tokenizer: "Tokenizer", seq_len: int) -> list[list[int]]:
        """Tokens of ``prompts``, which begin as documents of the training data do.

        Raises:
            ConfigError: a prompt has no tokens, or too many for ``training.seq_len``.
        """
        encoded = [tokenizer.encode_prompt(prompt, tokenizer.added_bos) for prompt in self.prompts]
        for number, tokens in enumerate(encoded):
            name = f"evaluation.prompts[{number}]"
            if not tokens:
                raise ConfigError(
                    f"{name} is empty, and the tokenizer has no token that begins a document; set some text"
                )
            if len(tokens) + self.prompt_max_new_tokens > seq_len:
                raise ConfigError(
                    f"{name} has {len(tokens)} tokens, which with evaluation.prompt_max_new_tokens = "
                    f"{self.prompt_max_new_tokens} new ones must fit into training.seq_len = {seq_len}; shorten the "
                    "prompt, or generate fewer tokens"
                )
        return encoded

    def check_data(self) -> None:
        if self.tasks:
            from torchtrain.plugins.evaluation.task_files import load_tasks  # imports lm-evaluation-harness

            load_tasks(self.tasks, self.tasks_path)
