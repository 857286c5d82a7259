"""What torch's `Join` context asks of a replicated module, for both fronts.

`Join` knows its members by four names and never by their class. It keeps its settings on each member; here
they go to the engine, so that nothing is added to a module that is copied, pickled or asked for its names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook

from gradsync import _torch
from gradsync.engine.uneven import Joining, ShadowHook, left_alone
from gradsync.errors import GradsyncError, InvalidOptionError
from gradsync.replica import engine_of, engines_in

if TYPE_CHECKING:
    from gradsync.engine.engine import Engine


class JoinableReplica:
    """The part of a replica that `Join` talks to."""

    if TYPE_CHECKING:

        @property
        def _engine(self) -> Engine: ...

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank without data does; `divide_by_initial_world_size` says whether it counts in the mean."""
        assert isinstance(self, nn.Module)
        _check_one_engine(self)
        return ShadowHook(self._engine, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """Where `Join` puts the numbers that it exchanges."""
        return next((entry.parameter.device for entry in self._engine.managed.entries), torch.device("cpu"))

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group that the module was replicated over; all members of a context must have the same."""
        group: dist.ProcessGroup = self._engine.process_group
        return group

    @property
    def _join_config(self) -> Any:
        joining = self._engine.joining
        return _torch.outside_of_join() if joining is None else joining.config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        engine = self._engine
        engine.join(None)
        if config.enable:
            _check_statistics(engine, config)
            engine.join(Joining(engine, self, config))


class NamedJoin(Join):
    """torch's `Join`, with an error that says what happened when another rank left the context by an exception."""

    def __init__(self, replica: Any, *settings: bool, **kwargs: Any) -> None:
        super().__init__([replica], *settings, **kwargs)
        self._replica = replica

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        except GradsyncError:
            raise
        except RuntimeError as error:
            if "exhausted all inputs" in str(error):
                raise
            raise left_alone(self._replica._engine.transport, error) from error


def _check_statistics(engine: Engine, config: Any) -> None:
    layers = (layer for module in engine.modules for layer in module.modules())
    trains = any(isinstance(layer, nn.SyncBatchNorm) and layer.training for layer in layers)
    if trains and not config.throw_on_early_termination:
        raise InvalidOptionError(
            f"rank {engine.transport.rank}: SyncBatchNorm layers communicate in forward, which a rank without data "
            "can't shadow: the others would wait for it. Use Join with throw_on_early_termination=True, or "
            "gradsync.uneven(loader, module), in which every rank runs forward to the end."
        )


def _check_one_engine(module: nn.Module) -> None:
    """A rank without data takes part in the rounds of one engine at a time, and can't know the others' order."""
    engine = engine_of(module)
    if engine.modules[0] is not module and module in engine.modules:
        raise InvalidOptionError(
            f"{type(module).__name__} was replicated together with others in a list: give Join the first of them, "
            f"the {type(engine.modules[0]).__name__}, which speaks for all."
        )
    inside = [other for other in engines_in(module) if other is not engine]
    if inside:
        raise InvalidOptionError(
            f"{type(module).__name__} contains {len(inside)} submodule(s) that were replicated by themselves "
            f"({', '.join(sorted({type(other.module).__name__ for other in inside}))}), and Join can shadow one "
            "replica only. Replicate the whole module with one call, or use gradsync.uneven(loader, module), which "
            "has no such limit."
        )
