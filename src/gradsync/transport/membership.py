"""This rank in a process group, as far as that needs no collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from gradsync import _torch, restarts
from gradsync._torch import Store
from gradsync.transport.store import exchange


class Membership:
    """Who this rank is among the ranks of a group, and what they tell each other through the group's store."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.limit = _torch.timeout_of(group).total_seconds()

    @property
    def store(self) -> Store:
        """Through which the group's ranks met; a group that c10d did not make has none."""
        return restarts.apart(_torch.store_of(self.group))

    def next_number(self, what: str) -> int:
        """Counts from 1 on, in the life of the group's store; the same on all ranks, which all ask equally often."""
        return self.store.add(f"gradsync/{what}/{self.rank}", 1)

    def exchange(
        self,
        topic: str,
        text: str,
        limit: float | None = None,
        check: Callable[[], None] | None = None,
        explain: Callable[[Callable[[], Sequence[int]]], None] | None = None,
    ) -> list[str]:
        """Every rank's text on a topic. `check`: raises if waiting for it has become pointless; `explain`: says for
        whom, if that takes long."""
        limit = self.limit if limit is None else limit
        return exchange(self.store, topic, self.rank, self.size, text, limit, check, explain)
