"""Random numbers that belong to a shard and a step, not to a process: Python's, numpy's and torch's.

What is drawn in a shard is the same wherever it is computed; outside of the shards each process goes on with its own.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


def seed_of(*numbers: int) -> int:
    """A seed for these numbers, 63 bits, unlike that of any others."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_all(seed: int) -> None:
    """All generators that code usually draws from, on this process's devices too."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])


class Outside:
    """What the generators of this process were at, to be put back."""

    def __init__(self) -> None:
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = None if numpy is None else numpy.random.get_state()
        self._device = _device_module()
        self._of_device = None if self._device is None else self._device.get_rng_state()

    def put_back(self) -> None:
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._device is not None:
            self._device.set_rng_state(self._of_device)


def _device_module() -> Any:
    """That of the current accelerator, if it has been used."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = None if found is None else torch.get_device_module(found)
    ready = module is not None and getattr(module, "is_initialized", lambda: True)()
    return module if ready and hasattr(module, "get_rng_state") else None
