"""Communication hooks: `hook(state, bucket) -> Future[Tensor]` reduces a bucket instead of us.

The bucket has the methods of torch's `GradBucket`, so that the stock hooks of
`torch.distributed.algorithms.ddp_comm_hooks` run on it unchanged. It holds this rank's gradients as
they are, not divided; what the future brings replaces them as it is.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from gradsync import _torch
from gradsync.arguments import shown
from gradsync.errors import HookError, InvalidOptionError, WrongTypeError
from gradsync.events import Traffic

Hook = Callable[[Any, Any], Future[Tensor]]
_RETURNS = (inspect.Signature.empty, torch.futures.Future[torch.Tensor], torch.futures.Future)


class GradBucket:
    """One bucket, as a communication hook sees it."""

    def __init__(
        self, data: Tensor, gradients: Sequence[Tensor], parameters: Sequence[Tensor], index: int, is_last: bool
    ) -> None:
        self._data = data
        self._gradients = list(gradients)
        self._parameters = list(parameters)
        self._index = index
        self._is_last = is_last

    def index(self) -> int:
        """The bucket's number; buckets are launched in this order."""
        return self._index

    def buffer(self) -> Tensor:
        """All gradients, flat, one after the other."""
        return self._data

    def set_buffer(self, buffer: Tensor) -> None:
        self._data = buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer in the parameters' shapes."""
        return list(self._gradients)

    def parameters(self) -> list[Tensor]:
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the round."""
        return self._is_last


class HookWork(NamedTuple):
    """A hook's future under way, together with the tail, which travels beside it."""

    future: Future[Any]
    data: Tensor
    tail: Any  # Work
    rank: int
    name: str
    limit: float  # seconds

    def _wait_within_limit(self) -> None:
        """A future has no time limit of its own, and one that nobody completes would be waited for for ever."""
        began, pause = time.monotonic(), 0.0001
        while not self.future.done():
            if time.monotonic() - began > self.limit:
                raise HookError(
                    f"rank {self.rank}: communication hook '{self.name}' returned a future that did not complete "
                    f"within {self.limit:g} s, the time limit of the process group. Complete it on every path; if it "
                    "waits for other ranks, see whether the hook raised there; or give init_process_group a longer "
                    "timeout.",
                    timed_out=True,
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.005)

    def done(self) -> bool:
        return bool(self.future.done() and self.tail.done())

    def differing(self) -> int:
        found: int = self.tail.differing()
        return found

    def traffic(self) -> Traffic:
        """Of the tail; what the hook sends, nobody but itself knows."""
        found: Traffic = self.tail.traffic()
        return found

    def wait(self) -> None:
        self._wait_within_limit()
        failed = None
        try:
            self._take_result()
        except Exception as error:
            failed = error
        self.tail.wait()  # which all ranks read, whatever the hook did; if that fails, it is not about the hook
        if failed is not None and not isinstance(failed, HookError):
            raise HookError(
                f"rank {self.rank}: communication hook '{self.name}' failed: {type(failed).__name__}: {failed}"
            ) from failed
        if failed is not None:
            raise failed

    def _take_result(self) -> None:
        result = self.future.wait()
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]
        if not _alike(result, self.data):
            found = f"{result.numel()} x {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
            raise HookError(
                f"rank {self.rank}: communication hook '{self.name}' must bring a tensor like the bucket's buffer, "
                f"{self.data.numel()} x {self.data.dtype}, but brought {found}."
            )
        if result.data_ptr() != self.data.data_ptr():
            self.data.copy_(result.view_as(self.data))


def call(hook: Hook, state: object, bucket: GradBucket, rank: int) -> Future[Any]:
    """For one bucket."""
    future = hook(state, bucket)
    if not isinstance(future, _torch.Future):
        raise HookError(
            "callback must return a torch.futures.Future object, but got "
            f"{type(future).__name__} from hook '{name_of(hook)}' on rank {rank}. Return for example "
            "dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0] / world_size)."
        )
    return future


def check_hook(hook: object) -> None:
    """Refuses what can't be a hook, as torch does."""
    if not callable(hook):
        raise WrongTypeError(f"Communication hook must be callable, with (state, bucket), but is {shown(hook)}.")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and not _names_bucket(bucket.annotation):
        raise InvalidOptionError("Communication hook: bucket annotation should be dist.GradBucket.")
    returned = signature.return_annotation
    if returned not in _RETURNS and not any(word in str(returned) for word in ("Future", "Any")):
        raise InvalidOptionError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor] or "
            "torch.futures.Future."
        )


def _alike(result: object, data: Tensor) -> bool:
    """As many elements of the same sort; compressed ones are decompressed on the way into the bucket."""
    return (
        isinstance(result, Tensor)
        and result.numel() == data.numel()
        and result.is_floating_point() is data.is_floating_point()
        and result.is_complex() is data.is_complex()
    )


def _names_bucket(annotation: Any) -> bool:
    """torch's class, ours, or no annotation; also as text, which `from __future__ import annotations` makes of it."""
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return annotation in (inspect.Parameter.empty, Any) or name.split(".")[-1] in ("GradBucket", "Any")


def name_of(hook: Any) -> str:
    name: str = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    return name
