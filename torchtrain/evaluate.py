"""Evaluate a checkpoint with lm-evaluation-harness: ``python -m torchtrain.evaluate``."""

from torchtrain.cli import plugin_command, run_and_exit

main = plugin_command("torchtrain.plugins.evaluation.evaluate_command")

if __name__ == "__main__":
    run_and_exit(main)
