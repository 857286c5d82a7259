"""Hosts on this machine, for tests: see `gradsync.cli.chaos.hosts`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from gradsync.cli.chaos.hosts import Host, NotAllowed, make_hosts

__all__ = ["Host", "hosts_or_skip"]


@contextmanager
def hosts_or_skip(count: int) -> Iterator[list[Host]]:
    """For a fixture: where there can be none, its tests are skipped, and say why."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(make_hosts(count))
        except NotAllowed as reason:
            pytest.skip(f"no network namespaces can be made here: {reason}")
        yield made
