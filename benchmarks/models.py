"""What is trained while steps are measured: five models that stress five different things."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradsync.cli.gpt import GPT, Shape, next_character_loss

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Model:
    """`loss` takes the module under whatever wrapper, and a batch."""

    key: str
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def classify(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


# --- a GPT: many matrices of a medium size ----------------------------------------------------------------

GPT_SHAPE = Shape(vocabulary=128, context=64, layers=8, heads=8, width=320)


def text_batch(generator: torch.Generator) -> Batch:
    tokens = torch.randint(GPT_SHAPE.vocabulary, (4, GPT_SHAPE.context + 1), generator=generator)
    return tokens, tokens


def text_loss(module: nn.Module, batch: Batch) -> Tensor:
    return next_character_loss(module, batch[0])


# --- an MLP: few large matrices, next to no arithmetic for each number ------------------------------------

MLP_WIDTH = 2048


def make_mlp(width: int = MLP_WIDTH, layers: int = 8) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(layers - 1)),
        nn.Linear(width, width, bias=False),
    )


# --- 1,000 small parameters: the cost of each -------------------------------------------------------------


class Residual(nn.Module):
    """So that 500 layers on top of each other still pass on a gradient."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


def make_small(layers: int = 500, width: int = 32, per_block: int = 25) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(*(Residual(nn.Linear(width, width), nn.Tanh()) for _ in range(per_block)))

    module = nn.Sequential(*(block() for _ in range(layers // per_block)))
    for parameter in module.parameters():
        parameter.data.mul_(0.1)
    return module


# --- a ResNet: batch normalization, whose buffers are kept in step too -------------------------------------


class ConvBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.skip = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + self.skip(x))


def make_conv(widths: tuple[int, ...] = (64, 128, 256, 512)) -> nn.Module:
    blocks: list[nn.Module] = []
    inside = 3
    for outside in widths:
        blocks += [ConvBlock(inside, outside, 2), ConvBlock(outside, outside, 1)]
        inside = outside
    return nn.Sequential(*blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10)))


# --- an embedding: one huge dense gradient that is complete only at the very end ---------------------------


def make_embedding(words: int = 100_000, width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.EmbeddingBag(words, width), nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 100))
    )


def numbers_batch(generator: torch.Generator, *, rows: int, shape: tuple[int, ...], classes: int) -> Batch:
    return torch.randn(rows, *shape, generator=generator), torch.randint(classes, (rows,), generator=generator)


def words_batch(generator: torch.Generator, *, rows: int, length: int, words: int) -> Batch:
    return torch.randint(words, (rows, length), generator=generator), torch.randint(100, (rows,), generator=generator)


MODELS = (
    Model("gpt", "GPT", partial(GPT, GPT_SHAPE), text_batch, text_loss),
    Model("mlp", "MLP", make_mlp, partial(numbers_batch, rows=64, shape=(MLP_WIDTH,), classes=10), classify),
    Model("small", "1,000 small", make_small, partial(numbers_batch, rows=64, shape=(32,), classes=10), classify),
    Model("conv", "ResNet", make_conv, partial(numbers_batch, rows=8, shape=(3, 32, 32), classes=10), classify),
    Model("embedding", "embedding", make_embedding, partial(words_batch, rows=256, length=16, words=100_000), classify),
)


def model(key: str) -> Model:
    return next(m for m in MODELS if m.key == key)
