"""Samples of a model under training: texts generated at each validation (``evaluation.prompts``)."""

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.metrics.hooks import Hook, Watched
from torchtrain.parallelisms.parallel_model import ParallelModel
from torchtrain.plugins.evaluation.generation import Sampling
from torchtrain.plugins.evaluation.options import EvaluationConfig
from torchtrain.plugins.evaluation.training_logits import TrainingLogits


class Samples(Hook):
    """At each validation, generates a text for each prompt, and leaves the run as it is.

    The texts depend on the weights, ``training.seed`` and the step. The prompts are divided among the data-parallel
    ranks.
    """

    def __init__(self, config: JobConfig, tokenizer: Tokenizer, model: ParallelModel):
        self.config = config
        self.options = section_of(config, EvaluationConfig)
        self.prompts = self.options.encode_prompts(tokenizer, config.training.seq_len)
        self.tokenizer = tokenizer
        self.logits = TrainingLogits(model, config)

    def validate(self, step: int, prefix: str, watched: Watched) -> dict[str, list[dict[str, str]]]:
        """Generate after ``step``: ``{prefix}_samples``, a list of prompts and texts."""
        options, eos_id = self.options, self.tokenizer.eos_id
        sampling = Sampling(options.prompt_temperature, seed=self.config.training.seed * 1_000_003 + step)
        generated = self.logits.generate_for_all(
            self.prompts,
            0,
            sampling,
            options.prompt_max_new_tokens,
            lambda _, token: token == eos_id,
            watched,
        )
        texts = [self.tokenizer.decode([token for token in row if token != eos_id]) for row in generated]
        pairs = zip(options.prompts, texts, strict=True)
        return {f"{prefix}_samples": [{"prompt": prompt, "text": text} for prompt, text in pairs]}
