"""`gradsync run --elastic`: its options, in torchrun's words where it has some."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.run import config_from_args

WAIT_SECONDS = 300.0
RESTARTS = 3
# Of torchrun's, what makes no sense here.
_REFUSED = {"trace": None, "run_path": False}


def range_of(text: str) -> tuple[int, int] | None:
    """`2:4`, or `4`, which is 4:4. None if it is neither."""
    least, colon, most = str(text).partition(":")
    try:
        return int(least), int(most if colon else least)
    except ValueError:
        return None


def wrong_with(options: argparse.Namespace) -> str:
    if not options.elastic:
        return (
            "--wait says how long an elastic training waits for ranks, and goes with --elastic" if options.wait else ""
        )
    if options.wait is not None and not options.wait >= 0:
        return f"--wait must be 0 s or more, but is {options.wait:g}"
    if options.max_restarts is not None and options.max_restarts < 0:
        return f"--max-restarts must be 0 or more, but is {options.max_restarts}"
    for name, usual in _REFUSED.items():
        if getattr(options, name) != usual:
            return f"--{name.replace('_', '-')} does not go together with --elastic"
    if options.ranks is not None:
        least, most = range_of(options.ranks) or (1, 1)  # `run.py` has seen to that
        return "" if least <= most else f"--ranks {options.ranks} has more ranks at least than at most"
    hosts_least, hosts_most = range_of(options.nnodes) or (0, 0)
    if not 1 <= hosts_least <= hosts_most:
        return f"--nnodes must be a number of hosts, or LEAST:MOST, but is {options.nnodes}"
    if not str(options.nproc_per_node).isdigit() or int(options.nproc_per_node) < 1:
        return f"--nproc-per-node must be a number of ranks, but is {options.nproc_per_node}"
    if hosts_most > 1 and options.rdzv_backend != "c10d":
        return "several hosts meet by --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
    if hosts_most > 1 and not options.rdzv_endpoint:
        return "several hosts need --rdzv-endpoint HOST:PORT, where they meet: the same on all of them"
    return ""


def run(options: argparse.Namespace, command: Sequence[str], prog: str) -> int:
    """The exit code."""
    from gradsync.elastic.launcher import Job, launch  # which needs more of torch than `--help` should

    if options.ranks is not None or options.nnodes in ("1", "1:1"):
        least, most = range_of(options.ranks or options.nproc_per_node) or (1, 1)
        ranks_here, meeting = most, None
    else:
        ranks_here = int(options.nproc_per_node)
        least, most = (ranks_here * hosts for hosts in range_of(options.nnodes) or (1, 1))
        meeting = _meeting(options)
    return launch(
        Job(
            command=command,
            ranks_here=ranks_here,
            least=least,
            most=most,
            wait=WAIT_SECONDS if options.wait is None else options.wait,
            max_restarts=RESTARTS if options.max_restarts is None else options.max_restarts,
            meeting=meeting,
            prog=prog,
        )
    )


def _meeting(options: argparse.Namespace) -> RendezvousParameters:
    """Where hosts meet, as torchrun reads its options."""
    config, _, _ = config_from_args(argparse.Namespace(**{**vars(options), "max_restarts": 0}))
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
