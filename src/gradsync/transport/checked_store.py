"""A store whose waits end: by a rank that is lost, or by the keyboard."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from gradsync._torch import Store
from gradsync.transport.store import await_keys


class CheckedStore(Store):
    """The same store; gloo, which waits for other ranks' addresses in it, takes one that is written in Python."""

    def __init__(self, store: Store, limit: float, check: Callable[[], None]) -> None:
        super().__init__()
        self._store, self._limit = store, limit
        self._check_while_waiting: Callable[[], None] | None = check

    def stop_checking(self) -> None:
        self._check_while_waiting = None

    def stop_if_pointless(self) -> None:
        """Raises if it has become pointless to wait."""
        if self._check_while_waiting is not None:
            self._check_while_waiting()

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, bytes(value))  # type: ignore[arg-type]  # it takes bytes too

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """For as long as the group allows, not as gloo would like it: a rank may come late."""
        if missing := await_keys(self._store, keys, self._limit, self._check_while_waiting):
            raise TimeoutError(f"no word under {', '.join(missing)}")

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def has_extended_api(self) -> bool:
        return False
