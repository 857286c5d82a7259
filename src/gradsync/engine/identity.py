"""Which round it is: what travels with every bucket, and what ranks say of themselves when it was not the same one.

Nothing but the order of collectives ties a bucket of one rank to that of another. A rank that skipped a batch, or made
a backward that the others did not make, is one round off, and what it sends would be added to something else. So each
bucket carries a label (see `transport/label.py`), which every rank checks before it delivers anything:

    bits   0 ..  7   module     the serial number of the replicated module
           8 .. 21   number     of the round
          22 .. 23   kind       see `Kind`
          24         stepped    an optimizer has stepped since the round before
          25 .. 31   settings   digest of what ranks must have set alike
          32 .. 62   values     fingerprint of the parameters, in the last bucket: see `guard/replicas.py`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from gradsync.errors import GradsyncError, RosterChangedError, RoundMismatchError
from gradsync.guard.start import different_settings, list_differences
from gradsync.transport.label import Label

_MODULE, _NUMBER, _KIND, _STEPPED, _SETTINGS, _VALUES = 0, 8, 22, 24, 25, 32
IDENTITY = (1 << _VALUES) - 1
"""The bits that say which round it is."""
VALUES = 0x7FFFFFFF << _VALUES
"""Those that compare replicas."""


class Kind(IntEnum):
    ROUND = 0  # of a backward, or of a rank that takes part without one
    ABANDONED = (
        1  # its backward raised: what is left of it is sent, so that the ranks stay in step, and is worth nothing
    )
    CHANGE = 2  # not a round: this rank is about to change what it sends, and asks whether all are
    LATE = 3  # the second pass


_IN_WORDS = {
    Kind.ROUND: "",
    Kind.ABANDONED: ", whose backward had raised",
    Kind.CHANGE: ", before which it changed its settings or parameters",
    Kind.LATE: ", in the second pass for late gradients",
}


class Identity(NamedTuple):
    """Of one round on one rank."""

    module: int
    number: int
    stepped: bool | None  # since the round before; None: not to be compared
    settings: int
    follows: bool = False
    """On a rank without data, which takes part in whatever the others do: it does not step, nor hold their values."""

    def label(self, kind: Kind = Kind.ROUND, values: int | None = None) -> Label:
        value = (
            (self.module & 0xFF) << _MODULE
            | (self.number & 0x3FFF) << _NUMBER
            | kind << _KIND
            | bool(self.stepped) << _STEPPED
            | (self.settings & 0x7F) << _SETTINGS
        )
        mask = IDENTITY & ~(1 << _STEPPED) if self.stepped is None else IDENTITY
        if values is not None and not self.follows:
            value |= (values & 0x7FFFFFFF) << _VALUES
            mask |= VALUES
        return Label(value, mask)


def digest(text: str, bits: int = 63) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - bits)


class Position(NamedTuple):
    """Where a rank says it is, in an error."""

    module: str
    number: int
    kind: int
    stepped: bool
    settings: str
    parameters: str

    def pack(self) -> str:
        return json.dumps(self)

    @classmethod
    def unpack(cls, text: str) -> Position:
        found: list[Any] = json.loads(text)
        return cls(*found)

    def __str__(self) -> str:
        step = "after an optimizer's step" if self.stepped else "without an optimizer's step since the round before"
        return f"in round {self.number} of {self.module}, {step}{_IN_WORDS[Kind(self.kind)]}"


def explain(rank: int, positions: Sequence[Position | None]) -> GradsyncError:
    """Why the ranks do not fit together. None: a rank that did not say where it is."""
    told = [position for position in positions if position is not None]
    for other in told:
        if other.settings != told[0].settings:
            return different_settings(rank, [p.settings if p else "" for p in positions])
        if other.parameters != told[0].parameters and any(position.kind == Kind.CHANGE for position in told):
            text = list_differences(told[0].parameters, other.parameters, f"on rank {positions.index(other)}")
            return RosterChangedError(
                f"rank {rank}: parameters or buffers were frozen, converted, added, renamed or replaced in different "
                f"ways, or by different values, on different ranks:\n{text}\n"
                "Make the same change on all ranks before the same backward, with the same values (seed all ranks "
                "alike if they are random). Or undo it, gradsync.unreplicate(module), change it, and replicate again."
            )
    where = "\n".join(
        f"  rank {r}: {p if p is not None else 'has not said where it is'}" for r, p in enumerate(positions)
    )
    return RoundMismatchError(
        f"rank {rank}: the ranks sent each other gradients of different rounds, so nothing was delivered:\n{where}\n"
        "A rank made a backward that others did not make, or left one out, for example after an exception. All ranks "
        "must run the same backwards and steps. A rank that has to skip a batch calls model.skip_round() instead of "
        "backward (also in the handler of an exception that backward raised), and steps as the others do. Gradients "
        "of this round are lost: call zero_grad()."
    )
