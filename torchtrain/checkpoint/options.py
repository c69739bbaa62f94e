"""Options of checkpoints: [checkpoint]."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from torchtrain.config.registry import CHECKPOINT_STORAGES
from torchtrain.config.section import (
    Count,
    CountOrZero,
    NotNegative,
    Section,
    TokenCount,
    at_least,
    require,
    require_one,
)
from torchtrain.files import is_url, scheme_of


@dataclass(frozen=True)
class CheckpointConfig(Section, name="checkpoint"):
    """Checkpoints, initial weights, export."""

    enable: bool = True
    """Save checkpoints, and resume from the latest."""
    folder: str = "checkpoint"
    """Where checkpoints are stored: a folder that all ranks share, relative to the dump folder, or a URL such as
    s3://bucket/run/checkpoint (docs/object-storage.md)."""
    interval: Count = 500
    """Checkpointing interval in steps. The last step is always saved."""
    interval_tokens: TokenCount = ""
    """Checkpointing interval in tokens, in place of interval."""
    interval_minutes: NotNegative = 30.0
    """Also save a checkpoint if this many minutes have passed since the end of the previous save, which bounds the work
    lost with slow steps. 0: save by steps only."""
    keep_latest_k: CountOrZero = 5
    """Keep only the latest k checkpoints. 0: keep all of them. A checkpoint takes 12 bytes per parameter (1B: 15 GB,
    8B: 96 GB), and while one is written the disk holds one more."""
    keep_every: CountOrZero = 0
    """Beside the latest, keep the first checkpoint at or after each multiple of this number of steps. 0: none."""
    keep_best_k: CountOrZero = 0
    """Beside the latest, keep the k checkpoints of the lowest validation loss: of those after whose step the run has
    validated, in each stage. 0: none."""
    load_step: Annotated[int, at_least(-1)] = -1
    """Step of the checkpoint to resume from. -1: the latest."""
    initial_load_path: str = ""
    """Initial weights of a new run: the folder of a run, a step-N in it, a Hugging Face folder, or a URL of these. A
    run that has a checkpoint of its own resumes from that instead."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
    """disabled: training waits until a checkpoint is on disk. async: training continues when the state has been copied
    to CPU memory. async_with_pinned_mem: training continues immediately, and the copy overlaps with the next forward
    and backward (CUDA; elsewhere the same as async). Both async modes keep one copy of the state in CPU memory."""
    allow_changes: tuple[str, ...] = ()
    """Names of options, such as "optimizer.lr", that may differ from the checkpoint's config although they change the
    results of the run (table in docs/checkpoints.md)."""
    max_failed_saves: Count = 3
    """Number of consecutive failed saves, for example on a full disk, after which the run ends with an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_url(self.folder):
            CHECKPOINT_STORAGES.check(scheme_of(self.folder), CHECKPOINT_STORAGES.option)
        given = self.enable or self.load_step == -1
        require(given, f"checkpoint.load_step = {self.load_step} needs checkpoint.enable = true")
        require_one(self, "interval_tokens", "interval")

    def location(self, dump_folder: str | Path) -> str:
        """Path or URL of the checkpoints of the run in ``dump_folder``."""
        return self.folder if is_url(self.folder) else str(Path(dump_folder) / (self.folder or "checkpoint"))
