"""gradsync keeps the replicas of a PyTorch module in step."""

from gradsync import errors
from gradsync._version import __version__
from gradsync.ddp import DistributedDataParallel
from gradsync.guard.fingerprint import fingerprint
from gradsync.guard.unsynchronised import allow_unsynchronised_steps
from gradsync.observe.statistics import Statistics
from gradsync.options import Options
from gradsync.replica import statistics
from gradsync.replicate import ReplicateModule, register_forward_method, replicate, unreplicate

__all__ = [
    "DistributedDataParallel",
    "Options",
    "ReplicateModule",
    "Statistics",
    "__version__",
    "allow_unsynchronised_steps",
    "errors",
    "fingerprint",
    "register_forward_method",
    "replicate",
    "statistics",
    "unreplicate",
]
