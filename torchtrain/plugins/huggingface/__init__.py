"""Plugin: weights in Hugging Face's files, to start from, to export, and to convert (docs/using.md)."""

from torchtrain.config.registry import EXPORTERS, WEIGHT_FORMATS

REQUIRES = ("torchtrain.plugins.object_storage",)  # the target of a conversion may be in a bucket

WEIGHT_FORMATS.add("huggingface", "torchtrain.plugins.huggingface.weights:HUGGING_FACE_FOLDER")
EXPORTERS.add("huggingface", "torchtrain.plugins.huggingface.export:HUGGING_FACE_EXPORTER")
