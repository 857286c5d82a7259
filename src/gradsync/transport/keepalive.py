"""Has the kernel notice, while a replica is made, that a host is gone with which this process is connected already.

The ranks have no connections of ours yet, but c10d's: gloo's, and that with the store. Over those nobody would ever
hear that the other host has vanished: gloo's receives stay pending, and a request to the store can't even be
interrupted. The kernel can be told to ask the other host now and then, and to end the connection if it does not answer;
both then fail as they do when a process ends. It answers for a process that was stopped, or that holds Python's lock,
so that those are not taken for lost.

Which of a process's connections are c10d's can't be asked, so it is all that lead to other hosts: as they are told here
for as long as the replica is made, and after that as they were.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gradsync.watch import wire

_Option = tuple[int, int]
_DOMAIN: _Option = (socket.SOL_SOCKET, 39)  # Linux's SO_DOMAIN, for which Python has no name
# Where an address is in what the kernel says of one end, by family.
_ADDRESS = {int(socket.AF_INET): slice(4, 8), int(socket.AF_INET6): slice(8, 24)}
_END_BYTES, _FAILED = 28, -1


class _Changed(NamedTuple):
    descriptor: int
    inode: int
    """Of the connection: the descriptor may be another one's by the end."""
    before: dict[_Option, int]


class Keepalive:
    """On all connections that this process has with other hosts, until all who hold it have released it."""

    def __init__(self) -> None:
        """Held by who makes it."""
        self._holders = [None]  # a list: whoever takes the last one out of it knows that, in whichever thread
        options = {(socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1, **wire.keepalive_options()}
        self._changed = [
            changed
            for descriptor in (_descriptors() if sys.platform == "linux" else ())
            if (changed := _change(descriptor, options)) is not None
        ]

    def hold(self) -> None:
        self._holders.append(None)

    def release(self) -> None:
        self._holders.pop()
        if self._holders:
            return
        for descriptor, inode, before in self._changed:
            if _inode_of(descriptor) == inode:
                for option, value in before.items():
                    _set(descriptor, option, value)
        self._changed = []


def _descriptors() -> list[int]:
    try:
        return [int(one.name) for one in Path("/proc/self/fd").iterdir()]
    except OSError:
        return []


def _change(descriptor: int, options: dict[_Option, int]) -> _Changed | None:
    """None if it is no connection with another host, or is kept alive by the same options already."""
    where = _ADDRESS.get(_get(descriptor, _DOMAIN))
    if where is None:
        return None
    here, there = (_end_of(ask, descriptor)[where] for ask in _ENDS)
    if here == there or not there:  # with this host, which is there as long as we are; or not connected
        return None
    before = {option: _get(descriptor, option) for option in options}
    inode = _inode_of(descriptor)
    if before == options or _FAILED in before.values() or inode is None:  # the second: no TCP
        return None
    for option, value in options.items():
        _set(descriptor, option, value)
    return _Changed(descriptor, inode, before)


# Not by Python's `socket`: to wrap a descriptor in one may make it non-blocking, for its owner too. There may be a
# connection for each rank of the job, with twenty calls each: buffers are made once, by each thread for itself.


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.end = ctypes.create_string_buffer(_END_BYTES)
        self.value, self.length = (ctypes.c_int * 1)(), (ctypes.c_uint32 * 1)()
        self.value_at, self.length_at = ctypes.addressof(self.value), ctypes.addressof(self.length)


_buffers = _Buffers()
_libc = ctypes.CDLL(None, use_errno=True)
_libc.getsockopt.argtypes = [ctypes.c_int] * 3 + [ctypes.c_void_p] * 2
_libc.setsockopt.argtypes = [ctypes.c_int] * 3 + [ctypes.c_void_p, ctypes.c_uint32]
_ENDS = (_libc.getsockname, _libc.getpeername)
for _ask in _ENDS:
    _ask.argtypes = [ctypes.c_int] + [ctypes.c_void_p] * 2
_INT_BYTES = ctypes.sizeof(ctypes.c_int)


def _end_of(ask: Callable[[int, Any, int], int], descriptor: int) -> bytes:
    """One end's address; b"" if there is none."""
    buffers = _buffers
    buffers.length[0] = _END_BYTES
    return buffers.end.raw if ask(descriptor, buffers.end, buffers.length_at) == 0 else b""


def _get(descriptor: int, option: _Option) -> int:
    buffers = _buffers
    buffers.length[0] = _INT_BYTES
    failed = _libc.getsockopt(descriptor, *option, buffers.value_at, buffers.length_at)
    return _FAILED if failed else buffers.value[0]


def _set(descriptor: int, option: _Option, value: int) -> None:
    _buffers.value[0] = value
    _libc.setsockopt(descriptor, *option, _buffers.value_at, _INT_BYTES)


def _inode_of(descriptor: int) -> int | None:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None
