"""LoRA: a frozen model, and low-rank adapters that are all that is trained, synchronized and saved.

gradsync run --ranks 2 examples/lora.py --out adapters.pt
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import gradsync

WIDTH = 128


class LoRA(nn.Module):
    """A linear layer that stays as it is, plus the product of two thin matrices; zero at the start."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def adapt(model: nn.Module, rank: int) -> nn.Module:
    """Freezes a model, and puts an adapter around each of its linear layers."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, LoRA(child, rank))
    return model


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """What there is to save: load it with `model.load_state_dict(..., strict=False)`."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def pretrained() -> nn.Module:
    """Stands for a model that somebody has trained."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))


def new_task(model: nn.Module) -> nn.Module:
    """What is to be learned: the same model with weights that differ by a matrix of rank 2."""
    teacher = copy.deepcopy(model).requires_grad_(False)
    for layer in teacher:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            layer.weight += torch.randn(layer.out_features, 2) @ torch.randn(2, WIDTH) / WIDTH**0.5
    return teacher


def main(arguments: list[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="examples in a step, on each rank")
    parser.add_argument("--rank", type=int, default=4, help="of the adapters")
    parser.add_argument("--out", type=Path, help="where to save the adapters")
    args = parser.parse_args(arguments)

    base = pretrained()
    teacher = new_task(base)
    model = gradsync.replicate(adapt(base, args.rank))  # frozen parameters take no part in any round
    optimizer = torch.optim.AdamW(adapters_of := [p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data = torch.Generator().manual_seed(1 + dist.get_rank())  # each rank its own examples
    for step in range(args.steps):
        x = torch.randn(args.batch, WIDTH, generator=data)
        loss = F.mse_loss(model(x), teacher(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step % 20 == 0 or step == args.steps - 1):
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
    gradsync.verify(model, optimizer)
    if dist.get_rank() == 0:
        trained, everything = (sum(p.numel() for p in some) for some in (adapters_of, model.parameters()))
        print(f"trained and synchronized {trained:,} of {everything:,} parameters")
        if args.out:
            torch.save(adapters(model), args.out)
    return model


if __name__ == "__main__":
    main()
