"""Draw what a terminal shows of a run: of the command in the README, or of a replica while another one is killed.

    python scripts/docs/draw_terminal.py                docs/terminal.svg, in about two minutes on two CPU cores
    python scripts/docs/draw_terminal.py replicas       docs/replica.svg, in about three, with the extra elastic

It needs rich. The first one leaves the run in outputs/debug_model, which must not exist before.
"""

import fcntl
import io
import os
import pty
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parent.parent.parent
COLUMNS = 118
COMMAND = "./run_llama_train.sh"
PROMPT = "\033[1;32m$\033[0m "


def record(
    command: Sequence[str], environment: Mapping[str, str], after_line: Callable[[str], list[str]] = lambda _: []
) -> list[str]:
    """The lines that ``command`` writes to a terminal, each followed by those that ``after_line`` returns for it."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    variables = {**os.environ, "TERM": "xterm-256color", "PYTHON": sys.executable, **environment}
    process = subprocess.Popen(command, cwd=ROOT, stdout=end, stderr=end, env=variables)
    os.close(end)
    lines: list[str] = []
    with suppress(OSError), os.fdopen(terminal, encoding="utf-8", newline="\n") as screen:  # ends with the process
        for text in screen:
            line = text.rstrip("\r\n").rpartition("\r")[2]
            lines += [line, *after_line(line)]
    assert process.wait() == 0, "\n".join(lines)
    return lines


def draw(lines: Sequence[str], picture: str, title: str) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), legacy_windows=False)
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, overflow="crop")
    console.save_svg(picture, title=title, theme=MONOKAI)


def draw_command(picture: str) -> None:
    run = ROOT / "outputs" / "debug_model"
    if run.exists():
        sys.exit(f"error: {run} exists, so that the command would resume it; move it away")
    draw([f"{PROMPT}{COMMAND}", *record([COMMAND], {})], picture, "torchtrain")


def draw_replicas(picture: str) -> None:
    """The terminal of the first of two replicas; the second one is killed and started again meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # Without the stack of the connection that PyTorch loses.
    environment = {"NGPU": "1", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder:
        shown = ["--training.sums", "exact", "--training.global_batch_size", "8"]
        hidden = [
            *("--training.local_batch_size", "4", "--training.steps", "60", "--metrics.log_freq", "4"),
            *("--data.held_out", "0", "--job.dump_folder", f"{folder}/replicas", "--report.no-enable"),
            *("--replicas.lighthouse", f"http://127.0.0.1:{port}", "--replicas.host", "127.0.0.1"),
        ]
        replicas: list[subprocess.Popen[bytes]] = []

        def start_second() -> None:
            command = [sys.executable, "-m", "torchtrain.train", "--job.config_file", "train_configs/debug_model.toml"]
            with open(f"{folder}/second.log", "ab") as log:
                replicas.append(
                    subprocess.Popen(
                        [*command, *shown, *hidden, "--replicas.id", "1"],
                        cwd=ROOT,
                        env={**os.environ, **environment},
                        stdout=log,
                        stderr=log,
                    )
                )

        def kill_and_restart(line: str) -> list[str]:
            if "importing PyTorch" in line:
                start_second()
            if "step 20/60" in line:
                replicas[0].kill()
                return [f"{PROMPT}\033[1mkill -9 {replicas[0].pid}   # replica 1\033[0m"]
            if " has left after step" in line and len(replicas) == 1:
                start_second()
                return [f"{PROMPT}\033[1m{COMMAND} $OPTIONS --replicas.id 1 &   # again\033[0m"]
            return []

        lighthouse = subprocess.Popen(
            ["torchft_lighthouse", "--min_replicas", "1", "--bind", f"127.0.0.1:{port}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            first = [COMMAND, *shown, *hidden, "--replicas.id", "0"]
            lines = record(first, environment, kill_and_restart)
        finally:
            for process in (*replicas, lighthouse):
                process.kill()
        lines = [line.replace(f"{folder}/", "outputs/") for line in lines]
        first_lines = [
            f"{PROMPT}export TORCH_CPP_LOG_LEVEL=ERROR",
            f'{PROMPT}OPTIONS="{" ".join(shown)} --replicas.lighthouse http://127.0.0.1:29510"',
            f"{PROMPT}{COMMAND} $OPTIONS --replicas.id 1 &",
            f"{PROMPT}{COMMAND} $OPTIONS --replicas.id 0",
        ]
        draw([*first_lines, *lines], picture, "two replicas of a run, of which one is killed")


def main(name: str = "terminal", picture: str = "") -> None:
    if name == "replicas":
        draw_replicas(picture or "docs/replica.svg")
    else:
        draw_command(picture or "docs/terminal.svg")


if __name__ == "__main__":
    main(*sys.argv[1:])
