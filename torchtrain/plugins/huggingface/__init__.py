"""Plugin: convert checkpoints to Hugging Face's files and back (docs/using.md)."""

REQUIRES = ("torchtrain.plugins.object_storage",)  # the target may be in a bucket
