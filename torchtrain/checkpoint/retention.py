"""Which old checkpoints are kept, and the validation losses that this depends on."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence

from torchtrain.checkpoint.format import read_manifest, read_verified
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.storage import StoredCheckpoint
from torchtrain.errors import DamagedError
from torchtrain.files import parse_json

LOSSES = "validation_losses.json"

Losses = Mapping[int, tuple[str, float]]
"""By step the validation loss, and the name of the stage of the run that validated: other stages have other data."""


def not_kept(config: CheckpointConfig, steps: Sequence[int], losses: Losses) -> list[int]:
    """Those of the complete checkpoints of ``steps``, in ascending order, that no option keeps.

    Args:
        losses: those that are known; used with ``keep_best_k`` only.
    """
    if not config.keep_latest_k or (config.keep_best_k and not losses):  # the losses cannot be read, or none is known
        return []
    kept = set(steps[-config.keep_latest_k :])
    if config.keep_every:
        first_after: dict[int, int] = {}  # by multiple of keep_every
        for step in steps:
            first_after.setdefault(step // config.keep_every, step)
        first_after.pop(0, None)
        kept |= set(first_after.values())
    by_stage: dict[str, list[tuple[float, int]]] = {}
    for step in losses.keys() & set(steps):
        stage, loss = losses[step]
        by_stage.setdefault(stage, []).append((loss, step))
    for of_stage in by_stage.values():
        kept |= {step for _, step in sorted(of_stage)[: config.keep_best_k]}
    return [step for step in steps if step not in kept]


def losses_to_bytes(losses: Losses, steps: Iterable[int]) -> bytes:
    """The content of the file ``LOSSES``: the losses after ``steps``."""
    return json.dumps([[step, *losses[step]] for step in sorted(losses.keys() & set(steps))]).encode()


def read_losses(checkpoint: StoredCheckpoint) -> Losses:
    """The losses in ``checkpoint``; none if it was saved without ``keep_best_k``.

    Raises:
        DamagedError: the file is damaged.
    """
    if LOSSES not in {record.name for record in read_manifest(checkpoint).files}:
        return {}
    path = checkpoint.path_of(LOSSES)
    try:
        content = parse_json(read_verified(checkpoint, LOSSES), path, DamagedError)
        losses = {int(step): (str(stage), float(loss)) for step, stage, loss in content}
    except (TypeError, ValueError, OverflowError) as error:
        raise DamagedError(f"{path} is not a list of validation losses") from error
    return {step: found for step, found in losses.items() if math.isfinite(found[1])}
