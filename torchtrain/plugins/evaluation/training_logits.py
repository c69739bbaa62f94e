"""Logits of a model under training at chosen positions, on any layout, from the forward that validation uses."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import Mesh
from torchtrain.models.loss.output_loss import MIN_CHUNK_TOKENS
from torchtrain.parallelisms.context_parallel import local_sequence
from torchtrain.parallelisms.microbatches import Microbatch
from torchtrain.parallelisms.parallel_model import ParallelModel
from torchtrain.plugins.evaluation.generation import Sampling, choose, prompt_generator

NO_TOKEN = -1


@dataclass(frozen=True)
class TrainingLogits:
    """Computes functions of logits. Each data-parallel rank has its own rows; every rank must make the same calls.

    There is no key/value cache: a call computes all positions of its rows, because context and pipeline parallelism and
    compiled blocks only know full sequences.
    """

    model: ParallelModel
    config: JobConfig

    @property
    def vocab_size(self) -> int:
        size: int = self.model.model_parts[0].config.vocab_size
        return size

    def batch_shape(self, rows: int, longest: int) -> tuple[int, int]:
        """Rows and length of a batch that has room for ``rows`` texts of up to ``longest`` tokens, or for some of them.

        The length is divisible among context- and tensor-parallel ranks. Compiled blocks would be compiled again for
        another shape than that of training.
        """
        training, degrees = self.config.training, self.model.mesh.degrees
        if self.config.compile.enable:
            return training.local_batch_size, training.seq_len
        multiple = 2 * degrees.context * degrees.tensor
        return min(rows, training.local_batch_size), min(math.ceil(longest / multiple) * multiple, training.seq_len)

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        function: Callable[[Tensor, slice], Tensor],
        width: int = 1,
    ) -> Tensor:
        """``function`` of the logits at n pairs of a row and a position of ``tokens``.

        Args:
            tokens: int64 (bs, seq) of a ``batch_shape``, on the device; the same on all ranks of a data-parallel rank.
            rows, positions: int64 (n,), on the device.
            function: maps logits of some of the n pairs, float32 (m, vocab), and the slice that selects these pairs,
                to float64 (m, ``width``). Logits are computed in chunks, as those of the loss are.

        Returns:
            The result of ``function``: bitwise the same on all ranks of a data-parallel rank.
        """
        mesh = self.model.mesh
        all_positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        microbatch = Microbatch(tokens, torch.empty_like(tokens), all_positions, documents=None)  # no labels
        if mesh.degrees.context > 1:
            own, positions_of_own = (local_sequence(part, mesh.context) for part in (tokens, all_positions))
            microbatch = Microbatch(own, torch.empty_like(own), positions_of_own, documents=None)

        def head(hidden: Tensor, output: nn.Module) -> Tensor:
            chosen = select(hidden, rows, positions, tokens.shape[1], mesh)
            size = max(MIN_CHUNK_TOKENS, self.model.loss.max_logits_bytes // (4 * self.vocab_size))
            results = []
            for first in range(0, max(1, len(rows)), size):  # also without any, for the collectives of the layer
                part = slice(first, first + size)
                logits = output(chosen[:, part])
                if isinstance(logits, DTensor):
                    logits = logits.full_tensor()
                results.append(function(logits[0].float(), part))
            return torch.cat(results)

        result = self.model.forward_with_head(microbatch, head)
        if result is None:  # a rank without the last pipeline stage
            result = torch.empty(len(rows), width, dtype=torch.float64, device=tokens.device)
        if self.model.pipeline is not None:
            dist.broadcast(result, group=mesh.pipeline.get_group(), group_src=self.model.pipeline.last_rank)
        # Ranks that compute the same must not continue with different tokens because a kernel rounds differently.
        for dimension in (mesh.context, mesh.tensor):
            if dimension.size() > 1:
                dist.broadcast(result, group=dimension.get_group(), group_src=0)
        return result

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        indices: Sequence[int],
        sampling: Sampling,
        max_new_tokens: int,
        add: Callable[[int, int], bool],
        watched: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Generate up to ``max_new_tokens`` tokens for each of this rank's ``prompts``, as many on all ranks.

        Args:
            indices: numbers of the prompts, which seed their random numbers.
            add: called with the number of a prompt in ``prompts`` and its next token; returns whether its text has
                ended.
            watched: context of each forward.
        """
        rows, length = self.batch_shape(len(prompts), max(map(len, prompts)) + max_new_tokens - 1)
        for first in range(0, len(prompts), rows):
            batch = prompts[first : first + rows]
            generators = [prompt_generator(sampling.seed, index) for index in indices[first : first + rows]]
            tokens = right_padded(batch, (rows, length), self.model.device)
            row = torch.arange(len(batch), device=self.model.device)
            last = torch.tensor([len(prompt) - 1 for prompt in batch], device=self.model.device)
            has_ended = [False] * len(batch)
            for number in range(max_new_tokens):
                drawn = torch.tensor([torch.rand((), generator=generator).item() for generator in generators])

                def next_token(logits: Tensor, part: slice, uniform: Tensor = drawn) -> Tensor:
                    return choose(logits, sampling, uniform[part].to(logits.device))[:, None].double()

                with watched():
                    chosen = self(tokens, row, last, next_token)[:, 0].long()
                for i, token in enumerate(chosen.tolist()):
                    has_ended[i] = has_ended[i] or add(first + i, token)
                if not self.any(not all(has_ended)):
                    break
                last = last + 1
                if number + 1 < max_new_tokens:
                    tokens[row, last] = chosen

    def generate_for_all(
        self,
        prompts: Sequence[Sequence[int]],
        first_prompt: int,
        sampling: Sampling,
        max_new_tokens: int,
        has_ended: Callable[[int, int], bool],
        watched: Callable[[], AbstractContextManager[None]],
    ) -> list[list[int]]:
        """Generate for ``prompts``, the same on all ranks, which the data-parallel ranks divide among them. Collective.

        Args:
            first_prompt: number of the first prompt; numbers seed the random numbers of prompts.
            has_ended: called with the number of a prompt in this rank's ``share`` and its next token; returns whether
                its text has ended.

        Returns:
            The new tokens of each prompt, with the one that ended its text.
        """
        own = self.share(len(prompts))
        made: list[list[int]] = [[] for _ in own]

        def add(row: int, token: int) -> bool:
            made[row].append(token)
            return has_ended(row, token)

        numbers = [first_prompt + i for i in own]
        self.generate([prompts[i] for i in own], numbers, sampling, max_new_tokens, add, watched)
        padded = [row + [NO_TOKEN] * (max_new_tokens - len(row)) for row in made]
        gathered = self.gather(torch.tensor(padded, device=self.model.device), len(prompts)).tolist()
        return [[token for token in row if token != NO_TOKEN] for row in gathered]

    @property
    def data_rank(self) -> int:
        """The number of this data-parallel rank."""
        return self.model.mesh.batch.get_local_rank()

    @property
    def data_ranks(self) -> int:
        """The number of data-parallel ranks."""
        return self.model.mesh.batch.size()

    def share(self, count: int) -> list[int]:
        """This rank's share of ``count`` items: every n-th index. Ranks with fewer repeat the first index."""
        return [i if i < count else 0 for i in range(self.data_rank, self._rounded(count), self.data_ranks)]

    def gather(self, own: Tensor, count: int) -> Tensor:
        """The results of ``count`` items in order; ``own``: those of this rank's ``share``, in the first dimension."""
        parts = [torch.empty_like(own) for _ in range(self.data_ranks)]
        dist.all_gather(parts, own, group=self.model.mesh.batch.get_group())
        return torch.stack(parts, dim=1).flatten(0, 1)[:count]

    def _rounded(self, count: int) -> int:
        return -(-count // self.data_ranks) * self.data_ranks

    def any(self, holds: bool) -> bool:
        """Whether ``holds`` on any data-parallel rank."""
        found = torch.tensor(int(holds), device=self.model.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.model.mesh.batch.get_group())
        return bool(found)


def select(hidden: Tensor, rows: Tensor, positions: Tensor, seq: int, mesh: Mesh) -> Tensor:
    """The hidden states (1, n, dim) at ``rows`` and ``positions`` of sequences of ``seq`` tokens, on all ranks.

    ``hidden``: (bs, seq, dim), or this rank's part of it under sequence and context parallelism.
    """
    is_sharded = isinstance(hidden, DTensor)
    if isinstance(hidden, DTensor):
        hidden = hidden.redistribute(placements=[Replicate()]).to_local()
    if mesh.degrees.context > 1:
        # Each position is on one rank; the others add zeros.
        own = local_sequence(torch.arange(seq, device=hidden.device)[None], mesh.context)[0]
        place = torch.full((seq,), -1, device=hidden.device)
        place[own] = torch.arange(len(own), device=hidden.device)
        positions = place[positions]
        chosen = torch.where(positions[:, None] >= 0, hidden[rows, positions], 0)
        dist.all_reduce(chosen, group=mesh.context.get_group())
    else:
        chosen = hidden[rows, positions]
    chosen = chosen[None]
    return DTensor.from_local(chosen, mesh.tensor, [Replicate()], run_check=False) if is_sharded else chosen


def right_padded(rows: Sequence[Sequence[int]], shape: tuple[int, int], device: torch.device) -> Tensor:
    """``rows`` as a tensor of ``shape`` (bs, seq). No token attends to the padding on the right, which is token 0."""
    tokens = torch.zeros(shape, dtype=torch.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
    return tokens.to(device)
