"""A small GPT: gradient accumulation, clipping, a schedule, checkpoints, and resuming to the last bit.

gradsync run --ranks 2 examples/gpt.py --checkpoint gpt.pt
gradsync run --ranks 2 examples/gpt.py --checkpoint gpt.pt --steps 200  # goes on where the first one ended
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import gradsync

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 32, 32, 64, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of predicting each token from those before it."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), targets.flatten())


def make_batch(step: int, size: int) -> Tensor:
    """The whole batch of a step, the same on every rank: sequences that count up by one to three."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY, (size, 1), generator=generator)
    stride = torch.randint(1, 4, (size, 1), generator=generator)
    return (start + stride * torch.arange(CONTEXT + 1)) % VOCABULARY


def save(path: Path, **parts: object) -> None:
    """Through another file: whoever is interrupted leaves the old checkpoint or the new one, never half of one."""
    torch.save(parts, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def main(arguments: list[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps, counted from the very beginning")
    parser.add_argument("--batch", type=int, default=32, help="sequences in a step, over all ranks")
    parser.add_argument("--accumulate", type=int, default=2, help="backwards in a step")
    parser.add_argument("--checkpoint", type=Path, help="written at the end and every 50 steps; read if it is there")
    args = parser.parse_args(arguments)

    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
        device = torch.accelerator.current_accelerator() or device

    torch.manual_seed(0)
    model = gradsync.replicate(GPT().to(device))  # all ranks start with the parameters of rank 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.batch % (ranks * args.accumulate):
        parser.error(f"--batch {args.batch} can't be divided by {ranks} ranks x {args.accumulate} backwards")

    first = 0
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device)  # on all ranks
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["step"]

    for step in range(first, args.steps):
        mine = make_batch(step, args.batch)[rank::ranks].to(device)
        total = 0.0
        for index, tokens in enumerate(mine.chunk(args.accumulate)):
            model.set_requires_gradient_sync(index == args.accumulate - 1)  # the last backward synchronizes all of them
            loss = model(tokens) / args.accumulate
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step}  loss {total:.4f}", flush=True)
        if rank == 0 and args.checkpoint and ((step + 1) % 50 == 0 or step == args.steps - 1):
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            }
            save(args.checkpoint, step=step + 1, **state)
    gradsync.verify(model, optimizer)  # all ranks hold the same, to the last bit
    return model


if __name__ == "__main__":
    main()
