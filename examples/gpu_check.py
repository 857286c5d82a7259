"""Looks at gradsync on your accelerators, in a minute, and prints a report that you can send us.

    gradsync run --ranks 2 examples/gpu_check.py

One rank for each device; on CPUs it runs as far as it goes. It trains a small stack of layers, compares the gradients
with those of one process on the whole batch, compares the replicas to the last bit, measures how much of the
communication is hidden by backward, and puts the time of a step beside that of torch's DDP.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync

RIVAL = "torch's DDP"


def pick_device() -> torch.device:
    """Each rank has a device of its own: the one with the number that it has on its host."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.accelerator.device_count():
        raise SystemExit(f"rank {local_rank} of this host has no device: there are {torch.accelerator.device_count()}")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def milliseconds(act: Callable[[], object], device: torch.device) -> float:
    """By events of the device, which tell when it has come to them; on a CPU by the clock."""
    if device.type == "cpu":
        began = time.perf_counter()
        act()
        return 1000 * (time.perf_counter() - began)
    begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    begin.record()
    act()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def batch(part: int, width: int, device: torch.device) -> Tensor:
    return torch.randn(16, width, generator=torch.Generator().manual_seed(part)).to(device)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def largest_error(model: nn.Module, plain: nn.Module, width: int, device: torch.device) -> float:
    """Between the gradients of all ranks together and those of one process, relative to the largest of each."""
    model.zero_grad()
    loss_of(model, batch(dist.get_rank(), width, device)).backward()
    for part in range(dist.get_world_size()):
        (loss_of(plain, batch(part, width, device)) / dist.get_world_size()).backward()
    errors = [0.0]
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        if found.grad is not None and wanted.grad is not None:
            difference = (found.grad - wanted.grad).abs().max() / wanted.grad.abs().max().clamp_min(1e-12)
            errors.append(difference.item())
    return max(errors)


def main(arguments: list[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each contender")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args(arguments)

    device = pick_device()
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(args.width, args.width), nn.Tanh()) for _ in range(args.layers)))
    plain.to(device)
    model = gradsync.replicate(copy.deepcopy(plain))
    beside = DistributedDataParallel(copy.deepcopy(plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    others_optimizer = torch.optim.SGD(beside.parameters(), lr=0.01)
    x = batch(dist.get_rank(), args.width, device)
    size = sum(parameter.numel() for parameter in plain.parameters())
    gradients = torch.zeros(size, device=device)

    def step(replica: nn.Module, its_optimizer: torch.optim.Optimizer) -> None:
        its_optimizer.zero_grad()
        loss_of(replica, x).backward()
        its_optimizer.step()

    def step_alone() -> None:
        with model.no_sync():
            loss_of(model, x).backward()

    error = largest_error(model, plain, args.width, device)
    contenders: dict[str, Callable[[], object]] = {
        "gradsync": lambda: step(model, optimizer),
        RIVAL: lambda: step(beside, others_optimizer),
        "without communication": step_alone,
        "communication alone": lambda: dist.all_reduce(gradients),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(args.steps + 3):  # in turns: what else the machine does meets all of them alike
        for name, act in contenders.items():
            optimizer.zero_grad()
            took = milliseconds(act, device)
            if number >= 3:
                times[name].append(took)
    model.zero_grad()
    gradsync.verify(model, optimizer)  # raises on all ranks if replicas differ
    if dist.get_rank() == 0:
        report(device, error, {name: statistics.median(each) for name, each in times.items()}, size)
    return model


def report(device: torch.device, error: float, times: dict[str, float], size: int) -> None:
    print(f"gradsync {gradsync.__version__}, torch {torch.__version__}, {dist.get_world_size()} ranks on {device.type}")
    print(f"backend      {dist.get_backend_config()}")
    print(f"model        {size} parameters")
    print(f"gradients    of all ranks beside one process: largest relative error {error:.1e}")
    print("replicas     equal to the last bit, with the state of their optimizers")
    for name, took in times.items():
        print(f"{name:22} {took:.3f} ms")
    hidden = times["without communication"] + times["communication alone"] - times["gradsync"]
    share = min(max(hidden / times["communication alone"], 0.0), 1.0)
    if device.type == "cpu":
        print("overlap      not measured: a CPU has no events, and gradsync has its own way inside a host")
    else:
        print(f"overlap      {share:.0%} of the communication is hidden by backward, by the device's events")
    print(f"beside DDP   {times['gradsync'] / times[RIVAL]:.2f} of its time for a step")


if __name__ == "__main__":
    main()
