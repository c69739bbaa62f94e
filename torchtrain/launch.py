"""torchrun with the trainer's exit codes: ``python -m torchtrain.launch [its options] -m torchtrain.train ...``.

torchrun exits with 1 for any exit code of a rank, prints a long traceback, and is killed by SIGUSR1, which SLURM sends
before the time limit. This command exits with the exit code of the rank that failed first (128 + number for a signal),
leaves SIGUSR1 to the ranks, and ignores SIGHUP under nohup.
"""

import argparse
import errno
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torchtrain.cli import command, run_and_exit
from torchtrain.config.parse import closest
from torchtrain.errors import ConfigError, HangError, StorageError
from torchtrain.logging import logger, ranges

# Exit codes with which all ranks exit at about the same time: errors that all ranks raise, and stops (docs/faults.md).
SHARED_ENDINGS = (2, 70, 74, 75)
SHARED_ENDING_SECONDS = 5
# A torchrun whose ranks have exited and that cannot reach the rendezvous node waits for it indefinitely. It is ended
# after this time, in which the first rank on another node can finish its last work.
RENDEZVOUS_LOST_SECONDS = 120
SHUTDOWN_SECONDS = 30  # as torchrun's own
REPORT_WAITING_SECONDS = 45


@command
def main(argv: Sequence[str]) -> int:
    """Run torchrun, and return the exit code of the process."""
    # Imported here and below, so that the command reports an error of the import (a limit on address space) as one
    # message.
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    # The ranks inherit this until they install their handler. A SIGUSR1 that arrives before is lost, but not fatal.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    hide = HideExplained()
    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(hide)
    arguments = parse_options(argv)
    try:
        most = parse_min_max_nnodes(arguments.nnodes)[1]
        if min(most, determine_local_world_size(arguments.nproc_per_node)) < 1:
            raise ValueError("at least 1 is needed")
    except (ValueError, RuntimeError) as error:
        logger.error("error: --nnodes %s, --nproc-per-node %s: %s", arguments.nnodes, arguments.nproc_per_node, error)
        return 2
    option, address = rendezvous_address(arguments)
    # Several launchers of one run may share a host, and the first of them has the port.
    if most == 1 and arguments.rdzv_backend == "c10d" and port_is_taken(address):
        return reject_port(option, address)
    if most > 1:
        # A new store for each restart, since the shared store has the addresses of dead ranks. A single node does not
        # need it (init_process_group), and the port of such a store may be taken by the time it is bound.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        threading.Thread(target=report_waiting, args=(arguments, most), daemon=True).start()
    # With restarts, torchrun may wait for nodes that rejoin. On macOS, Python has waitid since 3.13.
    if arguments.max_restarts == 0 and hasattr(os, "waitid"):
        threading.Thread(target=exit_if_rendezvous_lost, daemon=True).start()
    return run_ranks(arguments, most, option, address)


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The options of torchrun in ``argv``."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog, parser.description = "python -m torchtrain.launch", (__doc__ or "").replace("``", "")
    parser.error = reject_options  # type: ignore[method-assign]  # argparse would print the usage of all options
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        near = closest(unknown[0], re.findall(r"--[a-z-]+", parser.format_usage()))
        reject_options(f"{unknown[0]} is not a known option{f'; did you mean {near!r}?' if near else ''}")
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup; torchrun would handle it nevertheless
        signals = [name.strip() for name in arguments.signals_to_handle.split(",")]
        arguments.signals_to_handle = ",".join(name for name in signals if name != "SIGHUP")
    return arguments


def run_ranks(arguments: argparse.Namespace, most: int, option: str, address: str) -> int:
    """Run torchrun on up to ``most`` nodes, and return the exit code of the process; its errors become messages.

    ``option``, ``address``: where the nodes meet.
    """
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
    from torch.distributed.run import run

    try:
        run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return exit_code_of(error, most)
    except SignalException as error:
        terminate_remaining_ranks(error.sigval.value)
        return 128 + error.sigval.value
    except OSError as error:
        # Errors of a path, such as a full /tmp or a --log-dir that is a file; others are errors of the network.
        if not error.filename and not isinstance(error, (NotADirectoryError, FileNotFoundError)):
            raise
        logger.error("error: %s", error)
        return 2
    except (RendezvousError, DistNetworkError, DistStoreError) as error:  # the latter with a stack of C++ frames
        is_taken = isinstance(error, RendezvousConnectionError) and port_is_taken(address)
        if is_taken or "EADDRINUSE" in str(error):
            return reject_port(option, address)
        logger.error("error: the nodes did not meet, or lost each other: %s", str(error).splitlines()[0])
        return 1
    return 0


def exit_code_of(error: Any, most: int) -> int:
    """The exit code for the first rank that failed, by torchrun's ``ChildFailedError``; logs what ended the rank."""
    rank, failure = error.get_first_failure()
    hang = hang_report(error.failures.values())
    if hang and (failure.exitcode < 0 or failure.exitcode == HangError.exit_code):  # NCCL aborts the process
        # Once more, as the last line: a rank that hangs is killed 30 s after the others have ended.
        logger.error("error: %s", hang)
        failure.exitcode = HangError.exit_code
    if failure.exitcode < 0:
        memory = ": perhaps for lack of memory on its host" if failure.exitcode == -signal.SIGKILL else ""
        logger.error("rank %d was ended by signal %d (%s)%s", rank, -failure.exitcode, failure.signal_name(), memory)
        return int(128 - failure.exitcode)
    if failure.exitcode in SHARED_ENDINGS and most > 1:
        # srun --kill-on-bad-exit kills the other nodes when the first one exits: wait until they have come here,
        # too, and keep the exit code if the signal arrives before.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(SHARED_ENDING_SECONDS)
    return int(failure.exitcode)


def hang_report(failures: Iterable[Any]) -> str:
    """What the watchdog of a rank has left in torchrun's error file (``fault_tolerance/watchdog.py``); "" without."""
    for failure in failures:
        if isinstance(failure.message, dict):
            kind, _, text = failure.message["message"].partition(": ")
            if kind == HangError.__name__:
                return str(text)
    return ""


class HideExplained(logging.Filter):
    """Hides torchrun's messages about what the ranks explain themselves: their exit codes, and a signal to the job."""

    is_stopping = False

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        code = re.search(r"\(exitcode: (\d+)\)", message)
        if code is not None:
            return int(code[1]) not in SHARED_ENDINGS
        if "death signal" in message:
            self.is_stopping = True  # and forwards the signal to each rank
            return False
        return not (self.is_stopping and "closing signal" in message)


def terminate_remaining_ranks(number: int) -> None:
    """Forward the signal to ranks that torchrun was starting when it arrived, which torchrun does not terminate."""
    # Each rank is the leader of a session; other children are not.
    ranks = [pid for pid in child_processes() if os.getsid(pid) == pid]
    for sent, grace_seconds in ((number, SHUTDOWN_SECONDS), (signal.SIGKILL, 1)):
        for pid in ranks:
            os.kill(pid, sent)
        deadline = time.monotonic() + grace_seconds
        while ranks and time.monotonic() < deadline:
            ranks = [pid for pid in ranks if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            time.sleep(0.1)


def reject_options(message: str) -> NoReturn:
    """Raise ConfigError about options of torchrun that are missing or invalid."""
    raise ConfigError(
        f"torchrun: {message}; such as python -m torchtrain.launch --nproc-per-node 8 -m torchtrain.train "
        "--job.config_file F; see --help"
    )


def rendezvous_address(arguments: Any) -> tuple[str, str]:
    """The option of torchrun that sets the port of the rendezvous, and its host and port."""
    if arguments.rdzv_backend == "static":
        return "--master-port", f"{arguments.master_addr}:{arguments.master_port}"
    return "--rdzv-endpoint HOST:PORT", arguments.rdzv_endpoint


def reject_port(option: str, address: str) -> int:
    """Log that the port of ``address`` is taken, and ``option``, which sets it; returns the exit code."""
    logger.error(
        "error: port %s of this host is taken, by another job or program: give another one by %s, the same on all "
        "nodes",
        *(address.rpartition(":")[2], option),
    )
    return StorageError.exit_code


def port_is_taken(address: str) -> bool:
    """Whether the host of ``address`` is this one, and a process listens on its port; 0 selects a free one."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError):  # such as a host that is unknown
        for family, kind, protocol, _, bound in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not taken by connections that have ended
                try:
                    probe.bind(bound)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        return True
    return False


def report_waiting(arguments: Any, nodes: int) -> None:
    """Log what this one of ``nodes`` waits for, if it has not started its ranks after ``REPORT_WAITING_SECONDS``."""
    static = arguments.rdzv_backend == "static"
    address = rendezvous_address(arguments)[1]
    deadline = time.monotonic() + REPORT_WAITING_SECONDS
    arrivals = Arrivals(arguments.node_rank, nodes, address) if static else None
    if arrivals is not None:
        arrivals.join(deadline)
    time.sleep(max(deadline - time.monotonic(), 0))
    if not Path("/proc/self").exists() or child_processes():
        return
    who = f"node rank {arguments.node_rank} of {arguments.nnodes}" if static else f"one of {arguments.nnodes} nodes"
    logger.warning(
        "host %s, %s, has waited for %d s for the other nodes, at %s%s: is that the host of node rank 0, do all nodes "
        "reach it, and has each started this command?",
        *(socket.gethostname(), who, REPORT_WAITING_SECONDS, address, f" ({arrivals})" if arrivals else ""),
    )


class Arrivals:
    """The node ranks whose launchers have reached torchrun's store at ``address``, in which each leaves its number."""

    def __init__(self, node_rank: int, nodes: int, address: str) -> None:
        self.node_rank, self.nodes, self.address = node_rank, nodes, address
        self._store: Any = None

    def join(self, deadline: float) -> None:
        """Wait for the store until ``deadline``, of ``time.monotonic``."""
        from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # documented

        host, _, port = self.address.rpartition(":")
        while time.monotonic() < deadline:
            # Without the probe, the store would log each second that nothing listens, as torchrun's own does.
            with suppress(OSError, DistError), socket.create_connection((host, int(port)), timeout=5):
                self._store = TCPStore(host, int(port), wait_for_workers=False, timeout=timedelta(seconds=5))
                self._store.set(_arrival(self.node_rank), "")
                return
            time.sleep(0.5)

    def __str__(self) -> str:
        from torch.distributed import DistError

        if self._store is None:
            return "nothing listens there"
        try:
            missing = [rank for rank in range(self.nodes) if not self._store.check([_arrival(rank)])]
        except DistError:
            return "it answers no longer"
        return f"{self.nodes - len(missing)} of {self.nodes} nodes have come, missing: node rank {ranges(missing)}"


def _arrival(node_rank: int) -> str:
    return f"torchtrain/node/{node_rank}"


def child_processes() -> list[int]:
    """The children of this process; none where there is no /proc."""
    return [int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]


def exit_if_rendezvous_lost() -> None:
    """Exit this process if its ranks have exited and torchrun has not noticed for ``RENDEZVOUS_LOST_SECONDS``."""
    last_seen = None
    while last_seen is None or time.monotonic() < last_seen + RENDEZVOUS_LOST_SECONDS:
        time.sleep(1)
        try:
            # WNOWAIT leaves the exit code to torchrun, which polls for it ten times per second unless it hangs.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        if ended is None:
            last_seen = time.monotonic()
    logger.error("error: the ranks of this node have ended, and the rendezvous node does not answer")
    os._exit(1)


if __name__ == "__main__":
    run_and_exit(main)
