"""Under which address the other hosts reach this one."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from gradsync import _torch
from gradsync._torch import Store

INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # nothing is sent to it


def of_this_host(store: Store) -> str:
    """That of the interface that gloo was told to use, else of the one that leads to the store, else by its name.

    An address that only this host knows (127.0.0.1) is taken if there is no other.
    """
    if (name := os.environ.get(INTERFACE, "").split(",")[0].strip()) and (found := _of_interface(name)):
        return found
    candidates = [one for one in _candidates(_torch.host_of(store)) if not ipaddress.ip_address(one).is_unspecified]
    beyond = [one for one in candidates if not ipaddress.ip_address(one).is_loopback]
    if not candidates:
        raise OSError(f"no address of this host can be found: set {INTERFACE}")
    return (beyond or candidates)[0]


def _candidates(store_host: str) -> Iterator[str]:
    for name in (store_host, os.environ.get("MASTER_ADDR", "")):
        if name:
            yield from _leading_to(name)
    yield from _resolved(socket.gethostname())


def _leading_to(name: str) -> Iterator[str]:
    """The local end of a way to that host. Connecting a datagram socket sends nothing."""
    for address in _resolved(name):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))
            yield probe.getsockname()[0]


def _resolved(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]).partition("%")[0] for *_, address in found]


def _of_interface(name: str) -> str:
    """Its address; "" if it has none, or there is no such interface."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, _, _, scope, _, interface = line.split()
            if interface == name and scope != "20":  # which is valid on one link only
                return str(ipaddress.ip_address(int(address, 16)))
    return ""
