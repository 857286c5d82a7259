"""torchrun starts a job again (`--max-restarts`), and keeps its store: what the ranks of the last start wrote is there.

torch's own `init_process_group` then finds the addresses of processes that have ended, and connects to them (torch
2.13: the agent's store is handed to the ranks without a prefix for the attempt). Keys of ours are put apart here.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from gradsync._torch import Store

_COUNT, _SHARED = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"


def prefix() -> str:
    """Under which this start finds nothing of the last one; "" if this is the first, or the store is new.

    Not with several nodes: their agents count restarts each for itself, so that ranks would not meet.
    """
    environment = os.environ
    count = environment.get(_COUNT, "0")
    has_one_node = environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")
    return f"gradsync/restart/{count}" if count != "0" and has_agents_store() and has_one_node else ""


def has_agents_store() -> bool:
    """Whether torchrun keeps the store of the ranks, not rank 0."""
    return os.environ.get(_SHARED) == "True"


def apart(store: Store) -> Store:
    """The same store, without what the last start has left in it."""
    return dist.PrefixStore(prefix(), store) if prefix() else store  # type: ignore[attr-defined]


def store_of_the_agent() -> Store:
    """torchrun's, as its environment describes it."""
    host, port, size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    return dist.TCPStore(host, int(port), int(size), is_master=False, timeout=default_pg_timeout)  # type: ignore[attr-defined]
