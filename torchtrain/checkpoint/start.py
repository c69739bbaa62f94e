"""Where a start of the run begins: which checkpoint it goes on from, and its claim to the folder.

Only the newest start of a run may write its checkpoints. Where a network splits, or a job is started twice, two starts
(incarnations) of one run are alive at once. Each takes the next generation number, and checks that it is still the
newest before a checkpoint gets its final name.
"""

import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from torchtrain.checkpoint.contract import check_contract
from torchtrain.checkpoint.history import History, read_config, step_folder
from torchtrain.checkpoint.manifest import read_manifest
from torchtrain.checkpoint.storage import PARTIAL_SUFFIX
from torchtrain.config.schema import Checkpoint
from torchtrain.distributed.agreement import of_first_rank
from torchtrain.distributed.connections import new_gloo_group
from torchtrain.errors import CheckpointError, StorageError, SupersededError
from torchtrain.log import logger
from torchtrain.reading import MAY_PASS, MISSING, names_in, read_file

CLAIM_FILE = "generation.json"
BEING_WRITTEN_SECONDS = 60  # another start may be writing a temporary file younger than this
# A rank that dies closes its connections, which the others see at once; a slow disk must not look like that.
GROUP_TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True)
class Claim:
    """A process that saves the checkpoints of a run; made by ``take``, on one rank. By default of nobody."""

    generation: int = 0
    id: str = ""
    """Two that start at once take the same generation: the last to write is the newest."""
    run: str = ""
    """Id of the run: the same through all its starts."""
    host: str = "?"
    process: int | str = "?"
    since: str = "?"

    @classmethod
    def take(cls, folder: Path, run: str | None) -> "Claim":
        """Become the newest incarnation of the run that saves in ``folder``. ``run``: its id, if checkpoints have it.

        Raises:
            CheckpointError: the file cannot be written.
            StorageError: the file system fails.
        """
        _remove_left_overs(folder)  # first: they may be what fills the disk
        before = read_claim(folder)
        claim = cls(
            before.generation + 1,
            uuid.uuid4().hex,
            run or before.run or uuid.uuid4().hex,
            socket.gethostname(),
            os.getpid(),
            time.strftime("%Y-%m-%d %H:%M:%S"),
        )
        claim._write(folder)
        return claim

    def check(self, folder: Path) -> None:
        """Raise SupersededError if another incarnation has started since; StorageError where that cannot be known."""
        newest = read_claim(folder)
        if not newest.id:
            self._write(folder)  # nobody has claimed the folder since the file was lost
        elif newest.id != self.id:
            raise SupersededError(
                f"generation {newest.generation} of this run, on {newest.host} (process {newest.process}) since "
                f"{newest.since}, now saves in {folder}; this one, generation {self.generation}, stops. To train "
                "beside it, take another job.dump_folder"
            )

    def _write(self, folder: Path) -> None:
        file, written = folder / CLAIM_FILE, folder / f"{CLAIM_FILE}.{self.id}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written.write_text(json.dumps(asdict(self)), encoding="utf-8")
            written.replace(file)
        except OSError as error:
            with suppress(OSError):
                written.unlink(missing_ok=True)
            if error.errno in MAY_PASS:
                raise StorageError(
                    f"{file} cannot be written: {error.strerror}. Start again when the file system answers"
                ) from error
            raise CheckpointError(
                f"{file} cannot be written ({error.strerror}), and so no checkpoint: make room or let this "
                "user write there, or take another job.dump_folder"
            ) from error


def _remove_left_overs(folder: Path) -> None:
    """Remove what earlier starts were writing when they were killed. One of them may still be alive, and writing."""
    for name in names_in(folder):
        path = folder / name
        if name.startswith("step-") and name.endswith(PARTIAL_SUFFIX):
            shutil.rmtree(path, ignore_errors=True)
        elif name.startswith(f"{CLAIM_FILE}."):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > BEING_WRITTEN_SECONDS:
                    path.unlink()


def read_claim(folder: Path) -> Claim:
    """What the newest incarnation has written; an empty claim where there is nothing, or nothing of ours."""
    try:
        claim = Claim(**json.loads(read_file(folder / CLAIM_FILE)))
    except (*MISSING, ValueError, TypeError):
        return Claim()
    return claim if isinstance(claim.generation, int) else Claim()


@dataclass(frozen=True)
class Start:
    """A start of the run; the same on all ranks but for ``group``."""

    group: dist.ProcessGroup
    """Of all ranks, over gloo, for checkpoints alone."""
    step: int | None = None
    """Of the checkpoint to load; None: a new run."""
    claim: Claim = field(default_factory=Claim)
    """Of nobody where checkpoints are off."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Identity of the run's data and tokenizer by option."""


def find_start(
    config: Checkpoint, folder: Path, config_toml: str, data: Callable[[], Mapping[str, str]] = dict
) -> Start:
    """Find the checkpoint to resume from in ``folder``, which all ranks share, and claim the folder. Collective.

    The step is that of the newest good checkpoint, or ``config.load_step``, or what a run that began with it has made
    since. With ``config.enable`` off, nothing is found and nothing claimed.

    Args:
        config_toml: the resolved config of this start.
        data: gives the identity of the run's data and tokenizer by option; called on the first rank alone.

    Raises:
        CheckpointError: there are checkpoints, but none is good; ``load_step`` is missing or damaged; the contract
            does not let the run go on from there.
        StorageError: the file system fails.
    """
    group = new_gloo_group(GROUP_TIMEOUT)
    if not config.enable:
        return Start(group)
    identity = of_first_rank(data, group)
    history = History(folder, group, of_first_rank(lambda: read_claim(folder).run, group))
    if config.load_step == -1:
        step = history.newest_good()
        if step is None:
            history.require_none()
    else:
        step = history.newest_since(config.load_step)
    run = None
    if step is not None:
        found = step_folder(folder, step)
        manifest, saved_toml = of_first_rank(lambda: (read_manifest(found), read_config(found)), group)
        for line in check_contract(saved_toml, config_toml, config.allow_changes, manifest.data, identity):
            logger.info(line)
        run = manifest.run
    return Start(group, step, of_first_rank(lambda: Claim.take(folder, run), group), identity)
