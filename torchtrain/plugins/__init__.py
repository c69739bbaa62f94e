"""Plugins: what a training run on local data with local checkpoints does not need. See docs/plugins.md."""
