"""A small convolutional net: mixed precision by autocast, batch norm over all ranks, evaluation by all ranks.

    gradsync run --ranks 2 examples/image_classifier.py

On GPUs: float16 with a GradScaler, and SyncBatchNorm. On the CPU, for which torch has no SyncBatchNorm: bfloat16, and
plain batch norm whose running statistics are averaged over the ranks.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradsync

CLASSES, SIZE = 10, 16


def make_images(count: int, seed: int) -> TensorDataset:
    """A pattern for each class, shifted and under noise."""
    patterns = torch.randn(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    shifts = torch.randint(-2, 3, (count, 2), generator=generator).tolist()
    images = torch.stack([patterns[label].roll(shift, (1, 2)) for label, shift in zip(labels, shifts, strict=True)])
    return TensorDataset(images + torch.randn(images.shape, generator=generator), labels)


def make_net() -> nn.Sequential:
    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*stage(1, 16), *stage(16, 32), nn.Flatten(), nn.Linear(32 * (SIZE // 4) ** 2, CLASSES))


def batches(images: TensorDataset, size: int) -> Iterator[list[Tensor]]:
    """This rank's part of the images, for ever, in another order each time."""
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(images)
    loader = DataLoader(images, size, sampler=sampler, drop_last=True)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def accuracy(model: nn.Module, images: TensorDataset, device: torch.device) -> float:
    """Each rank looks at its part; what is added up is the same everywhere."""
    model.eval()
    x, labels = (tensor[dist.get_rank() :: dist.get_world_size()].to(device) for tensor in images.tensors)
    with torch.no_grad():
        right = (model(x).argmax(1) == labels).sum()
    dist.all_reduce(right)
    model.train()
    return right.item() / len(images)


def main(arguments: list[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="images in a step, on each rank")
    args = parser.parse_args(arguments)

    device, on_gpu = torch.device("cpu"), torch.accelerator.is_available()
    torch.manual_seed(0)
    model = make_net()
    if on_gpu:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
        device = torch.accelerator.current_accelerator() or device
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
    replica = gradsync.replicate(model, buffers="round" if on_gpu else "average")
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=on_gpu)  # without a GPU it passes everything on
    rank = dist.get_rank()

    training, held_out = make_images(2048, seed=1), make_images(512, seed=2)
    for step, (x, labels) in enumerate(itertools.islice(batches(training, args.batch), args.steps)):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16 if on_gpu else torch.bfloat16):
            loss = F.cross_entropy(replica(x.to(device)), labels.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # skips a step whose gradients overflowed: they are the same on all ranks
        scaler.update()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
    found = accuracy(replica, held_out, device)
    if rank == 0:
        print(f"accuracy {found:.3f} on images that were held out")
    gradsync.verify(replica, optimizer)
    return replica


if __name__ == "__main__":
    main()
