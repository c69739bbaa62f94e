"""Network namespaces, each of which stands for a machine of its own."""

import ctypes
import os
import shutil
import signal
import socket
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


@contextmanager
def bridged_namespaces(names: Sequence[str], bridge: str, subnet: str) -> Iterator[None]:
    """``network_namespaces`` on a bridge with the address ``subnet``.254; theirs are ``subnet``.1, .2, ...

    Args:
        bridge: name of the device, of at most 13 characters, of no other test.
        subnet: three numbers, such as "10.78.0", of no other test.
    """
    outside = [f"{bridge}-{node}" for node in range(len(names))]
    with network_namespaces(names):
        try:
            ip("link", "add", bridge, "type", "bridge")
            ip("addr", "add", f"{subnet}.254/24", "dev", bridge)
            ip("link", "set", bridge, "up")
            for node, namespace in enumerate(names):
                ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", outside[node])
                ip("link", "set", outside[node], "master", bridge, "up")
                ip("-n", namespace, "addr", "add", f"{subnet}.{node + 1}/24", "dev", "eth0")
                ip("-n", namespace, "link", "set", "eth0", "up")
            yield
        finally:
            for device in (*outside, bridge):  # a pair otherwise exists as long as a process is in its namespace
                subprocess.run(["ip", "link", "del", device], capture_output=True)


def enter_namespace(name: str, hostname: str) -> None:
    """Move this thread, and those that it starts, to a network namespace, with a host name of their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as file:
        for code in (libc.setns(file.fileno(), 0x40000000), libc.unshare(0x04000000)):  # CLONE_NEWNET, CLONE_NEWUTS
            if code != 0:
                raise OSError(ctypes.get_errno(), f"namespace {name}")
    socket.sethostname(hostname)


def kill_all_in(namespace: str) -> None:
    """Kill all processes in a network namespace."""
    pids = subprocess.run(["ip", "netns", "pids", namespace], check=True, capture_output=True, text=True).stdout
    for pid in map(int, pids.split()):
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)
