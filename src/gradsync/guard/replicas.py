"""Are the replicas still the same? Compared while training, a part of the parameters in each round.

Gradients are the same on all ranks after a round, but parameters need not be: another learning rate on one rank, a
checkpoint loaded by one rank alone, a step left out. So each round carries a fingerprint of some parameters in its last
bucket. Everything is looked at in rounds 0, 1, 2, 4, ..., 64, as most such mistakes are there from the start; in the
other rounds it is the turn of a part. In round 64 the ranks measure what that takes, and choose turns such that it is
a quarter of a percent of a step at most; everything is then seen within 20 to 60 rounds of a usual model.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsync import _torch, log
from gradsync.errors import ReplicaDivergedError
from gradsync.guard.fingerprint import COLUMNS, checksum, crc32_at, digest, in_memory_order
from gradsync.transport.base import Transport

SHARE = 0.0025
"""Of a step, that comparing may take on average."""
TURNS = 150  # until that has been measured
_LEAST_SECONDS = 50e-6  # that a look takes, however little it looks at
_AT_ONCE = 0.02  # of a step, if it is too short for a look in each
_LONGEST = 1000  # rounds until everything has been seen
_EVERYTHING_UNTIL = 64
# Less than this is not worth cutting: it is looked at in one go.
_LEAST_BYTES = 16 * 1024
_ALIGNED = 8 * COLUMNS  # elements: pieces begin there, and fill whole rows of a checksum
_SHOWN = 5
_MASK = 2**31 - 1
_NOT_COUNTED = "\nnot counted"  # no name of a tensor
_log = log.logger()


class Piece(NamedTuple):
    """A part of one parameter, in elements as they lie in memory."""

    parameter: int
    start: int
    stop: int


class Fingerprint:
    """Of some parameters, as they were when it was taken. On a GPU it may still be computed."""

    def __init__(self, crc: int, sums: Sequence[Tensor], pieces: Sequence[Piece]) -> None:
        self._crc, self._sums = crc, sums
        self.pieces = pieces

    def value(self) -> int:
        """A number of 31 bits."""
        total = self._crc
        for one in _numbers(self._sums):
            total = (total * 0x9E3779B97F4A7C15 + one) & (2**64 - 1)
        return (total ^ (total >> 31)) & _MASK


def _numbers(sums: Sequence[Tensor]) -> list[int]:
    """An accelerator is waited for once, not for each."""
    if len({one.device for one in sums}) == 1:
        found: list[int] = torch.stack(list(sums)).tolist()
        return found
    return [int(one) for one in sums]


class Comparison:
    """Which parameters have been compared, up to which round, and whose turn it is.

    Every rank has one, also one whose values are not compared: what all ranks do together, all of them must do.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], mode: str, paused: bool = False, before: Comparison | None = None
    ) -> None:
        """`paused`: this rank's values are not compared for now. `before`: whose turns go on."""
        self._named = dict(tensors)
        self._tensors = list(tensors.values())
        self._always, self._measures = mode == "every", mode == "auto"
        self.paused = paused or mode == "never"
        self._all = _whole(self._tensors)
        self._whole_at = -1  # the latest round in which everything was the same everywhere
        self._everything = 0.0  # seconds that looking at everything takes
        self._began = 0.0
        self._suspect: bool = before is not None and before._suspect
        """They have been found to differ: everything is looked at until they don't."""
        self._take_turns(*((TURNS, 1) if before is None else before._chosen))

    def _take_turns(self, turns: int, every: int) -> None:
        self._chosen = turns, every
        self._turns, self._every = _cut(self._tensors, turns), every
        # The latest round in which it was the same everywhere.
        self._seen = dict.fromkeys([piece for turn in self._turns for piece in turn], self._whole_at)

    @property
    def period(self) -> int:
        """After so many rounds everything has been looked at."""
        return len(self._turns) * self._every

    def of_round(self, number: int) -> Fingerprint | None:
        """What this rank holds now of what round `number` compares."""
        if self.paused:
            return None
        if self._always or self._suspect or (number <= _EVERYTHING_UNTIL and number & (number - 1) == 0):
            began = time.perf_counter()
            if number == _EVERYTHING_UNTIL // 2:
                self._began = began
            found = take(self._tensors, self._all)
            self._everything = time.perf_counter() - began
            return found
        turn, off = divmod(number, self._every)
        return None if off or not self._turns else take(self._tensors, self._turns[turn % len(self._turns)])

    def round_closed(self, number: int, fingerprint: Fingerprint | None, transport: Transport) -> None:
        """What was compared is the same on all ranks. All of them call this, also those that compared nothing."""
        if fingerprint is not None and fingerprint.pieces is self._all:
            self._whole_at, self._suspect = number, False
            self._seen = dict.fromkeys(self._seen, number)
        elif fingerprint is not None:
            self._seen.update(dict.fromkeys(fingerprint.pieces, number))
        if number == _EVERYTHING_UNTIL and self._measures:
            self._measure(transport)

    def _measure(self, transport: Transport) -> None:
        """Once: how often to look at how much, so that it takes no more than its share of a step. The same for all."""
        step = (time.perf_counter() - self._began) / (_EVERYTHING_UNTIL // 2) if self._began else 0.0
        rows = transport.gather([round(self._everything * 1e9), round(step * 1e9)])
        steps = [row[1] for row in rows if row[1]]
        if steps:
            self._take_turns(*schedule(max(row[0] for row in rows) / 1e9, min(steps) / 1e9))

    def error(self, transport: Transport, number: int, counted: bool = True) -> ReplicaDivergedError:
        """Finds out what differs; all ranks do this together. `counted`: this rank's values are compared."""
        self._suspect = True
        return self._describe(_find(_exchange_digests(self._named, transport, counted=counted)), transport, number)

    def repair(self, transport: Transport, number: int, counted: bool = True) -> None:
        """Ranks that differ from most others take over what those have; all ranks do this together.

        Of each parameter for itself: of three ranks, two may be off in different ones. Raises if any has no majority.
        """
        rows = _exchange_digests(self._named, transport, counted=counted)
        found = _find(rows)
        if not found.majority:
            self._suspect = True
            raise self._describe(found, transport, number)
        by_source: dict[int, list[Tensor]] = {}
        for name in found.names:
            # `.data`: a graph that was kept for another backward must not take this for a change by its user.
            source = next(rank for rank, row in enumerate(rows) if row and row[name] == found.common[name])
            by_source.setdefault(source, []).append(_torch.local(self._named[name]).data)
        for source, tensors in sorted(by_source.items()):
            transport.broadcast(tensors, source)
        if transport.rank == 0 or transport.rank in found.ranks:
            _log.warning(
                "rank %d: the replicas had diverged, and were repaired: %s. %s They have the others' values now; "
                "their gradients since then were computed with other ones, and the state of their optimizers was not "
                "compared (gradsync.verify(model, optimizer) does). If this comes again, something changes parameters "
                "on some ranks only: with on_divergence='raise' the ranks stop where it is noticed.",
                transport.rank,
                found,
                self._since(found.names[0], number),
            )

    def _since(self, name: str, number: int) -> str:
        """Between which rounds a parameter began to differ."""
        at = list(self._named).index(name)
        seen = min((latest for piece, latest in self._seen.items() if piece.parameter == at), default=-1)
        return f"'{name}' began to differ " + (
            f"between rounds {seen} and {number}." if seen >= 0 else f"before round {number}."
        )

    def _describe(self, found: _Found, transport: Transport, number: int) -> ReplicaDivergedError:
        if not found.names:
            return ReplicaDivergedError(
                f"rank {transport.rank}: the replicas had different parameters when round {number} began, and no "
                "longer have: something changes them while others use them."
            )
        return ReplicaDivergedError(
            f"rank {transport.rank}: the replicas have diverged: {found}. {self._since(found.names[0], number)} "
            "Something changed parameters on some ranks only, or in another way: another learning rate or weight "
            "decay, a checkpoint loaded or a step taken or left out by one rank, `.grad` changed after backward, noise "
            "from a generator of its own, or other hardware or numbers of threads, which round differently. Do the "
            "same on all ranks, or load the same checkpoint. Who wants replicas that differ passes verify='never'.",
            found.ranks,
            found.names,
        )


def take(tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> Fingerprint | None:
    """Of these pieces: a CRC-32 of what the host can read, a sum of what is on another device."""
    crc, elsewhere = 0, list[Tensor]()
    for parameter, start, stop in pieces:
        tensor = _torch.local(tensors[parameter])
        start, stop = min(start, tensor.numel()), min(stop, tensor.numel())  # `.data` may be another one by now
        if tensor.device.type == "cpu" and tensor.is_contiguous():  # without a tensor made on the way
            size = tensor.element_size()
            crc = crc32_at(tensor.data_ptr() + start * size, (stop - start) * size, crc)
            continue
        flat = in_memory_order(tensor)
        if flat.device.type == "cpu":
            crc = crc32_at(flat.data_ptr() + start * flat.element_size(), (stop - start) * flat.element_size(), crc)
        elif stop > start:
            elsewhere.append(checksum(flat[start:stop]))
    return Fingerprint(crc, elsewhere, pieces) if pieces else None


def of_all(tensors: Sequence[Tensor]) -> int:
    """A fingerprint of everything, as a number of 31 bits."""
    found = take(tensors, _whole(tensors))
    return 0 if found is None else found.value()


def _whole(tensors: Sequence[Tensor]) -> list[Piece]:
    return [Piece(index, 0, tensor.numel()) for index, tensor in enumerate(map(_torch.local, tensors))]


def schedule(everything: float, step: float) -> tuple[int, int]:
    """In how many turns, and in each how manieth round, parameters are looked at; by what both take, in seconds."""
    budget = SHARE * step
    if budget >= 2 * _LEAST_SECONDS:
        return min(math.ceil(everything / (budget - _LEAST_SECONDS)), _LONGEST), 1
    turns = max(math.ceil(everything / (_AT_ONCE * step)), 1)
    return turns, min(math.ceil((everything / turns + _LEAST_SECONDS) / budget), max(_LONGEST // turns, 1))


def _cut(tensors: Sequence[Tensor], turns: int) -> list[list[Piece]]:
    """Cuts the tensors into about so many parts of equal size."""
    locals_ = [_torch.local(tensor) for tensor in tensors]
    size = max(sum(tensor.nbytes for tensor in locals_) // turns, _LEAST_BYTES)
    parts: list[list[Piece]] = [[]]
    left = size
    for index, tensor in enumerate(locals_):
        start, item = 0, tensor.element_size()
        while start < tensor.numel():
            step = max(left // item // _ALIGNED, 1) * _ALIGNED
            stop = min(start + step, tensor.numel())
            parts[-1].append(Piece(index, start, stop))
            left -= (stop - start) * item
            start = stop
            if left <= 0:
                parts.append([])
                left = size
    return [part for part in parts if part]


# --- at once and complete --------------------------------------------------------------------------------


class _Found(NamedTuple):
    """What differs."""

    names: list[str]
    ranks: list[int]
    common: dict[str, str | None]
    """What most ranks have, for those names for which there is such a thing."""

    @property
    def majority(self) -> bool:
        """Whether it is known of each name who is off."""
        return bool(self.names) and len(self.common) == len(self.names)

    def __str__(self) -> str:
        more = f" and {len(self.names) - _SHOWN} more" if len(self.names) > _SHOWN else ""
        listed = ", ".join(map(repr, self.names[:_SHOWN])) + more
        ranks = ", ".join(map(str, self.ranks))
        if self.majority:
            return f"on rank {ranks}, {listed} {'is' if len(self.names) == 1 else 'are'} not what most ranks have"
        return f"rank {ranks} have different {listed}, and there is no majority"


def compare(tensors: Mapping[str, Tensor], numbers: Mapping[str, object], transport: Transport) -> None:
    """Raises if any value differs between ranks, to the last bit. All ranks call it together.

    `numbers`: settings that must be the same too.
    """
    found = _find(_exchange_digests(tensors, transport, numbers))
    if found.names:
        raise ReplicaDivergedError(f"rank {transport.rank}: the replicas differ: {found}.", found.ranks, found.names)


def _find(rows: Sequence[Mapping[str, str] | None]) -> _Found:
    """By what each rank has, by name; None: a rank that does not count."""
    counted = {rank: row for rank, row in enumerate(rows) if row is not None}
    every = dict.fromkeys(name for row in counted.values() for name in row)
    names = [name for name in every if len({row.get(name) for row in counted.values()}) > 1]
    common: dict[str, str | None] = {}
    for name in names:
        value, count = Counter(row.get(name) for row in counted.values()).most_common(1)[0]
        if 2 * count > len(counted):
            common[name] = value
    known = len(common) == len(names)
    off = [rank for rank, row in counted.items() if not known or any(row.get(name) != common[name] for name in names)]
    return _Found(names, off, common)


def _exchange_digests(
    tensors: Mapping[str, Tensor],
    transport: Transport,
    numbers: Mapping[str, object] | None = None,
    counted: bool = True,
) -> list[dict[str, str] | None]:
    """What each rank has, by name; None: of one that is not counted."""
    texts = [f"{name}\t{digest(tensor)[:24]}" for name, tensor in tensors.items()]
    texts += [f"{name}\t{value!r}" for name, value in (numbers or {}).items()]
    rows = _exchange(texts if counted else [_NOT_COUNTED], transport)
    return [
        None if text == _NOT_COUNTED else dict(line.split("\t", 1) for line in text.split("\n") if line)
        for text in rows
    ]


def _exchange(lines: Sequence[str], transport: Transport) -> list[str]:
    """Every rank's lines; if all are the same, which one number tells, only that number travels."""
    mine = "\n".join(lines)
    short = int(digest(torch.tensor(list(mine.encode()), dtype=torch.uint8, device="cpu"))[:15], 16)
    if len({row[0] for row in transport.gather([short])}) == 1:
        return [mine] * transport.size
    return transport.gather_text(mine)


def optimizer_state(optimizer: Optimizer, names: Mapping[Tensor, str]) -> tuple[dict[str, Tensor], dict[str, object]]:
    """What an optimizer knows of the parameters, as tensors, and its settings, by names for people."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, object] = {}
    for at, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params":
                continue
            where = f"{key} of parameter group {at}"
            if isinstance(value, Tensor):
                tensors[where] = value
            elif isinstance(value, (int, float, str, bool, tuple, type(None))):
                numbers[where] = value
        for number, parameter in enumerate(group["params"]):
            name = names.get(parameter, f"parameter {number} of group {at}")
            for key, value in optimizer.state.get(parameter, {}).items():
                where = f"{key} of '{name}'"
                if isinstance(value, Tensor) and value.layout is torch.strided:
                    tensors[where] = value
                elif isinstance(value, (int, float)):
                    numbers[where] = value
    return tensors, numbers
