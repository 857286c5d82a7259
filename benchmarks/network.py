"""Several hosts on this machine: network namespaces with a cable each to a common switch, at a given speed.

Made by `ip` and `tc`, which need root; gone when the context ends. Ranks in different namespaces can't reach each
other but through the network, as on different machines, though they share the machine's cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import TracebackType

from gradsync.cli.launch import Rank, Ranks, environment, start_rank

INTERFACE = "cable"
PORT = 29500  # each host has all ports to itself


class NoNetwork(Exception):
    """Namespaces can't be made here; the text says why."""


class Network:
    """`hosts` namespaces and a switch, as a context."""

    def __init__(self, hosts: int, rate: str | None = None) -> None:
        """`rate` as `tc` writes it, for example 1gbit; None: as fast as it goes."""
        self.hosts = [f"gradsync-{os.getpid()}-{number}" for number in range(hosts)]
        self._switch = f"gradsync-{os.getpid()}-switch"
        self._rate = rate

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """A cable goes with either of its ends."""
        for name in (*self.hosts, self._switch):
            with suppress(NoNetwork):
                _run("ip", "netns", "delete", name)

    @staticmethod
    def address(host: int) -> str:
        return f"10.213.77.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """The command that runs another one on a host."""
        return ["ip", "netns", "exec", self.hosts[host]]

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "switch", "up")
        for number, host in enumerate(self.hosts):
            port = f"port{number}"
            _run("ip", "netns", "add", host)
            peer = ["type", "veth", "peer", "name", port, "netns", self._switch]
            _run("ip", "-n", host, "link", "add", INTERFACE, *peer)
            _run("ip", "-n", host, "address", "add", f"{self.address(number)}/24", "dev", INTERFACE)
            _run("ip", "-n", host, "link", "set", INTERFACE, "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")
            _run("ip", "-n", self._switch, "link", "set", port, "master", "switch")
            _run("ip", "-n", self._switch, "link", "set", port, "up")
            if self._rate is not None:  # both directions: what a side sends
                limit = ["root", "tbf", "rate", self._rate, "burst", "256kb", "latency", "100ms"]
                _run("tc", "-n", host, "qdisc", "add", "dev", INTERFACE, *limit)
                _run("tc", "-n", self._switch, "qdisc", "add", "dev", port, *limit)


class HostRanks(Ranks):
    """Ranks on several hosts, those of one host together."""

    def __init__(self, module: str, arguments: Sequence[str], *, network: Network, ranks: int) -> None:
        self._network = network
        super().__init__(module, arguments, ranks=ranks)

    def _start(self, module: str, arguments: Sequence[str], ranks: int, port: int) -> Iterator[Rank]:
        a_host = ranks // len(self._network.hosts)
        for rank in range(ranks):
            variables = {
                **environment(rank, ranks, PORT),
                "MASTER_ADDR": self._network.address(0),
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "LOCAL_RANK": str(rank % a_host),
                "LOCAL_WORLD_SIZE": str(a_host),
            }
            yield start_rank(rank, variables, module, arguments, self._network.inside(rank // a_host))


def _run(*command: str) -> None:
    if shutil.which(command[0]) is None:
        raise NoNetwork(f"`{command[0]}` was not found: install iproute2")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoNetwork(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
