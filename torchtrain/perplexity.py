"""Loss and perplexity of a trained model on text files: ``python -m torchtrain.perplexity``."""

from torchtrain.cli import plugin_command, run_and_exit

main = plugin_command("torchtrain.plugins.evaluation.perplexity_command")

if __name__ == "__main__":
    run_and_exit(main)
