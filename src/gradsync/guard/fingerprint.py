"""Digests of a module's values: equal digests mean bitwise equal replicas."""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from functools import lru_cache

import torch
from torch import Tensor, nn

from gradsync import _torch, arguments

_WORD = 8  # bytes
_Memory = ctypes.c_ubyte * (1 << 46)  # one type for all sizes: making one takes longer than a small checksum
COLUMNS = 1021  # a prime, which no matrix's width is a multiple of


def fingerprint(module: nn.Module) -> str:
    """Hex digest over names, shapes, dtypes and all bytes of the parameters and buffers of `module`.

    Local, without communication: compare the results of several ranks, or of two runs.
    """
    arguments.module(module, "fingerprint()")
    whole = hashlib.sha256()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        whole.update(f"{name} {digest(tensor)}\n".encode())
    return whole.hexdigest()


def digest(tensor: Tensor) -> str:
    """Hex digest over shape, dtype and all bytes of this rank's tensor."""
    values = _torch.local(tensor).detach().cpu().contiguous()
    found = hashlib.sha256(f"{list(values.shape)} {values.dtype}\n".encode())
    if values.nbytes:
        found.update(ctypes.string_at(values.data_ptr(), values.nbytes))
    return found.hexdigest()


def crc32_at(address: int, nbytes: int, before: int = 0) -> int:
    """Of memory that the host can read; `before`: of what comes before it."""
    return zlib.crc32(memoryview(_Memory.from_address(address))[:nbytes], before) if nbytes else before


@torch.no_grad()
def checksum(flat: Tensor) -> Tensor:
    """A number that almost certainly differs if any bit of a flat tensor does; for devices whose memory is their own.

    Computed there, and nobody waits for it: words are added up in columns, and each column counts an odd number of
    times. Rows of a matrix begin in different columns.
    """
    words = _words(flat)
    weights = _weights(words.device)
    rows = len(words) // COLUMNS
    rows -= rows % 2 == 0 and rows > 0  # an odd number: the uppermost bits of all of them don't cancel in the sum
    whole = rows * COLUMNS
    found = torch.dot(_mixed(words[whole:]), weights[: len(words) - whole])
    return found + torch.dot(_mixed(words[:whole].view(rows, COLUMNS).sum(0)), weights[:COLUMNS]) if whole else found


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of this rank's tensor as they lie in memory, flat; a copy if there are gaps between them."""
    values = _torch.local(tensor).detach()
    if not values.is_contiguous():
        order = sorted(range(values.dim()), key=values.stride, reverse=True)
        values = values.permute(order)
    return values.reshape(-1)


def _mixed(words: Tensor) -> Tensor:
    """With the upper bits in the lower ones too: times a number, the uppermost says no more than odd or even."""
    return words ^ (words >> 31)


def _words(flat: Tensor) -> Tensor:
    """The bytes as words, filled up with zeros."""
    size = flat.element_size()
    if flat.nbytes % _WORD == 0 and flat.storage_offset() * size % _WORD == 0:
        return flat.view(torch.int64)
    padded = torch.zeros(-(-flat.nbytes // _WORD) * _WORD, dtype=torch.uint8, device=flat.device)
    padded[: flat.nbytes].copy_(flat.clone().view(torch.uint8))
    return padded.view(torch.int64)


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Odd numbers of 64 bits in no order: the products of a counter with another odd number."""
    with torch.inference_mode(False):
        return torch.arange(1, 2 * COLUMNS + 1, device=device) * 0x1E3779B97F4A7C15 | 1
