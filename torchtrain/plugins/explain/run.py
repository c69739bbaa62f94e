"""A step of a run: its config on one rank, the checkpoint to begin from, and the data loader before it."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchtrain.checkpoint.format import CONFIG, VerifiedReader, read_manifest
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.resume_compatibility import EXCLUDE, same_content, source_identities
from torchtrain.checkpoint.saved_run import read_config
from torchtrain.checkpoint.states import POSITION, load_tensors, read_layout
from torchtrain.checkpoint.storage import CheckpointStorage, open_storage
from torchtrain.config.parse import from_text, read_text
from torchtrain.config.run_plan import RunPlan, plan_of
from torchtrain.config.schema import JobConfig, option_of_plugin
from torchtrain.datasets.build import build_dataloader
from torchtrain.datasets.dataloader import DataLoader, LoaderLayout
from torchtrain.datasets.tokenizers import Tokenizer, load_tokenizer
from torchtrain.distributed.process_group import destroy_process_group, init_process_group
from torchtrain.errors import ConfigError, DataError
from torchtrain.files import is_url, json_object, names_in, read_file
from torchtrain.metrics.options import MetricsConfig, ProfilingConfig, ValidationConfig
from torchtrain.parallelisms.options import ParallelismConfig
from torchtrain.plugins.report.options import ReportConfig

DEVICE_INFO = ("device", "device_name", "threads", "torch")  # in the event "start" of metrics.jsonl


@dataclass(frozen=True)
class RunStep:
    """A step of the run in ``folder``.

    ``config`` is that of the step's stage of the run, as it was trained. ``rows`` are the rows to explain.
    """

    folder: Path
    config: JobConfig
    plan: RunPlan
    storage: CheckpointStorage
    step: int
    rows: Sequence[int]
    identity: Mapping[str, str] | None
    """The identity of the data of the step (``DataLoader.identity``), if a checkpoint after it has it."""

    @property
    def stage(self) -> int:
        """The number of the stage of the run that the step is in."""
        return stage_of(self.plan, self.step)

    @property
    def checkpoint_step(self) -> int:
        """The step of the newest checkpoint before the step; 0 if there is none."""
        return max((step for step in self.storage.steps() if step < self.step), default=0)

    @property
    def trained_on(self) -> dict[str, Any]:
        """``device_info`` of the process that has trained the steps after this checkpoint.

        It is empty if they were trained by several with different ones, or if metrics.jsonl does not tell.
        """
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return {}
        starts: list[dict[str, Any]] = []
        for text in read_file(path, most_bytes=sys.maxsize).splitlines():
            line = json_object(text) if b'"event": "start"' in text else None
            if line is not None and line["step"] < self.step:
                # It undoes the steps after its own, and those before the checkpoint are not trained again.
                starts = [] if line["step"] <= self.checkpoint_step else [s for s in starts if s["step"] < line["step"]]
                starts.append(line)
        found = [{name: start.get(name) for name in DEVICE_INFO if name in start} for start in starts]
        return found[0] if found and all(info == found[0] for info in found) else {}

    def has_bits_of_one_rank(self, *, tied_embeddings: bool) -> bool:
        """Whether one rank has the bits of the run's layout (docs/parallelism.md, "The same bits")."""
        layout = self.config.parallelism
        if all(degree == 1 for name, degree in vars(layout).items() if name.endswith("_degree")):
            return True
        if self.config.training.sums != "exact":
            return False
        grains = [option_of_plugin(self.config, f"grains.{axis}") or 1 for axis in ("tensor", "context")]
        if grains == [1, 1] and max(layout.tensor_parallel_degree, layout.context_parallel_degree) > 1:
            return False
        return layout.pipeline_parallel_degree == 1 or not tied_embeddings


def open_run(folder: str, step: int, rows: Sequence[int]) -> RunStep:
    """Find the config of ``step`` of the run in ``folder``. ``rows``: those to explain; empty for all.

    Raises:
        ConfigError: it is no folder of a run, or the step or a row is out of range.
    """
    if is_url(folder):
        raise ConfigError(f"{folder} is a URL: explain needs the folder of a run, such as outputs/debug_model")
    path = Path(folder)
    if not path.is_dir() or CONFIG not in names_in(path):
        raise ConfigError(f"{path} is not the folder of a run, such as outputs/debug_model: it has no {CONFIG}")
    file = str(path / CONFIG)
    newest = from_text(read_text(file), file, only_known=True)
    storage = open_storage(newest.checkpoint.location(path))
    last = plan_of(newest).last_step
    if not 1 <= step <= last:
        raise ConfigError(f"--step {step} must be from 1 to {last}, the last step of the run in {path}")
    # A run may have been resumed with other options since: a checkpoint has those of its own steps.
    after = next((saved for saved in storage.steps() if saved >= step), None)
    config, identity = newest, None
    if after is not None:
        checkpoint = storage.open(after)
        config = read_config(checkpoint)
    plan = plan_of(config)
    if after is not None and stage_of(plan, after) == stage_of(plan, step):
        identity = read_manifest(checkpoint).data
    config = plan.stages[stage_of(plan, step)]
    batch = config.training.global_batch_size
    if bad := [row for row in rows if not 0 <= row < batch]:
        raise ConfigError(f"--rows {bad[0]} must be from 0 to {batch - 1}, the last row of the global batch")
    return RunStep(path, config, plan, storage, step, sorted(set(rows)) or range(batch), identity)


def stage_of(plan: RunPlan, step: int) -> int:
    """The number of the stage of a run that ``step`` is in."""
    ends = [stage.training.steps for stage in plan.stages]
    return next(number for number, end in enumerate(ends) if step <= end)


def on_one_rank(config: JobConfig, dump_folder: str) -> JobConfig:
    """The config of a stage of a run, to train the same steps in this process, without outputs."""
    longest = max(config.data.longest_seq_len, plan_of(config).longest_seq_len)
    training, layout = config.training, config.parallelism
    if layout.pipeline_parallel_degree > 1:  # its microbatches are parts of local_batch_size
        count = layout.pipeline_parallel_microbatches
        training = replace(training, local_batch_size=1 if count == -1 else training.local_batch_size // count)
    return replace(
        config,
        training=training,
        job=replace(config.job, dump_folder=dump_folder, stage=""),
        data=replace(config.data, prefetch=0, longest_seq_len=longest),
        validation=ValidationConfig(),
        parallelism=ParallelismConfig(),
        checkpoint=CheckpointConfig(enable=False, initial_load_path=config.checkpoint.initial_load_path),
        # A bad step is skipped: a rollback of the run is a checkpoint that was saved after it.
        faults=replace(config.faults, on_nonfinite="skip", max_bad_steps=2**31, wall_clock_limit_minutes=0.0),
        metrics=MetricsConfig(enable_tensorboard=False),
        profiling=ProfilingConfig(),
        plugins={
            **{name: section for name, section in config.plugins.items() if section.changes_run or section.is_of_data},
            "report": ReportConfig(enable=False),
        },
        stages=(),
    )


@dataclass(frozen=True)
class Position:
    """The position of a run in its data after ``step``."""

    step: int
    rows: npt.NDArray[np.int64]
    """The state of all rows (``DataLoader.state_dict``)."""
    layout: LoaderLayout
    identity: Mapping[str, str]
    """The identity of the data (``DataLoader.identity``)."""


def loader_before(run: RunStep) -> tuple[DataLoader, Tokenizer]:
    """A loader whose next batch is that of the step, for all rows of the global batch.

    It begins at the newest checkpoint before the step, and reads the batches from there on.

    Raises:
        DataError: the data are not those of the checkpoint, or end before the step.
        CheckpointError: the checkpoint is damaged.
    """
    tokenizer = load_tokenizer(run.config.model.tokenizer_path)
    position = _saved_position(run)
    for number in range(stage_of(run.plan, position.step + 1) if position else 0, run.stage + 1):
        loader = _open_loader(run.plan, number, tokenizer)
        if position is not None:
            _resume(loader, position)
            if run.identity is None and position.step >= run.plan.first_step(number):
                _require_same_data(loader, position.identity, f"the checkpoint of step {position.step}")
        if number == run.stage and run.identity is not None:
            _require_same_data(loader, run.identity, f"the first checkpoint after step {run.step - 1}")
        step = position.step if position else 0
        last = run.step - 1 if number == run.stage else run.plan.stages[number].training.steps
        if run.plan.stages[number].data.when_exhausted == "repeat" and skip(loader, last - step):
            step = last
        while step < last:
            if next(loader, None) is None:
                raise DataError(f"the data end before step {run.step}: step {step} is the last one")
            step += 1
        position = Position(step, loader.state_dict()["rows"].numpy(), loader.layout, loader.identity)
    return loader, tokenizer


def skip(loader: DataLoader, steps: int) -> bool:
    """Let ``loader`` continue after ``steps`` more batches without reading them; False if its sources cannot."""
    if not all(stream.can_skip for stream in loader.streams):
        return False
    rows, sources = loader.state_dict()["rows"], len(loader.streams)
    drawn = rows[:, 1 : 1 + sources]
    for _ in range(steps):
        of_rows = loader.mixture.choose(int(drawn[0].sum()) + np.arange(loader.global_batch_size))
        drawn += torch.from_numpy(np.bincount(of_rows, minlength=sources))
    rows[:, 0] += steps
    loader.load_state_dict({"rows": rows})
    return True


def _open_loader(plan: RunPlan, number: int, tokenizer: Tokenizer) -> DataLoader:
    config, training = plan.stages[number], plan.stages[number].training
    return build_dataloader(
        replace(config.data, prefetch=0),
        tokenizer,
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        rows=range(training.global_batch_size),
        seed=training.seed,
        device=torch.device("cpu"),
        longest_seq_len=plan.longest_seq_len,
        plugins=config.plugins,
    )


def _saved_position(run: RunStep) -> Position | None:
    """The position in the newest checkpoint before the step; None if there is no checkpoint."""
    if not run.checkpoint_step:
        return None
    checkpoint = run.storage.open(run.checkpoint_step)
    reader = VerifiedReader(checkpoint)
    layout = read_layout(reader)
    rows = torch.empty(layout.shape, dtype=torch.int64)
    init_process_group(torch.device("cpu"), run.config.comm.init_timeout_seconds)
    try:
        load_tensors({POSITION: rows}, reader)
    finally:
        destroy_process_group()  # the trainer creates its own
    return Position(run.checkpoint_step, rows.numpy(), layout, reader.manifest.data)


def _resume(loader: DataLoader, position: Position) -> None:
    """Let ``loader`` continue after ``position``. As in a resumed run, sources with other content begin."""
    saved, current = source_identities(position.identity), source_identities(loader.identity)
    continued = [same_content(old, new) for old, new in zip(saved, current, strict=False)]
    loader.resume(position.rows, position.layout, continued + [False] * (len(current) - len(continued)))


def _require_same_data(loader: DataLoader, identity: Mapping[str, str], of: str) -> None:
    """Raise DataError unless the data of ``loader`` have the ``identity`` in a checkpoint; ``of`` names it."""
    saved, current = source_identities(identity), source_identities(loader.identity)
    if len(saved) != len(current) or not all(map(same_content, saved, current)):
        raise DataError(
            f"the data are not those of {of} any more: it has {'; '.join(saved)}; now there are {'; '.join(current)}. "
            "Restore the files to explain a step"
        )
    if identity.get(EXCLUDE, "") != loader.identity.get(EXCLUDE, ""):
        raise DataError(
            f"{EXCLUDE} names other documents than {of}: {loader.identity.get(EXCLUDE, 'none')} in place of "
            f"{identity.get(EXCLUDE, 'none')}. Restore the list to explain a step"
        )
