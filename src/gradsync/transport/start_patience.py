"""A wait for ranks that do not come to make a replica: it says once for whom, and where those are, if that is known."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence

from gradsync import log
from gradsync.errors import InvalidOptionError
from gradsync.transport.link import listed
from gradsync.watch import settings
from gradsync.watch.patience import Patience
from gradsync.watch.watch import Watch

_WHAT = "the other ranks to make a replica"
_log = log.logger()


def _explain_after() -> float:
    """If the variable makes no sense, that is said when all ranks have come."""
    try:
        return settings.explain_after()
    except InvalidOptionError:
        return math.inf


class StartPatience:
    """Around the wait. Which ranks are lost it does not look for: `StartWatch` does."""

    def __init__(self, rank: int, limit: float, watch: Watch | None) -> None:
        """`watch`: which the ranks have in common from an earlier replica."""
        self._rank, self._limit, self._watch = rank, limit, watch
        self._began, self._has_explained = time.monotonic(), False
        self._patience: Patience | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        if self._patience is not None:
            self._patience.over()

    def explain(self, find_missing: Callable[[], Sequence[int]]) -> None:
        """Called now and then; says it when it is time."""
        waited = time.monotonic() - self._began
        if self._patience is not None:
            self._patience.explain_in_time()
        elif self._has_explained or waited <= _explain_after():
            return
        elif self._watch is not None:
            self._patience = Patience(self._watch, self._limit, _WHAT, waited)
        elif missing := find_missing():
            self._has_explained = True
            _log.warning(
                "rank %d has waited %.0f s for rank %s to make a replica too (gradsync.replicate, "
                "DistributedDataParallel or change_process_group, over the same ranks). Where it is nothing tells "
                "before the first replica: see its own output.",
                self._rank,
                waited,
                listed(missing),
            )

    def too_long(self, silent: Collection[int]) -> Exception | None:
        """At the limit, what all ranks raise; None if nothing is known that `silent` does not say."""
        if self._watch is None:
            return None
        if self._patience is None:
            self._patience = Patience(self._watch, self._limit, _WHAT, time.monotonic() - self._began)
        return self._patience.too_long(silent)
