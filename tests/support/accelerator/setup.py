"""Makes the stand-in torch's accelerator in this process, and its collectives a backend of c10d."""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.utils import backend_registration

from tests.support.accelerator import build
from tests.support.accelerator.kernels import Kernels
from tests.support.accelerator.timeline import Race, Timeline

__all__ = ["NAME", "Race", "install", "races", "reset", "waits_of_host"]

NAME = "standin"


class _Parts:
    """What lives as long as the process."""

    def __init__(self) -> None:
        backend_registration.rename_privateuse1_backend(NAME)
        self.device = build.load()
        self.timeline = Timeline(self.device)
        torch._register_device_module(NAME, _module())
        backend_registration.generate_methods_for_privateuse1_backend()
        self.kernels = Kernels(self.device, self.timeline, NAME)
        dist.Backend.register_backend(NAME, self._backend, devices=[NAME])

    def _backend(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        carrier = dist.ProcessGroupGloo(PrefixStore("carrier", store), rank, size, timeout)
        return self.device.DeviceBackend(carrier, rank, size, timeout.total_seconds())


@lru_cache(maxsize=1)
def install() -> Timeline:
    """From now on this process has two such devices."""
    return _Parts().timeline


def races() -> list[str]:
    """What the detector has found since the latest `reset`."""
    timeline = install()
    timeline.catch_up()
    return timeline.races


def reset() -> None:
    install().reset()


def waits_of_host() -> int:
    """How often the host has waited for a device since the latest `reset`."""
    timeline = install()
    timeline.catch_up()
    return timeline.host_waits


def _module() -> ModuleType:
    """`torch.standin`, as `torch.cuda`."""
    module = ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 4,
        "current_device": accelerator.current_device_index,
        "set_device": accelerator.set_device_index,
        "current_stream": accelerator.current_stream,
        "set_stream": accelerator.set_stream,
        "synchronize": accelerator.synchronize,
        "device": accelerator.device_index,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "stream": lambda stream: stream,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda: True,
    }.items():
        setattr(module, name, value)
    return module
