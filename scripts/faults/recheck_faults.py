"""Planted bit flips, and what the plugin recheck finds of them: python scripts/faults/recheck_faults.py

On each layout, one rank of a small model gets a flipped bit in each step, of one kind after the other, and each step is
checked. Afterwards the step is undone, so that the next one begins with intact weights. Prints the table of
docs/recheck.md. ``--clean 1000`` makes checks without flips instead, ``--cost 60`` times steps with and without checks.
"""

import argparse
import logging
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from torchtrain.config.parse import parse
from torchtrain.datasets.dataloader import Batch
from torchtrain.distributed.mesh import local
from torchtrain.logging import logger
from torchtrain.metrics.hooks import Hook
from torchtrain.models.loss import TokenLoss
from torchtrain.plugins.recheck.hashes import read
from torchtrain.plugins.recheck.recheck import Recheck
from torchtrain.plugins.recheck.vote import Verdict
from torchtrain.trainer import Trainer, TrainStep

COMPUTED = ("forward", "backward", "received weights")  # faults that change the gradient of one microbatch
STORED = ("weight", "optimizer state", "weight during the step")
RECEIVED = ("received gradient", "received sum")
KINDS = (*COMPUTED, *STORED, *RECEIVED)
BAD_RANK = 1
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "2 ranks": (2, {}),
    "3 ranks": (3, {}),
    "4 ranks": (4, {}),
    "HSDP 2 x 2": (4, {"data_parallel_replicate_degree": 2}),
    "HSDP 3 x 1": (3, {"data_parallel_replicate_degree": 3}),
    "2 x tensor 2": (4, {"tensor_parallel_degree": 2}),
}


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip a bit of an element of ``tensor``, in place."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().view(-1).view(words)
    width = 8 * tensor.element_size()
    value = 1 << bit % width
    flat[element % len(flat)] ^= value if bit % width < width - 1 else -value  # of the sign, as a signed integer


@dataclass
class Outcome:
    """A step with a planted flip, on one rank."""

    changed: bool
    """Whether two ranks that should have the same gradient have other bytes."""
    named: list[int] = field(default_factory=list)
    suspected: list[int] = field(default_factory=list)


class Planter(Hook):
    """Plants a flip into each step on ``BAD_RANK``, and undoes the step. The first hook of ``train_step``.

    Args:
        kind: one of KINDS.
        repeats: whether each computation of the rank has the same flip, instead of one of the first two.
        bits: the bits that may be flipped, modulo those of an element.
    """

    def __init__(
        self,
        train_step: TrainStep,
        recheck: Recheck,
        kind: str,
        repeats: bool,
        seed: int = 0,
        bits: range = range(64),
    ) -> None:
        self.train_step, self.recheck, self.kind, self.repeats = train_step, recheck, kind, repeats
        self.bits = bits
        self.random = random.Random(seed)
        self.bytes: list[Any] = []  # of the gradients of each computation: hashes of their bytes, by FSDP group
        self.outcomes: list[Outcome] = []
        recheck.report = self.report
        self.is_bad = dist.get_rank() == BAD_RANK
        self.parameters = [p for part in train_step.model.model_parts for p in part.parameters()]
        self.target: Any = self.parameters[len(self.parameters) // 2]  # of faults in memory

    @contextmanager
    def attached(self) -> Iterator[None]:
        """A context manager in which train steps have flips."""
        (model,) = self.train_step.model.model_parts
        block: Any = model.layers["1"]
        module = block.feed_forward.w2
        handles = [
            module.register_forward_pre_hook(self.before_module),
            module.register_forward_hook(self.after_module),
        ]
        see, all_to_all = self.recheck.observer.see, dist.all_to_all_single

        def recorded(group: str, summands: Tensor) -> None:
            if self.recheck.observer.found is not None:
                self.bytes[-1].append(xxhash.xxh3_128_hexdigest(summands.view(torch.uint8).numpy()))
            see(group, summands)

        def received(output: Tensor, *args: Any, **options: Any) -> Any:
            done = all_to_all(output, *args, **options)
            if output.is_floating_point() and self.call == self.own_call:  # a gradient of the rank's own microbatch
                self.strike("received gradient", output)
            return done

        if self.kind == "received sum":
            block.set_all_reduce_hook(lambda total: self.strike("received sum", total))
        self.train_step.hooks.all.insert(0, self)
        with (
            patch.object(self.recheck.observer, "see", recorded),
            patch.object(dist, "all_to_all_single", received),
        ):
            yield
        self.train_step.hooks.all.remove(self)
        for handle in handles:
            handle.remove()
        if self.kind == "received sum":
            block.set_all_reduce_hook(lambda total: None)  # noqa: ARG005

    @property
    def own_call(self) -> int:
        """The number of the last computation of the rank's own checked microbatch; 0 is that of the rank before."""
        return self.first_call + self.recheck.checked

    def states(self) -> list[Tensor]:
        return [local(t) for t in (*self.parameters, *self.train_step.optimizer.state_dict().values())]

    def before_step(self, step: int, batch: Batch) -> None:  # noqa: ARG002
        self.saved = [tensor.detach().clone() for tensor in self.states()]
        reducer = self.train_step.model.reducer.state
        # In the first step of a run, exact sums find their range: it need not be found again.
        self.saved_sums = reducer.state_dict() if reducer is not None and step > 1 else None
        self.element, self.bit = self.random.randrange(1 << 20), self.random.choice(self.bits)
        self.call, self.first_call, self.struck, self.in_own = -1, 1, False, self.random.random() < 0.5
        self.bytes, self.events = [], []
        self.strike("weight", local(self.target))
        states = self.train_step.optimizer.optimizers[0].state_of(self.target)
        self.strike("optimizer state", local(states["exp_avg"]))

    def before_forward_backward(self, batch: Batch) -> None:  # noqa: ARG002
        self.first_call = self.call + 1  # exact sums may have asked to compute the step again

    def before_microbatch(self, index: int) -> None:
        if index == self.recheck.checked:  # after that of the rank before was repeated
            self.strike("weight during the step", local(self.target))

    def before_module(self, module: Any, args: Any) -> None:  # noqa: ARG002
        self.call += 1
        self.bytes.append([])
        if self.kind == "received weights":
            self.strike(self.kind, local(module.weight.data))

    def after_module(self, module: Any, args: Any, output: Tensor) -> None:  # noqa: ARG002
        if self.kind == "forward":
            self.strike(self.kind, local(output.data))
        elif self.kind == "backward":
            call = self.call

            def of_gradient(gradient: Tensor) -> Tensor:
                assert call == self.call
                changed = gradient.clone()
                self.strike(self.kind, local(changed))
                return changed

            output.register_hook(of_gradient)

    def strike(self, kind: str, tensor: Tensor) -> None:
        """Flip a bit of ``tensor``, if it is the turn of it."""
        if kind != self.kind or not self.is_bad or (self.struck and not self.repeats):
            return
        if kind in COMPUTED and not self.repeats and self.call != (self.own_call if self.in_own else 0):
            return
        self.struck = True
        flip(tensor, self.element, self.bit)

    def report(self, step: int, event: str, values: dict[str, Any]) -> None:  # noqa: ARG002
        self.events.append(values)

    def after_gradients(self) -> None:
        gradients = [local(p.grad) for p in self.parameters if p.grad is not None]
        self.gradient = [xxhash.xxh3_128_hexdigest(gradient.view(torch.uint8).numpy()) for gradient in gradients]

    @torch.no_grad()
    def after_step(self, step: int, batch: Batch, loss: TokenLoss, grad_norm: Tensor) -> None:  # noqa: ARG002
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (self.bytes[self.own_call], self.bytes[0], self.gradient))
        ranks, distance = self.recheck.members, 0 if isinstance(self.recheck, Replay) else 1
        changed = True
        if self.kind in COMPUTED:
            changed = any(
                everywhere[own][0] != everywhere[other][1]
                for i, members in enumerate(ranks)
                for own, other in zip(members, ranks[(i + distance) % len(ranks)], strict=True)
            )
        elif self.kind == "received sum":
            of_replicas = [[everywhere[ranks[i][0]][2] for i in group] for group in self.recheck.replicas]
            changed = any(gradient != group[0] for group in of_replicas for gradient in group)
        outcome = Outcome(changed)
        for event in self.events:
            (outcome.named if event["named"] else outcome.suspected).extend(event["ranks"])
        self.outcomes.append(outcome)
        for tensor, saved in zip(self.states(), self.saved, strict=True):
            tensor.copy_(saved)
        if self.saved_sums is not None:
            self.train_step.model.reducer.state.load_state_dict(self.saved_sums)


class Replay(Recheck):
    """For comparison: each rank repeats its own microbatch, and compares the bits with itself."""

    def repeat(self, distance: int) -> dict[str, list[Tensor]]:  # noqa: ARG002
        return super().repeat(0)

    def after_gradients(self) -> None:
        self.checks += 1
        by_rank = self.gather(read(self.own), read(self.repeated))
        wrong = {rank for rank, (own, repeated) in enumerate(by_rank) if own != repeated}
        if wrong:
            self.announce(Verdict(wrong), "a replay")


@dataclass(frozen=True)
class Result:
    """What was found of a kind of fault on a layout. ``members``: the ranks of the data-parallel rank that has it."""

    layout: str
    fault: str
    members: Sequence[int]
    outcomes: Sequence[Outcome]

    @property
    def effective(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.changed]

    @property
    def wrong(self) -> int:
        """Steps in which another rank was named, or anything was found although no bit had changed."""
        own = set(self.members)
        return sum(
            not set(of.named) <= own or bool((of.named or of.suspected) and not of.changed) for of in self.outcomes
        )

    def __str__(self) -> str:
        named = sum(set(outcome.named) == set(self.members) for outcome in self.effective)
        suspected = sum(set(self.members) <= set(outcome.suspected) for outcome in self.effective)
        text = f"{named} of {len(self.effective)}"
        return f"{text}, suspected {suspected}" if suspected else text


def print_results(results: Sequence[Result]) -> None:
    """A table with a row for each fault and a column for each layout, and the number of wrong findings."""
    layouts, faults = (
        list(dict.fromkeys(names)) for names in zip(*((r.layout, r.fault) for r in results), strict=True)
    )
    cells = {(result.fault, result.layout): str(result) for result in results}
    print(table(["", *layouts], [[fault, *(cells.get((fault, of), "") for of in layouts)] for fault in faults]))
    flips = sum(len(result.outcomes) for result in results)
    print(f"\n{flips} flips, {sum(result.wrong for result in results)} of which led to a wrong finding")


def build(folder: Path, parallelism: dict[str, int], **options: Any) -> tuple[Trainer, Recheck]:
    """A trainer of a small model in bfloat16 with exact sums and a check in each step.

    ``options``: more options by name, with two underscores for the dot. By default each rank has one microbatch.
    """
    batch_ranks = int(os.environ["WORLD_SIZE"]) // parallelism.get("tensor_parallel_degree", 1)
    defaults = {
        "job__dump_folder": folder,
        "job__device": "cpu",
        "checkpoint__enable": "false",
        "model__shape__dim": 64,
        "model__shape__n_layers": 2,
        "model__shape__ffn_dim": 128,
        "model__shape__n_heads": 4,
        "model__shape__n_kv_heads": 2,
        "training__steps": 10**6,
        "training__seq_len": 64,
        "training__sums": "exact",
        "recheck__interval": 1,
        "training__local_batch_size": 4,
        "training__global_batch_size": 4 * batch_ranks,
        "diagnostics__straggler_freq": 0,
        "faults__max_bad_steps": 10**6,
        **{f"parallelism__{name}": value for name, value in parallelism.items()},
    }
    arguments = [f"--{name.replace('__', '.')}={value}" for name, value in (defaults | options).items()]
    trainer = Trainer(parse(arguments))
    (recheck,) = (hook for hook in trainer.hooks.all if isinstance(hook, Recheck))
    return trainer, recheck


def plant(folder: Path, layout: str, kinds: Sequence[str], steps: int) -> list[Result]:
    """The results of a layout."""
    parallelism = LAYOUTS[layout][1]
    trainer, recheck = build(folder, parallelism)
    batches = list(islice(trainer.dataloader, steps))  # the same of each kind of fault
    trainer.train_step(1, batches[0])  # in the first step, exact sums find their range

    def outcomes(hook_type: type[Recheck], kind: str, repeats: bool) -> list[Outcome]:
        hook = hook_type(recheck.options, trainer.train_step, trainer.gloo_group, recheck.report)
        trainer.hooks.all[:] = [hook]
        planter = Planter(trainer.train_step, hook, kind, repeats)
        with planter.attached():
            for step, batch in enumerate(batches, start=2):
                trainer.train_step(step, batch)
        return planter.outcomes

    (members,) = (ranks for ranks in recheck.members if BAD_RANK in ranks)
    results = []
    for kind in kinds:
        if kind == "received sum" and "data_parallel_replicate_degree" not in parallelism:
            continue
        if kind == "received gradient" and layout == "HSDP 3 x 1":  # which receives none
            continue
        for repeats in (False, True) if kind in COMPUTED else (False,):
            fault = kind if kind not in COMPUTED else f"{kind}, {'repeats' if repeats else 'one-off'}"
            found = outcomes(Recheck, kind, repeats)
            results.append(Result(layout, fault, members, found))
            if layout == "3 ranks" and kind in COMPUTED:
                replayed = outcomes(Replay, kind, repeats)
                if repeats:  # both computations of the replay are wrong, and the same
                    replayed = [replace(of, changed=flip.changed) for of, flip in zip(replayed, found, strict=True)]
                results.append(Result("3 ranks, replay", fault, members, replayed))
    return results


def clean(folder: Path, layout: str, checks: int) -> list[list[str]]:
    """Checks without flips."""
    trainer, recheck = build(folder, LAYOUTS[layout][1])
    for step, batch in zip(range(1, checks + 1), trainer.dataloader, strict=False):
        trainer.train_step(step, batch)
    return [[layout, str(recheck.checks), str(len(recheck.found_in))]]


def cost(folder: Path, microbatches: int, steps: int) -> list[list[str]]:
    """Median seconds of a step without and with a check, in turn, on two ranks."""
    shape = {"model__shape__dim": 256, "model__shape__n_layers": 4, "model__shape__ffn_dim": 512}
    trainer, recheck = build(folder, {}, **shape, training__global_batch_size=8 * microbatches)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for step, batch in zip(range(1, 2 * steps + 7), trainer.dataloader, strict=False):
        checks = step % 2 == 0
        recheck.skipped_steps = () if checks else (step,)
        dist.barrier()
        start = time.perf_counter()
        trainer.train_step(step, batch)
        if step > 6:
            seconds[checks].append(time.perf_counter() - start)
    without, with_check = (statistics.median(seconds[checks]) for checks in (False, True))
    return [[str(microbatches), f"{without:.3f}", f"{with_check:.3f}", f"{with_check / without:.2f}"]]


def on_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(folder, *args)`` on each of ``ranks`` forked processes; returns the result of rank 0."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}

    def run(rank: int, folder: Path) -> None:
        os.environ.update(common, RANK=str(rank), LOCAL_RANK=str(rank))
        try:
            result = function(folder, *args)
            dist.barrier()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        if rank == 0:
            sender.send(result)
        os._exit(0)

    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=run, args=(rank, Path(folder))) for rank in range(ranks)]
        for process in processes:
            process.start()
        sender.close()
        with suppress(EOFError):
            result = receiver.recv()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a rank failed")
    return result


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, metavar="KIND")
    parser.add_argument("--steps", type=int, default=40, help="flips of each kind on each layout")
    parser.add_argument("--clean", type=int, default=0, help="checks without flips on each layout, instead")
    parser.add_argument("--cost", type=int, default=0, help="steps with and without a check to time, instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    if arguments.cost:
        rows = [row for m in (1, 2, 4) for row in on_ranks(2, cost, m, arguments.cost)]
        print(table(["microbatches", "seconds without", "with a check", "ratio"], rows))
        return
    if arguments.clean:
        rows = [
            row for layout in arguments.layouts for row in on_ranks(LAYOUTS[layout][0], clean, layout, arguments.clean)
        ]
        print(table(["layout", "checks", "false alarms"], rows))
        return
    results = []
    for layout in arguments.layouts:
        results += on_ranks(LAYOUTS[layout][0], plant, layout, arguments.kinds, arguments.steps)
    print_results(results)


if __name__ == "__main__":
    main()
