"""The setters that torch's `ReplicateModule` has, by its names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradsync import arguments
from gradsync.arguments import shown
from gradsync.engine.engine import Engine
from gradsync.errors import InvalidOptionError, WrongTypeError
from gradsync.replica import engine_of, is_replicated


class Handle:
    """What `unshard(async_op=True)` returns."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def wait(self) -> None:
        """The module shows what it computes with."""
        self._engine.managed.compute_parameters.to_compute()


class Setters:
    """Methods of a module under `replicate`. `recurse` also reaches replicated submodules."""

    def _engines(self, recurse: bool = True) -> Iterator[Engine]:
        assert isinstance(self, nn.Module)
        for module in self.modules() if recurse else [self]:
            if is_replicated(module):
                yield engine_of(module)

    # --- gradients -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate, also in replicated submodules; the next one outside synchronizes all.

        What counts is where `backward` is called; forward may be inside or outside.
        """
        with contextlib.ExitStack() as stack:
            for engine in self._engines():
                stack.enter_context(engine.no_sync())
            yield

    def set_round_weight(self, weight: float) -> None:
        """How much this rank counts in the next round's mean, also in replicated submodules: see `Replica`."""
        for engine in self._engines():
            engine.set_round_weight(weight)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backwards from now on synchronize: `no_sync` without the indentation."""
        for engine in self._engines(recurse):
            engine.synchronize(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """The same: without shards, reducing is all there is to synchronizing."""
        self.set_requires_gradient_sync(requires_all_reduce, recurse=recurse)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted. A round ends with its backward; pipelines turn synchronization off for all but the last."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Gradients are the sum over the ranks divided by `factor`, instead of the mean."""
        for engine in self._engines():
            engine.set_divide_factor(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """torch's older name for `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted: buckets are always summed, and scaled before that."""

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """`hook(gradients)` sees each bucket's reduced gradients, flat, before they are delivered."""
        if not callable(hook):
            raise WrongTypeError(f"Communication hook must be callable, with a tensor, but is {shown(hook)}.")
        for engine in self._engines(recurse=False):
            engine.show_reduced(hook)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Accepted: broadcasts and copies follow the current stream, on which the optimizer ran."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted: the transport decides where its buckets are."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Accepted: the transport decides where its buckets are."""

    def reset_iter_state(self) -> None:
        """After a forward or backward that raised: the registered parameters are in the module again.

        The next forward would see to that too, and to the round that was left open.
        """
        for engine in self._engines():
            engine.managed.compute_parameters.to_registered()

    # --- shards, of which there are none ---------------------------------------------------------
    # What torch unshards it also computes with, and what it reshards is what is registered: that much is left of it.

    def unshard(self, async_op: bool = False) -> Handle | None:
        """Shows the parameters that compute, with a mesh or a precision policy; not of replicated submodules.

        With `async_op=True` when the handle that it returns is waited for. A forward does so by itself.
        """
        assert isinstance(self, nn.Module)
        handle = Handle(engine_of(self))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Shows the registered parameters, as after a backward; not of replicated submodules.

        After a forward, for an optimizer that is built before the first backward. That works as ever.
        """
        for engine in self._engines(recurse=False):
            engine.managed.compute_parameters.to_registered()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Accepted: there is no memory to free. After a forward with a graph parameters compute until its backward."""

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether the end of a backward shows the registered parameters; if not, `reshard()` does."""
        for engine in self._engines(recurse):
            engine.managed.compute_parameters.hide_after_backward(reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """There is nothing to gather."""

    def set_custom_all_gather(self, comm: Any) -> None:
        """There is nothing to gather."""

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """There is nothing to scatter; `register_comm_hook` is for what reduces."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accepted: parameters may be used or not, on any rank."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """There is nothing to scatter."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """There is nothing to scatter."""

    def set_modules_to_forward_prefetch(self, modules: list[nn.Module]) -> None:
        """There is nothing to prefetch."""
        _check_prefetched(modules)

    def set_modules_to_backward_prefetch(self, modules: list[nn.Module]) -> None:
        """There is nothing to prefetch."""
        _check_prefetched(modules)


def _check_prefetched(modules: list[nn.Module]) -> None:
    for module in arguments.items("modules", modules, object, "Pass a list of replicated modules."):
        if not isinstance(module, nn.Module) or not is_replicated(module):
            raise InvalidOptionError(f"Expects FSDPModule but got {type(module)}: replicate the module first.")
