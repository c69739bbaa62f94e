"""Plugin: checkpoints in an object store, and files by URL (docs/object-storage.md)."""

from torchtrain.config.registry import CHECKPOINT_STORAGES, OBJECT_STORE_SCHEMES, URL_READERS

for scheme in OBJECT_STORE_SCHEMES:
    CHECKPOINT_STORAGES.add(scheme, "torchtrain.plugins.object_storage.storage:ObjectStorage")
for scheme in (*OBJECT_STORE_SCHEMES, "http", "https"):
    URL_READERS.add(scheme, "torchtrain.plugins.object_storage.cached_copies:CACHED_COPIES")
