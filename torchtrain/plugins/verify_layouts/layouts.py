"""Layouts of up to eight ranks: their names, and those that are verified by default."""

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import combinations
from typing import Any, get_args, get_type_hints

from torchtrain.config.registry import CONFIG_SECTIONS
from torchtrain.config.schema import JobConfig, section_of
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.errors import ConfigError
from torchtrain.parallelisms.options import ParallelismConfig

AXES = tuple(field.name for field in fields(ParallelDims))
SCHEDULES: tuple[str, ...] = get_args(get_type_hints(ParallelismConfig)["pipeline_parallel_schedule"])
DEFAULT = ParallelismConfig()
ROWS = 8
"""Rows of the global batch, on every layout."""


@dataclass(frozen=True)
class Layout:
    """A parallel layout. Its text, such as ``tensor=2,sequence_parallel=false``, is a value of ``--layouts``."""

    dims: ParallelDims = field(default_factory=ParallelDims)
    schedule: Any = DEFAULT.pipeline_parallel_schedule
    sequence_parallel: bool = True
    options: tuple[tuple[str, int], ...] = ()
    """Degrees of plugins, such as ("moe.expert_parallel_degree", 2)."""

    def __str__(self) -> str:
        words = [f"{axis}={degree}" for axis, degree in self.degrees.items()]
        if self.schedule != DEFAULT.pipeline_parallel_schedule:
            words.append(f"schedule={self.schedule}")
        if not self.sequence_parallel:
            words.append("sequence_parallel=false")
        words += [f"{name}={degree}" for name, degree in self.options]
        return ",".join(words) or "one rank"

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees above 1, by axis."""
        return {axis: degree for axis, degree in vars(self.dims).items() if degree > 1}

    @property
    def ranks(self) -> int:
        return math.prod(astuple(self.dims))

    def apply(self, config: JobConfig, *, microbatch_rows: int | None = None) -> JobConfig:
        """``config`` on this layout, with ``ROWS`` rows in a step: several microbatches, unless it is on one rank.

        ``microbatch_rows``: rows of each microbatch, also on one rank. By default those of a pipeline have one.
        """
        rows = ROWS // self.dims.batch
        # A schedule needs as many microbatches as there are stages.
        local, microbatches = rows if self.ranks == 1 else max(1, rows // 2, min(rows, self.dims.pipeline)), -1
        if microbatch_rows is not None:
            local, microbatches = microbatch_rows, -1
            if self.dims.pipeline > 1:
                local, microbatches = rows, rows // microbatch_rows
        parallelism = replace(
            config.parallelism,
            pipeline_parallel_degree=self.dims.pipeline,
            data_parallel_replicate_degree=self.dims.replicate,
            data_parallel_shard_degree=self.dims.shard,
            context_parallel_degree=self.dims.context,
            tensor_parallel_degree=self.dims.tensor,
            pipeline_parallel_schedule=self.schedule,
            pipeline_parallel_microbatches=microbatches,
            pipeline_parallel_layers_per_stage=(),
            enable_sequence_parallel=self.sequence_parallel,
        )
        training = replace(config.training, local_batch_size=local, global_batch_size=ROWS)
        plugins = dict(config.plugins)
        for name, degree in self.options:
            section, _, key = name.partition(".")
            plugins[section] = replace(section_of(config, CONFIG_SECTIONS[section]), **{key: degree})
        return replace(config, parallelism=parallelism, training=training, plugins=plugins)


def parse_layout(text: str) -> Layout:
    """The layout that ``text`` names. Raises ConfigError if it does not name one."""
    layout = Layout()
    for word in text.split(","):
        key, _, value = word.partition("=")
        if key in AXES and value.isdecimal() and int(value) > 0:
            degrees: dict[str, Any] = {key: int(value)}
            layout = replace(layout, dims=replace(layout.dims, **degrees))
        elif key == "schedule" and value in SCHEDULES:
            layout = replace(layout, schedule=value)
        elif key == "sequence_parallel" and value in ("true", "false"):
            layout = replace(layout, sequence_parallel=value == "true")
        elif is_degree(key) and value.isdecimal() and int(value) > 0:
            layout = replace(layout, options=(*layout.options, (key, int(value))))
        else:
            raise ConfigError(
                f"--layouts {text!r}: {word!r} must be one of {', '.join(f'{axis}=N' for axis in AXES)}, "
                f"sequence_parallel=false and schedule=NAME, of {', '.join(SCHEDULES)}, or a degree of a plugin by its "
                "full name"
            )
    return layout


def is_degree(name: str) -> bool:
    """Whether ``name`` is an option of a plugin such as ``moe.expert_parallel_degree``."""
    section, _, key = name.partition(".")
    if section not in CONFIG_SECTIONS or not key.endswith("_parallel_degree"):
        return False
    return key in {field.name for field in fields(CONFIG_SECTIONS[section])}


def default_layouts(most_ranks: int) -> list[Layout]:
    """Each axis alone, pairs of axes, and three of them, on at most ``most_ranks`` ranks."""
    return [layout for layout in _layouts() if layout.ranks <= most_ranks]


def _layouts() -> Iterator[Layout]:
    for axis in ("shard", "replicate", "tensor", "context"):
        yield _of(**{axis: 2})
    yield Layout(ParallelDims(tensor=2), sequence_parallel=False)
    for schedule in SCHEDULES:
        yield Layout(ParallelDims(pipeline=2), schedule)
    for axis in ("tensor", "context"):
        yield _of(**{axis: 4})  # chunks of a sequence and shards of heads that two ranks do not have
    for pair in combinations(("shard", "replicate", "tensor", "context", "pipeline"), 2):
        yield _of(**dict.fromkeys(pair, 2))
    yield Layout(ParallelDims(context=2, tensor=2), sequence_parallel=False)
    yield _of(shard=2, context=2, tensor=2)
    yield _of(pipeline=2, shard=2, tensor=2)


def _of(**degrees: int) -> Layout:
    return Layout(ParallelDims(**degrees))
