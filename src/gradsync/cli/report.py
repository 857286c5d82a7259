"""What a rank tells the process that started it: JSON objects, one a line, through an inherited pipe.

A pipe of its own, because anything may print to standard output. Ranks of `gradsync run --elastic`, which come and go
and inherit nothing, have one with a name (`launched.py`).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Set by launch.py or launched.py for each rank, read only by `reporting`.
FD_VARIABLE, PATH_VARIABLE = "GRADSYNC_REPORT_FD", "GRADSYNC_REPORT_PATH"
FAILED = "failed"

Record = dict[str, Any]


class Reporter:
    """The writing end, in a rank."""

    def __init__(self, fd: int) -> None:
        self._pipe = os.fdopen(fd, "w", buffering=1, encoding="utf-8")

    def send(self, event: str, **fields: Any) -> None:
        self._pipe.write(json.dumps({"event": event, **fields}) + "\n")


class Inbox:
    """The reading end, in the parent. Never blocks: a rank may be stopped in the middle of a line."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.ended = False  # every writer is gone
        self._partial = b""

    def read(self) -> list[Record]:
        """The records that are complete by now."""
        try:
            chunk = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return []
        self.ended = not chunk
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        os.close(self.fd)


@contextmanager
def reporting() -> Iterator[Reporter]:
    """The body of a rank. A failure is reported with its time before the process begins to fall apart.

    When one rank fails its peers fail too, because their connection to it breaks, and any of them may be
    the first to have ended. The time of the report tells cause from consequence. For the same reason the
    process leaves at once: tearing down a broken process group can take long.
    """
    path = os.environ.get(PATH_VARIABLE)
    reporter = Reporter(os.open(path, os.O_WRONLY) if path else int(os.environ[FD_VARIABLE]))
    try:
        yield reporter
    except BaseException as error:
        reporter.send(FAILED, at=time.monotonic(), error=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
