"""Compare two runs and name the first tensor that differs: ``python -m torchtrain.compare RUN_A RUN_B``."""

from torchtrain.cli import plugin_command, run_and_exit

main = plugin_command("torchtrain.plugins.comparison.command")

if __name__ == "__main__":
    run_and_exit(main)
