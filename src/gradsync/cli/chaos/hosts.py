"""Hosts on this machine: network namespaces, each with an address of its own, connected by a bridge.

    host 0          host 1          host 2
    eth0 10.77.0.1  eth0 10.77.0.2  eth0 10.77.0.3
       └────────────────┼────────────────┘
                    hub (br0)

A process belongs to a host once it has called `enter`. Abstract Unix sockets end at a namespace, so that processes on
two hosts share no more than processes on two machines do.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gradsync.cli import kernel

_FOLDER = Path("/run/netns")
_PREFIX = "gradsync-hosts"
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class NotAllowed(Exception):
    """This machine does not let us make hosts; the text says why."""


@dataclass(frozen=True)
class Host:
    """One of them. Plain values, so that it travels to ranks."""

    namespace: str
    address: str
    interface: str = "eth0"

    def enter(self) -> None:
        """Moves this process, as long as it has one thread, to the host."""
        descriptor = os.open(_FOLDER / self.namespace, os.O_RDONLY)
        try:
            if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"can't enter {self.namespace}")
        finally:
            os.close(descriptor)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    def set_link(self, is_up: bool) -> None:
        """The only one it has to others: down, nothing goes in or out, as when the host has no power."""
        _ip("-n", self.namespace, "link", "set", self.interface, "up" if is_up else "down")


@contextmanager
def make_hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts, gone at the end, whatever happens. Raises `NotAllowed`."""
    _remove(lambda pid: not kernel.is_running(pid))  # of test runs that were killed
    mine = f"{_PREFIX}-{os.getpid()}"
    try:
        yield _make(mine, count)
    finally:
        _remove(lambda pid: pid == os.getpid())


def _make(mine: str, count: int) -> list[Host]:
    hub = f"{mine}-hub"
    _ip("netns", "add", hub)
    _ip("-n", hub, "link", "add", "br0", "type", "bridge")
    _ip("-n", hub, "link", "set", "br0", "up")
    hosts = [Host(f"{mine}-{number}", f"10.77.0.{number + 1}") for number in range(count)]
    for number, host in enumerate(hosts):
        _ip("netns", "add", host.namespace)
        _ip("-n", hub, *f"link add port{number} type veth peer name eth0 netns {host.namespace}".split())
        _ip("-n", hub, *f"link set port{number} master br0 up".split())
        _ip("-n", host.namespace, *f"address add {host.address}/24 dev eth0".split())
        _ip("-n", host.namespace, *["link", "set", "eth0", "up"])
        _ip("-n", host.namespace, *["link", "set", "lo", "up"])
    return hosts


def _remove(whose: Callable[[int], bool]) -> None:
    for path in _FOLDER.glob(f"{_PREFIX}-*-*"):
        if whose(int(path.name.split("-")[2])):
            with suppress(NotAllowed):
                _ip("netns", "delete", path.name)


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotAllowed("there is no `ip`: install iproute2") from None
    if done.returncode != 0:
        raise NotAllowed(f"ip {' '.join(words)}: {done.stderr.strip()}")
