"""Draw docs/terminal.svg: what a terminal shows of the command in the README, from a run of it.

    python scripts/docs/draw_terminal.py [PICTURE]     default: docs/terminal.svg

It needs rich, takes about two minutes on two CPU cores, and leaves the run in outputs/debug_model, which must not exist
before.
"""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parent.parent.parent
COLUMNS = 118
COMMAND = "./run_llama_train.sh"


def output() -> str:
    """What ``COMMAND`` writes to a terminal."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHON": sys.executable}
    process = subprocess.Popen([COMMAND], cwd=ROOT, stdout=end, stderr=end, env=environment)
    os.close(end)
    written = b""
    with suppress(OSError):  # when the last process has closed the terminal
        while block := os.read(terminal, 1 << 16):
            written += block
    assert process.wait() == 0, written.decode()
    return written.decode()


def main(picture: str = "docs/terminal.svg") -> None:
    run = ROOT / "outputs" / "debug_model"
    if run.exists():
        sys.exit(f"error: {run} exists, so that the command would resume it; move it away")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), legacy_windows=False)
    console.print(f"[bold green]$[/] {COMMAND}", highlight=False)
    for line in output().replace("\r\n", "\n").rstrip().split("\n"):
        console.print(Text.from_ansi(line.rpartition("\r")[2]), no_wrap=True, overflow="crop")
    console.save_svg(picture, title="torchtrain", theme=MONOKAI)


if __name__ == "__main__":
    main(*sys.argv[1:])
