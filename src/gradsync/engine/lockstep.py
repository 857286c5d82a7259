"""Which round it is, as all ranks count them: what travels with every bucket, and what to say when it is not the same.

Nothing but the order of collectives ties a bucket of one rank to that of another. A rank that skipped a batch, or made
a backward that the others did not make, is one round off, and what it sends would be added to something else. So each
bucket carries a label (see `transport/label.py`), which every rank checks before it delivers anything:

    bits   0 ..  7   module     the serial number of the replicated module
           8 .. 17   number     of the round
          18 .. 21   bucket     its number in the plan
          22 .. 23   kind       see `Kind`
          24         stepped    an optimizer has stepped since the round before
          25 .. 31   settings   digest of what ranks must have set alike
          32 .. 62   values     fingerprint of the parameters, in the last bucket: see `guard/replicas.py`

A rank knows nothing else of where the others are. Only when labels differ do the ranks tell each other in words,
through the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from gradsync.engine.module_state import ModuleState
from gradsync.errors import GradsyncError, ParametersChangedError, RoundMismatchError
from gradsync.guard.start import crossed, different_settings, list_differences
from gradsync.transport.base import Transport
from gradsync.transport.label import Label
from gradsync.watch.position import here

_MODULE, _NUMBER, _BUCKET, _KIND, _STEPPED, _SETTINGS, _VALUES = 0, 8, 18, 22, 24, 25, 32
IDENTITY = (1 << _VALUES) - 1
"""The bits that say which round it is."""
SAME_BUCKET = (1 << _KIND) - 1
"""Those that say which bucket of which round: if ranks agree on these, they have at least the same memory in mind."""
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

    def label(self, kind: Kind = Kind.ROUND, bucket: int = 0, values: int | None = None) -> Label:
        value = (
            (self.module & 0xFF) << _MODULE
            | (self.number & 0x3FF) << _NUMBER
            | (bucket & 0xF) << _BUCKET
            | kind << _KIND
            | bool(self.stepped) << _STEPPED
            | (self.settings & 0x7F) << _SETTINGS
        )
        mask = IDENTITY & ~(1 << _STEPPED) if self.stepped is None else IDENTITY
        if values is not None and not self.follows:
            value |= (values & 0x7FFFFFFF) << _VALUES
            mask |= VALUES
        return Label(value, mask, essential=SAME_BUCKET)


def digest(text: str, bits: int = 63) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - bits)


class Standing(NamedTuple):
    """Where a rank says it is, in an error."""

    module: str
    number: int
    kind: int
    stepped: bool
    settings: str
    parameters: str
    step: int | None = None
    """Of a training by shards."""

    def pack(self) -> str:
        return json.dumps(self)

    @classmethod
    def unpack(cls, text: str) -> Standing:
        found: list[Any] = json.loads(text)
        return cls(*found)

    def __str__(self) -> str:
        step = "after an optimizer's step" if self.stepped else "without an optimizer's step since the round before"
        of_shards = "" if self.step is None else f"in step {self.step} of its shards, "
        return f"{of_shards}in round {self.number} of {self.module}, {step}{_IN_WORDS[Kind(self.kind)]}"


def explain(rank: int, standings: Sequence[Standing | None]) -> GradsyncError:
    """Why the ranks do not fit together. None: a rank that did not say where it is."""
    told = [standing for standing in standings if standing is not None]
    for other in told:
        if other.settings != told[0].settings:
            return different_settings(rank, [p.settings if p else "" for p in standings])
        if other.parameters != told[0].parameters and any(standing.kind == Kind.CHANGE for standing in told):
            text = list_differences(told[0].parameters, other.parameters, f"on rank {standings.index(other)}")
            return ParametersChangedError(
                f"rank {rank}: parameters or buffers were frozen, converted, added, renamed or replaced in different "
                f"ways, or by different values, on different ranks:\n{text}\n"
                "Make the same change on all ranks before the same backward, with the same values (seed all ranks "
                "alike if they are random). Or undo it, gradsync.unreplicate(module), change it, and replicate again."
            )
    if len({standing.step for standing in told}) > 1:
        skipping = "Ranks that compute steps by shards make a step again that was not whole: shards.step is its number."
    else:
        skipping = (
            "A rank that has to skip a batch calls model.skip_round() instead of backward (also in the handler of an "
            "exception that backward raised), and steps as the others do."
        )
    where = "\n".join(
        f"  rank {r}: {p if p is not None else 'has not said where it is'}" for r, p in enumerate(standings)
    )
    return RoundMismatchError(
        f"rank {rank}: the ranks sent each other gradients of different rounds, so nothing was delivered:\n{where}\n"
        "A rank made a backward that others did not make, or left one out, for example after an exception. All ranks "
        f"must run the same backwards and steps. {skipping} Gradients of this round are lost: call zero_grad()."
    )


# How long ranks that were in different rounds wait for each other to say where they were.
_EXPLAIN_SECONDS = 20.0


class Lockstep:
    """Of one replicated module."""

    def __init__(self, name: str, state: ModuleState, serial: int, settings: str, begun_alike: bool = False) -> None:
        """`settings`: what must be set alike on all ranks, a line `name: value` for each; `serial`: orders the
        replicated modules of a process, alike on all ranks as soon as they have compared it; `begun_alike`: all ranks
        held the same values before rank 0's were broadcast.
        """
        self.name = name
        self._state = state
        self.serial = serial
        self.launches = 0
        """Buckets that have left, ever."""
        self._begun_alike = begun_alike
        self._number = 0  # of the next round
        self._stepped: bool | None = None  # since the latest round; None: not known, or not to be compared
        self._mismatches = 0
        self._step: int | None = None
        self.set_alike(settings)

    @property
    def number(self) -> int:
        """Of the round under way, or else of the next one."""
        return self._number

    def set_alike(self, settings: str) -> None:
        """All ranks must have these settings from now on."""
        self.settings = settings
        self._digest = digest(settings, 7)

    def set_step(self, step: int | None) -> None:
        """The rounds to come belong to this step of a training by shards; None: to no such one."""
        self._step = step

    # --- counting --------------------------------------------------------------------------------

    def next_round(self, follows: bool = False) -> Identity:
        """`follows`: on a rank without data, which takes part in whatever the others do."""
        stepped = None if follows or self._number == 0 else self._stepped
        # Steps that follow each other never look alike.
        return Identity(self.serial, self._number, stepped, self._digest + (self._step or 0), follows)

    def count_round(self) -> None:
        """All ranks have ended it; steps are counted from here."""
        here.round_closed(self.name, self.serial, self._number)
        self._number += 1
        self._stepped = False

    def enter(self, phase: str, awaits: object = "") -> None:
        """This rank is there now, for others to know; see `watch/position.py`."""
        here.enter(phase, self.name, self.serial, self._number, awaits)

    def enter_forward(self) -> None:
        here.forward_begins()
        self.enter("in forward")

    def leave_forward(self) -> None:
        self.enter("past the forward")

    def count_launch(self) -> None:
        self.launches += 1

    def enter_step(self) -> None:
        """An optimizer's, which belongs to the latest round."""
        if self._number:
            here.enter("in the optimizer's step", self.name, self.serial, self._number - 1)

    def optimizer_stepped(self) -> None:
        self._stepped = True
        if here.now.phase == "in the optimizer's step":
            here.enter("past the end", self.name, self.serial, self._number - 1)

    def forget_steps(self) -> None:
        """From now on ranks may have stepped differently, as in a `Join` context."""
        self._stepped = None

    def restart(self) -> None:
        """With other ranks."""
        self._number, self._stepped = 0, None

    # --- comparing -------------------------------------------------------------------------------

    def before_change(self, described: str) -> Identity:
        """Of what is sent in place of a round when this rank is about to change something."""
        return Identity(self.serial, self._number, None, digest(f"{self.settings}\n{described}", 7))

    def describe(self) -> str:
        return self._state.describe()

    def compare_start(
        self, identity: Identity, weight: int, opened_as: int, others: Sequence[Lockstep], transport: Transport
    ) -> list[int]:
        """In the first round, or the first with other parameters: the ranks compare what they have set.

        `opened_as`: how many rounds of other modules this backward had opened before; `others`: of modules with a round
        in this backward. Gives every rank's weight.
        """
        described = self.describe()
        twins = any(other.describe() == described for other in others)
        transport.check_rendezvous()
        mine = [weight, digest(f"{self.settings}\n{described}"), self.serial, opened_as, int(twins)]
        try:
            rows = transport.gather(mine)
        except RuntimeError:
            transport.check_rendezvous()  # they may have come to it, and left, in between
            raise
        if len({row[1] for row in rows}) > 1:
            raise self.mismatch(identity, Kind.CHANGE, transport, described)
        if len({row[3] for row in rows if row[4]}) > 1 and not self._begun_alike:
            raise crossed(transport.rank, self.name, [row[3] for row in rows])
        self._state.mark_agreed()
        self.serial = rows[0][2]
        return [row[0] for row in rows]

    def mismatch(self, identity: Identity, kind: Kind, transport: Transport, described: str = "") -> GradsyncError:
        """After all that was sent has come home: says to the other ranks where this one is, and hears from them."""
        stepped, described = bool(identity.stepped), described or self.describe()
        mine = Standing(self.name, identity.number, kind, stepped, self.settings, described, self._step)
        standings: list[Standing | None] = [None] * transport.size
        standings[transport.rank] = mine
        self._mismatches += 1
        topic = f"standings/{self.serial}/{self.launches}/{self._mismatches}"
        with contextlib.suppress(Exception):  # a rank that says nothing is named in the error
            said = transport.exchange_via_store(topic, mine.pack(), min(transport.limit, _EXPLAIN_SECONDS))
            standings = [Standing.unpack(text) for text in said]
        # All ranks are at the same place again, if they go on.
        self._number = 1 + max(standing.number for standing in standings if standing is not None)
        self._stepped = None
        return explain(transport.rank, standings)

    def diverged(self) -> None:
        """All ranks were in the same round, which none of them delivers."""
        self._number += 1
