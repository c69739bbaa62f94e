"""Network namespaces, each of which stands for a machine of its own."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def network_namespaces(names: Sequence[str]) -> Iterator[None]:
    """Create network namespaces, and remove them with their processes. The test is skipped if that is not possible."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip of iproute2")
    created = []
    try:
        for name in names:
            result = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if result.returncode != 0:
                pytest.skip(f"network namespaces are not available: {result.stderr}")
            created.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in created:
            kill_all_in(name)
            ip("netns", "del", name)


def kill_all_in(namespace: str) -> None:
    """Kill all processes in a network namespace."""
    pids = subprocess.run(["ip", "netns", "pids", namespace], check=True, capture_output=True, text=True).stdout
    for pid in map(int, pids.split()):
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)
