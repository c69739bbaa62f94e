"""An interpreter for ``PYTHON_EXEC`` of torchrun: it runs a rank in a forked process that has imported torch.

shim    The program that torchrun starts. It sends its arguments, environment, open files and signals to the server.
server  The process that runs ``serve``. It forks one guard for each shim.
guard   It forks the rank, forwards signals to it and its exit code to the shim, and kills the rank if the shim dies.
"""

import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from forked_command import run_program
from forkserver import context

SHIM = """#!{python} -ISE
import json, os, signal, socket, struct, sys
program, *arguments = [a for a in sys.argv[1:] if a not in ("-u", "-m")]
guard = socket.socket(socket.AF_UNIX)
guard.connect({address!r})
fatal = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
ignored = [number for number in fatal if signal.getsignal(number) == signal.SIG_IGN]
for number in fatal:
    signal.signal(number, lambda number, _: guard.sendall(bytes([number])))
request = json.dumps([program, arguments, dict(os.environ), os.getcwd(), ignored]).encode()
socket.send_fds(guard, [struct.pack("i", len(request))], [0, 1, 2])
guard.sendall(request)
code = struct.unpack("i", guard.recv(4, socket.MSG_WAITALL))[0]
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def start(folder: Path) -> Path:
    """Start the server; returns the path of the shim, in ``folder``."""
    shim, address = folder / "python", str(folder / "socket")
    shim.write_text(SHIM.format(python=sys.executable, address=address))
    shim.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    context().Process(target=serve, args=(listener,), daemon=True).start()
    listener.close()
    return shim


def serve(listener: socket.socket) -> None:
    while True:
        shim, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            guard(shim)
        shim.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def guard(shim: socket.socket) -> None:
    size, files, _, _ = socket.recv_fds(shim, 4, 3)
    request = json.loads(shim.recv(struct.unpack("i", size)[0], socket.MSG_WAITALL))
    rank = os.fork()
    if rank == 0:
        shim.close()
        run(files, *request)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(rank)
    while ended not in select.select([shim, ended], [], [])[0]:
        for number in shim.recv(16) or [signal.SIGKILL]:
            os.kill(rank, number)
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    with suppress(BrokenPipeError):
        shim.sendall(struct.pack("i", code))
    os._exit(0)


def run(
    files: list[int], program: str, arguments: list[str], variables: dict[str, str], cwd: str, ignored: list[int]
) -> NoReturn:
    """Run the rank's program in this process; does not return."""
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    os.chdir(cwd)
    os.environ.clear()
    run_program(program, arguments, variables)
