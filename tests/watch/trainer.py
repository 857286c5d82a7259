"""A training script as users write it, for tests that need real ends of real processes: `python -m` it, or torchrun.

Its arguments: the transport, the fault, and the rank that has it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradsync


def fail(fault: str) -> None:
    print("fault at", time.monotonic(), flush=True)  # noqa: T201
    if fault == "raise beside a thread":
        threading.Thread(target=threading.Event().wait).start()
    if fault.startswith("raise"):
        raise ValueError("the file is truncated")
    if fault == "exit":
        sys.exit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def main(transport: Any, fault: str, doomed: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = gradsync.replicate(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        if step == 4 and dist.get_rank() == doomed:
            if fault == "end":
                break
            fail(fault)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.05)
    print("trained", flush=True)  # noqa: T201


def in_child(number: int, *args: Any) -> None:
    """For `mp.spawn`."""
    os.environ.update(RANK=str(number), WORLD_SIZE="2")
    main(*args)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
