"""Children that a rank forks."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest

# Python 3.12 and later warn of forks beside threads, which gloo has.
FORKS_BESIDE_THREADS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def in_child(body: Callable[[], None]) -> None:
    """Runs in a forked child, and fails here if it raises there."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "see the output of this rank"
