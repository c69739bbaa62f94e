"""Generate text from a checkpoint: ``python -m torchtrain.generate``."""

from torchtrain.cli import plugin_command, run_and_exit

main = plugin_command("torchtrain.plugins.evaluation.generate_command")

if __name__ == "__main__":
    run_and_exit(main)
