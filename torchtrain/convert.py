"""Convert checkpoints to and from Hugging Face's files: ``python -m torchtrain.convert FROM TO``."""

from torchtrain.cli import plugin_command, run_and_exit

main = plugin_command("torchtrain.plugins.huggingface.command")

if __name__ == "__main__":
    run_and_exit(main)
