"""Convert a config of torchtitan: ``python -m torchtrain.convert_config theirs.toml --output ours.toml``."""

from torchtrain.cli import plugin_command, run_and_exit

main = plugin_command("torchtrain.plugins.from_torchtitan.command")

if __name__ == "__main__":
    run_and_exit(main)
