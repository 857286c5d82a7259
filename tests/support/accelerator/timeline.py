"""What was queued on which stream in which order, and the detector that judges it.

The detector is torch's own (`torch.cuda._sanitizer.EventHandler`), which needs no CUDA: it is told of kernels with what
they read and write, of events that are recorded and waited for, and of waits of the host. What it knows memory by is an
address; so each block is cut into the pieces that accesses have in common, and each piece goes by its first address.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace

from torch.cuda import _sanitizer
from torch.cuda._sanitizer import EventHandler, SynchronizationError, TensorInfo, UnsynchronizedAccessError

_HERE = str(Path(__file__).parent)
Extent = tuple[int, int]  # of addresses: the first, and the one behind the last


class Race(RuntimeError):
    """Two accesses to the same memory that nothing orders."""


class _Stack:
    """Where something was launched, put into words only if asked: the detector wants one for each kernel."""

    def __init__(self, frames: Iterable[tuple[FrameType, int]]) -> None:
        self._at = [(frame.f_code, line) for frame, line in itertools.islice(frames, 30)]

    @classmethod
    def extract(cls, frames: Iterable[tuple[FrameType, int]], lookup_lines: bool) -> _Stack:
        return cls(frames)

    def reverse(self) -> None:
        self._at.reverse()

    def format(self) -> list[str]:
        names = [(code.co_filename, line, code.co_name) for code, line in self._at if _HERE not in code.co_filename]
        return traceback.StackSummary.from_list([(file, line, name, None) for file, line, name in names]).format()


vars(_sanitizer)["traceback"] = SimpleNamespace(StackSummary=_Stack, walk_stack=traceback.walk_stack)


class Kind(IntEnum):
    """As in device.h."""

    ALLOCATE = 0
    FREE = 1
    USE = 2
    RECORD = 3
    WAIT = 4
    SYNC_EVENT = 5
    SYNC_STREAM = 6
    SYNC_DEVICE = 7
    COLLECTIVE = 8
    RANGE = 9


@dataclass
class Block:
    """Memory as it was allocated."""

    begin: int
    end: int
    stream: int
    """On which it was allocated; behind what that one has come to, freed memory is used again."""
    pieces: list[int]
    used_on: set[int] = field(default_factory=set)
    """Streams of which the allocator knows, and waits for."""


class Timeline:
    """Of one process. It may be asked by several threads."""

    def __init__(self, device: ModuleType) -> None:
        self._device = device
        self._lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Forgets what has happened; all of it counts as done."""
        with self._lock:
            if hasattr(self, "_handler"):
                self.catch_up()
            else:
                self._blocks: dict[int, Block] = {}
                self._begins: list[int] = []
            self._handler = EventHandler()
            self.races: list[str] = []
            self.host_waits = 0

    # --- what the kernels tell -----------------------------------------------------------------------

    def launch(self, stream: int, reads: Iterable[Extent], writes: Iterable[Extent], name: str) -> None:
        """A kernel on a stream; raises if it races with an earlier one."""
        with self._lock:
            self.catch_up()
            self._launch(stream, reads, writes, name)
            self.check()

    def host_waits_for(self, stream: int) -> None:
        with self._lock:
            self.catch_up()
            self.host_waits += 1
            self._handler._handle_stream_synchronization(stream)

    def check(self) -> None:
        """Raises if there was a race since the latest `reset`."""
        with self._lock:
            self.catch_up()
            if self.races:
                raise Race(self.races[0])

    def catch_up(self) -> None:
        """Takes in what the device has told since."""
        with self._lock:
            entries = iter(self._device.take_told())
            for kind, a, b, c in entries:
                if kind == Kind.COLLECTIVE:
                    ranges = [next(entries) for _ in range(b)]
                    reads = [(begin, end) for _, begin, end, written in ranges if not written]
                    self._launch(a, reads, [(begin, end) for _, begin, end, written in ranges if written], "collective")
                else:
                    self._take_in(Kind(kind), a, b, c)

    # --- what the device tells --------------------------------------------------------------------------

    def _take_in(self, kind: Kind, a: int, b: int, c: int) -> None:
        handler = self._handler
        if kind is Kind.ALLOCATE:
            self._blocks[a] = Block(a, a + b, c, [a])
            bisect.insort(self._begins, a)
        elif kind is Kind.FREE:
            self._free(a)
        elif kind is Kind.USE:
            self._blocks[a].used_on.add(b)
        elif kind is Kind.RECORD:
            handler._handle_event_record(a, b)
        elif kind is Kind.WAIT:
            handler._handle_event_wait(a, b)
        elif kind is Kind.SYNC_DEVICE:
            self.host_waits += 1
            for stream in list(handler.syncs.current_sync_states):
                if stream >> 32 == a:
                    handler._handle_stream_synchronization(stream)
        else:
            self.host_waits += 1
            sync = (
                handler._handle_event_synchronization
                if kind is Kind.SYNC_EVENT
                else handler._handle_stream_synchronization
            )
            sync(a)

    def _launch(self, stream: int, reads: Iterable[Extent], writes: Iterable[Extent], name: str) -> None:
        for begin, end in (reads := list(reads)) + (writes := list(writes)):
            self._cut(begin, end)
        written = {piece for extent in writes for piece in self._pieces(*extent)}
        read = {piece for extent in reads for piece in self._pieces(*extent)} - written
        aliases: dict[int, list[str]] = {piece: [] for piece in read | written}
        self._note(self._handler._handle_kernel_launch(stream, read, written, set(), name, aliases))

    def _free(self, begin: int) -> None:
        """An access by the stream that will use the memory next; the allocator waits for streams that it knows of."""
        block = self._blocks.pop(begin)
        del self._begins[bisect.bisect_left(self._begins, begin)]
        syncs, accesses = self._handler.syncs, self._handler.tensors_accessed.accesses
        states = [syncs.current_sync_states.get(stream, {}) for stream in (block.stream, *block.used_on)]
        for piece in block.pieces:
            if (info := accesses.pop(piece, None)) is None:
                continue
            for access in [*info.reads, *([info.write] if info.write else [])]:
                ordered = any(access.seq_num <= state.get(access.stream, -1) for state in states)
                if access.stream != block.stream and not ordered:
                    where = "".join(access.stack_trace.format()[-12:])
                    what = f"memory was freed while stream {access.stream} used it: {access.operator}"
                    self.races.append(f"{what}\n{where}")

    def _note(self, errors: list[SynchronizationError]) -> None:
        for error in errors[:1]:
            assert isinstance(error, UnsynchronizedAccessError)
            first, second = error.previous_access, error.current_access
            self.races.append(
                f"{second.operator} on stream {second.stream}, {second.type} what {first.operator} on stream "
                f"{first.stream} is {first.type}, with nothing between them.\nfirst:\n"
                f"{''.join(first.stack_trace.format()[-14:])}then:\n{''.join(second.stack_trace.format()[-14:])}"
            )

    # --- memory in pieces --------------------------------------------------------------------------------

    def _block(self, address: int) -> Block:
        return self._blocks[self._begins[bisect.bisect_right(self._begins, address) - 1]]

    def _pieces(self, begin: int, end: int) -> list[int]:
        pieces = self._block(begin).pieces
        return pieces[bisect.bisect_left(pieces, begin) : bisect.bisect_left(pieces, end)]

    def _cut(self, begin: int, end: int) -> None:
        block = self._block(begin)
        assert block.begin <= begin <= end <= block.end, "an access to memory that is not allocated"
        for address in (begin, end):
            at = bisect.bisect_left(block.pieces, address)
            if address == block.end or (at < len(block.pieces) and block.pieces[at] == address):
                continue
            accesses = self._handler.tensors_accessed.accesses
            if (info := accesses.get(block.pieces[at - 1])) is not None:
                accesses[address] = TensorInfo(info.allocation_stack_trace, list(info.reads), info.write)
            block.pieces.insert(at, address)
