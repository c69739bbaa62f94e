"""Samples of a model under training: texts generated at each validation (``validation.prompts``)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torchtrain.config.schema import JobConfig
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import ConfigError
from torchtrain.inference.generation import Sampling, choose, prompt_generator
from torchtrain.inference.training_logits import TrainingLogits, right_padded
from torchtrain.parallelisms.parallel_model import ParallelModel

ENDED = -1


def encode_prompts(config: JobConfig, tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens of ``validation.prompts``, which begin as documents of the training data do.

    Raises:
        ConfigError: a prompt has no tokens, or too many for ``training.seq_len``.
    """
    validation, seq_len = config.validation, config.training.seq_len
    prompts = [tokenizer.encode(prompt, bos=True) for prompt in validation.prompts]
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
        self.prompts = prompts = encode_prompts(config, tokenizer)
        self.tokenizer = tokenizer
        self.logits = TrainingLogits(model, config)
        self.device = model.device
        batch = model.mesh.batch
        self.per_rank = -(-len(prompts) // batch.size())
        first = batch.get_local_rank() * self.per_rank
        # Indices of this rank's prompts. Every rank has as many rows; those without a prompt repeat the first one.
        self.own = [i if i < len(prompts) else 0 for i in range(first, first + self.per_rank)]

    def __call__(
        self, step: int, prefix: str, watched: Callable[[], AbstractContextManager[None]]
    ) -> dict[str, list[dict[str, str]]]:
        """Generate after ``step``: ``{prefix}_samples``, a list of prompts and texts. Collective.

        ``watched``: context of each forward.
        """
        longest = max(map(len, self.prompts)) + self.config.validation.prompt_max_new_tokens - 1
        shape = self.logits.batch_shape(self.per_rank, longest)
        batches = [self.own[first : first + shape[0]] for first in range(0, len(self.own), shape[0])]
        generated = torch.cat([self._generate(batch, step, shape, watched) for batch in batches])
        texts = [
            self.tokenizer.decode([token for token in row if token != ENDED])
            for row in self.logits.gather(generated).tolist()
        ]
        pairs = zip(self.config.validation.prompts, texts, strict=False)  # without the repeated rows
        return {f"{prefix}_samples": [{"prompt": prompt, "text": text} for prompt, text in pairs]}

    def _generate(self, indices: Sequence[int], step: int, shape: tuple[int, int], watched: Any) -> Tensor:
        """New tokens of the prompts with these indices, int64 (len(indices), prompt_max_new_tokens), then ``ENDED``."""
        validation = self.config.validation
        sampling = Sampling(validation.prompt_temperature, seed=self.config.training.seed * 1_000_003 + step)
        generators = [prompt_generator(sampling.seed, index) for index in indices]
        tokens = right_padded([self.prompts[index] for index in indices], shape, self.device)
        rows = torch.arange(len(indices), device=self.device)
        last = torch.tensor([len(self.prompts[index]) - 1 for index in indices], device=self.device)
        made = torch.full((len(indices), validation.prompt_max_new_tokens), ENDED)
        has_ended = torch.zeros(len(indices), dtype=torch.bool)
        for number in range(validation.prompt_max_new_tokens):
            uniform = torch.tensor([torch.rand((), generator=generator).item() for generator in generators])

            def next_token(logits: Tensor, uniform: Tensor = uniform) -> Tensor:
                return choose(logits, sampling, uniform.to(logits.device)).double()

            with watched():
                chosen = self.logits(tokens, rows, last, next_token).long()
            has_ended |= chosen.cpu() == (ENDED if self.tokenizer.eos_id is None else self.tokenizer.eos_id)
            made[:, number] = torch.where(has_ended, ENDED, chosen.cpu())
            if not self.logits.any(not bool(has_ended.all())):
                break
            last = last + 1
            if number + 1 < validation.prompt_max_new_tokens:
                tokens[rows, last] = chosen
        return made.to(self.device)
