"""Phases as ranges in the traces of torch's profilers. Where none is on, that costs one question a range."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

from gradsync import _torch

_NOTHING: AbstractContextManager[object] = nullcontext()


def ranged(phase: str, bucket: int = -1) -> AbstractContextManager[object]:
    """Inside, what this thread does is shown as `gradsync.<phase>`, of a bucket if it has a number."""
    if not _torch.profiling():
        return _NOTHING
    return record_function(f"gradsync.{phase} bucket {bucket}" if bucket >= 0 else f"gradsync.{phase}")


class OpenRange:
    """One that begins in one call and ends in another."""

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self._opened: AbstractContextManager[object] | None = None

    def begin(self) -> None:
        if not torch.compiler.is_dynamo_compiling() and _torch.profiling():
            self.end()  # of one that was never told to
            self._opened = ranged(self._phase)
            self._opened.__enter__()

    def end(self) -> None:
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.__exit__(None, None, None)
