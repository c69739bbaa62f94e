"""Plugin: text by URLs and datasets of the Hugging Face hub, streamed or downloaded (docs/data.md)."""

from torchtrain.config.registry import DATA_SOURCES

REQUIRES = ("torchtrain.plugins.object_storage",)

DATA_SOURCES.add("remote_files", "torchtrain.plugins.remote_data.sources:RemoteFiles")
DATA_SOURCES.add("hub", "torchtrain.plugins.remote_data.sources:HubDataset")
