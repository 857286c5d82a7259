"""Memory that all ranks of a host have mapped: a file without a name, gone with the last of them.

The lowest rank makes the file with `memfd_create`, which needs no `/dev/shm` and no name, and passes its descriptor
on. Each rank then has its own section of it backed by real memory, so that too little of it is an error here and now,
on all ranks, and not a bus error in the middle of a round.

    | header, for all ranks | section of the first rank | section of the second | ...
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import weakref
from pathlib import Path

from gradsync.errors import SharedMemoryError
from gradsync.transport.link import Link

_OFFER = struct.Struct("=q")
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 2, 4  # Linux; not every Python has names for them
# A container's or a job's limit: where its folder is, by the controller in /proc/self/cgroup, and its files.
_LIMITS = {
    "": ("/sys/fs/cgroup", "memory.max", "memory.current"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
_GIVEN_BACK = ("active_file", "inactive_file")  # files that the kernel keeps in memory while nobody needs it


Mapped = ctypes.Array[ctypes.c_char]
_MAP_FIXED, _MAP_NORESERVE, _MAP_FAILED = 0x10, 0x4000, ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class MemoryFile:
    """Memory that the ranks of a link have in common. Freed when the last tensor over it is."""

    def __init__(
        self, link: Link, header: int, section: int, limit: float, reserve: bool = True, channel: int = 0
    ) -> None:
        """All ranks at the same time; `header` bytes in common and `section` bytes for each of them.

        Without `reserve` each rank sees to it by itself that there is memory for what it uses of its section.
        """
        link.check_not_forked()
        self.size, self.local_rank = len(link.ranks), link.ranks.index(link.rank)
        self._header, self._section, self._rank = header, section, link.rank
        nbytes = self.section_start(self.size)
        start = 0 if self.local_rank == 0 else self.section_start(self.local_rank)
        end = self.section_start(self.local_rank + 1) if reserve else max(start, header)
        descriptor, problem = _make_or_receive(link, nbytes, limit, channel)
        mapped = None
        try:
            if not problem:
                mapped, problem = _map(descriptor, nbytes, start, end)
            problems = _exchange_problems(link, problem, limit, channel)
        except BaseException:  # a rank is gone, or late
            _discard(descriptor, mapped)
            raise
        if problems or mapped is None:
            _discard(descriptor, mapped)
            raise SharedMemoryError(
                f"rank {link.rank}: {self.size} ranks asked for {section:,} bytes of shared memory each, "
                f"{nbytes:,} in all, and could not get them: {'; '.join(problems)}. Give the host or container "
                "more memory or the process a higher limit, or pass transport='process_group'."
            )
        self.memory = memoryview(mapped).cast("B")
        self._descriptor = descriptor
        _maps[ctypes.addressof(mapped)] = descriptor, nbytes
        weakref.finalize(mapped, _free, ctypes.addressof(mapped)).atexit = False

    def section_start(self, local_rank: int) -> int:
        """Where the section of a rank begins."""
        return self._header + self._section * local_rank

    def reserve(self, first: int, last: int, purpose: str) -> None:
        """Backs these bytes of this rank's section by real memory."""
        try:
            os.posix_fallocate(self._descriptor, self.section_start(self.local_rank) + first, last - first)
        except OSError as error:
            raise SharedMemoryError(
                f"rank {self._rank}: {last - first:,} bytes of shared memory were needed for {purpose}, and could not "
                f"be had: {_explain(error)}. Give the host or container more memory, or pass "
                "transport='process_group'."
            ) from None


# --- making one, together --------------------------------------------------------------------------------


def _make_or_receive(link: Link, size: int, limit: float, channel: int) -> tuple[int, str]:
    """A descriptor of the common file, or -1 and what went wrong."""
    leader = link.ranks[0]
    if link.rank == leader:
        return _make(link, size, limit, channel)
    message, descriptors = link.receive(leader, limit, channel)
    (offered,) = _OFFER.unpack(message)
    if descriptors and offered == size:
        return descriptors[0], ""
    for descriptor in descriptors:
        os.close(descriptor)
    if offered != size:
        return -1, f"rank {leader} asked for {offered:,} bytes in all, but rank {link.rank} for {size:,}"
    return -1, f"rank {link.rank} was sent no descriptor, or has too many open files (ulimit -n)"


def _make(link: Link, size: int, limit: float, channel: int) -> tuple[int, str]:
    descriptor, problem = -1, ""
    try:
        if size > (available := _available()):
            raise OSError(errno.ENOMEM, f"only {available:,} bytes are available")
        descriptor = os.memfd_create("gradsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        # Nobody can shrink it under somebody who reads.
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
    except OSError as error:
        problem = f"rank {link.rank}: {_explain(error)}"
    try:
        for peer in link.peers:
            link.send(peer, _OFFER.pack(size), limit, [] if problem else [descriptor], channel)
    except BaseException:
        _discard(descriptor)
        raise
    if problem:
        _discard(descriptor)
        descriptor = -1
    return descriptor, problem


def _discard(descriptor: int, mapped: Mapped | None = None) -> None:
    if mapped is not None:
        _munmap(ctypes.addressof(mapped), ctypes.sizeof(mapped))
    if descriptor >= 0:
        os.close(descriptor)


def _free(address: int) -> None:
    descriptor, size = _maps.pop(address)
    _munmap(address, size)
    os.close(descriptor)


def _map(descriptor: int, size: int, start: int, end: int) -> tuple[Mapped | None, str]:
    """The whole file mapped, and the bytes from `start` to `end` backed by memory near this rank's core.

    Not by Python's `mmap`, which keeps a descriptor of its own.
    """
    mapped = None
    try:
        address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        mapped = (ctypes.c_char * size).from_address(address)
        if end > start:
            os.posix_fallocate(descriptor, start, end - start)
    except OSError as error:
        return mapped, _explain(error)
    return mapped, ""


def _exchange_problems(link: Link, problem: str, limit: float, channel: int) -> list[str]:
    """What went wrong on any rank, told to all."""
    leader = link.ranks[0]
    if problem and not problem.startswith("rank"):
        problem = f"rank {link.rank}: {problem}"
    if link.rank != leader:
        link.send(leader, b"=" + problem.encode(), limit, channel=channel)
        verdict = link.receive(leader, limit, channel)[0]
    else:
        said = [problem] + [link.receive(peer, limit, channel)[0][1:].decode() for peer in link.peers]
        verdict = b"=" + "\n".join(dict.fromkeys(text for text in said if text)).encode()[:32_000]
        for peer in link.peers:
            link.send(peer, verdict, limit, channel=channel)
    return [text for text in verdict[1:].decode(errors="replace").split("\n") if text]


def _available() -> int:
    """Bytes that the host, or the container's limit, has left: asking for more would get a process killed."""
    found = [1024 * int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemAvailable")]
    for line in _lines("/proc/self/cgroup"):
        _, controller, path = line.split(":", 2)
        root, most, used = _LIMITS.get(controller, ("", "", ""))
        own = Path(root, path.lstrip("/"))
        for folder in (own, *own.parents) if root else ():
            numbers = [*_lines(f"{folder}/{most}"), *_lines(f"{folder}/{used}")]
            if len(numbers) == 2 and all(number.isdigit() for number in numbers):
                found.append(int(numbers[0]) - int(numbers[1]) + _given_back(folder))
    return min(found, default=2**62)


def _given_back(folder: Path) -> int:
    entries = (line.split() for line in _lines(f"{folder}/memory.stat"))
    return sum(int(entry[1]) for entry in entries if entry[0] in _GIVEN_BACK)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _explain(error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many open files (ulimit -n)"
    return error.strerror or str(error)


# --- fork ------------------------------------------------------------------------------------------------

_maps: dict[int, tuple[int, int]] = {}  # by address: descriptor and size


def _in_child() -> None:
    """A forked child sees the memory as it is, as it does all other memory, but what it writes is its own."""
    for address, (descriptor, size) in list(_maps.items()):
        access = mmap.PROT_READ | mmap.PROT_WRITE
        how = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        if _mmap(address, size, access, how, descriptor, 0) != address:
            os.abort()  # else what this child writes would disturb all ranks


os.register_at_fork(after_in_child=_in_child)
