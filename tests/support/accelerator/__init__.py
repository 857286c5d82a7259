"""A stand-in for an accelerator: a device whose memory the host may not touch, with streams, events and collectives.

It computes on the CPU, so results are real. What it is for is order:

- Memory (`device.cpp`): tensors have addresses that no host code may read or write; it ends the process. The same pages
  lie a second time where only the kernels know of them. Freed memory is not used again.
- Streams and events: torch's own for any accelerator (`torch.Stream`, `torch.Event`, `torch.accelerator`), so that
  autograd runs backward on the streams of forward, and waits for them at the end, by its own code. There are four
  devices, and autograd has a thread for each. What is recorded is who waits for whom.
- Collectives (`backend.cpp`): queued on a stream of their own behind the caller's; `wait()` orders streams and does not
  stop the host; futures complete in stream order. A thread carries them out, over gloo, when their stream has come to
  them.
- Kernels (`kernels.py`): all of aten, on the CPU, when they are launched and their stream has come to its end.
- The detector (`timeline.py`): any two accesses to the same memory that no event and no wait of the host orders are an
  error, on every run, whatever came first. Freeing memory is an access too.

(torch can also be given such a device in Python alone. But its guard, as of 2.13, knows one device and one stream, so
that what autograd orders could not be seen; the guard is what is in C++ here.)
"""

from tests.support.accelerator.setup import NAME, Race, install, races, reset, waits_of_host

__all__ = ["NAME", "Race", "install", "races", "reset", "waits_of_host"]
