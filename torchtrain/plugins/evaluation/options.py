"""The section [evaluation]."""

from dataclasses import dataclass

from torchtrain.config.schema import Count, CountOrZero, JobConfig, LocalPath, NotNegative, Section, require


@dataclass(frozen=True)
class EvaluationConfig(Section, name="evaluation"):
    """Samples and scores of tasks at each validation."""

    changes_run = False
    may_differ_between_parts = True

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
