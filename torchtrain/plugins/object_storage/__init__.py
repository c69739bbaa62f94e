"""Plugin: checkpoints in an object store (docs/object-storage.md)."""

from torchtrain.config.registry import CHECKPOINT_STORAGES, OBJECT_STORE_SCHEMES

for scheme in OBJECT_STORE_SCHEMES:
    CHECKPOINT_STORAGES.add(scheme, "torchtrain.plugins.object_storage.storage:ObjectStorage")
