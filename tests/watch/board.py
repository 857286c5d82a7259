"""A store inside one process, and several nodes of the watch that have met through it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from gradsync.watch.watch import Watch, connect


class Board:
    """What `Watch` asks of the group's store."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        self._changed = threading.Condition()

    def publish(self, key: str, text: str) -> None:
        with self._changed:
            self.said[key] = text
            self._changed.notify_all()

    def read(self, key: str, seconds: float) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.said, seconds):
                raise TimeoutError(f"nobody has published {key}")
            return self.said[key]

    def check(self) -> None:
        """All are here."""


def together(actions: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def watches(hosts: Sequence[Sequence[int]], board: Board | None = None) -> Iterator[list[Watch]]:
    """One for each rank, connected over real sockets, in threads of this process."""
    board = Board() if board is None else board
    made: dict[int, Watch] = {}

    def join(rank: int) -> None:
        watch = connect(board, "watch", rank, hosts, lambda: "127.0.0.1")
        assert watch is not None
        made[rank] = watch

    ranks = sorted(rank for host in hosts for rank in host)
    together([lambda rank=rank: join(rank) for rank in ranks])  # type: ignore[misc]
    try:
        yield [made[rank] for rank in ranks]
    finally:
        together([watch.end for watch in made.values()])
