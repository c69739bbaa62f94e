"""Plugin: text by URLs and datasets of the Hugging Face hub, streamed or downloaded; tokens by URLs (docs/data.md)."""

from torchtrain.config.registry import CONFIG_SECTIONS, DATA_SOURCES, TOKEN_FOLDERS

REQUIRES = ("torchtrain.plugins.object_storage",)

CONFIG_SECTIONS.add("remote_data", "torchtrain.plugins.remote_data.options:RemoteDataConfig")
DATA_SOURCES.add("remote_files", "torchtrain.plugins.remote_data.sources:RemoteFiles")
DATA_SOURCES.add("hub", "torchtrain.plugins.remote_data.sources:HubDataset")
TOKEN_FOLDERS.add("url", "torchtrain.plugins.remote_data.remote_folder:open_remote_folder")
