"""A GAN: two replicated modules and two optimizers that take turns.

    gradsync run --ranks 2 examples/gan.py

The generator's backward passes through the discriminator and leaves gradients there that nobody wants: `no_sync` keeps
them on this rank, and `zero_grad` drops them.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import gradsync

NOISE, MODES, RADIUS, SPREAD = 8, 8, 2.0, 0.1


def make_points(count: int, generator: torch.Generator) -> Tensor:
    """Points around eight places on a circle."""
    angle = torch.randint(0, MODES, (count,), generator=generator) * (2 * math.pi / MODES)
    places = RADIUS * torch.stack([angle.cos(), angle.sin()], 1)
    return places + SPREAD * torch.randn(count, 2, generator=generator)


def distance(fake: Tensor, real: Tensor) -> float:
    """Energy distance between two sets of points: 0 if they come from the same source."""
    return (2 * torch.cdist(fake, real).mean() - torch.cdist(fake, fake).mean() - torch.cdist(real, real).mean()).item()


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(), nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, outputs)
    )


def main(arguments: list[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=128, help="points in a step, on each rank")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    generator = gradsync.replicate(mlp(NOISE, 2))
    discriminator = gradsync.replicate(mlp(2, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    random = torch.Generator().manual_seed(dist.get_rank())  # each rank its own points
    for step in range(args.steps):
        real = make_points(args.batch, random)
        fake = generator(torch.randn(args.batch, NOISE, generator=random))

        discriminator_optimizer.zero_grad()
        judged_real, judged_fake = discriminator(real), discriminator(fake.detach())
        (F.softplus(-judged_real).mean() + F.softplus(judged_fake).mean()).backward()
        discriminator_optimizer.step()

        generator_optimizer.zero_grad()
        with discriminator.no_sync():
            F.softplus(-discriminator(fake)).mean().backward()
        generator_optimizer.step()

        if dist.get_rank() == 0 and (step % 100 == 0 or step == args.steps - 1):
            with torch.no_grad():
                apart = distance(generator(torch.randn(1000, NOISE)), make_points(1000, random))
            print(f"step {step}  distance {apart:.4f}", flush=True)
    gradsync.verify(generator, generator_optimizer)
    gradsync.verify(discriminator, discriminator_optimizer)
    return nn.ModuleList([generator, discriminator])


if __name__ == "__main__":
    main()
