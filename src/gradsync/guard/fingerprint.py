"""A digest of a module's values: equal digests mean bitwise equal replicas."""

from __future__ import annotations

import ctypes
import hashlib

from torch import Tensor, nn

from gradsync import _torch


def fingerprint(module: nn.Module) -> str:
    """Hex digest over names, shapes, dtypes and all bytes of the parameters and buffers of `module`.

    Local, without communication: compare the results of several ranks, or of two runs.
    """
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
