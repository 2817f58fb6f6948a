"""A stand-in for CUDA's streams, events and memory, so that code for them runs, and fails, on a CPU.

Work that is put on a stream is done as late as the events allow, or at random moments: `run` makes the choice. Until
then a copy's target holds poison, and its source is read only when the copy is done. Freed device memory is used again
for the next allocation on the same stream, at once, as torch's caching allocator does: a reader on another stream is
safe only after `record_stream`. A thread begins with the first device.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

POISON = 0xEE


class Stream:
    """A queue of jobs, of which `done` have run. `clock` is the simulated second at which the last one ended."""

    def __init__(self, double: Double, device: torch.device) -> None:
        self.double, self.device = double, device
        self.jobs: list[tuple[Callable[[], Any], float, float]] = []  # work, when it was put here, seconds it takes
        self.done, self.clock = 0, 0.0
        double.streams.append(self)

    def __enter__(self) -> None:
        self.double.stack().append(self)

    def __exit__(self, *_: object) -> None:
        self.double.stack().pop()

    def put(self, work: Callable[[], Any], seconds: float = 0.0) -> None:
        with self.double.lock:
            self.jobs.append((work, self.double.now, seconds))

    def wait_event(self, event: Event) -> None:
        def wait() -> None:
            event.synchronize()
            self.clock = max(self.clock, event.reached)

        self.put(wait)

    def advance(self, until: int) -> None:
        while self.done < until:
            work, put, seconds = self.jobs[self.done]
            self.done += 1
            self.clock = max(self.clock, put) + seconds
            work()


class Event:
    """A place in a stream, and when the stream reached it."""

    def __init__(self, double: Double, enable_timing: bool) -> None:
        self.double, self.timed = double, enable_timing
        self.stream: Stream | None = None
        self.place, self.reached = 0, 0.0

    def record(self, stream: Stream) -> None:
        with self.double.lock:
            stream.put(lambda: setattr(self, "reached", stream.clock))
            self.stream, self.place = stream, len(stream.jobs)

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.place

    def synchronize(self) -> None:
        with self.double.lock:
            if self.stream is not None:
                self.stream.advance(self.place)

    def elapsed_time(self, other: Event) -> float:
        assert self.timed
        assert other.timed
        return 1000 * (other.reached - self.reached)


class Double:
    """The devices, and what went wrong on them.

    Args:
        seed: 0 does all work as late as possible; others do some at random moments.

    Attributes:
        faults: what real hardware would take silently: waits on pageable memory, contexts on another rank's device.
        now: the host's clock in simulated seconds.
        allocated: bytes of device memory taken so far and never given back, as `torch.cuda.memory_reserved`.
    """

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self.local = threading.local()
        self.random = random.Random(seed) if seed else None
        self.streams: list[Stream] = []
        self.default: dict[int, Stream] = {}
        self.pinned: dict[int, torch.Tensor] = {}
        self.free: dict[tuple[Stream, int], list[np.ndarray]] = defaultdict(list)
        self.used_by: dict[int, set[Stream]] = defaultdict(set)
        self.pending: dict[int, list[tuple[Stream, int]]] = {}
        self.faults: set[str] = set()
        self.now = 0.0
        self.allocated = 0

    def stack(self) -> list[Stream]:
        if not hasattr(self.local, "stack"):
            self.local.stack = []
        return self.local.stack

    def current_stream(self, device: torch.device) -> Stream:
        with self.lock:
            if self.stack():
                return self.stack()[-1]
            if device.index not in self.default:
                self.default[device.index] = Stream(self, device)
            return self.default[device.index]

    def run(self) -> None:
        """Let the streams do some work, or none."""
        with self.lock:
            for _ in range(self.random.randrange(3) if self.random else 0):
                stream = self.random.choice(self.streams) if self.streams else None
                if stream is not None and stream.done < len(stream.jobs):
                    stream.advance(stream.done + 1)

    def finish(self) -> None:
        with self.lock:
            for stream in self.streams:
                stream.advance(len(stream.jobs))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if getattr(self.local, "device", 0) != 1:
            self.faults.add("a context on the first device")
        self.pinned[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that its address stays its own
        return tensor

    def copy(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        with self.lock:
            if source.untyped_storage().data_ptr() not in self.pinned:
                self.faults.add("an asynchronous copy from pageable memory")
            stream = self.current_stream(device)
            count = source.numel() * source.element_size()
            block = self._allocate(stream, count)
            view = block[:]  # the storage refers to this array object, and nothing else does
            target = torch.from_numpy(view).view(source.dtype).view(source.shape)
            weakref.finalize(view, self._release, block, stream).atexit = False

            def job() -> None:
                block[:] = source.contiguous().view(-1).view(torch.uint8).numpy()

            stream.put(lambda: block.fill(POISON))
            stream.put(job)
        self.run()
        return target

    def _allocate(self, stream: Stream, count: int) -> np.ndarray:
        for k, block in enumerate(self.free[stream, count]):
            if all(user.done >= place for user, place in self.pending.get(block.ctypes.data, [])):
                return self.free[stream, count].pop(k)
        self.allocated += count
        return np.full(count, POISON, np.uint8)

    def _release(self, block: np.ndarray, stream: Stream) -> None:
        with self.lock:
            address = block.ctypes.data
            self.pending[address] = [(user, len(user.jobs)) for user in self.used_by.pop(address, ())]
            self.free[stream, len(block)].append(block)


@contextmanager
def cuda_double(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Double]:
    """Two CUDA devices, within the block."""
    double = Double(seed)
    empty, to = torch.empty, torch.Tensor.to

    def fake_empty(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = empty(*args, **options)
        return double.pin(tensor) if pin_memory else tensor

    def fake_to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        on_cuda = args and isinstance(args[0], torch.device) and args[0].type == "cuda"
        return double.copy(tensor, args[0]) if on_cuda else to(tensor, *args, **options)

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        double.used_by[tensor.untyped_storage().data_ptr()].add(stream)

    def set_device_index(device: torch.device) -> None:
        double.local.device = device.index

    with monkeypatch.context() as patch:
        patch.setattr(torch, "Stream", lambda device: Stream(double, device))
        patch.setattr(torch, "Event", lambda device, enable_timing=False: Event(double, enable_timing))
        patch.setattr(torch, "empty", fake_empty)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.accelerator, "current_stream", double.current_stream)
        patch.setattr(torch.accelerator, "set_device_index", set_device_index)
        patch.setattr(torch.Tensor, "to", fake_to)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: double.pin(tensor.clone()))
        patch.setattr(torch.Tensor, "record_stream", record_stream)
        yield double
