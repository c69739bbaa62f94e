"""The section [estimate]."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from torchtrain.config.section import Count, CountOrZero, LocalPath, NotNegative, Section


@dataclass(frozen=True)
class EstimateConfig(Section, name="estimate"):
    """Memory and speed of a run without a GPU. Only for python -m torchtrain.estimate."""

    changes_run = False

    world_size: CountOrZero = 0
    """Number of ranks, one per GPU. 0: the product of the degrees in [parallelism], none of which may be -1."""
    gpu: Literal["a100-40", "a100-80", "h100-80", "h100-96", "h200", "b200"] = "h100-80"
    """GPU type; the number is its memory in GB (h200: 141, b200: 180)."""
    gpus_per_node: Count = 8
    """Number of GPUs per machine."""
    memory_gib: NotNegative = 0.0
    """Memory of a GPU in GiB. 0: that of the GPU type."""
    network_gigabits: NotNegative = 0.0
    """Network bandwidth of a machine in Gb/s, in one direction, such as 3200 for eight adapters of 400. 0: one adapter
    per GPU, as is usual with the GPU type."""
    dollars_per_gpu_hour: NotNegative = 0.0
    """Price of a GPU for an hour, of which the price of the run is made. 0: no price."""
    mtbf_hours: NotNegative = 0.0
    """Mean time between failures of one GPU, with its share of machine and network, in hours: 50,700 in the training of
    Llama 3. 0: the duration is estimated without failures, or with those of node_mtbf_hours only."""
    node_mtbf_hours: NotNegative = 0.0
    """Mean time between failures of one machine, in hours, beside those of mtbf_hours. 0: none."""
    save_seconds: Annotated[float, ("be above 0", lambda value: 0 < value < math.inf)] = 10.0
    """With mtbf_hours or node_mtbf_hours: for how long training waits for a save, in seconds."""
    restart_seconds: NotNegative = 600.0
    """With mtbf_hours or node_mtbf_hours: the time from a failure until training continues, in seconds."""
    replicas: CountOrZero = 0
    """With mtbf_hours or node_mtbf_hours: also estimate the run with the world divided into so many replicas that may
    die (docs/replicas.md). 0: not."""
    replica_lost_seconds: NotNegative = 10.0
    """With replicas: for how long the others wait for one that dies, in seconds: until its heartbeat has expired at the
    lighthouse, and for the transfer of the state when it is back. The step that is repeated is added."""
    all_layers: bool = False
    """Simulate every layer on fake tensors instead of a few representative ones. Slower; it verifies the estimate."""
    search: bool = False
    """Search for the layout that fits in memory with the highest throughput. Ctrl-C ends it with the best so far."""
    search_seconds: NotNegative = 0.0
    """CPU time of a search on each core, in seconds: with more, it simulates more layouts. 0: 80 for up to 64 GPUs, 400
    beyond."""
    output: LocalPath = ""
    """TOML file for the best layout of a search, to pass to the trainer. Empty: layout.toml in job.dump_folder."""
    json: bool = False
    """Print JSON instead of a table."""
    picture: LocalPath = ""
    """PNG file for a plot of memory over two steps."""
