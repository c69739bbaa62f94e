"""A model of EleutherAI's lm-evaluation-harness: how its requests are tokenized, batched and answered.

``evaluate.py`` answers them with a checkpoint, ``plugins/evaluation/tasks.py`` with the model under training.
"""

import errno
import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from lm_eval.api import metrics
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from torchtrain.cli import is_first_rank
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import ConfigError, StorageError, TorchtrainError
from torchtrain.metrics.validation import perplexity_of
from torchtrain.plugins.evaluation.generation import Sampling


class HarnessBase(TemplateLM):  # type: ignore[misc]
    """Requests of the harness as batches of tokens. Texts are tokenized as by the Hugging Face model of an export.

    Every rank processes all requests, so each is rank 0 of 1 to the harness.
    """

    batch_size: int
    """Number of requests in a batch."""

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Number of tokens that the model can read."""

    @property
    @abstractmethod
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""

    @property
    @abstractmethod
    def eos_ids(self) -> Collection[int]:
        """Tokens that end a text."""

    @property
    @abstractmethod
    def added_ids(self) -> tuple[list[int], list[int]]:
        """Ids before and after a text that begins as those that the model was trained on."""

    @abstractmethod
    def _scores(self, rows: Sequence[Sequence[int]], counts: Sequence[int]) -> list[tuple[float, bool]]:
        """For each row, the log-likelihood of its last ``counts[i]`` tokens, and whether each is the likeliest one."""

    @abstractmethod
    def _generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        max_new_tokens: int,
        first_prompt: int,
        texts: "StoppedTexts",
    ) -> None:
        """Add up to ``max_new_tokens`` tokens of each prompt to ``texts``; ``first_prompt``: its number."""

    @property
    def eot_token_id(self) -> int | None:
        return self.text_tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """First token of a text without context: bos, or eos if there is none."""
        for token in (self.text_tokenizer.bos_id, self.eot_token_id):
            if token is not None:
                return token
        raise ConfigError(
            "the task has texts without a context, and the tokenizer has neither a BOS nor an EOS token to begin them "
            "with: take a task with contexts, or another tokenizer (tokenizer_path)"
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """As the harness's own model: a text may spell special tokens; one that begins with BOS gets no second one."""
        if add_special_tokens is None:
            return self.text_tokenizer.encode_prompt(string, self.added_ids)
        before, after = self.added_ids if add_special_tokens else ([], [])
        return [*before, *self.text_tokenizer.ids_with_special(string), *after]

    def _batches(self, requests: Collator, disable: bool) -> Iterable[Any]:
        total = -(-len(requests) // self.batch_size)
        # None shows a progress bar only on a terminal; in a file it would be one long line.
        quiet = disable or not is_first_rank() or None
        return tqdm(requests.get_batched(n=self.batch_size), total=total, disable=quiet)  # type: ignore[no-any-return]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        if (longest := max((len(continuation) for _, _, continuation in requests), default=0)) > self.max_length:
            raise ConfigError(
                f"the task scores answers of {longest} tokens, and the context of the model has "
                f"{self.max_length}: take a task with shorter answers, or train with a longer training.seq_len"
            )
        # Longest first, so that a lack of memory is found immediately, and the rows of a batch have similar lengths.
        collator = Collator(requests, sort_fn=lambda request: -len(request[1]) - len(request[2]))
        results: list[tuple[float, bool]] = []
        for batch in self._batches(collator, disable_tqdm):
            rows = [(context + wanted)[-self.max_length - 1 :] for _, context, wanted in batch]
            found = self._scores(rows, [len(continuation) for _, _, continuation in batch])
            for (texts, _, _), result in zip(batch, found, strict=True):
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, result)
            results += found
        return collator.get_original(results)  # type: ignore[no-any-return]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows_of = []
        for request in requests:
            tokens, begin = self.tok_encode(request.args[0]), self.prefix_token_id
            windows = get_rolling_token_windows(tokens, begin, max_seq_len=self.max_length, context_len=1)
            windows_of.append([(None, *make_disjoint_window(window)) for window in windows])
        results = iter(self._loglikelihood_tokens([*chain(*windows_of)], disable_tqdm=disable_tqdm))
        return [sum(next(results)[0] for _ in windows) for windows in windows_of]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        collator = Collator(
            [request.args for request in requests],
            sort_fn=lambda arguments: (-len(self.tok_encode(arguments[0])), arguments[0]),
            group_by="gen_kwargs",
            group_fn=lambda arguments: arguments[1],
        )
        texts: list[str] = []
        for batch in self._batches(collator, disable_tqdm):
            options = normalize_gen_kwargs(batch[0][1])
            found = self._complete([context for context, _ in batch], options, len(texts))
            for (context, arguments), text in zip(batch, found, strict=True):
                self.cache_hook.add_partial("generate_until", (context, arguments), text)
            texts += found
        return collator.get_original(texts)  # type: ignore[no-any-return]

    def _complete(self, contexts: list[str], options: dict[str, Any], first_prompt: int) -> list[str]:
        tokenizer = self.text_tokenizer
        stops = handle_stop_sequences(options.get("until"), eos=None)
        max_new_tokens = min(options["max_gen_toks"], self.max_length - 1)
        encoded = (self.tok_encode(context) or [self.prefix_token_id] for context in contexts)
        prompts = [tokens[-(self.max_length - max_new_tokens) :] for tokens in encoded]
        sampling = Sampling(
            options.get("temperature", 0.0),
            max(options.get("top_k") or 0, 0),  # some tasks say -1 or null for all
            options.get("top_p") or 1.0,
            torch.initial_seed(),  # the harness's --seed
        )
        eos_ids = set(self.eos_ids)
        if tokenizer.eos_id is not None:  # the harness adds it to those of the model
            eos_ids.add(tokenizer.eos_id)
        # A task may request several answers to one context: their indices seed different random numbers in any batch.
        texts = StoppedTexts(tokenizer, len(prompts), stops, eos_ids)
        self._generate(prompts, sampling, max_new_tokens, first_prompt, texts)
        return [postprocess_generated_text(text, stops, None) for text in texts.texts]


class StoppedTexts:
    """The texts that are generated for several prompts, each up to an EOS token or a stop sequence."""

    def __init__(self, tokenizer: Tokenizer, count: int, stops: Sequence[str], eos_ids: Collection[int]) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.eos_ids = eos_ids
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.texts = [""] * count

    def add(self, index: int, token: int) -> bool:
        """Add a token to the text number ``index``; returns whether that text has ended."""
        if token not in self.tokenizer.special_ids:
            self.tokens[index].append(token)
            self.texts[index] = self.tokenizer.decode(self.tokens[index])
        return token in self.eos_ids or any(stop in self.texts[index] for stop in self.stops)


def task_data_error(error: OSError, option: str) -> TorchtrainError:
    """The error for a user about the data of a task of ``option`` that cannot be opened."""
    if isinstance(error, FileNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return ConfigError(f"{option}: the data of a task do not exist: {error}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
        return StorageError(
            f"{option}: the data of a task cannot be stored or read: {error}. Free space, correct the permissions, "
            "or name another folder by HF_HOME"
        )
    return StorageError(
        f"{option}: the data of a task cannot be fetched: {error}. Start again with a network, or fetch them on a "
        "machine that has one into a folder that HF_HOME names on both"
    )


@contextmanager
def infinite_perplexities() -> Iterator[None]:
    """A context manager in which a perplexity that the harness computes is infinite where it is too large for a float.

    Its functions would raise OverflowError, and no score of any task would be left. They call ``exp`` of the module
    ``math`` alone, and the harness knows them by their identity, so they cannot be replaced themselves.
    """
    before = metrics.math
    metrics.math = SimpleNamespace(**{**vars(math), "exp": perplexity_of})
    try:
        yield
    finally:
        metrics.math = before
