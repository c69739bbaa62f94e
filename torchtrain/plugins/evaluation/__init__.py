"""Plugin: evaluate and generate, from checkpoints (docs/using.md) and during training (docs/watching.md)."""

from typing import TYPE_CHECKING

from torchtrain.config.registry import CONFIG_SECTIONS, HOOKS

if TYPE_CHECKING:  # imports PyTorch
    from torchtrain.metrics.hooks import Hook
    from torchtrain.trainer import Trainer

REQUIRES = ("torchtrain.plugins.huggingface",)  # special tokens of its folders

CONFIG_SECTIONS.add("evaluation", "torchtrain.plugins.evaluation.options:EvaluationConfig")


@HOOKS.register("samples")
def samples_hook(trainer: "Trainer") -> "Hook | None":
    """Texts that the model generates for ``evaluation.prompts``, at each validation."""
    from torchtrain.config.schema import section_of
    from torchtrain.plugins.evaluation.options import EvaluationConfig

    if not section_of(trainer.config, EvaluationConfig).prompts:
        return None
    from torchtrain.plugins.evaluation.samples import Samples

    return Samples(trainer.config, trainer.tokenizer, trainer.model)


@HOOKS.register("tasks")
def tasks_hook(trainer: "Trainer") -> "Hook | None":
    """Scores of ``evaluation.tasks``, of lm-evaluation-harness, at each validation."""
    from torchtrain.config.schema import section_of
    from torchtrain.plugins.evaluation.options import EvaluationConfig

    if not section_of(trainer.config, EvaluationConfig).tasks:
        return None
    from torchtrain.plugins.evaluation.tasks import Tasks  # imports lm-evaluation-harness

    return Tasks(trainer.config, trainer.tokenizer, trainer.model, trainer.gloo_group)
