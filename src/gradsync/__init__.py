"""gradsync keeps the replicas of a PyTorch module in step."""

from typing import TYPE_CHECKING, Any

from gradsync import contract, data, dropin, errors, observe, tensor_parallel
from gradsync._version import __version__
from gradsync.checkpoint import checkpoint
from gradsync.ddp import DistributedDataParallel
from gradsync.elastic.training import Elastic
from gradsync.guard.fingerprint import fingerprint
from gradsync.guard.unsynchronized import allow_unsynchronized_steps
from gradsync.invariant.shards import Shards
from gradsync.observe.statistics import Statistics
from gradsync.options import Options
from gradsync.replica import one_writer, overlap_optimizer, statistics, uneven, verify
from gradsync.replicate import ReplicateModule, register_forward_method, replicate, unreplicate
from gradsync.sharing.optimizer import share_optimizer
from gradsync.tracing.trace import trace

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

_POLICIES = ("CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy")


def __getattr__(name: str) -> Any:
    """torch's policies under our name, imported when they are asked for: their package takes a second."""
    if name in _POLICIES:
        from torch.distributed import fsdp

        return getattr(fsdp, name)
    raise AttributeError(f"module 'gradsync' has no attribute {name!r}")


__all__ = [
    "CPUOffloadPolicy",
    "DistributedDataParallel",
    "Elastic",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Options",
    "ReplicateModule",
    "Shards",
    "Statistics",
    "__version__",
    "allow_unsynchronized_steps",
    "checkpoint",
    "contract",
    "data",
    "dropin",
    "errors",
    "fingerprint",
    "observe",
    "one_writer",
    "overlap_optimizer",
    "register_forward_method",
    "replicate",
    "share_optimizer",
    "statistics",
    "tensor_parallel",
    "trace",
    "uneven",
    "unreplicate",
    "verify",
]
