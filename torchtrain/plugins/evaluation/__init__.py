"""Plugin: evaluate and generate, from checkpoints (docs/using.md) and during training (docs/watching.md)."""

from torchtrain.config.registry import CONFIG_SECTIONS, VALIDATION_PARTS

REQUIRES = ("torchtrain.plugins.huggingface",)  # special tokens of its folders

CONFIG_SECTIONS.add("evaluation", "torchtrain.plugins.evaluation.options:EvaluationConfig")
VALIDATION_PARTS.add("samples", "torchtrain.plugins.evaluation.validation_parts:SamplesFactory")
VALIDATION_PARTS.add("tasks", "torchtrain.plugins.evaluation.validation_parts:TasksFactory")
