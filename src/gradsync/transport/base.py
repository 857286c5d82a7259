"""What the engine asks of a transport. A transport knows ranks and memory, not models or rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gradsync.events import NO_TRAFFIC, Traffic
from gradsync.transport.label import UNLABELLED, Label
from gradsync.transport.tree import Order
from gradsync.watch.watch import Watch


class Request(NamedTuple):
    """A buffer asked for."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    reserve: bool = True
    """Whether there must be memory for all of it at once; not for `reduce_rows`, which may never use most of it."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Returns when the result may be used (on a GPU: by work queued after this call)."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""

    def differing(self) -> int:
        """After `wait`: the bits of the label on which ranks disagree. The result is worthless if any is essential."""

    def traffic(self) -> Traffic:
        """After `wait`: what it has made travel."""


class Done:
    """A work that is over."""

    def __init__(self, differing: int = 0, traffic: Traffic = NO_TRAFFIC) -> None:
        self._differing, self._traffic = differing, traffic

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True

    def differing(self) -> int:
        return self._differing

    def traffic(self) -> Traffic:
        return self._traffic


def all_reduced(nbytes: int, ranks: int) -> int:
    """Bytes that others get from a rank when so many are summed over the ranks: its part of their sums, and its sums.

    So it is in a ring, as gloo's, and in shared memory alike; other backends may do better or worse.
    """
    return 2 * nbytes * (ranks - 1) // ranks


class RowWork(Work, Protocol):
    """A sum of matrices under way that have few rows other than zero."""

    @property
    def result(self) -> Tensor | None:
        """The matrix that was given, which is the sum now; None: the sum is in the buffer. After `wait`."""


class ShareWork(Work, Protocol):
    """A sum under way of which each rank gets its share."""

    def share(self) -> Tensor:
        """After `wait`: this rank's share, which is its own to overwrite until `release`."""

    def tail(self) -> Tensor:
        """After `wait`, until `release`: the sum of what is behind the shares."""

    def release(self) -> None:
        """After `wait`: this rank has no use for the result any more."""


class SparseWork(Protocol):
    """A sparse reduction under way, whose result is a tensor of its own."""

    def result(self) -> Tensor:
        """Waits, then gives the reduced gradient."""


class SharedOnce(Protocol):
    """Memory of which each rank writes its share."""

    is_common: bool
    """The ranks of a host see the same; else each has its own, of which it knows its share until it is spread."""
    local_rank: int
    size: int
    ranks: list[int]
    """Who has shares, by their numbers in the group."""

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """So many elements from that byte on, with a storage of their own."""

    def spread(self, offset: int, numel: int, dtype: torch.dtype) -> None:
        """All ranks have written their shares of these elements: makes all of them see the whole."""

    def meet(self, what: str, said: int = 0) -> int:
        """Returns when all of them are here, with the largest number that any has said; `what` they do, in words."""


class Transport(Protocol):
    """Carries buckets between the ranks of one group.

    Every method that communicates is called by all ranks in the same order.
    """

    name: str
    rank: int
    size: int
    limit: float
    """Seconds that a collective may take."""
    usual_caps: tuple[int, ...]
    """Sizes in bytes of the first, second, ... bucket that suit it, the last one counting for all that follow."""
    reason: str
    """Why it is this one, if there is more to say than that it is the best."""

    @property
    def watch(self) -> Watch | None:
        """The connection between the ranks beside their collectives, if there is one."""

    @property
    def progress(self) -> Callable[[], None] | None:
        """To be called often while something is under way; None if the transport has threads of its own for that."""

    def starting(self) -> AbstractContextManager[None]:
        """Inside, the replica is made, on all ranks. Those that fail or end meanwhile are named, at once."""

    def check_alive(self) -> None:
        """Raises if a rank is known to be lost; costs next to nothing, and communicates nothing."""

    def allocate(self, requests: Sequence[Request]) -> list[Tensor]:
        """Memory for buckets, with anything in it, from which this transport reduces best.

        Ranks may have to do this together. The memory lives as long as a tensor over it.
        """

    def is_shared(self, buffer: Tensor) -> bool:
        """Whether other ranks see this memory, which `allocate` gave."""

    def allocate_once(self, nbytes: int) -> SharedOnce:
        """Memory for what each rank has a share of: the ranks of a host have it in common, or each its own."""

    def reduce(self, buffer: Tensor, scale: float, label: Label = UNLABELLED) -> Work:
        """Starts replacing `buffer` on every rank by the sum over the ranks of `scale * buffer`.

        Ranks may pass different scales. The result is bitwise the same on all ranks. The buffer
        must stay untouched until `wait` returned. With a label it must end where memory ends that
        `allocate` gave.
        """

    def allocate_reused(self, requests: Sequence[Request]) -> list[Tensor]:
        """The same for `reduce_share`, of buffers that are filled one after the other, each when it `is_free`: several
        may have the same memory.
        """

    def is_free(self, buffer: Tensor) -> bool:
        """Whether a buffer of `allocate_reused` may be filled: all ranks have released what was in that memory."""

    def await_free(self, buffer: Tensor) -> None:
        """Until it is. This rank must have released it before."""

    def reduce_share(self, buffer: Tensor, data: int, scale: float, label: Label = UNLABELLED) -> ShareWork:
        """`reduce`, but of the first `data` elements each rank gets its share (`shares.bounds`), and no more.

        What is behind them, all ranks get.
        """

    @property
    def reduce_rows(self) -> Callable[[Tensor, Tensor, Tensor | None, float, Label], RowWork] | None:
        """`reduce(buffer, scale, label)` for a buffer that begins with a matrix; None if there is nothing to save.

        Called with the buffer, of which only what is behind the matrix has to be filled, the matrix, the numbers of
        its rows that are not zero, or None for any, the scale and the label.
        """

    def reduce_in_order(self, terms: Sequence[Tensor], order: Order, scale: float, label: Label = UNLABELLED) -> Work:
        """Starts replacing the first of `terms` on every rank by `scale` times the sum of all ranks' terms in `order`.

        `terms`: buffers of one size, as many as the rank with most of them has, of which this rank fills its own, the
        first ones; the transport may write to them. With a label they must end where memory ends that `allocate` gave.
        """

    def gather_tensors(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor, of the same shape and type; flat."""

    def reduce_sparse(self, gradient: Tensor, scale: float) -> SparseWork:
        """Starts summing `scale * gradient`, a sparse COO tensor, over the ranks."""

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """Overwrites the tensors, of any dtypes, with those of rank `source`."""

    def check_rendezvous(self) -> None:
        """Before the first round: raises if this rank skipped the rendezvous at the start and others came to it."""

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers; all ranks give equally many, each fitting 64 bits."""

    def gather_text(self, text: str) -> list[str]:
        """Every rank's text, of any length."""

    def exchange_via_store(self, topic: str, text: str, limit: float | None = None) -> list[str]:
        """Every rank's text on a topic, exchanged beside the collectives within `limit` seconds, if given.

        For what some ranks may not know of: those that never bring up the topic are named in a `TimeoutError`, where
        a collective of ours would be matched with whatever collective they start instead.
        """
