"""Under which address other hosts reach this one."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from torch._C._distributed_c10d import HashStore

from gradsync.transport import addresses


def test_that_of_the_interface_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert addresses.of_this_host(HashStore()) == "127.0.0.1"


@pytest.mark.parametrize("interface", ["", "there-is-none"])
def test_one_that_can_be_listened_on(monkeypatch: pytest.MonkeyPatch, interface: str) -> None:
    """Whatever it is, it is this host's, and not all of its addresses at once."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    found = addresses.of_this_host(HashStore())
    assert not ipaddress.ip_address(found).is_unspecified
    family = socket.AF_INET6 if ":" in found else socket.AF_INET
    socket.create_server((found, 0), family=family).close()


def test_others_go_before_one_that_only_this_host_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(addresses, "_candidates", lambda host: iter(["0.0.0.0", "127.0.0.1", "10.1.2.3", "10.4.5.6"]))
    assert addresses.of_this_host(HashStore()) == "10.1.2.3"
    monkeypatch.setattr(addresses, "_candidates", lambda host: iter(["0.0.0.0", "::1"]))
    assert addresses.of_this_host(HashStore()) == "::1"
    monkeypatch.setattr(addresses, "_candidates", lambda host: iter(["0.0.0.0"]))
    with pytest.raises(OSError, match="set GLOO_SOCKET_IFNAME"):
        addresses.of_this_host(HashStore())
