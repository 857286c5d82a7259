"""Module buffers kept in step, by default by taking over rank 0's at the end of each round.

Not in forward: there a rank that evaluates alone would wait for the others for ever, and several
forwards before one backward would pay several times. After a round all ranks hold the same buffers,
so evaluation, saving and the next forward find them in step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.futures import Future

from gradsync.engine.module_names import IgnoredTensors, named_buffers
from gradsync.engine.module_snapshot import ModuleSnapshot
from gradsync.guard.fingerprint import digest
from gradsync.options import Options
from gradsync.transport.base import Transport

BufferHook = Callable[[object, dict[str, Tensor]], "list[Future[object]] | None"]


class BufferHookLocation(Enum):
    """When a user's buffer hook runs. Names and values are torch's."""

    PRE_FORWARD = 1
    POST_FORWARD = 2


class Buffers:
    """The buffers of one replicated module."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        transport: Transport,
        options: Options,
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        self._modules = modules
        self._training = modules[0]  # whose mode counts
        self._transport = transport
        self._options = options
        self._ignored = IgnoredTensors(modules, ignored)
        self._hook: tuple[object, BufferHook, BufferHookLocation] | None = None
        self._out_of_data: bool | None = None
        self._by_shards = False
        self._stale = False  # a round closed since the last exchange before evaluation
        self._kinds: dict[str, str] = {}
        self._read()
        self.mark_agreed()

    def named(self) -> list[tuple[str, Tensor]]:
        """All buffers that are not ignored; modules replace them freely."""
        # `module.to()` replaces buffers without telling anybody.
        if self._structure.look_for_changes() or self._registered.look_for_changes() or self._registered.replaced():
            self._read()
        return self._named

    def _read(self) -> None:
        self._structure = ModuleSnapshot(self._modules, "_modules")
        self._registered = ModuleSnapshot(self._modules, "_buffers")
        self._named = self._ignored.without(named_buffers(self._modules))
        kinds = {name: f"buffer {list(one.shape)} {one.dtype}" for name, one in self._named}
        if kinds != self._kinds:  # else the same object, which is compared more quickly
            self._kinds = kinds

    def look_for_changes(self) -> bool:
        """Whether there are other buffers, or in other forms, than all ranks had."""
        if self._options.buffers == "never":
            return False
        if self._structure.look_for_changes() or self._registered.look_for_changes():
            self._read()
        return self._kinds is not self._agreed

    def mark_agreed(self) -> None:
        """All ranks have the same buffers as this one now."""
        self._agreed = self._kinds
        self._agreed_on = WeakSet(submodule for module in self._modules for submodule in module.modules())

    def describe(self, with_values: bool) -> str:
        """A text that is equal on two ranks if they have the same buffers.

        `with_values`: parameters were changed too. New buffers beside them, as a mask for pruning, must then have the
        same values; those of new modules may have been written to by a forward, as statistics are.
        """
        if self._options.buffers == "never":
            return ""
        beside = {id(one) for submodule in self._agreed_on for one in submodule.buffers(recurse=False)}
        rows = []
        for name, buffer in self._named:
            new = with_values and name not in self._agreed and id(buffer) in beside
            rows.append(f"{name}: {self._kinds[name]}" + f" with values {digest(buffer)[:12]}" * new)
        return "\n".join(rows)

    def register_hook(self, state: object, hook: BufferHook, location: BufferHookLocation) -> None:
        """From now on `hook(state, {name: buffer})` does the work, around each training forward."""
        self._hook = state, hook, location

    def set_out_of_data(self, flag: bool | None) -> None:
        """Whether this rank has run out of data, where ranks may: its buffers don't count then. None: none may."""
        self._out_of_data = flag

    def set_options(self, options: Options) -> None:
        self._options = options

    def leave_to_shards(self) -> None:
        """From now on somebody else keeps them in step."""
        self._by_shards = True

    def move_to(self, transport: Transport) -> None:
        """Goes on over another group."""
        self._transport = transport

    # --- moments of a step -----------------------------------------------------------------------

    def before_forward(self) -> None:
        if self._options.buffers == "evaluation" and self._stale and not self._training.training:
            self._stale = False
            self.take_over()
        self._run_hook(BufferHookLocation.PRE_FORWARD)

    def after_forward(self) -> None:
        self._run_hook(BufferHookLocation.POST_FORWARD)

    def round_closed(self) -> None:
        self._stale = not self._by_shards
        if self._hook is not None or self._by_shards:
            return
        if self._options.buffers == "round":
            self.take_over()
        elif self._options.buffers == "average":
            self._average()

    # --- inside ----------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Overwrites this rank's buffers with those of the source rank, rank 0 unless chosen otherwise."""
        buffers = [buffer for _, buffer in self.named()]
        if buffers:
            self._transport.broadcast(buffers, self._source())

    def _source(self) -> int:
        if self._out_of_data is None:
            return self._options.buffers_from
        going_on = [
            rank for rank, (joined,) in enumerate(self._transport.gather([int(self._out_of_data)])) if not joined
        ]
        return going_on[0] if going_on else self._options.buffers_from

    def _average(self) -> None:
        """Floating buffers become their mean; counters and the like are taken over from the source rank."""
        named = self.named()
        rest = [buffer for _, buffer in named if not buffer.is_floating_point()]
        self._transport.broadcast(rest, self._options.buffers_from)
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for _, buffer in named:
            if buffer.is_floating_point() and buffer.numel():
                by_kind.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for group in by_kind.values():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in group])
            self._transport.reduce(flat, 1 / self._transport.size).wait()
            for buffer, mean in zip(group, flat.split([b.numel() for b in group]), strict=True):
                buffer.data.copy_(mean.view(buffer.shape))

    def _run_hook(self, location: BufferHookLocation) -> None:
        if self._hook is None or self._hook[2] is not location or not self._training.training:
            return
        state, hook, _ = self._hook
        named = dict(self.named())
        if named:
            for future in hook(state, named) or ():
                future.wait()
