"""Are the replicas still the same? Compared while training, a part of the parameters in each round.

Gradients are the same on all ranks after a round, but parameters need not be: another learning rate on one rank, a
checkpoint loaded by one rank alone, a step left out. So each round carries a fingerprint of some parameters in its last
bucket. Everything is looked at in rounds 0, 1, 2, 4, ..., 64, as most such mistakes are there from the start; in the
other rounds it is the turn of a part, so that all have been seen after about 100 rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsync.errors import ReplicaDivergedError
from gradsync.guard.fingerprint import COLUMNS, checksum, digest, in_memory_order
from gradsync.transport.base import Transport

TURNS = 110
_EVERYTHING_UNTIL = 64
# Less than this is not worth cutting: it is looked at in one go.
_LEAST_BYTES = 16 * 1024
_SMALL = 64 * 1024  # bytes
_ALIGNED = 8 * COLUMNS  # elements: pieces begin there, and fill whole rows of a checksum
_SHOWN = 5
_MASK = 2**31 - 1


class Piece(NamedTuple):
    """A part of one parameter, in elements as they lie in memory."""

    parameter: int
    start: int
    stop: int


class Fingerprint:
    """Of some parameters, as they were when it was taken. On a GPU it may still be computed."""

    def __init__(self, sums: Sequence[Tensor], pieces: Sequence[Piece]) -> None:
        self._sums = sums
        self.pieces = pieces

    def value(self) -> int:
        """A number of 31 bits."""
        total = 0
        for one in self._sums:
            total = (total * 0x9E3779B97F4A7C15 + int(one)) & (2**64 - 1)
        total = (total ^ (total >> 29)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        return (total ^ (total >> 32)) & _MASK


class Comparison:
    """Which parameters have been compared, up to which round, and whose turn it is."""

    def __init__(self, tensors: Mapping[str, Tensor], everything: bool) -> None:
        self._named = dict(tensors)
        self._tensors = list(tensors.values())
        self._always = everything
        self._turns = _take_turns(self._tensors)
        self._all = _whole(self._tensors)
        # The latest round in which it was the same everywhere.
        self._seen = dict.fromkeys([piece for turn in self._turns for piece in turn], -1)

    def of_round(self, number: int) -> Fingerprint | None:
        """What this rank holds now of what round `number` compares."""
        early = number <= _EVERYTHING_UNTIL and number & (number - 1) == 0
        pieces = self._all if self._always or early else self._turns[number % len(self._turns)] if self._turns else []
        return take(self._tensors, pieces)

    def agreed(self, fingerprint: Fingerprint, number: int) -> None:
        self._seen.update(dict.fromkeys(self._seen if fingerprint.pieces is self._all else fingerprint.pieces, number))

    def error(self, transport: Transport, number: int) -> ReplicaDivergedError:
        """Finds out what differs; all ranks do this together."""
        found = _compare(self._named, transport)
        if not found.names:
            return ReplicaDivergedError(
                f"rank {transport.rank}: the replicas had different parameters when round {number} began, and no "
                "longer have: something changes them while others use them."
            )
        first = found.names[0]
        at = list(self._named).index(first)
        seen = min((latest for piece, latest in self._seen.items() if piece.parameter == at), default=-1)
        since = f"between rounds {seen} and {number}" if seen >= 0 else f"before round {number}"
        return ReplicaDivergedError(
            f"rank {transport.rank}: the replicas have diverged: {found}. '{first}' began to differ {since}. Something "
            "changed parameters on some ranks only, or in another way: another learning rate or weight decay, a "
            "checkpoint loaded or a step taken or left out by one rank, `.grad` changed after backward, noise from a "
            "generator of its own, or other hardware or numbers of threads, which round differently. Do the same on "
            "all ranks, or load the same checkpoint. Who wants replicas that differ passes verify='never'.",
            found.ranks,
            found.names,
        )


def take(tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> Fingerprint | None:
    """Of these pieces: small ones of one kind together, which makes a copy of them, large ones where they are."""
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sums: list[Tensor] = []
    for parameter, start, stop in pieces:
        flat = in_memory_order(tensors[parameter])
        part = flat if stop - start == flat.numel() else flat[start:stop]
        if part.nbytes >= _SMALL:
            sums.append(checksum([part]))
        elif part.numel():
            small.setdefault((part.dtype, part.device), []).append(part)
    sums += map(checksum, small.values())
    return Fingerprint(sums, pieces) if sums else None


def of_all(tensors: Sequence[Tensor]) -> int:
    """A fingerprint of everything, as a number of 31 bits."""
    found = take(tensors, _whole(tensors))
    return 0 if found is None else found.value()


def _whole(tensors: Sequence[Tensor]) -> list[Piece]:
    return [Piece(index, 0, in_memory_order(tensor).numel()) for index, tensor in enumerate(tensors)]


def _take_turns(tensors: Sequence[Tensor]) -> list[list[Piece]]:
    """Cuts the tensors into about `TURNS` parts of equal size."""
    flats = [in_memory_order(tensor) for tensor in tensors]
    size = max(sum(flat.nbytes for flat in flats) // TURNS, _LEAST_BYTES)
    turns: list[list[Piece]] = [[]]
    left = size
    for index, flat in enumerate(flats):
        start, item = 0, flat.element_size()
        while start < flat.numel():
            step = max(left // item // _ALIGNED, 1) * _ALIGNED
            stop = min(start + step, flat.numel())
            turns[-1].append(Piece(index, start, stop))
            left -= (stop - start) * item
            start = stop
            if left <= 0:
                turns.append([])
                left = size
    return [turn for turn in turns if turn]


# --- at once and complete --------------------------------------------------------------------------------


class _Found(NamedTuple):
    names: list[str]
    ranks: list[int]
    majority: bool

    def __str__(self) -> str:
        more = f" and {len(self.names) - _SHOWN} more" if len(self.names) > _SHOWN else ""
        listed = ", ".join(map(repr, self.names[:_SHOWN])) + more
        ranks = ", ".join(map(str, self.ranks))
        if self.majority:
            return f"on rank {ranks}, {listed} {'is' if len(self.names) == 1 else 'are'} not what most ranks have"
        return f"rank {ranks} have different {listed}"


def compare(tensors: Mapping[str, Tensor], numbers: Mapping[str, object], transport: Transport) -> None:
    """Raises if any value differs between ranks, to the last bit. All ranks call it together.

    `numbers`: settings that must be the same too.
    """
    found = _compare(tensors, transport, numbers)
    if found.names:
        raise ReplicaDivergedError(f"rank {transport.rank}: the replicas differ: {found}.", found.ranks, found.names)


def _compare(
    tensors: Mapping[str, Tensor], transport: Transport, numbers: Mapping[str, object] | None = None
) -> _Found:
    texts = [f"{name}\t{digest(tensor)[:24]}" for name, tensor in tensors.items()]
    texts += [f"{name}\t{value!r}" for name, value in (numbers or {}).items()]
    rows = [dict(line.split("\t", 1) for line in text.split("\n") if line) for text in _exchange(texts, transport)]
    names = [name for name in dict.fromkeys(n for row in rows for n in row) if len({row.get(name) for row in rows}) > 1]
    if not names:
        return _Found([], [], False)
    kinds = Counter(tuple(row.get(name) for name in names) for row in rows)
    common, count = kinds.most_common(1)[0]
    if 2 * count > len(rows):
        off = [rank for rank, row in enumerate(rows) if tuple(row.get(name) for name in names) != common]
        return _Found(names, off, True)
    return _Found(names, list(range(len(rows))), False)


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
