"""Which transport carries the buckets of a group: what was asked for, else the fastest that all ranks can use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import get_args

import torch.distributed as dist
from torch import Tensor

from gradsync import _torch, log
from gradsync.errors import InvalidOptionError, SharedMemoryError
from gradsync.options import TransportChoice
from gradsync.transport import devices
from gradsync.transport.base import Transport
from gradsync.transport.bridge import Bridge
from gradsync.transport.hierarchical import HierarchicalTransport
from gradsync.transport.host_memory import HostMemory
from gradsync.transport.late_watch import LateWatch
from gradsync.transport.link import listed
from gradsync.transport.membership import Membership
from gradsync.transport.process_group import ProcessGroupTransport
from gradsync.transport.rendezvous import Rendezvous, check_same_init_sync, ranks_by, rendezvous, skip_rendezvous
from gradsync.transport.shared_memory import SharedMemoryTransport
from gradsync.watch import settings

CHOICES: tuple[str, ...] = get_args(TransportChoice)
VARIABLE = "GRADSYNC_TRANSPORT"
_log = log.logger()


def choose(
    group: dist.ProcessGroup,
    requested: str,
    tensors: Iterable[Tensor],
    dedicated: bool = True,
    may_communicate: bool = True,
    init_sync: str = "",
    alone: bool = False,
    must: bool = True,
) -> Transport:
    """A transport for `group` and such tensors. All ranks call this together, and all get the same kind.

    `dedicated`: with connections of its own, see `dedicated_group.py`. `may_communicate`: whether ranks may do so now;
    if not, "auto" is the process group. `init_sync`: the option, which must be the same on all ranks. `alone`: the
    other ranks may not call this at all. `must`: raise if these ranks can't have what was asked for.
    """
    tensors = list(tensors)
    devices.check_current(group, tensors)
    if requested == "auto" and may_communicate:
        requested = os.environ.get(VARIABLE) or requested
    member = Membership(group)
    has_store = _torch.knows(group)
    if not may_communicate and requested in ("auto", "process_group"):  # which need no rendezvous
        reason = "nothing may be communicated while the replica is made" if requested == "auto" else "asked for"
        is_awaited = not alone and member.size > 1 and has_store
        skipped = skip_rendezvous(member, init_sync) if is_awaited else None
        if skipped is None:
            return ProcessGroupTransport(group, reason)
        late = LateWatch(member, skipped.number)
        return ProcessGroupTransport(group, reason, check_rendezvous=skipped.check, late_watch=late)
    if member.size == 1 or not has_store:
        _check(member.rank, requested)
        reason = "there is one rank" if member.size == 1 else "the process group has no store to meet through"
        if requested in ("shared_memory", "hierarchical") and member.size > 1:
            raise SharedMemoryError(f"rank {member.rank}: transport={requested!r} can't be had: {reason}")
        if member.size > 1:
            _say_unwatched(member, reason)
        return ProcessGroupTransport(group, reason)
    elsewhere = sorted({tensor.device.type for tensor in tensors} - {"cpu"})
    obstacle = f"has parameters on {', '.join(elsewhere)}" if elsewhere else ""
    with rendezvous(
        member,
        requested=requested,
        obstacle=obstacle,
        init_sync=init_sync,
        on_cpu=not elsewhere,
        devices=devices.describe(tensors),
    ) as come:
        return _choose_together(member, come, requested, dedicated, must)


_said: set[str] = set()


def _say_unwatched(member: Membership, why: str) -> None:
    """Once in a process, not for each replica."""
    if member.rank == 0 and settings.is_wanted() and why not in _said:
        _said.add(why)
        _log.warning(
            "there is no watch between the ranks: %s. Ranks that are lost or stuck are told by the process group's own "
            "errors and time limits only",
            why,
        )


def _choose_together(member: Membership, come: Rendezvous, requested: str, dedicated: bool, must: bool) -> Transport:
    """By what all ranks know of each other, so that all choose the same."""
    check_same_init_sync(member.rank, [one.init_sync for one in come.announcements])
    everyone = come.announcements
    devices.check_own(member.group, [one.place for one in everyone], [one.devices for one in everyone])
    by_request = ranks_by([one.requested for one in come.announcements])
    if len(by_request) > 1:
        found = ", ".join(f"{text!r} on rank {listed(ranks)}" for text, ranks in by_request.items())
        raise InvalidOptionError(f"rank {member.rank}: all ranks must ask for the same transport, but it is {found}.")
    _check(member.rank, requested)
    come.connect_watch()
    reason = "asked for" if requested == "process_group" else _why_not_shared(come, requested)
    is_surprising = any(one.is_surprising for one in come.announcements)
    if not reason:
        memory, reason = come.connect()
        if memory is not None:
            return _over_memory(member, come, memory, requested, dedicated)
        is_surprising = True
    is_refused = requested not in ("auto", "process_group")
    if is_refused and must:
        raise SharedMemoryError(f"rank {member.rank}: transport={requested!r} can't be had: {reason}.")
    if member.rank == 0 and (is_refused or (requested == "auto" and is_surprising)):
        _log.warning("buckets travel through the process group, not through shared memory: %s", reason)
    return _over_group(member, come, dedicated, reason)


def _check(rank: int, requested: str) -> None:
    """Only the variable can be wrong here, and only after all ranks have come: none should wait for one that raised."""
    if requested not in CHOICES:
        raise InvalidOptionError(
            f"rank {rank}: the variable {VARIABLE} must be one of {', '.join(CHOICES)}, but is {requested!r}"
        )


def _why_not_shared(come: Rendezvous, requested: str) -> str:
    """Why no memory is shared, if that can be known before it is tried."""
    obstacles = ranks_by([one.obstacle for one in come.announcements])
    obstacles.pop("", None)
    if obstacles:
        return "; ".join(f"rank {listed(ranks)}: {text}" for text, ranks in obstacles.items())
    hosts = come.hosts
    if requested == "shared_memory" and len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts ({' | '.join(' '.join(map(str, host)) for host in hosts)})"
    if len(hosts) == len(come.announcements):
        return "each rank is on a host of its own"
    return ""


def _over_memory(
    member: Membership, come: Rendezvous, memory: HostMemory, requested: str, dedicated: bool
) -> Transport:
    hosts = come.hosts
    if len(hosts) == 1 and requested != "hierarchical":
        return SharedMemoryTransport(_over_group(member, come, dedicated=False), memory)
    bridge = Bridge(member, hosts, come.number, come.check, come.watch)
    return HierarchicalTransport(_over_group(member, come, dedicated), memory, bridge)


def _over_group(member: Membership, come: Rendezvous, dedicated: bool, reason: str = "") -> ProcessGroupTransport:
    """`dedicated`: with connections of its own."""
    connections = come.connect_dedicated_group() if dedicated else None
    return ProcessGroupTransport(
        member.group,
        reason,
        number=come.number,
        dedicated=connections,
        start_watch=come.start_watch,
        watch=come.watch,
    )
