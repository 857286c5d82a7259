"""Which transport carries the buckets of a group: what was wished for, else the fastest that all ranks can use."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from gradsync import _torch
from gradsync.errors import InvalidOptionError, OptionsMismatchError, SharedMemoryError
from gradsync.transport.base import Transport
from gradsync.transport.hierarchical import HierarchicalTransport, connect_bridge
from gradsync.transport.meeting import Assembly, Meeting, check_same_start, excuse
from gradsync.transport.process_group import ProcessGroupTransport
from gradsync.transport.shared_memory import SharedMemoryTransport

CHOICES = ("auto", "shared_memory", "hierarchical", "process_group")
VARIABLE = "GRADSYNC_TRANSPORT"
_log = logging.getLogger("gradsync")


def choose(
    group: dist.ProcessGroup,
    wish: str,
    tensors: Iterable[Tensor],
    own: bool = True,
    meet: bool = True,
    start: str = "",
    alone: bool = False,
) -> Transport:
    """A transport for `group` and such tensors. All ranks call this together, and all get the same kind.

    `own`: with connections of its own, see `own_group.py`. `meet`: whether ranks may communicate now;
    if not, "auto" is the process group. `start`: how the replica begins, which must be the same on all ranks.
    `alone`: the other ranks may not call this at all.
    """
    if wish == "auto" and meet:
        wish = os.environ.get(VARIABLE) or wish
    base = ProcessGroupTransport(group)
    if not meet and wish in ("auto", "process_group"):  # what needs no meeting
        base.reason = "nothing may be communicated while the replica is made" if wish == "auto" else "asked for"
        if not alone and base.size > 1 and _torch.knows(group):
            base.meant_to_meet = excuse(base, start)
        return base
    if base.size == 1 or not _torch.knows(group):
        _check(base, wish)
        base.reason = "there is one rank" if base.size == 1 else "the process group has no store to meet through"
        if wish in ("shared_memory", "hierarchical") and base.size > 1:
            raise SharedMemoryError(f"rank {base.rank}: transport={wish!r} can't be had: {base.reason}")
        return base
    elsewhere = sorted({tensor.device.type for tensor in tensors} - {"cpu"})
    obstacle = f"has parameters on {', '.join(elsewhere)}" if elsewhere else ""
    assembly = Assembly(base, {"wish": wish, "obstacle": obstacle, "start": start, "on_host": not elsewhere})
    try:
        with assembly.telling():
            return _choose(base, assembly, wish, own)
    except BaseException as error:
        if isinstance(error, (InvalidOptionError, OptionsMismatchError, SharedMemoryError)):
            assembly.part()
        assembly.give_up()
        raise
    finally:
        assembly.close()


def _choose(base: ProcessGroupTransport, assembly: Assembly, wish: str, own: bool) -> Transport:
    check_same_start(base.rank, [said["start"] for said in assembly.said])
    wishes: dict[str, list[int]] = {}
    for rank, said in enumerate(assembly.said):
        wishes.setdefault(said["wish"], []).append(rank)
    if len(wishes) > 1:
        listed = ", ".join(f"{text!r} on rank {', '.join(map(str, ranks))}" for text, ranks in wishes.items())
        raise InvalidOptionError(f"rank {base.rank}: all ranks must ask for the same transport, but it is {listed}.")
    _check(base, wish)
    reason, meeting = "asked for" if wish == "process_group" else _why_not(assembly, wish), None
    if not reason:
        meeting = assembly.connect()
        reason = meeting.reason
    if not reason:
        assert meeting is not None
        return _make(base, assembly, meeting, wish, own)
    if wish not in ("auto", "process_group"):
        raise SharedMemoryError(f"rank {base.rank}: transport={wish!r} can't be had: {reason}.")
    unexpected = meeting is not None or not all(said["expected"] for said in assembly.said)
    if base.rank == 0 and wish == "auto" and unexpected:
        _log.warning("buckets travel through the process group, not through shared memory: %s", reason)
    carrier = _over_group(base, assembly, own)
    carrier.reason = reason
    return carrier


def _check(base: ProcessGroupTransport, wish: str) -> None:
    """Only the variable can be wrong here, and only after all ranks have met: none should wait for one that raised."""
    if wish not in CHOICES:
        raise InvalidOptionError(
            f"rank {base.rank}: the variable {VARIABLE} must be one of {', '.join(CHOICES)}, but is {wish!r}"
        )


def _why_not(assembly: Assembly, wish: str) -> str:
    obstacles: dict[str, list[int]] = {}
    for rank, said in enumerate(assembly.said):
        if said["obstacle"]:
            obstacles.setdefault(said["obstacle"], []).append(rank)
    if obstacles:
        return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in obstacles.items())
    hosts = assembly.hosts
    if wish == "shared_memory" and len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts ({' | '.join(' '.join(map(str, host)) for host in hosts)})"
    if len(hosts) == len(assembly.said):
        return "each rank is on a host of its own"
    return ""


def _make(base: ProcessGroupTransport, assembly: Assembly, meeting: Meeting, wish: str, own: bool) -> Transport:
    assert meeting.memory is not None
    if len(meeting.hosts) == 1 and wish != "hierarchical":
        return SharedMemoryTransport(_over_group(base, assembly, own=False), meeting.memory)
    bridge = connect_bridge(base, meeting.hosts, assembly.number, assembly.check, assembly.causes)
    return HierarchicalTransport(_over_group(base, assembly, own), meeting.memory, bridge)


def _over_group(base: ProcessGroupTransport, assembly: Assembly, own: bool) -> ProcessGroupTransport:
    """`own`: with connections of its own."""
    return ProcessGroupTransport(
        base.group, assembly.number, assembly.own_group() if own else None, watch=assembly.watch
    )
