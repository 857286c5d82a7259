"""One rank of the start part of `python -m benchmarks footprint`: how long it takes to make replicas of a GPT."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.contenders import REPLICATE, TORCH, Contender
from benchmarks.models import model
from gradsync.cli.report import reporting

MODULE = "benchmarks.start_rank"
MEASURED = (REPLICATE, TORCH)


def broadcast(module: nn.Module) -> None:
    """What no way of making replicas can do without: rank 0's values on all ranks, in one piece."""
    tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
    flat = torch.cat([tensor.view(-1) for tensor in tensors])
    dist.broadcast(flat, 0)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [piece.view_as(t) for piece, t in zip(pieces, tensors, strict=True)])


def measure(prepare: Callable[[nn.Module], object], kept: list[object]) -> float:
    """Seconds for a fresh model. What came out is kept: taking it apart is not part of making the next one."""
    module = model("gpt").make()
    dist.barrier()
    began = time.perf_counter()
    kept.append(prepare(module))
    return time.perf_counter() - began


def beyond(contender: Contender, kept: list[object]) -> float:
    return measure(contender.wrap, kept) - measure(broadcast, kept)


def main() -> None:
    """The first time in a process costs more (imports, connections), and it is the one that users wait for."""
    with reporting() as report:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        kept: list[object] = []
        measure(broadcast, kept)  # connects the ranks
        for number in range(int(sys.argv[1])):
            for contender in MEASURED:
                report.send("made", contender=contender.key, first=number == 0, seconds=beyond(contender, kept))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
