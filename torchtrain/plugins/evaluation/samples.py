"""Samples of a model under training: texts generated at each validation (``validation.prompts``)."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torchtrain.config.schema import JobConfig
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import ConfigError
from torchtrain.parallelisms.parallel_model import ParallelModel
from torchtrain.plugins.evaluation.generation import Sampling
from torchtrain.plugins.evaluation.training_logits import TrainingLogits


def encode_prompts(config: JobConfig, tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens of ``validation.prompts``, which begin as documents of the training data do.

    Raises:
        ConfigError: a prompt has no tokens, or too many for ``training.seq_len``.
    """
    validation, seq_len = config.validation, config.training.seq_len
    prompts = [tokenizer.encode_prompt(prompt, tokenizer.added_bos) for prompt in validation.prompts]
    for number, tokens in enumerate(prompts):
        name = f"validation.prompts[{number}]"
        if not tokens:
            raise ConfigError(f"{name} is empty, and the tokenizer has no token that begins a document; set some text")
        if len(tokens) + validation.prompt_max_new_tokens > seq_len:
            raise ConfigError(
                f"{name} has {len(tokens)} tokens, which with validation.prompt_max_new_tokens = "
                f"{validation.prompt_max_new_tokens} new ones must fit into training.seq_len = {seq_len}; shorten the "
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
        validation, eos_id = self.config.validation, self.tokenizer.eos_id
        sampling = Sampling(validation.prompt_temperature, seed=self.config.training.seed * 1_000_003 + step)
        generated = self.logits.generate_for_all(
            self.prompts,
            0,
            sampling,
            validation.prompt_max_new_tokens,
            lambda _, token: token == eos_id,
            watched,
        )
        texts = [self.tokenizer.decode([token for token in row if token != eos_id]) for row in generated]
        pairs = zip(validation.prompts, texts, strict=True)
        return {f"{prefix}_samples": [{"prompt": prompt, "text": text} for prompt, text in pairs]}
