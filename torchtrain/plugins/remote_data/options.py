"""The section [remote_data]."""

from dataclasses import dataclass
from typing import Annotated

from torchtrain.config.section import Count, LocalPath, Section, at_least


@dataclass(frozen=True)
class RemoteDataConfig(Section, name="remote_data"):
    """Data that are streamed from URLs and the hub, and a local cache of them."""

    changes_run = False
    is_of_data = True

    streams: Count = 64
    """Maximum number of files of streamed data that are read concurrently; the number used is the largest divisor of
    the global batch size up to it. The number of data-parallel ranks must divide that number. A different number gives
    a different data order, and a run does not resume with one."""
    cache_folder: LocalPath = ""
    """Folder on a local disk that keeps what is read of data.path and validation.path by URL, for later epochs,
    validations and runs; the processes of a node share it. Empty: no cache."""
    cache_gib: Annotated[float, at_least(1)] = 100.0
    """Maximum size of the cache in GiB; the entries that were not used for the longest time are removed."""
    held_out_gib: Annotated[float, ("be more than 0", lambda value: value > 0)] = 1.0
    """GiB of the text of a streamed source that are read when a run starts, to find documents of data.held_out to
    validate on; at most a sixteenth of it is kept. No document of data.held_out is trained on."""
