"""Metrics of a run: a log line, TensorBoard, ``metrics.jsonl`` and other writers.

``loss`` is the mean over the unmasked tokens of the global batch, in nats; ``loss_max`` is the largest mean of a rank.
``z_loss`` is the mean of the z-loss times its weight; ``loss`` does not include it. ``tokens_per_second`` is per
device. ``mfu`` is the model FLOPs utilization of PaLM (https://arxiv.org/abs/2204.02311, appendix B): tokens per second
and device, times ``flops_per_token``, divided by the device's peak; null if the peak is unknown. ``memory_gib`` and
``data_wait_fraction`` are maxima over all ranks.
"""

import json
import math
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from torchtrain.config.tokens import format_tokens
from torchtrain.datasets.dataloader import Batch, DataLoader
from torchtrain.errors import TorchtrainError
from torchtrain.logging import BestEffort, aligned, log_in_color, logger, message_width, terminal_width
from torchtrain.metrics.history import read_run
from torchtrain.metrics.hooks import Hooks
from torchtrain.metrics.options import MetricsConfig
from torchtrain.metrics.validation_log import format_validation
from torchtrain.metrics.writers import Writers, changes_steps
from torchtrain.models.loss import TokenLoss

GIB = 2**30
FULL_WIDTH = 90  # of a message of the log; in narrower ones, the words of a step are shorter


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory, by name in ``metrics.jsonl``: on CPU the peak resident set of the process, in GiB.

    On a GPU, peaks of the CUDA allocator since the last call: what tensors took, what it reserved, and the share of the
    device that this is; and how often it has freed its cache so far because an allocation failed. Memory of the CUDA
    context, NCCL and libraries is not included.
    """
    if device.type != "cuda":
        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
        return {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "memory_gib": allocated / GIB,
        "memory_reserved_gib": reserved / GIB,
        "memory_fraction": reserved / torch.cuda.get_device_properties(device).total_memory,
        "memory_alloc_retries": float(retries),
    }


def device_info(device: torch.device) -> dict[str, str | int]:
    """What rounding depends on, for the first line of ``metrics.jsonl``: the device, and the version of PyTorch.

    ``threads`` of a rank are given on CPUs, whose kernels may sum in another order with another number of them.
    """
    if device.type == "cuda":
        return {"device": device.type, "device_name": torch.cuda.get_device_name(device), "torch": torch.__version__}
    name = platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return {"device": device.type, "device_name": name, "threads": threads, "torch": torch.__version__}


def code_hash() -> str:
    """A hash of torchtrain's code."""
    package = Path(__file__).parent.parent
    return xxhash.xxh3_64(b"".join(file.read_bytes() for file in sorted(package.rglob("*.py")))).hexdigest()


@dataclass(eq=False)
class MetricsRecorder(AbstractContextManager["MetricsRecorder"]):
    """Collects metrics on each rank, reduces them over all ranks every ``log_freq`` steps, and writes on rank 0."""

    config: MetricsConfig
    folder: Path
    _: KW_ONLY
    device: torch.device
    loss_group: dist.ProcessGroup
    tokens_per_step: int  # tokens of the global batch
    tokens_after: Callable[[int], int]  # the number of tokens of the run up to a step
    stage: str = ""  # of the run (``config/run_plan.py``), its name; empty if there is only one
    flops_per_token: int
    peak_flops: float | None  # of one device; None if unknown
    start_step: int
    last_step: int
    config_toml: str
    run: str  # id of the run
    description: Mapping[str, Any] = field(default_factory=dict)  # for the event "start"
    generation: int = 0  # of the writer lease; increases with each start
    options: str = ""  # hash of the options that change the run
    data: Mapping[str, str] = field(default_factory=dict)  # identity of data and tokenizer; empty without checkpoints
    hooks: Hooks = field(default_factory=Hooks)
    same_process: bool = False  # whether this process has trained an earlier stage; for the event "start"

    def __post_init__(self) -> None:
        self.stage_entry = {"stage": self.stage} if self.stage else {}
        self.validations: list[dict[str, Any]] | None = None  # steps and results so far; read at the first validation
        self.columns: dict[int, int] = {}  # widths in the lines of the log (``step_words``)
        self.unwritten: tuple[int, TokenLoss, Tensor, float] | None  # arguments of ``record``, if it wrote no line
        self.restart(self.start_step)
        self.writers: Writers | None = None

    def __enter__(self) -> "MetricsRecorder":
        """Open the writers, and start measuring."""
        self.restart(self.start_step)
        if dist.get_rank() == 0:
            undone = changes_steps(self.folder / "metrics.jsonl", self.start_step, self.options, self.stage)
            self.writers = Writers(self.config, self.folder, self.config_toml, self.start_step, self.run, undone)
            with BestEffort("the first line of metrics.jsonl"):
                started = {
                    "run": self.run,
                    "generation": self.generation,
                    "options": self.options,
                    "data": dict(self.data),
                    **self.stage_entry,
                    **({"same_process": True} if self.same_process else {}),
                    "ranks": dist.get_world_size(),
                    **device_info(self.device),
                    "code": code_hash(),
                    **self.description,
                }
                self.record_event(self.start_step, "start", started)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.writers is not None:
            self.writers.close()

    def time_waiting(self, loader: DataLoader) -> Iterator[Batch]:
        """Iterate over ``loader``, and record how long it waits for each batch."""
        for batch in loader:
            self.data_wait_seconds += loader.wait_seconds
            yield batch

    def record(self, step: int, loss: TokenLoss, grad_norm: Tensor, lr: float) -> None:
        """Write metrics after the first step of a process, every ``log_freq`` steps, and after the last step.

        Collective in these steps.
        """
        self.unwritten = step, loss, grad_norm, lr
        if step % self.config.log_freq == 0 or step in (self.start_step + 1, self.last_step):
            self.record_last()

    def record_last(self) -> None:
        """Write metrics of the step recorded last, unless they are written, or a rollback has undone it. Collective."""
        if self.unwritten is None:
            return
        step, loss, grad_norm, lr = self.unwritten
        z_loss = torch.zeros_like(loss.total) if loss.z is None else loss.z
        sums = torch.stack((loss.total.double(), loss.tokens.double(), z_loss.double()))
        dist.all_reduce(sums, group=self.loss_group)
        total, tokens, z_total = sums.tolist()
        tokens = tokens or math.nan  # all are of documents that are left out: the step is bad
        elapsed = time.perf_counter() - self.since  # tolist() has synchronized with the device
        own_loss = (loss.total / loss.tokens).item() if loss.tokens else 0.0
        memory = peak_memory(self.device)
        own = (own_loss, self.data_wait_seconds / elapsed, *memory.values())
        maxima = torch.tensor(own, dtype=torch.float64, device=self.device)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        loss_max, data_wait_fraction, *memory_maxima = maxima.tolist()
        step_seconds = elapsed / (step - self.since_step)
        tokens_per_second = self.tokens_per_step / dist.get_world_size() / step_seconds
        mfu = None if self.peak_flops is None else tokens_per_second * self.flops_per_token / self.peak_flops
        line = {
            "step": step,
            "tokens": self.tokens_after(step),
            **self.stage_entry,
            "loss": total / tokens,
            "loss_max": loss_max,
            **({} if loss.z is None else {"z_loss": z_total / tokens}),
            "grad_norm": grad_norm.item(),
            "lr": lr,
            "tokens_per_second": tokens_per_second,
            "mfu": mfu,
            **dict(zip(memory, memory_maxima, strict=True)),
            "data_wait_fraction": data_wait_fraction,
            "step_seconds": step_seconds,
        }
        self.hooks.add_metrics(line)
        if self.writers is not None:
            self.writers.write(line)
            # The first step of a process compiles, connects ranks and fills caches.
            left = self.last_step - step if step > self.start_step + 1 else 0
            shown = self.hooks.shown_metrics
            log_in_color(step_words(line, self.last_step, left, message_width(), self.columns, shown))
        self.restart(step)

    def record_event(self, step: int, event: str, values: dict[str, Any]) -> None:
        """Write an event: a line with ``step``, ``event``, the time and ``values``."""
        if self.writers is not None:
            self.writers.write({"step": step, "event": event, "time": time.time(), **values})

    def record_values(self, step: int, values: dict[str, float]) -> None:
        """Write more numbers of ``step``, in a line of their own that does not appear in the log."""
        if self.writers is not None:
            self.writers.write({"step": step, "tokens": self.tokens_after(step), **self.stage_entry, **values})

    def record_validation(self, step: int, results: dict[str, Any]) -> None:
        """Write validation results, whose names begin with ``validation_``: numbers, and samples (``Samples``)."""
        if self.writers is None:
            return
        self.writers.write({"step": step, "tokens": self.tokens_after(step), **self.stage_entry, **results})
        if self.validations is None:
            self.validations = []
            with suppress(TorchtrainError):  # the file could not be written
                self.validations = read_run(self.folder, lambda _: None).lines
        # Those of later steps were undone by a rollback, and other stages of the run may have other data.
        earlier = [
            line
            for line in self.validations
            if line["step"] < step and line.get("stage", "") == self.stage and not results.keys().isdisjoint(line)
        ]
        self.validations = [*earlier, {"step": step, **self.stage_entry, **results}]
        rows = format_validation(results, earlier)
        text = f"\n{aligned(rows, terminal_width())}" if len(rows) > 1 else f" {rows[0][1]}"
        logger.info("validation after step %d:%s", step, text)
        for name, value in results.items():
            if isinstance(value, list):
                quoted = [[json.dumps(text, ensure_ascii=False) for text in sample.values()] for sample in value]
                samples = [(prompt, text) for prompt, text in quoted]
                what = name.removeprefix("validation_").replace("_", " ")
                logger.info("%s after step %d:\n%s", what, step, aligned(samples, terminal_width()))

    def undo(self, step: int) -> None:
        """Continue from ``step`` after a rollback: later steps do not count any more."""
        if self.writers is not None:
            self.writers.undo(step)
        self.hooks.undo(step)
        self.restart(step)

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Context manager that excludes its duration from the time of training steps."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    def restart(self, step: int) -> None:
        """Start a new measurement interval after ``step``: at the start, after each written line, and by ``undo``."""
        self.since, self.since_step, self.data_wait_seconds = time.perf_counter(), step, 0.0
        self.unwritten = None
        self.hooks.begin_interval()


def step_words(
    line: dict[str, Any],
    last_step: int,
    steps_left: int,
    width: int | None,
    columns: dict[int, int],
    shown: Mapping[str, str] = MappingProxyType({}),
) -> list[tuple[str, str]]:
    """Metrics as the words of a line of the log, two spaces apart, each with the number of its color.

    If they exceed ``width``, the least important ones are left out; ``metrics.jsonl`` has all of them.

    Args:
        steps_left: those whose time is shown; 0 for none.
        columns: widths of the numbers in earlier lines, which grow, so that the words stay below each other.
        shown: metrics of hooks, by name, with the format of their word; see ``Hook.shown_metrics``.
    """
    share = f" ({line['memory_fraction']:.0%} reserved)" if "memory_fraction" in line else ""
    left = f"{duration(steps_left * line['step_seconds'])} left" if steps_left else ""
    norm, rate = ("grad norm", "tokens/s") if width is None or width >= FULL_WIDTH else ("norm", "tok/s")
    # What is left out first has the highest number. Each number has the width of its usual values.
    words = [
        (0, "36", "step", f"{line['step']}/{last_step}", 2 * len(str(last_step)) + 1, ""),
        (5, "36", "", format_tokens(line["tokens"]), 5, "tokens"),
        (0, "32", "loss", f"{line['loss']:.4f}", 6, ""),
        (1, "33", norm, f"{line['grad_norm']:.3f}", 5, ""),
        (4, "0", "lr", f"{line['lr']:.2e}", 8, ""),
        (2, "34", "", f"{line['tokens_per_second']:,.0f}", 7, rate),
        *([] if line["mfu"] is None else [(3, "34", "MFU", f"{line['mfu']:.1%}", 5, "")]),
        (7, "0", "", f"{line['step_seconds']:.3f}", 5, "s/step"),
        (6, "35", "", f"{line['memory_gib']:.2f}", 4, f"GiB{share}"),
        (8, "0", "data wait", f"{line['data_wait_fraction']:.1%}", 4, ""),
        *((5, "36", "", text.format(line[name]), 0, "") for name, text in shown.items() if name in line),
        (1, "0", "", left, len("12m05s left"), ""),
    ]
    texts = []
    for number, (rank, color, before, value, usual, after) in enumerate(words):
        columns[number] = max(columns.get(number, usual), len(value))
        texts.append((rank, color, " ".join(filter(None, (before, value.rjust(columns[number]), after)))))
    while width is not None and sum(len(text) + 2 for _, _, text in texts) - 2 > width:
        least = max(rank for rank, _, _ in texts)
        if least == 0:
            break
        texts = [word for word in texts if word[0] != least]
    return [(color, text) for _, color, text in texts if text.strip()]


def duration(seconds: float) -> str:
    """Format a duration, such as 41s, 12m05s, 3h20m or 2d04h."""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{whole % 60:02}s" if minutes else f"{whole}s"
