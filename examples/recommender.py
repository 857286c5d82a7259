"""A recommender: large embedding tables with sparse gradients, of which only the rows in use travel and are stepped.

gradsync run --ranks 2 examples/recommender.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import gradsync

USERS, ITEMS, WIDTH = 2_000, 500, 16


class TwoTower(nn.Module):
    """Rates a user and an item by the product of what two towers make of their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = (nn.Embedding(count, WIDTH, sparse=True) for count in (USERS, ITEMS))
        self.user_tower, self.item_tower = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.user_tower(self.users(users)) * self.item_tower(self.items(items))).sum(-1)


class Ratings:
    """Likes and dislikes that follow from a few hidden properties; popular items come often."""

    def __init__(self, seed: int) -> None:
        hidden = torch.Generator().manual_seed(0)  # the same on all ranks
        self.tastes, self.properties = (torch.randn(count, 3, generator=hidden) for count in (USERS, ITEMS))
        self.random = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        users = torch.randint(0, USERS, (count,), generator=self.random)
        items = (ITEMS * torch.rand(count, generator=self.random).square()).long()
        liked = (self.tastes[users] * self.properties[items]).sum(-1) > 0
        return users, items, liked.float()


def main(arguments: list[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=512, help="ratings in a step, on each rank")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = gradsync.replicate(TwoTower())
    tables = [model.users.weight, model.items.weight]
    towers = [*model.user_tower.parameters(), *model.item_tower.parameters()]
    optimizers = [torch.optim.SparseAdam(tables, lr=2e-2), torch.optim.Adam(towers, lr=5e-3)]
    rank = dist.get_rank()
    training, held_out = Ratings(seed=1 + rank), Ratings(seed=1_000_000).draw(4096)
    for step in range(args.steps):
        users, items, liked = training.draw(args.batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(users, items), liked)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if rank == 0 and (step % 50 == 0 or step == args.steps - 1):
            touched = model.users.weight.grad.coalesce().indices().numel()  # by some rank
            print(f"step {step}  loss {loss.item():.4f}  rows of users in this step: {touched} of {USERS}", flush=True)
    with torch.no_grad():
        users, items, liked = held_out
        right = ((model(users, items) > 0) == (liked > 0)).float().mean().item()
    if rank == 0:
        print(f"accuracy {right:.3f} on ratings that were held out")
    for optimizer in optimizers:
        gradsync.verify(model, optimizer)
    return model


if __name__ == "__main__":
    main()
