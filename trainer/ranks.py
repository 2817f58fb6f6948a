"""Who this process is among the ranks, on which device, and the few things that ranks tell each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.errors import Error, UsageError
from pipeline.text import one_line


@dataclass(frozen=True)
class Ranks:
    """Place of this process in the run, as torchrun's environment gives it; a plain process is rank 0 of 1."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_env(cls) -> Ranks:
        """Raises UsageError for variables that torchrun wouldn't set so, with which ranks would wait for ever."""
        values = {}
        for field in fields(cls):
            name = field.name.upper()
            text = os.environ.get(name, str(field.default))
            if not (text.isascii() and text.isdigit()):
                raise UsageError(f"{name}={text!r} in the environment: must be a whole number; start with torchrun")
            values[field.name] = int(text)
        ranks = cls(**values)
        if ranks.rank >= ranks.world_size:
            raise UsageError(
                f"RANK={ranks.rank} in the environment, WORLD_SIZE={ranks.world_size}: ranks count from 0, below the "
                "world size; start with torchrun"
            )
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if ranks.world_size > 1 and missing:
            raise UsageError(
                f"WORLD_SIZE={ranks.world_size} in the environment without {' and '.join(missing)}; start with torchrun"
            )
        return ranks

    def device(self, name: str) -> torch.device:
        """This rank's device. `name` is `auto` or a device type.

        Raises:
            UsageError: the device isn't there.
        """
        found = torch.accelerator.current_accelerator(check_available=True)
        kind = name if name != "auto" else found.type if found else "cpu"
        if kind == "cpu":
            return torch.device("cpu")
        if found is None or kind != found.type:
            have = f"cpu and {found.type}" if found else "cpu only"
            raise UsageError(f"--device {name}: not available on this machine ({have}); use --device auto")
        if self.local_rank >= torch.accelerator.device_count():
            raise UsageError(
                f"local rank {self.local_rank}, but {torch.accelerator.device_count()} {kind} device(s) on this "
                "machine: start fewer with --nproc-per-node, or use --device cpu"
            )
        torch.accelerator.set_device_index(self.local_rank)
        return torch.device(kind, self.local_rank)


def device_name(device: torch.device) -> str:
    """The GPU's product name; of other devices the type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextlib.contextmanager
def process_group(ranks: Ranks, device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """The process group for the block: gloo for tensors on the CPU, and the accelerator's own backend beside it.

    Raises:
        Error: it didn't form.
    """
    if ranks.world_size == 1:
        yield
        return
    backend = "cpu:gloo"
    if device.type != "cpu":
        backend += f",{device.type}:{dist.get_default_backend_for_device(device)}"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    except Exception as error:  # torch raises its own kinds, ValueError and RuntimeError
        reason = one_line(error)[:200]
        raise Error(
            f"the group of {ranks.world_size} ranks didn't form within --timeout {timeout_seconds:g} seconds "
            f"({reason}); check that all were started, and can reach the first"
        ) from error
    try:
        yield
    except Error as error:
        if error.exit_code >= 128:  # a signal, on which all ranks agreed
            dist.destroy_process_group()
        raise  # after an error of one rank alone, destroying might wait for the others for ever
    dist.destroy_process_group()


def all_gather(values: Sequence[float] | np.ndarray, ranks: Ranks) -> np.ndarray:
    """Collect equally many numbers from each rank: float64 (ranks, n), the same on all."""
    mine = torch.tensor(values, dtype=torch.float64)
    if ranks.world_size == 1:
        return mine[None].numpy()
    rows = [torch.empty_like(mine) for _ in range(ranks.world_size)]
    dist.all_gather(rows, mine)
    return torch.stack(rows).numpy()


def broadcast_object(value: Any, ranks: Ranks) -> Any:
    """Rank 0's value, on every rank."""
    if ranks.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]
