"""Metrics of a run in its checkpoints: in a bucket, they outlive the disk of the node that wrote them."""

import io
import tarfile
from pathlib import Path

from torchtrain.checkpoint.format import OUTPUTS, read_manifest, read_verified
from torchtrain.checkpoint.storage import StoredCheckpoint
from torchtrain.files import atomic_write
from torchtrain.logging import logger

METRICS = "metrics.jsonl"
PACKED = (METRICS, "tensorboard", "wandb_id")
"""Files and folders in the dump folder."""


def pack_outputs(dump_folder: Path) -> bytes:
    """The metrics in ``dump_folder`` as a compressed tar archive."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1) as tar:
        for name in PACKED:
            path = dump_folder / name
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            for file in files:
                if file.is_file() and not file.is_symlink():
                    entry = tarfile.TarInfo(file.relative_to(dump_folder).as_posix())
                    with file.open("rb") as content:
                        entry.size = file.stat().st_size  # which is added, although the file may grow meanwhile
                        tar.addfile(entry, content)
    return archive.getvalue()


def read_outputs(checkpoint: StoredCheckpoint) -> dict[str, bytes]:
    """The metrics in ``checkpoint``, by their path in the dump folder; none if it has none.

    Raises:
        DamagedError: the archive is damaged.
    """
    if OUTPUTS not in {record.name for record in read_manifest(checkpoint).files}:
        return {}
    found = {}
    with tarfile.open(fileobj=io.BytesIO(read_verified(checkpoint, OUTPUTS)), mode="r:gz") as tar:
        for entry in tar:
            content = tar.extractfile(entry) if entry.isreg() else None
            parts = entry.name.split("/")
            # Whoever can write to the bucket could name a file anywhere on this machine.
            if content is not None and parts[0] in PACKED and len(parts) <= 2 and not {"", ".", ".."} & set(parts):
                found[entry.name] = content.read()
    return found


def restore_outputs(checkpoint: StoredCheckpoint, dump_folder: Path) -> None:
    """Write the metrics in ``checkpoint`` to ``dump_folder``, unless it has metrics already."""
    if (dump_folder / METRICS).exists():
        return
    outputs = read_outputs(checkpoint)
    for name in sorted(outputs, key=lambda name: name == METRICS):  # the last one marks them as restored
        file = dump_folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as written:
            written.write(outputs[name])
    if outputs:
        logger.info(f"{dump_folder} has no metrics: restored those in {checkpoint}")
