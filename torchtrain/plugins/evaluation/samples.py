"""Samples of a model under training: texts generated at each validation (``evaluation.prompts``)."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import ConfigError
from torchtrain.parallelisms.parallel_model import ParallelModel
from torchtrain.plugins.evaluation.generation import Sampling
from torchtrain.plugins.evaluation.options import EvaluationConfig
from torchtrain.plugins.evaluation.training_logits import TrainingLogits


def encode_prompts(config: JobConfig, tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens of ``evaluation.prompts``, which begin as documents of the training data do.

    Raises:
        ConfigError: a prompt has no tokens, or too many for ``training.seq_len``.
    """
    options, seq_len = section_of(config, EvaluationConfig), config.training.seq_len
    prompts = [tokenizer.encode_prompt(prompt, tokenizer.added_bos) for prompt in options.prompts]
    for number, tokens in enumerate(prompts):
        name = f"evaluation.prompts[{number}]"
        if not tokens:
            raise ConfigError(f"{name} is empty, and the tokenizer has no token that begins a document; set some text")
        if len(tokens) + options.prompt_max_new_tokens > seq_len:
            raise ConfigError(
                f"{name} has {len(tokens)} tokens, which with evaluation.prompt_max_new_tokens = "
                f"{options.prompt_max_new_tokens} new ones must fit into training.seq_len = {seq_len}; shorten the "
                "prompt, or generate fewer tokens"
            )
    return prompts


class Samples:
    """A part of validation: generates a text for each prompt, and leaves the run as it is.

    The texts depend on the weights, ``training.seed`` and the step. The prompts are divided among the data-parallel
    ranks.
    """

    def __init__(self, config: JobConfig, tokenizer: Tokenizer, model: ParallelModel):
        self.config = config
        self.prompts = encode_prompts(config, tokenizer)
        self.tokenizer = tokenizer
        self.logits = TrainingLogits(model, config)

    def __call__(
        self, step: int, prefix: str, watched: Callable[[], AbstractContextManager[None]]
    ) -> dict[str, list[dict[str, str]]]:
        """Generate after ``step``: ``{prefix}_samples``, a list of prompts and texts. Collective.

        ``watched``: context of each forward.
        """
        options, eos_id = section_of(self.config, EvaluationConfig), self.tokenizer.eos_id
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
