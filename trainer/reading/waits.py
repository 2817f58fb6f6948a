"""How long training waits for data."""

from __future__ import annotations

import collections
import time

import torch


class Waits:
    """Adds up how long training waits for data, each time within the block.

    The caller's clock measures that on the CPU. A device that works through a queue of its own is idle from its last
    work before the block until it has passed the block's end, which events on its stream measure; while it is still
    busy, the caller may wait at no cost.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total = 0.0
        self._begun = 0.0
        self._pairs: collections.deque[list[torch.Event]] = collections.deque()

    def _record(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def __enter__(self) -> None:
        if self._device.type in ("cuda", "xpu"):
            self._pairs.append([self._record()])
        else:
            self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._device.type in ("cuda", "xpu"):
            self._pairs[-1].append(self._record())
        else:
            self._total += time.perf_counter() - self._begun

    def seconds(self) -> float:
        """All waits that have ended by now."""
        while self._pairs and len(self._pairs[0]) == 2 and self._pairs[0][1].query():
            begin, end = self._pairs.popleft()
            self._total += begin.elapsed_time(end) / 1000
        return self._total
