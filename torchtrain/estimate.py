"""Estimate the memory and speed of a training run without a GPU: ``python -m torchtrain.estimate``."""

from torchtrain.cli import plugin_command, run_and_exit

main = plugin_command("torchtrain.plugins.planner.command")

if __name__ == "__main__":
    run_and_exit(main)
