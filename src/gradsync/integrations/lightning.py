"""Lightning's Trainer: `Trainer(strategy=GradsyncStrategy())`. Needs `lightning` 2.6 or later."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from gradsync.ddp import DistributedDataParallel


class GradsyncStrategy(DDPStrategy):
    """Lightning's `DDPStrategy` on gradsync's engine, in this Trainer alone.

    It takes what `DDPStrategy` takes; what that passes on to torch's class goes to `gradsync.DistributedDataParallel`,
    so `transport`, `verify`, `on_nonfinite` and the rest are options as well. Ranks may be started in any way of
    Lightning's, `start_method="spawn"` and `"fork"` (for notebooks) included.
    """

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        """On every device: Lightning leaves communication hooks out unless that is a GPU, and does not say so."""
        if self._ddp_comm_hook is not None:
            wrapper = self._ddp_comm_wrapper
            hook = self._ddp_comm_hook if wrapper is None else wrapper(self._ddp_comm_hook)
            self.model.register_comm_hook(self._ddp_comm_state, hook)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """With manual optimization Lightning prepares torch's reducer for a backward here. Ours needs no telling."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """As above, for the first backward of a static graph."""
