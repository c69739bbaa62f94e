"""Tokenize data before training: ``python -m torchtrain.prepare --job.config_file F --prepare.output FOLDER``."""

from torchtrain.cli import plugin_command, run_and_exit

main = plugin_command("torchtrain.plugins.prepared_data.command")

if __name__ == "__main__":
    run_and_exit(main)
