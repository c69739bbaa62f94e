"""Where a start of the run begins: which checkpoint it goes on from, and its claim to the folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from torchtrain.checkpoint.claim import Claim, read_claim
from torchtrain.checkpoint.contract import check_contract
from torchtrain.checkpoint.history import History, read_config, step_folder
from torchtrain.checkpoint.manifest import read_manifest
from torchtrain.config.schema import Checkpoint
from torchtrain.distributed.agreement import of_first_rank
from torchtrain.distributed.connections import new_gloo_group
from torchtrain.log import logger

# A rank that dies closes its connections, which the others see at once; a slow disk must not look like that.
GROUP_TIMEOUT = timedelta(hours=1)


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
