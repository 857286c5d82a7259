"""One replicated module's life: made, stepped through rounds, taken apart.

The engine owns the parts and connects them to the module; it has no algorithm of its own. Both
fronts, `replicate` and `DistributedDataParallel`, make one of these and add nothing to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from gradsync import _torch
from gradsync.engine.buffers import Buffers
from gradsync.engine.outputs import tensors_in
from gradsync.engine.plan import Spec, gradient_stride
from gradsync.engine.reducer import Reducer
from gradsync.guard.start import check_module, check_same_model
from gradsync.observe.statistics import Statistics
from gradsync.options import Options
from gradsync.transport.base import Transport


class Engine:
    """Keeps the replicas of `module` in step over `transport`."""

    def __init__(self, module: nn.Module, transport: Transport, options: Options) -> None:
        self.transport = transport
        self.options = options
        self.statistics = Statistics()
        named = dict(module.named_parameters())
        check_module(named)
        self.names = [name for name, p in named.items() if p.requires_grad]
        self.parameters = [named[name] for name in self.names]
        self.buffers = Buffers(module, transport)
        self._start(named, module)
        self._reducer = Reducer(self.parameters, self._specs(module), transport, options)
        self._reducer.recorder = self.statistics.record
        if options.buffers == "round" and self.buffers.named():
            self._reducer.at_close = self.buffers.take_over
        self._handles = [
            module.register_forward_pre_hook(self._before_forward),
            module.register_forward_hook(self._after_forward),
        ]

    # --- what the fronts offer -------------------------------------------------------------------

    @property
    def synchronising(self) -> bool:
        return self._reducer.synchronising

    @synchronising.setter
    def synchronising(self, flag: bool) -> None:
        self._reducer.synchronise(flag)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate; the next one outside synchronises all of it."""
        before = self.synchronising
        self.synchronising = False
        try:
            yield
        finally:
            self.synchronising = before

    def disarm(self) -> None:
        """Leaves the module as if it had never been replicated."""
        self._reducer.disarm()
        for handle in self._handles:
            handle.remove()

    # --- inside ----------------------------------------------------------------------------------

    def _start(self, named: dict[str, nn.Parameter], module: nn.Module) -> None:
        """All ranks begin with rank 0's values, after it is certain that they hold the same model."""
        if self.options.init_sync:
            check_same_model(named, dict(self.buffers.named()), self.transport)
            self.transport.broadcast([p.detach() for p in named.values()], source=0)
            self.buffers.take_over()

    def _specs(self, module: nn.Module) -> list[Spec]:
        sparse = _sparse_parameters(module)
        return [
            Spec(name, tuple(p.shape), gradient_stride(p), p.dtype, p.device, p in sparse)
            for name, p in zip(self.names, self.parameters, strict=True)
        ]

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if _torch.current_graph_task() == _torch.NO_GRAPH_TASK:
            self._reducer.abandon()

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._output_reached)

    def _output_reached(self, gradient: Tensor) -> None:
        self._reducer.output_reached()


def _sparse_parameters(module: nn.Module) -> set[Tensor]:
    """Parameters whose gradients are sparse: those of embeddings made with `sparse=True`."""
    tables = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse)
    return {table.weight for table in tables}
