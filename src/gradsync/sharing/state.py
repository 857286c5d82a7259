"""The state of a shared optimizer lies in common memory too: any rank of the host can read all of it, at any time.

Each rank writes its share. So a checkpoint needs no exchange: `state_dict()` on one rank alone is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync.engine.parameter_group import ParameterGroup
from gradsync.errors import NotSupportedError
from gradsync.sharing.counters import copied, is_like
from gradsync.sharing.runs import Run
from gradsync.transport.base import SharedOnce
from gradsync.transport.shares import LINE, round_up


class RunState:
    """Of all runs of one replica: tensors like the parameters, by their names (`exp_avg`), a piece of memory each."""

    def __init__(self, group: ParameterGroup) -> None:
        self._group = group
        self._bases, self._end = [], 0  # in bytes, of each bucket
        for bucket in group.buckets:
            self._bases.append(self._end)
            self._end = round_up(self._end + bucket.plan.nbytes, LINE)
        self._memories: dict[str, SharedOnce] = {}

    def bring(self, runs: Sequence[Run], states: Sequence[dict[str, Any]]) -> None:
        """Moves what is new in the states of these runs to common memory, as far as that has some for it."""
        for run, state in zip(runs, states, strict=True):
            for key, value in state.items():
                if is_like(key, value) and key in self._memories and not self._lies_in(key, run, value):
                    self._check_type(key, run, value.dtype)
                    place = self._flat(key, run)
                    place.copy_(value)
                    state[key] = place

    def allocate(self, keys: Sequence[str]) -> None:
        """All ranks together."""
        for key in sorted(set(keys) - self._memories.keys()):
            self._memories[key] = self._group.transport.allocate_once(self._end)

    def new_keys(self, runs: Sequence[Run], states: Sequence[dict[str, Any]]) -> list[str]:
        """Names of tensors that have no memory yet."""
        both = zip(runs, states, strict=True)
        return [k for run, state in both for k, v in state.items() if is_like(k, v) and k not in self._memories]

    def spread(self) -> None:
        """Makes the whole of it be seen by all ranks, who do this together unless they have memory in common."""
        for _, memory in sorted(self._memories.items()):
            for base, bucket in zip(self._bases, self._group.buckets, strict=True):
                memory.spread(base, bucket.plan.numel, bucket.plan.dtype)

    def of_parameter(self, run: Run, at: int, state: dict[str, Any]) -> dict[str, Any]:
        """The state of one parameter of a run, in the plain optimizer's form; `at`: its place in the bucket."""
        view = run.bucket.views[at]
        return {k: self._whole(k, run, at, view) if is_like(k, v) else copied(v) for k, v in state.items()}

    def _whole(self, key: str, run: Run, at: int, like: Tensor) -> Tensor:
        place = run.bucket.plan.places[at]
        offset = self._bases[run.number] + place.offset * like.dtype.itemsize
        return self._memories[key].tensor(offset, place.numel, like.dtype).as_strided(like.shape, like.stride())

    def _flat(self, key: str, run: Run) -> Tensor:
        dtype, extent = run.bucket.plan.dtype, run.extent
        offset = self._bases[run.number] + extent.start * dtype.itemsize
        return self._memories[key].tensor(offset, extent.stop - extent.start, dtype)

    def _lies_in(self, key: str, run: Run, value: Tensor) -> bool:
        return value.data_ptr() == self._flat(key, run).data_ptr()

    def _check_type(self, key: str, run: Run, dtype: torch.dtype) -> None:
        if dtype != run.bucket.plan.dtype:
            raise NotSupportedError(
                f"rank {self._group.transport.rank}: the optimizer's '{key}' is in {dtype} for parameters in "
                f"{run.bucket.plan.dtype}, and can't be shared. Use this optimizer without gradsync.share_optimizer()."
            )
