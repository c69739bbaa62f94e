"""List the documents in a step of a run, with their losses: ``python -m torchtrain.explain RUN --step N``."""

from torchtrain.cli import plugin_command, run_and_exit

main = plugin_command("torchtrain.plugins.explain.command")

if __name__ == "__main__":
    run_and_exit(main)
