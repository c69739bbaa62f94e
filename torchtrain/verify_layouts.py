"""Train a model on every layout on CPUs, and name the first wrong tensor: ``python -m torchtrain.verify_layouts``."""

from torchtrain.cli import plugin_command, run_and_exit

main = plugin_command("torchtrain.plugins.verify_layouts.command")

if __name__ == "__main__":
    run_and_exit(main)
