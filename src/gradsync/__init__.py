"""gradsync keeps the replicas of a PyTorch module in step."""

from torch import nn as _nn

from gradsync import errors
from gradsync._version import __version__
from gradsync.ddp import DistributedDataParallel
from gradsync.guard.fingerprint import fingerprint
from gradsync.observe.statistics import Statistics
from gradsync.replicate import ReplicateModule, engine_of, replicate, unreplicate


def statistics(module: _nn.Module) -> Statistics:
    """What the rounds of a replicated module have cost so far."""
    return engine_of(module).statistics


__all__ = [
    "DistributedDataParallel",
    "ReplicateModule",
    "Statistics",
    "__version__",
    "errors",
    "fingerprint",
    "replicate",
    "statistics",
    "unreplicate",
]
