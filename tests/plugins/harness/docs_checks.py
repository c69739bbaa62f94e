"""What test_docs.py does with the TOML blocks and the commands of a page, in a process of its own."""

import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import tomli
from forkserver import context

ROOT = Path(__file__).parents[3]
RANKS = 8
PACKAGES = {"families.md": "torchtrain_families", "mixture-of-experts.md": "torchtrain_moe"}  # installed on their pages


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run_checks(check: Callable[..., None], folder: Path, *arguments: Any) -> str:
    """Call ``check`` in a process whose working folder is ``folder``; returns its traceback, '' if it raises none."""
    process = context().Process(target=_check_and_exit, args=(check, folder, arguments))
    process.start()
    process.join(120)
    error = folder / "error"
    assert process.exitcode == 0 or error.is_file(), f"exit code {process.exitcode}"
    return error.read_text() if error.is_file() else ""


def _check_and_exit(check: Callable[..., None], folder: Path, arguments: Sequence[Any]) -> None:
    os.chdir(folder)
    try:
        check(*arguments)
    except BaseException:  # and SystemExit, as of an unknown option
        Path("error").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def check_toml(page: Path) -> None:
    """Resolve each TOML block of ``page`` as the config of a run on eight ranks, with the modules of the page."""
    from torchtrain.checkpoint.saved_run import SavedRun
    from torchtrain.config.parse import parse
    from torchtrain.config.run_plan import plan_of
    from torchtrain.config.schema import JobConfig
    from torchtrain.models.spec import DecoderConfig
    from torchtrain.resolve import resolve

    sys.path[:0] = [str(Path.cwd()), str(ROOT / "scripts/families"), str(ROOT / "scripts/moe")]
    texts = blocks(page, "toml")
    imports = [name for text in texts for name in tomli.loads(text).get("job", {}).get("import", ())]
    write_modules(page, imports)

    def resolve_one(own: JobConfig) -> tuple[JobConfig, DecoderConfig]:
        run = resolve(own, RANKS, SavedRun(own))
        return run.config, run.model_config

    for text in texts:
        table = tomli.loads(text)
        if "project" in table:  # of a package of somebody else
            continue
        Path("block.toml").write_text(text)
        options = ["--job.config_file", "block.toml"]
        if page.name in PACKAGES:
            options += ["--job.import", PACKAGES[page.name]]
        plan_of(config := parse(options)).resolve(resolve_one)
        assert set(table) <= {*vars(config), *config.plugins, "stages"}


def write_modules(page: Path, imports: Sequence[str]) -> None:
    """Write the modules that ``page`` defines: a block of code begins with the file's name, or is all of the module."""
    for name in imports:
        path = Path(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        codes = blocks(page, "python")
        own = [code for code in codes if code.startswith(f"# {path}\n")] or codes
        path.write_text("\n".join(own))


def check_commands(commands: Sequence[str]) -> None:
    """Parse the options of those of ``commands`` that train, estimate or prepare, on eight ranks."""
    from torchtrain.config.parse import parse

    sys.path[:0] = [str(Path.cwd()), str(ROOT / "scripts/families"), str(ROOT / "scripts/moe")]
    write_modules(ROOT / "docs/own-architecture.md", ["parallel_block"])
    for package in PACKAGES.values():
        import_module(package)
    for name in ("F", "FILE", "run.toml", "my_texts.toml", "layout.toml", "exclude.jsonl", "list.jsonl"):
        Path(name).write_text("")  # that a command names, or that one before it writes
    for name in ("train_configs", "scripts"):
        Path(name).symlink_to(ROOT / name)
    for command in commands:
        options = options_of_run(command)
        if options is not None:
            parse(options)


PLACEHOLDERS = {"GPUS": "8", "$OPTIONS": "", "s3://my-bucket/run.toml": "run.toml"}
CONFIG_COMMANDS = ("torchtrain.train", "torchtrain.estimate", "torchtrain.prepare", "torchtrain.check")


def options_of_run(command: str) -> list[str] | None:
    """The options in ``command`` that ``config.parse`` reads; None if it does not call it."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command, comments=True)]
    words = [
        word for part in words for word in (shlex.split(part) if part.startswith("python -m ") else [part]) if word
    ]
    for number, word in enumerate(words):
        if word in CONFIG_COMMANDS and words[number - 1] == "-m":
            options = words[number + 1 :]
            return options[1:] if word == "torchtrain.check" else options
        if word.endswith(("run_llama_train.sh", ".slurm")):
            return words[number + 1 :]
        if word == "--" and "scripts/prepare_ray.py" in words:
            return words[number + 1 :]
    return None
