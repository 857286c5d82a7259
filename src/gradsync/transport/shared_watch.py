"""One watch for all replicas over the same ranks: they take the one that they have in common already, or make one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from gradsync._torch import Store
from gradsync.transport import addresses
from gradsync.transport.membership import Membership
from gradsync.transport.store import Board
from gradsync.watch import settings
from gradsync.watch import watch as watches
from gradsync.watch.watch import Watch

# By the ranks of their group, and a name that all of those have for it; for as long as a transport uses it.
_watches: weakref.WeakValueDictionary[str, Watch] = weakref.WeakValueDictionary()


class Offer(NamedTuple):
    """What a rank says of itself before."""

    place: str
    """Where it runs."""
    is_wanted: bool
    """Whether it wants a watch. If one does not, none has it."""
    names: tuple[str, ...]
    """Of those that it has with the ranks of this group already."""
    token: str
    """A new one, if it is rank 0's, is named by this."""


def reusable(member: Membership) -> dict[str, Watch]:
    """Those over the same ranks. To be held until all have chosen: what a rank says it has, it must still have then."""
    key = _key(member)
    return {name: one for name, one in _watches.items() if name.startswith(key) and one.is_reusable_by(member.rank)}


def over_same_ranks(member: Membership) -> list[Watch]:
    """Also those of which a rank is lost already: they know why."""
    key = _key(member)
    return [one for name, one in _watches.items() if name.startswith(key) and one.rank == member.rank]


def forget() -> None:
    """Ranks are other processes from now on: what a watch knows of rank 2 is of another one."""
    _watches.clear()


def join(
    member: Membership,
    store: Store,
    number: int,
    offers: Sequence[Offer],
    mine: Mapping[str, Watch],
    check: Callable[[], None],
) -> Watch | None:
    """All ranks together, with what all have offered; None if it can't be had. `mine`: what `reusable` gave.

    `number`: how often the ranks have done so before. `check`: raises if it has become pointless.
    """
    settings.explain_after()  # raises if it makes no sense, not when it is needed
    if not all(one.is_wanted for one in offers):
        return None
    if names := set.intersection(*(set(one.names) for one in offers)):
        return mine[min(names)]
    hosts: dict[str, list[int]] = {}
    for rank, one in enumerate(offers):
        hosts.setdefault(one.place, []).append(rank)
    made = watches.connect(
        Board(store, check),
        f"watch/{number}",
        member.rank,
        list(hosts.values()),
        lambda: addresses.of_this_host(store),
    )
    if made is not None:
        _watches[_key(member) + offers[0].token] = made
    return made


def _key(member: Membership) -> str:
    return f"{dist.get_process_group_ranks(member.group)}/"
