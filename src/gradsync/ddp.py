"""Front 2: `DistributedDataParallel(module)`, the wrapper with torch's name and signature."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from gradsync import contract
from gradsync.engine.engine import Engine
from gradsync.errors import UnsuitableModuleError
from gradsync.groups import resolve_group
from gradsync.options import Options
from gradsync.replicate import API
from gradsync.transport.process_group import ProcessGroupTransport


class DistributedDataParallel(nn.Module):
    """Wraps a module whose replicas are kept in step; `state_dict` keys get the prefix `module.`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        super().__init__()
        if not any(p.requires_grad for p in module.parameters()):
            raise UnsuitableModuleError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
                f"gradient, and this {type(module).__name__} has none. Use the module itself."
            )
        options = Options(
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            buffers="round" if broadcast_buffers else "never",
            init_sync=init_sync,
        )
        device_type = next(module.parameters()).device.type
        group = resolve_group(process_group, device_type)
        self.process_group = group
        self.module = module
        self._engine = Engine(module, ProcessGroupTransport(group), options)
        contract.enrol(self, API, self._engine)
        # The wrapped module may live on without us, and must then be an ordinary module again.
        weakref.finalize(self, self._engine.disarm)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate; the next one outside synchronises all of it."""
        with self._engine.no_sync():
            yield
