"""Lightning Fabric: `Fabric(strategy=GradsyncStrategy())`. Needs `lightning` 2.6 or later."""

from __future__ import annotations

from lightning.fabric.strategies import DDPStrategy
from torch import nn

from gradsync.ddp import DistributedDataParallel


class GradsyncStrategy(DDPStrategy):
    """Fabric's `DDPStrategy` on gradsync's engine, in this Fabric alone.

    It takes what `DDPStrategy` takes; what that passes on to torch's class goes to `gradsync.DistributedDataParallel`,
    so `transport`, `verify`, `on_nonfinite` and the rest are options as well. A communication hook is registered on
    what `fabric.setup` returns: `model.register_comm_hook(...)`.
    """

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)
