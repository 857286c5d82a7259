"""The process group of an epoch: torch's default one, made anew of those who train together from now on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from gradsync import _torch, groups
from gradsync._torch import Store
from gradsync.transport import shared_watch
from gradsync.transport.checked_store import CheckedStore

# For the connections, once all have told where they are: who is killed just then has an address, and never comes. gloo
# can't be interrupted there.
_CONNECT_SECONDS, _CONNECT_SECONDS_A_RANK = 7.5, 0.02
# torch keeps only the part of a store that is written in C++.
_stores: list[Store] = []


class _EpochStore(CheckedStore):
    """Ranks look into it again and again while they wait for each other: each look hears of one that is lost."""

    @property
    def host(self) -> str:
        return _torch.host_of(self._store)

    def check(self, keys: list[str]) -> bool:
        self.stop_if_pointless()
        return super().check(keys)


def begin(
    number: int, rank: int, size: int, store: Store, check: Callable[[], None], device_type: str, limit: timedelta
) -> dist.ProcessGroup:
    """`number`: of the epoch. `check`: raises if a rank of it is lost. `limit`: of each collective."""
    apart = dist.PrefixStore(f"gradsync/epoch/{number}", store)  # type: ignore[attr-defined]
    end()
    shared_watch.forget()
    checked = _EpochStore(apart, limit.total_seconds(), check)
    _stores.append(checked)
    backend = groups.backend_for(device_type)
    to_connect = _torch.seconds_to_connect(_CONNECT_SECONDS + size * _CONNECT_SECONDS_A_RANK)
    with _one_prefix():
        dist.init_process_group(backend, store=checked, rank=rank, world_size=size, timeout=min(limit, to_connect))
    groups.end_at_exit()
    made = dist.group.WORLD
    assert made is not None
    _torch.set_timeout(made, limit)
    return made


@contextlib.contextmanager
def _one_prefix() -> Iterator[None]:
    """torch puts the rank before lines of tracebacks, with each group that it makes: that of this epoch only."""
    global _shows, _shows_plainly
    if sys.excepthook is _shows:
        vars(sys)["excepthook"] = _shows_plainly
    _shows_plainly = sys.excepthook
    yield
    _shows = sys.excepthook


_shows = _shows_plainly = sys.excepthook


def end() -> None:
    """The one before, or what is left of it if it could not be made."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _torch.forget_failed_group()
